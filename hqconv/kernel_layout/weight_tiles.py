"""Kernel weights in tiles of 64 rows by 16 columns, for encoders that write them directly on the CPU.

The plain layout of 4- and 8-bit codes for 16-bit activations consists of tiles that depend on their own codes alone. So
an encoder can lay out 64 rows while their codes are in the cache, without packed codes of whole matrices, their cut for
a rank, and their join. Every other layout goes through `rank_slices` and `transform`, with the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hqconv.humming_ops.repack import TILE_COLUMNS, TILE_ROWS, tile_store
from hqconv.kernel_layout.transform import KernelForm
from hqconv.quantization.quantized import CodeSink
from hqconv.schemas.artifact_names import GEMM_OF
from hqconv.schemas.dtypes import code_bits
from hqconv.schemas.grid import TpSlice


@dataclass(frozen=True, eq=False)
class WeightTiles:
    """Kernel weights of some experts, to be filled by an encoder.

    stacks: by role; where an encoder puts the codes. weights: by GEMM and TP rank, int32 [E, …] as the GEMM's form has
    them, views of the same memory.
    """

    stacks: dict[str, CodeSink]
    weights: dict[tuple[str, int], torch.Tensor]


def weight_tiles(
    forms: Mapping[str, KernelForm],
    slices: Sequence[TpSlice],
    shapes: Mapping[str, tuple[int, int]],
    num_experts: int,
) -> WeightTiles | None:
    """Allocate the kernel weights of a layer's experts; None where their layout is not plain, or padded.

    slices: each TP rank's part of the intermediate size. shapes: full size [N, K] of each role.
    """
    if not all(_is_plain(form) for form in forms.values()) or not _are_whole(slices, shapes):
        return None
    num_bits = {gemm: code_bits(form.config["b_dtype"]) for gemm, form in forms.items()}
    upper = [role for role in shapes if role != "w2"]
    sizes = {
        (gemm, part.rank): form.tensors["weight"].shape
        for gemm, form in forms.items()
        for part in slices
    }
    ends = np.cumsum([num_experts * math.prod(shape) // 2 for shape in sizes.values()])
    words = np.empty(int(ends[-1]), np.uint64)
    starts = dict(zip(sizes, [0, *map(int, ends)], strict=False))
    pieces: dict[str, list[tuple[int, ...]]] = {role: [] for role in shapes}
    for part in slices:
        size = part.share // TILE_ROWS
        for gemm, roles in (("w13", upper), ("w2", ["w2"])):
            key, tile = (gemm, part.rank), TILE_ROWS * TILE_COLUMNS * num_bits[gemm] // 64
            of_expert, of_columns = (
                math.prod(sizes[key]) // 2,
                forms[gemm].config["shape_n"] // TILE_ROWS * tile,
            )
            for number, role in enumerate(roles):
                rows, columns = (part.begin, part.end), (0, shapes[role][1])
                if role == "w2":
                    rows, columns = (0, shapes[role][0]), rows
                ranges = (*(n // TILE_ROWS for n in rows), *(k // TILE_COLUMNS for k in columns))
                pieces[role].append(
                    (*ranges, starts[key] + number * size * tile, of_expert, of_columns)
                )
    stacks = {}
    for role, each in pieces.items():
        gemm = GEMM_OF[role]
        config = forms[gemm].config
        centre = (
            "int" in config["b_dtype"] and num_bits[gemm] == 8 and config["c_dtype"] == "bfloat16"
        )
        store = tile_store(num_bits[gemm], centre)
        stacks[role] = CodeSink(TILE_ROWS, store, (words, np.array(each, np.int64)))
    flat = torch.from_numpy(words.view(np.int32))
    weights = {
        key: flat[2 * starts[key] : 2 * int(end)].view(num_experts, *shape)
        for (key, shape), end in zip(sizes.items(), ends, strict=True)
    }
    return WeightTiles(stacks, weights)


def _is_plain(form: KernelForm) -> bool:
    """Return whether codes are laid out by `repack_4bit_a16` or `repack_8bit_a16`, without padding."""
    config = form.config
    num_bits = code_bits(config["b_dtype"])
    if config["a_dtype"] not in ("bfloat16", "float16") or any(form.flags.values()):
        return False
    if config["pad_shape_n"] or config["pad_shape_k"]:
        return False
    return num_bits == 4 or (num_bits == 8 and not config["has_zero_point"])


def _are_whole(slices: Sequence[TpSlice], shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether every rank's slice consists of whole tiles, and has its full share."""
    sizes = [size for shape in shapes.values() for size in shape]
    sizes += [size for part in slices for size in (part.begin, part.end, part.share)]
    is_full = (
        all(part.end - part.begin == part.share for part in slices)
        and slices[-1].end == shapes["w2"][1]
    )
    return is_full and not any(size % TILE_ROWS for size in sizes)
