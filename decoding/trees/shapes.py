"""The shape of a tree of guesses, by measurement.

`Acceptance` learns how often the 1st, 2nd, ... sibling is accepted at each depth. `best_tree` finds the shape with the
most expected tokens, `best_by_cost` that with the most a second. A `TreeChoice` chooses the shape of each round.

Every choice here is lossless. A shape is chosen before the guesses of its round are drawn: from rounds that are over,
from tokens that are committed, and from times. All that is drawn for a shape is verified, nothing is dropped.

A table of acceptance: `acceptance[d][k]` is the probability that the k-th sibling (from 0) at depth d + 1 is the one
that is accepted, if its parent was. So the sum over k is at most 1. (Sequoia's positional acceptance assumption, arXiv
2402.12374, section 3.1, here for each depth.) What lies beyond a table is never accepted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from decoding.costs import Costs
from decoding.rows import Rows
from decoding.trees.tree import Tree

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


class TreeChoice(ABC):
    """What chooses the shape of each round's tree.

    A choice may depend on committed tokens and past rounds only. All nodes of a tree are drawn and submitted to
    verification. This keeps every choice lossless.

    shapes: all that it may choose; None among them is plain decoding.
    """

    shapes: Sequence[Tree | None]

    @property
    def most(self) -> int:
        """Guesses in the largest tree."""
        return max(tree.size for tree in self.shapes if tree)

    def begin(self, rows: Rows) -> None:
        """A new batch."""
        return

    @abstractmethod
    def tree(self) -> Tree | None:
        """A round begins: the shape of its tree; None: no guesses, the target draws one token."""

    def learn(self, last: dict[int, int]) -> None:
        """The round has ended. last: {row: last accepted node, or 0}, of the rows that had not ended."""
        return


class FixedTree(TreeChoice):
    """Always the same tree."""

    def __init__(self, tree: Tree) -> None:
        self.shapes = [tree]

    def tree(self) -> Tree | None:
        return self.shapes[0]


# Plain decoding, chains, and trees that are best for 6, 24 and 32 guesses. `best_by_cost` was asked for the best shape
# where first siblings are accepted with probabilities of 0.4 to 0.9, a level costs 0.03 to 0.25 of a plain step, and a
# node 0.002 to 0.05. The best of these has 0.98 of the expected speed of that shape on average, 0.92 at least, and 0.97
# at least of that of the best chain (test_trees.py).
MENU: tuple[Tree | None, ...] = (
    None,
    *map(Tree.chain, (2, 4, 7, 10)),
    Tree.of("3/2,1,0"),
    Tree.of("5/4,2,2,1,0/3,2,1,0,2,1,1,0,0"),
    Tree.of("4/3,1,1,1/3,1,1,1,1,0/3,1,1,1,1,1,1/2,1,0,1,0,1,0,1,0"),
)


class CostAwareTree(TreeChoice):
    """The shape of a menu with the most expected tokens per second, by measured acceptance and measured seconds.

    Acceptance is learnt for the 1st, 2nd, 3rd ... sibling at each depth (`Acceptance`), and gives the expected tokens
    of every shape (Sequoia, arXiv 2402.12374). The seconds of whole rounds are learnt for each shape (`Costs`). Rounds
    come in pairs of one shape. Only the second teaches: the first finds cold caches, as in `CostAware`, and
    learning takes time that a small model's rounds notice. Shapes are few, as those that
    return often are faster. The estimates outlive a text: use one object for all texts.
    """

    # One pair of rounds in PROBE tries another shape: by turns the one that seems second best, and each in order, as a
    # shape that seems slow may have been timed while the machine was busy.
    PROBE = 48
    LOOK = 32  # Rounds between two searches for the best shape, so that a small model's rounds do not wait for Python.
    LEVEL, NODE = 0.25, 0.02  # Expected costs of a level and of a node beside plain decoding, until rounds were timed.

    def __init__(self, shapes: Sequence[Tree | None] | None = None) -> None:
        self.shapes = list(dict.fromkeys(MENU if shapes is None else shapes))
        trees = [tree for tree in self.shapes if tree]
        self.extent = max(tree.depth for tree in trees), 1 + max(max(tree.ranks) for tree in trees)
        self.acceptance = Acceptance()
        self.costs = Costs(
            {tree: 1.0 if tree is None else 1 + self.LEVEL * tree.depth + self.NODE * tree.size for tree in self.shapes}
        )
        # What is tried first: two middling shapes, the largest tree, plain decoding.
        by_size = sorted(trees, key=lambda tree: tree.size)
        self.opening: list[Tree | None] = [by_size[len(by_size) // 2], by_size[len(by_size) // 4], by_size[-1], None]
        self.opening = [tree for tree in self.opening if tree in self.shapes]
        self.rounds, self.best, self.current = 0, self.opening[0], self.opening[0]

    def begin(self, rows: Rows) -> None:
        self.repeated = False

    def tree(self) -> Tree | None:
        self.start, before = time.perf_counter(), self.current
        self.current = self.choose()
        self.repeated = self.rounds > 1 and self.current == before
        return self.current

    def choose(self) -> Tree | None:
        """The shape of the next round."""
        pair = self.rounds // 2
        self.rounds += 1
        if pair < len(self.opening):
            return self.opening[pair]
        if pair % self.PROBE:
            return self.best
        turn = pair // self.PROBE
        if turn % 2:
            return max((shape for shape in self.shapes if shape != self.best), key=self.rate)
        return self.shapes[turn // 2 % len(self.shapes)]

    def learn(self, last: dict[int, int]) -> None:
        if self.repeated:
            self.costs.learn(self.current, time.perf_counter() - self.start)
            if self.current:
                self.acceptance.add(self.current, last.values())
        if self.rounds % self.LOOK == 2 * len(self.opening):
            self.table = self.acceptance.table(*self.extent)
            self.best = max(self.shapes, key=self.rate)

    def rate(self, tree: Tree | None) -> float:
        """Expected tokens per second of a round."""
        return (expected(tree, self.table) if tree else 1.0) / self.costs.seconds(tree)
