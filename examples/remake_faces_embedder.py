"""Train the shipped face embedder `faces32` again: about 40 minutes on one core.

A stopped training resumes. Writes src/frostglass/evaluators/weights/faces32.safetensors (half
precision) and prints how well it verifies people that it was not trained on.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import experiments
from frostglass.auditing.networks import evaluator
from frostglass.auditing.steps import SPLIT
from frostglass.cli.progress import Bars
from frostglass.evaluators.embedder import SHIPPED_WEIGHTS
from frostglass.evaluators.verifier import enrol
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store

ROOT = Path(__file__).parents[1]


def main() -> None:
    torch.set_num_threads(1)  # the last bits of the result depend on the number of threads
    [(_, exp)] = experiments(read_config(ROOT / "configs" / "faces" / "embedder.toml"))
    with Bars() as bars:
        store = Store(".frostglass", listener=bars)
        files = fingerprint(exp.data)
        split = store.step(SPLIT, exp.data, fractions=exp.split, files=files, seed=exp.seed)
        network = evaluator(store, exp.evaluators[-1], split, seed=exp.seed)
    body = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in network.module.state_dict().items()
        if not name.startswith(f"{network.head}.")
    }
    SHIPPED_WEIGHTS.parent.mkdir(exist_ok=True)
    save_file(body, SHIPPED_WEIGHTS)
    for name, value in enrol(network, split).facts().items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
