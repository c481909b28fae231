"""The describe document as Prometheus text (exposition format 0.0.4): the same numbers, under stable names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from inference.policy import Backend
from inference.status import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(document: Mapping[str, Any], viewers: int) -> str:
    """All metrics of one moment."""
    return "".join(_lines(document, viewers))


def _lines(document: Mapping[str, Any], viewers: int) -> Iterator[str]:
    model = document["model"]
    yield _head("pose_info", "gauge", "Model and accelerator of this service.")
    labels = {
        "model": model["name"],
        "version": model["version"],
        "accelerator": document["accelerator"]["name"],
    }
    yield f"pose_info{_labels(labels)} 1\n"
    yield _head("pose_state", "gauge", "1 for the state the service is in.")
    for state in State:
        yield f"pose_state{_labels({'state': state.value})} {int(document['state'] == state)}\n"
    yield _head("pose_backend", "gauge", "1 for the backend that answered last.")
    for backend in Backend:
        yield f"pose_backend{_labels({'backend': backend.value})} {int(document['backend'] == backend)}\n"
    for name, help_text, value in (
        ("frames", "Frames answered.", document["frames"]),
        ("frames_unanswered", "Frames that no backend answered.", document["unanswered"]),
        ("frames_overwritten", "Frames the camera gave while the last was in work.", document["camera"]["overwritten"]),
        ("frames_damaged", "Frames that could not be decoded.", document["camera"]["damaged"]),
        ("fallbacks", "Frames the CPU answered in place of the NPU.", document["fallbacks"]),
        ("worker_restarts", "Workers replaced.", document["restarts"]),
    ):
        yield _head(f"pose_{name}_total", "counter", help_text)
        yield f"pose_{name}_total {value}\n"
    yield _head("pose_latency_seconds", "gauge", "From crop to pose over the last 1000 frames.")
    for quantile, key in (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99")):
        yield f"pose_latency_seconds{_labels({'quantile': quantile})} {document['latency_ms'][key] / 1000:.6f}\n"
    for name, help_text, value in (
        ("camera_connected", "1 while the camera gives frames.", int(document["camera"]["connected"])),
        ("frames_per_second", "Frames answered a second.", document["fps"]),
        ("stream_viewers", "Open pictures of the page.", viewers),
    ):
        yield _head(f"pose_{name}", "gauge", help_text)
        yield f"pose_{name} {value}\n"


def _head(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, value in labels.items()
    )
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"
