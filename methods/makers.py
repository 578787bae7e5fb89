"""How methods are made of models and settings, and which graphs are worth making for them: what the entries of
catalogue.py refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from decoding.draftLength import Fixed
from decoding.interfaces import Callback, Drafter, LengthRule, Model, VerificationRule
from decoding.lengthRules import RULES as LENGTH_RULES
from decoding.lengthRules import CostAware
from decoding.record import Record
from decoding.verification import RULES as VERIFICATIONS
from engine.graphs import Plan
from methods.cascade import CascadeDrafter
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.otherTokenizer import OtherTokenizerDrafter, Vocabularies
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling


@dataclass(frozen=True)
class Decoding:
    """How to guess and to verify, as the flags of `test.py` say; gamma None is the default of the draft-length rule,
    ngram None that of the drafter.

    tree: the shape of a tree of guesses (`Tree.of`), or "auto"; None: a chain, but in the methods for trees.
    lookup: the text so far guesses, instead of a draft model. lookup_first: it guesses where it has a match.
    draft_temperature, draft_top_p: as in `ModelDrafter`.
    translation: from the target's tokenizer to the draft's, if that is another one.
    """

    gamma: int | None = None
    draft_length: str = "fixed"
    draft_threshold: float = 0.4
    target_threshold: float = 0.5
    verification: str = "token"
    tree: str | None = None
    tree_rule: str = "traversal"
    gamma1: int = 4
    gamma2: int = 4
    ngram: int | None = None
    lookup: bool = False
    lookup_first: bool = False
    draft_temperature: float | None = None
    draft_top_p: float | None = None
    translation: Vocabularies | None = None
    plausibility: float = 0.1
    amateur_temperature: float = 1.0
    contrastive_temperature: float = 0.0


LOOKED_UP = 10  # The default gamma where the text so far guesses: its guesses cost nothing.
LEAST = 4  # The default n-gram where a draft model guesses elsewhere: it is better than shorter matches.


class Sampler(Protocol):
    """A method with its models: continues prefixes (lists of token ids); returns the new tokens and the records."""

    def __call__(
        self,
        prefixes: Sequence[Sequence[int]],
        max_len: int,
        sampling: Sampling,
        end_of_text: int | None = None,
        generator: torch.Generator | None = None,
        callback: Callback | None = None,
    ) -> tuple[list[list[int]], list[Record]]: ...


Models = dict[str, Model]  # {role: model}; roles: target, draft, mid, restricted
Wrap = Callable[[Any], Any]  # a drafter of any kind -> the same, watched
Plans = dict[str, Plan]  # {role: the graphs worth making}


# Plain decoding.


def alone(role: str) -> Callable[[Models, Decoding, Wrap], Sampler]:
    """One model without any other. A draft with a tokenizer of its own continues the prompts in its own tokens, and no
    id ends them."""

    def make(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
        translation = decoding.translation if role == "draft" else None
        if translation is not None:
            return lambda prefixes, max_len, sampling, end_of_text=None, generator=None, callback=None: regrSampling(
                [translation.row(prefix) for prefix in prefixes], models[role], max_len, sampling, None, generator
            )
        return lambda prefixes, max_len, sampling, end_of_text=None, generator=None, callback=None: regrSampling(
            prefixes, models[role], max_len, sampling, end_of_text, generator, callback
        )

    return make


def one_token(role: str) -> Callable[[Decoding], Plans]:
    """The graphs of `alone`."""
    return lambda decoding: {role: Plan(draws=frozenset({1}))}


# Speculative sampling.


def length_rule(name: str, decoding: Decoding, looks_up: bool = False) -> LengthRule:
    """The draft-length rule of that name, as the flags set it. looks_up: no draft model guesses."""
    gamma = decoding.gamma or (LOOKED_UP if looks_up and name == "fixed" else None)
    options: dict[str, float] = {} if gamma is None else {"length": gamma}
    if name == "draftConfidence":
        options["threshold"] = decoding.draft_threshold
    elif name == "targetConfidence":
        options["threshold"] = decoding.target_threshold
    return LENGTH_RULES[name](**options)


def guesser(models: Models, decoding: Decoding) -> Drafter:
    """What the flags say: the draft model, the text so far, or both."""
    if "draft" not in models:
        return lookup(models, decoding)
    return lookup_first(models, decoding) if decoding.lookup_first else draft_model(models, decoding)


def draft_model(models: Models, decoding: Decoding) -> ModelDrafter | OtherTokenizerDrafter:
    """The draft model, restricted if `--draftVocab` says so."""
    model = models["restricted"] if "restricted" in models else models["draft"]
    own = decoding.draft_temperature, decoding.draft_top_p
    if decoding.translation is not None:
        return OtherTokenizerDrafter(model, decoding.translation, *own)
    return ModelDrafter(model, *own)


def lookup(models: Models, decoding: Decoding) -> LookupDrafter:
    """The text so far."""
    return LookupDrafter(models["target"].vocabulary, decoding.ngram or 1)


def lookup_first(models: Models, decoding: Decoding) -> Drafter:
    """The text so far where it has a match, else the draft model."""
    looked_up = LookupDrafter(models["target"].vocabulary, decoding.ngram or LEAST)
    return LookupFirst(looked_up, draft_model(models, decoding))


def loop(target: Model, drafter: Drafter, length: LengthRule, verify: VerificationRule) -> Sampler:
    """Speculative sampling with these parts."""
    return lambda prefixes, max_len, sampling, end_of_text=None, generator=None, callback=None: specSampling(
        prefixes, target, drafter, max_len, length, sampling, end_of_text, generator, callback, verify
    )


def speculative(
    rule: str | None = None, verification: str | None = None, drafter: Callable[[Models, Decoding], Drafter] = guesser
) -> Callable[[Models, Decoding, Wrap], Sampler]:
    """Speculative sampling with this draft-length rule and verification rule; None: those of the flags."""

    def make(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
        length = length_rule(rule or decoding.draft_length, decoding, decoding.lookup or drafter is lookup)
        verify = VERIFICATIONS[verification or decoding.verification]
        return loop(models["target"], wrap(drafter(models, decoding)), length, verify)

    return make


def step_by_step(plan: Plan) -> Plan:
    """The graphs of forwards for a model that draws with the host's help after each token: no draw is one graph."""
    reads = {plan.read} if plan.draws or plan.trees else frozenset()
    return replace(plan, widths=plan.widths | {1} | reads, trees=frozenset())


