"""`CascadeDrafter`: a speculative sampler guesses for another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import specSampling
from decoding.drafter import Drafter, Guesses, no_guesses
from decoding.lengthRules import Fixed, LengthRule
from decoding.model import Model
from decoding.rows import Record, Rows
from decoding.verification import VerificationRule, token_rule
from methods.drafters import DrafterWithModel
from utils import Sampling


class InnerRows(Rows):
    """The rows of `outer`, for a sampler that guesses for `outer`. They follow `outer`. A row ends when it has as many
    tokens beyond those of `outer` as are wanted."""

    def __init__(self, outer: Rows, target: Model) -> None:
        vars(self).update(vars(outer))
        self.target = target
        self.max_len, self.end_of_text, self.callback = 1 << 60, None, None
        self.records = [Record() for _ in outer.records]

    def follow(self, outer: Rows, wanted: Sequence[int], unread: int = 0) -> None:
        """Take over the committed tokens of `outer` and forget those committed here beyond them. wanted: tokens of each
        row. unread: how many before the last one this target has not read."""
        self.sequence, self.numbers, self.fresh = outer.sequence.clone(), list(outer.numbers), outer.fresh
        self.texts, self.wanted = [list(text) for text in outer.texts], wanted
        self.ended = [ended or not count for ended, count in zip(outer.ended, wanted)]
        self.lengths, self.going = self.state()
        self.tokens = [[] for _ in outer.tokens]
        self.unread, self.outer_settled = unread, outer.settled

    @property
    def settled(self) -> list[int]:
        """What the outermost rows have committed."""
        return self.outer_settled

    def grow(self, row: int, tokens: list[int], drafted: int, accepted: int, now: float) -> None:
        super().grow(row, tokens, drafted, accepted, now)
        self.ended[row] = len(self.tokens[self.numbers[row]]) >= self.wanted[row]


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
        self.length.begin(self.inner)

    def read_prompts(self, rows: Rows) -> None:
        super().read_prompts(rows)
        self.inner.follow(rows, [0] * rows.size)
        self.drafter.read_prompts(self.inner)

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """Rounds of its own until every row has its tokens.

        What a row has beyond them is dropped unseen: how many tokens are used does not depend on what they are. A
        rule's `stop` is not asked, because the tokens come several at a time.
        """
        most = max(gammas)
        if most == 0:
            self.behind += 1
            return no_guesses(rows, self.model.vocabulary)
        self.drafter.rewind(self.behind)
        self.inner.follow(rows, gammas, self.unread(most))
        q = torch.zeros(rows.size, most + 1, self.model.vocabulary, device=rows.device)  # one to spare
        while not all(self.inner.ended):
            first = self.inner.lengths - rows.lengths
            p, accepted = specSampling.advance(self.inner, self.model, self.drafter, self.length, sampling, self.verify)
            for j in range(p.shape[1]):
                at = torch.where(j <= accepted, first + j, most).clamp(max=most)
                q.scatter_(1, at[:, None, None].expand(-1, 1, q.shape[-1]), p[:, j : j + 1])
        return Guesses(self.inner.sequence.gather(1, rows.positions(0, most)), q[:, :most])
