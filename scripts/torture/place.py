"""A place where conversions are killed, starved and stopped, and whether what lies there then is true.

Two artifacts are made of one source beforehand: the old one, which some cases replace, and the new one. Whatever
happened, `OUT` is either no artifact (no `hqconv.json`) or holds one of the two, whole; the same command then gives
the new one, and leaves nothing else; and files of the user are untouched.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

from hqconv.conversion.output_folder import parked_folder, side_folder
from hqconv.schemas.artifact_names import JOURNAL, MANIFEST
from scripts.torture.commands import HANG, Ended, Job, Zygote
from tests.make.qwen import read_tree, write_qwen3_moe

# With the digests of the source, which --update records in any case.
OPTIONS = (
    *("--target", "sm90", "--device", "cpu", "--tp", "2", "--threads", "2", "--source-digests"),
    *("--dense", "int8"),
)
CARD, NOTE = ".gitattributes", "notes.txt"  # the user's files: in an artifact, and beside it
Tree = dict[str, bytes]


class Place:
    """`out` in a folder of its own; `src`, of two layers. new, old: the artifacts' files."""

    def __init__(self, work: Path, *, in_mounts: bool = False) -> None:
        self.work = work
        self.src = write_qwen3_moe(work / "model", num_layers=2, num_experts=4, with_attention=True)
        (work / "place").mkdir()
        self.zygote = Zygote(work, self.src, in_mounts=in_mounts)
        self.root = self.zygote.seen(work / "place") if in_mounts else work / "place"
        self.at = work / "place" / "out"  # as commands see it
        self._old = work / "old"
        self.old = self._made(self._old, "int8")
        self.new = self._made(work / "new", "mxfp4")
        (self._old / CARD).write_bytes(b"a model card")

    @property
    def out(self) -> Path:
        """The output as this process sees it."""
        return self.root / "out"

    def _made(self, out: Path, schema: str) -> Tree:
        words = ("convert", str(self.src), "-o", str(out), "--schema", schema, *OPTIONS)
        (ended,) = self.zygote.run(Job(words))
        if ended.code:
            raise RuntimeError(ended.stderr)
        return read_tree(out)

    def command(self, *options: str) -> tuple[str, ...]:
        """The arguments of a conversion to here."""
        fixed = ("convert", str(self.src), "-o", str(self.at), "--schema", "mxfp4", *OPTIONS)
        return (*fixed, *options)

    def judged(self, ended: Ended, codes: tuple[int, ...], *, has_old: bool) -> str:
        """What is wrong with how a command ended, with what lies here then, or in the end."""
        problem = manners(ended, codes) or self.problem(has_old=has_old)
        if problem:
            return problem
        return self.finish(has_old=has_old) if ended.code else self.is_final(has_old=has_old)

    def clear(self, *, has_old: bool) -> None:
        """As it is before a case: with the user's files, and the old artifact or none."""
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / NOTE).write_bytes(b"mine")
        if has_old:
            shutil.copytree(self._old, self.out)

    def problem(self, *, has_old: bool, old_may_rest: bool = False) -> str:
        """What is wrong with what lies here just now, or "". old_may_rest: folders change places by renames."""
        if (self.root / NOTE).read_bytes() != b"mine":
            return "a file beside the output changed"
        places = [
            path
            for path in (self.out, side_folder(self.out), parked_folder(self.out))
            if path.exists()
        ]
        if has_old and sum((path / CARD).is_file() for path in places) != 1:
            return "a file of the user in the artifact is lost, or there twice"
        if not has_old:
            return "" if self._holds(self.out) in ("nothing", "new") else "a false artifact"
        found = [self._holds(path) for path in (places if old_may_rest else [self.out])]
        if found and found[0] == "false" and places[0] == self.out:
            return "a false artifact"
        return (
            ""
            if {"old", "new"} & {*found}
            else f"neither the old artifact nor the new one is there: {found}"
        )

    def _holds(self, out: Path) -> str:
        if not (out / MANIFEST).exists():
            return "nothing"
        found = {name: data for name, data in read_tree(out).items() if name not in (JOURNAL, CARD)}
        return "new" if found == self.new else "old" if found == self.old else "false"

    def again(self, *, has_old: bool) -> tuple[str, ...]:
        """The mode in which somebody goes on."""
        is_begun = (side_folder(self.out) / JOURNAL).exists() or self._holds(self.out) == "new"
        if not has_old or is_begun or not self.out.exists():
            return ("--resume",)
        return ("--overwrite",)

    def finish(self, *, has_old: bool) -> str:
        """Go on, undisturbed, to the end: "" where the new artifact is there, with the user's files and no others."""
        (ended,) = self.zygote.run(Job(self.command(*self.again(has_old=has_old))))
        if ended.code:
            return f"it could not be finished: {said(ended)}"
        return self.is_final(has_old=has_old)

    def is_final(self, *, has_old: bool) -> str:
        """Whether the new artifact lies here, and nothing that does not belong."""
        expected = {NOTE: b"mine", **{f"out/{name}": data for name, data in self.new.items()}}
        if has_old:
            expected[f"out/{CARD}"] = b"a model card"
        found = read_tree(self.root)
        if found != expected:
            names = sorted(
                name for name in {*found, *expected} if found.get(name) != expected.get(name)
            )
            return f"in the end other bytes: {names[:5]}"
        left = {path.name for path in self.root.iterdir()} - {NOTE, "out"}
        return f"left over: {sorted(left)}" if left else ""

    def close(self) -> None:
        """End the process that runs commands."""
        self.zygote.close()


def mode(has_old: bool) -> tuple[str, ...]:
    """How somebody begins who has an old artifact, or none."""
    return ("--overwrite",) if has_old else ()


def said(ended: Ended) -> str:
    """How a command ended, on a line."""
    lines = " | ".join(ended.stderr.strip().splitlines()[-6:])
    return f"exit {ended.code} {f'({ended.call}) ' if ended.call else ''}{lines}"


def manners(ended: Ended, codes: tuple[int, ...]) -> str:
    """What is wrong with how a command ended: a hang, a code that is none of `codes`, or not the one message of it.

    A command that a signal killed has given its message or not: the signal can come between message and exit.
    """
    if ended.code == HANG:
        return "a hang"
    if "Traceback" in ended.stderr + ended.stdout:
        return f"a traceback: {said(ended)}"
    if ended.code not in codes:
        return f"a wrong code: {said(ended)}"
    num_errors = sum(line.startswith("error: ") for line in ended.stderr.splitlines())
    if num_errors not in ((0, 1) if ended.code < 0 else (int(ended.code in (2, 3, 4)),)):
        return f"{num_errors} messages: {said(ended)}"
    return ""


def shuffled(cases: list[tuple[int, ...]], draw: Random, count: int) -> list[tuple[int, ...]]:
    """All cases in their order where there are `count` or fewer; else so many, drawn."""
    if len(cases) <= count:
        return cases
    return sorted(draw.sample(cases, count))
