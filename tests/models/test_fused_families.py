"""What is read out of every family's files against transformers' own experts: orientation, order, biases, activation.

Legend: T tokens, k choices per token, E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from hqconv.errors import InputError
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_MODEL_TYPE
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation
from hqconv.sources.opening import open_source
from hqconv.verification.reference import Routing, moe_forward
from tests.make.families import (
    CAUSAL,
    FAMILIES,
    SIZES,
    as_filled,
    experts_forward,
    make_family,
    moe_layers,
    save_family,
)
from tests.make.tensors import load_all

# I of H = 64: neither, I = H, 2I = H. In the last two a stack is square and its shape tells no orientation.
INNER = (48, 64, 32)
FUSED = [
    "qwen3_vl_moe",
    "llama4",
    "gpt_oss",
    "openai_privacy_filter",
    "granitemoe",
    "granitemoe_swa",
    "gemma4",
    "dbrx",
    "step3p7",
    "aria",
    "zaya",
    "mistral4",
    "hy_v4",
    "inkling_mm_model",
    "inkling2_text",
]
EVERY = [
    (name, inner)
    for n, name in enumerate(FAMILIES)
    for inner in (INNER if name in FUSED else [INNER[n % 3]])
]
CPU = torch.device("cpu")


class Read(NamedTuple):
    """A mapped checkpoint: its layers and every expert's matrices in float64."""

    found: ExpertMap
    experts: dict[str, list[dict[str, torch.Tensor]]]

    def only(self, layer: int) -> tuple[MoeLayer, list[dict[str, torch.Tensor]]]:
        (block,) = (block for block in self.found.layers if block.index == layer)
        return block, self.experts[block.name]


def read(folder: Path) -> Read:
    with open_source(folder) as source:
        found = source.map_experts()
        experts = {}
        for layer in found.layers:
            experts[layer.name] = [_expert(source, layer, e) for e in range(layer.num_experts)]
    return Read(found, experts)


def _expert(source: Source, layer: MoeLayer, expert: int) -> dict[str, torch.Tensor]:
    matrices = {}
    for role, stored in source.read_expert(layer, expert, layer.roles, CPU).items():
        matrices[role] = stored.values().double()
        assert matrices[role].shape == layer.shape(role)
        if stored.bias is not None:
            matrices[f"b{role[1:]}"] = stored.bias.double()
    return matrices


def distance(
    module: nn.Module, experts: list[dict[str, torch.Tensor]], activation: Activation
) -> float:
    """How far our experts' outputs are from the module's, relatively, on tokens that reach every expert."""
    generator = torch.Generator().manual_seed(5)
    num_experts, hidden_size = len(experts), experts[0]["w3"].size(1)
    x = torch.randn(24, hidden_size, generator=generator).double()
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(24)])
    routing = Routing(ids, torch.rand(24, 2, generator=generator).double())
    ours, _ = moe_forward(x, routing, lambda e: experts[e], activation)
    theirs = experts_forward(module, x, routing.ids, routing.weights)
    assert theirs.norm() > 1
    return float((ours - theirs).norm() / theirs.norm())


# Some modules compute in float32 whatever they are given.
ROUNDING = 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model_type", "inner"), EVERY)
def test_experts_are_those_of_the_model(model_type: str, inner: int, tmp_path: Path) -> None:
    model, spec = save_family(tmp_path, model_type, inner=inner), FAMILIES[model_type]
    done = read(tmp_path)
    modules = moe_layers(model)
    assert done.found.chosen_because.startswith(f"model_type {model_type};")
    assert done.found.family == BY_MODEL_TYPE[model_type].name
    assert [block.index for block in done.found.layers] == [layer for layer, _, _ in modules]
    assert len(modules) == spec.num_blocks
    for layer, _, module in modules:
        block, experts = done.only(layer)
        sizes = (block.num_experts, block.hidden_size, block.intermediate_size)
        assert sizes == (SIZES["experts"], SIZES["hidden"], inner)
        assert block.top_k == spec.words.get(spec.keys.top_k, SIZES["top_k"])
        assert block.activation.label == spec.activation
        _assert_same_parameters(module, experts)
        if block.activation.is_known(gated=True):
            assert distance(module, experts, block.activation) < ROUNDING


