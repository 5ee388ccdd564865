"""Signal handling: SIGINT, SIGTERM and SIGHUP end the command at once and print one line about the state on disk.

A separate thread waits for signals: Python handles them only between two instructions of the main thread, and some
libraries swallow an exception that is raised there. Nothing is unwound, because a killed conversion can be resumed. The
process replaces itself by `interrupt_process` (exec). All its threads end there, so the printed line stays true.

This module is loaded before all libraries, so it imports little; functions that need more import it themselves.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hqconv.cli import interrupt_process
from hqconv.cli.interrupt_process import stamp
from hqconv.conversion.torchrun import speaks_for_machine

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING = "Interrupted. Nothing was written."
# A message and the conditions under which it is true, in the syntax of `interrupt_process.choose`.
Case = tuple[str, ...]

_taken: list[signal.Signals] = []
_once = threading.Lock()
_cases: list[Case] = [(NOTHING,)]
_before: list[str] = [""]


def listen() -> None:
    """Install the handlers for the rest of the process. Ignored signals stay ignored (background jobs, nohup)."""
    if _taken:
        return
    for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)
            _taken.append(number)
    _open_streams()
    atexit.register(_ignore_signals)  # registered first, so it runs last
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_in_child)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        threading.Thread(target=_watch, args=(reader,), name="hqconv-signals", daemon=True).start()
    except RuntimeError:  # no more threads: signals are handled by the main thread alone
        return
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def leave(code: object) -> NoReturn:
    """End the process at once with the exit code of a SystemExit, after running the registered exit functions.

    Python needs a second to tear down torch, and no signal would be handled meanwhile.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed stream, or one without a reader
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def expect(*cases: Case) -> None:
    """Set the messages for an interrupt: the first case whose conditions hold. The last case has no conditions."""
    _cases[:] = cases


def set_prefix(text: str) -> None:
    """Set text that is written before the message, e.g. the escape sequence that shows the cursor again."""
    _before[:] = [text]


def message() -> str:
    """Return the message for an interrupt at this moment."""
    return interrupt_process.choose(_flat())


def _flat() -> list[str]:
    return [text for case in _cases for text in (*case, "")]


def _handle(number: int, _: FrameType | None) -> None:
    _stop(number)


def _watch(reader: int) -> None:
    """Wait for signals: Python writes the number of each signal into this pipe at once."""
    while data := os.read(reader, 1):
        if data[0] in _taken:
            _stop(data[0])


def _stop(number: int) -> None:
    if not _once.acquire(blocking=False):
        return
    _block_signals()  # stays in force after exec
    cases = _flat() if speaks_for_machine() else []
    try:
        program = [sys.executable, "-I", "-S", interrupt_process.__file__]
        os.execv(sys.executable, [*program, str(int(number)), *_before, *cases])
    except (OSError, ValueError):
        interrupt_process.end(number, _before[0], cases)


def _ignore_signals() -> None:
    """Ignore further signals, because the work is done and the exit code is fixed."""
    for number in _taken:
        signal.signal(number, signal.SIG_IGN)


def _reset_in_child() -> None:
    """Remove the handlers in a forked process: it has no watching thread and must not write to the parent's pipe."""
    signal.set_wakeup_fd(-1)
    for number in _taken:
        signal.signal(number, signal.SIG_DFL)
    _taken.clear()
    _unblock_signals()


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _open_streams() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


_GO_ON = "Run the same command with --resume to continue, or with --overwrite to start again."
_UPDATE = "Run the same command again to continue."


def source_case(src: str) -> Case:
    """Message before the output is begun. Downloads stay in the Hub cache."""
    try:
        is_here = Path(src).exists()
    except OSError:  # reported when the source is opened
        is_here = True
    if is_here:
        return (NOTHING,)
    return ("Interrupted. No artifact was begun; downloaded files are kept. Run the same command again.",)


