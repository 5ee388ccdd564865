"""A model of transformers whose weights are read from a source one stage at a time, by its own loading code.

A stage is a decoder layer, or another module that owns parameters (embedding, final norm, head). A stage's weights
exist from `load` to `drop`. At other times placeholders stand for them: one NaN on the model's device, with the
weights' shape and no memory. So code that asks a weight for its device gets the right answer, and use of a weight at a
wrong time shows.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hqconv.calibration.forward_pass import stop_at
from hqconv.calibration.transformers_model import cannot_fill, config_of, model_class, quantizer_of
from hqconv.errors import RequestError, first_few, plural
from hqconv.models.moe_layer import MoeLayer, TensorSlice
from hqconv.models.source_protocol import Source, read_tensor
from hqconv.quantization.value_checks import not_finite
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef

_ROOT = ""
_WHOLE_CODES = ("F8_E4M3", "F8_E5M2")  # whose tensors have the shape of the decoded ones
_BLOCKS = "_blocks"  # of mxfp4: [E, out, in / 32, 16], which transformers decodes to [E, in, out]
_LOADING_FACTOR = (
    3.25  # memory for a stage while transformers stacks and joins its experts: 3.0 was measured
)

Expert = Mapping[
    str, torch.Tensor
]  # `w1` (if gated), `w3` [I, H], `w2` [H, I]; `b1`, `b3`, `b2` if there are biases


def experts_modules(model: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Return layer, path and module of all routed experts; a module inside another belongs to it."""
    found: list[tuple[int, str, nn.Module]] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for _, outer, _ in found)
        is_routed = path.rpartition(".")[2] == "experts" or type(module).__name__.endswith(
            "Experts"
        )
        if is_inside or not is_routed or "shared" in path.rpartition(".")[2]:
            continue
        layer = re.search(r"\.(\d+)\.", f".{path}.")
        if layer is None:
            raise RequestError(
                "The experts are of no layer.", where=path, expected="a number in the path"
            )
        found.append((int(layer[1]), path, module))
    return found


class _StoredTensor:
    """A tensor of the source that is read when transformers takes its values."""

    def __init__(self, source: Source, ref: TensorRef) -> None:
        self._source, self._ref = source, ref
        self.dtype, self.shape = torch_dtype(ref.dtype), torch.Size(ref.shape)

    def __getitem__(self, _: Any) -> torch.Tensor:
        """Return all values on the CPU."""
        return read_tensor(self._source, self._ref)

    def get_dtype(self) -> str:
        """Return the dtype's name in safetensors."""
        return self._ref.dtype

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._ref.shape)


