"""One change over the real store, runtimes and journal in a folder that is there already; run under strace.

Prints how it ended as JSON. The fakes stand for everything that is not a file.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from agent.change.record import Outcome
from agent.contract.errors import OperationError
from tests.change.stories import R0, R1, R2
from tests.change.test_on_disk import Disk


def main(state: Path) -> None:
    logging.disable()
    disk = Disk(state, fresh=False)
    outcome, reason = "refused", ""
    try:
        record = disk.engine().run(disk.change(), lambda _: None, lambda: False)
        outcome, reason = record.outcome.value, record.reason.message if record.reason else ""
    except OperationError as error:  # the journal did not take the change
        reason = error.message
    newest = disk.journal.newest()
    if newest is not None and newest.outcome is Outcome.RUNNING:
        # Its end could not be written; the next start has a disk that works again, or fails the same way once more.
        disk.engine().recover(lambda _: None)
        outcome = disk.journal.load(newest.number).outcome.value
    active, previous, runtimes = disk.links()
    names = {R0.id: "R0", R1.id: "R1", R2.id: "R2"}
    answer = {
        "outcome": outcome,
        "reason": reason,
        "active": names.get(active or ""),
        "previous": names.get(previous or ""),
        "runtimes": sorted(names.get(runtime_id, runtime_id) for runtime_id in runtimes),
        "serves": names.get(disk.world.running["pose.service"][0] or ""),
        "images": disk.store.image_ids(),
        "strays": sorted(path.name for path in state.rglob("*") if path.name.endswith((".tmp", ".new"))),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
