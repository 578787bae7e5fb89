"""The decoding methods, one entry each: what `test.py` measures, compares, proves and shows.

To add a method, add one `Method` to `CATALOGUE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from decoding.draftLength import Fixed
from decoding.interfaces import Callback, Drafter, LengthRule, Model, VerificationRule
from decoding.lengthRules import RULES as LENGTH_RULES
from decoding.record import Record
from decoding.verification import RULES as VERIFICATIONS
from engine.graphs import Plan
from methods.cascade import CascadeDrafter
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling


@dataclass(frozen=True)
class Decoding:
    """How to guess and to verify, as the flags of `test.py` say; gamma None is the default of the draft-length rule.

    lookup: the text so far guesses, instead of a draft model.
    """

    gamma: int | None = None
    draft_length: str = "fixed"
    draft_threshold: float = 0.4
    target_threshold: float = 0.5
    verification: str = "token"
    gamma1: int = 4
    gamma2: int = 4
    ngram: int = 3
    lookup: bool = False
    plausibility: float = 0.1
    amateur_temperature: float = 1.0
    contrastive_temperature: float = 0.0


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
Wrap = Callable[[Drafter], Drafter]
Plans = dict[str, Plan]  # {role: the graphs worth making}


@dataclass(frozen=True)
class Method:
    """One decoding method.

    name: what flags and records call it. title: one line of help.
    make: f(models, decoding, wrap) -> sampler; wrap: wraps the drafter, to watch it.
    needs: roles it needs beside the target.
    graphs: f(decoding) -> the graphs worth making for each role.
    round: f(decoding) -> guesses in a round that is worth one graph (`CachedModel.compile_round`), or 0.
    lossless: its text is distributed as the target's. seeded: f(decoding) -> whether the seed fixes its tokens.
    contrasts: it needs two different models that both know every token.
    guesser: the role of the model whose distributions are the q of its guesses.
    modes: the modes of `test.py` that measure it. in_all: whether "all" methods include it.
    """

    name: str
    title: str
    make: Callable[[Models, Decoding, Wrap], Sampler]
    needs: tuple[str, ...] = ()
    graphs: Callable[[Decoding], Plans] = field(default=lambda decoding: {})
    round: Callable[[Decoding], int] = field(default=lambda decoding: 0)
    lossless: bool = False
    seeded: Callable[[Decoding], bool] = field(default=lambda decoding: True)
    contrasts: bool = False
    guesser: str = "draft"
    modes: tuple[str, ...] = ()
    in_all: bool = True


# Plain decoding.


def alone(role: str) -> Callable[[Models, Decoding, Wrap], Sampler]:
    """One model without any other."""

    def make(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
        return lambda prefixes, max_len, sampling, end_of_text=None, generator=None, callback=None: regrSampling(
            prefixes, models[role], max_len, sampling, end_of_text, generator, callback
        )

    return make


def one_token(role: str) -> Callable[[Decoding], Plans]:
    """The graphs of `alone`."""
    return lambda decoding: {role: Plan(draws=frozenset({1}))}


# Speculative sampling.


def length_rule(name: str, decoding: Decoding) -> LengthRule:
    """The draft-length rule of that name, as the flags set it."""
    options: dict[str, float] = {} if decoding.gamma is None else {"length": decoding.gamma}
    if name == "draftConfidence":
        options["threshold"] = decoding.draft_threshold
    elif name == "targetConfidence":
        options["threshold"] = decoding.target_threshold
    return LENGTH_RULES[name](**options)


def guesser(models: Models, decoding: Decoding) -> Drafter:
    """The draft model, restricted if `--draftVocab` says so; or the text so far if `--draft lookup` does."""
    if "restricted" in models:
        return ModelDrafter(models["restricted"])
    return ModelDrafter(models["draft"]) if "draft" in models else lookup(models, decoding)


def lookup(models: Models, decoding: Decoding) -> Drafter:
    """The text so far."""
    return LookupDrafter(models["target"].vocabulary, decoding.ngram)


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
        length = length_rule(rule or decoding.draft_length, decoding)
        verify = VERIFICATIONS[verification or decoding.verification]
        return loop(models["target"], wrap(drafter(models, decoding)), length, verify)

    return make


def step_by_step(plan: Plan) -> Plan:
    """The graphs of forwards for a model that draws with the host's help after each token: no draw is one graph."""
    return Plan(plan.widths | {1} | ({plan.read} if plan.draws else frozenset()), plan.draws, plan.read)


VARIED = {"target": Plan(frozenset({2, 3, 5, 8, 11})), "draft": Plan(draws=frozenset({1, 2, 4, 8}), read=2)}


