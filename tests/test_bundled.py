"""The pair that comes with the project, end to end."""

import json

import helpers
import pytest
from helpers import rounded_copy
from test_head import plant

import PPL
from engine.head import CONFIG, WEIGHTS, load_head
from inputs.models import DTYPES, find_model, load_model, load_tokenizer, model_version
from inputs.texts import load_corpora
from methods.catalogue import build, choose
from methods.drafters import ModelDrafter
from methods.samplers import Decoding
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY

TOKENS = 100 if helpers.FULL else 32  # of a greedy text


@pytest.fixture(scope="module")
def pair():
    tokenizer = load_tokenizer("bundled-target")
    return tokenizer, *(load_model(f"bundled-{name}", tokenizer, "float32", "cpu") for name in ("target", "draft"))


@pytest.fixture(scope="module")
def prompts(pair):
    """12 prompts (FULL=1: 50) of ragged lengths, from both styles of the sample texts."""
    passages = [p for corpus in load_corpora("sample") for p in corpus.passages(300)[: 25 if helpers.FULL else 6]]
    assert len(passages) in (12, 50)
    return [pair[0](text)["input_ids"][: 16 + 3 * i % 40] for i, text in enumerate(passages)]


@pytest.fixture(scope="module")
def plain(pair, prompts):
    return regrSampling(prompts, pair[1], TOKENS, GREEDY)[0]


@pytest.fixture(scope="module")
def mid(pair, prompts):
    """The model of 4 layers, and its greedy texts."""
    model = load_model("bundled-mid", pair[0], "float32", "cpu")
    return model, regrSampling(prompts, model, TOKENS, GREEDY)[0]


@pytest.mark.parametrize(
    "name", [name for name in choose("all", ("draft", "mid", "self"), "lossless") if name != "fixed"]
)
def test_greedy_output_of_every_lossless_method_is_plain_decodings_on(pair, mid, prompts, plain, name):
    """The target is the model of 4 layers, which costs a quarter of the one of 12. Only a cascade needs all three."""
    (_, target, draft), (middle, wanted) = pair, mid
    models = {"target": middle, "draft": draft, "self": rounded_copy(middle, 4)}
    if name == "cascade":
        models, wanted = {"target": target, "mid": middle, "draft": draft}, plain
    sampler = build([name], models, Decoding())[name]
    some = slice(None, None, 10 if "nocache" in name.lower() else 4)  # Without a KV cache a forward reads all again.
    assert sampler(prompts[some], max_len=TOKENS, sampling=GREEDY)[0] == wanted[some]


def test_greedy_output_equals_plain_and_transformers(pair, prompts, plain):
    """`generate` of transformers has its own left padding and attention mask."""
    _, target, draft = pair
    spec, records = specSampling(prompts, target, ModelDrafter(draft), TOKENS, 4, GREEDY)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = target.model.generate(**helpers.left_padded(prompts[::2]), **options)[:, -TOKENS:].tolist()
    assert spec == plain and plain[::2] == theirs
    assert 0.2 < sum(r.alpha for r in records) / len(records) < 1  # a draft worth its name, and rejections


def test_greedy_output_of_the_head_is_plain_decodings_whatever_its_features_are(pair, prompts, plain, monkeypatch):
    """Features of the wrong position cost acceptance and change no text."""
    target, rates, shares = pair[1], [], []
    head = load_head(find_model("bundled-head"), target, model_version("bundled-target"))
    for every in 1, 5:
        spec, records = specSampling(prompts[::every], target, ModelDrafter(head), TOKENS, 4, GREEDY)
        assert spec == plain[::every]
        rates.append(sum(r.alpha for r in records) / len(records))
        shares.append(sum(sum(r.accepted) for r in records) / sum(sum(r.drafted) for r in records))
        plant(monkeypatch, "shifted")
    assert 0.5 < rates[0] < 1 and shares[1] < 0.7 * shares[0]


def test_the_head_is_small_and_was_trained_for_this_target():
    folder = find_model("bundled-head")
    assert {file.name for file in folder.iterdir()} == {CONFIG, WEIGHTS}
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
    about = json.loads((folder / CONFIG).read_text())["head"]
    assert about["target"] == model_version("bundled-target") and about["measured"][-1]["alpha"] > 0.78


def test_speculative_and_target_perplexity_agree_and_the_target_is_clearly_better_than_the_draft(pair):
    """Of the beginning of each sample text."""
    tokenizer, target, draft = pair
    for corpus in load_corpora("sample"):
        ppl = PPL.calculate_ppl_corpus(corpus.documents[0][:2500], tokenizer, target, draft)
        assert ppl["speculative"].token_ppl == pytest.approx(ppl["target"].token_ppl, rel=1e-5)
        assert ppl["target"].token_ppl <= 0.75 * ppl["draft"].token_ppl


def test_all_three_are_small_and_share_one_tokenizer_that_gives_every_text_back():
    ours = load_tokenizer("bundled-target")
    for name, layers, width, most in (("target", 12, 192, 24e6), ("mid", 4, 160, 12e6), ("draft", 1, 128, 6e6)):
        model = load_model(f"bundled-{name}", ours, "bfloat16", "cpu").model
        assert (model.config.num_hidden_layers, model.config.hidden_size) == (layers, width)
        assert sum(p.numel() for p in model.parameters()) * DTYPES["bfloat16"].itemsize < most
        assert load_tokenizer(f"bundled-{name}").get_vocab() == ours.get_vocab()
    for text in "naïve café — 東京 🙂", "a\tb\r\n\n  c", "plain words", "\u0000\u200b":
        assert ours.decode(ours(text)["input_ids"]) == text
