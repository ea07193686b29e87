"""Reading pickles of NVIDIA's networks as data: nothing a file names is imported, called or run.

A pickle is a program for a small stack machine. Python's own machine imports and calls what the
program names, and NVIDIA's files contain their networks' source code to be executed. The machine
here only builds plain values. The few names such a file needs stand for inert records of ours, and
any other name or instruction is refused. The size of the file bounds time and memory, whatever
lengths it claims.
"""

import io
import math
import mmap
import pickletools  # parses pickles into instructions without executing any
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from frostglass.core.errors import CheckpointError

MAX_INSTRUCTIONS = 2_000_000  # NVIDIA's largest file has well under a tenth of it
MAX_AXES = 8
MAX_NAME = 80
MAX_INTEGER = 2**63

DICTS = {"collections.OrderedDict", "dnnlib.util.EasyDict"}
SETS = {"builtins.set", "__builtin__.set"}
NETWORK = "torch_utils.persistence._reconstruct_persistent_obj"
TENSOR, PARAMETER, STORAGE = (
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.storage._load_from_bytes",
)
# Gains and sizes that we compute ourselves; their content is ignored.
NUMBERS = {"numpy.dtype", "numpy.ndarray"} | {
    f"{module}.multiarray.{name}"
    for module in ("numpy.core", "numpy._core")
    for name in ("scalar", "_reconstruct")
}
DTYPES = {
    "torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16, "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ByteStorage": torch.uint8, "torch.BoolStorage": torch.bool,
}  # fmt: skip
ADMITTED = {*DICTS, *SETS, *NUMBERS, *DTYPES, NETWORK, TENSOR, PARAMETER, STORAGE}
TENSORFLOW = "dnnlib.tflib."

MAGIC, FORMAT = 0x1950A86A20F9469CFC6C, 1001  # the start of a storage that torch pickled

PLAIN = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
FRESH = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    """A name in the file; never looked up."""

    text: str


