"""Keeping a record: copied without the folders of its machine, in place of the one before, or refused."""

import json
import re

import pytest
from conftest import ROOT
from test_docs import copied, read

from report.results import Results
from scripts import keepRecord, renderDocs
from scripts.docsBenchmark import machine_of
from scripts.renderDocs import stamp_of


@pytest.fixture
def copy(tmp_path):
    """A copy of the documentation and its records, which the test may change."""
    (tmp_path / "copy").mkdir()
    return copied(tmp_path / "copy")


def test_a_run_is_kept_in_place_of_the_one_before(copy, tmp_path, capsys):
    records = renderDocs.Records(copy)
    run, lines = records.run("first")
    again = run | {"run": "feedbeef", "folder": "/elsewhere", "command": "--out /elsewhere --seed 0"}
    again["flags"] = run["flags"] | {"out": "/elsewhere"}
    store = Results(tmp_path)
    store.append(**again)
    for line in lines:
        store.append(**line | {"run": "feedbeef"})
    assert keepRecord.main(["first", "1", "--from", str(tmp_path)], copy) == 0
    after = renderDocs.Records(copy)
    assert after.index == records.index | {"first": "feedbeef"}
    assert set(after.runs) == set(after.index.values())
    kept, own = after.run("first")
    assert kept["command"] == "--seed 0" and "folder" not in kept and "out" not in kept["flags"]
    assert [line | {"run": run["run"]} for line in own] == lines
    assert "elsewhere" not in read(copy / "docs/records/results.jsonl") + read(copy / "results.txt")
    shown_runs = re.findall(r"^Run (\w+) of", read(copy / "results.txt"), re.M)
    assert sorted(shown_runs) == sorted(after.index.values())
    assert "README.md" in renderDocs.render(copy)
    assert renderDocs.main(["--check"], copy) == 0, capsys.readouterr().out


def test_a_run_that_is_not_there_or_not_finished_is_refused(copy, tmp_path, capsys):
    before = read(copy / "docs/records/results.jsonl")
    assert keepRecord.main(["first", "1", "--from", str(tmp_path)], copy) == 2
    run, lines = renderDocs.Records(copy).run("first")
    store = Results(tmp_path)
    store.append(**run)
    for asked in ("1", run["run"]):
        assert keepRecord.main(["first", asked, "--from", str(tmp_path)], copy) == 2
    assert keepRecord.main(["first"], copy) == 2
    assert keepRecord.main(["benchmark", "1"], copy) == 2
    assert keepRecord.main(["benchmark", "--from", str(tmp_path)], copy) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 6 and all(line.startswith("keepRecord: error: ") for line in errors)
    assert "was not finished" in errors[1]
    assert read(copy / "docs/records/results.jsonl") == before


def test_the_benchmarks_records_are_kept_without_places(copy, tmp_path):
    record = renderDocs.Records(copy).benchmark()
    elsewhere = record | {"command": f"{record['command']} --out=/elsewhere", "time": "2030-01-01 00:00:00"}
    (tmp_path / "benchmark.json").write_text(json.dumps(elsewhere))
    assert keepRecord.main(["benchmark", "--from", str(tmp_path)], copy) == 0
    assert renderDocs.Records(copy).benchmark() == record | {"time": "2030-01-01 00:00:00"}
    stamp = stamp_of(copy / "figures/benchmark.png")
    assert {"docs/speed.md", "figures/benchmark.png"} <= set(renderDocs.render(copy))
    assert stamp_of(copy / "figures/benchmark.png") != stamp


def test_other_engines_of_the_same_machine_have_a_table_of_decoding_speed_alone(copy, tmp_path):
    name = "benchmark-pythia-2.8b"
    other, before = renderDocs.Records(copy).benchmark(name), read(copy / "docs/speed.md")
    for peer in other["peers"]:
        peer["engine"] = "another engine"
    (tmp_path / f"{name}.json").write_text(json.dumps(other))
    assert keepRecord.main(["benchmark", "--from", str(tmp_path), "--machine", "other.engine"], copy) == 0
    assert "docs/speed.md" in renderDocs.render(copy)
    shown = read(copy / "docs/speed.md")
    title = f"**{machine_of(other)}, beside another engine**"
    within = re.compile(r"<!-- begin pythia-speed -->.*<!-- end pythia-speed -->", re.S)
    assert title in within.search(shown)[0] and title not in within.sub("", shown)
    assert within.sub("", shown) == within.sub("", before)  # Other tables show what they showed.


def test_a_second_machine_stands_beside_the_first(copy, tmp_path, capsys):
    records = renderDocs.Records(copy)
    first = records.benchmark()
    kept = {name: list(records.benchmarks(name)) for name in ("benchmark", "benchmark-pythia-2.8b")}
    before = {name: len(read(copy / "docs/speed.md").split(name)) for name in ("AMD EPYC", "Intel Xeon")}
    for name in "benchmark", "benchmark-pythia-2.8b":
        other = records.benchmark(name)
        other = other | {"machine": other["machine"] | {"processor": "Intel Xeon"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(other))
    assert keepRecord.main(["benchmark", "--from", str(tmp_path), "--machine", "xeon"], copy) == 0
    after = renderDocs.Records(copy)
    assert after.benchmark() == first  # Figures in running text are still the first machine's.
    for name in "benchmark", "benchmark-pythia-2.8b":
        assert list(after.benchmarks(name)) == [*kept[name], f"{name}-xeon"]
    assert {"docs/speed.md", "docs/records/README.md"} <= set(renderDocs.render(copy))
    shown = read(copy / "docs/speed.md")
    assert before["Intel Xeon"] == 1 and len(shown.split("**Intel Xeon, 2 threads**")) > 5
    assert "| AMD EPYC, 2 threads: TTFT, ms | " in shown and "| Intel Xeon, 2 threads: TTFT, ms |" in shown
    assert read(copy / "README.md") == read(ROOT / "README.md")
    assert renderDocs.main(["--check"], copy) == 0, capsys.readouterr().out
    for wrong in (["benchmark", "--machine", "../xeon"], ["first", "1", "--machine", "xeon"]):
        assert keepRecord.main([*wrong, "--from", str(tmp_path)], copy) == 2
