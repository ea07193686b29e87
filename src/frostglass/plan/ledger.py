"""The ledger of a dry run: live memory, operations and bytes of code that runs on meta tensors."""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from frostglass.runtime.memory import HEAP

aten = torch.ops.aten
META = torch.device("meta")
MIB = 2**20
ANSWERED = MIB  # bytes up to which values are invented for code that reads a meta tensor
REDIRECTED = MIB // 4  # bytes from which new CPU tensors are created on the meta device instead
HEAP_GAPS = 1.25  # a full heap over the blocks in it: freed gaps do not always fit what comes next
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
READING = (
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default),
    *(aten._unique2.default, aten._to_copy.default),
)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)

# Output layouts, work and copied blocks of operators, by operator and layout of its arguments.
RESULTS: dict[Any, tuple[Any, "Cost", list[int]]] = {}


@dataclass
class Cost:
    """What a piece of code does: operator calls, their work, and the peak memory in bytes.

    `conv` and `matmul` count floating point operations, `moved` bytes read and written.
    """

    calls: float = 0.0
    conv: float = 0.0
    matmul: float = 0.0
    moved: float = 0.0
    memory: int = 0

    def add(self, other: "Cost") -> None:
        """Add the work of another cost to this one."""
        self.calls += other.calls
        self.conv += other.conv
        self.matmul += other.matmul
        self.moved += other.moved

    def plus(self, other: "Cost", weight: float) -> "Cost":
        """Return this cost with the work of another one added `weight` times."""
        return Cost(
            self.calls + weight * other.calls,
            self.conv + weight * other.conv,
            self.matmul + weight * other.matmul,
            self.moved + weight * other.moved,
            max(self.memory, other.memory),
        )


class Ledger(TorchDispatchMode):
    """Counts the work of all operators inside the block and the bytes of all live tensors.

    `now` is the size of the live tensors, each storage counted once. `peak` is the most memory a
    process needs for them; the heap of small blocks never shrinks. Code that reads values of a
    meta tensor gets values with which it continues: True, 0 or 1.0; a mask selects all rows.
    Large CPU tensors are created on the meta device, so that building a network costs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self.peak = self._large = self._small = self._fullest = 0
        self._alive: dict[int, tuple[int, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper against compilation is slow, and nothing is compiled here

    @property
    def now(self) -> int:
        return self._large + self._small

    @contextmanager
    def measure(self) -> Iterator[Cost]:
        """Measure the block; what it costs does not count for a measurement around it."""
        outer, outer_peak = self.cost, self.peak
        self.cost, self.peak = Cost(), 0
        self.charge()
        try:
            yield self.cost
        finally:
            self.cost.memory = self.peak
            self.cost, self.peak = outer, outer_peak

    def charge(self, *blocks: int) -> None:
        """Count blocks of memory that are used for a moment besides the live tensors."""
        small, large = self._small, self._large
        for block in blocks:
            if block < HEAP:
                small += block
            else:
                large += block
        if small > self._fullest:
            self._fullest = small
        peak = int(HEAP_GAPS * self._fullest) + large
        if peak > self.peak:
            self.peak = peak

    def keep(self, size: int) -> None:
        """Count memory that stays allocated besides the live tensors."""
        self._large += size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args)
        if kwargs:
            given += _tensors(kwargs.values())
        meta = 0
        for tensor in given:
            meta += tensor.is_meta
        kind = _kind(func)
        if kind == "view" and meta == len(given):
            self.cost.calls += 1
            return func(*args, **kwargs)
        if not meta:
            if not given and "device" in kwargs:
                created = _created(func, args, kwargs)
                if created is not None:
                    return self._counted(created)
            result = func(*args, **kwargs)
            self.cost.add(_work(func, args, kwargs, given, result))
            return result if kind in ("view", "in place") else self._counted(result, given)
        if func in READING:
            answer = _answer(func, args, kwargs)
            if answer is not None:
                return self._counted(answer)
        if meta < len(given):
            if func._schema.is_mutable and not args[0].is_meta:
                return args[0]  # a CPU tensor takes no values from a meta tensor
            args = tuple(_to_meta(value) for value in args)
            kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
            given = _tensors((*args, *kwargs.values()))
        return self._run_meta(func, kind, args, kwargs, given)

    def _run_meta(self, func: Any, kind: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Run an operator on meta tensors, or repeat what it did with tensors of this layout."""
        key = (func, _signature(args), *((_signature(kwargs.values()), *kwargs) if kwargs else ()))
        known = RESULTS.get(key)
        if known is not None:
            outputs, work, blocks = known
            result: Any = args[0] if kind == "in place" else self._repeated(outputs)
        else:
            args = _select_all(func, args)
            layout = _signature(args[:1])
            result = func(*args, **kwargs)
            if kind not in ("view", "in place"):
                self._counted(result, given)
            work = _work(func, args, kwargs, given, result)
            # The kernels of convolutions copy what they read and write to another layout.
            copied = (*given, *_tensors([result])) if func in CONVOLUTIONS else ()
            blocks = [tensor.nbytes for tensor in copied]
            outputs = _layouts(result) if kind == "pure" else []
            if outputs is not None and (
                kind == "pure" or (kind == "in place" and _signature(args[:1]) == layout)
            ):
                RESULTS[key] = outputs, work, blocks
        self.cost.add(work)
        if blocks:
            self.charge(*blocks)
        return result

    def _repeated(self, outputs: list[Any]) -> Any:
        """Return new meta tensors of the layouts that an operator returned before."""
        tensors: list[Any] = []
        for layout in outputs:
            if layout is None:
                tensors.append(None)
                continue
            shape, stride, dtype = layout
            tensors.append(torch.empty_strided(shape, stride, dtype=dtype, device=META))
            self._count(tensors[-1].untyped_storage())
        self.charge()
        return tuple(tensors) if len(tensors) > 1 else tensors[0]

    def _counted(self, result: Any, given: Sequence[Tensor] = ()) -> Any:
        """Count the storages of a result that are new, and forget them when they are freed."""
        for tensor in (result,) if isinstance(result, Tensor) else _tensors([result]):
            storage = tensor.untyped_storage()
            name = storage._cdata
            if name not in self._alive and not any(
                tensor is old or name == old.untyped_storage()._cdata for old in given
            ):
                self._count(storage)
        self.charge()
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        self._alive[name] = size, weakref.KeyedRef(storage, self._freed, name)
        if size < HEAP:
            self._small += size
        else:
            self._large += size

    def _freed(self, storage: "weakref.KeyedRef[int, Any]") -> None:
        size, _ = self._alive.pop(storage.key)
        if size < HEAP:
            self._small -= size
        else:
            self._large -= size


