# make demo   trains a small language model on this machine, fused against naive
# make test   the whole suite          make check   lint, types and the fast tests
# make docs   the documentation site   make notebooks   runs the notebooks, keeps their outputs
# Everything runs in .venv, made on first use from a Python >= 3.12 found on this machine.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEWEST := .venv-newest

# The tests' CUDA compiler comes without a driver; off a GPU machine JAX is not to look for one.
ifeq ($(shell command -v nvidia-smi),)
export JAX_PLATFORMS := cpu
endif
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: demo test test-newest check lint format docs notebooks gpu-test clean

demo: $(INSTALLED)
	$(BIN)/python -m models.train --compare --fresh --out runs/demo

test: $(INSTALLED)
	$(PYTEST)

# The newest JAX; the suite above runs on the lower bound.
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest -q -n 2 --dist loadfile

# On a machine with a Hopper or Blackwell GPU, with the Python that has JAX for it: make gpu-test PYTHON=python3
gpu-test:
	JAX_PLATFORMS=cuda $(or $(PYTHON),$(BIN)/python) -m pytest -q -p no:cacheprovider tests/gpu

check: lint
	$(PYTEST) -m "not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, in site/; a warning is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Runs the notebooks from their .py files and keeps their outputs: make notebooks ONLY=06
notebooks: $(INSTALLED)
	$(BIN)/python tools/notebooks.py $(ONLY)

$(INSTALLED): pyproject.toml constraints.txt tools/find_python.sh
	test -x $(BIN)/python || { python=$$(tools/find_python.sh) && "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(NEWEST)/.installed: pyproject.toml tools/find_python.sh
	test -x $(NEWEST)/bin/python || { python=$$(tools/find_python.sh) && "$$python" -m venv $(NEWEST); }
	$(NEWEST)/bin/python -m pip install -q --disable-pip-version-check --upgrade -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(NEWEST) .cache .pytest_cache .mypy_cache .ruff_cache runs site
