"""A runtime of XLA's custom calls made of ctypes: the structs of its C interface, and calls of any version."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from blocksparse._core import library

P, SIZE, I32, I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_int64


def struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": [(n, t) for n, t in fields]})


BASE = (("struct_size", SIZE), ("extension_start", P))
Extension = struct("Extension", ("struct_size", SIZE), ("type", I32), ("next", P))
Version = struct("Version", *BASE, ("major", I32), ("minor", I32))
Metadata = struct("Metadata", ("struct_size", SIZE), ("version", Version), ("traits", ctypes.c_uint32), ("state", I64))
MetadataExtension = struct("MetadataExtension", ("base", Extension), ("metadata", ctypes.POINTER(Metadata)))
ErrorOptions = struct("ErrorOptions", *BASE, ("message", ctypes.c_char_p), ("code", I32))
Buffer = struct("Buffer", *BASE, ("dtype", I32), ("data", P), ("rank", I64), ("dims", ctypes.POINTER(I64)))
Buffers = struct("Buffers", *BASE, ("size", I64), ("types", ctypes.POINTER(I32)), ("items", ctypes.POINTER(P)))
Name = struct("Name", ("text", ctypes.c_char_p), ("size", SIZE))
Array = struct("Array", ("dtype", I32), ("size", SIZE), ("data", P))
Attributes = struct(
    "Attributes",
    *BASE,
    *(("size", I64), ("types", ctypes.POINTER(I32)), ("names", ctypes.POINTER(P)), ("items", ctypes.POINTER(P))),
)
CREATE_ERROR = ctypes.CFUNCTYPE(P, ctypes.POINTER(ErrorOptions))
Api = struct(
    "Api",
    *(*BASE, ("version", Version), ("internal", P), ("create_error", CREATE_ERROR)),
    *((name, P) for name in ("get_message", "destroy_error", "register", "get_stream")),
    *((f"later{i}", P) for i in range(16)),  # which newer versions add
)
CallFrame = struct(
    "CallFrame",
    *(*BASE, ("api", P), ("context", P), ("stage", I32), ("args", Buffers), ("results", Buffers)),
    *(("attributes", Attributes), ("future", P)),
)
DTYPES = {"float16": 10, "float32": 11, "float64": 12, "bfloat16": 16, "int32": 4, "int64": 5, "uint8": 6}
EXECUTE = 3


def handler(name):
    function = library.function(name)
    function.restype, function.argtypes = P, [P]
    return function


@dataclass
class Runtime:
    """One that speaks a version of the interface; None: it does not say which."""

    version: tuple[int, int] | None
    errors: list = field(default_factory=list)

    def __post_init__(self):
        def create(options):
            self.errors.append((options.contents.code, options.contents.message.decode()))
            return 1

        self._kept = [CREATE_ERROR(create)]
        if self.version is not None:
            self.api = Api(ctypes.sizeof(Api), None, Version(ctypes.sizeof(Version), None, *self.version))
            self.api.create_error = self._kept[0]

    def _frame(self):
        frame = CallFrame(ctypes.sizeof(CallFrame), None)
        if self.version is not None:
            frame.api = ctypes.addressof(self.api)
        return frame

    def metadata(self, name, *, size=None):
        """What a handler reports: its version and its traits."""
        frame = self._frame()
        made = Metadata(ctypes.sizeof(Metadata) if size is None else size)
        made.version.major = made.version.minor = -7
        extension = MetadataExtension(Extension(ctypes.sizeof(MetadataExtension), 1, None), ctypes.pointer(made))
        frame.extension_start = ctypes.addressof(extension)
        assert not handler(name)(ctypes.addressof(frame))
        return (made.version.major, made.version.minor), made.traits

    def call(self, name, operands, results, numbers, *, stage=EXECUTE, size=None):
        """Runs a handler on NumPy arrays; the (code, message) of its error, or None."""
        frame, kept = self._frame(), []
        frame.stage = stage
        if size is not None:
            frame.struct_size = size
        for field_name, arrays in (("args", operands), ("results", results)):
            buffers = []
            for array in arrays:
                dims = (I64 * array.ndim)(*array.shape)
                made = Buffer(ctypes.sizeof(Buffer), None, DTYPES[array.dtype.name], array.ctypes.data, array.ndim)
                made.dims = dims
                buffers.append(made)
                kept.append(dims)
            count = len(buffers)
            types, items = (I32 * count)(*[1] * count), (P * count)(*map(ctypes.addressof, buffers))
            kept += [buffers, types, items]
            setattr(frame, field_name, Buffers(ctypes.sizeof(Buffers), None, count, types, items))
        given = {"a": np.zeros(3), "numbers": np.asarray(numbers, np.int64), "z": np.zeros(1)}  # XLA sorts by name
        names = [Name(text.encode(), len(text)) for text in given]
        arrays = [Array(DTYPES[a.dtype.name], a.size, a.ctypes.data) for a in given.values()]
        count = len(given)
        frame.attributes = Attributes(
            ctypes.sizeof(Attributes),
            None,
            count,
            (I32 * count)(*[1] * count),
            (P * count)(*map(ctypes.addressof, names)),
            (P * count)(*map(ctypes.addressof, arrays)),
        )
        before = len(self.errors)
        failed = handler(name)(ctypes.addressof(frame))
        assert bool(failed) == (len(self.errors) > before)
        return self.errors[-1] if failed else None
