"""AWQ in AutoAWQ's gemm layout: its method and its encoding.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

from hqconv.errors import InputError
from hqconv.formats.config_reader import ConfigReader, Keys, Text
from hqconv.formats.encoding import (
    Decoded,
    Encoding,
    Headers,
    MatrixHeaders,
    Shape,
    StoredMatrix,
    StoredTensor,
    integer_bits,
    register_encoding,
)
from hqconv.formats.gptq import KEYS as GPTQ_KEYS
from hqconv.formats.gptq import check_gptqmodel_keys, dynamic_rules
from hqconv.formats.module_rules import Rule, always, containing, on_path, when
from hqconv.formats.quant_config import quant_method
from hqconv.formats.source_format import SourceFormat
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.tensors import TensorSpec

KEYS = GPTQ_KEYS | Keys(
    "version backend modules_to_not_convert",
    "do_fuse modules_to_fuse fuse_max_seq_len exllama_config",
)


# Undecided are modules whose names contain an entry: AutoAWQ leaves them out, so "gate" is gate_proj too, others do
# not. Source: `exclude_layers_to_not_quantize` of awq.utils.quant_utils. Its lists for Qwen3-MoE are also written by
# tools that quantize gate_proj, and vLLM compares them with the name of the experts' module alone.
@quant_method(
    "awq", keys=KEYS, undecided=lambda config: containing(config.names("modules_to_not_convert"))
)
def parse_awq(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse AutoAWQ's config. A module is left out if an entry is on its path, as in transformers."""
    if config.has("method"):
        config.one_of("method", "awq")
    key = config.agreed("version", "checkpoint_format", "format")
    if config.text(key, default="gemm") != "gemm" or config.values.get("backend") == "llm-awq":
        raise config.unsupported(key, "gemm")
    skipped = when(on_path(config.names("modules_to_not_convert")))
    return [skipped, *dynamic_rules(config, awq_format), always(awq_format(config))]


def awq_format(config: ConfigReader, title: str = "awq") -> SourceFormat:
    """Return one AWQ format; its order of nibbles is defined for 4 bits only."""
    check_gptqmodel_keys(config)
    bits = config.integer(config.agreed("bits", "w_bit", "wbits"), 4, 4)
    return SourceFormat(
        f"{title} int{bits}",
        "awq",
        f"uint{bits}",
        group_k=config.group_size(config.agreed("group_size", "q_group_size")),
        has_zero_point=config.flag("zero_point", not config.flag("sym", False)),
    )


@register_encoding
class Awq(Encoding):
    """qweight int32 [K, N / 8], qzeros [G, N / 8] with nibbles 0 2 4 6 1 3 5 7, scales [G, N].

    Source: autoawq, utils/packing_utils.py.
    """

    name = "awq"
    weight_names = ("qweight",)
    part_names = ("qzeros", "scales")

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt, n, k = matrix.fmt, matrix.n, matrix.k
        bits = integer_bits(fmt)
        if bits != 4:
            raise InputError(
                "AWQ weights of this size are not known.", expected="4 bits", found=f"{bits} bits"
            )
        matrix.require_multiples(8, 8)
        groups = matrix.num_groups
        zeros = ((groups, n // 8),)
        return [
            StoredTensor("weight", ("qweight",), ("I32",), ((k, n // 8),)),
            StoredTensor(
                "zero_point", ("qzeros",), ("I32",), zeros, is_required=fmt.has_zero_point
            ),
            StoredTensor("scale", ("scales",), FLOATS, ((groups, n),)),
        ]

    def logical_shape(
        self, fmt: SourceFormat, headers: Headers, weight: TensorSpec
    ) -> Shape | None:
        """Return (N, K) of eight codes a word along N."""
        return weight.shape[1] * 8, weight.shape[0]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Transpose the nibbles into words along K."""
        from hqconv.quantization.bit_codec import AWQ_ORDER, reordered_nibbles, transpose_4bit

        packed = transpose_4bit(matrix["weight"], AWQ_ORDER)
        zero_point = None
        if "zero_point" in matrix:
            zero_point = matrix.zero_or_midpoint(
                reordered_nibbles(matrix["zero_point"]).t().contiguous()
            )
        return matrix.coded(packed, matrix["scale"].t().contiguous(), zero_point=zero_point)
