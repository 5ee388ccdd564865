"""`reload_weights` with another artifact, by vLLM's own function and loader on the CPU: all weights, or none of them.

The judges are a fresh start with the other artifact, and the bytes of before.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make import vllm_cpu  # isort: skip  - before vLLM
from vllm.config import LoadConfig
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import inplace, layerwise

import hqconv
from hqconv.artifact import tensor_filler
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.io.piece_reader import PieceReader, Reads
from hqconv.serving.vllm import reload as reloading
from hqconv.serving.vllm.plugin import register
from scripts.bench_delta import change_experts, reseal
from tests.make import input_scales, small
from tests.make.conversions import run
from tests.make.hub_server import COMMIT, serve, use
from tests.make.places import REPO
from tests.make.qwen import write_qwen3_moe
from tests.make.vllm_cpu import build_layer

pytestmark = pytest.mark.vllm

SIZES = {"num_experts": 5, "hidden": 256, "inter": 512}
LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module", autouse=True)
def vllm_config() -> Iterator[Any]:
    register()
    with vllm_cpu.config(load_config=LoadConfig()) as config:
        config.model_config = SimpleNamespace(
            model="", model_weights="", revision=None, dtype=torch.bfloat16, quantization="hqconv"
        )
        yield config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and a later step of its training, and artifacts of both."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_experts": 5}
    for step in range(2):
        write_qwen3_moe(folder / f"step{step}", seed=step, **sizes)
        run(folder / f"step{step}", folder / f"old{step}", "int4-g64-zp")
    run(folder / "step0", folder / "mse", "int4-g64-zp", quantizer="mse")
    return {path.name: path for path in folder.iterdir()}


class Model(torch.nn.Module):
    """Two layers of experts, and a norm that vLLM's loader brings by its name."""

    def __init__(self, config: Any, layers: list[str] = LAYERS, **sizes: Any) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(build_layer(config, name, **{**SIZES, **sizes}) for name in layers)
        self.norm = torch.nn.LayerNorm(256, bias=False, dtype=torch.bfloat16)
        self.loads = 0

    def load_weights(self, weights: Any) -> set[str]:
        self.loads += 1
        for name, tensor in weights:
            if name == NORM:
                param = self.norm.weight
                getattr(param, "weight_loader", _copy)(param, tensor)
        return {NORM}


def _copy(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)


def start(vllm_config: Any, out: Path, **words: Any) -> Model:
    """A server's model, as at its start."""
    document = json.loads((out / "config.json").read_text())["quantization_config"]
    config = get_quantization_config("hqconv").from_config(document)
    config.maybe_update_config(str(out))
    vllm_config.model_config.model, vllm_config.quant_config = str(out), config
    model = Model(config, **words)
    layerwise.record_metadata_for_reloading(model)
    model.load_weights(DefaultModelLoader(LoadConfig()).get_all_weights(vllm_config.model_config, model))
    for layer in model.experts:
        layer.quant_method.process_weights_after_loading(layer)
    return model


def reload(vllm_config: Any, model: Model, out: Path | None) -> None:
    """As vLLM's model runner calls it; the function is looked up as the runner's modules have it."""
    inplace.reload_weights(vllm_config, model, None, None if out is None else str(out), True)


def weights(model: Model) -> dict[str, bytes]:
    return {
        name: param.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, param in model.named_parameters()
    }


def addresses(model: Model) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters()}


def copied(models: dict[str, Path], name: str, to: Path) -> Path:
    return Path(shutil.copytree(models[name], to))


def rank_file(out: Path, layer: int = 1) -> Path:
    return out / "experts" / "tp0-ep0" / f"{LAYERS[layer]}.safetensors"


