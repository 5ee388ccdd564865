"""A Hugging Face Hub repo: files of one commit, byte ranges of them, copies in the Hub cache, commits to a branch.

huggingface_hub takes half a second to import, so that only functions import it; its exceptions become ours. Ranges are
requested here, not by its `HfFileSystem`, which downloads a whole file from a server that ignores ranges.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import (
    HqconvError,
    InputError,
    NetworkError,
    OutputError,
    RequestError,
    VerificationError,
    first_few,
)
from hqconv.io import checkpoint_files
from hqconv.io.file_snapshot import state_of
from hqconv.io.safetensors_header import header_length
from hqconv.schemas.artifact_names import CARD, CONFIG, INDEX, MANIFEST, SINGLE
from hqconv.schemas.untrusted_files import close_file, found_at

_FIRST_BYTES = 1 << 15  # of a shard: most headers fit, so that one request is enough
_TRIES = 4  # of a range whose transfer breaks off; the library repeats what the Hub refuses
# Small files that opening a repo needs, besides headers.
SMALL_FILES = (CONFIG, *checkpoint_files.QUANTIZATION_FILES, INDEX, MANIFEST, CARD)


def is_repo_id(src: str) -> bool:
    """Return True for a valid repo name (`org/name`) that is no path on this machine."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", src, re.ASCII) is not None and not Path(src).exists()


def no_repo(src: str) -> RequestError:
    """Return the error for a source that is neither a folder nor a repo's name."""
    found = found_at(Path(src)) or "a file"  # Path("") is the current folder
    return RequestError(
        "The checkpoint cannot be opened.",
        where=src,
        expected="a model folder, a GGUF file or a Hub repo id (org/name)",
        found=found if src else "an empty name",
        remedy=close_file(Path(src), is_folder=True),
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
    digests: Mapping[str, str]

    @classmethod
    def of(cls, repo_id: str, revision: str | None) -> Listing:
        """Request the commit of a branch, tag or commit from the Hub, and its files.

        Raises as `fetch`; InputError if the commit, a file's name or a digest could lead out of the cache.
        """
        info = _model_info(repo_id, revision)
        sizes = {}
        digests = {}
        for file in info.siblings or ():
            name = file.rfilename
            _check_name(repo_id, name)
            sizes[name] = int(file.size or 0)
            if file.lfs:  # its digest becomes a file's name
                digests[name] = _check_hex(file.lfs["sha256"], 64, f"{repo_id}/{name}")
        return cls(repo_id, check_commit(repo_id, info.sha), sizes, digests)

    def fetched(self, root: Path, name: str) -> Path:
        """Return a file's path in the snapshot folder `root`; download the file if it is missing there."""
        if name in self.sizes and not (root / name).is_file():
            fetch_file(self.repo_id, self.commit, name)
        return root / name

    def read_head(self, name: str) -> bytes:
        """Read the bytes before the tensors of a safetensors file, by range requests.

        Raises InputError for an implausible header, else as `fetch`.
        """
        size = self.sizes[name]
        head = self.read(name, 0, min(_FIRST_BYTES, size))
        num_bytes = header_length(f"{self.repo_id}/{name}", head, size)
        if num_bytes > len(head):
            head += self.read(name, len(head), num_bytes)
        return head[:num_bytes]

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes begin … end - 1 of a file; a broken transfer is repeated. Raises as `fetch`."""
        num_tries = 0
        while begin < end:
            try:
                return self._read(name, begin, end)
            except NetworkError as error:
                num_tries += 1
                if num_tries == _TRIES or status_of(error) is not None:
                    raise
                time.sleep(2**num_tries)
        return b""

    def _read(self, name: str, begin: int, end: int) -> bytes:
        """Send one range request; close the connection early if the server sends the whole file."""
        from huggingface_hub import constants, hf_hub_url, utils

        library: Any = utils  # which has no type annotations
        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        data = bytearray()
        wanted = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        # Not on exceptions: one that is raised while bytes arrive would repeat the request inside this response.
        request = library.http_stream_backoff(
            "GET",
            url,
            headers=library.build_hf_headers() | wanted,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
        )
        with explained(self.repo_id, self.commit), request as response:
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
        return HfApi().model_info(
            repo_id,
            revision=revision,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            files_metadata=True,
        )


def is_commit(revision: str | None) -> bool:
    """Return True for a revision that is a commit hash, no branch and no tag."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def check_commit(repo_id: str, commit: object) -> str:
    """Return a commit hash that the Hub named. Raises InputError for any other text: it becomes a folder's name."""
    return _check_hex(commit, 40, repo_id)


def _check_hex(text: object, num_digits: int, where: str) -> str:
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{num_digits}}}", text):
        raise InputError(
            "The Hub names a commit or a digest that is none.",
            where=where,
            expected=f"{num_digits} hexadecimal digits",
            found=repr(text),
            remedy="Check HF_ENDPOINT.",
        )
    return text


