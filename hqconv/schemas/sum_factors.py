"""Content sums: one number for each tensor of a layer's projection, independent of the order of the work.

A conversion computes them from packed tensors, at full size, before any rank's slice and any layout; `verify` computes
them from the tensors it reads back. So a slice, an expert or a word in the wrong position shows without the source.
They are no cryptographic digest: the digest of the whole manifest protects against forgery.

The sum of x[expert, row, column] is, modulo 2**64, that of x * factor(expert) * factor(row) * factor(column). `x` is a
word of packed codes or the bits of a scale, as integers: of 16 and 32 bits with a sign, of 8 bits without. All factors
are odd, so that a single changed value always shows.

A copied tensor has one number too: its bytes are little-endian 32-bit words, with a sign, in rows of `ROW_WORDS`, the
last one filled with zeros. The number of its dtype and shape is added. Sums of parts add up to the sum of the tensor,
so that parts may come in any order and begin at any byte.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUMS = "content_sums"  # of a layer in the manifest: projection → tensor → 16 hexadecimal digits
COPIED = "copied"  # of a unit of copied tensors in the journal: in the place of a projection
ROW_WORDS = 1 << 14  # of a copied tensor
_AXES = {"expert": 1, "row": 2, "column": 3}
_MODULUS = 1 << 64


@functools.lru_cache(maxsize=256)
def factors(axis: str, count: int) -> NDArray[np.int32]:
    """Return the first factors of an axis: odd numbers below 2**31, int32 [count]."""
    import numpy as np

    bits = np.arange(count, dtype=np.uint64) + np.uint64(_AXES[axis] << 32)
    # The finishing steps of SplitMix64 (Steele, Lea and Flood 2014): neighbours get unlike numbers.
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    found = ((bits >> np.uint64(33)) | np.uint64(1)).astype(np.int32)
    found.setflags(write=False)
    return found


def of_expert(expert: int, total: int) -> int:
    """Multiply the sum of one expert by the factor that it has in the sum of its layer."""
    return total * int(factors("expert", _rounded(expert + 1))[expert]) % _MODULUS


def of_copied(total: int, dtype: str, shape: Sequence[int]) -> str:
    """Return the manifest's entry of a copied tensor, by the sum of its words."""
    return f"{(total + _number_of_form(dtype, tuple(shape))) % _MODULUS:016x}"


@functools.lru_cache(maxsize=4096)
def _number_of_form(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of a dtype and shape: a checkpoint has few of them."""
    return int.from_bytes(hashlib.sha256(f"{dtype} {list(shape)}".encode()).digest()[:8], "little")


def row_factors(count: int) -> NDArray[np.int32]:
    """Return factors of at least `count` rows."""
    return factors("row", _rounded(count))


def _rounded(count: int) -> int:
    """Round a length up, so that few lengths are cached."""
    return 1 << max(8, (count - 1).bit_length())


class ContentSums:
    """Content sums of a layer, while its experts come in any order: projection → tensor → sum."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, int]] = {}

    def add(self, role: str, name: str, expert: int, total: int) -> None:
        """Add the sum of one expert's tensor."""
        of_role = self._sums.setdefault(role, {})
        of_role[name] = (of_role.get(name, 0) + of_expert(expert, total)) % _MODULUS

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Return the manifest's entry."""
        return {
            role: {name: f"{total:016x}" for name, total in sorted(of_role.items())}
            for role, of_role in sorted(self._sums.items())
        }
