"""Train the bundled models: one tokenizer, and three GPT-NeoX models (Pythia's architecture) that share it.

    python -m scripts.trainBundled --texts books/ wiki.valid.tokens:3 --heldout wiki.test.raw heldoutBook.txt

`PATH:3` counts a text three times in each pass over the corpus. The smaller models learn the target's distribution
instead of the text's next token (distillation; DistillSpec, arXiv 2310.08461): speculative decoding gains from a draft
that agrees with the target. The draft is then trained for acceptance (`rejection` in scripts/training.py).
"""

from __future__ import annotations

import copy
import math
import os
import random
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from engine.cachedModel import CachedModel
from inputs.commandLine import as_command, number, path, script_parser, text, whole
from inputs.devices import pick_device
from inputs.files import ROOT
from inputs.models import find_model
from inputs.progress import followed
from inputs.texts import read
from PPL import calculate_ppl_corpus
from regrSampling import regrSampling
from scripts.training import SAMPLING, Recipe, Trainer, at_a_time, most_probable, rejection_loss
from utils import UserError

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 2048  # tokens a trained model can read
HEAD = 32  # width of an attention head
PROMPT = 64  # tokens of the corpus that the target continues
TOGETHER = 256  # rows written at a time
MIXED = (256, 256, 1024, CONTEXT)  # row lengths
WRITTEN = (*[256] * 8, 1024)  # in training for acceptance, the target writes the rows of 256
Row = tuple[Tensor, ...]  # a text's tokens, and what its teacher said of them
Rows = dict[int, Iterator[Row]]  # {row length: endless rows}

# {name: (layers, width, the model whose distribution it learns or None for the text, stages)}. models/README.md says
# what each stage is for.
MODELS: dict[str, tuple[int, int, str | None, list[Recipe]]] = {
    "target": (12, 192, None, [
        Recipe(12_600_000, lengths=(256,), last_lengths=(CONTEXT,)),
        Recipe(4_000_000, lengths=MIXED, peak=0.3),
        Recipe(10_200_000, lengths=MIXED),
    ]),
    "draft": (1, 128, "target", [
        Recipe(7_000_000, lengths=MIXED),
        Recipe(12_288_000, lengths=(256, 256, 1024), labelled={256: 3328, 1024: 256}, peak=0.5),
        Recipe(21_356_544, lengths=(1024, 256, 1024, 256, 1024), labelled={256: 3328, 1024: 1920}, peak=0.5),
        Recipe(8_367_496, lengths=WRITTEN, labelled={256: 4352, 1024: 150}, peak=0.45, averaged=True),
        Recipe(30_287_896, lengths=WRITTEN, labelled={256: 12_160, 1024: 200}, peak=0.8),
    ]),
    "mid": (4, 160, "target", [Recipe(4_000_000, lengths=MIXED)]),
}  # fmt: skip


def read_documents(path: str | Path) -> list[str]:
    """The documents of a file or folder, given as `PATH` or `PATH:TIMES`. A WikiText file is split at its article
    headings, and loses `<unk>`, which stands for rare words in its word-level version."""
    path, _, times = str(path).partition(":")
    if not re.fullmatch("([1-9][0-9]?)?", times):
        raise UserError(f"--texts {path}:{times}: a text is counted 1 to 99 times")
    documents = []
    for file in sorted(Path(path).rglob("*.txt")) if os.path.isdir(path) else [Path(path)]:
        text = read(file)
        if re.search(r"^ = [^=].* = $", text, re.M):
            text = re.sub(r" ?<unk>", "", re.sub(r"^ *\n", "", text, flags=re.M))
        documents += re.split(r"^(?= = [^=].* = $)", text, flags=re.M)
    return [d for d in documents if d.strip()] * int(times or 1)


def train_tokenizer(documents: Sequence[str], folder: Path) -> None:
    """Train and save a byte-level BPE tokenizer of VOCABULARY entries. As in Pythia's, `<|endoftext|>` is entry 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(show_progress=False, **options))
    ends = {f"{end}_token": END_OF_TEXT for end in ("bos", "eos", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **ends).save_pretrained(folder)


def new_model(layers: int, width: int) -> nn.Module:
    """A GPT-NeoX model with random weights."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // HEAD}
    sizes |= {"intermediate_size": 4 * width, "max_position_embeddings": CONTEXT}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **ids))


