"""Queues in the benchmark: own rows, rows of other engines, the table, and the map at random weights."""

import json
from types import SimpleNamespace

import helpers
import pytest
import torch
from conftest import refused
from test_batchSweep import queue
from test_specSampling import PROMPTS

from benchmark import __main__ as benchmark
from benchmark import randomModels, throughput
from benchmark.engines.engineProcess import PeerError
from benchmark.options import parse
from decoding.record import Record
from report.tables import cells
from utils import Sampling


class FakePeer:
    """Another engine: it decodes two texts at once, and fails in its third queue."""

    def __init__(self):
        self.failed, self.batch, self.calls = None, 2, 0
        self.row = type("Row", (), {"name": "other"})

    def run(self, prompts, batch, count, seed):
        self.calls += 1
        if self.calls == 3:
            raise PeerError("it is gone")
        records = [Record([0.1, 1.0], [1, count - 1], [0, 0], [0, 0]) for _ in prompts]
        return type("Run", (), {"seconds": 2.0, "records": records})

    def fail(self, error):
        self.failed = str(error)


@pytest.fixture
def options(tmp_path):
    return parse(["--batch", "1,3", "--maxLen", "8", "--repeats", "2", "--out", str(tmp_path)])


def test_own_rows_and_other_engines_stand_in_one_table(options, monkeypatch):
    asked = []

    def compile_samplers(samplers, models, prompt, rows, follow):
        asked.append((len(samplers), rows))

    monkeypatch.setattr(throughput, "compile_samplers", compile_samplers)
    target, peer = helpers.tiny(), FakePeer()
    lines = throughput.measure_throughput(options, {"compiled": {"target": target}}, [peer], PROMPTS, "cpu")
    found = {(line["method"], line["batch"], line["repeat"]) for line in lines}
    assert {(throughput.PLAIN, 3, 1), ("lookup, as many guesses as pay, compiled", 1, 0), ("other", 1, 0)} <= found
    # It failed in its second timed queue, and it cannot decode three texts at once.
    assert ("other", 1, 1) not in found and ("other", 3, 0) not in found and peer.failed == "it is gone"
    assert len(cells(throughput.throughput_table(lines, 8))) > 3
    assert asked == [(2, (1, 3))]  # Each batch has graphs of its own.


def test_the_table_divides_by_plain_decoding_of_the_same_batch_and_turn():
    lines = [queue(throughput.PLAIN, 1, 100), queue(throughput.PLAIN, 1, 50, 1)]
    lines += [queue("other", 1, 200), queue("other", 1, 150, 1)]
    found = cells(throughput.throughput_table(lines, 8))
    assert "175" in found and any(cell.startswith("2.5") for cell in found)


@pytest.mark.parametrize("words", ["0", "1,x", "-3", "1,,2", "2000"])
def test_a_batch_that_is_none_is_refused(words):
    with refused("--batch takes numbers"):
        parse(["--batch=" + words])


@pytest.mark.parametrize(
    "words, why", [("--shapes pythia-70m,pythia-70m --peers", "leave out --peers"), ("", "for one process")]
)
def test_what_is_not_measured_together_is_refused(words, why):
    with refused(why):
        benchmark.run(parse(["--batch", "1,2", *words.split()]), [], SimpleNamespace(count=2))


def test_the_map_of_random_weights_is_a_record_tables_and_a_figure(kernels, monkeypatch, tmp_path, capsys):
    for name, shape in {"large": (32, 2, 4), "small": (32, 1, 4)}.items():
        monkeypatch.setitem(randomModels.SHAPES, name, shape)
    for module in benchmark, randomModels:
        monkeypatch.setattr(module, "VOCABULARY", 3000)
    monkeypatch.setattr(throughput, "MAP_GAMMAS", (1, 2))
    drawn, draw = [], throughput.draw_batch_maps
    monkeypatch.setattr(throughput, "draw_batch_maps", lambda *given: drawn.append(given[0]) or draw(*given))
    flags = "--shapes large,small --batch 1,5 --maxLen 4 --repeats 2 --device cpu --dtype float32 --out"
    assert benchmark.main([*flags.split(), str(tmp_path)]) == 0
    record = json.loads((tmp_path / "throughput-large.json").read_text())
    assert (tmp_path / "figures" / "throughput-large.png").stat().st_size > 10_000
    methods = ["gamma 1", "gamma 2", "costAware"]
    rows = ["target", *(f"synthetic {alpha}, {method}" for alpha in (0.6, 0.8) for method in methods)]
    assert [(line["batch"], line["repeat"], line["method"]) for line in record["queues"]] == [
        (batch, repeat, row) for batch in (1, 5) for repeat in (0, 1) for row in rows
    ]
    texts = {1: 4, 5: 5}  # As many as the batch, but a few at least.
    assert all(line["texts"] == texts[line["batch"]] for line in record["queues"])
    assert all(line["tokens"] == 4 * line["texts"] and line["promptLen"] == 8 for line in record["queues"])
    assert [line["method"] for line in throughput.maps(record["queues"])["synthetic 0.8"][:5]] == ["target"] * 4 + [
        "gamma 1"
    ]
    (panels,) = drawn
    assert {name: list(rows) for name, rows in panels.items()} == {"synthetic 0.6": [1, 5], "synthetic 0.8": [1, 5]}
    for rows in panels.values():
        assert [row["gamma"] for row in rows[5]["rows"]] == ["1", "2", "costAware"]
    shown = capsys.readouterr().out
    assert "synthetic 0.6:" in shown and "synthetic 0.8:" in shown and shown.count("after prompts of 8") == 2


@pytest.mark.parametrize("alpha", throughput.MAP_ALPHAS)
def test_a_cell_of_the_map_has_the_acceptance_of_its_name(alpha):
    rows = throughput.map_samplers(helpers.tiny(), helpers.tiny(seed=1))
    for method in "gamma 2", "gamma 8":
        generator = torch.Generator().manual_seed(1)
        _, records = rows[f"synthetic {alpha}, {method}"](
            PROMPTS * 4, max_len=100, sampling=Sampling(), generator=generator
        )
        rounds = [pair for record in records for pair in zip(record.drafted, record.accepted)]
        accepted = sum(kept for _, kept in rounds)
        rejected = sum(kept < drafted for drafted, kept in rounds)
        assert accepted / (accepted + rejected) == pytest.approx(alpha, abs=0.06)
