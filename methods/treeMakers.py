"""How the methods with a tree of guesses are made, and which graphs are worth making for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from decoding.interfaces import TreeModel
from decoding.treeChoice import MENU, Auto, TreeChoice
from decoding.trees import Tree
from decoding.treeVerification import TREE_RULES
from engine.graphs import Plan
from methods.makers import Decoding, Models, Plans, Sampler, Wrap, rounds_of, speculative, whole_rounds
from methods.treeSampling import TreeDrafter, treeSampling


def choice_of(decoding: Decoding) -> TreeChoice | Tree:
    """What `--tree` asks for; "auto" if it is not given."""
    return Auto() if decoding.tree in (None, "auto") else Tree.of(decoding.tree)


def shapes_of(decoding: Decoding) -> list[Tree]:
    """The shapes that `choice_of` may choose."""
    choice = choice_of(decoding)
    return [choice] if isinstance(choice, Tree) else [tree for tree in MENU if tree]


def tree(rule: str | None = None) -> Callable[[Models, Decoding, Wrap], Sampler]:
    """A tree of guesses with this verification rule; None: that of the flags."""

    def make(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
        model = cast(TreeModel, models.get("restricted") or models["draft"])
        drafter = wrap(TreeDrafter(model, decoding.draft_temperature, decoding.draft_top_p))
        target = cast(TreeModel, models["target"])
        choice, verify = choice_of(decoding), TREE_RULES[rule or decoding.tree_rule]
        return lambda prefixes, max_len, sampling, end_of_text=None, generator=None, callback=None: treeSampling(
            prefixes, target, drafter, max_len, choice, sampling, end_of_text, generator, callback, verify
        )

    return make


def tree_graphs(decoding: Decoding) -> Plans:
    """A graph that scores trees of each size, and one that grows each shape; for chains, those of chains."""
    shapes, chains = ([each for each in shapes_of(decoding) if each.is_chain is chain] for chain in (False, True))
    return {
        "target": Plan(
            widths=frozenset(chain.size + 1 for chain in chains),
            draws=frozenset({1}),
            nodes=frozenset(shape.size + 1 for shape in shapes),
        ),
        "draft": Plan(draws=frozenset(chain.size for chain in chains), read=2, trees=frozenset(shapes)),
    }


def tree_rounds(decoding: Decoding) -> frozenset[int]:
    """Guesses of the chains among the shapes, whose rounds are one graph each."""
    return frozenset(shape.size for shape in shapes_of(decoding) if shape.is_chain)


def is_fixed(decoding: Decoding) -> bool:
    """Whether the shape does not follow the clock: then the seed fixes the tokens."""
    return decoding.tree not in (None, "auto")


# The method "speculative": a tree if --tree is given, else a chain.


def as_flags_say(models: Models, decoding: Decoding, wrap: Wrap) -> Sampler:
    """Speculative sampling as the flags say."""
    return (tree() if decoding.tree else speculative())(models, decoding, wrap)


def graphs_as_flags_say(decoding: Decoding) -> Plans:
    """The graphs of `as_flags_say`."""
    return (tree_graphs if decoding.tree else rounds_of())(decoding)


def rounds_as_flags_say(decoding: Decoding) -> frozenset[int]:
    """Guesses of its rounds that are one graph each."""
    return (tree_rounds if decoding.tree else whole_rounds())(decoding)
