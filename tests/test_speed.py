"""Figures of times and of texts computed by hand, and the order in which methods take their turns. Nothing here depends
on a clock."""

import gc
import math
import random

import numpy as np
import pytest
import torch

import PPL
from decoding.rows import Record
from experiments import speed
from experiments.intervals import Range, interval, speedup, summarize
from experiments.measure import FIGURES, distinct, diversity_figures, entropy, repetition
from experiments.speed import STALLED, in_turns, quiet, time_steps, time_texts
from inputs.models import load_model, load_tokenizer

NAN = float("nan")


def measurement(method="target", prompt=0, repeat=0, throughput=10.0, **changes):
    figures = {"method": method, "prompt": prompt, "repeat": repeat, "throughput": throughput, "seconds": 1.0}
    figures |= {"ttft": 0.5, "tpot": 0.1, "report_tpot": 0.2, "tokens_per_round": 1.0, "acceptance_by_position": ()}
    return figures | {"rounds": 1, "drafted": 0, "accepted": 0, "tokens": 9} | changes


def test_fewer_than_four_values_have_a_range_and_no_interval_one_has_none_and_unknown_ones_are_left_out():
    assert interval([3.0, 1.0, 7.0]) == Range(3, 1, 7) and isinstance(interval([3.0, 1.0]), Range)
    assert interval([1.0, 2.0, 6.0], np.mean) == (3, 1, 6)
    few = interval([NAN, None, *range(1, 4)])  # None is nan in results.jsonl
    assert isinstance(few, Range) and few == (2, 1, 3)
    middle, low, high = figures = interval([1.0, 2.0, 3.0, 5.0, 4.0], np.mean)
    assert middle == 3 and 1 < low < 3 < high < 5 and not isinstance(figures, Range)
    assert interval([0.1, 3.0, 3.0, 3.5]).low == 0 > interval([-0.1, 3.0, 3.0, 3.5]).low
    assert interval([3.0] * 5) == interval([NAN, 3.0, None, 3.0]) == (3.0, 3.0, 3.0)
    middle, *ends = interval([3.0])
    assert middle == 3 and all(map(math.isnan, (*ends, *interval([NAN, None]), *interval([]))))


def test_the_interval_holds_the_median_and_narrows_with_more_values():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).double().numpy() + 10
    few, many = interval(values[:20]), interval(values)
    assert few == interval(values[:20])  # the resampling is seeded
    assert few[0] == pytest.approx(sum(sorted(values[:20])[9:11]) / 2)
    for middle, low, high in (few, many):
        assert min(values) <= low < middle < high <= max(values)
    assert many[2] - many[1] < few[2] - few[1]
    assert many[1] < 10 < many[2]


def test_ratios_are_paired_by_prompt_and_repeat():
    texts = [(0, 0, 20.0), (1, 0, 90.0), (0, 1, 25.0), (1, 1, 7.0)]  # The last one's partner was never measured.
    rows = [measurement("fast", *text) for text in texts]
    rows += [measurement("target", *text) for text in ((1, 0, 30.0), (0, 0, 10.0), (0, 1, 100.0))]
    assert speedup(rows, "fast", "target") == (2.0625, 0.25, 3.0)  # of 3 and the median of 2 and 0.25
    assert speedup(rows, "target", "target") == (1.0, 1.0, 1.0)
    assert all(map(math.isnan, speedup(rows, "fast", "nobody")))


def test_summary_of_measurements_made_by_hand():
    rows = []
    for prompt, (alone, together) in enumerate([(10.0, 15.0), (20.0, 50.0), (30.0, 30.0)]):
        rows.append(measurement("target", prompt, throughput=alone, ttft=prompt + 1.0, tpot=NAN))
        tested = [((4, 3), (3, 1)), ((6, 6),), ((2, 0), (0, 0))][prompt]
        counts = {"tokens_per_round": prompt + 2.0, "acceptance_by_position": tested}
        rows.append(measurement("speculative", prompt, throughput=together, **counts))
    target, speculative = summarize(rows)
    assert (target["method"], target["runs"], speculative["method"]) == ("target", 3, "speculative")
    assert target["throughput"][0] == 20 and target["ttft"][0] == 2 and math.isnan(target["tpot"][0])
    assert target["speedup"] == (1.0, 1.0, 1.0)
    assert speculative["throughput"][0] == 30 and speculative["tokens_per_round"][0] == 3
    assert speculative["speedup"][0] == 1.5  # of 1.5, 2.5 and 1; the ratio of the medians is 1.5 as well, so:
    assert summarize(rows[:4])[1]["speedup"][0] == 2.0  # of 1.5 and 2.5; the ratio of the medians would be 2.17
    assert speculative["alpha"] == pytest.approx((3 + 6 + 0 + 1) / (4 + 6 + 2 + 3))
    assert speculative["acceptance_by_position"] == pytest.approx([9 / 12, 1 / 3])
    assert math.isnan(target["alpha"]) and target["acceptance_by_position"] == []
    assert [row["method"] for row in summarize(rows[::-1])] == ["target", "speculative"]
    names = [row["method"] for row in summarize([measurement(f"gamma {n}") for n in (10, 2, 1)] + rows[:1])]
    assert names == ["target", "gamma 1", "gamma 2", "gamma 10"]  # in whatever order they were timed
    (alone,) = summarize([measurement("draft")])  # without the baseline there is no speed-up
    assert alone["throughput"][0] == 10 and math.isnan(alone["speedup"][0])


