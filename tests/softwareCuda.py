"""A CUDA device made of software, to run the GPU's code where there is no GPU.

`with softwareCuda.machine() as gpu:` gives `torch` devices `cuda:0`, `cuda:1`, ... Their tensors (`OnDevice`)
compute on the CPU, but refuse what CUDA refuses, and `gpu` counts what CUDA makes the host wait for:

- What `torch.empty` and its like give holds nan and -1.
- Operators that mix devices raise, but for 0-dimensional CPU tensors. So do `.numpy()`, and generators of a CPU.
- `gpu.syncs` lists each host sync with the line that caused it; `gpu.copies` the asynchronous copies to the device.
- A CUDA graph records operators and runs them again on the same memory. During a capture nothing is computed: what it
  wrote to older memory is undone, and its own results hold nan and -1 until they are replayed. A sync, a random draw,
  pinned memory and `torch.cuda.empty_cache` raise. Memory that was freed after a capture is nan and -1 for its replays.
- A replay overwrites what the graph before it has left, if they share a pool. After an error in a capture its pool
  cannot be used, nor can one whose graphs are all gone.
- Cumulative sums of a single row raise, but for a library's: CUDA's differ from run to run (pytorch issue 75240).
- `gpu.memory` is the size of each device's memory; more raises `torch.OutOfMemoryError`.

`machine(kind="mps")` gives `mps:0`, the GPU of an Apple computer, instead. It has no CUDA graphs, and refuses what MPS
lacks or computes wrongly: float64, bfloat16 (before macOS 14), sorting int64 (pytorch issue 155560), and sorts and
cumulative sums along the fifth dimension from the right or beyond (187105).

It says nothing of a GPU's speed, of its kernels' rounding, of streams that overlap, or of operators that CUDA cannot
capture for other reasons.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch._dynamo  # noqa: F401 - imported by a mode's first call, it would find the replaced functions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = str(Path(__file__).resolve().parent.parent)
LIBRARIES = "site-packages"
MEMORY = 16 << 30  # bytes of each device

# Names of operators. WAITING: the host must know the result, or its size. LEAVING: they leave memory as it is.
WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "repeat_interleave"}
WAITING |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
COPYING, INDEXING = {"_to_copy", "copy_"}, {"index", "index_put", "index_put_", "_index_put_impl_"}
LEAVING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Made of others, none of which is a sync: one call instead of a dozen.
WHOLE = {"linear", "matmul", "reshape", "layer_norm", "softmax", "scaled_dot_product_attention"}
BY_INDEX = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
# What MPS refuses.
TYPES_WITHOUT_MPS = {torch.float64, torch.complex128, torch.bfloat16}
SORTING = {"sort", "argsort", "topk", "kthvalue", "msort", "median", "mode", "unique_dim", "_unique2"}
ALONG_AN_AXIS = {"sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}
DROPPING = {"scaled_dot_product_attention", "dropout"}  # They draw in training only.
RESHAPING = {"set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_"}  # in place
# What torch asks to make a device the current one: a table by the type of a device, in which meta devices do nothing.
LIBC10 = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
GUARDS = (ctypes.c_void_p * 21).in_dll(ctypes.CDLL(str(LIBC10)), "_ZN3c104impl26device_guard_impl_registryE")
TYPES = {"cuda": 1, "mps": 13, "meta": 14}  # c10/core/DeviceType.h


class Machine:
    """The devices, of one kind ("cuda" or "mps"), and what happened on them.

    syncs, copies: (what, "file:line" of the project) of each host sync, and of each asynchronous copy to a device.
    recording: the graph being captured. captures: so far. streams: on which graphs were captured.
    """

    def __init__(self, count: int, memory: int, kind: str) -> None:
        self.count, self.memory, self.used, self.kind = count, memory, Counter(), kind
        self.syncs: list[tuple[str, str]] = []
        self.copies: list[tuple[str, str]] = []
        self.recording: Graph | None = None
        self.captures, self.streams = 0, weakref.WeakSet()

    def sync(self, what: str) -> None:
        """The host waits for the device."""
        if self.recording is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what}, {line()})")
        self.syncs.append((what, line()))

    def forget(self) -> None:
        """Empty the lists."""
        self.syncs.clear()
        self.copies.clear()

    def allocate(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Count the memory of a new tensor. It counts as free when `tensor` is gone."""
        size = tensor.nbytes
        if size > self.memory - self.used[device.index]:
            raise torch.OutOfMemoryError(f"{self.kind.upper()} out of memory. Tried to allocate {size} bytes")
        self.used[device.index] += size
        weakref.finalize(tensor, self.used.subtract, {device.index: size}).atexit = False

    def device(self, given: object) -> torch.device | None:
        """The software device that `given` names, with its number; None if it names none."""
        if given is None:
            return None
        device = torch.device(self.kind, given) if isinstance(given, int) else torch.device(given)
        if device.type != self.kind:
            return None
        index = device.index or 0
        if index >= self.count:
            raise RuntimeError(f"{self.kind.upper()} error: invalid device ordinal")
        return torch.device(self.kind, index)


