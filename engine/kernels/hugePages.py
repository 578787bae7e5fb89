"""Memory on huge pages, where the operating system has them: with pages of 4 KB, a processor that reads gigabytes waits
for the addresses of its pages too."""

import ctypes
import mmap
import sys

from torch import Tensor

HUGE = 2 << 20  # Bytes of a huge page. Smaller tensors gain nothing.
MADV_HUGEPAGE = 14


def on_huge_pages(empty: Tensor) -> Tensor:
    """The same tensor, on huge pages if it is in a CPU's memory and the system allows it. Nothing may have been written
    to it yet: a page gets its size when it is first written."""
    if sys.platform == "linux" and empty.device.type == "cpu" and empty.nbytes >= HUGE:
        first = -(-empty.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = empty.data_ptr() + empty.nbytes - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE)  # Advice: may fail.
    return empty
