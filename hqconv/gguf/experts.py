"""Stacks of experts in a GGUF file: their projections, and checks of their sizes.

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
from hqconv.gguf.header import COPY_AGAIN, wrong_shape
from hqconv.models.config_facts import ConfigSizes, config_sizes
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.families import BY_MODEL_TYPE, INDEX, Family
from hqconv.models.moe_layer import MoeLayer, TensorSlice, View
from hqconv.models.tensor_names import decoder_layer, is_router
from hqconv.schemas.artifact_names import text_config
from hqconv.schemas.tensors import FLOATS, TensorRef

STACKS = {
    "ffn_gate_exps": ("w1",),
    "ffn_up_exps": ("w3",),
    "ffn_down_exps": ("w2",),
    "ffn_gate_up_exps": ("w1", "w3"),
}
_CONTENTS = {"weight": "weight", "bias": "bias", "scale": "scale_2"}
_EXPERT = re.compile(rf"blk\.({INDEX})\.({'|'.join(STACKS)})\.(weight|bias|scale|input_scale)")
# Other kinds of experts, and tensors of single experts, which files of 2023 have.
_LOOKS_LIKE_EXPERT = re.compile(r"exps(?:\.|_|$)|\.ffn_(?:gate|up|down)\.[0-9]+\.")
_MTP_PREFIXES = ("mtp.", "language_model.mtp.")
_NOT_NEEDED = "the safetensors' tensor is used"
_ACTIVATION_SCALE = "activation scale, not used by 16-bit activations"


@dataclass(frozen=True)
class _Stack:
    """A tensor with weights, biases or second scales of all experts of a layer; view: of one of its projections."""

    ref: TensorRef
    view: View

    def share(self, expert: int, shape: tuple[int, ...]) -> TensorRef:
        """Return one expert's byte range with the given shape; () is a scalar for all projections of the tensor."""
        num_bytes = self.ref.num_bytes // self.ref.shape[0]
        offset = self.ref.offset_bytes + expert * num_bytes
        if shape:
            num_bytes //= self.view.count
            offset += self.view.index * num_bytes
        return self.ref._replace(shape=shape, offset_bytes=offset, num_bytes=num_bytes)


_Layer = dict[str, dict[str, _Stack]]  # role → weight, bias or scale_2 → stack


def is_expert(tensor: str) -> bool:
    """Return True for the name of a tensor in a GGUF file that is, or looks like, one of experts."""
    return _EXPERT.fullmatch(tensor) is not None or _LOOKS_LIKE_EXPERT.search(tensor) is not None


