# One command per task. PLATFORM=cpu|gpu chooses the build, PYTHON=python3.12 the interpreter.
.DEFAULT_GOAL := help
.PHONY: help install dev serve chaos fuzz soak bench docs test lint format lock release clean
SHELL := /bin/bash
# Many containers set it: else each of hundreds of processes that tests start compiles what it imports of this checkout.
unexport PYTHONDONTWRITEBYTECODE

CONFIG ?= configs/local.yaml
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RIGHT := 'import sys; 11 <= sys.version_info.minor <= 13 or sys.exit("pdserve: Python 3.11 to 3.13 is needed: PYTHON=…")'
TESTS ?= tests
RESULTS ?= bench-results
REQUESTS ?= 2000
FORM ?= serve
# Most tests wait, for timeouts and for processes to start: they run beside those with real engines (tests/conftest.py).
PARALLEL ?= -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5

help:  ## show this list
	@echo "pdserve: prefill/decode-disaggregated LLM serving on vLLM"
	@echo
	@sed -n 's/^\([a-z]*\):.*##\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo
	@echo "Options: CONFIG=configs/disagg.yaml (serve, chaos, bench)  RESULTS=bench-results (bench)"
	@echo "         COMPARE='--minutes 30' (bench: more options)"
	@echo "         REQUESTS=2000 FUZZ=--real (fuzz: requests, more options)"
	@echo "         FORM=serve|roles|pods SOAK='--trace FILE' (soak: more options)"
	@echo "         TESTS=tests/queue PARALLEL= (test)  PLATFORM=cpu|gpu  PYTHON=python3.12"

install:  ## install everything to serve into .venv, for this machine's GPU or CPU
	@$(PYTHON) -c $(RIGHT) && $(PYTHON) -m pdserve.install $(VENV)

dev:
	@VENV=$(VENV) deploy/test-tools.sh || echo "pdserve: some tools for tests could not be installed" >&2
	@$(PYTHON) -c $(RIGHT) && $(PYTHON) -m pdserve.install $(VENV) dev

serve: install  ## install what is missing, then run the graph of CONFIG until Ctrl-C
	@exec $(BIN)/pdserve serve -f $(CONFIG)

chaos: install  ## inject every fault into the graph of CONFIG under load, print a scorecard (some 20 minutes)
	@exec $(BIN)/pdserve chaos -f $(CONFIG) --dtype float32

fuzz: dev  ## send requests of every shape to a graph of simulated engines (FUZZ=--real: real ones)
	@$(BIN)/python -m pdserve_bench.fuzz --requests $(REQUESTS) $(FUZZ)

soak: dev  ## run FORM=serve, roles or pods for twenty minutes with restarts; does anything grow? (SOAK=--minutes 120)
	@$(BIN)/python -m pdserve_bench.soak --form $(FORM) $(SOAK)

bench: install  ## measure the best single engine against the graph of CONFIG, into RESULTS (some 10 minutes)
	@mkdir -p $(RESULTS)
	@exec $(BIN)/pdserve compare -f $(CONFIG) --json $(RESULTS)/compare.json $(COMPARE)

test: lint  ## install what is missing, lint, type-check, and run the tests (what CI runs)
	@rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/pytest $(PARALLEL) $(TESTS) || { [ $$? -eq 1 ] && $(BIN)/python -m tools.failed_alone; }

lint: dev  ## ruff and mypy, strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: dev  ## build README and docs/ as a site into build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: dev  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: dev  ## resolve the locks of the engines and of the tools again
	requirements/lock.sh

release:  ## build wheel and sdist into dist/, check both, add SBOMs and checksums, and say what is left to do
	rm -rf build dist
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --disable-pip-version-check uv==0.13.8 packaging cyclonedx-bom==7.5.0
	build/release/bin/uv build --quiet
	for lock in cpu gpu; do build/release/bin/cyclonedx-py requirements pdserve/install/$$lock.txt \
	  --pyproject pyproject.toml --output-reproducible -o dist/pdserve-$$lock.cdx.json; done
	cd dist && sha256sum pdserve-* > SHA256SUMS
	@build/release/bin/python -m tools.release dist

wire: dev  ## after a release: keep its messages in tests/wire, which later versions have to understand
	@$(BIN)/python -m tools.wire

clean:  ## remove .venv, caches and build products
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
