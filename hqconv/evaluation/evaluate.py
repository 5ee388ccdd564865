"""Evaluation of an artifact against its source: both run over a text in transformers, layer by layer.

The weights of one layer exist at a time. All sequences go through it with the source's experts, then with the
artifact's; the other weights of a layer are the same bytes in both. Weights only: activations are not quantized.

Legend: B sequences, T tokens, V vocabulary size, H hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hqconv.artifact.load import decoded_experts, linear_weights
from hqconv.artifact.model_card import read_evaluation, write_evaluation
from hqconv.artifact.reader import Artifact
from hqconv.artifact.reference_predictions import (
    DIGEST,
    LONG,
    ReferencePredictions,
    checkpoint_digest,
    num_top,
)
from hqconv.calibration.inputs import batches_of
from hqconv.calibration.streamed_model import Expert, Stream, StreamedModel, stored_tensors
from hqconv.calibration.transformers_model import (
    Text,
    check_counts,
    folder_of,
    import_transformers,
    quiet_loading,
    read_text,
    running,
)
from hqconv.conversion.convert import ConversionReport
from hqconv.conversion.resources import Resources, explained_gpu_memory
from hqconv.errors import (
    HqconvError,
    InputError,
    NetworkError,
    OutputError,
    RequestError,
    first_few,
    plural,
)
from hqconv.models.linear_layers import LinearGroup
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source, read_tensor
from hqconv.planning.calibration import Calibration, common_lines
from hqconv.schemas.artifact_names import EVALUATION, MANIFEST, REFERENCE, text_config
from hqconv.sources.opening import open_source
from hqconv.verification.files import check_beside_experts, other_source
from hqconv.version import __version__

_LOG = logging.getLogger(__name__)
_GPU_REMEDY = "Free the GPU, take fewer --tokens or a shorter --context, or use --device cpu."
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
_SHARED_LINES = 0.02  # of a text that is another's
_NUM_VALUES = 1 << 20  # logits that are compared at a time
_COMPARISON_BYTES = 8 * 8 * _NUM_VALUES  # float64
_PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def evaluate(
    out: Path,
    source_name: str | None,
    text: Path,
    *,
    num_tokens: int,
    context_length: int,
    compute_dtype: str,
    resources: Resources,
    revision: str | None,
) -> dict[str, Any]:
    """Return the document of an evaluation; see `hqconv.api.evaluate`.

    source_name: None for a plain checkpoint at `out`, whose reference predictions are written.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise RequestError(
            "There is no such dtype to compute in.",
            where="--compute-dtype",
            expected=", ".join(COMPUTE_DTYPES),
            found=compute_dtype,
        )
    check_counts({"--tokens": num_tokens, "--context": context_length})
    transformers = import_transformers("A model is evaluated")
    with ExitStack() as stack:
        artifact = None
        if source_name is None:
            _check_plain(out)
        else:
            artifact = stack.enter_context(Artifact(out, is_sealed=True))
        place = source_name or str(out)
        source = stack.enter_context(open_source(place, revision))
        with quiet_loading(transformers), folder_of(source) as folder:
            tokens = read_text(transformers, folder, text, num_tokens, source=place)
        if artifact is not None:
            _check_beside_experts(artifact, source, resources.num_threads)
        return compare_on_text(
            artifact,
            source,
            tokens,
            text.name,
            context_length=context_length,
            compute_dtype=compute_dtype,
            resources=resources,
        )


def _check_plain(out: Path) -> None:
    if not out.is_dir() or (out / MANIFEST).is_file():
        raise RequestError(
            "Without a source, reference predictions are those of a plain checkpoint.",
            where=f"--write-reference {out}",
            expected="the folder of a plain checkpoint",
            found="an artifact" if out.is_dir() else "no folder",
            remedy="Name the source of an artifact: its evaluation writes them, too.",
        )


