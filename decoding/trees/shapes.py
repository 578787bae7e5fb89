"""The expected tokens of a round with a tree of guesses: `expected`, and `Acceptance`, estimated from past rounds.

A table of acceptance: `acceptance[d][k]` is the probability that the k-th sibling (from 0) at depth d + 1 is the one
that is accepted, if its parent was. So the sum over k is at most 1. (Sequoia's positional acceptance assumption, arXiv
2402.12374, section 3.1, here for each depth.) What lies beyond a table is never accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from decoding.trees.tree import Tree

# Plain decoding, chains, and trees that are best for 6, 24 and 32 guesses, where first siblings are accepted with
# probabilities of 0.4 to 0.9, a level costs 0.03 to 0.25 of a plain step, and a node 0.002 to 0.05. The best of these
# has 0.98 of the expected speed of the best shape of all on average, 0.92 at least, and 0.97 at least of that of the
# best chain (test_trees.py).
MENU = (
    *map(Tree.chain, (0, 2, 4, 7, 10)),
    Tree.of("3/2,1,0"),
    Tree.of("5/4,2,2,1,0/3,2,1,0,2,1,1,0,0"),
    Tree.of("4/3,1,1,1/3,1,1,1,1,0/3,1,1,1,1,1,1/2,1,0,1,0,1,0,1,0"),
)


def expected(tree: Tree, acceptance: Sequence[Sequence[float]]) -> float:
    """Expected tokens of a round with this tree, the target's own included: 1 + the sum over all nodes of the
    probability that the node is accepted, which is a product along its path."""
    reached = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks):
        row = acceptance[tree.depths[parent]] if tree.depths[parent] < len(acceptance) else ()
        reached.append(reached[parent] * (row[rank] if rank < len(row) else 0.0))
    return sum(reached)


class Acceptance:
    """Counts of past rounds: how often a sibling of each rank was tested at each depth, and how often accepted.

    A depth with few counts adds FAITH counts from the depth above it, the first depth from all depths taken together,
    and these from a prior: HOPE for a first sibling, and LATER of what is left for the next. Old rounds lose
    weight, so a draft that was once unlucky is tried again.

    reached, accepted: {(depth of the parent, rank): count}.
    """

    MEMORY = 0.998  # weight of the past in each round
    FAITH, HOPE, LATER = 4, 0.7, 0.35

    def __init__(self) -> None:
        self.reached: dict[tuple[int, int], float] = {}
        self.accepted: dict[tuple[int, int], float] = {}

    def add(self, tree: Tree, last: Mapping[int, int], depths: Mapping[int, int]) -> None:
        """Learn from a round. last: {text: last accepted node, or 0}. depths: {text: depth of the deepest guess}.

        The siblings below a node are counted if the node lies on the accepted path, or is the root. A requested
        guess that the drafter did not make counts as rejected.
        """
        for counts in (self.reached, self.accepted):
            for key in counts:
                counts[key] *= self.MEMORY
        for text, end in last.items():
            for key, passed in tested(tree, end):
                if key[0] < depths[text]:
                    self.reached[key] = self.reached.get(key, 0.0) + 1
                    self.accepted[key] = self.accepted.get(key, 0.0) + passed

    def table(self, depth: int, ranks: int) -> list[list[float]]:
        """`acceptance[d][k]` for depths below `depth` and ranks below `ranks`."""
        row: list[float] = []
        for rank in range(ranks):
            hope = self.LATER * (1 - sum(row)) if rank else self.HOPE
            row.append(self.pooled([key for key in self.reached if key[1] == rank], hope, row))
        rows = []
        for at in range(depth):
            shares: list[float] = []
            for rank in range(ranks):
                shares.append(self.pooled([(at, rank)], row[rank], shares))
            rows.append(row := shares)
        return rows

    def pooled(self, keys: Sequence[tuple[int, int]], hope: float, before: Sequence[float]) -> float:
        """The share of these siblings that were accepted. before: of the siblings before them; together they are at
        most 1."""
        reached, accepted = (sum(of.get(key, 0.0) for key in keys) for of in (self.reached, self.accepted))
        return min((accepted + self.FAITH * hope) / (reached + self.FAITH), max(0.0, 1 - sum(before)))


@functools.lru_cache(maxsize=4096)
def tested(tree: Tree, last: int) -> tuple[tuple[tuple[int, int], bool], ...]:
    """What a round tested, from its last accepted node `last`: (depth of the parent, rank) of each sibling, and
    whether it was accepted."""
    path = [0, *tree.path(last)]
    return tuple(
        ((depth, rank), child in path)
        for depth, node in enumerate(path)
        for rank, child in enumerate(tree.children[node])
    )
