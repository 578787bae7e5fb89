"""The test of losslessness: its figures by hand, exact samplers pass, planted mistakes fail; the command line."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from conftest import few_mistakes
from helpers import rounded_copy
from scipy.stats import binom, chisquare, kstwo, norm
from test_otherTokenizer import other_ids
from test_specSampling import PROMPTS, near

from decoding.lengthRules import MENU, Acceptance, CostAware
from decoding.tree import Tree
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from experiments.flags import parser
from lossless import scorer as scoring
from lossless.evidence import BINS, TILTS, Evidence, hits_p_value, limit_of, seen_by, surprise_p_value
from lossless.mistakes import MISTAKES, always_accept, replace_from_p
from lossless.scorer import FollowingTarget, TextScorer, greedy_figures, guesses_along
from lossless.trial import Trial, logits_as_written
from methods import samplers
from methods.catalogue import METHODS, build, choose
from methods.drafters import ModelDrafter
from methods.samplers import Decoding
from report import losslessReport
from specSampling import specSampling
from utils import GREEDY, Sampling


class Constant:
    """A model that gives the same probabilities after every token."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, probs):
        self.logits, self.vocabulary = torch.tensor(probs).log(), len(probs)
        self.model = helpers.tiny().model  # for its layers and its width

    def score(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


def sampler_of(target, draft, method="fixed", tree=None, **options):
    """A method of the catalogue with gamma 4, whose self-draft is `target` in 4 bits and whose mid model `draft`."""
    models = {"target": target, "draft": draft, "mid": draft, "self": rounded_copy(target, 4)}
    tree = "3,2,1" if method in ("tree", "topDown") and tree is None else tree
    return build([method], models, Decoding(gamma=4, gamma1=4, gamma2=4, tree=tree, **options))[method]


def test_the_figures_of_three_tokens_by_hand(monkeypatch):
    quarters = SimpleNamespace(random=lambda size: np.full(size, 0.25))  # the random numbers of the scorer
    monkeypatch.setattr(scoring.np.random, "default_rng", lambda seed: quarters)
    p, q = [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]  # by q / p in order: 0, 1, 2; by p: 0, 2, 1
    scorer = TextScorer(Constant(p), Constant(q), Sampling(1.0, 0, 1.0))
    found = scorer.evidence([[0]], [[0, 1, 2]])
    assert found.u[0] == pytest.approx([0.125, 0.55, 0.775])
    assert found.surprise[0] == pytest.approx([-math.log(x) for x in (0.5, 0.2, 0.3)])
    entropy = -sum(x * math.log(x) for x in p)
    variance = sum(x * math.log(x) ** 2 for x in p) - entropy**2
    assert found.entropy[0] == pytest.approx([entropy] * 3) and found.variance[0] == pytest.approx([variance] * 3)
    log_mgf = [math.log(sum(x ** (1 - s) for x in p)) - s * entropy for s in TILTS]
    assert found.log_mgf[0, 0] == pytest.approx(log_mgf, abs=1e-6)
    figures = found.figures()
    assert figures["z"] == pytest.approx((-math.log(0.5 * 0.2 * 0.3) - 3 * entropy) / (3 * variance) ** 0.5)
    assert figures["p"]["surprise"] == 1
    assert figures["p"]["kolmogorov_smirnov"] == pytest.approx(kstwo.sf(1 - 0.775, 3))
    assert figures["perplexity"] == pytest.approx((0.5 * 0.2 * 0.3) ** (-1 / 3))
    assert figures["expected_perplexity"] == pytest.approx(math.exp(entropy))
    assert [i for i, count in enumerate(figures["counts"]) if count] == [6, 27, 38]
    z = ((0.125 - 0.5) * (0.55 - 0.5) + (0.55 - 0.5) * (0.775 - 0.5)) / ((0.375**2 + 0.05**2) / 12) ** 0.5
    assert figures["p"]["neighbours"] == pytest.approx(math.erfc(abs(z) / 2**0.5))
    # Without a draft the most probable tokens come first.
    by_p = TextScorer(Constant(p), None, Sampling(1.0, 0, 1.0)).evidence([[0]], [[0, 1, 2]])
    assert by_p.u[0] == pytest.approx([0.125, 0.85, 0.575])


def test_the_tests_of_uniform_numbers_and_of_others():
    def figures(u):
        return Evidence(
            u, *np.ones((3, *u.shape)), np.ones((*u.shape, len(TILTS))), np.zeros_like(u), np.ones_like(u)
        ).figures()

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
        return TextScorer(Constant(probs), None, sampling).evidence([[0]], [[token]]).figures()

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
def test_an_exact_sampler_passes_and_rows_may_be_scored_in_parts(pair, sampling, monkeypatch):
    target, draft = pair
    prompts, generator = PROMPTS * 30, torch.Generator().manual_seed(0)
    texts, _ = specSampling(prompts, target, ModelDrafter(draft), 20, 4, sampling, None, generator)
    scorer = TextScorer(target, draft, sampling)
    evidence = scorer.evidence(prompts, texts)
    figures = evidence.figures()
    assert figures["tokens"] == sum(figures["counts"]) == 2400 and not seen_by(figures, 1e-3)
    monkeypatch.setattr(scoring, "ELEMENTS", 1 << 16)
    for one, other in zip(evidence.arrays, scorer.evidence(prompts, texts).arrays):
        assert one == pytest.approx(other, abs=1e-4)


# A sibling in the mask changes too little in models of this size; test_treeSampling.py sees it in the logits.
@pytest.mark.parametrize("name", sorted({*MISTAKES} - {"sibling in the mask"}))
def test_each_planted_mistake_is_seen(pair, name):
    mistake, target, sampling = MISTAKES[name], pair[0], Sampling(0.6, 0, 1.0)
    sampling = mistake.tested(sampling)
    draft = near(target, noise=0.5 if mistake.tree or name == "shared noise" else 0.2)
    draft, method = (rounded_copy(target, 4), "self") if mistake.own_copy else (draft, "fixed")
    method = "tree" if mistake.tree else method
    sampler = mistake.planted(sampler_of(target, draft, method), sampling)

    def seen(max_len):
        generator, prompts = torch.Generator().manual_seed(0), PROMPTS * 32
        options = {"batch": 32} if mistake.queue else {}
        texts, _ = sampler(prompts, max_len=max_len, sampling=sampling, generator=generator, **options)
        return seen_by(TextScorer(target, draft, sampling).evidence(prompts, texts).figures(), limit_of(1))

    assert seen(16) or seen(50)  # A step for many rows takes little longer than for one.


def test_greedy_tokens_are_the_argmax_or_near_ties_or_neither():
    target = Constant([0.3, 0.2999999, 0.3, 0.1])
    scorer = TextScorer(target, None, GREEDY)

    def figures(text, plain=None):
        found = greedy_figures([text], [plain or text], [[3]], scorer)
        return [found[name] for name in ("tokens", "differing", "near_ties", "beyond")]

    assert figures([0, 0, 0]) == [3, 0, 0, 0]
    assert figures([0, 1, 2]) == [3, 0, 2, 0]
    assert figures([0, 3, 0]) == [3, 0, 0, 1]
    assert figures([0, 0, 0], [0, 2, 3]) == [3, 1, 0, 0]  # only where they first differ is the context the same
    assert figures([0, 0, 0], [0, 3, 0]) == [3, 1, 0, 1]


def line(test, **fields):
    return {"kind": "lossless", "test": test, "method": "block", "dtype": "float32"} | fields


def sampled(p=0.3, impossible=0, **more):
    p = dict.fromkeys(("chi_square", "kolmogorov_smirnov", "surprise", "neighbours"), p)
    return line("drawn", tokens=1000, limit=1e-4, impossible=impossible, p=p, **more)


def greedy(**fields):
    return line("greedy", **{"texts": 4, "differing": 0, "beyond": 0} | fields)


GUESSED = {"hits": 1234, "expected": 1230.46}


def power(seen=("surprise",), tokens=400):
    return line("mistake", mistake="stale slot", tokens=tokens, seen_by=list(seen))


@pytest.mark.parametrize(
    "lines, right, words",
    [
        (
            [sampled(), sampled(dtype="bfloat16"), sampled(method="fixed"), greedy(), power()],
            True,
            [
                "No difference found: 1,000 drawn tokens of each of 2 methods were tested in float32 and in bfloat16",
                "least of 12 p-values",
                "each planted mistake is detected, within 400 tokens: 1 in block;",
                "greedy text in float32 equals plain decoding's token for token.",
            ],
        ),
        ([sampled()], True, ["tokens of block were tested in float32 (", "; no mistake was planted: "]),
        ([sampled(guesses=GUESSED), power()], True, [("; guesses hit 1,234 tokens, and 1,230.5 were expected (in ")]),
        ([greedy(dtype="bfloat16", differing=3)], True, ["3 of 4 greedy texts (75 %) differ", "near-tie"]),
        ([sampled(), power((), 1000)], True, ["stale slot in block would not be seen with 1,000 tokens"]),
        (
            [sampled(), sampled(p=1e-5, dtype="bfloat16")],
            False,
            ["Difference found: block fails in bfloat16 by chi-square and Kolmogorov", "independence"],
        ),
        ([sampled(impossible=1), sampled(method="fixed")], False, ["block fails in float32 by impossible tokens."]),
        ([sampled(), greedy(beyond=2)], False, ["block writes 2 greedy tokens in float32 that the target would not"]),
    ],
)
def test_the_verdict(lines, right, words):
    verdict, sentence = losslessReport.verdict(lines)
    assert verdict is right and all(word in sentence for word in words)


@pytest.fixture
def outcome(run, tmp_path):
    """`outcome(words, code, base)`: the lines of results of such a run, and the words of its text."""

    def call(words, code=0, **how):
        lines = run(f"--lossless {words}", code=code, **how)
        return lines, " ".join((tmp_path / "results.txt").read_text().split())

    return call


def test_all_is_every_lossless_method_whose_models_are_there():
    every = {name for name, method in METHODS.items() if method.lossless} - {"target", "noCache", "speculativeNoCache"}
    assert {"speculative", "topDown"} < every
    assert set(choose("all", {"draft", "mid", "self", "head"}, "lossless")) == every
    assert set(choose("all", {"draft", "self"}, "lossless")) == every - {"cascade", "head"}
    assert set(choose("all", set(), "lossless")) == {name for name in every if not METHODS[name].needs}
    help = " ".join(parser().format_help().split())
    assert "all stands for every one of them whose models are available, except target" in help


def test_a_run_writes_its_verdict_its_tables_and_a_figure(outcome, kernels, figure_files, tmp_path):
    """Also beside compiled models, of whose packed layers no eager model can be made to plant a mistake in."""
    lines, text = outcome("speculative,self,lookup,tree --tokens 12 --maxLen 6 --compile")
    names = choose("speculative,self,lookup,tree", {"draft", "self"}, "lossless")
    assert f"No difference found: 12 drawn tokens of each of {len(names)} methods were tested in float32 (" in text
    drawn, planted, compared = ([m for m in lines if m.get("test") == t] for t in ("drawn", "mistake", "greedy"))
    assert [(m["method"], m["dtype"]) for m in drawn] == [(name, "float32") for name in names]
    assert all(m["limit"] == limit_of(len(names)) and len(m["counts"]) == BINS for m in drawn)
    mistakes = list(dict.fromkeys(m["mistake"] for m in planted))
    assert mistakes == [name for name in MISTAKES if name != "predecessor's slots"]
    assert [m["method"] for m in planted if m["mistake"] == "constant q"] == names
    assert len(planted) == len(mistakes) + len(names) - 1 and planted[-1]["order"] == "draft"
    for m in drawn + planted:
        assert "guesses" in m["p"] and m["tokens_shown"] == 12
        assert sum(m["counts_shown"]) <= 12 and len(m["counts_shown"]) == BINS
    dtypes = "float32", "bfloat16"
    assert [(m["method"], m["dtype"]) for m in compared] == [(n, d) for d in dtypes for n in ("target", *names)]
    (figure,) = lines[-1]["figures"]
    assert (tmp_path / figure).stat().st_size > 10_000 and figure in text
    for words in ("Drawn texts: temperature 0.85", "Greedy texts", "Planted mistakes", "replace from p", "near-ties"):
        assert words in text


def test_a_quick_run_plants_no_mistakes(outcome):
    lines, text = outcome("lookup,quick,fixed --tokens 12 --maxLen 6")
    names, hits = zip(*((m["method"], m["guesses"]) for m in lines if m.get("test") == "drawn"))
    assert names == ("lookup", "fixed") and not [m for m in lines if m.get("test") == "mistake"]
    said = ", ".join(f"{name} {of['hits']} ({of['expected']:.1f})" for name, of in zip(names, hits))
    assert f"(in brackets: expected): {said}." in text and "no mistake was planted" in text
    assert choose("quick", set(), "lossless") == ["speculative"]


def test_shapes_that_measured_times_would_choose_take_turns(run, tmp_path, monkeypatch):
    """Times would choose plain decoding where guesses do not pay, and no seed would repeat the texts."""
    monkeypatch.setattr("lossless.trial.GREEDY_TOKENS", 4)
    used, add = Counter(), Acceptance.add
    monkeypatch.setattr(Acceptance, "add", lambda self, tree, *rest: used.update([tree]) or add(self, tree, *rest))
    words, lines = "--lossless costAware,tree,quick --tokens 192 --maxLen 96", []
    for out in (tmp_path / "once", tmp_path / "again"):
        lines.append([line["counts"] for line in run(words, out=out) if line.get("test") == "drawn"])
    assert lines[0] == lines[1] and set(used) == {*MENU, *map(Tree.chain, CostAware.LENGTHS)}
    assert 3 * min(used.values()) > max(used.values())


def test_no_more_texts_are_written_at_a_time_than_a_batch(outcome, monkeypatch):
    """Those for the figure of a mistake that was soon seen, too."""
    few_mistakes(monkeypatch, "always accept")
    monkeypatch.setattr("lossless.trial.SHOWN_TOKENS", 400)
    counts, write = [], Trial.write
    monkeypatch.setattr(Trial, "write", lambda self, *parts: counts.append(parts[-1]) or write(self, *parts))
    lines, _ = outcome("--tokens 300 --maxLen 4 --top_p 0.5")
    (planted,) = [line for line in lines if line.get("test") == "mistake"]
    assert planted["seen_by"] and planted["tokens"] < 100 and planted["tokens_shown"] == 400 and max(counts) == 64


def test_texts_of_one_token_are_compared_in_another_dtype(outcome, monkeypatch):
    few_mistakes(monkeypatch)
    lines, _ = outcome("fixed,quick --tokens 12 --maxLen 1 --dtype bfloat16")
    assert {m["dtype"] for m in lines if m.get("test") == "greedy"} == {"float32", "bfloat16"}


def test_without_a_draft_model_mistakes_have_the_vocabulary_in_the_order_of_p(outcome, flags, monkeypatch):
    few_mistakes(monkeypatch)
    lines, _ = outcome("lookup --tokens 12 --maxLen 6", base=[*flags, "--draft", "lookup"])
    assert [m["order"] for m in lines if m.get("test") == "mistake"][-1] == "p"


def test_a_wrong_sampler_fails_the_run_in_each_dtype(outcome, monkeypatch):
    few_mistakes(monkeypatch)
    monkeypatch.setitem(samplers.VERIFICATIONS, "token", always_accept)
    lines, text = outcome("--tokens 64 --top_p 0.5 --dtype bfloat16", code=1)
    # Without the KV cache, p would be rounded otherwise: both dtypes have greedy texts, and float32 the mistakes.
    both = {"float32", "bfloat16"}
    assert all(f"speculative fails in {dtype} by" in text for dtype in both)
    for test, dtypes in ("drawn", both), ("mistake", {"float32"}), ("greedy", both):
        assert {m["dtype"] for m in lines if m.get("test") == test} == dtypes
    assert [m["limit"] for m in lines if m.get("test") == "drawn"] == [limit_of(2)] * 2


@pytest.mark.parametrize("method", ["target", "speculativeNoCache"])
def test_methods_without_a_cache_or_without_guesses_are_tested_too(outcome, method, monkeypatch):
    """Plain decoding has no mistakes, and without a cache there are none of the cache; nothing is compared with it."""
    few_mistakes(monkeypatch, "constant q", "stale slot")
    lines, text = outcome(f"{method} --tokens 12 --maxLen 6")
    planted = {m["mistake"] for m in lines if m.get("test") == "mistake"}
    assert ("constant q" in planted, "stale slot" in planted) == (method != "target", False)
    assert "No difference found: 12 drawn tokens" in text and lines[-1]["figures"]
    assert ("equals plain decoding's" in text) == (method != "target")


def test_without_chance_only_greedy_texts_are_compared(outcome, flags):
    lines, text = outcome("--temperature 0 --tokens 16", base=[*flags, "--draft", "lookup"])
    assert {m.get("test", m["kind"]) for m in lines} == {"run", "greedy", "end"}
    assert "No difference found: greedy text in float32 equals plain decoding's token for token" in text


# Guesses along texts that are written.


def guessed(sampler, guessing, sampling, target=None):
    """The figures of texts by a sampler, with the guesses of another one."""
    prompts, options = PROMPTS * 32, {"sampling": sampling, "generator": torch.Generator().manual_seed(1)}
    texts, _ = sampler(prompts, max_len=12, **options)
    guesses = guesses_along(guessing, prompts, texts, **options)
    scorer = TextScorer(target or sampler.keywords["target"], None, sampling)
    return scorer.evidence(prompts, texts, 0, guesses).figures()


def test_guesses_are_noted_where_the_text_goes():
    """Of a chain at their place in the round, of a tree at their place among their siblings."""
    following = FollowingTarget(SimpleNamespace(cache_of=None), [[7, 1, 2, 3, 9], [7, 5]])
    following.rows = SimpleNamespace(numbers=[0, 1], tokens=[[7], [7]])
    chain = torch.tensor([[1, 2, 4, 3], [5, 6, 6, 6]])
    path, token = following.follow(chain, torch.tensor([[1.0] * 4, [1.0, 0.5, 0, 0]]), None)
    assert path.tolist() == [[1, 2, 0, 0], [1, 0, 0, 0]] and token.tolist() == [3, 0]
    assert following.guesses[0, 1:4, :4].tolist() == [[1, -1, -1, -1], [-1, 2, -1, -1], [-1, -1, 4, -1]]
    assert following.guesses[1, 1, 0] == 5 and (following.guesses >= 0).sum() == 4
    following.guesses[:] = -1
    tree = Tree.of("2/2,1")  # nodes 1 and 2, then 3 and 4 below 1, 5 below 2
    nodes = torch.tensor([[4, 1, 2, 2, 2], [6, 5, 1, 1, 1]])
    path, token = following.follow(nodes, torch.tensor([[1.0] * 5, [0, 1.0, 1, 1, 1]]), tree)
    assert path.tolist() == [[2, 5, 0, 0, 0], [2, 0, 0, 0, 0]] and token.tolist() == [3, 0]
    assert following.guesses[0, 1, :2].tolist() == [4, 1] and following.guesses[0, 2, :2].tolist() == [2, -1]
    assert following.guesses[1, 1, :2].tolist() == [-1, 5]


def test_a_long_prompt_costs_no_other_text_its_guesses(pair):
    """Only tokens that are beyond the context themselves have no guesses."""
    (target, draft), context = pair, pair[0].context
    prompts, texts = [[5], [3] * (context - 2), [7, 9], [4] * context], [[1] * 20, [2] * 6, [6] * 30, [8]]
    sampler = partial(specSampling, target=target, drafter=ModelDrafter(draft))
    generator = torch.Generator().manual_seed(0)
    guesses = guesses_along(sampler, prompts, texts, Sampling(1.0, 0, 1.0), generator=generator)
    guessed = (guesses >= 0).any(2).sum(1)
    assert guesses.shape[:2] == (4, 30) and guessed[0] > 15 and guessed[2] > 25 and guessed[1] == guessed[3] == 0


@pytest.mark.parametrize("n", [20, 200, 2000])
@pytest.mark.parametrize("p", [0.3, 0.01, 1e-4, 1e-5])
def test_p_values_of_few_and_of_rare_events_are_no_smaller_than_they_may_be(n, p):
    """Of k tokens of probability p among n; the others have 1 - p."""
    surprise, k = -np.log([1 - p, p]), np.arange(int(binom.isf(1e-9, n, p)) + 2)
    difference = surprise - surprise @ [1 - p, p]
    variance, log_mgf = difference**2 @ [1 - p, p], np.log(np.exp(np.outer(TILTS, difference)) @ [1 - p, p])
    totals = (n - k) * difference[0] + k * difference[1]
    by_surprise = np.array([surprise_p_value(total, n * variance, n * log_mgf) for total in totals])
    by_hits = np.array([hits_p_value(np.arange(n) < count, np.full(n, p)) for count in k])
    exact = np.minimum(binom.sf(k - 1, n, p), binom.cdf(k, n, p))
    for values in by_surprise, by_hits:
        for limit in (1e-2, 1e-3, limit_of(1), limit_of(16)):
            assert binom.pmf(k, n, p)[values < limit].sum() <= limit
    assert (by_hits < 30 * exact)[(exact > 1e-6) & (exact < 0.01)].all()  # nor much larger


def test_independent_neighbours_pass_however_few():
    random, none = np.random.default_rng(0), np.zeros((2, 2))
    z = [Evidence(random.random((2, 2)), *[none] * 6).neighbours() for _ in range(20_000)]
    assert np.mean(2 * norm.sf(np.abs(z)) < 1e-3) <= 1e-3


@pytest.mark.parametrize(
    "method", ["fixed", "lookup", "lookupFirst", "self", "cascade", "other tokenizer", "tree", "chain of a tree"]
)
def test_a_wrong_q_is_seen_by_its_guesses_and_a_right_one_is_not(pair, method):
    """Whatever guesses: no draft model knows of what lookup does."""
    target, sampling, mistake = pair[0], Sampling(0.3, 0, 1.0), MISTAKES["constant q"]
    draft, options = near(target, noise=0.5), {}
    if method == "other tokenizer":
        draft, translation = other_ids(draft)
        method, options = "fixed", {"translation": translation}
    if method == "chain of a tree":
        method, options = "tree", {"tree": "1,1,1"}
    make = partial(sampler_of, target, draft, method, **options)
    figures = guessed(make(), make(), sampling)
    assert not seen_by(figures, limit_of(1)) and figures["guesses"]["expected"] > 20
    flawed, guessing = (mistake.planted(make(), sampling) for _ in range(2))
    assert "guesses" in seen_by(guessed(flawed, guessing, sampling, target=target), limit_of(1))


def test_guesses_that_helped_to_draw_the_text_would_be_no_test(pair):
    """With the random numbers of the text itself, the guess depends on the token, and an exact sampler is rejected."""
    target, sampling, prompts = pair[0], Sampling(1.0, 0, 1.0), PROMPTS * 24
    make = partial(sampler_of, target, near(target))
    texts, _ = make()(prompts, max_len=20, sampling=sampling, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    torch.rand(len(texts), 1, generator=generator)  # of the first tokens
    for own, seen in (generator, True), (torch.Generator().manual_seed(1), False):
        guesses = guesses_along(make(), prompts, texts, sampling, generator=own)
        figures = TextScorer(target, None, sampling).evidence(prompts, texts, 0, guesses).figures()
        assert ("guesses" in seen_by(figures, limit_of(1))) is seen


# Text in bfloat16, read again as it was written.


@pytest.mark.parametrize("compiles, top_p", [(False, 0.9), (True, 1.0)])
def test_in_bfloat16_an_exact_sampler_passes_and_a_mistake_is_seen(compiles, top_p, kernels):
    """Text of kernels is read again by kernels."""
    models = (helpers.tiny(seed=seed, layers=2 - seed).model.to(torch.bfloat16) for seed in (0, 1))
    (target, draft), sampling = map(CachedModel, models), Sampling(1.0, 0, top_p)
    if compiles:
        target = compiled(target)
        assert is_compiled(target)
    prompts, options = PROMPTS * 30, {"max_len": 20, "sampling": sampling}
    for verify, right in (token_rule, True), (replace_from_p, False):
        generator = torch.Generator().manual_seed(0)
        texts, _ = specSampling(prompts, target, ModelDrafter(draft), **options, generator=generator, verify=verify)
        logits = logits_as_written(target, 5, prompts, texts)
        figures = TextScorer(target, draft, sampling).evidence(prompts, texts, logits=logits).figures()
        assert (not seen_by(figures, 1e-3)) is right and (not compiles or target.forwards == 0)
        # The C++ decoder does not round its logits.
        assert any((text != text.bfloat16()).any() for text in logits) is compiles
