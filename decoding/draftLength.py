"""How many tokens to guess next: what a rule is, and the simplest one. The others are in lengthRules.py.

A rule hears of a new batch by `begin(rows)`. Before each round, `gammas()` gives the most tokens to guess for each row.
After each guess, `stop(q_x)` says which rows guess no further (None: the rule never asks). After scoring, `sure(p_x)`
says of which rows the target is sure (None: the rule never asks). Both compute on the device. After the round,
`learn(drafted, accepted, sure, seconds)` reports what came of it. `timed` says whether drafting and scoring must be
timed separately.

A rule may look at committed tokens, past rounds and guesses already drawn. A guess once drawn is always submitted to
verification. This keeps every rule lossless.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from utils import UserError


class Fixed:
    """Always `length` tokens."""

    stop: Callable[[Tensor], Tensor] | None = None
    sure: Callable[[Tensor], Tensor] | None = None
    timed = False

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.length = length

    def begin(self, rows: int) -> None:
        """A new batch of so many rows."""
        self.lengths = [self.length] * rows

    def gammas(self) -> Sequence[int]:
        """Tokens to guess for each row."""
        return self.lengths

    def learn(
        self,
        drafted: dict[int, int],
        accepted: dict[int, int],
        sure: dict[int, bool],
        seconds: Callable[[], Sequence[float]],
    ) -> None:
        """Learn from a round.

        drafted, accepted: {row: tokens guessed}, {row: guesses accepted}, of the rows that had not ended.
        sure: {row: what `sure` said of the token that the target drew last}, if the rule has a `sure`.
        seconds: gives the seconds of drafting, and of the rest of the round.
        """
