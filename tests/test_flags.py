"""Every flag of every script, given what it cannot be: one line, exit code 2; nothing loaded, fetched or written."""

import contextlib
import importlib
import io
import itertools
import os
import random
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from conftest import ROOT, refused

from experiments import flags
from experiments.flags import FLAGS, parser, read_flags
from experiments.settings import parse
from inputs.commandLine import Parser, as_command
from methods import catalogue
from methods.catalogue import METHODS, Method, Role, build, choose, repeatable
from methods.samplers import Decoding
from utils import UserError

# Wrong for every flag that takes a number, or one of several words.
SCRIBBLE = [" ", "x", "-", "nan", "inf", "-inf", "1e999", "\u0663", "\uff11", "1_0", "0x10", "1 2", "1,5", "None"]
SCRIBBLE += ["\udcff", "9" * 5000, "-" + "9" * 5000, "\ud83d\ude00", "two\nlines", "{}", "%s", "'", "1;", "\u22121"]


@dataclass
class Kind:
    """Values of a flag that are right, and that are wrong, beside ""; alone: wrong unless other flags are given."""

    right: Sequence[str] = ("x",)
    wrong: Sequence[str] = ()
    alone: Sequence[str] = ()


def whole(least, most=10**9):
    wrong = ["1.5", "1e3", str(least - 1), str(most + 1), str(2**63), str(10**30), str(-(10**30))]
    return Kind([str(least), str(most), f"+{least}", f"00{most}"], [*SCRIBBLE, *wrong])


def number(least, most):
    wrong = ["1e", "e1", ".", "infinity", repr(most * 1.001), str(10**400), "-0.001", "-1"]
    return Kind([repr(least or 0.0), str(most), f"{most:e}"], [*SCRIBBLE, *wrong])


def choice(words):
    return Kind(words, ["x", words[0] + " ", words[0].upper() + "X", "\u0660", *SCRIBBLE])


SWITCH = Kind((), ["=", "=1", "=x"])
DEVICE = Kind(
    ["cpu"], ["gpu", "cpu:1", "cpu:x", "meta", "hpu", "privateuseone", "cuda:x", "cuda:\u0663", "CPU", "\udcff"]
)
FILE = Kind(alone=["nowhere", ".", "x" * 5000])
TINY, NONE = ["1e-5", "1e-300"], ["0", "0.0", "1e-999"]

# What the declaration of a flag does not say of its values: another kind, or numbers that are wrong as well.
SPECIAL = {
    "test": {
        "--compare": Kind(["all", "block, target"], ["blok", "target,,block", "all,x", "block;", ","], ["cascade"]),
        "--sweep": SWITCH,
        "--lossless": Kind(["all", "block,target"], ["blok", "draft", "contrastive", "block,", ","], ["cascade"]),
        "--audit": FILE,
        "--rerun": Kind(wrong=["0", "1", "x", "\u0661", "9" * 5000, "\udcff"]),
        "--html": Kind(["page.html"], ["nowhere/page.html", ".", "/dev/null"]),
        "--device": DEVICE,
        "--draftDevice": replace(DEVICE, wrong=[*DEVICE.wrong, "auto"]),
        "--tree": Kind(["3,2,1,1", "3/2,1,0", "auto"], ["0", "3,0", "3/1,1", "9,9", "-1", "Auto", "1.5"]),
        "--draftTemperature": TINY,
        "--draftTop_p": NONE,
        "--amateurTemperature": ["0", *TINY],
        "--contrastiveTemperature": TINY,
        "--temperature": TINY,
        "--top_p": NONE,
        "--repetition_penalty": ["0", "0.0099"],
        "--dataset": Kind(["sample"], alone=["nowhere", "x" * 5000, "two\nlines"]),
        "--prompt": Kind(wrong=["\n", "\udcff"]),
        "--question": Kind(wrong=["\n\n", "\udcff"]),
        "--promptFile": FILE,
        "--prompts": Kind(alone=["nowhere", ".", "x" * 5000, "specbench"]),
        "--stride": ["1024"],  # no less than the window
        "--out": Kind(["new", "new/er"], [__file__, "/dev/null", "/dev/null/new", "x" * 5000]),
    },
    "downloadModel": {
        "models": Kind(["a/b"], ["x", "a/b/c", "../x", "a/..", "a b/c", "\u0663/\u0663", "https://a/b", *SCRIBBLE]),
        "--gguf": Kind(wrong=["nowhere.gguf", __file__]),
    },
    "downloadData": {"names": Kind(["wikitext"], alone=["x", "pg", *SCRIBBLE]), "--from": Kind(alone=["nowhere"])},
    "scripts.trainBundled": {
        "--texts": Kind(wrong=["nowhere", "nowhere:x", f"{__file__}:0", f"{__file__}:-1", f"{__file__}:x"]),
        "--minutes": ["0"],
        "--out": Kind(["."], ["nowhere", __file__, "\udcff", "x" * 5000]),
        "--device": DEVICE,
    },
}


