"""The value that decides a kernel layout: weights, parameters, activations and GPU."""

from __future__ import annotations

from dataclasses import dataclass

from hqconv.schemas.gpu_target import Target
from hqconv.schemas.input_schema import A16, InputSchema
from hqconv.schemas.weight_schema import TargetSchema


@dataclass(frozen=True)
class KernelKind:
    """Which of Humming's kernels a matrix is laid out for; its size, which decides nothing else, aside.

    param_dtype: bfloat16 or float16, of the model's parameters and outputs.
    """

    schema: TargetSchema
    param_dtype: str
    target: Target
    inputs: InputSchema = A16

    @property
    def a_dtype(self) -> str:
        """What a GEMM's activations are, in Humming's words."""
        return self.inputs.a_dtype or self.param_dtype

    def __str__(self) -> str:
        """For people."""
        words = f"{self.schema.name} with {self.inputs.name} activations"
        return f"{words}, {self.param_dtype} parameters, on {self.target}"
