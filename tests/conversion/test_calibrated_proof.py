"""The evaluation that ends a conversion: what it is run on, where it is shown, and its limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import transformers

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.model_card import read_evaluation
from hqconv.calibration.streamed_model import StreamedModel
from hqconv.calibration.transformers_model import read_text
from hqconv.conversion.executor import Executor
from hqconv.errors import OutputError, RequestError
from hqconv.evaluation import evaluate as evaluation
from hqconv.planning import calibration
from tests.make import command
from tests.make.conversions import assert_verified, manifest, run
from tests.make.families import save_family
from tests.make.tensors import snapshot
from tests.make.tokenizer import write_tokenizer

OPTIONS: dict[str, Any] = {"calibrate_tokens": 48, "calibrate_context": 16}
NUM_READ = 48


def lines(first: int, count: int) -> list[str]:
    """Lines of 16 tokens, each another one."""
    return [
        " ".join(str(1 + (i * 17 + j * (i % 13 + 1)) % 63) for j in range(16))
        for i in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a text of 640 tokens of which 32 are repeated, and the artifact of both."""
    folder = tmp_path_factory.mktemp("proof")
    save_family(folder / "src", "mixtral", inner=64)
    write_tokenizer(folder / "src")
    (folder / "text").write_text(
        "\n".join([*lines(0, 3), *lines(3, 20), *lines(0, 2), *lines(23, 15)])
    )
    (folder / "other").write_text("\n".join(lines(100, 3)))
    convert(folder, folder / "out")
    return folder


def convert(example: Path, out: Path, schema: str = "int4-g32", **options: Any) -> Any:
    return run(
        example / "src", out, schema, **{"calibrate": example / "text", **OPTIONS, **options}
    )


def recorded(out: Path) -> dict[str, Any] | None:
    return read_evaluation(out, read_manifest(out))


def test_the_held_out_tokens_are_evaluated_as_hqconv_evaluate_does(
    example: Path, tmp_path: Path
) -> None:
    found = recorded(example / "out")
    assert found is not None
    (tmp_path / "rest").write_text("\n".join(["", *lines(3, 20), *lines(23, 15)]))
    out = shutil.copytree(example / "out", tmp_path / "out")
    expected = hqconv.evaluate(out, example / "src", tmp_path / "rest", device="cpu")
    expected.pop("text")
    assert {key: found[key] for key in expected} == expected
    assert (found["num_tokens"], found["artifact"]) == (35 * 16, "out")
    assert_verified(example / "out", example / "src")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each load of a stage: its name, and whether the artifact's experts took the place of the source's."""
    found: list[tuple[str, bool]] = []
    load = StreamedModel.load

    def watched(self: StreamedModel, stage: str, others: Any = MappingProxyType({})) -> None:
        found.append((stage, bool(others)))
        load(self, stage, others)

    monkeypatch.setattr(StreamedModel, "load", watched)
    return found


def test_the_calibration_runs_the_source_for_the_evaluation(
    example: Path, tmp_path: Path, loads: list[tuple[str, bool]]
) -> None:
    """The source's experts are read for gradients, on the way forwards and back, and once more; the artifact's once."""
    convert(example, tmp_path / "out")
    layers = [f"model.layers.{number}" for number in (0, 1)]
    assert [stage for stage, has_others in loads if has_others] == layers
    of_source = [stage for stage, has_others in loads if not has_others and stage in layers]
    assert of_source == [*layers, *reversed(layers), *layers]
    assert recorded(tmp_path / "out") == recorded(example / "out")


def test_without_memory_beside_the_calibration_the_evaluation_comes_after_it(
    example: Path, tmp_path: Path, loads: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_bytes = StreamedModel.needed_bytes

    def wasteful(self: StreamedModel, streams: Any, **options: Any) -> int:
        is_calibration = len(streams) > 1 and not options.get("comparison_bytes")
        return 1 << 50 if is_calibration else needed_bytes(self, streams, **options)

    monkeypatch.setattr(StreamedModel, "needed_bytes", wasteful)
    convert(example, tmp_path / "out")
    assert loads.count(("model.layers.1", False)) == 4
    assert snapshot(tmp_path / "out") == snapshot(example / "out")


@pytest.mark.parametrize("num_done", [1, 2])
def test_a_resumed_conversion_evaluates_what_it_finds(
    example: Path, tmp_path: Path, num_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that an earlier run has written are read from their files, as all are."""
    publish, num_layers = Executor._publish, 0

    def interrupted(self: Executor, unit: Any) -> None:
        nonlocal num_layers
        publish(self, unit)
        num_layers += ".experts" in unit.unit.name
        if num_layers == num_done:
            raise OutputError("The power went out.")

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_publish", interrupted)
        with pytest.raises(OutputError, match="power"):
            convert(example, tmp_path / "out")
    report = convert(example, tmp_path / "out", resume=True)
    assert report.num_units_resumed >= num_done
    assert report.evaluation == recorded(example / "out")
    assert snapshot(tmp_path / "out") == snapshot(example / "out")


