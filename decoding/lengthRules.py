"""How many tokens to guess in the next round, and in which shape: the rules that adapt.

`decoding.drafter` has the base class, and `Fixed`, the rule of the paper. Here are those that adapt to the text, and
`CostAware`, which adapts to the machine too: it estimates from past rounds how often guesses are accepted, and what a
round of each shape costs. A chain is a tree.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from decoding.drafter import Fixed, LengthRule, check_gamma
from decoding.rows import Rows
from decoding.tree import Tree
from utils import check_threshold


class Additive(Fixed):
    """One more token after a fully accepted round, otherwise half as many, but at least gamma (the report's rule)."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        self.shapes = None

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for text, guesses in drafted.items():
            if 0 < guesses == accepted[text]:
                self.next[text] += 1
            elif guesses:  # Lookup may find nothing to guess.
                self.next[text] = max(self.length, self.next[text] // 2)


class DraftConfidence(Fixed):
    """At most gamma tokens, until the draft is not confident: stop after a token whose draft probability is below
    --draftThreshold. That token is submitted like the others; dropping it would bias the text."""

    def __init__(self, length: int = 10, draft_threshold: float = 0.4) -> None:
        super().__init__(length)
        self.threshold = check_threshold(draft_threshold)

    def stop(self, q_x: Tensor) -> Tensor:
        return q_x < self.threshold


class TargetConfidence(Fixed):
    """gamma tokens while the target is confident, otherwise none. If its probability of the last token it drew is below
    --targetThreshold, the row continues without guesses, one token at a time, until it is confident again."""

    def __init__(self, length: int = 4, target_threshold: float = 0.5) -> None:
        super().__init__(length)
        self.threshold = check_threshold(target_threshold)

    def sure(self, p_x: Tensor) -> Tensor:
        return p_x >= self.threshold

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        for text, is_sure in sure.items():
            self.next[text] = self.length if is_sure else 0


# Plain decoding, chains, and trees that are best for 6, 24 and 32 guesses, where first siblings are accepted with
# probabilities of 0.4 to 0.9, a level costs 0.03 to 0.25 of a plain step, and a node 0.002 to 0.05. The best of these
# has 0.98 of the expected speed of the best shape of all on average, 0.92 at least, and 0.97 at least of that of the
# best chain (test_trees.py).
MENU = (
    *map(Tree.chain, (0, 2, 4, 7, 10)),
    Tree.of("3/2,1,0"),
    Tree.of("5/4,2,2,1,0/3,2,1,0,2,1,1,0,0"),
    Tree.of("4/3,1,1,1/3,1,1,1,1,0/3,1,1,1,1,1,1/2,1,0,1,0,1,0,1,0"),
)


class Acceptance:
    """Counts of past rounds: how often a sibling of each rank was tested at each depth, and how often accepted.

    A depth with few counts adds FAITH counts from the depth above it, the first depth from all depths taken together,
    and these from a prior: HOPE for a first sibling, and LATER of what is left for the next. Old rounds lose
    weight, so a draft that was once unlucky is tried again.

    reached, accepted: {(depth of the parent, rank): count}.
    """

    MEMORY = 0.998  # weight of the past in each round
    FAITH, HOPE, LATER = 4, 0.7, 0.35

    def __init__(self) -> None:
        self.reached: dict[tuple[int, int], float] = defaultdict(float)
        self.accepted: dict[tuple[int, int], float] = defaultdict(float)

    def add(self, tree: Tree, last: Mapping[int, int], depths: Mapping[int, int]) -> None:
        """Learn from a round. last: {text: last accepted node, or 0}. depths: {text: depth of the deepest guess}.

        The siblings below a node are counted if the node lies on the accepted path, or is the root. A requested
        guess that the drafter did not make counts as rejected.
        """
        for counts in (self.reached, self.accepted):
            for key in counts:
                counts[key] *= self.MEMORY
        for text, end in last.items():
            for key, passed in tested(tree, end):
                if key[0] < depths[text]:
                    self.reached[key] += 1
                    self.accepted[key] += passed

    def table(self, depth: int, ranks: int) -> list[list[float]]:
        """`acceptance[d][k]` of `Tree.expected_tokens`, for depths below `depth` and ranks below `ranks`."""
        priors: list[float] = []
        for rank in range(ranks):
            priors.append(self.LATER * (1 - sum(priors)) if rank else self.HOPE)
            priors[rank] = self.share([key for key in self.reached if key[1] == rank], priors, rank)
        rows = [priors]
        for at in range(depth):
            rows.append(list(rows[at]))
            for rank in range(ranks):
                rows[-1][rank] = self.share([(at, rank)], rows[-1], rank)
        return rows[1:]

    def share(self, keys: Sequence[tuple[int, int]], row: Sequence[float], rank: int) -> float:
        """The share of these siblings that were accepted, by the prior `row[rank]`. The shares of all ranks of a row,
        of which those before `rank` are known, sum to 1 at most."""
        reached, accepted = (sum(of.get(key, 0.0) for key in keys) for of in (self.reached, self.accepted))
        return min((accepted + self.FAITH * row[rank]) / (reached + self.FAITH), max(0.0, 1 - sum(row[:rank])))


@functools.lru_cache(maxsize=4096)
def tested(tree: Tree, last: int) -> list[tuple[tuple[int, int], bool]]:
    """What a round tested, from its last accepted node `last`: (depth of the parent, rank) of each sibling, and
    whether it was accepted."""
    path = [0, *tree.path(last)]
    levels = [tree.children[node] for node in path]
    return [((depth, rank), child in path) for depth, level in enumerate(levels) for rank, child in enumerate(level)]


class Search:
    """Search for the best of `shapes` for one number of rows: what a round of each costs, on a machine whose speed
    drifts, and which to try next. near: the search for another number of rows, whose estimates it starts from.

    The seconds of a round are `expected * exp(speed + offset)`. `speed` is the machine's and changes with every round,
    whatever its shape: a slower hour slows down all shapes, not only the one in use. `offset` is the shape's. It
    changes much for a shape that was timed seldom or long ago, and little for one that is timed all the time. For a
    shape that was never timed, it is interpolated between the shapes next to it in `expected`.

    Shapes are used in pairs of rounds. In the opening these are tried: plain decoding, and the shapes at the other
    quarters of the order of cost, unless one seems far worse than the best by then. Later, each shape is tried in turn,
    for at most a share LOSS of the time: one that seems slow may have been timed while the machine was busy.

    chosen, best: the shape of this pair of rounds, and the best so far. rounds: so far.
    """

    FADE = 0.99  # Weight of earlier timings after each round.
    DRIFT = 0.1  # Share of a surprise that is the machine's, if the shape itself is well known.
    MOST = math.log(2)  # A round counts for at most twice what it should take: the machine does other things too.
    PROBE = 24  # At most one pair of rounds in this number tries another shape.
    LOSS = 0.01
    WORTH = 0.3  # A shape that was never timed is not tried if it seems to have less than this share of the best speed,
    AT_FIRST = 0.8  # and in the opening less than this share.

    def __init__(self, shapes: Sequence[Tree], near: Search | None = None) -> None:
        costs = {tree: near.seconds(tree) if near else 1 + 0.25 * tree.depth + 0.02 * tree.size for tree in shapes}
        self.shapes = sorted(costs, key=lambda tree: costs[tree])
        self.expected, self.speed = costs, 0.0
        self.offsets: dict[Tree, float] = {}
        self.timings: dict[Tree, float] = {}  # how often each shape was timed; old timings count less
        self.opening = [near.best] if near else []
        self.opening += [self.shapes[len(shapes) * quarter // 4] for quarter in range(4)]
        self.best: Tree = self.opening[0]
        self.chosen = self.best
        self.rounds, self.tries, self.lost = 0, 0, 0.0

    def seconds(self, tree: Tree) -> float:
        """Of a round of this shape."""
        return self.expected[tree] * math.exp(self.speed + self.offset(tree))

    def offset(self, tree: Tree) -> float:
        if tree in self.offsets or not self.offsets:
            return self.offsets.get(tree, 0.0)
        timed = [shape for shape in self.shapes if shape in self.offsets]
        costs, offsets = ([of[shape] for shape in timed] for of in (self.expected, self.offsets))
        return float(np.interp(self.expected[tree], costs, offsets))

    def learn(self, tree: Tree, seconds: float) -> None:
        """A round of this shape took `seconds`."""
        seconds = max(seconds, 1e-9)
        if not self.offsets:
            self.speed = math.log(seconds / self.expected[tree])
        surprise = min(math.log(seconds / self.seconds(tree)), self.MOST)
        self.timings = {shape: count * self.FADE for shape, count in self.timings.items()}
        share = 1 / (1 + max(self.timings[tree], 1)) if tree in self.timings else 1.0
        self.offsets[tree] = self.offset(tree) + share * surprise
        self.speed += self.DRIFT * (1 - share) * surprise
        self.timings[tree] = self.timings.get(tree, 0.0) + 1

    def next(self, rate: Callable[[Tree], float]) -> Tree:
        """The shape of the next pair of rounds. rate: the tokens per second that a shape should give."""
        while self.opening:
            tree = self.opening.pop(0)
            if not tree.size or not self.timings or rate(tree) > self.AT_FIRST * max(map(rate, self.timings)):
                return tree
        if self.chosen != self.best:
            self.lost += 2 * self.seconds(self.chosen) * max(0.0, 1 - rate(self.chosen) / rate(self.best))
        self.lost = max(0.0, self.lost - self.LOSS * 2 * self.seconds(self.best))
        if self.rounds // 2 % self.PROBE or self.lost:
            return self.best
        self.tries += 1
        other = self.shapes[self.tries % len(self.shapes)]
        return other if other in self.timings or rate(other) > self.WORTH * rate(self.best) else self.best


class CostAware(LengthRule):
    """The number of tokens with the highest expected speed, by measured acceptance and costs; at most gamma. It may be
    0 (plain decoding).

    length: gamma, or the shapes to choose among, plain decoding first (as Sequoia, arXiv 2402.12374, with measured
        costs).

    The cost of guesses depends on the number of rows that are decoded together: the more rows, the less of the target's
    time is spent waiting for memory. So each number of rows, up to the next power of two, has its own `Search`. The
    estimates outlive a text: use one object for all texts. There are few shapes, because a shape that is used often
    runs faster.

    A shape is used for two rounds in a row and only the second is timed: in the first, caches are cold, and the draft
    may have to read tokens that it missed.

    With several rows and chains, each row has its own acceptance, and a row whose guesses fail guesses less: a guess is
    made if its chance of being accepted, over its cost, reaches PRICE times the tokens per second of the batch.
    """

    LENGTHS = (0, 1, 2, 3, 4, 6, 10)
    LOOK = 16  # Rounds between two choices of the best shape; choosing each round would slow small models.
    OF_TEXT = 0.9  # Weight of a text's past in each round.
    FAITH = 4  # Accepted guesses of the average text that a new text begins with.
    PRICE = 0.5  # A guess costs less than its share of the round: the draft makes the step for other rows all the same.
    WHOLE = 0.8  # Rounds with a smaller share of the guesses do not update the cost of the shape.

    def __init__(self, length: int | Sequence[Tree] = 10) -> None:
        if not isinstance(length, Sequence):
            length = [Tree.chain(choice) for choice in (*self.LENGTHS, check_gamma(length)) if choice <= length]
        self.shapes: list[Tree] = list(dict.fromkeys(length))
        self.extent = max(tree.depth for tree in length), 1 + max(max(tree.ranks, default=0) for tree in length)
        self.acceptance = Acceptance()
        self.table = self.acceptance.table(*self.extent)
        self.searches: dict[int, Search] = {}  # {rows: the search}

    def begin(self, rows: Rows) -> None:
        self.rows, self.chosen = rows, False
        self.before: tuple[int, Tree] | None = None  # rows and shape of the round before
        self.of_text: dict[int, tuple[float, float]] = {}  # {text: accepted guesses expected, accepted}

    def shape(self) -> Tree:
        if not self.chosen:
            self.chosen, self.start = True, time.perf_counter() - self.rows.in_callbacks
            self.left = {text: left for text, left in zip(self.rows.numbers, self.rows.left) if left}
            rows = 1 << (len(self.left) - 1).bit_length()
            self.search = self.search_for(rows)
            self.search.rounds += 1
            if self.search.rounds % 2:  # The second round of a pair has the shape of the first.
                self.search.chosen = self.search.next(self.rate)
            self.current = rows, self.search.chosen
        return self.current[1]

    def search_for(self, rows: int) -> Search:
        """The search for this number of rows. A new one starts from the estimates for the nearest number of rows."""
        if rows not in self.searches:
            near = min(self.searches, key=lambda other: max(other, rows) / min(other, rows), default=rows)
            self.searches[rows] = Search(self.shapes, self.searches.get(near))
        return self.searches[rows]

    def gammas(self) -> Sequence[int]:
        tree, seconds = self.shape(), self.search.seconds
        # The last token that a text may add needs no guess.
        self.asked = {text: min(tree.depth, left - 1) for text, left in self.left.items()}
        if tree.depth and tree.is_chain and len(self.left) > 1:  # Each row makes the guesses that are worth their time.
            cost = max(0.0, seconds(tree) - seconds(self.shapes[0])) / tree.depth  # of a guess for each row
            price = self.PRICE * self.rate(tree) * cost  # in tokens
            for text, asked in self.asked.items():
                predicted, accepted = self.of_text.get(text, (0.0, 0.0))
                share = (accepted + self.FAITH) / (predicted + self.FAITH)  # of this text's acceptance in that of all
                chances = itertools.accumulate((min(1.0, share * row[0]) for row in self.table), operator.mul)
                self.asked[text] = sum(1 for chance in itertools.islice(chances, asked) if chance >= price)
        return [self.asked.get(text, 0) for text in self.rows.numbers]

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        seconds = time.perf_counter() - self.rows.in_callbacks - self.start
        (_, tree), self.chosen = self.current, False
        self.acceptance.add(tree, accepted, self.asked)
        for text, count in accepted.items() if tree.is_chain and len(accepted) > 1 else ():
            predicted, passed = self.of_text.get(text, (0.0, 0.0))
            more = sum(row[0] for row in self.table[: min(count + 1, self.asked[text])])
            self.of_text[text] = self.OF_TEXT * predicted + more, self.OF_TEXT * passed + count
        is_whole = sum(self.asked.values()) >= self.WHOLE * tree.depth * len(accepted)
        if self.current == self.before and is_whole:
            self.search.learn(tree, seconds)
        self.before = self.current
        if self.search.rounds < self.LOOK or self.search.rounds % self.LOOK == 0:
            self.table = self.acceptance.table(*self.extent)
            self.search.best = max(self.shapes, key=self.rate)

    def rate(self, tree: Tree) -> float:
        """Expected tokens per second of a row if every row has all guesses of the shape."""
        return tree.expected_tokens(self.table) / self.search.seconds(tree)


RULES: dict[str, Callable[..., LengthRule]] = {
    "fixed": Fixed,
    "additive": Additive,
    "draftConfidence": DraftConfidence,
    "targetConfidence": TargetConfidence,
    "costAware": CostAware,
}
