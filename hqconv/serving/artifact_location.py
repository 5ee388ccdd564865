"""Location of an artifact for a server: a folder, or a Hub repo from which single files are downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hqconv.errors import RequestError, VerificationError
from hqconv.io.hub import fetch


@dataclass(frozen=True)
class ArtifactLocation:
    """Model argument of a server: a folder's path, or a repo id and a revision."""

    name: str
    revision: str | None = None

    @property
    def is_folder(self) -> bool:
        """True if the location is a folder of this machine."""
        return Path(self.name).is_dir()

    def fetch(self, path: str) -> Path:
        """One file's path on this machine; of a Hub repo it is downloaded if the cache lacks it.

        Raises VerificationError if a folder lacks the file, RequestError or NetworkError if the Hub or, offline,
        its cache does.
        """
        return self.fetch_all([path])[path]

    def fetch_all(self, paths: Sequence[str], cache_dir: str | None = None) -> dict[str, Path]:
        """`fetch` of several files; of a Hub repo several at a time, and no others."""
        if self.is_folder:
            root = Path(self.name)
        else:
            root = fetch(self.name, self.revision, allow_patterns=paths, cache_dir=cache_dir)
        found = {path: root / path for path in paths}
        lacking = next((path for path, at in found.items() if not at.is_file()), None)
        if lacking is not None:
            raise self._lacks(lacking)
        return found

    def _lacks(self, path: str) -> RequestError | VerificationError:
        if not self.is_folder:
            return RequestError(
                "The copy of the Hub repo on this machine lacks a file of the artifact.",
                where=self.name if self.revision is None else f"{self.name}, revision {self.revision}",
                expected=path,
                found="no such file",
                remedy="Unset HF_HUB_OFFLINE and check the connection, or fill the cache with `hf download` first; "
                "if the repo itself lacks the file, upload the artifact again.",
            )
        return VerificationError(
            "The model's folder lacks a file of the artifact.",
            where=self.name,
            expected=path,
            found="no such file",
            remedy="Copy the artifact again with all its files, or convert the model again.",
        )
