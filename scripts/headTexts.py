"""The data of a head: the texts that its target writes, the target's hidden states for them, windows of both to train
on, and how good a head is on the texts that are held out.

The target continues passages of books or articles. A chat model also writes conversations: both the user's turns and
the answers (Magpie, Xu et al., arXiv 2406.08464). Most of these begin with a task about a passage instead, or with the
first words of a question, because the questions that a small model asks by itself are much alike. Then the target
reads the texts once, and what it has computed is kept on disk, in parts.
"""

import json
import math
import os
import random
import re
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.sharedWeights import RestrictedHead
from experiments.speed import digest
from inputs.devices import pick_dtype
from inputs.files import library_errors
from inputs.hub import check_disk
from inputs.models import end_tokens, load_model, load_tokenizer, model_version
from inputs.progress import Bar
from inputs.texts import CHARACTERS, Corpus, encode, load_corpora
from regrSampling import regrSampling
from scripts.training import GAMMA, LAYERS, SAMPLING, Pair, at_a_time, distributions, output_logits, sums_of
from utils import Sampling, UserError, probabilities

WRITTEN = 2_000_000  # tokens of text that the target writes and reads
TEXTS = 128  # texts in a part, which is kept or computed again as a whole
HELD_OUT = 32  # texts that are not trained on: the first part
LENGTH = 1024  # tokens of a text at most, with its prompt
PROMPT = 16, 256  # tokens of a passage that the target continues, from and to
TOGETHER = 64  # texts that are written at a time: the others of a part wait until one ends
PLAIN = Sampling(1.0, 0, 1.0)  # the model's own distribution
PLAIN_SHARE = 0.2  # of the texts are drawn from it: the head must also guess for flags that are not the default ones
USER = Sampling(0.9, 0, 0.95)  # how users' turns are drawn: of many kinds, but not nonsense
CHATS = 0.7  # share of a chat model's texts that are conversations; the others continue passages
TURN = 160  # tokens of a user's turn at most
TURNS = 2  # of the user and of the model in a conversation
ANSWER = 256  # tokens that a chat model writes at a time at most: a small one's longer texts repeat themselves
TASKS = 0.4  # share of conversations that begin with a task about a passage
STARTED = 0.6  # share of the users' turns which the target writes whose first words are given: its own are much alike
INSTRUCTIONS, STARTS = json.loads(Path(__file__).with_name("usersTurns.json").read_text(encoding="utf-8")).values()
PASSAGE = 200  # characters of a passage at least
FEWEST = 20  # passages without which nothing is trained on what the target writes

Written = list[tuple[int, bool]]  # a text: token ids, each with whether the target drew it with SAMPLING
Part = dict[str, Tensor]  # of some texts, see `read_states`


def undrawn(tokens: Sequence[int]) -> Written:
    """A piece of text that the target did not draw."""
    return [(token, False) for token in tokens]


