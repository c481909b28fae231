"""A model file and a board belong together, or both versions are named; what nobody knows is not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.accelerator import load_accelerator
from inference.installed import installed_versions
from inference.pairing import ALWAYS, Rule, mismatch
from inference.policy import Reason


@pytest.mark.parametrize(
    ("rule", "made_for", "found", "fits"),
    [
        (Rule.SAME, "ethos-u65-256", "ethos-u65-256", True),
        (Rule.SAME, "ethos-u65-256", "ethos-u55-128", False),
        (Rule.SAME, "1.0", "1.0.0", False),
        (Rule.MAJOR, "1.4.2", "1.0.0", True),
        (Rule.MAJOR, "v2.0", "1.9.9", False),
        (Rule.MAJOR, "SDK_25_12", "SDK_25_06", True),
        (Rule.MAJOR, "unknown", "1.0", False),
        (Rule.AT_LEAST, "2.2.0", "2.10.0", True),
        (Rule.AT_LEAST, "2.2.0", "2.2", True),
        (Rule.AT_LEAST, "2.2", "2.2.0", True),
        (Rule.AT_LEAST, "2.10.0", "2.9.3", False),
        (Rule.AT_LEAST, "2.2.0", "TensorFlow Lite 2.17.0 (ai_edge_litert 1.0.1)", True),
        (Rule.AT_LEAST, "2.18.0", "TensorFlow Lite 2.17.0 (ai_edge_litert 2.3.0)", False),
        (Rule.SAME, "", "1.0", True),
        (Rule.SAME, "1.0", "", True),
    ],
)
def test_a_rule_says_how_near_two_versions_must_be(rule: Rule, made_for: str, found: str, fits: bool) -> None:
    assert (mismatch({"it": made_for}, {"it": found}, {"it": rule}) is None) is fits


def test_a_refusal_names_both_versions() -> None:
    made_for, found = {"runtime": "2.9.0", "delegate": "2.0"}, {"runtime": "tflite_runtime 2.5.0", "delegate": "1.0"}
    rules = {**ALWAYS, "delegate": Rule.MAJOR}
    wrong = mismatch(made_for, found, rules)
    assert wrong is not None
    error = wrong.error("movenet", "npu")
    assert error.message == (
        "cannot run movenet on npu: its file needs runtime 2.9.0 or later, and this board has tflite_runtime 2.5.0"
    )
    assert error.remedy == "prepare the model for this board's runtime, or update the board"
    wrong = mismatch({**made_for, "runtime": "2.2.0"}, found, rules)
    assert wrong is not None
    assert wrong.error("movenet", "npu").message == (
        "cannot run movenet on npu: its file was made for delegate 2.0, and this board has 1.0"
    )


def test_a_boards_versions_are_found_where_the_profile_says(tmp_path: Path) -> None:
    (tmp_path / "module/galcore").mkdir(parents=True)
    (tmp_path / "module/galcore/version").write_text("6.4.11.p2\n")
    (tmp_path / "release").write_text(" 3.1.2\x1b[31m \u202e\nmore\n")
    sources = {
        "driver": {"module": "galcore"},
        "converter": {"file": str(tmp_path / "release")},
        "npu": {"text": "ethos-u65-256"},
        "delegate": {"symbol": "version"},
        "absent": {"file": str(tmp_path / "nothing")},
        "unloaded": {"module": "nothing"},
    }
    assert installed_versions(sources, str(tmp_path / "no-library.so"), tmp_path) == {
        "driver": "6.4.11.p2",
        "converter": "3.1.2[31m",
        "npu": "ethos-u65-256",
    }


def test_the_profile_of_a_compiled_model_says_what_it_must_have_been_compiled_for() -> None:
    rules = load_accelerator("imx93-ethosu").pairing
    found = installed_versions({what: one.model_dump() for what, one in rules.items()}, "")
    wrong = mismatch(
        {"npu": "ethos-u55-128", "command-stream": "0"}, found, {what: one.rule for what, one in rules.items()}
    )
    assert wrong is not None
    assert (wrong.made_for, wrong.found) == ("ethos-u55-128", "ethos-u65-256")


def test_the_page_has_words_for_every_reason() -> None:
    page = (Path(__file__).parents[2] / "inference/web/page.js").read_text()
    assert [reason for reason in Reason if reason is not Reason.OK and f'"{reason}":' not in page] == []
