"""Check of a running server: its log-probabilities against the artifact's reference predictions.

The server is sent token ids of the reference's text and of its own answers, under several conditions: one prompt or
many at a time, short or long, prompts (prefill) or answers (decoding). Which of them are wrong tells where to look.
"""

from __future__ import annotations

import http.client
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from json import dumps
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hqconv.artifact.reference_predictions import ReferencePredictions
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import (
    NetworkError,
    RequestError,
    VerificationError,
    close_to,
    first_few,
    short_text,
)
from hqconv.schemas.untrusted_files import parse_json
from hqconv.verification.result import CheckResult, Finding

Array = np.ndarray
CHECK = "server"
_KEY = "OPENAI_API_KEY"
_TOTAL_S, _REQUEST_S = 600.0, 120.0
_MAX_ANSWER_BYTES = 64 << 20
_MOST_TOKENS = 1 << 30  # of a server that names no limit
_NUM_AT_ONCE = 64
_NUM_ALONE = 32  # prompts that are sent one by one
_SHORT = 16  # tokens of a short prompt
_NUM_ANSWERS, _ANSWER_TOKENS = 8, 64  # that are decoded one by one, and the tokens of each
_ROUNDING = 1e-3  # by which the sum of probabilities may exceed 1
_NOT_IN_JSON = "not JSON compliant"  # of Python's json, where a server's answer has NaN


# --- bounds


@dataclass(frozen=True)
class _Limits:
    """Limits of |Δ log p| as multiples of the noise of bfloat16, and what is added to them, in nats."""

    mean_factor: float
    mean_nats: float
    token_factor: float  # of the noise's 99.9 %
    token_nats: float

    def of(self, noise: Array) -> tuple[float, float]:
        """Return the limit of the mean, and that of one token."""
        mean = self.mean_factor * noise.mean() + self.mean_nats
        return mean, self.token_factor * np.quantile(noise, 0.999) + self.token_nats


# Set by measurements of healthy and of broken servers: docs/serving.md.
_LIMITS = _Limits(2.0, 0.001, 3.0, 0.02)
_LIMITS_OF_QUANTIZED_INPUTS = _Limits(4.0, 0.02, 4.0, 0.2)
_KNOWN_NOISE = 0.75  # of the limit of the mean, for prompts whose noise is known
_MAX_SHARE = 0.003  # of tokens beyond the limit of one
_MIN_COUNT = 3  # of such tokens; so few are right in any case
_ANSWER_NOISE = 0.5  # of greedy answers, whose tokens are likely, in noise of the text's
_SHORT_SHARE = 0.5  # of the excess of whole prompts; short ones with less are right
_MAX_BETA = 0.3  # from the artifact (0) to the source (1)
_NUM_ERRORS = 4.0  # standard errors
_MAX_BETA_ERROR = 0.1  # with a larger one artifact and source cannot be told apart
_MIN_EXPLAINED = 0.03  # share of the squared differences that the source explains


# --- requests


@dataclass(frozen=True)
class ServerOptions:
    """A server to check. model: its name; None for the only one. progress: as of `VerifyOptions`."""

    url: str
    model: str | None = None
    progress: Callable[[str, Progress], None] | None = None


def _not_finite(url: str) -> VerificationError:
    return VerificationError(
        "The server computes log-probabilities that are not finite numbers, or positive.",
        where=url,
        expected="finite numbers up to 0",
    )


