"""Names that would become a path, a terminal's escape, or somebody else's name."""

from __future__ import annotations

from agent.contract.errors import ErrorCode
from tests.hostile.attacks import edited, manifest_replaced
from tests.hostile.case import Attack, Case

REFUSED = ErrorCode.NAME_REFUSED


def target_named(name: str) -> Attack:
    return edited("releases", lambda signed: signed["targets"].update({name: signed["targets"]["manifest.json"]}))


def refused_target(name: str) -> Case:
    return Case(
        by="release thief",
        attack=target_named(name),
        code=REFUSED,
        message=f"cannot trust {{releases}}: signed.targets: {name!a} is not a name this agent knows",
    )


def named_in_the_manifest(name: bytes, what: str = "extensions.0.name", most: str = "[a-z0-9_-]{0,62}") -> Case:
    return Case(
        by="release thief",
        attack=manifest_replaced(b'"name": "pose-model"', b'"name": "' + name + b'"'),
        code=ErrorCode.BAD_MANIFEST,
        message=f"cannot read the manifest: {what}: String should match pattern '\\A[a-z0-9]{most}\\z'",
        remedy="",
    )


CASES = {
    "target outside the folder": refused_target("../../etc/passwd"),
    "target with dots inside": refused_target("a..b"),
    "target with an absolute path": refused_target("/etc/passwd"),
    "target in percent signs": refused_target("%2e%2e%2fx"),
    "target with a backslash": refused_target("a\\b"),
    "target with a nul byte": refused_target("a\x00b"),
    "target with an escape": refused_target("a\x1b[2Jb"),
    "target that looks like another": refused_target("m\u0430nifest.json"),
    "target that reads backwards": refused_target("manifest\u202enosj."),
    "target without a name": refused_target(""),
    "path in the manifest": named_in_the_manifest(b"../../x"),
    "overlay separators in the manifest": named_in_the_manifest(b"a:b,c"),
    "escape in the manifest": named_in_the_manifest(b"a\\u001b[2J"),
}
