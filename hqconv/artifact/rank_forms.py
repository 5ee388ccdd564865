"""LayoutForm of every rank's GEMMs, once headers and LayerConfigs agree with the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError, VerificationError
from hqconv.kernel_layout.compatibility import config_entries
from hqconv.layout_decoder.layout_form import LayoutForm, expected_tensors, read_config
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.output_units import gemm_shapes
from hqconv.schemas import artifact_names as names

Note = Callable[[str, str, object, object], None]  # where, what, expected, found
RankForms = dict[tuple[str, int, int], LayoutForm]  # by GEMM, TP rank, EP rank


def check_rank_headers(
    artifact: Artifact, layer: MoeLayer, note: Note, ranks: Iterable[tuple[int, int]] | None = None
) -> RankForms:
    """Note what is wrong in the headers of `ranks` (None: all), and return the forms of the others.

    The rank and the layer must be those of the file's name, a LayerConfig and the dtypes those of the manifest's
    schema and target.
    """
    good: RankForms = {}
    for tp_rank, ep_rank in artifact.grid.ranks if ranks is None else ranks:
        path = names.rank_file(layer.name, tp_rank, ep_rank)
        num_local = len(artifact.grid.local_experts(layer.num_experts, ep_rank))
        try:
            artifact.check_rank_file(layer.name, tp_rank, ep_rank)
        except VerificationError as error:
            note(error.where, error.what, error.expected, error.found)
            continue
        for gemm, shape in gemm_shapes(layer, artifact.grid.tp, artifact.schema_of(layer.name)).items():
            try:
                config = artifact.layer_config(layer.name, gemm, tp_rank, ep_rank)
                found, expected = _forms(artifact, layer.name, config, artifact.flags(layer.name, gemm), shape)
                for name, (dtype, _) in expected_tensors(expected).items():
                    _check_entry(artifact, path, f"{layer.name}.{gemm}_{name}", dtype, num_local, note)
            except (HqconvError, OSError) as error:
                note_error(f"{path}, {gemm}", error, note)
                continue
            facts, config_facts = asdict(expected), asdict(found)
            facts["sm_version"] = artifact.kernel_spec_of(layer.name).target.sm_version
            config_facts["sm_version"] = config.get("sm_version")
            wrong = [name for name in facts if facts[name] != config_facts[name]]
            if wrong:
                what = "A layer config describes another format than the manifest."
                texts = [", ".join(f"{name} {of[name]}" for name in wrong) for of in (facts, config_facts)]
                note(f"{path}, metadata {gemm}", what, *texts)
            else:
                good[gemm, tp_rank, ep_rank] = found
    return good


def _forms(
    artifact: Artifact, layer: str, config: Mapping[str, Any], flags: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[LayoutForm, LayoutForm]:
    """Return the layout of a stored layer config, and the one of the manifest; padding is the config's."""
    keys = ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k", "has_bias")
    sizes = {key: config[key] for key in keys if key in config}
    is_row = artifact.schema_of(layer).has_row_scale
    entries = config_entries(artifact.kernel_spec_of(layer))
    expected = read_config({**entries, **sizes}, {**flags, **entries}, has_row_scale=is_row)
    return read_config(config, flags, has_row_scale=is_row), replace(expected, shape=shape)


def _check_entry(artifact: Artifact, path: str, name: str, dtype: str, num_local: int, note: Note) -> None:
    """Check a tensor's dtype, which gives its bits their meaning, and its number of experts."""
    entry = artifact.header(path)[0].get(name)
    where = f"{path}, tensor {name}"
    if entry is None:
        note(where, "A rank's tensor is missing.", dtype, "absent")
    elif entry.dtype != dtype:
        what = "A tensor's bits are labelled with another dtype: a loader would reinterpret them."
        note(where, what, dtype, entry.dtype)
    elif entry.shape[:1] != (num_local,):
        note(where, "A rank file holds another number of experts.", num_local, list(entry.shape[:1]))


def note_error(where: str, error: HqconvError | OSError, note: Note) -> None:
    """Note an error of reading or decoding weights."""
    if isinstance(error, HqconvError):
        inside = f"{where}: {error.where}" if error.where and error.where not in where else where
        note(inside, f"Weights cannot be decoded: {error.what}", error.expected, error.found)
    else:
        note(where, "Weights cannot be read.", "", error.strerror)
