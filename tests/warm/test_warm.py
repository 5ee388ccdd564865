"""`hqconv warm`: which kernels it compiles, and into what. The compiler is a stand-in but where a test says so."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.errors import HqconvError, OutputError, RequestError
from hqconv.kernel_layout.kernel_sources import (
    CONTIGUOUS,
    INDEXED,
    MASKED,
    ComputeSettings,
    compile_kernel,
    gemm_kernels,
    identity,
    input_kernels,
    kernel_compiler,
    standing_in,
    toolkit,
)
from hqconv.schemas.activation import Activation
from hqconv.serving.vllm.translation import PREQUANTIZED
from hqconv.warm.compile_kernels import compute_settings, kernel_activation, warm
from hqconv.warm.gpus import KNOWN
from hqconv.warm.kernel_store import MANIFEST, read_kernels, read_store_manifest
from tests.make.kernels import fake_compiler, use_compiler
from tests.make.qwen import write_qwen3_moe

CONFIG: dict[str, Any] = {
    "sm_version": 90,
    "num_experts": 64,
    "shape_n": 1536,
    "shape_k": 2048,
    "a_dtype": "bfloat16",
    "b_dtype": "float4e2m1",
    "bs_dtype": "float8e8m0",
    "c_dtype": "bfloat16",
    "weight_scale_group_size": 32,
    "weight_scale_type": "group",
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("warm")
    source = write_qwen3_moe(work / "source", hidden_size=256, intermediate_size=256)
    hqconv.convert(source, work / "out", schema="mxfp4", target="sm90", device="cpu")
    return work / "out"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_compiler(monkeypatch, fake_compiler())


def test_a_folder_of_kernels(artifact: Path, compiler: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    lines: list[str] = []
    document = warm(artifact, gpu="h200", kernels=folder, announce=lines.append)
    num = document["num_kernels"]
    assert compiler.num_compiled == document["num_compiled"] == num > 10
    assert lines == [
        f"Compiling {num} of {num} kernels for NVIDIA H200 with FakeCompiler fake+13.0."
    ]
    manifest = read_store_manifest(folder)
    assert len(manifest["kernels"]) == num
    assert {path.name for path in folder.iterdir()} == {MANIFEST} | {
        f"{name}.{kind}" for name in manifest["kernels"] for kind in ("cu", "cubin")
    }
    assert any("(a / (1.f + expf(-a))) * b" in code for code in codes(folder))
    assert (manifest["target"], manifest["compiler"]) == ("sm90", "FakeCompiler fake+13.0")
    assert (manifest["humming_kernels_version"], document["kind"]) == ("0.1.19", "warm")
    assert str(tmp_path) not in (folder / MANIFEST).read_text()


def codes(folder: Path) -> set[str]:
    return {kernel.code for kernel in read_kernels(folder, read_store_manifest(folder))}


def test_kernels_of_each_gemms_schema(artifact: Path, compiler: Any, tmp_path: Path) -> None:
    """Every GEMM kernel of two schemas is one of an artifact with one of them; and rotation is w13's alone."""
    source, found = artifact.parent / "source", {}
    for schema in ("int4-g64-h64", "fp8", "int4-g64-h64+fp8"):
        hqconv.convert(source, tmp_path / schema, schema=schema, target="sm90", device="cpu")
        folder = tmp_path / f"kernels {schema}"
        warm(tmp_path / schema, gpu="h200", kernels=folder)
        found[schema] = codes(folder)
    rotated, plain, both = found.values()
    assert both <= rotated | plain
    assert both & (rotated - plain)
    assert both & (plain - rotated)
    assert (rotated | plain) - both


