"""The compiled GPU data plane (native/m2n/api.h) through ctypes: no Python version, no torch, no libcuda linked."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

from ffn_faas import native
from ffn_faas.errors import NativeMissing, ResourceError

if TYPE_CHECKING:
    from ffn_faas.connectors.m2n_window import WindowAddresses

VERSION = 5
WAIT_SORT, EXPERTS, COMBINE, OVERLAP = 1, 2, 4, 8
STEP = WAIT_SORT | EXPERTS | COMBINE | OVERLAP
REMEDY = "install ffn-faas where nvcc (CUDA 12.8 or newer) is found: pip install --no-cache-dir ."
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_U64 = ctypes.c_uint64
_I64 = ctypes.c_int64
KEPT_TIMES = 8192


class _Device(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("uuid", ctypes.c_uint8 * 16),
        ("major", _INT),
        ("minor", _INT),
        ("multiprocessors", _INT),
        ("total_bytes", _U64),
    )


class Counters(ctypes.Structure):
    """Written by the kernels into pinned host memory; reading is free."""

    _fields_ = tuple(
        (name, _U64)
        for name in (
            *("waits", "taken", "completed", "rows", "pairs", "experts_hit", "faults"),
            *("items", "wait_ns", "compute_ns", "send_ns"),
        )
    )
    waits: int
    taken: int
    completed: int
    rows: int
    pairs: int
    experts_hit: int
    faults: int
    items: int
    wait_ns: int
    compute_ns: int
    send_ns: int


class ItemTimes(ctypes.Structure):
    """``ffn_m2n_item_times``: one item of an F rank, in ns of the device's globaltimer."""

    _fields_ = (
        *((name, _U64) for name in ("number", "taken", "sorted", "computed", "sent")),
        *((name, _INT) for name in ("layer", "rows", "parts", "unused")),
    )
    number: int
    taken: int
    sorted: int
    computed: int
    sent: int
    layer: int
    rows: int
    parts: int


class PostTimes(ctypes.Structure):
    """``ffn_m2n_post_times``: one post of an A rank."""

    _fields_ = (
        *((name, _U64) for name in ("number", "dispatching", "dispatched", "waiting", "answered", "summed")),
        *((name, _INT) for name in ("layer", "rows")),
    )
    number: int
    dispatching: int
    dispatched: int
    waiting: int
    answered: int
    summed: int
    layer: int
    rows: int


class Items(ctypes.Structure):
    """``ffn_m2n_items``."""

    _fields_ = (("ended", _U64), ("kept", ItemTimes * KEPT_TIMES))


class Posts(ctypes.Structure):
    """``ffn_m2n_posts``."""

    _fields_ = (("ended", _U64), ("kept", PostTimes * KEPT_TIMES))


class ServiceConfig(ctypes.Structure):
    """``ffn_m2n_service_config``."""

    _fields_ = (
        *((n, _INT) for n in ("hidden_size", "intermediate_size", "top_k", "num_layers", "num_experts")),
        ("item_rows", _INT),
        ("wait_us", _INT),
        ("multiprocessors", _INT),
        ("weight_rows", ctypes.c_int64),
        ("device_w13", _POINTER),
        ("device_w2", _POINTER),
        ("layer_base", ctypes.POINTER(_INT)),
    )


class Window(ctypes.Structure):
    """``ffn_m2n_window``."""

    _fields_ = tuple(
        (name, _POINTER)
        for name in (
            "dispatch_flag",
            "dispatch_head",
            "dispatch_ids",
            "dispatch_weights",
            "dispatch_hidden",
            "combine_flag",
            "combine_partial",
        )
    )


