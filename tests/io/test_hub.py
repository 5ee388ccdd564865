"""Repos on the Hub, from a server on this machine: a look at one reads headers, a conversion reads all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from tests.make import processes
from tests.make.formats import write
from tests.make.hub_server import COMMIT, LocalHub, serve
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12.7 MB in four shards."""
    folder = write_qwen3_moe(
        tmp_path_factory.mktemp("hub") / "model", num_experts=4, hidden_size=512, intermediate_size=512
    )
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size="4MB")
    assert len(list(folder.glob("*.safetensors"))) == 4
    return folder


class Client:
    """The command against a server, with a cache of its own."""

    def __init__(self, hub: LocalHub, home: Path) -> None:
        self.hub, self.home = hub, home

    def call(self, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "hqconv", *map(str, arguments)]
        environment = {**kept, **own, "PYTHONPATH": str(REPO), **more}
        return processes.run(command, env=environment, cwd=self.home, capture_output=True, text=True, check=False)

    def to_dict(self, *arguments: object) -> Any:
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextmanager
def client(model: Path, home: Path, **more: Any) -> Iterator[Client]:
    home.mkdir()
    with serve(model, **more) as hub:
        yield Client(hub, home)


def header_bytes(model: Path) -> int:
    return sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in model.glob("*.safetensors"))


def total_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


DRY_RUN = ("convert", "org/name", "--schema", "mxfp4", "--target", "sm90", "--tp", 2, "--dry-run")


def without_place(words: dict[str, Any]) -> dict[str, Any]:
    """The words on a source or plan that do not depend on where it is."""
    dropped = ("source", "out", "notes", "name", "repo_id", "revision", "folder")
    return {key: value for key, value in words.items() if key not in dropped}


def test_a_look_at_a_repo_downloads_headers_only(model: Path, tmp_path: Path) -> None:
    with client(model, tmp_path / "home") as one:
        seen = one.to_dict("inspect", "org/name")
        assert seen["revision"] == COMMIT
        planned = one.to_dict(*DRY_RUN)
        # Two looks at four shards, 32 KiB each, of 12.7 MB.
        assert header_bytes(model) < one.hub.num_bytes_of_weights <= 2 * 4 * (1 << 15)
        local = one.to_dict("inspect", model)
        assert without_place(seen) == without_place(local)
        local = one.to_dict(*("convert", model, *DRY_RUN[2:]))
        assert without_place(planned) == without_place(local)
        assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_look_at_a_repo_sees_what_ascend_writes_beside_it(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "ascend-w8a8-file", hidden=128, inner=128).folder
    with client(model, tmp_path / "home") as one:
        seen = one.to_dict("inspect", "org/name")
        assert seen["quant_method"] == "ascend"
        assert without_place(seen) == without_place(one.to_dict("inspect", model))


def test_a_server_that_ignores_ranges_is_left_early(tmp_path: Path) -> None:
    model = write_qwen3_moe(tmp_path / "model", num_layers=1)
    tensors = load_file(model / "model.safetensors")
    # Larger by far than what sockets buffer on the way.
    save_file(tensors | {"lm_head.weight": torch.zeros(50 << 20, 2).byte()}, model / "model.safetensors")
    with client(model, tmp_path / "home", honours_ranges=False) as one:
        assert one.to_dict("inspect", "org/name")["convertible"]
        assert one.hub.num_bytes_of_weights < total_bytes(model) / 4


def test_headers_larger_than_the_first_request(model: Path, tmp_path: Path) -> None:
    many = write_qwen3_moe(tmp_path / "many", num_layers=8, num_experts=64, hidden_size=32, intermediate_size=32)
    assert header_bytes(many) > 1 << 16
    with client(many, tmp_path / "home") as one:
        assert without_place(one.to_dict("inspect", "org/name")) == without_place(one.to_dict("inspect", many))
        assert one.hub.num_bytes_of_weights == header_bytes(many)


@pytest.mark.full
def test_a_conversion_downloads_once_and_gives_the_folders_bytes(model: Path, tmp_path: Path) -> None:
    common = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu", "-q")
    with client(model, tmp_path / "home") as one:
        done = one.call("convert", "org/name", "-o", tmp_path / "hub", *common, "--keep-source")
        assert (done.returncode, done.stderr) == (0, "")
        # The headers beforehand, then each shard once.
        num_bytes = one.hub.num_bytes_of_weights
        assert total_bytes(model) < num_bytes <= total_bytes(model) + 4 * (1 << 15)
        # Afterwards the cache has it all, and a look at it asks the server for no weights.
        assert one.to_dict("inspect", "org/name")["num_files"] == 4
        assert one.hub.num_bytes_of_weights == num_bytes
        done = one.call("verify", tmp_path / "hub", "--source", "org/name", "--device", "cpu")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].startswith("PASS  files, weights against org/name")
        assert one.call("convert", model, "-o", tmp_path / "folder", *common).returncode == 0
    hub, folder = snapshot(tmp_path / "hub"), snapshot(tmp_path / "folder")
    for name in ("hqconv.json", "README.md", "SHA256SUMS"):  # which name the repo and its commit
        assert hub.pop(name) != folder.pop(name)
    card = (tmp_path / "hub/README.md").read_text()
    assert "base_model:\n- org/name\nbase_model_relation: quantized\n" in card
    assert hub == folder


def test_an_artifact_on_the_hub_is_described_from_its_manifest(model: Path, tmp_path: Path) -> None:
    with client(model, tmp_path / "home") as one:
        common = ("--schema", "mxfp4", "--target", "sm90", "--device", "cpu", "-q")
        assert one.call("convert", model, "-o", tmp_path / "out", *common).returncode == 0
    with client(tmp_path / "out", tmp_path / "home2") as one:
        words = one.to_dict("inspect", "org/name")
        assert (words["kind"], words["schema"]["name"]) == ("artifact", "mxfp4")
        assert one.hub.num_bytes_of_weights == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (("inspect", "org/other"), 2, "no such repo on the Hub"),
        (("convert", "org/other", "--schema", "int4", "--target", "sm90"), 2, "no such repo on the Hub"),
    ],
)
def test_a_repo_that_is_not_there(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], exit_code: int, text: str
) -> None:
    with client(model, tmp_path / "home") as one:
        done = one.call(*arguments)
    assert done.returncode == exit_code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_that_does_not_answer_exits_with_5(tmp_path: Path) -> None:
    hub = LocalHub(tmp_path, "org/name")
    hub.url = "http://127.0.0.1:9"  # the discard port: nobody listens
    done = Client(hub, tmp_path).call("inspect", "org/name")
    assert (done.returncode, done.stdout) == (5, "")
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
