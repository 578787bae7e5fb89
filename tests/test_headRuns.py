"""Runs of test.py with a head: as a method beside others, as the draft of all methods, and what it is refused for."""

import json
import shutil

import pytest
import torch
from conftest import CONTEXT, few_mistakes
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.head import WEIGHTS, HeadNetwork, save_head
from inputs.models import load_model, load_tokenizer, model_version


@pytest.fixture(scope="module")
def head_folder(pair_folder, tmp_path_factory):
    """A head with random weights for the tiny target."""
    folder, target_folder = tmp_path_factory.mktemp("head") / "head", pair_folder / "target"
    target = load_model(target_folder, load_tokenizer(target_folder), "float32", "cpu")
    vocabulary, width = target.model.get_input_embeddings().weight.shape
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        head={"layers": [1, 2]},
    )
    save_head(HeadNetwork.of(config, target), folder, model_version(target_folder), {})
    return folder


def run_of(cli, flags, folder, *words):
    """The exit code, and the lines of results."""
    code = cli.main([*flags, *words, "--out", str(folder)])
    file = folder / "results.jsonl"
    return code, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    "words",
    [
        "--compare head,fixed,block",
        "--draft head --compare all --compile",
        "--draft head --speed --draftLength costAware --draftVocab 40",
        "--draft head --speed --tree 2,1 --compile",
        "--draft head --compare tree,lookupFirst --batch 2",
        "--draft head --speedNew --batch 2 --compile",
        "--draft head --sweep",
        "--lossless head --tokens 60 --compile",
        "--draft head --lossless all --tokens 60 --compile",
    ],
)
def test_runs_with_a_head(cli, flags, head_folder, tmp_path, capsys, words, request, monkeypatch):
    few_mistakes(monkeypatch)
    if "--compile" in words:
        request.getfixturevalue("kernels")
    code, lines = run_of(cli, flags, tmp_path, "--head", str(head_folder), *words.split())
    assert code == 0 and lines[-1]["kind"] == "end", capsys.readouterr()
    models = lines[0]["models"]
    heads = {role for role, model in models.items() if model["version"] == model_version(head_folder)}
    assert heads == ({"draft", "head"} if "--draft head" in words else {"head"})
    assert models["head"]["parameters"] < models["target"]["parameters"]


def test_a_head_guesses_in_a_cascade(cli, flags, head_folder, pair_folder, tmp_path):
    words = f"--head {head_folder} --draft head --mid {pair_folder / 'draft'} --speedMulti".split()
    code, lines = run_of(cli, flags, tmp_path, *words)
    assert code == 0 and lines[-1]["kind"] == "end"


def test_a_head_is_the_draft_if_no_other_is_named(cli, flags, head_folder, tmp_path):
    at = flags.index("--draft")
    code, lines = run_of(cli, [*flags[:at], *flags[at + 2 :]], tmp_path, "--head", str(head_folder), "--speed")
    assert code == 0 and lines[0]["flags"]["draft"] == "head"
    assert {line["method"] for line in lines if line["kind"] == "speed"} == {"target", "speculative"}


def one_line(capsys, *words):
    """The one line that a user sees of what is wrong, which has these words."""
    said = capsys.readouterr().err
    assert said.startswith("test.py: error: ") and said.count("\n") == 1 and all(word in said for word in words), said


def test_what_is_no_head_for_the_target_is_one_line(cli, flags, pair_folder, head_folder, tmp_path, capsys):
    other, cut = tmp_path / "other", tmp_path / "cut"
    for folder in other, cut:
        shutil.copytree(head_folder, folder)
    config = json.loads((other / "config.json").read_text())
    config["head"]["target"] = "sha256:0123456789abcdef"
    (other / "config.json").write_text(json.dumps(config))
    weights = load_file(cut / WEIGHTS)
    del weights["join.weight"]
    save_file(weights, cut / WEIGHTS)
    for folder, *words in (
        (other, "is not a head for target", "sha256:0123456789abcdef"),
        (cut, "is not a head for target", "join.weight"),
        (pair_folder / "draft", "is a model, not a trained head"),
    ):
        assert run_of(cli, flags, tmp_path, "--head", str(folder), "--compare", "head") == (2, [])
        one_line(capsys, *words)
    assert run_of(cli, flags, tmp_path, "--head", str(tmp_path / "nowhere"), "--compare", "head") == (2, [])
    one_line(capsys, "there is no model", "nowhere")


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--draft draft --speed", "--head is for the method head and for --draft head"),
        ("--draft head --mid head --speed", "--mid head: a head reads"),
        ("--draft head --speed --draftDevice cpu", "leave out --draftDevice"),
        ("--draft head --ppl", "--draft head has no perplexity"),
    ],
)
def test_what_a_head_cannot_do_is_one_line(cli, flags, pair_folder, head_folder, tmp_path, capsys, words, reason):
    given = [str(pair_folder / "draft") if word == "draft" else word for word in words.split()]
    assert run_of(cli, flags, tmp_path, "--head", str(head_folder), *given) == (2, [])
    one_line(capsys, reason)
