"""Pack and unpack codes on the CPU or CUDA, little-endian along the last dimension, in int32 words or bytes.

Legend: R rows, K codes in a row. CPU tensors go through compiled loops, CUDA tensors through torch, with the same bits.
A conversion packs and unpacks here only; `verify` reads with independent code (`hqconv.layout_decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hqconv.cpu_loops import codes as code_loops


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as bytes, of which torch has every operation; return other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Join tensors of any dtype."""
    return torch.cat([bits_of(tensor) for tensor in tensors], dim).view(tensors[0].dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, uint8 [R, bytes of a row]; a view where its memory allows it."""
    tensor = tensor.contiguous()
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)
    return tensor.view(*tensor.shape[:-1], -1).view(torch.uint8)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as int32 words, [R, bytes of a row / 4]; a view where its memory allows it."""
    tensor = as_bytes(tensor)
    if tensor.storage_offset() % 4 or tensor.data_ptr() % 4:
        tensor = tensor.clone()
    # Flat in between: of a single row torch calls any stride contiguous, and then refuses to widen it.
    return tensor.flatten().view(torch.int32).view(tensor.size(0), -1)


def unpack(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Unpack int32 words [R, K * num_bits / 32] to uint8 codes [R, K]; K is a multiple of 8."""
    data = as_bytes(packed)
    rows, size = data.shape
    if num_bits == 8:
        return data
    if not data.is_cuda:
        out = np.empty((rows, size * 8 // num_bits), np.uint8)
        code_loops.unpack_rows(data.numpy(), num_bits, out)
        return torch.from_numpy(out)
    if 8 % num_bits == 0:
        shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=data.device)
        codes: torch.Tensor = (data.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
        return codes.flatten(1)
    eight = data.view(rows, -1, num_bits).long()  # bytes of eight codes
    whole = (eight << torch.arange(0, 8 * num_bits, 8, device=data.device)).sum(-1, keepdim=True)
    shifts = torch.arange(0, 8 * num_bits, num_bits, device=data.device)
    codes = (whole >> shifts) & (2**num_bits - 1)
    return codes.to(torch.uint8).flatten(1)


def pack(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack uint8 codes [R, K] to int32 words [R, K * num_bits / 32]; a row fills whole words."""
    rows, num_codes = codes.shape
    assert num_codes % 8 == 0, num_codes
    assert num_codes * num_bits % 32 == 0, (num_codes, num_bits)
    codes = codes.contiguous()
    if num_bits == 8:
        return as_words(codes)
    if not codes.is_cuda:
        packed = np.empty((rows, num_codes * num_bits // 8), np.uint8)
        code_loops.pack_rows(codes.numpy(), num_bits, packed)
        return torch.from_numpy(packed.view(np.int32))
    shifts = torch.arange(0, 8 * num_bits, num_bits, device=codes.device)
    whole = (codes.view(rows, -1, 8).long() << shifts).sum(-1, keepdim=True)
    data = (whole >> torch.arange(0, 8 * num_bits, 8, device=codes.device)) & 255
    return data.to(torch.uint8).flatten(1).view(torch.int32)


def pack_along_rows(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack uint8 codes [N, G] along N to int32 [N * num_bits / 32, G]: Humming's zero points."""
    return pack(codes.t(), num_bits).t().contiguous()


def unpack_along_rows(packed: torch.Tensor, num_bits: int, num_rows: int) -> torch.Tensor:
    """Unpack int32 words along N to uint8 codes [N, G]; the last word may be partly empty."""
    columns = packed.t().contiguous()
    missing = -columns.size(1) % num_bits  # the loops read `num_bits` words, 32 codes, at a time
    columns = torch.nn.functional.pad(columns, (0, missing))
    return unpack(columns, num_bits)[:, :num_rows].t().contiguous()


# Nibble j of a word is column AWQ_ORDER[j] of its eight. Source: autoawq, utils/packing_utils.py.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = tuple(range(8))


def reordered_nibbles(packed: torch.Tensor, order: tuple[int, ...] = AWQ_ORDER) -> torch.Tensor:
    """Unpack uint8 codes [R, 8 * words]: nibble j of a word is code order[j] of its eight."""
    codes = unpack(packed.contiguous(), 4)
    places = torch.tensor([order.index(i) for i in range(8)], device=packed.device)
    return codes.view(*packed.shape, 8)[..., places].flatten(1)


def transpose_4bit(packed: torch.Tensor, order: tuple[int, ...], flip: int = 0) -> torch.Tensor:
    """Transpose int32 [K, N / 8] packed along N, nibble j = column order[j], to int32 [N, K / 8] packed along K.

    Every code is xored with `flip`.
    """
    if packed.is_cuda:
        return pack((reordered_nibbles(packed, order) ^ flip).t(), 4)
    num_columns, num_words = packed.shape
    out = np.empty((num_words * 8, num_columns // 8), np.uint32)
    flips = np.uint32(flip * 0x11111111)
    code_loops.transpose_4bit(
        packed.contiguous().numpy().view(np.uint32), np.array(order), flips, out
    )
    return torch.from_numpy(out.view(np.int32))
