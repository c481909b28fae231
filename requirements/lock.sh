#!/bin/sh
# Rewrites the hashed lock files from pyproject.toml. Run it by hand after a change there; nothing else calls it.
# --universal keeps the markers, so one file serves every Python from 3.11 to 3.13.
set -eu
cd "$(dirname "$0")/.."
lock() { # lock NAME EXTRA...
    out=requirements/$1.txt; shift
    extras=$(for e in "$@"; do printf -- '--extra %s ' "$e"; done)
    # shellcheck disable=SC2086
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
        $extras pyproject.toml -o "$out"
}
lock agent
lock pose pose
lock dev pose host prepare dev
lock fuzz fuzz

# What a machine needs that only prepares models, in the versions that `make setup` installs.
uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
    --constraint requirements/dev.txt requirements/prepare.in -o requirements/prepare.txt

# What goes into the images of the example, for the board's Python; the same packages for both processors.
lock_device() {
    uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-emit-index-url --no-header \
        "requirements/$1.in" -o "requirements/$1.txt"
}
lock_device device-agent
lock_device device-pose

# The BSPs' runtime in the registry; see tflite-runtime.in.
uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
    requirements/tflite-runtime.in -o requirements/tflite-runtime.txt
