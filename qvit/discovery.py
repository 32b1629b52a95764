"""Finds everything in a model that computes attention, and says of each module whether and why not it is swapped."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx, nn

from qvit.config import QuantConfig
from qvit.errors import ConfigError, UnsupportedModuleError
from qvit.patches import ADAPTERS
from qvit.patches.base import QuantizedModule

# Reasons of known classes, by qualified name, so that nothing has to be imported to name them. A swap never looks
# here: it goes by exact type.
_REASONS = {
    "pooling_head": (
        "timm.layers.attention_pool.AttentionPoolLatent",
        "timm.layers.attention_pool.AttentionPoolPrr",
        "timm.layers.attention_pool2d.RotAttentionPool2d",
        "timm.layers.attention_pool2d.AttentionPool2d",
        "timm.layers.other_pool.SimPool1d",
        "timm.layers.other_pool.SimPool2d",
    ),
    "class_attention": (
        "timm.models.cait.ClassAttn",
        "timm.models.volo.ClassAttention",
        "timm.models.crossvit.CrossAttention",
    ),
    "talking_heads": ("timm.models.cait.TalkingHeadAttn",),
    "channel_attention": (
        "timm.models.xcit.XCA",
        "timm.models.davit.ChannelAttention",
        "timm.models.davit.ChannelAttentionV2",
        "timm.models.edgenext.CrossCovarianceAttn",
    ),
    "fused_parallel_block": ("timm.models.vision_transformer.ParallelScalingBlock",),
    "differential_attention": (
        "timm.layers.diff_attention.DiffAttention",
        "timm.models.vision_transformer.DiffParallelScalingBlock",
    ),
    "query_dependent_bias": ("timm.models.vision_transformer_sam.Attention",),
    "pooled_query": (
        "timm.models.hiera.MaskUnitAttention",
        "timm.models.hieradet_sam2.MultiScaleAttention",
        "timm.models.mvitv2.MultiScaleAttention",
        "timm.models.mvitv2.MultiScaleAttentionPoolFirst",
        "torchvision.models.video.mvit.MultiscaleAttention",
    ),
    "kv_reduction": (
        "timm.models.pvt_v2.Attention",
        "timm.models.twins.GlobalSubSampleAttn",
        "timm.models.nextvit.EfficientAttention",
    ),
    "unsupported_layout": (
        "timm.models.levit.Attention",
        "timm.models.levit.AttentionDownsample",
        "timm.models.tiny_vit.Attention",
        "timm.models.efficientformer.Attention",
        "timm.models.efficientformer_v2.Attention2d",
        "timm.models.efficientformer_v2.Attention2dDownsample",
        "timm.models.maxxvit.Attention2d",
        "timm.models.maxxvit.AttentionCl",
    ),
    "no_token_softmax": (
        "timm.layers.cbam.ChannelAttn",
        "timm.layers.cbam.LightChannelAttn",
        "timm.layers.cbam.SpatialAttn",
        "timm.layers.cbam.LightSpatialAttn",
        "timm.layers.coord_attn.CoordAttn",
        "timm.layers.coord_attn.SimpleCoordAttn",
        "timm.layers.coord_attn.EfficientLocalAttn",
        "timm.layers.coord_attn.StripAttn",
        "timm.layers.split_attn.SplitAttn",
        "timm.layers.selective_kernel.SelectiveKernelAttn",
    ),
    "torch_multihead_attention": ("torch.nn.modules.activation.MultiheadAttention",),
    "torchvision_swin": (
        "torchvision.models.swin_transformer.ShiftedWindowAttention",
        "torchvision.models.swin_transformer.ShiftedWindowAttentionV2",
        "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d",
    ),
    "torchvision_maxvit": ("torchvision.models.maxvit.RelativePositionalMultiHeadAttention",),
    "not_in_registry": (
        "timm.layers.lambda_layer.LambdaLayer",
        "timm.models.csatv2.SpatialTransformerBlock",
        "timm.models.convit.GPSA",
        "timm.models.convit.MHSA",
        "timm.models.iformer.SHMA",
        "timm.models.shvit.SHSA",
        "timm.models.efficientvit_mit.LiteMLA",
        "timm.models.efficientvim.HSMSSD",
    ),
}
_REASON_OF = {name: reason for reason, names in _REASONS.items() for name in names}
_LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class Site:
    """One attention module of a model.

    Attributes:
        name: Module path; empty for the model itself.
        module: The module.
        adapter: The quantized class that it has or can get; None where it stays float.
        reason: Why it stays float; empty with an adapter.
    """

    name: str
    module: nn.Module
    adapter: type[QuantizedModule] | None
    reason: str = ""

    @property
    def is_swapped(self) -> bool:
        """True for a module that runs in integers now."""
        return isinstance(self.module, QuantizedModule)

    @property
    def type_name(self) -> str:
        """Name of the host's class."""
        return (self.module.host if self.is_swapped else type(self.module)).__name__