def output_cases(out: Path, nothing: Case, *, is_update: bool = False) -> tuple[Case, ...]:
    """Messages during a conversion to `out`, whatever the folder holds now.

    nothing: the case that no output was begun. is_update: the same command continues.
    """
    from hqconv.conversion.output_folder import side_folder
    from hqconv.schemas.artifact_names import JOURNAL, MANIFEST

    folder = out.resolve()
    manifest, side = str(folder / MANIFEST), side_folder(folder)
    go_on = _UPDATE if is_update else _GO_ON
    old_stamp, unfinished = stamp(manifest), f"is no artifact yet; it is unfinished. {go_on}"
    name = _name(out)
    cases: list[Case] = [
        (
            f"Interrupted. {name} still holds the old artifact; the new one is unfinished. {go_on}",
            f":{side / JOURNAL}",
            f":{manifest}",
        ),
        (f"Interrupted. {name} {unfinished}", f":{side / JOURNAL}"),
    ]
    if old_stamp:
        text = f"Interrupted. Nothing was written; {name} holds the artifact that was there before."
        cases.append((text, f"{old_stamp}:{manifest}"))
    tidy = f"the same command{'' if is_update else ' with --resume'} removes the rest of the old one"
    cases += [
        (f"Interrupted. {name} holds the finished artifact; {tidy}.", f":{manifest}", f":{side}"),
        (f"Interrupted. {name} holds a finished artifact.", f":{manifest}"),
        (f"Interrupted. {name} {unfinished}", f":{folder / JOURNAL}"),
        nothing,
    ]
    return tuple(cases)


def recipe_cases(out: Path, nothing: Case) -> tuple[Case, ...]:
    """Messages during an allocation to the recipe `out`. nothing: the case that no measurement was begun."""
    from hqconv.conversion.allocation_recipe import journal_path

    recipe, journal, name = str(out.resolve()), str(journal_path(out.resolve())), _name(out)
    old_stamp, kept = stamp(recipe), "measured layers are kept. Run the same command again to continue."
    cases: list[Case] = []
    if old_stamp:
        text = f"Interrupted. {name} is as it was before; {kept}"
        cases.append((text, f"{old_stamp}:{recipe}", f":{journal}"))
        cases.append((f"Interrupted. Nothing was written; {name} is as it was before.", f"{old_stamp}:{recipe}"))
    text = f"Interrupted. {name} holds the finished recipe; the same command removes the journal beside it."
    cases += [
        (text, f":{recipe}", f":{journal}"),
        (f"Interrupted. {name} holds the finished recipe.", f":{recipe}"),
        (f"Interrupted. {name} is not written yet; {kept}", f":{journal}"),
        nothing,
    ]
    return tuple(cases)


def kernel_cases(folder: Path) -> tuple[Case, ...]:
    """Messages during the compilation of kernels into a folder."""
    from hqconv.serving.warm.kernel_store import MANIFEST as LIST

    manifest, name = str(folder.resolve() / LIST), _name(folder)
    old_stamp = stamp(manifest)
    again = "kernels compiled in this run are not listed, and the same command compiles them again."
    cases: list[Case] = []
    if old_stamp:
        text = f"Interrupted. {name} lists the kernels that were there before; {again}"
        cases.append((text, f"{old_stamp}:{manifest}"))
    cases.append((f"Interrupted. {name} holds the finished kernels.", f":{manifest}"))
    cases.append((f"Interrupted. {name} lists no kernels; {again}",))
    return tuple(cases)


def push_case(step: str, repo: str, commit: str, artifact: str = "") -> Case:
    """Message during a push. step: value of `PushStep`. artifact: a sentence about the folder, if it is new."""
    again = "Run the same command again: uploaded files are not sent again."
    texts = {
        "started": f"{repo} holds no new commit. {again}",
        "committing": f"The Hub was making the commit: {repo} holds either the old files or the new artifact. {again}",
        "done": f"{repo} holds the artifact, at commit {commit}.",
    }
    return (" ".join(filter(None, ["Interrupted.", artifact, texts[step]])),)


def page_cases(path: Path) -> tuple[Case, ...]:
    """Messages while a report is prepared; its file is written at the end."""
    page, name = str(path.resolve()), _name(path)
    old_stamp = stamp(page)
    cases: list[Case] = [(f"Interrupted. {name} is as it was before.", f"{old_stamp}:{page}")] if old_stamp else []
    return (*cases, (f"Interrupted. {name} holds the finished page.", f":{page}"), (NOTHING,))


def card_case() -> Case:
    """Message while an evaluation runs that will be written to the model card."""
    return ("Interrupted. The model card is as it was before, or holds the finished evaluation.",)


def _name(path: Path) -> str:
    """Path on one line, without control characters."""
    from hqconv.errors import printable_line

    return printable_line(str(path))
