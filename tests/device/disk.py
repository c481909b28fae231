"""The board's disk: an image that can be photographed at an instant, which is what makes a power cut real.

The root file system is ext4 in `disk.img`, on a loop device. The image lies in a btrfs file system of its own (the
pool), because a reflink there copies the whole disk in milliseconds. Pages that the board has not flushed are not in
the image, so they are not in the copy either. A cut shows missing fsyncs; it cannot show reordering inside a drive's
cache.

The pool also holds the board's device nodes. Binding the host's own would hand them to the board: systemd in there
changes their owner and removes loop devices after use, for the host as well.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.device.host import is_mounted, mounts_below
from tests.device.process import BoardError, holds_within, run

POOL_SIZE = "16G"
DISK_SIZE = "6G"
LOOPS = 256  # they are the whole host's: other boards use some
VIDEO_GROUP = 44


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of one board, in the board's folder."""

    folder: Path

    @property
    def root(self) -> Path:
        """Where the root file system is mounted on the host."""
        return self.folder / "root"

    @property
    def nodes(self) -> Path:
        """The board's own device nodes."""
        return self._pool / "nodes"

    def create(self, template: Path) -> None:
        """Make the disk as a copy of the template pool, and mount it."""
        copy = ["cp", "--sparse=auto", "--reflink=auto", str(template), str(self._pool_image)]
        run(copy, doing="copy the prepared disk", timeout_s=120)
        self.mount()
        _make_nodes(self.nodes)

    def mount(self) -> None:
        """Mount the root file system; fine when it is mounted."""
        self.mount_pool()
        _mount_image(self._image, self.root)

    def mount_pool(self) -> None:
        """Mount the file system that holds the disk; fine when it is mounted."""
        # nspawn before 253 keeps the host's mounts, hidden below the board's root, as long as the board runs. A shared
        # mount hands them our unmounting; otherwise each board would hold the disks of all that were there before it.
        if not is_mounted(self.folder):
            run(["mount", "--bind", str(self.folder), str(self.folder)], doing=f"prepare {self.folder}")
        run(["mount", "--make-shared", str(self.folder)], doing=f"prepare {self.folder}")
        _mount_image(self._pool_image, self._pool)

    def sync(self) -> None:
        """Let everything that was written so far survive a power cut."""
        run(["sync", "--file-system", str(self.root)], doing="sync the disk", timeout_s=60)

    def unmount(self) -> None:
        """Unmount everything in the board's folder, which also frees the loop devices."""
        for point in mounts_below(self.folder):
            # Just after a kill the last of the board's processes may still hold it.
            if not holds_within(partial(_unmounted, point), timeout_s=10):
                raise BoardError(f"cannot unmount {point}: it is busy")

    def photograph(self) -> None:
        """Keep the disk as it is at this instant beside the one in use."""
        cut = ["cp", "--reflink=always", str(self._image), str(self._cut)]
        run(cut, doing="take the disk as it stands at this instant")

    def become_photograph(self) -> None:
        """Go back to the disk that was photographed. The board must not be running."""
        if mounts_below(self.root) and not holds_within(partial(_unmounted, self.root), timeout_s=10):
            raise BoardError(f"cannot unmount {self.root}: it is busy")
        self._cut.replace(self._image)

    def loop_devices(self) -> list[str]:
        """The loop devices that still hold a file of this board's folder."""
        found = []
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                held = backing.read_text().strip()
            except OSError:  # freed while we looked
                continue
            if held.startswith(f"{self.folder}/"):
                found.append(f"/dev/{backing.parent.parent.name} ({held})")
        return found

    @property
    def _pool_image(self) -> Path:
        return self.folder / "pool.btrfs"

    @property
    def _pool(self) -> Path:
        return self.folder / "pool"

    @property
    def _image(self) -> Path:
        return self._pool / "disk.img"

    @property
    def _cut(self) -> Path:
        return self._pool / "disk.cut"


def make_template(tarball: Path, template: Path, work: Path) -> None:
    """Unpack the root file system into a disk in a new pool, and keep that pool as the file `template`."""
    disk = Disk(work)
    work.mkdir(parents=True)
    run(["truncate", "-s", POOL_SIZE, str(disk._pool_image)], doing="make the pool")
    run(["mkfs.btrfs", "-q", "-m", "single", str(disk._pool_image)], doing="make the pool's file system")
    try:
        disk.mount_pool()
        run(["truncate", "-s", DISK_SIZE, str(disk._image)], doing="make the disk")
        run(["mkfs.ext4", "-q", "-m", "0", "-J", "size=32", str(disk._image)], doing="make the disk's file system")
        disk.mount()
        unpack = ["tar", "-C", str(disk.root), "--zstd", "--xattrs", "--xattrs-include=*", "-xf", str(tarball)]
        run(unpack, doing="unpack the root file system", timeout_s=300)
    finally:
        disk.unmount()
    half = template.with_suffix(".new")
    run(["cp", "--sparse=auto", str(disk._pool_image), str(half)], doing="keep the prepared disk", timeout_s=120)
    half.replace(template)


def remove_folder(folder: Path) -> None:
    """Remove a folder in which disks were mounted; refuses while anything still is, for that would empty the disk."""
    Disk(folder).unmount()
    if mounts_below(folder):
        raise BoardError(f"cannot remove {folder}: {mounts_below(folder)[0]} is still mounted")
    if folder.exists():
        shutil.rmtree(folder)


def _mount_image(source: Path, point: Path) -> None:
    if is_mounted(point):
        return
    point.mkdir(exist_ok=True)
    mount = ["mount", "-o", "loop", str(source), str(point)]
    doing = f"mount {source}"

    def decided() -> bool:
        # Loop devices are the whole host's: systemd in a board may remove the one that mount has just found free.
        return run(mount, doing=doing, check=False).returncode == 0 or not source.exists()

    if not holds_within(decided, timeout_s=5) or not is_mounted(point):
        run(mount, doing=doing)


def _unmounted(point: Path) -> bool:
    run(["umount", str(point)], doing=f"unmount {point}", check=False)
    return not is_mounted(point)


def _make_nodes(folder: Path) -> None:
    folder.mkdir()
    loop_control = Path("/dev/loop-control").stat().st_rdev
    _node(folder / "loop-control", stat.S_IFCHR, loop_control)
    for number in range(LOOPS):
        _node(folder / f"loop{number}", stat.S_IFBLK, os.makedev(7, number))
    # The simulated NPU's device: it only has to exist, be opened and be locked, so it is a null device.
    _node(folder / "simnpu0", stat.S_IFCHR, os.makedev(1, 3), group=VIDEO_GROUP)
    if Path("/dev/fuse").exists():
        _node(folder / "fuse", stat.S_IFCHR, Path("/dev/fuse").stat().st_rdev, mode=0o666)


def _node(path: Path, kind: int, device: int, *, mode: int = 0o660, group: int = 0) -> None:
    os.mknod(path, kind | mode, device)
    path.chmod(mode)  # whatever the umask
    os.chown(path, 0, group)