def corpus_windows(tokens: Tensor, length: int, rng: random.Random) -> Iterator[Tensor]:
    """Endless windows `[length + 1]` of `tokens[N]`: passes over the corpus from a random offset, in random order."""
    while True:
        starts = list(range(rng.randrange(length), len(tokens) - length - 1, length))
        rng.shuffle(starts)
        for start in starts:
            yield tokens[start : start + length + 1]


def continue_prompts(teacher: nn.Module, prompts: Iterator[Tensor], count: int, length: int, minutes: float) -> Tensor:
    """Texts `[count, length]`, or fewer in `minutes`: prompts of the corpus, continued by the teacher with SAMPLING."""
    model, begin = CachedModel(copy.deepcopy(teacher).to(torch.bfloat16)), time.monotonic()
    generator = torch.Generator(model.device).manual_seed(count)
    texts: list[list[int]] = []
    for at in followed(range(0, count, TOGETHER), "the target writes", -(-count // TOGETHER)):
        if texts and time.monotonic() - begin > 60 * minutes:
            break
        batch = [next(prompts).tolist() for _ in range(min(TOGETHER, count - at))]
        new, _ = regrSampling(batch, model, length - PROMPT, SAMPLING, generator=generator)
        texts += [prompt + tokens for prompt, tokens in zip(batch, new)]
    return torch.tensor(texts)


@torch.inference_mode()
def label_texts(teacher: nn.Module, texts: Tensor, device: str, prompt: int = 1) -> list[Row]:
    """The texts `[N, n + 1]`, each as int16 `[n + 1]`, and what `rejection` reads of the teacher's distributions over
    the tokens that follow the first `prompt`, `[n + 1 - prompt, TOP]`. The teacher's forward costs several times a
    step of the draft, so it is computed once for each text, and 1.5 KiB of a token are stored."""
    labelled = []
    for tokens in followed(texts, "the target reads", len(texts)):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits = teacher(tokens[None, :-1].to(device), use_cache=False).logits[0, prompt - 1 :]
        parts = zip(*map(most_probable, logits.split(at_a_time(logits.device))))
        labelled.append((tokens.to(torch.int16), *(torch.cat(part).cpu() for part in parts)))
    return labelled


def rows_of(
    recipe: Recipe, tokens: Tensor, minutes: float, teacher: nn.Module | None, device: str, rng: random.Random
) -> Rows:
    """The rows of a stage: windows of the corpus `tokens[N]`, or texts of `label_texts`. Of these
    the teacher writes the shortest ones, for `minutes` at most."""
    if not recipe.labelled or teacher is None:
        lengths = {*recipe.lengths, *(recipe.last_lengths or ())}
        return {length: zip(corpus_windows(tokens, length, rng)) for length in lengths}  # tuples of one tensor
    rows: Rows = {}
    for length, count in recipe.labelled.items():
        if is_written := length == min(recipe.labelled):
            texts = continue_prompts(teacher, corpus_windows(tokens, PROMPT - 1, rng), count, length + 1, minutes)
        else:
            texts = torch.stack(list(islice(corpus_windows(tokens, length, rng), count)))
        labelled = label_texts(teacher, texts, device, PROMPT if is_written else 1)
        # Again and again, each time in another order.
        rows[length] = chain.from_iterable(iter(partial(rng.sample, labelled, len(labelled)), None))
    return rows


class StageTrainer(Trainer):
    """A stage of a bundled model, on the rows of `rows_of`."""

    def __init__(
        self, recipe: Recipe, network: nn.Module, label: str, rows: Rows, teacher: nn.Module | None = None
    ) -> None:
        super().__init__(recipe, network.train(), label)
        self.rows, self.teacher = rows, teacher

    def batch(self, rows: int, length: int) -> list[Tensor]:
        return [torch.stack(parts).to(self.device) for parts in zip(*islice(self.rows[length], rows))]

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Of labelled texts the share of guesses that the target would reject. Else the cross-entropy, in nats, to the
        teacher's distribution, or to the text."""
        tokens, *labels = batch
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.network(tokens[:, :-1].long(), use_cache=False).logits
            targets = tokens[:, 1:].flatten()
            if self.teacher is not None and not labels:
                with torch.no_grad():
                    targets = self.teacher(tokens[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        if labels:
            after_prompt = logits[:, -labels[0].shape[1] :].flatten(0, 1)
            return rejection_loss(after_prompt, *(label.flatten(0, 1) for label in labels))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets)


def bundled_flags(argv: Sequence[str] | None) -> Namespace:
    parser = script_parser("python -m scripts.trainBundled", __doc__)
    add, texts = parser.add_argument, "files or folders to train on; PATH:3 counts it three times"
    add("--texts", nargs="+", type=text, required=True, help=texts)
    add("--heldout", nargs="*", type=path, default=[], help="texts whose perplexity is printed")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which to train")
    add("--minutes", type=number(0.01, 10**6), default=math.inf, help="at most this long for each stage of a model")
    add("--tokens", type=whole(1), help="at most this many tokens for each stage of a model")
    add("--stage", type=whole(1, 5), default=1, help="start at this stage, from the weights in --out")
    add("--out", type=path, default=ROOT / "models")
    add("--device", type=text, help="(cuda if available)")
    add("--seed", type=whole(0, 10**9), default=0)
    args = parser.parse_args(argv)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    args.out = Path(os.path.abspath(args.out))
    for name in args.models:
        *_, teacher, stages = MODELS[name]
        if args.stage > len(stages):
            raise UserError(f"bundled-{name} has no stage {args.stage}, the last is {len(stages)}")
        if args.stage > 1:
            find_model(args.out / f"bundled-{name}")
        if teacher and teacher not in args.models:
            find_model(args.out / f"bundled-{teacher}")
    args.device = pick_device(args.device)
    return args


def train_bundled(args: Namespace) -> None:
    """Train the tokenizer if it does not exist, then the models, and print their perplexities."""
    documents = [document for path in args.texts for document in read_documents(path)]
    heldout = {file: read(file) for file in args.heldout}
    if not documents:
        raise UserError("--texts contains no text; name others")
    folder = args.out / "bundled-target"
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(sorted(set(documents)), folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    # Each document comes after an end-of-text token.
    pieces = [np.array([tokenizer.eos_token_id] + tokenizer(d, verbose=False)["input_ids"]) for d in documents]
    tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} characters, {len(tokens):,} tokens", flush=True)
    if len(tokens) <= 2 * CONTEXT:
        raise UserError(f"--texts has {len(tokens)} tokens, too few for rows of {CONTEXT}; add more texts")
    for name in args.models:
        model = CachedModel(train_model(args, name, tokenizer, tokens))
        for file, words in heldout.items():
            ppl = calculate_ppl_corpus(words, tokenizer, model)["target"]
            figures = f"{ppl.token_ppl:.3f} per token, {ppl.word_ppl:.2f} per word"
            print(f"  perplexity on {file.name}: {figures}", flush=True)


def train_model(args: Namespace, name: str, tokenizer: PreTrainedTokenizerFast, tokens: Tensor) -> nn.Module:
    """Train a model through its stages and save it after each. Returns it in float32, with the weights as stored."""
    (layers, width, learnt, stages), folder = MODELS[name], args.out / f"bundled-{name}"
    torch.manual_seed(args.seed)
    load = partial(GPTNeoXForCausalLM.from_pretrained, dtype=torch.float32, local_files_only=True)
    model = new_model(layers, width) if args.stage == 1 else load(folder)
    teacher = load(args.out / f"bundled-{learnt}").eval().to(args.device) if learnt else None
    for stage, recipe in list(enumerate(stages, 1))[args.stage - 1 :]:
        begin, rng = time.monotonic(), random.Random(args.seed + stage - 1)
        rows = rows_of(recipe, tokens, args.minutes / 3, teacher, args.device, rng)
        minutes = max(args.minutes - (time.monotonic() - begin) / 60, args.minutes / 3)
        recipe = replace(recipe, tokens=min(recipe.tokens, args.tokens or recipe.tokens), seconds=60 * minutes)
        trainer = StageTrainer(recipe, model.to(args.device), f"bundled-{name}, stage {stage}", rows, teacher)
        trainer.train()
        loss = np.mean(trainer.losses[-max(1, trainer.step // 20) :])
        size, tokens_read = sum(p.numel() for p in model.parameters()), trainer.step * recipe.batch
        done = f"stage {stage}: {trainer.step:,} steps, {tokens_read:,} tokens, loss {loss:.4f}"
        print(f"bundled-{name}: {size:,} parameters, {done}", flush=True)
        model = model.cpu().to(torch.bfloat16)  # As stored: the next stage starts from what is stored.
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = model.float().eval()
    return model


def main(argv: Sequence[str] | None = None) -> int:
    return as_command("trainBundled", lambda: train_bundled(bundled_flags(argv)), "The stages that ended are kept.")


if __name__ == "__main__":
    sys.exit(main())
