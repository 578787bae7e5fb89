"""The training data of a head: the texts that its target writes, and the target's hidden states for them.

The texts are written as users let the target write. It continues passages of books or articles. A chat model also
writes conversations: both the user's turns and the answers (Magpie, Xu et al., arXiv 2406.08464). Most of these begin
with a task about a passage instead, or with the first words of a question, because the questions that a small model
asks by itself are much alike. Then the target reads the texts once, and what it has computed is kept on disk, in parts.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.sharedWeights import RestrictedHead
from inputs.commandLine import one_line
from inputs.devices import pick_dtype
from inputs.files import replace_file
from inputs.hub import check_disk
from inputs.models import end_tokens, load_model, load_tokenizer, model_version, read_json
from inputs.progress import Bar
from inputs.texts import CHARACTERS, Corpus, encode, load_corpora, read_questions
from regrSampling import regrSampling
from scripts.headNetworks import LAYERS, tapped
from scripts.losses import SAMPLING, at_a_time, output_logits, sums_of
from scripts.trainBundled import read_documents
from utils import Sampling, UserError

WRITTEN = 2_000_000  # tokens of text that the target writes and reads
TEXTS = 128  # texts in a part, which is kept or computed again as a whole
HELD_OUT = 32  # texts that are not trained on: the first part
READ = 4  # texts that are read at a time
LENGTH = 1024  # tokens of a text at most, with its prompt
PROMPT = 16, 256  # tokens of a passage that the target continues, from and to
TOGETHER = 64  # texts that are written at a time: the others of a part wait until one ends
PLAIN = Sampling(1.0, 0, 1.0)  # the model's own distribution
PLAIN_SHARE = 0.2  # of the texts are drawn from it: the head must also guess for flags that are not the default ones
USER = Sampling(0.9, 0, 0.95)  # how users' turns are drawn: of many kinds, but not nonsense
CHATS = 0.7  # share of a chat model's texts that are conversations; the others continue passages
TURN = 160  # tokens of a user's turn at most
TURNS = 2  # of the user and of the model in a conversation, if there is room
ANSWER = 256  # tokens that a chat model writes at a time at most: a small one's longer texts repeat themselves
TASKS = 0.4  # share of conversations that begin with a task about a passage
STARTED = 0.6  # share of the users' turns which the target writes whose first words are given: its own are much alike
INSTRUCTIONS, STARTS = json.loads(Path(__file__).with_name("usersTurns.json").read_text(encoding="utf-8")).values()
PASSAGE = 200  # characters of a passage at least
FEWEST = 20  # passages without which no head is trained


class WrittenText(NamedTuple):
    """A text's token ids, and for each whether the target drew it with SAMPLING."""

    tokens: list[int]
    drawn: list[bool]

    def then(self, tokens: Sequence[int], drawn: bool = False) -> WrittenText:
        """The text with more tokens after it."""
        return WrittenText([*self.tokens, *tokens], [*self.drawn, *[drawn] * len(tokens)])


NOTHING = WrittenText([], [])


