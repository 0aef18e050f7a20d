# Every target first creates the environment if it is missing; if it exists, that check takes 0.1 s.
# TORCH=cpu|cuda|auto chooses the torch build, PYTHON=python3.12 the interpreter.
PYTHON ?= python3
WORKERS ?= 2
# Tests of the fleet wait for their servers most of the time.
FLEET_WORKERS ?= 3
# Folders whose tests all belong to other stages (tests/conftest.py): `make test` does not collect them.
STAGE_IGNORES := $(addprefix --ignore=tests/,integration acceptance unit/jobs/fleet unit/jobs/hosts)
READY := @$(PYTHON) scripts/bootstrap.py
BIN := .venv/bin
TESTING := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TESTING) $(BIN)/python -m pytest
# `make gpu WHEELS=folder` asks no index: the wheels are unpacked beside the Python that is there, which brings its own torch. Its
# pytest-benchmark, which images often have, would refuse `-n`.
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_READY = $(if $(WHEELS),@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl,$(READY))
GPU_PYTHON = $(if $(WHEELS),PYTHONPATH=$(GPU_SITE):$(CURDIR) $(PYTHON),$(BIN)/python)
# Its heap has room for torch and transformers: at node's default of 4 GB pyright evicts its cache about forty times and parses them again.
PYRIGHT := NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright
SERVERS := export GROUPWISE_REAL_SERVERS=1 && $(BIN)/python scripts/real_servers.py
ENVIRONMENT := $(BIN)/python scripts/real_environment.py
# What `make soak` does before the tests of a suite.
NEEDS_agents := $(ENVIRONMENT) agents &&
NEEDS_attacks := $(SERVERS) &&
NEEDS_containers := $(SERVERS) containers &&
NEEDS_cookbook := $(ENVIRONMENT) cookbook &&
NEEDS_docs := $(SERVERS) && $(BIN)/groupwise fetch-tunix && $(ENVIRONMENT) agents && $(ENVIRONMENT) ray &&
NEEDS_fleet := $(SERVERS) &&
NEEDS_launch := $(SERVERS) && $(ENVIRONMENT) ray && $(ENVIRONMENT) dstack && $(ENVIRONMENT) skypilot &&
NEEDS_mutations := $(SERVERS) &&
NEEDS_skyrl := $(ENVIRONMENT) skyrl &&
NEEDS_tunix := $(BIN)/groupwise fetch-tunix &&
NEEDS_unsloth := $(ENVIRONMENT) unsloth &&
NEEDS_vllm := $(ENVIRONMENT) vllm && $(ENVIRONMENT) vllm-oldest &&
NEEDS_web := $(SERVERS) chromium &&
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV
.PHONY: help setup quickstart tour test test-runs test-server test-fleet test-launch test-notebook test-tunix test-vllm test-environments test-web check docs screenshots fix bench soak gpu gpu-bundle sbom audit clean

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\): ## /  make \1 \t/p' Makefile | expand -t 26
setup: ## make .venv with all that training, tests and checks need
	$(READY)
quickstart: ## train a real model on this machine and watch its reward rise
	$(READY) --profile train && $(BIN)/python examples/quickstart.py $(QUICKSTART_ARGS)
tour: ## train on each built-in task in turn, about an hour, and write one page of what was learnt (ARGS="--tasks math wordle --seeds 2")
	$(READY) && $(BIN)/python -m benchmarks.tour $(ARGS)
test: ## run the tests (ARGS="-k name" selects), except those of test-runs, test-server, test-fleet, test-launch, test-notebook, test-tunix, test-vllm, test-environments and test-web
	$(READY) && $(BIN)/python scripts/real_environment.py triton && $(PYTEST) -n $(WORKERS) --dist loadfile $(STAGE_IGNORES) -m "not fleet and not launch and not server and not tunix and not soak and not gpu" $(ARGS)
test-runs: ## run the tests of whole runs: commands that train, are killed, resume and learn
	$(READY) && $(PYTEST) -n $(WORKERS) --dist loadfile -m "runs and not soak and not gpu" $(ARGS) $(wildcard tests/integration/test_*.py) tests/acceptance
test-server: ## run the tests of the training server that start it, and kill it; programs of tinker-cookbook and of OpenAI's clients among them (made first: 2.1 GB)
	$(READY) && $(BIN)/python scripts/real_environment.py cookbook && $(BIN)/python scripts/real_environment.py agents && $(PYTEST) -n $(WORKERS) --dist loadfile -m "server and not soak and not gpu" $(ARGS) tests/integration tests/acceptance
test-fleet: ## run the tests of the fleet, with real PostgreSQL, NATS and sshd (installs them if it may)
	$(READY) && $(BIN)/python scripts/real_servers.py && GROUPWISE_REAL_SERVERS=1 $(PYTEST) -n $(FLEET_WORKERS) --dist loadfile -m "fleet and not soak and not gpu" $(ARGS) tests/integration/fleet tests/contract/test_host_contract.py tests/unit/jobs/fleet tests/unit/jobs/hosts tests/unit/cli/fleet/test_both_ways.py tests/acceptance/test_docs.py
