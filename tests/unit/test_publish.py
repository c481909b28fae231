"""`avocadoctl publish`: deltas from the last runtimes, made once; the timestamp renewed with the online key alone."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.contract.manifest import image_id
from agent.delta.apply import file_sha256
from agent.host import transfers
from agent.host.image import erofs_version

pytestmark = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed")

PROJECT = """\
default_target: virtual
supported_targets: [virtual]
runtimes:
  main: {version: "1.0", extensions: [app, other]}
extensions:
  app: {version: "1.0", files: {usr/share/app/weights.tflite: weights}}
  other: {version: "1.0", files: {usr/share/other/text: text}}
"""


class Publisher:
    """One project, published again and again."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        folder.mkdir()
        (folder / "avocado.yaml").write_text(PROJECT)
        (folder / "text").write_text("text\n" * 100)
        self.run("keys", "init", "--keys", str(folder / "keys"), "--no-passphrase")

    def run(self, *words: str) -> dict[str, Any]:
        assert cli.main(["-o", "json", *words]) == 0
        out = self._capsys.readouterr().out
        found: dict[str, Any] = json.loads(out) if out.startswith("{") else {}
        return found

    def publish(self, *words: str) -> dict[str, Any]:
        return self.run("publish", "-C", str(self.folder), *words)

    def app_image(self) -> str:
        manifest = json.loads((self.folder / "build/runtimes/virtual/main.json").read_bytes())
        return str(manifest["extensions"][0]["image_id"])

    def change(self, seed: int) -> None:
        base = bytearray(random.Random(0).randbytes(30_000))
        base[seed * 100 : seed * 100 + 50] = random.Random(seed).randbytes(50)
        (self.folder / "weights").write_bytes(base)


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Publisher:
    return Publisher(tmp_path / "project", capsys)


def test_deltas_are_offered_from_the_last_three_runtimes_or_as_many_as_asked(project: Publisher) -> None:
    app: list[str] = []
    for seed in range(5):
        project.change(seed)
        found = project.publish()
        newest = project.app_image()
        assert sorted(found["delta_bytes"][newest]) == sorted(app[-3:])
        app.append(newest)
    assert len(found["full_bytes"]) == 2
    assert list(project.publish("--deltas", "1")["delta_bytes"][app[-1]]) == app[-2:-1]
    assert project.publish("--deltas", "0")["delta_bytes"][app[-1]] == {}


def test_what_was_made_once_is_found_again_in_any_repository(
    project: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        project.change(seed)
        first = project.publish()
    monkeypatch.setattr(transfers, "encode_delta", None)  # nothing is encoded from here on
    again = project.publish("--out", str(tmp_path / "elsewhere"))
    assert (again["full_bytes"], again["delta_bytes"]) == (first["full_bytes"], first["delta_bytes"])
    names = [path.name for path in (tmp_path / "elsewhere/targets").iterdir() if path.suffix in (".full", ".delta")]
    assert len(names) == 3
    assert all(name.startswith(file_sha256(tmp_path / "elsewhere/targets" / name)) for name in names)


def test_a_kept_transfer_goes_with_its_image(project: Publisher) -> None:
    project.change(0)
    project.publish()
    kept = project.folder / "build/cache/transfers"
    assert len(list(kept.iterdir())) == 2
    for path in (project.folder / "build/images").iterdir():
        assert path.stem == image_id(file_sha256(path))
        path.unlink()
    project.change(1)
    project.publish()
    assert {path.stem for path in kept.iterdir()} == {path.stem for path in (project.folder / "build/images").iterdir()}


def test_a_refresh_renews_the_timestamp_with_the_online_key_alone(project: Publisher) -> None:
    project.change(0)
    published = project.publish()
    metadata = project.folder / "build/repository/virtual/metadata"
    before = json.loads((metadata / "timestamp.json").read_bytes())["signed"]["version"]
    for path in (project.folder / "keys").glob("*.pem"):
        if path.name != "online.pem":
            path.unlink()
    found = project.publish("--refresh")
    after = json.loads((metadata / "timestamp.json").read_bytes())["signed"]
    assert found == {"repository": published["repository"], "expires": after["expires"]}
    assert after["version"] > before


def test_there_is_nothing_to_refresh_before_the_first_publication(
    project: Publisher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["publish", "-C", str(project.folder), "--refresh"]) == 6
    folder = project.folder / "build/repository/virtual"
    assert f"cannot refresh {folder}: it is not a repository" in capsys.readouterr().err


def test_the_manifest_records_the_tools_that_have_a_say_in_the_bytes(project: Publisher) -> None:
    project.change(0)
    built = project.run("build", "-C", str(project.folder))
    assert built["runtime"]["built_with"] == {"mkfs.erofs": erofs_version()}