class _Client:
    """Requests to one server, with a limit of time for each and for all, and a limit of size."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            kind = kinds[parts.scheme if parts.hostname else ""]
            self._connect = partial(kind, str(parts.hostname), parts.port)
        except (KeyError, ValueError) as error:  # the latter of the port
            what, expected = "This is no address of a server.", "http://host:port"
            raise RequestError(what, where="--server", expected=expected, found=url) from error
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._key = os.environ.get(_KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise RequestError("The key has characters that no header can hold.", where=_KEY)
        self._deadline_s = time.monotonic() + _TOTAL_S
        self._open = set[socket.socket]()

    def ask(self, path: str, document: Any = None) -> Any:
        """Return the JSON answer to a GET request, or to a POST request of a document.

        Raises NetworkError where none comes in time, RequestError for a refusal and for what is no JSON,
        VerificationError for a server that computes NaN.
        """
        where = f"{self.url}{path}"
        try:
            status, raw = self._exchange(path, document)
        except (OSError, http.client.HTTPException) as error:
            found = str(error) or "no answer in time"
            raise NetworkError("The server does not answer.", where=where, found=found) from error
        text = raw.decode(errors="replace")
        if self._key:
            text = text.replace(self._key, "…")
        if status == 200 and len(raw) <= _MAX_ANSWER_BYTES:
            try:
                return parse_json(raw)
            except ValueError as error:
                what = "The server's answer is no JSON document."
                raise RequestError(what, where=where, found=error) from error
        found = f"status {status}: {short_text(text)}"
        if len(raw) > _MAX_ANSWER_BYTES:
            raise RequestError("The server's answer is too long.", where=where, found=found)
        if status in (401, 403):
            remedy = f"Put its key into the environment variable {_KEY}."
            raise RequestError("The server wants another key.", where=where, remedy=remedy)
        if _NOT_IN_JSON in text:
            raise _not_finite(where)
        if status == 429 or status >= 500:
            raise NetworkError("The server failed.", where=where, found=found)
        raise RequestError("The server refuses the request.", where=where, found=found)

    def _exchange(self, path: str, document: Any) -> tuple[int, bytes]:
        """Return status and bytes of an answer. Raises OSError, HTTPException."""
        limit_s = min(_REQUEST_S, self._deadline_s - time.monotonic())
        if limit_s <= 0:
            raise TimeoutError(f"it needs more than {_TOTAL_S:.0f} s for all requests")
        body = None if document is None else dumps(document).encode()
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        end_s = time.monotonic() + limit_s
        with closing(self._connect(timeout=limit_s)) as connection:
            connection.connect()
            line = connection.sock
            self._open.add(line)
            # The timeout of a socket is of each read: bytes that come slowly never reach it.
            timer = threading.Timer(max(end_s - time.monotonic(), 0), _shut, [line])
            timer.daemon = True
            timer.start()
            try:
                method = "GET" if body is None else "POST"
                connection.request(method, self._path + path, body, headers)
                answer = connection.getresponse()
                raw = answer.read(_MAX_ANSWER_BYTES + 1)
            finally:
                timer.cancel()
                self._open.discard(line)
        if time.monotonic() >= end_s or (answer.length and len(raw) <= _MAX_ANSWER_BYTES):
            raise TimeoutError(f"it sent {len(raw)} bytes in {limit_s:.0f} s, and not all")
        return answer.status, raw

    def stop(self) -> None:
        """Break off all requests; further ones fail."""
        self._deadline_s = 0.0
        for line in [*self._open]:
            _shut(line)


def _shut(line: socket.socket) -> None:
    with suppress(OSError):  # closed before
        line.shutdown(socket.SHUT_RDWR)


# --- protocols


class _Protocol:
    """The requests of one kind of server. max_tokens: of a prompt with its answer."""

    path = "/v1/completions"
    decodes = True

    def __init__(self, client: _Client, model: str, max_tokens: int) -> None:
        self.client, self.model, self.max_tokens = client, model, max_tokens

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a prompt but the first.

        Raises RequestError for an answer of another shape, VerificationError for numbers that are no log-probabilities.
        """
        found = self._checked(self.scoring(ids), lambda answer: self.scores(answer, ids))
        if [token for token, _ in found] != [*ids[1:]]:
            raise self._error(f"{len(found)} of {len(ids) - 1} tokens, or other ones")
        return [value for _, value in found]

    def decode(self, ids: Sequence[int]) -> list[tuple[int, float]]:
        """Return the tokens of a greedy answer, and their log-probabilities. Raises as `score`."""
        found = self._checked(self.decoding(ids), self.decoded)
        if len(found) != _ANSWER_TOKENS:
            raise self._error(f"{len(found)} of {_ANSWER_TOKENS} tokens")
        return found

    def _checked(
        self, document: Any, parse: Callable[[Any], Iterable[tuple[int, float]]]
    ) -> list[tuple[int, float]]:
        answer = self.client.ask(self.path, document)
        try:
            found = [*parse(answer)]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(short_text(answer)) from error
        types = {(type(token), type(value)) for token, value in found}
        if not types <= {(int, float), (int, int)}:
            raise self._error(short_text(answer))
        if not all(math.isfinite(value) and value <= _ROUNDING for _, value in found):
            raise _not_finite(self.client.url)
        return found

    def _error(self, found: str) -> RequestError:
        return RequestError(
            "The server's answer does not have the log-probability of each token.",
            where=f"{self.client.url}{self.path}",
            found=found,
            remedy="Does the server cut prompts, or end answers before their length?",
        )

    def _request(self, ids: Sequence[int], num_tokens: int, **options: Any) -> dict[str, Any]:
        document = {"model": self.model, "prompt": [*ids], "max_tokens": num_tokens}
        return {**document, "temperature": 0, **options}

    def scoring(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the request for a prompt's log-probabilities."""
        return self._request(ids, 1, prompt_logprobs=1)

    def scores(self, answer: Any, ids: Sequence[int]) -> Iterable[tuple[int, float]]:
        """Return tokens and log-probabilities of a prompt but its first, from an answer."""
        (choice,) = answer["choices"]
        entries = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [(token, entry[str(token)]["logprob"]) for token, entry in entries]

    def decoding(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the request for a greedy answer."""
        tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return self._request(ids, _ANSWER_TOKENS, logprobs=1, ignore_eos=True, **tokens)

    def decoded(self, answer: Any) -> Iterable[tuple[int, float]]:
        """Return tokens and log-probabilities of a greedy answer."""
        (choice,) = answer["choices"]
        return zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)


class _Generate(_Protocol):
    """`/generate`, which takes `input_ids`."""

    path = "/generate"

    def _request(self, ids: Sequence[int], num_tokens: int, **_: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        document = {"input_ids": [*ids], "sampling_params": sampling, "return_logprob": True}
        return document if num_tokens > 1 else {**document, "logprob_start_len": 0}

    def scores(self, answer: Any, ids: Sequence[int]) -> Iterable[tuple[int, float]]:
        found = answer["meta_info"]["input_token_logprobs"]
        return [(token, value) for value, token, *_ in found[1:]]

    def decoded(self, answer: Any) -> Iterable[tuple[int, float]]:
        found = answer["meta_info"]["output_token_logprobs"]
        return [(token, value) for value, token, *_ in found]


class _Echo(_Protocol):
    """`/v1/completions` with `echo`: the prompt is part of the answer, whose tokens have no ids."""

    decodes = False

    def scoring(self, ids: Sequence[int]) -> dict[str, Any]:
        return self._request(ids, 1, echo=True, logprobs=1)

    def scores(self, answer: Any, ids: Sequence[int]) -> Iterable[tuple[int, float]]:
        (choice,) = answer["choices"]
        return zip(ids[1:], choice["logprobs"]["token_logprobs"][1 : len(ids)], strict=True)


def _connected(options: ServerOptions, client: _Client, ids: Sequence[int]) -> _Protocol:
    """Find the model's name and the protocol that scores a prompt. Raises RequestError where there is none."""
    listed = client.ask("/v1/models")
    try:
        served = {str(entry["id"]): entry.get("max_model_len") for entry in listed["data"]}
    except (AttributeError, KeyError, TypeError):
        served = {}
    model = options.model or (next(iter(served)) if len(served) == 1 else "")
    if model not in served:
        raise RequestError(
            "The server has no such model." if model else "The server has several models, or none.",
            where="--model",
            expected=first_few([*served]) or "a server that lists models",
            found=model or "no name",
            remedy=close_to(model, served) or "Name one with --model.",
        )
    limit = served[model] if type(served[model]) is int else _MOST_TOKENS
    refusals = []
    for kind in (_Protocol, _Generate, _Echo):
        protocol = kind(client, model, limit)
        try:
            protocol.score(ids)
            return protocol
        except RequestError as error:
            refusals.append(f"{kind.path}: {error.what} {error.found}")
    raise RequestError(
        "The server gives no log-probabilities of prompts.",
        where=client.url,
        expected="/v1/completions with token ids and `prompt_logprobs`, or `echo` with `logprobs`; or /generate",
        found="; ".join(dict.fromkeys(refusals)),
    )


# --- the check


def check_server(
    reference: ReferencePredictions, options: ServerOptions, *, has_quantized_inputs: bool
) -> CheckResult:
    """Compare a server with reference predictions; each condition that is out of bounds is a finding.

    has_quantized_inputs: activations are quantized, which the reference does not know. Raises NetworkError for a
    server that does not answer, RequestError for one that cannot be asked.
    """
    client = _Client(options.url)
    result = CheckResult(CHECK)
    limits = _LIMITS_OF_QUANTIZED_INPUTS if has_quantized_inputs else _LIMITS
    try:
        protocol = _connected(options, client, reference.token_ids[0, :_SHORT].tolist())
        _Check(reference, protocol, limits, result, options.progress).run()
    except VerificationError as error:
        result.add_error(error)
    return result


class _Check:
    """One check: conditions, their figures, and the verdict."""

    def __init__(
        self,
        reference: ReferencePredictions,
        protocol: _Protocol,
        limits: _Limits,
        result: CheckResult,
        progress: Callable[[str, Progress], None] | None,
    ) -> None:
        self._protocol, self._limits, self._result = protocol, limits, result
        self._reference = reference
        self._length = max(2, min(reference.token_ids.shape[1], protocol.max_tokens - 1))
        listener = None if progress is None else partial(progress, CHECK)
        self._conditions = [*self._prefill(), *self._decoding()]
        num_tokens = [len(ids) for _, prompts, _ in self._conditions for ids in prompts]
        self._meter = Meter(4 * sum(num_tokens), len(num_tokens), listener)

    def _prefill(self) -> Iterator[tuple[str, list[list[int]], int]]:
        """Yield name, prompts and number of requests at a time of each condition with a reference."""
        ids = self._reference.token_ids[:, : self._length].tolist()
        yield "prefill_short", [sequence[:_SHORT] for sequence in ids[:_NUM_ALONE]], 1
        yield "prefill_alone", ids[:_NUM_ALONE], 1
        together = [ids[number % len(ids)] for number in range(_NUM_AT_ONCE)]
        yield "prefill_together", together, _NUM_AT_ONCE
        long_ids = self._reference.long_ids[: self._protocol.max_tokens - 1].tolist()
        if len(long_ids) >= 2 * self._length:
            yield "prefill_long", [long_ids], 1

    def _decoding(self) -> Iterator[tuple[str, list[list[int]], int]]:
        """Yield the same of conditions without one: beginnings of the text, each of another length, to answer."""
        ids, quarter = self._reference.token_ids, max(1, self._length // 4)
        prompts = [
            ids[number % len(ids), : quarter + number * quarter // _NUM_AT_ONCE].tolist()
            for number in range(_NUM_AT_ONCE)
        ]
        obstacle = "" if self._protocol.decodes else "the server gives no ids of tokens"
        if len(prompts[-1]) + _ANSWER_TOKENS >= self._protocol.max_tokens:
            obstacle = "the server's context is too short"
        if obstacle:
            self._result.notes.append(f"answers were not checked: {obstacle}")
            return
        yield "decode_alone", prompts[:_NUM_ANSWERS], 1
        yield "decode_together", prompts, _NUM_AT_ONCE

    def run(self) -> None:
        """Ask the server, and put figures, findings and the verdict into the result."""
        artifact, noise = self._reference.of("artifact"), self._reference.noise
        for name, prompts, num_at_once in self._conditions:
            self._meter.announce(f"server: {_CONDITIONS[name]}")
            if name.startswith("decode"):
                differences = self._ask(self._decoded_against_scored, name, prompts, num_at_once)
                own_noise = _ANSWER_NOISE * noise[:, : self._length - 1]
                self._compare(name, np.asarray(differences), own_noise)
                continue
            scores = np.asarray(self._ask(self._protocol.score, name, prompts, num_at_once))
            count = scores.shape[1]
            expected = artifact[np.arange(len(scores)) % len(artifact), :count]
            if name == "prefill_long":
                expected = self._reference.of("long.artifact")[:, :count]
            self._compare(name, scores - expected, noise[:, :count])
            if name == "prefill_alone":
                source = self._reference.of("source")[: len(scores), :count]
                self._identify(scores - expected, source - expected)
        if self._result.findings:
            sentences = [VERDICTS[name] for name in self._verdict()]
            self._result.put_first(Finding(self._protocol.client.url, " ".join(sentences)))

    def _decoded_against_scored(self, ids: list[int]) -> Array:
        """Return differences of a greedy answer's log-probabilities from those of the same tokens in a prompt."""
        answer = self._protocol.decode(ids)
        scored = self._protocol.score(ids + [token for token, _ in answer])
        decoded = [value for _, value in answer]
        difference: Array = np.asarray(decoded) - np.asarray(scored[-_ANSWER_TOKENS:])
        return difference

    def _ask(
        self, ask: Callable[[list[int]], Any], name: str, prompts: list[list[int]], num_at_once: int
    ) -> list[Any]:
        """Send requests, so many at a time, and return the answers in order."""

        def asked(ids: list[int]) -> Any:
            answer = ask(ids)
            self._meter.advance(name, 4 * len(ids))
            self._meter.finish(name)
            return answer

        with ThreadPoolExecutor(num_at_once, "hqconv-request") as pool:
            futures = [pool.submit(asked, ids) for ids in prompts]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._protocol.client.stop()
                raise

    def _compare(self, name: str, differences: Array, noise: Array) -> None:
        """Add the figures of a condition, and a finding where they are out of bounds. differences: [S, T - 1]."""
        sizes = np.abs(differences)
        mean_limit, token_limit = self._limits.of(noise)
        if name in ("prefill_alone", "prefill_together"):
            mean_limit *= _KNOWN_NOISE
        is_wrong = sizes > token_limit
        share, mean = is_wrong.mean(), sizes.mean()
        fails = mean > mean_limit or (share > _MAX_SHARE and is_wrong.sum() > _MIN_COUNT)
        first = [int(value) for value in np.argwhere(is_wrong)[0]] if is_wrong.any() else None
        self._result.measured[name] = {
            "status": "fail" if fails else "pass",
            "num_tokens": sizes.size,
            "mean": mean,
            "p999": np.quantile(sizes, 0.999),
            "signed_mean": differences.mean(),
            "out_of_bounds": share,
            "first_wrong": first,
            "mean_limit": mean_limit,
            "token_limit": token_limit,
            "noise_mean": noise.mean(),
            "noise_p999": np.quantile(noise, 0.999),
        }
        if fails:
            where = (
                "" if first is None else f"; the first is position {first[1]} of prompt {first[0]}"
            )
            self._result.add(
                name,
                f"Log-probabilities are wrong: {_CONDITIONS[name]}.",
                f"mean difference up to {mean_limit:.4f}, {_MAX_SHARE:.1%} of tokens above {token_limit:.3f}",
                f"mean {mean:.4f}, {share:.2%} of tokens above{where}",
            )

    def _identify(self, differences: Array, direction: Array) -> None:
        """Find whose predictions these are: 0 the artifact's, 1 the source's, on the line between them.

        direction: from the artifact to the source. β = <Δ, d> / <d, d>; its standard error is robust against tokens
        whose noise is larger. Another quantization of the source has the source's part and errors of its own.
        """
        power = max(np.sum(direction**2), np.finfo(float).tiny)
        beta = np.sum(differences * direction) / power
        rest = differences - beta * direction
        error = np.sqrt(np.sum((direction * rest) ** 2)) / power
        explained = 1 - np.sum(rest**2) / max(np.sum(differences**2), np.finfo(float).tiny)
        is_known = bool(0 < error <= _MAX_BETA_ERROR)
        alone = self._result.measured["prefill_alone"]
        is_other = is_known and beta - _NUM_ERRORS * error > _MAX_BETA
        if alone["status"] == "fail":
            is_other = is_other and explained > _MIN_EXPLAINED
        is_source = is_other and np.abs(rest).mean() <= alone["mean_limit"] / _KNOWN_NOISE
        whose = "source" if is_source else "another quantization" if is_other else "artifact"
        if not is_known or (alone["status"] == "fail" and not is_other):
            whose = "unknown"
        self._result.measured["identity"] = {
            "status": "fail" if is_other else "pass" if is_known else "skipped",
            "whose": whose,
            "beta": beta,
            "standard_error": error,
            "explained": explained,
            "mean_rest": np.abs(rest).mean(),
            "mean_of_source": np.abs(direction).mean(),
        }
        if is_other:
            self._result.add(
                "identity",
                VERDICTS[whose],
                f"0 ± {error:.3f} on the way from the artifact to the source",
                f"{beta:.3f}, {explained:.0%} of the difference explained",
            )
        elif not is_known:
            self._result.notes.append(
                "artifact and source cannot be told apart: they differ too little"
            )

    def _verdict(self) -> list[str]:
        """Return what the conditions that are out of bounds point to."""
        measured = self._result.measured
        wrong = {name for name, figures in measured.items() if figures["status"] == "fail"}
        if "identity" in wrong:
            return [measured["identity"]["whose"]]
        if "prefill_alone" in wrong:
            short, alone = (_excess(measured[name]) for name in ("prefill_short", "prefill_alone"))
            is_short_right = "prefill_short" not in wrong and short < _SHORT_SHARE * alone
            return ["larger" if is_short_right else "weights"]
        found = []
        if "prefill_together" in wrong or (
            "decode_together" in wrong and "decode_alone" not in wrong
        ):
            found.append("batching")
        if "decode_alone" in wrong:
            found.append("decoding")
        if "prefill_long" in wrong:
            found.append("long")
        return found or ["weights"]


def _excess(figures: dict[str, Any]) -> float:
    """Return the mean difference in units of the noise."""
    return float(figures["mean"] / max(figures["noise_mean"], 1e-9))


_CONDITIONS = {
    "prefill_short": "short prompts, one by one",
    "prefill_alone": "prompts, one by one",
    "prefill_together": f"{_NUM_AT_ONCE} prompts at once",
    "prefill_long": "one long prompt",
    "decode_alone": "answers against the same tokens in a prompt, one by one",
    "decode_together": f"{_NUM_AT_ONCE} answers at once against the same tokens in a prompt",
}
# What the conditions that are out of bounds point to.
VERDICTS = {
    "source": "The server answers with the source's weights, not the artifact's.",
    "another quantization": "The server answers with another quantization of the same source.",
    "weights": "All prompts are wrong, short ones too: other weights, or another model or config than the artifact's.",
    "larger": "Short prompts are right and longer ones wrong: a kernel for many tokens, attention or positions (rope).",
    "batching": "One request is right and many at once are wrong: batching, or the KV cache.",
    "decoding": "Prompts are right and answers wrong: kernels or attention of decoding.",
    "long": "Only the long prompt is wrong: attention over many tokens, or positions (rope).",
}
