"""What flags mean together, beside what is refused (test_flags.py)."""

import pytest
from engine.graphs import Plan
from methods.selection import plan_graphs

from experiments import flags, settings
from methods import catalogue
from methods.catalogue import Method, build, choose, choose_lossless, repeatable
from methods.samplers import Decoding


def planned(argv):
    """`plan_graphs` of the methods that these flags name."""
    found = settings.parse(argv)
    penalised = found.sampling.repetition_penalty != 1
    return plan_graphs(found.measuring.names, found.decoding, penalised, "sweep" in found.measuring.groups)


@pytest.mark.parametrize(
    ("argv", "graphs"),
    [
        (["--speed"], {"target": ({5}, {1}, 1), "draft": (set(), {1, 4}, 2)}),
        (["--speed", "--gamma", "7"], {"target": ({8}, {1}, 1), "draft": (set(), {1, 7}, 2)}),
        (["--lossless"], {"target": ({5}, set(), 1), "draft": (set(), {4}, 2)}),
        (["--compare", "target"], {"target": (set(), {1}, 1)}),
        (["--speed", "--repetition_penalty", "1.2"], {"target": ({1, 5}, {1}, 1), "draft": ({1, 2}, {1, 4}, 2)}),
        (["--contrastive"], {"target": ({1, 5}, {1}, 1), "draft": ({1, 5}, {4}, 2)}),
        (
            ["--compare", "cascade", "--gamma1", "3"],
            {"target": ({5}, {1}, 1), "mid": ({5}, set(), 1), "draft": (set(), {3}, 2)},
        ),
        (["--sweep"], {"target": ({2, 3, 4, 5, 7, 11}, {1}, 1), "draft": (set(), {1, 2, 3, 4, 6}, 2)}),
        (["--compare", "lookup"], {"target": ({2, 3, 4, 5, 7, 11}, {1}, 1)}),
        (["--compare", "lookupFirst"], {"target": ({5}, {1}, 1), "draft": ({5}, {4}, 2)}),
        (["--compare", "fixed", "--lookupFirst"], {"target": ({5}, {1}, 1), "draft": ({5}, {4}, 2)}),
    ],
)
def test_the_graphs_that_the_flags_are_worth(argv, graphs):
    plans, _ = planned([*argv, "--target", "bundled-target", "--draft", "bundled-draft", "--mid", "bundled-mid"])
    assert {role: (plan.widths, plan.draws, plan.read) for role, plan in plans.items()} == graphs


@pytest.mark.parametrize(
    ("argv", "guesses"),
    [
        (["--speed"], {4}),
        (["--compare", "block", "--gamma", "7"], {7}),
        (["--speed", "--draftLength", "targetConfidence"], {4}),
        (["--speed", "--draftLength", "costAware"], {1, 2, 3, 4, 6, 10}),
        (["--compare", "costAware,block", "--gamma", "7"], {1, 2, 3, 4, 6, 7}),
        (["--speed", "--draftLength", "costAware", "--gamma", "2", "--draft", "lookup"], set()),
        (["--speed", "--draft", "lookup"], set()),
        (["--speed", "--lookupFirst"], {4}),
        (["--speed", "--repetition_penalty", "1.2"], set()),
        (["--compare", "target"], set()),
        (["--compare", "cascade"], set()),
        (["--sweep"], set()),
    ],
)
def test_the_guesses_that_are_one_graph_with_their_scoring(argv, guesses):
    _, found = planned([*argv, *([] if "lookup" in argv else ["--draft", "bundled-draft", "--mid", "bundled-mid"])])
    assert found == guesses


def test_gamma_is_for_the_chains_beside_a_tree():
    plans, rounds = planned(["--compare", "block,tree", "--tree", "2,1", "--gamma", "3", "--draft", "bundled-draft"])
    assert plans["target"].widths == {4} and plans["target"].nodes == {5} and rounds == {3}


def test_a_method_is_one_entry_of_the_catalogue(monkeypatch):
    """Nothing else knows the methods by name: one more entry, and flags, help and graphs have it."""
    toy = Method(
        "toy",
        "an example of a method",
        lambda models, decoding, wrap: models["target"],
        needs=("draft",),
        graphs=lambda decoding: {"target": Plan(frozenset({decoding.gamma or 17}))},
        rounds=lambda decoding: frozenset({17}),
        lossless=True,
        seeded=lambda decoding: decoding.verification != "block",
        modes=("speed",),
    )
    monkeypatch.setitem(catalogue.METHODS, "toy", toy)
    models = ["--target", "t", "--draft", "d"]
    assert settings.parse([*models, "--compare", "toy"]).measuring.groups == {"compare": ["target", "toy"]}
    assert settings.parse([*models, "--lossless", "toy"]).measuring.groups == {"lossless": ["toy"]}
    assert settings.parse([*models, "--speed"]).measuring.groups["speed"][-1] == "toy"
    assert "toy" in choose("all", {"draft"}) and "toy" in choose_lossless("all", {"draft"})
    assert "toy" not in choose("all", ())
    helps = {action.dest: action.help for action in flags.parser()._actions}
    assert "toy (an example of a method)" in helps["compare"] and "toy" in helps["lossless"]
    assert plan_graphs(["toy"], Decoding(), False, False) == ({"target": Plan(frozenset({17}))}, frozenset({17}))
    assert repeatable("toy", Decoding()) and not repeatable("toy", Decoding(verification="block"))
    assert build(["toy"], {"target": 42}, Decoding()) == {"toy": 42}
