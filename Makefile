# `make help` lists the targets. `make serve` and `make test` need Python (3.11 or newer) and make; they set up the rest in .venv.
#
#   PYTHON    the interpreter that .venv is made from
#   PIP_ARGS  more arguments for pip, such as an index of CPU or CUDA builds of torch (docs/serving.md, "CPU or CUDA")
#   PORT      where `make serve` listens on 127.0.0.1
#   REPLICAS  engine replicas; empty: one for each GPU, else two
#   WORKERS   test processes at a time; one of them runs all that starts a Ray cluster, and mostly waits
#
# `make gpu` needs a CUDA device and a PYTHON that has torch >= 2.11, triton >= 3.6 and what benchmarks/gpu/preflight.py names
# (pytest-xdist is worth having), or finds it on PYTHONPATH; it installs nothing and needs neither Ray nor a network.
# `make gpu-served` needs what `mneme serve` does, too, and `make gpu-beside` vLLM 0.26.0: benchmarks/gpu/carry.py packs both
# for a machine without a network.
# A target that fails ends it, as the smoke test should: `make -k gpu` goes on with the others.

PYTHON ?= python3
PIP_ARGS ?=
PORT ?= 8000
MODEL ?= mneme-tiny
REPLICAS ?=
WORKERS ?= 3

BIN := .venv/bin
READY := .venv/.ready
DEV_READY := .venv/.dev-ready
# Tests start hundreds of processes, each of which would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: help setup setup-dev serve check check-tests test test-all faults kernels-compile lint format chart chart-tools train gpu clean

setup: $(READY) # .venv with what `mneme serve` needs
setup-dev: $(DEV_READY) # and with tests, linters and types

help: # this list
	@sed -n 's/^\([a-z-]*\):[^#]*# */  \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

$(BIN)/python:
	$(PYTHON) -m venv .venv

# Python compiles what it imports when it first does. If pip compiled all 20,000 files, it would take twice as long, and the first start
# a third less (docs/benchmarks.md, "A stranger's path").
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) "torch>=2.11"
	$(PIP_INSTALL) -e .
	touch $@

$(DEV_READY): $(READY)
	$(PIP_INSTALL) -e ".[dev]"
	touch $@

serve: $(READY) # the embedded model, or MODEL=, on PORT
	exec $(BIN)/mneme serve $(MODEL) $(if $(REPLICAS),--replicas $(REPLICAS)) --host 127.0.0.1 --port $(PORT)

# No test of these imports torch or starts Ray; property tests try a fifth of their examples.
check: $(DEV_READY) # style, types, and all tests that need no model and no Ray: two minutes
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint check-tests

check-tests: $(DEV_READY)
	MNEME_TEST_BUDGET=small $(PYTEST) -m "(policy or http) and not slow" $(PYTEST_ARGS)

test: $(DEV_READY) # the test suite: ten minutes
	$(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: $(DEV_READY) # what `make test` leaves out: long runs of properties and fault loops, whole benchmarks
	MNEME_TEST_BUDGET=large $(PYTEST) -m "(slow or at_length) and not gpu" $(PYTEST_ARGS)

# Of the cache tier, its files, its engines and its nodes; `make test` runs a short sample.
FAULT_TESTS := tests/cachetier tests/replicas/cache_faults tests/replicas/connector/test_cached_traffic.py
FAULT_TESTS += $(wildcard tests/e2e/nodes/test_nodes.py)

faults: $(DEV_READY) # long fault and kill loops of the cache tier, ten times as long as in test-all
	MNEME_TEST_BUDGET=faults $(PYTEST) -m "slow or at_length" $(FAULT_TESTS) $(PYTEST_ARGS)

kernels-compile: $(DEV_READY) # Triton's kernels for GPUs, without one
	env -u TRITON_INTERPRET $(BIN)/python -m tests.kernels.triton.triton_compile

lint: $(DEV_READY) # style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p mneme

format: $(DEV_READY) # what style can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In the order in which one makes the next worth its time; each under 9 minutes. GPU_ARGS=--dry: tiny, on a CPU.
GPU_OUT ?= benchmarks/results/gpu-$(shell date +%Y-%m-%d)
GPU_TARGETS := gpu-check gpu-attention gpu-engine gpu-tiers

.PHONY: $(GPU_TARGETS) gpu-served gpu-beside

gpu: $(GPU_TARGETS) # the checks and benchmarks of a GPU machine

$(GPU_TARGETS) gpu-served gpu-beside: gpu-%:
	@PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON) benchmarks/bench_gpu.py $* --out $(GPU_OUT) $(GPU_ARGS)

chart: $(DEV_READY) chart-tools # what is written from k8s/chart: its schema, its renders, docs/kubernetes.md
	$(BIN)/python .ci/chart

chart-tools: build/tools/helm/helm # helm and kubectl for the chart's tests, which are skipped without them

build/tools/helm/helm: | $(DEV_READY)
	$(BIN)/python .ci/chart --fetch

train: $(DEV_READY) # the embedded model anew
	$(BIN)/python training/train_tiny.py $(TRAIN_ARGS)

clean: # everything that these made
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
