"""`make bench`: print each ratio with its limit."""

import torch

from benchmarks import (
    attack_step,
    bido_step,
    copies,
    crafter,
    faces_rate,
    memory,
    official_style,
    scale,
    training_step,
)

BENCHMARKS = (
    attack_step,
    official_style,
    training_step,
    bido_step,
    crafter,
    faces_rate,
    copies,
    memory,
    scale,
)


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for benchmark in BENCHMARKS:
        for line in benchmark.measure():
            print(line, flush=True)


if __name__ == "__main__":
    main()
