"""`LookupDrafter`: guesses from the text so far; `LookupFirst`: else from another drafter."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from decoding.drafter import Drafter, Guesses, LengthRule, no_guesses
from decoding.rows import Rows
from utils import Sampling, upload


class Continuations:
    """What followed the n-grams of a text, for each n from `ngram` to LONGEST, and how often that was right.

    n-grams longer than LONGEST hardly ever predict better, and each n costs memory: about 300 bytes a token.

    counts: {n-gram: {token: how often it followed}}, in the order in which they followed last.
    right, tested: {n: count}, of the tokens after an n-gram that occurred before, n being as large as possible: how
        often what had followed it most often was the next token. n counts as at most 4.
    """

    LONGEST = 8

    def __init__(self, ngram: int) -> None:
        self.sizes = range(ngram, max(ngram, self.LONGEST) + 1)
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.right: Counter[int] = Counter()
        self.tested: Counter[int] = Counter()
        self.size = 0  # tokens read

    def read(self, text: Sequence[int], test: bool = True) -> None:
        """Read the tokens of `text` that were not read yet. test: whether they count in `rate`."""
        for end in range(self.size, len(text)):
            context, token = tuple(text[max(0, end - self.sizes[-1]) : end]), text[end]
            following = [self.counts.setdefault(context[-n:], {}) for n in self.sizes if n <= len(context)]
            # An n-gram that occurred before, occurred with all its shorter suffixes: the sizes found are consecutive.
            if test and (longest := sum(map(bool, following))):
                n = min(self.sizes[longest - 1], 4)
                self.tested[n] += 1
                self.right[n] += likeliest(following[longest - 1]) == token
            for counts in following:
                counts[token] = counts.pop(token, 0) + 1
        self.size = len(text)

    def rate(self, n: int) -> float:
        """The estimated chance that the token after an n-gram is what followed it most often.

        Before any test it is n / (n + 4), about the rate in novels and articles. This prior counts as two tests.
        """
        n = min(n, 4)
        return (self.right[n] + 2 * n / (n + 4)) / (self.tested[n] + 2)

    def guesses(self, text: Sequence[int], gamma: int, worth: float) -> list[int]:
        """At most `gamma` guesses after `text`, which may extend beyond the tokens read. Each is the likeliest after
        the longest n-gram before it, and all up to it are right with an estimated chance of `worth` or more."""
        guesses: list[int] = []
        chance = 1.0
        while len(guesses) < gamma:
            context = (*text[-self.sizes[-1] :], *guesses)
            known = [self.counts[context[-n:]] for n in self.sizes if n <= len(context) and context[-n:] in self.counts]
            if not known or (chance := chance * self.rate(self.sizes[len(known) - 1])) < worth:
                break
            guesses.append(likeliest(known[-1]))
        return guesses


def likeliest(counts: dict[int, int]) -> int:
    """The token that followed most often; the latest in case of a tie."""
    return max(reversed(counts), key=counts.__getitem__)


class LookupDrafter(Drafter):
    """Guesses what followed most often where the longest possible suffix of the text, of at most 8 tokens, occurred
    before (prompt lookup decoding, Saxena 2023). No model is needed. q is one-hot, so a guess is
    accepted with probability p.

    ngram: shorter suffixes are not looked up.
    worth: a guess is made only if it and all guesses before it are right with an estimated probability of `worth` or
        more (`Continuations.rate` over the generated tokens). Prompts do not count, because a model need not repeat
        itself as its prompt does.

    What is guessed depends on committed tokens alone, so nothing is dropped after it was drawn.
    """

    varies = True

    def __init__(self, vocabulary: int, ngram: int = 1, worth: float = 0.3) -> None:
        self.vocabulary, self.ngram, self.worth = vocabulary, ngram, worth

    def begin(self, rows: Rows) -> None:
        self.known: dict[int, Continuations] = {}  # of each text

    def read_prompts(self, rows: Rows) -> None:
        for text in (rows.numbers[row] for row in rows.fresh):
            self.known[text] = Continuations(self.ngram)
            self.known[text].read(rows.prompts[text], test=False)

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """Guesses `[B, n]`, n being the most that any row has."""
        return self.guesses(rows, self.find(rows, gammas))

    def find(self, rows: Rows, gammas: Sequence[int]) -> list[list[int]]:
        """The guesses of each row, at most as many as its gamma; a row that has ended has none."""
        guesses = []
        state = zip(rows.numbers, rows.texts, rows.committed_lengths, rows.ended, gammas)
        for number, text, committed, ended, gamma in state:
            self.known[number].read(text[:committed])
            guesses.append([] if ended else self.known[number].guesses(text, gamma, self.worth))
        return guesses

    def guesses(self, rows: Rows, tokens: Sequence[Sequence[int]], least: int = 0) -> Guesses:
        """The guesses of each row as tensors, which have `least` columns or more."""
        width = max(least, *map(len, tokens))
        if width == 0:
            return no_guesses(rows, self.vocabulary)
        padded = upload([[*row, *[-1] * (width - len(row))] for row in tokens], rows.device)
        drafts = padded.clamp(min=0)
        q = torch.zeros(*drafts.shape, self.vocabulary, dtype=torch.float32, device=drafts.device)
        q.scatter_(-1, drafts[..., None], (padded >= 0).float()[..., None])  # 1 at each guess
        return Guesses(drafts, q, list(map(len, tokens)))


class LookupFirst(Drafter):
    """`lookup` guesses for each row whose last tokens occurred before, and `drafter` for the others.

    Who guesses for a row depends on its committed tokens alone, so no guess is dropped after it was drawn. A round in
    which all rows are looked up needs no forward of `drafter`; it reads the tokens it missed when it is called again.
    """

    varies = True

    def __init__(self, lookup: LookupDrafter, drafter: Drafter) -> None:
        self.lookup, self.drafter, self.models = lookup, drafter, drafter.models

    def begin(self, rows: Rows) -> None:
        self.lookup.begin(rows)
        self.drafter.begin(rows)
        self.read: dict[int, int] = {}  # {text: tokens that `drafter` had read, when it did not guess for that text}
        self.replaced = 0

    def read_prompts(self, rows: Rows) -> None:
        self.lookup.read_prompts(rows)
        self.drafter.read_prompts(rows)

    def rewind(self, count: int) -> None:
        self.replaced += count

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        tokens = self.lookup.find(rows, gammas)
        others = [0 if guesses or ended else gamma for guesses, ended, gamma in zip(tokens, rows.ended, gammas)]
        # How many of the last tokens `drafter` must read: at least two, as in any round. If it guessed for a text last
        # round, it has read all but its last guess and the target's token.
        texts, least = list(zip(rows.numbers, rows.texts)), 2 + self.replaced
        unread = [max(least, len(text) - self.read.get(number, len(text))) for number, text in texts]
        missed = max((count for count, gamma in zip(unread, others) if gamma), default=0)
        not_asked = [(*text, count) for text, count, gamma in zip(texts, unread, others) if not gamma]
        self.read = {number: len(text) - (0 if count <= missed else count) for number, text, count in not_asked}
        self.replaced = 0
        if not any(others):
            return self.lookup.guesses(rows, tokens)
        self.drafter.rewind(missed - 2)
        drafted = self.drafter.draft(rows, others, sampling, length).limited(others)
        if not any(tokens):
            return drafted
        is_looked_up = upload(list(map(bool, tokens)), rows.device)[:, None]
        count = drafted.drafts.shape[1]
        looked_up = self.lookup.guesses(rows, tokens, least=count)
        more = looked_up.drafts.shape[1] - count
        return Guesses(
            torch.where(is_looked_up, looked_up.drafts, F.pad(drafted.drafts, (0, more))),
            torch.where(is_looked_up[..., None], looked_up.q, F.pad(drafted.q, (0, 0, 0, more))),
            [len(guesses) or limit for guesses, limit in zip(tokens, drafted.limits or [count] * rows.size)],
        )
