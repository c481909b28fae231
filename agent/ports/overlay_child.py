"""A child process that replaces the overlays of /usr, /opt and /etc in the board's mount namespace, without a gap.

Started by ports/overlay.py with a request on stdin; it answers with one JSON object on stdout. The new overlays are
built where nobody sees them, out of images whose name, bytes, release file and compatibility are checked here first;
then each is put below the old one, which changes nothing, and the old one is taken away. A kill at any instant leaves
every hierarchy whole, at worst with a new overlay hidden below the old one. What it makes is what systemd 257 makes
(src/sysext/sysext.c), so that `systemd-sysext status|refresh|unmerge` go on as if they had done it themselves.

One thread, no imports but the standard library and the texts handed over with it: /usr changes under it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import uuid
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.release import Kind, incompatibility, parse_release
from agent.ports import image_child, mounts
from agent.ports.hierarchies import (
    LAYOUTS,
    MARK,
    Hierarchy,
    Layout,
    enter_host,
    hierarchies_of,
    is_mutable,
    uncover,
)

# Where systemd-sysext does it too: a folder that only root enters.
WORKSPACE = "/run/systemd/sysext"
_LINK = re.compile(r"[0-9]{2}-(?P<name>[a-z0-9][a-z0-9_-]{0,62})")
_CHUNK = 1 << 20


def main(argv: list[str]) -> int:
    """Do what the request says and print how it went."""
    request = json.load(sys.stdin)
    os.umask(0o022)  # what is made here is seen by everybody on the board
    try:
        answer = {"probe": lambda _: probe(), "check": check, "switch": switch}[request["do"]](request)
    except OperationError as error:
        answer = {"error": error.as_dict()}
    except OSError as cause:
        answer = {"error": _failed(image_child.said(cause)).as_dict()}
    json.dump(answer, sys.stdout)
    return 0


def probe() -> dict[str, Any]:
    """`unable`: why the overlays of this board cannot be switched without a gap, or an empty string."""
    host = enter_host()
    if not Path("/run/systemd/system").is_dir():
        return {"unable": "systemd does not run this system"}
    for hierarchy in hierarchies_of(Kind):
        if is_mutable(hierarchy):
            return {"unable": f"{hierarchy.where} is merged mutable"}
    mounts.own_namespace()
    mounts.mount("tmpfs", "/tmp", "tmpfs", 0)  # noqa: S108 - in this namespace nobody else looks at it
    try:
        for name in ("lower", "upper"):
            Path("/tmp", name).mkdir()  # noqa: S108
        layers = [("lowerdir+", "/tmp/upper"), ("lowerdir+", "/tmp/lower")]  # noqa: S108
        new = mounts.new_mount("overlay", [("source", "probe"), *layers], mounts.ATTR_RDONLY)
        mounts.attach(new, "/tmp", mounts.BENEATH)  # noqa: S108
        descriptor = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        os.close(descriptor)
        mounts.enter_namespace(host)
    except OSError as cause:
        return {"unable": image_child.said(cause)}
    return {"unable": ""}


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Whether the images of a request as for `switch` could be shown; `marks`: by id, how those whose bytes were hashed
    lie on the disk, for `mark` in later requests.
    """
    sets = _sets(request)
    enter_host()
    # Over the base, since it is the base's folders that an image must not close.
    hierarchies = hierarchies_of(sets)
    mounts.own_namespace()
    for hierarchy in hierarchies:
        uncover(hierarchy)
    return {"marks": _mount_all(sets, request)}


def switch(request: dict[str, Any]) -> dict[str, Any]:
    """The hierarchies of the requested kinds show exactly the requested images.

    The request: `sets` (kind -> list of `link`, `image_id`, `path`, `mark`, `trusted`, lowest first), `os_release`,
    `arch`, `namespace` (of image ids).
    """
    sets = _sets(request)
    host = enter_host()
    hierarchies = hierarchies_of(sets)
    for hierarchy in hierarchies:
        if is_mutable(hierarchy):
            raise OperationError(
                ErrorCode.SWITCH_FAILED,
                f"cannot switch the extensions: {hierarchy.where} is merged mutable",
                "Let the agent look again how it can switch: systemctl restart avocadod",
            )
    new, _ = _built(hierarchies, sets, request)
    mounts.enter_namespace(host)
    _replace(hierarchies, new)
    return {}


