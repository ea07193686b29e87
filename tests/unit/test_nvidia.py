"""NVIDIA's pickles: those of the official layout are read to the last bit, hostile ones are refused and run nothing, and every misfit is named."""

import io
import json
import os
import pickle
import struct
import sys
import warnings
from collections import OrderedDict
from dataclasses import asdict
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from frostglass.cli.main import app
from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.networks.stylegan2 import pickle_reader as inert
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import (
    convert_stylegan2,
    load_generator,
    official_name,
    read_stylegan2,
)
from frostglass.store.files import write_tensors

TAPS = torch.tensor([1.0, 3.0, 3.0, 1.0])
FILTER = torch.outer(TAPS, TAPS) / 64
PROTOCOLS = [3, 4, 5]  # Python 3.7, which NVIDIA used, up to today


# A pickle as NVIDIA's code writes it: networks are a call of torch_utils.persistence with their source code and their attributes.


def _reconstruct_persistent_obj(meta):
    raise AssertionError("nobody should call this")


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
    """Draws tensors and remembers what was given out under which of our names."""

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


# Files as they should be


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_official_layout_is_read_to_the_last_bit(tmp_path, protocol):
    generator, ours = official()
    settings, tensors = read_stylegan2(written(tmp_path, snapshot(generator), protocol))
    assert settings == StyleSettings(
        resolution=16, z_dim=5, w_dim=4, layers=2, channel_base=64, channel_max=7, clamp=256
    )
    assert tensors.keys() == ours.keys()
    assert all(
        torch.equal(tensors[name], ours[name]) and tensors[name].dtype == torch.float32
        for name in ours
    )


@pytest.mark.parametrize(
    "given",
    [
        {"resolution": 8, "colours": 1, "layers": 1, "clamp": None},
        {"resolution": 32, "z_dim": 3, "w_dim": 9, "layers": 8, "base": 96, "most": 4},
        {"resolution": 64, "base": 64, "most": 1, "clamp": 12.5},
    ],
)
def test_sizes_come_from_the_shapes(tmp_path, given):
    generator, ours = official(**given)
    settings, tensors = read_stylegan2(written(tmp_path, snapshot(generator)))
    names = {"base": "channel_base", "most": "channel_max"}
    assert {names.get(name, name): value for name, value in given.items()}.items() <= asdict(
        settings
    ).items()
    assert tensors.keys() == StyleGenerator(settings).state_dict().keys() == ours.keys()


def test_source_code_in_the_file_is_not_run(tmp_path):
    sentinel = tmp_path / "ran"
    generator, _ = official(source=f"open({str(sentinel)!r}, 'w')")
    read_stylegan2(written(tmp_path, snapshot(generator)))
    assert not sentinel.exists()


def test_half_precision_and_strided_tensors_are_widened_and_laid_out(tmp_path):
    generator, ours = official()
    held = generator.part("synthesis.b16.conv1").state["_parameters"]
    held["weight"] = nn.Parameter(held["weight"].data.contiguous(memory_format=torch.channels_last))
    held["bias"] = nn.Parameter(torch.arange(100, dtype=torch.float16)[10:18:2])
    _, tensors = read_stylegan2(written(tmp_path, snapshot(generator)))
    assert torch.equal(
        tensors["synthesis.blocks.2.conv1.weight"], ours["synthesis.blocks.2.conv1.weight"]
    )
    assert tensors["synthesis.blocks.2.conv1.weight"].is_contiguous()
    assert tensors["synthesis.blocks.2.conv1.bias"].tolist() == [10, 12, 14, 16]


def test_names():
    settings = StyleSettings(resolution=1024)
    assert official_name("synthesis.const", settings) == "synthesis.b4.const"
    assert (
        official_name("synthesis.blocks.0.conv1.noise_const", settings)
        == "synthesis.b4.conv1.noise_const"
    )
    assert (
        official_name("synthesis.blocks.8.torgb.affine.bias", settings)
        == "synthesis.b1024.torgb.affine.bias"
    )
    assert official_name("mapping.layers.7.weight", settings) == "mapping.fc7.weight"
    assert official_name("mapping.w_avg", settings) == "mapping.w_avg"


