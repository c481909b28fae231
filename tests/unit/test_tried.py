"""What a trial left behind is judged by a table; what a program of the set on trial prints is believed in nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tried import Tried, Verdict, read_answer

GOOD = {
    "passed": True,
    "backend": "npu",
    "reason": "ok",
    "oks": 0.9912345,
    "first_invoke_ms": 1512.5,
    "model": "movenet",
    "version": "4.1",
    "required_backend": "npu",
    "message": "",
    "remedy": "",
}


def ended(status: int = 1, stderr: str = "", **changed: Any) -> dict[str, Any]:
    return {"status": status, "stdout": json.dumps(GOOD | {"passed": status == 0} | changed), "stderr": stderr}


def test_a_golden_frame_that_passed_is_a_pass_with_its_figures() -> None:
    assert read_answer(ended(0)) == Tried(Verdict.PASSED, "npu", "movenet 4.1", 0.991, 1512.5)


FAILED = [
    (ended(reason="wrong-result", message="cannot trust the npu: OKS 0.1"), "cannot trust the npu: OKS 0.1"),
    (ended(reason="wrong-result", oks=0.25), "its golden frame did not pass on the npu: OKS 0.25 (wrong-result)"),
    (ended(reason="hung", message="gave no answer"), "gave no answer"),
    (ended(0, passed="yes", reason="ok"), "its golden frame did not pass on the npu: OKS 0.99 (ok)"),
    (ended(1, passed=True, message="odd"), "odd"),
    (ended(0, backend="gpu", message="odd"), "odd"),
    (
        {"status": 1, "stdout": "", "stderr": "noise\navocado-infer: cannot read pose.toml: no\n  try: correct it\n"},
        "cannot read pose.toml: no",
    ),
    ({"status": -11, "stdout": "", "stderr": ""}, "avocado-infer ended with signal 11 and said nothing"),
    ({"status": 1, "stdout": "[1]", "stderr": ""}, "avocado-infer ended with status 1 and said nothing"),
    ({"status": 3, "stdout": json.dumps(GOOD), "stderr": "last\nwords \x1b[2J"}, r"words \x1b[2J"),
]


@pytest.mark.parametrize(("answer", "why"), FAILED)
def test_what_speaks_of_the_model_fails_it(answer: dict[str, Any], why: str) -> None:
    tried = read_answer(answer)
    assert (tried.verdict, tried.why, tried.is_busy) == (Verdict.FAILED, why, False)


UNKNOWN = [
    ({"skipped": "the new set has no /usr/bin/avocado-infer"}, "the new set has no /usr/bin/avocado-infer"),
    ({}, "the trial left no answer"),
    ({"status": "0"}, "the trial left no answer"),
    (ended(2), "the new set's avocado-infer cannot try the model that pose.toml names"),
    (ended(-9), "avocado-infer was killed before it answered"),
    (ended(reason="no-model", message="cannot try a model: none"), "cannot try a model: none"),
    (ended(reason="slow", message="late"), "late"),
    (ended(reason="refused", message="no", required_backend="any"), "no"),
]


@pytest.mark.parametrize(("answer", "why"), UNKNOWN)
def test_what_says_nothing_about_the_model_refuses_nobody(answer: dict[str, Any], why: str) -> None:
    tried = read_answer(answer)
    assert (tried.verdict, tried.why) == (Verdict.UNKNOWN, why)


def test_an_npu_that_another_process_holds_is_told_from_the_rest() -> None:
    assert read_answer(ended(reason="busy", message="it grants 2")).is_busy
    assert read_answer(ended(reason="busy", backend="cpu", required_backend="any")).is_busy
    assert not read_answer(ended(0, reason="busy")).is_busy


def test_a_model_that_may_serve_on_the_cpu_is_refused_where_the_cpu_fails_it() -> None:
    assert read_answer(ended(reason="bad-model", backend="cpu", required_backend="any")).verdict is Verdict.FAILED


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, JSON)), st.integers(-64, 255), st.text())
def test_whatever_is_printed_becomes_bounded_printable_text(printed: dict[str, Any], status: int, stderr: str) -> None:
    tried = read_answer({"status": status, "stdout": json.dumps(printed), "stderr": stderr})
    for text in (tried.backend, tried.model, tried.why, tried.remedy):
        assert text.isprintable()
        assert len(text) <= 10 * 500 + 100
    assert json.loads(json.dumps([tried.oks, tried.first_invoke_ms])) == [tried.oks, tried.first_invoke_ms]


@given(st.text())
def test_text_that_is_no_result_is_never_a_pass(text: str) -> None:
    assert read_answer({"status": 0, "stdout": text, "stderr": ""}).verdict is not Verdict.PASSED


def test_json_that_is_nested_without_end_is_no_result() -> None:
    assert read_answer({"status": 0, "stdout": "[" * 60000, "stderr": "x"}).why == "x"
