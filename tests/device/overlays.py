"""A board with small extensions of a test's own, and the agent's overlay adapters driven on it from the host.

Every set has `gap` (/usr and /opt) and `conf` (/etc) in a version each, so that a reader can tell which set it saw. The
agent's code lies in a plain folder on the board's disk: its own extension is not one of those that come and go.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from agent.contract.manifest import image_id, sha256_hex
from agent.host.target import load_target
from agent.host.wheels import build_wheels
from tests.device import nspawn
from tests.device.board import TREE, Board
from tests.device.process import BoardError

DRIVER = "/root/driver"
STATE = "var/lib/avocado"
RELEASE_FOLDERS = {"sysext": "usr/lib/extension-release.d", "confext": "etc/extension-release.d"}
RELEASE = {"ID": "debian", "VERSION_ID": "13"}


@dataclass(frozen=True, slots=True)
class Image:
    """An image to be built: what it says about itself, its files, and what is done to its tree at the end."""

    name: str
    kind: str = "sysext"
    files: Mapping[str, str] = field(default_factory=dict)
    release: Mapping[str, str] = field(default_factory=lambda: dict(RELEASE))
    change: Callable[[Path], object] = lambda tree: None


@dataclass(frozen=True, slots=True)
class Built:
    """A runtime of such images as it lies on the board: its id, and image ids by link name."""

    runtime: str
    images: Mapping[str, Mapping[str, str]]


def gap(version: str) -> Image:
    """The extension over /usr and /opt that readers look at."""
    files = {
        "usr/share/gap/both": version,
        f"usr/share/gap/only-{version}": version,
        "usr/share/gap/still": "still",
        "opt/gap/version": version,
    }
    return Image("gap", files=files)


def conf(version: str) -> Image:
    """The extension over /etc."""
    return Image("conf", "confext", {"etc/gap.conf": version})


def build_image(image: Image, folder: Path) -> bytes:
    """The bytes of an EROFS image, the same for the same content."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for path, text in image.files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    release = tree / RELEASE_FOLDERS[image.kind] / f"extension-release.{image.name}"
    release.parent.mkdir(parents=True, exist_ok=True)
    release.write_text("".join(f"{key}={value}\n" for key, value in image.release.items()))
    os.setxattr(release, "user.extension-release.strict", b"0")
    image.change(tree)
    made = folder / "image.raw"
    made.unlink(missing_ok=True)
    subprocess.run(
        ["mkfs.erofs", "-x1", "-T0", f"-U{uuid.UUID(int=0)}", str(made), str(tree)], check=True, capture_output=True
    )
    return made.read_bytes()


def write_runtime(state: Path, name: str, images: list[Image]) -> Built:
    """Put a runtime into a state folder: images, and links in merge order, the first one highest."""
    runtime = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
    links: dict[str, dict[str, str]] = {kind: {} for kind in RELEASE_FOLDERS}
    for kind in links:
        (state / "runtimes" / runtime / kind).mkdir(parents=True, exist_ok=True)
    (state / "images").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for index, image in enumerate(images):
            data = build_image(image, Path(scratch))
            identity = image_id(sha256_hex(data))
            (state / "images" / f"{identity}.raw").write_bytes(data)
            link = f"{99 - index:02d}-{image.name}"
            links[image.kind][link] = identity
            path = state / "runtimes" / runtime / image.kind / f"{link}.raw"
            path.unlink(missing_ok=True)
            path.symlink_to(f"../../../images/{identity}.raw")
    return Built(runtime, links)


def install(root: Path, runtimes: Mapping[str, list[Image]], active: str) -> dict[str, Built]:
    """Make a root file system merge the runtime `active` at boot, and put the driver into it."""
    folder = root / DRIVER.lstrip("/")
    cache = Path(os.environ.get("AVOCADO_CACHE", Path.home() / ".cache/avocado"))
    wheels = build_wheels(TREE / "requirements/device-agent.txt", load_target("virtual"), cache)
    shutil.copytree(wheels.folder, folder)
    shutil.copytree(TREE / "agent", folder / "agent", ignore=shutil.ignore_patterns("__pycache__", "host"))
    shutil.copy(TREE / "tests/device/overlay_driver.py", folder)
    state = root / STATE
    state.mkdir(parents=True, exist_ok=True)
    built = {name: write_runtime(state, name, images) for name, images in runtimes.items()}
    (state / "active").symlink_to(f"runtimes/{built[active].runtime}")
    for kind, where in (("sysext", "extensions"), ("confext", "confexts")):
        (root / "var/lib" / where).symlink_to(f"/var/lib/avocado/active/{kind}")
        wants = root / "etc/systemd/system/sysinit.target.wants"
        wants.mkdir(parents=True, exist_ok=True)
        (wants / f"systemd-{kind}.service").symlink_to(f"/usr/lib/systemd/system/systemd-{kind}.service")
    return built


def send_runtime(board: Board, name: str, images: list[Image]) -> Built:
    """Put one more runtime onto a running board."""
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch, "state")
        state.mkdir()
        built = write_runtime(state, name, images)
        packed = Path(scratch, "state.tar")
        with tarfile.open(packed, "w") as archive:
            archive.add(state, ".")
        board.put(packed, "/root/state.tar")
    board.exec(["tar", "xf", "/root/state.tar", "--no-same-owner", "-C", f"/{STATE}"])
    return built


class Driver:
    """An adapter on the board, asked line by line. `way` says which one the agent's own choice came to."""

    def __init__(self, board: Board, wanted: str) -> None:
        init = nspawn.init_pid(board.slot.groups)
        if init is None:
            raise BoardError(f"cannot drive an overlay on board {board.name}: it is not running")
        line = [*nspawn.inside(init), "/usr/bin/python3", "-I", f"{DRIVER}/overlay_driver.py", wanted]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._read()
        self.way: str = said["way"]
        self.reason: str = said["reason"]

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """`value` or `error`, and `ms`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def do(self, method: str, *arguments: Any) -> Any:
        """The value; an error fails the test."""
        said = self.ask(method, *arguments)
        assert "error" not in said, said
        return said["value"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BoardError(f"the overlay driver ended with status {self._process.wait(10)}")
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        """It has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
