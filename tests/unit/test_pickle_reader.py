"""Hostile pickles are refused: they run nothing and exhaust nothing.

Each is a program that would leave a file behind if Python's own unpickler ran it, or that would
exhaust the machine.
"""

import io
import os
import pickle
import resource
import struct
import warnings

import pytest
import torch

from frostglass.networks.stylegan2 import pickle_reader
from nvidia_pickles import PROTOCOLS, nvidia, official, refused, snapshot, written  # noqa: F401


class Evil:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


DICT = b"ccollections\nOrderedDict\n"
MAGIC = 0x1950A86A20F9469CFC6C


def eval_code(sentinel):
    return b"c__builtin__\neval\n(" + word(f"open({str(sentinel)!r}, 'w').close()") + b"tR"


def word(text):
    """The instruction that pushes a text."""
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def named(module, name):
    """The instructions that look up a name."""
    return word(module) + word(name) + b"\x93"


def legacy(
    content=None, *, count=2, data=None, key="0", kind=b"ctorch\nFloatStorage\n", system=None
):
    """A storage as torch writes it into a pickle, or a variation on it."""
    claim = b"\x80\x02(" + word("storage") + kind + word(key) + word("cpu") + b"K\x02NtQ."
    system = {"little_endian": True} if system is None else system
    headers = (MAGIC, 1001, system)
    return (
        b"".join(pickle.dumps(value, 2) for value in headers)
        + (claim if content is None else content)
        + pickle.dumps(["0"], 2)
        + struct.pack("<q", count)
        + (bytes(8) if data is None else data)
    )


def storage(data):
    return b"ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(data)) + data + b"tR"


def tensor(data, shape=b"(K\x02t", stride=b"(K\x01t", offset=b"K\x00"):
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage(data)
        + offset
        + shape
        + stride
        + b"\x89}tR"
    )


def big(number):
    data = number.to_bytes(16, "little")
    return b"\x8a" + bytes([len(data)]) + data


NET = b"ctorch_utils.persistence\n_reconstruct_persistent_obj\n"


@pytest.mark.parametrize("protocol", [2, *PROTOCOLS])
@pytest.mark.parametrize("place", ["top", "beside", "state", "parameters", "modules", "gain"])
def test_code_is_refused_wherever_it_hides(tmp_path, protocol, place):
    sentinel = tmp_path / "ran"
    evil, (generator, _) = Evil(sentinel), official(resolution=8)
    content = snapshot(generator)
    if place == "top":
        content = evil
    elif place == "beside":
        content["augment_pipe"] = evil
    elif place == "state":
        generator.part("mapping.fc0").state["weight_gain"] = [1, {"deep": (evil,)}]
    else:
        generator.part("synthesis.b8").state[f"_{place}"] = {"x": evil}
    path = written(tmp_path, content, protocol)
    message = (
        "it names (posix|nt).system, which a StyleGAN2 does not need"
        if protocol > 2
        else "it names (posix.system|_codecs.encode)"
    )
    refused(path, message)
    assert not sentinel.exists()


def test_the_hostile_files_of_these_tests_are_harmful(tmp_path):
    """Otherwise their refusal would prove nothing."""
    sentinel = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(sentinel), 4))  # noqa: S301
    assert sentinel.exists()
    sentinel.unlink()
    pickle.loads(b"\x80\x02" + eval_code(sentinel) + b".")  # noqa: S301
    assert sentinel.exists()


