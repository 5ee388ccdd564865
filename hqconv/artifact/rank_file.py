"""One rank's file of one MoE layer: its header, and how it differs from what the manifest says. Loads no torch.

The same class serves the reader of artifacts, verification and servers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hqconv.artifact.manifest import GemmEntry
from hqconv.errors import HqconvError, VerificationError
from hqconv.kernel_layout.compatibility import config_entries
from hqconv.schemas.artifact_names import GEMMS, rank_file, rank_name
from hqconv.schemas.input_schema import STATIC_SCALES, KernelSpec
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    from hqconv.layout_decoder.layout_form import LayoutForm

_AGAIN = "Copy the artifact again from where it is whole, or convert the model again."


class Finding(NamedTuple):
    """Difference between a rank file and the manifest."""

    where: str
    what: str
    expected: object
    found: object

    def error(self) -> VerificationError:
        """Return the finding as an error."""
        return VerificationError(
            self.what, where=self.where, expected=self.expected, found=self.found, remedy=_AGAIN
        )


@dataclass(frozen=True)
class RankFile:
    """The header of a rank file.

    path: on this machine. name: in the artifact. sha256: of the whole file, by the manifest. tensors: by the names that
    layers have (`w13_weight` …), [E_local, …] but for activation scales. configs: GEMM → Humming's LayerConfig.
    """

    path: Path
    name: str
    layer: str
    sha256: str
    tensors: dict[str, TensorRef]
    configs: dict[str, dict[str, Any]]

    def tensors_of(self, gemm: str) -> dict[str, TensorRef]:
        """Return the tensors of one GEMM by `weight`, `weight_scale` …, its static activation scale aside."""
        prefix = f"{gemm}_"
        return {
            name.removeprefix(prefix): ref
            for name, ref in self.tensors.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in STATIC_SCALES.values()
        }

    def form(self, gemm: str, spec: KernelSpec, entry: GemmEntry) -> LayoutForm:
        """Return the layout of one GEMM's tensors. Raises RequestError or VerificationError as `read_config`."""
        from hqconv.layout_decoder.layout_form import read_config  # with torch

        return read_config(self.configs[gemm], entry.flags, has_row_scale=spec.schema.has_row_scale)

    def findings(
        self, gemm: str, spec: KernelSpec, entry: GemmEntry, num_experts: int
    ) -> Iterator[Finding]:
        """Yield what of one GEMM is not as the manifest says: its LayerConfig, names, dtypes and shapes of its tensors.

        spec, entry: the manifest's, of this layer and GEMM. num_experts: of this rank.
        """
        from hqconv.layout_decoder.layout_form import expected_tensors

        config = self.configs[gemm]
        found = self.tensors_of(gemm)
        facts: dict[str, Any] = {
            **config_entries(spec, entry.flags),
            **entry.sizes,
            "has_bias": "bias" in found,
            "num_experts": num_experts,
        }
        facts |= {
            "use_int_weight_scale": False,
            "use_packed_k_layout": entry.flags.get("use_packed_k_layout"),
        }
        texts = [{key: json.dumps(of[key]) for key in of} for of in (facts, config)]  # 4.0 is not 4
        if wrong := [key for key in {**facts, **config} if texts[0].get(key) != texts[1].get(key)]:
            both = (
                ", ".join(f"{key} {of.get(key, 'absent')}" for key in wrong)
                for of in (facts, config)
            )
            yield Finding(
                f"{self.name}, metadata {gemm}",
                "A layer config describes another format than the manifest.",
                *both,
            )
            return  # what follows depends on the config
        for scale in STATIC_SCALES.values():
            ref = self.tensors.get(f"{gemm}_{scale}")
            wanted = "F32 [1]" if scale == spec.inputs.static_scale else "absent"
            shown = "absent" if ref is None else f"{ref.dtype} {list(ref.shape)}"
            if shown != wanted:
                where = f"{self.name}, tensor {self.layer}.{gemm}_{scale}"
                yield Finding(
                    where, "A static activation scale is not as the manifest says.", wanted, shown
                )
        try:
            expected = expected_tensors(self.form(gemm, spec, entry))
        except HqconvError as error:
            where = f"{self.name}, metadata {gemm}"
            yield Finding(
                where, f"The layout cannot be read: {error.what}", error.expected, error.found
            )
            return
        for name in {**expected, **found}:
            where = f"{self.name}, tensor {self.layer}.{gemm}_{name}"
            if name not in expected:
                yield Finding(
                    where,
                    "A rank file has a tensor that its layer config does not ask for.",
                    "absent",
                    name,
                )
            elif name not in found:
                yield Finding(where, "A rank's tensor is missing.", expected[name][0], "absent")
            else:
                yield from _compare(where, found[name], *expected[name], num_experts)


