"""The value that decides a kernel layout: weights, parameters, activations and GPU."""

from __future__ import annotations

from dataclasses import dataclass

from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.input_schema import A16, InputSchema
from hqconv.schemas.weight_schema import WeightSchema


@dataclass(frozen=True)
class KernelSpec:
    """Which of Humming's kernels a matrix is laid out for; its size, which decides nothing else, aside.

    param_dtype: bfloat16 or float16, of the model's parameters and outputs.
    """

    schema: WeightSchema
    param_dtype: str
    target: GpuTarget
    inputs: InputSchema = A16

    @property
    def a_dtype(self) -> str:
        """What a GEMM's activations are, in Humming's words."""
        return self.inputs.a_dtype or self.param_dtype

    def __str__(self) -> str:
        """For people."""
        words = f"{self.schema.name} with {self.inputs.name} activations"
        return f"{words}, {self.param_dtype} parameters, on {self.target}"
