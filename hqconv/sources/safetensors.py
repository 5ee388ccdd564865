"""A checkpoint of safetensors files in a folder or a Hub repo: headers, config and experts; torch only to decode bytes.

The weight files are those that `model.safetensors.index.json` names; without it `model.safetensors`, or a whole set of
numbered shards. Index and headers must agree on every tensor, both ways, and no other safetensors file of the folder
may hold a tensor of the same name, nor `model.safetensors` lie beside an index that does not name it: transformers and
vLLM would choose different files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hqconv.errors import InputError, NetworkError, first_few
from hqconv.formats.ascend import ascend_quantization_config
from hqconv.io import checkpoint_files, hub
from hqconv.io.checkpoint_files import SidecarFiles
from hqconv.io.file_access import Descriptors, adjoining, fill
from hqconv.io.file_snapshot import FileSnapshot
from hqconv.io.safetensors_header import parse_header, read_header
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.moe_layer import MoeLayer, RawExperts, View
from hqconv.models.source_protocol import SourceFile, SourceReference, read_tensor
from hqconv.schemas.artifact_names import CONFIG, INDEX, SINGLE, text_config
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, open_regular, unicode_name

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

    from hqconv.formats.encoding import SourceMatrix

# hides the latency of networks and network file systems; the parsing itself holds the GIL
_NUM_THREADS = 8
_KEEP = "Keep the checkpoint as it is during the conversion, and start again."


class SafetensorsSource:
    """An opened checkpoint whose experts are safetensors tensors; a context manager. See `source_protocol.Source`."""

    reads_ahead: ClassVar[bool] = True
    files: tuple[SourceFile, ...] = ()
    tensors: dict[str, TensorRef]
    index_sha256: str | None = None
    quantization: dict[str, Any] | None = None
    sorted_layers: frozenset[str] = frozenset()

    def __init__(
        self, root: Path, *, repo_id: str | None = None, listing: hub.Listing | None = None
    ) -> None:
        """Read and check config, index and headers in the folder `root`.

        repo_id: of a Hub repo, whose snapshot `root` is. listing: the repo's files, if `root` does not hold all.
        Raises InputError where files are broken, missing or contradict each other, NetworkError where the Hub fails.
        """
        self._begin(root, repo_id, listing)
        self.guard.look_if_there(hub.SMALL_FILES)
        self.config: dict[str, Any] = checkpoint_files.read_config(root)
        self.quantization = _quantization(root, self.config)
        here = {path.name for path in root.iterdir() if path.is_file()}
        if listing is not None:
            here.update(listing.sizes)
        weight_map, self.index_sha256 = checkpoint_files.read_weight_map(root)
        shards = sorted(filter(checkpoint_files.is_shard, here))
        names = [SINGLE] if SINGLE in shards else shards
        if weight_map is not None:
            names = sorted(set(weight_map.values()))
            self._check_present(weight_map, here)
        self.files, self.tensors = self._read_files(names)
        if weight_map is None:
            checkpoint_files.check_all_there(root, names)
        else:
            checkpoint_files.check_weight_map(
                weight_map, self.tensors, tuple(file.name for file in self.files)
            )
        self._refuse_other_reading([name for name in shards if name not in names])
        self._finish(root)

    def _begin(self, root: Path, repo_id: str | None, listing: hub.Listing | None) -> None:
        """Set what is known before the headers are read."""
        self.root = root
        self.place = root
        self.repo_id = repo_id
        self.name = unicode_name(root.resolve().name) if repo_id is None else repo_id.split("/")[1]
        self.revision = None if repo_id is None else root.name
        self.listing = listing
        self.guard = FileSnapshot(root)
        if repo_id is not None:
            self.guard.listed = hub.cached_digests(root) if listing is None else listing.digests
        checkpoint_files.check_regular(root)

    def _finish(self, folder: Path | None) -> None:
        """Set what follows from `tensors`, and look at the sidecar files of the folder or of the repo."""
        self.sidecar_files = SidecarFiles()
        if folder is not None:
            self.sidecar_files = (
                SidecarFiles.of_folder(folder)
                if self.listing is None
                else SidecarFiles.of_listing(self.listing.sizes, folder)
            )
        self.guard.look_if_there(self.sidecar_files.names)
        self._descriptors = Descriptors(self._open_file)

    def map_experts(self) -> ExpertMap:
        """Map the experts from the tensors' names, shapes and the config."""
        return map_experts(self.tensors, self.config, self.quantization)

    # --- headers

    def _refuse_other_reading(self, names: Sequence[str]) -> None:
        """Refuse a file beside those of the checkpoint that holds some of the same tensors: servers choose differently.

        Raises InputError that names both.
        """
        sets = {checkpoint_files.set_of(file.name) for file in self.files} - {None}
        for name in names:
            try:
                tensors, _ = self._read_header(name)
            except InputError:  # no server reads it either
                continue
            twice = sorted(tensors.keys() & self.tensors.keys())
            if twice:
                own_name = self.files[self.tensors[twice[0]].file].name
                raise checkpoint_files.tensor_in_two_files(twice[0], own_name, name)
            if tensors and checkpoint_files.set_of(name) in sets:
                raise InputError(
                    "The index does not name a shard of the checkpoint.",
                    where=f"{self.root / name}, tensor {next(iter(tensors))!r}",
                    expected=f"all shards in {INDEX}",
                    remedy=checkpoint_files.COPY_AGAIN,
                )

    def _check_present(self, weight_map: dict[str, str], here: set[str]) -> None:
        """Check that all shards of the index are among the files that are here, and no other whole model."""
        if SINGLE in here and SINGLE not in weight_map.values():
            raise InputError(
                "The folder can be read in two ways.",
                where=self.root,
                expected=f"{INDEX} with its shards, or {SINGLE}",
                found=f"{INDEX}, which names {first_few(sorted(set(weight_map.values())))}, and {SINGLE}",
                remedy=checkpoint_files.ONE_READING,
            )
        tensor_of = {name: tensor for tensor, name in reversed(weight_map.items())}
        missing = [
            name
            for name in sorted(tensor_of)
            if name not in here and not (self.root / name).is_file()  # in a folder of its own
        ]
        if missing:
            shown = first_few(missing)
            raise InputError(
                f"Shards that the index names are missing ({len(missing)} of {len(tensor_of)}): {shown}.",
                where=f"{self.root}, tensor {tensor_of[missing[0]]!r} and others",
                remedy="Copy or download the missing files.",
            )

    def _read_files(self, names: list[str]) -> tuple[tuple[SourceFile, ...], dict[str, TensorRef]]:
        """Read the headers of all files: the files and all their tensors."""
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            read = list(pool.map(self._read_file, range(len(names)), names))
        tensors: dict[str, TensorRef] = {}
        for _, refs in read:
            twice = tensors.keys() & refs.keys()
            if twice:
                name = min(twice)
                first = names[tensors[name].file]
                second = names[refs[name].file]
                raise checkpoint_files.tensor_in_two_files(name, first, second)
            tensors |= refs
        return tuple(file for file, _ in read), tensors

    def _read_file(self, number: int, name: str) -> tuple[SourceFile, dict[str, TensorRef]]:
        size = self._size(name) if self._is_far(name) else self.guard.look(name).st_size
        refs, sha256 = self._read_header(name, number)
        return SourceFile(name, size, sha256), refs

    def _is_far(self, name: str) -> bool:
        return self.listing is not None and not (self.root / name).is_file()

    def _read_header(self, name: str, number: int = 0) -> tuple[dict[str, TensorRef], str]:
        """Return the tensors of a file, and the SHA-256 of its header."""
        if self.listing is None or not self._is_far(name):
            tensors, _, sha256 = read_header(self.root / name, number)
        else:
            where = f"{self.repo_id}/{name}"
            size = self._size(name)
            head = self.listing.read_head(name)
            tensors, _, sha256 = parse_header(where, head, size, number)
        return tensors, sha256

    def _size(self, name: str) -> int:
        """Return the size of a file, as reported by the Hub. Raises InputError for a file that the repo lacks."""
        assert self.listing is not None
        if name not in self.listing.sizes:
            raise InputError(
                "The Hub repo lacks a file.",
                where=f"{self.repo_id}, revision {self.revision}",
                expected=name,
                remedy="Upload the model again, whole.",
            )
        return self.listing.sizes[name]

    # --- files of a repo

    def is_here(self, name: str) -> bool:
        """Return True if a file is on this machine and is read from there."""
        return self.listing is None or self.guard.has_seen(name)

    def fetch(
        self,
        names: Iterable[str],
        check: Callable[[], None] | None = None,
        into: Path | None = None,
    ) -> None:
        """Download missing files of a repo; any thread may call it. Nothing happens for a folder.

        check: as in `hub.fetch_file`. into: the folder for files that the Hub cache does not have; None for the cache.
        Raises as `open_source`, and InputError if a file does not match its header.
        """
        for name in names:
            if self.listing is None or self.is_here(name):
                continue
            is_cached = hub.has_cached_bytes(self.root, self.listing.digests.get(name))
            folder = None if is_cached else into
            path = hub.fetch_file(self.listing.repo_id, self.listing.commit, name, check, folder)
            self._check_fetched(name, path)
            self.guard.place(name, path)

    def _check_fetched(self, name: str, path: Path) -> None:
        expected = self._size(name)
        found = path.stat().st_size
        if expected != found:
            raise NetworkError(
                "A download has another size than the Hub says.",
                where=f"{self.repo_id}/{name}",
                expected=expected,
                found=found,
                remedy=f"Remove {path} and try again.",
            )
        file = next((file for file in self.files if file.name == name), None)
        if file is not None and self._header_sha256(path) != file.header_sha256:
            raise InputError(
                "A download has another header than the Hub sent before.",
                where=path,
                remedy="Try again.",
            )

    def _header_sha256(self, path: Path) -> str:
        return read_header(path)[2]

    def forget(self, name: str) -> None:
        """Read a file of a repo from the Hub again, as its copy will be removed; any thread may call it."""
        self.guard.forget(name)
        self._descriptors.drop(name)

    # --- experts

    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one expert, on the CPU as views of `raw`; a shared tensor is read once."""
        if raw is None:
            return decoded_expert(layer, expert, roles, lambda ref: self._read(ref, device))
        return decoded_expert(
            layer, expert, roles, lambda ref: raw.tensor(ref).to(device, non_blocking=True)
        )

    def _read(self, ref: TensorRef, device: torch.device) -> torch.Tensor:
        """Read a tensor in its stored dtype to `device` (through pinned memory for CUDA)."""
        host = read_tensor(self, ref, pin_memory=device.type == "cuda")
        return host if device.type == "cpu" else host.to(device, non_blocking=True)

    # --- bytes

    def reference(self) -> SourceReference | None:
        """Return None: the files hold the tensors as they are."""
        return None

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fill all of `buffer` (C-contiguous) with the tensor's bytes from byte `start` on; any thread may call it.

        Raises ValueError for a range outside the tensor; InputError if the file changed since its header was
        read, ends too early, or cannot be read.
        """
        view = memoryview(buffer)
        if start < 0 or start + view.nbytes > ref.num_bytes:
            raise ValueError(
                f"{ref.name}: bytes {start} + {view.nbytes} are outside of {ref.num_bytes}"
            )
        if view.nbytes:  # cast() refuses empty views
            self._fill([ref], [view.cast("B")], ref.offset_bytes + start)

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fill each buffer with all bytes of its tensor, as `read_into`; adjoining tensors are read by one call."""
        for run in adjoining(pieces):
            refs, views = zip(*run, strict=True)
            self._fill(refs, views, refs[0].offset_bytes)

    def _fill(self, refs: Sequence[TensorRef], views: Sequence[memoryview], offset: int) -> None:
        name = self.files[refs[0].file].name
        if not self.is_here(name):
            self._fill_from_hub(name, views, offset)
            return
        try:
            with self._descriptors.using(name) as descriptor:
                reached = fill(descriptor, views, offset)
        except OSError as error:
            if not self.is_here(name):  # removed by now: it was there for other tensors than these
                self._fill_from_hub(name, views, offset)
                return
            raise self._read_error(
                refs[0], "A file of the source cannot be read.", error.strerror
            ) from error
        if reached < offset + sum(map(len, views)):
            ref = next(ref for ref in refs if ref.offset_bytes + ref.num_bytes > reached)
            what = "The file shrank since its header was read."
            raise self._read_error(ref, what, f"end of file at byte {reached}")

    def _fill_from_hub(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        assert self.listing is not None
        data = memoryview(self.listing.read(name, offset, offset + sum(map(len, views))))
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def close(self) -> None:
        """Close the files; no read may be under way, and none may follow."""
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_file(self, name: str) -> int:
        self.guard.look(name)
        self.guard.check_states([name])
        return open_regular(self.guard.path_of(name))

    def _read_error(self, ref: TensorRef, what: str, found: object) -> InputError:
        return InputError(
            what,
            where=f"{self.guard.path_of(self.files[ref.file].name)}, tensor {ref.name!r}",
            found=found,
            remedy=_KEEP,
        )


def decoded_expert(
    layer: MoeLayer, expert: int, roles: Sequence[str], read: Callable[[TensorRef], torch.Tensor]
) -> dict[str, SourceMatrix]:
    """Decode projections of one expert. read: gives a tensor in its stored dtype; a shared one is read once."""
    from hqconv.formats.encoding import decode_matrix

    read_once = functools.cache(read)
    matrices = {}
    for role in roles:
        parts = {}
        names = {}
        for part, ref in layer.sources[expert][role].items():
            tensor_slice = layer.slices[role][part]
            whole = read_once(ref)
            parts[part] = whole if tensor_slice.is_run else _cut(whole, tensor_slice.view)
            names[part] = f"{ref.name}, expert {expert}" if tensor_slice.is_stacked else ref.name
        matrices[role] = decode_matrix(layer.format.of(role), parts, layer.shape(role), names)
    return matrices


def _cut(whole: torch.Tensor, view: View) -> torch.Tensor:
    """Cut one projection out of an expert's part of a fused tensor."""
    import torch

    bits = whole.view(torch.uint8) if whole.element_size() == 1 else whole
    return view.of(bits).contiguous().view(whole.dtype)


def _quantization(root: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config's quantization_config, else ModelOpt's or Ascend's separate file; None without any."""
    for candidate in (config, text_config(config)):
        found = candidate.get("quantization_config")
        if isinstance(found, dict):
            return dict(found)
        mlx = candidate.get("quantization")
        if isinstance(mlx, dict) and "bits" in mlx:
            return dict(mlx)
        if found is not None:
            raise InputError(
                "The checkpoint's quantization config is not an object.",
                where="quantization_config",
                expected="an object or null",
                found=repr(found),
                remedy=f"Restore it in {CONFIG}; leave it out where nothing is quantized.",
            )
    path = root / checkpoint_files.HF_QUANT_CONFIG
    if path.is_file():
        return checkpoint_files.read_document(path)
    path = root / checkpoint_files.ASCEND_DESCRIPTION
    # Has an entry for every tensor, like an index.
    document = checkpoint_files.read_document(path, MAX_LIST_BYTES) if path.is_file() else {}
    return ascend_quantization_config(text_config(config), document)
