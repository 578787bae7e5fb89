"""Training for acceptance: text that the target wrote, and the share of guesses it would accept.

A guess drawn from q passes with probability a = sum_x min(p(x), q(x)), where p and q are the distributions that tokens
are drawn from, after temperature and top-p. Distillation makes q close to p over the whole vocabulary instead. So a
draft learns from the target's distribution first, and last from this loss and from that distribution together
(DistillSpec, arXiv 2310.08461; LK losses, arXiv 2602.23881). A short run without the second part agreed less at
temperature 1.

The target's forward costs several times a step of the draft. So its distributions are computed once for each row and
kept: for each token the KEPT most probable ones, 1.5 KiB.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from engine.cachedModel import CachedModel
from engine.progress import followed
from regrSampling import regrSampling
from utils import Sampling, least_kept

SAMPLING = Sampling()  # temperature 0.85, top-p 0.9: what a draft meets if no flag says otherwise
PROMPT = 64  # tokens of the corpus that the target continues
TOGETHER = 256  # rows written at a time
KEPT = 256  # tokens of the target's distribution that are kept
DIVERGENCE = 0.3  # weight of the divergence at temperature 1 beside -a
SHARPNESS = 4  # a token is inside the draft's nucleus by sigmoid(SHARPNESS * log(probability / edge))
WIDEST = 0.2  # the edge is at least this share of the least probable token inside
AT_A_TIME = 64  # distributions whose loss is computed at a time: they stay in the processor's cache


class Row(NamedTuple):
    """A text of n + 1 tokens and what the target thinks of it.

    tokens: int16 `[n + 1]`. kept: the most probable tokens after each of the last m that have a next one, int16
    `[m, KEPT]`. p: the probabilities they are drawn with, plain: those at temperature 1 without top-p, float16
    `[m, KEPT]`.
    """

    tokens: Tensor
    kept: Tensor
    p: Tensor
    plain: Tensor


def written(teacher: nn.Module, prompts: Iterator[Tensor], rows: int, length: int, minutes: float) -> Tensor:
    """Texts `[rows, length]`: prompts of the corpus, continued by the teacher with SAMPLING. Fewer rows if they take
    longer than `minutes`."""
    model = CachedModel(copy.deepcopy(teacher).to(torch.bfloat16))
    generator = torch.Generator(model.device).manual_seed(rows)
    begin = time.monotonic()
    texts: list[list[int]] = []
    for at in followed(range(0, rows, TOGETHER), "the target writes", -(-rows // TOGETHER)):
        if texts and time.monotonic() - begin > 60 * minutes:
            break
        batch = [next(prompts).tolist() for _ in range(min(TOGETHER, rows - at))]
        new, _ = regrSampling(batch, model, length - PROMPT, SAMPLING, generator=generator)
        texts += [prompt + tokens for prompt, tokens in zip(batch, new)]
    return torch.tensor(texts)


@torch.inference_mode()
def labelled(teacher: nn.Module, texts: Tensor, device: str, prompt: int = 1) -> list[Row]:
    """The texts `[rows, n + 1]` with the teacher's distributions over the tokens that follow the first `prompt`."""
    rows = []
    for text in followed(texts, "the target reads", len(texts)):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits = teacher(text[None, :-1].to(device), use_cache=False).logits[0, prompt - 1 :]
        parts = zip(*map(most_probable, logits.split(AT_A_TIME)))
        rows.append(Row(text.to(torch.int16), *(torch.cat(part).cpu() for part in parts)))
    return rows


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`kept`, `p` and `plain` of a `Row`, from `logits[N, V]`. A nucleus of more than KEPT tokens loses the least
    probable of them; the others keep their probabilities, about."""
    logits = logits.float()
    values, kept = logits.topk(min(KEPT, logits.shape[-1]))
    plain = (values - logits.logsumexp(-1, keepdim=True)).exp()
    logits = logits / SAMPLING.temperature
    p = (values / SAMPLING.temperature - logits.logsumexp(-1, keepdim=True)).exp()
    p = p.masked_fill(p.cumsum(-1) - p >= SAMPLING.top_p, 0.0)
    return kept.to(torch.int16), (p / p.sum(-1, keepdim=True).clamp(min=SAMPLING.top_p)).half(), plain.half()


def shuffled(rows: Sequence[Row], rng: random.Random) -> Iterator[Row]:
    """The rows in random order, again and again."""
    while True:
        yield from rng.sample(rows, len(rows))


def rejection(model: nn.Module, rows: Sequence[Row], device: str) -> Tensor:
    """The share of the guesses of `model` that the target would reject, the mean over rows of one length, with the
    gradient of `Rejected`."""
    tokens, *labels = (torch.stack(parts).to(device) for parts in zip(*rows))
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1].long(), use_cache=False).logits[:, -labels[0].shape[1] :]
    return Rejected.apply(logits.flatten(0, 1), *(label.flatten(0, 1) for label in labels))


class Rejected(torch.autograd.Function):
    """The mean of 1 - a, a = sum_x min(p(x), q(x)), with the gradient of the mean of
    -a + DIVERGENCE * KL(target || draft at temperature 1).

    Top-p has no gradient. So the edge of the draft's nucleus is soft in a (`soft_nucleus`), and moves such that the
    nucleus always holds the same share. In the divergence, the tokens beyond KEPT count as one.

    The gradients are written by hand because autograd takes several times as long on a CPU.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, kept: Tensor, p: Tensor, plain: Tensor) -> Tensor:
        """logits `[N, V]`; kept, p, plain `[N, K]`, as in `Row`."""
        grad, total = torch.empty_like(logits), 0.0
        for at in range(0, len(logits), AT_A_TIME):
            part = slice(at, at + AT_A_TIME)
            passed, descent = of_acceptance(logits[part].float(), kept[part].long(), p[part].float())
            descent.add_(of_divergence(logits[part].float(), kept[part].long(), plain[part].float()), alpha=DIVERGENCE)
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
    ordered = torch.from_numpy(np.sort(probs.cpu().numpy(), axis=-1)).flip(-1).to(probs.device)
    inside = least_kept(ordered, SAMPLING.top_p)
    outside = probs.masked_fill(probs >= inside, 0.0).amax(-1, keepdim=True)
    edge = torch.maximum((inside * outside).sqrt(), WIDEST * inside)
    return (SHARPNESS * (probs.clamp(min=1e-30) / edge).log()).sigmoid_(), edge


def of_acceptance(logits: Tensor, kept: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
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


def of_divergence(logits: Tensor, kept: Tensor, plain: Tensor) -> Tensor:
    """The gradient of the divergence by `logits[N, V]`: q - p for the tokens kept, and for the rest its share of the
    difference."""
    probs = logits.softmax(-1)
    q = probs.gather(-1, kept)
    rest = (1 - plain.sum(-1, keepdim=True)).clamp(min=0) / (1 - q.sum(-1, keepdim=True)).clamp(min=1e-4)
    return probs.mul_(1 - rest).scatter_(-1, kept, q - plain)
