"""The default device, and the device of a module."""

import torch
from torch import nn

from frostglass.runtime.device import default_device, device_of


def test_the_environment_variable_is_the_default(monkeypatch):
    monkeypatch.setenv("FROSTGLASS_DEVICE", "meta")
    assert default_device() == torch.device("meta")
    monkeypatch.setenv("FROSTGLASS_DEVICE", "")
    assert default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_module_without_weights_is_on_the_cpu():
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of(nn.Flatten()) == torch.device("cpu")
