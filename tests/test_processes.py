"""Processes that share a run: who computes what, in which order results come, what a death leaves; over gloo end to
end."""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import accelerate.state  # noqa: F401 - so that no fork has to import it
import psutil
import pytest
from conftest import ROOT, few_mistakes, lines_of, prompted, refused
from helpers import FULL, wait_for

from experiments import processes as sharing
from experiments.prepare import load_inputs
from experiments.processes import SINGLE, Processes
from experiments.runRecord import devices
from experiments.settings import parse
from methods import selfDraft
from utils import UserError


def group(count):
    """`count` processes of one run, all in this process: threads that meet to gather."""
    meeting, lists = threading.Barrier(count), {}

    def gather(index, items):
        meeting.wait(20)  # until all have read what was gathered last
        lists[index] = items
        meeting.wait(20)
        return [item for peer in range(count) for item in lists[peer]]

    return [Processes(index, count, index, functools.partial(gather, index)) for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_process_gets_all_results_in_order_and_computes_its_share(count):
    members = [SINGLE] if count == 1 else group(count)
    computed = []

    def work(processes):
        def square(item):
            time.sleep(0.01 * (item == 0))  # The first result is the last to come.
            computed.append((processes.index, item))
            return item**2

        twice = list(processes.mapped(square, range(4))), list(processes.mapped(square, range(1)))
        return *twice, processes.gathered(processes.index)

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(work, members, timeout=20)) == [([0, 1, 4, 9], [0], list(range(count)))] * count
    assert sorted(item for _, item in computed) == [0, 0, 1, 2, 3]
    assert all(index == item % count for index, item in computed)


@pytest.mark.parametrize(
    "name, gpus, local, device",
    [
        (None, 0, 1, "cpu"),
        ("cpu", 2, 1, "cpu"),
        (None, 2, 1, "cuda:1"),
        ("cuda", 2, 0, "cuda:0"),
        (None, 2, 2, None),
        ("cuda:1", 2, 0, None),
        ("auto", 2, 0, None),
        ("mps", 0, 0, None),
    ],
)
def test_each_process_has_a_device_of_its_own(monkeypatch, name, gpus, local, device):
    """None: it is refused."""
    monkeypatch.setattr(sharing.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sharing, "pick_device", lambda name: name or "cpu")
    with contextlib.nullcontext() if device else refused():
        assert Processes(local, 4, local).own_device(name) == device


