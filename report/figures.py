"""Figures of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from experiments.lines import CostsLine, Line, LosslessLine, PowerLine, of_kind
from experiments.sweep import predict
from lossless.evidence import BINS
from report.runTables import Prediction, swept
from report.tableFormat import name_of
from utils import UserError

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
    """Draw the histograms of u of all samplers as a heat map: methods above, planted mistakes below. Returns the path.

    Raises UserError for a record of an earlier version, whose rows have not the same number of tokens.
    """
    sampled, planted = of_kind(lines, LosslessLine), of_kind(lines, PowerLine)
    if not all("counts_shown" in line for line in (*sampled, *planted)):
        raise UserError("this record of --lossless is of an earlier version, without counts_shown: measure it anew")
    several = len({line["dtype"] for line in sampled}) > 1
    methods = {name_of(line["method"]) + f", {line['dtype']}" * several: line["counts_shown"] for line in sampled}
    mistakes = {line["mistake"]: line["counts_shown"] for line in planted}
    heights = [max(len(methods), 1), max(len(mistakes), 1)]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 1.9 + 0.21 * sum(heights)), dpi=120, sharex=True, height_ratios=heights, layout="constrained"
    )
    draw_bins(above, methods, f"methods: u of the first {sampled[0]['tokens_shown']:,} tokens each, in {BINS} bins")
    image = draw_bins(below, mistakes, "the same of samplers with a planted mistake")
    below.set_xlabel("u (right: tokens to which the draft gives more probability than the target)")
    bar = figure.colorbar(image, ax=[above, below], extend="both", aspect=35, pad=0.01)
    bar.set_label("z of the bin's count: 0 if it is as the target's distribution says")
    return save(figure, path)


def draw_bins(axes: Axes, counts_of: dict[str, list[int]], title: str) -> Any:
    """Draw one row of a heat map for each histogram: the z of each bin's count, if u is uniform. Returns the image.

    counts_of: {label: counts of the bins}.
    """
    counts = np.array(list(counts_of.values()))
    share = 1 / counts.shape[1]
    expected = counts.sum(1, keepdims=True) * share
    z = (counts - expected) / np.sqrt(expected * (1 - share))
    image = axes.imshow(z, cmap="RdBu_r", vmin=-5, vmax=5, aspect="auto", extent=(0, 1, len(z), 0))
    axes.set_yticks(np.arange(len(z)) + 0.5, list(counts_of), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=10)
    return image
