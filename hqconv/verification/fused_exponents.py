"""Expected mxfp4 weights after their exponents are fused into the codes, computed independently of the conversion.

fp8 and int8 hold an e2m1 value times a few powers of two only: 12 of them in one rank's expert (fp8), 4 in one row of
it (int8). If exponents lie further apart, the small ones are raised and their codes divided by as much: rounded to
e2m1, half away from zero. So the codes depend on the rank, and on its padding, whose scales are 1.0.

Legend: E experts, N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from hqconv.artifact.reader import Artifact
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.scales import float_values, look_up
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import GEMM_OF, GEMMS
from hqconv.schemas.grid import TpSlice, tp_slices

_ONE = 127  # 1.0 in e8m0: the scale of padded rows
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_MINUS_ZERO = 8
_CHUNK_NUMBERS = 1 << 20  # shifted at once


def folded_gemms(artifact: Artifact, layer: str) -> list[str]:
    """Return the GEMMs of a layer in whose codes exponents of the scales are fused."""
    if layer not in artifact.layers:
        return []  # linear layers are in no kernel's layout
    entries = {gemm: artifact.layers[layer].gemm(gemm) for gemm in GEMMS}
    return [gemm for gemm, entry in entries.items() if entry and entry.has_fused_exponents]


def misread_code(artifact: Artifact, layer: str, gemm: str) -> int | None:
    """Return the code that a GEMM's kernel misreads, if any: minus zero of e2m1 under int8 activations.

    Humming 0.1.19 (`dequant_fused.cuh`) negates four int8 weights at once by a subtraction over the whole word: for a
    minus zero it takes one from the next weight of its word. Its own conversion replaces the source's minus zeros, but
    not those that arise where a small negative weight is folded. See docs/kernels.md.
    """
    is_int8 = artifact.layer_spec_of(layer).inputs.a_dtype == "int8"
    return _MINUS_ZERO if is_int8 and gemm in folded_gemms(artifact, layer) else None


@dataclass(frozen=True)
class FusedExponents:
    """Fusion in one layer: largest distance of exponents in one row or in a rank's expert, and padding of ranks' rows.

    is_by_rows, is_padded: of the GEMMs with fused exponents; is_padded has one flag for each TP rank.
    """

    max_range: int
    is_by_rows: Mapping[str, bool]
    slices: tuple[TpSlice, ...]
    is_padded: Mapping[str, tuple[bool, ...]]

    def folds(self, role: str) -> bool:
        """Return whether exponents are fused into the codes of the projection w1, w3 or w2."""
        return GEMM_OF[role] in self.is_by_rows

    def fold(self, expected: Mapping[str, DecodedStack]) -> dict[str, DecodedStack]:
        """Return quantized projections by role as the ranks hold them, joined again."""
        folded: dict[str, DecodedStack] = {}
        for gemm, roles in (("w13", ("w1", "w3")), ("w2", ("w2",))):
            of_gemm = {role: expected[role] for role in roles if role in expected}
            if of_gemm:
                folded |= self._gemm(gemm, of_gemm) if gemm in self.is_by_rows else of_gemm
        return folded

    def _gemm(self, gemm: str, expected: Mapping[str, DecodedStack]) -> dict[str, DecodedStack]:
        axis = 2 if gemm == "w2" else 1
        codes = {role: torch.empty_like(one.codes) for role, one in expected.items()}
        scales = {role: torch.empty_like(one.scale) for role, one in expected.items()}
        for part in self.slices:
            least = self._least_exponents(gemm, expected, part)
            for role, one in expected.items():
                old_codes, new_codes = (
                    _cut(x, axis, part, one.codes) for x in (one.codes, codes[role])
                )
                old, new = (_cut(x, axis, part, one.codes) for x in (one.scale, scales[role]))
                new.copy_(torch.maximum(old.int(), least[role]))
                _shift(old_codes, new.int() - old.int(), new_codes)
        return {
            role: _with_fractions(
                replace(
                    one,
                    codes=codes[role],
                    scale=scales[role],
                    scale_value=float_values(scales[role], "F8_E8M0"),
                )
            )
            for role, one in expected.items()
        }

    def _least_exponents(
        self, gemm: str, expected: Mapping[str, DecodedStack], part: TpSlice
    ) -> dict[str, torch.Tensor]:
        """Smallest exponents that a rank's slice keeps, int32 [E, N, 1] or [E, 1, 1], by role."""
        axis = 2 if gemm == "w2" else 1
        slices = {
            role: _cut(one.scale, axis, part, one.codes).int() for role, one in expected.items()
        }
        if self.is_by_rows[gemm]:
            return {
                role: one.amax(2, keepdim=True) - self.max_range for role, one in slices.items()
            }
        largest = torch.stack([one.amax((1, 2), keepdim=True) for one in slices.values()]).amax(0)
        if self.is_padded[gemm][part.rank]:
            largest = largest.clamp(min=_ONE)
        return dict.fromkeys(slices, largest - self.max_range)


