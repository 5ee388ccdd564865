"""Warnings about requests, which a manifest records, and notices about sources and servers, which it does not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hqconv.calibration.transformers_model import positions_warning
from hqconv.errors import first_few, plural
from hqconv.formats.quant_config import declared_formats
from hqconv.formats.source_format import KNOWN_BY_SOURCE
from hqconv.io.checkpoint_files import FrontMatter, has_tokenizer
from hqconv.kernel_layout.compatibility import why_overflow
from hqconv.models.config_facts import DRAFT_LAYERS_KEYS, is_draft, layer_notices
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.models.tensor_names import decoder_layer, is_router, without_wrappers
from hqconv.planning.calibration import Calibration
from hqconv.planning.spec import ConversionSpec, DenseSchemas
from hqconv.schemas.artifact_names import CARD, CHECKPOINT, KERNEL, text_config
from hqconv.schemas.engine import ENGINE, AttentionHeads
from hqconv.schemas.grid import GROUPS
from hqconv.schemas.input_schema import KernelSpec
from hqconv.schemas.options import RTN
from hqconv.schemas.tensors import FLOATS

_HEAD = re.compile(r"(?:^|\.)(?:lm_head|head|output|embed_out)\.(?:weight|qweight|base_layer)")
_ENDS_OF_MODEL = (
    ("embedding", re.compile("emb|wte")),
    ("norm behind them", re.compile(r"norm|ln_f|layer_norm")),
)
# what config.json counts, by which keys, and what its tensors are named
_COUNTED = (
    (
        "layers for multi-token prediction",
        DRAFT_LAYERS_KEYS,
        re.compile(r"(?:^|\.)(?:mtp|nextn|eh_proj)"),
    ),
    ("shared experts", ("n_shared_experts", "num_shared_experts"), re.compile("share")),
)
# tokens of a calibration
_FEW_PER_EXPERT = 256
_FEW_IN_CONTEXT = 256
PROVEN_SM = 90  # of an H200: docs/kernels.md


def request_warnings(
    experts: ExpertMap, spec: ConversionSpec, config: Mapping[str, Any], heads: AttentionHeads
) -> tuple[str, ...]:
    """Return warnings about a request that converts, but runs badly or loses what another option would keep.

    config: the source's config.json.
    """
    warnings = _search_warnings(experts, spec)
    warnings += _activation_warnings(experts)
    if spec.layout == CHECKPOINT:
        warnings += _checkpoint_layout_warnings(experts, spec)
    else:
        counts = [layer.num_experts for layer in experts.layers]
        reasons = ENGINE.kernel_layout_obstacles(experts.family, spec.grid, heads, counts)
        if spec.grid.split == GROUPS:
            sizes = dict.fromkeys(layer.intermediate_size for layer in experts.layers)
            reasons += [
                reason
                for size in sizes
                if (reason := ENGINE.inner_obstacle(size, spec.grid)) is not None
            ]
        warnings += [
            f"{ENGINE.release} will not serve this artifact: {reason}." for reason in reasons
        ]
    kernel_specs = dict.fromkeys(
        one for layer in experts.layers for one in spec.layer_spec_of(layer.name).each
    )
    warnings += [reason for one in kernel_specs if (reason := why_overflow(one)) is not None]
    if spec.layout == KERNEL:
        warnings += [reason for one in kernel_specs for reason in _kernel_warnings(one)]
    warnings += _missing_scales(experts, spec)
    if spec.encoding.calibration is not None and (rounded := draft_layers(experts, config)):
        warnings.append(
            f"{plural(len(rounded), 'layer')} rounded to nearest: {first_few(rounded)}. The transformers library does "
            "not run layers for multi-token prediction, so --calibrate has no inputs of their experts."
        )
    return tuple(dict.fromkeys(warnings))


def _activation_warnings(experts: ExpertMap) -> list[str]:
    """Warn of activations of which only the name is known; weights do not depend on them."""
    unknown = (
        layer.activation.describe() for layer in experts.layers if not layer.knows_activation
    )
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
    from hqconv.kernel_layout.transform import fuses_exponents  # with torch

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
    """Warn if a search or a calibration has nothing to choose: all codes are kept."""
    options = spec.encoding
    keeps_all = all(spec.encoding_of(layer).keeps_codes for layer in experts.layers)
    if options.quantizer == RTN or not keeps_all:
        return []
    named = f"--quantizer {options.quantizer}" if options.calibration is None else "--calibrate"
    return [f"{named} has no effect: the codes of all experts are kept."]


def _checkpoint_layout_warnings(experts: ExpertMap, spec: ConversionSpec) -> list[str]:
    """Return reasons why the engine without hqconv's plugin will not serve the checkpoint layout."""
    schema = spec.schema
    of_schema = ENGINE.checkpoint_layout_obstacle(schema, spec.param_dtype)
    of_layers = (
        ENGINE.checkpoint_family_obstacle(experts.family, layer.name, one)
        for layer in experts.layers
        for one in schema.each
    )
    of_family = next((reason for reason in of_layers if reason), None)
    named = (
        (f"'{schema.name}' with {spec.param_dtype}", of_schema),
        (f"'{experts.family}'", of_family),
    )
    return [
        f"{ENGINE.release} cannot serve {name} from this layout: {reason}."
        for name, reason in named
        if reason
    ]


