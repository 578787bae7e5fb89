"""No measurement is lost, whatever happens; what is shown is what was measured, and nothing else."""

import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import sys
from dataclasses import replace
from io import StringIO
from unittest.mock import Mock

import pytest
from conftest import ROOT, refused
from rich.console import Console
from rich.text import Text

from experiments.intervals import Interval, Range, interval, summarize
from experiments.theory import predict
from report import figures, results
from report.results import Results, show
from report.runTables import conditions, ranked, speed_notes, swept_texts
from report.tables import WIDTH, Measured, Table, give_or_take, markdown, notation, span
from utils import UserError

FORK = multiprocessing.get_context("fork")


def run_line(run="r1", command="--speed", **flags):
    model = {"version": "sha256:0", "parameters": 1_500_000}
    sampling = {"temperature": 0.85, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.0}
    return {
        "kind": "run",
        "run": run,
        "time": "2026-01-01 00:00:00",
        "command": command,
        "device": "cpu",
        "flags": {"maxLen": 8, "gamma": 4, **sampling, "seed": 0} | flags,
        "machine": {"processor": "A CPU", "threads": 1, "torch": "2", "transformers": "5"},
        "models": {role: {"name": role, **model} for role in ("target", "draft")},
    }


def speed_line(run="r1", method="target", prompt=0, scale=1.0, **changes):
    times = {"ttft": 0.5 * scale, "tpot": 0.25 * scale, "report_tpot": 0.3 * scale, "seconds": 1.0 * scale}
    counts = {"rounds": 4, "drafted": 7, "accepted": 4, "acceptance_by_position": [[4, 3], [3, 1]]}
    conditions = {"kind": "speed", "run": run, "dtype": "float32", "mode": "speed", "promptLen": 64}
    conditions |= {"temperature": 0.85}
    text = {"method": method, "prompt": prompt, "repeat": 0, "prompt_tokens": 64, "tokens_per_round": 2.0}
    text |= {"tokens": 2001}
    return {**conditions, **text, **times, "throughput": 4.0 / scale, **counts} | changes


def speed_lines(speeds, prompts=1, **changes):
    """Texts of `--compare`: of each method its tokens a second, of each prompt."""
    return [
        speed_line(**{"method": method, "prompt": prompt, "throughput": float(speed), "mode": "compare"} | changes)
        for method, speed in speeds.items()
        for prompt in range(prompts)
    ]


def ppl_lines(corpus="corpus", value=17.0):
    ppl = {"draft": 5 * value, "target": value, "speculative": value * (1 + 1e-8)}
    common = {"run": "r1", "dtype": "float32", "sentenceLimit": 500, "corpus": corpus, "tokens": 123456}
    yield {"kind": "ppl", "of": "text", "texts": 10, "each": [ppl], "ppl": ppl} | common
    units = {role: {"token": p, "word": p, "byte": p} for role, p in ppl.items()}
    yield {"kind": "ppl", "of": "corpus", "documents": 1, "window": 1024, "stride": 512, "ppl": units} | common


def sweep_costs(temperature=0.85, **more):
    conditions = {"run": "r1", "mode": "sweep", "promptLen": 64, "temperature": temperature}
    costs = {"kind": "costs", "of": "sweep", "alpha": 0.6, "scoring": [1.0] * 11, "drafting": 0.25}
    return conditions | costs | {"overlap_by_position": []} | more


def write(folder, *lines):
    folder.mkdir(exist_ok=True)
    store = Results(folder)
    for line in lines:
        store.append(**line)
    store.render()
    return store.text.read_text(encoding="utf-8")


def test_what_is_appended_is_read_back(tmp_path):
    store, text = Results(tmp_path), "naïve \u2028\x85\x1c\n\udcff [b]"
    assert store.records() == [] and store.runs() == [] and store.rendered().strip() == ""
    store.append(kind="run", run="a", text=text, number=1.5, unknown=float("nan"))
    store.append(kind="speed", run="a", counts=[(1, 2)], each=[{"perplexity": math.nan, "gap": -math.inf}])
    store.append(kind="speed", run="of nobody")
    store.append(kind="end", run="a")
    first, *rest = store.records()
    assert first == {"kind": "run", "run": "a", "text": text, "number": 1.5, "unknown": None}
    assert store.runs() == [(first, [rest[0], rest[2]])] and rest[0]["counts"] == [[1, 2]]
    assert rest[0]["each"] == [{"perplexity": None, "gap": None}]
    assert store.lines.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_line_cut_by_a_kill_is_passed_over_and_the_next_has_its_own(tmp_path, cut):
    store = Results(tmp_path)
    store.append(kind="run", run="a")
    store.append(kind="speed", run="a", number=1)
    content = store.lines.read_bytes()
    store.lines.write_bytes(content[:-cut])
    kept = [{"kind": "run", "run": "a"}] + [{"kind": "speed", "run": "a", "number": 1}] * (cut == 1)
    assert store.records() == kept
    store.append(kind="speed", run="a", number=2)
    assert store.records() == kept + [{"kind": "speed", "run": "a", "number": 2}]


