"""The course report's protocol by one command: tiny models and both data sets from a hub on localhost, one page out."""

import re
import shlex

import pytest
from conftest import ROOT, few_mistakes, one_line
from localHub import Repository
from test_downloadData import BOOKS, TABLES, table
from test_speed import measurement as timed

import downloadModel
from experiments.runRecord import origin
from experiments.settings import parse
from inputs import files
from report.results import Results
from report.sources import REPORT_PROMPTS, REPORT_SPEED
from scripts import courseReport
from scripts.courseReport import CACHED, NO_CACHE, speeds_beside

TARGET, MID, DRAFT = (f"EleutherAI/pythia-{size}" for size in ("2.8b", "410m", "70m"))
SMALL = "--sentences 1 --sentenceLimit 100 --maxLen 4 --repeats 1 --device cpu"
STEPS = 9
LOCAL = ("bundled-target", "bundled-draft", "--data", "sample")


@pytest.fixture
def served(hub, models_folder, pair_folder, tmp_path, monkeypatch):
    """The hub, with tiny models under Pythia's names and short data sets."""
    monkeypatch.setattr(files, "DATASETS", tmp_path / "datasets")
    for name, folder in ((TARGET, "target"), (MID, "target"), (DRAFT, "draft")):
        hub.models[name] = Repository({file.name: file for file in (pair_folder / folder).iterdir()})
    lines = [" The lamp was lit and the tide was out in the harbour ." * 8 + f" {year} \n" for year in range(9)]
    lines.insert(0, " = Harbour = \n")
    hub.datasets["Salesforce/wikitext"] = Repository({TABLES[0]: table(text=lines)})
    books = [f"Nobody in harbour {i} had heard the bell, though the lamp was lit.\n" * 5 for i in range(3)]
    hub.datasets["emozilla/pg19"] = Repository({BOOKS: table(text=books)})
    return hub


def run(folder, *more):
    return courseReport.main(["--out", str(folder), "--tokens", "60", *more])


