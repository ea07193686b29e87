"""The WGAN-GP prior: shapes of the papers, the penalty by hand, resuming, files."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from frostglass.core.errors import CheckpointError, ConfigError, DataError, RunError
from frostglass.core.method import AuditSize
from frostglass.core.prior import UNKNOWN
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.base import check_unseen
from frostglass.priors.pretrained import Pretrained, embedded
from frostglass.priors.wgan import Wgan, diversity, gradient_penalty
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for
from worlds import PUBLIC, KilledError, MemoryWork, NoWork, same_weights, target

SMALL = Wgan(latent=5, width=4, steps=6, critic_steps=2, batch=8, checkpoint_every=2, average=0.5)


def test_published_shapes():
    generator, critic = Wgan().networks((1, 32, 32))
    assert [tuple(p.shape) for p in generator.parameters() if p.ndim == 4] == [
        (256, 128, 5, 5),
        (128, 64, 5, 5),
        (64, 1, 5, 5),
    ]
    assert tuple(generator[0].weight.shape) == (4096, 100)
    assert [tuple(p.shape) for p in critic.parameters() if p.ndim == 4] == [
        (64, 1, 5, 5),
        (128, 64, 5, 5),
        (256, 128, 5, 5),
        (1, 256, 4, 4),
    ]
    generator, critic = Wgan().networks((3, 64, 64))
    assert [p.shape[0] for p in generator.parameters() if p.ndim == 4] == [512, 256, 128, 64]
    assert generator.eval()(torch.zeros(2, 100)).shape == (2, 3, 64, 64)
    assert critic(torch.zeros(2, 3, 64, 64)).shape == (2, 1)


def test_crafters_generator_starts_at_eight_pixels():
    """Table XII: a linear layer to 256×8×8, and transposed convolutions to 128, 64 and 3."""
    generator, _ = Wgan(latent=500, first_size=8).networks((3, 64, 64))
    linear, *_ = generator
    assert (linear.in_features, linear.out_features) == (500, 256 * 8 * 8)
    convs = [layer for layer in generator if isinstance(layer, nn.ConvTranspose2d)]
    assert [(c.in_channels, c.out_channels) for c in convs] == [(256, 128), (128, 64), (64, 3)]
    small = Wgan(latent=5, width=4, first_size=8).networks((3, 16, 16))[0].eval()
    assert small(torch.randn(2, 5)).shape == (2, 3, 16, 16)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_every_size_maps_to_itself(size):
    generator, critic = Wgan(width=4).networks((3, size, size))
    images = generator.eval()(torch.randn(2, 100))
    assert images.shape == (2, 3, size, size)
    assert images.min() >= 0
    assert images.max() <= 1
    assert critic(images).shape == (2, 1)


def test_penalty_of_a_linear_critic_is_known():
    critic = nn.Sequential(nn.Flatten(), nn.Linear(12, 1, bias=False))
    real, fake = torch.rand(5, 3, 2, 2), torch.rand(5, 3, 2, 2)
    expected = (critic[1].weight.norm() - 1) ** 2
    assert gradient_penalty(critic, real, fake, torch.Generator()).item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_penalty_against_a_slow_reference():
    critic = Wgan(width=4).networks((3, 16, 16))[1].double()
    rng = torch.Generator().manual_seed(3)
    real, fake = (
        torch.rand(3, 3, 16, 16, dtype=torch.double, generator=torch.Generator().manual_seed(s))
        for s in (0, 1)
    )
    fast = gradient_penalty(critic, real, fake, rng)
    rng.manual_seed(3)
    share = torch.rand(3, 1, 1, 1, generator=rng)
    slow = []
    for i in range(3):
        point = (real[i] + share[i] * (fake[i] - real[i]))[None].requires_grad_()
        (slope,) = torch.autograd.grad(critic(point).sum(), point)
        slow.append((slope.norm() - 1) ** 2)
    assert torch.allclose(fast, torch.stack(slow).mean())


@pytest.mark.parametrize("died_after", [1, 2])
def test_resumes_to_the_same_bytes(died_after):
    whole = SMALL.train(PUBLIC, None, seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        SMALL.train(PUBLIC, None, seed=0, work=work)
    work.left = None
    resumed = SMALL.train(PUBLIC, None, seed=0, work=work)
    assert same_weights(whole.generator, resumed.generator)
    assert same_weights(whole.critic, resumed.critic)


def test_learns_to_look_like_its_data():
    """The mean image of a trained generator is nearer to the data's than an untrained one's."""
    method = Wgan(latent=5, width=8, steps=60, critic_steps=2, batch=16, lr=2e-3)
    trained = method.train(PUBLIC, None, seed=0, work=NoWork())
    fresh = Wgan(latent=5, width=8, steps=1, critic_steps=1, batch=16, lr=1e-9).train(
        PUBLIC, None, seed=0, work=NoWork()
    )
    real = PUBLIC.floats().mean(0)
    z = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gaps = [(p.images(z).mean(0) - real).pow(2).mean() for p in (trained, fresh)]
    assert gaps[0] < 0.75 * gaps[1]  # ten seeds: 0.08 to 0.47


def test_divergence_is_reported():
    with pytest.raises(RunError, match="wgan: the loss is not finite at step"):
        Wgan(latent=5, width=4, steps=50, critic_steps=1, batch=8, lr=1e30).train(
            PUBLIC, None, seed=0, work=NoWork()
        )


def test_file_round_trip_and_half_precision(tmp_path):
    made = SMALL.train(PUBLIC, None, seed=0, work=NoWork())
    write_prior(made, tmp_path / "full.safetensors")
    write_prior(made, tmp_path / "half.safetensors", torch.float16)
    full, half = (
        read_prior(tmp_path / "full.safetensors"),
        read_prior(tmp_path / "half.safetensors"),
    )
    assert same_weights(made.generator, full.generator)
    z = torch.randn(4, 5)
    assert torch.allclose(full.images(z), half.images(z), atol=2e-2)
    assert next(half.generator.parameters()).dtype == torch.float32
    assert (tmp_path / "half.safetensors").stat().st_size < 0.7 * (
        tmp_path / "full.safetensors"
    ).stat().st_size


def test_a_prior_of_images_without_identities_does_not_know_whom_it_saw(tmp_path):
    """An audit warns if the prior's info has this fact."""
    flat = replace(PUBLIC, names=(), labels=torch.full_like(PUBLIC.labels, -1))
    write_prior(SMALL.train(flat, None, seed=0, work=NoWork()), tmp_path / "p.safetensors")
    assert read_prior(tmp_path / "p.safetensors").info["seen_identities"] == UNKNOWN
    assert "seen_identities" not in SMALL.train(PUBLIC, None, seed=0, work=NoWork()).info


