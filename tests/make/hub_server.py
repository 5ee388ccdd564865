"""A Hub of one repo on this machine: as much of its HTTP as huggingface_hub asks for, and a count of what was sent."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """What was asked of the server, and how many bytes of each file it sent."""

    def __init__(self, folder: Path, repo_id: str, *, honours_ranges: bool = True) -> None:
        self.folder, self.repo_id, self.honours_ranges = folder, repo_id, honours_ranges
        self.requests: list[str] = []
        self.sent: dict[str, int] = {}
        self.url = ""

    @property
    def fetched(self) -> set[str]:
        """The files of which bytes were sent."""
        return set(self.sent) - {""}

    @property
    def num_bytes_of_weights(self) -> int:
        """Bytes of safetensors files that were sent."""
        return sum(size for name, size in self.sent.items() if name.endswith(".safetensors"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: Any) -> None:
        self.hub.requests.append(format % args)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        if re.fullmatch(rf"/api/models/{self.hub.repo_id}(/revision/[^/]+)?", path):
            self._send_json(self._info())
        elif re.fullmatch(rf"/api/models/{self.hub.repo_id}/tree/[^/]+", path):
            self._send_json(self._tree(recursive="recursive=true" in query.lower()))
        elif match := re.fullmatch(rf"/{self.hub.repo_id}/resolve/[^/]+/(.+)", path):
            self._send_file(match[1])
        else:
            self._send(404, b"not found", {"X-Error-Code": "RepoNotFound"})

    def _files(self) -> list[dict[str, Any]]:
        root = self.hub.folder
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return [
            {"path": p.relative_to(root).as_posix(), "size": p.stat().st_size, "oid": COMMIT} for p in paths
        ]

    def _tree(self, *, recursive: bool) -> list[dict[str, Any]]:
        """All files, or those at the top and the folders there."""
        files = [{"type": "file", **entry} for entry in self._files()]
        if recursive:
            return files
        folders = {file["path"].partition("/")[0] for file in files if "/" in file["path"]}
        return [file for file in files if "/" not in file["path"]] + [
            {"type": "directory", "path": name, "size": 0, "oid": COMMIT} for name in sorted(folders)
        ]

    def _info(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": file["path"], "size": file["size"], "blobId": COMMIT} for file in self._files()
        ]
        return {"id": self.hub.repo_id, "modelId": self.hub.repo_id, "sha": COMMIT, "siblings": siblings}

    def _send_json(self, words: Any) -> None:
        self._send(200, json.dumps(words).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str) -> None:
        path = self.hub.folder / name
        if not path.is_file():
            self._send(404, b"no such file", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        begin, end, status = 0, len(data), 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.hub.honours_ranges:
            begin, end, status = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data)), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._send(status, data[begin:end], headers, name)

    def _send(self, status: int, data: bytes, headers: dict[str, str], name: str = "") -> None:
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
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data[start : start + (1 << 14)])


@contextmanager
def serve(folder: Path, repo_id: str = "org/name", *, honours_ranges: bool = True) -> Iterator[LocalHub]:
    """A Hub that holds one folder as a repo; `HF_ENDPOINT` is its `url`."""
    hub = LocalHub(folder, repo_id, honours_ranges=honours_ranges)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
