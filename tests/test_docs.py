"""The documentation: every block is as its record says, and what the text names exists."""

import argparse
import importlib
import io
import json
import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from conftest import refused
from helpers import tiny
from PIL import Image
from transformers import AutoModelForCausalLM

import downloadData
import downloadModel
from benchmark.__main__ import PRESET
from engine.compiling import is_compiled
from experiments import settings
from inputs.files import ROOT
from inputs.models import ModelLimits, load_tokenizer
from inputs.texts import read_texts
from regrSampling import regrSampling
from scripts import auditEngines, blocks, courseReport, keepRecord, render, trainBundled, trainHead
from scripts.blocks import BLOCKS, DISTANCE, FASTEST
from specSampling import specSampling
from utils import GREEDY, UserError

README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
TEXTS, RECORDS = render.documents(ROOT), render.Records(ROOT)
NAMES = [str(path.relative_to(ROOT)) for path in TEXTS]


def read(path):
    return path.read_text(encoding="utf-8")


def prose(text):
    """A text without its blocks and code blocks."""
    return render.FENCE.sub("", render.BLOCK.sub("", text))


def contents(text):
    """{name: content} of the blocks of a text."""
    return {block["name"]: block["content"] for block in render.BLOCK.finditer(text)}


def fences(text):
    """The code blocks of a text."""
    return [fence[2] for fence in render.FENCE.finditer(text)]


def change(path, old, new):
    """Replace the first match of the pattern `old` in a file."""
    text, count = re.subn(old, lambda match: new, read(path), count=1, flags=re.S)
    assert count
    path.write_text(text, encoding="utf-8")


OLD = "is of other code, weights or flags, or too few processes"  # what the checker says of a record


