"""How many guesses should be accepted: the overlap of p and q, the sum of min(p, q), in the contexts visited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.guesses import Guesses
from decoding.interfaces import Drafter, Model
from decoding.record import Record
from experiments import theory
from methods.makers import Sampler, Wrap
from utils import Sampling, probabilities, seen_after

# Of each position of a round: rounds that reached it, that is, whose guesses before it were all accepted; of these,
# rounds with a guess there; the sum of their overlaps.
Positions = list[tuple[int, int, float]]


class Watched:
    """A drafter that remembers the q of all guesses for row 0."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.models, self.rewind = drafter, drafter.models, drafter.rewind

    def begin(self, *args: Any) -> None:
        """As of the watched drafter."""
        self.q: list[Tensor] = []
        self.drafter.begin(*args)

    def draft(self, *args: Any, **options: Any) -> Guesses:
        """As of the watched drafter."""
        guesses = self.drafter.draft(*args, **options)
        self.q.append(guesses.q[0])
        return guesses


def overlap_by_position(
    make: Callable[[Wrap], Sampler],
    prompts: Sequence[list[int]],
    target: Model,
    sampling: Sampling,
    max_len: int,
    end_of_text: int | None,
    seed: int,
    spread: Callable[..., Iterable[Any]] = map,
) -> Positions:
    """The overlaps at each position of a round, over one text after each of `prompts`.

    make: makes the sampler, with its drafter wrapped. It is run apart from any that is timed, so that nothing is kept
        or computed while a clock runs. spread: applies a function to each item, as the builtin `map`.
    """

    def of_text(number: int) -> Positions:
        watched: list[Watched] = []

        def watch(drafter: Drafter) -> Drafter:
            watched.append(Watched(drafter))
            return watched[0]

        generator = torch.Generator(target.device).manual_seed(seed + number)
        (text,), (record,) = make(watch)([prompts[number]], max_len, sampling, end_of_text, generator)
        return visited(prompts[number], text, record, watched[0].q, target, sampling) if watched else []

    return total(spread(of_text, range(len(prompts))))


@torch.inference_mode()
def visited(
    prompt: Sequence[int], text: Sequence[int], record: Record, q: Sequence[Tensor], target: Model, sampling: Sampling
) -> Positions:
    """The overlaps in the rounds of one text. q `[n, V]`: of the guesses of each round.

    The contexts in which a guess was tested are beginnings of the text, so one forward over all of it gives each p.
    """
    whole = torch.tensor([[*prompt, *text]], device=target.device)
    seen = None
    if sampling.repetition_penalty != 1:
        seen = seen_after(torch.zeros(1, target.vocabulary, dtype=torch.bool, device=whole.device), whole)
    p = probabilities(target.score(whole), sampling, seen)[0]
    found: list[Positions] = []
    start = len(prompt) + record.committed[0]
    for its_q, committed, drafted, accepted in zip(
        q, *(part[1:] for part in (record.committed, record.drafted, record.accepted))
    ):
        # A row may end before its last accepted guess.
        tested = min(accepted + 1, drafted, whole.shape[1] - start)
        overlaps = theory.overlap(p[start - 1 : start - 1 + tested], its_q[:tested].to(p.device)).tolist()
        found.append([(1, 1, overlap) for overlap in overlaps] + [(1, 0, 0.0)] * (accepted + 1 - tested))
        start += committed
    return total(found)


def total(parts: Iterable[Positions]) -> Positions:
    """The sums over texts or rounds, of the positions with a guess."""
    parts = list(parts)
    width = max((i + 1 for part in parts for i, (_, tested, _) in enumerate(part) if tested), default=0)
    columns = [[part[i] for part in parts if i < len(part)] for i in range(width)]
    return [tuple(map(sum, zip(*column))) for column in columns]  # type: ignore[misc]


def expected(positions: Sequence[Sequence[float]]) -> dict[str, float]:
    """What `overlap_by_position` says. "overlap": the mean over all guesses that were tested, which is the probability
    that one guess is accepted. "tokens": the tokens a round that should follow. nan where nothing was guessed."""
    tested = sum(position[1] for position in positions)
    if not tested:
        return {"overlap": float("nan"), "tokens": float("nan")}
    rates = [overlaps / reached for reached, _, overlaps in positions]
    return {"overlap": sum(position[2] for position in positions) / tested, "tokens": theory.expected_chain(rates)}
