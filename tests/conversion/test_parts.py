"""Parts of a conversion (`--part I/N`): the bytes of one process, whatever order, kills and rivals."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hqconv.conversion.journal import FolderJournal, Journal, JournalEntry, encode_line
from hqconv.conversion.option_values import local_rank, torchrun_part
from hqconv.conversion.output_folder import OutputFolder, Part
from hqconv.errors import HqconvError, OutputError, RequestError
from hqconv.io.durable_files import FileRecord
from hqconv.planning.output_units import MoeLayerPlan
from hqconv.schemas.artifact_names import JOURNAL, MANIFEST, PARTIAL, part_journal
from tests.make import command, processes
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

SCHEMA, NUM_UNITS = "mxfp4", 4  # three layers and a copied shard
OPTIONS = ("--schema", SCHEMA, "--target", "sm90", "--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("parts") / "src", num_layers=3, num_experts=4)


@pytest.fixture(scope="module")
def alone(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("alone") / "out"
    run(src, out, SCHEMA)
    return snapshot(out)


def part(src: Path, out: Path, text: str, **options: Any) -> Any:
    return run(src, out, SCHEMA, threads=1, part=text, **options)


def together(src: Path, out: Path, *parts: str) -> list[Any]:
    """Parts in threads, each in the place of a process: reports, or errors."""
    found: list[Any] = [None] * len(parts)

    def work(index: int) -> None:
        try:
            found[index] = part(src, out, parts[index])
        except HqconvError as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# --- shares


class Layer(MoeLayerPlan):
    name, num_bytes_read = "", 0  # type: ignore[assignment]

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 50])
def test_every_unit_has_one_part_and_shares_are_even(count: int) -> None:
    draw = random.Random(count)
    sizes = [draw.choice((0, 1, 7, 1000)) for _ in range(40)] + [0]
    units: list[Any] = [
        (Layer if n % 2 else SimpleNamespace)(name=str(n), num_bytes_read=s)
        for n, s in enumerate(sizes)
    ]
    shares = [Part(number, count).share(units) for number in range(1, count + 1)]
    assert sorted(unit.name for share in shares for unit in share) == sorted(
        unit.name for unit in units
    )
    for kind in (True, False):
        loads = [
            sum(u.num_bytes_read for u in share if isinstance(u, MoeLayerPlan) is kind)
            for share in shares
        ]
        assert max(loads) <= sum(loads) / count + 1000


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "-1/2", "1/2/3", "a/b", "", "1/99999"])
def test_no_part(text: str, src: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such part"):
        part(src, tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


def test_torchrun_names_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (torchrun_part(), local_rank()) == (None, (0, 1))
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert (torchrun_part(), local_rank()) == (None, (0, 1))  # other launchers set some of them
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert (torchrun_part(), local_rank()) == ("6/8", (1, 4))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torchrun_part() is None


# --- any order, kills


def test_one_after_the_other_in_any_order(src: Path, alone: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = part(src, out, "2/2")
    assert not first.is_complete
    assert (first.part, first.parts_at_work, first.manifest_sha256) == ("2/2", (), "")
    assert 0 < len(first.missing) < NUM_UNITS
    assert len(first.errors) + len(first.missing) >= 3
    assert not (out / MANIFEST).exists()
    last = part(src, out, "1/2")
    assert last.is_complete
    assert snapshot(out) == alone
    again = part(src, out, "2/2")
    assert (again.was_finished, again.manifest_sha256) == (True, last.manifest_sha256)
    assert snapshot(out) == alone


@pytest.mark.parametrize("count", [2, 7])
def test_at_once_exactly_one_seals(
    count: int, src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    reports = together(
        src, tmp_path / "out", *(f"{number}/{count}" for number in range(1, count + 1))
    )
    assert all(not isinstance(report, HqconvError) for report in reports), reports
    sealed = [report for report in reports if report.is_complete and not report.was_finished]
    assert len(sealed) == 1
    assert snapshot(tmp_path / "out") == alone


def test_the_last_two_end_at_the_same_instant(
    src: Path, alone: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, leave = threading.Barrier(2), OutputFolder.leave

    def at_once(self: OutputFolder) -> Any:
        barrier.wait(60)
        return leave(self)

    monkeypatch.setattr(OutputFolder, "leave", at_once)
    reports = together(src, tmp_path / "out", "1/2", "2/2")
    (sealed,) = [report for report in reports if report.is_complete and not report.was_finished]
    other = next(report for report in reports if report is not sealed)
    assert other.was_finished or other.parts_at_work or other.missing
    assert snapshot(tmp_path / "out") == alone


def test_a_part_whose_units_another_one_sealed(
    src: Path, alone: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one took them over between the end of the work and the lock of the folder."""
    out, leave = tmp_path / "out", OutputFolder.leave

    def after_the_other(self: OutputFolder) -> Any:
        monkeypatch.setattr(OutputFolder, "leave", leave)
        assert self._part_journal is not None
        self._part_journal.close()
        assert part(src, out, "2/2").is_complete
        return leave(self)

    monkeypatch.setattr(OutputFolder, "leave", after_the_other)
    report = part(src, out, "1/2")
    assert (report.is_complete, report.was_finished) == (True, True)
    assert snapshot(out) == alone


