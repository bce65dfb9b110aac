# The door: everything else is `doit …` in the activated environment (. .venv/bin/activate).
# uv is used where it is there, plain venv + pip where not; both check the hashes of requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.paceline-installed
DOCS := .venv-docs

.PHONY: install train test test-long test-fast lint types contracts check docs lock clean-env

install: $(STAMP)  ## the environment alone; the targets below make it too
	@echo "the environment is .venv; next: . .venv/bin/activate, then doit list, or make train, or make test"

train: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/doit train experiment=quickstart

# The tests that take no seconds of their own: fit for a pre-commit hook. What is left out says so with `slow` or `long`.
test-fast: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not long" --timeout 60

# Before each push: every promise of the README at least once, with real runs. Six at a time, as tests wait too.
test: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 6 --dist worksteal -m "not long"

# Before a release, and after a change of what they test: faults at many moments, searches and sweeps of many trainings.
test-long: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 4 --dist worksteal -m long

check: lint types contracts

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	PYTHONPATH=. $(BIN)/lint-imports

# Not --quiet: mkdocs then counts no warning, and --strict refuses nothing.
docs: $(DOCS)/.installed  ## the pages of docs/ with the API reference, as a site in site/
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: requirements-docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check --require-hashes --no-deps -r requirements-docs.lock
	@touch $@

$(STAMP): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is " + sys.version.split()[0] + ". Try: make install PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@PYTHON="$(PYTHON)" .ci/install
	@# the project itself, importable from everywhere in this environment (doit loads its plug-ins before the working directory)
	@# and doit looks for dodo.py in the folders above too, so that every verb works in a subfolder
	@$(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "paceline.pth").write_text(str(pathlib.Path.cwd()) + "\nimport os; os.environ.setdefault(\"DOIT_SEEK_FILE\", \"1\")\n")'
	@# the command paceline, in the form of pip's own: the interpreter's path may have blanks
	@printf '%s\n' '#!/bin/sh' "'''exec' \"$(CURDIR)/$(BIN)/python\" \"\$$0\" \"\$$@\"" "' '''" 'from pipeline.cli.main import main' 'raise SystemExit(main())' >$(BIN)/paceline
	@chmod +x $(BIN)/paceline
	@touch $@

lock:  ## after a change of dependencies in pyproject.toml
	uv pip compile pyproject.toml --group dev --extra cuda --extra kubernetes --extra s3 --extra server --extra tensorboard $(LOCKED) -o requirements.lock
	uv pip compile --group nodes --constraints requirements.lock $(LOCKED) -o requirements-nodes.lock
	uv pip compile --group docs $(LOCKED) -o requirements-docs.lock

LOCKED := --quiet --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-header

clean-env:
	rm -rf .venv $(DOCS)
