"""`make bench`: prints each ratio with its limit."""

import torch

from benchmarks import (
    attack_step,
    bido_step,
    crafter,
    faces_rate,
    memory,
    official_style,
    training_step,
)


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for benchmark in (
        attack_step,
        official_style,
        training_step,
        bido_step,
        crafter,
        faces_rate,
        memory,
    ):
        for line in benchmark.measure():
            print(line)


if __name__ == "__main__":
    main()
