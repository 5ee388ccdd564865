"""Experts of one layer in order, read ahead by threads: decoded from the artifact, or read from the source.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any

import torch

from hqconv.artifact.expert_reader import ExpertReader
from hqconv.artifact.load import expert_floats, refuse, stack_floats
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.formats.source_matrix import SourceMatrix
from hqconv.io.host_buffers import host_buffer
from hqconv.io.pipeline import pipeline
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.verification.reference import Expert

_BATCH_WEIGHTS = 1 << 26  # decoded at once: 256 MiB of float32, and a few times as much during decoding
_NUM_AHEAD = 2


def decoded_experts(
    artifact: Artifact, layer: MoeLayer, device: torch.device, num_threads: int
) -> Generator[Expert, None, None]:
    """Yield the artifact's experts on the device: `w1` (if gated), `w3` [I, H], `w2` [H, I], and biases; float32.

    Rotated weights are turned back. Raises VerificationError for values that no conversion writes.
    """
    reader = ExpertReader(artifact, layer, refuse)

    def load(experts: range) -> list[Expert]:
        try:
            found = _load_batch(reader, experts, device)
        except HqconvError:  # the reading of single experts names the fault
            found = [None] * len(experts)
        return [_load_alone(reader, e, device) if one is None else one for e, one in zip(experts, found, strict=True)]

    size = max(1, _BATCH_WEIGHTS // (len(layer.roles) * layer.hidden_size * layer.intermediate_size))
    batches = (range(begin, min(begin + size, layer.num_experts)) for begin in range(0, layer.num_experts, size))
    with closing(pipeline(batches, load, _NUM_AHEAD, num_threads, **_threads(device))) as loaded:
        for experts in loaded:
            yield from experts


def _load_alone(reader: ExpertReader, expert: int, device: torch.device) -> Expert:
    return {name: values.to(device) for name, values in expert_floats(reader, expert).items()}


def _load_batch(reader: ExpertReader, experts: range, device: torch.device) -> list[Expert | None]:
    """Read experts at once; None for those with a fault."""
    stored = reader.plan(experts)
    host = host_buffer(stored.num_bytes, device)
    reader.fill(stored, host.numpy().data)
    stacks = reader.decode(stored, host.to(device, non_blocking=True))
    values = stack_floats(stacks, reader)
    wrong = torch.stack([stack.wrong for stack in stacks.values()]).any(0).tolist()
    return [None if is_wrong else {name: one[i] for name, one in values.items()} for i, is_wrong in enumerate(wrong)]


def source_experts(
    source: Source, layer: MoeLayer, device: torch.device, num_threads: int
) -> Generator[dict[str, SourceMatrix], None, None]:
    """Yield the source's experts, as `Source.read_expert` returns them."""

    def read(expert: int) -> dict[str, SourceMatrix]:
        return source.read_expert(layer, expert, layer.roles, device)

    return pipeline(range(layer.num_experts), read, _NUM_AHEAD, num_threads, **_threads(device))


def _threads(device: torch.device) -> dict[str, Any]:
    return {"begin_thread": partial(_begin_thread, device), "name": "hqconv-experts"}


def _begin_thread(device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
