"""Comparison of decoded matrices with the expected ones, and the text about how they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hqconv.artifact.expert_reader import TENSOR_OF, hex_bits
from hqconv.artifact.reader import Note
from hqconv.layout_decoder.decode import DecodedStack

Place = Callable[[str, Sequence[int], Sequence[int]], str]  # tensor, shape and index of a value → where it lies


def unequal_fields(found: DecodedStack, expected: DecodedStack) -> dict[str, torch.Tensor | None]:
    """Map each field that may differ to its unequal values, bool [E, …]; None for another shape or dtype.

    A flushed scale may be any value up to the decoded one.
    """
    unequal: dict[str, torch.Tensor | None] = {}
    if found.scale_dtype != expected.scale_dtype:
        unequal["scale_dtype"] = None
    for field in TENSOR_OF:
        left, right = getattr(found, field), getattr(expected, field)
        if left is None and right is None:
            continue
        if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
            unequal[field] = None
        elif not _are_same_bytes(left, right):
            wrong = left != right
            if field == "scale" and found.flushed is not None:
                wrong = torch.where(found.flushed, right > left, wrong)
            unequal[field] = wrong
    return unequal


def differs(found: DecodedStack, expected: DecodedStack) -> torch.Tensor:
    """Experts whose values are wrong or not equal, bool [E]."""
    wrong = found.wrong
    for values in unequal_fields(found, expected).values():
        wrong = torch.ones_like(wrong) if values is None else wrong | values.flatten(1).any(1)
    return wrong


def _are_same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True for equal contiguous CPU tensors; compared 8 bytes at a time, 20 times as fast as values.

    False for tensors on another device: an answer would wait for all its work.
    """
    is_one_piece = left.is_contiguous() and right.is_contiguous()
    if left.device.type != "cpu" or not is_one_piece or left.nbytes % 8:
        return False
    ours, theirs = (one.numpy().reshape(-1).view(np.uint64) for one in (left, right))
    return np.array_equal(ours, theirs)


def compare(found: DecodedStack, expected: DecodedStack, where: Place, note: Note) -> bool:
    """Note every kind of value in which one expert's projection (E = 1) is not as expected; True if none is."""
    is_equal = True
    for field, wrong in unequal_fields(found, expected).items():
        left, right = getattr(found, field), getattr(expected, field)
        if field == "scale_dtype":
            what = "Scales are of another dtype than the schema's."
            note(where("weight_scale", (1,), (0,)), what, right, left)
            is_equal = False
            continue
        verb = "are" if field == "codes" else "is"
        what = f"The {field.replace('_', ' ')} of the source, quantized, {verb} not in the artifact."
        if wrong is None:
            texts = [None if x is None else list(x.shape[1:]) for x in (right, left)]
            note(where(TENSOR_OF[field], (1,), (0,)), what, *texts)
            is_equal = False
        elif wrong.any():
            is_equal = False
            places = wrong[0].nonzero()
            first = tuple(places[0].tolist())
            found_text = f"{hex_bits(left[0][first])}; {len(places)} of {wrong.numel()} differ"
            note(
                where(TENSOR_OF[field], left.shape[1:], first),
                what,
                f"{hex_bits(right[0][first])} at {list(first)}",
                found_text,
            )
    return is_equal


def fingerprints(codes: torch.Tensor) -> list[bytes]:
    """Hash of eight rows of each expert's codes [E, N, K]: enough to tell one expert's matrix from another's."""
    rows = codes[:, [int(row) for row in np.linspace(0, codes.size(1) - 1, 8)]].cpu().numpy()
    return [hashlib.blake2b(one.tobytes(), digest_size=16).digest() for one in rows]
