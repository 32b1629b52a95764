"""Saves a quantization beside its float weights, and puts it back: one safetensors file, nothing is unpickled.

The file holds the constants of each layer, and in its metadata the configuration, the layers, a fingerprint of the
model's float weights, so that constants never meet weights that they were not made for (what a layer sees depends on
all that come before it), and a checksum of all this, for a flipped bit of a constant would pass every other check.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from qvit.config import QuantConfig
from qvit.discovery import Site, find_attention, plan_swap
from qvit.errors import CheckpointError, ConfigError, QvitError
from qvit.fingerprint import fingerprint, same_weights
from qvit.scales import Scales
from qvit.surgery import all_or_nothing, record_agreement, swap_all

FORMAT_VERSION = 1
_METADATA_KEY = "qvit"
_CHECKSUM_KEY = "sha256"
_PREFIX = "constants:"  # a module name may be empty, a tensor's may not


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the quantization of a model; its weights are not in the file.

    Args:
        model: A quantized model, compiled or not.
        path: File to write, by convention `*.qvit.safetensors`.

    Raises:
        CheckpointError: The model is not quantized, `load` could not make the same model of the file, the weights of
            an attention are not those that were quantized, or the file cannot be written.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps, whose names `load` will meet
    sites = [site for site in find_attention(model) if site.is_swapped]
    if not sites:
        raise CheckpointError("the model has no quantized attention; call qvit.quantize(model, calib_loader) first")
    config = sites[0].module.qvit_record.config
    _require_one_quantization(model, sites, config)
    document = {
        "format_version": FORMAT_VERSION,
        "config": config.to_dict(),
        "fingerprint": fingerprint(model),
        "layers": {site.name: _describe(site) for site in sites},
        "sqnr_db": {site.name: site.module.qvit_record.sqnr_db for site in sites},
        "agreement": sites[0].module.qvit_record.agreement,
    }
    tensors = {_PREFIX + site.name: site.module.qvit_constants.cpu().contiguous() for site in sites}
    text = json.dumps(document, allow_nan=False)
    try:
        save_file(tensors, os.fspath(path), metadata={_METADATA_KEY: text, _CHECKSUM_KEY: _checksum(text, tensors)})
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot write {path}: {e}") from e


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Swaps the attention modules of a float model with the constants that `save` wrote; no calibration is needed.

    Args:
        model: The float model, in eval mode, with the weights that were quantized.
        path: File that `save` wrote.

    Returns:
        The same model; unchanged if anything fails.

    Raises:
        CheckpointError: The file is unreadable or damaged, or belongs to another model, other weights or another
            format version.
        UnsupportedModuleError: The model is compiled, quantized, or in training mode.
    """
    document, tensors = _read(path)
    try:
        config = QuantConfig.from_dict(document["config"])
        layers, weights = dict(document["layers"]), dict(document["fingerprint"])
        sqnr = {name: _number(db) for name, db in document["sqnr_db"].items()}
        agreement = _number(document["agreement"])
        scales = {n: Scales.from_constants(tensors[_PREFIX + n], layer["softmax_scale"]) for n, layer in layers.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, QvitError) as e:
        raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {e}") from e
    with torch.inference_mode(False), torch.no_grad():
        try:
            sites = plan_swap(model, config)
        except ConfigError as e:  # a pattern of the file's config finds nothing here
            raise CheckpointError(f"{path} does not fit the model: {e}") from e
        _require_same_layers(sites, layers, scales, path)
        if not same_weights(fingerprint(model), weights):
            raise CheckpointError(
                f"{path} was made for other weights of this architecture; quantize this model instead"
            )
        with all_or_nothing(model):
            swap_all(model, sites, scales, config, sqnr)
            record_agreement(sites, agreement)
    return model


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(Path(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        text = metadata.get(_METADATA_KEY)
        document = None if text is None else json.loads(text)
    except (OSError, SafetensorError, ValueError, RecursionError) as e:
        raise CheckpointError(f"cannot read {path}: {type(e).__name__}: {e}; save or copy the file again") from e
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is a safetensors file, but not one saved by qvit")
    if document.get("format_version") != FORMAT_VERSION:
        found = document.get("format_version")
        raise CheckpointError(
            f"{path} has format version {found!r}, this qvit reads {FORMAT_VERSION}; use the qvit that wrote it"
        )
    if metadata.get(_CHECKSUM_KEY) != _checksum(text, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum does not match; save or copy the file again")
    return document, tensors


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the metadata and of the names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _describe(site: Site) -> dict[str, Any]:
    host = site.adapter.host
    return {
        "type": f"{host.__module__}.{host.__qualname__}",
        "heads": site.adapter.heads_of(site.module),
        "head_dim": site.adapter.head_dim_of(site.module),
        "softmax_scale": site.adapter.scale_of(site.module),
    }


def _require_one_quantization(model: nn.Module, sites: list[Site], config: QuantConfig) -> None:
    """Refuses what one configuration and the model's weights do not describe: the file has no more than these."""
    for site in sites:
        record = site.module.qvit_record
        if record.config != config:
            raise CheckpointError(
                f"layer {site.name!r} was quantized with another configuration than {sites[0].name!r}, and a file "
                "holds one; call qvit.restore(model), and quantize the whole model at once"
            )
        if not same_weights(record.fingerprint, fingerprint(site.module)):
            raise CheckpointError(
                f"the weights of layer {site.name!r} have changed since it was quantized, and its constants are those "
                "of the old ones; call qvit.restore(model), and quantize it again"
            )
    for site in find_attention(model, config.exclude):
        if site.adapter is not None and not site.is_swapped:
            raise CheckpointError(
                f"layer {site.name!r} is float, and qvit.load would look for it in the file; quantize the whole model, "
                "or name the layer in QuantConfig.exclude"
            )


def _require_same_layers(
    sites: list[Site], layers: dict[str, dict[str, Any]], scales: dict[str, Scales], path: str | os.PathLike[str]
) -> None:
    ours = {site.name: _describe(site) for site in sites}
    for name in [*ours, *layers]:
        if ours.get(name) != layers.get(name):
            raise CheckpointError(
                f"{path} does not fit the model: layer {name!r} is {ours.get(name)} in the model and "
                f"{layers.get(name)} in the file"
            )
        found, expected = (scales[name].num_heads, scales[name].head_dim), (ours[name]["heads"], ours[name]["head_dim"])
        if found != expected:
            raise CheckpointError(f"{path} is damaged: the constants of {name!r} are for {found}, expected {expected}")
