"""Importance files: weights of the squared error in each input column of a layer's experts. Loads no torch.

Legend: E experts, H hidden size, I expert intermediate size, K input columns (H or I), n tiles of 128 columns.
"""

from __future__ import annotations

import functools
import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hqconv.errors import InputError, RequestError
from hqconv.io.safetensors_header import LENGTH_BYTES, header_length, parse_header
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import GEMMS, HESSIAN, HESSIAN_TILE, importance_to_dict
from hqconv.schemas.tensors import TensorRef

_MAX_BYTES = 1 << 34  # far more than rows for every expert and tiles of the largest models
_CHUNK_BYTES = 1 << 22
_CACHED = 4  # tensors that are kept: of the layers in progress
_REMEDY = "Make it from this model with `hqconv importance`."


@dataclass(frozen=True)
class Importance:
    """An importance file. Its tensors are read when they are needed, and compared with what the file had first.

    sha256: digest of the file. tensors: name → place in the file. digests: name → SHA-256 of a tensor's bytes.
    path: the file; num_bytes: its size. where: its name in messages.
    """

    sha256: str
    num_bytes: int = field(compare=False)
    tensors: Mapping[str, TensorRef] = field(compare=False, repr=False)
    digests: Mapping[str, bytes] = field(compare=False, repr=False)
    path: Path = field(compare=False)

    @property
    def where(self) -> str:
        """The file's path, for messages."""
        return str(self.path)

    def to_dict(self) -> dict[str, str]:
        """Return the entry of the file in the manifest and in reports."""
        return importance_to_dict(self.sha256)

    def of_layer(self, layer: MoeLayer) -> LayerImportance:
        """Return the tensors of a layer in a file that `check` has passed."""
        return LayerImportance(self, layer.name)

    def read(self, name: str) -> bytes:
        """Read a tensor. Raises InputError where the file has other bytes than before."""
        ref = self.tensors[name]
        try:
            with self.path.open("rb") as file:
                file.seek(ref.offset_bytes)
                data = file.read(ref.num_bytes)
        except OSError as error:
            what = "The importance file cannot be read any more."
            raise InputError(what, where=self.where, found=error.strerror or error) from error
        if hashlib.sha256(data).digest() != self.digests[name]:
            remedy = "Leave the file unchanged until the command is done, and run it again."
            raise InputError("The importance file changed.", where=f"{self.where}, tensor {name!r}", remedy=remedy)
        return data

    def check(self, layers: Iterable[MoeLayer], left: Iterable[str] = (), *, needs_hessian: bool = False) -> None:
        """Raise InputError unless each of `layers` has two tensors of finite numbers >= 0, and tiles if needed.

        Other tensors must belong to the layers `left`, whose experts are not converted.
        """
        layers = tuple(layers)
        for layer in layers:
            for gemm, size in zip(GEMMS, (layer.hidden_size, layer.intermediate_size), strict=True):
                self._check_columns(f"{layer.name}.{gemm}", layer.num_experts, size)
                self._check_hessian(f"{layer.name}.{gemm}{HESSIAN}", size, is_needed=needs_hessian)
        stems = [f"{name}.{gemm}" for name in (*(layer.name for layer in layers), *left) for gemm in GEMMS]
        known = {f"{stem}{suffix}" for stem in stems for suffix in ("", HESSIAN)}
        stray = next((name for name in self.tensors if name not in known), None)
        if stray is not None:
            raise InputError(
                "The importance file has a tensor of no layer.",
                where=f"{self.where}, tensor {stray!r}",
                expected=f"names such as {stems[0]}",
                remedy=_REMEDY,
            )

    def _check_columns(self, name: str, num_experts: int, size: int) -> None:
        where, ref = f"{self.where}, tensor {name!r}", self.tensors.get(name)
        expected = f"F32 [{size}], one number for each input column, or [{num_experts}, {size}]"
        if ref is None:
            raise InputError(
                "The importance file has nothing on a layer.",
                where=where,
                expected=expected,
                found="no such tensor",
                remedy=_REMEDY,
            )
        if ref.dtype != "F32" or ref.shape not in ((size,), (num_experts, size)):
            raise InputError(
                "An importance tensor has another dtype or shape.",
                where=where,
                expected=expected,
                found=f"{ref.dtype} {list(ref.shape)}",
                remedy=_REMEDY,
            )
        _check_numbers(where, array("f", self.read(name)), size)

    def _check_hessian(self, name: str, size: int, *, is_needed: bool) -> None:
        where, ref = f"{self.where}, tensor {name!r}", self.tensors.get(name)
        shape = (-(-size // HESSIAN_TILE), HESSIAN_TILE, HESSIAN_TILE)
        expected, remedy = f"F32 {list(shape)}", "Make it with `hqconv importance --hessian`, or use --quantizer mse."
        if ref is None:
            if is_needed:
                what = "The quantizer gptq needs products of columns, which the importance file does not have."
                raise InputError(what, where=where, expected=expected, found="no such tensor", remedy=remedy)
            return
        if (ref.dtype, ref.shape) != ("F32", shape):
            raise InputError(
                "A tensor of column products has another dtype or shape.",
                where=where,
                expected=expected,
                found=f"{ref.dtype} {list(ref.shape)}",
                remedy=remedy,
            )
        values = array("f", self.read(name))
        if not math.isfinite(sum(values)):
            place = next(i for i, value in enumerate(values) if not math.isfinite(value))
            raise InputError(
                "A product of columns is no number.",
                where=where,
                expected="finite numbers",
                found=f"{values[place]} at {place}",
                remedy=_REMEDY,
            )
        for tile in range(shape[0]):
            begin = tile * HESSIAN_TILE**2
            _check_numbers(where, values[begin : begin + HESSIAN_TILE**2 : HESSIAN_TILE + 1], HESSIAN_TILE)


def _check_numbers(where: str, values: array[float], size: int) -> None:
    """Raise InputError unless all numbers, in rows of `size`, are finite and >= 0."""
    if not math.isfinite(sum(values)) or min(values) < 0:
        place = next(i for i, value in enumerate(values) if not 0 <= value < math.inf)
        raise InputError(
            "An importance is no number from 0 on.",
            where=where,
            expected="means of squares",
            found=f"{values[place]} in column {place % size}",
            remedy=_REMEDY,
        )


@dataclass(frozen=True)
class LayerImportance:
    """The tensors of one layer in an importance file, which are read when they are needed."""

    importance: Importance = field(repr=False)
    layer: str

    def columns(self, gemm: str) -> tuple[bytes, tuple[int, ...]]:
        """Return float32 values and their shape, [K] or [E, K]. Raises InputError where the file has changed."""
        name = f"{self.layer}.{gemm}"
        return _cached(self.importance, name), self.importance.tensors[name].shape

    def hessian(self, gemm: str) -> bytes:
        """Return float32 tiles [n, 128, 128], for the quantizer gptq. Raises InputError where the file has changed."""
        return _cached(self.importance, f"{self.layer}.{gemm}{HESSIAN}")

    def num_columns(self, gemm: str) -> int:
        """Return the number of a GEMM's input columns."""
        return self.importance.tensors[f"{self.layer}.{gemm}"].shape[-1]

    def columns_bytes(self, gemm: str) -> int:
        """Return the bytes of `columns`."""
        return self.importance.tensors[f"{self.layer}.{gemm}"].num_bytes


@functools.lru_cache(maxsize=_CACHED)
def _cached(importance: Importance, name: str) -> bytes:
    return importance.read(name)


def read_importance(path: Path) -> Importance:
    """Read the header and digests of an importance file; its values are checked by `Importance.check`.

    Raises RequestError if the file does not exist, InputError if it is no whole safetensors file.
    """
    try:
        if not path.is_file():
            found = "no file" if path.exists() else "no such file"
            raise RequestError("The importance file cannot be read.", where=str(path), found=found)
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise InputError(
                "This is no importance file: it is too large.",
                where=str(path),
                expected=f"at most {_MAX_BYTES} bytes",
                found=size,
                remedy=_REMEDY,
            )
        with path.open("rb") as file:
            return _digested(path, file, size)
    except OSError as error:
        what = "The importance file cannot be read."
        raise RequestError(what, where=str(path), found=error.strerror or error) from error


def _digested(path: Path, file: BinaryIO, size: int) -> Importance:
    """Read a file once: its header, and the digests of the file and of each tensor."""
    prefix = file.read(LENGTH_BYTES)
    head = prefix + file.read(header_length(str(path), prefix, size) - LENGTH_BYTES)
    tensors, _, _ = parse_header(str(path), head, size)
    whole, digests = hashlib.sha256(head), {}
    for ref in sorted(tensors.values(), key=lambda ref: (ref.offset_bytes, ref.num_bytes)):
        one, left = hashlib.sha256(), ref.num_bytes
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            whole.update(chunk)
            one.update(chunk)
            left -= len(chunk)
        digests[ref.name] = one.digest()
    return Importance(whole.hexdigest(), size, tensors, digests, path)