@dataclass(frozen=True, eq=False)
class Network:
    """A module of NVIDIA's without its code: the name of its class and its attributes."""

    kind: str
    state: dict[str, Any]

    def entries(self, kind: str) -> dict[str, Any]:
        """Return parameters, buffers or modules by name."""
        entries = self.state.get(kind, {})
        if not isinstance(entries, dict) or any(
            not isinstance(name, str) or len(name) > MAX_NAME for name in entries
        ):
            refuse(f"{kind} of a {shown(self.kind)} is no dict of names")
        return {name: value for name, value in entries.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Storage:
    """A flat array of numbers."""

    dtype: torch.dtype
    data: memoryview

    def __len__(self) -> int:
        return len(self.data) // self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor that is not created yet, but is known to lie within its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Return its values as float32."""
        flat = torch.empty(0)
        if len(self.storage):
            flat = torch.frombuffer(bytearray(self.storage.data), dtype=self.storage.dtype)
        values = flat.as_strided(self.shape, self.stride, self.offset)
        return values.to(torch.float32, copy=True).contiguous()


class Opaque:
    """An unused object of numpy's."""


class Mark:
    """Start of a run of values on the stack."""


def refuse(problem: str) -> NoReturn:
    raise CheckpointError(problem)


def shown(text: str) -> str:
    """Return a word of the file, safe to print in one line."""
    return repr(text[:MAX_NAME])[1:-1]


def read_inert(path: Path) -> Any:
    """Read a pickle file: plain values, `Network`, `Stored` and `Opaque`."""
    with path.open("rb") as file:
        if not file.read(1):
            refuse("it is empty")
        # A mapping returns what is there, whatever length the pickle claims.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if mapped[:2] == b"PK":
                refuse("it is a file of torch.save, not a pickle")
            return Reader().read(mapped)


class Reader:
    """The stack machine; one per file, so that nested pickles share the instruction limit."""

    def __init__(self) -> None:
        self.left = MAX_INSTRUCTIONS
        self.in_storage = False

    def read(self, stream: Any) -> Any:
        """Read the value of one pickle; the stream is after it then."""
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        for code, argument, _ in pickletools.genops(stream):
            self.left -= 1
            if self.left < 0:
                refuse(f"it has more than {MAX_INSTRUCTIONS:,} instructions")
            self._step(code.name, argument, stack, memo)
        (value,) = stack  # the last instruction is STOP, or genops raises
        return value

    def _step(self, code: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
        if code in PLAIN:
            stack.append(argument)
        elif code in CONSTANTS:
            stack.append(CONSTANTS[code])
        elif code in FRESH:
            stack.append(FRESH[code]())
        elif code == "MARK":
            stack.append(Mark())
        elif code in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code in SHORT_TUPLES:
            stack[-SHORT_TUPLES[code] :] = [tuple(_last(stack, SHORT_TUPLES[code]))]
        elif code == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif code in ("APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS"):
            _fill(code, stack)
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ", 1) if code == "GLOBAL" else (stack.pop(-2), stack.pop())
            stack.append(_name(*parts))
        elif code in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._result(function, arguments))
        elif code == "BUILD":
            stack.pop()
            if not isinstance(stack[-1], Opaque):
                refuse(f"it changes the attributes of a {type(stack[-1]).__name__}")
        elif code == "BINPERSID" and self.in_storage:
            stack.append(("persistent", stack.pop()))
        elif code not in ("PROTO", "FRAME", "STOP"):
            refuse(f"it uses the pickle instruction {code}, which a StyleGAN2 does not need")

    def _result(self, function: Any, arguments: Any) -> Any:
        """Return the record that stands for the result of a call."""
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            refuse(f"it calls a {type(function).__name__}")
        name = function.text
        if name in NUMBERS:
            return Opaque()
        if name in DICTS and not arguments:
            return {}
        if name in SETS and len(arguments) == 1 and isinstance(arguments[0], list):
            return {_key(item) for item in arguments[0]}
        if name == NETWORK and len(arguments) == 1:
            return _network(arguments[0])
        if name == STORAGE and len(arguments) == 1:
            return self._storage(arguments[0])
        if name == TENSOR and len(arguments) >= 4:
            return _stored(*arguments[:4])
        if name == PARAMETER and arguments and isinstance(arguments[0], Stored):
            return arguments[0]
        refuse(f"it calls {name} with {len(arguments)} arguments of an unknown kind")

    def _storage(self, data: Any) -> Storage:
        """Read a storage's own stream: five pickles, a count, and the numbers."""
        if self.in_storage or not isinstance(data, bytes):
            refuse("a storage in it does not hold numbers")
        self.in_storage = True
        stream = io.BytesIO(data)
        magic, version, system, content, keys = (self.read(stream) for _ in range(5))
        self.in_storage = False
        if (
            (magic, version) != (MAGIC, FORMAT)
            or not isinstance(system, dict)
            or system.get("little_endian") is not True
        ):
            refuse("a storage in it does not have torch's pickle format")
        match content:
            case ("persistent", ("storage", Name(text), str(key), str(), int(count), None)) if (
                text in DTYPES and keys == [key]
            ):
                storage = Storage(DTYPES[text], memoryview(data)[stream.tell() + 8 :])
            case _:
                refuse("a storage in it does not hold numbers")
        if (
            int.from_bytes(stream.read(8), "little") != count
            or len(storage.data) != count * storage.dtype.itemsize
        ):
            refuse(
                f"expected a storage of {count} numbers, got {len(storage)}: it is truncated or "
                "changed"
            )
        return storage


def _last(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise IndexError(f"expected {count} values on the stack")
    return stack[-count:]


def _since_mark(stack: list[Any]) -> list[Any]:
    """Pop the values above the last mark, and the mark."""
    values = []
    while not isinstance(value := stack.pop(), Mark):
        values.append(value)
    return values[::-1]


def _fill(code: str, stack: list[Any]) -> None:
    """Put values into the container below them."""
    one = {"APPEND": 1, "SETITEM": 2}.get(code)
    values = _since_mark(stack) if one is None else [stack.pop() for _ in range(one)][::-1]
    container = stack[-1]
    if code.startswith("SETITEM") and isinstance(container, dict):
        container.update(zip(map(_key, values[::2]), values[1::2], strict=True))
    elif code.startswith("APPEND") and isinstance(container, list):
        container.extend(values)
    elif code == "ADDITEMS" and isinstance(container, set):
        container.update(map(_key, values))
    else:
        refuse(f"it uses {code} on a {type(container).__name__}")


def _key(value: Any) -> str | int:
    """Return a value that is safe to hash: nested ones could exhaust the interpreter's stack."""
    if not isinstance(value, str | int):
        refuse(f"it has a {type(value).__name__} as a key")
    return value


def _name(module: Any, name: Any) -> Name:
    if not isinstance(module, str) or not isinstance(name, str):
        refuse("it uses a name that is no text")
    text = f"{module}.{name}"
    if text.startswith(TENSORFLOW):
        refuse(
            "it was written by the TensorFlow version of StyleGAN: convert it with NVIDIA's "
            "legacy.py first"
        )
    if text not in ADMITTED:
        refuse(f"it names {shown(text)}, which a StyleGAN2 does not need")
    return Name(text)


def _network(meta: Any) -> Network:
    match meta:
        case {"type": "class", "class_name": str(kind), "state": dict(state)}:
            return Network(kind, state)
    refuse("a network in it lacks a class name or a state")


def _stored(storage: Any, offset: Any, shape: Any, stride: Any) -> Stored:
    if (
        not isinstance(storage, Storage)
        or not isinstance(shape, tuple)
        or not isinstance(stride, tuple)
        or not len(shape) == len(stride) <= MAX_AXES
        or any(type(n) is not int or not 0 <= n < MAX_INTEGER for n in (offset, *shape, *stride))
    ):
        refuse("a tensor in it has no storage, size or strides")
    count, last = math.prod(shape), -1
    if count:
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # More numbers than the storage has could only be repetitions: a few bytes could then allocate
    # any amount of memory.
    if max(count, last + 1) > len(storage):
        refuse("a tensor in it is larger than its storage")
    return Stored(storage, offset, shape, stride)
