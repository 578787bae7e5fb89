"""The sweep over gamma, and the map of batch and gamma: what is timed, and what theory says of it."""

import math

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near
from test_speed import measurement

from decoding.verification import token_rule
from experiments import sweep
from experiments.measure import as_timed
from experiments.speed import queue_figures
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from report import figures
from report.runTables import batch_table, sweep_table
from utils import Sampling

DRAW = Sampling(1.0, 0, 1.0)
CONDITIONS = {"dtype": "float32", "promptLen": 4, "mode": "sweep", "maxLen": 9, "gamma": 4}
CONDITIONS |= {"temperature": 1.0, "top_p": 1.0}

# Over gamma.


def test_predictions_are_theorys_of_what_was_measured(monkeypatch):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 3))
    lines = [measurement("draft", prompt, tpot=0.02 + 0.01 * prompt) for prompt in (0, 1)]
    tested = {"target": (10.0, []), "gamma 1": (15.0, [(10, 6)]), "gamma 2": (17.0, [(10, 8), (8, 2)])}
    for name, (speed, counts) in tested.items():
        lines += [measurement(name, prompt, 0, speed, acceptance_by_position=counts) for prompt in (0, 1)]
    costs = {"scoring": [1.0, 1.1, 1.3], "overlap_by_position": [[9, 8, 4.0], [4, 4, 1.0]]}
    found = sweep.predict(lines, costs)
    alpha, c = (6 + 8 + 2) / 28, 0.25
    assert (found["alpha"], found["c"]) == (pytest.approx(alpha), pytest.approx(c))

    def tokens(gamma):
        return sum(alpha**i for i in range(gamma + 1))

    for gamma, row in enumerate(found["rows"], 1):
        assert row["paper"] == pytest.approx(tokens(gamma) / (1 + gamma * c))
        assert row["theory"] == pytest.approx(tokens(gamma) / ([1.1, 1.3][gamma - 1] + gamma * c))
        assert row["speedup"][0] == pytest.approx([1.5, 1.7][gamma - 1])
    assert found["best"] == max(range(9), key=lambda gamma: tokens(gamma) / (1 + gamma * c)) == 2
    assert [row["expected"] for row in found["rows"]] == [1.5, 1.625]
    guesses = [line for line in lines if line["method"] != "draft"]
    assert sweep.predict(guesses, costs)["c"] == 0  # no draft model: guessing costs nothing


def test_texts_of_a_single_token_and_a_run_that_was_stopped_have_a_table_too(monkeypatch):
    monkeypatch.setattr(sweep, "GAMMAS", range(1, 3))
    lines = [measurement(name, 0, tpot=None, acceptance_by_position=[]) for name in ("draft", "target", "gamma 1")]
    costs = {"scoring": [1.0, 1.1, 1.3], "overlap_by_position": []}
    found = sweep.predict(lines, costs)
    assert found["alpha"] != found["alpha"] and found["c"] != found["c"] and found["best"] == 0
    assert [row["gamma"] for row in found["rows"]] == [1] and math.isnan(found["rows"][0]["expected"])
    assert sweep.predict(lines[:2], costs)["rows"] == []


def test_what_was_not_measured_is_a_dash():
    row = {"gamma": 1, "theory": math.nan, "paper": math.nan, "alpha": math.nan, "expected": math.nan}
    nothing = [math.nan] * 3
    row |= dict.fromkeys(("seconds", "throughput", "speedup", "tokens_per_round"), nothing) | {"rounds": 0}
    plain = {"seconds": [1.0] * 3, "throughput": [1.0] * 3}
    lines = [measurement("target", 0) | {"dtype": "float32", "prompt_tokens": 3}]
    table = sweep_table({"flags": {}, "models": {}}, lines, {"plain": plain, "rows": [row]})
    cells = [str(cell) for row in table.rows for cell in row]
    assert cells[3] == "1" and "nan" not in "".join(cells) and cells.count("-") == 9


# Over batches.


def queue(method, batch, throughput, repeat=0, tokens=2.0, drafted=1.0):
    figures = {"texts": 4, "tokens": 40, "seconds": 40 / throughput, "throughput": throughput}
    rounds = {"tokens_per_round": tokens, "drafted_per_round": drafted}
    return {"kind": "queue", **CONDITIONS, "method": method, "repeat": repeat, "batch": batch, **figures, **rounds}


def costs(batch, scoring, drafting):
    return {"kind": "costs", "of": "batch", **CONDITIONS, "batch": batch, "scoring": scoring, "drafting": drafting}


