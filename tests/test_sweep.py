"""What the sweep hands to theory, against values computed another way."""

import math

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near
from test_speed import measurement

from decoding.verification import token_rule
from experiments import sweep, theory
from experiments.acceptance import expected, overlaps_of
from methods.drafters import ModelDrafter
from report.runTables import sweep_table
from specSampling import specSampling
from utils import Sampling, probabilities

DRAW = Sampling(1.0, 0, 1.0)


def alpha(prompts, target, drafter, max_len):
    """The alpha that the sweep records."""
    sampler = sweep.sampler(target, drafter, sweep.ALPHA_GAMMA, token_rule)
    return expected(overlaps_of(sampler, prompts, "cpu", DRAW, max_len, None, 0).positions)["overlap"]


def test_alpha_by_overlap_agrees_with_counting_and_is_that_of_the_visited_contexts():
    target = helpers.tiny()
    draft = near(target, noise=0.3)
    by_overlap = alpha(PROMPTS * 5, target, ModelDrafter(draft), 60)
    _, records = specSampling(
        PROMPTS * 40, target, ModelDrafter(draft), 60, 4, DRAW, generator=torch.Generator().manual_seed(1)
    )
    tested, passed = (sum(column) for column in zip(*(pair for r in records for pair in r.acceptance_by_position)))
    assert 0.3 < by_overlap < 0.95 and by_overlap == pytest.approx(passed / tested, abs=0.03)


def test_one_context_has_its_own_overlap():
    target, draft = helpers.tiny(), helpers.tiny(seed=1)
    found = alpha([[5, 9]], target, ModelDrafter(draft), 2)
    assert found != found  # two tokens leave no room for a guess
    tokens = specSampling(
        [[5, 9]], target, ModelDrafter(draft), 3, 4, DRAW, generator=torch.Generator().manual_seed(0)
    )[0][0]
    p, q = (probabilities(m.score(torch.tensor([[5, 9, tokens[0]]]))[0, -1], DRAW) for m in (target, draft))
    found = alpha([[5, 9]], target, ModelDrafter(draft), 3)
    assert found == pytest.approx(theory.overlap(p, q).item(), abs=1e-6)


def test_scoring_is_measured_in_units_of_one_token():
    costs = sweep.scoring_costs(PROMPTS[0], helpers.tiny(), DRAW, "cpu", repeats=4)
    assert costs[0] == 1 and len(costs) == max(sweep.GAMMAS) + 1 and all(v > 0 for v in costs)


def test_predictions_are_theorys_of_what_was_measured(monkeypatch):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 3))
    lines = [measurement("target", prompt, throughput=10.0, tpot=0.1) for prompt in (0, 1)]
    lines += [measurement("draft", prompt, tpot=0.02 + 0.01 * prompt) for prompt in (0, 1)]
    lines += [measurement("gamma 1", prompt, throughput=15.0, acceptance_by_position=[(10, 6)]) for prompt in (0, 1)]
    lines += [
        measurement("gamma 2", prompt, throughput=17.0, acceptance_by_position=[(10, 8), (8, 2)]) for prompt in (0, 1)
    ]
    found = sweep.predict(lines, {"scoring": [1.0, 1.1, 1.3]})
    alpha, c = (6 + 8 + 2) / 28, 0.25
    assert (found["alpha"], found["c"]) == (pytest.approx(alpha), pytest.approx(c))
    for gamma, row in enumerate(found["rows"], 1):
        tokens = sum(alpha**i for i in range(gamma + 1))
        assert row["paper"] == pytest.approx(tokens / (1 + gamma * c))
        assert row["theory"] == pytest.approx(tokens / ([1.1, 1.3][gamma - 1] + gamma * c))
        assert row["speedup"][0] == pytest.approx([1.5, 1.7][gamma - 1])
    assert all(row["expected"] != row["expected"] for row in found["rows"])  # an old record: no overlaps
    costs = {"scoring": [1.0, 1.1, 1.3], "overlap_by_position": [[9, 8, 4.0], [4, 4, 1.0]]}
    assert [row["expected"] for row in sweep.predict(lines, costs)["rows"]] == [1.5, 1.625]
    guesses = [line for line in lines if line["method"] != "draft"]
    assert sweep.predict(guesses, {"scoring": [1.0, 1.1, 1.3]})["c"] == 0  # no draft model: guessing costs nothing


def test_texts_of_a_single_token_and_a_run_that_was_stopped_have_a_table_too(monkeypatch):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 3))
    lines = [measurement(name, 0, tpot=None, acceptance_by_position=[]) for name in ("draft", "target", "gamma 1")]
    found = sweep.predict(lines, {"scoring": [1.0, 1.1, 1.3]})
    assert found["alpha"] != found["alpha"] and found["c"] != found["c"] and found["best"] == 0
    assert [row["gamma"] for row in found["rows"]] == [1]
    assert sweep.predict(lines[:2], {"scoring": [1.0, 1.1, 1.3]})["rows"] == []


def test_what_was_not_measured_is_a_dash():
    row = {"gamma": 1, "theory": math.nan, "paper": math.nan, "alpha": math.nan, "expected": math.nan}
    nothing = [math.nan] * 3
    row |= dict.fromkeys(("seconds", "throughput", "speedup", "tokens_per_round"), nothing)
    plain = {"seconds": [1.0] * 3, "throughput": [1.0] * 3}
    lines = [measurement("target", 0) | {"dtype": "float32", "prompt_tokens": 3}]
    table = sweep_table({"flags": {}, "models": {}}, lines, {"plain": plain, "rows": [row]})
    cells = [str(cell) for row in table.rows for cell in row]
    assert cells[3] == "1" and "nan" not in "".join(cells) and cells.count("-") == 8
