"""A program that compiles the kernels that vLLM's own layers request of Humming for a checkpoint, without a GPU.

    python -m hqconv.serving.vllm.stock_kernels JOB     (a JSON document; `stock_checkpoint` starts it)

vLLM builds its own model class from config.json, for one rank, with nothing loaded. Of each kind of layer that it gives
to Humming, one is processed as after loading, with one expert. What it then would ask Humming for is compiled into
Humming's cache.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hqconv.errors import plural
from hqconv.humming_ops.runtime import compiler_version, humming, resident, target_facts
from hqconv.kernel_layout.kernel_sources import (
    ComputeSettings,
    KernelSource,
    gemm_kernels,
    input_kernels,
    kernel_compiler,
    standing_in,
    toolkit,
    weight_kernels,
)
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.serving.vllm.kernel_requests import PREQUANTIZED
from hqconv.serving.vllm.no_gpu import building, pretend, ranks
from hqconv.serving.warm.gpus import Gpu

DENSE = "dense"


class Gemm(NamedTuple):
    """GEMM that a layer asks for. config: Humming's LayerConfig, JSON. activation: of its input."""

    config: str
    settings: ComputeSettings
    rotation: int
    activation: Mapping[str, str] | None = None
    top_k: int = 1


class Request(NamedTuple):
    """Request of a layer to Humming: kernels that convert its weights, and GEMMs."""

    of_weights: list[KernelSource]
    gemms: list[Gemm]


_DEPTH = 3  # method → scheme → kernel


def main() -> None:
    """Compile, with `jobs` compilers at once or none; the last line of the output is a document."""
    job = json.loads(sys.argv[1])
    gpu = Gpu(**job["gpu"])
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    pretend(gpu.sm_version, gpu.name, gpu.sm_count)
    with standing_in(gpu.facts()), toolkit():
        target = GpuTarget(gpu.sm_version, compiler_version())
        asked = {  # ranks may hold other numbers of experts
            f"{name} of rank {rank}": request
            for rank in sorted({0, max(job["tp"], job["ep"]) - 1})
            for name, request in _requests(job, rank, target)
        }
        requests = {
            name: request for name, request in asked.items() if isinstance(request, Request)
        }
        left_out = {name: error for name, error in asked.items() if isinstance(error, str)}
        sources = {
            kernel.name: kernel for request in requests.values() for kernel in request.of_weights
        }
        gemms = {str(gemm): gemm for request in requests.values() for gemm in request.gemms}
        sources |= {kernel.name: kernel for gemm in gemms.values() for kernel in _kernels_of(gemm)}
        print(f"Compiling {plural(len(sources), 'kernel')} for {gpu.name}.", flush=True)
        num_compiled = _compile(list(sources.values()), job["jobs"]) if job["jobs"] else 0
    functions = {
        name: kernel.expression.split("<")[0].strip() for name, kernel in sorted(sources.items())
    }
    document = {
        "layers": list(requests),
        "left_out": left_out,
        "kernels": functions,
        "num_compiled": num_compiled,
    }
    print(json.dumps(document), flush=True)


def _compile(sources: list[KernelSource], jobs: int) -> int:
    """Compile into Humming's cache, as a server does; returns how many were not there."""
    compiler, cache = kernel_compiler(), Path(os.environ["HUMMING_CACHE_DIR"])
    before = len(list(cache.glob("*/kernel.cubin")))

    def make(source: KernelSource) -> None:
        compiler.compile(
            source.code,
            source.architecture,
            source.expression,
            disable_fast_math=source.without_fast_math,
            postprocess_cubin=source.patch,
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, sources))
    return len(list(cache.glob("*/kernel.cubin"))) - before


def _kernels_of(gemm: Gemm) -> list[KernelSource]:
    config = json.loads(gemm.config)
    inputs = input_kernels(config, gemm.settings, gemm.activation, gemm.top_k, gemm.rotation)
    return gemm_kernels(config, gemm.settings) + inputs


# --- vLLM's model ------------------------------------------------------------------------------------------


