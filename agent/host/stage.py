"""The tree of one extension, before it becomes an image: what the project wrote, laid out, checked and normalised.

An image's root directories take the place of the board's own in the overlay, so a mode that came from this machine's
umask could lock every user out of /usr/bin: directories are 0755, files 0755 or 0644 by their owner's execute bit, and
anything else has to be asked for under `modes:`. A sysext holds /usr and /opt, a confext /etc, and neither an
os-release nor an extension-release of its own.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import MAX_EXTENSIONS
from agent.host.model import keep_only
from agent.host.project import ExtensionPart, Project

MODEL_FOLDER = "usr/share/avocado/model"
RELEASE_XATTR = "user.extension-release.strict"
_ROOTS = {"sysext": ("usr", "opt"), "confext": ("etc",)}
_RELEASE_FOLDER = {"sysext": "usr/lib/extension-release.d", "confext": "etc/extension-release.d"}
_UPHOLDS = "usr/lib/systemd/system/multi-user.target.upholds"
_READ_BY_RELOAD = ("usr/lib/systemd", "etc/systemd", "usr/share/dbus-1", "etc/dbus-1")
_SKIPPED = {"__pycache__", ".gitkeep", ".DS_Store"}
CAPABILITY_XATTR = "security.capability"
# A browser's note of where a file came from, the default ACL of the folder that is built in: this machine's own.
_FOREIGN_XATTRS = ("user.", "system.posix_acl_")

_LAUNCHER = """\
#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "/{folder}")
from {module} import {function}

sys.exit({function}())
"""


def lay_out(project: Project, name: str, part: ExtensionPart, root: Path) -> None:
    """Fill `root` with everything but the wheels and their bytecode. Raises `bad-project`."""
    for tree in part.overlay:
        _copy(project.path(tree), root, name)
    for inside, source in part.files.items():
        _copy(project.path(source), root / inside, name)
    if part.model is not None:
        _copy(project.path(part.model), root / MODEL_FOLDER, name)
        keep_only(root / MODEL_FOLDER, project.target.accelerator)
    if part.python is not None:
        folder = root / part.python.folder
        for package in part.python.packages:
            _copy_package(project.path(package), folder, name)
        for excluded in part.python.exclude:
            _remove(folder / excluded)
        for launcher, entry in part.python.launchers.items():
            module, function = entry.split(":")
            text = _LAUNCHER.format(folder=part.python.folder, module=module, function=function)
            _write(root / "usr/bin" / launcher, text, executable=True)
    for unit in part.upholds:
        link = root / _UPHOLDS / unit
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../{unit}")
    _refuse_foreign(root, name, part)
    for kind in part.types:
        release = root / _RELEASE_FOLDER[kind] / f"extension-release.{name}"
        _write(release, _release(project, part, kind, reloads=part.reload_manager or _brings_units(root)))
        if part.reload_manager:
            _link_merge_names(release, name)


def _link_merge_names(release: Path, name: str) -> None:
    """Let systemd find the release under every name the image may be merged by.

    Before a merge the xattr is enough, since an image holds one release. After it, systemd looks for
    EXTENSION_RELOAD_MANAGER= in the merged /usr, where the releases of all images lie: under a name like
    `95-<name>` it finds several, takes that for ambiguous and reloads nothing, and at boot no unit of an extension
    would start (need_reload() in src/sysext/sysext.c, v257). It follows links; its search by xattr skips them.
    """
    for number in range(100 - MAX_EXTENSIONS, 100):
        release.with_name(f"extension-release.{number:02d}-{name}").symlink_to(release.name)


def _brings_units(root: Path) -> bool:
    return any((root / folder).is_dir() for folder in _READ_BY_RELOAD)


def _release(project: Project, part: ExtensionPart, kind: str, *, reloads: bool) -> str:
    """The extension-release. Systemd's own keys first, then those the agent obeys."""
    target = project.target
    lines = {
        "ID": target.os_id,
        "VERSION_ID": f'"{target.os_version_id}"',
        "ARCHITECTURE": target.systemd_architecture,
        f"{kind.upper()}_SCOPE": "system",
    }
    if part.reload_manager:
        lines["EXTENSION_RELOAD_MANAGER"] = "1"
    elif not reloads:
        # Said, so that the agent need not reload systemd while the services are away.
        lines["EXTENSION_RELOAD_MANAGER"] = "0"
    several = {
        "AVOCADO_ENABLE_SERVICES": " ".join(part.enable_services),
        "AVOCADO_MODPROBE": " ".join(part.modprobe),
        "AVOCADO_ON_MERGE": "; ".join(part.on_merge),
        "AVOCADO_ON_UNMERGE": "; ".join(part.on_unmerge),
    }
    lines |= {key: f'"{value}"' for key, value in several.items() if value}
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def normalise(root: Path, part: ExtensionPart) -> None:
    """Give every directory and file the mode it has on every machine, whatever the umask and the ACLs were."""
    for path in [root, *walk(root)]:
        if not path.is_symlink():
            for key in os.listxattr(path):
                if key.startswith(_FOREIGN_XATTRS):
                    os.removexattr(path, key)
            executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)
    for inside, mode in part.modes.items():
        path = root / inside
        if path.is_symlink() or not path.exists():
            raise OperationError(ErrorCode.BAD_PROJECT, f"cannot set the mode of {inside}: the image does not hold it")
        path.chmod(int(mode, 8))