# Converting and loading


def test_convert_and_load(tmp_path):
    generator, ours = official()
    out = tmp_path / "net.safetensors"
    made = convert_stylegan2(written(tmp_path, snapshot(generator)), out)
    again = load_generator(out)
    assert not again.training
    assert again.settings == made.settings
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        name: value.tolist() for name, value in ours.items()
    }
    z = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(made(z), again(z))
    first = out.read_bytes()
    convert_stylegan2(tmp_path / "net.pkl", out, force=True)
    assert out.read_bytes() == first


def test_an_existing_file_is_kept_without_force(tmp_path):
    out = tmp_path / "net.safetensors"
    out.write_text("precious")
    source = written(tmp_path, snapshot(official()[0]))
    with pytest.raises(
        ConfigError,
        match=r"net\.safetensors exists already: give another name, or --force to replace it",
    ):
        convert_stylegan2(source, out)
    assert out.read_text() == "precious"
    written(tmp_path, {}, name="bad.pkl")
    with pytest.raises(CheckpointError):
        convert_stylegan2(tmp_path / "bad.pkl", out, force=True)
    assert out.read_text() == "precious"
    with pytest.raises(ConfigError, match=r"cannot write x\.safetensors: there is no folder"):
        convert_stylegan2(source, tmp_path / "nowhere" / "x.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"cannot write .*folder \(Is a directory\): give the name of a file in a folder of your own",
    ):
        convert_stylegan2(source, tmp_path / "folder", force=True)


def test_a_converted_file_is_loaded_strictly(tmp_path):
    out = tmp_path / "net.safetensors"
    convert_stylegan2(written(tmp_path, snapshot(official()[0])), out)
    tensors, settings = load_file(out), {"stylegan2": asdict(load_generator(out).settings)}
    write_tensors(
        tmp_path / "less.safetensors",
        {name: value for name, value in tensors.items() if name != "mapping.w_avg"},
        settings,
    )
    with pytest.raises(
        CheckpointError,
        match=r"less.safetensors does not fit StyleGenerator: 1 missing \(mapping.w_avg\)",
    ):
        load_generator(tmp_path / "less.safetensors")
    write_tensors(tmp_path / "more.safetensors", tensors | {"extra": torch.ones(1)}, settings)
    with pytest.raises(CheckpointError, match=r"1 unexpected \(extra\)"):
        load_generator(tmp_path / "more.safetensors")
    for name, values in {
        "none": {},
        "other": {"wgan": {}},
        "odd": {"stylegan2": {"resolution": 17}},
        "unknown": {"stylegan2": {"x": 1}},
    }.items():
        write_tensors(tmp_path / name, tensors, values)
        with pytest.raises(
            CheckpointError,
            match=f"{name} does not say how its StyleGAN2 is made: convert it again",
        ):
            load_generator(tmp_path / name)
    save_file(tensors, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="plain does not say how its StyleGAN2 is made"):
        load_generator(tmp_path / "plain")
    (tmp_path / "cut").write_bytes(out.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="cut is not a readable safetensors file"):
        load_generator(tmp_path / "cut")
    with pytest.raises(
        CheckpointError, match=r"no file at '.*gone': make one with frostglass convert stylegan2"
    ):
        load_generator(tmp_path / "gone")


def test_the_command(tmp_path):
    def frostglass(*args):
        return CliRunner().invoke(app, ["convert", *map(str, args)], catch_exceptions=False)

    source, out = written(tmp_path, snapshot(official()[0])), tmp_path / "net.safetensors"
    done = frostglass("stylegan2", source, out)
    parameters = sum(value.numel() for value in load_generator(out).parameters())
    assert (done.exit_code, done.stderr) == (0, "")
    assert (
        done.stdout
        == f"{out}: StyleGAN2, 3x16x16, z 5, w 4, 2 mapping layers, 6 styles, {parameters:,} parameters\n"
    )
    done = frostglass("stylegan2", source, out)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "exists already" in done.stderr
    done = frostglass("stylegan2", source, out, "--force", "--json")
    assert json.loads(done.stdout) == asdict(load_generator(out).settings) | {
        "parameters": parameters,
        "file": str(out),
    }
    for args, message in [
        (("stylegan2", tmp_path / "no.pkl", tmp_path / "x"), "no file at"),
        (
            ("stylegan3", source, tmp_path / "x"),
            "no conversion named 'stylegan3': did you mean 'stylegan2'?",
        ),
        (("stylegan2", out, tmp_path / "x"), "net.safetensors is damaged, cut short or no pickle"),
    ]:
        done = frostglass(*args)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "x").exists()