def compare_on_text(
    artifact: Artifact | None,
    source: Source,
    tokens: Text,
    text_name: str,
    *,
    context_length: int,
    compute_dtype: str,
    resources: Resources,
    reference: Stream | None = None,
) -> dict[str, Any]:
    """Run source and artifact over a text, and write and return the document: see `hqconv.api.evaluate`.

    artifact: None for a plain checkpoint, which is compared with itself. reference: the source's passes over the text,
    which a calibration has run through some layers.
    """
    if len(tokens.ids) < 2:
        raise RequestError(
            "The text is too short.", where=text_name, expected="two tokens at least"
        )
    transformers = import_transformers("A model is evaluated")
    device = resources.device
    with ExitStack() as stack:
        decoded = _Decoded(artifact, source, resources, stack)
        stack.enter_context(quiet_loading(transformers))
        stack.enter_context(explained_gpu_memory(device, _GPU_REMEDY))
        if reference is not None:
            model, batches = reference.model, reference.batches
        else:
            folder = stack.enter_context(folder_of(source))
            dtype = getattr(torch, compute_dtype)
            with running(str(source.place)):
                model = StreamedModel(transformers, source, folder, dtype, device)
            batches = passes_of(tokens, context_length, source, device)
        warnings = decoded.assign(model)
        batches, rounded = _passes_in_memory(
            model, batches, context_length, resources.model_limit()[0], warnings
        )
        num_bytes = model.check_memory(
            [batches, batches, *([rounded] if rounded else [])],
            *resources.model_limit(),
            comparison_bytes=_COMPARISON_BYTES,
        )
        size = f"{num_bytes / 2**30:.1f} GiB"
        _LOG.info("Source and artifact run on %s, in at most %s.", resources.device_name, size)
        if reference is None:
            with running(model.place):
                reference = Stream(model, batches)
            stack.callback(reference.stop)
        reference.keep(len(batches))
        recorder = _Recorder(model, rounded) if rounded else None
        figures = _figures(reference, decoded, resources.num_threads, context_length, recorder)
    shared = _shared_lines(artifact, tokens)
    warnings += _warnings_of_text(figures["num_predictions"], shared)
    root = source.root if artifact is None else artifact.root
    document = {
        "kind": "evaluation",
        "artifact": root.resolve().name,
        "manifest_sha256": None if artifact is None else artifact.manifest.sha256,
        "schema": "as stored" if artifact is None else artifact.manifest.schema_name,
        "source": {"name": source.repo_id or source.name, "revision": source.revision},
        "text": {"name": text_name, "sha256": hashlib.sha256(tokens.raw).hexdigest()},
        "lines_of_calibration": round(shared, 3),
        "num_tokens": len(tokens.ids),
        "context_length": context_length,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "device": resources.device_name,
        "num_layers": len(decoded.layers),
        "transformers_version": transformers.__version__,
        "warnings": warnings,
        **figures,
    }
    warning = "" if recorder is None else recorder.write(root, document)
    warnings += [warning] * bool(warning)
    if artifact is None and (recorder is None or recorder.failure):
        raise OutputError(
            "The reference predictions were not written.",
            where=str(root),
            found="; ".join(warnings),
        )
    if artifact is not None:
        try:
            write_evaluation(root, document)
        except OutputError as error:
            warnings.append(f"{EVALUATION} cannot be written beside the artifact: {error.found}.")
    return document


def _shared_lines(artifact: Artifact | None, tokens: Text) -> float:
    """Return the share of a text's lines that the calibration's text has, too."""
    if artifact is None or artifact.manifest.calibration is None:
        return 0.0
    return common_lines(artifact.manifest.calibration.lines, tokens.raw.decode())


def _warnings_of_text(num_predictions: int, shared: float) -> list[str]:
    warnings = []
    if num_predictions < _FEW_PREDICTIONS:
        warnings.append(
            f"{plural(num_predictions, 'prediction')} only: the figures are not reliable. Use a text of "
            "some thousand tokens."
        )
    if shared >= _SHARED_LINES:
        warnings.append(
            f"About {shared:.0%} of the text's lines are of the calibration's text: its figures are too good. "
            "Evaluate on a text that the calibration did not read."
        )
    return warnings


# --- the evaluation that ends a conversion, over a text that its calibration did not read

_NUM_TOKENS = 16_384  # at most: 32 sequences for reference predictions
_FEW_PREDICTIONS = 512
_LEAST_TOKENS = 512  # of the rest of a calibration's text
_CONTEXT_LENGTH = 512


