"""Read files of `torch.save` that hold objects of classes which are not installed, such as Lightning's. No code is run.

`torch.load` reads tensors, or everything with all code that a pickle names. A Lightning checkpoint holds hyperparameters beside
its tensors: objects of omegaconf, of a tokenizer, of the authors' code. Here every class and function that a pickle names is
replaced by a `Stub`, which stores what it was called with. Nothing that a pickle names is imported or called. Tensors are
`StoredTensor`s, whose values are read on demand, so that the state of an optimizer costs no memory.
"""

import io
import itertools
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

MAX_PICKLE = 64_000_000  # bytes of the pickle itself, without tensors
PART = 1 << 24  # bytes read at once
MAX_DEPTH = 200  # of nested configurations
MAX_ENTRIES = 100_000  # of a configuration. One that refers to the same list again and again has more than its file.
MAX_NAMES = 10_000  # of classes and functions. Each becomes a class here, which takes a kilobyte.
MAX_RANK = 64  # of a tensor
KEY = re.compile(r"[0-9]{1,9}")  # the name of a storage in the archive
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_OPCODES = (
    "MARK STOP POP POP_MARK DUP FLOAT INT BININT BININT1 LONG BININT2 NONE PERSID BINPERSID REDUCE STRING BINSTRING "
    "SHORT_BINSTRING UNICODE BINUNICODE APPEND BUILD GLOBAL DICT EMPTY_DICT APPENDS GET BINGET LONG_BINGET LIST EMPTY_LIST PUT "
    "BINPUT LONG_BINPUT SETITEM TUPLE EMPTY_TUPLE SETITEMS BINFLOAT PROTO NEWOBJ TUPLE1 TUPLE2 TUPLE3 NEWTRUE NEWFALSE LONG1 "
    "LONG4 BINBYTES SHORT_BINBYTES SHORT_BINUNICODE BINUNICODE8 BINBYTES8 EMPTY_SET ADDITEMS FROZENSET NEWOBJ_EX STACK_GLOBAL "
    "MEMOIZE FRAME"
)
OPCODES = {getattr(pickle, name)[0] for name in _OPCODES.split()}
"""The opcodes that are read. Those that could reserve memory for data which the file does not have are not among them."""


class NestedKeyError(ValueError):
    """A key of a dictionary or an entry of a set is a tuple of tuples."""


class Stub:
    """An object whose class or function is not available. Each named class is a subclass of this one.

    Attributes:
        name: The name in the pickle, such as "omegaconf.dictconfig.DictConfig".
        arguments: What it was called with.
        state: What its `__setstate__` would have been given.
        items: What would have been added to it, as a list, set or dictionary.
    """

    name = "?"

    def __new__(cls, *arguments: Any, **options: Any) -> "Stub":
        """Store the arguments."""
        self = super().__new__(cls)
        self.arguments, self.state, self.items = (*arguments, *options.items()), None, []
        return self

    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def append(self, item: Any) -> None:
        """Store an item of a list.

        Args:
            item: The item.
        """
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Store items of a list.

        Args:
            items: The items.
        """
        self.items.extend(items)

    update = extend

    def __setitem__(self, key: Any, value: Any) -> None:
        """Store an item of a dictionary."""
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"Stub({self.name})"


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The numbers of one or more tensors, in the archive."""

    archive: "_Archive"
    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a file, whose values are not read yet.

    Args:
        storage: Where its values are.
        offset: The index of its first value.
        shape: Its shape.
        stride: Its strides.

    Raises:
        ValueError: It exceeds or repeats what is stored.
    """

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        values = (self.offset, *self.shape, *self.stride)
        if len(values) > 1 + 2 * MAX_RANK or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
            raise ValueError("a tensor has a shape or strides that are not whole numbers")
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        if math.prod(self.shape) > 0 and last >= self.storage.numel:
            raise ValueError(f"a tensor of shape {list(self.shape)} exceeds its {self.storage.numel:,} stored values")
        if math.prod(self.shape) > self.storage.numel:  # strides of zero: the values of the file are repeated
            raise ValueError(f"a tensor of shape {list(self.shape)} repeats its {self.storage.numel:,} stored values")

    def read(self) -> Tensor:
        """Return the values.

        Raises:
            ValueError: The archive is damaged.
        """
        values = self.storage.archive.read_storage(self.storage)
        return values.as_strided(self.shape, self.stride, self.offset)


class _Archive:
    """A zip file of `torch.save`: a pickle, and a file of raw numbers for each storage."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        pickles = [name for name in self.zip.namelist() if name.count("/") <= 1 and name.split("/")[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("it is a zip file, but not one of torch.save")
        self.prefix = pickles[0].removesuffix("data.pkl")
        if self.prefix + "constants.pkl" in self.zip.namelist():
            raise ValueError("it is a TorchScript program")
        self.little = self._text("byteorder") in (None, "little")

    def _text(self, name: str) -> str | None:
        """A short text of the archive; None where there is none."""
        path = self.prefix + name
        return self._bytes(path, 100).decode("ascii").strip() if path in self.zip.namelist() else None

    def _bytes(self, path: str, most: int) -> bytes:
        """A file of the archive."""
        info = self.zip.getinfo(path)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
            raise ValueError(f"{path} is compressed, or has more than {most:,} bytes")
        return self.zip.read(info)

    def load(self) -> Any:
        """The object that was saved."""
        return _Unpickler(self, self._bytes(self.prefix + "data.pkl", MAX_PICKLE)).load()

    def read_storage(self, storage: _Storage) -> Tensor:
        """The numbers of a storage."""
        info = self.zip.getinfo(f"{self.prefix}data/{storage.key}")
        wanted = storage.numel * storage.dtype.itemsize
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != wanted:
            raise ValueError(f"the values {storage.key} have {info.file_size:,} bytes, expected {wanted:,} uncompressed ones")
        if not self.little:
            raise ValueError("it was written on a big-endian machine")
        raw = torch.empty(wanted, dtype=torch.uint8)
        with self.zip.open(info) as file:
            target, at = raw.numpy(), 0
            while part := file.read(PART):  # to the end, where the checksum is compared
                target[at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)
                at += len(part)
        if at != wanted:
            raise ValueError(f"the values {storage.key} are cut short")
        return raw.view(storage.dtype)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """What `torch._utils._rebuild_tensor_v2` builds."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor has no stored values")
    return StoredTensor(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    """What `torch._utils._rebuild_parameter` builds."""
    return data


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Bytes, which protocol 2 stores as text."""
    return text.encode("latin1")


