# The verbs of this repository. `make` alone prints them; `make VERB ARGS="…"` passes arguments on.

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format types contract check docs bench constraints clean

ARGS ?=
# Most tests wait for processes and servers, so more of them run at once than there are cores.
WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin

# Any Python from 3.11 on will do. The pins of constraints.txt are made with 3.11.
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done)

# Errors are shown, progress is not. The build backend is pinned like everything else.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --progress-bar off \
	--constraint constraints.txt --build-constraint constraints.txt
SOURCES := src benchmarks tests docs
# PyTorch's newest release need not exist as a small CPU build everywhere; this one is asked for by name.
TORCH := 2.13.0

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.dev ## make .venv with everything that tests and checks need

demo: $(VENV)/.demo ## install what the demo needs and run it: two miners, a validator, a crash and an upgrade
	@$(BIN)/nodetrack demo $(ARGS)

test: $(VENV)/.dev ## run the whole test suite
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/.dev ## check style and formatting
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

format: $(VENV)/.dev ## rewrite the sources as the formatter wants them
	@$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

types: $(VENV)/.dev ## check types, strictly
	@$(BIN)/mypy

contract: $(VENV)/.dev ## check that imports point down only
	@$(BIN)/lint-imports

check: lint types contract ## lint, types and contract

docs: $(VENV)/.dev ## write the generated parts of docs/ anew
	@$(BIN)/python docs/generate.py

bench: $(VENV)/.bench ## measure beside the peers and write docs/benchmarks.md
	@$(BIN)/python -m benchmarks $(ARGS)

constraints: ## pin anew, in constraints.txt, what the whole set-up resolves to
	@rm -rf build/constraints
	@$(PYTHON) -m venv build/constraints
	@build/constraints/bin/python -m pip install -qq --upgrade pip
	@build/constraints/bin/python -m pip install -qq '.[all,demo]' --group dev --group bench 'torch==$(TORCH)'
	@{ echo '# Made by `make constraints`: everything that tests, checks, demo and benchmarks resolve to.'; \
	   build/constraints/bin/python -m pip freeze --all --exclude nodetrack --exclude setuptools | sed 's/+.*//'; \
	 } > build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@rm -rf build/constraints

clean: ## remove .venv, caches and build outputs; runs and demo folders stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .benchmarks
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment: one .venv, a stamp for each set of packages in it ---------------------------------

$(VENV)/.pip: constraints.txt
	@test -n "$(PYTHON)" || { echo "make: nodetrack needs Python 3.11 or newer; none was found." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "make: $(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv." >&2; exit 1; }
	@echo "Installing into $(VENV) (minutes the first time) …"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt pip
	@touch $@

$(VENV)/.demo: $(VENV)/.pip pyproject.toml
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml
	@$(INSTALL) --editable '.[all,demo]' --group dev
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.dev
	@$(INSTALL) --group bench
	@touch $@
