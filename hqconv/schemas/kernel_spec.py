"""The value that decides a kernel layout: weights, parameters, activations and GPU."""

from __future__ import annotations

from dataclasses import dataclass

from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import A16, InputSchema
from hqconv.schemas.weight_schema import WeightSchema


@dataclass(frozen=True)
class KernelSpec:
    """Weights, parameters, activations and GPU of a Humming kernel: all that decides a matrix's layout but its size.

    param_dtype: bfloat16 or float16, of the model's parameters and outputs.
    """

    schema: WeightSchema
    param_dtype: str
    target: GpuTarget
    inputs: InputSchema = A16

    @property
    def a_dtype(self) -> str:
        """Humming's name of the type of a GEMM's activations."""
        return self.inputs.a_dtype or self.param_dtype

    def __str__(self) -> str:
        """Format for people."""
        text = f"{self.schema.name} with {self.inputs.name} activations"
        return f"{text}, {self.param_dtype} parameters, on {self.target}"
