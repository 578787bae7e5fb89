"""A device that cannot be used is refused with one line that names the remedy."""

import pytest
import torch
from conftest import refused

from inputs.devices import pick_device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none_is_refused(name):
    assert pick_device() == "cpu"
    with refused("CUDA", "--device cpu"):
        pick_device(name)


@pytest.mark.parametrize("name", ["gpu", "", "cpu:x", "meta", "two\nlines"])
def test_a_bad_device_name_is_refused(name):
    with refused("device", "--device cpu"):
        pick_device(name)
    assert pick_device("cpu") == "cpu"