def show_here(request: dict[str, Any]) -> None:
    """This process, and what it starts, sees the images of a request as for `switch` in place of what is merged.

    Nobody else does, and when the last of these processes ends, nothing is left of it.
    """
    sets = _sets(request)
    new, below = _built(hierarchies_of(sets), sets, request)
    for where, descriptor in new.items():
        if descriptor is not None:
            mounts.attach(descriptor, where)
            continue
        for path, copy in below[where]:
            mounts.attach(copy, path)


# -- the images


def _check_name(link: str, kind: Kind) -> None:
    if not _LINK.fullmatch(link):
        raise _bad_image(kind, link, "its name must be two digits, a dash, and then a-z, 0-9, _ and - only")


def _sets(request: dict[str, Any]) -> dict[Kind, list[dict[str, Any]]]:
    sets = {Kind(kind): images for kind, images in request["sets"].items()}
    for kind, images in sets.items():
        for image in images:
            _check_name(image["link"], kind)
    return sets


def _mount_all(sets: dict[Kind, list[dict[str, Any]]], request: dict[str, Any]) -> dict[str, list[int]]:
    """Every image below the workspace, checked; how each lies on the disk."""
    Path(WORKSPACE).mkdir(mode=0o700, parents=True, exist_ok=True)
    mounts.mount("sysext", WORKSPACE, "tmpfs", 0, "mode=0700")
    return {i["image_id"]: _mount(i, LAYOUTS[kind], request) for kind, images in sets.items() for i in images}


def _mount(image: dict[str, Any], layout: Layout, request: dict[str, Any]) -> list[int]:
    link: str = image["link"]
    name = link[3:]
    where = f"{WORKSPACE}/{layout.plural}/{link}"
    os.makedirs(where, 0o700)  # noqa: PTH103
    try:
        descriptor = image_child.open_image(image["path"])
        mark = _mark(descriptor)
        if not image["trusted"] and image["mark"] != mark:
            found = _image_id(descriptor, request["namespace"])
            if found != image["image_id"]:
                raise _bad_image(layout.kind, link, f"its bytes are not those of image {image['image_id']}")
        mounts.mount_image(descriptor, where, mounts.MS_NODEV)
        text = image_child.read_release(where, layout.kind.value, name)
        if not image["trusted"]:
            _check_modes(where, layout)
    except mounts.RefusedError as refused:
        raise _bad_image(layout.kind, link, str(refused)) from refused
    except OSError as cause:
        raise _bad_image(layout.kind, link, image_child.said(cause)) from cause
    keys = parse_release(text.encode(), f"the release file of extension {name}")
    why = incompatibility(keys, layout.kind, request["os_release"], request["arch"])
    if why:
        raise OperationError(
            ErrorCode.INCOMPATIBLE,
            f"cannot merge extension {name}: systemd would ignore it: {why}",
            "Build the extension for the operating system of this board.",
        )
    return mark


def _mark(descriptor: int) -> list[int]:
    """Nobody writes into a file without its ctime moving on."""
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _check_modes(where: str, layout: Layout) -> None:
    """No folder of the base is closed by the image: the overlay takes a folder's mode from the topmost layer."""
    # The roots themselves get the base's mode.
    folders = [folder for hierarchy in layout.hierarchies for folder in _folders(f"{where}{hierarchy}")]
    while folders:
        folder = folders.pop()
        inside = folder.removeprefix(where)
        try:
            base = os.lstat(inside).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        mode = os.lstat(folder).st_mode
        if stat.S_ISDIR(base) and base & ~mode & 0o055:
            raise mounts.RefusedError(
                f"its folder {inside} has mode {stat.S_IMODE(mode):04o} and would close the base's"
                f" ({stat.S_IMODE(base):04o})"
            )
        folders.extend(_folders(folder))


def _folders(where: str) -> list[str]:
    try:
        with os.scandir(where) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _image_id(descriptor: int, namespace: str) -> str:
    digest = hashlib.sha256()
    os.lseek(descriptor, 0, os.SEEK_SET)
    while chunk := os.read(descriptor, _CHUNK):
        digest.update(chunk)
    return str(uuid.uuid5(uuid.UUID(namespace), digest.hexdigest()))


def _bad_image(kind: Kind, link: str, why: str) -> OperationError:
    return OperationError(
        ErrorCode.BAD_IMAGE,
        f"cannot merge {kind.value} {link!r}: {why}",
        "Build the extension again with 'avocadoctl build' and deploy it.",
    )


