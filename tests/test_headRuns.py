"""Runs of test.py with a head: as a method beside others, as the draft of all methods, and what it is refused for."""

import json
import shutil

import pytest
from conftest import few_mistakes, of_kind, one_line, prompted
from test_head import network_for

from engine.head import CONFIG, save_head
from inputs.models import load_model, load_tokenizer, model_version


@pytest.fixture(scope="module")
def head_folder(pair_folder, tmp_path_factory):
    """A head with random weights for the tiny target."""
    folder, target = tmp_path_factory.mktemp("head") / "head", pair_folder / "target"
    network = network_for(load_model(target, load_tokenizer(target), "float32", "cpu"))
    save_head(network, folder, model_version(target), {})
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "--compare head,block --batch 2",
        "--draft head --compare all --compile",
        "--draft head --speed --sweep --temperature 1 --sentences 1 --maxLen 4 --draftLength costAware --draftVocab 40",
        "--draft head --compare tree,lookupFirst --batch 2",
        "--draft head --speedNew --batch 2 --compile",
        "--draft head --speedMulti --mid DRAFT",  # It guesses in a cascade.
        "--lossless head --tokens 60 --compile",
        "--draft head --lossless tree,lookupFirst --tokens 60 --compile",
    ],
)
def test_runs_with_a_head(run, head_folder, pair_folder, words, request, monkeypatch):
    few_mistakes(monkeypatch)
    if "--compile" in words:
        request.getfixturevalue("kernels")
    lines = run(words.replace("DRAFT", str(pair_folder / "draft")), "--head", head_folder)
    models = lines[0]["models"]
    heads = {role for role, model in models.items() if model["version"] == model_version(head_folder)}
    assert heads == ({"draft", "head"} if "--draft head" in words else {"head"}) and lines[-1]["kind"] == "end"
    assert models["head"]["parameters"] < models["target"]["parameters"]


def test_a_head_is_the_draft_if_no_other_is_named(run, flags, head_folder):
    lines = run("--speed", "--head", head_folder, base=prompted(flags, "--draft"))
    assert lines[0]["flags"]["draft"] == "head"
    assert {line["method"] for line in of_kind(lines)} == {"target", "speculative"}


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--head OTHER --compare head", "OTHER is not a head for target: it was trained for sha256:0123456789abcdef"),
        ("--head DRAFT --compare head", "is a model, not a trained head"),
        ("--head nowhere --compare head", "there is no model 'nowhere'"),
        ("--head HEAD --draft DRAFT --speed", "--head is for the method head and for --draft head"),
        ("--head HEAD --draft head --mid head --speed", "--mid head: the model between"),
        ("--head HEAD --draft head --speed --draftDevice cpu", "leave out --draftDevice"),
        ("--head HEAD --draft head --ppl", "--draft head has no perplexity"),
    ],
)
def test_what_is_wrong_with_a_head_is_one_line(run, pair_folder, head_folder, tmp_path, capsys, words, reason):
    other = shutil.copytree(head_folder, tmp_path / "o")
    config = json.loads((other / CONFIG).read_text())
    config["head"]["target"] = "sha256:0123456789abcdef"
    (other / CONFIG).write_text(json.dumps(config))
    for name, folder in {"DRAFT": pair_folder / "draft", "HEAD": head_folder, "OTHER": other}.items():
        words, reason = words.replace(name, str(folder)), reason.replace(name, str(folder))
    assert run(words, code=2) == []
    one_line(capsys, reason)
