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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.errors import HqconvError, OutputError, RequestError
from tests.make import hub_server, processes
from tests.make.conversions import manifest
from tests.make.gguf_models import write_recorded
from tests.make.hub_server import COMMIT
from tests.make.hub_upload import BothHubs, serve_both
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

WORKFLOW = yaml.safe_load((REPO / "docs/examples/publish.yml").read_text())
INPUTS = {
    "source": "org/source",
    "repo": "org/name",
    "schema": "mxfp4",
    "options": "--target sm90 --tp 2",
}
OPTIONS = (
    "--schema",
    "mxfp4",
    "--target",
    "sm90",
    "--tp",
    "2",
    "--device",
    "cpu",
    "--threads",
    "2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "source", num_layers=2)


@pytest.fixture
def hubs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BothHubs]:
    monkeypatch.chdir(tmp_path)
    with serve_both(Path(shutil.copytree(model, tmp_path / "served"))) as found:
        hub_server.use(monkeypatch, found.url, tmp_path / "cache")
        yield found


def publish(source: str | Path = "org/source", schema: str = "mxfp4", **options: Any) -> Any:
    words = {"target": "sm90", "tp": 2, "device": "cpu", "threads": 2, "max_memory": "1GiB"}
    return hqconv.publish(source, "org/name", "out", schema=schema, **{**words, **options})


