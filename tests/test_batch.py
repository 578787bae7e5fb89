"""A queue of texts in a batch: rows that end make room, and no text depends on its neighbours. `test.py --batch`: a
queue is timed and tested; its figures, its memory, and what is refused."""

import copy
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import helpers
import numpy as np
import pytest
import torch
from conftest import few_mistakes, lines_of, of_kind, one_line, prompted, refused
from test_speed import measurement, timed_stand_ins

from decoding.rows import Rows
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.kvCache import cache_bytes
from experiments import loading as loaded
from experiments import speed
from experiments.intervals import summarize
from experiments.prepare import load_inputs
from experiments.settings import parse
from experiments.speed import ends_after
from inputs import models as loading
from lossless.mistakes import PredecessorTarget
from lossless.trial import logits_as_written
from methods.catalogue import build
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from methods.otherTokenizer import GROWTH
from methods.samplers import Decoding
from PPL import perplexities
from regrSampling import regrSampling
from report import figures
from specSampling import specSampling
from utils import GREEDY, Sampling

FREE = Sampling(1.0, 0, 1.0)


@pytest.mark.parametrize("kind", ["eager", "compiled", "shared"])
def test_a_call_within_another_one_of_the_same_model_ends_the_outer_one(kind, kernels):
    """The KV cache has other tokens then. After the last token nothing is read any more."""
    target = compiled(helpers.tiny()) if kind == "compiled" else helpers.tiny()
    inner = helpers.rounded_copy(target, 8) if kind == "shared" else target
    alone, calls = regrSampling([[1, 2, 3]], target, 12, GREEDY)[0], []

    def callback(number, tokens, guessed):
        calls.extend(tokens)
        if len(calls) == end:
            regrSampling([[4, 5]], inner, 3, GREEDY)

    end = 5
    with refused("began another text before this one ended"):
        regrSampling([[1, 2, 3]], target, 12, GREEDY, callback=callback)
    assert regrSampling([[1, 2, 3]], target, 12, GREEDY)[0] == alone
    calls.clear()
    with refused("began another text before this one ended"):
        regrSampling([[1, 2, 3]], Contrast(target, helpers.tiny(seed=1)), 12, GREEDY, callback=callback)
    calls.clear()
    end = 12
    assert regrSampling([[1, 2, 3]], target, 12, GREEDY, callback=callback)[0] == alone


@pytest.mark.parametrize("breaks", [False, True])
def test_a_call_of_another_thread_is_refused_until_this_one_ends_or_breaks_off(breaks):
    target, others = helpers.tiny(), []
    alone = regrSampling([[1, 2, 3]], target, 12, GREEDY)[0]
    with ThreadPoolExecutor(1) as pool:
        other = lambda: pool.submit(regrSampling, [[4, 5]], target, 3, GREEDY)  # noqa: E731

        def callback(number, tokens, guessed):
            others.append(other())
            others[-1].exception()  # It is waited for.
            if breaks:
                raise KeyError

        with pytest.raises(KeyError) if breaks else nullcontext() as error:
            assert regrSampling([[1, 2, 3]], target, 12, GREEDY, callback=callback)[0] == alone
        for call in others:
            with refused("is writing another text in another thread: give each call models of its own"):
                call.result()
        assert len(others) == (1 if breaks else 12) and bool(error) == breaks
        assert len(other().result()[0][0]) == 3


ENDS = {3, 17, 40}  # Tokens that end a text: texts have many lengths.
TEXTS = 8
PROMPTS = [[(7 * i + j) % 60 for j in range(1 + 5 * i % 9)] for i in range(TEXTS)]


@functools.cache
def models(engine=False):
    """{role: model}."""
    target, draft, mid = (helpers.tiny(seed=seed, layers=1, sharpness=2.0) for seed in (0, 0, 1))
    noise = torch.Generator().manual_seed(5)
    for weight in draft.model.parameters():  # A draft that is often right.
        weight.data += 0.02 * torch.randn(weight.shape, generator=noise)
    roles = {"target": target, "draft": draft, "mid": mid}
    copies = {role: CachedModel(copy.deepcopy(m.model), m.vocabulary) for role, m in roles.items()}
    return {role: compiled(model) for role, model in copies.items()} if engine else roles


