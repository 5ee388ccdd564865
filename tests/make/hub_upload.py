"""A Hub that takes uploads, on this machine: as much of its protocol as huggingface_hub asks for without Xet.

Repos are created, files asked about (preupload), large ones sent by LFS, commits come as lines of JSON. What is there
is kept in memory, commit by commit, so that a test sees every state that somebody could have downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from tests.make.hub_server import Handler, HubHandler, LocalHub, listening


class Stored(NamedTuple):
    """A file of a commit."""

    data: bytes
    is_lfs: bool

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


Tree = dict[str, Stored]


class UploadHub:
    """The server's side. commits: branch → every state of it, the first of a new repo. fail_at: the number of the
    request among `counted` (commits and sent objects) that is refused, and all after it.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.commits: dict[str, list[Tree]] = {}
        self.messages: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.private = private
        self.fail_at: int | None = None
        # Called when large files are about to be sent, and when a commit is made, before its answer.
        self.on_batch: Callable[[], None] | None = None
        self.on_commit: Callable[[], None] | None = None
        self.checks_digests = True  # of sent objects
        self.status = 400
        self.num_counted = 0
        self.url = ""
        self.lock = threading.Lock()

    def tree(self, branch: str = "main") -> Tree:
        return self.commits[branch][-1]

    def oid(self, branch: str) -> str:
        return f"{len(self.commits[branch]):040x}"

    def write(self, folder: Path, branch: str = "main", number: int = -1) -> Path:
        """A state as a folder."""
        for name, stored in self.commits[branch][number].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(stored.data)
        return folder


class _Handler(Handler, BaseHTTPRequestHandler):
    hub: UploadHub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/org/name(?:/revision/([^/]+))?", path):
            self._info(match[1] or "main")
        elif match := re.fullmatch(r"/org/name/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2])
        else:
            self.send_json({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        with self.hub.lock:
            if path == "/api/repos/create":
                self._create()
            elif match := re.fullmatch(r"/api/models/org/name/branch/([^/]+)", path):
                self.hub.commits.setdefault(match[1], [self.hub.tree()])
                self.send_json({})
            elif match := re.fullmatch(r"/api/models/org/name/preupload/([^/]+)", path):
                self._preupload(match[1], json.loads(body))
            elif path == "/org/name.git/info/lfs/objects/batch":
                self._batch(json.loads(body))
            elif match := re.fullmatch(r"/api/models/org/name/commit/([^/]+)", path):
                self._commit(match[1], [json.loads(line) for line in body.splitlines()])
            elif path == "/api/validate-yaml":
                self.send_json({"errors": [], "warnings": []})
            else:
                self.send_json({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        with self.hub.lock:
            if self._fails():
                return
            assert not self.hub.checks_digests or hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
            self.hub.sent.append(oid)
            self.send_json({})

    # --- what is asked

    def _create(self) -> None:
        if self.hub.commits:
            self.send_json({"url": f"{self.hub.url}/org/name", "error": "created already"}, 409)
            return
        self.hub.commits["main"] = [
            {".gitattributes": Stored(b"*.safetensors filter=lfs\n", False)}
        ]
        self.send_json({"url": f"{self.hub.url}/org/name", "name": "org/name"})

    def _info(self, revision: str) -> None:
        revision = self._branch(revision)
        if revision not in self.hub.commits:
            self.send(404, b"no such repo", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = []
        for name, stored in self.hub.tree(revision).items():
            size = len(stored.data)
            lfs = {"sha256": stored.sha256, "size": size, "pointerSize": 1}
            siblings.append(
                {"rfilename": name, "size": size, "lfs": lfs if stored.is_lfs else None}
            )
        info = {"id": "org/name", "sha": self.hub.oid(revision), "private": self.hub.private}
        self.send_json(info | {"siblings": siblings})

    def _branch(self, revision: str) -> str:
        """The branch whose last commit is meant."""
        return next(
            (branch for branch in self.hub.commits if revision == self.hub.oid(branch)), revision
        )

    def _preupload(self, revision: str, document: Any) -> None:
        files = []
        for file in document["files"]:
            name, stored = file["path"], self.hub.tree(revision).get(file["path"])
            oid = None if stored is None else stored.sha256 if stored.is_lfs else stored.git_oid
            mode = "lfs" if name.endswith(".safetensors") else "regular"
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": files})

    def _batch(self, document: Any) -> None:
        if self.hub.on_batch is not None:
            self.hub.on_batch()
        objects = []
        for item in document["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            is_known = item["oid"] in self.hub.objects
            objects.append(item if is_known else item | {"actions": actions})
        self.send_json({"transfer": "basic", "objects": objects})

    def _commit(self, revision: str, lines: list[Any]) -> None:
        if self._fails():
            return
        header, *operations = lines
        parent = header["value"].get("parentCommit")
        if parent is not None and parent != self.hub.oid(revision):
            self.send_json({"error": "A commit has happened since."}, 412)
            return
        tree = dict(self.hub.tree(revision))
        for operation in operations:
            key, value = operation["key"], operation["value"]
            if key == "file":
                tree[value["path"]] = Stored(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                tree[value["path"]] = Stored(self.hub.objects[value["oid"]], True)
            else:
                assert key == "deletedFile"
                del tree[value["path"]]
        self.hub.commits[revision].append(tree)
        self.hub.messages.append(header["value"]["summary"])
        oid = self.hub.oid(revision)
        if self.hub.on_commit is not None:
            self.hub.on_commit()
        self.send_json({"commitUrl": f"{self.hub.url}/org/name/commit/{oid}", "commitOid": oid})

    def _file(self, revision: str, name: str) -> None:
        branch = next((b for b in self.hub.commits if revision in (b, self.hub.oid(b))), "main")
        stored = self.hub.tree(branch)[name]
        headers = {"X-Repo-Commit": self.hub.oid(branch), "ETag": f'"{stored.git_oid}"'}
        self.send(200, stored.data, headers)

    # --- how it is answered

    def _fails(self) -> bool:
        self.hub.num_counted += 1
        if self.hub.fail_at is None or self.hub.num_counted < self.hub.fail_at:
            return False
        self.send_json({"error": "refused"}, self.hub.status)
        return True

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


@contextmanager
def serve_uploads(*, private: bool = False) -> Iterator[UploadHub]:
    """A Hub without any repo yet; `HF_ENDPOINT` is its `url`."""
    hub = UploadHub(private=private)
    with listening(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


@dataclass
class BothHubs:
    """source: the repo that is there. uploads: what becomes of org/name. url: of both."""

    source: LocalHub
    uploads: UploadHub
    url: str = ""


@contextmanager
def serve_both(folder: Path) -> Iterator[BothHubs]:
    """A Hub that holds one folder as a repo and takes uploads to org/name; `HF_ENDPOINT` is its `url`."""
    hubs = BothHubs(LocalHub(folder, "org/source"), UploadHub())

    class Chosen(BaseHTTPRequestHandler):
        """Answers a request as the Hub that it is for."""

        def parse_request(self) -> bool:
            is_whole = super().parse_request()
            self.__class__ = Source if is_whole and "/org/source" in self.path else Uploads  # type: ignore[assignment]
            return is_whole

    class Source(Chosen, HubHandler):
        hub = hubs.source

    class Uploads(Chosen, _Handler):
        hub = hubs.uploads

    with listening(Uploads) as hubs.url:
        hubs.source.url = hubs.uploads.url = hubs.url
        yield hubs
