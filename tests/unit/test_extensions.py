"""Installed, merged and wanted put beside one another; systemd's compatibility rules; what a release file asks for."""

from __future__ import annotations

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.local import disable
from agent.contract.manifest import Manifest
from agent.extensions import (
    Kind,
    MergedSet,
    commands,
    compare,
    incompatibility,
    modules,
    owned_services,
    parse_release,
)
from tests.change.sets import releases, runtime

R1 = runtime("1")
R2 = runtime("2", pose_model="2")
BOARD = {"ID": "debian", "VERSION_ID": "13", "ID_LIKE": "gnu linux"}
LEVELLED = BOARD | {"SYSEXT_LEVEL": "2"}


def merged(manifest: Manifest, *extra: str, without: str = "") -> MergedSet:
    names: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for extension in manifest.extensions:
        for kind in extension.types:
            if extension.name != without:
                names[Kind(kind)].append(manifest.link_name(extension).removesuffix(".raw"))
    names[Kind.SYSEXT] += extra
    return MergedSet({kind: tuple(sorted(found)) for kind, found in names.items()})


def held(*manifests: Manifest) -> list[str]:
    return [extension.image_id for manifest in manifests for extension in manifest.extensions]


def test_a_board_as_it_should_be_has_no_problem() -> None:
    report = compare(R1, merged(R1), held=held(R1), releases=releases(R1))
    assert report.problems == ()
    assert [view.name for view in report.extensions] == [extension.name for extension in R1.extensions]
    assert all(view.is_merged and view.installed and view.origin == "runtime" for view in report.extensions)


def test_merge_names_follow_the_order_of_the_list() -> None:
    report = compare(R1, merged(R1), held=held(R1), releases=releases(R1))
    assert [view.merge_name for view in report.extensions] == [
        "99-pose-config",
        "98-pose-model",
        "97-pose-app",
        "96-npu-virtual",
        "95-avocado-agent",
    ]


def test_services_come_from_the_release_files() -> None:
    report = compare(R1, merged(R1), held=held(R1), releases=releases(R1))
    assert {view.name: view.services for view in report.extensions}["pose-app"] == ("pose.service",)


def test_an_image_only_another_runtime_lists_is_shown_and_no_problem() -> None:
    report = compare(R1, merged(R1), held=held(R1, R2), releases=releases(R1, R2), others=[R2])
    assert report.problems == ()
    assert [(v.name, v.version, v.origin) for v in report.extensions if not v.wanted] == [
        ("pose-model", "2", "other-runtime")
    ]


def test_what_was_disabled_here_is_shown_as_such_and_is_no_problem() -> None:
    without = disable(disable(R1, "pose-app"), "npu-virtual")
    for others in ([], [R1]):
        report = compare(without, merged(without), held=held(R1), releases=releases(R1), others=others)
        assert report.problems == ()
        shown = [(view.name, view.origin, view.wanted, view.is_merged) for view in report.extensions if view.disabled]
        assert shown == [("pose-app", "other-runtime", False, False), ("npu-virtual", "other-runtime", False, False)]
        assert len(report.extensions) == len(R1.extensions)


PROBLEMS = [
    (
        {"merged": merged(R1, without="pose-model")},
        "not-merged",
        "extension pose-model 1 is wanted but not merged (sysext)",
        "Run 'avocadoctl refresh'.",
    ),
    (
        {"held": held(R1)[1:]},
        "image-missing",
        f"extension pose-config 1: its image {held(R1)[0]} is not on the board",
        "Deploy this runtime again from the host.",
    ),
    (
        {"merged": merged(R1, "10-stranger")},
        "foreign-merged",
        "sysext 10-stranger is merged and was not put there by the agent",
        "Move its image out of the folders of systemd-sysext, then run 'avocadoctl refresh'.",
    ),
    (
        {"wanted": None, "others": [R1]},
        "merged-not-wanted",
        "confext 99-pose-config is merged but the active runtime does not list it",
        "Run 'avocadoctl refresh'.",
    ),
    (
        {"merged": MergedSet(merged(R1).names, {}, {Kind.SYSEXT: {"98-pose-model": held(R2)[1]}})},
        "other-image-merged",
        "extension pose-model 1 is wanted, but another image is merged in its place",
        "Run 'avocadoctl refresh'.",
    ),
]


@pytest.mark.parametrize(("changed", "code", "message", "remedy"), PROBLEMS, ids=[case[1] for case in PROBLEMS])
def test_every_difference_is_a_problem_with_a_remedy(changed: dict, code: str, message: str, remedy: str) -> None:
    given = {"wanted": R1, "merged": merged(R1), "held": held(R1), "releases": releases(R1)} | changed
    found = compare(given.pop("wanted"), given.pop("merged"), **given).problems
    assert (code, message, remedy) in [(problem.code, problem.message, problem.remedy) for problem in found]


