"""A small Hugging Face hub on localhost, for the real client libraries: repositories of models and data sets, ranges,
hashes, tokens, gated models, and the faults of a network."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
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

    def read(self, path: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Pieces of a file's bytes `start` to `end`."""
        content, end = self.files[path], self.size(path) if end is None else end
        if isinstance(content, bytes):
            yield content[start:end]
            return
        with open(content, "rb") as stream:
            stream.seek(start)
            while start < end and (piece := stream.read(min(1 << 22, end - start))):
                start += len(piece)
                yield piece

    def digest(self, path: str) -> str:
        """SHA-256 of a large file, git's hash of a small one."""
        content = self.files[path]
        key = path, content if isinstance(content, Path) else hash(content)
        if key not in self.digests:
            large = self.size(path) >= LARGE
            digest = hashlib.sha256() if large else hashlib.sha1(f"blob {self.size(path)}\0".encode())
            for piece in self.read(path):
                digest.update(piece)
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
    cut: the files cut so far.
    replace: {path: bytes sent in place of the right content}. ranges: whether a part of a file can be requested.
    elsewhere: another `LocalHub`, to which large files are redirected, as the real hub does.
    answer, file_answer: (status, content) that answers every API call, or every request for a file, in place of the
        truth. down: everything is answered 503. busy: the statuses of
        the first answers, which ask to come again at once. slow: seconds before each answer.
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

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self) -> None:
        """Answer any request."""
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(f"{self.command} {self.path}")
        self.hub.authorization.append(self.headers.get("Authorization"))
        time.sleep(self.hub.slow)
        if self.hub.busy:
            return self.reply(self.hub.busy.pop(0), {"error": "busy"}, **{"Retry-After": "0"})
        if self.hub.down:
            return self.reply(503, {"error": "down"})
        if self.hub.answer is not None and path.startswith("/api/"):
            return self.reply(*self.hub.answer)
        if self.hub.file_answer is not None and "/resolve/" in path:
            return self.reply(*self.hub.file_answer)
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", path
        ):
            kind, name, call, revision, below = match.groups()
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, below = match.groups()
            kind, call = "datasets" if kind else "models", "resolve"
        else:
            return self.refuse(404, "NotFound")
        repository = getattr(self.hub, kind).get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or repository.token not in (None, token):
            return self.refuse(401, "RepoNotFound")
        if repository.gated and call == "resolve":
            return self.refuse(403, "GatedRepo")
        if revision not in (None, "main", repository.commit):
            return self.refuse(404, "RevisionNotFound")
        if call == "resolve":
            return self.send_file(repository, below)
        if call in ("tree", "paths-info"):
            return self.reply(200, self.listing(repository, call, below, parse_qs(url.query)))
        siblings = [repository.entry(path, "rfilename", "blobId") for path in repository.files]
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        about = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}
        about |= {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
        self.reply(200, about | {"lastModified": now, "createdAt": now})

    def listing(
        self, repository: Repository, call: str, below: str, query: dict[str, list[str]]
    ) -> list[dict[str, object]]:
        """Files and folders of a data set: its tree, or the paths that a POST names."""
        folders = {"/".join(path.split("/")[:n]) for path in repository.files for n in range(1, path.count("/") + 1)}
        if call == "paths-info":
            form = parse_qs(self.body.decode()) if b"=" in self.body[:20] else json.loads(self.body)
            wanted = form["paths"].__contains__
        elif query.get("recursive", ["false"])[0].lower() == "true":
            wanted = lambda path: not below or path.startswith(below + "/")  # noqa: E731
        else:
            wanted = lambda path: path.rpartition("/")[0] == below  # noqa: E731
        return [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders) if wanted(path)
        ] + [{"type": "file", **repository.entry(path)} for path in repository.files if wanted(path)]

    def send_file(self, repository: Repository, path: str) -> None:
        """Answer a request for a file or a part of it."""
        if path not in repository.files:
            return self.refuse(404, "EntryNotFound")
        size, start, end, status = repository.size(path), 0, None, 200
        if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and self.hub.ranges:
            start, end, status = int(asked[1]), int(asked[2]) + 1 if asked[2] else None, 206
        end = size if end is None else min(end, size)
        if start >= end and status == 206:
            return self.refuse(416, "RangeNotSatisfiable")
        moved = self.hub.elsewhere is not None and size >= LARGE
        self.send_response(302 if moved else status)
        if moved:
            self.send_header("Location", self.hub.elsewhere.url + self.path)
        self.send_header("Content-Length", "0" if moved else str(end - start))
        self.send_header("ETag", f'"{repository.digest(path)}"')
        self.send_header("X-Linked-Etag", f'"{repository.digest(path)}"')
        self.send_header("X-Linked-Size", str(size))
        self.send_header("X-Repo-Commit", repository.commit)
        if self.hub.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD" or moved:
            return
        if path in self.hub.replace:
            repository = Repository({path: self.hub.replace[path]})
        cut = self.hub.cut_after
        if cut is not None and size > cut:
            end = 0 if path in self.hub.cut else min(end, start + cut)
            self.hub.cut.add(path)
        for piece in repository.read(path, start, end) if end > start else ():
            self.wfile.write(piece)
            self.hub.served[path] = self.hub.served.get(path, 0) + len(piece)
        if cut is not None and size > cut:
            self.close_connection = True

    def reply(self, status: int, content: object, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})
