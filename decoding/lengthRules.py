"""All draft-length rules by name: those that adapt to the text, and `CostAware`, which adapts to the machine too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from decoding.draftLength import Fixed
from decoding.interfaces import LengthRule
from decoding.rows import Rows
from decoding.watch import Watch
from utils import UserError, check_share


class Additive(Fixed):
    """One token more after a round accepted in full, else half as many, but at least `length` (the report's rule)."""

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for row, guesses in drafted.items():
            if accepted[row] == guesses:
                self.lengths[row] += 1
            else:
                self.lengths[row] = max(self.length, self.lengths[row] // 2)


class DraftConfidence(Fixed):
    """Guess on while the draft is confident, at most `length` tokens: stop after a token that the draft gave a
    probability below `threshold`. That token is submitted like the others; dropping it would bias the text."""

    def __init__(self, length: int = 10, threshold: float = 0.4) -> None:
        super().__init__(length)
        self.threshold = check_share("threshold", threshold)

    def stop(self, q_x: Tensor) -> Tensor:
        """q_x: float32 `[B]`, the draft's probability of the token each row drew. Returns bool `[B]`."""
        return q_x < self.threshold


class TargetConfidence(Fixed):
    """Guess only while the target is confident. If its probability of the last token it drew is below `threshold`, the
    row continues without guesses, one token at a time, until it is confident again."""

    def __init__(self, length: int = 4, threshold: float = 0.5) -> None:
        super().__init__(length)
        self.threshold = check_share("threshold", threshold)

    def sure(self, p_x: Tensor) -> Tensor:
        """p_x: float32 `[B]`, the target's probability of the token each row drew last. Returns bool `[B]`."""
        return p_x >= self.threshold

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for row, is_sure in sure.items():
            self.lengths[row] = self.length if is_sure else 0


class CostAware:
    """The length of LENGTHS with the most expected tokens per second; 0 (plain decoding) is one of them.

    The rule keeps running estimates of alpha at each position of a round, of the cost of a guess, and of the cost of
    scoring. A machine's speed drifts, so both costs come from the last rounds, measured in the same rounds. How the
    cost of scoring grows with the number of tokens is learnt whenever the length changes. Some rounds try a length
    beside the best one, so that a change is noticed. The estimates outlive a text: use one object for all texts.
    LENGTHS are few, because shapes that return often are faster.
    """

    stop: Callable[[Tensor], Tensor] | None = None
    sure: Callable[[Tensor], Tensor] | None = None
    timed = True
    LENGTHS = (0, 1, 2, 3, 4, 6, 10)
    MEMORY, PROBE = 0.995, 32  # Weight of the past in each round; one round in PROBE tries another length.
    RECENT = 0.9  # Weight of the past in the costs.
    # A position with few tests borrows FAITH tests from the position before it; the first position borrows from alpha
    # = HOPE. Old tests lose weight, so a draft that was once unlucky is tried again.
    FAITH, HOPE = 4, 0.7

    def __init__(self, length: int = 10) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.lengths = [choice for choice in self.LENGTHS if choice < length] + [length]
        self.longest, self.rounds, self.best = length, 0, min(4, length)
        self.tested, self.passed = [0.0] * length, [0.0] * length
        # Seconds of a guess, seconds of scoring, and how many guesses were scored in that time.
        self.guess: float | None = None
        self.scoring: float | None = None
        self.scored: float | None = None
        self.growth = 0.03  # of the cost of scoring with each guess

    def begin(self, rows: Rows) -> None:
        """See `LengthRule`, also for the other methods."""
        self.count, self.device = len(rows.tokens), rows.device

    def gammas(self) -> Sequence[int]:
        self.watch = Watch(self.device)
        return [self.choose()] * self.count

    def drafted(self) -> None:
        self.watch.mark()

    def choose(self) -> int:
        """The length of the next round."""
        self.rounds += 1
        opening = (4, 2, 0, 6, 4, 1)
        if self.rounds <= len(opening):
            return min(opening[self.rounds - 1], self.longest)
        if self.rounds % self.PROBE:
            return self.best
        at, turn = self.lengths.index(self.best), self.rounds // self.PROBE % 4
        last = len(self.lengths) - 1
        return self.lengths[(0, max(at - 1, 1), min(at + 1, last), max(at, 1))[turn]]

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for i in range(self.longest):  # A position that is no longer tested falls back on the one before it, in time.
            reached = [row for row, taken in accepted.items() if taken >= i and drafted[row] > i]
            passed = sum(accepted[row] > i for row in reached)
            self.tested[i] = self.MEMORY * self.tested[i] + len(reached) / len(accepted)
            self.passed[i] = self.MEMORY * self.passed[i] + passed / len(accepted)
        self.learn_costs(max(drafted.values()), *self.watch.seconds())
        if self.rounds % 4 == 0:  # The search costs a hundredth of a round.
            self.best = max(self.lengths, key=self.rate)

    def learn_costs(self, guesses: int, drafting: float, scoring: float) -> None:
        """Update the costs after a round with so many guesses; drafting, scoring: its seconds."""
        if guesses:
            self.guess = self.recent(self.guess, drafting / guesses)
        if self.scoring and self.scored is not None and abs(guesses - self.scored) >= 1:
            surprise = scoring / self.scoring - (1 + self.growth * guesses) / (1 + self.growth * self.scored)
            step = 0.1 * max(-0.3, min(surprise, 0.3)) / (guesses - self.scored)
            self.growth = max(0.0, min(self.growth + step, 0.5))
        self.scoring = self.recent(self.scoring, scoring)
        self.scored = guesses if self.scored is None else self.scored + (1 - self.RECENT) * (guesses - self.scored)

    def recent(self, known: float | None, value: float) -> float:
        """A running mean. One value counts for at most twice the mean, because the machine does other things too."""
        return value if known is None else known + (1 - self.RECENT) * (min(value, 2 * known) - known)

    def rate(self, length: int) -> float:
        """Expected tokens per second of a round with `length` guesses."""
        tokens, reach, alpha = 1.0, 1.0, self.HOPE
        for tested, passed in zip(self.tested[:length], self.passed[:length]):
            alpha = (passed + self.FAITH * alpha) / (tested + self.FAITH)
            reach *= alpha
            tokens += reach
        return tokens / self.cost(length)

    def cost(self, length: int) -> float:
        """Expected seconds of a round with `length` guesses."""
        assert self.scoring is not None and self.scored is not None, "no round was learnt from yet"
        plain = self.scoring / (1 + self.growth * self.scored)
        return length * (self.guess or 0.0) + plain * (1 + self.growth * length)


RULES: dict[str, Callable[..., LengthRule]] = {
    "fixed": Fixed,
    "additive": Additive,
    "draftConfidence": DraftConfidence,
    "targetConfidence": TargetConfidence,
    "costAware": CostAware,
}
