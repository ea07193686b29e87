"""The environment variables that choose CPU kernels, and the description of the kernels in use."""

import os
import subprocess
import sys

import pytest
import torch

from frostglass.runtime.environment import kernels, set_kernel_defaults


def test_the_default_is_set_in_the_mapping_alone():
    before = dict(os.environ)
    environ = {"OTHER": "1"}
    set_kernel_defaults(environ)
    assert environ == {"OTHER": "1", "MKL_CBWR": "AUTO"}
    assert dict(os.environ) == before


@pytest.mark.parametrize("value", ["COMPATIBLE", ""])
def test_the_users_choice_is_kept(value):
    environ = {"MKL_CBWR": value}
    set_kernel_defaults(environ)
    assert environ == {"MKL_CBWR": value}


def test_the_kernels_in_use_are_described(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("MKL_ENABLE_INSTRUCTIONS", raising=False)
    description = kernels()
    assert description["MKL_CBWR"] == description["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert description["ATEN_CPU_CAPABILITY"] == torch.backends.cpu.get_cpu_capability()
    assert description["threads"] == str(torch.get_num_threads())
    assert {description["mkl"], description["mkldnn"]} <= {"available", "missing"}
    assert "MKL_ENABLE_INSTRUCTIONS" not in description
    monkeypatch.delenv("MKL_CBWR")
    assert kernels()["MKL_CBWR"] == "unset"


def test_the_module_does_not_import_torch():
    code = "import sys, frostglass.runtime.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
