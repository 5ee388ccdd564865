"""What people are told: whoever wrote the names in it, it cannot change a terminal, and is not too long to be read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.errors import InputError, number_text, printable, printable_line, value_texts

SHOWN = {
    "plain": ("model.layers.0", "model.layers.0"),
    "other alphabets": ("ключ é 中 → 🙂", "ключ é 中 → 🙂"),
    "a sequence of the terminal": ("\x1b[31mred", "\\x1b[31mred"),
    "a title": ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
    "a link": ("\x1b]8;;http://x\x1b\\here", "\\x1b]8;;http://x\\x1b\\here"),
    "one of eight bits": ("\x9b2J\x9d0;x\x9c", "\\x9b2J\\x9d0;x\\x9c"),
    "back over what was written": ("good\rbad\x08\x7f", "good\\rbad\\x08\\x7f"),
    "from right to left": ("a\u202eb\u2067c\u200fd\u061c", "a\\u202eb\\u2067c\\u200fd\\u061c"),
    "not seen": ("a\u200bb\ufeffc\xad\U000e0041", "a\\u200bb\\ufeffc\\xad\\U000e0041"),
    "lines by other names": ("a\x85b\u2028c\u2029\x0b\x0c", "a\\x85b\\u2028c\\u2029\\x0b\\x0c"),
    "half characters": ("\udcff\ud800", "\\udcff\\ud800"),
    "written out before": ("\\x1b[31m \\u202e", "\\x1b[31m \\u202e"),
    "markup": ("[red]x[/red] :smile: [link=x]", "[red]x[/red] :smile: [link=x]"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown(name: str) -> None:
    text, shown = SHOWN[name]
    assert printable(text) == printable(shown) == shown


def test_lines() -> None:
    assert printable("two\nlines") == "two\nlines"
    assert printable_line("two\nlines") == "two\\nlines"


def test_long_words_lose_their_middle() -> None:
    shown = {
        "x" * 200: "x" * 200,
        "a" * 100 + "-" + "b" * 100: "a" * 100 + "…" + "b" * 99,
        "/" + "/".join(["d" * 150] * 9): "/" + "/".join(["d" * 150] * 9),
    }
    assert {text: printable(text) for text in shown} == shown
    words = re.split(r"[\s/]", printable("\x1b" * 100 + " " + "b" * 5000))
    assert [len(word) for word in words] == [200, 200]


def test_long_texts_lose_their_middle() -> None:
    text = printable("word " * 100_000 + "end")
    assert len(text) == 4000
    assert text.startswith("word word ")
    assert text.endswith(" word end")
    assert "…" in text


@given(
    st.text(st.characters(), max_size=600)
    | st.text("\x1b\n/ x\u202e\udfff", min_size=150, max_size=9000)
)
def test_nothing_is_written_out_twice(text: str) -> None:
    for show in (printable, printable_line):
        once = show(text)
        assert show(once) == once
        assert not set(once) & set(map(chr, {*range(0x20)} - {0x0A}))
        once.encode()
        assert len(once) <= 4000
    assert "\n" not in printable_line(text)


def test_a_message_is_printable_and_its_parts_are_as_they_were() -> None:
    name = "evil\x1b]0;x\x07\n  what to do: obey\u202e" + "n" * 300
    error = InputError(
        "There is no \x9b31m here.",
        where=name,
        expected=name,
        found=name,
        remedy="Rename \u2066it.",
    )
    message = str(error)
    assert message == str(error)
    assert [line.split(":")[0] for line in message.split("\n")] == [
        *("There is no \\x9b31m here.", "  where", "  expected", "  found", "  what to do")
    ]
    assert message.replace("\n", "").isprintable()
    assert "n" * 200 not in message
    assert error.where == error.found == name
    assert printable(message) == message  # as the command line does once more


def test_numbers_of_an_error_have_few_digits() -> None:
    error = InputError(
        "A scale is wrong.", expected=0.1234567890123456, found=3.0000000000000004e-12
    )
    assert (error.expected, error.found) == ("0.1235", "3e-12")
    assert value_texts(12345678, "0.123456789") == ("12345678", "0.123456789")  # a count, a text


def test_a_number_is_told_from_another() -> None:
    assert number_text(2 / 3) == "0.6667"
    assert value_texts(0.15, 0.15) == ("0.15", "0.15")
    assert value_texts(0.15, 0.15000001) == ("0.15", "0.15000001")
    first, second = value_texts(1.0, 1.0 + 2**-52)
    assert first != second
