"""The decoding methods, one entry each: what `test.py` measures, compares, tests and shows.

To add a method, add one `Method` to `CATALOGUE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from methods.programs import PROGRAMS
from methods.samplers import (
    Decoding,
    Maker,
    Models,
    Sampler,
    Wrap,
    alone,
    as_flags_say,
    cascade,
    contrastive,
    draft_model,
    follows_no_clock,
    has_fixed_shape,
    head,
    lookup,
    lookup_first,
    own_copy,
    speculative,
    tree,
    without_cache,
)
from utils import UserError


class Role(str, Enum):
    """What a method needs beside the target. DRAFT: a guesser; READER: a draft that can read a text by itself; EXPERT:
    one that is another model than the target and knows every token."""

    DRAFT = "draft"
    READER = "draft model"
    EXPERT = "whole draft model"
    MID = "mid"
    SELF = "self"
    HEAD = "head"

    @property
    def model(self) -> str:
        """Its key among `Models`."""
        return "draft" if self in (Role.READER, Role.EXPERT) else self.value

    @property
    def missing(self) -> str:
        """What to say where it is missing."""
        if self is Role.EXPERT:
            return (
                "another model beside the target, one that knows every token; name it with --draft, and leave out "
                "--draftVocab"
            )
        return f"a {self.model} model beside the target; name one with --{self.model}"


@dataclass(frozen=True)
class Method:
    """One decoding method.

    name: what flags and records call it. title: one line of help.
    make: f(models, decoding, wrap) -> sampler; wrap: wraps the drafter, to watch it.
    needs: roles it needs beside the target.
    lossless: its text is distributed as the target's. seeded: f(decoding) -> whether the seed fixes its tokens.
    baseline: what others are compared with; "all" methods of --lossless leave it out.
    guesses: whether it guesses tokens for the target to verify.
    contrasts: it needs two different models that both know every token.
    guesser: the role of the model whose distributions are the q of its guesses.
    guesses_tree: f(decoding) -> whether its guesses form a tree.
    engine: the program that computes it, if that is not this one.
    modes: the modes of `test.py` that measure it. in_all: whether `--compare all` includes it, because it
        repeats no other row.
    """

    name: str
    title: str
    make: Maker
    needs: tuple[Role, ...] = ()
    lossless: bool = False
    baseline: bool = False
    seeded: Callable[[Decoding], bool] = lambda decoding: True
    guesses: bool = True
    contrasts: bool = False
    guesser: str = "draft"
    guesses_tree: Callable[[Decoding], bool] = lambda decoding: False
    engine: str = ""
    modes: tuple[str, ...] = ()
    in_all: bool = True


def elsewhere(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
    """A method of another program has no sampler here."""
    raise NotImplementedError


CATALOGUE: tuple[Method, ...] = (
    Method(
        "draft",
        "the draft alone",
        alone("draft"),
        needs=(Role.READER,),
        guesses=False,
        modes=("speed", "speedNew", "speedMulti", "sweep"),
        in_all=False,
    ),
    Method(
        "mid",
        "the mid model alone",
        alone("mid"),
        needs=(Role.MID,),
        guesses=False,
        modes=("speedMulti",),
        in_all=False,
    ),
    Method(
        "target",
        "plain decoding: the target alone",
        alone("target"),
        lossless=True,
        baseline=True,
        guesses=False,
        modes=("speed", "speedNew", "speedMulti", "contrastive", "sweep", "diversity", "steps"),
    ),
    Method(
        "speculative",
        "speculative sampling as the flags say",
        as_flags_say,
        lossless=True,
        seeded=follows_no_clock,
        guesses_tree=lambda decoding: decoding.tree is not None,
        modes=("speed", "speedMulti", "diversity"),
        in_all=False,
    ),
    Method("fixed", "gamma guesses each round", speculative("fixed"), lossless=True, modes=("steps",)),
    Method(
        "additive",
        "one guess more after a round accepted in full, else half",
        speculative("additive"),
        lossless=True,
        modes=("speedNew",),
    ),
    Method("draftConfidence", "guesses until the draft is unsure", speculative("draftConfidence"), lossless=True),
    Method("targetConfidence", "guesses only while the target is sure", speculative("targetConfidence"), lossless=True),
    Method(
        "costAware", "as many guesses as pay", speculative("costAware"), lossless=True, seeded=lambda decoding: False
    ),
    Method("block", "block verification", speculative("fixed", "block"), lossless=True),
    Method(
        "tree",
        "a tree of guesses (--tree), traversal verification",
        tree("traversal"),
        needs=(Role.DRAFT,),
        lossless=True,
        seeded=has_fixed_shape,
        guesses_tree=lambda decoding: True,
    ),
    Method(
        "topDown",
        "the same tree, verified from the root down",
        tree("topDown"),
        needs=(Role.DRAFT,),
        lossless=True,
        seeded=has_fixed_shape,
        guesses_tree=lambda decoding: True,
        in_all=False,
    ),
    Method("lookup", "guesses from the text so far", speculative("fixed", None, lookup), lossless=True),
    Method(
        "lookupFirst",
        "guesses from the text so far, and the draft's where it has none",
        speculative("fixed", None, lookup_first),
        needs=(Role.DRAFT,),
        lossless=True,
    ),
    Method(
        "self",
        "guesses from the target's own copy in few bits (--draftBits)",
        speculative("fixed", None, own_copy),
        needs=(Role.SELF,),
        lossless=True,
        guesser="self",
    ),
    Method(
        "head",
        "guesses from the target's features, by a trained head (--head)",
        speculative("fixed", None, head),
        needs=(Role.HEAD,),
        lossless=True,
        guesser="head",
    ),
    Method(
        "cascade",
        "the draft guesses for the mid model, both for the target",
        cascade,
        needs=(Role.MID,),
        lossless=True,
        guesser="mid",
        modes=("speedMulti",),
    ),
    Method(
        "noCache",
        "plain decoding without a KV cache, as in the course report's code",
        without_cache(alone("target")),
        lossless=True,
        baseline=True,
        guesses=False,
    ),
    Method(
        "speculativeNoCache",
        "gamma guesses each round, both models without a KV cache, as in the course report's code",
        without_cache(speculative("fixed", "token", draft_model)),
        needs=(Role.READER,),
        lossless=True,
        baseline=True,
    ),
    Method(
        "contrastive",
        "contrastive decoding",
        contrastive(False),
        needs=(Role.EXPERT,),
        guesses=False,
        contrasts=True,
        modes=("contrastive", "diversity"),
    ),
    Method(
        "speculativeContrastive",
        "contrastive decoding with guesses",
        contrastive(True),
        needs=(Role.EXPERT,),
        contrasts=True,
        seeded=follows_no_clock,
        modes=("contrastive", "diversity"),
    ),
)
CATALOGUE += tuple(
    Method(
        f"{program}:{kind}",
        title,
        elsewhere,
        needs=(Role.EXPERT,) if kind in ("draft", "assisted", "custom") else (),
        seeded=lambda decoding: False,
        guesses=kind in ("draft", "assisted", "custom", "lookup", "copy"),
        engine=program,
        in_all=False,
    )
    for program, kinds in PROGRAMS.items()
    for kind, title in kinds.items()
)
METHODS = {method.name: method for method in CATALOGUE}


def in_mode(mode: str) -> list[str]:
    """The methods that a mode of `test.py` measures."""
    return [method.name for method in METHODS.values() if mode in method.modes]


def lossless_methods() -> list[str]:
    """The methods whose text is distributed as the target's."""
    return [method.name for method in METHODS.values() if method.lossless]


