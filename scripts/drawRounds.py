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
from transformers import PreTrainedTokenizerBase

from engine.cachedModel import CachedModel
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

COLOURS = {"accepted": "#c7e9c0", "rejected": "#f6c3bd", "target": "#bfd3f2"}
LABELS = {
    "accepted": "guessed by the draft, accepted",
    "rejected": "guessed, rejected (and what follows it, unread)",
    "target": "the target's own token",
}


def rounds_of(
    prompt: str,
    target: CachedModel,
    draft: CachedModel,
    tokenizer: PreTrainedTokenizerBase,
    gamma: int,
    sampling: Sampling,
    max_len: int,
    seed: int,
) -> list[list[list[str]]]:
    """The rounds of one continuation: for each kind of token (as in COLOURS) the pieces of text."""
    watched = RecordingDrafter(ModelDrafter(draft))
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
                **verbatim,
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
        warnings.simplefilter("ignore")  # matplotlib warns of each character that the font lacks. It draws a box.
        figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def command_line() -> Parser:
    parser = Parser(
        prog="python -m scripts.drawRounds",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = default_pair()
    parser.add_argument("--target", type=text, default=pair[0])
    parser.add_argument("--draft", type=text, default=pair[1])
    parser.add_argument("--prompt", type=text, default="The old man closed the door behind him, and")
    parser.add_argument("--gamma", type=whole(1, 1000), default=4)
    parser.add_argument("--temperature", type=number(0, 1000), default=0.85)
    parser.add_argument("--maxLen", type=whole(1), default=36)
    parser.add_argument("--seed", type=whole(0, (1 << 62) - 1), default=0)
    parser.add_argument("--out", type=path, default=ROOT / "figures" / "rounds.png")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        args = command_line().parse_args(argv)
        sampling = Sampling(args.temperature)
        if args.out.suffix != ".png" or not os.path.isdir(os.path.dirname(os.path.abspath(args.out))):
            raise UserError(f"--out {args.out} must name a .png file in a folder that exists")
        tokenizer = load_tokenizer(args.target)
        check_tokenizers(tokenizer, load_tokenizer(args.draft))
        target, draft = (load_model(name, tokenizer, "float32", "cpu") for name in (args.target, args.draft))
        rounds = rounds_of(args.prompt, target, draft, tokenizer, args.gamma, sampling, args.maxLen, args.seed)
        draw_rounds(args.prompt, rounds, args.out)
        print(f"Written to {args.out}")

    return as_command("drawRounds", work, "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
