"""Training writes models that load, and reads texts as it says."""

import random

import pytest
import torch

from inputs.files import DATASETS
from inputs.models import load_model, load_tokenizer
from scripts import trainBundled, training
from scripts.trainBundled import MIXED, PROMPT, StageTrainer, continue_prompts, corpus_windows, label_texts
from scripts.training import SAMPLING, TOP, Recipe, acceptance_gradient, most_probable, rejection_loss, soft_nucleus
from utils import Sampling, probabilities


def test_a_short_training_writes_models_that_load(tmp_path, monkeypatch, text_file, capsys):
    monkeypatch.setattr(trainBundled, "VOCABULARY", 320)
    target = [Recipe(lengths=(256,), last_lengths=(2048,)), Recipe(peak=0.3, lengths=MIXED, last_lengths=(256,))]
    draft = [Recipe(), Recipe(peak=0.3, lengths=(80, 512), labelled={80: 9, 512: 4}, averaged=True)]
    models = {"target": (2, 64, None, target), "draft": (1, 32, "target", draft)}
    monkeypatch.setattr(trainBundled, "MODELS", models)
    texts = f"--texts {DATASETS / 'sample/articles.raw'} {DATASETS / 'sample'} --heldout {text_file}"
    command = f"{texts} --models target draft --tokens 16000 --out {tmp_path} --device cpu"
    assert trainBundled.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"perplexity on {text_file.name}") == 2 and "bundled-draft" in printed
    tokenizer = load_tokenizer(tmp_path / "bundled-target")
    for name in ("target", "draft"):
        model = load_model(tmp_path / f"bundled-{name}", tokenizer, "bfloat16", "cpu")
        assert model.score(torch.tensor([[1, 2, 3]])).isfinite().all()
    losses = [float(line.rsplit("loss ", 1)[1]) for line in printed.splitlines() if ", loss " in line]
    assert losses[0] < 5.5  # ln 320 = 5.77: something was learnt


@pytest.fixture
def distributions():
    """Logits of a draft and of a target, `[6, 40]`."""
    return 3 * torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("most", [30, 40])
def test_most_probable_is_the_distribution_that_tokens_are_drawn_from(monkeypatch, distributions, most):
    monkeypatch.setattr(training, "TOP", most)
    kept, p, plain = most_probable(distributions[1])
    assert kept.shape == (6, most)
    for sampling, found in ((SAMPLING, p), (Sampling(1.0, 0, 1.0), plain)):
        expected = probabilities(distributions[1], sampling).gather(-1, kept.long())
        torch.testing.assert_close(found.float(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("most", [20, 39])
def test_the_gradient_is_that_of_acceptance_and_of_the_divergence(monkeypatch, distributions, most):
    monkeypatch.setattr(training, "TOP", most)
    kept, p, plain = most_probable(distributions[1])
    one, two = (distributions[0].clone().requires_grad_() for _ in range(2))
    share = rejection_loss(one, kept, p, plain)
    share.backward()

    q = two.softmax(-1).gather(-1, kept.long())
    lost = 1 - plain.float().sum(-1)
    entropy = -(plain.float() * q.log()).sum(-1) - lost * (1 - q.sum(-1)).log()
    entropy.mean().backward()
    passed, descent = acceptance_gradient(distributions[0], kept.long(), p.float())
    torch.testing.assert_close(share, (1 - passed).mean())
    torch.testing.assert_close(one.grad, descent / 6 + training.DIVERGENCE * two.grad, atol=1e-4, rtol=1e-2)


def test_the_gradient_of_acceptance_is_a_difference_quotient_with_as_much_in_the_nucleus(distributions):
    """The edge is found anew for the logits beside, such that the nucleus holds the same share."""
    draft, target = distributions.double() / 2
    kept, p, _ = most_probable(target)
    kept, p = kept.long(), p.double()

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
        return torch.minimum(p, (inside(probs, low) * probs / held).gather(-1, kept)).sum(-1)

    passed, descent = acceptance_gradient(draft, kept, p)
    torch.testing.assert_close(passed[:, 0], accepted(draft))
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        step = 1e-5 * torch.randn(draft.shape, generator=generator, dtype=torch.float64)
        quotient = (accepted(draft + step) - accepted(draft - step)) / 2
        torch.testing.assert_close(-(descent * step).sum(-1), quotient, atol=1e-8, rtol=1e-3)


def test_a_token_near_the_edge_of_the_nucleus_is_partly_inside():
    """The edge lies between 0.15, the last token that top-p keeps, and 0.05; or, far from 0.001, below 0.3."""
    found, edge = soft_nucleus(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.699, 0.3, 0.001, 0.0]]))
    torch.testing.assert_close(edge[:, 0], torch.tensor([(0.15 * 0.05) ** 0.5, training.WIDEST * 0.3]))
    torch.testing.assert_close(found[0], torch.tensor([0.9991, 0.9931, 0.9, 0.1]), atol=1e-4, rtol=0)
    assert found[1, 1] > 0.99 and found[1, 2] < 0.001


