"""`hqconv diff` and `hqconv apply`: the result has the newer artifact's bytes, or there is none.

The judge is the newer artifact itself, byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

import hqconv
from hqconv.artifact.manifest import read_manifest, sealed
from hqconv.artifact.sha256sums import sums_bytes
from hqconv.cli.app import app
from hqconv.conversion.delta import side_of
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError
from tests.make.conversions import run
from tests.make.effort import num_examples
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe

EXPERTS = 4


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta")
    model = write_qwen3_moe(folder / "model", num_experts=EXPERTS)
    run(model, folder / "old", "int4-g64-zp", tp=2)
    return folder / "old"


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def reseal(root: Path) -> None:
    """Make the manifest and the sums fit a folder's bytes again, as a conversion of other weights would."""
    path = root / "hqconv.json"
    document = json.loads(path.read_bytes())
    for name, entry in document["files"].items():
        data = (root / name).read_bytes()
        entry |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_bytes(sealed(document))
    manifest = read_manifest(root)
    (root / "SHA256SUMS").write_bytes(sums_bytes(manifest.files, manifest.sha256))


def span(path: Path, tensor: int, expert: int | None) -> tuple[int, int]:
    """First byte and end of a tensor, or of one expert's part, by the header as safetensors has it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    name = sorted(header)[tensor % len(header)]
    begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
    if expert is None:
        return begin, end
    size = (end - begin) // EXPERTS
    return begin + expert * size, begin + (expert + 1) * size


def change(path: Path, begin: int, end: int, by: int) -> None:
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes((one + by) % 256 for one in data[begin:end])
    path.write_bytes(data)


def rank_files(root: Path) -> list[Path]:
    return sorted(root.glob("experts/*/*.safetensors"))


CHANGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, EXPERTS - 1), st.integers(1, 255)), max_size=4
)


@given(changes=CHANGES, dense=st.booleans(), swapped=st.booleans(), config=st.booleans())
@settings(max_examples=num_examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_result_is_the_newer_artifact(
    old: Path, tmp_path_factory: pytest.TempPathFactory, changes: Any, dense: bool, swapped: bool, config: bool
) -> None:
    """Changed experts, other tensors, files that changed places, and other files; the delta has little else."""
    folder = tmp_path_factory.mktemp("case")
    new = Path(shutil.copytree(old, folder / "new"))
    for file, tensor, expert, by in changes:
        path = rank_files(new)[file]
        change(path, *span(path, tensor, expert), by)
    if swapped:
        first, second = rank_files(new)[0], rank_files(new)[2]  # one layer's on two ranks
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    if dense:
        change(new / "model.safetensors", *span(new / "model.safetensors", 0, None), 1)
    if config:
        (new / "config.json").write_bytes((new / "config.json").read_bytes() + b"\n")
    reseal(new)
    words = hqconv.diff(old, new, folder / "delta")
    applied = hqconv.apply_delta(old, folder / "delta", folder / "out")
    assert tree(folder / "out") == tree(new)
    assert applied["manifest_sha256"] == words["manifest_sha256"]
    if not (dense or config):
        largest = max(
            span(rank_files(old)[0], tensor, 0)[1] - span(rank_files(old)[0], tensor, 0)[0] for tensor in range(8)
        )
        small = sum((new / name).stat().st_size for name in ("hqconv.json", "README.md", "SHA256SUMS"))
        both = 2 if swapped else 1  # a changed file in another's place is compared with that other one
        whole = sum(path.stat().st_size for path in rank_files(new)) if swapped and changes else 0
        assert words["num_bytes"] <= small + both * largest * len(changes) + whole
    assert not list(folder.glob(".*"))


@pytest.fixture
def pair(old: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A newer artifact, and the delta to it."""
    new = Path(shutil.copytree(old, tmp_path / "new"))
    for path in rank_files(new):
        change(path, *span(path, 1, 2), 7)
    reseal(new)
    hqconv.diff(old, new, tmp_path / "delta")
    return new, tmp_path / "delta"


