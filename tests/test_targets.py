"""docs/targets.md: the table of pairs says where each runs, and its names of GPUs are those that --target takes."""

from __future__ import annotations

import re

import pytest

from hqconv.kernel_layout.transform import why_not
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.input_schema import KernelSpec, resolve_inputs
from hqconv.schemas.weight_schema import PRESETS, resolve_schema
from tests.make.places import REPO

TEXT = (REPO / "docs/targets.md").read_text()
HEAD, _, *ROWS = re.findall(
    r"^\| (.+) \|$", TEXT.partition("## Which pairs run")[2].partition("\n## ")[0], re.MULTILINE
)
PAIRS = {
    cells[0]: dict(zip(HEAD.split(" | ")[1:], cells[1:], strict=True))
    for cells in (r.split(" | ") for r in ROWS)
}


def versions(text: str) -> set[int]:
    """`89+`, `80–89`, `120, 121` or `–` as architectures."""
    found: set[int] = set()
    for part in filter(None, text.replace("–", "-").split(", ")):
        low, _, high = part.removesuffix("+").partition("-")
        last = max(TARGETS) if part.endswith("+") else int(high or low or 0)
        found |= {sm for sm in TARGETS if low and int(low) <= sm <= last}
    return found


def test_every_preset_has_a_row() -> None:
    assert set(PRESETS) <= PAIRS.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_where_pairs_run(name: str) -> None:
    schema = resolve_schema(name)
    for inputs, cell in PAIRS[name].items():
        plain, _, f16 = cell.removesuffix(")").partition(" (f16: ")
        for dtype, told in (("bfloat16", plain), ("float16", f16 or plain)):
            specs = [
                KernelSpec(schema, dtype, GpuTarget(sm, (13, 2)), resolve_inputs(inputs))
                for sm in TARGETS
            ]
            assert {spec.target.sm_version for spec in specs if why_not(spec) is None} == versions(
                told
            ), (inputs, dtype)
