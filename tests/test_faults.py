"""What users, disks, networks and models do to a run: one clear line, and nothing that was measured is lost."""

import contextlib
import fcntl
import io
import os
import subprocess
import sys
import threading
from functools import partial
from unittest.mock import Mock

import helpers
import pytest
import torch
from conftest import CONTEXT, END_OF_TEXT, ROOT, WRITING, of_kind, one_line, prompted, refused
from localHub import Repository

from decoding.drafter import Drafter, Guesses
from decoding.verification import RULES
from engine.cachedModel import CachedModel
from inputs.commandLine import as_command
from inputs.models import load_tokenizer
from methods.cascade import CascadeDrafter
from methods.catalogue import choose
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from report import results
from specSampling import specSampling
from utils import GREEDY, Sampling

PROMPTS = (
    "Καλημέρα κόσμε, здравствуй, こんにちは",
    "שלום עולם, مرحبا, नमस्ते",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301",
    "\x1b[31mred\x07 \x9b2J \u202etxt \t\x0b\x1c\u2028 end",
    f"before {END_OF_TEXT} after",
    END_OF_TEXT,
    "$x^2$ \\frac{ <script>alert(1)</script> [bold]",
    "x",
)


def mount(folder, options):
    """Mount a disk there, or the one that is there otherwise."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def disk(tmp_path):
    """The folder of a disk of 16 KB of its own: full and read-only are real, for root too."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (done := mount(folder, "size=16k")).returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_full_of_results_keeps_all_that_was_measured(cli, flags, disk, capsys):
    (disk / "filling").write_bytes(bytes(8 << 10))
    arguments = [*flags, "--speed", "--maxLen", "2", "--out", str(disk)]
    assert cli.main([*arguments, "--repeats", "100"]) == 2
    captured = one_line(capsys, "results.txt cannot be written: No space left", "measurements are in results.jsonl")
    whole = results.Results(disk).records()
    assert len(whole) > 5 and ", not finished" in captured.out and "target alone" in captured.out
    assert mount(disk, "remount,size=1m").returncode == 0
    assert cli.main(arguments) == 0
    after = results.Results(disk).records()
    assert after[: len(whole)] == whole and after[-1]["kind"] == "end"
    text = (disk / "results.txt").read_text()
    assert text.count("Run ") == 2 and text.count(", not finished") == 1
    assert sorted(os.listdir(disk)) == ["filling", "results.jsonl", "results.txt"]


def test_a_full_disk_is_one_line_for_figures_and_pages_too(cli, run, flags, figure_files, disk, capsys, monkeypatch):
    (disk / "filling").write_bytes(bytes(12 << 10))
    page = disk / "page.html"
    assert cli.main([*prompted(prompted(flags), "--repeats"), "--prompt", "a", "--html", str(page)]) == 2
    one_line(capsys, str(page), "No space left")
    assert os.listdir(disk) == ["filling"]
    monkeypatch.setattr("experiments.sweep.GAMMAS", range(1, 3))
    monkeypatch.setattr("report.results.sweep_tables", lambda *_: ())
    assert mount(disk, "remount,size=28k").returncode == 0
    *lines, end = run("--sweep --sentences 1", out=disk)
    assert end["figures"] == [] and ".png cannot be written: No space left" in capsys.readouterr().out
    assert len(lines) == 5  # the run, the costs, and three methods


def test_a_read_only_folder_is_refused_before_anything_is_loaded(
    run, flags, disk, hub, pair_folder, capsys, monkeypatch
):
    """The folder of results, of a page, and of models."""
    page = disk / "page.html"
    assert mount(disk, "remount,ro").returncode == 0
    run("--target nowhere", out=disk, code=2)
    one_line(capsys, str(disk), "may not write", "--out")
    run("--prompt a --html", page, base=prompted(flags), out=disk, code=2)
    one_line(capsys, str(page), "cannot be written")
    hub.models["some/target"] = Repository({f.name: f for f in (pair_folder / "target").iterdir()})
    monkeypatch.setattr("inputs.files.MODELS", disk)
    run("--target some/target", code=2)
    one_line(capsys, str(disk / ".target.lock"), "Read-only")


def test_what_is_appended_while_a_rendering_waits_is_shown(tmp_path):
    """Else the one that read first could write last, and what the other had finished would be missing."""
    store = results.Results(tmp_path)
    rendering = threading.Thread(target=store.render)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    rendering.start()
    rendering.join(0.1)
    store.append(kind="run", run="second")
    os.close(folder)
    rendering.join()
    assert "Run second" in store.text.read_text()