def test_only_the_process_that_writes_needs_a_folder_to_write_to(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    settings = parse([*flags, "--device", "cpu", "--out", str(tmp_path / "new")])
    with refused(str(tmp_path), "may not write", "--out"):
        load_inputs(settings, Processes(0, 2, 0))
    assert load_inputs(settings, Processes(1, 2, 1)).prompts


def test_accelerate_that_starts_one_process_is_told(monkeypatch, capsys):
    for name in sharing.SIZES:
        monkeypatch.delenv(name, raising=False)
    assert sharing.started() is SINGLE and capsys.readouterr().err == ""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert sharing.started() is SINGLE and "--multi_gpu --num_processes" in capsys.readouterr().err


def test_a_mixture_of_devices_is_refused():
    here = {"processor": "NVIDIA A", "torch": "2", "transformers": "5", "numpy": "2", "threads": 1}

    def of_two(texts="t", weights="w", **differs):
        """The records of two processes of which the second differs."""
        gathered = []
        peers = SimpleNamespace(gathered=lambda value: gathered.append(value) or gathered)
        devices(peers, "cuda:0", here, {"target": {"version": "w"}}, "t")
        return devices(peers, "cuda:1", here | differs, {"target": {"version": weights}}, texts)

    records = of_two(threads=7)  # of a host; the GPUs compute
    assert [(p["device"], p["processor"]) for p in records] == [("cuda:0", "NVIDIA A"), ("cuda:1", "NVIDIA A")]
    for differs, word in (
        ({"processor": "NVIDIA B"}, "device: NVIDIA A in process 0"),
        ({"torch": "3"}, "torch: 2"),
        ({"weights": "v"}, "weights of the target: w"),
        ({"texts": "u"}, "texts: t"),
    ):
        with refused(word):
            of_two(**differs)


# Over gloo. A process is a fork of this one, so that it need not import torch again.
FORK = multiprocessing.get_context("fork")


def member(cli, argv, log, index, count, port):
    """Runs test.py as process `index` of `count`."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)  # noqa: SIM115
    sharing.torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if count > 1:
        here = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in (here | {"MASTER_PORT": port}).items()}
    sys.exit(cli.main(argv))


def launch(cli, argv, folder, count):
    """The processes of a run, and their log files."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    logs = [folder / f"log{index}" for index in range(count)]
    argv = [*argv, "--device", "cpu", *([] if "--show" in argv else ["--out", str(folder)])]
    given = [(cli, argv, log, index, count, port) for index, log in enumerate(logs)]
    children = [FORK.Process(target=member, args=args, daemon=True) for args in given]
    for child in children:
        child.start()
    return children, logs


def wait(child, seconds=60):
    """The exit code of a process, negative for a signal; None if it does not end."""
    child.join(seconds)
    return child.exitcode


# What differs from run to run.
CLOCK = {"run", "ttft", "tpot", "throughput", "report_tpot", "seconds", "scoring", "figures", "stalled", "rank"}


def figures_of(folder):
    """Every line of results without what the clock decides, sorted."""
    kept = [line for line in lines_of(folder) if line.get("repeatable", True) and line["kind"] != "run"]
    return sorted(json.dumps({k: v for k, v in line.items() if k not in CLOCK}, sort_keys=True) for line in kept)


@pytest.mark.parametrize(
    "work, counts",
    [
        ("--compare block --ppl --diversity --sentences 3 --repeats 1", (1, 3)),
        ("--lossless block,costAware --tokens 300 --maxLen 4 --sentences 4", (1, 2)),  # two batches
    ],
)
def test_any_number_of_processes_gives_the_same_figures(cli, flags, tmp_path, monkeypatch, work, counts):
    few_mistakes(monkeypatch)
    found = []
    for count in counts:
        base = prompted(flags, "--repeats") if "--lossless" in work else flags
        children, logs = launch(cli, [*base, *work.split()], tmp_path / str(count), count)
        assert [wait(child) for child in children] == [0] * count, logs[0].read_text()
        assert [log.read_text() for log in logs[1:]] == [""] * (count - 1)
        run, *lines = lines_of(tmp_path / str(count))
        assert len(run.get("processes", [0])) == count and lines[-1]["kind"] == "end"
        assert (f"{count} processes" in (tmp_path / str(count) / "results.txt").read_text()) == (count > 1)
        timed = [line for line in lines if line["kind"] == "speed"]
        assert {line.get("rank", 0) for line in timed} == set(range(count) if timed else ())
        found.append(figures_of(tmp_path / str(count)))
    assert len(found[0]) > 6 and all(other == found[0] for other in found[1:])


@pytest.mark.parametrize(
    "asked, words",
    [
        ("--steps", "--steps runs"),
        ("--compare generate", "generate runs"),
        ("--show", "--show"),
        ("--speed --batch 2", "--batch and --sweep batch run"),
    ],
)
def test_what_one_process_measures_is_refused_by_several_in_one_line_of_process_0(cli, flags, tmp_path, asked, words):
    base = prompted(flags, "--sentences", "--repeats", "--maxLen") if asked in ("--show", "--steps") else flags
    children, logs = launch(cli, [*base, *asked.split()], tmp_path / "run", 2)
    assert [wait(child) for child in children] == [2, 2]
    said = logs[0].read_text()
    assert said.startswith(f"test.py: error: {words}") and "in a single process" in said and said.count("\n") == 1
    assert logs[1].read_text() == ""


def test_all_processes_use_the_same_copy(cli, run, flags, tmp_path, monkeypatch):
    """Process 0 finds 5 bits the fastest, the other one 6."""

    def relative_times(text, target, copy, *rest):
        bits = next(layer.bits for layer in copy.model.modules() if hasattr(layer, "bits"))
        return [0.2 if bits == 5 + int(os.environ["RANK"]) else 0.9, 1.2]

    monkeypatch.setattr(selfDraft, "relative_times", relative_times)
    words = "--draft", "self", "--draftBits", "auto", "--compare", "fixed"
    children, logs = launch(cli, [*flags, *words], tmp_path / "two", 2)
    assert [wait(child) for child in children] == [0, 0], logs[0].read_text()
    record, *_ = lines_of(tmp_path / "two")
    assert record["flags"]["draftBits"] == "5" and "in 5 bits takes" in logs[0].read_text()
    assert logs[1].read_text() == ""
    run("--draft self --draftBits 5 --compare fixed", out=tmp_path / "one")
    assert figures_of(tmp_path / "one") == figures_of(tmp_path / "two")


@pytest.mark.parametrize("victim, number", [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGTERM)])
def test_a_process_that_dies_or_is_ended_ends_the_run_with_one_line(cli, flags, tmp_path, victim, number):
    """Process 0 says it. If that is killed, it is the launcher who does. SIGTERM: the launcher's own signal."""
    work = [*flags, "--compare", "block", "--repeats", "10000"]
    children, logs = launch(cli, work, tmp_path / "run", 2)

    def theirs():
        return [line for line in lines_of(tmp_path / "run") if line["kind"] == "speed" and line["prompt"] == 1]

    wait_for(theirs)
    os.kill(children[victim].pid, number)
    killed = number == signal.SIGKILL
    assert wait(children[victim], 20) == (-number if killed else 2) and wait(children[1 - victim], 20) == 2
    said = [line for line in logs[0].read_text().split("\n") if line.startswith("test.py: error: ")]
    assert len(said) == (victim or not killed) and all("another process ended unexpectedly" in line for line in said)
    assert logs[1].read_text() == "" and "Traceback" not in logs[0].read_text()
    assert theirs() and (not said or "not finished" in (tmp_path / "run" / "results.txt").read_text())


