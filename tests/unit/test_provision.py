"""Provision: what a base lacks is named at once, and the board's links never lead out of its root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import image_id, manifest_bytes, parse_manifest, sha256_hex
from agent.host.base_check import missing
from agent.host.provision import FirstRuntime, provision
from agent.host.report import Report
from agent.host.root_fs import RootFs
from agent.host.target import load_target

TARGET = load_target("virtual")
IMAGE = b"an image"
PACKAGES = ["python3", "dbus"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A base that has everything."""
    base = tmp_path / "root"
    for folder in ("etc", "usr/bin", "usr/lib/systemd/system", "var/lib/dpkg"):
        (base / folder).mkdir(parents=True)
    (base / "etc/os-release").symlink_to("../usr/lib/os-release")
    (base / "usr/lib/os-release").write_text('ID=debian\nVERSION_ID="13"\n')
    (base / "etc/nsswitch.conf").write_text("passwd: files systemd\ngroup: files systemd\n")
    for program in ("systemd-sysext", "systemd-confext", "dbus-daemon", "python3.13"):
        (base / "usr/bin" / program).write_text("")
    (base / "usr/bin/python3").symlink_to("/usr/bin/python3.13")
    for unit in ("systemd-sysext", "systemd-confext"):
        (base / f"usr/lib/systemd/system/{unit}.service").write_text("[Install]\nWantedBy=sysinit.target\n")
    installed = "".join(f"Package: {name}\nStatus: install ok installed\n\n" for name in PACKAGES)
    (base / "var/lib/dpkg/status").write_text(installed)
    return base


@pytest.fixture
def first(tmp_path: Path) -> FirstRuntime:
    sha256 = sha256_hex(IMAGE)
    extension = {
        "name": "app",
        "version": "1",
        "image_id": image_id(sha256),
        "sha256": sha256,
        "size_bytes": len(IMAGE),
    }
    document = {
        "manifest_version": 1,
        "id": "0d63803d-0000-5000-8000-000000000000",
        "built_at": "2026-11-30T00:00:00Z",
        "runtime": {"name": "main", "version": "1"},
        "extensions": [{**extension, "types": ["sysext", "confext"]}],
        "target": "virtual",
        "arch": TARGET.arch,
    }
    manifest = parse_manifest(json.dumps(document).encode())
    image = tmp_path / "image.raw"
    image.write_bytes(IMAGE)
    return FirstRuntime(manifest_bytes(manifest), {manifest.extensions[0].image_id: image}, b"{}")


def seed(root: Path, first: FirstRuntime, *, replace: bool = False) -> None:
    provision(root, TARGET, first, PACKAGES, Report(quiet=True), replace=replace)


def test_a_provisioned_root_boots_the_runtime_with_none_of_our_code(root: Path, first: FirstRuntime) -> None:
    seed(root, first)
    state = root / "var/lib/avocado"
    assert (root / "var/lib/extensions").readlink() == Path("/var/lib/avocado/active/sysext")
    assert (root / "var/lib/confexts").readlink() == Path("/var/lib/avocado/active/confext")
    for kind in ("sysext", "confext"):
        assert (state / f"active/{kind}/99-app.raw").read_bytes() == IMAGE
        enabled = root / f"etc/systemd/system/sysinit.target.wants/systemd-{kind}.service"
        assert enabled.readlink() == Path(f"/usr/lib/systemd/system/systemd-{kind}.service")
    assert (state / "active/manifest.json").read_bytes() == first.manifest_bytes
    assert (state / "metadata/root.json").read_bytes() == first.root_metadata
    assert (state / "board.json").read_text() == f'{{"arch": "{TARGET.arch}", "target": "virtual"}}\n'


def test_nobody_but_root_reads_the_state_before_the_agent_has_started_once(root: Path, first: FirstRuntime) -> None:
    seed(root, first)
    state = root / "var/lib/avocado"
    modes = {name: (state / name).stat().st_mode & 0o777 for name in ("changes", "runtimes", "metadata", "images")}
    assert modes == {"changes": 0o750, "runtimes": 0o750, "metadata": 0o750, "images": 0o700}
    assert [path.stat().st_mode & 0o777 for path in (state / "images").iterdir()] == [0o600]


def test_a_board_that_has_a_runtime_is_left_alone_unless_asked(root: Path, first: FirstRuntime) -> None:
    seed(root, first)
    with pytest.raises(OperationError, match=r"it has a runtime already$") as caught:
        seed(root, first)
    assert caught.value.code is ErrorCode.USAGE
    seed(root, first, replace=True)


def test_everything_a_base_lacks_is_named_at_once(root: Path, first: FirstRuntime) -> None:
    (root / "usr/lib/os-release").write_text("ID=debian\nVERSION_ID=12\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\n")
    (root / "usr/bin/python3.13").rename(root / "usr/bin/python3.11")
    (root / "usr/bin/dbus-daemon").unlink()
    (root / "usr/bin/systemd-confext").unlink()
    assert missing(RootFs(root), TARGET, ["python3", "ffmpeg"]) == [
        "os-release says VERSION_ID='12', target virtual is for '13'",
        "/usr/bin/systemd-confext is missing: systemd 255 or newer, with extensions, is needed",
        "neither dbus-daemon nor dbus-broker is installed",
        "/usr/bin/python3 is missing",
        "nsswitch.conf does not look up passwd in systemd (package libnss-systemd)",
        "nsswitch.conf does not look up group in systemd (package libnss-systemd)",
        "package ffmpeg is not installed",
    ]
    with pytest.raises(OperationError) as caught:
        seed(root, first)
    assert caught.value.code is ErrorCode.REQUIREMENT_UNMET
    assert not (root / "var/lib/avocado").exists()


def test_a_link_of_the_board_never_leads_out_of_its_root(root: Path, first: FirstRuntime, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "data").mkdir()
    (root / "var/lib/avocado").symlink_to("../../../../../../../data")
    (root / "var/lib/extensions").symlink_to(tmp_path / "outside")
    seed(root, first)
    assert (root / "data/board.json").is_file()
    assert list((tmp_path / "outside").iterdir()) == []


def test_what_lies_in_the_way_is_not_thrown_away(root: Path, first: FirstRuntime) -> None:
    (root / "var/lib/extensions").mkdir()
    (root / "var/lib/extensions/theirs.raw").write_text("")
    with pytest.raises(OperationError, match=r"there is something in its place$"):
        seed(root, first)
    assert (root / "var/lib/extensions/theirs.raw").exists()


def test_this_machines_root_is_refused(first: FirstRuntime) -> None:
    with pytest.raises(OperationError, match=r"^cannot provision /: that is this machine$"):
        seed(Path("/"), first)
