"""`sample`: the filters of a distribution and the draw of a token, in one Triton kernel a row.

`utils.probabilities` and `utils.pick` define the result. The kernel does not sort: what top-k and top-p keep is decided
by the least logit, or the least probability, that is kept, and that number is found by its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils import Sampling

BLOCK = 1 << 12  # logits of a row that are in registers at once
# Probabilities are summed as integers, in units of UNIT: the sums are exact in any order, and never fall.
ONE, UNIT = tl.constexpr(2.0**48), tl.constexpr(2.0**-48)
TOP_BIT = tl.constexpr(1 << 31)
OTHER_BITS = tl.constexpr((1 << 31) - 1)


@triton.jit
def least_kept(
    values: tl.tensor, size: tl.tensor, share: tl.tensor, COUNTS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The largest t for which `share` or more of `values[size]` are >= t: as many of them if COUNTS, else that much of
    their sum. nan if all of them are too few.

    Two bits of t are found in each pass. Sums of floats are in a fixed order, so they are the same in each run, and
    they never fall where a number is added, since rounding never does.
    """
    at = tl.arange(0, BLOCK)
    least, step = tl.full((), -TOP_BIT, tl.int64), tl.full((), TOP_BIT >> 1, tl.int64)
    for _ in range(16):
        zeros = tl.zeros((BLOCK,), tl.int32 if COUNTS else tl.float32)
        few, some, many = zeros, zeros, zeros  # at or above least + 3 steps, 2 steps, and 1 step
        low, middle, high = (
            (least + step).to(tl.int32),
            (least + 2 * step).to(tl.int32),
            (least + 3 * step).to(tl.int32),
        )
        for first in range(0, size, BLOCK):
            is_value = first + at < size
            x = tl.load(values + first + at, mask=is_value, other=0.0)
            bits = x.to(tl.int32, bitcast=True)
            order = bits ^ ((bits >> 31) & OTHER_BITS)  # Integers in the order of the floats.
            weight = is_value.to(tl.int32) if COUNTS else x
            few += tl.where(order >= high, weight, 0)
            some += tl.where(order >= middle, weight, 0)
            many += tl.where(order >= low, weight, 0)
        least += step * (
            (tl.sum(few, 0) >= share).to(tl.int64)
            + (tl.sum(some, 0) >= share).to(tl.int64)
            + (tl.sum(many, 0) >= share).to(tl.int64)
        )
        step = step >> 2
    bits = least.to(tl.int32)
    return (bits ^ ((bits >> 31) & OTHER_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def greedy(probs: tl.tensor, size: tl.tensor, best: tl.tensor, finite: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The first of the logits in `probs[size]` that are `best`; `probs` becomes one-hot there, or nan."""
    at, token = tl.arange(0, BLOCK), size
    for first in range(0, size, BLOCK):
        x = tl.load(probs + first + at, mask=first + at < size, other=float("-inf"))
        token = tl.minimum(token, tl.min(tl.where((x == best) & (first + at < size), first + at, size), 0))
    for first in range(0, size, BLOCK):
        p = tl.where(finite, (first + at == token).to(tl.float32), float("nan"))
        tl.store(probs + first + at, p, mask=first + at < size)
    return token


@triton.jit
def softmax(
    probs: tl.tensor, size: tl.tensor, best: tl.tensor, least: tl.tensor, finite: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """The logits in `probs[size]`, of which `best` is the largest, become probabilities; those below `least` 0."""
    at, totals = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        x = tl.load(probs + first + at, mask=first + at < size, other=float("-inf"))
        weight = tl.where((x < least) | (first + at >= size), 0.0, tl.exp(x - best))
        totals += weight
        tl.store(probs + first + at, weight, mask=first + at < size)
    total = tl.where(finite, tl.sum(totals, 0), float("nan"))
    tl.debug_barrier()
    for first in range(0, size, BLOCK):
        p = tl.load(probs + first + at, mask=first + at < size, other=0.0)
        tl.store(probs + first + at, tl.math.div_rn(p, total), mask=first + at < size)
    tl.debug_barrier()


@triton.jit
def nucleus(probs: tl.tensor, size: tl.tensor, top_p: tl.tensor, BLOCK: tl.constexpr) -> None:
    """`utils.nucleus` of `probs[size]`."""
    least = least_kept(probs, size, top_p, False, BLOCK)
    at, kept = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.int64)
    for first in range(0, size, BLOCK):
        p = tl.load(probs + first + at, mask=first + at < size, other=0.0)
        kept += tl.where(p < least, 0, (p * ONE).to(tl.int64))
    share = tl.sum(kept, 0).to(tl.float32) * UNIT
    for first in range(0, size, BLOCK):
        p = tl.load(probs + first + at, mask=first + at < size, other=0.0)
        tl.store(probs + first + at, tl.where(p < least, 0.0, tl.math.div_rn(p, share)), mask=first + at < size)
    tl.debug_barrier()


@triton.jit
def pick(probs: tl.tensor, size: tl.tensor, u: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """`utils.pick` of `probs[size]`."""
    at, masses = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.int64)
    for first in range(0, size, BLOCK):
        masses += (tl.load(probs + first + at, mask=first + at < size, other=0.0) * ONE).to(tl.int64)
    mass = tl.sum(masses, 0).to(tl.float32) * UNIT
    below = (mass.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)  # the next smaller number
    threshold = tl.minimum(u * mass, below)  # Rounding must not reach the end.
    before, token = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    for first in range(0, size, BLOCK):
        weights = (tl.load(probs + first + at, mask=first + at < size, other=0.0) * ONE).to(tl.int64)
        sums = before + tl.cumsum(weights, 0)
        passed = (sums.to(tl.float32) * UNIT <= threshold) & (first + at < size)
        token += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(weights, 0)
    return token


@triton.jit
def sample_row(
    logits: tl.tensor,
    probs: tl.tensor,
    uniform: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    GREEDY: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of `sample`: `logits, probs [rows, size]`, of which the logits' rows are `stride` apart; `uniform, tokens
    [rows]`."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * stride
    probs += row * size
    largest, faults = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        x = tl.load(logits + first + at, mask=first + at < size, other=float("-inf")).to(tl.float32)
        x = x if GREEDY else tl.math.div_rn(x, temperature)
        largest = tl.maximum(largest, x)
        faults += (x != x).to(tl.int32)
        tl.store(probs + first + at, x, mask=first + at < size)
    best = tl.max(largest, 0)
    # Else the distribution is nan, and the token `size`, which is none.
    finite = (tl.sum(faults, 0) == 0) & (tl.abs(best) < float("inf"))
    tl.debug_barrier()
    if GREEDY:
        token = greedy(probs, size, best, finite, BLOCK)
    else:
        least = least_kept(probs, size, top_k, True, BLOCK) if TOP_K else float("-inf")
        softmax(probs, size, best, least, finite, BLOCK)
        if TOP_P:
            nucleus(probs, size, top_p, BLOCK)
        token = pick(probs, size, tl.load(uniform + row), BLOCK) if DRAW else size
    tl.store(tokens + row, tl.where(finite, token, size))


def sample(logits: Tensor, sampling: Sampling, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tokens that `u[...]` draws from `logits[..., V]`, int64 `[...]`, and the float32 distributions `[..., V]`.
    None: no token is drawn. A repetition penalty has been applied before."""
    size = logits.shape[-1]
    rows = logits.reshape(-1, size)
    probs = torch.empty(rows.shape, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if len(rows):
        block = min(triton.next_power_of_2(size), BLOCK)
        with torch.cuda.device_of(logits):  # Its device need not be the current one.
            sample_row[(len(rows),)](
                rows if rows.stride(1) == 1 else rows.contiguous(),
                probs,
                probs if u is None else u.reshape(-1).contiguous(),
                tokens,
                size,
                rows.stride(0) if rows.stride(1) == 1 else size,
                float(sampling.temperature),
                sampling.top_k,
                float(sampling.top_p),
                GREEDY=sampling.temperature == 0,
                TOP_K=0 < sampling.top_k < size,
                TOP_P=sampling.top_p < 1,
                DRAW=u is not None,
                BLOCK=block,
                num_warps=min(32, max(4, block // 256)),
            )
    return tokens.view(logits.shape[:-1]), probs.view(logits.shape)
