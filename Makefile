# The commands of the README. Each makes the virtual environment, installs the dependencies and builds the extension
# when that has not been done yet; a second call does neither.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.14.1
CLANG_FORMATTED := $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
SOURCES := $(shell git ls-files csrc CMakeLists.txt setup.py pyproject.toml)

.PHONY: build demo test lint format clean

build: $(VENV)/.built

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" "setuptools>=77" wheel
	touch $@

$(VENV)/.built: $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

demo: build
	$(BIN)/python benchmarks/demo.py

test: build
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)

format: build
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CLANG_FORMATTED)

clean:
	rm -rf build $(VENV)