def table(parser, script):
    """{flag: its kind} of a script's parser."""
    names = {(action.option_strings or [action.dest])[-1]: action for action in parser._actions}
    return {
        name: kind_of(action, SPECIAL[script].get(name, []))
        for name, action in names.items()
        if name not in ("--help", "--version")
    }


def kind_of(action, special):
    """What the declaration of a flag says is right and wrong, and what SPECIAL adds."""
    if isinstance(special, Kind):
        return special
    if action.nargs == 0:
        return SWITCH
    if action.choices:
        return choice([*map(str, action.choices)])
    limits = dict(getattr(action.type, "keywords", {}))
    kind = (whole if limits.pop("kind") is int else number)(**limits) if limits else Kind()
    return replace(kind, wrong=[*kind.wrong, *special])


# Flags without which a script stops for another reason, or says which models it takes.
BASE = {"test": ["--target", "t", "--draft", "d"], "scripts.trainBundled": ["--texts", __file__]}
# What each script may not touch before its flags are known to be right.
GUARDED = {
    "test": [
        "experiments.prepare.find_models",
        "experiments.prepare.load_tokenizer",
        "experiments.loading.load_model",
        "report.results.Results.append",
    ],
    "downloadModel": ["downloadModel.download_model", "downloadModel.print_folders"],
    "downloadData": ["downloadData.install_data", "inputs.hub.print_folders"],
    "scripts.trainBundled": [
        f"scripts.trainBundled.{name}" for name in ("ByteLevelBPETokenizer", "PreTrainedTokenizerFast", "train_model")
    ],
}


@dataclass
class Script:
    """A script, in an empty folder, whose models, downloads and sockets fail the test that reaches them."""

    name: str
    main: Callable
    parser: Parser
    table: dict

    def refuses(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert self.main([*BASE.get(self.name, []), *arguments]) == 2, arguments
        said = err.getvalue()
        script = f"{self.name}.py" if (ROOT / f"{self.name}.py").exists() else self.name.split(".")[-1]
        assert said.startswith(f"{script}: error: ") and said.count("\n") == 1 and said[-1] == "\n", said
        assert out.getvalue() == "" and os.listdir() == [], arguments


@pytest.fixture(scope="module", params=SPECIAL)
def script(request, cli, tmp_path_factory):
    name, parsers = request.param, []
    module = cli if name == "test" else importlib.import_module(name)

    def touched(*_, **__):
        pytest.fail("this was reached with a wrong flag")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Parser, "parse_args", lambda parser, _: parsers.append(parser) or sys.exit())
        module.main([])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp(name))
        patch.setattr(socket.socket, "connect", touched)
        for function in GUARDED[name]:
            patch.setattr(function, touched)
        yield Script(name, module.main, *parsers, table(*parsers, name))


def said(flag, value):
    """The arguments that give a flag this value; a positional one has no flag."""
    if value is None or value.startswith("="):
        return [flag + (value or "")]
    return [flag, value] if flag.startswith("-") else [value]


def test_what_the_table_calls_right_is_taken(script):
    assert SPECIAL[script.name].keys() <= script.table.keys()
    for flag, kind in script.table.items():
        for value in kind.right or [None]:
            script.parser.parse_args([*BASE.get(script.name, []), *said(flag, value)])


