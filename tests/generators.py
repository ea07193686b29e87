"""A small generator for tests, as a module, as ONNX and as TorchScript."""

import sys
import warnings

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from frostglass.priors.generator import Generator
from frostglass.runtime.seeding import seeded
from worlds import images

Z = 6
NORMALS = torch.randn(5, Z, generator=torch.Generator().manual_seed(1))
PUBLIC = images(20, 5, names="stranger")


class Dcgan(nn.Module):
    """Latents (N, 6, 1, 1) to images of 16 pixels in [-1, 1], with batch norm statistics."""

    def __init__(self, colours=3, seed=0):
        super().__init__()
        with seeded(seed, "tests", "dcgan"):
            self.layers = nn.Sequential(
                nn.ConvTranspose2d(Z, 8, 4),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.ConvTranspose2d(8, colours, 4, 4),
                nn.Tanh(),
            )
            for layer in (self.layers[0], self.layers[3]):
                nn.init.normal_(layer.weight, std=0.6)
            nn.init.uniform_(self.layers[1].running_mean, -0.2, 0.2)
            nn.init.uniform_(self.layers[1].running_var, 0.5, 2)

    def forward(self, latents):
        return self.layers(latents)


def onnx_model(net, opset=17, first="latent", batch="n", nodes=()):
    """The graph of a Dcgan, written by hand."""
    up, norm, _, out, _ = net.layers
    weights = {
        "w1": up.weight,
        "b1": up.bias,
        "scale": norm.weight,
        "shift": norm.bias,
        "mean": norm.running_mean,
        "var": norm.running_var,
        "w2": out.weight,
        "b2": out.bias,
    }
    graph = helper.make_graph(
        [
            *nodes,
            helper.make_node("ConvTranspose", [first, "w1", "b1"], ["a"], name="first"),
            helper.make_node(
                "BatchNormalization",
                ["a", "scale", "shift", "mean", "var"],
                ["b"],
                epsilon=norm.eps,
            ),
            helper.make_node("Relu", ["b"], ["c"]),
            helper.make_node("ConvTranspose", ["c", "w2", "b2"], ["d"], strides=[4, 4]),
            helper.make_node("Tanh", ["d"], ["images"]),
        ],
        "dcgan",
        [helper.make_tensor_value_info("latent", TensorProto.FLOAT, [batch, Z, 1, 1])],
        [
            helper.make_tensor_value_info(
                "images", TensorProto.FLOAT, [batch, out.weight.shape[1], 16, 16]
            )
        ],
        [numpy_helper.from_array(value.detach().numpy(), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def traced(net, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(net.eval(), torch.zeros(2, Z, 1, 1)).save(path)


def generator_folder(folder, monkeypatch):
    """Fill the current folder with the same generator as ONNX and as TorchScript."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    onnx.save(onnx_model(Dcgan()), "gen.onnx")
    traced(Dcgan(), "gen.pt")
    yield folder
    sys.modules.pop("own_generator", None)


def code(text):
    """A module of the user's own, `own_generator`."""
    with open("own_generator.py", "w") as file:
        file.write(text)
    sys.modules.pop("own_generator", None)


def generator(source="onnx:gen.onnx", **more):
    given = {"source": source, "latent": f"normal:{Z}x1x1", "trust": True, **more}
    return Generator(**given)