def mark_release(root: Path, name: str, part: ExtensionPart) -> None:
    """Set the xattr that lets an image be named `NN-<name>.raw`.

    The very last touch: an editor or `sed -i` that replaces the file afterwards drops it, and systemd then refuses
    every image on the board.
    """
    for kind in part.types:
        path = root / _RELEASE_FOLDER[kind] / f"extension-release.{name}"
        try:
            os.setxattr(path, RELEASE_XATTR, b"0")
        except OSError as cause:
            raise OperationError(
                ErrorCode.BUILD_FAILED,
                f"cannot set the extended attribute {RELEASE_XATTR} in {root}: {cause.strerror}",
                "Build on a file system with extended attributes, such as ext4, xfs or btrfs.",
            ) from cause


def walk(root: Path) -> Iterator[Path]:
    """Every path below `root`, directories before their content, in an order that is the same everywhere."""
    for path in sorted(root.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)


def _copy(source: Path, destination: Path, name: str) -> None:
    if not source.exists():
        raise OperationError(
            ErrorCode.BAD_PROJECT,
            f"cannot build {name}: {source} does not exist",
            "Run `make model` first." if "models" in source.parts or "assets" in source.parts else "",
        )
    if source.is_dir():
        destination.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir()):
            if path.name not in _SKIPPED:
                _copy_one(path, destination / path.name, name)
    else:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _copy_one(source, destination, name)


def _copy_one(source: Path, destination: Path, name: str) -> None:
    if source.is_symlink():
        destination.symlink_to(source.readlink())
    elif source.is_dir():
        _copy(source, destination, name)
    elif source.is_file():
        shutil.copyfile(source, destination)
        destination.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)
        if CAPABILITY_XATTR in os.listxattr(source):
            os.setxattr(destination, CAPABILITY_XATTR, os.getxattr(source, CAPABILITY_XATTR))
    else:
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot build {name}: {source} is not a file, folder or link")


def _copy_package(source: Path, folder: Path, name: str) -> None:
    if not (source / "__init__.py").is_file():
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot build {name}: {source} is not a Python package")
    _copy(source, folder / source.name, name)
    for stale in [path for path in walk(folder / source.name) if path.suffix == ".pyc"]:
        stale.unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, text: str, *, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755 if executable else 0o644)


def _refuse_foreign(root: Path, name: str, part: ExtensionPart) -> None:
    allowed = {top for kind in part.types for top in _ROOTS[kind]}
    for path in walk(root):
        inside = PurePosixPath(path.relative_to(root))
        if inside.parts[0] not in allowed:
            raise OperationError(
                ErrorCode.BAD_PROJECT,
                f"cannot build {name}: /{inside} is outside of what a {' and '.join(part.types)} merges over",
                f"Move it below /{' or /'.join(sorted(allowed))}, or add the other type to types.",
            )
        if not path.is_dir() and (inside.name == "os-release" or "extension-release.d" in inside.parts):
            raise OperationError(
                ErrorCode.BAD_PROJECT, f"cannot build {name}: /{inside} describes the base or another extension"
            )
