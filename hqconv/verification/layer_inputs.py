"""Activation rounding of one layer's kernel, from its rank files: LayerConfigs and static scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import safe_open

from hqconv.artifact.reader import Artifact
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.grid import tp_slices
from hqconv.verification.reference import Roundings
from hqconv.verification.rounding import Rounding


@dataclass(frozen=True)
class LayerInputs:
    """Roundings of both GEMMs, the static scales they need (float32 [1]), and the columns of each TP rank."""

    roundings: dict[str, Rounding]
    static: dict[str, torch.Tensor]
    slices: tuple[tuple[int, int], ...]
    param_dtype: torch.dtype

    @classmethod
    def of(cls, artifact: Artifact, layer: str, device: torch.device) -> LayerInputs | None:
        """Read them from an artifact's layer; None for 16-bit activations. Raises the errors of reading a rank file."""
        found = {gemm: Rounding.of(artifact.layer_config(layer, gemm, 0, 0)) for gemm in names.GEMMS}
        roundings = {gemm: one for gemm, one in found.items() if one is not None}
        if not roundings:
            return None
        slices = tp_slices(artifact.layers[layer].intermediate_size, artifact.grid.tp, artifact.schema_of(layer))
        return cls(
            roundings,
            _static_scales(artifact, layer, roundings, device),
            tuple((begin, end) for _, begin, end, _ in slices),
            torch_dtype_of(artifact.param_dtype),
        )

    def reference(self) -> Roundings:
        """Roundings for the reference: each TP rank rounds its own columns of the intermediate, as it has no others."""

        def hidden(values: torch.Tensor) -> torch.Tensor:
            parts = [self._round("w2", values[:, begin:end]) for begin, end in self.slices]
            return torch.cat(parts, dim=1).to(values.dtype)

        def wide(values: torch.Tensor) -> torch.Tensor:
            return values.to(self.param_dtype).to(values.dtype)

        return Roundings(lambda values: self._round("w13", values).to(values.dtype), wide, hidden)

    def clipped(self, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
        """Fraction of input values that the static scale clips, for each GEMM that has one."""
        return {gemm: self.roundings[gemm].clipped(inputs[gemm], static) for gemm, static in self.static.items()}

    def _round(self, gemm: str, values: torch.Tensor) -> torch.Tensor:
        return self.roundings[gemm](values, self.static.get(gemm))


def _static_scales(
    artifact: Artifact, layer: str, roundings: dict[str, Rounding], device: torch.device
) -> dict[str, torch.Tensor]:
    static = [gemm for gemm, one in roundings.items() if one.is_static]
    if not static:
        return {}
    path = artifact.fetched(names.rank_file(layer, 0, 0))
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {gemm: file.get_tensor(f"{layer}.{gemm}_input_scale") for gemm in static}
