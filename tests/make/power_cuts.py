"""Power cuts in recorded conversions: what they leave is a whole artifact, or what the same command finishes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from hqconv.conversion.output_folder import parked_folder
from hqconv.errors import HqconvError, OutputError
from hqconv.schemas.artifact_names import JOURNAL, MANIFEST, journal_part
from tests.make.disks import FATES, played
from tests.make.power import README, Files, Recorded
from tests.make.tensors import snapshot

REPLACING = ("replaced", "replaced by renames", "replaced, killed and resumed", "begun anew")


def cut(recording: Recorded, folder: Path, num_ops: int, fate: str, rng: random.Random) -> str:
    """Cut the power after some operations, look at what is left in the empty `folder`, and finish the conversion there.

    Says what is wrong, or nothing.
    """
    played(recording.disk(), recording.ops[:num_ops]).after_a_cut(folder, fate, rng)
    is_done, out = num_ops == len(recording.ops), folder / "out"
    wrong = _look(recording, out, is_done=is_done)
    if wrong:
        return wrong
    try:
        with patch.object(os, "fsync", lambda _: None):  # the disk is a model's: this one need not be waited for
            _finish(recording, out, starts_anew=not is_done and rng.random() < 0.2)
    except HqconvError as error:
        return f"it cannot be finished: {error}"
    left = sorted(path.name for path in folder.iterdir())
    if left != ["out"]:
        return f"besides the artifact there are {left}"
    return "" if snapshot(out) == recording.new else "it was finished to other bytes"


def _finish(recording: Recorded, out: Path, *, starts_anew: bool) -> None:
    """As somebody would: --resume, and where that says so, the command as it was."""
    try:
        recording.finish(out, resume=not starts_anew, overwrite=starts_anew)
    except OutputError as error:
        if "--overwrite" not in error.remedy or recording.name not in REPLACING:
            raise
        recording.finish(out, overwrite=True)


def _look(recording: Recorded, out: Path, *, is_done: bool) -> str:
    """What is wrong before anything else is run: half an artifact, or none where one must be."""
    found = snapshot(out) if out.exists() else {}
    beside = {path for path in found if path in (JOURNAL, README) or journal_part(path)}
    files = {path: digest for path, digest in found.items() if path not in beside}
    wholes = [_without_readme(one) for one in (recording.new, recording.old) if one is not None]
    if is_done and (found != recording.new or len(list(out.parent.iterdir())) != 1):
        return "the conversion was done, and is not what it was"
    if MANIFEST in found and files not in wholes:
        lacking = sorted(set(recording.new) - set(found))[:3]
        return f"there is a manifest and no whole artifact (of the new one {lacking} are not there)"
    is_parked = recording.by_renames and parked_folder(out).exists()
    if recording.old is not None and MANIFEST not in found and not is_parked:
        return "neither the old artifact nor the new one is there"
    return ""


def _without_readme(files: Files) -> Files:
    return {path: digest for path, digest in files.items() if path != README}


def cuts(recording: Recorded, work: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Cut the power `count` times, first after the end: where, and what was wrong."""
    size = len(recording.ops)
    places = [n for n, op in enumerate(recording.ops) if op.kind in ("sync", "rename", "exchange", "unlink")]
    places += [*range(12), *range(size - 30, size)] * 2 + list(range(size))
    for number in range(count):
        num_ops, fate = rng.choice(places) if number else size, rng.choice(FATES if number else FATES[:1])
        folder = work / f"{recording.name}-{number}"
        folder.mkdir(parents=True)
        wrong = cut(recording, folder, num_ops, fate, rng)
        yield f"{recording.name}, {num_ops} of {len(recording.ops)} operations, {fate}", wrong
        shutil.rmtree(folder)
