"""How many tokens to guess next.

A rule is told of a new batch with `begin(rows)`; before a round `gammas()` gives the most tokens to guess for each row,
`stop(q_x)` says after each guess which rows guess no further (None: it never asks), and after the round
`learn(drafted, accepted, p_token, seconds)` tells what came of it. A rule may look at committed tokens, past rounds and
guesses already drawn, and a guess once drawn is always put to the test: that keeps every rule lossless.
"""

import math

from utils import UserError, check_share


class Fixed:
    """Always `length` tokens."""

    stop = None

    def __init__(self, length=4):
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.length = length

    def begin(self, rows):
        """rows: how many there are."""
        self.lengths = [self.length] * rows

    def gammas(self):
        return self.lengths

    def learn(self, drafted, accepted, p_token, seconds):
        """drafted, accepted: {row: tokens guessed}, {row: how many of them stood} of the rows that had not ended;
        p_token: a function that gives the target's probability of the token each row drew last, as a list; seconds:
        what the round took."""


class Additive(Fixed):
    """One more after a round that was wholly accepted, else half, but at least `length` (the report's rule)."""

    def learn(self, drafted, accepted, p_token, seconds):
        for row, guesses in drafted.items():
            if accepted[row] == guesses:
                self.lengths[row] += 1
            else:
                self.lengths[row] = max(self.length, self.lengths[row] // 2)


class DraftConfidence(Fixed):
    """Guess on while the draft is confident, `length` tokens at most: stop after a token whose probability under the
    draft was below `threshold`. That token is submitted with the others; to drop it for its probability would bias the
    text."""

    def __init__(self, length=10, threshold=0.4):
        super().__init__(length)
        self.threshold = check_share("threshold", threshold)

    def stop(self, q_x):
        """q_x `[B]`: probability under the draft of the token each row drew. Returns bool `[B]`."""
        return q_x < self.threshold


class TargetConfidence(Fixed):
    """Guess only where the target is sure of itself: a row in which its probability of the last token it drew is below
    `threshold` goes on without guesses, a token at a time, until it is sure again."""

    def __init__(self, length=4, threshold=0.5):
        super().__init__(length)
        self.threshold = check_share("threshold", threshold)

    def learn(self, drafted, accepted, p_token, seconds):
        confidence = p_token()
        for row in accepted:
            self.lengths[row] = self.length if confidence[row] >= self.threshold else 0


class CostAware:
    """The length with the most expected tokens per second, 0 (plain decoding) included.

    It keeps running estimates of alpha at each position in a round, and of what a round costs: a constant and a price
    for each guess, fitted to the rounds that guessed, and the price of a round that did not. Now and then a round
    tries a length beside the best one, so that a change is noticed. Estimates outlive a text: use one object for all.
    """

    stop = None
    MEMORY, PROBE = 0.99, 32  # weight of the past at each round; a round in so many tries another length
    FAITH = 4                 # tests that a position takes over from the one before, as long as it has few of its own

    def __init__(self, length=10):
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.longest, self.rounds, self.best = length, 0, min(4, length)
        self.tested, self.passed = [0.0] * length, [0.0] * length
        self.seconds, self.weight = {}, {}

    def begin(self, rows):
        self.count = rows

    def gammas(self):
        return [self.choose()] * self.count

    def choose(self):
        self.rounds += 1
        opening = (0, 1, self.longest // 2 or 1, self.longest, 0, 2, 0)
        if self.rounds <= len(opening):
            return min(opening[self.rounds - 1], self.longest)
        if self.rounds % self.PROBE:
            return self.best
        turn = self.rounds // self.PROBE % 4
        return (0, max(self.best - 1, 1), min(self.best + 1, self.longest), max(self.best, 1))[turn]

    def learn(self, drafted, accepted, p_token, seconds):
        for i in range(self.longest):  # where nothing is tested any more the position before is trusted again, in time
            reached = [row for row, taken in accepted.items() if taken >= i and drafted[row] > i]
            passed = sum(accepted[row] > i for row in reached)
            self.tested[i] = self.MEMORY * self.tested[i] + len(reached) / len(accepted)
            self.passed[i] = self.MEMORY * self.passed[i] + passed / len(accepted)
        drafted = max(drafted.values())
        known = self.seconds.get(drafted)
        seconds = min(seconds, 2 * known) if known else seconds  # the machine may have done something else in between
        weight = self.weight[drafted] = 0.97 * self.weight.get(drafted, 0) + 1
        self.seconds[drafted] = (known or 0) + (seconds - (known or 0)) / weight
        if self.rounds >= 7 and self.rounds % 4 == 0:  # the search costs a hundredth of a round
            self.best = max(range(self.longest + 1), key=self.rate)

    def rate(self, length):
        """Expected tokens per second of a round that guesses `length` tokens."""
        tokens, reach, alpha = 1.0, 1.0, 0.5
        for tested, passed in zip(self.tested[:length], self.passed[:length]):
            alpha = (passed + self.FAITH * alpha) / (tested + self.FAITH)
            reach *= alpha
            tokens += reach
        return tokens / self.cost(length)

    def cost(self, length):
        """Seconds a round that guesses `length` tokens takes."""
        if length == 0 and 0 in self.seconds:
            return self.seconds[0]
        points = [(n, s, self.weight[n]) for n, s in self.seconds.items() if n]
        total = sum(w for *_, w in points)
        if not total:
            return math.inf if length else 1.0
        x, y = (sum(point[i] * point[2] for point in points) / total for i in (0, 1))
        spread = sum(w * (n - x) ** 2 for n, _, w in points)
        slope = max(sum(w * (n - x) * (s - y) for n, s, w in points) / spread, 0) if spread else 0.0
        return max(y + slope * (length - x), 0.1 * y)


RULES = {"fixed": Fixed, "additive": Additive, "draftConfidence": DraftConfidence, "targetConfidence": TargetConfidence,
         "costAware": CostAware}
