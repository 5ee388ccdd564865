"""The production kernel's activations and biases against the plain block, on a GPU."""

from __future__ import annotations

import pytest
import torch

from hqconv.calibration.activations import activate
from hqconv.humming_ops.runtime import humming
from hqconv.kernel_layout.fused_moe import humming_activation
from hqconv.schemas.activation import Activation
from tests.make.formulas import GATED, UNGATED

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_EXPERTS, HIDDEN, INNER = 3, 256, 128


# One of each kind of expression, which is compiled: tests/verification/test_formulas.py has all of them as plain C.
KINDS = (
    "silu",
    "gelu_tanh",
    "silu_clamp7",
    "relu2_bound3",
    "silu_shift (beta -0.5)",
    "swigluoai",
    "situ (beta 4)",
)


@pytest.mark.parametrize(
    ("activation", "gated"),
    [
        *((activation, True) for activation in GATED if activation.describe() in KINDS),
        *((activation, False) for activation in UNGATED if activation.name in ("gelu", "relu2")),
    ],
    ids=lambda value: value.describe() if isinstance(value, Activation) else str(value),
)
def test_activation_expressions(activation: Activation, gated: bool) -> None:
    x = torch.randn(33, 2 * 192 if gated else 192, device="cuda").mul(4).bfloat16()
    found, _, _ = humming().ops.process_input(x, **humming_activation(activation, gated))
    gate, up = x.double().chunk(2, -1) if gated else (None, x.double())
    wanted = activate(activation, gate, up)
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() < 4e-3 * wanted.norm()
