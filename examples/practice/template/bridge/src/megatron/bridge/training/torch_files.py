"""Files that torch writes, written without torch: `torch.save` archives and a distributed checkpoint's `.metadata`.

A pickle names classes and functions by module and name. The stand-ins below bear torch's names and are registered as
torch's modules while the pickler looks; real torch then finds its own where it loads the file. The shapes were compared
with what torch 2.13 writes.
"""

import collections
import contextlib
import io
import pickle
import sys
import types
import zipfile

import numpy as np

_METADATA = "torch.distributed.checkpoint.metadata"


class _Fields:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Metadata(_Fields):
    """The index of a checkpoint."""

    __module__ = _METADATA


class TensorStorageMetadata(_Fields):
    """One tensor: properties, size, chunks."""

    __module__ = _METADATA


class BytesStorageMetadata(_Fields):
    """One object that is no tensor."""

    __module__ = _METADATA


class ChunkStorageMetadata(_Fields):
    """Where a part lies in its tensor: offsets, sizes."""

    __module__ = _METADATA


class MetadataIndex(_Fields):
    """The name of a part: fqn, offset, index."""

    __module__ = _METADATA


class StorageMeta(_Fields):
    """Which save wrote it: checkpoint_id, save_id, load_id, modules."""

    __module__ = _METADATA


class StorageInfo(_Fields):
    """Where a part lies on disk: relative_path, offset, length."""

    __module__ = "torch.distributed.checkpoint.filesystem"
    __qualname__ = "_StorageInfo"


class TensorProperties:
    """What torch notes of every tensor here: float32, strided, contiguous, neither gradient nor pinned memory."""

    __module__ = _METADATA

    def __getstate__(self):
        return _FLOAT32, _Strided(), False, _ContiguousFormat(), False


class Size(tuple):
    """A shape or an offset."""

    __module__ = "torch"

    def __reduce__(self):
        return Size, (tuple(self),)


class _Float32:
    """Found by torch under its name alone."""

    __module__ = "torch"

    def __reduce__(self):
        return "float32"


_FLOAT32 = _Float32()


class _Strided:
    def __reduce__(self):
        return _get_layout, ("torch.strided",)


class _ContiguousFormat:
    """The first member of torch's enumeration."""

    __module__ = _METADATA
    __qualname__ = "_MEM_FORMAT_ENCODING"

    def __reduce__(self):
        return type(self), (0,)


def _get_layout(name):
    raise NotImplementedError("only torch's own is ever called")


def _rebuild_tensor_v2(*arguments):
    raise NotImplementedError("only torch's own is ever called")


_get_layout.__module__ = "torch.serialization"
_rebuild_tensor_v2.__module__ = "torch._utils"

_STORAGES = {
    np.dtype(name): type(storage, (), {"__module__": "torch"})
    for name, storage in {
        "float32": "FloatStorage",
        "float64": "DoubleStorage",
        "int64": "LongStorage",
        "bool": "BoolStorage",
    }.items()
}

_STAND_INS = (
    Metadata,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    StorageInfo,
    TensorProperties,
    Size,
    _ContiguousFormat,
    _get_layout,
    _rebuild_tensor_v2,
    *_STORAGES.values(),
)


@contextlib.contextmanager
def _torch_names():
    modules = {name: types.ModuleType(name) for name in {item.__module__ for item in _STAND_INS} | {"torch"}}
    for item in _STAND_INS:
        setattr(modules[item.__module__], item.__qualname__, item)
    modules["torch"].float32 = _FLOAT32
    hidden = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(hidden)


class _TensorPickler(pickle.Pickler):
    """Pickles numpy arrays as torch tensors, whose values go to records of their own."""

    def __init__(self, stream):
        super().__init__(stream, protocol=2)
        self.values = []

    def reducer_override(self, obj):
        if not isinstance(obj, np.ndarray):
            return NotImplemented
        array = np.ascontiguousarray(obj).reshape(obj.shape)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return _rebuild_tensor_v2, (_Storage(array), 0, array.shape, strides, False, collections.OrderedDict())

    def persistent_id(self, obj):
        if not isinstance(obj, _Storage):
            return None
        self.values.append(obj.array.tobytes())
        return "storage", _STORAGES[obj.array.dtype], str(len(self.values) - 1), "cpu", obj.array.size


class _Storage:
    def __init__(self, array):
        self.array = array


def torch_save(value, archive="archive"):
    """Return what `torch.save(value)` would write; numpy arrays in `value` become tensors."""
    content = io.BytesIO()
    with _torch_names():
        pickler = _TensorPickler(content)
        pickler.dump(value)
    records = {
        "data.pkl": content.getvalue(),
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": sys.byteorder.encode(),
        **{f"data/{key}": values for key, values in enumerate(pickler.values)},
        "version": b"3\n",
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive_file:
        for name, data in records.items():
            archive_file.writestr(zipfile.ZipInfo(f"{archive}/{name}"), data)
    return stream.getvalue()


def pickle_metadata(metadata):
    """Return the content of a checkpoint's `.metadata`."""
    with _torch_names():
        return pickle.dumps(metadata, protocol=4)
