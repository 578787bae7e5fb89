"""How samplers are built from models and settings, for the entries of catalogue.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from decoding.drafter import Drafter, Fixed, LengthRule
from decoding.lengthRules import MENU, CostAware
from decoding.lengthRules import RULES as LENGTH_RULES
from decoding.model import Model
from decoding.rows import Record
from decoding.tree import Tree
from decoding.treeRules import TREE_RULES, synthetic_tree
from decoding.verification import RULES as VERIFICATIONS
from decoding.verification import VerificationRule, synthetic
from engine.cachedModel import UncachedModel
from inputs.commandLine import choice, flag, number, switch, whole
from methods.cascade import CascadeDrafter
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.otherTokenizer import OtherTokenizerDrafter, Translation
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling


@dataclass(frozen=True)
class Decoding:
    """How to guess and to verify.

    gamma, ngram: None for the default of the draft-length rule, and of the drafter.
    lookup: prompt lookup guesses, instead of a draft model. own_copy: the draft is the target's own copy.
    translation: from the target's tokenizer to the draft's, if that is another one.
    """

    gamma: int | None = flag(whole(1, 1000), first=True)
    """How many tokens to guess in a round. The additive rule guesses at least as many, draftConfidence and costAware at
    most as many. Default: 4; for --draft self 5; for draftConfidence, costAware and lookup 10."""
    draft_length: str = choice(LENGTH_RULES, "fixed")
    """The rule that decides how many tokens to guess."""
    draft_threshold: float = flag(number(0, 1), 0.4, "P")
    """draftConfidence stops guessing after a token whose draft probability is below this."""
    target_threshold: float = flag(number(0, 1), 0.5, "P")
    """targetConfidence does not guess after a token whose target probability is below this."""
    verification: str = choice(VERIFICATIONS, "token")
    """The rule that accepts guesses."""
    tree: str | None = flag(str, None, "SHAPE")
    """Guess a tree instead of a chain. 3,2,1,1: the last token has 3 children, each of these 2, and so on. 3/2,1,0:
    level by level, the number of children of each node, or one number for all nodes of a level. auto: the shape with
    the most tokens per second, by measured acceptance and costs; plain decoding and chains are among its choices. Of
    --compare and --lossless, self and head guess such a tree too, and tree and topDown, whose default is auto. Default:
    a chain."""
    tree_rule: str = choice(TREE_RULES, "traversal")
    """The rule that accepts guesses of a tree."""
    acceptance: float | None = flag(number(0, 1), None, "A")
    """Accept each guess with this probability, at random, instead of comparing p and q: for models with random weights
    (random:SHAPE). The text is not the target's. The k-th child of a node in a tree is accepted with this probability
    over k. The verification rule that is named has no effect."""
    gamma1: int = flag(whole(1, 1000), 4)
    """In a cascade, how many tokens the draft guesses for the mid model in a round."""
    gamma2: int = flag(whole(1, 1000), 4)
    """In a cascade, how many tokens the draft and the mid model together guess for the target in a round."""
    lookup_first: bool = switch()
    """Let the text so far guess where its last tokens occurred before, as for --draft lookup, and the draft model
    elsewhere."""
    ngram: int | None = flag(whole(1))
    """For lookup: the least number of last tokens that must have occurred before. The longest match is used.
    Default: 1; 4 where a draft model guesses elsewhere."""
    draft_temperature: float | None = flag(number(0, 1000), None, "T")
    """The temperature of the draft alone. The text stays distributed as the target's; how many guesses are accepted
    changes. Default: the target's."""
    draft_top_p: float | None = flag(number(0, 1), None, "P")
    """The top_p of the draft alone. It changes how many guesses are accepted, not the text's distribution. Default: the
    target's."""
    plausibility: float = flag(number(0, 1), 0.1, "A")
    """In contrastive decoding, drop tokens that the target gives less than this share of its highest probability."""
    amateur_temperature: float = flag(number(1e-4, 1000), 1.0, "T")
    """In contrastive decoding, the temperature of the draft's distribution, which is subtracted in logarithms from the
    target's."""
    contrastive_temperature: float = flag(number(0, 1000), 0.0, "T")
    """In contrastive decoding, the temperature at which tokens are drawn from the scores. 0 takes the token of the
    highest score."""
    lookup: bool = False
    own_copy: bool = False
    translation: Translation | None = None

    @property
    def sampling_of_scores(self) -> Sampling:
        """How contrastive decoding draws tokens."""
        return Sampling(self.contrastive_temperature, 0, 1.0)

    def gamma_of(self, rule: str, looks_up: bool = False) -> int:
        """--gamma, or its default for a draft-length rule. looks_up: prompt lookup guesses."""
        default = 10 if looks_up and rule == "fixed" else parameters_of(rule)["length"].default
        return self.gamma or max(default, 5 if self.own_copy else 0)


