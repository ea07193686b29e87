"""Bring your own generator: the same pictures and gradients from any source, and every wrong statement explained."""

import builtins
import math
import shutil
import sys
import warnings
from dataclasses import replace

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from frostglass.attacks.base import attacks, invert, prior_only
from frostglass.attacks.model.brepmi import Brepmi
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.audit.config import generator_settings, read_config
from frostglass.audit.pipeline import PRIOR, fingerprint
from frostglass.cli.main import app
from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.core.prior import UNKNOWN
from frostglass.priors._files import load_prior, save_prior
from frostglass.priors._foreign import load_network
from frostglass.priors.base import priors
from frostglass.priors.generator import (
    Generator,
    Latents,
    OwnPictures,
    check_generator,
    prior_from,
)
from frostglass.runtime.seeding import seeded
from frostglass.store.store import Store
from worlds import SHAPE, images, target

Z = 6
NORMALS = torch.randn(5, Z, generator=torch.Generator().manual_seed(1))
PUBLIC = images(20, 5, names="stranger")


class Dcgan(nn.Module):
    """Latents (N, 6, 1, 1) to pictures of 16 pixels in [-1, 1], with batch norm that has seen something."""

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
        "w1": up.weight, "b1": up.bias, "scale": norm.weight, "shift": norm.bias, "mean": norm.running_mean, "var": norm.running_var,
        "w2": out.weight, "b2": out.bias,
    }  # fmt: skip
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
            helper.make_node("Tanh", ["d"], ["pictures"]),
        ],
        "dcgan",
        [helper.make_tensor_value_info("latent", TensorProto.FLOAT, [batch, Z, 1, 1])],
        [
            helper.make_tensor_value_info(
                "pictures", TensorProto.FLOAT, [batch, out.weight.shape[1], 16, 16]
            )
        ],
        [numpy_helper.from_array(value.detach().numpy(), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def traced(net, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(net.eval(), torch.zeros(2, Z, 1, 1)).save(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the same generator as ONNX, as TorchScript and as code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    onnx.save(onnx_model(Dcgan()), "gen.onnx")
    traced(Dcgan(), "gen.pt")
    yield tmp_path
    sys.modules.pop("own_generator", None)


def code(text):
    """A module of the user's own, `own_generator`."""
    with open("own_generator.py", "w") as file:
        file.write(text)
    sys.modules.pop("own_generator", None)


def generator(source="onnx:gen.onnx", **more):
    return Generator(**{"source": source, "latent": f"normal:{Z}x1x1", **more})


# --- latents and pictures -----------------------------------------------------------------------------------------------------------------


def test_latents_are_carried_to_the_stated_distribution():
    assert torch.equal(Latents.parse("normal:3x2x1").of(NORMALS), NORMALS.view(5, 3, 2, 1))
    by_hand = torch.tensor([[math.erf(n / math.sqrt(2)) for n in row] for row in NORMALS.tolist()])
    assert torch.allclose(Latents.parse("uniform:6").of(NORMALS), by_hand, atol=1e-6)
    many = torch.randn(40_000, 1, generator=torch.Generator().manual_seed(0))
    shares = torch.histc(Latents.parse("uniform:1").of(many), 10, -1, 1) / 40_000
    assert (shares - 0.1).abs().max() < 0.006
    on_sphere = Latents.parse("sphere:6").of(NORMALS)
    assert torch.allclose(on_sphere.norm(dim=1), torch.full((5,), math.sqrt(6)), atol=1e-4)
    assert torch.allclose(
        on_sphere / on_sphere.norm(dim=1, keepdim=True),
        NORMALS / NORMALS.norm(dim=1, keepdim=True),
        atol=1e-6,
    )
    assert Latents.parse("sphere:6").of(torch.zeros(1, 6)).isfinite().all()


@pytest.mark.parametrize("kind", ["normal", "uniform", "sphere"])
def test_gradients_of_the_carrying(kind):
    assert torch.autograd.gradcheck(
        Latents.parse(f"{kind}:3x2").of, NORMALS[:2].double().requires_grad_()
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "normal",
        "normal:",
        "gauss:5",
        "normal:0",
        "normal:5x",
        "normal:-5",
        "normal:5×1",
        "normal:1.5",
    ],
)
def test_bad_latents(text):
    with pytest.raises(
        ConfigError,
        match=r"latent: expected a kind .normal, uniform, sphere. and a shape, such as normal:512",
    ):
        generator(latent=text)
    with pytest.raises(ConfigError, match="prior_from: latent: expected a kind"):
        prior_from(Dcgan(), latent=text)


def test_a_module_becomes_a_prior():
    net = Dcgan().eval()
    prior = prior_from(net, latent=f"normal:{Z}x1x1", range=(-1, 1), size=16)
    raw = net(NORMALS[..., None, None])
    assert torch.equal(prior.images(NORMALS), (raw / 2 + 0.5).clamp(0, 1))
    assert (
        prior.latent,
        prior.image_shape,
        prior.critic,
        len(prior.seen_identities),
        prior.condition,
    ) == (Z, SHAPE, None, 0, "")
    assert prior.info["seen_identities"] == UNKNOWN
    wider = prior_from(
        net, latent=f"normal:{Z}x1x1", range=(0.9, -0.9)
    )  # black and white the other way round
    assert torch.allclose(wider.generator.paint(NORMALS), (0.9 - raw) / 1.8, atol=1e-6)
    assert wider.generator.paint(NORMALS).min() < 0
    assert torch.equal(wider.images(NORMALS), wider.generator.paint(NORMALS).clamp(0, 1))


@pytest.mark.parametrize("source", ["onnx:gen.onnx", "torchscript:gen.pt", "own_generator:make"])
def test_every_source_gives_the_pictures_and_gradients_of_the_module(source, here):
    code(
        "import torch\nfrom torch import nn\nimport test_dcgan\n\ndef make():\n    return test_dcgan.Dcgan()\n"
    )
    sys.modules["test_dcgan"] = sys.modules[__name__]
    prior = generator(source).train(PUBLIC)
    del sys.modules["test_dcgan"]
    known = OwnPictures(Dcgan().eval(), Latents("normal", (Z, 1, 1)), -1, 1)
    one, other = NORMALS.clone().requires_grad_(), NORMALS.clone().requires_grad_()
    made, expected = prior.images(one), known(other)
    assert torch.allclose(made, expected, atol=1e-5)
    weight = torch.rand(expected.shape, generator=torch.Generator().manual_seed(3))
    slopes = [
        torch.autograd.grad((pictures * weight).sum(), start)[0]
        for pictures, start in ((made, one), (expected, other))
    ]
    assert slopes[1].norm() > 1
    assert torch.allclose(*slopes, atol=1e-3)
    assert not prior.generator.training


def test_it_is_registered_without_a_critic():
    assert priors.get("generator") is Generator
    assert (Generator.tied, Generator.needs, Generator.keeps_critic) == (False, None, False)


# --- wrong statements ---------------------------------------------------------------------------------------------------------------------


class Changed(nn.Module):
    """A Dcgan whose pictures are changed."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = Dcgan(), change

    def forward(self, latents):
        return self.change(self.net(latents), latents)


def blinking(pictures, latents):
    return pictures + 0.05 * torch.randn_like(pictures)


def half_detached(pictures, latents):
    return (pictures + pictures.detach()) / 2


def centred(pictures, latents):
    return pictures - pictures.mean(0)


def one_row(pictures, latents):
    return pictures[:1]


WRONG = [
    (
        {"latent": "normal:6"},
        None,
        r"Dcgan cannot take 3 latents of 6, stated as normal:6: Expected .*; it takes normal:6x1x1$",
    ),
    (
        {"latent": "normal:7x1x1"},
        None,
        r"cannot take 3 latents of 7×1×1, stated as normal:7x1x1: Given transposed=1, weight of size \[6, ",
    ),
    (
        {"range": (0, 1)},
        None,
        r"52% of its values lie outside the stated range 0:1, they go from -.* to .*: it looks like -1:1; state as",
    ),
    (
        {"range": (0, 255)},
        None,
        r"its values use 0% of the stated range 0:255, .*: it looks like -1:1; state as prior.range",
    ),
    (
        {},
        lambda x, z: x / 2 + 0.5,
        r"its values use 50% of the stated range -1:1, they go from .*: it looks like 0:1; ",
    ),
    (
        {},
        lambda x, z: x * 127.5 + 127.5,
        r"\d\d% of its values lie outside the stated range -1:1, .*: it looks like 0:255; ",
    ),
    (
        {"range": (0, 1)},
        lambda x, z: x * 40,
        r"of its values lie outside the stated range 0:1, they go from -4\d?.* to \S+: state as prior.range",
    ),
    (
        {"range": (3, 3)},
        None,
        "prior_from: range: expected two different numbers, for black and for white, got 3 and 3",
    ),
    (
        {"size": 64},
        None,
        "Dcgan makes pictures of 16×16 pixels, and 64×64 was stated: correct prior.size",
    ),
    (
        {},
        blinking,
        r"Changed draws noise: the same latents gave pictures that differ by up to \d+\.\d% of the range; switch the noise off",
    ),
    (
        {},
        half_detached,
        "its gradients tell 5[01]% of the change that a small step in its latents makes in its pictures: a part of it is det",
    ),
    (
        {},
        lambda x, z: x.detach(),
        "Changed lets no gradient through from its pictures to its latents: a part of it is detached",
    ),
    ({}, lambda x, z: x.detach() + 0 * z.sum(), "its gradients tell 0% of the change"),
    (
        {},
        lambda x, z: (x * 2).round() / 2,
        "its gradients tell 0% of the change|its gradients tell nothing, and nothing is what",
    ),
    (
        {},
        lambda x, z: (
            x[:1].detach().expand(len(z), -1, -1, -1) * 0 + x.new_tensor([-1.0, 1.0]).repeat(8)
        ),
        "makes the same picture of every",
    ),
    (
        {},
        centred,
        r"Changed makes other pictures of the same latents in other company, by up to .*: it normalises over the batch",
    ),
    (
        {},
        one_row,
        "Changed gives 1 pictures for 3 latents of 6×1×1: export it with a batch axis of any length",
    ),
    (
        {},
        lambda x, z: (x, z),
        "Changed gives a tuple: return the pictures alone, from a small module around it if need be",
    ),
    (
        {},
        lambda x, z: x.flatten(1),
        r"gives float32 \(3, 768\) for 3 latents of 6×1×1: expected float pictures \(3, 1 or 3, height, width\)$",
    ),
    (
        {},
        lambda x, z: x.permute(0, 2, 3, 1),
        r"gives float32 \(3, 16, 16, 3\) for .*; its channels come last: add .permute\(0, 3, 1, 2\)",
    ),
    ({}, lambda x, z: (x * 127 + 128).byte(), r"Changed gives uint8 \(3, 3, 16, 16\)"),
    ({}, lambda x, z: x[:, :2], r"Changed gives float32 \(3, 2, 16, 16\)"),
    (
        {},
        lambda x, z: x / 0,
        "Changed gives NaN or infinity for 3 latents of 6×1×1: its weights or the statement of its latents",
    ),
]


@pytest.mark.parametrize(("stated", "change", "message"), WRONG)
def test_a_wrong_statement_is_explained(stated, change, message):
    net = Changed(change) if change else Dcgan()
    with pytest.raises((ModelError, ConfigError), match=message) as error:
        prior_from(net, **{"latent": "normal:6x1x1", **stated})
    assert "\n" not in str(error.value)


def test_batch_norm_in_training_mode_is_put_right_and_values_beyond_the_range_are_borne():
    prior = prior_from(Dcgan().train(), latent="normal:6x1x1")
    assert not prior.generator.network.training
    raw = Dcgan().eval()(NORMALS[..., None, None])
    assert 0 < (raw.abs() > 0.95 * 1.05).float().mean() < 0.1
    check_generator(OwnPictures(Dcgan(), Latents("normal", (Z, 1, 1)), -0.95, 0.95), "wide")


def test_trying_leaves_no_trace():
    net = Changed(lambda x, z: x)
    net.train()
    pictures = OwnPictures(net, Latents("normal", (Z, 1, 1)), -1, 1)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    assert check_generator(pictures, "it") == SHAPE
    assert net.training
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


# --- sources ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"source": "gen.onnx"},
            "source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got 'gen.onnx': did you mean onnx:gen.onnx?",
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
        ("onnx:nowhere.onnx", "no file at nowhere.onnx: give the path of the generator's ONNX file"),
        ("torchscript:nowhere.pt", "no file at nowhere.pt: give the path of the generator's TorchScript file"),
        ("onnx:gen.pt", "gen.pt is not a whole ONNX file: Error parsing message"),
        ("torchscript:gen.onnx", "gen.onnx is not a TorchScript archive (PytorchStreamReader failed reading zip archive: "),
        ("nowhere_at_all:make", "cannot import 'nowhere_at_all'"),
        ("own_generator:mak", "no function 'mak' in 'own_generator': did you mean 'make'"),
        ("own_generator:make", "own_generator:make gave a int: expected a torch.nn.Module"),
        ("own_generator:picky", "own_generator:picky is called without arguments, and wants size: give them defaults"),
        ("own_generator:broken", "own_generator:broken failed: [Errno 2] No such file or directory: 'w.pt'"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_read(source, message):
    code(
        "def make(): return 3\n\ndef picky(size, deep=1, **more): return None\n\ndef broken(): open('w.pt')\n"
    )
    with pytest.raises((ConfigError, ModelError)) as error:
        generator(source).read(SHAPE)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


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
        generator("torchscript:gen.pt", latent="normal:6").read(SHAPE)


def test_an_onnx_file_knows_its_latents():
    with pytest.raises(
        ModelError,
        match=r"onnx:gen.onnx takes latents of 6×1×1, and uniform:512 was stated: state uniform:6x1x1",
    ):
        generator(latent="uniform:512").read(SHAPE)


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
        generator().read(SHAPE)


def test_onnx_graphs_with_more_than_latents_and_pictures():
    model = onnx_model(Dcgan())
    model.graph.input.append(helper.make_tensor_value_info("label", TensorProto.INT64, ["n"]))
    onnx.save(model, "two.onnx")
    with pytest.raises(
        ModelError,
        match=r"two.onnx takes 2 tensors \(latent, label\): export a network that takes latents alone",
    ):
        load_network("onnx:two.onnx")
    model = onnx_model(Dcgan())
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, None))
    onnx.save(model, "two.onnx")
    with pytest.raises(ModelError, match=r"two.onnx gives 2 tensors \(pictures, c\)"):
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
        match=r"newer.onnx uses ONNX operators of opset 19, .*Pad.*: export it by .*dynamo=False, opset_version=17",
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
    prior = generator().read(SHAPE)
    prior.images(NORMALS)
    assert not hasattr(builtins, "was_run")


def test_without_the_extra_the_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx2torch", None)
    with pytest.raises(
        ConfigError,
        match=r"ONNX files need onnx and onnx2torch .*: install them with `pip install 'frostglass\[onnx\]'`",
    ):
        load_network("onnx:gen.onnx")


def test_weights_of_a_function_come_from_a_file():
    code("import test_dcgan\n\ndef make():\n    return test_dcgan.Dcgan()\n")
    sys.modules["test_dcgan"] = sys.modules[__name__]
    other = Dcgan(seed=5).eval()
    save_file(other.state_dict(), "w.safetensors")
    method = generator("own_generator:make", weights="w.safetensors")
    assert torch.allclose(
        method.read(SHAPE).generator.raw(NORMALS), other(NORMALS[..., None, None]), atol=1e-5
    )
    assert sorted(path.name for path in method.files()) == ["own_generator.py", "w.safetensors"]
    save_file({"w": torch.zeros(1)}, "w.safetensors")
    with pytest.raises(CheckpointError, match=r"w.safetensors does not fit Dcgan"):
        method.read(SHAPE)
    del sys.modules["test_dcgan"]


# --- sizes and colours --------------------------------------------------------------------------------------------------------------------


def test_another_size_needs_consent():
    with pytest.raises(
        CheckpointError,
        match=r"onnx:gen.onnx makes pictures of 16×16 pixels, the data has 32×32: set prior.resize to true",
    ):
        generator().read((3, 32, 32))
    prior = generator(resize=True).read((3, 32, 32))
    assert (prior.image_shape, prior.info["resize"]) == (SHAPE, True)
    large = target(shape=(3, 32, 32))
    found = invert(
        Gmi(critic_weight=0, steps=2, candidates=2, keep=2),
        large.view(["gradients"]),
        prior,
        labels=[1],
    )
    assert found.images.shape == (1, 2, *SHAPE)
    with pytest.raises(
        ConfigError, match="the prior makes pictures of 3×16×16, the target takes 3×32×32"
    ):
        invert(
            Gmi(critic_weight=0),
            large.view(["gradients"]),
            prior_from(Dcgan(), latent="normal:6x1x1"),
        )


@pytest.mark.parametrize(("made", "taken"), [(1, 3), (3, 1)])
def test_colour_and_grey_serve_each_other(made, taken):
    onnx.save(onnx_model(Dcgan(made)), "gen.onnx")
    prior, victim = generator().read((taken, 16, 16)), target(shape=(taken, 16, 16))
    assert prior.image_shape == (made, 16, 16)
    attack = Gmi(critic_weight=0, steps=30, candidates=2, keep=1, lr=0.1, coupling=1, clamp=0.0)
    found = invert(attack, victim.view(["gradients"]), prior, seed=0)
    blind = prior_only(prior, range(4), 1, seed=0)
    assert found.images.shape == (4, 1, made, 16, 16)
    with torch.no_grad():
        sure = [
            victim.module.eval()(victim.fit(p.images[:, 0])).softmax(1).diagonal().mean()
            for p in (found, blind)
        ]
    assert sure[0] > sure[1] + 0.1


# --- attacks ------------------------------------------------------------------------------------------------------------------------------


def test_label_only_attack_runs_on_it():
    prior, victim = generator().read(SHAPE), target()
    attack = Brepmi(points=8, budget=200, tries=512, radius=0.5)
    found = invert(attack, victim.view(["labels"]), prior, seed=0)
    assert (found.confidence[~found.partial] == 1).all()
    assert not found.partial.all()
    again = invert(attack, victim.view(["labels"]), generator().read(SHAPE), seed=0)
    assert torch.equal(found.images, again.images)


@pytest.mark.parametrize("source", ["onnx:gen.onnx", "torchscript:gen.pt"])
def test_gmi_is_the_same_for_any_batch_size(source):
    victim, found = target(), []
    for batch in (16, 64):
        attack = Gmi(
            critic_weight=0, steps=8, candidates=3, keep=3, lr=0.1, coupling=1, batch=batch
        )
        found.append(
            invert(attack, victim.view(["gradients"]), generator(source).read(SHAPE), seed=0)
        )
    assert torch.equal(found[0].images, found[1].images)
    assert torch.equal(found[0].latents, found[1].latents)


@pytest.mark.parametrize("name", ["ppa", "mirror"])
def test_attacks_made_for_stylegans_search_its_latents(name):
    prior, victim = generator().read(SHAPE), target()
    attack = attacks.get(name)(pool=20, steps=2, candidates=2, keep=1)
    found = invert(attack, victim.view(["gradients"]), prior, labels=[0, 2], seed=0)
    assert found.latents.shape == (2, 1, Z)
    share = attack.truncation if name == "mirror" else 1.0  # it truncates whenever it paints
    assert torch.allclose(prior.images(share * found.latents[:, 0]), found.images[:, 0], atol=1e-5)


def test_attacks_that_need_more_say_what_is_missing():
    prior, view = generator().read(SHAPE), target().view(["gradients"])
    with pytest.raises(
        ConfigError, match=r"gmi.critic_weight is not 0 and the prior has no critic: set it to 0"
    ):
        invert(Gmi(), view, prior)
    with pytest.raises(
        ConfigError,
        match=r'lomma.students is on and the prior has none: use prior.name = "students".*needs feature statistics',
    ):
        invert(Lomma(critic_weight=0), view, prior)
    with pytest.raises(
        ConfigError,
        match="ifgmi changes the maps between the blocks of a StyleGAN2, and this prior's generator has none",
    ):
        invert(attacks.get("ifgmi")(), view, prior)


# --- the store ----------------------------------------------------------------------------------------------------------------------------


def made_by(store, method):
    return store.step(PRIOR, method, PUBLIC, None, fingerprint(method), seed=0)


def test_a_store_keeps_no_second_copy_and_gives_the_same_prior(here):
    first = made_by(Store("store"), generator())
    second = made_by(Store("store"), generator())
    assert first.key == second.key
    assert torch.equal(first.images(NORMALS), second.images(NORMALS))
    assert (second.latent, second.image_shape, second.info, len(second.seen_identities)) == (
        Z,
        SHAPE,
        first.info,
        0,
    )
    (stored,) = here.glob("store/prior/*/prior.safetensors")
    assert stored.stat().st_size < 2000 < (here / "gen.onnx").stat().st_size


def test_a_changed_file_is_another_prior_and_a_missing_one_is_told(here):
    first = made_by(Store("store"), generator())
    onnx.save(onnx_model(Dcgan(seed=7)), "gen.onnx")
    second = made_by(Store("store"), generator())
    assert first.key != second.key
    assert not torch.equal(first.images(NORMALS), second.images(NORMALS))
    shutil.move("gen.onnx", "moved.onnx")
    with pytest.raises(ConfigError, match=r"cannot read gen.onnx: No such file or directory"):
        made_by(Store("store"), generator())
    assert torch.equal(
        made_by(Store("store"), generator("onnx:moved.onnx")).images(NORMALS),
        second.images(NORMALS),
    )


def test_weights_beside_an_onnx_file_are_part_of_its_key(here):
    onnx.save(
        onnx_model(Dcgan()),
        "big.onnx",
        save_as_external_data=True,
        location="big.data",
        size_threshold=0,
    )
    method = generator("onnx:big.onnx")
    assert [path.name for path in method.files()] == ["big.onnx", "big.data"]
    before = fingerprint(method)
    data = bytearray((here / "big.data").read_bytes())
    data[3] ^= 1
    (here / "big.data").write_bytes(data)
    assert fingerprint(method) != before
    (here / "big.data").unlink()
    with pytest.raises(ModelError, match=r"big.onnx is not a whole ONNX file: Data of TensorProto"):
        method.read(SHAPE)


def test_a_function_that_gives_other_weights_later_is_noticed():
    text = "import test_dcgan\n\nseed = 0\n\ndef make():\n    return test_dcgan.Dcgan(seed=seed)\n"
    sys.modules["test_dcgan"] = sys.modules[__name__]
    code(text)
    method = generator("own_generator:make")
    made_by(Store("store"), method)
    made_by(Store("store"), method)
    sys.modules["own_generator"].seed = 4  # as a file of weights that the function reads would
    with pytest.raises(
        CheckpointError,
        match=r"own_generator:make gives other weights than when this prior was stored: .* as prior.weights",
    ):
        made_by(Store("store"), method)
    before = fingerprint(method)
    code(text + "\n")
    assert fingerprint(method) != before
    del sys.modules["test_dcgan"]


def test_a_module_in_memory_cannot_come_back_from_a_file(here):
    save_prior(prior_from(Dcgan(), latent="normal:6x1x1"), here)
    with pytest.raises(
        ConfigError,
        match="source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got 'a Dcgan in memory'",
    ):
        load_prior(here)


# --- the command line ---------------------------------------------------------------------------------------------------------------------

TOY = """
name = "toy"
[data]
name = "faces"
size = 16
identities = 4
images = 8
public_identities = 30
public_images = 1
[target]
epochs = 1
batch = 16
options = { width = 4 }
[[evaluators]]
model = "lenet"
epochs = 1
[prior]
name = "wgan"
steps = 4
[attack]
name = "gmi"
critic_weight = 0
steps = 2
candidates = 2
keep = 2
[judging]
positive_control = false
"""
OWN = ("--prior", "onnx:gen.onnx", "--latent", "normal:6x1x1")


def command(*args):
    with open("toy.toml", "w") as file:
        file.write(TOY)
    return CliRunner().invoke(app, [args[0], "toy.toml", *args[1:]], catch_exceptions=False)


def test_flags_replace_the_prior_of_a_config(here):
    (here / "toy.toml").write_text(TOY)
    told = generator_settings('onnx:a "b".onnx', "uniform:8", "0:255", resize=True)
    config = read_config(here / "toy.toml", [*told, "prior.size=16"])
    assert config["prior"] == {
        "name": "generator", "source": 'onnx:a "b".onnx', "latent": "uniform:8", "range": [0.0, 255.0], "resize": True, "size": 16,
    }  # fmt: skip
    assert generator_settings(None, None, None, resize=False) == []


def test_a_config_is_checked_and_run_with_it(here):
    checked = command("check", *OWN, "--range", "-1:1")
    assert checked.exit_code == 0, checked.stderr
    assert "load weights" in checked.stdout
    ran = command("run", *OWN)
    assert "report: runs/toy/report.html" in ran.stdout, ran.stderr
    page = (here / "runs" / "toy" / "report.html").read_text()
    assert "onnx:gen.onnx" in page
    assert UNKNOWN in page
    before = {path: path.stat().st_mtime_ns for path in here.glob(".frostglass/*/*/manifest.json")}
    again = command("run", *OWN, "--range", "-1:1")
    assert "report: runs/toy/report.html" in again.stdout
    assert {
        path: path.stat().st_mtime_ns for path in here.glob(".frostglass/*/*/manifest.json")
    } == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--latent", "normal:6"), "--latent tells of a generator, and none is given: name it with --prior, such as --prior onnx:gen.onnx"),
        (("--resize",), "--resize tells of a generator, and none is given"),
        (("--prior", "onnx:gen.onnx"), "--prior needs --latent: what the generator takes, such as --latent normal:512"),
        ((*OWN, "--range", "1"), "--range: expected what the generator puts out for black and white, such as -1:1 or 0:255, got '1'"),
        ((*OWN, "--range", ""), "--range: expected what the generator puts out for black and white"),
        ((*OWN, "--range", "nan:1"), "prior.range.0: expected a finite number"),
        ((*OWN, "--range", "1:1"), "prior.range: expected two different numbers"),
        (("--prior", "gen.onnx", "--latent", "normal:6"), "prior.source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got 'gen.onnx'"),
        (("--prior", "onnx:gen.onnx", "--latent", "6"), "prior.latent: expected a kind (normal, uniform, sphere) and a shape"),
        ((*OWN, "--range", "0:1"), "prior: onnx:gen.onnx: 52% of its values lie outside the stated range 0:1"),
        ((*OWN, "--set", "prior.size=20"), "prior: onnx:gen.onnx makes pictures of 16×16 pixels, and 20×20 was stated: correct prior.size"),
        ((*OWN, "--set", "data.size=32"), "prior: onnx:gen.onnx makes pictures of 16×16 pixels, the data has 32×32: set prior.resize to true"),
        ((*OWN, "--set", "attack.critic_weight=1"), "attack: gmi.critic_weight is not 0 and the prior has no critic: set it to 0"),
        ((*OWN, "--set", "attack={name='lomma',critic_weight=0}"), "attack: lomma.students is on and the prior has none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["run", "check"])
def test_bad_flags_are_one_line(name, flags, message, here):
    done = command(name, *flags)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"frostglass: {message}")
    assert not (here / ".frostglass").exists()


def test_a_prior_with_students_can_stand_on_it():
    from frostglass.priors.students import Students

    base = {"name": "generator", "source": "onnx:gen.onnx", "latent": "normal:6x1x1"}
    method = Students(base=base, students=({"model": "lenet"},), statistics=8, epochs=1, batch=8)
    victim = replace(target(), key="t")
    prior = method.train(PUBLIC, victim.view(["gradients"]), seed=0)
    assert prior.info["base"]["seen_identities"] == UNKNOWN
    attack = Lomma(critic_weight=0, steps=2, candidates=2, keep=1)
    assert invert(attack, victim.view(["gradients"]), prior, labels=[0]).images.shape == (
        1,
        1,
        *SHAPE,
    )