def test_every_wrong_value_of_every_flag_is_one_line(script):
    """A number and one of several words also where a right value of the same flag follows."""
    for flag, kind in script.table.items():
        for value in ["", *kind.wrong, *kind.alone]:
            script.refuses(*said(flag, value))
        if SCRIBBLE[0] in kind.wrong:
            script.refuses(*said(flag, ""), *said(flag, kind.right[0]))


def test_a_flag_without_its_value_and_an_unknown_one_are_one_line(script):
    for action in script.parser._actions:
        if action.option_strings and action.nargs in (None, "+"):
            script.refuses(action.option_strings[-1])
            script.refuses(action.option_strings[-1] + "x", "1")
    for unknown in "--unknown", "--gam", "-x", "--", "stray/", "\udcff", "--\u0663=1":
        script.refuses(unknown, "x")


@pytest.mark.parametrize("seed", range(60))
def test_one_wrong_value_among_right_flags_in_any_order_is_one_line(script, seed):
    draw = random.Random(seed)
    wrong, *others = draw.sample(sorted(script.table.keys() - {"models", "names"}), min(5, len(script.table) - 1))
    words = [said(flag, draw.choice(list(script.table[flag].right) or [None])) for flag in others]
    words.insert(draw.randint(0, len(words)), said(wrong, draw.choice(["", *script.table[wrong].wrong])))
    script.refuses(*itertools.chain(*words))


CLASHES = f"""
--speed 0 --ppl 0 | --rerun 1 --gamma 3 | --draft lookup --ppl | --draft lookup --contrastive
--draft lookup --sweep --diversity | --draft lookup --draftTemperature 0.5 | --draft lookup --draftTop_p 1
--draft lookup --lookupFirst | --draft self --draftDevice cpu | --draft self --mid m | --draft self --draftVocab 9
--draft self --diversity | --draft self --show --contrastive | --draft head | --target head | --target self
--head h --draft head --compare contrastive | --head h --draft head --compare speculativeNoCache | --target lookup
--draftBits 5 | --draftBits 5 --compare block | --draftVocab 9 --ppl | --draftVocab 9 --draft lookup
--draftVocab 9 --contrastive | --compare cascade | --compare mid | --compare tree --tree 2,1 --gamma 3
--tree auto --draftLength additive | --tree auto --sweep | --speedMulti | --speed 0 --draft lookup
--speed 0 --prompts sample | --show --steps | --steps --repetition_penalty 1.2 | --sweep batch --temperature 0 1
--sweep batch --promptLen 8 9 | --compare llama.cpp --texts . --promptLen 8 9 | --steps --promptLen 8 9
--show --promptLen 8 9 | --sweep --compare all --temperature 0.5 1 | --show --speed | --show --ppl | --show --sweep
--html x.html --compare all | --show --diversity | --show --speedMulti | --show --speedNew --contrastive
--mid lookup --speedMulti | --lossless --speed | --lossless --compare all | --audit {__file__} --lossless
--audit {__file__} --speed | --audit {__file__} --tokens 5 | --writtenIn float32 | --tokens 100 --speed
--prompt a --question b | --question a --question b | --prompt a --promptFile b | --prompt a --prompts sample
--question a --prompts sample | --promptFile a --prompts sample | --prompts sample --ppl
--prompts sample --speed --diversity | --prompts sample --lossless | --prompts sample --audit {__file__}
--prompts sample --show | --temperature 0.5 1 | --stride 64 --window 64 | --steps --batch 2
--ppl --window 64 --stride 512 | --show --out x | --chat --out x | --show --contrastive --top_p 0.5
--lossless --repeats 2 | --steps --repeats 2 | --steps --maxLen 9 | --steps --sentences 2
--steps --verification block | --steps --acceptance 0.5 | --audit {__file__} --draft d --verification block
--audit {__file__} --draft d --tree 2,1 --treeRule topDown | --audit {__file__} --temperature 0 --gamma 3
--audit {__file__} --temperature 0 --batch 3 | --diversity --temperature 0 --repeats 2
"""


