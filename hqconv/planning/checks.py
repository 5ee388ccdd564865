"""Feasibility of a request: target, schema, parameter dtype and grid against Humming and the MoE layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hqconv.errors import RequestError, plural
from hqconv.formats.source_format import DIRECT, DIRECT_ROUNDED, why_not_direct
from hqconv.kernel_layout.compatibility import fuses_exponents, nearest, why_not, why_overflow
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.input_scales import check_input_scales, missing_warnings, static_layers
from hqconv.planning.source_schema import dtype_warnings, rounding_warnings
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names
from hqconv.schemas.artifact_names import HESSIAN_TILE
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import GROUPS, Grid, check_grid, slice_unit
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.model_config import NO_HEADS, AttentionHeads
from hqconv.schemas.options import GPTQ, RTN
from hqconv.schemas.weight_schema import PARAM_DTYPES

PROVEN_SM = 90  # of an H200: docs/kernels.md
_CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "F4", "U8", "I8", "I32")


def check_request(experts: ExpertMap, spec: ConversionSpec, heads: AttentionHeads = NO_HEADS) -> None:
    """Raise RequestError for a request that this version, Humming or the experts' sizes do not allow.

    heads: of the model, for the TP sizes that a message names. The rules of each GPU are in
    `kernel_layout.compatibility`; a conversion asks Humming itself.
    """
    check_input_scales(experts, spec)
    for kernel_spec in spec.kernel_specs:
        _check_scales(kernel_spec)
        if spec.encoding.quantizer == GPTQ:
            _check_rotation(kernel_spec)
        if spec.layout == artifact_names.KERNEL:
            _check_kernel_spec(kernel_spec)
    if spec.layout == artifact_names.CHECKPOINT and spec.of_layers:
        what, remedy = "The checkpoint layout has one schema for all layers.", "Use --layout kernel."
        found = "; ".join(f"{one.schema.name}, {one.inputs.name} activations" for one in spec.kernel_specs)
        raise RequestError(what, where="--layout checkpoint", found=found, remedy=remedy)
    if spec.layout == artifact_names.CHECKPOINT and spec.grid != Grid():
        raise RequestError(
            "The checkpoint layout is unsharded: it serves at any TP and EP.",
            where="--layout checkpoint",
            remedy="Leave out --tp, --tp-split, --ep, --expert-placement and --redundant-experts.",
        )
    if spec.layout == artifact_names.CHECKPOINT:
        _check_left(experts.left)
    for layer in experts.layers:
        _check_sizes(layer, spec, heads)


def refuse_unserved(experts: ExpertMap, spec: ConversionSpec) -> None:
    """Raise RequestError for layers that no server computes with; one named server's limits are warnings."""
    for layer in experts.layers:
        kernel_spec = spec.kernel_spec_of(layer.name)
        if (reason := why_overflow(kernel_spec)) is not None:
            raise RequestError(
                "No server runs these weights.",
                where=f"--schema {kernel_spec.schema.name} --dtype {kernel_spec.param_dtype}, {layer.name}",
                expected="a schema and a dtype that Humming's kernels compute with",
                found=reason,
                remedy="Use --dtype bfloat16, or convert it all the same with --allow-unserved.",
            )


def _check_left(left: Iterable[str]) -> None:
    """Refuse unquantized experts that an ignore list cannot name: the engine knows them by their layer's number."""
    for name in left:
        if ENGINE.layer_pattern(name) is None:
            raise RequestError(
                "The checkpoint layout cannot say that these experts are left as they are.",
                where=f"--layout checkpoint, {name}",
                expected=f"experts of a numbered layer, which {ENGINE.name} knows by the same number",
                remedy="Use --layout kernel, or name a schema for them in a recipe.",
            )


def _check_scales(kernel_spec: KernelSpec) -> None:
    schema = kernel_spec.schema
    if schema.bs_dtype in PARAM_DTYPES and schema.bs_dtype != kernel_spec.param_dtype:
        raise RequestError(
            "A 16-bit scale dtype must be the parameter dtype.",
            where=f"schema {schema.name}: bs_dtype",
            expected=kernel_spec.param_dtype,
            found=schema.bs_dtype,
            remedy="Leave bs_dtype out of the schema, or change --dtype.",
        )


def _check_rotation(kernel_spec: KernelSpec) -> None:
    """Refuse error compensation of weights that are rotated in blocks wider than the known products of inputs."""
    schema = kernel_spec.schema
    if schema.rotation > HESSIAN_TILE:
        raise RequestError(
            f"The quantizer gptq knows products of {HESSIAN_TILE} neighbouring columns only.",
            where=f"schema {schema.name}: hadamard_block_size",
            expected=f"at most {HESSIAN_TILE}",
            found=schema.rotation,
            remedy="Take a smaller block, or use --quantizer mse.",
        )


