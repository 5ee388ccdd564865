"""A source that changes during a conversion, or cannot be read to its end: nothing is sealed, and the file is named."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hqconv.conversion import convert as conversion
from hqconv.conversion import output_folder
from hqconv.conversion.stages import Progress
from hqconv.errors import HqconvError, InputError, OutputError
from hqconv.io import file_snapshot
from hqconv.schemas.grid import Grid
from tests.make import models
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
JOURNAL = ".hqconv-progress.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several shards, with words of all kinds."""
    src = models.save_model(
        tmp_path_factory.mktemp("models") / "src", "qwen3_moe", max_shard_size="300KB"
    )
    assert len(list(src.glob("model-*.safetensors"))) > 2
    (src / "tokenizer.json").write_text("{}")
    (src / "more").mkdir()
    (src / "more/chat.jinja").write_text("{{ }}")
    return src


@pytest.fixture
def src(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "src")
    return tmp_path / "src"


def rewrite(path: Path) -> None:
    """In place, bytes of the same number, as another process would that trains on."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(byte)


def replace(path: Path) -> None:
    """By another file of the same size and time, as `rsync` and `cp -p` do."""
    status, new = path.stat(), path.with_name("new")
    new.write_bytes(path.read_bytes())
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)


def when(
    is_time: Callable[[Progress], bool], change: Callable[[], None]
) -> Callable[[Progress], None]:
    """Change something once."""
    done: list[bool] = []

    def call(progress: Progress) -> None:
        if not done and is_time(progress):
            done.append(True)
            change()

    return call


def assert_noticed(caught: pytest.ExceptionInfo[InputError], path: Path, out: Path) -> None:
    assert caught.value.exit_code == 3
    assert str(path) in caught.value.where
    assert not (out / "hqconv.json").exists()


def put_back(path: Path) -> None:
    """In place, with its time set back, as `cp -p` onto it does."""
    status = path.stat()
    rewrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def file_of(src: Path, name: str) -> Path:
    shards = sorted(src.glob("model-*.safetensors"))
    return {"first": shards[0], "last": shards[-1]}.get(name, src / name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", rewrite),
        ("model.safetensors.index.json", put_back),
        ("tokenizer.json", replace),
        ("more/chat.jinja", Path.unlink),
        ("first", put_back),
        ("last", replace),
    ],
)
def test_every_file_is_looked_at_again_in_the_end(
    src: Path,
    tmp_path: Path,
    name: str,
    change: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = file_of(src, name)
    out, real = tmp_path / "out", conversion.completed_manifest

    def build(*words: Any) -> Any:
        change(path)
        return real(*words)

    monkeypatch.setattr(conversion, "completed_manifest", build)
    with pytest.raises(InputError, match="changed since it was opened") as caught:
        run(src, out, "mxfp4")
    assert_noticed(caught, path, out)


@pytest.mark.parametrize("change", [rewrite, replace, put_back])
def test_a_shard_that_changes_while_a_layer_is_made_of_it(
    src: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    index = json.loads((src / "model.safetensors.index.json").read_text())["weight_map"]
    path, out = src / index[f"{LAYER}.0.gate_proj.weight"], tmp_path / "out"
    with pytest.raises(InputError, match="changed") as caught:
        run(src, out, "mxfp4", progress=when(lambda at: at.unit == LAYER, lambda: change(path)))
    assert_noticed(caught, path, out)
    groups = [json.loads(line).get("unit") for line in (out / JOURNAL).read_text().splitlines()]
    assert LAYER not in groups


def test_a_tokenizer_that_changed_is_taken_as_it_is_by_the_next_run(
    src: Path, tmp_path: Path
) -> None:
    out, path = tmp_path / "out", src / "tokenizer.json"
    change = when(lambda at: at.num_units_done == 1, lambda: path.write_text('{"new": 1}'))
    with pytest.raises(InputError, match=r"changed since(.|\n)*--resume"):
        run(src, out, "mxfp4", progress=change)
    summary = run(src, out, "mxfp4", resume=True)
    assert summary.num_units_resumed > 0
    assert (out / "tokenizer.json").read_text() == '{"new": 1}'


# --- which side failed


@pytest.mark.parametrize(("side", "kind"), [("source", InputError), ("output", OutputError)])
def test_hashing_says_which_side_failed(
    tmp_path: Path, side: str, kind: type[HqconvError], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    run(write_qwen3_moe(tmp_path / "model"), src, "fp8", Grid(tp=2))

    module, real = {"source": file_snapshot, "output": output_folder}[side], file_snapshot.sha256_of

    def fail(path: Path, *_: object) -> str:
        if "experts" not in path.parts:
            return real(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "sha256_of", fail)
    with pytest.raises(
        kind, match="source" if side == "source" else "Writing the output failed"
    ) as caught:
        run(src, out, "source")
    assert caught.value.where.startswith(str(src if side == "source" else out))
    assert not (out / "hqconv.json").exists()
