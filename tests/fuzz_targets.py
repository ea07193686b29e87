"""What is fuzzed: each target writes valid files and returns a function that changes and reads one.

Where a format could hold code, some of the files do.
"""

import io
import json
import os
import pickle
import random
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn

import nvidia_pickles
from commands import TOY
from feature_folders import CRAFTED, OPEN, make_feature_run
from frostglass.analyses import Analysis, Axis, Curve, Figure, Table, ToyWorld
from frostglass.analyses._files import write_analysis
from frostglass.analyses.base import analyses, unfit
from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import experiments
from frostglass.data._attributes import Attributes
from frostglass.data._images import read_images
from frostglass.defenses.release.crafter import Crafter
from frostglass.deploy.amortizer import TrainedAmortizer
from frostglass.deploy.client import Client, split_model
from frostglass.deploy.server import Server
from frostglass.models.checkpoint import load_target, load_weights, save_target, save_weights
from frostglass.models.foreign import files_of
from frostglass.networks.amortizer import Amortizer
from frostglass.networks.stylegan2.nvidia import read_stylegan2
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.generator import Generator
from frostglass.priors.students import Students
from frostglass.priors.wgan import Wgan
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.seeds import seed_table
from frostglass.store.manifest import MANIFEST, seal
from frostglass.training.build import rebuild_network, untrained
from frostglass.training.settings import Training
from fuzzing import CANARY, changed_bytes, changed_values
from generators import Dcgan, onnx_model
from run_folders import BROKEN, DEFENDED, make_run

Case = Callable[[random.Random], Any]
SHAPE = (3, 16, 16)
CPU = torch.device("cpu")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


class Evil:
    """A value whose pickle creates a file when Python's own unpickler reads it."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {CANARY}",)


def images(folder: Path) -> Case:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    seeds = []
    for mode, kind in [("RGB", each) for each in FORMATS] + [("I;16", "PNG"), ("RGBA", "PNG")]:
        file = io.BytesIO()
        wide = Image.fromarray(pixels[..., 0].astype(np.uint16) * 200)
        picture = wide if mode == "I;16" else Image.fromarray(pixels).convert(mode)
        picture.save(file, kind)
        seeds.append(file.getvalue())

    def case(rng: random.Random) -> Any:
        path = folder / "image.png"
        path.write_bytes(changed_bytes(rng.choice(seeds), rng))
        return read_images([path], size=16, channels=rng.choice((1, 3)), crop="centre")

    return case


def config(folder: Path) -> Case:
    """Only reading: a config may name code, and its files are read later."""
    text = f'{TOY}\n[grid]\nseed = [0, 1]\n[[grid.case]]\ncase = "a"\njudging.images = 2\n'
    path = folder / "config.toml"
    path.write_text(text)
    values = read_config(path)

    def case(rng: random.Random) -> Any:
        if rng.random() < 0.5:
            path.write_bytes(changed_bytes(text.encode(), rng))
            return experiments(read_config(path, ["attack.steps=3"]))
        changed = changed_values(values, rng)
        if not isinstance(changed, dict) or "spy:" in str(changed):
            return None
        return experiments(changed)

    return case


def attributes(folder: Path) -> Case:
    files = [f"p{person}/{number}.png" for person in range(2) for number in range(2)]
    rows = [f"{file},1,0" for file in files]
    seeds = [
        "\n".join(["image,glasses,smiling", *rows]),
        "\n".join(["4", "glasses smiling", *(row.replace(",", " ") for row in rows)]),
        "\n".join(["image,glasses,smiling", *(f'"{file}","true","no"' for file in files)]),
    ]

    def case(rng: random.Random) -> Any:
        path = folder / "table.csv"
        path.write_bytes(changed_bytes(rng.choice(seeds).encode(), rng))
        return Attributes(path).of(files, ["other.png"])

    return case


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def changed_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a safetensors file as JSON, a record in it, or any byte."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = rng.randrange(4)
    if kind == 0:
        return changed_bytes(data, rng)
    record = next(iter(header.get("__metadata__", {})), None)
    if kind == 1 or record is None:
        header = changed_values(header, rng)
    else:
        values = json.loads(header["__metadata__"][record])
        header["__metadata__"][record] = json.dumps(changed_values(values, rng))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def weights(folder: Path) -> Case:
    path = folder / "weights.safetensors"
    save_weights(network(), path)
    whole = path.read_bytes()

    def case(rng: random.Random) -> Any:
        path.write_bytes(changed_safetensors(whole, rng))
        return load_weights(network(), path)

    return case


def torch_files(folder: Path) -> Case:
    state = network().state_dict()
    seeds = []
    for content in (state, {"state_dict": state, "epoch": 3}, {**state, "x": Evil()}):
        for zipped in (True, False):
            file = io.BytesIO()
            torch.save(content, file, _use_new_zipfile_serialization=zipped)
            seeds.append(file.getvalue())

    def case(rng: random.Random) -> Any:
        data = rng.choice(seeds)
        if data.startswith(b"PK") and rng.random() < 0.7:
            data = _with_changed_pickle(data, rng)
        else:
            data = changed_bytes(data, rng)
        path = folder / "weights.pt"
        path.write_bytes(data)
        return load_weights(network(), path)

    return case


def _with_changed_pickle(data: bytes, rng: random.Random) -> bytes:
    """Change the pickle inside a zip archive, whose checksums would hide it from the reader."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            changed = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, changed_bytes(content, rng) if changed else content)
    return file.getvalue()


