"""Values of command options: sizes, targets, devices, folders. torch is loaded only where a device is chosen."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.errors import OutputError, RequestError, plural
from hqconv.schemas.artifact_names import CHECKPOINT, KERNEL
from hqconv.schemas.gpu_target import GpuTarget, parse_target
from hqconv.schemas.grid import EVEN
from hqconv.schemas.options import RunOptions
from hqconv.schemas.weight_schema import SOURCE
from hqconv.sources.opening import own_target

if TYPE_CHECKING:
    from hqconv.conversion.hub_prefetch import CachePolicy
    from hqconv.conversion.resources import Resources
    from hqconv.models.source_protocol import Source
    from hqconv.planning.plan import ConversionPlan
    from hqconv.planning.spec import ConversionOptions

_LOG = logging.getLogger(__name__)

_PATHFINDER = "cuda.pathfinder"  # with which Humming looks for its compiler
# The target of a machine without a GPU and of the checkpoint layout, whose bytes depend on none; no name of a folder
# has it.
USUAL_TARGET = "sm90"


def parse_bytes(size: str | int, option: str) -> int:
    """Parse `512MiB`, `4GiB`, `2GB`, `1.5G` (as GiB) or plain bytes. Raises RequestError for anything else."""
    match = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])(i?))?(B?)", str(size).strip(), re.IGNORECASE
    )
    if match is None or not float(match[1]):
        raise RequestError(
            "The option's value is not a size.",
            where=option,
            expected="such as 512MiB, 4GiB, 2GB or a number of bytes",
            found=size,
        )
    number, prefix, binary, unit = match.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1000 if unit and not binary else 1024) ** power)


def choose_device(text: str, number: int = 0) -> str:
    """Resolve `--device`: auto, cpu, cuda or cuda:N → cpu or cuda:N. Raises RequestError for a missing device.

    number: of this process among the processes that share the machine's GPUs, for auto and cuda.
    """
    text = str(text)  # a torch.device too
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", text)
    if match is None:
        raise RequestError(
            "There is no such device.",
            where="--device",
            expected="auto, cuda, cuda:N or cpu",
            found=text,
        )
    num_devices = 0 if text == "cpu" else _num_gpus()
    if text == "cpu" or (text == "auto" and not num_devices):
        return "cpu"
    index = int(match[1]) if match[1] else number % max(1, num_devices)
    if index >= num_devices:
        raise RequestError(
            "There is no such CUDA device.",
            where=f"--device {text}",
            expected=f"one of {plural(num_devices, 'CUDA device')}",
            remedy="Use --device cpu: without --calibrate the bytes are the same.",
        )
    return f"cuda:{index}"


def start_gpu(device: str, *, is_part: bool = False) -> None:
    """Load torch, and in a thread create the CUDA context of the chosen GPU.

    Whatever fails is left to the first use. Nothing is loaded where there is no CUDA driver.
    """
    if str(device) == "cpu" or not has_driver():
        return
    with suppress(RequestError):
        name = choose_device(device, local_rank()[0] if is_part else 0)  # loads torch
        if name != "cpu":
            threading.Thread(
                target=_create_context, args=(name,), name="hqconv-start", daemon=True
            ).start()


def _create_context(name: str) -> None:
    import torch

    with suppress(RuntimeError):
        torch.cuda.synchronize(name)
    with suppress(ImportError):
        importlib.import_module(_PATHFINDER)


def has_driver() -> bool:
    """Return whether a CUDA driver is installed; without one torch need not be loaded to look for a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _num_gpus() -> int:
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_target(options: ConversionOptions, source: Source, device: str) -> GpuTarget:
    """Return the target of `--target` and `--cuda`, with `--schema source` an artifact's own, or the GPU `device`.

    Without any of them it is sm90, and a warning is logged. The checkpoint layout does not depend on the target.
    """
    target = options.target
    cuda = options.cuda
    if target is None and options.layout == CHECKPOINT:
        return parse_target(USUAL_TARGET)  # only to ask Humming whether a schema runs at all
    if target is None and options.schema is None and (own := own_target(source)) is not None:
        if cuda is None:
            return own
        target = own.name
    if target is None and _num_gpus():
        import torch

        major, minor = torch.cuda.get_device_capability(int(device.partition(":")[2] or 0))
        target = f"sm{major * 10 + minor}"
    if target is None:
        target = USUAL_TARGET
        _LOG.warning(
            "Target sm90 (H100, H200), since this machine has no GPU; choose another with --target, e.g. --target l40s."
        )
    return parse_target(target, cuda)


