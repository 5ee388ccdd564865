"""Completes a declared source format from tensor headers, and checks one projection's tensors against it.

Legend: N output rows, K input columns, b bits of a code. Names, dtypes and shapes only: no tensor bytes, no torch.
What each format stores is in `hqconv.formats.stored_tensors`, `hqconv.formats.quark` and `hqconv.formats.humming`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hqconv.errors import InputError
from hqconv.formats.humming import humming_needs
from hqconv.formats.quark import quark_needs, quark_shape
from hqconv.formats.source_format import ANY, SourceFormat
from hqconv.formats.stored_tensors import (
    BITSANDBYTES_STATES,
    NEEDS,
    SCALE_NAMES,
    StoredTensor,
    integer_bits,
    packed_width,
)
from hqconv.schemas.dtypes import FLOATS, code_bits, humming_name
from hqconv.schemas.tensors import TensorSpec

_NEEDS = {**NEEDS, "quark": quark_needs, "humming": humming_needs}

_ACTIVATIONS = "activation scale, not used by 16-bit activations"
UNUSED_PARTS = {
    "input_scale": _ACTIVATIONS,
    "input_scale_2": _ACTIVATIONS,
    "input_global_scale": _ACTIVATIONS,
    "input_zero_point": _ACTIVATIONS,
    "activation_scale": _ACTIVATIONS,
    "output_scale": _ACTIVATIONS,
    "output_zero_point": _ACTIVATIONS,
    "weight_shape": "shape of the packed weight: implied",
}
PART_NAMES: tuple[str, ...] = (
    "weight",
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_packed",
    "weight_zero_point",
    "weight_zero_point_2",
    "weight_global_scale",
    "weight_g_idx",
    "weight_offset",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "scale",
    "scale_inv",
    "blocks",
    "bias",
    "zero_point",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    *BITSANDBYTES_STATES,
    *UNUSED_PARTS,
)
"""Every raw part name that any format uses."""


@dataclass(frozen=True)
class ResolvedFormat:
    """A format with nothing left open, and what becomes of every tensor.

    used: canonical part -> raw part name. unused: raw part name -> why it is dropped.
    """

    format: SourceFormat
    used: dict[str, str]
    unused: dict[str, str]


def resolve_format(declared: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> ResolvedFormat:
    """Fill in what the config leaves open (code and scale dtypes, `ANY` groups) from one projection's headers.

    `parts`: raw part name -> header, of one expert's projection [n, k]. Raises InputError that names the tensor
    for a missing or foreign part, a wrong dtype, shape or group count, an unusable group size, and for tensors
    that contradict the config about being quantized at all.
    """
    _check_kind(declared, parts)
    _check_groups(declared, parts)
    fmt = _resolve_groups(declared, parts, n)
    found: dict[str, TensorSpec] = {}
    used: dict[str, str] = {}
    for need in _NEEDS[fmt.decoder](fmt, parts, n, k):
        name = _choose(need, parts, fmt)
        if name is not None:
            _check_part(need, parts[name])
            used[need.canonical], found[need.canonical] = name, parts[name]
    unused = _leftovers(fmt, parts, used)
    return ResolvedFormat(_fill_in(fmt, found, used, k), used, unused)


def _check_kind(declared: SourceFormat, parts: Mapping[str, TensorSpec]) -> None:
    """Refuse tensors that are quantized where the config says not, and the other way round."""
    weight = parts.get("weight")
    if declared.is_float:
        quantized = [p for name, p in parts.items() if name not in ("weight", "bias", *UNUSED_PARTS)]
        if weight is not None and weight.dtype not in FLOATS:
            quantized.insert(0, weight)
        if quantized:
            raise InputError(
                "The config declares no quantization for this module, but its tensors are quantized.",
                where=quantized[0].name,
                expected="one BF16, F16 or F32 weight",
                found=", ".join(f"{p.name} {p.dtype}" for p in quantized),
                remedy="Restore quantization_config in config.json (or hf_quant_config.json).",
            )
    elif weight is not None and weight.dtype in FLOATS:
        raise InputError(
            "The config declares a quantized module, but its weight is not quantized.",
            where=weight.name,
            expected=declared.describe(),
            found=f"{weight.dtype} {list(weight.shape)}",
            remedy="List the module in the config's ignore list (modules_to_not_convert), or restore its weight.",
        )


def _check_groups(fmt: SourceFormat, parts: Mapping[str, TensorSpec]) -> None:
    for what, size in (("rows", fmt.group_n), ("columns", fmt.group_k)):
        if size < 0 and size != ANY:
            where = next(iter(parts.values())).name if parts else ""
            expected = "a positive number of " + what
            raise InputError(
                "The config's group size is not usable.", where=where, expected=expected, found=size
            )


def _resolve_groups(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int) -> SourceFormat:
    """Groups that the config leaves open: one scale is per tensor, N of them are per channel."""
    if fmt.decoder != "fp8" or ANY not in (fmt.group_n, fmt.group_k):
        return fmt
    scale = next((parts[name] for name in SCALE_NAMES if name in parts), None)
    if scale is None:
        return replace(fmt, group_n=1, group_k=0)  # the missing scale is reported when parts are matched
    count = 1
    for size in scale.shape:
        count *= size
    if count == 1:
        return replace(fmt, group_n=0, group_k=0)
    if scale.shape in ((n,), (n, 1)):
        return replace(fmt, group_n=1, group_k=0)
    raise InputError(
        "The config gives no block size for these scales.",
        where=scale.name,
        expected=f"one scale, or one for each of {n} rows, where quantization_config has no weight_block_size",
        found=list(scale.shape),
    )


def _choose(need: StoredTensor, parts: Mapping[str, TensorSpec], fmt: SourceFormat) -> str | None:
    """The raw name that provides a part; None where an optional one is absent."""
    present = [name for name in need.names if name in parts]
    if len(present) > 1:
        raise InputError(
            "Two tensors claim to be the same part.",
            where=parts[present[1]].name,
            expected="one of " + ", ".join(need.names),
            found=", ".join(parts[name].name for name in present),
        )
    if not present and need.is_required:
        raise InputError(
            f"A tensor of the format '{fmt.name}' is missing.",
            where=next(iter(parts.values())).name if parts else "",
            expected=f"a partner named {' or '.join(need.names)}",
            found=", ".join(part.name for part in parts.values()) or "no tensor",
            remedy="Download the checkpoint again, or check quantization_config.",
        )
    return present[0] if present else None


def _check_part(need: StoredTensor, part: TensorSpec) -> None:
    if part.dtype not in need.dtypes:
        expected = " or ".join(need.dtypes)
        raise InputError(
            "A tensor has the wrong dtype.", where=part.name, expected=expected, found=part.dtype
        )
    if need.shapes is not None and part.shape not in need.shapes:
        expected = " or ".join(str(list(shape)) for shape in need.shapes)
        found = list(part.shape)
        raise InputError("A tensor has the wrong shape.", where=part.name, expected=expected, found=found)


def _leftovers(fmt: SourceFormat, parts: Mapping[str, TensorSpec], used: Mapping[str, str]) -> dict[str, str]:
    unused = {}
    for name, part in parts.items():
        if name in used.values():
            continue
        if name not in UNUSED_PARTS:
            raise InputError(
                f"The format '{fmt.name}' has no such tensor.",
                where=part.name,
                expected=", ".join(sorted(used.values())),
                found=name,
                remedy="Check quantization_config: the tensors look like another format.",
            )
        unused[name] = UNUSED_PARTS[name]
    return unused


_B_DTYPES = {
    "mxfp4": "float4e2m1",
    "mxfp8": "float8e4m3",
    "nvfp4": "float4e2m1",
    "int8": "uint8",
    "bitnet": "float2e0m1",
}


def _fill_in(
    fmt: SourceFormat, found: Mapping[str, TensorSpec], used: Mapping[str, str], k: int
) -> SourceFormat:
    """The format with its code and scale dtypes, and what the parts' names and widths say."""
    weight, scale = found["weight"], found.get("scale")
    b_dtype, scale_dtype, options = fmt.b_dtype, fmt.scale_dtype, dict(fmt.options)
    is_permuted = fmt.is_permuted
    if fmt.decoder == "fp8":
        b_dtype = humming_name(weight.dtype)
        if fmt.b_dtype not in ("", b_dtype):
            what = "A tensor has the wrong dtype."
            raise InputError(what, where=weight.name, expected=fmt.b_dtype, found=weight.dtype)
    elif fmt.decoder in _B_DTYPES:
        b_dtype = _B_DTYPES[fmt.decoder]
    if scale is not None and scale.dtype != "U8":
        scale_dtype = humming_name(scale.dtype)
    elif scale is not None and fmt.decoder not in ("quark", "humming"):  # their configs say it
        # Bytes are e8m0 exponents; only nvfp4's, which some writers store so, are e4m3.
        scale_dtype = "float8e4m3" if fmt.decoder == "nvfp4" else "float8e8m0"
    if fmt.decoder == "bitnet" and options.get("scale_inverted", True):
        scale_dtype = "float32"  # the reciprocal's
    elif fmt.decoder == "nvfp4":
        options["scale_2"] = "divides" if used["scale_2"] == "weight_global_scale" else "multiplies"
    elif fmt.decoder == "gptq":
        is_permuted = bool(options.get("desc_act")) and fmt.group_k != 0
    elif fmt.decoder == "packed_int":
        dense = packed_width(k, integer_bits(fmt), is_padded=False)
        options["packing"] = "dense" if weight.shape[1] == dense else "padded"
        is_permuted = "g_idx" in found
    return replace(
        fmt,
        b_dtype=b_dtype,
        scale_dtype=scale_dtype,
        is_permuted=is_permuted,
        scale_2="tensor" if fmt.decoder == "nvfp4" else fmt.scale_2,
        options=tuple(options.items()),
    )


