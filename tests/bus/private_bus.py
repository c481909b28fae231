"""A dbus-daemon of our own: a system bus that lets everybody own and call everything, in a folder of the test's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
  </policy>
</busconfig>
"""


@contextlib.contextmanager
def private_bus(folder: Path) -> Iterator[str]:
    """Start the bus, give its address, end it."""
    program = shutil.which("dbus-daemon")
    if program is None:
        pytest.skip("dbus-daemon is not installed")
    socket = folder / "bus"
    config = folder / "bus.conf"
    config.write_text(_CONFIG.format(socket=socket))
    process = subprocess.Popen(
        [program, "--config-file", str(config), "--nofork", "--nopidfile", "--print-address"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("unix:path=")
        socket.chmod(0o666)
        yield f"unix:path={socket}"
    finally:
        process.terminate()
        process.wait(5)
        assert process.stdout is not None
        process.stdout.close()


def environment(address: str, **more: str) -> dict[str, str]:
    """The environment in which a program takes the private bus for the system's."""
    return {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": address, **more}
