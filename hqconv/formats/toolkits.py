"""The two source formats whose config says everything: Quark, and Humming's own.

Legend: N output rows, K input columns, G groups along K, b bits of a code. `describe_*` turns the config's words
(the format's options) into the fields of `SourceFormat`; `*_needs` are rows of `source_parts_needs.NEEDS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from hqconv.errors import InputError
from hqconv.formats.format import SourceFormat
from hqconv.formats.needs import (
    FLOAT_CODES,
    Need,
    RawPart,
    Shapes,
    bias_need,
    grid_shapes,
    require_multiples,
)
from hqconv.formats.schemes import QUARK_FLOATS

_ONE: Shapes = ((), (1,))
_QUARK_STORAGE = {
    "int2": "I32",
    "int3": "U8",
    "int4": "I32",
    "uint4": "I32",
    "int8": "I8",
    "uint8": "U8",
    "fp4": "U8",
    "fp6_e2m3": "U8",
    "fp6_e3m2": "U8",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "mx": "U8",
}
_TRANSPOSED = ("int2", "int4", "uint4", "int8", "uint8")
_SCALE_FORMATS = {
    None: "float32",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "e8m0": "float8e8m0",
    "e5m3": "float8e5m3",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
    "fp8_e5m3": "float8e5m3",
}
_SCALE_CODES = {
    "float8e8m0": ("U8", "F8_E8M0"),
    "float8e5m3": ("U8",),
    "float8e4m3": ("F8_E4M3",),
    "float8e5m2": ("F8_E5M2",),
}


def _refuse(what: str, expected: str, found: object) -> NoReturn:
    raise InputError(what, where="quantization_config", expected=expected, found=found)


def describe_quark(fmt: SourceFormat) -> SourceFormat:
    """A Quark weight spec as code type, groups and scales. Raises InputError for one that Quark does not pack.

    Source: humming, schema/quark.py; quark, torch/utils/pack.py. Adds the options scale_name, is_transposed.
    """
    words = dict(fmt.options)
    dtype, scheme, stage = words.get("dtype"), words.get("qscheme"), words.get("scale_stage", 1)
    element = str(words.get("mx_element_dtype") if dtype == "mx" else dtype)
    if dtype not in _QUARK_STORAGE or (dtype == "mx" and element not in ("fp4", "fp6_e2m3", "fp6_e3m2")):
        _refuse(
            "Quark's weight dtype is not known.",
            ", ".join(_QUARK_STORAGE),
            f"{dtype} {element}",
        )
    if dtype == "mx":
        words |= {"qscheme": (scheme := "per_group"), "scale_format": "e8m0"}
    is_integer = element not in QUARK_FLOATS
    is_asymmetric = is_integer and (words.get("symmetric") is False or element.startswith("uint"))
    if is_asymmetric and dtype in ("int2", "int3"):
        _refuse("Quark's zero points are not known for this dtype.", "symmetric " + dtype, "symmetric: false")
    has_second = words.get("scale_dtype") is not None
    second_format = words.get("scale_dtype") if has_second and stage == 1 else words.get("scale_format")
    if second_format not in _SCALE_FORMATS:
        _refuse("Quark's scale format is not known.", ", ".join(map(str, _SCALE_FORMATS)), second_format)
    group_n, group_k = _quark_groups(scheme, words)
    words["scale_name"] = "weight_scale_2" if has_second and stage == 0 else "weight_scale"
    words["is_transposed"] = scheme == "per_group" and dtype in _TRANSPOSED
    second = "none"
    if has_second:  # Humming has second scales per channel in the parameter dtype only: these are float32
        second = "float32 channel" if words.get("scale_qscheme") == "per_channel" else "tensor"
    return replace(
        fmt,
        b_dtype="uint" + element[-1] if is_integer else QUARK_FLOATS[element],
        scale_dtype=_SCALE_FORMATS[second_format],
        group_n=group_n,
        group_k=group_k,
        has_zero_point=is_asymmetric,
        scale_2=second,
        options=tuple(words.items()),
    )


def _quark_groups(scheme: str | None, words: Mapping[str, Any]) -> tuple[int, int]:
    if scheme == "per_tensor":
        return 0, 0
    if scheme == "per_channel":
        return 1, 0
    size = words.get("group_size")
    block: tuple[int, ...] = tuple(words.get("block_size") or ())
    if scheme == "per_group" and isinstance(size, int) and size > 0:
        return 1, size
    if scheme == "per_block" and len(block) == 2 and min(block) > 0:
        return block[0], block[1]
    _refuse(
        "Quark's scheme is not usable.",
        "per_tensor, per_channel, per_group with a group_size or per_block with a block_size",
        f"{scheme}, group_size {size}, block_size {block or None}",
    )


def _quark_packed(dtype: str, bits: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stored shape of codes: packed along the last dimension."""
    last = shape[-1]
    if dtype == "mx":
        last = last // 32 * (1 + bits * 4)
    elif dtype in ("int4", "uint4"):
        last = math.ceil(last / 8)
    elif dtype in ("int3", "fp4", "fp6_e2m3", "fp6_e3m2"):
        last = last * bits // 8
    return (*shape[:-1], last)


