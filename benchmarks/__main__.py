"""`make bench`: print one table, each figure with its goal, and fail if a goal is missed.

Names of benchmarks as arguments run these alone: `python -m benchmarks people attack_step`.
"""

import importlib
import sys
from collections.abc import Sequence

import torch

from benchmarks.measured import HEADER

BENCHMARKS = (
    "attack_step",
    "official_style",
    "early_stopping",
    "people",
    "training_step",
    "bido_step",
    "crafter",
    "faces_rate",
    "feature_sets",
    "copies",
    "memory",
    "scale",
    "workers",
    "human_study",
)


def main(names: Sequence[str]) -> int:
    """Run benchmarks; return 1 if a goal was missed."""
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n\n{HEADER}")
    missed = []
    for name in names or BENCHMARKS:
        for measured in importlib.import_module(f"benchmarks.{name}").measure():
            print(measured.line, flush=True)
            missed += [measured.name] if measured.missed else []
    if missed:
        print(f"\n{len(missed)} missed: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
