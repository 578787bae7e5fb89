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

from huggingface_hub import constants

from inputs.commandLine import Parser, as_command, text
from inputs.escape import visible
from inputs.hub import (
    HUB_ID,
    MANIFEST,
    UNFINISHED,
    check_disk,
    check_id,
    damaged,
    describe,
    fetch,
    file_errors,
    gigabytes,
    lock,
    read_manifest,
    swap,
    to_move,
    write_manifest,
)
from utils import UserError

MODELS = Path(__file__).resolve().parent / "models"
PYTHIA = ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m", "EleutherAI/pythia-2.8b")
SMALL_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)"
    r"\.json|merges\.txt|tokenizer\.model|chat_template\.jinja"
)
INDEX = "model.safetensors.index.json"


def needed(repo, files):
    """Of all files of a repository, those to download: `{path: HubFile}` -> a list, the weights last."""
    weights = (
        ["model.safetensors"]
        if "model.safetensors" in files
        else sorted(
            (path for path in files if path == INDEX or re.fullmatch(r"model-\d+-of-\d+\.safetensors", path)),
            key=lambda path: (path != INDEX, path),
        )
    )  # the index first: what it names can be checked
    if not weights:
        others = [path for path in files if path.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))]
        only = f", only {others[0]}" if others else ""
        raise UserError(
            f"{repo} has no safetensors{only}, and pickled weights are never loaded; another revision may "
            "have them (often --revision refs/pr/1), or choose another model"
        )
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


def is_hub_id(name):
    """Whether `name` can only be a hub id: it reads owner/name, and nothing here is called so."""
    return bool(re.fullmatch(HUB_ID, name, re.ASCII)) and not any(
        map(os.path.exists, (MODELS / name, name.split("/")[0]))
    )


def on_first_use(name, offline=False):
    """A name that `loading.find_model` knows: `name` itself, or for a hub id the folder it was or is now downloaded
    to."""
    return str(present(name) or download(name, offline=offline)) if is_hub_id(name) else name


def download(repo, revision=None, offline=False):
    """Bring a model into `models/<name>`, or verify that it is there; returns the folder.

    It is put together in `models/<name>.incomplete`, which takes the name once it is whole: a model that is there
    already can be used until then. revision: None is the main one. Raises UserError with one line for all that can go
    wrong."""
    with file_errors():
        folder = folder_of(repo)
        if offline or constants.HF_HUB_OFFLINE:
            verify(repo, folder, revision)
            return folder
        commit, files = describe(repo, revision or "main")
        wanted, manifest = needed(repo, files), read_manifest(folder)
        about = {"repo": repo, "revision": revision or "main", "commit": commit}
        wrong = damaged(folder, wanted)
        if not wrong and not stale(manifest, wanted):
            if not manifest or any(manifest[key] != about[key] for key in about):
                write_manifest(folder, wanted, **about)
            print(f"{repo}: whole, in {folder}; nothing to download")
            return folder
        if folder.exists() and not manifest:
            raise UserError(
                f"{folder} is there and not {repo} ({wrong[0].path} is missing or differs); move it away first"
            )
        with lock(folder):
            bring(repo, commit, wanted, folder, about)
        print(f"{repo}: whole, in {folder}")
        return folder


def verify(repo, folder, revision):
    """`download` without a network: check what is here."""
    if not present(repo, revision):
        raise UserError(
            f"{repo}{f' at {revision}' if revision else ''} is not in {folder}, and --offline (or "
            "HF_HUB_OFFLINE) forbids to download it"
        )
    if wrong := damaged(folder, read_manifest(folder)["files"]):
        raise UserError(f"{folder / wrong[0].path} is damaged; run this again without --offline to repair it")
    print(f"{repo}: whole, in {folder}")


def stale(manifest, wanted):
    """Files that an earlier revision brought and this one does not have."""
    return {file.path for file in manifest["files"]} - {file.path for file in wanted} if manifest else set()


def bring(repo, commit, wanted, folder, about):
    """Put `wanted` together in `<folder>.incomplete`, from what is here and what is not, and swap the two."""
    unfinished, manifest = folder.with_name(folder.name + UNFINISHED), read_manifest(folder)
    unfinished.mkdir(exist_ok=True)
    if folder.exists():
        for file in damaged(folder, manifest["files"]):  # nobody should go on using it
            (folder / file.path).unlink(missing_ok=True)
        ours = {file.path for file in manifest["files"]} - {file.path for file in wanted} | {MANIFEST}
        for path in folder.rglob("*"):  # also what the user keeps there
            if path.is_file() and path.relative_to(folder).as_posix() not in ours:
                share(path, unfinished / path.relative_to(folder))
    write_manifest(unfinished, wanted, **about)
    wrong = damaged(unfinished, wanted)
    moving, whole = sum(to_move(unfinished, file) for file in wrong), sum(file.size for file in wanted)
    check_disk(unfinished, moving)
    part = f" of {gigabytes(whole)} (the rest is here)" if moving < whole else ""
    print(f"{repo}: {gigabytes(moving)}{part} to download from {constants.ENDPOINT} into {folder}", flush=True)
    for file in wrong:
        fetch(repo, commit, file, unfinished)
        if file.path == INDEX:
            check_index(repo, unfinished / INDEX, wanted)
    write_manifest(unfinished, wanted, **about)  # again: it must be younger than the files it vouches for
    swap(unfinished, folder)


def share(path, other):
    """The same file under another name, at no cost where the disk can do that."""
    other.parent.mkdir(parents=True, exist_ok=True)
    if not other.exists():
        try:
            os.link(path, other)
        except OSError:
            shutil.copy2(path, other)


def check_index(repo, index, files):
    """Raise UserError where the index of weights in several files names one that the repository lacks."""
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{INDEX} of {repo} does not list any weights; choose another revision") from None
    if lacking := named - {file.path for file in files}:
        raise UserError(f"{repo} lacks {sorted(lacking)[0]}, which its {INDEX} names; choose another revision")


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
            state = (
                f"not whole: {', '.join(file.path for file in wrong)}"
                if wrong
                else "not finished"
                if folder.name.endswith(UNFINISHED)
                else "whole"
            )
        print(visible(f"{folder.name:28} {gigabytes(size):>9}  {state:12} {origin}", ""))


def main(argv=None):
    parser = Parser(
        prog="downloadModel.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models", nargs="*", type=text, default=PYTHIA, metavar="OWNER/NAME", help="hub ids (default: Pythia)"
    )
    parser.add_argument("--revision", type=text, help="branch, tag or commit (main)")
    parser.add_argument("--offline", action="store_true", help="only verify what is there")
    parser.add_argument("--list", action="store_true", help="show what is there, and whether it is whole")

    def work():
        args = parser.parse_args(argv)
        for repo in args.models:
            folder_of(repo)
        if args.list:
            with file_errors():
                return show()
        for repo in args.models:
            download(repo, args.revision, args.offline)

    return as_command("downloadModel.py", work, "What came is kept; run this again to go on.")


if __name__ == "__main__":
    sys.exit(main())
