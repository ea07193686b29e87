"""Steps made by several processes: each once, whoever dies, with the bytes of one process."""

import copy
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frostglass.cli.workers import Spread
from frostglass.core.errors import ConfigError, RunError, StoreError
from frostglass.data._gather import UnreadableImages
from frostglass.plan import threads as threads_module
from frostglass.runtime.processes import is_alive
from frostglass.store.executor import Assignment, Executor, Missing, Outcome, Pending, together
from frostglass.store.files import Checkpoint, Work, read_json, write_json
from frostglass.store.sharing import open_parts
from frostglass.store.step import Task
from frostglass.store.store import Store
from frostglass.workers import cluster, processes, schedule
from frostglass.workers.cluster import RayTasks
from frostglass.workers.processes import worker_processes
from frostglass.workers.schedule import executing, only_result, results
from frostglass.workers.worker import Setup, Worker
from killing import ended, fork, run, tree
from steps import Product, step

PARTS = 6


def logged(folder: Path, line: str) -> None:
    """Note outside the store that something was done, and by whom."""
    with open(folder / "log", "a") as file:
        file.write(f"{os.getpid()} {line}\n")


def lines(folder: Path) -> list[list[str]]:
    path = folder / "log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def make_logged(name: str, *, seed: int, folder: str, **inputs: Any) -> Product:
    logged(Path(folder), name)
    if (Path(folder) / f"fail-{name}").exists():
        raise RunError(f"{name} cannot be made")
    if (Path(folder) / f"bug-{name}").exists():
        raise ZeroDivisionError("a bug")
    trap = Path(folder) / f"die-{name}"
    if trap.exists():
        trap.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return Product(torch.full((2,), float(seed)))


def job(names: list[str], folder: Path, store: Store) -> list[float]:
    """Make independent steps, then one that needs all of them."""
    made = together(
        *(
            partial(store.step, step(make_logged), name, folder=str(folder), seed=number)
            for number, name in enumerate(names)
        )
    )
    last = store.step(step(make_logged), "last", folder=str(folder), made=made, seed=9)
    return [each.values[0].item() for each in (*made, last)]


class Inline(Executor):
    """Carries out assignments in this process, one after the other; remembers all."""

    def __init__(self, store: Store, count: int = 2, dying: int = 0):
        self.worker, self.count, self.dying = Worker(Setup.of(store, 1)), count, dying
        self.given: list[Assignment] = []
        self.together = 0  # the most assignments that were open at once
        self._open: list[Assignment] = []

    @property
    def free(self) -> int:
        return self.count - len(self._open)

    def submit(self, assignment: Assignment) -> None:
        self.given.append(assignment)
        self._open.append(assignment)
        self.together = max(self.together, len(self._open))

    def wait(self, seconds: float) -> list[tuple[Assignment, Outcome]]:
        assignment = self._open.pop(0)
        if self.dying:
            self.dying -= 1
            return [(assignment, Outcome(lost="signal 9"))]
        return [(assignment, self.worker.work_on(assignment))]

    def close(self) -> None:
        pass


class Scripted(Inline):
    """Gives outcomes of the makers of steps first, those of helpers before; then works."""

    def __init__(self, store: Store, script: list[Outcome], helpers_die: bool = False, count=1):
        super().__init__(store, count)
        self.script, self.helpers_die = script, helpers_die

    def wait(self, seconds: float) -> list[tuple[Assignment, Outcome]]:
        helpers = [each for each in self._open if each.helping]
        if self.helpers_die and helpers:
            self._open.remove(helpers[0])
            return [(helpers[0], Outcome(lost="NodeDiedError"))]
        if self.script:
            return [(self._open.pop(0), self.script.pop(0))]
        return super().wait(seconds)


def test_together_returns_results_in_order_and_names_all_that_is_missing():
    assert together(lambda: 1, lambda: "two") == [1, "two"]
    first, second = (Missing("target", key, Path(key)) for key in ("a", "b"))

    def lacks(missing: Missing) -> None:
        raise Pending(missing)

    with pytest.raises(Pending) as raised:
        together(partial(lacks, first), lambda: 1, lambda: together(partial(lacks, second)))
    assert raised.value.missing == (first, second)


def test_independent_steps_are_assigned_together_and_each_once(tmp_path):
    store = Store(tmp_path / "store")
    inline = Inline(store)
    jobs = {"one": partial(job, ["a", "b"], tmp_path), "two": partial(job, ["a", "c"], tmp_path)}
    with executing(store, inline, 1):
        done = dict(results(jobs, store))
    assert done == {"one": [0.0, 1.0, 9.0], "two": [0.0, 1.0, 9.0]}
    names = [name for _, name in lines(tmp_path)]
    assert sorted(names) == ["a", "b", "c", "last", "last"]
    assert inline.together == 2
    assert store.executor is None
    assert store.obtain == store.ensure


