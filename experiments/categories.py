"""Speed by category of prompt, and the speed-up as Spec-Bench defines it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.intervals import FEW, Interval, Range, summarize
from experiments.schema import TimedText

OVERALL = "overall (Spec-Bench's mean)"


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
