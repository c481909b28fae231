"""Cuts what has to be made into segments, and lines each up with the base where it may have come from.

A stretch that the base holds is one segment, a copy. Changed stretches that only short copies part are made together,
or apart with the copies between them, whichever the quick compressor finds smaller. Copies that follow each other are
one segment out of nothing where that is smaller than naming their places, as it is of zeros.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from agent.delta.format import MAX_SEGMENT_BYTES
from agent.delta.match import Buffer, Run
from agent.delta.ways import Segment, copied, estimated

# A copy this short between two changed stretches costs less inside the segment's frame than as an operation of its
# own with a new frame after it.
_BRIDGED_COPY_BYTES = 64 * 1024
_OPERATION_BYTES = 8


def cut(runs: Sequence[Run], old: Buffer, new: Buffer) -> Iterator[Segment]:
    """The whole new file as segments, in order, each with its estimated ways."""
    shift = 0
    for group in _with_copies_joined(_groups(runs)):
        first = group[0]
        if len(group) == 1 and first.offset is not None:
            yield copied(first.start, first.length, first.offset)
            shift = first.offset - first.start
            continue
        following = _shift_after(runs, group)
        shifts = () if _is_copies(group) else _shifts(group, shift, following)
        together = list(_estimate_gap(_span(group), old, new, shifts))
        apart = list(_estimate_apart(group, old, new, shift, following))
        chosen = apart if len(group) > 1 and _cost(apart) <= _cost(together) else together
        yield from chosen
        shift = next((run.offset - run.start for run in reversed(group) if run.offset is not None), shift)


def _groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Changed stretches that only short copies part, up to one segment together; long copies stand alone."""
    group: list[Run] = []
    for position, run in enumerate(runs):
        short = run.offset is not None and run.length <= _BRIDGED_COPY_BYTES
        inside = short and group and position + 1 < len(runs)
        if group and (not (run.offset is None or inside) or _length(group) + run.length > MAX_SEGMENT_BYTES):
            yield from _without_tail(group)
            group = []
        if run.offset is None or (inside and group):
            group.append(run)
        else:
            yield [run]
    if group:
        yield from _without_tail(group)


def _without_tail(group: list[Run]) -> Iterator[list[Run]]:
    if group[-1].offset is not None and len(group) > 1:
        yield group[:-1]
        yield group[-1:]
    else:
        yield group


def _with_copies_joined(groups: Iterable[list[Run]]) -> Iterator[list[Run]]:
    """The same groups, with copies that follow each other in one, up to a segment together."""
    copies: list[Run] = []
    for group in groups:
        if copies and not (_is_copies(group) and _length(copies) + _length(group) <= MAX_SEGMENT_BYTES):
            yield copies
            copies = []
        if _is_copies(group):
            copies += group
        else:
            yield group
    if copies:
        yield copies


def _is_copies(group: Sequence[Run]) -> bool:
    return all(run.offset is not None for run in group)


def _length(group: Sequence[Run]) -> int:
    return sum(run.length for run in group)


def _span(group: Sequence[Run]) -> Run:
    return Run(group[0].start, _length(group), None)


def _cost(segments: Sequence[Segment]) -> int:
    return sum(len(segment.ways[0][1]) + _OPERATION_BYTES for segment in segments)


def _shift_after(runs: Sequence[Run], group: Sequence[Run]) -> int | None:
    end = group[-1].start + group[-1].length
    following = bisect_left(runs, end, key=lambda run: run.start)
    for run in runs[following : following + 4]:
        if run.offset is not None:
            return run.offset - run.start
    return None


def _shifts(group: Sequence[Run], before: int, after: int | None) -> list[int]:
    """Where the base may line up with the group: as before it, as after it, and as the copies inside it do."""
    inside = sorted((run for run in group if run.offset is not None), key=lambda run: -run.length)
    found = [before, *([after] if after is not None else [])]
    found += [run.offset - run.start for run in inside[:2] if run.offset is not None]
    return list(dict.fromkeys(found))


def _estimate_apart(
    group: Sequence[Run], old: Buffer, new: Buffer, before: int, after: int | None
) -> Iterator[Segment]:
    for position, run in enumerate(group):
        if run.offset is not None:
            yield copied(run.start, run.length, run.offset)
            before = run.offset - run.start
            continue
        following = group[position + 1] if position + 1 < len(group) else None
        next_shift = following.offset - following.start if following and following.offset is not None else after
        yield from _estimate_gap(run, old, new, _shifts((), before, next_shift))


def _estimate_gap(gap: Run, old: Buffer, new: Buffer, shifts: Sequence[int]) -> Iterator[Segment]:
    for start in range(gap.start, gap.start + gap.length, MAX_SEGMENT_BYTES):
        length = min(MAX_SEGMENT_BYTES, gap.start + gap.length - start)
        yield estimated(start, new[start : start + length], old, shifts)
