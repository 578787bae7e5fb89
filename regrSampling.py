"""Autoregressive sampling: one forward of the target for each token. The baseline."""

from collections.abc import Sequence

import torch
from torch import Generator

from decoding.model import Model, uniform
from decoding.rows import Callback, EndOfText, Record, Rows
from utils import Sampling


@torch.inference_mode()
def regrSampling(
    prefixes: Sequence[Sequence[int]],
    target: Model,
    max_len: int = 200,
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generator | None = None,
    callback: Callback | None = None,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` (lists of token ids, of any lengths) with `target`.

    max_len: new tokens at most. end_of_text: the id that ends a row, or a function (`Rows`).
    generator: on the model's device.
    callback: called as `callback(row, tokens, guessed)` when a row has grown; the first `guessed` tokens are accepted
        guesses (here none).
    Returns the new tokens of each row and a `Record` of each row. Raises UserError as `Rows` does.
    """
    rows = Rows(prefixes, max_len, [target], end_of_text, callback)
    target.first_token(rows, sampling, generator)
    while rows.remaining:
        seen = rows.seen(target.vocabulary, sampling)
        u = uniform(1, len(rows.tokens), device=rows.device, generator=generator)
        token, _ = target.draw(*rows.last(1), u, sampling, seen)
        rows.commit_one(token[:, 0])
    return rows.tokens, rows.records
