"""Launches that are repeated without Triton: what they go by, and that they are the same launches. Most need no GPU."""

import functools
import inspect
import types

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from qvit import Scales
from qvit import reference as R
from qvit.kernels import attend, dispatch, fused, launch, pack, paper, window
from qvit.ops import pattern_bias, window_bias
from qvit.windows import plan_windows

KERNELS = [(fused, "fused_kernel"), (pack, "pack_kernel"), (attend, "attend_kernel")]
KERNELS += [(window, "window_kernel"), (paper, "paper_kernel")]
if tuple(int(x) for x in triton.__version__.split(".")[:2]) >= launch.HOPPER_TRITON:
    from qvit.kernels import hopper, hopper_long, hopper_stream, window_warp

    KERNELS += [(hopper, "hopper_kernel"), (hopper_long, "hopper_long_kernel"), (window_warp, "window_warp_kernel")]
    KERNELS += [(hopper_stream, "hopper_pack_kernel"), (hopper_stream, "hopper_stream_kernel")]


class Compiled(CompiledKernel):
    """A compiled kernel that only says what it is launched with."""

    module = None
    function, packed_metadata = "function", "metadata"

    def __init__(self, launched):
        self.launched = launched

    def _init_handles(self):
        pass

    def run(self, *args):
        self.launched.append(args)


class Jitted:
    """A kernel in Triton's place: it only says what Triton is asked for, with all that the kernel takes in order."""

    def __init__(self, names, asked, launched):
        self.arg_names, self.pre_run_hooks = names, []
        self.asked, self.launched = asked, launched

    def __getitem__(self, grid):
        def run(*args, **options):
            positional = dict(zip(self.arg_names, args))
            assert not positional.keys() & options.keys()
            values = [(positional | options)[name] for name in self.arg_names]
            self.asked.append((*grid, *[x.data_ptr() if hasattr(x, "data_ptr") else x for x in values]))
            return Compiled(self.launched)

        return run


@pytest.fixture
def triton_calls(monkeypatch):
    """Grid and arguments of what Triton was asked to launch, and of what was launched without it."""
    asked, launched = [], []
    for module, name in KERNELS:
        names = [*inspect.signature(getattr(module, name).fn).parameters]
        monkeypatch.setattr(module, name, Jitted(names, asked, launched))
    driver = types.SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(dispatch, "driver", types.SimpleNamespace(active=driver))
    monkeypatch.setattr(dispatch, "_kept", {})
    return asked, launched


def arguments(launched):
    """Grid and arguments of a launch without Triton."""
    grid, (stream, function, metadata, *nothing), rest = launched[:3], launched[3:9], launched[9:]
    assert (stream, function, metadata, nothing) == ("stream", "function", "metadata", [None, None, None])
    return (*grid, *rest)


# ---------------------------------------------------------------- the operators' launches


def packed_qkv(batch, tokens, heads, dim, dtype=torch.float16):
    return torch.zeros(batch, tokens, 3, heads, dim, dtype=dtype)


def changed(operands, changes):
    return operands | {name: change(operands[name]) for name, change in (changes or {}).items()}


def attention_call(
    kind, monkeypatch, tokens=None, dim=None, batch=4, dtype=torch.float16, out_dtype=torch.float16, bias=None,
    changes=None, operands=None, **settings,
):  # fmt: skip
    """One call on new tensors, or on those of an earlier one, with the kernel of a kind; returns the tensors."""
    tokens = tokens or {"hopper": 197, "fused": 49, "warps": 49}.get(kind, 577)
    dim = dim or (32 if tokens == 49 else 64)
    monkeypatch.setattr(launch, "kind_of_kernel", lambda *operands: kind)
    q, k, v = packed_qkv(batch, tokens, 2, dim, dtype).permute(2, 0, 3, 1, 4).unbind(0)
    constants = torch.zeros(2, 6 * dim + 8, dtype=torch.int32)
    bias = None if bias is None else torch.zeros(bias, 2, tokens, tokens, dtype=torch.int32)
    out = torch.zeros(batch, tokens, 2, dim, dtype=out_dtype)
    operands = operands or changed({"q": q, "k": k, "v": v, "constants": constants, "bias": bias, "out": out}, changes)
    launch.attention(**operands, **{"high": False, "out_up": 8, "half": True} | settings)
    return operands


