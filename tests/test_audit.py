"""The audit of texts that anything wrote: what passes, what is rejected and why, and files that cannot be used."""

import json
from dataclasses import replace
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from conftest import lines_of, one_line, refused
from test_specSampling import PROMPTS

from decoding.drafter import Fixed
from engine.cachedModel import CachedModel
from experiments import loading
from inputs.models import load_model, load_tokenizer, model_limits
from inputs.texts import read_texts, write_texts
from lossless import scorer as scoring
from lossless.audit import Auditor, alike, others, power_of, variation_of
from lossless.evidence import RETOKENISED, TILTS, Evidence, limit_of, seen_by
from lossless.scorer import TextScorer
from regrSampling import regrSampling
from utils import GREEDY, Sampling, UserError, probabilities

UNIT = 2.0**-24  # the unit roundoff of float32, in which all texts here are written
COLD, NUCLEUS = Sampling(0.6, 0, 1.0), Sampling(1.0, 0, 0.8)


@pytest.fixture(scope="module")
def target():
    return helpers.tiny(seed=0)


def ragged(texts):
    """The texts, each cut to another length."""
    return [text[: 60 + 7 * number % 41] for number, text in enumerate(texts)]


def drawn(target, sampling, rows=64):
    prompts, generator = PROMPTS * (rows // len(PROMPTS)), torch.Generator().manual_seed(0)
    return prompts, ragged(regrSampling(prompts, target, 100, sampling, generator=generator)[0])


def judged(target, written_with, sampling, **options):
    """The figures of the target's texts that were drawn with one sampling and are judged by another."""
    return Auditor(target, None, UNIT, **options).drawn(*drawn(target, written_with), sampling)


@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_the_bounds_of_the_total_variation_hold(moved):
    """u of a sampler that gives the last tokens of the order, 20 % of p, a share that is larger by `moved`."""
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        u = random.random((20, 50))
        last = random.random(u.shape) < 0.2 + moved
        u = np.where(last, 0.8 + 0.2 * u, 0.8 * u)
        impossible = np.where(u > 1 - moved / 4, 1.0, 0.0)  # They are the last of all.
        low, high = variation_of(Evidence(np.where(impossible, np.nan, u), *[u] * 4, impossible, 0 * u))
        held += low <= moved <= high
        assert high < moved + 0.1 and low > moved - 0.1
    assert held >= 190 if moved else held > 180


def test_texts_of_different_lengths_are_scored_as_each_alone(target, monkeypatch):
    half = SimpleNamespace(random=lambda size: np.full(size, 0.5))
    monkeypatch.setattr(scoring.np.random, "default_rng", lambda seed: half)
    scorer = TextScorer(target, None, Sampling(1.0, 0, 0.9, 1.3), unit=UNIT)
    prompts, texts = PROMPTS, [[7, 8, 9], [5], [1, 2, 3, 4, 5, 6], [60, 0]]
    together = scorer.evidence(prompts, texts)
    assert together.u.shape == (4, 6) and together.figures()["tokens"] == 12
    for row, (prompt, text) in enumerate(zip(prompts, texts)):
        for all_rows, alone in zip(together.arrays, scorer.evidence([prompt], [text]).arrays):
            assert all_rows[row, : len(text)] == pytest.approx(alone[0], abs=1e-5, nan_ok=True)
            assert np.isnan(all_rows[row, len(text) :]).all()
    halves = scorer.evidence(prompts[:2], texts[:2]) + scorer.evidence(prompts[2:], texts[2:])
    for one, other in zip(halves.arrays, together.arrays):
        assert one == pytest.approx(other, abs=1e-5, nan_ok=True)


def test_neighbours_are_tokens_that_there_are():
    u = np.array([[0.9, 0.8, 0.7], [0.6, np.nan, np.nan]])
    z = (0.4 * 0.3 + 0.3 * 0.2 + 0.4 * 0.1) / ((0.4**2 + 0.3**2 + 0.4**2) / 12) ** 0.5
    assert Evidence(u, *[np.where(np.isnan(u), np.nan, 0)] * 6).neighbours() == pytest.approx(z)


@pytest.mark.parametrize("sampling", [COLD, NUCLEUS, Sampling(1.3, 7, 1.0, 1.2)])
def test_the_targets_own_text_passes(target, sampling):
    found = judged(target, sampling, sampling)
    assert found["seen_by"] == found["places"] == found["fits"] == []
    assert found["tokens"] == sum(map(len, drawn(target, GREEDY)[1])) and found["order"] == "p"


def test_a_setting_that_was_not_applied_is_named_and_impossible_tokens_have_places(target):
    prompts, texts = drawn(target, Sampling(1.0, 0, 1.0))
    found = Auditor(target, None, UNIT).drawn(prompts, texts, NUCLEUS, list(range(11, 11 + len(texts))))
    assert "impossible" in found["seen_by"]
    assert [fit["top_p"] for fit in found["fits"]] == [1.0]
    for place in found["places"]:
        text, at = texts[place["line"] - 11], place["position"] - 1
        before = torch.tensor([[*prompts[place["line"] - 11], *text[:at]]])
        assert text[at] == place["token"] and probabilities(target.score(before)[0, -1], NUCLEUS)[text[at]] == 0
    hot = judged(target, Sampling(1.0, 0, 1.0), COLD)
    assert "surprise" in hot["seen_by"] and hot["z"] > 0 and [fit["temperature"] for fit in hot["fits"]] == [1.0]
    assert len(others(Sampling(0.5, 3, 0.9))) == 7 and others(Sampling(1.0, 0, 1.0)) == []


def test_a_few_impossible_tokens_may_be_the_tokenizers(target):
    """Of texts that came without token ids, and of these alone."""
    prompts, texts = drawn(target, NUCLEUS)
    texts[0][5] = int(target.score(torch.tensor([[*prompts[0], *texts[0][:5]]]))[0, -1].argmin())
    for first, rest, tests in (False, True, ["impossible"]), (False, False, ["impossible"]), (True, True, []):
        rows = [first] + [rest] * (len(texts) - 1)
        assert Auditor(target, None, UNIT, encoded=rows).drawn(prompts, texts, NUCLEUS)["seen_by"] == tests
    found = judged(target, Sampling(1.0, 0, 1.0), NUCLEUS, encoded=[True] * len(texts))
    assert found["impossible"] > RETOKENISED * found["tokens"] and "impossible" in found["seen_by"]


def test_greedy_text_is_judged_token_by_token(target):
    texts = ragged(regrSampling(PROMPTS, target, 100, GREEDY)[0])
    judge = Auditor(target, None, UNIT)
    found = judge.greedy(PROMPTS, texts, GREEDY)
    assert (found["beyond"], found["near_ties"], found["tokens"]) == (0, 0, sum(map(len, texts)))
    texts[2][5] = (texts[2][5] + 1) % 61
    found = judge.greedy(PROMPTS, texts, GREEDY)
    assert found["beyond"] >= 1 and found["places"][0] == {"line": 3, "position": 6, "token": texts[2][5]}


def changed(target, change):
    """The target with other logits."""
    model = CachedModel(target.model)
    for name in "score", "forward":
        compute = getattr(model, name)
        setattr(model, name, lambda *args, compute=compute, **options: change(compute(*args, **options)))
    return model


def lower_where_close(logits):
    """The largest logit is below the second where they differ by less than 0.1."""
    (first, second), best = logits.topk(2).values.split(1, -1), logits.argmax(-1, keepdim=True)
    return logits.scatter_add(-1, best, torch.where(first - second < 0.1, -1e3, 0.0))


HALF = 2.0**-8  # the unit roundoff of bfloat16
FEWER = Sampling(1.0, 12, 1.0)


@pytest.mark.parametrize("offset", [0, -100])
@pytest.mark.parametrize("sampling", [NUCLEUS, Sampling(0.2, 0, 0.9), FEWER, GREEDY], ids=str)
def test_texts_of_rounded_logits_pass_whatever_is_added_to_all(target, sampling, offset):
    """The larger the logits, the coarser they are rounded. Some tokens are at the edge, or near-ties."""
    judge = Auditor(changed(target, lambda logits: logits + offset), None, HALF)
    rounded = changed(target, lambda logits: (logits + offset).bfloat16().float())
    prompts, texts = drawn(rounded, sampling)
    if sampling is GREEDY:
        found = judge.greedy(prompts, texts, sampling)
        assert found["beyond"] == 0 and 0 <= found["near_ties"] < found["expected"]
    else:
        found = judge.drawn(prompts, texts, sampling)
        assert found["seen_by"] == [] and found["excluded"] > 0 if offset else found["seen_by"] == []


@pytest.mark.parametrize(
    "written_with, sampling",
    [(Sampling(1.0, 0, 0.9), NUCLEUS), (Sampling(0.2, 0, 1.0), Sampling(0.2, 0, 0.9)), (Sampling(1.0, 15, 1.0), FEWER)],
)
def test_more_tokens_at_the_edge_than_rounding_explains_are_impossible(target, written_with, sampling, monkeypatch):
    """Rounding in bfloat16 could put many of them there one by one. All count in the distance."""
    texts, judge = drawn(target, written_with, rows=128), Auditor(target, None, HALF)
    found = judge.drawn(*texts, sampling)
    assert "impossible" in found["seen_by"] and found["excluded"] == 0 and found["places"]
    monkeypatch.setattr("lossless.evidence.UNLIKELY", 0.0)
    one_by_one = judge.drawn(*texts, sampling)
    assert one_by_one["excluded"] + one_by_one["impossible"] == found["impossible"] > one_by_one["impossible"]
    assert one_by_one["variation"] == found["variation"]
    assert found["variation"][1] > found["impossible"] / found["tokens"]


def test_a_greedy_text_with_too_many_near_ties_is_not_the_targets(target):
    prompts, texts = drawn(changed(target, lower_where_close), GREEDY)
    found = Auditor(target, None, HALF).greedy(prompts, texts, GREEDY)
    assert found["largest_gap"] < found["allowed"] and found["near_ties"] == 0
    assert found["beyond"] > found["expected"] and found["places"]


@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min, -torch.inf])
def test_tokens_that_a_model_excludes_hide_no_mistake(target, low):
    """Their logits are no measure of rounding."""
    judge = Auditor(changed(target, lambda logits: logits.index_fill(-1, torch.arange(5), low)), None, UNIT)
    prompts, texts = drawn(judge.target, GREEDY)
    assert judge.greedy(prompts, texts, GREEDY)["beyond"] == 0
    texts[2][5] = 10 if texts[2][5] != 10 else 11
    assert judge.greedy(prompts, texts, GREEDY)["beyond"] >= 1


