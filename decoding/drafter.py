"""`Drafter` guesses the next tokens; `Guesses` are its result for one round; `LengthRule` says how many it may guess,
`Fixed` the same number in each round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoding.rows import Rows
from decoding.tree import Tree, depths_of
from utils import Sampling, UserError, not_finite, upload

if TYPE_CHECKING:
    from decoding.model import Model


@dataclass(frozen=True)
class Guesses:
    """The guesses of one round: a chain of n, or a tree with n nodes beside the root.

    drafts: int64 `[B, n]`.
    q: float32 `[B, n, V]`, the distributions the drafts were drawn from. Siblings of a tree are drawn without
        replacement: that of a later one is q without the earlier ones, renormalised. Where a row has no guess, q is 0.
        It is valid until the drafter guesses again.
    limits: the depth of the deepest guess that each row may have, if the host knows it; None: that of the last one.
    tree: the shape; None: a chain.
    """

    drafts: Tensor
    q: Tensor
    limits: Sequence[int] | None = None
    tree: Tree | None = None

    def check(self, vocabulary: int) -> None:
        """Raise UserError unless q is float32 `[B, n, vocabulary]`, as the verification reads it."""
        wanted = (*self.drafts.shape, vocabulary)
        if self.q.shape != wanted or self.q.dtype != torch.float32:
            found = f"{self.q.dtype} {list(self.q.shape)}".removeprefix("torch.")
            raise UserError(f"a drafter's q is {found}, and should be float32 {list(wanted)}")

    def of_drafts(self) -> Tensor:
        """q of each draft, float32 `[B, n]`; 0 where a row has no guess."""
        return self.q.gather(-1, self.drafts[..., None])[..., 0]

    def counts(self) -> Tensor:
        """How many guesses each row could accept, int64 `[B]`; -1 if one was drawn from a q of nan."""
        if self.drafts.shape[1] == 0:
            return self.drafts.new_zeros(len(self.drafts))
        q_x = self.of_drafts()  # A distribution is nan everywhere or nowhere.
        guessed = q_x > 0
        counts = guessed.sum(1) if self.tree is None else (guessed * depths_of(self.tree, q_x.device)).amax(1)
        return counts.masked_fill_(q_x.isnan().any(1), -1)

    def limited(self, gammas: Sequence[int]) -> Guesses:
        """The same guesses, where row i keeps only those down to depth `gammas[i]`: q is 0 beyond them."""
        count, device = self.drafts.shape[1], self.drafts.device
        before = list(self.limits or [self.tree.depth if self.tree else count] * len(gammas))
        limits = [min(pair) for pair in zip(gammas, before)]
        if limits == before:
            return self
        depths = depths_of(self.tree, device) if self.tree else torch.arange(1, count + 1, device=device)
        within = depths <= upload(gammas, device)[:, None]
        return replace(self, q=self.q * within[..., None], limits=limits)


# observer(rows, guesses, p, last): called after each round of a sampler, verified and not committed yet.
# p: float32 `[B, n + 1, V]`, the target's distributions after node 0, the last committed token, and after nodes 1 to n,
# the guesses. last: int64 `[B]`, the last accepted node of each row: in a chain, how many guesses were accepted.
Observer = Callable[[Rows, Guesses, Tensor, Tensor], object]


def no_guesses(rows: Rows, vocabulary: int) -> Guesses:
    """Empty guesses: `[B, 0]` and `[B, 0, V]`."""
    drafts = rows.sequence.new_zeros(rows.size, 0)
    return Guesses(drafts, torch.zeros(*drafts.shape, vocabulary, dtype=torch.float32, device=rows.device))


class Drafter(ABC):
    """Guesses tokens: a draft model, prompt lookup, a cascade of samplers (methods/).

    models: the models that must be able to read the rows. varies: whether it may guess fewer tokens than
    requested.
    """

    models: Sequence[Model] = ()
    varies = False

    def not_finite(self) -> UserError:
        """The UserError for guesses that were drawn from a q of nan."""
        if not self.models:
            return UserError(f"the drafter {type(self).__name__} gives a q that is not finite (nan or inf)")
        return not_finite(self.models[0].name, self.models[0].dtype)

    def begin(self, rows: Rows) -> None:
        """Start a new batch, or a queue of texts."""
        return

    def read_prompts(self, rows: Rows) -> None:
        """Read the prompts of the fresh rows."""
        return

    def rewind(self, count: int) -> None:
        """Mark the last `count` tokens read as replaced, in addition to those of the previous round."""
        return

    @abstractmethod
    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """Draw at most `gammas[i]` guesses for row i, with the distributions they were drawn from. `length` may stop a
        row's guessing early."""


class LengthRule(ABC):
    """How many tokens to guess in each round, and in `methods.treeSampling` in which shape.

    `lengthRules.RULES` names the rules. The first sentence of a rule's docstring is its help. Of a rule's parameters,
    `length` is gamma, with the default that --gamma has for it; the others have the names and values of fields of
    `methods.samplers.Decoding`.

    A rule may look at committed tokens, past rounds, times, and guesses already drawn. A guess once drawn is always
    submitted to verification. This keeps every rule lossless.

    shapes: what it may choose; None: chains of any length.
    stop: `stop(q_x)` is called after each guess with its probability `q_x[B]`, float32. Returns which rows stop
        guessing, bool `[B]`. None: never called.
    sure: `sure(p_x)` is called after each round with the target's probability `p_x[B]`, float32, of the last token it
        drew. Its result, bool `[B]`, is passed to `learn`. None: never called.
    """

    shapes: Sequence[Tree] | None = None
    stop: Callable[[Tensor], Tensor] | None = None
    sure: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def begin(self, rows: Rows) -> None:
        """Start a new batch, or a queue of texts."""

    @abstractmethod
    def gammas(self) -> Sequence[int]:
        """For the round that begins: the most tokens to guess for each row; in a tree, the depth of the deepest."""

    def shape(self) -> Tree:
        """The shape of the round that begins, the same until `learn`. A rule with several shapes overrides this."""
        return self.shapes[0] if self.shapes else Tree.chain(max(self.gammas()))

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        """Learn from the round that ended.

        drafted: {text: tokens guessed}, of the texts that had not ended; in a tree, the depth of the deepest.
        accepted: {text: guesses accepted}; in a tree, the number of the last accepted node, or 0.
        sure: {text: the result of `sure` for the token that the target drew last}, if the rule has a `sure`.
        """
        return


def check_gamma(length: int) -> int:
    """gamma, if a rule can have it. Raises UserError otherwise."""
    if not isinstance(length, Integral) or length < 1:
        raise UserError(f"gamma must be a whole number of at least 1, not {length!r}")
    return length


class Fixed(LengthRule):
    """Always gamma tokens. length: gamma, or a tree for `methods.treeSampling`."""

    def __init__(self, length: int | Tree = 4) -> None:
        tree = length if isinstance(length, Tree) else Tree.chain(check_gamma(length))
        self.length, self.shapes = tree.depth, [tree]

    def begin(self, rows: Rows) -> None:
        self.rows, self.next = rows, [self.length] * len(rows.prompts)  # of each text

    def gammas(self) -> Sequence[int]:
        return [self.next[text] for text in self.rows.numbers]
