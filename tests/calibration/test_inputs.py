"""Inputs of experts over a text: against a whole model of transformers, with sums in plain loops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hqconv.calibration import inputs
from hqconv.calibration.inputs import ExpertActivations, expert_inputs
from hqconv.errors import InputError, RequestError
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.sources.opening import open_source
from tests.make.families import moe_layers, save_family
from tests.make.tokenizer import write_tokenizer

IDS = [3 + i * 7 % 60 for i in range(96)]
CONTEXT = 16
CPU = torch.device("cpu")
LIMIT = (1 << 33, "--max-memory")
Rows = list[tuple[int, int, float, torch.Tensor]]  # token, expert, weight, x


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
        "num_layers": 1,
    }
    return expert_inputs(source, folder / "text", **{**values, **options})


def rows_of(model: nn.Module, states: dict[int, list[torch.Tensor]]) -> list[Rows]:
    """Of each layer, every use of an expert: by a hook on the whole model, sequence by sequence.

    states: gets the hidden states after each of these layers.
    """
    found: list[Rows] = []
    for number, (_, path, _) in enumerate(moe_layers(model)):
        decoder_layer = model.get_submodule(re.sub(r"(\.\d+)\..*", r"\1", path))

        def leave(_: nn.Module, __: Any, out: Any, number: int = number) -> None:
            hidden = out if isinstance(out, torch.Tensor) else out[0]
            states.setdefault(number, []).extend(hidden.double().flatten(0, 1))

        decoder_layer.register_forward_hook(leave)
    for _, _, module in moe_layers(model):
        rows: Rows = []
        found.append(rows)

        def enter(module: nn.Module, args: tuple[Any, ...], rows: Rows = rows) -> None:
            x, begin = args[0].detach().double(), len({token for token, *_ in rows})
            if len(args) == 1:  # llama4: every expert gets all tokens, times their weights
                each = x.view(module.num_experts, -1, x.size(1))
                uses = [
                    (t, e, 1.0, each[e, t]) for t in range(each.size(1)) for e in range(len(each))
                ]
                rows += [(begin + t, e, p, row) for t, e, p, row in uses if bool(row.any())]
                return
            for token, (experts, weights) in enumerate(
                zip(args[1].tolist(), args[2].tolist(), strict=True)
            ):
                rows += [
                    (begin + token, e, p, x[token]) for e, p in zip(experts, weights, strict=True)
                ]

        module.register_forward_pre_hook(enter)
    for begin in range(0, len(IDS), CONTEXT):
        with torch.no_grad():
            model(input_ids=torch.tensor([IDS[begin : begin + CONTEXT]]), use_cache=False)
    return found


def is_held_back(token: int) -> bool:
    return token // CONTEXT % 4 == 3


def sum_of(rows: list[tuple[float, torch.Tensor]], size: int) -> torch.Tensor:
    total = torch.zeros(size, size, dtype=torch.float64)
    for weight, x in rows:
        total += weight**2 * torch.outer(x, x)
    return total


def expert_values(source: Source, layer: MoeLayer, expert: int) -> dict[str, torch.Tensor]:
    found = {}
    for role, one in source.read_expert(layer, expert, layer.roles, CPU).items():
        found[role] = one.values().double()
        if one.bias is not None:
            found[f"b{role[1:]}"] = one.bias.double()
    return found


def hidden_of(name: str, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What w2 is given, by the formulas of the families' publishers."""
    up = values["w3"] @ x + values.get("b3", 0.0)
    if "w1" not in values:
        assert name == "relu2"
        return up.clamp_min(0) ** 2
    gate = values["w1"] @ x + values.get("b1", 0.0)
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
    model, states = write(tmp_path, family, **FAMILIES[family]), dict[int, list[torch.Tensor]]()
    expected = rows_of(
        type(model).from_pretrained(tmp_path / "src", dtype=torch.float32).eval(), states
    )
    with open_source(tmp_path / "src") as source, inputs_of(tmp_path, source) as of_experts:
        layers = source.map_experts().layers
        for layer in layers:
            of_experts.expect(layer, 1)
        for number, (layer, rows) in enumerate(zip(layers, expected, strict=True)):
            found = of_experts.of(layer)
            assert found is not None
            real = [one for one in rows if one[1] < layer.num_experts]
            check_hidden(found, layer, real)
            check_intermediate(found, source, layer, real)
            check_output_errors(found, source, layer, real, states[number])


