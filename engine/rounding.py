"""A weight rounded to a few bits: `rounded` by itself, `compensated` so that a layer's outputs stay.

The kernels fix the format: a weight [out, in] is split along `in` into groups of `group` numbers, and
weight = (code - 2^(bits-1)) * scale, with one scale for each group of each output.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76)  # candidates for a scale, of the one that fits the largest number
DAMPING = 0.01  # of a hessian's mean diagonal, added to the diagonal
PASSES = 2  # of improving scales and codes alternately
BLOCK = 128  # columns whose changes reach the columns after them in one product
OUTPUTS = 1024  # whose scales are fitted together: it bounds memory


def rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [out, in] and scales bfloat16 [out, in / group] of least squared error, by search."""
    scales = best_scales(groups := weight.detach().float().unflatten(1, (-1, group)), bits)
    return stored(codes_of(groups, scales[..., None], bits).flatten(1), scales, bits)


def compensated(weight: Tensor, hessian: Tensor, bits: int, group: int, passes: int = PASSES) -> tuple[Tensor, Tensor]:
    """Codes and scales as of `rounded`, which keep the layer's outputs rather than its weights.

    hessian: sum of x x^T over the inputs x, float32 [in, in]. GPTQ (arXiv 2210.17323, algorithm 1), then in each pass
    the best scales for these codes, and for each column the best codes while the others stay.
    """
    columns, hessian = weight.detach().float().t().contiguous(), damped(hessian, DAMPING)  # [in, out], [in, in]
    root = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    scales, diagonal = columns.new_empty(len(columns) // group, len(weight)), hessian.diagonal()
    ideal = columns.clone()
    codes = swept(ideal, ideal, -root / root.diagonal()[:, None], scales, bits, diagonal)
    wanted = hessian @ columns
    for _ in range(passes):
        scales = fitted(wanted, hessian, codes, scales)
        before = codes * scales.repeat_interleave(group, 0)
        ideal = before + (wanted - hessian @ before) / diagonal[:, None]
        codes = swept(ideal, before, hessian / diagonal, scales, bits)
    return stored(codes.t(), scales.t(), bits)


def swept(
    ideal: Tensor, before: Tensor, influence: Tensor, scales: Tensor, bits: int, importance: Tensor | None = None
) -> Tensor:
    """Codes [in, out] nearest to the ideal columns (rows of the tensors here), one after the other. Where a column
    moves from what it was before, the ideals of later ones move the other way, `influence` [in, in] times as far.

    importance: [in], of the columns. If there is one, a group's scales [out] are searched for when its turn comes.
    """
    codes, group = torch.empty_like(ideal), len(ideal) // len(scales)
    block = max(BLOCK // group, 1) * group
    for start in range(0, len(ideal), block):
        end = min(start + block, len(ideal))
        moves = torch.empty_like(ideal[start:end])
        for i in range(start, end):
            if importance is not None and i % group == 0:
                part = slice(i, i + group)
                scales[i // group] = best_scales(ideal[part].t(), bits, importance[part])
            codes[i] = codes_of(ideal[i], scale := scales[i // group], bits)
            moves[i - start] = codes[i] * scale - before[i]
            ideal[i + 1 : end].addr_(influence[i, i + 1 : end], moves[i - start], alpha=-1)
        ideal[end:].addmm_(influence[start:end, end:].t(), moves, alpha=-1)
    return codes


def fitted(wanted: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The scales [in / group, out] with which these codes keep the layer's outputs best: least squares per output.

    wanted: hessian @ weight^T, [in, out].
    """
    best = []
    for right, code, old in zip(*(x.t().split(OUTPUTS) for x in (wanted, codes, scales))):
        groups = code.unflatten(1, (len(scales), -1))  # [outputs, in / group, group]
        parts = zip(groups.unbind(1), hessian.chunk(len(scales)))
        system = torch.stack([((part @ rows).view_as(groups) * groups).sum(-1) for part, rows in parts], 1)
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += (ridge := 1e-3 * diagonal.mean(1, keepdim=True) + 1e-8)  # A group of zeros keeps its scale.
        best.append(torch.linalg.solve(system, (right.unflatten(1, groups.shape[1:]) * groups).sum(-1) + ridge * old))
    return torch.cat(best).bfloat16().float().t().contiguous()


def best_scales(groups: Tensor, bits: int, importance: Tensor | float = 1.0) -> Tensor:
    """The scales, as bfloat16 has them, of numbers [..., group] with the least squared error, weighted by importance.

    The number furthest from zero gets -2^(bits-1), which has no positive partner: its sign is the scale's.
    """
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(furthest), torch.full_like(furthest, torch.inf)
    for share in SHARES:
        scale = (furthest * (-share / 2 ** (bits - 1))).bfloat16().float()
        error = (codes_of(groups, scale, bits) * scale - groups).square_().mul_(importance).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best.squeeze(-1)


def codes_of(numbers: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest codes, less 2^(bits-1). A scale of 0 makes them 0."""
    return (numbers / scale).nan_to_num_(0, 0, 0).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def stored(codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes less 2^(bits-1) and scales as the kernels read them."""
    return (codes + 2 ** (bits - 1)).to(torch.uint8).contiguous(), scales.bfloat16().contiguous()


def dequantised(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The weight [out, in], float32, that these codes and scales stand for."""
    return ((codes.float() - 2 ** (bits - 1)).unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The hessian with its diagonal raised, so that it has an inverse."""
    return hessian + torch.eye(len(hessian), device=hessian.device) * (damping * hessian.diagonal().mean()).clamp_min(
        1e-8
    )
