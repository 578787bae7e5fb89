"""`Costs`: seconds of a round of each kind, estimated from timed rounds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


class Costs(Generic[Kind]):
    """Seconds of rounds of several kinds, on a machine whose speed drifts.

    expected: {kind: its cost relative to the others}, before anything was timed, in any unit.

    The seconds of a kind are `expected * exp(speed + offset)`. `speed` is the machine's and changes with every round,
    whatever its kind. `offset` is the kind's. It changes much for a kind that was timed seldom or long ago, and little
    for one that is timed all the time. So a slower hour slows down all kinds, not only the one in use. For a kind that
    was never timed, `offset` is interpolated between the kinds next to it in `expected`.
    """

    FADE = 0.99  # Weight of earlier timings after each round.
    DRIFT = 0.1  # Share of a surprise that is the machine's, if the kind itself is well known.
    MOST = math.log(2)  # A round counts for at most twice what it should take: the machine does other things too.

    def __init__(self, expected: Mapping[Kind, float]) -> None:
        self.expected = dict(sorted(expected.items(), key=lambda item: item[1]))
        self.speed = 0.0
        self.offsets: dict[Kind, float] = {}
        self.timings: dict[Kind, float] = {}

    def seconds(self, kind: Kind) -> float:
        """Expected seconds of a round of `kind`."""
        return self.expected[kind] * math.exp(self.speed + self.correction(kind))

    def correction(self, kind: Kind) -> float:
        """`offset` of a kind: learnt, or interpolated between the next cheaper and the next more expensive kind."""
        if kind in self.offsets or not self.offsets:
            return self.offsets.get(kind, 0.0)
        cost = self.expected[kind]
        known = [(self.expected[timed], self.offsets[timed]) for timed in self.expected if timed in self.offsets]
        x, low = max((point for point in known if point[0] <= cost), default=known[0])
        z, high = min((point for point in known if point[0] >= cost), default=known[-1])
        return low if x >= z else low + (high - low) * (cost - x) / (z - x)

    def learn(self, kind: Kind, seconds: float) -> None:
        """Learn that a round of `kind` took `seconds`."""
        if not self.offsets:
            self.speed = math.log(max(seconds, 1e-9) / self.expected[kind])
        surprise = min(math.log(max(seconds, 1e-9) / self.seconds(kind)), self.MOST)
        self.timings = {other: count * self.FADE for other, count in self.timings.items()}
        share = 1 / (1 + max(self.timings[kind], 1)) if kind in self.timings else 1.0
        self.offsets[kind] = self.correction(kind) + share * surprise
        self.speed += self.DRIFT * (1 - share) * surprise
        self.timings[kind] = self.timings.get(kind, 0.0) + 1
