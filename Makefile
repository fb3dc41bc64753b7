# RegionFed: a target for each job; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
RUN_CONFIG ?=
TORCH ?= cpu
TESTS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.installed-$(TORCH)
READY_DEV := $(VENV)/.installed-$(TORCH)-dev
CONTAINERS := $(VENV)/containers/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
# Python compiles what it imports, once; where it is told not to, everything is compiled on installation.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode)

# A process for each core, each with one thread; a file's tests share what they made.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

# The newest that the tests ran with; pyproject.toml has the ranges.
TORCH_PIN := torch==2.13.0
UV_PIN := uv>=0.13.5,<0.14

export RUN_CONFIG
export FLWR_TELEMETRY_ENABLED ?= 0
export FLWR_DISABLE_UPDATE_CHECK ?= 1
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help run test slow gpu unit test-compose lint types containers audit format venv report bench results figures clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  RUN_CONFIG='rounds=5 seed=1'   settings of a run; all of them: pyproject.toml"
	@echo "  PYTHON=python3.12              the Python to build $(VENV) with, 3.11 or newer"
	@echo "  TORCH=cuda                     pip's own choice of PyTorch, instead of the small CPU build"
	@echo "  TESTS='-k ledger'              what to hand to pytest"

run: $(READY) ## run the embedded federation and write its report
	@$(BIN)/python scripts/run.py "$$RUN_CONFIG"

test: lint types ## check everything: lint, format, types, all tests
	$(PYTEST) $(TESTS)

slow: $(READY_DEV) ## run the tests that take minutes
	$(PYTEST) -m slow $(TESTS)

gpu: $(READY_DEV) ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(TESTS)

test-compose: $(READY_DEV) $(CONTAINERS) ## start the Compose file and break it; needs a Docker engine from 26 on
	$(BIN)/python -m pytest -m compose $(TESTS)

unit: $(READY_DEV) ## run the unit tests only
	$(PYTEST) tests/unit $(TESTS)

lint: $(READY_DEV) ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY_DEV) ## check types
	$(BIN)/mypy

containers: $(CONTAINERS) ## check the Compose file and the image's recipe
	$(CONTAINERS)/docker-compose config --quiet
	$(CONTAINERS)/docker-compose -f docker-compose.yml -f deploy/gpu.yml config --quiet
	$(CONTAINERS)/hadolint deploy/Dockerfile
	$(CONTAINERS)/compose-lint check --quiet --skip-suppressed --strict-config --fail-on low docker-compose.yml

audit: $(READY_DEV) ## look what is installed up in PyPI's list of known vulnerabilities
	$(BIN)/uv tool run --from 'pip-audit>=2.9,<3' pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

format: $(READY_DEV) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

venv: $(READY_DEV) ## install everything, tools included, into .venv

report: $(READY) ## render the report of the latest run again
	$(BIN)/python -m server_app.report

bench: $(READY) ## measure the cost of a round over a bare PyTorch loop
	$(BIN)/python -m benchmarks.speed

results: $(READY) ## reproduce the choice of steps and the table of results (hours)
	$(BIN)/python -m benchmarks.tuning --json benchmarks/results/tuning.json
	$(BIN)/python -m benchmarks.default --json benchmarks/results/default.json

figures: $(READY) ## draw the pictures of docs/algorithm.md again
	$(BIN)/python -m benchmarks.figures

clean: ## remove .venv and the caches; runs stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml | $(BIN)/python
	@$(call install,.)
	@touch $@

$(READY_DEV): pyproject.toml | $(BIN)/python
	@$(call install,.[dev])
	@touch $(READY) $@

# Apart from what the tests import: two of them are binaries, and all are pinned by hash.
$(CONTAINERS): deploy/linters.txt | $(READY_DEV)
	@$(BIN)/uv venv --quiet --clear $(VENV)/containers
	@$(BIN)/uv pip install --quiet --python $(CONTAINERS)/python --require-hashes --requirement $<
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"RegionFed needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# uv, which Flower needs anyway, installs several times faster than pip; pip does where uv cannot.
define install
set -e; echo 'Installing RegionFed into $(VENV); the first time this takes minutes.'; \
$(PIP) install '$(UV_PIN)' || true; \
$(or $(torch-$(TORCH)),$(error TORCH is 'cpu' or 'cuda', not '$(TORCH)')); \
$(UV) --editable '$(1)' || $(PIP) install --editable '$(1)'
endef

# On Linux pip's default PyTorch brings CUDA, gigabytes that a CPU cannot use. The CPU build comes from
# where pip is set up to find one, else from where uv knows that PyTorch keeps them; else the default
# has to do, and is installed with the package.
define torch-cpu
if [ "$$(uname -s)" = Linux ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
  $(PIP) install '$(TORCH_PIN)+cpu' 2>/dev/null || $(UV) --torch-backend cpu '$(TORCH_PIN)' \
  || echo 'No CPU build of PyTorch found; taking the default one.'; \
fi
endef

define torch-cuda
case "$$($(BIN)/python -c 'import torch; print(torch.__version__)' 2>/dev/null)" in \
  *+cpu) $(PIP) uninstall --yes torch;; \
esac
endef
