"""`hqconv warm` for a checkpoint that vLLM itself serves with Humming: kernels into Humming's own cache here.

Humming finds a kernel by its source, its compiler and the places and times of its headers, so the cache is that of the
installation which serves: the same machine, or an image that is built with this command.

`warm_checkpoint` starts this module as a program of its own (`python -m hqconv.warm.checkpoint_kernels JOB`, a JSON
document), on no GPU. There vLLM builds its own model class from config.json, for one rank, with nothing loaded. Of each
kind of layer that it gives to Humming, one is processed as after loading, with one expert. What it then would ask
Humming for is compiled into the cache.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hqconv.errors import RequestError, plural
from hqconv.humming_ops.runtime import compiler_version, humming, resident, target_facts
from hqconv.io.durable_files import output_errors
from hqconv.kernel_layout.kernel_sources import (
    ComputeSettings,
    KernelSource,
    gemm_kernels,
    input_kernels,
    kernel_compiler,
    recorder,
    standing_in,
    toolkit,
    weight_ops,
)
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.serving.vllm.translation import PREQUANTIZED
from hqconv.warm.gpus import Gpu
from hqconv.warm.no_gpu import building, pretend, ranks

CACHE_VARIABLE = "HUMMING_CACHE_DIR"
DENSE = "dense"
_MAX_ERROR_CHARACTERS = 500  # of what the program said
_DEPTH = 3  # method → scheme → kernel


def warm_checkpoint(
    model: str, gpu: Gpu, server: Mapping[str, Any], jobs: int, announce: Callable[[str], None]
) -> dict[str, Any]:
    """Compile what vLLM asks of Humming for a checkpoint into Humming's cache; see `compile_kernels.warm`.

    server: its `tp`, `ep`, `quantization` and `moe_backend`.

    Raises RequestError without vLLM, for a checkpoint that it does not serve or serves without Humming, and where a
    kernel cannot be compiled; OutputError for a cache that cannot be created.
    """
    started = time.monotonic()
    if importlib.util.find_spec("vllm") is None:
        raise RequestError(
            f"There is no {ENGINE.name} here, which knows the kernels of this checkpoint.",
            where=model,
            expected=f"{ENGINE.release}, or an artifact of `hqconv convert` in the kernel layout",
            remedy=f"Run the command in the server's environment. {ENGINE.install_command} installs it.",
        )
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".humming/cache").absolute()
    with output_errors(folder, f"Set {CACHE_VARIABLE} to a folder of this user's own."):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    job = {"model": model, **server, "jobs": jobs, "gpu": asdict(gpu)}
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        CACHE_VARIABLE: str(folder),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(job)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        lines: list[str] = []
        for line in program.stdout or ():
            lines.append(line.rstrip())
            if line.startswith("Compiling "):
                announce(line.rstrip())
    if program.returncode != 0:
        raise RequestError(
            f"The classes of {ENGINE.name} could not be asked for the kernels of this checkpoint.",
            where=model,
            found=_error_in(lines) or f"exit code {program.returncode}",
            remedy="Serve it once without this command; kernels are compiled at the first start then.",
        )
    document = json.loads(lines[-1])
    if not document["layers"]:
        raise RequestError(
            f"There is no layer of this checkpoint that {ENGINE.name} serves with Humming on this GPU.",
            where=model,
            found=next(iter(document["left_out"].values()), f"{gpu.name}; nothing to compile"),
            remedy="Where it is to use Humming, give the server's --quantization or --moe-backend.",
        )
    return {
        "kind": "warm_checkpoint",
        "folder": str(folder),
        "gpu": job["gpu"],
        "seconds": time.monotonic() - started,
        "num_kernels": len(document["kernels"]),
        **document,
    }


def _error_in(lines: list[str]) -> str:
    """Return the last exception that a program printed, on one line."""
    errors = [
        place for place, line in enumerate(lines) if re.search(r"\w(Error|Exception)\b", line)
    ]
    if not errors:
        return ""
    text = " ".join(lines[errors[-1] :]).replace("[rank0]:", "")
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]


# --- the program


@dataclass(frozen=True)
class GemmRequest:
    """GEMM that a layer asks for. config: Humming's LayerConfig, JSON. activation: of its input."""

    config: str
    settings: ComputeSettings
    rotation: int
    activation: Mapping[str, str] | None = None
    top_k: int = 1

    def kernels(self) -> list[KernelSource]:
        """Return the kernels of the GEMM and of its input. Inside `standing_in` only."""
        config = json.loads(self.config)
        inputs = input_kernels(config, self.settings, self.activation, self.top_k, self.rotation)
        return gemm_kernels(config, self.settings) + inputs


