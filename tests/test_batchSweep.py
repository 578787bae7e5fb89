"""The map of batch and gamma: what is timed, and what theory says of it."""

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near

from decoding.verification import token_rule
from experiments import batchSweep
from experiments.measure import as_timed
from experiments.speed import queue_figures
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from report import figures
from report.runTables import batch_table
from utils import Sampling

CONDITIONS = {
    "dtype": "float32",
    "promptLen": 4,
    "mode": "sweep",
    "maxLen": 9,
    "gamma": 4,
    "temperature": 1.0,
    "top_p": 1.0,
}


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
    found = batchSweep.predict(LINES)
    one, eight = ({row["gamma"]: row for row in found[batch]["rows"]} for batch in (1, 8))
    assert one["1"]["speedup"][0] == pytest.approx((1.5 + 1.4) / 2) and eight["1"]["speedup"][0] == 0.5
    assert one["1"]["theory"] == pytest.approx(1.5 / (0.3 + 1.2))
    assert one["costAware"]["theory"] == pytest.approx(1.4 / (0.5 * 0.3 + 1.1))  # half a guess a round
    assert found[1]["best"] == "gamma 1" and found[8]["best"] == "target"
    assert found[1]["controller"]["best"][0] == pytest.approx((135 / 150 + 1) / 2)
    assert found[8]["controller"]["plain"][0] == pytest.approx(0.99)


def test_the_map_of_a_run_that_was_stopped_shows_what_there_is(tmp_path):
    for lines in (LINES[:1], LINES[:3], LINES[:8]):
        figures.draw_batches(lines, tmp_path / "map.png")
        assert [row[0] for row in batch_table(lines).rows] == ["1"] + ["8"] * (len(lines) == 8)


def test_the_line_of_break_even_runs_between_faster_and_slower_cells():
    _, axes = figures.plt.subplots()
    figures.draw_break_even(axes, batchSweep.predict(LINES))
    lines = sorted((line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines)
    assert lines == [([-0.5, 0.5], [0.5, 0.5]), ([0.5, 1.5], [0.5, 0.5])]  # 1.45 over 0.5, and 1.4 over 0.99


@pytest.mark.parametrize("lookup", [False, True])
def test_every_cell_is_measured_and_writes_whole_texts(monkeypatch, lookup):
    monkeypatch.setattr(batchSweep, "BATCHES", (1, 3))
    monkeypatch.setattr(batchSweep, "GAMMAS", (1, 2))
    target, lines = helpers.tiny(), []
    drafter = LookupDrafter(61) if lookup else ModelDrafter(near(target))
    sampling = Sampling(1.0, 0, 1.0)
    cells = batchSweep.samplers(target, drafter, token_rule)
    methods = {name: as_timed(sampler, CONDITIONS["maxLen"], sampling, None) for name, sampler in cells.items()}
    parts = PROMPTS, methods, target, drafter, sampling, CONDITIONS
    batchSweep.measure_batches(*parts, 2, 0, "cpu", lines.append)
    cells = [(line["batch"], line["method"], line["repeat"]) for line in lines if line["kind"] == "queue"]
    methods = ["target", "gamma 1", "gamma 2", "costAware"]
    assert sorted(cells) == sorted((batch, name, repeat) for batch in (1, 3) for repeat in (0, 1) for name in methods)
    assert [name for _, name, _ in cells[:4]] == methods  # the order of the tables
    assert all(line["tokens"] == 9 * line["texts"] for line in lines if line["kind"] == "queue")
    for line in lines:
        if line.get("of") == "batch":
            assert line["scoring"][0] == 1 and len(line["scoring"]) == 3 and (line["drafting"] > 0) != lookup


def test_tokens_a_round_are_those_of_all_texts():
    sampler = batchSweep.samplers(target := helpers.tiny(), ModelDrafter(near(target)), token_rule)["gamma 2"]
    written = {}
    for batch in 2, 1:
        generators = [torch.Generator().manual_seed(text) for text in range(len(PROMPTS))]
        _, records = as_timed(sampler, 20, Sampling(1.0, 0, 1.0), None)(PROMPTS, generators, batch)
        written[batch] = records
    figures_of = queue_figures("gamma 2", 0, 2, written[2])
    rounds = sum(len(record.committed) - 1 for record in written[2])
    assert figures_of["tokens_per_round"] == pytest.approx((20 - 1) * len(PROMPTS) / rounds)
    assert [record.committed for record in written[1]] == [record.committed for record in written[2]]
    assert figures_of["throughput"] == pytest.approx(20 * len(PROMPTS) / figures_of["seconds"])