def _requests(
    job: Mapping[str, Any], rank: int, target: GpuTarget
) -> list[tuple[str, Request | str]]:
    """Layers that a rank's Humming serves, one of each kind, and what they ask for, or why that is not known."""
    from vllm.config import (
        KernelConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.model_loader.utils import initialize_model

    words = {key: job[key] for key in ("model", "quantization") if job[key] is not None}
    model_config = ModelConfig(**words, skip_tokenizer_init=True, enforce_eager=True)
    num_ranks = max(job["tp"], job["ep"])
    parallel = ParallelConfig(
        tensor_parallel_size=num_ranks,
        enable_expert_parallel=job["ep"] > 1,
        distributed_executor_backend="external_launcher",  # asks for no devices
    )
    backend = {} if job["moe_backend"] is None else {"moe_backend": job["moe_backend"]}
    config = VllmConfig(
        model_config=model_config, parallel_config=parallel, kernel_config=KernelConfig(**backend)
    )
    with (
        set_current_vllm_config(config),
        ranks(num_ranks, rank),
        building(config, model_config.dtype),
    ):
        model = initialize_model(vllm_config=config)  # memory that nobody writes is not taken
        humming()
        with target_facts(target), resident(torch.device("cpu")):
            return list(_requests_of(model))


def _requests_of(model: torch.nn.Module) -> Iterator[tuple[str, Request | str]]:
    kinds: dict[str, tuple[str, torch.nn.Module]] = {}
    for name, layer in model.named_modules():
        if _is_served(getattr(layer, "quant_method", None)) or _is_served(
            getattr(layer, "scheme", None)
        ):
            kinds.setdefault(_kind(layer), (name, layer))
    for name, layer in kinds.values():
        try:
            yield name, _of_layer(layer)
        except Exception as error:  # noqa: BLE001 - vLLM's and Humming's; such a layer's kernels compile at the start
            yield name, f"{type(error).__name__}: {error}"


def _is_served(thing: Any, depth: int = _DEPTH) -> bool:
    """Return whether Humming serves a method of vLLM: the method, its kernel or its backend has that name."""
    kind = thing if isinstance(thing, type) else type(thing)
    if isinstance(thing, enum.Enum):
        return "humming" in thing.name.lower()
    if not kind.__module__.startswith("vllm.model_executor") or isinstance(thing, torch.nn.Module):
        return False
    if "humming" in f"{kind.__module__}.{kind.__name__}".lower():
        return not kind.__name__.endswith("Config")
    if isinstance(thing, type) or not depth:
        return False
    return any(_is_served(value, depth - 1) for value in vars(thing).values())


def _kind(layer: torch.nn.Module) -> str:
    """All that the kernels of a layer depend on, as text: its classes, its parameters, and plain values of both."""
    parameters = [
        f"{name} {tuple(one.shape)} {one.dtype}"
        for name, one in layer.named_parameters(recurse=False)
    ]
    plain = [
        f"{name}={value}"
        for thing in (layer, layer.quant_method, getattr(layer, "scheme", None))
        for name, value in sorted(vars(thing).items() if thing is not None else ())
        if not name.startswith("_")
        and "name" not in name
        and "prefix" not in name
        and " at 0x" not in str(value)
        if not isinstance(value, torch.Tensor | torch.nn.Module)
    ]
    return "\n".join([type(layer).__name__, type(layer.quant_method).__name__, *parameters, *plain])


def _of_layer(layer: Any) -> Request:
    """Process a layer's weights, and note what Humming is asked for."""
    import vllm.model_executor.layers.fused_moe.experts.fused_humming_moe as experts_module
    import vllm.utils.humming as facade
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    experts: list[Any] = []
    dense: list[tuple[Any, int]] = []
    make, transform = (
        experts_module.HummingExpertsBase.__init__,
        facade.prepare_and_transform_humming_tensors,
    )

    def made(self: Any, *args: Any, **words: Any) -> None:
        make(self, *args, **words)
        experts.append(self)

    def transformed(*args: Any, **words: Any) -> Any:
        config, tensors = transform(*args, **words)
        dense.append((config, words["weight_schema"].hadamard_block_size))
        return config, tensors

    with ExitStack() as stack:
        stack.enter_context(patch.object(experts_module.HummingExpertsBase, "__init__", made))
        stack.enter_context(
            patch.object(facade, "prepare_and_transform_humming_tensors", transformed)
        )
        num_experts = layer.moe_config.num_local_experts if isinstance(layer, RoutedExperts) else 0
        if num_experts:
            stack.enter_context(_one_expert(layer, num_experts))
        _fill(layer)
        found = stack.enter_context(weight_kernels())
        layer.quant_method.process_weights_after_loading(layer)
    if num_experts:
        gemms = [gemm for one in experts for gemm in _of_experts(one, layer, num_experts)]
    else:
        gemms = [Gemm(config.to_str(), _settings(DENSE), rotation) for config, rotation in dense]
    return Request(found, gemms)


@contextmanager
def _one_expert(layer: Any, num_experts: int) -> Iterator[None]:
    """Leave one expert in a layer: more of them would change nothing but their number, and take memory."""
    for parameter in layer.parameters(recurse=False):
        if parameter.ndim and parameter.size(0) == num_experts:
            parameter.data = parameter.data[:1]
    local = ("num_local_experts", "local_num_experts")
    counts = (
        (layer, local),
        (layer.moe_config, local),
        (layer.quant_method, (*local, "num_experts")),
    )
    there = [
        (thing, name)
        for thing, names in counts
        for name in names
        if vars(thing).get(name) == num_experts
    ]
    for thing, name in there:
        vars(thing)[name] = 1
    try:
        yield
    finally:
        for thing, name in there:
            vars(thing)[name] = num_experts


def _fill(layer: torch.nn.Module) -> None:
    """Some formats' layouts depend on values: give usual ones, codes of which some are 0, and scales that are equal."""
    for parameter in layer.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.data.fill_(1)
        else:
            parameter.data.view(torch.uint8).zero_()


def _of_experts(experts: Any, layer: Any, num_experts: int) -> Iterator[Gemm]:
    """Both GEMMs of vLLM's class of experts; the second one's input is activated by Humming."""
    from vllm.model_executor.layers.quantization.utils.humming import get_humming_activation

    settings = _settings(experts.humming_gemm_type().value)
    for name, gemm in (("w1", "w13"), ("w2", "w2")):
        config = json.dumps(
            {**json.loads(experts.humming_configs[gemm].to_str()), "num_experts": num_experts}
        )
        activation = (
            None
            if gemm == "w13"
            else get_humming_activation(layer.activation, experts.activation_config)
        )
        rotation = getattr(experts.quant_config, f"{name}_hadamard_block_size") or 0
        yield Gemm(config, settings, rotation, activation, layer.moe_config.experts_per_token)


def _settings(gemm_type: str) -> ComputeSettings:
    from vllm import envs

    prequantized = None if gemm_type == DENSE else PREQUANTIZED
    flags = bool(envs.VLLM_HUMMING_USE_F16_ACCUM), bool(envs.VLLM_BATCH_INVARIANT)
    return ComputeSettings(gemm_type, *flags, prequantized)


if __name__ == "__main__":
    main()
