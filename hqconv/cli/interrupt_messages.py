"""What a conversion leaves where it is stopped, in words: each text with the files that make it true."""

from __future__ import annotations

from pathlib import Path

from hqconv.cli.interrupt import NOTHING, Case
from hqconv.cli.interrupt_process import stamp
from hqconv.errors import printable_line
from hqconv.schemas.artifact_names import JOURNAL, MANIFEST

_GO_ON = "Run the same command with --resume to go on, or with --overwrite to start anew."


def of_source(src: str) -> Case:
    """Before anything is begun. What the Hub gave lies in its cache."""
    try:
        is_here = Path(src).exists()
    except OSError:  # which is said when the source is opened
        is_here = True
    if is_here:
        return (NOTHING,)
    return ("Interrupted. No artifact was begun; what was fetched is kept. Run the same command again.",)


def of_output(out: Path, nothing: Case) -> tuple[Case, ...]:
    """From now on, for an artifact that will be at `out`, whatever lies there already.

    nothing: if nothing comes of it.
    """
    from hqconv.conversion.output_folder import side_folder

    place = out.resolve()
    manifest, side = str(place / MANIFEST), side_folder(place)
    of_old, unfinished = stamp(manifest), f"is no artifact yet; it is unfinished. {_GO_ON}"
    name = _name(out)
    cases: list[Case] = [
        (
            f"Interrupted. {name} still holds the old artifact; the new one is unfinished. {_GO_ON}",
            f":{side / JOURNAL}",
            f":{manifest}",
        ),
        (f"Interrupted. {name} {unfinished}", f":{side / JOURNAL}"),
    ]
    if of_old:
        text = f"Interrupted. Nothing was written; {name} holds the artifact that was there before."
        cases.append((text, f"{of_old}:{manifest}"))
    tidy = "the same command with --resume removes what is left of the old one"
    cases += [
        (f"Interrupted. {name} holds the finished artifact; {tidy}.", f":{manifest}", f":{side}"),
        (f"Interrupted. {name} holds a finished artifact.", f":{manifest}"),
        (f"Interrupted. {name} {unfinished}", f":{place / JOURNAL}"),
        nothing,
    ]
    return tuple(cases)


def of_kernels(folder: Path) -> tuple[Case, ...]:
    """From now on, for kernels that are compiled into a folder."""
    from hqconv.serving.warm.kernel_store import MANIFEST as LIST

    manifest, name = str(folder.resolve() / LIST), _name(folder)
    of_old = stamp(manifest)
    again = "what was compiled now is not listed, and is compiled again by the same command."
    cases: list[Case] = []
    if of_old:
        text = f"Interrupted. {name} lists the kernels that were there before; {again}"
        cases.append((text, f"{of_old}:{manifest}"))
    cases.append((f"Interrupted. {name} holds the finished kernels.", f":{manifest}"))
    cases.append((f"Interrupted. {name} lists no kernels; {again}",))
    return tuple(cases)


def of_page(place: Path) -> tuple[Case, ...]:
    """From now on, for a page that is written when all is read."""
    page, name = str(place.resolve()), _name(place)
    of_old = stamp(page)
    cases: list[Case] = [(f"Interrupted. {name} is as it was before.", f"{of_old}:{page}")] if of_old else []
    return (*cases, (f"Interrupted. {name} holds the finished page.", f":{page}"), (NOTHING,))


def _name(path: Path) -> str:
    """On one line."""
    return printable_line(str(path))
