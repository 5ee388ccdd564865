"""Upload to a Hugging Face Hub repo: the files of one of its branches, and commits to it.

huggingface_hub takes half a second to import, so that only functions import it; its exceptions become ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import HqconvError, NetworkError, RequestError
from hqconv.io.hub import check_commit, translated

_AGAIN = "Repeat the same command: what is there already is not sent again."


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit. digest: SHA-256 of its bytes if the repo keeps it in LFS, else git's SHA-1 of it."""

    size_bytes: int
    digest: str
    is_lfs: bool

    def holds(self, path: Path, sha256: str) -> bool:
        """Return True if the file has the bytes with this SHA-256; path: these bytes, read if git stores the file."""
        if self.is_lfs:
            return self.digest == sha256
        return self.size_bytes == path.stat().st_size and self.digest == git_digest(path.read_bytes())


def git_digest(data: bytes) -> str:
    """Compute git's SHA-1 of a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class BranchFiles:
    """A branch of a repo: its last commit, and its files by path."""

    commit: str
    files: Mapping[str, RemoteFile]


class HubBranch:
    """A model repo and one of its branches. Every method raises RequestError if the Hub refuses, else NetworkError."""

    def __init__(self, repo_id: str, branch: str | None = None) -> None:
        self.repo_id, self.branch = repo_id, branch

    def create(self, *, private: bool) -> None:
        """Create the repo and the branch if they are missing. With `private` a public repo raises RequestError."""
        from huggingface_hub import HfApi

        with self._explained():
            api: Any = HfApi()
            api.create_repo(self.repo_id, private=private or None, exist_ok=True)
            if private and not api.model_info(self.repo_id).private:
                what = "The repo is there already, and is public."
                remedy = "Change that on its page, or leave --private out."
                raise RequestError(what, where=self.repo_id, expected="a private repo", remedy=remedy)
            if self.branch is not None:
                api.create_branch(self.repo_id, branch=self.branch, exist_ok=True)

    def state(self) -> BranchFiles:
        """Request the branch's last commit and its files. Raises InputError, too, for an invalid commit hash."""
        from huggingface_hub import HfApi

        with self._explained():
            info: Any = HfApi().model_info(self.repo_id, revision=self.branch, files_metadata=True)
            files = {}
            for file in info.siblings or ():
                digest = str(file.blob_id) if file.lfs is None else str(file.lfs.sha256)
                files[str(file.rfilename)] = RemoteFile(int(file.size or 0), digest, file.lfs is not None)
            return BranchFiles(check_commit(self.repo_id, info.sha), files)

    def read(self, name: str, commit: str) -> Path:
        """Download a file of a commit to the Hub cache."""
        from huggingface_hub import hf_hub_download

        with self._explained():
            return Path(str(hf_hub_download(self.repo_id, name, revision=commit)))

    def commit(
        self, message: str, put: Mapping[str, Path], delete: Iterable[str] = (), parent: str | None = None
    ) -> str:
        """Create one commit that adds files of this machine at their paths and deletes others; return its hash.

        parent: the commit that the branch must still end with.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        with self._explained():
            operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in delete]
            operations += [CommitOperationAdd(name, str(path)) for name, path in put.items()]
            kwargs: Any = {"revision": self.branch, "parent_commit": parent}
            return str(HfApi().create_commit(self.repo_id, operations, commit_message=message, **kwargs).oid)

    def _explained(self) -> AbstractContextManager[None]:
        return translated(self._explain)

    def _explain(self, error: Exception) -> HqconvError:
        from huggingface_hub import errors

        status = getattr(getattr(error, "response", None), "status_code", None)
        where = self.repo_id + (f", branch {self.branch}" if self.branch else "")
        found = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if isinstance(error, errors.HFValidationError):
            what, remedy = "This is no valid name of a Hub repo.", "Give it as org/name."
        elif status in (401, 403, 404):
            what = "The Hub does not let you write to this repo."
            remedy = "Check its name, then `hf auth login` with a token that may write, or set HF_TOKEN."
        elif status == 412:
            what, remedy = "Somebody else changed the repo meanwhile.", _AGAIN
        elif type(error) is ValueError and "metadata" in str(error):
            what, remedy = ("The Hub refuses the front matter of README.md.", "Mend it; people may edit the card.")
        else:
            return NetworkError("The upload to the Hub failed.", where=where, found=found, remedy=_AGAIN)
        return RequestError(what, where=where, found=found, remedy=remedy)
