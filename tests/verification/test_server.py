"""`verify --server` against a server of our own: healthy, with every planted fault, and hostile."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import hqconv
from hqconv.artifact.reference_predictions import read_reference
from hqconv.cli.app import app
from hqconv.errors import InputError, NetworkError, RequestError
from hqconv.verification import server as check
from hqconv.verification.result import VerificationReport
from tests.make.families import moe_layers, save_family
from tests.make.model_server import NAME, PROTOCOLS, ModelServer, Request, served_model, serving
from tests.make.tokenizer import write_tokenizer

CPU: dict[str, Any] = {"device": "cpu", "threads": 1}
CONTEXT = 64
SIZES = {"hidden": 64, "inner": 64, "experts": 8, "num_hidden_layers": 3}
Models = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A source whose predictions are not flat, an artifact with its reference, and the text."""
    folder = tmp_path_factory.mktemp("models")
    src, text = folder / "src", folder / "text"
    torch.manual_seed(0)
    options = {"mlp_only_layers": [], "max_position_embeddings": 512, "initializer_range": 0.2}
    model = save_family(src, "qwen3_moe", **SIZES, **options)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4
        for _, _, experts in moe_layers(model):  # so that they matter
            experts.gate_up_proj *= 2
            experts.down_proj *= 2
    model.save_pretrained(src, max_shard_size="200KB")
    write_tokenizer(src)
    words = random.Random(0)
    text.write_text(" ".join(str(words.randrange(3, 63)) for _ in range(2048)))
    hqconv.convert(src, folder / "out", schema="int4-g32", target="sm90", device="cpu")
    hqconv.evaluate(folder / "out", src, text, context_length=CONTEXT, **CPU)
    return src, folder / "out", text


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests, as many at once as show a fault of batches."""
    counts = {"_ANSWER_TOKENS": 8, "_NUM_ANSWERS": 4, "_NUM_AT_ONCE": 24, "_NUM_ALONE": 16}
    for name, count in counts.items():
        monkeypatch.setattr(check, name, count)


@pytest.fixture
def running(models: Models, quick: None) -> Iterator[ModelServer]:
    """A healthy server of the artifact, with a model of its own."""
    with serving(ModelServer(served_model(*models[:2]))) as server:
        yield server


def verified(out: Path, server: ModelServer, **options: Any) -> VerificationReport:
    return hqconv.verify(out, server=server.url, **CPU, **options)


def wrong(report: VerificationReport) -> tuple[set[str], str]:
    """The conditions that fail, and the verdict."""
    (result,) = report.results
    found = {name for name, one in result.measured.items() if one["status"] == "fail"}
    return found, result.findings[0].what if result.findings else ""


# --- healthy servers


def test_a_healthy_server_passes_with_all_requests(models: Models) -> None:
    with serving(ModelServer(served_model(*models[:2]))) as server:
        report = verified(models[1], server)
    (result,) = report.results
    assert report.passed, result.findings
    assert set(result.measured) == {*check._CONDITIONS, "identity"}
    assert result.measured["identity"]["whose"] == "artifact"
    for name, factor in (("prefill_together", 0.75), ("prefill_short", 1), ("prefill_long", 1)):
        figures = result.measured[name]
        limit = factor * (2 * figures["noise_mean"] + 0.001)  # docs/serving.md
        assert figures["mean_limit"] == pytest.approx(limit)
    assert server.most_in_flight == 64
    assert len(server.requests) == 1 + 32 + 32 + 64 + 1 + 2 * 8 + 2 * 64
    assert set(server.paths) == {"/v1/models", "/v1/completions"}
    assert all(isinstance(i, int) for asked in server.requests for i in asked["prompt"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_gives_the_same_figures(
    models: Models, running: ModelServer, protocol: str
) -> None:
    expected = verified(models[1], running).results[0].measured
    running.protocol = protocol
    report = verified(models[1], running)
    (result,) = report.results
    assert report.passed, result.findings
    answers = {name for name in expected if name.startswith("decode")}
    if protocol == "echo":
        assert not answers & result.measured.keys()
        assert result.notes == ["answers were not checked: the server gives no ids of tokens"]
        expected = {name: one for name, one in expected.items() if name not in answers}
    assert result.measured == expected


def test_a_short_context_limits_the_prompts(
    models: Models, running: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_ANSWER_TOKENS", 64)
    running.max_tokens = 33
    (result,) = verified(models[1], running).results
    assert result.status == "pass"
    assert max(len(asked["prompt"]) for asked in running.requests) == 32
    assert "prefill_long" not in result.measured
    assert result.notes == ["answers were not checked: the server's context is too short"]


# --- planted faults: of weights and of the model


def experts_of(model: nn.Module, layer: int) -> Any:
    return moe_layers(model)[layer][2]


def scale_a_layer(model: nn.Module) -> None:
    experts_of(model, 1).gate_up_proj *= 1.05


def swap_two_experts(model: nn.Module) -> None:
    for weight in (experts_of(model, 1).gate_up_proj, experts_of(model, 1).down_proj):
        weight[[0, 1]] = weight[[1, 0]]


def exchange_w13(model: nn.Module) -> None:
    weight = experts_of(model, 1).gate_up_proj
    weight.copy_(torch.cat(weight.chunk(2, 1)[::-1], 1))


def take_another_layer(model: nn.Module) -> None:
    experts_of(model, 1).down_proj.copy_(experts_of(model, 0).down_proj)


def permute_the_router(model: nn.Module) -> None:
    router = model.get_submodule("model.layers.1.mlp.gate").weight
    router.copy_(router.roll(1, 0))


def change_the_activation(model: nn.Module) -> None:
    for layer in range(3):
        experts_of(model, layer).act_fn = nn.GELU()


def change_rope(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq *= 3


WEIGHTS = (scale_a_layer, swap_two_experts, exchange_w13, take_another_layer, permute_the_router)
WEIGHTS += (change_the_activation, change_rope)


@pytest.mark.parametrize("plant", WEIGHTS, ids=lambda plant: plant.__name__)
def test_wrong_weights_are_wrong_in_every_condition(
    models: Models, running: ModelServer, plant: Callable[[nn.Module], None]
) -> None:
    with torch.no_grad():
        plant(running.model)
    found, verdict = wrong(verified(models[1], running))
    assert {"prefill_alone", "prefill_together", "prefill_long"} <= found
    assert not {"decode_alone", "decode_together", "identity"} & found
    assert verdict in (
        (check.VERDICTS["larger"], check.VERDICTS["weights"])
        if plant is change_rope
        else (check.VERDICTS["weights"],)
    )


# --- planted faults: of one condition

CONDITIONS: dict[str, tuple[Callable[[Request], bool], set[str], str]] = {
    "batch of 17": (
        lambda asked: asked.num_in_flight >= 17,
        {"prefill_together", "decode_together"},
        check.VERDICTS["batching"],
    ),
    "prompts together": (
        lambda asked: asked.num_tokens == CONTEXT and asked.num_in_flight >= 2,
        {"prefill_together"},
        check.VERDICTS["batching"],
    ),
    "decoding": (
        lambda asked: asked.is_decoding,
        {"decode_alone", "decode_together"},
        check.VERDICTS["decoding"],
    ),
    "decoding together": (
        lambda asked: asked.is_decoding and asked.num_in_flight >= 2,
        {"decode_together"},
        check.VERDICTS["batching"],
    ),
    "long": (
        lambda asked: asked.num_tokens >= 4 * CONTEXT,
        {"prefill_long"},
        check.VERDICTS["long"],
    ),
    "17 tokens": (
        lambda asked: asked.num_tokens >= 17 and not asked.is_decoding,
        {"prefill_alone", "prefill_together", "prefill_long", "decode_alone", "decode_together"},
        check.VERDICTS["larger"],
    ),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_fault_is_named_by_its_condition(models: Models, running: ModelServer, name: str) -> None:
    running.is_wrong, conditions, sentence = CONDITIONS[name]
    report = verified(models[1], running)
    assert not report.passed
    assert wrong(report) == (conditions, sentence)


def test_the_first_wrong_position_is_named(models: Models, running: ModelServer) -> None:
    def disturb(document: Any) -> Any:
        for choice in document["choices"]:
            for entry in (choice.get("prompt_logprobs") or [])[20:]:
                for token in entry.values():
                    token["logprob"] -= 5
        return document

    running.change = disturb
    measured = verified(models[1], running).results[0].measured
    assert measured["prefill_alone"]["first_wrong"] == [0, 19]
    assert measured["prefill_short"]["first_wrong"] is None
    assert measured["prefill_alone"]["out_of_bounds"] == pytest.approx((63 - 19) / 63)
    assert measured["prefill_alone"]["mean"] == pytest.approx(5 * (63 - 19) / 63, rel=0.01)
    assert measured["prefill_alone"]["signed_mean"] < -3


# --- whose predictions


def test_the_source_in_place_of_the_artifact(models: Models, running: ModelServer) -> None:
    running.model = served_model(models[0], None)
    report = verified(models[1], running)
    found, verdict = wrong(report)
    assert "identity" in found
    assert verdict == "The server answers with the source's weights, not the artifact's."
    identity = report.results[0].measured["identity"]
    assert abs(identity["beta"] - 1) < 5 * identity["standard_error"]


@pytest.mark.parametrize("schema", ["int3-g32", "int8"])
def test_another_quantization(
    models: Models, running: ModelServer, schema: str, tmp_path: Path
) -> None:
    hqconv.convert(models[0], tmp_path / "out", schema=schema, target="sm90", device="cpu")
    running.model = served_model(models[0], tmp_path / "out")
    found, verdict = wrong(verified(models[1], running))
    assert "identity" in found
    # eight bits differ from the source less than bfloat16 does
    whose = "source" if schema == "int8" else "another quantization"
    assert verdict == check.VERDICTS[whose]


def test_a_plain_checkpoint(models: Models, running: ModelServer, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    served_model(models[0], None).save_pretrained(checkpoint)
    write_tokenizer(checkpoint)
    document = hqconv.evaluate(
        checkpoint, None, models[2], write_reference=True, context_length=CONTEXT, **CPU
    )
    assert document["kl"]["max"] == 0
    # A single file has no index: servers would load every safetensors file beside it.
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
    assert hqconv.plan(checkpoint, schema="int4-g32", target="sm90").layers
    running.model = served_model(models[0], None)
    report = verified(checkpoint, running)
    assert report.passed
    assert report.results[0].measured["identity"]["status"] == "skipped"
    running.model = served_model(models[0], models[1])
    assert wrong(verified(checkpoint, running))[1] == check.VERDICTS["weights"]
    with pytest.raises(RequestError, match="those of a plain checkpoint"):
        hqconv.evaluate(models[1], None, models[2], write_reference=True, **CPU)
    with pytest.raises(RequestError, match="evaluated against its source"):
        hqconv.evaluate(models[1], None, models[2], **CPU)
    few = hqconv.evaluate(
        checkpoint, None, models[2], write_reference=True, num_tokens=1024, context_length=64, **CPU
    )
    assert "16 sequences of 64 tokens only" in few["warnings"][0]
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="of other weights"):
        verified(checkpoint, running)


# --- servers that cannot be asked, or lie


def changed(path: str, value: Any) -> Callable[[Any], Any]:
    """Put a value into a completion's answer."""

    def change(document: Any) -> Any:
        if "prompt_logprobs" not in document.get("choices", [{}])[0]:
            return document
        scores = document["choices"][0]["prompt_logprobs"]
        if path == "numbers":
            for entry in scores[1:]:
                next(iter(entry.values()))["logprob"] = value
        elif path == "shorter":
            del scores[-1]
        else:
            document["choices"][0]["prompt_logprobs"] = value
        return document

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.0])
def test_numbers_that_are_no_log_probabilities(
    models: Models, running: ModelServer, value: float
) -> None:
    running.change = changed("numbers", value)
    report = verified(models[1], running)
    assert [one.what for one in report.results[0].findings] == [
        "The server computes log-probabilities that are not finite numbers, or positive."
    ]


