# `make demo` and `make test` set up everything they need in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# The lowest versions: make test VENV=.venv-floors PIP_ARGS="--constraint tests/floors.txt"
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?= --data demo --max-drop 0.5

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# One thread for each test process: two processes with two threads each are slower on two cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test lint format clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/eval_imagenet.py --model demo_deit $(DEMO_ARGS)
	$(BIN)/python scripts/eval_imagenet.py --model demo_swin $(DEMO_ARGS)

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second run start at once; a changed setup.cfg installs again.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) --editable ".[$*]"
	touch $@
