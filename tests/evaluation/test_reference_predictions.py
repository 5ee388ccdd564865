"""Reference predictions that an evaluation writes, against whole models that transformers loads and runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.reference_predictions import (
    ReferencePredictions,
    has_reference,
    read_reference,
)
from hqconv.calibration.streamed_model import StreamedModel
from hqconv.errors import OutputError
from hqconv.evaluation import evaluate as evaluation
from hqconv.io.durable_files import write_whole
from tests.make.families import save_family
from tests.make.model_server import served_model
from tests.make.tokenizer import write_tokenizer

CPU: dict[str, Any] = {"device": "cpu", "threads": 1}
CONTEXT = 16
NUM_TOKENS = 600  # 37 sequences, and a rest of 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Source, artifact and text."""
    folder = tmp_path_factory.mktemp("made")
    src, text = folder / "src", folder / "text"
    torch.manual_seed(1)
    save_family(src, "qwen3_moe", inner=64, mlp_only_layers=[], max_position_embeddings=128)
    write_tokenizer(src)
    numbers = random.Random(1)
    text.write_text(" ".join(str(numbers.randrange(3, 63)) for _ in range(NUM_TOKENS)))
    hqconv.convert(src, folder / "out", schema="int2-g32", target="sm90", device="cpu")
    return src, folder / "out", text


def evaluated(made: tuple[Path, Path, Path], **options: Any) -> dict[str, Any]:
    src, out, text = made
    options = {"context_length": CONTEXT, **options}
    return hqconv.evaluate(out, src, text, **CPU, **options)


def read(out: Path, name: str = "reference.safetensors") -> ReferencePredictions:
    return read_reference(out / name, read_manifest(out).sha256)


