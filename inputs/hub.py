"""A Hugging Face hub: which files a repository holds, and how one is fetched, resumed and verified.

`huggingface_hub` lists a repository and sends the requests; HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are its
settings. It discards what an interrupted download had fetched. Here a file grows as NAME.part, a second try fetches the
rest, and the file gets its name when its hash is right.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

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

from inputs.commandLine import one_line
from inputs.files import file_error, gigabytes
from inputs.manifest import HubFile, is_whole, stays_inside
from inputs.progress import Bar
from utils import UserError

T = TypeVar("T")

HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
PATIENCE = 300  # seconds that a busy hub may ask to wait
SPARE = 64 << 20  # bytes that must stay free on a disk

logging.set_verbosity_error()  # The warnings that matter are UserErrors here.


def check_id(repo: str) -> None:
    """Raise UserError unless `repo` reads owner/name and the name can be a folder's."""
    if not re.fullmatch(HUB_ID, repo, re.ASCII) or ".." in repo:
        raise UserError(f"{repo!r} is not a hub id: those read owner/name, such as EleutherAI/pythia-70m")


def list_repository(repo: str, revision: str = "main", kind: str = "model") -> tuple[str, dict[str, HubFile]]:
    """A repository's commit and its files, {path: HubFile}. Raises UserError if the hub does not tell.

    kind: 'model' or 'dataset'.
    """
    with hub_errors(repo, revision):
        options = {"revision": revision, "repo_type": kind, "files_metadata": True}
        info = patiently(lambda: HfApi().repo_info(repo, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, **options))
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


def patiently(request: Callable[[], T]) -> T:
    """`request()`, again after a pause if the hub answers that it is busy and says for how long, at most three
    times."""
    for left in reversed(range(4)):
        try:
            return request()
        except HfHubHTTPError as error:
            status, pause = error.response.status_code, error.response.headers.get("Retry-After", "")
            if status not in (429, 500, 502, 503, 504) or not pause.isdecimal() or int(pause) > PATIENCE or not left:
                raise
            print(f"{constants.ENDPOINT} answered {status}; trying again in {pause} s", file=sys.stderr, flush=True)
            time.sleep(int(pause))
    raise AssertionError


def missing_bytes(folder: Path, file: HubFile) -> int:
    """Bytes still to fetch for a file that is not whole."""
    part = folder / f"{file.path}.part"
    size = part.stat().st_size if part.exists() else 0
    return file.size - size if size <= file.size else file.size


def check_disk(folder: Path, needed: int) -> None:
    """Raise UserError if the disk of `folder` has no room for `needed` bytes more."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise UserError(
            f"{gigabytes(needed)} are to be written to {folder} and its disk has {gigabytes(free)} free; "
            "make room, and run this again"
        )


def fetch(repo: str, commit: str, file: HubFile, folder: Path, kind: str = "model") -> None:
    """Fetch one file into `folder`. Resumes an earlier try; copies the file if it is in the library's own cache."""
    path, part = folder / file.path, folder / f"{file.path}.part"
    path.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(repo, file.path, revision=commit, repo_type=kind)
    with hub_errors(repo, commit):
        cached = try_to_load_from_cache(repo, file.path, revision=commit, repo_type=kind)
        if isinstance(cached, str) and is_whole(Path(cached), file):
            shutil.copyfile(cached, part)
        for _ in range(2):  # Damage in a part shows only at the end. The second try begins at the file's start.
            append_missing(url, part, file)
            if is_whole(part, file):
                os.replace(part, path)
                return
            part.unlink()
    raise UserError(
        f"{file.path} of {repo} came twice with another hash than {constants.ENDPOINT} names; try again "
        "later, or another mirror (HF_ENDPOINT)"
    )


def append_missing(url: str, part: Path, file: HubFile) -> None:
    """Append the bytes that `part` lacks. A connection that breaks is made again as long as each one brings bytes."""
    # Without a terminal the library shows nothing.
    bar = None if sys.stderr.isatty() else Bar(file.path, file.size, " bytes")
    options: dict[str, Any] = {
        "_tqdm_bar": bar,
        "headers": build_hf_headers() | {"Accept-Encoding": "identity"},
        "expected_size": file.size,
        "displayed_filename": file.path,
    }
    while True:
        with open(part, "ab") as stream:
            if stream.tell() > file.size:
                stream.seek(0)
                stream.truncate()
            start = stream.tell()
            try:
                # A hub redirects requests for large files, each time to another address.
                patiently(lambda: http_get(url, stream, resume_size=stream.tell(), **options))
                return
            except HfHubHTTPError:
                raise
            except HTTPError:
                if stream.tell() <= start:
                    raise


@contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Raise what can go wrong between this machine and a hub as a UserError."""
    host = constants.ENDPOINT
    proxies = getproxies()
    proxy = proxies.get(urlsplit(host).scheme) or proxies.get("all")
    through = (
        f" through the proxy {proxy.rpartition('@')[2]}"
        if proxy and not proxy_bypass(urlsplit(host).hostname or "")
        else ""
    )
    if not host:
        raise UserError("HF_ENDPOINT is empty: unset it, or name a mirror (it begins with https://)")
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(
            f"{repo} is needed from {host}, and HF_HUB_OFFLINE forbids it; unset it, or copy the files "
            "here by hand (docs/pythia-on-gpu.md)"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(refused_request(error, repo, revision)) from None
    except HTTPError as error:
        raise UserError(
            f"no connection to {other_host(error) or host}{through} ({type(error).__name__}); check the network, or "
            "name a mirror in HF_ENDPOINT (it begins with https://). What came is kept: the next run goes "
            "on from there. With --offline only what is here is used."
        ) from None
    except OSError as error:
        raise file_error(error) from None
    except ImportError:
        remedy = "install it (.venv/bin/python -m pip install socksio), or name another proxy"
        raise UserError(f"to reach {host}{through} takes the package socksio; {remedy}") from None
    except (ValueError, KeyError, TypeError) as error:
        if "proxy" in str(error):
            raise UserError(f"a proxy cannot be used ({one_line(error)}); name one of http:// or socks5://") from None
        raise UserError(
            f"what {host} answered for {repo} is not what a hub answers ({type(error).__name__}: "
            f"{one_line(error)}); check HF_ENDPOINT, HF_TOKEN and the network"
        ) from None


def refused_request(error: HfHubHTTPError, repo: str, revision: str) -> str:
    """The message for an HTTP status by which a hub refuses a request."""
    host, status = constants.ENDPOINT, error.response.status_code
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its terms on its page, {host}/{repo}, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{host} shows no repository {repo}: check the name, and if it is private set HF_TOKEN to a "
            "token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; leave out --revision for its main one"
    if status in (401, 403):
        return (
            f"{host} does not let this token read {repo}; renew HF_TOKEN (or 'hf auth login'), or "
            "unset it if the repository is public"
        )
    return f"{host} answered {status} for {repo}; try again later, or name a mirror in HF_ENDPOINT. What came is kept."


def other_host(error: HTTPError) -> str | None:
    """The host that a failed request went to, unless it is the hub itself: large files may be on another host."""
    try:
        host = error.request.url.host
    except (AttributeError, RuntimeError):
        return None
    return host if host != urlsplit(constants.ENDPOINT).hostname else None
