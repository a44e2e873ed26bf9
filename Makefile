# `make run`: install, then the main job on embedded data. `make test`: install, then every check. `make docs`: site/.
# `make fuzz`: wrong input for every reader, for hours.
PYTHON ?= python3
BIN := .venv/bin
# more processes than cores: some of them wait for Flower's sites, or for a browser
SIDE_BY_SIDE := -n 4 --dist loadgroup --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: run test fuzz coverage lint docs clean

run: .venv/installed
	$(BIN)/pluribus run fedgh --against local --lr 0.1 --rounds 50

test: .venv/installed-test lint
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# every reader with this many wrong inputs, which differ from time to time
CASES ?= 10000

fuzz: .venv/installed-test
	PLURIBUS_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/fuzz

coverage: .venv/installed-test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --cov=pluribus --cov-report=term

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
