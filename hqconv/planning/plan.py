"""The plan: every output file, every byte's place in it, from headers and config alone.

A plan is made of **groups**, each a set of files that is finished together (all ranks of one MoE block; one
shard of copied tensors). Execution only follows it: which experts to read, how they are encoded, where each of their
tensors goes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from hqconv.checkpoint.described import Described
from hqconv.checkpoint.front_matter import FrontMatter
from hqconv.experts.map import ExpertMap
from hqconv.planning.checks import check_copied, check_request, request_warnings
from hqconv.planning.encoding import quantizer_words
from hqconv.planning.groups import (
    Group,
    PlannedBlock,
    Shard,
    copy_shards,
    expert_shards,
    kernel_group,
    shard_groups,
)
from hqconv.planning.input_scales import static_blocks
from hqconv.planning.loose import check_loose
from hqconv.planning.request import Request
from hqconv.planning.source_facts import SourceFacts, source_facts
from hqconv.schemas import artifact


@dataclass(frozen=True)
class Plan:
    """All there is to do. `other_files`, of `other_bytes` together, are copied as they are."""

    source: SourceFacts
    request: Request
    experts: ExpertMap
    groups: tuple[Group, ...]
    other_files: tuple[str, ...]
    other_bytes: int
    warnings: tuple[str, ...]

    @property
    def blocks(self) -> tuple[PlannedBlock, ...]:
        """The groups of MoE blocks."""
        return tuple(group for group in self.groups if isinstance(group, PlannedBlock))

    @cached_property
    def num_bytes_read(self) -> int:
        """Source bytes that are read: of all experts and all copied tensors."""
        return sum(group.num_bytes_read for group in self.groups)

    @cached_property
    def num_bytes_out(self) -> int:
        """Bytes of all safetensors files."""
        return sum(file.size_bytes for group in self.groups for file in group.files)

    @property
    def num_bytes_beside(self) -> int:
        """Bytes of what is copied beside them as it is."""
        importance = self.request.importance
        return self.other_bytes + (0 if importance is None else len(importance.data))

    @property
    def num_ranks(self) -> int:
        """Ranks with files of their own; 1 in the checkpoint layout."""
        return len(self.request.grid.ranks) if self.request.layout == artifact.KERNEL else 1

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The model index of the ordinary shards: tensor name to file."""
        shards = [file for group in self.groups for file in group.files if "/" not in file.path]
        return {name: file.path for file in sorted(shards, key=lambda f: f.path) for name in file.tensors}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file of the artifact, the manifest last."""
        files = [file.path for group in self.groups for file in group.files]
        words = [artifact.CARD, artifact.CONFIG, *([artifact.INDEX] if self._has_index else [])]
        importance = [] if self.request.importance is None else [artifact.IMPORTANCE]
        return (*files, *self.other_files, *importance, *words, artifact.SUMS, artifact.MANIFEST)

    @property
    def _has_index(self) -> bool:
        """Beside other safetensors files even of a single shard: loaders take what it names, else all there are."""
        num_shards = len(set(self.weight_map.values()))
        is_alone = self.request.layout == artifact.CHECKPOINT and self.request.importance is None
        return num_shards > (1 if is_alone else 0)

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of expert tensors that each rank will load (kernel layout)."""
        if self.request.layout != artifact.KERNEL:
            return {}
        totals = {artifact.rank_folder(t, p): 0 for t, p in self.request.grid.ranks}
        for block in self.blocks:
            for file in block.files:
                totals[file.path.rsplit("/", 1)[0]] += file.size_bytes
        return totals

    def fingerprint(self) -> dict[str, str]:
        """What a resumed run must agree on besides source and versions: request and output bytes' places."""
        digest = hashlib.sha256()
        for group in self.groups:
            for file in group.files:
                digest.update(f"{file.path}\0{file.size_bytes}\0".encode() + file.header)
        request = self.request
        options = {
            "--schema": request.schema.humming_fields(),
            "--dtype": request.param_dtype,
            "--target, --cuda": str(request.target),
            "--tp, --ep or the placement": vars(request.grid),
            "--layout": request.layout,
            "--input-schema": request.inputs.humming_fields(),
            "--round-scales": request.round_scales,
            "--quantizer": quantizer_words(request.quantizer),
            "--importance": None if request.importance is None else request.importance.sha256,
            "the overrides": {name: artifact.kind_words(kind) for name, kind in request.of_blocks.items()},
        }
        words = {key: json.dumps(value, sort_keys=True) for key, value in options.items()}
        return {**words, "layout of the output files": digest.hexdigest()}


def make_plan(checkpoint: Described, experts: ExpertMap, request: Request) -> Plan:
    """Plan a conversion. Raises RequestError where request, schema, grid and blocks do not fit together."""
    check_request(experts, request)
    check_copied(checkpoint, experts, request)
    experts = experts.with_input_scales({block.name for block in static_blocks(experts, request)})
    if request.importance is not None:
        request.importance.check(experts.blocks, experts.left)
    blocks: list[PlannedBlock] = []
    shards: list[Shard] = []
    for block in experts.blocks:
        if request.layout == artifact.KERNEL:
            blocks.append(kernel_group(block, request))
        else:
            shards += expert_shards(block, request)
    shards += copy_shards(checkpoint.tensors[name] for name in experts.copied)
    packed, copies = shard_groups(shards, request)
    groups: tuple[Group, ...] = (*packed, *blocks, *copies)
    planned = {file.path for group in groups for file in group.files}
    check_loose(checkpoint.other_files, planned, request.layout)
    return Plan(
        source=source_facts(checkpoint, experts),
        request=request,
        experts=experts,
        groups=groups,
        other_files=checkpoint.other_files,
        other_bytes=checkpoint.loose.num_bytes,
        warnings=(*request_warnings(experts, request), *_left_out(checkpoint), *_card_warnings(checkpoint)),
    )


def _left_out(checkpoint: Described) -> list[str]:
    """What is not taken along, although it lies in the source."""
    return [f"{name} is left out: {reason}." for name, reason in checkpoint.loose.left_out.items()]


def _card_warnings(checkpoint: Described) -> list[str]:
    """That the source's license and tags are not taken over."""
    problem = FrontMatter.of(checkpoint.loose.card or b"").problem
    return [f"The front matter of {artifact.CARD} was not taken over: {problem}."] if problem else []
