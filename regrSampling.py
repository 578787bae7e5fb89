"""Autoregressive sampling: one forward of the target for each token. The baseline."""

import torch

from decoding.rounds import run
from decoding.rows import Rows
from utils import Sampling, draw, probabilities


def first_token(rows, model, sampling, generator=None):
    """Read the prompts, draw the token after each and commit it."""
    logits = model.read_prompt(rows)
    commit_one(rows, draw(probabilities(logits, sampling, rows.seen(model.vocabulary, sampling)), generator))


def commit_one(rows, token):
    """Add `token[B]` to the rows."""
    rows.commit(token[:, None][:, :0], torch.zeros_like(token), token)


@torch.inference_mode()
def regrSampling(prefixes, target, max_len=200, sampling=Sampling(), end_of_text=None, generator=None, callback=None):
    """Continue each of `prefixes` (lists of token ids, of any lengths) with `target`, a `CachedModel`.

    max_len: tokens to add at most; end_of_text: the id that ends a row; generator: a `torch.Generator` on the model's
    device; callback: called as `callback(row, tokens, guessed)` as tokens come, `guessed` of them guesses that stood.
    Returns the new tokens of each row (lists) and a `Record` for each row. Raises UserError as `Rows` says.
    """
    rows = Rows(prefixes, max_len, [target], end_of_text, callback)
    first_token(rows, target, sampling, generator)
    while rows.remaining:
        seen = rows.seen(target.vocabulary, sampling)
        token, _ = run(target, *rows.last(1), 1, sampling, generator, seen)
        commit_one(rows, token[:, 0])
    return rows.tokens, rows.records
