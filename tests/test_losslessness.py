"""The test of losslessness: its figures by hand, exact samplers pass, planted mistakes fail; the command line."""

import json
import math
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstwo
from test_specSampling import PROMPTS, near

from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from experiments import settings
from experiments.flags import parser
from lossless import scorer as scoring
from lossless.evidence import BINS, Evidence, limit_of, seen_by
from lossless.plantedMistakes import MISTAKES, TREE_MISTAKES, always_accept
from lossless.scorer import TextScorer, greedy_figures
from lossless.trial import BlockReader
from methods import samplers
from methods.catalogue import METHODS, choose_lossless
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
    line = {"kind": "lossless", "method": method, "dtype": "float32", "tokens": 1000, "limit": 1e-4, "impossible": 0}
    return line | {"p": p} | more


def greedy(dtype="float32", differing=0, beyond=0):
    return {"kind": "greedy", "method": "block", "dtype": dtype, "texts": 4, "differing": differing, "beyond": beyond}


def power(seen=("surprise",), tokens=400):
    return {"kind": "power", "mistake": "stale slot", "tokens": tokens, "seen_by": list(seen)}


@pytest.mark.parametrize(
    "lines, right, words",
    [
        (
            [sampled(), sampled(dtype="bfloat16"), sampled("fixed"), greedy(), power()],
            True,
            [
                "No difference found: 1,000 drawn tokens of each of 2 methods were tested in float32 and in bfloat16",
                "least of 12 p-values",
                "with so many tokens each of 1 planted mistakes is seen, within 400 tokens",
                "greedy text in float32 equals plain decoding's token for token.",
            ],
        ),
        ([sampled()], True, ["tokens of block were tested in float32 ("]),
        ([greedy("bfloat16", 3)], True, ["3 of 4 greedy texts (75 %) differ", "near-tie"]),
        ([sampled(), power((), 1000)], True, ["stale slot would not be seen with 1,000 tokens"]),
        (
            [sampled(), sampled(p=1e-5, dtype="bfloat16")],
            False,
            ["Difference found: block fails in bfloat16 by chi-square and Kolmogorov", "independence"],
        ),
        ([sampled(impossible=1), sampled("fixed")], False, ["block fails in float32 by impossible tokens."]),
        ([sampled(), greedy(beyond=2)], False, ["block writes 2 greedy tokens in float32 that are not"]),
    ],
)
def test_the_verdict(lines, right, words):
    verdict, sentence = losslessReport.verdict(lines)
    assert verdict is right and all(word in sentence for word in words)


def outcome(cli, flags, folder, *more):
    code = cli.main([*flags, "--lossless", *more, "--out", str(folder)])
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return code, lines, " ".join((folder / "results.txt").read_text().split())


def test_all_is_every_lossless_method_whose_models_are_there():
    every = {name for name, method in METHODS.items() if method.lossless} - {"target", "noCache", "speculativeNoCache"}
    assert {"speculative", "topDown"} < every
    assert set(choose_lossless("all", {"draft", "mid", "self", "head"})) == every
    assert set(choose_lossless("all", {"draft", "self"})) == every - {"cascade", "head"}
    assert set(choose_lossless("all", set())) == {name for name in every if not METHODS[name].needs}
    help = " ".join(parser().format_help().split())
    assert "all stands for every one of them whose models are there, except target" in help


def test_a_run_writes_its_verdict_its_tables_and_a_figure(cli, flags, tmp_path, capsys):
    code, lines, text = outcome(cli, flags, tmp_path, "all", "--tokens", "60", "--maxLen", "12")
    names = choose_lossless("all", {"draft", "self"})
    assert code == 0
    assert f"No difference found: 60 drawn tokens of each of {len(names)} methods were tested in float32 (" in text
    drawn, planted = ([m for m in lines if m["kind"] == kind] for kind in ("lossless", "power"))
    assert [(m["method"], m["dtype"]) for m in drawn] == [(name, "float32") for name in names]
    assert all(m["limit"] == limit_of(len(names)) and len(m["counts"]) == BINS for m in drawn)
    assert [m["mistake"] for m in planted] == [n for n in [*MISTAKES, *TREE_MISTAKES] if n != "predecessor's slots"]
    assert {m["tokens_shown"] for m in drawn + planted} == {60}
    assert all(sum(m["counts_shown"]) <= 60 == len(m["counts_shown"]) + 10 for m in drawn + planted)
    assert [(m["method"], m["dtype"]) for m in lines if m["kind"] == "greedy"] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("target", *names)
    ]
    figure = next(m["file"] for m in lines if m["kind"] == "figure")
    assert (tmp_path / figure).stat().st_size > 10_000 and figure in text
    for words in ("Drawn texts: temperature 0.85", "Greedy texts", "Planted mistakes", "replace from p", "near-ties"):
        assert words in text
    capsys.readouterr()


