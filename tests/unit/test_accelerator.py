"""Accelerator profiles: the shipped ones hold, and a wrong one is refused with the place and the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference.accelerator import load_accelerator, shipped
from inference.errors import InferenceError
from inference.orders import Orders, Places, orders_for
from inference.policy import Backend

PLACES = Places(Path("/var/cache/p"), Path("/run/p/reset-request"), Path("/run/r/answer.json"))

TEN_LINES = """
name = "board"
kind = "npu"
nodes = ["/dev/npu0"]

[delegate]
path = "/usr/lib/libnpu_delegate.so"

[deadlines]
first_invoke_s = 120
"""


def test_every_shipped_profile_is_valid_and_named_after_its_file() -> None:
    assert {"virtual", "cpu", "imx8mp-vx", "imx93-ethosu", "imx95-neutron", "imx8mp-etnaviv"} <= set(shipped())
    assert [load_accelerator(name).name for name in shipped()] == list(shipped())


def test_the_vx_profile_keeps_off_the_gpu_and_caches_what_it_compiles() -> None:
    env = load_accelerator("imx8mp-vx").env
    assert env["USE_GPU_INFERENCE"] == "0"
    assert env["VIV_VX_ENABLE_CACHE_GRAPH_BINARY"] == "1"


def test_ten_lines_are_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(TEN_LINES)
    profile = load_accelerator(path)
    assert profile.deadlines.first_invoke_s == 120
    assert profile.deadlines.hard_factor >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("first_invoke_s", "first_invoke"), "deadlines.first_invoke: Extra inputs are not permitted"),
        (("120", "0"), "deadlines.first_invoke_s: Input should be greater than 0"),
        (('kind = "npu"', 'kind = "cpu"'), "a profile of kind npu needs a [delegate], and one of kind cpu has none"),
        (
            ("first_invoke_s = 120", "hard_factor = 2"),
            "deadlines.hard_factor: Input should be greater than or equal to 4",
        ),
        (("first_invoke_s = 120", "soft_ms_ceiling = 1"), "soft_ms_ceiling must not be below soft_ms_floor"),
        (
            ("[deadlines]\nfirst_invoke_s = 120", '[reset]\nladder = ["rebind"]'),
            "the ladder must begin with new_worker",
        ),
        (
            ("[deadlines]\nfirst_invoke_s = 120", '[reset]\nladder = ["new_worker", "reboot", "rebind"]'),
            "the ladder must name each rung once, from mild to harsh: new_worker, rebind, reload_module, reboot",
        ),
        (
            ("[deadlines]\nfirst_invoke_s = 120", "[reset]\nlimits = { reboot = 1 }"),
            "limits names reboot, which the ladder does not have",
        ),
        (
            ("[deadlines]\nfirst_invoke_s = 120", '[pairing.npu]\nrule = "same"'),
            "a pairing needs exactly one of text, file, module and symbol",
        ),
        (
            ("[deadlines]\nfirst_invoke_s = 120", '[pairing.runtime]\nrule = "same"\ntext = "2.14.0"'),
            "pairing: runtime is checked on every board",
        ),
        (('name = "board"', 'name = "A Board"'), "name: String should match pattern"),
        (("[delegate]", "[delegate"), "Expected ']'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "board.toml"
    path.write_text(TEN_LINES.replace(*change))
    with pytest.raises(InferenceError) as caught:
        load_accelerator(path)
    assert caught.value.message.startswith("cannot ")
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_an_unknown_profile_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InferenceError) as caught:
        load_accelerator("imx8")
    assert caught.value.message == "cannot read accelerator profile imx8: No such file or directory"
    assert caught.value.remedy == f"name a file or one of: {', '.join(shipped())}"


@pytest.mark.parametrize("name", ["virtual", "cpu"])
def test_orders_survive_json(name: str) -> None:
    orders = orders_for(load_accelerator(name), Path("/usr/share/avocado/model"), PLACES)
    assert Orders.parse(json.loads(json.dumps(orders.as_dict()))) == orders


def test_a_board_with_an_npu_gets_both_lanes_unless_one_is_asked_for() -> None:
    profile = load_accelerator("virtual")

    def lanes(only: Backend | None) -> list[Backend]:
        return [lane.backend for lane in orders_for(profile, Path("m"), PLACES, only=only).lanes]

    assert lanes(None) == [Backend.NPU, Backend.CPU]
    assert lanes(Backend.NPU) == [Backend.NPU]
    assert lanes(Backend.CPU) == [Backend.CPU]
