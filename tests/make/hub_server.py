"""A Hub of one repo on this machine: as much of its HTTP as huggingface_hub asks for, and a count of what was sent."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class _Fault:
    path: str
    status: int
    headers: dict[str, str]
    times: int


class LocalHub:
    """What was asked of the server, and how many bytes of each file it sent."""

    def __init__(self, folder: Path, repo_id: str, *, honours_ranges: bool = True) -> None:
        self.folder, self.repo_id, self.honours_ranges = folder, repo_id, honours_ranges
        self.requests: list[str] = []
        self.sent: dict[str, int] = {}
        self.whole: list[str] = []  # files of which all bytes were asked for at once
        self.url, self.commit = "", COMMIT
        self.older: dict[str, Path] = {}  # commits before the present one
        self.is_pushed = False  # once something is, no other commit is known
        self.digests: dict[str, str] = {}  # of the listing, where it is wrong
        # called with a file's name before all of it is sent
        self.before: Callable[[str], None] | None = None
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def push(self, folder: Path, commit: str, *, rewrite: bool = False) -> None:
        """Have another folder at the branch, with a commit; rewrite: the commit before is gone."""
        self.is_pushed = True
        self.older[self.commit] = self.folder
        if rewrite:
            self.older.clear()
        self.folder, self.commit = folder, commit

    def at(self, revision: str) -> tuple[Path, str] | None:
        """Folder and commit of a branch or commit; None for a commit that is unknown."""
        if revision == self.commit or not re.fullmatch("[0-9a-f]{40}", revision):
            return self.folder, self.commit
        if not self.is_pushed:
            return self.folder, self.commit
        folder = self.older.get(revision)
        return (folder, revision) if folder else None

    def fail(self, path: str, status: int, times: int = 1 << 30, **headers: str) -> None:
        """Answer requests whose path holds this pattern with a status, so many times. headers: Retry_After="3"."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        self._faults.append(_Fault(path, status, named, times))

    def mend(self) -> None:
        """Answer everything again."""
        self._faults.clear()

    def fault(self, path: str) -> _Fault | None:
        """What is wrong with a request."""
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def count(self, name: str, num_bytes: int) -> None:
        """Some bytes of a file were sent."""
        with self._lock:
            self.sent[name] = self.sent.get(name, 0) + num_bytes

    @property
    def fetched(self) -> set[str]:
        """The files of which bytes were sent."""
        return set(self.sent) - {""}

    @property
    def num_bytes_of_weights(self) -> int:
        """Bytes of safetensors files that were sent."""
        return sum(size for name, size in self.sent.items() if name.endswith(".safetensors"))


def digest_of(path: Path) -> str:
    """A file's sha256, worked out once as long as it stays as it is."""
    status = path.stat()
    key = (str(path), status.st_size, status.st_mtime_ns, status.st_ino)
    if key not in _DIGESTS:
        _DIGESTS[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return _DIGESTS[key]


_DIGESTS: dict[tuple[str, int, int, int], str] = {}


def _is_large(path: Path) -> bool:
    """Weights are kept as large files."""
    return path.suffix == ".safetensors"


def _lfs(path: Path) -> dict[str, Any]:
    if not _is_large(path):
        return {}
    return {"lfs": {"oid": digest_of(path), "size": path.stat().st_size, "pointerSize": 134}}


def _sibling(file: dict[str, Any]) -> dict[str, Any] | None:
    lfs = file.get("lfs")
    return lfs and {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}


class Handler(BaseHTTPRequestHandler):
    """Answers in JSON and bytes."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def send_json(self, document: Any, status: int = 200) -> None:
        self.send(status, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, data: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(data), 1 << 14):  # a client that has enough hangs up
            try:
                self.wfile.write(data[start : start + (1 << 14)])
            except OSError:
                self.close_connection = True
                return
            self.count(name, len(data[start : start + (1 << 14)]))

    def count(self, name: str, num_bytes: int) -> None:
        """Some bytes of a file were sent."""


class HubHandler(Handler):
    hub: LocalHub

    def log_message(self, format: str, *args: Any) -> None:
        self.hub.requests.append(format % args)

    def count(self, name: str, num_bytes: int) -> None:
        self.hub.count(name, num_bytes)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if fault := self.hub.fault(path):
            self.send(fault.status, b"fault", fault.headers)
        elif match := re.fullmatch(rf"/api/models/{self.hub.repo_id}(?:/revision/([^/]+))?", path):
            self._of_commit(match[1], lambda root, commit: self.send_json(self._info(root, commit)))
        elif match := re.fullmatch(rf"/api/models/{self.hub.repo_id}/tree/([^/]+)", path):
            self._of_commit(match[1], lambda root, _: self.send_json(self._files(root)))
        elif match := re.fullmatch(rf"/{self.hub.repo_id}/resolve/([^/]+)/(.+)", path):
            self._of_commit(
                match[1], lambda root, commit: self._send_file(root, commit, unquote(match[2]))
            )
        else:
            self.send(404, b"not found", {"X-Error-Code": "RepoNotFound"})

    def _of_commit(self, revision: str | None, answer: Callable[[Path, str], None]) -> None:
        found = self.hub.at(unquote(revision or "main"))
        if found is None:
            self.send(404, b"no such commit", {"X-Error-Code": "RevisionNotFound"})
        else:
            answer(*found)

    def _files(self, root: Path) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": path.relative_to(root).as_posix(),
                "size": path.stat().st_size,
                "oid": COMMIT,
                **_lfs(path),
            }
            for path in sorted(root.rglob("*"))
            if path.is_file()
        ]

    def _info(self, root: Path, commit: str) -> dict[str, Any]:
        siblings = []
        for file in self._files(root):
            lfs = _sibling(file)
            if file["path"] in self.hub.digests:
                lfs = {**(lfs or {}), "sha256": self.hub.digests[file["path"]]}
            siblings.append(
                {"rfilename": file["path"], "size": file["size"], "blobId": COMMIT, "lfs": lfs}
            )
        name = self.hub.repo_id
        return {"id": name, "modelId": name, "sha": commit, "siblings": siblings}

    def _send_file(self, root: Path, commit: str, name: str) -> None:
        path = root / name
        if not path.is_file():
            self.send(404, b"no such file", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest_of(path)}"'}
        begin, end, status = 0, len(data), 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.hub.honours_ranges:
            begin, status = int(wanted[1]), 206
            end = min(int(wanted[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        if self.command == "GET" and status == 200:
            self.hub.whole.append(name)
            if self.hub.before is not None:
                self.hub.before(name)
        self.send(status, data[begin:end], headers, name)


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on this machine, by its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve(
    folder: Path, repo_id: str = "org/name", *, honours_ranges: bool = True
) -> Iterator[LocalHub]:
    """A Hub that holds one folder as a repo; `HF_ENDPOINT` is its `url`."""
    hub = LocalHub(folder, repo_id, honours_ranges=honours_ranges)
    with listening(type("Handler", (HubHandler,), {"hub": hub})) as hub.url:
        yield hub


def use(patch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Have the Hub library of this process ask this server, and keep files in this cache."""
    for name, value in (
        ("ENDPOINT", url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(cache)),
        ("HUGGINGFACE_HUB_CACHE", str(cache)),
        ("HF_HUB_OFFLINE", offline),
        ("HF_HUB_DISABLE_XET", True),
    ):
        patch.setattr(constants, name, value)


def cached(cache: Path) -> set[str]:
    """The files of a cache, by their names in the repo."""
    return {
        "/".join(path.relative_to(cache).parts[3:])
        for path in cache.glob("models--*/snapshots/*/**/*")
        if path.is_file()
    }