def _compare(
    where: str, ref: TensorRef, dtype: str, shape: tuple[int, ...], num_experts: int
) -> Iterator[Finding]:
    """Compare a tensor's dtype, which gives its bits their meaning, its number of experts and its shape."""
    if ref.dtype != dtype:
        yield Finding(
            where,
            "A tensor's bits are labelled with another dtype: a loader would reinterpret them.",
            dtype,
            ref.dtype,
        )
    elif ref.shape[:1] != (num_experts,):
        yield Finding(
            where, "A rank file holds another number of experts.", num_experts, list(ref.shape)
        )
    elif ref.shape[1:] != shape:
        yield Finding(
            where,
            "A tensor has another shape than its layer config asks for.",
            [num_experts, *shape],
            list(ref.shape),
        )


def parse_rank_file(
    path: Path,
    layer: str,
    rank: tuple[int, int],
    sha256: str,
    entries: Mapping[str, TensorRef],
    metadata: Mapping[str, str],
) -> RankFile:
    """Return a rank file by its header: `entries` and `metadata`. rank: (TP, EP).

    Raises VerificationError for the file of another rank or layer, and for one without LayerConfigs.
    """
    name = rank_file(layer, *rank)
    own = rank_name(*rank)
    if metadata.get("rank") != own:
        raise Finding(name, "This is the file of another rank.", own, metadata.get("rank")).error()
    configs = {gemm: _config(name, gemm, metadata) for gemm in GEMMS}
    if metadata.get("format") != "pt" or len(metadata) > 2 + len(configs):
        what = "The file's metadata are not a conversion's."
        raise Finding(
            name,
            what,
            "format pt, rank, w13, w2",
            f"format {metadata.get('format')}, {list(metadata)}",
        ).error()
    tensors = {}
    prefix = f"{layer}."
    for full, ref in entries.items():
        short = full.removeprefix(prefix)
        gemm, _, rest = short.partition("_")
        if short == full or gemm not in GEMMS or not rest:
            expected = f"tensors named {prefix}w13_… and {prefix}w2_…"
            raise Finding(name, "This is the file of another layer.", expected, full).error()
        tensors[short] = ref
    return RankFile(path, name, layer, sha256, tensors, configs)


def _config(name: str, gemm: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    what = f"The file's metadata holds no layer config for {gemm}."
    expected = "a JSON object"
    try:
        document = json.loads(metadata[gemm])
    except (KeyError, ValueError, RecursionError) as error:
        raise Finding(name, what, expected, repr(error)[:80]).error() from error
    if not isinstance(document, dict):
        raise Finding(name, what, expected, repr(document)[:80]).error()
    return document


def check_sha256(file: RankFile) -> None:
    """Hash a whole file. Raises VerificationError if the digest is not the manifest's, or the file is unreadable."""
    what = "The bytes of a rank file are not those of the manifest."
    try:
        with file.path.open("rb") as data:
            found = hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise Finding(file.name, what, "a readable file", error).error() from error
    if found != file.sha256:
        raise Finding(file.name, what, f"sha256 {file.sha256}", found).error()