@pytest.mark.parametrize("script", ["test"], indirect=True)
@pytest.mark.parametrize("clash", CLASHES.strip().replace("\n", " | ").split(" | "))
def test_flags_that_do_not_go_together_are_one_line(script, clash):
    script.refuses(*clash.split())


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("--maxLn 3", "--maxLen"),
        ("--MAXLEN=3", "--maxLen"),
        ("speed", "--speed"),
        ("--verification blok", "block"),
        ("--compare fixed,lokup", "lookup"),
        ("--compare llama.cpp:int3", "llama.cpp:int8"),
        ("--lossless costaware", "costAware"),
        ("--target bundled-trget --draft lookup", "bundled-target"),
        ("--target bundled-target --draft lokup", "lookup"),
        ("--target random:pythia-1.6b --draft lookup", "random:pythia-1.4b"),
        ("--dataset sampel", "sample"),
        ("--prompts specbnch", "specbench"),
    ],
)
def test_a_wrong_name_names_the_nearest_known_one(cli, wrong, near, capsys):
    assert cli.main(wrong.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith(f"; did you mean {near}?\n") and captured.err.count("\n") == 1
    assert not captured.out  # No line about models before the error.


@pytest.mark.parametrize("argv", ["--rerun 1 --seed 0", "--check --seed=0"])
def test_what_takes_no_other_flag_does_not_take_its_default_either(argv):
    with refused("leave out --seed"):
        read_flags(argv.split())


def test_a_name_unlike_all_others_names_none():
    with pytest.raises(UserError, check=lambda error: "did you mean" not in str(error)):
        read_flags(["--zzzz"])


def test_help_begins_with_the_ten_flags_that_most_people_need():
    _, first, *others = [part.split(":")[0] for part in parser().format_help().split("\n\n")[2:]]
    groups = {group.title: [action.dest for action in group._group_actions] for group in parser()._action_groups}
    assert first == "the flags that most people need first" and len(groups[first]) == 10
    assert groups[first][:2] == ["target", "draft"] and others == list(groups)[3:]
    assert sorted(name for title in [first, *others] for name in groups[title]) == sorted([*FLAGS, "version"])
    words = {word for name in METHODS for word in name.split(":")}
    assert all(re.search(rf"\b{re.escape(word)}\b", parser().format_help()) for word in words)


# What flags mean together, beside what is refused.


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
    assert parse([*models, "--compare", "toy"]).measuring.groups == {"compare": ["target", "toy"]}
    assert parse([*models, "--lossless", "toy"]).measuring.groups == {"lossless": ["toy"]}
    assert parse([*models, "--speed"]).measuring.groups["speed"][-1] == "toy"
    assert "toy" in choose("all", {"draft"}) and "toy" in choose("all", {"draft"}, "lossless")
    assert "toy" not in choose("all", ())
    helps = {action.dest: action.help for action in flags.parser()._actions}
    assert "toy (an example of a method)" in helps["compare"] and "toy" in helps["lossless"]
    assert repeatable("toy", Decoding()) and not repeatable("toy", Decoding(verification="block"))
    assert build(["toy"], {"target": 42}, Decoding()) == {"toy": 42}


USELESS = f"""
--sweep --gamma 3 | --compare fixed --draftLength additive | --speedNew --draftLength fixed | --diversity --sentences 1
--diversity --dataset wikitext | --speed --prompt x --promptLen 12 | --audit {__file__} --books 3
--audit {__file__} --maxLen 5 | --audit {__file__} --repeats 2 | --audit {__file__} --draft x --tree auto
--audit {__file__} --draftLength costAware
--speed --plausibility 0.1 | --speed --draftThreshold 0.3 | --speed --gamma1 3 | --speed --ngram 2
--speed --treeRule topDown | --speed --tree 2,1 --gamma 3 | --compare tree --treeRule=topDown
--speed --draft lookup --lookupFirst | --speed --draft lookup --draftTop_p 0.5 | --ppl --verification block
--speed --tokens 3 | --ppl --batch 3 | --speed --draftBits 4 | --speed --writtenIn float32
--ppl --prompt x | --ppl --promptFile x | --ppl --question x | --audit {__file__} --prompt x | --chat --prompt x
--ppl --temperature 0.3 | --ppl --top_p 0.5 | --ppl --top_k 3 | --ppl --repetition_penalty 2 | --ppl --maxLen 7
--ppl --promptLen 8 9 | --compare ctranslate2 --gamma 4 | --compare generate:plain --gamma 7
--ppl --repeats 5 | --draft x --speed --mid self | --draft x --ppl --mid self
--draft x --compare fixed --mid bundled-mid
--compare lookup --draftVocab 5 | --compare self --draftDevice cpu | --compare target --draftVocab 10
--show --repeats 3 | --show --sentences 3 | --show --promptFile x
--speed --window 300 | --show --stride 3 | --ppl 0 --window 30
--chat --promptFile x | --sweep --batch 2 | --show --prompt x --batch 2 | --html page.html --prompt x --batch 2
"""


@pytest.mark.parametrize("argv", USELESS.strip().replace("\n", " | ").split(" | "))
def test_a_last_flag_that_changes_nothing_is_refused(argv):
    flag = argv.rpartition("--")[2].replace("=", " ").split()[0]
    with refused(f"--{flag} "):
        parse(argv.split())
    parse(argv.split(), again=True)  # A record names all flags.


USEFUL = f"""
--speed --gamma 3 --verification block | --sweep --verification block --ngram 2 --draft lookup
--sweep --speed --gamma 3 | --speed --draftLength draftConfidence --draftThreshold 0.3
--compare all --mid bundled-mid --draft bundled-draft --gamma1 4 --gamma2 3 --ngram 2 --plausibility 0.2
--compare noCache,speculativeNoCache --gamma 3 | --speed --tree 2,1 --treeRule topDown
--lossless self,head --draftTop_p 0.5 --draftBits 4 | --ppl --diversity --dataset wikitext --sentences 3
--show --prompt x --gamma 3
--audit {__file__} --gamma 3 | --audit {__file__} --draft bundled-draft --tree 2,1 | --audit {__file__} --ngram 2
--audit {__file__} --batch 8 | --audit {__file__} --temperature 1 --top_k 5 --seed 3
--speed --ppl --temperature 0.3 --stride 300 --repeats 2
--compare cascade --mid bundled-mid --draft bundled-draft --draftDevice cpu | --ppl --draftDevice cpu --out x
--lossless self --draftVocab 9 --target bundled-target --draft bundled-draft | --show --mid self --speedMulti --draft x
--steps --draftVocab 9 | --show --dataset wikitext --seed 2 --temperature 0 --promptLen 9
--acceptance 0.6 | --compare llama.cpp:draft --acceptance 0.6 | --compare generate:draft --gamma 7
--sweep --ppl --temperature 0.5 1 --promptLen 8 9 | --ppl --window 256
"""


@pytest.mark.parametrize("argv", USEFUL.strip().replace("\n", " | ").split(" | "))
def test_a_flag_that_one_method_reads_is_taken(argv):
    parse(argv.split())


def test_new_tokens_of_a_mode_unless_they_are_said():
    found = parse(["--target", "x", "--draft", "y", "--speed", "--speedNew", "--diversity"]).sampling
    assert [found.max_len_of(mode) for mode in ("speed", "speedNew", "diversity")] == [200, 1000, 45]
    assert found.of("diversity").temperature == 1 and found.of("speed").temperature == 0.85
    argv = ["--target", "x", "--draft", "y", "--speedNew", "--maxLen", "7", "--temperature", "0.5"]
    found = parse(argv).sampling
    assert found.max_len_of("speedNew") == 7 and found.of("diversity").temperature == 0.5


def test_prompts_with_categories_are_timed_and_not_scored_unless_that_is_said():
    measuring = parse(["--target", "x", "--draft", "y", "--prompts", "sample"]).measuring
    assert list(measuring.groups) == ["speed"] and not measuring.ppl


def test_an_error_is_one_line_and_what_is_no_users_error_is_not_hidden(capsys):
    def stops(error):
        raise error

    assert as_command("x.py", lambda: stops(UserError("a name\nof two lines")), "") == 2
    assert capsys.readouterr().err == "x.py: error: a name of two lines\n"
    with pytest.raises(ZeroDivisionError):
        as_command("x.py", lambda: stops(ZeroDivisionError()), "")
    capsys.readouterr()
    renamed = RuntimeError("cannot import")
    renamed.__cause__ = KeyboardInterrupt()  # as a library does that is imported late
    assert as_command("x.py", lambda: stops(renamed), "All is kept.") == 130
    assert capsys.readouterr().err == "\nInterrupted. All is kept.\n"
