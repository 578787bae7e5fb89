"""`Rows`: the committed tokens of a batch whose rows advance by different amounts."""

import copy
import time

import torch

from decoding.record import Record
from utils import UserError, not_finite


def check_room(prefixes, max_len, models):
    """Raise UserError unless `models` can read every prefix (token ids) and `max_len` tokens more."""
    if max_len < 1:
        raise UserError(f"maxLen must be 1 or more, not {max_len}")
    if not prefixes or not all(prefixes):
        raise UserError("the prompt is empty: give at least one token")
    vocabulary = min(model.vocabulary for model in models)
    if not all(0 <= token < vocabulary for prefix in prefixes for token in prefix):
        raise UserError(f"the prompt holds a token outside the models' vocabulary of {vocabulary}")
    longest, least = max(map(len, prefixes)), min(models, key=lambda model: model.context)
    if longest + max_len > least.context:
        raise UserError(
            f"the prompt's {longest} tokens and maxLen {max_len} exceed the context of {least.name} "
            f"({least.context} tokens): shorten the prompt or lower maxLen"
        )


class Rows:
    """Prefixes of ragged lengths and what has been generated after each.

    prefixes: a list of lists of token ids (or an int tensor `[B, L]`); every row gets at most `max_len` tokens more and
        ends early at `end_of_text`, which is kept as its last token.
    models: the `CachedModel`s that will read the rows, first the one whose tokens they grow by; the shortest context
        and vocabulary among them are the limits.
    callback: called as `callback(row, tokens, guessed)` whenever a row has grown; the first `guessed` of the new tokens
        were guesses that stood, the rest is the target's own.
    Raises UserError before any work when a prefix is empty, holds an unknown token or leaves no room for `max_len`.
    """

    def __init__(self, prefixes, max_len, models, end_of_text=None, callback=None):
        self.start = time.perf_counter()
        prefixes = [list(map(int, prefix)) for prefix in prefixes]
        check_room(prefixes, max_len, models)
        self.max_len, self.end_of_text, self.callback = max_len, end_of_text, callback
        self.target, self.device = models[0], models[0].device
        longest = max(map(len, prefixes))
        self.capacity = longest + max_len
        self.prompt = torch.tensor(
            [prefix + [prefix[-1]] * (longest - len(prefix)) for prefix in prefixes], device=self.device
        )
        # One column more than a row can fill: guesses beyond a row's end are written there and never read.
        self.sequence = self.prompt.new_zeros(len(prefixes), self.capacity + 1)
        self.sequence[:, :longest] = self.prompt
        self._lengths = [len(prefix) for prefix in prefixes]
        self.lengths = self.prompt_lengths = torch.tensor(self._lengths, device=self.device)
        self.tokens = [[] for _ in prefixes]
        self.records = [Record() for _ in prefixes]
        self.ended = [False for _ in prefixes]
        self._offsets = {}

    @property
    def left(self):
        """Tokens each row may still add: 0 where it has ended, or where it guesses for others and is out of room."""
        return [
            0 if ended else min(self.max_len - len(tokens), self.capacity - length)
            for tokens, length, ended in zip(self.tokens, self._lengths, self.ended)
        ]

    @property
    def remaining(self):
        """Tokens the row with most left to do may still add; 0 when all have ended."""
        return max(self.left)

    def positions(self, first, count):
        """Positions `lengths + first ... lengths + first + count - 1`, `[B, count]`.

        They stop at the first and the last position a row can have. The first token may be read again and again; what
        is read at the last position lies past the row's end, so its logits are never used and no later token attends
        to it."""
        return (self.lengths[:, None] + self.offsets(first, count)).clamp_(0, self.capacity - 1)

    def offsets(self, first, count):
        """first ... first + count - 1, made once."""
        if (first, count) not in self._offsets:
            self._offsets[first, count] = torch.arange(first, first + count, device=self.device)
        return self._offsets[first, count]

    def last(self, count, more=0):
        """The last `count` committed tokens of each row, `[B, count]`, where it has fewer its first one repeated; and
        the positions of these and of `more` tokens after them, `[B, count + more]`."""
        positions = self.positions(-count, count + more)
        return self.sequence.gather(1, positions[:, :count]), positions

    def seen(self, vocabulary, sampling):
        """Which tokens each row holds so far: bool `[B, vocabulary]`; None where `sampling` does not ask."""
        if sampling.repetition_penalty == 1:
            return None
        held = torch.arange(self.capacity + 1, device=self.device) < self.lengths[:, None]
        tokens = self.sequence.where(held, self.sequence[:, :1])
        return torch.zeros(len(tokens), vocabulary, dtype=torch.bool, device=self.device).scatter_(1, tokens, True)

    def commit(self, drafts, accepted, token, guessed=None):
        """Add the first `accepted[B]` of `drafts[B, g]` and then `token[B]` to each row that has not ended.

        guessed: bool `[B, g]`, which of the drafts are a row's own guesses (None: all). This is where the host waits
        for the device, once a round. Returns {row: drafted}, {row: accepted} of the rows that had not ended. Raises
        UserError where the token is none: the target's distribution was nan."""
        fresh = torch.cat([drafts, token[:, None]], 1).scatter_(1, accepted[:, None], token[:, None])
        where = self.lengths[:, None] + self.offsets(0, fresh.shape[1])
        self.sequence.scatter_(1, where.clamp_(max=self.capacity), fresh)
        guessed = torch.ones_like(drafts) if guessed is None else guessed
        host = torch.cat([fresh, guessed, accepted[:, None]], 1).tolist()
        now, width = time.perf_counter() - self.start, fresh.shape[1]
        grown = {row: (sum(host[row][width:-1]), host[row][-1]) for row in range(len(host)) if not self.ended[row]}
        for row, (guesses, taken) in grown.items():
            tokens = host[row][:width]
            if tokens[taken] >= self.target.vocabulary:
                raise not_finite(self.target)
            tokens = tokens[: min(taken + 1, self.max_len - len(self.tokens[row]))]
            if self.end_of_text in tokens:
                tokens = tokens[: tokens.index(self.end_of_text) + 1]
            self.tokens[row] += tokens
            self._lengths[row] += len(tokens)
            self.ended[row] = len(self.tokens[row]) == self.max_len or tokens[-1] == self.end_of_text
            record = self.records[row]
            record.times.append(now)
            record.committed.append(len(tokens))
            record.drafted.append(guesses)
            record.accepted.append(taken)
            if self.callback:
                self.callback(row, tokens, min(taken, len(tokens)))
        self.lengths = torch.tensor(self._lengths, device=self.device)
        return tuple({row: counts[which] for row, counts in grown.items()} for which in (0, 1))

    def copy(self, target):
        """Rows with the same prompts for a sampler that guesses for another: they follow these and never end."""
        rows = copy.copy(self)
        rows.target = target
        rows.max_len, rows.end_of_text, rows.callback = 1 << 60, None, None
        rows.sequence, rows.records = self.sequence.clone(), [Record() for _ in self.records]
        rows.follow(self)
        return rows

    def follow(self, rows):
        """Take over the committed tokens of `rows`, forgetting what was committed here beyond them."""
        self.sequence.copy_(rows.sequence)
        self.lengths, self._lengths, self.ended = rows.lengths, list(rows._lengths), list(rows.ended)
        self.tokens = [[] for _ in rows.tokens]
