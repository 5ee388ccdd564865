"""A Hugging Face Hub repo at one commit: its files with their sizes, ranges of them, and whole files in the Hub cache.

The Hub library's exceptions are turned into ours. It takes half a second to import, so that functions do it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hqconv.errors import HqconvError, InputError, NetworkError, OutputError, RequestError
from hqconv.io.safetensors_header import header_length

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


_SIGN_IN = "`hf auth login` or set HF_TOKEN"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_Told = tuple[type[HqconvError], str, str]  # the error's class, what, and what to do


@contextmanager
def explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns what the Hub library raises into one of our errors."""
    from huggingface_hub import errors

    # The base of its HTTP exceptions: of requests, httpx or httpx2, by the library's version.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    # RuntimeError is what the Xet extension raises.
    failures = (OSError, ValueError, RuntimeError, http_error, errors.EntryNotFoundError)
    try:
        yield
    except HqconvError:
        raise
    except failures as error:
        raise _explain(error, repo_id, revision or "main") from error


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error of the Hub library, or of ours made of one, came from; None without any."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def _response(error: BaseException | None) -> Any:
    """The answer that an error came from: it may lie below one that says that the cache has no file either."""
    while error is not None:
        response = vars(error).get("response")
        if response is not None:
            return response
        error = error.__cause__
    return None


def _explain(error: Exception, repo_id: str, revision: str) -> HqconvError:
    kind, what, remedy = _of_repo(error, repo_id, revision) or _of_status(error) or _of_machine(error)
    lines = str(error).strip().splitlines() or [""]
    found, status = f"{type(error).__name__}: {lines[0]}", status_of(error)
    if status is not None and str(status) not in found:
        found += f" (HTTP {status})"
    return kind(what, where=f"{repo_id}, revision {revision}", found=found, remedy=remedy)


def _of_repo(error: Exception, repo_id: str, revision: str) -> _Told | None:
    """What is wrong with the repo that is asked for, where the Hub says so."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    # Subclasses first: gated is a kind of not found for the library.
    if isinstance(error, errors.GatedRepoError):
        return RequestError, "The Hub repo is gated.", f"Accept its terms at {page}, then {_SIGN_IN}."
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "There is no such folder here and no such repo on the Hub, or the repo is private."
        return RequestError, what, f"Check the spelling; for a private repo {_SIGN_IN}."
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = f"See the branches and tags at {page}/tree/main."
        return RequestError, "The Hub repo has no such revision.", remedy
    if isinstance(error, errors.HFValidationError):
        what = "This is neither a folder nor a valid Hub repo id."
        return RequestError, what, "Give a folder or org/name."
    if isinstance(error, errors.DisabledRepoError):
        return RequestError, "The Hub repo is disabled.", f"See what its owner says at {page}."
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return InputError, "The Hub repo lacks a file.", f"See its files at {page}/tree/{revision}."
    return None


def _of_status(error: Exception) -> _Told | None:
    """What the Hub answered, where it answered."""
    status = status_of(error)
    if status == 401:
        return RequestError, "The Hub does not accept the token, or wants one.", f"Sign in: {_SIGN_IN}."
    if status == 403:
        remedy = f"Give the token the right to read the repo, or take another: {_SIGN_IN}."
        return RequestError, "The Hub denies access to the repo.", remedy
    if status == 429:
        wait = _wait(_response(error))
        after = f"Wait {wait} and try again" if wait else "Wait a few minutes and try again"
        what = "The Hub was asked too often."
        return NetworkError, what, f"{after}; who is signed in ({_SIGN_IN}) may ask more often."
    if status is not None and status >= 500:
        what = "The Hub is out of order."
        return (
            NetworkError,
            what,
            "Try again later: what was fetched is kept. See https://status.huggingface.co.",
        )
    return None


def _wait(response: Any) -> str:
    """How long the Hub wants not to be asked, by Retry-After or its own header of limits; else empty."""
    from huggingface_hub import utils

    seconds = response.headers.get("Retry-After", "")
    if seconds and not seconds.isdigit():
        return f"until {seconds}"
    library: Any = utils
    limits = getattr(library, "parse_ratelimit_headers", None)
    if not seconds and limits is not None and (told := limits(response.headers)) is not None:
        seconds = str(told.reset_in_seconds)
    return f"{seconds} seconds" if seconds else ""


def _of_machine(error: Exception) -> _Told:
    """What lies on this side: offline mode, the network, the cache's disk."""
    from huggingface_hub import constants, errors

    number = getattr(error, "errno", None)
    if number in _NO_SPACE:
        what = "The disk of the Hub's cache is full."
        return (
            OutputError,
            what,
            "Free some space, or have HF_HOME name another place: finished files are kept.",
        )
    if number in _NO_ACCESS:
        return OutputError, "The Hub's cache cannot be written.", "Mend its permissions, or set HF_HOME."
    if constants.HF_HUB_OFFLINE:
        what = "There is no such folder here; HF_HUB_OFFLINE is set, but the cache lacks (part of) the repo."
        return RequestError, what, "Unset HF_HUB_OFFLINE, or fill the cache with `hf download` first."
    if isinstance(error, errors.LocalEntryNotFoundError) or "Connect" in type(error).__name__:
        what = f"The Hub ({constants.ENDPOINT}) cannot be reached, and the cache lacks (part of) the repo."
        return NetworkError, what, "Check the connection and HF_ENDPOINT, or give a local folder."
    what = "The download from the Hub failed."
    return NetworkError, what, "Check the connection and try again: finished files are kept."
