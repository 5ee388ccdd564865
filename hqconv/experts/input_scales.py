"""Scales of a block's activations that were measured beforehand, where a source has them. Headers only.

Legend: E experts of a block. A GEMM's activations have one scale: the largest of all its projections of all experts.
"""

from __future__ import annotations

from collections.abc import Iterable

from hqconv.experts.block import InputScales
from hqconv.experts.checks import Found
from hqconv.formats.format import SourceFormat
from hqconv.schemas.families import Family
from hqconv.schemas.tensors import TensorRef

_PART = "input_scale"
_GEMM_OF = {"w1": "w13", "w3": "w13", "w2": "w2"}


def find_input_scales(
    family: Family, name: str, found: Found, count: int, formats: Iterable[SourceFormat]
) -> InputScales:
    """What a block's tensors and its projections' formats say; nothing is checked, as most requests have no use for it.

    name: of the block. count: its experts.
    """
    dtypes = {one.static_inputs for one in formats}
    refs: dict[str, list[TensorRef]] = {}
    most: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for stack in family.stacks if found.stacks else ():
        ref, gemm = found.stacks.get(stack.name, {}).get(_PART), _GEMM_OF[stack.roles[0]]
        if ref is not None:
            refs.setdefault(gemm, []).append(ref)
            most[gemm] = count * len(stack.roles)
    for expert, roles in sorted(found.experts.items()):
        for role, word in family.projections.items():
            gemm, ref = _GEMM_OF[role], roles[role].get(_PART)
            most[gemm] = 1
            if ref is None:
                missing.setdefault(gemm, []).append(f"{name}.{expert}.{word}.{_PART}")
            else:
                refs.setdefault(gemm, []).append(ref)
    return InputScales(
        dtypes.pop() if len(dtypes) == 1 else "",
        {gemm: tuple(of_gemm) for gemm, of_gemm in refs.items()},
        most,
        {gemm: tuple(of_gemm) for gemm, of_gemm in missing.items()},
    )