def main() -> None:
    """Compile, with `jobs` compilers at once or none; the last line of the output is a document."""
    job = json.loads(sys.argv[1])
    gpu = Gpu(**job["gpu"])
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    pretend(gpu.sm_version, gpu.name, gpu.sm_count)
    layers: list[str] = []
    left_out: dict[str, str] = {}
    sources: dict[str, KernelSource] = {}
    gemms: dict[str, GemmRequest] = {}
    with standing_in(gpu.facts()), toolkit():
        # ranks may hold different numbers of experts
        for rank in sorted({0, max(job["tp"], job["ep"]) - 1}):
            with _model_of_rank(job, rank, gpu) as model:
                for name, layer in _layers_of_humming(model):
                    name = f"{name} of rank {rank}"
                    try:
                        weights, requests = _requests_of(layer)
                    except Exception as error:  # noqa: BLE001 - vLLM's and Humming's; its kernels compile at the start
                        left_out[name] = f"{type(error).__name__}: {error}"
                        continue
                    layers.append(name)
                    sources |= {kernel.name: kernel for kernel in weights}
                    gemms |= {str(request): request for request in requests}
        for request in gemms.values():
            sources |= {kernel.name: kernel for kernel in request.kernels()}
        print(f"Compiling {plural(len(sources), 'kernel')} for {gpu.name}.", flush=True)
        num_compiled = _compile(list(sources.values()), job["jobs"]) if job["jobs"] else 0
    functions = {
        name: kernel.expression.split("<")[0].strip() for name, kernel in sorted(sources.items())
    }
    document = {
        "layers": layers,
        "left_out": left_out,
        "kernels": functions,
        "num_compiled": num_compiled,
    }
    print(json.dumps(document), flush=True)


def _compile(sources: list[KernelSource], jobs: int) -> int:
    """Compile into Humming's cache, as a server does; returns how many were not there."""
    compiler = kernel_compiler()
    cache = Path(os.environ[CACHE_VARIABLE])
    before = len(list(cache.glob("*/kernel.cubin")))

    def compile_one(source: KernelSource) -> None:
        compiler.compile(
            source.code,
            source.architecture,
            source.expression,
            disable_fast_math=source.without_fast_math,
            postprocess_cubin=source.patch,
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, sources))
    return len(list(cache.glob("*/kernel.cubin"))) - before


# --- vLLM's model ------------------------------------------------------------------------------------------


