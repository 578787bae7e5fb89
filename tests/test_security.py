"""Content of models, texts, hubs and files is never run as code, written outside its folder, or able to control the
screen."""

import json
import os
import shutil

import pytest
import torch
from conftest import ROOT, refused
from localHub import Repository

import downloadData
import downloadModel
from inputs import files
from inputs.hub import HubFile, Manifest, list_repository
from inputs.models import load_model, load_tokenizer, weight_files
from inputs.texts import encode_chat
from scripts import drawRounds

ELSEWHERE = ("../../x", "/etc/x", "a/../../x", "..\\..\\x", "C:\\x", "C:x", "..")
NO_IDS = "../../x", "/abs/x", "owner/..", "../owner", "owner/../x", "owner/x\n", "owner\\x", "C:\\x", "a\x1b[31m", "~/x"
CURSED = "\x1b[31mred\x07\x9b2J\u202e $x$ :smile: [bold]b[/] <script>alert(1)</script>\n"


def is_one_line(text):
    """Whether a text is one line that does not steer the screen."""
    return text.count("\n") == 1 and text.rstrip("\n").isprintable()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The folders of downloads, in a folder that must not change."""
    for name in "MODELS", "DATASETS":
        monkeypatch.setattr(files, name, tmp_path / "outside" / name.lower())
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("mine")
    yield tmp_path / "outside"
    assert (tmp_path / "outside" / "mine").read_text() == "mine" and not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", NO_IDS)
def test_no_name_makes_a_download_write_elsewhere(cli, flags, hub, outside, tmp_path, text_file, capsys, name):
    for command in (
        lambda: downloadModel.main(["--", name]),
        lambda: downloadData.main(["--from", str(text_file), "--", name]),
        lambda: cli.main([*flags, "--target", name, "--out", str(tmp_path)]),
    ):
        assert command() == 2
        error = capsys.readouterr().err
        assert is_one_line(error) and "error: " in error
    assert hub.requests == [] and os.listdir(outside) == ["mine"]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_no_file_of_a_hub_and_no_record_of_a_download_leads_elsewhere(hub, outside, capsys, path):
    """A file that only an older manifest names is removed, and a folder may be from anyone."""
    for kind in ("model", "dataset"):
        getattr(hub, f"{kind}s")["some/thing"] = Repository({"config.json": b"{}", path: b"x"})
        with refused(path.split("\\")[-1], "outside its folder"):
            list_repository("some/thing", kind=kind)
    hub.models["some/thing"] = Repository({"config.json": b"{}", "model.safetensors": b"x"})
    folder = outside / "models" / "thing"
    folder.mkdir(parents=True)
    for name in "../../mine", path:
        Manifest("some/thing", "0", files=[HubFile(name, 1, "sha256:0")]).write(folder)
        assert Manifest.read(folder) is None
    assert downloadModel.main(["some/thing"]) == 2 and "move it away" in capsys.readouterr().err


WRONG = '{"repo": "a/b", "commit": "c", "files": [{"path": "x", "size": 1, "digest": 5}]}'


@pytest.mark.parametrize(
    "content", ["[1]", '{"files": [1]}', '{"files": [{"path": 1, "size": 1, "digest": "x"}]}', "[" * 10**5, WRONG]
)
def test_a_record_that_is_none_is_none(tmp_path, content):
    (tmp_path / "download.json").write_text(content)
    assert Manifest.read(tmp_path) is None


def test_what_a_record_says_does_not_steer_the_screen(outside, capsys):
    for folder, module in (outside / "models" / "a", downloadModel), (outside / "datasets" / "b", downloadData):
        folder.mkdir(parents=True)
        Manifest(CURSED, CURSED).write(folder)
        assert module.main(["--list"]) == 0
        shown = capsys.readouterr().out
        assert is_one_line(shown) and "\\x1b[31mred" in shown


def test_weights_are_those_of_the_folder(model_folder):
    (model_folder / "model.safetensors").rename(model_folder.parent / "model.safetensors")
    for path in ("../model.safetensors", str(model_folder.parent / "model.safetensors")):
        (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": path}}))
        with refused("outside its folder", "download it again"):
            weight_files(model_folder)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_ask_for_code_of_the_hub(model_folder, key):
    """With the package `kernels` installed, transformers would fetch and run code of that name."""
    config = model_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: "some-body/evil-attention"}))
    model = load_model(model_folder, load_tokenizer(model_folder), "float32", "cpu")
    assert bool(model.score(torch.tensor([[1, 2]])).isfinite().all())


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}{% endfor %}", "{{ raise_exception('a\nb') }}", "{% if"],
)
def test_a_chat_template_that_fails_or_breaks_out_is_one_line(model_folder, template):
    (model_folder / "chat_template.jinja").write_text(template)
    with refused("the chat template of model", "--prompt"):
        encode_chat(["why?"], [], load_tokenizer(model_folder), "model")


def test_no_name_or_text_steers_the_screen_or_the_results(run, pair_folder, tmp_path, capsys):
    """Names of folders and files, the text and the command appear as they are, but escaped."""
    folder = shutil.copytree(pair_folder / "target", tmp_path / CURSED.replace("/", ""))
    text = tmp_path / (CURSED.replace("/", "") + ".txt")
    text.write_text(CURSED * 5)
    run("", "--target", folder, "--dataset", text)
    results = (tmp_path / "results.txt").read_text()
    for written in results, *capsys.readouterr():
        assert all(c.isprintable() or c == "\n" for c in written)
    assert "\\x1b[31mred\\x07\\x9b2J\\u202e $x$ :smile: [bold]b[] <script>alert(1)<script>\\n, 0.0 M" in results
    assert "[bold]b[]" in results.split("Perplexity per text")[1]
    (folder / "config.json").write_text("{")
    run("", "--target", folder, "--dataset", text, code=2)
    error = capsys.readouterr().err
    assert is_one_line(error) and "\\x1b[31mred" in error


@pytest.mark.parametrize("text", [CURSED, "$\\frac{1}{", "x" * 500, " " * 99, "\U0001f600 漢字 \u202e"])
def test_the_moving_picture_shows_any_text(tmp_path, text):
    rounds = {"rounds": [[[], [], [text]], [[text], [text], [text]]], "seconds": [0.1, 0.2]}
    record = json.loads((ROOT / "docs" / "records" / "rounds.json").read_text(encoding="utf-8"))
    record |= {"prompt": text, "texts": {"plain": rounds, "speculative": rounds}}
    drawRounds.draw_rounds(record, tmp_path / "rounds.gif", comment="")
    assert (tmp_path / "rounds.gif").read_bytes().startswith(b"GIF89a")


def test_help_of_the_moving_picture_decodes_nothing(monkeypatch):
    monkeypatch.setattr("sys.argv", ["drawRounds", "--help"])
    monkeypatch.setattr(drawRounds, "load_inputs", None)
    with pytest.raises(SystemExit):
        drawRounds.main()


def test_the_text_of_the_moving_picture_is_whole_and_keeps_to_its_columns():
    """Rejected guesses are shown in the last round, until the text ends."""
    rounds = [[[], [], [" he"]], [[" looked"], [" up"], [" at", "\nthe"]], [[" door"], [" of", " x"], ["."]]]

    def text(count, ended=False):
        lines = [[glyph for glyph, _ in line] for line in drawRounds.lines_of("The old man", rounds[:count], ended)]
        assert all(len(line) <= drawRounds.COLUMNS for line in lines)
        return " ".join("".join(line) for line in lines)

    assert text(2) == "The old man he looked up at the"
    assert text(3) == "The old man he looked at the door of x."
    assert text(3, ended=True) == "The old man he looked at the door."
    long = list(drawRounds.lines_of("word " * 99 + "x" * 200, [], False))
    assert len(long) > 10 and max(map(len, long)) <= drawRounds.COLUMNS