def test_a_failed_step_ends_the_jobs_that_need_it(tmp_path):
    (tmp_path / "fail-b").touch()
    store = Store(tmp_path / "store")
    jobs = {"one": partial(job, ["a", "b"], tmp_path), "two": partial(job, ["c"], tmp_path)}
    alone = Store(tmp_path / "alone")
    with executing(store, Inline(store), 1):
        spread = dict(results(jobs, store))
    for done in (spread, dict(results(jobs, alone))):
        assert isinstance(done["one"], RunError)
        assert str(done["one"]) == "b cannot be made"
        assert done["two"] == [0.0, 9.0]
    with executing(store, Inline(store), 1), pytest.raises(RunError, match="b cannot be made"):
        only_result(jobs["one"], store)


def test_a_bug_in_a_worker_keeps_its_traceback(tmp_path):
    (tmp_path / "bug-b").touch()
    store = Store(tmp_path / "store")
    with (
        executing(store, Inline(store), 1),
        pytest.raises(RuntimeError, match=r"make_logged(.|\n)*ZeroDivisionError: a bug"),
    ):
        only_result(partial(job, ["a", "b"], tmp_path), store)


@pytest.mark.parametrize("deaths", [2, 9])
def test_a_step_whose_workers_die_is_given_again_but_not_for_ever(tmp_path, deaths):
    store = Store(tmp_path / "store")
    with executing(store, Inline(store, count=1, dying=deaths), 1):
        ((_, done),) = results({"": partial(job, ["a"], tmp_path)}, store)
    if deaths == 2:
        assert done == [0.0, 9.0]
    else:
        assert "its worker died (signal 9), 3 times: give more memory" in str(done)


def test_what_a_worker_cannot_see_yet_is_assigned_again(tmp_path):
    """A network folder may show a finished step late."""
    store = Store(tmp_path / "store")
    worker = Worker(Setup.of(store, 1))
    assert worker._store.devices == store.devices == 1
    late = Assignment(partial(job, ["a"], tmp_path), "target", "0" * 24)
    outcome = worker.work_on(late)
    assert outcome.unseen.startswith("target ")
    assert not outcome.unseen.startswith("target 0000")
    assert lines(tmp_path) == []
    store = Store(tmp_path / "store")
    with executing(store, Scripted(store, [Outcome(unseen="split 12345678")]), 1):
        assert only_result(partial(job, ["a"], tmp_path), store) == [0.0, 9.0]


def test_workers_that_never_see_what_is_finished_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "UNSEEN_SECONDS", 0.0)
    store = Store(tmp_path / "store")
    expected = "workers do not find split 12345678 in the store: all need the same store, config"
    with (
        executing(store, Scripted(store, [Outcome(unseen="split 12345678")]), 1),
        pytest.raises(RunError, match=expected),
    ):
        only_result(partial(job, ["a"], tmp_path), store)


def test_helpers_that_die_neither_fail_the_step_nor_are_sent_again_at_once(tmp_path):
    """All helpers of a node die with it, and one that lacks memory would die again."""
    store = Store(tmp_path / "store")
    task = shared_task(tmp_path, 0.0, store.root)
    (task.partial / "parts").mkdir(parents=True)
    write_json(task.partial / "parts" / "parts.json", [f"part-{n}" for n in range(PARTS)])
    write_json(store.root / "store.json", {"format": 2})
    scripted = Scripted(store, [Outcome(lost="NodeDiedError")], helpers_die=True, count=4)
    with executing(store, scripted, 1):
        assert only_result(partial(sharing_job, tmp_path, 0.0), store) == list(range(PARTS))
    assert [each.helping for each in scripted.given] == [False, True, True, True, False]


class Unreadable:
    """Stands for an object of a class that a worker cannot import."""

    def __call__(self, store: Store) -> None:
        store.step(step(), None, seed=0)

    def __reduce__(self):
        return int, ("no number",)


def test_a_job_that_cannot_reach_a_worker_is_an_error_of_one_line(tmp_path, forked):
    reason = r"cannot read its assignment \(ValueError: invalid literal .*: define your own classes"
    for told, asked in (
        (reason, Unreadable()),
        ("cannot send this run", lambda s: Unreadable()(s)),
    ):
        store = Store(tmp_path / "store")
        with worker_processes(store, 2), pytest.raises(ConfigError, match=told):
            only_result(asked, store)


