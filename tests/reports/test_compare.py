"""Two artifacts side by side: their figures, what is refused, what is said."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.cli.render import show_comparison
from tests.make.conversions import manifest, run, write_manifest
from tests.make.qwen import read_tree, write_qwen3_moe
from tests.make.startup import cold

ROLES = ("w1", "w3", "w2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, and of it `a` (mxfp4, two ranks), `b` (int8), `c` (int4, checkpoint layout); do not change them."""
    root = tmp_path_factory.mktemp("compare")
    write_qwen3_moe(root / "model", intermediate_size=256)
    hqconv.convert(root / "model", root / "a", schema="mxfp4", target="sm90", tp=2, device="cpu")
    run(root / "model", root / "b", "int8")
    run(root / "model", root / "c", "int4", layout="checkpoint")
    return root


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def compared(*arguments: object) -> Any:
    done = call("compare", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def errors_of(out: Path) -> dict[tuple[str, str], float]:
    return {
        (name, role): error["relative_error"]
        for name, layer in manifest(out)["blocks"].items()
        for role, error in layer["quantization_error"].items()
    }


def mean(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def test_figures_are_those_of_the_manifests(folder: Path) -> None:
    words = compared(folder / "a", folder / "b")
    first, second = (errors_of(folder / name) for name in "ab")
    for one, errors, name in zip(words["artifacts"], (first, second), "ab", strict=True):
        assert one["relative_error"] == pytest.approx(mean(list(errors.values())))
        assert one["worst"][0]["relative_error"] == max(errors.values())
        files = manifest(folder / name)["files"]
        assert one["num_bytes"] == sum(file["size_bytes"] for file in files.values())
        assert one["expert_bytes"] == sum(f["size_bytes"] for n, f in files.items() if n.startswith("experts/"))
    for role in ROLES:
        expected = [mean([v for (_, r), v in errors.items() if r == role]) for errors in (first, second)]
        assert words["projections"][role] == pytest.approx(expected)
    found = {(one["block"], one["projection"]): one for one in words["blocks"]}
    assert found.keys() == first.keys()
    assert all(one["relative_errors"] == [first[key], second[key]] for key, one in found.items())
    differences = [abs(one["difference"]) for one in words["blocks"]]
    assert differences == sorted(differences, reverse=True)
    assert [one["schema"] for one in words["artifacts"]] == ["mxfp4", "int8"]
    assert [one["bits_per_weight"] for one in words["artifacts"]] == [4.25, 8.0]
    assert words["notes"] == []
    assert not words["measured_against_source"]


def test_larger_layers_count_more(folder: Path, tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.experts"
    for name in "ab":
        shutil.copytree(folder / name, tmp_path / name)
        words = manifest(tmp_path / name)
        words["blocks"][layer]["num_experts"] *= 3
        write_manifest(tmp_path / name, words)
    found = compared(tmp_path / "a", tmp_path / "b")
    errors = errors_of(folder / "a")
    values = [value for (of, _), value in errors.items() for _ in range(3 if of == layer else 1)]
    assert found["artifacts"][0]["relative_error"] == pytest.approx(mean(values), rel=1e-12)
    assert mean(values) != pytest.approx(mean(list(errors.values())), rel=1e-6)


def test_bytes_of_experts_in_the_checkpoint_layout(folder: Path) -> None:
    tensors = [item for path in (folder / "c").glob("*.safetensors") for item in load_file(path).items()]
    expected = sum(tensor.numel() * tensor.element_size() for name, tensor in tensors if ".experts." in name)
    one = compared(folder / "a", folder / "c")["artifacts"][1]
    assert one["expert_bytes"] == expected
    assert one["vllm_obstacles"] == []


def test_with_the_source_errors_are_measured(folder: Path) -> None:
    words = compared(folder / "a", folder / "b", "--source", folder / "model", "--device", "cpu")
    recorded = compared(folder / "a", folder / "b")
    assert words["measured_against_source"]
    for one, other in zip(words["artifacts"], recorded["artifacts"], strict=True):
        assert one["relative_error"] == pytest.approx(other["relative_error"], rel=1e-9)
    measured = hqconv.verify(folder / "b", folder / "model", checks=["weights"], device="cpu").results[0].measured
    for role in ROLES:
        for key, name in (("sqnr_db", "least_sqnr_db"), ("cosine", "least_cosine")):
            assert words["figures"][1][role][name] == min(roles[role][key] for roles in measured.values())
    done = call("compare", folder / "a", folder / "b", "--source", folder / "model", "--device", "cpu")
    assert "least SQNR (dB)" in done.stdout
    assert "measured against the source" in done.stdout


def test_the_table(folder: Path) -> None:
    before = read_tree(folder)
    done = call("compare", folder / "a", folder / "c")
    assert done.exit_code == 0
    for text in ("mxfp4", "4.25", "sm90", "every GPU", "tp 2, ep 1", "largest differences", "gate (w1)"):
        assert text in done.stdout
    assert call("compare", folder / "a", folder / "c", "-q").stdout == ""
    assert read_tree(folder) == before


def test_the_table_fits_80_columns(folder: Path) -> None:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    show_comparison(Console(file=out, width=80), compared(folder / "a", folder / "b"))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "…" not in out.getvalue()


def test_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path / "wide", intermediate_size=128)
    write_qwen3_moe(tmp_path / "deep", num_layers=3, intermediate_size=256)
    for name, text in (("wide", "intermediate_size 128"), ("deep", "model.layers.2.mlp.experts")):
        run(tmp_path / name, tmp_path / f"{name}-out", "mxfp4")
        done = call("compare", folder / "a", tmp_path / f"{name}-out")
        assert done.exit_code == 2
        assert "of different models" in done.stderr
        assert text in done.stderr
    assert call("compare", folder / "a", folder / "model").exit_code == 2
    assert call("compare", folder / "a", folder / "b", "--revision", "main").exit_code == 2


def test_other_sources_and_layers_that_were_left_are_said(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "b", tmp_path / "b")
    words = manifest(tmp_path / "b")
    words["source"] |= {"name": "org/other", "revision": "abc"}
    write_manifest(tmp_path / "b", words)
    notes = compared(folder / "a", tmp_path / "b")["notes"]
    assert notes == ["The sources differ in name: model, org/other.", "The sources differ in revision: None, abc."]
    (tmp_path / "recipe.toml").write_text(
        'schema = "mxfp4"\ntarget = "sm90"\n[[override]]\nlayers = "1"\nschema = "none"\n'
    )
    done = call("convert", folder / "model", "-o", tmp_path / "left", "--config", tmp_path / "recipe.toml", "-q")
    assert done.exit_code == 0, done.stderr
    found = compared(tmp_path / "left", folder / "b")
    assert found["notes"] == ["Left as they are in one of them, and not compared: model.layers.1.mlp.experts."]
    assert {one["block"] for one in found["blocks"]} == {"model.layers.0.mlp.experts"}


def test_a_damaged_artifact_is_not_compared_with_its_source(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "b", tmp_path / "b")
    path = next((tmp_path / "b/experts").rglob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-20_000] ^= 1
    path.write_bytes(raw)
    done = call("compare", folder / "a", tmp_path / "b", "--source", folder / "model", "--device", "cpu")
    assert done.exit_code == 1
    assert str(tmp_path / "b") in done.stderr


def test_obstacles_of_servers_are_told(folder: Path, tmp_path: Path) -> None:
    hqconv.convert(folder / "model", tmp_path / "ranks", schema="int8", target="sm90", tp=2, ep=2, device="cpu")
    run(folder / "model", tmp_path / "zp", "int4-g64-zp", layout="checkpoint")
    first, second = compared(tmp_path / "ranks", tmp_path / "zp")["artifacts"]
    assert "use --tp 1" in first["vllm_obstacles"][0]
    assert "zero points" in second["vllm_obstacles"][0]
    assert first["serve_command"] is None


def test_it_loads_nothing_heavy(folder: Path) -> None:
    assert cold("compare", folder / "a", folder / "c")[0] == set()
