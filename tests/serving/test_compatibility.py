"""Refusals say what was expected and what was found, and their commands make an artifact that is not refused."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hqconv.cli.app import app
from hqconv.errors import HqconvError, RequestError
from hqconv.kernel_layout.transform import layout_fingerprint
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import INPUT_PRESETS, InputSchema, KernelSpec
from hqconv.schemas.weight_schema import resolve_schema
from hqconv.serving import server_compatibility
from hqconv.serving.artifact_view import (
    ArtifactLayer,
    ArtifactLocation,
    ArtifactView,
    open_artifact_view,
)
from hqconv.serving.server_compatibility import (
    ServerLayer,
    check_dtype,
    check_flags,
    check_layer,
    check_machine,
    check_rank_file,
    check_ranks,
    recut,
)
from hqconv.serving.vllm import translation
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
ASKED = ServerLayer(
    num_experts=4,
    hidden_size=128,
    has_bias=False,
    gated=True,
    dtype="bfloat16",
    tp=1,
    ep=1,
    placement="linear",
    redundant=0,
    router_weight_on_input=False,
)


def check_deployment(view: ArtifactView, layer: ServerLayer) -> None:
    check_ranks(view, layer)
    translation.check_redundant_experts(view, layer)


GRIDS = {
    "tp1": Grid(),
    "ep2": Grid(ep=2),
    "dealt": Grid(ep=2, placement="round_robin"),
    "copies": Grid(tp=2, ep=2, placement="round_robin", redundant=2),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original and artifacts of it, one to a grid."""
    folder = tmp_path_factory.mktemp("refusals")
    source = write_qwen3_moe(folder / "original", num_layers=1, intermediate_size=256)
    for name, grid in GRIDS.items():
        run(source, folder / name, "mxfp4", grid)
    return folder


def opened(out: Path | str) -> ArtifactView:
    return open_artifact_view(ArtifactLocation(str(out)))


@pytest.fixture
def view(work: Path) -> ArtifactView:
    return opened(work / "tp1")


def refused(check: Any, *arguments: Any) -> RequestError:
    """The refusal, which is whole."""
    with pytest.raises(RequestError) as caught:
        check(*arguments)
    error = caught.value
    assert error.where
    assert error.expected
    assert error.found
    assert error.expected != error.found
    assert error.remedy
    return error


def command_in(error: HqconvError) -> list[str]:
    (command,) = re.findall("`(.*)`", error.remedy)
    return shlex.split(command)


def follow(command: list[str]) -> ArtifactView:
    """Do what a remedy says, and open what comes of it."""
    assert command[:2] == ["hqconv", "convert"]
    more = ["--device", "cpu", "--threads", "1", "-q"]
    done = CliRunner().invoke(app, [*command[1:], *more])
    assert done.exit_code == 0, done.output
    return opened(command[command.index("-o") + 1])


@pytest.mark.parametrize(
    ("name", "facts", "expected", "found"),
    [
        ("tp1", {"tp": 2}, "tp 1, ep 1", "tp 2, ep 1"),
        ("tp1", {"ep": 2, "placement": "round_robin"}, "tp 1, ep 1", "tp 1, ep 2"),
        ("ep2", {"tp": 2, "ep": 2, "placement": "round_robin"}, "tp 1, ep 2", "tp 2, ep 2"),
        ("ep2", {"ep": 2, "placement": "round_robin"}, "linear", "round_robin"),
        ("dealt", {"ep": 2}, "round_robin", "linear"),
        ("copies", {"tp": 2, "ep": 2, "placement": "round_robin"}, "2", "0"),
        ("ep2", {"ep": 2, "redundant": 2}, "0", "2"),
    ],
)
def test_another_cut_is_one_command_away(
    work: Path, tmp_path: Path, name: str, facts: dict[str, Any], expected: str, found: str
) -> None:
    """One, whatever else would have been refused next; it changes nothing but what it must."""
    out, asked = shutil.copytree(work / name, tmp_path / name), replace(ASKED, **facts)
    error = refused(check_deployment, opened(out), asked)
    assert (error.where, error.expected) == (str(out), expected)
    assert error.found.startswith(found)
    new = follow(command_in(error))
    check_deployment(new, asked)
    check_machine(new, 90)
    check_dtype(new, "bfloat16")
    check_layer(new, new.layers[LAYER], asked)
    assert new.layer_spec.schema == opened(out).layer_spec.schema
    assert new.location.name == f"{out}-sm90-tp{asked.tp}-ep{asked.ep}"


