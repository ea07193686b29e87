"""Studies are made fairly: every item equally often, sides at random, checks that are checks."""

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from feature_folders import CRAFTED, OPEN, make_feature_run
from frostglass.core.errors import ConfigError, DataError, FrostglassError, StoreError
from frostglass.report.load import read_run
from frostglass.runtime.seeding import generator_for
from frostglass.store.manifest import seal
from frostglass.study.assign import EARLY, spread
from frostglass.study.folder import SEALED, read_study
from frostglass.study.make import StudyOptions, make_study, study_links
from run_folders import BIDO, BROKEN, DEFENDED, make_run, tried
from study_visits import study_of_run, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    three = (BROKEN, DEFENDED, {**DEFENDED, "defenses": BIDO})
    options = {"participants": 12, "raters": 3, "shown": 10}
    return study_of_run(tmp_path_factory.mktemp("three"), three, **options)


def trials(folder, protocol=None, check=False):
    return [
        (who, trial, item)
        for who in folder.design.participants
        for trial in who.trials
        for item in [folder.design.items[trial.item]]
        if protocol in (None, item.protocol) and item.check is check
    ]


def test_every_item_is_shown_to_equally_many_and_to_nobody_twice(folder):
    times = Counter(trial.item for _, trial, _ in trials(folder))
    assert set(times.values()) == {3}
    assert len(times) == sum(not item.check for item in folder.design.items)
    for who in folder.design.participants:
        assert len({trial.item for trial in who.trials}) == len(who.trials)
    for protocol in ("pairwise", "identification"):
        loads = Counter(who.id for who, _, _ in trials(folder, protocol))
        assert max(loads.values()) - min(loads.values()) <= 1


def test_a_participant_has_one_protocol(folder):
    counts = Counter(each.protocol for each in folder.design.participants)
    assert counts == {"pairwise": 6, "identification": 6}  # as many items of each
    for who in folder.design.participants:
        assert {folder.design.items[trial.item].protocol for trial in who.trials} == {who.protocol}


def test_pairs_are_all_two_models_of_each_person(folder):
    items = [i for i in folder.design.items if i.protocol == "pairwise" and not i.check]
    pairs = Counter(tuple(sorted(item.models)) for item in items)
    assert pairs == dict.fromkeys(combinations(range(3), 2), 10)
    made = {(e.model, e.person): e.image for e in folder.design.reconstructions}
    for item in items:
        assert item.options == [made[model, item.person] for model in item.models]


def test_identification_has_each_answer_equally_often(folder):
    items = [i for i in folder.design.items if i.protocol == "identification" and not i.check]
    for model in range(3):
        own = [item for item in items if item.models == [model]]
        assert sum(item.truth == item.none for item in own) == len(own) // 5 == 2
    for item in items:
        assert len(set(item.people)) == 4
        among = item.people.index(item.person) if item.person in item.people else item.none
        assert item.truth == among


def test_images_are_those_of_the_run(folder, tmp_path):
    run = read_run(folder.path.parent / "run")
    images = folder.images()
    for each in folder.design.reconstructions:
        assert images[each.image].equal(run.images[f"audit.{each.model}"][each.person, 0])
        columns = run.rows[each.model].columns
        assert each.metrics == {n: v[each.person, 0].item() for n, v in columns.items()}
    for item in folder.design.items:
        shown = images[item.image]
        if item.protocol == "pairwise":
            assert shown.equal(run.images["private"][item.person])
        else:
            real = [run.images["private"][person] for person in item.people]
            assert all(images[o].equal(r) for o, r in zip(item.options, real, strict=True))


def test_an_attention_check_has_the_image_itself_as_an_option(folder):
    checks = [item for item in folder.design.items if item.check]
    for item in checks:
        assert item.options[item.truth] == item.image
        assert item.options.count(item.image) == 1
    for who in folder.design.participants:
        own = [n for n, t in enumerate(who.trials) if folder.design.items[t.item].check]
        assert len(own) >= 2
        assert own[0] < EARLY


def test_orders_and_sides_are_random(folder):
    for protocol, size in (("pairwise", 2), ("identification", 4)):
        orders = [trial.order for _, trial, _ in trials(folder, protocol)]
        firsts = Counter(order[0] for order in orders)
        assert set(firsts) == set(range(size))
        assert max(firsts.values()) < 0.7 * len(orders)
    first = [[trial.item for trial in who.trials] for who in folder.design.participants]
    assert any(sorted(order) != order for order in first)


