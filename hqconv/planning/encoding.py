"""How a block's matrices become codes of the target: decided from headers and the request, before any byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hqconv.formats.source_format import DIRECT, DIRECT_ROUNDED, SourceFormat, conversion_of
from hqconv.schemas.weight_schema import WeightSchema

RTN, MSE = QUANTIZERS = ("rtn", "mse")  # round-to-nearest, or scales searched for the least squared error
# Of what mse tries and how it chooses (`backends/candidates`, `backends/search`): raised by every change of its
# results, so that `verify` knows which it can repeat. tests/quantization/test_scale_search.py holds them to a digest.
SEARCH_VERSION = 1


def quantizer_to_dict(quantizer: str) -> dict[str, Any]:
    """What a manifest says of a quantizer: nothing of rtn, of which there are no versions."""
    return {} if quantizer == RTN else {"quantizer": quantizer, "quantizer_version": SEARCH_VERSION}


@dataclass(frozen=True)
class Encoding:
    """One block's encoding.

    conversion: of `hqconv.formats.source_format`. must_be_direct: a matrix that cannot keep its codes is an error.
    takes_powers_of_two: fp8 group scales under a second scale stand for the source's powers of two, mxfp4 to nvfp4.
    is_coded: the source has codes, so that scale groups which are quantized anew without any error are counted.
    quantizer: of QUANTIZERS, for what is not kept.
    importance: with mse only. GEMM → what the squared error in each input column counts, float32 as bytes.
    """

    schema: WeightSchema
    param_dtype: str
    conversion: str
    must_be_direct: bool = False
    takes_powers_of_two: bool = False
    is_coded: bool = False
    quantizer: str = RTN
    importance: Mapping[str, bytes] | None = field(default=None, repr=False)

    @property
    def is_direct(self) -> bool:
        """Whether codes are kept, and scales or those rounded, where gate and up share what they must share."""
        return self.conversion in (DIRECT, DIRECT_ROUNDED)

    @property
    def rounds_scales(self) -> bool:
        """Whether codes are kept, and scales rounded to the parameter dtype."""
        return self.conversion == DIRECT_ROUNDED


def encoding_of(
    source: SourceFormat,
    schema: WeightSchema,
    param_dtype: str,
    *,
    must_be_direct: bool = False,
    round_scales: bool = False,
    quantizer: str = RTN,
    importance: Mapping[str, bytes] | None = None,
) -> Encoding:
    """The encoding of a block that is stored in `source`; `round_scales` as of `conversion_of`."""
    return Encoding(
        schema,
        param_dtype,
        conversion_of(source, schema, param_dtype, round_scales=round_scales),
        must_be_direct,
        takes_powers_of_two(source, schema),
        not source.is_float,
        quantizer,
        importance,
    )


def takes_powers_of_two(source: SourceFormat, schema: WeightSchema) -> bool:
    """Whether fp8 group scales under a second scale can stand for the source's powers of two: mxfp4 to nvfp4."""
    return (
        source.scale_dtype == "float8e8m0"
        and not schema.rotation
        and source.b_dtype == schema.b_dtype
        and schema.bs_dtype == "float8e4m3"
        and schema.weight_scale_2_type == "tensor"
        and source.group_n == 1
        and source.group_k % schema.weight_scale_group_size == 0
    )
