"""Nobody else changes the booted board: users without rights, files they could read, ssh servers of two kinds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.contract.bridge import MARKER
from tests.bus.calls import NAME, PATH, Call, calls
from tests.device.board import TREE, Board
from tests.device.host import find_program
from tests.device.process import holds_within
from tests.device.reference import NEW_MODEL, Reference
from tests.unit.test_units import MOST

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

STRANGER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
DROPBEAR_PORT = 2222
REFUSED = ("Access denied", "not permitted", "AccessDenied")


@pytest.fixture(scope="module")
def member(serving: Board) -> str:
    """The user oper, in the group avocado, as an operator is put into it."""
    # A board whose /etc can be written keeps this in /etc/userdb; here a confext lies over it.
    serving.exec(["mkdir", "-p", "/run/userdb"])
    serving.exec(["tee", "/run/userdb/oper:avocado.membership"], input_text="{}\n")
    assert "avocado" in serving.ssh(["id", "-nG"], user="oper").stdout.split()
    return "oper"


def busctl(call: Call) -> list[str]:
    # Any change will do: whoever may not call is refused before the object is looked for.
    path = PATH if call.interface.endswith("Manager") else f"{PATH}/change/1"
    if call.is_property:
        return ["busctl", "get-property", NAME, path, call.interface, call.member]
    signature = [call.signature, *call.words] if call.signature else []
    return ["busctl", "call", NAME, path, call.interface, call.member, *signature]


def state_of(board: Board) -> str:
    listing = "find /var/lib/avocado -xdev -printf '%p %m %s %T@ %l\\n' | sort; systemd-sysext list --no-pager"
    return board.exec(["sh", "-c", listing]).stdout


def refused(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode != 0 and any(word in done.stderr for word in REFUSED)


def test_a_user_without_rights_is_refused_every_call_and_changes_nothing(serving: Board) -> None:
    before = state_of(serving)
    for call in calls():
        done = serving.exec([*STRANGER, *busctl(call)], check=False)
        assert refused(done), (call.name, done.stdout, done.stderr)
    assert state_of(serving) == before


def test_a_member_of_the_group_reads_and_is_refused_every_change(serving: Board, member: str) -> None:
    before = state_of(serving)
    for call in calls():
        done = serving.ssh(busctl(call), user=member, check=False)
        if call.name == "Change.Cancel":  # as far as here, where no change runs, nobody is asked
            assert done.returncode != 0, done.stdout
        elif not call.reads:
            assert refused(done), (call.name, done.stdout, done.stderr)
        elif call.interface.endswith("Manager"):
            assert done.returncode == 0, (call.name, done.stderr)
        else:  # a board that was just provisioned has no change to read
            assert not refused(done), (call.name, done.stderr)
    assert state_of(serving) == before


def test_avocadoctl_tells_a_member_the_status_and_a_stranger_why_not(serving: Board, member: str) -> None:
    assert "Runtime" in serving.ssh(["avocadoctl", "status"], user=member).stdout
    assert "root version 1" in serving.ssh(["avocadoctl", "root-authority"], user=member).stdout
    done = serving.ssh(["avocadoctl", "rollback"], user=member, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("avocadoctl: cannot ")
    for verb in ("status", "root-authority"):
        done = serving.exec([*STRANGER, "avocadoctl", verb], check=False)
        assert done.returncode != 0
        assert done.stderr.startswith("avocadoctl: cannot "), done.stderr


RULE = """\
polkit.addRule(function(action, subject) {
    if (action.id == "org.avocado.agent1.change" && subject.user == "oper") { return polkit.Result.YES; }
});
"""


def test_whom_polkit_lets_changes_the_board_and_nobody_else_does(serving: Board, member: str) -> None:
    refresh = ["avocadoctl", "-o", "json", "ext", "refresh"]
    assert serving.exec(["pkaction", "--action-id", "org.avocado.agent1.change"]).returncode == 0
    assert refused(serving.ssh(refresh, user=member, check=False))
    # A rule as an administrator writes it; here a confext lies over /etc.
    serving.exec(["mkdir", "-p", "/run/polkit-1/rules.d"])
    serving.exec(["tee", "/run/polkit-1/rules.d/50-oper.rules"], input_text=RULE)
    serving.exec(["systemctl", "restart", "polkit.service"])
    try:
        done = serving.ssh(refresh, user=member, check=False, timeout_s=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["requested_by"].startswith("oper")
        assert json.loads(serving.exec([*STRANGER, *refresh], check=False).stderr)["code"] == "not-permitted"
    finally:
        serving.exec(["rm", "/run/polkit-1/rules.d/50-oper.rules"])
        serving.exec(["systemctl", "restart", "polkit.service"])
    assert refused(serving.ssh(refresh, user=member, check=False))


def test_the_state_s_files_open_to_whom_the_bus_opens(serving: Board, member: str) -> None:
    for folder, mode in (("changes", "750"), ("runtimes", "750"), ("metadata", "750"), ("images", "700")):
        found = serving.exec(["stat", "-c", "%a %U %G", f"/var/lib/avocado/{folder}"]).stdout.split()
        assert found == [mode, "root", "avocado" if mode == "750" else "root"], folder
        done = serving.exec([*STRANGER, "ls", f"/var/lib/avocado/{folder}"], check=False)
        assert "Permission denied" in done.stderr
    assert serving.ssh("ls /var/lib/avocado/images", user=member, check=False).returncode != 0


@pytest.mark.parametrize("unit", MOST)
def test_systemd_s_own_count_of_the_units_stays_below_its_bound(serving: Board, unit: str) -> None:
    said = serving.exec(
        ["systemd-analyze", "security", "--no-pager", "--offline=true", f"/usr/lib/systemd/system/{unit}"], check=False
    )
    found = re.search(r"service: (\d+\.\d+)", said.stdout)
    assert found is not None, said.stderr
    assert float(found[1]) <= MOST[unit], said.stdout


@pytest.fixture(scope="module")
def dropbear(serving: Board, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose `ssh` reaches the board's dropbear; the host's own program, with the libraries it needs."""
    program = find_program("dropbear", "dropbear-bin")
    if program is None:
        pytest.skip("dropbear is not installed, and could not be: apt-get install dropbear-bin")
    folder = tmp_path_factory.mktemp("dropbear")
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, timeout=10).stdout
    libraries = [Path(path) for path in re.findall(r"=> (\S*lib(?:tom|crypt|z)\S*)", linked)]
    key = folder / "key"
    subprocess.run(["dropbearkey", "-t", "ed25519", "-f", str(key)], capture_output=True, check=True, timeout=20)
    serving.exec(["mkdir", "-p", "/root/dropbear"])
    for file in (Path(program), key, *libraries):
        serving.put(file.resolve(), f"/root/dropbear/{file.name}")
    start = f"cd /root/dropbear && LD_LIBRARY_PATH=/root/dropbear exec ./dropbear -F -E -r key -s -p {DROPBEAR_PORT}"
    serving.exec(["systemd-run", "--unit=dropbear-test", "--collect", "sh", "-c", start])
    options = f"-p {DROPBEAR_PORT} -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no"
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shlex.quote(str(serving.access.programs / "ssh"))} {options} "$@"\n')
    ssh.chmod(0o755)
    answers = [str(ssh), "root@board", "true"]
    assert holds_within(
        lambda: subprocess.run(answers, capture_output=True, timeout=10, check=False).returncode == 0, timeout_s=15
    )
    yield folder
    serving.exec(["systemctl", "stop", "dropbear-test"], check=False)


