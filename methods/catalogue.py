"""The decoding methods by name, as `test.py` measures, compares and shows them."""

from collections.abc import Callable
from dataclasses import dataclass

from decoding.draftLength import RULES, Fixed
from decoding.verification import RULES as VERIFICATIONS
from methods.contrastive import Contrast
from methods.drafters import CascadeDrafter, LookupDrafter, ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling, UserError


@dataclass(frozen=True)
class Method:
    """make: f(models, settings, watch) -> sampler, where a sampler is f(prefixes, max_len, sampling, end_of_text,
    generator, callback) -> (tokens, records); models: {role: `CachedModel`}; settings: the flags; watch: wraps the
    drafter. needs: roles it cannot do without, beside the target."""

    what: str
    make: Callable
    needs: tuple = ()


def length_rule(name, settings):
    """The draft-length rule of that name, as the flags set it."""
    options = {} if settings.gamma is None else {"length": settings.gamma}
    if name == "draftConfidence":
        options["threshold"] = settings.draftThreshold
    elif name == "targetConfidence":
        options["threshold"] = settings.targetThreshold
    return RULES[name](**options)


def guesser(models, settings):
    """The draft model, restricted where `--draftVocab` says so, or the text so far where `--draft lookup` does."""
    if "restricted" in models:
        return ModelDrafter(models["restricted"])
    if "draft" in models:
        return ModelDrafter(models["draft"])
    return LookupDrafter(models["target"].vocabulary, settings.ngram)


def alone(role):
    """That model without any other."""

    def make(models, settings, watch):
        return lambda prefixes, *rest: regrSampling(prefixes, models[role], *rest)

    return make


def speculative(rule=None, verification=None, drafter=guesser):
    """Speculative sampling by that draft-length and that verification rule; by those of the flags where it is None."""

    def make(models, settings, watch):
        guess = watch(drafter(models, settings))
        length = length_rule(rule or settings.draftLength, settings)
        return loop(models["target"], guess, length, VERIFICATIONS[verification or settings.verification])

    return make


def loop(target, drafter, length, verify):
    return lambda prefixes, max_len, *rest: specSampling(
        prefixes, target, drafter, max_len, length, *rest, verify=verify
    )


def lookup(models, settings):
    return LookupDrafter(models["target"].vocabulary, settings.ngram)


def cascade(models, settings, watch):
    """The draft guesses gamma1 tokens for the mid model, the two together gamma2 for the target."""
    verify = VERIFICATIONS[settings.verification]
    drafter = CascadeDrafter(models["mid"], guesser(models, settings), Fixed(settings.gamma1), verify)
    return loop(models["target"], watch(drafter), Fixed(settings.gamma2), verify)


def contrastive(is_speculative):
    """Contrastive decoding. It has a temperature of its own, 0 in the paper; the other sampling flags are not its."""

    def make(models, settings, watch):
        contrast = Contrast(models["target"], models["draft"], settings.plausibility, settings.amateurTemperature)
        sampling = Sampling(settings.contrastiveTemperature, 0, 1.0)
        if is_speculative:
            sampler = loop(
                contrast,
                watch(ModelDrafter(models["draft"])),
                length_rule(settings.draftLength, settings),
                VERIFICATIONS[settings.verification],
            )
            return lambda prefixes, max_len, _, *rest: sampler(prefixes, max_len, sampling, *rest)
        return lambda prefixes, max_len, _, *rest: regrSampling(prefixes, contrast, max_len, sampling, *rest)

    return make


METHODS = {
    "draft": Method("the draft alone", alone("draft"), ("draft",)),
    "mid": Method("the mid model alone", alone("mid"), ("mid",)),
    "target": Method("plain decoding: the target alone", alone("target")),
    "speculative": Method("speculative sampling as the flags say", speculative()),
    "fixed": Method("gamma guesses each round", speculative("fixed")),
    "additive": Method("one guess more after a round accepted whole, else half", speculative("additive")),
    "draftConfidence": Method("guesses until the draft is unsure", speculative("draftConfidence")),
    "targetConfidence": Method("guesses only while the target is sure", speculative("targetConfidence")),
    "costAware": Method("as many guesses as pay", speculative("costAware")),
    "block": Method("block verification", speculative("fixed", "block")),
    "lookup": Method("guesses from the text so far", speculative("fixed", None, lookup)),
    "cascade": Method("the draft guesses for the mid model, both for the target", cascade, ("mid",)),
    "contrastive": Method("contrastive decoding", contrastive(False), ("draft",)),
    "speculativeContrastive": Method("contrastive decoding with guesses", contrastive(True), ("draft",)),
}
LOSSLESS = ("fixed", "additive", "draftConfidence", "targetConfidence", "costAware", "block", "lookup", "cascade")
ALL = ("target", *LOSSLESS, "contrastive", "speculativeContrastive")
PROVABLE = ("target", "speculative", *LOSSLESS)  # their text is distributed as the target's


def choose(names, roles):
    """The methods of a comma-separated list, in its order, the baseline before them. "all": those that the models of
    `roles` allow. Raises UserError for an unknown name and for one that lacks a model."""
    asked = [name.strip() for name in names.split(",")]
    if asked == ["all"]:
        return [name for name in ALL if set(METHODS[name].needs) <= set(roles)]
    for name in asked:
        if name not in METHODS:
            raise UserError(f"unknown method {name!r}; known are: all, {', '.join(METHODS)}")
    check_roles(asked, roles)
    return list(dict.fromkeys(["target", *asked]))


def choose_lossless(names, roles):
    """The methods of a list whose losslessness is to be proved, as `choose` reads it but without the baseline."""
    asked = [name.strip() for name in names.split(",")]
    if asked == ["all"]:
        return [name for name in LOSSLESS if set(METHODS[name].needs) <= set(roles)]
    for name in asked:
        if name not in PROVABLE:
            raise UserError(f"{name!r} is none of the methods whose text is the target's: all, {', '.join(PROVABLE)}")
    check_roles(asked, roles)
    return list(dict.fromkeys(asked))


def check_roles(names, roles):
    """Raise UserError where one of these methods lacks a model."""
    for name in names:
        for role in METHODS[name].needs:
            if role not in roles:
                raise UserError(f"{name} needs a {role} model beside the target; name one with --{role}")


def repeatable(name, settings):
    """Whether flags and seed fix the tokens of that method: costAware's guesses follow the clock."""
    rule = settings.draftLength if name in ("speculative", "speculativeContrastive") else name
    return rule != "costAware"


def build(names, models, settings, watch=lambda drafter: drafter):
    """{name: sampler}."""
    return {name: METHODS[name].make(models, settings, watch) for name in names}