MACHINE: Machine | None = None


def line() -> str:
    """Where the project, or else a test, called what happens now."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and LIBRARIES not in file and file != __file__:
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def in_library() -> bool:
    """Whether transformers, and not the project, called what happens now."""
    frame = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "/transformers/" in frame.f_code.co_filename


class Memory:
    """Alive as long as a tensor of a device uses the memory that it stands for."""


HELD: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()  # {address: memory}


class OnDevice(torch.Tensor):
    """A tensor that says it is on a software device; `inner` is the CPU tensor that holds its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> OnDevice:
        if device is None:  # accelerate takes this class for that of a parameter which it moves off the device.
            return torch.nn.Parameter(inner, requires_grad)
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=device, **layout)
        made.inner = inner
        address = inner.untyped_storage().data_ptr()
        made.memory = HELD.get(address) or HELD.setdefault(address, Memory())
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def numpy(self, **options: object) -> None:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu() first")

    def tolist(self) -> list:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **options: object) -> str:
        return f"OnDevice({self.inner}, device={self.device})"

    def __deepcopy__(self, memo: dict) -> OnDevice:
        made = OnDevice(self.inner.clone(), self.device)
        return torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made


class Generator(torch._C.Generator):
    """A generator that knows its software device. Its numbers are the CPU's."""

    def __new__(cls, device: object = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.where = MACHINE.device(device) or torch.device("cpu")
        return made

    @property
    def device(self) -> torch.device:
        return self.where


@functools.cache
def name_of(func: object) -> str:
    """The name of an operator, without its overload."""
    return func._schema.name.split("::")[1]


@functools.cache
def writes(func: object) -> tuple[list[tuple[int, str]], bool]:
    """The arguments that an operator writes to, and whether its results may share memory with its arguments."""
    aliases = [(i, argument.name, argument.alias_info) for i, argument in enumerate(func._schema.arguments)]
    written = [(i, name) for i, name, alias in aliases if alias is not None and alias.is_write]
    return written, any(result.alias_info is not None for result in func._schema.returns)


@functools.cache
def is_made_of_others(func: object) -> bool:
    """Whether torch computes an operator by others, which may be syncs. In inference mode it arrives as a whole."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return name_of(func) not in WHOLE and has_kernel(func.name(), "CompositeImplicitAutograd")


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: object) -> object:
    """An argument or a result, each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(mapped(change, part) for part in value) if isinstance(value, (list, tuple)) else value


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors of an argument or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for part in value for each in tensors(part)] if isinstance(value, (list, tuple)) else []


