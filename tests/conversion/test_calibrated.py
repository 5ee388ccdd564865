"""Conversions with `--calibrate`: what they record, where they change nothing, and what `verify` says of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.calibration import inputs
from hqconv.calibration.transformers_model import read_text
from hqconv.conversion import resources
from hqconv.errors import HqconvError, OutputError, RequestError
from hqconv.planning import calibration
from hqconv.planning.layer_encoding import CALIBRATION_VERSION
from hqconv.schemas.grid import Grid
from tests.make.calibrated import OPTIONS, write_text
from tests.make.conversions import assert_verified, check, manifest, run, run_until
from tests.make.damage import Damaged
from tests.make.decodable import write_quantized
from tests.make.families import FAMILIES, save_family
from tests.make.gguf_models import write, write_recorded
from tests.make.hub_server import serve, use
from tests.make.qwen import set_config
from tests.make.tensors import same_bits, snapshot
from tests.make.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a text, and the artifact of both."""
    folder = tmp_path_factory.mktemp("calibrated")
    save_family(folder / "src", "qwen3_moe", inner=64)
    write_tokenizer(folder / "src")
    write_text(folder / "text")
    run(
        folder / "src", folder / "out", "int4-g32", Grid(2, 2), calibrate=folder / "text", **OPTIONS
    )
    return folder


def quantization_errors(out: Path) -> dict[str, Any]:
    """Return the recorded errors of each layer."""
    return {name: layer["quantization_error"] for name, layer in manifest(out)["blocks"].items()}


