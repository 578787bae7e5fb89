"""The rounds of one text: which guesses were accepted, which were rejected, and the text that each token adds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.guesses import Guesses
from decoding.interfaces import Drafter
from decoding.rows import Rows

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to
KINDS = ("guesses accepted", "guesses rejected", "the target's own tokens")  # in the order of Round's fields


@dataclass
class Round:
    """Token ids of one round: accepted guesses, rejected guesses, and the target's own."""

    accepted: list[int]
    rejected: list[int]
    own: list[int]

    def kinds(self) -> tuple[list[int], list[int], list[int]]:
        """The token ids in the order of KINDS."""
        return self.accepted, self.rejected, self.own


class Watched:
    """A drafter that remembers its last guesses for row 0."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.models, self.begin, self.rewind = drafter, drafter.models, drafter.begin, drafter.rewind
        self.guesses: list[int] = []

    def draft(self, rows: Rows, *args: Any, **options: Any) -> Guesses:
        """As of the watched drafter."""
        guesses = self.drafter.draft(rows, *args, **options)
        real = guesses.of_drafts()[0] > 0  # The others only pad the row.
        # The last token that a row may add is no guess: other rows may guess on.
        self.guesses = guesses.drafts[0][real].tolist()[: max(0, rows.left[0] - 1)]
        return guesses


class Trace:
    """The rounds of row 0, collected by `callback`, which a sampler calls. The first "round" is the prefill.

    watched: the sampler's drafter; None if nothing guesses. on_round: called with each round when it ends.
    """

    def __init__(self, watched: Watched | None = None, on_round: Callable[[Round], object] | None = None) -> None:
        self.watched, self.on_round = watched, on_round
        self.rounds: list[Round] = []

    def callback(self, row: int, tokens: list[int], guessed: int) -> None:
        """See `decoding.interfaces.Callback`."""
        if row == 0:
            # The prefill comes before any guess. What a used drafter remembers then belongs to an earlier prompt.
            guesses = self.watched.guesses if self.watched and self.rounds else []
            self.rounds.append(Round(tokens[:guessed], guesses[guessed:], tokens[guessed:]))
            if self.on_round:
                self.on_round(self.rounds[-1])


class Pieces:
    """A decoder of one token at a time. All pieces joined, and `rest()` after them, are the decoded text.

    If a token ends within a character, its bytes are held back until the character is whole. Only the tokens since the
    last boundary between characters but one are decoded: a token costs the same however long the text is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.before: list[int] = []  # tokens between the last two boundaries
        self.fresh: list[int] = []  # tokens after the last boundary
        self.given = 0  # characters of their text that were returned

    def decode(self) -> str:
        """The text of the tokens that are kept."""
        return self.tokenizer.decode(self.before + self.fresh)

    def add(self, token: int) -> str:
        """The text that `token` adds; empty if it ends within a character."""
        self.fresh = [*self.fresh, token]
        text = self.decode()
        whole = text.rstrip(UNFINISHED)
        piece, self.given = whole[self.given :], max(self.given, len(whole))
        if whole == text:
            self.before, self.fresh = self.fresh, []
            self.given = len(self.decode())
        return piece

    def rest(self) -> str:
        """The text that is held back: a character that was never finished."""
        return self.decode()[self.given :]

    def of(self, round: Round) -> list[list[str]]:
        """The pieces of the next round's tokens, in the order of KINDS."""
        accepted = [self.add(token) for token in round.accepted]
        fork = copy.copy(self)  # Rejected guesses follow the accepted ones, but are not part of the text.
        rejected = [fork.add(token) for token in round.rejected]
        if rejected:
            rejected[-1] += fork.rest()
        return [accepted, rejected, [self.add(token) for token in round.own]]


def pieces_of(rounds: Sequence[Round], tokenizer: PreTrainedTokenizerBase) -> list[list[list[str]]]:
    """The pieces of all rounds, `[round][kind][token]`. Nothing is held back."""
    pieces = Pieces(tokenizer)
    texts = [pieces.of(round) for round in rounds]
    if pieces.rest():
        accepted, _, own = texts[-1]
        (own or accepted)[-1] += pieces.rest()
    return texts
