"""`hqconv evaluate` against whole models that transformers loads and runs, with experts placed by hand."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import nn
from typer.testing import CliRunner

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.model_card import read_evaluation
from hqconv.calibration.streamed_model import StreamedModel
from hqconv.calibration.transformers_model import quantizer_of
from hqconv.cli.app import app
from hqconv.errors import InputError, OutputError, RequestError
from hqconv.evaluation import evaluate as evaluation
from tests.make.conversions import manifest
from tests.make.decodable import QUANTIZED, write_quantized
from tests.make.families import FAMILIES as ALL_FAMILIES
from tests.make.families import MLA, moe_layers, save_family
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot
from tests.make.tokenizer import write_tokenizer

IDS = (torch.arange(75) * 7 % 61 + 3).tolist()
CONTEXT = 16
CPU: dict[str, Any] = {"device": "cpu", "threads": 2}
# Options of a tiny model, and how transformers stores its experts: by hand here, found by values in the product.
STACKED, INTERLEAVED, FLAT = "[E, 2I, H]", "[E, H, 2I], gate and up interleaved", "[E, H, 2I]"
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_moe": ({}, STACKED),
    "mixtral": ({}, STACKED),
    "gpt_oss": ({}, INTERLEAVED),
    "llama4_text": ({}, FLAT),
    "deepseek_v3": ({**MLA, "head_dim": 8}, STACKED),
}


def write_source(folder: Path, family: str, **options: Any) -> Path:
    """A tiny checkpoint with a tokenizer, in bfloat16."""
    save_family(folder, family, inner=64, **options)
    write_tokenizer(folder)
    return folder


def write_text(path: Path) -> Path:
    path.write_text(" ".join(map(str, IDS)))
    return path


def make(
    folder: Path, family: str, schema: str = "int2-g32", **options: Any
) -> tuple[Path, Path, Path]:
    """A source, its artifact and a text."""
    src = write_source(folder / "src", family, **FAMILIES[family][0])
    hqconv.convert(src, folder / "out", schema=schema, target="sm90", device="cpu", **options)
    return src, folder / "out", write_text(folder / "text")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return make(tmp_path_factory.mktemp("qwen"), "qwen3_moe", tp=2)


def whole(src: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model as transformers loads it, in one piece."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        src, dtype=dtype, experts_implementation="eager"
    )
    assert isinstance(model, nn.Module)
    return model.eval()


def put_artifact(model: nn.Module, out: Path, form: str) -> None:
    """Overwrite the experts of a whole model by the artifact's decoded ones, by hand."""
    layers = manifest(out)["blocks"]
    for name, (_, _, module) in zip(layers, moe_layers(model), strict=True):
        one = hqconv.dequantize(out, layer=name)
        for kind, down in (("", one["w2"]), ("_bias", one.get("b2"))):
            if down is None:
                continue
            gate, up = (one[f"{'b' if kind else 'w'}{number}"] for number in (1, 3))
            both = (
                torch.stack([gate, up], 2).flatten(1, 2)
                if form == INTERLEAVED
                else torch.cat([gate, up], 1)
            )
            if form != STACKED and not kind:
                both, down = both.transpose(1, 2), down.transpose(1, 2)
            with torch.no_grad():
                getattr(module, f"gate_up_proj{kind}").copy_(both)
                getattr(module, f"down_proj{kind}").copy_(down)


def log_probabilities(
    model: nn.Module, ids: list[int] = IDS, context: int = CONTEXT
) -> tuple[np.ndarray, list[int]]:
    """Log-probabilities [predictions, V] of each sequence alone, in float64, and the tokens that follow."""
    rows, labels = [], []
    for begin in range(0, len(ids), context):
        part = ids[begin : begin + context]
        if len(part) < 2:
            continue
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([part]), use_cache=False)
                .logits[0, :-1]
                .double()
                .numpy()
            )
        top = logits.max(-1, keepdims=True)
        rows.append(logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))
        labels += part[1:]
    return np.concatenate(rows), labels


