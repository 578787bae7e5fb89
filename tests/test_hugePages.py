"""Memory on huge pages."""

import re
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.packedLinear import HUGE, on_huge_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def is_advised(tensor: torch.Tensor) -> bool:
    """Whether the kernel was asked for huge pages for the mapping that holds the tensor's middle (`hg` of VmFlags)."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        low, high = (int(each, 16) for each in mapping.split()[0].split("-"))
        if low <= middle < high:
            return " hg" in mapping
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(
    sys.platform != "linux" or not MODE.exists() or "[madvise]" not in MODE.read_text(),
    reason="no huge pages to ask for",
)
def test_large_tensors_are_on_huge_pages():
    plain, wanted = (torch.empty(16 * HUGE, dtype=torch.uint8) for _ in range(2))
    assert not is_advised(plain) and on_huge_pages(wanted) is wanted
    assert is_advised(wanted.fill_(1)) and not is_advised(plain)


@pytest.mark.parametrize("shape", [(0,), (3, 5), (HUGE + 1,), (2, HUGE)])
def test_tensors_keep_what_is_written_to_them(shape):
    tensor = on_huge_pages(torch.empty(shape, dtype=torch.uint8)).fill_(7)
    assert tensor.shape == shape and (tensor == 7).all()
    assert on_huge_pages(torch.empty(shape, device="meta")).shape == shape
