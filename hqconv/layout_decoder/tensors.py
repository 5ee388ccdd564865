"""The kernel tensors that a layout has: shapes and dtypes, and their raw bits held to these.

Part of `hqconv.layout_decoder.read`, and like it independent of Humming and of `hqconv.backends`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hqconv.errors import VerificationError
from hqconv.layout_decoder.layout_form import LayoutForm
from hqconv.layout_decoder.numbers import FUSED_FP8, FUSED_INT8, PADDED_E5M0, Array
from hqconv.schemas.dtypes import num_bits

_E8M0 = (PADDED_E5M0, FUSED_FP8, FUSED_INT8)  # are stored in files as what they came from


def expected_tensors(form: LayoutForm) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Safetensors dtype and shape without E of every tensor of the layout."""
    n, _ = form.padded_shape
    groups = form.scale_shape(padded=True)[1]
    expected = {"weight": ("I32", _weight_shape(form)), "weight_scale": _scale(form)}
    if form.zero_kind == "float":
        expected["zero_point"] = (form.param_dtype, (groups, n))
    elif form.zero_kind == "int":
        expected["zero_point"] = ("I32", (groups, n * (4 if form.num_bits <= 4 else 8) // 32))
    if form.scale_2_type != "none":
        is_channel = form.scale_2_type == "channel"
        expected["weight_scale_2"] = (form.param_dtype, (n,)) if is_channel else ("F32", ())
    if form.has_bias:
        expected["bias"] = (form.param_dtype, (n,))
    return expected


def _weight_shape(form: LayoutForm) -> tuple[int, ...]:
    """Humming's packing, or a row for each run of columns that an instruction takes (twice that for packed K)."""
    n, k = form.padded_shape
    if form.order != "fragments":
        return n, k * form.num_bits // 32
    columns = 64 if form.is_packed_k else 256 // form.activation_bits
    return k // columns, n * columns * form.num_bits // 32


def _scale(form: LayoutForm) -> tuple[str, tuple[int, ...]]:
    rows, groups = form.scale_shape(padded=True)
    stored = "F8_E8M0" if form.scale_dtype in _E8M0 else form.scale_dtype
    in_words = {
        "tensor memory": (-(-groups // 4), rows + -rows % 128),
        "one a word": (groups // 2, rows // 2),
        "four a word": (groups // 4, rows),
    }
    if form.scale_order in in_words:
        return "I32", in_words[form.scale_order]
    return stored, () if form.scale_type == "tensor" else (groups, rows)


def checked_bits(form: LayoutForm, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Every tensor's bit patterns [E, …], unsigned; VerificationError for one missing, extra or misshapen."""
    expected = expected_tensors(form)
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise VerificationError(
            "The kernel tensors are not those that the layer configuration asks for.",
            where=name,
            expected="present" if name in expected else "absent",
            found="absent" if name in expected else "present",
        )
    shape = tensors["weight"].shape
    num_experts = shape[0] if len(shape) == 3 else "E"
    for name, (code, inner) in expected.items():
        dtype, found = f"uint{num_bits(code)}", tensors[name]
        if found.dtype != dtype or found.shape != (num_experts, *inner):
            raise VerificationError(
                "A kernel tensor has another shape or width than the layer configuration asks for.",
                where=name,
                expected=f"{dtype} (of {code}) {[num_experts, *inner]}",
                found=f"{found.dtype} {list(found.shape)}",
            )
    return {name: np.ascontiguousarray(tensors[name]) for name in expected}
