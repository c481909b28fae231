"""avocadoctl status: what runs on this board, who answers the camera and why, and what is wrong.

Answers from the file the agent keeps, so it needs neither the bus nor the agent's attention, and it says when that file
is old. This path imports no more than argparse, json and the status contract.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from agent.contract.status import (
    RUN_DIR,
    SILENT,
    ChangeEntry,
    ExtensionEntry,
    RuntimeEntry,
    StatusDocument,
    boottime_s,
    read_status,
)
from agent.verbs.show import ago, print_json, size, table

EXAMPLES = """\
examples:
  avocadoctl status                      on the board
  ssh root@board avocadoctl status       from the host
  avocadoctl -H root@board status        the same
  avocadoctl -o json status | jq .problems"""


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "status",
        help="what runs here: runtime, extensions, services, backend, last change, problems",
        description="Show what runs on this board and what is wrong with it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run_dir() -> Path:
    """Where the agent keeps its status; `AVOCADO_RUN_DIR` names another place."""
    return Path(os.environ.get("AVOCADO_RUN_DIR", RUN_DIR))


def run(args: argparse.Namespace) -> int:
    """Print the status document."""
    document = read_status(run_dir())
    if args.output == "json":
        print_json(document)
    else:
        print(render(document, boottime_s() - document["agent"]["updated_boottime_s"]))
    return 0


def render(document: StatusDocument, age_s: float) -> str:
    """The document as text for people."""
    agent = document["agent"]
    board = f"{document['target']} ({document['arch']}), agent {agent['version']}, {ago(max(0.0, age_s))} ago"
    head = [
        f"Board      {board}",
        f"Runtime    {_unreadable(document) or _runtime(document['runtime'])}",
        f"Previous   {_runtime(document['previous'])}",
        f"Inference  {_inference(document['inference'], agent['updated_boottime_s'] + age_s)}",
        f"Change     {_change(document['change'])}",
    ]
    switching = document.get("switching")
    if switching and switching["reason"]:
        head.append(f"Switching  by systemd's reload, with a gap: {switching['reason']}")
    parts = ["\n".join(head)]
    if document["extensions"]:
        parts.append(extension_table(document["extensions"]))
    if document["services"]:
        rows = [(s["name"], f"{s['active']} ({s['sub']})", str(s["restarts"])) for s in document["services"]]
        parts.append(table(("SERVICE", "STATE", "RESTARTS"), rows))
    parts.append(_problems(document))
    return "\n\n".join(parts)


def extension_table(extensions: list[ExtensionEntry]) -> str:
    """One line an extension, in merge order."""
    rows = []
    for entry in extensions:
        types = [name for name, present in (("sysext", entry["isSysext"]), ("confext", entry["isConfext"])) if present]
        otherwise = "disabled" if entry.get("isDisabled") else "unknown" if entry.get("isUnknown") else "no"
        merged = "yes" if entry["isMerged"] else otherwise
        short = entry["shortId"] or "-"
        rows.append((entry["name"], "+".join(types), merged, entry["version"] or "-", entry["origin"], short))
    return table(("EXTENSION", "TYPE", "MERGED", "VERSION", "ORIGIN", "ID"), rows)


def _unreadable(document: StatusDocument) -> str:
    """An active runtime of which only the links are known."""
    linked = any(entry["origin"] == "runtime" for entry in document["extensions"])
    return "its manifest cannot be read, see the problems" if document["runtime"] is None and linked else ""


def _runtime(entry: RuntimeEntry | None) -> str:
    if entry is None:
        return "none"
    text = f"{entry['name']} {entry['version']}  {entry['id']}  built {entry['built_at']}"
    disabled = entry.get("disabled")
    return f"{text}, without {', '.join(disabled)} (disabled here)" if disabled else text


def _inference(entry: dict[str, Any] | None, now_boottime_s: float) -> str:
    if entry is None:
        return "not on the bus"
    if entry.get("state") == SILENT:
        last = entry.get("last_seen")
        if not last:
            return "the pose service does not answer, and has not since the agent started"
        since = ago(max(0.0, now_boottime_s - last["seen_boottime_s"]))
        return f"the pose service does not answer; last seen {since} ago: {_answer(last)}"
    return _answer(entry)


def _answer(entry: dict[str, Any]) -> str:
    model = entry.get("model") or {}
    latency = entry.get("latency_ms") or {}
    words = [f"{entry.get('state')} on {entry.get('backend')} ({entry.get('reason')})"]
    if model.get("name"):
        words.append(f"model {model['name']} {model.get('version', '')}".rstrip())
    words.append(f"{entry.get('frames', 0)} frames, {entry.get('fallbacks', 0)} by fallback")
    if isinstance(latency.get("p95"), (int, float)):
        words.append(f"p95 {latency['p95']:.1f} ms")
    return ", ".join(words)


def _change(entry: ChangeEntry | None) -> str:
    if entry is None:
        return "none yet"
    text = f"#{entry['number']} {entry['kind']}: {entry['outcome']}"
    if entry["step"]:
        text += f", {entry['step']}"
    text += f", {entry['ended_at'] or entry['started_at']}"
    facts = entry["facts"]
    if facts.get("image_bytes"):
        text += f", moved {size(facts.get('moved_bytes', 0))} of {size(facts['image_bytes'])}"
    if "away_s" in facts:
        text += f", service away {facts['away_s']:.2f} s"
    reason = entry["reason"]
    if reason is None:
        return text
    remedy = f"\n             try: {reason['remedy']}" if reason["remedy"] else ""
    return f"{text}\n           {reason['message']}{remedy}"


def _problems(document: StatusDocument) -> str:
    if not document["problems"]:
        return "Problems   none"
    lines = [f"Problems   {len(document['problems'])}"]
    for problem in document["problems"]:
        lines.append(f"  {problem['message']}")
        if problem["remedy"]:
            lines.append(f"    try: {problem['remedy']}")
    return "\n".join(lines)
