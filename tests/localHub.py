"""A small Hugging Face hub on localhost, for the real client libraries: repositories of models and data sets, ranges,
hashes, tokens, gated models, and the faults of a network."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 1000  # bytes; the hub knows a file of that size or more by its SHA-256, as git LFS does


@dataclass
class Repository:
    """A repository of the hub.

    files: {path: bytes, or the Path of a file}. token: the token that may read it; None: all may. gated: its terms are
    not accepted. digests: the hashes computed so far.
    """

    files: dict[str, bytes | Path]
    token: str | None = None
    gated: bool = False
    digests: dict[tuple[str, object], str] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1("".join(f"{path}{self.digest(path)}" for path in sorted(self.files)).encode()).hexdigest()

    def size(self, path: str) -> int:
        content = self.files[path]
        return content.stat().st_size if isinstance(content, Path) else len(content)

    def read(self, path: str) -> bytes:
        content = self.files[path]
        return content.read_bytes() if isinstance(content, Path) else content

    def digest(self, path: str) -> str:
        """SHA-256 of a large file, git's hash of a small one."""
        content, size = self.files[path], self.size(path)
        key = path, content if isinstance(content, Path) else hash(content)
        if key not in self.digests:
            digest = hashlib.sha256() if size >= LARGE else hashlib.sha1(f"blob {size}\0".encode())
            digest.update(self.read(path))
            self.digests[key] = digest.hexdigest()
        return self.digests[key]

    def entry(self, path: str, called: str = "path", hashed: str = "oid") -> dict[str, object]:
        """A file as the hub's API describes it. Its calls have different names for the path and the hash."""
        digest, size = self.digest(path), self.size(path)
        large = {"lfs": {"sha256": digest, "oid": digest, "size": size, "pointerSize": 130}} if size >= LARGE else {}
        oid = hashlib.sha1(digest.encode()).hexdigest() if large else digest
        return {called: path, hashed: oid, "size": size, **large}


class LocalHub:
    """The server: `with LocalHub() as hub:` serves `hub.models` and `hub.datasets`, {id: Repository}, at `hub.url`.

    served: {path: bytes of the file sent so far}. requests, authorization: the requests, and their headers.
    cut_after: bytes of each large enough file that are sent before the connection breaks. After that it gets no more.
    cut: the files cut so far. replace: {path: bytes sent in place of the right content}. ranges: whether a part of a
    file can be requested. elsewhere: another `LocalHub`, to which large files are redirected, as the real hub does.
    answer, file_answer: (status, content) that answers every API call, or every request for a file, in place of the
    truth. down: everything is answered 503. busy: the statuses of the first answers, which ask to come again at once.
    slow: seconds before each answer.
    """

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.served: dict[str, int] = {}
        self.requests: list[str] = []
        self.authorization: list[str | None] = []
        self.cut_after: int | None = None
        self.cut: set[str] = set()
        self.replace: dict[str, bytes] = {}
        self.busy: list[int] = []
        self.ranges, self.down, self.slow = True, False, 0.0
        self.elsewhere: LocalHub | None = None
        self.answer: tuple[int, object] | None = None
        self.file_answer: tuple[int, object] | None = None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answer,), {"hub": self}))
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # A client that hangs up is no error.
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def moved(self) -> int:
        """Bytes of files sent since the last `forget`."""
        return sum(self.served.values())

    def forget(self) -> None:
        """Forget the requests and the bytes sent."""
        self.served.clear()
        self.requests.clear()


class Answer(BaseHTTPRequestHandler):
    """The answer to one request. hub: the `LocalHub` that received it."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """No log."""

    def do_GET(self) -> None:
        """Answer any request."""
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append(f"{self.command} {self.path}")
        hub.authorization.append(self.headers.get("Authorization"))
        time.sleep(hub.slow)
        if hub.busy:
            return self.reply(hub.busy.pop(0), {"error": "busy"}, **{"Retry-After": "0"})
        if hub.down:
            return self.reply(503, {"error": "down"})
        if hub.answer is not None and path.startswith("/api/"):
            return self.reply(*hub.answer)
        if hub.file_answer is not None and "/resolve/" in path:
            return self.reply(*hub.file_answer)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        call = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", path)
        if not file and not call:
            return self.refuse(404, "NotFound")
        kind, name, revision = file.group(1, 2, 3) if file else call.group(1, 2, 4)
        repository = (hub.datasets if (kind or "").startswith("datasets") else hub.models).get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or repository.token not in (None, token):
            return self.refuse(401, "RepoNotFound")
        if repository.gated and file:
            return self.refuse(403, "GatedRepo")
        if revision not in (None, "main", repository.commit):
            return self.refuse(404, "RevisionNotFound")
        if file:
            return self.send_file(repository, file[4])
        if call[3] in ("tree", "paths-info"):
            return self.reply(200, self.listing(repository, call[3], call[5], parse_qs(url.query)))
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        about = {"id": name, "modelId": name, "sha": repository.commit, "lastModified": now, "createdAt": now}
        about |= {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
        siblings = [repository.entry(path, "rfilename", "blobId") for path in repository.files]
        self.reply(200, about | {"siblings": siblings})

    do_HEAD = do_POST = do_GET

    def listing(
        self, repository: Repository, call: str, below: str, query: dict[str, list[str]]
    ) -> list[dict[str, object]]:
        """Files and folders of a data set: its tree, or the paths that a POST names."""
        paths = list(repository.files)
        folders = {"/".join(path.split("/")[:n]) for path in paths for n in range(1, path.count("/") + 1)}
        if call == "paths-info":
            form = parse_qs(self.body.decode()) if b"=" in self.body[:20] else json.loads(self.body)
            named = set(form["paths"])
        elif query.get("recursive", ["false"])[0].lower() == "true":
            named = {path for path in [*folders, *paths] if not below or path.startswith(below + "/")}
        else:
            named = {path for path in [*folders, *paths] if path.rpartition("/")[0] == below}
        directories = [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders & named)
        ]
        return directories + [{"type": "file", **repository.entry(path)} for path in paths if path in named]

    def send_file(self, repository: Repository, path: str) -> None:
        """Answer a request for a file or a part of it."""
        if path not in repository.files:
            return self.refuse(404, "EntryNotFound")
        hub, size, digest, start, end, status = self.hub, repository.size(path), repository.digest(path), 0, None, 200
        if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and hub.ranges:
            start, end, status = int(asked[1]), int(asked[2]) + 1 if asked[2] else None, 206
        end = size if end is None else min(end, size)
        if start >= end and status == 206:
            return self.refuse(416, "RangeNotSatisfiable")
        about = {"ETag": f'"{digest}"', "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size)}
        about |= {"X-Repo-Commit": repository.commit}
        about |= {"Accept-Ranges": "bytes"} if hub.ranges else {}
        about |= {"Content-Range": f"bytes {start}-{end - 1}/{size}"} if status == 206 else {}
        if hub.elsewhere is not None and size >= LARGE:
            return self.reply(302, b"", Location=hub.elsewhere.url + self.path, **about)
        content = hub.replace.get(path, repository.read(path) if self.command == "GET" else b"")
        if hub.cut_after is not None and size > hub.cut_after:
            content = content[: start + (0 if path in hub.cut else hub.cut_after)]
            self.close_connection = True
            if self.command == "GET":
                hub.cut.add(path)
        if self.command == "GET":
            hub.served[path] = hub.served.get(path, 0) + len(content[start:end])
        self.reply(status, content[start:end], **{"Content-Length": str(end - start)}, **about)

    def reply(self, status: int, content: object, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})
