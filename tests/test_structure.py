"""The layout: which names the root has, which folders there are, and that imports between them go one way."""

import ast
import re

import pytest
from conftest import ROOT

from inputs.commandLine import VERSION
from scripts.blocks import imports

ROOT_FILES = {"downloadData", "downloadModel", "utils", "regrSampling", "specSampling", "PPL", "test"}
# A module may import what stands before its own layer, and its own folder.
LAYERS = (
    *("utils", "decoding", "engine regrSampling specSampling", "inputs", "methods", "PPL downloadModel downloadData"),
    *("experiments", "lossless", "benchmark", "report playback", "test", "scripts"),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
FOLDERS = set(LAYER) - ROOT_FILES
LONGEST = 60  # lines of a function
TABLES = r"add_\w+"  # functions that are tables of flags


def arrows_back(root):
    """[(folder or file in the root, what it imports)] of imports that do not point to an earlier layer."""
    arrows = [(name, other) for name, others in imports(root).items() for other in others]
    return [(name, other) for name, other in arrows if LAYER[other] >= LAYER[name]]


def test_the_root_has_the_owners_names_and_no_other_code():
    assert {file.stem for file in ROOT.glob("*.py")} == ROOT_FILES
    assert {file.parent.name for file in ROOT.glob("*/__init__.py")} == FOLDERS
    assert set(LAYER) > ROOT_FILES
    assert not (ROOT / "datasets" / "__init__.py").exists()  # It would hide the library of that name.


def test_each_folder_says_what_lives_in_it():
    for file in (file for folder in FOLDERS for file in (ROOT / folder).glob("**/__init__.py")):
        tree = ast.parse(file.read_text())
        assert "\n\n" not in ast.get_docstring(tree) and len(tree.body) == 1, file


def fields(file):
    """{field: value} of the top level of a YAML file."""
    return dict(re.findall(r'^([\w-]+): *"?([^"\n]*)', (ROOT / file).read_text(), re.M))


def test_one_version_and_one_licence_are_named_everywhere():
    cited = fields("CITATION.cff")
    assert cited["version"] == VERSION and cited["license"] == fields("models/README.md")["license"].upper()
    assert f"\n## {VERSION} - {cited['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "LICENSE").read_text().startswith(f"{cited['license']} License\n")


def test_imports_go_one_way():
    assert arrows_back(ROOT) == []


@pytest.mark.parametrize(
    "file, line",
    [
        ("decoding/rows.py", "from engine.kvCache import SlotCache"),
        ("engine/cachedModel.py", "def f():\n    import methods.catalogue"),
        ("utils.py", "import decoding.rows"),
        ("specSampling.py", "from engine import compiling"),
    ],
)
def test_an_arrow_that_runs_back_is_caught(tmp_path, file, line):
    for name in LAYER:
        copied = tmp_path / (f"{name}.py" if name in ROOT_FILES else f"{name}/__init__.py")
        copied.parent.mkdir(exist_ok=True)
        copied.touch()
    copied = tmp_path / file
    copied.write_text((ROOT / file).read_text())
    assert arrows_back(tmp_path) == []
    copied.write_text(f"{(ROOT / file).read_text()}\n{line}\n")
    assert [name for name, _ in arrows_back(tmp_path)] == [file.split("/")[0].removesuffix(".py")]


def test_the_engine_does_not_show_in_the_algorithm():
    """The loop, the model's steps, the drafters and the rules know nothing of graphs, captures or kernels."""
    words = re.compile(r"graphs?\b|kernel|compil|captur", re.I)
    algorithm = [ROOT / "specSampling.py", ROOT / "regrSampling.py", *(ROOT / "decoding").glob("**/*.py")]
    algorithm += (ROOT / "methods").glob("*.py")
    assert [file.name for file in algorithm if words.search(file.read_text())] == []


def test_no_function_is_long():
    files = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/**/*.py"))]
    long = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > LONGEST
        and not re.fullmatch(TABLES, node.name)
    ]
    assert long == []
    assert len((ROOT / "test.py").read_text().splitlines()) < 120
