"""Figures of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from experiments.lines import CostsLine, Line, LosslessLine, PowerLine, of_kind
from experiments.sweep import predict
from report.runTables import Prediction, swept

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

BLUE, RED, GREY, DARK = "#bfd3f2", "#c0392b", "#777777", "#2c3e50"
THEORIES = (  # key of `sweep.predict`, style of the line, label
    ("theory", "o-", "theory, scoring at its measured cost"),
    ("paper", ":", "theory, scoring at the cost of one token"),
)


def draw(mode: str, lines: Sequence[Line], folder: Path, run: str) -> str:
    """Draw the figure of a run's mode, "sweep" or "lossless". Returns its path in the folder of the results."""
    path = {"sweep": draw_sweep, "lossless": draw_lossless}[mode](lines, folder / "figures" / f"{mode}-{run}.png")
    return path.relative_to(folder).as_posix()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a file, in a folder that is made if it is missing. Returns the path."""
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def draw_sweep(lines: Sequence[Line], path: Path) -> Path:
    """Draw tokens per second and seconds per text over gamma, one row of axes a temperature. Returns the path."""
    costs = of_kind(lines, CostsLine)
    figure, grid = plt.subplots(len(costs), 2, figsize=(11, 3.6 * len(costs) + 0.5), dpi=120, squeeze=False)
    for cost, (left, right) in zip(costs, grid):
        prediction = predict(swept(lines, cost), cost)
        draw_over_gamma(left, prediction, "throughput", "tokens per second")
        draw_over_gamma(right, prediction, "seconds", "seconds a text")
        conditions = f"temperature {cost['temperature']}, top-p {cost['top_p']}"
        title = f"{conditions}: alpha {prediction['alpha']:.2f}, c {prediction['c']:.2f}"
        left.set_title(title, loc="left", fontsize=10)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    return save(figure, path)


def draw_over_gamma(axes: Axes, prediction: Prediction, key: str, label: str) -> None:
    """Draw one figure over gamma: measured with 95 % intervals, plain decoding as a line, theory as curves.

    key: "throughput" or "seconds".
    """
    gammas = [row["gamma"] for row in prediction["rows"]]
    middle, low, high = np.array([row[key] for row in prediction["rows"]]).T
    error = [middle - low, high - middle]
    axes.bar(gammas, middle, yerr=error, color=BLUE, capsize=2, ecolor=GREY, label="speculative, measured")
    plain = prediction["plain"][key][0]
    axes.axhline(plain, color=RED, linestyle="--", label="plain decoding")
    for theory, style, name in THEORIES:
        ratio = np.array([row[theory] for row in prediction["rows"]])
        expected = plain * ratio if key == "throughput" else plain / ratio
        axes.plot(gammas, expected, style, markersize=3, color=DARK, label=name)
    axes.set(xlabel="gamma", ylabel=label, xticks=gammas)
    axes.spines[["top", "right"]].set_visible(False)


def draw_lossless(lines: Sequence[Line], path: Path) -> Path:
    """Draw the histograms of u: of all methods tested, and of one planted mistake. Returns the path."""
    sampled = {line["method"]: line["counts"] for line in of_kind(lines, LosslessLine)}
    planted = {line["mistake"]: line["counts"] for line in of_kind(lines, PowerLine) if line["shown"]}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), dpi=120, sharey=True)
    draw_histograms(left, sampled, plt.cm.tab10.colors, "each method" if len(sampled) > 1 else "the sampler")
    draw_histograms(right, planted, [RED], "the planted mistake")
    low, high = left.get_ylim()
    left.set(ylabel="tokens in the bin, over the mean", ylim=(max(0, min(low, 0.5)), max(high, 1.5)))
    figure.tight_layout()
    return save(figure, path)


def draw_histograms(axes: Axes, counts_of: dict[str, list[int]], colours: Sequence[object], samplers: str) -> None:
    """Draw histograms of u, over the band in which the bins of a uniform u lie.

    counts_of: {label: counts of the bins}. samplers: whose they are, in words.
    """
    for (label, bins), colour in zip(counts_of.items(), colours):
        counts = np.array(bins)
        edges = np.linspace(0, 1, len(counts) + 1)
        axes.stairs(counts / counts.mean(), edges, baseline=None, color=colour, linewidth=1.3, label=label)
    spread = 3.29 * counts.mean() ** -0.5  # A normal number lies within 3.29 standard deviations 999 times of 1,000.
    label = "99.9 % of an exact sampler's bins"
    axes.axhspan(1 - spread, 1 + spread, color=BLUE, alpha=0.6, linewidth=0, zorder=0, label=label)
    axes.axhline(1, color=GREY, linewidth=0.8, zorder=0)
    axes.set_title(f"u of {counts.sum():,} tokens of {samplers}", loc="left", fontsize=10)
    axes.set(xlabel="u (at the right: tokens the draft gives more than the target)", xlim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