def test_what_rounding_explains_is_that_of_the_tokens_that_are_not_excluded(target):
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    scorer = TextScorer(target, None, COLD, unit=UNIT)
    few, all_of_them = (
        scorer.rounding(some) for some in (logits[:, 900:], logits.index_fill(-1, torch.arange(900), -1e4))
    )
    assert torch.allclose(torch.cat(few), torch.cat(all_of_them))


@pytest.mark.parametrize("order", [False, True])
def test_logits_that_are_not_finite_are_an_error_and_no_text_that_passes(target, order):
    """Those of the target, or of the draft that orders the vocabulary."""
    broken = helpers.tiny(seed=1)
    next(broken.model.parameters()).data.fill_(float("inf"))
    models = (target, broken) if order else (broken, None)
    judge, texts = Auditor(*models, UNIT), (PROMPTS, [[3, 4, 5]] * len(PROMPTS))
    with pytest.raises(UserError, match="not finite"):
        judge.drawn(*texts, NUCLEUS)
    if not order:
        with pytest.raises(UserError, match="not finite"):
            judge.greedy(*texts, GREEDY)


def test_a_share_of_processes_gives_the_same_figures(target):
    prompts, texts = drawn(target, COLD, 128)
    evidence = Auditor(target, None, UNIT).evidence(prompts, texts, COLD)
    scorer = TextScorer(target, None, COLD, unit=UNIT)
    assert scorer.evidence(prompts[64:], texts[64:], first=64).u == pytest.approx(evidence.u[64:], nan_ok=True)


