"""`sample`: the filters of a distribution and the draw of a token, in one Triton kernel a row.

`utils.probabilities` and `utils.pick` define the result. The kernel does not sort: what top-k and top-p keep is decided
by the least logit, or the least probability, that is kept, and that number is bisected over its bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils import Sampling

BLOCK = 1 << 14  # logits of a row that are in registers at once
# Probabilities are summed as integers, in units of 1 / ONE: the sums are exact in any order, and never fall.
ONE = tl.constexpr(2.0**48)
TOP_BIT = tl.constexpr(1 << 31)
OTHER_BITS = tl.constexpr((1 << 31) - 1)


@triton.jit
def least_kept(values: Any, size: Any, share: Any, COUNTS: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """The largest t for which `share` or more of `values[size]` are >= t: as many of them if COUNTS, else that much of
    their sum. nan if all of them are too few."""
    at = tl.arange(0, BLOCK)
    least, step = tl.full((), -TOP_BIT, tl.int64), tl.full((), TOP_BIT, tl.int64)
    for _ in range(32):
        weights = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, size, BLOCK):
            x = tl.load(values + first + at, mask=first + at < size, other=0.0)
            bits = x.to(tl.int32, bitcast=True)
            order = bits ^ ((bits >> 31) & OTHER_BITS)  # Integers in the order of the floats.
            weight = tl.full((BLOCK,), 1, tl.int64) if COUNTS else (x * ONE).to(tl.int64)
            weights += tl.where((order >= least + step) & (first + at < size), weight, 0)
        weight = tl.sum(weights, 0)
        enough = weight >= share if COUNTS else weight.to(tl.float32) / ONE >= share
        least = tl.where(enough, least + step, least)
        step = step >> 1
    bits = least.to(tl.int32)
    return (bits ^ ((bits >> 31) & OTHER_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def sample_row(
    logits: Any,
    probs: Any,
    uniform: Any,
    tokens: Any,
    size: Any,
    stride: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
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
        token = size
        for first in range(0, size, BLOCK):
            x = tl.load(probs + first + at, mask=first + at < size, other=float("-inf"))
            token = tl.minimum(token, tl.min(tl.where((x == best) & (first + at < size), first + at, size), 0))
        for first in range(0, size, BLOCK):
            p = tl.where(finite, (first + at == token).to(tl.float32), float("nan"))
            tl.store(probs + first + at, p, mask=first + at < size)
        if DRAW:
            tl.store(tokens + row, tl.where(finite, token, size))
    else:
        least = least_kept(probs, size, top_k, True, BLOCK) if TOP_K else float("-inf")
        totals = tl.zeros((BLOCK,), tl.float32)
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
        if TOP_P:
            least = least_kept(probs, size, top_p, False, BLOCK)
            kept = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, size, BLOCK):
                p = tl.load(probs + first + at, mask=first + at < size, other=0.0)
                kept += tl.where(p < least, 0, (p * ONE).to(tl.int64))
            share = tl.sum(kept, 0).to(tl.float32) / ONE
            for first in range(0, size, BLOCK):
                p = tl.load(probs + first + at, mask=first + at < size, other=0.0)
                p = tl.where(p < least, 0.0, tl.math.div_rn(p, share))
                tl.store(probs + first + at, p, mask=first + at < size)
            tl.debug_barrier()
        if DRAW:
            masses = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, size, BLOCK):
                masses += (tl.load(probs + first + at, mask=first + at < size, other=0.0) * ONE).to(tl.int64)
            mass = tl.sum(masses, 0).to(tl.float32) / ONE
            below = (mass.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)  # the next smaller number
            threshold = tl.minimum(tl.load(uniform + row) * mass, below)  # Rounding must not reach the end.
            before, token = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
            for first in range(0, size, BLOCK):
                p = tl.load(probs + first + at, mask=first + at < size, other=0.0)
                sums = before + tl.cumsum((p * ONE).to(tl.int64), 0)
                passed = (sums.to(tl.float32) / ONE <= threshold) & (first + at < size)
                token += tl.sum(passed.to(tl.int32), 0)
                before += tl.sum((p * ONE).to(tl.int64), 0)
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
                num_warps=max(4, min(32, block // 512)),
            )
    return tokens.view(logits.shape[:-1]), probs.view(logits.shape)
