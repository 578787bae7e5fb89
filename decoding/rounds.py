"""The steps of a round, and the one place that decides whether a graph computes a step: `use_graph`.

| step | function |
|---|---|
| read the prompts | `prefill` |
| the same, and draw the first token | `first_token` |
| draw n tokens in sequence | `drawing.draw_tokens` |
| guess: the same, by a draft model | `drawing.guess` |
| score guesses with one forward, and verify them | `score_and_verify` |

Everything else in the project asks for a step and does not know how it is computed.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from decoding.guesses import Guesses
from decoding.interfaces import LengthRule, Model, Operators, TreeRule, VerificationRule
from decoding.operators import PYTORCH
from decoding.rows import Rows
from utils import Sampling, seen_after


def uniform(*shape: int, device: torch.device, generator: Generator | None = None) -> Tensor:
    """Uniform numbers in [0, 1), float32, drawn on the generator's device: it may be another than `device`."""
    drawn = torch.rand(*shape, device=device if generator is None else generator.device, generator=generator)
    return drawn.to(device)


def use_graph(
    model: Model,
    step: str,
    *shape: object,
    seen: Tensor | None = None,
    verify: VerificationRule | TreeRule | None = None,
    length: LengthRule | None = None,
    unread: int = 0,
) -> bool:
    """Whether a graph computes this step of `model`. If any line is false, the step is computed eagerly.

    step, shape: as in `engine.graphs.Graphs.has`. The other arguments are what the step depends on, if it does.
    """
    return (
        model.graphs is not None  # The model was compiled,
        and model.cache.allocated  # and its cache has memory: a prompt was read.
        and seen is None  # No repetition penalty: a graph is not given the tokens seen so far.
        and not getattr(verify, "waits", False)  # The verification rule does not synchronise with the host.
        and (length is None or length.stop is None)  # The host has no say between the guesses.
        and unread == 0  # The target has read everything up to the last committed token.
        and model.graphs.has(step, *shape)  # There is a graph for this shape.
    )


@torch.inference_mode()
def forward(model: Model, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits after each token of a block: int64 `tokens, positions [B, n]` -> float32 `[B, n, V]`."""
    if use_graph(model, "forward", *tokens.shape):
        return model.graphs.forward(tokens, positions, model.cache)
    return model.forward(tokens, positions)


@torch.inference_mode()
def prefill(model: Model, rows: Rows) -> Tensor:
    """Read every row's prompt into the KV cache; float32 logits `[B, V]` after each prompt's end.

    Shorter prompts are padded at the right. The padding is stale from the start: later tokens overwrite it.
    """
    model.reserve(len(rows.prompt), rows.capacity + rows.spare)
    if use_graph(model, "prefill", len(rows.prompt), len(set(rows.prompt_lengths))):
        return model.graphs.prefill(rows.prompt.to(model.device), rows.prompt_lengths, model.cache)
    return model.read_prompt(rows)


def first_token(rows: Rows, model: Model, sampling: Sampling, generator: Generator | None = None) -> None:
    """Prefill: read the prompts, draw the token after each and commit it."""
    logits = prefill(model, rows)
    p = model.operators.probabilities(logits, sampling, rows.seen(model.vocabulary, sampling))
    u = uniform(*p.shape[:-1], device=p.device, generator=generator)
    rows.commit_one(model.operators.pick(p, u))


def score_and_verify(
    target: Model, rows: Rows, guesses: Guesses, u: Tensor, sampling: Sampling, verify: VerificationRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the guesses with one forward of the target, and verify them.

    u: float32 `[B, n + 1]`, uniform numbers for the rule `verify` (verification.py).
    Returns p `[B, n + 1, V]`, the target's distributions before each guess and after the last, and the rule's
    `accepted[B]` and `token[B]`.
    """
    if guesses.p is not None:  # Scored already, by whatever drew the guesses.
        return guesses.p, *target.operators.rule(verify)(guesses.p, guesses.q, guesses.drafts, u)
    count, seen = guesses.drafts.shape[1], rows.seen(target.vocabulary, sampling)
    committed, positions = rows.last(1 + rows.unread, count)
    if count == 0 and use_graph(target, "draw", *committed.shape, seen=seen, verify=verify):  # as in plain decoding
        drawn, p = target.graphs.draw(committed, positions, u.T, sampling, target.cache)
        token = drawn[:, 0]
        return p, torch.zeros_like(token), token
    block = torch.cat([committed, guesses.drafts], 1)
    return score_block(target, block, positions, guesses.q, u, sampling, verify, seen)


@torch.inference_mode()
def score_block(
    target: Model,
    block: Tensor,
    positions: Tensor,
    q: Tensor,
    u: Tensor,
    sampling: Sampling,
    verify: VerificationRule,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`score_and_verify` of a block: int64 `block, positions [B, w]`.

    The block ends with the n drafts of q `[B, n, V]`. The token before them is the last committed one; tokens before
    that are only read. seen: `Rows.seen` up to the last committed token, if `sampling` has a repetition penalty.
    """
    if use_graph(target, "score_and_verify", *block.shape, seen=seen, verify=verify):
        return target.graphs.score_and_verify(block, positions, q, u, sampling, verify, target.cache)
    return verify_logits(forward(target, block, positions), block, q, u, sampling, verify, seen, target.operators)


def verify_logits(
    logits: Tensor,
    block: Tensor,
    q: Tensor,
    u: Tensor,
    sampling: Sampling,
    verify: VerificationRule,
    seen: Tensor | None = None,
    operators: Operators = PYTORCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """`score_block` from the logits `[B, w, V]` after each token of the block."""
    first = block.shape[1] - q.shape[1]  # of the drafts
    p = operators.probabilities(logits[:, first - 1 :], sampling, seen_after(seen, block[:, first - 1 :]))
    return p, *operators.rule(verify)(p, q, block[:, first:], u)
