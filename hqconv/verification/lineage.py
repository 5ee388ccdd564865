"""Relation of a given source to an artifact: its own source or an ancestor's, and whether their codes are comparable.

An artifact that was cut from an artifact has the codes of the first conversion, if every later one kept them:
then it is compared with the first source as if that were its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from hqconv.artifact.manifest import Ancestor, Manifest
from hqconv.artifact.reader import Artifact
from hqconv.formats.source_format import DIRECT
from hqconv.models.source_protocol import Source
from hqconv.planning.importance import Importance
from hqconv.planning.layer_encoding import EncodingOptions, quantizer_version
from hqconv.schemas.options import QUANTIZERS, RTN


@dataclass(frozen=True)
class Lineage:
    """Artifact that was converted from the given source, and the artifacts converted since.

    made: recorded facts of the artifact converted from the source. between: facts of the artifacts converted since,
    the nearest first; empty if the source is the artifact's own.
    """

    made: Manifest | Ancestor
    between: tuple[Manifest | Ancestor, ...] = ()

    @classmethod
    def of(cls, artifact: Artifact, source: Source) -> Lineage:
        """Find the source by its files, or else by their names; the artifact's own source if no step lists them."""
        steps = artifact.manifest.steps
        for keys in (("name", "header_sha256"), ("name",)):
            found = {tuple(getattr(file, key) for key in keys) for file in source.files}
            for number, step in enumerate(steps):
                listed = {tuple(getattr(file, key) for key in keys) for file in step.source.files}
                if listed == found:
                    return cls(step, steps[:number])
        return cls(artifact.manifest)

    @property
    def is_own(self) -> bool:
        """True if the artifact itself was converted from the source."""
        return not self.between

    def encoding_options(self, importance: Importance | None) -> EncodingOptions:
        """Return the options of the conversion from the given source; `importance`: its file. Raises RequestError."""
        return EncodingOptions.from_dict(self.made.to_dict(), importance)

    def why_not_comparable(self, artifact: Artifact) -> str:
        """Return why the artifact's codes are not comparable with the source's; "" if they are."""
        if self.is_own:
            return ""
        quantizer = self.made.quantizer or RTN
        if quantizer not in QUANTIZERS or self.made.importance is not None:
            return "the first conversion searched with what this artifact has no copy of"
        if quantizer != RTN and self.made.quantizer_version != quantizer_version(quantizer):
            return "the first conversion searched with another version of the search"
        if self.made.dtype != artifact.param_dtype:
            return f"its parameters were {self.made.dtype} at first, and are {artifact.param_dtype} now"
        for name in artifact.layers:
            for step in self.between:
                layer = step.blocks.get(name)
                conversion = None if layer is None else layer.conversion
                if conversion != DIRECT:
                    return f"{name} was {conversion} from an artifact: its codes are not the source's"
            layer = self.made.blocks.get(name)
            schema = (layer and layer.weight_schema) or self.made.weight_schema
            if schema != artifact.schema_of(name).humming_fields():
                return f"{name} had another schema at first: its codes are not the source's"
        return ""