def hostile(sentinel):
    """Programs written by hand, and the error for each."""
    code = eval_code(sentinel)
    evaluate = "it names __builtin__.eval"
    return {
        "eval": (code, evaluate),
        "eval named on the stack": (
            named("builtins", "eval") + word("1") + b"\x85R",
            "it names builtins.eval",
        ),
        "a dotted way into an admitted module": (
            named("torch", "serialization.os.system"),
            "it names torch.serialization.os",
        ),
        "an admitted name in two halves": (
            named("collections.OrderedDict", "__init__.__globals__"),
            "it names collections.Ord",
        ),
        "names that are no words": (b"K\x01K\x02\x93", "it uses a name that is no text"),
        "state of a dict": (DICT + b")R}" + word("__class__") + code + b"sb", evaluate),
        "__setstate__ of a dict": (
            DICT + b")R}" + word("__setstate__") + b"K\x01sb",
            "changes the attributes of a dict",
        ),
        "attributes of an admitted class": (
            DICT + b"N}" + word("update") + b"K\x01s\x86b",
            "changes the attributes of a Name",
        ),
        "attributes of an admitted function": (
            NET + b"N}" + word("__defaults__") + b")s\x86b",
            "changes the attributes of a Name",
        ),
        "attributes of a network": (NET + b"(}tR", "a network in it lacks a class name or a state"),
        "a persistent id": (word("x") + b"Q", "instruction BINPERSID"),
        "a persistent id in words": (b"Pos.system\n", "instruction PERSID"),
        "an extension code": (b"\x82\x01", "instruction EXT1"),
        "an instance": (b"(" + word("touch") + b"ios\nsystem\n", "instruction INST"),
        "an object": (b"(ccollections\nOrderedDict\no", "instruction OBJ"),
        "keywords": (DICT + b")}\x92", "instruction NEWOBJ_EX"),
        "a buffer from outside": (b"\x97", "instruction NEXT_BUFFER"),
        "calling a string": (word("os") + b")R", "it calls a str"),
        "calling a tensor": (tensor(legacy()) + b")R", "it calls a Stored"),
        "calling without a tuple": (DICT + b"]R", "it calls a Name"),
        "a dict made from something": (
            DICT + b"(]tR",
            "it calls collections.OrderedDict with 1 arguments",
        ),
        "code in a storage": (storage(legacy(b"\x80\x02" + code + b".")), evaluate),
        "code for a storage's kind": (storage(legacy(kind=code)), evaluate),
        "code in a storage's system": (
            storage(pickle.dumps(MAGIC, 2) + b"\x80\x02" + code + b"."),
            evaluate,
        ),
        "a storage in a storage": (
            storage(legacy(b"\x80\x02" + storage(legacy()) + b".")),
            "a storage in it does not hold numbers",
        ),
        "a storage that is a zip": (storage(b"PK\x03\x04" + bytes(100)), "damaged"),
        "a storage of text": (
            b"ctorch.storage\n_load_from_bytes\n(" + word("x") + b"tR",
            "a storage in it does not hold numbers",
        ),
        "a storage of another system": (
            storage(legacy(system={"little_endian": False})),
            "does not have torch's pickle format",
        ),
        "a storage of another key": (
            storage(legacy(key="1")),
            "a storage in it does not hold numbers",
        ),
        "a storage that claims more than it has": (
            storage(legacy(count=2**40)),
            "expected a storage of 2 numbers, got 2: it is truncated",
        ),
        "a storage cut short": (
            storage(legacy(data=bytes(5))),
            "expected a storage of 2 numbers, got 1: it is truncated",
        ),
        "a tensor larger than its storage": (
            tensor(legacy(), shape=b"(K\x03t"),
            "a tensor in it is larger than its storage",
        ),
        "a tensor behind its storage": (
            tensor(legacy(), offset=b"K\x01"),
            "a tensor in it is larger than its storage",
        ),
        "a tensor of one number repeated": (
            tensor(legacy(), shape=b"(" + big(2**50) + b"t", stride=b"(K\x00t"),
            "larger than its storage",
        ),
        "a tensor of negative stride": (
            tensor(legacy(), stride=b"(J\xff\xff\xff\xfft"),
            "no storage, size or strides",
        ),
        "a tensor of endless size": (
            tensor(legacy(), shape=b"(" + big(2**100) + b"t"),
            "no storage, size or strides",
        ),
        "a tensor of many axes": (
            tensor(legacy(), shape=b"(" + b"K\x01" * 9 + b"t", stride=b"(" + b"K\x01" * 9 + b"t"),
            "no storage, size or strides",
        ),
        "a tensor without a storage": (
            b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR",
            "no storage, size or strides",
        ),
        "a string of endless length": (b"\x8d" + struct.pack("<Q", 2**62) + b"x", "damaged"),
        "bytes of endless length": (b"\x8e" + struct.pack("<Q", 2**62) + b"x", "damaged"),
        "a byte array": (b"\x96" + struct.pack("<Q", 2**62), "damaged"),
        "a far memo": (b"Nr\xff\xff\xff\xff", "got a NoneType"),
        "a memo that is not there": (b"j\xff\xff\xff\xff", "damaged"),
        "an empty stack": (b"", "damaged"),
        "no mark": (b"t", "damaged"),
        "half an item": (b"}(K\x01u", "damaged"),
        "items of a list": (b"](K\x01K\x02u", "it uses SETITEMS on a list"),
        "a nested key": (b"}" + b")" + b"\x85" * 200_000 + b"K\x01s", "it has a tuple as a key"),
        "deep lists": (b"]" * 200_000 + b"a" * 199_999, "got a list"),
        "deep tuples": (b")" + b"\x85" * 200_000, "got a tuple"),
        "deep dicts": (
            b"}" + word("G_ema") + (b"}K\x00" * 100_000) + b"N" + b"s" * 100_001,
            "got a dict of G_ema",
        ),
        "a long number": (b"L" + b"9" * 10_000 + b"L\n", "damaged"),
        "a class name of many lines": (b"cos\nsystem\n", "it names os.system"),
    }