@pytest.mark.parametrize("kind, test", [("surprise", "surprise"), ("variation", "kolmogorov_smirnov")])
def test_the_power_is_as_said(kind, test):
    """A departure of that size is seen in some 90 % of texts."""
    random, seen, shape = np.random.default_rng(0), 0, (20, 50)
    for _ in range(100):
        u, zeros = random.random(shape), np.zeros(shape)
        log_mgf = np.broadcast_to(np.square(TILTS) / 2, (*shape, len(TILTS)))
        evidence = Evidence(u, random.normal(size=shape), zeros, zeros + 1, log_mgf, zeros, zeros)
        by = power_of(evidence, limit_of(1))[kind]
        if kind == "surprise":
            evidence.surprise += by
        else:
            evidence.u = np.where((u < 0.5) & (random.random(shape) < 2 * by), u + 0.5, u)
        seen += test in seen_by(evidence.figures(), limit_of(1))
    assert 80 <= seen <= 99


# The command line.


@pytest.fixture(scope="module")
def written(pair_folder, tmp_path_factory):
    """{what: a file of texts}: of the target at temperature 0.7, of the draft, and greedy."""
    tokenizer = load_tokenizer(pair_folder / "target")
    prompts = [[7 * number % 290, 5, number] for number in range(1, 25)]
    folder, sampling = tmp_path_factory.mktemp("written"), Sampling(0.7, 0, 0.9)
    for name, role, how in ("target", "target", sampling), ("draft", "draft", sampling), ("greedy", "target", GREEDY):
        model = load_model(pair_folder / role, tokenizer, "float32", "cpu")
        generator = torch.Generator().manual_seed(0)
        texts = ragged(regrSampling(prompts, model, 20, how, generator=generator)[0])
        write_texts(folder / name, zip(prompts, texts))
    return folder


