"""`Drafter` guesses the next tokens; `Guesses` are its result for one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.rows import Rows, upload
from decoding.tree import Tree, depths_of
from utils import Sampling

if TYPE_CHECKING:
    from decoding.lengthRules import LengthRule
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

    def widened(self, width: int) -> Guesses:
        """The same guesses of chains in tensors of `width` columns. Where a row has no guess, q is 0."""
        count = self.drafts.shape[1]
        drafts, q = F.pad(self.drafts, (0, width - count)), F.pad(self.q, (0, 0, 0, width - count))
        return Guesses(drafts, q, self.limits or [count] * len(drafts))


# observer(rows, guesses, p, last): called after each round of a sampler, verified and not committed yet.
# p: float32 `[B, n + 1, V]`, the target's distributions after node 0, the last committed token, and after nodes 1 to n,
# the guesses. last: int64 `[B]`, the last accepted node of each row: in a chain, how many guesses were accepted.
Observer = Callable[[Rows, Guesses, Tensor, Tensor], object]


def no_guesses(rows: Rows, vocabulary: int) -> Guesses:
    """Empty guesses: `[B, 0]` and `[B, 0, V]`."""
    drafts = rows.sequence.new_zeros(rows.size, 0)
    return Guesses(drafts, torch.zeros(*drafts.shape, vocabulary, device=rows.device))


class Drafter(ABC):
    """Guesses tokens: a draft model, prompt lookup, a cascade of samplers (methods/).

    models: the models that must be able to read the rows. varies: whether it may guess fewer tokens than
    requested.
    """

    models: Sequence[Model] = ()
    varies = False

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
