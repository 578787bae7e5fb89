"""A Hugging Face hub: which files a repository holds, and how they are fetched, resumed and verified.

`huggingface_hub` sends the requests; HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are its settings. Its
`snapshot_download` discards what an interrupted download had fetched and computes no hashes. Here a file grows as
NAME.part, a second try fetches the rest, and the file gets its name when its hash is right.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
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

from inputs.commandLine import one_line
from inputs.files import file_error, gigabytes
from inputs.manifest import HubFile, Manifest, is_whole, stays_inside
from inputs.progress import Bar
from utils import UserError

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


def list_repository(repo: str, revision: str = "main", kind: str = "model") -> Manifest:
    """A repository's commit and its files. Raises UserError if the hub does not list them.

    kind: 'model' or 'dataset'. Requests to a busy hub are repeated.
    """
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
                raise UserError(
                    f"{repo} has a file named {path!r}, which lies outside its folder; nothing was downloaded"
                )
            digest = f"sha256:{lfs['sha256']}" if lfs else f"git:{entry['blobId']}"
            files.append(HubFile(path, entry["size"], digest))
        return Manifest(repo, info["sha"], revision, files=files)


def check_disk(folder: Path, needed: int) -> None:
    """Raise UserError if the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise UserError(
            f"{gigabytes(needed)} are needed in {folder}, where only {gigabytes(free)} are free; "
            "free some space and run the command again"
        )


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
            if isinstance(cached, str) and is_whole(Path(cached), file):
                shutil.copyfile(cached, part)
            for _ in range(2):  # Damage in a part shows only at the end. The second try begins at the file's start.
                append_missing(hf_hub_url(repo, file.path, revision=commit, repo_type=kind), part, file)
                if is_whole(part, file):
                    os.replace(part, folder / file.path)
                    break
                part.unlink()
            else:
                raise UserError(
                    f"{file.path} of {repo} was downloaded twice with a hash that differs from that of "
                    f"{constants.ENDPOINT}; try again later, or another mirror (HF_ENDPOINT)"
                )


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
        raise UserError(
            f"no connection to {host} ({type(error).__name__}); check the network, or name a mirror in HF_ENDPOINT (it "
            "begins with https://). What was downloaded is kept; the next run resumes from there. With --offline only "
            "local files are used."
        ) from None
    except OSError as error:
        raise file_error(error) from None
    except (ImportError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{host} gives no usable answer for {repo} ({type(error).__name__}: {one_line(error)}); check HF_ENDPOINT, "
            "HF_TOKEN, the proxy and the network"
        ) from None
