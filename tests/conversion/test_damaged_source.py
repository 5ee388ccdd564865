"""A damaged artifact is no source: whatever byte of it changed, no new artifact comes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hqconv
from hqconv.errors import InputError
from hqconv.schemas.grid import Grid
from tests.make.conversions import run, run_until
from tests.make.damage import Damaged, flip
from tests.make.qwen import read_tree, write_qwen3_moe

LAYER_0, LAYER_1 = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"
RANK_FILES = [
    f"experts/tp{rank}-ep0/{layer}.safetensors" for layer in (LAYER_0, LAYER_1) for rank in (0, 1)
]
JOURNAL = ".hqconv-progress.jsonl"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and what was made of it: by layout."""
    folder = tmp_path_factory.mktemp("good")
    src = write_qwen3_moe(folder / "src")
    run(src, folder / "kernel", "fp8", Grid(tp=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hqconv.planning.output_units.MAX_SHARD_BYTES", 300_000)
        run(src, folder / "checkpoint", "mxfp4", layout="checkpoint")
    return {"src": src, "kernel": folder / "kernel", "checkpoint": folder / "checkpoint"}


@pytest.fixture
def damaged(good: dict[str, Path], tmp_path: Path) -> Damaged:
    shutil.copytree(good["kernel"], tmp_path / "damaged")
    return Damaged(tmp_path / "damaged", good["src"], "fp8")


def assert_refused(src: Path, out: Path, names: str | list[str], **more: object) -> None:
    """Nothing that looks whole is left, and one of the files is named."""
    with pytest.raises(InputError) as caught:
        run(src, out, "source", **more)  # type: ignore[arg-type]
    assert caught.value.exit_code == 3
    assert caught.value.where in [
        str(src / name) for name in ([names] if isinstance(names, str) else names)
    ]
    assert not (out / "hqconv.json").exists()


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
def test_a_changed_config_or_index(good: dict[str, Path], tmp_path: Path, layout: str) -> None:
    src = tmp_path / "damaged"
    shutil.copytree(good[layout], src)
    for name in (
        "config.json",
        *(["model.safetensors.index.json"] if layout == "checkpoint" else []),
    ):
        whole = (src / name).read_bytes()
        (src / name).write_bytes(whole.replace(b"\n", b" ", 1))  # the same words
        assert_refused(src, tmp_path / "out", name)
        with pytest.raises(InputError, match="not what its manifest"):
            hqconv.plan(src, schema="source", target="sm90")
        (src / name).write_bytes(whole)


# --- resumed


def group_of(name: str) -> str:
    """The group that is made of an artifact's file, by its name in the journal."""
    return Path(name).name.removesuffix(".safetensors") if name.startswith("experts/") else name


def groups_done(out: Path) -> list[str]:
    return [json.loads(line).get("unit") for line in (out / JOURNAL).read_text().splitlines()]


def test_damaged_between_two_runs(damaged: Damaged, tmp_path: Path) -> None:
    run_until(damaged.root, tmp_path / "begun", 1, "source")
    done = groups_done(tmp_path / "begun")
    names = [*RANK_FILES, "model.safetensors", "tokenizer.json"]
    victims = [name for name in names if group_of(name) not in done]
    assert 0 < len(victims) < len(names)
    for number, name in enumerate(victims):
        out = tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "begun", out)
        flip(damaged.root / name, -1)
        assert_refused(damaged.root, out, name, resume=True)
        flip(damaged.root / name, -1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*RANK_FILES, "model.safetensors", "tokenizer.json"])
def test_nothing_made_of_damaged_bytes_is_kept(damaged: Damaged, tmp_path: Path, name: str) -> None:
    out, path = tmp_path / "out", damaged.root / name
    run(damaged.root, tmp_path / "expected", "source")
    flip(path, path.stat().st_size // 2)
    assert_refused(damaged.root, out, name)
    assert group_of(name) not in groups_done(out)
    flip(path, path.stat().st_size // 2)  # mended, with the time that it had
    run(damaged.root, out, "source", resume=True)
    assert read_tree(out) == read_tree(tmp_path / "expected")
