"""`CascadeDrafter`: a speculative sampler guesses for another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import specSampling
from decoding.drafter import Drafter, Fixed, Guesses, LengthRule, no_guesses
from decoding.model import Model
from decoding.rows import Rows
from decoding.verification import VerificationRule, token_rule
from methods.drafters import DrafterWithModel
from utils import Sampling


class InnerRows(Rows):
    """The rows of a sampler that guesses for `outer`: the committed tokens of `outer`, and the guesses after them.

    A row ends when it has the requested number of guesses, whatever they are, so no text ends at a guess.
    """

    def __init__(self, outer: Rows, models: Sequence[Model]) -> None:
        super().__init__(outer.prompts, outer.max_len, models, None, None, outer.spare, outer.generator, outer.batch)

    def sync(self, outer: Rows, wanted: Sequence[int], unread: int = 0) -> None:
        """Take over the rows of `outer` and drop all guesses. wanted: guesses for each row. unread: committed tokens
        before each row's last one that the target of these rows has not read."""
        self.numbers, self.fresh, self.sequence = list(outer.numbers), outer.fresh, outer.sequence.clone()
        self.texts, self.wanted, self.unread = [list(text) for text in outer.texts], wanted, unread
        self.ended = [ended or not count for ended, count in zip(outer.ended, wanted)]
        self.tokens: list[list[int]] = [[] for _ in outer.tokens]
        self.lengths, self.going = self.state()
        self.committed_by_outer = outer.committed_lengths

    @property
    def committed_lengths(self) -> list[int]:
        return self.committed_by_outer

    def grow(self, row: int, tokens: list[int], drafted: int, accepted: int, now: float) -> None:
        super().grow(row, tokens, drafted, accepted, now)
        self.ended[row] = len(self.tokens[self.numbers[row]]) >= self.wanted[row]


class CascadeDrafter(DrafterWithModel):
    """A speculative sampler guesses: `model` is its target, and `drafter` (possibly another cascade) guesses for it.

    Its tokens are distributed exactly as `model`'s own, and `model`'s distributions are the q of its guesses. So a
    cascade is a recursion, not another algorithm (staged speculative decoding; Spector and Re, arXiv 2308.04623).
    length: gamma of the inner sampler, or its draft-length rule.
    """

    def __init__(
        self, model: Model, drafter: Drafter, length: int | LengthRule = 4, verify: VerificationRule = token_rule
    ) -> None:
        super().__init__(model)
        self.drafter, self.verify = drafter, verify
        self.length = length if isinstance(length, LengthRule) else Fixed(length)
        self.models = [model, *drafter.models]

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        self.inner = InnerRows(rows, self.models)
        self.drafter.begin(self.inner)
        self.length.begin(self.inner)

    def read_prompts(self, rows: Rows) -> None:
        super().read_prompts(rows)
        self.inner.sync(rows, [0] * rows.size)
        self.drafter.read_prompts(self.inner)

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """Run rounds of the inner sampler until every row has its tokens.

        Surplus tokens of a row are dropped unseen: how many tokens are used does not depend on what they are. A
        rule's `stop` is not called, because several tokens come at a time.
        """
        most = max(gammas)
        if most == 0:
            self.behind += 1
            return no_guesses(rows, self.model.vocabulary)
        self.drafter.rewind(self.behind)
        self.inner.sync(rows, gammas, self.unread(most))
        shape = rows.size, most + 1, self.model.vocabulary  # one to spare
        q = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        while not all(self.inner.ended):
            first = self.inner.lengths - rows.lengths
            p, accepted = specSampling.advance(self.inner, self.model, self.drafter, self.length, sampling, self.verify)
            for j in range(p.shape[1]):
                at = torch.where(j <= accepted, first + j, most).clamp(max=most)
                q.scatter_(1, at[:, None, None].expand(-1, 1, q.shape[-1]), p[:, j : j + 1])
        return Guesses(self.inner.sequence.gather(1, rows.positions(0, most)), q[:, :most])
