"""The expected number of accepted guesses, in the contexts visited: the overlap of p and q, the sum of min(p, q), and
in a tree what siblings add to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from decoding.drafter import Guesses
from decoding.lengthRules import Acceptance
from decoding.record import Record
from decoding.rows import EndOfText, Rows
from decoding.treeRules import after_child
from experiments import theory
from experiments.schema import Positions
from methods.samplers import Sampler
from utils import Sampling


class OverlapCounts(NamedTuple):
    """The overlaps in some texts. rounds, accepted: of these texts, and the guesses accepted in them."""

    positions: Positions
    rounds: int
    accepted: int


class OverlapObserver:
    """Observes the rounds of one text. rounds: for each round, and each node on its accepted path from the root to the
    last, the `chances` of the node's children."""

    def __init__(self) -> None:
        self.rounds: list[list[list[float]]] = []

    def __call__(self, rows: Rows, guesses: Guesses, p: Tensor, last: Tensor) -> None:
        chain = range(guesses.drafts.shape[1])
        parents: Sequence[int] = guesses.tree.parents if guesses.tree else chain
        path = [int(last[0])]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        self.rounds.append([])
        for node in path:
            children = [i for i, parent in enumerate(parents) if parent == node]  # in drafts and q
            shares = chances(p[0, node], guesses.q[0, children], guesses.drafts[0, children]) if children else []
            self.rounds[-1].append(shares)

    def positions(self, record: Record) -> Positions:
        """The overlaps at each depth of a round. record: the text's."""
        by_round: list[Positions] = []
        for shares, drafted, accepted in zip(self.rounds, record.drafted[1:], record.accepted[1:]):
            # A row may end before its last accepted guess.
            tested = [shares[depth] if depth < drafted else [] for depth in range(accepted + 1)]
            by_round.append([(1, *(x for share in node or [0.0] for x in (len(node) > 0, share))) for node in tested])
        return total(by_round)


def overlaps_of(
    sampler: Sampler,
    prompts: Sequence[list[int]],
    device: str | torch.device,
    sampling: Sampling,
    max_len: int,
    end_of_text: EndOfText,
    seed: int,
    spread: Callable[..., Iterable[Any]] = map,
) -> OverlapCounts:
    """The overlaps at each depth of a round, over one text after each of `prompts`.

    sampler: one that is not timed: what it learns from these texts must not affect the times. device: the target's.
    spread: applies a function to each item, as the builtin `map`.
    """

    def of_text(number: int) -> OverlapCounts:
        observer, generator = OverlapObserver(), Generator(device).manual_seed(seed + number)
        options: dict[str, Any] = {"max_len": max_len, "sampling": sampling, "end_of_text": end_of_text}
        _, (record,) = sampler([prompts[number]], generator=generator, observer=observer, **options)
        return OverlapCounts(observer.positions(record), len(record.accepted) - 1, sum(record.accepted))

    counts = list(spread(of_text, range(len(prompts))))
    return OverlapCounts(
        total(text.positions for text in counts),
        sum(text.rounds for text in counts),
        sum(text.accepted for text in counts),
    )


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
    """The expectations that follow from `positions`. "overlap": the mean over all guesses that were tested (in a tree,
    over first children), which is the probability that one guess is accepted. "tokens": the tokens a round that should
    follow if guesses are judged one by one. nan where nothing was guessed."""
    tested = sum(position[1] for position in positions)
    if not tested:
        return {"overlap": float("nan"), "tokens": float("nan")}
    rates = [sum(position[2::2]) / position[0] for position in positions]
    return {"overlap": sum(position[2] for position in positions) / tested, "tokens": theory.expected_chain(rates)}
