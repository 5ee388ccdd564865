"""GPU facts that Humming's tuning depends on, for GPUs that are not in this machine; loads no torch.

No fact can make a kernel wrong: a server finds a kernel by its whole source, which contains the tuning. A fact that
differs from the server's GPU only yields kernels that the server does not request, and it compiles others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hqconv.errors import RequestError
from hqconv.humming_layout.kernel_sources import current_device

# Of an architecture: FP16 tensor core operations per SM and clock, threads per SM, bytes of shared memory that a block
# may ask for, and of L1. As `csrc/device_info.cpp` of Humming 0.1.19 has them, and CUDA's programming guide.
_ARCHITECTURES = {90: (4096, 2048, 232448, 256 << 10)}
# Tensor core throughput over that of FP16, on sm90.
_RATIOS = {"float16": 1, "bfloat16": 1, "float8e4m3": 2, "float8e5m2": 2, "int8": 2, "int4": 4}
_REGISTERS_PER_SM, _THREADS_PER_BLOCK, _SMEM_PER_BLOCK = 65536, 1024, 49152


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

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def facts(self) -> SimpleNamespace:
        """Attributes of Humming's `DeviceInfo` of that GPU, computed as in its `csrc/device_info.cpp`."""
        operations, threads, smem, l1 = _ARCHITECTURES[self.sm_version]
        tops = self.sm_count * operations * self.sm_clock_khz / 1e9
        major, minor = divmod(self.sm_version, 10)
        return SimpleNamespace(
            **self.to_dict(),
            index=0,
            is_ppu=False,
            sm_major=major,
            sm_minor=minor,
            max_threads_per_block=_THREADS_PER_BLOCK,
            max_threads_per_sm=threads,
            max_registers_per_sm=_REGISTERS_PER_SM,
            l2_cache_size_mb=self.l2_cache_size / 2**20,
            l1_cache_size=l1,
            l1_cache_size_kb=l1 / 2**10,
            default_smem_size=_SMEM_PER_BLOCK,
            max_smem_size=smem,
            max_smem_size_kb=smem / 2**10,
            memory_bandwidth_gbps=self.memory_clock_khz * 2 * self.memory_bus_width / 8.0 / 1e6,
            tensorcore_tops={name: tops * ratio for name, ratio in _RATIOS.items()},
        )


# Nominal figures of the makers' data sheets. `scripts/check_warm.py` compares them with a GPU that is present.
KNOWN = {
    "h200": Gpu("NVIDIA H200", 90, 132, 1980000, 3201000, 6144, 60 << 20),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 90, 132, 1980000, 2619000, 5120, 50 << 20),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 90, 114, 1755000, 1593000, 5120, 50 << 20),
    "h20": Gpu("NVIDIA H20", 90, 78, 1980000, 2619000, 6144, 60 << 20),
}


def choose_gpu(text: str | None, sm_version: int) -> Gpu:
    """Return the GPU of `--gpu`: a known name, a JSON file of facts, or None for the GPU of this machine.

    Raises RequestError if there is none, or it is not of the target `sm_version`.
    """
    gpu = _here(sm_version) if text is None else KNOWN.get(text.lower()) or _read(Path(text))
    if gpu.sm_version != sm_version:
        what, expected = "The artifact is for another GPU architecture.", f"a GPU of sm{sm_version}"
        raise RequestError(what, where="--gpu", expected=expected, found=f"{gpu.name}, sm{gpu.sm_version}")
    return gpu


def _here(sm_version: int) -> Gpu:
    """Facts of this machine's GPU."""
    try:
        return facts_here()
    except Exception as error:  # no driver, no GPU: ImportError, RuntimeError … of a C extension
        raise RequestError(
            "There is no GPU here to compile for.",
            where="--gpu",
            expected=f"one of {', '.join(n for n, g in KNOWN.items() if g.sm_version == sm_version)}",
            remedy="Name the server's GPU, or give a file that `python -m hqconv.serving.warm.gpus` wrote there.",
        ) from error


def facts_here() -> Gpu:
    """Current CUDA device, as Humming sees it. Raises the errors of Humming's extension if there is none."""
    device = current_device()
    return Gpu(**{field.name: getattr(device, field.name) for field in fields(Gpu)})


def _read(path: Path) -> Gpu:
    known = f"one of {', '.join(KNOWN)}, or a JSON file of facts"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        gpu = Gpu(**{field.name: document[field.name] for field in fields(Gpu)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        what, found = "There is no such GPU.", f"{path} ({type(error).__name__}: {error})"
        remedy = "Write the facts with `python -m hqconv.serving.warm.gpus` on a machine that has the GPU."
        raise RequestError(what, where="--gpu", expected=known, found=found, remedy=remedy) from error
    numbers = [value for name, value in gpu.to_dict().items() if name != "name"]
    if not all(type(value) is int and value > 0 for value in numbers) or gpu.sm_version not in _ARCHITECTURES:
        what, expected = "A file of GPU facts makes no sense.", f"positive numbers, sm of {[*_ARCHITECTURES]}"
        raise RequestError(what, where=str(path), expected=expected, found=numbers)
    return gpu


if __name__ == "__main__":
    print(json.dumps(facts_here().to_dict(), indent=2))
