"""Leases: one owner per step, dead owners evicted, living ones left alone."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from frostglass.runtime.processes import machine_name
from frostglass.store import lease as lease_module
from frostglass.store.lease import Lease, LeaseLost, owner_of
from killing import dead_owner


def test_a_lease_has_one_owner(tmp_path):
    with Lease.claim(tmp_path / "x.lease") as lease:
        assert owner_of(tmp_path / "x.lease") == lease.owner
        assert f"~{os.getpid()}~" in lease.owner
        assert Lease.claim(tmp_path / "x.lease") is None
        lease.check()
        assert [path.name for path in tmp_path.iterdir()] == ["x.lease"]
    assert list(tmp_path.iterdir()) == []
    assert owner_of(tmp_path / "x.lease") == ""


def test_a_dead_owner_on_this_machine_is_evicted_at_once(tmp_path):
    (tmp_path / "x.lease").mkdir()
    (tmp_path / "x.lease" / dead_owner()).touch()
    with Lease.claim(tmp_path / "x.lease") as lease:
        assert os.listdir(tmp_path / "x.lease") == [lease.owner]


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that stands still until a test moves it; sleeping moves it too."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(lease_module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(lease_module.time, "sleep", lambda seconds: move(clock, seconds))
    return clock


def move(clock, seconds):
    clock.now += seconds


@pytest.mark.parametrize("ahead", [-7200, 0, 7200])
@pytest.mark.parametrize("owner", ["elsewhere-00000000~1~00", "not an owner"])
def test_a_silent_owner_elsewhere_is_evicted_after_a_minute_whatever_its_clock(
    tmp_path, clock, owner, ahead
):
    place = tmp_path / "x.lease"
    place.mkdir()
    beat = place / owner
    beat.touch()
    os.utime(beat, (time.time() + ahead, time.time() + ahead))
    assert Lease.claim(place) is None, "its silence has not been watched yet"
    clock.now += 59
    assert Lease.claim(place) is None
    clock.now += 2
    assert Lease.claim(place) is not None
    assert not beat.exists()


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_a_living_owner_whose_clock_is_wrong_keeps_its_lease(tmp_path, clock, ahead):
    place = tmp_path / "x.lease"
    place.mkdir()
    beat = place / "elsewhere-00000000~1~00"
    beat.touch()
    for heartbeat in range(20):
        when = time.time() + ahead + heartbeat
        os.utime(beat, (when, when))
        assert Lease.claim(place) is None
        clock.now += 50


def test_a_command_that_asks_once_watches_silent_owners_together(tmp_path, clock):
    places = [tmp_path / name for name in ("x.lease", "y.lease", "mine.lease")]
    for place in places[:2]:
        place.mkdir()
        (place / "elsewhere-00000000~1~00").touch()
        assert Lease.claim(place) is None
    with Lease.claim(places[2]):
        assert Lease.claim_after_watching(places[2]) is None, "a process of this machine lives"
        assert clock.now == 1000
    assert all(Lease.claim_after_watching(place) for place in places[:2])
    assert 1060 < clock.now < 1070


def test_a_command_that_asks_once_leaves_a_living_owner(tmp_path, clock, monkeypatch):
    place = tmp_path / "x.lease"
    place.mkdir()
    beat = place / "elsewhere-00000000~1~00"
    beat.touch()

    def sleep(seconds):
        os.utime(beat, (5, 5))

    monkeypatch.setattr(lease_module.time, "sleep", sleep)
    assert Lease.claim_after_watching(place) is None
    assert beat.exists()


def test_an_owner_of_another_machine_is_not_evicted_by_its_process_number(tmp_path):
    machine, pid, token = dead_owner().split("~")
    (tmp_path / "x.lease").mkdir()
    (tmp_path / "x.lease" / f"other-{machine}~{pid}~{token}").touch()
    assert Lease.claim(tmp_path / "x.lease") is None


def test_a_late_eviction_does_not_affect_the_next_owner(tmp_path, monkeypatch):
    """Two processes see a stale lease; the slower one acts when the faster one already owns it."""
    place = tmp_path / "x.lease"
    place.mkdir()
    (place / dead_owner()).touch()
    stale, winner = lease_module._stale, []

    def slow(folder: Path, owner: str) -> bool:
        verdict = stale(folder, owner)
        if not winner:
            winner.append("about to be")
            winner[0] = Lease.claim(place)
        return verdict

    monkeypatch.setattr(lease_module, "_stale", slow)
    assert Lease.claim(place) is None
    assert os.listdir(place) == [winner[0].owner]
    winner[0].check()


def test_a_lost_lease_is_detected_and_does_not_affect_the_next_owner(tmp_path):
    with Lease.claim(tmp_path / "x.lease") as lost:
        (tmp_path / "x.lease" / lost.owner).unlink()
        with Lease.claim(tmp_path / "x.lease") as next_owner:
            with pytest.raises(LeaseLost, match=r"x.lease was taken over by another process"):
                lost.check()
            lost.__exit__()
            next_owner.check()
        assert list(tmp_path.iterdir()) == []


def test_claims_in_progress_are_not_removed(tmp_path):
    living = tmp_path / f"x.lease-{machine_name()}~{os.getpid()}~00"
    living.mkdir()  # just created, without its owner's file yet
    dead = tmp_path / f"x.lease-{dead_owner()}"
    dead.mkdir()
    with Lease.claim(tmp_path / "x.lease") as lease:
        lease.sweep()
    assert list(tmp_path.iterdir()) == [living]
