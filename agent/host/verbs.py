"""The host's verbs: init, install, build, keys, publish, provision, deploy; each a few lines around what does it.

Only what the typed verb needs is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.contract.errors import ErrorCode, OperationError
from agent.host.key_verbs import DEFAULT_FOLDER, add_keys_options, open_keys
from agent.host.key_verbs import register as register_keys
from agent.verbs.options import add_warm_up

if TYPE_CHECKING:
    from agent.host.keys import Keys
    from agent.host.project import Project
    from agent.host.report import Report

_PLAIN = argparse.RawDescriptionHelpFormatter
_KEPT_RUNTIMES = 3

_INIT = """\
Start a project: a folder with avocado.yaml, which says what runs on which board.

  avocadoctl init my-project                        an empty project
  avocadoctl init --reference npu-pose my-project   the reference application, ready to build
  avocadoctl init --target imx93-frdm my-project    for another board than the virtual one
  cd my-project
  avocadoctl install                                once: fetch everything the build needs
  avocadoctl keys init                              once: the keys your boards will trust
  avocadoctl provision /mnt/board-root              the first runtime, into a root file system
  avocadoctl deploy -H root@board                   every later one, over ssh"""

_INSTALL = """\
Resolve and cache everything that building a runtime needs: the packages for the board's Python and processor, verified
by hash; and check that the model is prepared for the board, that every file is there and that the tools are. Says all
that is missing at once. After it, `build` needs no network.

  avocadoctl install                          the default target of avocado.yaml
  avocadoctl install --target imx93-frdm      another board"""

_BUILD = """\
Build the extensions of a runtime into images and write its manifest. What was built from the same inputs before is not
built again. Nothing is signed and nothing leaves this machine.

  avocadoctl build                          the default target of avocado.yaml
  avocadoctl build --target imx8mp-evk      another board; wheels are chosen for it, nothing is emulated
  avocadoctl -o json build | jq .images"""

_PUBLISH = """\
Build, sign and write a repository: plain files that any web server can serve. Boards fetch from it with
`avocadoctl runtime add --url`, or over ssh with `deploy`, which makes a repository of its own.

Deltas are made from the images of the last runtimes that were built here. A repository's timestamp is good for a week;
renewing it takes the online key only, so a timer may do it.

  avocadoctl publish --out /srv/www/boards/virtual
  avocadoctl publish --refresh --out /srv/www/boards/virtual"""

_PROVISION = """\
Put the first runtime into a board's root file system, mounted on this machine: images, the signed runtime, the keys it
trusts, and what systemd needs to merge it at the first boot. Says everything the base lacks at once.

  avocadoctl provision /mnt/board-root --target imx8mp-evk"""

_DEPLOY = """\
Change what runs on a board, over your own ssh: ask it what it has, build and sign what it lacks, send only that, and
follow the change until it is proven healthy or everything is back as it was.

  avocadoctl deploy -H root@board              what avocado.yaml says now
  avocadoctl deploy -H root@board --dry-run    the plan, and nothing else
  avocadoctl deploy -H root@board --warm-up    the new model is tried beside the old one first, and refused if it is bad

