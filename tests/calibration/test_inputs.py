"""Inputs of experts over a text: against a whole model of transformers, with sums in plain loops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hqconv.calibration import inputs
from hqconv.calibration.gptq import InputProducts, quantize_by_outputs
from hqconv.calibration.inputs import ExpertActivations, expert_inputs
from hqconv.errors import InputError, RequestError
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.sources.opening import open_source
from tests.make.families import moe_layers, save_family
from tests.make.tokenizer import write_tokenizer

IDS = [3 + i * 7 % 60 for i in range(96)]
CONTEXT = 16
CPU = torch.device("cpu")
LIMIT = (1 << 33, "--max-memory")


@dataclass
class Uses:
    """Every use of a layer's experts: token, expert, weight [R], x [R, H]; the states after the layer [T, …]."""

    token: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    x: torch.Tensor
    states: torch.Tensor

    def of(self, mask: torch.Tensor) -> Uses:
        parts = (part[mask] for part in (self.token, self.expert, self.weight, self.x))
        return Uses(*parts, self.states)


def write(folder: Path, family: str, **options: Any) -> Any:
    model = save_family(folder / "src", family, inner=64, **options)
    write_tokenizer(folder / "src")
    (folder / "text").write_text(" ".join(map(str, IDS)))
    return model


def inputs_of(folder: Path, source: Source, **options: Any) -> Any:
    values = {
        "num_tokens": len(IDS),
        "context_length": CONTEXT,
        "device": CPU,
        "limit": LIMIT,
        "num_layers": (1, 1),
        "least_bytes": 0,
    }
    return expert_inputs(source, folder / "text", **{**values, **options})


def uses_of(model: nn.Module) -> list[Uses]:
    """The uses of each layer's experts: by hooks on the whole model, sequence by sequence."""
    found = []
    for _, path, module in moe_layers(model):
        calls: list[list[torch.Tensor]] = []
        states: list[torch.Tensor] = []

        def enter(module: Any, args: tuple[Any, ...], calls: Any = calls) -> None:
            x = args[0].double()
            if len(args) == 1:  # llama4: every expert gets all tokens, times their weights
                each = x.view(module.num_experts, -1, x.size(1))
                expert, token = each.any(2).nonzero(as_tuple=True)
                x, weight = each[expert, token], torch.ones(len(token), dtype=torch.float64)
            else:
                token = torch.arange(len(x)).repeat_interleave(args[1].size(1))
                x, expert, weight = x[token], args[1].flatten(), args[2].double().flatten()
            calls.append([token + CONTEXT * len(calls), expert, weight, x])

        def leave(_: Any, __: Any, out: Any, states: Any = states) -> None:
            hidden = out if isinstance(out, torch.Tensor) else out[0]
            states.append(hidden.double().flatten(0, 1))

        module.register_forward_pre_hook(enter)
        decoder_layer = model.get_submodule(re.sub(r"(\.\d+)\..*", r"\1", path))
        decoder_layer.register_forward_hook(leave)
        found.append((calls, states))
    for begin in range(0, len(IDS), CONTEXT):
        with torch.no_grad():
            model(input_ids=torch.tensor([IDS[begin : begin + CONTEXT]]), use_cache=False)
    return [
        Uses(*map(torch.cat, zip(*calls, strict=True)), torch.cat(states))
        for calls, states in found
    ]


def is_validation(token: torch.Tensor) -> torch.Tensor:
    return token >= len(IDS) * 3 // 4


