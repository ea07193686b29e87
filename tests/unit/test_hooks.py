"""Outputs of layers, with what comes after them left out."""

import torch
from torch import nn

from frostglass.runtime.hooks import capture, output_of


class Counted(nn.Identity):
    calls = 0

    def forward(self, images):
        self.calls += 1
        return super().forward(images)


def test_an_output_is_that_of_a_whole_pass_and_nothing_follows_it():
    torch.manual_seed(0)
    last = Counted()
    network = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), last)
    network[0].register_forward_hook(lambda _, args, output: 2 * output)  # as a pruner does
    images = torch.rand(2, 3, 8, 8)
    with capture(network, ("0",)) as seen:
        network(images)
    assert torch.equal(output_of(network, "0", images), seen["0"])
    assert last.calls == 1
    network(images)  # whole again
    assert last.calls == 2
    output_of(network, "0", images).sum().backward()
    assert network[0][0].weight.grad is not None