# Files that are something else


def changed(change):
    generator, _ = official()
    change(generator)
    return snapshot(generator)


def lose(generator):
    for layer in ("conv0", "conv1"):
        generator.part(f"synthesis.b8.{layer}").state["_parameters"].clear()


def lose_the_last(generator):
    generator.part("synthesis.b16.conv1").state["_parameters"].clear()


def gain(generator):
    generator.part("synthesis.b8").state["_buffers"]["more"] = torch.ones(1)


def reshape(generator):
    generator.part("synthesis.b8.conv0").state["_buffers"]["noise_const"] = torch.ones(4, 4)


def label(generator):
    generator.part("mapping").state["_modules"]["embed"] = Fake(
        "FullyConnectedLayer", parameters={"weight": torch.ones(2, 2)}
    )


def infinite(generator):
    generator.part("mapping").state["_buffers"]["w_avg"] = torch.tensor(
        [1.0, float("inf"), 0.0, 0.0]
    )


def sharp(generator):
    generator.part("synthesis.b8").state["_buffers"]["resample_filter"] = torch.ones(4, 4) / 16


def attribute(path, name, value):
    return lambda generator: generator.part(path).state.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lose,
            r"6 tensors missing \(synthesis.b8.conv0.weight, synthesis.b8.conv0.bias, synthesis.b8.conv0.noise_strength, \.\.\.\)",
        ),
        (lose_the_last, "synthesis.b16.conv1.weight is missing or no tensor of 1 axes"),
        (gain, r"1 tensors unexpected \(synthesis.b8.more\)"),
        (
            reshape,
            r"1 tensors of another shape \(synthesis.b8.conv0.noise_const \(4, 4\) for \(8, 8\)\)",
        ),
        (label, "its generator takes class labels, and only those without are supported"),
        (
            infinite,
            r"net.pkl cannot be used: 1 of its tensors hold NaN or infinity \(mapping.w_avg\)",
        ),
        (sharp, r"synthesis.b8.resample_filter is not the filter \[1, 3, 3, 1\]"),
        (
            attribute("mapping.fc1", "activation", "relu"),
            "mapping.fc1 has another activation than lrelu",
        ),
        (attribute("mapping.fc0", "bias_gain", 1), r"mapping.fc0 has another bias_gain than 0\.01"),
        (
            attribute("synthesis.b4.conv1", "conv_clamp", 128),
            r"synthesis.b4.conv1 has another conv_clamp than 256\.0",
        ),
        (
            attribute("synthesis.b4.torgb", "conv_clamp", None),
            r"synthesis.b4.torgb has another conv_clamp than 256\.0",
        ),
        (
            attribute("synthesis.b16.conv1", "conv_clamp", np.float64(256)),
            "conv_clamp of synthesis.b16.conv1 is a Opaque and no number",
        ),
        (
            attribute("synthesis.b16.conv1", "conv_clamp", -1),
            r"its sizes are none of a StyleGAN2 \(StyleSettings: clamp: expected more than",
        ),
        (
            attribute("synthesis.b8.conv1", "_modules", [1]),
            "_modules of a SynthesisLayer is no dict of names",
        ),
        (
            attribute("synthesis.b8.conv1", "_buffers", {"x": 3}),
            r"x in synthesis.b8.conv1 is no tensor",
        ),
    ],
)
def test_misfits_are_named(tmp_path, change, message):
    refused(written(tmp_path, changed(change)), message)


