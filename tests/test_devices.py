"""A device that cannot be used is refused with one line that names the remedy. (Names that are none: test_flags.py.)"""

from unittest.mock import Mock

import helpers
import pytest
import torch
from conftest import refused

from engine.compiling import compiled
from experiments import prepare, processes
from experiments.prepare import where_to_run
from experiments.settings import parse
from experiments.speed import quiet
from inputs import devices
from inputs.devices import pick_device, pick_dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none_is_refused(name):
    assert pick_device() == "cpu"
    with refused("CUDA", "--device cpu"):
        pick_device(name)


def test_kernels_read_bfloat16_on_a_cpu_that_does_not_compute_in_it(monkeypatch, flags):
    for name in "_is_avx512_bf16_supported", "_is_amx_tile_supported":
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    for more, dtype in ([], "float32"), (["--compile"], "bfloat16"), (["--compile", "--dtype", "float32"], "float32"):
        assert where_to_run(parse([*flags, "--device", "cpu", *more]), processes.SINGLE)[2] == dtype
    monkeypatch.setattr(prepare, "check_device", lambda name: None)
    beside_mps = parse([*flags, "--device", "cpu", "--draftDevice", "mps", "--compile"])
    assert where_to_run(beside_mps, processes.SINGLE)[1:3] == ("mps", "float32")  # It has no bfloat16.


def test_a_container_has_the_memory_of_its_control_group(monkeypatch, tmp_path):
    whole = devices.psutil.virtual_memory().available
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: Mock(available=whole))
    monkeypatch.setattr(devices, "CONTAINER", tmp_path)
    assert devices.available_memory("cpu") == whole
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    for limit, free in ("1000", 400), ("max", whole), (str(2 * whole), whole):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert devices.available_memory("cpu") == free


def test_the_gpu_of_an_apple_computer(monkeypatch, flags, capsys):
    """There is none here: what torch would be asked, and that no float64 and no bfloat16 gets there."""
    monkeypatch.setattr(torch.mps, "synchronize", waited := Mock())
    with quiet("mps"):
        pass
    assert waited.call_count == 2 and pick_dtype("mps") == "float16"
    model = helpers.tiny()
    model.device = torch.device("mps")
    assert compiled(model) is model and "not on mps" in capsys.readouterr().err
    if not torch.backends.mps.is_available():
        with refused("mps", "use cpu"):
            pick_device("mps")
    monkeypatch.setattr(processes, "pick_device", lambda name: name or "cpu")
    monkeypatch.setattr(prepare, "check_device", lambda name: None)
    for role in "--device", "--draftDevice":
        with refused("bfloat16", "mps", "--dtype float16"):
            where_to_run(parse([*flags, role, "mps", "--dtype", "bfloat16"]), processes.SINGLE)
    assert where_to_run(parse([*flags, "--device", "mps"]), processes.SINGLE) == ("mps", "mps", "float16", "float32")


@pytest.mark.parametrize(
    "wrong, processes, words",
    [
        (["cuda:7"], processes.SINGLE, ["CUDA" if not torch.cuda.is_available() else "cuda:7"]),
        (["auto"], processes.SINGLE, ["auto", "one device"]),
        (["cpu", "--draft", "lookup"], processes.SINGLE, ["lookup", "--draftDevice"]),
        (["cuda:0"], processes.Processes(1, 2), ["single process"]),
    ],
)
def test_a_device_that_no_draft_can_be_on_is_refused(flags, wrong, processes, words):
    with refused(*words):
        where_to_run(parse([*flags, "--draftDevice", *wrong]), processes)
