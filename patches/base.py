"""What all quantized host classes share: the swap and the way back, the checks of a call, and the core.

A quantized class is a module-level subclass of its host class. The swap assigns ``module.__class__`` and adds
non-persistent buffers, so parameters, hooks, names and ``state_dict`` keys stay, and deep copies and pickles work.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from qvit import ops, speed
from qvit.config import QuantConfig
from qvit.errors import UnsupportedModuleError
from qvit.fingerprint import fingerprint, same_weights
from qvit.reference import split_heads
from qvit.scales import Scales


@dataclass(frozen=True)
class Settings:
    """What the forward reads; equal in all layers of a usual model, so that compiled blocks share one graph."""

    arithmetic: str
    precision: str
    backend: str
    softmax_scale: float
    half_exact: bool
    skip_slower: bool = False


@dataclass(frozen=True)
class Record:
    """What the report and the checkpoint read.

    Attributes:
        config: Of the quantization.
        sqnr_db: Of this layer's core on a calibration batch; None where it was not measured.
        fingerprint: Of this layer's weights when it was quantized (:func:`qvit.fingerprint.fingerprint`).
        agreement: Percent of calibration pictures with the float model's answer, of the whole model; None likewise.
    """

    config: QuantConfig
    sqnr_db: float | None
    fingerprint: dict[str, str]
    agreement: float | None = None


class CoreInputs(NamedTuple):
    """Operands of the attention core.

    Attributes:
        q, k, v: (B, H, N, D), one floating dtype, any strides, after query/key normalisation.
        bias: None, or bool (True = attend) or additive float (R, 1 or H, N, N) with B % R == 0; row r uses r % R.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None