def _missing_scales(experts: ExpertMap, spec: ConversionSpec) -> list[str]:
    """Warn of experts that calibration missed: the largest scale of the other experts serves these too."""
    layers = spec.static_layers(experts)
    of_all = [
        name for layer in layers for names in layer.input_scales.missing.values() for name in names
    ]
    if not of_all:
        return []
    return [
        f"{len(of_all)} projections of experts have no input_scale, {of_all[0]} the first: calibration missed them. "
        "The largest of each layer's others is used for all."
    ]


def source_notices(checkpoint: Source, experts: ExpertMap) -> list[str]:
    """Warn of a model that hqconv knows by its names only, and of a checkpoint that a server may not load whole."""
    notices = _halves_notices(experts)
    layers = [*(layer.name for layer in experts.layers), *experts.left]
    text = text_config(checkpoint.config)
    notices += layer_notices(BY_NAME[experts.family], layers, checkpoint.tensors, text)
    if not experts.is_own_row:
        activations = ", ".join(
            dict.fromkeys(layer.activation.describe() for layer in experts.layers)
        )
        notices.append(
            f"hqconv does not know the model_type {checkpoint.config.get('model_type')}: its experts were found by the "
            f"names of {experts.family}, and their numbers by its config keys. Compare the activation ({activations}) "
            "and the number of experts per token with the model's code."
        )
    beside = checkpoint.sidecar_files
    if not has_tokenizer((*beside.names, *beside.generated)):
        notices.append(
            "the source has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …): copy the publisher's files "
            "into the folder of the weights and use the folder, or start the server with --tokenizer."
        )
    return notices


def loader_notices(checkpoint: Source, experts: ExpertMap) -> Iterator[tuple[str, str, str]]:
    """Yield what a server's loader does not expect, or misses: its kind in docs/check.md, where, and the text."""
    for what in _unkept_promises(checkpoint):
        yield "missing", "", what
    names = checkpoint.config.get("architectures")
    layer = experts.layers[0].name
    class_name = str(names[0]) if isinstance(names, list) and names else ""
    is_multimodal = class_name.endswith("ForConditionalGeneration")
    is_wrapped = without_wrappers(layer) not in (layer, layer.removeprefix("model."))
    if class_name.endswith("ForCausalLM") and is_wrapped:
        yield (
            "loader",
            layer,
            f"{class_name} has no such path: the names are those of a multimodal model.",
        )
    if is_multimodal and "text_config" in checkpoint.config and layer.startswith("model.layers."):
        yield (
            "loader",
            layer,
            f"{class_name} has the text model under a path of its own: these are the names of it alone.",
        )
    declared = declared_formats(checkpoint.quantization, text_config(checkpoint.config))
    routers = [name for name in experts.copied if is_router(name)]
    plain = {
        name.removesuffix(".weight")
        for name in experts.copied
        if name.endswith(".weight") and checkpoint.tensors[name].dtype in FLOATS
    }
    has_list = any(declared.leaves_out(module) for module in plain)
    for name in routers:
        module, _, part = name.rpartition(".")
        if name.endswith((".mlp.gate.bias", ".block_sparse_moe.gate.bias")):
            yield (
                "loader",
                name,
                "No model's class has a bias there: a server refuses it or leaves it out.",
            )
        if part == "weight" and has_list and module in plain and not declared.of(module).is_float:
            yield (
                "loader",
                name,
                "The router is not quantized, and the quantization config does not leave it out.",
            )


