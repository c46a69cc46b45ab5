# `make dashboard` and `make test` do all the set-up themselves, in .venv and nowhere else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?=
CHROMIUM := $(firstword $(shell command -v chromium chromium-browser google-chrome 2>/dev/null))

.PHONY: dashboard test lint browser screenshots clean

dashboard: $(VENV)/.app
	$(BIN)/streamlit run dashboard/app.py $(if $(PORT),--server.port $(PORT))

test: $(VENV)/.test browser
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

screenshots: $(VENV)/.test browser
	$(BIN)/python -m tests.screenshots

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.app: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[test,lint]'
	touch $@ $(VENV)/.app

# The tests drive a real browser: the system's Chromium if there is one, else Debian's as root, else Playwright's own.
browser: $(VENV)/.test
ifeq ($(CHROMIUM),)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else \
		$(BIN)/playwright install chromium; \
	fi
endif
	@command -v gcc >/dev/null || { echo "gcc is needed to build the tests' stand-in for the NVIDIA driver"; exit 1; }

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