def append_many(folder, process):
    for number in range(25):
        Results(folder).append(process=process, number=number, filling="x" * (number * 997 % 20_000))


def test_processes_that_append_at_once_lose_nothing(tmp_path):
    with FORK.Pool(4) as pool:
        pool.starmap(append_many, [(tmp_path, process) for process in range(4)], chunksize=1)
    records = Results(tmp_path).records()
    for process in range(4):
        assert [record["number"] for record in records if record["process"] == process] == list(range(25))


def test_the_text_is_what_the_screen_shows(tmp_path):
    """The screen has colours and fills lines with spaces; there is no other difference."""
    texts = itertools.product(range(3), ("draft", "target", "speculative"))
    lines = [speed_line(method=name, prompt=prompt, scale=1 + prompt + len(name)) for prompt, name in texts]
    text = write(tmp_path, run_line(), *lines, *ppl_lines(), run_line("r2"), speed_line("r2"))
    screen = StringIO()
    for run, measurements in reversed(Results(tmp_path).runs()):
        show(run, measurements, file=screen, force_terminal=True, color_system="standard", legacy_windows=False)
    shown = screen.getvalue()
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert [line.rstrip() for line in plain] == text[text.index("=" * 9) :].splitlines()  # below the index
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_the_newest_run_is_first_below_a_line_for_each_and_what_there_is_is_shown(tmp_path):
    """A run without an end says so; lines of another version do not keep others from being shown."""
    old = run_line("old", command="--compare fixed"), speed_line("old"), {"kind": "end", "run": "old"}
    twice = speed_line("old", "fixed", scale=0.5)
    text = write(tmp_path, {"kind": "run", "run": "odd"}, *old, twice, run_line("new", command="x" * 99))
    index = text.splitlines()
    assert index[2].endswith("fixed: 2.00 of plain") and index[1].rstrip().endswith("...  not finished")
    for line, name in zip(index[1:3], ("new", "old")):
        assert index[int(line.split()[0])].startswith(f"Run {name}")
    assert text.index("Run new") < text.index("Run old") < text.index("Run odd was written by another version")
    assert "Run new of 2026-01-01 00:00:00, not finished\n" in text and "Run old of 2026-01-01 00:00:00\n" in text
    assert "target: target, 1.5 M parameters, sha256:0" in text and text.count("Speed") == 1
    assert "A CPU, 1 thread, " in text and "Speed: 1 prompt of 64 tokens" in text
    assert not re.search(r"\b1 (threads|prompts|texts|methods|repeats)\b", text)


def test_the_headline_of_a_run(tmp_path):
    """Of a run that was stopped none; of a queue that of the queue, as in its table."""
    p = {"chi_square": 0.5}
    drawn = {"kind": "lossless", "test": "drawn", "p": p, "impossible": 0, "limit": 1e-4, "method": "fixed"}
    drawn |= {"dtype": "float32", "tokens": 9}
    audited, end = {"kind": "lossless", "test": "greedyAudit", "beyond": 1, "tokens": 9, "texts": 1}, {"kind": "end"}
    audited |= {"largest_gap": 1.0, "allowed": 0.1, "near_ties": 0}
    found = [results.headline(lines) for lines in ([drawn], [drawn, end], [drawn | {"impossible": 1}, end])]
    assert found == ["not finished", "no difference", "a difference"]
    assert results.headline([audited, end]) == "a difference"
    texts = [*speed_lines({"target": 10, "fixed": 20}, batch=2)]
    assert results.headline(texts) == "not finished"
    queues = [line | {"kind": "queue", "throughput": of} for line, of in zip(texts, (100.0, 150.0))]
    assert results.headline([*texts, end]) == "fixed: 2.00 of plain"
    assert results.headline([*texts, *queues, end]) == "fixed: 1.50 of plain"


