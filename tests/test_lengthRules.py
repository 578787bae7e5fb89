"""What each rule chooses, from what it is told."""

import itertools
import math
import random
from types import SimpleNamespace

import helpers
import pytest
import torch
from conftest import refused
from test_specSampling import FREE, PROMPTS, near

from decoding.drafter import Fixed
from decoding.lengthRules import MENU, Acceptance, Additive, CostAware, DraftConfidence, Search, TargetConfidence
from decoding.tree import Tree
from methods.drafters import ModelDrafter
from specSampling import specSampling


def rows(count):
    """What a rule must know of a new batch."""
    numbers, left = list(range(count)), [1 << 20] * count
    return SimpleNamespace(prompts=[[1]] * count, numbers=numbers, size=count, left=left, in_callbacks=0.0)


def tell(rule, drafted, accepted, p_token=()):
    sure = rule.sure(torch.tensor(p_token)).tolist() if p_token else []
    rule.learn(dict(enumerate(drafted)), dict(enumerate(accepted)), dict(enumerate(sure)))


def test_additive_grows_by_one_and_halves_row_by_row():
    rule = Additive(4)
    rule.begin(rows(2))
    assert rule.gammas() == [4, 4]
    for _ in range(5):
        tell(rule, rule.gammas(), [rule.gammas()[0], 0])
    assert rule.gammas() == [9, 4]
    tell(rule, [9, 4], [8, 4])
    assert rule.gammas() == [4, 5]
    tell(rule, [0, 5], [0, 5])  # Lookup found nothing to guess.
    assert rule.gammas() == [4, 6]
    rule.begin(rows(1))
    assert rule.gammas() == [4]


def test_target_confidence_guesses_again_once_the_target_is_sure():
    rule = TargetConfidence(3, 0.5)
    rule.begin(rows(2))
    tell(rule, [3, 3], [1, 0], [0.49, 0.5])
    assert rule.gammas() == [0, 3]
    tell(rule, [0, 3], [0, 2], [0.9, 0.1])
    assert rule.gammas() == [3, 0]


def test_draft_confidence_stops_after_the_first_unsure_guess_of_each_row(monkeypatch):
    target, said, stop = helpers.tiny(), [], DraftConfidence.stop
    monkeypatch.setattr(DraftConfidence, "stop", lambda rule, q_x: said.append(q_x.item()) or stop(rule, q_x))
    draft, generator = ModelDrafter(near(target)), torch.Generator().manual_seed(0)
    _, records = specSampling(PROMPTS[:1], target, draft, 60, DraftConfidence(5, 0.1), FREE, generator=generator)
    lengths = [n for n in records[0].drafted[1:] if n]
    assert len(set(lengths)) > 2 and sum(lengths) == len(said)
    for n in lengths[:-1]:  # the last round has no more room
        guesses, said = said[:n], said[n:]
        assert all(q >= 0.1 for q in guesses[:-1]) and (guesses[-1] < 0.1 or n == 5)


def simulate(rule, alphas, cost, tokens=4000, seed=0, drift=0.0):
    """Tokens per second of a rule in a world where the guesses of row i pass with `alphas[i]`, and a round takes
    `cost(guesses of all rows)`. Where the machine drifts, it is now faster, now slower, the first round after another
    length takes half as much again, and some rounds take twenty times as long on the clock."""
    rng, clock, before, made, seconds = random.Random(seed), [0.0], None, 0, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.lengthRules.time", SimpleNamespace(perf_counter=lambda: clock[0]))
        rule.begin(rows(len(alphas)))
        while made < tokens:
            gammas, path = rule.gammas(), [0]
            while children := rule.shape().children[path[-1]]:  # In a tree, what is accepted are first children.
                path.append(children[0])
            accepted = [next((i for i in range(n) if rng.random() >= alpha), n) for n, alpha in zip(gammas, alphas)]
            takes = cost(sum(gammas)) * (1.5 if drift and gammas != before else 1)
            made, seconds, before = made + sum(accepted) + len(alphas), seconds + takes, gammas
            noise = rng.uniform(0.95, 1.1) * (20 if drift and rng.random() < 0.003 else 1)
            clock[0] += takes * (1 + drift * math.sin(made / 200)) * noise
            rule.learn(dict(enumerate(gammas)), {row: path[count] for row, count in enumerate(accepted)}, {})
    return made / seconds


def takes(price, plain=1.0):
    """The cost of a round: 1 + price * guesses of all rows, without guesses `plain`."""
    return lambda guesses: 1 + price * guesses if guesses else plain