def stylegan3():
    layer = Fake(
        "SynthesisLayer",
        parameters={"weight": torch.ones(2, 2, 3, 3)},
        up_taps=np.ones(3),
        in_size=np.array([4, 4]),
    )
    start = Fake(
        "SynthesisInput", parameters={"weight": torch.ones(2, 2)}, buffers={"freqs": torch.ones(2)}
    )
    synthesis = Fake("SynthesisNetwork", modules={"input": start, "L0_36_512": layer})
    mapping = Fake(
        "MappingNetwork",
        modules={"fc0": Fake("FullyConnectedLayer", parameters={"weight": torch.ones(2, 2)})},
    )
    return snapshot(Fake("Generator", modules={"synthesis": synthesis, "mapping": mapping}))


def test_other_networks_are_recognised(tmp_path):
    refused(
        written(tmp_path, stylegan3()),
        "its generator has no synthesis.b4.const or no mapping.fc0.weight; it looks like StyleGAN3",
    )
    classifier = Fake("ResNet", parameters={"fc": torch.ones(2)})
    refused(
        written(tmp_path, snapshot(classifier)),
        "no synthesis.b4.const or no mapping.fc0.weight; its tensors are fc",
    )
    refused(
        written(tmp_path, nn.Linear(2, 2)),
        "it names torch.nn.modules.linear.Linear, which a StyleGAN2 does not need",
    )
    refused(
        written(tmp_path, {"G": 1, "D": 2}),
        "expected a dict with a network G_ema, found a dict of D, G",
    )
    refused(written(tmp_path, [1]), "expected a dict with a network G_ema, found a list")
    torch.save({"G_ema": torch.ones(2)}, tmp_path / "net.pkl")
    refused(
        tmp_path / "net.pkl",
        "net.pkl is not a StyleGAN2 that can be read: it is a file of torch.save, not a pickle",
    )
    (tmp_path / "net.pkl").write_bytes(b"\x80\x03cdnnlib.tflib.network\nNetwork\n.")
    refused(
        tmp_path / "net.pkl",
        "written by the TensorFlow version of StyleGAN: convert it with NVIDIA's own legacy.py first",
    )
    (tmp_path / "net.pkl").write_bytes(b"")
    refused(tmp_path / "net.pkl", "it is empty")
    refused(tmp_path / "gone.pkl", "no file at '.*gone.pkl': give the path of a StyleGAN2 pickle")
    refused(tmp_path, "no file at")


def test_damaged_files_are_refused_and_nothing_else_happens(tmp_path):
    whole = pickle.dumps(
        {"G_ema": official(resolution=8, z_dim=2, w_dim=2, layers=1, base=8, most=2)[0]}, 4
    )
    path = tmp_path / "net.pkl"
    for end in range(1, len(whole), 487):
        path.write_bytes(whole[:end])
        refused(path, "net.pkl is (damaged, cut short or no pickle|not a StyleGAN2)")
    rng, outcomes = np.random.default_rng(0), set()
    for _ in range(150):
        spoiled = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            spoiled[place] = rng.integers(256)
        path.write_bytes(spoiled)
        try:
            read_stylegan2(path)
            outcomes.add("read")  # a changed weight is still a weight
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


# Files that mean harm: each is a program that would leave a file behind if Python's own unpickler ran it, or would exhaust the machine.


class Evil:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def eval_code(sentinel):
    return b"c__builtin__\neval\n(X" + text(f"open({str(sentinel)!r}, 'w').close()") + b"tR"


def text(word):
    return struct.pack("<I", len(word.encode())) + word.encode()


def legacy(
    content=None, *, count=2, data=None, key="0", kind=b"ctorch\nFloatStorage\n", system=None
):
    """A storage as torch writes it into a pickle, or a variation on it."""
    claim = (
        b"\x80\x02(X"
        + text("storage")
        + kind
        + b"X"
        + text(key)
        + b"X"
        + text("cpu")
        + b"K\x02NtQ."
    )
    parts = [
        pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2), pickle.dumps({"little_endian": True} if system is None else system, 2),
        claim if content is None else content, pickle.dumps(["0"], 2), struct.pack("<q", count), bytes(8) if data is None else data,
    ]  # fmt: skip
    return b"".join(parts)