def find_attention(model: nn.Module, exclude: tuple[str, ...] = ()) -> list[Site]:
    """Lists the attention modules of a model in module order.

    A container that only wraps another attention module is not listed.

    Args:
        model: Any module.
        exclude: fnmatch patterns of module names that stay float.
    """
    sites = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            sites.append(Site(name, module, type(module)))
        elif type(module) in ADAPTERS:
            sites.append(_judge(name, module, exclude))
        elif _looks_like_attention(module):
            sites.append(Site(name, module, None, _reason_for(module)))
    inner = [site.name for site in sites]
    return [site for site in sites if site.adapter is not None or not _contains_any(site.name, inner)]


def plan_swap(model: nn.Module, config: QuantConfig, *, strict: bool = False) -> list[Site]:
    """Returns the modules to swap, after checking that the model can be quantized now; changes nothing.

    Raises:
        UnsupportedModuleError: Already quantized, compiled, in training mode, nothing to swap, or with `strict`
            anything that would be left.
        ConfigError: A pattern of `config.exclude` matches no attention module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModuleError(f"expected a torch.nn.Module, got {type(model).__name__}")
    _require_not_compiled(model)
    sites = find_attention(model, config.exclude)
    swapped = [site for site in sites if site.is_swapped]
    if swapped:
        raise UnsupportedModuleError(
            f"the model is already quantized ({_quote(swapped[0].name)} and {len(swapped) - 1} more); call "
            "qvit.restore(model) first"
        )
    for pattern in config.exclude:
        if not any(fnmatchcase(site.name, pattern) for site in sites):
            raise ConfigError(f"configuration key exclude: {pattern!r} matches no attention module of the model")
    targets = [site for site in sites if site.adapter is not None]
    left = [site for site in sites if site.adapter is None]
    if not targets:
        raise UnsupportedModuleError(_nothing_to_swap(model, left))
    if strict and left:
        raise UnsupportedModuleError(f"strict=True, and {len(left)} attention modules would stay float: {_list(left)}")
    _require_eval(model, targets)
    return targets


def _judge(name: str, module: nn.Module, exclude: tuple[str, ...]) -> Site:
    adapter = ADAPTERS[type(module)]
    reason = adapter.refuse(module)
    if reason is None and any(fnmatchcase(name, pattern) for pattern in exclude):
        reason = "excluded_by_config"
    return Site(name, module, None, reason) if reason else Site(name, module, adapter)


def _looks_like_attention(module: nn.Module) -> bool:
    kind = type(module)
    known = isinstance(module, tuple(ADAPTERS)) or _qualified_name(kind) in _REASON_OF
    return known or _LOOKS_LIKE_ATTENTION.search(kind.__name__) is not None


def _reason_for(module: nn.Module) -> str:
    kind = type(module)
    for host in ADAPTERS:
        if isinstance(module, host):
            return f"subclass_of_{host.__name__}"
    for base in kind.__mro__:
        if base is not kind and _qualified_name(base) in _REASON_OF and _qualified_name(kind) not in _REASON_OF:
            return f"subclass_of_{base.__name__}"
    return _REASON_OF.get(_qualified_name(kind), "not_in_registry")


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _contains_any(name: str, others: list[str]) -> bool:
    prefix = f"{name}." if name else ""
    return any(other != name and other.startswith(prefix) for other in others)


def _require_not_compiled(model: nn.Module) -> None:
    # Without this module in memory there is no compiled model, and importing it would take seconds.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    for name, module in model.named_modules():
        wrapped = eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModuleError(f"{_quote(name)} is compiled; quantize first, then call torch.compile")


def _require_eval(model: nn.Module, targets: list[Site]) -> None:
    if model.training:
        raise UnsupportedModuleError("the model is in training mode; call model.eval() first")
    for site in targets:
        if any(module.training for module in site.module.modules()):
            raise UnsupportedModuleError(f"{_quote(site.name)} is in training mode; call model.eval() first")


def _nothing_to_swap(model: nn.Module, left: list[Site]) -> str:
    kind = type(model).__name__
    if left:
        return f"no attention module of {kind} can be swapped: {_list(left)}"
    if isinstance(model, fx.GraphModule):
        return "a traced GraphModule has no attention modules left; quantize the model first, then trace it"
    supported = ", ".join(map(_qualified_name, ADAPTERS))
    return f"{kind} has no attention module that qvit knows; supported: {supported}"


def _list(sites: list[Site]) -> str:
    return ", ".join(f"{_quote(site.name)} ({site.type_name}: {site.reason})" for site in sites)


def _quote(name: str) -> str:
    return repr(name) if name else "the model itself"