METHODS = ["target", "fixed", "block", "additive", "draftConfidence", "targetConfidence", "lookup", "lookupFirst"]
METHODS += ["cascade", "tree"]
DECODING = Decoding(gamma=3, gamma2=3, draft_threshold=0.3, target_threshold=0.2, tree="3,2", ngram=1)


def written(method, batch, models, sampling=FREE, texts=range(TEXTS)):
    options = {"max_len": 24, "sampling": sampling, "end_of_text": lambda text, token: token in ENDS, "batch": batch}
    prompts, generators = zip(*((PROMPTS[i], torch.Generator().manual_seed(i)) for i in texts))
    return build([method], models, DECODING)[method](prompts, generator=generators, **options)


PENALISED = Sampling(1.0, 0, 1.0, repetition_penalty=1.3)


@pytest.mark.parametrize("engine", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method, sampling", [*((name, FREE) for name in METHODS), ("fixed", PENALISED)])
def test_a_text_is_the_same_at_every_batch_size(method, sampling, engine):
    """Also if it is decoded without the others, some of whose prompts are longer."""
    alone = [written(method, 1, models(engine), sampling, [text])[0][0] for text in range(TEXTS)]
    assert len({len(text) for text in alone}) > 3  # Rows end at different times.
    for batch in (3, None):
        texts, records = written(method, batch, models(engine), sampling)
        assert texts == alone and (method == "target" or any(sum(record.drafted) for record in records))
        assert [record.tokens for record in records] == list(map(len, texts))
        assert all(record.ttft > 0 for record in records)


def test_waiting_does_not_count_as_time_to_the_first_token():
    _, records = written("target", 1, models(), texts=range(4))
    assert records[0].begun == 0 and all(a.times[-1] <= b.begun < b.times[0] for a, b in zip(records, records[1:]))
    assert all(record.seconds == record.times[-1] - record.begun for record in records)


def test_a_row_that_reads_its_predecessors_slots_is_caught():
    right, _ = written("fixed", 3, models())
    wrong, _ = written("fixed", 3, models() | {"target": PredecessorTarget(models()["target"])})
    assert wrong[:3] == right[:3] and wrong != right


def test_seeds_that_belong_to_rows_are_caught(monkeypatch):
    """The mistake that invites itself: the generator of a row, not of its text."""
    honest = Rows.uniform

    def by_row(self, counts, *args, **named):
        numbers, self.numbers = self.numbers, list(range(self.size))
        try:
            return honest(self, counts, *args, **named)
        finally:
            self.numbers = numbers

    right, _ = written("target", 3, models())
    monkeypatch.setattr(Rows, "uniform", by_row)
    assert written("target", 3, models())[0] != right


# Rows.


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "opt"])
def test_the_context_may_be_filled_to_its_last_token(family):
    """Guesses past a row's end must not index past a learned position table, nor disturb what is committed."""
    target = helpers.tiny(family, context=32)
    prompts = [[5, 9, 2, 7] * 3, [11]]  # one row ends long before the other
    tokens, _ = specSampling(prompts, target, ModelDrafter(helpers.tiny(family, context=32)), 20, 6, GREEDY)
    assert tokens == [regrSampling([p], target, 20, GREEDY)[0][0] for p in prompts]


