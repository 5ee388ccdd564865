"""A Hugging Face Hub repo at one commit: its files with their sizes, byte ranges of them, and copies in the Hub cache.

huggingface_hub takes half a second to import, so that only functions import it; its exceptions become ours. Ranges are
requested here, not by its `HfFileSystem`, which downloads a whole file from a server that ignores ranges.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from hqconv.errors import (
    HqconvError,
    InputError,
    NetworkError,
    OutputError,
    RequestError,
    first_few,
)
from hqconv.io import checkpoint_files
from hqconv.io.safetensors_header import header_length
from hqconv.io.sidecar_files import MAX_CODE_BYTES, is_code_or_config
from hqconv.schemas.artifact_names import CARD, CONFIG, INDEX, MANIFEST, SINGLE
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, close_file, found_at

_LOG = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 15  # of a shard: most headers fit, so that one request is enough
_HASHED_BYTES = 64 << 20  # of one request
_TRIES = 4  # of a range whose transfer breaks off, and of a request that the Hub refuses without naming a waiting time
_MAX_WAIT_S = 330.0  # in all, for a Hub that was asked too often: its windows have five minutes
_RETRIED = (
    408,
    500,
    502,
    503,
    504,
)  # statuses on which the library repeats a request; 429 is for `patiently`
T = TypeVar("T")
# Small files that opening a repo needs, besides headers.
SMALL_FILES = (CONFIG, *checkpoint_files.QUANTIZATION_FILES, INDEX, MANIFEST, CARD)


def is_repo_id(src: str) -> bool:
    """Return True for a valid repo name (`org/name`) that is no path on this machine."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", src, re.ASCII) is not None and not Path(src).exists()


def no_repo(src: str) -> RequestError:
    """Return the error for a source that is neither a folder nor a repo's name."""
    expected = "a model folder, a GGUF file or a Hub repo id (org/name)"
    found = "an empty name" if not src else "no such path"
    if src and Path(src).exists():
        found = found_at(Path(src)) or "a file"
    remedy = close_file(Path(src), is_folder=True)
    return RequestError(
        "The checkpoint cannot be opened.", where=src, expected=expected, found=found, remedy=remedy
    )


# --- files of a commit


