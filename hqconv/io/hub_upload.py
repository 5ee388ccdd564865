"""Upload to a Hugging Face Hub repo: the files of one of its branches, and one commit that changes all of them.

huggingface_hub takes half a second to import, so that only functions import it; its exceptions become ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hqconv.errors import (
    HqconvError,
    NetworkError,
    OutputError,
    RequestError,
    VerificationError,
    first_few,
)
from hqconv.io.hub import check_commit, is_unreachable, patiently, status_of, translated

_AGAIN = "Repeat the same command: what is there already is not sent again."


@dataclass(frozen=True)
class RemoteFile:
    """One file of a commit. digest: SHA-256 of its bytes if the repo keeps it in LFS, else git's SHA-1 of it."""

    size_bytes: int
    digest: str
    is_lfs: bool


def git_digest(data: bytes) -> str:
    """Compute git's SHA-1 of a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class FileToSend:
    """One file of a commit that is prepared. sha256: of its bytes. data: the bytes; None: they are read from `path`."""

    name: str
    sha256: str
    size_bytes: int
    path: Path
    data: bytes | None = None

    @classmethod
    def of_bytes(cls, name: str, path: Path, data: bytes) -> FileToSend:
        """Return a file whose bytes are in memory. path: its place in the artifact, for messages."""
        return cls(name, hashlib.sha256(data).hexdigest(), len(data), path, data)

    def content(self) -> bytes:
        """Return all bytes of a small file. Raises VerificationError for other bytes, OutputError for no file."""
        data = self.data
        if data is None:
            try:
                data = self.path.read_bytes()
            except OSError as error:
                raise _changed(self.path) from error
        self.check(hashlib.sha256(data).hexdigest())
        return data

    @cached_property
    def git_sha1(self) -> str:
        """Git's SHA-1 of a small file, read once: after the commit the folder may hold another artifact."""
        return git_digest(self.content())

    def check(self, found: str) -> None:
        """Raise VerificationError if `found` is not the file's SHA-256."""
        if found != self.sha256:
            raise VerificationError(
                "A file of the artifact has other bytes than the manifest lists.",
                where=str(self.path),
                expected=f"sha256 {self.sha256}",
                found=f"sha256 {found}",
                remedy="Nothing was published. Verify the artifact; convert again, or copy it from where it is whole.",
            )

    def is_at(self, remote: RemoteFile | None) -> bool:
        """Return True if the repo holds these bytes already. A small file is read. Raises as `content`."""
        if remote is None:
            return False
        if remote.is_lfs:
            return remote.digest == self.sha256
        return remote.size_bytes == self.size_bytes and remote.digest == self.git_sha1

    def identity(self) -> tuple[int, ...]:
        """Return the state of the file at `path`: it differs once the file is changed or replaced.

        Raises OutputError where the file is gone.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise _changed(self.path) from error
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(path: Path) -> OutputError:
    return OutputError(
        "A file changed while it was sent.",
        where=str(path),
        remedy="Nothing was published. Push again.",
    )


def _content_or_path(file: FileToSend) -> bytes | str:
    return str(file.path) if file.data is None else file.data


@dataclass(frozen=True)
class BranchFiles:
    """A branch of a repo: its last commit, and its files by path."""

    commit: str
    files: Mapping[str, RemoteFile]


class HubBranch:
    """A model repo and one of its branches. Every method raises RequestError if the Hub refuses, else NetworkError."""

    def __init__(self, repo_id: str, branch: str | None = None) -> None:
        self.repo_id, self.branch = repo_id, branch

    def __str__(self) -> str:
        return self.repo_id + (f", branch {self.branch}" if self.branch else "")

    def create(self, *, private: bool) -> None:
        """Create the repo and the branch if they are missing. With `private` a public repo raises RequestError."""
        from huggingface_hub import HfApi

        with self._explained():
            api: Any = HfApi()
            api.create_repo(self.repo_id, private=private or None, exist_ok=True)
            if private:
                self._check_private(api.model_info(self.repo_id))
            if self.branch is not None:
                api.create_branch(self.repo_id, branch=self.branch, exist_ok=True)

    def exists(self, *, private: bool) -> bool:
        """Return True if the repo and the branch exist. With `private` a public repo raises RequestError."""
        from huggingface_hub import HfApi, errors

        with self._explained():
            try:
                info = HfApi().model_info(self.repo_id, revision=self.branch)
            except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
                return False
            if private:
                self._check_private(info)
            return True

    def _check_private(self, info: Any) -> None:
        if not info.private:
            raise RequestError(
                "The repo is there already, and is public.",
                where=self.repo_id,
                expected="a private repo",
                remedy="Make it private, or leave --private out.",
            )

    def state(self) -> BranchFiles:
        """Request the branch's last commit and its files. Raises InputError, too, for an invalid commit hash."""
        return patiently(self._state)

    def _state(self) -> BranchFiles:
        from huggingface_hub import HfApi

        with self._explained():
            info: Any = HfApi().model_info(self.repo_id, revision=self.branch, files_metadata=True)
            files = {}
            for file in info.siblings or ():
                digest = str(file.blob_id) if file.lfs is None else str(file.lfs.sha256)
                files[str(file.rfilename)] = RemoteFile(
                    int(file.size or 0), digest, file.lfs is not None
                )
            return BranchFiles(check_commit(self.repo_id, info.sha), files)

    def read(self, name: str, commit: str) -> Path:
        """Download a file of a commit to the Hub cache."""
        from huggingface_hub import hf_hub_download

        with self._explained():
            return Path(str(hf_hub_download(self.repo_id, name, revision=commit)))

    def prepare(self, files: Sequence[FileToSend]) -> list[Any]:
        """Send the bytes of large files, and read small ones; return the operations of a later `commit`.

        No commit is made: nobody sees the files. Their bytes are hashed while the Hub library reads them.
        Raises VerificationError where bytes do not have their digest, OutputError where a file changed meanwhile or
        the repo ignores it.
        """
        from huggingface_hub import CommitOperationAdd, HfApi

        before = {file.name: file.identity() for file in files if file.data is None}
        with self._explained():
            operations = [CommitOperationAdd(file.name, _content_or_path(file)) for file in files]
            kwargs: Any = {"revision": self.branch, "free_memory": False}
            HfApi().preupload_lfs_files(self.repo_id, operations, **kwargs)
        ignored = [
            file.name for file, one in zip(files, operations, strict=True) if one._should_ignore
        ]
        if ignored:
            raise OutputError(
                "The repo ignores a file of the artifact.",
                where=f"{self}: {first_few(ignored)}",
                remedy="Look for a .gitignore in the repo.",
            )
        for file, operation in zip(files, operations, strict=True):
            if operation._upload_mode == "lfs":
                file.check(operation.upload_info.sha256.hex())
            else:
                operation.path_or_fileobj = file.content()
                file.git_sha1  # noqa: B018 - for comparisons after the commit
            if file.name in before and before[file.name] != file.identity():
                raise _changed(file.path)
            if operation._upload_mode == "lfs":
                operation.path_or_fileobj = b""  # no longer needed
        return operations

    def commit(
        self, message: str, operations: Sequence[Any], delete: Iterable[str], parent: str
    ) -> str:
        """Create one commit that adds prepared files and deletes others; return its hash.

        parent: the commit that the branch must still end with.
        """
        from huggingface_hub import CommitOperationDelete, HfApi

        every = [
            *(CommitOperationDelete(path_in_repo=name, is_folder=False) for name in delete),
            *operations,
        ]
        kwargs: Any = {"revision": self.branch, "parent_commit": parent}

        def create() -> str:
            with self._explained():
                return str(
                    HfApi().create_commit(self.repo_id, every, commit_message=message, **kwargs).oid
                )

        return patiently(create)

    def _explained(self) -> AbstractContextManager[None]:
        return translated(self._explain)

    def _explain(self, error: Exception) -> HqconvError:
        from huggingface_hub import constants, errors

        status = status_of(error)
        found = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if isinstance(error, errors.HFValidationError):
            what, remedy = "This is no valid name of a Hub repo.", "Give it as org/name."
        elif status in (401, 403, 404):
            what = "The Hub does not let you write to this repo."
            remedy = (
                "Check its name, then `hf auth login` with a token that may write, or set HF_TOKEN."
            )
        elif status == 412:
            what, remedy = "Somebody else changed the repo meanwhile.", _AGAIN
        elif type(error) is ValueError and "metadata" in str(error):
            what, remedy = (
                "The Hub refuses the front matter of README.md.",
                "Mend it; people may edit the card.",
            )
        elif is_unreachable(error):
            return NetworkError(
                f"The Hub ({constants.ENDPOINT}) cannot be reached.",
                where=str(self),
                found=found,
                remedy=f"Check the connection and HF_ENDPOINT. {_AGAIN}",
            )
        else:
            return NetworkError(
                "The upload to the Hub failed.", where=str(self), found=found, remedy=_AGAIN
            )
        return RequestError(what, where=str(self), found=found, remedy=remedy)