@pytest.mark.parametrize("name", hostile("x"))
def test_programs_written_by_hand_are_refused(tmp_path, name):
    sentinel = tmp_path / "ran"
    program, message = hostile(sentinel)[name]
    path = tmp_path / "net.pkl"
    path.write_bytes(b"\x80\x04" + program + b".")
    refused(path, message)
    assert not sentinel.exists()


def network(state):
    """The program of a network whose state is built by another program."""
    return (
        NET
        + b"}("
        + word("type")
        + word("class")
        + word("class_name")
        + word("N")
        + word("state")
        + state
        + b"u\x85R"
    )


def generator_file(folder, program):
    path = folder / "net.pkl"
    path.write_bytes(b"\x80\x04}" + word("G_ema") + program + b"s.")
    return path


def modules(*programs):
    """The state of a network with these parts."""
    return (
        b"}"
        + word("_modules")
        + b"}"
        + b"".join(word(f"m{i}") + p + b"s" for i, p in enumerate(programs))
        + b"s"
    )


def test_networks_inside_each_other_end(tmp_path):
    deep = network(b"}")
    for _ in range(9):
        deep = network(modules(deep))
    refused(
        generator_file(tmp_path, deep),
        "its part m0.m0.m0.m0.m0.m0.m0.m0.m0.* nested too deep",
    )
    # All parts of each network are the same one: 50^7 parts, if each were visited.
    wide = network(b"}")
    for number in range(7):
        wide = network(modules(wide + b"q" + bytes([number]), *[b"h" + bytes([number])] * 49))
    refused(generator_file(tmp_path, wide), "in two places at once")
    nested = legacy()
    for _ in range(1_000):
        nested = legacy(b"\x80\x02" + storage(nested) + b".")
    refused(
        generator_file(tmp_path, storage(nested)),
        "a storage in it does not hold numbers",
    )
    # A network whose modules are its own state.
    loop = network(b"}q\x01" + word("_modules") + b"h\x01s")
    refused(generator_file(tmp_path, loop), "its part _modules is no network")


def test_long_names_are_refused_and_strange_ones_shown_in_one_line(tmp_path):
    state = b"}" + word("_buffers") + b"}" + word("n" * 81) + tensor(legacy()) + b"ss"
    refused(generator_file(tmp_path, network(state)), "_buffers of a N is no dict of names")
    state = b"}" + word("_buffers") + b"}" + word("a\nb\x1b[31m") + tensor(legacy()) + b"ss"
    refused(generator_file(tmp_path, network(state)), r"its tensors are a\\nb\\x1b\[31m")
    (tmp_path / "net.pkl").write_bytes(b"\x80\x04" + word("o\ns") + word("x" * 10_000) + b"\x93.")
    refused(tmp_path / "net.pkl", r"it names o\\ns\.x{76}, which")


def test_work_is_bounded(tmp_path, monkeypatch):
    """A storage that is requested repeatedly counts each time."""
    monkeypatch.setattr(pickle_reader, "MAX_INSTRUCTIONS", 5_000)
    data = legacy()
    given = (
        b"ctorch.storage\n_load_from_bytes\nq\x00B" + struct.pack("<I", len(data)) + data + b"q\x01"
    )
    path = tmp_path / "net.pkl"
    path.write_bytes(b"\x80\x04" + given + b"(" + b"h\x00h\x01\x85R" * 1_000 + b"t\x87.")
    refused(path, "it has more than 5,000 instructions")


def test_claims_cost_no_memory(tmp_path):
    path = tmp_path / "net.pkl"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in (
        "a far memo",
        "bytes of endless length",
        "a tensor of one number repeated",
        "a storage that claims more than it has",
    ):
        program, message = hostile("x")[name]
        path.write_bytes(b"\x80\x04" + program + b".")
        refused(path, message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_the_streams_of_these_tests_are_those_of_torch(tmp_path):
    data = legacy(data=struct.pack("<2f", 1.5, -2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # storages as such are deprecated
        assert torch.load(io.BytesIO(data), weights_only=True).tolist() == [1.5, -2.0]
    stored = pickle_reader.Reader().read(io.BytesIO(b"\x80\x04" + tensor(data) + b"."))
    assert stored.tensor().tolist() == [1.5, -2.0]
