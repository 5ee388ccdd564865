"""Reading of tensor names: the row of the families table that fits them, routers, leftovers of training.

Legend: a candidate is a tensor whose name looks like an expert's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from hqconv.errors import HqconvError, InputError, RequestError, first_few, plural
from hqconv.formats.encoding import part_names
from hqconv.models.families import (
    BY_ARCHITECTURE,
    BY_MODEL_TYPE,
    FAMILIES,
    INDEX,
    UNSUPPORTED,
    Family,
)
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import Config
from hqconv.schemas.tensors import FLOATS, TensorRef

# Lies in `experts` without being a weight: the router's correction of its scores (laguna).
_CORRECTION = ".e_score_correction_bias"
_SUM_BIAS = ".mlp.experts.bias"  # nomic_bert's, of the weighted sum
# Every pattern treats all indices alike: names that differ only in indices match together or not at all.
_INDICES = re.compile(rf"(?<=\.){INDEX}(?=\.)")
_WRAPPERS_OF_DECODER = re.compile(r"(?:(?:model|language_model|text_model|language|llm)\.)+")
_SHARED = ("shared_expert.", "shared_experts.")  # dense, though a stack in some


def looks_like_expert(name: str, num_dims: int) -> bool:
    """Return True for a tensor in an `experts` module, or a 3-D stack in some other MoE module."""
    if "expert" not in name and "moe" not in name:
        return False
    if ".experts." in name or name.startswith("experts."):
        return not name.endswith((_CORRECTION, _SUM_BIAS))
    return num_dims >= 3 and not any(part in name for part in _SHARED)


class FamilyChoice(NamedTuple):
    """The row that describes a checkpoint, and the reason for the choice."""

    family: Family
    because: str
    is_own_row: bool  # the row that names this model_type, not merely one that fits


def choose_family(candidates: list[str], config: Config, text: Config) -> FamilyChoice:
    """Return the row of the model_type, or else the closest row that matches every candidate name."""
    types = [str(config.get("model_type")), str(text.get("model_type"))]
    for model_type in types if candidates else ():
        if model_type in UNSUPPORTED:
            raise RequestError(
                "The experts of this model cannot be converted.",
                where="config.json: model_type",
                expected="experts that one fused Mixture-of-Experts kernel can serve",
                found=f"{model_type}: {UNSUPPORTED[model_type]}",
                remedy="Choose a model of another family.",
            )
    for model_type in types:
        if model_type in BY_MODEL_TYPE:
            return FamilyChoice(BY_MODEL_TYPE[model_type], f"model_type {model_type}", True)
    for name in (*_architectures(config), *_architectures(text)):
        if name in BY_ARCHITECTURE:
            return FamilyChoice(BY_ARCHITECTURE[name], f"architecture {name}", True)
    because = f"unknown model_type {types[0]}"
    # Stable sort: of rows that fit equally well the first one in the table wins.
    rows = sorted(FAMILIES, key=lambda row: -_num_keys_found(row, text))
    num_names = Counter(_INDICES.sub("0", name) for name in candidates)
    num_unmatched = {}
    for as_released in (True, False):
        for row in rows:
            match = name_pattern(row, as_released=as_released).fullmatch
            num_unmatched[row.name] = sum(
                count for name, count in num_names.items() if not match(name)
            )
            if not num_unmatched[row.name]:
                _refuse_unknown_stacks(row, candidates, because)
                return FamilyChoice(row, f"closest row {row.name} for {because}", False)
    closest = min(rows, key=lambda row: num_unmatched[row.name])
    match = name_pattern(closest).fullmatch
    unmatched = [name for name in candidates if not match(name)]
    raise unmatched_error(RequestError, closest, unmatched, because)


def _architectures(config: Config) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _refuse_unknown_stacks(row: Family, candidates: list[str], because: str) -> None:
    """Refuse stacks of unknown models: names tell neither the order of gate and up nor if their rows alternate."""
    match = _name_pattern(row.paths, _projection_names(row), (), part_names()).fullmatch
    fused = [name for name in candidates if not match(name)]
    if fused:
        raise RequestError(
            "The experts of an unknown model are fused: gate and up cannot be told apart.",
            where=first_few(fused),
            expected=f"one tensor per expert and projection, such as {row.example()}",
            found=because,
            remedy="Check model_type in config.json; a new family needs a row in hqconv/models/families.py.",
        )


def _num_keys_found(row: Family, text: Config) -> int:
    # A row's first key counts most: the later ones are other spellings of the same value.
    total = 0
    for keys in (
        row.num_experts_keys,
        row.top_k_keys,
        row.intermediate_size_keys,
        row.activation_keys,
    ):
        total += 2 if text.get(keys[0]) is not None else any(key in text for key in keys)
    return total


def name_pattern(family: Family, *, as_released: bool = False) -> re.Pattern[str]:
    """Compile the pattern of whole tensor names; groups: layer, expert and projection or else stack, part.

    as_released: of the released names alone. Equal rows share one pattern.
    """
    modules = family.paths
    projections = _projection_names(family)
    stacks = family.stacks
    if as_released:
        modules = family.modules
        projections = tuple(family.projections.values())
    else:
        stacks = (*stacks, *family.more_stacks)
    singles = (*projections, *(stack.name for stack in family.expert_stacks))
    stack_names = tuple(dict.fromkeys(stack.name for stack in stacks))
    return _name_pattern(modules, singles, stack_names, part_names())


def _projection_names(family: Family) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in family.spellings for name in names.values()))


@cache
def _name_pattern(
    modules: tuple[str, ...],
    projections: tuple[str, ...],
    stacks: tuple[str, ...],
    part_names: tuple[str, ...],
) -> re.Pattern[str]:
    paths = "|".join(re.escape(t).replace(re.escape("{layer}"), INDEX) for t in modules)
    names = _any_of(projections)
    part = _any_of(sorted(part_names, key=len, reverse=True))
    single = rf"(?P<expert>{INDEX})\.(?P<projection>{names})\.(?P<part>{part})"
    fused = rf"|(?P<stack>{_any_of(stacks)})(?:[._](?P<stack_part>{part}))?" if stacks else ""
    return re.compile(rf"(?P<block>{paths})\.(?:{single}{fused})")


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def unmatched_error(
    kind: type[HqconvError], family: Family, unmatched: list[str], because: str
) -> HqconvError:
    """Return the error for tensors that look like experts and match no template of the row.

    Raises InputError for names of adapters and wrappers.
    """
    refuse_leftovers(unmatched)
    return kind(
        "Tensors look like experts, but their names are not understood.",
        where=first_few(unmatched),
        expected=f"names such as {family.example()} ({because})",
        found="extra, renamed or fused tensors, which must not be copied as if they were dense",
        remedy="Check model_type in config.json; a new naming needs a row in hqconv/models/families.py.",
    )


# --- routers, and names from training ---------------------------------------------------------------------

# Components of names that no model class of a server has. Adapters: parameters of peft's tuners (`prefix` of each
# model.py; `base_layer` of them all) and wrappers (utils/other.py), of MLX, torchtune and NeMo.
_ADAPTERS = (
    r"base_layer|original_modules?|modules_to_save|lora_(?:[abe]|embedding_[ab]|magnitude_vector)\w*|ranknum|"
    r"(?:vera|ia3|hada|lokr|boft|oft|hra|fourierft|vblora|randlora|road|shira|c3a|waveft|delora|bone|miss)_\w+|"
    r"prompt_encoder\.\w+\.embedding|adaption_(?:prompt|gate)|ln_tuning_layers|token_adapter|trainable_tokens_\w+|"
    r"adapter\.linear_(?:in|out)|to_wrap"
)
# FSDP, activation checkpointing, torch.compile, Lightning; torch's pruning and its quantization in training.
_WRAPPERS = (
    r"_fsdp_wrapped_module|_checkpoint_wrapped_module|_flat_param\w*|_orig_mod|_forward_module|"
    r"weight_orig|weight_mask|weight_fake_quant|activation_post_process"
)
# Pattern of names, their origin, remedy.
_TRAINING = (
    (
        re.compile(rf"^base_model\.|(?:^|\.)(?:{_ADAPTERS})(?:\.|$)", re.IGNORECASE),
        "an adapter that was not merged",
        "Merge the adapter and save the model itself, such as with peft's merge_and_unload() and save_pretrained().",
    ),
    (
        re.compile(rf"^module\.|(?:^|\.)(?:{_WRAPPERS})(?:\.|$)"),
        "a wrapper from training",
        "Save the model without the wrapper (torch.compile's is model._orig_mod, DDP's model.module), or take the "
        "wrapper out of the names.",
    ),
)
_DECODER_LAYER = re.compile(r"(?:[^.]+\.)*?[0-9]+\.")
_MAX_ZERO_EXPERTS = 16  # rows of a router without experts: fewer than any other matrix has
# whose last dimension is the hidden size
_OF_HIDDEN = re.compile(
    r"(?:norm|layers\.\d+\.(?:(?:input|post_attention)_layernorm|(?:mlp|block_sparse_moe)\.gate))\.weight"
)
INTEGERS = ("BOOL", "U8", "I8", "I16", "I32", "I64")
_NORM = re.compile(r"(?:[\w.]+\.)?\w*norm\w*\.(?:weight|bias)")
_ROUTER = re.compile(r"(?:^|\.)(?:gate|wg|\w*router\w*)(?:\.|$)")


def refuse_leftovers(names: Collection[str]) -> None:
    """Raise InputError for names of a model under training: of adapters that are not merged, of wrappers."""
    for pattern, origin, remedy in _TRAINING:
        found = [name for name in names if pattern.search(name)]
        if found:
            raise InputError(
                f"Tensors have the names of {origin}: no server loads them as the model's weights.",
                where=first_few(found),
                expected="names of the model's own modules",
                found=plural(len(found), "name"),
                remedy=remedy,
            )


def decoder_layer(name: str) -> str:
    """Return the path of the decoder layer that a tensor or module lies in, with a dot at its end; "" without one."""
    found = _DECODER_LAYER.match(f"{name}.")
    return found[0] if found else ""


def decoder_stack(name: str) -> str:
    """Return the path of the list of decoder layers that a module lies in; "" outside of any."""
    return decoder_layer(name).rstrip(".").rpartition(".")[0]


def without_wrappers(name: str) -> str:
    """Return a name without the modules that a decoder lies in: `model.language_model.norm` is `norm`."""
    found = _WRAPPERS_OF_DECODER.match(name)
    return name[found.end() :] if found else name


def is_router(name: str) -> bool:
    """Return True for the name of a router's tensor within a decoder layer, such as its weight or bias."""
    return "attn" not in name and _ROUTER.search(name[len(decoder_layer(name)) :]) is not None


