"""The manifest of a downloaded folder, `download.json`: where its files came from, their sizes and their hashes.

It is written last, so a folder with a manifest was complete once. `Manifest.damaged` names the
files that differ from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from huggingface_hub.utils.sha import git_hash, sha_fileobj
from tqdm import tqdm

from inputs.commandLine import visible
from inputs.files import file_errors, gigabytes, replace_file
from utils import UserError

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
    """The content of a folder. commit: "" if unknown, or if not all files are in their places. rows: of a data set,
    {split: their number}."""

    repo: str
    commit: str
    revision: str = "main"
    rows: dict[str, int] = field(default_factory=dict)
    files: list[HubFile] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder. None if it does not exist, if it cannot be read, or if it names a file outside the
        folder: files that a new revision lacks are removed."""
        try:
            content = json.loads((folder / MANIFEST).read_text())
            manifest = cls(**content | {"files": [HubFile(**file) for file in content["files"]]})
            return manifest if all(stays_inside(file.path) for file in manifest.files) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        replace_file(folder / MANIFEST, json.dumps(asdict(self), indent=1))

    def damaged(self, folder: Path) -> list[HubFile]:
        """The files that are missing in a folder or differ."""
        return [file for file in self.files if not is_whole(folder / file.path, file)]


def stays_inside(path: str) -> bool:
    """Whether a file of this relative path is in the folder it is written to, on any system."""
    return not (path.startswith("/") or ".." in path.split("/") or "\\" in path or ":" in path)


def files_of(folder: Path) -> list[HubFile]:
    """All files of a folder, with their hashes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [HubFile(p.relative_to(folder).as_posix(), p.stat().st_size, digest_of(p, "sha256")) for p in paths]


def digest_of(path: Path, kind: str) -> str:
    """'sha256:...' or 'git:...' of a file."""
    if kind == "git":
        return f"git:{git_hash(path.read_bytes())}"
    size = path.stat().st_size
    bar = {"desc": f"checking {path.name}", "leave": False, "disable": None if size > BAR_BYTES else True}
    with open(path, "rb") as file, tqdm.wrapattr(file, "read", total=size, **bar) as stream:
        return f"sha256:{sha_fileobj(stream, 1 << 22).hex()}"


def is_whole(path: Path, file: HubFile) -> bool:
    """Whether `path` has exactly the content of `file`."""
    same_size = path.is_file() and path.stat().st_size == file.size
    return same_size and digest_of(path, file.digest.split(":")[0]) == file.digest


def verify_offline(name: str, folder: Path, manifest: Manifest | None) -> None:
    """Print that a folder is complete. Raises UserError if it is not, or if `manifest` is None: then it does not hold
    what was requested."""
    if manifest is None:
        raise UserError(
            f"{name} is not in {folder}, or is incomplete, and --offline (or HF_HUB_OFFLINE) forbids downloading it"
        )
    if broken := manifest.damaged(folder):
        raise UserError(f"{folder / broken[0].path} is damaged; run the command again without --offline to repair it")
    print(f"{name}: complete, in {folder}; nothing to download")


@file_errors()
def print_folders(parent: Path) -> None:
    """Print a line for each folder of `parent`: its name, size, state and origin. All hashes are computed."""
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        state, origin, manifest = "not checked", "not downloaded", Manifest.read(folder)
        if manifest:
            at = f"at {manifest.revision} ({manifest.commit[:12]})" if manifest.commit else ""
            rows = ", ".join(f"{count:,} rows of {split}" for split, count in manifest.rows.items())
            origin = f"{manifest.repo} {at}".rstrip() + f"; {rows}".rstrip("; ")
            broken = ", ".join(file.path for file in manifest.damaged(folder))
            state = f"not whole: {broken}" if broken else "whole"
        elif folder.name.endswith(UNFINISHED):
            state = "not finished"
        print(visible(f"{folder.name:28} {gigabytes(size):>9}  {state:12} {origin}", ""))
