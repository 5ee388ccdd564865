"""Artifacts put into a repo of a Hub: what is there at every moment, and what a second push does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hqconv.api import push
from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.model_card import write_evaluation
from hqconv.errors import HqconvError, NetworkError, OutputError, RequestError, VerificationError
from hqconv.schemas.artifact_names import REFERENCE
from hqconv.schemas.grid import Grid
from tests.make import command, hub_server
from tests.make.conversions import evaluation_of, run
from tests.make.hub_upload import UploadHub, serve_uploads
from tests.make.qwen import read_tree, write_qwen3_moe

REPO = "org/name"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    write_qwen3_moe(folder / "src", num_layers=2, num_experts=4)
    run(folder / "src", folder / "old", "int4-g64", Grid(2, 2))
    run(folder / "src", folder / "new", "int8", Grid(2, 1))
    return folder


@pytest.fixture
def out(example: Path, tmp_path: Path) -> Path:
    shutil.copytree(example / "new", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with serve_uploads() as server:
        hub_server.use(monkeypatch, server.url, tmp_path / "cache")
        yield server


def there(hub: UploadHub, number: int = -1) -> dict[str, bytes]:
    return {
        name: stored.data
        for name, stored in hub.commits["main"][number].items()
        if name != ".gitattributes"
    }


def assert_only_whole(hub: UploadHub, *artifacts: Path) -> None:
    """Every commit holds one of these artifacts, complete and alone; the first commit of a repo is empty."""
    whole = [read_tree(artifact) for artifact in artifacts]
    for number in range(len(hub.commits["main"])):
        found = there(hub, number)
        assert found in whole or (number == 0 and not found)


def test_one_commit_holds_all(out: Path, hub: UploadHub) -> None:
    said: list[str] = []
    report = push(out, REPO, announce=said.append)
    assert there(hub) == read_tree(out)
    assert_only_whole(hub, out)
    assert (len(hub.messages), len(hub.commits["main"])) == (1, 2)
    assert (report.num_files, report.repo, report.branch) == (len(read_tree(out)), REPO, None)
    assert 0 < report.num_bytes < sum(map(len, read_tree(out).values()))  # those of the manifest
    assert report.commit == hub.oid("main")
    assert said == [f"hashing and sending {report.num_files} files"]


def test_stopped_anywhere_and_pushed_again(example: Path, out: Path, hub: UploadHub) -> None:
    """Refused at every request in turn: the branch holds the old artifact until it holds the new one."""
    push(example / "old", REPO)
    sent = len(hub.sent)
    num_failed = 0
    while True:
        hub.num_counted, hub.fail_at = 0, 2  # one object or commit succeeds each time
        try:
            push(out, REPO)
            break
        except HqconvError:
            num_failed += 1
            assert there(hub) == read_tree(example / "old")
            assert num_failed < 30
    assert there(hub) == read_tree(out)
    assert num_failed > 1
    assert len(hub.sent) == len(set(hub.sent)) > sent  # no object twice
    assert_only_whole(hub, example / "old", out)
    assert len(hub.messages) == 2


def test_an_evaluation_of_the_artifact_is_pushed(out: Path, hub: UploadHub) -> None:
    """After a first push too; one of another manifest stays here."""
    push(out, REPO)
    write_evaluation(out, evaluation_of(read_manifest(out).sha256))
    assert push(out, REPO).num_files
    assert there(hub) == read_tree(out)
    write_evaluation(out, evaluation_of("0" * 64))
    assert push(out, REPO).num_files == 0


def test_reference_predictions_of_the_artifact_are_pushed(out: Path, hub: UploadHub) -> None:
    push(out, REPO)
    for digest, is_pushed in ((read_manifest(out).sha256, True), ("0" * 64, False)):
        save_file({"token_ids": np.zeros(1)}, out / REFERENCE, {"weights_sha256": digest})
        assert bool(push(out, REPO).num_files) == is_pushed
        assert (there(hub) == read_tree(out)) == is_pushed


def test_files_of_others(example: Path, out: Path, hub: UploadHub) -> None:
    """They stay; those with a name that the artifact needs, and a list of files to ignore, are refused."""
    push(example / "old", REPO)
    hub.tree()["notes.txt"] = hub.tree()["config.json"]
    assert push(out, REPO).num_files
    assert there(hub) == read_tree(out) | {"notes.txt": there(hub)["notes.txt"]}
    for name in ("tokenizer.json", ".gitignore"):
        tree = {name: hub.tree()["README.md"], "README.md": hub.tree()["README.md"]}
        hub.commits["main"].append(tree)
        with pytest.raises(OutputError, match="files of others") as caught:
            push(out, REPO)
        assert caught.value.found == name
        assert hub.tree() == tree


def test_cards_that_people_edited(out: Path, hub: UploadHub) -> None:
    """One that was edited on the Hub stays; one that was edited here is sent."""
    push(out, REPO)
    edited = hub.tree()["README.md"]._replace(data=b"edited on the Hub")
    hub.tree()["README.md"] = edited
    assert push(out, REPO).num_files == 0
    assert there(hub)["README.md"] == b"edited on the Hub"
    (out / "README.md").write_text("edited here")
    push(out, REPO)
    assert there(hub) == read_tree(out)


@pytest.mark.parametrize(
    ("name", "is_published"),
    [("config.json", False), ("model.safetensors", True), ("rank", False), ("hqconv.json", True)],
)
def test_a_flipped_bit_is_never_published(
    example: Path, out: Path, hub: UploadHub, name: str, is_published: bool
) -> None:
    """Not in a small file, nor in a large one; neither over an older artifact nor into an empty repo."""
    if is_published:
        push(example / "old", REPO)
    paths = sorted(out.glob("experts/*/*")) if name == "rank" else [out / name]
    data = bytearray(paths[0].read_bytes())
    data[data.index(b"version") if name == "hqconv.json" else len(data) // 2] ^= 1
    paths[0].write_bytes(data)
    before = there(hub) if is_published else {}
    with pytest.raises(
        VerificationError, match=r"other bytes than the manifest|not those that its digest|damaged"
    ):
        push(out, REPO)
    assert (there(hub) if hub.commits else {}) == before


def test_a_missing_file(out: Path, hub: UploadHub) -> None:
    """It is seen before anything is sent."""
    (out / "model.safetensors").unlink()
    with pytest.raises(VerificationError, match="not whole"):
        push(out, REPO)
    assert not hub.commits


def test_an_artifact_that_is_replaced_meanwhile(example: Path, out: Path, hub: UploadHub) -> None:
    """`convert --overwrite` exchanges the folder after its small files were read: then nothing is published."""
    push(example / "old", REPO)

    def exchange(_: str) -> None:
        shutil.move(out, out.with_name("before"))
        shutil.copytree(example / "old", out)

    with pytest.raises(VerificationError):
        push(out, REPO, announce=exchange)
    assert there(hub) == read_tree(example / "old")


def test_a_file_that_changes_while_it_is_sent(out: Path, hub: UploadHub) -> None:
    """Its time is put back, and the server does not look."""
    path = out / "model.safetensors"
    status = path.stat()

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"!")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    hub.on_batch, hub.checks_digests = change, False
    with pytest.raises(OutputError, match="changed while it was sent"):
        push(out, REPO)
    assert there(hub) == {}


@pytest.mark.parametrize("is_private", [True, False])
def test_private(
    out: Path, tmp_path: Path, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_uploads(private=is_private) as hub:
        hub_server.use(monkeypatch, hub.url, tmp_path / "cache")
        if is_private:
            push(out, REPO, private=True)
            assert there(hub) == read_tree(out)
        else:
            with pytest.raises(RequestError, match="is public"):
                push(out, REPO, private=True)
            assert there(hub) == {}


@pytest.mark.parametrize(
    ("status", "kind"), [(403, RequestError), (400, NetworkError), (429, NetworkError)]
)
def test_what_the_hub_refuses(
    out: Path, hub: UploadHub, status: int, kind: type[HqconvError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    hub.fail_at, hub.status = 1, status
    with pytest.raises(kind) as caught:
        push(out, REPO)
    assert caught.value.remedy


def test_somebody_else_pushes_meanwhile(out: Path, hub: UploadHub) -> None:
    """The commit is made only on what was looked at."""

    def other(_: str) -> None:
        hub.commits["main"].append(hub.tree() | {"notes.txt": hub.tree()[".gitattributes"]})

    with pytest.raises(RequestError, match="Somebody else changed the Hub repo"):
        push(out, REPO, announce=other)
    assert "hqconv.json" not in there(hub)


def test_what_is_no_repo_or_no_artifact(out: Path, hub: UploadHub, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="valid Hub repo id"):
        push(out, "a/b/c")
    with pytest.raises(RequestError, match="not an hqconv artifact"):
        push(tmp_path, REPO)
    assert hub.commits == {}


def test_the_commands(example: Path, tmp_path: Path, hub: UploadHub) -> None:
    def call(*document: object) -> Any:
        done = command.call(*document)
        assert done.exit_code == 0, done.output
        return done

    common = ("--schema", "int8", "--target", "sm90", "--device", "cpu", "-q", "--json")
    done = call("convert", example / "src", "-o", tmp_path / "out", *common)
    document = json.loads(call("push", tmp_path / "out", REPO, "--json", "-q").stdout)
    assert (document["kind"], document["repo"], document["commit"]) == (
        "push",
        REPO,
        hub.oid("main"),
    )
    assert there(hub) == read_tree(tmp_path / "out")
    assert "already holds the artifact" in call("push", tmp_path / "out", REPO).stdout
    document = json.loads(
        call("push", tmp_path / "out", REPO, "--branch", "x", "--json", "-q").stdout
    )
    assert document["manifest_sha256"] == json.loads(done.stdout)["manifest_sha256"]
