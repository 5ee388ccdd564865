"""The evaluation that ends a conversion: what it is run on, where it is shown, and its limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.model_card import read_evaluation
from hqconv.calibration.streamed_model import StreamedModel
from hqconv.calibration.transformers_model import read_rest, read_text
from hqconv.cli.app import app
from hqconv.conversion.executor import Executor
from hqconv.errors import OutputError, RequestError
from hqconv.evaluation import evaluate as evaluation
from hqconv.planning import calibration
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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a text of 640 tokens of which 32 are repeated, and the artifact of both."""
    folder = tmp_path_factory.mktemp("proof")
    save_family(folder / "src", "mixtral", inner=64)
    write_tokenizer(folder / "src")
    (folder / "text").write_text(
        "\n".join([*lines(0, 3), *lines(3, 20), *lines(0, 2), *lines(23, 15)])
    )
    (folder / "other").write_text("\n".join(lines(100, 3)))
    run(folder / "src", folder / "out", "int4-g32", calibrate=folder / "text", **OPTIONS)
    return folder


def recorded(out: Path) -> dict[str, Any] | None:
    return read_evaluation(out, read_manifest(out))


def test_the_held_out_tokens_are_evaluated_as_hqconv_evaluate_does(
    made: Path, tmp_path: Path
) -> None:
    found = recorded(made / "out")
    assert found is not None
    (tmp_path / "rest").write_text("\n".join(["", *lines(3, 20), *lines(23, 15)]))
    out = shutil.copytree(made / "out", tmp_path / "out")
    expected = hqconv.evaluate(out, made / "src", tmp_path / "rest", device="cpu")
    expected.pop("text")
    assert {key: found[key] for key in expected} == expected
    assert (found["num_tokens"], found["artifact"]) == (35 * 16, "out")
    assert_verified(made / "out", made / "src")


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
    made: Path, tmp_path: Path, loads: list[tuple[str, bool]]
) -> None:
    """The source's experts are read once; so are the artifact's."""
    run(made / "src", tmp_path / "out", "int4-g32", calibrate=made / "text", **OPTIONS)
    layers = [f"model.layers.{number}" for number in (0, 1)]
    assert [stage for stage, has_others in loads if has_others] == layers
    assert [stage for stage, has_others in loads if not has_others and stage in layers] == layers
    assert recorded(tmp_path / "out") == recorded(made / "out")


