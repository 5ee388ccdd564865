"""The output folder's rules: one process at a time, only our own files are removed, old or new but never half."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hqconv.artifact.manifest import Difference, sealed
from hqconv.conversion import journal as journal_module
from hqconv.conversion.journal import JournalEntry, encode_line
from hqconv.conversion.output_folder import OutputFolder, UnitWriter, side_folder, unfinished_folder
from hqconv.errors import OutputError
from hqconv.io import durable_files
from hqconv.planning.output_units import build_file
from hqconv.schemas.artifact_names import COMPANIONS, FORMAT_VERSION
from hqconv.schemas.tensors import TensorSpec
from tests.make import processes
from tests.make.conversions import finished as finished_files
from tests.make.conversions import schema_of
from tests.make.places import REPO
from tests.make.qwen import read_tree
from tests.make.tensors import names_below

JOURNAL = ".hqconv-progress.jsonl"
IDENTITY = {"schema": "a", "grid": [1, 2], "source files": [{"name": "x", "size_bytes": 1}]}
PATHS = ("a.safetensors", "b.safetensors", "c.safetensors", "experts/tp0-ep0/d.safetensors")


@contextmanager
def opened(
    root: Path, identity: dict[str, Any] = IDENTITY, **modes: bool
) -> Iterator[OutputFolder]:
    with OutputFolder(root, identity, PATHS) as folder:
        folder.start(1000, **modes)
        yield folder


def record_group(folder: OutputFolder, path: str, content: bytes = b"") -> None:
    file = build_file(path, [TensorSpec("t", "U8", (64,))], {})
    writer = UnitWriter(folder.root, (file,))
    writer.write_at(0, file.tensors["t"].offset_bytes, (content or path.encode()).ljust(64))
    folder.record(
        JournalEntry(path, finished_files(writer, (file,)), {"w1": {"relative_error": 0.1}})
    )


def unfinished(root: Path, *paths: str) -> Path:
    with opened(root) as folder:
        for path in paths:
            record_group(folder, path)
    return root


def manifest_of(folder: OutputFolder) -> bytes:
    """A manifest that says no more than which files are the artifact's."""
    records = [record for entry in folder.done.values() for record in entry.files]
    files = {r.path: {"size_bytes": r.size_bytes, "sha256": r.sha256} for r in records}
    versions = dict.fromkeys(("hqconv_version", "humming_kernels_version"), "0.3.0")
    texts = {**versions, "layout": "kernel", "schema_name": "int4", "family": ""}
    document = {
        **texts,
        "format_version": FORMAT_VERSION,
        "request": {},
        "source": {
            "name": "model",
            **dict.fromkeys(("revision", "quantization_config", "index_sha256")),
            "files": [],
        },
        "weight_schema": schema_of("int4").humming_fields(),
        "input_schema": "a16",
        "dtype": "bfloat16",
        "target": "sm90",
        "tp": 1,
        "ep": 1,
        "expert_placement": "linear",
        "redundant_experts": 0,
        "blocks": {},
        "files": files,
        "tensors": {"converted": {}, "copied": [], "dropped": {}},
    }
    return sealed(document)


def finished(root: Path, *paths: str, content: bytes = b"") -> Path:
    with opened(root) as folder:
        for path in paths:
            record_group(folder, path, content)
        folder.seal(manifest_of(folder))
    return root


# --- what was done -----------------------------------------------------------------------------------------