def test_nan_that_a_server_cannot_send(models: Models, running: ModelServer) -> None:
    def answer(handler: Any) -> None:
        handler.send(
            500, {"error": {"message": "Out of range float values are not JSON compliant: nan"}}
        )

    running.answer = answer
    assert not verified(models[1], running).passed


@pytest.mark.parametrize(
    ("path", "value"),
    [("shorter", None), ("numbers", "x"), ("numbers", True), ("all", None), ("all", {"a": 1})],
)
def test_an_answer_of_another_shape(
    models: Models, running: ModelServer, path: str, value: Any
) -> None:
    running.change = changed(path, value)
    with pytest.raises(RequestError, match="gives no log-probabilities of prompts"):
        verified(models[1], running)


def test_models_and_keys(
    models: Models, running: ModelServer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with pytest.raises(RequestError, match="no such model") as failure:
        verified(models[1], running, model="server")
    assert failure.value.expected == NAME
    running.names = ("a", NAME)
    with pytest.raises(RequestError, match="several models"):
        verified(models[1], running)
    assert verified(models[1], running, model=NAME).passed
    running.key = "sesame-4711"
    with pytest.raises(RequestError, match="wants another key"):
        verified(models[1], running, model=NAME)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong-4712")
    with caplog.at_level(0), pytest.raises(RequestError, match="wants another key") as failure:
        verified(models[1], running, model=NAME)
    assert "4712" not in str(failure.value) + caplog.text
    monkeypatch.setenv("OPENAI_API_KEY", running.key)
    assert verified(models[1], running, model=NAME).passed
    echo = {"message": f"no such {running.key}"}
    running.answer = lambda handler: handler.send(400, echo)  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="no such …") as failure:
        verified(models[1], running, model=NAME)
    assert "4711" not in str(failure.value)
    monkeypatch.setenv("OPENAI_API_KEY", "a\nb-4713")
    with pytest.raises(RequestError, match="no header can hold") as failure:
        verified(models[1], running)
    assert "4713" not in str(failure.value)


