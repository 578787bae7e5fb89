"""What `pip install .` installs: the files, the command, the version, and the requirements beside the pinned ones."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, refused
from packaging.requirements import Requirement

from inputs import files
from inputs.commandLine import VERSION
from inputs.models import default_mid, find_model
from inputs.texts import load_corpora

if sys.version_info < (3, 11):
    tomllib = pytest.importorskip("tomli")
else:
    import tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def fields(file):
    """{field: value} of the top level of a YAML file."""
    return dict(re.findall(r'^([\w-]+): *"?([^"\n]*)', (ROOT / file).read_text(), re.M))


# Versions.


def test_one_version_is_in_the_code_and_in_the_citation(cli, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"{VERSION}\n"
    assert PROJECT["dynamic"] == ["version"] and fields("CITATION.cff")["version"] == VERSION
    assert f"\n## {VERSION} - {fields('CITATION.cff')['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_one_licence_is_named_everywhere():
    assert (ROOT / "LICENSE").read_text().startswith(f"{PROJECT['license']} License\n")
    assert fields("CITATION.cff")["license"] == PROJECT["license"]
    assert fields("models/README.md")["license"] == PROJECT["license"].lower()


# Requirements.


def disagreements(pinned, dependencies):
    """What a list of pins and a list of requirements with ranges disagree in."""
    pins = [Requirement(line) for line in pinned]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, dependencies)}
    versions = {pin: re.fullmatch(r"==([\w.]+)", str(pin.specifier)) for pin in pins}
    return (
        [f"{pin.name} is not pinned" for pin, version in versions.items() if not version]
        + [f"{name} has no pin" for name in ranges.keys() - {pin.name for pin in pins}]
        + [f"{pin.name} is no requirement" for pin in pins if pin.name not in ranges]
        + [
            f"{pin.name} {version[1]} is outside of {ranges[pin.name]}"
            for pin, version in versions.items()
            if version and pin.name in ranges and version[1] not in ranges[pin.name]
        ]
    )


def test_the_pinned_versions_are_those_of_the_project():
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    dependencies = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert disagreements(pinned, dependencies) == []
    assert disagreements([*pinned, "x==1"], dependencies) == ["x is no requirement"]
    assert disagreements(pinned, [*dependencies, "x>=1"]) == ["x has no pin"]
    assert disagreements(["x==1; python_version < '3.11'", "x==3", "y>=1"], ["x>=2", "y"]) == [
        "y is not pinned",
        "x 1 is outside of >=2",
    ]


def test_the_older_versions_that_it_must_run_with_are_allowed():
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, PROJECT["dependencies"])}
    assert "2.11.0" in ranges["torch"] and "5.17.0" in ranges["transformers"]


# Folders.


def test_a_clone_holds_its_data_and_what_is_installed_does_not_write_beside_its_code(tmp_path, monkeypatch):
    assert (files.ROOT, files.INSTALLED) == files.find_folders(ROOT) == (ROOT, None)
    site, folder = tmp_path / "site-packages", tmp_path / "work"
    (site / "specdec" / "models").mkdir(parents=True)
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert files.find_folders(site) == (folder, site / "specdec")


def test_installed_data_are_found_and_ones_own_come_first(pair_folder, tmp_path, monkeypatch):
    for name in "models/bundled-mid", "models/mine", "datasets/sample":
        (tmp_path / "specdec" / name).mkdir(parents=True)
    for name in "own/models/mine", "specdec/models/bundled-mid", "specdec/models/mine":
        for file in (pair_folder / "target").iterdir():
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file.name).symlink_to(file)
    (tmp_path / "specdec" / "datasets" / "sample" / "a.txt").write_text("A text.")
    monkeypatch.setattr(files, "INSTALLED", tmp_path / "specdec")
    monkeypatch.setattr(files, "MODELS", tmp_path / "own" / "models")
    monkeypatch.setattr(files, "DATASETS", tmp_path / "own" / "datasets")
    assert find_model("mine") == tmp_path / "own" / "models" / "mine"
    assert find_model("bundled-mid") == tmp_path / "specdec" / "models" / "bundled-mid"
    assert default_mid(("bundled-target", "bundled-draft")) == "bundled-mid"
    with refused("there are: bundled-mid, mine"):
        find_model("nowhere")
    assert [corpus.documents for corpus in load_corpora("sample")] == [["A text."]]
    with refused("datasets/wikitext"):
        load_corpora("wikitext")


def test_the_note_beside_the_sample_texts_is_not_read():
    assert (files.DATASETS / "sample" / "README.md").exists()
    assert [corpus.name for corpus in load_corpora("sample")] == ["articles.raw", "narrative.txt"]


# The wheel.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the project's wheel holds, as pip would install it."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_all_modules_and_data_and_nothing_that_hides_a_library(site):
    about = f"specdec-{VERSION}.dist-info"
    modules = {path.name for path in ROOT.glob("*.py")} - {"test.py"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"scripts"}
    assert {path.name for path in site.iterdir()} == modules | packages | {"specdec", about}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked or pytest.skip("this is no clone"):
        if name.split("/")[0] in packages:
            assert (site / name).exists(), name
        if name.startswith(("models/", "datasets/")):
            assert (site / "specdec" / name).exists(), name
    downloads = {path.name for path in (site / "specdec" / "models").iterdir()}
    assert downloads == {"README.md", "bundled-draft", "bundled-head", "bundled-mid", "bundled-target"}
    assert (site / "specdec" / "__main__.py").read_text() == (ROOT / "test.py").read_text()
    assert "specdec = specdec.__main__:main" in (site / about / "entry_points.txt").read_text()


TWICE = """
import runpy, sys
from specdec.__main__ import main
print("exit code", main(["--gamma", "x"]), file=sys.stderr)
runpy.run_module("specdec", run_name="__main__")
"""


def test_the_command_works_from_another_folder_and_writes_there_alone(site, tmp_path):
    """As `specdec` with a wrong flag, then as `python -m specdec`: in one process, which imports torch once."""
    flags = ["--speed", "--maxLen", "4", "--sentences", "1", "--repeats", "1"]
    before = sorted(site.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", TWICE, *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wrong, code = done.stderr.splitlines()[:2]
    assert wrong.startswith("specdec: error: ") and code == "exit code 2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "results.txt"]
    assert "target: bundled-target" in (tmp_path / "results.txt").read_text()
    assert sorted(site.rglob("*")) == before