def quark_needs(fmt: SourceFormat, parts: Mapping[str, RawPart], n: int, k: int) -> list[Need]:
    """Quark: codes [N, K] or, for integers per group, [K, N]; scales likewise; a second scale per tensor or row."""
    dtype, transposed = fmt.option("dtype"), fmt.option("is_transposed")
    bits = int(re.findall(r"\d", fmt.b_dtype)[0])
    require_multiples(parts, [("columns", k, 32), ("rows", n, 8 if transposed else 1)])
    storage = (_QUARK_STORAGE[dtype],)
    needs = [
        Need("weight", ("weight",), storage, (_quark_packed(dtype, bits, (k, n) if transposed else (n, k)),)),
        bias_need(n),
    ]
    if dtype == "mx":
        return needs
    scales: Shapes = grid_shapes(n, k, fmt.group_n, fmt.group_k)
    if transposed:
        scales = ((math.ceil(k / fmt.group_k), n),)
    name = fmt.option("scale_name")
    needs.append(Need("scale", (name,), _SCALE_CODES.get(fmt.scale_dtype, FLOAT_CODES), scales))
    if fmt.has_zero_point:
        is_scalar = fmt.group_n == 0
        shapes = (
            _ONE if is_scalar else (_quark_packed(dtype, bits, scales[-1] if not transposed else scales[0]),)
        )
        needs.append(Need("zero_point", (name.replace("scale", "zero_point"),), storage, shapes))
    if fmt.scale_2 != "none":
        other = "weight_scale" if name == "weight_scale_2" else "weight_scale_2"
        shapes = _ONE if fmt.scale_2 == "tensor" else ((n,), (n, 1))
        needs.append(Need("scale_2", (other,), FLOAT_CODES, shapes))
    return needs


def quark_shape(fmt: SourceFormat, part: RawPart) -> tuple[int, int]:
    """(N, K) that a Quark weight's header implies."""
    dtype, bits = fmt.option("dtype"), int(re.findall(r"\d", fmt.b_dtype)[0])
    first, last = part.shape[0], part.shape[1]
    if dtype == "mx":
        last = last // (1 + bits * 4) * 32
    elif dtype in ("int4", "uint4"):
        last *= 8
    elif dtype in ("int3", "fp4", "fp6_e2m3", "fp6_e3m2"):
        last = last * 8 // bits
    return (last, first) if fmt.option("is_transposed") else (first, last)


def describe_humming(fmt: SourceFormat) -> SourceFormat:
    """A `HummingWeightSchema` in words as code type, groups and scales. Raises InputError for a rotated one.

    A scale dtype that the schema omits is the parameter dtype, which the tensor's header tells.
    """
    words = dict(fmt.options)
    b_dtype = re.sub(r"^int", "uint", str(words.get("b_dtype", "")))
    if not re.fullmatch(r"uint[1-8]|float[2-8]e\dm\d", b_dtype):
        _refuse(
            "The Humming schema has no usable b_dtype.", "uintN, intN or floatXeYmZ", b_dtype or "nothing"
        )
    if (words.get("hadamard_block_size") or 0) > 1:
        _refuse("Rotated weights cannot be read.", "hadamard_block_size = 0", words["hadamard_block_size"])
    size, size_n = (words.get(f"weight_scale_group_size{end}") or 0 for end in ("", "_n"))
    kind = words.get("weight_scale_type") or ("block" if size_n > 1 else "group" if size else "channel")
    groups = {"group": (1, size), "channel": (1, 0), "block": (size_n, size), "tensor": (0, 0)}.get(kind)
    if groups is None or min(size, size_n) < 0 or (kind in ("group", "block") and not all(groups)):
        _refuse(
            "The Humming schema's groups are not usable.", "positive group sizes", f"{kind} {size_n} x {size}"
        )
    return replace(
        fmt,
        b_dtype=b_dtype,
        scale_dtype="float32" if kind in ("block", "tensor") else words.get("bs_dtype") or fmt.scale_dtype,
        group_n=groups[0],
        group_k=groups[1],
        has_zero_point=bool(words.get("has_zero_point")),
        scale_2=words.get("weight_scale_2_type") or "none",
    )


def humming_needs(fmt: SourceFormat, parts: Mapping[str, RawPart], n: int, k: int) -> list[Need]:
    """Humming's own tensors, as `HummingWeightSchema.get_tensors_attrs` gives them for one matrix."""
    bits = int(re.findall(r"\d", fmt.b_dtype)[0])
    require_multiples(parts, [("columns", k, 32)])
    codes = _SCALE_CODES.get(fmt.scale_dtype, FLOAT_CODES)
    needs = [
        Need("weight", ("weight",), ("I32",), ((n, k * bits // 32),)),
        Need("scale", ("weight_scale",), codes, grid_shapes(n, k, fmt.group_n, fmt.group_k)),
        bias_need(n),
    ]
    groups = k // fmt.group_k if fmt.group_k else 1
    if fmt.has_zero_point and fmt.option("is_fp_zero_point"):
        needs.append(Need("zero_point", ("zero_point",), FLOAT_CODES, ((n, groups),)))
    elif fmt.has_zero_point:
        require_multiples(parts, [("rows", n * bits, 32)])
        needs.append(Need("zero_point", ("zero_point",), ("I32",), ((n * bits // 32, groups),)))
    if fmt.scale_2 != "none":
        shapes = _ONE if fmt.scale_2 == "tensor" else ((n,), (n, 1))
        needs.append(Need("scale_2", ("weight_scale_2",), FLOAT_CODES, shapes))
    return needs
