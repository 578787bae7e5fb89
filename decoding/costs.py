"""`Costs`: what rounds of each kind take, learnt from rounds that were timed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


class Costs(Generic[Kind]):
    """Seconds of rounds of several kinds, on a machine whose speed drifts.

    expected: {kind: what it costs beside the others}, before anything was timed, in any unit.

    The seconds of a kind are `expected * exp(speed + own)`. `speed` is the machine's and changes with every round,
    whatever its kind. `own` is the kind's: it changes much in a kind that was timed seldom or long ago, and little in
    one that is timed all the time. So a slower hour makes all kinds slower, not only the one that is in use. Of a kind
    that was never timed, `own` is interpolated between the kinds next to it in `expected`.
    """

    FADE = 0.99  # Weight of earlier timings after each round.
    DRIFT = 0.1  # Share of a surprise that is the machine's, if the kind itself is well known.
    MOST = math.log(2)  # A round counts for at most twice what it should take: the machine does other things too.

    def __init__(self, expected: Mapping[Kind, float]) -> None:
        self.expected = dict(sorted(expected.items(), key=lambda item: item[1]))
        self.speed = 0.0
        self.own: dict[Kind, float] = {}
        self.timings: dict[Kind, float] = {}

    def seconds(self, kind: Kind) -> float:
        """Expected seconds of a round of that kind."""
        return self.expected[kind] * math.exp(self.speed + self.correction(kind))

    def correction(self, kind: Kind) -> float:
        """`own` of a kind: learnt, or interpolated between the next cheaper and the next dearer kind that was timed."""
        if kind in self.own or not self.own:
            return self.own.get(kind, 0.0)
        cost = self.expected[kind]
        known = [(self.expected[each], self.own[each]) for each in self.expected if each in self.own]
        x, low = max((point for point in known if point[0] <= cost), default=known[0])
        z, high = min((point for point in known if point[0] >= cost), default=known[-1])
        return low if x >= z else low + (high - low) * (cost - x) / (z - x)

    def learn(self, kind: Kind, seconds: float) -> None:
        """A round of that kind took so many seconds."""
        if not self.own:
            self.speed = math.log(max(seconds, 1e-9) / self.expected[kind])
        surprise = min(math.log(max(seconds, 1e-9) / self.seconds(kind)), self.MOST)
        self.timings = {each: count * self.FADE for each, count in self.timings.items()}
        share = 1 / (1 + max(self.timings[kind], 1)) if kind in self.timings else 1.0
        self.own[kind] = self.correction(kind) + share * surprise
        self.speed += self.DRIFT * (1 - share) * surprise
        self.timings[kind] = self.timings.get(kind, 0.0) + 1
