"""`avocadoctl -H board deploy`: ask the board, build, sign, serve over the same ssh, follow the change to its end.

Promises to move no more than this board needs: images it holds are not offered, and for the others exactly the delta
from its own image is made, where that image was built here. The full transfer beside a delta is made in a hurry: it is
there in case the board finds its own image damaged; one without a delta is made with the best effort. Nothing is
guessed: the board says which target it is, and a project that does not support it is refused before anything is built.
The result is what the board's own record says.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension, image_id
from agent.delta.encode import Effort
from agent.delta.stream import file_sha256
from agent.host.build import BuiltRuntime, build_runtime, held_image, transfer_cache
from agent.host.keys import Keys
from agent.host.project import Project, load_project
from agent.host.report import Report, megabytes
from agent.host.repository import Published, publish
from agent.host.serve import serving
from agent.host.ssh import Board, ask, open_session
from agent.verbs.client import error_of_record, planned
from agent.verbs.show import tell_it_goes_on

Status = dict[str, Any]

# A change that lost its host while it fetched gives up by itself well within this.
_ASK_AGAIN_S = 90.0
_ASK_EVERY_S = 2.0
_LOST = ("image-damaged", "image-missing")
_AWAITS = "await_confirmation"  # the board's step that waits for a new connection


@dataclass(frozen=True, slots=True)
class Request:
    """What the person asked for."""

    host: str
    folder: Path
    runtime: str | None
    board: str | None  # refuse a board that is not this one
    dry_run: bool
    warm_up: bool | None = None  # None: as the board is configured
    again: bool = False  # also what the board says it runs: `verify` has found it damaged


@dataclass(frozen=True, slots=True)
class Move:
    """One extension of the change: how it gets to the board and what that costs at most."""

    name: str
    from_version: str
    to_version: str
    changed: bool  # the board runs another image of it now, or none
    way: str  # held | delta | full
    transfer_bytes: int
    size_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For `-o json`."""
        return {name: getattr(self, name) for name in self.__slots__}

    def line(self) -> str:
        """For a person."""
        versions = self.to_version
        if self.from_version != self.to_version:
            versions = f"{self.from_version or 'none'} -> {self.to_version}"
        if not self.changed:
            return f"  {self.name} {versions}: unchanged"
        if self.way == "held":
            return f"  {self.name} {versions}: on the board already"
        return f"  {self.name} {versions}: {self.way} {megabytes(self.transfer_bytes)} of {megabytes(self.size_bytes)}"


async def deploy(request: Request, keys: Keys, report: Report) -> dict[str, Any]:
    """The whole deploy; gives the document of `-o json`, whose `error` is set when the change did not apply."""
    started = time.monotonic()
    board = Board(request.host)
    report.show(f"asking {board.host}")
    status = await ask(board, ["status"])
    project = _project_for(request, status)
    built = await asyncio.to_thread(build_runtime, project, request.runtime, report)
    document: dict[str, Any] = {
        "host": board.host,
        "target": project.target.board,
        "dry_run": request.dry_run,
        "from_runtime": (status.get("runtime") or {}).get("id"),
        "to_runtime": built.manifest.id,
        "outcome": "unchanged",
        "error": None,
        "change": None,
    }
    again = request.again or _lost(status)
    if document["from_runtime"] == built.manifest.id and not again:
        return {**document, "moves": [], "moved_bytes": 0, "image_bytes": 0, "seconds": _since(started)}
    # A folder of its own: what `publish` made is for many boards, and stays as it is.
    folder = project.build_folder / "deploy" / project.target.board
    moves = await asyncio.to_thread(_publish, project, built, status, keys, folder, report, again)
    _show_plan(board, status, built, moves, report)
    result = await carry(board, folder, report, dry_run=request.dry_run, warm_up=request.warm_up)
    return {**document, **_outcome(result, moves), "seconds": _since(started)}


def _project_for(request: Request, status: Status) -> Project:
    """The project as the board's target sees it. Raises `wrong-target`."""
    target = status.get("target")
    if not isinstance(target, str) or not target:
        raise OperationError(
            ErrorCode.WRONG_TARGET,
            f"cannot deploy to {request.host}: it does not say which target it is",
            "Provision the board first: avocadoctl provision --help",
        )
    if request.board and request.board != target:
        raise OperationError(
            ErrorCode.WRONG_TARGET,
            f"cannot deploy for {request.board} to {request.host}: that board is {target}",
            f"Leave --target out, or name a board that is {request.board}.",
        )
    return load_project(request.folder, target)


