"""How many tokens to guess in the next round: the draft-length rules.

`Fixed` is the rule of the paper. Others adapt to the text, and `CostAware` to the machine too.
"""

from __future__ import annotations

import itertools
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from decoding.costs import Costs
from decoding.rows import Rows
from utils import UserError, check_share


class LengthRule(ABC):
    """How many tokens to guess in each round.

    RULES names the rules. The first sentence of a rule's docstring is its help. Of a rule's parameters, `length` is
    gamma, with the default that --gamma has for it; the others have the names and values of fields of
    `methods.samplers.Decoding`.

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
    """Always gamma tokens."""

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.length, self.lengths = length, (length,)

    def begin(self, rows: Rows) -> None:
        self.rows, self.next = rows, [self.length] * len(rows.prompts)  # of each text

    def gammas(self) -> Sequence[int]:
        return [self.next[text] for text in self.rows.numbers]


class Additive(Fixed):
    """One token more after a round accepted in full, else half as many, but at least gamma (the report's rule)."""

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
    """At most gamma tokens, until the draft is unsure: stop after a token that it gave a probability below
    --draftThreshold. That token is submitted like the others; dropping it would bias the text."""

    def __init__(self, length: int = 10, draft_threshold: float = 0.4) -> None:
        super().__init__(length)
        self.threshold = check_share("threshold", draft_threshold)

    def stop(self, q_x: Tensor) -> Tensor:
        return q_x < self.threshold


class TargetConfidence(Fixed):
    """Gamma tokens while the target is sure, else none. If its probability of the last token it drew is below
    --targetThreshold, the row continues without guesses, one token at a time, until it is sure again."""

    def __init__(self, length: int = 4, target_threshold: float = 0.5) -> None:
        super().__init__(length)
        self.lengths, self.threshold = (0, length), check_share("threshold", target_threshold)

    def sure(self, p_x: Tensor) -> Tensor:
        return p_x >= self.threshold

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for text, is_sure in sure.items():
            self.next[text] = self.length if is_sure else 0


class Search:
    """The search for the best of some lengths, with about so many rows in the batch.

    costs: the seconds of a whole round of each length. rounds: so far. opening: the lengths tried first, unless
    one seems far worse than the best by then. best: the best length so far.

    Later other lengths are tried as far as that costs little: at most LOSS of the time is lost by it.
    """

    PROBE = 24  # One pair of rounds in so many tries another length at most.
    LOSS = 0.01
    WORTH = 0.3  # A length is not tried that seems to give less than this share of the tokens per second of the best,
    AT_FIRST = 0.8  # or this share, at first.

    def __init__(self, expected: Mapping[int, float], opening: Sequence[int], best: int) -> None:
        self.costs, self.lengths = Costs(expected), sorted(expected)
        self.opening, self.best, self.rounds = list(opening), best, 0
        self.lost, self.tries, self.chosen = 0.0, 0, best

    def choose(self, rate: Callable[[int], float]) -> int:
        """The length of the next round. rate: the tokens per second that a length should give."""
        self.rounds += 1
        if self.rounds % 2:  # The second round of a pair has the length of the first.
            self.chosen = self.next(rate)
        return self.chosen

    def next(self, rate: Callable[[int], float]) -> int:
        """The length of the next pair of rounds."""
        while self.opening:
            length, timed = self.opening.pop(0), self.costs.timings
            if not timed or rate(length) > self.AT_FIRST * max(map(rate, timed)):
                return length
        self.lost = max(0.0, self.lost - self.LOSS * 2 * self.costs.seconds(self.best))
        if self.rounds // 2 % self.PROBE or self.lost:
            return self.best
        at, last = self.lengths.index(self.best), len(self.lengths) - 1
        other = self.lengths[(0, max(at - 1, 1), min(at + 1, last), max(at, 1))[self.tries % 4]]
        self.tries += 1
        share = rate(other) / rate(self.best)
        if share < self.WORTH:
            return self.best
        self.lost += 2 * self.costs.seconds(other) * max(0.0, 1 - share)
        return other


class CostAware(LengthRule):
    """As many tokens as pay, by measured acceptance and costs, at most gamma. It is the length of LENGTHS with the most
    expected tokens per second; 0 (plain decoding) is one of them.

    The rule keeps running estimates of alpha at each position of a round, and of the seconds of a whole round of each
    length (`Costs`). What guesses cost depends on the number of rows that are decoded together: the more rows, the
    less of the target's time is spent waiting for memory. So each number of rows, up to the next power of two, has a
    `Search` of its own, which begins with what another one has learnt.

    Lengths come in pairs of rounds and the first is not timed: it finds cold caches, and the draft may have to read
    what it missed. Some pairs try a length beside the best one, so that a change is noticed. The estimates outlive a
    text: use one object for all texts. LENGTHS are few, as shapes that return often are faster.

    Of several rows, each has an alpha of its own, and a row whose guesses fail guesses less: a guess is made if its
    chance of being accepted, over its cost, reaches PRICE times the tokens per second of the batch.
    """

    LENGTHS = (0, 1, 2, 3, 4, 6, 10)
    OPENING = (4, 2, 0, 6, 1)  # What is tried first.
    MEMORY = 0.995  # Weight of the past in each round,
    OF_TEXT = 0.9  # and for the alpha of one text.
    # A position with few tests borrows FAITH tests from the position before it; the first position borrows from alpha
    # = HOPE. Old tests lose weight, so a draft that was once unlucky is tried again. A text borrows from all texts.
    FAITH, HOPE = 4, 0.7
    PRICE = 0.5  # A guess costs less than its share of the round: the draft makes the step for other rows all the same.
    WHOLE = 0.8  # Rounds with a smaller share of the guesses do not teach what rounds of that length cost.
    GUESS = 0.25  # Expected cost of a guess beside plain decoding, until rounds were timed.

    def __init__(self, length: int = 10) -> None:
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.lengths: list[int] = [choice for choice in self.LENGTHS if choice < length] + [length]
        self.longest = length
        self.tested, self.passed = [0.0] * length, [0.0] * length
        self.searches: dict[int, Search] = {}  # {rows: the search}

    def begin(self, rows: Rows) -> None:
        self.rows, self.before = rows, (0, 0)
        self.of_text: dict[int, tuple[float, float]] = {}  # {text: guesses tested, passed}

    def gammas(self) -> Sequence[int]:
        self.start, left = time.perf_counter(), self.rows.left
        self.live = [text for text, more in zip(self.rows.numbers, left) if more]
        rows = 1 << (len(self.live) - 1).bit_length()
        self.search = self.search_for(rows)
        self.kind = rows, self.search.choose(self.rate)
        plan = self.plan(self.kind[1])
        self.asked = {text: min(plan[text], more - 1) for text, more in zip(self.rows.numbers, left) if more}
        return [plan.get(text, 0) for text in self.rows.numbers]

    def search_for(self, rows: int) -> Search:
        """The search with so many rows. A new one begins with what another one has learnt, for the next number of
        rows."""
        if rows not in self.searches:
            near = min(self.searches, key=lambda other: max(other, rows) / min(other, rows), default=None)
            if near is None:
                expected = {length: 1 + self.GUESS * length for length in self.lengths}
                # With several rows, guesses may be far too dear: what is tried first costs little.
                lengths = self.OPENING if rows == 1 else sorted(self.OPENING)
                opening = [min(length, self.longest) for length in lengths]
                self.searches[rows] = Search(expected, opening, min(4, self.longest))
            else:
                search = self.searches[near]
                expected = {length: search.costs.seconds(length) for length in self.lengths}
                opening = [search.best, *sorted({*self.OPENING} & {*self.lengths} - {search.best})]
                self.searches[rows] = Search(expected, opening, search.best)
        return self.searches[rows]

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        """A guess that a drafter was asked for and did not make counts as one that was rejected."""
        seconds = time.perf_counter() - self.start
        # A position that is no longer tested falls back on the one before it, in time.
        self.tested = [self.MEMORY * count for count in self.tested]
        self.passed = [self.MEMORY * count for count in self.passed]
        for text, taken in accepted.items() if self.kind[1] else ():
            more = min(taken + 1, self.asked[text])
            for i in range(more):
                self.tested[i] += 1 / len(accepted)
            for i in range(taken):
                self.passed[i] += 1 / len(accepted)
            tested, passed = self.of_text.get(text, (0.0, 0.0))
            self.of_text[text] = self.OF_TEXT * tested + more, self.OF_TEXT * passed + taken
        is_whole = sum(self.asked.values()) >= self.WHOLE * self.kind[1] * len(accepted)
        if self.kind == self.before and is_whole:
            self.search.costs.learn(self.kind[1], seconds)
        self.before = self.kind
        # The search costs a hundredth of a small model's round, and more with several rows.
        if self.search.rounds % (4 if self.search.opening or len(self.live) == 1 else 16) == 0:
            self.search.best = max(self.lengths, key=self.rate)

    def alphas(self, length: int) -> list[float]:
        """Estimates of alpha at the first `length` positions."""
        found, alpha = [], self.HOPE
        for tested, passed in zip(self.tested[:length], self.passed[:length]):
            alpha = (passed + self.FAITH * alpha) / (tested + self.FAITH)
            found.append(alpha)
        return found

    def rate(self, length: int) -> float:
        """Expected tokens per second of a row, in rounds where every row makes that many guesses."""
        tokens = 1 + sum(itertools.accumulate(self.alphas(length), operator.mul))
        return tokens / self.search.costs.seconds(length)

    def plan(self, length: int) -> dict[int, int]:
        """{text: its guesses} in a round: of `length` guesses those that are worth their time."""
        if not length or len(self.live) == 1:
            return dict.fromkeys(self.live, length)
        seconds, alphas = self.search.costs.seconds, self.alphas(length)
        price = self.PRICE * self.rate(length) * max(0.0, seconds(length) - seconds(0)) / length  # in tokens
        mean = (sum(self.passed) + self.FAITH * self.HOPE) / (sum(self.tested) + self.FAITH)
        guesses = {}
        for text in self.live:
            tested, passed = self.of_text.get(text, (0.0, 0.0))
            share = (passed + self.FAITH * mean) / (tested + self.FAITH) / mean  # of this text's alpha, in that of all
            chances = itertools.accumulate((min(1.0, share * alpha) for alpha in alphas), operator.mul)
            guesses[text] = sum(1 for chance in chances if chance >= price)
        return guesses


RULES: dict[str, Callable[..., LengthRule]] = {
    "fixed": Fixed,
    "additive": Additive,
    "draftConfidence": DraftConfidence,
    "targetConfidence": TargetConfidence,
    "costAware": CostAware,
}