def choose(names: str, roles: Iterable[str]) -> list[str]:
    """The methods of a comma-separated list, in its order, with the baseline first.

    "all" is every method that the models of `roles` allow, but for those that repeat another's row; the name of another
    program is all of its methods that they allow. Raises UserError for an unknown name, and for a method that lacks a
    model.
    """
    chosen: list[str] = []
    for name in (name.strip() for name in names.split(",")):
        group = [m for m in METHODS.values() if (m.in_all if name == "all" else m.engine == name != "")]
        if not group and name not in METHODS:
            known = ", ".join(["all", *(method.name for method in METHODS.values() if not method.engine), *PROGRAMS])
            raise UserError(f"unknown method {name!r}; known are: {known}")
        if not group:
            check_roles([name], roles)
        chosen += allowed(group, roles) if group else [name]
    return list(dict.fromkeys(["target", *chosen]))


def choose_lossless(names: str, roles: Iterable[str]) -> list[str]:
    """The methods whose losslessness is to be tested, of a comma-separated list.

    "all" is every lossless method that the models of `roles` allow, but for the baselines. Raises as `choose` does.
    """
    asked = [name.strip() for name in names.split(",")]
    if asked == ["all"]:
        methods = [method for method in METHODS.values() if method.lossless and not method.baseline]
        return allowed(methods, roles)
    for name in asked:
        if name not in lossless_methods():
            raise UserError(
                f"{name!r} is not a method whose text is the target's; those are: all, {', '.join(lossless_methods())}"
            )
    check_roles(asked, roles)
    return list(dict.fromkeys(asked))


def allowed(methods: Iterable[Method], roles: Iterable[str]) -> list[str]:
    """Names of the methods that need no model but those of `roles`."""
    return [method.name for method in methods if set(method.needs) <= set(roles)]


def check_roles(names: Iterable[str], roles: Iterable[str]) -> None:
    """Raise UserError if one of these methods lacks a model."""
    for name in names:
        for role in METHODS[name].needs:
            if role not in roles:
                raise UserError(f"{name} needs {role.missing}")


def repeatable(name: str, decoding: Decoding) -> bool:
    """Whether flags and seed fix the tokens of that method."""
    return name not in METHODS or METHODS[name].seeded(decoding)


def build(
    names: Iterable[str], models: Models, decoding: Decoding, wrap: Wrap = lambda drafter: drafter
) -> dict[str, Sampler]:
    """{name: sampler} of those that are computed here."""
    return {name: METHODS[name].make(models, decoding, wrap) for name in names if not METHODS[name].engine}
