"""NVIDIA's StyleGAN2 pickles: read to the last bit, converted, and refused if they differ."""

import json
import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from frostglass.cli.app import app
from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import (
    convert_stylegan2,
    load_generator,
    official_name,
    read_stylegan2,
)
from frostglass.store.files import write_tensors
from nvidia_pickles import PROTOCOLS, Fake, nvidia, official, refused, snapshot, written  # noqa: F401

# Valid files


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
        match=r"net\.safetensors exists: choose another name, or replace it with --force",
    ):
        convert_stylegan2(source, out)
    assert out.read_text() == "precious"
    written(tmp_path, {}, name="bad.pkl")
    with pytest.raises(CheckpointError):
        convert_stylegan2(tmp_path / "bad.pkl", out, force=True)
    assert out.read_text() == "precious"
    with pytest.raises(ConfigError, match=r"cannot write x\.safetensors: no folder at"):
        convert_stylegan2(source, tmp_path / "nowhere" / "x.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"cannot write .*folder \(Is a directory\): choose a file in a writable folder",
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
            match=f"{name} has no StyleGAN2 settings in its header: convert it again",
        ):
            load_generator(tmp_path / name)
    save_file(tensors, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="plain has no StyleGAN2 settings in its header"):
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
    facts = f"3x16x16, z 5, w 4, 2 mapping layers, 6 styles, {parameters:,} parameters"
    assert done.stdout == f"{out}: StyleGAN2, {facts}\n"
    done = frostglass("stylegan2", source, out)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "net.safetensors exists: choose another name" in done.stderr
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
        (("stylegan2", out, tmp_path / "x"), "net.safetensors is damaged, truncated or no pickle"),
    ]:
        done = frostglass(*args)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "x").exists()


# Other files


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
            r"6 tensors missing \(synthesis.b8.conv0.weight, .*.conv0.noise_strength, \.\.\.\)",
        ),
        (lose_the_last, "synthesis.b16.conv1.weight is missing or no tensor of 1 axes"),
        (gain, r"1 tensors unexpected \(synthesis.b8.more\)"),
        (
            reshape,
            r"1 tensors of another shape \(synthesis.b8.conv0.noise_const \(4, 4\) for \(8, 8\)\)",
        ),
        (label, "its generator is class-conditional, and only unconditional ones are supported"),
        (
            infinite,
            r"net.pkl cannot be used: 1 of its tensors hold NaN or infinity \(mapping.w_avg\)",
        ),
        (sharp, r"synthesis.b8.resample_filter is not the filter \[1, 3, 3, 1\]"),
        (
            attribute("mapping.fc1", "activation", "relu"),
            "expected activation lrelu of mapping.fc1, got another",
        ),
        (attribute("mapping.fc0", "bias_gain", 1), r"expected bias_gain 0\.01 of mapping.fc0"),
        (
            attribute("synthesis.b4.conv1", "conv_clamp", 128),
            r"expected conv_clamp 256\.0 of synthesis.b4.conv1, got another",
        ),
        (
            attribute("synthesis.b4.torgb", "conv_clamp", None),
            r"expected conv_clamp 256\.0 of synthesis.b4.torgb, got another",
        ),
        (
            attribute("synthesis.b16.conv1", "conv_clamp", np.float64(256)),
            "conv_clamp of synthesis.b16.conv1 is a Opaque, not a number",
        ),
        (
            attribute("synthesis.b16.conv1", "conv_clamp", -1),
            r"its sizes are not those of a StyleGAN2 \(StyleSettings: clamp: expected more than",
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
def test_differences_are_named(tmp_path, change, message):
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
        "expected a dict with a network G_ema, got a dict of D, G",
    )
    refused(written(tmp_path, [1]), "expected a dict with a network G_ema, got a list")
    torch.save({"G_ema": torch.ones(2)}, tmp_path / "net.pkl")
    refused(
        tmp_path / "net.pkl",
        "net.pkl is not a readable StyleGAN2: it is a file of torch.save, not a pickle",
    )
    (tmp_path / "net.pkl").write_bytes(b"\x80\x03cdnnlib.tflib.network\nNetwork\n.")
    refused(
        tmp_path / "net.pkl",
        "written by the TensorFlow version of StyleGAN: convert it with NVIDIA's legacy.py first",
    )
    (tmp_path / "net.pkl").write_bytes(b"")
    refused(tmp_path / "net.pkl", "it is empty")
    refused(tmp_path / "gone.pkl", "no file at '.*gone.pkl': expected a StyleGAN2 pickle")
    refused(tmp_path, "no file at")


def test_damaged_files_are_refused_and_nothing_else_happens(tmp_path):
    whole = pickle.dumps(
        {"G_ema": official(resolution=8, z_dim=2, w_dim=2, layers=1, base=8, most=2)[0]}, 4
    )
    path = tmp_path / "net.pkl"
    for end in range(1, len(whole), 487):
        path.write_bytes(whole[:end])
        refused(path, "net.pkl is (damaged, truncated or no pickle|not a readable StyleGAN2)")
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