class Plain(Fixed):
    def gammas(self):
        return [0] * self.rows.size


ALPHAS_AND_PRICES = (0.0, 0.1), (0.2, 0.3), (0.5, 0.05), (0.65, 0.15), (0.8, 0.05), (0.9, 0.02), (0.95, 0.3)


@pytest.mark.parametrize(
    "rows_, alpha, price",
    [*((1, *world) for world in ALPHAS_AND_PRICES), (8, 0.7, 0.05), (32, 0.7, 0.05), (32, 0.7, 0.01), (16, 0.7, 0.2)],
)
def test_cost_aware_is_near_the_best_length_wherever_that_is(rows_, alpha, price):
    """Guesses of one row are cheap; those of 32 cost more than they bring."""
    world, how = ([alpha] * rows_, takes(price, 0.95)), {"drift": 0.5} if rows_ == 1 else {"tokens": 20_000}
    plain, *fixed = (simulate(rule, *world, **how) for rule in (Plain(), *map(Fixed, range(1, 11))))
    assert simulate(CostAware(10), *world, **how) > 0.93 * max(plain, *fixed)  # with the rounds that tried others
    assert alpha or plain > 1.05 * max(fixed)  # In this world guessing does not pay.


def test_cost_aware_follows_a_change():
    rule = CostAware(8)
    simulate(rule, [0.9], takes(0.05), drift=0.5)
    before = rule.search.best.size
    simulate(rule, [0.1], takes(0.3), drift=0.5)
    assert before > 4 and rule.search.best.size <= 1


@pytest.mark.parametrize("alpha, price, depth", [(1.0, 0.001, max(tree.depth for tree in MENU)), (0.0, 1.0, 0)])
def test_auto_finds_the_shape_with_the_most_tokens_per_second(alpha, price, depth):
    """Guesses are free and right: the deepest shape. They cost as much as plain decoding and are wrong: no guesses."""
    rule = CostAware(MENU)
    simulate(rule, [alpha], takes(price))
    assert rule.search.best.depth == depth


def test_auto_forgets_a_busy_start():
    """While the machine was busy, every shape but plain decoding seemed slow."""
    rounds, rule = itertools.count(1), CostAware(MENU)

    def cost(guesses):
        return (30.0 if next(rounds) < 20 and guesses else 1.0) * (1 + 0.01 * guesses)

    simulate(rule, [1.0], cost, 80)
    assert rule.search.best.size == 0
    simulate(rule, [1.0], cost, 40_000)
    assert rule.search.best.depth > 2


