"""What samplers do with a model, each in one graph where there is one for it: `run`, it goes on by itself for a few
tokens, each drawn from what it says after the one before; `judge`, it scores tokens that were guessed, and they are
verified."""

import torch

from utils import pick, probabilities, seen_after


def steps(forward, distribution, tokens, positions, u):
    """Draw as many tokens as there are rows of numbers `u[n, B]`: yields each one, `[B]`, and what it was drawn from,
    `[B, V]`. forward(tokens, positions) gives logits, distribution(logits `[B, V]`) probabilities."""
    width = tokens.shape[1]
    for i in range(len(u)):
        logits = forward(tokens, positions[:, i and width - 1 + i : width + i])
        q = distribution(logits[:, -1])
        x = pick(q, u[i])
        yield x, q
        tokens = x.clamp(max=q.shape[-1] - 1)[:, None]  # what comes from a q of nan is no token, and cannot be read


def run(model, tokens, positions, count, sampling, generator=None, seen=None, stop=None, going=None):
    """Read a block, draw the token after it, read that, and so on until `count` tokens are drawn.

    tokens: int64 `[B, w]`; positions: int64 `[B, w + count - 1]`, of the block and of the tokens drawn, but for the
        last one, which is not read.
    seen: `Rows.seen` of the tokens up to the block's end, where `sampling` asks for it.
    stop, going: a draft-length rule's `stop` (draftLength.py), asked after each token, and bool `[B]`, the rows that
        draw at all; the run ends when none goes on, and where a row had stopped its distributions are 0.
    Returns the tokens `[B, n]` and the distributions `[B, n, V]` they were drawn from; n is `count` but for `stop`.
    """
    u = torch.rand(count, len(tokens), device=tokens.device, generator=generator)
    if seen is None and stop is None:
        at_once = model.run_at_once(tokens, positions, u, sampling)
        if at_once is not None:
            return at_once
    drawn, distributions = [], []
    for x, q in steps(model.forward, lambda logits: probabilities(logits, sampling, seen), tokens, positions, u):
        drawn.append(x)
        distributions.append(q * going[:, None] if stop else q)
        if stop:
            going = going & ~stop(distributions[-1].gather(1, x[:, None])[:, 0])
            if not going.any():
                break
        seen = seen if seen is None else seen_after(seen, x[:, None])[:, 0]
    return torch.stack(drawn, 1), torch.stack(distributions, 1)


def verdict(logits, block, q, u, sampling, verify, seen=None):
    """`judge` of the logits `[B, w, V]` after each token of a block."""
    first = block.shape[1] - q.shape[1]  # of the drafts; before it stands the last committed token
    p = probabilities(logits[:, first - 1 :], sampling, seen_after(seen, block[:, first - 1 :]))
    return p, *verify(p, q, block[:, first:], u)


def judge(model, block, positions, q, u, sampling, verify, seen=None):
    """Score a block with one forward, and verify the drafts it ends with.

    block, positions: int64 `[B, w]`. Its last n tokens are drafts, the one before is the last that was committed, and
        what stands before that is only read.
    q: float32 `[B, n, V]`, the distributions of the drafts; u, verify: a rule's numbers and a rule (verification.py).
    seen: `Rows.seen` of the tokens up to the last committed one, where `sampling` asks for it.
    Returns p `[B, n + 1, V]`, before each draft and after the last, and the rule's `accepted[B]` and `token[B]`.
    """
    if seen is None and not getattr(verify, "waits", False):
        at_once = model.judge_at_once(block, positions, q, u, sampling, verify)
        if at_once is not None:
            return at_once
    return verdict(model.forward(block, positions), block, q, u, sampling, verify, seen)