def folding_of(artifact: Artifact, layer: MoeLayer) -> FusedExponents | None:
    """Fusion of a layer's exponents into its codes, None without it. Raises VerificationError for a damaged file."""
    if not (gemms := folded_gemms(artifact, layer.name)):
        return None
    ranks = range(artifact.grid.tp)
    is_padded = {
        gemm: tuple(
            bool(artifact.rank_file(layer.name, tp_rank, 0).configs[gemm]["pad_shape_n"])
            for tp_rank in ranks
        )
        for gemm in gemms
    }
    schema = artifact.schema_of(layer.name)
    is_int8 = artifact.layer_spec_of(layer.name).inputs.a_dtype == "int8"
    slices = tp_slices(layer.intermediate_size, artifact.grid, schema)
    is_by_rows = {gemm: is_int8 or schema.of(gemm).has_row_scale for gemm in gemms}
    return FusedExponents(3 if is_int8 else 11, is_by_rows, slices, is_padded)


def folding_bytes(artifact: Artifact, layer: MoeLayer) -> int:
    """Memory for folding one expert, in bytes: new codes of gate and up, and the table's indices of a chunk."""
    weights = 2 * layer.hidden_size * layer.intermediate_size
    return weights + 16 * _CHUNK_NUMBERS if folded_gemms(artifact, layer.name) else 0


def _cut(values: torch.Tensor, axis: int, part: TpSlice, codes: torch.Tensor) -> torch.Tensor:
    """Cut a rank's part of codes, or of scales along the same axis."""
    size = values.size(axis)
    full = codes.size(axis)
    return values.narrow(axis, part.begin * size // full, (part.end - part.begin) * size // full)


def _with_fractions(stack: DecodedStack) -> DecodedStack:
    """Return the same weights with row scales, bfloat16, from 1 to 2: their powers of two go into the exponents."""
    if stack.scale_2 is None:
        return stack
    fraction, power = torch.frexp(float_values(stack.scale_2, "BF16"))
    scale = (stack.scale.int() + (power - 1).unsqueeze(2)).clamp(0, 254).to(torch.uint8)
    rows = (2 * fraction).bfloat16().view(torch.int16)
    return replace(stack, scale=scale, scale_value=float_values(scale, "F8_E8M0"), scale_2=rows)


def _shift(codes: torch.Tensor, shifts: torch.Tensor, out: torch.Tensor) -> None:
    """Divide e2m1 codes [E, N, K] by 2 ** shifts, int32 [E, N, G]; into `out`."""
    table = torch.from_numpy(_shifted()).to(codes.device).flatten()
    group = codes.size(2) // shifts.size(2)
    step = max(1, _CHUNK_NUMBERS // (codes.size(0) * codes.size(2)))
    for begin in range(0, codes.size(1), step):
        rows = slice(begin, begin + step)
        index = (shifts[:, rows] * 16).repeat_interleave(group, 2) + codes[:, rows].int()
        out[:, rows] = look_up(table, index)


def _shifted() -> np.ndarray:
    """Table of e2m1 codes after a shift: uint8 [256 shifts, 16 codes]. Minus zero becomes zero."""
    values = _E2M1[None, :] / np.exp2(np.arange(256.0))[:, None]
    halfway = (_E2M1[1:] + _E2M1[:-1]) / 2
    magnitude = np.searchsorted(halfway, values, side="right").astype(np.uint8)
    negative = magnitude | np.uint8(8)
    negative[:, 0] = 0
    return np.concatenate((magnitude, negative), 1)
