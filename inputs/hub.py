"""Files of a Hugging Face hub: which there are, fetched with resumption, verified.

`huggingface_hub` says what a repository holds and how to ask for it (HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE
are its own settings). It throws away what an interrupted download had fetched; here a file grows as NAME.part, a second
try asks for the rest, and the file gets its name once its hash is right. What is whole has a record, `MANIFEST`.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, logging
from tqdm import tqdm

from utils import UserError

MANIFEST = "download.json"
UNFINISHED = ".incomplete"  # ending of a folder's name while something is missing in it
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
SPARE = 64 << 20  # bytes that must stay free on a disk

logging.set_verbosity_error()  # of its warnings, those that matter come as one line of ours


@dataclass(frozen=True)
class HubFile:
    """A file as a hub describes it. digest: 'sha256:...' of its content, or 'git:...', git's hash of a small file."""

    path: str
    size: int
    digest: str


def check_id(repo):
    """Raise UserError unless `repo` reads owner/name, the name being one that a folder may have."""
    if not re.fullmatch(HUB_ID, repo, re.ASCII) or ".." in repo:
        raise UserError(f"{repo!r} is not a hub id: those read owner/name, such as EleutherAI/pythia-70m")


def stays_inside(path):
    """Whether a file named `path`, on any system, is in the folder it is written to."""
    return not (path.startswith("/") or ".." in path.split("/") or "\\" in path or ":" in path)


def describe(repo, revision="main", kind="model"):
    """What a repository holds: (commit, {path: HubFile}). Raises UserError where the hub does not tell."""
    with hub_errors(repo, revision):
        info = HfApi().repo_info(
            repo, revision=revision, repo_type=kind, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        )
    files = {}
    for entry in info.siblings or []:
        if not stays_inside(entry.rfilename):
            raise UserError(
                f"{repo} holds a file named {entry.rfilename!r}, which would be written elsewhere; nothing "
                "of it is downloaded"
            )
        if entry.size is None or not (entry.lfs or entry.blob_id):
            raise UserError(
                f"{constants.ENDPOINT} gives no sizes and hashes for {repo}, so that nothing could be "
                "verified; name another mirror in HF_ENDPOINT"
            )
        digest = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
        files[entry.rfilename] = HubFile(entry.rfilename, entry.size, digest)
    return info.sha, files


def digest_of(path, kind):
    """'sha256:...' or 'git:...' of a file, with a progress bar where it is large."""
    size = path.stat().st_size
    digest = hashlib.sha1(f"blob {size}\0".encode()) if kind == "git" else hashlib.sha256()
    with (
        open(path, "rb") as stream,
        tqdm(
            total=size,
            desc=f"checking {path.name}",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None if size > 100 << 20 else True,
        ) as bar,
    ):
        while block := stream.read(1 << 22):
            digest.update(block)
            bar.update(len(block))
    return f"{kind}:{digest.hexdigest()}"


def is_whole(path, file):
    """Whether `path` is `file` to the last bit."""
    return (
        path.is_file()
        and path.stat().st_size == file.size
        and digest_of(path, file.digest.split(":")[0]) == file.digest
    )


def to_move(folder, file):
    """Bytes still to fetch for a file that is not whole."""
    part = folder / f"{file.path}.part"
    have = part.stat().st_size if part.exists() else 0
    return file.size - have if have <= file.size else file.size