def _assert_same_parameters(module: nn.Module, experts: list[dict[str, torch.Tensor]]) -> None:
    """Bit for bit, by what the module says of its own layout."""
    if not hasattr(module, "is_transposed"):
        return
    for e, expert in enumerate(experts):
        turned = {
            name: parameter[e].t()
            if module.is_transposed and parameter.dim() == 3
            else parameter[e]
            for name, parameter in module.named_parameters()
        }
        if module.has_gate:
            gate_up = (
                ("gate_up_proj", "gate_up_proj_bias") if module.has_bias else ("gate_up_proj",)
            )
            for name, (gate, up) in zip(gate_up, (("w1", "w3"), ("b1", "b3")), strict=False):
                rows = turned[name]
                halves = rows.chunk(2) if module.is_concatenated else (rows[::2], rows[1::2])
                assert torch.equal(expert[gate], halves[0].double())
                assert torch.equal(expert[up], halves[1].double())
        else:
            assert torch.equal(expert["w3"], turned["up_proj"].double())
        assert torch.equal(expert["w2"], turned["down_proj"].double())
        assert set(expert) == {
            r for r in ("w1", "w3", "w2", "b1", "b3", "b2") if r in _roles(module)
        }


def _roles(module: nn.Module) -> set[str]:
    numbers = "132" if module.has_gate else "32"
    return {f"w{n}" for n in numbers} | ({f"b{n}" for n in numbers} if module.has_bias else set())


@pytest.mark.parametrize(
    ("limits", "names"), [([0, 7.0], "silu_bound7"), ([16, None], "silu"), (None, "silu")]
)
def test_step3_bounds_its_activation_layer_by_layer(
    limits: list[float] | None, names: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path, "step3p7", swiglu_limits=limits)
    ((layer, _, module),) = moe_layers(model)
    block, experts = read(tmp_path).only(layer)
    assert block.activation.label == names
    assert distance(module, experts, block.activation) < ROUNDING


# --- what the comparison sees ------------------------------------------------------------------------------


# --- every tensor once -------------------------------------------------------------------------------------

