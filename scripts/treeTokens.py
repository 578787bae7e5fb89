"""Tokens of a round by a chain and by a tree of guesses, at equal numbers of scored guesses.

    python -m scripts.treeTokens --sentences 40          every flag of test.py says what it says there

First, trees that are wide and trees that are deep measure how often each sibling is accepted at each depth
(experiments/acceptance.py). The best tree of each size follows from that, with a forecast of its tokens by the top-down
rule. Then chains with the token rule and with the block rule, and these trees with both rules for trees, continue the
prompts. Written to the screen: means over the prompts with 95 % intervals, and the traversal rule over the block rule,
paired by prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Generator

from decoding.trees.shapes import best_tree, expected
from experiments.acceptance import Positions, acceptance_of, overlaps_of, total
from experiments.prepare import prepare
from experiments.settings import parse
from experiments.speed import interval
from inputs.commandLine import as_command
from inputs.progress import Bar
from methods.samplers import Decoding, Models, Sampler, Wrap, speculative, tree

Maker = Callable[[Models, Decoding, Wrap], Sampler]
BUDGETS = 4, 8, 12, 16, 32
PROBES = "8,3,1", "4,2,2,1,1", "2,2,1,1,1,1,1,1,1,1"  # the trees that measure acceptance
ROWS = 20  # texts in a batch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    return as_command("treeTokens", lambda: show(sys.argv[1:] if argv is None else argv), "Nothing is kept.")


def show(argv: Sequence[str]) -> None:
    """Measure and print."""
    settings = parse(["--speed", *argv])
    prepared, sampling = prepare(settings), settings.sampling.of("speed")
    prompts = prepared.inputs.rows
    batches = [prompts[at : at + ROWS] for at in range(0, len(prompts), ROWS)]
    models: Models = dict(prepared.load(prepared.place.text_dtype))
    max_len, seed, target = settings.sampling.max_len_of("speed"), settings.measuring.seed, models["target"]
    steps = len(PROBES) * len(prompts) + 4 * len(BUDGETS) * len(batches)
    bar = Bar("batches", steps)

    def probed(shape: str) -> Positions:
        """What texts show that are written with trees of this shape."""

        def make(wrap: Wrap) -> Sampler:
            bar.update()
            return tree("topDown")(models, replace(settings.decoding, tree=shape), wrap)

        return overlaps_of(make, prompts, target, sampling, max_len, None, seed).positions

    def run(method: Maker, decoding: Decoding) -> np.ndarray:
        """Tokens of a round, of each prompt."""
        sample, tokens = method(models, decoding, lambda drafter: drafter), []
        for number, batch in enumerate(batches):
            generator = Generator(target.device).manual_seed(seed + number)
            _, records = sample(batch, max_len=max_len, sampling=sampling, generator=generator)
            tokens += [record.tokens_per_round for record in records]
            bar.update()
        return np.array(tokens)

    table = acceptance_of(total(map(probed, PROBES))).table(depth=10, ranks=8)
    print(f"{len(prompts)} texts of {max_len} tokens; {sampling}")
    print("accepted, by sibling (columns) and depth (rows):")
    for row in table[:4]:
        print("   ", "  ".join(f"{chance:.3f}" for chance in row[:6]))
    print("guesses  chain, token rule  chain, block rule  tree, top-down     tree, traversal    forecast  over block")
    for budget in BUDGETS:
        best = best_tree(budget, table)
        chain, shape = replace(settings.decoding, gamma=budget), replace(settings.decoding, tree=str(best))
        columns = [run(speculative("fixed", rule), chain) for rule in ("token", "block")]
        columns += [run(tree(rule), shape) for rule in ("topDown", "traversal")]
        cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*interval(tokens, np.mean)) for tokens in columns]
        ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*interval(columns[3] / columns[1]))
        print(f"{budget:<9}" + "".join(f"{cell:<19}" for cell in cells) + f"{expected(best, table):<10.2f}{ratio}")
        print(f"         best tree: {best}")
    bar.close()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
