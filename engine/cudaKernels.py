"""`sample`: the filters of a distribution and the draw of a token, by Triton kernels.

`utils.probabilities` and `utils.pick` define the result. A row is split into parts of BLOCK logits. Each kernel runs
one program for each part of each row, which leaves a sum of its part in memory; the programs of the next kernel add up
the sums of all parts. Nothing is sorted: what top-k and top-p keep is decided by the least logit, or the least
probability, that is kept, and that number is found by its bits.

rows, parts: their numbers. Vectors of sums are `[rows, parts]`. PARTS: parts, rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils import Sampling

BLOCK = 1 << 10  # logits of a part
PASSES = 8  # of a search, four bits each
# Probabilities are summed as integers, in units of UNIT: the sums are exact in any order, and never fall.
ONE, UNIT = tl.constexpr(2.0**48), tl.constexpr(2.0**-48)
LEAST_BITS = tl.constexpr(-(1 << 31))
OTHER_BITS = tl.constexpr((1 << 31) - 1)


@triton.jit
def of_parts(sums: tl.tensor, parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The sums of all parts of this program's row; 0 beyond."""
    at = tl.arange(0, PARTS)
    return tl.load(sums + tl.program_id(0).to(tl.int64) * parts + at, mask=at < parts, other=0)


@triton.jit
def found(
    sums: tl.tensor, bits: tl.tensor, k: tl.tensor, parts: tl.tensor, share: tl.tensor, PARTS: tl.constexpr
) -> tl.tensor:
    """The bits of a threshold as far as k passes of `search` have found them, int64: all later bits are 0."""
    part, digit = tl.arange(0, PARTS)[:, None], tl.arange(0, 16)[None, :]
    row = (k - 1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    x = tl.load(sums + (row * parts + part) * 16 + digit, mask=(part < parts) & (k > 0), other=0.0)
    is_reached = (tl.sum(x, 0) >= share) & (tl.arange(0, 16) > 0)
    before = tl.load(bits + row, mask=k > 0, other=LEAST_BITS)
    return before + (tl.sum(is_reached.to(tl.int64), 0) << (32 - 4 * k))


@triton.jit
def number(bits: tl.tensor) -> tl.tensor:
    """The float32 with these `bits`, whose integers are in the order of the floats."""
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & OTHER_BITS)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["k"])
def search(
    values: tl.tensor,
    sums: tl.tensor,
    bits: tl.tensor,
    k: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    share: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Pass k of the search for the largest t for which `share` or more of the row `values[size]` are >= t: as many of
    them if COUNTS, else that much of their sum. If all of them are too few, t is nan.

    Four bits of t have 16 candidates. A pass sums what is at or above each of them: `sums [PASSES, rows, parts, 16]`.
    `bits [PASSES, rows]`: those found before each pass. Sums of floats are in a fixed order, so they are the same in
    each run, and they never fall where a number is added, since rounding never does.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    before = found(sums, bits, k, parts, share, PARTS)
    digits = tl.arange(0, 16)
    candidates = (before + (digits.to(tl.int64) << (28 - 4 * k))).to(tl.int32)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * size + at, mask=at < size, other=0.0)
    order = x.to(tl.int32, bitcast=True)
    order ^= (order >> 31) & OTHER_BITS
    weight = (at < size).to(tl.float32) if COUNTS else x
    passed = tl.sum(tl.where(order[None, :] >= candidates[:, None], weight[None, :], 0.0), 1)
    row += k.to(tl.int64) * tl.num_programs(0)
    tl.store(sums + (row * parts + part) * 16 + digits, passed)
    tl.store(bits + row, before, mask=part == 0)


