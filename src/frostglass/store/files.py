"""Files that are whole or absent: written beside their place, synced to disk, then renamed.

`Work` is what a running step writes its checkpoints through. Nothing here knows of a store, and nothing here is ever pickled.
"""

import errno
import io
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from frostglass.core.errors import RunError, StoreError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TAKEN = (
    errno.ENOTEMPTY,
    errno.EEXIST,
)  # what systems answer when a folder would be renamed onto one that is not empty


@contextmanager
def full_disk_reported(folder: Path) -> Iterator[None]:
    """Turn a full disk, an exhausted quota or a file size limit met inside the block into a `RunError` that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # The library's own writer keeps the number of the system's error in its text only.
        told = re.search(r"(?:os error|code:) (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if code not in FULL:
            raise
        raise RunError(
            f"no space left for {folder} ({os.strerror(code)}): free some and run the same command again: "
            "finished steps and checkpoints are kept"
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that, whenever the process or the machine dies, `path` holds its old content or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_temporaries(folder: Path) -> None:
    """Remove what `write_bytes` leaves behind when it is killed."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON, the same bytes for equal values. NaN and infinities are refused: a result must not hide them."""
    write_bytes(path, _json(path, value, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}): delete that file or its folder") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
) -> None:
    """Write tensors as one safetensors file, with `values` as JSON in its header; the same bytes for equal content.

    `values` may hold infinities and NaN, which checkpoints need. Tensors come back on the CPU, contiguous and without gradients; two that
    share memory come back as two.
    """
    dense: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        dense[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    # Serialised in memory, because the library's own writer leaves files behind when killed. One metadata entry only: it keeps several
    # in no fixed order.
    write_bytes(path, save(dense, {"values": _json(path, values)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, in the order of their names, and the values of a file made by `write_tensors`."""
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned, so that no tensor stays mapped to a file that may be replaced or removed.
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
            return tensors, json.loads((file.metadata() or {}).get("values", "{}"))
    except (SafetensorError, ValueError) as error:
        raise StoreError(
            f"{path} is not a whole safetensors file ({error}): delete that file or its folder"
        ) from error


def _json(path: Path, value: Any, **form: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, **form)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"cannot write {path.name}, which takes plain JSON values ({error}): convert or leave out the value"
        ) from error


def sheet_of(pictures: Tensor) -> bytes:
    """Pictures (N, C, H, W) in [0, 1] in a square of rows and columns, as the bytes of a PNG file."""
    count, channels, height, width = pictures.shape
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    canvas = pictures.new_zeros(down * across, channels, height, width)
    canvas[:count] = pictures.detach().clamp(0, 1)
    tiled = (
        canvas.unflatten(0, (down, across))
        .permute(0, 3, 1, 4, 2)
        .reshape(down * height, across * width, channels)
    )
    data = io.BytesIO()
    Image.fromarray(tiled.mul(255).round().byte().cpu().numpy().squeeze()).save(data, format="PNG")
    return data.getvalue()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is only safe from a power cut once its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make everything inside a folder durable."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder that another process may be removing too; what a network folder still keeps open is left for the next sweep."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (*TAKEN, errno.EBUSY):
                raise
            return


class Work:
    """Where a running step keeps checkpoints and tells how far it is.

    `folder` survives a kill: the same step finds its checkpoints there when it is run again. They go when the step is done.
    """

    def __init__(
        self,
        folder: Path,
        on_progress: Callable[[int, int, str], None] | None = None,
        before_save: Callable[[], None] | None = None,
    ):
        self.folder = folder
        self._on_progress = on_progress
        self._before_save = before_save
        self.sheets = ""  # where the last sheet is, for a progress note

    @classmethod
    def scratch(cls) -> "Work":
        """A work of its own for use without a store: a temporary folder that goes when the work is no longer used."""
        work = cls(Path(tempfile.mkdtemp(prefix="frostglass-")))
        weakref.finalize(work, shutil.rmtree, work.folder, ignore_errors=True)
        return work

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        """Keep a checkpoint under `name`, all of it or, if killed, the one before."""
        if self._before_save:
            self._before_save()
        write_tensors(self._file(name), tensors, values)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and values last saved under `name`, or None."""
        file = self._file(name)
        return read_tensors(file) if file.exists() else None

    def names(self) -> list[str]:
        """The names of all checkpoints, sorted."""
        return sorted(
            file.stem for file in self.folder.glob("*.safetensors") if not file.name.startswith(".")
        )

    def sheet(self, name: str, pictures: Tensor) -> None:
        """Show pictures (N, C, H, W) in [0, 1] side by side as `<name>.png`, for whoever wants to see how a training goes."""
        file = self._file(name).with_suffix(".png")
        write_bytes(file, sheet_of(pictures))
        self.sheets = f", samples in {file}"

    def progress(self, done: int, total: int, note: str = "") -> None:
        if self._on_progress:
            self._on_progress(done, total, note)

    def _file(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            raise StoreError(
                f"a checkpoint's name is made of letters, digits, '.', '_' and '-', and does not start with '.'; got {name!r}"
            )
        return self.folder / f"{name}.safetensors"