def test_every_error_survives_the_way_from_a_worker():
    errors = (ConfigError(["one", "two"]), UnreadableImages(["a.png", "b.png"], 3), RunError("x"))
    for error in errors:
        back = copy.deepcopy(error)  # by the same protocol as pickle
        assert (type(back), str(back), back.problems) == (type(error), str(error), error.problems)
        assert vars(back) == vars(error)


@pytest.fixture
def forked(monkeypatch):
    """Start workers by a plain fork, at once; a test has no threads that a copy would miss."""
    monkeypatch.setattr(processes, "START", "fork")


def test_processes_end_with_the_files_of_one(tmp_path, forked):
    names = ["a", "b", "c", "d"]
    log = tmp_path / "logs"  # one for both: its name is part of keys
    log.mkdir()
    alone, store = Store(tmp_path / "alone"), Store(tmp_path / "store")
    expected = only_result(partial(job, names, log), alone)
    (log / "log").unlink()
    with worker_processes(store, 2):
        assert only_result(partial(job, names, log), store) == expected
    assert tree(store.root) == tree(alone.root)
    makers = {pid for pid, _ in lines(log)}
    assert len(makers) == 2
    assert str(os.getpid()) not in makers
    assert not any(is_alive(int(pid)) for pid in makers)


def test_a_killed_worker_is_replaced(tmp_path, forked):
    (tmp_path / "die-b").touch()
    events = []
    store = Store(tmp_path / "store", listener=events.append)
    with worker_processes(store, 2):
        assert only_result(partial(job, ["a", "b"], tmp_path), store) == [0.0, 1.0, 9.0]
    assert [name for _, name in lines(tmp_path)].count("b") == 2
    notes = [event.note for event in events if event.kind == "waiting"]
    assert notes == ["its worker died (signal 9)"]


def test_an_interrupt_leaves_no_worker_and_no_lease(tmp_path, forked):
    def body() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        store = Store(tmp_path / "store")
        with worker_processes(store, 2):
            only_result(partial(sharing_job, tmp_path, 0.2), store)

    pid = fork(body)
    # Not before: Python ignores an exception that is raised while it forks.
    wait_for(lambda: len({maker for maker, _ in lines(tmp_path)}) == 2)
    os.kill(pid, signal.SIGINT)
    assert ended(pid) == 1
    assert not any(is_alive(int(maker)) for maker, _ in lines(tmp_path))
    assert list((tmp_path / "store").rglob("*.lease")) == []
    store = Store(tmp_path / "store")
    assert only_result(partial(sharing_job, tmp_path, 0.0), store) == list(range(PARTS))


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def make_shared(pause: float, *, folder: str, work: Work, **_: Any) -> Product:
    """A step of `PARTS` parts; the pause is no part of its result."""

    def part(number: int) -> Checkpoint:
        logged(Path(folder), str(number))
        time.sleep(pause)
        return {"value": torch.tensor(float(number))}, {"number": number}

    parts = work.share([f"part-{number}" for number in range(PARTS)], part)
    work.save("after", {"value": torch.zeros(1)})  # a helper gets no further
    return Product(torch.stack([tensors["value"] for tensors, _ in parts]))


def sharing_job(folder: Path, pause: float, store: Store) -> list[float]:
    shared = step(lambda _, **more: make_shared(pause, **more))
    return store.step(shared, None, folder=str(folder), seed=0).values.tolist()


def shared_task(folder: Path, pause: float, root: Path) -> Task[Any]:
    shared = step(lambda _, **more: make_shared(pause, **more))
    return Task.of(shared, None, {"folder": str(folder)}, 0, root)


def test_helpers_make_parts_and_leave(tmp_path):
    root = tmp_path / "store"
    owner = fork(lambda: sharing_job(tmp_path, 0.1, Store(root)))
    task = shared_task(tmp_path, 0.1, root)
    wait_for(lambda: open_parts(task.partial)[1])
    helper = fork(lambda: Store(root).help(task))
    assert (ended(owner), ended(helper)) == (0, 0)
    assert sorted(part for _, part in lines(tmp_path)) == sorted(map(str, range(PARTS)))
    assert {int(pid) for pid, _ in lines(tmp_path)} == {owner, helper}
    run(lambda: sharing_job(tmp_path, 0.0, Store(tmp_path / "alone")))
    assert tree(root) == tree(tmp_path / "alone")


