"""The serving GPU: its architecture, and its CUDA compiler where a layout depends on it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hqconv.errors import RequestError

# SM versions whose kernel layouts are known: T4, A100, A10 and RTX 30, L40S and RTX 40, H100 and H200, B200, B300,
# RTX 50 and RTX PRO 6000, DGX Spark. Humming knows others (87, 107, 110), which are not tested here.
TARGETS = (75, 80, 86, 89, 90, 100, 103, 120, 121)


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
    """Parse `sm75` … `sm121` and, if given, `13.0`. Raises RequestError for anything else."""
    match = re.fullmatch(r"sm(\d{2,3})", str(text))
    if match is None or int(match[1]) not in TARGETS:
        remedy = f"Write sm{text}." if re.fullmatch(r"\d{2,3}", str(text)) else "An H100 or H200 is sm90."
        what, known = ("The target is not a GPU architecture that is known.", ", ".join(f"sm{n}" for n in TARGETS))
        raise RequestError(what, where="--target", expected=known, found=text, remedy=remedy)
    return GpuTarget(int(match[1]), None if cuda is None else parse_cuda(cuda))


def parse_cuda(text: str) -> tuple[int, int]:
    """Parse major and minor version of `13.0`. Raises RequestError for anything else."""
    match = re.fullmatch(r"(\d{1,2})\.(\d{1,2})", str(text))
    if match is None:
        what, expected = ("The CUDA version is not one.", "such as 13.0: of the compiler on the serving machine")
        raise RequestError(what, where="--cuda", expected=expected, found=text, remedy="`nvcc --version` says it.")
    return int(match[1]), int(match[2])
