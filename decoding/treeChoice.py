"""Which tree of guesses to grow next: `Always` the same one."""

from __future__ import annotations

from typing import Protocol

from decoding.rows import Rows
from decoding.trees import Tree


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
