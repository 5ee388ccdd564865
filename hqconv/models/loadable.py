"""Names and tensors that a server needs besides experts: a router in every MoE layer, and no names from training."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from hqconv.errors import InputError, first_few
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.tensors import TensorRef

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
_ADAPTER = re.compile(rf"^base_model\.|(?:^|\.)(?:{_ADAPTERS})(?:\.|$)", re.IGNORECASE)
_WRAPPER = re.compile(rf"^module\.|(?:^|\.)(?:{_WRAPPERS})(?:\.|$)")
_DECODER_LAYER = re.compile(r"(?:[^.]+\.)*?[0-9]+\.")
_MAX_ZERO_EXPERTS = 16  # rows of a router without experts: fewer than any other matrix has
_ROUTER = re.compile(r"(?:^|\.)(?:gate|wg|\w*router\w*)(?:\.|$)")


def refuse_leftovers(names: Iterable[str]) -> None:
    """Raise InputError for names of a model under training: of adapters that are not merged, of wrappers."""
    adapters, wrappers = [], []
    for name in names:
        if _ADAPTER.search(name):
            adapters.append(name)
        elif _WRAPPER.search(name):
            wrappers.append(name)
    if adapters:
        raise InputError(
            "Tensors have the names of an adapter that was not merged: no server loads them as the model's weights.",
            where=first_few(adapters),
            expected="names of the model's own modules",
            found=f"{len(adapters)} names of an adapter's modules",
            remedy="Merge the adapter and save the model itself, such as with peft's merge_and_unload() and "
            "save_pretrained().",
        )
    if wrappers:
        raise InputError(
            "Tensors have the names of a wrapper from training: no server loads them as the model's weights.",
            where=first_few(wrappers),
            expected="names of the model's own modules",
            found=f"{len(wrappers)} names with a wrapper's module",
            remedy="Save the model without the wrapper (torch.compile's is model._orig_mod, DDP's model.module), or "
            "take the wrapper out of the names.",
        )


def decoder_layer(name: str) -> str:
    """Return the path of the decoder layer that a tensor or module lies in, with a dot at its end; "" without one."""
    found = _DECODER_LAYER.match(f"{name}.")
    return found[0] if found else ""


def is_router(name: str) -> bool:
    """Return True for the name of a router's tensor within a decoder layer, such as its weight or bias."""
    return "attn" not in name and _ROUTER.search(name[len(decoder_layer(name)) :]) is not None


def check_routers(
    layers: Collection[MoeLayer],
    others: Iterable[str],
    tensors: Mapping[str, TensorRef],
    *,
    is_own_row: bool,
) -> None:
    """Raise InputError for an MoE layer whose decoder layer has no router, or a router of fewer experts.

    A router is known by its name, or by its rows: one for each expert. others: the names of all tensors but the
    experts'. A layer without attention, norms … is part of a checkpoint of experts. Where no layer has a router that is
    known, only the families of the table are refused.
    """
    found = {decoder_layer(layer.name): layer for layer in layers}
    routed, whole = set[str](), set[str]()
    for name in others:
        place, shape = decoder_layer(name), tensors[name].shape
        layer = found.get(place)
        if layer is None:
            continue
        is_beside = (
            name[len(place) :].partition(".")[0] == layer.name[len(place) :].partition(".")[0]
        )
        has_its_rows = (
            is_beside and len(shape) == 2 and 0 <= shape[0] - layer.num_experts <= _MAX_ZERO_EXPERTS
        )
        if has_its_rows or (is_router(name) and len(shape) > 1):
            routed.add(place)
            parent = layer.name.rpartition(".")[0]
            if (
                name in (f"{parent}.gate.weight", f"{parent}.router.weight")
                and shape[0] < layer.num_experts
            ):
                raise InputError(
                    "A router has fewer rows than its layer has experts.",
                    where=name,
                    expected=f"{layer.num_experts} rows or more",
                    found=list(shape),
                    remedy="Save the model again with the router that belongs to these experts.",
                )
        elif not is_beside:
            whole.add(place)
    lacking = [layer.name for place, layer in found.items() if place in whole - routed]
    if lacking and (is_own_row or routed):
        raise InputError(
            "A layer has experts and no router: no server can load it.",
            where=first_few(lacking),
            expected=f"a tensor such as {lacking[0].rpartition('.')[0]}.gate.weight",
            found="no tensor named gate or router",
            remedy="Get the shard that lacks, or save the model again with all of its modules.",
        )