@dataclass(frozen=True)
class HeldOut:
    """A text for the evaluation, or the reason why there is none. name: of its file."""

    name: str = ""
    tokens: Text | None = None
    warnings: tuple[str, ...] = ()

    def batches(self, source: Source, device: torch.device) -> list[torch.Tensor]:
        """Return the token ids of each pass, [B, T]."""
        if self.tokens is None:
            return []
        return passes_of(self.tokens, _CONTEXT_LENGTH, source, device)


def held_out(
    source: Source, calibration: Calibration | None, text: Path | None, *, is_gated: bool
) -> HeldOut:
    """Return the text of the evaluation that ends a conversion: `text`, or what calibration did not read of its own.

    is_gated: the evaluation is needed, for a limit. Raises RequestError where a needed or named text cannot be had.
    """
    if text is None and calibration is None and not is_gated:
        return HeldOut()
    try:
        return _read(source, calibration, text)
    except RequestError as error:
        if is_gated or text is not None:
            raise
        return HeldOut(warnings=(f"Nothing was evaluated. {_on_one_line(error)}",))


def _read(source: Source, calibration: Calibration | None, text: Path | None) -> HeldOut:
    transformers = import_transformers("A model is evaluated")
    source.fetch(source.sidecar_files.names)  # the tokenizer's among them
    place = str(source.place)
    with quiet_loading(transformers), folder_of(source) as folder:
        if text is not None:
            tokens = read_text(transformers, folder, text, _NUM_TOKENS, "--evaluate", place)
            return HeldOut(text.name, tokens)
        if calibration is None:
            raise RequestError(
                "There is no text for an evaluation.",
                where="--max-kl",
                remedy="Name a text with --evaluate, or use --calibrate.",
            )
        assert calibration.path is not None
        tokens = read_text(
            transformers,
            folder,
            calibration.path,
            _NUM_TOKENS,
            "--calibrate",
            place,
            calibration.begin_of_rest,
        )
    calibration.check_unchanged()
    if len(tokens.ids) < _LEAST_TOKENS:
        raise RequestError(
            "Nothing of the calibration's text was held out for an evaluation.",
            where=f"--calibrate {calibration.path}",
            expected=f"{_LEAST_TOKENS} tokens at least after those that calibration reads, without lines that it reads",
            found=plural(len(tokens.ids), "token"),
            remedy="Name a text with --evaluate, or use fewer --calibrate-tokens.",
        )
    return HeldOut(f"{calibration.name}, held out", tokens)


def with_evaluation(
    report: ConversionReport,
    reference: Stream | None,
    source: Source,
    text: HeldOut,
    resources: Resources,
    max_kl: float | None,
) -> ConversionReport:
    """Return the report of a finished artifact with its evaluation, which is written beside the artifact too.

    reference: the source's passes over the text, which the calibration has run through some layers.
    An artifact that was finished before is not evaluated again over the text of the evaluation beside it.
    max_kl: limit of the mean divergence; with one, RequestError, InputError or NetworkError is raised where the model
    cannot be evaluated, and without one this is a warning.
    """
    if text.tokens is None:
        return _with_warnings(report, text.warnings)
    digest = hashlib.sha256(text.tokens.raw).hexdigest()
    with Artifact(report.out, is_sealed=True) as artifact:
        evaluation = read_evaluation(report.out, artifact.manifest) if report.was_finished else None
        num_known = 0
        if evaluation is not None and evaluation["text"]["sha256"] == digest:
            num_known = evaluation["num_tokens"]
        if evaluation is None or num_known < len(text.tokens.ids):
            if resources.is_cuda:
                torch.cuda.empty_cache()
            try:
                evaluation = compare_on_text(
                    artifact,
                    source,
                    text.tokens,
                    text.name,
                    context_length=_CONTEXT_LENGTH,
                    compute_dtype="float32",
                    resources=resources,
                    reference=reference,
                )
            except (RequestError, InputError, NetworkError) as error:
                if max_kl is not None:
                    raise
                warning = (
                    f"The artifact is complete, but it was not evaluated. {_on_one_line(error)}"
                )
                return _with_warnings(report, [warning])
            report = _with_warnings(report, evaluation["warnings"])
    # NaN is above every limit
    is_over_limit = max_kl is not None and not evaluation["kl"]["mean"] <= max_kl
    return replace(report, evaluation=evaluation, over_max_kl=is_over_limit)


