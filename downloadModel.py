"""Download models from the Hugging Face hub into models/.

    python downloadModel.py                                Pythia-70m, -410m and -2.8b
    python downloadModel.py EleutherAI/pythia-160m ...     any others
    python downloadModel.py --list                         what is there

Only what is needed comes: configuration, tokenizer, safetensors. An interrupted download goes on where it stopped; what
is there is verified (sizes and hashes) and not fetched again. HF_ENDPOINT names a mirror, HF_TOKEN a token.
"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import constants

from hub import (HUB_ID, UNFINISHED, as_command, check_disk, check_id, damaged, describe, fetch, gigabytes,
                 read_manifest, to_move, write_manifest)
from utils import UserError

MODELS = Path(__file__).resolve().parent / "models"
PYTHIA = ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m", "EleutherAI/pythia-2.8b")
SMALL_FILES = re.compile(r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)"
                         r"\.json|merges\.txt|tokenizer\.model|chat_template\.jinja")
INDEX = "model.safetensors.index.json"


def needed(repo, files):
    """Of all files of a repository, those to download: `{path: HubFile}` -> a list, the weights last."""
    weights = ["model.safetensors"] if "model.safetensors" in files else sorted(
        path for path in files if path == INDEX or re.fullmatch(r"model-\d+-of-\d+\.safetensors", path))
    if not weights:
        others = [path for path in files if path.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))]
        only = f", only {others[0]}" if others else ""
        raise UserError(f"{repo} has no safetensors{only}, and pickled weights are never loaded; another revision may "
                        "have them (often --revision refs/pr/1), or choose another model")
    if "config.json" not in files:
        raise UserError(f"{repo} has no config.json: it is not a model that transformers can load")
    return [file for path, file in files.items() if SMALL_FILES.fullmatch(path)] + [files[path] for path in weights]


def folder_of(repo):
    """Where a repository's files go: models/<name>. Raises UserError where that folder holds something else."""
    check_id(repo)
    folder = MODELS / repo.split("/")[1]
    if folder.name.endswith(UNFINISHED):
        raise UserError(f"{repo}: a name ending in {UNFINISHED} is for unfinished downloads; choose another model")
    for place in (folder, folder.with_name(folder.name + UNFINISHED)):
        manifest = read_manifest(place)
        if manifest and manifest.get("repo") != repo:
            raise UserError(f"{place} holds {manifest.get('repo')}, not {repo}; move it away first")
    return folder


def present(repo, revision=None):
    """The folder of a model that was downloaded before (at `revision`, if one is named), or None. Asks nobody."""
    folder = folder_of(repo)
    manifest = read_manifest(folder)
    return folder if manifest and revision in (None, manifest["revision"], manifest["commit"]) else None


def on_first_use(name, offline=False):
    """What `name` says if it is a folder, or no hub id at all; a hub id is downloaded, unless it was before. Returns a
    name that `loading.find_model` knows."""
    if not re.fullmatch(HUB_ID, name, re.ASCII) or any(map(os.path.exists, (MODELS / name, name.split("/")[0]))):
        return name
    return str(present(name) or download(name, offline=offline))


def download(repo, revision="main", offline=False):
    """Bring a model into `models/<name>`, or verify that it is there; returns the folder.

    The folder has its name only while it is whole: until then its name ends in `.incomplete`. Raises UserError with one
    line for all that can go wrong."""
    folder = folder_of(repo)
    if offline or constants.HF_HUB_OFFLINE:
        manifest = read_manifest(folder)
        if not present(repo, None if revision == "main" else revision):
            raise UserError(f"{repo} is not in {folder}, and --offline (or HF_HUB_OFFLINE) forbids to download it")
        if wrong := damaged(folder, manifest["files"]):
            raise UserError(f"{folder / wrong[0].path} is damaged; run this again without --offline to repair it")
        print(f"{repo}: whole, in {folder}")
        return folder
    commit, files = describe(repo, revision)
    wanted = needed(repo, files)
    about = {"repo": repo, "revision": revision, "commit": commit}
    wrong = damaged(folder, wanted)
    if not wrong:
        write_manifest(folder, wanted, **about)
        print(f"{repo}: whole, in {folder}; nothing to download")
        return folder
    if folder.exists() and not read_manifest(folder):
        raise UserError(f"{folder} is there and not {repo} ({wrong[0].path} is missing or differs); move it away first")
    MODELS.mkdir(exist_ok=True)
    unfinished = folder.with_name(folder.name + UNFINISHED)
    with lock(unfinished, repo):
        if folder.exists():  # damaged, or of another revision: not to be taken for whole while it is mended
            shutil.rmtree(unfinished, ignore_errors=True)
            folder.rename(unfinished)
        unfinished.mkdir(exist_ok=True)
        write_manifest(unfinished, wanted, **about)
        wrong = damaged(unfinished, wanted)
        moving, whole = sum(to_move(unfinished, file) for file in wrong), sum(file.size for file in wanted)
        check_disk(unfinished, moving)
        part = f" of {gigabytes(whole)} (the rest is here)" if moving < whole else ""
        print(f"{repo}: {gigabytes(moving)}{part} to download from {constants.ENDPOINT} into {folder}", flush=True)
        for file in wrong:
            fetch(repo, commit, file, unfinished)
        check_index(repo, unfinished, wanted)
        write_manifest(unfinished, wanted, **about)  # again: it must be younger than the files it vouches for
        unfinished.rename(folder)
    print(f"{repo}: whole, in {folder}")
    return folder


def check_index(repo, folder, files):
    """Raise UserError where the index of weights in several files names one that the repository lacks."""
    if (folder / INDEX).exists():
        lacking = set(json.loads((folder / INDEX).read_text())["weight_map"].values()) - {file.path for file in files}
        if lacking:
            raise UserError(f"{repo} lacks {sorted(lacking)[0]}, which its {INDEX} names; choose another revision")


def lock(unfinished, repo):
    """Keeps a second download of the same model away."""
    try:
        return FileLock(unfinished.with_name(f".{unfinished.name}.lock"), timeout=0).acquire()
    except Timeout:
        raise UserError(f"another process is downloading {repo}; wait for it") from None


def show():
    """Print every folder of models/: size, where from, and whether it is whole (all hashes are computed)."""
    for folder in sorted(path for path in MODELS.iterdir() if path.is_dir()) if MODELS.is_dir() else []:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        manifest = read_manifest(folder)
        if manifest is None:
            origin, state = "not downloaded from a hub", "not checked"
        else:
            origin = f"{manifest['repo']} at {manifest['revision']} ({manifest['commit'][:12]})"
            wrong = damaged(folder, manifest["files"])
            state = f"not whole: {', '.join(file.path for file in wrong)}" if wrong else "whole"
        print(f"{folder.name:28} {gigabytes(size):>9}  {state:12} {origin}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=PYTHIA, metavar="OWNER/NAME", help="hub ids (default: Pythia)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (main)")
    parser.add_argument("--offline", action="store_true", help="only verify what is there")
    parser.add_argument("--list", action="store_true", help="show what is there, and whether it is whole")
    args = parser.parse_args(argv)

    def work():
        for repo in args.models:
            folder_of(repo)
        if args.list:
            return show()
        for repo in args.models:
            download(repo, args.revision, args.offline)

    return as_command("downloadModel.py", work)


if __name__ == "__main__":
    sys.exit(main())
