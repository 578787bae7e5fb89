"""Perplexities against independent computations."""

import math

import helpers
import pytest
import torch
from conftest import WRITING, prompted, refused

import PPL
from decoding import verification
from decoding.verification import acceptance, token_rule
from engine.compiling import compiled
from engine.cpuModel import CpuModel
from inputs.files import ROOT
from inputs.models import load_model, load_tokenizer
from utils import residual


def tokens_of(length):
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def corpus_ppl(length, *models, window, stride):
    """The corpus perplexity of a text of `length` tokens, each of which is a word: a number."""

    def tokenizer(text, verbose=False):
        return {"input_ids": [int(word) for word in text.split()]}

    text = " ".join(map(str, tokens_of(length)))
    return PPL.calculate_ppl_corpus(text, tokenizer, models[0], *models[1:] or (None,), window, stride)


def test_per_text_perplexity_equals_the_models_own_loss(pair):
    ids = tokens_of(50)
    loss = pair[0].model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    assert PPL.calculate_ppl_regr(ids, pair[0]) == pytest.approx(math.exp(loss), rel=1e-5)


def test_speculative_perplexity_is_the_targets_and_equals_the_plain_formula(pair):
    target, draft = pair
    ids = torch.tensor(tokens_of(100))
    p, q = (m.score(ids[None])[0, :-1].double().softmax(-1) for m in pair)
    accepted = torch.minimum(p, q)
    left = (p - q).clamp(min=0)
    emitted = accepted + (1 - accepted.sum(-1, keepdim=True)) * left / left.sum(-1, keepdim=True)
    direct = math.exp(-emitted.gather(-1, ids[1:, None]).log().mean().item())
    spec = PPL.calculate_ppl_spec(ids.tolist(), target, draft)
    assert spec == pytest.approx(direct, rel=1e-5)
    assert spec == pytest.approx(PPL.calculate_ppl_regr(ids, target), rel=1e-5)
    assert PPL.calculate_ppl_regr(ids, draft) != pytest.approx(spec, rel=0.05)  # the two models do differ


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("residual", lambda p, q: p),  # replaced from p
        ("residual", lambda p, q: residual(q, p)),
        ("acceptance", lambda p_x, q_x: torch.ones_like(p_x)),
        ("acceptance", lambda p_x, q_x: acceptance(p_x**0.8, q_x**0.8)),
        ("acceptance", lambda p_x, q_x: acceptance(q_x, p_x)),  # rejected with probability p / q
    ],
)
def test_a_planted_mistake_in_the_functions_that_sample_changes_the_perplexity(pair, monkeypatch, name, wrong):
    """Patched where `token_rule` finds them: what it calls is what the perplexity is formed with."""
    ids = tokens_of(100)
    monkeypatch.setattr(verification, name, wrong)
    assert abs(PPL.calculate_ppl_spec(ids, *pair) / PPL.calculate_ppl_regr(ids, pair[0]) - 1) > 1e-4
    assert name in token_rule.__code__.co_names


@pytest.fixture(scope="module")
def bundled(kernels):
    """f(name of the values of both protocols) and the values of the bundled pair, eager; then compiled."""
    tokenizer = load_tokenizer("bundled-target")
    text = (ROOT / "datasets/sample/narrative.txt").read_text()[:3000]

    def values(pair):
        ids = tokenizer(text)["input_ids"][:300]
        corpus = PPL.calculate_ppl_corpus(text, tokenizer, *pair, window=256, stride=128)
        per_token = {f"corpus, {role}": perplexity.token_ppl for role, perplexity in corpus.items()}
        return PPL.perplexities(ids, *pair) | per_token

    pair = [load_model(f"bundled-{name}", tokenizer, "float32", "cpu") for name in ("target", "draft")]
    eager = values(pair)
    pair = [compiled(model) for model in pair]
    assert all(isinstance(model, CpuModel) for model in pair)
    return eager, lambda: values(pair)


def test_kernels_give_the_same_perplexities(bundled):
    eager, by_kernels = bundled
    assert len(eager) == 6 and by_kernels() == pytest.approx(eager, rel=1e-6)


def late_windows(tokens, window, stride):
    return [(start + (start > 0), first, end) for start, first, end in WINDOWS(tokens, window, stride)]