def test_a_finished_artifact_is_not_evaluated_again(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = snapshot(example / "out"), recorded(example / "out")
    monkeypatch.setattr(evaluation, "compare_on_text", None)
    for _ in range(2):
        report = convert(example, example / "out", resume=True)
        assert report.was_finished
        assert report.evaluation == expected
    assert snapshot(example / "out") == before


def test_the_last_part_evaluates(example: Path, tmp_path: Path) -> None:
    first, last = (convert(example, tmp_path / "out", part=f"{n}/2") for n in (1, 2))
    assert first.evaluation is None
    assert last.evaluation == recorded(example / "out")
    assert snapshot(tmp_path / "out") == snapshot(example / "out")


def test_another_text_is_evaluated_whole_also_without_a_calibration(
    example: Path, tmp_path: Path
) -> None:
    for name, text in (("plain", None), ("calibrated", example / "text")):
        report = convert(example, tmp_path / name, calibrate=text, evaluate=example / "other")
        assert report.evaluation is not None
        assert (report.evaluation["text"]["name"], report.evaluation["num_tokens"]) == (
            "other",
            NUM_READ,
        )
        assert report.to_dict()["evaluation"] == recorded(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "--max-kl"),
        ({"calibrate": "other", **OPTIONS}, "--calibrate "),
        ({"calibrate": "text", "calibrate_tokens": 120, "calibrate_context": 16}, "--calibrate "),
    ],
)
def test_a_limit_needs_a_text(
    example: Path, tmp_path: Path, options: dict[str, Any], where: str
) -> None:
    """Before any work."""
    options = {
        key: example / value if key == "calibrate" else value for key, value in options.items()
    }
    with pytest.raises(RequestError) as caught:
        run(example / "src", tmp_path / "out", "int4-g32", max_kl=0.5, **options)
    assert str(caught.value.where).startswith(where)
    assert not (tmp_path / "out").exists()


def call(example: Path, out: Path, *options: str) -> Any:
    common = ["--schema", "int2-g32", "--target", "sm90", "--device", "cpu"]
    tokens = ["--calibrate", example / "text", "--calibrate-tokens", 48, "--calibrate-context", 16]
    return command.call("convert", example / "src", "-o", out, *common, *tokens, *options)


def test_the_command_shows_the_figures_and_has_a_limit(example: Path, tmp_path: Path) -> None:
    found = call(example, tmp_path / "out", "--max-kl", "1e-9")
    assert found.exit_code == 1
    assert "KL divergence" in found.stdout
    assert "same top token" in found.stdout
    assert "Serve it with" not in found.stdout
    assert "error: The mean KL divergence is above --max-kl" in found.stderr
    assert hqconv.verify(tmp_path / "out", checks=["files"]).passed
    document = json.loads(
        call(example, tmp_path / "out", "--resume", "--json", "--max-kl", "100").stdout
    )
    assert (document["max_kl"], document["over_max_kl"]) == (100, False)
    assert document["evaluation"] == recorded(tmp_path / "out")
    dry = call(example, tmp_path / "dry", "--dry-run")
    assert dry.exit_code == 0
    assert not (tmp_path / "dry").exists()


def test_a_source_that_cannot_be_evaluated_is_warned_of(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit it is an error; the artifact stays."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RequestError("The transformers library cannot run this model.", where="the test")

    monkeypatch.setattr(evaluation, "compare_on_text", fail)
    options: dict[str, Any] = {"calibrate": None, "evaluate": example / "other"}
    report = convert(example, tmp_path / "out", **options)
    assert report.evaluation is None
    assert any("was not evaluated. The transformers library" in text for text in report.warnings)
    with pytest.raises(RequestError, match="cannot run this model"):
        convert(example, tmp_path / "limited", max_kl=1.0, **options)
    assert hqconv.verify(tmp_path / "limited", checks=["files"]).passed


def test_the_last_eighth_of_the_text_that_is_shipped_is_never_read(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "builtin.txt"
    text.write_text("\n".join(lines(0, 264)))
    monkeypatch.setattr(calibration, "BUILTIN_TEXT", text)
    report = convert(example, tmp_path / "out", calibrate="builtin", calibrate_tokens=65536)
    assert manifest(tmp_path / "out")["calibration"]["num_tokens"] == 231 * 16
    assert report.evaluation is not None
    assert report.evaluation["num_tokens"] == 33 * 16


def test_the_rest_of_a_text_begins_after_a_token(example: Path, tmp_path: Path) -> None:
    """Also in the middle of a line, whose rest is kept unless it was read."""
    (tmp_path / "text").write_text("1 2 3\n4 5 6\n\n1 2 3\n 6 \n4 5\n7")
    for begin, expected in ((3, [4, 5, 6, 6, 4, 5, 7]), (5, [6, 6, 7])):
        found = read_text(
            transformers,
            example / "src",
            tmp_path / "text",
            100,
            begin_of=lambda _, begin=begin: begin,  # type: ignore[misc]
        )
        assert found.ids == expected
    whole = read_text(transformers, example / "src", tmp_path / "text", 100)
    assert whole.ids == [1, 2, 3, 4, 5, 6, 1, 2, 3, 6, 4, 5, 7]
