"""BitNet's ternary weights: the method `bitnet` and its encoding.

Legend: N output rows, K input columns.
"""

from __future__ import annotations

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import (
    ONE,
    Decoded,
    Encoding,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.quant_config import ModuleRule, always, quant_method, skipped_names
from hqconv.formats.source_format import SourceFormat
from hqconv.schemas.tensors import FLOATS

KEYS = Keys("modules_to_not_convert linear_class quantization_mode use_rms_norm rms_norm_eps")


@quant_method("bitnet", keys=KEYS)
def parse_bitnet(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse BitNet's config: ternary weights, four to a byte, with one scale per matrix.

    Option scale_inverted: `BitLinear` divides by the stored scale, `AutoBitLinear` multiplies with it. Source:
    their `forward` in transformers.integrations.bitnet.
    """
    kind = config.text("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    if config.text("quantization_mode", default="offline") == "online":
        raise config.unsupported(
            "quantization_mode", "offline: online weights are rounded on each use"
        )
    if config.flag("use_rms_norm", False):
        raise config.unsupported("use_rms_norm", "false: the kernel has no norm before an expert")
    options = (("scale_inverted", kind == "bitlinear"),)
    ternary = SourceFormat("bitnet", "bitnet", "float2e0m1", group_n=0, group_k=0, options=options)
    return [skipped_names(config, "modules_to_not_convert"), always(ternary)]


@register_encoding
class BitNet(Encoding):
    """uint8 [N / 4, K], whose bits 2i, 2i + 1 are rows i * N / 4 …, as 0, 1, 2 for -1, 0, 1, and one scale."""

    name = "bitnet"
    part_names = ("weight_scale",)
    b_dtype = "float2e0m1"

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        n = matrix.n
        k = matrix.k
        matrix.require_multiples(16, 4)
        return [
            StoredTensor("weight", ("weight",), ("U8",), ((n // 4, k),)),
            StoredTensor("scale", ("weight_scale",), FLOATS, ONE),
        ]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Unpack the rows into signs and magnitudes; invert a scale that divides."""
        import torch

        from hqconv.quantization import bit_codec

        stored = matrix["weight"].contiguous()
        scale = matrix.multiplier("scale").reshape(1, 1)
        codes = torch.cat([(stored >> shift) & 3 for shift in (0, 2, 4, 6)])
        packed = bit_codec.pack((codes >> 1) | ((codes == 0).to(torch.uint8) * 3), 2)
        what = "A weight is not ternary."
        matrix.refuse_where(codes == 3, "weight", what, "2-bit codes 0, 1 and 2", values=codes)
        return matrix.coded(packed, scale)
