"""Launch the kernels: workspaces, grids and launch configurations. Nothing here changes a result."""

from __future__ import annotations

import functools
import json
import pathlib

import torch
import triton

from qvit.errors import BackendError
from qvit.kernels import attend, dispatch, fused, numerics, pack, paper, window
from qvit.reference import split_heads

GRID_Z = 65535  # largest third dimension of a grid
TILE = 64  # keys of a tile
FUSED_TOKENS = 320  # longest sequence whose scores stay in registers
HOPPER = (9, 0)
LITTLE_SHARED = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB a program, where the others have 163 or more
HOPPER_TRITON = (3, 6)  # the first Triton whose Gluon says what the Hopper kernel needs
HOPPER_PROGRAMS = 3  # of the Hopper kernel, on a multiprocessor at a time
WARP_DIMS = (16, 32)  # head dimensions of the kernel that gives a warp a window
HOPPER_SHARED = 227 << 10  # bytes of shared memory that a Hopper multiprocessor gives its programs
TABLE = pathlib.Path(__file__).with_name("launch_table.json")


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own takes microseconds, and a launch needs a few."""
    return -(-a // b)


def _group_magic(groups: int) -> int:
    """ceil(2^32 / groups) as an int32: b - groups * high_word(b * magic) is b % groups for b and groups under 2^16."""
    magic = -(-(1 << 32) // groups) % (1 << 32)
    return magic - (1 << 32) if magic >= 1 << 31 else magic


@functools.cache
def tiles(tokens: int) -> tuple[int, int]:
    """Full tiles of keys, and columns of the last, partial one."""
    full, rest = divmod(tokens, TILE)
    return full, 0 if rest == 0 else 32 if rest <= 32 else TILE


def padded_dim(head_dim: int) -> int:
    """Channels that the kernels work on: a power of two, and what an int8 product needs."""
    return max(32, 1 << (head_dim - 1).bit_length())


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    high: bool,
    out_up: int,
    half: bool,
) -> None:
    """Integer attention into ``out`` (B, N, H, D), by one launch or by two.

    Args:
        q, k, v: (B, H, N, D), one type, any strides.
        constants: int32 (H, 6 * D + 8).
        bias: int32 (G, H, N, N) in exponent units with unit last stride and B a multiple of G, or None.
        out: Contiguous result, int8 or float.
        high: Two planes and the curve.
        out_up: Bits the accumulator moves up before an int8 output's multiply.
        half: The constants are exact in float16.
    """
    if q.shape[0] <= GRID_Z:
        layout = (q.shape, q.stride(), k.stride(), v.stride(), _layout(bias))
        operands = (q, k, v, constants, bias, out)
        dispatch.call(_attention, operands, layout, high=high, out_up=out_up, half=half)
        return
    for span in _spans(q.shape[0], bias):
        attention(q[span], k[span], v[span], constants, bias, out[span], high=high, out_up=out_up, half=half)


def attention_qkvpacked(
    qkv: torch.Tensor, constants: torch.Tensor, out: torch.Tensor, *, high: bool, out_up: int, half: bool
) -> None:
    """:func:`attention` of a packed projection as it lies, which is less work for the host.

    Args:
        qkv: (B, N, 3 * H * D), contiguous.
        constants: int32 (H, 6 * D + 8).
        out: Contiguous result (B, N, H * D), int8 or float.
        high, out_up, half: As for :func:`attention`.
    """
    if qkv.shape[0] <= GRID_Z:
        layout = (qkv.shape, constants.shape)
        dispatch.call(_attention_qkvpacked, (qkv, constants, out), layout, high=high, out_up=out_up, half=half)
        return
    for span in _spans(qkv.shape[0]):
        attention_qkvpacked(qkv[span], constants, out[span], high=high, out_up=out_up, half=half)


def _attention_qkvpacked(qkv, constants, out, **settings) -> dispatch.Launch | None:
    q, k, v = split_heads(qkv, constants.shape[0]).unbind(0)
    return _attention(q, k, v, constants, None, out.view(q.transpose(1, 2).shape), **settings)


def _attention(q, k, v, constants, bias, out, **settings) -> dispatch.Launch | None:
    """One launch, or None after two. All that it reads of shapes and strides is in the layout above."""
    return KERNELS[kind_of_kernel(q, k, v, bias, settings["high"])](q, k, v, constants, bias, out, **settings)


def _layout(x: torch.Tensor | None) -> tuple | None:
    """Shape and strides of what may be missing."""
    return None if x is None else (x.shape, x.stride())


def kind_of_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, high: bool = False
) -> str:
    """Which kernel serves the operands, a key of ``KERNELS``. All give the same bits."""
    row = 0 if bias is None else bias.stride(-2)
    strides = (q.stride()[2:], k.stride()[2:], v.stride()[2:])
    kind = _kind(q.shape[1:], strides, row, bias is None, q.is_cuda, q.device.index)
    if kind == "warps" and not _fits_warps(*(x.transpose(1, 2) for x in (q, k, v)), None):
        return "fused"
    if kind == "hopper_long" and _streams(q.shape[0] * q.shape[1], q.shape[2], high, _processors(q.device.index)):
        return "hopper_stream"
    return kind


@functools.lru_cache(maxsize=1024)
def _kind(size, strides, bias_row: int, plain: bool, cuda: bool, index: int | None) -> str:
    heads, tokens, head_dim = size
    # Offsets inside a head and an image's output are 32-bit in one launch; of two launches they are not.
    reach = max(tokens * row + head_dim * channel for row, channel in strides)
    reach = max(reach, tokens * heads * head_dim, tokens * bias_row)
    plain = plain and reach < 2**31 and all(channel == 1 for _, channel in strides) and cuda and _is_hopper(index)
    if tokens > FUSED_TOKENS or reach >= 2**31:
        if not plain or padded_dim(head_dim) != TILE:
            return "packed"
        return "hopper_long"
    if tokens > 256 and padded_dim(head_dim) > TILE and cuda and _capability(index) in LITTLE_SHARED:
        return "packed"  # one launch takes up to 112 KiB in high precision
    if plain and tokens <= TILE and head_dim in WARP_DIMS:
        return "warps"
    return "hopper" if plain and tokens > TILE and head_dim <= TILE else "fused"


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a GPU; of the interpreter, none."""
    return (0, 0) if index is None else torch.cuda.get_device_capability(index)


