"""An artifact for a server: its location, a folder or a Hub repo, and the facts of its manifest. Loads no torch.

A server creates these values once and sends them to its workers, so they are small and can be pickled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from hqconv.artifact.manifest import GemmEntry, Manifest, ManifestLayer, read_manifest
from hqconv.artifact.rank_file import Finding, RankFile, parse_rank_file
from hqconv.errors import HqconvError, InputError, RequestError, VerificationError
from hqconv.io.hub import (
    Listing,
    cached_digest,
    check_commit,
    fetch,
    is_offline,
    is_snapshot,
    note_revision,
)
from hqconv.io.safetensors_header import read_header
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import EXPERTS_FOLDER, GEMMS, KERNEL, MANIFEST, rank_file
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import LayerSpec

_LOG = logging.getLogger(__name__)

_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class ArtifactLocation:
    """Model argument of a server: a folder's path, or a repo id and a revision.

    commit: of the manifest that was read from a repo; all other files are fetched at it, wherever the branch is then.
    """

    name: str
    revision: str | None = None
    commit: str | None = None

    @property
    def is_folder(self) -> bool:
        """True if the location is a folder of this machine."""
        return Path(self.name).is_dir()

    @property
    def pinned_revision(self) -> str | None:
        """Commit if it is known, else the revision as the server's user gave it."""
        return self.commit or self.revision

    def at(self, root: Path) -> ArtifactLocation:
        """Return the location at the commit of `root`, a file's folder as `fetch` returned it; a folder stays.

        Raises InputError if that is no commit.
        """
        return self if self.is_folder else replace(self, commit=check_commit(self.name, root.name))

    def fetch(self, path: str) -> Path:
        """One file's path on this machine; of a Hub repo it is downloaded if the cache lacks it.

        Raises VerificationError for a file that is not there, RequestError or NetworkError if the Hub refuses it.
        """
        return self.fetch_all([path])[path]

    def fetch_all(self, paths: Sequence[str], cache_dir: str | None = None) -> dict[str, Path]:
        """`fetch` of several files; of a Hub repo several at a time, and no others."""
        root = Path(self.name)
        if not self.is_folder:
            root = fetch(self.name, self.pinned_revision, paths, cache_dir)
        for path in paths:
            if not (root / path).is_file():
                raise VerificationError(
                    "The model's folder, or the copy of the Hub repo on this machine, lacks a file of the artifact.",
                    where=self.describe(),
                    expected=path,
                    found="no such file",
                    remedy="Copy the artifact again with all its files; if the repo itself lacks the file, upload it "
                    "again. Offline: unset HF_HUB_OFFLINE, fill the cache with `hf download` first, or set "
                    "HF_HUB_CACHE to the server's download folder.",
                )
        return {path: root / path for path in paths}

    def complete(self, paths: Sequence[str], cache_dir: str) -> None:
        """Fetch small files of a Hub repo to the server's download folder too, so that it is enough offline.

        A failure is logged only: the server has these files from elsewhere.
        """
        try:
            root = fetch(self.name, self.pinned_revision, paths, cache_dir)
            note_revision(root, str(self.revision or "main"))
        except HqconvError as error:
            _LOG.warning("%s is not enough for an offline start: %s", cache_dir, error)

    def describe(self) -> str:
        """Return the location for messages: the folder, or the repo with its revision."""
        revision = self.pinned_revision
        return self.name if revision is None else f"{self.name}, revision {revision}"


@dataclass(frozen=True)
class ArtifactLayer:
    """One MoE layer: `name` is its experts' module in the source.

    gemms: the manifest's entries of `w13` and `w2`, each with its layout flags and the sizes on a rank.
    """

    name: str
    index: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    gated: bool
    layer_spec: LayerSpec
    gemms: Mapping[str, GemmEntry]


@dataclass(frozen=True)
class ArtifactView:
    """A kernel artifact as a server sees it. files: rank file → (bytes, SHA-256).

    kind: of a layer without an entry of its own. left: layers whose experts were copied unchanged. manifest_sha256: of
    the manifest's bytes, by which views of the same artifact can be told. small_files: all files without weights, the
    manifest included.
    """

    location: ArtifactLocation
    source_name: str
    humming_version: str
    layer_spec: LayerSpec
    grid: Grid
    layers: Mapping[str, ArtifactLayer]
    left: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]
    manifest_sha256: str = field(compare=False)
    small_files: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """Dtype of the parameters, bfloat16 or float16."""
        return self.layer_spec.param_dtype

    @property
    def sm_version(self) -> int:
        """SM version of the target, e.g. 90."""
        return self.layer_spec.target.sm_version

    @property
    def layer_specs(self) -> set[LayerSpec]:
        """Schemas and activations of all layers, and of a layer without an entry of its own."""
        return {self.layer_spec, *(layer.layer_spec for layer in self.layers.values())}


