"""What flags mean together, beside what is refused (test_flags.py)."""

import pytest

from experiments.measure import settings


@pytest.mark.parametrize(
    ("argv", "graphs"),
    [
        (["--speed"], {"target": ({5}, {(1, 1)}), "draft": (set(), {(2, 1), (2, 4)})}),
        (["--speed", "--gamma", "7"], {"target": ({8}, {(1, 1)}), "draft": (set(), {(2, 1), (2, 7)})}),
        (["--compare", "target"], {"target": ({5}, {(1, 1)})}),
        (["--speed", "--repetition_penalty", "1.2"], {"target": ({1, 5}, {(1, 1)}), "draft": ({1, 2}, None)}),
        (["--contrastive"], {"target": ({1, 5}, {(1, 1)}), "draft": ({1, 5}, {(2, 4)})}),
        (["--compare", "cascade", "--gamma1", "3"], {"target": ({5}, {(1, 1)}), "mid": ({5}, set())}),
    ],
)
def test_the_graphs_that_the_flags_are_worth(argv, graphs):
    args = settings.parse([*argv, "--target", "bundled-target", "--draft", "bundled-draft", "--mid", "bundled-mid"])
    found = settings.graphs(args, {name for names in settings.groups_of(args).values() for name in names})
    for role, (widths, runs) in graphs.items():
        assert found[role][0] == widths and runs in (None, found[role][1])


@pytest.mark.parametrize(
    ("argv", "guesses"),
    [
        (["--speed"], 4),
        (["--compare", "block", "--gamma", "7"], 7),
        (["--speed", "--draftLength", "targetConfidence"], 4),
        (["--speed", "--draftLength", "costAware"], 0),
        (["--speed", "--draft", "lookup"], 0),
        (["--speed", "--repetition_penalty", "1.2"], 0),
        (["--compare", "target"], 0),
        (["--compare", "cascade"], 0),
        (["--sweep"], 0),
    ],
)
def test_the_guesses_that_are_one_graph_with_their_scoring(argv, guesses):
    args = settings.parse([*argv, *([] if "lookup" in argv else ["--draft", "bundled-draft", "--mid", "bundled-mid"])])
    names = {name for names in settings.groups_of(args).values() for name in names}
    assert settings.guesses_at_once(args, names) == guesses
