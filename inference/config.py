"""pose.toml as one frozen value, read once at the start.

Promises that what the rest of the service sees is complete and inside its ranges; refuses an unknown key and names the
nearest known one, because a misspelt key that is silently ignored looks like a setting that does not work. Also refuses
to listen beyond loopback without a token: the page shows a camera.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from inference.errors import InferenceError

DEFAULT_PATH = Path("/etc/avocado/pose.toml")


class ConfigError(InferenceError):
    """pose.toml cannot be used; restarting the service would not help."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CameraConfig(_Section):
    """Where frames come from."""

    source: str = "auto"
    fps: Annotated[float, Field(gt=0, le=240)] = 30.0
    width: Annotated[int, Field(ge=64, le=4096)] = 640
    height: Annotated[int, Field(ge=64, le=4096)] = 480

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        kind, _, argument = value.partition(":")
        if value == "auto" or (kind in {"replay", "v4l2"} and argument.startswith("/")):
            return value
        raise ValueError('expected "auto", "replay:/FOLDER" or "v4l2:/dev/videoN"')

    @field_validator("fps", mode="before")
    @classmethod
    def _whole_numbers_too(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class WebConfig(_Section):
    """Where the page is served, and who may see it."""

    listen: str = "127.0.0.1:8080"
    token_file: str | None = None
    jpeg_quality: Annotated[int, Field(ge=20, le=95)] = 80

    @field_validator("listen")
    @classmethod
    def _address_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise ValueError('expected "ADDRESS:PORT", the address as numbers') from None
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError('expected "ADDRESS:PORT", the port from 0 to 65535')
        return value

    @property
    def host(self) -> str:
        """The address alone, an IPv6 one without its brackets."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port alone."""
        return int(self.listen.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether only this board (and whoever forwards a port from it) can connect."""
        return ipaddress.ip_address(self.host).is_loopback

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> WebConfig:
        if not self.is_loopback and self.token_file is None:
            raise ValueError("listening beyond loopback needs token_file: the page shows the camera")
        return self


class ModelConfig(_Section):
    """The prepared folder that is served."""

    folder: str = "/usr/share/avocado/model"


class AcceleratorConfig(_Section):
    """The profile of the board's NPU."""

    profile: str = "/usr/share/avocado/accelerator.toml"


class PoseConfig(_Section):
    """The whole of pose.toml."""

    camera: CameraConfig = CameraConfig()
    web: WebConfig = WebConfig()
    model: ModelConfig = ModelConfig()
    accelerator: AcceleratorConfig = AcceleratorConfig()


def keys_help() -> str:
    """Every key with its default, as TOML."""
    lines: list[str] = []
    for section, value in PoseConfig():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(default)}" for key, default in value]
    return "\n".join(lines)


def _toml(value: object) -> str:
    return '""  (none)' if value is None else f'"{value}"' if isinstance(value, str) else f"{value}"


def read_config(path: Path | None) -> PoseConfig:
    """Read `path`; with None read the default path, where a missing file means the defaults."""
    source = path or DEFAULT_PATH
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            return PoseConfig()
        raise ConfigError(f"cannot read {source}: no such file", "name an existing file with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {source}: {error}", f"make {source} readable UTF-8 text") from error
    return parse_config(text, str(source))


def parse_config(text: str, source: str) -> PoseConfig:
    """Parse and check the text of a pose.toml that is called `source` in messages."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read {source}: {error}", f"correct the TOML of {source}") from error
    try:
        return PoseConfig.model_validate(document)
    except ValidationError as error:
        raise _explain(error, source) from error


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"]]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        known = _known_keys(where[:-1])
        nearest = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
        full = ".".join([*where[:-1], nearest[0]]) if nearest else ""
        remedy = f"did you mean {full}?" if nearest else f"use one of: {', '.join(sorted(known))}"
        return ConfigError(f"cannot read {source}: unknown key {key}", remedy)
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return ConfigError(f"cannot read {source}: {key}: {reason}", f"correct {key} in {source}")


def _known_keys(section: list[str]) -> list[str]:
    if not section:
        return list(PoseConfig.model_fields)
    model = PoseConfig.model_fields[section[0]].annotation
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []
