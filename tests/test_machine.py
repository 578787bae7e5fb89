"""What is recorded of the machine."""

import builtins
import platform

import torch

from experiments import machine


def test_it_names_the_processor_and_the_versions():
    found = machine.machine("cpu")
    assert found["processor"] == machine.processor_name() and found["torch"] == torch.__version__


def test_without_linuxs_list_python_is_asked(monkeypatch):
    def nothing(*arguments, **how):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", nothing)
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert machine.processor_name() == "a processor"