def check_output_errors(
    found: ExpertActivations,
    source: Source,
    layer: MoeLayer,
    rows: Rows,
    states: list[torch.Tensor],
) -> None:
    """With other weights of w13, and of w2: token by token, relative to the hidden state after the layer."""
    name = layer.activation.name
    for expert in range(layer.num_experts):
        own = expert_values(source, layer, expert)
        other = {
            role: value + 0.1 * value.flip(0) if role[0] == "w" else value
            for role, value in own.items()
        }
        changed = [
            own | {role: one for role, one in other.items() if (role == "w2") == is_w2}
            for is_w2 in (0, 1)
        ]
        expected = torch.zeros(2, dtype=torch.float64)
        for token, chosen, weight, x in rows:
            if chosen == expert:
                outputs = [of["w2"] @ hidden_of(name, of, x) for of in (own, *changed)]
                each = [(weight**2 * (one - outputs[0]).square().sum()) for one in outputs[1:]]
                expected += torch.stack(each) / states[token].square().sum()
        floats = [{role: value.float() for role, value in of.items()} for of in (own, other)]
        torch.testing.assert_close(
            found.output_errors(expert, *floats, layer.activation), expected, rtol=1e-3, atol=1e-12
        )


def check_hidden(found: ExpertActivations, layer: MoeLayer, rows: Rows) -> None:
    for products, held in (
        (found.hidden_products.fit, False),
        (found.hidden_products.validation, True),
    ):
        expected = sum_of(
            [(p, x) for token, _, p, x in rows if is_held_back(token) == held], layer.hidden_size
        )
        assert_near(products[0], expected)


def check_intermediate(
    found: ExpertActivations, source: Source, layer: MoeLayer, rows: Rows
) -> None:
    """With the source's w13 before w2, and with other weights there."""
    each = [expert_values(source, layer, expert) for expert in range(layer.num_experts)]
    values = {role: torch.stack([one[role] for one in each]).float() for role in each[0]}
    others = {
        role: 0.8 * values[role] + 0.2 * values[role].roll(1, 1)
        for role in ("w1", "w3")
        if role in values
    }
    plain = found.intermediate_products(range(layer.num_experts), values, layer.activation)
    changed = found.intermediate_products(
        range(layer.num_experts), values, layer.activation, others
    )
    assert plain.fit_drift is None
    drifts = changed.fit_drift, changed.validation_drift
    for expert, own in enumerate(each):
        other = own | {role: one[expert].double() for role, one in others.items()}
        for number, is_held in enumerate((False, True)):
            uses = [
                (p, *(hidden_of(layer.activation.name, weights, x) for weights in (own, other)))
                for token, chosen, p, x in rows
                if chosen == expert and is_held_back(token) == is_held
            ]
            share = len(uses) / (len(uses) + 64)  # of few tokens more is taken from the diagonal
            for products, y in ((plain, 1), (changed, 2)):
                expected = sum_of([(use[0], use[y]) for use in uses], layer.intermediate_size)
                blended = share * expected + (1 - share) * torch.diag(expected.diagonal())
                one = (products.fit, products.validation)[number][expert]
                assert_near(one, blended if uses else torch.eye(len(expected), dtype=torch.float64))
            drift = sum(
                (p**2 * torch.outer(h - x, x) for p, h, x in uses), torch.zeros_like(expected)
            )
            found_drift = drifts[number]
            assert found_drift is not None
            assert_near(found_drift[expert], share * drift)


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


def test_a_model_with_two_decoders_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "diffusion_gemma")
    with pytest.raises(RequestError, match="several modules of routed experts"):
        run_through(tmp_path)