def priors(folder: Path) -> Case:
    base = Wgan(latent=5, width=4).untrained(SHAPE, 3)
    student = Students(
        students=[{"model": "lenet"}],
        base={"name": "wgan", "latent": 5, "width": 4},
        statistics=0,
    )
    path, seeds = folder / "prior.safetensors", []
    for prior in (base, student.untrained(SHAPE, 3)):
        write_prior(prior, path)
        seeds.append(path.read_bytes())

    def case(rng: random.Random) -> Any:
        path.write_bytes(changed_safetensors(rng.choice(seeds), rng))
        return read_prior(path)

    return case


def _model() -> Any:
    training = Training(model="cnn", options={"width": 4}, cut="stage1")
    target = untrained(training, ("a", "b"), SHAPE, (), seed=0)
    recipe = {"training": asdict(training), "defenses": [], "seed": 0}
    return replace(target, info={"build": recipe})


def clients(folder: Path) -> Case:
    prior = Wgan(latent=5, width=4).untrained(SHAPE, 0)
    client, server = split_model(_model(), Crafter(), prior=prior)
    settings = Amortizer(steps=1, batch=4, width=4)
    shape = client.feature_shape
    amortizer = TrainedAmortizer(settings.network(shape, 5), settings, shape, 5)
    places = {
        replace(client, amortizer=amortizer).save(folder / "client"): Client,
        server.save(folder / "server"): Server,
    }

    def case(rng: random.Random) -> Any:
        place = rng.choice(list(places))
        files = sorted(place.iterdir())
        path = place / "facts.json" if rng.random() < 0.7 else rng.choice(files)

        def read() -> Any:
            with _sealed_again(place, path):
                return places[place].load(place, device=CPU)

        return _with_changed_file(path, rng, read)

    return case


@contextmanager
def _sealed_again(folder: Path, changed: Path) -> Iterator[None]:
    """Let hashes agree with a changed file, so that what reads the file itself is tested."""
    if changed.name == MANIFEST:
        yield
        return
    before = (folder / MANIFEST).read_bytes()
    files = [path.name for path in folder.iterdir() if path.name[0] != "."]
    seal(folder, sorted(name for name in files if name != MANIFEST))
    try:
        yield
    finally:
        (folder / MANIFEST).write_bytes(before)


def _with_changed_file(path: Path, rng: random.Random, read: Callable[[], Any]) -> Any:
    """Read while a file is changed: as JSON or safetensors if it is that, or by its bytes."""
    whole = path.read_bytes()
    data = changed_bytes(whole, rng)
    if path.suffix == ".json" and rng.random() < 0.8:
        data = json.dumps(changed_values(json.loads(whole), rng)).encode()
    elif path.suffix == ".safetensors":
        data = changed_safetensors(whole, rng)
    path.write_bytes(data)
    try:
        return read()
    finally:
        path.write_bytes(whole)


def models(folder: Path) -> Case:
    """Folders of trained models, which may name code of their owner's."""
    save_target(_model(), folder)
    text = folder / "target.json"

    def read() -> Any:
        return None if "spy:" in text.read_text("latin-1") else load_target(folder, rebuild_network)

    def case(rng: random.Random) -> Any:
        files = (text, text, folder / "weights.safetensors")
        return _with_changed_file(rng.choice(files), rng, read)

    return case


