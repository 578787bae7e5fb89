"""What is recorded of the machine."""

import builtins
import platform
import shutil

import torch
from conftest import ROOT

from experiments import runRecord
from inputs import files


def test_it_names_the_processor_and_the_versions(monkeypatch):
    """Without Linux's list Python is asked for the processor."""
    found = runRecord.machine("cpu")
    assert found["processor"] and found["torch"] == torch.__version__
    monkeypatch.setattr(builtins, "open", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert runRecord.machine("cpu")["processor"] == "a processor"


def test_the_code_is_the_source_that_decides_texts_and_times(tmp_path, monkeypatch):
    for folder in runRecord.FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in runRecord.SOURCE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    here = runRecord.code_version()
    monkeypatch.setattr(files, "ROOT", tmp_path)

    def there():
        runRecord.code_version.cache_clear()
        return runRecord.code_version()

    try:
        assert there() == here == runRecord.origin([], {}, "cpu", {})["code"] and here.startswith("sha256:")
        (tmp_path / "engine" / "note.txt").write_text("no source")
        assert there() == here
        with open(tmp_path / "engine" / "kernels" / "choose.cpp", "a") as file:
            file.write("// another")
        assert there() != here
    finally:
        runRecord.code_version.cache_clear()


def test_a_busy_machine_is_said():
    run = {"machine": {"cores": 2}, "load": 2.4}
    texts = [{"kind": "speed", "method": "target", "tpot": seconds} for seconds in (0.01, 0.02, 0.09, None)]
    assert list(runRecord.strained(run, texts)) == [] == list(runRecord.strained({"machine": {"cores": None}}, []))
    (busy,) = runRecord.strained(run | {"load": 4.2}, texts)
    assert "a load of 4.2, and 2 cores" in busy
    (unsteady,) = runRecord.strained(run, [*texts, texts[0] | {"tpot": 0.2}])
    assert "more than tenfold (target)" in unsteady
    (again,) = runRecord.strained(run, [texts[0], texts[0] | {"stalled": 2}])
    assert again.endswith("timed again: 1.")
    assert runRecord.origin([], {}, "cpu", {})["load"] >= 0