def expected(model: nn.Module, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities of every token [S, T - 1, V], of a whole model."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1)


def test_predictions_are_those_of_whole_models(made: tuple[Path, Path, Path]) -> None:
    src, out, text = made
    document = evaluated(made)
    found = read(out)
    words = [int(word) for word in text.read_text().split()]
    assert found.token_ids.tolist() == [
        words[n : n + CONTEXT] for n in range(0, 37 * CONTEXT, CONTEXT)
    ]
    assert found.long_ids.tolist() == words[:128]  # the model's positions
    for name, model in {
        "artifact": served_model(src, out, torch.float32),
        "source": served_model(src, None, torch.float32),
        "bfloat16": served_model(src, out, torch.bfloat16),
    }.items():
        tolerance = 2e-2 if name == "bfloat16" else 1e-4
        for prefix in ("", "long.") if name != "bfloat16" else ("",):
            ids = found.tensors[f"{prefix}token_ids"]
            every = expected(model, ids)
            labels = torch.from_numpy(ids[:, 1:, None].astype(np.int64))
            scores = found.of(prefix + name)
            assert np.allclose(scores, every.gather(-1, labels)[..., 0], atol=tolerance)
            top = torch.from_numpy(found.tensors[f"{prefix}{name}.top_log_probabilities"])
            top_ids = torch.from_numpy(found.tensors[f"{prefix}{name}.top_ids"]).long()
            assert torch.allclose(top, every.topk(8).values, atol=tolerance)
            assert torch.allclose(top, every.gather(-1, top_ids), atol=tolerance)
    assert 1e-4 < found.noise.mean() < 0.01
    assert found.metadata["text_sha256"] == document["text"]["sha256"]
    # the long prompt does not count
    assert document["num_predictions"] == 37 * (CONTEXT - 1) + 7
    nll = -found.of("artifact").sum() / found.of("artifact").size
    assert document["mean_nll"]["artifact"] == pytest.approx(nll, rel=0.01)


def test_long_sequences_are_cut_and_many_left_out(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(made)
    whole = read(made[1])
    monkeypatch.setattr(evaluation, "_REFERENCE_LENGTH", 10)
    monkeypatch.setattr(evaluation, "_MOST_SEQUENCES", 5)
    monkeypatch.setattr(evaluation, "_ROUNDED_TOKENS", 3 * CONTEXT)
    evaluated(made)
    found = read(made[1])
    assert found.token_ids.tolist() == whole.token_ids[:5, :10].tolist()
    for name in ("artifact", "source"):  # a prefix does not depend on what follows
        assert np.allclose(found.of(name), whole.of(name)[:5, :9], atol=1e-5)
    assert found.noise.shape == (5, 9)  # of whole passes


def test_warnings_where_there_is_none_or_few(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made[1] / "reference.safetensors"
    path.unlink(missing_ok=True)
    (warning,) = evaluated(made, compute_dtype="bfloat16")["warnings"]
    assert warning == "No reference.safetensors is written: it needs --compute-dtype float32."
    assert not path.exists()
    (warning,) = evaluated(made, context_length=64)["warnings"]
    assert warning.startswith("reference.safetensors has 9 sequences of 64 tokens only")

    def append_nan(self: Any, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        is_spoilt = ids.size(1) > CONTEXT and values.is_floating_point()
        append(self, name, ids, values * torch.nan if is_spoilt else values)

    append = evaluation._Recorder._append
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(evaluation._Recorder, "_append", append_nan)
        (warning,) = evaluated(made)["warnings"]
    assert warning == "No reference.safetensors is written: predictions are no finite numbers."
    assert not path.exists()

    def fail(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(StreamedModel, "narrow", fail)
    document = evaluated(made)
    assert document["warnings"] == [
        "No reference.safetensors is written: ValueError: no such kernel."
    ]
    assert not path.exists()
    src = made[0]
    with pytest.raises(OutputError, match="were not written"):
        hqconv.evaluate(src, None, made[2], write_reference=True, context_length=CONTEXT, **CPU)


def test_without_memory_the_long_prompt_and_the_second_run_are_left_out(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []

    def record(self: StreamedModel, *arguments: Any, **options: Any) -> int:
        needed.append(real(self, *arguments, **options))
        return needed[-1]

    real = StreamedModel.needed_bytes
    monkeypatch.setattr(StreamedModel, "needed_bytes", record)
    figures = evaluated(made)
    with_long = needed[0]
    path = made[1] / "reference.safetensors"
    needed.clear()
    evaluated(made, max_memory=str(with_long - 1))
    assert not len(read(made[1]).long_ids)
    without_long = needed[1]
    path.unlink()
    found = evaluated(made, max_memory=str(without_long - 1))
    assert found["warnings"] == [
        "No reference.safetensors is written: memory is short for its run in bfloat16."
    ]
    assert found["kl"] == figures["kl"]
    assert not path.exists()


def test_beside_the_shards_of_the_checkpoint_layout(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """An index keeps servers from loading it; evaluation and verification read the same shards as before."""
    src, _, text = made
    out = tmp_path / "out"
    options: dict[str, Any] = {"schema": "int4-g32", "target": "sm90", "device": "cpu"}
    hqconv.convert(src, out, layout="checkpoint", **options)
    first = hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    assert has_reference(out / "reference.safetensors", read_manifest(out).sha256)
    assert hqconv.verify(out, src, checks=["files"], device="cpu").passed
    assert hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU) == first
    assert hqconv.convert(src, out, layout="checkpoint", resume=True, **options).was_finished
    hqconv.convert(src, out, layout="checkpoint", overwrite=True, **options)
    assert hqconv.verify(out, src, checks=["files"], device="cpu").passed


def test_a_conversion_writes_it(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    src, _, text = made
    report = hqconv.convert(
        src, tmp_path / "out", schema="int4-g32", target="sm90", device="cpu", evaluate=text
    )
    assert report.evaluation is not None
    found = read(tmp_path / "out")
    assert found.token_ids.shape == (1, 512)
    assert json.loads((tmp_path / "out/evaluation.json").read_text()) == report.evaluation


def test_a_folder_that_cannot_be_written(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Path, name: str, data: bytes) -> Any:
        if name.endswith("reference.safetensors"):
            raise OutputError("The file cannot be written.", found="Read-only file system")
        return write_whole(root, name, data)

    monkeypatch.setattr("hqconv.artifact.reference_predictions.write_whole", refuse)
    expected = "reference.safetensors cannot be written beside the artifact: Read-only file system."
    assert evaluated(made)["warnings"] == [expected]