_KILLED = """
import os, signal, sys
from hqconv.conversion.output_folder import OutputFolder
record = OutputFolder.record
def then_die(self, entry):
    record(self, entry)
    os.kill(os.getpid(), signal.SIGKILL)
OutputFolder.record = then_die
from hqconv.__main__ import main
main()
"""


def test_what_a_killed_part_did_is_taken_over(
    src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """By parts of another count, and by a conversion without parts."""
    out = tmp_path / "out"
    killed = [sys.executable, "-c", _KILLED, "convert", str(src), "-o", str(out), *OPTIONS]
    rank = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
    died = processes.run(killed, env={**os.environ, **rank}, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert (out / part_journal(1, 2)).exists()  # torchrun's rank is the part
    shutil.copytree(out, tmp_path / "whole")
    reports = [part(src, out, text) for text in ("1/3", "3/3", "2/3")]
    whole = run(src, tmp_path / "whole", SCHEMA, resume=True)
    assert sum(report.num_units_resumed for report in reports) >= 1
    assert whole.num_units_resumed >= 1
    for folder in (out, tmp_path / "whole"):
        assert snapshot(folder) == alone


def test_two_that_begin_in_one_new_folder_wait_for_each_other(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever creates the journal may be the second to lock it."""
    barrier, lock, begun = threading.Barrier(2), Journal._lock, set[int]()

    def at_once(self: Journal, descriptor: int, latest: float) -> None:
        if threading.get_ident() not in begun:
            begun.add(threading.get_ident())
            barrier.wait(60)
        lock(self, descriptor, latest)

    monkeypatch.setattr(Journal, "_lock", at_once)
    reports = together(src, tmp_path / "out", "1/2", "2/2")
    assert [isinstance(report, HqconvError) for report in reports] == [False, False], reports


# --- rivals and refusals


@pytest.mark.parametrize("rival", ["1/2", "1/3", "2/4"])
def test_no_rival_beside_a_part_at_work(
    rival: str, src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """The same part, parts of another count, and whole conversions; the other part of the same count may work."""
    out = tmp_path / "out"
    part(src, out, "2/2")
    with Journal(out / part_journal(1, 2)) as held:
        held.begin({})
        with pytest.raises(OutputError, match="Another process is at work") as caught:
            part(src, out, rival)
        assert "part 1/2" in str(caught.value.found)
        for mode in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(OutputError, match="Another process is at work"):
                run(src, out, SCHEMA, **mode)  # type: ignore[arg-type]
        assert part(src, out, "2/2").parts_at_work == ("1/2",)
    assert part(src, out, "1/2").is_complete
    assert snapshot(out) == alone


def test_nothing_is_sealed_while_a_part_may_make_files_anew(
    src: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """All units are recorded, but a part that joined again found a damaged file."""
    out = tmp_path / "out"
    part(src, out, "1/2")
    with Journal(out / part_journal(1, 2)) as again:
        again.begin({})
        report = part(src, out, "2/2")
        assert (report.is_complete, report.missing, report.parts_at_work) == (False, (), ("1/2",))
    assert part(src, out, "1/2").is_complete
    assert snapshot(out) == alone


def test_no_part_beside_a_whole_conversion(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqconv.conversion.output_folder._WAIT_S", 0.1)
    (tmp_path / "out").mkdir()
    with (
        FolderJournal(tmp_path / "out"),
        pytest.raises(OutputError, match="Another process is at work"),
    ):
        part(src, tmp_path / "out", "1/2")


def test_a_part_of_another_request_is_refused(src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part(src, out, "1/2")
    for count in (1, 2):
        with pytest.raises(OutputError, match="differs from this"):
            run(src, out, "int8", part="2/2")
        assert part(src, out, "2/2").is_complete is True, count


def test_modes_and_folders_that_parts_do_not_have(src: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    for mode in ("overwrite", "update"):
        with pytest.raises(RequestError, match=f"--{mode} and --part exclude each other"):
            part(src, out, "1/2", **{mode: True})
    other.mkdir()
    (other / "mine").write_text("x")
    with pytest.raises(OutputError, match="cannot be used"):
        part(src, other, "1/2")
    assert [path.name for path in other.iterdir()] == ["mine"]
    side = tmp_path / ".out.hqconv"
    side.mkdir()
    (side / JOURNAL).touch()
    with pytest.raises(OutputError, match="cannot be used") as caught:
        part(src, out, "1/2")
    assert "--overwrite" in str(caught.value.found)
    assert not out.exists()


def test_without_locks_there_are_no_parts(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OutputError, match="file system with locks"):
        part(src, tmp_path / "out", "1/2")
    assert not list((tmp_path / "out").rglob("*"))


# --- journals


def entry_of(unit: str) -> JournalEntry:
    return JournalEntry(unit, [FileRecord("a", 1, "0" * 64)], {"w1": 1.5})


def write_part_journal(root: Path, identity: dict[str, Any], unit: str) -> None:
    with Journal(root / part_journal(2, 3)) as journal:
        journal.begin(identity)
        journal.record(entry_of(unit))


def test_journals_of_parts_are_taken_over_once(tmp_path: Path) -> None:
    identity = {"request": "x"}
    with FolderJournal(tmp_path) as journal:
        journal.begin(identity)
    write_part_journal(tmp_path, identity, "unit")
    with FolderJournal(tmp_path) as journal:
        assert journal.entries == [entry_of("unit")]
        assert (tmp_path / part_journal(2, 3)).exists()  # until the entry is on the disk elsewhere
        journal.begin(identity)
        assert not (tmp_path / part_journal(2, 3)).exists()
    with FolderJournal(tmp_path) as journal:
        assert journal.entries == [entry_of("unit")]
        journal.restart()
    with FolderJournal(tmp_path) as journal:
        assert (journal.identity, journal.entries) == (None, [])


@pytest.mark.parametrize("content", [None, b"", b"\0" * 300 + b"\n", b"half a line", b"[]\n{}\n"])
def test_other_journals_are_not_taken_over(content: bytes | None, tmp_path: Path) -> None:
    with FolderJournal(tmp_path) as journal:
        journal.begin({"request": "x"})
    write_part_journal(tmp_path, {"request": "another"}, "unit")
    if content is not None:
        (tmp_path / part_journal(2, 3)).write_bytes(content)
    with FolderJournal(tmp_path) as journal:
        assert journal.entries == []
        journal.begin({"request": "x"})
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_a_new_journal_that_another_process_locked_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process that created the file is refused afterwards."""
    lock = Journal._lock

    def second(self: Journal, descriptor: int, latest: float) -> None:
        self.path.write_bytes(encode_line({"request": "x"}) + b"\n")
        lock(self, descriptor, latest)

    monkeypatch.setattr(Journal, "_lock", second)
    journal = Journal(tmp_path / JOURNAL)
    assert journal.identity == {"request": "x"}
    journal.drop()
    assert (tmp_path / JOURNAL).exists()


# --- the command


def test_the_command(src: Path, alone: dict[str, str], tmp_path: Path) -> None:
    def call(*words: object) -> Any:
        done = command.call("convert", src, "-o", tmp_path / "out", *OPTIONS, *words)
        return done.exit_code, done.output

    code, text = call("--part", "1/2", "--max-error", "1e-9")
    assert code == 0, text
    assert "is no artifact yet" in text
    assert "the last one finishes" in text
    code, text = call("--part", "2/2", "--dry-run")
    assert code == 0, text
    assert call("--part", "2/2", "--max-error", "1e-9")[0] == 1  # of the finished artifact
    assert snapshot(tmp_path / "out") == alone
    assert call("--part", "2/2")[0] == 0
    assert call("--part", "3/2")[0] == 2
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(PARTIAL)]
