"""Autoregressive sampling: one forward of the target for each token. The baseline."""

import torch

from rows import Rows
from utils import Sampling, draw, probabilities


def commit_one(rows, logits, sampling, generator=None):
    """Draw the next token of each row from the logits `[B, V]` after its last and commit it."""
    p = probabilities(logits, sampling, rows.seen(logits.shape[-1], sampling))
    none = rows.sequence.new_zeros(len(p), 0)
    rows.commit(none, torch.zeros_like(rows.lengths), draw(p, generator))


@torch.inference_mode()
def regrSampling(prefixes, target, max_len=200, sampling=Sampling(), end_of_text=None, generator=None, callback=None):
    """Continue each of `prefixes` (lists of token ids, of any lengths) with `target`, a `CachedModel`.

    max_len: tokens to add at most; end_of_text: the id that ends a row; generator: a `torch.Generator` on the model's
    device; callback: called as `callback(row, tokens, guessed)` as tokens come, `guessed` of them guesses that stood.
    Returns the new tokens of each row (lists) and a `Record` for each row. Raises UserError as `Rows` says.
    """
    rows = Rows(prefixes, max_len, [target], end_of_text, callback)
    commit_one(rows, target.read_prompt(rows), sampling, generator)
    while rows.remaining:
        logits = target.forward(rows.last(1), rows.positions(-1, 1))[:, 0]
        commit_one(rows, logits, sampling, generator)
    return rows.tokens, rows.records