def test_what_one_process_cannot_do_is_said_by_process_0(cli, flags, tmp_path, monkeypatch):
    record = cli.run_record

    def broken(*values):
        if os.environ.get("RANK") == "1":
            raise UserError("no room for the models")
        return record(*values)

    monkeypatch.setattr(cli, "run_record", broken)
    children, logs = launch(cli, flags, tmp_path / "run", 2)
    assert [wait(child) for child in children] == [2, 2]
    assert "process 1 of 2: no room for the models" in logs[0].read_text() and logs[1].read_text() == ""


@pytest.mark.skipif(not FULL, reason="more imports of torch; FULL=1 asks for it")
def test_a_death_under_accelerate_is_one_line_of_process_0_and_its_report(flags, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 3, ROOT / "test.py"]
    work = [*launch, *flags, "--compare", "block", "--repeats", 10000, "--device", "cpu", "--out", tmp_path]
    launcher = subprocess.Popen(list(map(str, work)), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: lines_of(tmp_path)[1:], 120)
    victim = next(child for child in psutil.Process(launcher.pid).children() if child.environ().get("RANK") == "2")
    victim.kill()
    said = launcher.communicate(timeout=30)[1]
    assert launcher.returncode != 0 and said.count("test.py: error: another process ended unexpectedly") == 1
    assert "test.py: error" not in said.replace("test.py: error: another process", "") and "rank" in said
    assert len(lines_of(tmp_path)[0]["processes"]) == 3
    assert "not finished" in (tmp_path / "results.txt").read_text()
