"""The sweep over gamma, and the map of batch and gamma: what is timed, and what theory says of it. Theory at the
paper's values, and the overlaps of p and q that texts visit, against those of a verification that is watched, and by
hand."""

import itertools
import random
from functools import partial

import helpers
import pytest
import torch
from conftest import of_kind
from test_specSampling import PROMPTS, near
from test_speed import measurement

from decoding.drafter import Fixed, Guesses
from decoding.lengthRules import Acceptance, DraftConfidence
from decoding.tree import Tree
from decoding.treeRules import TREE_RULES
from decoding.verification import token_rule
from experiments import measure, sweep, theory
from experiments.speed import time_texts
from experiments.theory import expectations, expected_chain, expected_in_text, improvement, overlap, overlaps_of
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.treeSampling import TreeDrafter, treeSampling
from report import figures
from report.runTables import batch_table, sweep_table, sweep_tables
from specSampling import specSampling
from utils import Sampling, probabilities, residual

DRAW, PENALISED = Sampling(1.0, 0, 1.0), Sampling(1.0, 0, 1.0, repetition_penalty=1.3)
CONDITIONS = {"dtype": "float32", "promptLen": 4, "mode": "sweep", "maxLen": 9, "gamma": 4}
CONDITIONS |= {"temperature": 1.0, "top_p": 1.0}

# Over gamma.


def test_predictions_are_theorys_of_what_was_measured():
    lines = [measurement("draft", prompt, tpot=0.02 + 0.01 * prompt) for prompt in (0, 1)]
    tested = {"target": (10.0, []), "gamma 1": (15.0, [(10, 6)]), "gamma 2": (17.0, [(10, 8), (8, 2)])}
    for drafted, (name, (speed, counts)) in enumerate(tested.items()):
        more = {"drafted": drafted, "acceptance_by_position": counts, "tokens": 9999}
        lines += [measurement(name, prompt, 0, speed, **more) for prompt in (0, 1)]
    costs = {"scoring": [1.0, 1.1, 1.3], "drafting": 0.25, "overlap_by_position": [[10, 8, 5.0], [4, 4, 1.0]]}
    found = theory.predict(lines, costs)
    alpha, c = (6 + 8 + 2) / 28, 0.25
    assert (found["alpha"], found["c"]) == (pytest.approx(alpha), pytest.approx(c))

    def tokens(gamma):
        return sum(alpha**i for i in range(gamma + 1))

    for gamma, row in enumerate(found["rows"], 1):
        assert row["paper"] == pytest.approx(tokens(gamma) / (1 + gamma * c))
        assert row["theory"] == pytest.approx([1.5, 1.625][gamma - 1] / ([1.1, 1.3][gamma - 1] + gamma * c), rel=1e-3)
        assert row["speedup"][0] == pytest.approx([1.5, 1.7][gamma - 1])
    assert found["best"] == max(range(9), key=lambda gamma: tokens(gamma) / (1 + gamma * c)) == 2
    assert [row["expected"] for row in found["rows"]] == pytest.approx([1.5, 1.625], rel=1e-3)
    # Lookup finds a match in half of the rounds, and never a second guess: no draft model, and fewer tokens to score.
    found = [line | {"drafted": 0.5} for line in lines if line["method"] != "draft"]
    _, row = theory.predict(found, costs | {"drafting": 0.0, "overlap_by_position": [[10, 5, 2.0]]})["rows"]
    assert (row["expected"], row["theory"]) == pytest.approx((1.2, 1.2 / 1.05), rel=1e-3)


