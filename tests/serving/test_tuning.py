"""Tuning tables are Humming's own, worked out once; vLLM's facade is a stand-in, Humming is not."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hqconv
from hqconv.artifact.reader import Artifact
from hqconv.kernel_layout.kernel_sources import NO_DEVICE
from hqconv.serving.vllm.tuning import is_table, remembered
from hqconv.warm.compile_kernels import warm
from hqconv.warm.kernel_store import read_store_manifest
from tests.make.kernels import fake_compiler, server, use_compiler
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
ASKED = {"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": "indexed"}


class Facade(ModuleType):
    """`vllm.utils.humming`, as far as experts ask it for tuning; counts what Humming must work out."""

    def __init__(self) -> None:
        super().__init__("vllm.utils.humming")
        self.num_worked_out = 0

    def get_heuristics_config(self, **asked: Any) -> Any:
        self.num_worked_out += 1
        return importlib.import_module("humming.tune").get_heuristics_config(
            device=NO_DEVICE, **asked
        )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("tuning")
    source = write_qwen3_moe(work / "source", hidden_size=256, intermediate_size=256)
    hqconv.convert(source, work / "out", schema="mxfp4", target="sm90", device="cpu")
    return work / "out"


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Facade]:
    module = Facade()
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    monkeypatch.setitem(sys.modules, "vllm.utils.humming", module)
    use_compiler(monkeypatch, fake_compiler())
    with server(monkeypatch, tmp_path / "cache"):
        yield module


def configs(artifact: Path) -> list[Any]:
    """Humming's LayerConfigs of a layer."""
    with Artifact(artifact) as opened:
        documents = opened.rank_file(LAYER, 0, 0).configs.values()
    return [importlib.import_module("humming.config").LayerConfig(**config) for config in documents]


def ask(facade: Any, artifact: Path, **more: Any) -> list[Any]:
    return [
        facade.get_heuristics_config(layer_config=config, **{**ASKED, **more})
        for config in configs(artifact)
    ]


def tables_of(folder: Path) -> dict[str, Any]:
    return dict(read_store_manifest(folder)["tuning"])


def plain(table: Any) -> Any:
    """As it goes to the kernels: vLLM hands it over as JSON."""
    return json.loads(json.dumps(table))


def test_a_table_is_worked_out_once_for_all_starts(artifact: Path, facade: Facade) -> None:
    wanted = ask(facade, artifact)
    facade.num_worked_out = 0
    with remembered({}):
        assert plain(ask(facade, artifact)) == plain(wanted)
    assert facade.num_worked_out == 2
    with remembered({}):
        assert plain(ask(facade, artifact)) == plain(wanted)
    assert facade.num_worked_out == 2
    ask(facade, artifact)
    assert facade.num_worked_out == 4, "outside, vLLM asks Humming as ever"


def test_a_damaged_table_is_worked_out_again(
    artifact: Path, facade: Facade, tmp_path: Path
) -> None:
    with remembered({}):
        wanted = ask(facade, artifact)
        paths = sorted((tmp_path / "cache" / "hqconv-tuning").iterdir())
        assert len(paths) == 2
        for path, damage in zip(paths, ("[", '[["a", 1, {"block_shape": 1}]]'), strict=True):
            path.write_text(damage)
        assert plain(ask(facade, artifact)) == plain(wanted)
    assert facade.num_worked_out == 4
    assert all(is_table(json.loads(path.read_text())) for path in paths)


def test_warm_leaves_the_tables_that_a_server_asks_for(
    artifact: Path, facade: Facade, tmp_path: Path
) -> None:
    wanted = ask(facade, artifact)
    facade.num_worked_out = 0
    warm(artifact, gpu="h200", kernels=tmp_path / "kernels")
    tables = tables_of(tmp_path / "kernels")
    assert len(tables) == 2
    with remembered(tables):
        assert plain(ask(facade, artifact)) == plain(wanted)
    assert facade.num_worked_out == 0