def is_norm(name: str) -> bool:
    """Return True for the name of a norm's weight or bias."""
    return _NORM.fullmatch(name) is not None


def is_end(name: str) -> bool:
    """Return True for the name of the embedding or the output head."""
    return without_wrappers(name) in ("embed_tokens.weight", "lm_head.weight")


def header_faults(
    modules: Iterable[Mapping[str, TensorRef]], text: Config
) -> Iterator[tuple[str, str, str, str]]:
    """Yield copied tensors, by module and part, whose dtype or shape cannot be: name, what, expected, found."""
    hidden = text.get("hidden_size")
    vocabulary = text.get("vocab_size")
    for parts in modules:
        is_quantized = any("scale" in part for part in parts)
        for ref in (parts[part] for part in ("weight", "bias") if part in parts):
            is_float = is_quantized or ref.dtype not in INTEGERS
            if not is_float and (is_router(ref.name) or is_norm(ref.name)):
                what = "A router or norm is stored as integers: its values are lost."
                yield ref.name, what, "floats", ref.dtype
        weight = parts.get("weight")
        if weight is None or weight.dtype not in FLOATS or not hidden:
            continue
        is_short = (
            isinstance(vocabulary, int) and weight.shape[0] < vocabulary and is_end(weight.name)
        )
        is_wide = (
            is_end(weight.name) or _OF_HIDDEN.fullmatch(without_wrappers(weight.name)) is not None
        )
        if is_short or (is_wide and weight.shape[-1:] != (hidden,)):
            what = "A tensor beside the experts has another shape than config.json says."
            expected = f"hidden_size {hidden}, vocab_size {vocabulary} for embedding and head"
            yield weight.name, what, expected, f"{list(weight.shape)}"


