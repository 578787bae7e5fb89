"""The proof of losslessness: its figures by hand, exact samplers pass, planted mistakes fail; the command line."""

import json
import math
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstwo
from test_specSampling import PROMPTS, near

from experiments import settings
from lossless import scorer as scoring
from lossless.evidence import BINS, Evidence, limit_of, seen_by
from lossless.plantedMistakes import MISTAKES, TREE_MISTAKES, always_accept
from lossless.scorer import TextScorer, greedy_figures
from methods import samplers
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from report import losslessReport
from specSampling import specSampling
from utils import GREEDY, Sampling


class Fixed:
    """A model that gives the same probabilities after every token."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, probs):
        self.logits, self.vocabulary = torch.tensor(probs).log(), len(probs)
        self.model = helpers.tiny().model  # for its layers and its width

    def score(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


@pytest.fixture(scope="module")
def pair():
    return helpers.tiny(seed=0), helpers.tiny(seed=1, layers=1)


def test_the_figures_of_three_tokens_by_hand():
    p, q = [0.5, 0.2, 0.3], [0.2, 0.6, 0.2]  # by q / p in order: 0, 2, 1
    scorer = TextScorer(Fixed(p), Fixed(q), Sampling(1.0, 0, 1.0))
    scorer.random = SimpleNamespace(random=lambda shape: np.full(shape, 0.25))
    found = scorer.evidence([[0]], [[0, 1, 2]])
    assert found.u[0] == pytest.approx([0.125, 0.85, 0.575])
    assert found.surprise[0] == pytest.approx([-math.log(x) for x in (0.5, 0.2, 0.3)])
    entropy = -sum(x * math.log(x) for x in p)
    variance = sum(x * math.log(x) ** 2 for x in p) - entropy**2
    assert found.entropy[0] == pytest.approx([entropy] * 3) and found.variance[0] == pytest.approx([variance] * 3)
    figures = found.figures()
    assert figures["z"] == pytest.approx((-math.log(0.5 * 0.2 * 0.3) - 3 * entropy) / (3 * variance) ** 0.5)
    assert figures["p"]["surprise"] == pytest.approx(math.erfc(abs(figures["z"]) / 2**0.5))
    assert figures["p"]["kolmogorov_smirnov"] == pytest.approx(kstwo.sf(0.575 - 1 / 3, 3))
    assert figures["perplexity"] == pytest.approx((0.5 * 0.2 * 0.3) ** (-1 / 3))
    assert figures["expected_perplexity"] == pytest.approx(math.exp(entropy))
    assert [i for i, count in enumerate(figures["counts"]) if count] == [6, 28, 42]
    z = 12 * ((0.125 - 0.5) * (0.85 - 0.5) + (0.85 - 0.5) * (0.575 - 0.5)) / 2**0.5
    assert figures["p"]["neighbours"] == pytest.approx(math.erfc(abs(z) / 2**0.5))


def test_without_a_draft_the_most_probable_tokens_come_first():
    scorer = TextScorer(Fixed([0.5, 0.2, 0.3]), None, Sampling(1.0, 0, 1.0))
    scorer.random = SimpleNamespace(random=np.zeros)
    assert scorer.evidence([[0]], [[0, 1, 2]]).u[0] == pytest.approx([0.0, 0.8, 0.5])


def test_the_tests_of_uniform_numbers_and_of_others():
    def figures(u):
        return Evidence(u, *np.ones((3, *u.shape)), np.zeros_like(u)).figures()

    random = np.random.default_rng(0)
    u = random.random((100, 50))
    uniform = figures(u)
    assert uniform["p"]["chi_square"] == pytest.approx(chisquare(uniform["counts"]).pvalue)
    assert not seen_by(uniform, 0.01)
    assert seen_by(figures(u**1.15), 1e-4) == ["chi_square", "kolmogorov_smirnov"]
    for twice in np.repeat(u[:, :25], 2, 1), np.repeat(u[:50], 2, 0):
        assert seen_by(figures(twice), 1e-4)[-1] == "neighbours"
    u[0, 0] = np.nan
    lost = figures(u)
    assert (lost["tokens"], sum(lost["counts"]), lost["excluded"], lost["impossible"]) == (5000, 4999, 1, 0)
    assert figures(np.full((1, 4), 0.5))["p"]["chi_square"] == 1  # too few for 50 bins


def test_an_impossible_token_is_told_from_one_at_the_edge():
    def lost(probs, token, sampling):
        return TextScorer(Fixed(probs), None, sampling).evidence([[0]], [[token]]).figures()

    nucleus = Sampling(1.0, 0, 0.7)
    for probs, token, sampling, edge in (
        ([0.4, 0.3000001, 0.2, 0.1], 2, nucleus, True),  # 0.7 is reached by a hair
        ([0.4, 0.31, 0.2, 0.09], 2, nucleus, False),
        ([0.4, 0.31, 0.2, 0.09], 3, nucleus, False),
        ([0.4, 0.3, 0.2, 0.0999999], 2, Sampling(1.0, 2, 1.0), False),
        ([0.4, 0.2, 0.2000001, 0.2], 1, Sampling(1.0, 2, 1.0), True),
    ):
        figures = lost(probs, token, sampling)
        assert (figures["excluded"], figures["impossible"]) == (int(edge), int(not edge))
        assert sum(figures["counts"]) == 0 and figures["z"] == 0
        assert seen_by(figures, 1e-3) == ([] if edge else ["impossible"])


@pytest.mark.parametrize("sampling", [Sampling(1.0, 0, 1.0), Sampling(0.8, 0, 0.9, 1.3), Sampling(1.3, 7, 1.0)])
def test_an_exact_sampler_passes_and_the_same_seed_repeats_it(pair, sampling):
    target, draft = pair

    def figures():
        generator = torch.Generator().manual_seed(0)
        texts, _ = specSampling(PROMPTS * 10, target, ModelDrafter(draft), 60, 4, sampling, None, generator)
        return TextScorer(target, draft, sampling).evidence(PROMPTS * 10, texts).figures()

    found = figures()
    assert found == figures()
    assert found["tokens"] == sum(found["counts"]) == 2400 and not seen_by(found, 1e-3)


def test_rows_are_looked_at_in_parts(pair, monkeypatch):
    target, draft = pair
    texts, _ = regrSampling(PROMPTS, target, 9, generator=torch.Generator().manual_seed(0))

    def look():
        return TextScorer(target, draft, Sampling()).evidence(PROMPTS, texts)

    whole = look()
    monkeypatch.setattr(scoring, "ELEMENTS", 1)
    for one, other in zip(vars(whole).values(), vars(look()).values()):
        assert one == pytest.approx(other, abs=1e-4)


# A sibling in the mask changes too little in models of this size; test_treeSampling.py sees it in the logits.
@pytest.mark.parametrize("name", sorted({*TREE_MISTAKES} - {"sibling in the mask"}))
def test_each_planted_mistake_of_trees_is_caught(pair, name):
    target, draft, sampling = pair[0], near(pair[0], noise=0.5), Sampling(0.6, 0, 1.0)
    sampler = TREE_MISTAKES[name].sampler(target, ModelDrafter(draft), 4, sampling, 0.4)
    texts, _ = sampler(PROMPTS * 16, 100, sampling, None, torch.Generator().manual_seed(0))
    assert seen_by(TextScorer(target, draft, sampling).evidence(PROMPTS * 16, texts).figures(), limit_of(8))


def test_the_stale_slot_is_stale_only_after_a_rejection(pair):
    """With a draft that is always right there is nothing to roll back, and the mistake is none."""
    target, _ = pair
    sampler = MISTAKES["stale slot"].sampler(target, ModelDrafter(helpers.tiny(seed=0)), 4, GREEDY, 0.4)
    assert sampler(PROMPTS, 40, GREEDY, None, None)[0] == regrSampling(PROMPTS, target, 40, GREEDY)[0]


def test_greedy_tokens_are_the_argmax_or_near_ties_or_neither():
    target = Fixed([0.3, 0.2999999, 0.3, 0.1])
    scorer = TextScorer(target, None, GREEDY)

    def figures(text, plain=None):
        found = greedy_figures([text], [plain or text], [[3]], scorer)
        return [found[name] for name in ("tokens", "differing", "near_ties", "beyond")]

    assert figures([0, 0, 0]) == [3, 0, 0, 0]
    assert figures([0, 1, 2]) == [3, 0, 2, 0]
    assert figures([0, 3, 0]) == [3, 0, 0, 1]
    assert figures([0, 0, 0], [0, 2, 3]) == [3, 1, 0, 0]  # only where they first differ is the context the same
    assert figures([0, 0, 0], [0, 3, 0]) == [3, 1, 0, 1]


def test_rounding_grows_with_the_dtype_and_wrong_tokens_are_beyond_it(pair):
    target, _ = pair
    plain, _ = regrSampling(PROMPTS, target, 30, GREEDY)
    scorer = TextScorer(target, None, GREEDY)
    right = greedy_figures(plain, plain, PROMPTS, scorer)
    assert (right["near_ties"], right["beyond"], right["differing"]) == (0, 0, 0) and right["allowed"] < 1e-3
    wrong = [[(token + 1) % 61 for token in text] for text in plain]
    found = greedy_figures(wrong, plain, PROMPTS, scorer)
    assert found["differing"] == len(PROMPTS) and found["beyond"] > 100


def sampled(method="block", p=0.3, **more):
    p = dict.fromkeys(("chi_square", "kolmogorov_smirnov", "surprise", "neighbours"), p)
    return {"kind": "lossless", "method": method, "tokens": 1000, "limit": 1e-4, "impossible": 0, "p": p} | more


def greedy(dtype="float32", differing=0, beyond=0):
    return {"kind": "greedy", "method": "block", "dtype": dtype, "texts": 4, "differing": differing, "beyond": beyond}


def power(seen=("surprise",), tokens=400):
    return {"kind": "power", "mistake": "stale slot", "tokens": tokens, "seen_by": list(seen)}


@pytest.mark.parametrize(
    "lines, right, words",
    [
        ([sampled(), greedy(), power()], True, ["Lossless: 1,000 tokens of block", "token for token", "within 400"]),
        ([sampled(), sampled("fixed")], True, ["each of 2 methods", "8 p-values"]),
        ([greedy("bfloat16", 3)], True, ["3 of 4 greedy texts differ", "near-tie"]),
        ([sampled(), power((), 1000)], True, ["stale slot would not be caught with 1,000 tokens"]),
        ([sampled(p=1e-5)], False, ["Not lossless: block fails by chi-square and Kolmogorov", "independence"]),
        ([sampled(impossible=1), sampled("fixed")], False, ["block fails by impossible tokens."]),
        ([sampled(), greedy(beyond=2)], False, ["block writes 2 greedy tokens in float32 that are not"]),
    ],
)
def test_the_verdict(lines, right, words):
    verdict, sentence = losslessReport.verdict(lines)
    assert verdict is right and all(word in sentence for word in words)


def prove(cli, flags, folder, *more):
    code = cli.main([*flags, "--lossless", *more, "--out", str(folder)])
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return code, lines, " ".join((folder / "results.txt").read_text().split())


def test_a_run_writes_its_verdict_its_tables_and_a_figure(cli, flags, tmp_path, capsys):
    code, lines, text = prove(cli, flags, tmp_path, "all", "--tokens", "60", "--maxLen", "12")
    names = ["fixed", "additive", "draftConfidence", "targetConfidence", "costAware", "block", "tree", "lookup"]
    names.append("lookupFirst")
    assert code == 0 and "Lossless: 60 tokens of each of 9 methods" in text
    assert [m["method"] for m in lines if m["kind"] == "lossless"] == names
    assert all(m["limit"] == limit_of(9) and len(m["counts"]) == BINS for m in lines if m["kind"] == "lossless")
    assert [m["mistake"] for m in lines if m["kind"] == "power"] == [*MISTAKES, *TREE_MISTAKES]
    assert [(m["method"], m["dtype"]) for m in lines if m["kind"] == "greedy"] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("target", *names)
    ]
    figure = next(m["file"] for m in lines if m["kind"] == "figure")
    assert (tmp_path / figure).stat().st_size > 10_000 and figure in text
    for words in ("Drawn texts: temperature 0.85", "Greedy texts", "Planted mistakes", "replace from p", "near-ties"):
        assert words in text
    capsys.readouterr()


def test_a_wrong_sampler_fails_the_run(cli, flags, tmp_path, monkeypatch):
    monkeypatch.setitem(samplers.VERIFICATIONS, "token", always_accept)
    code, lines, text = prove(cli, flags, tmp_path, "--tokens", "64", "--top_p", "0.5")
    assert code == 1 and "Not lossless: speculative fails by" in text


def test_without_chance_only_greedy_texts_are_compared(cli, flags, tmp_path):
    code, lines, text = prove(cli, [*flags, "--draft", "lookup"], tmp_path, "--temperature", "0", "--tokens", "16")
    assert code == 0 and {m["kind"] for m in lines} == {"run", "greedy", "end"}
    assert "Lossless: greedy text in float32 equals plain decoding's token for token" in text


def test_the_number_of_texts_follows_the_tokens(flags):
    def rows(line):
        return settings.parse([*flags, *line.split()]).rows

    assert [rows(f"--lossless --tokens {n} --maxLen 20") for n in (1, 100, 100_000)] == [1, 5, 64]
    assert rows("--speed") == 1
