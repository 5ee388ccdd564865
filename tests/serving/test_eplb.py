"""EPLB with the plugin: experts moved by vLLM's own functions, rank by rank on the CPU.

Judge: the rank file of an artifact with one rank, which has every expert in its own order.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make import vllm_cpu  # isort: skip  - before vLLM

from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum
from vllm.distributed.eplb import rebalance_execute
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.eplb_state import EplbState, compute_logical_maps
from vllm.distributed.eplb.policy import EPLB_POLICIES
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hqconv.errors import RequestError
from hqconv.kernel_layout.transform import why_not
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import Grid
from hqconv.schemas.options import load_recipe
from hqconv.serving.vllm.plugin import register
from tests.make.conversions import kernel_spec_of, run
from tests.make.matrices import SCHEMAS as MATRIX_SCHEMAS
from tests.make.qwen import write_qwen3_moe
from tests.make.vllm_cpu import build_layer, open_config, parallel

pytestmark = pytest.mark.vllm

NUM_LAYERS, EXPERTS, COPIES, RANKS = 2, 6, 2, 2
LOCAL = (EXPERTS + COPIES) // RANKS
SIZES = {"num_experts": EXPERTS, "hidden": 256, "inter": 256}
INPUTS = ("a16", "fp8", "int8")
CASES = [
    (schema, dtype, inputs)
    for schema in (*MATRIX_SCHEMAS, "int4-g32-e4m3")
    for dtype in ("bfloat16", "float16")
    for inputs in INPUTS
    if why_not(kernel_spec_of(schema, dtype, inputs=inputs)) is None
]


@pytest.fixture(scope="module", autouse=True)
def vllm_config() -> Iterator[Any]:
    register()
    with vllm_cpu.config() as config:
        yield config


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_experts": EXPERTS,
        "num_layers": NUM_LAYERS,
    }
    return write_qwen3_moe(tmp_path_factory.mktemp("source") / "model", **sizes)


def layer_name(index: int) -> str:
    return f"model.layers.{index}.mlp.experts"


def build(out: Path, rank: int, num_layers: int = NUM_LAYERS, **words: Any) -> list[Any]:
    """The layers of one rank, with EPLB, filled."""
    config = open_config(out)
    given = {
        "grid": parallel(ep=RANKS, ep_rank=rank, eplb=True),
        "redundant": COPIES,
        **SIZES,
        **words,
    }
    layers = [build_layer(config, layer_name(index), **given) for index in range(num_layers)]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return layers


def movable(layers: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Tensors that vLLM moves, as its model classes collect them."""
    runners = [
        SimpleNamespace(get_expert_weights=layer.get_expert_weights, set_eplb_state=lambda **_: 0)
        for layer in layers
    ]
    model = SimpleNamespace(moe_layers=runners)
    MixtureOfExperts.set_eplb_state(model, *[torch.zeros(1)] * 3)
    return model.expert_weights


