"""Pictures of what was measured.

    python plots.py        draws figures/rounds.png: the first rounds of a real continuation, guess by guess
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import torch

from drafters import ModelDrafter
from loading import HERE, check_tokenizers, default_pair, load_model, load_tokenizer
from playback import Trace, Watched, pieces_of
from specSampling import specSampling
from utils import Sampling, UserError

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

COLOURS = {"accepted": "#c7e9c0", "rejected": "#f6c3bd", "target": "#bfd3f2"}
LABELS = {"accepted": "guessed by the draft, accepted", "rejected": "guessed, rejected (and what follows it, unread)",
          "target": "the target's own token"}


def rounds_of(prompt, target, draft, tokenizer, gamma, sampling, max_len, seed):
    """The rounds of one continuation, each as the pieces of text of every kind."""
    watched = Watched(ModelDrafter(draft))
    trace = Trace(watched)
    specSampling([tokenizer(prompt)["input_ids"]], target, watched, max_len, gamma, sampling, tokenizer.eos_token_id,
                 torch.Generator(target.device).manual_seed(seed), trace.callback)
    return pieces_of(trace.rounds, tokenizer)


def draw_rounds(prompt, rounds, path):
    """One line a round: the guesses, what verification said of them, and the target's token."""
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(rounds) + 1.3), dpi=120)
    axes.axis("off")
    axes.set(xlim=(0, 90), ylim=(len(rounds) + 0.6, -2.2))
    axes.text(0, -1.7, "prompt:  " + prompt.replace("\n", " "), fontsize=9, style="italic", va="center")
    for y, kinds in enumerate(rounds):
        axes.text(0, y, f"round {y}" if y else "prompt read", fontsize=8, color="#777777", va="center")
        x = 11
        for text, kind in ((text, kind) for kind, pieces in zip(COLOURS, kinds) for text in pieces):
            shown = text.replace("\n", "\u21b5").replace(" ", "\u2423")
            axes.text(x, y, shown, fontsize=9, family="monospace", va="center",
                      color="#999999" if kind == "rejected" else "black",
                      bbox={"boxstyle": "round,pad=0.25", "facecolor": COLOURS[kind], "edgecolor": "none"})
            x += 0.98 * len(shown) + 1.6
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour) for colour in COLOURS.values()]
    axes.legend(handles, list(LABELS.values()), loc="lower center", ncols=3, fontsize=8, frameon=False,
                bbox_to_anchor=(0.5, -0.08))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair = default_pair()
    parser.add_argument("--target", default=pair[0])
    parser.add_argument("--draft", default=pair[1])
    parser.add_argument("--prompt", default="The old man closed the door behind him, and")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.85)
    parser.add_argument("--maxLen", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "figures" / "rounds.png")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    check_tokenizers(tokenizer, load_tokenizer(args.draft))
    target, draft = (load_model(name, tokenizer, "float32", "cpu") for name in (args.target, args.draft))
    rounds = rounds_of(args.prompt, target, draft, tokenizer, args.gamma, Sampling(args.temperature), args.maxLen,
                       args.seed)
    draw_rounds(args.prompt, rounds, args.out)
    print(f"Written to {args.out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"plots.py: error: {error}", file=sys.stderr)
        sys.exit(2)