def test_texts_of_a_single_token_have_dashes_in_the_table_of_a_run_that_was_stopped():
    nothing = {"tpot": None, "acceptance_by_position": [], "dtype": "float32", "prompt_tokens": 3}
    lines = [measurement(name, **nothing) for name in ("draft", "target", "gamma 1")]
    costs = {"scoring": [1.0, 1.1, 1.3], "drafting": 0.3, "overlap_by_position": []}
    found = theory.predict(lines, costs)
    assert found["alpha"] != found["alpha"] and found["best"] == 0
    _, row = sweep_table({"flags": {}, "models": {}}, lines, found).rows
    assert [str(cell) for cell in row] == ["1", "1.00", "10.0", "1.00", "1.00", "1.00", *"--", "1.00", "1.00"]
    assert theory.predict(lines[:2], costs)["rows"] == []
    given = CONDITIONS | {"kind": "costs", "of": "sweep", "alpha": float("nan")} | costs
    sweep_lines = [CONDITIONS | {"kind": "speed", "repeatable": True} | line for line in lines]
    (table,) = sweep_tables({"flags": {}, "models": {}}, [given, *sweep_lines])
    assert "alpha: - by counting, - as the mean" in table.notes and "by it, gamma" not in table.notes


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
    found = theory.predict_batches(LINES)
    one, eight = ({row["gamma"]: row for row in found[batch]["rows"]} for batch in (1, 8))
    assert one["1"]["speedup"][0] == pytest.approx((1.5 + 1.4) / 2) and eight["1"]["speedup"][0] == 0.5
    assert one["1"]["theory"] == pytest.approx(1.5 / (0.3 + 1.2))
    assert one["costAware"]["theory"] == pytest.approx(1.4 / (0.5 * 0.3 + 1.1))  # half a guess a round
    assert found[1]["best"] == "gamma 1" and found[8]["best"] == "target"
    assert found[1]["controller"][0] == pytest.approx((135 / 150 + 1) / 2)
    assert found[8]["controller"][0] == pytest.approx(0.99)


@pytest.mark.filterwarnings("error")
def test_the_map_of_a_run_that_was_stopped_shows_what_there_is():
    for lines in (LINES[:1], LINES[:3], LINES[:8]):
        figures.plt.close(figures.draw_batches(lines))
        assert [row[0] for row in batch_table(lines).rows] == ["1"] + ["8"] * (len(lines) == 8)


@pytest.mark.parametrize("mode", ["sweep", "sweep batch", "compare fixed --batch 2"])
def test_a_run_that_is_stopped_before_plain_decoding_was_timed_is_shown(run, monkeypatch, mode):
    def stopped(*options, **more):
        yield from itertools.islice(time_texts(*options, **more), 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "time_texts", stopped)
    monkeypatch.setattr(measure, "BATCHES", (1, 3))
    monkeypatch.setattr(random, "sample", lambda names, count: names[::-1])
    timed = [line["method"] for line in run(f"--{mode}", code=130) if line["kind"] in ("speed", "queue")]
    assert timed and "target" not in timed


@pytest.mark.parametrize("draft, repeats", [("", 1), ("--draft lookup", 2)])
def test_every_cell_is_measured_and_writes_whole_texts(run, request, monkeypatch, draft, repeats):
    if not draft:
        request.getfixturevalue("figure_files")
    for name, value in {"measure.BATCHES": (1, 3), "sweep.BATCH_GAMMAS": (1, 2)}.items():
        monkeypatch.setattr(f"experiments.{name}", value)
    lines = run(f"--sweep batch --repeats {repeats} {draft}")
    queues, costs = of_kind(lines, "queue"), of_kind(lines, "costs")
    cells = sorted((line["batch"], line["method"], line["repeat"]) for line in queues)
    methods = sorted(["target", "gamma 1", "gamma 2", "costAware"])
    assert cells == [(batch, name, repeat) for batch in (1, 3) for name in methods for repeat in range(repeats)]
    assert [row["gamma"] for row in theory.predict_batches(lines)[3]["rows"]] == ["costAware", "1", "2"]
    assert all(line["tokens"] == 8 * line["texts"] for line in queues) and [c["batch"] for c in costs] == [1, 3]
    assert all(c["scoring"][0] == 1 and len(c["scoring"]) == 3 and (c["drafting"] > 0) != bool(draft) for c in costs)


# Theory, and the acceptance it follows from.


def test_theory_has_the_papers_values_and_an_overlap_is_1_with_itself_and_0_where_nothing_is_shared():
    assert improvement(0.8, 5, 0.0) == pytest.approx(3.69, abs=5e-3)  # the paper's table 1 counts operations: at c = 0
    assert improvement(1.0, 4, 0.25) == pytest.approx(2.5)
    assert improvement(0.0, 3, 0.1) == pytest.approx(1 / 1.3)
    assert expected_chain([]) == 1 and expected_chain([0.5, 0.0, 1.0]) == 1.5
    assert expected_chain([0.5, 0.8, 0.25]) == pytest.approx(1 + 0.5 + 0.4 + 0.1)
    assert expected_chain([0.7] * 6) == pytest.approx((1 - 0.7**7) / (1 - 0.7))  # equation 1
    assert expected_in_text([0.7] * 6, 6, 3000) == pytest.approx((1 - 0.7**7) / (1 - 0.7), rel=2e-3)
    assert expected_in_text([1.0] * 4, 4, 7) == 7 / 2  # a round of 5 tokens, then one of 2
    assert expected_in_text([0.5], 4, 2) == pytest.approx(2 / 1.5) and expected_in_text([], 3, 5) == 1
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.25, 0.75])
    assert [overlap(p, p).item(), overlap(p, q).item(), overlap(p, p.flip(0)).item()] == [1, 0.25, 0.5]


