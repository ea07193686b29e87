"""The ledger counts memory and work of code on meta tensors, compared with counts by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.models.build import build
from frostglass.plan.ledger import HEAP_GAPS, META, REDIRECTED, Cost, Ledger
from frostglass.plan.time import Machine, calibrate, this_machine
from frostglass.runtime.memory import HEAP
from frostglass.store.store import Store


def network(device):
    """Convolution, ReLU and linear layer on images of 3 × 8 × 8; 4 channels, 5 logits."""
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
    return nn.Sequential(*layers).to(device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("count", [2, 4])
def test_live_memory_equals_what_autograd_keeps(device, count):
    module, ledger = network(device), Ledger()
    with ledger:
        images = torch.zeros(count, 3, 8, 8, device=device)
        logits = module(images)
        # The convolution keeps its input, ReLU its output; the convolution's output is freed.
        assert ledger.now == 4 * count * (3 * 64 + 4 * 64 + 5)
        del logits
        assert ledger.now == 4 * count * 3 * 64
        with torch.no_grad():
            logits = module(images)
        assert ledger.now == 4 * count * (3 * 64 + 5)
    del images, logits
    assert ledger.now == 0


def test_weights_gradients_and_optimiser_do_not_grow_with_the_batch():
    kept = []
    for count in (2, 4):
        ledger = Ledger()
        with ledger:
            module = network("meta")
            optimizer = torch.optim.Adam(module.parameters())
            for _ in range(2):
                loss = module(torch.zeros(count, 3, 8, 8, device="meta")).sum()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            del loss
            kept.append(ledger.now)
    weights = sum(weight.nbytes for weight in module.parameters())
    assert kept == [4 * weights] * 2


def test_views_and_in_place_operators_are_counted_once():
    ledger = Ledger()
    with ledger:
        images = torch.zeros(4, 8, device="meta")
        view = images.view(8, 4).relu_().add_(1)[2:].T
        assert ledger.now == 4 * 32
    del images
    assert ledger.now == 4 * 32  # a view keeps the whole storage
    del view
    assert ledger.now == 0


def test_small_blocks_stay_in_the_heap_and_large_ones_are_returned():
    ledger = Ledger()
    with ledger:
        torch.zeros(1000, device="meta")
        torch.zeros(HEAP // 4, device="meta")
        with ledger.measure() as cost:
            pass
        assert cost.memory == int(HEAP_GAPS * 4000)
        with ledger.measure() as cost:
            large = torch.zeros(HEAP // 4, device="meta")
            small = torch.zeros(500, device="meta")  # fits where the first block was
            assert ledger.now == large.nbytes + small.nbytes
        assert cost.memory == HEAP + int(HEAP_GAPS * 4000)
        with ledger.measure() as cost:
            ledger.charge(3000, HEAP)
        assert cost.memory == 2 * HEAP + int(HEAP_GAPS * 5000)


def test_a_measurement_excludes_those_inside_it():
    ledger = Ledger()
    with ledger, ledger.measure() as outer:
        torch.zeros(8, device="meta").add(1)
        with ledger.measure() as inner:
            torch.zeros(8, device="meta").add(1).mul(2)
    assert (outer.calls, inner.calls) == (2, 3)


def test_convolutions_copy_to_another_layout():
    ledger, layer = Ledger(), nn.Conv2d(3, 4, 1, bias=False, device="meta")
    with ledger, torch.no_grad(), ledger.measure() as cost:
        layer(torch.zeros(2, 3, 8, 8, device="meta"))
    read, weight, written = 4 * 2 * 3 * 64, 4 * 12, 4 * 2 * 4 * 64
    assert cost.memory == int(HEAP_GAPS * (2 * read + weight + 2 * written))
    assert cost.moved == read + (read + weight + written)  # zeros, then the convolution


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("layer", "places"),
    [
        (nn.Conv2d(4, 8, 3, padding=1, bias=False), 64),
        (nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), 16),
        (nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), 64),
        (nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1, bias=False), 64),
    ],
)
def test_flops_of_convolutions_equal_the_closed_form(layer, places, device):
    layer = layer.to(device)
    images = torch.zeros(2, 4, 8, 8, device=device, requires_grad=True)
    forward = 2 * 2 * places * layer.weight.numel()
    with Ledger() as ledger:
        with ledger.measure() as cost:
            result = layer(images).sum()
        assert cost.conv == forward
        with ledger.measure() as cost:
            result.backward()
        assert cost.conv == 2 * forward


def test_flops_of_matrix_products_equal_the_closed_form():
    layer = nn.Linear(8, 3, device="meta")
    with Ledger() as ledger, ledger.measure() as cost, torch.no_grad():
        layer(torch.zeros(5, 8, device="meta"))
    assert (cost.matmul, cost.conv) == (2 * 5 * 8 * 3, 0)


def test_code_that_reads_meta_tensors_gets_values():
    ghost = torch.zeros(3, 2, device="meta")
    with Ledger():
        assert ghost.sum().item() == 1.0
        assert ghost.long().sum().item() == 0
        assert bool(ghost.isfinite().all())
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


def test_repeated_operators_give_the_same_shapes_and_cost():
    images = torch.zeros(2, 3, 8, 8, device="meta", requires_grad=True)
    module, costs = network("meta"), []
    with Ledger() as ledger:
        for _ in range(2):
            with ledger.measure() as cost:
                logits = module(images)
                (gradient,) = torch.autograd.grad(logits.sum(), images)
                assert (logits.shape, gradient.shape) == ((2, 5), (2, 3, 8, 8))
            costs.append((cost.calls, cost.conv, cost.matmul, cost.moved))
    assert costs[0] == costs[1]


def test_large_tensors_are_created_on_the_meta_device():
    with Ledger():
        assert nn.Linear(1024, 1024).weight.is_meta
        assert not nn.Linear(8, 8).weight.is_meta
        assert not torch.arange(REDIRECTED).is_meta  # indices are used as they are
    assert not nn.Linear(1024, 1024).weight.is_meta


# --- seconds --------------------------------------------------------------------------------------


def test_seconds_are_linear_in_the_cost():
    machine = Machine(calls=1.0, conv=2.0, matmul=3.0, moved=4.0)
    cost = Cost(calls=1, conv=10, matmul=100, moved=1000)
    assert machine.seconds(cost) == 1 + 20 + 300 + 4000
    assert machine.seconds(cost.plus(cost, 2.0)) == 3 * machine.seconds(cost)


def test_a_training_step_takes_about_as_long_as_predicted():
    """CPU time of one thread is compared: other processes must not disturb it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        machine = calibrate()
        module = build("cnn", classes=10, image_shape=(3, 32, 32), seed=0, width=32)
        images, labels = torch.rand(32, 3, 32, 32), torch.zeros(32, dtype=torch.long)

        def step():
            module.zero_grad(set_to_none=True)
            F.cross_entropy(module(images), labels).backward()

        from frostglass.plan.time import _fastest

        seconds = _fastest(step)
    finally:
        torch.set_num_threads(threads)
    module, images, labels = module.to(META), images.to(META), labels.to(META)
    with Ledger() as ledger, ledger.measure() as cost:
        step()
    assert 1 / 3 < machine.seconds(cost) / seconds < 3


def test_constants_are_kept_in_the_store_and_only_there(tmp_path, monkeypatch):
    measured = []
    fixed = Machine(1.0, 2.0, 3.0, 4.0)
    monkeypatch.setattr("frostglass.plan.time.calibrate", lambda: measured.append(1) or fixed)
    assert this_machine(tmp_path / "nothing") == fixed
    assert not (tmp_path / "nothing").exists()
    store = Store(tmp_path / "store")
    store.create()
    assert this_machine(store.root) == this_machine(store.root) == fixed
    assert len(measured) == 2
    Store(store.root)  # still a store
