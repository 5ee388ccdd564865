"""Act order (g_idx): codes of w2 are kept, its columns sorted by group, and the rows of gate and up with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.conversion import encode
from hqconv.errors import InputError
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, manifest, run
from tests.make.small import HIDDEN, LAYER, E, Source, Tensors, per_expert, save

GROUP = 64
ROLE_OF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
EVERY = frozenset(ROLE_OF)


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """int32 words along the last dimension, eight 4-bit codes each, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    words = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return (words - (words >= 2**31) * 2**32).int()


def _index(k: int, seed: int, is_ordered: bool) -> torch.Tensor:
    index = torch.arange(k) // GROUP
    return index[torch.randperm(k, generator=_draw(seed))] if is_ordered else index


class Written:
    """Experts in a checkpoint, and their weights as numbers: (expert, role) → float64 [N, K], g_idx."""

    def __init__(
        self,
        kind: str = "gptq",
        ordered: Collection[str] = ("down_proj",),
        *,
        exempt: int | None = None,
        is_uneven: bool = False,
        has_bias: bool = False,
    ) -> None:
        """kind: gptq, gptq-zp, ct, ct-zp. ordered: projections with an order of columns.

        exempt: the expert whose gate and up have none. is_uneven: w2's groups have different sizes.
        """
        self.kind, self.ordered, self.exempt = kind, ordered, exempt
        self.is_uneven, self.has_bias = is_uneven, has_bias
        self.values: dict[tuple[int, str], torch.Tensor] = {}
        self.index: dict[tuple[int, str], torch.Tensor] = {}
        self.bias: dict[tuple[int, str], torch.Tensor] = {}

    def source(self) -> Source:
        is_gptq, is_symmetric = self.kind.startswith("gptq"), not self.kind.endswith("-zp")
        if is_gptq:
            words: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
            words |= {"sym": is_symmetric, "desc_act": True}
        else:
            weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
            weights |= {"symmetric": is_symmetric, "actorder": "group"}
            words = {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head"],
            }
            words["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
        tensors, config = per_expert(self._parts, words)
        return tensors, {**config, "torch_dtype": "float16"}

    def _parts(self, n: int, k: int, seed: int) -> Tensors:
        expert, role = seed // 10, list(ROLE_OF)[seed % 10]
        codes = torch.randint(0, 16, (n, k), generator=_draw(seed))
        scale = torch.rand(n, k // GROUP, generator=_draw(seed + 1)).add(0.1).half()
        zero = torch.full_like(scale, 8).long()
        if self.kind.endswith("-zp"):
            zero = torch.randint(1, 16, scale.shape, generator=_draw(seed + 2))
        is_ordered = role in self.ordered and (expert != self.exempt or role == "down_proj")
        index = _index(k, seed, is_ordered)
        if role == "down_proj" and self.is_uneven:
            index[int((index == 1).nonzero()[0])] = 0
        self.index[expert, ROLE_OF[role]] = index
        self.values[expert, ROLE_OF[role]] = (codes - zero[:, index]).double() * scale.double()[
            :, index
        ]
        biases = {}
        if self.has_bias:
            biases["bias"] = self.bias[expert, ROLE_OF[role]] = torch.rand(
                n, generator=_draw(seed)
            ).half()
        if self.kind.startswith("gptq"):
            return {
                **biases,
                "qweight": _words(codes).t().contiguous(),
                "qzeros": _words(zero.t() - 1),
                "scales": scale.t().contiguous(),
                "g_idx": index.int(),
            }
        parts = {
            "weight_packed": _words(codes),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if self.kind.endswith("-zp"):
            parts["weight_zero_point"] = _words(zero.t()).t().contiguous()
        return {**parts, **biases, "weight_g_idx": index.int()}

    def expected(self, expert: int, role: str) -> torch.Tensor:
        """What the artifact holds: the intermediate columns in the order of w2's groups."""
        order = torch.argsort(self.index[expert, "w2"], stable=True)
        values = self.values[expert, role]
        return values[:, order] if role == "w2" else values[order]

    def output(self, weights: Callable[[str], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The expert's function, float64."""
        gate, up, down = (weights(role).double() for role in ("w1", "w3", "w2"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def requantized(out: Path) -> dict[str, int]:
    """Role → number of experts that were quantized anew."""
    errors = manifest(out)["blocks"][LAYER]["quantization_error"]
    return {role: one["num_experts_requantized"] for role, one in errors.items()}


def files_of(out: Path) -> dict[str, bytes]:
    return {
        path.parent.name: path.read_bytes()
        for path in sorted((out / "experts").rglob("*.safetensors"))
    }


def assert_kept(out: Path, written: Written, roles: Collection[str] = ("w1", "w3", "w2")) -> None:
    """Weights of an artifact equal to the checkpoint's, the order aside; and the same function of the experts."""
    found = hqconv.dequantize(out, layer=LAYER)
    x = torch.randn(5, HIDDEN, generator=_draw(7), dtype=torch.float64)
    for expert in range(E):
        for role in roles:
            assert torch.equal(found[role][expert].double(), written.expected(expert, role)), (
                expert,
                role,
            )
        if len(roles) == 3:
            ours = written.output(lambda role, e=expert: found[role][e], x)
            theirs = written.output(lambda role, e=expert: written.values[e, role], x)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("gptq", Grid(2)),
        ("gptq-zp", Grid(1, 2)),
        ("ct", Grid()),
        ("ct-zp", Grid(4, 2, "round_robin", 2)),
    ],
)
def test_w2_alone_with_an_order_keeps_every_code(kind: str, grid: Grid, tmp_path: Path) -> None:
    written = Written(kind)
    source = save(tmp_path / "src", written.source())
    run(source, tmp_path / "out", "source", grid)
    layer = manifest(tmp_path / "out")["blocks"][LAYER]
    assert (layer["conversion"], layer["intermediate_order"]) == ("direct", "g_idx")
    assert requantized(tmp_path / "out") == {"w1": 0, "w3": 0, "w2": 0}
    assert_kept(tmp_path / "out", written)
    assert_verified(tmp_path / "out", source)


def test_biases_go_with_their_rows(tmp_path: Path) -> None:
    written = Written(has_bias=True)
    run(save(tmp_path / "src", written.source()), tmp_path / "out", "source", Grid(2))
    assert_kept(tmp_path / "out", written)
    found = hqconv.dequantize(tmp_path / "out", layer=LAYER)
    for expert in range(E):
        order = torch.argsort(written.index[expert, "w2"], stable=True)
        for role, bias in (("w1", "b1"), ("w3", "b3"), ("w2", "b2")):
            stored = written.bias[expert, role].float()
            assert torch.equal(found[bias][expert], stored if role == "w2" else stored[order])
    assert_verified(tmp_path / "out", tmp_path / "src")


@pytest.mark.parametrize("kind", ["gptq", "ct-zp"])
def test_gate_and_up_with_an_order_are_quantized_anew_and_w2_is_kept(
    kind: str, tmp_path: Path
) -> None:
    written = Written(kind, EVERY)
    source = save(tmp_path / "src", written.source())
    schema = "int4-g64-zp" if kind.endswith("zp") else "int4-g64"
    run(source, tmp_path / "out", schema, Grid(2), dtype="float16")
    assert requantized(tmp_path / "out") == {"w1": E, "w3": E, "w2": 0}
    assert_kept(tmp_path / "out", written, ["w2"])
    found = hqconv.dequantize(tmp_path / "out", layer=LAYER)
    for role in ("w1", "w3"):
        for expert in range(E):
            expected = written.expected(expert, role)
            assert (
                0 < (found[role][expert] - expected).norm() / expected.norm() < 0.2
            )  # in w2's order
    assert_verified(tmp_path / "out", source)


def test_groups_of_unequal_size_are_quantized_anew_in_their_place(tmp_path: Path) -> None:
    written = Written(is_uneven=True)
    source = save(tmp_path / "src", written.source())
    run(source, tmp_path / "out", "int4-g64", dtype="float16")
    assert requantized(tmp_path / "out") == {"w1": 0, "w3": 0, "w2": E}
    found = hqconv.dequantize(tmp_path / "out", layer=LAYER)
    for expert in range(E):
        assert torch.equal(found["w1"][expert].double(), written.values[expert, "w1"])
    assert_verified(tmp_path / "out", source)
    with pytest.raises(InputError, match="grouped by g_idx"):
        run(source, tmp_path / "own", "source")


def test_experts_of_both_kinds_in_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU defers its checks: a batch in which some experts' codes are kept is encoded again, expert by expert."""
    written = Written(ordered=EVERY, exempt=2)
    source = save(tmp_path / "src", written.source())
    run(source, tmp_path / "out", "int4-g64", dtype="float16")
    assert requantized(tmp_path / "out") == {"w1": E - 1, "w3": E - 1, "w2": 0}
    found = hqconv.dequantize(tmp_path / "out", layer=LAYER)
    assert torch.equal(found["w1"][2].double(), written.expected(2, "w1"))
    monkeypatch.setattr(encode, "is_asynchronous", lambda device: True)
    run(source, tmp_path / "deferred", "int4-g64", dtype="float16")
    assert files_of(tmp_path / "deferred") == files_of(tmp_path / "out")


def test_an_artifact_as_source_and_the_checkpoint_layout(tmp_path: Path) -> None:
    written = Written("gptq-zp")
    source = save(tmp_path / "src", written.source())
    run(source, tmp_path / "out", "source", Grid(2))
    run(source, tmp_path / "checkpoint", "source", layout="checkpoint")
    assert_verified(tmp_path / "checkpoint", source)
    for name in ("out", "checkpoint"):
        run(tmp_path / name, tmp_path / f"{name}-again", "source", Grid(4))
        assert (
            manifest(tmp_path / f"{name}-again")["blocks"][LAYER]["intermediate_order"] == "g_idx"
        )
        assert_kept(tmp_path / f"{name}-again", written)
        assert_verified(tmp_path / f"{name}-again", tmp_path / name)
    assert files_of(tmp_path / "out-again") == files_of(tmp_path / "checkpoint-again")
