# Everything a developer or CI runs. Each target installs what it needs into $(VENV).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
INSTALL = bash scripts/install.sh $(BIN)/python
# bytecode is kept where the environment says otherwise too: every process would compile all it imports
unexport PYTHONDONTWRITEBYTECODE
# tests run in so many processes at once, each with whole files (docs/decisions/018); 0: in one.
# Half of their time they wait, so two cores are kept busy by more than two
WORKERS ?= 5
TOGETHER = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK = not slow and not soak
# rooms whose quick tests import torch as they are collected: one process does, and not every one
WITH_TORCH = $(addprefix tests/,host/accelerators api training/checkpointing training/data compat snapshots/dcp forkserver)
# targets beside each other, the words of each in one piece
BESIDE = $(MAKE) --no-print-directory -j3 -Oline

# of the check on a GPU, which installs nothing: its Python, and what it is told (docs/gpu.md)
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
DEVICE ?= cuda
OUT ?= build/gpu
BUDGET ?= 450
PARTS ?=
WHEELS ?=

.PHONY: help demo docs test check lint unit unit-torch tests bench soak matrix proto wheel-test release gpu clean
help:
	@echo "make demo    elasticrun demo: two agents, a real model, four faults (sets itself up)"
	@echo "make test    lint, types, import contracts, one scenario of each kind (sets itself up)"
	@echo "make check   what each commit passes: lint, types, contracts, the quick tests"
	@echo "make soak    every test of all, torchrun's side too   |  make bench  beside torchrun, a table"
	@echo "make gpu     what only a GPU can show, within 8 minutes (docs/gpu.md)"
	@echo "make release build, check and install the packages; REHEARSE=yes before the version is final"
	@echo "make proto   generate elasticrun/wire/pb again        |  make wheel-test  an installed wheel"
	@echo "make docs    the documentation as a site, in build/site (docs/decisions/045)"

# torch first and exactly: with it there, no range of another package fetches a different build
$(VENV)/.run: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elasticrun needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) "$(TORCH)" -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(INSTALL) "$(TORCH)" -e '.[dev]'
	touch $@

$(VENV)/.frameworks: $(VENV)/.dev
	$(INSTALL) "$(TORCH)" -e '.[dev,frameworks,release]'
	touch $@

$(VENV)/.release: $(VENV)/.dev
	$(INSTALL) "$(TORCH)" -e '.[dev,release]'
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(INSTALL) "$(TORCH)" -e '.[docs]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/elasticrun demo

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in build/site; $(BIN)/mkdocs serve shows it while you write"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "$(QUICK)" $(addprefix --ignore=,$(WITH_TORCH))

unit-torch: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "$(QUICK)" $(WITH_TORCH)

check: $(VENV)/.dev
	$(BESIDE) lint unit unit-torch

tests: $(VENV)/.frameworks
	$(BIN)/python -m pytest $(TOGETHER) -m "not soak"

test: $(VENV)/.frameworks
	$(MAKE) --no-print-directory -j3 lint tests wheel-test

wheel-test: $(VENV)/.dev
	PYTHON="$(BIN)/python" TORCH="$(TORCH)" bash scripts/wheel_test.sh

release: $(VENV)/.release
	$(BIN)/python scripts/release.py $(if $(REHEARSE),--rehearse) $(if $(TAG),--tag "$(TAG)")

bench: $(VENV)/.frameworks
	$(BIN)/python benchmarks/launcher.py
	$(BIN)/python benchmarks/timeline.py --plot docs/timeline.png
	$(BIN)/python benchmarks/hangs.py --torchrun
	$(BIN)/python benchmarks/watch_cost.py
	$(BIN)/python benchmarks/work_cost.py
	$(BIN)/python benchmarks/elastic.py --plot docs/elastic.png
	$(BIN)/python benchmarks/rendezvous_scale.py
	$(BIN)/python benchmarks/idle_sessions.py
	$(BIN)/python benchmarks/record.py
	$(BIN)/python benchmarks/netcheck.py
	$(BIN)/python benchmarks/snapshots.py
	$(BIN)/python benchmarks/sim_scale.py --png docs/sim-scale.png
	$(BIN)/python benchmarks/netcheck_faults.py

soak: export ELASTICRUN_TORCHRUN = live
soak: export ELASTICRUN_TEST_EXAMPLES = 10
soak: $(VENV)/.frameworks
	$(BIN)/python -m pytest $(TOGETHER) -m "not soak"
	$(BIN)/python -m pytest -m soak --timeout 3600

# the ordinary build of one version, in an environment of its own: make matrix TORCH=2.14.1 PYTHON=python3.12
matrix:
	$(PYTHON) scripts/matrix.py "$(TORCH)"

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu.check --device "$(DEVICE)" --out "$(OUT)" --budget "$(BUDGET)" \
		--parts "$(PARTS)" --wheels "$(WHEELS)"

proto: $(VENV)/.dev
	$(BIN)/python scripts/gen_proto.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