@pytest.mark.parametrize("killed", ["owner", "helper"])
def test_parts_of_a_killed_process_are_made_by_the_other(tmp_path, killed):
    """Finished parts of either are kept, and only the one that was being made is made again."""
    root = tmp_path / "store"
    pids = {"owner": fork(lambda: sharing_job(tmp_path, 0.1, Store(root)))}
    task = shared_task(tmp_path, 0.1, root)
    wait_for(lambda: open_parts(task.partial)[1])
    pids["helper"] = fork(lambda: Store(root).help(task))
    wait_for(lambda: {int(pid) for pid, _ in lines(tmp_path)} == set(pids.values()))
    os.kill(pids[killed], signal.SIGKILL)
    assert ended(pids.pop(killed)) == -signal.SIGKILL
    (left,) = pids.values()
    assert ended(left) == 0
    run(lambda: sharing_job(tmp_path, 0.0, Store(root)))
    made = [part for _, part in lines(tmp_path)]
    assert set(made) == set(map(str, range(PARTS)))
    assert len(made) <= PARTS + 1
    run(lambda: sharing_job(tmp_path, 0.0, Store(tmp_path / "alone")))
    assert tree(root) == tree(tmp_path / "alone")


def make_in_turns(_: None, *, folder: str, work: Work, **__: Any) -> Product:
    """A step whose later parts need the earlier ones, as the searches of an attack need starts."""

    def part(number: int) -> Checkpoint:
        logged(Path(folder), str(number))
        time.sleep(0.1 if number else 0.3)  # whoever makes another has to wait for the first
        return {"value": torch.tensor(float(number))}, {}

    values = []
    for turn in ((0, 1), (2, 3, 4, 5)):
        names = [f"part-{number}" for number in turn]
        values += [t["value"] for t, _ in work.share(names, lambda n, turn=turn: part(turn[n]))]
    work.save("after", {"value": torch.zeros(1)})
    return Product(torch.stack(values))


def test_a_helper_stays_for_parts_that_follow(tmp_path):
    root, turns = tmp_path / "store", step(make_in_turns)
    task = Task.of(turns, None, {"folder": str(tmp_path)}, 0, root)
    owner = fork(lambda: Store(root).step(turns, None, folder=str(tmp_path), seed=0))
    wait_for(lambda: open_parts(task.partial)[1])
    helper = fork(lambda: Store(root).help(task))
    assert (ended(owner), ended(helper)) == (0, 0)
    makers = {int(part): int(pid) for pid, part in lines(tmp_path)}
    assert {makers[number] for number in (2, 3, 4, 5)} == {owner, helper}


def test_the_conditions_of_helpers_are_recorded(tmp_path):
    root = tmp_path / "store"
    owner = fork(lambda: sharing_job(tmp_path, 0.1, Store(root)))
    task = shared_task(tmp_path, 0.1, root)
    wait_for(lambda: open_parts(task.partial)[1])

    def help_with_more_threads() -> None:
        torch.set_num_threads(3)
        Store(root).help(task)

    helper = fork(help_with_more_threads)
    assert (ended(owner), ended(helper)) == (0, 0)
    assert {int(pid) for pid, _ in lines(tmp_path)} == {owner, helper}
    conditions = read_json(task.final / "manifest.json")["conditions"]
    assert {each["threads"] for each in conditions} == {torch.get_num_threads(), 3}


def test_free_workers_help_with_the_parts_of_a_running_step(tmp_path, forked):
    store = Store(tmp_path / "store")
    with worker_processes(store, 3):
        assert only_result(partial(sharing_job_by_name, tmp_path), store) == list(range(PARTS))
    assert sorted(part for _, part in lines(tmp_path)) == sorted(map(str, range(PARTS)))
    assert len({pid for pid, _ in lines(tmp_path)}) > 1


def slowly_shared(_: None, **more: Any) -> Product:
    return make_shared(0.3, **more)


def sharing_job_by_name(folder: Path, store: Store) -> list[float]:
    return store.step(step(slowly_shared), None, folder=str(folder), seed=0).values.tolist()


@pytest.mark.parametrize(
    ("speedups", "cores", "threads"),
    [({}, 1, 1), ({2: 1.2}, 8, 1), ({2: 1.9, 4: 3.7, 8: 5.0}, 8, 4), ({2: 2.0, 4: 4.0}, 6, 4)],
)
def test_threads_are_added_while_they_are_worth_their_cores(speedups, cores, threads, monkeypatch):
    seconds = lambda _, count: 1.0 / {1: 1.0, **speedups}[count]  # noqa: E731
    monkeypatch.setattr(threads_module, "_fastest", seconds)
    assert threads_module.best_threads(lambda: None, cores) == threads


