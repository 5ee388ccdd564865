"""W4AFP8, as SGLang and vLLM serve it: the method `w4afp8`, fp8 blocks with int4 experts, and the encoding of these.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import (
    Decoded,
    Encoding,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.quant_config import ModuleRule, always, quant_method, skipped_names, when
from hqconv.formats.source_format import SourceFormat
from hqconv.schemas.dtypes import FLOATS

_BLOCK = (128, 128)
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
KEYS = Keys(
    "group_size weight_block_size ignored_layers modules_to_not_convert ignore "
    "activation_scheme linear_activation_scheme moe_activation_scheme kv_cache_scheme fmt quant_algo"
)


@quant_method("w4afp8", keys=KEYS)
def parse_w4afp8(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse w4afp8: int4 in groups of 128 for routed experts, fp8 in blocks for the rest.

    Source: W4AFP8Config of vllm, model_executor/layers/quantization/w4afp8.py, and W4AFp8Config of sglang,
    srt/layers/quantization/w4afp8.py.
    """
    if config.has("weight_block_size") and config.pair("weight_block_size") != _BLOCK:
        raise config.unsupported("weight_block_size", list(_BLOCK))
    size = config.integer("group_size", 128, 128, default=128)
    int4 = SourceFormat(
        "w4afp8 int4", "int4_pairs", "uint4", "", 1, size, static_inputs="float8e4m3"
    )
    dense = SourceFormat("w4afp8 fp8", "fp8", "float8e4m3", "", *_BLOCK)
    skipped = skipped_names(config, "ignored_layers", "modules_to_not_convert", "ignore")
    return [skipped, when(lambda module: ".experts." in f".{module}.", int4), always(dense)]


@register_encoding
class Int4Pairs(Encoding):
    """int4 codes (two's complement), two to a byte [N, K / 2], the first in the low bits; scales [N, G] multiply.

    Source: `_convert_signed_int4_to_uint4b8` of vllm, model_executor/layers/quantization/w4afp8.py, and
    `pack_int4_values_to_int8` of sglang, sgl-kernel/tests/test_cutlass_w4a8_moe_mm.py, whose reference multiplies.
    """

    name = "int4_pairs"
    part_names = _SCALE_NAMES
    b_dtype = "uint4"

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt, n, k = matrix.fmt, matrix.n, matrix.k
        matrix.require_multiples(fmt.group_k)
        return [
            StoredTensor("weight", ("weight",), ("I8", "U8"), ((n, k // 2),)),
            StoredTensor("scale", _SCALE_NAMES, FLOATS, ((n, k // fmt.group_k),)),
        ]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Turn two's complement into offset binary."""
        import torch

        from hqconv.quantization import bit_codec

        packed = bit_codec.as_words(matrix["weight"].contiguous().view(torch.uint8) ^ 0x88)
        return matrix.coded(packed, matrix["scale"])