def runs(folder: Path) -> Case:
    settings = {"name": "trial", "grid": {"seed": [0, 1]}}
    places = [
        make_run(folder / "model", [BROKEN, DEFENDED], people=20, settings=settings),
        make_feature_run(folder / "features", [OPEN, CRAFTED], people=4, settings=settings),
    ]
    files = (*["run.json"] * 4, "rows.csv", "images.safetensors", MANIFEST)

    def case(rng: random.Random) -> Any:
        place = rng.choice(places)
        path = place / rng.choice(files)

        def read() -> Any:
            with _sealed_again(place, path):
                build_report([place], folder / "report.html", redact=rng.random() < 0.3)
                return seed_table([read_run(place)], "markdown")

        return _with_changed_file(path, rng, read)

    return case


def analysis_inputs(folder: Path) -> Case:
    """Parameters and configs of analyses, and files of finished ones that a report shows."""
    run = make_run(folder / "run", [BROKEN], people=20)
    curve = Curve("c", (1.0, 2.0), (0.1, 0.2), (0.0, 0.1), (0.2, 0.3))
    figure = Figure("f", Axis("x", log=True), Axis("y", percent=True), (curve,))
    table = Table("t", ("name", "value"), (("a", 1.5), ("b", None)))
    file = write_analysis(Analysis((table,), (figure,), ("n",)), ToyWorld(), {"seed": 1}, run)
    (folder / "config.toml").write_text(TOY)
    values = read_config(folder / "config.toml")
    needed = {"tsne": {"attribute": "smiling"}}
    methods = {
        name: asdict(analyses.get(name)(**needed.get(name, {}))) for name in analyses.names()
    }

    def read() -> Any:
        with _sealed_again(file.parent, file):
            return build_report([run], folder / "report.html")

    def case(rng: random.Random) -> Any:
        if rng.random() < 0.5:
            return _with_changed_file(file, rng, read)
        name = rng.choice(list(methods))
        changed = changed_values({"analysis": methods[name], "config": values}, rng)
        parameters, config = (changed.get(part) for part in ("analysis", "config"))
        if not isinstance(parameters, dict) or "spy:" in str(changed):
            return None
        method = analyses.build({**parameters, "name": name})
        if not isinstance(config, dict) or not method.surfaces:
            return None
        return unfit(method, [experiment for _, experiment in experiments(config)])

    return case


def onnx_files(folder: Path) -> Case:
    code = f"x = open('{CANARY}', 'w')"
    evil = onnx.helper.make_node("Identity", ["latent"], ["same"], name=code)
    path, seeds = folder / "gen.onnx", []
    for model in (onnx_model(Dcgan()), onnx_model(Dcgan(), 17, "same", nodes=[evil])):
        seeds.append(model.SerializeToString())
    onnx.save(
        onnx_model(Dcgan()), path, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    seeds.append(path.read_bytes())

    def case(rng: random.Random) -> Any:
        path.write_bytes(changed_bytes(rng.choice(seeds), rng))
        source = f"onnx:{path}"
        files_of(source, None)
        return Generator(source=source, latent="normal:6x1x1").untrained(SHAPE, 0)

    return case


def nvidia_files(folder: Path) -> Case:
    seeds = []
    with pytest.MonkeyPatch.context() as patch:
        for thing in (nvidia_pickles._reconstruct_persistent_obj, nvidia_pickles.EasyDict):
            home = ModuleType(thing.__module__)
            setattr(home, thing.__name__, thing)
            patch.setitem(sys.modules, thing.__module__, home)
            patch.setitem(sys.modules, thing.__module__.partition(".")[0], ModuleType("package"))
        generator, _ = nvidia_pickles.official(resolution=8, base=16, most=2)
        content = nvidia_pickles.snapshot(generator)
        for value in (content, {**content, "x": Evil()}):
            seeds += [pickle.dumps(value, protocol) for protocol in nvidia_pickles.PROTOCOLS]

    def case(rng: random.Random) -> Any:
        path = folder / "network.pkl"
        path.write_bytes(changed_bytes(rng.choice(seeds), rng))
        return read_stylegan2(path)

    return case


TARGETS: dict[str, Callable[[Path], Case]] = {
    "images": images,
    "config": config,
    "attributes": attributes,
    "weights": weights,
    "torch files": torch_files,
    "models": models,
    "priors": priors,
    "clients": clients,
    "runs": runs,
    "analyses": analysis_inputs,
    "ONNX": onnx_files,
    "NVIDIA pickles": nvidia_files,
}
