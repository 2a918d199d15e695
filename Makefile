# Every target installs what it needs, and no more, into a virtual environment in .venv: the demo the
# package alone, the third-party pair a reader for GGUF files, the tests everything. Versions are pinned
# in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: install demo test lint real real-quick clean

$(VENV)/.package: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/.real: $(VENV)/.package
	$(INSTALL) -e '.[real]'
	touch $@

$(VENV)/.dev: $(VENV)/.package
	$(INSTALL) -e '.[dev,real,sign,fuzz]'
	touch $@

install: $(VENV)/.dev

demo: $(VENV)/.package
	$(BIN)/kvbridge demo --out runs/demo

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

real: $(VENV)/.real
	$(BIN)/python -m recipes.thirdparty run --out runs/real

real-quick: $(VENV)/.real
	$(BIN)/python -m recipes.thirdparty run --out runs/real-quick --quick

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
