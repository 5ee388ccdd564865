"""Artifacts put into a repo of a Hub: what is there at every moment, and what a second push does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download
from typer.testing import CliRunner

from hqconv.api import push
from hqconv.cli.app import app
from hqconv.errors import HqconvError, NetworkError, OutputError, RequestError, VerificationError
from hqconv.io.hub_upload import BranchFiles, HubBranch, git_digest
from hqconv.schemas.grid import Grid
from tests.make import hub_server
from tests.make.conversions import assert_verified, run
from tests.make.hub_upload import UploadHub, serve_uploads
from tests.make.qwen import write_qwen3_moe

REPO = "org/name"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    write_qwen3_moe(folder / "src", num_layers=2, num_experts=4)
    run(folder / "src", folder / "old", "int4-g64", Grid(2, 2))
    run(folder / "src", folder / "new", "int8", Grid(2, 1))
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "new", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with serve_uploads() as made:
        hub_server.use(monkeypatch, made.url, tmp_path / "cache")
        yield made


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def there(hub: UploadHub, number: int = -1, branch: str = "main") -> dict[str, bytes]:
    return {name: stored.data for name, stored in hub.commits[branch][number].items() if name != ".gitattributes"}


def assert_only_whole(hub: UploadHub, *artifacts: Path, branch: str = "main") -> None:
    """Whatever anybody could have downloaded is one of these artifacts, or none."""
    whole = [files_of(artifact) for artifact in artifacts]
    for number in range(len(hub.commits[branch])):
        found = there(hub, number, branch)
        assert "hqconv.json" not in found or found in whole


def test_the_manifest_comes_last(out: Path, hub: UploadHub) -> None:
    said: list[str] = []
    report = push(out, REPO, announce=said.append)
    assert there(hub) == files_of(out)
    assert_only_whole(hub, out)
    assert hub.messages[-1].startswith("Add the manifest")
    assert "hqconv.json" not in there(hub, -2)
    assert (report.num_files, report.repo, report.branch) == (len(files_of(out)), REPO, None)
    assert report.num_bytes == sum(map(len, files_of(out).values()))
    assert report.commit == hub.oid("main")
    assert len(said) == len(hub.messages) - 1


def test_what_is_downloaded_verifies(made: Path, out: Path, hub: UploadHub, tmp_path: Path) -> None:
    push(out, REPO)
    with hub_server.serve(hub.write(tmp_path / "served"), REPO) as served, pytest.MonkeyPatch.context() as patch:
        hub_server.use(patch, served.url, tmp_path / "cache2")
        snapshot_download(REPO, local_dir=tmp_path / "down", endpoint=served.url)
    assert (tmp_path / "down/.cache/huggingface").is_dir()
    assert_verified(tmp_path / "down", made / "src")


def test_pushed_again_nothing_is_sent(out: Path, hub: UploadHub) -> None:
    push(out, REPO)
    before = (len(hub.sent), len(hub.commits["main"]))
    report = push(out, REPO)
    assert (report.num_files, report.num_bytes) == (0, 0)
    assert (len(hub.sent), len(hub.commits["main"])) == before
    assert report.commit == hub.oid("main")


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_stopped_anywhere_and_pushed_again(
    out: Path, hub: UploadHub, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at the n-th object or commit; the next push goes on."""
    monkeypatch.setattr("hqconv.conversion.push._MAX_FILES", batch)
    num_failed = 0
    while True:
        hub.num_counted, hub.fail_at = 0, 4
        try:
            push(out, REPO)
            break
        except HqconvError:
            num_failed += 1
            assert "hqconv.json" not in there(hub)
            assert num_failed < 30
    assert there(hub) == files_of(out)
    assert num_failed > 1
    assert len(hub.sent) == len(set(hub.sent))  # no object twice
    assert_only_whole(hub, out)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fail_at", [*range(1, 8), None])
def test_another_artifact_over_an_old_one(made: Path, out: Path, hub: UploadHub, fail_at: int | None) -> None:
    """Its files that the new one lacks go with its manifest, in one commit; killed, the repo holds no artifact."""
    push(made / "old", REPO)
    hub.num_counted, hub.fail_at = 0, fail_at
    if fail_at is not None:
        with pytest.raises(HqconvError):
            push(out, REPO)
        hub.fail_at = None
    push(out, REPO)
    assert there(hub) == files_of(out)
    assert_only_whole(hub, made / "old", out)


def test_files_of_others_are_refused(made: Path, out: Path, hub: UploadHub) -> None:
    push(made / "old", REPO)
    hub.tree()["notes.txt"] = hub.tree()["config.json"]
    before = there(hub)
    with pytest.raises(OutputError, match="not the artifact's") as caught:
        push(out, REPO)
    assert caught.value.found == "notes.txt"
    assert there(hub) == before