@pytest.mark.parametrize("other", ["old1", "mse"])
def test_the_weights_are_those_of_a_fresh_start(models: dict[str, Path], vllm_config: Any, other: str) -> None:
    """Another step of training, and another quantizer of the same step; tensors stay where CUDA graphs have them."""
    wanted = weights(start(vllm_config, models[other]))
    model = start(vllm_config, models["old0"])
    before, places = weights(model), addresses(model)
    kernels = [layer.quant_method.moe_kernel for layer in model.experts]
    assert before != wanted
    reload(vllm_config, model, models[other])
    assert weights(model) == wanted
    assert addresses(model) == places
    assert [layer.quant_method.moe_kernel for layer in model.experts] == kernels
    assert vllm_config.model_config.model == str(models[other])
    for param in model.parameters():  # after a deep sleep
        param.data.view(-1).view(torch.uint8).zero_()
    reload(vllm_config, model, None)
    assert weights(model) == wanted
    reload(vllm_config, model, models["old0"])
    assert weights(model) == before


def test_static_activation_scales_are_replaced_too(tmp_path: Path, vllm_config: Any) -> None:
    for seed in range(2):
        tensors, document = input_scales.fp8()
        tensors = {name: one * (1 + seed) if "input_scale" in name else one for name, one in tensors.items()}
        source = small.save(tmp_path / f"source{seed}", (tensors, document))
        run(source, tmp_path / f"out{seed}", "fp8-tensor", input_schema="fp8-static")
    sizes = {"num_experts": small.E, "hidden": small.HIDDEN, "inter": small.INNER, "layers": LAYERS[:1]}
    wanted = start(vllm_config, tmp_path / "out1", **sizes)
    model = start(vllm_config, tmp_path / "out0", **sizes)
    assert weights(model) != weights(wanted)
    reload(vllm_config, model, tmp_path / "out1")
    assert weights(model) == weights(wanted)
    (layer,) = model.experts
    assert layer.quant_method.moe_quant_config.w1_input_scale is layer.w13_input_scale


def other_shape(models: dict[str, Path], tmp: Path) -> Path:
    run(write_qwen3_moe(tmp / "m", hidden_size=256, intermediate_size=256, num_experts=5), tmp / "bad", "int4-g64-zp")
    return tmp / "bad"


def other_schema(models: dict[str, Path], tmp: Path) -> Path:
    run(models["step1"], tmp / "bad", "int4-g128-zp")
    return tmp / "bad"


def other_target(models: dict[str, Path], tmp: Path) -> Path:
    run(models["step1"], tmp / "bad", "int4-g64-zp", target="sm80")
    return tmp / "bad"


def other_ranks(models: dict[str, Path], tmp: Path) -> Path:
    run(models["step1"], tmp / "bad", "int4-g64-zp", ep=5)
    return tmp / "bad"


def other_inputs(models: dict[str, Path], tmp: Path) -> Path:
    run(models["step1"], tmp / "bad", "int4-g64-zp", input_schema="int8")
    return tmp / "bad"


def other_dtype(models: dict[str, Path], tmp: Path) -> Path:
    run(models["step1"], tmp / "bad", "int4-g64-zp", dtype="float16")
    return tmp / "bad"


def other_layout(models: dict[str, Path], tmp: Path) -> Path:
    run(models["step1"], tmp / "bad", "int4-g64", layout="checkpoint")
    return tmp / "bad"


def other_config(models: dict[str, Path], tmp: Path) -> Path:
    """A number that the running server has built into itself."""
    source = Path(shutil.copytree(models["step1"], tmp / "source"))
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**document, "rope_theta": 5.0}))
    run(source, tmp / "bad", "int4-g64-zp")
    return tmp / "bad"


