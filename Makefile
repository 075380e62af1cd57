# What a clone needs. `make demo` and `make test` start from Python >= 3.12, make and a package index, nothing else.
#   PYTHON=python3.13   the interpreter to build the environment with
#   VENV=.venv          where the environment goes
#   PROMPT='...'        what `make demo` asks

VENV ?= .venv
PYTHON ?=
PROMPT ?= Explain in two sentences why decoding is bound by memory bandwidth.
export PROMPT

BIN := $(VENV)/bin
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.12 python3 python3.13 python3.14 python)
IN_RANGE := import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))

.PHONY: demo test test-reference test-avx2 prebuild wheel lint bench clean

demo: $(VENV)/.installed
	@$(BIN)/jaxserve pull
	@$(BIN)/jaxserve generate --prompt "$$PROMPT"

test: $(VENV)/.installed-dev
	@$(BIN)/jaxserve pull
	$(BIN)/python -m pytest -m "not slow"

# The tests that choose kernels by default, with the definition, and with the CPU kernels without AVX-512.
ENGINE_TESTS := tests/engine tests/frontend tests/server tests/models tests/test_offline_model.py

test-reference: $(VENV)/.installed-dev
	@$(BIN)/jaxserve pull
	$(BIN)/python -m pytest --kernels reference $(ENGINE_TESTS)

test-avx2: $(VENV)/.installed-dev
	@$(BIN)/jaxserve pull
	$(BIN)/python -m pytest --kernels cpu --cpu-level avx2 $(ENGINE_TESTS) tests/pallas_kernels

# CPU kernels for every level, minutes of compiling; the next wheel brings them along.
prebuild: $(VENV)/.installed
	$(BIN)/python -m pallas_kernels.prebuild

wheel: prebuild $(VENV)/.installed-dev
	$(BIN)/python -m build

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --cache-dir .cache/import-linter

bench: $(VENV)/.installed
	@$(BIN)/jaxserve pull
	@$(BIN)/jaxserve bench

# The environment and the pulled model stay.
clean:
	rm -rf build dist .cache .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each is newer than what it was made from, so a second `make` asks the network for nothing.
$(VENV)/.installed: pyproject.toml $(VENV)/.created
	@echo "installing jaxserve into $(VENV) (about 700 MB the first time, a minute or more without a word)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.created
	@echo "installing jaxserve and its development tools into $(VENV) (a minute or more without a word)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.created:
	@for python in $(PYTHONS); do \
	  if "$$python" -c '$(IN_RANGE)' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "jaxserve needs Python >=3.12,<3.15 and none of these is: $(PYTHONS). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot create virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv, or python3.12-venv)" >&2; \
	  exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$$found" -m venv --clear $(VENV); fi
	@touch $@
