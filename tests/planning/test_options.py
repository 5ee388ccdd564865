"""Conversion options: one table for the API, the command line and recipes, and few files for each option."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import pytest

import hqconv
from hqconv import api
from hqconv.cli.options import OPTIONS
from hqconv.errors import RequestError
from hqconv.planning.calibration import Calibration
from hqconv.planning.layer_encoding import EncodingOptions
from hqconv.planning.spec import ConversionOptions
from hqconv.schemas.artifact_names import CHECKPOINT, KERNEL
from hqconv.schemas.grid import EVEN, GROUPS, LINEAR, ROUND_ROBIN
from hqconv.schemas.options import (
    CHECKS,
    ENCODING_KEYS,
    QUANTIZERS,
    CheckName,
    EncodingArguments,
    conversion_options,
)
from hqconv.schemas.weight_schema import PARAM_DTYPES
from tests.make.places import REPO

MAX_FILES = 5  # CONTRIBUTING.md lists them
ENTRY = Calibration("text", "0" * 64, 4096, 512, "cpu", "2.9", "5.0").to_dict()
OPTIONS_OF_MANIFESTS = [
    *(EncodingOptions(), EncodingOptions(True), EncodingOptions(True, "mse")),
    EncodingOptions(True, "gptq", Calibration(**ENTRY)),
]


CLOSED = {
    "dtype": PARAM_DTYPES,
    "expert_placement": (LINEAR, ROUND_ROBIN),
    "tp_split": (EVEN, GROUPS),
    "layout": (KERNEL, CHECKPOINT),
    "quantizer": QUANTIZERS,
}


def test_closed_choices_are_types_and_the_command_line_offers_the_same() -> None:
    """One source: the `Literal` of the table."""
    for name, option in conversion_options().items():
        assert option.choices == CLOSED.get(name, ())
    for name, choices in CLOSED.items():
        offered = f"{OPTIONS[name].kind} {OPTIONS[name].settings.get('metavar')}"  # the latter with other spellings
        assert set(choices) <= set(re.findall(r"\w+", offered)), name
    assert api.verify.__annotations__["checks"] == "Sequence[CheckName] | None"
    assert get_args(CheckName) == CHECKS == ("files", "weights", "kernel")


def test_an_option_that_changes_bytes_is_named_in_few_files() -> None:
    files = [path for path in (REPO / "hqconv").rglob("*.py") if "round_scales" in path.read_text()]
    assert len(files) <= MAX_FILES, files


def test_encoding_options_are_the_rows_of_the_table() -> None:
    of_text = {f"calibrate{part}" for part in ("", "_tokens", "_context")}
    names = set(EncodingArguments.__annotations__) - of_text
    assert names == set(inspect.signature(EncodingOptions).parameters) - {"calibration"}
    for name in names:
        assert getattr(EncodingOptions(), name) == conversion_options()[name].default


@pytest.mark.parametrize("function", [hqconv.plan, hqconv.convert])
def test_the_api_has_every_option(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    for name, option in conversion_options().items():
        assert parameters[name].default == option.default
        assert parameters[name].annotation == option.annotation
        assert f"{name}: {option.help}" in function.__doc__
    with pytest.raises(TypeError, match="nothing_known"):
        function("model", schema="int4", nothing_known=1)
    with pytest.raises(TypeError, match="'schema'"):
        function("model")


@pytest.mark.parametrize("options", OPTIONS_OF_MANIFESTS, ids=repr)
def test_a_manifest_gives_back_the_options(options: EncodingOptions) -> None:
    document = options.to_dict()
    assert document.keys() <= set(ENCODING_KEYS)
    assert EncodingOptions.from_dict(document) == options


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"round_scales": False}, "round_scales"),
        ({"quantizer": "best"}, "quantizer"),
        ({"quantizer_version": 1}, "quantizer_version"),
        ({"quantizer": "mse", "quantizer_version": True}, "quantizer_version"),
        ({"calibration": ENTRY}, "calibration"),
        ({"quantizer": "gptq", "quantizer_version": 1}, "calibration"),
        *(
            ({"quantizer": "gptq", "quantizer_version": 1, "calibration": entry}, "calibration")
            for entry in (
                {},
                [],
                {**ENTRY, "more": 1},
                *({**ENTRY, key: value} for key in ENTRY for value in (None, True)),
            )
        ),
    ],
)
def test_a_manifest_with_impossible_options(document: dict[str, Any], key: str) -> None:
    with pytest.raises(RequestError) as caught:
        EncodingOptions.from_dict(document)
    assert caught.value.where == key


def test_options_are_parsed_before_a_source_is_opened() -> None:
    options = ConversionOptions.parse(schema="source", tp=2, quantizer="mse")
    assert options.schema is None
    assert (options.grid.tp, options.encoding.quantizer) == (2, "mse")