def test_real_conversions(old: Path, tmp_path: Path) -> None:
    """Another quantizer of the same model; the result passes verify."""
    run(old.parent / "model", tmp_path / "new", "int4-g64-zp", tp=2, quantizer="mse")
    hqconv.diff(old, tmp_path / "new", tmp_path / "delta")
    hqconv.apply_delta(old, tmp_path / "delta", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "new")
    assert hqconv.verify(tmp_path / "out", old.parent / "model", device="cpu").passed
    again = hqconv.apply_delta(old, tmp_path / "delta", tmp_path / "out")
    assert again["was_finished"] is True


def test_of_equal_artifacts_the_delta_is_small(old: Path, tmp_path: Path) -> None:
    words = hqconv.diff(old, old, tmp_path / "delta")
    assert words["num_changed_files"] == 3  # the manifest, the sums, the card
    hqconv.apply_delta(old, tmp_path / "delta", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(old)


def test_another_plan_is_no_delta(old: Path, tmp_path: Path) -> None:
    run(old.parent / "model", tmp_path / "new", "int8", tp=2)
    with pytest.raises(RequestError, match="same plan"):
        hqconv.diff(old, tmp_path / "new", tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_damaged_artifact_gives_no_delta(old: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    new, _ = pair
    base = Path(shutil.copytree(old, tmp_path / "base"))
    change(rank_files(base)[0], 9000, 9001, 1)
    with pytest.raises(VerificationError, match="base"):
        hqconv.diff(base, new, tmp_path / "again")
    change(rank_files(new)[0], 9000, 9001, 1)
    with pytest.raises(VerificationError, match="new"):
        hqconv.diff(old, new, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_another_base_is_refused_before_anything_is_written(old: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    new, delta = pair
    with pytest.raises(RequestError, match="another base"):
        hqconv.apply_delta(new, delta, tmp_path / "out")
    base = Path(shutil.copytree(old, tmp_path / "base"))
    rank_files(base)[1].write_bytes(rank_files(base)[1].read_bytes()[:-1])
    with pytest.raises(VerificationError, match="bytes"):
        hqconv.apply_delta(base, delta, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta", "new"]


def test_a_damaged_base_gives_no_artifact(old: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """One bit, of the same size: only the digest shows it. The mended base goes on where it stopped."""
    new, delta = pair
    base = Path(shutil.copytree(old, tmp_path / "base"))
    change(base / "tokenizer.json", 0, 1, 1)
    with pytest.raises(VerificationError, match=r"tokenizer\.json"):
        hqconv.apply_delta(base, delta, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    change(base / "tokenizer.json", 0, 1, 255)
    hqconv.apply_delta(base, delta, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(new)


@given(data=st.data())
@settings(max_examples=num_examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_delta_gives_no_artifact(old: Path, pair: tuple[Path, Path], tmp_path: Path, data: Any) -> None:
    """Any byte of any file, changed, cut off or lost: an error that names the delta, and no folder."""
    _, delta = pair
    bad, out = tmp_path / "bad", tmp_path / "out"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(delta, bad)
    path = data.draw(st.sampled_from(sorted(path for path in bad.rglob("*") if path.is_file())))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["byte", "cut", "lost"]))
    if kind == "lost":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(raw[:at])
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
    with pytest.raises(HqconvError, match="delta"):
        hqconv.apply_delta(old, bad, out)
    assert not out.exists()
    shutil.rmtree(side_of(out, "apply"), ignore_errors=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("base", "../secret"), ("base", "/etc/passwd")),
        *(("ranges", [[5, 4]]), ("ranges", [[0, 1 << 60]]), ("ranges", [[0]])),
    ],
)
def test_a_hostile_delta_is_refused(old: Path, pair: tuple[Path, Path], tmp_path: Path, key: str, value: Any) -> None:
    """A sealed one, as anybody can make it: nothing outside of the artifact is read or written."""
    _, delta = pair
    document = json.loads((delta / "hqconv-delta.json").read_bytes())
    name = next(name for name, file in document["files"].items() if "ranges" in file and "base" in file)
    document["files"][name][key] = value
    (delta / "hqconv-delta.json").write_bytes(sealed(document))
    with pytest.raises(VerificationError, match="delta is damaged"):
        hqconv.apply_delta(old, delta, tmp_path / "out")
    document["files"][f"../{name}"] = document["files"].pop(name)
    (delta / "hqconv-delta.json").write_bytes(sealed(document))
    with pytest.raises(VerificationError, match="delta is damaged"):
        hqconv.apply_delta(old, delta, tmp_path / "out")


def test_what_is_there_stays(old: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    new, delta = pair
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for call in (lambda: hqconv.apply_delta(old, delta, tmp_path / "out"), lambda: hqconv.diff(old, new, delta)):
        with pytest.raises(OutputError, match="cannot be used"):
            call()
    assert tree(tmp_path / "out") == {"mine": b"mine"}
    side = side_of(tmp_path / "other", "apply")
    side.mkdir()
    (side / "mine").write_text("mine")
    with pytest.raises(OutputError, match="other files"):
        hqconv.apply_delta(old, delta, tmp_path / "other")
    assert tree(side) == {"mine": b"mine"}


KILLED = """
import os, signal, sys
from pathlib import Path
import hqconv
count, own = 0, os.fsync
def fsync(descriptor):
    global count
    count += 1
    if count == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    own(descriptor)
os.fsync = fsync
getattr(hqconv, sys.argv[2])(*sys.argv[3:6], threads=1)
"""


@pytest.mark.parametrize("command", ["diff", "apply_delta"])
def test_a_killed_run_leaves_nothing_at_its_place_and_goes_on(
    old: Path, pair: tuple[Path, Path], tmp_path: Path, command: str
) -> None:
    """Killed at each flush in turn, in one folder, until a run comes through."""
    new, delta = pair
    out = tmp_path / "out"
    arguments = (old, new, out) if command == "diff" else (old, delta, out)
    for number in (1, 3, 8, 1000):
        done = subprocess.run([sys.executable, "-c", KILLED, str(number), command, *map(str, arguments)], cwd=REPO)
        assert done.returncode == (-signal.SIGKILL if number < 1000 else 0)
        assert out.exists() == (number == 1000)
    assert tree(out) == tree(delta if command == "diff" else new)
    assert not list(tmp_path.glob(".*"))


def test_the_commands(old: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    new, delta = pair

    def call(*words: object) -> Any:
        return CliRunner().invoke(app, [*map(str, words)])

    done = call("diff", old, new, "-o", tmp_path / "d")
    assert (done.exit_code, "of the artifact" in done.stdout) == (0, True)
    assert tree(tmp_path / "d") == tree(delta)
    done = call("apply", old, delta, "-o", tmp_path / "out", "-q")
    assert (done.exit_code, done.stdout) == (0, "")
    done = call("apply", old, delta, "-o", tmp_path / "out")
    assert (done.exit_code, "already" in done.stdout) == (0, True)
    assert call("apply", new, delta, "-o", tmp_path / "x").exit_code == 2
    assert call("apply", old, new, "-o", tmp_path / "x").exit_code == 2
    assert call("diff", old, new, "-o", delta).exit_code == 4
    (delta / "hqconv-delta.json").write_text("{}")
    assert call("apply", old, delta, "-o", tmp_path / "x").exit_code == 1
    with safe_open(rank_files(tmp_path / "out")[0], "pt") as file:
        assert file.keys()


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "DELTA", "-o", "OUT", "--schema", "mxfp4", "--target", "sm90"],
        ["inspect", "DELTA"],
        ["verify", "DELTA"],
    ],
    ids=lambda command: command[0],
)
def test_a_delta_is_no_model_and_no_artifact(old: Path, tmp_path: Path, command: list[str]) -> None:
    """Commands that take one name the command that makes an artifact of it."""
    hqconv.diff(old, old, tmp_path / "delta")
    words = [{"DELTA": str(tmp_path / "delta"), "OUT": str(tmp_path / "out")}.get(word, word) for word in command]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2
    assert "hqconv apply BASE" in found.stderr
    assert not (tmp_path / "out").exists()