def test_the_title_has_the_flags_of_the_draft_and_the_notes_the_repeats_of_each_mode():
    run = run_line(tree="3,2,1", treeRule="topDown", draftTemperature=0.5, draftTop_p=None, lookupFirst=True)
    lines = speed_lines({"target": 1.0}, mode="speed")
    title = conditions(run, lines)
    assert "maxLen 8, tree 3,2,1, treeRule topDown, lookupFirst True, draftTemperature 0.5, temp" in title
    assert "gamma 4, tree 3,2,1" in conditions(run, speed_lines({"target": 1.0}))  # --compare has chains too
    more = [line | {"repeat": 1, "mode": "compare"} for line in lines] + [line | {"mode": "compare"} for line in lines]
    assert "prompts and 1 (--speed), 2 (--compare) interleaved repeats. " in speed_notes([*lines, *more], [], False)
    assert "prompts and 2 interleaved repeats. " in speed_notes(more, [], False)


def test_figures_are_medians_of_the_lines_and_what_does_not_exist_is_a_dash(tmp_path):
    """One token has no time per token after the first; two leave no room for a guess."""
    texts = itertools.product(range(3), (("target", 1.0), ("speculative", 0.5)))
    lines = [speed_line(method=name, prompt=at, scale=scale * (at + 1)) for at, (name, scale) in texts]
    text = write(tmp_path, run_line(), *lines)
    target, speculative = (re.search(f"^{name}.*", text, re.M)[0].split() for name in ("target alone", "speculative"))
    assert target[2:] == ["1000", "500", "2.00", "1.00", "600"]
    assert speculative[1:] == ["500", "250", "4.00", "2.00", "0.571", "2.00", "300"]
    assert "(500–1500)" in text and "1 repeat (range: fewer than 4 independent values)." in text
    assert "Acceptance by position in the round: 0.75, 0.33." in text
    nothing = {"tpot": math.nan, "tokens_per_round": math.nan, "acceptance_by_position": []}
    text = write(tmp_path / "short", run_line(maxLen=1), *(line | nothing for line in lines))
    assert " - " in next(line for line in text.splitlines() if line.startswith("speculative"))


def test_no_figure_is_cut_however_large(tmp_path):
    """A column too narrow for its numbers would crop them to other numbers. Names are folded instead."""
    methods = []
    for n in range(1, 6):
        speeds, times = dict.fromkeys(("draft", "target", "speculative"), 1234.56 * n), {"ttft": 12.3456 * n}
        methods += speed_lines(speeds, mode="speed", prompt=n, tpot=1.23456 * n, report_tpot=12.3456, **times)
    name = "a corpus of a very long name indeed, longer than any column"
    text = write(tmp_path, run_line(), *methods, *ppl_lines(corpus=name, value=87_654.321), *ppl_lines(value=7e300))
    figures = "37037 [6173, 67901] 3704 [617, 6790] 123,456 438,271.6050 87,654.321000 87,654.321877"
    for figure in (*figures.split(), "3.5000e+301", "7.000000e+300", "1.0e-08"):
        assert re.search(rf"(^|\s){re.escape(figure)}($|\s)", text, re.M), figure
    assert all(word in text for word in name.split())
    nothing = write(tmp_path / "nothing", run_line(), *ppl_lines(value=math.inf)).splitlines()
    assert [line.split()[-4:] for line in nothing if line.startswith("corpus")] == [["-"] * 4] * 2
    assert all(len(line) <= WIDTH for line in text.splitlines())


def overlap_line(method, *positions, accepted=8):
    conditions = {"kind": "costs", "of": "overlap", "run": "r1", "mode": "compare", "promptLen": 64, "rounds": 8}
    return conditions | {"method": method, "overlap_by_position": positions, "accepted": accepted}


