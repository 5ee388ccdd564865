"""AMD's Quark: the method `quark` and its encoding, whose layout its config describes.

Legend: N output rows, K input columns, G groups along K, b bits of a code. Source: `setup_config_per_layer` of
quark.torch.quantization.model_transformation, torch/utils/pack.py, and humming's schema/quark.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hqconv.formats.config_reader import (
    ConfigReader,
    Keys,
    TextConfig,
    is_online_spinquant,
    rotated,
    speaks_of_rotations,
)
from hqconv.formats.encoding import (
    ONE,
    SCALE_DTYPES,
    Decoded,
    Encoding,
    MatrixHeaders,
    Shape,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.quant_config import Matcher, ModuleRule, always, globbed_in, quant_method, when
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.tensors import FLOATS, code_bits

if TYPE_CHECKING:
    import torch


_FLOATS = {
    "fp4": "float4e2m1",
    "fp6_e2m3": "float6e2m3",
    "fp6_e3m2": "float6e3m2",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
}
# Storage of codes: one element each (int2 in int32), several to an element, or embedded with their scales (mx).
_STORAGE = {
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
_INTEGERS = ("int2", "int3", "int4", "uint4", "int8", "uint8")
_WITHOUT_ZERO_POINTS = ("int2", "int3")
_TRANSPOSED = ("int2", "int4", "uint4", "int8", "uint8")
_SMALL_SCALES = {
    "e8m0": "float8e8m0",
    "e5m3": "float8e5m3",
    "fp8_e4m3": "float8e4m3",
    "fp8_e5m2": "float8e5m2",
    "fp8_e5m3": "float8e5m3",
}

# --- the config --------------------------------------------------------------------------------------------


# Sources: QTensorConfig, QLayerConfig, QConfig of quark.torch.quantization.config.config, JsonExporterConfig of
# quark.torch.export.config.config.
_TENSOR = Keys(
    "dtype mx_element_dtype qscheme ch_axis group_size block_size symmetric is_dynamic is_scale_quant scale_format "
    "scale_type "
    "round_method observer_cls scale_calculation_mode qat_spec zero_point_type enable_buffer_reuse max_input_numel"
)
_LAYER = Keys("input_tensors output_tensors bias target_device", inside={"weight": _TENSOR})
KEYS = Keys(
    "exclude algo_config pre_quant_opt_config "
    "kv_cache_quant_config kv_cache_group min_kv_scale kv_cache_post_rope softmax_quant_spec quant_mode "
    "log_severity_level shared_scale_groups sync_moe_expert_input_amax keep_prequantized_layers custom_mode",
    inside={
        "global_quant_config": _LAYER,
        "export": Keys("weight_format pack_method kv_cache_group min_kv_scale weight_merge_groups"),
    },
    entries={"layer_quant_config": _LAYER, "layer_type_quant_config": _LAYER},
)


def _excluded(config: ConfigReader, *, with_parents: bool) -> Matcher:
    return globbed_in(config.names("exclude"), config.where("exclude"), with_parents=with_parents)


@quant_method("quark", keys=KEYS, undecided=lambda config: _excluded(config, with_parents=True))
def parse_quark(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse excluded names, then a scheme by name or shell pattern, by class, for the rest.

    A pattern covers the names it matches, not modules below them, of which the tensors decide: vLLM's module of all
    experts may be named. The "re:" prefix is vLLM's.
    """
    _check_algorithms(config)
    export = config.replaced(export=config.get("export", {})).table("export")
    weight_format = export.text(
        "weight_format", ("real_quantized", "fake_quantized"), "real_quantized"
    )
    if weight_format == "fake_quantized":
        return []
    packing = export.text("pack_method", ("order", "reorder"), "reorder")
    rules = [when(_excluded(config, with_parents=False))]
    named: dict[str, SourceFormat] = {}
    patterns: list[ModuleRule] = []
    for name, layer in config.tables("layer_quant_config"):
        named[name] = _format(layer, packing)
        matches = globbed_in([name], config.where("layer_quant_config"))
        patterns.append(when(matches, named[name]))
    rules += [named.get, *patterns]
    for kind, layer in config.tables("layer_type_quant_config"):
        if kind == "Linear":
            rules.append(always(_format(layer, packing)))
    return [*rules, always(_format(config.table("global_quant_config"), packing))]


