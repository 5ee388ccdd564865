"""The example workflow of docs/ci.md, from a machine that has nothing to a verified download, on a local server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hqconv.io.file_access import sha256_of
from tests.make.hub_both import BothHubs, serve_both
from tests.make.hub_server import COMMIT
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

WORKFLOW = yaml.safe_load((REPO / "docs/examples/publish.yml").read_text())
INPUTS = {"source": "org/source", "repo": "org/name", "schema": "mxfp4", "options": "--target sm90 --tp 2"}


class Machine:
    """A place with nothing but hqconv, its caches empty, and the local server as its Hub."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        programs = root / "bin"
        programs.mkdir()
        (programs / "hqconv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hqconv "$@"\n')
        (programs / "hqconv").chmod(0o755)
        (root / "scripts").symlink_to(REPO / "scripts")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HQCONV_"))}
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        hub = {"HF_ENDPOINT": url, "HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_x"}
        self.environment = {**kept, **hub, "PATH": path, "PYTHONPATH": str(REPO), "PYTHON": sys.executable}

    def run(self, command: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = {"env": {**self.environment, **more}, "cwd": self.root, "text": True, "check": False}
        return subprocess.run(["bash", "-e", "-c", command], capture_output=True, **words)  # type: ignore[call-overload, no-any-return]

    def workflow(self, **inputs: str) -> list[subprocess.CompletedProcess[str]]:
        """The workflow's own steps until one fails, but the installation, as a runner does them."""
        job = WORKFLOW["jobs"]["publish"]
        values = INPUTS | inputs
        variables = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], value)
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

    def document(self, name: str) -> Any:
        return json.loads((self.root / "publish" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("models") / "source", num_layers=2)


@pytest.fixture
def hubs(model: Path) -> Iterator[BothHubs]:
    with serve_both(model) as found:
        yield found


@pytest.fixture
def machine(tmp_path: Path, hubs: BothHubs) -> Machine:
    return Machine(tmp_path, hubs.url)


@pytest.mark.full
def test_the_workflow_from_an_empty_machine_to_a_verified_download(machine: Machine, hubs: BothHubs) -> None:
    plan, publish = machine.workflow()
    assert (plan.returncode, publish.returncode) == (0, 0), plan.stderr + publish.stdout + publish.stderr
    artifact, download = machine.root / "publish/artifact", machine.root / "publish/download"
    names = {f"{p.relative_to(artifact)}" for p in artifact.rglob("*") if p.is_file()}
    assert len(names) > 6
    for name in names:
        assert (download / name).read_bytes() == (artifact / name).read_bytes()
        assert hubs.uploads.tree()[name].data == (artifact / name).read_bytes()
    digest = sha256_of(artifact / "hqconv.json")
    steps = ("convert", "verify", "push", "download")
    assert {machine.document(step)["manifest_sha256"] for step in steps} == {digest}
    assert machine.document("convert")["source"] == {"name": "org/source", "revision": COMMIT}
    assert machine.document("verify")["source"] == "org/source"
    assert all(machine.document(step)["passed"] for step in ("verify", "download"))
    lines = publish.stdout.splitlines()
    assert f"manifest sha256 {digest}" in lines
    assert lines[-1] == "verified: the download is the artifact, byte for byte"
    again = machine.workflow()[-1]  # nothing is left to do
    assert again.returncode == 0, again.stderr
    assert machine.document("convert")["was_finished"]
    assert machine.document("push")["num_files"] == 0


def test_what_loses_too_much_is_not_published(machine: Machine, hubs: BothHubs) -> None:
    done = machine.workflow(options="--target sm90 --max-error 0.01")[-1]
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "convert ended with 1; publish/convert.json says why"
    assert machine.document("convert")["over_max_error"]
    assert hubs.uploads.commits == {}


def test_a_request_that_cannot_be_met_ends_with_the_plan(machine: Machine) -> None:
    (done,) = machine.workflow(options="--target sm90 --tp 3")
    assert done.returncode == 2
    assert "TP sizes that work" in done.stderr


@pytest.mark.full
def test_another_download_than_was_published_is_found(machine: Machine, hubs: BothHubs) -> None:
    """Somebody puts another artifact there, which is good by itself, after the push."""
    other = machine.run("hqconv convert org/source -o other --schema int4 --target sm90 -q")
    assert other.returncode == 0, other.stderr
    fake = machine.root / "bin/fake-hf"
    fake.write_text('#!/bin/sh\nmkdir -p publish && cp -r other "$6"\n')
    fake.chmod(0o755)
    machine.environment["HF"] = str(fake)
    done = machine.workflow()[-1]
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The download has another manifest" in done.stdout
    assert machine.document("download")["passed"]
