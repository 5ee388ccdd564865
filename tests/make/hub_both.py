"""One server in front of two: a repo to download, and a Hub that takes uploads, behind one `HF_ENDPOINT`."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.make.hub_server import LocalHub, serve
from tests.make.hub_upload import UploadHub, serve_uploads

_OF_A_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "host")


@dataclass
class BothHubs:
    """source: the repo that is there. uploads: what becomes of org/name. url: of both."""

    source: LocalHub
    uploads: UploadHub
    url: str = ""


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hubs: BothHubs
    places: tuple[str, str]  # where the two listen

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _forward(self) -> None:
        place = self.places[0 if f"/{self.hubs.source.repo_id}" in self.path else 1]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kept = {key: value for key, value in self.headers.items() if key.lower() not in _OF_A_CONNECTION}
        connection = http.client.HTTPConnection(place)
        connection.request(self.command, self.path, body, kept)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in (*_OF_A_CONNECTION, "date", "server"):
                self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = _forward  # noqa: N815 - http.server's names


@contextmanager
def serve_both(folder: Path, repo_id: str = "org/source") -> Iterator[BothHubs]:
    """A Hub that holds one folder as a repo and takes uploads to org/name; `HF_ENDPOINT` is its `url`."""
    with serve(folder, repo_id) as source, serve_uploads() as uploads:
        hubs = BothHubs(source, uploads)
        places = tuple(hub.url.removeprefix("http://") for hub in (source, uploads))
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Front,), {"hubs": hubs, "places": places}))
        hubs.url = source.url = uploads.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hubs
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