def test_a_branch(made: Path, out: Path, hub: UploadHub) -> None:
    push(made / "old", REPO)
    report = push(out, REPO, branch="int8")
    assert report.branch == "int8"
    assert there(hub) == files_of(made / "old")
    assert there(hub, branch="int8") == files_of(out)
    assert_only_whole(hub, made / "old", out, branch="int8")


def test_cards_that_people_edited(out: Path, hub: UploadHub) -> None:
    """One that was edited on the Hub stays; one that was edited here is sent."""
    push(out, REPO)
    edited = hub.tree()["README.md"]._replace(data=b"edited on the Hub")
    hub.tree()["README.md"] = edited
    assert push(out, REPO).num_files == 0
    assert there(hub)["README.md"] == b"edited on the Hub"
    (out / "README.md").write_text("edited here")
    push(out, REPO)
    assert there(hub) == files_of(out)


def test_a_damaged_artifact(out: Path, hub: UploadHub) -> None:
    """A flipped bit shows when it has arrived, and no manifest follows; a missing file before anything is sent."""
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerificationError, match="other bytes than the manifest"):
        push(out, REPO)
    assert "hqconv.json" not in there(hub)
    path.unlink()
    before = len(hub.messages)
    with pytest.raises(VerificationError, match="not whole"):
        push(out, REPO)
    assert len(hub.messages) == before


def test_a_repo_that_ignores_files(out: Path, hub: UploadHub) -> None:
    hub.ignored = {"tokenizer.json"}
    with pytest.raises(OutputError, match="did not take"):
        push(out, REPO)
    assert "hqconv.json" not in there(hub)


@pytest.mark.parametrize("is_private", [True, False])
def test_private(out: Path, tmp_path: Path, is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_uploads(private=is_private) as hub:
        hub_server.use(monkeypatch, hub.url, tmp_path / "cache")
        if is_private:
            push(out, REPO, private=True)
            assert there(hub) == files_of(out)
        else:
            with pytest.raises(RequestError, match="is public"):
                push(out, REPO, private=True)
            assert there(hub) == {}


@pytest.mark.parametrize(("status", "kind"), [(403, RequestError), (400, NetworkError), (412, RequestError)])
def test_what_the_hub_refuses(
    out: Path, hub: UploadHub, status: int, kind: type[HqconvError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqconv.conversion.push._MAX_FILES", 1)  # a commit comes before an object
    hub.fail_at, hub.status = 1, status
    with pytest.raises(kind) as caught:
        push(out, REPO)
    assert caught.value.remedy


def test_somebody_else_pushes_meanwhile(made: Path, out: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest comes only if the branch is what was looked at."""
    real = HubBranch.state

    def state(self: HubBranch) -> BranchFiles:
        found = real(self)
        if hub.messages:
            hub.commits["main"].append(hub.tree() | {"model.safetensors": hub.tree()["README.md"]})
        return found

    monkeypatch.setattr(HubBranch, "state", state)
    with pytest.raises(RequestError, match="Somebody else changed the repo"):
        push(out, REPO)
    assert "hqconv.json" not in there(hub)


def test_what_is_no_repo_or_no_artifact(out: Path, hub: UploadHub, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no valid name"):
        push(out, "a/b/c")
    with pytest.raises(RequestError, match="not an hqconv artifact"):
        push(tmp_path, REPO)
    assert hub.commits == {}


def test_the_commands(made: Path, tmp_path: Path, hub: UploadHub) -> None:
    def call(*words: object) -> Any:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return done

    common = ("--schema", "int8", "--target", "sm90", "--device", "cpu", "-q", "--json")
    done = call("convert", made / "src", "-o", tmp_path / "out", *common, "--push-to", REPO)
    words = json.loads(done.stdout)["pushed"]
    assert (words["kind"], words["repo"], words["commit"]) == ("push", REPO, hub.oid("main"))
    assert there(hub) == files_of(tmp_path / "out")
    assert "already holds the artifact" in call("push", tmp_path / "out", REPO).stdout
    words = json.loads(call("push", tmp_path / "out", REPO, "--branch", "x", "--json", "-q").stdout)
    assert words["manifest_sha256"] == json.loads(done.stdout)["manifest_sha256"]
    done = CliRunner().invoke(app, ["convert", str(made / "src"), *common[:4], "--private"])
    assert done.exit_code == 2


def test_gits_name_of_a_file() -> None:
    assert git_digest(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert constants.HF_HUB_OFFLINE is False