def test_a_wrong_sampler_fails_the_run_in_each_dtype(cli, flags, tmp_path, monkeypatch):
    monkeypatch.setitem(samplers.VERIFICATIONS, "token", always_accept)
    code, lines, text = outcome(cli, flags, tmp_path, "--tokens", "64", "--top_p", "0.5", "--dtype", "bfloat16")
    assert code == 1
    for dtype in ("float32", "bfloat16"):
        assert f"speculative fails in {dtype} by" in text
    # Without the KV cache, p would be rounded otherwise: both dtypes have greedy texts, and float32 the mistakes.
    assert [m["dtype"] for m in lines if m["kind"] == "lossless"] == ["float32", "bfloat16"]
    assert {m["dtype"] for m in lines if m["kind"] == "power"} == {"float32"}
    assert {m["dtype"] for m in lines if m["kind"] == "greedy"} == {"float32", "bfloat16"}
    assert {m["limit"] for m in lines if m["kind"] == "lossless"} == {limit_of(2)}


def test_without_chance_only_greedy_texts_are_compared(cli, flags, tmp_path):
    code, lines, text = outcome(cli, [*flags, "--draft", "lookup"], tmp_path, "--temperature", "0", "--tokens", "16")
    assert code == 0 and {m["kind"] for m in lines} == {"run", "greedy", "end"}
    assert "No difference found: greedy text in float32 equals plain decoding's token for token" in text


# Text in bfloat16, read again as it was written.


def in_bfloat16(seed, **shape):
    model = helpers.tiny(seed=seed, **shape).model.to(torch.bfloat16)
    return CachedModel(model)


def reread(target, order, prompts, texts, sampling, width=5):
    reader = BlockReader(target, width)
    reader.read(prompts, texts)
    return TextScorer(reader, order, sampling).evidence(prompts, texts)


def test_a_reader_computes_what_the_sampler_did(monkeypatch):
    """The logits of prompts of different lengths, in the blocks in which the text was read when it was written."""
    target, seen = in_bfloat16(0), []
    forward = CachedModel.forward

    def watched(self, tokens, positions, *rest, **more):
        logits = forward(self, tokens, positions, *rest, **more)
        seen.append((positions, logits))
        return logits

    monkeypatch.setattr(CachedModel, "forward", watched)
    texts, _ = regrSampling(PROMPTS, target, 6, Sampling(1.0, 0, 1.0), None, torch.Generator().manual_seed(0))
    written = torch.stack([logits[:, -1] for _, logits in seen[1:]], 1)
    reader = BlockReader(target, 1)
    reader.read(PROMPTS, texts)
    longest = max(map(len, PROMPTS)) + 5
    whole = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts)]
    tokens = torch.tensor([row[:-1] + row[-2:-1] * (longest + 1 - len(row)) for row in whole])
    for start in range(0, len(PROMPTS), 3):  # in parts, as `TextScorer` asks
        logits = reader.score(tokens[start : start + 3])
        for row, given in enumerate(logits, start):
            first = len(PROMPTS[row])
            assert torch.equal(given[first : first + 5], written[row])
    wide, narrow = (BlockReader(target, width) for width in (2, 5))
    for reader in wide, narrow:
        reader.read(PROMPTS, texts)
    torch.testing.assert_close(*(reader.score(tokens) for reader in (wide, narrow)), atol=0.05, rtol=0.05)
    narrow.read(PROMPTS, texts)
    with pytest.raises(AssertionError, match="order"):
        narrow.score(tokens.flip(0))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_an_exact_sampler_passes_in_bfloat16_and_a_mistake_is_seen(top_p):
    target, draft, sampling = in_bfloat16(0), in_bfloat16(1, layers=1), Sampling(1.0, 0, top_p)
    prompts, drafter = PROMPTS * 10, ModelDrafter(draft)
    for sampler, right in ((specSampling, True), (MISTAKES["replace from p"].verify, False)):
        verify = {} if right else {"verify": sampler}
        generator = torch.Generator().manual_seed(0)
        texts, _ = specSampling(prompts, target, drafter, 60, 4, sampling, None, generator, **verify)
        figures = reread(target, draft, prompts, texts, sampling).figures()
        assert (not seen_by(figures, 1e-3)) is right


def test_text_of_kernels_is_read_again_by_kernels(kernels):
    prompts, sampling = PROMPTS * 4, Sampling(1.0, 0, 1.0)
    target, draft = compiled(in_bfloat16(0, layers=1)), in_bfloat16(1, layers=1)
    assert is_compiled(target)
    for verify, right in ((token_rule, True), (always_accept, False)):
        generator = torch.Generator().manual_seed(0)
        texts, _ = specSampling(prompts, target, ModelDrafter(draft), 60, 4, sampling, None, generator, verify=verify)
        figures = reread(target, draft, prompts, texts, sampling).figures()
        assert target.forwards == 0 and (not seen_by(figures, 1e-3)) is right


def test_the_number_of_texts_follows_the_tokens(flags):
    def rows(line):
        return settings.parse([*flags, *line.split()]).rows

    assert [rows(f"--lossless --tokens {n} --maxLen 20") for n in (1, 100, 100_000)] == [1, 5, 64]
    assert rows("--speed") == 1


def test_mistakes_are_planted_beside_compiled_models(cli, flags, kernels, tmp_path):
    """Compiled layers are packed, and no eager model can be made of them."""
    arguments = ["--lossless", "fixed", "--tokens", "200", "--compile", "--out", str(tmp_path)]
    assert cli.main([*flags, *arguments]) in (0, 1)  # So few tokens of tiny models need not be enough.
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {line["mistake"] for line in lines if line["kind"] == "power"} >= {"stale slot", "always accept"}