def window_call(kind, monkeypatch, high=False, image=(14, 14), pads=True, changes=None, operands=None):
    """The same for windows: the kernel for all GPUs, with either kind of bias or none, or Hopper's."""
    monkeypatch.setattr(launch, "_fits_warps", lambda *operands: kind == "warps")
    plan = plan_windows(*image, (7, 7), (3, 3))
    rows, pattern, _ = plan.tensors("cpu")
    q, k, v = packed_qkv(2, image[0] * image[1], 2, 32).unbind(2)
    constants = torch.zeros(2, 6 * 32 + 8, dtype=torch.int32)
    bias = torch.zeros(len(plan.masks), 2, 49, 49, dtype=torch.int32)
    bias = None if kind == "plain" else bias if kind == "rows" else R.pack_window_bias(bias)
    pad = torch.zeros(3, 2, 32, dtype=torch.float16) if pads else None
    new = {"q": q, "k": k, "v": v, "pad": pad, "constants": constants, "bias": bias, "rows": rows, "pattern": pattern}
    operands = operands or changed(new | {"out": torch.zeros(q.shape, dtype=torch.float16)}, changes)
    launch.window_attention(**operands, high=high, out_up=8, half=True)
    return operands


def attention_qkvpacked_call(
    kind, monkeypatch, tokens=None, heads=2, batch=4, dtype=torch.float16, changes=None, operands=None, **settings
):
    """`attention_call` of a packed projection."""
    tokens = tokens or {"hopper": 197, "fused": 49, "warps": 49}.get(kind, 577)
    channels = 64 if tokens <= 49 else 128
    monkeypatch.setattr(launch, "kind_of_kernel", lambda *operands: kind)
    qkv = torch.zeros(batch, tokens, 3 * channels, dtype=dtype)
    constants = torch.zeros(heads, 6 * channels // heads + 8, dtype=torch.int32)
    new = {"qkv": qkv, "constants": constants, "out": torch.zeros(batch, tokens, channels, dtype=dtype)}
    operands = operands or changed(new, changes)
    launch.attention_qkvpacked(**operands, **{"high": False, "out_up": 8, "half": True} | settings)
    return operands


def window_qkvpacked_call(
    kind, monkeypatch, heads=2, image=(14, 14), pads=True, changes=None, operands=None, **settings
):
    """`window_call` of a packed projection."""
    monkeypatch.setattr(launch, "_fits_warps", lambda *operands: kind == "warps")
    plan = plan_windows(*image, (7, 7), (3, 3))
    rows, pattern, _ = plan.tensors("cpu")
    constants = torch.zeros(heads, 6 * 64 // heads + 8, dtype=torch.int32)
    bias = torch.zeros(len(plan.masks), heads, 49, 49, dtype=torch.int32)
    bias = None if kind == "plain" else bias if kind == "rows" else R.pack_window_bias(bias)
    pad = torch.zeros(3, heads, 64 // heads, dtype=torch.float16) if pads else None
    qkv, out = (torch.zeros(2, *image, channels, dtype=torch.float16) for channels in (192, 64))
    new = {"qkv": qkv, "pad": pad, "constants": constants, "bias": bias, "rows": rows, "pattern": pattern, "out": out}
    operands = operands or changed(new, changes)
    launch.window_attention_qkvpacked(**operands, **{"high": False, "out_up": 8, "half": True} | settings)
    return operands


def paper_call(kind, monkeypatch, bias=None, operands=None):
    """The same for the published arithmetic."""
    q, k, v = packed_qkv(2, 49, 2, 32, torch.int8).permute(2, 0, 3, 1, 4).unbind(0)
    new = {"q": q, "k": k, "v": v, "constants": torch.zeros(8, dtype=torch.int32), "out": torch.zeros_like(q)}
    new["bias"] = None if bias is None else torch.zeros(bias, 2, 49, 49, dtype=torch.int32)
    operands = operands or new
    launch.attention_paper(**operands)
    return operands


HOPPER_ONLY = pytest.mark.skipif(len(KERNELS) == 5, reason="this Triton has no kernels for Hopper")
CALLS = [
    pytest.param(attention_call, "hopper", {}, 1, id="hopper", marks=HOPPER_ONLY),
    pytest.param(attention_call, "hopper_long", {"high": True}, 1, id="hopper_long", marks=HOPPER_ONLY),
    pytest.param(attention_call, "hopper_stream", {}, 2, id="hopper_stream", marks=HOPPER_ONLY),
    pytest.param(attention_call, "warps", {}, 1, id="short", marks=HOPPER_ONLY),
    pytest.param(attention_call, "fused", {}, 1, id="fused"),
    pytest.param(attention_call, "fused", {"bias": 2}, 1, id="fused_bias"),
    pytest.param(attention_call, "packed", {}, 2, id="packed"),
    pytest.param(attention_call, "packed", {"bias": 1}, 2, id="packed_bias"),
    pytest.param(window_call, "plain", {"image": (16, 16)}, 1, id="windows_with_pads"),
    pytest.param(window_call, "rows", {"pads": False}, 1, id="windows_with_bias"),
    pytest.param(window_call, "packed", {}, 1, id="windows_with_packed_bias"),
    pytest.param(window_call, "warps", {}, 1, id="windows_in_warps", marks=HOPPER_ONLY),
    pytest.param(window_call, "warps", {"pads": False}, 1, id="windows_in_warps_without_pads", marks=HOPPER_ONLY),
    pytest.param(attention_qkvpacked_call, "hopper", {}, 1, id="qkvpacked_hopper", marks=HOPPER_ONLY),
    pytest.param(attention_qkvpacked_call, "hopper_stream", {}, 2, id="qkvpacked_hopper_stream", marks=HOPPER_ONLY),
    pytest.param(attention_qkvpacked_call, "warps", {}, 1, id="qkvpacked_short", marks=HOPPER_ONLY),
    pytest.param(attention_qkvpacked_call, "fused", {}, 1, id="qkvpacked_fused"),
    pytest.param(attention_qkvpacked_call, "packed", {}, 2, id="qkvpacked_packed"),
    pytest.param(window_qkvpacked_call, "plain", {"image": (16, 16)}, 1, id="qkvpacked_windows_with_pads"),
    pytest.param(window_qkvpacked_call, "rows", {"pads": False}, 1, id="qkvpacked_windows_with_bias"),
    pytest.param(window_qkvpacked_call, "warps", {}, 1, id="qkvpacked_windows_in_warps", marks=HOPPER_ONLY),
    pytest.param(paper_call, None, {}, 1, id="paper"),
    pytest.param(paper_call, None, {"bias": 1}, 1, id="paper_bias"),
]


@pytest.mark.parametrize(("call", "kind", "settings", "count"), CALLS)
def test_the_second_launch_leaves_triton_out_and_is_the_one_triton_would_make(
    call, kind, settings, count, triton_calls, monkeypatch
):
    asked, launched = triton_calls
    monkeypatch.setattr(torch, "empty", functools.cache(torch.empty))  # the same workspaces in every call
    first = call(kind, monkeypatch, **settings)
    assert (len(asked), len(launched)) == (count, 0)
    second = call(kind, monkeypatch, **settings)  # the first one's tensors still live: these have other pointers
    assert (len(asked), len(launched)) == (count, count)
    dispatch._kept.clear()
    call(kind, monkeypatch, operands=second, **settings)
    assert asked[count:] == [arguments(x) for x in launched] != asked[:count] and first


CHANGES = {
    "batch": {"batch": 2},
    "tokens": {"tokens": 48},
    "head_dim": {"dim": 16},
    "dtype": {"dtype": torch.bfloat16},
    "dtype_of_k": {"changes": {"k": lambda x: x.to(torch.float32)}},
    "dtype_of_out": {"out_dtype": torch.int8},
    "dtype_of_constants": {"changes": {"constants": lambda x: x.long()}},
    "precision": {"high": True},
    "out_up": {"out_up": 7},
    "half": {"half": False},
    "stride_of_q": {"changes": {"q": lambda x: x.contiguous()}},
    "stride_of_k": {"changes": {"k": lambda x: x.contiguous()}},
    "stride_of_v": {"changes": {"v": lambda x: x.contiguous()}},
    "no_bias": {"bias": None},
    "windows_of_bias": {"bias": 4},
    "stride_of_bias": {"changes": {"bias": lambda x: x[:, :1].expand(-1, 2, -1, -1)}},
}


def misaligned(x):
    """The same values, shape and strides, two bytes after a multiple of 16 or four."""
    memory = torch.zeros(x.untyped_storage().nbytes() // x.element_size() + 17, dtype=x.dtype)
    first = -memory.data_ptr() // x.element_size() % (16 // x.element_size())
    moved = memory[first + 1 :].as_strided(x.shape, x.stride())
    assert moved.data_ptr() % 16 == x.element_size()
    return moved


CHANGES |= {f"alignment_of_{name}": {"changes": {name: misaligned}} for name in ("q", "k", "v", "constants", "out")}


WINDOW_CHANGES = {
    "image": {"image": (21, 14)},
    "windows_tokens": {"changes": {"rows": lambda x: x[:, :48].contiguous()}},
    "windows": {"changes": {"rows": lambda x: x[:2]}},
    "no_pads": {"pads": False},
    "precision": {"high": True},
    "stride_of_v": {"changes": {"v": lambda x: x.contiguous()}},
    "stride_of_bias": {"changes": {"bias": lambda x: x[:, :1].expand(-1, 2, -1)}},
} | {
    f"alignment_of_{name}": {"changes": {name: misaligned}}
    for name in ("q", "k", "v", "pad", "constants", "bias", "rows", "pattern", "out")
}


QKVPACKED_CHANGES = {
    "batch": {"batch": 2},
    "tokens": {"tokens": 48},
    "heads": {"heads": 4},
    "dtype": {"dtype": torch.bfloat16},
    "dtype_of_out": {"changes": {"out": lambda x: x.to(torch.int8)}},
    "precision": {"high": True},
    "out_up": {"out_up": 7},
    "half": {"half": False},
} | {f"alignment_of_{name}": {"changes": {name: misaligned}} for name in ("qkv", "constants", "out")}


QKVPACKED_WINDOW_CHANGES = {
    "image": {"image": (21, 14)},
    "heads": {"heads": 4},
    "windows": {"changes": {"rows": lambda x: x[:2]}},
    "no_pads": {"pads": False},
    "precision": {"high": True},
    "stride_of_bias": {"changes": {"bias": lambda x: x[:, :1].expand(-1, 2, -1)}},
} | {
    f"alignment_of_{name}": {"changes": {name: misaligned}}
    for name in ("qkv", "pad", "constants", "bias", "rows", "pattern", "out")
}


KINDS_OF_CALL = {
    "attention": (attention_call, "fused", {"bias": 2}, CHANGES),
    "windows": (window_call, "packed", {}, WINDOW_CHANGES),
    "qkvpacked": (attention_qkvpacked_call, "fused", {}, QKVPACKED_CHANGES),
    "qkvpacked_windows": (window_qkvpacked_call, "packed", {}, QKVPACKED_WINDOW_CHANGES),
}


@pytest.mark.parametrize(
    ("call", "kind", "settings", "change"),
    [
        pytest.param(call, kind, settings, change, id=f"{name}-{key}")
        for name, (call, kind, settings, changes) in KINDS_OF_CALL.items()
        for key, change in changes.items()
    ],
)
def test_a_launch_goes_by_all_that_triton_compiles_for(call, kind, settings, change, triton_calls, monkeypatch):
    asked, launched = triton_calls
    for changes, expected in (({}, 1), ({}, 1), (change, 2), (change, 2), ({}, 2)):
        call(kind, monkeypatch, **settings | changes)
        assert len(asked) == expected
    assert len(launched) == 3


@pytest.mark.parametrize("call", [attention_qkvpacked_call, window_qkvpacked_call])
def test_a_packed_projection_of_too_large_a_batch_is_launched_in_parts(call, triton_calls, monkeypatch):
    monkeypatch.setattr(launch, "GRID_Z", 1)
    asked, launched = triton_calls
    operands = call("fused", monkeypatch)
    batch = len(operands["qkv"])
    assert len(asked) == 1 and len(launched) == batch - 1
    assert [arguments(x)[3] for x in launched] == [x.data_ptr() for x in operands["qkv"][1:]]


def test_a_part_of_a_batch_for_each_grid_is_launched_anew_or_kept(triton_calls, monkeypatch):
    monkeypatch.setattr(launch, "GRID_Z", 4)
    asked, launched = triton_calls
    for _ in range(2):
        q = attention_call("fused", monkeypatch, batch=10, bias=2)["q"]
    assert len(asked) == 2 and len(launched) == 4  # 4 + 4 + 2
    firsts = [q[start].data_ptr() for start in (0, 4, 8)]
    assert [arguments(x)[2:4] for x in launched[1:]] == list(zip((4, 4, 2), firsts, strict=True))


# ---------------------------------------------------------------- one launch


class Operand:
    """What a call looks at."""

    def __init__(self, pointer=1024, device=-1, dtype=torch.int32):
        self.data_ptr, self.get_device, self.dtype = (lambda: pointer), (lambda: device), dtype
        self.untyped_storage = lambda: self


@pytest.fixture
def copy(triton_calls):
    """A function that launches a kernel of two pointers and a number."""
    kernel = Jitted(["a_ptr", "b_ptr", "SIZE"], *triton_calls)

    def copy(a, b, *, size):
        return dispatch.launch(kernel, (1, 1, 1), (b, a), (), SIZE=size)

    copy.kernel = kernel
    return copy


def test_pointers_keep_their_places(copy, triton_calls):
    for pointers in ((16, 32), (48, 64), (64, 48)):
        dispatch.call(copy, tuple(map(Operand, pointers)), (), size=3)
    assert triton_calls[0] == [(1, 1, 1, triton_calls[0][0][3], triton_calls[0][0][4], 3)]
    assert [arguments(x)[3:] for x in triton_calls[1]] == [(64, 48, 3), (48, 64, 3)]


def test_one_tensor_in_two_places_is_not_kept(copy, triton_calls):
    a, b = Operand(16), Operand(32)
    dispatch.call(copy, (a, a), (), size=3)
    assert not dispatch._kept
    for _ in range(2):
        dispatch.call(copy, (a, b), (), size=3)
    assert [arguments(x)[3:] for x in triton_calls[1]] == [(32, 16, 3)]


def test_a_view_is_found_by_its_memory_and_its_offset_kept(triton_calls):
    kernel = Jitted(["a_ptr", "b_ptr"], *triton_calls)
    start = lambda x, out: dispatch.launch(kernel, (1, 1, 1), (x[2:], out.view(2, 2)), ())  # noqa: E731
    tensors = [(torch.zeros(8), torch.zeros(4)) for _ in range(3)]
    for x, out in tensors:
        dispatch.call(start, (x, out), ())
    assert len(triton_calls[0]) == 1
    assert [arguments(x)[3:] for x in triton_calls[1]] == [(x[2:].data_ptr(), y.data_ptr()) for x, y in tensors[1:]]


def test_views_of_another_alignment_are_another_launch(triton_calls):
    kernel = Jitted(["a_ptr"], *triton_calls)
    memory = torch.zeros(32, dtype=torch.float16)
    first = -memory.data_ptr() // 2 % 8
    starts = [first + i for i in (4, 12, 1, 9)]  # the views that follow lie on a multiple of 16, and do not
    start = lambda x: dispatch.launch(kernel, (1, 1, 1), (x[4:],), ())  # noqa: E731
    for i in starts:
        dispatch.call(start, (memory[i : i + 8],), ())
    assert len(triton_calls[0]) == 2 and len(triton_calls[1]) == 2


def test_a_view_of_memory_that_two_operands_share_is_not_kept(triton_calls):
    kernel = Jitted(["a_ptr"], *triton_calls)
    memory = torch.zeros(16)
    dispatch.call(lambda a, b: dispatch.launch(kernel, (1, 1, 1), (a[4:],), ()), (memory[:8], memory[8:]), ())
    assert len(triton_calls[0]) == 1 and not dispatch._kept


def test_operands_on_two_devices_are_left_to_triton(copy, triton_calls):
    for _ in range(2):
        dispatch.call(copy, (Operand(), Operand(device=1)), (), size=3)
    assert len(triton_calls[0]) == 2 and not dispatch._kept


def test_each_device_has_its_own_launch_and_is_the_current_one(copy, triton_calls, monkeypatch):
    current = [0]

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_):
            current[0] = self.before

    streams = types.SimpleNamespace(get_current_stream=lambda device: (device, current[0]))
    monkeypatch.setattr(dispatch, "driver", types.SimpleNamespace(active=streams))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    for device in (0, 1, 0, 1):
        dispatch.call(copy, (Operand(device=device), Operand(16, device)), (), size=3)
    assert len(triton_calls[0]) == 2 and current == [0]
    assert [x[3] for x in triton_calls[1]] == [(0, 0), (1, 1)]


HOOKS = {
    "launch_enter_hook": lambda patch: patch.setattr(knobs.runtime, "launch_enter_hook", print),
    "launch_exit_hook": lambda patch: patch.setattr(knobs.runtime, "launch_exit_hook", print),
    "debug": lambda patch: patch.setattr(knobs.runtime, "debug", True),
    "instrumentation": lambda patch: patch.setattr(knobs.compilation, "instrumentation_mode", "x", raising=False),
    "stages": lambda patch: patch.setattr(knobs.runtime, "add_stages_inspection_hook", print, raising=False),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_who_watches_launches_sees_them_all(hook, copy, triton_calls, monkeypatch):
    asked, launched = triton_calls
    run = lambda: dispatch.call(copy, (Operand(), Operand(16)), (), size=3)  # noqa: E731
    with monkeypatch.context() as patch:
        HOOKS[hook](patch)
        run()
        assert not dispatch._kept  # what was compiled to be watched is no longer wanted later
    for expected in ((2, 0), (2, 1)):
        run()
        assert (len(asked), len(launched)) == expected
    with monkeypatch.context() as patch:
        HOOKS[hook](patch)
        run()
    assert (len(asked), len(launched)) == (3, 1)


@pytest.mark.skipif(not hasattr(knobs, "HookChain"), reason="this Triton has single hooks")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_chain_of_hooks_counts_while_something_is_in_it(name):
    chain = getattr(knobs.runtime, name)
    assert not dispatch._watched()
    chain.add(print)
    assert dispatch._watched()
    chain.remove(print)
    assert not dispatch._watched()


def test_a_kernel_with_a_hook_of_its_own_goes_through_triton(copy, triton_calls):
    copy.kernel.pre_run_hooks.append(print)
    for _ in range(3):
        dispatch.call(copy, (Operand(), Operand(16)), (), size=3)
    assert len(triton_calls[0]) == 3 and not triton_calls[1]


def test_so_many_launches_are_kept_and_no_more(copy, triton_calls, monkeypatch):
    monkeypatch.setattr(dispatch, "LIMIT", 3)
    for size in range(10):
        dispatch.call(copy, (Operand(), Operand(16)), (), size=size)
        assert 1 <= len(dispatch._kept) <= 3
    dispatch.call(copy, (Operand(), Operand(16)), (), size=9)
    assert len(triton_calls[0]) == 10 and len(triton_calls[1]) == 1


def test_the_interpreter_and_several_launches_are_not_kept(triton_calls):
    for function in (lambda a, b: None, lambda a, b: dispatch.Launch(None, None, (1, 1, 1), (a, Operand(32)), ())):
        dispatch.call(function, (Operand(), Operand(16)), ())
    assert not dispatch._kept


def test_triton_itself_is_asked_once_and_both_launches_are_alike(monkeypatch):
    """Triton's own run and compiler; only the driver is another."""
    if not getattr(tl.load, "__triton_builtin__", False):
        pytest.skip("a test before ran in the interpreter of an old Triton, which leaves its own language in place")

    def scale(x_ptr, out_ptr, n, stride, SIZE: tl.constexpr):
        o = tl.arange(0, SIZE)
        tl.store(out_ptr + o, tl.load(x_ptr + o * stride, mask=o < n) * n, mask=o < n)

    launched, runs, ordinary = [], [], JITFunction.run

    class Driver:
        utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
            load_binary=lambda *_: (None, 5, 32, 0, 1024),
        )
        launcher_cls = lambda *_: lambda *args: launched.append(args)  # noqa: E731
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))
        map_python_to_cpp_type = staticmethod(str)

    active = dispatch.driver
    monkeypatch.setattr(active, "_active" if hasattr(active, "_active") else "active", Driver())
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kw: runs.append(1) or ordinary(*args, **kw))
    monkeypatch.setattr(dispatch, "_kept", {})
    kernel = JITFunction(scale)
    start = lambda x, out, *, n: dispatch.launch(kernel, (2, 1, 1), (x, out), (n, x.stride(0)), SIZE=16, num_warps=1)  # noqa: E731
    tensors = [torch.zeros(64) for _ in range(4)]
    for x, out in (tensors[:2], tensors[2:], (misaligned(tensors[0]), tensors[1])):
        dispatch.call(start, (x, out), x.stride(), n=16)
    assert len(runs) == 2 and len(launched) == 3
    first, kept, other = launched
    assert first[:6] == kept[:6] == (2, 1, 1, 0, 5, first[5])
    assert len(first) == len(kept) and first[11:] == kept[11:] == (16, 1, 16)
    assert list(kept[9:11]) == [x.data_ptr() for x in tensors[2:]] and kept[6:9] == (None, None, None)


