"""Figures of timed texts: medians with 95 % bootstrap intervals over processes and prompts, paired ratios, a row of
figures for each method, and the speed-up by category of prompt as Spec-Bench defines it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.schema import QueueFigures, SpeedLine, TimedText
from methods.catalogue import METHODS

FEW = 4  # Fewer processes, prompts or independent values have no 95 % interval (see `interval`).
RESAMPLES = 1000
OVERALL = "overall (Spec-Bench's mean)"


class Interval(NamedTuple):
    """A median or another statistic, and the ends of its 95 % bootstrap interval. nan: not known."""

    middle: float
    low: float
    high: float


class Range(Interval):
    """A statistic of values of fewer than FEW processes or prompts, the least value, and the largest."""


def interval(
    values: Sequence[float | None] | np.ndarray,
    statistic: Callable[..., Any] = np.median,
    clusters: Sequence[Sequence[Any]] = (),
) -> Interval:
    """The median or the mean of `values`, and its 95 % bootstrap interval; their `Range` where there are fewer than FEW
    clusters of some kind.

    statistic: np.median or np.mean.
    clusters: of each value, the groups it belongs to, for example its process and its prompt. Values that share all of
        them, the repeats, are replaced by their statistic. A resample draws each kind of cluster with replacement, and
        takes of each value as many copies as the product of the draws (Owen, The pigeonhole bootstrap, 2007). A kind
        with one cluster is left out; if no other is left, each value is a cluster.

    The ends are percentiles, their distances from the middle k/(k - 1) times as large, for k clusters of the rarer
    kind: few clusters spread less than their population. They are not below 0 if no value is.
    Coverage in simulations with normal effects of processes, prompts and both, for 4 to 10 prompts in one process or
    five, and 1 to 3 repeats: 90 to 100 % for medians, 86 to 100 % for means; for 3 prompts 85 and 84 %. Means of skewed
    values (log-normal, sigma 0.8) are covered in 80 %.
    Values that are nan or None are left out. The ends of fewer than two values are nan.
    """
    array = np.asarray(values, dtype=float)
    known = ~np.isnan(array)
    kinds = [[cluster for cluster, here in zip(kind, known) if here] for kind in zip(*clusters)]
    array = array[known]
    if not len(array):
        return Range(float("nan"), float("nan"), float("nan"))
    least, most = float(array.min()), float(array.max())
    kinds = [kind for kind in kinds if len(set(kind)) > 1] or [list(range(len(array)))]
    kinds = [list(map(sorted(set(kind)).index, kind)) for kind in kinds]  # numbered
    repeats = defaultdict[Any, list[float]](list)
    for shared, value in zip(zip(*kinds), array.tolist()):
        repeats[shared].append(value)
    averaged = tuple(of[0] if len(of) == 1 else float(statistic(of)) for of in repeats.values())
    middle = float(statistic(averaged))
    if len(array) < 2:
        return Range(middle, float("nan"), float("nan"))
    if min(map(max, kinds)) + 1 < FEW:
        return Range(middle, least, most)
    if least == most:
        return Interval(middle, middle, middle)
    low, high = resampled(averaged, statistic, tuple(zip(*repeats)))
    return Interval(middle, max(low, min(least, 0.0)), high)


@functools.lru_cache(maxsize=4096)  # The documentation shows the same figures at several places.
def resampled(
    values: tuple[float, ...], statistic: Callable[..., Any], kinds: tuple[tuple[int, ...], ...]
) -> tuple[float, float]:
    """The ends of the 95 % interval of some values. kinds: for each kind of cluster, that of each value."""
    rng, order = np.random.default_rng(0), np.argsort(values)
    array, copies = np.array(values)[order], np.ones((RESAMPLES, len(values)))
    for kind in kinds:
        copies *= draws(rng, kind)[:, order]
    copies = copies[copies.sum(1) > 0]
    total = copies.cumsum(1)
    if statistic is np.mean:
        drawn = copies @ array / total[:, -1]
    else:
        half = total[:, -1:] / 2
        drawn = (array[(total >= half).argmax(1)] + array[(total > half).argmax(1)]) / 2
    return ends(float(statistic(array)), drawn, min(max(kind) + 1 for kind in kinds))


def draws(rng: np.random.Generator, kind: Sequence[int]) -> np.ndarray:
    """How often each resample takes each value, int `[RESAMPLES, values]`, if it draws the clusters of one kind with
    replacement. kind: the cluster of each value."""
    size = max(kind) + 1
    return rng.multinomial(size, [1 / size] * size, RESAMPLES)[:, np.array(kind)]


def ends(middle: float, drawn: np.ndarray, k: int) -> tuple[float, float]:
    """The ends of an interval, from the statistics of the resamples. k: clusters of the rarer kind."""
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(middle - (middle - low) * k / (k - 1)), float(middle + (high - middle) * k / (k - 1))


def sources(texts: Iterable[Mapping[str, Any]]) -> list[tuple[tuple[int, int], int]]:
    """The clusters of timed texts: the process that wrote each, and its prompt (of a queue its repeat; of a turn of a
    conversation the question, as turns depend on the answers before them)."""
    return [((t.get("process", 0), t.get("rank", 0)), t.get("question", t.get("prompt", t["repeat"]))) for t in texts]


def speedup(
    timed: Sequence[TimedText] | Sequence[QueueFigures], method: str, baseline: str, figure: str = "throughput"
) -> Interval:
    """The median of `method`'s throughput, or another figure, over `baseline`'s, of each prompt, repeat and process
    that both have; of queues the prompt is the repeat."""
    lines: Sequence[Any] = timed
    upper, lower = (
        {
            (*source, line.get("prompt"), line["repeat"]): line[figure]
            for line, source in zip(lines, sources(lines))
            if line["method"] == name
        }
        for name in (method, baseline)
    )
    pairs = {key: value / lower[key] for key, value in upper.items() if key in lower}
    return interval(list(pairs.values()), clusters=[key[:2] for key in pairs])


def in_order(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The methods of timed texts or queues in the order of the catalogue; after them "gamma 1", "gamma 2", ..."""
    places = {name: place for place, name in enumerate(METHODS)}
    names = {line["method"] for line in lines}
    return sorted(names, key=lambda name: (places.get(name, len(places)), len(name), name))