def test_a_prior_file_is_read_strictly(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    write_prior(SMALL.train(PUBLIC, None, seed=0, work=NoWork()), tmp_path / "p.safetensors")
    with safe_open(tmp_path / "p.safetensors", framework="pt") as file:
        facts, whole = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    spoiled = {
        "one tensor too many": {**whole, "extra": torch.zeros(1)},
        "not finite": {**whole, "generator.0.weight": whole["generator.0.weight"] * float("nan")},
        "nobody seen": {name: t for name, t in whole.items() if name != "seen_identities"},
        "one missing": {name: t for name, t in whole.items() if name != "critic.0.weight"},
    }
    for tensors in spoiled.values():
        save_file(tensors, tmp_path / "spoiled.safetensors", metadata=facts)
        with pytest.raises(CheckpointError):
            read_prior(tmp_path / "spoiled.safetensors")


def test_a_prior_that_knows_the_victims_is_refused():
    made = SMALL.train(PUBLIC, None, seed=0, work=NoWork())
    check_unseen(made, ["person 1"])
    with pytest.raises(
        DataError, match=r"trained on 1 of the 2 private identities \(one is 'Stranger 3'\)"
    ):
        check_unseen(made, ["person 1", "Stranger 3"])


def test_bad_files(tmp_path):
    with pytest.raises(CheckpointError, match="no prior at"):
        read_prior(tmp_path / "none.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read_prior(tmp_path / "junk.safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="does not say it is a frostglass prior"):
        read_prior(tmp_path / "other.safetensors")
    with pytest.raises(
        ConfigError, match=r"no embedded prior named 'faces3': did you mean 'faces32'\?"
    ):
        Pretrained(weights="faces3").path()


def test_embedded_priors_are_small_and_make_images():
    for name in embedded():
        path = Pretrained(weights=name).path()
        assert path.stat().st_size <= 8 * 2**20
        made = read_prior(path)
        with torch.no_grad():
            images = made.images(
                torch.randn(16, made.latent, generator=torch.Generator().manual_seed(0))
            )
        assert images.shape[1:] == made.image_shape
        assert images.std(0).mean() > 0.1  # varied


@pytest.mark.parametrize("name", embedded())
def test_an_embedded_critic_does_not_prefer_enlarged_latents(name):
    """Else an attack that follows the critic is led away from faces."""
    made = read_prior(Pretrained(weights=name).path())
    if made.critic is None:
        return
    latents = torch.randn(128, made.latent, generator=torch.Generator().manual_seed(0))
    with frozen(*made.modules), torch.no_grad():
        usual, *enlarged = (
            made.realism(made.images(scale * latents)).mean() for scale in (1, 2, 4, 8, 11)
        )
    assert all(score < usual - 0.5 for score in enlarged)


SETTLING = replace(SMALL, settling=5, checkpoint_every=2)


def test_a_settled_critic_is_the_slow_and_obvious_one():
    """Adam on Wasserstein loss and penalty, half of the latents stretched, lr falling to zero."""
    before = SMALL.train(PUBLIC, None, seed=0, work=NoWork())
    settled = SETTLING.train(PUBLIC, None, seed=0, work=NoWork())
    critic = before.critic.train()
    adam = torch.optim.Adam(critic.parameters(), betas=(0.5, 0.999))
    for step in range(5):
        rng = generator_for(0, "wgan", "settling", step)
        real = PUBLIC.floats(torch.randint(len(PUBLIC), (8,), generator=rng))
        latents = torch.randn(8, 5, generator=rng)
        for row, share in enumerate(torch.rand(8, generator=rng).tolist()):
            latents[row] *= 16 ** (2 * share - 1) if row % 2 else 1
        with torch.no_grad():
            fake = before.images(latents)
        loss = critic(fake).mean() - critic(real).mean()
        loss = loss + 10 * gradient_penalty(critic, real, fake, rng)
        adam.param_groups[0]["lr"] = SMALL.lr * (1 - step / 5)
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert same_weights(settled.generator, before.generator)
    pairs = zip(settled.critic.parameters(), critic.parameters(), strict=True)
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in pairs)
    assert not settled.critic.training


