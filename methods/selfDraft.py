"""The target's own copy with weights of few bits guesses for it: no other model, no training, no second KV cache
(QuantSpec, Tiwari et al., arXiv 2502.10424; SubSpec, Wang et al., arXiv 2509.18344).

A decode step takes as long as it takes to read the weights. A copy in 4 bits has 0.28 of the bytes of bfloat16, one in
6 bits 0.41, and it agrees with the target more often than a small model does. It reads and writes the target's KV
cache: the committed tokens' keys and values are the target's own, and those of the guesses are overwritten when the
target scores them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from engine.cachedModel import CachedModel
from engine.copies import Copies, Follow
from engine.quantised import BITS
from methods.treeSampling import TreeDrafter
from regrSampling import regrSampling
from utils import Sampling, UserError, probabilities

TEXTS = 4, 64  # that the target writes for `trials`, and the most tokens of each, and of the prompt before it
TIMINGS = 5  # of each forward
CLOSE = 0.03  # A gain is measured to this precision.
PREFERRED = 6, 5, 4, 8  # bits: the earlier of two copies whose gains are close

Make = Callable[[CachedModel], CachedModel]  # prepares a copy for decoding


def copies_of(target: CachedModel, bits: Sequence[int] = BITS, follow: Follow | None = None) -> Copies:
    """The copies of `target`, computed or read from disk. bits: those that will be needed, of BITS. follow: f(work,
    title, steps), shows progress. Raises UserError for a target whose layers cannot be rounded."""
    try:
        return Copies(target, bits, follow)
    except RuntimeError as error:
        raise UserError(f"{target.name} cannot draft for itself: {error}") from None


class SelfDrafter(TreeDrafter):
    """The target's own copy guesses, chains or trees. bits: of its weights. For the other arguments see
    `ModelDrafter`."""

    def __init__(
        self, target: CachedModel, bits: int = 6, temperature: float | None = None, top_p: float | None = None
    ) -> None:
        if bits not in BITS:
            raise UserError(f"a copy has {', '.join(map(str, BITS))} bits, not {bits}")
        super().__init__(copies_of(target, [bits]).of(bits, target), temperature, top_p)


@dataclass(frozen=True)
class MeasuredCopy:
    """A copy in `bits` bits. alpha: sum min(p, q). cost: the time of its decode step, and scoring: that of the target's
    forward of gamma + 1 tokens, over that of a plain decode step."""

    bits: int
    alpha: float
    cost: float
    scoring: float


def best_copy(measured: Sequence[MeasuredCopy], gamma: int) -> MeasuredCopy:
    """The copy with the most expected tokens per second (theorem 3.8 of arXiv 2211.17192)."""
    scoring = statistics.median(copy.scoring for copy in measured)  # It does not depend on the copy.
    gains = {c: sum(c.alpha**i for i in range(gamma + 1)) / (gamma * c.cost + scoring) for c in measured}
    close = [copy for copy, gain in gains.items() if gain >= (1 - CLOSE) * max(gains.values())]
    return min(close, key=lambda copy: PREFERRED.index(copy.bits))


@torch.inference_mode()
def trials(
    target: CachedModel,
    copies: Copies,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    gamma: int,
    make: Make = lambda copy: copy,
) -> Iterator[MeasuredCopy]:
    """Measurements of the copies of all BITS on short texts with which the target continues the ends of some prompts.
    One copy is in memory at a time. The repetition penalty is left out: it changes the distributions of all alike."""
    sampling = replace(sampling, repetition_penalty=1.0)
    count, length = TEXTS
    width = min([length, target.context // 2, *map(len, prompts[:count])])
    ends, generator = [prompt[-width:] for prompt in prompts[:count]], Generator(target.device).manual_seed(1)
    gamma = min(gamma, target.context - width - 1)
    new = min(length, target.context - width - gamma)
    texts, _ = regrSampling(ends, target, new, sampling, generator=generator)
    text = torch.tensor([end + tokens for end, tokens in zip(ends, texts)], device=target.device)
    p = probabilities(target.score(text)[:, width - 1 :], sampling)
    for bits in BITS:
        copy = make(copies.of(bits, target))
        alpha = torch.minimum(p, probabilities(copy.score(text)[:, width - 1 :], sampling)).sum(-1).mean().item()
        cost, scoring = relative_times(text[:1], target, copy, sampling, gamma)
        del copy
        yield MeasuredCopy(bits, alpha, cost, scoring)


def relative_times(
    text: Tensor, target: CachedModel, copy: CachedModel, sampling: Sampling, gamma: int
) -> tuple[float, float]:
    """`MeasuredCopy.cost` and `scoring` after a text `[1, n]`: medians of ratios to a plain step just before. A machine
    that is busy for a while changes both times of such a pair."""
    length = text.shape[1]
    target.reserve(1, length + gamma)
    at = torch.arange(length + gamma, device=text.device)[None]
    target.forward(text, at[:, :length])
    last, u = slice(length - 1, length), torch.full((gamma, 1), 0.5, dtype=torch.float32, device=text.device)
    plain = partial(target.draw, text[:, last], at[:, last], u[:1], sampling)
    drafting = partial(copy.draw, text[:, last], at[:, length - 1 : -1], u, sampling)
    scoring = partial(target.forward, text[:, last].expand(-1, gamma + 1), at[:, length - 1 :])
    ratios = [(seconds(drafting) / seconds(plain), seconds(scoring) / seconds(plain)) for _ in range(TIMINGS)]
    draws, forwards = zip(*ratios)
    return statistics.median(draws) / gamma, statistics.median(forwards)


def seconds(step: Callable[[], Tensor | tuple[Tensor, ...]]) -> float:
    """The time that a step takes, until its result is on the host."""
    start = time.perf_counter()
    result = step()
    (result if isinstance(result, Tensor) else result[0]).flatten()[-1].item()
    return time.perf_counter() - start
