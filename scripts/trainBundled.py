"""Train the bundled models: one tokenizer, and three GPT-NeoX models (Pythia's architecture) that share it.

    python -m scripts.trainBundled --texts books/ wiki.valid.tokens:3 --heldout wiki.test.raw heldoutBook.txt

`PATH:3` counts a text three times in each pass over the corpus. The smaller models learn the target's distribution
instead of the text's next token (distillation; DistillSpec, arXiv 2310.08461): speculative decoding gains from a draft
that agrees with the target. The draft is then trained for acceptance (scripts/training.py).
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.cachedModel import CachedModel
from inputs.commandLine import Parser, as_command, number, path, text, whole
from inputs.devices import pick_device
from inputs.files import ROOT
from inputs.models import find_model
from inputs.progress import followed
from inputs.texts import read
from PPL import calculate_ppl_corpus
from regrSampling import regrSampling
from scripts.training import AT_A_TIME, SAMPLING, LabelledText, Stage, most_probable, train
from utils import UserError

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 2048  # tokens a trained model can read
HEAD = 32  # width of an attention head
PROMPT = 64  # tokens of the corpus that the target continues
TOGETHER = 256  # rows written at a time
MIXED = (256, 256, 1024, CONTEXT)  # row lengths
MORE_WRITTEN = (256, 256, 1024)  # in training for acceptance, the target writes the rows of 256
MORE_READ = (1024, 256, 1024, 256, 1024)
MOST_WRITTEN = (*[256] * 8, 1024)


@dataclass(frozen=True)
class Recipe:
    """How a model is made. teacher: the model whose distribution it learns; None learns the text."""

    layers: int
    width: int
    teacher: str | None
    stages: list[Stage]


# The target's first stage has long rows only at its end, where the learning rates are too low to learn from them. Its
# second stage repaired part of that. Its third stage, at full rates and on more text, repaired the rest. The draft's
# second stage read too few windows of the corpus, again and again; its third reads more. Its fourth reads more
# texts that the target wrote. Alone it agreed less at temperature 1; the mean of the weights before and after does not.
# Its fifth reads more such texts, at higher rates. A mean with the weights before it does not help.
TARGET = [
    Stage(12_600_000, 1.0, (256,), (CONTEXT,)),
    Stage(4_000_000, 0.3, MIXED, MIXED),
    Stage(10_200_000, 1.0, MIXED, MIXED),
]
DRAFT = [
    Stage(7_000_000, 1.0, MIXED, MIXED),
    Stage(12_288_000, 0.5, MORE_WRITTEN, MORE_WRITTEN, {256: 3328, 1024: 256}),
    Stage(21_356_544, 0.5, MORE_READ, MORE_READ, {256: 3328, 1024: 1920}),
    Stage(8_367_496, 0.45, MOST_WRITTEN, MOST_WRITTEN, {256: 4352, 1024: 150}, averaged=True),
    Stage(30_287_896, 0.8, MOST_WRITTEN, MOST_WRITTEN, {256: 12_160, 1024: 200}),
]
MODELS = {
    "target": Recipe(12, 192, None, TARGET),
    "draft": Recipe(1, 128, "target", DRAFT),
    "mid": Recipe(4, 160, "target", [Stage(4_000_000, 1.0, MIXED, MIXED)]),
}


def read_texts(path: str | Path) -> list[str]:
    """The documents of a file or folder, given as `PATH` or `PATH:TIMES`.

    A WikiText file is split at its article headings. Its word-level version replaces rare words by `<unk>`; these are
    removed, as no real text contains them.
    """
    path, _, times = str(path).partition(":")
    if not re.fullmatch("([1-9][0-9]?)?", times):
        raise UserError(f"--texts {path}:{times}: a text is counted 1 to 99 times")
    documents = []
    for file in sorted(Path(path).rglob("*.txt")) if os.path.isdir(path) else [Path(path)]:
        text = read(file)
        if re.search(r"^ = [^=].* = $", text, re.M):
            text = re.sub(r" ?<unk>", "", re.sub(r"^ *\n", "", text, flags=re.M))
            documents += re.split(r"^(?= = [^=].* = $)", text, flags=re.M)
        else:
            documents.append(text)
    return [d for d in documents if d.strip()] * int(times or 1)


def train_tokenizer(documents: Sequence[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer with VOCABULARY entries and save it. As in Pythia's, `<|endoftext|>` is entry
    0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=CONTEXT,
    ).save_pretrained(folder)


def load(folder: Path) -> nn.Module:
    """The model of a folder in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Tensor:
    """All documents as one int64 tensor, each after an end-of-text token."""
    pieces = [np.array([tokenizer.eos_token_id] + tokenizer(d, verbose=False)["input_ids"]) for d in documents]
    return torch.from_numpy(np.concatenate(pieces).astype(np.int64))


