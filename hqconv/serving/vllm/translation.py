"""Translation between an artifact's words and vLLM's: names of MoE layers, and activations. Imports no vLLM.

What vLLM 0.33's Humming layers do not support is refused; other releases give a warning.

Names: vLLM names a layer by the place it has in vLLM's own model, and an artifact names a layer by the module path of
its source. A model class's `hf_to_vllm_mapper` leads from the one to the other; what it leaves over is below. Read in
vLLM 0.33: files are below `vllm/model_executor/models` unless they begin with `vllm/`.

Activations: both are an `Activation`, the manifest's by hqconv's names, vLLM's by those of its `MoEActivation`. vLLM's
`silu` has a limit where it is `silu_clamp` here; `swiglustep` has the bound 7 and says no number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version

from hqconv.errors import RequestError
from hqconv.schemas.activation import Activation
from hqconv.schemas.engine import ENGINE
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView
from hqconv.serving.server_compatibility import ServerLayer, recut_for

METHOD = "hqconv"  # `quant_method` of an artifact's config.json
# Activations that vLLM quantizes itself, before it sends tokens to other ranks (`utils/humming/moe.py`).
PREQUANTIZED = ("float8e4m3", "dynamic_group", 128)

# --- layer names

# Drafts that vLLM counts on after the last layer, and checkpoints from 0: vLLM's prefix, and the layer's name with what
# was left of the prefix.
_COUNTED_ON = (
    # vllm/models/deepseek_v4/nvidia/mtp.py and dspark.py; with the main model's mapper `model.mtp.0`
    (re.compile(r"model\.layers\.([0-9]+)\.(ffn\.experts)"), r"(?:model\.)?mtp\.[0-9]+\."),
    # vllm/models/qwen4_exp/nvidia/mtp.py
    (re.compile(r"mtp\.layers\.([0-9]+)\.(.+)"), r"mtp\.layers\.[0-9]+\."),
)


def find_layer(
    prefix: str, renamed: Mapping[str, str], indices: Mapping[str, int] | None = None
) -> str | None:
    """Find the artifact's layer whose experts belong into the layer that vLLM names `prefix`.

    `renamed` maps the names that vLLM's mappers gave to layers, or their own, to the names in the artifact; an empty
    one says that the name is two layers'. `indices` maps names to layer indices of the manifest, which count the drafts
    of `mtp.layers` on as vLLM does; without it no draft is found under another number.

    A name as it is comes first. Otherwise one of the spellings that vLLM 0.33 is known to use must be there, and only
    one. None where no layer has such a name, where two have, and for every name that no rule knows: an expert's
    weights have the right shape in every layer, so a wrong guess would load and answer nonsense. For the same reason
    no rule changes a layer's number, but for those drafts, and none leads from a draft to a layer of the model or
    back. Raises nothing.
    """
    if prefix in renamed:
        return renamed[prefix] or None
    found = {renamed[name] for name in _spellings(prefix) if name in renamed}
    found.update(_counted_on(prefix, renamed, indices or {}))
    return (found.pop() or None) if len(found) == 1 else None


def _spellings(prefix: str) -> Iterator[str]:
    """Yield other names than `prefix` that the artifact's layer may have."""
    if prefix.endswith(".experts"):
        # granitemoe.py, granitemoeshared.py, step3_text.py, step3p5.py: checkpoints have the stacks one module above.
        yield prefix.removesuffix(".experts")
    if prefix.endswith(".ffn"):
        # dbrx.py: DbrxMoE gives its own prefix to its experts.
        yield f"{prefix}.experts.mlp"
    if prefix.endswith(".mlp.experts"):
        # minimax_m2.py: the module is block_sparse_moe, the prefix says mlp.
        yield f"{prefix.removesuffix('.mlp.experts')}.block_sparse_moe.experts"
    if prefix.startswith("language_model.model.layers."):
        # aria.py: the mapper takes `model` away, the prefix has it.
        yield prefix.replace(".model.", ".", 1)
    if prefix.startswith("mtp."):
        # nemotron_h_mtp.py: in multimodal checkpoints drafts lie in language_model, and no mapper is applied.
        yield f"language_model.{prefix}"


