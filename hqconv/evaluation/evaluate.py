"""Evaluation of an artifact against its source: both run over a text in transformers, layer by layer.

The weights of one layer exist at a time. All sequences go through it with the source's experts, then with the
artifact's; the other weights of a layer are the same bytes in both. Weights only: activations are not quantized.

Legend: B sequences, T tokens, V vocabulary size, H hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.load import decoded_experts
from hqconv.artifact.model_card import check_card, write_evaluation
from hqconv.artifact.reader import Artifact
from hqconv.calibration.inputs import batches_of
from hqconv.calibration.streamed_model import Expert, Stream, StreamedModel, stored_tensors
from hqconv.calibration.transformers_model import (
    Text,
    check_counts,
    folder_of,
    import_transformers,
    positions_warning,
    quiet_loading,
    read_text,
    running,
)
from hqconv.conversion.resources import Resources, explained_gpu_memory
from hqconv.errors import RequestError, first_few, plural
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.notices import draft_layers
from hqconv.sources.opening import open_source
from hqconv.verification.against_source import Lineage, other_source

_LOG = logging.getLogger(__name__)

_GPU_REMEDY = "Free the GPU, take fewer --tokens or a shorter --context, or use --device cpu."
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
_NUM_VALUES = 1 << 22  # logits at a time: 32 MiB of float64, and a few times as much
_PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of an evaluation; see `hqconv.api.evaluate`."""

    num_tokens: int
    context_length: int
    compute_dtype: str
    write_card: bool
    resources: Resources
    revision: str | None
    announce: Callable[[str], None]


def evaluate(out: Path, source_name: str, text: Path, options: EvaluateOptions) -> dict[str, Any]:
    """Return the document of an evaluation; see `hqconv.api.evaluate`."""
    if options.compute_dtype not in COMPUTE_DTYPES:
        what, expected = "There is no such dtype to compute in.", ", ".join(COMPUTE_DTYPES)
        raise RequestError(
            what, where="--compute-dtype", expected=expected, found=options.compute_dtype
        )
    check_counts({"--tokens": options.num_tokens, "--context": options.context_length})
    transformers = import_transformers("A model is evaluated")
    with ExitStack() as stack:
        artifact = stack.enter_context(Artifact(out, is_sealed=True))
        source = stack.enter_context(open_source(source_name, options.revision))
        if options.write_card:
            check_card(out)
        with quiet_loading(transformers), folder_of(source) as folder:
            words = read_text(transformers, folder, text, options.num_tokens, source=source_name)
        check_text(words, f"--text {text}")
        document = compare_on_text(artifact, source, words, text.name, options)
        if options.write_card:
            write_evaluation(out, artifact.manifest, document)
        return document


def check_text(words: Text, where: str) -> None:
    """Raise RequestError for a text of less than two tokens, which predicts nothing."""
    if len(words.ids) < 2:
        what, expected, found = (
            "The text is too short.",
            "two tokens at least",
            plural(len(words.ids), "token"),
        )
        raise RequestError(what, where=where, expected=expected, found=found)


