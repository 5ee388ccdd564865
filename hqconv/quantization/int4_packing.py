"""Four-bit codes in the orders that other toolkits pack them in.

Legend: R rows, N output rows, K input columns. The same bits on the CPU and on CUDA.
"""

from __future__ import annotations

import numpy as np
import torch

from hqconv.cpu_loops import decode
from hqconv.quantization import bit_codec

# Nibble j of a word is column AWQ_ORDER[j] of its eight. Source: autoawq, utils/packing_utils.py.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = tuple(range(8))


def reordered_nibbles(packed: torch.Tensor, order: tuple[int, ...] = AWQ_ORDER) -> torch.Tensor:
    """Unpack uint8 codes [R, 8 * words]: nibble j of a word is code order[j] of its eight."""
    codes = bit_codec.unpack(packed.contiguous(), 4)
    places = torch.tensor([order.index(i) for i in range(8)], device=packed.device)
    return codes.view(*packed.shape, 8)[..., places].flatten(1)


def transpose_4bit(packed: torch.Tensor, order: tuple[int, ...], flip: int = 0) -> torch.Tensor:
    """Transpose int32 [K, N / 8] packed along N, nibble j = column order[j], to int32 [N, K / 8] packed along K.

    Every code is xored with `flip`.
    """
    columns, words = packed.shape
    if packed.is_cuda:
        codes = bit_codec.unpack(packed, 4).view(columns, words, 8)
        places = torch.tensor([order.index(i) for i in range(8)], device=packed.device)
        codes = codes[..., places].flatten(1) ^ flip
        return bit_codec.pack(codes.t(), 4)
    out = np.empty((words * 8, columns // 8), np.uint32)
    flips = np.uint32(flip * 0x11111111)
    decode.transpose_4bit(packed.contiguous().numpy().view(np.uint32), np.array(order), flips, out)
    return torch.from_numpy(out.view(np.int32))
