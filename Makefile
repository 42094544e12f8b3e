# Needs Python 3.11 or newer (the package itself needs 3.10) and make; everything else is installed into .venv. `make` lists the targets.
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CACHE_DIR, ...) are respected.

VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench gpu docs constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## train a small GPT, break it, see the alert (no W&B account needed)
	@$(BIN)/wandb-gradwatch demo

test: $(STAMP) ## run the tests, except those that take minutes
	@$(BIN)/python -m pytest -n auto --dist loadfile

test-all: $(STAMP) ## run all tests
	@$(BIN)/python -m pytest -n auto --dist loadfile -m ""

lint: $(STAMP) ## style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP) ## measure the cost of watching and of other monitors (20 minutes); write it to README.md and docs/
	@$(BIN)/python -m benchmarks && $(BIN)/python -m benchmarks.table

gpu: $(STAMP) ## on a machine with a GPU: run all tests and benchmarks that need one (10 minutes); write docs/gpu.md
	@$(BIN)/python -m benchmarks.gpu_day; status=$$?; $(BIN)/python -m benchmarks.gpu_day --page; exit $$status

docs: $(STAMP) ## build the documentation site in build/docs: the pages of docs/ and the API
	@$(BIN)/python -m mkdocs build --quiet && echo "build/docs/index.html"

constraints: $(STAMP) ## pin the newest versions in constraints.txt, except torch
	@torch=$$(grep '^torch==' constraints.txt) && \
	$(PIP) install --upgrade --upgrade-strategy eager -r requirements-dev.txt "$$torch" && \
	{ grep '^#' constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude-editable --exclude wandb-gradwatch --exclude pip | \
	  sed 's/^torch==.*/'"$$torch"'/'; } > constraints.new && mv constraints.new constraints.txt && \
	git --no-pager diff --stat -- constraints.txt

clean: ## remove .venv and all generated files
	@rm -rf $(VENV) build dist demo-run .pytest_cache .hypothesis .mypy_cache .ruff_cache wandb
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp file avoids reinstalling until one of its prerequisites changes.
$(STAMP): requirements-dev.txt constraints.txt pyproject.toml
	@set -e; \
	suits='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if ! $(BIN)/python -c "$$suits" 2>/dev/null; then \
	  rm -rf $(VENV); \
	  for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
	    if $$python -c "$$suits" 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "Python 3.11 or newer was not found. Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$found --version)"; \
	  if ! $$found -m venv $(VENV); then \
	    rm -rf $(VENV); \
	    echo "$$found cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	fi; \
	help="Installing failed: pip's message is above. Without a network, point PIP_INDEX_URL or PIP_FIND_LINKS to a copy."; \
	echo "Installing PyTorch (the first time takes a minute or two)"; \
	$(PIP) install -c constraints.txt torch || { echo "$$help" >&2; exit 1; }; \
	echo "Installing W&B and the tools"; \
	$(PIP) install -c constraints.txt -r requirements-dev.txt || { echo "$$help" >&2; exit 1; }; \
	$(PIP) install --no-deps --no-build-isolation -e . || { echo "$$help" >&2; exit 1; }; \
	touch $@
