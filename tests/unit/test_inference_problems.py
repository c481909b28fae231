"""What `avocadoctl status` says of services that are down, and of a pose service that answers, but not as it could."""

import pytest

from agent.health import UnitState
from agent.problems import inference_problems, service_problems


def test_a_serving_npu_is_no_problem() -> None:
    assert inference_problems({"state": "serving", "backend": "npu", "reason": "ok"}) == []


def test_the_cpu_in_the_npus_place_is_a_problem_with_its_reason() -> None:
    document = {
        "state": "degraded",
        "backend": "cpu",
        "reason": "hung",
        "message": "cannot go on: the npu gave no answer in 800 ms",
        "remedy": "",
    }
    assert inference_problems(document) == [
        {
            "code": "inference-degraded",
            "message": "the pose service answers on cpu (hung; cannot go on: the npu gave no answer in 800 ms)",
            "remedy": "Wait for the NPU to come back; see why: journalctl -b -n 30 -u pose.service",
        }
    ]


def test_the_services_own_remedy_is_passed_on() -> None:
    document = {"state": "degraded", "backend": "cpu", "reason": "busy", "message": "", "remedy": "End pid 7."}
    assert [problem["remedy"] for problem in inference_problems(document)] == ["End pid 7."]


def test_a_missing_camera_is_a_problem_and_names_it() -> None:
    document = {"state": "no-camera", "camera": {"source": "v4l2:/dev/video0", "problem": "No such device"}}
    (problem,) = inference_problems(document)
    assert problem["message"] == "the pose service has no camera (v4l2:/dev/video0): No such device"


@pytest.mark.parametrize(
    ("load", "partial", "said"),
    [
        ("loaded", True, ["pose.service is stopped"]),
        ("masked", False, ["pose.service is masked"]),
        ("not-found", False, ["pose.service is not installed"]),
        ("not-found", True, []),
    ],
)
def test_a_service_that_is_down_is_a_problem_unless_it_was_left_out_here(
    load: str, partial: bool, said: list[str]
) -> None:
    units = {"pose.service": UnitState("pose.service", load, "inactive", "dead", "success", 0, 0)}
    assert [problem["message"] for problem in service_problems(units, partial=partial)] == said