def tables_of(page, heading):
    """The tables of a section: lists of rows, which are lists of cells."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\n?)+", section, re.M)]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in block] for block in blocks]


def finished(words):
    """Leave the record of a run of test.py that measured nothing; its exit code."""
    models = {role: {"name": role, "version": "none", "parameters": 1} for role in ("target", "draft")}
    store = Results(words[-1])
    name = f"run{len(store.runs())}"
    store.append(kind="run", run=name, **origin(words, {"seed": 0}, "cpu", models))
    store.append(run=name, kind="end")
    return 0


def test_the_whole_protocol_downloads_measures_and_writes_one_page(served, cli, tmp_path, monkeypatch, capsys):
    """All but three steps, which are runs like the others, measure."""
    calls = []
    few_mistakes(monkeypatch)

    def test_py(words):
        calls.append(words)
        stub = words[0] in ("--speedNew", "--speedMulti") or words[:2] == ["--compare", "all"]
        return finished(words) if stub else cli.main(words)

    monkeypatch.setattr(courseReport, "test_py", test_py)
    folder = tmp_path / "out"
    code = run(folder, "--flags", SMALL)
    output = capsys.readouterr()
    assert code == 0 and len(calls) == STEPS, output.err
    assert output.out.count(": done, ") == STEPS
    page = (folder / "report.md").read_text()
    assert "Not measured" not in page and "Not one experiment" not in page
    assert "pythia-2.8b" in page and "torch 2" in page
    speeds, perplexity = tables_of(page, "Beside the report's figures")
    assert [row[1:3] for row in speeds[2:]] == [[*printed] for printed in REPORT_SPEED.values()]
    by_name = {row[0]: dict(zip(speeds[0], row)) for row in speeds[2:]}
    no_cache = "here, no KV cache, eager"
    assert not by_name["draft: tokens/s"][no_cache] and by_name["target: tokens/s"][no_cache]
    assert all(row["here, KV cache, eager"] and row["here, KV cache, compiled"] for row in by_name.values())
    assert [row[0] for row in perplexity[2:]] == ["wikitext", "pg19", "the report (WikiText-2)"]
    assert all(tables_of(page, f"Perplexity: {data}") for data in ("wikitext", "pg19"))
    pictures = re.findall(r"!\[.*\]\((figures/.*png)\)", page)
    assert len(pictures) == 4 and all((folder / picture).exists() for picture in pictures)  # speeds, sweep, tests
    before, calls[:] = served.requests.copy(), []
    assert run(folder, "--flags", SMALL) == 0 and calls == [] and served.requests == before
    assert capsys.readouterr().out.count("measured before, run ") == STEPS
    assert (folder / "report.md").read_text() == page


def test_a_step_that_fails_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    stub = 'import sys\nprint("a table")\nsys.exit("test.py: error: no room" if "--sweep" in sys.argv else 0)\n'
    (tmp_path / "test.py").write_text(stub)
    monkeypatch.setattr(courseReport, "ROOT", tmp_path)  # where test.py is
    real = courseReport.test_py
    monkeypatch.setattr(courseReport, "test_py", lambda words: real(words) or finished(words))
    assert run(tmp_path, *LOCAL) == 1
    output = capsys.readouterr().out
    assert output.count("FAILED") == 1 and re.search(r"Speed over gamma: sample: FAILED \(exit code 1\), \d+ s", output)
    assert output.count(": done, ") == 6 and "1 failed: Speed over gamma: sample." in output
    assert (tmp_path / "report.md").read_text().count("Not measured.") == 1
    commands = []
    monkeypatch.setattr(courseReport, "test_py", lambda words: commands.append(words) or finished(words))
    assert run(tmp_path, *LOCAL) == 0 and [command[0] for command in commands] == ["--sweep"]
    assert "Not one experiment" not in (tmp_path / "report.md").read_text()
    lines = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(lines.replace('"version": "none"', '"version": "other"', 1))
    assert run(tmp_path, *LOCAL) == 0 and "the runs differ in weights." in (tmp_path / "report.md").read_text()
    assert run(tmp_path, *LOCAL, "--flags", "--gamma 3") == 0 and len(commands) == 6  # the five that read gamma


def test_an_interruption_leaves_a_page_and_goes_on(pair_folder, text_file, tmp_path, monkeypatch, capsys):
    """Models and texts are folders and files with a path from the root."""
    words = str(pair_folder / "target"), str(pair_folder / "draft"), "--data", str(text_file)
    answers = iter([0, 130])
    monkeypatch.setattr(courseReport, "test_py", lambda words: next(answers) or finished(words))
    assert run(tmp_path, *words) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text().count("Not measured.") == 6
    monkeypatch.setattr(courseReport, "test_py", finished)
    assert run(tmp_path, *words) == 0 and "measured before, run run0" in capsys.readouterr().out


def test_a_download_that_fails_is_one_line_and_an_exit_code(served, tmp_path, monkeypatch, capsys):
    del served.datasets["emozilla/pg19"]
    monkeypatch.setattr(courseReport, "test_py", finished)
    assert run(tmp_path) == 1
    one_line(capsys, script="downloadData.py")


WRONG = {"--flags '--gamma 0'": "gamma", "--books 0": "books", "a b c": "c", "nobody b/c": "nobody"}
WRONG |= {"--flags '--prompt x'": "--dataset", "--data wikitex": "wikitex", '--flags "\'"': ""}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_flag_is_one_line_before_anything_is_downloaded(hub, tmp_path, capsys, arguments):
    assert run(tmp_path, *shlex.split(arguments)) == 2
    assert one_line(capsys, WRONG[arguments], script="courseReport") and hub.requests == []


def test_speeds_stand_beside_the_reports_and_a_missing_row_is_empty():
    lines = [timed("noCache", 0, 0, 3.7243, report_tpot=1 / 3.7243), timed("speculativeNoCache", 0, 0, 9.35)]
    table = speeds_beside({"here": (lines, NO_CACHE), "cached": (lines, CACHED)})
    by_name = {row[0]: [str(cell) for cell in row[1:]] for row in table.rows}
    assert by_name["target: tokens/s"] == ["3.7449", "3.7243", "3.72", ""]
    assert by_name["speculative: speed-up"] == ["2.49", "1.81", "2.51", ""]
    assert by_name["target: total/n, ms"] == ["267.0314", "268.5069", "269", ""]
    assert by_name["draft: tokens/s"] == ["111.4168", "113.9199", "", ""]


def test_a_column_says_how_its_models_ran_whatever_was_asked_for():
    def step(title, *compiled):
        models = {str(n): {"name": "m", "version": "v", "parameters": 1, "compiled": c} for n, c in enumerate(compiled)}
        about = {"kind": "speed", "mode": "compare", "promptLen": 8, "dtype": "float32", "temperature": 0.85}
        about |= {"prompt_tokens": 8}
        lines = [timed(name, 0, 0, 7.0) | about for name in ("target", "noCache")]
        return title, ({"run": "r", "time": ""} | origin([], {"seed": 0}, "cpu", models), lines)

    for eager, compiled, heads in (
        ([False], [True], ["no KV cache, eager", "KV cache, eager", "KV cache, compiled"]),
        ([False], [False, True], ["no KV cache, eager", "KV cache, eager", "--compile, but compiled in part"]),
        ([True], [False], ["no KV cache, compiled", "KV cache, compiled", "KV cache, --compile, but eager"]),
    ):
        page = courseReport.page([step(courseReport.SPEED, *eager), step(courseReport.COMPILED, *compiled)])
        head = tables_of(page, "Beside the report's figures")[0][0]
        assert all(cell.endswith(words) for cell, words in zip(head[3:], heads, strict=True)), head


def test_the_default_models_and_settings_are_those_of_the_reports_code(monkeypatch):
    words = "--out", str(ROOT / "docs"), "--flags", "--device cpu --promptLen 8 9"
    plan = courseReport.read_plan(words)
    assert (plan.target, plan.mid, plan.draft) == (TARGET, MID, DRAFT) == downloadModel.PYTHIA[::-1]
    assert courseReport.read_plan([TARGET, "b/c", *words]).mid is None
    on_cpu = dict(plan.steps)
    monkeypatch.setattr(courseReport, "pick_device", lambda name: "cuda")
    on_gpu = dict(courseReport.steps(plan))
    timed_steps = [title for title in on_cpu if on_gpu[title] != on_cpu[title]]
    assert timed_steps[:2] == [courseReport.SPEED, courseReport.COMPILED] and len(timed_steps) == 4
    for title, prompt in zip(timed_steps, [REPORT_PROMPTS[0]] * 2 + [REPORT_PROMPTS[1]] * 2):
        settings = parse(on_gpu[title])
        assert (settings.texts.prompt, settings.models.dtype) == (prompt, "float16")
        assert (settings.sampling.of("speed").temperature, settings.sampling.of("speed").top_p) == (0.85, 0.9)
    additive, cascade = (parse(on_gpu[title]) for title in timed_steps[2:])
    assert additive.models.draft == MID and additive.sampling.max_len_of("speedNew") == 1000
    assert cascade.models.draft == DRAFT and cascade.sampling.max_len_of("speedMulti") == 500
    assert parse(on_gpu["Every method: wikitext"]).texts.prompt_lengths == (8, 9)
    texts = parse(on_gpu["Perplexity: wikitext"]).texts
    assert (texts.sentence_limit, texts.sentences, texts.dataset) == (100, 20, "wikitext")