# ---------------------------------------------------------------- on a GPU


GPU_CASES = {
    # tokens, head dimension, windows of the bias
    "hopper": (197, 64, 0),
    "hopper_long": (577, 64, 0),
    "small": (49, 32, 0),
    "bias": (49, 32, 2),
    "packed": (577, 64, 2),
    "qkvpacked_hopper": (197, 64, 0),
    "qkvpacked_small": (49, 32, 0),
    "windows": None,
    "windows_packed": None,
    "windows_qkvpacked": None,
}


def gpu_case(name, seed):
    """An operator, its q, k and v with data of a seed, and its other arguments."""
    torch.manual_seed(seed)
    if name.startswith("windows"):
        return window_case(name)
    tokens, dim, windows = GPU_CASES[name]
    qkv = torch.randn(4, tokens, 3, 2, dim, device="cuda").half()
    scales = Scales.from_tensors(*torch.full((3, 1, 2, 1, dim), 4.0))
    constants = scales.constants("cuda")
    if name.startswith("qkvpacked"):
        return (
            torch.ops.qvit.attention_qkvpacked,
            (qkv.flatten(2),),
            (
                2,
                constants,
                "standard",
                "triton",
                scales.half_exact,
            ),
        )
    qkv = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    bias = R.exponent_bias(torch.randn(windows, 2, tokens, tokens, device="cuda"), constants) if windows else None
    rest = (constants, bias, "standard", torch.float16, "triton", scales.half_exact)
    return torch.ops.qvit.attention, qkv, rest


