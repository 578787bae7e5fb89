"""Figures of the measurements of a run."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from experiments import schema
from experiments.intervals import FEW, OVERALL, Interval, Range, by_category, categories, summarize
from experiments.schema import CostsLine, Line, LosslessLine, RunLine, SpeedLine, of_kind
from experiments.theory import predict, predict_batches
from inputs.commandLine import visible
from lossless.evidence import BINS
from report.runTables import ALONE, Prediction, finished, measured_on, swept_texts
from report.tables import median, name_of

plt.switch_backend("Agg")  # Figures are files: no window opens.
plt.rcParams.update({
    "figure.dpi": 120, "figure.constrained_layout.use": True, "axes.titlelocation": "left", "axes.titlesize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 8, "legend.frameon": False,
})  # fmt: skip

BLUE, RED, GREY, DARK, BROWN = "#bfd3f2", "#c0392b", "#777777", "#2c3e50", "#e5d3b3"
THEORIES = {  # {key of `theory.predict`: style of the line, label}
    "theory": ("-", "theory, from the overlaps of p and q and the measured costs"),
    "paper": (":", "theorem 3.8: i.i.d. guesses, scoring at the cost of one token"),
}


def draw_figures(run: RunLine, lines: Sequence[Line], folder: Path) -> list[str]:
    """Draw each figure for which the run has lines. Returns their paths in the folder of the results. One that cannot
    be written is said and left out."""
    lines = finished(lines, of_kind(lines, schema.EngineLine))
    timed = [line for line in of_kind(lines, SpeedLine) if line["mode"] != "sweep"]
    needed = {
        draw_speed: [line for line in timed if line["mode"] == "compare"],
        draw_sweep: of_kind(lines, CostsLine),
        draw_batches: of_kind(lines, schema.BatchCostsLine),
        draw_categories: categories(timed),
        draw_lossless: of_kind(lines, LosslessLine),
    }
    names = []
    for drawer in (drawer for drawer, of_run in needed.items() if of_run):
        name = f"figures/{drawer.__name__.removeprefix('draw_')}-{run['run']}.png"
        try:
            write_figure(drawer(lines), folder / name, measured_on(run, lines))
            names.append(name)
        except OSError as error:  # The measurements are whole without it, and need the room that a part of it took.
            with suppress(OSError):
                (folder / name).unlink()
            print(f"{name} cannot be written: {error.strerror or error}.")
    return names


def write_figure(figure: Figure, path: Path, about: str, texts: Mapping[str, str] | None = None) -> None:
    """Write a figure as a PNG file, in a folder that is created if it is missing. about: what stands under it. texts:
    fields of the file."""
    path.parent.mkdir(exist_ok=True)
    about = fill(visible(about), int(18 * figure.get_figwidth()))
    figure.supxlabel(about, x=0.01, ha="left", fontsize=7, color=GREY, parse_math=False)
    figure.savefig(path, metadata=texts, pil_kwargs={"optimize": True})
    plt.close(figure)


def bars_of(figures: Iterable[Interval]) -> str:
    """What the error bars of some figures are."""
    kinds = {isinstance(figure, Range) for figure in figures}
    return "intervals or ranges" if len(kinds) > 1 else "ranges" if True in kinds else "95 % intervals"


def draw_speed(lines: Sequence[Line]) -> Figure:
    """Draw tokens per second by method of --compare as bars, the fastest first. Hatched: a test tells the text from the
    target's."""
    speed = [line for line in of_kind(lines, SpeedLine) if line["mode"] == "compare"]
    lengths = list(dict.fromkeys(line["promptLen"] for line in speed))
    speed = [line for line in speed if line["promptLen"] == lengths[0]]
    shown = "compare", lengths[0]
    queues = [line for line in of_kind(lines, schema.QueueLine) if (line["mode"], line["promptLen"]) == shown]
    rows = sorted(summarize(speed, queues=queues), key=lambda row: row["throughput"].middle)
    engines = of_kind(lines, schema.EngineLine)
    rejected = {line["method"] for line in engines if (drawn := line["drawn"]) and drawn["seen_by"]}
    figure, axes = plt.subplots(figsize=(8, 1.1 + 0.26 * len(rows)))
    longest = max(np.nanmax(row["throughput"]) for row in rows)
    for y, row in enumerate(rows):
        middle, low, high = row["throughput"]
        colour = GREY if row["method"] == "target" else BROWN if ":" in row["method"] else BLUE
        hatch = "////" if row["method"] in rejected else None
        axes.barh(y, middle, color=colour, hatch=hatch, edgecolor=GREY, linewidth=0, height=0.72)
        error = np.nan_to_num([[max(middle - low, 0)], [max(high - middle, 0)]])
        axes.errorbar(middle, y, xerr=error, color=DARK, capsize=2, linewidth=1)
        text = f"{median(row['throughput'])} ({median(row['speedup'])} of plain)"
        axes.text(np.nanmax([middle, high]) + 0.01 * longest, y, text, va="center", fontsize=8)
    names = [name_of(row["method"]) for row in rows]
    axes.set(yticks=range(len(rows)), yticklabels=names, xlabel="tokens per second")
    axes.set(xlim=(0, 1.22 * longest), ylim=(-0.6, len(rows) - 0.4))
    others = "; brown: other programs" if any(":" in row["method"] for row in rows) else ""
    others += ", hatched where a test tells the text from the target's" if rejected else ""
    what = f"queues of {queues[0]['batch']} texts at a time, " if queues else ""
    what += f"prompts of {lengths[0]} tokens, " if len(lengths) > 1 else ""
    axes.set_title(fill(f"{what}medians, {bars_of(row['throughput'] for row in rows)}{others}", 100))
    return figure