class TextWriter:
    """Writes texts with the target.

    passages: texts that it continues. questions: users' turns given by flag, or [].
    """

    def __init__(self, folder: Path, device: str, passages: Sequence[str], questions: Sequence[str], seed: int) -> None:
        self.tokenizer = load_tokenizer(folder)
        target = load_model(folder, self.tokenizer, pick_dtype(device), device)
        self.length = min(LENGTH, target.context)
        self.target = compiled(target) if device == "cpu" else target
        self.ends = end_tokens(folder, self.tokenizer)
        self.questions, self.seed = questions, seed
        self.pieces = chat_pieces(self.tokenizer) if self.tokenizer.chat_template else None
        different = list(dict.fromkeys(passages))  # A text of --texts that counts several times has each so often.
        first = set(random.Random(seed).sample(different, max(1, len(different) // 10)))
        self.held_out, self.trained_on = ([p for p in passages if (p in first) == held] for held in (True, False))

    def write(self, part: int, count: int) -> list[WrittenText]:
        """The texts of a part. Part 0 is held out: its passages are in no other part, and all is drawn with
        SAMPLING."""
        self.rng = random.Random(f"{self.seed} {part}")
        self.generator = torch.Generator().manual_seed(self.rng.randrange(1 << 40))
        self.passages = self.trained_on if part else self.held_out
        plain = round(PLAIN_SHARE * count) if part else 0
        texts = []
        for sampling, number_of_texts in (SAMPLING, count - plain), (PLAIN, plain):
            chats = round(CHATS * number_of_texts) if self.pieces else 0
            texts += self.conversations(chats, sampling)
            starts = [NOTHING.then(self.passage()) for _ in range(number_of_texts - chats)]
            texts += self.continued(starts, sampling, ANSWER if self.pieces else self.length)
        return texts

    def passage(self, task: str = "") -> list[int]:
        """Token ids of the beginning of a passage, after a task."""
        length = min(self.rng.randint(*PROMPT), self.length // 2)
        passage = self.rng.choice(self.passages)[: CHARACTERS * length]
        return (self.encoded(task + passage) if task else encode([passage], self.tokenizer)[0])[:length]

    def continued(self, texts: Sequence[WrittenText], sampling: Sampling, most: int) -> list[WrittenText]:
        """The texts, each with the target's continuation: until it ends, or `most` tokens."""
        if not texts:
            return []
        prompts = [text.tokens for text in texts]
        most = min(most, self.length - max(map(len, prompts)))
        end = lambda _, token: token in self.ends  # noqa: E731
        new, _ = regrSampling(prompts, self.target, most, sampling, end, self.generator, batch=TOGETHER)
        return [text.then(tokens, sampling == SAMPLING) for text, tokens in zip(texts, new)]

    def conversations(self, count: int, sampling: Sampling) -> list[WrittenText]:
        """Conversations of TURNS turns. The target writes the users' turns too, after the template's beginning. But
        the first ones are questions that were given by flag, or some of them tasks about a passage."""
        if not count:
            return []
        assert self.pieces is not None, "a model without a chat template has no conversations"
        before, after_user, after_model = self.pieces
        texts, ended = [NOTHING.then(before)] * count, []
        for turn in range(TURNS):
            first_turns: list[list[int]] = []
            if turn:
                room = self.length - TURN - ANSWER
                ended += [text for text in texts if len(text.tokens) >= room]
                texts = [self.without_end(text).then(after_model) for text in texts if len(text.tokens) < room]
            elif self.questions:
                first_turns = [self.encoded(question) for question in self.rng.choices(self.questions, k=count)]
            else:
                tasks = self.rng.choices(INSTRUCTIONS, k=round(TASKS * count))
                first_turns = [self.passage(f"{task}\n\n") for task in tasks]
            asked = [text.then(question[: self.length // 2]) for text, question in zip(texts, first_turns)]
            begun = [text.then(self.first_words()) for text in texts[len(first_turns) :]]
            asked += [self.without_end(text) for text in self.continued(begun, USER, TURN)]
            texts = self.continued([text.then(after_user) for text in asked], sampling, ANSWER)
        return ended + texts

    def first_words(self) -> list[int]:
        """Token ids of the first words of a user's turn, or none."""
        return self.encoded(self.rng.choice(STARTS)) if self.rng.random() < STARTED else []

    def encoded(self, words: str) -> list[int]:
        """Token ids of words in the middle of a text."""
        return self.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]

    def without_end(self, text: WrittenText) -> WrittenText:
        """The text without the token that ended it, if one did: the template's next piece has it."""
        return WrittenText(text.tokens[:-1], text.drawn[:-1]) if text.tokens[-1] in self.ends else text


def chat_pieces(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of a chat template before the user's first turn, between a turn of the user and the answer, and between
    an answer and the user's next turn. Raises UserError for a template that cannot be cut so."""
    turns = [("user", "11111"), ("assistant", "22222"), ("user", "33333")]
    chat = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        first, after_user, after_model, _ = re.split("11111|22222|33333", text)
    except Exception as error:  # A template is a program. It may do anything but what its sandbox forbids.
        raise UserError(f"the chat template cannot be cut into its turns ({one_line(error)})") from None
    return [tokenizer(x, add_special_tokens=False)["input_ids"] for x in (first, after_user, after_model)]


def prompts_of(args: Namespace) -> tuple[list[str], list[str]]:
    """The passages of --texts, and the first turns of --prompts."""
    corpora = [Corpus(str(name), read_documents(name)) for name in args.texts] if args.texts else load_corpora("sample")
    passages = [p for corpus in corpora for p in corpus.passages(PASSAGE, CHARACTERS * PROMPT[1])]
    different = len(set(passages))
    if different < FEWEST:
        raise UserError(
            f"--texts has {different} passages of {PASSAGE} characters, but a head needs {FEWEST}; add more texts"
        )
    return passages, [q.turns[0] for q in read_questions(args.prompts)] if args.prompts else []


class StateReader:
    """Reads texts with the target. Raises UserError if the output layer alone does not give the target's logits, as
    where they are scaled."""

    @torch.inference_mode()
    def __init__(self, target: CachedModel) -> None:
        self.model, self.device = target.model, target.device
        self.output = RestrictedHead(
            self.model.get_output_embeddings(), torch.arange(target.vocabulary).to(self.device)
        )
        self.layers = tapped(self.model.config.get_text_config(), "three")
        tokens = torch.arange(8)[None] % target.vocabulary
        logits = output_logits(self.output, self.hidden_states(tokens)[..., -self.output.weight.shape[1] :]).cpu()
        if not torch.allclose(logits.log_softmax(-1), target.score(tokens).log_softmax(-1), atol=0.1, rtol=0.1):
            raise UserError(
                f"{target.name} changes its logits after its output layer (or normalizes its last hidden states), "
                "so heads are not supported for it"
            )

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The hidden states of the tapped layers for `tokens[B, n]`, side by side, `[B, n, layers * d]`."""
        states = self.model.base_model(tokens.to(self.device), use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self.layers], -1)

    @torch.inference_mode()
    def read(self, texts: Sequence[WrittenText]) -> dict[str, Tensor]:
        """The tokens of the texts one after the other, and for each of them: text, which text it is of; drawn, whether
        the target drew it with SAMPLING; states, the hidden states of the tapped layers, `[N, layers * d]`; sums, those
        of `sums_of`, `[N, 3]`."""
        texts = sorted(texts, key=lambda text: len(text.tokens))  # Little of a block is padding then.
        states, sums = [], []
        for at in range(0, len(texts), READ):
            block = [torch.tensor(text.tokens) for text in texts[at : at + READ]]
            padded = nn.utils.rnn.pad_sequence(block, batch_first=True)  # Padding after a text does not change it.
            for tokens, rows in zip(block, self.hidden_states(padded)):
                states.append(rows[: len(tokens)].to(torch.bfloat16).cpu())
                last = rows[: len(tokens), -self.output.weight.shape[1] :]
                sums += [sums_of(self.output, few).cpu() for few in last.split(at_a_time(self.device))]
        lengths = torch.tensor([len(text.tokens) for text in texts])
        return {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "text": torch.arange(len(texts), dtype=torch.int32).repeat_interleave(lengths),
            "drawn": torch.tensor([drawn for text in texts for drawn in text.drawn]),
            "states": torch.cat(states),
            "sums": torch.cat(sums),
        }


def prepare_parts(args: Namespace, target: CachedModel) -> list[dict[str, Tensor]]:
    """The parts of `args.data`, memory-mapped. Those that are missing are computed first. Part 0 is held out. A part
    holds what `StateReader.read` returns, and how many seconds it took to make it."""
    about = {"target": model_version(args.folder), "length": LENGTH, "sampling": asdict(SAMPLING), "seed": args.seed}
    description = args.data / "texts.json"
    args.data.mkdir(parents=True, exist_ok=True)
    if description.exists() and read_json(description) != about:
        raise UserError(f"{args.data} contains texts of another target or seed; choose another --data")
    replace_file(description, json.dumps(about))
    config = target.model.config.get_text_config()
    bytes_of_token = 2 * len(LAYERS["three"]) * config.hidden_size + 4 + 4 + 1 + 12  # states, tokens, text, drawn, sums
    parts: list[dict[str, Tensor]] = []
    writer: TextWriter | None = None
    reader: StateReader | None = None
    left = args.written
    with Bar("the target writes and reads", args.written, " tokens") as bar:
        while left > 0:
            file = args.data / f"{len(parts):05}.safetensors"
            if not file.exists():
                check_disk(args.data, left * bytes_of_token)
                writer = writer or TextWriter(args.folder, args.device, *prompts_of(args), args.seed)
                reader = reader or StateReader(target)
                begin = time.monotonic()
                part = reader.read(writer.write(len(parts), TEXTS if parts else HELD_OUT))
                seconds = time.monotonic() - begin
                temporary = file.with_name(f".{file.name}")
                save_file(part | {"seconds": torch.tensor(seconds)}, temporary)
                os.replace(temporary, file)
                print(f"{file.name}: {len(part['tokens']):,} tokens in {seconds:.0f} s", file=sys.stderr)
            try:
                parts.append(load_file(file))
            except SafetensorError as error:
                raise UserError(
                    f"{file} cannot be read ({one_line(error)}); remove it, and it is computed again"
                ) from None
            tokens = len(parts[-1]["tokens"])
            bar.update(tokens)
            left -= tokens if len(parts) > 1 else 0
    return parts