def test_rounds_have_the_overlaps_of_their_contexts():
    """Of three guesses the first was accepted and the second not; the next round had none. In the last the text ended
    at the first of three accepted guesses."""
    p, q = torch.rand(4, 61).softmax(-1), torch.rand(3, 61).softmax(-1)
    paths = [
        theory.chances_on_path(Guesses(torch.tensor([[3, 5, 5]])[:, :count], q[None, :count]), p[: count + 1], last)
        for count, last in ((3, 1), (0, 0), (3, 3))
    ]
    found = theory.by_position(zip(paths, [3, 0, 1], [1, 0, 1]))
    overlaps = overlap(p[:3], q)
    assert [position[:2] for position in found] == [[3, 2], [2, 1]]
    assert [position[2] for position in found] == pytest.approx([2 * overlaps[0].item(), overlaps[1].item()])
    assert expectations(found) == {
        "overlap": pytest.approx((2 * overlaps[0] + overlaps[1]).item() / 3),
        "tokens": pytest.approx((1 + 2 * overlaps[0] / 3 * (1 + overlaps[1] / 2)).item()),
    }


def chain(target, drafter):
    return partial(specSampling, target=target, drafter=drafter, gamma=Fixed(4))


def watched_alpha(prompts, target, drafter, max_len):
    """The mean overlap of p and q in the contexts of tested guesses, seen by a verification rule."""
    watched = []

    def rule(p, q, drafts, u):
        accepted, token = token_rule(p, q, drafts, u)
        watched.extend(overlap(p[0, : q.shape[1]], q[0])[: int(accepted[0]) + 1].tolist())
        return accepted, token

    rule.waits = True  # int() synchronises with the host.
    overlaps_of(partial(chain(target, drafter), verify=rule), prompts, target.device, DRAW, max_len, 0)
    return sum(watched) / len(watched)


def test_overlaps_are_those_that_verification_meets():
    target = helpers.tiny()
    draft = ModelDrafter(near(target, noise=0.3))
    found = overlaps_of(chain(target, draft), PROMPTS, "cpu", DRAW, 25, 0)
    mean = watched_alpha(PROMPTS, target, draft, 25)
    assert expectations(found["overlap_by_position"])["overlap"] == pytest.approx(mean, abs=1e-5)
    costs = sweep.sweep_costs(helpers.SINGLE_INPUTS, PROMPTS, target, draft, token_rule, DRAW, 40)
    assert 0 < costs["alpha"] == expectations(costs["overlap_by_position"])["overlap"]
    assert len(costs["overlap_by_position"]) == 10
    assert costs["scoring"][0] == 1 and len(costs["scoring"]) == 11 and all(v > 0 for v in costs["scoring"])


def test_costs_are_measured_within_the_context():
    """Learned positions end there. A draft with another tokenizer reads tokens that it knows."""
    target, draft = helpers.tiny("gpt2", context=32), helpers.tiny("gpt2", 1, vocabulary=31, context=32)
    draft.vocabulary = target.vocabulary
    costs = sweep.step_costs([50] * 30, target, ModelDrafter(draft), PENALISED, 10)
    assert len(costs["scoring"]) == 11 and costs["drafting"] > 0


def test_one_context_has_its_own_overlap_and_where_nothing_is_guessed_it_is_unknown():
    target, draft = helpers.tiny(), helpers.tiny(seed=1)
    sampler = chain(target, ModelDrafter(draft))
    nothing = overlaps_of(sampler, [[5, 9]], "cpu", DRAW, 2, 0)  # two tokens leave no room for a guess
    assert nothing == {"overlap_by_position": [], "rounds": 1, "accepted": 0}
    assert all(value != value for value in expectations([]).values())
    (tokens,), _ = sampler([[5, 9]], max_len=3, sampling=DRAW, generator=torch.Generator().manual_seed(0))
    p, q = (probabilities(m.score(torch.tensor([[5, 9, tokens[0]]]))[0, -1], DRAW) for m in (target, draft))
    ((reached, tested, share),) = overlaps_of(sampler, [[5, 9]], "cpu", DRAW, 3, 0)["overlap_by_position"]
    assert (reached, tested, share) == (2, 1, pytest.approx(overlap(p, q).item(), abs=1e-6))