@pytest.fixture
def audit(run, pair_folder, tmp_path):
    """`audit(file, words)`: the line of the audit of a file of texts, and the words of results.txt."""

    def call(file, words="", code=0):
        lines = run(f"--audit {file} --target {pair_folder / 'target'} {words}", base=(), code=code)
        text = " ".join((tmp_path / "results.txt").read_text().split())
        return [line for line in lines if "udit" in line.get("test", "")][-1], text

    return call


def test_a_run_says_yes(audit, tmp_path, written):
    line, text = audit(written / "target", "--temperature 0.7 --writtenIn float32 --gamma 3")
    assert line["seen_by"] == [] and line["written_in"] == "float32" and line["unit"] == UNIT
    assert "No test rejects the text" in text and "temperature 0.7, top-p 0.9" in text
    assert "draft" not in lines_of(tmp_path)[0]["models"]


def test_the_readers_rounding_counts_too(audit, written):
    line, _ = audit(written / "target", "--temperature 0.7 --writtenIn float32 --dtype bfloat16")
    assert line["seen_by"] == [] and line["unit"] == torch.finfo(torch.bfloat16).eps / 2


def test_a_few_impossible_tokens_show_nothing_else(audit, tmp_path):
    """No power, and no setting that was left out."""
    write_texts(tmp_path / "few", [([7, 5], [3, 4, 5])])
    line, text = audit(tmp_path / "few", "--temperature 0.7 --top_k 1", code=1)
    assert line["impossible"] == 3 and line["fits"] == [] and line["power"]["surprise"] is None
    assert "These tokens show" not in text and "No test rejects" not in text


