"""Draw figures/rounds.png: the first rounds of a real continuation, guess by guess.

python -m scripts.drawRounds
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch

from inputs.commandLine import Parser, as_command, number, path, text, visible, whole
from inputs.files import ROOT
from inputs.models import default_pair, load_model
from inputs.tokenizers import check_tokenizers, load_tokenizer
from methods.drafters import ModelDrafter
from playback.trace import RecordingDrafter, Trace, pieces_of
from specSampling import specSampling
from utils import Sampling, UserError

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

STYLES = (  # background, colour and label of each kind of token, in the order of `playback.trace.KINDS`
    ("#c7e9c0", "black", "guessed by the draft, accepted"),
    ("#f6c3bd", "#999999", "guessed, rejected (and what follows it, unread)"),
    ("#bfd3f2", "black", "the target's own token"),
)


def draw_rounds(prompt: str, rounds: Sequence[Sequence[Sequence[str]]], path: Path) -> None:
    """Draw one line for each round: the guesses, which were accepted, and the target's token."""
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(rounds) + 1.3), dpi=120)
    axes.axis("off")
    axes.set(xlim=(0, 90), ylim=(len(rounds) + 0.6, -2.2))
    verbatim = {"va": "center", "parse_math": False}  # matplotlib reads text between two "$" as mathematics.
    axes.text(0, -1.7, "prompt:  " + visible(prompt.replace("\n", " ")), fontsize=9, style="italic", **verbatim)
    for y, kinds in enumerate(rounds):
        axes.text(0, y, f"round {y}" if y else "prefill", fontsize=8, color="#777777", va="center")
        x = 11.0
        for (background, colour, _), pieces in zip(STYLES, kinds):
            box = {"boxstyle": "round,pad=0.25", "facecolor": background, "edgecolor": "none"}
            for piece in pieces:
                shown = visible(piece.replace("\n", "\u21b5").replace(" ", "\u2423"))
                axes.text(x, y, shown, fontsize=9, family="monospace", color=colour, bbox=box, **verbatim)
                x += 0.98 * len(shown) + 1.6
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=background, label=label) for background, _, label in STYLES]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, -0.08)}
    axes.legend(handles=handles, ncols=3, fontsize=8, frameon=False, **place)
    path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib warns of each character that the font lacks. It draws a box.
        figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def work(argv: Sequence[str] | None) -> None:
    """Parse the flags, decode a text and draw its rounds."""
    parser = Parser(
        prog="python -m scripts.drawRounds",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target, draft = default_pair()
    parser.add_argument("--target", type=text, default=target)
    parser.add_argument("--draft", type=text, default=draft)
    parser.add_argument("--prompt", type=text, default="The old man closed the door behind him, and")
    parser.add_argument("--gamma", type=whole(1, 1000), default=4)
    parser.add_argument("--temperature", type=number(0, 1000), default=0.85)
    parser.add_argument("--maxLen", type=whole(1), default=36)
    parser.add_argument("--seed", type=whole(0, (1 << 62) - 1), default=0)
    parser.add_argument("--out", type=path, default=ROOT / "figures" / "rounds.png")
    args = parser.parse_args(argv)
    if args.out.suffix != ".png" or not os.path.isdir(os.path.dirname(os.path.abspath(args.out))):
        raise UserError(f"--out {args.out} must name a .png file in a folder that exists")
    draw_rounds(args.prompt, rounds_of(args), args.out)
    print(f"Written to {args.out}")


def rounds_of(args: argparse.Namespace) -> list[list[list[str]]]:
    """The pieces of text of one continuation, `[round][kind][token]`."""
    sampling, tokenizer = Sampling(args.temperature), load_tokenizer(args.target)
    check_tokenizers(tokenizer, load_tokenizer(args.draft))
    target, draft = (load_model(name, tokenizer, "float32", "cpu") for name in (args.target, args.draft))
    watched = RecordingDrafter(ModelDrafter(draft))
    trace = Trace(watched)
    specSampling(
        [tokenizer(args.prompt)["input_ids"]],
        target,
        watched,
        args.maxLen,
        args.gamma,
        sampling,
        tokenizer.eos_token_id,
        torch.Generator(target.device).manual_seed(args.seed),
        trace.callback,
    )
    return pieces_of(trace.rounds, tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    return as_command("drawRounds", lambda: work(argv), "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
