"""Figures of what was measured."""

import matplotlib
import numpy as np

from experiments.sweep import predict

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen


def draw_sweep(lines, path):
    """Tokens per second and seconds a text over gamma, one row of axes a temperature: measured with 95 % intervals, the
    plain decoder as a line, theory's prediction as a curve. Returns the path."""
    costs = [line for line in lines if line["kind"] == "costs"]
    figure, grid = plt.subplots(len(costs), 2, figsize=(11, 3.6 * len(costs) + 0.5), dpi=120, squeeze=False)
    for cost, row in zip(costs, grid):
        found = predict(
            [
                m
                for m in lines
                if m["kind"] == "speed"
                and m["temperature"] == cost["temperature"]
                and m["promptLen"] == cost["promptLen"]
            ],
            cost,
        )
        gammas = [each["gamma"] for each in found["rows"]]
        for axes, key, label in zip(row, ("throughput", "seconds"), ("tokens per second", "seconds a text")):
            middle, low, high = np.array([each[key] for each in found["rows"]]).T
            axes.bar(
                gammas,
                middle,
                yerr=[middle - low, high - middle],
                color="#bfd3f2",
                capsize=2,
                ecolor="#777777",
                label="speculative, measured",
            )
            plain = found["plain"][key][0]
            axes.axhline(plain, color="#c0392b", linestyle="--", label="plain decoding")
            for name, style in (("theory", "o-"), ("paper", ":")):
                ratio = np.array([each[name] for each in found["rows"]])
                axes.plot(
                    gammas,
                    plain * ratio if key == "throughput" else plain / ratio,
                    style,
                    markersize=3,
                    color="#2c3e50",
                    label="theory, scoring at its measured cost"
                    if name == "theory"
                    else "theory, scoring at the cost of one token",
                )
            axes.set(xlabel="gamma", ylabel=label, xticks=gammas)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_title(
            f"temperature {cost['temperature']}, top-p {cost['top_p']}: alpha {found['alpha']:.2f}, c {found['c']:.2f}",
            loc="left",
            fontsize=10,
        )
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def draw_lossless(lines, path):
    """The histograms of u of every method tested, and of one planted mistake, over what chance makes of a uniform u.
    Returns the path."""
    sampled = [line for line in lines if line["kind"] == "lossless"]
    planted = [line for line in lines if line["kind"] == "power" and line["shown"]]
    figure, grid = plt.subplots(1, 2, figsize=(11, 3.9), dpi=120, sharey=True)
    for axes, shown, colours in zip(grid, (sampled, planted), (plt.cm.tab10.colors, ["#c0392b"])):
        for line, colour in zip(shown, colours):
            counts = np.array(line["counts"])
            edges, label = np.linspace(0, 1, len(counts) + 1), line.get("mistake") or line["method"]
            axes.stairs(counts / counts.mean(), edges, baseline=None, color=colour, linewidth=1.3, label=label)
        spread = 3.29 * counts.mean() ** -0.5  # a normal number lies within 3.29 standard deviations 999 times of 1,000
        label = "99.9 % of an exact sampler's bins"
        axes.axhspan(1 - spread, 1 + spread, color="#bfd3f2", alpha=0.6, linewidth=0, zorder=0, label=label)
        axes.axhline(1, color="#777777", linewidth=0.8, zorder=0)
        of = "each method" if len(shown) > 1 else "the planted mistake" if shown is planted else "the sampler"
        axes.set_title(f"u of {counts.sum():,} tokens of {of}", loc="left", fontsize=10)
        axes.set(xlabel="u (at the right: tokens the draft gives more than the target)", xlim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
    low, high = grid[0].get_ylim()
    grid[0].set(ylabel="tokens in the bin, over the mean", ylim=(max(0, min(low, 0.5)), max(high, 1.5)))
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path