def test_what_cannot_work_is_refused_before_work():
    target, draft = helpers.tiny(seed=0), helpers.tiny(seed=1, layers=1)
    drafter, before = ModelDrafter(draft), (target.forwards, draft.forwards)
    with pytest.raises(ValueError, match="generators"):
        regrSampling(PROMPTS, target, 9, generator=[torch.Generator()])
    for match, call in {
        "1 row or more": lambda: written("target", 0, models()),
        "empty": lambda: specSampling([[1], []], target, drafter),
        "prompt is": lambda: regrSampling([], target),
        "gamma": lambda: specSampling([[1]], target, drafter, 10, 0),
        "maxLen": lambda: regrSampling([[1]], target, 0),
        "maxLen must be a whole": lambda: regrSampling([[1]], target, 9.0),
        "vocabulary": lambda: regrSampling([[61]], target, 10),
        "token ids, and": lambda: regrSampling([[1.9, 2]], target, 10),
        "token ids, and end": lambda: regrSampling(["12"], target, 10),
        "is an id or several": lambda: regrSampling([[1]], target, 10, end_of_text=[[1]]),
        "exceed the context": lambda: regrSampling([[1] * 100], target, 29),
    }.items():
        with refused(match):
            call()
    with refused("vocabularies of 60 and 61 tokens differ"):
        specSampling([[1]], target, ModelDrafter(helpers.tiny(seed=1, vocabulary=60)), 9)
    with refused("vocabularies of 60 and 61 tokens differ"):
        perplexities([1, 2], target, helpers.tiny(seed=1, vocabulary=60))
    short = ModelDrafter(helpers.tiny(seed=1, context=64))
    with refused("gpt_neox-1"):
        specSampling([[1] * 30], target, short, 40)
    assert (target.forwards, draft.forwards) == before
    token = regrSampling([[1]], target, 10, GREEDY)[0][0][0]
    for end in iter([token]), torch.tensor(token), np.int64(token), {token}:
        assert regrSampling([[1]], target, 10, GREEDY, end_of_text=end)[0] == [[token]]


# Figures.


def queue(method, repeat, throughput):
    return {"method": method, "repeat": repeat, "batch": 2, "texts": 3, "throughput": throughput}


def test_throughput_and_speed_up_are_of_queues_and_the_rest_of_texts():
    texts = [measurement(method, 0, repeat, 7.0, ttft=0.5) for method in ("target", "fast") for repeat in (0, 1)]
    queues = [queue("target", 0, 10.0), queue("fast", 1, 90.0), queue("fast", 0, 30.0), queue("target", 1, 45.0)]
    target, fast = summarize(texts, queues=queues)
    assert (fast["throughput"], fast["speedup"]) == ((60, 30, 90), (2.5, 2, 3)) and target["throughput"][0] == 27.5
    assert fast["ttft"][0] == 0.5 and fast["runs"] == 2
    assert summarize(texts, queues=queues[:2])[1]["speedup"][0] != 9  # Other repeats are no pair.
    common = {"mode": "compare", "promptLen": 8}
    other = [text | {"kind": "speed", "mode": "compare", "promptLen": 9} for text in texts]
    lines = [x | {"kind": kind} | common for kind, of in (("speed", texts), ("queue", queues)) for x in of]
    (axes,) = figures.draw_speed([*lines, *other]).axes
    assert [bar.get_width() for bar in axes.patches] == [row["throughput"].middle for row in (target, fast)]
    assert "queues of 2 texts at a time, prompts of 8 tokens" in axes.get_title(loc="left")


@pytest.mark.parametrize("method", ["target", "fixed"])
def test_a_beginning_ends_where_it_should_with_every_size_and_a_cache_as_large_as_ever(method):
    target, sizes = helpers.tiny(), []
    forward, sampler = target.forward, build([method], models() | {"target": target}, DECODING)[method]
    target.forward = lambda tokens, *rest, **named: sizes.append(len(tokens)) or forward(tokens, *rest, **named)
    for batch, lengths in (4, [9, 6, 3, 3]), (1, [3]):
        texts, _ = sampler([[5, 9, 2]] * batch, max_len=40, end_of_text=ends_after(3, batch), batch=batch)
        assert list(map(len, texts)) == lengths and target.cache.capacity == 43
    assert method == "fixed" or list(dict.fromkeys(sizes)) == [4, 2, 1]


