"""A small Hugging Face hub on localhost, for the real client libraries: repositories of models and data sets, ranges,
hashes, tokens, gated models, and the faults of a network."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = 1000  # bytes; the hub knows a file of that size or more by its SHA-256, as git LFS does


@dataclass
class Repository:
    """A repository of the hub.

    files: {path: bytes, or the Path of a file}. token: the token that may read it; None: all may. gated: its terms are
    not accepted.
    """

    files: dict[str, bytes | Path]
    token: str | None = None
    gated: bool = False

    @property
    def commit(self):
        return hashlib.sha1("".join(f"{path}{self.digest(path)}" for path in sorted(self.files)).encode()).hexdigest()

    def read(self, path):
        content = self.files[path]
        return content.read_bytes() if isinstance(content, Path) else content

    def digest(self, path):
        """SHA-256 of a large file, git's hash of a small one."""
        content = self.read(path)
        if len(content) >= LARGE:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def entry(self, path):
        """A file as the hub's API describes it."""
        size, digest = len(self.read(path)), self.digest(path)
        large = {"lfs": {"sha256": digest, "size": size}} if size >= LARGE else {}
        return {"rfilename": path, "size": size, "blobId": "0" * 40 if large else digest, **large}


class LocalHub(ThreadingHTTPServer):
    """The server: `with LocalHub() as hub:` serves `hub.models` and `hub.datasets`, {id: Repository}, at `hub.url`.

    served: {path: bytes of the file sent so far}. requests, authorization: the requests, and their headers.
    cut_after: bytes of each large enough file that are sent before the connection breaks. After that it gets no more.
    cut: the files cut so far. replace: {path: bytes sent in place of the right content}. ranges: whether a part of a
    file can be requested. elsewhere: another `LocalHub`, to which large files are redirected, as the real hub does.
    answer: f(whether a file is requested) -> (status, content) in place of the truth, or None. A client that may come
    again is told to do so at once.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.models, self.datasets, self.served, self.replace = {}, {}, {}, {}
        self.requests, self.authorization, self.cut = [], [], set()
        self.cut_after, self.elsewhere, self.ranges, self.answer = None, None, True, lambda is_file: None
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        """A client that hangs up is no error."""

    def server_close(self):
        self.shutdown()
        super().server_close()

    @property
    def moved(self):
        """Bytes of files sent since the last `forget`."""
        return sum(self.served.values())

    def forget(self):
        """Forget the requests and the bytes sent."""
        self.served.clear()
        self.requests.clear()


class Answer(BaseHTTPRequestHandler):
    """The answer of a `LocalHub` to one request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """No log."""

    def do_GET(self):
        """Answer a request for a file, or for the description of a repository."""
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {self.path}")
        hub.authorization.append(self.headers.get("Authorization"))
        asked = re.fullmatch(r"/(?:api/)?(models/|datasets/)?([^/]+/[^/]+)/(?:revision|resolve)/([^/]+)/?(.*)", path)
        kind, name, revision, file = asked.groups() if asked else [""] * 4
        if answer := hub.answer(bool(file)):
            return self.reply(*answer, **{"Retry-After": "0"})
        if not asked:
            return self.refuse(404, "NotFound")
        repository = (hub.datasets if kind == "datasets/" else hub.models).get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or repository.token not in (None, token):
            return self.refuse(401, "RepoNotFound")
        if repository.gated and file:
            return self.refuse(403, "GatedRepo")
        if revision not in ("main", repository.commit):
            return self.refuse(404, "RevisionNotFound")
        if file and file not in repository.files:
            return self.refuse(404, "EntryNotFound")
        if file:
            return self.send_file(repository, file)
        siblings = [repository.entry(path) for path in repository.files]
        self.reply(200, {"id": name, "sha": repository.commit, "siblings": siblings})

    do_HEAD = do_GET

    def send_file(self, repository, path):
        """Answer a request for a file, or for its end."""
        hub, content, start = self.server, repository.read(path), 0
        size, tag = len(content), f'"{repository.digest(path)}"'
        about = {"ETag": tag, "X-Linked-Etag": tag, "X-Linked-Size": str(size), "X-Repo-Commit": repository.commit}
        if hub.ranges and (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            start = int(asked[1])
            about["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if hub.elsewhere is not None and size >= LARGE:
            return self.reply(302, b"", Location=hub.elsewhere.url + self.path, **about)
        content = hub.replace.get(path, content)
        if hub.cut_after is not None and size > hub.cut_after:
            content = content[: start + (0 if path in hub.cut else hub.cut_after)]
            self.close_connection = True
            hub.cut.add(path)
        if self.command == "GET":
            hub.served[path] = hub.served.get(path, 0) + len(content[start:])
        status = 206 if "Content-Range" in about else 200
        self.reply(status, content[start:], **{"Content-Length": str(size - start)}, **about)

    def reply(self, status, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.reply(status, {"error": code}, **{"X-Error-Code": code, "X-Error-Message": code})
