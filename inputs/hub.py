"""Folders downloaded from a Hugging Face hub, and their manifests, `download.json`: where the files came from, their
sizes and their hashes.

`huggingface_hub` sends the requests; HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are its settings. Its
`snapshot_download` discards what an interrupted download had fetched and computes no hashes. Here a file grows as
NAME.part, a second try fetches the rest, and the file gets its name when its hash is right. The manifest is written
last, so a folder with a manifest was complete once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, logging
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from tqdm import tqdm

from inputs.commandLine import counted, one_line, visible
from inputs.files import file_errors, gigabytes, replace_file
from inputs.progress import Bar
from utils import UserError

MANIFEST = "download.json"
UNFINISHED = ".incomplete"  # A folder's name ends so until its download is complete.
SPARE = 64 << 20  # bytes that must stay free on a disk
REFUSALS = {
    GatedRepoError: "{repo} is gated: accept its terms on its page, {host}/{repo}, and set HF_TOKEN to a token of that "
    "account",
    RepositoryNotFoundError: "{host} shows no repository {repo}: check the name, and if it is private set HF_TOKEN to "
    "a token that may read it",
    RevisionNotFoundError: "{repo} has no revision {revision!r}; leave out --revision for its main one",
    HfHubHTTPError: "{host} answered {status} for {repo}; check HF_TOKEN, try again later, or name a mirror in "
    "HF_ENDPOINT. What was downloaded is kept.",
}

logging.set_verbosity_error()  # The warnings that matter are UserErrors here,
logging.get_logger("huggingface_hub.utils._http").setLevel("WARNING")  # but for how long a busy hub is waited for.


@dataclass(frozen=True)
class HubFile:
    """A file as a hub describes it. digest: 'sha256:...', or for a small file 'git:...', the hash that git gives it."""

    path: str
    size: int
    digest: str

    def matches(self, path: Path) -> bool:
        """Whether the file `path` exists and has this content."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        is_git = self.digest.startswith("git:")
        return self.digest == (f"git:{git_hash(path.read_bytes())}" if is_git else f"sha256:{sha256_of(path)}")


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
            names = [manifest.repo, manifest.commit, manifest.revision, *manifest.rows]
            names += [file.digest for file in manifest.files]
            numbers = [*manifest.rows.values(), *(file.size for file in manifest.files)]
            is_whole = all(isinstance(x, str) for x in names) and all(isinstance(x, int) for x in numbers)
            return manifest if is_whole and all(stays_inside(file.path) for file in manifest.files) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        replace_file(folder / MANIFEST, json.dumps(asdict(self), indent=1))

    def damaged(self, folder: Path) -> list[HubFile]:
        """The files that are missing in a folder or differ."""
        return [file for file in self.files if not file.matches(folder / file.path)]


def stays_inside(path: str) -> bool:
    """Whether a file of this relative path is in the folder it is written to, on any system."""
    return not (path.startswith("/") or ".." in path.split("/") or "\\" in path or ":" in path)


def files_of(folder: Path) -> list[HubFile]:
    """All files of a folder, with their hashes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [HubFile(p.relative_to(folder).as_posix(), p.stat().st_size, f"sha256:{sha256_of(p)}") for p in paths]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits. Raises OSError."""
    bar = {"total": path.stat().st_size, "desc": f"checking {path.name}", "leave": False, "delay": 1, "disable": None}
    with open(path, "rb") as file, tqdm.wrapattr(file, "read", **bar) as stream:
        return sha_fileobj(stream, 1 << 22).hex()


def folder_in(parent: Path, name: str) -> Path:
    """The folder `name` of `parent`. Raises UserError for a name that leads elsewhere, or of an unfinished download."""
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name.endswith(UNFINISHED):
        allowed = "letters, digits, '_', '.' and '-', such as SmolLM2-135M-Instruct"
        raise UserError(f"{name!r} is not a valid folder name for {parent.name}/; use {allowed}")
    return parent / name


def is_downloaded(name: str, folder: Path, damaged: list[HubFile] | None, offline: bool) -> bool:
    """Whether a folder has no damaged files; if so, a line says that. None: it does not hold what was requested.
    offline: raises UserError instead of returning False."""
    if damaged == []:
        print(f"{name}: complete, in {folder}; nothing to download")
    elif offline and damaged:
        raise UserError(f"{folder / damaged[0].path} is damaged; run the command again without --offline to repair it")
    elif offline:
        why = "--offline (or HF_HUB_OFFLINE) forbids downloading it"
        raise UserError(f"{name} is not in {folder}, or is incomplete, and {why}")
    return damaged == []


@file_errors()
def print_folders(parent: Path) -> None:
    """Print a line for each folder of `parent`: its name, size, state and origin. All hashes are computed."""
    for folder in sorted(path for path in parent.glob("*") if path.is_dir()):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        state, origin, manifest = "not checked", "not downloaded", Manifest.read(folder)
        if manifest:
            at = f"at {manifest.revision} ({manifest.commit[:12]})" if manifest.commit else ""
            rows = ", ".join(f"{counted(count, 'row')} of {split}" for split, count in manifest.rows.items())
            origin = f"{manifest.repo} {at}".rstrip() + f"; {rows}".rstrip("; ")
            broken = ", ".join(file.path for file in manifest.damaged(folder))
            state = f"not whole: {broken}" if broken else "whole"
        elif folder.name.endswith(UNFINISHED):
            state = "not finished"
        print(visible(f"{folder.name:28} {gigabytes(size):>9}  {state:12} {origin}", ""))


