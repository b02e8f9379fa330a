# Commands of the repository. Each one first creates or refreshes .venv if needed.
#
#   make demo               train a small sweep on two CPU ranks and write an HTML report
#   make test               all tests that this machine can run
#   make check              format, lint, types, import contracts
#   make nightly            the long matrices, and properties with new random draws
#   make bench              host time per unit, and step times against other engines
#   make mutation           which cases and tests notice which change of the core
#   make faults             injected faults, on real process trees and a local Slurm
#   make gpu-check          check a GPU machine, without network (docs/gpu.md)
#   make gpu-wheels         download the wheels that gpu-check needs
#   make oldest-torch       train with the oldest supported torch (kept in ~/.cache); BUILD=torch===2.13.0: another
#   make venv | clean       create .venv; delete caches
#
# PYTHON=/path/to/python3   interpreter for .venv (3.11 or later)
# VENV=path                 an environment other than .venv
# TORCH=torch==2.13.0       the torch to install; by default the CPU build, if there is one
# WORKERS=3                 processes of `make test` and `make nightly`
# MARKS="not nightly"       what `make test` chooses of pytest's marks
# ABSENT="sshd slurm"       test as on a machine without these, or ABSENT=all (tests/optional.py)
# DRAWS=1763877600          seed of `make nightly`; by default the time
# SEED=1 SAMPLE=30          mutants of `make mutation`: seed and number
# MINUTES=600               time limit of `make mutation`; the next call continues
# BLOCKS=6                  blocks of `make bench`; fewer than 6 give no interval
# DEVICE=cpu                tries `make gpu-check` without a GPU; PARTS="tests losses" runs some parts
# GPU_PYTHON=python3        the GPU machine's own Python, with a CUDA build of torch
# WHEELS_FOR=3.12           Python version of the wheels of `make gpu-wheels`

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
TORCH ?=
BLOCKS ?= 6
WORKERS ?= 3
MARKS ?= not nightly
DRAWS := $(or $(DRAWS),$(shell date +%s))
SEED ?= 1
SAMPLE ?= 30
MINUTES ?= 600
DEVICE ?= cuda
PARTS ?=
GPU_PYTHON ?= python3
WHEELS_FOR ?= 3.12
OLDEST_TORCH := $(shell sed -n 's/^  "torch>=\([0-9.]*\)",/\1.0/p' pyproject.toml)
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help venv demo test check bench gpu-check gpu-wheels nightly mutation faults oldest-torch clean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

venv: $(STAMP)

$(BIN)/python:
	@chosen=""; \
	for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    chosen="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo "expected: Python 3.11 or later with the venv module" >&2; \
	  echo "found:    $$($(or $(PYTHON),python3) --version 2>&1 || true) as $(or $(PYTHON),python3)" >&2; \
	  echo "change:   install one (Debian and Ubuntu: python3.11 and python3.11-venv) or name it: make venv PYTHON=/path/to/python3.11" >&2; \
	  exit 2; \
	fi; \
	echo "making $(VENV) with $$chosen ($$("$$chosen" --version))"; \
	"$$chosen" -m venv "$(VENV)"

# torch goes in first: as a mere dependency the default index would serve its CUDA build, several GB.
# Tests compare with megatron-fsdp, with DeepSpeed and with the Python files of Transformer Engine; what these depend
# on would bring CUDA. Without its libraries Transformer Engine refuses to be imported, and
# megatron-fsdp falls over that: its files lie in a folder of their own.
$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (about a minute the first time, besides downloads)"
	@echo "  1 of 3: torch"
	@if [ -n "$(TORCH)" ]; then \
	  $(PIP) install -qq -c constraints.txt "$(TORCH)"; \
	elif ! $(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH_VERSION)")' 2>/dev/null; then \
	  $(PIP) install -qq "torch==$(TORCH_VERSION)+cpu" 2>/dev/null || { \
	    echo "pip knows no CPU build of torch $(TORCH_VERSION); installing the default build, which may be several GB (README, Installation)"; \
	    $(PIP) install -qq -c constraints.txt "torch==$(TORCH_VERSION)"; }; \
	fi
	@echo "  2 of 3: this project and what it needs"
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@echo "  3 of 3: other engines that tests compare with"
	@for wanted in "megatron-fsdp einops" "deepspeed hjson msgpack ninja py-cpuinfo" "--target=$(VENV)/sources --upgrade transformer_engine"; do \
	  $(PIP) install -qq -c constraints.txt --no-deps $$wanted 2>/dev/null || \
	    echo "pip cannot install $${wanted##*upgrade }: tests that compare with it will be skipped, and say so" >&2; \
	done
	@touch $(STAMP)

