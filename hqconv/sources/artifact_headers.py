"""An artifact that is read as a source: what is wrong with it is wrong with the input, for the exit code too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hqconv.artifact.reader import Artifact
from hqconv.errors import InputError, RequestError, VerificationError
from hqconv.formats.resolve import UNUSED_PARTS
from hqconv.formats.source_format import LAID_OUT, SourceFormat
from hqconv.humming_layout.layer_config import fuses_exponents
from hqconv.io.hub import Listing
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import InputScales, MoeLayer, TensorSlice
from hqconv.schemas import artifact_names as names
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.safetensors_headers import SafetensorsHeaders

_AGAIN = "Verify the artifact; copy it again from where it is whole, or convert the original model again."


@contextmanager
def as_source() -> Iterator[None]:
    """Turn a VerificationError into an InputError that says the same; also as a decorator."""
    try:
        yield
    except VerificationError as error:
        words = {"where": error.where, "expected": error.expected, "found": error.found}
        raise InputError(error.what, **words, remedy=error.remedy or _AGAIN) from error


def _refuse_fused(artifact: Artifact) -> None:
    """mxfp4 for fp8 or int8 activations has other codes on every TP rank; what they were is lost."""
    if artifact.manifest["layout"] != names.KERNEL:
        return
    folded = next((n for n in artifact.blocks if fuses_exponents(artifact.kernel_spec_of(n))), None)
    if folded is not None:
        raise RequestError(
            "The exponents were folded into the codes: the artifact cannot be a source.",
            where=f"{artifact.root}: {folded}",
            found=str(artifact.kernel_spec_of(folded)),
            remedy="Convert the original again.",
        )


class ArtifactHeaders(SafetensorsHeaders):
    """An artifact opened as a checkpoint. Rank tensors are named `<rank file>:<tensor>`."""

    def __init__(
        self,
        root: Path,
        *,
        name: str,
        repo_id: str | None = None,
        revision: str | None = None,
        listing: Listing | None = None,
    ) -> None:
        """Read manifest and headers; as `Checkpoint`. Raises InputError for what is not whole.

        RequestError for an artifact whose codes are not those of its schema any more.
        """
        super().__init__(root, name=name, repo_id=repo_id, revision=revision, listing=listing)
        with as_source():
            self.artifact = Artifact(root, listing, is_sealed=True)
            _refuse_fused(self.artifact)
        self.quantization = self.artifact.manifest["source"].get("quantization_config")
        self.config = names.admit_transformers(self.config)
        self.config.pop("quantization_config", None)
        self.other_files = tuple(f for f in self.other_files if f != names.MANIFEST)
        self._add_rank_files()

    def close(self) -> None:
        """Close the files of both views."""
        super().close()
        self.artifact.close()

    def forget(self, name: str) -> None:
        """A file of a repo will be removed here; in both views."""
        super().forget(name)
        self.artifact.forget(name)

    def _add_rank_files(self) -> None:
        files = list(self.files)
        for path in sorted(self.artifact.manifest["files"]):
            if not path.startswith(f"{names.EXPERTS_FOLDER}/"):
                continue
            file, header, _ = self._read_file(len(files), path)
            for tensor, ref in header.items():
                full = f"{path}:{tensor}"
                self.tensors[full] = ref._replace(name=full)
            files.append(file)
        self.files = tuple(files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())

    @as_source()
    def map_experts(self) -> ExpertMap:
        """The artifact's blocks and what becomes of its tensors. Raises InputError for what cannot be."""
        blocks = tuple(self._block(name) for name in self.artifact.blocks)
        converted = {name: block.name for block in blocks for name in block.tensor_names()}
        scales = [name for block in blocks for name in block.input_scales.names]
        dropped = dict.fromkeys(scales, UNUSED_PARTS[names.INPUT_SCALE])
        copied = tuple(name for name in self.tensors if name not in converted and name not in dropped)
        stray = next((name for name in copied if name.startswith(f"{names.EXPERTS_FOLDER}/")), None)
        if stray is not None:
            what, remedy = "A rank file holds a tensor that no kernel reads.", "Verify the artifact."
            raise InputError(what, where=stray, remedy=remedy)
        because = f"{self.artifact.manifest.get('family_chosen_because')}; read back from the kernel layout"
        left = self.artifact.left  # among the copied tensors
        return ExpertMap(self.artifact.family.name, because, blocks, converted, copied, dropped, left)

    def _block(self, name: str) -> MoeLayer:
        block = self.artifact.expert_block(name)
        parts = {role: self._parts(name, "w2" if role == "w2" else "w13") for role in block.roles}
        homes = self.artifact.grid.homes(block.num_experts)
        sources = tuple(
            {role: {key: self._share(p, homes[e][0]) for key, p in of.items()} for role, of in parts.items()}
            for e in range(block.num_experts)
        )
        weight = parts["w2"]["weight"]
        return replace(
            block,
            format=self.format_of(name),
            dtype=weight.dtype,
            parts=parts,
            sources=sources,
            input_scales=self._input_scales(name),
        )

    def _input_scales(self, block: str) -> InputScales:
        """The static scales of activations in all ranks' files."""
        inputs = self.artifact.kernel_spec_of(block).inputs
        if not inputs.is_static:
            return InputScales()
        refs = {}
        for gemm in names.GEMMS:
            name = names.input_scale(block, gemm)
            full = [f"{names.rank_file(block, *rank)}:{name}" for rank in self.artifact.grid.ranks]
            lacking = next((one for one in full if one not in self.tensors), None)
            if lacking is not None:
                what, remedy = "A rank's activation scale is missing.", "Convert the original model again."
                raise VerificationError(what, where=lacking, remedy=remedy)
            refs[gemm] = tuple(self.tensors[one] for one in full)
        return InputScales(inputs.a_dtype or "", refs, dict.fromkeys(refs, 1))

    def _parts(self, block: str, gemm: str) -> dict[str, TensorSlice]:
        """The rank tensors of one GEMM: `weight` … of the first rank, `weight@tp0-ep1` … of the others."""
        parts = {}
        for index, rank in enumerate(self.artifact.grid.ranks):
            path = names.rank_file(block, *rank)
            if path not in self.artifact.manifest["files"]:
                what, remedy = "The manifest lists no file for a rank.", "Convert the original model again."
                raise VerificationError(what, where=path, remedy=remedy)
            prefix = f"{path}:{block}.{gemm}_"
            for full in self.artifact.header(path)[0]:
                ref = self.tensors[f"{path}:{full}"]
                if ref.name.startswith(prefix) and not names.is_input_scale(full):
                    part = ref.name.removeprefix(prefix)
                    key = part if index == 0 else f"{part}@tp{rank[0]}-ep{rank[1]}"
                    parts[key] = TensorSlice(ref.name, ref.dtype, ref.shape)
        return parts

    def _share(self, part: TensorSlice, home: tuple[int, int]) -> TensorRef:
        """An expert's bytes in a rank tensor, for counting: of the EP rank that holds it, none of the others."""
        ref = self.tensors[part.template]
        ep_rank, local = home
        if f"-ep{ep_rank}/" not in part.template:
            return ref._replace(num_bytes=0)
        return ref.entry(local)

    def format_of(self, block: str) -> SourceFormat:
        """A block's schema as a source's format; rotated weights have no codes to keep."""
        schema, param = self.artifact.schema_of(block), self.artifact.param_dtype
        group_n, group_k = schema.scale_group()
        options = (("param_dtype", param), ("is_fp_zero_point", schema.is_fp_zero_point))
        return SourceFormat(
            name=f"hqconv kernel layout, {schema.name}{', rotated' if schema.rotation else ''}",
            decoder=LAID_OUT,
            b_dtype="" if schema.rotation else schema.b_dtype,
            scale_dtype=schema.scale_dtype(param),
            group_n=group_n,
            group_k=group_k,
            has_zero_point=schema.has_zero_point,
            scale_2=schema.weight_scale_2_type,
            options=options,
        )
