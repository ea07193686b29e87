"""What a config would need is foreseen without needing it: bytes counted by hand, and a run in a process of its own as the judge."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from frostglass.attacks.model.lomma import Lomma
from frostglass.audit.config import experiments
from frostglass.networks.decoder import build_decoder
from frostglass.plan import cost, memory
from frostglass.plan.memory import GAPS, HEAP, MIB, Ledger, foreseen, resident
from frostglass.priors.pretrained import Pretrained
from frostglass.store.store import Store

STUDENT = {"model": "cnn", "options": {"width": 4}}
SMALL = STUDENT | {"epochs": 1}
TINY = {
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 6,
        "public_identities": 20,
        "public_images": 4,
    },
    "target": SMALL,
    "evaluators": [SMALL],
    "judging": {"positive_control": False},
    "prior": {"name": "wgan", "width": 4, "latent": 8, "steps": 2, "batch": 8},
    "attack": {"name": "gmi", "steps": 2, "candidates": 2, "keep": 1},
}


def need(tmp_path, **changes):
    return foreseen(
        experiments(TINY | changes), Store(tmp_path / "store"), lambda data: data.counts()
    )


def network(device):
    """Conv, ReLU and linear layer on pictures of 3 × 8 × 8; 4 maps, 5 logits."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
    ).to(device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("count", [2, 4])
def test_what_autograd_keeps_is_counted_by_hand(device, count):
    module, ledger = network(device), Ledger()
    with ledger:
        pictures = torch.zeros(count, 3, 8, 8, device=device)
        logits = module(pictures)
        # The convolution keeps its input, ReLU its output, which is the input of the linear layer; the convolution's own output is gone.
        assert ledger.now == 4 * count * (3 * 64 + 4 * 64 + 5)
        del logits
        assert ledger.now == 4 * count * 3 * 64
        with torch.no_grad():
            logits = module(pictures)
        assert ledger.now == 4 * count * (3 * 64 + 5)
    del pictures, logits
    assert ledger.now == 0


def test_what_does_not_grow_with_the_batch_is_there_once():
    """Weights, gradients and Adam's two means stay what they are when the batch doubles."""
    kept = []
    for count in (2, 4):
        ledger = Ledger()
        with ledger:
            module = network("meta")
            rule = torch.optim.Adam(module.parameters())
            for _ in range(2):
                loss = module(torch.zeros(count, 3, 8, 8, device="meta")).sum()
                rule.zero_grad(set_to_none=True)
                loss.backward()
                rule.step()
            del loss
            kept.append(ledger.now)
    weights = sum(weight.nbytes for weight in module.parameters())
    assert kept == [4 * weights] * 2


def test_views_and_work_in_place_are_counted_once():
    ledger = Ledger()
    with ledger:
        maps = torch.zeros(4, 8, device="meta")
        other = maps.view(8, 4).relu_().add_(1)[2:].T
        assert ledger.now == ledger._fullest == 4 * 32
    del maps
    assert ledger.now == 4 * 32  # a view keeps the whole
    del other
    assert ledger.now == 0


def test_small_blocks_stay_with_the_heap_and_large_ones_go():
    ledger = Ledger()
    with ledger:
        torch.zeros(1000, device="meta")
        torch.zeros(HEAP // 4, device="meta")
        ledger.restart()
        assert ledger.peak == int(GAPS * 4000)
        large = torch.zeros(HEAP // 4, device="meta")
        small = torch.zeros(500, device="meta")  # goes where the first one was
        assert ledger.peak == HEAP + int(GAPS * 4000)
        assert ledger.now == large.nbytes + small.nbytes
        ledger.charge(3000, HEAP)
        assert ledger.peak == 2 * HEAP + int(GAPS * 5000)


def test_a_convolution_lays_out_anew_what_it_reads_and_writes():
    ledger, layer = Ledger(), nn.Conv2d(3, 4, 1, bias=False, device="meta")
    with ledger, torch.no_grad():
        layer(torch.zeros(2, 3, 8, 8, device="meta"))
    read, weight, written = 4 * 2 * 3 * 64, 4 * 12, 4 * 2 * 4 * 64
    assert ledger.peak == int(GAPS * (2 * read + weight + 2 * written))


def test_questions_without_an_answer_get_one():
    ghost = torch.zeros(3, 2, device="meta")
    with Ledger():
        assert (ghost.sum().item(), ghost.long().sum().item(), bool(ghost.isfinite().all())) == (
            1.0,
            0,
            True,
        )
        assert torch.equal(ghost, ghost + 1)
        assert ghost[ghost > 0].shape == (6,)
        assert ghost[ghost[:, 0] > 0].shape == (3, 2)
        assert (ghost > 0).nonzero().shape == (6, 2)
        assert ghost.unique().shape == (6,)
        assert ghost.cpu().tolist() == [[1.0, 1.0]] * 3
        assert ghost.long().tolist() == [[0, 0]] * 3
        assert (ghost + torch.ones(2)).is_meta
        real = torch.ones(2)
        real[:] = ghost[0]
        assert real.tolist() == [1.0, 1.0]


def test_the_step_that_needs_most_is_named(tmp_path):
    assert need(tmp_path, target=SMALL | {"options": {"width": 128}}).step == "target cnn"
    assert need(tmp_path, prior=TINY["prior"] | {"batch": 1024, "width": 32}).step == "prior wgan"
    assert (
        need(tmp_path, attack=TINY["attack"] | {"batch": 512, "candidates": 512}).step
        == "attack gmi"
    )


def test_nothing_large_is_allocated(tmp_path):
    """A critic's first stage alone puts out 16,384 × 64 × 32 × 32 floats: 4 GiB, kept for real and for made pictures."""
    need(tmp_path)  # imports
    before = resident()
    huge = need(tmp_path, data=TINY["data"] | {"size": 64}, prior={"name": "wgan", "batch": 16384})
    assert (huge.step, huge.unknown) == ("prior wgan", "")
    assert huge.bytes > 8 * 1024 * MIB
    assert resident() - before < 512 * MIB


def test_networks_of_all_seeds_are_kept(tmp_path):
    """A grid holds target, evaluator, generator and critic of each experiment until its report is written."""
    once, thrice = need(tmp_path), need(tmp_path, grid={"seed": [0, 1, 2]})
    shape = (3, 16, 16)
    exp = experiments(TINY)[0][1]
    networks = [memory.untrained(exp.target, tuple("abcd"), shape, (), seed=0).module] * 2 + list(
        exp.prior.networks(shape)
    )
    weights = sum(tensor.nbytes for network in networks for tensor in network.state_dict().values())
    assert thrice.bytes - once.bytes == pytest.approx(2 * weights, abs=2 * MIB)
    assert thrice.bytes - once.bytes >= 2 * weights - MIB


@pytest.mark.parametrize(
    "changes",
    [
        {
            "prior": {"name": "kplus1", "width": 4, "target_mode": "train"},
            "attack": {"name": "kedmi"},
        },
        {
            "prior": {"name": "conditional", "width": 4, "least": 0.5, "top": 5},
            "attack": {"name": "plgmi"},
        },
        {"prior": {"name": "context", "width": 8, "diversity": 0.5}},
        {
            "prior": {"name": "students", "base": TINY["prior"], "students": [STUDENT]},
            "attack": {"name": "lomma"},
        },
        {"attack": {"name": "brepmi", "points": 8, "batch": 32}},
        {"defenses": [{"name": "bido"}]},
        {"target": SMALL | {"start": "public"}},
    ],
    ids=lambda changes: "-".join(
        str(value["name"]) if isinstance(value, dict) and "name" in value else key
        for key, value in changes.items()
    ),
)
def test_methods_are_rehearsed_by_their_own_code(tmp_path, changes):
    found = need(tmp_path, **changes)
    assert found.unknown == ""
    assert found.bytes > resident() // 2


class Stubborn(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(768, classes)

    def forward(self, images):
        assert images.detach().numpy() is not None
        return self.layer(images.flatten(1))


def stubborn(classes, image_shape):
    return Stubborn(classes)


def test_what_cannot_be_rehearsed_is_said_and_nothing_stays_changed(tmp_path):
    before, autocast, device = (
        torch.get_rng_state(),
        torch.autocast,
        os.environ.get("FROSTGLASS_DEVICE"),
    )
    found = need(tmp_path, target={"model": f"{__name__}:stubborn"})
    assert found.unknown.startswith("target ")
    assert "stubborn cannot be rehearsed: " in found.unknown
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.autocast is autocast
    assert os.environ.get("FROSTGLASS_DEVICE") == device
    assert not (tmp_path / "store").exists()


def test_students_look_at_every_picture_too(monkeypatch):
    for name, seconds in (
        ("_training_seconds", 0.004),
        ("_student_seconds", 0.01),
        ("_critic_seconds", 0.08),
        ("_generator_seconds", 0.003),
    ):
        monkeypatch.setattr(cost, name, lambda *_, seconds=seconds: seconds)
    exp = experiments(
        TINY
        | {"prior": {"name": "students", "base": TINY["prior"], "students": [{"model": "cnn"}]}}
    )[0][1]
    assert cost._look_seconds(Lomma(), exp, 4, cost.Once()) == pytest.approx(0.004 + 0.01 + 0.02)
    alone = Lomma(students=False, regulariser="off")
    assert cost._look_seconds(alone, exp, 4, cost.Once()) == pytest.approx(0.004 + 0.02)
    embedded = SimpleNamespace(data=exp.data, target=exp.target, prior=Pretrained())
    assert cost._look_seconds(alone, embedded, 4, cost.Once()) == pytest.approx(0.004 + 0.003)


def test_a_stylegan_that_is_read_is_not_trained(monkeypatch):
    monkeypatch.setattr(cost, "_generator_seconds", lambda *_: 0.5)
    monkeypatch.setattr(cost, "_training_seconds", lambda *_: 0.004)
    read, trained = (
        experiments(TINY | {"prior": {"name": "stylegan2"} | more, "attack": {"name": "ppa"}})[0][1]
        for more in ({"weights": "w"}, {})
    )
    assert cost.prior_work(read.prior, (3, 16, 16), 4, 80, cost.Once()) == ("load weights", 0.5)
    assert cost._look_seconds(read.attack, read, 4, cost.Once()) == pytest.approx(0.504)
    assert not trained.prior.ready


CHILD = """
import json, sys
from frostglass.audit.config import experiments
from frostglass.audit.grid import run_all
from frostglass.plan.memory import foreseen, most_resident
from frostglass.store.store import Store
settings = json.loads(sys.argv[1])
store = Store(sys.argv[2])
need = foreseen(experiments(settings), store, lambda data: data.counts())
run_all(settings, store)
sys.stdout.write(json.dumps([need.bytes, most_resident(), need.step, need.unknown]))
"""


def test_a_run_takes_what_was_foreseen(tmp_path):
    wide = TINY | {
        "target": SMALL | {"options": {"width": 32}},
        "prior": TINY["prior"] | {"width": 16, "batch": 64},
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(wide), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    said, taken, step, unknown = json.loads(done.stdout)
    assert (bool(step), unknown) == (True, "")
    assert 0.75 < said / taken < 1.25


def test_a_simulated_attacker_is_foreseen_too(tmp_path):
    def needed(attributes=(), **defense):
        return need(
            tmp_path, target=SMALL | {"cut": "stage2", "attributes": attributes}, defenses=[defense]
        )

    few, many = (needed(name="adv_learn", decoder_width=width) for width in (8, 128))
    with torch.device("meta"):
        decoder = build_decoder((8, 4, 4), (3, 16, 16), width=128)
    weights = sum(weight.nbytes for weight in decoder.parameters())
    assert many.bytes - few.bytes > 4 * weights  # with gradients and Adam's two means
    assert not few.unknown + many.unknown + needed(name="tiprdc", reader_width=4, epochs=1).unknown
    described = needed(["hat", "beard"], name="disco", pruner_width=4, decoder_width=4)
    assert described.unknown.startswith(
        "scores cannot be rehearsed"
    )  # of a target that tells no people; its training could be