def test_without_memory_beside_the_calibration_the_evaluation_comes_after_it(
    made: Path, tmp_path: Path, loads: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = StreamedModel.check_memory

    def limited(
        self: StreamedModel, streams: Any, *limit: Any, ends: bool = False, **options: Any
    ) -> int:
        if len(streams) > 1 and not ends:
            raise RequestError("Too much.", where="the test")
        return check(self, streams, *limit, ends=ends, **options)

    monkeypatch.setattr(StreamedModel, "check_memory", limited)
    run(made / "src", tmp_path / "out", "int4-g32", calibrate=made / "text", **OPTIONS)
    assert loads.count(("model.layers.1", False)) == 2
    assert snapshot(tmp_path / "out") == snapshot(made / "out")


@pytest.mark.parametrize("num_done", [1, 2])
def test_a_resumed_conversion_evaluates_what_it_finds(
    made: Path, tmp_path: Path, num_done: int, monkeypatch: pytest.MonkeyPatch
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
            run(made / "src", tmp_path / "out", "int4-g32", calibrate=made / "text", **OPTIONS)
    report = run(
        made / "src", tmp_path / "out", "int4-g32", calibrate=made / "text", resume=True, **OPTIONS
    )
    assert report.num_groups_resumed >= num_done
    assert report.evaluation == recorded(made / "out")
    assert snapshot(tmp_path / "out") == snapshot(made / "out")


def test_the_held_out_tokens_change_no_byte_of_the_artifact(made: Path, tmp_path: Path) -> None:
    run(
        made / "src",
        tmp_path / "out",
        "int4-g32",
        calibrate=made / "text",
        evaluate=made / "other",
        **OPTIONS,
    )
    assert (tmp_path / "out" / "hqconv.json").read_bytes() == (
        made / "out" / "hqconv.json"
    ).read_bytes()
    assert recorded(tmp_path / "out") != recorded(made / "out")


def test_a_finished_artifact_is_not_evaluated_again(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = snapshot(made / "out"), recorded(made / "out")
    monkeypatch.setattr(evaluation, "compare_on_text", None)
    modes: tuple[dict[str, Any], ...] = ({"resume": True}, {"update": True})
    for mode in modes:
        report = run(
            made / "src", made / "out", "int4-g32", calibrate=made / "text", **OPTIONS, **mode
        )
        assert report.was_finished
        assert report.evaluation == expected
    assert snapshot(made / "out") == before


def test_the_last_part_evaluates(made: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibrate": made / "text", **OPTIONS}
    first, last = (
        run(made / "src", tmp_path / "out", "int4-g32", part=f"{n}/2", **options) for n in (1, 2)
    )
    assert first.evaluation is None
    assert last.evaluation == recorded(made / "out")
    assert snapshot(tmp_path / "out") == snapshot(made / "out")


def test_the_manifest_has_the_number_of_tokens_that_were_read(made: Path, tmp_path: Path) -> None:
    """A text that ends before the limit is the same under every larger one; nothing is held out then."""
    options: dict[str, Any] = {"calibrate": made / "other", "calibrate_context": 16}
    report = run(made / "src", tmp_path / "out", "int4-g32", calibrate_tokens=1000, **options)
    assert manifest(tmp_path / "out")["calibration"]["num_tokens"] == NUM_READ
    assert report.evaluation is None
    assert any("Nothing of the calibration's text was held out" in text for text in report.warnings)
    again = run(
        made / "src", tmp_path / "out", "int4-g32", calibrate_tokens=2000, resume=True, **options
    )
    assert again.was_finished


def test_another_text_is_evaluated_whole_also_without_a_calibration(
    made: Path, tmp_path: Path
) -> None:
    for name, options in (("plain", {}), ("calibrated", {"calibrate": made / "text", **OPTIONS})):
        report = run(made / "src", tmp_path / name, "int4-g32", evaluate=made / "other", **options)
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
    made: Path, tmp_path: Path, options: dict[str, Any], where: str
) -> None:
    """Before any work."""
    options = {key: made / value if key == "calibrate" else value for key, value in options.items()}
    with pytest.raises(RequestError) as caught:
        run(made / "src", tmp_path / "out", "int4-g32", max_kl=0.5, **options)
    assert str(caught.value.where).startswith(where)
    assert not (tmp_path / "out").exists()


def call(made: Path, out: Path, *options: str) -> Any:
    common = ["--schema", "int2-g32", "--target", "sm90", "--device", "cpu"]
    tokens = [
        "--calibrate",
        str(made / "text"),
        "--calibrate-tokens",
        "48",
        "--calibrate-context",
        "16",
    ]
    return CliRunner().invoke(
        app, ["convert", str(made / "src"), "-o", str(out), *common, *tokens, *options]
    )


def test_the_command_shows_the_figures_and_has_a_limit(made: Path, tmp_path: Path) -> None:
    found = call(made, tmp_path / "out", "--max-kl", "1e-9")
    assert found.exit_code == 1
    assert "KL divergence" in found.stdout
    assert "same top token" in found.stdout
    assert "Serve it with" not in found.stdout
    assert "error: The KL divergence is above --max-kl 1e-09" in found.stderr
    assert hqconv.verify(tmp_path / "out", checks=["files"]).passed
    words = json.loads(call(made, tmp_path / "out", "--resume", "--json", "--max-kl", "100").stdout)
    assert (words["max_kl"], words["over_max_kl"]) == (100, False)
    assert words["evaluation"] == recorded(tmp_path / "out")
    dry = call(made, tmp_path / "dry", "--dry-run")
    assert dry.exit_code == 0
    assert not (tmp_path / "dry").exists()


def test_a_source_that_cannot_be_evaluated_is_warned_of(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit it is an error; the artifact stays."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RequestError("The transformers library cannot run this model.", where="the test")

    monkeypatch.setattr(evaluation, "compare_on_text", fail)
    options: dict[str, Any] = {"evaluate": made / "other"}
    report = run(made / "src", tmp_path / "out", "int4-g32", **options)
    assert report.evaluation is None
    assert any(
        "was not evaluated. The transformers library cannot run" in text for text in report.warnings
    )
    with pytest.raises(RequestError, match="cannot run this model"):
        run(made / "src", tmp_path / "limited", "int4-g32", max_kl=1.0, **options)
    assert hqconv.verify(tmp_path / "limited", checks=["files"]).passed


def test_the_last_eighth_of_the_text_that_is_shipped_is_never_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "builtin.txt"
    text.write_text("\n".join(lines(0, 264)))
    monkeypatch.setattr(calibration, "BUILTIN_TEXT", text)
    report = run(
        made / "src", tmp_path / "out", "int4-g32", calibrate="builtin", calibrate_context=16
    )
    assert manifest(tmp_path / "out")["calibration"]["num_tokens"] == 231 * 16
    assert report.evaluation is not None
    assert report.evaluation["num_tokens"] == 33 * 16


def test_the_rest_of_a_text_begins_after_a_token(made: Path, tmp_path: Path) -> None:
    """Also in the middle of a line, whose rest is kept unless it was read."""
    (tmp_path / "text").write_text("1 2 3\n4 5 6\n\n1 2 3\n 6 \n4 5\n7")
    for begin, expected in (
        (3, [4, 5, 6, 6, 4, 5, 7]),
        (5, [6, 6, 7]),
        (0, [1, 2, 3, 4, 5, 6, 1, 2, 3, 6, 4, 5, 7]),
    ):
        found = read_rest(
            transformers, made / "src", [tmp_path / "text"], lambda _, begin=begin: begin, 100
        )  # type: ignore[misc]
        assert found.ids == [*expected]
    whole = read_text(transformers, made / "src", [tmp_path / "text"], 100)
    assert whole.ids == [1, 2, 3, 4, 5, 6, 1, 2, 3, 6, 4, 5, 7]
