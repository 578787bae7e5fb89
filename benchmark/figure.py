"""`draw`: the figure of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import matplotlib

from benchmark.records import BenchmarkRecord
from benchmark.tables import gamma_of, texts_of
from experiments.intervals import Range, interval, summarize
from inputs.commandLine import counted
from report.tables import median

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen
from matplotlib.patches import Patch  # noqa: E402

# The colour of a bar: that of the first word that the method's name contains.
COLOURS = {
    "transformers": "#c9c9c9",
    "compiled": "#5a9bd8",
    "no cache": "#f6c3bd",
    "eager": "#9fc5ec",
    "inside": "#9fc5ec",
    "": "#e5d3b3",
}
KINDS = {  # the legend
    "compiled": "this project, compiled",
    "eager": "this project, eager",
    "transformers": "transformers",
    "no cache": "without a KV cache",
    "": "another engine",
}
STYLES = {
    ("target", "eager"): "o--",
    ("target", "compiled"): "o-",
    ("draft", "eager"): "s--",
    ("draft", "compiled"): "s-",
    ("copy", "compiled"): "^-",
}


ROLES = {"target": "#2c3e50", "draft": "#d98c3f", "copy": "#5a9bd8"}  # {role: its colour}
PARTS = {  # {part of a round: its colour}
    "drafting": "#d98c3f",
    "scoring and verification": "#2c3e50",
    "the rest": "#c9c9c9",
}


def draw(record: BenchmarkRecord, path: Path) -> None:
    """Write the figure of a record: tokens per second by method, how near forwards are to the memory limit, and what
    the parts of a round take."""
    rows = summarize(record["speed"], "plain, eager")
    figure = plt.figure(figsize=(12, 1.6 + 0.24 * max(len(rows), 14)), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(2.4, 1))
    speed, limits, parts = (figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1]))
    draw_speed(speed, rows, texts_of(record))
    draw_limits(limits, record)
    draw_round(parts, record)
    for axes in (speed, limits, parts):
        axes.spines[["top", "right"]].set_visible(False)
    flags, machine = record["flags"], record["machine"]
    shapes = " (shapes; random weights, synthetic acceptance)" if flags["shapes"] else ""
    figure.suptitle(
        f"{flags['target']} with {flags['draft']}{shapes}, {record['dtype']}, {machine['processor']}, "
        f"{counted(machine['threads'], 'thread')}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def draw_speed(axes: plt.Axes, rows: Sequence[dict[str, Any]], texts: dict[str, str]) -> None:
    """One bar for each method, the fastest first. rows: of `summarize`. texts: {method: verdict on its text}."""
    rows = sorted(rows, key=lambda row: row["throughput"].middle)
    longest = max(max(filter(isfinite, row["throughput"])) for row in rows)
    for y, row in enumerate(rows):
        middle, low, high = row["throughput"]
        colour = COLOURS[kind_of(row["method"])]
        error = None if isnan(low) else [[max(middle - low, 0)], [max(high - middle, 0)]]
        hatch = "////" if texts.get(row["method"], "").startswith("found") else None
        axes.barh(y, middle, color=colour, hatch=hatch, edgecolor="#777777", linewidth=0, height=0.72)
        axes.errorbar(middle, y, xerr=error, color="#555555", capsize=2, linewidth=1)
        end = middle if isnan(high) else high
        axes.text(end + 0.012 * longest, y, str(median(row["throughput"])), va="center", fontsize=8)
    axes.set(
        yticks=range(len(rows)),
        yticklabels=[row["method"] for row in rows],
        xlabel=f"tokens per second: medians{legend_of(rows)}",
        xlim=(0, 1.1 * longest),
        ylim=(-0.6, len(rows) - 0.4),
    )
    axes.tick_params(axis="y", labelsize=9, length=0)
    used = {kind_of(row["method"]) for row in rows}
    handles = [Patch(color=COLOURS[word], label=label) for word, label in KINDS.items() if word in used]
    handles.append(Patch(facecolor="white", edgecolor="#777777", hatch="////", label="a test found a difference"))
    axes.legend(handles=handles, fontsize=8, loc="lower right", edgecolor="none", framealpha=0.8)


def kind_of(method: str) -> str:
    """The word of COLOURS that a row is drawn by."""
    word = next(word for word in COLOURS if word in method)
    return "eager" if word == "inside" else word


def legend_of(rows: Sequence[dict[str, Any]]) -> str:
    """What the lines at the ends of the bars are."""
    ranges = {isinstance(row["throughput"], Range) for row in rows}
    return {True: " and ranges", False: " and 95 % intervals"}[ranges.pop()] if len(ranges) == 1 else ", intervals"


def round_shares(record: BenchmarkRecord) -> dict[str, tuple[float, dict[str, float]]]:
    """{variant: (seconds of a round, {part: its share})}. What the filters and draws take is within the parts."""
    taken: dict[str, dict[str, list[float]]] = {}
    for line in record["parts"]:
        taken.setdefault(line["variant"], {})[line["part"]] = line["seconds"]
    shares = {}
    for variant, seconds in taken.items():
        draft, scoring = (
            interval([a / b for a, b in zip(seconds[part], seconds["round"])]).middle
            for part in ("draft step", "scoring")
        )
        drafting = gamma_of(record, variant) * draft
        parts = dict(zip(PARTS, (drafting, scoring, max(0.0, 1 - drafting - scoring))))
        shares[variant] = interval(seconds["round"]).middle, parts
    return shares


def draw_round(axes: plt.Axes, record: BenchmarkRecord) -> None:
    """One stacked bar for each variant: the parts of a round, as shares of it."""
    shares = round_shares(record)
    for y, (_, parts) in enumerate(shares.values()):
        left = 0.0
        for part, share in parts.items():
            axes.barh(y, 100 * share, left=left, color=PARTS[part], height=0.6, label=None if y else part)
            if share > 0.04:
                axes.text(
                    left + 50 * share, y, f"{100 * share:.0f} %", ha="center", va="center", fontsize=8, color="white"
                )
            left += 100 * share
    labels = [f"{variant},\n{1e3 * seconds:.3g} ms" for variant, (seconds, _) in shares.items()]
    axes.set(yticks=range(len(shares)), yticklabels=labels, ylim=(len(shares) - 0.5, -0.5), xlim=(0, 105))
    axes.set_xlabel("% of the round")
    axes.tick_params(axis="y", labelsize=8, length=0)
    counts = dict.fromkeys(str(gamma_of(record, variant)) for variant in shares)
    axes.set_title(f"a round of {' or '.join(counts)} guesses, all accepted", fontsize=9, loc="left")
    axes.legend(fontsize=8, edgecolor="none", ncols=3, loc="upper center", bbox_to_anchor=(0.47, -0.4))


def draw_limits(axes: plt.Axes, record: BenchmarkRecord) -> None:
    """One line for each model and variant, over the tokens scored at once."""
    widths = sorted({line["tokens"] for line in record["forwards"]})
    for (role, variant), style in STYLES.items():
        lines = [line for line in record["forwards"] if (line["role"], line["variant"]) == (role, variant)]
        if lines:
            at = [widths.index(line["tokens"]) for line in lines]
            shares = zip(*(interval(line["share"]) for line in lines))
            middle, low, high = ([100 * value for value in values] for values in shares)
            label = f"own copy in {record['flags']['draftBits']} bits" if role == "copy" else f"{role}, {variant}"
            axes.plot(at, middle, style, color=ROLES[role], markersize=5, label=label)
            axes.fill_between(at, low, high, color=ROLES[role], alpha=0.12, linewidth=0)
    axes.axhline(100, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(
        xticks=range(len(widths)),
        xticklabels=widths,
        xlabel="tokens scored at once",
        ylim=(0, None),
        ylabel="% of the limit",
    )
    axes.set_title("time to read as many bytes / time of the forward", fontsize=9, loc="left")
    axes.legend(fontsize=8, edgecolor="none", ncols=3, loc="upper center", bbox_to_anchor=(0.47, -0.17))
