# Two commands for a newcomer: `make demo` and `make test`. Both set everything up first, in a virtual environment of the project's own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# A folder with the benchmark data in PyG's raw layout, if it lies beside the project. The package itself knows only the variable.
ifneq ($(wildcard ../shared/data),)
export ISTHMUS_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test docs first-steps browser explore test-engines lint types check bench bench-check clean

setup: $(READY)

# torch first and by exact version: a range would pull accelerator packages of several gigabytes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isthmus needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Setting up $(VENV), once: torch first (a few minutes; 3 GB in all) ...'
	@$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	@echo '... then Isthmus and what it needs ...'
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: setup
	$(BIN)/isthmus demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The documentation as a site in build/site, offline, with its links checked.
docs: setup
	$(BIN)/python tools/build_docs.py

# Every command of README and the first pages as printed, in an empty folder; minutes.
first-steps: setup
	$(BIN)/python tools/first_steps.py

# A browser for the tests of pages, where this machine can install one; without it they are skipped.
browser:
	command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update \
	  && apt-get -qq install --yes --no-install-recommends chromium >/dev/null; } \
	  || echo 'no chromium, and none can be installed here: tests in a browser will be skipped'

# The tests with generated examples, with new ones each time; a failure prints how to repeat it.
explore: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --hypothesis-profile=default $$(grep -rl 'hypothesis import given' tests)

# Engines with real processes: ray actors, and a federation on loopback. Extras come on top of the same environment, so the
# tests between organisations that `make test` skips without them run here too.
ENGINES := $(VENV)/.engines

$(ENGINES): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,ray,nvflare]'
	touch $(ENGINES)

test-engines: $(ENGINES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy
	OMP_NUM_THREADS=1 timeout --kill-after=60 1800 $(BIN)/python -m pytest tests/engines

lint: setup
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools

types: setup
	$(BIN)/mypy

check: lint types test

# Rounds beside a plain PyG loop; ends with a table of ratios. bench-check fails where one fell by more than a fifth.
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/local_loop.py

bench-check: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/local_loop.py --check

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