def missing_siblings(
    layers: Iterable[MoeLayer], names: Iterable[str]
) -> Iterator[tuple[str, list[str], int, bool]]:
    """Yield tensors beside the experts, and norms, that all MoE layers of the decoder have but few.

    Each by its name within the layer: the paths of layers that lack it and have the module around it, the number of all
    layers, and whether it is surely lost: first and last layers, and several, may be built otherwise (DeepSeek-V4's
    first routers have no bias).
    """
    moe_layers = {decoder_layer(layer.name): layer for layer in layers if "mtp" not in layer.name}
    beside: dict[str, set[str]] = {place: set() for place in moe_layers}  # in order
    modules = {place: {""} for place in moe_layers}
    for name in names:
        place = decoder_layer(name)
        layer = moe_layers.get(place)
        if layer is None or name.startswith(f"{layer.name}."):
            continue
        inner = name[len(place) :]
        modules[place].add(inner.split(".")[0])
        if inner.split(".")[0] == layer.name[len(place) :].split(".")[0] or is_norm(inner):
            beside[place].add(inner)
    whole = {place: found for place, found in beside.items() if found}
    ends = (next(iter(whole), ""), next(reversed(whole), ""))
    for name in sorted(set().union(*whole.values())):
        parent = name.rpartition(".")[0].rpartition(".")[0].split(".")[0]
        lacking = [
            place
            for place, found in whole.items()
            if name not in found and parent in modules[place]
        ]
        if lacking and len(lacking) <= len(whole) // 4:
            is_lost = len(lacking) == 1 and lacking[0] not in ends
            yield name, lacking, len(whole), is_lost


