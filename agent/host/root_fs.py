"""A root file system on this machine, looked at and written to without ever leaving it.

The board's links are resolved inside its own root: an absolute link there means the board's, not this machine's.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from agent.contract.errors import ErrorCode, OperationError

_MAX_LINKS = 40


class RootFs:
    """One root file system; paths are written as the board sees them."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise OperationError(ErrorCode.NOT_FOUND, f"cannot open the root file system {root}: not a folder")
        if self.root == Path("/"):
            raise OperationError(
                ErrorCode.USAGE, "cannot provision /: that is this machine", "Name a board's mounted root file system."
            )

    def path(self, inside: str) -> Path:
        """Where that file of the board lies here; every link on the way but the last name is followed."""
        pending = list(PurePosixPath("/" + inside).parts[1:])
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop(0)
            if part == "..":
                done = done[:-1]
                continue
            here = self.root.joinpath(*done, part)
            if pending and here.is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    raise OperationError(ErrorCode.NOT_FOUND, f"cannot open {inside} in {self.root}: too many links")
                target = PurePosixPath(here.readlink())
                pending = [*(p for p in target.parts if p != "/"), *pending]
                done = [] if target.is_absolute() else done
                continue
            done.append(part)
        return self.root.joinpath(*done)

    def _follow(self, inside: str) -> Path:
        path = self.path(inside)
        for _ in range(_MAX_LINKS):
            if not path.is_symlink():
                return path
            target = PurePosixPath(path.readlink())
            parent = PurePosixPath("/") / path.parent.relative_to(self.root)
            path = self.path(str(target if target.is_absolute() else parent / target))
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot open {inside} in {self.root}: too many links")

    def exists(self, inside: str) -> bool:
        """Whether the board has that file, links followed."""
        return self._follow(inside).exists()

    def read(self, inside: str) -> str:
        """A text file of the board; empty when it is not there."""
        path = self._follow(inside)
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def folder(self, inside: str, mode: int = 0o755) -> Path:
        """That folder, made when absent with that mode, and what leads to it readable by all."""
        path = self._follow(inside)
        if not path.is_dir():
            parent = str(PurePosixPath("/" + inside).parent)
            if parent != "/":
                self.folder(parent)
            path.mkdir(mode=mode)
            path.chmod(mode)
        return path

    def write(self, inside: str, data: bytes, mode: int = 0o644) -> Path:
        """A file of the board, written whole."""
        name = PurePosixPath(inside).name
        path = self.folder(str(PurePosixPath("/" + inside).parent)) / name
        part = path.with_name(f".{name}.new")
        part.write_bytes(data)
        part.chmod(mode)
        part.replace(path)
        return path

    def link(self, inside: str, target: str) -> None:
        """A symbolic link of the board; one that points elsewhere is replaced, a file or folder is not."""
        path = self.folder(str(PurePosixPath("/" + inside).parent)) / PurePosixPath(inside).name
        if path.is_symlink():
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.exists():
            raise OperationError(
                ErrorCode.REQUIREMENT_UNMET,
                f"cannot link {inside} in {self.root}: there is something in its place",
                f"Move the content of {path} away.",
            )
        path.symlink_to(target)