def _set(items: Iterable[Any] = ()) -> set[Any]:
    """A set, where its entries can be hashed."""
    return set(_hashable(items))


def _dict(entries: Iterable[Any] = ()) -> dict[Any, Any]:
    """A dictionary, where its keys can be hashed."""
    return _fill({}, entries)


def _ordered(entries: Iterable[Any] = ()) -> OrderedDict[Any, Any]:
    """An ordered dictionary, where its keys can be hashed."""
    return _fill(OrderedDict(), entries)


def _fill(found: Any, entries: Any) -> Any:
    """Add the pairs of a list, or those of a dictionary."""
    pairs = [tuple(pair) for pair in (entries.items() if isinstance(entries, dict) else entries)]
    _hashable(key for key, _ in pairs)
    found.update(pairs)
    return found


def _hashable(keys: Iterable[Any]) -> list[Any]:
    """Return keys of a dictionary or a set; NestedKeyError for a tuple of tuples.

    Python hashes tuples by recursion in C, without a limit: a deep one ends the process. One that refers to the same tuple
    again and again takes forever.
    """
    found = list(keys)
    for key in found:
        if isinstance(key, tuple) and any(isinstance(each, tuple) for each in key):
            raise NestedKeyError("a key is a tuple of tuples")
    return found


SAFE: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("_codecs", "encode"): _encode,
    **{(module, "set"): _set for module in ("builtins", "__builtin__")},
    **{(module, "dict"): _dict for module in ("builtins", "__builtin__")},
}
"""The names that stand for something. All others become stubs."""


