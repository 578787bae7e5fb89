"""`LookupDrafter`: the text so far guesses."""

from collections.abc import Sequence

import torch
from torch import Generator

from decoding.interfaces import LengthRule, Model
from decoding.rounds import Guesses, no_guesses
from decoding.rows import Rows, upload
from utils import Sampling, UserError


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
        guesses = [[] if ended else self.after(text)[:gamma] for text, ended in zip(rows.texts, rows.ended)]
        width = max(map(len, guesses))
        if width == 0:
            return no_guesses(rows, self.vocabulary)
        padded = upload([each + [-1] * (width - len(each)) for each in guesses], rows.device)
        own, drafts = padded >= 0, padded.clamp(min=0)
        return Guesses(drafts, torch.nn.functional.one_hot(drafts, self.vocabulary) * own[..., None].float())

    def after(self, text: list[int]) -> list[int]:
        """What followed the latest earlier occurrence of the longest ending that occurred before."""
        for n in range(min(self.ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    return text[start + n :]
        return []
