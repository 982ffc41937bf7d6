# `make demo` and `make test` need Python 3.11 or 3.12 and nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv/bin
ONCE ?=
DEMO_PORT ?=
PYTEST ?=

# Quiet, offline, and the same on every machine.
export HF_HUB_OFFLINE := 1
export DO_NOT_TRACK := 1
export PYTHONUNBUFFERED := 1

.PHONY: help setup system-packages demo test test-nightly test-compose lint clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## Create or update .venv from the locks
	@bash requirements/install.sh

system-packages: ## Install Chromium and PostgreSQL for the tests, where allowed
	@bash requirements/system-packages.sh

demo: setup ## Play the dialog with retention off and on (ONCE=1, DEMO_PORT=8100)
	@$(VENV)/python -m vllm_fork.demo $(if $(filter-out 0,$(ONCE)),--once) $(if $(DEMO_PORT),--port $(DEMO_PORT))

test: lint system-packages ## Check and test everything but the nightly suites
	$(VENV)/python -m pytest $(PYTEST)

test-nightly: setup system-packages ## The long suites
	$(VENV)/python -m pytest -m nightly --timeout 3600 $(PYTEST)

test-compose: setup system-packages ## docker compose, on a Docker engine where one can be had
	$(VENV)/python -m pytest -m nightly --timeout 3600 --maxfail 3 --tb short -s tests/compose $(PYTEST)

lint: setup ## ruff and mypy
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

clean: ## Remove what the targets made
	rm -rf .venv .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