def storage(data):
    return b"ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(data)) + data + b"tR"


def tensor(data, shape=b"(K\x02t", stride=b"(K\x01t", offset=b"K\x00"):
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage(data)
        + offset
        + shape
        + stride
        + b"\x89}tR"
    )


def big(number):
    data = number.to_bytes(16, "little")
    return b"\x8a" + bytes([len(data)]) + data


NET = b"ctorch_utils.persistence\n_reconstruct_persistent_obj\n"


@pytest.mark.parametrize("protocol", [2, *PROTOCOLS])
@pytest.mark.parametrize("place", ["top", "beside", "state", "parameters", "modules", "gain"])
def test_code_is_refused_wherever_it_hides(tmp_path, protocol, place):
    sentinel = tmp_path / "ran"
    evil, (generator, _) = Evil(sentinel), official(resolution=8)
    content = snapshot(generator)
    if place == "top":
        content = evil
    elif place == "beside":
        content["augment_pipe"] = evil
    elif place == "state":
        generator.part("mapping.fc0").state["weight_gain"] = [1, {"deep": (evil,)}]
    else:
        generator.part("synthesis.b8").state[f"_{place}"] = {"x": evil}
    path = written(tmp_path, content, protocol)
    message = (
        "it names (posix|nt).system, which a StyleGAN2 does not need"
        if protocol > 2
        else "it names (posix.system|_codecs.encode)"
    )
    refused(path, message)
    assert not sentinel.exists()


def test_the_hostile_files_of_these_tests_would_do_harm(tmp_path):
    """Otherwise their refusal would prove nothing."""
    sentinel = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(sentinel), 4))  # noqa: S301
    assert sentinel.exists()
    sentinel.unlink()
    pickle.loads(b"\x80\x02" + eval_code(sentinel) + b".")  # noqa: S301
    assert sentinel.exists()


