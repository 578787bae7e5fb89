"""Keeping a record: copied without the folders of its machine, in place of the one before, or refused."""

import json
import re

from conftest import refused
from test_speed import measurement

from experiments.intervals import summarize
from report.results import Results
from scripts import keepRecord, render


def test_a_run_is_kept_in_place_of_the_one_before(copy, tmp_path, capsys):
    records = render.Records(copy)
    run, lines = records["first"]
    command = "--out /elsewhere --head /elsewhere/my-head --texts=/elsewhere"
    again = run | {"run": "feedbeef", "folder": "/elsewhere", "command": command}
    again["flags"] = run["flags"] | {"out": "/elsewhere", "head": "/elsewhere/my-head"}
    store = Results(tmp_path)
    for line in again, *lines:
        store.append(**line | {"run": "feedbeef"})
    assert keepRecord.main(["first", "1", "--from", str(tmp_path)], copy) == 0
    after = render.Records(copy)
    assert after["first"][0]["run"] == "feedbeef" and [*after.runs] == [*records.runs]
    assert all(after[name] == records[name] for name in after.runs if name != "first")
    kept, own = after["first"]
    assert kept["command"] == "--head my-head" and kept["flags"]["head"] == "my-head"
    assert "folder" not in kept and "out" not in kept["flags"]
    assert [line | {"run": run["run"]} for line in own] == lines
    written = [(copy / name).read_text() for name in ("docs/records/results.jsonl", "results.txt")]
    assert not any("elsewhere" in text for text in written)
    assert re.findall(r"^Run (\w+) of", written[1], re.M) == ["feedbeef"]  # what `make run` writes
    assert render.main([], copy) == 0 and "Written: README.md\n" in capsys.readouterr().out
    assert render.main(["--check"], copy) == 0, capsys.readouterr().out


def test_a_run_that_is_not_there_or_not_finished_is_refused(copy, tmp_path, capsys):
    before = (copy / "docs/records/results.jsonl").read_text()
    run, _ = render.Records(copy)["first"]
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "other.json").write_text("[]")
    wrong = {"first 1": "", "first": "name the run", "index": "cannot have the name", "other": "is no record"}
    for words, reason in (wrong | {"../other": "cannot have", "unheard-of": "name the run"}).items():
        assert keepRecord.main([*words.split(), "--from", str(tmp_path)], copy) == 2
        error = capsys.readouterr().err
        assert error.startswith("keepRecord: error: ") and error.count("\n") == 1 and reason in error
    Results(tmp_path).append(**run)
    for asked in ("1", run["run"]):
        assert keepRecord.main(["first", asked, "--from", str(tmp_path)], copy) == 2
        assert "was not finished" in capsys.readouterr().err
    Results(tmp_path).append(**{field: run[field] for field in ("kind", "machine", "models", "command")}, run="old")
    Results(tmp_path).append(kind="end", run="old")
    assert keepRecord.main(["first", "old", "--from", str(tmp_path)], copy) == 2
    assert "has no whole record of it ('flags')" in capsys.readouterr().err
    assert (copy / "docs/records/results.jsonl").read_text() == before


def test_a_record_of_one_file_is_kept_under_its_name(copy, tmp_path, capsys):
    record = render.Records(copy)["rounds"][0] | {"program": "-m scripts.another", "command": "--out /elsewhere"}
    (tmp_path / "other.json").write_text(json.dumps(record))
    assert keepRecord.main(["other", "--from", str(tmp_path)], copy) == 0
    assert render.Records(copy)["other"][0]["command"] == ""
    assert render.main([], copy) == 0 and capsys.readouterr().out.endswith("\nWritten: docs/records/README.md\n")
    assert "| `other` | other.json | `python -m scripts.another` |" in (copy / "docs/records/README.md").read_text()


def test_runs_of_one_command_are_kept_as_processes_and_what_cannot_be_is_refused():
    def run(name, factor, **more):
        texts = [
            measurement(method, prompt, throughput=10.0 * speed, tokens_per_round=2.5, drafted=4)
            | {"kind": "speed", "mode": "compare", "promptLen": 8, "temperature": 1.0}
            for prompt in range(8)
            for method, speed in (("target", 1), ("fixed", factor))
        ]
        same = {"command": "c", "code": "d", "machine": {}, "models": {}}
        return {"run": name} | same | more, [*texts, {"kind": "end"}]

    head, lines = keepRecord.of_processes([run("one", 2.0), run("two", 2.2)])
    assert head["run"] == "one" and [line["kind"] for line in lines].count("end") == 1
    assert [line.get("process") for line in lines] == [0] * 16 + [1] * 16 + [None]
    (row,) = [row for row in summarize(lines[:-1]) if row["method"] == "fixed"]
    assert row["speedup"].low < 2.1 < row["speedup"].high
    for other in {"code": "e"}, {"command": "f"}, {"machine": {"threads": 1}}:
        with refused("one", "two", "differ"):
            keepRecord.of_processes([run("one", 2.0), run("two", 2.0, **other)])
    with refused("fixed is 3.00 times", "2.50 tokens", "Measure again"):
        keepRecord.of_processes([run("one", 3.0)])