def dispatch(func, args: tuple, kwargs: dict) -> object:
    """Every operator comes here."""
    named = kwargs.get("device") or next((arg for arg in args if isinstance(arg, torch.device)), None)
    given = tensors([*args, *kwargs.values()])
    devices = {each.device for each in given if isinstance(each, OnDevice)}
    target = MACHINE.device(named) if named is not None else next(iter(devices), None)
    if not devices and target is None:
        return func(*args, **kwargs)
    if is_made_of_others(func):
        with Operators():
            return func.decompose(*args, **kwargs)
    check(func, given, devices, named, kwargs)
    options = {name: mapped(inner, arg) for name, arg in kwargs.items() if name != "pin_memory"}
    if MACHINE.device(named):
        options["device"] = torch.device("cpu")
    result = perform(func, mapped(inner, args), options)
    if target is None:
        return result
    if name_of(func) == "resize_":  # The wrapper takes the shape of its CPU tensor. Growth is not counted as memory.
        args[0].data = made = OnDevice(args[0].inner, args[0].device)
        args[0].memory = made.memory  # A graph that reads the memory from before is found out.
    if name_of(func) in LEAVING:
        poison(result)
    written, shares = writes(func)
    # In inference mode a view of a tensor from outside of it is no inference tensor either.
    outside = shares and any(isinstance(each, OnDevice) and not each.is_inference() for each in given)
    if written:
        returned = [args[i] if i < len(args) else kwargs[name] for i, name in written]
        count = len(func._schema.returns)
        return None if count == 0 else returned[0] if count == 1 else tuple(returned)
    with torch.inference_mode(False) if outside else contextlib.nullcontext():
        return mapped(functools.partial(on_device, target, shares), result)


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor that computes for a tensor."""
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


def on_device(device: torch.device, shares: bool, result: torch.Tensor) -> OnDevice:
    """The result of an operator as a tensor of the device."""
    if device.type == "mps" and result.dtype in TYPES_WITHOUT_MPS:
        raise TypeError(f"Cannot convert a MPS Tensor to {result.dtype} ({line()})")
    if not shares and MACHINE.recording is None:
        MACHINE.allocate(result, device)
    return OnDevice(result, device)


def check(func, given: list[torch.Tensor], devices: set, named: object, kwargs: dict) -> None:
    """Raise where CUDA raises, and count syncs."""
    name = name_of(func)
    is_row = name == "cumsum" and given[0].is_floating_point() and max(given[0].shape) == given[0].numel()
    if is_row and MACHINE.kind == "cuda" and not in_library():
        raise RuntimeError(f"the sums of a single row differ from run to run on a GPU ({line()})")
    if name in RESHAPING:
        raise RuntimeError(f"{name} would change the shape of a wrapper in place, which the software device refuses")
    if name in COPYING:
        check_copy(func, given, named, kwargs)
    else:
        off = [each for each in given if not isinstance(each, OnDevice)]
        if devices and name in INDEXING and isinstance(given[0], OnDevice):
            if any(each.dim() for each in off):
                MACHINE.sync("an index on the CPU")
            off = []
        if len(devices) > 1 or (devices and any(each.dim() for each in off)):
            where = sorted({str(each.device) for each in given})
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {where} ({name}, {line()})")
    if MACHINE.kind == "mps" and devices:
        check_mps(name, given, kwargs)
    draws = torch.Tag.nondeterministic_seeded in func.tags and name not in DROPPING
    if MACHINE.recording is not None and draws:
        raise RuntimeError("Attempt to draw during a capture from a generator that is not registered with its graph")
    if name in WAITING and devices and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        MACHINE.sync(name)
    if name in INDEXING and any(each.dtype in (torch.bool, torch.uint8) for each in given[1:] if devices):
        MACHINE.sync("an index by a mask")


def check_mps(name: str, given: list[torch.Tensor], kwargs: dict) -> None:
    """Raise where MPS lacks an operator, or gives wrong results."""
    for each in given:
        if each.dtype in TYPES_WITHOUT_MPS:
            raise TypeError(f"Cannot convert a MPS Tensor to {each.dtype} ({name}, {line()})")
    if name in SORTING and given[0].dtype == torch.int64:
        raise TypeError(f"MPS does not sort int64 ({name}, {line()})")
    if name in ALONG_AN_AXIS and given[0].dim() > 4:
        raise RuntimeError(f"MPS takes at most four dimensions ({name}, {line()})")


def check_copy(func, given: list[torch.Tensor], named: object, kwargs: dict) -> None:
    """Count a copy between the host and a device."""
    source = given[-1]
    target = given[0].device if name_of(func) == "copy_" else torch.device(named) if named else source.device
    kind = MACHINE.kind
    if kind not in (source.device.type, target.type) or source.device.type == target.type:
        return
    if target.type == kind and kwargs.get("non_blocking") and getattr(source, "pinned", False):
        MACHINE.copies.append(("copy to the device", line()))
    elif name_of(func) != "copy_" or target.type == "cpu" or source.dim():
        MACHINE.sync("copy to the host" if target.type == "cpu" else "copy to the device")


def perform(func, args: tuple, kwargs: dict) -> object:
    """The operator on CPU tensors; recorded during a capture."""
    graph = MACHINE.recording
    if graph is None:
        return func(*args, **kwargs)
    for i, name in writes(func)[0]:
        for each in tensors(args[i] if i < len(args) else kwargs[name]):
            graph.before_writing(each)
    result = func(*args, **kwargs)
    graph.record(func, args, kwargs, result)
    return result


class PoolHandle:
    """`torch.cuda.graph_pool_handle`. graphs: that use the memory. last: the one that was replayed last."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.was_used = self.is_capturing = False
        self.last: Graph | None = None

    def begin(self, graph: Graph) -> None:
        """A capture begins."""
        if self.is_capturing:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.was_used and not self.graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: all graphs of the pool are gone")
        self.was_used = self.is_capturing = True
        self.graphs.add(graph)
        graph.pool = self


