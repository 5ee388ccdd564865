"""Inkling2Loop's stacks of experts in formats of their own, decoded as transformers decodes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hqconv.errors import InputError
from hqconv.sources.opening import open_source
from tests.make import conversions

E, INNER, HIDDEN = 3, 64, 96
_OP = "Inkling2LoopDequantizeExperts"
_PARTS = ("weight", "weight_scale", "weight_amax", "weight_outer_scale_denominator")
_LAYER = "model.llm.layers.0.mlp.experts"
Parts = dict[str, torch.Tensor]


def _nvfp4(rows: int, columns: int, divisor: torch.Tensor) -> Parts:
    scale = (torch.rand(E, rows, columns // 16) * 400).to(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8)
    return dict(zip(_PARTS, (codes, scale, torch.rand(E) + 0.1, divisor.clone()), strict=True))


def _mxfp8(rows: int, columns: int) -> Parts:
    scale = torch.randint(110, 130, (E, rows, columns // 32), dtype=torch.uint8)
    return {"weight": torch.randn(E, rows, columns).to(torch.float8_e4m3fn), "weight_scale": scale}


def _write(folder: Path, stacks: dict[str, Parts]) -> Path:
    folder.mkdir()
    tensors = {
        f"{_LAYER}.{name}_{part}": tensor
        for name, tensors in stacks.items()
        for part, tensor in tensors.items()
    }
    tensors["model.llm.layers.0.mlp.gate.weight"] = torch.randn(E, HIDDEN).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "inkling2_loop", "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    config |= {
        "n_routed_experts": E,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _theirs(tensors: Parts) -> torch.Tensor:
    """[E, rows, columns] by the op that transformers loads them with, in float32; w13's rows alternate."""

    class Model:
        def get_parameter(self, _name: str) -> torch.Tensor:
            return torch.empty(0)

    loading = pytest.importorskip("transformers.core_model_loading")
    if not hasattr(loading, _OP):
        pytest.skip("transformers before 5.24")
    given = {part: tensors[part] for part in _PARTS if part in tensors}
    found: torch.Tensor
    (found,) = getattr(loading, _OP)().convert(given, list(_PARTS), ["w"], Model(), "w").values()
    assert found.dtype == torch.float32
    return found


@pytest.mark.parametrize(
    "divisor", [torch.tensor(2688.0), torch.full((E,), 448.0)], ids=["one", "per expert"]
)
@pytest.mark.parametrize("kinds", ["nvfp4 nvfp4", "mxfp8 mxfp8", "nvfp4 mxfp8"])
def test_experts_are_those_that_transformers_loads(
    kinds: str, divisor: torch.Tensor, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    shapes = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    stacks = {
        name: _nvfp4(*shapes[name], divisor) if kind == "nvfp4" else _mxfp8(*shapes[name])
        for name, kind in zip(shapes, kinds.split(), strict=True)
    }
    src = _write(tmp_path / "src", stacks)
    w13, w2 = _theirs(stacks["w13"]), _theirs(stacks["w2"])
    expected = {"w1": w13[:, 0::2], "w3": w13[:, 1::2], "w2": w2}
    with open_source(src) as source:
        (layer,) = source.map_experts().layers
        assert not layer.activation.is_known(gated=True), "soft caps"
        for expert in range(E):
            found = source.read_expert(layer, expert, list(expected), torch.device("cpu"))
            for role, values in expected.items():
                assert torch.equal(found[role].values() + 0.0, values[expert] + 0.0), (expert, role)


def test_nvfp4_of_amax_keeps_its_codes(tmp_path: Path) -> None:
    stacks = {
        "w13": _nvfp4(2 * INNER, HIDDEN, torch.tensor(2688.0)),
        "w2": _nvfp4(HIDDEN, INNER, torch.tensor(2688.0)),
    }
    conversions.run(_write(tmp_path / "src", stacks), tmp_path / "out", "nvfp4", dtype="bfloat16")
    (block,) = json.loads((tmp_path / "out/hqconv.json").read_text())["blocks"].values()
    assert block["source_format"]["decoder"] == "nvfp4_amax"
    assert block["conversion"] == "direct", block


def test_a_denominator_of_zero_is_refused(tmp_path: Path) -> None:
    stacks = {
        "w13": _nvfp4(2 * INNER, HIDDEN, torch.tensor(0.0)),
        "w2": _nvfp4(HIDDEN, INNER, torch.tensor(1.0)),
    }
    with pytest.raises(InputError, match="A scale is not usable"):
        conversions.run(_write(tmp_path / "src", stacks), tmp_path / "out", "nvfp4")
