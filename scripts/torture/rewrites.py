"""The source is rewritten while it is converted: no artifact is made of two states of it.

The command waits before its n-th call on the source or the output; a file of the source gets other bytes in place,
more, or fewer, another file takes its name, or it goes; then the command goes on. It ends with exit code 3 and names
the file, or its artifact is that of the source before, or after.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from scripts.torture.commands import COUNT, STOP, Job, Watch
from scripts.torture.place import Place, Tree, manners, said, shuffled
from scripts.torture.tally import Tally
from tests.make.qwen import read_tree

_FILES = ("model.safetensors", "model.safetensors", "config.json", "tokenizer.json")


def _in_place(path: Path) -> None:
    """Other numbers in every tensor; or a space more for JSON."""
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        if path.suffix != ".safetensors":
            file.write(data[:-1] + b" " + data[-1:])
            return
        begin = 8 + int.from_bytes(data[:8], "little")
        other = bytes(
            data[begin + 256 :] + data[begin : begin + 256]
        )  # the same numbers in other places
        file.seek(begin)
        file.write(other)


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
    """`count` conversions: the weights rewritten in place at every call in turn, as far as they go; then anything."""
    draw = Random(tally.seed)
    after: dict[tuple[str, str], Tree | None] = {}
    place.clear(has_old=False)
    (whole,) = place.zygote.run(Job(place.command(src=_copy(place)), _watch(place, 0, COUNT)))
    every: list[tuple[int, ...]] = [(number,) for number in range(1, whole.num_calls + 1)]
    cases = [
        (_FILES[0], next(iter(CHANGES)), number)
        for (number,) in shuffled(every, draw, count * 3 // 4)
    ]
    while len(cases) < count:
        cases.append(
            (draw.choice(_FILES), draw.choice([*CHANGES]), draw.randint(1, whole.num_calls))
        )
    for name, kind, number in cases:
        if (name, kind) not in after:
            after[name, kind] = _made_after(place, name, kind)
        problem = _changed(place, name, kind, number, after[name, kind], tally)
        tally.case(kind, problem and f"{name}: {problem}")


def _copy(place: Place) -> Path:
    src = place.work / "copy"
    shutil.rmtree(src, ignore_errors=True)
    shutil.copytree(place.src, src)
    return src


def _watch(place: Place, number: int, how: int) -> Watch:
    return Watch(place.root, number, how, looks=True, source=place.work / "copy")


def _made_after(place: Place, name: str, kind: str) -> Tree | None:
    """The artifact of the changed source; None where it is none."""
    src = _copy(place)
    CHANGES[kind](src / name)
    place.clear(has_old=False)
    (ended,) = place.zygote.run(Job(place.command(src=src)))
    return read_tree(place.out) if ended.code == 0 else None


def _changed(
    place: Place, name: str, kind: str, number: int, after: Tree | None, tally: Tally
) -> str:
    src = _copy(place)
    place.clear(has_old=False)
    place.zygote.begin(Job(place.command(src=src), _watch(place, number, STOP)))
    if place.zygote.is_stopped():
        CHANGES[kind](src / name)
        place.zygote.go_on()
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
        return problem and f"at call {number} ({ended.call}): {problem}"
    (again,) = place.zygote.run(Job(place.command("--overwrite", src=src)))
    problem = manners(again, (2, 3) if after is None else (0,))
    if (
        not problem
        and after is not None
        and _of_artifact(read_tree(place.out)) != _of_artifact(after)
    ):
        problem = "the next run made something else of it"
    return problem and f"again, at call {number} ({ended.call}): {problem}"


def _of_artifact(tree: Tree | None) -> Tree | None:
    """Without what has the source's name: the manifest, the card, and the sums of both."""
    naming = ("hqconv.json", "README.md", "SHA256SUMS")
    return tree and {name: data for name, data in tree.items() if name not in naming}
