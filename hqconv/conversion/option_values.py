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
from hqconv.schemas import artifact_names
from hqconv.schemas.gpu_target import COMPUTE_CAPABILITY, GpuTarget, known_gpus, parse_target
from hqconv.schemas.grid import EVEN
from hqconv.schemas.weight_schema import SOURCE
from hqconv.sources.opening import own_target

if TYPE_CHECKING:
    from hqconv.conversion.hub_prefetch import CachePolicy
    from hqconv.conversion.resources import Resources
    from hqconv.models.source_protocol import Source
    from hqconv.planning.plan import ConversionPlan
    from hqconv.planning.spec import ConversionOptions, ConversionSpec

_LOG = logging.getLogger(__name__)


_MAX_NAME = 240  # of 255 bytes; the folders beside an output have longer names
_PATHFINDER = "cuda.pathfinder"  # with which Humming looks for its compiler
_USUAL_SM = 90  # left out of folder names
_CHECKPOINT_LAYOUT_TARGET = GpuTarget(90)  # only to ask Humming whether a schema runs at all


def parse_bytes(size: str | int, option: str = "--max-memory") -> int:
    """Parse `512MiB`, `4GiB`, `2GB`, `1.5G` (as GiB) or plain bytes. Raises RequestError for anything else."""
    match = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(i?)(B?)", str(size).strip(), re.IGNORECASE
    )
    if match is None or (match[3] and not match[2]) or not float(match[1]):
        raise RequestError(
            "The option's value is not a size.",
            where=option,
            expected="such as 512MiB, 4GiB, 2GB or a number of bytes",
            found=size,
        )
    number, prefix, binary, unit = match[1], match[2].upper(), match[3], match[4]
    power = " KMGT".index(prefix) if prefix else 0
    return int(float(number) * (1000 if unit and not binary else 1024) ** power)


