# Two commands are the whole set-up on a fresh machine: `make demo` and `make test`. Both create what they need.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH"
REQUIREMENTS := requirements/cpu.txt requirements/sglang-cpu.txt requirements/dev.txt
SOURCES := $(wildcard csrc/cpu/*.cpp csrc/include/*.h) setup.py
LIBRARY := gyre_megatron/.built
TORCHRUN := torchrun --nproc-per-node 2 launch/train_gyre.py --config configs/demo_cpu.yaml

.PHONY: setup build demo demo-control test test-slow clients check check-cuda bench dist clean

setup: $(STAMP) $(LIBRARY)  ## install everything into .venv and build the extension

# SGLang's wheel pins a CUDA stack, so it is installed without its dependencies; what a CPU server imports is in cpu.txt.
$(STAMP): $(REQUIREMENTS)
	@echo "setup: creating $(VENV) with torch, Megatron-Core, SGLang and the tools (about 5 minutes, 3 GB)"
	@start=$$(date +%s) && $(PYTHON) -m venv $(VENV) \
	&& $(BIN)/pip install -q --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt \
	&& $(BIN)/pip install -q --disable-pip-version-check --no-deps -r requirements/sglang-cpu.txt \
	&& GYRE_NATIVE=1 $(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . \
	&& touch $(STAMP) $(LIBRARY) && echo "setup: done in $$(( $$(date +%s) - start )) s"

build: $(STAMP) $(LIBRARY)  ## compile csrc/ into gyre_megatron/_C

$(LIBRARY): $(STAMP) $(SOURCES)
	@echo "build: compiling csrc/ (about a minute)"
	@$(RUN) GYRE_NATIVE=1 $(BIN)/python setup.py -q build_ext --inplace > build.log 2>&1 || { cat build.log; exit 1; }
	@touch $(LIBRARY)

demo: setup  ## the main job on two CPU cores: learns, shows role switches, prints a summary line last
	@rm -rf runs/demo
	$(RUN) $(TORCHRUN)
	@$(RUN) python -m gyre_megatron report runs/demo --label demo --expect rise

demo-control: setup  ## the same with a learning rate of 0: nothing is learnt
	@rm -rf runs/demo-control
	$(RUN) $(TORCHRUN) --set run.name=demo-control --set training.optimizer.lr=0
	@$(RUN) python -m gyre_megatron report runs/demo-control --label demo-control --expect flat

test: setup check clients  ## checks, unit tests, multi-rank tests and end-to-end tests, but for the slow ones
	$(RUN) python -m pytest -m "not slow $(WITHOUT_CLIENTS)" -n 2 --dist loadfile $(ONE_CORE)
	$(RUN) python -m pytest -m "not slow $(WITHOUT_CLIENTS)" tests/dist tests/e2e tests/gpu $(addprefix --ignore ,$(filter %.py,$(ONE_CORE)))

test-slow: setup  ## the rest: the widest matrices and the longest loads
	$(RUN) python -m pytest -m slow

# What keeps one core busy runs two files at a time; the longest file first.
ONE_CORE := tests/e2e/test_bad_input.py tests/unit

# Real harnesses (Claude Code, Codex, mini-swe-agent) come from npm and PyPI; without npm their tests are left out.
NPM := $(shell command -v npm)
WITHOUT_CLIENTS := $(if $(NPM),,and not clients)
clients:
ifdef NPM
	@PYTHON=$(PYTHON) bash tests/e2e/install_clients.sh
else
	@echo "test: npm was not found, so the tests of real harness clients are left out (apt-get install nodejs npm)"
endif

check: setup  ## lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports

check-cuda: setup  ## compile every .cu for sm_80, sm_90a and sm_100a
	$(RUN) python csrc/check_cuda.py

bench: setup  ## every benchmark; results go to benchmarks/results
	@for bench in benchmarks/bench_*.py; do \
	  $(RUN) python $$bench --json benchmarks/results/$$(basename $$bench .py).json || exit 1; done

# Without isolation: the wheel's native extension must be compiled against the torch that it will run with.
dist: setup  ## wheel and source distribution, in dist/
	@rm -rf dist
	$(RUN) python -m build --no-isolation --outdir dist . > build.log 2>&1 || { tail -40 build.log; exit 1; }
	@ls -sh dist

clean:
	rm -rf build dist runs $(VENV) gyre_megatron/*.so $(LIBRARY) build.log
