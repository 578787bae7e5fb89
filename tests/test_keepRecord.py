"""Keeping a record: copied without the folders of its machine, in place of the one before, or refused."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import one_line, refused
from test_speed import measurement

from experiments.intervals import summarize
from experiments.runRecord import code_version
from report.results import Results
from scripts import keepRecord, render


@pytest.fixture
def keep(copy, monkeypatch, tmp_path):
    """`keepRecord NAME ...` with the folder tmp_path/runs, where a command measures what the record of today says.
    commands: those so far; the one numbered `stopped` is interrupted. Of the records of runs there are two: reading all
    takes seconds."""
    (run, lines), (other, others) = map(render.Records(copy).__getitem__, ("first", "diversity"))
    folder, code = tmp_path / "runs", code_version()
    few = "".join(f"{json.dumps(line)}\n" for line in [run, *lines, other, *others])
    (copy / "docs/records/results.jsonl").write_text(few)

    def keep(*words):
        return keepRecord.main([*words, "--from", str(folder)], copy)

    def measure(command, env):
        keep.commands.append(command)
        assert env.get("AN") == ("option" if "head" in command else None)
        name, unfinished = f"feed{len(keep.commands)}", len(keep.commands) == keep.stopped
        head = run | {"code": code, "folder": "/elsewhere", "command": shlex.join(command[2:]), "run": name}
        for line in head, *(lines[:-1] if unfinished else lines):
            Results(Path(command[-1])).append(**line | {"run": name})
        if unfinished:
            raise KeyboardInterrupt

    keep.commands, keep.stopped = [], None
    monkeypatch.setattr(keepRecord.subprocess, "run", measure)
    monkeypatch.setattr(keepRecord, "MEASURED", {"first": ("--head head", 2), "other": ("--lossless", 1)})
    monkeypatch.setattr(keepRecord, "ENVIRONMENT", {"first": {"AN": "option"}})
    return keep


def test_what_other_code_measured_is_measured_again_and_kept_in_place_of_the_one_before(
    copy, keep, monkeypatch, capsys
):
    records, keep.stopped = render.Records(copy), 2
    assert records.is_stale("first") and records.is_stale("other") and not records.is_stale("head-bundled-target")
    now = {"code": code_version()}
    for other, stale in (now, False), ({"code": "sha256:0"}, True):
        records.files |= {"rounds": other, "engines": {"cells": [now, other]}}
        records.runs["aside"] = records["diversity"][0] | other, []  # of no command in MEASURED
        assert records.is_stale("rounds") == records.is_stale("engines") == records.is_stale("aside") == stale
    del records.runs["aside"]
    for code, stale in (code_version("cpu", "lossless"), False), (f"{now['code']} lossless:0", True):
        records.files["engines"] = {"cells": [now], "mistakes": [{"code": code}]}
        assert records.is_stale("engines") == stale  # A planted mistake is of the code that --lossless runs.
    assert render.main(["--check"], copy) == 1
    assert (
        "record first is of other code, weights or flags, or too few processes: make records\n"
        in capsys.readouterr().out
    )
    assert keep("first") == 130 and render.Records(copy)["first"] == records["first"]
    assert keep() == 0 and [command[2] for command in keep.commands] == ["--head"] * 3 + ["--lossless"]
    after = render.Records(copy)
    assert not after.is_stale("first") and not after.is_stale("other")
    assert all(after[name] == records[name] for name in records.runs if name != "first")
    kept, lines = after["first"]
    assert keepRecord.command_of(kept) == "AN=option python test.py --head head"
    assert kept["command"] == "--head head" and "folder" not in kept and kept["run"] == "feed1"
    assert {line["process"] for line in lines if line["kind"] == "speed"} == {0, 1}
    written = [(copy / name).read_text() for name in ("docs/records/results.jsonl", "results.txt")]
    assert not any("elsewhere" in text for text in written)
    assert re.findall(r"^Run (\w+) of", written[1], re.M) == ["feed1"]  # what `make run` writes
    assert keep() == 0 and len(keep.commands) == 4
    with monkeypatch.context() as patch:
        patch.setitem(keepRecord.MEASURED, "first", ("--head other", 2))
        assert after.is_stale("first")
    monkeypatch.setattr(keepRecord, "version_of_bundled", lambda name: "trained anew")
    assert after.is_stale("first")


def test_records_of_older_code_are_carried_over_a_change_if_what_is_repeated_is_the_same(
    copy, keep, monkeypatch, tmp_path, capsys
):
    (copy / "docs/records/carried.json").unlink(missing_ok=True)
    run, lines = render.Records(copy)["first"]
    text = next(line for line in lines if line["kind"] == "speed")
    same = text["sha256"]
    for other, code in ("0" * 64, 2), (same, 0):
        text["sha256"] = other

        def rerun(command, env=None):
            assert command[2:4] == ["--rerun", run["run"]]
            name = f"{other[:3]}again"
            for line in run | {"code": code_version(), "command": shlex.join(command[2:])}, *lines:
                Results(command[-1]).append(**line | {"run": name})

        monkeypatch.setattr(keepRecord.subprocess, "run", rerun)
        assert keep("first", "--carry", "a refusal") == code
        now = render.Records(copy)
        assert now.is_of_now(run["code"]) == (code == 0) and not now.is_of_now("sha256:0")
        if code:
            assert not now.carried
            one_line(capsys, "first is not the same: Run", "1 of", script="keepRecord")
            Results(tmp_path / "runs").lines.unlink()  # It would be the same again, and is not repeated.
    assert [change["why"] for change in now.carried] == ["a refusal"] and now.carried[0]["shown"][0]["same"] > 1
    change = {"digests": {code_version(): "sha256:later"}}  # Changes follow one another.
    now.carried.append(change)
    assert now.carried_to(run["code"]) == "sha256:later"
    assert keep("--carry", "nothing") == keep("rounds", "--carry", "a file") == 2


def test_a_record_of_another_kind_of_processor_is_not_measured_here(keep, monkeypatch, capsys):
    monkeypatch.setattr(keepRecord, "CAPABILITY", {"other": "an abacus"})
    assert keep() == 0 and [command[2] for command in keep.commands] == ["--head"] * 2
    assert keep("other") == 2 and len(keep.commands) == 2
    one_line(capsys, "other is measured on a machine with an abacus, and this one has ", script="keepRecord")


def test_a_record_that_cannot_be_kept_is_refused(copy, keep, monkeypatch, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/rounds.json").write_text("[]")
    commands = []  # None of them measures anything.
    monkeypatch.setattr(keepRecord.subprocess, "run", lambda command, env: commands.append(command))
    before = (copy / "docs/records/results.jsonl").read_text()
    wrong = {
        "first": "the command of first failed",
        "rounds": "is no record",
        "chat": "is not there; the record is of `",
    }
    wrong |= dict.fromkeys(("../other", "index", "nothing"), "no record with the name")
    for name, reason in wrong.items():
        assert keep(name) == 2
        one_line(capsys, reason, script="keepRecord")
    assert keep("first", "nonsense") == 2 and len(commands) == 1  # All names are read before any is measured.
    assert (copy / "docs/records/results.jsonl").read_text() == before


def test_a_record_of_one_file_is_kept_under_its_name(copy, tmp_path, capsys):
    record = render.Records(copy)["rounds"][0] | {"command": "--out /elsewhere --head /elsewhere/my-head"}
    (tmp_path / "rounds.json").write_text(json.dumps(record))
    assert keepRecord.main(["rounds", "--from", str(tmp_path)], copy) == 0
    assert render.Records(copy)["rounds"][0]["command"] == "--head my-head"


def test_runs_of_one_command_are_kept_as_processes_and_what_cannot_be_is_refused():
    def run(name, factor, **more):
        texts = [
            measurement(method, prompt, throughput=10.0 * speed, tokens_per_round=2.5, drafted=4)
            | {"kind": "speed", "mode": "compare", "promptLen": 8, "temperature": 1.0}
            for prompt in range(8)
            for method, speed in (("target", 1), ("fixed", factor))
        ]
        same = {"command": "c", "code": "sha256:d", "machine": {}, "models": {}}
        step = {"kind": "costs", "of": "step", "seconds": [factor, 9.0, factor]}
        engine = {
            "kind": "lossless",
            "test": "engine",
            "method": "fixed",
            "failed": "a reason" if factor == 2.2 else None,
            "run": name,
        }
        return {"run": name} | same | more, [*texts, engine, step, {"kind": "end"}]

    head, lines = keepRecord.of_processes([run("one", 2.0), run("two", 2.2)])
    assert head["run"] == "one" and [line["kind"] for line in lines].count("end") == 1
    assert [line.get("process") for line in lines] == [0] * 16 + [1] * 16 + [None] * 3
    assert lines[-3]["failed"] == "a reason"  # in one of the processes
    assert {line["run"] for line in lines} == {"one"}  # Of another run it would not be in the record.
    assert lines[-2]["seconds"] == [2.0, 2.2] and lines[-2]["processes"] == 2
    assert keepRecord.of_processes([run("one", 2.0)])[1][-2]["seconds"] == [2.0, 9.0, 2.0]
    (row,) = [row for row in summarize(lines[:32]) if row["method"] == "fixed"]
    assert row["speedup"].low < 2.1 < row["speedup"].high
    sweep = run("two", 2.0, code="sha256:d sweep:e")[0]
    assert keepRecord.differing([run("one", 2.0)[0], sweep]) == []  # The common part is the same.
    assert keepRecord.differing([sweep, sweep | {"code": "sha256:d sweep:f"}]) == ["code"]
    for other in {"code": "sha256:e"}, {"machine": {"threads": 1}}:
        with refused("one", "two", f"differ in {[*other][0]}"):
            keepRecord.of_processes([run("one", 2.0), run("two", 2.0, **other)])
    with refused("fixed is 3.00 times", "2.50 tokens", "Measure again"):
        keepRecord.of_processes([run("one", 3.0)])
