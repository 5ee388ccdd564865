"""A disk of which it is known what surely lasts through a power cut: what was synced.

The model is of what POSIX and Linux's file systems promise, and no more: data of a file last once the file is synced, a
name once its folder is; a rename or an exchange is done or not; changes of one name keep their order; a folder goes
away after what was in it. All else may come in any order or not at all, data by sectors, and lost data may be zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.make.recording import Op


@dataclass(eq=False)
class Node:
    """A file or a folder. `data` and `names` are what programs see, `safe` and `safe_names` what surely lasts."""

    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    is_synced: bool = True
    names: dict[str, Node] = field(default_factory=dict)
    safe_names: dict[str, Node] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """Names that change together. `gone`: the folder that it removes."""

    entries: list[tuple[Node, str, Node | None]]
    gone: Node | None = None
    synced: set[int] = field(default_factory=set)

    def follows(self, other: Change) -> bool:
        """Whether it can last only if the earlier one does."""
        same = any(f is g and name == n for f, name, _ in self.entries for g, n, _ in other.entries)
        return same or any(folder is self.gone for folder, _, _ in other.entries)


class Disk:
    """The folder that a recorder watched, and what of it lasts, after each of its operations."""

    def __init__(self) -> None:
        self.root = Node(is_folder=True)
        self.changes: list[Change] = []  # that are not synced
        self._handles: dict[int, Node] = {}

    @classmethod
    def of(cls, folder: Path) -> Disk:
        """What lies in a folder now, all of it synced."""
        disk = cls()
        for path in sorted(folder.rglob("*")):
            *above, name = path.relative_to(folder).parts
            node = Node(is_folder=path.is_dir())
            if path.is_file():
                node.data[:] = node.safe = path.read_bytes()
            parent = disk.find("/".join(above))
            assert parent is not None
            parent.names[name] = parent.safe_names[name] = node
        return disk

    def find(self, path: str, *, safely: bool = False) -> Node | None:
        """What has this name, or surely has it after a power cut."""
        node: Node | None = self.root
        for name in path.split("/") if path not in ("", ".") else ():
            node = None if node is None else (node.safe_names if safely else node.names).get(name)
        return node

    def is_safe(self, path: str) -> bool:
        """Whether a file or folder surely lasts, with its name and data."""
        node = self.find(path)
        return node is not None and node is self.find(path, safely=True) and node.is_synced

    def file(self, handle: int) -> Node:
        """What an open file is."""
        return self._handles[handle]

    # --- what programs do

    def apply(self, op: Op) -> None:
        """Do what was done."""
        if op.kind in ("write", "size", "sync"):
            node = self._handles[op.handle]
            if op.kind == "sync":
                self._sync(node)
            elif op.kind == "write":
                node.data.extend(bytes(max(0, op.offset - len(node.data))))
                node.data[op.offset : op.offset + len(op.data)] = op.data
                node.is_synced = False
            else:
                self._resize(node, op.size)
        elif op.kind == "open":
            self._open(op)
        else:
            self._name(op)

    def _open(self, op: Op) -> None:
        node = self.find(op.path)
        if node is None:
            folder, name = self._place(op.path)
            node = Node(is_folder=False)
            self._change([(folder, name, node)])
        elif op.size == 2:
            self._resize(node, 0)
        self._handles[op.handle] = node

    def _resize(self, node: Node, size: int) -> None:
        node.is_synced = node.is_synced and len(node.data) == size
        node.data[:] = node.data[:size].ljust(size, b"\0")

    def _name(self, op: Op) -> None:
        folder, name = self._place(op.path)
        if op.kind == "mkdir":
            self._change([(folder, name, Node(is_folder=True))])
        elif op.kind in ("unlink", "rmdir"):
            self._change([(folder, name, None)], folder.names[name])
        else:
            other, new = self._place(op.other)
            replaced = other.names.get(new) if op.kind == "exchange" else None
            self._change([(folder, name, replaced), (other, new, folder.names[name])])

    def _place(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        assert folder is not None, path
        return folder, name

    def _change(
        self, entries: list[tuple[Node, str, Node | None]], gone: Node | None = None
    ) -> None:
        self.changes.append(Change(entries, gone if gone is not None and gone.is_folder else None))
        for folder, name, node in entries:
            _set(folder.names, name, node)

    def _sync(self, node: Node) -> None:
        if not node.is_folder:
            node.safe, node.is_synced = bytes(node.data), True
            return
        for change in self.changes:
            change.synced |= {id(folder) for folder, _, _ in change.entries if folder is node}
        lasting: set[Change] = set()
        for change in reversed(self.changes):  # what a lasting one follows lasts as well
            is_synced = {id(folder) for folder, _, _ in change.entries} == change.synced
            if is_synced or any(later.follows(change) for later in lasting):
                lasting.add(change)
        for change in self.changes:
            for folder, name, at in change.entries if change in lasting else ():
                _set(folder.safe_names, name, at)
        self.changes = [change for change in self.changes if change not in lasting]

    def write_to(self, folder: Path, node: Node | None = None) -> None:
        """Write what programs see into an empty folder."""
        for name, child in (node or self.root).names.items():
            if child.is_folder:
                (folder / name).mkdir()
                self.write_to(folder / name, child)
            else:
                (folder / name).write_bytes(child.data)


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def paths_below(disk: Disk, path: str) -> Iterator[str]:
    """Every file and folder that programs see below a path."""
    node = disk.find(path)
    for name, child in node.names.items() if node is not None else ():
        yield f"{path}/{name}"
        if child.is_folder:
            yield from paths_below(disk, f"{path}/{name}")


def played(disk: Disk, ops: Iterable[Op]) -> Disk:
    """The disk after some operations."""
    for op in ops:
        disk.apply(op)
    return disk