def test_ranks_that_come_and_go_are_refused(work: Path) -> None:
    error = refused(
        translation.check_redundant_experts,
        opened(work / "ep2"),
        replace(ASKED, ep=2, is_elastic=True),
    )
    assert "--enable-elastic-ep" in error.remedy


def test_the_command_names_the_folder_one_stands_in(
    work: Path, view: ArtifactView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve .`: what is written lies beside the artifact, not in it."""
    monkeypatch.chdir(work / "tp1")
    here = replace(view, location=ArtifactLocation("."))
    command = command_in(refused(check_deployment, here, replace(ASKED, tp=2)))
    assert command[4] == f"{work}/tp1-sm90-tp2-ep1"


def test_a_repo_is_cut_again_by_its_name(view: ArtifactView) -> None:
    there = replace(view, location=ArtifactLocation("org/name", "a branch"))
    assert recut(there, grid=Grid(tp=2)) == (
        "`hqconv convert org/name --revision 'a branch' -o name-sm90-tp2-ep1 --schema source --target sm90 --tp 2`"
    )


def test_rotated_weights_are_cut_again_from_the_original(view: ArtifactView) -> None:
    """No `--schema source` keeps their codes."""
    rotated = of_kind(
        view, schema=replace(view.layer_spec.schema, name="mine", hadamard_block_size=64)
    )
    command = recut(
        replace(rotated, location=ArtifactLocation("org/name"), source_name="org/model"),
        grid=Grid(tp=2),
    )
    assert command == (
        "`hqconv convert org/model -o name-sm90-tp2-ep1-bfloat16 --schema mine.toml --dtype bfloat16 --target sm90 "
        "--tp 2`"
    )