def _with_warnings(report: ConversionReport, warnings: Iterable[str]) -> ConversionReport:
    return replace(report, warnings=(*report.warnings, *warnings))


def _on_one_line(error: HqconvError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())


# --- layers and experts of the artifact


def _check_beside_experts(artifact: Artifact, source: Source, num_threads: int) -> None:
    """Refuse a source whose config or other tensors are not the artifact's: the run would be of a mixture of both."""
    _converted_layers(artifact, source)
    differences = check_beside_experts(artifact, source, num_threads).findings
    if differences:
        first = differences[0]
        raise RequestError(
            "Beside the experts the artifact is not this source's: nobody serves a mixture of both.",
            where=f"--source, {first.where}",
            expected=first.expected,
            found=first.found or first.what,
            remedy="Give the checkpoint that was converted.",
        )


def _converted_layers(artifact: Artifact, source: Source) -> dict[str, MoeLayer]:
    """Return the source's layers that the artifact has converted, by name. Raises RequestError for another source."""
    recorded = artifact.manifest.source
    layers = {layer.name: layer for layer in source.map_experts().layers}
    if other_source(recorded, source) is not None or not artifact.layers.keys() <= layers.keys():
        raise RequestError(
            "The artifact was not made from this source.",
            where="--source",
            expected=recorded.name,
            found=source.repo_id or source.name,
            remedy="Give the checkpoint that was converted.",
        )
    return {name: layers[name] for name in artifact.layers}


def _artifact_experts(
    artifact: Artifact, resources: Resources, stack: ExitStack
) -> Callable[[str], Iterator[Expert]]:
    """Return a function that yields the experts of a layer in order, decoded to float32.

    The kernel layout is decoded by the independent decoder; the checkpoint layout is read as a source.
    """
    if artifact.manifest.is_kernel:
        device, num_threads = resources.device, resources.num_threads
        return lambda name: decoded_experts(artifact, artifact.moe_layer(name), device, num_threads)
    source = stack.enter_context(open_source(artifact.root))
    layers = {layer.name: layer for layer in source.map_experts().layers}
    return lambda name: (
        _source_expert(source, layers[name], expert) for expert in range(layers[name].num_experts)
    )


