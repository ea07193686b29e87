"""A user's generator in attacks, in the store and on the command line."""

import shutil
import sys
from dataclasses import replace

import onnx
import pytest
import torch
from typer.testing import CliRunner

from commands import FACES, ONE_EPOCH
from frostglass.attacks.base import attacks, invert
from frostglass.attacks.model.brepmi import Brepmi
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.auditing.config_file import read_with_generator
from frostglass.auditing.steps import PRIOR
from frostglass.cli.app import app
from frostglass.core.assets import Assets
from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.core.prior import UNKNOWN
from frostglass.priors._files import load_prior, save_prior
from frostglass.priors.generator import prior_from
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store
from generators import NORMALS, PUBLIC, Dcgan, Z, code, generator, generator_folder, onnx_model
from worlds import SHAPE, target


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    yield from generator_folder(tmp_path, monkeypatch)


def test_label_only_attack_runs_on_it():
    prior, victim = generator().untrained(SHAPE, 0), target()
    attack = Brepmi(points=8, max_queries=200, tries=512, radius=0.5)
    result = invert(attack, victim.view(["labels"]), Assets(prior=prior), seed=0)
    assert (result.confidence[~result.partial] == 1).all()
    assert not result.partial.all()
    again = Assets(prior=generator().untrained(SHAPE, 0))
    again = invert(attack, victim.view(["labels"]), again, seed=0)
    assert torch.equal(result.images, again.images)


@pytest.mark.parametrize("source", ["onnx:gen.onnx", "torchscript:gen.pt"])
def test_gmi_is_the_same_for_any_batch_size(source):
    victim, result = target(), []
    for batch in (16, 64):
        attack = Gmi(
            critic_weight=0, steps=8, candidates=3, keep=3, lr=0.1, coupling=1, batch=batch
        )
        assets = Assets(prior=generator(source).untrained(SHAPE, 0))
        result.append(invert(attack, victim.view(["gradients"]), assets, seed=0))
    assert torch.equal(result[0].images, result[1].images)
    assert torch.equal(result[0].latents, result[1].latents)


@pytest.mark.parametrize("name", ["ppa", "mirror"])
def test_attacks_made_for_stylegans_search_its_latents(name):
    prior, victim = generator().untrained(SHAPE, 0), target()
    attack = attacks.get(name)(pool=20, steps=2, candidates=2, keep=1)
    result = invert(attack, victim.view(["gradients"]), Assets(prior=prior), people=[0, 2], seed=0)
    assert result.latents.shape == (2, 1, Z)
    share = attack.truncation if name == "mirror" else 1.0  # it truncates whenever it paints
    assert torch.allclose(
        prior.images(share * result.latents[:, 0]), result.images[:, 0], atol=1e-5
    )


def test_attacks_that_need_more_say_what_is_missing():
    assets, view = Assets(prior=generator().untrained(SHAPE, 0)), target().view(["gradients"])
    with pytest.raises(
        ConfigError, match=r"gmi.critic_weight is 1, but the prior has no critic: set it to 0"
    ):
        invert(Gmi(), view, assets)
    with pytest.raises(
        ConfigError,
        match=(
            r"lomma.students is true, but the prior has no students: use prior.name = "
            r'"students".*needs feature statistics'
        ),
    ):
        invert(Lomma(critic_weight=0), view, assets)
    with pytest.raises(
        ConfigError,
        match=(
            "ifgmi searches the maps between the blocks of a StyleGAN2, but this prior's "
            "generator has none"
        ),
    ):
        invert(attacks.get("ifgmi")(), view, assets)


def made_by(store, method):
    files = fingerprint(method)
    return store.step(PRIOR, method, public=PUBLIC, view=None, files=files, base=None, seed=0)


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
        method.untrained(SHAPE, 0)


