"""Sources of a user's generator: ONNX, TorchScript and functions, and what is refused."""

import builtins
import math
import sys
import warnings

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.models.foreign import load_network
from generators import (
    NORMALS,
    Dcgan,
    Z,
    code,
    generator,
    generator_folder,
    onnx_model,
)
from worlds import SHAPE


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    yield from generator_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"source": "gen.onnx"},
            "source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got "
            "'gen.onnx': did you mean onnx:gen.onnx?",
        ),
        ({"source": "onnx:"}, "source: expected onnx:FILE"),
        (
            {"range": [1, 1]},
            "range: expected two different numbers, for black and for white, got 1 and 1",
        ),
        ({"range": [0, math.inf]}, "range.1: expected a finite number"),
        (
            {"weights": "w.safetensors"},
            "weights: onnx:gen.onnx brings its own: leave them out, or name a function as source",
        ),
        ({"size": 0}, "size: expected at least 1"),
    ],
)
def test_bad_parameters(stated, message):
    with pytest.raises(ConfigError) as error:
        generator(**stated)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "onnx:nowhere.onnx",
            "no file at nowhere.onnx: give the path of the generator's ONNX file",
        ),
        (
            "torchscript:nowhere.pt",
            "no file at nowhere.pt: give the path of the generator's TorchScript file",
        ),
        ("onnx:gen.pt", "gen.pt is not a whole ONNX file: Error parsing message"),
        (
            "torchscript:gen.onnx",
            "gen.onnx is not a TorchScript archive (PytorchStreamReader failed reading zip "
            "archive: ",
        ),
        ("nowhere_at_all:make", "cannot import 'nowhere_at_all'"),
        ("own_generator:mak", "no function 'mak' in 'own_generator': did you mean 'make'"),
        ("own_generator:make", "own_generator:make gave a int: expected a torch.nn.Module"),
        (
            "own_generator:picky",
            "own_generator:picky is called without arguments, and wants size: give them defaults",
        ),
        (
            "own_generator:broken",
            "own_generator:broken failed: [Errno 2] No such file or directory: 'w.pt'",
        ),
    ],
)
def test_sources_that_cannot_be_read(source, message):
    code(
        "def make(): return 3\n\ndef picky(size, deep=1, **more): return None\n\ndef "
        "broken(): open('w.pt')\n"
    )
    with pytest.raises((ConfigError, ModelError)) as error:
        generator(source).untrained(SHAPE, 0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_torchscript_file_is_read_only_if_it_is_trusted():
    message = r"gen\.pt is a program, and reading it can write files: export the network as ONNX"
    with pytest.raises(ConfigError, match=message):
        generator("torchscript:gen.pt", trust=False)
    assert generator("torchscript:gen.pt").untrained(SHAPE, 0).image_shape == SHAPE
    for source in ("onnx:gen.onnx", "own_generator:make"):
        assert not generator(source, trust=False).trust


def test_a_frozen_archive_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.freeze(torch.jit.script(Dcgan().eval())).save("frozen.pt")
    with pytest.raises(
        ModelError, match=r"frozen.pt was frozen \(torch.jit.freeze\), .*: save it before freezing"
    ):
        load_network("torchscript:frozen.pt")


def test_torchscript_says_what_its_network_said():
    with pytest.raises(
        ModelError, match=r"stated as normal:6: Expected .*; it takes normal:6x1x1$"
    ):
        generator("torchscript:gen.pt", latent="normal:6").untrained(SHAPE, 0)


def test_an_onnx_file_knows_its_latents():
    with pytest.raises(
        ModelError,
        match=(
            r"onnx:gen.onnx takes latents of 6×1×1, and uniform:512 was stated: state "
            r"uniform:6x1x1"
        ),
    ):
        generator(latent="uniform:512").untrained(SHAPE, 0)


def test_an_onnx_file_for_one_row():
    model = onnx_model(
        Dcgan(),
        batch=1,
        first="fixed",
        nodes=[helper.make_node("Reshape", ["latent", "shape"], ["fixed"])],
    )
    model.graph.initializer.append(
        numpy_helper.from_array(torch.tensor([1, Z, 1, 1]).numpy(), "shape")
    )
    onnx.save(model, "gen.onnx")
    with pytest.raises(
        ModelError, match="; it takes one at a time: export it with a batch axis of any length"
    ):
        generator().untrained(SHAPE, 0)


def test_an_onnx_file_that_does_not_say_which_operators_it_means():
    model = onnx_model(Dcgan())
    del model.opset_import[:]
    onnx.save(model, "odd.onnx")
    with pytest.raises(ModelError, match=r"onnx2torch cannot read odd\.onnx: "):
        load_network("onnx:odd.onnx")


def test_onnx_graphs_with_more_than_latents_and_images():
    model = onnx_model(Dcgan())
    model.graph.input.append(helper.make_tensor_value_info("label", TensorProto.INT64, ["n"]))
    onnx.save(model, "two.onnx")
    with pytest.raises(
        ModelError,
        match=(
            r"two.onnx takes 2 tensors \(latent, label\): export a network that takes latents "
            r"alone"
        ),
    ):
        load_network("onnx:two.onnx")
    model = onnx_model(Dcgan())
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, None))
    onnx.save(model, "two.onnx")
    with pytest.raises(ModelError, match=r"two.onnx gives 2 tensors \(images, c\)"):
        load_network("onnx:two.onnx")


