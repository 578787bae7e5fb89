"""`train`: one stage of training a GPT-NeoX model: on a corpus, on a teacher's distribution, or for the share of
guesses that the teacher accepts.

Matrices of the layers are trained with Muon, all other parameters with AdamW. The learning rates warm up, then fall to
zero on a cosine.

A guess drawn from q passes with probability a = sum_x min(p(x), q(x)), where p and q are the distributions that tokens
are drawn from, after temperature and top-p. Distillation makes q close to p over the whole vocabulary instead. So a
draft learns from the target's distribution first, and last from this loss and from that distribution together
(DistillSpec, arXiv 2310.08461; LK losses, arXiv 2602.23881). A short run without the second part agreed less at
temperature 1. The target's forward costs several times a step of the draft. So its distributions are computed once for
each row and kept: for each token the KEPT most probable ones, 1.5 KiB.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer
from tqdm import tqdm

from utils import Sampling, least_kept

BATCH = 2048  # tokens in a step: 8 rows of 256, or 2 of 1024, or 1 of 2048
WARM_UP = 0.02  # share of a stage over which the learning rates rise
LAST = 0.8  # share of a stage after which its last row lengths are used
MUON_RATE, ADAM_RATE = 0.02, 3e-3
SAMPLING = Sampling()  # temperature 0.85, top-p 0.9: what a draft meets if no flag says otherwise
KEPT = 256  # tokens of the target's distribution that are kept
DIVERGENCE = 0.3  # weight of the divergence at temperature 1 beside -a
SHARPNESS = 4  # a token is inside the draft's nucleus by sigmoid(SHARPNESS * log(probability / edge))
WIDEST = 0.2  # the edge is at least this share of the least probable token inside
AT_A_TIME = 64  # distributions whose loss is computed at a time: they stay in the processor's cache


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
        minutes, before = (time.monotonic() - self.begin) / 60, self.share
        self.share = max(self.seen / self.tokens, minutes / self.minutes)
        speed = f"loss {self.mean_loss(50):.3f}, {self.seen / minutes / 60:,.0f} tokens/s"
        self.bar.set_postfix_str(speed, refresh=False)
        self.bar.update(min(100, 100 * self.share) - self.bar.n)
        if int(20 * before) != int(20 * self.share):
            line = f"{self.label}: {self.seen:,} tokens, loss {self.mean_loss(200):.4f}, {minutes:.1f} min"
            tqdm.write(line, file=sys.stderr)

    def mean_loss(self, steps: int) -> float:
        """The mean loss of the last steps."""
        return float(np.mean(self.losses[-steps:]))


def train(
    model: nn.Module,
    sources: Mapping[int, Iterator[Any]],
    stage: Stage,
    minutes: float = math.inf,
    teacher: nn.Module | None = None,
    device: str = "cpu",
    label: str = "",
) -> tuple[int, int, float]:
    """Train `model` for one stage, or for `minutes` if they end first.

    sources: {row length: endless texts}: tensors `[length + 1]`, or for acceptance `LabelledText`s.
    teacher: a model whose distributions are the labels, instead of the text's next tokens.
    Returns (steps, tokens read, mean loss of the last 5 %). The loss is the cross-entropy in nats per token, or for
    acceptance the share of guesses that the teacher would reject.
    """
    before = [p.detach().cpu().clone() for p in model.parameters()] if stage.averaged else []
    optimizers = make_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    model.train().to(device)
    progress = Progress(stage.tokens, minutes, label)
    while progress.share < 1:
        steps = len(progress.losses)
        factor = min(progress.share / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * progress.share))
        for group, rate in zip(groups, rates):
            group["lr"] = rate * stage.peak * factor
        lengths = stage.last_lengths if progress.share > LAST else stage.lengths
        length = lengths[steps % len(lengths)]
        batch = [next(sources[length]) for _ in range(BATCH // length)]
        loss = (rejection_loss if stage.acceptance else cross_entropy)(model, batch, teacher, device)
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
    return steps, progress.seen, progress.mean_loss(max(1, steps // 20))


def make_optimizers(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for all other parameters."""
    matrices = [p for p in model.gpt_neox.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def cross_entropy(model: nn.Module, batch: Sequence[Tensor], teacher: nn.Module | None, device: str) -> Tensor:
    """The mean cross-entropy of a batch of texts `[n + 1]`, read in bfloat16."""
    tokens = torch.stack(list(batch)).to(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
        labels = tokens[:, 1:].flatten()
        if teacher is not None:
            with torch.no_grad():
                labels = teacher(tokens[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels)


class LabelledText(NamedTuple):
    """A text of n + 1 tokens and what the target thinks of it.

    tokens: int16 `[n + 1]`. kept: the most probable tokens after each of the last m that have a next one, int16
    `[m, KEPT]`. p: the probabilities they are drawn with, plain: those at temperature 1 without top-p, float16
    `[m, KEPT]`.
    """

    tokens: Tensor
    kept: Tensor
    p: Tensor
    plain: Tensor


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`kept`, `p` and `plain` of a `LabelledText`, from `logits[N, V]`. A nucleus of more than KEPT tokens loses the
    least probable of them; the others keep their probabilities, about."""
    logits = logits.float()
    values, kept = logits.topk(min(KEPT, logits.shape[-1]))
    plain = (values - logits.logsumexp(-1, keepdim=True)).exp()
    logits = logits / SAMPLING.temperature
    p = (values / SAMPLING.temperature - logits.logsumexp(-1, keepdim=True)).exp()
    p = p.masked_fill(p.cumsum(-1) - p >= SAMPLING.top_p, 0.0)
    return kept.to(torch.int16), (p / p.sum(-1, keepdim=True).clamp(min=SAMPLING.top_p)).half(), plain.half()


def rejection_loss(model: nn.Module, batch: Sequence[LabelledText], teacher: nn.Module | None, device: str) -> Tensor:
    """The share of the guesses of `model` that the target would reject, the mean over texts of one length, with the
    gradient of `RejectionLoss`. The teacher has labelled the batch and is not asked again."""
    tokens, *labels = (torch.stack(parts).to(device) for parts in zip(*batch))
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1].long(), use_cache=False).logits[:, -labels[0].shape[1] :]
    return RejectionLoss.apply(logits.flatten(0, 1), *(label.flatten(0, 1) for label in labels))


class RejectionLoss(torch.autograd.Function):
    """The mean of 1 - a, a = sum_x min(p(x), q(x)), with the gradient of the mean of
    -a + DIVERGENCE * KL(target || draft at temperature 1).

    Top-p has no gradient. So the edge of the draft's nucleus is soft in a (`soft_nucleus`), and moves such that the
    nucleus always holds the same share. In the divergence, the tokens beyond KEPT count as one.

    The gradients are written by hand because autograd takes several times as long on a CPU.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, kept: Tensor, p: Tensor, plain: Tensor) -> Tensor:
        """logits `[N, V]`; kept, p, plain `[N, K]`, as in `LabelledText`."""
        grad, total = torch.empty_like(logits), 0.0
        for at in range(0, len(logits), AT_A_TIME):
            part = slice(at, at + AT_A_TIME)
            passed, descent = acceptance_gradient(logits[part].float(), kept[part].long(), p[part].float())
            descent.add_(
                divergence_gradient(logits[part].float(), kept[part].long(), plain[part].float()), alpha=DIVERGENCE
            )
            grad[part] = descent / len(logits)
            total += float((1 - passed).sum())
        ctx.save_for_backward(grad)
        return logits.new_tensor(total / len(logits), dtype=torch.float32)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient kept by `forward`."""
        return ctx.saved_tensors[0] * gradients[0], None, None, None


def soft_nucleus(probs: Tensor) -> tuple[Tensor, Tensor]:
    """How far each token is inside the nucleus of `probs[N, V]`, from 0 to 1 `[N, V]`, and the edge of the nucleus
    `[N, 1]`.

    The nucleus holds the most probable tokens, as many as it takes to reach top-p. A token is inside it or outside;
    a step from 0 to 1 has no gradient. So the step is made a slope. Its middle, the edge, is a probability between that
    of the last token inside and that of the first one outside (their geometric mean). A token at the edge counts as
    half inside, and one of twice its probability as 0.94.

    With top-p 0.9 and the probabilities 0.5, 0.3, 0.15 and 0.05, the first three tokens are the nucleus: two have only
    0.8 together. The edge is (0.15 * 0.05) ** 0.5 = 0.087. The tokens are inside by 0.999, 0.993, 0.9 and 0.1, where
    top-p itself says 1, 1, 1 and 0.

    If the first token outside is very improbable, the edge is WIDEST times the probability of the last one inside.
    """
    if probs.device.type == "cpu":
        ordered = torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    else:
        ordered = probs.sort(-1, descending=True).values
    inside = least_kept(ordered, SAMPLING.top_p)
    outside = probs.masked_fill(probs >= inside, 0.0).amax(-1, keepdim=True)
    edge = torch.maximum((inside * outside).sqrt(), WIDEST * inside)
    return (SHARPNESS * (probs.clamp(min=1e-30) / edge).log()).sigmoid_(), edge


def acceptance_gradient(logits: Tensor, kept: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """a `[N, 1]`, and the gradient of -a by `logits[N, V]`."""
    probs = (logits / SAMPLING.temperature).softmax(-1)
    inside, _ = soft_nucleus(probs)
    held = (inside * probs).sum(-1, keepdim=True)
    near = SHARPNESS * (1 - inside)  # d log inside / d log (probability / edge)
    # If a token's probability rises, the edge rises by `shift`: what the nucleus holds stays the same share.
    crowd = (probs * inside * near).sum(-1, keepdim=True).clamp(min=0.05)
    shift = probs * (inside + inside * near - held) / crowd
    q = (inside * probs / held).gather(-1, kept)
    passed = torch.minimum(p, q).sum(-1, keepdim=True)
    pull, near = torch.where(q < p, q, 0.0), near.gather(-1, kept)  # pull: d a / d log q
    grad = probs * pull.sum(-1, keepdim=True) + shift * (pull * near).sum(-1, keepdim=True)
    return passed, grad.scatter_add_(-1, kept, -pull * (1 + near)).div_(SAMPLING.temperature)


def divergence_gradient(logits: Tensor, kept: Tensor, plain: Tensor) -> Tensor:
    """The gradient of the divergence by `logits[N, V]`: q - p for the tokens kept, and for the rest its share of the
    difference."""
    probs = logits.softmax(-1)
    q = probs.gather(-1, kept)
    rest = (1 - plain.sum(-1, keepdim=True)).clamp(min=0) / (1 - q.sum(-1, keepdim=True)).clamp(min=1e-4)
    return probs.mul_(1 - rest).scatter_(-1, kept, q - plain)
