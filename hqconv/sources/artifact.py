"""An artifact in the kernel layout as a source: for another TP, EP or schema, without the original model.

The independent decoder of the kernel layout reads the experts back and joins their ranks; the other tensors are the
artifact's ordinary shards. A damaged artifact is a damaged input, also for the exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.artifact.reader import Artifact
from hqconv.errors import InputError, RequestError, VerificationError
from hqconv.formats.encoding import UNUSED_PARTS
from hqconv.formats.source_format import LAID_OUT, SourceFormat, per_projection
from hqconv.io.hub import Listing
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import InputScaleTensors, MoeLayer, RawExperts, TensorSlice
from hqconv.schemas import artifact_names as names
from hqconv.schemas.tensors import TensorRef, code_of, torch_dtype
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.sources.safetensors import SafetensorsSource

if TYPE_CHECKING:
    import torch

    from hqconv.artifact.expert_reader import ExpertReader
    from hqconv.formats.encoding import SourceMatrix
    from hqconv.layout_decoder.decode import DecodedStack

_AGAIN = "Verify the artifact; copy it again from where it is whole, or convert the original model again."
_CONVERT_AGAIN = "Convert the original model again."


@contextmanager
def as_input_error() -> Iterator[None]:
    """Turn a VerificationError into an InputError with the same message; also as a decorator."""
    try:
        yield
    except VerificationError as error:
        raise InputError(
            error.what,
            where=error.where,
            expected=error.expected,
            found=error.found,
            remedy=error.remedy or _AGAIN,
        ) from error


class ArtifactSource(SafetensorsSource):
    """An artifact opened as a checkpoint. Rank tensors are named `<rank file>:<tensor>`."""

    reads_ahead = False

    def __init__(self, root: Path, *, repo_id: str | None, listing: Listing | None) -> None:
        """Read manifest and headers; parameters as in `SafetensorsSource`. Raises InputError for a damaged artifact.

        RequestError for an artifact whose codes differ from those of its schema.
        """
        super().__init__(root, repo_id=repo_id, listing=listing)
        with as_input_error():
            self.artifact = Artifact(root, listing, is_sealed=True)
            _refuse_fused_exponents(self.artifact)
        self.quantization = self.artifact.manifest.source.quantization_config
        self.config = names.admit_transformers(self.config)
        own = self.config.pop("quantization_config", None)
        if self.artifact.manifest.linear_layers:  # its config is the artifact's, not the source's
            found = own.get("source_quantization_config") if isinstance(own, dict) else None
            self.quantization = found if isinstance(found, dict) else None
        self._readers: dict[str, ExpertReader] = {}
        self._add_rank_files()

    def close(self) -> None:
        """Close the files of the checkpoint and of the artifact."""
        super().close()
        self.artifact.close()

    def fetch(
        self,
        names: Iterable[str],
        check: Callable[[], None] | None = None,
        into: Path | None = None,
    ) -> None:
        """Download missing files of a repo; see `SafetensorsSource.fetch`."""
        wanted = list(names)
        super().fetch(wanted, check, into)
        self.artifact.placed |= {
            name: self.guard.path_of(name) for name in wanted if self.guard.has_seen(name)
        }

    def forget(self, name: str) -> None:
        """Read a file from the Hub again, as its copy will be removed."""
        super().forget(name)
        self.artifact.forget(name)

    def _add_rank_files(self) -> None:
        files = list(self.files)
        for path in sorted(self.artifact.manifest.files):
            if not path.startswith(f"{names.EXPERTS_FOLDER}/"):
                continue
            file, header = self._read_file(len(files), path)
            for tensor, ref in header.items():
                full = f"{path}:{tensor}"
                self.tensors[full] = ref._replace(name=full)
            files.append(file)
        self.files = tuple(files)

    # --- headers

    @as_input_error()
    def map_experts(self) -> ExpertMap:
        """Map the artifact's MoE layers, and every tensor to its use. Raises InputError for inconsistent files."""
        layers = tuple(self._layer(name) for name in self.artifact.layers)
        converted = {name: layer.name for layer in layers for name in layer.tensor_names()}
        scales = [name for layer in layers for name in layer.input_scales.names]
        dropped = dict.fromkeys(scales, UNUSED_PARTS[names.INPUT_SCALE])
        copied = tuple(
            name for name in self.tensors if name not in converted and name not in dropped
        )
        stray = next((name for name in copied if name.startswith(f"{names.EXPERTS_FOLDER}/")), None)
        if stray is not None:
            raise InputError(
                "A rank file holds a tensor that no kernel reads.",
                where=stray,
                remedy="Verify the artifact.",
            )
        return ExpertMap(
            family=self.artifact.family.name,
            chosen_because="read back from the kernel layout",
            layers=layers,
            converted=converted,
            copied=copied,
            dropped=dropped,
            left=self.artifact.left,  # among the copied tensors
        )

    def _layer(self, name: str) -> MoeLayer:
        layer = self.artifact.moe_layer(name)
        schema = self.artifact.schema_of(name)
        formats = {role: self._format_of(schema.of(role)) for role in layer.roles}
        slices = {role: self._slices(name, names.GEMM_OF[role]) for role in layer.roles}
        sources = tuple(
            {
                role: {key: self._expert_ref(part, homes[0]) for key, part in tensors.items()}
                for role, tensors in slices.items()
            }
            for homes in self.artifact.grid.homes(layer.num_experts)
        )
        return replace(
            layer,
            format=per_projection(formats),
            dtype=slices["w2"]["weight"].dtype,
            slices=slices,
            sources=sources,
            input_scales=self._input_scales(name),
        )

    def _input_scales(self, layer: str) -> InputScaleTensors:
        """Collect the static activation scales in all ranks' files."""
        inputs = self.artifact.layer_spec_of(layer).inputs
        if not inputs.is_static:
            return InputScaleTensors()
        refs = {}
        for gemm in names.GEMMS:
            name = names.input_scale(layer, gemm, inputs)
            in_ranks = []
            for rank in self.artifact.grid.ranks:
                full = f"{names.rank_file(layer, *rank)}:{name}"
                if full not in self.tensors:
                    raise VerificationError(
                        "A rank's activation scale is missing.", where=full, remedy=_CONVERT_AGAIN
                    )
                in_ranks.append(self.tensors[full])
            refs[gemm] = tuple(in_ranks)
        return InputScaleTensors(inputs.a_dtype or "", refs, dict.fromkeys(refs, 1))

    def _slices(self, layer: str, gemm: str) -> dict[str, TensorSlice]:
        """Map the rank tensors of one GEMM: `weight` … of the first rank, `weight@tp0-ep1` … of the others."""
        slices: dict[str, TensorSlice] = {}
        for rank in self.artifact.grid.ranks:
            self.artifact.rank_file(layer, *rank)
            path = names.rank_file(layer, *rank)
            prefix = f"{path}:{layer}.{gemm}_"
            suffix = f"@tp{rank[0]}-ep{rank[1]}" if slices else ""
            for tensor in self.artifact.header(path)[0]:
                ref = self.tensors[f"{path}:{tensor}"]
                if ref.name.startswith(prefix) and not names.is_input_scale(tensor):
                    key = f"{ref.name.removeprefix(prefix)}{suffix}"
                    slices[key] = TensorSlice(ref.name, ref.dtype, ref.shape)
            if f"weight{suffix}" not in slices:
                raise VerificationError(
                    "A rank file has no weights.",
                    where=f"{path}, tensor {layer}.{gemm}_weight",
                    remedy=_CONVERT_AGAIN,
                )
        return slices

    def _expert_ref(self, part: TensorSlice, home: tuple[int, int]) -> TensorRef:
        """Return an expert's bytes in a rank tensor, for counting; none in a file of another EP rank than `home`."""
        ref = self.tensors[part.template]
        ep_rank, local = home
        if f"-ep{ep_rank}/" not in part.template:
            return ref._replace(num_bytes=0)
        return ref.entry(local)

    def _format_of(self, schema: WeightSchema) -> SourceFormat:
        """Return the source format of a schema; rotated weights have no codes to keep."""
        group_n, group_k = schema.scale_group()
        param = self.artifact.param_dtype
        options = (("param_dtype", param), ("is_fp_zero_point", schema.is_fp_zero_point))
        return SourceFormat(
            name=f"hqconv kernel layout, {schema.name}{', rotated' if schema.rotation else ''}",
            encoding=LAID_OUT,
            b_dtype="" if schema.rotation else schema.b_dtype,
            scale_dtype=schema.scale_dtype(param),
            group_n=group_n,
            group_k=group_k,
            has_zero_point=schema.has_zero_point,
            scale_2=schema.weight_scale_2_type,
            options=options,
        )

    # --- experts

    @as_input_error()
    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Decode projections of one expert, joined from all TP ranks. Raises InputError for undecodable tensors."""
        from hqconv.artifact.expert_reader import ExpertReader

        if layer.name not in self._readers:
            self._readers[layer.name] = ExpertReader(self.artifact, layer, self._refuse)
        reader = self._readers[layer.name]
        matrices: dict[str, DecodedStack] = {}
        for gemm in dict.fromkeys(names.GEMM_OF[role] for role in roles):
            matrices |= reader.read(gemm, expert, self._refuse)
        return {
            role: self._to_source(
                layer, role, f"{layer.name}, {role} of expert {expert}", matrices[role], device
            )
            for role in roles
        }

    def _refuse(self, where: str, what: str, expected: object, found: object) -> None:
        """Raise VerificationError for a problem that the `weights` check of `verify` would list."""
        raise VerificationError(what, where=self.root / where, expected=expected, found=found)

    def _to_source(
        self, layer: MoeLayer, role: str, where: str, matrix: DecodedStack, device: torch.device
    ) -> SourceMatrix:
        from hqconv.formats.encoding import SourceMatrix, resized
        from hqconv.quantization import bit_codec
        from hqconv.quantization.coded_matrix import CodedMatrix, dequantize
        from hqconv.quantization.quantized import rotate

        if matrix.flushed is not None and bool(matrix.flushed.any()):
            raise InputError(
                "The artifact lost scales when it was made for float16: its source's values cannot be told.",
                where=where,
                remedy="Convert the original model.",
            )

        def tensor(bits: torch.Tensor, dtype: str) -> torch.Tensor:
            """View bit patterns of one expert, E = 1, as a tensor of a safetensors dtype."""
            return bits[0].contiguous().view(torch_dtype(dtype)).to(device)

        schema = self.artifact.schema_of(layer.name).of(role)
        param_dtype = code_of(self.artifact.param_dtype)
        zero_dtype = param_dtype if schema.is_fp_zero_point else "U8"
        scale_2_dtype = "F32" if schema.weight_scale_2_type == "tensor" else param_dtype
        zeros = matrix.zero_point
        scale_2 = matrix.scale_2
        bias = matrix.bias
        coded = CodedMatrix(
            b_dtype=schema.b_dtype,
            packed=bit_codec.pack(matrix.codes[0], schema.num_bits).to(device),
            scale=tensor(matrix.scale, matrix.scale_dtype),
            group_n=layer.format.of(role).group_n,
            group_k=layer.format.of(role).group_k,
            zero_point=None if zeros is None else tensor(zeros, zero_dtype),
            scale_2=None if scale_2 is None else tensor(scale_2, scale_2_dtype),
        )
        size = layer.shape(role)  # without the zeros that fill the last scale group
        source = SourceMatrix({"weight": where, "bias": where})
        if bias is not None:
            source = replace(source, bias=resized(tensor(bias, param_dtype), size[:1]))
        if schema.rotation:  # rotated back; no target keeps these codes
            floats = rotate(dequantize(coded), schema.rotation)
            return replace(source, floats=resized(floats, size))
        return replace(source, coded=coded, size=None if coded.shape == size else size)


def _refuse_fused_exponents(artifact: Artifact) -> None:
    """Refuse mxfp4 for fp8 or int8 activations: its codes differ on every TP rank; the original codes are lost."""
    for layer, entry in artifact.layers.items():
        gemms = (entry.w13, entry.w2)
        if any(gemm is not None and gemm.has_fused_exponents for gemm in gemms):
            raise RequestError(
                "The exponents were folded into the codes: the artifact cannot be a source.",
                where=f"{artifact.root}: {layer}",
                found=str(artifact.layer_spec_of(layer)),
                remedy="Convert the original again.",
            )