def hostile(sentinel):
    """Programs written by hand, and what is said of each."""
    code = eval_code(sentinel)
    evaluate = "it names __builtin__.eval"
    return {
        "eval": (code, evaluate),
        "eval named on the stack": (b"X" + text("builtins") + b"X" + text("eval") + b"\x93X" + text("1") + b"\x85R", "it names builtins.eval"),
        "a dotted way into an admitted module": (b"X" + text("torch") + b"X" + text("serialization.os.system") + b"\x93", "it names torch.serialization.os"),
        "an admitted name in two halves": (b"X" + text("collections.OrderedDict") + b"X" + text("__init__.__globals__") + b"\x93", "it names collections.Ord"),
        "names that are no words": (b"K\x01K\x02\x93", "it names something by other things than words"),
        "state of a dict": (b"ccollections\nOrderedDict\n)R}X" + text("__class__") + code + b"sb", evaluate),
        "__setstate__ of a dict": (b"ccollections\nOrderedDict\n)R}X" + text("__setstate__") + b"K\x01sb", "changes the attributes of a dict"),
        "attributes of an admitted class": (b"ccollections\nOrderedDict\nN}X" + text("update") + b"K\x01s\x86b", "changes the attributes of a Name"),
        "attributes of an admitted function": (NET + b"N}X" + text("__defaults__") + b")s\x86b", "changes the attributes of a Name"),
        "attributes of a network": (NET + b"(}tR", "a network in it lacks a class name or a state"),
        "a persistent id": (b"X" + text("x") + b"Q", "instruction BINPERSID"),
        "a persistent id in words": (b"Pos.system\n", "instruction PERSID"),
        "an extension code": (b"\x82\x01", "instruction EXT1"),
        "an instance": (b"(X" + text("touch") + b"ios\nsystem\n", "instruction INST"),
        "an object": (b"(ccollections\nOrderedDict\no", "instruction OBJ"),
        "keywords": (b"ccollections\nOrderedDict\n)}\x92", "instruction NEWOBJ_EX"),
        "a buffer from outside": (b"\x97", "instruction NEXT_BUFFER"),
        "calling a string": (b"X" + text("os") + b")R", "it calls a str"),
        "calling a tensor": (tensor(legacy()) + b")R", "it calls a Stored"),
        "calling without a tuple": (b"ccollections\nOrderedDict\n]R", "it calls a Name"),
        "a dict made from something": (b"ccollections\nOrderedDict\n(]tR", "it calls collections.OrderedDict with 1 arguments"),
        "code in a storage": (storage(legacy(b"\x80\x02" + code + b".")), evaluate),
        "code for a storage's kind": (storage(legacy(kind=code)), evaluate),
        "code in a storage's system": (storage(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"\x80\x02" + code + b"."), evaluate),
        "a storage in a storage": (storage(legacy(b"\x80\x02" + storage(legacy()) + b".")), "a storage in it holds something else than numbers"),
        "a storage that is a zip": (storage(b"PK\x03\x04" + bytes(100)), "damaged"),
        "a storage of text": (b"ctorch.storage\n_load_from_bytes\n(X" + text("x") + b"tR", "a storage in it holds something else than numbers"),
        "a storage of another system": (storage(legacy(system={"little_endian": False})), "not in torch's form for pickles"),
        "a storage of another key": (storage(legacy(key="1")), "a storage in it holds something else than numbers"),
        "a storage that claims more than it has": (storage(legacy(count=2**40)), "should have 2 numbers and has 2: it is cut short or changed"),
        "a storage cut short": (storage(legacy(data=bytes(5))), "should have 2 numbers and has 1: it is cut short or changed"),
        "a tensor larger than its storage": (tensor(legacy(), shape=b"(K\x03t"), "a tensor in it is larger than its storage"),
        "a tensor behind its storage": (tensor(legacy(), offset=b"K\x01"), "a tensor in it is larger than its storage"),
        "a tensor of one number repeated": (tensor(legacy(), shape=b"(" + big(2**50) + b"t", stride=b"(K\x00t"), "larger than its storage"),
        "a tensor of negative stride": (tensor(legacy(), stride=b"(J\xff\xff\xff\xfft"), "no storage, size or strides"),
        "a tensor of endless size": (tensor(legacy(), shape=b"(" + big(2**100) + b"t"), "no storage, size or strides"),
        "a tensor of many axes": (tensor(legacy(), shape=b"(" + b"K\x01" * 9 + b"t", stride=b"(" + b"K\x01" * 9 + b"t"), "no storage, size or strides"),
        "a tensor without a storage": (b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR", "no storage, size or strides"),
        "a string of endless length": (b"\x8d" + struct.pack("<Q", 2**62) + b"x", "damaged"),
        "bytes of endless length": (b"\x8e" + struct.pack("<Q", 2**62) + b"x", "damaged"),
        "a byte array": (b"\x96" + struct.pack("<Q", 2**62), "damaged"),
        "a far memo": (b"Nr\xff\xff\xff\xff", "found a NoneType"),
        "a memo that is not there": (b"j\xff\xff\xff\xff", "damaged"),
        "an empty stack": (b"", "damaged"),
        "no mark": (b"t", "damaged"),
        "half an item": (b"}(K\x01u", "damaged"),
        "items of a list": (b"](K\x01K\x02u", "it uses SETITEMS on a list"),
        "a nested key": (b"}" + b")" + b"\x85" * 200_000 + b"K\x01s", "it has a tuple as a key"),
        "deep lists": (b"]" * 200_000 + b"a" * 199_999, "found a list"),
        "deep tuples": (b")" + b"\x85" * 200_000, "found a tuple"),
        "deep dicts": (b"}X" + text("G_ema") + (b"}K\x00" * 100_000) + b"N" + b"s" * 100_001, "found a dict of G_ema"),
        "a long number": (b"L" + b"9" * 10_000 + b"L\n", "damaged"),
        "a class name of many lines": (b"cos\nsystem\n", "it names os.system"),
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile("x"))
def test_programs_written_by_hand_are_refused(tmp_path, name):
    sentinel = tmp_path / "ran"
    program, message = hostile(sentinel)[name]
    path = tmp_path / "net.pkl"
    path.write_bytes(b"\x80\x04" + program + b".")
    refused(path, message)
    assert not sentinel.exists()


def network(state):
    """The program of a network whose state is built by another program."""
    return (
        NET
        + b"}(X"
        + text("type")
        + b"X"
        + text("class")
        + b"X"
        + text("class_name")
        + b"X"
        + text("N")
        + b"X"
        + text("state")
        + state
        + b"u\x85R"
    )


def generator_file(folder, program):
    path = folder / "net.pkl"
    path.write_bytes(b"\x80\x04}X" + text("G_ema") + program + b"s.")
    return path


def modules(*programs):
    """The state of a network with these parts."""
    return (
        b"}X"
        + text("_modules")
        + b"}"
        + b"".join(b"X" + text(f"m{i}") + p + b"s" for i, p in enumerate(programs))
        + b"s"
    )


def test_networks_inside_each_other_end(tmp_path):
    deep = network(b"}")
    for _ in range(9):
        deep = network(modules(deep))
    refused(
        generator_file(tmp_path, deep),
        "its part m0.m0.m0.m0.m0.m0.m0.m0.m0.* too deep inside others",
    )
    # All parts of each network are the same one: 50^7 parts, if each were visited.
    wide = network(b"}")
    for number in range(7):
        wide = network(modules(wide + b"q" + bytes([number]), *[b"h" + bytes([number])] * 49))
    refused(generator_file(tmp_path, wide), "in two places at once")
    nested = legacy()
    for _ in range(1_000):
        nested = legacy(b"\x80\x02" + storage(nested) + b".")
    refused(
        generator_file(tmp_path, storage(nested)),
        "a storage in it holds something else than numbers",
    )
    # A network whose modules are its own state.
    loop = network(b"}q\x01X" + text("_modules") + b"h\x01s")
    refused(generator_file(tmp_path, loop), "its part _modules is no network")


def test_long_names_are_refused_and_strange_ones_shown_in_one_line(tmp_path):
    state = b"}X" + text("_buffers") + b"}X" + text("n" * 81) + tensor(legacy()) + b"ss"
    refused(generator_file(tmp_path, network(state)), "_buffers of a N is no dict of names")
    state = b"}X" + text("_buffers") + b"}X" + text("a\nb\x1b[31m") + tensor(legacy()) + b"ss"
    refused(generator_file(tmp_path, network(state)), r"its tensors are a\\nb\\x1b\[31m")
    (tmp_path / "net.pkl").write_bytes(
        b"\x80\x04X" + text("o\ns") + b"X" + text("x" * 10_000) + b"\x93."
    )
    refused(tmp_path / "net.pkl", r"it names o\\ns\.x{76}, which")


def test_work_is_bounded(tmp_path, monkeypatch):
    """One storage, asked for again and again, counts each time."""
    monkeypatch.setattr(inert, "MOST_INSTRUCTIONS", 5_000)
    data = legacy()
    given = (
        b"ctorch.storage\n_load_from_bytes\nq\x00B" + struct.pack("<I", len(data)) + data + b"q\x01"
    )
    path = tmp_path / "net.pkl"
    path.write_bytes(b"\x80\x04" + given + b"(" + b"h\x00h\x01\x85R" * 1_000 + b"t\x87.")
    refused(path, "it has more than 5,000 instructions")


def test_claims_cost_no_memory(tmp_path):
    import resource

    path = tmp_path / "net.pkl"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in (
        "a far memo",
        "bytes of endless length",
        "a tensor of one number repeated",
        "a storage that claims more than it has",
    ):
        program, message = hostile("x")[name]
        path.write_bytes(b"\x80\x04" + program + b".")
        refused(path, message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_the_streams_of_these_tests_are_those_of_torch(tmp_path):
    data = legacy(data=struct.pack("<2f", 1.5, -2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # storages as such are deprecated
        assert torch.load(io.BytesIO(data), weights_only=True).tolist() == [1.5, -2.0]
    stored = inert.Reader().read(io.BytesIO(b"\x80\x04" + tensor(data) + b"."))
    assert stored.tensor().tolist() == [1.5, -2.0]