def draw_sweep(lines: Sequence[Line]) -> Figure:
    """Draw the speed-up over gamma beside theory, and of several temperatures also as a heat map."""
    costs = sorted(of_kind(lines, CostsLine), key=lambda cost: cost["temperature"])
    lengths = list(dict.fromkeys(cost["promptLen"] for cost in of_kind(lines, CostsLine)))
    costs = [cost for cost in costs if cost["promptLen"] == lengths[0]]
    predictions = [predict(swept_texts(lines, cost), cost) for cost in costs]
    several = len(costs) > 1
    size = (12 if several else 8), 4.4
    figure, grid = plt.subplots(1, 1 + several, figsize=size, squeeze=False)
    axes = grid[0, 0]  # a colour for each temperature: points with intervals, and theory as lines
    colours = plt.cm.plasma(np.linspace(0.05, 0.8, len(costs))) if several else ["#2f6fb3"]
    for number, (cost, prediction, colour) in enumerate(zip(costs, predictions, colours)):
        gammas = np.array([row["gamma"] for row in prediction["rows"]])
        middle, low, high = np.nan_to_num(np.array([row["speedup"] for row in prediction["rows"]]).T)
        error = [np.maximum(middle - low, 0) * (low > 0), np.maximum(high - middle, 0)]
        aside = 0.11 * (number - (len(costs) - 1) / 2)  # so that intervals do not cover each other
        label = f"measured, temperature {cost['temperature']}: alpha {prediction['alpha']:.2f}, c {prediction['c']:.2f}"
        axes.errorbar(gammas + aside, middle, error, fmt="o", color=colour, markersize=4.5, capsize=2, label=label)
        for theory, (style, name) in list(THEORIES.items())[: 1 if several else 2]:
            axes.plot(gammas, [row[theory] for row in prediction["rows"]], style, color=colour, linewidth=1.1)
            if not number:  # In the legend the lines of all temperatures are one.
                axes.plot([], [], style, color=GREY if several else colour, label=name)
    axes.axhline(1, color=RED, linestyle="--", linewidth=1, label="plain decoding")
    axes.set(xlabel="gamma", ylabel="speed-up over plain decoding", xticks=gammas)
    bars = bars_of(row["speedup"] for prediction in predictions for row in prediction["rows"])
    prompts = f"; prompts of {lengths[0]} tokens" if len(lengths) > 1 else ""
    axes.set_title(f"medians of paired ratios, {bars}; top-p {costs[0]['top_p']}{prompts}")
    figure.legend(ncols=2 + several, loc="outside upper left")
    if several:
        rows = {cost["temperature"]: prediction for cost, prediction in zip(costs, predictions)}
        draw_heat_map(grid[0, 1], rows, "temperature")
    return figure


def reach_of(rows: Mapping[Any, Prediction]) -> float:
    """How far the speed-ups of some predictions are from 1 at most."""
    ratios = [row["speedup"][0] for prediction in rows.values() for row in prediction["rows"]]
    return np.nanmax(np.abs(np.array(ratios) - 1), initial=0.05)


