"""The documentation: every block is as its record says, and what the text names exists."""

import ast
import io
import json
import re
import shutil
from contextlib import redirect_stdout

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from conftest import refused
from PIL import Image

import downloadData
import downloadModel
from benchmark.__main__ import main as benchmark
from inputs.files import ROOT
from scripts import courseReport, keepRecord, renderDocs, trainBundled, trainHead
from scripts.docsBenchmark import BLOCKS, REAL, SEEN_TITLE, side_by_side

README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
TEXTS = renderDocs.files(ROOT)
NAMES = [str(path.relative_to(ROOT)) for path in TEXTS]


def read(path):
    return path.read_text(encoding="utf-8")


def prose(text):
    """A text without its blocks and code blocks."""
    return renderDocs.FENCE.sub("", renderDocs.BLOCK.sub("", text))


def block_of(text, name):
    """(where the content of a block begins and ends in a text, the line it begins in)."""
    (block,) = (block for block in renderDocs.BLOCK.finditer(text) if block["name"] == name)
    return *block.span("content"), text.count("\n", 0, block.start()) + 1


def contents(text):
    """{name: content} of the blocks of a text."""
    return {block["name"]: block["content"] for block in renderDocs.BLOCK.finditer(text)}


def fences(text):
    """The code blocks of a text."""
    return [fence[2] for fence in renderDocs.FENCE.finditer(text)]


def copied(folder):
    """A copy of the documentation and its records in a folder."""
    for name in ("docs", "figures"):
        shutil.copytree(ROOT / name, folder / name)
    for path in (README, CHINESE):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def copy(tmp_path):
    """A copy that the test may change."""
    (tmp_path / "copy").mkdir()
    return copied(tmp_path / "copy")


def change(path, old, new):
    text = read(path)
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


# The blocks and their records.


def test_every_block_is_as_its_record_says(capsys):
    assert renderDocs.main(["--check"]) == 0, capsys.readouterr().out


def test_rendering_changes_nothing_more(copy, capsys):
    assert renderDocs.render(copy) == []