def _check_name(repo_id: str, name: str) -> None:
    """Refuse a file name that is not a plain path inside the repo."""
    if "\\" in name or "\0" in name or {"", ".", ".."}.intersection(name.split("/")):
        raise InputError(
            "A file of the Hub repo has a name that could lead elsewhere.",
            where=repo_id,
            expected="a path inside the repo",
            found=repr(name),
        )


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

    patterns = [glob.escape(name) for name in names]
    with explained(repo_id, revision):
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, cache_dir=cache_dir
        )
    return Path(folder)


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

    kwargs = {} if check is None else {"tqdm_class": _silent_bar(check)}
    with explained(repo_id, commit):
        path = hf_hub_download(repo_id, name, revision=commit, local_dir=local_dir, **kwargs)
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
    wanted = [name for name in SMALL_FILES if name in listing.sizes]
    if CONFIG not in wanted and not any(name.endswith(".gguf") for name in listing.sizes):
        raise InputError(
            f"The Hub repo has no {CONFIG}.",
            where=f"{repo_id}, revision {listing.commit}",
            found=first_few(sorted(listing.sizes)) or "no files",
            remedy="Give the repo of a transformers model.",
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


# --- files in the Hub cache

# The cache keeps bytes in `blobs`, under their digest, and in `snapshots/<commit>` links to them under the files'
# names; on a file system without links, the files themselves.


def cache_folder() -> Path:
    """Return the folder of the Hub cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """Find the cached snapshot of a branch, tag or commit without a request to the Hub; None without any."""
    repo = cache_folder() / f"models--{repo_id.replace('/', '--')}"
    name = revision or "main"
    with suppress(OSError, UnicodeDecodeError):
        commit = name if is_commit(name) else (repo / "refs" / name).read_text().strip()
        if is_commit(commit) and (repo / "snapshots" / commit).is_dir():
            return repo / "snapshots" / commit
    return None


def is_complete(root: Path) -> bool:
    """Return True if a snapshot's folder has all weights that its index names, or GGUF files."""
    weight_map, _ = checkpoint_files.read_weight_map(root)
    names = {SINGLE} if weight_map is None else set(weight_map.values())
    return any(root.glob("*.gguf")) or all((root / name).is_file() for name in names)


def has_cached_bytes(root: Path, digest: str | None) -> bool:
    """Return True if the cache of the snapshot `root` has the bytes with a digest, maybe of another commit."""
    return digest is not None and os.path.lexists(root.parent.parent / "blobs" / digest)


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


def cached_digests(root: Path) -> dict[str, str]:
    """Return name → `cached_digest` of the files in a snapshot's folder that have one."""
    found = {path.name: cached_digest(path) for path in root.iterdir()}
    return {name: digest for name, digest in found.items() if digest is not None}


def is_snapshot(root: Path) -> bool:
    """Return True for the folder of one commit in a Hub cache."""
    return root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir()


def note_revision(root: Path, revision: str) -> None:
    """Note in the Hub cache of a snapshot's folder `root` that a branch or tag is at this commit, for offline starts.

    Does nothing where the cache cannot be written, or for a name that leads out of it.
    """
    refs = root.parent.parent / "refs"
    if {"", ".", ".."}.intersection(revision.split("/")) or revision == root.name:
        return
    with suppress(OSError):
        (refs / revision).parent.mkdir(parents=True, exist_ok=True)
        partial = refs / f"{revision}.{os.getpid()}.partial"
        partial.write_text(root.name, encoding="ascii")
        partial.replace(refs / revision)


# --- a branch that gets files


def branch_exists(repo_id: str, branch: str | None) -> bool:
    """Return True if a repo and one of its branches exist, None for the main one."""
    from huggingface_hub import HfApi

    with explained(repo_id, branch):
        return HfApi().revision_exists(repo_id, branch or "main")


def create_branch(repo_id: str, branch: str | None, *, private: bool) -> None:
    """Create a repo and the branch if they are missing. Raises as `check_private`."""
    from huggingface_hub import HfApi

    with explained(repo_id, branch):
        HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
        if branch is not None:
            HfApi().create_branch(repo_id, branch=branch, exist_ok=True)
    if private:
        check_private(repo_id)


def check_private(repo_id: str) -> None:
    """Raise RequestError for a public repo."""
    if not _model_info(repo_id, None).private:
        raise RequestError(
            "The repo is there already, and is public.",
            where=repo_id,
            expected="a private repo",
            remedy="Make it private, or leave --private out.",
        )


def commit_files(
    repo_id: str,
    branch: str | None,
    title: str,
    files: Mapping[str, bytes | Path],
    digests: Mapping[str, str],
    obsolete: Iterable[str],
    parent: str,
) -> str:
    """Create one commit on top of `parent` that adds files and deletes obsolete ones; return its hash.

    The library sends no file that the branch has, and makes no commit that changes nothing.
    digests: the SHA-256 that files must have. Raises VerificationError for a file with another one, OutputError
    where a file changes while it is sent.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    def states() -> list[object]:
        return [state_of(content) for content in files.values() if isinstance(content, Path)]

    before = states()
    with explained(repo_id, branch):
        additions = []
        for name, content in files.items():
            data = content if isinstance(content, bytes) else str(content)
            addition = CommitOperationAdd(name, data)
            sha256 = addition.upload_info.sha256.hex()
            if sha256 != digests.get(name, sha256):
                raise VerificationError(
                    "A file of the artifact has other bytes than the manifest lists.",
                    where=name,
                    expected=f"sha256 {digests[name]}",
                    found=f"sha256 {sha256}",
                    remedy="Nothing was published. Verify the artifact; convert again, or copy it again.",
                )
            additions.append(addition)
        kwargs: Any = {"revision": branch}
        HfApi().preupload_lfs_files(repo_id, additions, free_memory=False, **kwargs)
        if before != states():
            raise OutputError(
                "A file changed while it was sent.",
                where=repo_id,
                remedy="Nothing was published. Push again.",
            )
        deletions = [CommitOperationDelete(name, is_folder=False) for name in obsolete]
        kwargs |= {"commit_message": title, "parent_commit": parent}
        return str(HfApi().create_commit(repo_id, [*deletions, *additions], **kwargs).oid)


# --- errors of the Hub library

_SIGN_IN = "`hf auth login` or set HF_TOKEN"
# In names of errors of httpx and its relatives.
_UNREACHABLE = ("Connect", "Proxy", "Timeout", "UnsupportedProtocol")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of the Hub library into ours."""
    from huggingface_hub import errors

    # The base of its HTTP exceptions: of requests, httpx or httpx2, by the library's version.
    http_error = vars(errors)["HTTPError"]
    # RuntimeError comes from the Xet extension.
    failures = (OSError, ValueError, RuntimeError, http_error, errors.EntryNotFoundError)
    try:
        yield
    except failures as error:
        raise _explain(error, repo_id, revision or "main") from error


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error of the Hub library, or of ours raised from one; None without any."""
    while error is not None:
        response = vars(error).get("response")
        if response is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _is_unreachable(error: BaseException | None) -> bool:
    """Return True if no connection to the Hub is behind an error of its library."""
    while error is not None:
        if any(word in type(error).__name__ for word in _UNREACHABLE):
            return True
        error = error.__cause__
    return False


def _explain(error: Exception, repo_id: str, revision: str) -> HqconvError:
    """Return our error for one of the library: the first row that fits it."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    status = status_of(error)
    page = f"{endpoint}/{repo_id}"
    is_local = isinstance(error, errors.LocalEntryNotFoundError)
    rows = (
        (
            isinstance(error, errors.GatedRepoError),
            RequestError,
            "The Hub repo is gated.",
            f"Accept its terms at {page}, then {_SIGN_IN}.",
        ),
        (
            isinstance(error, errors.RepositoryNotFoundError),
            RequestError,
            "There is no such folder here and no such repo on the Hub, or the repo is private.",
            f"Check the spelling; for a private repo {_SIGN_IN}.",
        ),
        (
            isinstance(error, errors.RevisionNotFoundError),
            RequestError,
            "The Hub repo has no such revision.",
            f"See the branches and tags at {page}/tree/main; a commit needs all its 40 digits.",
        ),
        (
            isinstance(error, errors.HFValidationError),
            RequestError,
            "This is neither a folder nor a valid Hub repo id.",
            "Give a folder or org/name.",
        ),
        (
            isinstance(error, errors.EntryNotFoundError) and not is_local,
            InputError,
            "The Hub repo lacks a file.",
            f"See its files at {page}/tree/{revision}.",
        ),
        (
            status in (401, 403),
            RequestError,
            "The Hub denies access to the repo, or does not accept the token.",
            f"Give the token the right to the repo, or take another: {_SIGN_IN}.",
        ),
        (
            status == 404,  # a Hub says in a header what it does not find
            RequestError,
            f"The server at {endpoint} does not answer as the Hub does.",
            "Check HF_ENDPOINT.",
        ),
        (
            status == 412,
            RequestError,
            "Somebody else changed the Hub repo meanwhile.",
            "Repeat the same command.",
        ),
        (
            status == 429,
            NetworkError,
            "The Hub was asked too often.",
            f"Wait a few minutes and try again; who is signed in ({_SIGN_IN}) may ask more often.",
        ),
        (
            status is not None and status >= 500,
            NetworkError,
            "The Hub is out of order.",
            "Try again later: what was fetched is kept. See https://status.huggingface.co.",
        ),
        (
            getattr(error, "errno", None) in _DISK_ERRORS,
            OutputError,
            "The Hub's cache cannot be written.",
            "Free some space, mend its permissions, or have HF_HOME name another place.",
        ),
        (
            bool(constants.HF_HUB_OFFLINE),
            RequestError,
            "There is no such folder here; HF_HUB_OFFLINE is set, but the cache lacks (part of) the repo.",
            "Unset HF_HUB_OFFLINE, or fill the cache with `hf download` first.",
        ),
        (
            is_local or _is_unreachable(error),
            NetworkError,
            f"The Hub ({endpoint}) cannot be reached, and the cache lacks (part of) the repo.",
            "Check the connection and HF_ENDPOINT, or give a local folder.",
        ),
        (
            True,
            NetworkError,
            "The transfer from or to the Hub failed.",
            "Check the connection and try again: finished files are kept.",
        ),
    )
    kind, what, remedy = next(row[1:] for row in rows if row[0])
    found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if status is not None:
        found += f" (HTTP {status})"
    return kind(what, where=f"{repo_id}, revision {revision}", found=found, remedy=remedy)