class Graph:
    """`torch.cuda.CUDAGraph`: the operators of a capture, run again on the same memory by `replay`."""

    pool: PoolHandle

    def __init__(self, *args: object, **options: object) -> None:
        self.tape: list[tuple] = []
        self.made: dict[int, torch.Tensor] = {}  # {address: a tensor made in the capture}
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # {address: memory written to, what it held}
        self.read: dict[int, tuple[weakref.ref[Memory], torch.Tensor]] = {}  # {address: older memory, a tensor in it}

    def before_writing(self, tensor: torch.Tensor) -> None:
        """Older memory gets back what it held, when the capture ends."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self.made and address not in self.kept:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.kept[address] = whole, whole.clone()

    def record(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """One more operator."""
        for each in tensors(args) + tensors(list(kwargs.values())):
            address = each.untyped_storage().data_ptr()
            if address not in self.made and address in HELD:
                self.read[address] = weakref.ref(HELD[address]), each
        shares = writes(func)[1]
        for each in tensors(result):
            if not shares:
                self.made[each.untyped_storage().data_ptr()] = each
        self.tape.append((func, args, kwargs, result))

    def end(self) -> None:
        """The capture ends: nothing was computed."""
        for whole, held in self.kept.values():
            whole.copy_(held)
        self.kept.clear()
        self.overwrite()

    def overwrite(self) -> None:
        """Its own memory holds anything."""
        for each in self.made.values():
            poison(each)

    def replay(self) -> None:
        """Run the operators again."""
        if MACHINE.recording is not None:
            raise RuntimeError("CUDA error: a graph is replayed during a capture")
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            for memory, tensor in self.read.values():
                if memory() is None:  # Only the tape refers to it: it was freed, and may hold anything.
                    poison(tensor)
            if self.pool.last not in (None, self):
                self.pool.last.overwrite()
            self.pool.last = self
            for func, args, kwargs, result in self.tape:
                for kept, new in zip(tensors(result), tensors(func(*args, **kwargs))):
                    if kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no result is: nan, -1, True."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else -1)


@contextlib.contextmanager
def capture(graph: Graph, pool: PoolHandle | None = None, stream: Stream | None = None):
    """`torch.cuda.graph`."""
    if MACHINE.recording is not None:
        raise RuntimeError("CUDA error: a capture inside a capture")
    MACHINE.sync("torch.cuda.graph")  # It synchronises before a capture begins.
    (pool or PoolHandle()).begin(graph)
    MACHINE.recording, MACHINE.captures = graph, MACHINE.captures + 1
    MACHINE.streams.add(stream or Stream())
    try:
        yield
    except RuntimeError:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904
    else:
        graph.pool.is_capturing = False
    finally:
        MACHINE.recording = None
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            graph.end()


class Stream:
    """`torch.cuda.Stream`: work on it is done at once."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


