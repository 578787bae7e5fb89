"""`ModelDrafter`: a smaller model guesses the target's next tokens. The other drafters are in lookup.py, cascade.py and
otherTokenizer.py. decoding/interfaces.py says what each method of a drafter is for (`Drafter`)."""

from torch import Generator

from decoding.drawing import guess
from decoding.guesses import Guesses, no_guesses
from decoding.interfaces import LengthRule, Model
from decoding.rounds import prefill
from decoding.rows import Rows
from utils import Sampling


class ModelDrafter:
    """A smaller model with the target's vocabulary guesses, one token after the other.

    temperature, top_p: of the draft alone; None: the target's. Any value is lossless, because the q that verification
    is given is what the guess was drawn from. How many guesses are accepted depends on them: sum min(p, q).
    """

    def __init__(self, model: Model, temperature: float | None = None, top_p: float | None = None) -> None:
        self.model, self.temperature, self.top_p = model, temperature, top_p
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
        own = sampling.but(self.temperature, self.top_p)
        return guess(self.model, rows, read, gamma, sampling, own, generator, length)
