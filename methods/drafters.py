"""The ways to guess what the target will say.

A drafter has `models` (what must read the rows), `begin(rows)` once, and each round `draft(rows, gamma, sampling,
generator, stop)`, which returns at most `gamma` guesses `[B, n]` and the distributions `q[B, n, V]` each was really
drawn from; where a row has no guess, q is 0. `stop(q_x)` (see draftLength.py) says which rows guess no further.
Where drafter and target are one graph, `round_at_once(target, rows, gamma, sampling, generator)` returns its guesses, q
and p, the target's distributions before each guess and after the last; else None, or a drafter lacks it.
`rewind(n)` says that up to n of the last tokens it knows were replaced, beside those of the round before.
"""

import torch

import specSampling
from decoding.draftLength import Fixed
from decoding.rounds import run
from decoding.verification import token_rule
from utils import UserError


class ModelDrafter:
    """A smaller model of the same vocabulary guesses, one token at a time."""

    def __init__(self, model):
        self.model = model
        self.models = [model]

    def begin(self, rows):
        """Read the prompts."""
        self.model.read_prompt(rows)
        self.behind = 1

    def rewind(self, count):
        self.behind += count

    def draft(self, rows, gamma, sampling, generator=None, stop=None):
        """Guess the next `gamma` tokens of each row.

        The last two committed tokens are read again: the draft never saw the round's last token, and after full
        acceptance not its own last guess either. Two tokens cost what one costs. A round without guesses leaves it one
        more behind.
        """
        if gamma == 0:
            self.behind += 1
            return nothing(rows, self.model.vocabulary)
        block, self.behind = 1 + self.behind, 1
        seen = rows.seen(self.model.vocabulary, sampling)
        going = torch.tensor([not ended for ended in rows.ended], device=rows.device) if stop else None
        tokens, positions = rows.last(block, gamma - 1)
        drafts, q = run(self.model, tokens, positions, gamma, sampling, generator, seen, stop, going)
        return drafts.clamp_(max=self.model.vocabulary - 1), q  # a guess from nan is no token: `advance` tells

    def round_at_once(self, target, rows, gamma, sampling, generator=None):
        """`draft`, and what `target` says of it."""
        if gamma and self.behind == 1 and sampling.repetition_penalty == 1:
            return target.round_at_once(self.model, *rows.last(2, gamma), sampling, generator)


class LookupDrafter:
    """The text so far guesses: what followed the last time its last `ngram` tokens (or fewer, down to one) occurred
    (prompt lookup decoding; Saxena 2023). No model; q is one-hot, so a guess stands with probability p."""

    models = ()

    def __init__(self, vocabulary, ngram=3):
        if ngram < 1:
            raise UserError(f"the n-gram of lookup must be 1 or more tokens, not {ngram}")
        self.vocabulary, self.ngram = vocabulary, ngram

    def begin(self, rows):
        pass

    def rewind(self, count):
        pass

    def draft(self, rows, gamma, sampling, generator=None, stop=None):
        """As many guesses as the row with most has."""
        texts = [text[:length] for text, length in zip(rows.sequence.tolist(), rows.lengths.tolist())]
        guesses = [[] if ended else self.after(text)[:gamma] for text, ended in zip(texts, rows.ended)]
        width = max(map(len, guesses))
        if width == 0:
            return nothing(rows, self.vocabulary)
        drafts = torch.tensor(
            [guess + text[-1:] * (width - len(guess)) for guess, text in zip(guesses, texts)], device=rows.device
        )
        own = torch.tensor([[i < len(guess) for i in range(width)] for guess in guesses], device=rows.device)
        return drafts, torch.nn.functional.one_hot(drafts, self.vocabulary) * own[..., None].float()

    def after(self, text):
        """What followed the latest earlier occurrence of the longest ending found twice."""
        for n in range(min(self.ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    return text[start + n :]
        return []


class CascadeDrafter:
    """A speculative sampler guesses: `model` is its target, `drafter` (a cascade again, if you like) guesses for it.

    Its tokens are distributed exactly as `model`'s own, and `model`'s distributions are the q of what it proposes: the
    cascade is a recursion, not another algorithm (staged speculative decoding; Spector and Re, arXiv 2308.04623).
    length: the draft-length rule (draftLength.py) inside.
    """

    def __init__(self, model, drafter, length=None, verify=token_rule):
        self.model, self.drafter, self.verify = model, drafter, verify
        self.length = length or Fixed(4)
        self.models = [model, *drafter.models]

    def begin(self, rows):
        self.model.read_prompt(rows)
        self.inner = rows.copy(self.model)
        self.drafter.begin(self.inner)
        self.length.begin(len(rows.tokens))
        self.behind = 1

    def rewind(self, count):
        self.behind += count

    def draft(self, rows, gamma, sampling, generator=None, stop=None):
        """Rounds of its own until every row has `gamma` tokens. What a row has beyond them is dropped unseen: how many
        are used does not depend on what they are. `stop` is not asked: the tokens come several at a time."""
        if gamma == 0:
            self.behind += 1
            return nothing(rows, self.model.vocabulary)
        self.inner.follow(rows)
        self.drafter.rewind(self.behind)
        q = torch.zeros(len(rows.tokens), gamma + 1, self.model.vocabulary, device=rows.device)  # one to spare
        while self.fewest(rows) < gamma:
            first = self.inner.lengths - rows.lengths
            p, accepted = specSampling.advance(
                self.inner, self.model, self.drafter, self.length, sampling, self.verify, generator, self.behind
            )
            self.behind = 0
            for j in range(p.shape[1]):
                at = torch.where(j <= accepted, first + j, gamma).clamp(max=gamma)
                q.scatter_(1, at[:, None, None].expand(-1, 1, q.shape[-1]), p[:, j : j + 1])
        self.behind = 1
        return self.inner.sequence.gather(1, rows.positions(0, gamma)), q[:, :gamma]

    def fewest(self, rows):
        """Tokens that the row with fewest has ahead of `rows`."""
        return min(
            ours - theirs for ours, theirs, ended in zip(self.inner._lengths, rows._lengths, rows.ended) if not ended
        )


def nothing(rows, vocabulary):
    """No guesses, in the shapes of some."""
    drafts = rows.sequence.new_zeros(len(rows.tokens), 0)
    return drafts, torch.zeros(*drafts.shape, vocabulary, device=rows.device)