def _unkept_promises(checkpoint: Source) -> Iterator[str]:
    """Yield what config.json counts, or every model has, and no tensor is named."""
    text = text_config(checkpoint.config)
    tensors = checkpoint.tensors
    for what, keys, names in _COUNTED:
        counts = [text.get(key) for key in keys]
        is_counted = any(isinstance(count, int) and count > 0 for count in counts)
        if is_counted and not any(map(names.search, tensors)):
            yield f"config.json counts {what}, and no tensor is named so: servers leave them out, or invent them."
    beside_layers = [name for name in tensors if not decoder_layer(name)]
    has_attention = any(".self_attn." in name for name in tensors)
    for what, names in _ENDS_OF_MODEL if has_attention else ():
        if not any(map(names.search, beside_layers)):
            yield f"The checkpoint has layers and no {what}: a server may fill it with anything."
    is_tied = checkpoint.config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if is_tied is False and not any(map(_HEAD.search, tensors)):
        yield "tie_word_embeddings is false, and the checkpoint has no output head: transformers makes a random one."


def _halves_notices(experts: ExpertMap) -> list[str]:
    """Warn of gate and up apart in a family whose stacks alternate their rows: a writer may have cut a stack in halves.

    llm-compressor did so until its pull request 3100; names and shapes are those of a right cut.
    """
    layer = experts.layers[0]
    if layer.format.of("w2").encoding in KNOWN_BY_SOURCE:
        return []
    alternates = any(stack.interleaved for stack in BY_NAME[experts.family].stacks)
    is_stacked = any(part.is_stacked or part.view.count > 1 for part in layer.slices["w3"].values())
    if is_stacked or not alternates:
        return []
    return [
        f"gate and up of {layer.name} are tensors of their own, and in the family's stacks their rows alternate. Some "
        "writers cut such stacks in halves: compare with hqconv check --against ORIGINAL."
    ]


def draft_layers(experts: ExpertMap, config: Mapping[str, Any]) -> list[str]:
    """Return the names of the layers for multi-token prediction, which transformers does not run."""
    family = BY_NAME[experts.family]
    text = text_config(config)
    return [layer.name for layer in experts.layers if is_draft(family, layer.index, text)]


def calibration_notices(calibration: Calibration | None, config: Mapping[str, Any]) -> list[str]:
    """Warn of a calibration with sequences that are longer than the positions of the model's config."""
    if calibration is None:
        return []
    positions = text_config(config).get("max_position_embeddings")
    return positions_warning(positions, calibration.longest, "--calibrate-context")


def few_tokens_notices(calibration: Calibration, layers: Iterable[MoeLayer]) -> list[str]:
    """Warn of a calibration with few tokens for an expert, or in a sequence."""
    per_expert = min(calibration.num_tokens * one.top_k // one.num_experts for one in layers)
    notices = []
    if per_expert < _FEW_PER_EXPERT:
        notices.append(
            f"the calibration reads {plural(calibration.num_tokens, 'token')}, about {per_expert} for an expert: its "
            f"codes fit these tokens and are worse for others. Give {_FEW_PER_EXPERT} for an expert."
        )
    if calibration.longest < _FEW_IN_CONTEXT:
        notices.append(
            f"the calibration's sequences have {calibration.longest} tokens: the model behaves otherwise in longer "
            f"ones. Use a longer text, and --calibrate-context {_FEW_IN_CONTEXT} or more."
        )
    return notices


def source_warnings(checkpoint: Source) -> list[str]:
    """List the files of the source that are not taken along; warn if its license and tags are not taken over."""
    warnings = [*checkpoint.sidecar_files.remarks]
    if left_out := checkpoint.sidecar_files.left_out:
        what = plural(len(left_out), "file or folder", "files and folders")
        warnings.append(f"{what} left out: {first_few(left_out)}.")
    problem = FrontMatter.of(checkpoint.sidecar_files.card or b"").problem
    if problem:
        warnings.append(f"The front matter of {CARD} was not taken over: {problem}.")
    return warnings


def dense_notices(experts: ExpertMap, dense: DenseSchemas) -> list[str]:
    """Return notices of linear layers that stay as they are although they have a schema, or may be linear layers."""
    uneven = [group.name for group in experts.left_linear if dense.of(group.name) is not None]
    notices = []
    if uneven:
        notices.append(f"{first_few(uneven)}: no whole scale groups, left as they are.")
    if experts.unknown_linear:
        names = first_few(experts.unknown_linear)
        notices.append(
            f"{names}: left as they are. hqconv does not know the linear layer, or the source's config counts it as "
            "quantized."
        )
    return notices
