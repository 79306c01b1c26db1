# Every target does its own set-up: on a fresh machine `make demo` and `make test` are enough.
#   PYTHON  the interpreter that .venv is made from             make test PYTHON=python3.12
#   TORCH   another torch than the one in constraints.txt       make test TORCH="torch==2.14.1"
#   JOBS    test processes                                      make test JOBS=4
#   ARGS    more arguments for pytest                           make test ARGS="-k wheel"

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check format wheel clean

help: ## what there is
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'
	@sed -n 's/^#  /  /p' Makefile

demo: export OMP_NUM_THREADS = 1
demo: $(STAMP) ## learn handwritten digits class by class, with replay and without
	@$(BIN)/python examples/demo.py

test: export OMP_NUM_THREADS = 1
test: check ## all checks and all tests
	@$(BIN)/python -m pytest -q -n $(JOBS) $(ARGS)

check: $(STAMP) ## style, types and the direction of imports
	@$(BIN)/ruff check --quiet --no-cache --output-format concise || { echo "make format mends some of this"; exit 1; }
	@$(BIN)/ruff format --check --quiet > .venv/format.log || { cat .venv/format.log; echo "make format mends this"; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo > .venv/imports.log || { cat .venv/imports.log; exit 1; }
	@echo "style, types and imports: fine"

format: $(STAMP) ## rewrite the code in the project's style
	@$(BIN)/ruff check --quiet --no-cache --fix --exit-zero > .venv/format.log
	@$(BIN)/ruff format --quiet

wheel: $(STAMP) ## dist/retain-*.whl
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist > .venv/wheel.log 2>&1 || { cat .venv/wheel.log; exit 1; }
	@ls dist/*.whl

clean: ## remove everything that can be made again; runs stay
	@rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

# Written only when it changes, so that another TORCH installs again and the same one does not.
.venv/torch: FORCE
	@test -x $(BIN)/python || { \
	  $(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"retain needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")' \
	  && $(PYTHON) -m venv .venv; }
	@test "$$(cat $@ 2>/dev/null)" = '$(TORCH)' || echo '$(TORCH)' > $@
.PHONY: FORCE

$(STAMP): pyproject.toml constraints.txt .venv/torch
	@echo "installing retain and $(TORCH) into .venv: minutes the first time"
	@{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } > .venv/constraints.txt
	@PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
	  $(BIN)/python -m pip install -qq --constraint .venv/constraints.txt --editable '.[dev]'
	@touch $@
