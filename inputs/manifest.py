"""The manifest of a downloaded folder, `download.json`: where its files came from, their sizes and their hashes.

It is written last, so a folder with a manifest was complete once. `damaged` says which files are not what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from huggingface_hub.utils.sha import git_hash, sha_fileobj
from tqdm import tqdm

from inputs.commandLine import visible
from inputs.files import file_errors, gigabytes, replace_file

MANIFEST = "download.json"
UNFINISHED = ".incomplete"  # a folder's name ends so until its download is complete
BAR_BYTES = 100 << 20  # hashing a larger file shows a progress bar


@dataclass(frozen=True)
class HubFile:
    """A file as a hub describes it. digest: 'sha256:...' of its content, or 'git:...', the hash git gives a small
    file."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds. rows: {split: number of rows} of a data set."""

    repo: str
    commit: str
    revision: str = "main"
    rows: dict[str, int] = field(default_factory=dict)
    files: list[HubFile] = field(default_factory=list)


def write_manifest(folder: Path, files: Sequence[HubFile], **about: object) -> None:
    """Write the manifest of a folder. about: the other fields of `Manifest`."""
    replace_file(folder / MANIFEST, json.dumps(about | {"files": [asdict(file) for file in files]}, indent=1))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder. None if there is none, if it cannot be read, or if it names a file outside the folder:
    a file that is not whole would be removed."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        files = [HubFile(**file) for file in content["files"]]
        rows = {str(split): int(count) for split, count in content.get("rows", {}).items()}
        inside = all(stays_inside(file.path) for file in files)
        origin = str(content["repo"]), str(content["commit"]), str(content.get("revision", "main"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Manifest(*origin, rows, files) if inside else None


def stays_inside(path: str) -> bool:
    """Whether a file of this relative path is in the folder it is written to, on any system."""
    return not (path.startswith("/") or ".." in path.split("/") or "\\" in path or ":" in path)


def digest_of(path: Path, kind: str) -> str:
    """'sha256:...' or 'git:...' of a file."""
    if kind == "git":
        return f"git:{git_hash(path.read_bytes())}"
    size = path.stat().st_size
    bar = {"desc": f"checking {path.name}", "unit": "B", "unit_scale": True, "leave": False}
    disable = None if size > BAR_BYTES else True
    with (
        open(path, "rb") as file,
        tqdm.wrapattr(file, "read", total=size, bytes=False, disable=disable, **bar) as followed,
    ):
        return f"sha256:{sha_fileobj(followed, 1 << 22).hex()}"


def is_whole(path: Path, file: HubFile) -> bool:
    """Whether `path` has exactly the content of `file`."""
    return (
        path.is_file()
        and path.stat().st_size == file.size
        and digest_of(path, file.digest.split(":")[0]) == file.digest
    )


def damaged(folder: Path, files: Sequence[HubFile]) -> list[HubFile]:
    """The `files` that are missing in `folder` or differ."""
    return [file for file in files if not is_whole(folder / file.path, file)]


@file_errors()
def print_folders(
    parent: Path, origin: Callable[[Manifest], str], no_manifest: tuple[str, str] = ("not checked", "")
) -> None:
    """Print a line for each folder of `parent`: its name, size, state and origin. All hashes are computed.

    no_manifest: state and origin of a folder without a manifest.
    """
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        manifest = read_manifest(folder)
        state, source = ("whole", origin(manifest)) if manifest else no_manifest
        if manifest and (broken := damaged(folder, manifest.files)):
            state = f"not whole: {', '.join(file.path for file in broken)}"
        elif folder.name.endswith(UNFINISHED):
            state = "not finished"
        print(visible(f"{folder.name:28} {gigabytes(size):>9}  {state:12} {source}".rstrip(), ""))
