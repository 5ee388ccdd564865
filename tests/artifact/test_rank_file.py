"""A rank file's header is held to the manifest before a tensor is made of it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hqconv.artifact.rank_file import RankFile, check_sha256
from hqconv.errors import VerificationError
from hqconv.schemas.grid import Grid
from hqconv.serving.artifact_view import (
    ArtifactLocation,
    ArtifactView,
    open_artifact_view,
    open_rank_file,
)
from tests.make import input_scales, small
from tests.make.conversions import run, write_manifest
from tests.make.qwen import write_qwen3_moe

FIRST, SECOND = (f"model.layers.{layer}.mlp.experts" for layer in range(2))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("rank-file")
    run(
        write_qwen3_moe(work / "original", num_experts=5, intermediate_size=256),
        work / "out",
        "nvfp4",
        Grid(2, 2),
    )
    return work / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def name_of(layer: str = FIRST, tp_rank: int = 0, ep_rank: int = 0) -> str:
    return f"experts/tp{tp_rank}-ep{ep_rank}/{layer}.safetensors"


def opened(out: Path, layer: str = FIRST, tp_rank: int = 0, ep_rank: int = 0) -> RankFile:
    view = open_artifact_view(ArtifactLocation(str(out)))
    return open_rank_file(view, layer, tp_rank, ep_rank, out / name_of(layer, tp_rank, ep_rank))


def is_damaged(found: pytest.ExceptionInfo[VerificationError]) -> VerificationError:
    error = found.value
    assert error.where.startswith(name_of())
    assert error.expected != error.found != ""
    assert "again" in error.remedy
    return error


def test_tensors_have_the_names_of_layers_and_the_places_of_the_file(made: Path) -> None:
    for rank in ((0, 0), (1, 1)):
        file = opened(made, SECOND, *rank)
        data = file.path.read_bytes()
        with safe_open(file.path, "np") as stored:
            assert {f"{SECOND}.{name}" for name in file.tensors} == set(stored.keys())
            assert {
                gemm: json.loads(stored.metadata()[gemm]) for gemm in ("w13", "w2")
            } == file.configs
            for name, ref in file.tensors.items():
                assert ref.shape == tuple(stored.get_slice(f"{SECOND}.{name}").get_shape())
                if ref.dtype == "I32":
                    found = data[ref.offset_bytes : ref.offset_bytes + ref.num_bytes]
                    assert found == stored.get_tensor(f"{SECOND}.{name}").tobytes()
        check_sha256(file)


@pytest.mark.parametrize("tp", [1, 4])
def test_biases_and_padded_ranks_are_good(tmp_path: Path, tp: int) -> None:
    source = small.save(tmp_path / "source", small.gpt_oss_mxfp4(320))
    run(source, tmp_path / "out", "source", Grid(tp=tp))
    for rank in range(tp):
        assert {"w13_bias", "w2_bias"} <= set(opened(tmp_path / "out", small.LAYER, rank).tensors)


def rewrite(out: Path, change: Callable[[dict[str, Any]], object], name: str = name_of()) -> None:
    """Another header in front of the same bytes; the manifest has the new size, as nothing else would be looked at."""
    data = (out / name).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    (out / name).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    words = json.loads((out / "hqconv.json").read_text())
    words["files"][name]["size_bytes"] = (out / name).stat().st_size
    write_manifest(out, words)


def config(**words: Any) -> Callable[[dict[str, Any]], object]:
    """Change the LayerConfig of w13."""

    def change(header: dict[str, Any]) -> None:
        header["__metadata__"]["w13"] = json.dumps(
            json.loads(header["__metadata__"]["w13"]) | words
        )

    return change


def drop(key: str) -> Callable[[dict[str, Any]], object]:
    def change(header: dict[str, Any]) -> None:
        words = json.loads(header["__metadata__"]["w13"])
        del words[key]
        header["__metadata__"]["w13"] = json.dumps(words)

    return change


def metadata(**words: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update(words)


def rename(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update({new: header.pop(f"{FIRST}.{old}")})


def reshape(header: dict[str, Any]) -> None:
    """As many bytes, for another number of experts."""
    entry = header[f"{FIRST}.w2_weight"]
    first, *rest = entry["shape"]
    entry["shape"] = [1, first, *rest]


def transpose(header: dict[str, Any]) -> None:
    """As many bytes, for as many experts."""
    shape = header[f"{FIRST}.w2_weight"]["shape"]
    shape[1:] = shape[:0:-1]


def relabel(header: dict[str, Any]) -> None:
    header[f"{FIRST}.w2_weight"]["dtype"] = "F32"


EMPTY = {"data_offsets": [0, 0]}
HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no LayerConfigs": (lambda header: header.pop("__metadata__"), "another rank"),
    "no LayerConfig of w2": (
        lambda header: header["__metadata__"].pop("w2"),
        "layer config for w2",
    ),
    "a LayerConfig that is no JSON": (metadata(w13="{"), "layer config for w13"),
    "a LayerConfig without an end": (metadata(w13="[" * 100_000), "layer config for w13"),
    "a LayerConfig that is a list": (metadata(w2="[1]"), "layer config for w2"),
    "another N": (config(shape_n=512), "expected: shape_n 256"),
    "experts of another type": (
        config(num_experts=3.0),
        "expected: num_experts 3\n(.|\\n)*num_experts 3.0",
    ),
    "a word more": (config(more=1), "expected: more absent(.|\\n)*more 1"),
    "a layer of nobody": (metadata(layer="-1"), "metadata are not a conversion's(.|\\n)*layer"),
    "another form of file": (
        metadata(format="tf"),
        "metadata are not a conversion's(.|\\n)*format tf",
    ),
    "a flag of another type": (
        config(use_fused_e8m0_scale=0),
        "expected: use_fused_e8m0_scale False",
    ),
    "no format": (lambda header: header["__metadata__"].pop("format"), "not a conversion's"),
    "a flag that Humming would choose": (
        drop("use_int_weight_scale"),
        "found: use_int_weight_scale absent",
    ),
    "a GEMM without a name": (
        lambda header: header.update({f"{FIRST}.w13": {**EMPTY, "dtype": "F32", "shape": [0]}}),
        "found: .*w13\n",
    ),
    "a shape of as many bytes": (transpose, "another shape(.|\\n)*w2_weight"),
    "another dtype": (relabel, "another dtype(.|\\n)*w2_weight"),
    "no second scale": (rename("w13_weight_scale_2", f"{FIRST}.w13_bias"), "has_bias"),
    "another shape": (reshape, r"number of experts(.|\n)*\[1, 3"),
    "another layer's tensor": (
        rename("w2_weight", f"{SECOND}.w2_weight"),
        f"tensors named {FIRST}",
    ),
    "a tensor of nobody": (rename("w2_weight", "w2_weight"), "found: w2_weight"),
    "a tensor of another GEMM": (rename("w2_weight", f"{FIRST}.w1_weight"), "found: .*w1_weight"),
    "a tensor of one expert": (
        rename("w2_weight", f"{FIRST}.0.w2_weight"),
        r"found: .*experts\.0\.w2_weight",
    ),
    "a scale of nobody": (
        lambda header: header.update(
            {f"{FIRST}.w13_more_input_scale": {**EMPTY, "dtype": "F32", "shape": [0]}}
        ),
        "tensor that its layer config does not ask for(.|\\n)*w13_more_input_scale",
    ),
    "no weight": (
        rename("w2_weight", f"{FIRST}.w2_other"),
        "tensor is missing(.|\\n)*w2_weight|w2_other",
    ),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_is_not_the_manifests_is_refused(out: Path, what: str) -> None:
    change, message = HEADERS[what]
    rewrite(out, lambda header: None)
    assert opened(out)
    rewrite(out, change)
    with pytest.raises(VerificationError, match=message) as caught:
        opened(out)
    is_damaged(caught)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[:-1], r"expected: \d+ bytes"),
    "longer": (lambda data: data + b"\0", r"expected: \d+ bytes"),
    "empty": (lambda data: b"", "found: 0 bytes"),
    "zeros": (lambda data: bytes(len(data)), "readable safetensors"),
    "a bit of the length": (lambda data: bytes([data[0] ^ 2]) + data[1:], "readable safetensors"),
    "a bracket": (lambda data: data[:8] + b"[" + data[9:], "readable safetensors"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_refused(out: Path, what: str) -> None:
    change, message = DAMAGES[what]
    path = out / name_of()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(VerificationError, match=message) as caught:
        opened(out)
    is_damaged(caught)


def test_a_file_that_is_gone_or_no_file_is_refused(out: Path) -> None:
    (out / name_of()).unlink()
    with pytest.raises(VerificationError, match="readable safetensors"):
        opened(out)
    (out / name_of()).mkdir()
    with pytest.raises(VerificationError, match=r"expected: \d+ bytes"):
        opened(out)


def test_a_file_that_the_manifest_does_not_list_is_refused(made: Path) -> None:
    view: ArtifactView = replace(open_artifact_view(ArtifactLocation(str(made))), files={})
    with pytest.raises(VerificationError, match="a file that the manifest lists") as caught:
        open_rank_file(view, FIRST, 0, 0, made / name_of())
    is_damaged(caught)


def test_another_ranks_file_of_the_same_sizes_is_refused(out: Path) -> None:
    """Its metadata says whose it is; tensors and LayerConfigs are those of every rank."""
    shutil.copy(out / name_of(FIRST, 1, 0), out / name_of())
    with pytest.raises(VerificationError, match=r"tp0-ep0(.|\n)*tp1-ep0") as caught:
        opened(out)
    is_damaged(caught)


def test_a_bit_of_a_tensor_is_told_by_the_digest(out: Path) -> None:
    data = bytearray((out / name_of()).read_bytes())
    data[-1] ^= 1
    (out / name_of()).write_bytes(data)
    with pytest.raises(VerificationError, match="sha256") as caught:
        check_sha256(opened(out))
    is_damaged(caught)


# --- static activations --------------------------------------------------------------------------------------

SCALE = "w13_input_scale"
SCALES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no scale": (rename(SCALE, f"{FIRST}.w13_other"), f"{SCALE}(.|\n)*F32(.|\n)*absent"),
    "another dtype": (
        lambda header: header[f"{FIRST}.{SCALE}"].update(dtype="I32"),
        f"{SCALE}(.|\n)*F32(.|\n)*I32",
    ),
    "a scale for each": (
        lambda header: header[f"{FIRST}.{SCALE}"].update(shape=[1, 1]),
        r"F32 \[1\](.|\n)*\[1, 1\]",
    ),
}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("calibrated")
    source = small.save(work / "original", input_scales.fp8())
    for inputs in ("fp8", "fp8-static"):
        run(source, work / inputs, "fp8-tensor", Grid(ep=2), input_schema=inputs)
    return work


def test_static_scales_are_of_no_expert(calibrated: Path) -> None:
    for rank in (0, 1):
        file = opened(calibrated / "fp8-static", FIRST, 0, rank)
        for gemm, scale in input_scales.expected().items():
            ref = file.tensors[f"{gemm}_input_scale"]
            assert (ref.dtype, ref.shape, ref.num_bytes) == ("F32", (1,), 4)
            data = file.path.read_bytes()[ref.offset_bytes : ref.offset_bytes + ref.num_bytes]
            assert struct.unpack("<f", data) == (scale,)
        assert file.configs["w13"]["input_quant_mode"] == "static_tensor"
    assert SCALE not in opened(calibrated / "fp8").tensors


@pytest.mark.parametrize("what", SCALES)
def test_a_static_scale_that_is_none_is_refused(
    calibrated: Path, tmp_path: Path, what: str
) -> None:
    out = Path(shutil.copytree(calibrated / "fp8-static", tmp_path / "out"))
    change, message = SCALES[what]
    rewrite(out, change)
    with pytest.raises(VerificationError, match=message) as caught:
        opened(out)
    is_damaged(caught)
