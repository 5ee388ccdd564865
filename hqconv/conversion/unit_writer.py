"""The output files of one unit: created at full size under temporary names, written in place, flushed, renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hqconv.errors import OutputError
from hqconv.io.durable_files import FileRecord, output_errors, partial, sync_folders
from hqconv.io.file_access import CloseError, Descriptors, sha256_of, write_fully
from hqconv.planning.output_units import OutFile


class UnitWriter:
    """The files of one unit while they are written: any thread may write any range, each once."""

    def __init__(self, root: Path, files: tuple[OutFile, ...]) -> None:
        """Create every file at its full size under a temporary name, and write its header."""
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
                os.posix_fallocate(descriptor, 0, file.size_bytes)  # a full disk fails before the work
                write_fully(descriptor, file.header, 0)
            finally:
                os.close(descriptor)

    def write_at(self, file: int, offset_bytes: int, data: Any) -> None:
        """Write a C-contiguous buffer at an offset of a file."""
        path = self._files[file].path
        with output_errors(self._root / path), self._descriptors.using(path) as descriptor:
            write_fully(descriptor, data, offset_bytes)

    def finish_file(
        self, file: OutFile, check_cancelled: Callable[[], object] | None = None, chunk_bytes: int = 0
    ) -> FileRecord:
        """Flush a complete file to the disk, and return its size and digest; for any thread.

        check_cancelled: called from time to time; an exception of it ends the hashing. chunk_bytes: hashed in one call.
        """
        with output_errors(self._root / file.path):
            with self._descriptors.using(file.path) as descriptor:
                os.fsync(descriptor)
            digest = sha256_of(self._paths[file.path], check_cancelled, chunk_bytes)
            return FileRecord(file.path, file.size_bytes, digest)

    def publish(self) -> None:
        """Give the flushed files their final names, and flush the folders."""
        self._close()
        for file in self._files:
            path = self._root / file.path
            with output_errors(path):
                self._paths[file.path].replace(path)
        with output_errors(self._root):
            sync_folders(self._root, {(self._root / file.path).parent for file in self._files})

    def _close(self) -> None:
        try:
            self._descriptors.close()
        except CloseError as error:
            with output_errors(self._root / error.key):
                raise

    def abandon(self) -> None:
        """Remove the partial files."""
        with suppress(OutputError):  # the error that ended the work is the one to tell
            self._close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)
