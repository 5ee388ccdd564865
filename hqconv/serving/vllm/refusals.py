"""Refusals of what vLLM 0.33's Humming layers do not support, and a warning of other releases. Imports no vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import version

from hqconv.errors import RequestError
from hqconv.schemas.engine import ENGINE
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView
from hqconv.serving.server_compatibility import ServerLayer, recut_for

TESTED = "0.33"  # pyproject's extra `vllm` says the same
logger = logging.getLogger("vllm.hqconv")


def warn_of_untested() -> None:
    """Log a warning if hqconv was not tested with the installed vLLM."""
    release = version("vllm")
    if not release.startswith(f"{TESTED}."):
        logger.warning(
            "hqconv's layers were tested with vLLM %s; this is %s. Check a few answers before you rely on it: "
            "`hqconv verify` judges the artifact, not the server.",
            TESTED,
            release,
        )


def check_redundant_experts(view: ArtifactView, layer: ServerLayer) -> None:
    """Refuse another number of copies of experts than the server's, and ranks that come and go. Raises RequestError."""
    grid = view.grid
    if grid.redundant != layer.redundant:
        options = ENGINE.serve_options(grid)
        start = f"Serve with {options} only, or cut" if options else "Cut"
        raise RequestError(
            "The artifact has another number of redundant experts than the server.",
            where=view.location.name,
            expected=grid.redundant,
            found=layer.redundant,
            remedy=f"{start} it again: {recut_for(view, layer)}.",
        )
    if layer.is_elastic:
        raise RequestError(
            "The experts of an artifact cannot be dealt to ranks that come and go.",
            where=view.location.name,
            expected="a fixed number of ranks: the kernels are compiled for the experts of a rank",
            found="--enable-elastic-ep",
            remedy="Serve without --enable-elastic-ep; --enable-eplb alone works.",
        )


def check_alike(view: ArtifactView, layers: Iterable[str]) -> None:
    """Refuse layers of one model that differ, for a server that moves experts between ranks. Raises RequestError.

    vLLM 0.33 receives the experts of every layer in the buffers of the first one (distributed/eplb/eplb_state.py,
    `add_model`), and pairs tensors with buffers by their order: tensors of a layer without a buffer would stay behind.
    """
    first, *following = layers
    for name in following:
        if _moved_form(view, name) != _moved_form(view, first):
            raise RequestError(
                "With --enable-eplb all layers of experts must have the same schema and sizes.",
                where=f"{view.location.name}: {name}",
                expected=f"{_described(view, first)}, as {first}",
                found=_described(view, name),
                remedy="Serve without --enable-eplb, or convert the model with one schema for all layers.",
            )


def _moved_form(view: ArtifactView, name: str) -> object:
    """Return all that decides the tensors of one expert; None for experts that were left as they were."""
    layer = view.layers.get(name)
    if layer is None:
        return None
    sizes = {gemm: entry.sizes for gemm, entry in layer.gemms.items()}
    return layer.layer_spec, layer.num_experts, sizes


def _described(view: ArtifactView, name: str) -> str:
    layer = view.layers.get(name)
    if layer is None:
        return "experts that were left as they were"
    sizes = f"{layer.num_experts} experts of [{layer.intermediate_size}, {layer.hidden_size}]"
    return f"{layer.layer_spec}, {sizes}"


def check_inputs(view: ArtifactView, converted: ArtifactLayer) -> None:
    """Refuse quantized activations that vLLM prepares otherwise than the kernel reads. Raises RequestError.

    vLLM itself quantizes fp8 in groups of 128, before it sends tokens to other ranks.
    """
    inputs = converted.layer_spec.inputs
    if inputs.input_scale_group_size != 128 or inputs.a_dtype not in ("float8e4m3", "float8e5m2"):
        return
    expected, found = "float8e4m3 activations", str(inputs.a_dtype)
    if inputs.a_dtype == "float8e4m3":
        expected, found = "a hidden size that is a multiple of 128", str(converted.hidden_size)
        if converted.hidden_size % 128 == 0:
            return
    raise RequestError(
        "Activations in groups of 128, as vLLM quantizes them itself, are not this artifact's.",
        where=f"{view.location.name}: {converted.name}",
        expected=expected,
        found=found,
        remedy="Convert the original again with another --input-schema, such as fp8.",
    )


def check_router(view: ArtifactView, converted: ArtifactLayer, layer: ServerLayer) -> None:
    """Refuse a model whose router weights scale the experts' inputs. Raises RequestError."""
    if layer.router_weight_on_input:
        raise RequestError(
            "Humming layers in vLLM cannot weigh the experts' inputs, as this model does.",
            where=f"{view.location.name}: {converted.name}",
            remedy="Serve the original checkpoint with another MoE backend.",
        )
