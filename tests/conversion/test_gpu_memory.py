"""What a conversion takes of a real GPU: never more than was planned, and never in the way of what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hqconv
from hqconv.conversion.resources import gpu_need
from tests.make.conversions import open_plan
from tests.make.formats import write
from tests.make.matrices import SCHEMAS
from tests.make.qwen import write_qwen3_moe

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LANES = 3
SIZES = {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 8}


def peak(src: Path, out: Path, schema: str, bound: int) -> int:
    """Bytes that torch took of the GPU beyond what it held before."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    hqconv.convert(src, out, schema=schema, target="sm90", device="cuda:0", max_gpu_memory=bound)
    return torch.cuda.max_memory_reserved() - before


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("gpu") / "plain", num_layers=1, **SIZES)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_schema_takes_more_than_planned(plain: Path, schema: str, tmp_path: Path) -> None:
    source, plan = open_plan(plain, schema)
    source.close()
    bound = LANES * gpu_need(plan.layers[0]).num_bytes(1)
    taken = peak(plain, tmp_path / "out", schema, bound)
    print(f"{schema}: {taken / 2**20:.0f} of {bound / 2**20:.0f} MiB")
    assert 0 < taken <= bound


@pytest.mark.parametrize(
    "name", ["fp8-block", "gptq-int4", "mxfp4-gpt-oss", "modelopt-nvfp4", "ct-int4-g128-zp"]
)
@pytest.mark.parametrize("schema", ["nvfp4", "int4"])
def test_no_format_takes_more_than_planned(name: str, schema: str, tmp_path: Path) -> None:
    src = write(tmp_path / name, name, hidden=1024, inner=1024).folder
    source, plan = open_plan(src, schema)
    source.close()
    bound = LANES * gpu_need(plan.layers[0]).num_bytes(1)
    taken = peak(src, tmp_path / "out", schema, bound)
    print(f"{name} to {schema}: {taken / 2**20:.0f} of {bound / 2**20:.0f} MiB")
    assert taken <= bound


def test_beside_a_model_that_is_there_already(plain: Path, tmp_path: Path) -> None:
    model = torch.empty(8 << 30, dtype=torch.uint8, device="cuda:0")
    assert peak(plain, tmp_path / "out", "int4", 1 << 30) <= 1 << 30
    assert model.numel() == 8 << 30