class Posted(EplbCommunicator):
    """Transfers between threads of this process: `posted` has a queue for every pair of ranks."""

    def __init__(self, rank: int, posted: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self.rank, self.posted = rank, posted
        self.due: list[tuple[int, torch.Tensor]] = []
        self.num_received = 0

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        for tensor in tensors:
            assert tensor.is_contiguous()
            assert ncclDataTypeEnum.supports_torch_dtype(tensor.dtype), tensor.dtype
            self.posted[self.rank, dst_rank].put(tensor.clone())

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        self.due += [(src_rank, tensor) for tensor in tensors]

    def execute(self) -> None:
        for src, tensor in self.due:
            received = self.posted[src, self.rank].get(timeout=20)
            assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
            tensor.copy_(received)
        self.num_received += len(self.due)
        self.due = []


def move(way: str, ranks: Sequence[Sequence[Any]], old: torch.Tensor, new: torch.Tensor) -> int:
    """Move experts between the ranks' layers from one map to another; returns how many tensors went between ranks.

    way: `sync` or `async`, as vLLM moves them between steps, or beside them.
    """
    posted: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
    posted[0, 1], posted[1, 0] = queue.Queue(), queue.Queue()
    communicators = [Posted(rank, posted) for rank in range(RANKS)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        weights = movable(ranks[rank])
        buffers = [torch.empty_like(tensor) for tensor in weights[0]]
        group = SimpleNamespace(size=lambda: RANKS, rank=lambda: rank)
        try:
            if way == "sync":
                rebalance_execute.rearrange_expert_weights_inplace(
                    old, new, weights, buffers, group, communicators[rank]
                )
                return
            for index, tensors in enumerate(weights):
                moved = rebalance_execute.transfer_layer(
                    old[index], new[index], tensors, buffers, group, communicators[rank]
                )
                rebalance_execute.move_from_buffer(
                    tensors, buffers, moved, new[index].numpy(), rank
                )
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return sum(communicator.num_received for communicator in communicators)


def maps() -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's first map, and the one of its default policy under a load on the last experts."""
    first = torch.tensor(
        [EplbState.build_initial_global_physical_to_logical_map(EXPERTS, COPIES)] * NUM_LAYERS
    )
    load = torch.tensor([[1, 1, 1, 2, 90, 70], [50, 1, 3, 80, 1, 2]])
    policy: Any = EPLB_POLICIES["default"]
    new = policy.rebalance_experts(load, EXPERTS + COPIES, 1, 1, RANKS, first)
    assert new.shape == first.shape
    assert bool((new != first).any(dim=1).all())
    return first, new


def by_expert(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of each expert, uint8 [E, …]."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8)


def assert_holds(
    ranks: Sequence[Sequence[Any]], whole: Path, physical_to_logical: torch.Tensor
) -> None:
    """Every place of every rank has the expert that the map says, bit for bit, in every parameter."""
    for rank, layers in enumerate(ranks):
        for index, layer in enumerate(layers):
            stored = load_file(whole / "experts" / "tp0-ep0" / f"{layer_name(index)}.safetensors")
            found = {
                name: p for name, p in layer.named_parameters() if not name.endswith("_input_scale")
            }
            assert {f"{layer_name(index)}.{name}" for name in layer._parameters} == set(stored)
            wanted = physical_to_logical[index, rank * LOCAL : (rank + 1) * LOCAL]
            for name, parameter in found.items():
                bits = by_expert(stored[f"{layer_name(index)}.{name}"])
                assert torch.equal(by_expert(parameter.detach()), bits[wanted]), (rank, name)


def assert_routed(ranks: Sequence[Sequence[Any]], physical_to_logical: torch.Tensor) -> None:
    """Every copy of an expert that a router can choose lies on one rank, in the place where the map has it."""
    places, counts = compute_logical_maps(physical_to_logical, EXPERTS)
    for index in range(NUM_LAYERS):
        for expert in range(EXPERTS):
            assert counts[index, expert] >= 1
            for physical in places[index, expert, : counts[index, expert]].tolist():
                local = [int(layers[index].expert_map[physical]) for layers in ranks]
                (owner,) = (rank for rank, place in enumerate(local) if place >= 0)
                assert physical_to_logical[index, owner * LOCAL + local[owner]] == expert
    for layers in ranks:
        for layer in layers:
            assert (layer.global_num_experts, layer.local_num_experts) == (EXPERTS + COPIES, LOCAL)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("schema", "dtype", "inputs"), CASES)
def test_moved_experts_are_those_of_the_map(
    source: Path, tmp_path: Path, schema: str, dtype: str, inputs: str
) -> None:
    """The artifact is dealt as vLLM's first map; after both ways of moving every parameter is as the new map says."""
    words = {"dtype": dtype, "input_schema": inputs}
    run(source, tmp_path / "whole", schema, **words)
    run(source, tmp_path / "dealt", schema, Grid(ep=RANKS, redundant=COPIES), **words)
    ranks = [build(tmp_path / "dealt", rank, dtype=getattr(torch, dtype)) for rank in range(RANKS)]
    first, new = maps()
    assert_holds(ranks, tmp_path / "whole", first)
    assert_routed(ranks, first)
    num_tensors = len(movable(ranks[0])[0])
    assert num_tensors == len(ranks[0][0]._parameters)
    assert move("sync", ranks, first, new) > num_tensors
    assert_holds(ranks, tmp_path / "whole", new)
    assert_routed(ranks, new)
    assert move("async", ranks, new, first) > num_tensors
    assert_holds(ranks, tmp_path / "whole", first)


def test_the_kernel_reads_the_parameters_that_move(source: Path, tmp_path: Path) -> None:
    """vLLM's kernel holds scales and zero points itself: they are the moved memory, no copies of it."""
    run(source, tmp_path / "dealt", "int4-g64-zp", Grid(ep=RANKS, redundant=COPIES))
    (layer, _) = build(tmp_path / "dealt", 0)
    quant = layer.quant_method.moe_kernel.fused_experts.quant_config
    moved = {tensor.data_ptr() for tensor in movable([layer])[0]}
    for tensor in (quant.w1_scale, quant.w1_zp, quant.w2_scale, quant.w2_zp):
        assert tensor.data_ptr() in moved
    assert len(moved) == 6
    assert not any(name.endswith(("weight", "scale", "point")) for name in layer._buffers)


REFUSED: dict[str, tuple[Grid, dict[str, Any], str]] = {
    "copies of the server alone": (
        Grid(ep=2),
        {},
        r"expected: 0\n.*found: 2\n(.|\n)*--redundant-experts 2",
    ),
    "no EPLB": (
        Grid(ep=2, redundant=2),
        {"redundant": 0, "grid": parallel(ep=2)},
        r"--enable-eplb --eplb-config.num_redundant_experts 2 only, or cut it again: `hqconv convert [^`]*--ep 2[^`]*`",
    ),
    "round robin": (
        Grid(ep=2, placement="round_robin", redundant=2),
        {"placement": "round_robin"},
        "another way",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(source: Path, tmp_path: Path, what: str) -> None:
    grid, words, message = REFUSED[what]
    run(source, tmp_path / "out", "int8", grid)
    with pytest.raises(RequestError, match=message):
        build(tmp_path / "out", 0, **words)


@pytest.mark.parametrize("schema", ["int4-g64-zp", "none"])
def test_layers_that_differ_are_refused(source: Path, tmp_path: Path, schema: str) -> None:
    """vLLM would leave some of their tensors behind: its buffers are the first layer's."""
    (tmp_path / "recipe.toml").write_text(f'[[override]]\nlayers = "1"\nschema = "{schema}"\n')
    overrides = load_recipe(tmp_path / "recipe.toml").overrides
    run(source, tmp_path / "out", "int4-g64", Grid(ep=2, redundant=2), overrides=overrides)
    with pytest.raises(RequestError, match=r"layers\.1\.mlp(.|\n)*as model\.layers\.0"):
        build(tmp_path / "out", 0)
    assert build(tmp_path / "out", 0, num_layers=1)


def test_moved_experts_are_not_filled_from_their_file(source: Path, tmp_path: Path) -> None:
    """After a deep sleep, say: the file has the first map's experts, the router another's."""
    run(source, tmp_path / "out", "int8", Grid(ep=2, redundant=2))
    model = torch.nn.Module()
    model.experts = build(tmp_path / "out", 0)[0]
    layerwise.record_metadata_for_reloading(model)
    with pytest.raises(RequestError, match="may have moved"):
        layerwise.initialize_layerwise_reload(model)


def test_vllm_understands_the_command() -> None:
    """By its own parser of the command line."""
    command = ENGINE.serve_command("out", "kernel", Grid(ep=2, redundant=2))
    assert command is not None
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    found = parser.parse_args(command.split()[3:])
    assert found.enable_eplb
    assert found.enable_expert_parallel
    assert found.tensor_parallel_size == 2
    assert found.eplb_config.num_redundant_experts == 2