def test_a_resumed_folder_knows_what_is_done(tmp_path: Path) -> None:
    unfinished(tmp_path, *PATHS)
    with opened(tmp_path, resume=True) as again:
        assert list(again.done) == list(PATHS)
        assert again.done["b.safetensors"].measured == {"w1": {"relative_error": 0.1}}


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "folder"])
def test_a_damaged_file_is_not_done(tmp_path: Path, damage: str) -> None:
    unfinished(tmp_path, *PATHS[:3])
    path = tmp_path / "b.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "grow":
        path.write_bytes(data + b"x")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with opened(tmp_path, resume=True) as again:
        assert list(again.done) == ["a.safetensors", "c.safetensors"]


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_torn_last_line_is_forgotten_for_good(tmp_path: Path, cut: int) -> None:
    """And what a resumed run records next does not get glued to it."""
    unfinished(tmp_path, *PATHS[:2])
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    with opened(tmp_path, resume=True) as again:
        assert list(again.done) == ["a.safetensors"]
        record_group(again, "c.safetensors")
    with opened(tmp_path, resume=True) as again:
        assert list(again.done) == ["a.safetensors", "c.safetensors"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": "a"}'])
def test_a_run_killed_in_its_first_moment_is_begun_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    with opened(tmp_path, resume=True) as folder:
        assert folder.done == {}
    (tmp_path / "photo.jpg").write_bytes(b"x")
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(OutputError, match="nothing to resume"), opened(tmp_path, resume=True):
        pass


@pytest.mark.parametrize("content", [b"\xff\n", b"[1]\n", b"7\n", b"{\n"])
def test_a_journal_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    with (
        pytest.raises(OutputError, match="journal of an unfinished conversion cannot be read"),
        opened(tmp_path, resume=True),
    ):
        pass
    assert (tmp_path / JOURNAL).read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"{}",
        b"[]",
        b'{"unit": "x", "files": [{"path": 1}], "measured": {}}',
        b'{"unit": "x", "files": [{"path": 5, "size_bytes": 1, "sha256": ""}], "measured": {}}',
        b'{"unit": "x", "files": [], "measured": null}',
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("is_whole", [False, True], ids=["as it is", "with a checksum"])
def test_a_line_that_makes_no_sense_is_skipped(tmp_path: Path, line: bytes, is_whole: bool) -> None:
    with opened(tmp_path) as folder:
        record_group(folder, "a.safetensors")
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(
                (encode_line(json.loads(line)) if is_whole and line[-1:] == b"}" else line) + b"\n"
            )
        record_group(folder, "b.safetensors")
    with opened(tmp_path, resume=True) as again:
        assert list(again.done) == ["a.safetensors", "b.safetensors"]


def test_no_flipped_bit_of_a_journal_is_believed(tmp_path: Path) -> None:
    unfinished(tmp_path, PATHS[0])
    journal = tmp_path / JOURNAL
    data = journal.read_bytes()
    with opened(tmp_path, resume=True) as whole:
        entry = whole.done[PATHS[0]]
    for position in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        journal.write_bytes(flipped)
        if position <= data.index(b"\n"):  # the identity, or its end: which files may be removed
            for mode in ("resume", "overwrite"):
                with pytest.raises(OutputError), opened(tmp_path, **{mode: True}):
                    pass
            continue
        with opened(tmp_path, resume=True) as folder:
            assert folder.done in ({}, {PATHS[0]: entry})


def test_partial_files_are_cleared_on_resume_and_only_ours(tmp_path: Path) -> None:
    unfinished(tmp_path, "a.safetensors")
    (tmp_path / "b.safetensors.partial").write_bytes(b"half")
    (tmp_path / "mine.partial").write_bytes(b"the user's")
    with pytest.raises(OutputError, match=r"did not make") as caught, opened(tmp_path, resume=True):
        pass
    assert caught.value.found == "mine.partial"
    assert names_below(tmp_path) == [
        JOURNAL,
        "a.safetensors",
        "b.safetensors.partial",
        "mine.partial",
    ]
    (tmp_path / "mine.partial").unlink()
    with opened(tmp_path, resume=True):
        assert names_below(tmp_path) == [JOURNAL, "a.safetensors"]


# --- what may be started in --------------------------------------------------------------------------------


def test_what_may_be_started_in(tmp_path: Path) -> None:
    unfinished(tmp_path / "new" / "deep")
    (tmp_path / "empty").mkdir()
    unfinished(tmp_path / "empty", "a.safetensors")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").write_bytes(b"x")
    finished(tmp_path / "done", "a.safetensors")
    for name, found in (
        ("file", "a file"),
        ("foreign", "not empty"),
        ("empty", "an unfinished conversion"),
        ("done", "a finished artifact"),
    ):
        with pytest.raises(OutputError, match=found) as caught, opened(tmp_path / name):
            pass
        assert caught.value.exit_code == 4
        for option, states in (("--resume", "an unf"), ("--overwrite", "an unf a fini")):
            assert (option in caught.value.remedy) == (found[:6] in states)  # no refused choice
    with pytest.raises(OutputError, match="not empty"), opened(tmp_path / "foreign", resume=True):
        pass
    assert names_below(tmp_path / "foreign") == ["photo.jpg"]
    with opened(
        tmp_path / "fresh", resume=True
    ) as folder:  # nothing there yet: --resume simply starts
        assert folder.done == {}


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_replacement_of_another_request(tmp_path: Path, is_begun: bool) -> None:
    """One that never began cannot be resumed; one that was begun is in the way of others, or is begun anew."""
    out = finished(tmp_path / "out", "a.safetensors", content=b"old")
    if is_begun:
        with opened(out, {"schema": "b"}, overwrite=True):
            pass
        with pytest.raises(OutputError, match="cannot be used") as caught, opened(out):
            pass
        assert caught.value.found == "an unfinished conversion"
    differs = "differs from this" + (" one in: schema" if is_begun else " request")
    with (
        OutputFolder(out, IDENTITY, PATHS, lambda _: Difference("request: tp", "2", "1")) as folder,
        pytest.raises(OutputError, match=differs),
    ):
        folder.start(1000, resume=True)
    assert b"old" in (out / "a.safetensors").read_bytes()
    replace(out, "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_is_followed_not_replaced(tmp_path: Path) -> None:
    """`latest -> 2026-11` is the user's: the folder it names changes, the link stays."""
    finished(tmp_path / "real", "a.safetensors", content=b"old")
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    with opened(tmp_path / "latest", overwrite=True) as folder:
        record_group(folder, "a.safetensors", b"new")
        folder.seal(manifest_of(folder))
    assert (tmp_path / "latest").is_symlink()
    assert b"new" in (tmp_path / "real" / "a.safetensors").read_bytes()


# --- replacing ---------------------------------------------------------------------------------------------


def replace(out: Path, *paths: str) -> None:
    with opened(out, overwrite=True) as folder:
        for path in paths:
            record_group(folder, path, b"new")
        folder.seal(manifest_of(folder))


@pytest.mark.parametrize("at_once", [True, False])
def test_the_old_artifact_stays_until_the_new_one_is_complete(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(durable_files, "_exchange_at_once", lambda *_: False)
    out = finished(tmp_path / "out", *PATHS, content=b"old")
    before = {path: (out / path).read_bytes() for path in names_below(out)}
    with opened(out, overwrite=True) as folder:
        record_group(folder, "a.safetensors", b"new")
        record_group(folder, PATHS[3], b"new")
        assert {path: (out / path).read_bytes() for path in names_below(out)} == before
        assert unfinished_folder(out) == side_folder(out)
        folder.seal(manifest_of(folder))
    assert names_below(out) == ["a.safetensors", PATHS[3], "hqconv.json"]
    assert b"new" in (out / "a.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "stray", ["notes.txt", "experts/tp0-ep0/mine.bin", "deep/er/photo.jpg", ".hidden", "link"]
)
def test_strays_are_refused_by_name_and_nothing_is_lost(tmp_path: Path, stray: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    out = finished(tmp_path / "out", "a.safetensors", PATHS[3])
    half = unfinished(tmp_path / "half", "a.safetensors", PATHS[3])
    for root in (out, half):
        (root / stray).parent.mkdir(parents=True, exist_ok=True)
        if stray == "link":
            (root / stray).symlink_to(outside)
        else:
            (root / stray).write_bytes(b"mine")
        before = names_below(root)
        with (
            pytest.raises(OutputError, match="files that hqconv did not make") as caught,
            opened(root, overwrite=True),
        ):
            pass
        assert caught.value.found == stray
        assert caught.value.exit_code == 4
        assert names_below(root) == before
    assert names_below(outside) == ["kept"]
    assert not side_folder(out).exists()


def test_a_stray_that_comes_meanwhile_keeps_the_old_artifact(tmp_path: Path) -> None:
    out = finished(tmp_path / "out", "a.safetensors", content=b"old")
    with opened(out, overwrite=True) as folder:
        record_group(folder, "a.safetensors", b"new")
        (out / "late.txt").write_bytes(b"mine")
        with pytest.raises(OutputError, match="did not make"):
            folder.seal(manifest_of(folder))
    assert b"old" in (out / "a.safetensors").read_bytes()
    (out / "late.txt").unlink()
    with opened(out, resume=True) as folder:
        assert list(folder.done) == ["a.safetensors"]
        folder.seal(manifest_of(folder))
    assert b"new" in (out / "a.safetensors").read_bytes()


def test_files_that_the_hub_and_git_put_there_are_carried_over(tmp_path: Path) -> None:
    out = finished(tmp_path / "out", "a.safetensors")
    for name in COMPANIONS:
        if name.startswith(".") and "." not in name[1:]:
            (out / name / "sub").mkdir(parents=True)
            (out / name / "sub" / "file").write_bytes(name.encode())
        else:
            (out / name).write_bytes(name.encode())
    before = read_tree(out)
    replace(out, "b.safetensors")
    ours = {"a.safetensors", "b.safetensors", "hqconv.json"}
    after = read_tree(out)
    assert len(after.keys() - ours) == len(COMPANIONS)
    assert all(after[name] == before[name] for name in after.keys() - ours)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", ["../outside/kept", "/etc/hostname", "a\0b", "link/kept"])
def test_a_manifest_that_lists_files_elsewhere_removes_none_of_them(
    tmp_path: Path, path: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    out = finished(tmp_path / "out", "a.safetensors")
    document = json.loads((out / "hqconv.json").read_bytes())
    of_a = document["files"]["a.safetensors"]
    document["files"] |= {path: of_a, "link": of_a}
    (out / "hqconv.json").write_text(json.dumps(document))
    (out / "link").symlink_to(outside)
    if path == "link/kept":
        replace(out, "b.safetensors")
    else:
        with pytest.raises(OutputError, match="cannot be read"):
            replace(out, "b.safetensors")
    assert names_below(outside) == ["kept"]
    assert Path("/etc/hostname").exists()


def test_a_folder_without_a_readable_manifest_is_not_replaced(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", '{"files": {}}'), ("c", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hqconv.json").write_text(text)
        (tmp_path / name / "photo.jpg").write_bytes(b"x")
        with pytest.raises(OutputError), opened(tmp_path / name, overwrite=True):
            pass
        assert names_below(tmp_path / name) == ["hqconv.json", "photo.jpg"]


def test_an_unfinished_conversion_is_started_anew(tmp_path: Path) -> None:
    unfinished(tmp_path / "out", "a.safetensors", PATHS[3])
    (tmp_path / "out" / "b.safetensors.partial").write_bytes(b"half")
    with opened(tmp_path / "out", {"schema": "other"}, overwrite=True) as folder:
        assert folder.done == {}
        assert names_below(tmp_path / "out") == [JOURNAL]


# --- one process at a time ---------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from tests.conversion.test_output_folder import opened
with opened(Path(sys.argv[1]), overwrite=sys.argv[2] == "overwrite"):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another_process(out: Path, mode: str = "") -> Iterator[int]:
    command = [sys.executable, "-c", HOLDER, str(out), mode]
    process = processes.Process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(60)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("modes", [{}, {"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_second_process_is_told_who_is_at_work(
    tmp_path: Path, modes: dict[str, bool], replaces: bool
) -> None:
    out = tmp_path / "out"
    if replaces:
        finished(out, "a.safetensors")
    with held_by_another_process(out, "overwrite" if replaces else "") as pid:
        place = side_folder(out) if replaces else out
        before = (place / JOURNAL).read_bytes()
        with (
            pytest.raises(OutputError, match="Another process is at work") as caught,
            opened(out, **modes),
        ):
            pass
        assert caught.value.found == f"process {pid} on {socket.gethostname()}"
        assert caught.value.exit_code == 4
        assert (place / JOURNAL).read_bytes() == before
    with opened(out, resume=True):  # the lock went with the process
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(next(iter(journal_module._NO_LOCKS)), "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with opened(tmp_path / "out") as folder:
        assert not folder.has_lock
    monkeypatch.undo()
    with opened(tmp_path / "out", resume=True) as folder:
        assert folder.has_lock


def test_a_journal_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOURNAL).symlink_to(tmp_path / "precious")
    for modes in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError), opened(tmp_path / "out", **modes):
            pass
    assert (tmp_path / "precious").read_bytes() == b"mine"


# --- finished, with rests of what was replaced ---------------------------------------------------------------


def killed_twice(tmp_path: Path, rest: str) -> Path:
    """A replacement killed after the exchange, and a second one in its first moment: its journal is still empty."""
    out = finished(tmp_path / "out", "a.safetensors", content=b"new")
    side = side_folder(out)
    if rest == "nothing":
        side.mkdir()
    else:
        finished(side, "a.safetensors", "b.safetensors", content=b"old")
        if rest == "half of the old one":
            (side / "a.safetensors").unlink()
    (side / ".gitattributes").write_text("* -text")
    (side / JOURNAL).write_bytes(b"")
    return out


RESTS = ["nothing", "the old one", "half of the old one"]


@pytest.mark.parametrize("rest", RESTS)
def test_a_finished_artifact_is_recognised_beside_an_empty_journal(
    rest: str, tmp_path: Path
) -> None:
    out = killed_twice(tmp_path, rest)
    with OutputFolder(out, IDENTITY, PATHS, lambda _: None) as folder:
        assert folder.start(1000, resume=True) is False
        assert folder.warnings == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert names_below(out) == [".gitattributes", "a.safetensors", "hqconv.json"]
    assert b"new" in (out / "a.safetensors").read_bytes()


def test_a_file_of_the_user_beside_an_empty_journal_stays(tmp_path: Path) -> None:
    out = killed_twice(tmp_path, "the old one")
    (side_folder(out) / "photo.jpg").write_bytes(b"mine")
    with OutputFolder(out, IDENTITY, PATHS) as folder:
        assert folder.start(1000, resume=True) is False
        assert "did not make" in folder.warnings[0]
    assert names_below(side_folder(out)) == ["photo.jpg"]


@pytest.mark.parametrize("damage", ["cut", "gone", "a folder"])
def test_an_artifact_without_its_files_is_not_called_finished(damage: str, tmp_path: Path) -> None:
    """And what is left of the old one stays."""
    out = killed_twice(tmp_path, "the old one")
    (out / "a.safetensors").unlink()
    if damage == "cut":
        (out / "a.safetensors").write_bytes(b"x")
    elif damage == "a folder":
        (out / "a.safetensors").mkdir()
    before = names_below(tmp_path)
    with (
        OutputFolder(out, IDENTITY, PATHS) as folder,
        pytest.raises(OutputError, match="missing or has another size") as caught,
    ):
        folder.start(1000, resume=True)
    assert "out/a.safetensors" in caught.value.where
    assert caught.value.found == ("1 bytes" if damage == "cut" else "no such file")
    assert "--overwrite" in caught.value.remedy
    assert names_below(tmp_path) == before


def test_the_journal_of_a_finished_artifact_goes_when_it_is_replaced(tmp_path: Path) -> None:
    """Killed after sealing, and the replacement after it had begun: both have a journal."""
    out = finished(tmp_path / "out", "a.safetensors", content=b"old")
    with opened(out, overwrite=True):
        pass
    (out / JOURNAL).write_bytes((side_folder(out) / JOURNAL).read_bytes())
    with opened(out, resume=True) as folder:
        record_group(folder, "a.safetensors", b"new")
        folder.seal(manifest_of(folder))
        assert folder.warnings == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert names_below(out) == ["a.safetensors", "hqconv.json"]