def place_of(planned: ConversionPlan, out: str | Path | None) -> Path:
    """Return `out`, or `./<model>-<schema>[-<recipe>][-tpT][-groups][-epP]` with the unusual options: layout, …

    Usual are the kernel layout for sm90, bfloat16 parameters and activations of 16 bits.
    """
    if out is not None:
        return Path(out)
    spec = planned.spec
    grid = planned.spec.grid
    inputs = spec.inputs.name
    is_kernel = spec.layout == KERNEL
    name = f"{planned.source.name}-{SOURCE if spec.must_be_direct else spec.schema.name}"
    details = {
        planned.overridden_by: planned.overridden_by != "",
        f"tp{grid.tp}": grid.tp > 1,
        grid.split: grid.split != EVEN,
        f"ep{grid.ep}": grid.ep > 1,
        CHECKPOINT: not is_kernel,
        **dict.fromkeys(spec.encoding.name_parts(), True),
        f"act-{inputs}": inputs != "a16",
        f"dense-{'-'.join(schema.name for schema in spec.dense.used)}": bool(spec.dense),
        spec.target.name: is_kernel and spec.target.name != USUAL_TARGET,
        f"cuda{spec.target.cuda_name}": is_kernel and spec.target.cuda_name is not None,
        spec.param_dtype: spec.param_dtype != "bfloat16",
    }
    return Path("-".join([name, *(detail for detail, is_unusual in details.items() if is_unusual)]))


def check_places(source_folder: Path, out: Path) -> Path:
    """Return `out`, if neither folder lies in the other: a later run would mix them up. Raises OutputError.

    So does a path that no folder can have: links in a circle, a zero byte, too long a name for the folder beside it.
    """
    from hqconv.conversion.output_folder import side_folder

    source = source_folder.resolve()
    try:
        target = out.resolve()
        side_folder(target).exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise OutputError(
            "The output folder cannot have this path.",
            where=out,
            found=error,
            remedy="Choose another with -o.",
        ) from error
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise OutputError(
            "The output would lie in the source, or the source in it.",
            where=out,
            expected=f"a folder outside of {source_folder}",
            remedy="Choose another with -o.",
        )
    return out


def cache_policy(run: RunOptions) -> CachePolicy:
    """Return the limits for the Hub's cache."""
    from hqconv.conversion.hub_prefetch import CachePolicy

    limit = None if run.cache_limit is None else parse_bytes(run.cache_limit, "--cache-limit")
    return CachePolicy(limit, run.keep_source)


def resources_of(run: RunOptions) -> Resources:
    """Return the resource limits; each of torchrun's parts has its own GPU, and its share of the processors."""
    from hqconv.conversion.resources import Resources, default_threads

    rank, num_here = local_rank() if run.part else (0, 1)
    gpu_bytes = None
    if run.max_gpu_memory is not None:
        gpu_bytes = parse_bytes(run.max_gpu_memory, "--max-gpu-memory")
    found = Resources(
        choose_device(run.device, rank),
        parse_bytes(run.max_memory, "--max-memory"),
        run.threads or max(1, default_threads() // num_here),
        gpu_bytes,
    )
    _LOG.info(
        "Device %s, %s, at most %d bytes of host memory for experts.",
        found.device_name,
        plural(found.num_threads, "thread"),
        found.max_memory_bytes,
    )
    return found


def torchrun_part() -> str | None:
    """Return the part of a process that torchrun started beside others; schedulers set RANK and others anywhere."""
    if not os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    return f"{torchrun_rank() + 1}/{os.environ['WORLD_SIZE']}"


def torchrun_rank() -> int:
    """Return the rank of a process that torchrun started; 0 of any other."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("TORCHELASTIC_RUN_ID") else 0


def local_rank() -> tuple[int, int]:
    """Return this process's rank on its machine, and the number of torchrun's processes there: 0 and 1 without it."""
    if torchrun_part() is None:
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), max(
        1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
