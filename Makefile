# The commands that the README names. `make help` lists them.
#
# Variables:
#   PYTHON       the Python 3.11 that makes .venv (default python3.11)
#   PYTHON_ENV   the python of an environment that has vLLM and tl-backend: used as it is instead of .venv
#   PIP_ARGS     further arguments of every `pip install`
#   PYTEST_ARGS  further arguments of pytest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
PIP_ARGS ?=
PYTEST_ARGS ?=
PYTHON_ENV ?=

VENV := .venv
ifeq ($(PYTHON_ENV),)
RUN := $(VENV)/bin/python
CPU_ENV := $(VENV)/.cpu-stamp
DEV_ENV := $(VENV)/.dev-stamp
else
RUN := $(PYTHON_ENV)
endif

.PHONY: help demo test lint clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CPU_ENV) ## Serve a tiny model on the TileLang kernels and compare it with vLLM's own backend.
	@$(RUN) -m tl_backend.cli.demo

test: $(CPU_ENV) $(DEV_ENV) ## Run the whole suite that needs no GPU.
	@$(RUN) -m pytest $(PYTEST_ARGS)

lint: $(CPU_ENV) $(DEV_ENV) ## Check style, types and spelling.
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m codespell_lib

clean: ## Remove .venv and the caches.
	@rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

# A stamp is touched last: an install that broke off is begun again.
$(VENV)/.cpu-stamp: requirements/cpu.txt pyproject.toml requirements/install.sh
	@requirements/install.sh --python "$(PYTHON)" --venv $(VENV) --requirements requirements/cpu.txt --project . -- $(PIP_ARGS)
	@touch $@

$(VENV)/.dev-stamp: requirements/dev.txt $(VENV)/.cpu-stamp
	@requirements/install.sh --python "$(PYTHON)" --venv $(VENV) --requirements requirements/dev.txt -- $(PIP_ARGS)
	@touch $@
