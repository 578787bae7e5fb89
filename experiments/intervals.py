"""Figures of timed texts: medians with 95 % bootstrap intervals over processes and prompts, paired ratios, a row of
figures for each method, and the speed-up by category of prompt as Spec-Bench defines it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.schema import QueueFigures, TimedText

# Fewer values have no 95 % interval: the range of 5 holds the median in 94 % of all cases, that of 3 in 75 %.
FEW = 6
RESAMPLES = 1000
OVERALL = "overall (Spec-Bench's mean)"


class Interval(NamedTuple):
    """A median or another statistic, and the ends of its 95 % bootstrap interval. nan: not known."""

    middle: float
    low: float
    high: float


class Range(Interval):
    """A statistic of fewer than FEW independent values, the least value, and the largest."""


def interval(
    values: Sequence[float | None] | np.ndarray,
    statistic: Callable[..., Any] = np.median,
    clusters: Sequence[Sequence[Any]] = (),
) -> Interval:
    """The median or the mean of `values`, and its 95 % bootstrap interval; their `Range` where fewer than FEW are
    independent.

    statistic: np.median or np.mean.
    clusters: of each value, the groups it belongs to, for example its process and its prompt. A resample draws each
        kind of cluster with replacement, and takes of each value as many copies as the product of the draws (Owen,
        The pigeonhole bootstrap, 2007). Values of one prompt are not independent: to resample them one by one would
        give intervals that are too narrow. Where all values share one cluster they are resampled one by one.

    The ends are percentiles, their distances from the middle k/(k - 1) times as large, for k clusters of the rarer
    kind: few clusters spread less than their population. Values that are nan or None are left out. The ends of
    fewer than two values are nan.
    """
    array = np.asarray(values, dtype=float)
    known = ~np.isnan(array)
    kinds = [[cluster for cluster, here in zip(kind, known) if here] for kind in zip(*clusters)]
    array = array[known]
    if not len(array):
        return Range(float("nan"), float("nan"), float("nan"))
    middle = float(statistic(array))
    if len(array) < 2:
        return Range(middle, float("nan"), float("nan"))
    kinds = [kind for kind in kinds if len(set(kind)) > 1] or [list(range(len(array)))]
    if len(set(zip(*kinds))) < FEW:
        return Range(middle, float(array.min()), float(array.max()))
    if np.ptp(array) == 0:
        return Interval(middle, middle, middle)
    indices = tuple(tuple(np.unique(kind, return_inverse=True)[1].tolist()) for kind in kinds)
    return Interval(middle, *resampled(tuple(array.tolist()), statistic, indices))


@functools.lru_cache(maxsize=4096)  # The documentation shows the same figures at several places.
def resampled(
    values: tuple[float, ...], statistic: Callable[..., Any], kinds: tuple[tuple[int, ...], ...]
) -> tuple[float, float]:
    """The ends of the 95 % interval of some values. kinds: for each kind of cluster, that of each value."""
    rng, order = np.random.default_rng(0), np.argsort(values)
    array, copies = np.array(values)[order], np.ones((RESAMPLES, len(values)))
    sizes = [max(kind) + 1 for kind in kinds]
    for kind, size in zip(kinds, sizes):
        copies *= rng.multinomial(size, [1 / size] * size, RESAMPLES)[:, np.array(kind)[order]]
    copies = copies[copies.sum(1) > 0]
    total = copies.cumsum(1)
    if statistic is np.mean:
        drawn = copies @ array / total[:, -1]
    else:
        half = total[:, -1:] / 2
        drawn = (array[(total >= half).argmax(1)] + array[(total > half).argmax(1)]) / 2
    middle, wider = statistic(array), min(sizes) / (min(sizes) - 1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(middle - wider * (middle - low)), float(middle + wider * (high - middle))


def sources(texts: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The clusters of timed texts: the process that wrote each, and its prompt (of a queue its repeat)."""
    return [(text.get("process", 0), text.get("prompt", text["repeat"])) for text in texts]


def speedup(
    timed: Sequence[TimedText] | Sequence[QueueFigures],
    method: str,
    baseline: str,
    figure: Literal["throughput", "tpot"] = "throughput",
) -> Interval:
    """The median of `method`'s figure over `baseline`'s, of each prompt, repeat and process that both have; of queues
    the prompt is the repeat. A text of one token has no TPOT."""
    lines: Sequence[Any] = timed
    upper, lower = (
        {
            (*source, line["repeat"]): line[figure]
            for line, source in zip(lines, sources(lines))
            if line["method"] == name and line[figure] is not None
        }
        for name in (method, baseline)
    )
    pairs = {key: value / lower[key] for key, value in upper.items() if key in lower}
    return interval(list(pairs.values()), clusters=[(process, prompt) for process, prompt, _ in pairs])