_PYTHON: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_PYTHON):
    """Reads a pickle with a short list of opcodes and callables.

    The implementation in Python is used, not the one in C: its opcodes can be restricted.
    """

    dispatch: ClassVar[dict[int, Any]] = {key: read for key, read in _PYTHON.dispatch.items() if key in OPCODES}

    def __init__(self, archive: _Archive, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self.archive = archive
        self.stubs: dict[tuple[str, str], type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return one of `SAFE`, the dtype of a storage, or a stub."""
        key = (str(module), str(name))
        if key in SAFE:
            return SAFE[key]
        if key not in self.stubs:
            if len(self.stubs) == MAX_NAMES:
                raise ValueError(f"it names more than {MAX_NAMES:,} classes")
            self.stubs[key] = type("Stub", (Stub,), {"name": ".".join(key)})
        return self.stubs[key]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a storage of the archive."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise ValueError("it refers to data outside the file")
        kind, key, numel = pid[1], pid[2], pid[4]
        found = getattr(kind, "name", type(kind).__name__)
        module, _, name = found.rpartition(".")
        if module != "torch" or name not in STORAGES or not (isinstance(key, str) and KEY.fullmatch(key)):
            raise ValueError(f"its tensors have the storage {found[:80]}, which is not read")
        if type(numel) is not int or not 0 <= numel < 1 << 50:
            raise ValueError("a storage has an impossible size")
        return _Storage(self.archive, key, STORAGES[name], numel)

    def load_reduce(self) -> None:
        """Call a function of `SAFE`, or a stub."""
        arguments = self.stack.pop()
        self.stack[-1] = _callable(self.stack[-1])(*arguments)

    def load_newobj(self) -> None:
        """Make an object of a class."""
        arguments = self.stack.pop()
        self.stack[-1] = _callable(self.stack[-1])(*arguments)

    def load_newobj_ex(self) -> None:
        """Make an object of a class, with keyword arguments."""
        options = self.stack.pop()
        arguments = self.stack.pop()
        self.stack[-1] = _callable(self.stack[-1])(*arguments, **options)

    def load_build(self) -> None:
        """Store the state of a stub. Attributes of a dictionary, such as versions of modules, are left out."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.state = state
        elif type(target) is not OrderedDict:
            raise ValueError("it changes an object that has no state")

    def load_setitem(self) -> None:
        """Add an entry to a dictionary or a stub."""
        _hashable(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Add entries to a dictionary or a stub."""
        _hashable(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        """Make a dictionary."""
        _hashable(self.stack[::2])
        super().load_dict()

    def load_additems(self) -> None:
        """Add entries to a set."""
        _hashable(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        """Make a frozen set."""
        _hashable(self.stack)
        super().load_frozenset()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build


def _callable(value: Any) -> Callable[..., Any]:
    """A function of `SAFE` or a class of stubs; ValueError for anything else. What a stub returns is a stub."""
    if isinstance(value, Stub):
        return type(value)
    if isinstance(value, type) and issubclass(value, Stub):
        return value
    if any(value is known for known in SAFE.values()):
        return value
    raise ValueError("it calls an object that is not a function")


def read_stubbed(path: Path) -> Any:
    """Read a file of `torch.save`, without importing or calling anything that it names.

    Args:
        path: The file.

    Returns:
        What was saved: dictionaries, lists, numbers, strings, `StoredTensor`s, and `Stub`s in the place of other objects.

    Raises:
        ValueError: The file is damaged, or of another format.
        OSError: It cannot be opened.
    """
    try:
        return _Archive(path).load()
    except OSError:
        raise
    except zipfile.BadZipFile:
        reason = "it is not a zip file of torch.save (files of torch 1.5 and earlier are not read)"
    except (Exception, RecursionError, MemoryError) as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__} {str(error)[:160]}" if not isinstance(error, ValueError) else str(error)[:200]
    raise ValueError(f"{path} is damaged, or no checkpoint: {reason}. Copy it again, or save its weights as .safetensors")


def check_keys(path: Path) -> None:
    """Check a file of `torch.save` for keys that end the process that hashes them, as `torch.load` would.

    Args:
        path: The file. Other damage is left to `torch.load`, which has better words for it.

    Raises:
        NestedKeyError: A key is a tuple of tuples.
    """
    try:
        _Archive(path).load()
    except NestedKeyError:
        raise
    except (Exception, RecursionError, MemoryError):
        return


def read_tensors(path: Path, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the values of tensors of a file.

    Args:
        path: The file, for the message of an error.
        stored: `StoredTensor`s by name.

    Returns:
        Tensors by name.

    Raises:
        ValueError: An entry is not a tensor, or the file is damaged.
    """
    found: dict[str, Tensor] = {}
    for name, value in stored.items():
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{path}: {str(name)[:80]} is not a tensor: it was not written by the authors' code")
        try:
            found[name] = value.read()
        except (ValueError, KeyError, RuntimeError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{path} is damaged ({str(name)[:80]}: {error}): copy it again") from None
    return found


def plain(value: Any) -> Any:
    """Return a configuration of omegaconf as dictionaries and lists.

    Args:
        value: What `read_stubbed` returned for it.

    Returns:
        Dictionaries, lists, numbers and strings. An object of another class is None. References such as "${data.length}" stay
        as they are.

    Raises:
        ValueError: It is nested too deeply, or has too many entries.
    """
    return _plain(value, 0, itertools.count())


def _plain(value: Any, depth: int, counter: Iterator[int]) -> Any:
    """A part of a configuration; `counter` counts the parts."""
    if depth > MAX_DEPTH:
        raise ValueError("a configuration is nested too deeply: it was not written by the authors' code")
    if next(counter) > MAX_ENTRIES:
        raise ValueError(f"a configuration has more than {MAX_ENTRIES:,} entries: it was not written by the authors' code")
    if isinstance(value, Stub):
        state = value.state[0] if isinstance(value.state, tuple) and value.state else value.state
        state = state if isinstance(state, dict) else {}
        if not value.name.startswith("omegaconf."):
            return None
        return _plain(state["_content"] if "_content" in state else state.get("_val"), depth + 1, counter)
    if isinstance(value, dict):
        return {str(key): _plain(entry, depth + 1, counter) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1, counter) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None
