"""test.py from its flags to its files: what is wrong costs one line, what is right is written down."""

import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys

import helpers
import pytest
import test_headRuns
import tokenizerKinds
import torch
from conftest import CONTEXT, PADDED, WRITING, lines_of, of_kind, one_line, prompted
from localHub import Repository

from engine.cachedModel import CachedModel
from experiments import prepare, settings, sweep
from experiments.prepare import load_inputs
from experiments.processes import SINGLE
from experiments.schema import name_of_kind
from inputs.models import load_tokenizer
from inputs.texts import encode_chat
from methods.catalogue import METHODS, choose
from methods.lookup import LookupDrafter
from playback import play as playing
from playback.play import Screen

EVERY = set(choose("all", {"draft", "draft model", "whole draft model", "mid", "self"}))  # methods
head_folder = test_headRuns.head_folder
KINDS = {"speed": ["speed"], "ppl": ["ppl corpus", "ppl text"]}


def hashes(lines):
    return {(m["method"], m["prompt"], m["repeat"]): m["sha256"] for m in of_kind(lines)}


def methods_of(lines):
    return {m["method"] for m in of_kind(lines)}


@pytest.mark.parametrize(
    "wrong",
    [
        f"--maxLen {CONTEXT}",
        "--mid nowhere --speedMulti",
        "--question hello --speed",
        "--target some/target --offline",
        "--draftVocab 301",
        "--draft nowhere",
        "--draft .",
        "--sentenceLimit 100000",
        f"--window 1024 --stride {CONTEXT}",
        pytest.param("--device cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")),
        ["--prompt", "word " * CONTEXT],
        ["--target", "two\nlines"],
        ["--target", "long" * 2000],
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_is_written(run, tmp_path, capsys, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    run(*([wrong] if isinstance(wrong, str) else wrong), code=2)
    assert "Traceback" not in one_line(capsys).out and os.listdir(tmp_path) == []


BOTH, SPEED, PPL = ["speed", "ppl"], ["speed"], ["ppl"]


@pytest.mark.parametrize(
    "mode, measured", [("", BOTH), ("--speed 1", SPEED), ("--ppl", PPL), ("--speed 0", PPL), ("--ppl 0", SPEED)]
)
def test_each_mode_writes_its_kinds_of_lines(run, flags, tmp_path, capsys, mode, measured):
    first, *middle, last = run(mode, base=flags if "speed" in measured else prompted(flags, *WRITING))
    assert (first["kind"], last["kind"]) == ("run", "end")
    assert {line["run"] for line in middle + [last]} == {first["run"]}
    kinds = [name_of_kind(line) for line in middle]
    assert sorted(set(kinds)) == sorted(kind for name in measured for kind in KINDS[name])
    assert kinds.count("speed") == (6 if "speed" in measured else 0)  # 3 methods, 2 prompts, 1 repeat
    assert {line["dtype"] for line in middle if line["kind"] != "speed"} <= {"float32"}
    captured = capsys.readouterr()
    assert captured.err == ""  # no progress bars where nobody watches
    text = (tmp_path / "results.txt").read_text()
    assert [line.rstrip() for line in captured.out.splitlines()][:-1] == text.splitlines()
    assert captured.out.splitlines()[-1] == f"Written to {tmp_path}/results.txt (every measurement: results.jsonl)."
    assert ("Speed: " in text, "Perplexity" in text) == ("speed" in measured, "ppl" in measured)
    assert sorted(os.listdir(tmp_path)) == ["results.jsonl", "results.txt"]


def test_a_run_records_what_it_was_made_with_and_continues_a_prompt_without_any_data_set(run, flags, tmp_path):
    """The prompt may have characters that end a line in Unicode, but not in a file of JSON lines."""
    prompt = "Two\u2028lines, \x85 and a bell"
    record, *measurements, _ = run("--speed --seed 3 --dtype float32 --prompt", prompt, base=prompted(flags))
    assert record["flags"]["seed"] == 3 and record["flags"]["prompt"] == prompt and record["device"] == "cpu"
    assert record["command"].endswith(f"--prompt '{prompt}' --out {tmp_path}")
    target, draft = (record["models"][role] for role in ("target", "draft"))
    assert target["name"] == "target" and target["version"].startswith("sha256:")
    assert target["version"] != draft["version"]
    assert record["machine"]["torch"] == torch.__version__ and record["machine"]["processor"]
    assert len(measurements) == 3 and {m["dtype"] for m in measurements} == {"float32"}
    assert {m["prompt"] for m in measurements} == {0} and measurements[0]["prompt_tokens"] > 3  # it is not cut


@pytest.mark.parametrize(
    "options, most",
    [
        ("--maxLen 1", 1),
        ("--maxLen 2 --gamma 50 --repetition_penalty 1.3 --temperature 1e-4", 2),
        ("--promptLen 1 --top_k 1 --top_p 1 --gamma 50", 8),
        (f"--sentences {10**9} --gamma 1000 --seed {2**62 - 1} --top_k {10**9}", 8),
        ("--draftLength costAware --gamma 1000 --temperature 1000 --repetition_penalty 100", 8),
        (f"--promptLen {10**9} --draft lookup --ngram {10**9} --top_p 1e-300", 8),
    ],
)
def test_flags_at_their_limits_work(run, options, most):
    assert {m["tokens"] for m in of_kind(run(f"--speed {options}"))} <= set(range(1, most + 1))


def test_documents_too_short_to_score_are_passed_over_and_a_long_window_is_the_context(
    run, flags, text_file, tmp_path, capsys
):
    """And a text is cut to the context, which is said."""
    folder = tmp_path / "books"
    folder.mkdir()
    for name, text in {"a": "", "b": "x", "c": "bell " * CONTEXT, "d": text_file.read_text()}.items():
        (folder / f"{name}.txt").write_text(text)
    words = "--ppl --window 1024 --dataset", folder
    lines = run(*words, base=prompted(flags, *WRITING), out=tmp_path / "out")
    line = next(line for line in lines if line.get("of") == "corpus")
    assert (line["corpus"], line["documents"], line["window"]) == ("books", 2, CONTEXT)
    assert line["stride"] == CONTEXT // 2  # It leaves some context to each window.
    assert capsys.readouterr().out.count("books: 1 text is longer than the context of target, of which only") == 1


def test_what_cannot_be_written_is_still_shown(run, tmp_path, capsys):
    (tmp_path / "results.txt").mkdir()
    run("--speed", code=2)
    assert "target alone" in one_line(capsys, "results.txt").out


def test_a_link_to_nowhere_is_no_folder_for_results(cli, flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "find_models", lambda *_: pytest.fail("reached"))
    (tmp_path / "link").symlink_to("nowhere")
    assert cli.main([*flags, "--out", str(tmp_path / "link")]) == 2
    one_line(capsys, "link is not a folder")


def test_without_models_named_it_says_which_are_measured(run, cli, flags, pair_folder, capsys, monkeypatch):
    """Once all flags are right, and not of a text that is played."""
    monkeypatch.setattr(settings, "default_pair", lambda: (str(pair_folder / "target"), str(pair_folder / "draft")))
    run("--speed", base=flags[4:])
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith(f"No models named: using {pair_folder / 'target'} (target)")
    monkeypatch.setattr(cli, "play", lambda *_: 0)
    run("--show", base=flags[4:])
    assert "No models named" not in capsys.readouterr().out
    run("--speed --promptFile nowhere", base=[], code=2)
    assert not one_line(capsys, "nowhere: No such file").out


def from_another_folder(cli, words, folder, out, err):
    """Runs test.py as a process that Ctrl-C interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.stdout, sys.stderr = out.open("w", buffering=1), err.open("w", buffering=1)
    sys.exit(cli.main(words))


def test_ctrl_c_shows_and_keeps_what_was_measured_wherever_it_was_started(cli, flags, pair_folder, tmp_path):
    """In a fork of this process, from another folder, with paths relative to that."""
    (folder := tmp_path / "folder").mkdir()
    words = [*flags, "--target", "target", "--draft", "draft", "--speed", "--repeats", "100000", "--out", str(folder)]
    logs = out, err = tmp_path / "out", tmp_path / "err"
    work = {"target": from_another_folder, "args": (cli, words, pair_folder, *logs), "daemon": True}
    (process := multiprocessing.get_context("fork").Process(**work)).start()
    helpers.wait_for(lambda: len(lines_of(folder)) > 4 or not process.is_alive())
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert err.read_text() == "\nInterrupted. What was measured is kept in results.jsonl.\n"
    for shown in out.read_text(), (folder / "results.txt").read_text():
        assert ", not finished" in shown and "target alone" in shown
    assert f"\nWritten to {folder}/results.txt " in out.read_text()
    assert sorted(os.listdir(folder)) == ["results.jsonl", "results.txt"]


def test_prompt_lengths_are_timed_apart_and_one_that_no_text_has_is_the_longest_there_is(run, tmp_path):
    lines = of_kind(run("--speed --promptLen 40 5 5 240"))
    lengths = {(m["promptLen"], m["prompt_tokens"]) for m in lines}
    longest = {length for asked, length in lengths if asked == 240}
    assert lengths - {(240, length) for length in longest} == {(5, 5), (40, 40)}  # 40: the text goes on
    assert all(40 < length < 240 for length in longest)
    text = (tmp_path / "results.txt").read_text()
    for shown in "2 prompts of 5", "2 prompts of 40", f"prompts of {min(longest)} to {max(longest)}":
        assert f"{shown} tokens" in text


def test_a_hub_id_is_downloaded_on_first_use(run, pair_folder, hub, tmp_path, capsys, monkeypatch):
    models = tmp_path / "models"
    monkeypatch.setattr("inputs.files.MODELS", models)
    for role in ("target", "draft"):
        hub.models[f"some/{role}"] = Repository({f.name: f for f in (pair_folder / role).iterdir()})
    arguments = "--speed --maxLen 2 --target some/target --draft some/draft"
    run(f"{arguments} --offline", code=2)
    assert one_line(capsys, "some/target") and hub.requests == []
    run(arguments)
    assert f"KB to download from {hub.url} into {models / 'target'}" in capsys.readouterr().out
    hub.forget()
    run(f"{arguments} --offline")
    record, *_ = run(arguments)
    assert hub.requests == []
    assert record["models"]["target"]["version"] == hub.models["some/target"].commit


def test_rules_can_be_chosen_and_are_named_in_the_table(run, tmp_path):
    run("--speed --draftLength costAware --verification block")
    text = (tmp_path / "results.txt").read_text().replace("\n", " ")
    assert "draftLength costAware," in text and "verification block," in text


def test_greedy_speculative_tokens_are_the_targets_whatever_the_draft_guesses(run, tmp_path):
    """A restricted draft is itself timed with all of its tokens."""
    greedy = "--temperature 0 --dtype float32 --maxLen 20"
    whole = run(f"{greedy} --ppl 0", out=tmp_path / "whole")
    record, *measured = restricted = run(f"{greedy} --draftVocab 40", out=tmp_path / "restricted")
    tokens = hashes(whole)
    assert tokens == hashes(restricted)
    for prompt in (0, 1):
        assert tokens["speculative", prompt, 0] == tokens["target", prompt, 0] != tokens["draft", prompt, 0]
    assert record["flags"]["draftVocab"] == 40 and set(record["models"]) == {"target", "draft"}
    assert {m["kind"] for m in measured} == {"speed", "end"}
    assert "draftVocab 40," in (tmp_path / "restricted" / "results.txt").read_text().replace("\n", " ")
    assert "draftVocab" not in (tmp_path / "whole" / "results.txt").read_text()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder with a random GPT-2 whose tokenizer is another than the tiny pair's, and knows fewer tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("foreign"), tokenizerKinds.byte_level(270)
    tokenizer.add_tokens("<another>")
    helpers.tiny("gpt2", 5, len(tokenizer), 1, context=CONTEXT).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_draft_with_another_tokenizer_guesses_for_the_same_text(run, flags, foreign, tmp_path, capsys):
    greedy = "--temperature 0 --dtype float32 --gamma 3"
    same = run(f"{greedy} --ppl 0", out=tmp_path / "same")
    other = run(f"{greedy} --draft", foreign, out=tmp_path / "other")
    texts = [{key: text for key, text in hashes(lines).items() if key[0] != "draft"} for lines in (same, other)]
    assert texts[0] == texts[1]
    said = [line for line in capsys.readouterr().out.splitlines() if "another tokenizer" in line]
    assert len(said) == 1 and "tokens that both have" in said[0] and "Perplexities" in said[0]
    assert {m["kind"] for m in other} == {"run", "speed", "end"}
    run("--rerun 1", base=[], out=tmp_path / "other")
    inputs = load_inputs(settings.parse([*flags, "--speed", "--draft", str(foreign)]), SINGLE)
    models = inputs.load("float32")  # The output layer of what guesses is cut, not that of the draft alone.
    tokens = {role: model.score(torch.tensor([[1, 2]])).isfinite().sum() // 2 for role, model in models.items()}
    assert max(map(max, inputs.rows)) > 270  # The target's tokens are not the draft's.
    assert tokens["restricted"] == len(inputs.translation.draft) < tokens["draft"]


@pytest.mark.parametrize(
    "wrong", ["--ppl", "--draftVocab 9 --speed", "--contrastive", "--diversity", f"--speed --maxLen {CONTEXT - 12}"]
)
def test_what_needs_one_tokenizer_is_one_line(run, flags, foreign, capsys, wrong):
    unused = {"--ppl": [WRITING], "--diversity": [()]}.get(wrong, [])
    run(wrong, "--draft", foreign, base=prompted(flags, *unused[0]) if unused else flags, code=2)
    one_line(capsys, foreign.name)


def test_what_is_lacking_is_said(run, flags, pair_folder, tmp_path, capsys):
    """Contrast needs two models, a cascade a draft, a comparison the name of a method, and a file of prompts one."""
    run("--contrastive --draft", pair_folder / "target", code=2)
    one_line(capsys, "needs two models")
    run("--speedMulti --target", pair_folder / "target", "--mid", pair_folder / "draft", base=[], code=2)
    one_line(capsys, "--draft")
    run("--compare target,blok", code=2)
    one_line(capsys, "'blok'", *(name.split(":")[0] for name in METHODS))
    (tmp_path / "empty.txt").write_text(" \n\n")
    run("--speed --promptFile", tmp_path / "empty.txt", base=prompted(flags), code=2)
    assert one_line(capsys) and os.listdir(tmp_path) == ["empty.txt"]


@pytest.mark.parametrize(
    "mode, measured",
    [
        ("--speedNew", {"draft", "target", "additive"}),
        ("--contrastive", {"target", "contrastive", "speculativeContrastive"}),
        ("--draft lookup", {"target", "speculative"}),
        ("--compare all --maxLen 3 --sentences 1", EVERY - {"cascade"}),  # without a model between
        (
            "--speedMulti --mid {draft} --draftVocab 40 --gamma1 2 --gamma2 3",
            {"draft", "mid", "target", "speculative", "cascade"},
        ),
    ],
)
def test_modes_measure_their_methods(run, pair_folder, mode, measured):
    record, *lines = run(mode.format(draft=pair_folder / "draft"))
    assert methods_of(lines) == measured and ("mid" in record["models"]) == ("--mid" in mode)


def test_all_leaves_out_what_a_model_cannot_do(run, model_folder, capsys):
    """It counts slots as positions. A tree that is asked for by name is refused."""
    bloom = helpers.tiny("bloom", vocabulary=PADDED, attn_implementation="eager")
    bloom.model.save_pretrained(model_folder)
    lines = run("--compare all --maxLen 3 --sentences 1 --target", model_folder)
    assert methods_of(lines) == EVERY - {"cascade", "tree", "self"}
    assert "model reads no trees of guesses: all leaves out tree.\n" in capsys.readouterr().out
    run("--compare all,tree --maxLen 3 --sentences 1 --target", model_folder, code=2)
    assert "out tree" not in one_line(capsys, "model cannot verify trees of guesses").out
    few = settings.parse(["--lossless", "all", "--target", str(model_folder), "--draft", str(model_folder)])
    few = prepare.without_impossible(few, {"target": model_folder, "draft": model_folder})
    assert "model reads no trees of guesses: all leaves out topDown and tree.\n" in capsys.readouterr().out
    assert "block" in few.measuring.names and not {"tree", "topDown", "self"} & few.measuring.names


@pytest.mark.parametrize("kind", ["speed", "queue"])
def test_contrastive_texts_have_the_temperature_that_drew_them(run, tmp_path, kind):
    flags = "--contrastive --contrastiveTemperature 0.7 --temperature 0.5 --top_p 0.8 --maxLen 3"
    lines = of_kind(run(flags + " --batch 2" * (kind == "queue")), kind)
    own = dict.fromkeys(("contrastive", "speculativeContrastive"), (0.7, 1.0))
    assert {line["method"]: (line["temperature"], line["top_p"]) for line in lines} == {"target": (0.5, 0.8), **own}
    assert "temperature 0.5, top_p 0.8" in (tmp_path / "results.txt").read_text().replace("\n", " ")


def test_the_sweep_writes_its_figure_and_names_it(run, figure_files, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 4))
    lines = run("--sweep --sentences 1 --repeats 1 --temperature 0 1")
    (figure,) = lines[-1]["figures"]
    assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "results.txt").read_text()
    assert figure in text and "temperature 0.0" in text and "temperature 1.0" in text
    assert methods_of(lines) - {"draft", "target"} == {f"gamma {gamma}" for gamma in range(1, 4)}
    costs = of_kind(lines, "costs")
    assert len(costs) == 2 and all(len(c["scoring"]) == 4 and c["scoring"][0] == 1 for c in costs)


@pytest.mark.parametrize("mode", ["--speed --batch 2", "--compare block", "--sweep --sentences 1 --repeats 1"])
def test_every_timed_text_has_all_tokens_whatever_ends_a_text(run, model_folder, monkeypatch, mode):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 3))
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(CONTEXT))}))
    lines = run(f"{mode} --target", model_folder)
    assert {line["tokens"] for line in of_kind(lines)} == {8}
    assert all(line["overlap_by_position"] for line in of_kind(lines, "costs"))


@pytest.mark.parametrize("draft", ["--draft lookup", "--draftVocab 40 --lookupFirst", "--acceptance 0.5"])
def test_a_sweep_has_the_costs_and_the_guesses_of_its_own_drafter(run, monkeypatch, draft):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 3))
    lines = run(f"--sweep --maxLen 16 --sentences 1 --repeats 1 {draft}")
    (costs,) = of_kind(lines, "costs")
    assert (costs["drafting"] > 0) == (draft != "--draft lookup")
    if "acceptance" in draft:
        assert all(share == 0.5 * tested for _, tested, share in costs["overlap_by_position"])


def test_a_figure_that_cannot_be_written_is_said_and_the_run_is_finished(run, tmp_path, capsys):
    (tmp_path / "figures").write_text("a file")
    lines = run("--compare block")
    assert lines[-1] == {"run": lines[0]["run"], "kind": "end", "figures": []}
    out = capsys.readouterr().out
    assert out.count("cannot be written") == 1 and "not finished" not in out


def test_diversity_of_the_articles_prompts_or_of_a_files(run, flags, tmp_path):
    (tmp_path / "prompts.txt").write_text("The bell\n\nThe lamp was\n")
    greedy = set()
    for words in (), ("--repetition_penalty", 1.5), ("--promptFile", tmp_path / "prompts.txt"):
        lines = of_kind(run("--diversity --repeats 3", *words, base=prompted(flags)), "diversity")[-5:]
        prompts = 2 if "--promptFile" in words else 5
        greedy.add(lines[-1]["sha256"])
        several = dict.fromkeys(("naive", "speculative"), 3 * prompts)
        single = dict.fromkeys(("contrastive", "speculativeContrastive", "greedy"), prompts)
        assert {m["method"]: m["texts"] for m in lines} == several | single
        assert {m["prompts"] for m in lines} == {prompts}
        each = {m["method"]: m["each"] for m in lines}
        assert each["contrastive"] == each["speculativeContrastive"]
        assert {m["method"] for m in lines if not m["temperature"]} == single.keys()
    text = " ".join((tmp_path / "results.txt").read_text().split())
    assert "article, contrastive" in text and len(greedy) == 3 and text.count("repetition_penalty 1.5, float32") == 1


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_question_is_asked_by_the_chat_template(run, flags, model_folder, tmp_path):
    (model_folder / "chat_template.jinja").write_text(CHAT)
    words = "--speed --repetition_penalty 1.3 --target", model_folder, "--question", "a lamp?"
    expected = len(load_tokenizer(model_folder)("<user>a lamp?<assistant>")["input_ids"])
    lines = run(*words, base=prompted(flags), out=tmp_path / "out")
    assert {m["prompt_tokens"] for m in of_kind(lines)} == {expected}


@pytest.fixture
def chat(run, flags, model_folder, tmp_path):
    """`chat(words, question, ..., ends=0)`: the record of a conversation with a model that ends its text at `ends`."""
    (model_folder / "chat_template.jinja").write_text(CHAT)

    def play(words, *questions, ends=0, code=0):
        (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        asked = [word for question in questions for word in ("--question", question)]
        file = tmp_path / "chat.json"
        run(f"{words} --show --html", file, "--target", model_folder, *asked, base=prompted(flags), code=code)
        return json.loads(file.read_text())

    return play


@pytest.mark.parametrize("words", ["--compile --lookupFirst --maxLen 24", "--draft head --head HEAD --maxLen 12"])
def test_a_chat_answers_each_line_and_reads_only_what_is_new(
    run, flags, model_folder, head_folder, monkeypatch, capsys, words
):
    """Each prompt is read as if nothing was remembered, though a random answer is another one in other tokens.
    Planted: the models claim to have read it before."""
    (model_folder / "chat_template.jinja").write_text(CHAT)
    read, turns, asked, prefill, claims = [], [], [], CachedModel.prefill, []

    def spied(model, rows):
        prompt = rows.prompts[0]
        read.append((len(prompt), len(model.remembered)))
        turns.extend([rows] if model is rows.target else [])
        if len(turns) == 7 and model is not rows.target:
            raise KeyboardInterrupt
        model.remembered = prompt if claims else model.remembered
        logits = prefill(model, rows)
        if not claims:
            torch.testing.assert_close(logits, model.score(torch.tensor([prompt]))[:, -1], rtol=0.02, atol=0.02)
        return logits

    def encode(questions, answers, tokenizer, model):
        asked.append(list(questions))
        written = [rows.tokens[0] for rows in turns[len(turns) - len(answers) :]]
        parts = [encode_chat([question], [], tokenizer, model) for question in questions]
        return [
            token for pair in itertools.zip_longest(parts, written, fillvalue=[]) for part in pair for token in part
        ]

    monkeypatch.setattr(CachedModel, "prefill", spied)
    monkeypatch.setattr(playing, "encode_chat", encode)
    # The draft never reads.
    monkeypatch.setattr(LookupDrafter, "find", lambda drafter, rows, gammas: [[0]] * rows.size)

    def answers(room):
        monkeypatch.setattr(playing, "ROOM", room)
        typed = ["a lamp?", "and now?", "", "/plain", "more", "/self", "so?", *["/new", "a lamp?"] * 2, "lamp " * 99]
        content = "\n".join([*typed, "wait", "a caf\xe9?", "/quit", "lost"]).encode("latin-1")  # no UTF-8
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        read.clear()
        turns.clear()
        flags_of_chat = f"--chat --temperature 0 {words.replace('HEAD', str(head_folder))}"
        run(flags_of_chat, "--target", model_folder, base=prompted(flags))
        out, err = capsys.readouterr()
        assert err.count("exceed the context") == 1 and ["a lamp?", "wait"] in asked  # It forgets nothing then.
        return out.removesuffix("\n").split("\n")

    kept = answers(room=4096)
    assert len(kept) == 8 and kept[0] == kept[4] == kept[5] and all(kept)
    assert read[0][1] == 0 and all(known > 0 for _, known in read[2:4]), read
    assert answers(room=0) == kept  # Each text has a new cache.
    claims.append(True)
    assert answers(room=4096) != kept


def test_a_chat_has_room_for_a_prompt_that_is_longer_in_the_drafts_tokens(
    run, flags, model_folder, foreign, monkeypatch, capsys
):
    (model_folder / "chat_template.jinja").write_text(CHAT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a lamp on the table of the old house?\nwhy?\n"))
    run("--chat --temperature 0 --maxLen 9 --target", model_folder, "--draft", foreign, base=prompted(flags))
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and "exceed" not in err  # the first names the tokenizers


def texts_of(record):
    """The committed tokens of each turn, as pieces of text."""
    return [[piece for ours, _, own in turn["rounds"] for piece in ours + own] for turn in record["turns"]]


def test_a_conversation_goes_on_after_each_answer(chat, monkeypatch, model_folder, capsys):
    asked = []

    def encode(questions, answers, tokenizer, model):
        asked.append((list(questions), list(answers)))
        return encode_chat(questions, answers, tokenizer, model)

    monkeypatch.setattr("playback.play.encode_chat", encode)
    record = chat("", "a lamp?", "why\nnot?")
    first, second = texts_of(record)
    assert len(first) == len(second) == 8
    assert asked == [(["a lamp?"], []), (["a lamp?", "why\nnot?"], ["".join(first)])]
    tokenizer = load_tokenizer(model_folder)
    expected = "<user>a lamp?<assistant>{}<user>why\nnot?<assistant>".format("".join(first))
    assert tokenizer.decode(encode_chat(*asked[1], tokenizer, "")) == expected
    out = capsys.readouterr().out
    assert "\n\n> a lamp?\n\n" in out and "\n\n> why\nnot?\n\n" in out and "<user>" not in out
    assert out.count("the prompt, [") == 1 and out.count("8 tokens: ") == out.count("; cut at --maxLen 8\n") == 2
    assert len(re.findall(r"\n\[8 tokens, \d+ a second\]\n", out)) == 2
    assert record["turns"][1]["prompt"] == "> why\nnot?\n\n" and record["command"].count("--question") == 2


def test_a_text_ends_at_each_of_two_tokens_that_the_generation_config_names(chat, monkeypatch, capsys):
    """Planted: tokens that the model writes. Its tokenizer names neither."""
    monkeypatch.setattr("playback.play.decoded_rounds", lambda rounds, tokenizer: rounds)  # ids instead of text
    words = "--temperature 0 --draft lookup --maxLen 12", "a lamp?"
    (tokens,) = texts_of(chat(*words))
    first, second = list(dict.fromkeys(tokens))[2:4]
    for ends, last in ([second, first], first), ([second], second), (second, second), (0, None):
        capsys.readouterr()
        (text,) = texts_of(chat(*words, ends=ends))
        assert text == (tokens[: tokens.index(last) + 1] if last else tokens)
        out = capsys.readouterr().out
        assert f"{len(text)} tokens: " in out and ("the model ended the text" in out) == bool(last)
        assert ("cut at --maxLen 12" in out) != bool(last)


def test_a_conversation_that_outgrows_the_context_is_one_line_and_keeps_its_turns(chat, tmp_path, capsys):
    """It would fit with a shorter answer, so this shows only then."""
    first, second = map(len, texts_of(chat("--maxLen 120 --temperature 0", "a lamp?", "a bell?", code=2)))
    out = one_line(capsys, "exceed the context").out
    assert first > 60 and f"\n{first} tokens: " in out and second == 0
    assert "\n0 tokens; not finished\n" in out
    (tmp_path / "chat.json").unlink()
    with pytest.raises(FileNotFoundError):  # Not even short answers fit: nothing was played or written.
        chat("--maxLen 120", "a lamp?", "a bell?" * 40, code=2)
    assert one_line(capsys, "exceed the context").out == ""


def test_ctrl_c_ends_a_text_with_what_was_shown(chat, monkeypatch, capsys):
    shown, count = Screen.round, itertools.count(1)

    def round(self, round):
        shown(self, round)
        if next(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "round", round)
    (turn,) = chat("", "a lamp?", "b", code=130)["turns"]
    captured = capsys.readouterr()
    assert captured.err == "" and "; not finished\n" in captured.out and len(turn["rounds"]) == 3


@pytest.mark.parametrize("mode", ["", "--speedNew", "--contrastive", "--draft lookup"])
def test_a_text_is_shown_as_it_is_decoded_and_as_a_page(run, flags, tmp_path, capsys, mode):
    page = tmp_path / "page.html"
    run(f"{mode} --show --html", page, "--prompt", "The <bell> \x1b[2J\x9b\u202e", base=prompted(flags))
    out, source = capsys.readouterr().out, page.read_text()
    assert "The <bell> \\x1b[2J\\x9b\\u202e" in out and page.name in out.replace("\n", "")
    assert "The &lt;bell&gt; \\x1b[2J\\x9b\\u202e" in source and not {*"\x1b\x9b\u202e"} & {*out, *source}
    assert os.listdir(tmp_path) == ["page.html"]
