"""GGUF files as the source of a model's experts; all other tensors come from safetensors in the same folder.

Each stack of experts has a ggml type, which the gguf library decodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.errors import InputError, RequestError
from hqconv.io.checkpoint_files import check_text
from hqconv.io.gguf_header import library, read_header
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.expert_map import ExpertMap
from hqconv.models.family_choice import looks_like_expert
from hqconv.models.gguf_experts import map_gguf
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import SourceFile
from hqconv.schemas.artifact_names import INDEX, SINGLE
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hqconv.formats.decode_matrix import SourceMatrix

_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_CHUNK_NUMBERS = 1 << 18  # decoded at a time: the library's temporaries are several times as large


def open_with_gguf(root: Path) -> SafetensorsSource:
    """Open a folder with GGUF files: experts come from them, unless the safetensors hold experts themselves.

    Raises RequestError without safetensors or the gguf library; InputError for unreadable or contradictory files.
    """
    if not any((root / name).is_file() for name in (SINGLE, INDEX)):
        raise RequestError(
            "GGUF files alone are not enough: only experts are taken from them.",
            where=str(root),
            expected=f"config.json, and {SINGLE} or {INDEX} with all of the model's other tensors",
            found=", ".join(sorted(path.name for path in root.glob("*.gguf"))[:5]),
            remedy="Put the original model's config.json and its safetensors without the experts into the folder.",
        )
    source = SafetensorsSource(root)
    if any(looks_like_expert(name, len(ref.shape)) for name, ref in source.tensors.items()):
        return source
    source.close()
    return GgufSource(root)


class GgufSource(SafetensorsSource):
    """A checkpoint whose experts lie in GGUF files. Their tensors are named `<file>.gguf:<tensor>`."""

    reads_ahead = False

    def __init__(self, root: Path) -> None:
        """Read the headers of the safetensors and the GGUF files; see `open_with_gguf`."""
        super().__init__(root)
        self._safetensors = dict(self.tensors)
        self._gguf: dict[str, TensorRef] = {}
        files = list(self.files)
        for path in _gguf_files(root):
            status = self.guard.look(path.name)
            refs, sha256 = read_header(path, len(files))
            for tensor, ref in refs.items():
                if tensor in self._gguf:
                    what, found = "A tensor is in two GGUF files.", f"also {self._gguf[tensor].name}"
                    remedy = "Keep the files of one quantization in the folder."
                    raise InputError(what, where=ref.name, expected="one", found=found, remedy=remedy)
                self._gguf[tensor] = self.tensors[ref.name] = ref
            files.append(SourceFile(path.name, status.st_size, sha256, status.st_mtime_ns))
        self.files = tuple(files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())

    def map_experts(self) -> ExpertMap:
        """Map the MoE layers in the GGUF files, and every tensor to its use. Raises as `map_gguf`."""
        experts = map_gguf(self._gguf, self._safetensors, self.config)
        for name in experts.converted:
            _check_decoder(self.tensors[name])
        return experts

    def read_expert(
        self, layer: MoeLayer, expert: int, roles: Sequence[str], device: torch.device, raw: RawExperts | None = None
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one expert to float32; only their bytes are read. Raises InputError as `read_into`."""
        import torch

        from hqconv.formats.decode_matrix import SourceMatrix

        matrices = {}
        for role in roles:
            refs = layer.sources[expert][role]
            names = {part: f"{ref.name}, expert {expert}" for part, ref in refs.items()}
            floats = self._weights(refs["weight"], layer.shape(role))
            if "scale_2" in refs:
                floats *= self._numbers(refs["scale_2"])
            bias = torch.from_numpy(self._numbers(refs["bias"])).to(device) if "bias" in refs else None
            matrices[role] = SourceMatrix(names, floats=torch.from_numpy(floats).to(device), bias=bias)
        return matrices

    def _bytes(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        import numpy as np

        raw = np.empty(ref.num_bytes, np.uint8)
        self.read_into(ref, raw.data)
        return raw

    def _numbers(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        return dequantize(self._bytes(ref), ref.dtype).reshape(ref.shape)

    def _weights(self, ref: TensorRef, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Decode the weights [out, in] with the gguf library, float32."""
        import numpy as np

        rows, columns = shape
        stored = self._bytes(ref).reshape(rows, -1)
        weights = np.empty(shape, np.float32)
        step = max(1, _CHUNK_NUMBERS // columns)
        for start in range(0, rows, step):
            weights[start : start + step] = dequantize(stored[start : start + step], ref.dtype)
        return weights


def _gguf_files(root: Path) -> list[Path]:
    """List the folder's GGUF files by name. Raises InputError if a file of a split one is missing."""
    paths = sorted(root.glob("*.gguf"))
    names = {path.name for path in paths}
    for name in sorted(names):
        check_text(name, str(root))
        if "{" in name or "}" in name:  # braces are placeholders in the names that a manifest records
            raise InputError("A GGUF file's name has braces.", where=name, remedy="Rename the file.")
        match = _SPLIT.fullmatch(name)
        for number in range(1, int(match[3]) + 1) if match else ():
            partner = f"{match[1]}-{number:05d}-of-{match[3]}.gguf" if match else name
            if partner not in names:
                what, remedy = "A file of a split GGUF file is missing.", "Copy or download it."
                expected = f"all {match and match[3]}"
                raise InputError(what, where=str(root / partner), expected=expected, remedy=remedy)
    return paths


def dequantize(raw: np.ndarray[Any, Any], ggml_type: str) -> np.ndarray[Any, Any]:
    """Decode bytes of whole blocks to float32, along the last dimension."""
    import numpy as np

    gguf = library()
    with np.errstate(all="ignore"):  # NaN and infinity are refused where values are encoded
        floats: np.ndarray[Any, Any] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ggml_type])
    return floats


@cache
def _can_decode(ggml_type: str) -> bool:
    import numpy as np

    gguf = library()
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]][1]
    try:
        dequantize(np.zeros(block_bytes, np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _check_decoder(ref: TensorRef) -> None:
    if not _can_decode(ref.dtype):
        raise InputError(
            "The gguf library cannot decode the type of a stack of experts.",
            where=ref.name,
            expected="a type for weights",
            found=ref.dtype,
            remedy="Quantize the GGUF file to another type, or try a newer gguf library.",
        )
