"""What a LayerConfig says about the kernel tensors: their shapes and dtypes, and their number formats.

Part of `hqconv.artifact.unlayout.read`, and like it independent of Humming and of `hqconv.backends`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.errors import RequestError, VerificationError
from hqconv.schemas.dtypes import code_of, num_bits

Array = NDArray[Any]

PADDED_E5M0 = "E5M0"  # five exponent bits over three zero bits: what e8m0 scales become for float16
_FLAGS = (
    "use_fused_e8m0_scale",
    "use_packed_k_layout",
    "use_native_dequant",
    "use_raw_weight",
    "use_flat_weight",
    "use_ldmatrix_dequant",
    "use_block_scaled_mma",
    "use_int_weight_scale",
)


@dataclass(frozen=True)
class KernelTensors:
    """What the LayerConfig says about the tensors; `padded_*` are the stored sizes."""

    num_bits: int
    exponent_bits: int | None  # None for integers
    shape: tuple[int, int]
    padded_shape: tuple[int, int]
    scale_type: str
    scale_2_type: str
    scale_dtype: str
    param_dtype: str
    group: int
    group_n: int
    zero_kind: str  # none | int | float
    is_centred: bool
    has_bias: bool

    def scale_shape(self, *, padded: bool) -> tuple[int, int]:
        """(rows, groups) of the scale matrix."""
        n, k = self.padded_shape if padded else self.shape
        if self.scale_type == "channel":
            return n, 1
        return n // self.group_n, k // self.group

    @property
    def padding_scale(self) -> int:
        """Bit pattern of a padded scale: 1.0 for exponent-only scales, else 0."""
        return {"F8_E8M0": 127, PADDED_E5M0: 15 << 3}.get(self.scale_dtype, 0)


# --- what the config says ----------------------------------------------------------------------------------


def read_config(config: Mapping[str, Any], flags: Mapping[str, Any]) -> KernelTensors:
    """Understand a LayerConfig; RequestError for layouts not known yet, VerificationError for nonsense."""
    _check_supported(config, flags)
    try:
        code_bits, exponent_bits = _parse_weight_dtype(config["b_dtype"])
        padded = (int(config["shape_n"]), int(config["shape_k"]))
        shape = (padded[0] - int(config["pad_shape_n"]), padded[1] - int(config["pad_shape_k"]))
        scale_type, c_dtype = config["weight_scale_type"], config["c_dtype"]
        scale_dtype = code_of(config["bs_dtype"] or c_dtype)
        zero_kind = "none"
        if config["has_zero_point"]:
            zero_kind = "float" if config["is_fp_zero_point"] else "int"
        form = KernelTensors(
            num_bits=code_bits,
            exponent_bits=exponent_bits,
            shape=shape,
            padded_shape=padded,
            scale_type=scale_type,
            scale_2_type=config["weight_scale_2_type"],
            scale_dtype=_stored_scale_dtype(scale_type, scale_dtype, c_dtype),
            param_dtype=code_of(c_dtype),
            group=int(config["weight_scale_group_size"]) or padded[1],
            group_n=max(int(config["weight_scale_group_size_n"]), 1) if scale_type == "block" else 1,
            zero_kind=zero_kind,
            is_centred=_is_centred(config["a_dtype"], code_bits, exponent_bits, zero_kind),
            has_bias=bool(config["has_bias"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise VerificationError(
            "The layer configuration is not one that Humming writes.", where="LayerConfig", found=repr(error)
        ) from error
    _check_sizes(form)
    return form


def _check_supported(config: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    a_dtype = config.get("a_dtype")
    if a_dtype not in ("bfloat16", "float16"):
        what = f"The kernel layout for activations in {a_dtype} cannot be read back yet."
        raise RequestError(what, expected="bfloat16 or float16")
    used = [name for name in _FLAGS if flags.get(name) or config.get(name)]
    if used:
        raise RequestError(f"The kernel layout with {', '.join(used)} cannot be read back yet.")
    sm_version = config.get("sm_version")
    if not isinstance(sm_version, int) or (sm_version // 10 != 9 and "use_native_dequant" not in flags):
        # From sm89 on the compiler's version decides about native dequantization; sm90 never uses it.
        raise RequestError(f"The kernel layout of sm{sm_version} is not known without its layout flags.")


def _parse_weight_dtype(text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"uint([1-8])|float([2-8])e([0-5])m([1-7])", text)
    if match is None or (match[2] and int(match[2]) != 1 + int(match[3]) + int(match[4])):
        raise ValueError(f"b_dtype {text}")
    return (int(match[1]), None) if match[1] else (int(match[2]), int(match[3]))


def _stored_scale_dtype(scale_type: str, scale_dtype: str, c_dtype: str) -> str:
    if scale_type in ("tensor", "block"):
        return "F32"
    return PADDED_E5M0 if (scale_dtype, c_dtype) == ("F8_E8M0", "float16") else scale_dtype


def _is_centred(a_dtype: str, code_bits: int, exponent_bits: int | None, zero_kind: str) -> bool:
    """Whether codes are sign and magnitude around the zero point: integers too wide for bfloat16's mantissa,
    which the kernels therefore read by `normalized_uint_to_fp` (`dequant_single.cuh`)."""
    if exponent_bits is not None or a_dtype != "bfloat16" or zero_kind == "float":
        return False
    return code_bits > (6 if zero_kind == "int" else 7)


def _check_sizes(form: KernelTensors) -> None:
    (n, k), (padded_n, padded_k) = form.shape, form.padded_shape
    scale_types = ("group", "channel", "block", "tensor")
    facts = {
        "0 < shape - pad_shape <= shape": 0 < n <= padded_n and 0 < k <= padded_k,
        "shape_n a multiple of 64, shape_k of 32": padded_n % 64 == 0 and padded_k % 32 == 0,
        "weight_scale_type group, channel, block or tensor": form.scale_type in scale_types,
        "weight_scale_2_type none, channel or tensor": form.scale_2_type in ("none", "channel", "tensor"),
        "groups that divide K": form.scale_type in ("channel", "tensor")
        or (k % form.group == 0 and padded_k % form.group == 0),
        "blocks that divide N": n % form.group_n == 0 and padded_n % form.group_n == 0,
        "zero points for integers only": form.zero_kind == "none" or form.exponent_bits is None,
    }
    for expected, holds in facts.items():
        if not holds:
            raise VerificationError(
                "The layer configuration contradicts itself.",
                where="LayerConfig",
                expected=expected,
                found=form,
            )


# --- raw bits of the right shapes --------------------------------------------------------------------------


def expected_tensors(form: KernelTensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Safetensors dtype and shape without E of every tensor of the layout."""
    n, k = form.padded_shape
    rows, groups = form.scale_shape(padded=True)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"weight": ("I32", (k // 16, n * form.num_bits // 2))}
    stored = "F8_E8M0" if form.scale_dtype == PADDED_E5M0 else form.scale_dtype
    expected["weight_scale"] = (stored, () if form.scale_type == "tensor" else (groups, rows))
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


def checked_bits(form: KernelTensors, tensors: Mapping[str, Array]) -> dict[str, Array]:
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


# --- number formats ----------------------------------------------------------------------------------------


def code_values(form: KernelTensors) -> NDArray[np.float32]:
    """The float32 value of each of 256 codes; bits above the code's width are ignored."""
    codes = np.arange(256) & ((1 << form.num_bits) - 1)
    if form.exponent_bits is None:
        middle = 1 << (form.num_bits - 1) if form.zero_kind == "none" else 0
        return (codes - middle).astype(np.float32)
    half = 1 << (form.num_bits - 1)
    magnitude = _float_values(codes % half, form.exponent_bits, form.num_bits - 1 - form.exponent_bits)
    return np.where(codes >= half, -magnitude, magnitude)


def _float_values(codes: Array, exponent_bits: int, mantissa_bits: int) -> NDArray[np.float32]:
    """Unsigned small floats, every code finite; without exponent bits the magnitude itself."""
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    if exponent_bits == 0:
        return codes.astype(np.float32)
    bias = (1 << (exponent_bits - 1)) - 1
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values: NDArray[np.float32] = np.ldexp(
        significand.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    return values


def to_float32(bits: Array, dtype: str) -> NDArray[np.float32]:
    """The float32 values of raw patterns of a safetensors dtype; `U8` is e5m3, "codes" are plain integers."""
    if dtype == "codes":
        return bits.astype(np.float32)
    if dtype == "F32":
        return bits.view(np.float32)
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    codes = np.arange(256)
    if dtype == "U8":
        table = _float_values(codes, 5, 3)
    elif dtype == "F8_E8M0":
        table = np.ldexp(np.float32(1), np.minimum(codes, 254) - 127)
        table[255] = np.nan
    elif dtype == PADDED_E5M0:  # exponent 0 is zero for the kernels: there is no mantissa to be subnormal
        table = np.where(codes >> 3 == 0, np.float32(0), np.ldexp(np.float32(1), (codes >> 3) - 15))
        table[codes >> 3 == 31] = np.inf
    else:
        exponent_bits = {"F8_E4M3": 4, "F8_E5M2": 5}[dtype]
        table = _float_values(codes % 128, exponent_bits, 7 - exponent_bits)
        table[codes % 128 == 127] = np.nan
        if exponent_bits == 5:
            table[124:128] = table[252:] = [np.inf, np.nan, np.nan, np.nan]
        table[128:] *= -1
    return table.astype(np.float32)[bits]