def window_case(name):
    qkv = torch.randn(2, 196, 3, 2, 32, device="cuda").half()
    scales = Scales.from_tensors(*torch.full((3, 1, 2, 1, 32), 4.0))
    constants = scales.constants("cuda")
    rows, pattern, masks = plan_windows(14, 14, (7, 7), (3, 3)).tensors("cuda")
    bias = pattern_bias(masks, torch.randn(2, 49, 49, device="cuda"), 2, -100.0)
    bias = window_bias(bias, constants, finite=name != "windows")
    rest = (None, constants, bias, rows, pattern, "standard")
    if name == "windows_qkvpacked":
        packed = qkv.view(2, 14, 14, 192)
        return torch.ops.qvit.window_attention_qkvpacked, (packed,), (2, *rest, "triton", scales.half_exact)
    rest = (*rest, torch.float16, "triton", scales.half_exact)
    return torch.ops.qvit.window_attention, qkv.unbind(2), rest


def misaligned_on_gpu(x):
    memory = torch.zeros(x.untyped_storage().size() // 2 + 1, dtype=x.dtype, device="cuda")
    return memory[1:].as_strided(x.shape, x.stride()).copy_(x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_a_kept_launch_gives_the_bits_of_an_ordinary_one(name, monkeypatch):
    monkeypatch.setattr(dispatch, "_kept", {})
    runs = []
    ordinary = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kw: runs.append(1) or ordinary(*args, **kw))

    def anew(operator, qkv, rest):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_kept", {})
            return operator(*qkv, *rest)

    cases = [gpu_case(name, seed) for seed in range(4)]
    expected = [anew(*case) for case in cases]
    operator, qkv, rest = cases[0]
    assert torch.equal(operator(*qkv, *rest), expected[0])
    before = len(runs)
    for (_, qkv, rest), out in zip(cases, expected, strict=True):
        assert torch.equal(operator(*qkv, *rest), out)
    assert len(runs) == before  # none of them went through Triton
    for (_, qkv, rest), out in zip(cases[1:3], expected[1:3], strict=True):
        for i in range(len(qkv)):
            moved = [misaligned_on_gpu(x) if i == j else x for j, x in enumerate(qkv)]
            assert torch.equal(operator(*moved, *rest), out)
        assert torch.equal(operator(*qkv, *rest), out)

    side = torch.cuda.Stream()
    (_, qkv, rest), out = cases[2], expected[2]
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # a launch on another stream would not wait for the copies behind this
        late = [x.clone() for x in qkv]
        found = operator(*late, *rest)
    side.synchronize()
    assert torch.equal(found, out)

    _, qkv, rest = cases[0]
    static = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x) for x in qkv]
    operator(*static, *rest)
    graph, before = torch.cuda.CUDAGraph(), len(runs)
    with torch.cuda.graph(graph):
        captured = operator(*static, *rest)
    assert len(runs) == before
    for _, qkv, _ in cases[1:]:
        for a, b in zip(static, qkv, strict=True):
            a.copy_(b)
        graph.replay()
        assert torch.equal(captured, anew(operator, qkv, rest))


@pytest.mark.gpu
def test_hooks_of_triton_fire_for_every_launch():
    operator, qkv, rest = gpu_case("small", 0)
    operator(*qkv, *rest)
    seen = []
    chain = hasattr(knobs.runtime.launch_enter_hook, "add")
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    if chain:
        knobs.runtime.launch_enter_hook.add(hook)
    else:
        knobs.runtime.launch_enter_hook = hook
    try:
        for _ in range(3):
            operator(*qkv, *rest)
    finally:
        if chain:
            knobs.runtime.launch_enter_hook.remove(hook)
        else:
            knobs.runtime.launch_enter_hook = None
    assert len(seen) == 3 and len(set(seen)) == 1