def test_bad_numbers_and_urls_are_refused(tmp_path):
    none = worker_processes(Store(tmp_path), 0)
    with pytest.raises(ConfigError, match="workers: expected at least 1, got 0"), none:
        pass
    for url in ("s3://bucket/store", "gs://b", "file:///store"):
        with pytest.raises(StoreError, match="is a URL, and a store needs the atomic renames"):
            Store(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "0"}, "--workers: expected a number from 1 or auto, got '0'"),
        ({"workers": "two"}, "--workers: expected a number from 1 or auto, got 'two'"),
        ({"on": "dask"}, "--on: expected ray, got 'dask'; --workers is this machine"),
        ({"address": "auto"}, "--address is that of a Ray cluster: add --on ray"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Spread(**options)
    assert Spread("8", "ray", "auto").count == 8
    assert Spread("auto").count is None


class Ray:
    """Stands for Ray: a cluster of two nodes whose tasks run when they are waited for."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

        class NodeDiedError(RayError):
            pass

    def __init__(self):
        self.asked: list[dict[str, Any]] = []
        self.dies = False

    def nodes(self):
        sizes = ({"CPU": 4.0, "memory": 2.0**30}, {"CPU": 2.0, "memory": 2.0**31})
        return [{"Alive": True, "Resources": size} for size in sizes] + [
            {"Alive": False, "Resources": {"CPU": 64.0, "memory": 2.0**40}}
        ]

    def cluster_resources(self):
        return {"CPU": 6.0}

    def remote(self, function):
        ray = self

        class Task:
            def options(self, **options):
                ray.asked.append(options)
                return self

            def remote(self, *args):
                return partial(function, *args)

        return Task()

    def wait(self, references, timeout):
        return references[:1], references[1:]

    def get(self, reference):
        if self.dies:
            raise self.exceptions.NodeDiedError
        return reference()


def test_tasks_ask_a_cluster_for_cores_and_memory(tmp_path):
    ray, events = Ray(), []
    store = Store(tmp_path / "store", listener=events.append)
    sizes = {"target": 2**30}
    tasks = RayTasks(ray, Setup.of(store, 2), None, lambda each: sizes[each.step], store.report)
    assert tasks.free == 3
    with executing(store, tasks, 2):
        assert only_result(partial(job, ["a"], tmp_path), store) == [0.0, 9.0]
    options = {"num_cpus": 2, "num_gpus": 0, "memory": 2**30, "max_retries": 0}
    assert ray.asked == [options, options]
    assert [event.kind for event in events if event.kind != "cached"] == ["start", "done"] * 2


def test_a_cluster_that_cannot_be_started_is_an_error_of_one_line(tmp_path, monkeypatch):
    def init(address, **_):
        raise Exception("the node timed out\nand more")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(cluster, "_ray", lambda: ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    store = Store(tmp_path / "store")
    for address, kind, told in (
        (None, RunError, "--on ray: no Ray cluster could be started on this machine (the node "),
        ("auto", ConfigError, "--address auto: no Ray cluster answers (the node timed out): start"),
    ):
        with pytest.raises(kind, match=re.escape(told)), cluster.ray_cluster(store, address):
            pass


def test_a_node_without_the_folder_of_the_command_is_named(tmp_path):
    setup = Setup(tmp_path / "store", "cpu", 1, 1, tmp_path / "elsewhere")
    outcome = cluster._carry_out(setup, Assignment(partial(job, ["a"], tmp_path), "target", "k"))
    assert str(outcome.error) == (
        f"target k: a node of the Ray cluster cannot use {tmp_path / 'elsewhere'} (No such file or "
        "directory): run the command in a folder that all nodes share"
    )


def test_what_no_node_can_hold_is_refused_and_a_dead_node_is_named(tmp_path):
    ray, store = Ray(), Store(tmp_path / "store")
    with pytest.raises(ConfigError, match="a task needs 8 cores, the largest node of the Ray"):
        RayTasks(ray, Setup.of(store, 8), None, lambda _: 0, store.report)
    setup = Setup(store.root, "cuda", 2, 1, tmp_path)
    with pytest.raises(ConfigError, match="a task needs 2 GPUs, the largest node"):
        RayTasks(ray, setup, None, lambda _: 0, store.report)
    tasks = RayTasks(ray, Setup.of(store, 1), 1, lambda _: 2**32, store.report)
    with executing(store, tasks, 1), pytest.raises(RunError, match=r"target needs about 4.0 GiB"):
        only_result(partial(job, ["a"], tmp_path), store)
    ray.dies = True
    tasks = RayTasks(ray, Setup.of(store, 1), 1, lambda _: 0, store.report)
    with executing(store, tasks, 1), pytest.raises(RunError, match=r"died \(NodeDiedError\), 3"):
        only_result(partial(job, ["a"], tmp_path), store)