The board fetches through the same ssh connection: no port, no address to guess. Exit status 0 means the new runtime
serves; docs/operations.md lists the others."""


def register(subparsers: Any) -> None:
    """Add every verb of the host; each sets `run`, a function of the parsed arguments that returns an exit status."""
    init = subparsers.add_parser("init", help="start a project", description=_INIT, formatter_class=_PLAIN)
    init.add_argument("folder", type=Path, nargs="?", default=Path(), help="the project's folder (default: here)")
    init.add_argument("--reference", metavar="NAME", help="start from a reference application, such as npu-pose")
    init.add_argument("--target", metavar="BOARD", help="its default_target (default: virtual)")
    init.add_argument("-r", "--runtime", metavar="NAME", help="what to call its runtime")
    init.set_defaults(run=run_init)

    install = subparsers.add_parser(
        "install", help="fetch what a build needs", description=_INSTALL, formatter_class=_PLAIN
    )
    _project_options(install)
    install.set_defaults(run=run_install)

    build = subparsers.add_parser("build", help="build a runtime's images", description=_BUILD, formatter_class=_PLAIN)
    _project_options(build)
    build.set_defaults(run=run_build)

    register_keys(subparsers)

    publish = subparsers.add_parser(
        "publish", help="sign a runtime into a repository", description=_PUBLISH, formatter_class=_PLAIN
    )
    _project_options(publish)
    add_keys_options(publish)
    publish.add_argument("--out", type=Path, metavar="DIR", help="default: build/repository/TARGET of the project")
    publish.add_argument(
        "--deltas", type=int, default=_KEPT_RUNTIMES, metavar="N", help="from the last N runtimes (default: 3)"
    )
    publish.add_argument("--refresh", action="store_true", help="publish nothing new; renew the timestamp")
    publish.set_defaults(run=run_publish)

    provision = subparsers.add_parser(
        "provision", help="seed a root file system", description=_PROVISION, formatter_class=_PLAIN
    )
    provision.add_argument("root", type=Path, help="the board's root file system, mounted here")
    provision.add_argument("--replace", action="store_true", help="start over on one that has a runtime")
    _project_options(provision)
    add_keys_options(provision)
    provision.set_defaults(run=run_provision)

    deploy = subparsers.add_parser(
        "deploy", help="change a board's runtime over ssh", description=_DEPLOY, formatter_class=_PLAIN
    )
    deploy.add_argument("--dry-run", action="store_true", help="show the plan and change nothing")
    deploy.add_argument(
        "--again", action="store_true", help="offer what the board has as well: it fetches anew whatever is damaged"
    )
    add_warm_up(deploy)
    _project_options(deploy, target_help="refuse a board that is not this target")
    add_keys_options(deploy)
    _own_host_option(deploy)
    deploy.set_defaults(run=run_deploy)


def _project_options(parser: argparse.ArgumentParser, target_help: str = "default: default_target") -> None:
    parser.add_argument("-C", "--project", type=Path, default=Path(), metavar="DIR", help="default: here or above")
    parser.add_argument("--target", metavar="BOARD", help=target_help)
    parser.add_argument("-r", "--runtime", metavar="NAME", help="needed when avocado.yaml has several")
    parser.add_argument("-o", "--output", choices=("table", "json"), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _own_host_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-H", "--host", metavar="[USER@]HOST", default=argparse.SUPPRESS, help="the board, as ssh knows it"
    )


def _report() -> Report:
    from agent.host.report import Report

    return Report()


def _load(arguments: argparse.Namespace) -> Project:
    from agent.host.project import find_project, load_project

    return load_project(find_project(arguments.project), arguments.target)


def _keys(arguments: argparse.Namespace, folder: Path) -> Keys:
    """The keys that were named, or those of the project."""
    if arguments.keys == DEFAULT_FOLDER:
        arguments.keys = folder / DEFAULT_FOLDER
    return open_keys(arguments)


def _print(arguments: argparse.Namespace, document: dict[str, Any], line: str) -> None:
    if getattr(arguments, "output", "table") == "json":
        print(json.dumps(document))
    else:
        print(line)


def run_init(arguments: argparse.Namespace) -> int:
    """Make the project's folder."""
    from agent.host.project import HOME, PROJECT_FILE
    from agent.host.start import refuse_unknown, rewrite
    from agent.host.target import nearest

    refuse_unknown(arguments.target, arguments.runtime)
    destination = arguments.folder
    if (destination / PROJECT_FILE).exists():
        raise OperationError(ErrorCode.USAGE, f"cannot start a project in {destination}: it has an {PROJECT_FILE}")
    destination.mkdir(parents=True, exist_ok=True)
    if arguments.reference is None:
        (destination / PROJECT_FILE).write_text(_EMPTY_PROJECT, encoding="utf-8")
        (destination / "hello.txt").write_text("merged\n", encoding="utf-8")
    else:
        known = sorted(path.parent.name for path in (HOME / "examples").glob(f"*/{PROJECT_FILE}"))
        if arguments.reference not in known:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot start from {arguments.reference!r}: no such reference application",
                nearest(arguments.reference, known, "Use"),
            )
        shutil.copytree(
            HOME / "examples" / arguments.reference,
            destination,
            symlinks=True,  # some point at what only the build puts there
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("build", "keys", "__pycache__"),
        )
    rewrite(destination, arguments.target, arguments.runtime)
    _print(arguments, {"project": str(destination.resolve())}, f"started a project in {destination.resolve()}")
    return 0


def run_install(arguments: argparse.Namespace) -> int:
    """Fetch and check what a build needs."""
    from agent.host.install import install

    report = _report()
    document = install(_load(arguments), arguments.runtime, report)
    report.clear()
    line = f"{document['runtime']} for {document['target']}: everything is here; `avocadoctl build` needs no network"
    _print(arguments, document, line)
    return 0


