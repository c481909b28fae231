"""Which answer of an HTTP server is taken: of a known length that fits, of the part that was asked for, uncompressed.

An answer must say how long it is before a byte of it is read. Redirects are not followed, since the address is what an
operator chose; compressed answers are refused, since nothing bounds what they unpack to. Each refusal has a code of its
own, because each is mended in another place.
"""

from __future__ import annotations

import http.client
import re

from agent.contract.errors import ErrorCode, OperationError

CHECK_CONNECTION = "Check the connection, then deploy again; what arrived is kept."
_RANGE = re.compile(r"\Abytes (\d{1,19})-(\d{1,19})/(\d{1,19})\Z", re.ASCII)
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)


def accept(response: http.client.HTTPResponse, url: str, limit: int, *, exact: bool, offset: int) -> tuple[int, int]:
    """How many bytes of body follow, and how many of them come before `offset`. Raises for any other answer."""
    _check_status(response.status, url, asked_part=offset > 0)
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise _refused(
            ErrorCode.FETCH_COMPRESSED,
            url,
            "the answer is compressed, which was not asked for",
            "Let the server send the repository's files as they are.",
        )
    # With chunked, the length is what the server feels like.
    lengths = response.headers.get_all("Content-Length") or []
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]) or response.getheader("Transfer-Encoding"):
        raise _refused(
            ErrorCode.FETCH_UNBOUNDED,
            url,
            "the answer does not say its length",
            "Let the server send Content-Length, as it does for plain files.",
        )
    length, start = int(lengths[0]), 0
    whole = length
    if response.status == 206:
        start, whole = _part(response.getheader("Content-Range", ""), url, length, offset)
    if exact and whole != limit:
        raise _refused(
            ErrorCode.LENGTH_MISMATCH,
            url,
            f"it is {whole} bytes, {limit} are signed",
            "Publish again, or look at what stands between this board and the repository.",
        )
    if whole > limit:
        raise _refused(
            ErrorCode.FETCH_TOO_LARGE,
            url,
            f"it is {whole} bytes, at most {limit} are expected",
            "Check that this address serves a published repository.",
        )
    if offset > whole:
        raise _wrong_part(url, f"it is {whole} bytes, {offset} onward was asked for")
    return length, offset - start


def _check_status(status: int, url: str, *, asked_part: bool) -> None:
    if status in (403, 404, 410):
        raise OperationError(
            ErrorCode.NOT_FOUND, f"cannot fetch {url}: the server answers {status}", "", {"status": status}
        )
    if 300 <= status < 400:
        raise _refused(
            ErrorCode.FETCH_REDIRECTED,
            url,
            f"the server redirects ({status}), and redirects are not followed",
            "Name the address that it redirects to, if that is yours.",
        )
    if status not in (200, 206):
        raise _refused(
            ErrorCode.SERVER_UNAVAILABLE, url, f"the server answers {status}", "Look at the server's log, or try later."
        )
    if status == 206 and not asked_part:
        raise _wrong_part(url, "the answer is a part, and the whole was asked for")


def _part(header: str, url: str, length: int, offset: int) -> tuple[int, int]:
    """Where the part begins, and the size of the whole."""
    match = _RANGE.match(header)
    if match is None:
        raise _wrong_part(url, "the answer does not say which part it is")
    start, end, whole = (int(group) for group in match.groups())
    if start > offset or end != whole - 1 or end - start + 1 != length:
        raise _wrong_part(url, f"the answer is bytes {start} to {end} of {whole}, {offset} onward was asked for")
    return start, whole


def failed(url: str, why: str) -> OperationError:
    """The error for a connection that broke, or never came about."""
    return _refused(ErrorCode.FETCH_FAILED, url, why, CHECK_CONNECTION)


def _wrong_part(url: str, why: str) -> OperationError:
    return _refused(
        ErrorCode.FETCH_WRONG_PART, url, why, "Let the server answer Range as RFC 9110 says, or not at all."
    )


def _refused(code: ErrorCode, url: str, why: str, remedy: str) -> OperationError:
    return OperationError(code, f"cannot fetch {url}: {why}", remedy)