def test_another_dtype_is_one_command_away_from_the_original(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all options of this artifact; run where the original is."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(work / "original", "original")
    view = opened(work / "dealt")
    error = refused(check_dtype, view, "float16")
    assert (error.expected, error.found) == ("bfloat16", "float16")
    assert error.remedy.startswith("Serve with --dtype bfloat16, ")
    new = follow(command_in(error))
    check_dtype(new, "float16")
    assert (new.grid, new.layer_spec.schema, new.layer_spec.target) == (
        view.grid,
        view.layer_spec.schema,
        view.layer_spec.target,
    )


def of_kind(view: ArtifactView, **facts: Any) -> ArtifactView:
    """The same artifact of another kind, in all layers."""
    layer_spec = replace(view.layer_spec, **facts)
    return replace(
        view,
        layer_spec=layer_spec,
        layers={n: replace(b, layer_spec=layer_spec) for n, b in view.layers.items()},
    )


def of_inputs(layer: ArtifactLayer, inputs: InputSchema) -> ArtifactLayer:
    return replace(layer, layer_spec=replace(layer.layer_spec, inputs=inputs))


def test_an_artifact_whose_activations_differ_is_made_from_the_original_with_its_recipe(
    view: ArtifactView,
) -> None:
    """It cannot be cut for them; nor can one whose exponents are in its codes. Layers that are left stay so."""
    assert recut(replace(view, left=("mtp.0.experts",))) == recut(view)
    plain = of_kind(view, schema=resolve_schema("int8"))
    assert " --schema source " in recut(plain)
    name, layer = next(iter(plain.layers.items()))
    other = replace(plain, layers={**plain.layers, name: of_inputs(layer, INPUT_PRESETS["int8"])})
    assert recut(other).startswith("`hqconv convert original -o ")
    assert " --config RECIPE " in recut(other)
    fused = of_kind(view, inputs=INPUT_PRESETS["fp8"])
    gemms = {
        gemm: replace(entry, flags={**entry.flags, "use_fused_e8m0_scale": True})
        for gemm, entry in layer.gemms.items()
    }
    layers = {**fused.layers, name: replace(fused.layers[name], gemms=gemms)}
    folded = recut(replace(fused, layers=layers))
    assert folded.startswith("`hqconv convert original -o ")
    assert " --schema mxfp4 --input-schema fp8 " in folded


def test_activations_are_in_the_commands(view: ArtifactView) -> None:
    assert "--input-schema" not in recut(view)
    for inputs, word in (
        (INPUT_PRESETS["fp8-g128"], "fp8-g128"),
        (InputSchema("mine", "int8"), "mine.toml"),
        (InputSchema("fp8", "int8"), "fp8.toml"),
    ):
        own = of_kind(view, inputs=inputs)
        for command in (recut(own), refused(check_dtype, own, "float16").remedy):
            assert f"--input-schema {word} " in command


def test_groups_that_vllm_quantizes_itself_must_be_its_own(view: ArtifactView) -> None:
    """It does so for 128 columns, in e4m3 alone, and leaves no columns over."""
    wide = replace(view.layers[LAYER], hidden_size=384)
    odd = replace(wide, hidden_size=192)
    translation.check_inputs(view, of_inputs(wide, INPUT_PRESETS["fp8-g128"]))
    for layer in (wide, odd):
        translation.check_inputs(view, of_inputs(layer, INPUT_PRESETS["fp8"]))
    error = refused(translation.check_inputs, view, of_inputs(odd, INPUT_PRESETS["fp8-g128"]))
    assert error.found == "192"
    other = of_inputs(wide, InputSchema("x", "float8e5m2", 128))
    assert refused(translation.check_inputs, view, other).found == "float8e5m2"


def test_another_gpu_is_refused_with_a_command_only_where_there_is_one(view: ArtifactView) -> None:
    error = refused(check_machine, view, 110)
    assert (error.expected, error.found) == ("sm90", "sm110")
    known = ", ".join(f"sm{sm}" for sm in TARGETS)
    assert error.remedy == f"Serve it on such a GPU; this hqconv makes artifacts for {known} alone."
    error = refused(check_machine, of_kind(view, target=GpuTarget(100)), 90)
    command = command_in(error)
    assert command[command.index("--target") + 1] == "sm90"
    assert "-sm90-" in command[4]


@pytest.mark.parametrize(
    ("fact", "value", "what"),
    [("num_experts", 8, "experts"), ("hidden_size", 256, "hidden size"), ("gated", False, "gated")],
)
def test_another_layer_is_refused(view: ArtifactView, fact: str, value: int, what: str) -> None:
    layer = view.layers[LAYER]
    error = refused(check_layer, view, layer, replace(ASKED, **{fact: value}))  # type: ignore[arg-type]
    assert error.where == f"{view.location.name}: {LAYER}: {what}"
    assert (error.expected, error.found) == (str(getattr(layer, fact)), str(value))


def test_a_file_of_other_experts_or_biases_is_refused(view: ArtifactView) -> None:
    file: Any = SimpleNamespace(
        layer=LAYER, configs={"w13": {"num_experts": 4}}, tensors={"w13_weight": None}
    )
    check_rank_file(view, file, ASKED, 4)
    error = refused(check_rank_file, view, file, ASKED, 2)
    assert (error.expected, error.found) == ("4", "2")
    error = refused(check_rank_file, view, file, replace(ASKED, has_bias=True), 4)
    assert error.where.endswith(": biases")


def test_weighed_inputs_are_refused(view: ArtifactView) -> None:
    with pytest.raises(
        RequestError, match=f"weigh the experts' inputs(.|\n)*{LAYER}(.|\n)*original"
    ):
        translation.check_router(
            view, view.layers[LAYER], replace(ASKED, router_weight_on_input=True)
        )


@pytest.mark.parametrize("here", [{"a": True, "b": True}, {"TypeError: x": True}, {}])
def test_another_layout_of_humming_names_the_version_that_fits(here: dict[str, bool]) -> None:
    error = refused(check_flags, "out: w13", "0.1.42", {"a": True, "b": False}, here)
    assert error.expected == "a (humming-kernels 0.1.42)"
    assert error.found.endswith(f"(humming-kernels {version('humming-kernels')})")
    assert "humming-kernels==0.1.42" in error.remedy
    check_flags("out: w13", "0.1.42", here, dict(here))


INT4 = KernelSpec(resolve_schema("int4-g64-zp"), "bfloat16", GpuTarget(90))


def test_another_version_with_the_same_layout_is_accepted() -> None:
    server_compatibility.check_fingerprint(
        "out: w13", "0.1.42", layout_fingerprint(INT4), INT4, "`hqconv convert …`"
    )


def test_a_layout_that_has_moved_is_refused_with_both_remedies() -> None:
    asked = ("out: w13", "0.1.42", "0" * 64, INT4, "`hqconv convert …`")
    error = refused(server_compatibility.check_fingerprint, *asked)
    assert (error.where, error.expected) == (
        "out: w13",
        f"fingerprint {'0' * 12} (humming-kernels 0.1.42)",
    )
    assert layout_fingerprint(INT4)[:12] in error.found
    assert "humming-kernels==0.1.42" in error.remedy
    assert "`hqconv convert …`" in error.remedy


def test_a_fingerprint_that_cannot_be_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that computes it fails: nothing is taken for the recorded layout."""
    spec = replace(INT4, target=GpuTarget(75))
    monkeypatch.setattr("sys.executable", "false")
    error = refused(
        server_compatibility.check_fingerprint,
        "out: w13",
        "0.1.42",
        "0" * 64,
        spec,
        "`hqconv convert …`",
    )
    assert error.found.startswith("none")