def test_tables_of_methods_stand_beside_theory_where_it_was_measured(tmp_path):
    names = "target", "speculativeContrastive", "costAware", "draftConfidence", "lookup"
    lines = speed_lines(dict.fromkeys(names, 4.0))
    old = write(tmp_path / "old", run_line(), *lines)
    assert all(name in old for name in ("spec. contrastive", "cost aware", "draft confidence"))
    assert "theory" not in old and "min(p, q)" not in old
    text = write(tmp_path, run_line(), *lines, overlap_line("lookup", (8, 6, 3.0), (2, 2, 1.0)))
    assert text.startswith(old.split("Medians")[0])
    rows = text.split("Beside theory")[1].splitlines()
    assert [row.split() for row in rows if row.startswith("lookup")] == [["lookup", "0.500", "2.00", "1.56", "1.28"]]
    assert all(len(line) <= WIDTH for line in text.splitlines())  # 4 of 8; 2 tokens a round of 1 + 3/8 + 3/8 1/2
    assert not any(row.startswith(("target alone ", "spec.")) for row in rows)


def test_what_is_said_of_trees_and_of_no_cache_is_said_where_it_was_measured(tmp_path):
    """Trees stand beside the fastest chain; half of the rounds' first siblings and a quarter of their second ones
    should be accepted. Without a KV cache the gain is that of the course report."""
    speeds = {"target": 5, "fixed": 8, "block": 10, "noCache": 4, "speculativeNoCache": 9}
    lines, with_tree = speed_lines(speeds, 2), speed_lines({"tree": 12, "draft": 90}, 2)
    overlap = overlap_line("tree", (8, 8, 4.0, 8, 2.0), accepted=4)
    text = " ".join(write(tmp_path, run_line(), *lines, *with_tree, overlap).split())
    assert "tree 0.500 1.50 1.75 0.86" in text and "In a tree, the sum is that of first siblings" in text
    assert "tree over block, the fastest of the others by these texts: 1.200, paired." in text
    assert "without a KV cache, as in the course report's code, speculative over plain: 2.250 (paired)" in text
    plain = write(tmp_path / "plain", run_line(), *lines[:-2])
    assert "fastest of the others" not in plain and "course report's code" not in plain


def test_intervals_and_ranges_have_their_own_notation():
    assert str(span(Interval(4.42, 4.31, 4.93))) == "4.42 [4.31, 4.93]"
    assert span(Range(4.42, 4.31, 4.93)).written("\n") == "4.42\n(4.31–4.93)"
    assert str(span(interval([2.0]))) == str(span(interval([2.0] * 9))) == "2.00"
    assert str(span([math.nan] * 3)) == "-" and str(Measured(0.51234, digits=3)) == "0.512"
    prompts = [(number % 3,) for number in range(30)]  # Of ten texts each, three are independent.
    assert give_or_take([1.0, 2.0, 6.0] * 10, prompts) == "3\n(1–6)"
    assert "±" in give_or_take([1.0, 2.0, 6.0] * 10, [(number,) for number in range(30)])
    alone, of_many, of_few = (Table("", [""], [[span(figures)]]) for figures in ([1] * 3, [1, 0, 2], Range(1, 0, 2)))
    assert notation(alone) == "" and notation(of_many) == " [95 % bootstrap interval]"
    assert notation(of_few) == " (range: fewer than 4 independent values)"
    assert notation(of_few, of_many) == " [95 % bootstrap interval] or (range: fewer than 4 independent values)"


@pytest.mark.parametrize("name", ["head-bundled-target", "ablation-bundled-target"])
def test_the_figure_of_a_training_has_a_line_for_each_guess_or_variant(name):
    record = json.loads((ROOT / "docs" / "records" / f"{name}.json").read_text())
    of_one = ["all tested guesses", *map("guess {}".format, (1, 2, 3, 4))]
    names = [*record["variants"]] if len(record["variants"]) > 1 else of_one
    (axes,) = figures.draw_trainings(record).axes
    assert (
        {line.get_label() for line in axes.lines} == {text.get_text().split("  ")[0] for text in axes.texts} == {*names}
    )
    assert len({line.get_color() for line in axes.lines}) == len(names)
    figures.plt.close("all")


def test_a_table_in_markdown_has_the_cells_of_the_screen():
    table = Table("T", ["", "tokens/\nround", "K-S\np", "by"], left=(3,))
    table.add("a", span(Interval(4.42, 4.31, 4.93)), Measured(math.nan), "x | y")
    table.add("b", "7")
    assert markdown(table).splitlines() == [
        "|  | tokens/round | K-S p | by |",
        "| --- | ---: | ---: | --- |",
        r"| a | 4.42 [4.31, 4.93] | - | x \| y |",
        "| b | 7 |  |  |",
    ]
    assert markdown(table, "tokens/round | ", "b").splitlines()[2:] == ["| 7 | b |"]
    table.heads.append("empty")
    assert "empty" not in markdown(table) and "empty" in markdown(table, " | empty")
    with refused("the table 'T' has no column 'alpha'"):
        markdown(table, "alpha")


