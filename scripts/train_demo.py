"""Train the two small models of the demo on scikit-learn's digits: a few minutes on two CPU cores.

    python scripts/train_demo.py                        # writes both weight files to configs/weights
    python scripts/train_demo.py demo_swin --steps 2000

The shapes are those of configs/demo_*.yaml. The seed is fixed, yet another CPU or torch may round otherwise and give
other weights of the same quality; the script refuses to write a model that reads fewer than 97 % of the digits.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import trange

from qvit.evaluation.config import load_model_config
from qvit.evaluation.demo import demo_canvas, demo_digits, demo_normalise, demo_split

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BATCH, WARMUP, PEAK_RATE = 128, 100, 1.5e-3


def warp(digits: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """Turn, stretch and shift each digit (n, 16, 16) a little, and dim it."""
    turn, stretch = rng.uniform(-0.2, 0.2, size=(2, len(digits)))
    cos, sin = (1 + stretch / 2) * np.cos(turn), (1 + stretch / 2) * np.sin(turn)
    shift = rng.uniform(-0.1, 0.1, size=(2, len(digits)))  # in halves of the digit's edge: 0.8 pixels
    affine = np.stack([np.stack([cos, -sin, shift[0]], axis=1), np.stack([sin, cos, shift[1]], axis=1)], axis=1)
    stored = torch.from_numpy(digits)[:, None]
    grid = F.affine_grid(torch.from_numpy(affine), list(stored.shape), align_corners=False)
    warped = F.grid_sample(stored, grid, align_corners=False)[:, 0].numpy()
    return warped * rng.uniform(0.7, 1.0, size=(len(digits), 1, 1))


def train(model: torch.nn.Module, steps: int, seed: int) -> torch.nn.Module:
    """Train from scratch with AdamW and a cosine schedule; returns the moving average of the weights."""
    digits, labels = demo_digits("train")
    rng = np.random.RandomState(seed)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.05, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    model.train()
    for _ in (bar := trange(steps, unit="step")):
        chosen = rng.randint(len(digits), size=BATCH)
        images = demo_normalise(demo_canvas(warp(digits[chosen], rng), rng))
        loss = F.cross_entropy(model(images), torch.from_numpy(labels[chosen]), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return average.module.eval()


@torch.no_grad()
def top1(model: torch.nn.Module) -> float:
    """Top-1 on the validation pictures, in percent."""
    images, labels = demo_split("val")
    logits = torch.cat([model(demo_normalise(chunk)) for chunk in images.split(BATCH)])
    return 100 * (logits.argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["demo_deit", "demo_swin"], help="configurations to train")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder to write to instead of configs/weights")
    args = parser.parse_args()
    for name in args.names:
        config = load_model_config(name, CONFIGS)
        torch.manual_seed(args.seed)
        model = train(timm.create_model(config.architecture, **config.kwargs), args.steps, args.seed)
        path = (args.output or CONFIGS / "weights") / f"{name}.safetensors"
        weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
        model.load_state_dict({key: value.float() for key, value in weights.items()})
        accuracy = top1(model)
        print(f"{name}: Top-1 {accuracy:.2f} % on {len(demo_split('val')[1]):,} pictures with float16 weights")
        if accuracy < 97:
            raise SystemExit(f"{name} is not good enough to be written; try more --steps or another --seed")
        metadata = {
            "architecture": config.architecture,
            "num_classes": str(config.kwargs["num_classes"]),
            "img_size": str(config.kwargs["img_size"]),
            "kwargs": json.dumps(config.kwargs),
            "top1": f"{accuracy:.2f}",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, path, metadata)
        print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
