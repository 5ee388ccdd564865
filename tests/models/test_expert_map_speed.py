"""Looking at many tensors: what is done for each of them, counted, and that time grows no faster than their number."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hqconv.errors import InputError, RequestError
from hqconv.models import expert_map, family_choice
from hqconv.models.expert_map import map_experts
from hqconv.models.families import Family
from hqconv.models.moe_layer import TensorSlice
from hqconv.schemas.tensors import TensorRef

H, INTER = 64, 32
SHAPES = {"gate_proj": (INTER, H), "up_proj": (INTER, H), "down_proj": (H, INTER)}
DENSE = ("mlp.gate.weight", "mlp.shared_experts.up_proj.weight")


def model(layers: int, experts: int, model_type: str) -> tuple[dict[str, TensorRef], dict[str, object]]:
    tensors = {}
    for layer in range(layers):
        for name in DENSE:
            full = f"model.layers.{layer}.{name}"
            tensors[full] = TensorRef(full, "BF16", (H, H), 0, 0, 2 * H * H)
        for e in range(experts):
            for word, shape in SHAPES.items():
                full = f"model.layers.{layer}.mlp.experts.{e}.{word}.weight"
                tensors[full] = TensorRef(full, "BF16", shape, 0, 0, 2 * H * INTER)
    config = {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": H,
        "moe_intermediate_size": INTER,
        "num_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
    }
    return tensors, config


@pytest.fixture
def num_matches(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, str], int]:
    """How many names are matched by a regular expression for a model of some layers and experts."""
    pattern, asked = family_choice.name_pattern, list[str]()

    def counting(family: Family) -> SimpleNamespace:
        fullmatch = pattern(family).fullmatch
        return SimpleNamespace(fullmatch=lambda name: asked.append(name) or fullmatch(name))

    for module in (family_choice, expert_map):
        monkeypatch.setattr(module, "name_pattern", counting)

    def count(layers: int, experts: int, model_type: str) -> int:
        asked.clear()
        found = map_experts(*model(layers, experts, model_type))
        assert len(found.converted) == layers * experts * len(SHAPES)
        return len(asked)

    return count


def test_few_names_need_a_regular_expression(num_matches: Callable[[int, int, str], int]) -> None:
    """One for each layer, expert, ending and dense tensor of an MoE module, not for each tensor."""
    for layers, experts in ((2, 8), (16, 8), (2, 64), (16, 64)):
        assert num_matches(layers, experts, "qwen3_moe") < (1 + len(DENSE)) * layers + experts + len(SHAPES)


def test_a_row_for_an_unknown_model_is_chosen_by_kinds_of_names(num_matches: Callable[[int, int, str], int]) -> None:
    of_known, of_unknown = (num_matches(32, 64, model_type) for model_type in ("qwen3_moe", "new_moe"))
    assert of_known < of_unknown < of_known + 200  # a few for each row of the table


@pytest.mark.parametrize("model_type", ["qwen3_moe", "new_moe"])
@pytest.mark.parametrize(
    "wrong", ["01.up_proj.weight", "1.up_proj.weight_odd", "x.up_proj.weight", "1.2.up_proj.weight"]
)
def test_names_that_are_nearly_known_are_refused(model_type: str, wrong: str) -> None:
    """After names whose layer, index and ending have matched."""
    tensors, config = model(2, 4, model_type)
    name = f"model.layers.1.mlp.experts.{wrong}"
    tensors[name] = tensors["model.layers.1.mlp.experts.1.up_proj.weight"]._replace(name=name)
    kind = InputError if model_type == "qwen3_moe" else RequestError
    with pytest.raises(kind, match=re.escape(name)):
        map_experts(tensors, config)


def test_names_in_any_order_give_the_same_map() -> None:
    tensors, config = model(3, 5, "qwen3_moe")
    mixed = dict(sorted(tensors.items(), key=lambda item: item[0][::-1]))
    one, other = map_experts(tensors, config), map_experts(mixed, config)
    assert [list(layer.sources) for layer in one.layers] == [list(layer.sources) for layer in other.layers]
    assert list(one.converted) == [name for layer in one.layers for name in layer.tensor_names()]
    assert one.converted == other.converted


def test_time_grows_with_the_number_of_tensors() -> None:
    """Eight times as many may take up to twenty times as long, so that a busy machine passes; a square is 64 times."""

    def seconds(layers: int) -> float:
        tensors, config = model(layers, 64, "qwen3_moe")
        started = time.process_time()
        assert len(map_experts(tensors, config).layers) == layers
        return time.process_time() - started

    gc.disable()  # as the command does
    try:
        assert min(seconds(128) for _ in range(3)) < 20 * min(seconds(16) for _ in range(3))
    finally:
        gc.enable()


def test_a_look_works_out_no_shares_of_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is asked for is worked out once."""
    tensors, config = model(0, 8, "qwen3_moe")
    for layer in range(4):
        for word, shape in {"gate_up_proj": (8, 2 * INTER, H), "down_proj": (8, H, INTER)}.items():
            full = f"model.layers.{layer}.mlp.experts.{word}"
            tensors[full] = TensorRef(full, "BF16", shape, 0, 0, 2 * shape[0] * shape[1] * shape[2])
    calls: list[int] = []
    ref = TensorSlice.ref
    monkeypatch.setattr(TensorSlice, "ref", lambda part, *rest: calls.append(rest[1]) or ref(part, *rest))
    block = map_experts(tensors, config | {"num_hidden_layers": 4}).layers[0]
    assert not calls
    assert block.sources[5] == block.sources[5]
    assert calls == [5, 5, 5]
    assert [roles["w2"]["weight"].offset_bytes for roles in block.sources] == [2 * H * INTER * e for e in range(8)]
    with pytest.raises(IndexError):
        block.sources[8]