def test_methods_are_in_the_order_of_their_speed_up_and_not_of_throughput(tmp_path):
    """Medians of ratios are not ratios of medians: here one method is twice as fast on the slow prompts alone."""
    speeds = zip((10, 10, 40), (20, 20, 38), (11, 30, 44))
    names = "target", "fixed", "block"
    lines = [m for prompt, of in enumerate(speeds) for m in speed_lines(dict(zip(names, of)), prompt=prompt)]
    text = write(tmp_path, run_line(), *lines)
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("target alone", "fixed", "block"))]
    assert tuple(rows[:3]) == names
    slower_first = [line | {"mode": "speed"} for line in sorted(lines, key=lambda m: m["method"])]
    assert tuple(row["method"] for row in ranked(summarize(slower_first))) == names


# The tables of all modes. What a title stands for is said below its table; these say it
# themselves.
PLAIN = {
    *("category", "", "texts", "tokens", "dtype", "what is wrong", "seen by", "known from", "planted in", "prompt"),
    *("context", "measured", "text", "draft", "target", "per", "tokens needed", "of them differ", "version"),
    *("precision", "of a plain step", "tokens/s", "ms", "ms a token"),
}


def broken_words(table, width):
    """The words of the titles and of the names in the first column that are not whole where a table is printed."""
    screen = StringIO()
    Console(width=width, file=screen, color_system=None).print(replace(table, notes=""))
    words = re.findall(r"\S+", screen.getvalue())
    names = [str(row[0]) for row in table.rows] + table.heads
    broken = [word for name in names for word in name.split() if word not in words]
    return broken + [name for name in names if re.search(r"[a-z]-\n", name)]


def unexplained(tables, notes):
    """The titles of columns that no legend in the notes explains."""
    titles = {title for table in tables for title in table.titles()}
    titles = {re.sub("^(eager|compiled) ", "", title) for title in titles} - PLAIN
    said = re.sub(r"\s+", " ", " ".join(notes))

    def explained(title):
        symbols = [title, *title.split(), title.rpartition(" ")[0]]
        return any(re.search(rf"(?<![\w/]){re.escape(symbol)}[^.;:]*: ", said) for symbol in symbols if symbol)

    return sorted(title for title in titles if not explained(title))


def test_no_table_breaks_a_word_and_every_symbol_is_in_its_legend():
    runs = Results(ROOT / "docs" / "records").runs()
    assert len(runs) > 8
    for run, lines in runs:
        pieces = list(results.pieces_of_run(run, lines))
        tables = [piece for piece in pieces if isinstance(piece, Table)]
        assert [broken_words(table, WIDTH) for table in tables] == [[]] * len(tables)
        notes = [piece.plain for piece in pieces if isinstance(piece, Text)] + [table.notes for table in tables]
        assert unexplained(tables, notes) == []


def test_a_broken_word_and_a_title_without_a_legend_are_seen():
    def table(*titles):
        made = Table("A table", [*titles])
        made.add("speculative", *["1234567890"] * (len(titles) - 1))
        return made

    assert broken_words(table("", "alpha"), WIDTH) == []
    assert broken_words(table("", "neigh-\nbours"), WIDTH) == ["neigh-\nbours"]
    assert "speculative" in broken_words(table("", *["tokens/s"] * 9), 60)
    assert unexplained([table("gamma", "K-S\np", "z")], ["gamma: guesses. p: p-values."]) == ["z"]


def test_a_sweep_stands_beside_theory_where_it_was_measured_without_texts_of_other_conditions(tmp_path):
    conditions = itertools.product(("sweep", "speed"), (0, 0.85), (16, 64))
    lines = [speed_line(mode=mode, temperature=at, promptLen=length) for mode, at, length in conditions]
    assert swept_texts([*lines, {"kind": "end"}], {"temperature": 0.85, "promptLen": 16}) == [lines[2]]
    lines = [speed_line(method=method, mode="sweep", temperature=0.85) for method in ("target", "gamma 1", "gamma 2")]
    text = write(tmp_path, run_line(), *lines, sweep_costs(overlap_by_position=[[8, 8, 4.0], [4, 4, 1.0]]))
    ends = [line.split()[-1] for line in text.splitlines() if line.startswith(("1 ", "2 "))]
    assert ends == ["1.33", "1.23"] and "of expected" in text  # 2 of 1.5, and of 1.625