def _check_kernel_spec(kernel_spec: KernelSpec) -> None:
    """Check that weights and activations run together on the target, and that their layout is known."""
    from hqconv.kernel_layout.transform import needs_cuda

    reason = why_not(kernel_spec)
    if reason is not None:
        inputs, schemas = nearest(kernel_spec)
        runs = [
            *([f"{kernel_spec.schema.name} with --input-schema {', '.join(inputs)}"] if inputs else []),
            *([f"{kernel_spec.inputs.name} activations with --schema {', '.join(schemas)}"] if schemas else []),
        ]
        raise RequestError(
            f"Humming does not run this pair on {kernel_spec.target.name}: {reason}.",
            where=f"--schema {kernel_spec.schema.name} --input-schema {kernel_spec.inputs.name}",
            expected=f"on {kernel_spec.target.name}: {'; '.join(runs)}" if runs else "a pair that runs there",
        )
    if kernel_spec.target.cuda is None and needs_cuda(kernel_spec):
        raise RequestError(
            "The layout depends on the CUDA compiler that will serve.",
            where=f"--schema {kernel_spec.schema.name} --target {kernel_spec.target.name}",
            expected="--cuda, with that compiler's version",
            remedy="Add --cuda 13.0, or what `nvcc --version` says on the serving machine.",
        )


def is_served_with(tp: int, heads: AttentionHeads) -> bool:
    """Return whether the engine can share the model's attention heads among `tp` tensor parallel ranks."""
    return ENGINE.heads_obstacle(Grid(tp), heads) is None


def _check_sizes(layer: MoeLayer, spec: ConversionSpec, heads: AttentionHeads) -> None:
    sizes = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
    schema = spec.kernel_spec_of(layer.name).schema
    if spec.encoding.quantizer == GPTQ and spec.grid.split == GROUPS and layer.intermediate_size % slice_unit(schema):
        raise RequestError(
            "The quantizer gptq needs whole scale groups.",
            where=f"{layer.name}, intermediate size {layer.intermediate_size}, schema {schema.name}",
            expected=f"a multiple of {slice_unit(schema)}",
            found=layer.intermediate_size,
            remedy="Take a schema with smaller groups, or use --quantizer mse.",
        )
    try:
        check_grid(
            layer.name,
            *sizes,
            schema,
            spec.grid,
            pads_last_rank=layer.pads_last_rank,
            is_served=lambda tp: is_served_with(tp, heads),
            can_split=spec.layout == artifact_names.KERNEL
            and ENGINE.inner_obstacle(layer.intermediate_size, spec.grid) is None,
        )
    except RequestError as error:
        is_block = schema.weight_scale_type == "block"
        if not is_block or why_not_direct(layer.format, schema, spec.param_dtype):
            raise
        hint = " With --schema source the source's scales are repeated into smaller blocks."
        fields = {"where": error.where, "expected": error.expected, "found": error.found}
        raise RequestError(error.what, **fields, remedy=error.remedy + hint) from None


def check_copied(checkpoint: Source, experts: ExpertMap, spec: ConversionSpec) -> None:
    """Refuse the checkpoint layout where tensors that it copies are quantized: vLLM would take them for plain ones."""
    if spec.layout != artifact_names.CHECKPOINT or checkpoint.quantization is None:
        return
    refs = (checkpoint.tensors[name] for name in experts.copied)
    quantized = next((ref for ref in refs if ref.dtype in _CODE_DTYPES and len(ref.shape) > 1), None)
    if quantized is not None:
        raise RequestError(
            "The checkpoint layout cannot hold this source: its other layers are quantized as well.",
            where=f"tensor {quantized.name}",
            expected="float tensors outside of the experts: the layout's config describes one quantization",
            found=quantized.dtype,
            remedy="Use --layout kernel, whose config keeps the source's quantization for the other layers.",
        )


