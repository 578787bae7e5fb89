"""How many tokens to guess in the next round: the draft-length rules.

`Fixed` is the rule of the paper. Others adapt to the text, and `CostAware` to the machine too.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from decoding.costs import Costs
from decoding.rows import Rows
from utils import UserError, check_share


class LengthRule(ABC):
    """How many tokens to guess in each round.

    A rule may look at committed tokens, past rounds and guesses already drawn. A guess once drawn is always submitted
    to verification. This keeps every rule lossless.

    lengths: the numbers of guesses it may choose; None if they are many.
    stop: `stop(q_x)` is asked after each guess, whose probability was `q_x[B]`, float32: which rows guess no further,
        bool `[B]`. None: the rule never asks.
    sure: `sure(p_x)` is asked after each round, in which the target drew its last token with probability `p_x[B]`,
        float32. It returns bool `[B]`, which `learn` is told. None: the rule never asks.
    """

    lengths: Collection[int] | None = None
    stop: Callable[[Tensor], Tensor] | None = None
    sure: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def begin(self, rows: Rows) -> None:
        """A new batch, or a queue of texts."""

    @abstractmethod
    def gammas(self) -> Sequence[int]:
        """A round begins: the most tokens to guess for each row."""

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        """Learn from a round.

        drafted, accepted: {text: tokens guessed}, {text: guesses accepted}, of the texts that had not ended.
        sure: {text: what `sure` said of the token that the target drew last}, if the rule has a `sure`.
        """
        return


class Fixed(LengthRule):
    """Always `length` tokens."""

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.length, self.lengths = length, (length,)

    def begin(self, rows: Rows) -> None:
        self.rows, self.next = rows, [self.length] * len(rows.prompts)  # of each text

    def gammas(self) -> Sequence[int]:
        return [self.next[text] for text in self.rows.numbers]


class Additive(Fixed):
    """One token more after a round accepted in full, else half as many, but at least `length` (the report's rule)."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        self.lengths = None

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for text, guesses in drafted.items():
            if accepted[text] == guesses:
                self.next[text] += 1
            else:
                self.next[text] = max(self.length, self.next[text] // 2)


class DraftConfidence(Fixed):
    """Guess on while the draft is confident, at most `length` tokens: stop after a token that the draft gave a
    probability below `threshold`. That token is submitted like the others; dropping it would bias the text."""

    def __init__(self, length: int = 10, threshold: float = 0.4) -> None:
        super().__init__(length)
        self.threshold = check_share("threshold", threshold)

    def stop(self, q_x: Tensor) -> Tensor:
        return q_x < self.threshold


class TargetConfidence(Fixed):
    """Guess only while the target is confident. If its probability of the last token it drew is below `threshold`, the
    row continues without guesses, one token at a time, until it is confident again."""

    def __init__(self, length: int = 4, threshold: float = 0.5) -> None:
        super().__init__(length)
        self.lengths, self.threshold = (0, length), check_share("threshold", threshold)

    def sure(self, p_x: Tensor) -> Tensor:
        return p_x >= self.threshold

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for text, is_sure in sure.items():
            self.next[text] = self.length if is_sure else 0


class CostAware(LengthRule):
    """The length of LENGTHS with the most expected tokens per second; 0 (plain decoding) is one of them.

    The rule keeps running estimates of alpha at each position of a round, and of the seconds of a whole round of each
    length (`Costs`). Lengths come in pairs of rounds and the first is not timed: it finds cold caches, and the draft
    may have to read what it missed. Some pairs try a length beside the best one, so that a change is noticed. The
    estimates outlive a text: use one object for all texts. LENGTHS are few, as shapes that return often are faster.
    """

    LENGTHS = (0, 1, 2, 3, 4, 6, 10)
    OPENING = (4, 2, 0, 6, 1)  # What is tried first.
    MEMORY, PROBE = 0.995, 24  # Weight of the past in each round; one pair in PROBE tries another length,
    WORTH = 0.3  # unless it seems to give less than this share of the tokens per second of the best.
    # A position with few tests borrows FAITH tests from the position before it; the first position borrows from alpha
    # = HOPE. Old tests lose weight, so a draft that was once unlucky is tried again.
    FAITH, HOPE = 4, 0.7
    GUESS = 0.25  # Expected cost of a guess beside plain decoding, until rounds were timed.

    def __init__(self, length: int = 10) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.lengths: list[int] = [choice for choice in self.LENGTHS if choice < length] + [length]
        self.longest, self.rounds, self.best = length, 0, min(4, length)
        self.tested, self.passed = [0.0] * length, [0.0] * length
        self.costs = Costs({guesses: 1 + self.GUESS * guesses for guesses in self.lengths})

    def begin(self, rows: Rows) -> None:
        self.rows, self.before = rows, -1

    def gammas(self) -> Sequence[int]:
        self.start = time.perf_counter()
        return [self.choose()] * self.rows.size

    def choose(self) -> int:
        """The length of the next round."""
        pair = self.rounds // 2
        self.rounds += 1
        if pair < len(self.OPENING):
            return min(self.OPENING[pair], self.longest)
        if pair % self.PROBE:
            return self.best
        at, turn = self.lengths.index(self.best), pair // self.PROBE % 4
        last = len(self.lengths) - 1
        other = self.lengths[(0, max(at - 1, 1), min(at + 1, last), max(at, 1))[turn]]
        return other if self.rate(other) > self.WORTH * self.rate(self.best) else self.best

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        seconds, guesses = time.perf_counter() - self.start, max(drafted.values())
        for i in range(self.longest):  # A position that is no longer tested falls back on the one before it, in time.
            reached = [row for row, taken in accepted.items() if taken >= i and drafted[row] > i]
            passed = sum(accepted[row] > i for row in reached)
            self.tested[i] = self.MEMORY * self.tested[i] + len(reached) / len(accepted)
            self.passed[i] = self.MEMORY * self.passed[i] + passed / len(accepted)
        if guesses == self.before and guesses in self.lengths:
            self.costs.learn(guesses, seconds)
        self.before = guesses
        if self.rounds % 4 == 0:  # The search costs a hundredth of a round.
            self.best = max(self.lengths, key=self.rate)

    def rate(self, length: int) -> float:
        """Expected tokens per second of a round with `length` guesses."""
        tokens, reach, alpha = 1.0, 1.0, self.HOPE
        for tested, passed in zip(self.tested[:length], self.passed[:length]):
            alpha = (passed + self.FAITH * alpha) / (tested + self.FAITH)
            reach *= alpha
            tokens += reach
        return tokens / self.costs.seconds(length)


RULES: dict[str, Callable[..., LengthRule]] = {
    "fixed": Fixed,
    "additive": Additive,
    "draftConfidence": DraftConfidence,
    "targetConfidence": TargetConfidence,
    "costAware": CostAware,
}