def _check_algorithms(config: ConfigReader) -> None:
    """Raise RequestError for algorithms that work on activations at run time: online rotations, low-rank branches.

    AWQ, GPTQ, SmoothQuant and AutoRound are done when the weights are stored. Source: RotationConfig,
    OnlineRotationConfig and SVDQuantConfig of quark.torch.quantization.config.config.
    """
    for key in ("algo_config", "pre_quant_opt_config"):
        value = config.get(key, [])
        for algorithm in value if isinstance(value, list) else [value]:
            if not isinstance(algorithm, Mapping):
                raise config.wrong(key, "objects, each with the name of an algorithm")
            name = str(algorithm.get("name", "")).lower()
            if "svd" in name:
                raise config.unsupported(key, "no svdquant: weights without a low-rank branch")
            flags = {"r1", "r2", "r4", "online_r1_rotation"}
            if not speaks_of_rotations(name) and flags.isdisjoint(algorithm):
                continue
            if algorithm.get("online_config") or is_online_spinquant(algorithm, online_r1=False):
                expected = "rotations that are fused: r4 and online_r1_rotation false"
                raise rotated(config, key, expected)


def _format(layer: ConfigReader, packing: str) -> SourceFormat:
    if not layer.has("weight"):
        return PLAIN
    spec, second, stage = _stages(layer)
    dtype = spec.text("dtype", tuple(_STORAGE))
    element = dtype
    if dtype == "mx":
        element = spec.text("mx_element_dtype", ("fp4", "fp6_e2m3", "fp6_e3m2"))
    if spec.flag("is_dynamic", False):
        raise spec.unsupported("is_dynamic", "false, for weights")
    rows, columns = _sizes(spec, dtype)
    scale = _scale_format(spec, dtype)
    is_integer = dtype in _INTEGERS
    is_mx = scale == "e8m0" and (rows, columns) == (1, 32) and not is_integer
    if second:
        _check_second(second)
        if stage == 1:
            scale = second.text("dtype", ("fp8_e4m3", "fp8_e5m2", "fp8_e5m3"))
    options = {
        "dtype": dtype,
        "pack_method": packing,
        # The scale that is stored for each group.
        "scale_name": "weight_scale_2" if second and stage == 0 else "weight_scale",
        "is_transposed": dtype in _TRANSPOSED and spec.text("qscheme") == "per_group",
    }
    return SourceFormat(
        f"quark mx{element}" if is_mx else f"quark {element}",
        "quark",
        f"uint{dtype[-1]}" if is_integer else _FLOATS[element],
        _SMALL_SCALES.get(scale, scale),
        rows,
        columns,
        has_zero_point=_has_zero_point(spec, dtype),
        scale_2="tensor" if second else "none",
        options=tuple(options.items()),
    )


def _has_zero_point(spec: ConfigReader, dtype: str) -> bool:
    is_symmetric = spec.flag("symmetric", True) and not dtype.startswith("uint")
    if dtype not in _INTEGERS or is_symmetric:
        return False
    if dtype in _WITHOUT_ZERO_POINTS:
        raise spec.unsupported("symmetric", f"true: zero points of {dtype} are not known")
    return True


def _stages(layer: ConfigReader) -> tuple[ConfigReader, ConfigReader | None, int]:
    """Return the readers of a weight's quantization, of its scales' quantization (or None), and the latter's stage.

    Source: `parse_quark_tensor_config` of humming.schema.quark.
    """
    value = layer.get("weight")
    stages = value if isinstance(value, list) else [value]
    specs = [ConfigReader(stage, layer.where("weight")) for stage in stages]
    if len(specs) == 1:
        return specs[0], None, 1
    if len(specs) != 2:
        raise layer.wrong("weight", "one or two stages of quantization")
    place = 1 if specs[1].flag("is_scale_quant", False) else 0
    return specs[1 - place], specs[place], place


def _check_second(second: ConfigReader) -> None:
    """Raise RequestError unless the scales' own quantization is one number for a whole matrix."""
    if second.flag("is_dynamic", False) or not second.flag("symmetric", True):
        raise second.unsupported("is_dynamic", "static, symmetric scales")
    second.text("qscheme", ("per_tensor",))


