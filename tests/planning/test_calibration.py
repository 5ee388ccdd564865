"""The options of a calibration: what is read of a text before a source is opened, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hqconv.calibration.transformers_model import _read
from hqconv.errors import RequestError
from hqconv.planning.calibration import BUILTIN_TEXT, Calibration
from hqconv.planning.layer_encoding import CALIBRATION_VERSION
from hqconv.planning.notices import few_tokens_notices
from hqconv.planning.spec import ConversionOptions
from hqconv.schemas.options import with_recipe

OPTIONS: dict[str, Any] = {"schema": "int4"}


def calibration_of(text: str | Path, **options: Any) -> Calibration:
    parsed = ConversionOptions.parse(**OPTIONS, calibrate=text, **options).calibrated("cuda:1")
    found = parsed.encoding.calibration
    assert found is not None
    assert parsed.encoding.to_dict() == {
        "quantizer": "gptq",
        "quantizer_version": CALIBRATION_VERSION,
        "calibration": found.to_dict(),
    }
    return found


def test_a_text_is_known_by_its_name_and_bytes_and_never_by_its_place(tmp_path: Path) -> None:
    texts = [tmp_path / name / "text.txt" for name in ("one", "other")]
    for text in texts:
        text.parent.mkdir()
        text.write_bytes(b"hello\r\n")
    found, same = (
        calibration_of(text, calibrate_tokens=512, calibrate_context=64) for text in texts
    )
    assert found == same
    assert found.path == texts[0]
    assert (found.name, found.sha256) == ("text.txt", hashlib.sha256(b"hello\r\n").hexdigest())
    assert (found.num_tokens, found.context_length, found.device) == (512, 64, "cuda")
    texts[1].write_bytes(b"hello\n")
    assert calibration_of(texts[1]).sha256 != found.sha256


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"quantizer": "mse"}, ""),
        ({"calibrate": "absent"}, "--calibrate absent"),
        ({"calibrate": "empty"}, "--calibrate empty"),
        ({"calibrate_tokens": 1}, "--calibrate-tokens"),
        ({"calibrate_tokens": 4096.0}, "--calibrate-tokens"),
        ({"calibrate_context": True}, "--calibrate-context"),
        ({"calibrate": None, "calibrate_context": 0}, "--calibrate-context"),
        ({"quantizer": "gptq", "calibrate": None}, "--quantizer"),
    ],
)
def test_what_no_calibration_can_be(
    options: dict[str, Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("words")
    Path("empty").mkdir()
    with pytest.raises(RequestError) as caught:
        ConversionOptions.parse(**{**OPTIONS, "calibrate": "text", **options})
    assert caught.value.where == where


def test_a_recipe_names_a_text_beside_it_or_the_builtin_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("words")
    for value, found in (
        ("text", tmp_path / "text"),
        ("./builtin", tmp_path / "builtin"),
        ("builtin", "builtin"),
    ):
        (tmp_path / "recipe.toml").write_text(
            f'schema = "int4"\ncalibrate = "{value}"\ncalibrate_tokens = 4096\n'
        )
        options = with_recipe(tmp_path / "recipe.toml", {})
        assert (options["calibrate"], options["calibrate_tokens"]) == (found, 4096)


def test_a_file_with_the_name_of_the_builtin_text_is_read_where_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("builtin").write_text("own words")
    Path("recipe.toml").write_text('calibrate = "./builtin"')
    recipe = with_recipe("recipe.toml", OPTIONS)["calibrate"]
    for text in ("./builtin", Path("builtin"), str(tmp_path / "builtin"), recipe):
        found = calibration_of(text)
        assert found.path == Path(text)
        assert found.sha256 == hashlib.sha256(b"own words").hexdigest()
    found = calibration_of("builtin")
    assert (found.name, found.path) == ("builtin", BUILTIN_TEXT)
    assert found.sha256 == hashlib.sha256(BUILTIN_TEXT.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("num_tokens", "context", "warned"), [(65536, 2048, 0), (2048, 2048, 1), (2048, 128, 2)]
)
def test_few_tokens_are_warned_of(num_tokens: int, context: int, warned: int) -> None:
    calibration = Calibration("text", "", num_tokens, context, "cpu", "", "")
    layer: Any = SimpleNamespace(num_experts=128, top_k=8)
    assert len(few_tokens_notices(calibration, [layer])) == warned


def test_json_lines_are_read_by_their_texts(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n\n{"messages": [{"content": "b"}, {"content": "c"}]}\n')
    assert _read(path, "--calibrate")[1].split() == ["a", "b", "c"]
    for line in ("[1]", "{}", '{"text": 1', '{"messages": [1]}'):
        path.write_text(line)
        with pytest.raises(RequestError, match="no JSON object with `text`") as error:
            _read(path, "--calibrate")
        assert error.value.where.endswith("line 1")
