# On a fresh machine, `make demo` and `make test` install everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test slow lint typecheck bench docs notebooks prior styles embedder clean

install: $(VENV)/installed

# uv installs in half of pip's time; pip does it where uv cannot. Compiled, because a shell may
# forbid Python to keep what it compiles, and every process would then compile torch again.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt uv && \
		$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
			--constraint constraints.txt --editable '.[dev]' || \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@$(BIN)/frostglass demo

# Without MKL_CBWR, MKL rounds differently for other memory alignments.
export MKL_CBWR ?= AUTO
OTHER_KERNELS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE

# The contracts run twice, the second time with other CPU kernels: they must pass on any machine.
# That of the package's text has no kernels.
# Those kernels are slow: of the tests that train networks to attack them only GMI's runs again, and
# none of those that train every pair of defenses.
EFFECT := tests/contracts/test_effect.py
AGAIN := $(filter-out $(EFFECT) tests/contracts/test_package.py,$(wildcard tests/contracts/*.py)) \
	'$(EFFECT)::test_an_attack_breaks_an_undefended_model[gmi]'

test: install lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
	@$(OTHER_KERNELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(AGAIN) -k 'not pair'

slow: install
	@$(BIN)/python -m pytest -m slow

lint: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: install
	@$(BIN)/mypy

bench: install
	@$(BIN)/python -m benchmarks

# The site is in build/site; open index.html, or serve that folder to have its search.
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo build/site/index.html

# The notebooks with their results, in build/notebooks; took ten minutes on one thread.
notebooks: install
	@for name in audit_your_model defend_and_compare protect_features; do \
		$(BIN)/python notebooks/run.py notebooks/$$name.ipynb || exit 1; done

prior: install
	@$(BIN)/python examples/remake_faces_prior.py faces32

styles: install
	@$(BIN)/python examples/remake_faces_prior.py styles32

embedder: install
	@$(BIN)/python examples/remake_faces_embedder.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