def test_a_run_says_no_and_why(audit, run, pair_folder, written):
    line, text = audit(written / "draft", f"--temperature 0.7 --draft {pair_folder / 'draft'}", code=1)
    assert "impossible" in line["seen_by"] and line["order"] == "q / p" and line["places"]
    assert "Not the target's at temperature 0.7" in text and "impossible tokens" in text
    place = line["places"][0]
    assert f"line {place['line']}, token {place['position']} of the text: {place['token']} " in text
    assert "sampling flags those of the engine?" in text and "name it with --draft" not in text
    run("--rerun 1", base=())  # the same figures


def test_guesses_along_texts_do_not_depend_on_times(audit, written, pair_folder, monkeypatch):
    """Nor where the flags of a record say so."""
    rules = []
    monkeypatch.setattr("experiments.settings.without_effect", lambda *_: {})
    monkeypatch.setattr("lossless.audit.guesses_along", lambda method, *_, **__: rules.append(method.keywords["gamma"]))
    for flag in "--draftLength costAware", "--tree auto":
        audit(written / "target", f"--temperature 0.7 --writtenIn float32 --draft {pair_folder / 'draft'} {flag}")
    assert list(map(type, rules)) == [Fixed, Fixed]


@pytest.mark.parametrize("flags, rows", [("", 4), ("--batch 3", 3)])
def test_the_caches_of_guesses_along_texts_are_counted(audit, written, tmp_path, monkeypatch, flags, rows):
    """Those of all rows. A smaller --batch needs less."""
    counted, taken, choose, reserve = [], [], loading.choose_devices, CachedModel.reserve
    monkeypatch.setattr(loading, "choose_devices", lambda *given: counted.append(given[4:7]) or choose(*given))
    monkeypatch.setattr(CachedModel, "reserve", lambda self, *shape: taken.append(shape) or reserve(self, *shape))
    (tmp_path / "few").write_text("".join((written / "target").read_text().splitlines(True)[:4]))
    audit(tmp_path / "few", f"--temperature 0.7 --writtenIn float32 {flags}")
    length = 3 + 20  # of the longest prompt and text
    assert taken == [(rows, length)] * len(taken) and taken
    assert counted == [(rows * length, [], 2 * 2 * 32 * 4 * rows * length)]  # keys and values, layers, width, bytes


def test_greedy_runs(audit, written):
    flags = "--temperature 0 --writtenIn float32"
    line, text = audit(written / "greedy", flags)
    assert line["test"] == "greedyAudit" and "Greedy text of the target" in text
    line, text = audit(written / "target", flags, code=1)
    assert line["beyond"] and "the text may be drawn" in text


def test_text_is_encoded_with_its_prompt(audit, pair_folder, tmp_path):
    tokenizer = load_tokenizer(pair_folder / "target")
    model, file = model_limits(pair_folder / "target", tokenizer), tmp_path / "texts"
    prompt, text = "Before the lamp", " was lit, and nobody heard."
    ids = tokenizer(prompt)["input_ids"]
    lines = {"prompt": prompt, "text": text}, {"prompt": ids, "text": text}, {"prompt": prompt, "tokens": [1, 2]}
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third = read_texts(file, tokenizer, model)
    assert first.prompt == second.prompt == third.prompt == ids and third.tokens == [1, 2]
    assert first.tokens == second.tokens == tokenizer(prompt + text)["input_ids"][len(ids) :]
    with refused("line 1", f'"text" has token {max(first.tokens)}', f"tokens 0 to {max(first.tokens) - 1}"):
        read_texts(file, tokenizer, replace(model, vocabulary=max(first.tokens)))
    assert (first.was_text, second.was_text, third.was_text) == (True, True, False) and third.line == 3
    line, shown = audit(file, code=1)
    assert line["retokenised"] == 2 and "without token ids" in shown


def test_texts_that_go_on_after_their_end_are_counted(audit, pair_folder, tmp_path):
    """In one line. A text whose last token ends it does not go on."""
    end = load_tokenizer(pair_folder / "target").eos_token_id
    write_texts(tmp_path / "texts", zip([[1, 2]] * 4, [*[[5, end, 6]] * 3, [5, 6, end]]))
    line, shown = audit(tmp_path / "texts", "--temperature 0.7", code=1)
    words = "3 texts with a token that ends a text, and more after it: the engine continued"
    assert line["after_end"] == 3 and words in shown