def score_with_a_late_slot(model, tokens):
    """The last token is written one slot too late, so that it sees one that holds nothing."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).clone()
    positions[:, -2:] += 1
    model.reserve(len(tokens), tokens.shape[1] + 1)
    return model.forward(tokens, positions)


WINDOWS = PPL.windows


@pytest.mark.parametrize(
    "owner, name, wrong", [(PPL, "windows", late_windows), (CpuModel, "score", score_with_a_late_slot)]
)
def test_a_window_or_a_slot_off_by_one_gives_others(bundled, monkeypatch, owner, name, wrong):
    eager, by_kernels = bundled
    monkeypatch.setattr(owner, name, wrong)
    found = by_kernels()
    assert all(found[key] != pytest.approx(eager[key], rel=1e-6) for key in eager if key.startswith("corpus"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("compiles", [False, True])
def test_the_table_says_what_computed_it(run, capsys, compiles):
    lines = run("--speed --ppl --sentences 1" + " --compile" * compiles)
    assert {line["compiled"] for line in lines if line["kind"] == "ppl"} == {compiles}
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(", compiled") == said.count("Perplexity") * compiles


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_line_shows_a_wrong_residual(run, flags, monkeypatch, wrong):
    if wrong:
        monkeypatch.setattr(verification, "residual", lambda p, q: p)
    (line,) = (line for line in run("--ppl", base=prompted(flags, *WRITING)) if line.get("of") == "text")
    ratio = line["ppl"]["speculative"] / line["ppl"]["target"]
    assert ratio != pytest.approx(1, rel=1e-4) if wrong else ratio == pytest.approx(1, rel=1e-6)


def test_probabilities_too_small_for_a_float_still_count():
    """exp(-200) is 0 in float32, and 1e-10 was 0 in the float16 of the report's code."""
    log_p = torch.tensor([[200.0, 0.0, 0.0]]).log_softmax(-1)
    log_q = torch.tensor([[0.0, 200.0, 0.0]]).log_softmax(-1)
    for token in (0, 1, 2):
        got = PPL.speculative_log_probs(log_p, log_q, torch.tensor([token]))
        assert got.item() == pytest.approx(log_p[0, token].item(), rel=1e-5, abs=1e-5)


def test_logits_that_are_not_finite_have_no_perplexity(pair):
    broken = helpers.tiny()
    with torch.no_grad():
        broken.model.lm_head.weight[7] = torch.inf
    for models in (broken,), (pair[0], broken):
        with refused("gpt_neox-0 gives logits that are not finite in float32"):
            PPL.perplexities(tokens_of(20), *models)


def test_identical_models_have_no_residual_and_no_nan(pair):
    ids, model = tokens_of(60), pair[0]
    assert PPL.calculate_ppl_spec(ids, model, model) == pytest.approx(PPL.calculate_ppl_regr(ids, model), rel=1e-6)


@pytest.mark.parametrize(
    "length, window, stride", [(300, 64, 32), (300, 64, 63), (90, 128, 64), (129, 64, 1), (65, 64, 7)]
)
def test_corpus_perplexity_scores_every_token_once(pair, length, window, stride):
    target = pair[0]
    got = corpus_ppl(length, target, window=window, stride=stride)["target"]
    ids, nll = tokens_of(length), 0.0
    for i in range(1, length):  # the window that scores token i is the first that reaches it
        start = next(s for s in range(0, length, stride) if min(s + window, length) > i)
        nll -= target.score(torch.tensor([ids[start:i]]))[0, -1].log_softmax(-1)[ids[i]].item()
    assert got.tokens == length - 1 and got.words == length
    assert got.nll == pytest.approx(nll, rel=1e-5)


def test_corpus_perplexity_of_the_speculative_sampler_is_the_targets(pair):
    how = {"window": 128, "stride": 64}
    both = corpus_ppl(700, *pair, **how)
    assert list(both) == ["target", "draft", "speculative"]
    for role, model in zip(("target", "draft"), pair):  # what a model gives is its own, alone or beside the other
        assert corpus_ppl(700, model, **how)["target"] == both[role]
    assert both["speculative"].token_ppl == pytest.approx(both["target"].token_ppl, rel=1e-5)


def test_words_bytes_and_sums():
    a = PPL.CorpusPerplexity(10.0, 4, 3, 20) + PPL.CorpusPerplexity(2.0, 2, 1, 4)
    assert (a.nll, a.tokens, a.words, a.bytes) == (12.0, 6, 4, 24)
    assert a.token_ppl == pytest.approx(math.exp(2)) and a.word_ppl == pytest.approx(math.exp(3))
    assert a.byte_ppl == pytest.approx(math.exp(0.5))


def test_what_has_no_perplexity_is_refused(pair):
    for match, call in {
        "two tokens": lambda: PPL.calculate_ppl_regr([1], pair[0]),
        "fewer": lambda: corpus_ppl(1, pair[0], window=64, stride=32),
        "stride": lambda: corpus_ppl(2, pair[0], window=64, stride=64),
        "window of 129 tokens exceeds": lambda: corpus_ppl(2, pair[0], window=129, stride=64),
        "text of 129 tokens exceeds": lambda: PPL.calculate_ppl_spec(tokens_of(129), *pair),
        "token 61, outside": lambda: PPL.calculate_ppl_spec([5, 61], *pair),
        "token -1, outside": lambda: PPL.calculate_ppl_spec([5, -1], *pair),
        "not of fractions": lambda: PPL.calculate_ppl_spec([5.0, 1.0], *pair),
        "token 99, outside": lambda: PPL.calculate_ppl_corpus(
            "a", lambda *_, **__: {"input_ids": [5, 99]}, *pair, 64, 32
        ),
    }.items():
        with refused(match):
            call()


def test_large_vocabularies_are_handled_in_parts(pair, monkeypatch):
    whole = PPL.calculate_ppl_spec(tokens_of(100), *pair)
    monkeypatch.setattr(PPL, "ROWS", 7)
    assert PPL.calculate_ppl_spec(tokens_of(100), *pair) == pytest.approx(whole, rel=1e-6)
