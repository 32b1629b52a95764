"""What weights a quantization was made for, as hashes: constants fit no others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

# Two roundings, so that a float32 model and its half-precision copy know each other.
_DTYPES = (torch.float16, torch.bfloat16)


def fingerprint(module: nn.Module) -> dict[str, str]:
    """SHA-256 of the names, shapes and values of a module's float weights, by the dtype they were rounded to."""
    return {str(dtype).removeprefix("torch."): _digest(module, dtype) for dtype in _DTYPES}


def same_weights(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    """Whether two fingerprints are of the same weights, or of weights of which one is the other rounded."""
    return bool(set(a.items()) & set(b.items()))


def _digest(module: nn.Module, dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for name, weight in module.state_dict().items():
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            rounded = weight.detach().to("cpu", dtype).contiguous()
            digest.update(rounded.flatten().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
