"""`packed`: the weight of a linear layer in the order in which our kernel reads it.

On a CPU, a forward of a few tokens takes as long as reading its weights, if they are read once for all tokens, from one
end to the other (linear.h).
"""

import ctypes
import math
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

HUGE, PIECE, LINE = 2 << 20, 32 << 20, 64  # Bytes of a huge page, of a piece of memory, and of a cache line.
MADV_HUGEPAGE = 14
SIDE = 32  # outputs side by side in a block, as in linear.h


def packed(weight: Tensor) -> Tensor:
    """`weight[out, in]` in blocks of SIDE outputs, `[out / SIDE, in / pair, SIDE, pair]`. 16-bit numbers lie in
    pairs. The last block is filled with zeros. Raises RuntimeError if there is no kernel for it."""
    pair = 4 // weight.itemsize
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.shape[1] % pair:
        raise RuntimeError(f"there is no kernel for a weight of {weight.shape[1]} numbers in {weight.dtype}")
    blocks = -(-len(weight) // SIDE)
    result = on_huge_pages((blocks, weight.shape[1] // pair, SIDE, pair), weight.dtype)
    torch.ops.native.pack(weight.contiguous(), result)
    return result


def packed_codes(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """A weight in few bits (`engine.quantised.Codes`) in the blocks of linear.h, uint8
    `[out / SIDE, in / 32, bytes]`. The last block is filled with zeros."""
    missing, groups = -len(codes) % SIDE, scales.shape[1]
    codes, scales = pad(codes, (0, 0, 0, missing)), pad(scales, (0, 0, 0, missing))
    fours = codes.view(-1, SIDE, groups, 8, 4).permute(0, 2, 3, 1, 4)  # [block, group, four inputs, output, input]
    rows = [fours]
    if bits < 8:  # Four bits of two rows in a byte, then of eight rows one higher bit each.
        low = fours & 15
        rows = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
        place = torch.arange(8, dtype=torch.uint8)[:, None, None]
        for bit in range(4, bits):
            rows.append(((fours >> bit & 1) << place).sum(2, keepdim=True, dtype=torch.uint8))
    of_groups = scales.to(torch.bfloat16).view(-1, SIDE, groups).transpose(1, 2).contiguous().view(torch.uint8)
    parts = torch.cat([of_groups, torch.cat(rows, 2).flatten(2)], 2)
    return on_huge_pages(parts.shape, parts.dtype).copy_(parts)


class Piece(threading.local):
    """What is left of the memory that the next packed weights get."""

    rest = torch.empty(0, dtype=torch.uint8)


_piece = Piece()


@torch.inference_mode(False)
def on_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor in a CPU's memory, on huge pages if the system allows it. The weights of a layer are smaller than
    such a page or of no whole number of them, so they lie side by side in a piece of memory. It is freed with the last
    of them."""
    size = math.prod(shape) * dtype.itemsize
    room = -(-size // LINE) * LINE
    if room > len(_piece.rest):
        whole = torch.empty(max(room, PIECE) + HUGE, dtype=torch.uint8)
        _piece.rest = whole[-whole.data_ptr() % HUGE :]
        if sys.platform == "linux":
            first, length = _piece.rest.data_ptr(), len(_piece.rest) // HUGE * HUGE
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_HUGEPAGE)  # It may fail.
    result, _piece.rest = _piece.rest[:size], _piece.rest[room:]
    return result.view(dtype).view(*shape)
