"""Training writes models that load, and reads texts as it says."""

import pytest
import torch
from test_trainHead import make_small

from inputs.files import DATASETS
from inputs.models import load_model, load_tokenizer
from scripts import headTexts, trainBundled, training
from scripts.trainBundled import MIXED
from scripts.training import SAMPLING, Recipe, rejection, soft_nucleus
from utils import probabilities


def test_a_short_training_writes_models_that_load(tmp_path, monkeypatch, capsys):
    make_small(monkeypatch)
    monkeypatch.setattr(trainBundled, "VOCABULARY", 320)
    monkeypatch.setattr(trainBundled, "WRITTEN", 3000)
    target = [Recipe(16000), Recipe(2000, lengths=MIXED)]
    draft = [Recipe(2000), Recipe(3000, lengths=(80, 512), acceptance=True)]
    models = {"target": (2, 64, None, target), "draft": (1, 32, "target", draft)}
    monkeypatch.setattr(trainBundled, "MODELS", models)
    texts = f"--texts {DATASETS / 'sample/articles.raw'} {DATASETS / 'sample'}"
    command = f"{texts} --out {tmp_path} --device cpu"
    assert trainBundled.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {"bundled-target", "bundled-draft"}
    tokenizer = load_tokenizer(tmp_path / "bundled-target")
    assert len(tokenizer) == 320 and tokenizer.eos_token_id == 0
    for name in ("target", "draft"):
        model = load_model(tmp_path / f"bundled-{name}", tokenizer, "bfloat16", "cpu")
        assert model.score(torch.tensor([[1, 2, 3]])).isfinite().all()
    losses = [float(line.rsplit("loss ", 1)[1]) for line in printed.splitlines() if ", loss " in line]
    assert losses[0] < 5.5  # ln 320 = 5.77: something was learnt
    assert len(losses) == 4 and 0 < losses[3] < 1  # the share of guesses that the target rejects


def test_the_gradient_of_rejection_is_a_difference_quotient_with_as_much_in_the_nucleus():
    """The edge is found anew for the logits beside, such that the nucleus holds the same share."""
    draft, target = 1.5 * torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0)).double()
    plain, p = target.softmax(-1), probabilities(target, SAMPLING).double()

    def inside(probs, edge):
        return (training.SHARPNESS * (probs / edge).log()).sigmoid()

    probs = (draft / 0.85).softmax(-1)
    found, edge = soft_nucleus(probs)
    torch.testing.assert_close(found, inside(probs, edge))
    held = (found * probs).sum(-1, keepdim=True)

    def accepted(logits):
        probs = (logits / 0.85).softmax(-1)
        low, high = edge / 4, edge * 4
        for _ in range(60):
            middle = (low + high) / 2
            more = (inside(probs, middle) * probs).sum(-1, keepdim=True) > held
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        return torch.minimum(p, inside(probs, low) * probs / held).sum(-1)

    def loss(logits):
        return -accepted(logits) - training.DIVERGENCE * (plain * logits.log_softmax(-1)).sum(-1)

    rejected, gradient = rejection(draft, plain, p)
    torch.testing.assert_close(rejected[:, 0], 1 - accepted(draft))
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        step = 1e-5 * torch.randn(draft.shape, generator=generator, dtype=torch.float64)
        quotient = (loss(draft + step) - loss(draft - step)) / 2
        torch.testing.assert_close((gradient * step).sum(-1), quotient, atol=1e-8, rtol=1e-3)


def test_a_token_near_the_edge_of_the_nucleus_is_partly_inside():
    """The edge lies between 0.15, the last token that top-p keeps, and 0.05; or, far from 0.001, below 0.3."""
    found, edge = soft_nucleus(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.699, 0.3, 0.001, 0.0]]))
    torch.testing.assert_close(edge[:, 0], torch.tensor([(0.15 * 0.05) ** 0.5, training.WIDEST * 0.3]))
    torch.testing.assert_close(found[0], torch.tensor([0.9991, 0.9931, 0.9, 0.1]), atol=1e-4, rtol=0)
    assert found[1, 1] > 0.99 and found[1, 2] < 0.001


def test_the_soft_nucleus_accepts_about_as_much_as_the_one_that_tokens_are_drawn_from():
    draft, target = 2 * torch.randn(2, 64, 400, generator=torch.Generator().manual_seed(0))
    draft = target + draft / 3
    rejected, _ = rejection(draft, target.softmax(-1), probabilities(target, SAMPLING))
    drawn = torch.minimum(probabilities(draft, SAMPLING), probabilities(target, SAMPLING)).sum(-1)
    assert 1 - float(rejected.mean()) == pytest.approx(float(drawn.mean()), abs=0.01)


def test_wikitext_is_split_at_its_articles_and_loses_unk(tmp_path):
    file = tmp_path / "wiki.tokens"
    file.write_text(" \n = One = \n \n A <unk> word . \n = = Part = = \n more \n = Two = \n \n end \n")
    documents = [" = One = \n A word . \n = = Part = = \n more \n", " = Two = \n end \n"]
    assert headTexts.read_documents(str(file)) == documents and headTexts.read_documents(f"{file}:3") == 3 * documents
