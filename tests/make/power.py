"""Conversions recorded call by call, alone, replacing and together, and the order that each must keep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hqconv.io.durable_files
from hqconv.schemas.artifact_names import JOURNAL, MANIFEST, PARTIAL, journal_part
from hqconv.schemas.grid import Grid
from tests.make.conversions import run, run_until
from tests.make.disks import Disk, paths_below
from tests.make.qwen import write_qwen3_moe
from tests.make.recording import Op, Recorder
from tests.make.tensors import snapshot

SCHEMA, GRID = "mxfp4", Grid(2, 2)
README = ".gitattributes"
Files = dict[str, str]


@dataclass(frozen=True)
class Recorded:
    """A conversion to `out` below `before`, a folder as it was; `ops` is what it asked of the disk.

    new: the artifact that comes of it.
    """

    before: Path
    ops: Sequence[Op]
    new: Files

    def disk(self) -> Disk:
        """The disk before it."""
        return Disk.of(self.before)


@contextmanager
def renames_only() -> Iterator[None]:
    """A file system that cannot exchange folders at once."""
    with patch.object(hqconv.io.durable_files, "_exchange_at_once", lambda *_: False):
        yield


def model(folder: Path) -> Path:
    """A small source with a file beside the weights."""
    src = write_qwen3_moe(folder, num_layers=2, num_experts=4)
    (src / "tokenizer.json").write_text("{}")
    return src


def recorded(work: Path, name: str, src: Path) -> Recorded:
    """One of SCENARIOS, run below `work`."""
    before, disk = work / name / "before", work / name / "disk"
    before.mkdir(parents=True)
    disk.mkdir()
    convert = SCENARIOS[name](before, disk / "out", src)
    recorder = Recorder(disk)
    with recorder.at_work():
        convert()
    return Recorded(before, recorder.ops, snapshot(disk / "out"))


def _fresh(before: Path, out: Path, src: Path) -> Callable[[], object]:
    """Into a folder that is not there, nor the one above it."""
    return lambda: run(src, out, SCHEMA, GRID)


def _replaced(before: Path, out: Path, src: Path) -> Callable[[], object]:
    """In the place of an artifact of another schema and grid, beside which its owner put a file."""
    run(src, before / "out", "int4-g32", Grid(1, 2))
    (before / "out" / README).write_text("* text=auto")
    shutil.copytree(before / "out", out)
    return lambda: run(src, out, SCHEMA, GRID, overwrite=True)


def _replaced_by_renames(before: Path, out: Path, src: Path) -> Callable[[], object]:
    """The same where folders cannot be exchanged at once."""
    replace = _replaced(before, out, src)

    def convert() -> None:
        with renames_only():
            replace()

    return convert


def _anew(before: Path, out: Path, src: Path) -> Callable[[], object]:
    """With --overwrite, in the place of an unfinished one of another schema and grid."""
    run_until(src, out, 1, "int4-g32", Grid(1, 3))
    shutil.copytree(out, before / "out")  # how far another one got would be chance
    return lambda: run(src, out, SCHEMA, GRID, overwrite=True)


def _together(before: Path, out: Path, src: Path) -> Callable[[], object]:
    """By two parts at the same time (here threads, with the same code)."""
    return lambda: run_together(src, out)


def run_together(src: Path, out: Path) -> None:
    """A conversion by two threads, each in the place of a process that converts a part."""

    def convert(number: int) -> None:
        run(src, out, SCHEMA, GRID, part=f"{number}/2", threads=1)

    with ThreadPoolExecutor(2) as threads:
        for part in [threads.submit(convert, number) for number in (1, 2)]:
            part.result()


SCENARIOS: dict[str, Callable[[Path, Path, Path], Callable[[], object]]] = {
    "fresh": _fresh,
    "replaced": _replaced,
    "replaced by renames": _replaced_by_renames,
    "begun anew": _anew,
    "together": _together,
}
"""(the folder before, the output, the source) to the conversion that is recorded."""


# --- the order that must be kept


def out_of_order(recording: Recorded) -> list[str]:
    """Sentences on every step that came before what it relies on was synced."""
    disk, found = recording.disk(), list[str]()
    for op in recording.ops:
        found += _relies_on(disk, op)
        disk.apply(op)
    lacking = [path for path in (*paths_below(disk, "out"), "out") if not disk.is_safe(path)]
    found += [f"{path} was not synced at the end" for path in lacking]
    return found


def _relies_on(disk: Disk, op: Op) -> list[str]:
    path, _, name = op.path.rpartition("/")
    if op.kind == "rename" and op.path.endswith(PARTIAL):
        node, problems = disk.find(op.path), []
        if node is None or not node.is_synced:
            problems = [f"{op.other} got its name before its data were synced"]
        if op.other.endswith(f"/{MANIFEST}"):
            problems += _unsafe_below(disk, path, "the manifest", op.path)
        return problems
    if op.kind == "exchange" or (op.kind, op.other) == ("rename", "out"):
        return (
            _unsafe_below(disk, op.path, "the exchange")
            if disk.find(f"{op.path}/{MANIFEST}")
            else []
        )
    if op.kind == "unlink" and journal_part(name):
        return (
            []
            if disk.is_safe(f"{path}/{JOURNAL}")
            else [f"{op.path} went before its lines were synced"]
        )
    if op.kind == "unlink" and name == JOURNAL:
        folder = disk.find(path, safely=True)
        left = [one for one in (folder.safe_names if folder else ()) if journal_part(one)]
        return [f"{path}/{one} may outlast the journal that it belongs to" for one in left]
    if op.kind == "write":
        return _of_line(disk, op)
    return []


def _of_line(disk: Disk, op: Op) -> list[str]:
    """A journal's line on a unit comes after its files, of which each is at a name that lasts."""
    if not op.data.startswith(b'{"unit": '):
        return []
    line: dict[str, Any] = json.loads(op.data)
    places = ("out", ".out.hqconv")
    root = next(
        p for p in places if (n := disk.find(p)) and disk.file(op.handle) in n.names.values()
    )
    paths = [f"{root}/{record['path']}" for record in line["files"]]
    return [f"{path} was noted before it was synced" for path in paths if not disk.is_safe(path)]


def _unsafe_below(disk: Disk, root: str, what: str, but: str = "") -> list[str]:
    """Files and folders that do not last when something comes that says they do; the root's own name may be new."""
    node, safe = disk.find(root), disk.find(root, safely=True)
    if node is not safe:
        return [f"{root} was not synced before {what}"]
    paths = [path for path in paths_below(disk, root) if path != but and not disk.is_safe(path)]
    return [f"{path} was not synced before {what}" for path in paths]