def test_a_function_that_gives_other_weights_later_is_noticed():
    text = "import test_dcgan\n\nseed = 0\n\ndef make():\n    return test_dcgan.Dcgan(seed=seed)\n"
    sys.modules["test_dcgan"] = sys.modules["generators"]
    code(text)
    method = generator("own_generator:make")
    made_by(Store("store"), method)
    made_by(Store("store"), method)
    sys.modules["own_generator"].seed = 4  # as a file of weights that the function reads would
    with pytest.raises(
        CheckpointError,
        match=(
            r"own_generator:make gives other weights than when this prior was stored: .* as "
            r"prior.weights"
        ),
    ):
        made_by(Store("store"), method)
    before = fingerprint(method)
    code(text + "\n")
    assert fingerprint(method) != before
    del sys.modules["test_dcgan"]


def test_a_module_in_memory_cannot_come_back_from_a_file(here):
    save_prior(prior_from(Dcgan(), latent="normal:6x1x1"), here)
    with pytest.raises(
        CheckpointError,
        match=(
            "source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got 'a Dcgan "
            "in memory'"
        ),
    ):
        load_prior(here)


TOY = f"""
name = "toy"
{FACES}{ONE_EPOCH}
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
    flags = ('onnx:a "b".onnx', "uniform:8", "0:255")
    config = read_with_generator(
        here / "toy.toml", ["prior.size=16"], *flags, resize=True, trust=True
    )
    assert config["prior"] == {
        "name": "generator",
        "source": 'onnx:a "b".onnx',
        "latent": "uniform:8",
        "range": [0.0, 255.0],
        "resize": True,
        "trust": True,
        "size": 16,
    }
    plain = read_with_generator(here / "toy.toml", [], None, None, None, resize=False)
    assert plain["prior"]["name"] == "wgan"


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
        (
            ("--latent", "normal:6"),
            "--latent describes a generator, got none: name it with --prior, such as "
            "--prior onnx:gen.onnx",
        ),
        (("--resize",), "--resize describes a generator, got none"),
        (("--trust",), "--trust describes a generator, got none"),
        (
            ("--prior", "torchscript:gen.pt", "--latent", "normal:6x1x1"),
            "prior.source: gen.pt is a program, and reading it can write files",
        ),
        (
            ("--prior", "onnx:gen.onnx"),
            "--prior needs --latent, the generator's input: --latent normal:512",
        ),
        (
            (*OWN, "--range", "1"),
            "--range: expected the generator's output for black and white, such as -1:1 "
            "or 0:255, got '1'",
        ),
        (
            (*OWN, "--range", ""),
            "--range: expected the generator's output for black and white",
        ),
        ((*OWN, "--range", "nan:1"), "prior.range.0: expected a finite number"),
        ((*OWN, "--range", "1:1"), "prior.range: expected two different numbers"),
        (
            ("--prior", "gen.onnx", "--latent", "normal:6"),
            "prior.source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got 'gen.onnx'",
        ),
        (
            ("--prior", "onnx:gen.onnx", "--latent", "6"),
            "prior.latent: expected a kind (normal, uniform, sphere) and a shape",
        ),
        (
            (*OWN, "--range", "0:1"),
            "prior: onnx:gen.onnx: 52% of its values lie outside the stated range 0:1",
        ),
        (
            (*OWN, "--set", "prior.size=20"),
            "prior: onnx:gen.onnx makes images of 16×16 pixels, and 20×20 was stated: "
            "correct prior.size",
        ),
        (
            (*OWN, "--set", "data.size=32"),
            "prior: onnx:gen.onnx makes images of 16×16 pixels, the data has 32×32: set "
            "prior.resize to true",
        ),
        (
            (*OWN, "--set", "attack.critic_weight=1"),
            "attack: gmi.critic_weight is 1, but the prior has no critic: set it to 0",
        ),
        (
            (*OWN, "--set", "attack={name='lomma',critic_weight=0,regulariser='off'}"),
            "attack: lomma.students is true, but the prior has no students",
        ),
    ],
)
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
    assert invert(
        attack, victim.view(["gradients"]), Assets(prior=prior), people=[0]
    ).images.shape == (
        1,
        1,
        *SHAPE,
    )