class StreamedModel:
    """A model of transformers on a device, without weights but those of loaded stages.

    model: the module, in evaluation mode. place: of the source. dtype: of the computation. stages: name → module.
    experts: layer number → path and module of its routed experts. head: name of the stage that gives the logits.
    """

    def __init__(
        self,
        transformers: Any,
        source: Source,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the model on the meta device, by the config in `folder` (`folder_of`). Raises transformers' errors."""
        from transformers import core_model_loading, modeling_utils
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._source, self.place, self.dtype, self.device = source, str(source.place), dtype, device
        self._loading = core_model_loading
        config = config_of(transformers, folder)
        quantizer = quantizer_of(source, config)
        self.model = _make_model(transformers, source, config, dtype, quantizer, device)
        self._config = modeling_utils.LoadStateDictConfig(
            device_map={"": device},
            dtype=dtype,
            dtype_plan=self.model._get_dtype_plan(dtype),
            hf_quantizer=quantizer,
            weight_mapping=get_model_conversion_mapping(self.model, None, quantizer),
        )
        self.experts = self._experts()
        self.stages = self._stages()
        self.head = next(
            (
                name
                for name, one in self.stages.items()
                if one is self.model.get_output_embeddings()
            ),
            "",
        )
        self._meta = self.model.state_dict()
        self._shapes = {name: value.shape for name, value in self._meta.items()}
        dtypes = {value.dtype for value in self._meta.values()}
        nothing = {
            one: torch.full((), math.nan if one.is_floating_point else 0, dtype=one, device=device)
            for one in dtypes
        }
        self._nothing = {name: nothing[value.dtype] for name, value in self._meta.items()}
        self._owned: dict[str, set[str]] = defaultdict(
            set
        )  # stage → its parameters; "" → those of no stage
        for name in self._shapes:
            self._owned[self._stage_of(name)].add(name)
        kinds = core_model_loading.WeightRenaming, core_model_loading.WeightConverter
        self._names = [
            [one for one in self._config.weight_mapping if isinstance(one, kind)] for kind in kinds
        ]
        self._tensors = self._tensors_by_parameter()
        self._check_experts()
        for name, stage in self.stages.items():
            stop_at(name, stage)
        self._load_resident()

    # --- the parts of the model

    def _experts(self) -> dict[int, tuple[str, nn.Module]]:
        found = experts_modules(self.model)
        if not found:
            raise RequestError(
                "The model of transformers has no routed experts.", where=str(self._source.root)
            )
        experts = {layer: (path, module) for layer, path, module in found}
        if len(experts) < len(found):
            raise RequestError(
                "The model of transformers has several modules of routed experts in a layer.",
                where=str(self._source.place),
                expected="one decoder",
                found=first_few([path for _, path, _ in found]),
            )
        return experts

    def _check_experts(self) -> None:
        """Raise RequestError where the source has no tensors for the parameters of some experts."""
        for path, module in self.experts.values():
            if not any(f"{path}.{name}" in self._tensors for name, _ in module.named_parameters()):
                raise RequestError(
                    "The experts are not stored as transformers reads them.",
                    where=f"{self._source.place}: {path}",
                    expected="a safetensors checkpoint of the publisher's",
                    found="no tensors of these experts: GGUF files and artifacts have others",
                    remedy="Use the checkpoint that the source was made from.",
                )

    def _stages(self) -> dict[str, nn.Module]:
        """Return the decoder layers, and every other module that owns parameters and contains no stage."""
        lists = {re.sub(r"\.\d+\..*", "", path) for path, _ in self.experts.values()}
        layers = {
            f"{path}.{number}": layer
            for path in sorted(lists)
            for number, layer in self.model.get_submodule(path).named_children()
        }
        found = dict(
            layers
        )  # a stage is never inside another one: its weights would be loaded too late
        for path, module in self.model.named_modules():
            is_inside = any(path == stage or path.startswith(f"{stage}.") for stage in found)
            contains = any(layer.startswith(f"{path}.") or path == _ROOT for layer in layers)
            if not is_inside and not contains and _owned(module):
                found[path] = module
        return found

    def stage_bytes(self, name: str) -> int:
        """Return the size of a stage's weights in the dtype of the computation."""
        num_bytes: int = (
            sum(math.prod(self._shapes[one]) for one in self._owned[name]) * self.dtype.itemsize
        )
        return num_bytes

    def check_memory(
        self,
        streams: Sequence[Sequence[torch.Tensor]],
        limit: int,
        where: str,
        *,
        num_kept: int = 0,
        ends: bool = False,
    ) -> int:
        """Return the memory that streams of token ids [B, T] need, in bytes. Raises RequestError for more than `limit`.

        where: the limit's name. num_kept: layers whose inputs are kept, of the first stream. ends: with logits.
        """
        width, config = self.dtype.itemsize, self.model.config.get_text_config()
        batches = [ids for stream in streams for ids in stream]
        num_tokens = sum(ids.numel() for ids in batches)
        num_states = num_tokens + num_kept * sum(ids.numel() for ids in streams[0])
        hidden = width * (
            num_states * config.hidden_size + sum(ids.size(1) ** 2 for ids in batches)
        )
        largest = max(map(self.stage_bytes, self.stages))
        logits = (
            ends * len(streams) * max(ids.numel() for ids in batches) * config.vocab_size * width
        )
        need = int(hidden + max(_LOADING_FACTOR * largest, largest + logits))
        if need > limit:
            parts = (
                f"hidden states of {plural(num_tokens, 'token')} {_gib(hidden)}, the largest layer"
            )
            raise RequestError(
                "The run of the model does not fit into the memory limit.",
                where=where,
                expected=f"{_gib(need)}: {parts} {_gib(_LOADING_FACTOR * largest)}, logits {_gib(logits)}",
                found=_gib(limit),
                remedy="Allow more with --max-memory, or take fewer tokens or a smaller dtype.",
            )
        return need

    def _stage_of(self, parameter: str) -> str:
        """Return the innermost stage that owns a parameter; "" for one that is resident."""
        words = parameter.split(".")
        paths = (".".join(words[:count]) for count in range(len(words) - 1, 0, -1))
        return next((path for path in paths if path in self.stages), _ROOT)

    def _tensors_by_parameter(self) -> Mapping[str, list[str]]:
        """Return parameter → the source's tensors that transformers takes for it."""
        found = defaultdict(list)
        for name in self._source.tensors:
            if (parameter := self._parameter_of(name)) in self._shapes:
                found[parameter].append(name)
        return found

    def _parameter_of(self, name: str) -> str:
        """Return what transformers calls a tensor of a checkpoint: a parameter that takes it, or no parameter."""
        prefix = self.model.base_model_prefix
        renamed, _ = self._loading.rename_source_key(name, *self._names, prefix, self._meta)
        return name if renamed not in self._shapes and name in self._shapes else str(renamed)

    # --- weights

    def _load_resident(self) -> None:
        """Load the parameters that belong to no stage, and compute the buffers that no checkpoint has."""
        for value in (*self.model.parameters(), *self.model.buffers()):
            value._is_hf_initialized = True
        for name, buffer in [*self.model.named_non_persistent_buffers()]:
            _set(self.model, name, torch.empty_like(buffer, device=self.device))
        self.model.initialize_weights()
        for name in self._shapes:
            self._drop(name)
        self._load(self._owned[_ROOT])

    def load(self, stage: str, others: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Read a stage's weights to the device. Raises InputError where the source lacks some, or has other shapes.

        others: tensors by name (`stored_tensors`), in place of all that the source has for their modules.
        """
        self._load(self._owned[stage], others)

    def widen(self, stage: str) -> None:
        """Turn a stage's weights to float32, for one use."""
        for name in self._owned[stage]:
            value = self.model.get_parameter_or_buffer(name)
            if value.is_floating_point():
                _set(self.model, name, value.data.float())

    def use_float32(self) -> None:
        """Compute in float32 from now on; no stage may be loaded."""
        if self.dtype == torch.float32:
            return
        self.dtype = torch.float32
        plan = self.model._get_dtype_plan(self.dtype)
        self._config = replace(self._config, dtype=self.dtype, dtype_plan=plan)
        wide = torch.full((), math.nan, device=self.device)
        self._nothing = {
            name: wide if one.is_floating_point() else one for name, one in self._nothing.items()
        }
        for name in self._shapes:
            self._drop(name)
        self._load(self._owned[_ROOT])

    def drop(self, stage: str) -> None:
        """Free a stage's weights."""
        for name in self._owned[stage]:
            self._drop(name)

    def check_finite(self, stage: str) -> None:
        """Raise InputError where a tensor of the source for a stage's weights is not finite."""
        for name in (
            name
            for parameter in sorted(self._owned[stage])
            for name in self._tensors.get(parameter, ())
        ):
            values = read_tensor(self._source, self._source.tensors[name])
            if values.is_floating_point() and not bool(values.float().isfinite().all()):
                raise not_finite(name)

    def _drop(self, name: str) -> None:
        _set(self.model, name, self._nothing[name].expand(self._shapes[name]))

    def _is_dropped(self, name: str) -> bool:
        value = self.model.get_parameter_or_buffer(name)
        return bool(value.data_ptr() == self._nothing[name].data_ptr())

    def _load(
        self, parameters: set[str], others: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        """Load parameters by transformers' conversion, as `load`; a tied one has the values of its twin."""
        if not parameters:
            return
        tied = {name: twin for name in parameters if (twin := self._twin(name)) is not None}
        wanted = (parameters - tied.keys()) | {*tied.values()}
        names = sorted(name for parameter in wanted for name in self._tensors.get(parameter, ()))
        modules = {_module(name) for name in others}
        tensors: dict[str, Any] = {
            name: _StoredTensor(self._source, self._source.tensors[name])
            for name in names
            if _module(name) not in modules
        }
        tensors |= others
        unknown = next((name for name in others if self._parameter_of(name) not in wanted), None)
        if unknown is not None:
            raise RequestError(
                "The transformers library has other names for this model's experts.",
                where=f"tensor {unknown}",
                remedy="This model cannot be evaluated.",
            )
        info, _ = self._loading.convert_and_load_state_dict_in_model(
            self.model, tensors, self._config
        )
        self._check(info, wanted)
        for name in wanted:  # a decoded or passed-through weight may have the dtype of the source
            value = self.model.get_parameter_or_buffer(name)
            if value.is_floating_point() and value.dtype not in (self.dtype, torch.float32):
                _set(self.model, name, value.data.to(self.dtype))
        for name, twin in tied.items():
            _set(self.model, name, self.model.get_parameter_or_buffer(twin).data)
        for twin in {*tied.values()} - parameters:
            self._drop(twin)

    def _twin(self, name: str) -> str | None:
        """Return the parameter that a parameter without tensors is tied to; None for any other."""
        if name in self._tensors:
            return None
        ties = self.model.all_tied_weights_keys
        twins = [
            ties.get(name),
            *(target for target, of in ties.items() if of in (name, ties.get(name))),
        ]
        return next((twin for twin in twins if twin is not None and twin in self._tensors), None)

    def _check(self, info: Any, wanted: set[str]) -> None:
        """Raise InputError unless every wanted parameter has its values."""
        ignored = [re.compile(one) for one in self.model._keys_to_ignore_on_load_missing or ()]
        missing = sorted(
            name
            for name in wanted
            if self._is_dropped(name) and not any(one.search(name) for one in ignored)
        )
        shapes = [
            f"{name}: {list(found)} instead of {list(expected)}"
            for name, found, expected in info.mismatched_keys
        ]
        errors = [*shapes, *map(str, info.conversion_errors.values())]
        if missing or errors:
            raise cannot_fill(self._source, missing, first_few(errors))


def stored_tensors(
    layer: MoeLayer, experts: Iterable[Expert], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a layer's experts as a checkpoint without quantization stores them: its names, orders and stacks."""
    places = {
        role if part == "weight" else f"b{role[1:]}": _plain(layer, role, part)
        for role in layer.roles
        for part in ("weight", "bias")
        if part in layer.slices[role]
    }
    found: dict[str, torch.Tensor] = {}
    for expert, values in enumerate(experts):
        for key, place in places.items():
            name = place.template.format(expert=expert)
            if name not in found:
                found[name] = torch.empty(place.shape, dtype=dtype, device=device)
            share = found[name]
            if place.is_stacked:
                share = share.view(layer.num_experts, *place.share(layer.num_experts))[expert]
            target = place.view.of(share)
            target.copy_(values[key].view(target.shape))
    return found


def _plain(layer: MoeLayer, role: str, part: str) -> TensorSlice:
    """Return the place of a projection's weight or bias where weights are not quantized.

    Raises RequestError for stacks of a format whose names are not known.
    """
    stored = layer.slices[role][part]
    if part == "bias" or layer.format.is_float:
        return stored
    template, view = stored.template, stored.view
    if not stored.is_stacked:
        template = f"{template.rpartition('.')[0]}.weight"
    elif template.endswith(_BLOCKS):
        template, view = template.removesuffix(_BLOCKS), replace(view, transposed=True)
    elif stored.dtype not in _WHOLE_CODES:
        raise RequestError(
            "The transformers library's name of a stack of experts is not known for this format.",
            where=f"tensor {template}",
            found=layer.format.describe(),
            remedy="Use the 16-bit model that the source was made from.",
        )
    rows, columns = layer.shape(role)
    shape: tuple[int, ...] = (rows * view.count, columns)
    shape = shape[::-1] if view.transposed else shape
    if stored.is_flat:
        shape = (layer.num_experts * shape[0], *shape[1:])
    elif stored.is_stacked:
        shape = (layer.num_experts, *shape)
    return TensorSlice(template, stored.dtype, shape, view, stored.is_flat)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _owned(module: nn.Module) -> bool:
    """Return whether a module itself has parameters, or buffers that a checkpoint holds."""
    return bool(
        {*module._parameters, *(module._buffers.keys() - module._non_persistent_buffers_set)}
    )


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, word = name.rpartition(".")
    module = model.get_submodule(path)
    is_parameter = word in module._parameters
    setattr(module, word, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _make_model(
    transformers: Any,
    source: Source,
    config: Any,
    dtype: torch.dtype,
    quantizer: Any,
    device: torch.device,
) -> Any:
    """Return the model without weights, with experts that run in plain products."""
    cls = model_class(transformers, source, config)
    config = copy.deepcopy(config)
    for one in (config, *(getattr(config, key) for key in config.sub_configs)):
        if one is not None:
            one.dtype = dtype
            one._experts_implementation = "eager"
    with ExitStack() as stack:
        for context in cls.get_init_context(dtype, quantizer is not None, False, None):
            stack.enter_context(context)
        model = cls(config)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model, dtype=dtype, device_map={"": device}, checkpoint_files=None
            )
    for module in model.modules():
        found = getattr(module, "config", None)
        if found is not None:
            found._experts_implementation = "eager"
    return model.eval()
