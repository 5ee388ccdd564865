"""The published tensors of a model in GGUF files, worked out from metadata and stored bytes, for verification alone.

An independent reference: it shares nothing with `model`, which gives an artifact the same tensors. Names are those of
gguf's own map; what llama.cpp's converter changes is known from its conversion/*.py (`permute`, `modify_tensors`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hqconv.gguf.header import Value, library
from hqconv.models.source_protocol import ReferenceTensor
from hqconv.schemas.tensors import TensorRef, torch_dtype

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    Array = np.ndarray[Any, Any]

_CHUNK_NUMBERS = 1 << 22  # decoded at a time
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_HALVES = {  # module that llama.cpp splits → modules of a layer
    "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),  # [heads, rank, size] and [heads, size, rank]
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
}
_PERMUTED = ("llama", "granitemoe")  # architectures whose rows of q and k llama.cpp puts into pairs
_FLOAT32 = {"minimax-m2": "block_sparse_moe.gate.weight", "ernie4_5-moe": "mlp.gate.weight"}
_CORRECTION = ".e_score_correction_bias"  # float32 in every architecture
# some files have vectors
_ONE_ROW = ("mlp.shared_expert_gate.weight", "mlp.moe_statics.e_score_correction_bias")
_TABLES = re.compile(r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight")
_HALF_OF_KV = re.compile(r"(blk\.\d+)\.attn_[kv]_b\.weight")
_EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


class GgufReference:
    """The tensors beside the experts; see `source_protocol.SourceReference`."""

    def __init__(
        self,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, TensorRef],
        read: Callable[[TensorRef, WriteableBuffer, int], None],
        config: Mapping[str, Any],
    ) -> None:
        """Prepare the map of names.

        tensors: by their names in GGUF files. read: fill a buffer with a stored tensor's bytes from byte `start` on.
        config: config.json, for the parameters' dtype.
        """
        self._metadata = metadata
        self._tensors = tensors
        self._read = read
        self._architecture = str(metadata["general.architecture"])
        gguf = library()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(
            numbers[self._architecture], self._number("block_count")
        )
        is_half = "float16" in (config.get("torch_dtype"), config.get("dtype"))
        self._param_dtype = "F16" if is_half else "BF16"

    def _number(self, key: str) -> Any:
        return self._metadata[f"{self._architecture}.{key}"]

    def tensor(self, name: str) -> ReferenceTensor | None:
        """Return a published tensor: dtype, shape, and bytes in pieces; None where no stored tensor has its values."""
        stored = self._stored(name)
        if not stored:
            return None
        shape = stored[0].shape
        if len(stored) == 2:
            num_columns = stored[1].shape[-1]
            shape = (sum(math.prod(ref.shape) for ref in stored) // num_columns, num_columns)
        elif name.endswith(_ONE_ROW):
            shape = (1, shape[-1])
        dtypes = {ref.dtype for ref in stored}
        dtype = dtypes.pop() if dtypes in ({"F16"}, {"BF16"}) else self._param_dtype
        if name.endswith((_CORRECTION, _FLOAT32.get(self._architecture, "\0"))):
            dtype = "F32"
        return ReferenceTensor(dtype, shape, self._pieces(name, stored, dtype))

    def lost(
        self, copied: Collection[str], converted: Collection[str], dropped: Collection[str]
    ) -> Iterator[str]:
        """Yield the stored tensors that are in no published one, and that nothing makes superfluous."""
        used = {ref.name for name in copied for ref in self._stored(name)}
        for name, ref in self._tensors.items():
            may_be_dropped = "_exps." in name or self._is_superfluous(name)
            is_dropped = ref.name in dropped and may_be_dropped
            if ref.name not in used and ref.name not in converted and not is_dropped:
                yield ref.name

    def is_projection(self, role: str, tensor: str, index: int) -> bool:
        """Return whether a role's matrices are a GGUF tensor's: entry `index` of gate and up, in one tensor."""
        stem = tensor.rpartition(":")[2].split(".")[2]
        is_half = stem == "ffn_gate_up_exps" and role == ("w1", "w3")[index]
        return is_half or stem == _EXPERTS[role]

    def _stored(self, name: str) -> tuple[TensorRef, ...]:
        """Return the stored tensors that hold a published tensor's values; () for none."""
        key = re.sub(r"\.e_score_correction_bias$", ".e_score_correction.bias", name)
        if key.endswith(".sinks"):
            key += ".weight"
        found = self._names.get_name(key, try_suffixes=(".weight", ".bias"))
        if found in self._tensors:
            return (self._tensors[found],)
        match = _LAYER.fullmatch(name)
        if match is None:
            return ()
        names = [f"blk.{match[1]}.{half}.weight" for half in _HALVES.get(match[2], ())]
        if any(half not in self._tensors for half in names):
            return ()
        return tuple(self._tensors[half] for half in names)

    def _is_superfluous(self, name: str) -> bool:
        """Return whether a stored tensor follows from the config, or another stored one has its values, too."""
        half = _HALF_OF_KV.fullmatch(name)
        if half is not None:
            return f"{half[1]}.attn_kv_b.weight" in self._tensors
        return _TABLES.fullmatch(name) is not None

    def _pieces(self, name: str, stored: tuple[TensorRef, ...], dtype: str) -> Iterator[Array]:
        for values in self._values(name, stored):
            tensor = torch.from_numpy(np.ascontiguousarray(values)).to(torch_dtype(dtype))
            yield tensor.view(torch.uint8).numpy().reshape(-1)

    def _values(self, name: str, stored: tuple[TensorRef, ...]) -> Iterator[Array]:
        """Yield a published tensor's values, float32, a few rows at a time. Raises the errors of reading."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        is_of_heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        if len(stored) == 2 and len(stored[0].shape) == 3:
            keys, values = stored
            num_heads, rank, _ = keys.shape
            size = values.shape[1]
            for head in range(num_heads):
                yield self._decoded(keys, head * rank, (head + 1) * rank).T
                yield self._decoded(values, head * size, (head + 1) * size)
        elif self._architecture in _PERMUTED and module in is_of_heads:
            (ref,) = stored
            rows = self._decoded(ref, 0, _num_rows(ref)).reshape(ref.shape[0], -1)
            for head_rows in np.split(rows, self._number(is_of_heads[module])):
                half = len(head_rows) // 2  # row i of a half is the first of a pair, or the second
                order = [2 * (row % half) + row // half for row in range(2 * half)]
                yield head_rows[order]
        else:
            for ref in stored:
                num_rows = _num_rows(ref)
                step = max(1, _CHUNK_NUMBERS // ref.shape[-1])
                for begin in range(0, num_rows, step):
                    yield self._decoded(ref, begin, min(begin + step, num_rows))

    def _decoded(self, ref: TensorRef, begin: int, end: int) -> Array:
        """Decode rows of a stored tensor to float32 [rows, columns]."""
        gguf = library()
        row_bytes = ref.num_bytes // _num_rows(ref)
        raw = np.empty((end - begin, row_bytes), np.uint8)
        self._read(ref, raw.data, begin * row_bytes)
        floats: Array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ref.dtype])
        return floats


def _num_rows(ref: TensorRef) -> int:
    return math.prod(ref.shape[:-1])