def expert_tensors(out: Path, gemm: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of all rank files of an artifact of one rank, or those of a GEMM."""
    return {
        name: tensor
        for path in (out / "experts").rglob("*.safetensors")
        for name, tensor in load_file(path).items()
        if f"experts.{gemm}" in name
    }


def are_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        same_bits(tensor, expected[name]) for name, tensor in found.items()
    )


def test_the_artifact_records_its_calibration_and_is_proven(example: Path) -> None:
    document = manifest(example / "out")
    assert (document["quantizer"], document["quantizer_version"]) == ("gptq", CALIBRATION_VERSION)
    assert (document["calibration"]["name"], document["calibration"]["num_tokens"]) == ("text", 48)
    assert_verified(example / "out", example / "src")
    assert hqconv.inspect(example / "out")["calibration"] == document["calibration"]


def test_a_changed_code_and_a_changed_record_are_found(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example / "out", tmp_path / "out")
    copy = Damaged(tmp_path / "out", example / "src", "int4-g32")
    layer = next(iter(manifest(copy.root)["blocks"]))

    def edit(words: dict[str, Any]) -> None:
        words["blocks"][layer]["quantization_error"]["w2"]["relative_error"] *= 1.001

    copy.edit_manifest(edit)
    (finding,) = [
        finding
        for result in check(copy.root, example / "src", "weights").results
        for finding in result.findings
    ]
    assert finding.where.endswith("w2: relative_error")
    copy.edit_manifest(lambda words: words["calibration"].update(device=5))
    assert not check(copy.root, None, "files").passed
    shutil.copytree(example / "out", tmp_path / "flipped")
    copy = Damaged(tmp_path / "flipped", example / "src", "int4-g32")
    copy.flip(copy.path, f"{layer}.w13_weight", mask=0x10)
    copy.reseal()
    assert not check(copy.root, example / "src", "weights").passed


def test_codes_that_are_kept_are_not_calibrated(example: Path, tmp_path: Path) -> None:
    run(example / "src", tmp_path / "first", "mxfp4")
    plain = run(tmp_path / "first", tmp_path / "plain", "source")
    found = run(
        tmp_path / "first", tmp_path / "found", "source", calibrate=example / "text", **OPTIONS
    )
    assert not plain.warnings
    assert any(text.startswith("--calibrate has no effect") for text in found.warnings)
    assert snapshot(tmp_path / "plain" / "experts") == snapshot(tmp_path / "found" / "experts")


# --- the same bytes


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source of four layers, and a text."""
    folder = tmp_path_factory.mktemp("deep")
    save_family(folder / "src", "mixtral", inner=64, num_hidden_layers=4)
    write_tokenizer(folder / "src")
    write_text(folder / "text")
    return folder


@pytest.fixture
def in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts in a batch."""
    monkeypatch.setitem(resources._CALIBRATED_WEIGHTS, "cpu", 25_000)


def calibrated(
    folder: Path, out: Path, schema: str = "int4-g32", grid: Grid | None = None, **options: Any
) -> Any:
    return run(
        folder / "src", out, schema, grid, **{"calibrate": folder / "text", **OPTIONS, **options}
    )


@pytest.mark.usefixtures("in_batches")
def test_threads_memory_parts_and_resuming_change_no_byte(deep: Path, tmp_path: Path) -> None:
    calibrated(deep, tmp_path / "one", threads=1)
    expected = snapshot(tmp_path / "one")
    calibrated(deep, tmp_path / "threads", threads=5, max_memory=60 << 20)
    assert snapshot(tmp_path / "threads") == expected
    reports = [calibrated(deep, tmp_path / "parts", part=part) for part in ("2/2", "1/2")]
    assert [report.is_complete for report in reports] == [False, True]
    assert snapshot(tmp_path / "parts") == expected


@pytest.mark.usefixtures("in_batches")
def test_a_conversion_that_was_interrupted_goes_on(deep: Path, tmp_path: Path) -> None:
    """Under another text it is refused."""
    calibrated(deep, tmp_path / "whole")
    text = deep / "text"
    run_until(deep / "src", tmp_path / "out", 2, "int4-g32", calibrate=text, **OPTIONS)
    changes: list[dict[str, Any]] = [
        {"calibrate": deep / "src" / "config.json"},
        {"calibrate_tokens": 47},
    ]
    for changed in changes:
        with pytest.raises(OutputError, match="calibrat"):
            calibrated(deep, tmp_path / "out", resume=True, **changed)
    report = calibrated(deep, tmp_path / "out", resume=True)
    assert report.num_units_resumed
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_ranks_and_layouts_hold_the_same_codes(deep: Path, tmp_path: Path) -> None:
    """Errors are measured before any slice, and verify compares those of the ranks with them."""
    calibrated(deep, tmp_path / "packed", "int4-g32-e4m3", layout="checkpoint")
    calibrated(deep, tmp_path / "ranks", "int4-g32-e4m3", Grid(2, 2))
    assert quantization_errors(tmp_path / "packed") == quantization_errors(tmp_path / "ranks")
    for name in ("packed", "ranks"):
        assert_verified(tmp_path / name, deep / "src")


# --- texts, limits and damage: refused before any work


def refused(
    folder: Path, out: Path, match: str, error: type[HqconvError] = RequestError, **options: Any
) -> HqconvError:
    """The error of a conversion, which leaves nothing."""
    with pytest.raises(error, match=match) as caught:
        calibrated(folder, out, **options)
    assert not out.exists()
    return caught.value


def test_an_unusable_text_is_refused(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(content: bytes) -> Path:
        (tmp_path / "given").write_bytes(content)
        return tmp_path / "given"

    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    for text in (tmp_path / "none", tmp_path / "empty"):
        refused(deep, out, "no text to calibrate with", calibrate=text)
    for content, match in (
        (b"", "no tokens"),
        (b" \n", "no tokens"),
        (b"1\xff", "not UTF-8"),
        (b"7", "too short"),
        (b"7 " * (1 << 19) + b"7", "too large"),
    ):
        monkeypatch.setattr(calibration, "MAX_TEXT_BYTES", 1 << 20)
        refused(deep, out, match, calibrate=given(content))
    os.mkfifo(tmp_path / "pipe")  # nothing waits for it
    assert refused(deep, out, "no text", calibrate=tmp_path / "pipe").found == "a pipe"
    for option in ("calibrate", "evaluate"):
        more = {"calibrate": write_text(tmp_path / "text"), option: tmp_path / "pipe"}
        refused(deep, out, "pipe", **more)


def test_a_text_that_changes_while_it_is_read_is_refused(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_text(tmp_path / "text")

    def read(*arguments: Any, **options: Any) -> Any:
        write_text(text, 90)
        return read_text(*arguments, **options)

    monkeypatch.setattr(inputs, "read_text", read)
    refused(deep, tmp_path / "out", "text changed", calibrate=text)


def test_a_short_text_and_experts_without_tokens_are_quantized(deep: Path, tmp_path: Path) -> None:
    """Two tokens reach few experts: the others are rounded by their own weights."""
    text = write_text(tmp_path / "text", 2)
    report = calibrated(deep, tmp_path / "out", calibrate=text)
    plain = run(deep / "src", tmp_path / "plain", "int4-g32")
    for layer, errors in report.errors.items():
        for role, error in errors.items():
            rounded = plain.errors[layer][role]["worst_relative_error"]
            assert error["worst_relative_error"] < 4 * rounded
        without, few = (
            errors["w2"][f"num_experts_{kind}_tokens"] for kind in ("without", "with_few")
        )
        assert 1 <= few <= 4  # two tokens choose two experts each
        assert without + few == 4, layer
    assert any("did not reach" in warning for warning in report.warnings)
    assert_verified(tmp_path / "out", deep / "src")


def test_a_source_without_a_tokenizer_is_refused(deep: Path, tmp_path: Path) -> None:
    shutil.copytree(deep / "src", tmp_path / "src", ignore=shutil.ignore_patterns("token*"))
    write_text(tmp_path / "text")
    error = refused(tmp_path, tmp_path / "out", "tokenizer")
    assert str(tmp_path / "src") in error.where


def test_a_model_that_does_not_fit_is_refused(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first refusal names what is enough for the model and the experts at work."""
    assert refused(deep, tmp_path / "out", "memory limit", max_memory=1 << 20)
    text = write_text(tmp_path / "text", 400_000)
    many: dict[str, Any] = {"calibrate_tokens": 400_000, "calibrate": text}
    message = "run of the model does not fit"
    refused(deep, tmp_path / "out", message, max_memory=60 << 20, **many)
    error = refused(deep, tmp_path / "out", message, max_memory=1 << 20, threads=5, **many)
    enough = int(error.expected.split()[0]) << 20
    less = refused(deep, tmp_path / "out", message, max_memory=enough // 2, threads=5, **many)
    assert less.expected == error.expected

    def run(*_: Any) -> None:
        raise RequestError("It runs.")

    monkeypatch.setattr(inputs, "ExpertInputs", run)
    refused(deep, tmp_path / "out", "It runs", max_memory=enough, threads=5, **many)


# --- sources


NOT_RUN = dict.fromkeys(
    ("dbrx", "glm4v_moe", "step3p7"), "cannot run this model"
)  # nor does transformers alone
REFUSED = {
    **NOT_RUN,
    "diffusion_gemma": "several modules of routed experts",
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text"), "activation is known by its name only"
    ),
}
# Stacks, alternating rows, a flat one, latent attention, a multimodal model; test_evaluate has every family.
OF_EACH_KIND = ("mixtral", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next", "gemma4", "zaya")
WITH_HEADS_OF_8 = ("axk1", "deepseek_v3", "kimi_k25", "longcat_flash")  # as their rotary embeddings


@pytest.mark.sampled(13)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_calibrated_or_refused(family: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"head_dim": 8} if family in WITH_HEADS_OF_8 else {}
    save_family(tmp_path / "src", family, inner=64, **more)
    write_tokenizer(tmp_path / "src")
    write_text(tmp_path / "text")
    if family in REFUSED:
        with pytest.raises(RequestError, match=REFUSED[family]):
            calibrated(tmp_path, tmp_path / "out")
        assert not (tmp_path / "out/hqconv.json").exists()
        return
    report = calibrated(tmp_path, tmp_path / "out")
    plain = run(tmp_path / "src", tmp_path / "plain", "int4-g32")
    for layer, errors in report.errors.items():
        assert errors["w3"]["relative_error"] != plain.errors[layer]["w3"]["relative_error"]
    assert_verified(tmp_path / "out", tmp_path / "src")


@pytest.mark.sampled(13)
@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_a_proof_is_in_float32_where_the_calibration_is_not(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the source's layers are read once, in bfloat16."""
    monkeypatch.setitem(inputs._DTYPES, "cpu", torch.bfloat16)
    save_family(
        tmp_path / "src", family, inner=64, **({"head_dim": 8} if family in WITH_HEADS_OF_8 else {})
    )
    write_tokenizer(tmp_path / "src")
    text = write_text(tmp_path / "text")
    report = calibrated(tmp_path, tmp_path / "out", evaluate=text)
    found = hqconv.evaluate(tmp_path / "out", tmp_path / "src", text, device="cpu")
    assert report.evaluation is not None
    assert report.evaluation["compute_dtype"] == "float32"
    # zaya rounds its last hidden states to the dtype of the next weight.
    roughly = 1e-2 if family == "zaya" else 1e-6
    assert report.evaluation["perplexity"] == pytest.approx(found["perplexity"], rel=roughly)
    assert report.evaluation["kl"] == pytest.approx(found["kl"], rel=1e3 * roughly, abs=1e-9)


def test_layers_for_multi_token_prediction_are_rounded_with_a_notice(tmp_path: Path) -> None:
    src = tmp_path / "src"
    save_family(src, "deepseek_v3", inner=64, head_dim=8)
    write_tokenizer(src)
    write_text(tmp_path / "text")
    tensors = {
        name: value for path in src.glob("*.safetensors") for name, value in load_file(path).items()
    }
    for path in (*src.glob("*.safetensors"), src / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    names = [name for name in tensors if ".layers.1." in name]
    tensors |= {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in names}
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    set_config(src, num_nextn_predict_layers=1)
    report = calibrated(tmp_path, tmp_path / "out", evaluate=tmp_path / "text")
    plain = run(src, tmp_path / "plain", "int4-g32")
    of_model, of_draft = (f"model.layers.{number}.mlp.experts" for number in (1, 2))
    assert report.evaluation is not None
    assert report.evaluation["num_layers"] == 1
    for begin in ("1 layer rounded to nearest", "1 layer not evaluated"):
        assert any(f"{begin}: {of_draft}." in text for text in report.warnings)
    assert report.errors[of_model] != plain.errors[of_model]
    assert report.errors[of_draft] == plain.errors[of_draft]
    assert_verified(tmp_path / "out", src)


@pytest.mark.parametrize("schema", ["mxfp4+int3-g64", "int3-g64+mxfp4"])
def test_a_gemm_that_keeps_its_codes_stands_beside_a_calibrated_one(
    schema: str, tmp_path: Path
) -> None:
    """The other is calibrated on what the codes mean."""
    write_quantized(tmp_path / "src", "mxfp4", tmp_path / "plain")
    write_tokenizer(tmp_path / "plain")
    text = write_text(tmp_path / "text")
    report = calibrated(tmp_path, tmp_path / "out", schema)
    run(tmp_path / "plain", tmp_path / "of-plain", "int3-g64", calibrate=text, **OPTIONS)
    direct = ("w1", "w3") if schema.startswith("mxfp4") else ("w2",)
    for errors in report.errors.values():
        for role, error in errors.items():
            assert (error["relative_error"] == 0) == (role in direct)
            assert error["num_experts_requantized"] == (0 if role in direct else 4)
    found, expected = (expert_tensors(tmp_path / name, "w13") for name in ("out", "of-plain"))
    assert are_equal(found, expected) == (direct == ("w2",))
    assert_verified(tmp_path / "out", tmp_path / "src")


def test_sources_that_transformers_does_not_decode_are_refused(deep: Path, tmp_path: Path) -> None:
    """An artifact, or GGUF files, with and without the publisher's config."""
    write_text(tmp_path / "text")
    run(deep / "src", tmp_path / "packed", "int4-g32", layout="checkpoint")
    run(deep / "src", tmp_path / "kernel", "int8")
    gguf = write_recorded("mixtral", tmp_path / "gguf")
    whole = tmp_path / "whole"
    shutil.copytree(gguf, whole)
    write_tokenizer(whole)
    shutil.copyfile(write("mixtral", tmp_path / "published") / "config.json", whole / "config.json")
    options: dict[str, Any] = {"calibrate": tmp_path / "text", **OPTIONS}
    expected = {"packed": "cannot decode", "gguf": "publisher's config"}
    expected |= dict.fromkeys(("kernel", "whole"), "not stored as")
    for name, match in expected.items():
        with pytest.raises(RequestError, match=match):
            run(tmp_path / name, tmp_path / "out", "int3-g64", **options)
        assert not (tmp_path / "out").exists()


def test_a_model_of_the_hub_is_calibrated(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(deep, tmp_path / "here")
    with serve(deep / "src") as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")
        run("org/name", tmp_path / "out", "int4-g32", calibrate=deep / "text", **OPTIONS)  # type: ignore[arg-type]
    assert snapshot(tmp_path / "out/experts") == snapshot(tmp_path / "here/experts")
