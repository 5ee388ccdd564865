"""Microscaling: the methods `mxfp4` (GPT-OSS) and `mxfp8` (MiniMax), and the encodings mxfp4, mxfp6, mxfp8 and nvfp4.

Legend: N output rows, K input columns. OCP's formats have a power-of-two scale (e8m0) per 32 columns, NVIDIA's fp4 one
in e4m3 per 16 and one for the matrix.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import (
    ENCODINGS,
    ONE,
    SCALE_DTYPES,
    Decoded,
    Encoding,
    Headers,
    MatrixHeaders,
    Shapes,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.quant_config import (
    ModuleRule,
    always,
    globbed_in,
    on_path,
    quant_method,
    skipped_names,
    when,
)
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.tensors import FLOATS, code_bits

if TYPE_CHECKING:
    import torch

    from hqconv.quantization.coded_matrix import CodedMatrix

_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale", "scale_inv", "scales")


def mx_format(name: str, encoding: str) -> SourceFormat:
    """Return the format of an encoding of this module, "mxfp4", "mxfp6" or "mxfp8", under a name."""
    return SourceFormat(name, encoding, ENCODINGS[encoding].b_dtype, "float8e8m0", 1, 32)


def _is_linear(module: str) -> bool:
    """Return True for modules that mxfp4 leaves out, listed or not.

    Sources: `Mxfp4Config` of vLLM's layers/quantization/mxfp4.py; transformers, integrations/mxfp4.py.
    """
    return "experts" not in module.split(".")


@quant_method(
    "mxfp4", keys=Keys("modules_to_not_convert dequantize"), undecided=lambda _config: _is_linear
)
def parse_mxfp4(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse GPT-OSS's config: fp4 with a power-of-two scale per 32 columns."""
    return [skipped_names(config, "modules_to_not_convert"), always(MXFP4)]


MXFP8_KEYS = Keys(
    "weight_block_size ignored_layers modules_to_not_convert activation_scheme fmt scale_fmt dequantize"
)


