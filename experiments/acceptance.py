"""How many guesses should be accepted, in the contexts visited: the overlap of p and q, the sum of min(p, q), and in a
tree what siblings add to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.guesses import Guesses
from decoding.interfaces import Model
from decoding.record import Record
from decoding.treeRounds import TreeGuesses
from decoding.treeShapes import Acceptance
from decoding.treeVerification import after_child
from experiments import theory
from methods.makers import Sampler, Wrap
from utils import Sampling, probabilities, seen_after

# The counts of one depth of a round, (reached, tested, overlap, tested, chance, ...), summed over rounds:
#   reached: rounds in which all guesses before this depth were accepted;
#   tested, overlap: of these, the rounds with a guess here, and the sum of their overlaps;
#   tested, chance: in a tree, the same for second children, and so on: the rounds that had one, and the sum of the
#     probabilities that it is the child accepted.
# (10, 10, 7.0, 6, 0.9): ten rounds came this far, and each had a guess here. The overlap was 0.7 on average. Six had a
# second child too, which was accepted with a probability of 0.15 on average.
Position = tuple[float, ...]
Positions = list[Position]


class Drawn(NamedTuple):
    """The guesses of a round for one row: drafts `[n]`, and q `[n, V]` that each was drawn from. children: of nodes
    0, ..., n, as `Tree.children`."""

    drafts: Tensor
    q: Tensor
    children: Sequence[Sequence[int]]


class Watched:
    """A drafter that remembers all guesses for row 0."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.models, self.rewind = drafter, drafter.models, drafter.rewind

    def begin(self, *args: Any) -> None:
        """As of the watched drafter."""
        self.rounds: list[Drawn] = []
        self.drafter.begin(*args)

    def draft(self, *args: Any, **options: Any) -> Guesses:
        """As of the watched drafter."""
        guesses = self.drafter.draft(*args, **options)
        drafts, q = guesses.drafts[0], guesses.q[0]
        self.rounds.append(Drawn(drafts, q, [*((node,) for node in range(1, len(drafts) + 1)), ()]))
        return guesses

    def grow(self, *args: Any, **options: Any) -> TreeGuesses:
        """As of a watched `TreeDrafter`."""
        guesses = self.drafter.grow(*args, **options)
        self.rounds.append(Drawn(guesses.drafts[0], guesses.q[0], guesses.tree.children))
        return guesses


class Overlaps(NamedTuple):
    """What texts show that were watched. rounds, accepted: of these texts, guesses accepted in them."""

    positions: Positions
    rounds: int
    accepted: int


def overlaps_of(
    make: Callable[[Wrap], Sampler],
    prompts: Sequence[list[int]],
    target: Model,
    sampling: Sampling,
    max_len: int,
    end_of_text: int | None,
    seed: int,
    spread: Callable[..., Iterable[Any]] = map,
) -> Overlaps:
    """The overlaps at each depth of a round, over one text after each of `prompts`.

    make: makes the sampler, with its drafter wrapped. It is run apart from any that is timed, so that nothing is kept
        or computed while a clock runs. spread: applies a function to each item, as the builtin `map`.
    """

    def of_text(number: int) -> Overlaps:
        watched: list[Watched] = []

        def watch(drafter: Any) -> Any:
            watched.append(Watched(drafter))
            return watched[0]

        generator = torch.Generator(target.device).manual_seed(seed + number)
        (text,), (record,) = make(watch)([prompts[number]], max_len, sampling, end_of_text, generator)
        positions = visited(prompts[number], text, record, watched[0].rounds, target, sampling) if watched else []
        return Overlaps(positions, len(record.accepted) - 1, sum(record.accepted))

    found = list(spread(of_text, range(len(prompts))))
    return Overlaps(
        total(each.positions for each in found),
        sum(each.rounds for each in found),
        sum(each.accepted for each in found),
    )


@torch.inference_mode()
def visited(
    prompt: Sequence[int],
    text: Sequence[int],
    record: Record,
    rounds: Sequence[Drawn],
    target: Model,
    sampling: Sampling,
) -> Positions:
    """The overlaps in the rounds of one text.

    The contexts in which guesses were tested are beginnings of the text, so one forward over all of it gives each p.
    """
    whole = torch.tensor([[*prompt, *text]], device=target.device)
    seen = None
    if sampling.repetition_penalty != 1:
        seen = seen_after(torch.zeros(1, target.vocabulary, dtype=torch.bool, device=whole.device), whole)
    p = probabilities(target.score(whole), sampling, seen)[0]
    found: list[Positions] = []
    start = len(prompt) + record.committed[0]
    for drawn, committed, drafted, accepted in zip(
        rounds, *(part[1:] for part in (record.committed, record.drafted, record.accepted))
    ):
        node, positions = 0, []
        for depth, at in enumerate(range(start, start + accepted + 1)):
            # A row may end before its last accepted guess.
            nodes = [child - 1 for child in drawn.children[node]] if depth < drafted and at < whole.shape[1] else []
            shares = []
            if nodes:
                drafts = drawn.drafts[nodes]
                shares = chances(p[at - 1], drawn.q[nodes].to(p.device), drafts.to(p.device))
            positions.append((1, *(figure for share in shares or [0.0] for figure in (len(nodes) > 0, share))))
            if depth < accepted and nodes and at < whole.shape[1]:
                node = nodes[drafts.tolist().index(int(whole[0, at]))] + 1
        found.append(positions)
        start += committed
    return total(found)


def chances(p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """The probability that each of k siblings is the one accepted, if they are judged one by one (`top_down_rule`).

    p `[V]`: the target's distribution. q `[k, V]`: the law of each sibling. drafts `[k]`: their tokens. The share of
    the first is the overlap of p and q. That of a later one is given the tokens before it, and whether these are
    rejected: its mean over rounds is the probability.
    """
    mass, w = p[None, None], torch.ones_like(p[None, :1])
    rejected, found = torch.ones_like(w), []
    for law, x in zip(q, drafts):
        found.append(rejected * theory.overlap(mass, law))
        ratio, mass, w = after_child(mass, w, law[None, None], x[None, None])
        rejected = rejected * (1 - ratio)
    return torch.cat(found, 1)[0].tolist()


def total(parts: Iterable[Positions]) -> Positions:
    """The sums over texts or rounds, of the depths with a guess."""
    parts = list(parts)
    width = max((i + 1 for part in parts for i, (_, tested, *_) in enumerate(part) if tested), default=0)
    columns = [[part[i] for part in parts if i < len(part)] for i in range(width)]
    return [tuple(map(sum, itertools.zip_longest(*column, fillvalue=0))) for column in columns]


def acceptance_of(positions: Sequence[Sequence[float]]) -> Acceptance:
    """The acceptance of siblings of each rank at each depth."""
    found = Acceptance()
    for depth, (_, *pairs) in enumerate(positions):
        for rank, (tested, share) in enumerate(zip(pairs[::2], pairs[1::2])):
            found.reached[depth, rank], found.accepted[depth, rank] = tested, share
    return found


def expected(positions: Sequence[Sequence[float]]) -> dict[str, float]:
    """What positions say. "overlap": the mean over all guesses that were tested (in a tree, over first children), which
    is the probability that one guess is accepted. "tokens": the tokens a round that should follow if guesses are judged
    one by one. nan where nothing was guessed."""
    tested = sum(position[1] for position in positions)
    if not tested:
        return {"overlap": float("nan"), "tokens": float("nan")}
    rates = [sum(position[2::2]) / position[0] for position in positions]
    return {"overlap": sum(position[2] for position in positions) / tested, "tokens": theory.expected_chain(rates)}
