"""Artifacts whose manifest or headers were altered: who relies on them refuses, with the exit code of who asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import InputError, VerificationError
from hqconv.io import file_access
from hqconv.schemas.grid import Grid
from hqconv.serving.artifact_view import ArtifactLocation, open_artifact_view
from tests.make.conversions import check, manifest, run, write_manifest
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
ON_CPU: dict[str, Any] = {"schema": "source", "target": "sm90", "device": "cpu"}
ALTERED = "The manifest's bytes are not those that its digest was made of"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("altered")
    src = write_qwen3_moe(folder / "src", num_layers=1, num_experts=4)
    (src / "README.md").write_text("a model card")
    run(src, folder / "kernel", "int4-g64", Grid(tp=2))
    run(src, folder / "checkpoint", "int4-g64", layout="checkpoint")
    return {name: folder / name for name in ("src", "kernel", "checkpoint")}


def copied(made: dict[str, Path], tmp_path: Path, layout: str = "kernel") -> Path:
    return Path(shutil.copytree(made[layout], tmp_path / "artifact"))


# --- the manifest as a file


def alter(out: Path) -> None:
    """Words that nothing else tells, and the digest as before."""
    path = out / "hqconv.json"
    path.write_bytes(
        path.read_bytes().replace(b'"revision": null', b'"revision": "' + b"1" * 40 + b'"', 1)
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "altered": alter,
    "cut": lambda out: (out / "hqconv.json").write_bytes((out / "hqconv.json").read_bytes()[:-1]),
    "no JSON": lambda out: (out / "hqconv.json").write_bytes(b"{"),
    "deep": lambda out: (out / "hqconv.json").write_bytes(b"[" * 100_000),
    "no key": lambda out: write_manifest(
        out, {k: v for k, v in manifest(out).items() if k != "blocks"}
    ),
    "a family of nobody": lambda out: write_manifest(out, manifest(out) | {"family": "nobody"}),
    "no GPU": lambda out: write_manifest(out, manifest(out) | {"target": "h200"}),
}
OF_KERNEL = (
    "a family of nobody",
    "no GPU",
)  # in the checkpoint layout the shards say what they are


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_bad_input_where_the_artifact_is_a_source(
    damage: str, layout: str, made: dict[str, Path], tmp_path: Path
) -> None:
    if layout == "checkpoint" and damage in OF_KERNEL:
        pytest.skip("not what is read there")
    out = copied(made, tmp_path, layout)
    DAMAGES[damage](out)
    calls: list[Callable[[], object]] = [
        lambda: hqconv.plan(out, **ON_CPU),
        lambda: hqconv.convert(out, tmp_path / "again", **ON_CPU),
    ]
    if damage not in OF_KERNEL:  # which a check says among its findings
        calls.append(lambda: hqconv.verify(made["kernel"], out))
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.exit_code == 3
        assert "hqconv.json" in caught.value.where
        assert caught.value.remedy
    assert not (tmp_path / "again").exists()
    assert not check(out, None, "files").passed  # an artifact that failed verification: exit code 1


def test_an_altered_manifest_is_neither_loaded_nor_served(
    made: dict[str, Path], tmp_path: Path
) -> None:
    out = copied(made, tmp_path)
    calls: tuple[Callable[[], object], ...] = (
        lambda: hqconv.load(out, layer=LAYER),
        lambda: hqconv.dequantize(out, layer=LAYER),
        lambda: open_artifact_view(ArtifactLocation(str(out))),
    )
    for call in calls:
        call()
    alter(out)
    for call in calls:
        with pytest.raises(VerificationError, match=ALTERED) as caught:
            call()
        assert caught.value.where.endswith("hqconv.json: digest")
        assert "again" in caught.value.remedy


# --- sizes in a source's manifest


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_sizes_that_the_files_have_not(layout: str, made: dict[str, Path], tmp_path: Path) -> None:
    """Of every file that is listed, one that is not there and one whose name leads elsewhere."""
    out, good = copied(made, tmp_path, layout), manifest(made[layout])
    assert hqconv.plan(out, **ON_CPU)
    for name in (
        *good["files"].keys() - {"README.md"},
        "ghost.json",
        "ghost\0.json",
    ):  # people may edit the card
        for size in (0, 10**9, 10**400, -5):
            words = json.loads(json.dumps(good))
            words["files"].setdefault(name, {"sha256": "0" * 64})["size_bytes"] = size
            write_manifest(out, words)
            with pytest.raises(InputError) as caught:
                hqconv.plan(out, **ON_CPU)
            assert name.split("\0")[0].split("/")[-1] in caught.value.where


def test_a_source_that_lacks_a_file(made: dict[str, Path], tmp_path: Path) -> None:
    out = copied(made, tmp_path)
    (out / "README.md").unlink()  # which is its owner's
    assert hqconv.plan(out, **ON_CPU)
    (out / "tokenizer.json").unlink(missing_ok=True)
    (out / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="not what its manifest lists"):
        hqconv.plan(out, **ON_CPU)


# --- rank files


# --- an end while a large file is hashed


def slow_reads(monkeypatch: pytest.MonkeyPatch, begun: threading.Event) -> None:
    """Rank files are read as if each had 1,000 chunks, a hundred a second."""

    real = file_access.sha256_of

    def slow(path: Path, keep_on: Callable[[], object] | None = None, *_: object) -> str:
        if "experts" in path.parts:
            begun.set()
            for _ in range(1000):
                time.sleep(0.01)
                assert keep_on is not None
                keep_on()
        return real(path, keep_on)

    for module in ("hqconv.io.file_snapshot", "hqconv.conversion.output_folder"):
        monkeypatch.setattr(f"{module}.sha256_of", slow)


@pytest.mark.parametrize("source", ["src", "kernel"])
def test_an_interrupt_does_not_wait_for_a_digest(
    source: str, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the output's files, and of a source that is an artifact."""
    begun, interrupted = threading.Event(), list[float]()
    slow_reads(monkeypatch, begun)

    def interrupt() -> None:
        begun.wait()
        time.sleep(0.2)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(made[source], tmp_path / "out", "int8", Grid(tp=2))
    assert (
        time.monotonic() - interrupted[0] < 60
    )  # two seconds, where other tests do not take the processors
    thread.join()