def test_cost_aware_times_whole_rounds_and_only_those_after_one_of_their_length(monkeypatch):
    """By a clock that drafting and scoring move, and what is done with the tokens, which is no part of a round."""
    clock, learnt = [0.0], []
    for module in "lengthRules", "rows":
        monkeypatch.setattr(f"decoding.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(Search, "learn", lambda costs, kind, seconds: learnt.append((kind.size, seconds)))

    def slower(seconds, work):
        return lambda *given, **options: clock.append(clock.pop() + seconds) or work(*given, **options)

    target, drafter = helpers.tiny(), ModelDrafter(helpers.tiny(seed=1))
    drafter.draft, target.forward = slower(1.0, drafter.draft), slower(10.0, target.forward)
    specSampling(PROMPTS[:1], target, drafter, 20, CostAware(4), callback=slower(100.0, lambda *given: None))
    assert [size for size, _ in learnt[:3]] == [0, 1, 2] and {seconds for _, seconds in learnt} == {11.0}


def test_rows_that_fail_guess_less_than_rows_that_pass():
    world, rule = ([0.9, 0.9, 0.1, 0.1] * 2, takes(0.05), 20_000), CostAware(8)
    ours = simulate(rule, *world)
    gammas = rule.gammas()
    assert min(gammas[0::4] + gammas[1::4]) > max(gammas[2::4] + gammas[3::4])
    assert ours > 1.05 * max(simulate(Fixed(gamma), *world) for gamma in range(1, 9))


def test_another_batch_begins_with_what_one_learnt_and_finds_its_own_length():
    """What pays for 8 rows costs more than it brings for 32."""
    rule = CostAware(8)
    simulate(rule, [0.9] * 8, takes(0.01), 20_000)
    assert rule.search_for(4).best == rule.searches[8].best == rule.search_for(4).opening[0]
    rule = CostAware(8)
    simulate(rule, [0.7] * 8, takes(0.05), 20_000)
    assert rule.search.best.size > 0
    assert simulate(rule, [0.7] * 32, takes(0.05), 20_000) > 0.93 * 32
    assert rule.search.best.size == 0


@pytest.mark.parametrize("slower", [3.0, 0.3])
def test_a_machine_that_gets_slower_changes_all_lengths_by_the_rounds_of_one(slower):
    chains = [Tree.chain(0), Tree.chain(4)]
    search, (plain, four) = Search(chains), (1.0, 2.08)
    for tree, seconds in list(zip(chains, (plain, four))) * 30:
        search.learn(tree, seconds)
    for i in range(350):
        search.learn(chains[1], four * slower ** min(i / 300, 1))
    assert search.seconds(chains[1]) == pytest.approx(slower * four, rel=0.03)
    assert search.seconds(chains[0]) == pytest.approx(slower * plain, rel=0.25)


def test_a_clock_that_stands_still_gives_a_time():
    search = Search([Tree.chain(0)])
    search.learn(Tree.chain(0), 0.0)
    assert search.seconds(Tree.chain(0)) > 0


def test_a_length_that_is_far_too_long_is_never_tried():
    rule, tried = CostAware(500), set()
    rule.begin(rows(1))
    for _ in range(1000):
        length = rule.gammas()[0]
        tried.add(length)
        rule.learn({0: length}, {0: 0}, {})
    assert 0 in tried and max(tried) <= 10


def test_what_makes_no_sense_is_refused():
    for rule in Fixed, Additive, DraftConfidence, TargetConfidence, CostAware:
        for length in 0, 4.0:
            with refused("gamma must be a whole number of at least 1"):
                rule(length)
    for rule in DraftConfidence, TargetConfidence:
        for threshold in -0.1, 1.1, float("nan"):
            with refused("threshold", "[0, 1]"):
                rule(4, threshold)


# What trees are expected to give, and how acceptance is learnt from rounds.


def test_expected_tokens():
    table = [[0.6, 0.2, 0.1], [0.5, 0.1], [0.4]]
    assert Tree.of("2/1,2").expected_tokens(table) == pytest.approx(1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * (0.5 + 0.1))
    assert Tree.chain(3).expected_tokens(table) == pytest.approx(1 + 0.6 + 0.3 + 0.12)
    assert Tree.of("3").expected_tokens(table) == pytest.approx(1.9)


def test_acceptance_is_learnt_from_rounds():
    """Rounds in which a first sibling is accepted 6 times of 10, a second twice, at each depth alike."""
    source, learnt, tree = random.Random(0), Acceptance(), Tree.of("3,2,1")
    for _ in range(2000):
        node = 0
        while tree.children[node]:
            rank = source.choices((0, 1, None), (6, 2, 2))[0]
            if rank is None or rank >= len(tree.children[node]):
                break
            node = tree.children[node][rank]
        learnt.add(tree, {0: node}, {0: 3})
    table = learnt.table(5, 4)
    assert [len(row) for row in table] == [4] * 5
    for at in range(2):
        assert table[at][:2] == pytest.approx([0.6, 0.2], abs=0.06)
    assert table[2][0] == pytest.approx(0.6, abs=0.08) and table[0][2] < 0.02
    assert table[3] == pytest.approx(table[4]) and table[2][1] == pytest.approx(table[1][1])  # What no round has shown.
    assert all(sum(row) <= 1 for row in table)


def test_before_the_first_round_there_is_hope():
    table = Acceptance().table(3, 3)
    assert table[0] == table[2] and table[0][0] == Acceptance.HOPE
    assert table[0][0] > table[0][1] > table[0][2] > 0 and sum(table[0]) < 1


def test_a_guess_that_was_not_asked_for_does_not_count():
    learnt, tree = Acceptance(), Tree.of("2,1")
    learnt.add(tree, dict(enumerate([1, 0, 2, 1])), dict.fromkeys(range(4), 1))
    assert learnt.reached == {(0, 0): 4.0, (0, 1): 4.0} and learnt.accepted == {(0, 0): 2.0, (0, 1): 1.0}
    learnt.add(tree, {0: 3}, {0: 2})  # the first child, and its child
    assert learnt.reached[0, 0] == pytest.approx(5, abs=0.01) and learnt.accepted[0, 0] == pytest.approx(3, abs=0.01)
    assert learnt.reached[1, 0] == learnt.accepted[1, 0] == 1
