"""`avocadoctl publish`: deltas from the last runtimes, made once; the timestamp renewed with the online key alone."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.contract.delta import Transfer
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import image_id
from agent.delta.encode import Effort, encode_delta
from agent.delta.stream import file_sha256
from agent.host import alone, transfers
from agent.host.first_keys import init_keys
from agent.host.image import erofs_version
from agent.host.keys import Keys
from agent.host.repository import publish, refresh
from agent.host.transfers import hashed_name
from tests.hostile import board as hostile

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


def test_a_transfer_that_was_damaged_meanwhile_is_made_anew(project: Publisher, tmp_path: Path) -> None:
    for seed in range(2):
        project.change(seed)
        first = project.publish()
    cache = project.folder / "build/cache/transfers"
    for path in cache.iterdir():  # the same file lies in the repository
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
    for folder in (project.folder / "build/repository/virtual", tmp_path / "elsewhere"):
        again = project.publish("--out", str(folder))
        assert again["full_bytes"] == first["full_bytes"]
        targets = [path for path in (folder / "targets").iterdir() if path.suffix in (".full", ".delta")]
        assert len(targets) == 3
        assert all(path.name.startswith(file_sha256(path)) for path in targets)
        assert all((cache / path.name).samefile(path) for path in targets)


@pytest.mark.parametrize("is_known", [False, True])
def test_only_a_full_transfer_with_a_delta_beside_it_is_made_in_a_hurry(tmp_path: Path, is_known: bool) -> None:
    text = b"".join(b"line %d, %d\n" % (n, n * n) for n in range(9000))
    for name, data in (("old", text), ("new", text.replace(b"line 7", b"row 7"))):
        (tmp_path / name).write_bytes(data)
    extension = hostile.extension((tmp_path / "new").read_bytes())
    keys = init_keys(tmp_path / "keys", None, now=hostile.PUBLISHED)
    manifest = hostile.manifest((tmp_path / "new").read_bytes())

    def offered(bases: list[Path], folder: str) -> int:
        made = extension.image_id
        found = publish(
            tmp_path / folder,
            manifest,
            {made: tmp_path / "new"},
            {made: bases},
            keys,
            spare_effort=Effort.QUICK,
            now=hostile.PUBLISHED,
        )
        assert len(found.delta_bytes[made]) == len(bases)
        return found.full_bytes[made]

    sizes = {}
    for effort in Effort:
        encode_delta(None, tmp_path / "new", tmp_path / "full", effort=effort)
        sizes[effort] = (tmp_path / "full").stat().st_size
    assert sizes[Effort.BEST] < sizes[Effort.QUICK]
    assert offered([tmp_path / "old"], "repository") == sizes[Effort.QUICK]
    assert offered([], "repository" if is_known else "elsewhere") == sizes[Effort.BEST]


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
    made = {path.stem.partition(".")[2] for path in kept.iterdir()}
    assert made == {path.stem for path in (project.folder / "build/images").iterdir()}


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


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A keys folder, and two versions of an image for each of two who publish into `repository`."""
    init_keys(tmp_path / "keys", None, now=hostile.PUBLISHED)
    for number in range(4):
        (tmp_path / str(number)).write_bytes(hostile.image(1, 30_000 + number * 100))
    return tmp_path


def publish_mine(folder: Path) -> None:
    offered = hostile.manifest((folder / "1").read_bytes())
    made = offered.extensions[0].image_id
    keys = Keys(folder / "keys")
    publish(folder / "repository", offered, {made: folder / "1"}, {made: [folder / "0"]}, keys, now=hostile.PUBLISHED)


@contextlib.contextmanager
def rival(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has made a transfer into the repository and not signed it; a line lets it go on."""
    words = [str(folder / name) for name in ("repository", "keys", "3", "2")]
    line = [sys.executable, "-m", "tests.rival", *words]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "standing still\n"
        yield process
        process.communicate("go on\n", timeout=50)
        assert process.returncode == 0


def whole(repository: Path) -> bool:
    """Every file that the newest releases metadata names is there, and is what it says."""
    newest = max((repository / "metadata").glob("*.releases.json"), key=lambda path: int(path.name.partition(".")[0]))
    entries = json.loads(newest.read_bytes())["signed"]["targets"]
    files = [repository / "targets" / f"{entry['hashes']['sha256']}.{name}" for name, entry in entries.items()]
    return len(files) == 3 and all(file.name.startswith(file_sha256(file)) for file in files)


def test_who_publishes_into_a_folder_where_another_does_is_refused_after_a_while(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = shared / "repository"
    publish_mine(shared)
    monkeypatch.setattr(alone, "PATIENCE_S", 0.0)
    with rival(shared) as process:
        for verb, call in (
            ("publish into", lambda: publish_mine(shared)),
            ("refresh", lambda: refresh(repository, Keys(shared / "keys"))),
        ):
            with pytest.raises(OperationError) as refused:
                call()
            assert (refused.value.code, refused.value.message, refused.value.remedy) == (
                ErrorCode.CHANGE_RUNNING,
                f"cannot {verb} {repository}: pid {process.pid} is at it",
                "Try again when that has ended.",
            )
    assert whole(repository)


def test_two_that_publish_into_one_folder_follow_each_other(shared: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with rival(shared):
            mine = pool.submit(publish_mine, shared)
        mine.result(50)
    assert whole(shared / "repository")


def test_nothing_is_signed_that_is_gone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = shared / "repository"
    publish_mine(shared)
    before = (repository / "metadata" / "timestamp.json").read_bytes()

    def make_and_lose(targets: Path, *words: Any, **more: Any) -> Transfer:
        made = make_transfer(targets, *words, **more)
        (targets / hashed_name(made.sha256, made.name)).unlink()
        return made

    make_transfer = transfers.make_transfer
    monkeypatch.setattr("agent.host.repository.make_transfer", make_and_lose)
    for path in (repository / "targets").glob("*.full"):
        path.unlink()
        name = path.name
    with pytest.raises(OperationError) as refused:
        publish_mine(shared)
    assert (refused.value.code, refused.value.message, refused.value.remedy) == (
        ErrorCode.REPOSITORY_INCOMPLETE,
        f"cannot sign {repository}: {name} is not in it any more",
        "Publish again, and let nothing else write into that folder.",
    )
    assert (repository / "metadata" / "timestamp.json").read_bytes() == before


def test_a_transfer_that_is_being_kept_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = transfers.TransferCache(tmp_path / "transfers", tmp_path / "images")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.raw").touch()
    (tmp_path / "made").write_bytes(b"transfer")
    replace = Path.replace

    def prune_first(part: Path, kept: Path) -> Path:
        monkeypatch.setattr(alone, "PATIENCE_S", 0.0)
        with pytest.raises(OperationError):
            cache.prune()
        return replace(part, kept)

    monkeypatch.setattr(Path, "replace", prune_first)
    cache.keep("x.full", tmp_path / "made")
    cache.prune()
    assert cache.find("x.full")


def test_a_kept_transfer_that_goes_while_it_is_taken_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = transfers.TransferCache(tmp_path / "transfers", tmp_path / "images")
    (tmp_path / "new").write_bytes(b"new")
    monkeypatch.setattr(transfers.TransferCache, "find", lambda *_: tmp_path / "gone")
    found = transfers.make_transfer(
        tmp_path, None, tmp_path / "new", "x.full", effort=Effort.BEST, cache=cache, progress=None
    )
    assert (tmp_path / hashed_name(found.sha256, "x.full")).exists()
