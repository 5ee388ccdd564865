"""Importance files: what is asked of them, before any work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.planning import importance as importance_module
from hqconv.planning.importance import read_importance
from hqconv.schemas.recipe import load_recipe
from tests.make.importance import columns_of, with_products, write_importance
from tests.make.qwen import write_qwen3_moe

FIRST = "model.layers.0.mlp.experts"
Columns = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("importance") / "src", intermediate_size=256)


def plan(src: Path, file: Path | str, **options: Any) -> hqconv.plan:
    words = {"schema": "int4-g32", "target": "sm90", "quantizer": "mse", "importance": file, **options}
    return hqconv.plan(src, **words)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Columns], None]:
    def apply(columns: Columns) -> None:
        value = change(columns.pop(name))
        if value is not None:
            columns[name] = value

    return apply


def at(column: int | tuple[int, ...], number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(values: torch.Tensor) -> torch.Tensor:
        values[column] = number
        return values

    return apply


@pytest.mark.parametrize(
    ("name", "change", "what", "found"),
    [
        ("w2", lambda _: None, "nothing on a layer", "no such tensor"),
        ("w13", lambda v: v[:-1].clone(), "another dtype or shape", "F32 [127]"),
        ("w13", lambda v: v.view(1, -1), "another dtype or shape", "F32 [1, 128]"),
        ("w2", lambda v: v.double(), "another dtype or shape", "F64 [256]"),
        ("w2", at(7, float("nan")), "no number from 0 on", "nan in column 7"),
        ("w13", at(0, float("inf")), "no number from 0 on", "inf in column 0"),
        ("w2", at(255, -1e-30), "no number from 0 on", "in column 255"),
        ("w13", lambda v: v.expand(3, -1).clone(), "another dtype or shape", "F32 [3, 128]"),
        ("w2", lambda v: at((2, 7), -1.0)(v.expand(4, -1).clone()), "no number from 0 on", "-1.0 in column 7"),
        ("w13.hessian", lambda v: v[:, :64].clone(), "another dtype or shape", "F32 [1, 64, 128]"),
        ("w2.hessian", at((1, 3, 4), float("nan")), "is no number", "nan at 16772"),
        ("w2.hessian", at((1, 3, 3), -1.0), "no number from 0 on", "-1.0 in column 3"),
        ("w13.hessian", lambda _: None, "needs products of columns", "no such tensor"),
    ],
)
def test_what_is_wrong_is_named_before_any_work(
    name: str, change: Any, what: str, found: str, src: Path, tmp_path: Path
) -> None:
    columns = columns_of(src) if "hessian" not in name else with_products(columns_of(src))
    quantizer = "mse" if "hessian" not in name else "gptq"
    changed(f"{FIRST}.{name}", change)(columns)
    file = write_importance(tmp_path / "file.safetensors", columns)
    with pytest.raises(InputError, match=what) as caught:
        plan(src, file, quantizer=quantizer)
    assert f"{FIRST}.{name}" in caught.value.where
    assert str(file) in caught.value.where
    assert found in str(caught.value.found)
    with pytest.raises(InputError, match=what):
        hqconv.convert(src, tmp_path / "out", schema="int4-g32", target="sm90", quantizer=quantizer, importance=file)
    assert not (tmp_path / "out").exists()


def test_zero_is_a_number_and_a_left_layer_may_have_some(src: Path, tmp_path: Path) -> None:
    columns = columns_of(src)
    columns[f"{FIRST}.w13"].zero_()
    columns[f"{FIRST}.w2"][3] = -0.0
    file = write_importance(tmp_path / "file.safetensors", columns)
    found = plan(src, file)
    assert found.spec.encoding.importance is not None
    assert found.spec.encoding.importance.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    for layer in found.layers:
        assert layer.encoding.importance is not None
        for gemm in ("w13", "w2"):
            values = columns[f"{layer.name}.{gemm}"]
            assert layer.encoding.importance.columns(gemm) == (values.numpy().tobytes(), tuple(values.shape))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('importance = "file.safetensors"\n[[override]]\nlayers = "0"\nschema = "none"\n')
    loaded = load_recipe(recipe)
    assert loaded.options["importance"] == str(file)
    assert len(plan(src, loaded.options["importance"], overrides=loaded.overrides).layers) == 1


def test_a_tensor_of_no_layer_is_refused(src: Path, tmp_path: Path) -> None:
    columns = columns_of(src) | {"model.layers.7.mlp.experts.w2": torch.ones(256)}
    with pytest.raises(InputError, match="of no layer") as caught:
        plan(src, write_importance(tmp_path / "file.safetensors", columns))
    assert "model.layers.7" in caught.value.where


def test_without_a_search_it_is_refused(src: Path, tmp_path: Path) -> None:
    file = write_importance(tmp_path / "file.safetensors", columns_of(src))
    with pytest.raises(RequestError, match="has no effect"):
        plan(src, file, quantizer="rtn")
    command = ["convert", src, "--schema", "mxfp4", "--target", "sm90", "--importance", file, "--dry-run"]
    shown = CliRunner().invoke(app, list(map(str, command)))
    assert shown.exit_code == 2
    assert "has no effect" in shown.output


def test_rows_of_experts_and_products_are_read_when_they_are_needed(src: Path, tmp_path: Path) -> None:
    """And must be the bytes that were there at first."""
    columns = with_products(columns_of(src))
    columns[f"{FIRST}.w13"] = torch.rand(4, 128)
    file = write_importance(tmp_path / "file.safetensors", columns)
    layer = plan(src, file).layers[0]
    importance = layer.encoding.importance
    assert importance is not None
    assert importance.columns("w13") == (columns[f"{FIRST}.w13"].numpy().tobytes(), (4, 128))
    assert importance.hessian("w2") == columns[f"{FIRST}.w2.hessian"].numpy().tobytes()
    assert importance.num_columns("w2") == 256
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the tensor that is last in the file
    file.write_bytes(data)
    read = read_importance(file)
    last = max(read.tensors.values(), key=lambda ref: ref.offset_bytes).name
    whole = plan(src, file).spec.encoding.importance
    assert whole is not None
    assert whole.sha256 == read.sha256 != importance.importance.sha256
    with pytest.raises(InputError, match="file changed"):
        importance.importance.read(last)


def test_compensation_asks_for_the_inputs(src: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs to know the experts' inputs") as caught:
        plan(src, None, quantizer="gptq")
    assert "--hessian" in caught.value.remedy
    file = write_importance(tmp_path / "file.safetensors", columns_of(src))
    with pytest.raises(InputError, match="needs products of columns") as missing:
        plan(src, file, quantizer="gptq")
    assert "--hessian" in missing.value.remedy
    toml = tmp_path / "wide.toml"
    toml.write_text('b_dtype = "uint4"\nweight_scale_group_size = 256\nhadamard_block_size = 256\n')
    products = write_importance(tmp_path / "products.safetensors", with_products(columns_of(src)))
    with pytest.raises(RequestError, match="128 neighbouring columns") as wide:
        plan(src, products, quantizer="gptq", schema=toml)
    assert "hadamard_block_size" in wide.value.where


def test_files_that_are_none(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_importance(tmp_path / "good.safetensors", columns_of(src))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-4])
    for path, kind in ((tmp_path / "none", RequestError), (tmp_path, RequestError), (cut, InputError)):
        with pytest.raises(kind) as caught:
            plan(src, path)
        assert isinstance(caught.value, HqconvError)
        assert str(path) in caught.value.where
    monkeypatch.setattr(importance_module, "_MAX_BYTES", 100)
    with pytest.raises(InputError, match="too large"):
        read_importance(good)