class TextWriter:
    """Writes texts with the target: it continues passages, and a chat model answers users' turns."""

    def __init__(self, folder: Path, device: str, passages: Sequence[str], seed: int) -> None:
        self.tokenizer = load_tokenizer(folder)
        target = load_model(folder, self.tokenizer, pick_dtype(device), device)
        self.length = min(LENGTH, target.context)
        self.target = compiled(target) if device == "cpu" else target
        self.ends = end_tokens(folder, self.tokenizer)
        self.seed = seed
        self.pieces = chat_pieces(self.tokenizer) if self.tokenizer.chat_template else None
        different = list(dict.fromkeys(passages))  # A text of --texts that counts several times has each so often.
        first = set(random.Random(seed).sample(different, max(1, len(different) // 10)))
        self.held_out, self.trained_on = ([p for p in passages if (p in first) == held] for held in (True, False))

    def write(self, part: int, count: int) -> list[Written]:
        """The texts of a part. Part 0 is held out: it has its own passages, and all is drawn with SAMPLING."""
        self.rng = random.Random(f"{self.seed} {part}")
        self.generator = torch.Generator().manual_seed(self.rng.randrange(1 << 40))
        self.passages = self.trained_on if part else self.held_out
        plain = round(PLAIN_SHARE * count) if part else 0
        texts = []
        for sampling, number_of_texts in (SAMPLING, count - plain), (PLAIN, plain):
            chats = round(CHATS * number_of_texts) if self.pieces else 0
            texts += self.conversations(chats, sampling)
            starts = [undrawn(self.passage()) for _ in range(number_of_texts - chats)]
            texts += self.continued(starts, sampling, ANSWER if self.pieces else self.length)
        return texts

    def passage(self, task: str = "") -> list[int]:
        """Token ids of the beginning of a passage, after a task."""
        length = min(self.rng.randint(*PROMPT), self.length // 2)
        passage = self.rng.choice(self.passages)[: CHARACTERS * length]
        return (self.encoded(task + passage) if task else encode([passage], self.tokenizer)[0])[:length]

    def continued(self, texts: Sequence[Written], sampling: Sampling, most: int) -> list[Written]:
        """The texts, each with the target's continuation: until it ends, or `most` tokens."""
        if not texts:
            return []
        prompts = [[token for token, _ in text] for text in texts]
        most = min(most, self.length - max(map(len, prompts)))
        end = lambda _, token: token in self.ends  # noqa: E731
        new, _ = regrSampling(prompts, self.target, most, sampling, end, self.generator, batch=TOGETHER)
        return [text + [(token, sampling == SAMPLING) for token in tokens] for text, tokens in zip(texts, new)]

    def conversations(self, count: int, sampling: Sampling) -> list[Written]:
        """Conversations of TURNS turns. The target writes the users' turns too, after the template's beginning. But
        some of the first ones are tasks about a passage."""
        before, after_user, after_model = self.pieces or [[]] * 3
        texts = [undrawn(before)] * count
        for turn in range(TURNS):
            first_turns: list[list[int]] = []
            if turn:
                texts = [self.without_end(text) + undrawn(after_model) for text in texts]
            else:
                tasks = self.rng.choices(INSTRUCTIONS, k=round(TASKS * count))
                first_turns = [self.passage(f"{task}\n\n") for task in tasks]
            asked = [text + undrawn(question[: self.length // 4]) for text, question in zip(texts, first_turns)]
            begun = texts[len(first_turns) :]
            starts = [self.rng.choice(STARTS) if self.rng.random() < STARTED else "" for _ in begun]
            begun = [text + undrawn(self.encoded(start)) for text, start in zip(begun, starts)]
            asked += [self.without_end(text) for text in self.continued(begun, USER, TURN)]
            texts = self.continued([text + undrawn(after_user) for text in asked], sampling, ANSWER)
        return texts

    def encoded(self, words: str) -> list[int]:
        """Token ids of words in the middle of a text."""
        return self.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]

    def without_end(self, text: Written) -> Written:
        """The text without the token that ended it, if one did: the template's next piece has it."""
        return text[:-1] if text[-1][0] in self.ends else text


def chat_pieces(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of a chat template before the user's first turn, between a turn of the user and the answer, and between
    an answer and the user's next turn. Raises UserError for a template that cannot be cut so."""
    turns = ("user", "11111"), ("assistant", "22222"), ("user", "33333")
    chat = [{"role": role, "content": content} for role, content in turns]
    # A template is a program. It may do anything but what its sandbox forbids.
    with library_errors("the chat template cannot be cut into its turns", "name another target"):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        first, after_user, after_model, _ = re.split("11111|22222|33333", text)
    return [tokenizer(x, add_special_tokens=False)["input_ids"] for x in (first, after_user, after_model)]


def tapped(target: CachedModel) -> list[int]:
    """The layers of the target whose hidden states make a feature, as transformers counts `hidden_states`."""
    return [round(share * target.model.config.get_text_config().num_hidden_layers) for share in LAYERS]


def output_layer(target: CachedModel, tokens: Tensor | None = None) -> RestrictedHead:
    """The target's output layer for `tokens`, int64 `[N]`; None: for all of its vocabulary."""
    tokens = torch.arange(target.vocabulary) if tokens is None else tokens
    return RestrictedHead(target.model.get_output_embeddings(), tokens.to(target.device))


def hidden_states(target: CachedModel, tokens: Tensor) -> Tensor:
    """The hidden states of the tapped layers for `tokens[B, n]`, side by side, `[B, n, layers * d]`."""
    model = target.model.base_model
    states = model(tokens.to(target.device), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in tapped(target)], -1)


@torch.inference_mode()
def checked_output_layer(target: CachedModel) -> RestrictedHead:
    """The target's whole output layer. Raises UserError if it alone does not give the target's logits."""
    output, tokens = output_layer(target), torch.arange(8)[None] % target.vocabulary
    logits = output_logits(output, hidden_states(target, tokens)[..., -output.weight.shape[1] :]).cpu()
    if not torch.allclose(logits.log_softmax(-1), target.score(tokens).log_softmax(-1), atol=0.1, rtol=0.1):
        change = "changes its logits after its output layer (or normalizes its last hidden states)"
        raise UserError(f"{target.name} {change}, so heads are not supported for it")
    return output


@torch.inference_mode()
def read_states(texts: Sequence[Written], target: CachedModel, output: RestrictedHead) -> Part:
    """The tokens of the texts one after the other, and for each of them: text, which text it is of; drawn, whether the
    target drew it with SAMPLING; states, the hidden states of the tapped layers, `[N, layers * d]`; sums, those of
    `sums_of`, `[N, 3]`."""
    states, sums = [], []
    for text in texts:
        rows = hidden_states(target, torch.tensor([[token for token, _ in text]]))[0]
        states.append(rows.to(torch.bfloat16).cpu())
        parts_of_text = rows[:, -output.weight.shape[1] :].split(at_a_time(target.device))
        sums += [sums_of(output, last).cpu() for last in parts_of_text]
    tokens, drawn = zip(*(pair for text in texts for pair in text))
    part = {"tokens": torch.tensor(tokens, dtype=torch.int32), "drawn": torch.tensor(drawn)}
    lengths = torch.tensor([len(text) for text in texts])
    numbers = torch.arange(len(texts), dtype=torch.int32).repeat_interleave(lengths)
    return part | {"text": numbers, "states": torch.cat(states), "sums": torch.cat(sums)}


def read_documents(name: str) -> list[str]:
    """The documents of a data set, file or folder, given as `PATH` or `PATH:TIMES`. A WikiText file is split at its
    article headings, and loses `<unk>`, which stands for rare words in its word-level version."""
    path, colon, times = name.rpartition(":")
    if not (colon and times.isascii() and times.isdecimal()):  # A name may have a colon too.
        path, times = name, "1"
    if not re.fullmatch("[1-9][0-9]?", times):
        raise UserError(f"--texts {path}:{times}: a text is counted 1 to 99 times")
    documents = []
    for text in (document for corpus in load_corpora(path) for document in corpus.documents):
        if re.search(r"^ = [^=].* = $", text, re.M):
            text = re.sub(r" ?<unk>", "", re.sub(r"^ *\n", "", text, flags=re.M))
        documents += re.split(r"^(?= = [^=].* = $)", text, flags=re.M)
    return [d for d in documents if d.strip()] * int(times)


def read_passages(texts: Sequence[str]) -> list[str]:
    """The passages of --texts. Raises UserError if there are too few."""
    corpora = [Corpus(name, read_documents(name)) for name in texts]
    passages = [p for corpus in corpora for p in corpus.passages(PASSAGE, CHARACTERS * PROMPT[1])]
    if (count := len(set(passages))) < FEWEST:
        raise UserError(f"--texts has {count} passages of {PASSAGE} characters, {FEWEST} are needed; add more texts")
    return passages


def origin_of(args: Namespace) -> dict[str, Any]:
    """What texts depend on."""
    about = {"target": model_version(args.folder), "length": LENGTH, "sampling": asdict(SAMPLING), "seed": args.seed}
    return about | {"passages": digest(args.passages)}


def prepare_parts(args: Namespace, target: CachedModel, seconds: float = math.inf) -> list[Part]:
    """The parts of `args.data`, memory-mapped, each of `read_states` and with the seconds that it took. Those that are
    missing are computed first, until `args.written` tokens or this time. Part 0 is held out."""
    metadata = {"about": json.dumps(origin_of(args))}
    # states, and tokens, text, drawn, sums
    bytes_of_token = 2 * len(LAYERS) * target.model.config.get_text_config().hidden_size + 4 + 4 + 1 + 12
    args.data.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    writer: TextWriter | None = None
    left, first = args.written, time.monotonic()
    with Bar("the target writes and reads", args.written, " tokens") as bar:
        while left > 0 and not (len(parts) > 1 and time.monotonic() > first + seconds):
            file = args.data / f"{len(parts):05}.safetensors"
            if not file.exists():
                check_disk(args.data, left * bytes_of_token)
                if writer is None:
                    writer = TextWriter(args.folder, args.device, args.passages, args.seed)
                    output = checked_output_layer(target)
                begin, temporary = time.monotonic(), file.with_name(f".{file.name}")
                part = read_states(writer.write(len(parts), TEXTS if parts else HELD_OUT), target, output)
                part["seconds"] = torch.tensor(time.monotonic() - begin)
                with library_errors(f"{file} cannot be written", "free some space; the same command goes on"):
                    save_file(part, temporary, metadata)
                os.replace(temporary, file)
                print(f"{file.name}: {len(part['tokens']):,} tokens in {part['seconds']:.0f} s", file=sys.stderr)
            with library_errors(f"{file} cannot be read", "remove it, and it is written again"):
                with safe_open(file, "pt") as opened:
                    is_other = opened.metadata() != metadata
                parts.append(load_file(file))
            if is_other:
                other = f"{args.data} has texts of another target or seed, of other --texts or of another version"
                raise UserError(f"{other}; name another --data")
            tokens = len(parts[-1]["tokens"])
            bar.update(tokens)
            left -= tokens if len(parts) > 1 else 0
    return parts


class TextBatch(NamedTuple):
    """Windows of the texts."""

    tokens: Tensor  # int64 `[B, n]`
    text: Tensor  # which text each token is of, `[B, n]`
    drawn: Tensor  # whether each was drawn with SAMPLING, `[B, n]`
    before: Tensor  # the hidden states of the token before each, `[B, n, layers * d]`, 0 at the beginning of a text
    last: Tensor  # the last hidden states of each, `[B, n, d]`
    sums: Tensor  # see `sums_of`, `[B, n, 3]`


def batch_of(places: Sequence[tuple[Part, int, int]], output: Tensor) -> TextBatch:
    """The windows (part, first token, length) of the texts, on the device of the output layer's weight `[V, d]`."""
    d, rows = output.shape[1], []
    for part, start, length in places:
        at = torch.arange(start, start + length)
        earlier, tokens, states = (at - 1).clamp(min=0), part["tokens"][at].long(), part["states"]
        begins = (at == 0) | (part["text"][at] != part["text"][earlier])
        before = states[earlier].masked_fill(begins[:, None], 0.0)
        rows.append((tokens, part["text"][at], part["drawn"][at], before, states[at, -d:], part["sums"][at]))
    return TextBatch(*(torch.stack(column).to(output.device) for column in zip(*rows)))


def random_windows(parts: Sequence[Part], rows: int, length: int, seed: Sequence[int], output: Tensor) -> TextBatch:
    """`rows` windows of `length` tokens from any place of the texts, drawn from a seed. output: see `batch_of`."""
    places = np.array([max(0, len(part["tokens"]) - length + 1) for part in parts])
    if not places.sum():
        raise UserError(f"the texts have fewer than {length} tokens; raise --written")
    chosen, ends = [], places.cumsum()
    for place in np.random.default_rng(seed).integers(ends[-1], size=rows):
        index = int(np.searchsorted(ends, place, side="right"))
        chosen.append((parts[index], int(place - ends[index] + places[index]), length))
    return batch_of(chosen, output)


@torch.inference_mode()
def acceptance_on(
    network: nn.Module, output: RestrictedHead, texts: Sequence[TextBatch], autocast: torch.dtype
) -> dict[str, Any]:
    """How good a network is at GAMMA guesses, on texts (batches of one) that the target drew: expected values of what
    speculative decoding would give. acceptance: the share that passes of the guesses tested at each position. alpha:
    that of all. tokens_per_round: with the token that the target adds.

    A guess passes and is the token x with probability min(p(x), q(x)), and the text's x was drawn from p. So among the
    decodings that write this text, a guess passes with probability min(1, q(x) / p(x)). Followed from the first drawn
    token on, that gives how probable it is that a round begins at each place.
    """
    (tested, passed), size = np.zeros((2, GAMMA)), at_a_time(output.weight.device)
    for batch in texts:
        with torch.autocast(batch.tokens.device.type, autocast, autocast != torch.float32):
            hidden = network.chain(batch, GAMMA)[:, 0].float()
        following = F.pad(batch.tokens[0, 1:], (0, 1))
        parts = zip(hidden.split(size, 1), *(x.split(size) for x in (batch.last[0], batch.sums[0], following)))
        chances = zip(*(passing_chances(output, *part) for part in parts))
        overlap, ratio = (torch.cat(x, 1).cpu().double().numpy() for x in chances)  # [GAMMA, n], for the token after
        n, drawn = len(following), batch.drawn[0].tolist()
        begins = np.zeros(n + GAMMA + 2)  # how probable it is that a round begins with the token here as its last
        for s in (s for s in range(n - GAMMA - 1) if drawn[s]):
            if s == 0 or not drawn[s - 1]:
                begins[s] = 1.0
            whole, reached = all(drawn[s + 1 : s + GAMMA + 2]), begins[s]
            for j in range(GAMMA):
                tested[j] += whole * reached
                passed[j] += whole * reached * overlap[j, s + j]
                begins[s + j + 1] += reached * (1 - ratio[j, s + j])
                reached *= ratio[j, s + j]
            begins[s + GAMMA + 1] += reached
    tested = np.maximum(tested, 1e-9)
    alpha, tokens_per_round = float(passed.sum() / tested.sum()), float(1 + passed.sum() / tested[0])
    return {"acceptance": (passed / tested).tolist(), "alpha": alpha, "tokens_per_round": tokens_per_round}


def passing_chances(output: RestrictedHead, hidden: Tensor, last: Tensor, sums: Tensor, following: Tensor) -> Pair:
    """For each step and each of m positions, `[steps, m]`: the chance that a guess drawn there passes, sum_x min(p(x),
    q(x)); and min(1, q(x) / p(x)) of the token x in `following[m]`, which the text has next."""
    _, p = distributions(output_logits(output, last), sums)
    q = probabilities(output_logits(output, hidden), SAMPLING)
    place = torch.searchsorted(output.tokens, following).clamp(max=len(output.tokens) - 1)
    known = output.tokens[place] == following
    p_next = p.gather(-1, place[:, None])[:, 0]
    q_next = q.gather(-1, place.expand(len(q), -1)[..., None])[..., 0]
    ratio = torch.where(known & (p_next > 0), q_next / p_next, 0.0).clamp(max=1.0)
    return torch.minimum(p, q).sum(-1), ratio