def choose_device(text: str, number: int = 0) -> str:
    """Resolve `--device`: auto, cpu, cuda or cuda:N → cpu or cuda:N. Raises RequestError for a missing device.

    number: of this process among the processes that share the machine's GPUs, for auto and cuda.
    """
    text = str(text)  # a torch.device too
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", text)
    if match is None:
        expected = "auto, cuda, cuda:N or cpu"
        raise RequestError(
            "There is no such device.", where="--device", expected=expected, found=text
        )
    num_devices = 0 if text == "cpu" else _num_gpus()
    if text == "cpu" or (text == "auto" and not num_devices):
        return "cpu"
    index = int(match[1]) if match[1] else number % max(1, num_devices)
    if index >= num_devices:
        what, expected = (
            "There is no such CUDA device.",
            f"one of {plural(num_devices, 'CUDA device')}",
        )
        remedy = "Use --device cpu: without --calibrate the bytes are the same."
        raise RequestError(what, where=f"--device {text}", expected=expected, remedy=remedy)
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

    Raises RequestError if there is none. The checkpoint layout does not depend on the target.
    """
    cuda = options.cuda
    if options.target is not None:
        return parse_target(options.target, cuda)
    if options.layout == artifact_names.CHECKPOINT:
        return _CHECKPOINT_LAYOUT_TARGET
    if options.schema is None and (own := own_target(source)) is not None:
        return own if cuda is None else parse_target(own.name, cuda)
    if _num_gpus():
        import torch

        major, minor = torch.cuda.get_device_capability(int(device.partition(":")[2] or 0))
        return parse_target(f"sm{major * 10 + minor}", cuda)
    raise RequestError(
        "The target GPU must be named.",
        where="--target",
        expected=f"the GPU that will serve, by its name or architecture: {known_gpus()}",
        found="no option, and no CUDA device here to take it from",
        remedy=f"Add for example --target h100 or --target sm90. Of another GPU, `{COMPUTE_CAPABILITY}` shows the "
        "architecture: 9.0 is sm90.",
    )


def default_out(name: str, schema: str, spec: ConversionSpec, overridden_by: str = "") -> Path:
    """Return `./<model>-<schema>[-<recipe>][-tpT][-groups][-epP]` with unusual options: layout, …

    Usual are the kernel layout for sm90, bfloat16 parameters and activations of 16 bits. overridden_by: see
    `ConversionPlan`.
    """
    grid, inputs, is_kernel = spec.grid, spec.inputs.name, spec.layout == artifact_names.KERNEL
    parts = {
        overridden_by: overridden_by != "",
        f"tp{grid.tp}": is_kernel and grid.tp > 1,
        grid.split: is_kernel and grid.split != EVEN,
        f"ep{grid.ep}": is_kernel and grid.ep > 1,
        artifact_names.CHECKPOINT: not is_kernel,
        **dict.fromkeys(spec.encoding.name_parts(), True),
        f"act-{inputs}": inputs != "a16",
        spec.target.name: is_kernel and spec.target.sm_version != _USUAL_SM,
        f"cuda{spec.target.cuda_name}": is_kernel and spec.target.cuda_name is not None,
        spec.param_dtype: spec.param_dtype != "bfloat16",
    }
    return Path("-".join([name, schema, *(part for part, is_said in parts.items() if is_said)]))


def check_modes(*, resume: bool, overwrite: bool, update: bool = False, part: bool = False) -> None:
    """Raise RequestError for two modes that exclude each other. A part always resumes."""
    given = [
        f"--{name}"
        for name, is_given in locals().items()
        if is_given and not (name == "resume" and part)
    ]
    if len(given) > 1:
        remedy = "Give one of them."
        if part:  # nobody could tell which part begins, or whose artifact is replaced
            remedy = "Convert to another folder, or without --part."
        raise RequestError(f"{given[0]} and {given[1]} exclude each other.", remedy=remedy)


def check_places(source_folder: Path, out: Path) -> Path:
    """Return `out`, if neither folder lies in the other: a later run would mix them up. Raises OutputError."""
    try:
        source, target = source_folder.resolve(), out.resolve()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a circle of links, a name that no file can have
        raise OutputError(
            "The output's path cannot be used.",
            where=repr(str(out)),
            found=error,
            remedy="Choose another with -o.",
        ) from error
    if len(os.fsencode(target.name)) > _MAX_NAME:
        raise OutputError(
            "The output's name is too long.",
            where=str(out),
            expected=f"at most {_MAX_NAME} bytes",
            found=len(os.fsencode(target.name)),
        )
    if target.is_relative_to(source) or source.is_relative_to(target):
        what, remedy = (
            "The output would lie in the source, or the source in it.",
            "Choose another with -o.",
        )
        expected = f"a folder outside of {source_folder}"
        raise OutputError(what, where=str(out), expected=expected, remedy=remedy)
    return out


def place_of(planned: ConversionPlan, out: str | Path | None) -> Path:
    """Return the artifact's folder: `out`, or a folder named after model and request."""
    if out is not None:
        return Path(out)
    spec = planned.spec
    name = SOURCE if spec.must_be_direct else spec.schema.name
    return default_out(planned.source.name, name, spec, planned.overridden_by)


def cache_use(limit: str | int | None, *, keep_source: bool) -> CachePolicy:
    """Return the limits for the Hub's cache. Raises RequestError for a limit on shards that are kept."""
    from hqconv.conversion.hub_prefetch import CachePolicy

    if limit is not None and keep_source:
        raise RequestError(
            "--cache-limit and --keep-source exclude each other.", remedy="Give one of the two."
        )
    return CachePolicy(None if limit is None else parse_bytes(limit, "--cache-limit"), keep_source)


def resources_of(
    device: str,
    max_memory: str | int,
    max_gpu_memory: str | int | None,
    threads: int | None,
    *,
    is_part: bool = False,
) -> Resources:
    """Return the resource limits; each of torchrun's parts has its own GPU, and its share of the processors."""
    from hqconv.conversion.resources import Resources, default_threads

    number, num_here = local_rank() if is_part else (0, 1)
    gpu_bytes = None if max_gpu_memory is None else parse_bytes(max_gpu_memory, "--max-gpu-memory")
    num_threads = max(1, default_threads() // num_here) if threads is None else threads
    found = Resources(
        choose_device(device, number), parse_bytes(max_memory), num_threads, gpu_bytes
    )
    limits = f"{found.max_memory_bytes} bytes of host memory"
    _LOG.info(
        "Device %s, %s, at most %s for experts.",
        found.device_name,
        plural(num_threads, "thread"),
        limits,
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
