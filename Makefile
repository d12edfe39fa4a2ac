# Everything needs `make setup`, which builds .venv once and again whenever pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
ONE_THREAD := OMP_NUM_THREADS=1  # for each test worker and whatever it starts: two of them fill two cores
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup audit test test-slow check browser results docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

audit: setup
	$(BIN)/dosimeter audit --out out/audit

test: setup browser
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m "not slow"

test-slow: setup browser
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,flower,nvflare]'
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m slow --timeout 3600

# The tests open the report in a real browser. Debian's chromium is installed where there is none and we may.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	echo "no chromium here and no way to install it: the browser tests will be skipped"

# The pages of docs/results from their records.
results: setup
	$(BIN)/python docs/results/build.py

# Every page that is written by a command: the results, and the guide's page of equations.
docs: results
	$(BIN)/python docs/guide/build_equations.py
	$(BIN)/python docs/guide/build_reach.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist out *.egg-info
