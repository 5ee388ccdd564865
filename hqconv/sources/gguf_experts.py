"""Stacks of experts in a GGUF file: their roles and parts, and checks of their sizes.

Legend: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hqconv.errors import InputError, RequestError, plural
from hqconv.formats.source_format import GGUF, SourceFormat
from hqconv.io.gguf_header import COPY_AGAIN, wrong_shape
from hqconv.models.config_facts import ConfigSizes, config_sizes
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.families import BY_MODEL_TYPE, INDEX, Family, text_config
from hqconv.models.moe_layer import MoeLayer, TensorSlice, View
from hqconv.models.tensor_names import decoder_layer, is_router
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.tensors import TensorRef

STACKS = {
    "ffn_gate_exps": ("w1",),
    "ffn_up_exps": ("w3",),
    "ffn_down_exps": ("w2",),
    "ffn_gate_up_exps": ("w1", "w3"),
}


@dataclass(frozen=True)
class GgufPart:
    """A tensor of a GGUF file that holds one part of a projection of all experts of a layer."""

    ref: TensorRef
    view: View

    def share(self, expert: int, shape: tuple[int, ...]) -> TensorRef:
        """Return one expert's byte range with the given shape; () is a scalar for all its stacked projections."""
        num_bytes = self.ref.num_bytes // self.ref.shape[0]
        offset = self.ref.offset_bytes + expert * num_bytes
        if shape:
            num_bytes //= self.view.count
            offset += self.view.index * num_bytes
        return self.ref._replace(shape=shape, offset_bytes=offset, num_bytes=num_bytes)


GgufLayer = dict[str, dict[str, GgufPart]]  # role → part → where it is


def check_layer(layer: int, found: GgufLayer, family: Family, sizes: ConfigSizes) -> None:
    """Check that every projection is present, and every part has the size in the config. Raises InputError."""
    needed = ["weight", *(["bias"] if any("bias" in parts for parts in found.values()) else [])]
    for role in family.projections:
        for part in needed:
            if part not in found.get(role, {}):
                stack = next(stack for stack, roles in STACKS.items() if role in roles)
                raise InputError(
                    "A layer of experts lacks a tensor.",
                    where=f"blk.{layer}.{stack}.{part}",
                    expected="present",
                    found="no such tensor",
                    remedy=COPY_AGAIN,
                )
    for role, parts in found.items():
        for part, one in parts.items():
            _check_part(role, part, one, sizes, found["w2"]["weight"].ref)


def _check_part(role: str, part: str, one: GgufPart, sizes: ConfigSizes, down: TensorRef) -> None:
    ref, from_config = one.ref, (sizes.num_experts, sizes.hidden, sizes.intermediate)
    if len(down.shape) != 3:
        raise wrong_shape(down.name, "[experts, out, in]", down.shape)
    count, hidden, inner = (
        size[1] if size else have for size, have in zip(from_config, down.shape, strict=True)
    )
    rows, columns = (hidden, inner) if role == "w2" else (inner, hidden)
    rows *= one.view.count
    shape = {"weight": (count, rows, columns), "bias": (count, rows), "scale_2": (count,)}[part]
    if ref.shape != shape or not all(shape):
        keys = ", ".join(size[0] for size in from_config if size)
        raise wrong_shape(ref.name, f"{list(shape)} ({keys} in config.json)", ref.shape)
    if part != "weight" and ref.dtype not in FLOATS:
        raise InputError(
            "A bias or scale has the wrong type.",
            where=ref.name,
            expected=" or ".join(FLOATS),
            found=ref.dtype,
            remedy=COPY_AGAIN,
        )


_PARTS = {"weight": "weight", "bias": "bias", "scale": "scale_2"}
_EXPERT = re.compile(rf"blk\.({INDEX})\.({'|'.join(STACKS)})\.(weight|bias|scale|input_scale)")
# Other kinds of experts, and tensors of single experts, which files of 2023 have.
_LOOKS_LIKE_EXPERT = re.compile(r"exps(?:\.|_|$)|\.ffn_(?:gate|up|down)\.[0-9]+\.")
_MTP_PREFIXES = ("mtp.", "language_model.mtp.")
_NOT_NEEDED = "the safetensors' tensor is used"
_ACTIVATION_SCALE = "activation scale, not used by 16-bit activations"


def is_expert(tensor: str) -> bool:
    """Return True for the name of a tensor in a GGUF file that is, or looks like, one of experts."""
    return _EXPERT.fullmatch(tensor) is not None or _LOOKS_LIKE_EXPERT.search(tensor) is not None


