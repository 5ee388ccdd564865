"""What a server needs to know of a kernel artifact: its manifest's facts, in the words of one rank. Loads no torch.

A server makes these values once and sends them to its workers, so that they are small and can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import read_manifest, schema_of
from hqconv.errors import RequestError, VerificationError
from hqconv.schemas import artifact_names as names
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import Grid
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.engine import ENGINE

_SHAPES = ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k")


@dataclass(frozen=True)
class ArtifactLayer:
    """One MoE block: `name` is its experts' module in the source.

    flags: per GEMM, what its layout relies on. shapes: per GEMM, those of each rank, in the words of a LayerConfig.
    """

    name: str
    layer: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    gated: bool
    kernel_spec: KernelSpec
    flags: Mapping[str, Mapping[str, bool]]
    shapes: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class ArtifactView:
    """A kernel artifact as a server sees it. files: rank file → (bytes, SHA-256).

    kind: of a block of which the manifest says nothing else. left: blocks whose experts were copied as they were.
    """

    location: ArtifactLocation
    source_name: str
    humming_version: str
    kernel_spec: KernelSpec
    grid: Grid
    blocks: Mapping[str, ArtifactLayer]
    left: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]

    @property
    def dtype(self) -> str:
        """The parameters', bfloat16 or float16."""
        return self.kernel_spec.param_dtype

    @property
    def sm_version(self) -> int:
        """The target's."""
        return self.kernel_spec.target.sm_version

    @property
    def is_mixed(self) -> bool:
        """Whether one `--schema` would not make this artifact."""
        return bool(self.left) or any(block.kernel_spec != self.kernel_spec for block in self.blocks.values())


def open_artifact_view(location: ArtifactLocation) -> ArtifactView:
    """Read an artifact's manifest, from a folder or from the Hub.

    Raises RequestError where there is none, where it is of the checkpoint layout or a newer version, VerificationError
    where it is damaged or the conversion unfinished, and as `ArtifactLocation.fetch`.
    """
    root = Path(location.name) if location.is_folder else location.fetch(names.MANIFEST).parent
    words = read_manifest(root, is_sealed=True)
    _check_kind(location, words)
    try:
        kernel_spec = names.kernel_spec_from_dict(words, schema_of(root, words), words["dtype"])
        return ArtifactView(
            location=location,
            source_name=str(words["source"].get("name", "the original model")),
            humming_version=words["humming_kernels_version"],
            kernel_spec=kernel_spec,
            grid=Grid(words["tp"], words["ep"], words["expert_placement"], words["redundant_experts"]),
            blocks={name: _block(root, name, block, kernel_spec) for name, block in words["blocks"].items()},
            left=tuple(words.get("left_blocks", ())),
            files={
                path: (entry["size_bytes"], entry["sha256"])
                for path, entry in words["files"].items()
                if path.startswith(f"{names.EXPERTS_FOLDER}/")
            },
        )
    except (RequestError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VerificationError(
            "The artifact's manifest describes what cannot be.",
            where=f"{location.name}: {names.MANIFEST}",
            found=f"{type(error).__name__}: {error}",
            remedy="Copy the artifact again, or convert the model again.",
        ) from error


def _check_kind(location: ArtifactLocation, words: Mapping[str, Any]) -> None:
    if words["layout"] != names.KERNEL:
        raise RequestError(
            "This artifact is not in the kernel layout.",
            where=location.name,
            expected=names.KERNEL,
            found=words["layout"],
            remedy="Its config.json was changed: with quant_method humming "
            f"{ENGINE.name} serves it without this plugin.",
        )


def _block(root: Path, name: str, words: Mapping[str, Any], kernel_spec: KernelSpec) -> ArtifactLayer:
    if "weight_schema" in words:
        schema = schema_of(root, words, f"blocks: {name}: ")
        kernel_spec = names.kernel_spec_from_dict(words, schema, kernel_spec.param_dtype)
    return ArtifactLayer(
        name=name,
        layer=words["layer"],
        num_experts=words["num_experts"],
        hidden_size=words["hidden_size"],
        intermediate_size=words["intermediate_size"],
        activation=Activation.from_dict(words),
        gated=words["gated"],
        kernel_spec=kernel_spec,
        flags={gemm: dict(words[gemm]["flags"]) for gemm in names.GEMMS},
        shapes={gemm: {key: int(words[gemm][key]) for key in _SHAPES} for gemm in names.GEMMS},
    )