@triton.jit
def scale(
    logits: tl.tensor,
    probs: tl.tensor,
    largest: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`probs` becomes the logits, whose rows are `stride` apart, over the temperature. largest: of each part; inf if a
    logit is nan. first: where it is."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
    x = x if GREEDY else tl.math.div_rn(x, temperature)
    best = tl.max(tl.where(x == x, x, float("inf")), 0)
    tl.store(probs + row * size + at, x, mask=at < size)
    tl.store(largest + row * parts + part, best)
    if GREEDY:
        tl.store(first + row * parts + part, tl.min(tl.where((x == best) & (at < size), at, size), 0))


@triton.jit
def greedy(
    probs: tl.tensor,
    largest: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """`probs` becomes one-hot at the first of the largest logits, which is the token; or nan, and `size`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_row = tl.where(tl.arange(0, PARTS) < parts, of_parts(largest, parts, PARTS), float("-inf"))
    best = tl.max(of_row, 0)
    finite = tl.abs(best) < float("inf")
    token = tl.min(tl.where(of_row == best, of_parts(first, parts, PARTS), size), 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(probs + row * size + at, tl.where(finite, (at == token).to(tl.float32), float("nan")), mask=at < size)
    tl.store(tokens + row, tl.where(finite, token, size), mask=part == 0)


@triton.jit
def weigh(
    probs: tl.tensor,
    largest: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    bits: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    top_k: tl.tensor,
    passes: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """`probs` becomes e to the power of its logits, less the largest of the row; those that top-k drops become 0."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_row = tl.where(tl.arange(0, PARTS) < parts, of_parts(largest, parts, PARTS), float("-inf"))
    best = tl.max(of_row, 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(probs + row * size + at, mask=at < size, other=float("-inf"))
    weight = tl.where(at < size, tl.exp(x - best), 0.0)
    if TOP_K:
        weight = tl.where(x < number(found(sums, bits, passes, parts, top_k, PARTS)), 0.0, weight)
    weight = tl.where(tl.abs(best) < float("inf"), weight, float("nan"))
    tl.store(probs + row * size + at, weight, mask=at < size)
    tl.store(totals + row * parts + part, tl.sum(weight, 0))


@triton.jit
def keep(
    probs: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    bits: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    top_p: tl.tensor,
    passes: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Those of `probs` that top-p drops become 0. totals: of what is kept."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(probs + row * size + at, mask=at < size, other=0.0)
    p = tl.where(p < number(found(sums, bits, passes, parts, top_p, PARTS)), 0.0, p)
    tl.store(probs + row * size + at, p, mask=at < size)
    tl.store(totals + row * parts + part, tl.sum((p * ONE).to(tl.int64), 0))


@triton.jit
def normalise(
    probs: tl.tensor,
    totals: tl.tensor,
    masses: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    unit: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """`probs` over the row's total, that of `totals` in this unit. masses: of each part, then."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(probs + row * size + at, mask=at < size, other=0.0)
    p = tl.math.div_rn(p, tl.sum(of_parts(totals, parts, PARTS), 0).to(tl.float32) * unit)
    tl.store(probs + row * size + at, p, mask=at < size)
    tl.store(masses + row * parts + part, tl.sum((p * ONE).to(tl.int64), 0))


@triton.jit
def pick(
    probs: tl.tensor,
    masses: tl.tensor,
    uniform: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """`utils.pick` of `probs`, by the program whose part has the token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_row = of_parts(masses, parts, PARTS)
    mass = tl.sum(of_row, 0).to(tl.float32) * UNIT
    below = (mass.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)  # the next smaller number
    threshold = tl.minimum(tl.load(uniform + row) * mass, below)  # Rounding must not reach the end.
    before = tl.sum(tl.where(tl.arange(0, PARTS) < part, of_row, 0), 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(probs + row * size + at, mask=at < size, other=0.0)
    weights = (p * ONE).to(tl.int64)
    passed = ((before + tl.cumsum(weights, 0)).to(tl.float32) * UNIT <= threshold) & (at < size)
    is_begun = (before.to(tl.float32) * UNIT <= threshold) | (part == 0)
    is_here = is_begun & ((before + tl.sum(weights, 0)).to(tl.float32) * UNIT > threshold)
    finite = tl.sum((p != p).to(tl.int32), 0) == 0  # Else the distribution is nan, and the token `size`, which is none.
    token = tl.where(finite, part * BLOCK + tl.sum(passed.to(tl.int32), 0), size)
    tl.store(tokens + row, token, mask=tl.where(finite, is_here, part == 0))


def sample(logits: Tensor, sampling: Sampling, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tokens that `u[...]` draws from `logits[..., V]`, int64 `[...]`, and the float32 distributions `[..., V]`.
    None: no token is drawn. A repetition penalty has been applied before."""
    size = logits.shape[-1]
    rows = logits.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    parts = triton.cdiv(size, BLOCK)
    block = {"BLOCK": min(triton.next_power_of_2(size), BLOCK), "num_warps": 8}
    both = {"PARTS": triton.next_power_of_2(parts), **block}

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    probs, tokens = empty(*rows.shape, dtype=torch.float32), empty(len(rows), dtype=torch.int64)
    largest, totals = empty(2, len(rows), parts, dtype=torch.float32)
    first, kept, masses = empty(3, len(rows), parts, dtype=torch.int64)
    bits = empty(PASSES, len(rows), dtype=torch.int64)
    sums = empty(PASSES, len(rows), parts, 16, dtype=torch.float32)

    def threshold(share: float, counts: bool) -> tuple[Tensor, Tensor, int, int, float, int]:
        """Search it; the arguments of a kernel that uses it."""
        for k in range(PASSES):
            search[grid](probs, sums, bits, k, size, parts, share, COUNTS=counts, **both)
        return sums, bits, size, parts, share, PASSES

    grid = len(rows), parts
    is_greedy = sampling.temperature == 0
    with torch.cuda.device_of(logits):  # Its device need not be the current one.
        if not len(rows):
            pass
        elif is_greedy:
            scale[grid](rows, probs, largest, first, size, parts, rows.stride(0), 1.0, GREEDY=True, **block)
            greedy[grid](probs, largest, first, tokens, size, parts, **both)
        else:
            temperature, has_top_k = float(sampling.temperature), 0 < sampling.top_k < size
            scale[grid](rows, probs, largest, first, size, parts, rows.stride(0), temperature, GREEDY=False, **block)
            found_k = threshold(float(sampling.top_k), True) if has_top_k else (sums, bits, size, parts, 0.0, 0)
            weigh[grid](probs, largest, totals, *found_k, TOP_K=has_top_k, **both)
            normalise[grid](probs, totals, masses, size, parts, 1.0, **both)
            if sampling.top_p < 1:
                keep[grid](probs, kept, *threshold(float(sampling.top_p), False), **both)
                normalise[grid](probs, kept, masses, size, parts, UNIT.value, **both)
            if u is not None:
                pick[grid](probs, masses, u.reshape(-1).contiguous(), tokens, size, parts, **both)
    return tokens.view(logits.shape[:-1]), probs.view(logits.shape)
