"""avocadoctl verify: what rots on a disk is found, whichever runtime it belongs to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from agent import cli
from agent.contract.errors import EXIT_STATUS, ErrorCode
from agent.contract.manifest import MODULE_INDEX, Extension, Manifest, RuntimeName, image_id
from agent.ports.files import FileStore
from agent.ports.runtimes import FileRuntimes

RUNTIME = "5f0c9f7a-7a0a-4c4e-9a53-0d4a1c9b1a11"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AVOCADO_STATE_DIR", str(tmp_path))
    store = FileStore(tmp_path)
    extensions = []
    for name in ("pose-app", "pose-model"):
        data = name.encode() * 1000
        sha256 = hashlib.sha256(data).hexdigest()
        extensions.append(
            Extension(name=name, version="1", image_id=image_id(sha256), sha256=sha256, size_bytes=len(data),
                      types=["sysext"])
        )  # fmt: skip
        store.part(extensions[-1].image_id).write_bytes(data)
        store.finish_image(extensions[-1])
    manifest = Manifest(
        manifest_version=1, id=RUNTIME, built_at="2026-11-01T10:00:00Z", target="virtual", arch="x86_64",
        runtime=RuntimeName(name="pose", version="2"), extensions=extensions,
    )  # fmt: skip
    FileRuntimes(tmp_path).stage(manifest)
    return tmp_path


def image(state: Path, name: str) -> Path:
    manifest = FileRuntimes(state).manifest(RUNTIME)
    found = next(extension for extension in manifest.extensions if extension.name == name)
    return state / "images" / f"{found.image_id}.raw"


def test_a_sound_board_is_vouched_for(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["runtime", "pose"],
        ["image", "pose-app"],
        ["image", "pose-model"],
    ]
    assert all(line.endswith("good") for line in lines[1:])


def test_a_flipped_bit_a_missing_image_and_a_bent_link_are_each_named(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rotten = image(state, "pose-model")
    data = bytearray(rotten.read_bytes())
    data[500] ^= 1
    rotten.chmod(0o644)
    rotten.write_bytes(data)
    image(state, "pose-app").unlink()
    link = next((state / "runtimes" / RUNTIME / "sysext").iterdir())
    link.unlink()
    link.symlink_to("/etc/passwd")
    assert cli.main(["-o", "json", "verify"]) == EXIT_STATUS[ErrorCode.HASH_MISMATCH]
    printed = capsys.readouterr()
    found = {finding["name"]: finding["problem"] for finding in json.loads(printed.out)}
    assert found == {
        "pose": f"sysext/{link.name} does not lead to its image",
        "pose-app 1": "it is missing",
        "pose-model 1": "its bytes are not what was signed",
    }
    assert json.loads(printed.err)["message"].startswith(
        "cannot vouch for this board: 3 of 3 things are not as signed, first runtime pose: "
    )
    assert json.loads(printed.err)["remedy"] == (
        "Run on the host: avocadoctl -H root@board deploy --again. It brings what is damaged anew; then reboot. "
        "If it comes back, replace the disk."
    )


@pytest.mark.parametrize("has_manifest", [True, False])
def test_the_index_of_modules_that_the_board_made_is_hashed_like_what_was_signed(
    state: Path, capsys: pytest.CaptureFixture[str], *, has_manifest: bool
) -> None:
    data = b"index" * 300
    sha256 = hashlib.sha256(data).hexdigest()
    store, runtimes = FileStore(state), FileRuntimes(state)
    made = Extension(
        name=MODULE_INDEX, version="1", image_id=image_id(sha256), sha256=sha256, size_bytes=len(data), types=["sysext"]
    )
    path = store.write_image(made, data)
    runtimes.stage(runtimes.manifest(RUNTIME), made.image_id)
    assert cli.main(["verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "image", MODULE_INDEX, made.image_id[:8], "1.5", "KiB", "good"
    ]  # fmt: skip
    if not has_manifest:
        (state / "runtimes" / RUNTIME / "manifest.json").write_text("garbage")
    path.chmod(0o644)
    path.write_bytes(b"i" + bytes(1499))
    assert cli.main(["-o", "json", "verify"]) == EXIT_STATUS[ErrorCode.HASH_MISMATCH]
    printed = capsys.readouterr()
    assert json.loads(printed.out)[-1]["problem"] == "its bytes are not those of its name"
    assert json.loads(printed.err)["remedy"] == (
        "Reboot the board, or change to that runtime: the index is made anew. If it comes back, replace the disk."
        if has_manifest
        else "Run on the host: avocadoctl -H root@board deploy --again. It brings what is damaged anew; then reboot. "
        "If it comes back, replace the disk."
    )
    path.unlink()
    assert cli.main(["-o", "json", "verify"]) == EXIT_STATUS[ErrorCode.HASH_MISMATCH]
    assert json.loads(capsys.readouterr().out)[-1]["problem"] == "it is missing"


def test_a_board_without_anything_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AVOCADO_STATE_DIR", str(tmp_path))
    assert cli.main(["-o", "json", "verify"]) == 0
    assert capsys.readouterr().out == "[]\n"
