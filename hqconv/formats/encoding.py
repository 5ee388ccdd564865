"""Stored encodings: the tensors of one quantized matrix in a checkpoint, and their decoding.

Every module of this folder may register encodings, and methods of configs (`quant_config`); nothing else names them.
Legend: N output rows, K input columns, G groups along K, b bits of a code. torch is imported by `decode` only: planning
loads every encoding.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeVar

from hqconv import formats
from hqconv.errors import InputError
from hqconv.formats.source_format import FLOAT, SourceFormat
from hqconv.schemas.dtypes import FLOATS, code_bits, humming_name
from hqconv.schemas.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from hqconv.quantization.coded_matrix import CodedMatrix

Headers = Mapping[str, TensorSpec]  # of one matrix: part name -> header
Parts = Mapping[str, "torch.Tensor"]  # of one matrix: canonical part name -> tensor
Names = Mapping[str, str]  # canonical part name -> tensor name, for messages
Shape = tuple[int, int]
Shapes = tuple[tuple[int, ...], ...]

ONE: Shapes = ((), (1,), (1, 1))
# Safetensors dtypes that a scale may be stored in, by Humming's name of its type, where they are not floats.
SCALE_DTYPES = {
    "float8e8m0": ("U8", "F8_E8M0"),
    "float8e5m3": ("U8",),
    "float8e4m3": ("F8_E4M3",),
    "float8e5m2": ("F8_E5M2",),
}


@dataclass(frozen=True)
class StoredTensor:
    """A part that an encoding stores: canonical name, raw names it may have, dtypes and shapes (None: any)."""

    canonical: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: Shapes | None
    is_required: bool = True


class Encoding(ABC):
    """One way to store a matrix. A subclass is registered with `register_encoding`.

    name: `SourceFormat.encoding`. weight_names: raw names of the tensor of codes. part_names: raw names of its
    partners. b_dtype: Humming's type of the codes where it is always the same. byte_scale_dtype: the type of scales
    that are stored as bytes (U8); "" where the config says it.
    """

    name: ClassVar[str]
    weight_names: ClassVar[tuple[str, ...]] = ("weight",)
    part_names: ClassVar[tuple[str, ...]] = ()
    b_dtype: ClassVar[str] = ""
    byte_scale_dtype: ClassVar[str] = "float8e8m0"
    bias_before: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def stored_tensors(self, fmt: SourceFormat, headers: Headers, n: int, k: int) -> list[StoredTensor]:
        """List the tensors of a matrix [n, k], its bias aside. Raises InputError for sizes that cannot be packed."""

    @abstractmethod
    def decode(self, fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix | torch.Tensor:
        """Decode a matrix: codes and scales, or float32 [N, K] where Humming has no such codes.

        Raises InputError for values that the encoding cannot have, RequestError where its library is not installed.
        """

    def resolve_groups(self, fmt: SourceFormat, headers: Headers, n: int) -> SourceFormat:
        """Fill in group sizes that the config leaves open (`ANY`)."""
        return fmt

    def complete(self, fmt: SourceFormat, found: Headers, used: Mapping[str, str], k: int) -> SourceFormat:
        """Fill in code and scale dtypes. found, used: canonical part name -> header, raw name."""
        scale, scale_dtype = found.get("scale"), fmt.scale_dtype
        if scale is not None:
            stored = self.byte_scale_dtype if scale.dtype == "U8" else humming_name(scale.dtype)
            scale_dtype = stored or scale_dtype
        return replace(fmt, b_dtype=self.b_dtype or fmt.b_dtype, scale_dtype=scale_dtype)

    def logical_shape(self, fmt: SourceFormat, headers: Headers, weight: TensorSpec) -> Shape | None:
        """Return (N, K) that the header of the codes implies; None where it leaves them open."""
        return weight.shape[0], weight.shape[1]


E = TypeVar("E", bound=Encoding)
ENCODINGS: dict[str, Encoding] = {}  # by name


def register_encoding(kind: type[E]) -> type[E]:
    """Register the decorated class as a stored encoding."""
    ENCODINGS[kind.name] = kind()
    return kind


@cache
def load_formats() -> None:
    """Import every module of this folder, so that it registers its methods and encodings."""
    for module in sorted(info.name for info in pkgutil.iter_modules(formats.__path__)):
        importlib.import_module(f"{formats.__name__}.{module}")


def encoding(name: str) -> Encoding:
    """Return an encoding by its name; InputError for an unknown name (a manifest of a later hqconv)."""
    load_formats()
    if name not in ENCODINGS:
        raise InputError("The stored encoding is not known.", expected=", ".join(sorted(ENCODINGS)), found=name)
    return ENCODINGS[name]


def weight_names() -> tuple[str, ...]:
    """Return the raw names that a tensor of codes may have in any encoding, "weight" first."""
    load_formats()
    names = {name for one in ENCODINGS.values() for name in one.weight_names}
    return tuple(sorted(names, key=lambda name: (name != "weight", name)))


def part_names() -> tuple[str, ...]:
    """Return the raw part names of all encodings, names of codes first."""
    first = weight_names()
    others = {name for one in ENCODINGS.values() for name in one.part_names}
    return (*first, *sorted(others - set(first)), "bias", *UNUSED_PARTS)


_ACTIVATIONS = "activation scale, not used by 16-bit activations"
# Parts that no encoding needs -> reason for dropping them.
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


@register_encoding
class Unquantized(Encoding):
    """Experts that are not quantized: one weight [N, K] in a float dtype."""

    name = FLOAT

    def stored_tensors(self, fmt: SourceFormat, headers: Headers, n: int, k: int) -> list[StoredTensor]:
        """List the weight."""
        return [StoredTensor("weight", ("weight",), FLOATS, ((n, k),))]

    def decode(self, fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> torch.Tensor:
        """Return the weight as it is, in its own dtype."""
        return parts["weight"]


# --- headers -------------------------------------------------------------------------------------------------


def grid_shapes(n: int, k: int, group_n: int, group_k: int) -> Shapes:
    """Return the shapes that a scale per `group_n` x `group_k` weights may have; 0 means all, ragged ends count."""
    rows = math.ceil(n / group_n) if group_n else 1
    columns = math.ceil(k / group_k) if group_k else 1
    if rows * columns == 1:
        return ONE
    return ((rows, columns), (rows,)) if columns == 1 else ((rows, columns),)


def require_multiples(headers: Headers, sizes: Iterable[tuple[str, int, int]]) -> None:
    """Raise InputError unless every (dimension, size, divisor) divides."""
    for dimension, size, divisor in sizes:
        if size % divisor:
            raise InputError(
                f"The matrix has a number of {dimension} that the format cannot pack.",
                where=next(iter(headers.values())).name if headers else "",
                expected=f"a multiple of {divisor}",
                found=size,
            )


def integer_bits(fmt: SourceFormat) -> int:
    """Return the bits of a code of an integer format."""
    digits = fmt.b_dtype.removeprefix("uint")
    if not (digits.isdigit() and 1 <= int(digits) <= 8):
        raise InputError(
            "The config names no usable code type.", expected="uint1 … uint8", found=fmt.b_dtype or "nothing"
        )
    return int(digits)


def shape_of_words(fmt: SourceFormat, rows: int, words: int) -> Shape | None:
    """Return (N, K) of codes packed along K in int32 words without gaps."""
    bits = code_bits(fmt.b_dtype)
    return (rows, words * 32 // bits) if words * 32 % bits == 0 else None


# --- decoding ----------------------------------------------------------------------------------------------


def scale_grid(scale: torch.Tensor, fmt: SourceFormat, shape: Shape) -> torch.Tensor:
    """Reshape a stored scale to [ceil(N / group_n), ceil(K / group_k)]."""
    rows, columns = (
        -(-size // group) if group else 1 for size, group in zip(shape, (fmt.group_n, fmt.group_k), strict=True)
    )
    return scale.reshape(rows, columns)


def as_e8m0(scale: torch.Tensor, name: str) -> torch.Tensor:
    """View exponent bytes as float8_e8m0fnu; 255 is NaN and refused."""
    import torch

    from hqconv.quantization.coded_matrix import refuse
    from hqconv.quantization.deferred_checks import is_any

    exponents = scale.contiguous().view(torch.uint8)
    if is_any(exponents == 255):
        refuse("A scale is NaN.", name, "e8m0 exponents from 0 to 254", "255")
    return exponents.view(torch.float8_e8m0fnu)


def coded_matrix(
    fmt: SourceFormat,
    packed: torch.Tensor,
    scale: torch.Tensor,
    names: Names,
    *,
    zero_point: torch.Tensor | None = None,
    scale_2: torch.Tensor | None = None,
    column_groups: torch.Tensor | None = None,
) -> CodedMatrix:
    """Build the matrix of a format and check its values. packed: int32 [N, K * b / 32]; scale: [N', G]."""
    from hqconv.quantization.coded_matrix import CodedMatrix, checked

    matrix = CodedMatrix(fmt.b_dtype, packed, scale, fmt.group_n, fmt.group_k, zero_point, scale_2, column_groups)
    return checked(matrix, names)


def zero_or_midpoint(fmt: SourceFormat, zero: torch.Tensor, names: Names) -> torch.Tensor | None:
    """Return the zero point of an asymmetric matrix; None for a symmetric one, whose zeros must be the midpoint."""
    from hqconv.quantization.coded_matrix import refuse
    from hqconv.quantization.deferred_checks import is_any

    if fmt.has_zero_point:
        return zero
    midpoint = 2 ** (integer_bits(fmt) - 1)
    is_other = zero != midpoint
    if is_any(is_other):
        refuse(
            "A symmetric matrix has zero points other than the midpoint.",
            names.get("zero_point", ""),
            f"{midpoint} everywhere, because the config says it is symmetric",
            int(zero[is_other][0]),
            "Check `sym` (`zero_point` for AWQ) and `checkpoint_format` in quantization_config.",
        )
    return None


def group_index(fmt: SourceFormat, index: torch.Tensor, num_groups: int, names: Names) -> torch.Tensor | None:
    """Return g_idx as int64 [K], each of a group that exists; None if the group size implies the same groups."""
    import torch

    from hqconv.quantization.coded_matrix import refuse

    columns = index.long().contiguous()
    is_outside = (columns < 0) | (columns >= num_groups)
    if bool(is_outside.any()):
        refuse(
            "A column's group does not exist.",
            names.get("g_idx", ""),
            f"groups from 0 to {num_groups - 1}",
            int(columns[is_outside][0]),
        )
    implied = torch.arange(len(columns), device=columns.device) // (fmt.group_k or len(columns))
    return None if torch.equal(columns, implied) else columns
