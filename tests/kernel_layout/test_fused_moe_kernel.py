"""The production kernel's activations and biases against the plain block, on a GPU."""

from __future__ import annotations

import pytest
import torch

from hqconv.calibration.activations import activate
from hqconv.humming_ops.runtime import humming, resident
from hqconv.kernel_layout.fused_moe import Gemm, fused_moe, humming_activation
from hqconv.kernel_layout.transform import (
    gemm_tensors,
    humming_schema,
    kernel_form,
    layer_config,
    to_kernel,
)
from hqconv.quantization.quantized import stack_tensors
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid, tp_slices
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.verification.reference import Routing, moe_forward
from tests.make.conversions import kernel_spec_of
from tests.make.formulas import GATED, UNGATED
from tests.make.quantized import quantize

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_EXPERTS, HIDDEN, INNER, TP = 3, 256, 128, 2


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


@pytest.mark.parametrize("name", ["silu", "swigluoai", "relu2"])
def test_biases_and_ungated_experts_over_tp_ranks(name: str) -> None:
    """Experts with biases, cut over two ranks: the w2 bias counts once, w13's are cut with their rows."""
    schema, device = resolve_schema("fp8"), torch.device("cuda")
    torch.manual_seed(3)
    gated, activation = name != "relu2", Activation.of_label(name)
    roles = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    roles = {p: s for p, s in roles.items() if gated or p != "w1"}
    experts, decoded = [], []
    for _ in range(NUM_EXPERTS):
        packed, plain = {}, {}
        for projection, shape in roles.items():
            weight = torch.randn(shape, device=device).mul(0.1).bfloat16()
            bias = torch.randn(shape[0], device=device).bfloat16()
            [quantized] = quantize([weight], schema, "bfloat16")
            packed[projection] = {**stack_tensors([quantized.tensors]), "bias": bias[None]}
            with resident(device):
                plain[projection] = humming_schema(schema).dequant_tensors(dict(quantized.tensors))
            plain["b" + projection[1:]] = bias
        experts.append(packed)
        decoded.append(plain)
    x = torch.randn(65, HIDDEN, device=device).bfloat16()
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(65)]).to(device)
    routing = Routing(ids, torch.rand(65, 2, device=device))
    total = torch.zeros(65, HIDDEN, device=device)
    for part in tp_slices(INNER, Grid(TP), schema):
        parts = [gemm_tensors(expert, schema, part) for expert in experts]
        gemms = {}
        for gemm, (n, k) in {
            "w13": ((2 if gated else 1) * INNER // TP, HIDDEN),
            "w2": (HIDDEN, INNER // TP),
        }.items():
            joined = {
                name: torch.cat([part[gemm][name] for part in parts]) for name in parts[0][gemm]
            }
            form = kernel_form(n, k, kernel_spec_of(schema, "bfloat16", 90), has_bias=True)
            config = layer_config(form.config_json(NUM_EXPERTS))
            gemms[gemm] = Gemm(config, to_kernel(form, joined))
        total += fused_moe(gemms, x, ids, routing.weights, activation, gated, 130)[0]
    wanted, _ = moe_forward(x.double(), routing, lambda e: decoded[e], activation)
    assert (total.double() - wanted).norm() < 0.0105 * wanted.norm()
    without = [{name: v for name, v in plain.items() if name != "b2"} for plain in decoded]
    silent, _ = moe_forward(x.double(), routing, lambda e: without[e], activation)
    assert (silent - wanted).norm() > 0.05 * wanted.norm(), (
        "the test would not notice a missing bias"
    )