# -- the overlays


def _built(
    hierarchies: list[Hierarchy], sets: dict[Kind, list[dict[str, Any]]], request: dict[str, Any]
) -> tuple[dict[str, int | None], dict[str, list[tuple[str, int]]]]:
    """In a namespace of this process's own: the new overlay of each hierarchy, and what is mounted below it."""
    mounts.own_namespace()
    below = {h.where: uncover(h) for h in hierarchies}
    _mount_all(sets, request)
    return {h.where: _build(h, sets[h.layout.kind], below[h.where]) for h in hierarchies}, below


def _build(hierarchy: Hierarchy, images: list[dict[str, Any]], below: list[tuple[str, int]]) -> int | None:
    """A descriptor of the new, unattached overlay with everything that is to be below it; None: no image needs one."""
    where, layout = hierarchy.where, hierarchy.layout
    trees = [f"{WORKSPACE}/{layout.plural}/{image['link']}{where}" for image in reversed(images)]
    layers = [tree for tree in trees if _has_content(tree)]
    if not layers:
        if below and hierarchy.old:
            raise _failed(f"{where} would lose its overlay while {below[0][0]} is mounted in it")
        return None
    meta = Path(f"{WORKSPACE}/meta{where}")
    mode = stat.S_IMODE(os.stat(where).st_mode) if os.path.isdir(where) else 0o755  # noqa: PTH112, PTH116
    marks = meta / layout.folder
    marks.mkdir(parents=True)
    lines = {
        layout.plural: [image["link"] for image in images],
        MARK: [f"{image['link']} {image['image_id']}" for image in images],
    }
    for name, text in lines.items():
        (marks / name).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    if hierarchy.backing:
        (marks / "backing").write_text(hierarchy.backing, encoding="utf-8")
    for path in (marks, *marks.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    meta.chmod(mode)
    base = [where] if _has_content(where) else []
    options = [("source", layout.kind.value), *(("lowerdir+", layer) for layer in (str(meta), *layers, *base))]
    new = mounts.new_mount("overlay", options, layout.attributes)
    device = os.fstat(new).st_dev
    # Before anything is looked up through the overlay, which remembers that a name was not there.
    (marks / "dev").write_text(f"{os.major(device)}:{os.minor(device)}\n", encoding="utf-8")
    (marks / "dev").chmod(0o644)
    os.utime(meta)  # systemd's "since"
    os.close(os.open(f"{layout.folder}/dev", os.O_RDONLY | os.O_CLOEXEC, dir_fd=new))  # systemd will look for it
    return _with(new, where, below)


def _has_content(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return False


def _with(new: int, where: str, below: list[tuple[str, int]]) -> int:
    """The overlay with what was mounted below its hierarchy."""
    if not below:
        return new
    at = f"{WORKSPACE}/overlay{where}"
    os.makedirs(at)  # noqa: PTH103
    mounts.attach(new, at)
    for path, copy in below:
        mounts.attach(copy, at + path.removeprefix(where))
    return mounts.copy_of(at)


def _replace(hierarchies: list[Hierarchy], new: dict[str, int | None]) -> None:
    """On the board: below the old ones first, where nobody sees them, then the old ones go."""
    mounted = mounts.mounted()
    for hierarchy in hierarchies:
        # A switch that was killed half-way left a second overlay below: it is whole, and so no gap either.
        for _ in range(mounts.stacked(mounted, hierarchy.where, hierarchy.layout.kind.value) - 1):
            mounts.unmount(hierarchy.where)
    for hierarchy in hierarchies:
        descriptor = new[hierarchy.where]
        if descriptor is not None and hierarchy.old:
            mounts.attach(descriptor, hierarchy.where, mounts.BENEATH)
    for hierarchy in hierarchies:
        descriptor = new[hierarchy.where]
        if hierarchy.old:
            mounts.unmount(hierarchy.where)
        elif descriptor is not None:
            os.makedirs(hierarchy.where, 0o755, exist_ok=True)  # noqa: PTH103
            mounts.attach(descriptor, hierarchy.where)


def _failed(why: str) -> OperationError:
    return OperationError(
        ErrorCode.SWITCH_FAILED, f"cannot switch the extensions: {why}", "See why: journalctl -b -n 30 -u avocadod"
    )
