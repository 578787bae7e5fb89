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
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (GatedRepoError, HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled,
                                    RepositoryNotFoundError, RevisionNotFoundError)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, logging
from tqdm import tqdm

from utils import UserError

MANIFEST = "download.json"
UNFINISHED = ".incomplete"  # ending of a folder's name while something is missing in it
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
SPARE = 64 << 20            # bytes that must stay free on a disk

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


def describe(repo, revision="main", kind="model"):
    """What a repository holds: (commit, {path: HubFile}). Raises UserError where the hub does not tell."""
    with hub_errors(repo, revision):
        info = HfApi().repo_info(repo, revision=revision, repo_type=kind, files_metadata=True)
    files = {}
    for entry in info.siblings or []:
        if entry.rfilename.startswith("/") or ".." in entry.rfilename.split("/"):
            raise UserError(f"{repo} holds a file named {entry.rfilename!r}, which would be written elsewhere; nothing "
                            "of it is downloaded")
        digest = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
        files[entry.rfilename] = HubFile(entry.rfilename, entry.size, digest)
    return info.sha, files


def digest_of(path, kind):
    """'sha256:...' or 'git:...' of a file, with a progress bar where it is large."""
    size = path.stat().st_size
    digest = hashlib.sha1(f"blob {size}\0".encode()) if kind == "git" else hashlib.sha256()
    with open(path, "rb") as stream, tqdm(total=size, desc=f"checking {path.name}", unit="B", unit_scale=True,
                                          leave=False, disable=None if size > 100 << 20 else True) as bar:
        while block := stream.read(1 << 22):
            digest.update(block)
            bar.update(len(block))
    return f"{kind}:{digest.hexdigest()}"


def is_whole(path, file):
    """Whether `path` is `file` to the last bit."""
    return (path.is_file() and path.stat().st_size == file.size
            and digest_of(path, file.digest.split(":")[0]) == file.digest)


def to_move(folder, file):
    """Bytes still to fetch for a file that is not whole."""
    part = folder / f"{file.path}.part"
    have = part.stat().st_size if part.exists() else 0
    return file.size - have if have <= file.size else file.size


def check_disk(folder, needed):
    """Raise UserError where the disk of `folder` has no room for `needed` bytes more."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise UserError(f"{gigabytes(needed)} are to be written to {folder} and its disk has {gigabytes(free)} free; "
                        "make room, and run this again")


def fetch(repo, commit, file, folder, kind="model"):
    """Bring one file into `folder`, going on where an earlier try stopped."""
    path, part = folder / file.path, folder / f"{file.path}.part"
    path.parent.mkdir(parents=True, exist_ok=True)
    with hub_errors(repo, commit):
        cached = try_to_load_from_cache(repo, file.path, revision=commit, repo_type=kind)
        if isinstance(cached, str) and is_whole(Path(cached), file):
            shutil.copyfile(cached, part)
        for _ in range(2):  # a part of something else (or damaged) shows only in the end: once more, from the start
            with open(part, "ab") as stream:
                if stream.tell() > file.size:
                    stream.truncate(0)
                url = hf_hub_url(repo, file.path, revision=commit, repo_type=kind)
                headers = build_hf_headers() | {"Accept-Encoding": "identity"}
                place = get_hf_file_metadata(url, headers=headers).location
                if urlsplit(place).netloc != urlsplit(url).netloc:  # the token is for the hub alone
                    headers.pop("authorization", None)
                http_get(place, stream, resume_size=stream.tell(), headers=headers, expected_size=file.size,
                         displayed_filename=file.path)
            if is_whole(part, file):
                os.replace(part, path)
                return
            part.unlink()
    raise UserError(f"{file.path} of {repo} came twice with another hash than {constants.ENDPOINT} names; try again "
                    "later, or another mirror (HF_ENDPOINT)")


@contextmanager
def hub_errors(repo, revision):
    """What can go wrong between here and a hub, as one line each."""
    host = constants.ENDPOINT
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"{repo} is needed from {host}, and HF_HUB_OFFLINE forbids it; unset it, or copy the files "
                        "here by hand (README.md: offline machines)") from None
    except GatedRepoError:
        raise UserError(f"{repo} is gated: accept its terms at {host}/{repo} and set HF_TOKEN to a token of that "
                        "account") from None
    except RepositoryNotFoundError:
        raise UserError(f"{host} shows no repository {repo}: check the name, and if it is private set HF_TOKEN to a "
                        "token that may read it") from None
    except RevisionNotFoundError:
        raise UserError(f"{repo} has no revision {revision!r}; leave out --revision for its main one") from None
    except HFValidationError:
        raise UserError(f"{repo!r} is not a hub id: those read owner/name, such as EleutherAI/pythia-70m") from None
    except HfHubHTTPError as error:
        raise UserError(f"{host} answered {error.response.status_code} for {repo}; try again later, or name a mirror "
                        "in HF_ENDPOINT. What came is kept.") from None
    except HTTPError as error:
        raise UserError(f"no connection to {host} ({type(error).__name__}); check the network or name a mirror in "
                        "HF_ENDPOINT. What came is kept: the next run goes on from there. With --offline only what is "
                        "here is used.") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError("the disk is full; make room and run this again: it goes on where it stopped") from None
        reason = error.strerror or " ".join(str(error).split())[:120]
        raise UserError(f"the download of {repo} failed ({reason}); run this again: it goes on where it "
                        "stopped") from None


def write_manifest(folder, files, **about):
    """Record what a folder holds, as the last thing that is written into it."""
    (folder / MANIFEST).write_text(json.dumps(about | {"files": [asdict(file) for file in files]}, indent=1))


def read_manifest(folder):
    """The record of a folder, its files as `HubFile`s; None where there is none to be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest | {"files": [HubFile(**file) for file in manifest["files"]]}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def damaged(folder, files):
    """Those of `files` that are missing in `folder` or not whole."""
    return [file for file in files if not is_whole(folder / file.path, file)]


def gigabytes(count):
    """Bytes as a person reads them."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "KB"))
    return f"{count / unit:.1f} {name}"


def as_command(script, work):
    """Run `work()` for the command line: the exit code, after one line for whatever stopped it."""
    try:
        work()
    except UserError as error:
        print(f"{script}: error:", *str(error).split(), file=sys.stderr)
    except OSError as error:
        reason = f"{error.filename or 'a file'} cannot be used ({error.strerror or error})"
        print(f"{script}: error:", *reason.split(), file=sys.stderr)
    except KeyboardInterrupt:
        print("\nInterrupted. What came is kept; run this again to go on.", file=sys.stderr)
        return 130
    else:
        return 0
    return 2
