"""vLLM's weight cache (`--load-format ipc_cache`) with the plugin, by vLLM's own daemon and loader on the CPU.

Between them is a pair of sockets; tensors of the CPU go by value, where a GPU's go as handles of its memory.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make import vllm_cpu  # isort: skip  - before vLLM

from vllm.config import LoadConfig
from vllm.model_executor.model_loader.weight_cache import daemon as daemons
from vllm.model_executor.model_loader.weight_cache import ipc_loader
from vllm.model_executor.model_loader.weight_cache.protocol import (
    WeightCacheKey,
    check_ipc_quant_support,
)

from hqconv.artifact import tensor_filler
from hqconv.errors import VerificationError
from hqconv.schemas.grid import Grid
from hqconv.serving.vllm.plugin import register
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe
from tests.make.vllm_cpu import as_bytes, assert_holds_its_file, build_layer, open_config, parallel

pytestmark = pytest.mark.vllm

NAMES = [f"model.layers.{index}.mlp.experts" for index in range(2)]
SIZES = {"num_experts": 4, "hidden": 256, "inter": 256}
GRIDS = {
    "tp 1": (Grid(), parallel()),
    "tp 2": (Grid(tp=2), parallel(tp=2, tp_rank=1)),
    "ep 2": (Grid(ep=2), parallel(ep=2, ep_rank=1)),
}


@pytest.fixture(scope="module", autouse=True)
def vllm_config() -> Iterator[Any]:
    register()
    with vllm_cpu.config() as config:
        yield config


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shapes."""
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_experts": 4, "num_layers": 2}
    return [write_qwen3_moe(folder / str(seed), seed=seed, **sizes) for seed in range(2)]


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (daemons, ipc_loader):
        monkeypatch.setattr(module, "get_current_device_uuid", lambda: "GPU-0")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


def build(config: Any, rank: Any) -> torch.nn.Module:
    """A model that has only its experts."""
    model = torch.nn.Module()
    for number, name in enumerate(NAMES):
        setattr(model, f"experts{number}", build_layer(config, name, grid=rank, **SIZES))
    return model


def fill(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.children():
        layer.quant_method.process_weights_after_loading(layer)
    return model


def seeded(out: Path, rank: Any) -> daemons.WeightCacheDaemon:
    """vLLM's daemon, as it is once it has loaded an artifact."""
    daemon = daemons.WeightCacheDaemon.__new__(daemons.WeightCacheDaemon)
    daemon.model = fill(build(open_config(out), rank))
    check_ipc_quant_support(daemon.model)
    fields = dict.fromkeys(WeightCacheKey.__dataclass_fields__, "")
    daemon.cache_key = WeightCacheKey(**fields)
    daemon.role, daemon.global_rank, daemon._watchers = "target", 0, []
    daemon.loaded_rope_parameters_hash = ""
    return daemon


class Loader(ipc_loader.IpcModelLoader):  # type: ignore[misc]
    """vLLM's loader, connected to a daemon of this process."""

    def __init__(self, daemon: daemons.WeightCacheDaemon, mode: str) -> None:
        config = LoadConfig(
            load_format="ipc_cache", model_loader_extra_config={"mode": mode, "fallback": False}
        )
        super().__init__(config)
        self.daemon = daemon

    def _connect(self, timeout: float) -> socket.socket:
        here, there = socket.socketpair()

        def answer() -> None:
            with there:
                self.daemon._handle_connection(there)

        threading.Thread(target=answer, daemon=True).start()
        return here

    def _watch_daemon(self) -> None:
        """Nothing: this daemon ends with the test."""


def start(
    loader: Loader, config: Any, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> torch.nn.Module:
    """A server's model from the daemon, by vLLM's own steps."""
    monkeypatch.setattr(ipc_loader, "initialize_model", lambda **_: build(config, rank))
    facts = {"word_embeddings_untied_by_checkpoint": False, "quantization": "hqconv"}
    model_config = SimpleNamespace(dtype=torch.bfloat16, **facts)
    words = SimpleNamespace(device_config=SimpleNamespace(device="cpu:0"))
    state = loader._request_state(loader.daemon.cache_key)
    return loader._build_model(words, model_config, "", state)


def assert_holds_its_files(model: torch.nn.Module) -> None:
    for layer in model.children():
        assert_holds_its_file(layer)


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a rank file was read")

    monkeypatch.setattr(tensor_filler, "fill", refuse)


@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_second_start_reads_headers_only(
    sources: list[Path], tmp_path: Path, grid: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the bytes of its rank's files and a kernel that reads its own parameters."""
    ranks, rank = GRIDS[grid]
    run(sources[0], tmp_path / "out", "int4-g64-zp", ranks)
    loader = Loader(seeded(tmp_path / "out", rank), mode)
    no_reading(monkeypatch)
    model = start(loader, open_config(tmp_path / "out"), rank, monkeypatch)
    assert_holds_its_files(model)
    for layer in model.children():
        quant = layer.quant_method.moe_kernel.fused_experts.quant_config
        assert quant.w1_scale.data_ptr() == layer.w13_weight_scale.data_ptr()
        assert quant.w2_zp.data_ptr() == layer.w2_zero_point.data_ptr()


def test_another_artifacts_experts_are_not_served(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server loads its own files then, as vLLM's fallback does, and leaves the daemon's memory as it is."""
    for number, source in enumerate(sources):
        run(source, tmp_path / str(number), "int8")
    loader, config = (
        Loader(seeded(tmp_path / "0", parallel()), "zero_copy"),
        open_config(tmp_path / "1"),
    )
    mapped: list[torch.nn.Module] = []
    apply = loader._apply_entries

    def noted(model: torch.nn.Module, *words: Any) -> None:
        apply(model, *words)
        mapped.append(model)

    monkeypatch.setattr(loader, "_apply_entries", noted)
    with pytest.raises(
        VerificationError, match=r"weight cache holds other experts(.|\n)*vllm preload"
    ):
        start(loader, config, parallel(), monkeypatch)
    (shared,) = mapped
    before = [as_bytes(parameter).clone() for parameter in shared.parameters()]
    own = fill(build(config, parallel()))  # the same config, as in vLLM's fallback
    assert_holds_its_files(own)
    assert all(
        torch.equal(as_bytes(p), old) for p, old in zip(shared.parameters(), before, strict=True)
    )
