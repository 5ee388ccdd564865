"""Conversions with `--quantizer gptq` and with rows of experts: what they gain, their bytes, the proof, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.errors import HqconvError, InputError
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, check, manifest, run
from tests.make.damage import LAYER, Damaged
from tests.make.importance import columns_of, with_products, write_importance
from tests.make.qwen import write_qwen3_moe
from tests.make.structured_inputs import structured_inputs
from tests.make.tensors import assert_same

FILE = "importance.safetensors"
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
GPTQ: dict[str, Any] = {"quantizer": "gptq"}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("gptq") / "src", intermediate_size=256)


@pytest.fixture(scope="module")
def file(src: Path) -> Path:
    return write_importance(src.parent / "products.safetensors", with_products(columns_of(src)))


def rank_bytes(out: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}
    found.pop(FILE, None)
    return found


def product_errors(out: Path, src: Path, columns: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far products with other inputs of the same distribution are off, relative, by projection of one layer."""
    found = {}
    with safe_open(src / "model.safetensors", "pt") as source:
        for role, values in hqconv.dequantize(out, layer=LAYER).items():
            names = [f"{LAYER}.{e}.{WORDS[role]}.weight" for e in range(len(values))]
            weights = torch.stack([source.get_tensor(n) for n in names]).double()
            mean = columns[f"{LAYER}.{'w2' if role == 'w2' else 'w13'}"].double()
            x = structured_inputs(512, len(mean), 0, first=4096)
            x *= (mean / structured_inputs(400, len(mean), 0).square().mean(0)).sqrt()
            lost, exact = (torch.einsum("tk,enk->etn", x, one) for one in (weights - values.double(), weights))
            found[role] = float(lost.norm() / exact.norm())
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schema", ["mxfp4", "nvfp4", "int4-g64-zp"])
def test_products_are_closer_and_the_artifact_is_proven(schema: str, src: Path, file: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "mse", schema, quantizer="mse", importance=file)
    run(src, tmp_path / "gptq", schema, Grid(2, 2), importance=file, **GPTQ)
    before, after = (product_errors(tmp_path / name, src, columns_of(src)) for name in ("mse", "gptq"))
    assert all(after[role] < 0.85 * before[role] for role in before), (before, after)
    assert_verified(tmp_path / "gptq", src)
    words = manifest(tmp_path / "gptq")
    assert (words["quantizer"], words["quantizer_version"]) == ("gptq", 1)
    assert (tmp_path / "gptq" / FILE).read_bytes() == file.read_bytes()
    assert words["importance"] == {"sha256": words["files"][FILE]["sha256"], "file": FILE}


@pytest.mark.full
def test_nothing_but_the_request_decides_the_bytes(src: Path, file: Path, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "one": {"threads": 1, "max_memory": 64 << 20},
        "many": {"threads": 7},
        "cut": {"grid": Grid(2, 4)},
    }
    for name, options in ways.items():
        run(src, tmp_path / name, "int4-g32", importance=file, **GPTQ, **options)
    assert rank_bytes(tmp_path / "one") == rank_bytes(tmp_path / "many")
    whole, cut = (hqconv.dequantize(tmp_path / name, layer=LAYER) for name in ("one", "cut"))
    for role, values in whole.items():
        assert_same(cut[role], values, role)


def test_a_rotated_schema_is_compensated_and_proven(src: Path, file: Path, tmp_path: Path) -> None:
    toml = tmp_path / "rotated.toml"
    toml.write_text('b_dtype = "uint4"\nweight_scale_group_size = 128\nhadamard_block_size = 64\n')
    run(src, tmp_path / "out", str(toml), importance=file, **GPTQ)
    assert_verified(tmp_path / "out", src)


def test_what_the_artifact_says(src: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(src, out, "int4-g32", importance=file, **GPTQ)
    shown = CliRunner().invoke(app, ["inspect", str(out)])
    assert "gptq: errors compensated in other columns" in shown.stdout
    assert "| quantizer | gptq |" in (out / "README.md").read_text()
    CliRunner().invoke(app, ["report", str(out), "-o", str(tmp_path / "page.html")])
    assert "gptq: errors compensated in other columns" in (tmp_path / "page.html").read_text()
    planned = hqconv.plan(src, schema="int4-g32", target="sm90", importance=file, **GPTQ)
    assert planned.num_bytes_beside >= file.stat().st_size
    options = ["--target", "sm90", "--quantizer", "gptq", "--importance", str(file), "--dry-run"]
    named = CliRunner().invoke(app, ["convert", str(src), "--schema", "int4", *options])
    assert "src-int4-gptq" in named.output


def test_another_version_or_file_is_told(src: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(src, out, "int4-g32", importance=file, **GPTQ)
    copy = Damaged(out, src, "int4-g32")
    copy.edit_manifest(lambda words: words.update(quantizer_version=99))
    [finding] = [f for r in check(out, src, "weights").results for f in r.findings if "quantizer_version" in f.where]
    assert "another version" in finding.what
    copy.edit_manifest(lambda words: words.update(quantizer_version=1))
    write_importance(out / FILE, columns_of(src))
    copy.reseal()
    copy.edit_manifest(lambda words: words["importance"].update(sha256=words["files"][FILE]["sha256"]))
    found = [f.what for r in check(out, src, "files", "weights").results for f in r.findings]
    assert any("needs products of columns" in what for what in found)


def test_a_resumed_run_wants_the_same_quantizer(src: Path, file: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schema": "int4-g32", "target": "sm90", "device": "cpu", "importance": file}
    hqconv.convert(src, tmp_path / "out", quantizer="gptq", **options)
    with pytest.raises(HqconvError):
        hqconv.convert(src, tmp_path / "out", quantizer="mse", resume=True, **options)


def test_a_file_that_changes_during_the_conversion_is_told(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make an artifact that its own copy of the file does not explain."""
    file = write_importance(tmp_path / "columns.safetensors", columns_of(src, seed=3))
    right = hqconv.conversion.convert.write_sidecar_files

    def late(*arguments: Any) -> Any:
        write_importance(file, columns_of(src, seed=4))
        return right(*arguments)

    monkeypatch.setattr(hqconv.conversion.convert, "write_sidecar_files", late)
    with pytest.raises(InputError, match="importance file changed"):
        run(src, tmp_path / "out", "int4-g32", quantizer="mse", importance=file)
    assert not (tmp_path / "out" / "hqconv.json").exists()


def test_rows_of_experts_count_for_their_experts(src: Path, tmp_path: Path) -> None:
    """Each expert has the bytes that it has when all experts have its row, whatever the batches."""
    rows = {name: torch.stack([values.roll(8 * e) for e in range(4)]) for name, values in columns_of(src).items()}
    file = write_importance(tmp_path / "rows.safetensors", rows)
    run(src, tmp_path / "out", "int4-g32", quantizer="mse", importance=file)
    run(src, tmp_path / "one", "int4-g32", quantizer="mse", importance=file, threads=1, max_memory=32 << 20)
    assert rank_bytes(tmp_path / "out") == rank_bytes(tmp_path / "one")
    assert_verified(tmp_path / "out", src)
    ours = hqconv.dequantize(tmp_path / "out", layer=LAYER)
    for expert in (0, 3):
        same = write_importance(tmp_path / f"{expert}.safetensors", {name: one[expert] for name, one in rows.items()})
        run(src, tmp_path / f"all-{expert}", "int4-g32", quantizer="mse", importance=same)
        for role, values in hqconv.dequantize(tmp_path / f"all-{expert}", layer=LAYER).items():
            assert torch.equal(values[expert], ours[role][expert])
            assert not torch.equal(values, ours[role])