@dataclass(frozen=True)
class Listing:
    """Files of one commit of a repo, and their bytes by range requests.

    sizes: path → bytes, as reported by the Hub. digests: path → sha256 of the files stored in LFS.
    """

    repo_id: str
    commit: str
    sizes: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, repo_id: str, revision: str | None) -> Listing:
        """Request the commit of a branch, tag or commit from the Hub, and its files.

        Raises as `fetch`; RequestError too if the repo was renamed; InputError if the commit, a file's name or a digest
        could lead out of the cache.
        """
        info = patiently(lambda: _model_info(repo_id, revision))
        if info.id != repo_id:
            raise RequestError(
                "The Hub repo has another name now.",
                where=repo_id,
                found=info.id,
                remedy=f"Give {info.id}.",
            )
        files = list(info.siblings or ())
        for file in files:
            _check_name(repo_id, file.rfilename)
        what = "The Hub names no valid SHA-256 for a file."  # it becomes a file's name
        digests = {
            file.rfilename: _check_hex(file.lfs["sha256"], 64, what, f"{repo_id}/{file.rfilename}")
            for file in files
            if file.lfs
        }
        commit = check_commit(repo_id, info.sha)
        return cls(
            repo_id, commit, {file.rfilename: int(file.size or 0) for file in files}, digests
        )

    def fetched(self, root: Path, name: str) -> Path:
        """Return a file's path in the snapshot folder `root`; download the file if it is missing there."""
        if name in self.sizes and not (root / name).is_file():
            fetch_file(self.repo_id, self.commit, name)
        return root / name

    def read_head(self, name: str) -> bytes:
        """Read the bytes before the tensors of a safetensors file, by range requests.

        Raises InputError for an implausible header, else as `fetch`.
        """
        where, size = f"{self.repo_id}/{name}", self.sizes[name]
        head = self.read(name, 0, min(_FIRST_BYTES, size))
        num_bytes = header_length(where, head, size)
        if num_bytes > len(head):
            head += self.read(name, len(head), num_bytes)
        return head[:num_bytes]

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes begin … end - 1 of a file; a broken transfer is repeated. Raises as `fetch`."""
        return (
            patiently(lambda: self._read(name, begin, end), num_transfers=_TRIES)
            if begin < end
            else b""
        )

    def sha256(self, name: str, keep_on: Callable[[], object] | None = None) -> str:
        """Compute the SHA-256 of a file, read by range requests. keep_on: as in `sha256_of`. Raises as `fetch`."""
        digest = hashlib.sha256()
        for begin in range(0, self.sizes[name], _HASHED_BYTES):
            digest.update(self.read(name, begin, min(begin + _HASHED_BYTES, self.sizes[name])))
            if keep_on is not None:
                keep_on()
        return digest.hexdigest()

    def _read(self, name: str, begin: int, end: int) -> bytes:
        """Send one range request; close the connection early if the server sends the whole file."""
        from huggingface_hub import constants, hf_hub_url, utils

        library: Any = utils  # which has no type annotations
        headers = {
            **library.build_hf_headers(),
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        # Not on exceptions: one that is raised while bytes arrive would repeat the request inside this response.
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        kwargs = {"timeout": timeout, "retry_on_exceptions": (), "retry_on_status_codes": _RETRIED}
        url, data = hf_hub_url(self.repo_id, name, revision=self.commit), bytearray()
        with (
            explained(self.repo_id, self.commit),
            library.http_stream_backoff("GET", url, headers=headers, **kwargs) as response,
        ):
            library.hf_raise_for_status(response)
            skip = begin if response.status_code == 200 else 0
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= skip + end - begin:
                    break
        data = data[skip : skip + end - begin]
        if len(data) < end - begin:
            raise NetworkError(
                "The Hub sent fewer bytes of a file than it has.",
                where=f"{self.repo_id}/{name}",
                expected=end - begin,
                found=len(data),
                remedy="Try again.",
            )
        return bytes(data)


def _model_info(repo_id: str, revision: str | None) -> Any:
    """Request the commit of a branch, tag or commit, and its files with their sizes. Raises as `fetch`."""
    from huggingface_hub import HfApi, constants

    with explained(repo_id, revision):
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        return HfApi().model_info(repo_id, revision=revision, timeout=timeout, files_metadata=True)


def is_commit(revision: str | None) -> bool:
    """Return True for a revision that is a commit hash, no branch and no tag."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def check_commit(repo_id: str, commit: object) -> str:
    """Return a commit hash that the Hub named. Raises InputError for any other text: it becomes a folder's name."""
    return _check_hex(commit, 40, "The Hub names a commit that is no commit hash.", repo_id)


def _check_hex(text: object, num_digits: int, what: str, where: str) -> str:
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{num_digits}}}", text):
        expected = f"{num_digits} hexadecimal digits"
        raise InputError(
            what, where=where, expected=expected, found=repr(text), remedy="Check HF_ENDPOINT."
        )
    return text


def _check_name(repo_id: str, name: str) -> None:
    """Refuse a file name that is not a plain path inside the repo."""
    if "\\" in name or "\0" in name or {"", ".", ".."}.intersection(name.split("/")):
        what = "A file of the Hub repo has a name that could lead elsewhere."
        expected = "a path inside the repo"
        raise InputError(what, where=repo_id, expected=expected, found=repr(name))


# --- downloads into the Hub cache


def is_offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids requests to the Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch(
    repo_id: str, revision: str | None, names: Iterable[str], cache_dir: str | None = None
) -> Path:
    """Download files of a model repo to the Hub cache (or `cache_dir`); return the snapshot's folder.

    The folder's name is the commit hash. Offline, or where the Hub does not answer, it may lack files.
    Raises RequestError where repo or revision do not exist or access is denied, NetworkError where the download fails.
    """
    from huggingface_hub import snapshot_download

    _LOG.info(
        "Files of %s at %s are fetched, unless the cache has them.", repo_id, revision or "main"
    )
    patterns = [glob.escape(name) for name in names]
    with explained(repo_id, revision):
        folder: Any = snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, cache_dir=cache_dir
        )
    return Path(folder)


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """Find the cached snapshot of a branch, tag or commit without a request to the Hub; None without any."""
    repo, name = cache_folder() / f"models--{repo_id.replace('/', '--')}", revision or "main"
    with suppress(OSError, UnicodeDecodeError):
        commit = name if is_commit(name) else (repo / "refs" / name).read_text().strip()
        if is_commit(commit) and (repo / "snapshots" / commit).is_dir():
            return repo / "snapshots" / commit
    return None


