"""Tests run torch on one thread: they share the machine, and results depend on the thread count."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