def parameters_of(rule: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(LENGTH_RULES[rule]).parameters


# A method with its models, called as `specSampling` without target and drafter. One that guesses nothing takes no
# observer.
Sampler = Callable[..., tuple[list[list[int]], list[Record]]]
Models = Mapping[str, Model]  # {role: model}; roles: target, draft, mid, restricted, self (the target's copy), head
Maker = Callable[[Models, Decoding], Sampler]
DrafterMaker = Callable[[Models, Decoding], Drafter]


def guesser(models: Models, decoding: Decoding, kind: str | None = None) -> Drafter:
    """What guesses: the model of a role ("draft", "self", "head"), the text so far ("lookup"), or that where it has a
    match, and elsewhere the draft model, which is better than short matches ("lookupFirst"). None: as the flags say."""
    if kind is None:
        kind = "lookup" if "draft" not in models else "lookupFirst" if decoding.lookup_first else "draft"
    if kind == "lookup":
        return LookupDrafter(models["target"].vocabulary, decoding.ngram or 1)
    if kind == "lookupFirst":
        looked_up = LookupDrafter(models["target"].vocabulary, decoding.ngram or 4)
        return LookupFirst(looked_up, guesser(models, decoding, "draft"))
    model, options = models[kind], (decoding.draft_temperature, decoding.draft_top_p)
    if kind == "draft":
        model = models.get("restricted", model)
        if decoding.translation is not None:
            return OtherTokenizerDrafter(model, decoding.translation, *options)
    return ModelDrafter(model, *options)


# Samplers.


def one_model(models: Models, decoding: Decoding, role: str = "target") -> Sampler:
    """Plain decoding: one model without any other. A draft with a tokenizer of its own continues the prompts in its own
    tokens, and no id ends them."""
    sampler, translation = partial(regrSampling, target=models[role]), decoding.translation
    if role != "draft" or translation is None:
        return sampler
    return lambda prefixes, end_of_text=None, callback=None, **options: sampler(
        [translation.row(prefix) for prefix in prefixes], **options
    )


def rule_of(models: Models, decoding: Decoding, name: str | None = None) -> VerificationRule:
    """The verification rule `name`; None: that of the flags. With --acceptance, a synthetic one."""
    if decoding.acceptance is not None:
        return synthetic(decoding.acceptance, models["target"].rule(VERIFICATIONS["token"]))
    return VERIFICATIONS[name or decoding.verification]


def chains(
    models: Models,
    decoding: Decoding,
    rule: str | None = None,
    verification: str | None = None,
    drafter: str | DrafterMaker | None = None,
) -> Sampler:
    """Speculative sampling with this draft-length rule, verification rule, and drafter: a kind of `guesser` or a
    function. None: those of the flags."""
    rule = rule or decoding.draft_length
    options = {field: getattr(decoding, field) for field in parameters_of(rule) if field != "length"}
    return partial(
        specSampling,
        target=models["target"],
        drafter=drafter(models, decoding) if callable(drafter) else guesser(models, decoding, drafter),
        gamma=LENGTH_RULES[rule](decoding.gamma_of(rule, decoding.lookup or drafter == "lookup"), **options),
        verify=rule_of(models, decoding, verification),
    )


def trees(models: Models, decoding: Decoding, rule: str | None = None, drafter: str | None = None) -> Sampler:
    """A tree of guesses of the model of role `drafter`, by default the draft, with this verification rule; None: that
    of the flags."""
    model = models[drafter] if drafter else models.get("restricted") or models["draft"]
    verify = TREE_RULES[rule or decoding.tree_rule]
    if decoding.acceptance is not None:
        verify = synthetic_tree(decoding.acceptance, models["target"].rule(verify))
    return partial(
        treeSampling,
        target=models["target"],
        drafter=TreeDrafter(model, decoding.draft_temperature, decoding.draft_top_p),
        tree=tree_choice(decoding),
        verify=verify,
    )


def as_flags_say(models: Models, decoding: Decoding, rule: str | None = None, drafter: str | None = None) -> Sampler:
    """Trees if there is a --tree, otherwise chains with this draft-length rule."""
    if decoding.tree:
        return trees(models, decoding, drafter=drafter)
    return chains(models, decoding, rule, drafter=drafter)


def tree_choice(decoding: Decoding) -> LengthRule:
    """The value of `--tree`; "auto" if it is not given."""
    return CostAware(MENU) if decoding.tree in (None, "auto") else Fixed(Tree.of(decoding.tree or ""))


def cascade(models: Models, decoding: Decoding) -> Sampler:
    """In each round the draft guesses gamma1 tokens for the mid model, and both together gamma2 for the target."""
    verify = rule_of(models, decoding)
    drafter = CascadeDrafter(models["mid"], guesser(models, decoding), Fixed(decoding.gamma1), verify)
    return partial(specSampling, target=models["target"], drafter=drafter, gamma=Fixed(decoding.gamma2), verify=verify)


def without_cache(models: Models, decoding: Decoding, make: Maker) -> Sampler:
    """The same method with models that keep no KV cache."""
    return make({role: UncachedModel(model) for role, model in models.items()}, decoding)


def contrastive(models: Models, decoding: Decoding, make: Maker) -> Sampler:
    """Contrastive decoding. It has its own temperature, 0 in the paper, and ignores the other sampling flags."""
    contrast = Contrast(models["target"], models["draft"], decoding.plausibility, decoding.amateur_temperature)
    sampler, of_scores = make({**models, "target": contrast}, decoding), decoding.sampling_of_scores
    return lambda prefixes, sampling, **options: sampler(prefixes, sampling=of_scores, **options)