def summarize(
    texts: Sequence[TimedText], baseline: str = "target", queues: Sequence[QueueFigures] = ()
) -> list[dict[str, Any]]:
    """One row of figures for each method (`in_order`): medians with intervals or ranges over prompts and repeats. The
    speed-up over `baseline` is the median of paired throughput ratios. queues: those of the texts, if there are any;
    then throughput and speed-up are of queues."""
    rows, timed = [], queues or texts
    for name in in_order(texts):
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


def too_fast(texts: Iterable[SpeedLine]) -> Iterator[str]:
    """What cannot be right: speed-ups above the tokens of a round."""
    groups = defaultdict[Any, list[SpeedLine]](list)
    for text in texts:
        swept = text["temperature"] if text["mode"] == "sweep" else None  # Elsewhere methods may have their own.
        groups[text["mode"], text["promptLen"], swept].append(text)
    for row in itertools.chain.from_iterable(map(summarize, groups.values())):
        if row["drafted"] and row["speedup"].low > (most := row["tokens_per_round"].high):
            fast = f"{row['method']} is {row['speedup'].middle:.2f} times as fast as plain decoding"
            yield f"{fast}, but a round commits at most {most:.2f} tokens: a fault of the measurement"


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
    mean speed of the method over the mean speed of the target, and that of several runs, here processes and repeats,
    the mean of theirs. Spec-Bench's "overall" is the same over the questions of all tasks: it is not a mean over tasks.

    Texts that only one of the two has written, and runs that lack questions, do not count. The interval is a bootstrap
    over questions and processes; of fewer than FEW of either, their `Range`.
    """
    written = [
        {(t.get("process", 0), t["repeat"], t["prompt"]): t for t in texts if t["method"] == name}
        for name in (method, "target")
    ]
    # {((process, repeat), question): [[tokens, seconds] of the method, of the target]}
    totals: dict[tuple[tuple[int, int], int], np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
    for key in written[0].keys() & written[1].keys():
        pair = [by_key[key] for by_key in written]
        totals[key[:2], pair[0]["question"]] += [[text["tokens"], text["seconds"]] for text in pair]
    counts = Counter(run for run, _ in totals)
    runs = [run for run, count in sorted(counts.items()) if count == max(counts.values())]
    questions = [number for number in {n for _, n in totals} if all((run, number) in totals for run in runs)]
    if not questions:
        return Range(float("nan"), float("nan"), float("nan"))
    tokens, seconds = np.array([[totals[run, number] for run in runs] for number in questions]).T
    speeds = tokens / seconds  # [2, runs, questions]
    of_method, of_target = speeds.mean(-1)
    ratio = float((of_method / of_target).mean())
    processes = np.unique([process for process, _ in runs], return_inverse=True)[1].tolist()
    fewest = min({len(questions), max(processes) + 1} - {1}, default=1)
    if fewest < FEW:
        alone = speeds[0] / speeds[1]
        return Range(ratio, float(alone.min()), float(alone.max()))
    rng = np.random.default_rng(0)
    of_method, of_target = speeds @ draws(rng, range(len(questions))).T  # [runs, resamples]
    drawn = np.average(of_method / of_target, axis=0, weights=draws(rng, processes).T)
    return Interval(ratio, *ends(ratio, drawn, fewest))
