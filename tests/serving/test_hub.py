"""`vllm serve org/name`: vLLM takes the shards of the index, the plugin its rank's files, and nobody any more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make import vllm_cpu  # isort: skip  - before vLLM

from vllm.config.load import LoadConfig
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils import repo_utils

from hqconv.planning import output_units
from hqconv.schemas.grid import Grid
from hqconv.serving.vllm.plugin import register
from tests.make import small
from tests.make.conversions import run
from tests.make.hub_server import COMMIT, LocalHub, cached, serve, use
from tests.make.qwen import write_qwen3_moe
from tests.make.vllm_cpu import assert_holds_its_file, build_layer, open_config, parallel

pytestmark = pytest.mark.vllm

NAME = "org/name"
SOURCES: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    "plain": (
        lambda folder: write_qwen3_moe(folder, hidden_size=256, intermediate_size=256),
        "mxfp4",
        2,
    ),
    "fp8": (lambda folder: small.save(folder, small.fp8_blocks()), "source", 1),
    "gptq": (lambda folder: small.save(folder, small.gptq(desc_act=False)), "int8", 1),
}  # writer, schema, layers; the latter two have layers that another config of vLLM's serves


@pytest.fixture(scope="module", autouse=True)
def vllm_config() -> Iterator[Any]:
    register()
    with vllm_cpu.config() as config:
        yield config


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def as_hub(hub: LocalHub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    use(patch, hub.url, cache)
    patch.setattr(repo_utils, "_hf_api", None)  # which remembers where it asked
    patch.setattr(weight_utils, "temp_dir", str(cache.parent))  # of locks


def take_copied_tensors(**words: Any) -> list[Path]:
    """The files that vLLM's own loader reads."""
    _, files, is_safe, _ = DefaultModelLoader(LoadConfig(**words))._prepare_weights(
        NAME, None, None, True, None
    )
    assert is_safe
    return [Path(file) for file in files]


def make_layers(out: Path, num_layers: int, rank: int) -> list[Any]:
    """All layers of experts of one rank, made and loaded. config.json vLLM has before it knows of a method."""
    config, method = json.loads((out / "config.json").read_text()), open_config(out, NAME)
    sizes = {"num_experts": config["num_experts"], "hidden": 256, "inter": 256}
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(num_layers)]
    layers = [
        build_layer(method, name, **sizes, grid=parallel(tp=2, tp_rank=rank)) for name in names
    ]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return layers


def shards_of(out: Path) -> set[str]:
    return set(
        json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values()
    )


def experts_of(out: Path, rank: int) -> set[str]:
    return {path.relative_to(out).as_posix() for path in (out / f"experts/tp{rank}-ep0").iterdir()}


@pytest.mark.parametrize("name", SOURCES)
def test_a_rank_fetches_what_it_needs_and_nothing_else(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of copied tensors and of experts, where there are several shards."""
    monkeypatch.setattr(output_units, "MAX_SHARD_BYTES", 4096)
    write, schema, num_layers = SOURCES[name]
    out = tmp_path / "out"
    run(write(tmp_path / "source"), out, schema, Grid(tp=2))
    shards, index = shards_of(out), "model.safetensors.index.json"
    assert len(shards) > 1
    with serve(out) as hub:
        as_hub(hub, cache, monkeypatch)
        assert {file.name for file in take_copied_tensors()} == shards
        assert hub.fetched == cached(cache) == {index, *shards}
        layers = make_layers(out, num_layers, rank=1)
        asked = set() if name == "plain" else {"config.json"}  # by the source's own quantization
        wanted = {index, *shards, *asked, "hqconv.json", *experts_of(out, 1)}
        assert hub.fetched == cached(cache) == wanted
        named = {
            match[1] for line in hub.requests if (match := re.search(r"/resolve/[^/]+/(\S+)", line))
        }
        assert named <= {
            *wanted,
            "model.safetensors",
        }  # which vLLM asks for whether it is there or not
    for layer in layers:
        assert_holds_its_file(layer)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    run(SOURCES["plain"][0](tmp_path / "source"), tmp_path / "out", "mxfp4", Grid(tp=2))
    return tmp_path / "out"


@pytest.mark.parametrize("is_resolved", [True, False])
def test_a_push_between_the_manifest_and_the_weights(
    plain: Path,
    cache: Path,
    tmp_path: Path,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_resolved: bool,
) -> None:
    """Experts and all other weights are those of the manifest, also where vLLM could not resolve the branch."""
    other = tmp_path / "other"
    run(SOURCES["plain"][0](tmp_path / "source2"), other, "mxfp8", Grid(tp=2))
    with serve(plain) as hub:
        as_hub(hub, cache, monkeypatch)
        revision = repo_utils.resolve_revision(NAME) if is_resolved else None
        model = SimpleNamespace(model=NAME, revision=revision)
        monkeypatch.setattr(vllm_config, "model_config", model)
        config = json.loads((plain / "config.json").read_text())
        method = get_quantization_config("hqconv").from_config(config["quantization_config"])
        method.maybe_update_config(NAME, revision=revision)
        hub.push(other, "f" * 40)
        layers = [
            build_layer(
                method,
                f"model.layers.{number}.mlp.experts",
                num_experts=config["num_experts"],
                hidden=256,
                inter=256,
                grid=parallel(tp=2, tp_rank=1),
            )
            for number in range(2)
        ]
        assert (hasattr(model.revision, "resolved"), str(model.revision)) == (
            is_resolved,
            "main" if is_resolved else COMMIT,
        )
        loader = DefaultModelLoader(LoadConfig())
        _, files, _, _ = loader._prepare_weights(model.model, None, model.revision, True, None)
    for file in files:
        assert Path(file).read_bytes() == (plain / Path(file).name).read_bytes()
    for layer in layers:
        file = layer.quant_method.file
        assert file.path.read_bytes() == (plain / file.name).read_bytes()
