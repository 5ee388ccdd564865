"""Refusals of artifacts and deployments that vLLM 0.33's Humming layers do not support. Imports no vLLM."""

from __future__ import annotations

from hqconv.errors import HqconvError, RequestError
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView
from hqconv.serving.server_compatibility import ServerLayer, recut


def check_redundant_experts(view: ArtifactView, layer: ServerLayer) -> None:
    """Refuse copies of experts, in the artifact or in the server. Raises RequestError."""
    grid = view.grid
    if grid.redundant or layer.redundant:
        fitting = recut(view, tp=layer.tp, ep=layer.ep, placement=layer.placement, redundant=0)
        remedies = ["Serve without --enable-eplb."] * bool(layer.redundant)
        remedies += [f"Cut it again: {fitting}."] * bool(grid.redundant)
        raise RequestError(
            "Humming layers in vLLM have no redundant experts.",
            where=view.location.name,
            expected=0,
            found=f"{grid.redundant} in the artifact, {layer.redundant} asked for",
            remedy=" ".join(remedies),
        )


def check_inputs(view: ArtifactView, converted: ArtifactLayer) -> None:
    """Refuse quantized activations that vLLM prepares otherwise than the kernel reads. Raises RequestError.

    vLLM itself quantizes fp8 in groups of 128, before it sends tokens to other ranks.
    """
    inputs = converted.kernel_spec.inputs
    if inputs.input_scale_group_size != 128 or inputs.a_dtype not in ("float8e4m3", "float8e5m2"):
        return
    if inputs.a_dtype == "float8e5m2" or converted.hidden_size % 128:
        is_wide = inputs.a_dtype == "float8e4m3"
        raise RequestError(
            "Activations in groups of 128, as vLLM quantizes them itself, are not this artifact's.",
            where=f"{view.location.name}: {converted.name}",
            expected="a hidden size that is a multiple of 128" if is_wide else "float8e4m3 activations",
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
