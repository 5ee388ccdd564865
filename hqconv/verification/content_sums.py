"""The content sums of what is read back, held to those that the conversion took: see `schemas/content`.

They say of values that nothing else tells, without the source, whether they are the conversion's and in their places.
How words are made of codes is worked out here once more.

Legend: E experts, R rows, K columns, W words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hqconv.artifact.expert_reader import Array, ExpertMatrix
from hqconv.artifact.reader import Artifact
from hqconv.jit import compiled
from hqconv.layout_decoder.stacks import MatrixStack
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.content_sums import SUMS, ContentSums, factors, of_expert
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.verification.fused_exponents import is_folded
from hqconv.verification.result import CheckResult

Totals = dict[str, int]  # tensor → what one expert's comes to
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}
_WORD, _TOP = 0xFFFFFFFF, 0x80000000
OTHERS = {"scale": "weight_scale", "scale_2": "weight_scale_2", "bias": "bias"}  # those that are not packed


# --- one expert --------------------------------------------------------------------------------------------


def totals_of(matrix: ExpertMatrix, schema: WeightSchema) -> Totals:
    """What each tensor of one projection comes to; of scales that cannot be told any more nothing."""
    totals = {"weight": _of_codes(matrix.codes, schema.num_bits)}
    if matrix.zero_point is not None:
        is_float = schema.is_fp_zero_point
        zero = matrix.zero_point
        totals["zero_point"] = _of_values(zero) if is_float else _of_codes(zero.T, schema.num_bits)
    for field, name in OTHERS.items():
        values = getattr(matrix, field)
        is_lost = field == "scale" and matrix.flushed is not None and bool(matrix.flushed.any())
        if values is not None and not is_lost:
            totals[name] = _of_values(values)
    return totals


def _of_codes(codes: Array, num_bits: int) -> int:
    num_words = codes.shape[1] * num_bits // 32
    sums = np.empty(len(codes), np.int64)
    _sum_codes(np.ascontiguousarray(codes), num_bits, factors("column", num_words), sums)
    return _of_rows(sums)


def _of_values(values: Array) -> int:
    values = values.reshape(len(values), -1)
    bits = np.ascontiguousarray(values).view(_SIGNED[values.itemsize]).astype(np.int64)
    return _of_rows((bits * factors("column", bits.shape[1])).sum(1))


def _of_rows(sums: Array) -> int:
    return int((sums * factors("row", len(sums))).sum())


@compiled
def _sum_codes(codes_RK, num_bits, factors_W, sums_R):  # type: ignore[no-untyped-def]
    """Of each row of codes, little-endian bit fields of its words, the sum of words times factors."""
    for row in range(codes_RK.shape[0]):
        held, num_held, word, total = np.uint64(0), 0, 0, np.int64(0)
        for column in range(codes_RK.shape[1]):
            held |= np.uint64(codes_RK[row, column]) << np.uint64(num_held)
            num_held += num_bits
            if num_held >= 32:
                total += np.int64(np.int32(held & np.uint64(0xFFFFFFFF))) * np.int64(factors_W[word])
                held >>= np.uint64(32)
                num_held -= 32
                word += 1
        sums_R[row] = total


# --- many experts ------------------------------------------------------------------------------------------


def stack_totals(stack: MatrixStack, schema: WeightSchema) -> dict[str, torch.Tensor]:
    """`totals_of` of each expert, int64 [E] on the device; of flushed scales what means nothing."""
    totals = {"weight": _sum_stack(_words(stack.codes, schema.num_bits))}
    if stack.zero_point is not None:
        packed = not schema.is_fp_zero_point
        zero = _words(stack.zero_point.mT, schema.num_bits) if packed else stack.zero_point
        totals["zero_point"] = _sum_stack(zero)
    for field, name in OTHERS.items():
        values = getattr(stack, field)
        if values is not None:
            totals[name] = _sum_stack(values.reshape(*values.shape, *(1,) * (3 - values.ndim)))
    return totals


def _words(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Codes uint8 [E, R, K] as words with a sign, int64 [E, R, W]."""
    num_codes = 32 if 32 % num_bits else 32 // num_bits  # that fill whole words
    runs = codes.reshape(*codes.shape[:2], -1, num_codes)
    words = [torch.zeros_like(runs[..., 0], dtype=torch.int64) for _ in range(num_codes * num_bits // 32)]
    for number in range(num_codes):
        code, (word, shift) = runs[..., number].long(), divmod(number * num_bits, 32)
        words[word] |= (code << shift) & _WORD
        if shift + num_bits > 32:
            words[word + 1] |= code >> (32 - shift)
    return ((torch.stack(words, -1) ^ _TOP) - _TOP).flatten(2)


def _sum_stack(values: torch.Tensor) -> torch.Tensor:
    rows, columns = (
        torch.from_numpy(factors(axis, size).astype(np.int64)).to(values.device)
        for axis, size in (("row", values.size(1)), ("column", values.size(2)))
    )
    return ((values * columns).sum(2) * rows).sum(1)


# --- a block -----------------------------------------------------------------------------------------------


def has_sums(artifact: Artifact, block: str) -> bool:
    """Whether a block has sums that can be told again: older artifacts have none, and fused exponents change codes."""
    return artifact.blocks[block].content_sums is not None and not is_folded(artifact, block)


def against(artifact: Artifact, blocks: Sequence[MoeLayer], source: object | None) -> str:
    """What the blocks are compared with."""
    if source is not None:
        return "compared with the source"
    count = sum(has_sums(artifact, block.name) for block in blocks)
    if not count:
        return "decoded; without a source no value can be wrong"
    return f"decoded, {'all' if count == len(blocks) else count} held to the conversion's content sums"


def check_content(
    artifact: Artifact, block: str, found: Sequence[Mapping[str, Totals]], result: CheckResult
) -> None:
    """Hold a block's sums to the manifest's; `found`: of each expert, by role. Says nothing where one is missing."""
    roles = sorted({role for one in found for role in one})
    if not has_sums(artifact, block) or any(one.keys() != set(roles) for one in found):
        return
    recorded = artifact.blocks[block].content_sums
    if recorded is None or sorted(recorded) != roles:
        _add(result, f"{names.MANIFEST}: {block}: {SUMS}", roles, str(recorded)[:80])
        return
    for role in roles:
        where = f"{names.MANIFEST}: {block}: {SUMS}: {role}"
        of_role, words = [one[role] for one in found], recorded[role]
        held = {name for totals in of_role for name in totals}
        if not held <= words.keys() <= held | {"weight_scale"}:
            _add(result, where, sorted(held), str(words)[:80])
            continue
        for name in sorted(held):
            each = [totals[name] for totals in of_role if name in totals]
            if len(each) == len(of_role) and (total := _sum(each)) != words[name]:
                because = _because(each, words[name])
                _add(result, f"block {block}, {role}: {name}", words[name], f"{total}{because}")


def _add(result: CheckResult, where: str, expected: object, found: object) -> None:
    what = (
        "What is read back is not what the conversion made: a slice, an expert or a value is another one's."
    )
    result.add(where, what, expected, found)


def _sum(each: Sequence[int]) -> str:
    sums = ContentSums()
    for expert, total in enumerate(each):
        sums.add("", "", expert, total)
    return sums.to_dict()[""][""]


def _because(each: Sequence[int], expected: Any) -> str:
    """Which two experts are swapped, where that is all."""
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
