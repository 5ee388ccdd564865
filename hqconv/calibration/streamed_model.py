"""A model of transformers whose weights are read from a source one stage at a time, and forward passes through it.

A stage is a decoder layer, or another module that owns parameters (embedding, final norm, head). A stage's weights
exist from `load` to `drop`. At other times placeholders stand for them: one NaN on the model's device, with the
weights' shape and no memory. So code that asks a weight for its device gets the right answer, and use of a weight at a
wrong time shows.

Forward passes stop at stages, so that many passes go through one stage while its weights are there. A pass runs in a
thread of its own, and does not call a stage: it hands the call to the thread that owns the pass, and waits for the
result. Only one thread computes at any time.
"""

from __future__ import annotations

import copy
import ctypes
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hqconv.calibration.transformers_model import config_of, model_class, quantizer_of
from hqconv.errors import InputError, RequestError, first_few, plural
from hqconv.models.moe_layer import MoeLayer, TensorSlice
from hqconv.models.source_protocol import Source, read_tensor
from hqconv.quantization.coded_matrix import not_finite
from hqconv.schemas.tensors import TensorRef, torch_dtype

_ROOT = ""
_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})
_WHOLE_CODES = ("F8_E4M3", "F8_E5M2")  # whose tensors have the shape of the decoded ones
_BLOCKS = "_blocks"  # of mxfp4: [E, out, in / 32, 16], which transformers decodes to [E, in, out]
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h
_PINNED_BYTES = 1 << 26  # of a tensor at most: torch keeps pinned memory, in powers of two
_LARGE_BYTES = 1 << 20  # of memory that goes back to the system as soon as it is free
_LOGITS_OF_GRADIENTS = 6  # of a pass at a time, in float32, with probabilities and gradients
_LOADING_FACTOR = 3.25  # memory of a stage while transformers joins its experts: 3.0 was measured

# `w1` (if gated), `w3` [I, H], `w2` [H, I]; `b1`, `b3`, `b2` if there are biases
Expert = Mapping[str, torch.Tensor]


