"""A small Hugging Face hub on localhost, for the real client libraries: repositories of models and data sets, ranges,
hashes, tokens, gates, and the faults a network has."""

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 1000  # bytes from which a file is large: known by its SHA-256, as with git LFS


@dataclass
class Repository:
    """files: {path: bytes, or the Path of a file}; token: who may read it; gated: its terms are not accepted."""

    files: dict
    token: str | None = None
    gated: bool = False
    digests: dict = field(default_factory=dict)

    @property
    def commit(self):
        return hashlib.sha1("".join(f"{path}{self.digest(path)}" for path in sorted(self.files)).encode()).hexdigest()

    def size(self, path):
        content = self.files[path]
        return content.stat().st_size if isinstance(content, Path) else len(content)

    def read(self, path, start=0, end=None):
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

    def digest(self, path):
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

    def entry(self, path, called="path", hashed="oid"):
        """A file as the hub's interface describes it; its calls name the path and the hash differently."""
        digest, size = self.digest(path), self.size(path)
        large = {"lfs": {"sha256": digest, "oid": digest, "size": size, "pointerSize": 130}} if size >= LARGE else {}
        oid = hashlib.sha1(digest.encode()).hexdigest() if large else digest
        return {called: path, hashed: oid, "size": size, **large}


class LocalHub:
    """`with LocalHub() as hub:` serves `hub.models` and `hub.datasets`, {id: Repository}, at `hub.url`.

    served: bytes of files sent so far, {path: count}; requests: what was asked for.
    cut_after: how many bytes of each file are sent before the connection breaks, and none of them afterwards.
    replace: {path: bytes} sent in place of the right content. ranges: whether parts of files may be asked for.
    elsewhere: another `LocalHub` that large files are redirected to, as the real hub does. answer: what every call of
    the interface is answered, in place of the truth; file_answer: what every request for a file is.
    slow: seconds before each answer.
    """

    def __init__(self):
        self.models, self.datasets = {}, {}
        self.served, self.requests, self.authorization = {}, [], []
        self.cut_after, self.replace, self.ranges, self.down, self.cut = None, {}, True, False, set()
        self.elsewhere, self.answer, self.file_answer, self.slow = None, None, None, 0
        hub = self

        class Handler(Answer):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that hangs up
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @property
    def moved(self):
        """Bytes of files sent since the last `forget`."""
        return sum(self.served.values())

    def forget(self):
        self.served.clear()
        self.requests.clear()


class Answer(BaseHTTPRequestHandler):
    hub = None
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(f"{self.command} {self.path}")
        self.hub.authorization.append(self.headers.get("Authorization"))
        time.sleep(self.hub.slow)
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
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self.reply(
            200,
            {
                "id": name,
                "modelId": name,
                "sha": repository.commit,
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "lastModified": now,
                "createdAt": now,
                "siblings": siblings,
            },
        )

    def listing(self, repository, call, below, query):
        """Files and folders of a data set, as its tree or as the paths a POST names."""
        folders = {"/".join(path.split("/")[:n]) for path in repository.files for n in range(1, path.count("/") + 1)}
        if call == "paths-info":
            form = parse_qs(self.body.decode()) if b"=" in self.body[:20] else json.loads(self.body)
            wanted = lambda path: path in form["paths"]  # noqa: E731
        elif query.get("recursive", ["false"])[0].lower() == "true":
            wanted = lambda path: not below or path.startswith(below + "/")  # noqa: E731
        else:
            wanted = lambda path: path.rpartition("/")[0] == below  # noqa: E731
        return [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders) if wanted(path)
        ] + [{"type": "file", **repository.entry(path)} for path in repository.files if wanted(path)]

    def send_file(self, repository, path):
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

    def reply(self, status, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.reply(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})
