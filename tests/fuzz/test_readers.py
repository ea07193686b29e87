"""Every reader of a user's files, fuzzed: a little in `make test`, long in `make slow`.

`FROSTGLASS_FUZZ=5000 make slow` runs more cases. A failure names its case, which is always the
same: call its target with `random.Random("NAME NUMBER")`.
"""

import pytest

from fuzz_targets import TARGETS
from fuzzing import LITTLE, LONG, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_a_little(name, tmp_path):
    fuzz(name, LITTLE, TARGETS[name](tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_long(name, tmp_path):
    read = fuzz(name, LONG, TARGETS[name](tmp_path), tmp_path)
    print(f"{name}: {LONG} cases, {read} read, {LONG - read} refused in one line")
    assert 0 < read < LONG  # neither does everything pass, nor is everything refused
