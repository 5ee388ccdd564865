"""Files that a manifest lists outside the artifact: no reader follows the name or link, and none is removed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.api import push
from hqconv.artifact.manifest import is_path_inside, read_manifest
from hqconv.errors import HqconvError, InputError, OutputError, VerificationError
from hqconv.serving.artifact_view import ArtifactLocation, open_artifact_view
from tests.make import hub_server
from tests.make.conversions import run, write_manifest
from tests.make.hub_upload import UploadHub, serve_uploads
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
LINK = "tokenizer_config.json"  # a listed file in whose place a link lies
NAMES = {
    "../secret": False,
    "a/../../secret": False,
    "a/./b": False,
    "./a": False,
    "a//b": False,
    "a/": False,
    "/etc/hostname": False,
    "": False,
    ".": False,
    "..": False,
    "..\\secret": True,  # a plain name where folders are parted by /
    "C:\\secret": True,
    "a\0b": False,
    "a": True,
    "a..b/c": True,
    "experts/tp0-ep0/x.safetensors": True,
}


@pytest.mark.parametrize(("name", "is_inside"), NAMES.items(), ids=[repr(name) for name in NAMES])
def test_names(name: str, is_inside: bool) -> None:
    assert is_path_inside(name) == is_inside


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("listed")
    src = write_qwen3_moe(folder / "src", num_layers=1, num_experts=4)
    (src / LINK).write_text("{}")
    run(src, folder / "out", "int4-g64")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with serve_uploads() as server:
        hub_server.use(monkeypatch, server.url, tmp_path / "cache")
        yield server


def listed_elsewhere(made: Path, tmp_path: Path, how: str) -> Path:
    """A copy of the artifact that lists a secret outside of it: by its name or by a link, with size and digest."""
    secret, out = tmp_path / "secret", Path(shutil.copytree(made / "out", tmp_path / "out"))
    secret.write_bytes(b"not yours")
    names = {"absolute": str(secret), "upwards": "../secret"}
    name = names.get(how, LINK if how == "link" else "more/secret")
    if how == "link":
        (out / LINK).unlink()
        (out / LINK).symlink_to(secret)
    elif how == "linked folder":
        (out / "more").symlink_to(tmp_path)
    words = json.loads((out / "hqconv.json").read_bytes())
    words["files"][name] = {"size_bytes": 9, "sha256": hashlib.sha256(b"not yours").hexdigest()}
    write_manifest(out, words)
    return out


READERS: dict[str, Callable[[Path], object]] = {
    "read_manifest": read_manifest,
    "push": lambda out: push(out, "org/name"),
    "load": lambda out: hqconv.load(out, layer=LAYER),
    "dequantize": lambda out: hqconv.dequantize(out, layer=LAYER),
    "serving": lambda out: open_artifact_view(ArtifactLocation(str(out))),
    "inspect": hqconv.inspect,
    "plan": lambda out: hqconv.plan(out, schema="source", target="sm90"),
    "convert": lambda out: run(out, out.with_name("again"), "source"),
}
HOW = ("absolute", "upwards", "link", "linked folder")


@pytest.mark.parametrize("how", HOW)
def test_no_reader_follows(how: str, made: Path, tmp_path: Path, hub: UploadHub) -> None:
    out = listed_elsewhere(made, tmp_path, how)
    for reader, read in READERS.items():
        kind: type[HqconvError] = InputError if reader in ("plan", "convert") else VerificationError
        with pytest.raises(
            kind,
            match=r"manifest is damaged(.|\n)*files: (.|\n)*inside the artifact|in the artifact",
        ):
            read(out)
    report = hqconv.verify(out)
    assert not report.passed
    assert [one.what for one in report.results[0].findings] == [
        "The artifact's manifest is damaged."
    ]
    assert not hub.commits
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("how", HOW)
def test_overwriting_touches_nothing_elsewhere(how: str, made: Path, tmp_path: Path) -> None:
    """A name that leads out is refused; of a link the link is removed, and not what it leads to."""
    out = listed_elsewhere(made, tmp_path, how)
    convert: Callable[[], Any] = lambda: run(made / "src", out, "int4-g64", overwrite=True)  # noqa: E731
    if how in ("link", "linked folder"):
        convert()
        assert hqconv.verify(out, device="cpu").passed
    else:
        with pytest.raises(OutputError, match="manifest of the artifact to replace cannot be read"):
            convert()
        assert (out / "hqconv.json").is_file()
    assert (tmp_path / "secret").read_bytes() == b"not yours"


def test_links_that_stay_inside_and_the_hubs_cache(made: Path, tmp_path: Path) -> None:
    """As in a snapshot of the Hub's cache, and a file that is listed twice."""
    repo = tmp_path / "models--org--name"
    snapshot, blobs = repo / "snapshots" / ("0" * 40), repo / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(
        sorted(one for one in (made / "out").rglob("*") if one.is_file())
    ):
        shutil.copy(path, blobs / str(number))
        link = snapshot / path.relative_to(made / "out")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    assert read_manifest(snapshot, is_sealed=True).files
    out = Path(shutil.copytree(made / "out", tmp_path / "out"))
    (out / "same.json").symlink_to(LINK)
    words = json.loads((out / "hqconv.json").read_bytes())
    words["files"]["same.json"] = words["files"][LINK]
    write_manifest(out, words)
    assert "same.json" in read_manifest(out).files
