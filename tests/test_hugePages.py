"""Memory on huge pages."""

import sys
import time
from pathlib import Path

import pytest
import torch

from engine.kernels.packedLinear import HUGE, on_huge_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping that holds the tensor's middle are on huge pages, as the kernel says."""
    middle, found = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(each, 16) for each in words[0].split("-"))
            found = low <= middle < high
        elif found and words[0] == "AnonHugePages:":
            return int(words[1]) << 10
    return 0


def free_huge_pages() -> int:
    """How many blocks of HUGE bytes the kernel could give at once."""
    order = (HUGE // 4096).bit_length() - 1
    lines = Path("/proc/buddyinfo").read_text().splitlines()
    counts = [list(map(int, line.split("zone")[1].split()[1:])) for line in lines]
    return sum(count << (at - order) for row in counts for at, count in enumerate(row) if at >= order)


@pytest.mark.skipif(
    sys.platform != "linux" or not MODE.exists() or "[madvise]" not in MODE.read_text(),
    reason="no huge pages to ask for",
)
def test_large_tensors_are_on_huge_pages():
    plain = torch.empty(16 * HUGE, dtype=torch.uint8)
    for _ in range(5):  # Other processes may hold all huge pages for a moment.
        wanted = torch.empty(16 * HUGE, dtype=torch.uint8)
        assert on_huge_pages(wanted) is wanted
        if huge_bytes(wanted.fill_(1)):
            break
        time.sleep(1)
    if not huge_bytes(wanted) and not free_huge_pages():
        pytest.skip("no huge page is free: memory is fragmented")
    assert huge_bytes(wanted) >= 8 * HUGE
    assert not huge_bytes(plain.fill_(1)) or plain.data_ptr() // HUGE == wanted.data_ptr() // HUGE


@pytest.mark.parametrize("shape", [(0,), (3, 5), (HUGE + 1,), (2, HUGE)])
def test_tensors_keep_what_is_written_to_them(shape):
    tensor = on_huge_pages(torch.empty(shape, dtype=torch.uint8)).fill_(7)
    assert tensor.shape == shape and (tensor == 7).all()
    assert on_huge_pages(torch.empty(shape, device="meta")).shape == shape
