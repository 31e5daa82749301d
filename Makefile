# `make demo` and `make test` work on a fresh clone; each makes the virtual environment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CHECKED := build/installed
export FLWR_TELEMETRY_ENABLED = 0
# The tests start many processes, which would all compile the packages again.
unexport PYTHONDONTWRITEBYTECODE
# In the order of tests/conftest.py: what takes long comes first. Tests that start
# processes wait for them, so that three workers keep two cores busy.
WORKERS := -n 3 --dist loadgroup --no-loadscope-reorder

.PHONY: help demo test test-long test-all coverage lint typecheck bench docs dist clean

help:
	@echo "make demo    compare defenses on built-in data: a table and a report"
	@echo "make test    lint, type check and run the tests"
	@echo "make test-long  the tests that take long: deployments, pages, paper tables"
	@echo "make test-all  all of these, and more of what they test already"
	@echo "make coverage  line coverage of the packages, measured by the tests"
	@echo "make lint    ruff and mypy only"
	@echo "make bench   side-by-side measurements, one ratio per line"
	@echo "make docs    the documentation as a site in build/site"
	@echo "make dist    sdist and wheel in dist/, checked"
	@echo "make clean   remove the virtual environment and what was built"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/flower-vfl compare --dataset breast-cancer --out runs/demo

test: lint
	$(BIN)/python -m pytest $(WORKERS) -m 'not long and not extra'

test-long: $(READY)
	$(BIN)/python -m pytest $(WORKERS) -m 'long and not extra'

test-all: lint
	$(BIN)/python -m pytest $(WORKERS)

coverage: $(READY)
	$(BIN)/python -m pytest $(WORKERS) -m 'not extra' -q \
		--cov=flower_vfl --cov=strategies --cov=simulations --cov-report=term:skip-covered

lint: $(READY) typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Two of the package's folders lie outside it, so mypy looks at an installed copy.
typecheck: $(READY)
	@rm -rf build/lib $(CHECKED)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target $(CHECKED) .
	cd $(CHECKED) && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p flower_vfl

bench: $(READY)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/hops.py
	$(BIN)/python benchmarks/hops.py --deployment
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/utility.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel is built from the sdist, so that the sdist is complete.
dist: $(READY)
	rm -rf dist build/lib
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist runs
