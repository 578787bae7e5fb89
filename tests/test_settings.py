"""What flags mean together, beside what is refused (test_flags.py)."""

from functools import partial

import helpers
import pytest
from conftest import refused

from decoding.lengthRules import Additive
from decoding.trees.tree import Tree
from engine.steps import Block, Draw, Growth, Nodes, Prompt
from experiments import flags, loading, settings
from methods import catalogue
from methods.catalogue import Method, Role, build, choose, repeatable
from methods.drafters import ModelDrafter
from methods.rehearsal import compile_samplers
from methods.samplers import Decoding
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling

ROLES = ["--target", "bundled-target", "--draft", "bundled-draft", "--mid", "bundled-mid"]


def rehearsed(argv):
    """{role: model} of the methods that these flags name, which know the shapes of all steps they were asked for."""
    parsed = settings.parse(argv)
    roles = ["target", *({role.model for role in parsed.models.roles} if parsed.measuring.names != {"target"} else ())]
    models = {role: helpers.Rehearsing(helpers.tiny(seed=i, layers=1).model) for i, role in enumerate(roles)}
    loading.make_all_graphs(models, parsed, [5, 9, 2, 11])
    return models


@pytest.mark.parametrize(
    ("argv", "graphs"),
    [
        (["--speed"], {"target": ({5}, {1}, 1), "draft": (set(), {1, 4}, 2)}),
        (["--speed", "--gamma", "7"], {"target": ({8}, {1}, 1), "draft": (set(), {1, 6}, 2)}),
        (["--lossless"], {"target": ({5}, {1}, 1), "draft": (set(), {4}, 2)}),
        (["--compare", "target"], {"target": (set(), {1}, 1)}),
        (["--speed", "--repetition_penalty", "1.2"], {"target": ({1, 5}, set()), "draft": ({1, 2}, set())}),
        (["--contrastive"], {"target": ({1, 5}, {1}, 1), "draft": ({1, 5}, {4}, 2)}),
        (
            ["--compare", "cascade", "--gamma1", "3"],
            {"target": ({5}, {1}, 1), "mid": ({4, 5}, set()), "draft": (set(), {3}, 2)},
        ),
        (["--sweep"], {"target": ({2, 3, 4, 5, 7, 11}, {1}, 1), "draft": (set(), {1, 2, 3, 4, 6}, 2)}),
        (["--compare", "lookup"], {"target": ({2, 3, 4, 5, 7, 11}, {1}, 1)}),
        (["--compare", "lookupFirst"], {"target": ({5}, {1}, 1), "draft": (set(), {4}, 2)}),
        (["--compare", "fixed", "--lookupFirst"], {"target": ({5}, {1}, 1), "draft": (set(), {4}, 2)}),
    ],
)
def test_the_graphs_that_the_flags_are_worth(argv, graphs):
    models = rehearsed([*argv, *ROLES])
    made = {
        role: (set(*model.widths.values()), set(*model.counts.values()), *model.reads.values())
        for role, model in models.items()
        if model.shapes
    }
    assert made == graphs


def test_samplers_of_ones_own_are_rehearsed_as_those_of_the_flags():
    """With a number as gamma, with the default, with a tree, and with a rule that begins above the usual numbers."""

    def widths(sampler, drafter=ModelDrafter, **options):
        target, draft = (helpers.Rehearsing(helpers.tiny(seed=seed, layers=1).model) for seed in (0, 1))
        sample = partial(sampler, target=target, drafter=drafter(draft), **options)
        assert compile_samplers([sample], [target, draft], [5, 9, 2, 11]) is not None
        return target.widths.get(1, []), {shape.count for shape in target.shapes if isinstance(shape, Nodes)}

    assert widths(specSampling, gamma=3) == ([4], set()) and widths(specSampling) == ([5], set())
    assert widths(treeSampling, TreeDrafter, tree=Tree.of("2,1")) == ([], {5})
    assert widths(treeSampling, TreeDrafter)[1] == {Tree.of("3,2,1").size + 1}
    assert widths(specSampling, gamma=Additive(12))[0] == [2, 3, 4, 5, 7, 11, 13]


