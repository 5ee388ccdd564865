"""Stored encodings: the tensors of one matrix in a checkpoint, its format completed from headers, and its decoding.

Every module of this folder may register encodings, and methods of configs (`quant_config`); nothing else names them.
Planning loads every encoding, and needs names, dtypes and shapes only: torch is imported where tensors are decoded,
which gives the same bits on the CPU and on CUDA.
Legend: N output rows, K input columns, G groups along K, b bits of a code.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeAlias, TypeVar

from hqconv import formats
from hqconv.errors import InputError
from hqconv.formats.source_format import FLOAT, SourceFormat
from hqconv.schemas.tensors import FLOATS, TensorSpec, code_bits, humming_name

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


# --- what an encoding stores ---------------------------------------------------------------------------------


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
                    where=_first_name(self.headers),
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


def _first_name(headers: Headers) -> str:
    return next((header.name for header in headers.values()), "")


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """Tensors of one matrix [N, K] that are to be decoded.

    tensors: by canonical part name. names: canonical part name → the tensor's name, for messages.
    """

    fmt: SourceFormat
    tensors: Mapping[str, torch.Tensor]
    shape: Shape
    names: Mapping[str, str]

    def __contains__(self, part: str) -> bool:
        return part in self.tensors

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.tensors[part]

    def refuse(
        self, part: str, what: str, expected: object, found: object, *remedy: str
    ) -> NoReturn:
        """Raise InputError about the values of a part."""
        from hqconv.quantization.coded_matrix import refuse

        refuse(what, self.names.get(part, ""), expected, found, *remedy)

    def refuse_where(
        self,
        is_bad: torch.Tensor,
        part: str,
        what: str,
        expected: object,
        *remedy: str,
        values: torch.Tensor | None = None,
    ) -> None:
        """Raise InputError about the first bad value of a part. values: of the same shape, if not as stored."""
        from hqconv.quantization.coded_matrix import is_any

        if is_any(is_bad):
            values = self[part] if values is None else values
            self.refuse(part, what, expected, values[is_bad].flatten()[0].item(), *remedy)

    def int32_words(self) -> torch.Tensor:
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

        if self.fmt.scale_dtype != "float8e8m0":
            return self["scale"]
        exponents = self["scale"].contiguous().view(torch.uint8)
        expected = "e8m0 exponents from 0 to 254"
        self.refuse_where(exponents == 255, "scale", "A scale is NaN.", expected, values=exponents)
        return exponents.view(torch.float8_e8m0fnu)

    def multiplier(self, part: str) -> torch.Tensor:
        """Return a scale in float32, inverted if it divides; refuse one that is negative, or NaN or infinite then."""
        stored = self[part].float()
        divides = self.fmt.divides(part)
        value = stored.reciprocal() if divides else stored
        is_bad = ~(value.isfinite() & (value >= 0))
        what = "A scale is not usable: its weights would be no numbers."
        self.refuse_where(is_bad, part, what, usable_scales(divides=divides), values=stored)
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

        from hqconv.quantization.coded_matrix import CodedMatrix, checked

        fmt = self.fmt
        grid = self.scale_grid(scale)
        if scale_2 is not None and scale_2.numel() == 1 and grid.element_size() == 1:
            unit = torch.ones((), dtype=grid.dtype, device=grid.device).view(torch.uint8)
            data = torch.where(scale_2.reshape(()) == 0, unit, grid.view(torch.uint8))
            grid = data.view(grid.dtype)
        matrix = CodedMatrix(
            fmt.b_dtype, packed, grid, fmt.group_n, fmt.group_k, zero_point, scale_2, column_groups
        )
        return checked(matrix, self.names)

    def zero_or_midpoint(self, zero: torch.Tensor) -> torch.Tensor | None:
        """Return the zero point of an asymmetric matrix; None for a symmetric one, whose zeros must be the midpoint."""
        if self.fmt.has_zero_point:
            return zero
        midpoint = 2 ** (code_bits(self.fmt.b_dtype) - 1)
        self.refuse_where(
            zero != midpoint,
            "zero_point",
            "A symmetric matrix has zero points other than the midpoint.",
            f"{midpoint} everywhere, because the config says it is symmetric",
            "Check `sym` (`zero_point` for AWQ) and `checkpoint_format` in quantization_config.",
            values=zero,
        )
        return None

    def group_index(self, num_groups: int) -> torch.Tensor | None:
        """Return g_idx as int64 [K], each of a group that exists; None if the group size implies the same groups."""
        import torch

        columns = self["g_idx"].long().contiguous()
        is_outside = (columns < 0) | (columns >= num_groups)
        if bool(is_outside.any()):  # never deferred: it protects the device
            expected = f"groups from 0 to {num_groups - 1}"
            found = int(columns[is_outside][0])
            self.refuse("g_idx", "A column's group does not exist.", expected, found)
        group_size = self.fmt.group_k or len(columns)
        implied = torch.arange(len(columns), device=columns.device) // group_size
        return None if torch.equal(columns, implied) else columns


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

    def complete(self, fmt: SourceFormat, found: Headers) -> SourceFormat:
        """Fill in code and scale dtypes. found: canonical part name -> header."""
        scale = found.get("scale")
        scale_dtype = fmt.scale_dtype
        if scale is not None:
            stored = self.byte_scale_dtype if scale.dtype == "U8" else humming_name(scale.dtype)
            scale_dtype = stored or scale_dtype
        if fmt.divides("scale"):
            scale_dtype = "float32"  # as its reciprocal is
        return replace(fmt, b_dtype=self.b_dtype or fmt.b_dtype, scale_dtype=scale_dtype)


E = TypeVar("E", bound=Encoding)
ENCODINGS: dict[str, Encoding] = {}  # by name


def register_encoding(kind: type[E]) -> type[E]:
    """Register the decorated class as a stored encoding."""
    ENCODINGS[kind.name] = kind()
    return kind


@register_encoding
class Unquantized(Encoding):
    """Experts that are not quantized: one weight [N, K] in a float dtype."""

    name = FLOAT

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        return [StoredTensor("weight", ("weight",), FLOATS, ((matrix.n, matrix.k),))]

    def decode(self, matrix: StoredMatrix) -> Decoded:
        return matrix["weight"]


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


def part_names() -> tuple[str, ...]:
    """Return the raw part names of all encodings, names of codes first, among these "weight"."""
    load_formats()
    codes = {name for kind in ENCODINGS.values() for name in kind.weight_names} - {"weight"}
    partners = {name for kind in ENCODINGS.values() for name in kind.part_names} - codes
    return ("weight", *sorted(codes), *sorted(partners - {"weight"}), "bias", *UNUSED_PARTS)


def usable_scales(*, divides: bool) -> str:
    """Describe the numbers that a scale may be stored as; one that makes all values 0 is among them."""
    if divides:
        return "a number above 0; infinity makes all values 0"
    return "a finite number, not below 0"


# --- formats completed from headers --------------------------------------------------------------------------


@dataclass(frozen=True)
class ResolvedFormat:
    """A completed format, and the use of every tensor.

    used: canonical part -> raw part name. unused: raw part name -> reason for dropping it.
    """

    format: SourceFormat
    used: dict[str, str]
    unused: dict[str, str]


def resolve_format(
    declared: SourceFormat, headers: Headers, n: int, k: int, remedy: Callable[[], str] = str
) -> ResolvedFormat:
    """Fill in what the config leaves open (code and scale dtypes, `ANY` groups) from one projection's headers.

    headers: of one expert's projection [n, k], by raw part names. Raises InputError that names the tensor for a missing
    or foreign part, a wrong dtype, shape or group count, and for tensors that contradict the config about being
    quantized at all; remedy: for these.
    """
    _check_kind(declared, headers, remedy)
    kind = encoding(declared.encoding)
    fmt = kind.resolve_groups(declared, headers, n)
    bias = StoredTensor("bias", ("bias",), FLOATS, ((n,), (n, 1)), is_required=False)
    found: dict[str, TensorSpec] = {}
    used: dict[str, str] = {}
    for stored in (*kind.stored_tensors(MatrixHeaders(fmt, headers, n, k)), bias):
        name = _raw_name(stored, headers, fmt)
        if name is not None:
            _check_header(stored, headers[name])
            used[stored.canonical] = name
            found[stored.canonical] = headers[name]
    unused = {name: headers[name] for name in headers if name not in used.values()}
    for name, header in unused.items():
        if name not in UNUSED_PARTS:
            raise InputError(
                f"The format '{fmt.name}' has no such tensor.",
                where=header.name,
                expected=", ".join(sorted(used.values())),
                found=name,
                remedy="Check quantization_config: the tensors look like another format.",
            )
    reasons = {name: UNUSED_PARTS[name] for name in unused}
    return ResolvedFormat(kind.complete(fmt, found), used, reasons)


def _check_kind(declared: SourceFormat, headers: Headers, remedy: Callable[[], str]) -> None:
    """Refuse quantized tensors if the config declares none, and plain tensors if the config declares a format."""
    weight = headers.get("weight")
    is_plain = weight is not None and weight.dtype in FLOATS
    quantized = {name for name in headers if name not in ("bias", *UNUSED_PARTS)}
    if is_plain:
        quantized.discard("weight")
    if weight is not None and weight.dtype == "F64":
        raise InputError(
            "Weights in float64 are not read.",
            where=weight.name,
            expected="BF16, F16 or F32",
            found=weight.dtype,
            remedy="Cast them to float32 or bfloat16.",
        )
    if declared.is_float and quantized:
        what = "The config declares no quantization for this module, but its tensors are quantized."
        names = quantized
        expected = "one BF16, F16 or F32 weight"
    elif is_plain and not declared.is_float:
        what = "The config declares a quantized module, but its weight is not quantized."
        names = {"weight"}
        expected = declared.describe()
    else:
        return
    wrong = [header for name, header in headers.items() if name in names]
    raise InputError(
        what,
        where=wrong[0].name,
        expected=expected,
        found=", ".join(f"{header.name} {header.dtype}" for header in wrong),
        remedy=remedy(),
    )


def _raw_name(stored: StoredTensor, headers: Headers, fmt: SourceFormat) -> str | None:
    """Return the raw name that provides a part; None if an optional part is absent."""
    present = [name for name in stored.names if name in headers]
    if len(present) == 1:
        return present[0]
    if present:
        raise InputError(
            "Two tensors claim to be the same part.",
            where=headers[present[1]].name,
            expected="one of " + ", ".join(stored.names),
            found=", ".join(headers[name].name for name in present),
        )
    if stored.is_required:
        raise InputError(
            f"A tensor of the format '{fmt.name}' is missing.",
            where=_first_name(headers),
            expected=f"a partner named {' or '.join(stored.names)}",
            found=", ".join(header.name for header in headers.values()) or "no tensor",
            remedy="Download the checkpoint again, or check quantization_config.",
        )
    return None


def _check_header(stored: StoredTensor, header: TensorSpec) -> None:
    if header.dtype not in stored.dtypes:
        what = "dtype"
        expected = " or ".join(stored.dtypes)
    elif stored.shapes is not None and header.shape not in stored.shapes:
        what = "shape"
        expected = " or ".join(str(list(shape)) for shape in stored.shapes)
    else:
        return
    raise InputError(
        f"A tensor has the wrong {what}.",
        where=header.name,
        expected=expected,
        found=f"{header.dtype} {list(header.shape)}",
        remedy="Compare format, bits and group size of quantization_config, and the sizes of config.json, with the "
        "tensors: they do not belong together.",
    )


# --- decoding ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SourceMatrix:
    """One decoded projection of one expert [out, in]: either `coded` or `floats` is set.

    floats: in the source's own dtype where it is not quantized, else float32. bias: [out], if there is one.
    names: canonical part → the tensor's name in the source, for messages. size: [out, in] without the zeros that fill
    the last scale group of `coded`, if there are any. stored: the size to fill with zeros for a target, see `filled`.
    """

    names: Mapping[str, str]
    coded: CodedMatrix | None = None
    floats: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    size: Shape | None = None
    stored: Shape | None = None

    @property
    def name(self) -> str:
        """The weight's name in the source."""
        return self.names["weight"]

    def values(self) -> torch.Tensor:
        """Return the weights [out, in], in the source's own dtype or decoded to float32; decoded anew by every call."""
        if self.floats is not None:
            values = self.floats
        else:
            assert self.coded is not None
            from hqconv.quantization.coded_matrix import dequantize

            values = dequantize(self.coded)
        if self.size is not None:
            values = values[: self.size[0], : self.size[1]]
        return values if self.stored is None else resized(values, self.stored)

    def filled(self, stored: Shape) -> SourceMatrix:
        """Return the matrix with zeros that fill the last scale groups of a target: `values` and bias of that size."""
        have = self.coded.shape if self.coded is not None else tuple(self.floats.shape)  # type: ignore[union-attr]
        if have == stored and self.size in (None, stored):
            return self
        bias = None if self.bias is None else resized(self.bias, stored[:1])
        return replace(self, stored=stored, bias=bias)


def resized(values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return values whose last dimensions have the given sizes: zeros are appended, or values are cut off."""
    from torch.nn.functional import pad

    ends: list[int] = []  # of each dimension, the last one first: before it and behind it
    for old, new in zip(reversed(values.shape), reversed(sizes), strict=False):
        ends += [0, new - old]
    return pad(values, ends).contiguous() if any(ends) else values


def decode_matrix(
    fmt: SourceFormat, tensors: Mapping[str, torch.Tensor], shape: Shape, names: Mapping[str, str]
) -> SourceMatrix:
    """Decode one matrix [N, K] of its parts, values checked. names: canonical part → tensor name.

    Raises InputError where a tensor holds what its format cannot, RequestError where a format's library is missing.
    """
    from hqconv.quantization.coded_matrix import CodedMatrix

    decoded = encoding(fmt.encoding).decode(StoredMatrix(fmt, tensors, shape, names))
    bias = tensors.get("bias")
    if isinstance(decoded, CodedMatrix):
        return SourceMatrix(names, coded=decoded, bias=bias)
    return SourceMatrix(names, floats=decoded, bias=bias)
