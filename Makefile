PORT ?= 8000
SEEDS ?= 0..999
ARGS ?=
PYTHON ?= python3
BIN := .venv/bin
# Markers: packages of a server, and all packages.
SERVER := .venv/.server
SETUP := .venv/.ready
CLIENTS := .venv-clients/.ready
PAGE := .venv-page/.ready
# Tests often wait for processes, so four run at once on two cores.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder --durations 20
# Triton's interpreter has to be chosen before Triton is imported; ARGS are for the other tests.
INTERPRETED = TRITON_INTERPRET=1 $(BIN)/pytest -n 2 --dist worksteal --durations 20 tests/kernels/interpreted
# Without torch and without a model.
FAST := tests/test_imports.py tests/test_words.py tests/shared tests/services/gateway \
	tests/services/scheduler tests/services/tokenizer
BENCHMARKS := startup link wide_steps scheduler partial_prefills chain first_token front prefix logprobs batches idle acceptance speculation draft_vocab

# Our modules are compiled once, not by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup environments serve check test test-main test-interpreted images test-compose test-swarm test-clients test-page test-all sim lint docs bench gpu-pack gpu-check clean
.DEFAULT_GOAL := help

help: ## print this
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(SETUP) ## install everything into .venv, and again when pyproject.toml or native code changed

# Modules are compiled at their first import: compiling all of them takes a minute.
define INSTALL
	@echo 'It takes some minutes; "Preparing editable metadata" is silent for one.'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --no-compile --editable '.[$(1)]'
endef
SOURCES := pyproject.toml hatch_build.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)

$(SERVER): $(SOURCES)
	@echo 'Installing a server into .venv: native code is compiled, then PyTorch and the rest come, more than a gigabyte.'
	$(call INSTALL,all)
	touch $@

# Tests compare all variants of the native code that this CPU can run.
$(SETUP): $(SOURCES)
	@echo 'Installing into .venv: a server, if it is not there yet, and the packages of tests, less than a gigabyte.'
	$(call INSTALL,dev)
	$(BIN)/python kernels/cpu/build.py --cpus this
	touch $(SERVER) $@

serve: $(SERVER) ## serve a model (PORT=9000, ARGS=FOLDER)
	$(BIN)/shoal serve $(ARGS) --port $(PORT)

check: lint ## lint, types and the fast tests: before every commit
	$(BIN)/pytest -m 'not slow and not seconds and not compose and not gpu' $(PARALLEL) $(FAST)

test: test-main $(if $(ARGS),,test-interpreted) ## all tests but the slow ones (ARGS='--lf': those that failed; any of pytest's arguments)

test-main: $(SETUP)
	$(BIN)/pytest -m 'not slow and not compose and not gpu' $(if $(ARGS),,$(PARALLEL)) $(ARGS)

test-interpreted: $(SETUP)
	$(INTERPRETED) -m 'not slow'

images: $(SETUP) ## build those of the container stack, at low priority
	nice $(BIN)/python -m benchmarks.harness.stack

test-compose: $(SETUP) ## the container stack, on Docker
	timeout --signal=INT --kill-after=90 900 $(BIN)/pytest -m 'compose and not slow' --durations 20 tests/compose $(ARGS)

test-swarm: $(SETUP) ## the same on a swarm of two engines of this machine
	timeout --signal=INT --kill-after=90 900 $(BIN)/pytest -m 'compose and slow' --durations 20 tests/compose $(ARGS)

test-clients: $(CLIENTS) ## the libraries of people who write applications, in an environment of their own
	$(dir $(CLIENTS))bin/pytest -c tests/clients/pytest.ini --confcutdir tests/clients tests/clients

environments: $(SETUP) $(CLIENTS) ## install everything, and the libraries of clients

$(CLIENTS): $(SETUP) tests/clients/requirements.txt tests/clients/constraints.txt tests/clients/node/package-lock.json
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt -c tests/clients/constraints.txt
	if command -v npm > /dev/null; then npm ci --loglevel=error --no-audit --no-fund --prefix tests/clients/node; fi
	touch $@

test-page: $(PAGE) ## the gateway's page, in Chromium
	$(dir $(PAGE))bin/pytest -c tests/page/pytest.ini --confcutdir tests/page tests/page $(ARGS)

$(PAGE): $(SETUP) tests/page/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r tests/page/requirements.txt
	touch $@

test-all: $(SETUP) ## everything that needs no card, the slow tests too
	$(BIN)/pytest -m 'not compose and not gpu' --hypothesis-profile search $(if $(ARGS),,$(PARALLEL)) $(ARGS)
	$(if $(ARGS),,$(INTERPRETED))
	$(if $(ARGS),,$(MAKE) test-clients test-page test-compose test-swarm)

sim: $(SETUP) ## the mesh in virtual time (SEEDS=0..999 searches, SEEDS=17 replays one with its messages)
	$(BIN)/python -m tests.sim.run $(SEEDS)

lint: $(SETUP) ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*.h kernels/cpu/*.cpp

docs: $(SETUP) ## write docs/settings.md and the chart's schema from the settings' declarations, docs/cli.md from the commands' help, docs/exactness.md from the rules
	$(BIN)/python -m cli.settings_page
	$(BIN)/python -m cli.chart_schema
	$(BIN)/python -m cli.manual
	$(BIN)/python -m tests.exactness.page

bench: $(SETUP) ## what the mesh costs, into benchmarks/results
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit; done

# Wheels for Python 3.12 (ARGS='--python 3.13').
gpu-pack: ## into .gpu what a machine with a card may lack
	$(PYTHON) -m benchmarks.gpu.carry pack $(ARGS)

# For a machine with a GPU; its own Python may have torch and other packages already.
gpu-check: ## measure the engine on a card, in eight minutes
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu.carry run $(ARGS)

clean: ## remove .venv and all caches
	rm -rf .venv .venv-clients .venv-page tests/clients/node/node_modules .cache .mypy_cache .ruff_cache .hypothesis
