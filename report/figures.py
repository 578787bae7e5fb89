"""Pictures of what was measured.

python plots.py        draws figures/rounds.png: the first rounds of a real continuation, guess by guess
"""

import argparse
import os
import sys
import warnings

import matplotlib
import numpy as np
import torch

from experiments.sweep import predict
from inputs.commandLine import Parser, as_command, number, path, text, whole
from inputs.escape import visible
from inputs.models import HERE, check_tokenizers, default_pair, load_model, load_tokenizer
from methods.drafters import ModelDrafter
from report.playback import Trace, Watched, pieces_of
from specSampling import specSampling
from utils import Sampling, UserError

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

COLOURS = {"accepted": "#c7e9c0", "rejected": "#f6c3bd", "target": "#bfd3f2"}
LABELS = {
    "accepted": "guessed by the draft, accepted",
    "rejected": "guessed, rejected (and what follows it, unread)",
    "target": "the target's own token",
}


def rounds_of(prompt, target, draft, tokenizer, gamma, sampling, max_len, seed):
    """The rounds of one continuation, each as the pieces of text of every kind."""
    watched = Watched(ModelDrafter(draft))
    trace = Trace(watched)
    specSampling(
        [tokenizer(prompt)["input_ids"]],
        target,
        watched,
        max_len,
        gamma,
        sampling,
        tokenizer.eos_token_id,
        torch.Generator(target.device).manual_seed(seed),
        trace.callback,
    )
    return pieces_of(trace.rounds, tokenizer)


def draw_rounds(prompt, rounds, path):
    """One line a round: the guesses, what verification said of them, and the target's token."""
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(rounds) + 1.3), dpi=120)
    axes.axis("off")
    axes.set(xlim=(0, 90), ylim=(len(rounds) + 0.6, -2.2))
    asis = {"va": "center", "parse_math": False}  # a "$" is one
    axes.text(0, -1.7, "prompt:  " + visible(prompt.replace("\n", " ")), fontsize=9, style="italic", **asis)
    for y, kinds in enumerate(rounds):
        axes.text(0, y, f"round {y}" if y else "prompt read", fontsize=8, color="#777777", va="center")
        x = 11
        for piece, kind in ((piece, kind) for kind, pieces in zip(COLOURS, kinds) for piece in pieces):
            shown = visible(piece.replace("\n", "\u21b5").replace(" ", "\u2423"))
            axes.text(
                x,
                y,
                shown,
                fontsize=9,
                family="monospace",
                color="#999999" if kind == "rejected" else "black",
                bbox={"boxstyle": "round,pad=0.25", "facecolor": COLOURS[kind], "edgecolor": "none"},
                **asis,
            )
            x += 0.98 * len(shown) + 1.6
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour) for colour in COLOURS.values()]
    axes.legend(
        handles,
        list(LABELS.values()),
        loc="lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
        bbox_to_anchor=(0.5, -0.08),
    )
    path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks: it draws boxes
        figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


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


def main(argv=None):
    parser = Parser(
        prog="plots.py", allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pair = default_pair()
    parser.add_argument("--target", type=text, default=pair[0])
    parser.add_argument("--draft", type=text, default=pair[1])
    parser.add_argument("--prompt", type=text, default="The old man closed the door behind him, and")
    parser.add_argument("--gamma", type=whole(1, 1000), default=4)
    parser.add_argument("--temperature", type=number(0, 1000), default=0.85)
    parser.add_argument("--maxLen", type=whole(1), default=36)
    parser.add_argument("--seed", type=whole(0, (1 << 62) - 1), default=0)
    parser.add_argument("--out", type=path, default=HERE / "figures" / "rounds.png")

    def work():
        args = parser.parse_args(argv)
        sampling = Sampling(args.temperature)
        if args.out.suffix != ".png" or not os.path.isdir(os.path.dirname(os.path.abspath(args.out))):
            raise UserError(f"--out {args.out} must name a .png file in a folder that exists")
        tokenizer = load_tokenizer(args.target)
        check_tokenizers(tokenizer, load_tokenizer(args.draft))
        target, draft = (load_model(name, tokenizer, "float32", "cpu") for name in (args.target, args.draft))
        rounds = rounds_of(args.prompt, target, draft, tokenizer, args.gamma, sampling, args.maxLen, args.seed)
        draw_rounds(args.prompt, rounds, args.out)
        print(f"Written to {args.out}")

    return as_command("plots.py", work, "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
