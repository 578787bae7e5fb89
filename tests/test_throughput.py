"""Queues in the benchmark: own rows, rows of other engines, and the table."""

import helpers
import pytest
from conftest import refused
from test_batchSweep import queue
from test_specSampling import PROMPTS

from benchmark import throughput
from benchmark.engines.engineProcess import PeerError
from benchmark.options import parse
from decoding.record import Record
from report.tableFormat import cells


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


def test_own_rows_and_other_engines_stand_in_one_table(options):
    target, peer = helpers.tiny(), FakePeer()
    lines = throughput.measure_throughput(options, {"compiled": {"target": target}}, [peer], PROMPTS, "cpu")
    found = {(line["method"], line["batch"], line["repeat"]) for line in lines}
    assert {(throughput.PLAIN, 3, 1), ("lookup, as many guesses as pay, compiled", 1, 0), ("other", 1, 0)} <= found
    # It failed in its second timed queue, and it cannot decode three texts at once.
    assert ("other", 1, 1) not in found and ("other", 3, 0) not in found and peer.failed == "it is gone"
    assert len(cells(throughput.throughput_table(lines, 8))) > 3


def test_the_table_divides_by_plain_decoding_of_the_same_batch_and_turn():
    lines = [queue(throughput.PLAIN, 1, 100), queue(throughput.PLAIN, 1, 50, 1)]
    lines += [queue("other", 1, 200), queue("other", 1, 150, 1)]
    found = cells(throughput.throughput_table(lines, 8))
    assert "175" in found and any(cell.startswith("2.5") for cell in found)


@pytest.mark.parametrize("words", ["0", "1,x", "-3", "1,,2", "2000"])
def test_a_batch_that_is_none_is_refused(words):
    with refused("--batch takes numbers"):
        parse(["--batch=" + words])
