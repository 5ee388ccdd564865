"""GPU facts that Humming's tuning depends on, for GPUs that are not in this machine; loads no torch.

No fact can make a kernel wrong: a server finds a kernel by its whole source, which contains the tuning. A fact that
differs from the server's GPU only yields kernels that the server does not request, and it compiles others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace

from hqconv.errors import RequestError, close_to
from hqconv.kernel_layout.kernel_sources import current_device
from hqconv.schemas.gpu_target import GPUS, gpu_named
from hqconv.schemas.untrusted_files import read_json

# Of an architecture: FP16 tensor core operations per SM and clock, threads per SM, bytes of shared memory that a block
# may ask for, and KiB of L1. As `csrc/device_info.cpp` of Humming 0.1.19 has them, and CUDA's programming guide.
_ARCHITECTURES = {
    75: (1024, 1024, 65536, 96),
    80: (2048, 2048, 166912, 192),
    86: (1024, 1536, 101376, 128),
    89: (1024, 1536, 101376, 128),
    90: (4096, 2048, 232448, 256),
    100: (8192, 2048, 232448, 256),
    103: (8192, 2048, 232448, 256),
    120: (1024, 1536, 101376, 128),
    121: (1024, 1536, 101376, 128),
}
# Tensor core throughput over that of FP16, and the first architecture that has it; in `device_info.cpp`, too.
_RATIOS = {
    "float16": (1, 75),
    "bfloat16": (1, 80),
    "float8e3m4": (2, 100),
    "float8e4m3": (2, 89),
    "float8e5m2": (2, 89),
    "float6e2m3": (2, 100),
    "float6e3m2": (2, 100),
    "float4e0m3": (4, 100),
    "float4e2m1": (4, 100),
    "int8": (2, 75),
    "int4": (4, 75),
}
_HALF_RATE_FLOATS = (75, 86, 89)
_REGISTERS_PER_SM = 65536
_THREADS_PER_BLOCK = 1024
_SMEM_PER_BLOCK = 49152


@dataclass(frozen=True)
class Gpu:
    """GPU model as CUDA's driver reports it. Clocks in kHz, the memory bus in bits, the cache in bytes."""

    name: str
    sm_version: int
    sm_count: int
    sm_clock_khz: int
    memory_clock_khz: int
    memory_bus_width: int
    l2_cache_size: int

    def facts(self) -> SimpleNamespace:
        """Attributes of Humming's `DeviceInfo` of that GPU, computed as in its `csrc/device_info.cpp`."""
        operations, threads, smem, l1_kib = _ARCHITECTURES[self.sm_version]
        tops = self.sm_count * operations * self.sm_clock_khz / 1e9
        slow = 2 if self.sm_version in _HALF_RATE_FLOATS else 1
        major, minor = divmod(self.sm_version, 10)
        return SimpleNamespace(
            **asdict(self),
            index=0,
            is_ppu=False,
            sm_major=major,
            sm_minor=minor,
            max_threads_per_block=_THREADS_PER_BLOCK,
            max_threads_per_sm=threads,
            max_registers_per_sm=_REGISTERS_PER_SM,
            l2_cache_size_mb=self.l2_cache_size / 2**20,
            l1_cache_size=l1_kib << 10,
            l1_cache_size_kb=float(l1_kib),
            default_smem_size=_SMEM_PER_BLOCK,
            max_smem_size=smem,
            max_smem_size_kb=smem / 2**10,
            memory_bandwidth_gbps=self.memory_clock_khz * 2 * self.memory_bus_width / 8.0 / 1e6,
            tensorcore_tops={
                name: tops * ratio / (1 if name.startswith("int") else slow)
                for name, (ratio, first) in _RATIOS.items()
                if self.sm_version >= first
            },
        )


# The figures are those of the vendor and of devices that were present once; no script compares them any more.
KNOWN = {
    name: Gpu(model.driver_name, model.sm_version, *model.figures[:4], model.figures[4] << 20)
    for name, model in GPUS.items()
    if model.figures is not None
}
_OWN_FACTS = "`python -m hqconv.warm.gpus > gpu.json` on the server writes its GPU's figures: --gpu gpu.json."


def choose_gpu(text: str | None, sm_version: int | None) -> Gpu:
    """Return the GPU of `--gpu`: a name of `GPUS`, a JSON file of facts, or None for the GPU of this machine.

    Raises RequestError if there is none, its figures are not known, or it is not of the target `sm_version`, where one
    is given.
    """
    fitting = [name for name, gpu in KNOWN.items() if sm_version in (None, gpu.sm_version)]
    expected = f"{', '.join(fitting)}, or a JSON file of facts"
    name = None if text is None else gpu_named(text)
    if text is None:
        gpu = _gpu_here(expected)
    elif name is None:
        gpu = _read_gpu(Path(text), expected)
    elif name in KNOWN:
        gpu = KNOWN[name]
    else:
        raise RequestError(
            "The figures of this GPU are not known to hqconv.",
            where="--gpu",
            expected=expected,
            found=name,
            remedy=_OWN_FACTS,
        )
    if sm_version not in (None, gpu.sm_version):
        raise RequestError(
            "The artifact is for another GPU architecture.",
            where="--gpu",
            expected=f"a GPU of sm{sm_version}: {expected}",
            found=f"{gpu.name}, sm{gpu.sm_version}",
        )
    return gpu


def _gpu_here(expected: str) -> Gpu:
    try:
        return facts_here()
    except Exception as error:  # no driver, no GPU: ImportError, RuntimeError … of a C extension
        raise RequestError(
            "There is no GPU here to compile for.",
            where="--gpu",
            expected=expected,
            remedy=f"Name the server's GPU with --gpu. {_OWN_FACTS}",
        ) from error


def facts_here() -> Gpu:
    """Current CUDA device, as Humming sees it. Raises the errors of Humming's extension if there is none."""
    device = current_device()
    return Gpu(**{field.name: getattr(device, field.name) for field in fields(Gpu)})


def _read_gpu(path: Path, expected: str) -> Gpu:
    try:
        document = read_json(path)
        gpu = Gpu(**{field.name: document[field.name] for field in fields(Gpu)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            "There is no such GPU.",
            where="--gpu",
            expected=expected,
            found=f"{path} ({type(error).__name__}: {error})",
            remedy=f"{close_to(str(path).lower(), KNOWN)} {_OWN_FACTS}".strip(),
        ) from error
    numbers = [value for name, value in asdict(gpu).items() if name != "name"]
    are_positive = all(type(value) is int and value > 0 for value in numbers)
    if not are_positive or gpu.sm_version not in _ARCHITECTURES:
        raise RequestError(
            "A file of GPU facts makes no sense.",
            where=path,
            expected=f"positive numbers, sm of {[*_ARCHITECTURES]}",
            found=numbers,
        )
    return gpu


if __name__ == "__main__":
    print(json.dumps(asdict(facts_here()), indent=2))