@quant_method("mxfp8", keys=MXFP8_KEYS)
def parse_mxfp8(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse MiniMax's config: ModelOpt's MXFP8 with other keys. A name covers its path.

    Source: `ModelOptMxFp8Config.from_config` of vLLM's layers/quantization/modelopt.py.
    """
    key = config.first("ignored_layers", "modules_to_not_convert")
    names = config.names(key)
    return [
        when(globbed_in(names, config.where(key))),
        when(on_path(names)),
        always(mx_format("mxfp8", "mxfp8")),
    ]


class _Microscaling(Encoding):
    part_names = _SCALE_NAMES
    weight_dtypes: ClassVar[tuple[str, ...]] = ("U8",)

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        matrix.require_multiples(32)
        shapes = self.weight_shapes(matrix.n, matrix.k, matrix.headers)
        scales = ((matrix.n, matrix.k // 32),)
        return [
            StoredTensor("weight", self.weight_names, self.weight_dtypes, shapes),
            StoredTensor("scale", _SCALE_NAMES, SCALE_DTYPES["float8e8m0"], scales),
        ]

    def weight_shapes(self, n: int, k: int, headers: Headers) -> Shapes:
        """Return the shapes that the codes may have."""
        return ((n, k * code_bits(self.b_dtype) // 8),)

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep the codes; give the scales their dtype.

        Source: OCP Microscaling Formats 1.0; transformers, integrations/mxfp4.py, convert_moe_packed_tensors.
        """
        return matrix.coded(matrix.int32_words(), matrix.scale())


@register_encoding
class Mxfp4(_Microscaling):
    """fp4 codes [N, K / 2], the low nibble first, or GPT-OSS's blocks [N, K / 32, 16]; e8m0 scales [N, K / 32]."""

    name = "mxfp4"
    weight_names = ("weight", "weight_packed", "blocks")
    b_dtype = "float4e2m1"
    weight_dtypes = ("U8", "I8", "F4")

    def weight_shapes(self, n: int, k: int, headers: Headers) -> Shapes:
        """Return the shapes of bytes, of blocks, and of elements where an F4 tensor counts these."""
        has_elements = any(header.dtype == "F4" for header in headers.values())
        return ((n, k // 2), (n, k // 32, 16), *(((n, k),) if has_elements else ()))


@register_encoding
class Mxfp6(_Microscaling):
    """fp6 codes (e2m3), four in three bytes, the first in the lowest bits: [N, K * 3 / 4]; e8m0 scales [N, K / 32].

    Source: `pack_fp6_to_uint8` of compressed_tensors.compressors.mxfp6.helpers.
    """

    name = "mxfp6"
    weight_names = ("weight_packed",)
    b_dtype = "float6e2m3"


@register_encoding
class Mxfp8(_Microscaling):
    """fp8 codes [N, K]; e8m0 scales [N, K / 32]."""

    name = "mxfp8"
    weight_names = ("weight", "weight_packed")
    b_dtype = "float8e4m3"
    weight_dtypes = ("F8_E4M3", "U8")


MXFP4 = mx_format("mxfp4", "mxfp4")


def nvfp4_format(name: str) -> SourceFormat:
    """Return NVIDIA's fp4 under a name: an e4m3 scale per 16 columns and one scale for the matrix."""
    return SourceFormat(name, "nvfp4", "float4e2m1", "float8e4m3", 1, 16, scale_2="tensor")


@register_encoding
class Nvfp4(Encoding):
    """fp4 codes [N, K / 2] with e4m3 scales [N, G] of 16 columns (ModelOpt's W4A8: 32) and one float32 second scale.

    Option scale_2: "multiplies" (modelopt, weight_scale_2) or "divides" (compressed-tensors, weight_global_scale:
    scale_2 is its float32 reciprocal).
    """

    name = "nvfp4"
    weight_names = ("weight", "weight_packed")
    part_names = ("weight_scale", "weight_scale_2", "weight_global_scale")
    b_dtype = "float4e2m1"
    byte_scale_dtype = "float8e4m3"  # some writers store them as bytes

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
        matrix.require_multiples(fmt.group_k)
        return [
            StoredTensor("weight", self.weight_names, ("U8",), ((n, k // 2),)),
            StoredTensor("scale", ("weight_scale",), ("F8_E4M3", "U8"), ((n, k // fmt.group_k),)),
            StoredTensor("scale_2", ("weight_scale_2", "weight_global_scale"), ("F32",), ONE),
        ]

    def complete(self, fmt: SourceFormat, found: Headers) -> SourceFormat:
        """Set by its name if the second scale multiplies or divides."""
        is_inverse = found["scale_2"].name.endswith("weight_global_scale")
        options = {**dict(fmt.options), "scale_2": "divides" if is_inverse else "multiplies"}
        return super().complete(replace(fmt, options=tuple(options.items())), found)

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep the codes and scales; invert a second scale that divides."""
        return _coded_nvfp4(matrix, matrix.multiplier("scale_2"))


def _coded_nvfp4(matrix: StoredMatrix, scale_2: torch.Tensor) -> CodedMatrix:
    import torch

    scale = matrix["scale"].contiguous().view(torch.float8_e4m3fn)
    return matrix.coded(matrix.int32_words(), scale, scale_2=scale_2.reshape(1))


@register_encoding
class Nvfp4Amax(Nvfp4):
    """Inkling2Loop's nvfp4: in place of the second scale an amax of the matrix, and what divides it.

    Source: `Inkling2LoopDequantizeExperts` of transformers.core_model_loading.
    """

    name = "nvfp4_amax"
    part_names = ("weight_scale", "weight_amax", "weight_outer_scale_denominator")

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        codes, scale, _ = super().stored_tensors(matrix)
        amax = StoredTensor("scale_2", ("weight_amax",), FLOATS, ONE)
        divisor = StoredTensor("divisor", ("weight_outer_scale_denominator",), FLOATS, ONE)
        return [codes, scale, amax, divisor]

    def complete(self, fmt: SourceFormat, found: Headers) -> SourceFormat:
        """Leave the second scale as it is: amax multiplies."""
        return Encoding.complete(self, fmt, found)

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep the codes and scales; the second scale is amax / denominator in float32."""
        divisor = matrix.multiplier("divisor")
        what = "A scale is not usable: its weights would be no numbers."
        matrix.refuse_where(divisor == 0, "divisor", what, "a number above 0")
        return _coded_nvfp4(matrix, matrix.multiplier("scale_2").reshape(1) / divisor.reshape(1))


def undeclared_format(part_names: Collection[str]) -> SourceFormat:
    """Return the format of a stack of Inkling2Loop's experts, whose config declares none, by the names of its parts."""
    if "weight_amax" in part_names:
        return replace(nvfp4_format("nvfp4 of amax"), encoding=Nvfp4Amax.name)
    return mx_format("mxfp8", "mxfp8") if "weight_scale" in part_names else PLAIN
