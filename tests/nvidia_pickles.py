"""Pickles as NVIDIA's StyleGAN2 code writes them, for tests."""

import pickle
import sys
from collections import OrderedDict
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from frostglass.core.errors import CheckpointError
from frostglass.networks.stylegan2.nvidia import read_stylegan2

TAPS = torch.tensor([1.0, 3.0, 3.0, 1.0])
FILTER = torch.outer(TAPS, TAPS) / 64
PROTOCOLS = [3, 4, 5]  # Python 3.7, which NVIDIA used, up to today


# A pickle as NVIDIA's code writes it: a network is a call of torch_utils.persistence with its
# source code and its attributes.


def _reconstruct_persistent_obj(meta):
    raise AssertionError("this must not be called")


class EasyDict(dict):
    __module__ = "dnnlib.util"


_reconstruct_persistent_obj.__module__ = "torch_utils.persistence"


class Fake:
    """A module of NVIDIA's, as its pickle sees it."""

    def __init__(self, kind, *, parameters=(), buffers=(), modules=(), source="", **attributes):
        self.kind, self.source = kind, source
        self.state = {
            "training": False,
            "_parameters": OrderedDict(
                (name, nn.Parameter(value, requires_grad=False))
                for name, value in dict(parameters).items()
            ),
            "_buffers": OrderedDict(buffers),
            "_non_persistent_buffers_set": set(),
            "_backward_hooks": OrderedDict(),
            "_is_full_backward_hook": None,
            "_forward_hooks": OrderedDict(),
            "_modules": OrderedDict(modules),
            "_init_args": (),
            "_init_kwargs": EasyDict(w_dim=4, nested=[1, 2.5, "x", None, True, -70000, 2**40]),
            **attributes,
        }

    def __reduce__(self):
        meta = {
            "type": "class",
            "version": 6,
            "module_src": self.source,
            "class_name": self.kind,
            "state": self.state,
        }
        return _reconstruct_persistent_obj, (meta,), None

    def part(self, path):
        """The module of that dotted name."""
        part = self
        for name in path.split("."):
            part = part.state["_modules"][name]
        return part


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    """Modules of NVIDIA's names for as long as a test runs, so that pickle writes those names."""
    for thing in (_reconstruct_persistent_obj, EasyDict):
        home = ModuleType(thing.__module__)
        setattr(home, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, thing.__module__, home)
        monkeypatch.setitem(sys.modules, thing.__module__.partition(".")[0], ModuleType("package"))


class Weights:
    """Draws tensors and keeps them by our names."""

    def __init__(self):
        self.rng, self.ours = torch.Generator().manual_seed(0), {}

    def __call__(self, name, *shape):
        self.ours[name] = torch.randn(shape, generator=self.rng)
        return self.ours[name]


def dense(draw, ours, inputs, outputs, *, activation="linear", rate=1):
    return Fake(
        "FullyConnectedLayer",
        parameters={
            "weight": draw(f"{ours}.weight", outputs, inputs),
            "bias": draw(f"{ours}.bias", outputs),
        },
        activation=activation,
        weight_gain=rate / np.sqrt(inputs),
        bias_gain=rate,
    )


def conv(draw, ours, inputs, outputs, size, w_dim, clamp):
    return Fake(
        "SynthesisLayer",
        parameters={
            "weight": draw(f"{ours}.weight", outputs, inputs, 3, 3),
            "noise_strength": draw(f"{ours}.noise_strength"),
            "bias": draw(f"{ours}.bias", outputs),
        },
        buffers={
            "resample_filter": FILTER.clone(),
            "noise_const": draw(f"{ours}.noise_const", size, size),
        },
        modules={"affine": dense(draw, f"{ours}.affine", w_dim, inputs)},
        activation="lrelu",
        conv_clamp=clamp,
        act_gain=np.sqrt(2),
    )


def official(
    resolution=16, colours=3, z_dim=5, w_dim=4, layers=2, base=64, most=7, clamp=256, source=""
):
    """A generator of the official layout, and its tensors by our names."""
    draw = Weights()
    widths = {
        size: min(base // size, most)
        for size in (2**power for power in range(2, 11))
        if size <= resolution
    }
    blocks = {}
    for number, (size, width) in enumerate(widths.items()):
        ours = f"synthesis.blocks.{number}"
        modules = (
            {"conv0": conv(draw, f"{ours}.conv0", widths[size // 2], width, size, w_dim, clamp)}
            if number
            else {}
        )
        modules["conv1"] = conv(draw, f"{ours}.conv1", width, width, size, w_dim, clamp)
        modules["torgb"] = Fake(
            "ToRGBLayer",
            parameters={
                "weight": draw(f"{ours}.torgb.weight", colours, width, 1, 1),
                "bias": draw(f"{ours}.torgb.bias", colours),
            },
            modules={"affine": dense(draw, f"{ours}.torgb.affine", w_dim, width)},
            conv_clamp=clamp,
            weight_gain=1 / np.sqrt(width),
        )
        constant = {} if number else {"const": draw("synthesis.const", width, 4, 4)}
        blocks[f"b{size}"] = Fake(
            "SynthesisBlock",
            parameters=constant,
            buffers={"resample_filter": FILTER.clone()},
            modules=modules,
            architecture="skip",
        )
    fcs = {
        f"fc{i}": dense(
            draw, f"mapping.layers.{i}", w_dim if i else z_dim, w_dim, activation="lrelu", rate=0.01
        )
        for i in range(layers)
    }
    mapping = Fake(
        "MappingNetwork",
        buffers={"w_avg": draw("mapping.w_avg", w_dim)},
        modules=fcs,
        num_ws=2 * len(widths),
    )
    synthesis = Fake("SynthesisNetwork", modules=blocks, block_resolutions=list(widths))
    return Fake(
        "Generator",
        modules={"synthesis": synthesis, "mapping": mapping},
        source=source,
        img_resolution=resolution,
    ), draw.ours


def snapshot(generator, **more):
    """What a training run of NVIDIA's saves."""
    other = Fake(
        "Discriminator",
        parameters={"weight": torch.ones(2)},
        buffers={"resample_filter": FILTER, "Hz": torch.zeros(2, dtype=torch.float64)},
    )
    return {
        "G": other,
        "D": other,
        "G_ema": generator,
        "augment_pipe": None,
        "training_set_kwargs": EasyDict(path="x.zip", max_size=np.int64(3)),
        **more,
    }


def written(folder, content, protocol=4, name="net.pkl"):
    path = folder / name
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def refused(path, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_stylegan2(path)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
