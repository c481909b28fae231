"""What came of trying a new set's model before anything was stopped for it, made of what the trial left behind.

Pure. The trial ran a program of the set that is being judged, so nothing that it printed is trusted to be sane: it is
bounded, parsed strictly, and shown only as text that moves no cursor. What says nothing about the model (an NPU that
another process holds, a board too busy, a set without a model) is `unknown`, and refuses nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agent.contract.errors import printable

MAX_ANSWER_BYTES = 1 << 16
_MAX_TEXT = 500
_WITHOUT_VERB = 2  # of argparse
_SIGKILL = -9  # what the kernel sends where memory is short
_BACKENDS = ("npu", "cpu")
# Reasons of `avocado-infer try` that speak of the moment and not of the model.
_OF_THE_MOMENT = frozenset({"busy", "slow", "starting", "idle", "quarantined", "no-model"})
_PROGRAM = "avocado-infer: "


class Verdict(StrEnum):
    """Whether the model may serve, as far as the trial showed."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Tried:
    """What the trial showed. `why`: what failed, or why nothing is known. `is_busy`: the NPU was somebody else's."""

    verdict: Verdict
    backend: str = ""
    model: str = ""
    oks: float = 0.0
    first_invoke_ms: float = 0.0
    why: str = ""
    remedy: str = ""
    is_busy: bool = False


def unknown(why: str) -> Tried:
    """Nothing was learnt, and why."""
    return Tried(Verdict.UNKNOWN, why=_text(why))


def read_answer(answer: Mapping[str, Any]) -> Tried:
    """What the trial's answer says: `skipped`, or how `avocado-infer try` ended (`status`, `stdout`, `stderr`)."""
    if "skipped" in answer:
        return unknown(str(answer["skipped"]))
    status, said = answer.get("status"), _last_words(str(answer.get("stderr", "")))
    if not isinstance(status, int):
        return unknown("the trial left no answer")
    if status == _WITHOUT_VERB:
        return unknown("the new set's avocado-infer cannot try the model that pose.toml names")
    if status == _SIGKILL:
        return unknown("avocado-infer was killed before it answered")
    result = _object(str(answer.get("stdout", "")))
    if result is None or status not in (0, 1):
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return Tried(Verdict.FAILED, why=said or f"avocado-infer ended with {how} and said nothing")
    return _judged(result, passed=status == 0 and result.get("passed") is True)


def _judged(result: Mapping[str, Any], *, passed: bool) -> Tried:
    backend, reason = _text(result.get("backend")), _text(result.get("reason"))
    oks = _number(result.get("oks"))
    message = _text(result.get("message"))
    why = message or f"its golden frame did not pass on the {backend}: OKS {oks:.2f} ({reason})"
    # The CPU may serve such a model, so the NPU's refusal is no reason to keep it off the board.
    optional = backend == "npu" and result.get("required_backend") == "any"
    verdict = Verdict.UNKNOWN if reason in _OF_THE_MOMENT or optional else Verdict.FAILED
    if passed and backend in _BACKENDS:
        verdict, why = Verdict.PASSED, ""
    return Tried(
        verdict,
        backend=backend,
        model=f"{_text(result.get('model'))} {_text(result.get('version'))}".strip(),
        oks=oks,
        first_invoke_ms=_number(result.get("first_invoke_ms")),
        why=why,
        remedy=_text(result.get("remedy")),
        is_busy=verdict is Verdict.UNKNOWN and reason == "busy",
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        result = json.loads(text[:MAX_ANSWER_BYTES])
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def _number(value: object) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9  # no nan, no inf
    return round(float(value), 3) if known else 0.0  # type: ignore[arg-type]


def _text(value: object) -> str:
    return printable(" ".join(value.split())[:_MAX_TEXT]) if isinstance(value, str) else ""


def _last_words(stderr: str) -> str:
    """The program's own error, which a remedy may follow, or whatever it said last."""
    lines = [line for line in stderr[-4 * _MAX_TEXT :].splitlines() if line.strip()]
    own = [line.removeprefix(_PROGRAM) for line in lines if line.startswith(_PROGRAM)]
    return _text((own or lines or [""])[-1])
