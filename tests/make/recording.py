"""What a program asks of the disk below one folder, in order: every open, write, sync and change of names."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hqconv.io.durable_files

# Ways to change a disk that no conversion takes; one that would is not recorded, so that it must not pass unseen.
UNKNOWN = (
    "pwritev",
    "writev",
    "link",
    "symlink",
    "sendfile",
    "copy_file_range",
    "removedirs",
    "renames",
)


@dataclass(frozen=True)
class Op:
    """One call that went well.

    kind: open (with `size` 1 if it creates, 2 if it also empties), write, size (of the whole file), sync, mkdir,
    rmdir, unlink, rename, exchange. Files are meant by the `handle` that open gave, names by `path` and `other`.
    """

    kind: str
    path: str = ""
    other: str = ""
    handle: int = 0
    offset: int = 0
    data: bytes = b""
    size: int = 0


class Recorder:
    """Records what happens below `root` while it is `at_work`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.ops: list[Op] = []
        self._lock = threading.RLock()  # what is done and what is noted is one step
        self._handles: dict[int, int] = {}  # descriptor → handle
        self._count = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Puts itself between the program and `os`, `open` and the exchange of folders."""
        with ExitStack() as stack:
            for name, call in self._calls().items():
                stack.enter_context(patch.object(os, name, call))
            for name in UNKNOWN:
                stack.enter_context(patch.object(os, name, _refuse(name)))
            opens = self._file(io.open)
            for module in (io, builtins):
                stack.enter_context(patch.object(module, "open", opens))
            exchange = hqconv.io.durable_files
            at_once = self._exchange(exchange._exchange_at_once)
            stack.enter_context(patch.object(exchange, "_exchange_at_once", at_once))
            yield

    def adopt(self, descriptor: int, path: str, size: int = 0) -> None:
        """Take notice of an open file."""
        self._count += 1
        self._handles[descriptor] = self._count
        self._note("open", path, handle=self._count, size=size)

    def _inside(self, path: object) -> str | None:
        """The path below the root, or None for others."""
        if isinstance(path, int):
            return None
        try:
            return Path(os.path.abspath(os.fspath(path))).relative_to(self.root).as_posix()  # type: ignore[call-overload]  # noqa: PTH100
        except ValueError:
            return None

    def _note(self, kind: str, path: str = "", other: str = "", **words: Any) -> None:
        self.ops.append(Op(kind, path, other, **words))

    def _calls(self) -> dict[str, Callable[..., Any]]:
        names = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir")
        kinds = {"replace": "rename", "remove": "unlink"}
        return {
            "open": self._open(os.open),
            "close": self._of_file(os.close, self._closed),
            "write": self._of_file(os.write, self._wrote),
            "pwrite": self._of_file(os.pwrite, self._wrote),
            "ftruncate": self._of_file(os.ftruncate, self._sized),
            "truncate": _truncate,
            "posix_fallocate": self._of_file(os.posix_fallocate, self._sized),
            "fsync": self._of_file(os.fsync, self._synced),
            "fdatasync": self._of_file(os.fdatasync, self._synced),
            **{name: self._named(getattr(os, name), kinds.get(name, name)) for name in names},
        }

    # --- files

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            inside = self._inside(path)
            with self._lock:
                descriptor = real(path, flags, *args, **kwargs)
                self._handles.pop(descriptor, None)
                if inside is not None:
                    size = 2 if flags & os.O_TRUNC else 1 if flags & os.O_CREAT else 0
                    self.adopt(descriptor, inside, size)
            return descriptor

        return call

    def _of_file(self, real: Callable[..., Any], note: Callable[..., object]) -> Callable[..., Any]:
        """A call on a descriptor; `note` gets its handle, the result and the arguments."""

        def call(descriptor: int, *args: Any) -> Any:
            with self._lock:
                result = real(descriptor, *args)
                if descriptor in self._handles:
                    note(descriptor, result, *args)
            return result

        return call

    def _wrote(self, descriptor: int, count: int, data: Any, offset: int | None = None) -> None:
        if offset is None:
            offset = os.lseek(descriptor, 0, os.SEEK_CUR) - count
        written = bytes(memoryview(data).cast("B")[:count])
        self._note("write", handle=self._handles[descriptor], offset=offset, data=written)

    def _sized(self, descriptor: int, *_: object) -> None:
        size = os.fstat(descriptor).st_size
        self._note("size", handle=self._handles[descriptor], size=size)

    def _synced(self, descriptor: int, *_: object) -> None:
        self._note("sync", handle=self._handles[descriptor])

    def _closed(self, descriptor: int, *_: object) -> None:
        del self._handles[descriptor]

    def _file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`open` for writing: every write of its buffer is noted as one of `os`."""

        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self._inside(file) is None or not set(mode) & set("wax+"):
                return real(file, mode, *args, **kwargs)
            if mode not in ("wb", "xb", "ab") or any(
                word not in (-1, None) for word in (*args, *kwargs.values())
            ):
                raise AssertionError(f"the recorder does not know open(…, {mode!r}, …)")
            return io.BufferedWriter(_Noted(os.fspath(file), is_new=mode == "xb"))

        return call

    # --- names

    def _named(self, real: Callable[..., None], kind: str) -> Callable[..., None]:
        def call(*paths: Any, **kwargs: Any) -> None:
            inside = [self._inside(path) for path in paths if not isinstance(path, int)]
            with self._lock:
                real(*paths, **kwargs)
                if any(path is not None for path in inside):
                    assert not kwargs.get("dir_fd")
                    assert None not in inside, paths  # from or to another place
                    self._note(kind, *(path for path in inside if path is not None))

        return call

    def _exchange(self, real: Callable[[Path, Path], bool]) -> Callable[[Path, Path], bool]:
        def call(left: Path, right: Path) -> bool:
            with self._lock:
                done = real(left, right)
                if done:
                    paths = [self._inside(path) for path in (left, right)]
                    self._note("exchange", *(path for path in paths if path is not None))
            return done

        return call


class _Noted(io.RawIOBase):
    """A file that is written through `os`, where the recorder sees it."""

    def __init__(self, path: str, *, is_new: bool) -> None:
        how = os.O_EXCL if is_new else os.O_TRUNC
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def fileno(self) -> int:
        return self._descriptor

    def truncate(self, size: int | None = None) -> int:
        os.ftruncate(self._descriptor, size or 0)
        return size or 0

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _truncate(path: Any, size: int) -> None:
    """`os.truncate` by calls that are recorded."""
    descriptor = os.open(path, os.O_WRONLY)
    os.ftruncate(descriptor, size)
    os.close(descriptor)


def _refuse(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"the recorder does not know os.{name}")

    return call
