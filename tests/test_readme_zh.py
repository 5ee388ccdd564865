"""README.zh.md says what README.md does: the same commands, figures, names and links, section by section."""

from __future__ import annotations

import re
from itertools import zip_longest

from tests.make.places import REPO

ENGLISH, CHINESE = (
    (REPO / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")
)
CODE = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?<![.,])")


def test_each_links_to_the_other() -> None:
    assert ENGLISH.splitlines()[1] == "[中文](README.zh.md)"
    assert CHINESE.splitlines()[1] == "[English](README.md)"


def test_the_commands_are_equal() -> None:
    assert len(CODE.findall(ENGLISH)) > 6
    assert CODE.findall(CHINESE) == CODE.findall(ENGLISH)


def test_each_section_has_the_same_names_links_and_numbers() -> None:
    sections = [
        CODE.sub("", text).partition("\n\n")[2].split("\n## ") for text in (ENGLISH, CHINESE)
    ]
    assert len(sections[0]) > 6
    for english, chinese in zip_longest(*sections, fillvalue=""):
        for found in (r"`[^`]+`", r"\]\(([^)]+)\)", NUMBER.pattern):
            wanted = sorted(re.findall(found, english))
            assert sorted(re.findall(found, chinese)) == wanted, english.splitlines()[0]
