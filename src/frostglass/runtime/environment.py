"""Environment variables that choose CPU kernels, and the kernels in use.

MKL reads its variables when torch is loaded, so this module does not import torch at the top.
"""

import os
from collections.abc import MutableMapping

OPTIONAL = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def set_kernel_defaults(environ: MutableMapping[str, str]) -> None:
    """Make MKL round alike for every memory alignment, unless MKL_CBWR is already set."""
    environ.setdefault("MKL_CBWR", "AUTO")


def kernels() -> dict[str, str]:
    """Describe the CPU kernels in use: results may differ in their last bits between kernels."""
    import torch

    available = {True: "available", False: "missing"}
    return {
        "MKL_CBWR": os.environ.get("MKL_CBWR", "unset"),
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability(),
        **{name: os.environ[name] for name in OPTIONAL if name in os.environ},
        "mkl": available[torch.backends.mkl.is_available()],
        "mkldnn": available[torch.backends.mkldnn.is_available()],
        "threads": str(torch.get_num_threads()),
    }
