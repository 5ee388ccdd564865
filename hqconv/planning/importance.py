"""Importance files: weights of the squared error in each input column of a layer's experts. Loads no torch.

Legend: H hidden size, I expert intermediate size.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hqconv.errors import InputError, RequestError
from hqconv.io.safetensors_header import LENGTH_BYTES, header_length, parse_header
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import GEMMS, importance_to_dict
from hqconv.schemas.tensors import TensorRef

_MAX_BYTES = 1 << 28  # far more than the largest models need: 4 (H + I) bytes a layer
_REMEDY = "Make it from this model with `hqconv importance`."


@dataclass(frozen=True)
class Importance:
    """An importance file, read whole, so that every use sees the same bytes.

    sha256: digest of `data`, the file's bytes. tensors: name → place in `data`. where: the file's path.
    """

    sha256: str
    data: bytes = field(compare=False, repr=False)
    tensors: Mapping[str, TensorRef] = field(compare=False, repr=False)
    where: str = field(compare=False)

    def to_dict(self) -> dict[str, str]:
        """Return the entry of the file in the manifest and in reports."""
        return importance_to_dict(self.sha256)

    def of_layer(self, layer: str) -> dict[str, bytes]:
        """Return GEMM → float32 values, [H] of w13 and [I] of w2, of a layer in a file that `check` has passed."""
        return {gemm: self._bytes(self.tensors[f"{layer}.{gemm}"]) for gemm in GEMMS}

    def _bytes(self, ref: TensorRef) -> bytes:
        return self.data[ref.offset_bytes : ref.offset_bytes + ref.num_bytes]

    def check(self, layers: Iterable[MoeLayer], left: Iterable[str] = ()) -> None:
        """Raise InputError unless each of `layers` has two tensors of finite numbers >= 0.

        Other tensors must belong to the layers `left`, whose experts are not converted.
        """
        sizes = {
            f"{layer.name}.{gemm}": size
            for layer in layers
            for gemm, size in zip(GEMMS, (layer.hidden_size, layer.intermediate_size), strict=True)
        }
        for name, size in sizes.items():
            self._check_tensor(name, size)
        known = {*sizes, *(f"{name}.{gemm}" for name in left for gemm in GEMMS)}
        stray = next((name for name in self.tensors if name not in known), None)
        if stray is not None:
            what, expected = ("The importance file has a tensor of no layer.", f"names such as {next(iter(sizes))}")
            raise InputError(what, where=f"{self.where}, tensor {stray!r}", expected=expected, remedy=_REMEDY)

    def _check_tensor(self, name: str, size: int) -> None:
        where, ref = f"{self.where}, tensor {name!r}", self.tensors.get(name)
        expected = f"F32 [{size}], one number for each input column"
        if ref is None:
            what, found = "The importance file has nothing on a layer.", "no such tensor"
            raise InputError(what, where=where, expected=expected, found=found, remedy=_REMEDY)
        if (ref.dtype, ref.shape) != ("F32", (size,)):
            what, found = "An importance tensor has another dtype or shape.", f"{ref.dtype} {list(ref.shape)}"
            raise InputError(what, where=where, expected=expected, found=found, remedy=_REMEDY)
        values = array("f", self._bytes(ref))
        if not math.isfinite(sum(values)) or min(values) < 0:
            column = next(i for i, value in enumerate(values) if not 0 <= value < math.inf)
            what, found = "An importance is no number from 0 on.", f"{values[column]} in column {column}"
            raise InputError(what, where=where, expected="means of squares", found=found, remedy=_REMEDY)


def read_importance(path: Path) -> Importance:
    """Read an importance file; its values are checked by `Importance.check`.

    Raises RequestError if the file does not exist, InputError if it is no whole safetensors file.
    """
    try:
        if not path.is_file():
            found = "no file" if path.exists() else "no such file"
            raise RequestError("The importance file cannot be read.", where=str(path), found=found)
        size = path.stat().st_size
        if size > _MAX_BYTES:
            what, expected = "This is no importance file: it is too large.", f"at most {_MAX_BYTES} bytes"
            raise InputError(what, where=str(path), expected=expected, found=size, remedy=_REMEDY)
        data = path.read_bytes()
    except OSError as error:
        what = "The importance file cannot be read."
        raise RequestError(what, where=str(path), found=error.strerror or error) from error
    end = header_length(str(path), data[:LENGTH_BYTES], len(data))
    tensors, _, _ = parse_header(str(path), data[:end], len(data))
    return Importance(hashlib.sha256(data).hexdigest(), data, tensors, str(path))