def run_build(arguments: argparse.Namespace) -> int:
    """Build a runtime."""
    from agent.host.build import build_runtime

    built = build_runtime(_load(arguments), arguments.runtime, _report())
    runtime = built.manifest.runtime
    line = f"built {runtime.name} {runtime.version} for {built.manifest.target} in {built.seconds:.1f} s"
    _print(arguments, built.as_dict(), f"{line}: {built.manifest_path}")
    return 0


def run_publish(arguments: argparse.Namespace) -> int:
    """Build a runtime, sign it and write the repository."""
    from agent.host.build import build_runtime, earlier_images, transfer_cache
    from agent.host.repository import publish

    project, report = _load(arguments), _report()
    folder = arguments.out or project.build_folder / "repository" / project.target.board
    if arguments.refresh:
        return _refresh(arguments, folder, _keys(arguments, project.folder))
    built = build_runtime(project, arguments.runtime, report)
    published = publish(
        folder,
        built.manifest,
        built.image_paths,
        earlier_images(project, built.manifest, arguments.deltas),
        _keys(arguments, project.folder),
        cache=transfer_cache(project),
        progress=lambda name, done, total: report.show(f"making {name}", done, total),
    )
    report.clear()
    document = {
        "repository": str(folder),
        "runtime": built.manifest.id,
        "full_bytes": dict(published.full_bytes),
        "delta_bytes": {image: dict(sizes) for image, sizes in published.delta_bytes.items()},
        "expires": published.expires.isoformat(),
    }
    deltas = sum(len(sizes) for sizes in published.delta_bytes.values())
    line = f"published {built.manifest.runtime.name} {built.manifest.runtime.version} into {folder}"
    _print(arguments, document, f"{line}: {len(published.full_bytes)} images, {deltas} deltas")
    return 0


def _refresh(arguments: argparse.Namespace, folder: Path, keys: Keys) -> int:
    from agent.contract.manifest import format_time
    from agent.host.repository import refresh

    expires = format_time(refresh(folder, keys))
    _print(arguments, {"repository": str(folder), "expires": expires}, f"{folder}: good until {expires}")
    return 0


def run_provision(arguments: argparse.Namespace) -> int:
    """Build the first runtime and put it into a root file system."""
    from agent.contract.manifest import manifest_bytes
    from agent.host.build import build_runtime
    from agent.host.provision import FirstRuntime, provision

    project, report = _load(arguments), _report()
    keys = _keys(arguments, project.folder)
    root_metadata = keys.root_bytes()
    built = build_runtime(project, arguments.runtime, report)
    first = FirstRuntime(manifest_bytes(built.manifest), built.image_paths, root_metadata)
    packages = [
        package
        for extension in built.manifest.extensions
        for package in project.document.extensions[extension.name].packages
    ]
    document = provision(arguments.root, project.target, first, packages, report, replace=arguments.replace)
    runtime = built.manifest.runtime
    line = f"{document['root']}: {runtime.name} {runtime.version} for {project.target.board}, ready to boot"
    _print(arguments, document, line)
    return 0


def run_deploy(arguments: argparse.Namespace) -> int:
    """Change a board's runtime."""
    import asyncio

    from agent.host.deploy import Request, closing_line, deploy
    from agent.host.project import find_project

    if not getattr(arguments, "host", None):
        raise OperationError(ErrorCode.USAGE, "cannot deploy: no board is named", "Name it: -H root@board")
    folder = find_project(arguments.project)
    request = Request(
        arguments.host,
        folder,
        arguments.runtime,
        arguments.target,
        arguments.dry_run,
        warm_up=arguments.warm_up,
        again=arguments.again,
    )
    document = asyncio.run(deploy(request, _keys(arguments, folder), _report()))
    error = OperationError.from_dict(document["error"]) if document["error"] else None
    if error is None or getattr(arguments, "output", "table") == "json":
        _print(arguments, document, closing_line(document))
    if error is not None:
        raise error
    return 0


_EMPTY_PROJECT = """\
# What runs on which board. docs/formats.md lists every key; `avocadoctl init --reference npu-pose` shows a whole one.
default_target: virtual
supported_targets: [virtual]

runtimes:
  main:
    version: "0.1.0"
    extensions: [app]  # merge order, highest first

extensions:
  app:
    version: "0.1.0"
    files:
      usr/share/app/hello.txt: hello.txt
"""


if __name__ == "__main__":
    from agent.cli import main

    sys.exit(main())
