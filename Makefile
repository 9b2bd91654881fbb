# Every target makes or reuses the environment, then runs. `make VENV=dir ...` puts it elsewhere,
# `make PYTHON=...` names the interpreter.

VENV ?= .venv
PYTHON ?=
WORKERS ?= 2
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt

.PHONY: help demo test test-long lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       set up, then generate text from a small checkpoint"
	@echo "make test       set up, then run the tests"
	@echo "make test-long  set up, then run the long sweeps too"
	@echo "make lint       set up, then run ruff, the format check and pyright"
	@echo "make format     set up, then format the sources"
	@echo "make clean      remove caches and reports (the environment stays)"

# An environment whose interpreter has gone is made anew. The recipe runs only when a stamp is out
# of date, and the stamp is written last, so an interrupted install is taken up again.
define make_environment
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
		python="$(PYTHON)"; \
		if [ -z "$$python" ]; then python=$$(tools/find-python) || exit 1; fi; \
		echo "making $(VENV) with $$python" >&2; \
		"$$python" -m venv --clear $(VENV); \
	fi
endef

$(BIN)/.installed: pyproject.toml constraints.txt
	$(make_environment)
	@echo "installing m31jax into $(VENV)" >&2
	@$(PIP_INSTALL) --editable .
	@touch $@

$(BIN)/.installed-test: pyproject.toml constraints.txt
	$(make_environment)
	@echo "installing m31jax[test] into $(VENV)" >&2
	@$(PIP_INSTALL) --editable '.[test]'
	@touch $(BIN)/.installed $@

demo: $(BIN)/.installed
	@$(BIN)/m31jax demo

test: $(BIN)/.installed-test
	$(BIN)/python -m pytest -m "not long and not gpu and not checkpoint" -n $(WORKERS) --dist worksteal -rs --cov

test-long: $(BIN)/.installed-test
	$(BIN)/python -m pytest -m "not gpu and not checkpoint" -n $(WORKERS) --dist worksteal -rs --cov

lint: $(BIN)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(BIN)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