# For guesses of varying number: widths and draws of their own for the lengths of `CostAware`.
VARIED = {
    "target": Plan(frozenset(length + 1 for length in CostAware.LENGTHS if length)),
    "draft": Plan(draws=frozenset({1, 2, 3, 4, 6}), read=2),
}


def rounds_of(rule: str | None = None) -> Callable[[Decoding], Plans]:
    """The graphs of `speculative` with this draft-length rule: of one size, or of a few sizes if the length varies."""

    def graphs(decoding: Decoding) -> Plans:
        name, gamma = rule or decoding.draft_length, decoding.gamma or (LOOKED_UP if decoding.lookup else 4)
        plans = {"target": Plan(frozenset({gamma + 1})), "draft": Plan(draws=frozenset({gamma}), read=2)}
        if name != "fixed" or decoding.lookup:
            plans = {"target": plans["target"] | VARIED["target"], "draft": VARIED["draft"]}
        if decoding.lookup_first:  # What the draft missed in a round without it is a block.
            plans["draft"] |= Plan(plans["target"].widths)
        return plans

    return graphs


def rounds_of_lookup(decoding: Decoding) -> Plans:
    """The graphs where the text so far guesses, by the method or by `--draft lookup`."""
    return {"target": rounds_of("fixed")(replace(decoding, lookup=True))["target"]}


def rounds_of_both(decoding: Decoding) -> Plans:
    """The graphs where the text so far guesses first."""
    return rounds_of("fixed")(replace(decoding, lookup_first=True))


def whole_rounds(rule: str | None = None) -> Callable[[Decoding], frozenset[int]]:
    """Guesses of the rounds that are one graph each: where the draft-length rule guesses few numbers, chosen before the
    round."""

    def counts(decoding: Decoding) -> frozenset[int]:
        name = rule or decoding.draft_length
        if decoding.lookup or decoding.translation is not None:
            return frozenset()
        if name == "costAware":
            return frozenset(CostAware.lengths_up_to(decoding.gamma or 10)) - {0}
        return frozenset({decoding.gamma or 4}) if name in ("fixed", "targetConfidence") else frozenset()

    return counts


def follows_no_clock(decoding: Decoding) -> bool:
    """What follows the clock, the costAware rule or --tree auto, guesses otherwise in each run, and draws other
    tokens."""
    return decoding.draft_length != "costAware" and decoding.tree != "auto"


# Cascades.


def cascade(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
    """In each round the draft guesses gamma1 tokens for the mid model, and both together gamma2 for the target."""
    verify = VERIFICATIONS[decoding.verification]
    drafter = CascadeDrafter(models["mid"], guesser(models, decoding), Fixed(decoding.gamma1), verify)
    return loop(models["target"], wrap(drafter), Fixed(decoding.gamma2), verify)


def cascade_graphs(decoding: Decoding) -> Plans:
    """The graphs of `cascade`. The mid model reads one token more than it scores."""
    return {
        "target": Plan(frozenset({decoding.gamma2 + 1})),
        "mid": Plan(frozenset({decoding.gamma1 + 2})),
        "draft": Plan(draws=frozenset({decoding.gamma1}), read=2),
    }


# Contrastive decoding.


def contrastive(is_speculative: bool) -> Callable[[Models, Decoding, Wrap], Sampler]:
    """Contrastive decoding. It has its own temperature, 0 in the paper, and ignores the other sampling flags."""

    def make(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
        contrast = Contrast(models["target"], models["draft"], decoding.plausibility, decoding.amateur_temperature)
        own = Sampling(decoding.contrastive_temperature, 0, 1.0)
        if is_speculative:
            length, verify = length_rule(decoding.draft_length, decoding), VERIFICATIONS[decoding.verification]
            sampler = loop(contrast, wrap(guesser(models, decoding)), length, verify)
        else:
            sampler = alone("contrast")({"contrast": contrast}, decoding, wrap)
        return lambda prefixes, max_len, _, end_of_text=None, generator=None, callback=None: sampler(
            prefixes, max_len, own, end_of_text, generator, callback
        )

    return make


def contrastive_graphs(decoding: Decoding) -> Plans:
    """Both models read token by token."""
    return {role: Plan(frozenset({1})) for role in ("target", "draft")}


def speculative_contrastive_graphs(decoding: Decoding) -> Plans:
    """Both models read each block of guesses, and the draft guesses."""
    plans = rounds_of()(decoding)
    return plans | {"draft": plans["draft"] | Plan(plans["target"].widths)}
