"""What the kernel check does around the kernel: experts decoded in batches and held to the source; compiling ahead."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import hqconv
from hqconv.api import open_source
from hqconv.artifact.reader import Artifact
from hqconv.errors import VerificationError
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16
from hqconv.verification import decoded_experts as module
from hqconv.verification.decoded_experts import InOrder, decoded_experts, source_experts
from hqconv.verification.kernel import TokenBatch, _compare_source, _recorded
from hqconv.verification.precompile import begun, kernel_tasks
from hqconv.verification.reference import Routing, moe_forward
from hqconv.verification.result import CheckResult
from hqconv.verification.tolerances import Tolerances, check_figures
from tests.make.artifacts import make_source
from tests.make.conversions import run
from tests.make.damage import LAYER, Damaged
from tests.make.formats import write
from tests.make.qwen import write_qwen3_moe

CPU = torch.device("cpu")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write_qwen3_moe(tmp_path / "src", intermediate_size=256)


@pytest.mark.parametrize("batch", [1, 1 << 30])
@pytest.mark.parametrize(
    ("source", "schema", "grid"), [("plain", "nvfp4", Grid(2, 2)), ("uneven/gpt_oss_floats", "mxfp4", Grid(4))]
)
def test_experts_are_those_of_dequantize(
    source: str, schema: str, grid: Grid, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in order, as the check asks, and with experts left out."""
    monkeypatch.setattr(module, "_BATCH_WEIGHTS", batch)
    run(make_source(source, tmp_path), tmp_path / "out", schema, grid)
    with Artifact(tmp_path / "out") as artifact, ThreadPoolExecutor(2) as pool:
        name = next(iter(artifact.layers))
        expected = hqconv.dequantize(tmp_path / "out", layer=name)
        found = decoded_experts(artifact, artifact.moe_layer(name), CPU, pool)
        for expert in (0, 1, 2, 3, 0, 2, 3):
            one = found(expert)
            assert one.keys() == expected.keys()
            assert all(torch.equal(one[key], expected[key][expert]) for key in one)


def test_what_no_conversion_writes_is_refused(tmp_path: Path) -> None:
    """In the words of the weights check."""
    source = write_qwen3_moe(tmp_path / "src")
    run(source, tmp_path / "out", "mxfp4", Grid(2, 2))
    copy = Damaged(tmp_path / "out", source, "mxfp4")
    name = f"{LAYER}.w13_weight"
    copy.flip(copy.path, name, byte=copy.header(copy.path)[0][name]["shape"][2] * 4 - 1, mask=0x40)
    with Artifact(copy.root) as artifact, ThreadPoolExecutor(2) as pool:
        found = decoded_experts(artifact, artifact.moe_layer(LAYER), CPU, pool)
        with pytest.raises(VerificationError, match=r"no conversion writes[^$]*expert 2 \(local 0\)"):
            found(2)


def test_errors_of_decoded_weights_are_plain_arithmetic(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4", Grid(2, 1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(16)])
    batch = TokenBatch(torch.randn(16, 128, generator=generator).bfloat16(), Routing(ids, torch.rand(16, 2)), "seeded")
    with Artifact(tmp_path / "out") as artifact, open_source(src) as source, ThreadPoolExecutor(2) as pool:
        layer = source.map_experts().layers[0]
        decoded = decoded_experts(artifact, artifact.moe_layer(LAYER), CPU, pool)
        found, _ = moe_forward(batch.x.double(), batch.routing, decoded, Activation("silu"))
        measured = _compare_source(Activation("silu"), batch, found, decoded, source_experts(source, layer, CPU, pool))
        exact = [source.read_expert(layer, e, layer.roles, CPU) for e in range(4)]
    values = hqconv.dequantize(tmp_path / "out", layer=LAYER)
    for role, error in measured["weights_against_source"].items():
        w = torch.stack([one[role].values().double() for one in exact])
        assert error == pytest.approx(float((values[role].double() - w).norm() / w.norm()), rel=1e-12)
    assert 0 < measured["against_source"] < 0.5


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_any_expert_whose_scales_were_rounded_may_be_hit(expert: int, tmp_path: Path) -> None:
    """One scale a matrix: the experts' errors differ, and a batch may see the worst one only."""
    src = write(tmp_path / "src", "ct-naive-int8").folder
    run(src, tmp_path / "out", "int8")
    generator = torch.Generator().manual_seed(expert)
    ids = torch.full((16, 1), expert)
    batch = TokenBatch(torch.randn(16, 384, generator=generator).bfloat16(), Routing(ids, torch.ones(16, 1)), "")
    good = {"kernel": 0.0, "channel": 0.0, "batch": 0.0, "worst_rank": "-", "worst_channel": "-"}
    with Artifact(tmp_path / "out") as artifact, open_source(src) as source, ThreadPoolExecutor(2) as pool:
        layer = source.map_experts().layers[0]
        decoded = decoded_experts(artifact, artifact.moe_layer(layer.name), CPU, pool)
        found, _ = moe_forward(batch.x.double(), batch.routing, decoded, Activation("silu"))
        original = source_experts(source, layer, CPU, pool)
        measured = good | _compare_source(Activation("silu"), batch, found, decoded, original)
        errors = artifact.layers[layer.name].quantization_error
    recorded = {role: _recorded(error) for role, error in errors.items()}
    for role, error in errors.items():
        assert recorded[role] >= error.worst_relative_error * (1 - 1e-6)
        assert recorded[role] == error.largest_scale_change > 1.01 * error.relative_error
    for factor in (1.0, 1.3 * 2.0**-8 / max(measured["weights_against_source"].values())):
        worse = {role: factor * e for role, e in measured["weights_against_source"].items()}
        result = CheckResult("kernel")
        limits = Tolerances.of(A16, "bfloat16")
        check_figures(result, layer.name, {**measured, "weights_against_source": worse}, limits, recorded)
        assert bool(result.findings) == (factor > 1), result.findings


def test_batches_are_loaded_once_and_let_go() -> None:
    loaded = []

    def load(experts: range) -> Mapping[int, int]:
        loaded.append(experts)
        return {expert: expert * expert for expert in experts}

    with ThreadPoolExecutor(1) as pool:
        squares = InOrder(pool, load, 7, 2)
        assert [squares(expert) for expert in (0, 1, 1, 5, 6)] == [0, 1, 1, 25, 36]
        assert loaded == [range(2), range(2, 4), range(4, 6), range(6, 7)]
        assert squares(3) == 9


def test_preparing_runs_beside_the_checks_and_keeps_its_errors() -> None:
    is_begun, may_end, ended = threading.Event(), threading.Event(), []

    def slow() -> None:
        is_begun.set()
        assert may_end.wait(10)
        ended.append(math.inf)

    def fails() -> None:
        raise RuntimeError("the check says it")

    turns_s = sys.getswitchinterval()
    with begun([slow, fails]) as finish:
        assert is_begun.wait(10)
        assert not ended
        assert sys.getswitchinterval() < turns_s / 10  # other threads need not wait for them
        may_end.set()
        finish()
        assert ended
    assert sys.getswitchinterval() == turns_s


def test_one_task_for_each_kind_of_layer(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "out", "mxfp4", Grid(1, 2))
    with Artifact(tmp_path / "out") as artifact:
        assert len(kernel_tasks(artifact, artifact.layers, (1, 17), CPU)) == 1
