"""The text of `--calibrate builtin`: its bytes, its kinds, and its place in the package."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
import transformers
from tokenizers.processors import TemplateProcessing

from hqconv.calibration import transformers_model
from hqconv.calibration.transformers_model import _in_chat_template as text_in_template
from hqconv.calibration.transformers_model import folder_of, read_text
from hqconv.planning.calibration import BUILTIN_TEXT
from hqconv.sources.opening import open_source
from scripts import make_builtin_text
from tests.make.families import save_family
from tests.make.tokenizer import write_tokenizer

# Another text gives other bytes of artifacts: say it in the changelog.
SHA256 = "16a8e2dcbed53c40d5bce5d4a5d590236d7b478e023124e9ae34f4b0c5591b30"


def test_the_text_is_the_recorded_one() -> None:
    assert hashlib.sha256(BUILTIN_TEXT.read_bytes()).hexdigest() == SHA256
    assert make_builtin_text.TEXT == BUILTIN_TEXT
    assert 180_000 < BUILTIN_TEXT.stat().st_size < 240_000


def test_the_package_holds_the_text_and_its_licences() -> None:
    root = Path(make_builtin_text.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    names = project["tool"]["setuptools"]["package-data"]["hqconv.calibration"]
    assert names == ["builtin.txt", "builtin.md"]
    assert "hqconv/calibration/builtin.md" in project["project"]["license-files"]
    licences = BUILTIN_TEXT.with_suffix(".md").read_text("utf-8").lower()
    assert not [
        source for source in make_builtin_text.SOURCES if source.replace("-", " ") not in licences
    ]


TEMPLATE = (
    "{{ strftime_now('%Y') }}{% for one in messages %}{% if one.role == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}<|{{ one.role }}|>{{ one.content }}<|end|>{% endfor %}"
)


def test_dialogues_are_in_the_chat_template_of_the_tokenizer(tmp_path: Path) -> None:
    """All but those with a role that it refuses; today's date is not in it."""
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = BUILTIN_TEXT.read_text("utf-8")
    tokenizer.chat_template = TEMPLATE
    found = text_in_template(text, tokenizer)
    assert (
        "2026-01-01<|system|>You are a helpful assistant. Answer briefly.<|end|><|user|>Why is the sky blue"
        in found
    )
    tokenizer.bos_token, tokenizer.chat_template = "1", "{{ bos_token }}" + TEMPLATE
    assert "12026-01-01<|" in text_in_template(text, tokenizer)
    start = TemplateProcessing(single="1 $A", special_tokens=[("1", 1)])
    tokenizer._tokenizer.post_processor = start  # now BOS stands before each sequence
    assert text_in_template(text, tokenizer) == found
    left = [one for one in found.split("\n\n\n") if one.startswith(("System: ", "User: "))]
    assert left
    assert all("\nTool: " in one for one in left)
    begins = ("System: ", "User: ", "2026-01-01<|")
    plain = [
        [one for one in each.split("\n\n\n") if not one.startswith(begins)]
        for each in (text, found)
    ]
    assert plain[0] == plain[1]


LOOP = "{% for a in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        "{{ 'a' * 3000000000 }}",
        "{{ 'a' * 90000000 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_without_end_is_cut_off(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers_model, "_CHILD_SECONDS", 2)
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    text = BUILTIN_TEXT.read_text("utf-8")
    assert text_in_template(text, tokenizer) == text
    assert "chat template" in caplog.text


def test_a_source_s_template_is_read(tmp_path: Path) -> None:
    save_family(tmp_path / "src", "mixtral", inner=64)
    write_tokenizer(tmp_path / "src")
    (tmp_path / "src/chat_template.jinja").write_text("{% for one in messages %}7 8 9 {% endfor %}")
    with open_source(tmp_path / "src") as source, folder_of(source) as folder:
        words = read_text(transformers, folder, BUILTIN_TEXT, 1 << 20)
    assert any(words.ids[i : i + 3] == [7, 8, 9] for i in range(len(words.ids)))