def _publish(
    project: Project, built: BuiltRuntime, status: Status, keys: Keys, folder: Path, report: Report, again: bool
) -> list[Move]:
    on_board = [entry for entry in status.get("extensions") or [] if entry.get("imageId")]
    # What is lost is not told image by image; the board fetches no more than what does not hash right.
    held = set() if again else {entry["imageId"] for entry in on_board}
    needed = [extension for extension in built.manifest.extensions if extension.image_id not in held]
    bases = {extension.image_id: _bases(project, extension, on_board) for extension in needed}
    published = publish(
        folder,
        built.manifest,
        built.image_paths,
        bases,
        keys,
        only={extension.image_id for extension in needed},
        spare_effort=Effort.QUICK,
        cache=transfer_cache(project),
        progress=lambda name, done, total: report.show(f"making {_short(name)}", done, total),
    )
    report.clear()
    return [_move(extension, on_board, held, bases, published) for extension in built.manifest.extensions]


def _lost(status: Status) -> bool:
    """Whether images of the board's own runtime are gone or damaged: its remedy is this deploy, of the same too.

    Where not even the runtime can be named, its manifest is, and who knows what else.
    """
    codes = {problem.get("code") for problem in status.get("problems") or []}
    return not codes.isdisjoint(_LOST) or (not status.get("runtime") and "bad-manifest" in codes)


def _bases(project: Project, extension: Extension, on_board: list[dict[str, Any]]) -> list[Path]:
    """The board's active image of the same extension, if it was built here and still is what it was."""
    found = []
    for entry in on_board:
        same = (entry.get("name"), entry.get("origin")) == (extension.name, "runtime")
        path = held_image(project, entry["imageId"]) if same else None
        if path is not None and image_id(file_sha256(path)) == entry["imageId"]:
            found.append(path)
    return found


def _move(
    extension: Extension,
    on_board: list[dict[str, Any]],
    held: set[str],
    bases: Mapping[str, list[Path]],
    published: Published,
) -> Move:
    now = next((e for e in on_board if e.get("name") == extension.name and e.get("origin") == "runtime"), {})
    way, transfer_bytes = "held", 0
    if extension.image_id not in held:
        deltas = published.delta_bytes.get(extension.image_id, {}).values()
        way = "delta" if deltas else "full"
        transfer_bytes = min(deltas) if deltas else published.full_bytes[extension.image_id]
    return Move(
        name=extension.name,
        from_version=str(now.get("version", "")),
        to_version=extension.version,
        changed=now.get("imageId") != extension.image_id,
        way=way,
        transfer_bytes=transfer_bytes,
        size_bytes=extension.size_bytes,
    )


def _show_plan(board: Board, status: Status, built: BuiltRuntime, moves: list[Move], report: Report) -> None:
    before = status.get("runtime") or {}
    was = f"{before.get('name')} {before.get('version')}" if before.get("name") else "nothing"
    now = built.manifest.runtime
    report.say(f"{board.host} ({built.manifest.target}): {was} -> {now.name} {now.version}")
    for move in moves:
        report.say(move.line())


async def carry(
    board: Board, folder: Path, report: Report, *, dry_run: bool = False, warm_up: bool | None = None
) -> dict[str, Any]:
    """Serve the repository to the board and follow the change; gives the result event."""
    argv = ["avocadoctl", "receive", "--requested-by", _who()]
    if dry_run:
        argv.append("--dry-run")
    if warm_up is not None:
        argv.append("--warm-up" if warm_up else "--no-warm-up")
    number = 0
    coming_back: asyncio.Task[None] | None = None
    try:
        async with open_session(board, argv) as session:
            await session.handshake()
            async with serving(folder, session.socket):
                async for event in session.events():
                    if event["event"] == "result":
                        report.clear()
                        return event
                    number = int(event.get("change") or 0)
                    if event.get("step") == _AWAITS and coming_back is None:
                        coming_back = asyncio.create_task(_come_back(board, number, report))
                    _show_event(event, report)
    except asyncio.CancelledError:  # Ctrl-C
        report.clear()
        if number:
            tell_it_goes_on(number, board.host)
        raise
    except OperationError as error:
        if error.code is not ErrorCode.SSH_FAILED or not number:
            raise
        report.say(f"the connection to {board.host} was lost; asking how change #{number} ended")
        return await _ask_again(board, number, error)
    finally:
        if coming_back is not None:
            coming_back.cancel()
            await asyncio.wait({coming_back})
    raise AssertionError("a session ends with a result or an error")


