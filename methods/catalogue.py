"""The decoding methods, one entry each: what `test.py` measures, compares, tests and shows.

To add a method, add one `Method` to `CATALOGUE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from methods.programs import PROGRAMS
from methods.samplers import (
    Decoding,
    Maker,
    Models,
    Sampler,
    cascade,
    contrastive,
    from_flags,
    lookup,
    lookup_first,
    model_drafter,
    plain,
    speculative,
    tree,
    without_cache,
)
from utils import UserError


class Role(str, Enum):
    """The models that a method needs beside the target. DRAFT: one that guesses; READER: a draft that can read a text
    by itself; EXPERT: one that is another model than the target and knows every token."""

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
        """The error message if it is missing."""
        if self is Role.EXPERT:
            return (
                "another model beside the target, one that knows every token; name it with --draft, and leave out "
                "--draftVocab"
            )
        return f"a {self.model} model beside the target; name one with --{self.model}"


def no_clock(decoding: Decoding) -> bool:
    """Whether tokens are repeatable: costAware and --tree auto depend on measured times, so tokens differ from run to
    run."""
    return decoding.draft_length != "costAware" and decoding.tree != "auto"


def fixed_tree(decoding: Decoding) -> bool:
    """As `no_clock`, of a method that always guesses a tree: without --tree its shape is auto."""
    return decoding.tree not in (None, "auto")


@dataclass(frozen=True)
class Method:
    """One decoding method.

    name: its name in flags and records. title: one line of help. make: f(models, decoding) -> sampler.
    needs: roles it needs beside the target.
    lossless: its text is distributed as the target's. guesses: it guesses tokens for the target to verify.
    grows_trees: its guesses form trees, whatever the flags say.
    seeded: f(decoding) -> whether the seed fixes its tokens.
    engine: the program that computes it, if that is not this one.
    modes: the modes of `test.py` that measure it. in_all: the flags whose "all" includes it. One that repeats another
        row is not compared; a baseline is not tested for losslessness.
    """

    name: str
    title: str
    make: Maker
    needs: tuple[Role, ...] = ()
    lossless: bool = True
    guesses: bool = True
    grows_trees: bool = False
    seeded: Callable[[Decoding], bool] = lambda decoding: True
    engine: str = ""
    modes: tuple[str, ...] = ()
    in_all: tuple[str, ...] = ("compare", "lossless")

    @property
    def contrasts(self) -> bool:
        """Whether it needs two different models that both know every token."""
        return Role.EXPERT in self.needs and not self.engine

    @property
    def guesser(self) -> str:
        """The role of the model whose distributions are the q of its guesses."""
        return self.needs[0].model if self.needs else "draft"


def elsewhere(models: Models, decoding: Decoding) -> Sampler:
    """The sampler of a method that another program computes: there is none."""
    raise UserError("another program computes this method")


def chain(name: str, title: str, rule: str = "fixed", **options: Any) -> Method:
    """Speculative sampling with the draft-length rule `rule`. options: of `samplers.speculative`, and fields of
    `Method`."""
    how = {option: options.pop(option) for option in ("verification", "drafter") if option in options}
    return Method(name, title, partial(speculative, rule=rule, **how), **options)


CATALOGUE: tuple[Method, ...] = (
    Method(
        "draft",
        "the draft alone",
        partial(plain, role="draft"),
        (Role.READER,),
        lossless=False,
        guesses=False,
        modes=("speed", "speedNew", "speedMulti", "sweep"),
        in_all=(),
    ),
    Method(
        "mid",
        "the mid model alone",
        partial(plain, role="mid"),
        (Role.MID,),
        lossless=False,
        guesses=False,
        modes=("speedMulti",),
        in_all=(),
    ),
    Method(
        "target",
        "plain decoding: the target alone",
        plain,
        guesses=False,
        modes=("speed", "speedNew", "speedMulti", "contrastive", "sweep", "diversity", "steps"),
        in_all=("compare",),
    ),
    Method(
        "speculative",
        "speculative sampling as the flags say",
        from_flags,
        seeded=no_clock,
        modes=("speed", "speedMulti", "diversity"),
        in_all=("lossless",),
    ),
    chain("fixed", "gamma guesses each round", modes=("steps",)),
    chain(
        "additive",
        "one more guess after a fully accepted round, otherwise half as many",
        "additive",
        modes=("speedNew",),
    ),
    chain("draftConfidence", "guesses until the draft is not confident", "draftConfidence"),
    chain("targetConfidence", "guesses only while the target is confident", "targetConfidence"),
    chain(
        "costAware", "the number of guesses with the highest expected speed", "costAware", seeded=lambda decoding: False
    ),
    chain("block", "block verification", verification="block"),
    Method(
        "tree",
        "a tree of guesses (--tree), traversal verification",
        partial(tree, rule="traversal"),
        (Role.DRAFT,),
        grows_trees=True,
        seeded=fixed_tree,
    ),
    Method(
        "topDown",
        "the same tree, verified from the root down",
        partial(tree, rule="topDown"),
        (Role.DRAFT,),
        grows_trees=True,
        seeded=fixed_tree,
        in_all=("lossless",),
    ),
    chain("lookup", "guesses from the text so far", drafter=lookup),
    chain(
        "lookupFirst", "guesses from the text so far, otherwise the draft's", drafter=lookup_first, needs=(Role.DRAFT,)
    ),
    chain(
        "self",
        "guesses from the target's own copy in few bits (--draftBits)",
        drafter=partial(model_drafter, role="self"),
        needs=(Role.SELF,),
    ),
    chain(
        "head",
        "guesses from the target's features, by a trained head (--head)",
        drafter=partial(model_drafter, role="head"),
        needs=(Role.HEAD,),
    ),
    Method(
        "cascade",
        "the draft guesses for the mid model, both for the target",
        cascade,
        (Role.MID,),
        modes=("speedMulti",),
    ),
    Method(
        "noCache",
        "plain decoding without a KV cache, as in the course report's code",
        partial(without_cache, make=plain),
        guesses=False,
        in_all=("compare",),
    ),
    Method(
        "speculativeNoCache",
        "gamma guesses each round, both models without a KV cache, as in the course report's code",
        partial(without_cache, make=partial(speculative, rule="fixed", verification="token", drafter=model_drafter)),
        (Role.READER,),
        in_all=("compare",),
    ),
    Method(
        "contrastive",
        "contrastive decoding",
        partial(contrastive, make=plain),
        (Role.EXPERT,),
        lossless=False,
        guesses=False,
        modes=("contrastive", "diversity"),
    ),
    Method(
        "speculativeContrastive",
        "contrastive decoding with guesses",
        partial(contrastive, make=speculative),
        (Role.EXPERT,),
        lossless=False,
        seeded=no_clock,
        modes=("contrastive", "diversity"),
    ),
)
CATALOGUE += tuple(
    Method(
        f"{program}:{kind}",
        title,
        elsewhere,
        needs=(Role.EXPERT,) if kind in ("draft", "assisted", "custom") else (),
        lossless=False,
        guesses=kind in ("draft", "assisted", "custom", "lookup", "copy"),
        seeded=lambda decoding: False,
        engine=program,
        in_all=(),
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


def choose(names: str, roles: Iterable[str], flag: str = "compare") -> list[str]:
    """The methods of a comma-separated list, in its order: for --compare with the target first, for --lossless only
    lossless ones.

    "all" stands for the methods that the models of `roles` allow, the name of another program for all of its methods
    that they allow. Raises UserError for an unknown name, and for a method that lacks a model.
    """
    known = [method for method in METHODS.values() if flag == "compare" or method.lossless]
    chosen = ["target"] if flag == "compare" else []
    for name in (name.strip() for name in names.split(",")):
        group = [m for m in known if (flag in m.in_all if name == "all" else m.engine == name != "")]
        if not group and METHODS.get(name) not in known:
            unknown = f"unknown method {name!r}" if flag == "compare" else f"{name!r} is no lossless method"
            shown = dict.fromkeys(method.engine or method.name for method in known)
            raise UserError(f"{unknown}; known are: all, {', '.join(shown)}")
        if not group:
            check_roles([name], roles)
        chosen += [m.name for m in group if set(m.needs) <= set(roles)] if group else [name]
    return list(dict.fromkeys(chosen))


def check_roles(names: Iterable[str], roles: Iterable[str]) -> None:
    """Raise UserError if one of these methods lacks a model."""
    for name in names:
        for role in METHODS[name].needs:
            if role not in roles:
                raise UserError(f"{name} needs {role.missing}")


def repeatable(name: str, decoding: Decoding) -> bool:
    """Whether flags and seed determine the tokens of the method."""
    return name not in METHODS or METHODS[name].seeded(decoding)


def build(names: Iterable[str], models: Models, decoding: Decoding) -> dict[str, Sampler]:
    """{name: sampler} of the methods that are computed in this process."""
    return {name: METHODS[name].make(models, decoding) for name in names if not METHODS[name].engine}
