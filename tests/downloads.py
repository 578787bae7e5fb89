"""Downloads of models for tests: a small repository, and downloadModel.py run against the hub on localhost."""

import os

from huggingface_hub import constants
from localHub import Repository

import downloadModel
from inputs import files

NAME = "EleutherAI/pythia-70m"
WEIGHTS = 3_000_000
CHUNK = 100_000  # huggingface_hub writes pieces of 10 MB. A piece is lost if the connection breaks within it.
SUBPROCESS = (
    "import sys; from pathlib import Path; from huggingface_hub import constants; "
    "from downloadModel import main; from inputs import files; "
    f"constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}; files.MODELS = Path(sys.argv[1]); sys.exit(main(sys.argv[2:]))"
)


def use_folder(folder, monkeypatch):
    """Make `folder` the folder of models, and downloads fast and written in small pieces."""
    monkeypatch.setattr(files, "MODELS", folder)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    return folder


def repository(**more):
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
        | more.pop("files", {}),
        **more,
    )


def run(*arguments):
    return downloadModel.main([*arguments])


def refused(capsys, *words, arguments=(NAME,)):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("downloadModel.py: error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error


def same(folder, repo):
    return all((folder / path).read_bytes() == repo.files[path] for path in ("config.json", "model.safetensors"))