def compare_on_text(
    artifact: Artifact,
    source: Source,
    words: Text,
    name: str,
    options: EvaluateOptions,
    reference: Stream | None = None,
) -> dict[str, Any]:
    """Run source and artifact over a text and return the document of the evaluation; see `hqconv.api.evaluate`.

    name: of the text, in the document. reference: the source's passes over the text, which a calibration has run
    through some layers.
    """
    transformers = import_transformers("A model is evaluated")
    device = options.resources.device
    with ExitStack() as stack:
        layers = _converted_layers(artifact, source)
        read_experts = _artifact_experts(artifact, options.resources, stack)
        stack.enter_context(quiet_loading(transformers))
        stack.enter_context(explained_gpu_memory(device, _GPU_REMEDY))
        if reference is not None:
            model, batches = reference.model, reference.batches
        else:
            folder = stack.enter_context(folder_of(source))
            with running(str(source.place)):
                model = StreamedModel(
                    transformers, source, folder, getattr(torch, options.compute_dtype), device
                )
            batches = batches_of(words, options.context_length, device)
        num_bytes = model.check_memory(
            [batches] * 2, *options.resources.model_limit(), has_logits=True
        )
        positions = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
        warnings = positions_warning(positions, max(ids.size(1) for ids in batches), "--context")
        drafts = draft_layers(source.map_experts(), source.config)
        if left := [name for name in drafts if name in layers]:
            warnings.append(
                f"{plural(len(left), 'layer')} not evaluated: {first_few(left)}. They are for multi-token prediction, "
                "which the transformers library does not run; the model's own predictions do not depend on them."
            )
        of_stage = _layer_of_stage(
            model, [layer for name, layer in layers.items() if name not in left]
        )
        for warning in warnings:
            options.announce(f"Warning: {warning}")
        tokens, stages = plural(len(words.ids), "token"), plural(len(model.stages), "stage")
        options.announce(
            f"Running {tokens} through source and artifact on {options.resources.device_name}, {stages} one after the "
            f"other, in at most {num_bytes / 2**30:.1f} GiB."
        )
        if reference is None:
            with running(model.place):
                reference = Stream(model, batches)
            stack.callback(reference.stop)
        return {
            "kind": "evaluation",
            "artifact": str(artifact.root),
            "manifest_sha256": artifact.manifest.sha256,
            "schema": artifact.manifest.schema_name,
            "source": {"name": source.repo_id or source.name, "revision": source.revision},
            "text": {"name": name, "sha256": hashlib.sha256(words.raw).hexdigest()},
            "num_tokens": len(words.ids),
            "context_length": options.context_length,
            "compute_dtype": str(model.dtype).removeprefix("torch."),
            "device": options.resources.device_name,
            "num_layers": len(of_stage),
            "activations": artifact.manifest.input_schema,
            "transformers_version": transformers.__version__,
            "warnings": warnings,
            **_figures(reference, of_stage, read_experts, options.resources.num_threads),
        }


# --- layers and experts of the artifact