def draw_heat_map(axes: Axes, rows: Mapping[Any, Prediction], label: str, reach: float | None = None) -> None:
    """Draw the speed-up as colours, gamma by row: blue where it is above 1, red where it is below. label: what the rows
    are. reach: how far from 1 the colours go; None: as far as the speed-ups."""
    gammas = list(dict.fromkeys(row["gamma"] for prediction in rows.values() for row in prediction["rows"]))
    gammas = gammas or [""]  # of a run that was stopped early: matplotlib warns of a map without columns
    ratios, reach = np.full((len(rows), len(gammas)), np.nan), reach or reach_of(rows)
    for ratio, prediction in zip(ratios, rows.values()):
        for row in prediction["rows"]:
            ratio[gammas.index(row["gamma"])] = row["speedup"][0]
    # No speed-up is below 0, so where they go far beyond 2, half the speed lies opposite twice the speed.
    low, high = (1 / (1 + reach) if reach > 1 else 1 - reach), 1 + reach
    norm = (LogNorm if reach > 1 else Normalize)(low, high)
    axes.spines[:].set_visible(True)
    image = axes.imshow(ratios, cmap="RdBu", norm=norm, aspect="auto", origin="lower")
    for (y, x), ratio in np.ndenumerate(ratios):
        if ratio == ratio:
            colour = "white" if abs(ratio - 1) > 0.6 * reach else "black"
            weight = "bold" if ratio == np.nanmax(ratios[y]) else "normal"
            axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=8, color=colour, weight=weight)
    axes.set(xlabel="gamma", ylabel=label)
    axes.set_xticks(range(len(gammas)), gammas)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_title("speed-up over plain decoding; bold: the best gamma")
    ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4) if low <= tick <= high]
    axes.figure.colorbar(image, ax=axes, pad=0.02).set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks], minor=False)


def draw_batches(lines: Sequence[Line]) -> Figure:
    """Draw the map of `--sweep batch`: the speed-up by batch and gamma, measured and by theory, in the same colours."""
    measured, by_theory = {}, {}
    for batch, prediction in predict_batches(lines).items():
        name = f"{batch} ({median(prediction['plain'])})"
        measured[name] = prediction
        rows = [row | {"speedup": (row["theory"],)} for row in prediction["rows"]]
        by_theory[name] = prediction | {"rows": rows}
    panels = {"measured, prefill included": measured, "theory, decode steps alone": by_theory}
    height = max(3.2, 1.8 + 0.4 * len(measured))  # room for the label of the rows
    figure, grid = plt.subplots(1, len(panels), figsize=(12, height), squeeze=False)
    reach = max(reach_of(rows) for rows in panels.values())
    for axes, (title, predictions) in zip(grid[0], panels.items()):
        draw_heat_map(axes, predictions, "batch (tokens/s of plain decoding)", reach)
        axes.set_title(f"speed-up, {title}; bold: the best gamma")
    return figure


def draw_categories(lines: Sequence[Line]) -> Figure:
    """Draw the speed-up of each method as bars, category by category, as Spec-Bench defines it. lines: of the first
    mode that has such a table."""
    speed = [line for line in of_kind(lines, SpeedLine) if line["mode"] != "sweep"]
    groups = by_category([line for line in speed if line["mode"] == speed[0]["mode"]])
    methods = [row["method"] for row in groups[OVERALL] if row["method"] not in ALONE]
    figure, axes = plt.subplots(figsize=(max(8, 1.6 * len(groups)), 4.4))
    width, colours = 0.8 / max(1, len(methods)), (plt.cm.tab10 if len(methods) <= 10 else plt.cm.tab20).colors
    for number, method in enumerate(methods):
        rows = [next((row for row in rows if row["method"] == method), None) for rows in groups.values()]
        middle, low, high = np.array([row["specBench"] if row else [np.nan] * 3 for row in rows]).T
        places = np.arange(len(groups)) + width * (number - (len(methods) - 1) / 2)
        colour = colours[number % len(colours)]
        axes.bar(places, middle - 1, 0.9 * width, bottom=1, color=colour, label=name_of(method))
        axes.errorbar(places, middle, np.nan_to_num([middle - low, high - middle]), fmt="none", color=DARK, capsize=2)
    axes.axhline(1, color=RED, linestyle="--", linewidth=1, label="plain decoding")
    names = [fill("overall" if name == OVERALL else visible(name, ""), 16) for name in groups]
    axes.set_xticks(range(len(groups)), names, parse_math=False)
    axes.set_yscale("log", base=2)
    axes.yaxis.set(major_locator=plt.MaxNLocator(6, steps=(1, 2, 5, 10)), major_formatter="{x:g}")
    axes.set(ylabel="speed-up over plain decoding")
    bars = f"95 % intervals, or ranges of fewer than {FEW} questions or processes"
    axes.set_title(f"ratios of mean speeds over questions, as in Spec-Bench; {bars}")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


