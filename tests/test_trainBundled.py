"""Training writes models that load, and reads texts as it says."""

import pytest
import torch

from inputs.folders import DATASETS
from inputs.models import load_model
from inputs.tokenizers import load_tokenizer
from scripts import trainBundled
from scripts.trainBundled import MIXED, Recipe
from scripts.training import Stage, windows


def test_a_short_training_writes_three_models_that_load(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainBundled, "VOCABULARY", 320)
    monkeypatch.setattr(
        trainBundled,
        "MODELS",
        {
            "target": Recipe(2, 64, None, [Stage(10**6, 1.0, (256,), (2048,)), Stage(10**6, 0.3, MIXED, (256,))]),
            "draft": Recipe(1, 32, "target", [Stage(10**6, 1.0, (256,), (256,))]),
        },
    )
    sample = DATASETS / "sample"
    command = [
        "--texts",
        sample / "articles.raw",
        sample,
        "--heldout",
        sample / "narrative.txt",
        "--models",
        "target",
        "draft",
        "--tokens",
        "30000",
        "--out",
        tmp_path,
        "--device",
        "cpu",
    ]
    assert trainBundled.main(list(map(str, command))) == 0
    printed = capsys.readouterr().out
    assert printed.count("perplexity on narrative.txt") == 2 and "bundled-draft" in printed
    tokenizer = load_tokenizer(tmp_path / "bundled-target")
    for name in ("target", "draft"):
        model = load_model(tmp_path / f"bundled-{name}", tokenizer, "bfloat16", "cpu")
        assert model.score(torch.tensor([[1, 2, 3]])).isfinite().all()
    losses = [float(line.rsplit("loss ", 1)[1]) for line in printed.splitlines() if ", loss " in line]
    assert losses[0] < 5.3  # ln 320 = 5.77: something was learnt


def test_wikitext_is_split_at_its_articles_and_loses_unk(tmp_path):
    file = tmp_path / "wiki.tokens"
    file.write_text(" \n = One = \n \n A <unk> word . \n = = Part = = \n more \n = Two = \n \n end \n")
    assert trainBundled.read_texts(file) == [" = One = \n A word . \n = = Part = = \n more \n", " = Two = \n end \n"]
    assert len(trainBundled.read_texts(f"{file}:3")) == 6


@pytest.mark.parametrize("length", [4, 7])
def test_windows_cover_the_corpus_in_each_pass(length):
    import random

    tokens = torch.arange(100)
    source = windows(tokens, length, random.Random(0))
    firsts = {int(next(source)[0]) for _ in range((100 - 2 * length) // length)}
    assert len(firsts) == (100 - 2 * length) // length
    assert len({f % length for f in firsts}) == 1