def there(hubs: BothHubs, number: int = -1) -> dict[str, bytes]:
    tree = hubs.uploads.commits["main"][number]
    return {name: stored.data for name, stored in tree.items() if name != ".gitattributes"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def change(folder: Path) -> None:
    """Another weight."""
    path = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("named", ["mixtral.gguf@main", ":mixtral"])
def test_the_gguf_model_that_is_named_is_published(
    hubs: BothHubs, tmp_path: Path, named: str
) -> None:
    """Not the safetensors beside it, and not another file."""
    pytest.importorskip("gguf")
    (hubs.source.folder / "config.json").unlink()
    for case in ("mixtral", "olmoe"):
        write_recorded(case, hubs.source.folder)
    first = publish(
        f"org/source{named}" if named.startswith(":") else f"org/source/{named}", schema="int8"
    )
    assert first.passed
    assert [file["name"] for file in manifest(tmp_path / "out")["source"]["files"]] == [
        "mixtral.gguf"
    ]
    assert (
        f"--source org/source/mixtral.gguf --revision {COMMIT}"
        in (tmp_path / "out/README.md").read_text()
    )


@pytest.mark.full
def test_night_after_night(hubs: BothHubs, tmp_path: Path) -> None:
    first = publish()
    assert (first.passed, first.was_published, first.commit) == (
        True,
        False,
        hubs.uploads.oid("main"),
    )
    assert {result.name: result.status for result in first.verified.results}["weights"] == "pass"
    assert there(hubs) == files_of(tmp_path / "out")
    requests = len(hubs.uploads.sent)

    hubs.source.whole.clear()
    second = publish()
    assert (second.was_published, second.commit, second.converted) == (True, first.commit, None)
    assert not [name for name in hubs.source.whole if name.endswith(".safetensors")]
    assert (len(hubs.uploads.messages), len(hubs.uploads.sent)) == (1, requests)

    shutil.rmtree(tmp_path / "out")  # a runner that begins with an empty disk every night
    assert publish().was_published
    assert not (tmp_path / "out").exists()

    change(hubs.source.folder)
    hubs.source.commit = "f" * 40
    third = publish()
    assert (third.passed, third.converted.plan.source.revision) == (True, "f" * 40)
    assert there(hubs) == files_of(tmp_path / "out")
    assert len(hubs.uploads.messages) == 2
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


def test_gates(hubs: BothHubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large an error, or a finding, and nothing is published."""
    over = publish(max_error=0.01)
    assert (over.passed, over.commit, over.verified) == (False, None, None)
    assert over.over_max_error
    assert hubs.uploads.commits == {}
    real = hqconv.api.verify

    def damage(out: Path, *words: Any, **options: Any) -> Any:
        path = next(out.glob("experts/*/*"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return real(out, *words, **options)

    with monkeypatch.context() as patch:
        patch.setattr("hqconv.api.verify", damage)
        found = publish()
    assert (found.passed, found.commit, found.pushed) == (False, None, None)
    assert hubs.uploads.commits == {}
    shutil.rmtree(tmp_path / "out")
    assert publish().passed
    assert not publish(max_error=0.01).passed  # also of what is published already


@pytest.mark.parametrize("step", ["verify", "push_artifact"])
def test_no_step_takes_another_artifact(
    hubs: BothHubs, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces the folder before a step: a whole artifact, but not the one of this request."""
    module, name = (
        ("hqconv.api", "verify") if step == "verify" else ("hqconv.conversion.push", "push")
    )
    real = getattr(importlib.import_module(module), name)

    def replaced(out: Path, *words: Any, **options: Any) -> Any:
        hqconv.convert(
            "org/source", out, schema="int8", target="sm90", device="cpu", overwrite=True
        )
        return real(out, *words, **options)

    monkeypatch.setattr(f"{module}.{name}", replaced)
    with pytest.raises(OutputError, match="replaced before it was published"):
        publish()
    assert hubs.uploads.commits == {} or there(hubs) == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checks", [None, ["weights"]])
@pytest.mark.parametrize("name", ["experts/*/*", "model*.safetensors", "tokenizer.json"])
def test_a_damaged_artifact_is_made_again(
    hubs: BothHubs, tmp_path: Path, name: str, checks: list[str] | None
) -> None:
    """Its files have their sizes, so that an update leaves it; also where no check reads the file."""
    publish(hubs.source.folder)
    path = next((tmp_path / "out").glob(name))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    old, hubs.uploads.commits["main"] = (
        hubs.uploads.commits["main"],
        hubs.uploads.commits["main"][:1],
    )
    report = publish(hubs.source.folder, checks=checks)
    assert report.passed
    assert "has a finding" in report.converted.replaced_because
    assert there(hubs) == files_of(tmp_path / "out")
    assert hubs.uploads.commits["main"][-1] == old[-1]


def test_files_of_others_on_the_branch(hubs: BothHubs, tmp_path: Path) -> None:
    """They stay, and an incomplete branch gets what it lacks."""
    publish()
    tree = hubs.uploads.commits["main"][-1]
    stray = {"notes.txt": tree["config.json"]}
    hubs.uploads.commits["main"].append(dict(tree) | stray)
    assert publish().was_published
    incomplete = {name: file for name, file in tree.items() if name != "SHA256SUMS"}
    hubs.uploads.commits["main"].append(incomplete | stray)
    assert publish().pushed.num_files
    assert there(hubs) == files_of(tmp_path / "out") | {"notes.txt": stray["notes.txt"].data}


@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_hub_that_fails(hubs: BothHubs, fail_at: int) -> None:
    hubs.uploads.fail_at = fail_at
    with pytest.raises(HqconvError):
        publish()
    assert not hubs.uploads.commits or there(hubs) == {}
    hubs.uploads.fail_at = None
    report = publish()
    assert report.converted.was_finished
    assert report.commit == hubs.uploads.oid("main")
    assert len(hubs.uploads.messages) == 1


# --- the command -------------------------------------------------------------------------------------------


def test_the_command(hubs: BothHubs, tmp_path: Path) -> None:
    def call(*words: str, code: int = 0) -> Any:
        done = CliRunner().invoke(
            app, ["publish", "org/source", "org/name", "-o", "out", *OPTIONS, *words]
        )
        assert done.exit_code == code, done.output
        return done

    failed = call("--max-error", "0.01", "--json", "-q", code=1)
    assert json.loads(failed.stdout)["over_max_error"]
    assert "above --max-error 0.01" in failed.stderr
    shown = call()
    assert "org/name holds the artifact, at commit" in shown.stdout
    assert "PASS  files, weights against" in shown.stdout
    document = json.loads(call("--json", "-q").stdout)
    assert (document["kind"], document["was_published"], document["passed"]) == (
        "publication",
        True,
        True,
    )
    assert document["source"] == {"name": "org/source", "revision": COMMIT}
    assert document["commit"] == hubs.uploads.oid("main")
    assert "Nothing to do." in call().stdout
    assert call("--checks", "none", code=2)


def test_what_is_refused(hubs: BothHubs) -> None:
    publish()
    with pytest.raises(RequestError, match="is public"):
        publish(private=True)
    with pytest.raises(RequestError, match="no such check"):
        publish(checks=["none"])


def start(hubs: BothHubs, root: Path) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hubs.url,
        "HF_HUB_CACHE": str(root / "cache"),
        "HF_HUB_DISABLE_XET": "1",
    }
    words = ["publish", "org/source", "org/name", "-o", str(root / "out"), *OPTIONS, "-q"]
    command = [sys.executable, "-m", "hqconv", *words]
    return processes.Process(
        command,
        env={**environment, "PYTHONPATH": str(REPO)},
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("moment", ["shard", "batch", "commit", 0, 1])
def test_killed_anywhere_and_run_again(
    hubs: BothHubs, model: Path, tmp_path: Path, moment: str | int
) -> None:
    """The repo holds the old artifact or the new one; the next run ends at the commit of an undisturbed one."""
    publish(schema="int8")
    old = there(hubs)
    hqconv.convert(
        "org/source", tmp_path / "fresh", schema="mxfp4", target="sm90", tp=2, device="cpu"
    )
    held, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        held.set()
        go_on.wait(60)

    if moment == "shard":
        hubs.source.before = lambda name: hold() if name.endswith(".safetensors") else None
    elif isinstance(moment, str):
        setattr(hubs.uploads, f"on_{moment}", hold)
    with start(hubs, tmp_path) as process:
        if isinstance(moment, str):
            assert held.wait(120)
        else:
            time.sleep(random.Random(moment).uniform(0.5, 6))
        process.send_signal(signal.SIGKILL)
    go_on.set()
    hubs.source.before = hubs.uploads.on_batch = hubs.uploads.on_commit = None
    new = files_of(tmp_path / "fresh")
    assert there(hubs) in (old, new)
    report = publish()
    assert report.commit == hubs.uploads.oid("main")
    assert there(hubs) == new
    assert len(hubs.uploads.messages) == 2
    assert all(
        there(hubs, number) in ({}, old, new) for number in range(len(hubs.uploads.commits["main"]))
    )


# --- the workflow of docs/ci.md ----------------------------------------------------------------------------


class Machine:
    """A place with nothing but hqconv, its caches empty, and the local server as its Hub."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        programs = root / "bin"
        programs.mkdir()
        (programs / "hqconv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hqconv "$@"\n')
        (programs / "hqconv").chmod(0o755)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("HF_", "HQCONV_"))
        }
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        hub = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(root / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_x",
        }
        self.environment = {**kept, **hub, "PATH": path, "PYTHONPATH": str(REPO)}

    def run(self, command: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = {
            "env": {**self.environment, **more},
            "cwd": self.root,
            "text": True,
            "check": False,
        }
        return subprocess.run(["bash", "-e", "-c", command], capture_output=True, **words)  # type: ignore[call-overload, no-any-return]

    def workflow(self, **inputs: str) -> list[subprocess.CompletedProcess[str]]:
        """The workflow's own steps until one fails, but the installation, as a runner does them."""
        values = INPUTS | inputs
        job = WORKFLOW["jobs"]["publish"]
        variables = {
            name: re.sub(
                r"\$\{\{ (?:inputs|vars)\.(\w+)[^}]*\}\}",
                lambda match: values[match[1].lower()],
                value,
            )
            for name, value in job["env"].items()
            if "secrets." not in value
        }
        done = []
        for step in job["steps"]:
            if "run" in step and step["name"] != "install":
                done.append(self.run(step["run"], **variables))
                if done[-1].returncode:
                    break
        return done

    def document(self) -> Any:
        return json.loads((self.root / "publication.json").read_text())


@pytest.fixture
def machine(tmp_path: Path, hubs: BothHubs) -> Machine:
    return Machine(tmp_path, hubs.url)


@pytest.mark.full
def test_the_workflow(machine: Machine, hubs: BothHubs) -> None:
    (done,) = machine.workflow()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.document()["passed"]
    assert machine.document()["commit"] == hubs.uploads.oid("main")
    (again,) = machine.workflow()
    assert again.returncode == 0, again.stderr
    assert machine.document()["was_published"]
    down = machine.run(f"hqconv verify org/name --revision {machine.document()['commit']} -q")
    assert down.returncode == 0, down.stdout + down.stderr
    assert machine.run("test ! -e nothing").returncode == 0


def test_the_workflow_of_a_request_that_cannot_be_met(machine: Machine, hubs: BothHubs) -> None:
    (done,) = machine.workflow(options="--target sm90 --tp 5")
    assert done.returncode == 2
    assert "TP sizes that work" in done.stderr
    assert machine.document()["kind"] == "error"
    assert hubs.uploads.commits == {}
