"""What is counted of codes and scales, against counts of packed tensors as safetensors gives them."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hqconv
from hqconv.artifact import code_usage
from hqconv.artifact.code_usage import read_usage
from hqconv.errors import RequestError, VerificationError
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "small", num_experts=5, intermediate_size=256)


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact in the checkpoint layout, whose codes are bytes."""
    out = tmp_path_factory.mktemp("artifacts") / "packed"
    run(model, out, "int8", layout="checkpoint")
    return out


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Of all shards."""
    return {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}


def counted(out: Path, role: str, experts: range) -> tuple[Any, Counter[int]]:
    """Codes and powers of two of scales, counted on the tensors themselves."""
    codes, powers, stored = np.zeros(256, np.int64), Counter[int](), tensors(out)
    for layer in range(2):
        for expert in experts:
            base = f"model.layers.{layer}.mlp.experts.{expert}.{NAMES[role]}"
            codes += np.bincount(stored[f"{base}.weight"].numpy().view(np.uint8).ravel(), minlength=256)
            scale = stored[f"{base}.weight_scale"].float().abs()
            powers.update(torch.floor(torch.log2(scale)).int().ravel().tolist())
    return codes, powers


@pytest.mark.parametrize("role", NAMES)
def test_counts_are_those_of_the_tensors(packed: Path, role: str) -> None:
    found = read_usage(packed)["schemas"]["int8"][role]
    codes, powers = counted(packed, role, range(5))
    assert [count for _, count in found["codes"]] == codes.tolist()
    assert [value for value, _ in found["codes"]] == list(range(-128, 128))
    assert dict(found["scales"]) == dict(powers)
    assert found["zero_points"] == []
    assert found["num_zero_scales"] == found["num_odd_scales"] == 0


def test_signs_of_scales_are_counted(packed: Path) -> None:
    """Humming's symmetric integers have scales below zero."""
    scales = [tensor for name, tensor in tensors(packed).items() if name.endswith("up_proj.weight_scale")]
    negative = sum(int((scale < 0).sum()) for scale in scales)
    assert negative > 0
    assert read_usage(packed)["schemas"]["int8"]["w3"]["num_negative_scales"] == negative


def test_a_sample_is_spread_evenly(packed: Path) -> None:
    found = read_usage(packed, 2)
    codes = sum(counted(packed, "w1", range(one, one + 1))[0] for one in (0, 2))
    assert [count for _, count in found["schemas"]["int8"]["w1"]["codes"]] == codes.tolist()
    assert [value is None for value in found["rms"][LAYER]["w1"]] == [False, True, False, True, True]
    assert (found["experts_read"], found["experts"]) == (4, 10)


def test_large_artifacts_are_sampled_unless_asked(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_usage(packed)["experts_read"] == 10
    monkeypatch.setattr(code_usage, "WEIGHTS_READ", 3 * 128 * 256 * 10 // 2)
    assert read_usage(packed)["experts_read"] == 2 * (5 // 2)
    assert read_usage(packed, 99)["experts_read"] == 10


def test_of_many_layers_some_are_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert of each layer is more than the limit; at least one expert of each schema is read."""
    monkeypatch.setattr(code_usage, "WEIGHTS_READ", 1)
    found = read_usage(packed)
    assert (found["experts_read"], found["layers_read"], found["layers"]) == (1, 1, 2)
    assert found["rms"].keys() == {LAYER}
    num_counted = sum(count for role in found["schemas"]["int8"].values() for _, count in role["codes"])
    assert found["weights_read"] == num_counted == 3 * 128 * 256


def test_experts_of_several_layers_are_read_at_once(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert of each of two layers, by two threads: both are begun before either is done."""
    both, of_one = threading.Barrier(2, timeout=60), code_usage._count_expert

    def count(*args: Any) -> Any:
        both.wait()
        return of_one(*args)

    alone = read_usage(packed, 1)
    monkeypatch.setattr(code_usage, "_count_expert", count)
    assert read_usage(packed, 1, num_threads=2) == alone


@pytest.mark.parametrize("schema", ["mxfp4", "nvfp4", "int4-g64-zp", "fp8-tensor"])
def test_both_layouts_and_all_ranks_count_the_same(schema: str, model: Path, tmp_path: Path) -> None:
    grid = {"tp": 2, "ep": 2, "redundant_experts": 1}
    hqconv.convert(model, tmp_path / "kernel", schema=schema, target="sm90", device="cpu", **grid)
    kernel = read_usage(tmp_path / "kernel", num_threads=1)
    assert kernel == read_usage(tmp_path / "kernel", num_threads=2)
    run(model, tmp_path / "packed", schema, layout="checkpoint")
    assert kernel == read_usage(tmp_path / "packed")
    (roles,) = kernel["schemas"].values()
    for used in roles.values():
        assert sum(count for _, count in used["codes"]) == 10 * 128 * 256
    decoded = hqconv.dequantize(tmp_path / "kernel", layer=LAYER)
    for role in NAMES:
        expected = decoded[role].double().square().mean((1, 2)).sqrt().tolist()
        assert kernel["rms"][LAYER][role] == pytest.approx(expected, rel=1e-12)


def test_integer_zero_points_are_counted(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", "int4-g64-zp")
    for used in read_usage(tmp_path / "out")["schemas"]["int4-g64-zp"].values():
        assert len(used["zero_points"]) == 16
        assert sum(used["zero_points"]) == 10 * 128 * 256 // 64 == sum(count for _, count in used["scales"])
        assert sum(count > 0 for count in used["zero_points"]) > 3


def test_what_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--sample"):
        read_usage(tmp_path, 0)
    with pytest.raises(RequestError, match="not an hqconv artifact"):
        read_usage(tmp_path)
    run(model, tmp_path / "out", "mxfp4")
    path = next((tmp_path / "out/experts").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(VerificationError):
        read_usage(tmp_path / "out")