def request_warnings(experts: ExpertMap, spec: ConversionSpec, heads: AttentionHeads = NO_HEADS) -> tuple[str, ...]:
    """Return warnings about a request that converts, but runs badly or loses what another option would keep."""
    warnings = [*experts.config_warnings, *rounding_warnings(experts, spec)]
    warnings += _search_warnings(experts, spec)
    warnings += _order_warnings(experts, spec)
    warnings += dtype_warnings(experts, spec)
    warnings += _activation_warnings(experts)
    if spec.layout == artifact_names.CHECKPOINT:
        warnings += _checkpoint_layout_warnings(experts, spec)
    else:
        counts = [layer.num_experts for layer in experts.layers]
        reasons = ENGINE.kernel_layout_obstacles(experts.family, spec.grid, heads, counts)
        if spec.grid.split == GROUPS:
            sizes = dict.fromkeys(layer.intermediate_size for layer in experts.layers)
            reasons += [reason for size in sizes if (reason := ENGINE.inner_obstacle(size, spec.grid)) is not None]
        warnings += [f"{ENGINE.release} will not serve this artifact: {reason}." for reason in reasons]
    kernel_specs = dict.fromkeys(spec.kernel_spec_of(layer.name) for layer in experts.layers)
    warnings += [reason for one in kernel_specs if (reason := why_overflow(one)) is not None]
    if spec.layout == artifact_names.KERNEL:
        warnings += [reason for one in kernel_specs for reason in _kernel_warnings(one)]
    warnings += missing_warnings(static_layers(experts, spec))
    return tuple(dict.fromkeys(warnings))


def _activation_warnings(experts: ExpertMap) -> list[str]:
    """Warn of activations of which only the name is known; weights do not depend on them."""
    unknown = (layer.activation.describe() for layer in experts.layers if not layer.knows_activation)
    return [
        f"the experts' activation {name} is known by name only: verify's kernel check passes over these layers, and "
        f"{ENGINE.name} refuses to serve them from the kernel layout."
        for name in dict.fromkeys(unknown)
    ]


def _kernel_warnings(kernel_spec: KernelSpec) -> Iterator[str]:
    """Yield warnings about kernels that are not proven, and about e8m0 scales that Humming fuses into the codes."""
    if kernel_spec.target.sm_version != PROVEN_SM:
        yield (
            f"the layout for {kernel_spec.target.name} is Humming's byte for byte, but hqconv's own tests have run no "
            f"kernel of it, only sm{PROVEN_SM}'s: run `hqconv verify` on such a GPU."
        )
    if not fuses_exponents(kernel_spec):
        return
    yield (
        f"under {kernel_spec.inputs.name} activations Humming keeps a few powers of two only of the exponents of "
        f"'{kernel_spec.schema.name}', differently for every rank, and rounds the smaller weights again: the recorded "
        "errors do not hold this, verify measures it."
    )
    if kernel_spec.a_dtype == "int8":
        yield (
            "Humming's kernels for mxfp4 under int8 activations misread weights beside small negative ones where "
            "the exponents of a row lie more than 3 apart; verify counts them. Under fp8 activations they do not."
        )


def _search_warnings(experts: ExpertMap, spec: ConversionSpec) -> list[str]:
    """Warn if there is no scale to search for; of shared scales and orders of columns only the data tell."""
    options = spec.encoding
    for layer in experts.layers:
        is_coupled = spec.kernel_spec_of(layer.name).schema.is_coupled
        may_requantize = (is_coupled or layer.format.is_permuted) and not spec.must_be_direct
        if may_requantize or spec.conversion_of(layer) not in (DIRECT, DIRECT_ROUNDED):
            return []
    if options.quantizer == RTN:
        return []
    named = f"--quantizer {options.quantizer}" + (" has" if options.importance is None else " and --importance have")
    return [f"{named} no effect: the codes of all experts are kept, and there is no scale to search for."]


def _order_warnings(experts: ExpertMap, spec: ConversionSpec) -> list[str]:
    """Warn of columns with an order of groups: whether codes can be kept is known from the values of g_idx alone."""
    layers = [layer for layer in experts.layers if spec.encoding_of(layer).sorts_columns]
    if not layers:
        return []
    otherwise = "refused" if all(spec.keeps(layer.name) for layer in layers) else "quantized anew, and counted"
    return [
        f"{plural(len(layers), 'layer')} may have columns in an order of their own (g_idx, act order). The codes of w2 "
        "are kept, with its columns sorted by group and the rows of gate and up in the same order. The codes of gate "
        f"and up are kept where g_idx is column // group size; elsewhere they are {otherwise}, because the kernel has "
        "one input for all experts."
    ]


def _checkpoint_layout_warnings(experts: ExpertMap, spec: ConversionSpec) -> list[str]:
    """Return reasons why the engine without hqconv's plugin will not serve the checkpoint layout."""
    schema = spec.schema
    of_schema = ENGINE.checkpoint_layout_obstacle(schema, spec.param_dtype)
    of_layers = (ENGINE.checkpoint_family_obstacle(experts.family, layer.name, schema) for layer in experts.layers)
    of_family = next((reason for reason in of_layers if reason), None)
    named = ((f"'{schema.name}' with {spec.param_dtype}", of_schema), (f"'{experts.family}'", of_family))
    return [f"{ENGINE.release} cannot serve {name} from this layout: {reason}." for name, reason in named if reason]
