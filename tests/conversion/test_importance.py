"""Conversions with `--importance`: what they gain, their bytes, what they say, and the proof."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.errors import OutputError
from hqconv.schemas.grid import Grid
from hqconv.schemas.recipe import load_recipe
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import assert_verified, check, manifest, run
from tests.make.damage import LAYER, Damaged
from tests.make.effort import num_examples
from tests.make.formats import write
from tests.make.importance import columns_of, write_importance
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import assert_same

FILE = "importance.safetensors"
GEMM_OF = {"w1": "w13", "w3": "w13", "w2": "w2"}
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("importance") / "src", intermediate_size=256)


@pytest.fixture(scope="module")
def file(src: Path) -> Path:
    return write_importance(src.parent / "columns.safetensors", columns_of(src))


def rank_bytes(out: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}
    found.pop(FILE, None)
    return found


def group_errors(
    out: Path, src: Path, schema: str, importance: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Of each projection of the first layer, what is lost under every scale, in an order of this test's own."""
    rows, columns = resolve_schema(schema).scale_group()
    found = {}
    with safe_open(src / "model.safetensors", "pt") as source:
        for role, values in hqconv.dequantize(out, layer=LAYER).items():
            names = [f"{LAYER}.{e}.{WORDS[role]}.weight" for e in range(len(values))]
            lost = (torch.stack([source.get_tensor(n) for n in names]).double() - values.double()).square()
            if importance is not None:
                lost = lost * importance[f"{LAYER}.{GEMM_OF[role]}"].double()
            e, n, k = lost.shape
            r, c = rows or n, columns or k
            found[role] = lost.view(e, n // r, r, k // c, c).sum((2, 4))
    return found


@st.composite
def columns(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Of a model of one block of 128 x 128: zeros, whole groups of them, numbers of very different sizes."""
    numbers = st.sampled_from([0.0, 1e-38, 1e-6, 0.5, 1.0, 3.0, 1e4, 3e38]) | st.floats(0, 100, width=32)
    found = {}
    for gemm in ("w13", "w2"):
        pool = draw(st.lists(numbers, min_size=1, max_size=6))
        order = torch.Generator().manual_seed(draw(st.integers(0, 999)))
        values = torch.tensor(pool)[torch.randint(len(pool), (128,), generator=order)]
        for group in draw(st.sets(st.integers(0, 3), max_size=3)):
            values[32 * group : 32 * group + 32] = 0
        found[f"{LAYER}.{gemm}"] = values
    return found


SCHEMAS = ("mxfp4", "nvfp4", "int4-g32", "int4-g32-zp", "int4-c", "fp8", "fp8-block", "int3-g64")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("never-worse")
    src = write_qwen3_moe(folder / "src", num_layers=1, num_experts=2)
    for schema in SCHEMAS:
        run(src, folder / f"rtn-{schema}", schema)
    return folder


@pytest.mark.full
@settings(
    max_examples=num_examples(24),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(columns(), st.sampled_from(SCHEMAS))
def test_no_scale_loses_more_of_what_counts_than_round_to_nearest(
    small: Path, chosen: dict[str, torch.Tensor], schema: str
) -> None:
    """And what counts nothing is as round-to-nearest has it."""
    src, plain, out = small / "src", small / f"rtn-{schema}", small / "out"
    file = write_importance(small / "columns.safetensors", chosen)
    shutil.rmtree(out, ignore_errors=True)
    run(src, out, schema, quantizer="mse", importance=file)
    before, after = (group_errors(one, src, schema, chosen) for one in (plain, out))
    unweighted = [group_errors(one, src, schema, None) for one in (plain, out)]
    for role, errors in before.items():
        assert (after[role] <= errors).all(), role
        of_nothing = errors == 0
        assert torch.equal(unweighted[0][role][of_nothing], unweighted[1][role][of_nothing])


@pytest.mark.parametrize("schema", ["mxfp4", "int4", "nvfp4", "int4-g64-zp"])
def test_less_of_what_counts_is_lost_and_the_artifact_is_proven(
    schema: str, src: Path, file: Path, tmp_path: Path
) -> None:
    run(src, tmp_path / "mse", schema, quantizer="mse")
    run(src, tmp_path / "by", schema, Grid(2, 2), quantizer="mse", importance=file)
    even, best = (group_errors(tmp_path / n, src, schema, load_file(file)) for n in ("mse", "by"))
    assert all(best[role].sum() < 0.97 * even[role].sum() for role in even)
    assert_verified(tmp_path / "by", src)
    words, listed = manifest(tmp_path / "by"), manifest(tmp_path / "by")["files"]
    assert words["importance"] == {"sha256": listed[FILE]["sha256"], "file": FILE}
    assert (tmp_path / "by" / FILE).read_bytes() == file.read_bytes()
    assert "importance" not in manifest(tmp_path / "mse")
    assert not (tmp_path / "mse" / FILE).exists()


@pytest.mark.parametrize("schema", ["mxfp4", "int4-g32", "fp8-tensor"])
def test_equal_importance_is_none(schema: str, src: Path, tmp_path: Path) -> None:
    ones = {name: torch.ones_like(values) for name, values in columns_of(src).items()}
    run(src, tmp_path / "mse", schema, quantizer="mse")
    file = write_importance(tmp_path / "ones.safetensors", ones)
    run(src, tmp_path / "by", schema, quantizer="mse", importance=file)
    assert rank_bytes(tmp_path / "mse") == rank_bytes(tmp_path / "by")


def test_nothing_but_the_request_decides_the_bytes(src: Path, file: Path, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "one": {"threads": 1, "max_memory": 32 << 20},
        "many": {"threads": 7},
        "cut": {"grid": Grid(2, 4)},
        "packed": {"layout": "checkpoint"},
    }
    for name, options in ways.items():
        run(src, tmp_path / name, "int4-g32", quantizer="mse", importance=file, **options)
    assert rank_bytes(tmp_path / "one") == rank_bytes(tmp_path / "many")
    whole, cut = (hqconv.dequantize(tmp_path / name, layer=LAYER) for name in ("one", "cut"))
    for role, values in whole.items():
        assert_same(cut[role], values, role)
    assert_verified(tmp_path / "packed", src)


def test_a_shard_beside_the_copy_has_an_index(tmp_path: Path) -> None:
    """Loaders that find no index take every safetensors file of a folder for weights."""
    src = write_qwen3_moe(tmp_path / "src", num_layers=1)
    experts = {n: v for n, v in load_file(src / "model.safetensors").items() if ".experts." in n}
    save_file(experts, src / "model.safetensors", {"format": "pt"})
    file = write_importance(tmp_path / "columns.safetensors", columns_of(src))
    for name, options in {"plain": {}, "by": {"importance": file}}.items():
        run(src, tmp_path / name, "mxfp4", layout="checkpoint", quantizer="mse", **options)
        assert (tmp_path / name / "model.safetensors.index.json").exists() is (name == "by")
        assert_verified(tmp_path / name, src)


def findings(out: Path, src: Path | None, *checks: str) -> list[tuple[str, str]]:
    report = check(out, src, *checks)
    return [(finding.where, finding.what) for result in report.results for finding in result.findings]


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_a_changed_copy_is_found(layout: str, src: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(src, out, "int4-g32", quantizer="mse", importance=file, layout=layout)
    values = load_file(out / FILE)
    swapped = {name: one.flip(0).contiguous() for name, one in values.items()}
    size = (out / FILE).stat().st_size
    data = bytearray((out / FILE).read_bytes())
    data[-1] ^= 0x01  # a number's exponent
    (out / FILE).write_bytes(data)
    assert findings(out, None, "files") == [(FILE, "A file's bytes are not those the manifest records.")]
    write_importance(out / FILE, swapped)
    assert (out / FILE).stat().st_size == size
    assert findings(out, None, "weights") == []
    assert any(LAYER in where for where, _ in findings(out, src, "weights"))
    Damaged(out, src, "int4-g32").reseal()
    assert [where for where, _ in findings(out, None, "files")] == ["hqconv.json: importance"]


def test_a_copy_that_is_none_is_found(src: Path, file: Path, tmp_path: Path) -> None:
    out, values = tmp_path / "out", load_file(file)
    run(src, out, "mxfp4", quantizer="mse", importance=file)
    copy = Damaged(out, src, "mxfp4")
    for damaged, what in (
        ({**values, f"{LAYER}.w2": -values[f"{LAYER}.w2"]}, "no number from 0 on"),
        ({n: v for n, v in values.items() if n != f"{LAYER}.w13"}, "nothing on a layer"),
        ({**values, "other.w13": values[f"{LAYER}.w13"]}, "a tensor of no layer"),
    ):
        write_importance(out / FILE, damaged)
        copy.reseal()
        copy.edit_manifest(lambda words: words["importance"].update(sha256=words["files"][FILE]["sha256"]))
        found = findings(out, src, "files")
        assert len(found) == 1
        assert what in found[0][1]
        assert any(what in text for _, text in findings(out, src, "weights"))
    (out / FILE).unlink()
    assert findings(out, None, "files")
    assert any("cannot be read" in text for _, text in findings(out, src, "weights"))


def test_a_manifest_that_does_not_say_it_and_strays_are_found(src: Path, file: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "plain", "mxfp4", quantizer="mse")
    shutil.copy(file, tmp_path / "plain" / FILE)
    assert findings(tmp_path / "plain", src, "files") == [(FILE, "A file is not in the manifest.")]
    run(src, tmp_path / "by", "int4-g32", quantizer="mse", importance=file)
    copy = Damaged(tmp_path / "by", src, "int4-g32")
    kept = copy.root.joinpath("hqconv.json").read_bytes()
    copy.edit_manifest(lambda words: words.pop("importance"))
    assert any(FILE in where + what for where, what in findings(copy.root, None, "files"))
    assert findings(copy.root, src, "weights")
    copy.root.joinpath("hqconv.json").write_bytes(kept)
    copy.edit_manifest(lambda words: words.pop("quantizer"))
    assert any("importance" in where for where, _ in findings(copy.root, None, "files"))


def test_resuming_asks_for_the_same_file(src: Path, file: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"quantizer": "mse", "importance": file}
    other = write_importance(tmp_path / "other.safetensors", columns_of(src, seed=1))
    moved = tmp_path / "moved.safetensors"
    shutil.copy(file, moved)
    run(src, out, "mxfp4", **options)
    assert run(src, out, "mxfp4", resume=True, quantizer="mse", importance=moved).was_finished
    for words in ({"quantizer": "mse"}, {"quantizer": "mse", "importance": other}):
        with pytest.raises(OutputError, match="differs from this request in: importance"):
            run(src, out, "mxfp4", resume=True, **words)
    plans = [
        hqconv.plan(src, schema="mxfp4", target="sm90", quantizer="mse", importance=one)
        for one in (file, moved, other, None)
    ]
    prints = [one.fingerprint()["--importance"] for one in plans]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    run(src, out, "mxfp4", overwrite=True)
    assert not (out / FILE).exists()
    assert_verified(out, src)


def test_an_artifact_as_a_source_leaves_the_copy_behind(src: Path, file: Path, tmp_path: Path) -> None:
    for layout in ("kernel", "checkpoint"):
        first, second = tmp_path / layout, tmp_path / f"from-{layout}"
        run(src, first, "int4-g32", quantizer="mse", importance=file, layout=layout)
        run(first, second, "mxfp4")
        assert not (second / FILE).exists()
        assert_verified(second, first)


def test_it_is_said(src: Path, file: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'schema = "mxfp4"\ntarget = "sm90"\nquantizer = "mse"\nimportance = "{file}"\n')
    out = tmp_path / "out"
    report = run(src, out, "mxfp4", quantizer="mse", importance=file)
    words = {"sha256": manifest(out)["files"][FILE]["sha256"], "file": FILE}
    assert report.to_dict()["importance"] == words
    assert hqconv.inspect(out)["importance"] == words
    by_flags = ["--schema", "mxfp4", "--target", "sm90", "--quantizer", "mse", "--importance", str(file)]
    for command in (
        ["inspect", str(out)],
        ["convert", str(src), *by_flags, "--dry-run"],
        ["convert", str(src), "--config", str(recipe), "--dry-run"],
        ["convert", str(src), *by_flags, "-o", str(tmp_path / "cli")],
    ):
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == 0, shown.output
        assert f"weighted by importance (sha256 {words['sha256'][:12]}" in " ".join(shown.output.split())
    assert rank_bytes(tmp_path / "cli") == rank_bytes(out)
    Damaged(out, src, "mxfp4").edit_manifest(lambda words: words.update(importance="yes"))
    assert "the artifact's manifest is damaged" in CliRunner().invoke(app, ["inspect", str(out)]).output.lower()


@pytest.mark.full
def test_requantized_sources_are_weighted_too(src: Path, file: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "first", "fp8")
    for name, options in {"mse": {}, "by": {"importance": file}}.items():
        run(tmp_path / "first", tmp_path / name, "int4-g32", quantizer="mse", **options)
    assert rank_bytes(tmp_path / "mse") != rank_bytes(tmp_path / "by")
    assert_verified(tmp_path / "by", tmp_path / "first")
    for a, b in itertools.pairwise(group_errors(tmp_path / n, src, "int4-g32", load_file(file)) for n in ("mse", "by")):
        assert all(b[role].sum() < a[role].sum() for role in a)


def test_where_all_codes_are_kept_it_has_no_effect_and_that_is_said(src: Path, file: Path, tmp_path: Path) -> None:
    """And nowhere else: one layer with something to search for is enough."""

    def warned(source: Path, schema: str, **options: Any) -> list[str]:
        plan = hqconv.plan(source, schema=schema, target="sm90", **options)
        return [warning for warning in plan.warnings if "no effect" in warning]

    by = {"quantizer": "mse", "importance": file}
    run(src, tmp_path / "kept", "int4-g32")
    (both,) = warned(tmp_path / "kept", "int4-g32", **by)
    assert both.startswith("--quantizer mse and --importance have no effect: the codes")
    (alone,) = warned(tmp_path / "kept", "source", quantizer="mse")
    assert alone.startswith("--quantizer mse has no effect: the codes")
    assert not warned(tmp_path / "kept", "int4-g32")
    assert not warned(tmp_path / "kept", "int4-g64", **by)
    assert not warned(src, "int4-g32", **by)
    (tmp_path / "r.toml").write_text('[[override]]\nlayers = "-1"\nschema = "mxfp4"\n')
    overrides = load_recipe(tmp_path / "r.toml").overrides
    assert not warned(tmp_path / "kept", "int4-g32", overrides=overrides, **by)
    reports = {
        name: run(tmp_path / "kept", tmp_path / name, "int4-g32", **options)
        for name, options in {"plain": {}, "by": by}.items()
    }
    assert both in reports["by"].warnings
    assert rank_bytes(tmp_path / "by") == rank_bytes(tmp_path / "plain")


def test_where_only_the_data_tell_nothing_is_said_of_no_effect(tmp_path: Path) -> None:
    """Gate and up of nvfp4 share a scale: experts whose own differ are quantized anew, and searched for."""
    source = write(tmp_path / "src", "modelopt-nvfp4-apart").folder
    for schema, quantizer in (("nvfp4", "mse"), ("nvfp4", "rtn")):
        report = run(source, tmp_path / quantizer, schema, quantizer=quantizer)
        assert not [warning for warning in report.warnings if "no effect" in warning]
    assert rank_bytes(tmp_path / "mse") != rank_bytes(tmp_path / "rtn")