def test_the_seed_decides_items_and_orders_but_not_links(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    chosen = {"participants": 6, "raters": 2, "people": 6}
    one, two, other = (
        make_study([run], tmp_path / name, StudyOptions(**chosen, seed=seed))
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )
    assert one.design.items == two.design.items
    assert [p.trials for p in one.design.participants] == [
        p.trials for p in two.design.participants
    ]
    assert one.design.items != other.design.items
    assert not set(tokens(one).values()) & set(tokens(two).values())
    assert not {p.id for p in one.design.participants} & {p.id for p in two.design.participants}
    assert one.id != two.id


def test_few_see_a_person_again_where_that_can_be_avoided(folder):
    rng = generator_for(0, "spread")
    items = [i for i in folder.design.items if i.protocol == "identification" and not i.check]
    loads = spread(items, 30, 3, rng)
    seen = [Counter(items[number].person for number in load) for load in loads]
    assert max(max(each.values()) for each in seen) == 1


def test_links_are_long_private_and_all_different(folder):
    links = study_links(folder, "https://study.example.org/")
    assert len(set(links)) == len(folder.design.participants)
    for link in links:
        start, token = link.rsplit("/", 1)
        assert start == "https://study.example.org/p"
        assert len(token) == 32
    assert folder.path.stat().st_mode & 0o77 == 0
    assert {each.stat().st_mode & 0o77 for each in folder.path.iterdir()} == {0}
    assert (folder.path / ".gitignore").read_text() == "*\n"


def test_no_name_of_a_person_is_in_the_folder(tmp_path):
    names = [f"Zuzanna{n}" for n in range(20)]
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], names=names)
    folder = make_study([run], tmp_path / "study", StudyOptions(6, raters=2, people=6))
    for path in folder.path.iterdir():
        assert b"Zuzanna" not in path.read_bytes()


def test_runs_of_features_compare_with_the_image_and_search_among_others(tmp_path):
    run = make_feature_run(tmp_path / "run", [OPEN, CRAFTED], people=8, images=2)
    folder = make_study([run], tmp_path / "study", StudyOptions(6, raters=2, people=6))
    read, images = read_run(run), folder.images()
    for item in folder.design.items:
        if item.check:
            continue
        if item.protocol == "pairwise":
            assert images[item.image].equal(read.images["victims"][item.person, 0])
        else:
            real = [read.images["victims"][person, 1] for person in item.people]
            assert all(images[o].equal(r) for o, r in zip(item.options, real, strict=True))
    assert "similarity" in folder.design.metrics