def faulty(folder, capsys):
    """What the checker says of a documentation with a fault; it changes nothing."""
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert renderDocs.main(["--check"], folder) == 1
    assert before == {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return capsys.readouterr().out.splitlines()


def test_an_emptied_block_is_caught_and_rendered_again(copy, capsys):
    text = read(copy / "README.md")
    start, end, line = block_of(text, "real-best")
    (copy / "README.md").write_text(text[:start] + "\n" + text[end:], encoding="utf-8")
    assert faulty(copy, capsys) == [f"README.md:{line}: block real-best is empty"]
    assert renderDocs.render(copy) == ["README.md"]
    assert read(copy / "README.md") == text


def test_an_emptied_block_of_words_is_caught(copy, capsys):
    text = read(copy / "docs/speed.md")
    start, end, line = block_of(text, "over-plain")
    assert text[start] != "\n"
    (copy / "docs/speed.md").write_text(text[:start] + text[end:], encoding="utf-8")
    assert faulty(copy, capsys) == [f"docs/speed.md:{line}: block over-plain is empty"]


@pytest.mark.parametrize("name", ["reproduction-short", "real-best"])
def test_a_changed_number_is_caught(copy, capsys, name):
    text = read(copy / "README.md")
    start, end, line = block_of(text, name)
    content = text[start:end]
    at = start + re.search("[0-9](?=[^0-9]*$)", content).start()
    digit = str((int(text[at]) + 1) % 10)
    (copy / "README.md").write_text(text[:at] + digit + text[at + 1 :], encoding="utf-8")
    assert faulty(copy, capsys) == [f"README.md:{line}: block {name} differs from its record"]


def test_a_block_without_end_is_caught_and_nothing_is_rendered(copy, capsys):
    change(copy / "README.md", "<!-- end real-best -->", "")
    (fault,) = faulty(copy, capsys)
    assert re.fullmatch(r"README.md:\d+: block real-best has no end", fault)
    change(copy / "docs/methods.md", "<!-- begin sweep -->\n", "<!-- begin sweep -->\nnothing like it\n")
    before = read(copy / "docs/methods.md")
    assert renderDocs.main([], copy) == 2
    assert "block real-best has no end" in capsys.readouterr().err
    assert read(copy / "docs/methods.md") == before


def test_an_end_without_a_beginning_is_caught(copy, capsys):
    change(copy / "README.md", "<!-- begin real-best -->", "")
    assert any(fault.endswith("the end of block real-best has no beginning") for fault in faulty(copy, capsys))


def test_a_run_that_is_gone_is_caught(copy, capsys):
    run = renderDocs.Records(copy).index["compare"]
    lines = read(copy / "docs/records/results.jsonl").splitlines(keepends=True)
    (copy / "docs/records/results.jsonl").write_text("".join(line for line in lines if run not in line))
    faults = faulty(copy, capsys)
    assert any(fault.startswith("docs/methods.md") and "block compare" in fault and run in fault for fault in faults)


def test_a_record_that_is_gone_is_caught(copy, capsys):
    (copy / "docs/records/benchmark.json").unlink()
    assert any("block kinds" in fault and "benchmark.json" in fault for fault in faulty(copy, capsys))


def test_a_conversation_is_shown_as_text_whatever_is_in_it(copy):
    path = copy / "docs/records/chat.json"
    rounds = [[[], [], ["<b>"]], [["\n\n"], ["x\n"], ["*a* <!-- end chat -->"]]]
    path.write_text(json.dumps(json.loads(read(path)) | {"turns": [{"prompt": "> <i>\n\n", "rounds": rounds}]}))
    question, answer, figures, *_ = renderDocs.BLOCKS["chat"](renderDocs.Records(copy), {}).split("\n\n")
    assert question == "<p>&gt; &lt;i&gt;</p>" and figures.startswith("<p>3 tokens: 1 from reading the prompt, 2 in 1 ")
    assert answer == "<p>&lt;b&gt;<b><br><br></b><del>x\\n</del>*a* &lt;!-- end chat --&gt;</p>"


def test_an_unknown_block_is_caught(copy, capsys):
    with open(copy / "README.md", "a", encoding="utf-8") as file:
        file.write("\n<!-- begin unheard-of -->\n1.5\n<!-- end unheard-of -->\n")
    (fault,) = faulty(copy, capsys)
    assert fault.endswith("block unheard-of: there is no renderer of this name")


def test_an_empty_code_block_is_caught(copy, capsys):
    with open(copy / "docs/speed.md", "a", encoding="utf-8") as file:
        file.write("\n```\n\n```\n")
    (fault,) = faulty(copy, capsys)
    assert fault.endswith("an empty code block")


def test_a_block_of_words_does_not_begin_a_line(copy, capsys):
    change(copy / "docs/methods.md", "- c: <!-- begin sweep-c -->", "<!-- begin sweep-c -->")
    (fault,) = faulty(copy, capsys)
    assert "block sweep-c of words begins its line" in fault


def test_a_picture_of_another_record_is_caught(copy, capsys):
    shutil.copy(copy / "figures/lossless.png", copy / "figures/sweep.png")
    assert faulty(copy, capsys) == ["figures/sweep.png was drawn from another record"]
    (copy / "figures/sweep.png").unlink()
    assert faulty(copy, capsys) == ["figures/sweep.png is missing"]


def test_a_moving_picture_of_another_record_is_caught(copy, capsys):
    change(copy / "docs/records/rounds.json", '"seconds": [0.', '"seconds": [0.0')
    assert "figures/rounds.gif was drawn from another record" in faulty(copy, capsys)


def test_the_moving_picture_is_small_and_loops():
    path = ROOT / "figures" / "rounds.gif"
    with Image.open(path) as image:
        assert image.info["loop"] == 0 and image.n_frames > 10 and image.width < 900
    assert path.stat().st_size < 1_000_000


def joined(copy, **changed):
    """What rendering says of a table of the benchmark's record beside a copy of it with `changed` fields."""
    records = copy / "docs/records"
    record = json.loads(read(records / "benchmark.json"))
    first = {"code": "sha256:1"} | record
    (records / "benchmark.json").write_text(json.dumps(first))
    (records / "benchmark-other.json").write_text(json.dumps(first | changed))
    (copy / "docs/joint.md").write_text(
        "<!-- begin side-by-side+benchmark+benchmark-other -->\n<!-- end side-by-side+benchmark+benchmark-other -->\n"
    )
    return renderDocs.main([], copy), read(copy / "docs/joint.md")


def test_two_records_of_one_experiment_may_share_a_table(copy, capsys):
    code, text = joined(copy, time="2030-01-01 00:00:00")
    assert code == 0, capsys.readouterr().err
    assert "| benchmark: tokens/s |" in text and "| benchmark-other: tokens/s |" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| plain, eager |"))
    assert row.split(" | ")[1:4] == row.rstrip(" |").split(" | ")[4:7]


def test_the_report_stands_beside_runs_of_one_experiment_alone(copy, capsys):
    run, _ = renderDocs.Records(copy).run("compare")
    line = next(
        line
        for line in read(copy / "docs/records/results.jsonl").splitlines()
        if f'"kind": "run", "run": "{run["run"]}"' in line
    )
    change(copy / "docs/records/results.jsonl", line, line.replace(run["code"], "sha256:2"))
    assert renderDocs.main([], copy) == 2
    assert "first and compare are not one experiment: they differ in code " in capsys.readouterr().err


@pytest.mark.parametrize("what", ["draft", "gamma", "code"])
def test_two_records_of_two_experiments_are_refused_a_joint_table(copy, capsys, what):
    record = renderDocs.Records(copy).benchmark()
    draft = record["models"]["draft"] | {"version": "sha256:another"}
    changed = {
        "draft": {"models": record["models"] | {"draft": draft}},
        "gamma": {"flags": record["flags"] | {"gamma": 3}},
        "code": {"code": "sha256:2"},
    }
    code, text = joined(copy, **changed[what])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and "tokens/s" not in text
    assert re.search(f"benchmark and benchmark-other are not one experiment: they differ in {what} ", error)


def test_records_that_do_not_say_which_code_made_them_never_share_a_table(copy, capsys):
    records = renderDocs.Records(copy)
    first, other = ({**records.benchmark(), "code": code} for code in ("sha256:1", None))
    for name, record in (("benchmark", other), ("benchmark-other", other), ("benchmark-new", first)):
        (copy / f"docs/records/{name}.json").write_text(json.dumps(record))
    for pair in ["benchmark", "benchmark-other"], ["benchmark-new", "benchmark"]:
        with refused(" and ".join(pair), "differ in code", "not recorded"):
            side_by_side(pair, renderDocs.Records(copy))


def test_the_best_table_divides_by_our_own_plain_decoding_and_says_what_is_lossless(copy):
    """A record without the newest rows and fields has a table too: it is the one that is committed, or its copy."""
    record = renderDocs.Records(copy).benchmark(REAL) | {"texts": {}}
    record["speed"] = [line for line in record["speed"] if line["method"] != "transformers, static cache, compiled"]
    seen = {"seen_by": ["impossible"], "impossible": 5, "tokens": 100}
    found = {"plain, compiled": {"seen_by": []}}
    found |= dict.fromkeys(("speculative, compiled", "block verification, compiled"), seen)  # whichever is faster
    record["texts"] = {row: {"failed": None, "greedy": None, "lossless": lossless} for row, lossless in found.items()}
    static = [line for line in record["speed"] if line["method"] == "plain, compiled"]
    record["speed"] += [
        line | {"method": "transformers, static cache, compiled", "throughput": line["throughput"] / 2}
        for line in static
    ]
    (copy / f"docs/records/{REAL}.json").write_text(json.dumps(record))
    rows = [line.strip("| ").split(" | ") for line in BLOCKS["real-best"](renderDocs.Records(copy), {}).splitlines()]
    assert rows[0] == ["decoding", "tokens/s", "TTFT, ms", "TPOT, ms", "of our plain, compiled", SEEN_TITLE]
    by_name = {row[0]: row for row in rows[2:] if len(row) == 6}
    assert by_name["plain, compiled"][4:] == ["1", "none found"]
    assert next(row for name, row in by_name.items() if name.startswith("speculative"))[5] == "found"
    assert next(row for name, row in by_name.items() if "static cache" in name)[4:] == ["0.50", "not tested"]
    assert {row[5] for name, row in by_name.items() if "quantised" in name} <= {"not tested", "another model"}
    assert {name.split(",")[0] for name in by_name} >= {"llama.cpp", "OpenVINO", "CTranslate2"}
    speeds = [float(row[1].split()[0]) for row in by_name.values()]
    assert speeds == sorted(speeds, reverse=True)


def test_every_renderer_is_used():
    used = {name for path in TEXTS for name in contents(read(path))}
    assert set(renderDocs.BLOCKS) == used


def test_no_measured_number_stands_outside_of_blocks():
    for path in set(TEXTS) - set(ROOT.glob("docs/pythia-on-gpu*.md")):  # there: arithmetic from sizes
        measured = re.search(r"\d[\d.,]* ?(ms|seconds|minutes|tokens/s|GB/s|tokens per second)\b", prose(read(path)))
        assert not measured, f"{path.name}: {measured[0]}"


# The texts.


def test_the_readme_is_one_screen():
    assert len(read(README).splitlines()) <= 132


def test_both_readmes_have_the_same_commands_and_figures():
    texts = [read(README), read(CHINESE)]
    commands = [
        [re.sub(" *#.*", "", line) for block in fences(prose_kept(text)) for line in block.splitlines()]
        for text in texts
    ]
    assert commands[0] == commands[1] and commands[0]
    blocks = [contents(text) for text in texts]
    assert list(blocks[0]) == list(blocks[1])
    for name in blocks[0]:
        figures = [sorted(re.findall(r"\d[\d.,]*\d|\d", each[name].replace("，", ", "))) for each in blocks]
        assert figures[0] == figures[1], name
    assert links(texts[0]) == links(texts[1])


def links(text):
    """Where a text links to, in either language, but not from one language to the other."""
    found = re.findall(r"(?<!English)(?<!中文)\]\(([^)]*)\)", text)
    return [link.replace(".zh-CN.md", ".md") for link in found]


def unlike(text, other):
    """In what a page and its translation differ, of what must be the same in both."""
    parts = {
        "commands": lambda text: re.sub(" *#.*", "", "".join(fences(text))),
        "links": links,
        "code": lambda text: sorted(re.findall(r"`[^`\n]+`", prose(text))),
        "figures": lambda text: sorted(re.findall(r"\d[\d.,]*\d|\d", prose(text))),
    }
    return [name for name, part in parts.items() if part(text) != part(other)]


@pytest.mark.parametrize("path", (ROOT / "docs").glob("*.zh-CN.md"), ids=lambda path: path.name)
def test_a_translated_page_has_the_commands_links_and_figures_of_the_english_one(path):
    chinese, english = read(path), read(path.with_name(path.name.replace(".zh-CN", "")))
    assert unlike(chinese, english) == []


@pytest.mark.parametrize(
    "old, new, part",
    [
        ("make run", "make rum", "commands"),
        ("(architecture.md#on", "(architecture.md#in", "links"),
        ("`--show`", "`--shown`", "code"),
        ("7 GB", "8 GB", "figures"),
    ],
)
def test_a_translation_that_differs_is_caught(old, new, part):
    english = read(ROOT / "docs/pythia-on-gpu.md")
    assert old in english and unlike(english.replace(old, new, 1), english) == [part]


def test_the_chinese_reproduction_has_the_same_commands_figures_and_sections():
    texts = [read(ROOT / "docs" / name) for name in ("reproduction.md", "reproduction.zh-CN.md")]
    english, chinese = ([re.sub(" *#.*", "", block) for block in fences(prose_kept(text))] for text in texts)
    assert english == chinese
    blocks = [contents(text) for text in texts]
    assert list(blocks[0]) == list(blocks[1])
    for name in blocks[0]:
        rows = [[re.findall(r"\d[\d.,]*", cell) for cell in block[name].split("|")[1:]] for block in blocks]
        assert len(rows[0]) == len(rows[1]), name
        assert not re.search("not in this record|plain decoding|figure", blocks[1][name]), name  # untranslated words
    assert [head.count("#") for head in re.findall("^#+", texts[0], re.M)] == [
        head.count("#") for head in re.findall("^#+", texts[1], re.M)
    ]


def prose_kept(text):
    """A text without its rendered blocks, but with its code blocks."""
    return renderDocs.BLOCK.sub("", text)


def anchors(text):
    """The anchors of a text's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    path = ROOT / name
    for link in re.findall(r"\]\(([^)\s]*)\)", read(path)):
        if re.match("[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(read(target)), f"{name}: {link}"


@pytest.mark.parametrize("name", NAMES)
def test_no_code_block_is_empty(name):
    text = read(ROOT / name)
    assert all(block.strip() for block in fences(text))
    assert text.count("```") == 2 * len(fences(text))


def test_the_example_of_the_library_runs(capsys):
    torch.manual_seed(0)
    example = re.search(r"```python\n(.*?)```", read(ROOT / "docs/library.md"), re.S)[1]
    exec(compile(example, "docs/library.md", "exec"), {})
    assert "The ship" not in capsys.readouterr().out.splitlines()[-1]  # new tokens only


def test_the_ten_lines_of_the_readme_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    exec(compile(re.search(r"```python\n(.*?)```", read(README), re.S)[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("It was late in the evening, and")


def test_the_examples_import_what_exists():
    for path in TEXTS:
        for example in re.findall(r"```python\n(.*?)```", read(path), re.S):
            imports = [node for node in ast.parse(example).body if isinstance(node, ast.ImportFrom)]
            assert imports
            for node in imports:
                exec(ast.unparse(node), {})


@pytest.mark.parametrize("name", NAMES)
def test_files_and_names_that_are_quoted_exist(name):
    quoted = re.findall(r"`([\w/.]+\.(?:py|h|cpp))(?::([\w.]+))?`", prose(read(ROOT / name)))
    for file, wanted in quoted:
        assert (ROOT / file).is_file(), f"{name}: {file}"
        body = ast.parse(read(ROOT / file)).body if wanted else []
        for part in wanted.split(".") if wanted else []:
            found = [node for node in body if part in names_of(node)]
            assert found, f"{name}: {file}:{wanted}"
            body = getattr(found[0], "body", [])


def names_of(node):
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_architecture_page_quotes_many_names():
    assert len(set(re.findall(r"`[\w/]+\.py:[\w.]+`", read(ROOT / "docs/architecture.md")))) > 25


def help_of(main):
    """What a command prints for --help."""
    output = io.StringIO()
    with redirect_stdout(output), pytest.raises(SystemExit):
        main(["--help"])
    return output.getvalue()


def test_every_flag_that_is_named_exists(cli):
    commands = (
        cli.main,
        benchmark,
        downloadModel.main,
        downloadData.main,
        trainBundled.main,
        trainHead.main,
        renderDocs.main,
        keepRecord.main,
        courseReport.main,
    )
    known = {flag for main in commands for flag in re.findall(r"--[\w-]+", help_of(main))} | {"--help"}
    known |= set(launch_command_parser()._option_string_actions)  # of `accelerate launch`
    known |= {"--measure"}  # of scripts/drawRounds.py, as its record was made
    known |= {"--nodes", "--ntasks-per-node", "--gpus-per-node"}  # of SLURM
    for path in TEXTS:
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", renderDocs.MARK.sub("", read(path))))
        assert named <= known, f"{path.name}: {sorted(named - known)}"
