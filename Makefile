# Needs Python 3.11 or newer (the package itself needs 3.10) and make; everything else is installed into .venv. `make` lists the targets.
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CACHE_DIR, ...) are respected.

VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
DEMO := $(VENV)/.stamp-demo
DEVELOPMENT := $(VENV)/.stamp-development
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Everything is installed in the version that constraints.txt names.
INSTALL := $(PIP) install -c constraints.txt
INSTALL_FAILED = { echo "Installing failed: pip's message is above. Without a network, point PIP_INDEX_URL or \
PIP_FIND_LINKS to a copy." >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench gpu gpu-dry docs constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO) ## train a small GPT, break it, see the alert (no W&B account needed)
	@$(BIN)/wandb-gradwatch demo

test: $(DEVELOPMENT) ## run the tests, except those that take minutes
	@$(BIN)/python -m pytest -n auto --dist loadfile

test-all: $(DEVELOPMENT) ## run all tests
	@$(BIN)/python -m pytest -n auto --dist loadfile -m ""

lint: $(DEVELOPMENT) ## style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(DEVELOPMENT) ## measure the cost of watching and of other monitors (20 minutes); write it to README.md and docs/
	@$(BIN)/python -m benchmarks && $(BIN)/python -m benchmarks.table

gpu: $(DEVELOPMENT) ## on a machine with a GPU: all tests and benchmarks that need one (9 minutes); again: continue; write docs/gpu.md
	@$(BIN)/python -m benchmarks.gpu_day; status=$$?; $(BIN)/python -m benchmarks.gpu_day --page; exit $$status

gpu-dry: $(DEVELOPMENT) ## without a GPU: check on a simulated one that every part of `make gpu` runs
	@$(BIN)/python -m benchmarks.gpu_day --dry

docs: $(DEVELOPMENT) ## build the documentation site in build/docs: the pages of docs/ and the API
	@$(BIN)/python -m mkdocs build --quiet && echo "build/docs/index.html"

constraints: $(DEVELOPMENT) ## pin the newest versions in constraints.txt, except torch
	@torch=$$(grep '^torch==' constraints.txt) && \
	$(PIP) install --upgrade --upgrade-strategy eager -r requirements-dev.txt "$$torch" && \
	{ grep '^#' constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude-editable --exclude wandb-gradwatch --exclude pip | \
	  sed 's/^torch==.*/'"$$torch"'/'; } > constraints.new && mv constraints.new constraints.txt && \
	git --no-pager diff --stat -- constraints.txt

clean: ## remove .venv and all generated files
	@rm -rf $(VENV) build dist demo-run .pytest_cache .hypothesis .mypy_cache .ruff_cache wandb
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp file avoids reinstalling until one of its prerequisites changes.

# The package and what it needs, with the extra `fast`: enough for the demo.
$(DEMO): constraints.txt pyproject.toml
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
	fi
	@echo "Installing PyTorch, W&B, NumPy, click and numba (the first time takes a minute or two)"
	@$(INSTALL) torch || $(INSTALL_FAILED)
	@# An isolated build would install the build backend again, without constraints.txt.
	@$(INSTALL) hatchling editables || $(INSTALL_FAILED)
	@$(INSTALL) --no-build-isolation -e '.[fast]' || $(INSTALL_FAILED)
	@touch $@

# In addition the frameworks, and the tools for tests, lint, documentation and builds.
$(DEVELOPMENT): $(DEMO) requirements-dev.txt
	@echo "Installing the frameworks and tools for the tests (the first time takes a minute or two)"
	@$(INSTALL) -r requirements-dev.txt || $(INSTALL_FAILED)
	@touch $@
