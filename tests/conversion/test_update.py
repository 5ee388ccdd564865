"""`--update`: an artifact of the same request and source is left, and everything else becomes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hqconv.conversion.output_folder import side_folder
from tests.make import command, hub_server
from tests.make.conversions import run, run_until
from tests.make.damage import flip
from tests.make.models import save_model
from tests.make.tensors import snapshot


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return save_model(tmp_path / "src", "qwen3_moe", num_experts=3)


def renew(src: Path | str, out: Path, schema: str = "mxfp4", **options: Any) -> Any:
    return run(src, out, schema, update=True, **options)  # type: ignore[arg-type]


def times(out: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def fresh(src: Path, out: Path) -> dict[str, str]:
    """The files of a new artifact."""
    run(src, out, "mxfp4", source_digests=True)
    return snapshot(out)


def test_the_same_request_and_source_change_nothing(src: Path, tmp_path: Path) -> None:
    """An artifact that was made without digests is made once more: its source may have changed."""
    out = tmp_path / "out"
    run(src, out, "mxfp4")
    assert "--source-digests" in renew(src, out).replaced_because
    before = times(out)
    report = renew(src, out)
    assert (report.was_finished, report.replaced_because) == (True, "")
    assert times(out) == before
    assert report.errors
    assert not side_folder(out).exists()


@pytest.mark.parametrize("name", ["weights", "tokenizer_config.json", "config.json", "new"])
def test_a_changed_source_replaces_the_artifact(src: Path, tmp_path: Path, name: str) -> None:
    """A changed bit is enough, also where size and modification time stay."""
    (src / "tokenizer_config.json").write_text('{"a": "b"}')
    out = tmp_path / "out"
    renew(src, out)
    if name == "new":
        (src / "added_tokens.json").write_text("{}")
    elif name == "config.json":
        document = json.loads((src / name).read_bytes())
        (src / name).write_text(json.dumps({**document, "note": "x"}))
    else:
        flip(sorted(src.glob("*.safetensors"))[0] if name == "weights" else src / name, -2)
    report = renew(src, out)
    assert not report.was_finished
    assert report.replaced_because
    assert snapshot(out) == fresh(src, tmp_path / "fresh")
    assert renew(src, out).was_finished


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_damaged_artifact_is_made_anew(src: Path, tmp_path: Path, is_missing: bool) -> None:
    out = tmp_path / "out"
    renew(src, out)
    before, path = snapshot(out), next(out.glob("experts/*/*"))
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert path.name in renew(src, out).replaced_because
    assert snapshot(out) == before


def test_a_source_that_is_an_artifact(src: Path, tmp_path: Path) -> None:
    run(src, tmp_path / "first", "int4-g32")
    renew(tmp_path / "first", tmp_path / "out", "source")
    assert renew(tmp_path / "first", tmp_path / "out", "source").was_finished
    run(src, tmp_path / "first", "int8", overwrite=True)
    assert renew(tmp_path / "first", tmp_path / "out", "source").replaced_because


# --- unfinished conversions --------------------------------------------------------------------------------


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("is_changed", [False, True])
def test_an_unfinished_conversion(
    src: Path, tmp_path: Path, has_old: bool, is_changed: bool
) -> None:
    """It is resumed, or started anew if the source changed since; an old artifact stays whole meanwhile."""
    out = tmp_path / "out"
    old = None
    if has_old:
        renew(src, out, "int8")
        old = snapshot(out)
    run_until(src, out, 1, "mxfp4", update=True)
    assert old is None or snapshot(out) == old
    if is_changed:
        flip(sorted(src.glob("*.safetensors"))[-1])
        os.utime(sorted(src.glob("*.safetensors"))[-1])
    report = renew(src, out)
    assert report.num_units_resumed > 0 or is_changed
    assert snapshot(out) == fresh(src, tmp_path / "fresh")
    assert not side_folder(out).exists()


def test_another_unfinished_conversion_beside_the_right_artifact(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    renew(src, out)
    before = snapshot(out)
    run_until(src, out, 1, "int8", overwrite=True)
    assert side_folder(out).exists()
    assert renew(src, out).was_finished
    assert snapshot(out) == before
    assert not side_folder(out).exists()


# --- a source on the Hub -----------------------------------------------------------------------------------


def test_a_commit_is_converted_once(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second night reads headers only; a new commit is converted."""
    out = tmp_path / "out"
    with hub_server.serve(src) as server:
        hub_server.use(monkeypatch, server.url, tmp_path / "cache")
        renew("org/name", out)
        before = times(out)
        server.whole.clear()
        report = renew("org/name", out)
        assert report.was_finished
        assert server.whole == []
        assert times(out) == before
        server.commit = "f" * 40
        flip(next(iter(server.folder.glob("*.safetensors"))))
        report = renew("org/name", out)
        assert "source" in report.replaced_because
        assert report.plan.source.revision == "f" * 40


def test_the_command(src: Path, tmp_path: Path) -> None:
    words = ["convert", src, "-o", tmp_path / "out", "--schema", "mxfp4", "--target", "sm90"]

    def call(*more: str) -> Any:
        done = command.call(*words, "--device", "cpu", "--update", *more)
        assert done.exit_code == 0, done.output
        return done

    assert json.loads(call("--json", "-q").stdout)["was_finished"] is False
    assert "already finished: nothing to do" in " ".join(call().stdout.split())
    flip(sorted(src.glob("*.safetensors"))[0])
    document = json.loads(call("--json", "-q").stdout)
    assert document["was_finished"] is False
    assert "other bytes" in document["replaced_because"]
    call("--dry-run")