def _work(func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> Cost:
    """Return the work of one call of an operator; that of a view is the call alone."""
    if func.is_view:
        return Cost(calls=1)
    moved = sum(tensor.nbytes for tensor in (*given, *_tensors([result])))
    if func in CONVOLUTIONS:
        return Cost(1, conv=_conv_flops(func, args, result), moved=moved)
    count = flop_registry.get(func._overloadpacket)
    flops = count(*args, **kwargs, out_val=result) if count else 0
    return Cost(1, matmul=flops, moved=moved)


@cache
def _kind(func: Any) -> str:
    """Return "view", "pure" for operators with new outputs, or "in place" for one old output."""
    if func.is_view:
        return "view"
    returns = func._schema.returns
    if not func._schema.is_mutable and not any(value.alias_info for value in returns):
        return "pure"
    written = len(returns) == 1 and returns[0].alias_info and returns[0].alias_info.is_write
    return "in place" if written and func._schema.name.endswith("_") else ""


def _layouts(result: Any) -> list[Any] | None:
    """Describe the tensors that an operator returned; None if it returned anything else."""
    outputs = [result] if isinstance(result, Tensor) else result
    if not isinstance(outputs, tuple | list) or (len(outputs) == 1 and outputs is result):
        return None
    if any(value is not None and not isinstance(value, Tensor) for value in outputs):
        return None
    return [
        value if value is None else (value.shape, value.stride(), value.dtype) for value in outputs
    ]


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, which are nested once at most."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def _conv_flops(func: Any, args: Any, out: Any) -> int:
    """Count the operations of a convolution or its gradients; groups included, unlike in torch."""
    if func is aten.convolution.default:
        (images, weight), result, passes, transposed = args[:2], out, 1, args[6]
    else:
        result, images, weight = args[:3]
        passes, transposed = sum(args[10][:2]), args[7]
    places = (images if transposed else result).shape
    return 2 * passes * places[0] * math.prod(places[2:]) * weight.numel()


def _signature(values: Any) -> tuple[Any, ...]:
    """Describe arguments by the layout of their tensors, as a key."""
    signature: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            signature += value.shape, value.stride(), value.dtype
        elif isinstance(value, (list, tuple)):
            signature.append(_signature(value))
        elif isinstance(value, (float, bool)):  # the values of floats change no shapes
            signature += type(value), value is True
        elif not isinstance(value, torch.Generator):
            signature.append(value)
    return tuple(signature)


def _to_meta(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(item) for item in value)
    if not isinstance(value, Tensor) or value.is_meta or not value.ndim:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _created(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a meta tensor in place of a large CPU tensor that code is about to create."""
    device = kwargs["device"]
    if device is not None and torch.device(device).type != "cpu":
        return None
    sizes = [arg for arg in args if isinstance(arg, list | tuple | torch.Size)]
    if not sizes or not all(isinstance(side, int) for side in sizes[0]):
        return None
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    count = torch.Size(sizes[0]).numel()
    if not dtype.is_floating_point or count * dtype.itemsize < REDIRECTED:
        return None
    return torch.empty(sizes[0], dtype=dtype, device=META)


def _answer(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return an invented value for code that reads a meta tensor; None if it does not read."""
    if func is aten._local_scalar_dense.default:
        return _invented(args[0].dtype)
    if func is aten.equal.default:
        return True
    if func is aten.nonzero.default:
        return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.long, device=META)
    if func is aten._unique2.default:
        none = torch.empty(0, device=META, dtype=torch.long)
        return torch.empty(args[0].numel(), dtype=args[0].dtype, device=META), none, none
    if func is aten._to_copy.default and torch.device(kwargs.get("device") or META).type == "cpu":
        dtype = kwargs.get("dtype") or args[0].dtype
        if args[0].nbytes > ANSWERED:  # images or features, on whose values no code branches
            return torch.empty(args[0].shape, dtype=dtype, device=META)
        # A mask that is read says which rows failed: none.
        value = 0 if dtype == torch.bool else _invented(dtype)
        return torch.full(args[0].shape, value, dtype=dtype)
    return None


def _invented(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0


def _select_all(func: Any, args: Any) -> Any:
    """Replace masks among the indices of an operator by the indices of all rows."""
    if func not in INDEXING:
        return args
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            every = torch.zeros(index.numel(), dtype=torch.long, device=META)
            indices += [every] * index.ndim
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])