class Functions(TorchFunctionMode):
    """What is decided before an operator is called: generators, pinned memory, `torch.tensor`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor or (func is torch.as_tensor and not isinstance(args[0], torch.Tensor)):
            return make_tensor(*args, **kwargs)
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device(MACHINE.kind, args[0])
        if func is torch.Tensor.pin_memory:
            if MACHINE.recording is not None:
                raise RuntimeError("CUDA error: pinned memory is allocated during a capture")
            made = args[0].clone()
            made.pinned = True
            return made
        # "cuda" without a number: torch would ask a library that is not there.
        args = tuple(numbered(arg) for arg in args) if func is torch.Tensor.to else args
        if kwargs.get("device") is not None:
            device = kwargs["device"]
            kwargs = {**kwargs, "device": numbered(torch.device(device) if isinstance(device, str) else device)}
        if func in BY_INDEX and isinstance(args[0], OnDevice):  # torch makes tensors of lists where no mode sees it.
            parts, where = args[1] if isinstance(args[1], tuple) else (args[1],), args[0].device
            index = tuple(make_tensor(part, device=where) if isinstance(part, list) else part for part in parts)
            args = args[0], index, *args[2:]
        generator = kwargs.get("generator")
        if generator is not None:
            drawn = kwargs.get("device") or next((each.device for each in tensors(list(args))), "cpu")
            wanted, got = torch.device(drawn).type, generator.device.type
            if wanted != got:
                raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{got}'")
        return func(*args, **kwargs)


def numbered(value: object) -> object:
    """The number added to a software device that has none, the device of a number; anything else as it is."""
    if type(value) is int:  # So accelerate names a GPU.
        return torch.device(MACHINE.kind, value)
    given = isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] == MACHINE.kind)
    return MACHINE.device(value) or value if given else value


def make_tensor(data: object, *, dtype=None, device=None, pin_memory: bool = False, requires_grad: bool = False):
    """`torch.tensor`. On a device it makes the host wait: it copies from memory that is not pinned."""
    if device is not None and MACHINE.device(device) is None:
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)
    made = torch.tensor(data, dtype=dtype, requires_grad=requires_grad)
    if pin_memory:
        made = made.clone()
        made.pinned = True
    return made if device is None else made.to(MACHINE.device(device))


class Operators(TorchDispatchMode):
    """Catches the operators that no tensor of a device takes part in, like `torch.zeros(..., device="cuda")`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def cuda(own: Machine) -> dict[str, object]:
    """What `torch.cuda` offers meanwhile."""

    def nothing(*args: object, **options: object) -> None:
        pass

    def used(device: object = 0) -> int:
        return own.used[own.device(device).index]

    def empty_cache() -> None:
        if own.recording is not None:
            raise RuntimeError("CUDA error: memory is freed during a capture")

    properties = SimpleNamespace(total_memory=own.memory, major=8, minor=0, name="software")
    return {
        "_lazy_init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: own.count,
        "current_device": lambda: 0,
        "set_device": nothing,
        "synchronize": lambda *device: own.sync("torch.cuda.synchronize"),
        "is_bf16_supported": lambda *args, **options: True,
        "Stream": Stream,
        "current_stream": lambda *device: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph_pool_handle": PoolHandle,
        "graph": capture,
        "get_device_name": lambda *device: "a GPU made of software",
        "get_device_capability": lambda *device: (8, 0),
        "get_device_properties": lambda *device: properties,
        "mem_get_info": lambda device=0: (own.memory - used(device), own.memory),
        "empty_cache": empty_cache,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "memory_allocated": used,
    }


def mps(own: Machine) -> dict[str, object]:
    """What `torch.mps` offers meanwhile."""
    return {
        "synchronize": lambda: own.sync("torch.mps.synchronize"),
        "device_count": lambda: own.count,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
    }


@contextlib.contextmanager
def machine(count: int = 1, memory: int = MEMORY, kind: str = "cuda"):
    """`torch` with `count` software devices of `memory` bytes each; gives the `Machine`. kind: "cuda", or "mps", of
    which there is one."""
    global MACHINE
    before, MACHINE = MACHINE, Machine(count, memory, kind)
    real, overwrite = torch.Generator, torch.__future__.set_overwrite_module_params_on_conversion
    users = [each for each in list(sys.modules.values()) if vars(each).get("Generator") is real]
    with contextlib.ExitStack() as stack:
        offered = cuda(MACHINE) if kind == "cuda" else mps(MACHINE)
        stack.enter_context(mock.patch.multiple(getattr(torch, kind), **offered))
        if kind == "mps":
            stack.enter_context(mock.patch.object(torch.backends.mps, "is_available", lambda: True))
        stack.callback(GUARDS.__setitem__, TYPES[kind], GUARDS[TYPES[kind]])
        GUARDS[TYPES[kind]] = GUARDS[TYPES["meta"]]
        for module in users:
            stack.enter_context(mock.patch.object(module, "Generator", Generator))
        # transformers would load weights in threads of its own, which no mode sees.
        stack.enter_context(mock.patch.dict("os.environ", HF_DEACTIVATE_ASYNC_LOAD="1"))
        # Neither Inductor nor Triton has such a device.
        stack.enter_context(mock.patch.object(torch, "compile", lambda model, **options: model))
        stack.enter_context(mock.patch("engine.cudaModel.CudaModel.has_kernel", False))
        # `Module.to` would put a tensor of a device into a parameter that is none.
        stack.callback(overwrite, torch.__future__.get_overwrite_module_params_on_conversion())
        overwrite(True)
        stack.enter_context(Operators())
        stack.enter_context(Functions())
        try:
            yield MACHINE
        finally:
            MACHINE = before
