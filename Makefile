PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: quickstart test test-long lint proto docs

quickstart: .venv/installed
	$(BIN)/atoll quickstart

# Static checks, then every test that takes less than ten minutes in all.
test: .venv/installed lint
	$(BIN)/pytest -q -m "not long"

# Learning runs, other environments.
test-long: .venv/installed
	$(BIN)/pytest -q -m long

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Generated code is committed; tests/unit/test_proto.py checks that this changes nothing.
proto: .venv/installed
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. \
		--mypy_out=. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--mypy_grpc_out=. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		proto/services/wire/v1/*.proto

# tests/unit/test_reference.py checks that this changes nothing, either.
docs: .venv/installed
	$(BIN)/python -m services.config.reference > docs/configuration.md

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,dev]'
	touch $@
