"""Leases: one owner per step, dead owners evicted, living ones left alone."""

import os
import time
from pathlib import Path

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


@pytest.mark.parametrize(("age", "taken"), [(50, False), (70, True)])
@pytest.mark.parametrize("owner", ["elsewhere-00000000~1~00", "not an owner"])
def test_an_owner_elsewhere_is_evicted_after_a_minute_of_silence(tmp_path, owner, age, taken):
    (tmp_path / "x.lease").mkdir()
    beat = tmp_path / "x.lease" / owner
    beat.touch()
    os.utime(beat, (time.time() - age, time.time() - age))
    lease = Lease.claim(tmp_path / "x.lease")
    assert (lease is not None) == taken
    assert beat.exists() != taken


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

    def slow(path: Path, owner: str, now: float) -> bool:
        verdict = stale(path, owner, now)
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