def _sizes(spec: ConfigReader, dtype: str) -> tuple[int, int]:
    """Return rows and columns of a scale."""
    if dtype == "mx":
        return 1, 32
    qscheme = spec.text("qscheme", ("per_tensor", "per_channel", "per_group", "per_block"))
    if qscheme == "per_channel":
        if spec.integer("ch_axis", -2, 1) not in (0, -2):
            raise spec.unsupported("ch_axis", "0: output rows")
        return 1, 0
    if qscheme == "per_group":
        if spec.integer("ch_axis", -2, 1) not in (1, -1):
            raise spec.unsupported("ch_axis", "-1: groups of columns")
        return 1, spec.integer("group_size", 1)
    if qscheme == "per_block":
        if dtype not in ("fp8_e4m3", "fp8_e5m2"):
            raise spec.unsupported("qscheme", "per_tensor, per_channel or per_group, but for fp8")
        return spec.pair("block_size")
    return 0, 0


def _scale_format(spec: ConfigReader, dtype: str) -> str:
    """Return the storage of scales; "" if not given. Blocks give it in `scale_type` instead."""
    if dtype == "mx" or spec.get("scale_type") == "float8_e8m0fnu":
        return "e8m0"
    formats = ("float32", "float16", "bfloat16", "e8m0", "e5m3", "")
    return spec.text("scale_format", formats, "")


# --- the tensors -------------------------------------------------------------------------------------------


# Codes of these are packed along the last dimension; of the others each is an element.
_NIBBLES = ("int4", "uint4")  # eight to an int32
_BYTES = ("int3", "fp4", "fp6_e2m3", "fp6_e3m2")


