# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test slow lint typecheck bench prior styles clean

install: $(VENV)/installed

# uv when it is there (under a minute), plain pip otherwise (a few minutes).
$(VENV)/installed: pyproject.toml constraints.txt
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
		uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; \
	else \
		$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'; \
	fi
	@touch $@

demo: install
	@$(BIN)/frostglass demo

test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

slow: install
	@$(BIN)/python -m pytest -m slow

lint: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: install
	@$(BIN)/mypy

bench: install
	@$(BIN)/python -m benchmarks

prior: install
	@$(BIN)/python examples/remake_faces_prior.py faces32

styles: install
	@$(BIN)/python examples/remake_faces_prior.py styles32

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
