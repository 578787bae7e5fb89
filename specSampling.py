"""Speculative sampling: guess ahead with a cheap drafter, score all guesses with one forward of the target, and keep
the tokens that the target accepts (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafter import Drafter, Fixed, LengthRule, Observer
from decoding.model import Model
from decoding.rows import Callback, EndOfText, Generators, Record, Rows
from decoding.verification import VerificationRule, drawn_with, token_rule
from utils import Sampling


@torch.inference_mode()
def specSampling(
    prefixes: Sequence[Sequence[int]],
    target: Model,
    drafter: Drafter,
    max_len: int = 200,
    gamma: int | LengthRule = 4,
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generators = None,
    callback: Callback | None = None,
    verify: VerificationRule = token_rule,
    batch: int | None = None,
    observer: Observer | None = None,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` with tokens distributed exactly as `target`'s own, in fewer forwards of `target`.

    drafter: guesses the tokens (methods/drafters.py).
    gamma: tokens to guess in a round, or a rule that chooses (decoding/lengthRules.py).
    verify: which guesses to accept (decoding/verification.py).
    observer: called in each round, with the guesses and their verification (decoding/drafter.py).
    The other arguments, both results and the errors are those of `regrSampling`. Rows of a batch are ragged: in each
    round a row grows by the guesses it accepted and one more token.
    """
    length = gamma if isinstance(gamma, LengthRule) else Fixed(gamma)
    rows = Rows(prefixes, max_len, [target, *drafter.models], end_of_text, callback, generator=generator, batch=batch)
    drafter.begin(rows)
    length.begin(rows)
    with rows:
        while rows.refill():
            if rows.fresh:  # Prompts that are new in the batch.
                target.first_token(rows, sampling)
                drafter.read_prompts(rows)
            else:
                advance(rows, target, drafter, length, sampling, verify, observer)
    return rows.tokens, rows.records


def advance(
    rows: Rows,
    target: Model,
    drafter: Drafter,
    length: LengthRule,
    sampling: Sampling,
    verify: VerificationRule,
    observer: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """One round, Algorithm 1 of arXiv 2211.17192.

    Returns p, float32 `[B, n + 1, V]`, and how many of the n guesses each row accepted, int64 `[B]`.
    """
    # Choose gamma for each row. The last token a row may add needs no guess: the target draws it.
    gammas = [max(0, min(gamma, left - 1)) for gamma, left in zip(length.gammas(), rows.left)]
    # Draft x_1, ..., x_gamma from q_1, ..., q_gamma.
    guesses = drafter.draft(rows, gammas, sampling, length).limited(gammas)
    guesses.check(target.vocabulary)
    # Score: p_1, ..., p_{gamma + 1} in one forward of the target. Verify: accept guesses, draw the token after them.
    u = rows.uniform([gamma + 1 for gamma in gammas], guesses.drafts.shape[1] + 1, last=True)
    p, accepted, token = target.score_and_verify(rows, guesses, u, sampling, verify)
    if observer:
        observer(rows, guesses, p, accepted)
    sure = length.sure(drawn_with(p, accepted, token)) if length.sure else None
    # Commit the accepted guesses and the token after them. Here the host waits for the device, once in the round.
    drafted, passed, noted = rows.commit(guesses.drafts, accepted, token, guesses.counts(), sure)
    if min(drafted.values()) < 0:
        raise drafter.not_finite()
    # Learn how many tokens to guess in the next round.
    length.learn(drafted, passed, {text: bool(is_sure) for text, is_sure in noted.items()})
    return p, accepted