def test_tokens_that_the_model_does_not_have(models: Models, running: ModelServer) -> None:
    running.model.config.vocab_size = 8
    with pytest.raises(RequestError, match="gives no log-probabilities") as failure:
        verified(models[1], running)
    assert "out of vocabulary" in failure.value.found


def test_no_server_and_one_that_fails(models: Models, running: ModelServer) -> None:
    with pytest.raises(NetworkError, match="does not answer"):
        hqconv.verify(models[1], server="http://127.0.0.1:9", **CPU)
    for url in ("ftp://host", "http://", "http://host:port", "http://host:99999999"):
        with pytest.raises(RequestError, match="no address of a server"):
            hqconv.verify(models[1], server=url, **CPU)
    num_answered = 0

    def fail_later(document: Any) -> Any:
        nonlocal num_answered
        num_answered += 1
        if num_answered == 30:
            running.answer = lambda handler: handler.send(503, {"error": "overloaded"})  # type: ignore[attr-defined]
        return document

    running.change = fail_later
    with pytest.raises(NetworkError, match="The server failed") as failure:
        verified(models[1], running)
    assert "503" in failure.value.found


def raw(body: bytes, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    """Send a body, with another length than its own if one is given."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


ENDED: list[str] = []  # servers that could send all


def slow_body(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, without end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        time.sleep(0.05)
    ENDED.append("slow body")


def slow_head(handler: BaseHTTPRequestHandler) -> None:
    for _ in range(200):
        handler.wfile.write(b"H")
        time.sleep(0.05)
    ENDED.append("slow head")


def huge(handler: BaseHTTPRequestHandler) -> None:
    """A body that has no length and no end."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(4000):
        handler.wfile.write(b" " * 65536)
    ENDED.append("huge")


HOSTILE: dict[str, tuple[Callable[[BaseHTTPRequestHandler], None], type[Exception], str]] = {
    "garbage": (raw(b"<html>"), RequestError, "no JSON document"),
    "deep": (raw(b"[" * 200_000), RequestError, "no JSON document"),
    "not UTF-8": (raw(b"\xff\xfe"), RequestError, "no JSON document"),
    "another document": (raw(b"[1]"), RequestError, "no log-probabilities of prompts"),
    "huge number": (raw(b"9" * 100_000), RequestError, "no JSON document"),
    "cut": (raw(b"{}", 100), NetworkError, "does not answer|cut off"),
    "slow body": (slow_body, NetworkError, "does not answer|cut off"),
    "slow head": (slow_head, NetworkError, "does not answer|cut off"),
    "huge": (huge, RequestError, "too long"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_is_bounded(
    models: Models, running: ModelServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.answer, kind, message = HOSTILE[name]
    monkeypatch.setattr(check, "_REQUEST_S", 1.0)
    monkeypatch.setattr(check, "_MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(kind) as failure:
        verified(models[1], running)
    text = str(failure.value)  # type: ignore[attr-defined]
    assert any(part in text for part in message.split("|")), text
    assert len(text) < 5000
    assert name not in ENDED


def test_all_requests_together_have_a_limit(
    models: Models, running: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_TOTAL_S", 0.05)
    with pytest.raises(NetworkError):
        verified(models[1], running)


# --- references


def test_what_is_no_reference(models: Models, running: ModelServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hqconv.convert(models[0], out, schema="int4-g32", target="sm90", device="cpu")
    with pytest.raises(RequestError, match="no reference predictions"):
        verified(out, running)
    path = out / "reference.safetensors"
    good, metadata = load_file(models[1] / path.name), {"weights_sha256": "0"}
    save_file(good, path, metadata)
    with pytest.raises(RequestError, match="of other weights"):
        verified(out, running)
    assert hqconv.verify(out, checks=["files"], **CPU).passed
    infinite = good["source.log_probabilities"].copy()
    infinite[0, 0] = -np.inf
    for name, values in {
        "token_ids": good["token_ids"][:0],
        "artifact.log_probabilities": good["artifact.log_probabilities"][:, 1:],
        "bfloat16.log_probabilities": good["bfloat16.log_probabilities"][:0],
        "source.log_probabilities": infinite,
        "long.artifact.log_probabilities": good["long.artifact.log_probabilities"][:, 1:],
        "long.token_ids": good["long.token_ids"] - 100,
    }.items():
        save_file({**good, name: values}, path, metadata)
        with pytest.raises(InputError, match="damaged") as failure:
            read_reference(path, "0")
        assert name.split(".")[0] in failure.value.found
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError):
        read_reference(path, "0")


# --- the command


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command(models: Models, running: ModelServer) -> None:
    out = models[1]
    done = call("verify", out, "--server", running.url, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "PASS  server" in done.stdout
    assert "prefill_together" in done.stdout
    assert "server: short prompts, one by one" in done.stderr
    running.is_wrong = lambda asked: asked.is_decoding
    arguments = ("verify", out, "--server", f"{running.url}/v1/", "--device", "cpu", "--json")
    done = call(*arguments, "--checks", "files")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert [*document["checks"]] == ["files", "server"]
    found = document["checks"]["server"]
    assert document["checks"]["files"]["status"] == "pass"
    assert found["findings"][0]["what"] == check.VERDICTS["decoding"]
    assert found["measured"]["decode_alone"]["status"] == "fail"
    running.answer = lambda handler: handler.send(500, {})  # type: ignore[attr-defined]
    assert call(*arguments).exit_code == 5
    running.answer = None
    assert call(*arguments, "--model", "x").exit_code == 2
    assert call("verify", out, "--checks", "server").exit_code == 2