COMPATIBILITY = [
    ({"ID": "debian", "VERSION_ID": "13"}, BOARD, None),
    ({"ID": "_any"}, BOARD, None),
    ({"ID": "_any", "ARCHITECTURE": "arm64"}, BOARD, "ARCHITECTURE=arm64, the board is x86-64"),
    ({"ID": "debian", "VERSION_ID": "13", "ARCHITECTURE": "x86-64"}, BOARD, None),
    ({"ID": "debian", "VERSION_ID": "13", "ARCHITECTURE": "_any"}, BOARD, None),
    ({"ID": "debian", "VERSION_ID": "99"}, BOARD, "VERSION_ID=99, the board is 13"),
    ({"ID": "debian"}, BOARD, "its release file has no VERSION_ID, the board is 13"),
    ({"VERSION_ID": "13"}, BOARD, "its release file has no ID"),
    ({}, BOARD, "its release file has no ID"),
    ({"ID": "fedora", "VERSION_ID": "13"}, BOARD, "ID=fedora, the board is debian"),
    ({"ID": "gnu", "VERSION_ID": "13"}, BOARD, None),
    ({"ID": "arch"}, {"ID": "arch"}, None),
    ({"ID": "debian", "SYSEXT_LEVEL": "2"}, LEVELLED, None),
    ({"ID": "debian", "SYSEXT_LEVEL": "1", "VERSION_ID": "13"}, LEVELLED, "SYSEXT_LEVEL=1, the board has 2"),
    ({"ID": "debian", "SYSEXT_LEVEL": "2", "VERSION_ID": "12"}, LEVELLED, None),
    ({"ID": "debian", "SYSEXT_LEVEL": "2"}, BOARD, "its release file has no VERSION_ID, the board is 13"),
    ({"ID": "debian", "CONFEXT_LEVEL": "1", "VERSION_ID": "13"}, LEVELLED, None),
    ({"ID": "_any", "SYSEXT_SCOPE": "portable"}, BOARD, "SYSEXT_SCOPE=portable leaves out system"),
    ({"ID": "_any", "SYSEXT_SCOPE": "system portable"}, BOARD, None),
]


@pytest.mark.parametrize(("release", "board", "why"), COMPATIBILITY)
def test_compatibility_is_what_systemd_makes_of_it(release: dict, board: dict, why: str | None) -> None:
    assert incompatibility(release, Kind.SYSEXT, board, "x86_64") == why


def test_a_release_file_reads_as_a_shell_would_read_it() -> None:
    text = b"# comment\nID=debian\nVERSION_ID=\"13\"\n\nAVOCADO_ENABLE_SERVICES='a.service b'\n"
    assert parse_release(text, "x") == {"ID": "debian", "VERSION_ID": "13", "AVOCADO_ENABLE_SERVICES": "a.service b"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ID=debian\nnonsense\n", "cannot read it: line 2 is not KEY=value"),
        (b'ID="debian\n', "cannot read it: line 1: No closing quotation"),
        (b"\xff\xfe", "cannot read it: it is not UTF-8"),
        (b"A=" + b"x" * 70000, "cannot read it: 70002 bytes, limit 65536"),
    ],
)
def test_a_damaged_release_file_is_refused_by_line(data: bytes, message: str) -> None:
    with pytest.raises(OperationError) as caught:
        parse_release(data, "it")
    assert (caught.value.code, caught.value.message) == (ErrorCode.BAD_IMAGE, message)


def test_owned_services_are_read_from_both_keys_once() -> None:
    keys = {"AVOCADO_ENABLE_SERVICES": "pose web.socket", "EXTENSION_RESTART_UNITS": "pose.service;b.service"}
    assert owned_services(keys) == ("pose.service", "web.socket", "b.service")


@pytest.mark.parametrize("name", ["-x.service", "a/b.service", "pose.sh", "a$b.service"])
def test_a_word_that_is_no_unit_name_is_refused(name: str) -> None:
    with pytest.raises(OperationError, match="is no unit name"):
        owned_services({"AVOCADO_ENABLE_SERVICES": name})


def test_modules_and_commands_are_lists_that_no_shell_reads() -> None:
    assert modules({"AVOCADO_MODPROBE": "galcore imx-sdma"}) == ("galcore", "imx-sdma")
    assert commands({"AVOCADO_ON_MERGE": "depmod -a; touch '/run/a b' ;;"}, "AVOCADO_ON_MERGE") == [
        ["depmod", "-a"],
        ["touch", "/run/a b"],
    ]
    with pytest.raises(OperationError, match="is no module name"):
        modules({"AVOCADO_MODPROBE": "-r galcore"})