@dataclass(frozen=True)
class ExpertMapper:
    """Maps the MoE layers in GGUF files, and every tensor to its use.

    tensors: of the GGUF files, by their own names; the refs have unique names. beside: the model's other tensors, by
    their published names.
    """

    tensors: Mapping[str, TensorRef]
    beside: Mapping[str, TensorRef]
    config: Mapping[str, Any]

    def map(self) -> ExpertMap:
        """Map layers and tensors.

        Names and activations follow the rules for a checkpoint that has experts as tensors: placeholder tensors replace
        the stacks for these rules. Raises RequestError for a model_type without a row and files without experts;
        InputError, naming the tensor, for experts that are incomplete, of an unknown layout, or not of the config's
        sizes.
        """
        layers, dropped = self._layers()
        for index, layer in layers.items():
            _check_layer(index, layer, self._family, config_sizes(self._family, index, self._text))
        indices = {self._layer_name(index): index for index in sorted(layers)}
        self._check_routers(indices)
        tensors = dict(self.beside)
        for name, index in indices.items():
            tensors |= self._placeholders(name, layers[index])
        mapped = map_experts(tensors, self.config)
        found = {layer.name: layer.index for layer in mapped.layers}
        assert found == indices, "a layer was mapped to another index"
        mapped_layers = tuple(
            _with_stacks(layer, layers[indices[layer.name]]) for layer in mapped.layers
        )
        return ExpertMap(
            family=mapped.family,
            chosen_because=f"{mapped.chosen_because}; experts from GGUF files",
            layers=mapped_layers,
            converted={
                name: layer.name for layer in mapped_layers for name in layer.tensor_names()
            },
            copied=mapped.copied,
            dropped=mapped.dropped | dropped,
        )

    @cached_property
    def _text(self) -> Mapping[str, object]:
        return text_config(self.config)

    @cached_property
    def _family(self) -> Family:
        types = [str(config.get("model_type")) for config in (self.config, self._text)]
        for model_type in types:
            if model_type in BY_MODEL_TYPE:
                return BY_MODEL_TYPE[model_type]
        raise RequestError(
            "Experts in GGUF files can be named for known families only.",
            where="config.json: model_type",
            found=types[0],
            remedy="Convert from safetensors, or add a row to hqconv/models/families.py.",
        )

    @cached_property
    def _modules(self) -> frozenset[str]:
        """Return the paths of all modules with tensors beside the experts."""
        modules = set()
        for name in self.beside:
            module = name.rpartition(".")[0]
            while module and module not in modules:
                modules.add(module)
                module = module.rpartition(".")[0]
        return frozenset(modules)

    # --- which tensor is what --------------------------------------------------------------------------------

    def _layers(self) -> tuple[dict[int, _Layer], dict[str, str]]:
        """Collect the stacks of every layer, and the dropped tensors of the GGUF files with the reasons."""
        layers: dict[int, _Layer] = {}
        dropped: dict[str, str] = {}
        for tensor, ref in self.tensors.items():
            match = _EXPERT.fullmatch(tensor)
            if match is None:
                if is_expert(tensor):
                    raise _not_understood(ref)
                dropped[ref.name] = _NOT_NEEDED
                continue
            index = int(match[1])
            stack = match[2]
            suffix = match[3]
            if suffix == "input_scale":
                dropped[ref.name] = _ACTIVATION_SCALE
            elif suffix == "scale" and self._is_of_router(ref, index, stack):
                dropped[ref.name] = _NOT_NEEDED
            else:
                self._add_stack(layers.setdefault(index, {}), stack, _CONTENTS[suffix], ref)
        if not layers:
            raise RequestError(
                "Neither the safetensors nor the GGUF files hold experts: nothing to convert.",
                expected="tensors such as blk.0.ffn_down_exps.weight",
                found=f"{plural(len(self.tensors), 'tensor')} in GGUF files, none of an expert",
                remedy="Convert a Mixture-of-Experts checkpoint; check that the folder holds all of its files.",
            )
        return layers, dropped

    def _is_of_router(self, ref: TensorRef, index: int, stack: str) -> bool:
        """Return True if a scale is the router's (gemma4), not the second scale of NVFP4 weights.

        A scale that could be either one, because llama.cpp multiplied both, is refused: it is neither.
        """
        weight = self.tensors.get(f"blk.{index}.{stack}.weight")
        is_second = weight is not None and weight.dtype == "NVFP4"
        parent = self._layer_name(index).rpartition(".")[0]
        has_router = stack == "ffn_down_exps" and f"{parent}.router.per_expert_scale" in self.beside
        if has_router == is_second:
            raise _not_understood(ref)
        return has_router

    def _add_stack(self, layer: _Layer, stack: str, content: str, ref: TensorRef) -> None:
        roles = STACKS[stack]
        for index, role in enumerate(roles):
            stacks = layer.setdefault(role, {})
            if content in stacks or role not in self._family.projections:
                raise InputError(
                    "A layer of experts has a stack too many.",
                    where=ref.name,
                    expected="one stack for each of " + ", ".join(self._family.projections),
                    found=stacks[content].ref.name if content in stacks else ref.name,
                    remedy=COPY_AGAIN,
                )
            stacks[content] = _Stack(ref, View(index=index, count=len(roles)))

    def _check_routers(self, layers: Collection[str]) -> None:
        """Check that every layer with a router has its experts: the files may not omit any."""
        with_experts = {decoder_layer(layer) for layer in layers}
        for name, ref in self.beside.items():
            path = decoder_layer(name)
            if not path or path in with_experts or len(ref.shape) != 2 or not is_router(name):
                continue
            sizes = config_sizes(self._family, int(path.split(".")[-2]), self._text)
            if sizes.num_experts and ref.shape[0] == sizes.num_experts[1]:
                raise InputError(
                    "The GGUF files lack the experts of a layer.",
                    where=name,
                    expected="stacks of experts for every layer with a router",
                    found=f"none for {path.rstrip('.')}",
                    remedy="Get GGUF files with this layer (many leave out MTP layers), or take all of its tensors out "
                    "of the safetensors.",
                )

    # --- layers ----------------------------------------------------------------------------------------------

    def _layer_name(self, layer: int) -> str:
        """Return the path of a layer's experts: the MoE module of other tensors beside them."""
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
        values = [self._text.get(key) for key in self._family.num_layers_keys]
        num_layers = next((value for value in values if isinstance(value, int)), layer + 1)
        return max(layer - num_layers, -1)

    def _placeholders(self, name: str, layer: _Layer) -> dict[str, TensorRef]:
        """Return placeholder tensors for the layer's experts, one set per expert."""
        refs = {}
        for role, projection in self._family.projections.items():
            weight = layer[role]["weight"]
            num_experts, num_rows, num_columns = weight.ref.shape
            shape = (num_rows // weight.view.count, num_columns)
            for expert in range(num_experts):
                full = f"{name}.{expert}.{projection}.weight"
                refs[full] = TensorRef(full, "F32", shape, weight.ref.file, 0, 0)
        return refs


def _check_layer(index: int, layer: _Layer, family: Family, sizes: ConfigSizes) -> None:
    """Check that every projection is present, and every stack has the size in the config. Raises InputError."""
    has_bias = any("bias" in stacks for stacks in layer.values())
    for role in family.projections:
        for content in ("weight", "bias") if has_bias else ("weight",):
            if content not in layer.get(role, {}):
                name = next(name for name, roles in STACKS.items() if role in roles)
                raise InputError(
                    "A layer of experts lacks a tensor.",
                    where=f"blk.{index}.{name}.{content}",
                    expected="present",
                    found="no such tensor",
                    remedy=COPY_AGAIN,
                )
    down = layer["w2"]["weight"].ref
    if len(down.shape) != 3:
        raise wrong_shape(down.name, "[experts, out, in]", down.shape)
    num_experts = sizes.num_experts[1] if sizes.num_experts else down.shape[0]
    hidden = sizes.hidden[1] if sizes.hidden else down.shape[1]
    intermediate = sizes.intermediate[1] if sizes.intermediate else down.shape[2]
    for role, stacks in layer.items():
        num_rows, num_columns = (hidden, intermediate) if role == "w2" else (intermediate, hidden)
        for content, stack in stacks.items():
            shape = (num_experts, num_rows * stack.view.count, num_columns)
            num_dims = {"weight": 3, "bias": 2, "scale_2": 1}[content]
            if stack.ref.shape != shape[:num_dims] or not all(stack.ref.shape):
                known = [sizes.num_experts, sizes.hidden, sizes.intermediate]
                keys = ", ".join(size[0] for size in known if size)
                expected = f"{list(shape[:num_dims])} ({keys} in config.json)"
                raise wrong_shape(stack.ref.name, expected, stack.ref.shape)
            if content != "weight" and stack.ref.dtype not in FLOATS:
                raise InputError(
                    "A bias or scale has the wrong type.",
                    where=stack.ref.name,
                    expected=" or ".join(FLOATS),
                    found=stack.ref.dtype,
                    remedy=COPY_AGAIN,
                )


def _with_stacks(layer: MoeLayer, stacks: _Layer) -> MoeLayer:
    """Return a mapped layer with the stacks instead of the placeholder tensors."""
    slices = {
        role: {
            content: TensorSlice(stack.ref.name, stack.ref.dtype, stack.ref.shape, stack.view)
            for content, stack in stacks[role].items()
        }
        for role in layer.roles
    }
    types = dict.fromkeys(slices[role]["weight"].dtype for role in layer.roles)
    return replace(
        layer,
        format=SourceFormat(f"gguf {'+'.join(types)}", GGUF),
        dtype=slices["w2"]["weight"].dtype,
        slices=slices,
        sources=tuple(
            {role: _shares(stacks[role], expert, layer.shape(role)) for role in layer.roles}
            for expert in range(layer.num_experts)
        ),
    )


def _shares(
    stacks: Mapping[str, _Stack], expert: int, shape: tuple[int, int]
) -> dict[str, TensorRef]:
    """Return an expert's byte ranges of a projection with the given shape."""
    shapes = {"weight": shape, "bias": shape[:1], "scale_2": ()}
    return {content: stack.share(expert, shapes[content]) for content, stack in stacks.items()}


def _not_understood(ref: TensorRef) -> InputError:
    return InputError(
        "A tensor of a GGUF file looks like experts and is not understood.",
        where=ref.name,
        expected=f"blk.N.{{{','.join(STACKS)}}} with weight, bias, or the scale of NVFP4 weights",
        found=f"{ref.dtype} {list(ref.shape)}",
        remedy="Convert the model to GGUF with a current llama.cpp, or convert it from safetensors.",
    )
