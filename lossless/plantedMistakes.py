"""Samplers with a planted mistake: a proof of losslessness is worth as much as the mistakes it catches.

Real samplers have been written with each of them. Each is the project's own loop with one part replaced: the
target, the drafter, the verification rule, or the sampling that the target is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from decoding.guesses import Guesses
from decoding.interfaces import Callback, Drafter, LengthRule, VerificationRule
from decoding.record import Record
from decoding.rows import Rows, upload
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from methods.makers import Sampler
from specSampling import specSampling
from utils import Sampling, pick, residual

T = TypeVar("T")

HEAT = 1.2  # The wrong temperature over the right one: 0.85 becomes 1.02.


# Verification rules. Arguments and results are those of decoding/verification.py.


def after(p: Tensor, accepted: Tensor) -> Tensor:
    """The distribution of the token after the accepted guesses: `p[B, n + 1, V]`, `accepted[B]` -> `[B, V]`."""
    return p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]


def always_accept(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts all guesses. Where a row has none, q is 0."""
    accepted = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))
    return accepted, pick(after(p, accepted), u[:, -1])


def replace_from_p(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draws the token after a rejection from p, not from the residual."""
    accepted, _ = token_rule(p, q, drafts, u)
    return accepted, pick(after(p, accepted), u[:, -1])


def p_shifted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Compares q of each guess with p of the place before it."""
    return token_rule(p.roll(1, 1), q, drafts, u)


def bonus_from_q(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Takes the last guess unverified, as the token after the others, if all others are accepted."""
    if not drafts.shape[1]:
        return token_rule(p, q, drafts, u)
    last = q[:, -1:].sum((1, 2)) > 0  # the rows that have a last guess
    q = torch.cat([q[:, :-1], torch.zeros_like(q[:, -1:])], 1)
    accepted, token = token_rule(p, q, drafts, u)
    return accepted, torch.where(last & (accepted == q.shape[1] - 1), drafts[:, -1], token)


def wrong_temperature(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts guesses by p at a higher temperature. The token after a rejection is drawn from the right residual."""
    hotter = p ** (1 / HEAT)
    accepted, _ = token_rule(hotter / hotter.sum(-1, keepdim=True), q, drafts, u)
    return accepted, pick(residual(after(p, accepted), after(F.pad(q, (0, 0, 0, 1)), accepted)), u[:, -1])


# Targets.


class Wrong(CachedModel):
    """A target with a mistake in how it runs: the weights of `model`, and a cache of its own."""

    def __init__(self, model: CachedModel) -> None:
        super().__init__(model.model, model.vocabulary, model.name)


class StaleSlot(Wrong):
    """A target whose cache keeps a rejected guess: the token that replaces it does not overwrite its slot."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor | None = None,
        mask: Tensor | None = None,
        keep: Sequence[int] | None = None,
    ) -> Tensor:
        """As `CachedModel.forward`, but the first token's slot keeps its old content if it was written before."""
        if keep is not None:  # prefill
            self.highest = upload([[last] for last in keep], self.device)
            return super().forward(tokens, positions, slots, mask, keep)
        assert self.cache is not None
        first = positions[:, :1]
        stale = (first <= self.highest)[:, None, :, None]
        places = first[:, None, :, None]
        states = [states for layer in self.cache.layers for states in (layer.keys, layer.values)]
        before = [take(each, places) for each in states]
        logits = super().forward(tokens, positions, slots, mask)
        for each, old in zip(states, before):
            kept = torch.where(stale, old, take(each, places))
            each.scatter_(2, places.expand_as(kept), kept)
        self.highest = torch.maximum(self.highest, positions[:, -1:])
        return logits


def take(states: Tensor, places: Tensor) -> Tensor:
    """`states[B, heads, capacity, d]` at the slots `places[B, 1, 1, 1]`: `[B, heads, 1, d]`."""
    return states.gather(2, places.expand(-1, states.shape[1], -1, states.shape[3]))


# Drafters.


class Wrapped:
    """A drafter that passes everything on to another one, but for its guesses.

    sampling: the sampling whose distribution is wanted. threshold: --draftThreshold.
    """

    def __init__(self, drafter: Drafter, sampling: Sampling, threshold: float) -> None:
        self.drafter, self.sampling, self.threshold = drafter, sampling, threshold
        self.models = drafter.models

    def begin(self, rows: Rows) -> None:
        """See `Drafter`."""
        self.drafter.begin(rows)

    def rewind(self, count: int) -> None:
        """See `Drafter`."""
        self.drafter.rewind(count)


class Filtered(Wrapped):
    """Guesses with the wanted sampling, which has top-p, while the target is told another one."""

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """See `Drafter`."""
        guesses = self.drafter.draft(rows, gamma, self.sampling, generator, length)
        return replace(guesses, p=None)  # The target scores with its own sampling.


class Dropping(Wrapped):
    """Takes back a guess whose q is below `threshold`, and all guesses after it."""

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """See `Drafter`."""
        guesses = self.drafter.draft(rows, gamma, sampling, generator, length)
        sure = guesses.of_drafts()[..., None] >= self.threshold
        return replace(guesses, q=guesses.q * sure.cumprod(1))


def unchanged(part: T, *_: object) -> T:
    """The part as it is."""
    return part


@dataclass(frozen=True)
class Mistake:
    """One mistake. Every part that is not named here is the right one.

    what: the mistake in words. verify: the verification rule. target: f(model). drafter: f(drafter, sampling,
        threshold).
    told: f(sampling), the sampling that the loop is given instead. tested: f(sampling of the flags), the sampling whose
        distribution is wanted.
    """

    what: str
    verify: VerificationRule = token_rule
    target: Callable[[CachedModel], CachedModel] = unchanged
    drafter: Callable[[Drafter, Sampling, float], Drafter] = unchanged
    told: Callable[[Sampling], Sampling] = unchanged
    tested: Callable[[Sampling], Sampling] = unchanged

    def sampler(
        self, target: CachedModel, drafter: Drafter, gamma: int, sampling: Sampling, threshold: float
    ) -> Sampler:
        """The speculative sampler with this mistake in it."""
        wrong_target, wrong_drafter = self.target(target), self.drafter(drafter, sampling, threshold)

        def sample(
            prefixes: Sequence[Sequence[int]],
            max_len: int,
            sampling: Sampling,
            end_of_text: int | None = None,
            generator: Generator | None = None,
            callback: Callback | None = None,
        ) -> tuple[list[list[int]], list[Record]]:
            told, verify = self.told(sampling), self.verify
            return specSampling(
                prefixes, wrong_target, wrong_drafter, max_len, gamma, told, end_of_text, generator, callback, verify
            )

        return sample


MISTAKES = {
    "always accept": Mistake("every guess is accepted", always_accept),
    "replace from p": Mistake("a rejected guess is replaced from p, not from the residual", replace_from_p),
    "shifted by one": Mistake("p of the place before is compared with q", p_shifted),
    "bonus from q": Mistake("the token after the last guess is the draft's", bonus_from_q),
    "one-sided top-p": Mistake(
        "top-p for the draft, none for the target",
        drafter=Filtered,
        told=lambda sampling: replace(sampling, top_p=1.0),
        tested=lambda sampling: sampling if sampling.top_p < 1 else replace(sampling, top_p=0.9),
    ),
    "wrong temperature": Mistake(f"guesses are accepted at {HEAT} times the temperature", wrong_temperature),
    "stale slot": Mistake("the cache keeps a rejected guess for its replacement", target=StaleSlot),
    "dropped guess": Mistake("a guess below --draftThreshold is dropped, not verified", drafter=Dropping),
}
