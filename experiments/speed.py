"""Timing methods side by side: interleaved, repeated, with intervals.

TTFT: from the call to the first token on the host. TPOT: (t_last - t_first) / (n - 1). Throughput: n / t_last. The
course report divides the total time, prefill included, by n; that figure is kept beside them as `report_tpot`.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from scipy.stats import bootstrap
from torch import Generator

from decoding.rows import EndOfText, Record
from experiments.lines import TimedText

Written = tuple[Sequence[Sequence[int]], Sequence[Record]]  # new tokens and records, one of each for each prompt
WARM = 8  # tokens of the text that each method writes untimed, right before a timed one
# Fewer values have no 95 % interval: the range of 5 holds the median in 94 % of all cases, that of 3 in 75 %.
FEW = 6


class Interval(NamedTuple):
    """A median or another statistic, and the ends of its 95 % bootstrap interval. nan: not known."""

    middle: float
    low: float
    high: float


class Range(Interval):
    """A statistic of fewer than FEW values, the least of them, and the largest."""


class Timed(Protocol):
    """A method that can be timed: it continues one prompt."""

    def __call__(self, prompt: list[int], generator: Generator, first: int | None = None) -> Written:
        """The new tokens and their record, each in a list of one. first: end after that many tokens, or a few more,
        with a KV cache as large as ever."""


def ends_after(count: int) -> EndOfText:
    """`end_of_text` of `Rows` that ends a single row at its `count`-th token."""
    numbers = itertools.count(1)
    return lambda row, token: next(numbers) >= count


@contextmanager
def quiet(device: torch.device | str) -> Iterator[None]:
    """A timed stretch: without garbage collection, and with an empty device queue at both ends."""
    gc.collect()
    gc.disable()
    try:
        synchronize(device)
        yield
        synchronize(device)
    finally:
        gc.enable()


def synchronize(device: torch.device | str) -> None:
    """Wait until a GPU has done all work it was given."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def digest(tokens: Sequence[Any]) -> str:
    """16 hexadecimal digits that identify token ids or texts."""
    return hashlib.sha256(repr(tokens).encode(errors="surrogatepass")).hexdigest()[:16]


