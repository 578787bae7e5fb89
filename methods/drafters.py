"""What a drafter is, and `ModelDrafter`: a smaller model guesses the target's next tokens.

lookup.py and cascade.py have the other drafters.

A drafter has `models`, the models that must read the rows. `begin(rows)` is called once, and `draft(rows, gamma,
sampling, generator, length)` in each round. That returns at most `gamma` guesses `[B, n]` and the distributions q
`[B, n, V]` that each guess was really drawn from; if a row has no guess, q is 0. `length` is the draft-length rule,
which may stop a row's guessing early (decoding/draftLength.py). `rewind(n)` says that up to n of the last tokens it has
read were replaced, in addition to those of the round before.
"""

from torch import Generator

from decoding.interfaces import LengthRule, Model
from decoding.rounds import Guesses, guess, no_guesses, prefill
from decoding.rows import Rows
from utils import Sampling


class ModelDrafter:
    """A smaller model with the target's vocabulary guesses, one token after the other."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.models = [model]

    def begin(self, rows: Rows) -> None:
        """Read the prompts."""
        prefill(self.model, rows)
        self.behind = 1

    def rewind(self, count: int) -> None:
        """Read `count` tokens more again in the next round."""
        self.behind += count

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """Guess the next `gamma` tokens of each row.

        The last two committed tokens are read again. The draft has not seen the last token of the round, and after full
        acceptance it has not read its own last guess either. Two tokens cost what one costs. A round without guesses
        leaves the draft one token further behind.
        """
        if gamma == 0:
            self.behind += 1
            return no_guesses(rows, self.model.vocabulary)
        read, self.behind = 1 + self.behind, 1
        return guess(self.model, rows, read, gamma, sampling, generator, length)
