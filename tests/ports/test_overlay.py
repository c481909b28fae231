"""What of the overlay adapter needs no board: which links count, what a name may be, what systemd's answer means.

What it does to a running system is in tests/device/test_overlay.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.contract import errors, release
from agent.ports import child, image_child, mounts, overlay_child
from agent.ports.overlay_merged import linked_images, parse_status

IMAGE = "4ed17979-6ec5-54c0-88d7-28bb04460ec6"

# What overlayfs, systemd or a shell reads as syntax, and what is no link name.
NAMES = [
    "10-pose:v2", "10-pose,v2", "10-pose\\v2", "10-pose v2", "10-pose\nv2", "10-pose%i", '10-pose"q', "10-pösé",
    "-10-pose", "pose", "1-pose", "10-", "10-Pose", "10-pose.raw", "../10-pose", "10-pose/../x", "10-" + "a" * 64, "",
]  # fmt: skip


def run(request: object) -> dict[str, object]:
    command = child.command(errors, release, mounts, image_child, overlay_child)
    assert all(len(part) < 128 * 1024 for part in command), "the kernel takes no more in one argument"
    done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_somebody_reads_as_syntax_is_refused_before_anything_is_touched(name: str) -> None:
    image = {"link": name, "image_id": IMAGE, "path": "/nowhere", "hashed": False}
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
    command = child.command(errors, release, mounts, image_child, overlay_child)
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