def checked(folder, capsys):
    """What the checker says of a documentation, but of old records; it changes nothing."""
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert render.main(["--check"], folder) == 1
    assert before == {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {line for line in capsys.readouterr().out.splitlines() if OLD not in line}


# The blocks and their records.


def test_every_block_is_as_its_record_says(capsys):
    render.main(["--check"])
    said = capsys.readouterr().out.splitlines()
    assert all(OLD in line for line in said) or said == ["Everything is as its record says."]
    assert set(BLOCKS) == {name for path in TEXTS for name in contents(read(path))}


def test_a_ratio_in_running_text_is_that_of_the_table():
    (row,) = [line for line in BLOCKS["kinds"](RECORDS).splitlines() if line.startswith("| fixed |")]
    assert row.split("|")[-2].strip() == BLOCKS["over-plain"](RECORDS)


def keep_pages(folder, *names):
    """Delete the other pages of a documentation: rendering all takes seconds."""
    for path in render.documents(folder):
        if str(path.relative_to(folder)) not in names:
            path.unlink()


def test_what_is_out_of_date_or_cannot_be_rendered_is_caught_and_rendered_when_it_can_be(copy, capsys):
    keep_pages(
        copy, "README.md", "docs/methods.md", "docs/records/README.md", "docs/records/methods.md", "docs/speed.md"
    )
    (copy / "README.md").write_text(read(README) + "\n<!-- begin unheard-of -->\n1.5\n<!-- end unheard-of -->\n")
    (copy / "docs/speed.md").write_text(read(copy / "docs/speed.md") + "\n```\n\n```\n")
    change(copy / "README.md", "<!-- end real-best -->", "")
    change(copy / "README.md", "<!-- begin reproduction-short -->", "")
    change(copy / "docs/speed.md", "(?<=<!-- begin over-plain -->).*?(?=<!-- end over-plain -->)", "")
    change(copy / "docs/speed.md", " (?=<!-- begin over-plain-block -->)", "\n")
    shutil.copy(copy / "figures/lossless.png", copy / "figures/sweep.png")
    (copy / "figures/lossless.png").unlink()
    (copy / "docs/records/chat.json").unlink()
    change(copy / "docs/records/results.jsonl", f'"run": "{RECORDS["head-tree"][0]["run"]}"', '"run": "another"')
    change(copy / "docs/records/rounds.json", re.escape('"seconds": [0.'), '"seconds": [0.0')
    assert checked(copy, capsys) == {
        "README.md: block unheard-of: there is no renderer of this name",
        "README.md: block real-best has no end",
        "README.md: block reproduction-short has no beginning",
        "docs/methods.md: block chat: there is no record 'chat' in docs/records/",
        "docs/records/methods.md: block head-tree: there is no record 'head-tree' in docs/records/",
        "docs/records/README.md: block records differs from its record",
        "docs/speed.md: block over-plain is empty",
        "docs/speed.md: an empty code block",
        "docs/speed.md: block over-plain-block of words begins its line: Markdown takes such a line as HTML",
        "figures/rounds.gif was drawn from another record",
        "figures/sweep.png was drawn from another record",
        "figures/lossless.png is missing",
    }
    before = read(copy / "docs/records/README.md")
    assert render.main([], copy) == 2 and "README.md:" in capsys.readouterr().err
    assert read(copy / "docs/records/README.md") == before
    for name in "docs", "figures":
        shutil.copytree(ROOT / name, copy / name, dirs_exist_ok=True)
    keep_pages(copy, "docs/speed.md")
    change(copy / "docs/speed.md", "(?<=<!-- begin over-plain -->).*?(?=<!-- end over-plain -->)", "7")
    for said in "Written: docs/speed.md\n", "Nothing has changed.\n":
        assert render.main([], copy) == 0 and capsys.readouterr().out == said
    assert read(copy / "docs/speed.md") == read(ROOT / "docs/speed.md")


def test_a_conversation_is_shown_as_text_whatever_is_in_it(copy):
    path = copy / "docs/records/chat.json"
    rounds = [[[], [], ["<b>"]], [["\n\n"], ["x\n"], ["*a* <!-- end chat -->"]]]
    path.write_text(json.dumps(json.loads(read(path)) | {"turns": [{"prompt": "> <i>\n\n", "rounds": rounds}]}))
    question, answer, figures, *_ = BLOCKS["chat"](render.Records(copy)).split("\n\n")
    assert question == "<p>&gt; &lt;i&gt;</p>" and figures.startswith("<p>3 tokens: 1 from reading the prompt, 2 in 1 ")
    assert answer == "<p>&lt;b&gt;<b><br><br></b><del>x\\n</del>*a* &lt;!-- end chat --&gt;</p>"


def test_the_moving_picture_is_small_and_loops():
    path = ROOT / "figures" / "rounds.gif"
    with Image.open(path) as image:
        assert image.info["loop"] == 0 and image.n_frames > 10 and image.width < 900
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("changed, code", [("compare", "sha256:2"), ("", "sha256:1"), ("", None)])
def test_the_report_stands_beside_runs_of_one_experiment_alone(copy, changed, code):
    """Beside runs of one code, and not where another made one of them or it was not recorded."""
    path, run = copy / "docs/records/results.jsonl", RECORDS[changed][0]["run"] if changed else ""
    lines = [
        re.sub('"code": "sha256:[^"]+"', f'"code": {json.dumps(code)}', line) if run in line else line
        for line in read(path).splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")
    with nullcontext() if code == "sha256:1" else refused("are not one experiment: they differ in code"):
        BLOCKS["reproduction-short"](render.Records(copy))


def test_the_best_rows_stand_in_the_order_of_their_speed_and_have_the_bounds_of_the_audit(copy):
    """Of a text that is rejected, too."""
    audit = json.loads(read(copy / "docs/records/engines.json"))
    for cell in audit["cells"]:
        if cell["method"] == "openvino:plain":
            cell |= {"seen_by": ["impossible"], "impossible": 5, "tokens": 100, "variation": [0.05, 0.1]}
    (copy / "docs/records/engines.json").write_text(json.dumps(audit))
    table = [line for line in BLOCKS["real-best"](render.Records(copy)).splitlines() if line.startswith("|")]
    titles, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert titles == ["", "tokens/s", "TTFT ms", "TPOT ms", "speed-up", DISTANCE]
    speeds = [float(row[1].split()[0]) for row in rows]
    assert speeds == sorted(speeds, reverse=True) and all(re.fullmatch(FASTEST, row[0]) for row in rows)
    said = {row[0]: row[5] for row in rows}
    assert said["openvino:plain"] == "**5.0–10.0 %**; 5 % impossible" and said["llama.cpp:plain"].startswith("≤ ")
    assert {name.split(":")[0] for name in said} >= {"llama.cpp", "openvino", "ctranslate2", "generate"}


def test_a_block_names_tables_that_are_printed():
    with refused("no table of compare has a title", "Unheard"):
        blocks.printed("compare", "Unheard", RECORDS)


def test_no_measured_number_stands_outside_of_blocks():
    for path in set(TEXTS) - set(ROOT.glob("docs/pythia-on-gpu*.md")):  # there: arithmetic from sizes
        measured = re.search(r"\d[\d.,]* ?(ms|seconds|minutes|tokens/s|GB/s|tokens per second)\b", prose(read(path)))
        assert not measured, f"{path.name}: {measured[0]}"


# The texts.


def unlike(text, other):
    """In what a page and its translation differ, of what must be the same in both."""
    parts = {
        "commands": lambda text: re.sub(" *#.*", "", "".join(fences(render.BLOCK.sub("", text)))),
        "links": lambda text: re.findall(r"(?<!English)(?<!中文)\]\(([^)]*)\)", text.replace(".zh-CN.md", ".md")),
        "code": lambda text: sorted(re.findall(r"`[^`\n]+`", prose(text))),
        "figures": lambda text: sorted(re.findall(r"\d[\d.,]*\d|\d", prose(text))),
        "blocks": lambda text: [*contents(text).items()],
        "sections": lambda text: [len(head) for head in re.findall("^#+", text, re.M)],
    }
    return [name for name, part in parts.items() if part(text) != part(other)]


@pytest.mark.parametrize("path", (CHINESE, *(ROOT / "docs").glob("*.zh-CN.md")), ids=lambda path: path.name)
def test_a_translated_page_has_the_commands_links_and_figures_of_the_english_one(path):
    chinese, english = read(path), read(path.with_name(path.name.replace(".zh-CN", "")))
    assert unlike(chinese, english) == []


def test_a_translation_that_differs_is_caught():
    english = read(ROOT / "docs/pythia-on-gpu.md")
    changes = {"commands": ("\nmake run", "\nmake rum"), "links": ("(compile.md#on", "(compile.md#in")}
    changes |= {"code": ("`--show`", "`--shown`"), "figures": ("7 GB", "8 GB")}
    for part, (old, new) in changes.items():
        assert old in english and unlike(english.replace(old, new, 1), english) == [part]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere_and_code_blocks_end(name):
    path = ROOT / name
    assert read(path).count("```") == 2 * len(fences(read(path)))
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]*)\)", read(path)):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name}: {link}"
        heads = re.findall(r"^#+ (.*)", read(target), re.M) if anchor else []  # GitHub makes the anchors of them.
        anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
        assert anchor in anchors | {""}, f"{name}: {link}"


