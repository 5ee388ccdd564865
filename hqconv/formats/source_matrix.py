"""One projection of one expert: its format completed from headers, its tensors decoded.

The decoding of each format is in its own module, and gives the same bits on the CPU and on CUDA.
Legend: N output rows, K input columns. `resolve_format` needs names, dtypes and shapes only: no tensor bytes, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hqconv.errors import InputError
from hqconv.formats.encoding import (
    UNUSED_PARTS,
    MatrixHeaders,
    Shape,
    StoredMatrix,
    StoredTensor,
    encoding,
    weight_names,
)
from hqconv.formats.source_format import ANY, SourceFormat
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from hqconv.quantization.coded_matrix import CodedMatrix


_OTHER_FORMAT = (
    "Compare format, bits and group size of quantization_config, and the sizes of config.json, with the tensors: they "
    "do not belong together."
)


@dataclass(frozen=True)
class ResolvedFormat:
    """A completed format, and the use of every tensor.

    used: canonical part -> raw part name. unused: raw part name -> reason for dropping it.
    """

    format: SourceFormat
    used: dict[str, str]
    unused: dict[str, str]


def resolve_format(
    declared: SourceFormat,
    parts: Mapping[str, TensorSpec],
    n: int,
    k: int,
    remedy: Callable[[], str] = str,
) -> ResolvedFormat:
    """Fill in what the config leaves open (code and scale dtypes, `ANY` groups) from one projection's headers.

    `parts`: raw part name -> header, of one expert's projection [n, k]. Raises InputError that names the tensor
    for a missing or foreign part, a wrong dtype, shape or group count, an unusable group size, and for tensors
    that contradict the config about being quantized at all; remedy: for these.
    """
    _check_kind(declared, parts, remedy)
    _check_groups(declared, parts)
    own = encoding(declared.encoding)
    fmt = own.resolve_groups(declared, parts, n)
    bias = StoredTensor("bias", ("bias",), FLOATS, ((n,), (n, 1)), is_required=False)
    found: dict[str, TensorSpec] = {}
    used: dict[str, str] = {}
    tensors = own.stored_tensors(MatrixHeaders(fmt, parts, n, k))
    place = next(
        (i for i, one in enumerate(tensors) if one.canonical in own.bias_before), len(tensors)
    )
    for stored in (*tensors[:place], bias, *tensors[place:]):
        name = _choose(stored, parts, fmt)
        if name is not None:
            _check_part(stored, parts[name], is_float=declared.is_float)
            used[stored.canonical], found[stored.canonical] = name, parts[name]
    unused = _leftovers(fmt, parts, used)
    return ResolvedFormat(own.complete(fmt, found, used, k), used, unused)


def _check_kind(
    declared: SourceFormat, parts: Mapping[str, TensorSpec], remedy: Callable[[], str]
) -> None:
    """Refuse quantized tensors if the config declares none, and plain tensors if the config declares a format."""
    weight = parts.get("weight")
    if declared.is_float:
        quantized = [
            p for name, p in parts.items() if name not in ("weight", "bias", *UNUSED_PARTS)
        ]
        if weight is not None and weight.dtype not in FLOATS:
            quantized.insert(0, weight)
        if quantized:
            raise InputError(
                "The config declares no quantization for this module, but its tensors are quantized.",
                where=quantized[0].name,
                expected="one BF16, F16 or F32 weight",
                found=", ".join(f"{p.name} {p.dtype}" for p in quantized),
                remedy=remedy(),
            )
    elif weight is not None and weight.dtype in FLOATS:
        raise InputError(
            "The config declares a quantized module, but its weight is not quantized.",
            where=weight.name,
            expected=declared.describe(),
            found=f"{weight.dtype} {list(weight.shape)}",
            remedy=remedy(),
        )


def _check_groups(fmt: SourceFormat, parts: Mapping[str, TensorSpec]) -> None:
    for what, size in (("rows", fmt.group_n), ("columns", fmt.group_k)):
        if size < 0 and size != ANY:
            where = next(iter(parts.values())).name if parts else ""
            expected = "a positive number of " + what
            raise InputError(
                "The config's group size is not usable.", where=where, expected=expected, found=size
            )


def _choose(stored: StoredTensor, parts: Mapping[str, TensorSpec], fmt: SourceFormat) -> str | None:
    """Return the raw name that provides a part; None if an optional part is absent."""
    present = [name for name in stored.names if name in parts]
    if len(present) > 1:
        raise InputError(
            "Two tensors claim to be the same part.",
            where=parts[present[1]].name,
            expected="one of " + ", ".join(stored.names),
            found=", ".join(parts[name].name for name in present),
        )
    if not present and stored.is_required:
        raise InputError(
            f"A tensor of the format '{fmt.name}' is missing.",
            where=next(iter(parts.values())).name if parts else "",
            expected=f"a partner named {' or '.join(stored.names)}",
            found=", ".join(part.name for part in parts.values()) or "no tensor",
            remedy="Download the checkpoint again, or check quantization_config.",
        )
    return present[0] if present else None


def _check_part(stored: StoredTensor, part: TensorSpec, *, is_float: bool) -> None:
    what, expected, found = "", "", ""
    if part.dtype not in stored.dtypes:
        what, expected, found = "dtype", " or ".join(stored.dtypes), part.dtype
    elif stored.shapes is not None and part.shape not in stored.shapes:
        what, expected, found = (
            "shape",
            " or ".join(str(list(shape)) for shape in stored.shapes),
            str(list(part.shape)),
        )
    if what:
        remedy = "" if is_float or stored.canonical == "bias" else _OTHER_FORMAT
        raise InputError(
            f"A tensor has the wrong {what}.",
            where=part.name,
            expected=expected,
            found=found,
            remedy=remedy,
        )


def _leftovers(
    fmt: SourceFormat, parts: Mapping[str, TensorSpec], used: Mapping[str, str]
) -> dict[str, str]:
    unused = {}
    for name, part in parts.items():
        if name in used.values():
            continue
        if name not in UNUSED_PARTS:
            raise InputError(
                f"The format '{fmt.name}' has no such tensor.",
                where=part.name,
                expected=", ".join(sorted(used.values())),
                found=name,
                remedy="Check quantization_config: the tensors look like another format.",
            )
        unused[name] = UNUSED_PARTS[name]
    return unused


def logical_shape(fmt: SourceFormat, parts: Mapping[str, TensorSpec]) -> tuple[int, int] | None:
    """Return (N, K) that the weight part's header implies; None where the format or the header leaves it open."""
    weight = next((parts[name] for name in weight_names() if name in parts), None)
    if weight is None or len(weight.shape) < 2:
        return None
    return encoding(fmt.encoding).logical_shape(fmt, parts, weight)


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

    have = values.shape[-len(sizes) :]
    ends = [
        end
        for old, new in zip(reversed(have), reversed(sizes), strict=True)
        for end in (0, new - old)
    ]
    return pad(values, ends).contiguous() if any(ends) else values


def decode_matrix(
    fmt: SourceFormat, parts: Mapping[str, torch.Tensor], shape: Shape, names: Mapping[str, str]
) -> SourceMatrix:
    """Decode one matrix [N, K] of its parts, values checked. `names`: canonical part → tensor name.

    Raises InputError where a tensor holds what its format cannot, RequestError where a format's library is missing.
    """
    from hqconv.quantization.coded_matrix import CodedMatrix

    decoded, bias = (
        encoding(fmt.encoding).decode(StoredMatrix(fmt, parts, shape, names)),
        parts.get("bias"),
    )
    if isinstance(decoded, CodedMatrix):
        return SourceMatrix(names, coded=decoded, bias=bias)
    return SourceMatrix(names, floats=decoded, bias=bias)