def open_artifact_view(location: ArtifactLocation) -> ArtifactView:
    """Read an artifact's manifest, from a folder or from the Hub, and compare digests that the Hub or its cache has.

    The view's location has the commit of the manifest. Raises RequestError if there is no manifest, or it has the
    checkpoint layout or a newer version, VerificationError if it is damaged, the conversion unfinished or a file of
    weights another one, and the errors of `ArtifactLocation.fetch`.
    """
    root = Path(location.name) if location.is_folder else location.fetch(MANIFEST).parent
    location = location.at(root)
    manifest = read_manifest(root, is_sealed=True)
    if not manifest.is_kernel:
        raise RequestError(
            "This artifact is not in the kernel layout.",
            where=location.name,
            expected=KERNEL,
            found=manifest.layout,
            remedy="Its config.json was changed: with quant_method humming "
            f"{ENGINE.name} serves it without this plugin.",
        )
    _check_digests(location, root, manifest)
    files = {path: (entry.size_bytes, entry.sha256) for path, entry in manifest.files.items()}
    ranks = f"{EXPERTS_FOLDER}/"
    return ArtifactView(
        location=location,
        source_name=manifest.source.name,
        humming_version=manifest.humming_kernels_version,
        layer_spec=manifest.layer_spec,
        grid=manifest.grid,
        layers={name: _layer(name, layer, manifest) for name, layer in manifest.blocks.items()},
        left=manifest.left,
        files={path: entry for path, entry in files.items() if path.startswith(ranks)},
        manifest_sha256=manifest.sha256,
        small_files=(MANIFEST, *(path for path in manifest.files if not path.endswith(_WEIGHTS))),
    )


def open_rank_file(
    view: ArtifactView, layer: str, tp_rank: int, ep_rank: int, path: Path
) -> RankFile:
    """Read the header of a rank's file of a layer, which lies at `path`.

    Raises VerificationError if its size, tensors or LayerConfigs differ from the manifest; its digest too where the
    Hub's cache tells it.
    """
    name = rank_file(layer, tp_rank, ep_rank)
    what = "A rank file is damaged, or belongs to another artifact."
    if name not in view.files:
        raise Finding(name, what, "a file that the manifest lists", "none of that name").error()
    size_bytes, sha256 = view.files[name]
    cached = cached_digest(path)
    if cached not in (None, sha256):
        raise Finding(name, what, f"sha256 {sha256}", f"{cached} in the Hub's cache").error()
    try:
        if (found := path.stat().st_size) != size_bytes:
            raise Finding(name, what, f"{size_bytes} bytes", f"{found} bytes").error()
        entries, metadata, _ = read_header(path)
    except (OSError, InputError) as error:
        raise Finding(name, what, "a readable safetensors file", error).error() from error
    file = parse_rank_file(path, layer, (tp_rank, ep_rank), sha256, entries, metadata)
    stored = view.layers[layer]
    num_local = len(view.grid.local_experts(stored.num_experts, ep_rank))
    for gemm, entry in stored.gemms.items():
        for finding in file.findings(gemm, stored.layer_spec.of(gemm), entry, num_local):
            raise finding.error()
    return file


def check_unchanged(view: ArtifactView) -> None:
    """Compare the manifest in the artifact's folder with the one of the view. Raises RequestError for another one."""
    if not view.location.is_folder:  # files of one commit
        return
    try:
        found = sha256((Path(view.location.name) / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        found = error.strerror or str(error)
    if found != view.manifest_sha256:
        raise RequestError(
            "The folder does not hold the artifact any more that this server was started with.",
            where=f"{view.location.name}: {MANIFEST}",
            expected=f"sha256 {view.manifest_sha256}",
            found=found,
            remedy="Stop this server, whose weights are incomplete now, and start it again.",
        )


def _check_digests(location: ArtifactLocation, root: Path, manifest: Manifest) -> None:
    """Compare digests of all weights with the manifest's, as far as they are known without reading a file."""
    sizes: Mapping[str, int] = {}
    digests: Mapping[str, str] = {}
    if location.commit is not None and not is_offline():
        try:
            listing = Listing.of(location.name, location.commit)
            sizes = listing.sizes
            digests = listing.digests
        except HqconvError as error:  # all files may be in the cache
            _LOG.info("The Hub's list of files was not compared with the manifest: %s", error)
    in_cache = is_snapshot(root)
    for path, entry in manifest.files.items():
        if not path.endswith(_WEIGHTS):
            continue
        size = sizes.get(path, entry.size_bytes)
        digest = digests.get(path, entry.sha256)
        found = {
            f"{size} bytes on the Hub": size == entry.size_bytes,
            f"{digest} on the Hub": digest == entry.sha256,
        }
        if in_cache:
            cached = cached_digest(root / path)
            found[f"{cached} in the Hub's cache"] = cached in (None, entry.sha256)
        for text, is_equal in found.items():
            if not is_equal:
                raise VerificationError(
                    "A file of weights in the Hub repo is not the one that the artifact's manifest lists.",
                    where=f"{location.describe()}: {path}",
                    expected=f"{entry.size_bytes} bytes, sha256 {entry.sha256}",
                    found=text,
                    remedy="Files of two conversions are mixed in the repo: upload the artifact again with "
                    "`hqconv push`.",
                )


def _layer(name: str, entry: ManifestLayer, manifest: Manifest) -> ArtifactLayer:
    gemms = {gemm: stored for gemm in GEMMS if (stored := entry.gemm(gemm)) is not None}
    return ArtifactLayer(
        name=name,
        index=entry.layer,
        num_experts=entry.num_experts,
        hidden_size=entry.hidden_size,
        intermediate_size=entry.intermediate_size,
        activation=entry.activation_function,
        gated=entry.gated,
        layer_spec=manifest.overrides.get(name, manifest.layer_spec),
        gemms=gemms,
    )