def mod12(prompts):
    return [[token % 12 for token in prompt] for prompt in prompts]


@pytest.mark.parametrize("name", ["model", "unsure", "lookup", "both"])
def test_tokens_a_round_are_those_expected(name):
    """And as many guesses pass, of those tested, as the overlap says."""
    target = helpers.tiny(vocabulary=12, sharpness=2.0)
    draft, lookup = ModelDrafter(near(target, noise=0.3)), LookupDrafter(12, worth=0)
    drafter = {"lookup": lookup, "both": LookupFirst(LookupDrafter(12, 2, worth=0), draft)}.get(name, draft)
    length = DraftConfidence(4, 0.4) if name == "unsure" else Fixed(4)
    method = partial(specSampling, target=target, drafter=drafter, gamma=length)
    generator = torch.Generator().manual_seed(0)
    texts = theory.rounds_along(method, mod12(PROMPTS) * 3, max_len=60, sampling=DRAW, generator=generator)
    found = expectations(theory.by_position(one for text in texts for one in text))
    _, records = method(mod12(PROMPTS) * 15, max_len=60, sampling=DRAW, generator=generator)
    tokens = 1 + sum(sum(record.accepted) for record in records) / sum(len(record.times) - 1 for record in records)
    tested, passed = (sum(column) for column in zip(*(pair for r in records for pair in r.acceptance_by_position)))
    assert found["tokens"] == pytest.approx(tokens, rel=0.1) and tokens > 1.1
    assert found["overlap"] == pytest.approx(passed / tested, abs=0.05)


def test_the_share_of_each_sibling_is_what_it_adds_on_average():
    """Against the verification of every pair of siblings that may be drawn."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5, 0.3, 0.2, 0.0])
    found, wanted = torch.zeros(2), torch.zeros(2)
    for x, y in itertools.permutations(range(3), 2):
        second = q.clone()
        second[x] = 0
        second /= second.sum()
        first = (p[x] / q[x]).clamp(max=1)
        left = residual(p, q)
        drawn = q[x] * second[y]
        wanted += drawn * torch.stack([first, (1 - first) * (left[y] / second[y]).clamp(max=1)])
        found += drawn * torch.tensor(theory.chances(p, torch.stack([q, second]), torch.tensor([x, y])))
    torch.testing.assert_close(found, wanted)
    assert found[0] == pytest.approx(float(overlap(p, q)))


@pytest.mark.parametrize(
    "rule, shape",
    [("topDown", "3,2,1"), ("topDown", None), ("traversal", "3,2,1"), *[("topDown", "2/2,1")] * helpers.FULL],
)
def test_tokens_a_round_with_trees_are_those_expected(rule, shape):
    """The traversal rule accepts more: it judges whole paths. The controller of shapes expects the same."""
    target = helpers.tiny(vocabulary=12, sharpness=2.0)
    drafter = TreeDrafter(near(target, noise=0.3))
    choice = Tree.of(shape) if shape else helpers.InTurn(*map(Tree.of, ("1,1", "3,1")))
    method = partial(treeSampling, target=target, drafter=drafter, tree=choice, verify=TREE_RULES[rule])
    generator = torch.Generator().manual_seed(0)
    texts = theory.rounds_along(method, mod12(PROMPTS) * 20, max_len=20, sampling=DRAW, generator=generator)
    rounds = [one for text in texts for one in text]
    found = theory.by_position(rounds)
    tokens = expectations(found)["tokens"]
    ratio = (1 + sum(accepted for *_, accepted in rounds) / len(rounds)) / tokens
    assert ratio == pytest.approx(1, abs=0.05) if rule == "topDown" else 1 < ratio < 1.3
    if shape:
        acceptance = Acceptance()
        for depth, (_, *pairs) in enumerate(found):
            for rank, (tested, share) in enumerate(zip(pairs[::2], pairs[1::2])):
                acceptance.reached[depth, rank], acceptance.accepted[depth, rank] = tested, share
        assert Tree.of(shape).expected_tokens(acceptance.table(3, 3)) == pytest.approx(tokens, rel=0.1)
