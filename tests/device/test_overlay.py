"""The Overlay port on the booted board: one suite for both adapters, then what only the gapless one promises.

systemd's own tools are the judge: what they say is merged, and what they do afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.device.board import Board
from tests.device.overlays import RELEASE, STATE, Built, Driver, Image, conf, gap, install, send_runtime

pytestmark = [pytest.mark.device, pytest.mark.timeout(180)]

WAYS = {"gapless": "auto", "reload": "reload"}
RUNTIMES = {
    "old": [gap("a"), conf("1")],
    "model": [gap("b"), conf("1")],  # what most deploys are: /etc stays
    "both": [gap("b"), conf("2")],
    "more": [Image("top", files={"usr/share/gap/both": "top", "usr/share/gap/top": "t"}), gap("a"), conf("1")],
}


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    return {}


@pytest.fixture(scope="module")
def merging(new_board: Callable[[], Board], built: dict[str, Built]) -> Board:
    if shutil.which("mkfs.erofs") is None:
        pytest.skip("mkfs.erofs is not installed")
    made = new_board()
    made.provision(lambda root: built.update(install(root, RUNTIMES, "old")))
    made.boot()
    return made


@pytest.fixture
def board(merging: Board) -> Iterator[Board]:
    """The board, with its first set merged by systemd before and after."""
    yield merging
    if not merging.is_running():
        merging.boot()
    for kind in ("sysext", "confext"):
        merging.exec([f"systemd-{kind}", "unmerge"])
        merging.exec([f"systemd-{kind}", "refresh"])


@pytest.fixture(params=list(WAYS))
def driver(request: pytest.FixtureRequest, board: Board) -> Iterator[Driver]:
    with Driver(board, WAYS[request.param]) as made:
        assert made.way == request.param, made.reason
        yield made
        made.do("settle")


@pytest.fixture
def gapless(board: Board) -> Iterator[Driver]:
    with Driver(board, "auto") as made:
        assert made.way == "gapless", made.reason
        yield made


def read(board: Board, path: str) -> str:
    found = board.exec(["cat", path], check=False)
    return found.stdout if found.returncode == 0 else "-"


def seen(board: Board) -> dict[str, str]:
    paths = {"both": "/usr/share/gap/both", "opt": "/opt/gap/version", "conf": "/etc/gap.conf"}
    return {name: read(board, path) for name, path in paths.items()}


def systemd_says(board: Board) -> dict[str, list[str]]:
    found = {}
    for kind in ("sysext", "confext"):
        rows = json.loads(board.exec([f"systemd-{kind}", "status", "--json=short"]).stdout)
        found[kind] = sorted({name for row in rows for name in row["extensions"] if row["extensions"] != "none"})
    return found


def overlays(board: Board) -> dict[str, int]:
    """How many overlays lie on each hierarchy."""
    lines = board.exec(["cat", "/proc/1/mountinfo"]).stdout.splitlines()
    places = [line.split()[4] for line in lines if line.partition(" - ")[2].startswith("overlay ")]
    return {where: places.count(where) for where in ("/usr", "/opt", "/etc")}


def names(one: Built) -> dict[str, list[str]]:
    return {kind: sorted(links) for kind, links in one.images.items()}


OLD = {"both": "a", "opt": "a", "conf": "1"}
BOTH = {"both": "b", "opt": "b", "conf": "2"}


def test_a_set_is_shown_in_place_of_another_and_back(board: Board, built: dict[str, Built], driver: Driver) -> None:
    before = board.mounts()
    assert driver.do("merged")["names"] == names(built["old"])
    driver.do("show", built["both"].runtime)
    assert seen(board) == BOTH
    assert read(board, "/usr/share/gap/only-a") == "-"
    assert driver.do("merged")["names"] == systemd_says(board) == names(built["both"])
    assert board.exec(["readlink", f"/{STATE}/active"]).stdout.strip() == f"runtimes/{built['old'].runtime}"
    driver.do("show", built["old"].runtime)
    assert seen(board) == OLD
    driver.do("settle")
    assert (board.mounts(), overlays(board)) == (before, {"/usr": 1, "/opt": 1, "/etc": 1})


def test_the_order_of_the_links_decides_which_file_is_seen(
    board: Board, built: dict[str, Built], driver: Driver
) -> None:
    driver.do("show", built["more"].runtime)
    assert seen(board)["both"] == "top"
    assert systemd_says(board)["sysext"] == ["98-gap", "99-top"]


def test_showing_the_set_that_is_shown_is_harmless(board: Board, built: dict[str, Built], driver: Driver) -> None:
    for _ in range(2):
        driver.do("show", built["both"].runtime)
    assert seen(board) == BOTH
    assert overlays(board) == {"/usr": 1, "/opt": 1, "/etc": 1}


def test_nothing_is_merged_when_nothing_is_wanted(board: Board, built: dict[str, Built], driver: Driver) -> None:
    driver.do("show", None)
    assert seen(board) == {"both": "-", "opt": "-", "conf": "-"}
    assert systemd_says(board) == {"sysext": [], "confext": []}
    driver.do("show", built["old"].runtime)
    assert seen(board) == OLD


def test_after_activation_a_refresh_by_hand_merges_the_same_set(
    board: Board, built: dict[str, Built], driver: Driver
) -> None:
    driver.do("show", built["both"].runtime)
    activate(board, built["both"])
    driver.do("settle")
    try:
        for kind in ("sysext", "confext"):
            board.exec([f"systemd-{kind}", "refresh"])
        assert seen(board) == BOTH
        assert driver.do("merged")["names"] == names(built["both"])
        assert overlays(board) == {"/usr": 1, "/opt": 1, "/etc": 1}
    finally:
        activate(board, built["old"])


def activate(board: Board, one: Built) -> None:
    board.exec(["ln", "-sfn", f"runtimes/{one.runtime}", f"/{STATE}/active"])


def test_systemd_takes_away_what_was_shown(board: Board, built: dict[str, Built], driver: Driver) -> None:
    driver.do("show", built["both"].runtime)
    for kind in ("sysext", "confext"):
        board.exec([f"systemd-{kind}", "unmerge"])
    assert seen(board) == {"both": "-", "opt": "-", "conf": "-"}
    assert overlays(board) == {"/usr": 0, "/opt": 0, "/etc": 0}
    assert driver.do("merged")["names"] == {"sysext": [], "confext": []}


def test_a_trial_is_forgotten_by_a_power_cut(board: Board, built: dict[str, Built]) -> None:
    for wanted in WAYS.values():
        with Driver(board, wanted) as driver:
            driver.do("show", built["both"].runtime)
        board.power_cut()
        board.boot()
        assert seen(board) == OLD
        assert systemd_says(board) == names(built["old"])


def test_an_image_for_another_system_is_refused_and_the_old_set_can_be_shown_again(
    board: Board, built: dict[str, Built], driver: Driver
) -> None:
    stranger = Image("gap", files={"usr/share/gap/both": "x"}, release=RELEASE | {"VERSION_ID": "99"})
    bad = send_runtime(board, "stranger", [stranger, conf("1")])
    error = driver.ask("show", bad.runtime)["error"]
    assert error["code"] in ("incompatible", "switch-failed")
    assert error["message"].startswith("cannot ")
    driver.do("show", built["old"].runtime)
    assert seen(board) == OLD


# -- what only the gapless adapter promises


def make_fifo(tree: Path) -> None:
    release = tree / "usr/lib/extension-release.d/extension-release.gap"
    release.unlink()
    os.mkfifo(release)


def link_usr_out(tree: Path) -> None:
    (tree / "usr").rename(tree / "real")
    (tree / "usr").symlink_to("/usr")


REFUSED = {
    "another version of the system": (
        Image("gap", files={"usr/x": ""}, release=RELEASE | {"VERSION_ID": "99"}),
        "cannot merge extension gap: systemd would ignore it: VERSION_ID=99, the board is 13",
    ),
    "another system": (
        Image("gap", files={"usr/x": ""}, release={"ID": "fedora"}),
        "cannot merge extension gap: systemd would ignore it: ID=fedora, the board is debian",
    ),
    "another processor": (
        Image("gap", files={"usr/x": ""}, release=RELEASE | {"ARCHITECTURE": "s390x"}),
        "cannot merge extension gap: systemd would ignore it: ARCHITECTURE=s390x, the board is ",
    ),
    "a confext level": (
        Image("gap", "confext", {"etc/x": ""}, release={"ID": "debian", "CONFEXT_LEVEL": "7"}),
        "cannot merge extension gap: systemd would ignore it: its release file has no VERSION_ID, the board is 13",
    ),
    "a release file that is a pipe": (
        Image("gap", files={"usr/x": ""}, change=make_fifo),
        "cannot merge sysext '99-gap': extension-release.gap is not a plain file",
    ),
    "a usr that is a link": (
        Image("gap", files={"usr/x": ""}, change=link_usr_out),
        "cannot merge sysext '99-gap': usr/lib leads through something that is not a folder",
    ),
    "a folder that would close the base's": (
        Image("gap", files={"usr/bin/x": ""}, change=lambda tree: (tree / "usr/bin").chmod(0o700)),
        "cannot merge sysext '99-gap': its folder /usr/bin has mode 0700 and would close the base's (0755)",
    ),
    "a whole system": (
        Image("gap", files={"usr/lib/os-release": "ID=debian\n"}),
        "cannot merge sysext '99-gap': it carries usr/lib/os-release, so systemd takes it for a whole system",
    ),
}


@pytest.mark.parametrize(("image", "message"), REFUSED.values(), ids=list(REFUSED))
def test_an_image_that_systemd_would_ignore_or_choke_on_is_refused_and_nothing_moves(
    board: Board, gapless: Driver, image: Image, message: str
) -> None:
    before = board.mounts()
    bad = send_runtime(board, message, [image, conf("1")])
    said = gapless.ask("show", bad.runtime)
    assert said["error"]["message"].startswith(message)
    assert said["error"]["remedy"]
    assert (seen(board), board.mounts()) == (OLD, before)


def test_an_image_whose_bytes_changed_is_refused_by_its_name(
    board: Board, built: dict[str, Built], gapless: Driver
) -> None:
    image = built["model"].images["sysext"]["99-gap"]
    path = f"/{STATE}/images/{image}.raw"
    board.exec(["cp", path, "/root/whole.raw"])
    try:
        board.exec(["sh", "-c", f"printf x | dd of={path} bs=1 seek=3000 conv=notrunc status=none"])
        error = gapless.ask("show", built["model"].runtime)["error"]
        assert (error["code"], error["message"]) == (
            "bad-image",
            f"cannot merge sysext '99-gap': its bytes are not those of image {image}",
        )
        board.exec(["sh", "-c", f"truncate -s 4096 {path}"])
        assert gapless.ask("show", built["model"].runtime)["error"]["code"] == "bad-image"
        assert seen(board) == OLD
    finally:
        board.exec(["sh", "-c", f"cat /root/whole.raw > {path}"])
    gapless.do("show", built["model"].runtime)
    assert seen(board)["both"] == "b"


def test_an_image_that_was_checked_is_not_believed_once_its_bytes_have_changed(
    board: Board, built: dict[str, Built], gapless: Driver
) -> None:
    image = built["model"].images["sysext"]["99-gap"]
    path = f"/{STATE}/images/{image}.raw"
    board.exec(["cp", path, "/root/whole.raw"])
    before = board.mounts()
    gapless.do("check", built["model"].runtime)
    assert (seen(board), board.mounts()) == (OLD, before)
    try:
        # Not even its time of change says so.
        board.exec(["sh", "-c", f"touch -r {path} /root/time; printf x | dd of={path} bs=1 seek=3000 conv=notrunc"])
        board.exec(["touch", "-r", "/root/time", path])
        error = gapless.ask("show", built["model"].runtime)["error"]
        assert error["message"] == f"cannot merge sysext '99-gap': its bytes are not those of image {image}"
        error = gapless.ask("check", built["model"].runtime)["error"]
        assert error["message"] == f"cannot merge sysext '99-gap': its bytes are not those of image {image}"
        assert seen(board) == OLD
    finally:
        board.exec(["sh", "-c", f"cat /root/whole.raw > {path}"])
    gapless.do("check", built["model"].runtime)
    gapless.do("show", built["model"].runtime)
    assert seen(board)["both"] == "b"


def test_strays_beside_the_links_never_get_in(board: Board, built: dict[str, Built], gapless: Driver) -> None:
    folder = f"/{STATE}/runtimes/{built['both'].runtime}/sysext"
    strays = ["._99-gap.raw", "99-gap (1).raw", "20-web.raw.part", "10-pose:v2.raw", "10-pose,v2.raw", "junk.raw"]
    board.exec(["sh", "-c", 'cd "$0" && for name; do echo junk > "$name"; done', folder, *strays])
    try:
        gapless.do("show", built["both"].runtime)
        assert (seen(board), systemd_says(board)) == (BOTH, names(built["both"]))
    finally:
        board.exec(["sh", "-c", 'cd "$0" && rm -- "$@"', folder, *strays])


def test_a_new_model_never_remounts_etc(board: Board, built: dict[str, Built], gapless: Driver) -> None:
    def etc() -> str:
        return board.exec(["stat", "-c", "%d", "/etc"]).stdout

    before = etc()
    gapless.do("show", built["model"].runtime)
    assert (seen(board), etc()) == (OLD | {"both": "b", "opt": "b"}, before)
    gapless.do("show", built["both"].runtime)
    assert etc() != before


def test_what_is_merged_is_known_by_image_whoever_merged_it(
    board: Board, built: dict[str, Built], gapless: Driver
) -> None:
    assert gapless.do("merged")["images"] == built["old"].images
    gapless.do("show", built["model"].runtime)
    assert gapless.do("merged")["images"] == built["model"].images
    board.exec(["systemd-sysext", "refresh"])  # behind the agent's back: back to what the boot would merge
    assert gapless.do("merged")["images"] == built["old"].images


@pytest.mark.parametrize("call", [3, 4])
def test_a_switch_that_is_killed_half_way_leaves_whole_sets_and_the_next_start_leaves_one(
    board: Board, built: dict[str, Built], call: int
) -> None:
    before = board.mounts()
    with Driver(board, "auto") as driver:
        driver.do("cut", call)  # 1 and 2 uncover the base in private, 3 takes the old /usr away, 4 the old /opt
        assert "error" in driver.ask("show", built["model"].runtime)
    usr, opt = seen(board)["both"], seen(board)["opt"]
    assert (usr, opt) == {3: ("a", "a"), 4: ("b", "a")}[call]
    assert overlays(board) == {"/usr": {3: 2, 4: 1}[call], "/opt": 2, "/etc": 1}
    with Driver(board, "auto") as driver:
        driver.do("settle")
    assert (seen(board), overlays(board)) == (OLD, {"/usr": 1, "/opt": 1, "/etc": 1})
    assert board.mounts() == before


def test_mounts_inside_a_hierarchy_survive_a_switch(board: Board, built: dict[str, Built], gapless: Driver) -> None:
    board.exec(["sh", "-c", "mount -t tmpfs tmpfs /usr/local && mkdir /usr/local/d && mount -t tmpfs t /usr/local/d"])
    try:
        board.exec(["sh", "-c", "echo kept > /usr/local/d/file"])
        before = board.mounts()
        gapless.do("show", built["both"].runtime)
        assert (read(board, "/usr/local/d/file").strip(), board.mounts()) == ("kept", before)
        assert seen(board) == BOTH
    finally:
        board.exec(["sh", "-c", "umount /usr/local/d && umount /usr/local"])


def test_a_kernel_that_cannot_do_it_gets_systemd_s_reload(board: Board, built: dict[str, Built]) -> None:
    with Driver(board, "old-kernel") as driver:
        assert (driver.way, driver.reason) == ("reload", "the new mount cannot be put below /tmp: Invalid argument")
        driver.do("show", built["both"].runtime)
        assert seen(board) == BOTH
        driver.do("settle")


def test_a_mutable_overlay_is_left_to_systemd(board: Board, built: dict[str, Built]) -> None:
    with Driver(board, "auto") as early:
        board.exec(["systemd-sysext", "unmerge"])
        board.exec(["systemd-sysext", "merge", "--mutable=ephemeral"])
        try:
            with Driver(board, "auto") as driver:
                assert (driver.way, driver.reason) == ("reload", "/usr is merged mutable")
            error = early.ask("show", built["both"].runtime)["error"]
            assert error["message"] == "cannot switch the extensions: /usr is merged mutable"
            assert error["remedy"] == "Let the agent look again how it can switch: systemctl restart avocadod"
        finally:
            board.exec(["systemd-sysext", "unmerge"])
