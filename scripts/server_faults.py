"""Faults for a running vLLM, for `scripts/check_serving.py server`: an extension of its workers.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --enforce-eager
        --worker-extension-cls scripts.server_faults.Faults …
    POST /collective_rpc {"method": "plant_fault", "args": ["swap"]}, and {"method": "undo_fault"}

One fault at a time, in the middle layer of experts if it is of one layer. Weights are changed in place; scales, and
what depends on a batch, are hooks on the experts' module, which is why the engine has to run without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# The verdict that names each fault: keys of hqconv.verification.server.VERDICTS.
FAULTS: dict[str, tuple[str, ...]] = {
    "scales of a layer x 1.05": ("weights",),
    "two experts swapped": ("weights",),
    "w13 halves exchanged": ("weights",),
    "weights of another layer": ("weights",),
    "router rows permuted": ("weights",),
    "activation gelu": ("weights",),
    "rope base x 4": ("weights", "larger"),
    "wrong from 17 tokens on": ("larger",),
    "wrong from 17 requests on": ("batching",),
    "wrong for 2 prompts at once": ("batching",),
    "decoding wrong": ("decoding",),
    "long prompts wrong": ("long",),
}
_WRONG = 1.3  # factor of a layer's output where a batch is wrong
_LONG = 1024  # tokens
Undo = Callable[[], object]


class Faults:
    """Methods that every worker gets."""

    def plant_fault(self, name: str) -> str:
        """Plant a fault in place of the one before."""
        self.undo_fault()
        undo: list[Undo] = []
        self._undo_of_faults = undo
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        layers = [module for path, module in model.named_modules() if path.endswith(".mlp.experts")]
        with torch.inference_mode():
            if name.startswith("scales"):
                factor = float(name.rpartition(" ")[2])
                _hook(layers, undo, lambda _: True, factor)
            elif name in _BATCHES:
                _hook(layers, undo, _BATCHES[name], _WRONG)
            else:
                _CHANGES[name](model, layers, undo)
        return f"{name} in {len(layers)} layers of experts"

    def undo_fault(self) -> str:
        """Undo the fault that is planted."""
        with torch.inference_mode():
            for step in reversed(getattr(self, "_undo_of_faults", [])):
                step()
        self._undo_of_faults = []
        return ""


def _hook(
    layers: list[Any], undo: list[Undo], is_wrong: Callable[[Batch], bool], factor: float
) -> None:
    """Multiply the output of one layer's experts by a factor where a step's batch is wrong."""

    def scale(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor if is_wrong(_batch()) else output

    undo.append(layers[len(layers) // 2].register_forward_hook(scale).remove)


@dataclass(frozen=True)
class Batch:
    """A step of the engine: number of tokens and of requests, the most tokens of one request, the longest sequence."""

    num_tokens: int
    num_requests: int
    most_tokens: int
    longest: int


def _batch() -> Batch:
    """The step that runs, by its attention metadata; empty while the engine profiles itself."""
    from vllm.forward_context import get_forward_context

    found = get_forward_context().attn_metadata
    found = found[0] if isinstance(found, list) else found
    found = next(iter(found.values()), None) if isinstance(found, dict) else found
    if found is None:
        return Batch(0, 0, 0, 0)
    counts = found.query_start_loc.diff()
    return Batch(
        num_tokens=int(counts.sum()),
        num_requests=int((counts > 0).sum()),
        most_tokens=int(counts.max()),
        longest=int(found.seq_lens.max()),
    )


_BATCHES: dict[str, Callable[[Batch], bool]] = {
    "wrong from 17 tokens on": lambda batch: batch.num_tokens >= 17,
    "wrong from 17 requests on": lambda batch: batch.num_requests >= 17,
    "wrong for 2 prompts at once": lambda batch: batch.num_requests >= 2 and batch.most_tokens > 1,
    "decoding wrong": lambda batch: batch.most_tokens == 1,
    "long prompts wrong": lambda batch: batch.longest > _LONG,
}


def _change(tensor: torch.Tensor, values: torch.Tensor, undo: list[Undo]) -> None:
    before = tensor.data.clone()
    undo.append(partial(tensor.data.copy_, before))
    tensor.data.copy_(values)


def _swap(_: Any, layers: list[Any], undo: list[Undo]) -> None:
    experts = layers[len(layers) // 2].routed_experts
    count = max(tensor.shape[0] for tensor in experts.parameters() if tensor.dim() > 1)
    for tensor in experts.parameters():
        if tensor.dim() and tensor.shape[0] == count:
            order = [1, 0, *range(2, count)]
            _change(tensor, tensor.data[order].clone(), undo)


def _other_layer(_: Any, layers: list[Any], undo: list[Undo]) -> None:
    ours, others = (layers[len(layers) // 2 - n].routed_experts for n in (0, 1))
    values = dict(others.named_parameters())
    for name, tensor in ours.named_parameters():
        _change(tensor, values[name].data.clone(), undo)


def _router(model: Any, _: list[Any], undo: list[Undo]) -> None:
    routers = [
        tensor for name, tensor in model.named_parameters() if name.endswith(".mlp.gate.weight")
    ]
    router = routers[len(routers) // 2]
    _change(router, router.data.roll(1, 0).clone(), undo)


def _rope(model: Any, _: list[Any], undo: list[Undo]) -> None:
    seen = set()
    for module in model.modules():
        if hasattr(module, "_compute_cos_sin_cache") and id(module) not in seen:
            seen.add(id(module))
            base = module.base
            module.base = base * 4
            cache = module._compute_cos_sin_cache()
            module.base = base
            for name in ("cos_sin_cache", "cos_sin_cache_bf16"):
                if (buffer := getattr(module, name, None)) is not None:
                    _change(buffer, cache.to(buffer), undo)
    assert seen, "no rope"


def _activations() -> Any:
    from vllm.model_executor.layers.quantization.utils.humming import activation

    return activation._HUMMING_ACTIVATIONS


def _gelu(_: Any, __: list[Any], undo: list[Undo]) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    table = _activations()
    undo.append(partial(table.update, {MoEActivation.SILU: table[MoEActivation.SILU]}))
    table[MoEActivation.SILU] = table[MoEActivation.GELU]


def _halves(_: Any, layers: list[Any], undo: list[Undo]) -> None:
    """Take up for gate and gate for up in one layer: the activation's operands, while the layer runs."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    table, silu = _activations(), MoEActivation.SILU
    before = table[silu]
    exchanged = {**before, "activation_impl": "(b / (1.f + expf(-b))) * a"}
    layer = layers[len(layers) // 2]

    def begin(*_: Any) -> None:
        table[silu] = exchanged

    def end(*_: Any) -> None:
        table[silu] = before

    undo += [layer.register_forward_pre_hook(begin).remove, layer.register_forward_hook(end).remove]


_CHANGES: dict[str, Callable[[Any, list[Any], list[Undo]], None]] = {
    "two experts swapped": _swap,
    "w13 halves exchanged": _halves,
    "weights of another layer": _other_layer,
    "router rows permuted": _router,
    "activation gelu": _gelu,
    "rope base x 4": _rope,
}