def _counted_on(
    prefix: str, renamed: Mapping[str, str], indices: Mapping[str, int]
) -> Iterator[str]:
    """Yield layers of drafts with this layer's number in the manifest and a name that fits `prefix`."""
    for asked, place in _COUNTED_ON:
        match = asked.fullmatch(prefix)
        if match is None:
            continue
        name_of_layer = re.compile(place + re.escape(match[2]))
        for name, layer in renamed.items():
            if name_of_layer.fullmatch(name) and indices.get(layer) == int(match[1]):
                yield layer


# --- activations

_PLAIN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # with a gate; without one `_no_mul` follows
_STEP_LIMIT = 7.0  # of vLLM's swiglustep, which has no other
# gate and up one after the other, as the kernel layout has them; vLLM's `swigluoai` means alternating rows.
_OAI = "swigluoai_uninterleave"


def serving_activation(converted: Activation, gated: bool) -> Activation | None:
    """Return vLLM's activation for one of the manifest's, or None if it has none or the manifest has a name only."""
    name = converted.name
    if not converted.is_known(gated):
        return None
    # with a gate vLLM has a name for it, but no layer that computes it
    if name == "relu2" and not gated:
        return Activation("relu2_no_mul")
    if name in _PLAIN:
        return Activation(_PLAIN[name] + ("" if gated else "_no_mul"))
    if name == "silu_bound":
        return Activation("swiglustep") if converted.limit == _STEP_LIMIT else None
    of_vllm = {"swigluoai": _OAI, "silu_clamp": "silu", "situ": "situ"}.get(name)
    return None if of_vllm is None else replace(converted, name=of_vllm)


def agreed(where: str, converted: Activation, gated: bool, asked: Activation) -> Activation:
    """Return the manifest's activation for a layer, if the server's model requests the same by `asked`.

    `asked` has the numbers that the model class gives. Raises RequestError if they differ, or if vLLM has no such
    activation for Humming.
    """
    expected = serving_activation(converted, gated)
    if expected is None:
        raise _refused(where, converted, gated)
    if _as_given(asked, expected) != expected:
        raise RequestError(
            "The server's model means another activation than the one that was converted and verified.",
            where=where,
            expected=f"{converted.describe()}: {expected}",
            found=asked,
            remedy="Update hqconv and convert again; if that is the same, please report the model.",
        )
    return expected


def _refused(where: str, converted: Activation, gated: bool) -> RequestError:
    remedy = "Serve the original checkpoint with another MoE backend."
    if not converted.is_known(gated):
        what = "The experts' activation is known by name only."
        expected = "one whose formula hqconv knows"
    else:
        what = "Humming layers in vLLM have no such activation."
        expected = "one that vLLM has"
        if converted.name == "silu_bound":
            expected = f"its swiglustep, whose bound is {_STEP_LIMIT:g}"
    return RequestError(
        what, where=where, expected=expected, found=converted.describe(), remedy=remedy
    )


def _as_given(asked: Activation, expected: Activation) -> Activation:
    """Activation that the model class requests, with its implied numbers added and meaningless ones removed.

    vLLM's class for GPT-OSS says `swigluoai` and no number, whatever its config has: the artifact has them. A
    linear_beta of 0 or less is none (vLLM's `situ_and_mul`).
    """
    if expected.name == _OAI and asked.name in ("swigluoai", _OAI):
        return Activation(_OAI, **{**expected.numbers, **asked.numbers})
    if expected.name == asked.name == "situ":
        has_linear = asked.linear_beta is not None and asked.linear_beta > 0
        given = Activation(
            "situ", beta=asked.beta, linear_beta=asked.linear_beta if has_linear else None
        )
        return given if given.numbers else expected
    return Activation(asked.name, asked.limit)


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
    expected = "float8e4m3 activations"
    found = str(inputs.a_dtype)
    if inputs.a_dtype == "float8e4m3":
        expected = "a hidden size that is a multiple of 128"
        found = str(converted.hidden_size)
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