@contextmanager
def _model_of_rank(job: Mapping[str, Any], rank: int, gpu: Gpu) -> Iterator[torch.nn.Module]:
    """Build vLLM's model of a rank; its layers are to be processed inside."""
    from vllm.config import (
        KernelConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.model_loader.utils import initialize_model

    given = {key: job[key] for key in ("model", "quantization") if job[key] is not None}
    model_config = ModelConfig(**given, skip_tokenizer_init=True, enforce_eager=True)
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
        target = GpuTarget(gpu.sm_version, compiler_version())
        with target_facts(target), resident(torch.device("cpu")):
            yield model


def _layers_of_humming(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield one layer of each kind that Humming serves, with its name."""
    kinds = set()
    for name, layer in model.named_modules():
        methods = (getattr(layer, "quant_method", None), getattr(layer, "scheme", None))
        if any(map(_is_served, methods)) and (kind := _kind(layer)) not in kinds:
            kinds.add(kind)
            yield name, layer


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
    """Return all that the kernels of a layer depend on: its classes, its parameters, and plain values of both."""
    facts = [type(layer).__name__, type(layer.quant_method).__name__]
    for name, parameter in layer.named_parameters(recurse=False):
        facts.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
    for thing in (layer, layer.quant_method, getattr(layer, "scheme", None)):
        for name, value in sorted(vars(thing).items() if thing is not None else ()):
            is_name = name.startswith("_") or "name" in name or "prefix" in name
            is_tensor = isinstance(value, torch.Tensor | torch.nn.Module)
            if not is_name and not is_tensor and " at 0x" not in str(value):
                facts.append(f"{name}={value}")
    return "\n".join(facts)


def _requests_of(layer: Any) -> tuple[list[KernelSource], list[GemmRequest]]:
    """Process a layer's weights, and note what Humming is asked for: kernels that convert weights, and GEMMs."""
    import vllm.model_executor.layers.fused_moe.experts.fused_humming_moe as experts_module
    import vllm.utils.humming as facade
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    experts: list[Any] = []
    gemms: list[GemmRequest] = []
    create = experts_module.HummingExpertsBase.__init__
    transform = facade.prepare_and_transform_humming_tensors

    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        experts.append(self)

    def transformed(*args: Any, **kwargs: Any) -> Any:
        config, tensors = transform(*args, **kwargs)
        gemms.append(
            GemmRequest(
                config.to_str(), _settings(DENSE), kwargs["weight_schema"].hadamard_block_size
            )
        )
        return config, tensors

    num_experts = layer.moe_config.num_local_experts if isinstance(layer, RoutedExperts) else 0
    with (
        patch.object(experts_module.HummingExpertsBase, "__init__", created),
        patch.object(facade, "prepare_and_transform_humming_tensors", transformed),
        ExitStack() as stack,
    ):
        if num_experts:
            stack.enter_context(_one_expert(layer, num_experts))
        _fill(layer)
        weights = stack.enter_context(weight_kernels())
        layer.quant_method.process_weights_after_loading(layer)
    if num_experts:
        gemms = [gemm for of in experts for gemm in _gemms_of_experts(of, layer, num_experts)]
    return weights, gemms


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


def _gemms_of_experts(experts: Any, layer: Any, num_experts: int) -> Iterator[GemmRequest]:
    """Yield both GEMMs of vLLM's class of experts; the second one's input is activated by Humming."""
    from vllm.model_executor.layers.quantization.utils.humming import get_humming_activation

    settings = _settings(experts.humming_gemm_type().value)
    top_k = layer.moe_config.experts_per_token
    for name, gemm in (("w1", "w13"), ("w2", "w2")):
        config = json.loads(experts.humming_configs[gemm].to_str()) | {"num_experts": num_experts}
        activation = None
        if gemm == "w2":
            activation = get_humming_activation(layer.activation, experts.activation_config)
        rotation = getattr(experts.quant_config, f"{name}_hadamard_block_size") or 0
        yield GemmRequest(json.dumps(config), settings, rotation, activation, top_k)


def _settings(gemm_type: str) -> ComputeSettings:
    from vllm import envs

    prequantized = None if gemm_type == DENSE else PREQUANTIZED
    flags = bool(envs.VLLM_HUMMING_USE_F16_ACCUM), bool(envs.VLLM_BATCH_INVARIANT)
    return ComputeSettings(gemm_type, *flags, prequantized)


# --- Humming's weight ops, which convert a checkpoint's weights when an engine loads them

# Ops whose results Humming's schemas look at.
_WITH_VALUES = ("pack_weight", "unpack_weight", "dequant_weight")


@contextmanager
def weight_kernels() -> Iterator[list[KernelSource]]:
    """Note the kernels of Humming's weight ops, which its schemas call on CPU tensors. Inside `standing_in` only.

    Results have the right shapes, and of the ops in `_WITH_VALUES` the right values.
    """

    class OnGpu(torch.Tensor):
        """A CPU tensor that Humming's weight ops take for one of a GPU."""

        is_cuda = property(lambda self: True)

    def noted(name: str) -> Callable[..., Any]:
        cuda_op = getattr(module, name)
        cpu_op = getattr(ops, name)

        def op(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = cuda_op(inputs.as_subclass(OnGpu), *args, **kwargs)
            return cpu_op(inputs, *args, **kwargs) if name in _WITH_VALUES else result

        return op

    ops = humming().ops
    module = weight_ops()
    found: list[KernelSource] = []
    with ExitStack() as stack:
        for name in [name for name in vars(module) if name.endswith("Kernel")]:
            kernel = recorder(getattr(module, name), found)
            silent = type(name, (kernel,), {"__call__": lambda self, *args, **kwargs: None})
            stack.enter_context(patch.object(module, name, silent))
        for name in (*_WITH_VALUES, "repack_weight", "process_mxfp4_w4a8_weight", "quant_weight"):
            stack.enter_context(patch.object(ops, name, noted(name)))
        yield found


if __name__ == "__main__":
    main()
