"""Several processes train as one: the same losses, checkpoints that either can resume."""

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.ranks import ALONE, Ranks, default_devices, joint_batch_norm, together
from frostglass.defenses.base import Defense, Term
from frostglass.defenses.training.bido import Bido
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.defenses.training.midre import Midre
from frostglass.defenses.training.trap_mid import TrapMid
from frostglass.priors.wgan import Wgan
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from rank_work import coupled_gradients, fail, follow, in_double, network
from worlds import SMALL_GAN, KilledError, MemoryWork, NoWork, rng, split, target

CPU = torch.device("cpu")
# Without dropout; 48 images in batches of 9 and 10, so that the parts of the ranks are unequal.
SMALL = Training(
    model="cnn",
    options={"width": 4},
    epochs=2,
    batch=11,
    optimizer="sgd",
    lr=1e-2,
    crop=0.7,
    keep="last",
)


@pytest.fixture
def double():
    """New tensors in double precision, in other processes too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(devices, defenses=(), config=SMALL, work=None):
    work, images = work or NoWork(), in_double(split())
    return train_target(config, images, defenses, seed=0, work=work, device=CPU, devices=devices)


def same_weights_in_double(one, other, atol=1e-10):
    """Whether all weights and statistics agree, but for the rounding of double precision."""
    for first, second in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert first.dtype in (torch.float64, torch.int64)
        torch.testing.assert_close(first, second, rtol=1e-9, atol=atol)


def agree(one, other):
    """Whether two trainings agree: losses, which are recorded in single precision, and weights."""
    for first, second in zip(one.info["history"], other.info["history"], strict=True):
        assert first == pytest.approx(second, rel=1e-6)
    same_weights_in_double(one.module, other.module)


def test_parts_cover_a_batch_in_order():
    parts = [Ranks(rank, 3).part(11) for rank in range(3)]
    rows = torch.arange(11)
    assert torch.equal(torch.cat([rows[part] for part in parts]), rows)
    assert [part.stop - part.start for part in parts] == [4, 4, 3]
    assert ALONE.part(5) == slice(0, 5)


def test_one_process_changes_nothing():
    rows = torch.ones(3, requires_grad=True)
    assert ALONE.gathered(rows, 3) is rows
    assert ALONE.total(rows) is rows
    layer = nn.BatchNorm1d(3)
    with joint_batch_norm(ALONE, layer), together(1, CPU, print) as ranks:
        assert ranks == ALONE
        assert "forward" not in vars(layer)


def test_the_number_of_devices_has_a_default(monkeypatch):
    monkeypatch.delenv("FROSTGLASS_DEVICES", raising=False)
    assert default_devices() == 1
    monkeypatch.setenv("FROSTGLASS_DEVICES", "3")
    assert default_devices() == 3
    monkeypatch.setenv("FROSTGLASS_DEVICES", "two")
    with pytest.raises(ConfigError, match="FROSTGLASS_DEVICES must be a number of at least 1, got"):
        default_devices()


def test_what_several_processes_cannot_train_is_refused_before_they_start():
    with pytest.raises(ConfigError, match="dpsgd needs the gradient of each image in one process"):
        train(2, [Dpsgd()])
    with pytest.raises(ConfigError, match="a batch of 11 images is too small for 6 devices"):
        train(6)


def test_two_processes_have_the_gradients_and_statistics_of_one():
    """In double precision, for the kernels of BiDO, with parts of unequal size."""
    images = torch.randn(7, 2, 6, 6, generator=rng(), dtype=torch.float64)
    alone = coupled_gradients(ALONE, network(), images)
    with together(2, CPU, follow, images) as ranks:
        both = coupled_gradients(ranks, network(), images)
    for one, other in zip(alone, both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with (
        pytest.raises(RunError, match="one of 2 training processes failed: ValueError: of the sec"),
        together(2, CPU, fail) as ranks,
    ):
        ranks.total(torch.ones(1))
    assert not torch.distributed.is_initialized()


class Pairs(Defense):
    """A loss that couples the samples of a batch and reads images, labels and a layer."""

    name = "pairs"

    def couples_samples(self):
        return True

    def taps(self, target):
        return target.taps[:1]

    def losses(self, batch):
        (maps,) = batch.tapped.values()
        near = (batch.images.flatten(1) @ batch.images.flatten(1).T).softmax(1)
        same = (batch.labels[:, None] == batch.labels).float()
        rows = maps.flatten(1)
        return {"pairs": Term(0.1, (near * same * (rows @ rows.T).tanh()).mean())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "defenses",
    [
        [],
        [Bido(lambda_x=0.1, lambda_y=1.0)],
        [Bido(measure="coco_frobenius", lambda_x=5.0, lambda_y=50.0)],
        [Pairs()],
        [TrapMid(alpha=0.2), Midre()],
    ],
    ids=str,
)
def test_two_processes_train_as_one(defenses, double):
    agree(train(2, defenses), train(1, defenses))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_checkpoint_is_resumed_by_another_number_of_processes(before, after, double):
    work = MemoryWork(saves_before_death=1)
    with pytest.raises(KilledError):
        train(before, work=work)
    work.left = None
    assert len(work.kept["training"][1]["history"]) == 1
    agree(train(after, work=work), train(1))


def wgan(devices, work=None, steps=4):
    method = Wgan(**{**SMALL_GAN, "batch": 7, "steps": steps})
    public = in_double(split()).public
    return method.train(public, seed=0, work=work or NoWork(), device=CPU, devices=devices)


def same_prior(one, other):
    """Adam divides by gradients: those of biases before a norm are nothing but rounding."""
    same_weights_in_double(one.generator, other.generator, atol=1e-8)
    same_weights_in_double(one.critic, other.critic, atol=1e-8)


@pytest.mark.slow
def test_two_processes_train_a_prior_as_one_and_resume_its_checkpoint(double):
    alone = wgan(1)
    same_prior(alone, wgan(2))
    work = MemoryWork(saves_before_death=1)
    with pytest.raises(KilledError):
        wgan(1, work)
    work.left = None
    same_prior(alone, wgan(2, work))


def test_a_prior_that_cannot_be_shared_says_that_one_process_trains_it(caplog):
    public, known = split().public, {**SMALL_GAN, "steps": 1}
    view = target().view(["gradients"])
    tied = Wgan(**known, diversity=0.5)
    tied.train(public, view, seed=0, work=NoWork(), device=CPU, devices=2)
    assert [record.getMessage() for record in caplog.records] == [
        "prior wgan is trained by 1 process, not by 2"
    ]
    assert Wgan(**known).shares_batches
    assert not tied.shares_batches


@pytest.mark.slow
def test_a_process_that_cannot_start_is_an_error_and_not_a_wait():
    """It cannot import what it is to do, as a class of a notebook."""
    with (
        pytest.raises(RunError, match=r"one of 2 training processes did not start \(exit code 1\)"),
        together(2, CPU, Unreadable()),
    ):
        pass


class Unreadable:
    def __call__(self, ranks):
        pass

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize("momentum", [0.0, 0.3, None])
def test_running_statistics_follow_the_momentum_of_a_batch_norm(momentum, monkeypatch):
    """One process that counts as two, so that the joint batch norm is used."""
    monkeypatch.setattr(Ranks, "total", lambda _, tensor: tensor)
    joint, plain = (nn.BatchNorm1d(3, momentum=momentum) for _ in range(2))
    for seed in range(3):
        rows = torch.randn(8, 3, generator=rng(seed))
        with joint_batch_norm(Ranks(0, 2), joint):
            joint(rows)
        plain(rows)
    torch.testing.assert_close(joint.running_mean, plain.running_mean)
    torch.testing.assert_close(joint.running_var, plain.running_var)
