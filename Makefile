PORT ?= 8000
ARGS ?=
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.ready
# Tests wait for processes most of the time, so three run at once on two cores.
PARALLEL = $(if $(ARGS),,-n 3 --dist loadfile --no-loadscope-reorder --durations 20)
# Triton's interpreter has to be chosen before Triton is imported; ARGS are for the other tests.
INTERPRETED = $(if $(ARGS),,TRITON_INTERPRET=1 $(BIN)/pytest -n 2 --dist loadfile tests/kernels/interpreted)
BENCHMARKS := startup link wide_steps scheduler partial_prefills chain front prefix logprobs idle acceptance speculation

.PHONY: setup serve test test-compose test-all lint bench gpu-pack gpu-check clean

setup: $(SETUP)

$(SETUP): pyproject.toml hatch_build.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

serve: $(SETUP)
	$(BIN)/shoal serve --port $(PORT) $(ARGS)

test: $(SETUP)
	$(BIN)/pytest -m 'not slow and not compose and not gpu' $(PARALLEL) $(ARGS)
	$(INTERPRETED)

test-compose: $(SETUP)
	timeout --signal=INT --kill-after=90 900 $(BIN)/pytest -m compose $(ARGS)

test-all: $(SETUP)
	$(BIN)/pytest -m 'not compose and not gpu' --hypothesis-profile search $(PARALLEL) $(ARGS)
	$(INTERPRETED)
	$(if $(ARGS),,$(MAKE) test-compose)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*.h kernels/cpu/*.cpp

bench: $(SETUP)
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit; done

# What a machine with a card may lack, for Python 3.12 (ARGS='--python 3.13'), into .gpu.
gpu-pack:
	$(PYTHON) -m benchmarks.gpu.carry pack $(ARGS)

# On a machine with a card, whose python may have torch and what else is needed by itself.
gpu-check:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu.carry run $(ARGS)

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .hypothesis
