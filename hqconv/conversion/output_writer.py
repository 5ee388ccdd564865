"""The output files of one group: created at their full size, written in place, then finished together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hqconv.io.digests import sha256_of
from hqconv.io.durable_files import FileRecord, output_errors, partial, sync_folders
from hqconv.io.open_files import Descriptors
from hqconv.planning.output_units import OutFile


class UnitWriter:
    """The files of one group while they are written: any thread may write any place, each once."""

    def __init__(self, root: Path, files: tuple[OutFile, ...]) -> None:
        """Create every file at its full size under its temporary name, with its header."""
        self._root, self._files = root, files
        self._paths = {file.path: partial(root / file.path) for file in files}
        self._descriptors = Descriptors(lambda path: os.open(self._paths[path], os.O_RDWR | os.O_CLOEXEC))
        try:
            for file in files:
                self._create(file)
        except BaseException:
            self.abandon()
            raise

    def _create(self, file: OutFile) -> None:
        path = self._paths[file.path]
        with output_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, file.size_bytes)  # a full disk shows before the work
                _write_at(descriptor, file.header, 0)
            finally:
                os.close(descriptor)

    def write_at(self, file: int, offset_bytes: int, data: Any) -> None:
        """Write a C-contiguous buffer from a byte of a file on."""
        path = self._files[file].path
        with output_errors(self._root / path), self._descriptors.using(path) as descriptor:
            _write_at(descriptor, data, offset_bytes)

    def finish_file(self, file: OutFile, keep_on: Callable[[], object] | None = None) -> FileRecord:
        """Flush a file that is whole to the disk; its size and digest. Any thread may, for several files at once.

        keep_on: as of `sha256_of`.
        """
        with output_errors(self._root / file.path):
            with self._descriptors.using(file.path) as descriptor:
                os.fsync(descriptor)
            return FileRecord(file.path, file.size_bytes, sha256_of(self._paths[file.path], keep_on))

    def publish(self) -> None:
        """Give the files their final names, once all are flushed; the names last, and those of new folders too."""
        self._descriptors.close()
        for file in self._files:
            path = self._root / file.path
            with output_errors(path):
                self._paths[file.path].replace(path)
        with output_errors(self._root):
            sync_folders(self._root, {(self._root / file.path).parent for file in self._files})

    def abandon(self) -> None:
        """Remove what was written."""
        self._descriptors.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)


def _write_at(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
