"""Files that are complete or absent: written to a temporary name, synced, then renamed.

`Work` writes the checkpoints of a running step. Nothing here depends on a store or uses pickle.
"""

import errno
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from frostglass.core.errors import RunError, StoreError
from frostglass.runtime.processes import is_alive, machine_name
from frostglass.runtime.tensors import tensors_digest

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and plain values
SCRATCH = "frostglass-"  # start of the names of temporary folders
log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)  # a folder was renamed onto one that is not empty


@contextmanager
def full_disk_reported(folder: Path) -> Iterator[None]:
    """Turn a full disk, quota or file size limit inside the block into a `RunError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors gives the system's error number in its text only.
        match = re.search(r"(?:os error|code:) (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if code not in FULL:
            raise
        raise RunError(
            f"no space left for {folder} ({os.strerror(code)}): free some and run the same command "
            "again: finished steps and checkpoints are kept"
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that after any crash `path` holds the old content or the new one.

    Nobody gets permissions that the folder does not give.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    new, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 & permissions(path.parent)
    try:
        with os.fdopen(os.open(temporary, new, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def make_private(folder: Path) -> None:
    """Create a folder for private images, for its owner alone; one that exists stays as it is."""
    folder.mkdir(0o700, parents=True, exist_ok=True)


def ignore_in_git(folder: Path) -> None:
    """Keep the content of a folder out of git, wherever the folder is."""
    if not (folder / ".gitignore").exists():
        write_bytes(folder / ".gitignore", b"*\n")


def permissions(folder: Path) -> int:
    """Return who may do what with a folder; its content is to give no more."""
    return stat.S_IMODE(folder.stat().st_mode)


def restrict(path: Path, allowed: int) -> None:
    """Take away permissions that are not allowed: libraries write files for everybody."""
    if (mode := stat.S_IMODE(path.stat().st_mode)) & ~allowed:
        path.chmod(mode & allowed)


def remove_temporaries(folder: Path) -> None:
    """Remove what `write_bytes` leaves when it is killed."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON, the same bytes for equal values; refuses NaN and infinities."""
    write_bytes(path, _json(path, value, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}): delete that file or its folder") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
) -> None:
    """Write tensors as one safetensors file with `values` as JSON in its header.

    Equal content gives the same bytes. `values` may hold infinities and NaN, which checkpoints
    need. Tensors are read back on the CPU; those that share memory no longer do.
    """
    dense: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        dense[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    # Serialised in memory, because safetensors' own writer leaves files when it is killed. One
    # metadata entry only: several are written in no fixed order.
    write_bytes(path, save(dense, {"values": _json(path, values)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, sorted by name, and the values that `write_tensors` wrote."""
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
            f"cannot write {path.name}, which takes plain JSON values ({error}): convert or leave "
            "out the value"
        ) from error


def sheet_of(images: Tensor) -> bytes:
    """Tile images (N, C, H, W) in [0, 1] in a square; return the bytes of a PNG file."""
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = images.new_zeros(rows * columns, channels, height, width)
    canvas[:count] = images.detach().clamp(0, 1)
    tiles = canvas.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2)
    sheet = tiles.reshape(rows * height, columns * width, channels).mul(255).round().byte()
    data = io.BytesIO()
    Image.fromarray(sheet.cpu().numpy().squeeze()).save(data, format="PNG")
    return data.getvalue()


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder: a rename survives a power cut only after that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder that another process may be removing too.

    What a network folder keeps open is left for the next call.
    """
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (*TAKEN, errno.EBUSY):
                raise
            return


@dataclass(eq=False)
class Work:
    """The checkpoints and the progress of a running step.

    `folder` survives a kill: the same step loads its checkpoints from there when it is run again.
    It is removed when the step is finished. Each checkpoint holds a hash of its content, so that
    a damaged one is never resumed from. With `maps_results`, many images are not kept in memory but
    written in 8 bits to a file in `folder`, as the store saves them.
    """

    folder: Path
    on_progress: Callable[[int, int, str], None] | None = None
    before_save: Callable[[], None] | None = None
    maps_results: bool = False
    on_values: Callable[[int, Mapping[str, float]], None] | None = field(default=None, init=False)
    sheets: str = field(default="", init=False)  # the path of the last sheet, for a progress note

    @classmethod
    def scratch(cls) -> "Work":
        """Return a work for use without a store, in a temporary folder removed with the object."""
        _remove_dead_scratch()
        work = cls(Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{machine_name()}~{os.getpid()}~")))
        weakref.finalize(work, shutil.rmtree, work.folder, ignore_errors=True)
        return work

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        """Save a checkpoint under `name`; if killed, the one before stays."""
        if self.before_save:
            self.before_save()
        file = self._file(name)
        text = _json(file, values)
        write_tensors(file, tensors, {"values": text, "sha256": _checkpoint_hash(tensors, text)})

    def load(self, name: str) -> Checkpoint | None:
        """Return the tensors and values last saved under `name`, or None.

        A damaged checkpoint is removed with a warning, so that its work is done again.
        """
        file = self._file(name)
        if not file.exists():
            return None
        try:
            tensors, content = read_tensors(file)
            if _checkpoint_hash(tensors, content["values"]) == content["sha256"]:
                return tensors, json.loads(content["values"])
        except (StoreError, KeyError, TypeError, AttributeError):
            pass  # damage can give the header any form
        log.warning("the checkpoint %s is damaged: it is removed, and its work done again", file)
        file.unlink(missing_ok=True)
        return None

    def share(
        self,
        names: Sequence[str],
        make: Callable[[int], Checkpoint],
        note: Callable[[int], str] = lambda done: "",
    ) -> Iterator[Checkpoint]:
        """Make checkpoints that do not depend on each other, by `make(number)`; return them all.

        In a store other processes may make some of them, and they are read one by one afterwards,
        because all may be more than memory holds. `note(done)` goes with the progress.
        """
        parts: list[Checkpoint] = []
        for number, name in enumerate(names):
            if not (part := self.load(name)):
                part = make(number)
                self.save(name, *part)
            parts.append(part)
            self.progress(len(parts), len(names), note(len(parts)))
        return iter(parts)

    def file(self, name: str) -> Path:
        """Return where a step may write a part of its result that memory does not hold."""
        return self.folder / name

    def names(self) -> list[str]:
        """Return the names of all checkpoints, sorted."""
        files = self.folder.glob("*.safetensors")
        return sorted(file.stem for file in files if not file.name.startswith("."))

    def sheet(self, name: str, images: Tensor) -> None:
        """Write images (N, C, H, W) in [0, 1] as `<name>.png`, to watch a training."""
        file = self._file(name).with_suffix(".png")
        write_bytes(file, sheet_of(images))
        self.sheets = f", samples in {file}"

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units of work are done; 0 when a training begins."""
        if self.on_progress:
            self.on_progress(done, total, note)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Send values of an epoch to a log, if there is one."""
        if self.on_values:
            self.on_values(step, values)

    def _file(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            raise StoreError(
                "a checkpoint's name must be made of letters, digits, '.', '_' and '-', and not "
                f"start with '.', got {name!r}: choose another name"
            )
        return self.folder / f"{name}.safetensors"


def _remove_dead_scratch() -> None:
    """Remove the temporary folders of processes of this machine that were killed."""
    start = f"{SCRATCH}{machine_name()}~"
    for folder in Path(tempfile.gettempdir()).glob(f"{start}*~*"):
        pid = folder.name.removeprefix(start).partition("~")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoint_hash(tensors: Mapping[str, Tensor], values: str) -> str:
    """Hash all that a checkpoint holds; its header is damaged as easily as its tensors."""
    names = sorted(tensors)
    forms = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    content = tensors_digest({name: tensors[name] for name in names})
    return hashlib.sha256(json.dumps([forms, values]).encode() + content).hexdigest()