def lost_modules(
    modules: Collection[str], originals: Collection[str]
) -> Iterator[tuple[str, bool]]:
    """Yield modules that a checkpoint lacks, and whether they may be there under another name, or left out as a whole.

    Both are named without wrappers.
    """

    def group(module: str) -> str:
        return decoder_layer(module) or module.partition(".")[0]

    groups = {group(module) for module in modules}
    renamed = {group(module) for module in modules if module not in originals}
    for module in originals:
        if module not in modules:
            is_alone = "." in module and group(module) not in groups
            yield module, is_alone or group(module) in renamed


def check_routers(
    layers: Collection[MoeLayer],
    copied: Iterable[str],
    tensors: Mapping[str, TensorRef],
    *,
    is_own_row: bool,
) -> None:
    """Raise InputError for an MoE layer whose decoder layer has no router, or a router of fewer experts.

    A router is known by its name, or by its rows: one for each expert. copied: the names of all tensors but the
    experts'. A layer without attention, norms … is part of a checkpoint of experts. Where no layer has a router that is
    known, only the families of the table are refused.
    """
    moe_layers = {decoder_layer(layer.name): layer for layer in layers}
    routed = set[str]()
    whole = set[str]()
    for name in copied:
        place = decoder_layer(name)
        shape = tensors[name].shape
        layer = moe_layers.get(place)
        if layer is None:
            continue
        module, moe_module = (path[len(place) :].partition(".")[0] for path in (name, layer.name))
        is_beside = module == moe_module
        num_more = shape[0] - layer.num_experts if len(shape) == 2 else -1
        has_its_rows = is_beside and 0 <= num_more <= _MAX_ZERO_EXPERTS
        if has_its_rows or (is_router(name) and len(shape) > 1):
            routed.add(place)
            parent = layer.name.rpartition(".")[0]
            is_usual = name in (f"{parent}.gate.weight", f"{parent}.router.weight")
            if is_usual and shape[0] < layer.num_experts:
                raise InputError(
                    "A router has fewer rows than its layer has experts.",
                    where=name,
                    expected=f"{layer.num_experts} rows or more",
                    found=list(shape),
                    remedy="Save the model again with the router that belongs to these experts.",
                )
        elif not is_beside:
            whole.add(place)
    lacking = [layer.name for place, layer in moe_layers.items() if place in whole - routed]
    if lacking and (is_own_row or routed):
        raise InputError(
            "A layer has experts and no router: no server can load it.",
            where=first_few(lacking),
            expected=f"a tensor such as {lacking[0].rpartition('.')[0]}.gate.weight",
            found="no tensor named gate or router",
            remedy="Get the shard that lacks, or save the model again with all of its modules.",
        )
