"""Methods chosen by name, with the graphs they are worth. All lists follow from the catalogue."""

from collections.abc import Iterable

from engine.graphs import Plan
from methods.catalogue import METHODS, Method
from methods.makers import VARIED, Decoding, Models, Plans, Sampler, Wrap, step_by_step
from methods.otherTokenizer import READ
from utils import UserError


def in_mode(mode: str) -> list[str]:
    """The methods that a mode of `test.py` measures."""
    return [method.name for method in METHODS.values() if mode in method.modes]


def provable() -> list[str]:
    """The methods whose text is distributed as the target's."""
    return [method.name for method in METHODS.values() if method.lossless]


def choose(names: str, roles: Iterable[str]) -> list[str]:
    """The methods of a comma-separated list, in its order, with the baseline first.

    "all" is every method that the models of `roles` allow. Raises UserError for an unknown name, and for a method that
    lacks a model.
    """
    asked = [name.strip() for name in names.split(",")]
    if asked == ["all"]:
        return allowed([method for method in METHODS.values() if method.in_all], roles)
    for name in asked:
        if name not in METHODS:
            raise UserError(f"unknown method {name!r}; known are: all, {', '.join(METHODS)}")
    check_roles(asked, roles)
    return list(dict.fromkeys(["target", *asked]))


def choose_lossless(names: str, roles: Iterable[str]) -> list[str]:
    """The methods whose losslessness is to be proved, as `choose` but without the baseline."""
    asked = [name.strip() for name in names.split(",")]
    if asked == ["all"]:
        methods = [method for method in METHODS.values() if method.in_all and method.lossless]
        return [name for name in allowed(methods, roles) if name != "target"]
    for name in asked:
        if name not in provable():
            raise UserError(
                f"{name!r} is not a method whose text is the target's; those are: all, {', '.join(provable())}"
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
                raise UserError(f"{name} needs a {role} model beside the target; name one with --{role}")


def repeatable(name: str, decoding: Decoding) -> bool:
    """Whether flags and seed fix the tokens of that method."""
    return name not in METHODS or METHODS[name].seeded(decoding)


def plan_graphs(names: Iterable[str], decoding: Decoding, penalised: bool, sweep: bool) -> tuple[Plans, frozenset[int]]:
    """The graphs worth making for each role, and the numbers of guesses whose rounds are worth one graph each.

    penalised: with a repetition penalty, tokens are drawn one by one. sweep: over gamma; each is measured alike, so no
    round is one graph.
    """
    plans: Plans = {}
    methods = [METHODS[name] for name in names]
    for each in [method.graphs(decoding) for method in methods] + [VARIED] * sweep:
        for role, plan in each.items():
            plans[role] = plans.get(role, Plan()) | plan
    if decoding.translation is not None and "draft" in plans:
        plans["draft"] |= Plan(read=READ)
    if penalised:
        plans = {role: step_by_step(plan) for role, plan in plans.items()}
    rounds = frozenset().union(*(method.rounds(decoding) for method in methods))
    return plans, frozenset() if penalised or sweep else rounds


def build(
    names: Iterable[str], models: Models, decoding: Decoding, wrap: Wrap = lambda drafter: drafter
) -> dict[str, Sampler]:
    """{name: sampler}."""
    return {name: METHODS[name].make(models, decoding, wrap) for name in names}