def list_repository(repo: str, revision: str = "main", kind: str = "model") -> Manifest:
    """A repository's commit and its files. kind: 'model' or 'dataset'. Requests to a busy hub are repeated, which
    `HfApi.repo_info` does not do. Raises UserError if the hub does not list them."""
    url = f"{constants.ENDPOINT}/api/{kind}s/{repo}/revision/{quote(revision, safe='')}"
    options = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "max_retries": 3, "retry_on_exceptions": ()}
    files = []
    with hub_errors(repo, revision):
        response = http_backoff("GET", url, params={"blobs": True}, headers=build_hf_headers(), **options)
        hf_raise_for_status(response)
        info = response.json()
        for entry in info["siblings"]:
            path, lfs = entry["rfilename"], entry.get("lfs")
            if not stays_inside(path):
                raise UserError(f"{repo} has a file {path!r}, which lies outside its folder; nothing was downloaded")
            digest = f"sha256:{lfs['sha256']}" if lfs else f"git:{entry['blobId']}"
            files.append(HubFile(path, entry["size"], digest))
        return Manifest(repo, info["sha"], revision, files=files)


def check_disk(folder: Path, needed: int) -> None:
    """Raise UserError if the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        sizes = f"{gigabytes(needed)} are needed in {folder}, where only {gigabytes(free)} are free"
        raise UserError(f"{sizes}; free some space and run the command again")


def fetch(manifest: Manifest, folder: Path, kind: str = "model") -> None:
    """Fetch the files that `folder` lacks. Resumes an earlier try; copies a file that is in the library's own cache."""
    repo, commit = manifest.repo, manifest.commit
    parts = {file: folder / f"{file.path}.part" for file in manifest.damaged(folder)}
    missing = sum(max(0, file.size - (part.stat().st_size if part.exists() else 0)) for file, part in parts.items())
    check_disk(folder.parent, missing)
    print(f"{repo}: {gigabytes(missing)} to download from {constants.ENDPOINT} into {folder}", flush=True)
    for file, part in parts.items():
        part.parent.mkdir(parents=True, exist_ok=True)
        with hub_errors(repo, commit):
            cached = try_to_load_from_cache(repo, file.path, revision=commit, repo_type=kind)
            if isinstance(cached, str) and file.matches(Path(cached)):
                shutil.copyfile(cached, part)
            for _ in range(2):  # Damage in a part shows only at the end. The second try begins at the file's start.
                append_missing(hf_hub_url(repo, file.path, revision=commit, repo_type=kind), part, file)
                if file.matches(part):
                    os.replace(part, folder / file.path)
                    break
                part.unlink()
            else:
                wrong = f"was downloaded twice with a hash that differs from that of {constants.ENDPOINT}"
                raise UserError(f"{file.path} of {repo} {wrong}; try again later, or another mirror (HF_ENDPOINT)")


def append_missing(url: str, part: Path, file: HubFile) -> None:
    """Append the bytes that `part` lacks. A connection that breaks is repeated as long as each one transfers bytes."""
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    with open(part, "ab") as stream, Bar(file.path, file.size, " bytes") as bar:
        bar.update(stream.tell())
        while (start := stream.tell()) < file.size:
            try:
                http_get(url, stream, resume_size=start, headers=headers, expected_size=file.size, _tqdm_bar=bar)
            except HTTPError:
                if stream.tell() <= start:
                    raise


@contextlib.contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Raise errors of the connection to a hub as UserErrors."""
    host = constants.ENDPOINT
    if not host:
        raise UserError("HF_ENDPOINT is empty: unset it, or name a mirror (it begins with https://)")
    try:
        yield
    except HfHubHTTPError as error:
        text = next(text for kind, text in REFUSALS.items() if isinstance(error, kind))
        status = error.response.status_code
        raise UserError(text.format(repo=repo, host=host, revision=revision, status=status)) from None
    except HTTPError as error:
        with contextlib.suppress(RuntimeError):  # Large files may be on another host.
            host = str(error.request.url.join("/")).rstrip("/")
        proxy = getproxies().get(urlsplit(host).scheme) or getproxies().get("all")
        if proxy and not proxy_bypass(urlsplit(host).hostname or ""):
            host += f" through the proxy {proxy.rpartition('@')[2]}"
        remedy = "check the network, or name a mirror in HF_ENDPOINT (it begins with https://)"
        kept = "What was downloaded is kept; the next run resumes from there. With --offline only local files are used."
        raise UserError(f"no connection to {host} ({type(error).__name__}); {remedy}. {kept}") from None
    except (UserError, OSError):
        raise
    except Exception as error:  # For an address that is none the library has an error of its own, with a part of it.
        said = isinstance(error, (ImportError, ValueError, KeyError, TypeError, AttributeError))
        why = type(error).__name__ + (f": {one_line(error)}" if said else "")
        check = "check HF_ENDPOINT, HF_TOKEN, the proxy and the network"
        raise UserError(f"{host} gives no usable answer for {repo} ({why}); {check}") from None
