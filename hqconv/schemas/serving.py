"""How a server is started with an artifact, and which artifacts vLLM 0.33 has no start for."""

from __future__ import annotations

import shlex

from hqconv.schemas.artifact import KERNEL
from hqconv.schemas.grid import LINEAR, Grid
from hqconv.schemas.kernel import KernelKind

_WEIGHS_INPUTS = ("llama4",)


def why_no_server(kind: KernelKind) -> str | None:
    """What is known to keep every server from computing with such weights, whatever loads them; None for nothing.

    docs/kernels.md: e5m2 codes of up to 57344 are summed before the scale is applied.
    """
    if kind.schema.b_dtype != "float8e5m2" or kind.a_dtype != "float16":
        return None
    return f"Humming's kernel overflows on '{kind.schema.name}' with float16 and gives NaN; use --dtype bfloat16."


def serve_options(grid: Grid) -> str | None:
    """vLLM's options for a grid, or None where it has none: with expert parallelism its MoE layers have one TP rank."""
    if grid.redundant or (grid.tp > 1 and grid.ep > 1):
        return None
    if grid.ep == 1:
        return f"--tensor-parallel-size {grid.tp}" if grid.tp > 1 else ""
    placement = "" if grid.placement == LINEAR else f" --expert-placement-strategy {grid.placement}"
    return f"--tensor-parallel-size {grid.ep} --enable-expert-parallel{placement}"


def serve_command(out: str, layout: str, grid: Grid) -> str | None:
    """The command line that serves an artifact, or None where vLLM cannot; of the checkpoint layout on any ranks."""
    options = serve_options(grid) if layout == KERNEL else ""
    return None if options is None else f"vllm serve {shlex.quote(out)} {options}".rstrip()


def serving_obstacles(family: str, grid: Grid) -> list[str]:
    """Why vLLM 0.33 will not serve a kernel artifact of this family and grid, each reason a sentence's second half."""
    found = []
    if grid.redundant:
        found.append("it has no redundant experts for Humming")
    if grid.tp > 1 and grid.ep > 1:
        found.append(
            "with expert parallelism its MoE layers are not cut for tensor parallel ranks: use --tp 1"
        )
    if family in _WEIGHS_INPUTS:
        found.append(f"'{family}' weighs the experts' inputs, which its Humming layers do not")
    return found
