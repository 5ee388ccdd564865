"""Content sums of decoded and of copied tensors, compared with those of the conversion: see `schemas/sum_factors`.

Without the source nothing else shows whether values are the conversion's and at their positions. The packing of codes
into words is written here once more, independent of the conversion.

Legend: E experts, R rows, K columns, W words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hqconv.artifact.reader import Artifact
from hqconv.errors import VerificationError
from hqconv.jit import compiled
from hqconv.layout_decoder.codes import has_loops
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.sum_factors import (
    ROW_WORDS,
    SUMS,
    ContentSums,
    factors,
    of_copied,
    of_expert,
    row_factors,
)
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.fused_exponents import folded_gemms
from hqconv.verification.result import CheckResult, compare_names

Totals = dict[str, int]  # tensor → content sum of one expert
_WORD, _TOP = 0xFFFFFFFF, 0x80000000
NOT_PACKED = {
    "scale": "weight_scale",
    "scale_2": "weight_scale_2",
    "bias": "bias",
}  # field → tensor


# --- experts -----------------------------------------------------------------------------------------------


def stack_totals(stack: DecodedStack, schema: WeightSchema) -> dict[str, torch.Tensor]:
    """Content sum of each tensor of each expert, int64 [E]; meaningless for scales that are partly flushed."""
    totals = {"weight": _sum_codes(stack.codes, schema.num_bits)}
    if stack.zero_point is not None:
        zero, is_float = stack.zero_point, schema.is_fp_zero_point
        totals["zero_point"] = (
            _sum_values(zero) if is_float else _sum_codes(zero.mT, schema.num_bits)
        )
    for field, name in NOT_PACKED.items():
        values = getattr(stack, field)
        if values is not None:
            totals[name] = _sum_values(values.reshape(*values.shape, *(1,) * (3 - values.ndim)))
    return totals


def expert_totals(totals: Mapping[str, torch.Tensor], expert: int, *, is_flushed: bool) -> Totals:
    """Content sums of one expert from `stack_totals`; without flushed scales, whose values are lost."""
    return {
        name: int(sums[expert])
        for name, sums in totals.items()
        if not (is_flushed and name == "weight_scale")
    }


def _sum_codes(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Sum over the words that the codes uint8 [E, R, K] are packed in, int64 [E]."""
    if not has_loops(codes.device):
        return _sum_values(_words(codes, num_bits))
    columns = factors("column", codes.size(2) * num_bits // 32)
    sums = np.empty(codes.shape[:2], np.int64)
    for one, sums_of_one in zip(codes.contiguous().numpy(), sums, strict=True):
        _sum_rows(one, num_bits, columns, sums_of_one)
    return torch.from_numpy((sums * factors("row", codes.size(1))).sum(1))


@compiled
def _sum_rows(codes_RK, num_bits, factors_W, sums_R):  # type: ignore[no-untyped-def]
    """Write the sum of words times factors of each row of codes, which are little-endian bit fields of its words."""
    for row in range(codes_RK.shape[0]):
        held, num_held, word, total = np.uint64(0), 0, 0, np.int64(0)
        for column in range(codes_RK.shape[1]):
            held |= np.uint64(codes_RK[row, column]) << np.uint64(num_held)
            num_held += num_bits
            if num_held >= 32:
                total += np.int64(np.int32(held & np.uint64(0xFFFFFFFF))) * np.int64(
                    factors_W[word]
                )
                held >>= np.uint64(32)
                num_held -= 32
                word += 1
        sums_R[row] = total


def _words(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Codes uint8 [E, R, K] packed into words with a sign, int64 [E, R, W]."""
    num_codes = 32 if 32 % num_bits else 32 // num_bits  # that fill whole words
    runs = codes.reshape(*codes.shape[:2], -1, num_codes)
    words = [
        torch.zeros_like(runs[..., 0], dtype=torch.int64) for _ in range(num_codes * num_bits // 32)
    ]
    for number in range(num_codes):
        code, (word, shift) = runs[..., number].long(), divmod(number * num_bits, 32)
        words[word] |= (code << shift) & _WORD
        if shift + num_bits > 32:
            words[word + 1] |= code >> (32 - shift)
    return ((torch.stack(words, -1) ^ _TOP) - _TOP).flatten(2)


def _sum_values(values: torch.Tensor) -> torch.Tensor:
    """Sum of values [E, R, W] times the factors of their row and column, int64 [E]."""
    rows, columns = (
        torch.from_numpy(factors(axis, size).astype(np.int64)).to(values.device)
        for axis, size in (("row", values.size(1)), ("column", values.size(2)))
    )
    return ((values * columns).sum(2) * rows).sum(1)


# --- copied tensors ----------------------------------------------------------------------------------------

_CHUNK_ROWS = 256  # of a copied tensor, read at a time


def check_copied(
    artifact: Artifact,
    copied: Mapping[str, tuple[str, TensorRef]],
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Compare the copied tensors (name → file and position) with the conversion's sums.

    Files that are not on this machine are left out, with a note.
    """
    recorded = artifact.manifest.content_sums or {}
    compare_names(f"{names.MANIFEST}: {SUMS}", "tensor", recorded, copied, result)
    here = {
        name: one
        for name, one in copied.items()
        if name in recorded and not artifact.is_proven_by_hub(one[0])
    }
    if len(here) < len(recorded.keys() & copied.keys()):
        result.notes.append(
            "content sums of copied tensors were left out where files are on the Hub only"
        )
    found = dict(
        zip(here, pool.map(lambda one: _copied_sum(artifact, *one), here.values()), strict=True)
    )
    owners = {total: name for name, total in recorded.items()}
    for name, total in sorted(found.items()):
        if total != recorded[name]:
            owner = owners.get(total)
            because = "" if owner is None else f": the tensor {owner}"
            what = "A copied tensor is not the one that the conversion read."
            result.add(f"{here[name][0]}, tensor {name}", what, recorded[name], f"{total}{because}")


def _copied_sum(artifact: Artifact, path: str, ref: TensorRef) -> str:
    """Return the content sum of a tensor in a file, or the reason why it cannot be read."""
    columns, total = factors("column", ROW_WORDS), 0
    rows = row_factors(ref.num_bytes // (4 * ROW_WORDS) + 1)
    words = np.empty((_CHUNK_ROWS, ROW_WORDS), np.int32)
    for first in range(0, -(-ref.num_bytes // (4 * ROW_WORDS)), _CHUNK_ROWS):
        begin = first * 4 * ROW_WORDS
        count = min(words.nbytes, ref.num_bytes - begin)
        data = words.reshape(-1).view(np.uint8)
        data[count:] = 0
        try:
            artifact.read(path, data[:count].data, ref.offset_bytes + begin)
        except (OSError, VerificationError) as error:
            return f"unreadable: {getattr(error, 'found', None) or error}"
        num_rows = -(-count // (4 * ROW_WORDS))
        total += int(_sum_matrix(words[:num_rows], rows[first : first + num_rows], columns))
    return of_copied(total, ref.dtype, ref.shape)


@compiled
def _sum_matrix(words_RW, rows_R, columns_W):  # type: ignore[no-untyped-def]
    """Return the sum of words times the factors of their row and column."""
    total = np.int64(0)
    for row in range(words_RW.shape[0]):
        of_row = np.int64(0)
        for word in range(words_RW.shape[1]):
            of_row += np.int64(columns_W[word]) * np.int64(words_RW[row, word])
        total += np.int64(rows_R[row]) * of_row
    return total


# --- a layer -----------------------------------------------------------------------------------------------


def against(artifact: Artifact, layers: Sequence[MoeLayer], source: object | None) -> str:
    """Note for the report: the reference that the layers are compared with."""
    if source is not None:
        return "compared with the source"
    count = sum(folded_gemms(artifact, layer.name) != [*names.GEMMS] for layer in layers)
    if not count:  # fused exponents change codes
        return "decoded; without a source no value can be wrong"
    return (
        f"decoded, {'all' if count == len(layers) else count} held to the conversion's content sums"
    )


def check_content(
    artifact: Artifact, layer: str, found: Sequence[Mapping[str, Totals]], result: CheckResult
) -> None:
    """Compare a layer's sums with the manifest's; `found`: by expert and role. Adds nothing if a sum is missing."""
    roles = sorted({role for one in found for role in one})
    folded = folded_gemms(artifact, layer)
    if folded == [*names.GEMMS] or any(one.keys() != set(roles) for one in found):
        return
    recorded = artifact.layers[layer].content_sums
    if sorted(recorded) != roles:
        _add(result, f"{names.MANIFEST}: {layer}: {SUMS}", roles, str(recorded)[:80])
        return
    for role in roles:
        if names.GEMM_OF[role] in folded:
            continue
        where = f"{names.MANIFEST}: {layer}: {SUMS}: {role}"
        of_role, of_tensor = [one[role] for one in found], recorded[role]
        held = {name for totals in of_role for name in totals}
        if not held <= of_tensor.keys() <= held | {"weight_scale"}:
            _add(result, where, sorted(held), str(of_tensor)[:80])
            continue
        for name in sorted(held):
            each = [totals[name] for totals in of_role if name in totals]
            if len(each) == len(of_role) and (total := _sum(each)) != of_tensor[name]:
                because = _because(each, of_tensor[name])
                _add(result, f"layer {layer}, {role}: {name}", of_tensor[name], f"{total}{because}")


def _add(result: CheckResult, where: str, expected: object, found: object) -> None:
    what = "What is read back is not what the conversion made: a slice, an expert or a value is another one's."
    result.add(where, what, expected, found)


def _sum(each: Sequence[int]) -> str:
    sums = ContentSums()
    for expert, total in enumerate(each):
        sums.add("", "", expert, total)
    return sums.to_dict()[""][""]


def _because(each: Sequence[int], expected: Any) -> str:
    """Name the two experts that are swapped, if that explains the difference; starts with a colon."""
    if not isinstance(expected, str) or len(expected) != 16:
        return ""
    try:
        missing = (int(expected, 16) - int(_sum(each), 16)) % (1 << 64)
    except ValueError:
        return ""
    for a, b in combinations(range(len(each)), 2):
        change = of_expert(a, each[b] - each[a]) + of_expert(b, each[a] - each[b])
        if change % (1 << 64) == missing:
            return f": experts {a} and {b} are swapped"
    return ""