test-launch: ## run the tests of places for jobs: this machine, and real sshd, Slurm (installs them if it may) and Ray (made first: 380 MB)
	$(READY) && $(BIN)/python scripts/real_servers.py && $(BIN)/python scripts/real_environment.py ray && GROUPWISE_REAL_SERVERS=1 $(PYTEST) -n $(WORKERS) --dist loadfile -m "launch and not soak and not gpu" $(ARGS) tests/integration/launch tests/contract/test_cloud_contract.py tests/unit/jobs/clouds
test-notebook: ## run the tests of notebooks, in real kernels
	$(READY) && $(PYTEST) -n $(WORKERS) --dist loadfile -m "notebook and not soak and not gpu" $(ARGS) tests/integration/notebook tests/acceptance/test_docs.py
test-tunix: ## run the tests of the backend tunix, in an environment of its own (made first: 1.5 GB, two minutes)
	$(READY) && $(BIN)/groupwise fetch-tunix && $(PYTEST) -n $(WORKERS) --dist loadfile -m "tunix and not soak and not gpu" $(ARGS) tests/integration/tunix tests/contract
test-vllm: ## run the tests with vLLM's real server, in its build for CPUs, in an environment of its own (made first: 3.1 GB, three minutes)
	$(READY) && $(ENVIRONMENT) vllm && $(PYTEST) -n 0 -m "vllm and not soak and not gpu" $(ARGS) tests/integration/real_vllm
test-environments: ## run the tests of environments of other libraries, each in a virtual environment of its own (made first: 1.3 GB, two minutes)
	$(READY) && $(BIN)/groupwise environments install examples/11_verifiers/fruits && $(BIN)/groupwise environments install examples/11_verifiers/sums_tool && $(BIN)/groupwise environments install textarena --kind textarena --name text-games && $(BIN)/groupwise environments install openenv --kind openenv && $(PYTEST) -n $(WORKERS) -m "environments and not soak and not gpu" $(ARGS) tests/integration/environments
test-web: ## run the tests of the dashboard in a real Chromium (installs it if it may)
	$(READY) && $(BIN)/python scripts/real_servers.py chromium && $(PYTEST) -n $(WORKERS) --dist loadfile -m "web and not soak and not gpu" $(ARGS) tests/integration/web
check: ## lint, format, types, layers, dependencies
	$(READY) && $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(PYRIGHT) && $(BIN)/lint-imports && $(BIN)/deptry .
docs: ## write the documentation as a site to build/site, which opens offline; every link is checked
	$(READY) && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
screenshots: ## take the pictures of the dashboard in the docs, of two runs that are trained first (ARGS="--fleet F --job J")
	$(READY) --profile train && $(BIN)/python scripts/real_servers.py chromium && $(BIN)/python scripts/screenshots.py $(ARGS)
fix: ## generate what is made from code, and fix what ruff can
	$(READY) && $(BIN)/python scripts/generate_sync_client.py && $(BIN)/python scripts/generate_configuration.py && $(BIN)/ruff check --fix . && $(BIN)/ruff format .
bench: ## measure steps beside TRL's, for 45 minutes (ARGS="--cell W1 --check"); SUITE=fleet: the fleet's figures, for 10; SUITE=web: how fast the dashboard answers; SUITE=growth: how the cost of a unit grows
	$(READY) && $(BIN)/python -m benchmarks.$(if $(filter fleet web growth,$(SUITE)),$(SUITE),against_trl) $(ARGS)
soak: ## run a suite of long tests (SUITE=name; CONTRIBUTING.md lists them with their times and variables)
	$(READY) && $(NEEDS_$(SUITE)) $(PYTEST) -m "soak(suite='$(SUITE)')" --timeout 7200 -o faulthandler_timeout=7300 $(ARGS)
gpu: ## run the tests that need a GPU (WHEELS=build/gpu: with the torch that PYTHON has, without an index)
	$(GPU_READY) && $(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch finds no GPU here$(if $(WHEELS),, (TORCH=cuda sets up the build for one)), so nothing was tested.")' && $(TESTING) $(GPU_PYTHON) -m pytest -p no:benchmark -m gpu $(ARGS) tests/gpu
gpu-bundle: ## collect in build/gpu what `make gpu` needs, besides torch, on a machine without an index (TARGET=3.12: its Python; VLLM=1: a vLLM too, four minutes)
	$(READY) && $(BIN)/python scripts/gpu_bundle.py --python $(or $(TARGET),3.12)$(if $(VLLM), && $(BIN)/python scripts/vllm_bundle.py --python $(or $(TARGET),3.12))
sbom: ## write sbom.json: every package in .venv with its release, licence and source, in CycloneDX's format
	$(READY) && $(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-file sbom.json .venv
audit: ## look up the known vulnerabilities of every release in constraints.txt (needs the internet)
	$(READY) && $(BIN)/uv tool run pip-audit==2.10.1 --requirement constraints.txt --require-hashes --disable-pip
clean: ## remove what can be made again; runs/ stays
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist; find . -name __pycache__ -prune -exec rm -rf {} +