def test_a_model_can_be_left_out_and_an_attack_chosen(tmp_path):
    audits = [
        tried("margin", 15),
        tried("label only", 5),
        tried("margin", 9, defenses=BIDO),
        tried("label only", 3, defenses=BIDO),
        tried("margin", 7, defenses=[{"name": "mid"}]),
    ]
    run = make_run(tmp_path / "run", audits)
    options = StudyOptions(6, raters=2, people=6, only=("undefended", "BiDO"))
    design = make_study([run], tmp_path / "one", options).design
    assert [(e.label, e.attack) for e in design.models] == [
        ("undefended", "margin"),
        ("BiDO", "margin"),
    ]
    weak = replace(options, attack="label only")
    design = make_study([run], tmp_path / "two", weak).design
    assert [each.attack for each in design.models] == ["label only", "label only"]
    for changed, message in (
        ({"only": ("nobody",)}, r"--only: no model 'nobody' in these runs, which have undefended"),
        ({"attack": "x"}, r"--attack: undefended was not attacked by 'x', but by margin; label"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_study([run], tmp_path / "three", replace(options, **changed))


def test_people_with_a_search_that_stopped_early_are_not_shown(tmp_path):
    audits = [{**BROKEN, "partial": [0, 1, 2]}, {**DEFENDED, "partial": [3]}]
    folder = study_of_run(tmp_path, audits, people=10, raters=1)
    assert {each.person for each in folder.design.reconstructions} <= set(range(4, 10))


def refused(tmp_path, message, audits=(BROKEN, DEFENDED), people=20, **options):
    with pytest.raises(FrostglassError, match=message) as caught:
        study_of_run(tmp_path, audits, people=people, **options)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "study").exists()


def test_a_run_with_one_model_has_nothing_to_compare(tmp_path):
    message = r"compares two models, but there is one \(undefended\): give runs with at least two"
    refused(tmp_path / "a", message, [BROKEN])
    folder = study_of_run(tmp_path / "b", [BROKEN], protocol="identification")
    assert {each.protocol for each in folder.design.participants} == {"identification"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participants": 3}, "expected at least 4, because 2 different people judge each item"),
        ({"participants": 0}, "participants: expected at least 1, got 0"),
        ({"seconds": 0}, "seconds: expected at least 5, got 0"),
        ({"protocol": "ranking"}, "expected one of pairwise, identification, both, got 'ranking'"),
        ({"participants": 4, "people": 160, "shown": 160}, "are 160 for one, more than 150: raise"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, message):
    refused(tmp_path, message, **options)


def test_too_few_people(tmp_path):
    refused(tmp_path, "expected at least 5 people, got 4", people=4)


def test_runs_of_other_people_are_not_one_study(tmp_path):
    one = make_run(tmp_path / "one", [BROKEN])
    two = make_run(tmp_path / "two", [DEFENDED], people=12)
    with pytest.raises(DataError, match=r"\(trial and trial\) are not about the same people"):
        make_study([one, two], tmp_path / "study", StudyOptions())


def test_runs_of_the_same_people_are_one_study(tmp_path):
    one = make_run(tmp_path / "one", [BROKEN])
    two = make_run(tmp_path / "two", [DEFENDED])
    options = StudyOptions(6, raters=2, people=6)
    design = make_study([one, two, one], tmp_path / "study", options).design
    assert [each.label for each in design.models] == ["undefended", "CALoR"]


def test_a_folder_with_answers_is_never_replaced(folder):
    with pytest.raises(ConfigError, match="exists already: a study needs a new folder"):
        make_study([folder.path.parent / "run"], folder.path, StudyOptions())


def changed_design(folder, tmp_path, change):
    """A copy of a study with other content, sealed as if it had been made so."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in SEALED:
        (copy / name).write_bytes((folder.path / name).read_bytes())
    document = json.loads((copy / "study.json").read_text())
    change(document)
    (copy / "study.json").write_text(json.dumps(document))
    seal(copy, SEALED)
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["items"][0].update(image=10_000), "item 0 does not fit the rest"),
        (lambda d: d["items"][0].update(options=[1, 2, 3]), "item 0 does not fit the rest"),
        (lambda d: d["items"][0].update(models=[7, 8]), "item 0 does not fit the rest"),
        (lambda d: d["items"][0].update(check=True), "item 0 does not fit the rest"),
        (lambda d: d["participants"][0]["trials"][0].update(item=9999), "participant p"),
        (lambda d: d["participants"][0]["trials"][0].update(order=[0, 0]), "participant p"),
        (lambda d: d.update(seconds="60"), r"study.json is damaged \(seconds"),
        (lambda d: d.update(more=1), r"study.json is damaged \(more"),
        (lambda d: d["reconstructions"][0]["metrics"].update(ssim="x"), "is damaged"),
    ],
)
def test_damaged_studies_are_refused(folder, tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        read_study(changed_design(folder, tmp_path, change))


def test_a_study_whose_files_changed_is_refused(folder, tmp_path):
    copy = changed_design(folder, tmp_path, lambda document: None)
    with (copy / "images.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(StoreError, match=r"images\.safetensors"):
        read_study(copy)
    with pytest.raises(StoreError, match=r"has no study\.json, so it is not a study"):
        read_study(tmp_path)


def test_spread_is_even_for_any_numbers():
    class Question:
        def __init__(self, person):
            self.person = person

    for participants, raters, items in ((5, 5, 7), (7, 2, 3), (9, 4, 30)):
        rng = generator_for(0, "even")
        loads = spread([Question(n % 4) for n in range(items)], participants, raters, rng)
        sizes = torch.tensor([len(load) for load in loads])
        assert int(sizes.sum()) == items * raters
        assert int(sizes.max() - sizes.min()) <= 1


def test_damaged_links_and_places_that_cannot_be_written(tmp_path):
    folder = study_of_run(tmp_path)
    (folder.path / "links.csv").write_bytes(b"\xff,\n")
    with pytest.raises(StoreError, match=r"links\.csv is damaged, and links cannot be made again"):
        study_links(folder, "http://study")
    (tmp_path / "file").write_text("")
    options = StudyOptions(6, raters=2, people=6)
    with pytest.raises(StoreError, match=r"cannot write .*: choose another place"):
        make_study([tmp_path / "run"], tmp_path / "file" / "study", options)
