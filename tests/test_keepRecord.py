"""Keeping a record: copied without the folders of its machine, in place of the one before, or refused."""

import json
import re

import pytest
from conftest import refused
from test_docs import copied, read
from test_speed import measurement

from experiments.intervals import summarize
from report.results import Results
from scripts import keepRecord, render


@pytest.fixture
def copy(tmp_path):
    """A copy of the documentation and its records, which the test may change."""
    (tmp_path / "copy").mkdir()
    return copied(tmp_path / "copy")


def test_a_run_is_kept_in_place_of_the_one_before(copy, tmp_path, capsys):
    records = render.Records(copy)
    run, lines = records.run("first")
    command = "--out /elsewhere --head /elsewhere/my-head --texts=/elsewhere"
    again = run | {"run": "feedbeef", "folder": "/elsewhere", "command": command}
    again["flags"] = run["flags"] | {"out": "/elsewhere", "head": "/elsewhere/my-head"}
    store = Results(tmp_path)
    store.append(**again)
    for line in lines:
        store.append(**line | {"run": "feedbeef"})
    assert keepRecord.main(["first", "1", "--from", str(tmp_path)], copy) == 0
    after = render.Records(copy)
    assert after.index == records.index | {"first": "feedbeef"}
    assert set(after.runs) == set(after.index.values())
    kept, own = after.run("first")
    assert kept["command"] == "--head my-head" and kept["flags"]["head"] == "my-head"
    assert "folder" not in kept and "out" not in kept["flags"]
    assert [line | {"run": run["run"]} for line in own] == lines
    assert "elsewhere" not in read(copy / "docs/records/results.jsonl") + read(copy / "results.txt")
    assert re.findall(r"^Run (\w+) of", read(copy / "results.txt"), re.M) == ["feedbeef"]  # what `make run` writes
    assert "README.md" in render.render_all(copy)
    assert render.main(["--check"], copy) == 0, capsys.readouterr().out


def test_a_run_that_is_not_there_or_not_finished_is_refused(copy, tmp_path, capsys):
    before = read(copy / "docs/records/results.jsonl")
    assert keepRecord.main(["first", "1", "--from", str(tmp_path)], copy) == 2
    run, lines = render.Records(copy).run("first")
    store = Results(tmp_path)
    store.append(**run)
    for asked in ("1", run["run"]):
        assert keepRecord.main(["first", asked, "--from", str(tmp_path)], copy) == 2
    assert keepRecord.main(["first"], copy) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all(line.startswith("keepRecord: error: ") for line in errors)
    assert "was not finished" in errors[1]
    assert read(copy / "docs/records/results.jsonl") == before


def test_a_record_of_one_file_is_kept_under_its_name(copy, tmp_path, capsys):
    record = render.Records(copy).file("rounds") | {"program": "-m scripts.another", "command": "--out /elsewhere"}
    (tmp_path / "other.json").write_text(json.dumps(record))
    assert keepRecord.main(["other", "--from", str(tmp_path)], copy) == 0
    assert render.Records(copy).file("other")["command"] == ""
    assert render.render_all(copy) == ["docs/records/README.md"]
    assert "| `other` | other.json | `python -m scripts.another` |" in read(copy / "docs/records/README.md")
    assert render.main(["--check"], copy) == 0, capsys.readouterr().out
    (tmp_path / "index.json").write_text("{}")
    for wrong in "index", "../other", "unheard-of":
        assert keepRecord.main([wrong, "--from", str(tmp_path)], copy) == 2


def test_runs_of_one_command_are_kept_as_processes_and_what_cannot_be_is_refused():
    def run(name, factor, **more):
        texts = [
            measurement(method, prompt, throughput=10.0 * speed, tokens_per_round=2.5, drafted=4)
            | {"kind": "speed", "mode": "compare", "promptLen": 8, "temperature": 1.0}
            for prompt in range(8)
            for method, speed in (("target", 1), ("fixed", factor))
        ]
        return {"run": name, "command": "c", "code": "d", "machine": {}} | more, [*texts, {"kind": "end"}]

    head, lines = keepRecord.of_processes([run("one", 2.0), run("two", 2.2)])
    assert head["run"] == "one" and [line["kind"] for line in lines].count("end") == 1
    assert [line.get("process") for line in lines] == [0] * 16 + [1] * 16 + [None]
    (row,) = [row for row in summarize(lines[:-1]) if row["method"] == "fixed"]
    assert row["speedup"].low < 2.1 < row["speedup"].high
    with refused("one", "two", "differ"):
        keepRecord.of_processes([run("one", 2.0), run("two", 2.0, code="e")])
    with refused("fixed is 3.00 times", "2.50 tokens", "Measure again"):
        keepRecord.of_processes([run("one", 3.0)])
