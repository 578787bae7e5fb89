"""Mistakes that speculative samplers have really been written with, planted on purpose: a proof is worth what it
catches.

Each is the project's own loop with one thing replaced from outside: what the target is, what guesses, how guesses are
verified, or what the target is told of the sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from specSampling import specSampling
from utils import pick, residual

HEAT = 1.2  # of the wrong temperature, times the right one: 0.85 becomes 1.02


def after(p, accepted):
    """p `[B, V]` before the token that follows the accepted guesses."""
    return p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]


def always_accept(p, q, drafts, u):
    """Every guess stands that is a row's own: beyond them q is 0."""
    accepted = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))
    return accepted, pick(after(p, accepted), u[:, -1])


def replace_from_p(p, q, drafts, u):
    accepted, _ = token_rule(p, q, drafts, u)
    return accepted, pick(after(p, accepted), u[:, -1])


def p_shifted(p, q, drafts, u):
    """Each guess is judged by the distribution of the place before it."""
    return token_rule(p.roll(1, 1), q, drafts, u)


def bonus_from_q(p, q, drafts, u):
    """The last guess is not judged: it is the token that follows when all before it stand."""
    if not drafts.shape[1]:
        return token_rule(p, q, drafts, u)
    last = q[:, -1:].sum((1, 2)) > 0  # of the rows that have one
    q = torch.cat([q[:, :-1], torch.zeros_like(q[:, -1:])], 1)
    accepted, token = token_rule(p, q, drafts, u)
    return accepted, torch.where(last & (accepted == q.shape[1] - 1), drafts[:, -1], token)


def wrong_temperature(p, q, drafts, u):
    """Guesses are accepted by a hotter p; the replacement is right."""
    hotter = p ** (1 / HEAT)
    accepted, _ = token_rule(hotter / hotter.sum(-1, keepdim=True), q, drafts, u)
    return accepted, pick(residual(after(p, accepted), after(F.pad(q, (0, 0, 0, 1)), accepted)), u[:, -1])


class StaleSlot(CachedModel):
    """The slot of a rejected guess is not overwritten by the token that replaced it."""

    def __init__(self, model):
        super().__init__(model.model, model.vocabulary, model.name)  # the same weights, a cache of its own

    def forward(self, tokens, positions, slots=None, mask=None, keep=None):
        if keep is not None:  # a prompt
            self.highest = keep[:, None]
            return super().forward(tokens, positions, slots, mask, keep)
        first = positions[:, :1]
        stale = (first <= self.highest)[:, None, :, None]
        places = first[:, None, :, None]
        states = [states for layer in self._cache.layers for states in (layer.keys, layer.values)]
        before = [take(each, places) for each in states]
        logits = super().forward(tokens, positions, slots, mask)
        for each, old in zip(states, before):
            kept = torch.where(stale, old, take(each, places))
            each.scatter_(2, places.expand_as(kept), kept)
        self.highest = torch.maximum(self.highest, positions[:, -1:])
        return logits


def take(states, places):
    """`states[B, heads, capacity, d]` at the slots `places[B, 1, 1, 1]`."""
    return states.gather(2, places.expand(-1, states.shape[1], -1, states.shape[3]))


class Around:
    """A drafter around another, for the sampling that is tested."""

    def __init__(self, drafter, sampling, threshold):
        self.drafter, self.sampling, self.threshold = drafter, sampling, threshold
        self.models, self.begin, self.rewind = drafter.models, drafter.begin, drafter.rewind


class Filtered(Around):
    """Guesses with top-p, whatever the target is told."""

    def draft(self, rows, gamma, sampling, generator=None, stop=None):
        return self.drafter.draft(rows, gamma, self.sampling, generator, stop)


class Dropping(Around):
    """Takes back a guess that the draft gave less than `threshold`, and all after it."""

    def draft(self, rows, gamma, sampling, generator=None, stop=None):
        drafts, q = self.drafter.draft(rows, gamma, sampling, generator, stop)
        sure = q.gather(-1, drafts[..., None]) >= self.threshold
        return drafts, q * sure.cumprod(1)


def as_it_is(thing, *rest):
    return thing


@dataclass(frozen=True)
class Mistake:
    """verify: the rule of acceptance; target: f(model); drafter: f(drafter, sampling, threshold); tested: the sampling
    whose distribution is wanted, from the one of the flags; told: the sampling that the loop is given instead."""

    what: str
    verify: Callable = token_rule
    target: Callable = as_it_is
    drafter: Callable = as_it_is
    told: Callable = as_it_is
    tested: Callable = as_it_is

    def sampler(self, target, drafter, gamma, sampling, threshold):
        """f(prefixes, max_len, sampling, end_of_text, generator) -> (tokens, records), with this mistake in it."""
        target, drafter = self.target(target), self.drafter(drafter, sampling, threshold)
        return lambda prefixes, max_len, sampling, end_of_text, generator: specSampling(
            prefixes, target, drafter, max_len, gamma, self.told(sampling), end_of_text, generator, None, self.verify
        )


MISTAKES = {
    "always accept": Mistake("every guess stands", always_accept),
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
    "dropped guess": Mistake("a guess below --draftThreshold is dropped, not judged", drafter=Dropping),
}