@functools.cache
def _is_hopper(index: int | None) -> bool:
    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return _capability(index) == HOPPER and version >= HOPPER_TRITON


def _spans(batch: int, bias: torch.Tensor | None = None) -> list[slice]:
    """Parts of a batch for one launch each: a grid's third dimension holds them, and a whole number of windows each."""
    chunk = _chunk(batch, bias)
    return [slice(start, start + chunk) for start in range(0, batch, chunk)]


def _chunk(batch: int, bias: torch.Tensor | None) -> int:
    """Batches of a launch: a grid's third dimension holds, and a whole number of a bias's windows."""
    groups = 1 if bias is None else bias.shape[0]
    if groups > GRID_Z:
        raise BackendError(f"a bias has {groups} windows, the most is {GRID_Z}; call with parts of the batch")
    return min(batch, GRID_Z // groups * groups)


def _bias_arguments(bias: torch.Tensor | None, unused: torch.Tensor) -> tuple:
    """A pointer, three strides, the number of windows and what divides by it."""
    if bias is None:
        return unused, (0, 0, 0, 1, 0)
    groups = bias.shape[0]
    return bias, (bias.stride(0) if groups > 1 else 0, bias.stride(1), bias.stride(2), groups, _group_magic(groups))


@functools.cache
def _processors(index: int | None) -> int:
    """Streaming multiprocessors of a GPU; of the interpreter, one."""
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def programs_per_head(heads: int, blocks: int, places: int) -> int:
    """How many programs share a head's blocks of queries. Each quantizes K and V anew, so only to fill the GPU."""
    most = max(1, min(blocks, places // heads))
    return cdiv(blocks, cdiv(blocks, most))  # no more than take as many blocks each


@functools.cache
def _table() -> list[dict]:
    return json.loads(TABLE.read_text())["rows"]


@functools.lru_cache(maxsize=1024)
def configuration(kind: str, capability: tuple[int, int], head_dim: int, tokens: int, heads: int) -> dict:
    """Launch configuration from the table that ``scripts/tune_attention.py`` recorded, {} where it has none.

    Args:
        kind: "hopper" or "packed".
        capability: Of the GPU.
        head_dim: Padded (:func:`padded_dim`).
        tokens: Sequence length.
        heads: Heads of all images together.
    """
    for row in _table():
        same = (row["kind"], tuple(row["capability"]), row["head_dim"]) == (kind, capability, head_dim)
        if same and row["tokens"][0] <= tokens <= row["tokens"][1] and heads <= row["heads"]:
            return row["config"]
    return {}


def hopper_attention(
    q, k, v, constants, bias, out, *, high, out_up, half, step=None, num_warps=4
) -> dispatch.Launch | None:
    """One launch on sm_90; ``step`` programs share a head's blocks of queries. See :func:`attention`."""
    from qvit.kernels import hopper

    batch, heads, tokens, head_dim = q.shape
    config = configuration("hopper", HOPPER, padded_dim(head_dim), tokens, batch * heads)
    places = HOPPER_PROGRAMS * _processors(q.device.index)
    blocks = cdiv(tokens, 64)
    step = min(blocks, step or config.get("step") or programs_per_head(batch * heads, blocks, places))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    return dispatch.launch(
        hopper.hopper_kernel, (step, heads, batch), (q, k, v, constants, out),
        (*strides, batch, heads, max(1, places // (heads * step))),
        N=tokens, D=head_dim, DP=padded_dim(head_dim), STEP=step, HIGH=high, OUT_UP=out_up, HALF=half,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def hopper_long_attention(
    q, k, v, constants, bias, out, *, high, out_up, half, step=None, num_warps=8
) -> dispatch.Launch | None:
    """One launch on sm_90 for longer sequences; ``step`` programs share a head's blocks. See :func:`attention`."""
    from qvit.kernels import hopper_long

    batch, heads, tokens, head_dim = q.shape
    blocks = cdiv(tokens, 16 * num_warps)
    places = _programs_per_processor(tokens) * _processors(q.device.index)
    step = min(blocks, step or programs_per_head(batch * heads, blocks, places))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    return dispatch.launch(
        hopper_long.hopper_long_kernel, (step, heads, batch), (q, k, v, constants, out),
        (*strides, heads, tokens // 128, cdiv(tokens, 128)),
        N=tokens, D=head_dim, STEP=step, HIGH=high, OUT_UP=out_up, HALF=half,
        num_warps=num_warps, enable_fp_fusion=False, **long_options(high),
    )  # fmt: skip


def long_options(high: bool) -> dict:
    """Keys of a turn and, in standard precision, the limit that lets a multiprocessor hold two programs' registers."""
    return {"WIDTH": 32} if high else {"WIDTH": 64, "maxnreg": 128}


def _programs_per_processor(tokens: int) -> int:
    """Programs of the kernel for long sequences that fit on a multiprocessor with their K and V; at most two."""
    return min(2, HOPPER_SHARED // (cdiv(tokens, 128) * (16 << 10) + (4 << 10)))


@functools.lru_cache(maxsize=1024)
def _streams(heads: int, tokens: int, high: bool, processors: int) -> bool:
    """Whether K and V stream through shared memory: where they do not fit, and where that was found to be faster.

    A program that keeps them has to prepare them: that is worth it where many blocks of queries follow, and another
    program is there to work meanwhile.
    """
    fit = _programs_per_processor(tokens)
    if fit == 2:
        return heads <= processors if high else heads * cdiv(tokens, 64) <= processors * 5 // 4
    return fit == 0 or high or heads <= processors


def hopper_stream_attention(q, k, v, constants, bias, out, *, high, out_up, half, num_warps=None) -> None:
    """Two launches on sm_90 for long sequences: pack K and V, then attend. See :func:`attention`."""
    from qvit.kernels import hopper_stream

    batch, heads, tokens, _ = q.shape
    packed, sums = (
        torch.empty(batch, heads, cdiv(tokens, 128), size, dtype=dtype, device=q.device)
        for size, dtype in ((2 * hopper_stream.BYTES.value, torch.int8), (hopper_stream.CHANNELS.value, torch.int32))
    )
    dispatch.call(_stream_pack, (k, v, constants, packed, sums), (k.shape, k.stride(), v.stride()), half=half)
    dispatch.call(
        _stream_attend, (q, packed, sums, constants, out), (q.shape, q.stride()), high=high, out_up=out_up, half=half,
        num_warps=num_warps or stream_warps(batch * heads, tokens, high, _processors(q.device.index)),
    )  # fmt: skip


def stream_warps(heads: int, tokens: int, high: bool, processors: int) -> int:
    """Warps of a program, 16 queries each: in high precision registers hold three times four, not twice eight."""
    return 4 if high or heads * cdiv(tokens, 128) < 4 * processors else 8


def _stream_pack(k, v, constants, packed, sums, *, half) -> dispatch.Launch | None:
    """The first of the two launches."""
    from qvit.kernels import hopper_stream

    batch, heads, tokens, head_dim = k.shape
    count = cdiv(tokens, 128)
    return dispatch.launch(
        hopper_stream.hopper_pack_kernel, (count, heads, batch), (k, v, constants, packed, sums),
        (*k.stride()[:3], *v.stride()[:3], heads, tokens, count),
        D=head_dim, HALF=half, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _stream_attend(q, packed, sums, constants, out, *, high, out_up, half, num_warps) -> dispatch.Launch | None:
    """The second."""
    from qvit.kernels import hopper_stream

    batch, heads, tokens, head_dim = q.shape
    return dispatch.launch(
        hopper_stream.hopper_stream_kernel, (cdiv(tokens, 16 * num_warps), heads, batch),
        (q, packed, sums, constants, out), (*q.stride()[:3], heads, tokens // 128, cdiv(tokens, 128)),
        N=tokens, D=head_dim, HIGH=high, OUT_UP=out_up, HALF=half, num_warps=num_warps, enable_fp_fusion=False,
        **long_options(high),
    )  # fmt: skip


def fused_attention(
    q, k, v, constants, bias, out, *, high, out_up, half, block_m=64, step=None, num_warps=None, num_stages=1
) -> dispatch.Launch | None:
    """One launch; ``step`` programs share a head's blocks of ``block_m`` queries. See :func:`attention`."""
    batch, heads, tokens, head_dim = q.shape
    full, tail = tiles(tokens)
    if step is None:
        step = programs_per_head(batch * heads, cdiv(tokens, block_m), _processors(q.device.index))
    if num_warps is None:
        num_warps = 2 if tokens <= TILE else 4
    addend, bias_arguments = _bias_arguments(bias, constants)
    return dispatch.launch(
        fused.fused_kernel, (min(step, cdiv(tokens, block_m)), heads, batch), (q, k, v, addend, constants, out),
        (*q.stride(), *k.stride(), *v.stride(), *bias_arguments, heads),
        N=tokens, D=head_dim, DP=padded_dim(head_dim), TILE=TILE, TILES=full, TAIL=tail, STEP=step, BLOCK_M=block_m,
        BIAS=bias is not None, HIGH=high, INT8_OUT=out.dtype == torch.int8, OUT_UP=out_up, HALF=half,
        INTERPRET=numerics.INTERPRETED, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def packed_attention(
    q, k, v, constants, bias, out, *, high, out_up, half, block_m=None, num_warps=None, num_stages=None
) -> None:
    """Two launches: pack q, k and V^T, then attend. See :func:`attention`."""
    batch, heads, tokens, head_dim = q.shape
    config = configuration("packed", _capability(q.device.index), padded_dim(head_dim), tokens, batch * heads)
    block_m = block_m or config.get("block_m", 64)
    num_warps = num_warps or config.get("num_warps", 4)
    num_stages = num_stages or config.get("num_stages", 3)
    columns, padded = padded_dim(head_dim), cdiv(tokens, TILE) * TILE
    q8, k8, vt = torch.empty(3, batch, heads, padded * columns, dtype=torch.int8, device=q.device).unbind(0)
    sums = torch.empty(batch, heads, padded // TILE, columns, dtype=torch.int32, device=q.device)
    layout = (q.shape, q.stride(), k.stride(), v.stride())
    dispatch.call(_pack, (q, k, v, constants, q8, k8, vt, sums), layout, half=half)
    dispatch.call(
        _attend, (q8, k8, vt, sums, bias, constants, out), (_layout(bias),), size=q.shape, high=high,
        out_up=out_up, block_m=block_m, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _pack(q, k, v, constants, q8, k8, vt, sums, *, half) -> dispatch.Launch | None:
    """The first of the two launches."""
    batch, heads, tokens, head_dim = q.shape
    return dispatch.launch(
        pack.pack_kernel, (cdiv(tokens, TILE), heads, batch), (q, k, v, constants, q8, k8, vt, sums),
        (*q.stride(), *k.stride(), *v.stride(), heads, tokens, cdiv(tokens, TILE) * TILE),
        D=head_dim, DP=padded_dim(head_dim), TILE=TILE, HALF=half, INTERPRET=numerics.INTERPRETED, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def _attend(
    q8, k8, vt, sums, bias, constants, out, *, size, high, out_up, block_m, num_warps, num_stages
) -> dispatch.Launch | None:
    """The second, of queries of ``size`` (B, H, N, D)."""
    batch, heads, tokens, head_dim = size
    full, tail = tiles(tokens)
    addend, bias_arguments = _bias_arguments(bias, sums)
    return dispatch.launch(
        attend.attend_kernel, (cdiv(tokens, block_m), heads, batch), (q8, k8, vt, sums, addend, constants, out),
        (*bias_arguments, heads, tokens, cdiv(tokens, TILE) * TILE, full, out_up),
        D=head_dim, DP=padded_dim(head_dim), TAIL=tail, BIAS=bias is not None, HIGH=high,
        INT8_OUT=out.dtype == torch.int8, BLOCK_M=block_m, INTERPRET=numerics.INTERPRETED, num_warps=num_warps,
        num_stages=num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def warp_attention(q, k, v, constants, bias, out, *, high, out_up, half, step=None) -> dispatch.Launch | None:
    """One launch on sm_90, a warp for a short sequence's head or a part of it. See :func:`attention`."""
    batch, heads, tokens, head_dim = q.shape
    return _launch_warps(
        (q, k, v, q, constants, constants, constants, constants, out),  # no pad, table, pattern nor bias
        tuple(x.stride(dim) for x in (q, k, v) for dim in (0, 2, 1)), (batch, tokens, heads, head_dim), (1, tokens),
        PLAIN=True, PADS=False, HIGH=high, OUT_UP=out_up, HALF=half, step=step,
    )  # fmt: skip


KERNELS = {
    "warps": warp_attention,
    "hopper": hopper_attention,
    "hopper_long": hopper_long_attention,
    "hopper_stream": hopper_stream_attention,
    "fused": fused_attention,
    "packed": packed_attention,
}


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pad: torch.Tensor | None,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    pattern: torch.Tensor,
    out: torch.Tensor,
    *,
    high: bool,
    out_up: int,
    half: bool,
    block_m: int = 64,
    num_warps: int | None = None,
) -> None:
    """Attention in windows, in one launch, into ``out`` (B, L, H, D).

    Args:
        q, k, v: (B, L, H, D), channels side by side, otherwise any strides.
        pad: (3, H, D), contiguous, of q's type: what a position outside the image holds; None: zeros.
        constants: int32 (H, 6 * D + 8).
        bias: int32 (patterns, H, N, N) in exponent units with unit last stride, or packed (patterns, H, ...), or None.
        rows: int32 (windows, N), contiguous: a window's positions in the image, -1 outside it.
        pattern: int32 (windows,): the bias of each window.
        out: Contiguous result, int8 or float.
        high, out_up, half: As for :func:`attention`.
        block_m, num_warps: Launch configuration.
    """
    settings = {"high": high, "out_up": out_up, "half": half, "block_m": block_m, "num_warps": num_warps}
    if q.shape[0] <= GRID_Z:
        layout = (q.shape, q.stride(), k.stride(), v.stride(), _layout(bias), rows.shape)
        dispatch.call(_window_attention, (q, k, v, pad, constants, bias, rows, pattern, out), layout, **settings)
        return
    for span in _spans(q.shape[0]):
        window_attention(q[span], k[span], v[span], pad, constants, bias, rows, pattern, out[span], **settings)


def window_attention_qkvpacked(
    qkv: torch.Tensor,
    pad: torch.Tensor | None,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    pattern: torch.Tensor,
    out: torch.Tensor,
    *,
    high: bool,
    out_up: int,
    half: bool,
) -> None:
    """:func:`window_attention` of a packed projection as it lies, which is less work for the host.

    Args:
        qkv: (B, height, width, 3 * H * D), contiguous.
        out: Contiguous result (B, height, width, H * D), int8 or float.
        pad, constants, bias, rows, pattern, high, out_up, half: As for :func:`window_attention`.
    """
    if qkv.shape[0] <= GRID_Z:
        operands = (qkv, pad, constants, bias, rows, pattern, out)
        layout = (qkv.shape, constants.shape, _layout(bias), rows.shape)
        dispatch.call(_window_attention_qkvpacked, operands, layout, high=high, out_up=out_up, half=half)
        return
    for span in _spans(qkv.shape[0]):
        window_attention_qkvpacked(
            qkv[span], pad, constants, bias, rows, pattern, out[span], high=high, out_up=out_up, half=half
        )


def _window_attention_qkvpacked(qkv, pad, constants, bias, rows, pattern, out, **settings) -> dispatch.Launch | None:
    q, k, v = split_heads(qkv.flatten(1, 2), constants.shape[0]).transpose(2, 3).unbind(0)
    return _window_attention(q, k, v, pad, constants, bias, rows, pattern, out.view(q.shape), **settings)


def _window_attention(
    q, k, v, pad, constants, bias, rows, pattern, out, *, high, out_up, half, block_m=64, num_warps=None
) -> dispatch.Launch | None:
    batch, length, heads, head_dim = q.shape
    windows, tokens = rows.shape
    pads = q if pad is None else pad
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    packed = bias is not None and bias.ndim == 3
    if packed and _fits_warps(q, k, v, pad):
        return _launch_warps(
            (q, k, v, pads, rows, pattern, bias, constants, out), strides, (batch, length, heads, head_dim), rows.shape,
            PLAIN=False, PADS=pad is not None, HIGH=high, OUT_UP=out_up, HALF=half,
        )  # fmt: skip
    full, tail = tiles(tokens)
    addend = constants if bias is None else bias
    bias_strides = (0, 0, 0) if bias is None else (*bias.stride()[:2], 0) if packed else bias.stride()[:3]
    return dispatch.launch(
        window.window_kernel, (windows, heads, batch), (q, k, v, pads, rows, pattern, addend, constants, out),
        (*strides, *bias_strides, length, heads),
        N=tokens, D=head_dim, DP=padded_dim(head_dim), TILE=TILE, TILES=full, TAIL=tail, BLOCK_M=block_m,
        BIAS=0 if bias is None else 2 if packed else 1, PADS=pad is not None, HIGH=high,
        INT8_OUT=out.dtype == torch.int8, OUT_UP=out_up, HALF=half, INTERPRET=numerics.INTERPRETED,
        num_warps=num_warps or (2 if tokens <= TILE else 4), num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _fits_warps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pad: torch.Tensor | None) -> bool:
    """Whether a warp can take a window: on Hopper, rows in pieces of 16 bytes, offsets in an image of 32 bits."""
    if not q.is_cuda or not _is_hopper(q.device.index) or q.shape[-1] not in WARP_DIMS:
        return False
    size = q.element_size()
    aligned = all(x.data_ptr() % 16 == 0 for x in (q, k, v, pad) if x is not None)
    aligned = aligned and all(s * size % 16 == 0 for x in (q, k, v) for s in x.stride()[:-1])
    _, length, heads, head_dim = q.shape
    return aligned and length * max(heads * head_dim, *(x.stride(1) for x in (q, k, v))) < 2**31


def _launch_warps(pointers, strides, size, shape, *, step=None, **constexprs) -> dispatch.Launch:
    """``step`` warps for each head of each window, of a ``shape`` of (windows, N), in images of a size (B, L, H, D)."""
    from qvit.kernels import window_warp

    batch, length, heads, head_dim = size
    windows, tokens = shape
    step = step or warp_step(windows * heads * batch, tokens, _processors(pointers[0].device.index))
    return dispatch.launch(
        window_warp.window_warp_kernel, (windows * step, heads, batch), pointers, (*strides, length, heads),
        N=tokens, D=head_dim, STEP=step, **constexprs, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def warp_step(programs: int, tokens: int, processors: int) -> int:
    """Programs that share a window's queries: more where a multiprocessor has few warps, which take one's time."""
    warps = programs / processors
    return min(cdiv(tokens, 16), 4 if warps <= 2 else 2 if warps <= 8 else 1)


def attention_paper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """QFlash as published, into ``out`` (B, N, H, D) int8. q, k, v: (B, H, N, D) int8; bias int32 in score units."""
    if q.shape[0] <= GRID_Z:
        layout = (q.shape, q.stride(), k.stride(), v.stride(), _layout(bias))
        dispatch.call(_attention_paper, (q, k, v, constants, bias, out), layout)
        return
    for span in _spans(q.shape[0], bias):
        attention_paper(q[span], k[span], v[span], constants, bias, out[span])


def _attention_paper(q, k, v, constants, bias, out) -> dispatch.Launch | None:
    batch, heads, tokens, head_dim = q.shape
    addend, bias_arguments = _bias_arguments(bias, constants)
    return dispatch.launch(
        paper.paper_kernel, (cdiv(tokens, 64), heads, batch), (q, k, v, addend, constants, out),
        (*q.stride(), *k.stride(), *v.stride(), *bias_arguments, heads, tokens),
        D=head_dim, DP=padded_dim(head_dim), BIAS=bias is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
