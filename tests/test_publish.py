"""`hqconv publish` on a local server: the first night, the second, a changed source, kills; the example workflow."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hqconv
from hqconv.errors import OutputError
from tests.make import hub_server, processes
from tests.make.command import call
from tests.make.conversions import manifest
from tests.make.gguf_models import write_recorded
from tests.make.hub_server import COMMIT
from tests.make.hub_upload import BothHubs, Stored, serve_both
from tests.make.places import REPO
from tests.make.qwen import read_tree, write_qwen3_moe

OPTIONS = ["--schema=mxfp4", "--target=sm90", "--tp=2", "--device=cpu", "--threads=2"]
REQUEST: dict[str, Any] = {"target": "sm90", "tp": 2, "device": "cpu", "threads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "source", num_layers=2)


@pytest.fixture
def hubs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BothHubs]:
    monkeypatch.chdir(tmp_path)
    with serve_both(Path(shutil.copytree(model, tmp_path / "served"))) as found:
        hub_server.use(monkeypatch, found.url, tmp_path / "cache")
        yield found


def publish(source: str | Path = "org/source", schema: str = "mxfp4", **more: Any) -> Any:
    return hqconv.publish(source, "org/name", "out", schema=schema, **REQUEST, **more)


def there(hubs: BothHubs, number: int = -1) -> dict[str, bytes]:
    tree = hubs.uploads.commits["main"][number]
    return {name: stored.data for name, stored in tree.items() if name != ".gitattributes"}


def change(folder: Path) -> None:
    """Another weight."""
    path = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_gguf_model_that_is_named_is_published(hubs: BothHubs, tmp_path: Path) -> None:
    """Not the safetensors beside it, and not another file."""
    pytest.importorskip("gguf")
    (hubs.source.folder / "config.json").unlink()
    for case in ("mixtral", "olmoe"):
        write_recorded(case, hubs.source.folder)
    assert publish("org/source/mixtral.gguf@main", schema="int8").passed
    (file,) = manifest(tmp_path / "out")["source"]["files"]
    assert file["name"] == "mixtral.gguf"
    card = (tmp_path / "out/README.md").read_text()
    assert f"--source org/source/mixtral.gguf --revision {COMMIT}" in card


@pytest.mark.full
def test_night_after_night(hubs: BothHubs, tmp_path: Path) -> None:
    first = publish()
    assert (first.passed, first.was_published, first.commit) == (
        True,
        False,
        hubs.uploads.oid("main"),
    )
    assert there(hubs) == read_tree(tmp_path / "out")

    shutil.rmtree(tmp_path / "out")  # a runner that begins with an empty disk every night
    requests = len(hubs.uploads.sent)
    hubs.source.whole.clear()
    second = publish()
    assert (second.was_published, second.commit, second.converted) == (True, first.commit, None)
    assert not [name for name in hubs.source.whole if name.endswith(".safetensors")]
    assert (len(hubs.uploads.messages), len(hubs.uploads.sent)) == (1, requests)
    assert not (tmp_path / "out").exists()

    change(hubs.source.folder)
    hubs.source.commit = "f" * 40
    third = publish()
    assert (third.passed, third.source["revision"]) == (True, "f" * 40)
    assert there(hubs) == read_tree(tmp_path / "out")
    assert publish(schema="int8").passed
    assert len(hubs.uploads.messages) == 3


def test_a_folder_as_source(hubs: BothHubs, tmp_path: Path) -> None:
    """Times, or digests, tell whether it changed."""
    first = publish(hubs.source.folder)
    assert publish(hubs.source.folder).commit == first.commit
    shutil.rmtree(tmp_path / "out")
    assert publish(hubs.source.folder).commit == first.commit  # made anew, with the same bytes
    assert len(hubs.uploads.messages) == 1
    change(hubs.source.folder)
    assert publish(hubs.source.folder, source_digests=True).commit != first.commit
    shutil.rmtree(tmp_path / "out")
    assert publish(hubs.source.folder).was_published  # by the digests


def test_what_has_a_finding_or_too_large_an_error_is_not_published(
    hubs: BothHubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = publish(max_error=0.01)
    assert (over.passed, over.commit, over.verified) == (False, None, None)
    assert over.over_max_error
    real = hqconv.api.verify

    def verify(out: Path, *arguments: Any, **options: Any) -> Any:
        change(out)
        return real(out, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("hqconv.api.verify", verify)
        found = publish()
    assert (found.passed, found.commit, found.pushed) == (False, None, None)
    assert hubs.uploads.commits == {}
    shutil.rmtree(tmp_path / "out")
    assert publish().passed
    assert not publish(max_error=0.01).passed  # also of what is published already


def test_the_divergence_of_a_published_artifact_is_that_of_its_evaluation(
    hubs: BothHubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be judged is not passed: no evaluation, or one of another manifest."""
    shape = {"manifest_sha256": (str,), "kl": {"mean": (float,)}}
    monkeypatch.setattr("hqconv.artifact.model_card._SHAPE", shape)
    digest = publish().manifest_sha256
    tree, states = hubs.uploads.tree(), hubs.uploads.commits["main"]
    for document, passed in (
        ({}, False),
        ({"manifest_sha256": "0" * 64, "kl": {"mean": 0.01}}, False),
        ({"manifest_sha256": digest, "kl": {"mean": 0.06}}, False),
        ({"manifest_sha256": digest, "kl": {"mean": 0.05}}, True),
    ):
        states.append({**tree, "evaluation.json": Stored(json.dumps(document).encode(), False)})
        report = publish(max_kl=0.05)
        assert (report.was_published, report.over_max_kl) == (True, not passed)
        assert report.passed is passed
    states.append(tree)
    assert (publish(max_kl=0.05).passed, publish().passed) == (False, True)