ODD_LINES = b"\n".join(
    [
        b"\xff\xfe",
        b'{"kind": "run"}\n{"kind": "run", "run": [1]}\n{"kind": "speed", "run": {}}',
        b"[" * 100_000,
        b"1" * 10_000,
        bytes(100),
        b'{"kind": "run", "run": "later", "models": [], "flags": 3}\n{"kind": "new", "run": "later"}',
        b'{"kind": "run", "run": "\\u001b[31m"}\n',
    ]
)


def test_results_that_nobody_can_read_are_kept_and_do_not_stop_a_run(run, tmp_path, cli, flags, capsys):
    """Garbage, what was cut off, and lines of another version. A folder in their place is one line."""
    (tmp_path / "results.jsonl").write_bytes(ODD_LINES)
    assert cli.main([*flags, "--speed", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.jsonl").read_bytes().startswith(ODD_LINES)
    text = (tmp_path / "results.txt").read_text()
    assert "target alone" in text and text.count("was written by another version") == 2 and "\x1b" not in text
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    capsys.readouterr()
    assert cli.main([*flags, "--speed", "--out", str(tmp_path / "folder")]) == 2
    one_line(capsys, "results.jsonl is not a file that you may write to")


def test_out_of_memory_is_one_line_and_what_was_measured_is_kept(cli, run, tmp_path, capsys, monkeypatch):
    """Torch cannot have so much memory on any machine."""
    monkeypatch.setattr(cli, "measure_perplexity", lambda *_: torch.empty(1 << 60))
    lines = run("--maxLen 2", code=2)
    captured = one_line(capsys, "out of memory; use smaller models", "What was measured is kept")
    assert [line["kind"] for line in lines if line.get("of") != "text"] == ["run"] + ["speed"] * 6
    for shown in captured.out, (tmp_path / "results.txt").read_text():
        assert ", not finished" in shown and "target alone" in shown


@pytest.mark.parametrize("step", ["safe_open", "AutoModelForCausalLM.from_pretrained"])
def test_a_model_that_does_not_fit_into_memory_is_one_line(step, run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(f"inputs.models.{step}", Mock(side_effect=MemoryError("Cannot allocate memory")))
    run("", code=2)
    one_line(capsys, "does not fit into the memory of cpu", "smaller dtype or model")
    assert os.listdir(tmp_path) == []


def test_whatever_says_that_memory_is_full_is_one_line(capsys):
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\na lot"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ):
        assert as_command("test.py", Mock(side_effect=error), "") == 2
        one_line(capsys, "out of memory")


class Unsure(Drafter):
    """It has no model, and its q is nan."""

    def draft(self, rows, gammas, sampling, length=None):
        return Guesses(rows.last(1)[0], torch.full((rows.size, 1, 61), torch.nan))


@pytest.mark.parametrize("rule, sampling", zip([*RULES, *RULES], [GREEDY, Sampling(), Sampling(1.0, 5, 1.0)]))
def test_logits_that_stop_being_finite_are_told_with_model_and_dtype(sampling, rule):
    """In the middle of a text, whichever model it is, and whoever reads for whom."""
    bad, good, draft = (helpers.tiny(seed=seed) for seed in range(3))
    bad.model.get_input_embeddings().weight.data[6:] = float("inf")  # It reads only smaller tokens at first.
    bad.name, seen = "the broken one", []

    def decode(sampler, *models, **options):
        how = {"max_len": 20, "sampling": sampling, "generator": torch.Generator().manual_seed(0)} | options
        sampler([[1, 2, 3], [4, 5]], *models, **how, callback=lambda row, tokens, guessed: seen.extend(tokens))

    speculative = partial(decode, partial(specSampling, gamma=3, verify=RULES[rule]))
    for call in (
        partial(decode, regrSampling, bad),
        partial(speculative, bad, ModelDrafter(draft)),
        partial(speculative, good, ModelDrafter(bad)),
        partial(speculative, good, CascadeDrafter(bad, ModelDrafter(draft))),
        partial(speculative, good, CascadeDrafter(draft, ModelDrafter(bad))),
        partial(decode, regrSampling, Contrast(good, bad), sampling=GREEDY),
    ):
        seen.clear()
        with refused("the broken one", "not finite in float32 (nan or inf)"):
            call()
        assert seen and max(seen) < good.vocabulary  # some text came before it, and no token that is none
    with refused("the drafter Unsure gives a q that is not finite"):
        speculative(good, Unsure())
    good.model.lm_head.weight.data[7] = float("inf")  # in the output layer alone: nothing but this logit is wrong
    with refused("gpt_neox-1", "not finite"):
        decode(regrSampling, good)
    halved = CachedModel(draft.model.half(), draft.vocabulary, "halved")
    halved.model.lm_head.weight.data *= 1e6  # 65504 is the largest number of float16.
    with refused("halved gives logits that are not finite in float16", "use --dtype float32"):
        decode(regrSampling, halved)


def test_each_line_of_a_file_is_a_prompt_whatever_is_in_it(run, flags, tmp_path):
    """A one-token text and the end-of-text token among them; a separator of Unicode's ends no line."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    lines = of_kind(run("--speed --maxLen 2 --promptFile", tmp_path / "prompts.txt", base=prompted(flags)))
    lengths = {m["prompt"]: m["prompt_tokens"] for m in lines}
    assert len(lengths) == len(PROMPTS) and lengths[PROMPTS.index("x")] == lengths[PROMPTS.index(END_OF_TEXT)] == 1


def test_a_text_of_one_token_has_no_perplexity(run, flags, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("x")
    run("--ppl --sentenceLimit 1 --dataset", tmp_path / "one.txt", base=prompted(flags, *WRITING), code=2)
    one_line(capsys, "one.txt", "two tokens")


def test_a_context_that_is_exactly_full_is_enough_for_every_method(run, flags, pair_folder, capsys):
    new, tokenizer = 6, load_tokenizer(pair_folder / "target")
    prompt = tokenizer.decode(tokenizer("the bell " * 200)["input_ids"][: CONTEXT - new])
    words = "--compare all --temperature 0 --mid", pair_folder / "draft", "--prompt", prompt, "--maxLen"
    measured = of_kind(run(*words, new, base=prompted(flags)))
    roles = {"draft", "draft model", "whole draft model", "mid", "self"}
    assert {m["prompt_tokens"] for m in measured} == {CONTEXT - new} and len(measured) == len(choose("all", roles))
    hashes = {m["method"]: m["sha256"] for m in measured}
    assert {hashes[name] for name in choose("all", roles, "lossless") if name in hashes} == {hashes["target"]}
    capsys.readouterr()
    run(*words, new + 1, base=prompted(flags), code=2)
    one_line(capsys, f"{CONTEXT - new} tokens and maxLen {new + 1} exceed the context")


@pytest.mark.parametrize("mode", ["--speed", "--show"])
def test_a_screen_without_unicode_shows_what_it_can(run, flags, tmp_path, monkeypatch, mode):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", screen)
    run(f"--maxLen 2 {mode}", "--prompt", "naïve 漢字", base=prompted(flags))
    screen.flush()
    assert b"na\\xefve \\u6f22\\u5b57" in screen.buffer.getvalue()
    if mode == "--speed":
        assert "naïve 漢字" in (tmp_path / "results.txt").read_text(encoding="utf-8")


def test_a_screen_that_is_none_or_a_full_disk_costs_no_result(run, tmp_path, capsys, monkeypatch):
    """None: as under a service, or with `>&-`."""
    monkeypatch.setattr("sys.stdout", None)
    run("--speed --maxLen 2", out=tmp_path / "none")
    assert "target alone" in (tmp_path / "none" / "results.txt").read_text()
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with contextlib.suppress(OSError), open("/dev/full", "w") as screen:  # which cannot be closed properly either
        monkeypatch.setattr("sys.stdout", screen)
        run("--speed --maxLen 2", out=tmp_path / "full", code=2)
    one_line(capsys, "No space left on device", "What was measured is kept")
    assert "target alone" in (tmp_path / "full" / "results.txt").read_text()


GONE = """
import os, sys
from inputs.commandLine import as_command
from inputs.progress import Printer
for write in print, Printer().print:
    if not os.fork():
        sys.exit(as_command("test.py", lambda: write("words " * 2_000), ""))
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr)
"""


def test_a_reader_that_has_gone_is_no_traceback():
    """As with `| head`; by either way of printing."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", GONE], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"141\n141\n")
