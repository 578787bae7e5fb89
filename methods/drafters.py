"""The drafters: what guesses the target's next tokens.

A drafter has `models` (the models that must read the rows), `begin(rows)` once, and `draft(rows, gamma, sampling,
generator, length)` in each round. That returns at most `gamma` guesses `[B, n]` and the distributions q `[B, n, V]` each
guess was really drawn from; if a row has no guess, q is 0. `length` is the draft-length rule, which may stop a row's
guessing early (decoding/draftLength.py). `rewind(n)` says that up to n of the last tokens it has read were replaced, in
addition to those of the round before.
"""

from collections.abc import Sequence

import torch
from torch import Generator

import specSampling
from decoding.draftLength import Fixed
from decoding.interfaces import Drafter, Guesses, LengthRule, Model, VerificationRule
from decoding.rounds import guess
from decoding.rows import Rows
from decoding.verification import token_rule
from utils import Sampling, UserError


class ModelDrafter:
    """A smaller model with the target's vocabulary guesses, one token after the other."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.models = [model]

    def begin(self, rows: Rows) -> None:
        """Read the prompts."""
        self.model.read_prompt(rows)
        self.behind = 1

    def rewind(self, count: int) -> None:
        """Read `count` tokens more again in the next round."""
        self.behind += count

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """Guess the next `gamma` tokens of each row.

        The last two committed tokens are read again. The draft has not seen the last token of the round, and after full
        acceptance it has not read its own last guess either. Two tokens cost what one costs. A round without guesses
        leaves the draft one token further behind.
        """
        if gamma == 0:
            self.behind += 1
            return no_guesses(rows, self.model.vocabulary)
        read, self.behind = 1 + self.behind, 1
        return guess(self.model, rows, read, gamma, sampling, generator, length)


class LookupDrafter:
    """The text so far guesses: what followed the last time its last `ngram` tokens (or fewer, down to one) occurred
    (prompt lookup decoding; Saxena 2023). No model is needed. q is one-hot, so a guess is accepted with probability
    p."""

    models: Sequence[Model] = ()

    def __init__(self, vocabulary: int, ngram: int = 3) -> None:
        if ngram < 1:
            raise UserError(f"the n-gram of lookup must be 1 or more tokens, not {ngram}")
        self.vocabulary, self.ngram = vocabulary, ngram

    def begin(self, rows: Rows) -> None:
        """Nothing to read."""

    def rewind(self, count: int) -> None:
        """Nothing to read again."""

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """As many guesses as the row with most has."""
        texts = [text[:end] for text, end in zip(rows.sequence.tolist(), rows.lengths.tolist())]
        guesses = [[] if ended else self.after(text)[:gamma] for text, ended in zip(texts, rows.ended)]
        width = max(map(len, guesses))
        if width == 0:
            return no_guesses(rows, self.vocabulary)
        drafts = torch.tensor(
            [each + text[-1:] * (width - len(each)) for each, text in zip(guesses, texts)], device=rows.device
        )
        own = torch.tensor([[i < len(each) for i in range(width)] for each in guesses], device=rows.device)
        return Guesses(drafts, torch.nn.functional.one_hot(drafts, self.vocabulary) * own[..., None].float())

    def after(self, text: list[int]) -> list[int]:
        """What followed the latest earlier occurrence of the longest ending that occurred before."""
        for n in range(min(self.ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    return text[start + n :]
        return []


class CascadeDrafter:
    """A speculative sampler guesses: `model` is its target, and `drafter` (possibly another cascade) guesses for it.

    Its tokens are distributed exactly as `model`'s own, and `model`'s distributions are the q of its guesses. So a
    cascade is a recursion, not another algorithm (staged speculative decoding; Spector and Re, arXiv 2308.04623).
    length: the draft-length rule of the inner sampler.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        length: LengthRule | None = None,
        verify: VerificationRule = token_rule,
    ) -> None:
        self.model, self.drafter, self.verify = model, drafter, verify
        self.length = length or Fixed(4)
        self.models = [model, *drafter.models]

    def begin(self, rows: Rows) -> None:
        """Read the prompts."""
        self.model.read_prompt(rows)
        self.inner = rows.copy(self.model)
        self.drafter.begin(self.inner)
        self.length.begin(len(rows.tokens))
        self.behind = 1

    def rewind(self, count: int) -> None:
        """Read `count` tokens more again in the next round."""
        self.behind += count

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
        self.inner.follow(rows, self.behind)
        self.drafter.rewind(self.behind)
        q = torch.zeros(len(rows.tokens), gamma + 1, self.model.vocabulary, device=rows.device)  # one to spare
        while self.inner.ahead_of(rows) < gamma:
            first = self.inner.lengths - rows.lengths
            p, accepted = specSampling.advance(
                self.inner, self.model, self.drafter, self.length, sampling, self.verify, generator
            )
            for j in range(p.shape[1]):
                at = torch.where(j <= accepted, first + j, gamma).clamp(max=gamma)
                q.scatter_(1, at[:, None, None].expand(-1, 1, q.shape[-1]), p[:, j : j + 1])
        self.behind = 1
        return Guesses(self.inner.sequence.gather(1, rows.positions(0, gamma)), q[:, :gamma])


def no_guesses(rows: Rows, vocabulary: int) -> Guesses:
    """No guesses, in tensors of the right shapes: `[B, 0]` and `[B, 0, V]`."""
    drafts = rows.sequence.new_zeros(len(rows.tokens), 0)
    return Guesses(drafts, torch.zeros(*drafts.shape, vocabulary, device=rows.device))
