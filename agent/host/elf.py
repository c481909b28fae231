"""Shared objects made smaller, where that is safe.

Debug information is most of some wheels. But stripping what auditwheel or patchelf rewrote leaves segments that no
loader maps ("ELF load command address/offset not page-aligned": numpy and every bundled library), so those are left
alone, and every result is checked before it replaces the original.
"""

from __future__ import annotations

import struct
from pathlib import Path, PurePosixPath
from shutil import copyfile, which

from agent.contract.errors import ErrorCode, OperationError
from agent.host.target import native_arch
from agent.ports.process import run

_PAGE = 4096
_PT_LOAD = 1
_REWRITTEN = ("numpy",)


def find_strip(arch: str) -> str | None:
    """A strip program for that processor, or None."""
    names = ["llvm-strip", f"{arch}-linux-gnu-strip", *(["strip"] if arch == native_arch() else [])]
    return next((name for name in names if which(name)), None)


def strip_tree(folder: Path, program: str) -> int:
    """Strip what may be stripped below a folder of wheels; gives the bytes saved. Raises `build-failed`."""
    saved = 0
    for path in sorted(folder.rglob("*.so*")):
        inside = PurePosixPath(path.relative_to(folder))
        if path.is_symlink() or not _may_strip(inside):
            continue
        trial = path.with_name(path.name + ".stripped")
        copyfile(path, trial)
        finished = run([program, "--strip-unneeded", str(trial)], 60.0)
        if finished.status == 0 and loads_aligned(trial):
            saved += path.stat().st_size - trial.stat().st_size
            trial.replace(path)
        else:
            trial.unlink()
    return saved


def _may_strip(inside: PurePosixPath) -> bool:
    return inside.parts[0] not in _REWRITTEN and not any(part.endswith(".libs") for part in inside.parts)


def check_tree(folder: Path, arch: str) -> None:
    """Every shared object below the folder is for that processor and can be mapped. Raises `build-failed`."""
    for path in sorted(folder.rglob("*.so*")):
        if path.is_symlink() or not path.is_file():
            continue
        machine = elf_machine(path)
        if machine is not None and machine != arch:
            raise OperationError(ErrorCode.BUILD_FAILED, f"cannot use {path.name}: built for {machine}, not {arch}")
        if machine is not None and not loads_aligned(path):
            raise OperationError(ErrorCode.BUILD_FAILED, f"cannot use {path.name}: its segments are not page-aligned")


def elf_machine(path: Path) -> str | None:
    """`x86_64`, `aarch64`, `other`, or None when the file is not ELF."""
    with path.open("rb") as file:
        head = file.read(20)
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    return {62: "x86_64", 183: "aarch64"}.get(struct.unpack_from("<H", head, 18)[0], "other")


def loads_aligned(path: Path) -> bool:
    """Whether a loader can map every segment of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        return False
    table, entry_size, entries = struct.unpack_from("<32xQ14xHH", data)
    if table + entry_size * entries > len(data):
        return False
    for index in range(entries):
        kind, _, offset, address = struct.unpack_from("<IIQQ", data, table + index * entry_size)
        if kind == _PT_LOAD and (offset - address) % _PAGE:
            return False
    return True