def products(uses: Uses, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    scaled = (x if y is None else y) * uses.weight.unsqueeze(1)
    return scaled.t() @ x


def expert_values(source: Source, layer: MoeLayer, expert: int) -> dict[str, torch.Tensor]:
    found = {}
    for role, matrix in source.read_expert(layer, expert, layer.roles, CPU).items():
        found[role] = matrix.values().double()
        if matrix.bias is not None:
            found[f"b{role[1:]}"] = matrix.bias.double()
    return found


def hidden_of(name: str, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What w2 is given, by the formulas of the families' publishers."""
    up = x @ values["w3"].t() + values.get("b3", 0.0)
    if "w1" not in values:
        assert name == "relu2"
        return up.clamp_min(0) ** 2
    gate = x @ values["w1"].t() + values.get("b1", 0.0)
    if name == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return gate / (1 + torch.exp(-gate)) * up


FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt_oss": {},
    "llama4_text": {},
    "nemotron_h": {},
    "qwen2_moe": {},
    "deepseek_v3": {"head_dim": 8},
    "deepseek_v4": {},
    "longcat_flash": {"head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_sums_over_the_tokens_of_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of two sequences, and sums of seven tokens at a time."""
    monkeypatch.setattr(inputs, "_PASS_TOKENS", 2 * CONTEXT)
    monkeypatch.setattr(inputs, "_ROWS", 7)
    model = write(tmp_path, family, **FAMILIES[family])
    whole = type(model).from_pretrained(tmp_path / "src", dtype=torch.float32).eval()
    with open_source(tmp_path / "src") as source, inputs_of(tmp_path, source) as of_experts:
        layers = source.map_experts().layers
        for layer in layers:
            of_experts.expect(layer, 1)
        for layer, uses in zip(layers, uses_of(whole), strict=True):
            found = of_experts.of(layer)
            assert found is not None
            uses = uses.of(uses.expert < layer.num_experts)
            check_hidden(found, uses, layer.num_experts)
            check_experts(found, source, layer, uses)


def check_hidden(found: ExpertActivations, uses: Uses, num_experts: int) -> None:
    """Of an expert's few tokens the products are blended towards those of all, which are as large."""
    order = [*range(num_experts)][::-1]
    hidden = found.hidden_products(order)
    for part, mask in parts(hidden, uses):
        assert_near(part[0], products(uses.of(mask), uses.x[mask]))
    shared = products(uses, uses.x)
    for expert, h in zip(order, hidden.h.double(), strict=True):
        seen = uses.of(uses.expert == expert)
        own, share = products(seen, seen.x), len(seen.x) / (len(seen.x) + 2048)
        if len(seen.x):
            own = own * shared.trace() / own.trace()
        assert_near(h, share * own + (1 - share) * shared)


def parts(found: InputProducts, uses: Uses) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Products over most tokens and over validation tokens, with masks of their uses."""
    mask = is_validation(uses.token)
    return [(found.fit, ~mask), (found.validation, mask)]


def check_experts(found: ExpertActivations, source: Source, layer: MoeLayer, uses: Uses) -> None:
    """Products with the source's w13 before w2 and with other weights there, and the errors of other weights."""
    each = [expert_values(source, layer, expert) for expert in range(layer.num_experts)]
    weights = {name: torch.stack([one[name] for one in each]).float() for name in each[0]}
    changed = {n: 0.8 * w + 0.2 * w.roll(1, 1) for n, w in weights.items() if n in ("w1", "w3")}
    experts, activation = range(layer.num_experts), layer.activation
    plain = found.intermediate_products(experts, weights, activation)
    drifting = found.intermediate_products(experts, weights, activation, changed)
    assert plain.fit_drift is None
    drifts = [drifting.fit_drift, drifting.validation_drift]
    for expert, own in enumerate(each):
        other = own | {name: stack[expert].double() for name, stack in changed.items()}
        for sums, values in ((plain, own), (drifting, other)):
            for number, (part, mask) in enumerate(parts(sums, uses)):
                seen = uses.of(mask & (uses.expert == expert))
                h, x = (hidden_of(activation.name, one, seen.x) for one in (own, values))
                share = len(x) / (len(x) + 64)  # of few tokens more is taken from the diagonal
                expected = products(seen, x)
                diagonal = expected.diagonal() if len(x) else torch.ones(len(expected))
                assert_near(part[expert], share * expected + (1 - share) * torch.diag(diagonal))
                drift = drifts[number]
                assert drift is not None
                if values is other:
                    assert_near(drift[expert], share * products(seen, x, h - x))
        other["w2"] = own["w2"] + 0.1 * own["w2"].flip(0)
        seen = uses.of(uses.expert == expert)
        power = seen.states[seen.token].flatten(1).square().sum(1)
        expected = torch.zeros(2, dtype=torch.float64)
        for number, values in enumerate(({**other, "w2": own["w2"]}, {**own, "w2": other["w2"]})):
            outputs = [
                hidden_of(activation.name, one, seen.x) @ one["w2"].t() for one in (own, values)
            ]
            error = (outputs[1] - outputs[0]).square().sum(1)
            expected[number] = (error * seen.weight.square() / power).sum()
        floats = [{name: value.float() for name, value in one.items()} for one in (own, other)]
        errors = found.output_errors(expert, *floats, activation)
        torch.testing.assert_close(errors, expected, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three passes, with labels of one generator; the last layers' do not depend on those before."""
    monkeypatch.setattr(inputs, "_GRADIENT_TOKENS", 3 * CONTEXT)
    monkeypatch.setattr(inputs, "_PASS_TOKENS", CONTEXT)
    model = write(tmp_path, family, **FAMILIES[family])
    whole = type(model).from_pretrained(tmp_path / "src", dtype=torch.float32).eval()
    products = gradient_products(whole)
    for wanted in (slice(None), slice(-1, None)):
        with open_source(tmp_path / "src") as source, inputs_of(tmp_path, source) as of_experts:
            layers = source.map_experts().layers[wanted]
            for layer in layers:
                of_experts.expect(layer, 1)
            for layer, expected in zip(layers, products[wanted], strict=True):
                found = of_experts.of(layer)
                assert_near(found.gradients.products.double(), expected)


def gradient_products(model: nn.Module) -> list[torch.Tensor]:
    """Σ g gᵀ of each layer's experts, float64 [H, H], by autograd through the whole model."""
    products: list[torch.Tensor] = []
    for number, (_, _, module) in enumerate(moe_layers(model)):
        products.append(torch.zeros(()))

        def leave(_: Any, __: Any, out: torch.Tensor, number: int = number) -> None:
            def add(gradient: torch.Tensor) -> None:
                rows = gradient.double().flatten(0, -2)
                products[number] = products[number] + rows.t() @ rows

            out.register_hook(add)

        module.register_forward_hook(leave)
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, 3 * CONTEXT, CONTEXT):
        logits = model(
            input_ids=torch.tensor([IDS[begin : begin + CONTEXT]]), use_cache=False
        ).logits[0]
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
        (-logits.log_softmax(-1).gather(1, labels).sum()).backward()
    return products


def test_a_model_without_gradients_is_calibrated_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "mixtral")
    with open_source(tmp_path / "src") as source, inputs_of(tmp_path, source) as of_experts:
        [layer, *_] = source.map_experts().layers
        of_experts.expect(layer, 1)
        attention = of_experts._model.model.model.layers[1].self_attn
        original = attention.forward

        def detached(*args: Any, **kwargs: Any) -> Any:
            hidden, *rest = original(*args, **kwargs)
            return torch.from_numpy(hidden.numpy()), *rest  # an error, if it has a graph

        attention.forward = detached
        found = of_experts.of(layer)
        assert attention.q_proj.weight.isnan().all()  # the layer that failed is not in memory
    assert found.gradients is None
    assert "no gradients" in caplog.text


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def run_through(folder: Path) -> None:
    with open_source(folder / "src") as source, inputs_of(folder, source) as of_experts:
        layers = source.map_experts().layers
        for layer in layers:
            of_experts.expect(layer, 1)
        for layer in layers:
            of_experts.of(layer)


def test_layers_are_asked_for_in_turns_and_freed_after_their_last_use(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", num_hidden_layers=4)
    with open_source(tmp_path / "src") as source, inputs_of(tmp_path, source) as of_experts:
        first, _, _, last = source.map_experts().layers
        for layer in (first, last):
            of_experts.expect(layer, 2)
        found = [of_experts.of(layer) for layer in (first, last, first, last)]
        assert found[0] is found[2]
        assert found[1] is found[3]
        assert not of_experts._found


def test_weights_and_hidden_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path, "mixtral")
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.o_proj.weight")[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "src", max_shard_size="200KB")
    with pytest.raises(InputError, match="NaN or infinite") as caught:
        run_through(tmp_path)
    assert caught.value.where == "tensor model.layers.0.self_attn.o_proj.weight"
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.o_proj.weight").fill_(3e38)
    model.save_pretrained(tmp_path / "src", max_shard_size="200KB")
    with pytest.raises(RequestError, match="hidden states become NaN"):
        run_through(tmp_path)


def test_large_inputs_choose_the_same_codes() -> None:
    """Times a power of two they overflow the squares of float32; nothing else changes, and no product is infinite."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator)
    stack = torch.randn(2, 32, 64, generator=generator)
    weights = {role: torch.randn(2, 64, 64, generator=generator) / 8 for role in ("w1", "w3")}
    relu = Activation("relu2")
    codes: dict[int, list[torch.Tensor]] = {}
    for power in (0, 33, 66):
        found = ExpertActivations(
            x * 2.0**power,
            torch.arange(400).view(200, 2) % 2,
            torch.ones(200, 2),
            torch.arange(200) >= 150,
            torch.ones(200),
        )
        only_up = {"w3": weights["w3"] / 2.0**power}
        hidden = found.hidden_products([0, 1])
        inner = found.intermediate_products([0, 1], {**only_up, "w2": stack}, relu)
        codes[power] = [
            quantize_by_outputs([stack], resolve_schema("int4-g32"), "bfloat16", products)[
                0
            ].tensors["weight"]
            for products in (hidden, inner)
        ]
        for products in (hidden, inner):
            assert torch.isfinite(products.hessian.factor).all()
    wide = found.intermediate_products([0, 1], {"w3": weights["w3"] / 2.0**30, "w2": stack}, relu)
    assert torch.isfinite(wide.hessian.factor).all()
    assert float(wide.fit.abs().max()) > 0
    for power in (33, 66):
        for found_codes, expected in zip(codes[power], codes[0], strict=True):
            assert torch.equal(found_codes, expected)