def _packed(dtype: str, bits: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stored shape of codes."""
    last = shape[-1]
    if dtype == "mx":
        last = last // 32 * (1 + bits * 4)
    elif dtype in _NIBBLES:
        last = math.ceil(last / 8)
    elif dtype in _BYTES:
        last = last * bits // 8
    return (*shape[:-1], last)


@register_encoding
class Quark(Encoding):
    """Integers (two's complement for intN) per tensor, channel or group; fp4, fp6, fp8; embedded mx blocks.

    Codes are [N, K] or, for integers per group, [K, N] packed along N; scales likewise. There may be a second scale for
    all of them. Source: quark, torch/utils/pack.py.
    """

    name = "quark"
    part_names = ("weight_scale", "weight_scale_2", "weight_zero_point", "weight_zero_point_2")
    byte_scale_dtype = ""

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        dtype = fmt.option("dtype")
        is_transposed = fmt.option("is_transposed")
        bits = code_bits(fmt.b_dtype)
        matrix.require_multiples(32, 8 if is_transposed else 1)
        storage = (_STORAGE[dtype],)
        shape = _packed(dtype, bits, (k, n) if is_transposed else (n, k))
        stored = [StoredTensor("weight", ("weight",), storage, (shape,))]
        if dtype == "mx":
            return stored
        scales = matrix.scale_shapes
        if is_transposed:
            scales = ((math.ceil(k / fmt.group_k), n),)
        name = fmt.option("scale_name")
        dtypes = SCALE_DTYPES.get(fmt.scale_dtype, FLOATS)
        stored.append(StoredTensor("scale", (name,), dtypes, scales))
        if dtype in _INTEGERS:  # Quark stores the zeros of symmetric codes as well
            scale_shape = scales[0] if is_transposed else scales[-1]
            shapes = ONE if fmt.group_n == 0 else (_packed(dtype, bits, scale_shape),)
            names = (name.replace("scale", "zero_point"),)
            stored.append(StoredTensor("zero_point", names, storage, shapes, fmt.has_zero_point))
        if fmt.scale_2 != "none":
            second = "weight_scale" if name == "weight_scale_2" else "weight_scale_2"
            stored.append(StoredTensor("scale_2", (second,), FLOATS, ONE))
        return stored

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Turn integers into offset binary, packed along K."""
        import torch

        fmt = matrix.fmt
        if fmt.option("dtype") == "mx":
            return _decode_embedded(matrix)
        scale = matrix.scale()
        if fmt.option("is_transposed"):
            bits = scale.view(torch.uint8) if scale.element_size() == 1 else scale
            scale = bits.t().contiguous().view(scale.dtype)
        zero_point = None
        if fmt.b_dtype.startswith("uint"):
            packed = _pack_integers(fmt, matrix["weight"])
            if "zero_point" in matrix:
                zero_point = matrix.zero_or_midpoint(
                    _zero_points(fmt, matrix["zero_point"], matrix.shape)
                )
        else:
            packed = matrix.int32_words()
        scale_2 = matrix["scale_2"].float().reshape(-1) if "scale_2" in matrix else None
        return matrix.coded(packed, scale, zero_point=zero_point, scale_2=scale_2)


def _flip(fmt: SourceFormat, bits: int) -> int:
    """Return the mask that turns stored codes into offset binary: intN is two's complement, uintN is as it is."""
    return 1 << (bits - 1) if str(fmt.option("dtype")).startswith("int") else 0


def _nibble_order(fmt: SourceFormat) -> tuple[int, ...]:
    from hqconv.quantization.bit_codec import AWQ_ORDER, PLAIN_ORDER

    return AWQ_ORDER if fmt.option("pack_method") == "reorder" else PLAIN_ORDER


def _pack_integers(fmt: SourceFormat, weight: torch.Tensor) -> torch.Tensor:
    """Pack Quark's integers into int32 [N, K * bits / 32]."""
    import torch

    from hqconv.quantization import bit_codec
    from hqconv.quantization.bit_codec import reordered_nibbles, transpose_4bit

    bits = code_bits(fmt.b_dtype)
    flip = _flip(fmt, bits)
    order = _nibble_order(fmt)
    transposed = fmt.option("is_transposed")
    if bits == 4 and transposed:
        return transpose_4bit(weight, order, flip)
    if bits == 4:
        codes = reordered_nibbles(weight, order)
    elif bits == 3:
        codes = bit_codec.unpack(bit_codec.as_words(weight), 3)
    else:  # one code an element: int2 in int32, int8 and uint8
        codes = (weight & (2**bits - 1)).to(torch.uint8) if bits == 2 else weight.view(torch.uint8)
    if transposed:
        codes = codes.t()
    return bit_codec.pack(codes.contiguous() ^ flip, bits)


def _zero_points(fmt: SourceFormat, stored: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Unpack zero points into uint8 [N, G]: packed like the weights, except a single one."""
    import torch

    from hqconv.quantization.bit_codec import reordered_nibbles

    bits = code_bits(fmt.b_dtype)
    if bits == 4 and fmt.group_n != 0:
        order = _nibble_order(fmt)
        rows = stored if stored.ndim == 2 else stored.reshape(1, -1)
        codes = reordered_nibbles(rows, order)
    else:
        codes = (stored.to(torch.int32) & (2**bits - 1)).to(torch.uint8)
    codes = codes ^ _flip(fmt, bits)
    if fmt.option("is_transposed"):
        return codes[:, : shape[0]].t().contiguous()
    if fmt.group_n == 0:
        return codes.reshape(1, 1).expand(shape[0], 1).contiguous()
    return codes.reshape(-1)[: shape[0]].reshape(-1, 1).contiguous()


def _decode_embedded(matrix: StoredMatrix) -> Decoded:
    """Decode Quark's old mx blocks: each 32 codes follow their exponent byte, a signed power of two.

    mxfp6 keeps the upper two bits of eight codes apart from their lower four. Source: Pack_mxfp4, Pack_mxfp6.
    """
    import torch

    from hqconv.quantization import bit_codec

    bits = code_bits(matrix.fmt.b_dtype)
    blocks = matrix["weight"].reshape(matrix.shape[0], -1, 1 + bits * 4)
    exponent = blocks[..., 0].contiguous().view(torch.int8).to(torch.int16) + 127
    what = "A scale is out of range."
    expected = "exponents from -127"
    matrix.refuse_where(exponent < 0, "weight", what, expected, values=exponent - 127)
    scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    payload = blocks[..., 1:].contiguous()
    if bits == 4:
        packed = bit_codec.as_words(payload.flatten(1))
    else:
        triples = payload.reshape(matrix.shape[0], -1, 3)
        shifts = torch.tensor([6, 4, 2, 0], dtype=torch.uint8, device=payload.device)
        upper = (triples[..., :1] >> shifts) & 3
        lower = torch.stack([triples[..., 1:] >> 4, triples[..., 1:] & 15], dim=-1).flatten(2)
        packed = bit_codec.pack(((upper << 4) | lower).flatten(1), 6)
    return matrix.coded(packed, scale)
