"""Ranks of an engine on one GPU: collectives through the host beside torch's own, and in vLLM's groups."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

REPO = Path(__file__).resolve().parents[2]
# Every collective of torch twice: torch's, and the one that stands in for it where every tensor is one of a GPU.
PROGRAM = """
import sys, torch, torch.distributed as dist
from scripts import one_gpu
rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], world_size=world, rank=rank)
one_gpu.is_staged = lambda tensor: True
ours = {name: one_gpu.either(name) for name in one_gpu.STAGED}
seen = []
one_gpu.of_all_ranks = (lambda real: lambda *words: (seen.append(1), real(*words))[1])(one_gpu.of_all_ranks)
mine = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
for both in (dist.__dict__, ours):
    both = {name: both[name] for name in ours}
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        both["all_reduce"](x := mine.clone(), op=op)
        results.append(x)
    both["all_reduce"](x := (mine * 100).to(torch.int32), group=dist.group.WORLD)
    both["all_gather"](parts := [torch.zeros(6, 4) for _ in range(world)], mine)
    both["all_gather_into_tensor"](whole := torch.zeros(6 * world, 4), mine)
    both["broadcast"](y := mine.clone(), src=1)
    both["broadcast"](z := mine.t().clone().t(), src=2)
    both["gather"](mine, into := [torch.zeros(6, 4) for _ in range(world)] if rank == 1 else None, dst=1)
    work = both["all_reduce"](w := mine.clone(), async_op=True)
    work.wait()
    sizes = [[1, 2, 3], [2, 2, 2], [3, 2, 1]][rank]
    taken = [[1, 2, 3][rank], 2, [3, 2, 1][rank]]
    both["all_to_all_single"](v := torch.zeros(sum(taken), 4), mine, taken, sizes)
    results += [v, x, *parts, whole, y, z, w, *(into or ())]
    if both["all_reduce"] is not ours["all_reduce"]:
        expected = results
        assert not seen
for one, other in zip(results, expected, strict=True):
    assert one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-6, atol=1e-6), (one, other)
assert len(seen) == 9 + 1, seen
ours["reduce_scatter_tensor"](part := torch.zeros(2, 4), mine)
assert torch.allclose(part, expected[0].reshape(world, 2, 4)[rank])
odd = torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)
ours["all_gather"](odds := [torch.empty_like(odd) for _ in range(world)], odd)
assert all(torch.equal(one.float(), odd.float()) for one in odds)
dist.destroy_process_group()  # else a thread of gloo may outlive the interpreter, which ends the process by a signal
"""


# vLLM's own groups over two ranks, made as its worker makes them.
IN_VLLM = """
import sys, types
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
from tests.make import vllm_cpu
import torch
from scripts import one_gpu
assert one_gpu.missing() == [], one_gpu.missing()
one_gpu.register()
one_gpu.is_staged = lambda tensor: True
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state as state
from vllm.platforms import current_platform
from vllm.platforms.cuda import CudaPlatformBase
rank, world = int(sys.argv[1]), int(sys.argv[2])
type(current_platform).get_device_communicator_cls = CudaPlatformBase.get_device_communicator_cls
type(current_platform).logical_device_id_to_visible_device_id = lambda self, number: number
place = ParallelConfig(data_parallel_rank=0).get_local_gpu_index(rank)
assert place == 0
with vllm_cpu.config():
    state.init_distributed_environment(world, rank, "file://" + sys.argv[3], place, CudaPlatformBase.dist_backend)
    state.initialize_model_parallel(world)
tp = state.get_tp_group()
assert type(tp.device_communicator).__name__ == "DeviceCommunicatorBase", tp.device_communicator
mine = torch.arange(6.0).reshape(2, 3) + rank
total = tp.all_reduce(mine)
assert torch.equal(total, 2 * torch.arange(6.0).reshape(2, 3) + 1) and total is not mine
assert torch.equal(mine, torch.arange(6.0).reshape(2, 3) + rank), "the input changed"
both = [torch.arange(6.0).reshape(2, 3) + r for r in range(2)]
for dim in (0, 1):
    assert torch.equal(tp.all_gather(mine, dim), torch.cat(both, dim))
assert torch.equal(tp.reduce_scatter(mine, 0), total[rank : rank + 1])
gathered = tp.gather(mine, 0, 0)
assert (gathered is None) == bool(rank)
"""


def ranks(program: str, world: int, meeting: Path) -> None:
    """Run a program once for each rank: it is given the rank, their number, and a file to meet at."""
    words = [[sys.executable, "-c", program, str(rank), str(world), str(meeting)] for rank in range(world)]
    started = [Popen(command, cwd=REPO, stderr=PIPE, stdout=DEVNULL, text=True) for command in words]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(error[-2000:] for error in errors)


def test_collectives_through_the_host_give_what_torchs_give(tmp_path: Path) -> None:
    ranks(PROGRAM, 3, tmp_path / "meeting")


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not here: `make test-vllm` runs this")
def test_vllms_groups_add_and_gather_over_ranks_of_one_device(tmp_path: Path) -> None:
    """Every name of vLLM that is replaced exists, and its tensor parallel group works with what stands in."""
    ranks(IN_VLLM, 2, tmp_path / "meeting")
