"""Reference predictions beside an artifact: log-probabilities of its weights and of its source on a text.

`verify --server` compares a running server with them. The file stands in no manifest; its metadata name the digest of
the manifest, or of a plain checkpoint's config and headers. Log-probabilities are natural logarithms, in float32.

Legend: S sequences, T tokens, N sequences that were computed in bfloat16 too, K most likely tokens, L tokens of the
long prompt. A prediction is of every token but the first of its sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.io.durable_files import write_whole
from hqconv.io.safetensors_header import read_header
from hqconv.planning.output_units import build_file
from hqconv.schemas.artifact_names import CONFIG, INDEX, REFERENCE
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.untrusted_files import read_regular

DIGEST = "weights_sha256"  # of the metadata
LONG = "long."  # before the names of tensors of the long prompt
_MAX_BYTES = 1 << 28
_MAX_TOKEN = 1 << 24
_ROUNDING = 1e-3  # by which the sum of probabilities may exceed 1
_REMEDY = "Run `hqconv evaluate` again."
Array = np.ndarray  # of floats or ids


def num_top(num_tokens: int) -> int:
    """Return the number of most likely tokens that are recorded for each prediction."""
    return min(8, num_tokens)


@dataclass(frozen=True, eq=False)
class ReferencePredictions:
    """Tensors of the file by name, and its metadata.

    `token_ids` int32 [S, T]; of `artifact` and `source`: `.log_probabilities` [S, T - 1] of the next token, `.top_ids`
    int32 [S, T - 1, K] and `.top_log_probabilities`; of `bfloat16`, the artifact, the same of N sequences. With a long
    prompt also all of `long.token_ids` [1, L], `long.artifact` and `long.source`.
    """

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str]

    @property
    def token_ids(self) -> Array:
        """Token ids [S, T]."""
        return self.tensors["token_ids"]

    @property
    def long_ids(self) -> Array:
        """Token ids [L] of the long prompt; L = 0 without one."""
        ids: Array = self.tensors.get(f"{LONG}token_ids", np.zeros((1, 0), np.int32))[0]
        return ids

    def of(self, model: str) -> Array:
        """Log-probabilities float64 [S, T - 1] of the next token, by `artifact`, `source` …"""
        return self.tensors[f"{model}.log_probabilities"].astype(np.float64)

    @cached_property
    def noise(self) -> Array:
        """Difference of the artifact in bfloat16 from itself in float32, absolute [N, T - 1]."""
        rounded = self.of("bfloat16")
        noise: Array = np.abs(rounded - self.of("artifact")[: len(rounded)])
        return noise

    def write(self, root: Path) -> None:
        """Write the file beside an artifact, in place of an older one. Raises OutputError."""
        specs = [
            TensorSpec(name, "I32" if values.dtype == np.int32 else "F32", values.shape)
            for name, values in self.tensors.items()
        ]
        header = build_file(REFERENCE, specs, self.metadata).header
        name = reference_path(root).relative_to(root).as_posix()
        write_whole(root, name, header + b"".join(map(np.ndarray.tobytes, self.tensors.values())))


def reference_path(root: Path) -> Path:
    """Return the place of the file: beside the index of the shards, which all artifacts have.

    In a checkpoint without an index, of whose folder loaders take all safetensors files, it is in a folder of its own.
    """
    return root / REFERENCE if (root / INDEX).is_file() else root / "reference" / REFERENCE


def has_reference(path: Path, digest: str) -> bool:
    """Return whether a file of reference predictions is there and is of the weights with this digest."""
    with suppress(HqconvError):
        return path.is_file() and read_header(path)[1].get(DIGEST) == digest
    return False


def checkpoint_digest(root: Path) -> str:
    """Return the SHA-256 of a plain checkpoint's config.json and index, or of its files' headers without an index.

    Raises OSError, InputError.
    """
    digest = hashlib.sha256(read_regular(root / CONFIG, _MAX_BYTES))
    if (root / INDEX).is_file():
        digest.update(read_regular(root / INDEX, _MAX_BYTES))
    else:
        for path in sorted(root.glob("*.safetensors")):
            digest.update(read_header(path)[2].encode())
    return digest.hexdigest()


def read_reference(path: Path, digest: str) -> ReferencePredictions:
    """Read and check a file of reference predictions.

    digest: of the weights that it must be of. Raises RequestError without such a file, or with one of other weights;
    InputError for a damaged one.
    """
    if not path.is_file():
        raise RequestError(
            "There are no reference predictions to compare the server with.",
            where=str(path),
            remedy="Run `hqconv evaluate OUT --source SRC --text FILE`; for a plain checkpoint, `hqconv evaluate CKPT "
            "--text FILE --write-reference`.",
        )
    _, metadata, _ = read_header(path)
    if metadata.get(DIGEST) != digest:
        raise RequestError(
            "The reference predictions are of other weights.",
            where=str(path),
            expected=f"of {digest}",
            found=metadata.get(DIGEST, "no digest"),
            remedy=_REMEDY,
        )
    try:
        tensors = load(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise InputError("The file cannot be read.", where=str(path), found=error) from error
    if fault := _fault(tensors):
        what = "The reference predictions are damaged."
        raise InputError(what, where=str(path), found=fault, remedy=_REMEDY)
    return ReferencePredictions(tensors, metadata)


def _fault(tensors: Mapping[str, Array]) -> str:
    """Return the names of two tensors that do not fit each other, or have values that cannot be; "" for none."""
    models: dict[str, tuple[str, ...]] = {"": ("artifact", "source", "bfloat16")}
    if f"{LONG}token_ids" in tensors:
        models[LONG] = ("artifact", "source")
    nothing = np.zeros((0, 0))
    for prefix, names in models.items():
        ids = tensors.get(f"{prefix}token_ids", nothing)
        for model in names:
            name = f"{prefix}{model}.log_probabilities"
            values = tensors.get(name, nothing)
            is_right = (
                ids.dtype == np.int32
                and values.dtype == np.float32
                and ids.ndim == 2
                and values.shape == (len(values), ids.shape[1] - 1)
                and 0 < len(values) <= len(ids)
                and (len(values) == len(ids) or model == "bfloat16")
                and values.size
                and ((ids >= 0) & (ids < _MAX_TOKEN)).all()
                and (np.isfinite(values) & (values <= _ROUNDING)).all()
            )
            if not is_right:
                return f"{prefix}token_ids and {name}"
    return ""
