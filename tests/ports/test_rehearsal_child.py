"""What runs in avocado-warm-up.service, as far as it needs no set of its own: the program, its words and its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = """
import json, sys
from agent.ports import rehearsal_child
try:
    answer = rehearsal_child.tried(json.loads(sys.argv[1]), sys.argv[2])
except rehearsal_child.OperationError as error:
    answer = {"error": error.as_dict()}
print(json.dumps(answer))
"""
TREE = Path(__file__).resolve().parents[2]


def tried(program: Path, *words: str, timeout_s: float = 20.0) -> dict[str, Any]:
    """In a process of its own, since it takes its environment away."""
    request = {"env": {"PATH": "/usr/bin:/bin", "CACHE_DIRECTORY": "/c"}, "words": list(words), "timeout_s": timeout_s}
    line = [sys.executable, "-c", DRIVER, json.dumps(request), str(program)]
    done = subprocess.run(line, cwd=TREE, capture_output=True, text=True, timeout=60, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"journal": done.stderr}


def script(folder: Path, text: str) -> Path:
    program = folder / "avocado-infer"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program


def test_the_program_gets_its_words_and_the_service_s_environment_and_nothing_else(tmp_path: Path) -> None:
    answer = tried(
        script(tmp_path, 'echo "$* $CACHE_DIRECTORY ${HOME:-homeless}"; echo why >&2; exit 1'), "--backend", "cpu"
    )
    assert (answer["status"], answer["stdout"]) == (1, "try -o json --backend cpu /c homeless\n")
    assert answer["stderr"] == answer["journal"] == "why\n"


def test_what_it_prints_is_bounded(tmp_path: Path) -> None:
    answer = tried(script(tmp_path, "head -c 500000 /dev/zero | tr '\\0' x; head -c 500000 /dev/zero | tr '\\0' y >&2"))
    assert (answer["status"], len(answer["stdout"]), len(answer["stderr"])) == (0, 1 << 16, 1 << 13)


def test_a_signal_is_told(tmp_path: Path) -> None:
    assert tried(script(tmp_path, "kill -SEGV $$"))["status"] == -11


def test_a_set_without_the_program_is_skipped(tmp_path: Path) -> None:
    assert tried(tmp_path / "avocado-infer")["skipped"] == f"the new set has no {tmp_path}/avocado-infer"


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    answer = tried(script(tmp_path, "exec sleep 60"), timeout_s=0.3)
    assert answer["error"]["code"] == "step-timeout"