def test_the_soft_nucleus_accepts_about_as_much_as_the_one_that_tokens_are_drawn_from():
    draft, target = 2 * torch.randn(2, 64, 400, generator=torch.Generator().manual_seed(0))
    draft = target + draft / 3
    kept, p, _ = most_probable(target)
    passed, _ = acceptance_gradient(draft, kept.long(), p.float())
    drawn = torch.minimum(probabilities(draft, SAMPLING), probabilities(target, SAMPLING)).sum(-1)
    assert float(passed.mean()) == pytest.approx(float(drawn.mean()), abs=0.01)


def test_an_averaged_stage_keeps_the_mean_of_the_weights_before_and_after():
    def weights(averaged):
        torch.manual_seed(0)
        model = trainBundled.new_model(1, 32)
        before = [p.detach().clone() for p in model.parameters()]
        rows = {256: zip(corpus_windows(torch.arange(1, 4000), 256, random.Random(0)))}
        StageTrainer(Recipe(6000, averaged=averaged), model, "a model", rows).train()
        return before, list(model.parameters())

    (before, after), (_, mean) = weights(False), weights(True)
    for one, two, found in zip(before, after, mean):
        torch.testing.assert_close(found, (one + two) / 2, atol=1e-5, rtol=1e-4)


def test_the_teacher_writes_what_follows_its_prompts():
    torch.manual_seed(0)
    teacher = trainBundled.new_model(1, 32).eval()
    prompts = [torch.randint(1, 4096, (PROMPT,)) for _ in range(3)]
    texts = continue_prompts(teacher, iter(prompts), 3, PROMPT + 5, 1.0)
    assert texts.shape == (3, PROMPT + 5) and texts[:, :PROMPT].equal(torch.stack(prompts))
    rows = label_texts(teacher, texts, "cpu")
    assert [tuple(part.shape) for part in rows[0]] == [(PROMPT + 5,), *[(PROMPT + 4, TOP)] * 3]
    after = label_texts(teacher, texts, "cpu", PROMPT)
    assert all(torch.equal(part, whole[-5:]) for part, whole in zip(after[0][1:], rows[0][1:]))


def test_wikitext_is_split_at_its_articles_and_loses_unk(tmp_path):
    file = tmp_path / "wiki.tokens"
    file.write_text(" \n = One = \n \n A <unk> word . \n = = Part = = \n more \n = Two = \n \n end \n")
    assert trainBundled.read_documents(file) == [
        " = One = \n A word . \n = = Part = = \n more \n",
        " = Two = \n end \n",
    ]
    assert len(trainBundled.read_documents(f"{file}:3")) == 6


@pytest.mark.parametrize("length", [4, 7])
def test_windows_cover_the_corpus_in_each_pass(length):
    tokens = torch.arange(100)
    source = corpus_windows(tokens, length, random.Random(0))
    firsts = {int(next(source)[0]) for _ in range((100 - 2 * length) // length)}
    assert len(firsts) == (100 - 2 * length) // length
    assert len({f % length for f in firsts}) == 1
