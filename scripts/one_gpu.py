"""A vLLM plugin for comparisons: all ranks of an engine on one GPU, for machines that have no second one.

NCCL refuses two ranks on a device. Here the ranks exchange tensors through the host and gloo: slow, and with one order
of additions, that of the ranks. Engines need `enforce_eager` (a CUDA graph cannot hold it), the executor "mp", and,
where experts move, vLLM's EPLB communicator "torch_gloo". A rank computes the same as on a GPU of its own.
`check_serving.py --one-gpu` and `check_eplb.py --one-gpu` put it into use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORDS: dict[str, Any] = {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
"""Arguments of vllm.LLM that the ranks need."""
COMMUNICATOR = "torch_gloo"
BASE = "vllm.distributed.device_communicators.base_device_communicator"
PATCHED = {  # module → names there that are replaced, a class with its attributes
    "vllm.config.parallel": ("ParallelConfig.get_local_gpu_index",),
    "vllm.platforms.cuda": ("CudaPlatformBase.dist_backend", "CudaPlatformBase.get_device_communicator_cls"),
    BASE: ("DeviceCommunicatorBase.all_reduce",),
    "vllm.distributed.eplb.eplb_state": ("all_reduce",),
    "vllm.distributed.eplb.rebalance_execute": ("all_gather",),
}
ADD: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
_gather: Any = dist.all_gather  # torch's own, of which most others are made
_exchange: Any = dist.all_to_all_single


class Done:
    """What an asynchronous call returns where its work is done already."""

    def wait(self, timeout: Any = None) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes through the host."""
    return tensor.is_cuda


def of_all_ranks(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensors that the ranks of a group gave, on the CPU: same shape and dtype, in the order of ranks."""
    mine = tensor.detach().cpu().contiguous()
    flat = mine.reshape(-1).view(torch.uint8)  # gloo does not know all dtypes
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    _gather(found, flat, group=group)
    return [one.view(mine.dtype).reshape(mine.shape) for one in found]


def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """torch's, in place; added in the order of ranks."""
    tensor.copy_(reduce(ADD[op], of_all_ranks(tensor, group)))
    return Done() if async_op else None


def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """torch's; in a list in which one tensor stands several times it is that of the last rank."""
    for place, one in zip(tensor_list, of_all_ranks(tensor, group), strict=True):
        place.copy_(one)
    return Done() if async_op else None


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """torch's: one tensor after the other."""
    output_tensor.copy_(torch.cat([x.reshape(-1) for x in of_all_ranks(input_tensor, group)]).view(output_tensor.shape))
    return Done() if async_op else None


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """torch's: this rank's part of the sum."""
    total = reduce(ADD[op], of_all_ranks(input, group))
    output.copy_(total.reshape(dist.get_world_size(group), *output.shape)[dist.get_rank(group)])
    return Done() if async_op else None


def broadcast(
    tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: Any = None
) -> Any:
    """torch's, in place: the source's tensor."""
    whole: Any = group or dist.group.WORLD
    rank = group_src if src is None else dist.get_group_rank(whole, src)
    tensor.copy_(of_all_ranks(tensor, group)[rank])
    return Done() if async_op else None


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Any:
    """torch's: all tensors at the rank that gives a list for them."""
    found = of_all_ranks(tensor, group)
    for place, one in zip(gather_list or (), found, strict=False):
        place.copy_(one)
    return Done() if async_op else None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch's: parts of rows to every rank."""
    out, mine = torch.empty_like(output, device="cpu"), input.detach().cpu().contiguous()
    _exchange(out.view(torch.uint8), mine.view(torch.uint8), output_split_sizes, input_split_sizes, group=group)
    output.copy_(out)
    return Done() if async_op else None


STAGED: dict[str, tuple[Any, str]] = {
    "all_reduce": (all_reduce, "tensor"),
    "all_gather": (all_gather, "tensor"),
    "all_gather_into_tensor": (all_gather_into_tensor, "input_tensor"),
    "reduce_scatter_tensor": (reduce_scatter_tensor, "input"),
    "broadcast": (broadcast, "tensor"),
    "gather": (gather, "tensor"),
    "all_to_all_single": (all_to_all_single, "input"),
}
"""torch.distributed's function → ours, and the argument that says which of both."""
_POSITION = {"all_gather": 1, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1}


def either(name: str) -> Callable[..., Any]:
    """torch's function of this name, for tensors on a GPU ours."""
    own, word = STAGED[name]
    original, position = getattr(dist, name), _POSITION.get(name, 0)

    def call(*args: Any, **words: Any) -> Any:
        tensor = words[word] if word in words else args[position]
        return (own if is_staged(tensor) else original)(*args, **words)

    return call


def register() -> None:
    """Put all ranks of vLLM on the first visible GPU, with collectives through the host."""
    for name in STAGED:
        setattr(dist, name, either(name))
    modules = {name: importlib.import_module(name) for name in PATCHED}
    modules["vllm.distributed.eplb.eplb_state"].all_reduce = dist.all_reduce  # type: ignore[attr-defined]
    modules["vllm.distributed.eplb.rebalance_execute"].all_gather = dist.all_gather  # type: ignore[attr-defined]
    modules["vllm.config.parallel"].ParallelConfig.get_local_gpu_index = _first_gpu
    platform = modules["vllm.platforms.cuda"].CudaPlatformBase
    platform.dist_backend = "gloo"
    platform.get_device_communicator_cls = classmethod(lambda cls: f"{BASE}.DeviceCommunicatorBase")
    modules[BASE].DeviceCommunicatorBase.all_reduce = _sum


def _first_gpu(self: Any, local_rank: int, dp_local_rank: int | None = None) -> int:
    return 0


def _sum(self: Any, input_: torch.Tensor) -> torch.Tensor:
    """vLLM's communicator of a GPU leaves its input as it is; its base class does not."""
    out = input_.clone()
    dist.all_reduce(out, group=self.device_group)
    return out


def missing(names: Sequence[str] = tuple(PATCHED)) -> list[str]:
    """Names of `PATCHED` that this vLLM has not: none, if the plugin fits."""
    found = []
    for name in names:
        for path in PATCHED[name]:
            place: Any = importlib.import_module(name)
            for part in path.split("."):
                place = getattr(place, part, None)
            found += [f"{name}.{path}"] if place is None else []
    return found


def words_of(words: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.LLM with those that ranks on one GPU need."""
    return {**WORDS, **words}


def use(work: Path) -> None:
    """Have all engines that this process starts take the plugin."""
    from scripts.engines import take_plugin

    take_plugin(work, "one_gpu")