def expected_figures(source: nn.Module, artifact: nn.Module, **options: Any) -> dict[str, Any]:
    """The figures by numpy, from two whole models."""
    p, labels = log_probabilities(source, **options)
    q, _ = log_probabilities(artifact, **options)
    kl = (np.exp(p) * (p - q)).sum(-1)
    nll = [-one[np.arange(len(labels)), labels] for one in (p, q)]
    mean = {"source": nll[0].mean(), "artifact": nll[1].mean()}
    shares = {"median": 50, "p90": 90, "p99": 99}
    percentiles = {name: np.percentile(kl, share) for name, share in shares.items()}
    error = kl.std(ddof=1) / math.sqrt(len(kl))
    return {
        "num_predictions": len(labels),
        "kl": {"mean": kl.mean(), "standard_error": error, **percentiles, "max": kl.max()},
        "perplexity": {name: np.exp(one) for name, one in mean.items()},
        "mean_nll": mean,
        "top1_agreement": (p.argmax(-1) == q.argmax(-1)).mean(),
    }


def assert_figures(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if isinstance(value, dict):
            assert found[key].keys() == value.keys()
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-9), key
        else:
            assert found[key] == pytest.approx(value, rel=1e-9), key


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_those_of_whole_models(family: str, tmp_path: Path) -> None:
    src, out, text = make(tmp_path, family)
    found = hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    source, artifact = whole(src), whole(src)
    put_artifact(artifact, out, FAMILIES[family][1])
    expected = expected_figures(source, artifact)
    assert expected["kl"]["mean"] > 1e-5
    assert_figures(found, expected)
    assert (found["num_tokens"], found["num_predictions"]) == (75, 70)
    assert found["num_layers"] == len(manifest(out)["blocks"])


def test_values_do_not_decide_where_experts_are(tmp_path: Path) -> None:
    """An expert of zeros, and gates that equal the ups."""
    src = write_source(tmp_path / "src", "mixtral")
    last = json.loads((src / "config.json").read_bytes())["num_local_experts"] - 1
    for path in src.glob("*.safetensors"):
        tensors = load_file(path)
        for name in (name for name in tensors if ".experts." in name):
            is_zero = f".experts.{last}." in name
            tensors[name] = tensors[name.replace("w3", "w1")].clone() * (not is_zero)
        save_file(tensors, path, {"format": "pt"})
    hqconv.convert(src, tmp_path / "out", schema="int2-g32", target="sm90", device="cpu")
    found = hqconv.evaluate(
        tmp_path / "out", src, write_text(tmp_path / "text"), context_length=CONTEXT, **CPU
    )
    source, artifact = whole(src), whole(src)
    put_artifact(artifact, tmp_path / "out", STACKED)
    assert_figures(found, expected_figures(source, artifact))


