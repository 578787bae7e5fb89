"""The target's own copy with weights of few bits guesses for it: no other model, no training, no second KV cache
(QuantSpec, Tiwari et al., arXiv 2502.10424; SubSpec, Wang et al., arXiv 2509.18344).

A decode step takes as long as it takes to read the weights. The copy is read in a third of the time, and agrees with
the target more often than a small model does. It reads and writes the target's KV cache: the committed tokens' keys and
values are the target's own, and those of the guesses are overwritten when the target scores them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from engine.cachedModel import CachedModel
from engine.copies import Copies, Follow
from engine.quantised import BITS
from methods.treeSampling import TreeDrafter
from regrSampling import regrSampling
from utils import Sampling, UserError, probabilities

TEXTS = 4, 128  # that the target writes for `trials`, and tokens of each
TIMINGS = 12  # of each forward
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


def own_text(target: CachedModel, rows: int, length: int) -> Tensor:
    """Text that the target writes from its first token on, int64 `[rows, length]`."""
    config = target.model.generation_config
    first = next((token for token in (config.bos_token_id, config.eos_token_id) if isinstance(token, int)), 0)
    length = min(length, target.context)
    generator = Generator(target.device).manual_seed(1)
    texts, _ = regrSampling([[first]] * rows, target, length - 1, Sampling(1.0, 0, 1.0), generator=generator)
    return torch.tensor([[first, *text] for text in texts], device=target.device)


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
    target: CachedModel, copies: Copies, sampling: Sampling, gamma: int, make: Make = lambda copy: copy
) -> Iterator[MeasuredCopy]:
    """Measurements of the copies of all BITS on a short text that the target writes. One of them is in memory at a
    time."""
    text = own_text(target, *TEXTS)
    p = probabilities(target.score(text), sampling)
    for bits in BITS:
        copy = make(copies.of(bits, target))
        alpha = torch.minimum(p, probabilities(copy.score(text), sampling)).sum(-1).mean().item()
        cost, scoring = relative_times(text[:1], target, (copy, 1), (target, gamma + 1))
        del copy
        yield MeasuredCopy(bits, alpha, cost, scoring)


def relative_times(text: Tensor, target: CachedModel, *forwards: tuple[CachedModel, int]) -> list[float]:
    """The times of forwards of each number of tokens after a text `[1, n]`, over that of a decode step of `target`
    just before: medians. A machine that is busy for a while changes both times of such a pair."""
    length = text.shape[1]
    target.reserve(1, length)
    at = torch.arange(length, device=text.device)[None]
    target.forward(text, at)

    def seconds(model: CachedModel, count: int) -> float:
        start = time.perf_counter()
        model.forward(text[:, -count:], at[:, -count:]).sum().item()
        return time.perf_counter() - start

    ratios: list[list[float]] = [[] for _ in forwards]
    for _ in range(TIMINGS):
        for forward, of_forward in zip(forwards, ratios):
            plain = seconds(target, 1)
            of_forward.append(seconds(*forward) / plain)
    return list(map(statistics.median, ratios))
