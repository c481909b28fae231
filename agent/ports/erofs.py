"""Writes a small EROFS image: plain files, folders and extended attributes, uncompressed, the same bytes every time.

A board makes one image by itself, the module index of a runtime, and has no mkfs. The layout is the kernel's
Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h: compact inodes, flat data, inline attributes, no feature
bits, so that every kernel with EROFS reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

_BLOCK = 4096
_SLOT = 32  # inodes are numbered in steps of this
_SUPER_AT, _SUPER_BYTES = 1024, 128
_MAGIC = 0xE0F5E1E2
_DIRENT = struct.Struct("<QHBB")
_FILE, _FOLDER = 1, 2
_FILE_MODE, _FOLDER_MODE = 0o100644, 0o040755
_USER = 1  # the prefix `user.` of an attribute's name


@dataclass(slots=True)
class _Node:
    """A file (`data`) or a folder (`entries`); where it lies is settled as the image is laid out."""

    data: bytes = b""
    entries: dict[str, _Node] | None = None
    attributes: dict[str, bytes] = field(default_factory=dict)
    number: int = 0
    block: int = 0


def image_of(files: Mapping[str, bytes], attributes: Mapping[str, Mapping[str, bytes]] | None = None) -> bytes:
    """The image that holds these files, by relative path; `attributes`: of files, by name without `user.`."""
    root = _Node(entries={})
    for path in sorted(files):
        node = _placed(root, path.split("/"))
        node.data = files[path]
        node.attributes = dict((attributes or {}).get(path, {}))
    nodes = _all(root)
    at = 0
    for node in nodes:
        node.number = at // _SLOT
        at += _rounded(32 + len(_inline(node)), _SLOT)
    first_block = 1 + _rounded(at, _BLOCK) // _BLOCK
    contents: list[bytes] = []
    for node in nodes:
        # Numbers and sizes of the others are known now; a folder names them.
        node.data = _listed(node, _parent(root, node, nodes)) if node.entries is not None else node.data
        node.block = first_block + sum(len(content) for content in contents) // _BLOCK
        contents.append(node.data.ljust(_rounded(len(node.data), _BLOCK), b"\0"))
    inodes = b"".join(_inode(node, index) for index, node in enumerate(nodes, 1))
    data = b"".join(contents)
    blocks = first_block + len(data) // _BLOCK
    return _super(root, len(nodes), blocks) + inodes.ljust((first_block - 1) * _BLOCK, b"\0") + data


def _placed(root: _Node, parts: list[str]) -> _Node:
    node = root
    for index, part in enumerate(parts):
        assert node.entries is not None  # noqa: S101 - a path that leads through a file is a mistake of the caller
        leaf = index == len(parts) - 1
        node = node.entries.setdefault(part, _Node(entries=None if leaf else {}))
    return node


def _all(node: _Node) -> list[_Node]:
    return [node, *(inner for name in sorted(node.entries or {}) for inner in _all((node.entries or {})[name]))]


def _parent(root: _Node, node: _Node, nodes: list[_Node]) -> _Node:
    return next((other for other in nodes if any(n is node for n in (other.entries or {}).values())), root)


def _listed(node: _Node, parent: _Node) -> bytes:
    """A folder's blocks: in each the entries, and then their names, sorted over all."""
    rows = [(b".", node), (b"..", parent)]
    rows += [(name.encode(), inner) for name, inner in (node.entries or {}).items()]
    blocks: list[bytes] = []
    batch: list[tuple[bytes, _Node]] = []
    used = 0
    for row in sorted(rows, key=lambda row: row[0]):
        size = _DIRENT.size + len(row[0])
        if used + size > _BLOCK:
            blocks.append(_dir_block(batch).ljust(_BLOCK, b"\0"))
            batch, used = [], 0
        batch.append(row)
        used += size
    return b"".join([*blocks, _dir_block(batch)])


def _dir_block(rows: list[tuple[bytes, _Node]]) -> bytes:
    at = len(rows) * _DIRENT.size
    heads = []
    for name, node in rows:
        heads.append(_DIRENT.pack(node.number, at, _FILE if node.entries is None else _FOLDER, 0))
        at += len(name)
    return b"".join(heads) + b"".join(name for name, _ in rows)


def _inline(node: _Node) -> bytes:
    """The attributes behind an inode."""
    if not node.attributes:
        return b""
    body = bytes(12)  # no filter, nothing shared
    for name, value in sorted(node.attributes.items()):
        entry = struct.pack("<BBH", len(name), _USER, len(value)) + name.encode() + value
        body += entry.ljust(_rounded(len(entry), 4), b"\0")
    return body


def _inode(node: _Node, index: int) -> bytes:
    inline = _inline(node)
    links = 1 if node.entries is None else 2 + sum(inner.entries is not None for inner in node.entries.values())
    mode = _FILE_MODE if node.entries is None else _FOLDER_MODE
    count = (len(inline) - 12) // 4 + 1 if inline else 0
    head = struct.pack("<HHHHIIIIHHI", 0, count, mode, links, len(node.data), 0, node.block, index, 0, 0, 0)
    return (head + inline).ljust(_rounded(len(head) + len(inline), _SLOT), b"\0")


def _super(root: _Node, inodes: int, blocks: int) -> bytes:
    fields = struct.pack("<IIIBBHQQIIII", _MAGIC, 0, 0, 12, 0, root.number, inodes, 0, 0, blocks, 1, 0)
    return (bytes(_SUPER_AT) + fields.ljust(_SUPER_BYTES, b"\0")).ljust(_BLOCK, b"\0")


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