LINES = [
    *(queue("target", 1, speed, repeat, 1.0, 0.0) for repeat, speed in enumerate((100, 50))),
    *(queue("gamma 1", 1, speed, repeat, 1.5) for repeat, speed in enumerate((150, 70))),
    *(queue("costAware", 1, speed, repeat, 1.4, 0.5) for repeat, speed in enumerate((135, 70))),
    costs(1, [1.0, 1.2], 0.3),
    queue("target", 8, 400.0, 0, 1.0, 0.0),
    queue("gamma 1", 8, 200.0, 0, 1.5),
    queue("costAware", 8, 396.0, 0, 1.0, 0.0),
    costs(8, [1.0, 2.0], 0.5),
]


def test_a_cell_is_the_median_ratio_to_plain_decoding_of_the_same_batch():
    found = sweep.predict_batches(LINES)
    one, eight = ({row["gamma"]: row for row in found[batch]["rows"]} for batch in (1, 8))
    assert one["1"]["speedup"][0] == pytest.approx((1.5 + 1.4) / 2) and eight["1"]["speedup"][0] == 0.5
    assert one["1"]["theory"] == pytest.approx(1.5 / (0.3 + 1.2))
    assert one["costAware"]["theory"] == pytest.approx(1.4 / (0.5 * 0.3 + 1.1))  # half a guess a round
    assert found[1]["best"] == "gamma 1" and found[8]["best"] == "target"
    assert found[1]["controller"][0] == pytest.approx((135 / 150 + 1) / 2)
    assert found[8]["controller"][0] == pytest.approx(0.99)


def test_the_map_of_a_run_that_was_stopped_shows_what_there_is(tmp_path):
    for lines in (LINES[:1], LINES[:3], LINES[:8]):
        figures.draw_batches(lines, tmp_path / "map.png")
        assert [row[0] for row in batch_table(lines).rows] == ["1"] + ["8"] * (len(lines) == 8)


@pytest.mark.parametrize("lookup", [False, True])
def test_every_cell_is_measured_and_writes_whole_texts(monkeypatch, lookup):
    monkeypatch.setattr(sweep, "BATCHES", (1, 3))
    monkeypatch.setattr(sweep, "BATCH_GAMMAS", (1, 2))
    monkeypatch.setattr(sweep, "BATCH_REPEATS", 2)
    target, lines = helpers.tiny(), []
    drafter = LookupDrafter(61) if lookup else ModelDrafter(near(target))
    cells = sweep.samplers(target, drafter, token_rule, batches=True)
    methods = {name: as_timed(sampler, CONDITIONS["maxLen"], DRAW, None) for name, sampler in cells.items()}
    sweep.measure_batches(helpers.SINGLE_INPUTS, PROMPTS, methods, target, drafter, DRAW, CONDITIONS, lines.append)
    cells = [(line["batch"], line["method"], line["repeat"]) for line in lines if line["kind"] == "queue"]
    methods = ["target", "gamma 1", "gamma 2", "costAware"]
    assert sorted(cells) == sorted((batch, name, repeat) for batch in (1, 3) for repeat in (0, 1) for name in methods)
    assert [name for _, name, _ in cells[:4]] == methods  # the order of the tables
    assert all(line["tokens"] == 9 * line["texts"] for line in lines if line["kind"] == "queue")
    for line in lines:
        if line.get("of") == "batch":
            assert line["scoring"][0] == 1 and len(line["scoring"]) == 3 and (line["drafting"] > 0) != lookup


def test_tokens_a_round_are_those_of_all_texts():
    sampler = sweep.samplers(target := helpers.tiny(), ModelDrafter(near(target)), token_rule)["gamma 2"]
    written = {}
    for batch in 2, 1:
        generators = [torch.Generator().manual_seed(text) for text in range(len(PROMPTS))]
        _, written[batch] = as_timed(sampler, 20, DRAW, None)(PROMPTS, generators, batch)
    of_queue = queue_figures("gamma 2", 0, 2, written[2])
    rounds = sum(len(record.committed) - 1 for record in written[2])
    assert of_queue["tokens_per_round"] == pytest.approx((20 - 1) * len(PROMPTS) / rounds)
    assert [record.committed for record in written[1]] == [record.committed for record in written[2]]
    assert of_queue["throughput"] == pytest.approx(20 * len(PROMPTS) / of_queue["seconds"])