def test_methods_take_turns_and_each_text_has_its_own_seed():
    prompts, calls = [[1], [2, 3], [4]], []
    timed = timed_stand_ins("AB", calls, prompts=prompts, batch=2, warm_up=1)
    longest, whole = ([[2, 3], [1]], 2), (prompts, 2)
    timed_calls = [
        call
        for _, queue in timed
        for call in ((queue["method"], *longest, speed.WARM), (queue["method"], *whole, None))
    ]
    assert calls == [("A", *longest, None), ("B", *longest, None), *timed_calls]
    texts, first = next(of for of in timed if of[1]["method"] == "A")
    counts = {"tokens": 15, "seconds": 4.0, "tokens_per_round": 2.0, "drafted_per_round": 3.0}
    assert first == queue("A", 0, 15 / 4) | counts
    assert [(t["prompt"], t["ttft"], t["tpot"], t["seconds"], t["batch"]) for t in texts] == [
        (i, 0.5, 1.5 / 4, 2.0, 2) for i in range(3)
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
    for repeat, of_repeat in enumerate((queues[:3], queues[3:])):  # The order in each is drawn.
        assert {(q["method"], q["repeat"]) for q in of_repeat} == {(method, repeat) for method in methods}
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


def test_a_batch_of_more_rows_than_prompts_is_refused(run, flags, capsys):
    assert run("--batch 3 --speed", code=2) == []
    one_line(capsys, "--batch 3 needs at least 3 prompts, and there are 2; raise --sentences")
    assert run("--batch 3 --speed --prompt a", base=prompted(flags), code=2) == []
    one_line(capsys, "there are 1; give more, or a smaller --batch")


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


def test_compiling_beside_generate_and_a_draft_with_another_tokenizer_take_more(flags, monkeypatch):
    """transformers' own methods keep the weights that compiling packs anew; a text has more tokens in the draft's."""
    taken, roles = [], ("draft", "target")
    monkeypatch.setattr(loaded, "choose_devices", lambda *given: taken.append(given[7]))
    for compiles, method in itertools.product([[], ["--compile"]], ["fixed", "generate"]):
        inputs = load_inputs(parse([*flags, "--compare", method, *compiles]))
        inputs.check_memory("float32")
    draft, target = (loading.weight_bytes(inputs.folders[role], torch.float32) for role in roles)
    assert taken == [0, draft] * 3 + [draft, 2 * draft + target]
    inputs.slots = 40
    sizes = {
        role: cache_bytes(loading.read_config(inputs.folders[role]), inputs.slots, torch.float32) for role in roles
    }
    assert inputs.caches("float32") == {"cpu": sizes["draft"] + sizes["target"]}
    inputs.settings = replace(inputs.settings, decoding=Decoding(translation=object()))
    assert inputs.caches("float32") == {"cpu": GROWTH * sizes["draft"] + sizes["target"]}


# Losslessness.


def test_lossless_decodes_a_queue_and_plants_its_mistake(cli, flags, tmp_path, monkeypatch):
    batches, reserve, queues, prefill = [], CachedModel.reserve, [], PredecessorTarget.prefill
    monkeypatch.setattr(CachedModel, "reserve", lambda self, *sizes: batches.append(sizes[0]) or reserve(self, *sizes))
    spy = lambda self, rows: queues.append((len(rows.prompts), rows.batch)) or prefill(self, rows)  # noqa: E731
    monkeypatch.setattr(PredecessorTarget, "prefill", spy)
    few_mistakes(monkeypatch, "predecessor's slots", "replace from p")
    arguments = ["--lossless", "--tokens", "48", "--maxLen", "6", "--batch", "3", "--dtype", "bfloat16"]
    without = prompted(flags, "--repeats")
    assert cli.main([*without, *arguments, "--out", str(tmp_path)]) in (0, 1)  # So few tokens need not be enough.
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
    texts, _ = regrSampling(PROMPTS[:5], target, 6, FREE)
    whole, parts = (logits_as_written(target, 2, PROMPTS[:5], texts, batch) for batch in (None, 2))
    for logits, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(logits, other, atol=1e-4, rtol=1e-4)