def python_blocks(name):
    """The blocks of Python of a page."""
    return re.findall(r"^```py(?:thon)?\n(.*?)^```", read(ROOT / name), re.S | re.M)


ENGLISH = [name for name in NAMES if "zh-CN" not in name and name != "CHANGELOG.md"]
WITH_PYTHON = [name for name in ENGLISH if python_blocks(name)]


def audited():
    """What the page on losslessness takes as given: a model, a tokenizer, prompts, a file to write to, and stand-ins
    for vLLM and llama.cpp's server, which write one text after each prompt; the server ends its last one."""
    ids, llm, requests = torch.tensor([[510, 1273, 11]]), Mock(), Mock()
    llm.generate = lambda prompts, _: [Mock(prompt_token_ids=p, outputs=[Mock(token_ids=(5, 6))]) for p in prompts]
    requests.post.return_value.json.return_value = {"tokens": [5, 6], "stop_type": "eos"}
    names = {"json": json, "file": io.StringIO(), "ids": ids, "prompts": ids.tolist(), "SamplingParams": dict}
    names |= {"model": AutoModelForCausalLM.from_pretrained(ROOT / "models/bundled-draft")}
    return names | {"tokenizer": load_tokenizer("bundled-draft"), "llm": llm, "requests": requests}


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_the_python_blocks_of_a_page_run_in_order(name, capsys, monkeypatch, tmp_path):
    """In one namespace."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    space = audited() if name == "docs/lossless.md" else {}
    for block in python_blocks(name):
        exec(compile(block, name, "exec"), space)
    said = capsys.readouterr().out
    if name == "README.md":
        assert said.startswith("It was late in the evening, and")
    elif name == "docs/engines.md":
        wrong, count = map(int, re.match(r"(\d+) of (\d+) rows", said).groups())
        assert wrong > 0.9 * count
    elif name == "CONTRIBUTING.md":
        target, prompts = tiny(), [[1, 2], [3, 4, 5, 5]]
        texts, _ = specSampling(prompts, target, space["AgainDrafter"](target.vocabulary), 20, sampling=GREEDY)
        assert texts == regrSampling(prompts, target, 20, GREEDY)[0]
    elif name == "docs/library.md":
        assert len(space["tokens"]) == 2 and is_compiled(space["copy"]) and space["copy"].cache_of is space["target"]
        assert space["records"][0].alpha > 0.5 and "The ship" not in said.splitlines()[-2]  # new tokens only
    else:
        (tmp_path / "texts.jsonl").write_text(space["file"].getvalue())
        model = ModelLimits("draft", 4096, 2048)
        texts = read_texts(tmp_path / "texts.jsonl", space["tokenizer"], model)
        assert [text.tokens for text in texts[1:]] == [[5, 6], [5, 6, space["tokenizer"].eos_token_id]]
        sent = space["requests"].post.call_args.kwargs["json"]
        assert not {"ignore_eos", "logit_bias"} & sent.keys()  # llama.cpp: they ban the end


class Parsed(Exception):
    """Raised where a script has read its flags: nothing is run."""


def commands(text):
    """The words of each command of a text, in its code blocks and in its lines. NAME: the reader's own."""
    blocks = "\n".join(fences(text)).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?((?:\S*python|\S*accelerate|srun|make) .*)", blocks, re.M)
    lines += re.findall(r"`((?:\.venv/bin/)?python [^`\n]+|make [^`\n]+)`", render.FENCE.sub("", text))
    for line in lines:
        words = shlex.split(re.sub(r"(?<!\.)\bNAME\b", "block", line), comments=True)
        yield shlex.split(words[words.index("-c") + 1]) if "-c" in words and words[0] == "srun" else words


