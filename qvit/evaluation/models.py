"""The float models of an evaluation: built by timm, with timm's weights or a checkpoint's."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from qvit.errors import CheckpointError, ConfigError
from qvit.evaluation.config import ModelConfig


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a file, and what its metadata says about the model.

    Attributes:
        path: The file.
        state: The state dict.
        kwargs: `num_classes` and `img_size`, as far as the metadata has them.
        architecture: timm name in the metadata, or None.
    """

    path: str
    state: dict[str, torch.Tensor] = field(repr=False)
    kwargs: dict[str, int]
    architecture: str | None


def read_checkpoint(path: str) -> Checkpoint:
    """Read a safetensors, .pth or .pt file; pickles only with torch's `weights_only`.

    Names that DistributedDataParallel or torch.compile have put a prefix to lose it, as timm has it.

    Raises:
        CheckpointError: The file does not exist or holds no state dict.
    """
    from timm.models import clean_state_dict

    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    if path.endswith(".safetensors"):
        state, metadata = _read_safetensors(path)
    elif path.endswith((".pth", ".pt")):
        state, metadata = _read_pickle(path), {}
    else:
        raise CheckpointError(f"{path} is neither .safetensors nor .pth or .pt")
    try:
        kwargs = {key: int(metadata[key]) for key in ("num_classes", "img_size") if key in metadata}
    except ValueError as error:
        raise CheckpointError(f"{path}: num_classes and img_size in the metadata must be numbers: {error}") from error
    return Checkpoint(path, clean_state_dict(state), kwargs, metadata.get("architecture"))


def _read_safetensors(path: str) -> tuple[dict, dict]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; it is damaged or no safetensors file") from error


def _read_pickle(path: str) -> dict:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot read the weights in {path}: {reason}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise CheckpointError(f"{path} holds no state dict of tensors")
    return state


def build_model(config: ModelConfig, checkpoint: Checkpoint | None) -> nn.Module:
    """Build the architecture, without weights, in evaluation mode.

    Raises:
        ConfigError: timm does not know the model or its arguments.
        CheckpointError: The checkpoint says that it belongs to another architecture.
    """
    import timm

    if checkpoint is not None and checkpoint.architecture not in (None, config.architecture):
        raise CheckpointError(
            f"{checkpoint.path} holds a {checkpoint.architecture}, the configuration says {config.architecture}: "
            "give the configuration of that model with --model"
        )
    kwargs = {**config.kwargs, **(checkpoint.kwargs if checkpoint else {})}
    try:
        if checkpoint is not None and "num_classes" not in kwargs:
            kwargs |= _classes_of(config.model, checkpoint)
        return timm.create_model(config.model, pretrained=False, **kwargs).eval()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"timm cannot build {config.model} with {kwargs}: {error}") from error


def _classes_of(name: str, checkpoint: Checkpoint) -> dict[str, int]:
    """`num_classes` by the weights of timm's classifier for this model, where the checkpoint has them."""
    import timm

    known = timm.get_pretrained_cfg(name)
    classifier = known.classifier if known is not None else None
    first = classifier[0] if isinstance(classifier, (tuple, list)) else classifier
    weight = checkpoint.state.get(f"{first}.weight")
    return {} if weight is None else {"num_classes": len(weight)}


def load_weights(model: nn.Module, config: ModelConfig, checkpoint: Checkpoint | None) -> nn.Module:
    """Fill a model of `build_model` with the checkpoint's weights, or return one with timm's.

    Raises:
        CheckpointError: The weights do not fit the model, or cannot be downloaded.
    """
    if checkpoint is not None:
        try:
            model.load_state_dict(checkpoint.state, strict=True)
        except RuntimeError as error:
            lines = str(error).splitlines()
            raise CheckpointError(
                f"{checkpoint.path} does not fit {config.model}: {' '.join(line.strip()[:300] for line in lines[1:4])}"
            ) from error
        return model
    import timm

    if not timm.models.is_model_pretrained(config.model):
        raise CheckpointError(f"timm has no weights for {config.model}: give --checkpoint, or a name with a tag")
    try:
        return timm.create_model(config.model, pretrained=True, **config.kwargs).eval()
    except Exception as error:  # the Hub's clients raise their transports' own errors, which have no common base
        raise CheckpointError(
            f"cannot get the weights of {config.model} from the Hugging Face Hub: {type(error).__name__}: {error}. "
            "Without a network give a local file with --checkpoint, or use --model demo_deit"
        ) from error