demo: venv
	@$(BIN)/mfsdp-bench run sweeps/quickstart.yaml --report

# Half of the time goes into ranks that wait for each other: on two cores three processes took 342 s, two 421 s.
test: venv
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(MARKS)"

check: venv
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# Another torch in front of that of .venv, kept outside of the tree: the first build that pip serves.
# BUILD=torch===2.13.0 is the CUDA build of the newest, which loads and trains on a CPU too. Where pip
# serves none, or not in time, that is said, and is no failure.
BUILD ?= torch==$(OLDEST_TORCH)+cpu torch===$(OLDEST_TORCH)
OLDEST_TESTS := $(addprefix tests/core/test_,unused_parameters.py mesh_shapes.py checkpoint_reshard.py \
  right_or_refused_shards.py)
oldest-torch: venv
	@for build in $(BUILD); do \
	  home="$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mfsdp-bench/$$build"; \
	  case "$$build" in *+cpu) alone=--no-deps ;; *) alone= ;; esac; \
	  if [ -e "$$home/torch" ] || timeout 600 $(PIP) install -qq $$alone --target "$$home" "$$build" 2>/dev/null; then \
	    PYTHONPATH="$$home:." exec $(BIN)/python -m pytest -p no:cacheprovider $(OLDEST_TESTS); \
	  fi; \
	  rm -rf "$$home"; \
	done; \
	echo "not tried: pip serves none of $(BUILD), or not in time" >&2

# The long matrices, and every property with other draws than by day; DRAWS=N draws those of a night again.
nightly: venv
	@echo "to draw the same again: make nightly DRAWS=$(DRAWS)"
	@$(BIN)/python -m pytest -m "nightly or hypothesis" --hypothesis-profile nightly --hypothesis-seed $(DRAWS) \
	  -n $(WORKERS) --dist loadfile --no-loadscope-reorder || \
	  { code=$$?; echo "to draw the same again: make nightly DRAWS=$(DRAWS)" >&2; exit $$code; }

# Which detector notices which change of the core; goes on where the last one ended.
mutation: venv
	@$(BIN)/python -m tools.kill_matrix results/mutation --seed $(SEED) --mutants $(SAMPLE) --minutes $(MINUTES)

# A run that fails leaves its record and its cell undecided; the tables are printed all the same.
# Without a GPU every cell of gpu_one is pruned, with the reason. On one rank it measures hooks,
# casts and copies: nothing is communicated.
bench: venv
	@$(BIN)/python -W ignore -m tools.host_overhead
	-@$(BIN)/mfsdp-bench run gpu_one
	-@$(BIN)/mfsdp-bench run speed_memory
	-@$(BIN)/mfsdp-bench run speed --repeat $(BLOCKS)
	-@$(BIN)/mfsdp-bench run peers_memory
	-@$(BIN)/mfsdp-bench run peers --repeat $(BLOCKS)
	-@$(BIN)/mfsdp-bench run peers_zero1 --repeat $(BLOCKS)
	-@$(BIN)/mfsdp-bench compare sweeps/speed_memory.yaml
	-@$(BIN)/mfsdp-bench compare sweeps/speed.yaml
	-@$(BIN)/mfsdp-bench compare sweeps/peers_memory.yaml
	-@$(BIN)/mfsdp-bench compare sweeps/peers.yaml
	-@$(BIN)/mfsdp-bench compare sweeps/peers_zero1.yaml

# Real process trees with scripted ranks, three at a time, then allocations of a Slurm of its own.
faults: venv
	@$(BIN)/python -m pytest -m "nightly or not nightly" tests/run/faults -n 3
	@$(BIN)/python -m pytest -m "nightly or not nightly" tests/cluster/test_slurm.py

# On a GPU machine the image's own Python and torch, without network: see docs/gpu.md.
GPU_NEEDS := numpy pydantic ruamel.yaml typer rich jinja2 junitparser psutil zstandard nvtx nvidia-ml-py pytest pytest-timeout
ifeq ($(DEVICE),cpu)
gpu-check: venv
	@$(BIN)/python tools/gpu_check.py --device cpu $(PARTS:%=--part %)
else
gpu-check:
	@[ -d .gpu-packages ] || $(GPU_PYTHON) -m pip install -q --no-index --find-links gpu-wheels --target .gpu-packages $(GPU_NEEDS)
	@PYTHONPATH=.gpu-packages $(GPU_PYTHON) tools/gpu_check.py $(PARTS:%=--part %)
endif

gpu-wheels: venv
	@$(PIP) download -q --dest gpu-wheels --only-binary=:all: --python-version $(WHEELS_FOR) $(GPU_NEEDS)

clean:
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
