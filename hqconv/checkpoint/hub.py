"""A Hugging Face Hub repo at one commit: its files with their sizes, ranges of them, and whole files in the Hub cache.

The Hub library's exceptions are turned into ours. It takes half a second to import, so that functions do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hqconv.checkpoint.hub_errors import explained, status_of
from hqconv.checkpoint.safetensors import header_length
from hqconv.errors import InputError, NetworkError, RequestError

_FIRST_BYTES = 1 << 15  # of a shard: most headers fit, so that one request is enough
_TRIES = 4  # of a range whose transfer breaks off


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE keeps the Hub library from asking."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch(
    repo_id: str,
    revision: str | None,
    *,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    cache_dir: str | None = None,
) -> Path:
    """Brings the matching files of a model repo into the Hub cache (or `cache_dir`) and returns the snapshot's folder.

    The folder's name is the commit hash. Offline, or where the Hub does not answer, it may lack files.
    Raises RequestError where repo or revision do not exist or access is denied, NetworkError where the download fails.
    """
    from huggingface_hub import snapshot_download

    with explained(repo_id, revision):
        folder: Any = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(allow_patterns) if allow_patterns is not None else None,
            ignore_patterns=list(ignore_patterns) if ignore_patterns is not None else None,
            cache_dir=cache_dir,
        )
    return Path(folder)


def cached(repo_id: str, revision: str | None) -> Path | None:
    """The folder of what the cache has of a branch, tag or commit, without asking the Hub; None without any."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder: Any = snapshot_download(repo_id, revision=revision, local_files_only=True)
    except (errors.LocalEntryNotFoundError, OSError, ValueError):
        return None
    return Path(folder)


def fetch_file(repo_id: str, commit: str, name: str, check: Callable[[], None] | None = None) -> Path:
    """One file's path in the Hub cache, downloaded if it is not there.

    check: called between pieces of the download, which ends with what it raises; then no bar is shown.
    Raises as `fetch`, and OutputError where the cache is full or cannot be written.
    """
    from huggingface_hub import hf_hub_download

    words: dict[str, Any] = {} if check is None else {"tqdm_class": _bar(check)}
    with explained(repo_id, commit):
        found: Any = hf_hub_download(repo_id, name, revision=commit, **words)
    return Path(found)


def _bar(check: Callable[[], None]) -> Any:
    """A progress bar that shows nothing, and asks whether to go on."""
    from huggingface_hub import utils

    library: Any = utils
    base: Any = library.tqdm

    class Silent(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **words: Any) -> None:
            super().__init__(*arguments, **{**words, "disable": True})

        def update(self, n: float | None = 1) -> Any:
            check()
            return super().update(n)

    return Silent


@dataclass(frozen=True)
class Listing:
    """The files of one commit of a repo, and their bytes by range requests.

    sizes: path → bytes, as the Hub says. digests: path → sha256 of those that it keeps as large files.
    """

    repo_id: str
    commit: str
    sizes: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, repo_id: str, revision: str | None) -> Listing:
        """Ask the Hub for the files of a branch, tag or commit, and for the commit that it is.

        Raises as `fetch`; RequestError too where the repo has another name by now; InputError where a file's name
        could lead elsewhere.
        """
        from huggingface_hub import HfApi, constants

        with explained(repo_id, revision):
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            info: Any = HfApi().model_info(repo_id, revision=revision, timeout=timeout, files_metadata=True)
        if info.id != repo_id:
            what, remedy = "The Hub repo has another name now.", f"Give {info.id}."
            raise RequestError(what, where=repo_id, found=info.id, remedy=remedy)
        files = list(info.siblings or ())
        for file in files:
            _check_name(repo_id, file.rfilename)
        digests = {file.rfilename: str(file.lfs["sha256"]) for file in files if file.lfs}
        return cls(repo_id, info.sha, {file.rfilename: int(file.size or 0) for file in files}, digests)

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())

    def fetched(self, root: Path, name: str) -> Path:
        """Where a file lies in the snapshot's folder `root`; a file of the repo is downloaded if it is not there."""
        if name in self.sizes and not (root / name).is_file():
            fetch_file(self.repo_id, self.commit, name)
        return root / name

    def read_head(self, name: str) -> bytes:
        """The bytes before the tensors of a safetensors file, by range requests.

        Raises InputError for a header that is not plausible, else as `fetch`.
        """
        where, size = f"{self.repo_id}/{name}", self.sizes[name]
        head = self.read(name, 0, min(_FIRST_BYTES, size))
        num_bytes = header_length(where, head, size)
        if num_bytes > len(head):
            head += self.read(name, len(head), num_bytes)
        return head[:num_bytes]

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes begin … end - 1 of a file. A transfer that breaks off is tried again. Raises as `fetch`."""
        if begin >= end:
            return b""
        for number in range(1, _TRIES + 1):
            try:
                return self._read(name, begin, end)
            except NetworkError as error:  # a status was asked for again by the library
                if number == _TRIES or status_of(error) is not None:
                    raise
                time.sleep(number)
        raise AssertionError

    def _read(self, name: str, begin: int, end: int) -> bytes:
        """One request; a server that ignores the range is not listened to any longer."""
        from huggingface_hub import constants, hf_hub_url, utils

        library: Any = utils  # which says nothing of its types
        headers = {
            **library.build_hf_headers(),
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        # Not on exceptions: what is raised while bytes come in would be asked for again inside this one's answer.
        words = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "retry_on_exceptions": ()}
        url, found = hf_hub_url(self.repo_id, name, revision=self.commit), bytearray()
        with (
            explained(self.repo_id, self.commit),
            library.http_stream_backoff("GET", url, headers=headers, **words) as response,
        ):
            library.hf_raise_for_status(response)
            skip = begin if response.status_code == 200 else 0
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) >= skip + end - begin:
                    break
        found = found[skip : skip + end - begin]
        if len(found) < end - begin:
            raise _too_few(f"{self.repo_id}/{name}", end - begin, len(found))
        return bytes(found)


def _too_few(where: str, expected: int, found: int) -> NetworkError:
    what, remedy = "The Hub sent fewer bytes of a file than it has.", "Try again."
    return NetworkError(what, where=where, expected=expected, found=found, remedy=remedy)


def _check_name(repo_id: str, name: str) -> None:
    """Refuse what is no path downwards in its one spelling."""
    if "\\" in name or "\0" in name or {"", ".", ".."}.intersection(name.split("/")):
        what, expected = (
            "A file of the Hub repo has a name that could lead elsewhere.",
            "a path inside the repo",
        )
        raise InputError(what, where=repo_id, expected=expected, found=repr(name))
