"""What flags mean together, beside what is refused (test_flags.py)."""

import pytest
from conftest import refused

from experiments import flags, settings
from methods import catalogue
from methods.catalogue import Method, Role, build, choose, repeatable
from methods.samplers import Decoding


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
    monkeypatch.setattr(flags, "parser", flags.parser.__wrapped__)
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