def measure(
    methods: Mapping[str, Timed],
    prompts: Sequence[list[int]],
    repeats: int,
    seed: int,
    device: torch.device | str,
    warm_up: int = 2,
    numbers: Sequence[int] | None = None,
) -> Iterator[TimedText]:
    """Time every method on every prompt, `repeats` times, interleaved (A B C A B C ...).

    methods: {name: method}. warm_up: calls of each method that come first and do not count. numbers: of the prompts
        that are timed; None: all.
    Right before each timed text, the method writes its first WARM tokens untimed. Otherwise the first token pays for
    what ran before: after another engine's process, this one's threads sleep and the processor's caches hold other
    weights, and the row that came next had twice the TTFT of the others.
    The generator's seed depends only on the prompt and the repeat, so a method's tokens do not depend on which other
    methods run.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    for _ in range(warm_up if numbers else 0):
        for method in methods.values():
            method(prompts[0], Generator(device).manual_seed(seed))
    gc.collect()
    gc.freeze()  # Otherwise each collection between measurements visits all of torch's objects: a quarter of a second.
    try:
        for repeat in range(repeats):
            for index in numbers:
                prompt = prompts[index]
                for name, method in methods.items():
                    warming, generator = (
                        Generator(device).manual_seed(seed + 1_000_003 * repeat + index) for _ in range(2)
                    )
                    with quiet(device):
                        method(prompt, warming, WARM)
                        synchronize(device)
                        (tokens,), (record,) = method(prompt, generator)
                    yield timed_text(name, index, repeat, prompt, tokens, record)
    finally:
        gc.unfreeze()


def timed_text(
    method: str, number: int, repeat: int, prompt: Sequence[int], tokens: Sequence[int], record: Record
) -> TimedText:
    """The figures of one timed text. number: of the prompt."""
    return {
        "method": method,
        "prompt": number,
        "repeat": repeat,
        "prompt_tokens": len(prompt),
        "tokens": record.tokens,
        "ttft": record.ttft,
        "tpot": record.tpot,
        "throughput": record.throughput,
        "report_tpot": record.times[-1] / record.tokens,
        "tokens_per_round": record.tokens_per_round,
        "seconds": record.times[-1],
        "rounds": len(record.times) - 1,
        "drafted": sum(record.drafted),
        "accepted": sum(record.accepted),
        "acceptance_by_position": record.acceptance_by_position,
        "input": digest(prompt),
        "sha256": digest(tokens),
    }


def interval(
    values: Sequence[float | None] | np.ndarray, statistic: Callable[..., Any] = np.median, seed: int = 0
) -> Interval:
    """The median (or another statistic) of `values`, and its 95 % bootstrap interval by percentiles; of fewer than FEW
    values their `Range`.

    Values that are nan or None are left out. The ends of fewer than two values are nan.
    """
    array = np.asarray(values, dtype=float)
    array = array[~np.isnan(array)]
    if not len(array):
        return Range(float("nan"), float("nan"), float("nan"))
    middle = float(statistic(array))
    if len(array) < 2:
        return Range(middle, float("nan"), float("nan"))
    if len(array) < FEW:
        return Range(middle, float(array.min()), float(array.max()))
    if np.ptp(array) == 0:
        return Interval(middle, middle, middle)
    return Interval(middle, *resampled(tuple(array.tolist()), statistic, seed))


@functools.lru_cache(maxsize=4096)  # The documentation shows the same figures at several places.
def resampled(values: tuple[float, ...], statistic: Callable[..., Any], seed: int) -> tuple[float, float]:
    """The ends of the 95 % bootstrap interval of some values."""
    ends = bootstrap(
        (np.array(values),), statistic, method="percentile", n_resamples=2000, rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(ends.low), float(ends.high)


def paired_ratios(
    texts: Sequence[TimedText], method: str, baseline: str, figure: Literal["throughput", "tpot"] = "throughput"
) -> list[float]:
    """`method`'s figure over `baseline`'s, for each prompt and repeat that both have. A text of one token has no
    TPOT."""
    upper, lower = (
        {(text["prompt"], text["repeat"]): text[figure] for text in texts if text["method"] == name}
        for name in (method, baseline)
    )
    pairs = ((value, lower.get(key)) for key, value in upper.items())
    return [a / b for a, b in pairs if a is not None and b is not None]


def summarize(texts: Sequence[TimedText], baseline: str = "target") -> list[dict[str, Any]]:
    """One row of figures for each method, in order.

    Medians with intervals or ranges over prompts and repeats; the speed-up over `baseline` is the median of paired
    throughput ratios.
    """
    rows = []
    for name in dict.fromkeys(text["method"] for text in texts):
        of_method: list[Any] = [text for text in texts if text["method"] == name]
        tested, passed = acceptance(of_method)
        rows.append(
            {
                "method": name,
                "runs": len(of_method),
                **{
                    figure: interval([text[figure] for text in of_method])
                    for figure in ("ttft", "tpot", "throughput", "report_tpot", "tokens_per_round", "seconds")
                },
                **{
                    figure: np.mean([text[figure] for text in of_method])
                    for figure in ("rounds", "drafted", "accepted")
                },
                "speedup": interval(paired_ratios(texts, name, baseline)),
                "alpha": passed.sum() / tested.sum() if len(tested) else float("nan"),
                "acceptance_by_position": [float(a / t) for t, a in zip(tested, passed) if t],
            }
        )
    return rows


def acceptance(texts: Sequence[TimedText]) -> tuple[np.ndarray, np.ndarray]:
    """How often the guess at each position of a round was tested, and how often it passed."""
    counts = [text["acceptance_by_position"] for text in texts]
    width = max(map(len, counts))
    tested, passed = (np.array([sum(c[i][j] for c in counts if i < len(c)) for i in range(width)]) for j in (0, 1))
    return tested, passed
