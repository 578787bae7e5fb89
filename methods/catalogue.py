"""The decoding methods, one entry each: what `test.py` measures, compares, tests and shows.

To add a method, add one `Method` to `CATALOGUE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from inputs.commandLine import did_you_mean
from methods import samplers as make
from methods.programs.registry import PROGRAMS
from methods.samplers import Decoding, DrafterMaker, Maker, Models, Sampler
from utils import UserError


class Role(str, Enum):
    """The models that a method needs beside the target. DRAFT: one that guesses; READER: a draft that can read a text
    by itself; EXPERT: one that is another model than the target and knows every token; MID: the middle one of a
    cascade; SELF: the target's copy in few bits; HEAD: a trained head."""

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


def no_clock(decoding: Decoding) -> bool:
    """Whether tokens are repeatable: with costAware and --tree auto they depend on measured times."""
    return decoding.draft_length != "costAware" and decoding.tree != "auto"


@dataclass(frozen=True)
class Method:
    """One decoding method.

    name: its name in flags and records. title: one line of help. make: f(models, decoding) -> sampler; None: another
        program computes it.
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
    make: Maker | None
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


SPEED = "speed", "speedNew", "speedMulti"
QUICK = "quick"  # among the methods of --lossless: no mistakes are planted
baseline = partial(Method, guesses=False)
alone = partial(baseline, lossless=False, in_all=())
tree_method = partial(  # Without --tree it is auto.
    Method, needs=(Role.DRAFT,), grows_trees=True, seeded=lambda decoding: decoding.tree not in (None, "auto")
)
contrast = partial(Method, needs=(Role.EXPERT,), lossless=False, modes=("contrastive", "diversity"))


def chain(name: str, title: str, *needs: Role, drafter: str | DrafterMaker | None = None, **options: Any) -> Method:
    """Speculative sampling with the draft-length rule of that name, else a fixed one, and this drafter
    (`samplers.chains`). options: fields of `Method`."""
    rule = name if name in make.LENGTH_RULES else "fixed"
    return Method(name, title, partial(make.chains, rule=rule, drafter=drafter), needs, **options)


def shaped(name: str, title: str, needs: tuple[Role, ...]) -> Method:
    """Guesses of the model of role `name`: gamma each round, or the tree of `--tree`."""
    sampler = partial(make.as_flags_say, rule="fixed", drafter=name)
    return Method(name, title, sampler, needs, seeded=lambda decoding: decoding.tree != "auto")


CATALOGUE: tuple[Method, ...] = (
    alone("draft", "the draft alone", partial(make.one_model, role="draft"), (Role.READER,), modes=SPEED),
    alone("mid", "the mid model alone", partial(make.one_model, role="mid"), (Role.MID,), modes=("speedMulti",)),
    baseline(
        "target",
        "plain decoding: the target alone",
        make.one_model,
        modes=(*SPEED, "contrastive", "sweep", "diversity", "steps"),
        in_all=("compare",),
    ),
    Method(
        "speculative",
        "speculative sampling as the flags say",
        make.as_flags_say,
        seeded=no_clock,
        modes=("speed", "speedMulti", "diversity"),
        in_all=("lossless",),
    ),
    chain("fixed", "gamma guesses each round", modes=("steps",)),
    chain("additive", "one more guess after a fully accepted round, otherwise half as many", modes=("speedNew",)),
    chain("draftConfidence", "guesses until the draft is not confident"),
    chain("targetConfidence", "guesses only while the target is confident"),
    chain("costAware", "the number of guesses with the highest expected speed", seeded=lambda _: False),
    Method("block", "block verification", partial(make.chains, rule="fixed", verification="block")),
    tree_method("tree", "a tree of guesses (--tree), traversal verification", partial(make.trees, rule="traversal")),
    tree_method(
        "topDown",
        "the same tree, verified from the root down",
        partial(make.trees, rule="topDown"),
        in_all=("lossless",),
    ),
    chain("lookup", "guesses from the text so far", drafter="lookup"),
    chain("lookupFirst", "guesses from the text so far, otherwise the draft's", Role.DRAFT, drafter="lookupFirst"),
    shaped("self", "guesses from the target's own copy in few bits (--draftBits)", needs=(Role.SELF,)),
    shaped("head", "guesses from the target's features, by a trained head (--head)", needs=(Role.HEAD,)),
    Method(
        "cascade",
        "the draft guesses for the mid model, both for the target",
        make.cascade,
        (Role.MID,),
        modes=("speedMulti",),
    ),
    baseline(
        "noCache",
        "plain decoding without a KV cache, as in the course report's code",
        partial(make.without_cache, make=make.one_model),
        in_all=("compare",),
    ),
    Method(
        "speculativeNoCache",
        "gamma guesses each round, both models without a KV cache, as in the course report's code",
        partial(make.without_cache, make=partial(make.chains, rule="fixed", verification="token", drafter="draft")),
        (Role.READER,),
        in_all=("compare",),
    ),
    contrast("contrastive", "contrastive decoding", partial(make.contrastive, make=make.one_model), guesses=False),
    contrast(
        "speculativeContrastive",
        "contrastive decoding with guesses",
        partial(make.contrastive, make=make.chains),
        seeded=no_clock,
    ),
    *(
        Method(
            f"{program.name}:{kind}",
            row.title,
            None,
            (Role.EXPERT,) if row.draft == "draft" else (),
            lossless=False,
            guesses=row.draft is not None,
            seeded=lambda _: False,
            engine=program.name,
            in_all=(),
        )
        for program in PROGRAMS.values()
        for kind, row in program.rows.items()
    ),
)
METHODS = {method.name: method for method in CATALOGUE}


def choose(names: str, roles: Iterable[str], flag: str = "compare") -> list[str]:
    """The methods of a comma-separated list, in its order: for --compare with the target first, for --lossless only
    lossless ones.

    "all" stands for the methods that the models of `roles` allow, the name of another program for all of its methods
    that they allow. QUICK in the list of --lossless is no method; alone it leaves "speculative". Raises UserError for
    an unknown name, and for a method that lacks a model.
    """
    known = [method for method in METHODS.values() if flag == "compare" or method.lossless]
    chosen = ["target"] if flag == "compare" else []
    for name in (name.strip() for name in names.split(",")):
        if (name, flag) == (QUICK, "lossless"):
            continue
        group = [m for m in known if (flag in m.in_all if name == "all" else m.engine == name != "")]
        if not group and METHODS.get(name) not in known:
            unknown = f"unknown method {name!r}" if flag == "compare" else f"{name!r} is no lossless method"
            shown = ["all", *[QUICK] * (flag == "lossless"), *dict.fromkeys(m.engine or m.name for m in known)]
            near = did_you_mean(name, (*shown, *(method.name for method in known)))
            raise UserError(f"{unknown}; known are: {', '.join(shown)}{near}")
        if not group:
            check_roles([name], roles)
        chosen += [m.name for m in group if set(m.needs) <= set(roles)] if group else [name]
    return list(dict.fromkeys(chosen)) or ["speculative"]


def check_roles(names: Iterable[str], roles: Iterable[str]) -> None:
    """Raise UserError if one of these methods lacks a model."""
    for name in names:
        for role in METHODS[name].needs:
            if role in roles:
                continue
            if role is Role.EXPERT:
                what = "another model beside the target, one that knows every token"
                raise UserError(f"{name} needs {what}; name it with --draft, and leave out --draftVocab")
            raise UserError(f"{name} needs a {role.model} model beside the target; name one with --{role.model}")


def repeatable(name: str, decoding: Decoding) -> bool:
    """Whether flags and seed determine the tokens of the method."""
    return name not in METHODS or METHODS[name].seeded(decoding)


def build(names: Iterable[str], models: Models, decoding: Decoding) -> dict[str, Sampler]:
    """{name: sampler} of the methods that are computed in this process."""
    return {name: make(models, decoding) for name in names if (make := METHODS[name].make)}