async def _come_back(board: Board, number: int, report: Report) -> None:
    """The change touched /etc: show the board that it can still be reached anew. It reverts when this fails."""
    anew = Board(board.host, afresh=True)
    while True:
        try:
            await ask(anew, ["confirm", str(number)])
        except OperationError as error:
            report.say(f"cannot confirm change #{number} yet: {error.message}")
            await asyncio.sleep(_ASK_EVERY_S)
        else:
            return


async def _ask_again(board: Board, number: int, lost: OperationError) -> dict[str, Any]:
    """The result of a change whose connection was lost: it went on by its own rules. Raises `lost` when out of time."""
    deadline = time.monotonic() + _ASK_AGAIN_S
    while time.monotonic() < deadline:
        try:
            record = await ask(board, ["history", "show", str(number)])
        except OperationError:
            record = {}  # the link may still be down; the deadline bounds this
        if any(step["kind"] == _AWAITS and step["phase"] == "doing" for step in record.get("steps") or ()):
            with suppress(OperationError):  # it has ended meanwhile, or the next round tries again
                await ask(Board(board.host, afresh=True), ["confirm", str(number)])
        if record.get("outcome") not in (None, "running"):
            return {"event": "result", "change": record, "error": None}
        await asyncio.sleep(_ASK_EVERY_S)
    raise lost


def _show_event(event: dict[str, Any], report: Report) -> None:
    step = str(event.get("step") or "planning").replace("_", " ")
    text = f"{'undo: ' if event.get('undoing') else ''}{step}"
    if detail := event.get("text"):
        text += f" ({detail})"
    report.show(text, int(event.get("bytes_done") or 0), int(event.get("bytes_total") or 0))


def _outcome(result: dict[str, Any], moves: list[Move]) -> dict[str, Any]:
    record = result.get("change") or {}
    error = OperationError.from_dict(result["error"]) if result.get("error") else None
    if error is None and record:
        error = error_of_record(record)
    facts = record.get("facts") or {}
    return {
        "outcome": "planned" if facts.get("dry_run") else record.get("outcome") or "refused",
        "moves": [move.as_dict() for move in moves],
        "moved_bytes": facts.get("moved_bytes", 0),
        "image_bytes": facts.get("image_bytes", sum(m.size_bytes for m in moves if m.way != "held")),
        "away_s": facts.get("away_s"),
        "backend": facts.get("backend"),
        "error": error.as_dict() if error else None,
        "change": record or None,
    }


def closing_line(document: dict[str, Any]) -> str:
    """What changed, bytes moved of how many, how long the service was away, on which backend it came back."""
    host = document["host"]
    if document["outcome"] == "unchanged":
        return f"{host}: nothing to change, it runs this runtime already"
    if document["dry_run"]:
        steps = planned(document["change"]) if document["change"] else ""
        return f"{host}: would run {steps}; nothing was changed"
    changed = [
        f"{move['name']} {move['from_version'] or 'none'} -> {move['to_version']}"
        for move in document["moves"]
        if move["changed"]
    ]
    images = ((document["change"] or {}).get("facts") or {}).get("images") or []
    came = {image["name"] for image in images if image["way"] != "held"}
    changed += [
        f"{m['name']} {m['to_version']} anew" for m in document["moves"] if not m["changed"] and m["name"] in came
    ]
    if not changed and any(move["way"] != "held" for move in document["moves"]):
        return f"{host}: nothing to change, and no image of it is damaged"
    parts = [f"{host}: {', '.join(changed) or 'the same extensions'}"]
    if document["image_bytes"]:
        parts.append(f"moved {megabytes(document['moved_bytes'])} of {megabytes(document['image_bytes'])}")
    else:
        parts.append("nothing to move")
    for image in images:
        if image.get("note"):
            parts.append(f"{image['name']} came as a full transfer: {image['note']}")
    if document["away_s"] is not None:
        parts.append(f"service away {document['away_s']:.2f} s")
    if document["backend"]:
        parts.append(f"back on {document['backend']}")
    return "; ".join(parts)


def _who() -> str:
    user = "unknown"
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def _short(name: str) -> str:
    return "delta" if "--" in name else "full transfer"


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)
