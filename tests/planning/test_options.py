"""Options of an encoding in manifests, and few files for each option."""

from __future__ import annotations

from typing import Any

import pytest

from hqconv.errors import RequestError
from hqconv.planning.calibration import Calibration
from hqconv.planning.layer_encoding import EncodingOptions
from hqconv.planning.spec import ConversionOptions
from tests.make.places import REPO

MAX_FILES = 4  # CONTRIBUTING.md lists them
ENTRY = Calibration("text", "0" * 64, 4096, 512, "cpu", "2.9", "5.0").to_dict()
OPTIONS_OF_MANIFESTS = [
    *(EncodingOptions(), EncodingOptions(True), EncodingOptions(True, "mse")),
    EncodingOptions(True, "gptq", Calibration(**ENTRY)),
]


def test_an_option_that_changes_bytes_is_named_in_few_files() -> None:
    files = [path for path in (REPO / "hqconv").rglob("*.py") if "round_scales" in path.read_text()]
    assert len(files) <= MAX_FILES, files


@pytest.mark.parametrize("options", OPTIONS_OF_MANIFESTS, ids=repr)
def test_a_manifest_gives_back_the_options(options: EncodingOptions) -> None:
    document = options.to_dict()
    assert document.keys() <= {"round_scales", "quantizer", "quantizer_version", "calibration"}
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
