"""Tests run torch on one thread: they share the machine, and results depend on the thread count."""

import signal

import pytest
import torch

# A shell ignores the interrupt key in its background jobs, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
