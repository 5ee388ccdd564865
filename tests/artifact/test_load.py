"""`hqconv.load` and `hqconv.dequantize`: what programs get, judged by transformers and by Humming."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hqconv
from hqconv.artifact import load as artifact_load
from hqconv.errors import InputError, RequestError, VerificationError
from hqconv.schemas.grid import Grid
from tests.make.conversions import run
from tests.make.damage import Damaged
from tests.make.models import save_model
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import load_file

LAYER = "model.layers.0.mlp.experts"


def test_short_memory_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    write_qwen3_moe(tmp_path / "src")
    hqconv.convert(
        tmp_path / "src", tmp_path / "out", schema="int4-g32", target="sm90", device="cpu"
    )
    monkeypatch.setattr(artifact_load, "read_tensors", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 << 20, 1 << 30))
    with pytest.raises(RequestError, match="GPU's memory is not enough") as caught:
        hqconv.load(tmp_path / "out", layer=LAYER)
    assert caught.value.found == "5 MiB free"


def test_load_gives_each_rank_its_file_and_humming_its_config(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "qwen3_moe", moe_intermediate_size=128)
    out = tmp_path / "out"
    run(source, out, "int4-g64", Grid(tp=2, ep=2))
    for tp_rank, ep_rank in Grid(2, 2).ranks:
        for layer in (f"model.layers.{i}.mlp.experts" for i in range(2)):
            stored = load_file(
                out / "experts" / f"tp{tp_rank}-ep{ep_rank}" / f"{layer}.safetensors"
            )
            gemms = hqconv.load(out, layer=layer, tp_rank=tp_rank, ep_rank=ep_rank)
            config = gemms["w13"].layer_config()
            assert config.num_experts == gemms["w13"].tensors["weight"].shape[0] == (3, 2)[ep_rank]
            assert gemms["w2"].layer_config().shape_k - gemms["w2"].layer_config().pad_shape_k == 64
            assert sum(len(gemm.tensors) for gemm in gemms.values()) == len(stored)
            for gemm, loaded in gemms.items():
                for name, tensor in loaded.tensors.items():
                    assert torch.equal(tensor, stored[f"{layer}.{gemm}_{name}"])


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "qwen3_moe")
    out = tmp_path / "out"
    run(source, out, "int4-g64")
    with pytest.raises(RequestError, match="no such rank"):
        hqconv.load(out, layer=LAYER, tp_rank=1)
    with pytest.raises(RequestError, match="no such layer"):
        hqconv.dequantize(out, layer="model.layers.7.mlp.experts")
    with pytest.raises(RequestError, match="not an hqconv artifact"):
        hqconv.load(source, layer=LAYER)
    run(source, tmp_path / "packed", "int4-g64", layout="checkpoint")
    with pytest.raises(RequestError, match="no ranks"):
        hqconv.load(tmp_path / "packed", layer=LAYER)
    with pytest.raises(RequestError, match="checkpoint layout"):
        hqconv.dequantize(tmp_path / "packed", layer=LAYER)


def test_loading_changes_nothing_about_humming(tmp_path: Path) -> None:
    """In a process of its own: no module of Humming is loaded for the tensors, and its LayerConfig is Humming's."""
    source = save_model(tmp_path / "source", "qwen3_moe")
    run(source, tmp_path / "out", "int4-g64")
    script = f"""
import sys, hqconv
gemms = hqconv.load({str(tmp_path / "out")!r}, layer={LAYER!r})
assert not [name for name in sys.modules if name.startswith("humming")]
experts = hqconv.dequantize({str(tmp_path / "out")!r}, layer={LAYER!r})
assert not [name for name in sys.modules if name.startswith("humming")]
config = gemms["w13"].layer_config()
import humming.config.config as module, humming.device
assert type(config) is module.LayerConfig and module.current_device is humming.device.current_device
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- files that are not what they should be ------------------------------------------------------------------

OTHER = LAYER.replace("0", "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("load") / "src", intermediate_size=256)


@pytest.fixture(scope="module")
def artifact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("load") / "out"
    run(source, out, "int4-g64", Grid(2, 2))
    return out


@pytest.fixture
def copy(artifact: Path, source: Path, tmp_path: Path) -> Damaged:
    return Damaged(Path(shutil.copytree(artifact, tmp_path / "out")), source, "int4-g64")


def other_target(copy: Damaged) -> None:
    """The file of the same conversion for another GPU."""
    out = copy.root.with_name("other")
    run(copy.source, out, "int4-g64", Grid(2, 2), target="sm80")
    path = copy.rank_file(LAYER, 0, 0)
    shutil.copy(out / path, copy.root / path)


EXCHANGED: dict[str, tuple[Callable[[Damaged], object], str]] = {
    "TP ranks": (
        lambda c: c.swap_files(
            c.rank_file(LAYER, 0, 0), c.rank_file(LAYER, 1, 0), as_their_own=False
        ),
        "rank",
    ),
    "layers": (
        lambda c: c.swap_files(c.rank_file(LAYER, 0, 0), c.rank_file(OTHER, 0, 0)),
        "another layer",
    ),
    "targets": (other_target, "another format|describes|not those"),
}


@pytest.mark.parametrize("is_resealed", [False, True], ids=["as they are", "with a new manifest"])
@pytest.mark.parametrize("check_digests", [False, True])
@pytest.mark.parametrize("what", EXCHANGED)
def test_exchanged_files_are_refused(
    what: str, check_digests: bool, is_resealed: bool, copy: Damaged
) -> None:
    """By their headers: with the digests left out, and with a manifest that lists the other file's."""
    exchange, message = EXCHANGED[what]
    exchange(copy)
    if is_resealed:
        copy.reseal()
    with pytest.raises(VerificationError, match=message):
        hqconv.load(copy.root, layer=LAYER, check_digests=check_digests)
    with pytest.raises(VerificationError, match=message):
        hqconv.dequantize(copy.root, layer=LAYER, check_digests=check_digests)


@pytest.mark.parametrize("what", EXCHANGED)
def test_exchanged_files_are_no_source(what: str, copy: Damaged, tmp_path: Path) -> None:
    EXCHANGED[what][0](copy)
    copy.reseal()
    with pytest.raises(InputError) as caught:
        run(copy.root, tmp_path / "again", "source", Grid(1, 2))
    assert "experts/tp" in caught.value.where


@pytest.mark.parametrize("read", [hqconv.load, hqconv.dequantize])
def test_bytes_are_compared_unless_they_are_not_to_be(
    read: Callable[..., object], copy: Damaged
) -> None:
    read(copy.root, layer=LAYER)
    copy.flip(copy.rank_file(LAYER, 0, 0), f"{LAYER}.w2_weight", byte=5)
    with pytest.raises(VerificationError, match="not those of the manifest") as caught:
        read(copy.root, layer=LAYER)
    assert caught.value.where == copy.rank_file(LAYER, 0, 0)
    read(copy.root, layer=LAYER, check_digests=False)