def windows(tokens: Tensor, length: int, rng: random.Random) -> Iterator[Tensor]:
    """Endless windows `[length + 1]` of `tokens[N]`: passes over the corpus from a random offset, in random order."""
    while True:
        starts = list(range(rng.randrange(length), len(tokens) - length - 1, length))
        rng.shuffle(starts)
        for start in starts:
            yield tokens[start : start + length + 1]


def write_texts(teacher: nn.Module, prompts: Iterator[Tensor], count: int, length: int, minutes: float) -> Tensor:
    """Texts `[count, length]`: prompts of the corpus, continued by the teacher with SAMPLING. Fewer rows if they take
    longer than `minutes`."""
    model = CachedModel(copy.deepcopy(teacher).to(torch.bfloat16))
    generator = torch.Generator(model.device).manual_seed(count)
    begin = time.monotonic()
    texts: list[list[int]] = []
    for at in followed(range(0, count, TOGETHER), "the target writes", -(-count // TOGETHER)):
        if texts and time.monotonic() - begin > 60 * minutes:
            break
        batch = [next(prompts).tolist() for _ in range(min(TOGETHER, count - at))]
        new, _ = regrSampling(batch, model, length - PROMPT, SAMPLING, generator=generator)
        texts += [prompt + tokens for prompt, tokens in zip(batch, new)]
    return torch.tensor(texts)


@torch.inference_mode()
def label_texts(teacher: nn.Module, texts: Tensor, device: str, prompt: int = 1) -> list[LabelledText]:
    """The texts `[N, n + 1]` with the teacher's distributions over the tokens that follow the first `prompt`."""
    labelled = []
    for tokens in followed(texts, "the target reads", len(texts)):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits = teacher(tokens[None, :-1].to(device), use_cache=False).logits[0, prompt - 1 :]
        parts = zip(*map(most_probable, logits.split(AT_A_TIME)))
        labelled.append(LabelledText(tokens.to(torch.int16), *(torch.cat(part).cpu() for part in parts)))
    return labelled


def shuffled(texts: Sequence[LabelledText], rng: random.Random) -> Iterator[LabelledText]:
    """The texts in random order, again and again."""
    while True:
        yield from rng.sample(texts, len(texts))


def sources_of(
    stage: Stage, tokens: Tensor, minutes: float, teacher: nn.Module | None, device: str, rng: random.Random
) -> dict[int, Iterator[Any]]:
    """For each row length of a stage, endless windows of `tokens[N]`, or for acceptance endless `LabelledText`s. The
    teacher writes for `minutes` at most."""
    if not stage.acceptance:
        return {length: windows(tokens, length, rng) for length in (*stage.lengths, *stage.last_lengths)}
    assert teacher is not None, "acceptance is a teacher's"
    sources = {}
    for length, count in stage.acceptance.items():
        if length == min(stage.acceptance):
            texts = write_texts(teacher, windows(tokens, PROMPT - 1, rng), count, length + 1, minutes)
            labelled = label_texts(teacher, texts, device, PROMPT)
        else:
            texts = torch.stack(list(islice(windows(tokens, length, rng), count)))
            labelled = label_texts(teacher, texts, device)
        sources[length] = shuffled(labelled, rng)
    return sources


def new_model(layers: int, width: int) -> nn.Module:
    """A GPT-NeoX model with random weights."""
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // HEAD,
            intermediate_size=4 * width,
            max_position_embeddings=CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def parse(argv: Sequence[str] | None) -> Namespace:
    """The flags, checked. Raises UserError for what cannot be used."""
    parser = Parser(
        prog="python -m scripts.trainBundled",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    texts = "files or folders to train on; PATH:3 counts it three times"
    parser.add_argument("--texts", nargs="+", type=text, required=True, help=texts)
    parser.add_argument("--heldout", nargs="*", type=path, default=[], help="texts whose perplexity is printed")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which to train")
    minutes = "at most this long for each stage of a model"
    parser.add_argument("--minutes", type=number(0.01, 10**6), default=math.inf, help=minutes)
    parser.add_argument("--tokens", type=whole(1), help="at most this many tokens for each stage of a model")
    parser.add_argument("--stage", type=whole(1, 5), default=1, help="start at this stage, from the weights in --out")
    parser.add_argument("--out", type=path, default=ROOT / "models")
    parser.add_argument("--device", type=text, help="(cuda if there is one)")
    parser.add_argument("--seed", type=whole(0, 10**9), default=0)
    args = parser.parse_args(argv)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    for name in args.models:
        recipe = MODELS[name]
        if args.stage > len(recipe.stages):
            raise UserError(f"bundled-{name} has no stage {args.stage}, the last is {len(recipe.stages)}")
        if args.stage > 1:
            find_model(folder_of(args, name))
        if recipe.teacher and recipe.teacher not in args.models:
            find_model(folder_of(args, recipe.teacher))
    args.device = pick_device(args.device)
    return args


def folder_of(args: Namespace, name: str) -> Path:
    """The folder of a bundled model."""
    return Path(os.path.abspath(args.out)) / f"bundled-{name}"


def run(args: Namespace) -> None:
    """Train the tokenizer if there is none, then the models, and print their perplexities."""
    documents = [document for path in args.texts for document in read_texts(path)]
    heldout = {file: read(file) for file in args.heldout}
    if not documents:
        raise UserError("the --texts hold no text; name others")
    folder = folder_of(args, "target")
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(sorted(set(documents)), folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = encode(tokenizer, documents)
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} characters, {len(tokens):,} tokens", flush=True)
    if len(tokens) <= 2 * CONTEXT:
        raise UserError(f"the --texts hold {len(tokens)} tokens, and rows of {CONTEXT} are cut from them; give more")
    for name in args.models:
        model = CachedModel(train_model(args, name, tokenizer, tokens))
        for file, words in heldout.items():
            ppl = calculate_ppl_corpus(words, tokenizer, model)["target"]
            figures = f"{ppl.token_ppl:.3f} per token, {ppl.word_ppl:.2f} per word"
            print(f"  perplexity on {file.name}: {figures}", flush=True)


def train_model(args: Namespace, name: str, tokenizer: PreTrainedTokenizerBase, tokens: Tensor) -> nn.Module:
    """Train a model through its stages and save it after each. Returns it in float32, with the weights as stored."""
    recipe, folder = MODELS[name], folder_of(args, name)
    torch.manual_seed(args.seed)
    model = new_model(recipe.layers, recipe.width) if args.stage == 1 else load(folder)
    teacher = load(folder_of(args, recipe.teacher)).eval().to(args.device) if recipe.teacher else None
    for turn, stage in list(enumerate(recipe.stages, 1))[args.stage - 1 :]:
        begin, rng = time.monotonic(), random.Random(args.seed + turn - 1)
        sources = sources_of(stage, tokens, args.minutes / 3, teacher, args.device, rng)
        left = max(args.minutes - (time.monotonic() - begin) / 60, args.minutes / 3)
        stage = replace(stage, tokens=min(stage.tokens, args.tokens or stage.tokens))
        steps, seen, loss = train(model, sources, stage, left, teacher, args.device, f"bundled-{name}, stage {turn}")
        print(
            f"bundled-{name}: {sum(p.numel() for p in model.parameters()):,} parameters, stage {turn}: "
            f"{steps:,} steps, {seen:,} tokens, loss {loss:.4f}",
            flush=True,
        )
        model = model.cpu().to(torch.bfloat16)  # As stored: the next stage starts from what is stored.
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = model.float().eval()
    return model


def main(argv: Sequence[str] | None = None) -> int:
    return as_command("trainBundled", lambda: run(parse(argv)), "The stages that ended are kept.")


if __name__ == "__main__":
    sys.exit(main())
