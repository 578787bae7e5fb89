"""Tokens drawn in sequence, each from what a model says after the one before: `draw_tokens`, and `guess` by a draft
model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor

from decoding.guesses import Guesses
from decoding.interfaces import LengthRule, Model
from decoding.rounds import forward, uniform, use_graph
from decoding.rows import Rows
from utils import Sampling, seen_after


def steps(
    forward: Callable[[Tensor, Tensor], Tensor],
    distribution: Callable[[Tensor], Tensor],
    pick: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    positions: Tensor,
    u: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw one token for each row of `u[n, B]`; yields the token `[B]` and the distribution `[B, V]` it came from.

    forward(tokens, positions) gives logits; distribution(logits `[B, V]`) gives probabilities. The other arguments are
    those of `draw_tokens`. Eager code and graphs share this loop.
    """
    width = tokens.shape[1]
    for i in range(len(u)):
        logits = forward(tokens, positions[:, i and width - 1 + i : width + i])
        q = distribution(logits[:, -1])
        x = pick(q, u[i])
        yield x, q
        tokens = x.clamp(max=q.shape[-1] - 1)[:, None]  # A q of nan gives no token, and V cannot be read.


@torch.inference_mode()
def draw_tokens(
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    count: int,
    sampling: Sampling,
    generator: Generator | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read a block, draw the token after it, read that token, and so on until `count` tokens are drawn.

    tokens: int64 `[B, w]`. positions: int64 `[B, w + count - 1]`, of the block and of all drawn tokens but the last,
        which is not read.
    seen: `Rows.seen` up to the block's end, if `sampling` has a repetition penalty.
    Returns the tokens `[B, count]` and the distributions `[B, count, V]` they were drawn from.
    """
    u = uniform(count, len(tokens), device=tokens.device, generator=generator)
    return draw_by(u, model, tokens, positions, sampling, seen)


def draw_by(
    u: Tensor, model: Model, tokens: Tensor, positions: Tensor, sampling: Sampling, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`draw_tokens` with the uniform numbers `u[count, B]`."""
    if use_graph(model, "draw", *tokens.shape, seen=seen):
        return model.graphs.draw(tokens, positions, u, sampling, model.cache)
    drawn, distributions = [], []

    def read(tokens: Tensor, at: Tensor) -> Tensor:
        return forward(model, tokens, at)

    def distribution(logits: Tensor) -> Tensor:
        return model.operators.probabilities(logits, sampling, seen)

    for x, q in steps(read, distribution, model.operators.pick, tokens, positions, u):
        drawn.append(x)
        distributions.append(q)
        after = seen_after(seen, x[:, None])
        seen = None if after is None else after[:, 0]
    return torch.stack(drawn, 1), torch.stack(distributions, 1)


@torch.inference_mode()
def draw_while(
    going: Tensor,
    stop: Callable[[Tensor], Tensor],
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    count: int,
    sampling: Sampling,
    generator: Generator | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`draw_tokens` until a draft-length rule has stopped every row, after at most `count` tokens.

    going: bool `[B]`, the rows that draw at all. stop: see draftLength.py. Where a row has stopped, its distributions
    are 0. Whether all rows have stopped is a host sync, so on a GPU it is asked only after every second token. Drawing
    all `count` tokens would need no sync at all, but most of them would lie past the stop: that is far slower.
    """
    u = uniform(count, len(tokens), device=tokens.device, generator=generator)
    piece = 1 if tokens.device.type == "cpu" else 2
    drawn: list[Tensor] = []
    distributions: list[Tensor] = []
    while len(distributions) < count and (not drawn or going.any()):
        numbers = u[len(distributions) : len(distributions) + piece]
        reach = tokens.shape[1] + len(numbers) - 1
        x, q = draw_by(numbers, model, tokens, positions[:, :reach], sampling, seen)
        x = x.clamp(max=q.shape[-1] - 1)  # as in `steps`
        for each, its_q in zip(x.unbind(1), q.unbind(1)):
            distributions.append(its_q * going[:, None])
            going = going & ~stop(distributions[-1].gather(1, each[:, None])[:, 0])
        after = seen_after(seen, x)
        seen = None if after is None else after[:, -1]
        drawn.append(x)
        tokens, positions = x[:, -1:], positions[:, reach:]
    return torch.cat(drawn, 1), torch.stack(distributions, 1)


def read_missed(model: Model, rows: Rows, read: int) -> int:
    """Read all but two of the last `read` committed tokens by the graph of prefill, if there is one. The graphs of
    guesses read two: a draft missed more in rounds without guesses. Returns how many are still to be read."""
    if read <= 2 or not use_graph(model, "prefill", len(rows.tokens), 1):
        return read
    tokens, positions = rows.last(read)
    model.graphs.read(tokens[:, :-2].to(model.device), positions[:, :-2].to(model.device), model.cache)
    return 2


@torch.inference_mode()
def guess(
    model: Model,
    rows: Rows,
    read: int,
    count: int,
    sampling: Sampling,
    own: Sampling,
    generator: Generator | None = None,
    length: LengthRule | None = None,
) -> Guesses:
    """`count` guesses of a draft model for each row, after reading the last `read` committed tokens again.

    own: the draft's sampling. sampling: the target's, which a graph of a whole round needs too. The draft may be on a
    device of its own. Then these tokens travel there, and the guesses and their q back.
    """
    read = read_missed(model, rows, read)
    tokens, positions = rows.last(read, count)
    seen, target = rows.seen(model.vocabulary, sampling), rows.target
    shape = len(tokens), read, count
    if use_graph(target, "round", model.graphs, *shape, seen=seen, length=length, unread=rows.unread):
        u = uniform(count, len(tokens), device=rows.device, generator=generator)
        caches = model.cache, target.cache
        return Guesses(*target.graphs.round(model.graphs, tokens, positions, u, sampling, own, *caches))
    there, seen = model.device, None if seen is None else seen.to(model.device)
    given = tokens.to(there), positions[:, :-1].to(there), rows.going.to(there)
    found = guess_after(model, *given, count, own, generator, length, seen)
    return Guesses(found.drafts.to(rows.device), found.q.to(rows.device))


@torch.inference_mode()
def guess_after(
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    going: Tensor,
    count: int,
    sampling: Sampling,
    generator: Generator | None = None,
    length: LengthRule | None = None,
    seen: Tensor | None = None,
) -> Guesses:
    """`count` guesses after a block of the draft's own tokens; all tensors are on its device. going: as in
    `draw_while`. The other arguments are those of `draw_tokens`."""
    given = model, tokens, positions, count, sampling, generator, seen
    drafts, q = draw_while(going, length.stop, *given) if length and length.stop else draw_tokens(*given)
    return Guesses(drafts.clamp_(max=model.vocabulary - 1), q)  # A guess from nan is no token: `advance` reports it.