class QuantizedModule:
    """Mixin of the quantized classes. A subclass names its host and describes the host's forward up to the core.

    `refuse`, `heads_of`, `head_dim_of`, `scale_of`, `core_inputs` and `float_bias` take any module of the host's class,
    swapped or not: calibration calls them on the float module. `masks` are the arguments of the host's forward after x.

    A swapped module has `qvit_choice`: None until `skip_slower` has had a choice, then the recorded times (None where
    there are none) and whether the last forward's attention was float.
    """

    host: ClassVar[type[nn.Module]]
    known_children: ClassVar[frozenset[str]]
    known_tensors: ClassVar[frozenset[str]] = frozenset()
    known_arguments: ClassVar[frozenset[str]]
    granularity: ClassVar[str | None] = None  # of the scales; None: what the config says
    layout: str = ""  # how tokens come, where there is a choice; for the report

    @classmethod
    def refuse(cls, module: nn.Module) -> str | None:
        """Returns the reason why this module of the host's class must stay float, or None."""
        unknown = [name for name in inspect.signature(cls.host.forward).parameters if name not in cls.known_arguments]
        if unknown:
            return f"unknown_argument:{unknown[0]}"
        if "forward" in vars(module):
            return "forward_overridden"
        names = [n for n, child in module._modules.items() if child is not None and n not in cls.known_children]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        names += [n for n, t in tensors if t is not None and n not in cls.known_tensors]
        if names:
            return f"unknown_attribute:{names[0]}"
        if type(module.qkv) is not nn.Linear:
            return "qkv_not_linear"
        if type(getattr(module, "attn_drop", None)) not in (nn.Dropout, nn.Identity, type(None)):
            return "unknown_attribute:attn_drop"
        if module.qkv.out_features % (3 * module.num_heads):
            return "unsupported_layout"
        if cls.head_dim_of(module) > ops.MAX_HEAD_DIM:
            return "head_dim_above_128"
        if not 0 < cls.scale_of(module) < float("inf"):
            return "unsupported_scale"
        return None

    @staticmethod
    def heads_of(module: nn.Module) -> int:
        """Number of heads H."""
        return module.num_heads

    @staticmethod
    def head_dim_of(module: nn.Module) -> int:
        """Channels of one head, D; read from the weights, for older hosts have no such attribute."""
        return module.qkv.out_features // (3 * module.num_heads)

    @classmethod
    def scale_of(cls, module: nn.Module) -> float:
        """Factor of the scores that the float forward applies.

        A host with `fused_attn` leaves the factor to scaled_dot_product_attention and never reads its own `scale`.
        """
        default = cls.head_dim_of(module) ** -0.5
        if getattr(module, "fused_attn", False):
            return default
        return float(getattr(module, "scale", default))

    @staticmethod
    def project(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as views (B, H, N, D) of the packed projection of x (B, N, C)."""
        return split_heads(module.qkv(x), module.num_heads).unbind(0)

    @classmethod
    def core_inputs(cls, module: nn.Module, x: torch.Tensor, *masks: Any, **named_masks: Any) -> CoreInputs:
        """Operands of the core for the arguments of `forward`."""
        q, k, v = cls.project(module, x)
        return CoreInputs(q, k, v, cls.float_bias(module, q, *masks, **named_masks))

    @classmethod
    def float_bias(cls, module: nn.Module, q: torch.Tensor, *masks: Any) -> torch.Tensor | None:
        """The bias of `CoreInputs`."""
        raise NotImplementedError

    def integer_bias(self, q: torch.Tensor, *masks: Any) -> torch.Tensor | None:
        """The bias as the operator takes it."""
        return core_bias(self.float_bias(self, q, *masks), self.qvit_constants, self.qvit_settings.arithmetic)

    @staticmethod
    def is_biased(*masks: Any) -> bool:
        """True where `float_bias` is not None; asked before anything is computed."""
        raise NotImplementedError

    @classmethod
    def build_buffers(cls, module: nn.Module, scales: Scales, config: QuantConfig) -> dict[str, torch.Tensor]:
        """Non-persistent buffers of the swapped module, on the device of its weights; changes nothing."""
        return {"qvit_constants": scales.constants().to(module.qkv.weight.device, copy=True)}

    @classmethod
    def swap(cls, module: nn.Module, scales: Scales, config: QuantConfig, sqnr_db: float | None) -> None:
        """Turns a module of the host's class into this class, in place. Everything that can fail comes first."""
        settings = Settings(
            config.arithmetic,
            config.precision,
            config.backend,
            cls.scale_of(module),
            scales.half_exact,
            config.skip_slower,
        )
        buffers = cls.build_buffers(module, scales, config)
        record = Record(config, sqnr_db, fingerprint(module))
        module.__class__ = cls
        for name, buffer in buffers.items():
            module.register_buffer(name, buffer, persistent=False)
        module.qvit_settings = settings
        module.qvit_record = record
        module.register_load_state_dict_post_hook(_after_loading)
        module.qvit_choice = None

    def unswap(self) -> None:
        """Gives the host's class back and removes everything that `swap` added."""
        self.__class__ = self.host
        for name in [n for n in self._buffers if n.startswith("qvit_")]:
            delattr(self, name)
        for name in ("qvit_settings", "qvit_record", "qvit_choice"):
            vars(self).pop(name, None)
        hooks = self._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _after_loading]:
            del hooks[key]

    def after_loading(self) -> None:
        """Takes notice of a state_dict that was loaded: the scales and their figures are of the weights before."""
        if not same_weights(self.qvit_record.fingerprint, fingerprint(self)):
            self.qvit_record = replace(self.qvit_record, sqnr_db=None, agreement=None)
            warnings.warn(
                f"other weights were loaded into a quantized {self.host.__name__}, whose scales were calibrated with "
                "those before; unless they are close, call qvit.restore(model) and quantize it again",
                stacklevel=2,
            )

    def require_inference(self, x: torch.Tensor) -> None:
        """Raises UnsupportedModuleError in training mode, or where a gradient of x or of a weight would be lost."""
        if self.training:
            raise UnsupportedModuleError(
                f"a quantized {self.host.__name__} cannot train; call model.eval(), or qvit.restore(model) to train"
            )
        if torch.is_grad_enabled() and (x.requires_grad or self._trains()):
            raise UnsupportedModuleError(
                f"a quantized {self.host.__name__} has no gradient, and its input or a weight before its core requires "
                "one; run the model under torch.inference_mode() or torch.no_grad()"
            )

    def _trains(self) -> bool:
        """Whether a weight before the core requires a gradient; the output projection behind it can have one."""
        return any(p.requires_grad for name, p in self.named_parameters() if not name.startswith("proj."))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: Any) -> torch.Tensor:
        """Attention of q, k, v (B, H, N, D) in integers, or as `skip_slower` chooses; returns (B, N, H * D)."""
        settings = self.qvit_settings
        if settings.skip_slower and self.float_is_faster(q, q.shape, self.is_biased(*masks)):
            out = run_float_core(q, k, v, self.float_bias(self, q, *masks), settings.softmax_scale)
        else:
            out = run_core(q, k, v, self.integer_bias(q, *masks), self.qvit_constants, settings)
        return out.flatten(2)

    def attend_packed(self, qkv: torch.Tensor) -> torch.Tensor:
        """What `attend` gives for a projection (B, N, 3 * H * D) and no masks, with less work for the host."""
        settings = self.qvit_settings
        heads = self.num_heads
        if settings.arithmetic != "qvit" or "attend" in self.__dict__:  # whoever replaces that replaces this
            return self.attend(*split_heads(qkv, heads).unbind(0))
        if settings.skip_slower:
            B, N, C = qkv.shape
            if self.float_is_faster(qkv, (B, heads, N, C // (3 * heads)), False):
                return run_float_core(*split_heads(qkv, heads).unbind(0), None, settings.softmax_scale).flatten(2)
        return torch.ops.qvit.attention_qkvpacked(
            qkv, heads, self.qvit_constants, settings.precision, settings.backend, settings.half_exact
        )

    def float_is_faster(self, x: torch.Tensor, sizes: Sequence[int], biased: bool) -> bool:
        """True where recorded times say so for x's device and type; kept in `qvit_choice` for the report.

        torch.compile sees a constant: `index` makes it compile anew for each batch size, even where sizes are dynamic.

        Args:
            x: Of the core's operands.
            sizes: B, H, N and D.
            biased: With a bias or a mask.
        """
        sizes = [operator.index(size) for size in sizes]
        times = speed.times_on(x.device, x.dtype, self.qvit_settings.precision, *sizes, biased)
        in_float = times is not None and times[1] < times[0]
        self.qvit_choice = (times, in_float)
        return in_float


def is_idle(child: nn.Module | None) -> bool:
    """True where a call of a child gives what it is given and no one listens: then the host need not make it."""
    if child is None:
        return True
    if type(child) is not nn.Identity and (type(child) is not nn.Dropout or child.training):
        return False
    everywhere = torch.nn.modules.module
    heard = (  # as nn.Module itself looks for who listens
        child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks
        or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks
    )  # fmt: skip
    return not heard and "forward" not in child.__dict__


def apply(child: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """x through a child that may be missing, or idle."""
    return x if is_idle(child) else child(x)


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """A hook, for a module's own loading comes before that of its children."""
    module.after_loading()


def run_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    constants: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """The operator with a layer's settings; returns (B, N, H, D)."""
    return ops.run_attention(
        q,
        k,
        v,
        constants,
        bias,
        softmax_scale=settings.softmax_scale,
        arithmetic=settings.arithmetic,
        precision=settings.precision,
        backend=settings.backend,
        half_exact=settings.half_exact,
    )


@torch.no_grad()  # the integer core gives no gradient either, and which one runs goes by the batch
def run_float_core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """PyTorch's attention of the core's operands, in their own type; returns (B, N, H, D)."""
    if bias is not None:
        bias = for_rows(bias if bias.dtype == torch.bool else bias.to(q.dtype), len(q))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=softmax_scale).transpose(1, 2)


def for_rows(bias: torch.Tensor, batch: int) -> torch.Tensor:
    """The bias of :class:`CoreInputs` as what broadcasts takes it: one for all rows, or one for each."""
    return bias if len(bias) in (1, batch) else bias.repeat(batch // len(bias), 1, 1, 1)


def core_bias(bias: torch.Tensor | None, constants: torch.Tensor, arithmetic: str) -> torch.Tensor | None:
    """A bool or additive float bias (R, 1 or H, N, N) as the operator of this arithmetic takes it.

    Exponent units (int32) for "qvit"; the paper's arithmetics find their scales on every batch and take it as it is.
    """
    return ops.exponent_bias(bias, constants) if bias is not None and arithmetic == "qvit" else bias


def attention_mask(
    q: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, host: type[nn.Module]
) -> torch.Tensor | None:
    """The mask arguments of scaled_dot_product_attention as one 4-dimensional bias.

    Args:
        q: (B, H, N, D), gives the sizes and the device.
        attn_mask: None, or bool or floating, broadcastable to (B, H, N, N).
        is_causal: Each token sees itself and the tokens before it.
        host: Named in errors.

    Raises:
        UnsupportedModuleError: Both masks at once, or a mask whose shape or dtype does not fit.
    """
    B, H, N, _ = q.shape
    if attn_mask is not None and is_causal:
        raise UnsupportedModuleError(
            f"{host.__name__} got attn_mask and is_causal=True; put the causal mask in attn_mask"
        )
    if is_causal:
        return torch.ones(N, N, dtype=torch.bool, device=q.device).tril()[None, None]
    if attn_mask is None:
        return None
    shape, dtype = tuple(attn_mask.shape), attn_mask.dtype
    fits = len(shape) <= 4 and all(s in (1, n) for s, n in zip(shape[::-1], (N, N, H, B)))
    if not fits or not (dtype == torch.bool or dtype.is_floating_point):
        raise UnsupportedModuleError(
            f"{host.__name__} got an attn_mask of {dtype} {shape}; expected bool or floating, broadcastable to "
            f"{(B, H, N, N)}"
        )
    attn_mask = attn_mask.reshape((1,) * (4 - len(shape)) + shape)
    return attn_mask.expand(-1, -1, N, N)


def same_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k in v's dtype: under autocast a query/key normalisation gives float32 beside a half-precision v."""
    return q.to(v.dtype), k.to(v.dtype), v
