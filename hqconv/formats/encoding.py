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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeAlias, TypeVar

from hqconv import formats
from hqconv.errors import InputError
from hqconv.formats.source_format import FLOAT, SourceFormat
from hqconv.schemas.dtypes import FLOATS, code_bits, humming_name
from hqconv.schemas.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from hqconv.quantization.coded_matrix import CodedMatrix

Headers = Mapping[str, TensorSpec]  # of one matrix: part name -> header
Shape = tuple[int, int]
Decoded: TypeAlias = "CodedMatrix | torch.Tensor"
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


@dataclass(frozen=True)
class MatrixHeaders:
    """Headers of one matrix [n, k] in a format: its tensors by their raw part names."""

    fmt: SourceFormat
    headers: Headers
    n: int
    k: int

    def require_multiples(self, columns: int, rows: int = 1) -> None:
        """Raise InputError unless the divisors divide the numbers of columns and of rows."""
        for dimension, size, divisor in (("columns", self.k, columns), ("rows", self.n, rows)):
            if size % divisor:
                raise InputError(
                    f"The matrix has a number of {dimension} that the format cannot pack.",
                    where=next(iter(self.headers.values())).name if self.headers else "",
                    expected=f"a multiple of {divisor}",
                    found=size,
                )

    @property
    def num_groups(self) -> int:
        """Number of groups along K; the last one may be ragged."""
        return math.ceil(self.k / self.fmt.group_k) if self.fmt.group_k else 1

    @property
    def scale_shapes(self) -> Shapes:
        """Shapes that the scale of each group may have; ragged ends count."""
        rows = math.ceil(self.n / self.fmt.group_n) if self.fmt.group_n else 1
        columns = self.num_groups
        if rows * columns == 1:
            return ONE
        return ((rows, columns), (rows,)) if columns == 1 else ((rows, columns),)


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """Tensors of one matrix [N, K] that are to be decoded.

    parts: canonical part name → tensor. names: canonical part name → the tensor's name, for messages.
    """

    fmt: SourceFormat
    parts: Mapping[str, torch.Tensor]
    shape: Shape
    names: Mapping[str, str]

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.parts[part]

    def refuse(
        self, part: str, what: str, expected: object, found: object, *remedy: str
    ) -> NoReturn:
        """Raise InputError about the values of a part."""
        from hqconv.quantization.value_checks import refuse

        refuse(what, self.names.get(part, ""), expected, found, *remedy)

    def words(self) -> torch.Tensor:
        """Return the codes, packed along K, as int32 words [N, K * b / 32]."""
        from hqconv.quantization import bit_codec

        return bit_codec.as_words(self["weight"].reshape(self.shape[0], -1))

    def scale_grid(self, scale: torch.Tensor) -> torch.Tensor:
        """Reshape one value for each group to [ceil(N / group_n), ceil(K / group_k)]."""
        groups = zip(self.shape, (self.fmt.group_n, self.fmt.group_k), strict=True)
        return scale.reshape([-(-size // group) if group else 1 for size, group in groups])

    def scale(self) -> torch.Tensor:
        """Return the stored scale; exponent bytes as float8_e8m0fnu, of which 255 is NaN and refused."""
        import torch

        from hqconv.quantization.value_checks import is_any

        if self.fmt.scale_dtype != "float8e8m0":
            return self["scale"]
        exponents = self["scale"].contiguous().view(torch.uint8)
        if is_any(exponents == 255):
            self.refuse("scale", "A scale is NaN.", "e8m0 exponents from 0 to 254", "255")
        return exponents.view(torch.float8_e8m0fnu)

    def multiplier(self, part: str) -> torch.Tensor:
        """Return a scale in float32, inverted if it divides; refuse one that is negative, or NaN or infinite then."""
        from hqconv.quantization.value_checks import is_any

        stored, divides = self[part].float(), self.fmt.divides(part)
        value = stored.reciprocal() if divides else stored
        is_bad = ~(value.isfinite() & (value >= 0))
        if is_any(is_bad):
            self.refuse(
                part,
                "A scale is not usable: its weights would be no numbers.",
                usable_scales(divides=divides),
                stored[is_bad].flatten()[0].item(),
            )
        return value

    def coded(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        *,
        zero_point: torch.Tensor | None = None,
        scale_2: torch.Tensor | None = None,
        column_groups: torch.Tensor | None = None,
    ) -> CodedMatrix:
        """Build the decoded matrix and check its values. packed: int32 [N, K * b / 32].

        Under a second scale of 0 for the matrix the others become 1: of a matrix of zeros modelopt makes them 0 / 0.
        """
        import torch

        from hqconv.quantization.coded_matrix import CodedMatrix
        from hqconv.quantization.value_checks import checked

        fmt, grid = self.fmt, self.scale_grid(scale)
        if scale_2 is not None and scale_2.numel() == 1 and grid.element_size() == 1:
            one = torch.ones((), dtype=grid.dtype, device=grid.device).view(torch.uint8)
            grid = torch.where(scale_2.reshape(()) == 0, one, grid.view(torch.uint8)).view(
                grid.dtype
            )
        matrix = CodedMatrix(
            fmt.b_dtype, packed, grid, fmt.group_n, fmt.group_k, zero_point, scale_2, column_groups
        )
        return checked(matrix, self.names)

    def zero_or_midpoint(self, zero: torch.Tensor) -> torch.Tensor | None:
        """Return the zero point of an asymmetric matrix; None for a symmetric one, whose zeros must be the midpoint."""
        from hqconv.quantization.value_checks import is_any

        if self.fmt.has_zero_point:
            return zero
        midpoint = 2 ** (integer_bits(self.fmt) - 1)
        is_other = zero != midpoint
        if is_any(is_other):
            self.refuse(
                "zero_point",
                "A symmetric matrix has zero points other than the midpoint.",
                f"{midpoint} everywhere, because the config says it is symmetric",
                int(zero[is_other][0]),
                "Check `sym` (`zero_point` for AWQ) and `checkpoint_format` in quantization_config.",
            )
        return None

    def group_index(self, num_groups: int) -> torch.Tensor | None:
        """Return g_idx as int64 [K], each of a group that exists; None if the group size implies the same groups."""
        import torch

        columns = self["g_idx"].long().contiguous()
        is_outside = (columns < 0) | (columns >= num_groups)
        if bool(is_outside.any()):
            expected, found = f"groups from 0 to {num_groups - 1}", int(columns[is_outside][0])
            self.refuse("g_idx", "A column's group does not exist.", expected, found)
        implied = torch.arange(len(columns), device=columns.device) // (
            self.fmt.group_k or len(columns)
        )
        return None if torch.equal(columns, implied) else columns


class Encoding(ABC):
    """One way to store a matrix. A subclass is registered with `register_encoding`.

    name: `SourceFormat.encoding`. weight_names: raw names of the tensor of codes. part_names: raw names of its
    partners. b_dtype: Humming's type of the codes where it is always the same. byte_scale_dtype: the type of scales
    that are stored as bytes (U8); "" where the config says it. rows_per_element, columns_per_element: of the codes in
    an element of the stored tensor.
    """

    name: ClassVar[str]
    weight_names: ClassVar[tuple[str, ...]] = ("weight",)
    part_names: ClassVar[tuple[str, ...]] = ()
    b_dtype: ClassVar[str] = ""
    byte_scale_dtype: ClassVar[str] = "float8e8m0"
    rows_per_element: ClassVar[int] = 1
    columns_per_element: ClassVar[Fraction] = Fraction(1)
    bias_before: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        """List the tensors of a matrix, its bias aside. Raises InputError for sizes that cannot be packed."""

    @abstractmethod
    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Decode a matrix: codes and scales, or float32 [N, K] where Humming has no such codes.

        Raises InputError for values that the encoding cannot have, RequestError where its library is not installed.
        """

    def resolve_groups(self, fmt: SourceFormat, headers: Headers, n: int) -> SourceFormat:
        """Fill in group sizes that the config leaves open (`ANY`)."""
        return fmt

    def complete(
        self, fmt: SourceFormat, found: Headers, used: Mapping[str, str], k: int
    ) -> SourceFormat:
        """Fill in code and scale dtypes. found, used: canonical part name -> header, raw name."""
        scale, scale_dtype = found.get("scale"), fmt.scale_dtype
        if scale is not None:
            stored = self.byte_scale_dtype if scale.dtype == "U8" else humming_name(scale.dtype)
            scale_dtype = stored or scale_dtype
        return replace(fmt, b_dtype=self.b_dtype or fmt.b_dtype, scale_dtype=scale_dtype)

    def logical_shape(
        self, fmt: SourceFormat, headers: Headers, weight: TensorSpec
    ) -> Shape | None:
        """Return (N, K) that the header of the codes implies; None where it leaves them open."""
        return weight.shape[0] * self.rows_per_element, int(
            weight.shape[1] * self.columns_per_element
        )


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
        raise InputError(
            "The stored encoding is not known.", expected=", ".join(sorted(ENCODINGS)), found=name
        )
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

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        return [StoredTensor("weight", ("weight",), FLOATS, ((matrix.n, matrix.k),))]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        return matrix["weight"]


def usable_scales(*, divides: bool) -> str:
    """Describe the numbers that a scale may be stored as; one that makes all values 0 is among them."""
    return (
        "a number above 0; infinity makes all values 0"
        if divides
        else "a finite number, not below 0"
    )


def integer_bits(fmt: SourceFormat) -> int:
    """Return the bits of a code of an integer format."""
    digits = fmt.b_dtype.removeprefix("uint")
    if not (digits.isdigit() and 1 <= int(digits) <= 8):
        raise InputError(
            "The config names no usable code type.",
            expected="uint1 … uint8",
            found=fmt.b_dtype or "nothing",
        )
    return int(digits)


def shape_of_words(fmt: SourceFormat, rows: int, words: int) -> Shape | None:
    """Return (N, K) of codes packed along K in int32 words without gaps."""
    bits = code_bits(fmt.b_dtype)
    return (rows, words * 32 // bits) if words * 32 % bits == 0 else None
