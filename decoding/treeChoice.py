"""Which tree of guesses to grow next: `Always` the same one, or the one of a few that gives the most tokens per second
(`Auto`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from decoding.costs import Costs
from decoding.rows import Rows
from decoding.trees import Tree
from decoding.treeShapes import Acceptance, expected


class TreeChoice(Protocol):
    """What chooses the shape of each round's tree.

    A choice may depend on committed tokens and past rounds only. All nodes of a tree are drawn and submitted to
    verification. This keeps every choice lossless.

    most: guesses in the largest tree.
    """

    @property
    def most(self) -> int: ...

    def begin(self, rows: Rows) -> None:
        """A new batch."""

    def tree(self) -> Tree | None:
        """A round begins: the shape of its tree; None: no guesses, the target draws one token."""
        ...

    def learn(self, last: dict[int, int]) -> None:
        """The round has ended. last: {row: last accepted node, or 0}, of the rows that had not ended."""


class Always:
    """Always the same tree."""

    def __init__(self, tree: Tree) -> None:
        self.shape, self.most = tree, tree.size

    def begin(self, rows: Rows) -> None:
        """See `TreeChoice`, also for the other methods."""

    def tree(self) -> Tree | None:
        return self.shape

    def learn(self, last: dict[int, int]) -> None:
        return


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


class Auto:
    """The shape of a menu with the most expected tokens per second, by measured acceptance and measured seconds.

    Acceptance is learnt for the 1st, 2nd, 3rd ... sibling at each depth (`Acceptance`), and gives the expected tokens
    of every shape (Sequoia, arXiv 2402.12374). The seconds of whole rounds are learnt for each shape (`Costs`). Rounds
    come in pairs of one shape. Only the second teaches: the first finds cold caches, as in `lengthRules.CostAware`, and
    learning takes time that a small model's rounds notice. Shapes are few, because those that return often are faster:
    graphs are made for each. The estimates outlive a text: use one object for all texts.
    """

    # One pair of rounds in PROBE tries another shape: by turns the one that seems second best, and each in order, as a
    # shape that seems slow may have been timed while the machine was busy.
    PROBE = 48
    LOOK = 32  # Rounds between two searches for the best shape, so that a small model's rounds do not wait for Python.
    LEVEL, NODE = 0.25, 0.02  # Expected costs of a level and of a node beside plain decoding, until rounds were timed.

    def __init__(self, shapes: Sequence[Tree | None] | None = None) -> None:
        self.shapes = list(dict.fromkeys(MENU if shapes is None else shapes))
        trees = [tree for tree in self.shapes if tree]
        self.most = max(tree.size for tree in trees)
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
        """See `TreeChoice`, also for the other methods."""
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