def draw_lossless(lines: Sequence[Line]) -> Figure:
    """Draw the histograms of u of all samplers as heat maps, methods above planted mistakes: the z of each bin's count,
    if u is uniform."""
    sampled, planted = of_kind(lines, LosslessLine), of_kind(lines, schema.PowerLine)
    several = len({line["dtype"] for line in sampled}) > 1
    methods = {name_of(line["method"]) + f", {line['dtype']}" * several: line["counts_shown"] for line in sampled}
    mistakes = {f"{line['mistake']}, {name_of(line['method'])}": line["counts_shown"] for line in planted}
    title = f"methods: u of the first {sampled[0]['tokens_shown']:,} tokens each, in {BINS} bins"
    shown = {title: methods} | ({"the same of samplers with a planted mistake": mistakes} if mistakes else {})
    heights = [len(histograms) for histograms in shown.values()]
    size = 10, 1.9 + 0.21 * max(2, sum(heights))
    figure, grid = plt.subplots(len(shown), 1, figsize=size, sharex=True, height_ratios=heights, squeeze=False)
    panels = grid[:, 0]
    for axes, (title, histograms) in zip(panels, shown.items()):
        counts = np.array(list(histograms.values()))
        expected = counts.sum(1, keepdims=True) / BINS
        z = (counts - expected) / np.sqrt(expected * (1 - 1 / BINS))
        axes.spines[:].set_visible(True)
        image = axes.imshow(z, cmap="RdBu_r", vmin=-5, vmax=5, aspect="auto", extent=(0, 1, len(z), 0))
        axes.set_yticks(np.arange(len(z)) + 0.5, list(histograms), fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_title(title, fontsize=10)
    of_model = "tokens to which the model that guesses gives more probability than the target"
    axes.set_xlabel(f"u (right: {of_model}; without one, improbable tokens)")
    bar = figure.colorbar(image, ax=panels, extend="both", aspect=35, pad=0.01)
    bar.set_label("z of the bin's count: 0 if it is as the target's distribution says")
    return figure


def draw_trainings(record: Mapping[str, Any]) -> Figure:
    """Draw the acceptance on held-out text over the minutes of training: of a head by position, of variants one line
    each, with its name at its end."""
    figure, axes = plt.subplots(figsize=(8, 4.4))
    histories = {name: variant["history"] for name, variant in record["variants"].items()}
    lines = {name: [(m["seconds"], m["alpha"]) for m in history] for name, history in histories.items()}
    if len(lines) == 1:
        ((name, history),) = histories.items()
        lines = {"all tested guesses": lines[name]}
        for i in range(len(history[0]["acceptance"])):
            lines[f"guess {i + 1}"] = [(m["seconds"], m["acceptance"][i]) for m in history]
    ends, below = {}, np.inf
    for number, (name, points) in enumerate(lines.items()):
        minutes, shares = [seconds / 60 for seconds, _ in points], [share for _, share in points]
        colour = DARK if number == 0 else plt.cm.tab10(number)
        axes.plot(minutes, shares, label=name, color=colour, linewidth=1.2 if number else 2.2)
        ends[f"{name}  {shares[-1]:.3f}"] = minutes[-1], shares[-1], colour
    (low, high), last = axes.get_ylim(), max(minutes for minutes, _, _ in ends.values())
    for name, (end, share, colour) in sorted(ends.items(), key=lambda item: -item[1][1]):
        below = min(share, below - 0.05 * (high - low))  # No name covers another.
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5)}
        at = 1.04 * last, below
        axes.annotate(name, (end, share), at, va="center", fontsize=8, color=colour, arrowprops=line)
    axes.set(xlabel="minutes of training", ylabel="share of tested guesses that pass", xlim=(0, 1.3 * last))
    axes.set_title(f"{record['models']['target']['name']}, text that is held out")
    return figure
