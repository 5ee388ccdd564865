"""Encoding of an MoE layer's matrices, decided from headers and options before any byte is read.

`EncodingOptions` are the options that decide codes and scales beside the schema. One value of them travels from
`ConversionOptions` to `ConversionSpec` to each layer's `LayerEncoding`; its methods alone say how the options appear in
the manifest, the journal, the output folder's name and the summary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats.source_format import (
    DIRECT,
    DIRECT_ROUNDED,
    SourceFormat,
    conversion_of,
    layer_conversion,
)
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.calibration import Calibration
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.grid import stored_size
from hqconv.schemas.options import GPTQ, QUANTIZERS, RTN, ConversionArguments
from hqconv.schemas.weight_schema import LayerSchema, WeightSchema, pair

# Version of the scale candidates that mse tries and of its choice (`quantization/scale_search`):
# raised by every change of its results, so that `verify` knows which searches it can repeat.
# tests/quantization/test_scale_search.py holds the results to a digest.
SEARCH_VERSION = 4
CALIBRATION_VERSION = (
    2  # of the results of gptq (`calibration/gptq`): raised by every change of them
)


def quantizer_version(quantizer: str) -> int:
    """Return the version of the results of a quantizer that is not rtn."""
    return CALIBRATION_VERSION if quantizer == GPTQ else SEARCH_VERSION


@dataclass(frozen=True)
class EncodingOptions:
    """Options that decide codes and scales beside the schema.

    round_scales: scales of another 16-bit dtype than the parameters' are rounded, and the codes kept; in a spec set
    only where this changes a layer. quantizer: rtn, mse or gptq, for codes that are not kept. calibration: of gptq.
    """

    round_scales: bool = False
    quantizer: str = RTN
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        assert (self.calibration is not None) == (self.quantizer == GPTQ), (
            "a calibration belongs to gptq"
        )

    @classmethod
    def parse(cls, arguments: ConversionArguments) -> EncodingOptions:
        """Return the options of the API's arguments; a calibration comes when the device is known."""
        return cls(arguments.round_scales, arguments.quantizer)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EncodingOptions:
        """Read the options that a manifest records.

        Raises RequestError, whose `where` is the manifest's key, for values that no conversion writes.
        """
        quantizer = document.get("quantizer", RTN)
        version = document.get("quantizer_version")
        is_versioned = quantizer != RTN and type(version) is int and version > 0
        found = {
            "round_scales": (
                document.get("round_scales", True) is True,
                document.get("round_scales"),
            ),
            "quantizer": (quantizer in (*QUANTIZERS, GPTQ), repr(quantizer)),
            "calibration": (
                ("calibration" in document) == (quantizer == GPTQ),
                f"quantizer {quantizer}",
            ),
            "quantizer_version": (
                version is None or is_versioned,
                f"{version!r}, of the quantizer {quantizer}",
            ),
        }
        for key, (is_possible, value) in found.items():
            if not is_possible:
                raise RequestError(
                    "A recorded option has an impossible value.", where=key, found=value
                )
        calibration = Calibration.from_dict(document["calibration"]) if quantizer == GPTQ else None
        return cls("round_scales" in document, quantizer, calibration)

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest's keys; options at their default have none."""
        document: dict[str, Any] = {"round_scales": True} if self.round_scales else {}
        if self.quantizer != RTN:
            document["quantizer"] = self.quantizer
            document["quantizer_version"] = quantizer_version(self.quantizer)
        if self.calibration is not None:
            document["calibration"] = self.calibration.to_dict()
        return document

    def request(self) -> dict[str, Any]:
        """Return all options by their names on the command line."""
        calibration = self.calibration
        return {
            "quantizer": self.quantizer,
            "round_scales": self.round_scales,
            "calibrate": None if calibration is None else calibration.name,
            "calibrate_tokens": None if calibration is None else calibration.num_tokens,
            "calibrate_context": None if calibration is None else calibration.context_length,
        }

    def name_parts(self) -> tuple[str, ...]:
        """Return the parts of a default output folder's name."""
        return () if self.quantizer == RTN else (self.quantizer,)

    def summary(self) -> dict[str, Any]:
        """Return the keys of plans and summaries: see `summary_of`."""
        return self.summary_of(self.to_dict())

    @staticmethod
    def summary_of(document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of plans and summaries for a manifest, which may be damaged."""
        return {
            "quantizer": document.get("quantizer", RTN),
            "calibration": document.get("calibration"),
        }

    @property
    def keeps_scales(self) -> bool:
        """False where scales of another dtype than the parameters' are rounded."""
        return not self.round_scales

    def conversion(self, source: SourceFormat, schema: WeightSchema, param_dtype: str) -> str:
        """Return how a GEMM in the format `source` is converted, as `conversion_of`."""
        return conversion_of(source, schema, param_dtype, round_scales=self.round_scales)

    def conversions(
        self, source: SourceFormat, schema: LayerSchema, param_dtype: str
    ) -> dict[str, str]:
        """Return how each GEMM of a layer in the format `source` is converted, as `conversion_of`."""
        return {
            gemm: self.conversion(source.of_gemm(gemm), schema.of(gemm), param_dtype)
            for gemm in GEMMS
        }

    def effective(
        self, layers: Iterable[tuple[SourceFormat, LayerSchema]], param_dtype: str
    ) -> EncodingOptions:
        """Return the options without a `round_scales` that changes no layer: equal bytes get equal manifests."""
        plain = replace(self, round_scales=False)
        changes = any(
            self.conversions(source, schema, param_dtype)
            != plain.conversions(source, schema, param_dtype)
            for source, schema in layers
        )
        return replace(self, round_scales=changes)


@dataclass(frozen=True)
class GemmEncoding:
    """Encoding of the matrices of one of a layer's GEMMs.

    conversion: of `hqconv.formats.source_format`. must_be_direct: a matrix that cannot keep its codes is an error.
    takes_powers_of_two: fp8 group scales under a second scale stand for the source's powers of two, mxfp4 to nvfp4.
    is_coded: the source has codes, so that scale groups which are quantized anew without any error are counted.
    is_permuted: columns have an order of groups (`SourceFormat.is_permuted`).
    """

    schema: WeightSchema
    param_dtype: str
    options: EncodingOptions
    conversion: str
    must_be_direct: bool = False
    takes_powers_of_two: bool = False
    is_coded: bool = False
    is_permuted: bool = False

    @property
    def quantizer(self) -> str:
        """Method that chooses scales for codes that are not kept: rtn, mse or gptq."""
        return self.options.quantizer

    @property
    def plain_quantizer(self) -> str:
        """Method for matrices whose inputs no calibration knows: rtn or mse."""
        return RTN if self.quantizer == GPTQ else self.quantizer

    @property
    def is_direct(self) -> bool:
        """True where codes are kept, with their scales or rounded ones, if gate and up share what they must share."""
        return self.conversion in (DIRECT, DIRECT_ROUNDED)

    @property
    def keeps_codes(self) -> bool:
        """True where the codes of all matrices are kept, whatever their values."""
        return self.is_direct and not (self.schema.is_coupled or self.is_permuted)


@dataclass(frozen=True)
class LayerEncoding:
    """Encoding of one layer's matrices: that of its GEMMs.

    shapes: role → [out, in] of the packed tensors: zeros fill the last scale group where the intermediate size is no
    whole number of them.
    """

    w13: GemmEncoding
    w2: GemmEncoding
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def of(self, part: str) -> GemmEncoding:
        """Return the encoding of a GEMM (w13, w2) or of a projection (w1, w3, w2)."""
        return self.w2 if part == "w2" else self.w13

    @property
    def schema(self) -> LayerSchema:
        """The schemas of the GEMMs."""
        return pair(self.w13.schema, self.w2.schema)

    @property
    def conversion(self) -> str:
        """Conversion of the layer: see `layer_conversion`."""
        return layer_conversion({gemm: self.of(gemm).conversion for gemm in GEMMS})

    @property
    def is_direct(self) -> bool:
        """True where the codes of both GEMMs are kept: see `GemmEncoding`."""
        return self.w13.is_direct and self.w2.is_direct

    @property
    def keeps_codes(self) -> bool:
        """True where the codes of all matrices are kept, whatever their values."""
        return self.w13.keeps_codes and self.w2.keeps_codes

    @property
    def is_coded(self) -> bool:
        """True for a source with codes."""
        return self.w13.is_coded

    @property
    def quantizer(self) -> str:
        """Method that chooses scales for codes that are not kept: rtn, mse or gptq."""
        return self.w13.quantizer

    @property
    def sorts_columns(self) -> bool:
        """True where codes of w2 are kept and its columns are sorted by group, with gate's and up's rows."""
        return self.w2.is_direct and self.w2.is_permuted


def encoding_of(
    layer: MoeLayer,
    schema: LayerSchema,
    param_dtype: str,
    options: EncodingOptions,
    *,
    must_be_direct: Collection[str] = (),
) -> LayerEncoding:
    """Return the encoding of a source's layer. must_be_direct: GEMMs that must keep the source's codes."""
    inner, of_gemms = stored_size(layer.intermediate_size, schema), {}
    for gemm in GEMMS:
        source, one = layer.format.of_gemm(gemm), schema.of(gemm)
        of_gemms[gemm] = GemmEncoding(
            one,
            param_dtype,
            options,
            options.conversion(source, one, param_dtype),
            gemm in must_be_direct,
            takes_powers_of_two(source, one),
            not layer.format.is_float,
            source.is_permuted,
        )
    tall, wide = (inner, layer.hidden_size), (layer.hidden_size, inner)
    return LayerEncoding(
        **of_gemms, shapes={role: wide if role == "w2" else tall for role in layer.roles}
    )


def takes_powers_of_two(source: SourceFormat, schema: WeightSchema) -> bool:
    """Return whether fp8 group scales under a second scale can hold the source's powers of two: mxfp4 to nvfp4."""
    return (
        source.scale_dtype == "float8e8m0"
        and source.scale_2 == "none"
        and not schema.rotation
        and source.b_dtype == schema.b_dtype
        and schema.bs_dtype == "float8e4m3"
        and schema.weight_scale_2_type == "tensor"
        and source.group_n == 1
        and source.group_k % schema.weight_scale_group_size == 0
    )
