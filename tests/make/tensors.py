"""Tensors out of files and bits out of tensors, by other means than hqconv's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's model*.safetensors files, by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def load_file(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers: torch stacks, joins and picks those of every width."""
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    )


def pick(tensor: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Entries of the first dimension, in the given order."""
    return words_of(tensor)[list(indices)].view(tensor.dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtypes, shapes and bits agree, wherever the tensors are."""
    left, right = left.cpu().contiguous(), right.cpu().contiguous()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.numel() == 0 or left.flatten().view(torch.uint8).equal(
        right.flatten().view(torch.uint8)
    )


def assert_same(left: torch.Tensor, right: torch.Tensor, what: object) -> None:
    """Same dtype, shape and bits; else say where they first differ."""
    assert (left.dtype, tuple(left.shape)) == (right.dtype, tuple(right.shape)), what
    if left.numel() == 0:
        return
    bits = [
        x.contiguous().flatten().view(torch.uint8).view(-1, x.dtype.itemsize) for x in (left, right)
    ]
    wrong = (bits[0] != bits[1]).any(-1).nonzero().flatten()
    if len(wrong):
        place = tuple(int(i) for i in torch.unravel_index(wrong[0], left.shape))
        values = [x[int(wrong[0])].tolist() for x in bits]
        raise AssertionError(
            f"{what}: {len(wrong)} of {left.numel()} differ, first at {place}: {values}"
        )


def with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of floats, with the same bits for every NaN; integers as they are.

    Devices make NaN with different signs; a conversion refuses matrices with one.
    """
    if not tensor.is_floating_point():
        return tensor
    numbers = tensor.double()
    return torch.where(numbers.isnan(), torch.nan, numbers)


def names_below(folder: Path) -> list[str]:
    """Every file's path, sorted."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def snapshot(folder: Path) -> dict[str, str]:
    """Every file's digest, by path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
