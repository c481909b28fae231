"""pose.toml: what is accepted, and the exact words of what is refused."""

from pathlib import Path

import pytest

from inference.config import ConfigError, keys_help, parse_config, read_config


def test_an_empty_file_gives_the_defaults() -> None:
    config = parse_config("", "pose.toml")
    assert config.camera.source == "auto"
    assert config.camera.fps == 30
    assert (config.web.host, config.web.port, config.web.is_loopback) == ("127.0.0.1", 8080, True)
    assert config.model.folder == "/usr/share/avocado/model"


def test_every_key_can_be_set() -> None:
    config = parse_config(
        """
        [camera]
        source = "v4l2:/dev/video2"
        fps = 15
        width = 1280
        height = 720
        [web]
        listen = "[::1]:9000"
        jpeg_quality = 70
        [model]
        folder = "/srv/model"
        [accelerator]
        profile = "/srv/npu.toml"
        """,
        "pose.toml",
    )
    assert config.camera.fps == 15.0
    assert (config.web.host, config.web.port) == ("::1", 9000)
    assert config.accelerator.profile == "/srv/npu.toml"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("[camera]\nsorce='auto'", "cannot read pose.toml: unknown key camera.sorce", "did you mean camera.source?"),
        ("[wep]\n", "cannot read pose.toml: unknown key wep", "did you mean web?"),
        (
            "[model]\nzzz=1",
            "cannot read pose.toml: unknown key model.zzz",
            "use one of: folder",
        ),
        (
            "[camera]\nsource='usb'",
            'cannot read pose.toml: camera.source: expected "auto", "replay:/FOLDER" or "v4l2:/dev/videoN"',
            "correct camera.source in pose.toml",
        ),
        (
            "[camera]\nfps=0",
            "cannot read pose.toml: camera.fps: input should be greater than 0",
            "correct camera.fps in pose.toml",
        ),
        (
            "[web]\nlisten='localhost:80'",
            'cannot read pose.toml: web.listen: expected "ADDRESS:PORT", the address as numbers',
            "correct web.listen in pose.toml",
        ),
        (
            "[web]\nlisten='0.0.0.0:8080'",
            "cannot read pose.toml: web: listening beyond loopback needs token_file: the page shows the camera",
            "correct web in pose.toml",
        ),
    ],
)
def test_a_mistake_is_named_with_what_to_do(text: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "pose.toml")
    assert (caught.value.message, caught.value.remedy) == (message, remedy)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "pose.toml"
    with pytest.raises(ConfigError) as caught:
        read_config(missing)
    assert caught.value.message == f"cannot read {missing}: no such file"


def test_beyond_loopback_is_allowed_with_a_token() -> None:
    config = parse_config("[web]\nlisten='0.0.0.0:8080'\ntoken_file='/run/token'", "pose.toml")
    assert not config.web.is_loopback


def test_the_help_lists_every_key_with_its_default() -> None:
    text = keys_help()
    assert 'source = "auto"\nfps = 30.0\n' in text
    assert parse_config(text.replace('token_file = ""  (none)', ""), "help") == parse_config("", "empty")