def test_gamma_is_for_the_chains_beside_a_tree():
    models = rehearsed(["--compare", "block,tree", "--tree", "2,1", "--gamma", "3", "--draft", "bundled-draft"])
    target, draft = models["target"], models["draft"]
    assert target.shapes == {Prompt(1), Block(1, 4), Draw(1, 1, 1), Nodes(1, 5)}
    assert draft.shapes == {Prompt(1), Draw(1, 2, 3), Growth(1, 2, Tree.of("2,1"))}


def test_a_method_is_one_entry_of_the_catalogue(monkeypatch):
    """Nothing else knows the methods by name: one more entry, and flags and help have it."""
    toy = Method(
        "toy",
        "an example of a method",
        lambda models, decoding: models["target"],
        needs=(Role.DRAFT,),
        seeded=lambda decoding: decoding.verification != "block",
        modes=("speed",),
    )
    monkeypatch.setitem(catalogue.METHODS, "toy", toy)
    models = ["--target", "t", "--draft", "d"]
    assert settings.parse([*models, "--compare", "toy"]).measuring.groups == {"compare": ["target", "toy"]}
    assert settings.parse([*models, "--lossless", "toy"]).measuring.groups == {"lossless": ["toy"]}
    assert settings.parse([*models, "--speed"]).measuring.groups["speed"][-1] == "toy"
    assert "toy" in choose("all", {"draft"}) and "toy" in choose("all", {"draft"}, "lossless")
    assert "toy" not in choose("all", ())
    helps = {action.dest: action.help for action in flags.parser()._actions}
    assert "toy (an example of a method)" in helps["compare"] and "toy" in helps["lossless"]
    assert repeatable("toy", Decoding()) and not repeatable("toy", Decoding(verification="block"))
    assert build(["toy"], {"target": 42}, Decoding()) == {"toy": 42}


@pytest.mark.parametrize(
    "argv, flag",
    [
        ("--sweep --gamma 3", "gamma"),
        ("--compare fixed --draftLength additive", "draftLength"),
        ("--speedNew --draftLength fixed", "draftLength"),
        ("--diversity --sentences 1 --dataset wikitext", "sentences"),
        ("--diversity --dataset wikitext", "dataset"),
        ("--speed --prompt x --promptLen 12", "promptLen"),
        ("--audit setup.py --books 3", "books"),
        ("--speed --plausibility 0.1", "plausibility"),
        ("--speed --draftThreshold 0.3", "draftThreshold"),
        ("--speed --gamma1 3", "gamma1"),
        ("--speed --ngram 2", "ngram"),
        ("--speed --treeRule topDown", "treeRule"),
        ("--speed --tree 2,1 --gamma 3", "gamma"),
        ("--compare tree --treeRule=topDown", "treeRule"),
        ("--speed --draft lookup --lookupFirst", "lookupFirst"),
        ("--speed --draft lookup --draftTop_p 0.5", "draftTop_p"),
        ("--ppl --verification block", "verification"),
        ("--speed --tokens 3", "tokens"),
        ("--ppl --batch 3", "batch"),
        ("--speed --draftBits 4", "draftBits"),
        ("--speed --writtenIn float32", "writtenIn"),
    ],
)
def test_a_flag_that_changes_nothing_is_refused(argv, flag, tmp_path):
    argv = argv.replace("setup.py", __file__).split()
    with refused(f"--{flag} "):
        settings.parse(argv)
    settings.parse(argv, again=True)  # A record names all flags.


@pytest.mark.parametrize(
    "argv",
    [
        "--speed --gamma 3 --verification block",
        "--sweep --verification block --ngram 2 --draft lookup",
        "--sweep --speed --gamma 3",
        "--speed --draftLength draftConfidence --draftThreshold 0.3",
        "--compare all --mid bundled-mid --draft bundled-draft --gamma1 4 --gamma2 3 --ngram 2 --plausibility 0.2",
        "--compare noCache,speculativeNoCache --gamma 3",
        "--speed --tree 2,1 --treeRule topDown",
        "--lossless self,head --draftTop_p 0.5 --draftBits 4",
        "--ppl --diversity --dataset wikitext --sentences 3",
        "--show --prompt x --gamma 3",
    ],
)
def test_a_flag_that_one_method_reads_is_taken(argv):
    settings.parse(argv.split())
