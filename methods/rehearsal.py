"""`compile_samplers`: a rehearsal, in which samplers run each kind of round once, so that its graphs are made."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Generator

from decoding.drafter import ChangedDrafter
from decoding.lengthRules import Fixed, LengthRule
from decoding.rows import Rows
from decoding.trees.shapes import FixedTree, TreeChoice
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
        self.lengths = self.trees = None
        self.tokens = 2
        parts = {name: parameter.default for name, parameter in inspect.signature(loop).parameters.items()}
        if loop.func is specSampling:
            # Where a row has no guess, q is 0: the guesses have as many columns as were asked for.
            drafter, gamma = ChangedDrafter(parts["drafter"], widened), parts["gamma"]
            self.lengths = LengthRehearsal(Fixed(gamma) if isinstance(gamma, int) else gamma, drafter.varies)
            sampler = partial(sampler, gamma=self.lengths, drafter=drafter)
            self.tokens += sum(self.lengths.counts) + len(self.lengths.counts)
        elif loop.func is treeSampling:
            tree = parts["tree"]
            self.trees = TreeRehearsal(FixedTree(tree) if isinstance(tree, Tree) else tree)
            sampler = partial(sampler, tree=self.trees)
            self.tokens += sum(tree.depth for tree in self.trees.shapes if tree) + len(self.trees.shapes)
        self.sampler = sampler

    def ends(self, row: int, token: int) -> bool:
        """Whether all rounds are over."""
        return (self.lengths is not None and not self.lengths.left) or (self.trees is not None and not self.trees.left)


class LengthRehearsal(LengthRule):
    """The numbers of guesses that `rule` may choose, one after the other; if they are many, FEW of them.

    varies: whether a drafter may guess fewer.
    """

    def __init__(self, rule: LengthRule, varies: bool) -> None:
        self.rule, self.stop, self.sure = rule, rule.stop, rule.sure
        counts = set(rule.lengths or FEW)
        if isinstance(rule, Fixed):  # Also one that begins with `length` guesses and goes on with any number.
            counts.add(rule.length)
        if (varies or rule.stop) and max(counts) > SHORT:
            counts |= {count for count in FEW if count < max(counts)}
        # The greatest first: after a round without guesses, a draft reads more than in others.
        self.counts = sorted(counts | {0}, reverse=True)
        self.left = list(self.counts)

    def begin(self, rows: Rows) -> None:
        self.rule.begin(rows)
        self.rows = rows

    def gammas(self) -> Sequence[int]:
        count = self.left.pop(0) if self.left else 0
        self.lengths = self.rule.lengths if count in (self.rule.lengths or ()) else None
        return [count] * self.rows.size


class TreeRehearsal(TreeChoice):
    """The shapes that `choice` may choose, and plain decoding, one after the other, the largest first."""

    def __init__(self, choice: TreeChoice) -> None:
        self.shapes = [*sorted(filter(None, choice.shapes), key=lambda tree: -tree.size), None]
        self.left = list(self.shapes)

    def tree(self) -> Tree | None:
        return self.left.pop(0) if self.left else None
