"""How many tokens to guess next.

A rule is told of a new batch with `begin(rows)`; before a round `gammas()` gives the most tokens to guess for each row,
`stop(q_x)` says after each guess which rows guess no further (None: it never asks), `timed` whether drafting and
scoring are to be timed each by itself, and after the round
`learn(drafted, accepted, p_token, seconds)` tells what came of it. A rule may look at committed tokens, past rounds and
guesses already drawn, and a guess once drawn is always put to the test: that keeps every rule lossless.
"""

from utils import UserError, check_share


class Fixed:
    """Always `length` tokens."""

    stop, timed = None, False

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
        a function that gives what the drafting took, and what the rest of the round."""


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

    It keeps running estimates of alpha at each position in a round, of what a guess costs and of what it costs to
    score them. Machines are faster at one time than at another, so the two costs are those of the last rounds, measured
    in the same rounds; how scoring grows with its tokens is learnt where the length changes. Now and then a round tries
    a length beside the best one, so that a change is noticed. Estimates outlive a text: use one object for all.
    """

    stop, timed = None, True
    MEMORY, PROBE = 0.995, 32  # weight of the past at each round; a round in so many tries another length
    RECENT = 0.9  # weight of the past in what things cost
    FAITH, HOPE = 4, 0.7  # tests that a position takes over from the one before, as long as it has few of its own;
    # alpha of the first while there are none: what was tested long ago counts for little, so a hopeful figure sees to
    # it that a draft once unlucky is tried again

    def __init__(self, length=10):
        if length < 1:
            raise UserError(f"gamma must be 1 or more, not {length}")
        self.longest, self.rounds, self.best = length, 0, min(4, length)
        self.tested, self.passed = [0.0] * length, [0.0] * length
        self.guess = self.scoring = self.scored = None  # seconds a guess, seconds of scoring, and how many guesses then
        self.growth = 0.03  # of scoring with each guess

    def begin(self, rows):
        self.count = rows

    def gammas(self):
        return [self.choose()] * self.count

    def choose(self):
        self.rounds += 1
        opening = (4, 2, 0, 6, 4, 1)
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
        self.learn_costs(max(drafted.values()), *seconds())
        if self.rounds % 4 == 0:  # the search costs a hundredth of a round
            self.best = max(range(self.longest + 1), key=self.rate)

    def learn_costs(self, guesses, drafting, scoring):
        if guesses:
            self.guess = self.recent(self.guess, drafting / guesses)
        if self.scoring and abs(guesses - self.scored) >= 1:
            surprise = scoring / self.scoring - (1 + self.growth * guesses) / (1 + self.growth * self.scored)
            step = 0.1 * max(-0.3, min(surprise, 0.3)) / (guesses - self.scored)
            self.growth = max(0.0, min(self.growth + step, 0.5))
        self.scoring = self.recent(self.scoring, scoring)
        self.scored = guesses if self.scored is None else self.scored + (1 - self.RECENT) * (guesses - self.scored)

    def recent(self, known, value):
        """A running mean, in which one value counts for twice the mean at most: the machine does other things too."""
        return value if known is None else known + (1 - self.RECENT) * (min(value, 2 * known) - known)

    def rate(self, length):
        """Expected tokens per second of a round that guesses `length` tokens."""
        tokens, reach, alpha = 1.0, 1.0, self.HOPE
        for tested, passed in zip(self.tested[:length], self.passed[:length]):
            alpha = (passed + self.FAITH * alpha) / (tested + self.FAITH)
            reach *= alpha
            tokens += reach
        return tokens / self.cost(length)

    def cost(self, length):
        """Seconds a round that guesses `length` tokens takes."""
        plain = self.scoring / (1 + self.growth * self.scored)
        return length * (self.guess or 0.0) + plain * (1 + self.growth * length)


RULES = {
    "fixed": Fixed,
    "additive": Additive,
    "draftConfidence": DraftConfidence,
    "targetConfidence": TargetConfidence,
    "costAware": CostAware,
}