def rounds_of(rule: str | None = None) -> Callable[[Decoding], Plans]:
    """The graphs of `speculative` with this draft-length rule: of one size, or of a few sizes if the length varies."""

    def graphs(decoding: Decoding) -> Plans:
        name, gamma = rule or decoding.draft_length, decoding.gamma or 4
        plans = {"target": Plan(frozenset({gamma + 1})), "draft": Plan(draws=frozenset({gamma}), read=2)}
        if name != "fixed":
            plans = {"target": plans["target"] | VARIED["target"], "draft": VARIED["draft"]}
        return {role: step_by_step(plan) for role, plan in plans.items()} if name == "draftConfidence" else plans

    return graphs


def whole_rounds(rule: str | None = None) -> Callable[[Decoding], int]:
    """Guesses of a round that is one graph: if the draft-length rule guesses one number of tokens or none."""

    def count(decoding: Decoding) -> int:
        steady = (rule or decoding.draft_length) in ("fixed", "targetConfidence") and not decoding.lookup
        return (decoding.gamma or 4) if steady else 0

    return count


def follows_no_clock(decoding: Decoding) -> bool:
    """The costAware rule follows the clock: its guesses differ from run to run, and the tokens with them."""
    return decoding.draft_length != "costAware"


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
            sampler = loop(contrast, wrap(ModelDrafter(models["draft"])), length, verify)
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


CATALOGUE = (
    Method(
        "draft",
        "the draft alone",
        alone("draft"),
        needs=("draft",),
        graphs=one_token("draft"),
        modes=("speed", "speedNew", "speedMulti", "sweep"),
        in_all=False,
    ),
    Method(
        "mid",
        "the mid model alone",
        alone("mid"),
        needs=("mid",),
        graphs=one_token("mid"),
        modes=("speedMulti",),
        in_all=False,
    ),
    Method(
        "target",
        "plain decoding: the target alone",
        alone("target"),
        graphs=one_token("target"),
        lossless=True,
        modes=("speed", "speedNew", "speedMulti", "contrastive", "sweep", "diversity"),
    ),
    Method(
        "speculative",
        "speculative sampling as the flags say",
        speculative(),
        graphs=rounds_of(),
        round=whole_rounds(),
        lossless=True,
        seeded=follows_no_clock,
        modes=("speed", "speedMulti", "diversity"),
        in_all=False,
    ),
    Method(
        "fixed",
        "gamma guesses each round",
        speculative("fixed"),
        graphs=rounds_of("fixed"),
        round=whole_rounds("fixed"),
        lossless=True,
    ),
    Method(
        "additive",
        "one guess more after a round accepted in full, else half",
        speculative("additive"),
        graphs=rounds_of("additive"),
        lossless=True,
        modes=("speedNew",),
    ),
    Method(
        "draftConfidence",
        "guesses until the draft is unsure",
        speculative("draftConfidence"),
        graphs=rounds_of("draftConfidence"),
        lossless=True,
    ),
    Method(
        "targetConfidence",
        "guesses only while the target is sure",
        speculative("targetConfidence"),
        graphs=rounds_of("targetConfidence"),
        round=whole_rounds("targetConfidence"),
        lossless=True,
    ),
    Method(
        "costAware",
        "as many guesses as pay",
        speculative("costAware"),
        graphs=rounds_of("costAware"),
        lossless=True,
        seeded=lambda decoding: False,
    ),
    Method(
        "block",
        "block verification",
        speculative("fixed", "block"),
        graphs=rounds_of("fixed"),
        round=whole_rounds("fixed"),
        lossless=True,
    ),
    Method(
        "lookup",
        "guesses from the text so far",
        speculative("fixed", None, lookup),
        graphs=lambda decoding: {"target": rounds_of("fixed")(decoding)["target"]},
        lossless=True,
    ),
    Method(
        "cascade",
        "the draft guesses for the mid model, both for the target",
        cascade,
        needs=("mid",),
        graphs=cascade_graphs,
        lossless=True,
        guesser="mid",
        modes=("speedMulti",),
    ),
    Method(
        "contrastive",
        "contrastive decoding",
        contrastive(False),
        needs=("draft",),
        graphs=contrastive_graphs,
        contrasts=True,
        modes=("contrastive", "diversity"),
    ),
    Method(
        "speculativeContrastive",
        "contrastive decoding with guesses",
        contrastive(True),
        needs=("draft",),
        graphs=speculative_contrastive_graphs,
        contrasts=True,
        seeded=follows_no_clock,
        modes=("contrastive", "diversity"),
    ),
)
METHODS = {method.name: method for method in CATALOGUE}
