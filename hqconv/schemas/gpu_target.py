"""The serving GPU: models by name, architectures, and the CUDA compiler where a layout depends on it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hqconv.errors import RequestError, close_to
from hqconv.schemas.weight_schema import RECOMMENDED

# SM versions whose kernel layouts are known. Humming knows others (87, 107, 110), which are not tested here.
TARGETS = (75, 80, 86, 89, 90, 100, 103, 120, 121)
COMPUTE_CAPABILITY = "nvidia-smi --query-gpu=name,compute_cap --format=csv"


@dataclass(frozen=True)
class GpuModel:
    """A GPU model: architecture, and the name that CUDA's driver reports.

    figures: number of SMs, boost clock and memory clock in kHz, width of the memory bus in bits, L2 cache in MiB. They
    are nominal values; only those of the H200 were compared with a device. None where they are not known here.
    """

    sm_version: int
    driver_name: str
    figures: tuple[int, int, int, int, int] | None = None


# Values of `--target` and of `warm --gpu`.
GPUS = {
    "t4": GpuModel(75, "Tesla T4", (40, 1590000, 5001000, 256, 4)),
    "a100": GpuModel(80, "NVIDIA A100-SXM4-80GB", (108, 1410000, 1593000, 5120, 40)),
    "a100-40gb": GpuModel(80, "NVIDIA A100-SXM4-40GB", (108, 1410000, 1215000, 5120, 40)),
    "a100-pcie": GpuModel(80, "NVIDIA A100 80GB PCIe", (108, 1410000, 1512000, 5120, 40)),
    "a800": GpuModel(80, "NVIDIA A800-SXM4-80GB"),
    "a30": GpuModel(80, "NVIDIA A30", (56, 1440000, 1215000, 3072, 24)),
    "a10": GpuModel(86, "NVIDIA A10", (72, 1695000, 6251000, 384, 6)),
    "a10g": GpuModel(86, "NVIDIA A10G"),
    "a40": GpuModel(86, "NVIDIA A40", (84, 1740000, 7251000, 384, 6)),
    "rtx-a6000": GpuModel(86, "NVIDIA RTX A6000", (84, 1800000, 8001000, 384, 6)),
    "rtx-3090": GpuModel(86, "NVIDIA GeForce RTX 3090", (82, 1695000, 9751000, 384, 6)),
    "l4": GpuModel(89, "NVIDIA L4", (58, 2040000, 6251000, 192, 48)),
    "l40": GpuModel(89, "NVIDIA L40", (142, 2490000, 9001000, 384, 96)),
    "l40s": GpuModel(89, "NVIDIA L40S", (142, 2520000, 9001000, 384, 96)),
    "l20": GpuModel(89, "NVIDIA L20"),
    "rtx-6000-ada": GpuModel(89, "NVIDIA RTX 6000 Ada Generation"),
    "rtx-4090": GpuModel(89, "NVIDIA GeForce RTX 4090", (128, 2520000, 10501000, 384, 72)),
    "h100": GpuModel(90, "NVIDIA H100 80GB HBM3", (132, 1980000, 2619000, 5120, 50)),
    "h100-pcie": GpuModel(90, "NVIDIA H100 PCIe", (114, 1755000, 1593000, 5120, 50)),
    "h100-nvl": GpuModel(90, "NVIDIA H100 NVL"),
    "h800": GpuModel(90, "NVIDIA H800"),
    "h20": GpuModel(90, "NVIDIA H20", (78, 1980000, 2619000, 6144, 60)),
    "h200": GpuModel(90, "NVIDIA H200", (132, 1980000, 3201000, 6144, 60)),
    "gh200": GpuModel(90, "NVIDIA GH200 480GB"),
    "b200": GpuModel(100, "NVIDIA B200", (148, 1965000, 3996000, 7680, 126)),
    "gb200": GpuModel(100, "NVIDIA GB200", (152, 2062000, 3996000, 8192, 126)),
    "b300": GpuModel(103, "NVIDIA B300 SXM6 AC"),
    "gb300": GpuModel(103, "NVIDIA GB300"),
    "rtx-5090": GpuModel(120, "NVIDIA GeForce RTX 5090", (170, 2407000, 14001000, 512, 96)),
    "rtx-pro-6000": GpuModel(
        120, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (188, 2617000, 14001000, 512, 128)
    ),
    "rtx-pro-6000-server": GpuModel(120, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    "dgx-spark": GpuModel(121, "NVIDIA GB10"),
}
# Other names that people write.
_ALSO = {
    "rtx-6000-pro": "rtx-pro-6000",
    "gb10": "dgx-spark",
    "a6000": "rtx-a6000",
    "a100-80gb": "a100",
}
_ARCHITECTURE = re.compile(r"(?:(?:sm|compute)[_-]?)?(?:(\d{2,3})|(\d{1,2})\.(\d))[af]?")


def gpu_named(text: str) -> str | None:
    """Return the name in `GPUS` of `H100`, `NVIDIA H200`, `RTX 4090` or the driver's own name; None for others."""
    names = {_plain(name): name for name in GPUS}
    names |= {_plain(also): name for also, name in _ALSO.items()}
    drivers = {_plain(gpu.driver_name): name for name, gpu in GPUS.items()}
    return {**drivers, **names}.get(_plain(text))