def map_gguf(
    tensors: Mapping[str, TensorRef],
    safetensors: Mapping[str, TensorRef],
    config: Mapping[str, Any],
) -> ExpertMap:
    """Map the MoE layers in GGUF files, and every tensor of both kinds of files to its use.

    `tensors` are the tensors of the GGUF files, by their own names; the refs have unique names. Raises
    RequestError for a model_type without a row and files without experts; InputError, naming the tensor, for experts
    that are incomplete, of an unknown layout, or not of the config's sizes.
    """
    return _Finder(tensors, safetensors, config).map()


@dataclass(frozen=True)
class _Finder:
    tensors: Mapping[str, TensorRef]
    safetensors: Mapping[str, TensorRef]
    config: Mapping[str, Any]

    def map(self) -> ExpertMap:
        """Map layers and tensors; see `map_gguf`.

        Names and activations follow the rules for a checkpoint that has experts as tensors: placeholder tensors replace
        the stacks for these rules.
        """
        layers, dropped = self._layers()
        for index, parts in layers.items():
            check_layer(index, parts, self._family, config_sizes(self._family, index, self._text))
        indices = {self._layer_name(index): index for index in sorted(layers)}
        self._check_routers(indices)
        stand_ins: dict[str, TensorRef] = {}
        for name, index in indices.items():
            stand_ins |= self._stand_ins(name, layers[index])
        mapped = map_experts({**self.safetensors, **stand_ins}, self.config)
        found = tuple(_with_stacks(layer, layers[indices[layer.name]]) for layer in mapped.layers)
        assert {layer.name: layer.index for layer in found} == indices, (
            "a layer was mapped to another index"
        )
        return ExpertMap(
            family=mapped.family,
            chosen_because=f"{mapped.chosen_because}; experts from GGUF files",
            layers=found,
            converted={name: layer.name for layer in found for name in layer.tensor_names()},
            copied=mapped.copied,
            dropped=mapped.dropped | dropped,
        )

    @cached_property
    def _text(self) -> Mapping[str, object]:
        return text_config(self.config)

    @cached_property
    def _family(self) -> Family:
        types = [str(config.get("model_type")) for config in (self.config, self._text)]
        family = next((BY_MODEL_TYPE[name] for name in types if name in BY_MODEL_TYPE), None)
        if family is None:
            raise RequestError(
                "Experts in GGUF files can be named for known families only.",
                where="config.json: model_type",
                found=types[0],
                remedy="Convert from safetensors, or add a row to hqconv/models/families.py.",
            )
        return family

    @cached_property
    def _modules(self) -> frozenset[str]:
        """Return the paths of all modules with tensors in the safetensors."""
        modules: set[str] = set()
        for name in self.safetensors:
            module = name.rpartition(".")[0]
            while module and module not in modules:
                modules.add(module)
                module = module.rpartition(".")[0]
        return frozenset(modules)

    # --- which tensor is what --------------------------------------------------------------------------------

    def _layers(self) -> tuple[dict[int, GgufLayer], dict[str, str]]:
        """Collect the parts of every layer's experts, and the dropped tensors of the GGUF files."""
        layers: dict[int, GgufLayer] = {}
        dropped: dict[str, str] = {}
        for tensor, ref in self.tensors.items():
            match = _EXPERT.fullmatch(tensor)
            if match is None:
                if _LOOKS_LIKE_EXPERT.search(tensor):
                    raise _not_understood(ref)
                dropped[ref.name] = _NOT_NEEDED
                continue
            layer, stack, suffix = int(match[1]), match[2], match[3]
            if suffix == "input_scale":
                dropped[ref.name] = _ACTIVATION_SCALE
            elif suffix == "scale" and self._is_of_router(ref, layer, stack):
                dropped[ref.name] = _NOT_NEEDED
            else:
                self._add_part(layers.setdefault(layer, {}), stack, _PARTS[suffix], ref)
        if not layers:
            raise RequestError(
                "Neither the safetensors nor the GGUF files hold experts: nothing to convert.",
                expected="tensors such as blk.0.ffn_down_exps.weight",
                found=f"{plural(len(self.tensors), 'tensor')} in GGUF files, none of an expert",
                remedy="Convert a Mixture-of-Experts checkpoint; check that the folder holds all of its files.",
            )
        return layers, dropped

    def _is_of_router(self, ref: TensorRef, layer: int, stack: str) -> bool:
        """Return True if a scale is the router's (gemma4), not the second scale of NVFP4 weights.

        A scale that could be either one, because llama.cpp multiplied both, is refused: it is neither.
        """
        weight = self.tensors.get(f"blk.{layer}.{stack}.weight")
        is_second = weight is not None and weight.dtype == "NVFP4"
        parent = self._layer_name(layer).rpartition(".")[0]
        has_router = (
            stack == "ffn_down_exps" and f"{parent}.router.per_expert_scale" in self.safetensors
        )
        if has_router == is_second:
            raise _not_understood(ref)
        return has_router

    def _add_part(self, layer: GgufLayer, stack: str, part: str, ref: TensorRef) -> None:
        roles = STACKS[stack]
        for index, role in enumerate(roles):
            parts = layer.setdefault(role, {})
            if part in parts or role not in self._family.projections:
                what = "A layer of experts has a stack too many."
                found = (
                    f"also {parts[part].ref.name}"
                    if part in parts
                    else ", ".join(self._family.projections)
                )
                raise InputError(
                    what,
                    where=ref.name,
                    expected="one stack per projection",
                    found=found,
                    remedy=COPY_AGAIN,
                )
            parts[part] = GgufPart(ref, View(index=index, count=len(roles)))

    # --- checks ----------------------------------------------------------------------------------------------

    def _check_routers(self, layers: Collection[str]) -> None:
        """Check that every layer with a router has its experts: the files may not omit any."""
        found = {decoder_layer(layer) for layer in layers}
        for name, ref in self.safetensors.items():
            place, text = decoder_layer(name), self._text
            if place in found or len(ref.shape) != 2 or not is_router(name):
                continue
            count = (
                config_sizes(self._family, int(place.split(".")[-2]), text).num_experts
                if place
                else None
            )
            if count and ref.shape[0] == count[1]:
                raise InputError(
                    "The GGUF files lack the experts of a layer.",
                    where=name,
                    expected="stacks of experts for every layer with a router",
                    found=f"none for {place.rstrip('.')}",
                    remedy="Get GGUF files with this layer (many leave out MTP layers), or take all of its tensors out "
                    "of the safetensors.",
                )

    # --- layers ----------------------------------------------------------------------------------------------

    def _layer_name(self, layer: int) -> str:
        """Return the path of a layer's experts: the MoE module of other tensors in the safetensors."""
        for template in self._family.paths:
            number = self._mtp_index(layer) if template.startswith(_MTP_PREFIXES) else layer
            name = template.format(layer=number)
            if number >= 0 and self._modules.intersection((name, name.rpartition(".")[0])):
                return name
        raise InputError(
            "The safetensors lack the other tensors of an MoE layer, such as its router.",
            where=f"blk.{layer}.ffn_down_exps.weight",
            expected=f"tensors next to {self._family.modules[0].format(layer=layer)}",
            remedy="Put all of the original model's tensors but the experts into the folder.",
        )

    def _mtp_index(self, layer: int) -> int:
        """Return the index among separately numbered modules; -1 for a decoder layer."""
        found = (self._text.get(key) for key in self._family.num_layers_keys)
        num_layers = next((value for value in found if isinstance(value, int)), layer + 1)
        return max(layer - num_layers, -1)

    def _stand_ins(self, name: str, layer: GgufLayer) -> dict[str, TensorRef]:
        """Return placeholder tensors for the layer's experts, one set per expert."""
        refs = {}
        for role, word in self._family.projections.items():
            weight = layer[role]["weight"]
            count, rows, columns = weight.ref.shape
            shape = (rows // weight.view.count, columns)
            for expert in range(count):
                full = f"{name}.{expert}.{word}.weight"
                refs[full] = TensorRef(full, "F32", shape, weight.ref.file, 0, 0)
        return refs


def _with_stacks(layer: MoeLayer, gguf: GgufLayer) -> MoeLayer:
    """Return a mapped layer with the stacks instead of the placeholder tensors."""
    parts = {
        role: {
            part: TensorSlice(one.ref.name, one.ref.dtype, one.ref.shape, one.view)
            for part, one in gguf[role].items()
        }
        for role in layer.roles
    }
    types = dict.fromkeys(parts[role]["weight"].dtype for role in layer.roles)
    sources = tuple(
        {role: _shares(gguf[role], expert, layer.shape(role)) for role in layer.roles}
        for expert in range(layer.num_experts)
    )
    own_format = SourceFormat(f"gguf {'+'.join(types)}", GGUF)
    return replace(
        layer, format=own_format, dtype=parts["w2"]["weight"].dtype, slices=parts, sources=sources
    )


def _shares(
    parts: Mapping[str, GgufPart], expert: int, shape: tuple[int, int]
) -> dict[str, TensorRef]:
    shapes: dict[str, tuple[int, ...]] = {"weight": shape, "bias": shape[:1], "scale_2": ()}
    return {part: one.share(expert, shapes[part]) for part, one in parts.items()}


def _not_understood(ref: TensorRef) -> InputError:
    return InputError(
        "A tensor of a GGUF file looks like experts and is not understood.",
        where=ref.name,
        expected=f"blk.N.{{{','.join(STACKS)}}} with weight, bias, or the scale of NVFP4 weights",
        found=f"{ref.dtype} {list(ref.shape)}",
        remedy="Convert the model to GGUF with a current llama.cpp, or convert it from safetensors.",
    )
