"""Which of a source's other files an artifact can have beside its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hqconv.errors import InputError
from hqconv.io.front_matter import FrontMatter
from hqconv.io.protocols import Described
from hqconv.models.expert_map import ExpertMap
from hqconv.planning.checks import check_copied, check_request, request_warnings
from hqconv.planning.encoding import quantizer_words
from hqconv.planning.input_scales import static_blocks
from hqconv.planning.output_units import (
    Group,
    PlannedBlock,
    Shard,
    copy_shards,
    expert_shards,
    kernel_group,
    shard_groups,
)
from hqconv.planning.source_facts import SourceFacts, source_facts
from hqconv.planning.spec import Request
from hqconv.schemas import artifact_names

_MAX_NAME, _MAX_PATH = 255, 3072  # bytes, of most file systems; of a path with room for that of the output
_OURS = (
    *(
        artifact_names.CONFIG,
        artifact_names.INDEX,
        artifact_names.MANIFEST,
        artifact_names.IMPORTANCE,
        artifact_names.JOURNAL,
    ),
    *(artifact_names.CARD, artifact_names.SUMS),
)


def check_loose(other_files: Iterable[str], planned: Collection[str], layout: str) -> None:
    """Refuse a source whose other files would lie where the artifact's own are or come, or have no room for a name.

    planned: the files of tensors. Raises InputError that names the file.
    """
    names = list(other_files)
    taken = {*planned, *_OURS, *(name + artifact_names.PARTIAL for name in (*planned, *_OURS, *names))}
    # A folder may not lie where any file comes, and a file not where folders of ours come.
    folders = {folder.as_posix() for path in planned for folder in Path(path).parents}
    for path in names:
        above = {folder.as_posix() for folder in Path(path).parents}
        is_theirs = layout == artifact_names.KERNEL and path.split("/")[0] == artifact_names.EXPERTS_FOLDER
        if path in taken or path in folders or above & taken or is_theirs:
            what, expected = "A file of the source has a name that the artifact needs.", "another name"
            remedy = "Rename the file, or leave it out of the source."
            raise InputError(what, where=path, expected=expected, remedy=remedy)
        _check_length(path)


def _check_length(path: str) -> None:
    longest = max(len(part.encode()) for part in Path(path + artifact_names.PARTIAL).parts)
    for num_bytes, most in ((longest, _MAX_NAME), (len(path.encode()), _MAX_PATH)):
        if num_bytes > most:
            what, expected = "The name of a file of the source is too long.", f"at most {most} bytes"
            found = f"{num_bytes} bytes, with {artifact_names.PARTIAL} while it is written"
            raise InputError(what, where=path, expected=expected, found=found, remedy="Rename the file.")


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
        return len(self.request.grid.ranks) if self.request.layout == artifact_names.KERNEL else 1

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The model index of the ordinary shards: tensor name to file."""
        shards = [file for group in self.groups for file in group.files if "/" not in file.path]
        return {name: file.path for file in sorted(shards, key=lambda f: f.path) for name in file.tensors}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file of the artifact, the manifest last."""
        files = [file.path for group in self.groups for file in group.files]
        words = [
            artifact_names.CARD,
            artifact_names.CONFIG,
            *([artifact_names.INDEX] if self._has_index else []),
        ]
        importance = [] if self.request.importance is None else [artifact_names.IMPORTANCE]
        return (*files, *self.other_files, *importance, *words, artifact_names.SUMS, artifact_names.MANIFEST)

    @property
    def _has_index(self) -> bool:
        """Beside other safetensors files even of a single shard: loaders take what it names, else all there are."""
        num_shards = len(set(self.weight_map.values()))
        is_alone = self.request.layout == artifact_names.CHECKPOINT and self.request.importance is None
        return num_shards > (1 if is_alone else 0)

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of expert tensors that each rank will load (kernel layout)."""
        if self.request.layout != artifact_names.KERNEL:
            return {}
        totals = {artifact_names.rank_folder(t, p): 0 for t, p in self.request.grid.ranks}
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
            "the overrides": {
                name: artifact_names.kind_words(kind) for name, kind in request.of_blocks.items()
            },
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
        if request.layout == artifact_names.KERNEL:
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
    return [f"The front matter of {artifact_names.CARD} was not taken over: {problem}."] if problem else []
