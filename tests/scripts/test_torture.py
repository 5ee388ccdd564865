"""Torture in small: suites that have no tests elsewhere, what their judges see, and the table of the documents."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hqconv.conversion.output_folder import side_folder
from scripts.torture.__main__ import BEGIN, END, SUITES
from scripts.torture.commands import FAIL, KILL_WITHIN, SHORT, Ended, Job, Watch
from scripts.torture.place import CARD, NOTE, Place, manners
from scripts.torture.tally import Tally
from tests.make.places import REPO

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
DOCUMENT = REPO / "docs/reliability.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with closing(Place(tmp_path_factory.mktemp("torture").resolve())) as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if suite.small])
def test_small_counts(name: str, place: Place, tmp_path: Path) -> None:
    suite, tally = SUITES[name], Tally(name, seed=1)
    suite.run(place if suite.needs == "place" else tmp_path, suite.small, tally)
    assert tally.problems == []
    assert suite.small <= tally.cases <= suite.small + 3
    assert sum(tally.counts.values()) >= tally.cases


# --- what is watched ---------------------------------------------------------------------------------------


def test_a_call_is_the_last_or_fails_or_falls_short(place: Place) -> None:
    def once(how: int, number: int) -> Ended:
        place.clear(has_old=False)
        watch = Watch(place.root, number, how, error=5)
        return place.zygote.run(Job(place.command(), watch))[0]

    whole = once(0, 0)
    assert (whole.code, whole.call) == (0, "")
    assert whole.num_calls > 60
    killed = once(KILL_WITHIN, 20)
    assert killed.code == -9
    assert killed.call.split()[1].startswith(str(place.root))
    failed = next(ended for number in range(20, 30) if (ended := once(FAIL, number)).code)
    assert failed.code == 4  # a folder that is there need not be made
    assert "Input/output error" in failed.stderr
    assert once(SHORT, 20).code == 0
    assert place.is_final(has_old=False) == ""


# --- what the judges see -----------------------------------------------------------------------------------


def flip(place: Place) -> None:
    path = next(place.out.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Place], object], str]] = {
    "none": (lambda place: None, ""),
    "a bit": (flip, "a false artifact"),
    "a file less": (
        lambda place: next(place.out.rglob("*.safetensors")).unlink(),
        "a false artifact",
    ),
    "no manifest": (
        lambda place: (place.out / "hqconv.json").unlink(),
        "neither the old artifact nor the new",
    ),
    "no card": (
        lambda place: (place.out / CARD).unlink(),
        "a file of the user in the artifact is lost",
    ),
    "another note": (
        lambda place: (place.root / NOTE).write_text("x"),
        "a file beside the output changed",
    ),
    "gone": (
        lambda place: place.out.rename(place.root / "away"),
        "a file of the user in the artifact is lost",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_loss_is_seen(damage: str, place: Place) -> None:
    change, text = DAMAGES[damage]
    place.clear(has_old=True)
    change(place)
    problem = place.problem(has_old=True)
    assert problem.startswith(text)
    assert bool(problem) == bool(text)


def test_a_false_artifact_and_what_is_left_over_are_seen(place: Place) -> None:
    place.clear(has_old=False)
    assert place.finish(has_old=False) == ""
    assert place.problem(has_old=False) == ""
    side_folder(place.out).mkdir()
    assert place.is_final(has_old=False) == "left over: ['.out.hqconv']"
    side_folder(place.out).rmdir()
    flip(place)
    assert place.problem(has_old=False) == "a false artifact"
    assert place.is_final(has_old=False).startswith("in the end other bytes: ['out/")


@pytest.mark.parametrize(
    ("code", "stderr", "problem"),
    [
        (0, "warning: x", ""),
        (4, "error: The disk is full.", ""),
        (-9, "error: x\nerror: y", "2 messages"),
        (70, "internal error: KeyError", "a wrong code"),
        (4, "", "0 messages"),
        (4, "error: x\nTraceback (most recent call last):", "a traceback"),
    ],
)
def test_manners(code: int, stderr: str, problem: str) -> None:
    found = manners(Ended(code, "", stderr, "", 0), (0, 4, -9))
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


# --- the table ---------------------------------------------------------------------------------------------


def test_the_table_is_of_a_full_run_without_a_failure() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ][2:]
    assert [row[0] for row in found] == [*SUITES]
    for name, cases, _, failures, seed, day, _ in found:
        assert int(cases.split()[0]) >= SUITES[name].full
        assert failures == "0"
        assert seed.isdigit()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