class _StoredTensor:
    """A tensor of the source that is read when transformers takes its values."""

    def __init__(self, source: Source, ref: TensorRef, device: torch.device) -> None:
        self._source, self._ref, self._device = source, ref, device
        self.dtype, self.shape = torch_dtype(ref.dtype), torch.Size(ref.shape)

    def __getitem__(self, _: Any) -> torch.Tensor:
        """Return all values on the CPU."""
        is_pinned = self._device.type == "cuda" and self._ref.num_bytes <= _PINNED_BYTES
        return read_tensor(self._source, self._ref, pin_memory=is_pinned)

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

        _share_free_memory()
        self._source, self.place, self.dtype, self.device = source, str(source.place), dtype, device
        self._loading = core_model_loading
        config = config_of(transformers, folder)
        quantizer = quantizer_of(source, config)
        self.model = _make_model(transformers, source, config, dtype, quantizer, device)
        mapping = get_model_conversion_mapping(self.model, None, quantizer)
        self._config = modeling_utils.LoadStateDictConfig(
            device_map={"": device},
            dtype=dtype,
            dtype_plan=self.model._get_dtype_plan(dtype),
            hf_quantizer=quantizer,
            weight_mapping=mapping,
        )
        self.experts = self._routed_experts()
        self.stages = self._find_stages()
        head = self.model.get_output_embeddings()
        self.head = next((name for name, module in self.stages.items() if module is head), "")
        self._meta = self.model.state_dict()
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._owned: dict[str, set[str]] = defaultdict(set)  # stage → parameters; "": of no stage
        for name in self._meta:
            self._owned[self._stage_of(name)].add(name)
        self._tensors = self._tensors_by_parameter(mapping)
        self._check_experts()
        for name, stage in self.stages.items():
            _stop_at(name, stage)
        self._load_resident()

    # --- the modules of the model

    def _routed_experts(self) -> dict[int, tuple[str, nn.Module]]:
        """Return layer → path and module of its routed experts; a module inside another belongs to it."""
        experts: dict[int, tuple[str, nn.Module]] = {}
        for path, module in self.model.named_modules():
            name = path.rpartition(".")[2]
            layer = re.search(r"\.(\d+)\.", f".{path}.")
            is_routed = name == "experts" or type(module).__name__.endswith("Experts")
            is_inside = any(path.startswith(f"{outer}.") for outer, _ in experts.values())
            if layer is None or not is_routed or is_inside or "shared" in name:
                continue
            if int(layer[1]) in experts:
                raise RequestError(
                    "The model of transformers has several modules of routed experts in a layer.",
                    where=self.place,
                    expected="one decoder",
                    found=f"{experts[int(layer[1])][0]}, {path}",
                )
            experts[int(layer[1])] = path, module
        return experts

    def _check_experts(self) -> None:
        """Raise RequestError where the source has no tensors for the parameters of some experts."""
        for path, module in self.experts.values():
            if not any(f"{path}.{name}" in self._tensors for name, _ in module.named_parameters()):
                raise RequestError(
                    "The experts are not stored as transformers reads them.",
                    where=f"{self.place}: {path}",
                    expected="a safetensors checkpoint of the publisher's",
                    found="no tensors of these experts: GGUF files and artifacts have others",
                    remedy="Use the checkpoint that the source was made from.",
                )

    def _find_stages(self) -> dict[str, nn.Module]:
        """Return the decoder layers, and every other module that owns parameters and contains no stage."""
        stages: dict[str, nn.Module] = {}
        for path in sorted({re.sub(r"\.\d+\..*", "", path) for path, _ in self.experts.values()}):
            for number, layer in self.model.get_submodule(path).named_children():
                stages[f"{path}.{number}"] = layer
        layers = [*stages]
        for path, module in self.model.named_modules():
            # A stage is never inside another one: its weights would be loaded too late.
            is_inside = any(path == stage or path.startswith(f"{stage}.") for stage in stages)
            contains = path == _ROOT or any(layer.startswith(f"{path}.") for layer in layers)
            if not is_inside and not contains and _owns_parameters(module):
                stages[path] = module
        return stages

    def _stage_of(self, parameter: str) -> str:
        """Return the innermost stage that owns a parameter; "" for one that is resident."""
        return self.stage_of_module(_module(parameter))

    def stage_of_module(self, path: str) -> str:
        """Return the innermost stage that is a module or contains it; "" where none does."""
        while path and path not in self.stages:
            path = _module(path)
        return path

    def _tensors_by_parameter(self, mapping: Sequence[Any]) -> Mapping[str, list[str]]:
        """Return parameter → the source's tensors that transformers takes for it."""
        kinds = self._loading.WeightRenaming, self._loading.WeightConverter
        self._names = [[rule for rule in mapping if isinstance(rule, kind)] for kind in kinds]
        tensors = defaultdict(list)
        for name in self._source.tensors:
            if (parameter := self._parameter_of(name)) in self._meta:
                tensors[parameter].append(name)
        return tensors

    def _parameter_of(self, name: str) -> str:
        """Return what transformers calls a tensor of a checkpoint: a parameter that takes it, or no parameter."""
        prefix = self.model.base_model_prefix
        renamed, _ = self._loading.rename_source_key(name, *self._names, prefix, self._meta)
        return name if renamed not in self._meta and name in self._meta else str(renamed)

    def stage_of_tensor(self, name: str) -> str:
        """Return the stage that a tensor of the checkpoint is loaded with; "" for one that the model does not have."""
        parameter = self._parameter_of(name)
        return self._stage_of(parameter) if parameter in self._meta else ""

    def module_of_tensor(self, name: str) -> nn.Module | None:
        """Return the module that takes a tensor of the checkpoint; None where the model has no such module."""
        parameter = self._parameter_of(name)
        is_known = parameter in self._meta
        return self.model.get_submodule(_module(parameter)) if is_known else None

    # --- memory

    def stage_bytes(self, name: str) -> int:
        """Return the size of a stage's weights in the dtype of the computation."""
        num_weights = sum(self._meta[parameter].numel() for parameter in self._owned[name])
        return int(num_weights * self.dtype.itemsize)

    def needed_bytes(
        self,
        streams: Sequence[Sequence[torch.Tensor]],
        *,
        num_layers: int = 0,
        gradients_of: Sequence[torch.Tensor] = (),
        comparison_bytes: int = 0,
    ) -> int:
        """Return the memory that streams of token ids [B, T] need.

        num_layers: whose inputs are in memory at a time, of the first stream. gradients_of: passes of
        `output_gradients`. comparison_bytes: for the comparison of the streams' logits; 0 where there is none.
        """
        config = self.model.config.get_text_config()
        batches = [ids for stream in streams for ids in stream]
        num_tokens = sum(ids.numel() for ids in batches)
        num_inputs = num_layers * sum(ids.numel() for ids in streams[0])
        # A pass holds the embeddings and the hidden states of its tokens, and the rotations of their positions.
        head_size = config.to_dict().get("head_dim")  # may differ by layer
        if not isinstance(head_size, int):
            head_size = config.hidden_size
        states = (2 * num_tokens + num_inputs) * config.hidden_size + 2 * num_tokens * head_size
        states += sum(ids.size(1) ** 2 for ids in batches)
        largest = max(map(self.stage_bytes, self.stages))
        beside = product_bytes = 0
        if comparison_bytes:
            num_logits = len(streams) * max(ids.numel() for ids in batches) * config.vocab_size
            beside = largest + 2 * num_logits * self.dtype.itemsize + comparison_bytes
        if gradients_of:
            sizes = [ids.numel() for ids in gradients_of]
            states += (len(self.stages) + 2) * sum(sizes) * config.hidden_size
            product_bytes = 4 * len(self.experts) * config.hidden_size**2
            num_logits = _LOGITS_OF_GRADIENTS * max(sizes) * config.vocab_size
            beside = max(beside, largest + 4 * num_logits)
        states = states * self.dtype.itemsize + product_bytes
        return int(states + max(_LOADING_FACTOR * largest, beside))

    def check_memory(
        self,
        streams: Sequence[Sequence[torch.Tensor]],
        limit: int,
        where: str,
        *,
        num_layers: int = 0,
        most_layers: int = 0,
        least_bytes: int = 0,
        gradients_of: Sequence[torch.Tensor] = (),
        comparison_bytes: int = 0,
    ) -> int:
        """Return `needed_bytes`. Raises RequestError where this, or `least_bytes` of other work, exceeds `limit`.

        The error names what is enough for both. where: the limit's name. most_layers: `num_layers` under any limit.
        """
        need, most = (
            self.needed_bytes(
                streams,
                num_layers=number,
                gradients_of=gradients_of,
                comparison_bytes=comparison_bytes,
            )
            for number in (num_layers, max(num_layers, most_layers))
        )
        if max(need, least_bytes) > limit:
            num_tokens = sum(ids.numel() for stream in streams for ids in stream)
            raise RequestError(
                "The run of the model does not fit into the memory limit.",
                where=where,
                expected=f"{math.ceil(max(most, least_bytes) / 2**20)} MiB, for the largest layer and "
                f"{plural(num_tokens, 'token')}",
                found=f"{limit / 2**20:.0f} MiB",
                remedy="Allow more with --max-memory, or take fewer tokens or a smaller dtype.",
            )
        return need

    # --- weights

    def _load_resident(self) -> None:
        """Load the parameters that belong to no stage, and compute the buffers that no checkpoint has."""
        for value in (*self.model.parameters(), *self.model.buffers()):
            value._is_hf_initialized = True
        for name, buffer in [*self.model.named_non_persistent_buffers()]:
            self._set(name, torch.empty_like(buffer, device=self.device))
        self.model.initialize_weights()
        for name in self._meta:
            self._set(name, self._placeholder(name))
        self.load(_ROOT)

    def load(self, stage: str, replacements: Mapping[str, torch.Tensor] = _NOTHING) -> None:
        """Read a stage's weights to the device, by transformers' own conversion; a tied one has its twin's values.

        replacements: tensors by name (`stored_tensors`), in place of all that the source has for their modules.
        Raises InputError where the source lacks some, or has other shapes.
        """
        parameters = self._owned[stage]
        if not parameters:
            return
        tied = {name: twin for name in parameters if (twin := self._twin(name)) is not None}
        wanted = (parameters - tied.keys()) | {*tied.values()}
        replaced = {_module(name) for name in replacements}
        tensors: dict[str, Any] = dict(replacements)
        for name in sorted(
            name for parameter in wanted for name in self._tensors.get(parameter, ())
        ):
            if _module(name) not in replaced:
                tensors[name] = _StoredTensor(self._source, self._source.tensors[name], self.device)
        info, _ = self._loading.convert_and_load_state_dict_in_model(
            self.model, tensors, self._config
        )
        self._check(info, wanted)
        for name in wanted:
            value = self.model.get_parameter_or_buffer(name).requires_grad_(False)
            # A decoded or passed-through weight may have the dtype of the source.
            if value.is_floating_point() and value.dtype not in (self.dtype, torch.float32):
                self._set(name, value.data.to(self.dtype))
        for name, twin in tied.items():
            self._set(name, self.model.get_parameter_or_buffer(twin).data)
        for twin in {*tied.values()} - parameters:
            self._set(twin, self._placeholder(twin))

    def widen(self, stage: str) -> None:
        """Turn a stage's weights to float32, for one use."""
        for name in self._owned[stage]:
            value = self.model.get_parameter_or_buffer(name)
            if value.is_floating_point():
                self._set(name, value.data.float())

    def narrow(self, stage: str, dtype: torch.dtype) -> None:
        """Turn a stage's weights to a smaller dtype, but those that the model keeps in float32, for one use."""
        kept = re.compile("|".join(map(re.escape, self.model._get_dtype_plan(dtype))) or "$^")
        for name in self._owned[stage]:
            value = self.model.get_parameter_or_buffer(name)
            if value.is_floating_point() and not kept.search(name):
                self._set(name, value.data.to(dtype))

    def use_float32(self) -> None:
        """Compute in float32 from now on; no stage may be loaded."""
        self.dtype = torch.float32
        plan = self.model._get_dtype_plan(self.dtype)
        self._config = replace(self._config, dtype=self.dtype, dtype_plan=plan)
        for name, value in self._meta.items():
            self._meta[name] = value.float() if value.is_floating_point() else value
            self._set(name, self._placeholder(name))
        self.load(_ROOT)

    def drop(self, stage: str) -> None:
        """Free a stage's weights."""
        for name in self._owned[stage]:
            self._set(name, self._placeholder(name))

    def check_finite(self, stage: str) -> None:
        """Raise InputError where a tensor of the source for a stage's weights is not finite."""
        for parameter in sorted(self._owned[stage]):
            for name in self._tensors.get(parameter, ()):
                values = read_tensor(self._source, self._source.tensors[name])
                if values.is_floating_point() and not bool(values.float().isfinite().all()):
                    raise not_finite(name)

    def _placeholder(self, name: str) -> torch.Tensor:
        value = self._meta[name]
        if value.dtype not in self._placeholders:
            number = math.nan if value.is_floating_point() else 0
            scalar = torch.full((), number, dtype=value.dtype, device=self.device)
            self._placeholders[value.dtype] = scalar
        return self._placeholders[value.dtype].expand(value.shape)

    def _set(self, name: str, value: torch.Tensor) -> None:
        module, attribute = self.model.get_submodule(_module(name)), name.rpartition(".")[2]
        is_parameter = attribute in module._parameters
        setattr(
            module, attribute, nn.Parameter(value, requires_grad=False) if is_parameter else value
        )

    def _twin(self, name: str) -> str | None:
        """Return the parameter that a parameter without tensors is tied to; None for any other."""
        if name in self._tensors:
            return None
        ties = self.model.all_tied_weights_keys
        original = ties.get(name)
        siblings = [tied for tied, source in ties.items() if source in (name, original)]
        return next((twin for twin in (original, *siblings) if twin in self._tensors), None)

    def _check(self, info: Any, wanted: set[str]) -> None:
        """Raise InputError unless every wanted parameter has its values."""
        missing = []
        for name in sorted(wanted):
            pointer = self.model.get_parameter_or_buffer(name).data_ptr()
            ignored = self.model._keys_to_ignore_on_load_missing or ()
            is_ignored = any(re.search(pattern, name) for pattern in ignored)
            if pointer == self._placeholder(name).data_ptr() and not is_ignored:
                missing.append(name)
        errors = [
            f"{name}: {list(found)} instead of {list(expected)}"
            for name, found, expected in info.mismatched_keys
        ]
        errors += map(str, info.conversion_errors.values())
        if missing or errors:
            raise InputError(
                "The model of transformers cannot be filled from the source.",
                where=str(self._source.root),
                expected=f"weights for {first_few(missing)}" if missing else "the model's shapes",
                found=first_few(errors),
                remedy="Load the model with transformers alone, to see if it can be run at all.",
            )