def logical_shape(fmt: SourceFormat, parts: Mapping[str, TensorSpec]) -> tuple[int, int] | None:
    """(N, K) that the weight part's header implies; None where the format or the header leaves it open."""
    part = next(
        (parts[name] for name in ("weight", "weight_packed", "qweight", "blocks") if name in parts), None
    )
    if part is None or fmt.decoder == "bnb4" or len(part.shape) < 2:
        return None
    rows, columns = part.shape[0], part.shape[1]
    if fmt.decoder in ("mxfp4", "nvfp4"):
        if len(part.shape) == 3:
            return rows, columns * 32
        scale = next((parts[name] for name in SCALE_NAMES if name in parts), None)
        is_elements = part.dtype == "F4" and scale is not None and scale.shape[-1] * 32 == columns
        return rows, columns if is_elements else columns * 2
    if fmt.decoder == "bitnet":
        return rows * 4, columns
    if fmt.decoder == "awq":
        return columns * 8, rows
    if fmt.decoder == "quark":
        return quark_shape(fmt, part)
    if fmt.decoder in ("gptq", "packed_int", "humming"):
        return _packed_shape(fmt, parts, part)
    return rows, columns


def _packed_shape(
    fmt: SourceFormat, parts: Mapping[str, TensorSpec], part: TensorSpec
) -> tuple[int, int] | None:
    bits = code_bits(fmt.b_dtype)
    rows, columns = part.shape
    if fmt.decoder == "gptq":
        rows, columns = columns, rows
    scale = parts.get("weight_scale")
    if fmt.decoder == "packed_int" and fmt.group_k > 0 and scale is not None and len(scale.shape) == 2:
        return rows, scale.shape[1] * fmt.group_k  # codes may be padded to words: the groups tell
    return (rows, columns * 32 // bits) if columns * 32 % bits == 0 else None
