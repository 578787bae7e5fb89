"""`LookupDrafter`: the text so far guesses; `LookupFirst`: it does where it can, and another drafter elsewhere."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator

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
        are right with an estimated chance of `worth` or more. The estimate is the `HitRate` in the tokens generated so
        far, of all rows. Prompts do not count, because a model need not repeat itself as its prompt does.

    What is guessed depends on committed tokens alone, so nothing is dropped after it was drawn.
    """

    varies = True

    def __init__(self, vocabulary: int, ngram: int = 1, worth: float = 0.3) -> None:
        if ngram < 1:
            raise UserError(f"the n-gram of lookup must be 1 or more tokens, not {ngram}")
        self.vocabulary, self.ngram, self.worth, self.rate = vocabulary, ngram, worth, HitRate()

    def begin(self, rows: Rows) -> None:
        """Read the rows."""
        self.automata = [SuffixAutomaton(text[:end]) for text, end in zip(rows.texts, rows.prompt_lengths)]
        self.rate = HitRate()
        self.read(rows)

    def read(self, rows: Rows) -> None:
        """Extend the automata by the tokens that stay, and learn whether looking up would have found them."""
        for automaton, text, settled in zip(self.automata, rows.texts, rows.settled):
            for token in text[automaton.size : settled]:
                match = automaton.continued(automaton.whole())
                if match.length:
                    self.rate.learn(match.length, automaton.continuation(match) == token)
                automaton.append(token)

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """As many guesses as the row with most has."""
        return self.guesses(rows, self.find(rows, gamma))

    def find(self, rows: Rows, gamma: int) -> list[list[int]]:
        """The guesses of each row, at most `gamma`; a row that has ended has none."""
        self.read(rows)
        return [
            [] if ended else self.after(automaton, text[automaton.size :], gamma)
            for automaton, text, ended in zip(self.automata, rows.texts, rows.ended)
        ]

    def after(self, automaton: SuffixAutomaton, tail: Sequence[int], gamma: int) -> list[int]:
        """At most `gamma` guesses after the text of `automaton` and `tail`."""
        match = automaton.whole()
        for token in tail:
            match = automaton.follow(match, token)
        match = automaton.continued(match)
        guesses: list[int] = []
        chance = self.rate(match.length)
        while len(guesses) < gamma and match.length >= self.ngram and chance >= self.worth:
            guesses.append(automaton.continuation(match))
            match = automaton.continued(automaton.follow(match, guesses[-1]))
            chance *= self.rate(match.length)
        return guesses

    def guesses(self, rows: Rows, found: Sequence[Sequence[int]]) -> Guesses:
        """What `find` found, as tensors."""
        width = max(map(len, found))
        if width == 0:
            return no_guesses(rows, self.vocabulary)
        padded = upload([[*tokens, *[-1] * (width - len(tokens))] for tokens in found], rows.device)
        drafts = padded.clamp(min=0)
        q = torch.zeros(*drafts.shape, self.vocabulary, device=rows.device)
        return Guesses(drafts, q.scatter_(-1, drafts[..., None], (padded >= 0).float()[..., None]))


class LookupFirst(Drafter):
    """`lookup` guesses for each row that has a match, and `drafter` for the others.

    Who guesses for a row depends on its committed tokens alone, so no guess is dropped after it was drawn. A round in
    which all rows match needs no forward of `drafter`; it reads what it missed when it is asked again.
    """

    varies = True

    def __init__(self, lookup: LookupDrafter, drafter: Drafter) -> None:
        self.lookup, self.drafter, self.models = lookup, drafter, drafter.models

    def begin(self, rows: Rows) -> None:
        """Read the prompts."""
        self.lookup.begin(rows)
        self.drafter.begin(rows)
        self.known = [0 for _ in rows.texts]  # Tokens of each row that `drafter` has read, and that stayed.
        self.asked = [True for _ in rows.texts]  # Whether it guessed for the row in the round before.
        self.replaced = 0

    def rewind(self, count: int) -> None:
        self.replaced += count

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """The guesses of both."""
        found = self.lookup.find(rows, gamma)
        missed = self.missed(rows, [not (guesses or ended or gamma == 0) for guesses, ended in zip(found, rows.ended)])
        if not any(self.asked):
            return self.lookup.guesses(rows, found)
        self.drafter.rewind(missed - 2)
        drafted = self.drafter.draft(rows, gamma, sampling, generator, length)
        if not any(found):
            return drafted
        looked_up = upload(list(map(bool, found)), rows.device)[:, None]
        copied = self.lookup.guesses(rows, found)
        width = max(copied.drafts.shape[1], drafted.drafts.shape[1])
        copied, drafted = widened(copied, width), widened(drafted, width)
        return Guesses(
            torch.where(looked_up, copied.drafts, drafted.drafts),
            torch.where(looked_up[..., None], copied.q, drafted.q),
        )

    def missed(self, rows: Rows, asked: list[bool]) -> int:
        """How many of the last tokens `drafter` must read: at least two, as in any round. asked: the rows that it
        guesses for now."""
        # Of what it guessed itself it has read all but the last token, and not the target's own token after it.
        stayed = [len(text) - 2 - self.replaced for text in rows.texts]
        self.known = [new if was else min(old, new) for old, new, was in zip(self.known, stayed, self.asked)]
        unread = [len(text) - known for text, known in zip(rows.texts, self.known)]
        missed = max((count for count, now in zip(unread, asked) if now), default=0)
        self.known = [known + count if count <= missed else known for known, count in zip(self.known, unread)]
        self.asked, self.replaced = asked, 0
        return missed


def widened(guesses: Guesses, width: int) -> Guesses:
    """The same guesses in tensors of `width` columns. Where a row has no guess, q is 0."""
    missing = width - guesses.drafts.shape[1]
    return Guesses(F.pad(guesses.drafts, (0, missing)), F.pad(guesses.q, (0, 0, 0, missing)))
