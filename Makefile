# The commands of the README. Each makes the virtual environment, installs the dependencies and builds the extension
# when that has not been done yet; a second call does neither.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.14.1
CLANG_FORMATTED := $(shell find csrc python_tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
DOCUMENTED := rtp_ext rtp_ext.planner rtp_ext.trace rtp_ext.schedule rtp_ext.timeline

MINUTES ?= 30

.PHONY: build simulators demo test faults soak sanitize lint format docs clean

build: $(VENV)/.built

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" "setuptools>=77" wheel
	touch $@

$(VENV)/.built: $(VENV)/.torch $(SOURCES)
	@echo "Compiling takes minutes. For CPUs only: RTP_WITH_CUDA=0. For other GPUs than those of this machine:" \
		"RTP_CUDA_ARCHITECTURES=90-real, for example."
	$(BIN)/pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

# What tests run on CPUs instead of CUDA. Only what has changed is compiled; a test that finds one missing makes it.
simulators: build
	$(BIN)/python python_tests/simulators

demo: build
	$(BIN)/python benchmarks/demo.py

test: simulators
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# Faults at every place of a step, and the table of docs/reliability.md: an hour and more.
faults: build
	$(BIN)/python benchmarks/faults.py --missing
	$(BIN)/python benchmarks/faults.py --write

# Random programs against one process, and many steps with random delays.
soak: build
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --steps 20000

# The extension under the address, undefined-behaviour and thread sanitizers: builds of their own, which take minutes.
sanitize: build
	$(BIN)/python benchmarks/sanitize.py

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)

format: build
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CLANG_FORMATTED)

# The API reference, from the docstrings.
docs: build
	$(BIN)/python -m pdoc --docformat google --output-directory build/docs $(DOCUMENTED)
	@echo "build/docs/index.html"

clean:
	rm -rf build $(VENV)