def other_tensors(models: dict[str, Path], tmp: Path) -> Path:
    """A tensor outside of the experts."""
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(models["step1"], tmp / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors[NORM] = tensors[NORM].float()
    save_file(tensors, source / "model.safetensors")
    run(source, tmp / "bad", "int4-g64-zp")
    return tmp / "bad"


def no_model(models: dict[str, Path], tmp: Path) -> Path:
    return models["step1"]


def cut_off(models: dict[str, Path], tmp: Path) -> Path:
    out = copied(models, "old1", tmp / "bad")
    rank_file(out).write_bytes(rank_file(out).read_bytes()[:-1])
    return out


def lost(models: dict[str, Path], tmp: Path) -> Path:
    out = copied(models, "old1", tmp / "bad")
    rank_file(out).unlink()
    return out


def altered_manifest(models: dict[str, Path], tmp: Path) -> Path:
    out = copied(models, "old1", tmp / "bad")
    text = (out / "hqconv.json").read_text()
    (out / "hqconv.json").write_text(text.replace('"top_k": 2', '"top_k": 1'))
    assert text != (out / "hqconv.json").read_text()
    return out


def damaged_header(models: dict[str, Path], tmp: Path) -> Path:
    out = copied(models, "old1", tmp / "bad")
    data = bytearray(rank_file(out).read_bytes())
    data[8:12] = b"    "
    rank_file(out).write_bytes(data)
    return out


def cut_shard(models: dict[str, Path], tmp: Path) -> Path:
    out = copied(models, "old1", tmp / "bad")
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-2])
    return out


def flipped(models: dict[str, Path], tmp: Path, path: str = "") -> Path:
    """A bit of the last byte, which only digests show."""
    out = copied(models, "old1", tmp / "bad")
    file = out / path if path else rank_file(out)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return out


def flipped_shard(models: dict[str, Path], tmp: Path) -> Path:
    return flipped(models, tmp, "model.safetensors")


BAD: list[Callable[[dict[str, Path], Path], Path]] = [
    *(other_shape, other_schema, other_target, other_ranks, other_inputs, other_dtype, other_layout, other_config),
    *(other_tensors, no_model, cut_off, lost, altered_manifest, damaged_header, cut_shard, flipped, flipped_shard),
]


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_artifact_changes_nothing(
    models: dict[str, Path],
    tmp_path: Path,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[dict[str, Path], Path], Path],
) -> None:
    """It is refused before vLLM's own function begins: no parameter is written, not even with the same bytes."""
    if make in (flipped, flipped_shard):
        monkeypatch.setenv("HQCONV_VERIFY", "1")
    bad = make(models, tmp_path)
    model = start(vllm_config, models["old0"])
    before, places, loads = weights(model), addresses(model), model.loads
    versions = [param._version for param in model.parameters()]
    with pytest.raises((RequestError, VerificationError)) as caught:
        reload(vllm_config, model, bad)
    assert model.loads == loads
    assert (weights(model), addresses(model)) == (before, places)
    assert [param._version for param in model.parameters()] == versions
    assert vllm_config.model_config.model == str(models["old0"])
    assert "must not serve" not in str(caught.value)
    reload(vllm_config, model, models["old1"])  # and a good one is still taken
    assert weights(model) != before


def fail_after(monkeypatch: pytest.MonkeyPatch, folder: str, num_reads: int) -> None:
    """Reading a folder's rank files fails from a read on, as a disk does that dies."""
    seen: list[int] = []

    class Dying(PieceReader):
        def __init__(self, path: Path, reads: Reads = "auto") -> None:
            super().__init__(path, reads)
            self.path = str(path)

        def fill(self, views: Iterable[memoryview], begin: int) -> int:
            if folder in self.path:
                seen.append(begin)
                if len(seen) > num_reads:
                    raise OSError("The disk died.")
            return super().fill(views, begin)

    monkeypatch.setattr(tensor_filler, "PieceReader", Dying)
    monkeypatch.setattr(tensor_filler, "PIECE_BYTES", 4096)


@pytest.mark.parametrize("num_reads", [0, 1, 50, 300])
def test_a_file_that_fails_in_the_middle_brings_the_old_weights_back(
    models: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch, num_reads: int
) -> None:
    model = start(vllm_config, models["old0"])
    before, places = weights(model), addresses(model)
    fail_after(monkeypatch, "old1", num_reads)
    with pytest.raises(VerificationError, match="weights of before again") as caught:
        reload(vllm_config, model, models["old1"])
    assert "The disk died" in str(caught.value)
    assert (weights(model), addresses(model)) == (before, places)
    assert vllm_config.model_config.model == str(models["old0"])
    monkeypatch.undo()
    reload(vllm_config, model, models["old1"])
    assert weights(model) == weights(start(vllm_config, models["old1"]))


