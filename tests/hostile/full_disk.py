"""`python -m tests.hostile.full_disk STATE URL KIB`: the board's state on a disk of that size, which only it sees.

Fetches once, then makes room and fetches again. Prints what happened as JSON. The mount ends with the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent.contract.errors import OperationError
from agent.ports.files import FileStore
from tests.hostile.killed import bases, fetch


def listing(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "images").glob("*"))


def main(state: Path, url: str, kib: str) -> dict[str, Any]:
    saved = state.with_name("saved")
    state.rename(saved)
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(state)], check=True)
    subprocess.run(["cp", "-a", f"{saved}/.", str(state)], check=True)
    before, found = listing(state), {}
    try:
        fetch(state, url)
    except OperationError as error:
        found = {"error": error.as_dict(), "left": sorted(set(listing(state)) - set(before))}
    store = FileStore(state)
    found["base_stands"] = all(store.verify_image(base) for base in bases(state))
    subprocess.run(["mount", "-o", "remount,size=64m", str(state)], check=True)
    fetch(state, url)
    return {**found, "images": len(store.image_ids())}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
