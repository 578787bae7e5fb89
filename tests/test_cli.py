"""test.py from its flags to its files: what is wrong costs one line, what is right is written down."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import helpers
import pytest
import tokenizerKinds
import torch
from conftest import CONTEXT, ROOT, prompted, with_ctrl_c
from localHub import Repository

from experiments import settings, sweep
from experiments.lines import name_of_kind
from inputs.models import load_tokenizer
from inputs.texts import encode_chat
from methods import samplers as makers
from methods.catalogue import METHODS, choose, in_mode
from playback.play import Screen
from utils import UserError

ROLES = {"draft", "draft model", "whole draft model", "mid", "self"}
EVERY, LOSSLESS = set(choose("all", ROLES)), choose("all", ROLES, "lossless")  # methods
KINDS = {"speed": ["speed"], "ppl": ["ppl corpus", "ppl text"]}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().split("\n")[:-1]]


def hashes(folder):
    return {(m["method"], m["prompt"], m["repeat"]): m["sha256"] for m in lines_of(folder) if m["kind"] == "speed"}


BAD = [
    "--gamma 0",
    "--maxLen 1000000000",
    f"--maxLen {CONTEXT}",
    "--mid nowhere --speedMulti",
    "--question hello --speed",
    "--target some/target --offline",
    "--draftVocab 301",
    "--draftVocab 1000000000",
    "--dataset nowhere",
    "--target nowhere",
    "--draft nowhere",
    "--draft .",
    "--device gpu",
    "--out /dev/null/nowhere",
    "--sentenceLimit 100000",
    pytest.param("--device cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")),
]


@pytest.mark.parametrize(
    "wrong",
    [
        *BAD,
        ["--prompt", ""],
        ["--question", ""],
        ["--show", "--question", "hello", "--question", " "],
        ["--prompt", "word " * CONTEXT],
        ["--prompt", "\udcff"],
        ["two\nlines"],
        *([flag, value] for flag in ("--target", "--dataset") for value in ("two\nlines", "long" * 2000)),
        ["--out", "long" * 2000],
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_is_written(cli, flags, tmp_path, capsys, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    wrong = wrong.split() if isinstance(wrong, str) else wrong
    assert cli.main([*flags, "--out", str(tmp_path), *wrong]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("test.py: error: ") and captured.err.count("\n") == 1 and captured.err[-1] == "\n"
    assert "Traceback" not in captured.err + captured.out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "mode, measured",
    [
        ([], ["speed", "ppl"]),
        (["--speed"], ["speed"]),
        (["--speed", "1"], ["speed"]),
        (["--ppl", "1"], ["ppl"]),
        (["--ppl"], ["ppl"]),
        (["--speed", "--ppl"], ["speed", "ppl"]),
        (["--speed", "0"], ["ppl"]),
        (["--ppl", "0"], ["speed"]),
        (["--speed", "1", "--ppl", "0"], ["speed"]),
    ],
)
def test_each_mode_writes_its_kinds_of_lines(cli, flags, tmp_path, capsys, mode, measured):
    flags = flags if "speed" in measured else prompted(flags, "--promptLen")
    assert cli.main([*flags, *mode, "--out", str(tmp_path)]) == 0
    first, *middle, last = lines_of(tmp_path)
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
    assert captured.out.splitlines()[-1].startswith("Written to results.txt")
    assert ("Speed: " in text, "Perplexity" in text) == ("speed" in measured, "ppl" in measured)
    assert sorted(os.listdir(tmp_path)) == ["results.jsonl", "results.txt"]


def test_a_run_records_what_it_was_made_with(cli, flags, tmp_path, pair_folder):
    assert (
        cli.main(
            [
                *prompted(flags),
                "--speed",
                "--seed",
                "3",
                "--dtype",
                "float32",
                "--prompt",
                "Once, a bell",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    run, *measurements, _ = lines_of(tmp_path)
    assert run["flags"]["seed"] == 3 and run["flags"]["prompt"] == "Once, a bell" and run["device"] == "cpu"
    assert run["command"].endswith(f"--prompt 'Once, a bell' --out {tmp_path}")
    assert run["models"]["target"]["name"] == "target"
    assert run["models"]["target"]["version"].startswith("sha256:")
    assert run["models"]["target"]["version"] != run["models"]["draft"]["version"]
    assert run["machine"]["torch"] == torch.__version__ and run["machine"]["processor"]
    assert len(measurements) == 3 and {m["dtype"] for m in measurements} == {"float32"}


def test_the_same_flags_and_seed_give_the_same_tokens(cli, flags, tmp_path):
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        assert cli.main([*flags, "--speed", "--repeats", "2", "--seed", str(seed), "--out", str(tmp_path / name)]) == 0
        runs[name] = hashes(tmp_path / name)
    assert len(runs["a"]) == 12 and runs["a"] == runs["b"]
    assert all(runs["a"][key] != runs["c"][key] for key in runs["a"] if key[1:] == (0, 0))


def test_greedy_speculative_tokens_are_the_targets(cli, flags, tmp_path):
    assert (
        cli.main(
            [
                *flags,
                "--speed",
                "--temperature",
                "0",
                "--dtype",
                "float32",
                "--maxLen",
                "40",
                "--gamma",
                "3",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    tokens = hashes(tmp_path)
    for prompt in (0, 1):
        assert tokens["speculative", prompt, 0] == tokens["target", prompt, 0] != tokens["draft", prompt, 0]


def test_a_prompt_is_continued_without_any_data_set(cli, flags, tmp_path):
    """And may have characters that end a line in Unicode, but not in a file of JSON lines."""
    assert (
        cli.main([*prompted(flags), "--speed", "--prompt", "Two\u2028lines, \x85 and a bell", "--out", str(tmp_path)])
        == 0
    )
    measurements = [line for line in lines_of(tmp_path) if line["kind"] == "speed"]
    assert {m["prompt"] for m in measurements} == {0} and measurements[0]["prompt_tokens"] > 3  # it is not cut


@pytest.mark.parametrize(
    "options",
    [
        ["--maxLen", "1"],
        ["--maxLen", "2"],
        ["--gamma", "50"],
        ["--promptLen", "1"],
        ["--repetition_penalty", "1.3"],
        ["--top_k", "1", "--top_p", "1"],
        ["--temperature", "1e-4"],
        ["--sentences", str(10**9), "--gamma", "1000", "--seed", str(2**62 - 1), "--top_k", str(10**9)],
        ["--draftLength", "costAware", "--gamma", "1000", "--temperature", "1000", "--repetition_penalty", "100"],
        ["--promptLen", str(10**9), "--draft", "lookup", "--ngram", str(10**9), "--top_p", "1e-300"],
    ],
)
def test_flags_at_their_limits_work(cli, flags, tmp_path, options):
    assert cli.main([*flags, "--speed", *options, "--out", str(tmp_path)]) == 0
    most = 1 if options == ["--maxLen", "1"] else 2 if options == ["--maxLen", "2"] else 8
    assert {m["tokens"] for m in lines_of(tmp_path) if m["kind"] == "speed"} <= set(range(1, most + 1))


def test_a_window_longer_than_the_context_is_the_context_and_its_stride_leaves_some(cli, flags, tmp_path):
    flags = prompted(flags, "--promptLen")
    assert cli.main([*flags, "--ppl", "--window", "1024", "--stride", "512", "--out", str(tmp_path)]) == 0
    line = next(line for line in lines_of(tmp_path) if line.get("of") == "corpus")
    assert (line["window"], line["stride"]) == (CONTEXT, CONTEXT // 2)


def test_documents_too_short_to_score_are_passed_over(cli, flags, text_file, tmp_path):
    folder, out = tmp_path / "books", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    for name, text in {"a": "", "b": "x", "c": text_file.read_text()}.items():
        (folder / f"{name}.txt").write_text(text)
    flags = prompted(flags, "--promptLen")
    assert cli.main([*flags, "--ppl", "--dataset", str(folder), "--out", str(out)]) == 0
    line = next(line for line in lines_of(out) if line.get("of") == "corpus")
    assert (line["corpus"], line["documents"]) == ("books", 1)


def test_a_failure_in_the_middle_keeps_and_shows_what_was_measured(cli, flags, tmp_path, capsys, monkeypatch):
    append = cli.Results.append

    def full(store, **line):
        if line["kind"] == "speed" and line["method"] == "speculative":
            raise UserError("results.jsonl cannot be written: no space left")
        append(store, **line)

    monkeypatch.setattr(cli.Results, "append", full)
    assert cli.main([*flags, "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == "test.py: error: results.jsonl cannot be written: no space left\n"
    for text in captured.out, (tmp_path / "results.txt").read_text():
        assert ", not finished" in text and "target alone" in text and "Perplexity" not in text


def test_what_cannot_be_written_is_still_shown(cli, flags, tmp_path, capsys):
    (tmp_path / "results.txt").mkdir()
    assert cli.main([*flags, "--speed", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "target alone" in captured.out and captured.err.count("\n") == 1 and "results.txt" in captured.err


def test_a_device_out_of_memory_is_one_line(cli, flags, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\na lot")

    monkeypatch.setattr(makers, "specSampling", full)
    assert cli.main([*flags, "--speed", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_models_named_it_says_which_are_used(cli, flags, pair_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(settings, "default_pair", lambda: (str(pair_folder / "target"), str(pair_folder / "draft")))
    assert cli.main([*flags[4:], "--speed", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith(f"No models named: using {pair_folder / 'target'} (target)")


def test_help_explains_every_flag(cli, capsys):
    with pytest.raises(SystemExit, check=lambda e: e.code == 0):
        cli.main(["--help"])
    out = capsys.readouterr().out
    for flag in settings.parse(["--target", "x", "--draft", "y"]).flags:
        assert f"  --{flag} " in out or f"  --{flag}\n" in out
    words = {word for name in METHODS for word in name.split(":")}
    assert all(re.search(rf"\b{re.escape(word)}\b", out) for word in words)


def start(arguments, folder, **more):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "test.py"), *arguments],
        cwd=folder,
        text=True,
        preexec_fn=with_ctrl_c,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def test_it_runs_from_another_folder_with_paths_relative_to_that(flags, pair_folder, tmp_path):
    (tmp_path / "out").mkdir()
    process = start(
        [*flags, "--target", "target", "--draft", "draft", "--speed", "--out", str(tmp_path / "out")], pair_folder
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "") and "Written to results.txt" in out
    assert len(hashes(tmp_path / "out")) == 6


def test_ctrl_c_shows_and_keeps_what_was_measured(flags, tmp_path):
    process = start([*flags, "--speed", "--repeats", "100000", "--out", "."], tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "results.jsonl").exists() or len(lines_of(tmp_path)) < 5:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "Interrupted" in err
    text = (tmp_path / "results.txt").read_text()
    for shown in out, text:
        assert ", not finished" in shown and "target alone" in shown
    assert sorted(os.listdir(tmp_path)) == ["results.jsonl", "results.txt"]


def test_several_prompt_lengths_are_timed_apart(cli, flags, tmp_path, capsys):
    assert cli.main([*flags, "--speed", "--promptLen", "40", "5", "5", "--out", str(tmp_path)]) == 0
    lengths = {(m["promptLen"], m["prompt_tokens"]) for m in lines_of(tmp_path) if m["kind"] == "speed"}
    assert lengths == {(5, 5), (40, 40)}  # longer than one paragraph: the text goes on
    text = (tmp_path / "results.txt").read_text()
    assert "2 prompts of 5 tokens" in text and "2 prompts of 40 tokens" in text


def test_a_prompt_length_that_no_text_has_takes_the_longest_there_are(cli, flags, tmp_path, capsys):
    assert cli.main([*flags, "--speed", "--promptLen", "240", "--out", str(tmp_path)]) == 0
    lengths = {m["prompt_tokens"] for m in lines_of(tmp_path) if m["kind"] == "speed"}
    assert all(40 < length < 240 for length in lengths)
    assert f"prompts of {min(lengths)} to {max(lengths)} tokens" in (tmp_path / "results.txt").read_text()


def test_a_hub_id_is_downloaded_on_first_use(cli, flags, pair_folder, hub, tmp_path, capsys, monkeypatch):
    models = tmp_path / "models"
    monkeypatch.setattr("inputs.files.MODELS", models)
    for role in ("target", "draft"):
        hub.models[f"some/{role}"] = Repository({f.name: f for f in (pair_folder / role).iterdir()})
    arguments = [*flags, "--speed", "--target", "some/target", "--draft", "some/draft", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--offline"]) == 2
    assert "some/target" in capsys.readouterr().err and hub.requests == []
    assert cli.main(arguments) == 0
    assert f"KB to download from {hub.url} into {models / 'target'}" in capsys.readouterr().out
    hub.forget()
    assert cli.main([*arguments, "--offline"]) == cli.main(arguments) == 0 and hub.requests == []
    run = next(line for line in lines_of(tmp_path) if line["kind"] == "run")
    assert run["models"]["target"]["version"] == hub.models["some/target"].commit


@pytest.mark.parametrize(
    "options",
    [
        ["--draftLength", "additive"],
        ["--draftLength", "draftConfidence"],
        ["--draftLength", "targetConfidence"],
        ["--draftLength", "costAware"],
        ["--verification", "block"],
    ],
)
def test_every_rule_can_be_chosen_and_is_named_in_the_table(cli, flags, tmp_path, capsys, options):
    assert cli.main([*flags, "--speed", *options, "--out", str(tmp_path)]) == 0
    assert f"{options[0][2:]} {options[1]}," in (tmp_path / "results.txt").read_text().replace("\n", " ")


def test_a_draft_of_few_tokens_guesses_for_the_same_text(cli, flags, pair_folder, tmp_path):
    """And is itself timed with all of them."""
    runs = {}
    for name, options in (("whole", ["--ppl", "0"]), ("restricted", ["--draftVocab", "40"])):
        (tmp_path / name).mkdir()
        arguments = [*flags, "--temperature", "0", "--dtype", "float32", "--out", str(tmp_path / name)]
        assert cli.main([*arguments, *options]) == 0
        runs[name] = hashes(tmp_path / name)
    assert runs["whole"] == runs["restricted"]
    run, *measured = lines_of(tmp_path / "restricted")
    assert run["flags"]["draftVocab"] == 40 and set(run["models"]) == {"target", "draft"}
    assert {m["kind"] for m in measured} == {"speed", "end"}
    assert "draftVocab 40," in (tmp_path / "restricted" / "results.txt").read_text().replace("\n", " ")
    assert "draftVocab" not in (tmp_path / "whole" / "results.txt").read_text()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder with a random GPT-2 whose tokenizer is of another kind than the tiny pair's, and knows only letters."""
    folder, tokenizer = tmp_path_factory.mktemp("foreign"), tokenizerKinds.sentence_piece(340)
    helpers.tiny("gpt2", 5, len(tokenizer), 1, context=CONTEXT).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_draft_with_another_tokenizer_guesses_for_the_same_text(cli, flags, foreign, tmp_path, capsys):
    runs = {}
    for name, options in (("same", ["--ppl", "0"]), ("other", ["--draft", str(foreign)])):
        (tmp_path / name).mkdir()
        given = ["--temperature", "0", "--dtype", "float32", "--gamma", "3", "--out", str(tmp_path / name)]
        assert cli.main([*flags, *given, *options]) == 0
        runs[name] = {key: value for key, value in hashes(tmp_path / name).items() if key[0] != "draft"}
    assert runs["same"] == runs["other"]
    said = [line for line in capsys.readouterr().out.splitlines() if "another tokenizer" in line]
    assert len(said) == 1 and "tokens that both have" in said[0] and "Perplexities" in said[0]
    assert {m["kind"] for m in lines_of(tmp_path / "other")} == {"run", "speed", "end"}
    assert cli.main(["--rerun", "1", "--out", str(tmp_path / "other")]) == 0


