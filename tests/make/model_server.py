"""A server of our own: a model of transformers over HTTP, in the protocols of three engines, with faults to plant.

It computes in the model's dtype, one request at a time, and decodes with a key-value cache.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import hqconv
from tests.make.conversions import manifest
from tests.make.families import moe_layers

PROTOCOLS = ("prompt_logprobs", "generate", "echo")
NAME = "served"
_FORWARD = transformers.Qwen3MoeForCausalLM.forward
_CACHE = "cache" if "cache" in inspect.signature(_FORWARD).parameters else "past_key_values"


def served_model(src: Path, out: Path | None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model of a source, with the decoded experts of an artifact if there is one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        src, dtype=dtype, experts_implementation="eager"
    )
    layers = [] if out is None else list(manifest(out)["blocks"])
    for name, (_, _, module) in zip(layers, moe_layers(model), strict=out is not None):
        weights = hqconv.dequantize(out, layer=name)
        with torch.no_grad():
            module.gate_up_proj.copy_(torch.cat([weights["w1"], weights["w3"]], 1))
            module.down_proj.copy_(weights["w2"])
    assert isinstance(model, nn.Module)
    return model.eval()


@dataclass
class Request:
    """What a fault may depend on."""

    num_tokens: int
    is_decoding: bool
    num_in_flight: int


@dataclass
class ModelServer:
    """A server's state, which tests change. is_wrong: requests whose logits are disturbed.

    answer: takes the place of all answers to completions: sends bytes by the handler itself.
    """

    model: nn.Module
    protocol: str = PROTOCOLS[0]
    names: tuple[str, ...] = (NAME,)
    max_tokens: int | None = None
    key: str = ""
    url: str = ""
    is_wrong: Callable[[Request], bool] = lambda _: False
    change: Callable[[Any], Any] = lambda document: document
    answer: Callable[[BaseHTTPRequestHandler], None] | None = None
    requests: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_in_flight: int = 0
    most_in_flight: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def _log_probabilities(self, logits: torch.Tensor, request: Request) -> torch.Tensor:
        logits = logits.float()
        if self.is_wrong(request):
            logits = logits + 0.5 * torch.roll(logits, 1, -1)
        return logits.log_softmax(-1)

    def score(self, ids: list[int]) -> list[float]:
        """Log-probabilities of each token but the first."""
        with self.lock, torch.no_grad():
            request = Request(len(ids), False, self.num_in_flight)
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            found = self._log_probabilities(logits, request)
        return found.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def decode(self, ids: list[int], count: int) -> list[tuple[int, float]]:
        """The greedy answer."""
        found: list[tuple[int, float]] = []
        with self.lock, torch.no_grad():
            request = Request(len(ids), True, self.num_in_flight)
            output = self.model(input_ids=torch.tensor([ids]), use_cache=True)
            for _ in range(count):
                each = self._log_probabilities(output.logits[0, -1], request)
                token = int(each.argmax())
                found.append((token, float(each[token])))
                cache = {_CACHE: output.past_key_values}
                output = self.model(input_ids=torch.tensor([[token]]), use_cache=True, **cache)
        return found

    def completion(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """Status and document of an answer."""
        ids = asked["input_ids"] if path == "/generate" else asked["prompt"]
        if path == "/generate":
            if self.protocol != "generate":
                return 404, {"detail": "Not Found"}
            count = asked["sampling_params"]["max_new_tokens"]
            inputs = [[None, ids[0], None]]
            inputs += [[p, i, None] for p, i in zip(self.score(ids), ids[1:], strict=True)]
            outputs = [[p, i, None] for i, p in self.decode(ids, count)] if count > 1 else []
            return 200, {
                "text": "",
                "meta_info": {"input_token_logprobs": inputs, "output_token_logprobs": outputs},
            }
        if self.protocol == "generate" or asked["model"] not in self.names:
            return 404, {"error": {"message": f"The model {asked['model']} does not exist."}}
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None}
        if self.protocol == "echo":
            if asked.get("echo"):
                choice["logprobs"] = {"token_logprobs": [None, *self.score(ids), -0.5]}
            return 200, {"choices": [choice]}
        if max(ids) >= self.model.config.vocab_size:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        if "prompt_logprobs" in asked:
            scores = zip(ids[1:], self.score(ids), strict=True)
            choice["prompt_logprobs"] = [
                None,
                *({str(i): {"logprob": p, "rank": 1, "decoded_token": "x"}} for i, p in scores),
            ]
        elif "logprobs" in asked:
            found = self.decode(ids, asked["max_tokens"])
            choice["logprobs"] = {"token_logprobs": [p for _, p in found], "tokens": []}
            choice["token_ids"] = [i for i, _ in found]
        return 200, {"choices": [choice]}


@contextmanager
def serving(server: ModelServer) -> Iterator[ModelServer]:
    """Run a server in threads; its address is `server.url`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send(self, status: int, document: Any) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # the client has gone
                super().handle()

        def do_GET(self) -> None:
            server.paths.append(self.path)
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                self.send(401, {"error": {"message": f"wrong key {self.headers['Authorization']}"}})
                return
            models = [{"id": name, "max_model_len": server.max_tokens} for name in server.names]
            self.send(200, {"object": "list", "data": models})

        def do_POST(self) -> None:
            server.paths.append(self.path)
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(asked)
            if server.answer is not None:
                server.answer(self)
                return
            with _counted(server):
                status, document = server.completion(self.path, asked)
            self.send(status, server.change(document))

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


_COUNT = threading.Lock()


@contextmanager
def _counted(server: ModelServer) -> Iterator[None]:
    with _COUNT:
        server.num_in_flight += 1
        server.most_in_flight = max(server.most_in_flight, server.num_in_flight)
    try:
        yield
    finally:
        with _COUNT:
            server.num_in_flight -= 1