DENSE = [
    "shared_expert",
    "share_expert",
    "shared_mlp",
    "router",
    "gate.weight",
    "e_score_correction_bias",
    "expert_bias",
    "visual",
    "vision",
    "per_expert_scale",
    "multi_modal_projector",
    "embed",
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_is_counted_once(model_type: str, tmp_path: Path) -> None:
    model = save_family(tmp_path, model_type)
    found, tensors = read(tmp_path).found, load_all(tmp_path)
    assert sorted([*found.converted, *found.copied, *found.dropped]) == sorted(tensors)
    in_experts = sum(p.numel() for _, _, module in moe_layers(model) for p in module.parameters())
    not_copied = [*found.converted, *found.dropped]
    assert sum(tensors[name].numel() for name in not_copied) == in_experts
    assert not [name for name in not_copied if any(part in name for part in DENSE)]
    # two zero-experts in two layers, each written with a gate and an up
    assert len(found.dropped) == (8 if model_type == "longcat_flash" else 0)
    assert {name for layer in found.layers for name in layer.tensor_names()} == set(found.converted)


# --- the same experts under other names --------------------------------------------------------------------


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Replace a folder's tensors, in one file."""
    tensors = change(load_all(folder))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(
        {k: v.contiguous().clone() for k, v in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


PER_EXPERT = [m for m in FUSED if BY_MODEL_TYPE[m].projections]


@pytest.mark.parametrize("model_type", PER_EXPERT)
def test_fused_families_may_come_per_expert(model_type: str, tmp_path: Path) -> None:
    save_family(tmp_path, model_type)
    fused = read(tmp_path)

    def unfuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in fused.found.converted:
            del tensors[name]
        for layer in fused.found.layers:
            for e, expert in enumerate(fused.experts[layer.name]):
                for key, matrix in expert.items():
                    part = "weight" if key[0] == "w" else "bias"
                    tensors[f"{layer.module(e, f'w{key[1:]}')}.{part}"] = matrix.bfloat16()
        return tensors

    rewrite(tmp_path, unfuse)
    _assert_equal(read(tmp_path), fused)


def assert_same_in_memory(model: nn.Module, folder: Path) -> Read:
    """Both forms that transformers saves are the same experts: the released names, and those of its own classes."""
    for name, is_original in (("disk", True), ("memory", False)):
        model.save_pretrained(folder / name, save_original_format=is_original)
    released, fused = read(folder / "disk"), read(folder / "memory")
    stacks = [part for layer in fused.found.layers for part in layer.slices["w2"].values()]
    assert stacks
    assert all(part.is_stacked for part in stacks)
    for ours, theirs in zip(fused.found.layers, released.found.layers, strict=True):
        assert (ours.index, ours.activation, ours.top_k) == (
            theirs.index,
            theirs.activation,
            theirs.top_k,
        )
    _assert_equal(fused, released)
    assert fused.found.is_own_row
    return fused


# In the last, a stack of aria is square and its shape tells no orientation; experts' sizes differ from zero-experts'.
@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_may_come_as_transformers_holds_them(model_type: str, tmp_path: Path) -> None:
    assert_same_in_memory(make_family(model_type, inner=32), tmp_path)


# Multimodal families whose text model transformers makes alone: with a head, or without one.
TEXT_ONLY = {
    **dict.fromkeys(("minimax_m3_vl", "qwen3_5_moe", "llama4", "gemma4", "aria"), CAUSAL),
    **dict.fromkeys(
        ("glm5_next", "mistral_large4", "kimi_k25", "qwen3_vl_moe", "glm4v_moe"), "AutoModel"
    ),
    "inkling_mm_model": CAUSAL,
}


@pytest.mark.parametrize("model_type", TEXT_ONLY)
def test_a_text_model_may_be_saved_alone(model_type: str, tmp_path: Path) -> None:
    """Under a model_type and names of its own: an engine that drops unknown names would serve it without experts."""
    whole = make_family(model_type)
    alone = as_filled(
        getattr(transformers, TEXT_ONLY[model_type]).from_config(whole.config.text_config)
    )
    found = assert_same_in_memory(alone, tmp_path)
    assert json.loads((tmp_path / "memory" / "config.json").read_text())["model_type"] != model_type
    for layer, _, module in moe_layers(alone):
        block, experts = found.only(layer)
        assert block.activation.label == FAMILIES[model_type].activation
        assert distance(module, experts, block.activation) < ROUNDING


class Published(NamedTuple):
    """A model that transformers does not have: its own words for E, k and I, its stacks, and its activation."""

    config: dict[str, object]
    layer: str
    stacks: tuple[str, str]
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


SILU = json.loads(
    '{"hidden_act": "silu", "hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}'
)
MOON = json.loads(
    '{"dim": 32, "n_layers": 2, "moe": {"num_experts": 4, "experts_per_token": 2, "expert_inner_dim": 16}}'
)
# In the last, 2I = H as in the first: only the row can tell an orientation.
PUBLISHED = {
    # sglang: iquest_q1.py, load_iquest_q1_weights
    "iquest_q1": Published(
        SILU | {"intermediate_size": 16}, "model.layers.1.mlp.experts", ("fc", "proj"), _silu
    ),
    # sglang: interns2_mobius.py, _load_fused_mobius_expert_weight
    "interns2_mobius": Published(
        SILU | {"moe_intermediate_size": 16},
        "model.meta_mlp.1.experts",
        ("gate_up_proj", "down_proj"),
        _silu,
    ),
    # vLLM: moondream3.py, Moondream3TextMoE.forward
    "moondream3": Published(
        {"config": {"text": MOON}},
        "model.text.blocks.1.mlp",
        ("fc1.weight", "fc2.weight"),
        lambda gate, up: nn.functional.gelu(gate) * (up + 1),
    ),
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_stacks_are_read_as_the_models_own_loaders_read_them(
    model_type: str, tmp_path: Path
) -> None:
    """The first half of each expert's rows is the gate."""
    model, generator = PUBLISHED[model_type], torch.Generator().manual_seed(4)
    wide, down = (torch.randn(shape, generator=generator) for shape in ((4, 32, 32), (4, 32, 16)))
    tensors = dict(
        zip((f"{model.layer}.{name}" for name in model.stacks), (wide, down), strict=True)
    )
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **model.config}))
    block, experts = read(tmp_path).only(1)
    assert (block.name, block.top_k) == (model.layer, 2)
    x = torch.randn(6, 32, generator=generator).double()
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in x])
    weights = torch.rand(6, 2, generator=generator).double()
    ours, _ = moe_forward(x, Routing(ids, weights), lambda e: experts[e], block.activation)
    theirs = torch.zeros_like(x)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            gate, up = (wide[e].double() @ x[token]).chunk(2)
            theirs[token] += share * (down[e].double() @ model.activate(gate, up))
    torch.testing.assert_close(ours, theirs)