def test_sequences_begin_as_the_tokenizer_says(
    qwen: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """A tokenizer that puts BOS before a text: before each sequence, which is a text of its own to the model."""
    src, out, text = qwen
    folder = Path(shutil.copytree(src, tmp_path / "src"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "none", "eos_token": "none"})
    template = TemplateProcessing(single="none $A none", special_tokens=[("none", 0)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(folder)
    found = hqconv.evaluate(out, folder, text, context_length=CONTEXT, **CPU)
    assert (found["num_tokens"], found["num_predictions"]) == (75, 75)
    p, labels = zip(
        *(
            log_probabilities(whole(src), [0, *IDS[begin : begin + CONTEXT - 1]])
            for begin in range(0, 75, CONTEXT - 1)
        ),
        strict=True,
    )
    every, following = np.concatenate(p), np.concatenate(labels)
    nll = -every[np.arange(75), following].mean()
    assert found["mean_nll"]["source"] == pytest.approx(nll, rel=1e-4)


def test_memory_is_that_of_one_layer(
    qwen: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is dropped before the next is loaded; at the end no weight is left."""
    src, out, text = qwen
    loaded: list[str] = []
    models: list[StreamedModel] = []
    load = StreamedModel.load

    def num_bytes(model: StreamedModel) -> int:
        storages = {v.untyped_storage() for v in model.model.parameters()}
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def watched(self: StreamedModel, stage: str, *experts: Any) -> None:
        models.append(self)
        assert num_bytes(self) < 4096, stage  # the norms of the model's own level, placeholders
        load(self, stage, *experts)
        loaded.append(stage)
        assert num_bytes(self) <= self.stage_bytes(stage) + 4096

    monkeypatch.setattr(StreamedModel, "load", watched)
    hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    layers = [
        f"model.layers.{number}" for number in (0, 0, 1)
    ]  # the source's experts, the artifact's; a dense layer
    assert loaded == ["", "model.embed_tokens", *layers, "model.norm", "lm_head"]  # "": of no stage
    assert num_bytes(models[0]) < 4096


MEASURED = """
import resource, sys
import hqconv
from hqconv.calibration.streamed_model import StreamedModel
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
def checked(self, *args, check=StreamedModel.check_memory, **options):
    planned = check(self, *args, **options)
    print(peak(), planned)
    return planned
StreamedModel.check_memory = checked
src, out, text = sys.argv[1:]
hqconv.evaluate(out, src, text, num_tokens=30_000, context_length=64, device="cpu", threads=1)
print(peak())
"""


def test_memory_of_many_tokens_is_the_planned(tmp_path: Path) -> None:
    """A pass keeps embeddings, hidden states and positions; what is free again goes back to the system."""
    src = write_source(tmp_path / "src", "qwen3_moe", hidden=512)
    hqconv.convert(src, out=tmp_path / "out", schema="int4-g32", target="sm90", **CPU)
    (tmp_path / "text").write_text(" ".join(map(str, IDS * 400)))
    command = [sys.executable, "-c", MEASURED, src, tmp_path / "out", tmp_path / "text"]
    before, planned, most = map(int, subprocess.check_output(command, text=True).split())
    assert most - before < planned + (64 << 20)  # code, and stacks of threads


def test_any_context(qwen: tuple[Path, Path, Path]) -> None:
    """A rest of one token predicts nothing."""
    src, out, text = qwen
    source, artifact = whole(src), whole(src)
    put_artifact(artifact, out, STACKED)
    for context in (5, 74, 1000):
        found = hqconv.evaluate(out, src, text, context_length=context, **CPU)
        assert_figures(found, expected_figures(source, artifact, context=context))


def test_fewer_tokens_and_bfloat16(qwen: tuple[Path, Path, Path]) -> None:
    src, out, text = qwen
    options: dict[str, Any] = {"context_length": 20, "num_tokens": 40, **CPU}
    found = hqconv.evaluate(out, src, text, compute_dtype="bfloat16", **options)
    model = whole(src, torch.bfloat16)
    expected = expected_figures(model, model, ids=IDS[:40], context=20)
    assert found["num_predictions"] == expected["num_predictions"] == 38
    perplexity = expected["perplexity"]["source"]
    assert found["perplexity"]["source"] == pytest.approx(perplexity, rel=1e-2)
    assert found["compute_dtype"] == "bfloat16"


def test_layers_left_as_they_were_and_tied_embeddings(tmp_path: Path) -> None:
    src = write_source(tmp_path / "src", "mixtral", tie_word_embeddings=True)
    assert not any(
        "lm_head" in name for path in src.glob("*.safetensors") for name in load_file(path)
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'schema = "int2-g32"\ntarget = "sm90"\n[[override]]\nlayers = "0"\nschema = "none"\n'
    )
    out, text = tmp_path / "out", write_text(tmp_path / "text")
    hqconv.convert(src, out, config=recipe, device="cpu")
    found = hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    assert found["num_layers"] == 1
    artifact = whole(src)
    decoded = hqconv.dequantize(out, layer=next(iter(manifest(out)["blocks"])))
    module = moe_layers(artifact)[1][2]
    with torch.no_grad():
        module.gate_up_proj.copy_(torch.cat([decoded["w1"], decoded["w3"]], 1))
        module.down_proj.copy_(decoded["w2"])
    assert_figures(found, expected_figures(whole(src), artifact))


def test_the_checkpoint_layout(tmp_path: Path) -> None:
    src, out, text = make(tmp_path, "mixtral", schema="int4-g32")
    packed = tmp_path / "packed"
    hqconv.convert(src, packed, schema="int4-g32", layout="checkpoint", device="cpu", target="sm90")
    figures = [
        hqconv.evaluate(one, src, text, context_length=CONTEXT, **CPU) for one in (out, packed)
    ]
    for key in ("kl", "perplexity", "mean_nll", "top1_agreement"):
        assert figures[0][key] == figures[1][key]


# Families that cannot be evaluated: by the reason, and where transformers does not run the tiny model itself.
NO_ORDER = ("openai_privacy_filter",)  # it has labels of tokens, no next tokens
TWO_DECODERS = ("diffusion_gemma",)
NOT_RUN = ("dbrx", "glm4v_moe", "step3p7", "hy_v4_vl_text")  # the last has no next tokens
if transformers.__version__ >= "5.24":  # Llama 4's forward pass fails in this version itself
    NOT_RUN = (*NOT_RUN, "llama4")
WITH_HEADS_OF_8 = ("axk1", "deepseek_v3", "kimi_k25", "longcat_flash")  # as their rotary embeddings


@pytest.mark.sampled(13)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_is_run_as_a_whole_model_or_refused(family: str, tmp_path: Path) -> None:
    """The source's likelihood is that of the whole model, and the artifact's figures are near."""
    more = {"head_dim": 8} if family in WITH_HEADS_OF_8 else {}
    model = save_family(tmp_path / "src", family, inner=64, **more)
    write_tokenizer(tmp_path / "src")
    hqconv.convert(tmp_path / "src", tmp_path / "out", schema="int8", target="sm90", device="cpu")
    arguments = (tmp_path / "out", tmp_path / "src", write_text(tmp_path / "text"))
    refused = {
        NO_ORDER: "order that",
        TWO_DECODERS: "several modules",
        NOT_RUN: "cannot run this model",
    }
    why = next((reason for families, reason in refused.items() if family in families), None)
    if why is not None:
        with pytest.raises(RequestError, match=why):
            hqconv.evaluate(*arguments, context_length=CONTEXT, **CPU)
        return
    found = hqconv.evaluate(*arguments, context_length=CONTEXT, **CPU)
    loader = type(model)
    loaded = loader.from_pretrained(
        tmp_path / "src", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "src")
    ids = tokenizer(arguments[2].read_text(), add_special_tokens=False)["input_ids"]
    expected = expected_figures(loaded, loaded, ids=ids)
    assert found["perplexity"]["source"] == pytest.approx(
        expected["perplexity"]["source"], rel=1e-5
    )
    assert 0 < found["kl"]["mean"] < 0.05


# --- sources that are quantized


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_source_is_decoded_by_transformers(method: str, tmp_path: Path) -> None:
    src, family = (
        write_quantized(tmp_path / "src", method, tmp_path / "plain"),
        QUANTIZED[method][0],
    )
    out, text = tmp_path / "out", write_text(tmp_path / "text")
    hqconv.convert(src, out, schema="int2-g32", target="sm90", device="cpu")
    found = hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    artifact = whole(tmp_path / "plain")
    put_artifact(artifact, out, FAMILIES[family][1])
    assert_figures(found, expected_figures(whole(tmp_path / "plain"), artifact))


def test_a_quantized_source_that_transformers_cannot_decode() -> None:
    class Source:
        quantization, place = {"quant_method": "gptq", "bits": 4}, Path("src")

    with pytest.raises(RequestError, match="cannot decode") as caught:
        quantizer_of(Source(), object())  # type: ignore[arg-type]
    assert "quant_method gptq" in caught.value.where


# --- the command, and the file beside the artifact


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def own(qwen: tuple[Path, Path, Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    """The artifact, made anew, for tests that write to it."""
    src, _, text = qwen
    hqconv.convert(src, tmp_path / "out", schema="int2-g32", target="sm90", device="cpu", tp=2)
    return src, tmp_path / "out", text


def test_the_command(qwen: tuple[Path, Path, Path]) -> None:
    src, out, text = qwen
    arguments = ("evaluate", out, "--source", src, "--text", text, "--context", CONTEXT)
    done = call(*arguments, "--device", "cpu")
    assert done.exit_code == 0, done.output
    document = json.loads(call(*arguments, "--device", "cpu", "--json").stdout)
    expected = hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    assert {key: document[key] for key in expected} == expected
    assert f"{expected['kl']['mean']:.3g}" in done.stdout
    assert f"{expected['perplexity']['artifact']:.4f}" in done.stdout


def test_the_figures_lie_beside_the_artifact(own: tuple[Path, Path, Path], tmp_path: Path) -> None:
    src, out, text = own
    before = snapshot(out)
    found = hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    (warning,) = found["warnings"]
    assert warning.startswith("70 predictions only")
    assert json.loads((out / "evaluation.json").read_bytes()) == found
    report = hqconv.verify(out, src, checks=["files", "weights"], device="cpu")
    assert report.passed
    # a second evaluation takes the first one's place; no file of the artifact has changed
    again = hqconv.evaluate(out, src, text, context_length=5, **CPU)
    assert read_evaluation(out, read_manifest(out)) == again != found
    (out / "evaluation.json").unlink()
    (out / "reference.safetensors").unlink()
    assert snapshot(out) == before


def test_a_folder_that_cannot_be_written_is_a_warning(
    own: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out, text = own

    def refuse(*_: object) -> None:
        raise OutputError("The file cannot be written.", found="Read-only file system")

    monkeypatch.setattr(evaluation, "write_evaluation", refuse)
    done = call("evaluate", out, "--source", src, "--text", text, "--device", "cpu")
    assert done.exit_code == 0
    expected = "evaluation.json cannot be written beside the artifact: Read-only file system."
    assert f"warning: {expected}" in done.stdout


# --- refusals


def test_transformers_may_be_missing(
    qwen: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out, text = qwen
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = call("evaluate", out, "--source", src, "--text", text)
    assert done.exit_code == 2
    assert "Run: pip install 'transformers" in done.stderr


def test_what_cannot_be_evaluated_is_refused(qwen: tuple[Path, Path, Path], tmp_path: Path) -> None:
    src, out, text = qwen
    other = write_source(tmp_path / "other", "qwen3_moe", seed=1, experts=8)
    with pytest.raises(RequestError, match="not made from this source"):
        hqconv.evaluate(out, other, text, **CPU)
    with pytest.raises(RequestError, match="does not fit") as caught:
        hqconv.evaluate(out, src, text, max_memory="1KiB", **CPU)
    assert "150 tokens" in caught.value.expected
    assert caught.value.where == "--max-memory"
    with pytest.raises(RequestError, match="no such dtype"):
        hqconv.evaluate(out, src, text, compute_dtype="float8", **CPU)
    short = tmp_path / "short"
    short.write_text("5")
    with pytest.raises(RequestError, match="too short"):
        hqconv.evaluate(out, src, short, **CPU)
    bare = write_qwen3_moe(tmp_path / "bare")
    hqconv.convert(bare, tmp_path / "of-bare", schema="int4-g32", target="sm90", device="cpu")
    with pytest.raises(RequestError, match="cannot run this model"):  # no tokenizer
        hqconv.evaluate(tmp_path / "of-bare", bare, text, **CPU)


@pytest.mark.parametrize(("num_lines", "share"), [(0, 0.0), (60, 0.3), (200, 1.0)])
def test_a_text_that_the_calibration_read_is_told(
    num_lines: int, share: float, tmp_path: Path
) -> None:
    """num_lines: of 200, that are the calibration's in another order."""
    src = write_source(tmp_path / "src", "mixtral")
    lines = [" ".join(map(str, torch.randint(1, 64, (9,)).tolist())) for _ in range(400)]
    read, held_out = tmp_path / "read", tmp_path / "held-out"
    read.write_text("\n".join(lines[:200]))
    held_out.write_text("\n".join(lines[:200][::-1][:num_lines] + lines[200 : 400 - num_lines]))
    options = {"schema": "int4-g32", "target": "sm90", "device": "cpu", "calibrate_context": 64}
    out = tmp_path / "out"
    hqconv.convert(src, out, calibrate=read, calibrate_tokens=1800, **options)
    document = hqconv.evaluate(out, src, held_out, **CPU)
    assert document["lines_of_calibration"] == pytest.approx(share, abs=0.15)
    told = [warning for warning in document["warnings"] if "of the calibration's text" in warning]
    assert len(told) == (num_lines > 0)
    assert document == json.loads((out / "evaluation.json").read_text())


@pytest.mark.parametrize("change", ["attention", "embedding", "config"])
def test_another_model_beside_the_same_experts_is_refused(
    change: str, qwen: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Its experts are the artifact's; a run of both would be of a model that nobody serves."""
    src, out, text = qwen
    other = Path(shutil.copytree(src, tmp_path / "other"))
    if change == "config":
        config = json.loads((other / "config.json").read_text())
        config["norm_topk_prob"] = not config.get("norm_topk_prob", False)
        (other / "config.json").write_text(json.dumps(config))
    else:
        for path in other.glob("*.safetensors"):
            tensors = load_file(path)
            for name in tensors:
                if {"attention": "q_proj", "embedding": "embed"}[change] in name:
                    tensors[name] = tensors[name] * 1.5
            save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RequestError, match="Beside the experts"):
        hqconv.evaluate(out, other, text, **CPU)


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    src, out, text = make(tmp_path, "mixtral")
    num_tokens = json.loads((src / "config.json").read_text())["vocab_size"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(src)
    tokenizer.add_tokens([f"new{number}" for number in range(num_tokens)])
    tokenizer.save_pretrained(src)
    text.write_text(f"3 4 new{num_tokens - 1}")
    for run in (
        lambda: hqconv.evaluate(out, src, text, **CPU),
        lambda: hqconv.convert(
            src, tmp_path / "new", schema="int4-g32", target="sm90", calibrate=text, device="cpu"
        ),
    ):
        with pytest.raises(RequestError, match="no embedding for") as caught:
            run()
        assert str(num_tokens - 1) in caught.value.expected


def test_a_source_without_a_weight_is_refused(tmp_path: Path) -> None:
    src = write_source(tmp_path / "src", "mixtral")
    lost, listing = "model.layers.1.self_attn.q_proj.weight", src / "model.safetensors.index.json"
    index = json.loads(listing.read_bytes())
    path = src / index["weight_map"].pop(lost)
    tensors = load_file(path)
    del tensors[lost]
    save_file(tensors, path, {"format": "pt"})
    listing.write_text(json.dumps(index))
    hqconv.convert(src, tmp_path / "out", schema="int4-g32", target="sm90", device="cpu")
    with pytest.raises(InputError, match="cannot be filled") as caught:
        hqconv.evaluate(tmp_path / "out", src, write_text(tmp_path / "text"), **CPU)
    assert "layers.1.self_attn.q_proj" in str(caught.value.expected)


def test_threads_of_passes_end(
    qwen: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an error in the middle, and torch has its number of threads again."""
    src, out, text = qwen
    before, passes = torch.get_num_threads(), list[str]()

    def running() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("hqconv-pass")]

    def read(*_: object) -> None:
        passes.extend(running())
        raise ZeroDivisionError

    monkeypatch.setattr(evaluation, "stored_tensors", read)
    with pytest.raises(ZeroDivisionError):
        hqconv.evaluate(out, src, text, context_length=CONTEXT, **CPU)
    assert passes
    assert not running()
    assert torch.get_num_threads() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_same_figures(qwen: tuple[Path, Path, Path]) -> None:
    src, out, text = qwen
    figures = [
        hqconv.evaluate(out, src, text, context_length=CONTEXT, device=name)
        for name in ("cpu", "cuda")
    ]
    assert figures[1]["kl"] == pytest.approx(figures[0]["kl"], rel=1e-2)
    assert figures[1]["perplexity"] == pytest.approx(figures[0]["perplexity"], rel=1e-4)
