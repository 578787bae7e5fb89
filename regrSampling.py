"""Autoregressive sampling: one forward of the target for each token. The baseline."""

from collections.abc import Sequence

import torch

from decoding.model import Model
from decoding.rows import Callback, EndOfText, Generators, Record, Rows
from utils import Sampling


@torch.inference_mode()
def regrSampling(
    prefixes: Sequence[Sequence[int]],
    target: Model,
    max_len: int = 200,
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generators = None,
    callback: Callback | None = None,
    batch: int | None = None,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` (lists of token ids, of any lengths) with `target`.

    max_len: new tokens at most. end_of_text: the id or ids that end a text, or a function (`Rows`).
    generator: on the model's device or on the CPU; or a list with one for each text. Then a text does not depend on
        which others are decoded with it, except where the guesses follow measured times (costAware, the tree auto).
    callback: called as `callback(text, tokens, guessed)` when a text has grown; the first `guessed` tokens are accepted
        guesses (here none).
    batch: texts at a time; the others wait until a row is free. None: all.
    Returns the new tokens of each text and a `Record` of each. Raises UserError as `Rows` does.
    """
    rows = Rows(prefixes, max_len, [target], end_of_text, callback, generator=generator, batch=batch)
    with rows:
        while rows.refill():
            if rows.fresh:
                target.first_token(rows, sampling)
                continue
            seen = rows.seen(target.vocabulary, sampling)
            token, _ = target.draw(*rows.last(1), rows.uniform([1] * rows.size).T, sampling, seen)
            rows.commit_one(token[:, 0])
    return rows.tokens, rows.records
