"""Downloads for tests: a small repository of a model, and the download scripts run against the hub on localhost."""

import os
from collections import namedtuple

from localHub import Repository

import downloadModel

NAME = "EleutherAI/pythia-70m"
WEIGHTS = 300_000  # bytes
CHUNK = 10_000  # huggingface_hub writes pieces of 10 MB. A piece is lost if the connection breaks within it.


def model_repository():
    """A model's repository, with other files that hubs have and that must not be downloaded."""
    return Repository(
        {
            "config.json": b"{}",
            "tokenizer.json": os.urandom(5000),
            "README.md": b"#" * 3000,
            "model.safetensors": os.urandom(WEIGHTS),
            "pytorch_model.bin": b"\x80" * 9000,
            "onnx/model.safetensors": b"0" * 4000,
            ".gitattributes": b"*",
        }
    )


def download(*arguments):
    """The exit code of downloadModel.py."""
    return downloadModel.main(argv=[*arguments])


def assert_error(capsys, *words, arguments=(NAME,), script=downloadModel):
    """The script stops with one line in which all `words` appear."""
    assert script.main([*arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{script.__name__}.py: error: ") and error.count("\n") == 1
    assert all(word in error for word in words) and "UserError" not in error, error
    return error


def matches(folder, repository):
    """Whether a folder holds the configuration and the weights of a repository."""
    paths = ("config.json", "model.safetensors")
    return all((folder / path).read_bytes() == repository.files[path] for path in paths)


def limit_disk(monkeypatch, free):
    """Let the disk have that many bytes free."""
    usage = namedtuple("usage", "total used free")(1, 1, free)
    monkeypatch.setattr("inputs.hub.shutil.disk_usage", lambda _: usage)
