"""Tokens of a round by a chain and by a tree of guesses, at equal numbers of scored guesses.

    python -m scripts.treeTokens --sentences 40          every flag of test.py says what it says there

First, trees that are wide and trees that are deep measure how often each sibling is accepted at each depth. The best
tree of each size follows from that, with a forecast of its tokens. Then chains with the token rule and with the block
rule, and these trees with both rules for trees, continue the prompts. Written to the screen: means over the prompts
with 95 % intervals, and the traversal rule over the block rule, paired by prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Generator
from tqdm import tqdm

from decoding.blockVerification import block_rule
from decoding.record import Record
from decoding.treeChoice import Always
from decoding.trees import Tree
from decoding.treeShapes import Acceptance, best_tree, expected
from decoding.treeVerification import top_down_rule, traversal_rule
from decoding.verification import token_rule
from experiments.prepare import prepare
from experiments.settings import parse
from experiments.speed import interval
from inputs.commandLine import as_command
from methods.drafters import ModelDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling

BUDGETS = 4, 8, 12, 16, 32
PROBES = "8,3,1", "4,2,2,1,1", "2,2,1,1,1,1,1,1,1,1"  # the trees that measure acceptance
ROWS = 20  # texts in a batch


class Watched(Always):
    """Always the same tree, whose acceptance is counted."""

    def __init__(self, tree: Tree, counts: Acceptance) -> None:
        super().__init__(tree)
        self.counts = counts

    def learn(self, last: dict[int, int]) -> None:
        self.counts.add(self.shape, last.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return as_command("treeTokens", lambda: show(given), "Nothing is kept.")


def show(argv: Sequence[str]) -> None:
    """Measure and print."""
    settings = parse(["--speed", *argv])
    prepared, sampling = prepare(settings), settings.sampling.of("speed")
    prompts = [prompt for each in prepared.prompts.values() for prompt in each]
    batches = [prompts[at : at + ROWS] for at in range(0, len(prompts), ROWS)]
    models, max_len = prepared.load(prepared.text_dtype), settings.sampling.max_len_of("speed")
    target, draft = models["target"], models.get("restricted", models["draft"])
    own = settings.decoding.draft_temperature, settings.decoding.draft_top_p
    bar = tqdm(total=len(batches) * (len(PROBES) + 4 * len(BUDGETS)), desc="batches", disable=None, leave=False)

    def run(sample: Callable[..., tuple[list[list[int]], list[Record]]]) -> np.ndarray:
        """Tokens of a round, of each prompt."""
        found = []
        for number, batch in enumerate(batches):
            generator = Generator(target.device).manual_seed(settings.measuring.seed + number)
            found += [record.tokens_per_round for record in sample(batch, generator)[1]]
            bar.update()
        return np.array(found)

    def chain(rule: Callable, gamma: int) -> Callable:
        drafter = ModelDrafter(draft, *own)
        return lambda batch, generator: specSampling(
            batch, target, drafter, max_len, gamma, sampling, None, generator, None, rule
        )

    def tree(rule: Callable, shape: Tree | Always) -> Callable:
        drafter = TreeDrafter(draft, *own)
        return lambda batch, generator: treeSampling(
            batch, target, drafter, max_len, shape, sampling, None, generator, None, rule
        )

    acceptance = Acceptance()
    for probe in PROBES:
        run(tree(traversal_rule, Watched(Tree.of(probe), acceptance)))
    table = acceptance.table(depth=10, ranks=8)
    print(f"{len(prompts)} texts of {max_len} tokens; {sampling}")
    print("accepted, by sibling (columns) and depth (rows):")
    for row in table[:4]:
        print("   ", "  ".join(f"{chance:.3f}" for chance in row[:6]))
    print("guesses  chain, token rule  chain, block rule  tree, top-down     tree, traversal    forecast  over block")
    for budget in BUDGETS:
        best = best_tree(budget, table)
        found = [run(chain(rule, budget)) for rule in (token_rule, block_rule)]
        found += [run(tree(rule, best)) for rule in (top_down_rule, traversal_rule)]
        cells = ["{:.2f} [{:.2f}, {:.2f}]".format(each.mean(), *interval(each, np.mean)[1:]) for each in found]
        ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*interval(found[3] / found[1]))
        print(f"{budget:<9}" + "".join(f"{cell:<19}" for cell in cells) + f"{expected(best, table):<10.2f}{ratio}")
        print(f"         best tree: {best}")
    bar.close()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
