"""Refusals of what vLLM 0.33's Humming layers do not support, and a warning of other releases. Imports no vLLM."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from importlib.metadata import version

from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.schemas.engine import ENGINE
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView
from hqconv.serving.server_compatibility import ServerLayer, recut

TESTED = ((0, 33), (0, 34))  # from, up to but not; pyproject's extra `vllm` says the same
logger = logging.getLogger("vllm.hqconv")


def warn_of_untested() -> None:
    """Log a warning if hqconv was not tested with the installed vLLM."""
    release = version("vllm")
    found = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if not TESTED[0] <= found < TESTED[1]:
        tested = ", ".join(".".join(map(str, numbers)) for numbers in TESTED)
        logger.warning(
            "hqconv's layers were tested with vLLM from %s up to, not including, %s; this is %s. "
            "Check a few answers before you rely on it: `hqconv verify` judges the artifact, not the server.",
            *tested.split(", "),
            release,
        )


def check_redundant_experts(view: ArtifactView, layer: ServerLayer) -> None:
    """Refuse another number of copies of experts than the server's, and ranks that come and go. Raises RequestError."""
    grid = view.grid
    if grid.redundant != layer.redundant:
        fitting = recut(
            view, tp=layer.tp, ep=layer.ep, placement=layer.placement, redundant=layer.redundant
        )
        options = ENGINE.serve_options(grid)
        start = f"Serve with {options} only, or cut" if options else "Cut"
        raise RequestError(
            "The artifact has another number of redundant experts than the server.",
            where=view.location.name,
            expected=grid.redundant,
            found=layer.redundant,
            remedy=f"{start} it again: {fitting}.",
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
    forms = {name: _moved_form(view, name) for name in layers}
    first = next(iter(forms))
    for name, form in forms.items():
        if form != forms[first]:
            raise RequestError(
                "With --enable-eplb all layers of experts must have the same schema and sizes.",
                where=f"{view.location.name}: {name}",
                expected=f"{forms[first][0]}, as {first}",
                found=form[0],
                remedy="Serve without --enable-eplb, or convert the model with one schema for all layers.",
            )


def _moved_form(view: ArtifactView, name: str) -> tuple[str, object]:
    """Return all that decides the tensors of one expert, with a description first."""
    layer = view.layers.get(name)
    if layer is None:
        return "experts that were left as they were", None
    spec, shapes = layer.layer_spec, {gemm: entry.sizes for gemm, entry in layer.gemms.items()}
    sizes = f"{layer.num_experts} experts of [{layer.intermediate_size}, {layer.hidden_size}]"
    return f"{spec.schema.name}, {spec.inputs.name} activations, {sizes}", (
        spec,
        shapes,
        layer.num_experts,
    )


def moved_experts(view: ArtifactView, layer: str) -> HqconvError:
    """Error for a server that shall fill its layers again although experts may have moved to other ranks."""
    return RequestError(
        "Experts that may have moved between ranks cannot be loaded again in place.",
        where=f"{view.location.name}: {layer}",
        expected="a server without --enable-eplb",
        found="one that has --enable-eplb",
        remedy="Start the server again; of sleep mode use level 1, which keeps the weights.",
    )


def other_cached(view: ArtifactView, layer: str) -> HqconvError:
    """Error for a weight cache that holds the experts of another artifact of the same shapes."""
    return VerificationError(
        "The weight cache holds other experts than those of this artifact.",
        where=f"{view.location.name}: {layer}",
        expected="the experts of this rank file, by its SHA-256",
        found="those of another file",
        remedy="Start the daemon again with this artifact: `vllm preload --model …`.",
    )


def check_inputs(view: ArtifactView, converted: ArtifactLayer) -> None:
    """Refuse quantized activations that vLLM prepares otherwise than the kernel reads. Raises RequestError.

    vLLM itself quantizes fp8 in groups of 128, before it sends tokens to other ranks.
    """
    inputs = converted.layer_spec.inputs
    if inputs.input_scale_group_size != 128 or inputs.a_dtype not in ("float8e4m3", "float8e5m2"):
        return
    if inputs.a_dtype == "float8e5m2" or converted.hidden_size % 128:
        is_wide = inputs.a_dtype == "float8e4m3"
        raise RequestError(
            "Activations in groups of 128, as vLLM quantizes them itself, are not this artifact's.",
            where=f"{view.location.name}: {converted.name}",
            expected="a hidden size that is a multiple of 128"
            if is_wide
            else "float8e4m3 activations",
            found=converted.hidden_size if is_wide else inputs.a_dtype,
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


def no_deployment(view: ArtifactView, converted: ArtifactLayer, found: object) -> HqconvError:
    """Error for a parallel configuration in which vLLM has no Humming kernels."""
    return RequestError(
        "There are no Humming experts in vLLM for this deployment.",
        where=f"{view.location.name}: {converted.name}",
        found=found,
        remedy="Leave VLLM_HUMMING_MOE_GEMM_TYPE unset; VLLM_LOGGING_LEVEL=DEBUG shows why each was left out.",
    )


def no_layers(view: ArtifactView) -> HqconvError:
    """Error for a model that created no MoE layer of the kind that the plugin supports."""
    return RequestError(
        "The server's model has asked for none of the artifact's experts.",
        where=view.location.name,
        expected="layers of experts that vLLM's Humming methods can serve",
        found="none of them, so that their weights would stay random",
        remedy="Leave --moe-backend at its default, and serve the main model, not a part of it.",
    )