def timed_stand_ins(names, calls, **more):
    """`time_texts` of stand-ins for samplers, which note their calls (name, prompts, batch, first), draw their tokens
    from the generators given to them, and write a text in two seconds; the next begins after one."""

    def method(name):
        def run(prompts, generators, batch, first=None):
            calls.append((name, prompts, batch, first))
            counts = {"committed": [1, 3, 1], "drafted": [0, 3, 3], "accepted": [0, 3, 0]}
            records = [Record([i + 0.5, i + 1.0, i + 2.0], begun=i, **counts) for i in range(len(prompts))]
            return [torch.randint(0, 1000, (5,), generator=each).tolist() for each in generators], records

        return run

    settings = {"prompts": [[1], [2, 3]], "repeats": 2, "seed": 7, "device": "cpu"} | more
    return list(time_texts({name: method(name) for name in names}, **settings))


def play(names, calls, **more):
    """The figures of their texts."""
    return [text for (text,), _ in timed_stand_ins(names, calls, **more)]


def test_methods_take_turns_on_each_prompt_after_the_warm_up():
    calls = []
    lines = play("ABC", calls)
    assert calls[:6] == [(name, [[2, 3]], 1, None) for name in "ABCABC"]  # warm-up, after the longest prompt
    # Each timed text comes right after an untimed beginning of the same method: no row pays for what ran before it.
    assert calls[6:] == [
        call
        for line, prompt in zip(lines, [[1]] * 3 + [[2, 3]] * 3 + [[1]] * 3 + [[2, 3]] * 3)
        for call in ((line["method"], [prompt], 1, speed.WARM), (line["method"], [prompt], 1, None))
    ]
    assert [(m["prompt"], m["repeat"]) for m in lines[::3]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {m["method"] for m in lines[:3]} == {*"ABC"}


def test_a_machine_that_slows_down_in_the_course_of_each_prompt_slows_no_method_more_than_another():
    """Planted: one fixed order makes the last of five methods look slower by the whole of it."""

    def middle(orders):
        ratios = {name: [] for name in "ABCDE"}
        for order in orders:
            for name in order:
                ratios[name].append((1 + 0.1 * order.index(name)) / (1 + 0.1 * order.index("A")))
        return {name: interval(values) for name, values in ratios.items()}

    calls = {name: lambda turn, warming: None for name in "ABCDE"}
    random.seed(0)
    names = [name for name, *_ in in_turns(calls, range(40), "cpu", lambda result: [])]
    assert names != [name for name, *_ in in_turns(calls, range(40), "cpu", lambda result: [])]  # another process
    first = {next(in_turns(calls, [0], "cpu", lambda result: []))[0] for _ in range(40)}
    assert len(first) > 1  # of a process: a record may have a single turn of each
    drawn = middle(names[turn : turn + 5] for turn in range(0, 200, 5))
    fixed = middle("ABCDE" for _ in range(40))
    assert all(low <= 1 <= high for _, low, high in drawn.values())
    assert not all(low <= 1 <= high for _, low, high in fixed.values())


def test_a_text_in_which_the_machine_stalled_is_timed_again(monkeypatch):
    monkeypatch.setattr(speed, "STALLED", STALLED)
    steps = iter([1.0, 1.0, 1.0, 9.0, 1.0, 9.0, 9.0, 9.0])

    def method(prompts, generators, batch, first=None):
        # In the first round a draft reads the prompt, which is no stall.
        times = np.cumsum([0.5, 20.0, 1.0, 1.0, 1.0, next(steps) if first is None else 1.0]).tolist()
        return [[1] * 6], [Record(times=times, committed=[1] * 6, drafted=[0] * 6, accepted=[0] * 6)]

    lines = [text for (text,), _ in time_texts({"A": method}, [[1]], 5, 0, "cpu", warm_up=0)]
    assert [line["stalled"] for line in lines] == [0, 0, 0, 1, 2]
    assert [line["seconds"] for line in lines] == [24.5, 24.5, 24.5, 24.5, 32.5]  # the last never came back in time


def test_steps_are_timed_once_a_turn_and_one_that_times_itself_says_how_long():
    calls = []
    seconds = time_steps({"A": lambda: calls.append("A"), "B": lambda: 7.0}, range(5), "cpu")
    assert seconds["B"] == [7.0] * 5 and len(seconds["A"]) == 5 and len(calls) == 5
    assert all(0 < took < 1 for took in seconds["A"])


def test_intervals_cover_what_processes_prompts_and_repeats_vary_about():
    """Of values with as much spread between processes as between prompts and repeats, in a simulation. Planted: to
    take repeats for independent."""
    rng, covered, without = np.random.default_rng(0), 0, 0
    kinds = np.indices((5, 4, 2)).reshape(3, -1)
    for _ in range(150):
        values = sum(rng.normal(size=shape) for shape in ((5, 1, 1), (1, 4, 1), (5, 4, 2))).ravel()
        _, low, high = interval(values, clusters=list(zip(*kinds[:2])))
        _, naive_low, naive_high = interval(values)
        covered += low <= 0 <= high
        without += naive_low <= 0 <= naive_high
    assert covered >= 0.93 * 150 and without < 0.7 * 150


def test_values_of_few_prompts_or_processes_have_a_range_however_many_repeats():
    values = [float(x) for x in range(12)]
    for processes, prompts in (1, 2), (5, 2), (2, 6), (3, 4):
        assert isinstance(interval(values, clusters=[(x % processes, x % prompts) for x in range(12)]), Range)
    assert not isinstance(interval(values, clusters=[(0, x % 4) for x in range(12)]), Range)
    assert interval(values, clusters=[(0, 0)] * 12) == interval(values)


def test_a_methods_tokens_do_not_depend_on_which_others_run():
    def drawn(names, **more):
        return {(m["prompt"], m["repeat"]): m["sha256"] for m in play(names, [], **more) if m["method"] == "B"}

    assert drawn("ABC") == drawn("B") == drawn("CB", warm_up=0)
    assert len(set(drawn("B").values())) == 4  # but each prompt and repeat has its own
    assert drawn("B", seed=8) != drawn("B")


def test_a_measurement_holds_the_records_figures():
    line = play("A", [])[3]
    assert line["stalled"] == 0
    assert (line["prompt_tokens"], line["tokens"], line["ttft"], line["tpot"]) == (2, 5, 0.5, 1.5 / 4)
    assert (line["throughput"], line["report_tpot"]) == (2.5, 0.4)
    assert (line["tokens_per_round"], line["rounds"], line["drafted"], line["accepted"]) == (2.0, 2, 6, 3)
    assert line["acceptance_by_position"] == [(2, 1), (1, 1), (1, 1)]


def test_no_garbage_is_collected_inside_a_timed_stretch():
    def method(prompts, generators, batch, first=None):
        timed.append(not gc.isenabled())
        return [[1]], [Record(times=[0.5], committed=[1], drafted=[0], accepted=[0])]

    timed = []
    list(time_texts({"A": method}, [[1]], 2, 0, "cpu"))
    assert timed == [False, False] + [True] * 4 and gc.isenabled()
    with pytest.raises(ZeroDivisionError), quiet("cpu"):
        raise ZeroDivisionError
    assert gc.isenabled()


# Diversity.

TEXT = "the cat and the dog and the cat"  # the 3, cat 2, and 2, dog 1


def test_ngrams_are_counted_and_a_text_too_short_for_one_has_none():
    assert entropy(TEXT, 1) == pytest.approx(3 / 8 * math.log2(8 / 3) + 2 * 2 / 8 * 2 + 1 / 8 * 3)
    assert entropy(TEXT, 2) == pytest.approx(2 * 2 / 7 * math.log2(7 / 2) + 3 / 7 * math.log2(7))
    assert entropy("a b c d", 1) == entropy("a\n b\t\u3000c  d", 1) == 2 and entropy("a a a", 1) == 0
    assert distinct(TEXT, 1) == 4 / 8 and distinct(TEXT, 2) == 5 / 7
    repeated = [repetition(text) for text in ("a b c d e", "a b c d a b c d", "x x x x x x")]
    assert repeated == pytest.approx([0, 1 / 5, 2 / 3])
    assert (entropy("a", 2), distinct("a", 2), repetition("a b c"), entropy("", 1)) == (0, 0, 0, 0)


def test_diversity_of_a_continuation(pair_folder):
    tokenizer = load_tokenizer(pair_folder / "target")
    target = load_model(pair_folder / "target", tokenizer, "float32", "cpu")
    prompt, tokens = (tokenizer(text)["input_ids"] for text in ("The bell and the", " bell and the lamp"))
    values = diversity_figures(prompt, tokens, tokenizer, target)
    assert tuple(values) == FIGURES
    assert values["distinct_1"] == distinct("The bell and the bell and the lamp", 1) == 5 / 8
    whole, head = (
        len(ids) * math.log(PPL.calculate_ppl_regr(ids, target)) * (1 - 1 / len(ids))
        for ids in (prompt + tokens, prompt)
    )
    assert values["perplexity"] == pytest.approx(math.exp((whole - head) / len(tokens)), rel=1e-5)