@dataclass(frozen=True)
class Device:
    """One GPU that this process sees."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "device_count": (ctypes.POINTER(_INT),),
    "describe_device": (_INT, ctypes.POINTER(_Device)),
    "use_device": (_INT,),
    "enable_peer": (_INT, _INT),
    "allocate": (_U64, ctypes.POINTER(_POINTER)),
    "free": (_POINTER,),
    "export": (_POINTER, ctypes.c_char_p),
    "open": (ctypes.c_char_p, ctypes.POINTER(_POINTER)),
    "close": (_POINTER,),
    "copy": (_POINTER, _POINTER, _U64),
    "service_create": (ctypes.POINTER(ServiceConfig), ctypes.POINTER(_POINTER)),
    "service_destroy": (_POINTER,),
    "service_set_lane": (_POINTER, _INT, ctypes.POINTER(Window), _INT, _U64),
    "service_lane_fault": (_POINTER, _INT, ctypes.POINTER(_INT)),
    "service_capture": (_POINTER, _INT),
    "service_step": (_POINTER, _INT),
    "service_idle": (_POINTER,),
    "service_enqueue": (_POINTER, _INT, _POINTER),
    "attention_create": (_INT, _INT, _INT, _INT, _INT, _INT, _U64, _INT, ctypes.POINTER(_POINTER)),
    "attention_destroy": (_POINTER,),
    "attention_set_link": (_POINTER, _INT, _INT, ctypes.POINTER(Window), _U64, _INT, _INT),
    "attention_offer": (_POINTER, ctypes.c_uint32),
    "attention_active": (_POINTER, _INT, ctypes.POINTER(ctypes.c_uint32)),
    "attention_long_wait": (_POINTER, _INT, ctypes.POINTER(_U64), ctypes.POINTER(_INT)),
    "attention_begin": (_POINTER,),
    "attention_dispatch": (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "attention_receive": (_POINTER, _INT, _POINTER, _INT, _POINTER),
    "attention_status": (_POINTER, _INT, ctypes.POINTER(ctypes.c_uint32)),
    "attention_times": (_POINTER, _INT, ctypes.POINTER(_POINTER)),
    "observer_create": (ctypes.POINTER(_POINTER),),
    "observer_destroy": (_POINTER,),
    "observer_copy": (_POINTER, _POINTER, _POINTER, _U64),
    "observer_clock": (_POINTER, ctypes.POINTER(_U64), ctypes.POINTER(_I64), ctypes.POINTER(_I64)),
    "permute_rows": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    "fill_rows": (_POINTER, _POINTER, _POINTER, _U64, _U64, _INT, _INT),
    "uploader_create": (_U64, ctypes.POINTER(_POINTER)),
    "uploader_destroy": (_POINTER,),
    "uploader_buffer": (_POINTER, ctypes.POINTER(_POINTER)),
    "uploader_put": (_POINTER, _POINTER, _POINTER, _INT, _INT),
    "uploader_finish": (_POINTER,),
    "synchronize": (),
    "read_all": (_POINTER, _U64, _POINTER, _POINTER),
}


class Library:
    """Calls by name without the prefix; every one raises ResourceError with the reason. Releases the GIL."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NativeMissing(f"{path} cannot be loaded: {error}", remedy=REMEDY) from error
        self._error = self._function("error", (), ctypes.c_char_p)
        version = self._function("version", (), _INT)()
        if version != VERSION:
            raise NativeMissing(f"{path} has version {version}, this package needs {VERSION}", remedy=REMEDY)
        self._functions = {name: self._function(name, types, _INT) for name, types in _SIGNATURES.items()}
        self.service_stop = self._function("service_stop", (_POINTER, ctypes.c_uint32), None)
        self.attention_stop = self._function("attention_stop", (_POINTER, ctypes.c_uint32), None)
        self.service_times = self._function("service_times", (_POINTER,), _POINTER)
        self.service_stream = self._function("service_stream", (_POINTER,), _POINTER)
        self.service_bytes = self._function("service_bytes", (ctypes.POINTER(ServiceConfig),), _U64)
        self.service_counters = self._function("service_counters", (_POINTER,), ctypes.POINTER(Counters))

    def call(self, name: str, *arguments: object) -> None:
        """``ffn_m2n_<name>(*arguments)``."""
        if self._functions[name](*arguments):
            raise ResourceError(f"GPU: {(self._error() or b'').decode()}")

    def devices(self) -> list[Device]:
        """Those that CUDA_VISIBLE_DEVICES lets this process see."""
        count = _INT()
        self.call("device_count", ctypes.byref(count))
        found = []
        for index in range(count.value):
            raw = _Device()
            self.call("describe_device", index, ctypes.byref(raw))
            uuid = bytes(raw.uuid).hex()
            capability = (raw.major, raw.minor)
            found.append(Device(index, raw.name.decode(), uuid, capability, raw.multiprocessors, raw.total_bytes))
        return found

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory of its own allocation."""
        address = _POINTER()
        self.call("allocate", nbytes, ctypes.byref(address))
        return int(address.value or 0)

    def export(self, address: int) -> bytes:
        """The 64-byte handle by which another process opens this allocation."""
        handle = ctypes.create_string_buffer(64)
        self.call("export", address, handle)
        return handle.raw

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; ``close`` it before that process is expected to reuse the memory."""
        address = _POINTER()
        self.call("open", handle, ctypes.byref(address))
        return int(address.value or 0)

    def _function(self, name: str, types: tuple[object, ...], result: object) -> ctypes._NamedFuncPointer:
        function: ctypes._NamedFuncPointer = getattr(self._library, f"ffn_m2n_{name}")
        function.argtypes = types  # type: ignore[assignment]
        function.restype = result  # type: ignore[assignment]
        return function


def window(addresses: WindowAddresses) -> Window:
    """As the library takes it."""
    return Window(**asdict(addresses))


@cache
def load() -> Library:
    """The library of this installation. Raises NativeMissing when it was built without nvcc."""
    path = native.optional_library("m2n")
    if path is None:
        raise NativeMissing("this installation of ffn-faas was built without the GPU backend", remedy=REMEDY)
    return Library(str(path))
