"""The rounds of one text: which guesses were accepted, which were rejected, and the text that each token adds."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafter import Guesses
from decoding.rows import Rows
from inputs.commandLine import counted

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to
KINDS = ("guesses accepted", "guesses rejected", "the target's own tokens")  # in the order of Round's fields


class Round(NamedTuple):
    """Token ids of one round: accepted guesses, rejected guesses, and the target's own, as in KINDS."""

    accepted: list[int]
    rejected: list[int]
    target: list[int]


class Turn(NamedTuple):
    """A prompt, or a question as it is shown, and the rounds of the text after it."""

    prompt: str
    rounds: list[Round]


class Trace:
    """The rounds of the first text, collected as a sampler's `callback` and `observer`. The first "round" is the
    prefill. on_round: called with each round when it ends. seconds: of decoding since the prefill, without the time of
    `on_round`."""

    def __init__(self, on_round: Callable[[Round], object] = lambda round: None) -> None:
        self.on_round = on_round
        self.rounds: list[Round] = []
        self.guesses: list[int] = []  # of the round that is about to end
        self.seconds, self.resumed = 0.0, 0.0  # resumed: when decoding went on after the last round

    def observer(self, rows: Rows, guesses: Guesses, p: Tensor, last: Tensor) -> None:
        """Collect the guesses of a round (`decoding.drafter.Observer`)."""
        self.guesses = guesses.drafts[0][guesses.of_drafts()[0] > 0].tolist()  # Where q is 0, there is no guess.

    def callback(self, row: int, tokens: list[int], guessed: int) -> None:
        """Add a round that has ended (`decoding.rows.Callback`)."""
        if row == 0:
            self.seconds += time.perf_counter() - self.resumed if self.rounds else 0
            accepted, own = tokens[:guessed], tokens[guessed:]
            # Where a text ends at a guess, those after it were not judged: the target drew no token in place of one.
            self.rounds.append(Round(accepted, self.guesses[guessed:] if own else [], own))
            self.on_round(self.rounds[-1])
            self.resumed = time.perf_counter()

    @property
    def tokens(self) -> list[int]:
        """The text so far."""
        return [token for round in self.rounds for token in round.accepted + round.target]

    @property
    def later(self) -> int:
        """Tokens after the prefill."""
        return len(self.tokens) - len(self.rounds[0].target) if self.rounds else 0

    @property
    def rate(self) -> float:
        """Tokens a second after the prefill; nan if none followed."""
        return self.later / self.seconds if self.later else math.nan

    def speed(self, plain: float = math.nan) -> str:
        """One line: `[28 tokens, 57 a second]`; empty if the rate is not known. plain: that of plain decoding, which
        the rate is then compared with, unless it was measured while the machine did something else: nothing is faster
        than by the tokens of a round."""
        ratio = self.rate / plain
        times = f", {ratio:.2f} times plain decoding" if ratio * (len(self.rounds) - 1) <= self.later else ""
        return f"[{len(self.tokens)} tokens, {self.rate:.0f} a second{times}]" if self.later else ""


class Pieces:
    """A decoder of one token at a time. All pieces joined, and `rest()` after them, are the decoded text.

    If a token ends within a character, its bytes are held back until the character is whole. Only the tokens since the
    last but one boundary between characters are decoded: a token costs the same however long the text is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.context: list[int] = []  # tokens between the last two boundaries
        self.pending: list[int] = []  # tokens after the last boundary
        self.returned = 0  # characters of their text that were returned

    def add(self, token: int) -> str:
        """The text that `token` adds; empty if it ends within a character."""
        self.pending = [*self.pending, token]
        text = self.tokenizer.decode(self.context + self.pending)
        whole = text.rstrip(UNFINISHED)
        piece, self.returned = whole[self.returned :], max(self.returned, len(whole))
        if whole == text:
            self.context, self.pending = self.pending, []
            self.returned = len(self.tokenizer.decode(self.context))
        return piece

    def rest(self) -> str:
        """The text that is held back: a character that was never finished."""
        return self.tokenizer.decode(self.context + self.pending)[self.returned :]

    def of(self, round: Round) -> list[list[str]]:
        """The pieces of the next round's tokens, in the order of KINDS."""
        accepted = [self.add(token) for token in round.accepted]
        fork = copy.copy(self)  # Rejected guesses follow the accepted ones, but are not part of the text.
        rejected = [fork.add(token) for token in round.rejected]
        if rejected:
            rejected[-1] += fork.rest()
        return [accepted, rejected, [self.add(token) for token in round.target]]


def decoded_rounds(rounds: Sequence[Round], tokenizer: PreTrainedTokenizerBase) -> list[list[list[str]]]:
    """The pieces of all rounds, `[round][kind][token]`. Nothing is held back."""
    pieces = Pieces(tokenizer)
    texts = [pieces.of(round) for round in rounds]
    if pieces.rest():
        accepted, _, target = texts[-1]
        (target or accepted)[-1] += pieces.rest()
    return texts


def summary(rounds: Sequence[Sequence[Sequence[object]]]) -> str:
    """One line of figures. As in `Record`, the prefill does not count among the rounds, `[round][kind][token]`."""
    accepted, rejected, target = (sum(map(len, tokens)) for tokens in zip(*rounds)) if rounds else (0, 0, 0)
    line, more, later = counted(accepted + target, "token"), accepted + target - 1, len(rounds) - 1
    if later > 0:
        rate = f"{more / later:.2f} tokens per round"
        line += f": 1 from reading the prompt, {more} in {counted(later, 'round')} ({rate})"
    return line + (f"; {accepted} of {accepted + rejected} guesses accepted" if accepted + rejected else "")
