"""The shape of a tree of guesses by measurement: `Acceptance` learns how often the 1st, 2nd, ... sibling is accepted at
each depth, `best_tree` finds the shape with the most expected tokens, and `best_by_cost` that with the most a second.

Every choice here is lossless. A shape is chosen before the guesses of its round are drawn: from rounds that are over,
from tokens that are committed, and from times. All that is drawn for a shape is verified, nothing is dropped.

A table of acceptance: `acceptance[d][k]` is the probability that the k-th sibling (from 0) at depth d + 1 is the one
that is accepted, if its parent was. So the sum over k is at most 1. (Sequoia's positional acceptance assumption, arXiv
2402.12374, section 3.1, here for each depth.) What lies beyond a table is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from decoding.trees import Tree

Table = Sequence[Sequence[float]]


def expected(tree: Tree, acceptance: Table) -> float:
    """Expected tokens of a round with this tree, the target's own included: 1 + the sum over all nodes of the
    probability that the node is accepted, which is a product along its path."""
    reached = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks):
        row = acceptance[tree.depths[parent]] if tree.depths[parent] < len(acceptance) else ()
        reached.append(reached[parent] * (row[rank] if rank < len(row) else 0.0))
    return sum(reached)


def best_tree(budget: int, acceptance: Table, most_children: int | None = None, depth: int | None = None) -> Tree:
    """The tree of at most `budget` guesses with the most expected tokens, by dynamic programming (Sequoia, arXiv
    2402.12374, section 3.1). A node that would add nothing is left out.

    most_children, depth: limits of the shape, beyond those that the table has.
    """
    return Shapes(budget, [row[:most_children] for row in acceptance[:depth]]).tree(budget)


def best_by_cost(
    acceptance: Table,
    level_seconds: float,
    scoring_seconds: Callable[[int], float] | Sequence[float],
    budgets: Iterable[int],
) -> tuple[Tree | None, float]:
    """The shape with the most expected tokens a second, and these.

    level_seconds: of the draft's forward for a level of a tree. scoring_seconds: of the target's forward for so many
    tokens, the last committed one and the guesses. budgets: numbers of guesses to find the best trees for.
    For each of these and each depth there is one choice; every chain that the table reaches is another; None is plain
    decoding.
    """
    scoring = scoring_seconds if callable(scoring_seconds) else scoring_seconds.__getitem__
    budgets = sorted(set(budgets))
    trees = {Tree.chain(length) for length in range(1, min(len(acceptance), budgets[-1]) + 1)} if budgets else set()
    for depth in range(1, len(acceptance) + 1) if budgets else ():
        shapes = Shapes(budgets[-1], acceptance[:depth])
        trees |= {shapes.tree(budget) for budget in budgets}
    best: tuple[Tree | None, float] = None, 1 / scoring(1)
    for tree in sorted(trees, key=lambda tree: tree.parents):
        rate = expected(tree, acceptance) / (tree.depth * level_seconds + scoring(tree.size + 1))
        if rate > best[1]:
            best = tree, rate
    return best


class Shapes:
    """The best trees for all budgets up to `most`, no deeper than the table of acceptance.

    Let value[d][b] be the expected number of accepted guesses below an accepted node of depth d, for b guesses there.
    Its children from the k-th on, with b guesses for them and all below them, give at most
    tail[k][b] = max over s of acceptance[d][k] (1 + value[d + 1][s - 1]) + tail[k + 1][b - s],
    where the k-th child and what is below it take s guesses; with s = 0 there is no such child, nor one after it.
    Then value[d][b] = tail[0][b].
    """

    def __init__(self, most: int, acceptance: Table) -> None:
        self.taken: list[list[np.ndarray]] = []  # [d][k][b]: the best s
        left = np.arange(most + 1)[:, None] - np.arange(most + 1)  # [b, s]: b - s
        below = np.zeros(most + 1)
        for row in reversed(acceptance):
            tail, taken = np.zeros(most + 1), []
            for chance in reversed(row):
                child = np.concatenate([[0.0], chance * (1 + below[:-1])])
                # Without the k-th child there is none after it. Its own guesses come first, so s = 0 wins a tie.
                value = np.where(left >= 0, child + np.where(np.arange(most + 1) > 0, tail[left], 0), -1)
                taken.append(value.argmax(1))
                tail = value.max(1)
            self.taken.append(taken[::-1])
            below = tail
        self.taken.reverse()

    def tree(self, budget: int) -> Tree:
        """The best tree of at most `budget` guesses; at least one, though it be worth nothing."""
        parents: list[int] = []
        nodes = [(0, budget)]  # (depth, guesses below) of each node
        for node, (depth, left) in enumerate(nodes):
            for taken in self.taken[depth] if depth < len(self.taken) else ():
                s = int(taken[left])
                if not s:
                    break
                nodes.append((depth + 1, s - 1))
                parents.append(node)
                left -= s
        return Tree(tuple(parents) or (0,))


class Acceptance:
    """Counts of past rounds: how often a sibling of each rank was accepted at each depth.

    A depth with few counts borrows FAITH of them from the depth above it, the first depth from all depths taken
    together, and these from a guess: HOPE for a first sibling, and LATER of what is left for the next. Old rounds lose
    weight, so a draft that was once unlucky is tried again.
    """

    MEMORY = 0.998  # weight of the past in each round
    FAITH, HOPE, LATER = 4, 0.7, 0.35

    def __init__(self) -> None:
        self.reached: dict[tuple[int, int], float] = {}  # by depth of the parent and rank
        self.accepted: dict[tuple[int, int], float] = {}

    def add(self, tree: Tree, last: Iterable[int]) -> None:
        """Learn from a round. last: for each row, the last accepted node, or 0.

        The siblings below a node are counted if the node lies on the accepted path, or is the root. A sibling that
        was missing, because fewer tokens were left, counts as one that was not accepted.
        """
        for counts in (self.reached, self.accepted):
            for key in counts:
                counts[key] *= self.MEMORY
        for end in last:
            path = [0, *tree.path(end)]
            for depth, node in enumerate(path):
                for rank, child in enumerate(tree.children[node]):
                    key = depth, rank
                    self.reached[key] = self.reached.get(key, 0.0) + 1
                    self.accepted[key] = self.accepted.get(key, 0.0) + (child in path)

    def table(self, depth: int, ranks: int) -> list[list[float]]:
        """`acceptance[d][k]` for depths below `depth` and ranks below `ranks`."""
        row: list[float] = []
        for rank in range(ranks):
            hope = self.LATER * (1 - sum(row)) if rank else self.HOPE
            keys = [key for key in self.reached if key[1] == rank]
            row.append(self.pooled(keys, hope, row))
        rows = []
        for at in range(depth):
            own: list[float] = []
            for rank in range(ranks):
                own.append(self.pooled([(at, rank)], row[rank], own))
            rows.append(row := own)
        return rows

    def pooled(self, keys: Sequence[tuple[int, int]], hope: float, before: Sequence[float]) -> float:
        """The share of these siblings that were accepted. before: of the siblings before them; together they are at
        most 1."""
        reached, accepted = (sum(of.get(key, 0.0) for key in keys) for of in (self.reached, self.accepted))
        return min((accepted + self.FAITH * hope) / (reached + self.FAITH), max(0.0, 1 - sum(before)))
