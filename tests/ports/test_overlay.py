"""What of the overlay adapter needs no board: which links count, what a name may be, what systemd's answer means.

What it does to a running system is in tests/device/test_overlay.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.contract import errors, release
from agent.ports import child, hierarchies, image_child, mounts, overlay_child
from agent.ports.overlay_merged import MergedReader, linked_images, of_extensions, parse_status
from agent.ports.protocols import Kind, MergedSet

IMAGE = "4ed17979-6ec5-54c0-88d7-28bb04460ec6"

# What overlayfs, systemd or a shell reads as syntax, and what is no link name.
NAMES = [
    "10-pose:v2", "10-pose,v2", "10-pose\\v2", "10-pose v2", "10-pose\nv2", "10-pose%i", '10-pose"q', "10-pösé",
    "-10-pose", "pose", "1-pose", "10-", "10-Pose", "10-pose.raw", "../10-pose", "10-pose/../x", "10-" + "a" * 64, "",
]  # fmt: skip


def run(request: object) -> dict[str, object]:
    command = child.command(errors, release, mounts, image_child, hierarchies, overlay_child)
    assert all(len(part) < 128 * 1024 for part in command), "the kernel takes no more in one argument"
    done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_somebody_reads_as_syntax_is_refused_before_anything_is_touched(name: str) -> None:
    image = {"link": name, "image_id": IMAGE, "path": "/nowhere", "mark": None, "trusted": False}
    answer = run({"do": "switch", "sets": {"sysext": [image]}, "os_release": {}, "arch": "x86_64", "namespace": IMAGE})
    rule = "its name must be two digits, a dash, and then a-z, 0-9, _ and - only"
    assert answer["error"] == {
        "code": "bad-image",
        "message": f"cannot merge sysext {name!r}: {rule}",
        "remedy": "Build the extension again with 'avocadoctl build' and deploy it.",
        "facts": {},
    }


def test_the_child_needs_none_of_the_agent_s_files(tmp_path: Path) -> None:
    # -I keeps this folder and PYTHONPATH out, so what it imports came with it or is the interpreter's own.
    command = child.command(errors, release, mounts, image_child, hierarchies, overlay_child)
    assert command[:3] == [sys.executable, "-I", "-c"]
    bare = ["env", "-i", *command]
    done = subprocess.run(
        bare, input=b'{"do": "switch", "sets": {"sysext": [{"link": ""}]}}', cwd=tmp_path, capture_output=True
    )
    assert json.loads(done.stdout)["error"]["code"] == "bad-image", done.stderr


def test_only_links_to_images_of_ours_count(tmp_path: Path) -> None:
    folder = tmp_path / "sysext"
    folder.mkdir()
    (folder / "98-pose-model.raw").symlink_to(f"../../../images/{IMAGE}.raw")
    (folder / "95-agent.raw").symlink_to(f"../../../images/{IMAGE}.raw")
    (folder / "97-elsewhere.raw").symlink_to("/tmp/97-elsewhere.raw")
    (folder / "96-up.raw").symlink_to(f"../../../images/../{IMAGE}.raw")
    (folder / "94-file.raw").write_bytes(b"x")
    (folder / "98-pose-model (1).raw").symlink_to(f"../../../images/{IMAGE}.raw")
    (folder / "._98-pose-model.raw").symlink_to(f"../../../images/{IMAGE}.raw")
    assert list(linked_images(folder).items()) == [("95-agent", IMAGE), ("98-pose-model", IMAGE)]
    assert linked_images(tmp_path / "absent") == {}


def test_systemd_s_status_reads_as_names_and_a_time() -> None:
    rows = [
        {"hierarchy": "/opt", "extensions": "none", "since": None},
        {"hierarchy": "/usr", "extensions": ["98-b", "95-a"], "since": 1780000000000000},
    ]
    assert parse_status(rows) == (("95-a", "98-b"), 1780000000000000)
    assert parse_status([{"hierarchy": "/etc", "extensions": "none", "since": None}]) == ((), 0)


OTHER = "59b7ca70-e32f-5e37-98d3-0acf1a2f9dc2"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runtimes whose links have the same names, one of them active, and a systemd that merged 98-pose-model."""
    for runtime, image in (("r1", IMAGE), ("r2", OTHER)):
        for kind in Kind:
            (tmp_path / "runtimes" / runtime / kind).mkdir(parents=True)
        link = tmp_path / "runtimes" / runtime / "sysext/98-pose-model.raw"
        link.symlink_to(f"../../../images/{image}.raw")
    (tmp_path / "active").symlink_to("runtimes/r1")
    since = int((time.time() + 1) * 1_000_000)
    for tool, names in (("systemd-sysext", '["98-pose-model"]'), ("systemd-confext", '"none"')):
        program = tmp_path / tool
        program.write_text(f"""#!/bin/sh\necho '[{{"extensions": {names}, "since": {since}}}]'\n""")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_what_systemd_merged_is_what_the_older_link_names_and_stays_so_when_somebody_moves_the_link(
    state: Path,
) -> None:
    reader = MergedReader(state)
    assert reader.read().images == {Kind.SYSEXT: {"98-pose-model": IMAGE}, Kind.CONFEXT: {}}
    (state / "active").unlink()
    (state / "active").symlink_to("runtimes/r2")
    assert reader.read().images[Kind.SYSEXT] == {"98-pose-model": IMAGE}


def test_when_the_link_is_younger_than_the_overlay_nobody_knows_the_images(state: Path) -> None:
    later = time.time_ns() + 60_000_000_000
    os.utime(state / "active", ns=(later, later), follow_symlinks=False)
    assert MergedReader(state).read().images == {Kind.CONFEXT: {}}


def test_the_boards_own_module_index_is_no_extension() -> None:
    merged = MergedSet(
        {Kind.SYSEXT: ("95-pose", "99-zz-module-index"), Kind.CONFEXT: ()},
        {Kind.SYSEXT: "2026-12-01T00:00:00Z"},
        {Kind.SYSEXT: {"95-pose": "a", "99-zz-module-index": "b"}},
    )
    assert of_extensions(merged) == MergedSet(
        {Kind.SYSEXT: ("95-pose",), Kind.CONFEXT: ()}, merged.since, {Kind.SYSEXT: {"95-pose": "a"}}
    )
