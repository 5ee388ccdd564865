"""Order, shapes and number formats of kernel tensors, from a LayerConfig and the layout flags of the manifest.

Part of `hqconv.layout_decoder.decode`, and like it independent of Humming and of the conversion. Loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hqconv.errors import RequestError, VerificationError
from hqconv.schemas.tensors import code_of, num_bits

if TYPE_CHECKING:
    import torch

PADDED_E5M0 = "E5M0"  # five exponent bits over three zero bits: what e8m0 scales become for float16
FUSED_FP8 = "FUSED_FP8"  # e8m0 scales as exponents that are added to fp8's: 2 ** byte, 1 to 12
FUSED_INT8 = "FUSED_INT8"  # e8m0 scales as left shifts of int8 values twice the codes': 2 ** (byte + 1), 0 to 3
_ACTIVATION_BITS = {
    "bfloat16": 16,
    "float16": 16,
    "float8e4m3": 8,
    "float8e5m2": 8,
    "float8e3m4": 8,
    "int8": 8,
    "int4": 4,
    "float4e2m1": 4,
    "float4e0m3": 4,
}
_FLAGS = (  # of the manifest only: LayerConfig has no such fields
    "use_native_dequant",
    "use_raw_weight",
    "use_flat_weight",
    "use_ldmatrix_dequant",
    "use_block_scaled_mma",
)
_SIZES = (
    "shape_n",
    "shape_k",
    "pad_shape_n",
    "pad_shape_k",
    "weight_scale_group_size",
    "weight_scale_group_size_n",
)
_WRITTEN = ("use_fused_e8m0_scale", "use_packed_k_layout", "use_int_weight_scale")
_ADAPTED_E8M0 = (PADDED_E5M0, FUSED_FP8, FUSED_INT8)  # files label them with the original dtype
_SCALE_ORDERS = (
    "tensor",
    "block",
    "channel",
    "group",
    "tensor memory",
    "one a word",
    "four a word",
)


@dataclass(frozen=True)
class LayoutForm:
    """Layout of one GEMM's kernel tensors; `padded_*` are the stored sizes.

    order: of the codes, "rows" (Humming's packing), "chunks" (16 bytes of every row after each other) or "fragments"
    (of the tensor core's operand; `is_native`, `is_split`, `is_packed_k` select the variant). is_signed: integers are
    in two's complement. scale_order: one of `_SCALE_ORDERS`.
    """

    num_bits: int
    exponent_bits: int | None  # None for integers
    activation_bits: int
    order: str
    is_signed: bool
    is_native: bool
    is_packed_k: bool
    shape: tuple[int, int]
    padded_shape: tuple[int, int]
    scale_type: str
    scale_2_type: str
    # the schema's own second scale per row, which a channel's fused exponents may go into
    has_row_scale: bool
    scale_dtype: str
    scale_order: str
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
    def is_fused(self) -> bool:
        """True if e8m0 exponents are fused into the codes."""
        return self.scale_dtype in (FUSED_FP8, FUSED_INT8)

    @property
    def is_split(self) -> bool:
        """True if a code's sign is stored apart: mxfp4 that becomes fp8 by two permutations of a word."""
        return self.scale_dtype == FUSED_FP8

    @property
    def is_transposed(self) -> bool:
        """True if a fragment has its column halves before its row halves, as WGMMA reads it from registers."""
        return self.is_packed_k and not self.is_fused

    @property
    def padding_scale(self) -> int:
        """Bit pattern of a padded scale: 1.0 for exponent-only scales, else 0. Fused ones have no such constant."""
        return {"F8_E8M0": 127, PADDED_E5M0: 15 << 3}.get(self.scale_dtype, 0)


def parse_weight_dtype(text: str) -> tuple[int, int | None]:
    """Bits of a code and, of a float, of its exponent. ValueError for no weight type of Humming's."""
    match = re.fullmatch(r"u?int([1-8])|float([2-8])e([0-5])m([1-7])", text)
    if match is None or (match[2] and int(match[2]) != 1 + int(match[3]) + int(match[4])):
        raise ValueError(f"b_dtype {text}")
    return (int(match[1]), None) if match[1] else (int(match[2]), int(match[3]))


def stored_scale_dtype(config: Any) -> str:
    """The dtype of a LayerConfig's stored scales: a safetensors dtype, or one of the three above."""
    if config["weight_scale_type"] in ("tensor", "block"):
        return "F32"
    dtype = code_of(config["bs_dtype"] or config["c_dtype"])
    if config["use_fused_e8m0_scale"]:
        return {"float8e4m3": FUSED_FP8, "int8": FUSED_INT8}[config["a_dtype"]]
    # A block-scaled tensor core takes e8m0 scales as they are.
    is_widened = dtype == "F8_E8M0" and not config["use_block_scaled_mma"]
    return PADDED_E5M0 if is_widened and config["c_dtype"] == "float16" else dtype


def read_config(
    config: Mapping[str, Any], flags: Mapping[str, Any], *, has_row_scale: bool = False
) -> LayoutForm:
    """Parse a LayerConfig (JSON dict) and the manifest's layout flags.

    has_row_scale: the schema has a second scale per row; a LayerConfig with fused exponents does not tell.
    Raises RequestError for layouts that the decoder does not know, VerificationError for contradictions.
    """
    merged = _with_flags(config, flags)
    try:
        code_bits, exponent_bits = parse_weight_dtype(merged["b_dtype"])
        if wrong := [f"{key} {merged[key]!r}" for key in _SIZES if type(merged[key]) is not int]:
            raise ValueError(", ".join(wrong))
        padded = (merged["shape_n"], merged["shape_k"])
        shape = (padded[0] - merged["pad_shape_n"], padded[1] - merged["pad_shape_k"])
        zero_kind = "none"
        if merged["has_zero_point"]:
            zero_kind = "float" if merged["is_fp_zero_point"] else "int"
        order = "chunks" if merged["use_flat_weight"] else "fragments"
        if merged["use_raw_weight"]:
            order = "rows"
        form = LayoutForm(
            num_bits=code_bits,
            exponent_bits=exponent_bits,
            activation_bits=_ACTIVATION_BITS[merged["a_dtype"]],
            order=order,
            is_signed=merged["b_dtype"].startswith("int") or bool(merged["use_ldmatrix_dequant"]),
            is_native=bool(merged["use_native_dequant"]),
            is_packed_k=bool(merged["use_packed_k_layout"]),
            shape=shape,
            padded_shape=padded,
            scale_type=merged["weight_scale_type"],
            scale_2_type=merged["weight_scale_2_type"],
            has_row_scale=has_row_scale,
            scale_dtype=stored_scale_dtype(merged),
            scale_order=_scale_order(merged),
            param_dtype=code_of(merged["c_dtype"]),
            group=merged["weight_scale_group_size"] or padded[1],
            group_n=max(merged["weight_scale_group_size_n"], 1)
            if merged["weight_scale_type"] == "block"
            else 1,
            zero_kind=zero_kind,
            is_centred=_is_centred(merged["a_dtype"], code_bits, exponent_bits, zero_kind),
            has_bias=bool(merged["has_bias"]),
        )
        _check_sizes(form)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise VerificationError(
            "The layer configuration is not one that Humming writes.",
            where="layer config",
            found=repr(error),
        ) from error
    return form


def _with_flags(config: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge config and flags. Without flags only 16-bit activations on sm90 are known: all of their flags are off."""
    a_dtype = config.get("a_dtype")
    sm_version = config.get("sm_version")
    if not isinstance(a_dtype, str) or a_dtype not in _ACTIVATION_BITS:
        raise RequestError(
            f"The kernel layout for activations in {a_dtype} cannot be read back.",
            expected=", ".join(_ACTIVATION_BITS),
        )
    if config.get("use_int_weight_scale") or flags.get("use_int_weight_scale"):
        raise RequestError("The kernel layout with use_int_weight_scale cannot be read back.")
    is_plain = (
        _ACTIVATION_BITS[a_dtype] == 16 and isinstance(sm_version, int) and sm_version // 10 == 9
    )
    if not is_plain and not set(_FLAGS) <= flags.keys():
        # They follow from the GPU, and from the version of the compiler that serves.
        raise RequestError(
            f"The kernel layout of sm{sm_version} for {a_dtype} is not known without its layout flags.",
            expected=", ".join(_FLAGS),
            found=", ".join(flags) or "none",
        )
    for name in _WRITTEN:
        if name in flags and name in config and bool(flags[name]) != bool(config[name]):
            raise VerificationError(
                "The layer configuration contradicts the manifest's flags.",
                where=f"layer config: {name}",
                expected=flags[name],
                found=config[name],
            )
    return {**dict.fromkeys((*_FLAGS, *_WRITTEN), False), **flags, **config}


def _scale_order(merged: Mapping[str, Any]) -> str:
    """Order of the scales; a block-scaled tensor core reads group scales in its own tiles."""
    if merged["weight_scale_type"] != "group" or not merged["use_block_scaled_mma"]:
        return str(merged["weight_scale_type"])
    if merged["sm_version"] // 10 == 10:
        return "tensor memory"
    columns = 256 // _ACTIVATION_BITS[merged["a_dtype"]]  # of one instruction
    return "one a word" if columns == merged["weight_scale_group_size"] else "four a word"


def _is_centred(a_dtype: str, code_bits: int, exponent_bits: int | None, zero_kind: str) -> bool:
    """True if codes are sign and magnitude around the zero point: integers that become floats narrower than 16 bits,
    or too wide for bfloat16's mantissa. The kernels read them by `normalized_uint_to_fp` (`dequant_single.cuh`)."""
    if exponent_bits is not None or zero_kind == "float" or a_dtype in ("float16", "int8", "int4"):
        return False
    return a_dtype != "bfloat16" or code_bits > (6 if zero_kind == "int" else 7)


def _check_sizes(form: LayoutForm) -> None:
    n, k = form.shape
    padded_n, padded_k = form.padded_shape
    unit = 512 // form.activation_bits
    facts = {
        "0 < shape - pad_shape <= shape": 0 < n <= padded_n and 0 < k <= padded_k,
        f"shape_n a multiple of 64, shape_k of {unit}": padded_n % 64 == 0 and padded_k % unit == 0,
        "weight_scale_type group, channel, block or tensor": form.scale_order in _SCALE_ORDERS,
        "weight_scale_2_type none, channel or tensor": form.scale_2_type
        in ("none", "channel", "tensor"),
        "groups that divide K": form.scale_type in ("channel", "tensor")
        or (k % form.group == 0 and padded_k % form.group == 0),
        "blocks that divide N": n % form.group_n == 0 and padded_n % form.group_n == 0,
        "zero points for integers only": form.zero_kind == "none" or form.exponent_bits is None,
        **_facts_of_layouts(form),
    }
    for expected, holds in facts.items():
        if not holds:
            raise VerificationError(
                "The layer configuration contradicts itself.",
                where="layer config",
                expected=expected,
                found=form,
            )


def _facts_of_layouts(form: LayoutForm) -> dict[str, bool]:
    """Conditions of layouts for activations other than 16-bit ones."""
    is_fragments = form.order == "fragments"
    per_word = form.scale_order.endswith(" a word")
    narrower = form.num_bits < form.activation_bits
    is_mxfp4 = (form.num_bits, form.exponent_bits, form.scale_type) == (4, 2, "group")
    in_tiles = per_word or form.scale_order == "tensor memory"
    return {
        "codes narrower than activations, or whole": form.num_bits <= form.activation_bits
        and (narrower or not is_fragments),
        "chunks that divide K": form.order != "chunks"
        or form.padded_shape[1] * form.num_bits % 128 == 0,
        "native dequantization of floats for 16-bit activations": not form.is_native
        or (is_fragments and form.activation_bits == 16 and form.exponent_bits is not None),
        "packed K of even bits for 8-bit activations": not form.is_packed_k
        or (is_fragments and form.activation_bits == 8 and form.num_bits % 2 == 0),
        "signed integers in whole words": not form.is_signed
        or (not is_fragments and form.exponent_bits is None),
        "a second scale where exponents are fused into mxfp4": not form.is_fused
        or (
            is_mxfp4
            and form.scale_2_type
            == ("tensor" if form.is_split and not form.has_row_scale else "channel")
        ),
        "a second scale per row where the schema has one": not form.has_row_scale
        or form.scale_2_type == "channel",
        "8-bit group scales and no zero points for a block-scaled tensor core": not in_tiles
        or (form.scale_dtype in ("F8_E8M0", "F8_E4M3") and form.zero_kind == "none"),
        "groups of one instruction's columns": not per_word
        or form.scale_shape(padded=True)[1] % 4 == 0,
    }


# --- kernel tensors ----------------------------------------------------------------------------------------


def expected_tensors(form: LayoutForm) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Safetensors dtype and shape without E of every tensor of the layout."""
    n, _ = form.padded_shape
    groups = form.scale_shape(padded=True)[1]
    expected = {"weight": ("I32", _weight_shape(form)), "weight_scale": _scale_tensor(form)}
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
    """Humming's packing, or one row for each run of columns that an instruction takes (two runs for packed K)."""
    n, k = form.padded_shape
    if form.order != "fragments":
        return n, k * form.num_bits // 32
    columns = 64 if form.is_packed_k else 256 // form.activation_bits
    return k // columns, n * columns * form.num_bits // 32


def _scale_tensor(form: LayoutForm) -> tuple[str, tuple[int, ...]]:
    rows, groups = form.scale_shape(padded=True)
    stored = "F8_E8M0" if form.scale_dtype in _ADAPTED_E8M0 else form.scale_dtype
    in_words = {
        "tensor memory": (-(-groups // 4), rows + -rows % 128),
        "one a word": (groups // 2, rows // 2),
        "four a word": (groups // 4, rows),
    }
    if form.scale_order in in_words:
        return "I32", in_words[form.scale_order]
    return stored, () if form.scale_type == "tensor" else (groups, rows)


def check_tensors(form: LayoutForm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise VerificationError for a kernel tensor [E, …] that is missing, extra or of another shape or width."""
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
        found = tensors[name]
        if 8 * found.element_size() != num_bits(code) or tuple(found.shape) != (
            num_experts,
            *inner,
        ):
            raise VerificationError(
                "A kernel tensor has another shape or width than the layer configuration asks for.",
                where=name,
                expected=f"uint{num_bits(code)} (of {code}) {[num_experts, *inner]}",
                found=f"uint{8 * found.element_size()} {list(found.shape)}",
            )
