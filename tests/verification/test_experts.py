"""The `weights` check in batches on a device finds what the check of single experts finds, of every source and grid."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.artifact.expert_reader import ExpertReader
from hqconv.artifact.reader import Artifact
from hqconv.schemas.grid import Grid
from hqconv.sources.opening import open_source
from hqconv.verification import experts
from hqconv.verification import verify as run_module
from hqconv.verification.experts import LayerCheck, plan_staging
from hqconv.verification.result import CheckResult
from hqconv.verification.weights import check_weights
from tests.make import small
from tests.make.artifacts import SOURCES, make_source
from tests.make.conversions import run
from tests.make.damage import GIB, LAYER, Damaged, assert_same_figures, both_ways
from tests.make.matrices import SCHEMAS
from tests.make.qwen import write_qwen3_moe

CPU = torch.device("cpu")
cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("batched") / "src", intermediate_size=256)


@pytest.fixture(scope="module")
def make(src: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @functools.cache
    def out(schema: str, grid: Grid, dtype: str = "bfloat16") -> Path:
        folder = tmp_path_factory.mktemp("out") / "out"
        run(src, folder, schema, grid, dtype=dtype)
        return folder

    return out


def batched(out: Path, source: Path, memory: int = GIB, **options: Any) -> CheckResult:
    with Artifact(out) as artifact, open_source(source) as opened:
        return check_weights(artifact, opened, None, 2, memory, CPU, **options)


def target_of(name: str) -> tuple[str, Grid]:
    """A schema and a grid for a source of `SOURCES`."""
    kind, _, rest = name.partition("/")
    if kind == "uneven":
        return "mxfp4" if rest == "gpt_oss_floats" else "fp8", Grid(4, 2)
    return small.GOOD[rest][1], Grid(2, 2)


@pytest.mark.parametrize(
    "name", [name for name in SOURCES if name.startswith(("small/", "uneven/"))]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_kind_of_source(name: str, dtype: str, tmp_path: Path) -> None:
    """Quantized, fused, transposed, with biases, and with a padded last rank."""
    source = make_source(name, tmp_path)
    schema, grid = target_of(name)
    if schema == "source" and dtype == "float16":
        schema = "int8"
    run(source, tmp_path / "out", schema, grid, dtype=dtype)
    assert both_ways(tmp_path / "out", source).findings == []


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "awq", "bitnet"])
def test_quantized_formats(name: str, tmp_path: Path) -> None:
    form = next(one for one in SOURCES if one.startswith(f"format/{name}"))
    source = make_source(form, tmp_path)
    run(source, tmp_path / "out", "int8")
    assert both_ways(tmp_path / "out", source).findings == []


def test_a_good_expert_that_another_one_repeats(src: Path, tmp_path: Path) -> None:
    """It is named although nothing is wrong with it: its fingerprint is there."""
    run(src, tmp_path / "out", "mxfp4", Grid(2, 2))
    copy = Damaged(tmp_path / "out", src, "mxfp4")
    for path in (copy.rank_file(LAYER, tp_rank, 1) for tp_rank in range(2)):
        for name in copy.tensor_names(path):
            copy.expert_bytes(path, name, 1)[:] = copy.expert_bytes(path, name, 0)
    findings = both_ways(copy.root, src).findings
    assert {f.found for f in findings if "swapped" in f.what} == {
        f"{role} of expert 2" for role in ("w1", "w3", "w2")
    }


def test_an_artifact_as_a_source_is_looked_at_one_by_one(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """It reads for itself: no batch can be made of its bytes."""
    source = make("mxfp4", Grid(2, 1))
    run(source, tmp_path / "again", "source", Grid())
    result = batched(tmp_path / "again", source)
    assert result.status == "pass"
    assert result.notes[-1] == "on cpu; 8 of 8 experts again on the CPU"


def test_what_fails_in_a_batch_is_looked_at_again(
    make: Callable[..., Path], src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is; the verdict is that of single experts."""
    out = make("mxfp4", Grid(2, 2))
    expected = batched(out, src)

    decode = ExpertReader.decode

    def fails(self: ExpertReader, stored: Any, buffer: torch.Tensor) -> Any:
        if len(stored.forms) > 1:  # a batch has both GEMMs
            raise torch.OutOfMemoryError("no memory")
        return decode(self, stored, buffer)

    monkeypatch.setattr(ExpertReader, "decode", fails)
    result = batched(out, src)
    note = "on cpu; 8 of 8 experts again on the CPU, some after OutOfMemoryError: no memory"
    assert (result.status, result.notes[-1]) == ("pass", note)
    assert_same_figures(result.measured, expected.measured)