def test_vllms_own_loader_that_fails_brings_the_old_weights_back(
    models: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the other layers, when all parameters are taken away."""
    model = start(vllm_config, models["old0"])
    before, places, own = weights(model), addresses(model), model.load_weights

    def failing(found: Any) -> set[str]:
        if vllm_config.model_config.model == str(models["old1"]):
            assert all(param.is_meta for param in model.parameters())
            own((name, tensor) for name, tensor in found if name == NORM)
            raise OSError("a shard is gone")
        return own(found)

    monkeypatch.setattr(model, "load_weights", failing)
    with pytest.raises(VerificationError, match="weights of before again"):
        reload(vllm_config, model, models["old1"])
    assert (weights(model), addresses(model)) == (before, places)


def test_without_the_old_artifact_the_server_must_stop(
    models: dict[str, Path], tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good artifact is taken all the same; of one that fails in the middle the error says what is left."""
    served = copied(models, "old0", tmp_path / "served")
    model = start(vllm_config, served)
    shutil.rmtree(served)
    reload(vllm_config, model, models["old1"])
    assert weights(model) == weights(start(vllm_config, models["old1"]))
    served = copied(models, "old0", tmp_path / "served")
    model = start(vllm_config, served)
    shutil.rmtree(served)
    fail_after(monkeypatch, "old1", 20)
    with pytest.raises(VerificationError, match="must not serve any more") as caught:
        reload(vllm_config, model, models["old1"])
    assert "The disk died" in str(caught.value)
    monkeypatch.undo()
    reload(vllm_config, model, models["old1"])
    assert weights(model) == weights(start(vllm_config, models["old1"]))


def test_an_artifact_that_was_exchanged_at_its_place_is_taken(
    models: dict[str, Path], tmp_path: Path, vllm_config: Any
) -> None:
    """`reload_weights()` without a path after `convert --overwrite`."""
    served = copied(models, "old0", tmp_path / "served")
    model = start(vllm_config, served)
    shutil.rmtree(served)
    copied(models, "old1", served)
    reload(vllm_config, model, None)
    assert weights(model) == weights(start(vllm_config, models["old1"]))


def test_a_push_during_a_reload_mixes_no_weights(
    models: dict[str, Path], tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a Hub repo experts and other layers are those of the manifest that was checked."""
    wanted = weights(start(vllm_config, models["old1"]))
    model, own = start(vllm_config, models["old0"]), reloading.check_replacement
    with serve(models["old1"], "org/step") as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")

        def check(*words: Any, **options: Any) -> Any:
            found = own(*words, **options)
            hub.push(models["old0"], "f" * 40)
            return found

        monkeypatch.setattr(reloading, "check_replacement", check)
        inplace.reload_weights(vllm_config, model, None, "org/step", True)
    assert weights(model) == wanted
    assert (vllm_config.model_config.model, vllm_config.model_config.revision) == ("org/step", COMMIT)


@pytest.mark.parametrize("at", [0, 1])
def test_an_error_of_another_rank_is_every_ranks(
    models: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before the first byte, and after the last: this rank's own weights are good."""
    model, asked = start(vllm_config, models["old0"]), []
    before = weights(model)

    def told(error: Exception | None) -> list[str]:
        assert error is None
        asked.append(len(asked))
        return ["", "DiskError: rank 1" if asked[-1] == at else ""]

    monkeypatch.setattr(reloading, "_told", told)
    with pytest.raises(HqconvError, match="rank 1"):
        reload(vllm_config, model, models["old1"])
    assert weights(model) == before
    assert len(asked) == (1 if at == 0 else 3)


def test_a_rank_without_experts_takes_part(models: dict[str, Path], vllm_config: Any) -> None:
    """Of a pipeline: its other layers are replaced, and it answers the other ranks."""
    start(vllm_config, models["old0"])
    model = Model(vllm_config.quant_config, layers=[])
    layerwise.record_metadata_for_reloading(model)
    reload(vllm_config, model, models["old1"])
    assert weights(model)["norm.weight"] == weights(start(vllm_config, models["old1"]))["norm.weight"]


def test_models_of_others_and_streams_of_weights_are_vllms_own(
    models: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(inplace, "reload_weights", lambda *words: seen.append(words))
    model = start(vllm_config, models["old0"])  # which takes the function over
    monkeypatch.setattr(vllm_config, "quant_config", None)
    other, stream = torch.nn.Linear(2, 2), iter([("norm.weight", torch.zeros(256))])
    inplace.reload_weights(vllm_config, other, None, "somewhere", True)
    monkeypatch.setattr(vllm_config, "quant_config", model.experts[0].quant_method.config)
    inplace.reload_weights(vllm_config, model, stream, None, True)
    assert seen == [(vllm_config, other, None, "somewhere", True), (vllm_config, model, stream, None, True)]


def test_whole_models_are_reloaded(tmp_path: Path) -> None:
    """vLLM's own classes, attention and all, in a process of their own; and what ranks tell each other goes by gloo."""
    types = ["qwen3_moe", "gpt_oss"]
    command = [sys.executable, "-m", "tests.make.vllm_reload", str(tmp_path / "answers.json"), *types]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, timeout=300)
    answers = json.loads((tmp_path / "answers.json").read_text())
    for model_type in types:
        found = answers[model_type]
        assert (found.get("moved"), found.get("unlike")) == ([], []), found
        assert len(found["same"]) < len(found["all"]) / 2


def test_parameters_are_back_even_if_the_old_weights_are_not(
    models: dict[str, Path], tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loader fails while all parameters are taken away, and the old artifact is gone: addresses are kept."""
    served = copied(models, "old0", tmp_path / "served")
    model = start(vllm_config, served)
    places = addresses(model)
    shutil.rmtree(served)

    def failing(found: Any) -> set[str]:
        raise OSError("a shard is gone")

    monkeypatch.setattr(model, "load_weights", failing)
    with pytest.raises(VerificationError, match="must not serve any more"):
        reload(vllm_config, model, models["old1"])
    assert addresses(model) == places
    assert not any(param.is_meta for param in model.parameters())


def test_experts_that_move_between_ranks_are_refused(
    models: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --enable-eplb, also without a path: files have the first map's experts, the router another's."""
    model = start(vllm_config, models["old0"])
    before, loads = weights(model), model.loads
    for layer in model.experts:
        monkeypatch.setattr(layer.quant_method.moe.moe_parallel_config, "enable_eplb", True)
    for path in (models["old1"], None):
        with pytest.raises(RequestError, match="may have moved"):
            reload(vllm_config, model, path)
    assert (weights(model), model.loads) == (before, loads)


def trained(old: Path, new: Path, *, layers: tuple[int, ...] = (0, 1), experts: tuple[int, ...] = (2,)) -> Path:
    """A copy in which some experts have other weights, as a step of training that changed only them leaves it."""
    shutil.copytree(old, new)
    for layer in layers:
        change_experts(rank_file(new, layer), list(experts))
    reseal(new)
    return new


@pytest.fixture(scope="module")
def steps(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, two steps after it, and the delta of each; the second step changes one layer, and an expert again."""
    folder = tmp_path_factory.mktemp("steps")
    first = trained(models["old0"], folder / "first", experts=(1, 2))
    second = trained(first, folder / "second", layers=(1,), experts=(2, 4))
    hqconv.diff(models["old0"], first, folder / "delta1")
    hqconv.diff(first, second, folder / "delta2")
    return {path.name: path for path in folder.iterdir()}


def test_deltas_are_written_over_what_is_served(
    models: dict[str, Path], steps: dict[str, Path], vllm_config: Any
) -> None:
    """One after the other; only their bytes are read, and vLLM loads nothing."""
    wanted = {name: weights(start(vllm_config, steps[name])) for name in ("first", "second")}
    model = start(vllm_config, models["old0"])
    before, places, loads = weights(model), addresses(model), model.loads
    reload(vllm_config, model, steps["delta1"])
    assert weights(model) == wanted["first"]
    reload(vllm_config, model, steps["delta2"])
    assert weights(model) == wanted["second"]
    assert (addresses(model), model.loads) == (places, loads)
    for param in model.parameters():  # after a deep sleep
        param.data.view(-1).view(torch.uint8).zero_()
    reload(vllm_config, model, None)
    assert weights(model) == wanted["second"]
    reload(vllm_config, model, models["old0"])
    assert weights(model) == before
    reload(vllm_config, model, None)
    assert weights(model) == before
    reload(vllm_config, model, steps["delta1"])
    assert weights(model) == wanted["first"]


def test_a_delta_reads_its_own_bytes_and_samples(
    models: dict[str, Path], steps: dict[str, Path], vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = start(vllm_config, models["old0"])
    num_bytes = sum(path.stat().st_size for path in steps["delta1"].rglob("experts/*/*"))
    config = vllm_config.quant_config
    config.loader._log = logging.getLogger("tests.reload")
    with caplog.at_level(logging.INFO, "tests.reload"):
        reload(vllm_config, model, steps["delta1"])
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [f"Experts: {num_bytes / 1e9:.3f} GB"]
    assert num_bytes < 0.5 * sum(path.stat().st_size for path in models["old0"].rglob("experts/*/*"))


def of_another_base(models: dict[str, Path], steps: dict[str, Path], tmp: Path) -> Path:
    return steps["delta2"]


def of_other_layers(models: dict[str, Path], steps: dict[str, Path], tmp: Path) -> Path:
    """The whole of another step of training."""
    hqconv.diff(models["old0"], models["old1"], tmp / "bad")
    return tmp / "bad"


def of_another_config(models: dict[str, Path], steps: dict[str, Path], tmp: Path) -> Path:
    other = Path(shutil.copytree(steps["first"], tmp / "other"))
    document = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**document, "rope_theta": 5.0}))
    reseal(other)
    hqconv.diff(models["old0"], other, tmp / "bad")
    return tmp / "bad"


def cut_payload(models: dict[str, Path], steps: dict[str, Path], tmp: Path) -> Path:
    bad = Path(shutil.copytree(steps["delta1"], tmp / "bad"))
    path = bad / "files" / rank_file(models["old0"]).relative_to(models["old0"])
    path.write_bytes(path.read_bytes()[:-1])
    return bad


def altered_description(models: dict[str, Path], steps: dict[str, Path], tmp: Path) -> Path:
    bad = Path(shutil.copytree(steps["delta1"], tmp / "bad"))
    text = (bad / "hqconv-delta.json").read_text()
    (bad / "hqconv-delta.json").write_text(text.replace(hqconv.__version__, "9.9"))
    assert text != (bad / "hqconv-delta.json").read_text()
    return bad


def flipped_payload(models: dict[str, Path], steps: dict[str, Path], tmp: Path) -> Path:
    bad = Path(shutil.copytree(steps["delta1"], tmp / "bad"))
    path = bad / "files" / rank_file(models["old0"]).relative_to(models["old0"])
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    return bad


BAD_DELTAS: list[Callable[[dict[str, Path], dict[str, Path], Path], Path]] = [
    *(of_another_base, of_other_layers, of_another_config, cut_payload, altered_description, flipped_payload)
]


@pytest.mark.parametrize("make", BAD_DELTAS, ids=lambda make: make.__name__)
def test_a_bad_delta_changes_nothing(
    models: dict[str, Path],
    steps: dict[str, Path],
    tmp_path: Path,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[dict[str, Path], dict[str, Path], Path], Path],
) -> None:
    if make is flipped_payload:
        monkeypatch.setenv("HQCONV_VERIFY", "1")
    bad = make(models, steps, tmp_path)
    model = start(vllm_config, models["old0"])
    before = weights(model)
    versions = [param._version for param in model.parameters()]
    with pytest.raises((RequestError, VerificationError)):
        reload(vllm_config, model, bad)
    assert (weights(model), [param._version for param in model.parameters()]) == (before, versions)
    reload(vllm_config, model, steps["delta1"])
    assert weights(model) == weights(start(vllm_config, steps["first"]))


def test_a_delta_is_no_base_for_forgotten_weights(
    models: dict[str, Path], steps: dict[str, Path], vllm_config: Any
) -> None:
    """After a deep sleep, of which nothing tells the plugin but the bytes; of one layer too."""
    wanted = weights(start(vllm_config, steps["first"]))
    model = start(vllm_config, models["old0"])
    model.experts[1].w2_weight_scale.data.view(torch.uint8).zero_()
    with pytest.raises(RequestError, match="without a path first"):
        reload(vllm_config, model, steps["delta1"])
    reload(vllm_config, model, None)
    reload(vllm_config, model, steps["delta1"])
    assert weights(model) == wanted


@pytest.mark.parametrize("num_reads", [0, 1, 4])
def test_a_delta_that_fails_in_the_middle_is_taken_off(
    models: dict[str, Path], steps: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch, num_reads: int
) -> None:
    """The first delta, and the second, which lies on the first."""
    model = start(vllm_config, models["old0"])
    for name, result in (("delta1", "first"), ("delta2", "second")):
        before = weights(model)
        with monkeypatch.context() as patched:
            fail_after(patched, name, num_reads)
            with pytest.raises(VerificationError, match="weights of before again"):
                reload(vllm_config, model, steps[name])
        assert weights(model) == before
        reload(vllm_config, model, steps[name])
        assert weights(model) == weights(start(vllm_config, steps[result]))
        vllm_config.quant_config = model.experts[0].quant_method.config


def test_without_its_base_a_delta_is_refused(
    models: dict[str, Path], steps: dict[str, Path], tmp_path: Path, vllm_config: Any
) -> None:
    """There would be no way back."""
    served = copied(models, "old0", tmp_path / "served")
    model = start(vllm_config, served)
    before = weights(model)
    served.rename(tmp_path / "gone")
    with pytest.raises(HqconvError):
        reload(vllm_config, model, steps["delta1"])
    copied(models, "old1", served)
    with pytest.raises(RequestError, match="another artifact meanwhile"):
        reload(vllm_config, model, steps["delta1"])
    assert weights(model) == before


@pytest.mark.parametrize("at", [0, 1])
def test_a_delta_that_fails_on_another_rank_is_taken_off(
    models: dict[str, Path], steps: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    model, asked = start(vllm_config, models["old0"]), []
    before = weights(model)

    def told(error: Exception | None) -> list[str]:
        assert error is None
        asked.append(len(asked))
        return ["", "DiskError: rank 1" if asked[-1] == at else ""]

    with monkeypatch.context() as patched:
        patched.setattr(reloading, "_told", told)
        with pytest.raises(HqconvError, match="rank 1"):
            reload(vllm_config, model, steps["delta1"])
    assert weights(model) == before
    assert len(asked) == (1 if at == 0 else 3)
    reload(vllm_config, model, steps["delta1"])
    assert weights(model) != before


def test_an_artifact_that_fails_after_a_delta_brings_base_and_delta_back(
    models: dict[str, Path], steps: dict[str, Path], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = start(vllm_config, models["old0"])
    reload(vllm_config, model, steps["delta1"])
    before = weights(model)
    with monkeypatch.context() as patched:
        fail_after(patched, "old1", 20)
        with pytest.raises(VerificationError, match="weights of before again"):
            reload(vllm_config, model, models["old1"])
    assert weights(model) == before
    reload(vllm_config, model, steps["delta2"])
    assert weights(model) == weights(start(vllm_config, steps["second"]))
