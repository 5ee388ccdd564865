"""The source is rewritten while it is converted: no artifact is made of two states of it.

A file of the source changes at a random moment: other bytes in place, another file of its name, more bytes, fewer, or
none. The command ends with exit code 3 and names the file, or its artifact is that of the source before, or after.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from scripts.torture.commands import Job
from scripts.torture.place import Place, Tree, manners, said
from scripts.torture.tally import Tally
from tests.make.qwen import read_tree

_FILES = ("model.safetensors", "config.json", "tokenizer.json")


def _in_place(path: Path) -> None:
    """Other bytes at the end: the last tensor's, or a space more or less for JSON."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-2] + (bytes(2) if path.suffix == ".safetensors" else b" " + data[-1:]))


def _replace(path: Path) -> None:
    new = path.with_name("new")
    shutil.copy2(path, new)
    _in_place(new)
    new.replace(path)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CHANGES: dict[str, Callable[[Path], None]] = {
    "rewritten in place": _in_place,
    "replaced": _replace,
    "grown": _grow,
    "cut": _cut,
    "removed": Path.unlink,
}


def run(place: Place, count: int, tally: Tally) -> None:
    """`count` conversions of sources that change."""
    draw = Random(tally.seed)
    after: dict[tuple[str, str], Tree | None] = {}
    for _ in range(count):
        name, kind = draw.choice(_FILES), draw.choice([*CHANGES])
        if (name, kind) not in after:
            after[name, kind] = _made_after(place, name, kind)
        problem = _changed(place, name, kind, draw.uniform(0, 0.22), after[name, kind], tally)
        tally.case(kind, problem and f"{name}: {problem}")


def _copy(place: Place) -> Path:
    src = place.work / "copy"
    shutil.rmtree(src, ignore_errors=True)
    shutil.copytree(place.src, src)
    return src


def _made_after(place: Place, name: str, kind: str) -> Tree | None:
    """The artifact of the changed source; None where it is none."""
    src = _copy(place)
    CHANGES[kind](src / name)
    place.clear(has_old=False)
    (ended,) = place.zygote.run(Job(place.command(src=src)))
    return read_tree(place.out) if ended.code == 0 else None


def _changed(place: Place, name: str, kind: str, seconds: float, after: Tree | None, tally: Tally) -> str:
    src = _copy(place)
    place.clear(has_old=False)
    place.zygote.begin(Job(place.command(src=src)))
    time.sleep(seconds)
    CHANGES[kind](src / name)
    (ended,) = place.zygote.end()
    tally.note(f"exit {ended.code}")
    # A folder without a config, or one with half of it, may be refused as a request too.
    problem = manners(ended, (0, 3) if name != "config.json" else (0, 2, 3))
    made = read_tree(place.out) if (place.out / "hqconv.json").exists() else None
    if (
        not problem
        and made is not None
        and _of_artifact(made) not in (_of_artifact(place.new), _of_artifact(after))
    ):
        problem = "an artifact of two states of the source"
    if not problem and (ended.code == 0) != (made is not None):
        problem = f"an artifact, and no success: {said(ended)}"
    if problem or ended.code == 0:
        return problem and f"after {seconds:.3f} s: {problem}"
    (again,) = place.zygote.run(Job(place.command("--overwrite", src=src)))
    problem = manners(again, (2, 3) if after is None else (0,))
    if not problem and after is not None and _of_artifact(read_tree(place.out)) != _of_artifact(after):
        problem = "the next run made something else of it"
    return problem and f"again, after {seconds:.3f} s: {problem}"


def _of_artifact(tree: Tree | None) -> Tree | None:
    """Without the manifest, which has the source's name and the digests of its files."""
    return tree and {name: data for name, data in tree.items() if name != "hqconv.json"}
