"""`LookupDrafter`: the text so far guesses; `LookupFirst`: it does where it can, and another drafter elsewhere."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import Drafter, Guesses, no_guesses
from decoding.lengthRules import LengthRule
from decoding.rows import Rows, upload
from methods.suffixAutomaton import SuffixAutomaton
from utils import Sampling, UserError


class HitRate:
    """How often a token that was looked up was the next token, for each length of the match. Matches of more than
    LONGEST tokens count as matches of LONGEST.

    Before anything is observed, the rate is n / (n + 4) for a match of n tokens. Novels and articles show about that.
    This first estimate counts as much as PRIOR observations.
    """

    LONGEST, PRIOR = 4, 2

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()
        self.seen: Counter[int] = Counter()

    def learn(self, length: int, hit: bool) -> None:
        """Observe one token after a match of `length` tokens."""
        length = min(length, self.LONGEST)
        self.hits[length] += hit
        self.seen[length] += 1

    def __call__(self, length: int) -> float:
        """The rate for matches of `length` tokens."""
        length = min(length, self.LONGEST)
        return (self.hits[length] + self.PRIOR * length / (length + 4)) / (self.seen[length] + self.PRIOR)


class LookupDrafter(Drafter):
    """The text so far guesses: what followed most often where the longest possible ending of the text occurred before
    (prompt lookup decoding, Saxena 2023; by a suffix automaton, arXiv 2411.10666). No model is needed. q is one-hot, so
    a guess is accepted with probability p.

    ngram: endings of fewer tokens are not looked up.
    worth: a guess must be worth its place in the target's forward. So it is made only if it and all guesses before it
        are right with an estimated chance of `worth` or more. The estimate is the text's `HitRate` in the tokens
        generated so far. Prompts do not count, because a model need not repeat itself as its prompt does.

    What is guessed depends on committed tokens alone, so nothing is dropped after it was drawn.
    """

    varies = True

    def __init__(self, vocabulary: int, ngram: int = 1, worth: float = 0.3) -> None:
        if ngram < 1:
            raise UserError(f"the n-gram of lookup must be 1 or more tokens, not {ngram}")
        self.vocabulary, self.ngram, self.worth = vocabulary, ngram, worth
        self.zeros, self.ones = torch.zeros(0), torch.zeros(0, dtype=torch.long)  # of `one_hot`

    def begin(self, rows: Rows) -> None:
        self.automata: dict[int, SuffixAutomaton] = {}  # {text: its automaton}
        self.rates: dict[int, HitRate] = {}

    def read_prompts(self, rows: Rows) -> None:
        """Read the prompts, and the tokens after them."""
        for row in rows.fresh:
            number = rows.numbers[row]
            self.automata[number], self.rates[number] = SuffixAutomaton(rows.prompts[number]), HitRate()
        self.read(rows)

    def read(self, rows: Rows) -> None:
        """Extend the automata by the tokens that stay, and learn whether looking up would have found them."""
        for number, text, committed in zip(rows.numbers, rows.texts, rows.committed_lengths):
            automaton = self.automata[number]
            for token in text[automaton.size : committed]:
                match = automaton.continued(automaton.whole())
                if match.length:
                    self.rates[number].learn(match.length, automaton.continuation(match) == token)
                automaton.append(token)

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """As many guesses as the row with most has."""
        return self.guesses(rows, self.find(rows, gammas))

    def find(self, rows: Rows, gammas: Sequence[int]) -> list[list[int]]:
        """The guesses of each row, at most as many as its gamma; a row that has ended has none."""
        self.read(rows)
        return [
            [] if ended else self.after(number, text, gamma)
            for number, text, ended, gamma in zip(rows.numbers, rows.texts, rows.ended, gammas)
        ]

    def after(self, number: int, text: Sequence[int], gamma: int) -> list[int]:
        """At most `gamma` guesses after `text`, of which its automaton has read the beginning."""
        automaton, rate = self.automata[number], self.rates[number]
        tail = text[automaton.size :]
        match = automaton.whole()
        for token in tail:
            match = automaton.follow(match, token)
        match = automaton.continued(match)
        guesses: list[int] = []
        chance = rate(match.length)
        while len(guesses) < gamma and match.length >= self.ngram and chance >= self.worth:
            guesses.append(automaton.continuation(match))
            match = automaton.continued(automaton.follow(match, guesses[-1]))
            chance *= rate(match.length)
        return guesses

    def guesses(self, rows: Rows, found: Sequence[Sequence[int]]) -> Guesses:
        """What `find` found, as tensors."""
        width = max(map(len, found))
        if width == 0:
            return no_guesses(rows, self.vocabulary)
        padded = upload([[*tokens, *[-1] * (width - len(tokens))] for tokens in found], rows.device)
        drafts = padded.clamp(min=0)
        return Guesses(drafts, self.one_hot(drafts, padded >= 0), list(map(len, found)))

    def one_hot(self, drafts: Tensor, guessed: Tensor) -> Tensor:
        """q, float32 `[B, n, V]`: 1 at each of `drafts[B, n]` that is `guessed`, and 0 elsewhere.

        Its memory is used again in each round: of millions of numbers, few change.
        """
        numbers = drafts.numel() * self.vocabulary
        if len(self.zeros) < numbers or self.zeros.device != drafts.device:
            self.zeros = torch.zeros(numbers, device=drafts.device)
        else:
            self.zeros[self.ones] = 0
        self.ones = drafts.flatten() + torch.arange(0, numbers, self.vocabulary, device=drafts.device)
        self.zeros[self.ones] = guessed.flatten().float()
        return self.zeros[:numbers].view(*drafts.shape, self.vocabulary)


class LookupFirst(Drafter):
    """`lookup` guesses for each row that has a match, and `drafter` for the others.

    Who guesses for a row depends on its committed tokens alone, so no guess is dropped after it was drawn. A round in
    which all rows match needs no forward of `drafter`; it reads what it missed when it is asked again.
    """

    varies = True

    def __init__(self, lookup: LookupDrafter, drafter: Drafter) -> None:
        self.lookup, self.drafter, self.models = lookup, drafter, drafter.models

    def begin(self, rows: Rows) -> None:
        self.lookup.begin(rows)
        self.drafter.begin(rows)
        self.known: dict[int, int] = {}  # {text: the first of its tokens, which `drafter` has read, and which stayed}
        self.asked: set[int] = set(range(len(rows.prompts)))  # The texts it guessed for in the round before.
        self.replaced = 0

    def read_prompts(self, rows: Rows) -> None:
        self.lookup.read_prompts(rows)
        self.drafter.read_prompts(rows)

    def rewind(self, count: int) -> None:
        self.replaced += count

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """The guesses of both."""
        found = self.lookup.find(rows, gammas)
        others = [0 if guesses or ended else gamma for guesses, ended, gamma in zip(found, rows.ended, gammas)]
        missed = self.missed(rows, others)
        if not any(others):
            return self.lookup.guesses(rows, found)
        self.drafter.rewind(missed - 2)
        drafted = self.drafter.draft(rows, others, sampling, length).limited(others)
        if not any(found):
            return drafted
        looked_up = upload(list(map(bool, found)), rows.device)[:, None]
        copied = self.lookup.guesses(rows, found)
        width = max(copied.drafts.shape[1], drafted.drafts.shape[1])
        copied, drafted = widened(copied, width), widened(drafted, width)
        return Guesses(
            torch.where(looked_up, copied.drafts, drafted.drafts),
            torch.where(looked_up[..., None], copied.q, drafted.q),
            [len(tokens) or gamma for tokens, gamma in zip(found, others)],
        )

    def missed(self, rows: Rows, gammas: Sequence[int]) -> int:
        """How many of the last tokens `drafter` must read: at least two, as in any round. gammas: how many guesses it
        is asked for."""
        texts = dict(zip(rows.numbers, rows.texts))
        unread = {}
        for number, text in texts.items():
            # Of what it guessed itself it has read all but the last token, and not the target's own token after it.
            stayed, known = len(text) - 2 - self.replaced, self.known.get(number, 0)
            self.known[number] = stayed if number in self.asked else min(known, stayed)
            unread[number] = len(text) - self.known[number]
        asked = {number for number, gamma in zip(rows.numbers, gammas) if gamma}
        missed = max((unread[number] for number in asked), default=0)
        for number, count in unread.items():
            if count <= missed:
                self.known[number] += count
        # The texts of rows that come later are new to it: their prompts are read when they come.
        self.asked, self.replaced = asked | (self.asked - self.known.keys()), 0
        return missed


def widened(guesses: Guesses, width: int) -> Guesses:
    """The same guesses in tensors of `width` columns. Where a row has no guess, q is 0."""
    missing = width - guesses.drafts.shape[1]
    limits = guesses.limits or [guesses.drafts.shape[1]] * len(guesses.drafts)
    return Guesses(F.pad(guesses.drafts, (0, missing)), F.pad(guesses.q, (0, 0, 0, missing)), limits)