def _assert_equal(found: Read, expected: Read) -> None:
    for layer, same in zip(found.found.layers, expected.found.layers, strict=True):
        pairs = zip(found.experts[layer.name], expected.experts[same.name], strict=True)
        for ours, theirs in pairs:
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def _transpose_stacks(
    tensors: dict[str, torch.Tensor], only: str = "experts."
) -> dict[str, torch.Tensor]:
    return {
        name: t.transpose(1, 2) if only in name and t.dim() == 3 else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("inner", INNER)
def test_qwen3_vl_moe_is_read_in_either_orientation(inner: int, tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_vl_moe", inner=inner)
    as_saved = read(tmp_path)
    rewrite(tmp_path, _transpose_stacks)
    assert load_all(tmp_path)[next(iter(as_saved.found.converted))].shape[1] in (
        inner,
        SIZES["hidden"],
    )
    _assert_equal(read(tmp_path), as_saved)
    if inner == INNER[0]:  # one of two
        rewrite(tmp_path, functools.partial(_transpose_stacks, only="experts.down_proj"))
        with pytest.raises(InputError):
            read(tmp_path)


# --- gpt_oss as it was released ----------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [64, 32, 96])
def test_gpt_oss_mxfp4_is_the_same_row(inner: int, tmp_path: Path) -> None:
    """Blocks and scales [E, out, …] with alternating rows, judged by transformers' own unpacking."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = save_family(tmp_path, "gpt_oss", inner=inner)
    generator = torch.Generator().manual_seed(3)
    modules = {path: module for _, path, module in moe_layers(model)}

    def pack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for path, module in modules.items():
            for name in ("gate_up_proj", "down_proj"):
                num_experts, num_in, num_out = tensors.pop(f"{path}.{name}").shape
                shape = (num_experts, num_out, num_in // 32)
                blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
                scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
                tensors |= {f"{path}.{name}_blocks": blocks, f"{path}.{name}_scales": scales}
                unpacked = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                assert unpacked.shape == (num_experts, num_in, num_out)
                setattr(module, name, nn.Parameter(unpacked))
        return tensors

    rewrite(tmp_path, pack)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = read(tmp_path)
    for layer, _, module in moe_layers(model):
        block, experts = done.only(layer)
        assert distance(module, experts, block.activation) < ROUNDING