RIGHT = '{"prompt": [1, 2], "tokens": [3]}\n'
BAD = {
    "": ["is empty"],
    " \n\n": ["is empty"],
    RIGHT + "nonsense\n": ["line 2", "not JSON"],
    RIGHT + "[1, 2]\n": ["line 2", "not an object"],
    "\n" + '{"prompt": [1]}\n': ["line 2", '"tokens" or "text"'],
    '{"tokens": [1]}\n': ["line 1", '"prompt"'],
    RIGHT * 3 + '{"prompt": [1], "tokens": [2, 300]}\n': ["line 4", "token 300", "0 to 299"],
    '{"prompt": [-1], "tokens": [2]}\n': ["line 1", "token -1"],
    '{"prompt": [1], "tokens": [true]}\n': ["line 1", "not a list of token ids"],
    '{"prompt": 5, "tokens": [2]}\n': ["line 1", '"prompt"', "nor text"],
    '{"prompt": [1], "tokens": []}\n': ["line 1", "no token to test"],
    '{"prompt": [1], "tokens": null}\n': ["line 1", "text"],
    '{"prompt": "a", "prompt_token_ids": [1], "tokens": [1]}\n': ["line 1", '"prompt_token_ids" is not read'],
    '{"prompt": "", "tokens": [1]}\n': ["line 1", "prompt has no token"],
    json.dumps({"prompt": [1] * 256, "tokens": [1]}): ["line 1", "256 tokens", "reads 256"],
    json.dumps({"prompt": [1] * 200, "tokens": [1] * 100}): ["line 1", "200 tokens", "text of 100", "reads 256"],
    '{"prompt": "a", "text": 7}\n': ["line 1", '"text" is not text'],
    '{"prompt": "a", "text": "\\ud800"}\n': ["line 1", "not text"],
    '{"prompt": [224], "text": "b"}\n': ["line 1", "give token ids"],
    '{"prompt": "Before th", "text": "e lamp"}\n': ["line 1", "merges with the prompt", "give token ids"],
}


@pytest.mark.parametrize("content", [*BAD, None])
def test_a_file_that_cannot_be_used_is_one_line(run, pair_folder, tmp_path, capsys, content):
    file = tmp_path / "texts.jsonl"
    if content is not None:
        file.write_text(content)
    assert run("--audit", file, "--target", pair_folder / "target", base=(), code=2) == []
    one_line(capsys, *BAD.get(content, ["is not a file"]))


def test_texts_of_one_seed_are_noticed(target):
    """Inverse sampling in the order of ids: the uniform numbers are equal, and the contexts are not."""
    prompts = [[1 + number % 60, 2 + number % 50] for number in range(64)]
    one_seed = [torch.Generator().manual_seed(5) for _ in prompts]
    for generator, shared in (one_seed, True), (torch.Generator().manual_seed(5), False):
        texts = regrSampling(prompts, target, 60, NUCLEUS, generator=generator)[0]
        p = Auditor(target, None, UNIT).drawn(prompts, texts, NUCLEUS)["alike"]
        assert p < 1e-6 if shared else p > 0.01


def test_equal_numbers_at_a_position_are_alike_and_independent_ones_are_not():
    random = np.random.default_rng(0)
    u = random.random((40, 200))
    u[5:, 150:] = np.nan
    assert alike(u) > 0.01 and alike(np.broadcast_to(random.random(200), (40, 200))) < 1e-9
    assert alike(u[:1]) == 1.0  # One text has nothing to be like.
    # Tokens that are all the least probable: their numbers are equal at all positions.
    assert alike(np.full((3, 4), 1 - 1e-7)) == alike(np.full((2, 2), 0.5)) == alike(np.full((2, 2), np.nan)) == 1.0
    assert alike(u**0.8) > 0.01  # of a sampler at another temperature
    p = [alike(random.random((30, 50))) for _ in range(400)]
    assert abs(np.mean(np.array(p) < 0.05) - 0.05) < 0.04
