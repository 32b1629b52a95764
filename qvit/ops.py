"""The operators: validate, choose a backend by device, launch. All are torch.library ops with fake implementations.

Nothing that a module calls synchronises with the host, and nothing falls back silently: a device that the chosen
backend cannot serve raises.
"""

from __future__ import annotations

import functools
import types

import torch

from qvit import reference
from qvit import scales as S
from qvit.config import BACKENDS, PRECISIONS
from qvit.errors import BackendError
from qvit.windows import SHIFT_MASK, plan_windows

MAX_HEAD_DIM = 128
MAX_WINDOW = 320  # tokens of a window: its scores stay in registers
MIN_CAPABILITY = (8, 0)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

exponent_bias = reference.exponent_bias


def _triton_problem(device_type: str, index: int | None) -> str | None:
    """Why Triton's kernels cannot run on a device, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "this torch has no Triton"
    if device_type == "cpu":
        from qvit.kernels import numerics

        return None if numerics.INTERPRETED else "the Triton kernels need an NVIDIA GPU"
    if device_type != "cuda" or torch.version.hip is not None:
        return f"the Triton kernels need an NVIDIA GPU, not {device_type} or ROCm"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(index)} has compute capability {capability}, the kernels need 8.0 or newer"
    return None


@functools.cache
def select_backend(device: torch.device | str, backend: str = "auto") -> str:
    """The backend that serves a device: "triton" or "reference".

    "auto" is Triton on CUDA and the reference elsewhere.

    Raises:
        BackendError: Unknown name, or Triton is asked for (on CUDA, "auto" asks for it) where it cannot run.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend must be one of {BACKENDS}, found {backend!r}")
    device = torch.device(device)
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return "reference"
    if problem := _triton_problem(device.type, device.index):
        raise BackendError(f'{problem}; pass backend="reference" to run the (slow) PyTorch definition instead')
    return "triton"


@functools.cache
def _kernels() -> types.ModuleType:
    """The module that launches kernels, which not every torch can import; an import in each call would take longer."""
    from qvit.kernels import launch

    return launch


# ---------------------------------------------------------------- torch.library

_library = torch.library.Library("qvit", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor constants, Tensor? bias, str precision, ScalarType out_dtype, "
    "str backend, bool half) -> Tensor"
)
_library.define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor? pad, Tensor constants, Tensor? bias, Tensor rows, "
    "Tensor pattern, str precision, ScalarType out_dtype, str backend, bool half) -> Tensor"
)
# Of a packed projection as a linear layer leaves it: no views to make, and fewer operands to look at in each call.
_library.define(
    "attention_qkvpacked(Tensor qkv, int heads, Tensor constants, str precision, str backend, bool half) -> Tensor"
)
_library.define(
    "window_attention_qkvpacked(Tensor qkv, int heads, Tensor? pad, Tensor constants, Tensor? bias, Tensor rows, "
    "Tensor pattern, str precision, str backend, bool half) -> Tensor"
)
_library.define(
    "attention_paper(Tensor q, Tensor k, Tensor v, Tensor constants, Tensor? bias, bool text, str backend) -> Tensor"
)


def _require_int32_sums(tokens: int, precision: str) -> None:
    if tokens > reference.MAX_TOKENS[precision]:
        raise BackendError(
            f"{tokens} tokens: sums of {precision} precision stay in int32 up to {reference.MAX_TOKENS[precision]}"
        )


def _require_window(tokens: int) -> None:
    if tokens > MAX_WINDOW:
        raise BackendError(f"windows have {tokens} tokens, the most is {MAX_WINDOW}")


def _require_fit(channels: int, heads: int, constants: torch.Tensor) -> None:
    """Constants are read by where a head's channels lie: those of other heads would be wrong without a word."""
    if heads != constants.shape[0] or channels != 3 * heads * S.head_dim_of(constants):
        raise BackendError(
            f"a projection of {channels} channels for {heads} heads does not fit constants of shape "
            f"{tuple(constants.shape)}; scales are of a layer as it was calibrated, so quantize it again"
        )


def _attention(q, k, v, constants, bias, precision, out_dtype, backend, half):
    batch, heads, tokens, head_dim = q.shape
    _require_int32_sums(tokens, precision)
    if select_backend(q.device, backend) == "reference":
        return reference.attention(q, k, v, constants, bias, precision=precision, out_dtype=out_dtype)
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    out = torch.empty(batch, tokens, heads, head_dim, dtype=out_dtype, device=q.device)
    if out.numel():
        up = reference.out_shift(tokens, precision)
        _kernels().attention(q, k, v, constants, bias, out, high=precision == "high", out_up=up, half=half)
    return out