def _plain(name: str) -> str:
    """Return a GPU's name without its maker, form factor, spaces and hyphens."""
    dropped = ("nvidia", "geforce", "tesla", "sxm", "sxm2", "sxm4", "sxm5", "sxm6", "hbm3")
    components = re.split(r"[\s_-]+", name.strip().lower())
    return "".join(component for component in components if component not in dropped)


def known_gpus() -> str:
    """Return the names of all GPUs by architecture, for messages: `t4 (sm75); a100, a30 (sm80); …`."""
    texts = []
    for sm_version in TARGETS:
        names = [name for name, gpu in GPUS.items() if gpu.sm_version == sm_version]
        texts.append(f"{', '.join(names)} (sm{sm_version})")
    return "; ".join(texts)


@dataclass(frozen=True)
class GpuTarget:
    """A GPU architecture, 90 of sm90, and the version of the serving CUDA compiler, (13, 0), where it is known.

    cuda: decides whether Humming has the GPU convert small floats itself (`use_native_dequant`), and so the order of
    codes in a word; on most targets nothing.
    """

    sm_version: int
    cuda: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The value of `--target`: sm90."""
        return f"sm{self.sm_version}"

    @property
    def cuda_name(self) -> str | None:
        """The value of `--cuda`: 13.0."""
        return None if self.cuda is None else ".".join(map(str, self.cuda))

    def __str__(self) -> str:
        """Format for people."""
        return self.name if self.cuda is None else f"{self.name}, CUDA {self.cuda_name}"


def parse_target(text: str, cuda: str | None = None) -> GpuTarget:
    """Parse a GPU's name (`h200`), or its architecture: `sm90`, `SM90`, `sm_90a`, `9.0`; and, if given, CUDA `13.0`.

    Raises RequestError for anything else.
    """
    text = str(text)  # a caller may give a number
    name = gpu_named(text)
    match = _ARCHITECTURE.fullmatch(text.strip().lower())
    number = 0
    if name:
        number = GPUS[name].sm_version
    elif match:
        number = int(match[1] or match[2] + match[3])
    if number in TARGETS:
        return GpuTarget(number, None if cuda is None else parse_cuda(cuda))
    plain = text.strip().lower()
    close = close_to(plain, [name for name in GPUS if name[:1] == plain[:1]])
    raise RequestError(
        "The target is not a GPU architecture that is known.",
        where="--target",
        expected=f"a GPU's name or its architecture: {known_gpus()}",
        found=text,
        remedy=f"{close} Of another GPU, `{COMPUTE_CAPABILITY}` shows the architecture: 9.0 is sm90.".strip(),
    )


def target_of_record(name: str, cuda: str | None = None) -> GpuTarget:
    """Return the target that a manifest records, `sm90` and no other spelling. Raises RequestError."""
    found = parse_target(name, cuda)
    if found.name != name:
        raise RequestError(
            "The target is not a GPU architecture that is known.",
            where="--target",
            expected=found.name,
            found=name,
        )
    return found


def parse_cuda(text: str) -> tuple[int, int]:
    """Parse major and minor version of `13.0`. Raises RequestError for anything else."""
    match = re.fullmatch(r"(\d{1,2})\.(\d{1,2})", str(text))
    if match is None:
        raise RequestError(
            "The CUDA version is not one.",
            where="--cuda",
            expected="such as 13.0: of the compiler on the serving machine",
            found=text,
            remedy="`nvcc --version` says it.",
        )
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class GpuClass:
    """GPUs that take the same schemas: the first of `RECOMMENDED`, but for fp8 activations.

    gpus: names for people. target: one of them, as of `--target`. fp8_schema: the schema with fp8 activations, None
    where they do not run. options: what the target needs besides.
    """

    gpus: str
    target: str
    sm_versions: tuple[int, ...]
    fp8_schema: str | None = None
    options: str = ""

    def command(self, target: str) -> str:
        """Return the command that converts a model for one of the GPUs."""
        command = f"hqconv convert SRC -o OUT --schema {RECOMMENDED[0]} --calibrate TEXT --target {target}"
        return f"{command} {self.options}".rstrip()


_CUDA_13 = "--cuda 13.0"
GPU_CLASSES = (
    GpuClass("H100, H200, H20, GH200", "h100", (90,), "mxfp4"),
    GpuClass("B200, GB200", "b200", (100,), "int4-g32-e4m3", _CUDA_13),
    GpuClass("B300, GB300", "b300", (103,), "int4-g32-e4m3", _CUDA_13),
    GpuClass("RTX 5090, PRO 6000", "rtx-5090", (120, 121), "int4-g32-e4m3", _CUDA_13),
    GpuClass("L4, L40S, RTX 4090", "l40s", (89,), "int4-g32-e4m3"),
    GpuClass("A10, A40, RTX 3090", "a10", (86,)),
    GpuClass("A100, A30", "a100", (80,)),
    GpuClass("T4", "t4", (75,), options="--dtype float16"),
)


def class_of(target: GpuTarget) -> GpuClass:
    """Return the class of a target's GPUs."""
    return next(row for row in GPU_CLASSES if target.sm_version in row.sm_versions)
