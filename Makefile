# `make run`: install, then the main job on embedded data. `make test`: install, then every check. `make docs`: site/.
# `make network` has the faults and the conformance of whole federations over the network, minutes of Flower's waiting.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: run test network coverage lint docs clean

run: .venv/installed
	$(BIN)/pluribus run fedgh --against local

test: .venv/installed-test lint
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not network"

network: .venv/installed-test
	$(BIN)/python -m pytest -m network

coverage: .venv/installed-test
	$(BIN)/python -m pytest -n 3 --dist loadgroup --cov=pluribus --cov-report=term

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt -e .
	touch $@

.venv/installed-test: .venv/installed
	$(PIP) install -q -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
