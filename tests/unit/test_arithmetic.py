"""Numbers too small to be normal count as 0 where that saves time, and nowhere else."""

import pytest
import torch

from frostglass.runtime.arithmetic import DENORMAL, denormals_flushed

pytestmark = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this CPU cannot flush them"
)


def halved() -> float:
    return torch.full((4,), DENORMAL).mul(0.5).max().item()


def test_they_are_zero_inside_the_block():
    assert halved() > 0
    with denormals_flushed():
        assert halved() == 0
        assert torch.full((1,), 1e-37).mul(0.5).item() > 0
    assert halved() > 0


def test_an_error_ends_it_too():
    with pytest.raises(ZeroDivisionError), denormals_flushed():
        raise ZeroDivisionError
    assert halved() > 0


def test_blocks_nest():
    with denormals_flushed():
        with denormals_flushed():
            pass
        assert halved() == 0
    assert halved() > 0
