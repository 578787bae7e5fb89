"""`test.py --batch`: a queue of texts is timed and tested; its figures, its memory, its graphs, and what is refused."""

from types import SimpleNamespace

import helpers
import pytest
import torch
from conftest import few_mistakes, lines_of, of_kind, prompted, refused
from test_queue import PROMPTS
from test_speed import measurement

from decoding.rows import Record
from engine.cachedModel import CachedModel
from engine.kvCache import cache_bytes
from experiments import prepare, settings
from experiments.intervals import summarize
from experiments.speed import WARM, ends_after, time_texts
from inputs import models as loading
from lossless.mistakes import PredecessorTarget
from lossless.trial import logits_as_written
from regrSampling import regrSampling
from utils import GREEDY, Sampling


def queue(method, repeat, throughput):
    return {"method": method, "repeat": repeat, "batch": 2, "texts": 3, "throughput": throughput}


# Figures.


def test_throughput_and_speed_up_are_of_queues_and_the_rest_of_texts():
    texts = [measurement(method, 0, repeat, 7.0, ttft=0.5) for method in ("target", "fast") for repeat in (0, 1)]
    queues = [queue("target", 0, 10.0), queue("fast", 1, 90.0), queue("fast", 0, 30.0), queue("target", 1, 45.0)]
    target, fast = summarize(texts, queues=queues)
    assert (fast["throughput"], fast["speedup"]) == ((60, 30, 90), (2.5, 2, 3)) and target["throughput"][0] == 27.5
    assert fast["ttft"][0] == 0.5 and fast["runs"] == 2
    assert summarize(texts, queues=queues[:2])[1]["speedup"][0] != 9  # Other repeats are no pair.


def test_the_beginning_of_a_queue_has_every_size_and_a_cache_as_large_as_ever():
    target, sizes = helpers.tiny(), []
    forward = target.forward
    target.forward = lambda tokens, *rest, **named: sizes.append(len(tokens)) or forward(tokens, *rest, **named)
    texts, _ = regrSampling([[5, 9, 2]] * 4, target, 40, end_of_text=ends_after(3, 4), batch=4)
    assert list(map(len, texts)) == [9, 6, 3, 3] and list(dict.fromkeys(sizes)) == [4, 2, 1]
    assert target.cache.capacity == 43


def test_methods_take_turns_and_each_text_has_its_own_seed():
    calls = []

    def method(name):
        def run(prompts, generators, batch, first=None):
            calls.append((name, len(prompts), batch, first))
            tokens = [torch.randint(0, 1000, (2,), generator=generator).tolist() for generator in generators]
            records = [Record([i + 1.0, i + 3.0], [1, 1], [0, 0], [0, 0], begun=float(i)) for i in range(len(prompts))]
            return tokens, records

        return run

    prompts = [[1], [2, 3], [4]]
    timed = list(time_texts({name: method(name) for name in "AB"}, prompts, 2, 7, "cpu", batch=2, warm_up=1))
    turns = [queue["method"] for _, queue in timed]
    timed_calls = [call for name in turns for call in ((name, 2, 2, WARM), (name, 3, 2, None))]
    assert calls == [("A", 2, 2, None), ("B", 2, 2, None), *timed_calls]
    texts, first = timed[0]
    counts = {"tokens": 6, "seconds": 5.0, "tokens_per_round": 1.0, "drafted_per_round": 0.0}
    assert first == queue("A", 0, 6 / 5) | counts
    assert [(t["prompt"], t["ttft"], t["tpot"], t["seconds"], t["batch"]) for t in texts] == [
        (i, 1.0, 2.0, 3.0, 2) for i in range(3)
    ]
    seeds = {(t["prompt"], t["repeat"]): t["sha256"] for texts, _ in timed for t in texts}
    assert len(set(seeds.values())) == 6  # Both methods drew the same numbers, each text others.


# The command line.


@pytest.fixture(scope="module")
def runs(cli, flags, tmp_path_factory):
    """{batch: folder} of the same run, without batches and with."""
    folders = {batch: tmp_path_factory.mktemp(f"batch{batch}") for batch in (1, 3)}
    for batch, folder in folders.items():
        arguments = ["--speed", "--dtype", "float32", "--sentences", "4", "--repeats", "2", "--batch", str(batch)]
        assert cli.main([*flags, *arguments, "--out", str(folder)]) == 0
    return folders


def test_a_run_in_batches_writes_the_texts_of_one_without(runs):
    keys = ("method", "prompt", "repeat", "sha256")
    one, three = ({tuple(line[key] for key in keys) for line in of_kind(lines_of(runs[batch]))} for batch in (1, 3))
    assert one == three and len(three) == 3 * 4 * 2


