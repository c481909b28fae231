"""Options that several verbs share."""

from __future__ import annotations

import argparse


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """--dry-run"""
    parser.add_argument("--dry-run", action="store_true", help="make the plan and change nothing")


def add_warm_up(parser: argparse.ArgumentParser) -> None:
    """--warm-up and --no-warm-up; None: as the board's agent.toml says."""
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="try a new model beside the one that serves, before anything is stopped; a bad one is refused then"
        " (default: what `warm_up` in the board's agent.toml says)",
    )


def add_await_host(parser: argparse.ArgumentParser) -> None:
    """--await-host, which -H gives to every verb that may change /etc."""
    parser.add_argument(
        "--await-host",
        action="store_true",
        help="take a change of /etc back unless `avocadoctl confirm` follows over a new connection; -H does both",
    )