def summarize(
    texts: Sequence[TimedText], baseline: str = "target", queues: Sequence[QueueFigures] = ()
) -> list[dict[str, Any]]:
    """One row of figures for each method, in order: medians with intervals or ranges over prompts and repeats. The
    speed-up over `baseline` is the median of paired throughput ratios. queues: those of the texts, if there are any;
    then throughput and speed-up are of queues."""
    rows, timed = [], queues or texts
    for name in dict.fromkeys(text["method"] for text in texts):
        of_method: list[Any] = [text for text in texts if text["method"] == name]
        of_queues: list[Any] = [line for line in timed if line["method"] == name]
        row: dict[str, Any] = {"method": name, "runs": len(of_method)}
        for figure in ("ttft", "tpot", "report_tpot", "tokens_per_round", "seconds"):
            row[figure] = interval([text[figure] for text in of_method], clusters=sources(of_method))
        row["throughput"] = interval([line["throughput"] for line in of_queues], clusters=sources(of_queues))
        for figure in ("rounds", "drafted", "accepted"):
            row[figure] = np.mean([text[figure] for text in of_method])
        row["speedup"] = speedup(timed, name, baseline)
        tested, passed = tested_and_passed(of_method)
        row["alpha"] = sum(passed) / sum(tested) if any(tested) else float("nan")
        row["acceptance_by_position"] = [a / t for t, a in zip(tested, passed) if t]
        rows.append(row)
    return rows


def tested_and_passed(texts: Sequence[TimedText]) -> tuple[list[int], list[int]]:
    """How often the guess at each position of a round was tested, and how often it passed, over all texts."""
    counts = itertools.zip_longest(*(text["acceptance_by_position"] for text in texts), fillvalue=(0, 0))
    sums = [[sum(column) for column in zip(*position)] for position in counts]
    return [tested for tested, _ in sums], [passed for _, passed in sums]


def categories(texts: Iterable[TimedText]) -> list[str]:
    """In order. Empty if the prompts have none."""
    return list(dict.fromkeys(text["category"] for text in texts if "category" in text))


def by_category(texts: Sequence[TimedText]) -> dict[str, list[dict[str, Any]]]:
    """`summarize` of the texts of each category, and of all as OVERALL; in each row "specBench" too (`spec_bench`)."""
    groups = {category: [text for text in texts if text["category"] == category] for category in categories(texts)}
    return {
        category: [row | {"specBench": spec_bench(group, row["method"])} for row in summarize(group)]
        for category, group in (groups | {OVERALL: list(texts)}).items()
    }


def spec_bench(texts: Sequence[TimedText], method: str) -> Interval:
    """The speed-up over some questions, as Spec-Bench defines it (Xia et al. 2024, arXiv 2401.07851; `speed` and
    `get_mean_speedup` in evaluation/speed.py of hemingkx/Spec-Bench).

    The speed of a question is the new tokens of all its turns over their seconds, prefill included. The speed-up is the
    mean speed of the method over the mean speed of the target, and that of several runs, here repeats, the mean of
    theirs. Spec-Bench's "overall" is the same over the questions of all tasks: it is not a mean over tasks.

    Texts that only one of the two has written, and repeats that lack questions, do not count. The interval is a
    bootstrap over questions; of fewer than FEW, their `Range`.
    """
    written = [{(t["repeat"], t["prompt"]): t for t in texts if t["method"] == name} for name in (method, "target")]
    # {(repeat, question): [[tokens, seconds] of the method, of the target]}
    totals: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
    for key in written[0].keys() & written[1].keys():
        pair = [by_key[key] for by_key in written]
        totals[key[0], pair[0]["question"]] += [[text["tokens"], text["seconds"]] for text in pair]
    counts = Counter(repeat for repeat, _ in totals)
    repeats = [repeat for repeat, count in counts.items() if count == max(counts.values())]
    questions = [number for number in {n for _, n in totals} if all((repeat, number) in totals for repeat in repeats)]
    if not questions:
        return Range(float("nan"), float("nan"), float("nan"))
    tokens, seconds = np.array([[totals[repeat, number] for repeat in repeats] for number in questions]).T
    speeds = tokens / seconds  # [2, repeats, questions]
    of_method, of_target = speeds.mean(-1)
    ratio = float((of_method / of_target).mean())
    if len(questions) < FEW:
        alone = speeds[0] / speeds[1]
        return Range(ratio, float(alone.min()), float(alone.max()))
    drawn = np.random.default_rng(0).integers(len(questions), size=(2000, len(questions)))
    of_method, of_target = speeds[:, :, drawn].mean(-1)  # [repeats, resamples]
    return Interval(ratio, *map(float, np.percentile((of_method / of_target).mean(0), [2.5, 97.5])))
