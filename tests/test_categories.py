"""Prompts with categories: read, refused, continued turn by turn; and the speed-up as Spec-Bench defines it."""

import json
from collections import Counter
from hashlib import sha256
from io import StringIO

import pytest
import torch
from conftest import CONTEXT, lines_of, of_kind, one_line, prompted, refused
from downloads import assert_error
from localHub import Repository
from test_cli import CHAT, hashes
from test_results import run_line, speed_line
from transformers import AutoModelForCausalLM

import downloadData
from experiments.intervals import OVERALL, Range, by_category, spec_bench, speedup
from experiments.speed import digest
from inputs import files
from inputs.hub import HubFile, Manifest
from inputs.models import load_tokenizer
from inputs.texts import MT_BENCH, Question, encode_turn, read_questions
from report import figures
from report.results import show

STORY = [
    {"question_id": 81, "category": "story", "turns": ["It was late, and", "The boy answered, and"], "reference": []},
    {"prompt": "The bell of the harbour", "category": "story"},
    {"prompt": "A tarn is", "category": "article"},
    {"prompt": "A tide is", "category": "article"},
]


def written(folder, *lines):
    """The path of a file of prompts, one object a line."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(file)


# Reading.


def test_lines_of_both_forms_are_read(tmp_path):
    first, *others = read_questions(written(tmp_path, STORY[0], "", *STORY[1:]))
    assert first == Question(1, "story", ("It was late, and", "The boy answered, and"))
    assert others == [Question(n, s["category"], (s["prompt"],)) for n, s in zip((3, 4, 5), STORY[1:])]
    with refused("is empty"):
        read_questions(written(tmp_path, "", " "))


def test_all_categories_of_mt_bench_are_one_task_and_a_few_are_not(tmp_path):
    lines = [{"prompt": "x", "category": category} for category in (*sorted(MT_BENCH), "qa", "qa")]
    assert Counter(q.category for q in read_questions(written(tmp_path, *lines))) == {"mt_bench": 8, "qa": 2}
    few = [line for line in 2 * lines if line["category"] != "stem"]
    assert {q.category for q in read_questions(written(tmp_path, *few))} == MT_BENCH - {"stem"} | {"qa"}


WRONG = {
    "not JSON": "{'prompt': 'x'}",
    '"prompt" or "turns"': '["x"]',
    "not text": '{"prompt": " ", "category": "story"}',
    "is not text": '{"prompt": 7, "category": "story"}',
    "not a list of texts": '{"turns": ["x", ""], "category": "story"}',
    "is not a list": '{"turns": [], "category": "story"}',
    "category": '{"prompt": "x"}',
    '"category"': '{"prompt": "x", "category": " "}',
    "'rare' has only this prompt": '{"prompt": "x", "category": "rare"}',
    '"turns" is not a list of texts': '{"turns": "x", "category": "story"}',
    'both "prompt" and "turns"': '{"prompt": "x", "turns": ["x"], "category": "story"}',
    '"prompt" is not text': '{"prompt": "\\ud800", "category": "story"}',
}


@pytest.mark.parametrize("words", WRONG)
def test_a_line_that_cannot_be_used_is_said_before_anything_is_loaded(run, flags, tmp_path, capsys, monkeypatch, words):
    for name in "find_models", "load_tokenizer":
        monkeypatch.setattr(f"experiments.prepare.{name}", lambda *_: pytest.fail("reached"))
    file = written(tmp_path, *STORY, WRONG[words])
    assert run("--speed --prompts", file, base=prompted(flags), code=2) == []
    one_line(capsys, words, f"{file}, line 5: ")


def test_no_category_has_the_name_of_the_row_of_all(run, flags, tmp_path, capsys):
    lines = [line | {"category": OVERALL} for line in STORY]
    run("--speed --prompts", written(tmp_path, *lines), base=prompted(flags), code=2)
    one_line(capsys, repr(OVERALL))


def test_the_bundled_prompts_are_of_six_tasks_and_fit_the_bundled_models():
    questions = read_questions("sample")
    assert set(Counter(question.category for question in questions).values()) == {4} and len(questions) == 24
    assert len({question.category for question in questions}) == 6
    assert [len(q.turns) for q in questions if q.category == "conversation"] == [2, 2, 1, 1]
    words = [len(turn.split()) for question in questions for turn in question.turns]
    assert min(words) >= 40 and max(words) <= 150
    tokenizer = load_tokenizer("bundled-target")
    for question in questions:
        answers = ["word " * 128] * (len(question.turns) - 1)
        assert len(encode_turn(question, answers, tokenizer, "bundled-target")) + 128 <= 512


# Turns.


def test_turns_without_a_chat_template_are_paragraphs_after_the_answers(pair_folder):
    tokenizer = load_tokenizer(pair_folder / "target")
    question = Question(1, "story", ("One.", "Two.", "Three."))
    texts = [tokenizer.decode(encode_turn(question, answers, tokenizer, "m")) for answers in ([], ["a"], ["a", "b"])]
    assert texts == ["One.", "One.a\n\nTwo.", "One.a\n\nTwo.b\n\nThree."]


def test_every_method_continues_the_same_turns_after_the_targets_answers(
    run, flags, model_folder, figure_files, tmp_path
):
    (model_folder / "chat_template.jinja").write_text(CHAT)
    words = "--compare block,lookup --maxLen 9 --dtype float32 --temperature 0 --target", model_folder, "--prompts"
    timed = of_kind(run(*words, written(tmp_path, *STORY), base=prompted(flags)))
    labels = {(m["prompt"], m["question"], m["category"]) for m in timed}
    assert labels == {(0, 0, "story"), (1, 0, "story"), (2, 1, "story"), (3, 2, "article"), (4, 3, "article")}
    inputs = {(m["prompt"], m["input"]) for m in timed}
    assert len(inputs) == 5 and {m["method"] for m in timed} == {"target", "block", "lookup"}
    tokens = hashes(lines_of(tmp_path))
    assert all(tokens[name, prompt, 0] == tokens["target", prompt, 0] for name, prompt, _ in tokens)

    # The second turn stands after what the target writes to the first.
    tokenizer = load_tokenizer(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    question = Question(1, "story", tuple(STORY[0]["turns"]))
    first = torch.tensor([encode_turn(question, [], tokenizer, "m")])
    answer = model.generate(first, max_new_tokens=9, do_sample=False)[0, first.shape[1] :]
    second = encode_turn(question, [tokenizer.decode(answer, skip_special_tokens=True)], tokenizer, "m")
    assert {m["input"] for m in timed if m["prompt"] == 1} == {digest(second)}
    run("--rerun 1", base=[])  # The answers are the same again.
    text = (tmp_path / "results.txt").read_text()
    assert "Speed by category" in text and OVERALL.split()[0] in text
    assert f"Figure: figures/categories-{timed[0]['run']}.png" in text
    assert (tmp_path / "figures" / f"categories-{timed[0]['run']}.png").read_bytes().startswith(b"\x89PNG")


def test_a_prompt_that_does_not_fit_is_named_before_a_model_is_loaded(run, flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.loading.load_model", lambda *_: pytest.fail("reached"))
    long = {"prompt": "word " * CONTEXT, "category": "article"}
    run("--prompts", written(tmp_path, *STORY, long), base=prompted(flags), code=2)
    one_line(capsys, "line 5: ", f"({CONTEXT} tokens)")
    half = CONTEXT // 2  # The answer to the first turn takes half of the context.
    run("--prompts", written(tmp_path, *STORY), "--maxLen", half, base=prompted(flags), code=2)
    one_line(capsys, f"line 1, turn 2 after answers of {half} tokens: ")


# The speed-up of Spec-Bench.


def text(method, prompt, tokens, seconds, category="qa", **changes):
    """Its question is the prompt, unless `changes` say another."""
    figures = {"tokens": tokens, "seconds": seconds, "throughput": tokens / seconds, "category": category}
    return speed_line(method=method, prompt=prompt, question=prompt, **figures) | changes


def test_the_speed_up_of_spec_bench_by_hand():
    """Question 0 has two turns: 10 tokens in 2 s and 30 in 2 s are 10 a second, not the mean of 5 and 15. The mean of
    the speeds 10 and 2 over that of 4 and 2 is 2; the mean of the ratios 2.5 and 1 would be 1.75."""
    seconds = {"block": (2.0, 2.0, 4.0), "target": (5.0, 5.0, 4.0)}  # of each text: its tokens, and its question
    of_texts = (10, 0), (30, 0), (8, 1)
    texts = [
        text(name, prompt, tokens, took, question=question)
        for name, times in seconds.items()
        for prompt, (took, (tokens, question)) in enumerate(zip(times, of_texts))
    ]
    assert spec_bench(texts, "block") == Range(2.0, 1.0, 2.5) and spec_bench(texts, "target") == (1, 1, 1)
    slower = [line | {"repeat": 1, "seconds": line["seconds"] * (1 + (line["method"] == "block"))} for line in texts]
    of_process = [line | {"repeat": 0, "process": 1} for line in slower]  # The repeats of each process begin at 0.
    for second in slower, of_process:
        assert spec_bench([*texts, *second], "block")[0] == pytest.approx(1.5)  # the mean over two runs: 2 and 1
    cut = [line for line in slower if line["prompt"] < 2]  # A run that was stopped: the second repeat is not whole.
    assert spec_bench([*texts, *cut], "block") == spec_bench(texts, "block")
    assert spec_bench(texts[:3], "block")[0] != spec_bench(texts[:3], "block")[0]  # nan without a baseline


def test_overall_is_over_questions_and_not_over_tasks():
    speeds = [("qa", 8.0)] * 3 + [("rag", 4.0)]  # of a method; the target's is 4
    texts = [
        text(method, prompt, 8, 8 / speed, category)
        for prompt, (category, of_block) in enumerate(speeds)
        for method, speed in (("block", of_block), ("target", 4.0))
    ]
    rows = {category: {r["method"]: r for r in rows} for category, rows in by_category(texts).items()}
    assert list(rows) == ["qa", "rag", OVERALL]
    assert [rows[name]["block"]["specBench"][0] for name in rows] == pytest.approx([2.0, 1.0, 1.75])  # not 1.5
    assert [rows[name]["block"]["speedup"][0] for name in rows] == pytest.approx([2.0, 1.0, 2.0])
    assert rows["rag"]["block"]["runs"] == 1 and rows[OVERALL]["block"]["runs"] == 4


def test_turns_of_a_question_are_one_cluster_of_an_interval_and_each_is_paired_with_its_own():
    turns = [(prompt, prompt // 2) for prompt in range(8)]  # 4 questions, of which turns are 2 and 4 times as fast
    texts = [
        text(method, prompt, 8, 8 / speed, question=question)
        for prompt, question in turns
        for method, speed in (("a", (2.0, 4.0)[prompt % 2] * (1 + question)), ("target", 1.0 + question))
    ]
    assert speedup(texts, "a", "target") == (3, 3, 3) and isinstance(speedup(texts[:12], "a", "target"), Range)


def test_four_questions_have_an_interval_and_few_processes_none():
    texts = [text(method, n, 8, 1.0 + (n if method == "target" else 0)) for n in range(4) for method in ("a", "target")]
    middle, low, high = figures = spec_bench(texts, "a")
    assert not isinstance(figures, Range) and low < middle < high
    assert middle == pytest.approx(4 / sum(1 / (1 + n) for n in range(4)))
    for count in 3, 4:
        speeds = [(1 + n * (line["method"] == "a"), n, line) for n in range(count) for line in texts]
        several = [line | {"process": n, "seconds": line["seconds"] * times} for times, n, line in speeds]
        ranged = spec_bench(several, "a")
        assert isinstance(ranged, Range) == (count == 3) and ranged.low < ranged.middle < middle


# The tables.

LINES = [
    text(method, prompt, 8, seconds, category, mode="compare", maxLen=8, temperature=0.0)
    for prompt, category in enumerate(("qa", "qa", "[b]rag"))
    for method, seconds in (("target", 4.0), ("lookup", 2.0))
]


def shown(lines):
    buffer = StringIO()
    show(run_line(command="--compare lookup --prompts sample"), lines, file=buffer, color_system=None)
    return buffer.getvalue()


def test_the_table_has_a_row_for_each_category_and_method():
    lines = shown(LINES).splitlines()
    rows = [line.split() for line in lines[next(i for i, line in enumerate(lines) if "by category" in line) :]]
    assert ["qa", "target", "alone", "250", "2.00", "0.75", "0.33", "1.00", "1.00"] in rows
    assert rows.count(["lookup", "250", "2.00", "0.75", "0.33", "2.00", "2.00"]) == 3  # two categories, and overall
    assert any(row[:3] == ["[b]rag", "target", "alone"] for row in rows) and any(row[:1] == ["overall"] for row in rows)
    assert max(map(len, lines)) <= 100
    plain = [{key: value for key, value in line.items() if key != "category"} for line in LINES]
    assert "by category" not in shown(plain)


def test_the_figure_has_a_bar_for_each_category_and_method():
    lines = [*LINES, *(line | {"mode": "speed"} for line in LINES), text("target", 0, 8, 1.0, mode="sweep")]
    (axes,) = figures.draw_categories(lines).axes
    assert [bar.get_y() + bar.get_height() for bar in axes.patches] == [2.0, 2.0, 2.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["qa", "[b]rag", "overall"]
    figures.plt.close("all")


# Spec-Bench's own file.

FILE = "".join(json.dumps(line) + "\n" for line in STORY).encode()


@pytest.fixture
def served(hub, tmp_path, monkeypatch):
    """{path: content} of the files on a server in GitHub's place, of which Spec-Bench's is one."""
    monkeypatch.setattr(files, "DATASETS", tmp_path / "datasets")
    hub.models["some/bench"] = Repository({"question.jsonl": FILE})
    monkeypatch.setattr(downloadData, "SPEC_BENCH_URL", f"{hub.url}/some/bench/resolve/main/question.jsonl")
    file = HubFile("question.jsonl", len(FILE), f"sha256:{sha256(FILE).hexdigest()}")
    monkeypatch.setattr(downloadData, "SPEC_BENCH_FILE", file)
    return hub.models["some/bench"].files


def assert_refused(capsys, *words, given=()):
    assert_error(capsys, *words, arguments=["specbench", *given], script=downloadData)


def test_spec_benchs_prompts_come_and_are_read_by_name(served, tmp_path, capsys):
    with refused("downloadData.py (specbench)", "--prompts sample"):
        read_questions("specbench")
    assert_refused(capsys, "--offline", given=["--offline"])
    assert downloadData.main(["specbench"]) == 0 and "complete" in capsys.readouterr().out
    assert [question.turns for question in read_questions("specbench")][1:] == [(s["prompt"],) for s in STORY[1:]]
    manifest = Manifest.read(tmp_path / "datasets" / "specbench")
    assert (manifest.repo, manifest.rows) == ("hemingkx/Spec-Bench", {"test": 4})
    served.clear()  # It is not fetched again,
    assert downloadData.main(["specbench", "--offline"]) == downloadData.main(["specbench"]) == 0
    file = tmp_path / "datasets" / "specbench" / "question.jsonl"
    file.write_bytes(FILE.replace(b"tarn", b"lake"))  # unless it is damaged.
    assert_refused(capsys, "damaged", given=["--offline"])
    served["question.jsonl"] = FILE
    assert downloadData.main(["specbench"]) == 0 and file.read_bytes() == FILE


@pytest.mark.parametrize("content", [FILE[:-1], FILE + b"\n", FILE.replace(b"tarn", b"lake")])
def test_another_file_is_never_taken_for_spec_benchs(served, tmp_path, capsys, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    served["question.jsonl"] = content
    assert_refused(capsys, "does not have the hash")
    assert_refused(capsys, "does not have the hash", "--prompts", given=["--from", str(file)])
    served.clear()
    assert_refused(capsys, "404", "--from", "127.0.0.1")
    assert not list((tmp_path / "datasets").glob("spec*"))


@pytest.mark.usefixtures("served")
def test_a_copy_of_spec_benchs_file_is_installed_without_a_network(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_bytes(FILE)
    monkeypatch.setattr(downloadData, "SPEC_BENCH_URL", "http://127.0.0.1:9/question.jsonl")
    assert_refused(capsys, "127.0.0.1", "check the network")
    assert downloadData.main(["specbench", "--from", str(tmp_path / "file")]) == 0
    assert len(read_questions("specbench")) == 4
    assert downloadData.main(["specbench"]) == 0 and "nothing to download" in capsys.readouterr().out
