# Every target works from nothing but python3 (3.11 or newer, with venv): the first one asked for makes .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: train test slow check docs gpu-dry-run clients bench bench-full bench-growth bench-tiers bench-checkpoint peer-tests clean

train: $(STAMP)  ## train a GPT on real text with ZeRO-3 on two processes
	@$(BIN)/deepseek-zero run --nproc 2 examples/pretrain_text.py

test: $(STAMP)  ## run all tests except the slow ones; what failed runs once more, alone
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test

slow: $(STAMP)  ## the tests that do not fit into `make test`
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test -m slow

check: $(STAMP)  ## style, types, layers, exported names, spelling
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

docs: .venv/.installed-docs  ## the documentation site, in build/site: at most a minute; opens with build/site/index.html
	@$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c docs -d build/doctrees . build/site
	@echo "wrote build/site/index.html"

.venv/.installed-docs: $(STAMP)
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]' && touch $@

gpu-dry-run: $(STAMP)  ## scripts/gpu with tiny models on the CPU: at most two minutes
	@$(BIN)/python scripts/gpu --dry-run --seconds 300

clients: $(STAMP)  ## every client of DeepSpeed's, unmodified: half an hour on two cores
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[clients,optimizers]'
	@PATH="$(CURDIR)/$(BIN):$$PATH" DEEPSEEK_ZERO_ALL_CLIENTS=1 DEEPSEEK_ZERO_TESTS_MUST_RUN=1 scripts/test tests/clients

peer-tests: $(STAMP)  ## DeepSpeed's own tests behind our drop-in: make peer-tests ARCHIVE=tests.tar.xz [ONLY=regex]
	@$(PYTHON) -m venv .venv/peer
	@.venv/peer/bin/python -m pip install -q -e . 'pytest<8.4' parameterized tensorboard transformers accelerate peft einops
	@.venv/peer/bin/python scripts/peer_tests "$(ARCHIVE)" "$(ONLY)"

bench: $(STAMP)  ## this library, its peers and the floor side by side on two CPU ranks: GPT-125M, 20 minutes
	@$(BIN)/python -m benchmarks.bench --budget-minutes 20

bench-full: $(STAMP)  ## every model, number format and accumulation, three rounds; goes on where it stopped
	@$(BIN)/python -m benchmarks.bench --cells full --rounds 3

bench-growth: $(STAMP)  ## a step over the floor at 2 to 4 ranks, the cost of a unit at 8 to 96 units
	@$(BIN)/python -m benchmarks.growth

bench-tiers: $(STAMP)  ## states on the host and on a disk against the floor, the disk's own speed and the schedule's bound
	@OMP_NUM_THREADS=1 $(BIN)/deepseek-zero run --nproc 2 benchmarks/tiers.py

bench-checkpoint: $(STAMP)  ## what saves and loads cost: GPT-350M, two ranks
	@OMP_NUM_THREADS=1 $(BIN)/deepseek-zero run --nproc 2 benchmarks/checkpoint.py

clean:
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(STAMP): pyproject.toml constraints.txt scripts/install
	@PYTHON="$(PYTHON)" scripts/install && touch $@
