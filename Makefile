# make demo | study | test | lint | types; `make` alone lists the targets.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-demo demo study test test-slow lint format types ci clean

BIN := .venv/bin
# Two workers of one thread each are faster than one worker of two threads.
WORKERS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/pytest -n $(WORKERS) --dist loadfile

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with everything for development
	@scripts/setup.sh dev

setup-demo:
	@scripts/setup.sh demo

demo: setup-demo ## the whole road on the bundled world, into runs/demo (TEACHER=train trains the teacher too)
	$(BIN)/simforcing demo --out runs/demo $(if $(TEACHER),--teacher $(TEACHER))

test: setup ## the tests that are not slow
	$(PYTEST) -m "not slow"

test-slow: setup ## the slow tests
	$(PYTEST) -m slow --timeout 900 || [ $$? = 5 ] # 5: there is none

study: setup-demo ## the paper's claims tested, up to two hours, into docs/results.md; goes on where it was stopped
	$(BIN)/simforcing study --out runs/study --results docs/results.md --workers $(WORKERS)

lint: setup ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup ## rewrite the files as ruff formats them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: setup ## mypy, strict
	$(BIN)/mypy

ci: ## what continuous integration runs
	@.ci/run

clean: ## remove runs, caches and .venv
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