@pytest.mark.parametrize(
    "wrong", ["--ppl", "--draftVocab 9 --speed", "--contrastive", "--diversity", f"--speed --maxLen {CONTEXT - 12}"]
)
def test_what_needs_one_tokenizer_is_one_line(cli, flags, foreign, tmp_path, capsys, wrong):
    flags = prompted(flags) if wrong in ("--ppl", "--diversity") else flags
    assert cli.main([*flags, "--draft", str(foreign), "--out", str(tmp_path), *wrong.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and foreign.name in said


def test_a_draft_of_few_tokens_below_a_model_between(cli, flags, pair_folder, tmp_path):
    assert (
        cli.main(
            [*flags, "--speedMulti", "--mid", str(pair_folder / "draft"), "--draftVocab", "40", "--out", str(tmp_path)]
        )
        == 0
    )
    assert {m["method"] for m in lines_of(tmp_path) if m["kind"] == "speed"} == set(in_mode("speedMulti"))


def test_a_model_between_needs_one_below_it(cli, pair_folder, capsys):
    assert cli.main(["--mid", str(pair_folder / "draft"), "--target", str(pair_folder / "target"), "--speedMulti"]) == 2
    assert "--draft" in capsys.readouterr().err


def test_contrast_needs_two_models(cli, flags, pair_folder, tmp_path, capsys):
    assert cli.main([*flags, "--contrastive", "--draft", str(pair_folder / "target"), "--out", str(tmp_path)]) == 2
    assert "needs two models" in capsys.readouterr().err


def test_an_unknown_method_is_told_the_known_ones(cli, flags, capsys):
    assert cli.main([*flags, "--compare", "target,blok"]) == 2
    said = capsys.readouterr().err
    assert "'blok'" in said and all(name.split(":")[0] in said for name in METHODS)


def test_an_empty_prompt_file_is_one_line(cli, flags, tmp_path, capsys):
    flags = prompted(flags)
    (tmp_path / "empty.txt").write_text(" \n\n")
    assert cli.main([*flags, "--speed", "--promptFile", str(tmp_path / "empty.txt"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and os.listdir(tmp_path) == ["empty.txt"]


def test_all_methods_are_compared_on_the_same_prompts(cli, flags, pair_folder, tmp_path):
    arguments = [*flags, "--temperature", "0", "--dtype", "float32", "--maxLen", "12", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--compare", "all", "--mid", str(pair_folder / "draft")]) == 0
    measured = [m for m in lines_of(tmp_path) if m["kind"] == "speed"]
    assert {m["method"] for m in measured} == EVERY and len(measured) == 2 * len(EVERY)
    assert all(m["rounds"] + m["accepted"] + 1 == m["tokens"] or m["drafted"] for m in measured)
    tokens = hashes(tmp_path)
    for prompt in (0, 1):  # greedy: every lossless method gives the target's own tokens
        assert {tokens[name, prompt, 0] for name in {*LOSSLESS} & EVERY} == {tokens["target", prompt, 0]}
        assert tokens["contrastive", prompt, 0] == tokens["speculativeContrastive", prompt, 0]
    text = (tmp_path / "results.txt").read_text()
    assert all(name in text for name in ("cost aware", "draft confidence", "spec. contrastive", "lookup"))


def test_without_a_model_between_all_leaves_the_cascade_out(cli, flags, tmp_path):
    assert cli.main([*flags, "--compare", "all", "--maxLen", "3", "--out", str(tmp_path)]) == 0
    assert {m["method"] for m in lines_of(tmp_path) if m["kind"] == "speed"} == EVERY - {"cascade"}


@pytest.mark.parametrize(
    "mode, methods_measured",
    [
        (["--speedNew"], {"draft", "target", "additive"}),
        (["--contrastive"], set(in_mode("contrastive"))),
        (["--draft", "lookup"], {"target", "speculative"}),
        (["--compare", "block"], {"target", "block"}),
    ],
)
def test_modes_measure_their_methods(cli, flags, tmp_path, mode, methods_measured):
    assert cli.main([*flags, *mode, "--out", str(tmp_path)]) == 0
    assert {m["method"] for m in lines_of(tmp_path) if m["kind"] == "speed"} == methods_measured


def test_three_models_guess_for_each_other(cli, flags, pair_folder, tmp_path):
    assert (
        cli.main(
            [
                *flags,
                "--speedMulti",
                "--mid",
                str(pair_folder / "draft"),
                "--gamma1",
                "2",
                "--gamma2",
                "3",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    first, *measured = lines_of(tmp_path)
    assert set(first["models"]) == {"target", "draft", "mid"}
    assert {m["method"] for m in measured if m["kind"] == "speed"} == set(in_mode("speedMulti"))


def test_new_tokens_of_a_mode_unless_they_are_said():
    found = settings.parse(["--target", "x", "--draft", "y", "--speed", "--speedNew", "--diversity"]).sampling
    assert [found.max_len_of(mode) for mode in ("speed", "speedNew", "diversity")] == [200, 1000, 45]
    assert found.of("diversity").temperature == 1 and found.of("speed").temperature == 0.85
    argv = ["--target", "x", "--draft", "y", "--speedNew", "--maxLen", "7", "--temperature", "0.5"]
    found = settings.parse(argv).sampling
    assert found.max_len_of("speedNew") == 7 and found.of("diversity").temperature == 0.5


def test_the_sweep_writes_its_figure_and_names_it(cli, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 4))
    assert cli.main([*flags, "--sweep", "--sentences", "1", "--temperature", "0", "1", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path)
    (figure,) = lines[-1]["figures"]
    assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "results.txt").read_text()
    assert figure in text and "temperature 0.0" in text and "temperature 1.0" in text
    gammas = {m["method"] for m in lines if m["kind"] == "speed"} - {"draft", "target"}
    assert gammas == {f"gamma {gamma}" for gamma in range(1, 4)}
    costs = [line for line in lines if line["kind"] == "costs"]
    assert len(costs) == 2 and all(len(c["scoring"]) == 4 and c["scoring"][0] == 1 for c in costs)


def test_diversity_of_the_articles_prompts_or_of_a_files(cli, flags, tmp_path):
    (tmp_path / "prompts.txt").write_text("The bell\n\nThe lamp was\n")
    arguments = [*prompted(flags), "--diversity", "--repeats", "3", "--out", str(tmp_path)]
    assert cli.main(arguments) == cli.main([*arguments, "--promptFile", str(tmp_path / "prompts.txt")]) == 0
    for prompts in 5, 2:
        lines = [m for m in lines_of(tmp_path) if m["kind"] == "diversity" and m["prompts"] == prompts]
        texts = {m["method"]: m["texts"] for m in lines}
        assert texts == {
            "naive": 3 * prompts,
            "speculative": 3 * prompts,
            "contrastive": prompts,
            "speculativeContrastive": prompts,
            "greedy": prompts,
        }
        each = {m["method"]: m["each"] for m in lines}
        assert each["contrastive"] == each["speculativeContrastive"]
    assert "article, contrastive" in (tmp_path / "results.txt").read_text().replace("\n", " ")


def test_a_question_is_asked_by_the_chat_template(cli, flags, pair_folder, tmp_path):
    folder = shutil.copytree(pair_folder / "target", tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(CHAT)
    out = tmp_path / "out"
    out.mkdir()
    assert (
        cli.main(
            [
                *prompted(flags),
                "--speed",
                "--target",
                str(folder),
                "--question",
                "a lamp?",
                "--repetition_penalty",
                "1.3",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    expected = len(load_tokenizer(folder)("<user>a lamp?<assistant>")["input_ids"])
    assert {m["prompt_tokens"] for m in lines_of(out) if m["kind"] == "speed"} == {expected}


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat(cli, flags, model_folder, tmp_path):
    """`chat(words, ends)`: (exit code, the record) of a conversation with a model that ends its text at `ends`."""
    (model_folder / "chat_template.jinja").write_text(CHAT)

    def play(*words, ends=0):
        (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        file = tmp_path / "chat.json"
        code = cli.main([*prompted(flags), "--target", str(model_folder), "--show", "--html", str(file), *words])
        return code, json.loads(file.read_text())

    return play


def texts_of(record):
    """The committed tokens of each turn, as pieces of text."""
    return [[piece for ours, _, own in turn["rounds"] for piece in ours + own] for turn in record["turns"]]


def test_a_conversation_goes_on_after_each_answer(chat, monkeypatch, model_folder, capsys):
    asked = []

    def encode(questions, answers, tokenizer, model):
        asked.append((list(questions), list(answers)))
        return encode_chat(questions, answers, tokenizer, model)

    monkeypatch.setattr("playback.play.encode_chat", encode)
    code, record = chat("--question", "a lamp?", "--question", "why\nnot?")
    first, second = texts_of(record)
    assert code == 0 and len(first) == len(second) == 8
    assert asked == [(["a lamp?"], []), (["a lamp?", "why\nnot?"], ["".join(first)])]
    tokenizer = load_tokenizer(model_folder)
    expected = "<user>a lamp?<assistant>{}<user>why\nnot?<assistant>".format("".join(first))
    assert tokenizer.decode(encode_chat(*asked[1], tokenizer, "")) == expected
    out = capsys.readouterr().out
    assert "\n\n> a lamp?\n\n" in out and "\n\n> why\nnot?\n\n" in out and "<user>" not in out
    assert out.count("the prompt, [") == 1 and out.count("8 tokens: ") == out.count("; cut at --maxLen 8\n") == 2
    assert record["turns"][1]["prompt"] == "> why\nnot?\n\n" and record["command"].count("--question") == 2


def test_a_text_ends_at_each_of_two_tokens_that_the_generation_config_names(chat, monkeypatch, capsys):
    """Planted: tokens that the model writes. Its tokenizer names neither."""
    monkeypatch.setattr("playback.play.pieces_of", lambda rounds, tokenizer: rounds)  # ids instead of text
    words = ["--question", "a lamp?", "--temperature", "0", "--draft", "lookup", "--maxLen", "12"]
    (tokens,) = texts_of(chat(*words)[1])
    first, second = list(dict.fromkeys(tokens))[2:4]
    for ends, last in ([second, first], first), ([second], second), (second, second), (0, None):
        capsys.readouterr()
        (text,) = texts_of(chat(*words, ends=ends)[1])
        assert text == (tokens[: tokens.index(last) + 1] if last else tokens)
        out = capsys.readouterr().out
        assert f"{len(text)} tokens: " in out and ("the model ended the text" in out) == bool(last)
        assert ("cut at --maxLen 12" in out) != bool(last)


def test_a_conversation_that_outgrows_the_context_is_one_line_and_keeps_its_turns(chat, tmp_path, capsys):
    """It would fit with a shorter answer, so this shows only then."""
    code, record = chat("--question", "a lamp?", "--question", "a bell?", "--maxLen", "120", "--temperature", "0")
    captured = capsys.readouterr()
    assert code == 2 and captured.err.count("\n") == 1 and "exceed the context" in captured.err
    first, second = map(len, texts_of(record))
    assert first > 60 and f"\n{first} tokens: " in captured.out and second == 0
    assert "\n0 tokens; not finished\n" in captured.out
    (tmp_path / "chat.json").unlink()
    with pytest.raises(FileNotFoundError):  # Not even short answers fit: nothing was played or written.
        chat("--question", "a lamp?", "--question", "a bell?" * 40, "--maxLen", "120")
    captured = capsys.readouterr()
    assert "exceed the context" in captured.err and captured.out == ""


def test_ctrl_c_ends_a_text_with_what_was_shown(chat, monkeypatch, capsys):
    shown = Screen.round

    def round(self, round):
        shown(self, round)
        if len(self.rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "round", round)
    code, record = chat("--question", "a lamp?", "--question", "b")
    captured = capsys.readouterr()
    assert code == 130 and captured.err == "" and "; not finished\n" in captured.out
    assert len(record["turns"]) == 1 and len(record["turns"][0]["rounds"]) == 3


@pytest.mark.parametrize("mode", [[], ["--speedNew"], ["--contrastive"], ["--draft", "lookup"]])
def test_a_text_is_shown_as_it_is_decoded_and_as_a_page(cli, flags, tmp_path, capsys, mode):
    page = tmp_path / "page.html"
    assert cli.main([*prompted(flags), *mode, "--prompt", "The <bell>", "--show", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "The <bell>" in out and str(page.name) in out.replace("\n", "")
    assert "The &lt;bell&gt;" in page.read_text() and os.listdir(tmp_path) == ["page.html"]
