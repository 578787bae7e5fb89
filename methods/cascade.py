"""`CascadeDrafter`: a speculative sampler guesses for another one."""

from __future__ import annotations

import torch
from torch import Generator

import specSampling
from decoding.drafter import Drafter, Guesses, no_guesses
from decoding.lengthRules import Fixed, LengthRule
from decoding.model import Model
from decoding.rows import Record, Rows
from decoding.verification import VerificationRule, token_rule
from methods.drafters import DrafterWithModel
from utils import Sampling


class InnerRows(Rows):
    """Rows with the prompts of `outer`, for a sampler that guesses for `outer`. They follow `outer` and never end."""

    def __init__(self, outer: Rows, target: Model) -> None:
        vars(self).update(vars(outer))
        self.target = target
        self.max_len, self.end_of_text, self.callback = 1 << 60, None, None
        self.sequence, self.records = outer.sequence.clone(), [Record() for _ in outer.records]
        self.follow(outer)

    def follow(self, outer: Rows, unread: int = 0) -> None:
        """Take over the committed tokens of `outer` and forget those committed here beyond them. unread: how many
        before the last one this target has not read."""
        self.sequence.copy_(outer.sequence)
        self.lengths, self.going = outer.lengths, outer.going
        self.texts, self.ended = [list(text) for text in outer.texts], list(outer.ended)
        self.tokens = [[] for _ in outer.tokens]
        self.unread, self.outer_settled = unread, outer.settled

    @property
    def settled(self) -> list[int]:
        """What the outermost rows have committed."""
        return self.outer_settled

    def ahead_of(self, outer: Rows) -> int:
        """Tokens committed here beyond `outer`, in the row that has fewest and has not ended."""
        return min(
            len(text) - len(committed)
            for text, committed, ended in zip(self.texts, outer.texts, outer.ended)
            if not ended
        )


class CascadeDrafter(DrafterWithModel):
    """A speculative sampler guesses: `model` is its target, and `drafter` (possibly another cascade) guesses for it.

    Its tokens are distributed exactly as `model`'s own, and `model`'s distributions are the q of its guesses. So a
    cascade is a recursion, not another algorithm (staged speculative decoding; Spector and Re, arXiv 2308.04623).
    length: the draft-length rule of the inner sampler.
    """

    def __init__(
        self, model: Model, drafter: Drafter, length: LengthRule | None = None, verify: VerificationRule = token_rule
    ) -> None:
        super().__init__(model)
        self.drafter, self.verify = drafter, verify
        self.length = length or Fixed(4)
        self.models = [model, *drafter.models]

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        self.inner = InnerRows(rows, self.model)
        self.drafter.begin(self.inner)
        self.length.begin(rows)

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """Rounds of its own until every row has `gamma` tokens.

        What a row has beyond them is dropped unseen: how many tokens are used does not depend on what they are. A
        rule's `stop` is not asked, because the tokens come several at a time.
        """
        if gamma == 0:
            self.behind += 1
            return no_guesses(rows, self.model.vocabulary)
        self.drafter.rewind(self.behind)
        self.inner.follow(rows, self.unread())
        q = torch.zeros(len(rows.tokens), gamma + 1, self.model.vocabulary, device=rows.device)  # one to spare
        while self.inner.ahead_of(rows) < gamma:
            first = self.inner.lengths - rows.lengths
            p, accepted = specSampling.advance(
                self.inner, self.model, self.drafter, self.length, sampling, self.verify, generator
            )
            for j in range(p.shape[1]):
                at = torch.where(j <= accepted, first + j, gamma).clamp(max=gamma)
                q.scatter_(1, at[:, None, None].expand(-1, 1, q.shape[-1]), p[:, j : j + 1])
        return Guesses(self.inner.sequence.gather(1, rows.positions(0, gamma)), q[:, :gamma])