def test_each_queue_has_a_line_and_the_text_says_batch(runs):
    lines = lines_of(runs[3])
    queues = of_kind(lines, "queue")
    methods = ("draft", "target", "speculative")
    assert [q["method"] for q in queues[:3]] == list(methods)  # The order of the second repeat is drawn.
    assert {(q["method"], q["repeat"]) for q in queues[3:]} == {(method, 1) for method in methods}
    for q in queues:
        which = q["method"], q["repeat"]
        of_queue = [line for line in of_kind(lines) if (line["method"], line["repeat"]) == which]
        assert (q["batch"], q["texts"], q["tokens"]) == (3, 4, sum(line["tokens"] for line in of_queue))
        assert q["throughput"] * q["seconds"] == pytest.approx(q["tokens"])
        assert q["seconds"] >= max(line["seconds"] for line in of_queue)
        assert all(line["batch"] == 3 for line in of_queue)
    said = " ".join((runs[3] / "results.txt").read_text().split())
    assert "batch 3, float32" in said and "decoded as a queue" in said
    assert "batch" not in (runs[1] / "results.txt").read_text().split("seed 0")[1]
    assert not any("batch" in line for line in lines_of(runs[1]))


def test_a_run_in_batches_can_be_repeated(run, runs, capsys):
    run("--rerun 1", base=[], out=runs[3])
    assert "all 24 texts are the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    {
        "--batch 0": "--batch",
        "--batch 2 --show": "--batch is for modes",
        "--batch 2 --html page.html": "--batch is for modes",
        "--batch 2 --sweep": "--sweep",
        "--batch 2 --ppl": "--batch is for modes",
        "--batch 3 --speed": "--batch 3 needs at least 3 prompts, and there are 2; raise --sentences",
        "--batch 3 --speed --prompt a": "there are 1; give more",
    }.items(),
)
def test_what_has_no_batches_is_refused(run, flags, tmp_path, capsys, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    flags = prompted(flags) if "--prompt" in arguments else flags
    assert run(arguments, base=prompted(flags, "--promptLen") if "--ppl" in arguments else flags, code=2) == []
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and word in error


def test_several_processes_have_no_batches(flags):
    with refused("--batch", "single process"):
        prepare.where_to_run(settings.parse([*flags, "--speed", "--batch", "2"]), SimpleNamespace(count=2))


# Memory.


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_the_bytes_of_a_cache_are_those_that_it_takes(family):
    model = helpers.tiny(family)
    regrSampling([[5, 9, 2], [7]], model, 4, GREEDY)
    kept = sum(x.nbytes for layer in model.cache.layers for x in (layer.keys, layer.values))
    assert cache_bytes(model.model.config, 2 * 7, torch.float32) == kept


def test_caches_are_announced_and_refused_if_they_do_not_fit(run, tmp_path, capsys, monkeypatch):
    caches = 2 * (2 + 1) * 32 * 2 * (12 + 8) * 4  # keys and values, layers of both, width, slots, bytes
    asked, choose = [], loading.choose_devices
    monkeypatch.setattr(loading, "choose_devices", lambda *given: asked.append(given[6]) or choose(*given))
    run("--speed --batch 2 --dtype float32")
    assert asked == [caches, caches]
    assert f"The KV caches of 2 texts take {caches / 1e3:.1f} KB." in capsys.readouterr().out
    folder, config = (tmp_path / "x"), helpers.tiny().model.config
    monkeypatch.setattr(loading, "weight_bytes", lambda *_: 1 << 20)
    needed = (1 << 20) + loading.working_bytes(config, 20)
    monkeypatch.setattr(loading, "available_memory", lambda _: needed + 999)
    assert choose(folder, config, "float32", "cpu", 20, (), 999) == {"device_map": {"": "cpu"}}
    with refused("KV caches of the batch", "a smaller --batch"):
        choose(folder, config, "float32", "cpu", 20, (), 1000)


# Losslessness.


def test_lossless_decodes_a_queue_and_plants_its_mistake(cli, flags, tmp_path, monkeypatch):
    batches, reserve, queues, prefill = [], CachedModel.reserve, [], PredecessorTarget.prefill
    monkeypatch.setattr(CachedModel, "reserve", lambda self, *sizes: batches.append(sizes[0]) or reserve(self, *sizes))
    spy = lambda self, rows: queues.append((len(rows.prompts), rows.batch)) or prefill(self, rows)  # noqa: E731
    monkeypatch.setattr(PredecessorTarget, "prefill", spy)
    few_mistakes(monkeypatch, "predecessor's slots", "replace from p")
    arguments = ["--lossless", "--tokens", "48", "--maxLen", "6", "--batch", "3", "--dtype", "bfloat16"]
    assert cli.main([*flags, *arguments, "--out", str(tmp_path)]) in (0, 1)  # So few tokens need not be enough.
    lines = lines_of(tmp_path)
    drawn = [line for line in lines if line.get("test") == "drawn"]
    assert [(line["texts"], line["batch"]) for line in drawn] == [(8, 3), (8, 3)] and max(batches) == 3
    assert "predecessor's slots" in {line.get("mistake") for line in lines}
    assert queues[0] == (6, 3)  # Texts outnumber the rows from the first test on.
    assert "batch 3" in (tmp_path / "results.txt").read_text()
    for line in lines:
        assert line.get("test") != "greedy" or line["dtype"] != "float32" or line["beyond"] == 0


def test_texts_read_again_in_batches_have_the_same_logits():
    target = helpers.tiny()
    texts, _ = regrSampling(PROMPTS[:5], target, 6, Sampling(1.0, 0, 1.0))
    whole, parts = (logits_as_written(target, 2, PROMPTS[:5], texts, batch) for batch in (None, 2))
    for logits, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(logits, other, atol=1e-4, rtol=1e-4)