def check_disk(folder, needed):
    """Raise UserError where the disk of `folder` has no room for `needed` bytes more."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise UserError(
            f"{gigabytes(needed)} are to be written to {folder} and its disk has {gigabytes(free)} free; "
            "make room, and run this again"
        )


def fetch(repo, commit, file, folder, kind="model"):
    """Bring one file into `folder`, going on where an earlier try stopped."""
    path, part = folder / file.path, folder / f"{file.path}.part"
    path.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(repo, file.path, revision=commit, repo_type=kind)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    with hub_errors(repo, commit):
        cached = try_to_load_from_cache(repo, file.path, revision=commit, repo_type=kind)
        if isinstance(cached, str) and is_whole(Path(cached), file):
            shutil.copyfile(cached, part)
        refused = 0
        while refused < 2:  # a part of something else (or damaged) shows only in the end: once more, from the start
            with open(part, "ab") as stream:
                if stream.tell() > file.size:
                    stream.seek(0)
                    stream.truncate()
                have = stream.tell()
                try:  # where large files lie elsewhere the hub redirects, each time to an address of its own
                    http_get(
                        url,
                        stream,
                        resume_size=have,
                        headers=headers,
                        expected_size=file.size,
                        displayed_filename=file.path,
                    )
                except HfHubHTTPError:
                    raise
                except HTTPError:
                    if stream.tell() > have:  # a line that breaks now and then is no reason to stop
                        continue
                    raise
            if is_whole(part, file):
                os.replace(part, path)
                return
            part.unlink()
            refused += 1
    raise UserError(
        f"{file.path} of {repo} came twice with another hash than {constants.ENDPOINT} names; try again "
        "later, or another mirror (HF_ENDPOINT)"
    )


@contextmanager
def hub_errors(repo, revision):
    """What can go wrong between here and a hub, as one line each."""
    host = constants.ENDPOINT
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(
            f"{repo} is needed from {host}, and HF_HUB_OFFLINE forbids it; unset it, or copy the files "
            "here by hand (README.md: machines without a network)"
        ) from None
    except GatedRepoError:
        raise UserError(
            f"{repo} is gated: accept its terms on its page, {host}/{repo}, and set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{host} shows no repository {repo}: check the name, and if it is private set HF_TOKEN to a "
            "token that may read it"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{repo} has no revision {revision!r}; leave out --revision for its main one") from None
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(
                f"{host} does not let this token read {repo}; renew HF_TOKEN (or 'hf auth login'), or "
                "unset it if the repository is public"
            ) from None
        raise UserError(
            f"{host} answered {error.response.status_code} for {repo}; try again later, or name a mirror "
            "in HF_ENDPOINT. What came is kept."
        ) from None
    except HTTPError as error:
        raise UserError(
            f"no connection to {asked_host(error) or host} ({type(error).__name__}); check the network, or "
            "name a mirror in HF_ENDPOINT (it begins with https://). What came is kept: the next run goes "
            "on from there. With --offline only what is here is used."
        ) from None
    except OSError as error:
        raise file_error(error) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"what {host} answered for {repo} is not what a hub answers ({type(error).__name__}: "
            f"{one_line(error)}); check HF_ENDPOINT, HF_TOKEN and the network"
        ) from None


def asked_host(error):
    """The host a failed request went to, where that is not the hub's own (its large files lie elsewhere)."""
    try:
        host = error.request.url.host
    except (AttributeError, RuntimeError):
        return None
    return host if host != urlsplit(constants.ENDPOINT).hostname else None


@contextmanager
def file_errors():
    """What can go wrong with files and folders here, as one line each."""
    try:
        yield
    except OSError as error:
        raise file_error(error) from None


def file_error(error):
    """The `UserError` for an OSError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError("the disk is full; make room and run this again: it goes on where it stopped")
    return UserError(f"{error.filename or 'a file'}: {error.strerror or one_line(error)}; mend that and run this again")


def one_line(error):
    """An exception's text on one line of reasonable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


@contextmanager
def lock(folder):
    """Keeps a second process away from `folder` and its unfinished twin; makes the folder they are in."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        with FileLock(Path(tempfile.gettempdir()) / f"download-{name}.lock", timeout=0):
            yield
    except Timeout:
        raise UserError(f"another process is writing {folder}; wait for it") from None


def swap(finished, folder):
    """Give `finished` the name `folder`, in place of what has it."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    finished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(folder, files, **about):
    """Record what a folder holds, as the last thing that is written into it. about: "repo", "commit" and more."""
    text = json.dumps(about | {"files": [asdict(file) for file in files]}, indent=1)
    (folder / f"{MANIFEST}.new").write_text(text)
    os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)


def read_manifest(folder):
    """The record of a folder, its files as `HubFile`s; None where there is none to be read, or one of files elsewhere
    (what is not whole would be removed)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = [HubFile(**file) for file in manifest["files"]]
        about = {"repo": str(manifest["repo"]), "commit": str(manifest["commit"]), "files": files}
        inside = all(stays_inside(file.path) for file in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return {"revision": "main", "rows": {}} | manifest | about if inside else None


def damaged(folder, files):
    """Those of `files` that are missing in `folder` or not whole."""
    return [file for file in files if not is_whole(folder / file.path, file)]


def gigabytes(count):
    """Bytes as a person reads them."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "KB"))
    return f"{count / unit:.1f} {name}"
