"""Conversions starved of disk and interrupted, then resumed: the artifact is the undisturbed one.

`scripts/torture` kills at every call; here is what a resumed conversion does not make again.
"""

from __future__ import annotations

import _thread
import errno
import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.conversion import convert as convert_module
from hqconv.conversion.stages import Progress
from hqconv.errors import OutputError
from hqconv.schemas.grid import ROUND_ROBIN, Grid
from hqconv.schemas.options import LayerChoice, Override
from hqconv.schemas.weight_schema import resolve_schema
from tests.make.conversions import manifest, run, run_until
from tests.make.models import save_model
from tests.make.qwen import set_config
from tests.make.tensors import load_all, snapshot

GRID = Grid(2, 2)
FP8_AT_THE_END = [Override(None, ((-1, -1),), LayerChoice(*[resolve_schema("fp8")] * 2), "a test")]


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("resume") / "src", "deepseek_v3", num_hidden_layers=3)


@pytest.fixture
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqconv.planning.output_units.MAX_SHARD_BYTES", 70_000)


@pytest.fixture(scope="module")
def whole(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of the undisturbed artifact."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hqconv.planning.output_units.MAX_SHARD_BYTES", 70_000)
        run(src, out, "mxfp4", GRID)
    return snapshot(out)


@pytest.mark.usefixtures("several_shards")
def test_finished_groups_are_reported_as_resumed(
    src: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_until(src, out, 2, "mxfp4", GRID)
    done = {path: path.stat().st_ino for path in out.rglob("*.safetensors")}
    seen: list[Progress] = []
    summary = run(src, out, "mxfp4", GRID, resume=True, progress=seen.append)
    assert summary.num_units_resumed == 2
    assert {path: path.stat().st_ino for path in done} == done != {}  # not made again
    assert [one.num_units_done for one in seen[:2]] == [1, 2]
    assert seen[1].resumed_bytes == seen[1].done_bytes == seen[-1].resumed_bytes > 0
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert seen[-1].total_bytes == sum(tensor.nbytes for tensor in load_all(src).values())
    assert snapshot(out) == whole
    assert summary.errors == {
        name: layer["quantization_error"] for name, layer in manifest(out)["blocks"].items()
    }


@pytest.fixture(scope="module")
def begun(src: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished conversion, which refusals leave as it is."""
    out = tmp_path_factory.mktemp("begun") / "out"
    run_until(src, out, 1, "mxfp4", GRID)
    return out


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ({"schema": "int4-g32"}, ("--schema", "mxfp4", "int4-g32")),
        ({"grid": Grid(1, 2)}, ("--tp", "2", "1")),
        ({"grid": Grid(2, 4)}, ("--ep", "2", "4")),
        ({"grid": Grid(2, 2, ROUND_ROBIN)}, ("--expert-placement", "linear", "round_robin")),
        ({"grid": Grid(2, 2, redundant=2)}, ("--redundant-experts", "0", "2")),
        ({"grid": Grid(), "layout": "checkpoint"}, ("--layout", "kernel", "checkpoint")),
        ({"input_schema": "int8"}, ("--input-schema", "a16", "int8")),
        ({"dtype": "float16"}, ("--dtype", "bfloat16", "float16")),
        ({"quantizer": "mse"}, ("--quantizer", "rtn", "mse")),
        (
            {"overrides": FP8_AT_THE_END},
            ("--overrides: model.layers.2.mlp.experts", "absent", '"schema": "fp8"'),
        ),
    ],
    ids=str,
)
def test_another_request_is_not_resumed(
    words: dict[str, Any], difference: tuple[str, str, str], src: Path, begun: Path
) -> None:
    """The message names the option, and both of its values."""
    key, first, second = difference
    before = snapshot(begun)
    request = {"schema": "mxfp4", "grid": GRID, **words}
    with pytest.raises(OutputError, match=f"differs from this one in: {key}") as caught:
        run(src, begun, request.pop("schema"), request.pop("grid"), resume=True, **request)
    assert caught.value.exit_code == 4
    assert first in caught.value.expected
    assert second in caught.value.found
    assert len(caught.value.expected + caught.value.found) < 300
    assert snapshot(begun) == before


def test_another_config_is_not_resumed(src: Path, begun: Path, tmp_path: Path) -> None:
    key = "config.json: routed_scaling_factor"
    other = Path(shutil.copytree(src, tmp_path / "other"))
    set_config(other, routed_scaling_factor=9.0)
    with pytest.raises(OutputError, match=f"differs from this one in: {key}") as caught:
        run(other, begun, "mxfp4", GRID, resume=True)
    assert caught.value.found == "9.0"


def test_other_versions_do_not_resume(
    src: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "__version__", "99.0")
        with pytest.raises(OutputError, match="differs from this one in: hqconv version"):
            run(src, begun, "mxfp4", GRID, resume=True)
    monkeypatch.setattr("hqconv.artifact.build.version", lambda name: "99.0")
    with pytest.raises(OutputError, match="differs from this one in: humming-kernels version"):
        run(src, begun, "mxfp4", GRID, resume=True)


@pytest.mark.usefixtures("several_shards")
@pytest.mark.parametrize(
    ("owner", "call", "at"), [(os, "posix_fallocate", 3), (os, "fsync", 12), (Path, "replace", 2)]
)
def test_a_disk_that_fails_ends_in_one_message_and_can_be_resumed(
    owner: Any, call: str, at: int, src: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    out, real, calls = tmp_path / "out", getattr(owner, call), itertools.count(1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= at:  # a full disk stays full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, call, fail)
        with pytest.raises(OutputError, match="The disk is full"):
            run(src, out, "mxfp4", GRID)
    assert next(calls) > at
    assert not (out / "hqconv.json").exists()
    assert not list(out.rglob("*.safetensors.partial"))
    run(src, out, "mxfp4", GRID, resume=True)
    assert snapshot(out) == whole


@pytest.mark.usefixtures("several_shards")
def test_an_interrupt_waits_for_the_workers_and_can_be_resumed(
    src: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while workers write: none of them may write after the files were closed and removed."""
    from hqconv.conversion.output_folder import UnitWriter

    out, late, abandoned = tmp_path / "out", [], []
    real_write, real_abandon = UnitWriter.write_at, UnitWriter.abandon

    def write(self: UnitWriter, file: int, offset_bytes: int, data: Any) -> None:
        _thread.interrupt_main()
        torch.empty(400_000).normal_()  # still at it when the main thread wakes
        if self in abandoned:
            late.append(offset_bytes)
        real_write(self, file, offset_bytes, data)

    def abandon(self: UnitWriter) -> None:
        abandoned.append(self)
        real_abandon(self)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in a shell's background jobs
    try:
        with monkeypatch.context() as patch:
            patch.setattr(UnitWriter, "write_at", write)
            patch.setattr(UnitWriter, "abandon", abandon)
            with pytest.raises(KeyboardInterrupt):
                run(src, out, "mxfp4", GRID)
    finally:
        signal.signal(signal.SIGINT, before)
    assert abandoned
    assert not late
    assert not list(out.rglob("*.partial"))
    run(src, out, "mxfp4", GRID, resume=True)
    assert snapshot(out) == whole


# --- a source that another one takes the place of, with its times (`cp -p`, `rsync -t`)


def take_the_place(other: Path, src: Path, *, is_in_place: bool) -> None:
    """Put files of the same names and sizes where the source's are."""
    for path in (path for path in src.rglob("*") if path.is_file()):
        status, new = path.stat(), other / path.relative_to(src)
        if is_in_place:
            path.write_bytes(new.read_bytes())
        else:
            shutil.copy(new, path.with_name("new"))
            path.with_name("new").replace(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_size == status.st_size


@pytest.mark.parametrize(
    ("kind", "mode"), [("folder", "resume"), ("hashed", "update"), ("artifact", "part")]
)
def test_no_artifact_is_of_two_states(kind: str, mode: str, tmp_path: Path) -> None:
    """What was made of the old files is made anew."""
    src = save_model(tmp_path / "src", "qwen3_moe", num_experts=2)
    changed = Path(shutil.copytree(src, tmp_path / "two"))
    for path in changed.glob("*.safetensors"):
        save_file({name: -one for name, one in load_file(path).items()}, path, {"format": "pt"})
    schema, out = "mxfp4", tmp_path / "out"
    if kind == "artifact":
        schema = "mxfp8"
        for folder in (src, changed):
            run(folder, tmp_path / "artifact", "mxfp4", source_digests=True)
            shutil.rmtree(folder)
            (tmp_path / "artifact").rename(folder)
    options: dict[str, Any] = {"source_digests": kind == "hashed"}
    again: list[dict[str, Any]] = [{mode: True}]
    if mode == "part":
        again = [{"part": "2/2"}, {"part": "1/2"}]
        assert not run(src, out, schema, part="1/2", **options).is_complete
    else:
        run_until(src, out, 1, schema, **options)
    take_the_place(changed, src, is_in_place=mode != "update")
    reports = [run(src, out, schema, **modes, **options) for modes in again]
    run(src, tmp_path / "fresh", schema, **options)
    assert reports[-1].is_complete
    assert snapshot(out) == snapshot(tmp_path / "fresh")
    assert any("must be made anew" in text for report in reports for text in report.warnings)