def test_two_batches_are_on_the_device_at_a_time(
    make: Callable[..., Path], src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make("mxfp4", Grid(2, 2))
    expected = batched(out, src)
    both, inside, most = threading.Barrier(2, timeout=60), threading.Semaphore(0), []
    judge = LayerCheck._measure

    def counted(self: LayerCheck, *words: Any) -> Any:
        inside.release()
        time.sleep(0.05)  # in which a third one would come
        both.wait()  # for ever with one at a time
        most.append(inside._value)
        inside.acquire()
        return judge(self, *words)

    monkeypatch.setattr(experts, "_BATCH_BYTES", 1 << 19)
    monkeypatch.setattr(LayerCheck, "_measure", counted)
    with Artifact(out) as artifact, open_source(src) as opened:
        result = check_weights(artifact, opened, None, 4, GIB, CPU)
    assert len(most) == 8
    assert max(most) <= 2
    assert (result.findings, result.notes) == ([], expected.notes)
    assert_same_figures(result.measured, expected.measured)


def test_ops_that_do_not_load_leave_it_to_the_cpu(
    make: Callable[..., Path], src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such architecture\nand more")

    monkeypatch.setattr("hqconv.verification.experts.quantize_stacks", fails)
    result = batched(make("mxfp4", Grid(2, 2)), src)
    assert result.status == "pass"
    assert result.notes[1:] == [
        "cpu cannot be used: RuntimeError: no such architecture",
        "on the CPU",
    ]


def test_little_memory_means_small_batches_or_none(make: Callable[..., Path], src: Path) -> None:
    out = make("mxfp4", Grid(2, 2))
    for memory in (18 << 20, 20 << 20, GIB):
        result = batched(out, src, memory)
        assert (result.status, result.notes[-1].split(";")[0]) == ("pass", "on cpu"), memory
    assert plan_staging(CPU, 4, 1000) is None
    for limit in (1 << 20, 100 << 20, 3 * GIB):
        staging = plan_staging(CPU, 4, limit)
        assert staging is not None
        assert staging.host_bytes <= limit


def test_the_device_is_the_one_asked_for(
    make: Callable[..., Path], src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of any architecture by default, none with --device cpu."""
    used: list[torch.device | None] = []

    def look(*words: Any) -> CheckResult:
        used.append(words[5])
        return CheckResult("weights")

    monkeypatch.setattr(run_module, "check_weights", look)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in ("auto", "cpu"):
        hqconv.verify(make("mxfp4", Grid(2, 2)), src, checks=["weights"], device=device)
    assert used == [torch.device("cuda", 0), None]


# --- on a GPU


@cuda
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_good_artifacts_on_a_gpu(
    make: Callable[..., Path], src: Path, schema: str, dtype: str
) -> None:
    out = make(schema, Grid(2, 2), dtype)
    assert both_ways(out, src, "cuda:0").findings == []
    assert both_ways(out, None, "cuda:0").findings == []


@cuda
@needs_gpu
@pytest.mark.parametrize(
    "name", [name for name in SOURCES if name.startswith(("small/", "uneven/"))]
)
def test_every_kind_of_source_on_a_gpu(name: str, tmp_path: Path) -> None:
    source = make_source(name, tmp_path)
    run(source, tmp_path / "out", *target_of(name))
    assert both_ways(tmp_path / "out", source, "cuda:0").findings == []


@cuda
@needs_gpu
@pytest.mark.parametrize("schema", ["mxfp4", "int4-g64-zp", "nvfp4", "fp8"])
def test_damage_on_a_gpu(make: Callable[..., Path], src: Path, schema: str, tmp_path: Path) -> None:
    """Flipped bits and swapped experts, in the same words."""
    run(src, tmp_path / "out", schema, Grid(2, 2))
    copy = Damaged(tmp_path / "out", src, schema)
    copy.swap_experts(copy.path, ("w2",))
    for name in copy.tensor_names(copy.path):
        copy.flip(copy.path, name, local=1, byte=17 % len(copy.expert_bytes(copy.path, name, 1)))
    copy.flip(copy.rank_file(LAYER, 0, 0), f"{LAYER}.w13_weight", byte=5)
    assert len(both_ways(copy.root, src, "cuda:0").findings) > 4
