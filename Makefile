# Every target prepares what it needs: a virtual environment in .venv, the pinned packages, kvbridge itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: install demo test lint real real-quick clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,real,sign,fuzz]'
	touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/kvbridge demo --out runs/demo

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

real: install
	$(BIN)/python -m recipes.real --out runs/real

real-quick: install
	$(BIN)/python -m recipes.real --out runs/real-quick --quick

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
