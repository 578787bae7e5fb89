"""A run's record is enough to run it again, and what then differs is said; what it says of the machine."""

import builtins
import io
import json
import platform
import shutil
from dataclasses import replace

import pytest
from conftest import ROOT, lines_of, prompted
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_flags import said, table
from test_speed import measurement
from tqdm import tqdm

from experiments import runRecord, settings
from experiments.flags import parser
from inputs import files
from methods.catalogue import METHODS, repeatable
from methods.samplers import Decoding
from utils import UserError

# Of all methods, but for those of a temperature of their own, and with two that do not depend on the draft's luck.
NAMES = ["fixed", "additive", "draftConfidence", "targetConfidence", "costAware", "block", "lookup", "contrastive"]


@pytest.fixture(scope="module")
def made(cli, flags, pair_folder, tmp_path_factory):
    """A folder with one run of most of what can be measured."""
    folder = tmp_path_factory.mktemp("made")
    arguments = ["--compare", ",".join(NAMES), "--diversity", "--ppl", "--contrastiveTemperature", "0.7", "--seed", "5"]
    assert cli.main([*flags, *arguments, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def again(cli, made, tmp_path, capsys):
    """f(edit, run) -> (exit code, what is printed, the line on the error stream) of --rerun after the lines of the run
    were edited."""

    def run(edit=lambda lines: None, asked="1"):
        lines = lines_of(made)
        edit(lines)
        (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code = cli.main(["--rerun", asked, "--out", str(tmp_path)])
        captured = capsys.readouterr()
        assert captured.err.count("\n") == (code == 2)
        return code, captured.out.replace("\n", " "), captured.err

    return run


def test_a_run_again_gives_the_same_texts_and_figures(again, made, tmp_path):
    """Lines that nothing here writes are ignored."""
    record, *lines = lines_of(made)
    odd = [{"run": record["run"]} | fields for fields in ({}, {"kind": ["speed"]}, {"kind": "ppl", "of": 7})]
    code, out, _ = again(lambda lines: lines.extend(odd), asked=record["run"])
    texts = [m for m in lines if "sha256" in m]
    compared = [m for m in texts if m["method"] not in ("costAware", "tree")]
    assert code == 0 and f"all {len(compared)} texts are the same." in out and "all 2 figures are the same." in out
    assert f"{len(texts) - len(compared)} are left out: the guesses of costAware" in out
    assert "have changed" not in out and "machine is not" not in out
    second = [line for line in lines_of(tmp_path) if line.get("kind") == "run"][1]
    assert second["flags"] == record["flags"] | {"out": str(tmp_path), "device": "cpu"}
    assert second["command"].startswith("--rerun ")


def test_what_differs_or_was_not_measured_again_is_named_and_another_machine_too(again):
    def edit(lines):
        lines[0]["flags"] |= {"compare": "fixed", "diversity": False}
        texts = [m for m in lines if m["kind"] == "speed" and m["method"] in ("target", "fixed")]
        of_texts, of_corpus = ppl = [m for m in lines if m["kind"] == "ppl"]
        next(m for m in texts if m["method"] == "fixed" and m["prompt"] == 1)["sha256"] = "0" * 16
        of_texts["ppl"]["target"] *= 1 + 1e-12
        of_corpus["ppl"]["target"] = {unit: value * (1 + 1e-8) for unit, value in of_corpus["ppl"]["target"].items()}
        lines[0]["machine"]["torch"] = "1.0"
        lines[1:] = [*texts, texts[-1] | {"prompt": 7}, *ppl]

    code, out, _ = again(edit)
    assert code == 1 and "1 of 4 texts differs, first speed, mode compare, " in out
    assert "method fixed, prompt 1, repeat 0." in out
    assert "1 of 2 figures differs, first ppl corpus, corpus " in out
    assert "1 was not measured again, first speed," in out and "prompt 7" in out
    assert "The machine is not the same, so tokens may differ: torch was 1.0 and is " in out


def test_one_thing_is_said_as_one():
    line = {"kind": "speed", "method": "fixed", "sha256": "0", "dtype": "float32"}
    lines = [line, {"kind": "speed", "method": "tree", "repeatable": False}]
    sentences, same = runRecord.compare({"run": "a"}, lines, {"run": "b"}, lines)
    assert same and sentences[1] == "the only text is the same." and sentences[2].startswith("1 is left out: ")
    sentences, same = runRecord.compare({"run": "a"}, lines, {"run": "b"}, [line | {"sha256": "2"}])
    assert not same and sentences[1] == "1 of 1 text differs, first speed, method fixed."


def test_changed_weights_are_said(run, model_folder, tmp_path, capsys):
    run("--compare fixed --target", model_folder, out=tmp_path / "out")
    file = model_folder / "model.safetensors"
    save_file({name: weight.flip(0) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    run("--rerun 1", base=[], out=tmp_path / "out", code=1)
    out = capsys.readouterr().out.replace("\n", " ")
    assert "The weights of the target, model, have changed: they were sha256:" in out and "of 4 texts differ" in out
    assert "weights of the draft" not in out


def test_a_changed_prompt_is_the_reason_and_paths_begin_where_the_run_was(run, flags, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("The bell\n")
    run("--compare fixed --promptFile prompts.txt", base=prompted(flags), out=out)
    monkeypatch.chdir(out)
    run("--rerun 1", base=[], out=out)
    (tmp_path / "prompts.txt").write_text("The lamp\n")
    run("--rerun 1", base=[], out=out, code=1)
    assert "(the text that is read has changed)." in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    "edit, asked, words",
    [
        (lambda lines: None, "2", "has 1 run; the newest are: "),
        (lambda lines: None, "0", "has 1 run"),
        (lambda lines: None, "nowhere", "has 1 run"),
        (lambda lines: lines.clear(), "1", "has 0 runs; the newest are: none"),
        (lambda lines: lines.__delitem__(slice(1, None)), "1", "cannot be compared"),
        (lambda lines: [line.pop(name, 0) for line in lines for name in ("sha256", "ppl")], "1", "another version"),
        (lambda lines: lines[0].pop("flags"), "1", "its record lacks the flags"),
        (lambda lines: lines[0].update(folder=None), "1", "another version"),
        (lambda lines: lines[0].update(machine="x"), "1", "another version"),
        (lambda lines: lines[0]["models"].update(target=5), "1", "another version"),
        (lambda lines: lines[0]["flags"].update(colour=3), "1", "there is no flag --colour any more"),
        (lambda lines: lines[0]["flags"].update(help=True), "1", "there is no flag --help any more"),
        (lambda lines: lines[0]["flags"].clear(), "1", "its record lacks the flags"),
        (lambda lines: lines[0]["flags"].update(gamma=0), "1", "--gamma: must be a whole number"),
        (lambda lines: lines[0]["flags"].update(target="nowhere"), "1", "there is no model 'nowhere'"),
    ],
)
def test_a_run_that_cannot_be_made_again_is_one_line(again, edit, asked, words):
    code, out, err = again(edit, asked)
    assert code == 2 and words in err and out == ""


@drawing(max_examples=100, deadline=None)
@given(data=st.data())
def test_flags_that_were_recorded_are_the_flags_again(data):
    """Whatever they are: nothing is lost on the way through JSON and a command line."""
    kinds = table(parser(), "test")
    kinds = {flag: kinds[flag] for flag in kinds.keys() - {"--out", "--html", "--show", "--rerun"}}
    chosen = data.draw(st.lists(st.sampled_from(sorted(kinds)), unique=True, max_size=9))
    values = [said(flag, data.draw(st.sampled_from(list(kinds[flag].right) or [None]))) for flag in chosen]
    try:
        first = settings.parse(["--target", "t", "--draft", "d", *sum(values, [])])
    except UserError:  # Some do not go together.
        return
    record = {"run": "r", "device": "cpu", "models": {}, "flags": json.loads(json.dumps(first.flags))}
    lines = [{"kind": "ppl", "of": "text", "corpus": "c", "ppl": {}}]
    device = first.models.device or "cpu"
    again = settings.parse(runRecord.flags_of_run(record, lines, str(first.output.folder)), again=True)
    assert again.flags == first.flags | {"device": device}
    assert again == replace(first, models=replace(first.models, device=device))


def test_neither_order_nor_repeats_nor_a_bar_changes_a_token(run, made, tmp_path, monkeypatch):
    shown, init = io.StringIO(), tqdm.__init__
    monkeypatch.setattr(tqdm, "__init__", lambda b, **k: init(b, **k | {"disable": False, "file": shown, "delay": 0}))
    run("--contrastiveTemperature 0.7 --seed 5 --repeats 2 --compare", ",".join(NAMES[::-1]))
    before, after = (runRecord.comparable(lines_of(folder)) for folder in (made, tmp_path))
    shared = [key for key in before if key.startswith("speed")]
    assert len(shared) == 2 * len({*NAMES, "target"} - {"costAware"})
    assert [before[key]["sha256"] for key in shared] == [after[key]["sha256"] for key in shared]
    assert "compare" in shown.getvalue()


def test_only_what_follows_the_clock_is_not_repeatable_and_other_programs():
    own = [name for name, method in METHODS.items() if not method.engine]
    assert not any(repeatable(name, Decoding()) for name in METHODS.keys() - own)
    assert [name for name in own if not repeatable(name, Decoding())] == ["costAware", "tree", "topDown"]
    assert [name for name in own if not repeatable(name, Decoding(tree="2,1"))] == ["costAware"]
    of_auto = {name for name in own if not repeatable(name, Decoding(tree="auto"))}
    assert of_auto == {"costAware", "tree", "topDown", "self", "head", "speculative", "speculativeContrastive"}
    clocked = {name for name in own if not repeatable(name, Decoding(draft_length="costAware"))}
    assert clocked == {"costAware", "tree", "topDown", "speculative", "speculativeContrastive"}


def test_without_the_list_of_linux_python_is_asked_for_the_processor(monkeypatch):
    monkeypatch.setattr(builtins, "open", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert runRecord.machine("cpu")["processor"] == "a processor"


def test_the_code_is_the_source_that_decides_texts_and_times(tmp_path, monkeypatch):
    for folder in runRecord.FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in runRecord.SOURCE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    of_modes = {mode: runRecord.code_version("cpu", mode) for mode in runRecord.OF_MODES}
    here = runRecord.code_version()
    assert here == runRecord.origin([], {"sweep": None}, "cpu", {})["code"] and here.startswith("sha256:")
    for mode, code in of_modes.items():
        assert runRecord.origin([], {mode: "all"}, "cpu", {})["code"] == code != here
    monkeypatch.setattr(files, "ROOT", tmp_path)

    def with_file(name, change=str, *modes):
        """The version while a file is changed."""
        source = (tmp_path / name).read_text()
        (tmp_path / name).write_text(change(source))
        version = runRecord.code_version.__wrapped__("cpu", *modes)
        (tmp_path / name).write_text(source)
        return version

    (tmp_path / "engine" / "note.txt").write_text("no source")
    assert with_file("utils.py") == with_file("utils.py", lambda text: text.replace('"""', '"""Another. ', 1)) == here
    of_mode = {
        "audit": "lossless/audit.py",
        "compare": "methods/programs/llamaCpp.py",
        "lossless": "lossless/mistakes.py",
        "steps": "benchmark/steps.py",
        "sweep": "experiments/sweep.py",
        "zoo": "engine/gate.py",
    }
    assert of_mode.keys() == runRecord.OF_MODES.keys() and all(map(runRecord.is_of_now, [here, *of_modes.values()]))
    for unread in *of_mode.values(), "inputs/gguf.py":
        assert with_file(unread, lambda text: f"{text}x = 1\n") == here
        of_file = {
            mode for mode, code in of_modes.items() if with_file(unread, lambda text: f"{text}x = 1\n", mode) != code
        }
        both = (
            {"compare"} if of_file & {"audit", "steps"} else set()
        )  # Other engines' texts are judged, their steps timed.
        assert of_file == {mode for mode, name in of_mode.items() if name == unread} | both
    assert with_file("experiments/flags.py", lambda text: text.replace('"""Models."""', '"""Which."""')) == here
    for name, comment, code in ("utils.py", "#", "x = 1"), ("engine/kernels/choose.cpp", "//", "int x;"):
        assert with_file(name, lambda text: f"{text}{comment} a comment\n") == here
        assert with_file(name, lambda text: f"{text}{code}\n") != here
    # Versions of Python read an f-string differently.
    text = '"""A page.\n\n    x\n"""\n\nx = f"{1 + 1} # {{}}"  # a comment\n'
    assert runRecord.without_comments(text, ".py") == 'x = f"{1 + 1} # {{}}"'


def test_a_busy_machine_is_said(monkeypatch):
    run = {"machine": {"cores": 2}, "load": 2.4}
    same = {"kind": "speed", "mode": "compare", "promptLen": 8, "temperature": 1.0}
    texts = [measurement(tpot=seconds, **same) for seconds in (0.01, 0.02, 0.09, None)]
    assert list(runRecord.strained(run, texts)) == [] == list(runRecord.strained({"machine": {"cores": None}}, []))
    (busy,) = runRecord.strained(run | {"load": 4.2}, texts)
    assert "a load of 4.2, and 2 cores" in busy
    (unsteady,) = runRecord.strained(run, [*texts, texts[0] | {"tpot": 0.2}])
    assert "more than tenfold (target)" in unsteady
    assert not list(runRecord.strained(run, [*texts, texts[0] | {"tpot": 0.2, "promptLen": 2048}]))
    (again,) = runRecord.strained(run, [texts[0], texts[0] | {"stalled": 2}])
    assert again == "The machine stalled during 1 text, which was timed again."
    (again,) = runRecord.strained(run, [texts[0] | {"stalled": 1}, texts[1] | {"stalled": 2}, texts[2]])
    assert again == "The machine stalled during 2 texts, which were timed again."
    plain = [measurement("target", prompt, tokens_per_round=2.0, **same) for prompt in range(4)]
    fast = [line | {"method": "fixed", "throughput": 30.0, "drafted": 4} for line in plain]
    (wrong,) = runRecord.strained(run, [*plain, *fast])
    assert "fixed is 3.00 times" in wrong and "at most 2.00 tokens" in wrong
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    origin = runRecord.origin([], {}, "cpu", {})
    assert origin["load"] >= 0 and origin["waiting"] == "passive"
