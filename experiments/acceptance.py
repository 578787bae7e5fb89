"""How many guesses should be accepted, in the contexts visited: the overlap of p and q, the sum of min(p, q), and in a
tree what siblings add to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from decoding.drafter import Guesses, WrappedDrafter
from decoding.model import Model
from decoding.record import Record
from decoding.rows import EndOfText, Rows
from decoding.trees.rules import after_child
from decoding.trees.shapes import Acceptance
from decoding.trees.tree import Tree
from experiments import theory
from experiments.lines import Positions
from methods.samplers import Sampler, Wrap
from methods.treeSampling import TreeDrafter
from utils import Sampling, probabilities, seen_after


class RoundGuesses(NamedTuple):
    """The guesses of a round for one row: drafts `[n]`, and q `[n, V]` that each was drawn from. children: of nodes
    0, ..., n, as `Tree.children`."""

    drafts: Tensor
    q: Tensor
    children: Sequence[Sequence[int]]


class OverlapDrafter(WrappedDrafter):
    """A drafter that keeps all guesses of another one for row 0."""

    def begin(self, rows: Rows) -> None:
        self.rounds: list[RoundGuesses] = []
        super().begin(rows)

    def changed(self, guesses: Guesses, rows: Rows, gamma: int) -> Guesses:
        drafts, q = guesses.drafts[0], guesses.q[0].clone()
        shape = guesses.tree or Tree.chain(len(drafts))
        self.rounds.append(RoundGuesses(drafts, q, shape.children))
        return guesses

    def grow(self, rows: Rows, tree: Tree, *args: Any) -> Guesses:
        """As of a `TreeDrafter`, whose guesses are kept too."""
        return self.changed(cast(TreeDrafter, self.drafter).grow(rows, tree, *args), rows, tree.depth)


class OverlapCounts(NamedTuple):
    """The overlaps in some texts. rounds, accepted: of these texts, and the guesses accepted in them."""

    positions: Positions
    rounds: int
    accepted: int


def overlaps_of(
    make: Callable[[Wrap], Sampler],
    prompts: Sequence[list[int]],
    target: Model,
    sampling: Sampling,
    max_len: int,
    end_of_text: EndOfText,
    seed: int,
    spread: Callable[..., Iterable[Any]] = map,
) -> OverlapCounts:
    """The overlaps at each depth of a round, over one text after each of `prompts`.

    make: makes the sampler, with its drafter wrapped. It is run apart from any that is timed, so that nothing is kept
        or computed while a clock runs. spread: applies a function to each item, as the builtin `map`.
    """

    def of_text(number: int) -> OverlapCounts:
        recorders: list[OverlapDrafter] = []

        def wrap(drafter: Any) -> Any:
            recorders.append(OverlapDrafter(drafter))
            return recorders[0]

        generator = torch.Generator(target.device).manual_seed(seed + number)
        (text,), (record,) = make(wrap)(
            [prompts[number]], max_len=max_len, sampling=sampling, end_of_text=end_of_text, generator=generator
        )
        rounds = recorders[0].rounds if recorders else []
        positions = overlaps_in_text(prompts[number], text, record, rounds, target, sampling)
        return OverlapCounts(positions, len(record.accepted) - 1, sum(record.accepted))

    counts = list(spread(of_text, range(len(prompts))))
    return OverlapCounts(
        total(text.positions for text in counts),
        sum(text.rounds for text in counts),
        sum(text.accepted for text in counts),
    )


@torch.inference_mode()
def overlaps_in_text(
    prompt: Sequence[int],
    text: Sequence[int],
    record: Record,
    rounds: Sequence[RoundGuesses],
    target: Model,
    sampling: Sampling,
) -> Positions:
    """The overlaps in the rounds of one text.

    The contexts in which guesses were tested are beginnings of the text, so one forward over all of it gives each p.
    """
    if not rounds:
        return []
    tokens = torch.tensor([[*prompt, *text]], device=target.device)
    seen = None
    if sampling.repetition_penalty != 1:
        seen = seen_after(torch.zeros(1, target.vocabulary, dtype=torch.bool, device=tokens.device), tokens)
    p = probabilities(target.score(tokens), sampling, seen)[0]
    by_round: list[Positions] = []
    start = len(prompt) + record.committed[0]
    for guesses, committed, drafted, accepted in zip(
        rounds, record.committed[1:], record.drafted[1:], record.accepted[1:]
    ):
        node, positions = 0, []
        for depth, at in enumerate(range(start, start + accepted + 1)):
            # A row may end before its last accepted guess.
            nodes = [child - 1 for child in guesses.children[node]] if depth < drafted and at < tokens.shape[1] else []
            shares = []
            if nodes:
                drafts = guesses.drafts[nodes]
                shares = chances(p[at - 1], guesses.q[nodes].to(p.device), drafts.to(p.device))
            positions.append((1, *(figure for share in shares or [0.0] for figure in (len(nodes) > 0, share))))
            if depth < accepted and nodes:
                node = nodes[drafts.tolist().index(int(tokens[0, at]))] + 1
        by_round.append(positions)
        start += committed
    return total(by_round)


def chances(p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """The probability that each of k siblings is the one accepted, if they are judged one by one (`top_down_rule`).

    p `[V]`: the target's distribution. q `[k, V]`: the law of each sibling. drafts `[k]`: their tokens. The share of
    the first is the overlap of p and q. That of a later one is given the tokens before it, and whether these are
    rejected: its mean over rounds is the probability.
    """
    mass, w = p[None, None], torch.ones_like(p[None, :1])
    rejected, shares = torch.ones_like(w), []
    for law, x in zip(q, drafts):
        shares.append(rejected * theory.overlap(mass, law))
        ratio, mass, w = after_child(mass, w, law[None, None], x[None, None])
        rejected = rejected * (1 - ratio)
    return torch.cat(shares, 1)[0].tolist()


def total(parts: Iterable[Positions]) -> Positions:
    """The sums over texts or rounds, of the depths with a guess."""
    parts = list(parts)
    width = max((i + 1 for part in parts for i, (_, tested, *_) in enumerate(part) if tested), default=0)
    columns = [[part[i] for part in parts if i < len(part)] for i in range(width)]
    return [tuple(map(sum, itertools.zip_longest(*column, fillvalue=0))) for column in columns]


def acceptance_of(positions: Positions) -> Acceptance:
    """The acceptance of siblings of each rank at each depth."""
    acceptance = Acceptance()
    for depth, (_, *pairs) in enumerate(positions):
        for rank, (tested, share) in enumerate(zip(pairs[::2], pairs[1::2])):
            acceptance.reached[depth, rank], acceptance.accepted[depth, rank] = tested, share
    return acceptance


def expected(positions: Positions) -> dict[str, float]:
    """What positions say. "overlap": the mean over all guesses that were tested (in a tree, over first children), which
    is the probability that one guess is accepted. "tokens": the tokens a round that should follow if guesses are judged
    one by one. nan where nothing was guessed."""
    tested = sum(position[1] for position in positions)
    if not tested:
        return {"overlap": float("nan"), "tokens": float("nan")}
    rates = [sum(position[2::2]) / position[0] for position in positions]
    return {"overlap": sum(position[2] for position in positions) / tested, "tokens": theory.expected_chain(rates)}
