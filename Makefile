# Two commands matter: `make replicate` (the main job) and `make test`. Each installs what it needs into .venv first.
SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.11,$(shell $(p) -c 'import sys; print("$(p)" if (3,11) <= sys.version_info[:2] <= (3,12) else "")' 2>/dev/null)))
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: replicate test lab figures clean

replicate: $(VENV)/installed
	$(RUN) -m kv4rl.replicate

test: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest tests
	$(RUN) -m pytest --nbmake --nbmake-timeout=90 notebooks

lab: $(VENV)/installed
	$(RUN) -m jupyterlab notebooks/00_start_here.ipynb

# Runs every notebook at its default preset and commits-ready: figures as PNG, no widget state.
figures: $(VENV)/installed
	$(RUN) -m kv4rl.execute notebooks/*.ipynb --in-place

$(VENV)/installed: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed on the PATH (or: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS))"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) has no venv module: on Debian or Ubuntu, apt-get install python3-venv"; exit 1; }
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks,models,data,test]'
	touch $@

clean:
	rm -rf $(VENV) runs build