@pytest.mark.full
def test_what_is_there_stays_and_what_is_damaged_is_made_anew(
    artifact: Path, compiler: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    warm(artifact, gpu="h200", kernels=folder)
    before, num = (folder / MANIFEST).read_bytes(), compiler.num_compiled
    assert warm(artifact, gpu="h200", kernels=folder)["num_compiled"] == 0
    victim = next(folder.glob("*.cubin"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    assert warm(artifact, gpu="h200", kernels=folder)["num_compiled"] == 1
    assert (compiler.num_compiled, (folder / MANIFEST).read_bytes()) == (num + 1, before)


@pytest.mark.full
def test_another_compiler_replaces_all(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    use_compiler(monkeypatch, fake_compiler("13.0"))
    warm(artifact, gpu="h200", kernels=folder)
    newer = use_compiler(monkeypatch, fake_compiler("13.1"))
    document = warm(artifact, gpu="h20", kernels=folder)
    assert newer.num_compiled == document["num_kernels"] == len(list(folder.glob("*.cubin")))
    assert read_store_manifest(folder)["compiler"] == "FakeCompiler fake+13.1"


@pytest.mark.full
def test_an_interrupted_run_lists_nothing(artifact: Path, compiler: Any, tmp_path: Path) -> None:
    good, folder = compiler._compile, tmp_path / "kernels"
    compiler._compile = classmethod(lambda cls, *_: (1, "", "x.cu(1): error: no such thing\n"))
    with pytest.raises(RequestError, match="no such thing"):
        warm(artifact, gpu="h200", kernels=folder, jobs=2)
    assert not (folder / MANIFEST).exists()
    compiler._compile = good
    warm(artifact, gpu="h200", kernels=folder, jobs=2)


REFUSED: dict[str, tuple[dict[str, str | None], type[HqconvError], str]] = {
    "a pipe": ({"gpu": "pipe"}, RequestError, "not a regular file"),
    "no end": ({"gpu": "deep"}, RequestError, "no such GPU"),
    "files of others": ({"kernels": "stray"}, OutputError, "thesis.tex"),
    "no GPU": ({"gpu": None}, RequestError, "no GPU here"),
    "unknown": ({"gpu": "gtx9000"}, RequestError, "no such GPU"),
    "nonsense": ({"gpu": "sm_count=many"}, RequestError, "makes no sense"),
    "another architecture": (
        {"gpu": "sm_version=120"},
        RequestError,
        "a GPU of sm90: h100, h100-pcie, h20, h200",
    ),
    "a name of another": ({"gpu": "B200"}, RequestError, "found: NVIDIA B200, sm100"),
    "a name without figures": ({"gpu": "gh200"}, RequestError, "gpu.json"),
    "almost a name": ({"gpu": "h2000"}, RequestError, r"Did you mean h200\?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(
    case: str, artifact: Path, compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    Path("stray").mkdir()
    Path("stray/thesis.tex").write_text("years")
    os.mkfifo("pipe")
    Path("deep").write_text("[" * 100_000)
    for name, value in (("sm_count", "many"), ("sm_version", 120)):
        facts = {**vars(KNOWN["h200"]), name: value}
        Path(f"{name}={value}").write_text(json.dumps(facts))
    options, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        warm(artifact, **{"gpu": "h200", "kernels": "kernels", **options})  # type: ignore[arg-type]
    assert compiler.num_compiled == 0


def test_a_checkpoint_without_the_engine(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = artifact.parent / "source"
    hqconv.convert(source, tmp_path / "out", schema="mxfp4", layout="checkpoint", device="cpu")
    for checkpoint in (source, tmp_path / "out"):
        with pytest.raises(RequestError, match="no vLLM here"):
            warm(checkpoint, gpu="h200")
    with pytest.raises(RequestError, match="HUMMING_CACHE_DIR"):
        warm(source, gpu="h200", kernels=tmp_path / "kernels")


@pytest.mark.parametrize("options", [{"tp": 2}, {"ep": 4}, {"quantization": "humming"}])
def test_an_artifact_has_its_own_ranks(options: dict[str, Any], artifact: Path) -> None:
    with pytest.raises(RequestError, match="its own ranks and schema"):
        warm(artifact, gpu="h200", **options)


def test_the_command(artifact: Path, compiler: Any, tmp_path: Path) -> None:
    facts = tmp_path / "gpu.json"
    facts.write_text(json.dumps(vars(KNOWN["h100"])))
    folder = tmp_path / "kernels"
    command = ["warm", str(artifact), "--gpu", str(facts), "--kernels", str(folder), "--jobs", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert f"HQCONV_WARM_KERNELS={folder}" in done.stdout
    again = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(again.stdout)["num_compiled"] == 0
    done = CliRunner().invoke(app, ["warm", str(artifact), "--gpu", "h200"])
    assert "any other with HQCONV_WARM_KERNELS=1." in done.stdout


def test_how_vllm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compute_settings(False), compute_settings(True)) == (
        ComputeSettings(INDEXED, prequantized=PREQUANTIZED),
        ComputeSettings(CONTIGUOUS, prequantized=PREQUANTIZED),
    )
    monkeypatch.setenv("VLLM_HUMMING_MOE_GEMM_TYPE", "grouped")
    monkeypatch.setenv("VLLM_HUMMING_USE_F16_ACCUM", "1")
    assert compute_settings(False) == ComputeSettings(
        CONTIGUOUS, use_f16_accum=True, prequantized=PREQUANTIZED
    )
    monkeypatch.setenv("VLLM_HUMMING_MOE_GEMM_TYPE", "magic")
    with pytest.raises(RequestError, match="no such GEMM"):
        compute_settings(False)


def test_tokens_that_come_quantized_need_no_kernel() -> None:
    """vLLM quantizes fp8 in groups of 128 itself; everything else is quantized, and scattered, by Humming's kernel."""
    fp8 = {
        **CONFIG,
        "a_dtype": "float8e4m3",
        "as_dtype": "float32",
        "input_quant_mode": "dynamic_token",
    }
    static = {**fp8, "input_quant_mode": "static_tensor"}
    grouped = {**fp8, "input_quant_mode": "dynamic_group", "input_scale_group_size": 128}
    silu = kernel_activation(Activation("silu"), gated=True)
    with standing_in(KNOWN["h200"].facts()):
        for kind in (INDEXED, CONTIGUOUS, MASKED):
            settings = ComputeSettings(kind, prequantized=PREQUANTIZED)
            assert input_kernels(fp8, settings, None, 2)
            assert input_kernels(static, settings, None, 2)
            assert not input_kernels(grouped, settings, None, 2)
            each = [
                {k.name for k in input_kernels(config, settings, silu, 2)}
                for config in (fp8, grouped, static)
            ]
            assert all(each)
            assert not each[0] & each[1]
            assert not each[0] & each[2]


def test_rotated_inputs_have_kernels_of_their_own(compiler: Any) -> None:
    """Both GEMMs', whichever way inputs are dealt; without rotation w13's inputs need none where they are not dealt."""
    silu = kernel_activation(Activation("silu"), gated=True)
    with standing_in(KNOWN["h200"].facts()):
        for kind in (INDEXED, CONTIGUOUS, MASKED):
            settings = ComputeSettings(kind)
            for activation in (None, silu):
                plain = {k.code for k in input_kernels(CONFIG, settings, activation, 8)}
                rotated = {k.code for k in input_kernels(CONFIG, settings, activation, 8, 128)}
                assert rotated
                assert not plain & rotated
                assert bool(plain) == (kind == CONTIGUOUS or activation is not None)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_the_real_compiler_needs_no_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_COMPILER", kind)
    with standing_in(KNOWN["h200"].facts()):
        try:
            with toolkit():
                kernels = [*gemm_kernels(CONFIG, ComputeSettings(INDEXED))][:1]
                agreed = identity(90)
                cubins = {compile_kernel(kernel, kernel_compiler()) for kernel in kernels * 2}
        except RequestError as error:
            pytest.skip(f"no {kind} here: {error.found}")
    assert agreed["compiler"].startswith(f"{kind.upper()}Compiler {kind}+")
    assert len(cubins) == 1  # the same bytes again
    assert cubins.pop().startswith(b"\x7fELF")