def test_newer_operators_are_rewritten_or_told():
    net = Dcgan().eval()
    onnx.save(
        onnx_model(net, 20, "same", nodes=[helper.make_node("Identity", ["latent"], ["same"])]),
        "new.onnx",
    )
    made = load_network("onnx:new.onnx")
    assert torch.allclose(made(NORMALS[..., None, None]), net(NORMALS[..., None, None]), atol=1e-5)
    padded = [helper.make_node("Pad", ["latent", "sides"], ["same"])]
    model = onnx_model(net, 19, "same", nodes=padded)
    model.graph.initializer.append(
        numpy_helper.from_array(torch.zeros(8, dtype=torch.long).numpy(), "sides")
    )
    onnx.save(model, "newer.onnx")
    with pytest.raises(
        ModelError,
        match=(
            r"newer.onnx uses ONNX operators of opset 19, .*Pad.*: export it by "
            r".*dynamo=False, opset_version=17"
        ),
    ):
        load_network("onnx:newer.onnx")
    unknown = [helper.make_node("RandomNormalLike", ["latent"], ["same"])]
    onnx.save(onnx_model(net, 17, "same", nodes=unknown), "odd.onnx")
    with pytest.raises(
        ModelError,
        match=r"odd.onnx has an operator that onnx2torch does not know: .*RandomNormalLike",
    ):
        load_network("onnx:odd.onnx")


@pytest.mark.parametrize("opset", [17, 20])
def test_a_batch_norm_whose_number_of_axes_is_left_open(opset):
    net = Dcgan().eval()
    hidden = [  # a shape whose length nobody can know without running the graph
        helper.make_node("Abs", ["four"], ["end"]),
        helper.make_node("Slice", ["sides", "zero", "end"], ["shape"]),
        helper.make_node("Reshape", ["latent", "shape"], ["same"]),
    ]
    model = onnx_model(net, opset, "same", nodes=hidden)
    for name, values in (
        ("sides", [0, Z, 1, 1]),
        ("zero", [0]),
        ("four", [-4]),
    ):  # a side of 0 stays as it is
        model.graph.initializer.append(numpy_helper.from_array(torch.tensor(values).numpy(), name))
    onnx.save(model, "open.onnx")
    made = load_network("onnx:open.onnx")
    assert torch.allclose(made(NORMALS[..., None, None]), net(NORMALS[..., None, None]), atol=1e-5)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in made.modules())


def test_a_name_in_an_onnx_file_is_never_run_as_code():
    """onnx2torch writes names of nodes into the code of a torch.fx graph, without quoting them."""
    model = onnx_model(Dcgan())
    model.graph.node[
        0
    ].name = 'a", None) or setattr(__import__("builtins"), "was_run", 1) or getattr(self, "a'
    onnx.save(model, "gen.onnx")
    prior = generator().untrained(SHAPE, 0)
    prior.images(NORMALS)
    assert not hasattr(builtins, "was_run")


def test_without_the_extra_the_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx2torch", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"ONNX files need onnx and onnx2torch .*: install them with `pip install "
            r"'frostglass\[onnx\]'`"
        ),
    ):
        load_network("onnx:gen.onnx")


def test_weights_of_a_function_come_from_a_file():
    code("import test_dcgan\n\ndef make():\n    return test_dcgan.Dcgan()\n")
    sys.modules["test_dcgan"] = sys.modules["generators"]
    other = Dcgan(seed=5).eval()
    save_file(other.state_dict(), "w.safetensors")
    method = generator("own_generator:make", weights="w.safetensors")
    assert torch.allclose(
        method.untrained(SHAPE, 0).generator.raw(NORMALS),
        other(NORMALS[..., None, None]),
        atol=1e-5,
    )
    assert sorted(path.name for path in method.files()) == ["own_generator.py", "w.safetensors"]
    save_file({"w": torch.zeros(1)}, "w.safetensors")
    with pytest.raises(CheckpointError, match=r"w.safetensors does not fit Dcgan"):
        method.untrained(SHAPE, 0)
    del sys.modules["test_dcgan"]