def _source_expert(source: Source, layer: MoeLayer, expert: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for role, matrix in source.read_expert(layer, expert, layer.roles, torch.device("cpu")).items():
        tensors[role] = matrix.values().float()
        if matrix.bias is not None:
            tensors[f"b{role[1:]}"] = matrix.bias.float()
    return tensors


# --- the run


class _Decoded:
    """The artifact's tensors by stage of the model; of a plain checkpoint, without an artifact, there are none.

    layers: stage → converted layer, once the model is known.
    """

    def __init__(
        self, artifact: Artifact | None, source: Source, resources: Resources, stack: ExitStack
    ) -> None:
        """Check that the artifact is of this source. stack: closes what is opened."""
        self._artifact, self._source = artifact, source
        self.layers: dict[str, MoeLayer] = {}
        self._linear: dict[str, list[LinearGroup]] = {}
        if artifact is not None:
            self._converted = _converted_layers(artifact, source)
            self._read_experts = _artifact_experts(artifact, resources, stack)

    def assign(self, model: StreamedModel) -> list[str]:
        """Find the stages of a model that load tensors of the artifact, and return warnings."""
        self._model = model
        if self._artifact is None:
            return []
        self.layers, warnings = _layers_by_stage(model, self._converted)
        self._linear = _linear_by_stage(model, self._artifact, warnings)
        return warnings

    @property
    def stages(self) -> set[str]:
        """The stages with tensors of the artifact."""
        return {*self.layers, *self._linear}

    def tensors(self, stage: str) -> dict[str, torch.Tensor]:
        """Return the artifact's tensors of a stage, as the source stores them."""
        model, tensors = self._model, dict[str, torch.Tensor]()
        if stage in self.layers:
            layer = self.layers[stage]
            experts = self._read_experts(layer.name)
            tensors |= stored_tensors(layer, experts, model.dtype, model.device)
        for group in self._linear.get(stage, ()):
            assert self._artifact is not None
            tensors |= _linear_tensors(self._artifact, self._source, group, model)
        return tensors


def _layers_by_stage(
    model: StreamedModel, layers: Mapping[str, MoeLayer]
) -> tuple[dict[str, MoeLayer], list[str]]:
    """Return stage → converted layer, and a warning of layers that transformers' model does not have."""
    by_stage, left_out = {}, []
    for name, layer in layers.items():
        path = model.experts.get(layer.index, ("",))[0]
        stage = next((stage for stage in model.stages if path.startswith(f"{stage}.")), None)
        if stage is None:
            left_out.append(name)
        else:
            by_stage[stage] = layer
    if not left_out:
        return by_stage, []
    return by_stage, [
        f"{plural(len(left_out), 'layer')} not evaluated: {first_few(left_out)}. The transformers library does not run "
        "them, as those for multi-token prediction."
    ]


def _linear_by_stage(
    model: StreamedModel, artifact: Artifact, warnings: list[str]
) -> dict[str, list[LinearGroup]]:
    """Return stage → quantized linear groups; warn of those that transformers' model does not have."""
    by_stage: dict[str, list[LinearGroup]] = {}
    left_out = []
    for name in artifact.manifest.linear_layers or ():
        group = artifact.linear_group(name)
        stage = model.stage_of_tensor(group.tensor_names()[0])
        if stage:
            by_stage.setdefault(stage, []).append(group)
        else:
            left_out.append(name)
    if left_out:
        warnings.append(
            f"{plural(len(left_out), 'linear layer')} not evaluated: {first_few(left_out)}."
        )
    return by_stage


def _linear_tensors(
    artifact: Artifact, source: Source, group: LinearGroup, model: StreamedModel
) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear group's modules: decoded weights, and the source's biases."""
    tensors = {}
    for role, weight in linear_weights(artifact, group).items():
        module = group.module(0, role)
        tensors[f"{module}.weight"] = weight.to(model.device, model.dtype)
        bias = source.tensors.get(f"{module}.bias")
        if bias is not None:
            tensors[bias.name] = read_tensor(source, bias).to(model.device)
    return tensors


def _figures(
    reference: Stream,
    decoded: _Decoded,
    num_threads: int,
    context_length: int,
    recorder: _Recorder | None,
) -> dict[str, Any]:
    """Run the source's passes to their ends, and the artifact's beside and behind them, and return the figures.

    A longer pass than context_length does not count. recorder: of reference predictions. Raises RequestError where
    transformers cannot run the model.
    """
    model, divergence = reference.model, Divergence()
    changed = decoded.stages
    num_threads_before = torch.get_num_threads()
    artifact: Stream | None = None
    try:
        with running(model.place):
            artifact = Stream(model, reference.batches)
        torch.set_num_threads(num_threads)  # a pass sets it for all of torch
        while (stage := artifact.stage) != model.head:
            streams = [reference] if reference.stage == stage else []
            streams += [] if stage in changed else [artifact]
            if streams:
                _run_stage(model, stage, streams, None if stage in changed else recorder)
            if stage in changed:
                _run_stage(model, stage, [artifact], recorder, decoded.tensors(stage))
        with running(model.place):
            model.load(model.head)
            logits = zip(reference.logits(), artifact.logits(), reference.batches, strict=True)
            for source_logits, artifact_logits, ids in logits:
                if ids.size(1) <= context_length:
                    divergence.add(source_logits, artifact_logits, ids)
                if recorder is not None:
                    recorder.add(ids, source=source_logits, artifact=artifact_logits)
                del source_logits, artifact_logits
            if recorder is not None:
                recorder.advance(model.head)
            model.drop(model.head)
        return divergence.figures()
    finally:
        if artifact is not None:
            artifact.stop()
        if recorder is not None:
            recorder.stop()
        torch.set_num_threads(num_threads_before)


def _run_stage(
    model: StreamedModel,
    stage: str,
    streams: list[Stream],
    recorder: _Recorder | None,
    tensors: Mapping[str, torch.Tensor] = {},
) -> None:
    """Load a stage, with `tensors` in place of the source's, run streams and the recorder through it, and drop it."""
    with running(model.place):
        model.load(stage, tensors)
        for stream in streams:
            stream.advance()
        if recorder is not None:
            recorder.advance(stage)
        model.drop(stage)


class Divergence:
    """Kullback-Leibler divergence, likelihoods and equal top tokens of two models' predictions over a text.

    Of every token but the first of its sequence.
    """

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._nll: dict[str, list[torch.Tensor]] = {"source": [], "artifact": []}
        self._num_equal = 0

    def add(
        self, source_logits: torch.Tensor, artifact_logits: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Add the predictions of some sequences: logits of source and artifact [B, T, V] for token ids [B, T].

        Computed in float64, on the logits' device. Raises RequestError for logits that are not finite.
        """
        predictions = {"source": source_logits, "artifact": artifact_logits}
        for name, logits in predictions.items():
            if not bool(torch.isfinite(logits).all()):
                raise RequestError(
                    "The predictions are not finite numbers.",
                    where=f"logits of the {name}",
                    remedy="Compute in float32.",
                )
        labels = ids[:, 1:].flatten().to(source_logits.device)
        num_rows = max(1, _NUM_VALUES // source_logits.size(-1))
        for begin in range(0, len(labels), num_rows):
            rows = slice(begin, begin + num_rows)
            log_probabilities = {}
            for name, logits in predictions.items():
                values = logits[:, :-1].flatten(0, 1)[rows].double().log_softmax(-1)
                self._nll[name].append(-values.gather(-1, labels[rows, None])[:, 0].cpu())
                log_probabilities[name] = values
            p, q = log_probabilities["source"], log_probabilities["artifact"]
            self._kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())
            self._num_equal += int((p.argmax(-1) == q.argmax(-1)).sum())

    def figures(self) -> dict[str, Any]:
        """Return the figures of all predictions as a document; natural logarithms (nats)."""
        kl = torch.cat(self._kl)
        count = len(kl)
        nll = {name: float(torch.cat(values).mean()) for name, values in self._nll.items()}
        error = float(kl.std(correction=1)) / math.sqrt(count) if count > 1 else None
        percentiles = {name: float(kl.quantile(share)) for name, share in _PERCENTILES.items()}
        perplexity = {name: math.exp(min(mean, 700.0)) for name, mean in nll.items()}  # finite
        return {
            "num_predictions": count,
            "kl": {
                "mean": float(kl.mean()),
                "standard_error": error,
                **percentiles,
                "max": float(kl.max()),
            },
            "perplexity": perplexity,
            "mean_nll": nll,
            "top1_agreement": self._num_equal / count,
        }


# --- reference predictions, which a server is compared with

_REFERENCE_LENGTH = 512  # tokens of a sequence, of which a longer one is cut
_LEAST_SEQUENCES, _MOST_SEQUENCES = 32, 64
_ROUNDED_TOKENS = 4096  # that are computed in bfloat16, too
_LONG_TOKENS = 8192  # of the long prompt, at most


def passes_of(
    text: Text, context_length: int, source: Source, device: torch.device
) -> list[torch.Tensor]:
    """Return the passes of an evaluation [B, T]; a last one that is longer than `context_length` is the long prompt."""
    batches = batches_of(text, context_length, device)
    positions = text_config(source.config).get("max_position_embeddings")
    longest = min(_LONG_TOKENS, positions if isinstance(positions, int) else _LONG_TOKENS)
    ids = [*text.start, *text.ids][:longest]
    if len(ids) >= 2 * context_length:
        batches.append(torch.tensor([ids], device=device))
    return batches


def _passes_in_memory(
    model: StreamedModel,
    batches: Sequence[torch.Tensor],
    context_length: int,
    limit: int,
    warnings: list[str],
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
    """Return the passes of an evaluation, and those to repeat in bfloat16: without what does not fit into memory."""
    texts = [ids for ids in batches if ids.size(1) <= context_length]
    reason = "it needs --compute-dtype float32"
    if model.dtype == torch.float32:
        whole = [ids for ids in texts if ids.size(1) == texts[0].size(1)]
        rounded = whole[: math.ceil(_ROUNDED_TOKENS / texts[0].numel())]
        for passes in (batches, texts):
            streams = [passes, passes, rounded]
            if model.needed_bytes(streams, comparison_bytes=_COMPARISON_BYTES) <= limit:
                return passes, rounded
        reason = "memory is short for its run in bfloat16"
    warnings.append(f"No {REFERENCE} is written: {reason}.")
    return texts, []


class _Recorder:
    """Records predictions of source and artifact, and those of the artifact once more in bfloat16.

    failure: the reason why there are none; an evaluation does not fail with them.
    """

    def __init__(self, model: StreamedModel, rounded: Sequence[torch.Tensor]) -> None:
        """Start the passes in bfloat16. rounded: their token ids [B, T]."""
        self._model, self.failure = model, ""
        self._length = rounded[0].size(1)
        self._found: dict[str, list[torch.Tensor]] = {}
        with running(model.place):
            self._rounded = Stream(model, rounded)

    def advance(self, stage: str) -> None:
        """Run the passes in bfloat16 through a loaded stage; through the head to their ends."""
        if self.failure:
            return
        try:
            with running(self._model.place):
                self._model.narrow(stage, torch.bfloat16)
                if stage != self._model.head:
                    self._rounded.advance()
                    return
                each = zip(self._rounded.logits(), self._rounded.batches, strict=True)
                for logits, ids in each:
                    self._record("bfloat16", logits, ids)
        except RequestError as error:
            self.failure = error.found or error.what

    def stop(self) -> None:
        """End all passes."""
        self._rounded.stop()

    def add(self, ids: torch.Tensor, **logits: torch.Tensor) -> None:
        """Add a pass: token ids [B, T], and the logits [B, T, V] of each model."""
        if ids.size(1) < self._length:
            return  # the rest of the text
        self._append("token_ids", ids, ids[:, : self._num_tokens(ids)].int())
        for model, values in logits.items():
            self._record(model, values, ids)

    def _num_tokens(self, ids: torch.Tensor) -> int:
        return ids.size(1) if ids.size(1) > self._length else min(self._length, _REFERENCE_LENGTH)

    def _append(self, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        prefix = LONG if ids.size(1) > self._length else ""
        self._found.setdefault(prefix + name, []).append(values.cpu())

    def _record(self, model: str, logits: torch.Tensor, ids: torch.Tensor) -> None:
        size = self._num_tokens(ids) - 1
        following = ids[:, 1 : size + 1, None].to(logits.device)
        num_rows = max(1, _NUM_VALUES // logits[0, 0].numel())
        found = []
        for number, sequence in enumerate(logits[:, :size]):
            for begin in range(0, size, num_rows):
                values = sequence[begin : begin + num_rows].float().log_softmax(-1)
                labels = following[number, begin : begin + num_rows]
                top = values.topk(num_top(values.size(-1)))
                found.append((values.gather(-1, labels), top.indices.int(), top.values))
        names = ("log_probabilities", "top_ids", "top_log_probabilities")
        for name, tensors in zip(names, zip(*found, strict=True), strict=True):
            shape = (len(ids), size, -1) if name.startswith("top") else (len(ids), size)
            self._append(f"{model}.{name}", ids, torch.cat(tensors).view(shape))

    def write(self, root: Path, evaluation: Mapping[str, Any]) -> str:
        """Write the file beside an artifact, or into a plain checkpoint. Returns a warning, or ""."""
        tensors = {
            name: torch.cat(values)[:_MOST_SEQUENCES].numpy()
            for name, values in self._found.items()
        }
        if not all(np.isfinite(values).all() for values in tensors.values()):
            self.failure = self.failure or "predictions are no finite numbers"
        if self.failure:
            return f"No {REFERENCE} is written: {self.failure}."
        digest = evaluation["manifest_sha256"]
        metadata = {
            DIGEST: digest or checkpoint_digest(root),
            "digest_of": MANIFEST if digest else "config.json, and the index or the headers",
            "text_sha256": evaluation["text"]["sha256"],
            **{name: evaluation[name] for name in ("compute_dtype", "transformers_version")},
            "torch_version": torch.__version__,
            "hqconv_version": __version__,
        }
        try:
            ReferencePredictions(tensors, metadata).write(root)
        except OutputError as error:
            self.failure = f"{REFERENCE} cannot be written beside the artifact: {error.found}."
            return self.failure
        num_sequences = len(tensors["token_ids"])
        if num_sequences < _LEAST_SEQUENCES and evaluation["num_predictions"] >= _FEW_PREDICTIONS:
            size = f"{plural(num_sequences, 'sequence')} of {self._length} tokens"
            return f"{REFERENCE} has {size} only: {_LEAST_SEQUENCES} are better."
        return ""
