# `make demo` and `make test` each work alone on a fresh clone: they make .venv, install and do their job.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the first interpreter of a supported version; PYTHON=... chooses another
CANDIDATES := $(PYTHON) python3 python3.12 python3.11 python3.10
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
# processes that run tests
JOBS := 2
# without nvcc the kernels are compiled with NVRTC, which comes as wheels
comma := ,
EXTRAS := dev$(if $(shell command -v nvcc),,$(comma)nvrtc)

.PHONY: demo test lint fuzz gpu-test clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# tests on a GPU are skipped, with the reason, where there is none; they are never run side by side
test: lint
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests/host

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# random clusters and plans through everything that needs no GPU, half an hour on one core; failures are saved as
# scripts in tests/fuzz_failures.  FUZZ="--examples 100 --seed 7" for others
fuzz: $(READY)
	$(BIN)/python -m tvm_comfuse.verify.fuzz $(FUZZ)

# needs a Hopper GPU
gpu-test: $(READY)
	$(BIN)/python -m pytest -q tests/gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml setup.py constraints.txt
	@for python in $(CANDIDATES); do \
	    if $$python -c '$(SUPPORTED)' 2>/dev/null; then exec $$python -m venv $(VENV); fi; \
	done; echo "comfuse needs Python 3.10, 3.11 or 3.12; say which with PYTHON=..."; exit 1
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(READY)