def test_no_step_takes_another_artifact(hubs: BothHubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process replaces the folder before a step: a whole artifact, but not the one of this request."""

    def replace_before(module: str, step: str) -> Callable[..., Any]:
        real = getattr(importlib.import_module(module), step)

        def run(out: Path, *arguments: Any, **options: Any) -> Any:
            hqconv.convert("org/source", out, **REQUEST, schema="int8", overwrite=True)
            return real(out, *arguments, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr("hqconv.api.verify", replace_before("hqconv.api", "verify"))
        assert not publish().passed
    assert hubs.uploads.commits == {}
    push = replace_before("hqconv.conversion.push", "push")
    monkeypatch.setattr("hqconv.conversion.push.push", push)
    with pytest.raises(OutputError, match="replaced before it was published"):
        publish()
    assert hubs.uploads.commits == {} or there(hubs) == {}


# --- the command -------------------------------------------------------------------------------------------


def test_the_command(hubs: BothHubs) -> None:
    command = ("publish", "org/source", "org/name", "-o", "out", *OPTIONS)
    assert "; skipped: verified, pushed." in call(*command, "--max-error", 0.01).stdout
    failed = call(*command, "--max-error", 0.01, "--json", "-q")
    assert (failed.exit_code, "above --max-error" in failed.stderr) == (1, True)
    assert json.loads(failed.stdout)["over_max_error"]
    shown = call(*command)
    assert "org/name holds the artifact, at commit" in shown.stdout
    assert "PASS  files, weights against" in shown.stdout
    assert re.search(
        r"^Steps: converted in .*, verified in .*, pushed in ", shown.stdout, re.MULTILINE
    )
    document = json.loads(call(*command, "--json", "-q").stdout)
    assert (document["was_published"], document["passed"]) == (True, True)
    assert document["source"] == {"name": "org/source", "revision": COMMIT}
    assert document["commit"] == hubs.uploads.oid("main")
    unknown = call(*command, "--max-kl", 0.05)
    assert (unknown.exit_code, "above --max-kl, or not known" in unknown.stderr) == (1, True)


def hub_environment(hubs: BothHubs, root: Path) -> dict[str, str]:
    """A command's that has nothing but the local server as its Hub, and empty caches."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    hub = {"HF_ENDPOINT": hubs.url, "HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return {**others, **hub, "HF_TOKEN": "hf_x", "PYTHONPATH": str(REPO)}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("moment", ["shard", "batch", "commit", 0, 1])
def test_killed_anywhere_and_run_again(
    hubs: BothHubs, model: Path, tmp_path: Path, moment: str | int
) -> None:
    """The repo holds the old artifact or the new one; the next run ends at the commit of an undisturbed one."""
    publish(schema="int8")
    old = there(hubs)
    hqconv.convert("org/source", tmp_path / "fresh", schema="mxfp4", **REQUEST)
    held, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        held.set()
        go_on.wait(60)

    if moment == "shard":
        hubs.source.before = lambda name: hold() if name.endswith(".safetensors") else None
    elif isinstance(moment, str):
        setattr(hubs.uploads, f"on_{moment}", hold)
    command = [sys.executable, "-m", "hqconv", "publish", "org/source", "org/name", "-o", "out"]
    environment = hub_environment(hubs, tmp_path)
    with processes.Process([*command, *OPTIONS, "-q"], env=environment, cwd=tmp_path) as process:
        if isinstance(moment, str):
            assert held.wait(120)
        else:
            time.sleep(random.Random(moment).uniform(0.5, 6))
        process.send_signal(signal.SIGKILL)
    go_on.set()
    hubs.source.before = hubs.uploads.on_batch = hubs.uploads.on_commit = None
    new = read_tree(tmp_path / "fresh")
    assert there(hubs) in (old, new)
    report = publish()
    assert report.commit == hubs.uploads.oid("main")
    assert there(hubs) == new
    assert len(hubs.uploads.messages) == 2
    states = [there(hubs, number) for number in range(len(hubs.uploads.commits["main"]))]
    assert all(state in ({}, old, new) for state in states)


# --- the workflow of docs/ci.md ----------------------------------------------------------------------------


def workflow(hubs: BothHubs, root: Path, options: str) -> tuple[int, Any]:
    """The step that publishes, as a runner does it: exit code and document."""
    job = yaml.safe_load((REPO / "docs/examples/publish.yml").read_text())["jobs"]["publish"]
    (script,) = (step["run"] for step in job["steps"] if step.get("name") == "publish")
    inputs = {"SOURCE": "org/source", "REPO": "org/name", "OPTIONS": options}
    assert job["env"].keys() - inputs.keys() == {
        *("HF_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS", "HQCONV", "NUMBA_CACHE_DIR")
    }
    command = f'hqconv() {{ "{sys.executable}" -m hqconv "$@"; }}\n{script}'
    environment = {**hub_environment(hubs, root), **inputs}
    done = subprocess.run(["bash", "-ec", command], env=environment, cwd=root, check=False)
    return done.returncode, json.loads((root / "publication.json").read_text())


@pytest.mark.full
def test_the_workflow(hubs: BothHubs, tmp_path: Path) -> None:
    code, first = workflow(hubs, tmp_path, "--target sm90 --tp 2")
    assert (code, first["passed"], first["was_published"]) == (0, True, False)
    assert first["commit"] == hubs.uploads.oid("main")
    code, second = workflow(hubs, tmp_path, "--target sm90 --tp 2")
    assert (code, second["was_published"], second["commit"]) == (0, True, first["commit"])


def test_the_workflow_of_a_request_that_cannot_be_met(hubs: BothHubs, tmp_path: Path) -> None:
    code, document = workflow(hubs, tmp_path, "--target sm90 --tp 5")
    assert (code, document["kind"]) == (2, "error")
    assert "TP sizes that work" in document["remedy"]
    assert hubs.uploads.commits == {}