def receivers(board: Board) -> str:
    return board.exec(["pgrep", "-f", "avocadoctl receiv[e]"], check=False).stdout


def test_receive_over_dropbear_ends_when_its_reader_leaves(serving: Board, dropbear: Path) -> None:
    before = state_of(serving)
    process = subprocess.Popen(
        [str(dropbear / "ssh"), "root@board", "avocadoctl receive"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.read(len(MARKER)) == MARKER
        process.stdout.close()
        process.stdin.close()
        assert holds_within(lambda: not receivers(serving), timeout_s=15)
    finally:
        process.kill()
        process.wait(5)
    assert state_of(serving) == before


def test_a_forced_terminal_is_refused_by_name(serving: Board) -> None:
    done = serving.ssh("script -qec 'avocadoctl receive' /dev/null", check=False)
    assert "cannot receive on a terminal: it would change bytes" in done.stdout
    assert not receivers(serving)


def test_a_shell_that_talks_does_not_disturb_a_deploy_over_dropbear(
    serving: Board, dropbear: Path, project: Reference
) -> None:
    noisy = 'printf "welcome \\033[31mto\\033[0m the board\\n"; printf "\\377\\000" ; echo from bashrc >&2\n'
    serving.exec(["tee", "/root/.bashrc"], input_text=noisy)
    project.use_model(NEW_MODEL)
    environment = project.environment(serving)
    environment["PATH"] = f"{dropbear}:{environment['PATH']}"
    line = [str(Path(sys.executable).with_name("avocadoctl")), "-H", "root@board", "-o", "json"]
    done = subprocess.run(
        [*line, "deploy", "-C", str(project.folder)],
        env=environment, cwd=TREE, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "applied"
    assert not receivers(serving)
    serving.exec(["truncate", "--size=0", "/root/.bashrc"])