def listed_weights(repo_id: str, commit: str) -> dict[str, tuple[int | None, str | None]]:
    """Request size and SHA-256 of a commit's safetensors files from the Hub; None where it does not name them.

    No waiting: raises as `fetch`, NetworkError also where the Hub was asked too often.
    """
    info = _model_info(repo_id, commit)
    files = [file for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
    return {file.rfilename: (file.size, file.lfs["sha256"] if file.lfs else None) for file in files}


def note_revision(root: Path, revision: str) -> None:
    """Note in the Hub cache of a snapshot's folder `root` that a branch or tag is at this commit, for offline starts.

    Does nothing where the cache cannot be written, or for a name that leads out of it.
    """
    refs = root.parent.parent / "refs"
    if {"", ".", ".."}.intersection(revision.split("/")) or revision == root.name:
        return
    with suppress(OSError):
        (refs / revision).parent.mkdir(parents=True, exist_ok=True)
        if (
            not (refs / revision).is_file()
            or (refs / revision).read_text(encoding="ascii") != root.name
        ):
            partial = refs / f"{revision}.{os.getpid()}.partial"
            partial.write_text(root.name, encoding="ascii")
            partial.replace(refs / revision)


def cache_folder() -> Path:
    """Return the folder of the Hub cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch_file(
    repo_id: str,
    commit: str,
    name: str,
    check: Callable[[], None] | None = None,
    local_dir: Path | None = None,
) -> Path:
    """Return one file's path in the Hub cache, or in the folder `local_dir`; download the file if it is missing.

    check: called between pieces of the download; its exception ends the download. No progress bar is shown then.
    Raises as `fetch`, and OutputError where the disk is full or cannot be written.
    """
    from huggingface_hub import hf_hub_download

    kwargs: dict[str, Any] = {} if check is None else {"tqdm_class": _silent_bar(check)}
    with explained(repo_id, commit):
        started = time.monotonic()
        path: Any = hf_hub_download(repo_id, name, revision=commit, local_dir=local_dir, **kwargs)
    _LOG.info(
        "Fetched %s/%s, or found it in the cache, in %.1f s.",
        repo_id,
        name,
        time.monotonic() - started,
    )
    return Path(path)


def _silent_bar(check: Callable[[], None]) -> Any:
    """A progress bar class that shows nothing, and calls `check` at each update."""
    from huggingface_hub import utils

    library: Any = utils
    base: Any = library.tqdm

    class Silent(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> Any:
            check()
            return super().update(n)

    return Silent


def open_repo(repo_id: str, revision: str | None) -> tuple[Path, Listing | None]:
    """Download a repo's small files, such as config.json; return the snapshot's folder and a listing of all files.

    Offline, and where the Hub fails but all weights are in the cache, the listing is None: all files are in the folder.
    Raises as `fetch`, and InputError for a repo without config.json and GGUF files.
    """
    try:
        listing = Listing.of(repo_id, revision)
    except HqconvError as error:
        root = cached_snapshot(repo_id, revision)
        is_usable = is_offline() or (
            isinstance(error, NetworkError) and root is not None and is_complete(root)
        )
        if root is None or not is_usable:
            raise
        return root, None
    code = [
        name
        for name, size in listing.sizes.items()
        if is_code_or_config(name) and size <= MAX_CODE_BYTES
    ]
    wanted = list(dict.fromkeys((*(name for name in SMALL_FILES if name in listing.sizes), *code)))
    if CONFIG not in wanted and not any(name.endswith(".gguf") for name in listing.sizes):
        what, remedy = f"The Hub repo has no {CONFIG}.", "Give the repo of a transformers model."
        found = first_few(sorted(listing.sizes)) or "no files"
        raise InputError(
            what, where=f"{repo_id}, revision {listing.commit}", found=found, remedy=remedy
        )
    root = fetch(repo_id, listing.commit, wanted)
    missing = next((name for name in wanted if not (root / name).is_file()), None)
    if missing is not None:
        raise NetworkError(
            "The Hub did not send a file that it has.",
            where=f"{repo_id}/{missing}",
            remedy="Try again.",
        )
    return root, listing


def is_complete(root: Path) -> bool:
    """Return True if a snapshot's folder has all weights that its index names, or all files of an artifact."""

    def names(file: str, key: str) -> Mapping[str, Any]:
        found = (
            checkpoint_files.read_json(root / file, max_bytes=MAX_LIST_BYTES)[0]
            if (root / file).is_file()
            else {}
        )
        return found[key] if isinstance(found.get(key), dict) else {}

    wanted = names(MANIFEST, "files") or {
        CONFIG,
        *(map(str, names(INDEX, "weight_map").values() or [SINGLE])),
    }
    return any(root.glob("*.gguf")) or all((root / name).is_file() for name in wanted)


# --- files in the Hub cache

# The cache keeps bytes in `blobs`, under their digest, and in `snapshots/<commit>` links to them under the files'
# names; on a file system without links, the files themselves.


def has_cached_bytes(root: Path, name: str, digest: str | None) -> bool:
    """Return True if the cache has a file of the snapshot `root`, or its bytes under another name or commit."""
    blobs = root.parent.parent / "blobs"
    return (root / name).exists() or (digest is not None and os.path.lexists(blobs / digest))


def has_partial_bytes(root: Path, digest: str | None) -> bool:
    """Return True if the cache of the snapshot `root` has bytes of a file whose download broke off: it will go on."""
    return digest is not None and any((root.parent.parent / "blobs").glob(f"{digest}*.incomplete"))


def cached_digest(path: Path) -> str | None:
    """Return the SHA-256 in the name of the cached bytes that `path` links to, without reading them.

    None for any other file: one of a folder that is no Hub cache, or a small one, whose bytes have another name.
    """
    try:
        bytes_at = Path(os.readlink(path))  # noqa: PTH115 - raises for what is no link
    except OSError:
        return None
    is_digest = re.fullmatch(r"[0-9a-f]{64}", bytes_at.name) is not None
    return bytes_at.name if is_digest and bytes_at.parent.name == "blobs" else None


def is_snapshot(root: Path) -> bool:
    """Return True for the folder of one commit in a Hub cache."""
    return root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir()


# --- errors of the Hub library

_SIGN_IN = "`hf auth login` or set HF_TOKEN"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNREACHABLE = (
    "Connect",
    "Proxy",
    "UnsupportedProtocol",
)  # in names of errors of httpx and its relatives
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_Explanation = tuple[type[HqconvError], str, str]  # the error's class, message and remedy


def explained(repo_id: str, revision: str | None) -> AbstractContextManager[None]:
    """Turn exceptions of the Hub library into ours."""
    return translated(lambda error: _explain(error, repo_id, revision or "main"))


@contextmanager
def translated(explain: Callable[[Exception], HqconvError]) -> Iterator[None]:
    """Raise `explain(error)` instead of an exception of the Hub library."""
    from huggingface_hub import errors

    # The base of its HTTP exceptions: of requests, httpx or httpx2, by the library's version.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    # RuntimeError comes from the Xet extension.
    failures = (OSError, ValueError, RuntimeError, http_error, errors.EntryNotFoundError)
    try:
        yield
    except HqconvError:
        raise
    except failures as error:
        raise explain(error) from error


def patiently(request: Callable[[], T], num_transfers: int = 1) -> T:
    """Call `request`, and again while the Hub answers that it was asked too often (HTTP 429), after the time it names.

    Waits _MAX_WAIT_S in all at most: a longer wait is left to the user. num_transfers: so often a request is sent that
    ends without an HTTP status; the library repeats others. Raises the errors of `request`.
    """
    left_s, number = _MAX_WAIT_S, 0
    while True:
        try:
            return request()
        except NetworkError as error:
            number, status = number + 1, status_of(error)
            told_s = _told_seconds(_response(error)) if status == 429 else None
            is_left = number < (_TRIES if status == 429 else num_transfers)
            if status not in (None, 429) or (told_s is None and not is_left):
                raise
            wait_s = 2.0**number if told_s is None else told_s + 1  # the header is rounded
            if wait_s > left_s:
                raise
            _LOG.warning("%s It is asked again in %.0f s.", error.what, wait_s)
            time.sleep(wait_s)
            left_s -= wait_s


def is_missing_revision(error: BaseException) -> bool:
    """Return True for an error of ours because the Hub has no such branch, tag or commit."""
    from huggingface_hub import errors

    return isinstance(error.__cause__, errors.RevisionNotFoundError)


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error of the Hub library, or of ours raised from one; None without any."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def _response(error: BaseException | None) -> Any:
    """Return the response behind an error, maybe the cause of an error on the cache; None without any."""
    while error is not None:
        response = vars(error).get("response")
        if response is not None:
            return response
        error = error.__cause__
    return None


def _explain(error: Exception, repo_id: str, revision: str) -> HqconvError:
    kind, what, remedy = (
        _of_repo(error, repo_id, revision) or _of_status(error) or _of_machine(error)
    )
    lines = str(error).strip().splitlines() or [""]
    found, status = f"{type(error).__name__}: {lines[0]}", status_of(error)
    if status is not None and str(status) not in found:
        found += f" (HTTP {status})"
    return kind(what, where=f"{repo_id}, revision {revision}", found=found, remedy=remedy)


def _of_repo(error: Exception, repo_id: str, revision: str) -> _Explanation | None:
    """Explain an error of the library that names a problem of the repo."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    # Subclasses first: gated is a kind of not found for the library.
    if isinstance(error, errors.GatedRepoError):
        return (
            RequestError,
            "The Hub repo is gated.",
            f"Accept its terms at {page}, then {_SIGN_IN}.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "There is no such folder here and no such repo on the Hub, or the repo is private."
        return RequestError, what, f"Check the spelling; for a private repo {_SIGN_IN}."
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = f"See the branches and tags at {page}/tree/main; a commit needs all its 40 digits."
        return RequestError, "The Hub repo has no such revision.", remedy
    if isinstance(error, errors.HFValidationError):
        what = "This is neither a folder nor a valid Hub repo id."
        return RequestError, what, "Give a folder or org/name."
    if isinstance(error, errors.DisabledRepoError):
        return RequestError, "The Hub repo is disabled.", f"See what its owner says at {page}."
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(
        error, errors.LocalEntryNotFoundError
    ):
        return InputError, "The Hub repo lacks a file.", f"See its files at {page}/tree/{revision}."
    return None


def _of_status(error: Exception) -> _Explanation | None:
    """Explain an HTTP status of the Hub."""
    status = status_of(error)
    if status == 401:
        return (
            RequestError,
            "The Hub does not accept the token, or wants one.",
            f"Sign in: {_SIGN_IN}.",
        )
    if status == 403:
        remedy = f"Give the token the right to read the repo, or take another: {_SIGN_IN}."
        return RequestError, "The Hub denies access to the repo.", remedy
    if status == 429:
        wait_s = _told_seconds(_response(error))
        after = (
            "Wait a few minutes and try again"
            if wait_s is None
            else f"Wait {wait_s:.0f} seconds and try again"
        )
        what = "The Hub was asked too often."
        return NetworkError, what, f"{after}; who is signed in ({_SIGN_IN}) may ask more often."
    if status == 404:  # a Hub says in a header what it does not find
        from huggingface_hub import constants

        what = f"The server at {constants.ENDPOINT} does not answer as the Hub does."
        return RequestError, what, "Check HF_ENDPOINT."
    if status is not None and status >= 500:
        what = "The Hub is out of order."
        return (
            NetworkError,
            what,
            "Try again later: what was fetched is kept. See https://status.huggingface.co.",
        )
    return None


def _told_seconds(response: Any) -> float | None:
    """Return the waiting time of Retry-After, or of the Hub's header of rate limits; None without any."""
    from huggingface_hub import utils

    text = response.headers.get("Retry-After", "")
    if text.isdigit():
        return float(text)
    with suppress(ValueError):  # an unreadable date
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    library: Any = utils
    limits = getattr(library, "parse_ratelimit_headers", None)
    limit = None if limits is None else limits(response.headers)
    return None if limit is None else float(limit.reset_in_seconds)


def is_unreachable(error: BaseException | None) -> bool:
    """Return True if no connection to the Hub is behind an error of its library."""
    while error is not None:
        if any(word in type(error).__name__ for word in _UNREACHABLE):
            return True
        error = error.__cause__
    return False


def _of_machine(error: Exception) -> _Explanation:
    """Explain an error of this machine: offline mode, the network, the cache's disk."""
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
        return (
            OutputError,
            "The Hub's cache cannot be written.",
            "Mend its permissions, or set HF_HOME.",
        )
    if constants.HF_HUB_OFFLINE:
        what = "There is no such folder here; HF_HUB_OFFLINE is set, but the cache lacks (part of) the repo."
        return (
            RequestError,
            what,
            "Unset HF_HUB_OFFLINE, or fill the cache with `hf download` first.",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or is_unreachable(error):
        what = f"The Hub ({constants.ENDPOINT}) cannot be reached, and the cache lacks (part of) the repo."
        return NetworkError, what, "Check the connection and HF_ENDPOINT, or give a local folder."
    if "Timeout" in type(error).__name__:
        what = f"The Hub ({constants.ENDPOINT}) does not answer."
        return NetworkError, what, "Try again later, or check the connection and HF_ENDPOINT."
    what = "The download from the Hub failed."
    return NetworkError, what, "Check the connection and try again: finished files are kept."
