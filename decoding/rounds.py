"""The steps of a round, and the one place that decides whether a graph computes a step: `use_graph`.

| step | function |
|---|---|
| read the prompts | `prefill` |
| the same, and draw the first token | `first_token` |
| draw n tokens in sequence | `draw_tokens` |
| guess: the same, by a draft model | `guess` |
| score guesses with one forward, and verify them | `score_and_verify` |

Everything else in the project asks for a step and does not know how it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from decoding.interfaces import LengthRule, Model, Operators, Rule, TreeRule, VerificationRule
from decoding.rows import Rows, upload
from decoding.treeDrawing import siblings
from utils import Sampling, pick, probabilities, seen_after


class PyTorchOperators:
    """Filters, draws and verification in pure PyTorch: those of utils.py, treeDrawing.py and verification.py."""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return probabilities(logits, sampling, seen)

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return pick(probs, u)

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return siblings(q, u, counts)

    def rule(self, verify: Rule) -> Rule:
        return verify


PYTORCH = PyTorchOperators()


@dataclass(frozen=True)
class Guesses:
    """The guesses of one round.

    drafts: int64 `[B, n]`.
    q: float32 `[B, n, V]`, the distributions the drafts were drawn from. Where a row has no guess, q is 0.
    p: float32 `[B, n + 1, V]`, the target's distributions before each draft and after the last, if whatever drew the
        drafts has scored them too; else None.
    """

    drafts: Tensor
    q: Tensor
    p: Tensor | None = None

    def of_drafts(self) -> Tensor:
        """q of each draft, float32 `[B, n]`; 0 where a row has no guess."""
        return self.q.gather(-1, self.drafts[..., None])[..., 0]

    def counts(self) -> Tensor:
        """How many guesses each row has, int64 `[B]`; -1 if one was drawn from a q of nan."""
        return (self.of_drafts() > 0).sum(1).masked_fill_(self.q.sum((1, 2)).isnan(), -1)

    def limited(self, gammas: Sequence[int]) -> Guesses:
        """The same guesses, where row i keeps only the first `gammas[i]`: q is 0 beyond them."""
        count = self.drafts.shape[1]
        if min(gammas) >= count:
            return self
        device = self.drafts.device
        kept = torch.arange(count, device=device) < upload(gammas, device)[:, None]
        return Guesses(self.drafts, self.q * kept[..., None], self.p)


def no_guesses(rows: Rows, vocabulary: int) -> Guesses:
    """No guesses, in tensors of the right shapes: `[B, 0]` and `[B, 0, V]`."""
    drafts = rows.sequence.new_zeros(len(rows.tokens), 0)
    return Guesses(drafts, torch.zeros(*drafts.shape, vocabulary, device=rows.device))


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
    committed, positions = rows.last(1 + rows.unread, guesses.drafts.shape[1])
    block, seen = torch.cat([committed, guesses.drafts], 1), rows.seen(target.vocabulary, sampling)
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
