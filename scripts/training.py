"""`train`: one stage of training a GPT-NeoX model on a corpus: on its text, on a teacher's distribution, or for the
teacher's acceptance (scripts/acceptance.py).

Matrices of the layers are trained with Muon, all other parameters with AdamW. The learning rates warm up, then fall to
zero on a cosine.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from scripts.acceptance import PROMPT, labelled, rejection, shuffled, written

BATCH = 2048  # tokens in a step: 8 rows of 256, or 2 of 1024, or 1 of 2048
WARM_UP = 0.02  # share of a stage over which the learning rates rise
LAST = 0.8  # share of a stage after which its last row lengths are used
MUON_RATE, ADAM_RATE = 0.02, 3e-3


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    tokens: how many tokens it reads. peak: the highest learning rates, as a multiple of MUON_RATE and ADAM_RATE.
    lengths: the row lengths of its steps, in turn. last_lengths: those of its last fifth.
    acceptance: train for the teacher's acceptance on {row length: how many rows}, which are read again and again. The
        teacher writes the shortest rows; the others are windows of the corpus.
    averaged: keep the mean of the weights before and after the stage.
    """

    tokens: int
    peak: float
    lengths: tuple[int, ...]
    last_lengths: tuple[int, ...]
    acceptance: dict[int, int] | None = None
    averaged: bool = False


class Progress:
    """How far a stage is: `share` goes from 0 to 1, by tokens or by time, whichever is further. Shown in a bar, and on
    a line after each 5 %."""

    def __init__(self, tokens: int, minutes: float, label: str) -> None:
        self.tokens, self.minutes, self.label = tokens, minutes, label
        self.begin, self.share, self.seen = time.monotonic(), 0.0, 0
        self.losses: list[float] = []
        bar_format = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        self.bar = tqdm(total=100, desc=label, bar_format=bar_format, disable=None, mininterval=5)

    def add(self, loss: float, tokens: int) -> None:
        """Count one step."""
        self.losses.append(loss)
        self.seen += tokens
        seconds = time.monotonic() - self.begin
        before, self.share = self.share, max(self.seen / self.tokens, seconds / 60 / self.minutes)
        speed = f"loss {np.mean(self.losses[-50:]):.3f}, {self.seen / seconds:,.0f} tokens/s"
        self.bar.set_postfix_str(speed, refresh=False)
        self.bar.update(min(100, 100 * self.share) - self.bar.n)
        if int(20 * before) != int(20 * self.share):
            loss = float(np.mean(self.losses[-200:]))
            line = f"{self.label}: {self.seen:,} tokens, loss {loss:.4f}, {seconds / 60:.1f} min"
            tqdm.write(line, file=sys.stderr)


def train(
    model: nn.Module,
    tokens: Tensor,
    stage: Stage,
    minutes: float = math.inf,
    teacher: nn.Module | None = None,
    device: str = "cpu",
    seed: int = 0,
    label: str = "",
) -> tuple[int, int, float]:
    """Train `model` for one stage on the corpus `tokens[N]`, or for `minutes` if they end first.

    teacher: a model whose distributions are the labels, instead of the text's next tokens.
    Returns (steps, tokens read, mean loss of the last 5 %). The loss is the cross-entropy in nats per token, or for
    acceptance the share of guesses that the teacher would reject.
    """
    begin = time.monotonic()
    sources = sources_of(stage, tokens, minutes / 3, teacher, device, random.Random(seed))
    before = [p.detach().cpu().clone() for p in model.parameters()] if stage.averaged else []
    optimizers = make_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    model.train().to(device)
    left = minutes - (time.monotonic() - begin) / 60
    progress = Progress(stage.tokens, max(left, minutes / 3), label)
    while progress.share < 1:
        steps = len(progress.losses)
        factor = schedule(progress.share) if steps else 0.0
        for group, full in zip(groups, rates):
            group["lr"] = full * stage.peak * factor
        in_turn = stage.last_lengths if progress.share > LAST else stage.lengths
        length = in_turn[steps % len(in_turn)]
        batch = [next(sources[length]) for _ in range(BATCH // length)]
        if stage.acceptance:
            loss = rejection(model, batch, device)
        else:
            loss = loss_of(model, torch.stack(batch).to(device), teacher, device)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.add(loss.item(), len(batch) * length)
    progress.bar.close()
    with torch.no_grad():
        for parameter, earlier in zip(model.parameters(), before):
            parameter.lerp_(earlier.to(device), 0.5)
    steps = len(progress.losses)
    return steps, progress.seen, float(np.mean(progress.losses[-max(1, steps // 20) :]))


def sources_of(
    stage: Stage, tokens: Tensor, minutes: float, teacher: nn.Module | None, device: str, rng: random.Random
) -> dict[int, Iterator[Any]]:
    """For each row length of a stage, endless windows of `tokens[N]`, or for acceptance endless `Row`s. The teacher
    writes for `minutes` at most."""
    if not stage.acceptance:
        return {length: windows(tokens, length, rng) for length in (*stage.lengths, *stage.last_lengths)}
    assert teacher is not None, "acceptance is a teacher's"
    sources = {}
    for length, rows in stage.acceptance.items():
        if length == min(stage.acceptance):
            texts = written(teacher, windows(tokens, PROMPT - 1, rng), rows, length + 1, minutes)
            labels = labelled(teacher, texts, device, PROMPT)
        else:
            labels = labelled(teacher, torch.stack(list(islice(windows(tokens, length, rng), rows))), device)
        sources[length] = shuffled(labels, rng)
    return sources


def windows(tokens: Tensor, length: int, rng: random.Random) -> Iterator[Tensor]:
    """Endless windows `[length + 1]` of `tokens[N]`: passes over the corpus from a random offset, in random order."""
    while True:
        starts = list(range(rng.randrange(length), len(tokens) - length - 1, length))
        rng.shuffle(starts)
        for start in starts:
            yield tokens[start : start + length + 1]


def make_optimizers(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for all other parameters."""
    matrices = [p for p in model.gpt_neox.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def schedule(share: float) -> float:
    """The factor of the learning rates at this share of a stage: it rises linearly, then falls on a cosine."""
    return min(share / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share))


def loss_of(model: nn.Module, batch: Tensor, teacher: nn.Module | None, device: str) -> Tensor:
    """The mean cross-entropy of `batch[B, n + 1]`, read in bfloat16."""
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
        labels = batch[:, 1:].flatten()
        if teacher is not None:
            with torch.no_grad():
                labels = teacher(batch[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels)
