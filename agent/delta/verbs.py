"""`avocadoctl delta create|apply|info`: the codec on any pair of files.

Data goes to standard output, progress to a terminal on standard error. The output file appears complete or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.delta.apply import FAULTS, apply_delta
from agent.delta.describe import describe
from agent.delta.format import REFUSED
from agent.delta.output import whole_file
from agent.delta.stream import file_chunks

Progress = Callable[[int, int], None]


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `delta` and its verbs; each sets `run`, a function of the parsed arguments that returns an exit status."""
    delta = subparsers.add_parser("delta", help="make, apply and read deltas between any two files")
    verbs = delta.add_subparsers(dest="delta_verb", required=True, metavar="VERB")

    create = verbs.add_parser("create", help="write the delta that makes NEW out of OLD")
    create.add_argument("old", type=Path, metavar="OLD", help="the base, or - for a full transfer")
    create.add_argument("new", type=Path, metavar="NEW")
    create.add_argument("out", type=Path, metavar="OUT")
    create.set_defaults(run=run_create)

    apply = verbs.add_parser("apply", help="make OUT from OLD and a delta")
    apply.add_argument("old", type=Path, metavar="OLD", help="the base, or - when the delta needs none")
    apply.add_argument("delta", type=Path, metavar="DELTA")
    apply.add_argument("out", type=Path, metavar="OUT")
    apply.set_defaults(run=run_apply)

    info = verbs.add_parser("info", help="say what a delta is made from and what it makes")
    info.add_argument("delta", type=Path, metavar="DELTA")
    info.set_defaults(run=run_info)

    for verb in (create, apply, info):
        # SUPPRESS keeps a value given before the verb.
        verb.add_argument("-o", "--output", choices=["table", "json"], default=argparse.SUPPRESS)


def run_create(arguments: argparse.Namespace) -> int:
    """Encode, then print the sizes."""
    from agent.delta.encode import encode_delta  # the device applies and never encodes

    base = _base(arguments.old)
    _readable(arguments.new)
    began = time.monotonic()
    with _ended_cleanly(), _Meter("create") as meter:
        info = encode_delta(base, arguments.new, arguments.out, progress=meter)
    size = arguments.out.stat().st_size
    facts = {"out": str(arguments.out), "delta_size_bytes": size, "result_size_bytes": info.result_size_bytes}
    facts |= {"base_sha256": info.base_sha256, "result_sha256": info.result_sha256, "seconds": _since(began)}
    ratio = f" ({size / info.result_size_bytes:.1%})" if info.result_size_bytes else ""
    _print(arguments, facts, f"{arguments.out}: {size:,} bytes for {info.result_size_bytes:,}{ratio}")
    return 0


def run_apply(arguments: argparse.Namespace) -> int:
    """Apply, then print what was made."""
    base = _base(arguments.old)
    _readable(arguments.delta)
    out: Path = arguments.out
    began = time.monotonic()
    with (
        _ended_cleanly(),
        _about(arguments.delta, "apply"),
        whole_file(out, base, arguments.delta) as part,
        _Meter("apply") as meter,
    ):
        info = apply_delta(base, file_chunks(arguments.delta), part, progress=meter)
    facts = {"out": str(out), "result_sha256": info.result_sha256, "result_size_bytes": info.result_size_bytes}
    _print(arguments, {**facts, "seconds": _since(began)}, f"{out}: {info.result_size_bytes:,} bytes, hash verified")
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Print the header and the operations by kind."""
    _readable(arguments.delta)
    with _about(arguments.delta, "read"):
        found = describe(arguments.delta)
    info = found.info
    lines = [
        f"format   {info.format}, {found.delta_size_bytes:,} bytes",
        f"base     {info.base_sha256 or 'none: a full transfer'}"
        + (f", {info.base_size_bytes:,} bytes" if info.base_sha256 else ""),
        f"result   {info.result_sha256}, {info.result_size_bytes:,} bytes",
        f"bounds   segment {info.segment_bytes:,} bytes, window {info.window_bytes:,} bytes",
    ]
    for name, share in found.shares.items():
        if share.operations:
            numbers = f"{share.operations:,} operations make {share.result_bytes:,} bytes out of {share.moved_bytes:,}"
            lines.append(f"{name:8} {numbers}")
    _print(arguments, found.as_dict(), "\n".join(lines))
    return 0


def _base(path: Path) -> Path | None:
    if str(path) == "-":
        return None
    _readable(path)
    return path


def _readable(path: Path) -> None:
    if not os.access(path, os.R_OK) or not path.is_file():  # a name that is too long is not accessible
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot read {path}: it is not a readable file")


@contextlib.contextmanager
def _about(delta: Path, verb: str) -> Iterator[None]:
    """What is wrong with a delta names the file, and what was to be done with it."""
    try:
        yield
    except OperationError as error:
        if error.code not in FAULTS:
            raise
        why = error.message.removeprefix(REFUSED)
        raise OperationError(error.code, f"cannot {verb} {delta}{why}", error.remedy, error.facts) from error


@contextlib.contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Whoever ends this process lets it remove what it has begun to write."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _print(arguments: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    print(json.dumps(facts) if getattr(arguments, "output", "table") == "json" else text)


class _Meter:
    """One line of progress on a terminal, at most ten times a second; nothing elsewhere."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = -1.0
        self._live = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")

    def _show(self, done: int, total: int) -> None:
        if self._live and (now := time.monotonic()) - self._shown > 0.1:
            self._shown = now
            sys.stderr.write(f"\r{self._verb} {100 * done // max(total, 1)} %")
            sys.stderr.flush()
