"""How many tokens to guess next: the simplest rule. lengthRules.py has the others, and interfaces.py says what each
method of a rule is for (`LengthRule`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from decoding.rows import Rows
from utils import UserError


class Fixed:
    """Always `length` tokens."""

    stop: Callable[[Tensor], Tensor] | None = None
    sure: Callable[[Tensor], Tensor] | None = None

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.length = length

    def begin(self, rows: Rows) -> None:
        """See `LengthRule`, also for the other methods."""
        self.lengths = [self.length] * len(rows.tokens)

    def gammas(self) -> Sequence[int]:
        return self.lengths

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        return