def check(words, monkeypatch):
    """Let a command's own parser read its flags. Raises for one that does not exist or that changes nothing."""
    if words[0] == "make":
        makefile, (goal, *variables) = read(ROOT / "Makefile"), words[1:]
        assert re.search(rf"^{re.escape(goal)}:", makefile, re.M), goal
        assert all(f"$({variable.split('=')[0]})" in makefile for variable in variables), variables
        return
    at = next(index for index, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    name, flags = (words[at + 1], words[at + 2 :]) if words[at] == "-m" else (words[at][:-3], words[at + 1 :])
    if name == "pytest":
        assert (ROOT / flags[0]).is_file()
    elif "--ablation" in flags:
        return  # the command of a kept record
    elif name in ("test", "benchmark") and "--help" not in flags:
        settings.parse([*PRESET * (name == "benchmark"), *flags])
    elif name not in ("mine", "scripts.NAME") and "--help" not in flags:
        with monkeypatch.context() as patch, pytest.raises(Parsed) if flags else nullcontext():
            patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
            patch.setattr("sys.argv", [name, *flags])
            module = importlib.import_module(name)
            flags and module.main()


def parsed(parser, words=None, real=argparse.ArgumentParser.parse_args):
    real(parser, words)
    raise Parsed


@pytest.mark.parametrize("name", ENGLISH)
def test_every_command_of_a_page_is_one_that_its_program_takes(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").touch()
    for words in commands(read(ROOT / name)):
        check(words, monkeypatch)


@pytest.mark.parametrize(
    "line", ["python test.py --tempo 1", "python test.py --sweep --gamma 3", "make runn", "make report OF=x"]
)
def test_a_command_that_its_program_does_not_take_is_caught(line, monkeypatch):
    (words,) = commands(f"```sh\n{line}\n```\n")
    with pytest.raises((UserError, AssertionError)):
        check(words, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_files_and_names_that_are_quoted_exist(name):
    quoted = re.findall(r"`([\w/.]+\.(?:py|h|cpp))(?::([\w.]+))?`", prose(read(ROOT / name)))
    for file, wanted in ((file, wanted) for file, wanted in quoted if file != "llama.cpp"):
        assert (ROOT / file).is_file(), f"{name}: {file}"
        for part in filter(None, wanted.split(".")):
            defined = rf"^ *(def|class) {part}\b|^ *{part}\b[^\n(]* = |^    {part}: "
            assert re.search(defined, read(ROOT / file), re.M), f"{name}: {file}:{wanted}"


def test_the_pages_have_what_is_checked_and_the_readme_is_one_screen():
    assert len(read(README).splitlines()) <= 132
    assert {"CONTRIBUTING.md", "README.md", "docs/engines.md", "docs/library.md", "docs/lossless.md"} == set(
        WITH_PYTHON
    )
    assert len(set(re.findall(r"`[\w/]+\.py:[\w.]+`", read(ROOT / "docs/architecture.md")))) > 25


def test_every_flag_that_is_named_exists(cli, capsys):
    scripts = trainBundled, trainHead, render, keepRecord, courseReport, auditEngines
    for script in (cli, downloadModel, downloadData, *scripts):
        with pytest.raises(SystemExit):
            script.main(["--help"])
    known = {"--help", *re.findall(r"--[\w-]+", capsys.readouterr().out)}
    known |= set(launch_command_parser()._option_string_actions)  # of `accelerate launch`
    known |= {"--ablation", "--peers", "--text-check", "--shapes"}  # of earlier versions
    known |= {"--nodes", "--ntasks-per-node", "--gpus-per-node"}  # of SLURM
    for path in TEXTS:
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", render.MARK.sub("", read(path))))
        assert named <= known, f"{path.name}: {sorted(named - known)}"
