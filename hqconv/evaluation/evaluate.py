"""Evaluation of an artifact against its source: both run over a text in transformers, layer by layer.

The weights of one layer exist at a time. All sequences go through it with the source's experts, then with the
artifact's; the other weights of a layer are the same bytes in both. Weights only: activations are not quantized.

Legend: B sequences, T tokens, V vocabulary size, H hidden size.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.expert_reader import ExpertReader
from hqconv.artifact.load import decoded_experts, expert_floats, refuse
from hqconv.artifact.model_card import check_card, write_evaluation
from hqconv.artifact.reader import Artifact
from hqconv.calibration.forward_pass import ForwardPass
from hqconv.calibration.inputs import batches_of
from hqconv.calibration.streamed_model import Expert, StreamedModel, stored_tensors
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
from hqconv.errors import RequestError, plural
from hqconv.evaluation.divergence import Divergence
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.sources.opening import open_source
from hqconv.verification.against_source import Lineage, other_source

_LOG = logging.getLogger(__name__)

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


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
        raise RequestError(what, where="--compute-dtype", expected=expected, found=options.compute_dtype)
    check_counts(options.num_tokens, options.context_length, least=2)
    transformers = import_transformers("A model is evaluated")
    with ExitStack() as stack:
        artifact = stack.enter_context(Artifact(out, is_sealed=True))
        source = stack.enter_context(open_source(source_name, options.revision))
        if options.write_card:
            check_card(out)

        def read(folder: Path) -> Text:
            words = read_text(transformers, folder, [text], options.num_tokens, source=source_name)
            if len(words.ids) < 2:
                what, expected, found = "The text is too short.", "two tokens at least", plural(len(words.ids), "token")
                raise RequestError(what, where=f"--text {text}", expected=expected, found=found)
            return words

        document = compare_on_text(artifact, source, read, text.name, options)
        if options.write_card:
            write_evaluation(out, artifact.manifest, document)
        return document


def compare_on_text(
    artifact: Artifact, source: Source, read: Callable[[Path], Text], name: str, options: EvaluateOptions
) -> dict[str, Any]:
    """Run source and artifact over a text and return the document of the evaluation; see `hqconv.api.evaluate`.

    read: a folder with the source's tokenizer → the text, two tokens at least. name: of the text, in the document.
    """
    transformers = import_transformers("A model is evaluated")
    with ExitStack() as stack:
        converted = _converted_layers(artifact, source)
        read_experts = _artifact_experts(artifact, options.resources, stack)
        stack.enter_context(quiet_loading(transformers))
        folder, device = stack.enter_context(folder_of(source)), options.resources.device
        words = read(folder)
        batches = batches_of(words, options.context_length, device)
        with running(str(source.place)):
            model = StreamedModel(transformers, source, folder, getattr(torch, options.compute_dtype), device)
            run = _Run(model, source, converted, read_experts, batches, options)
            num_bytes = run.check_memory()
            warnings = positions_warning(model.model.config, max(ids.size(1) for ids in batches))
        for warning in warnings:
            options.announce(f"Warning: {warning}")
        tokens, stages = plural(len(words.ids), "token"), plural(len(model.stages), "stage")
        options.announce(
            f"Running {tokens} through source and artifact on {options.resources.device_name}, {stages} one after the "
            f"other, in at most {num_bytes / 2**30:.1f} GiB."
        )
        remedy = "Free the GPU, take fewer --tokens or a shorter --context, or use --device cpu."
        with explained_gpu_memory(device, remedy):
            figures = run.figures()
        return {
            "kind": "evaluation",
            "artifact": str(artifact.root),
            "manifest_sha256": artifact.manifest.sha256,
            "schema": artifact.manifest.schema_name,
            "source": {"name": source.repo_id or source.name, "revision": source.revision},
            "text": {"name": name, "sha256": hashlib.sha256(words.raw).hexdigest()},
            "num_tokens": len(words.ids),
            "context_length": options.context_length,
            "compute_dtype": options.compute_dtype,
            "device": options.resources.device_name,
            "num_layers": len(converted),
            "activations": artifact.manifest.input_schema,
            "transformers_version": transformers.__version__,
            "warnings": warnings,
            **figures,
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


def _artifact_experts(artifact: Artifact, resources: Resources, stack: ExitStack) -> Callable[[str], Iterator[Expert]]:
    """Return a function that yields the experts of a layer in order, decoded to float32.

    Of the kernel layout as `hqconv.dequantize` decodes them, on a GPU many at a time; the checkpoint layout is read as
    a source.
    """
    if artifact.manifest.is_kernel and _decodes_on_device(resources):

        def read_many(name: str) -> Iterator[Expert]:
            return decoded_experts(artifact, artifact.moe_layer(name), resources.device, resources.num_threads)

        return read_many
    if artifact.manifest.is_kernel:

        def read(name: str) -> Iterator[Expert]:
            layer = artifact.moe_layer(name)
            reader = ExpertReader(artifact, layer, refuse)
            return (expert_floats(reader, expert) for expert in range(layer.num_experts))

        return read
    as_source = stack.enter_context(open_source(artifact.root))
    layers = {layer.name: layer for layer in as_source.map_experts().layers}
    return lambda name: (_source_expert(as_source, layers[name], e) for e in range(layers[name].num_experts))


def _decodes_on_device(resources: Resources) -> bool:
    return resources.is_cuda


def _source_expert(source: Source, layer: MoeLayer, expert: int) -> dict[str, torch.Tensor]:
    matrices = source.read_expert(layer, expert, layer.roles, torch.device("cpu"))
    found = {role: matrix.values().float() for role, matrix in matrices.items()}
    return found | {f"b{role[1:]}": one.bias.float() for role, one in matrices.items() if one.bias is not None}


# --- the run


class _Run:
    """All passes of source and artifact, stage by stage."""

    def __init__(
        self,
        model: StreamedModel,
        source: Source,
        layers: Mapping[str, MoeLayer],
        read: Callable[[str], Iterator[Expert]],
        batches: list[torch.Tensor],
        options: EvaluateOptions,
    ) -> None:
        """layers: the converted ones. read: the artifact's experts of a layer by name. batches: token ids [B, T]."""
        self._model, self._source, self._read, self._options = model, source, read, options
        self._batches = batches
        self._layers = self._layer_of_stage(layers)

    def _layer_of_stage(self, layers: Mapping[str, MoeLayer]) -> dict[str, MoeLayer]:
        """Return stage → converted layer. Raises RequestError for a layer that transformers' model does not have."""
        found = {}
        for layer in layers.values():
            path = self._model.experts.get(layer.index, ("",))[0]
            stage = next((name for name in self._model.stages if path.startswith(f"{name}.")), None)
            if stage is None:
                raise RequestError(
                    "A layer of experts has no module in transformers' model.",
                    where=f"{layer.name}, layer {layer.index}",
                    expected="one module of routed experts in this layer",
                    remedy="Layers that transformers does not run (multi-token prediction) cannot be evaluated.",
                )
            found[stage] = layer
        return found

    def check_memory(self) -> int:
        """Return the memory that the run needs, in bytes. Raises RequestError where it is more than the limit."""
        return self._model.check_memory(self._batches, *self._options.resources.model_limit(), num_streams=2)

    def figures(self) -> dict[str, Any]:
        """Run everything and return the figures. Raises RequestError where transformers cannot run the model."""
        num_threads, before = self._options.resources.num_threads, torch.get_num_threads()
        streams: tuple[list[ForwardPass], list[ForwardPass]] = ([], [])
        try:
            with self._running():
                for stream in streams:
                    stream.extend(ForwardPass(partial(self._logits, ids)) for ids in self._batches)
            torch.set_num_threads(num_threads)  # a pass sets it for all of torch
            while (stage := self._next_stage(streams)) != self._model.head:
                self._run_stage(stage, streams)
            return self._compare(streams)
        finally:
            for one in (one for stream in streams for one in stream):
                one.stop()
            torch.set_num_threads(before)

    def _running(self) -> AbstractContextManager[None]:
        return running(str(self._source.root))

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._model.model(input_ids=ids, use_cache=False).logits
        return found

    def _next_stage(self, streams: tuple[list[ForwardPass], list[ForwardPass]]) -> str:
        """Return the stage that all passes wait for. Raises RequestError if they differ, or a pass has ended."""
        names = {one.call.name if one.call else "" for stream in streams for one in stream}
        if len(names) != 1 or "" in names:
            what = "The transformers library runs this model in an order that an evaluation does not know."
            raise RequestError(what, where=str(self._source.root), found=", ".join(sorted(names)))
        return names.pop()

    def _run_stage(self, stage: str, streams: tuple[list[ForwardPass], list[ForwardPass]]) -> None:
        """Load a stage, run all passes through it, the artifact's with the artifact's experts, and drop the stage."""
        layer = self._layers.get(stage)
        with self._running():
            self._model.load(stage)
            _advance(streams[0])
        if layer is not None:
            self._model.drop(stage)
            dtype = getattr(torch, self._options.compute_dtype)
            others = stored_tensors(layer, self._read(layer.name), dtype, self._model.device)
        with self._running():
            if layer is not None:
                self._model.load(stage, others)
            _advance(streams[1])
        self._model.drop(stage)
        _LOG.info("Stage %s is done.", stage)

    def _compare(self, streams: tuple[list[ForwardPass], list[ForwardPass]]) -> dict[str, Any]:
        """Run the passes from the head to their ends, one of the source and one of the artifact at a time."""
        with self._running():
            self._model.load(self._model.head)
        found = Divergence()
        for ids, *pair in zip(self._batches, *streams, strict=True):
            with self._running():
                _advance(pair)
            found.add(pair[0].output, pair[1].output, ids)
            for one in pair:
                one.output = None
        self._model.drop(self._model.head)
        return found.figures()


def _advance(passes: list[ForwardPass]) -> None:
    """Compute the module that each pass waits for, and continue the pass."""
    for one in passes:
        assert one.call is not None
        one.resume(one.call.run())