@pytest.mark.parametrize("died_after", [2, 3, 4])
def test_a_settling_resumes_to_the_same_bytes(died_after):
    whole = SETTLING.train(PUBLIC, None, seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        SETTLING.train(PUBLIC, None, seed=0, work=work)
    work.left = None
    resumed = SETTLING.train(PUBLIC, None, seed=0, work=work)
    assert same_weights(whole.generator, resumed.generator)
    assert same_weights(whole.critic, resumed.critic)


def test_settling_is_part_of_the_budget():
    size = AuditSize(people=1)
    assert SETTLING.budget(size).trained == SMALL.budget(size).trained + 5 * 8
    assert SETTLING.budget(size).description.endswith(", 5 of the critic alone")
    assert SETTLING.brief().settling == 1


def test_size_that_does_not_fit():
    with pytest.raises(ConfigError, match="16, 32, 64 or 128 pixels"):
        Wgan().networks((3, 40, 40))


def test_diversity_against_slow_references():
    rng = torch.Generator().manual_seed(0)
    f1, f2 = (torch.randn(5, 7, dtype=torch.double, generator=rng) for _ in range(2))
    z1, z2 = (torch.randn(5, 3, dtype=torch.double, generator=rng) for _ in range(2))
    apart = (
        sum(
            sum((a - b) ** 2 for a, b in zip(f1[i], f2[i], strict=True)) ** 0.5
            / (z1[i] - z2[i]).pow(2).sum() ** 0.5
            for i in range(5)
        )
        / 5
    )
    assert diversity(f1, f2, z1, z2, "norm").item() == pytest.approx(apart.item(), rel=1e-12)
    features = sum(abs(f1[i, j] - f2[i, j]).item() for i in range(5) for j in range(7)) / 35
    latents = sum(abs(z1[i, j] - z2[i, j]).item() for i in range(5) for j in range(3)) / 15
    assert diversity(f1, f2, z1, z2, "mean").item() == pytest.approx(features / latents, rel=1e-12)
    for form in ("norm", "mean"):
        assert torch.autograd.gradcheck(
            lambda a, b, form=form: diversity(a, b, z1, z2, form),
            (f1.requires_grad_(), f2.requires_grad_()),
        )
    same = f1.detach().clone().requires_grad_()
    diversity(same, same.detach(), z1, z2, "norm").backward()
    assert same.grad.isfinite().all()  # two images that are one to the target


def test_without_diversity_nothing_is_asked_of_a_target():
    view = target().view(["labels"])
    made = SMALL.train(PUBLIC, view, seed=0, work=NoWork())
    assert view.queries == 0
    assert (SMALL.tied, made.tied_to, made.classes) == (False, None, 0)
    assert same_weights(made.generator, SMALL.train(PUBLIC, None, seed=0, work=NoWork()).generator)


@pytest.mark.parametrize("form", ["norm", "mean"])
def test_diversity_fits_the_prior_to_one_target_and_resumes(form, tmp_path):
    method, classifier = replace(SMALL, diversity=0.5, diversity_form=form), target()
    assert method.tied
    with pytest.raises(
        ConfigError, match=r"wgan is fitted to one target .*or set prior.diversity to 0"
    ):
        method.train(PUBLIC, None, seed=0, work=NoWork())
    before, modes = (
        {k: t.clone() for k, t in classifier.module.state_dict().items()},
        [m.training for m in classifier.module.modules()],
    )
    view, rng = classifier.view(["gradients"]), torch.get_rng_state()
    whole = method.train(PUBLIC, view, seed=0, work=NoWork())
    assert view.queries == 6 * 2 * 8
    assert all(torch.equal(before[k], t) for k, t in classifier.module.state_dict().items())
    assert [m.training for m in classifier.module.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in classifier.module.parameters())
    assert torch.equal(rng, torch.get_rng_state())
    assert (whole.tied_to, whole.classes) == ("target", 4)
    assert not same_weights(
        whole.generator, SMALL.train(PUBLIC, None, seed=0, work=NoWork()).generator
    )
    work = MemoryWork(saves_before_death=1)
    with pytest.raises(KilledError):
        method.train(PUBLIC, classifier.view(["gradients"]), seed=0, work=work)
    work.left = None
    resumed = method.train(PUBLIC, classifier.view(["gradients"]), seed=0, work=work)
    for prior, name in ((whole, "whole"), (resumed, "resumed")):
        write_prior(prior, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (
        tmp_path / "resumed.safetensors"
    ).read_bytes()


def test_diversity_makes_the_target_tell_images_apart():
    """The term's own value, on fresh latents, grows with its weight."""
    classifier = target()
    z1, z2 = (torch.randn(64, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    apart = []
    for weight in (1e-9, 5.0):
        method = Wgan(
            latent=5, width=4, steps=30, critic_steps=1, batch=16, lr=2e-3, diversity=weight
        )
        made = method.train(PUBLIC, classifier.view(["gradients"]), seed=0, work=NoWork())
        classifier.module.eval()
        with torch.no_grad():
            features = [classifier.outputs(made.images(z))[1] for z in (z1, z2)]
        classifier.module.train()
        apart.append(diversity(*features, z1, z2, "norm"))
    assert apart[1] > 1.5 * apart[0]  # ten seeds: 4.1 to 11.7


@pytest.mark.parametrize(
    "info",
    [
        {
            "method": {
                "name": "generator",
                "parameters": {"source": "this_would_run:make", "latent": "normal:4"},
            }
        },
        {
            "method": {
                "name": "students",
                "parameters": {"students": [{"model": "this_would_run:make"}]},
            },
            "base": {"method": {"name": "wgan", "parameters": {}}},
        },
        {
            "method": {"name": "students", "parameters": {}},
            "base": {
                "method": {"name": "generator", "parameters": {"source": "this_would_run:make"}}
            },
        },
    ],
)
def test_a_file_that_names_code_is_refused_before_any_is_run(tmp_path, info):
    prior = SMALL.train(PUBLIC, work=NoWork())
    write_prior(replace(prior, info=info), tmp_path / "evil.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"names code to run .this_would_run:make., and a file must hold weights alone",
    ):
        Pretrained(weights=str(tmp_path / "evil.safetensors")).read((3, 16, 16))


def test_a_file_without_its_method_is_refused(tmp_path):
    prior = SMALL.train(PUBLIC, work=NoWork())
    write_prior(replace(prior, info={}), tmp_path / "empty.safetensors")
    with pytest.raises(CheckpointError, match="does not say how its prior was made"):
        read_prior(tmp_path / "empty.safetensors")
