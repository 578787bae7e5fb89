"""`draw`: the figure of a benchmark."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmark.records import BenchmarkRecord
from experiments.speed import interval, summarize

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

# The colour of a bar: that of the first word that the method's name contains.
COLOURS = {
    "transformers": "#c9c9c9",
    "compiled": "#5a9bd8",
    "no cache": "#f6c3bd",
    "eager": "#9fc5ec",
    "inside": "#9fc5ec",
    "": "#e5d3b3",
}
STYLES = {
    ("target", "eager"): "o--",
    ("target", "compiled"): "o-",
    ("draft", "eager"): "s--",
    ("draft", "compiled"): "s-",
}


def draw(record: BenchmarkRecord, path: Path) -> None:
    """Write the figure of a record: tokens per second by method, and how near forwards are to the memory limit."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), dpi=120, width_ratios=(1.25, 1))
    draw_speed(left, record)
    draw_limits(right, record)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    flags, machine = record["flags"], record["machine"]
    shapes = " (shapes; random weights, synthetic acceptance)" if flags["shapes"] else ""
    figure.suptitle(
        f"{flags['target']} with {flags['draft']}{shapes}, {record['dtype']}, {machine['processor']}, "
        f"{machine['threads']} threads",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def draw_speed(axes: plt.Axes, record: BenchmarkRecord) -> None:
    """One bar for each method."""
    rows = summarize(record["speed"], "plain, eager")[::-1]
    for y, row in enumerate(rows):
        middle, low, high = row["throughput"]
        colour = next(colour for word, colour in COLOURS.items() if word in row["method"])
        error = None if low != low else [[max(middle - low, 0)], [max(high - middle, 0)]]
        axes.barh(y, middle, xerr=error, color=colour, ecolor="#555555", capsize=2, height=0.7)
        axes.text(0, y + 0.02, f"  {middle:,.0f}" if middle >= 100 else f"  {middle:.3g}", va="center", fontsize=8)
    axes.set(yticks=range(len(rows)), yticklabels=[row["method"] for row in rows], xlabel="tokens per second")
    axes.tick_params(axis="y", labelsize=9, length=0)


def draw_limits(axes: plt.Axes, record: BenchmarkRecord) -> None:
    """One line for each model and variant, over the tokens scored at once."""
    for (role, variant), style in STYLES.items():
        lines = [line for line in record["forwards"] if (line["role"], line["variant"]) == (role, variant)]
        if lines:
            shares = zip(*(interval(line["share"]) for line in lines))
            middle, low, high = ([100 * value for value in values] for values in shares)
            colour = "#2c3e50" if role == "target" else "#d98c3f"
            axes.plot(range(len(lines)), middle, style, color=colour, markersize=5, label=f"{role}, {variant}")
            axes.fill_between(range(len(lines)), low, high, color=colour, alpha=0.12, linewidth=0)
    widths = sorted({line["tokens"] for line in record["forwards"]})
    axes.axhline(100, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(
        xticks=range(len(widths)),
        xticklabels=widths,
        xlabel="tokens scored at once",
        ylim=(0, None),
        ylabel="% of the limit",
    )
    axes.set_title("time to read as many bytes / time of the forward", fontsize=9, loc="left")
    axes.legend(fontsize=8, edgecolor="none", framealpha=0.8)
