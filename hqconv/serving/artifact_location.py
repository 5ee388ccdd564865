"""Location of an artifact for a server: a folder, or a Hub repo from which single files are downloaded."""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.io.hub import check_commit, fetch, is_missing_revision, is_snapshot, note_revision

_LOG = logging.getLogger(__name__)


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

        Raises VerificationError if a folder lacks the file, RequestError or NetworkError if the Hub or, offline,
        its cache does.
        """
        return self.fetch_all([path])[path]

    def fetch_all(self, paths: Sequence[str], cache_dir: str | None = None) -> dict[str, Path]:
        """`fetch` of several files; of a Hub repo several at a time, and no others."""
        root = Path(self.name) if self.is_folder else self._download(paths, cache_dir)
        found = {path: root / path for path in paths}
        lacking = next((path for path, at in found.items() if not at.is_file()), None)
        if lacking is not None:
            raise self._lacks(lacking)
        return found

    def complete(self, paths: Sequence[str], cache_dir: str) -> None:
        """Fetch small files of a Hub repo to the server's download folder too, so that it is enough offline.

        A failure is logged only: the server has these files from elsewhere.
        """
        try:
            note_revision(self._download(paths, cache_dir), str(self.revision or "main"))
        except HqconvError as error:
            _LOG.warning("%s is not enough for an offline start: %s", cache_dir, error)

    def _download(self, paths: Sequence[str], cache_dir: str | None) -> Path:
        patterns = [glob.escape(path) for path in paths]
        try:
            return fetch(self.name, self.pinned_revision, allow_patterns=patterns, cache_dir=cache_dir)
        except RequestError as error:
            if self.commit is None or not is_missing_revision(error):
                raise
            raise self._gone(self.commit) from error

    def _gone(self, commit: str) -> RequestError:
        return RequestError(
            "The Hub no longer has the commit of the manifest with which this start began.",
            where=self.name if self.revision is None else f"{self.name}, revision {self.revision}",
            expected=f"commit {commit}",
            found="no such commit: the repo's history was rewritten since",
            remedy="Start the server again: it begins with the commit that the Hub has now.",
        )

    def _lacks(self, path: str) -> RequestError | VerificationError:
        if not self.is_folder:
            return RequestError(
                "The copy of the Hub repo on this machine lacks a file of the artifact.",
                where=self.name if self.pinned_revision is None else f"{self.name}, revision {self.pinned_revision}",
                expected=path,
                found="no such file",
                remedy="Unset HF_HUB_OFFLINE and check the connection, or fill the cache with `hf download` first; "
                "if the repo itself lacks the file, upload the artifact again.",
            )
        remedy = "Copy the artifact again with all its files, or convert the model again."
        if is_snapshot(Path(self.name)):  # to which a server turns a repo's name when it is offline
            remedy = (
                "Unset HF_HUB_OFFLINE, or fill the cache with `hf download` first; if the files are in a download "
                "folder of the server, set HF_HUB_CACHE to it."
            )
        return VerificationError(
            "The model's folder lacks a file of the artifact.",
            where=self.name,
            expected=path,
            found="no such file",
            remedy=remedy,
        )