def _share_free_memory() -> None:
    """Let all threads allocate from one pool: each pass has a thread, whose freed memory no other one could use."""
    with suppress(OSError, AttributeError):  # of a libc without it
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


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
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
            part._experts_implementation = "eager"
    with ExitStack() as stack:
        for context in cls.get_init_context(dtype, quantizer is not None, False, None):
            stack.enter_context(context)
        model = cls(config)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model, dtype=dtype, device_map={"": device}, checkpoint_files=None
            )
    return model.eval()


def _owns_parameters(module: nn.Module) -> bool:
    """Return whether a module itself has parameters, or buffers that a checkpoint holds."""
    buffers = module._buffers.keys() - module._non_persistent_buffers_set
    return bool(module._parameters or buffers)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


# --- decoded experts as tensors of a checkpoint


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


# --- forward passes


_own = threading.local()  # `.forward_pass` of the thread of a pass


class _Stopped(BaseException):
    """Raised in the thread of a pass that nobody will continue."""


@dataclass(frozen=True)
class ModuleCall:
    """Call of a stage that a pass waits for: the stage's name, and its own `forward` with the arguments."""

    name: str
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states: the first tensor among the arguments."""
        given = (*self.args, *self.kwargs.values())
        return next(value for value in given if isinstance(value, torch.Tensor))

    def with_hidden(self, hidden: torch.Tensor) -> ModuleCall:
        """Return the call with other hidden states."""
        before = self.hidden
        args = tuple(hidden if value is before else value for value in self.args)
        kwargs = {name: hidden if value is before else value for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def run(self) -> Any:
        """Compute the stage's output in this thread."""
        return self.forward(*self.args, **self.kwargs)