def _attention_fake(q, k, v, constants, bias, precision, out_dtype, backend, half):
    batch, heads, tokens, head_dim = q.shape
    return q.new_empty(batch, tokens, heads, head_dim, dtype=out_dtype)


def _attention_qkvpacked(qkv, heads, constants, precision, backend, half):
    batch, tokens, channels = qkv.shape
    _require_int32_sums(tokens, precision)
    _require_fit(channels, heads, constants)
    if select_backend(qkv.device, backend) == "reference":
        q, k, v = reference.split_heads(qkv, heads).unbind(0)
        return reference.attention(q, k, v, constants, precision=precision, out_dtype=qkv.dtype).flatten(2)
    qkv = qkv.contiguous()
    out = qkv.new_empty(batch, tokens, channels // 3)
    if out.numel():
        up = reference.out_shift(tokens, precision)
        _kernels().attention_qkvpacked(qkv, constants, out, high=precision == "high", out_up=up, half=half)
    return out


def _attention_qkvpacked_fake(qkv, heads, constants, precision, backend, half):
    batch, tokens, channels = qkv.shape
    return qkv.new_empty(batch, tokens, channels // 3)


def _window_attention(q, k, v, pad, constants, bias, rows, pattern, precision, out_dtype, backend, half):
    batch, length, heads, head_dim = q.shape
    tokens = rows.shape[1]
    _require_window(tokens)
    if select_backend(q.device, backend) == "reference":
        return reference.window_attention(
            q, k, v, pad, constants, bias, rows, pattern, precision=precision, out_dtype=out_dtype
        )
    bias = _rows_of_heads(bias, heads)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    pad = pad if pad is None else pad.contiguous()
    out = torch.empty(batch, length, heads, head_dim, dtype=out_dtype, device=q.device)
    if out.numel():
        up = reference.out_shift(tokens, precision)
        _kernels().window_attention(
            q, k, v, pad, constants, bias, rows, pattern, out, high=precision == "high", out_up=up, half=half
        )
    return out


def _rows_of_heads(bias: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """A bias of windows as the kernels read it: where it is not packed, rows side by side for each head."""
    if bias is None or bias.ndim == 3:
        return bias
    bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    return bias if bias.shape[1] == heads else bias.expand(-1, heads, -1, -1)  # a view takes microseconds


def _window_attention_fake(q, k, v, pad, constants, bias, rows, pattern, precision, out_dtype, backend, half):
    return q.new_empty(q.shape, dtype=out_dtype)


def _window_attention_qkvpacked(qkv, heads, pad, constants, bias, rows, pattern, precision, backend, half):
    batch, height, width, channels = qkv.shape
    tokens = rows.shape[1]
    _require_window(tokens)
    _require_fit(channels, heads, constants)
    if select_backend(qkv.device, backend) == "reference":
        q, k, v = reference.split_heads(qkv.flatten(1, 2), heads).transpose(2, 3).unbind(0)
        out = reference.window_attention(
            q, k, v, pad, constants, bias, rows, pattern, precision=precision, out_dtype=qkv.dtype
        )
        return out.reshape(batch, height, width, channels // 3)
    bias, qkv, pad = _rows_of_heads(bias, heads), qkv.contiguous(), pad if pad is None else pad.contiguous()
    out = qkv.new_empty(batch, height, width, channels // 3)
    if out.numel():
        up = reference.out_shift(tokens, precision)
        _kernels().window_attention_qkvpacked(
            qkv, pad, constants, bias, rows, pattern, out, high=precision == "high", out_up=up, half=half
        )
    return out


def _window_attention_qkvpacked_fake(qkv, heads, pad, constants, bias, rows, pattern, precision, backend, half):
    batch, height, width, channels = qkv.shape
    return qkv.new_empty(batch, height, width, channels // 3)


def _attention_paper(q, k, v, constants, bias, text, backend):
    if text or select_backend(q.device, backend) == "reference":
        return reference.attention_paper(q, k, v, constants, bias, text=text)
    batch, heads, tokens, head_dim = q.shape
    out = torch.empty(batch, tokens, heads, head_dim, dtype=torch.int8, device=q.device)
    if out.numel():
        _kernels().attention_paper(q, k, v, constants, bias, out)
    return out


def _attention_paper_fake(q, k, v, constants, bias, text, backend):
    batch, heads, tokens, head_dim = q.shape
    return q.new_empty(batch, tokens, heads, head_dim, dtype=torch.int8)


for _name, _impl, _fake in (
    ("attention", _attention, _attention_fake),
    ("attention_qkvpacked", _attention_qkvpacked, _attention_qkvpacked_fake),
    ("window_attention", _window_attention, _window_attention_fake),
    ("window_attention_qkvpacked", _window_attention_qkvpacked, _window_attention_qkvpacked_fake),
    ("attention_paper", _attention_paper, _attention_paper_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qvit::{_name}", _fake, lib=_library)


# ---------------------------------------------------------------- what modules call


def run_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    constants: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    arithmetic: str = "qvit",
    precision: str = "standard",
    backend: str = "auto",
    half_exact: bool = False,
) -> torch.Tensor:
    """Integer attention for a module whose shapes are known to be right.

    Args:
        q, k, v: (B, H, N, D), float16, bfloat16 or float32, any strides.
        constants: int32 (H, 6 * D + 8) on the same device; unused by the published arithmetics.
        bias: For "qvit", int32 from :func:`exponent_bias`; else an additive float or bool mask. (G, H or 1, N, N),
            where batch b takes bias[b % G].
        softmax_scale: Factor of the scores.
        arithmetic: "qvit", "paper" or "paper_text".
        precision: "standard" or "high".
        backend: "auto", "triton" or "reference".
        half_exact: :attr:`qvit.Scales.half_exact` of the constants; the kernels then quantize float16 faster.

    Returns:
        (B, N, H, D), contiguous, in q's type.
    """
    if bias is not None:
        if q.shape[0] % bias.shape[0]:
            raise BackendError(f"a bias for {bias.shape[0]} windows does not divide a batch of {q.shape[0]}")
        bias = bias.expand(-1, q.shape[1], -1, -1)
    if arithmetic == "qvit":
        return torch.ops.qvit.attention(q, k, v, constants, bias, precision, q.dtype, backend, half_exact)
    if not q.numel():  # no largest magnitude to find a scale by
        return q.new_empty(q.transpose(1, 2).shape)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (reference.quantize_tensor(x) for x in (q, k, v))
    text = arithmetic == "paper_text"
    units = reference.paper_constants(q_scale, k_scale, softmax_scale, text=text)
    if bias is not None:
        bias = reference.paper_bias(bias, q_scale, k_scale, softmax_scale).contiguous()
    out = torch.ops.qvit.attention_paper(q8, k8, v8, units, bias, text, backend)
    return (out * v_scale).to(q.dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: S.Scales,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str = "standard",
    backend: str = "auto",
) -> torch.Tensor:
    """softmax(scale * q k^T + bias) v in integers, with static scales.

    Args:
        q, k, v: (B, H, N, D), float16, bfloat16 or float32, or int8 quantized with ``scales``, from -127 to 127 (-128
            would leave the sums' range); any strides, D <= 128.
        scales: :class:`qvit.Scales`, calibrated or from :meth:`qvit.Scales.from_tensors`.
        bias: Additive bias in natural-log units, broadcastable to (B, H, N, N). -inf masks a key.
        mask: As in scaled_dot_product_attention: bool (True takes part) or additive float, broadcastable likewise. A
            row with every key masked gives 0.
        out_dtype: int8 (real = int * scales.o_scale), float16, bfloat16 or float32; default the type of q.
        precision: "standard" (8-bit weights) or "high" (16-bit weights).
        backend: "auto", "triton" or "reference".

    Returns:
        (B, N, H, D), contiguous. Transpose dimensions 1 and 2 for the layout of q.

    Raises:
        BackendError: Shapes, types or devices that do not go together, a head dimension above 128, a sequence whose
            sums could leave int32 or leave no bits to an int8 output, NaN or +inf in a mask on the CPU, or a backend
            that cannot serve the device.
    """
    _check(q, k, v, scales, out_dtype, precision)
    if (out_dtype or q.dtype) == torch.int8:
        _require_output_bits(q.shape[2], scales, precision)
    addend = _combine(bias, mask, q)
    constants = scales.constants(q.device)
    if addend is not None:
        addend = exponent_bias(addend, constants)
    dtype = out_dtype or q.dtype
    return torch.ops.qvit.attention(q, k, v, constants, addend, precision, dtype, backend, scales.half_exact)


def window_attention(
    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: S.Scales,
    *,
    window: tuple[int, int],
    shift: tuple[int, int] = (0, 0),
    pad: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    finite: bool = False,
    shift_mask: float = SHIFT_MASK,
    out_dtype: torch.dtype | None = None,
    precision: str = "standard",
    backend: str = "auto",
) -> torch.Tensor:
    """Swin's attention in (shifted) windows on the image as it lies, in integers, with static scales.

    Nothing is rolled, padded, partitioned or reversed: the kernel reads and writes each window's rows where they are.
    The plan of the windows is copied to the device in every call; a quantized model holds its own, and can be captured.

    Args:
        qkv: The packed projection, (B, height, width, 3, H, D); or a tuple of q, k and v, each (B, height, width, H,
            D), where these no longer lie side by side, as after a normalisation. float16, bfloat16, float32, or int8
            quantized with ``scales``, from -127 to 127; any strides, D <= 128.
        scales: :class:`qvit.Scales`.
        window: Height and width of a window, at most 320 tokens.
        shift: How far the image is rolled up and left before it is cut.
        pad: (3, H, D), the q, k and v of a position outside the image: what a zero input projects to, which is the
            projection's bias, normalised where q and k are. None: zeros; int8 operands need it where a window reaches
            beyond the image, for zero is not what a zero is quantized to.
        bias: Additive bias in natural-log units, broadcastable to (H, N, N). -inf masks a key.
        finite: A promise that the bias masks none; on Hopper a faster kernel serves windows of up to 64 tokens then.
        shift_mask: Added where two positions meet in a window only because of the shift; -inf keeps them apart whatever
            the scores.
        out_dtype: int8, float16, bfloat16 or float32; default the type of q.
        precision: "standard" or "high".
        backend: "auto", "triton" or "reference".

    Returns:
        (B, height, width, H * D), contiguous.

    Raises:
        BackendError: Shapes, types, devices or sizes that do not go together.
    """
    q, k, v = _unpack(qkv)
    _, height, width, heads, head_dim = q.shape
    flat = [x.flatten(1, 2) for x in (q, k, v)]
    _check(*(x.transpose(1, 2) for x in flat), scales, out_dtype, precision)
    if pad is not None and (pad.shape != (3, heads, head_dim) or pad.dtype != q.dtype or pad.device != q.device):
        raise BackendError(
            f"pad must be {(3, heads, head_dim)} of {q.dtype} on {q.device}, "
            f"found {tuple(pad.shape)} of {pad.dtype} on {pad.device}"
        )
    for name, pair in (("window", window), ("shift", shift)):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, int) for x in pair)):
            raise BackendError(f"{name} must be two integers, height and width; found {pair!r}")
    try:
        plan = plan_windows(height, width, tuple(window), tuple(shift))
    except ValueError as error:
        raise BackendError(str(error)) from error
    rows, pattern, masks = plan.tensors(q.device)
    if pad is None and plan.has_pads:
        if q.dtype == torch.int8:
            raise BackendError("int8 operands need pad, for a window reaches beyond the image: quantize qkv's bias")
        pad = q.new_zeros(3, heads, head_dim)
    constants = scales.constants(q.device)
    addend = None
    if bias is not None or plan.masks.any():
        finite = (finite or bias is None) and shift_mask > float("-inf")
        addend = window_bias(pattern_bias(masks, bias, heads, shift_mask), constants, finite=finite)
    return torch.ops.qvit.window_attention(
        *flat,
        pad if plan.has_pads else None,
        constants,
        addend,
        rows,
        pattern,
        precision,
        out_dtype or q.dtype,
        backend,
        scales.half_exact,
    ).reshape(*q.shape[:3], heads * head_dim)


def _unpack(qkv) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v (B, height, width, H, D) of either form."""
    packed = isinstance(qkv, torch.Tensor)
    if packed and qkv.ndim == 6 and qkv.shape[3] == 3:
        return qkv.unbind(3)
    if not packed and len(qkv) == 3 and qkv[0].ndim == 5 and all(x.shape == qkv[0].shape for x in qkv):
        return tuple(qkv)
    found = tuple(qkv.shape) if packed else " and ".join(str(tuple(x.shape)) for x in qkv)
    raise BackendError(
        f"qkv must be (B, height, width, 3, H, D), or q, k and v (B, height, width, H, D) each; found {found}"
    )


def window_bias(bias: torch.Tensor, constants: torch.Tensor, *, finite: bool | None = None) -> torch.Tensor:
    """A bias of windows as the operator takes it: packed where it can be, for that is what the fastest kernel reads.

    Args:
        bias: Float (patterns, H, N, N) in natural-log units; -inf masks a key.
        constants: int32 (H, 6 * D + 8) on the same device.
        finite: No key is masked. None: look, which waits for the device.

    Returns:
        int32 (patterns, H, N, N), or packed as by :func:`qvit.reference.pack_window_bias`.
    """
    units = exponent_bias(bias, constants)
    if bias.shape[-1] > reference.PACKED_KEYS:
        return units
    finite = not (units == reference.MASKED).any() if finite is None else finite
    return reference.pack_window_bias(units) if finite else units


def pattern_bias(masks: torch.Tensor, bias: torch.Tensor | None, heads: int, shift_mask: float) -> torch.Tensor:
    """A bias (H, N, N) with the mask of each pattern of windows, bool (patterns, N, N): float32 (patterns, H, N, N).

    Raises:
        BackendError: A bias that does not fit.
    """
    device, tokens = masks.device, masks.shape[-1]
    additive = torch.zeros(masks.shape, device=device).masked_fill(masks, shift_mask)[:, None]
    if bias is None:
        return additive.expand(-1, heads, -1, -1)
    if bias.device != device or not bias.is_floating_point():
        raise BackendError(f"bias must be a float tensor on {device}, found {bias.dtype} on {bias.device}")
    try:
        bias = bias.float().expand(heads, tokens, tokens)
    except RuntimeError as error:
        raise BackendError(
            f"bias of shape {tuple(bias.shape)} does not broadcast to {(heads, tokens, tokens)}"
        ) from error
    return bias + additive


def _check(q, k, v, scales, out_dtype, precision) -> None:
    if not isinstance(scales, S.Scales):
        raise BackendError(
            f"scales must be a qvit.Scales, found {type(scales).__name__}; the layers of a Calibration have one each"
        )
    if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
        raise BackendError(
            f"q, k and v must have one shape (B, H, N, D), found {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in (*FLOATS, torch.int8):
        raise BackendError(
            f"q, k and v must share a type: float16, bfloat16, float32 or int8; found {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not (q.device == k.device == v.device):
        raise BackendError(f"q, k and v must be on one device, found {q.device}, {k.device}, {v.device}")
    if out_dtype is not None and out_dtype not in (*FLOATS, torch.int8):
        raise BackendError(f"out_dtype must be int8, float16, bfloat16 or float32, found {out_dtype}")
    if precision not in PRECISIONS:
        raise BackendError(f"precision must be one of {PRECISIONS}, found {precision!r}")
    if q.shape[-1] > MAX_HEAD_DIM:
        raise BackendError(f"head dimension {q.shape[-1]} is above {MAX_HEAD_DIM}; leave this attention in float")
    if (scales.num_heads, scales.head_dim) != (q.shape[1], q.shape[3]):
        raise BackendError(
            f"scales are for {scales.num_heads} heads of {scales.head_dim}, q has {q.shape[1]} of {q.shape[3]}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise BackendError("integer attention has no gradient: run under torch.no_grad() or detach q, k and v")


def _require_output_bits(tokens: int, scales: S.Scales, precision: str) -> None:
    """Refuses an int8 output whose values the sums over so many keys no longer resolve.

    An average over many keys is small beside V, and the bits of the sums are shared between the number of keys and how
    many times V's scale is the output's.
    """
    bits = scales.o_ratio_bits
    if tokens and reference.out_rounding_shift(tokens, precision, bits) < 1:
        raise BackendError(
            f"an int8 output of {tokens} tokens: V's scale is up to {2 ** (30 - bits)} times the output's, found by "
            "calibration, which leaves the output no bit of the sums over so many keys; pass a floating out_dtype"
        )


def _combine(bias: torch.Tensor | None, mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """bias and mask as one additive (G, H or 1, N, N) tensor with G in {1, B}: bool, or float with -inf for masked."""
    batch, heads, tokens, _ = q.shape
    parts = []
    for name, x in (("bias", bias), ("mask", mask)):
        if x is None:
            continue
        if x.device != q.device:
            raise BackendError(f"{name} is on {x.device}, q on {q.device}")
        if not (x.is_floating_point() or (x.dtype == torch.bool and name == "mask")):
            raise BackendError(f"{name} must be a float tensor{' or bool' * (name == 'mask')}, found {x.dtype}")
        try:
            torch.broadcast_shapes(x.shape, (batch, heads, tokens, tokens))
        except RuntimeError as error:
            raise BackendError(
                f"{name} of shape {tuple(x.shape)} does not broadcast to {(batch, heads, tokens, tokens)}"
            ) from error
        if x.is_floating_point() and x.device.type == "cpu" and (x.isnan() | (x == float("inf"))).any():
            raise BackendError(f"{name} holds NaN or +inf, which mean nothing; use -inf or False for a masked key")
        x = x[(None,) * (4 - x.ndim)]
        parts.append(x.expand(x.shape[0], x.shape[1], tokens, tokens))
    if len(parts) == 2 and parts[1].dtype == torch.bool:
        return parts[0].masked_fill(~parts[1], float("-inf"))
    return parts[0] + parts[1] if len(parts) == 2 else parts[0] if parts else None
