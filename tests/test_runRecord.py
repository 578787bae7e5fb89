"""What is recorded of the machine."""

import builtins
import platform

import torch

from experiments import runRecord


def test_it_names_the_processor_and_the_versions():
    found = runRecord.machine("cpu")
    assert found["processor"] == runRecord.processor_name() and found["torch"] == torch.__version__


def test_without_linuxs_list_python_is_asked(monkeypatch):
    def nothing(*arguments, **how):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", nothing)
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert runRecord.processor_name() == "a processor"