@pytest.mark.parametrize("module", [Mock(flock=Mock(side_effect=OSError("not supported"))), None])
def test_where_no_lock_can_be_had_results_are_rendered_all_the_same(module, tmp_path, monkeypatch):
    """Windows has no such module."""
    write(tmp_path, run_line("r2"))
    (tmp_path / "results.txt").unlink()
    monkeypatch.setitem(sys.modules, "fcntl", module)
    runpy.run_path(str(ROOT / "report/results.py"))["Results"](tmp_path).render()
    assert "Run r2" in (tmp_path / "results.txt").read_text()


def test_where_the_lines_were_removed_those_that_follow_have_their_run(run, cli, tmp_path, monkeypatch):
    """A run that is not there at all is one line."""

    def measure(inputs, models, append):
        line = {key: value for key, value in speed_line().items() if key != "run"}
        append(line)
        (tmp_path / "results.jsonl").unlink()
        append(line)

    monkeypatch.setattr(cli, "measure_all", measure)
    first, *rest = run("--speed")
    assert first["kind"] == "run" and [line["kind"] for line in rest] == ["speed", "end"]
    assert {line["run"] for line in rest} == {first["run"]}
    with refused("results.jsonl has no run r9 any more"):
        Results(tmp_path).run("r9")


def with_little_room(folder):
    """Append and render where files may not grow any longer, as on a full disk; returns the errors' messages."""
    store, messages = Results(folder), []
    length = store.lines.stat().st_size

    def attempt(room, function, **line):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))  # Python ignores its signal
        try:
            function(**line)
        except UserError as error:
            messages.append(str(error))

    attempt(length + 10, store.append, x=1)
    attempt(length + 10, store.append, y=2)  # a part of this line fits
    attempt(length + 10, store.append, z=3)  # and nothing of this one
    attempt(50, store.render)
    return messages


def test_where_there_is_no_more_room_what_was_there_is_kept(tmp_path):
    text = write(tmp_path, run_line())
    before = Results(tmp_path).records()
    with FORK.Pool(1) as pool:
        messages = pool.apply(with_little_room, (tmp_path,))
    assert len(messages) == 3 and not any("\n" in message for message in messages)
    assert all("cannot be written" in message and "are kept" in message for message in messages[:2])
    assert messages[2].endswith("results.txt cannot be written: File too large; the measurements are in results.jsonl")
    assert Results(tmp_path).records() == before + [{"x": 1}]
    assert (tmp_path / "results.txt").read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["results.jsonl", "results.txt"]
    Results(tmp_path).append(y=2)
    assert Results(tmp_path).records() == before + [{"x": 1}, {"y": 2}]


def test_a_sweep_over_temperatures_has_a_heat_map(figure_files, tmp_path):
    """Gamma 2 is best at one temperature, gamma 1 at the other."""
    lines = []
    for temperature, speeds in ((0, (4, 6, 8)), (1, (4, 5, 2))):
        lines.append(sweep_costs(temperature, top_p=1.0))
        speeds = dict(zip(("target", "gamma 1", "gamma 2"), speeds))
        lines += speed_lines(speeds, 3, mode="sweep", temperature=temperature)
    one = figures.draw_sweep([line for line in lines if line["temperature"] == 0])
    costs = [line for line in lines if line["kind"] == "costs"]
    figure, axes = figures.plt.subplots()
    rows = {cost["temperature"]: predict(swept_texts(lines, cost), cost) for cost in costs}
    figures.draw_heat_map(axes, rows, "temperature")
    cells = [(text.get_text(), text.get_weight()) for text in axes.texts]
    assert cells == [("1.50", "normal"), ("2.00", "bold"), ("1.25", "bold"), ("0.50", "normal")]
    both = figures.draw_sweep(lines)
    assert both.get_figwidth() > one.get_figwidth()
    figures.write_figure(both, tmp_path / "figures" / "both.png", "a machine, a model")
    assert (tmp_path / "figures" / "both.png").read_bytes().startswith(b"\x89PNG")
    assert both.get_supxlabel() == "a machine, a model"
    figures.plt.close("all")