def _converted_layers(artifact: Artifact, source: Source) -> dict[str, MoeLayer]:
    """Return the source's layers that the artifact has converted, by name. Raises RequestError for another source."""
    lineage = Lineage.of(artifact, source)
    another = other_source(lineage.made.source, source)
    layers = {layer.name: layer for layer in source.map_experts().layers}
    missing = sorted(artifact.layers.keys() - layers.keys())
    if another is not None or missing:
        raise RequestError(
            "The artifact was not made from this source.",
            where="--source",
            expected=another.expected if another else f"the layer {missing[0]}",
            found=another.found if another else ", ".join(layers),
            remedy="Give the checkpoint that was converted; `hqconv inspect OUT` names it.",
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
    as_source = stack.enter_context(open_source(artifact.root))
    layers = {layer.name: layer for layer in as_source.map_experts().layers}
    return lambda name: (
        _source_expert(as_source, layers[name], e) for e in range(layers[name].num_experts)
    )


def _source_expert(source: Source, layer: MoeLayer, expert: int) -> dict[str, torch.Tensor]:
    matrices = source.read_expert(layer, expert, layer.roles, torch.device("cpu"))
    found = {role: matrix.values().float() for role, matrix in matrices.items()}
    return found | {
        f"b{role[1:]}": one.bias.float() for role, one in matrices.items() if one.bias is not None
    }


# --- the run


def _layer_of_stage(model: StreamedModel, layers: Iterable[MoeLayer]) -> dict[str, MoeLayer]:
    """Return stage → converted layer. Raises RequestError for a layer that transformers' model does not have."""
    found = {}
    for layer in layers:
        path = model.experts.get(layer.index, ("",))[0]
        stage = next((name for name in model.stages if path.startswith(f"{name}.")), None)
        if stage is None:
            raise RequestError(
                "A layer of experts has no module in transformers' model.",
                where=f"{layer.name}, layer {layer.index}",
                expected="one module of routed experts in this layer",
                remedy="This model cannot be evaluated.",
            )
        found[stage] = layer
    return found


def _figures(
    reference: Stream,
    layers: Mapping[str, MoeLayer],
    read: Callable[[str], Iterator[Expert]],
    num_threads: int,
) -> dict[str, Any]:
    """Run the source's passes to their ends, and the artifact's beside and behind them, and return the figures.

    layers: the converted ones by stage. read: yields the artifact's experts of a layer. Raises RequestError where
    transformers cannot run the model.
    """
    model, before, found = reference.model, torch.get_num_threads(), Divergence()
    artifact: Stream | None = None
    try:
        with running(model.place):
            artifact = Stream(model, reference.batches)
        torch.set_num_threads(num_threads)  # a pass sets it for all of torch
        while (stage := artifact.stage) != model.head:
            layer = layers.get(stage)
            streams = [reference] if reference.stage == stage else []
            streams += [artifact] if layer is None else []
            if streams:
                _run_stage(model, stage, streams)
            if layer is not None:
                experts = stored_tensors(layer, read(layer.name), model.dtype, model.device)
                _run_stage(model, stage, [artifact], experts)
            _LOG.info("Stage %s is done.", stage)
        with running(model.place):
            model.load(model.head)
            for ids, p, q in zip(
                reference.batches, reference.logits(), artifact.logits(), strict=True
            ):
                found.add(p, q, ids)
            model.drop(model.head)
        return found.figures()
    finally:
        if artifact is not None:
            artifact.stop()
        torch.set_num_threads(before)


def _run_stage(
    model: StreamedModel, stage: str, streams: list[Stream], others: Mapping[str, torch.Tensor] = {}
) -> None:
    """Load a stage, run streams through it, and drop it."""
    with running(model.place):
        model.load(stage, others)
        for stream in streams:
            stream.advance()
        model.drop(stage)


class Divergence:
    """Kullback-Leibler divergence, likelihoods and equal top tokens of two models' predictions over a text.

    Of every token but the first of its sequence.
    """

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._nll: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._num_equal = 0

    def add(self, logits: torch.Tensor, others: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the predictions of some sequences: logits of source and artifact [B, T, V] for token ids [B, T].

        Computed in float64, on the logits' device. Raises RequestError for logits that are not finite.
        """
        for name, one in (("source", logits), ("artifact", others)):
            if not bool(torch.isfinite(one).all()):
                raise RequestError(
                    "The predictions are not finite numbers.",
                    where=f"logits of the {name}",
                    found="NaN or infinity",
                    remedy="Compute in float32; if it stays so, transformers runs this model in a way that cannot be "
                    "evaluated layer by layer.",
                )
        labels = ids[:, 1:].flatten().to(logits.device)
        first, second = (one[:, :-1].flatten(0, 1) for one in (logits, others))
        rows = max(1, _NUM_VALUES // logits.size(-1))
        for begin in range(0, len(labels), rows):
            cut = slice(begin, begin + rows)
            p, q = (one[cut].double().log_softmax(-1) for one in (first, second))
            self._kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())
            for log_probabilities, nll in zip((p, q), self._nll, strict=True):
                nll.append(-log_probabilities.gather(-1, labels[cut, None])[:, 0].cpu())
            self._num_equal += int((p.argmax(-1) == q.argmax(-1)).sum())

    def figures(self) -> dict[str, Any]:
        """Return the figures of all predictions as a document; natural logarithms (nats)."""
        kl = torch.cat(self._kl)
        nll = {
            name: float(torch.cat(one).mean())
            for name, one in zip(("source", "artifact"), self._nll, strict=True)
        }
        count = len(kl)
        error = float(kl.std(correction=1)) / math.sqrt(count) if count > 1 else None
        percentiles = {name: float(kl.quantile(share)) for name, share in _PERCENTILES.items()}
        return {
            "num_predictions": count,
            "kl": {
                "mean": float(kl.mean()),
                "standard_error": error,
                **percentiles,
                "max": float(kl.max()),
            },
            "perplexity": {
                name: math.exp(min(mean, 700.0)) for name, mean in nll.items()
            },  # of finite float64
            "mean_nll": nll,
            "top1_agreement": self._num_equal / count,
        }