class ForwardPass:
    """One run of a function in a thread that stops at each call of a stage.

    call: the call that the pass waits for, None at the end. output: the function's result, at the end.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        """Run the function up to its first call of a stage. Raises the function's errors."""
        self.call: ModuleCall | None = None
        self.output: Any = None
        self._events, self._answers = SimpleQueue[Any](), SimpleQueue[Any]()
        self._thread = threading.Thread(
            target=self._run, args=(function,), name="hqconv-pass", daemon=True
        )
        self._thread.start()
        self._wait()

    def resume(self, answer: Any) -> None:
        """Continue with the output of the stage that the pass waits for. Raises the function's errors."""
        self.call = None
        self._answers.put(answer)
        self._wait()

    def stop(self) -> None:
        """End a pass that waits; nothing happens if it has ended."""
        if self.call is not None:
            self.call = None
            self._answers.put(_Stopped)
        self._thread.join()

    def _wait(self) -> None:
        event = self._events.get()
        if isinstance(event, ModuleCall):
            self.call = event
            return
        self._thread.join()
        if isinstance(event, BaseException):
            raise event
        self.output = event

    def _run(self, function: Callable[[], Any]) -> None:
        _own.forward_pass = self
        torch.set_num_threads(1)  # a pool of processors for each of many threads would be too many
        try:
            self._events.put(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the owner's thread
            self._events.put(error)

    def hand_over(self, call: ModuleCall) -> Any:
        """Return the output of a call, computed by the owner; in the thread of the pass."""
        self._events.put(call)
        answer = self._answers.get()
        if answer is _Stopped:
            raise _Stopped
        return answer


class Stream:
    """Forward passes of a streamed model over a text, which are at the same stage.

    batches: token ids [B, T] of each pass.
    """

    def __init__(self, model: StreamedModel, batches: Sequence[torch.Tensor]) -> None:
        """Run every pass to its first stage. Raises transformers' errors."""
        self.model, self.batches = model, batches
        _check_tokens(model, batches)
        self.passes: list[ForwardPass] = []
        try:
            for ids in batches:
                self.passes.append(ForwardPass(partial(_logits, model.model, ids)))
        except BaseException:
            self.stop()
            raise

    @property
    def stage(self) -> str:
        """The stage that all passes wait for. Raises RequestError where they wait for several, or have ended."""
        names = {each.call.name if each.call else "" for each in self.passes}
        if len(names) != 1 or "" in names:
            raise RequestError(
                "The transformers library runs this model in an order that hqconv does not know.",
                where=self.model.place,
                found=", ".join(sorted(names)),
                remedy="Convert without --calibrate; the artifact cannot be evaluated.",
            )
        return names.pop()

    def calls(self) -> list[ModuleCall]:
        """Return the call that each pass waits for."""
        return [each.call for each in self.passes if each.call is not None]

    def advance(self, look: Callable[[Any], Any] = lambda _: None) -> list[Any]:
        """Compute the stage for each pass, and run the pass to the next one.

        Returns what `look` returns for each output of the stage.
        """
        found = []
        for forward_pass in self.passes:
            assert forward_pass.call is not None
            answer = forward_pass.call.run()
            found.append(look(answer))
            forward_pass.resume(answer)
        return found

    def logits(self) -> Iterator[torch.Tensor]:
        """Run one pass after the other from the last stage to its end, and yield its logits [B, T, V]."""
        for forward_pass in self.passes:
            assert forward_pass.call is not None
            forward_pass.resume(forward_pass.call.run())
            yield forward_pass.output
            forward_pass.output = None

    def keep(self, count: int) -> None:
        """End all passes but the first `count`."""
        for forward_pass in self.passes[count:]:
            forward_pass.stop()
        self.passes, self.batches = self.passes[:count], self.batches[:count]

    def stop(self) -> None:
        """End all passes."""
        self.keep(0)


def _check_tokens(model: StreamedModel, batches: Sequence[torch.Tensor]) -> None:
    """Refuse tokens that the model has no embedding for."""
    embedding = model.model.get_input_embeddings()
    num_embeddings = getattr(embedding, "num_embeddings", None)
    largest = max((int(ids.max()) for ids in batches), default=0)
    if num_embeddings is not None and largest >= num_embeddings:
        raise RequestError(
            "The tokenizer gives a token that the model has no embedding for.",
            where=model.place,
            expected=f"tokens from 0 to {num_embeddings - 1}",
            found=f"token {largest}",
            remedy="Copy the tokenizer's files of this very model into the source.",
        )


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def _stop_at(name: str, module: nn.Module) -> None:
    """Let every pass stop at a module; calls outside of a pass are as before."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        forward_pass: ForwardPass | None = getattr(_own, "forward_pass", None)
        call = ModuleCall(name, original, args, kwargs)
        return call.run() if forward_pass is None else forward_pass.hand_over(call)

    module.forward = forward
