"""`compile_samplers`: a rehearsal, in which samplers run each kind of round once, so that its graphs are made."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Generator

from decoding.drafter import ChangedDrafter
from decoding.lengthRules import Additive, Fixed, FixedTree, LengthRule
from decoding.rows import Rows
from decoding.trees.tree import Tree
from engine.cachedModel import CachedModel
from engine.compiledModel import CompiledModel
from engine.compiling import is_compiled, make_graphs
from methods.lookup import widened
from methods.samplers import Sampler
from methods.treeSampling import treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling

FEW = (1, 2, 3, 4, 6, 10)  # Numbers of guesses that have graphs where a round may have any number of them.
SHORT = 4  # As many guesses, and the token before them, are scored in about the time of one token: none is too many.
PROMPT = 16  # Tokens of the prompt. No two are the same, so there is nothing to look up in it.


def compile_samplers(
    samplers: Iterable[Sampler],
    models: Iterable[CachedModel],
    prompt: Sequence[int],
    sampling: Sampling = Sampling(),
    rows: int | Iterable[int] = 1,
    follow: Callable[[Any], Iterable[Any]] = iter,
) -> float | None:
    """Make the graphs of the compiled ones of `models` that these samplers need for batches of `rows` rows, or of each
    of these numbers of rows.

    prompt: token ids, of which some are used. follow, and the result: see `engine.compiling.make_graphs`. On a CPU
    nothing needs to be made.
    """
    models = list(models)
    works = [model for model in models if isinstance(model, CompiledModel)]
    short = list(dict.fromkeys(prompt))[:PROMPT]

    def rehearse() -> None:
        for sampler, size in itertools.product(samplers, [rows] if isinstance(rows, int) else rows):
            rehearsal = Rehearsal(sampler)
            room = min(model.context for model in works) - len(short)
            generator = Generator(works[0].device).manual_seed(0)
            rehearsal.sampler(
                [short] * size,
                max_len=min(rehearsal.tokens, room),
                sampling=sampling,
                end_of_text=rehearsal.ends,
                generator=generator,
            )

    seconds = make_graphs(works, rehearse, follow) if works else 0.0
    return seconds if all(map(is_compiled, models)) else None


class Rehearsal:
    """A sampler that runs each kind of round that `sampler` may run, once, and then ends.

    tokens: how many it may need.
    """

    def __init__(self, sampler: Any) -> None:
        loop = sampler
        while loop.func not in (regrSampling, specSampling, treeSampling):
            loop = loop.args[-1]  # the sampler that it wraps
        self.shapes: ShapeRehearsal | None = None
        self.tokens = 2
        parts = {name: parameter.default for name, parameter in inspect.signature(loop).parameters.items()}
        if loop.func is specSampling:
            # Where a row has no guess, q is 0: the guesses have as many columns as were asked for.
            drafter, gamma = ChangedDrafter(parts["drafter"], widened), parts["gamma"]
            self.shapes = ShapeRehearsal(Fixed(gamma) if isinstance(gamma, int) else gamma, drafter.varies)
            sampler = partial(sampler, gamma=self.shapes, drafter=drafter)
        elif loop.func is treeSampling:
            tree = parts["tree"]
            self.shapes = ShapeRehearsal(FixedTree(tree) if isinstance(tree, Tree) else tree)
            sampler = partial(sampler, tree=self.shapes)
        if self.shapes:
            self.tokens += sum(tree.depth + 1 for tree in self.shapes.shapes)
        self.sampler = sampler

    def ends(self, row: int, token: int) -> bool:
        """Whether this is the last round."""
        return self.shapes is not None and len(self.shapes.left) < 2


class ShapeRehearsal(LengthRule):
    """The shapes that `rule` may choose, and plain decoding, one after the other; if they are many, chains of FEW.

    varies: whether a drafter may guess fewer tokens.
    """

    def __init__(self, rule: LengthRule, varies: bool = False) -> None:
        self.rule, self.stop, self.sure = rule, rule.stop, rule.sure
        shapes = {Tree.chain(0), *(rule.shapes or map(Tree.chain, FEW))}
        if isinstance(rule, Additive):  # It begins with that many.
            shapes.add(Tree.chain(rule.length))
        longest = max(tree.size for tree in shapes)
        if (varies or rule.stop) and longest > SHORT:
            shapes |= {Tree.chain(count) for count in FEW if count < longest}
        # The greatest first: after a round without guesses, a draft reads more than in others.
        self.shapes: list[Tree] = sorted(shapes, key=lambda tree: -tree.size)
        self.left = list(self.shapes)

    def begin(self, rows: Rows) -> None:
        self.rule.begin(rows)
        self.rows = rows

    def shape(self) -> Tree:
        return self.left[0]

    def gammas(self) -> Sequence[int]:
        return [self.shape().depth] * self.rows.size

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        self.left = self.left[1:] or self.left
