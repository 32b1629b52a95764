"""The evaluation loop, what it counts, and the paired test of a Top-1 drop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import inf, log10, nan, sqrt

import torch
from torch import nn
from tqdm import tqdm

from qvit.errors import DataError

FEW_PICTURES = 1000
_ONE_SIDED_95 = 1.65
_TWO_SIDED_95 = 1.96


@dataclass(frozen=True)
class Result:
    """What one model answered, picture by picture; everything else is derived from it.

    Attributes:
        name: The model's name in the run.
        predictions: (n,) int64, the Top-1 class.
        correct: (n,) bool, Top-1 is right.
        correct5: (n,) bool, the right class is among the five largest logits.
        signal: (n,) float64, sum of squares of the baseline's logits.
        noise: (n,) float64, sum of squares of the difference to the baseline's logits.
        images_per_second: Forward passes only, without the first batch; nan for a single batch.
    """

    name: str
    predictions: torch.Tensor
    correct: torch.Tensor
    correct5: torch.Tensor
    signal: torch.Tensor
    noise: torch.Tensor
    images_per_second: float

    @property
    def count(self) -> int:
        """Number of pictures."""
        return len(self.predictions)

    @property
    def top1(self) -> float:
        """Top-1 in percent."""
        return 100 * self.correct.double().mean().item()

    @property
    def top5(self) -> float:
        """Top-5 in percent."""
        return 100 * self.correct5.double().mean().item()

    @property
    def sqnr_db(self) -> float:
        """SQNR of the logits against the baseline of the run, all pictures pooled; inf where they are equal."""
        signal, noise = self.signal.sum().item(), self.noise.sum().item()
        if noise == 0:
            return inf
        return 10 * log10(signal / noise) if signal > 0 and noise < inf else nan


@dataclass(frozen=True)
class Comparison:
    """One model against the float model of the same run, on the same pictures.

    Attributes:
        agreement: Percent of the pictures with the same Top-1 class.
        agreement_interval: Its 95 % interval (Wilson's), percent.
        lost: Pictures that the float model had right and this one has wrong.
        won: The reverse.
        drop: Percentage points of Top-1 lost, net.
        sqnr_db: SQNR of the logits.
    """

    agreement: float
    agreement_interval: tuple[float, float]
    lost: int
    won: int
    drop: float
    sqnr_db: float


@dataclass(frozen=True)
class DropTest:
    """The verdict of `drop_test`: it failed when `lost - won` is above `bound` pictures."""

    passed: bool
    max_drop: float
    lost: int
    won: int
    count: int
    bound: float

    def to_dict(self) -> dict:
        """The verdict as plain values, for JSON."""
        return asdict(self)


def drop_test(lost: int, won: int, count: int, max_drop: float) -> DropTest:
    """Test whether Top-1 dropped by more than `max_drop`, in pairs, one-sided at about 95 %.

    By the normal approximation: where fewer than some ten pictures change sides, it is the stricter test.

    Only pictures that change sides carry information, so their number sets the tolerance and not the
    much larger variance of the Top-1 itself.

    Args:
        lost: Pictures right in float and wrong in the quantized model.
        won: The reverse.
        count: All pictures.
        max_drop: Allowed drop in percentage points.
    """
    bound = max_drop / 100 * count + _ONE_SIDED_95 * sqrt(lost + won)
    return DropTest(lost - won <= bound, max_drop, lost, won, count, bound)


def compare(result: Result, baseline: Result) -> Comparison:
    """Count agreement, lost and won pictures; `sqnr_db` needs `baseline` to be the baseline of the run."""
    same = int((result.predictions == baseline.predictions).sum())
    lost = int((baseline.correct & ~result.correct).sum())
    won = int((~baseline.correct & result.correct).sum())
    count = result.count
    interval = _wilson(same, count)
    return Comparison(100 * same / count, interval, lost, won, 100 * (lost - won) / count, result.sqnr_db)


def _wilson(hits: int, count: int) -> tuple[float, float]:
    z2 = _TWO_SIDED_95**2
    middle = (hits + z2 / 2) / (count + z2)
    half = _TWO_SIDED_95 / (count + z2) * sqrt(hits * (count - hits) / count + z2 / 4)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def evaluate(
    models: dict[str, nn.Module],
    loader: Iterable,
    device: torch.device | str,
    *,
    baseline: str | None = None,
    total: int | None = None,
    check_labels: bool = True,
) -> dict[str, Result]:
    """Run several models over the same pictures in one pass; every batch is decoded and copied once.

    Args:
        models: Models in evaluation mode on `device`, by name; each gets the pictures in its own dtype.
        loader: Batches (images (B, 3, H, W) float32, labels (B,) int64).
        device: Where the models are.
        baseline: The model that logits are compared with; by default the first.
        total: Number of pictures, for the progress bar.
        check_labels: Stop after 1,000 pictures when the baseline is no better than a guess.

    Raises:
        DataError: No pictures, a picture that cannot be read, or labels that the baseline does not recognise.
    """
    device = torch.device(device)
    baseline = next(iter(models)) if baseline is None else baseline
    tallies = {name: _Tally(model, device) for name, model in models.items()}
    order = [baseline, *(name for name in tallies if name != baseline)]
    seen, unchecked = 0, check_labels
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # where clocks are read
    with current, torch.inference_mode(), tqdm(total=total, unit=" pictures", desc="evaluate") as bar:
        for images, labels in _readable(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            reference = None
            for name in order:
                logits = tallies[name].run(images)
                reference = logits if reference is None else reference
                tallies[name].add(logits, reference, labels)
            seen += len(labels)
            bar.update(len(labels))
            if unchecked and seen >= FEW_PICTURES:
                tallies[baseline].check_labels(baseline)
                unchecked = False
    if seen == 0:
        raise DataError("the evaluation data has no pictures")
    return {name: tallies[name].result(name) for name in models}


def _readable(loader: Iterable) -> Iterable:
    """Pass batches on; a worker's `DataError` loses the traceback that the DataLoader wrote into its message."""
    try:
        yield from loader
    except DataError as error:
        raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None


class _Tally:
    """Statistics of one model; they stay on the device, so that no batch waits for the one before."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self.columns: list[tuple[torch.Tensor, ...]] = []
        self.clocks: list[tuple[int, Callable[[], float]]] = []

    def run(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self.dtype)
        elapsed = _stopwatch(self.device)
        logits = self.model(images)
        self.clocks.append((len(images), elapsed()))
        return logits.float()

    def add(self, logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> None:
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
        hits = best == labels[:, None]
        noise = (logits.double() - reference.double()).square().sum(-1)
        self.columns.append((best[:, 0], hits[:, 0], hits.any(-1), reference.double().square().sum(-1), noise))
        self.classes = logits.shape[-1]

    def check_labels(self, name: str) -> None:
        top1 = torch.cat([column[1] for column in self.columns]).double().mean().item()
        floor = 0.05 + 1 / self.classes  # more than a guess
        if top1 < floor:
            raise DataError(
                f"the float model ({name}) has {100 * top1:.2f} % right after {FEW_PICTURES} pictures, less than "
                f"{100 * floor:.0f} %: the labels are in another order than the model's classes (ImageNet's are the "
                "sorted wnids), or the weights are not trained for this data"
            )

    def result(self, name: str) -> Result:
        predictions, correct, correct5, signal, noise = (torch.cat(c).cpu() for c in zip(*self.columns))
        timed = [(n, seconds()) for n, seconds in self.clocks[1:]]  # the first batch warms up
        speed = sum(n for n, _ in timed) / sum(s for _, s in timed) if timed else nan
        return Result(name, predictions, correct, correct5, signal, noise, speed)


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start timing; calling the result stops, and calling what that returns gives the seconds."""
    if device.type != "cuda":
        start = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return stop
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def stop() -> Callable[[], float]:
        end.record()
        return lambda: begin.elapsed_time(end) / 1000  # read after the last copy to the host has synchronised

    return stop
