"""The evaluation loop against counts by hand, and the paired drop test."""

from __future__ import annotations

from math import inf, isnan, log10, sqrt

import pytest
import torch
from torch import nn

from qvit.errors import DataError
from qvit.evaluation.accuracy import compare, drop_test, evaluate


class Fixed(nn.Module):
    """Answers with prepared logits, picture by picture; the picture holds its number."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits, requires_grad=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def loader(labels: torch.Tensor, batch: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1, 1)
    return list(zip(images.split(batch), labels.split(batch)))


def logits_for(classes: torch.Tensor, count: int = 10) -> torch.Tensor:
    return torch.nn.functional.one_hot(classes, count).float() * 4 - 1


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(10, (50,), generator=generator)
    base = torch.randn(50, 10, generator=generator) + 2 * logits_for(labels) / 3
    return labels, base, base + 0.8 * torch.randn(50, 10, generator=generator)


def test_counts_by_hand(pair) -> None:
    labels, base, other = pair
    results = evaluate({"float": Fixed(base), "other": Fixed(other)}, loader(labels), "cpu")
    found = compare(results["other"], results["float"])
    right, right2 = base.argmax(1) == labels, other.argmax(1) == labels
    assert results["float"].top1 == pytest.approx(100 * right.float().mean().item())
    ranks = (other > other.gather(1, labels[:, None])).sum(1)
    assert results["other"].top5 == pytest.approx(100 * (ranks < 5).float().mean().item())
    assert found.lost == (right & ~right2).sum() > 0
    assert found.won == (~right & right2).sum()
    assert found.drop == pytest.approx(results["float"].top1 - results["other"].top1)
    assert found.agreement == pytest.approx(100 * (base.argmax(1) == other.argmax(1)).float().mean().item())
    low, high = found.agreement_interval
    assert low < found.agreement < high
    wanted = 10 * log10(base.double().square().sum() / (other.double() - base.double()).square().sum())
    assert found.sqnr_db == pytest.approx(wanted, abs=1e-6)


def test_batches_do_not_matter(pair) -> None:
    labels, base, other = pair
    models = {"float": Fixed(base), "other": Fixed(other)}
    one, many = (evaluate(models, loader(labels, batch), "cpu")["other"] for batch in (50, 3))
    assert torch.equal(one.predictions, many.predictions)
    assert torch.equal(one.noise, many.noise)
    assert isnan(one.images_per_second) and many.images_per_second > 0


def test_the_baseline_can_be_any_model(pair) -> None:
    labels, base, other = pair
    models = {"first": Fixed(other), "float": Fixed(base)}
    results = evaluate(models, loader(labels), "cpu", baseline="float")
    assert list(results) == ["first", "float"]
    assert results["float"].sqnr_db == inf
    assert results["first"].sqnr_db < 30


def test_each_model_gets_the_pictures_in_its_own_dtype(pair) -> None:
    labels, base, _ = pair
    results = evaluate({"fp32": Fixed(base), "fp16": Fixed(base).half()}, loader(labels), "cpu")
    assert 50 < results["fp16"].sqnr_db < 90


def test_nan_logits_have_no_sqnr(pair) -> None:
    labels, base, _ = pair
    results = evaluate({"float": Fixed(base), "broken": Fixed(base * float("nan"))}, loader(labels), "cpu")
    assert isnan(results["broken"].sqnr_db)


def test_fewer_than_five_classes() -> None:
    labels = torch.tensor([0, 1, 2, 1])
    result = evaluate({"float": Fixed(logits_for(labels, 3))}, loader(labels), "cpu")["float"]
    assert (result.top1, result.top5) == (100, 100)


def test_no_pictures() -> None:
    with pytest.raises(DataError, match="no pictures"):
        evaluate({"float": Fixed(torch.zeros(1, 10))}, [], "cpu")


def test_permuted_labels_stop_after_a_thousand_pictures() -> None:
    classes, seen = torch.arange(3000) % 1000, []
    labels = (classes + 1) % 1000

    def counting():
        for batch in loader(labels, 100):
            seen.append(len(batch[1]))
            yield batch

    with pytest.raises(DataError, match=r"0\.00 % right after 1000 pictures.*sorted wnids"):
        evaluate({"float": Fixed(logits_for(classes, 1000))}, counting(), "cpu")
    assert sum(seen) == 1000
    evaluate({"float": Fixed(logits_for(classes, 1000))}, loader(labels, 100), "cpu", check_labels=False)


def test_a_poor_but_trained_model_passes_the_label_check() -> None:
    classes = torch.arange(1200) % 200
    labels = torch.where(torch.arange(1200) % 10 == 0, classes, (classes + 1) % 200)  # 10 % right
    assert evaluate({"float": Fixed(logits_for(classes, 200))}, loader(labels, 100), "cpu")["float"].top1 == 10


@pytest.mark.parametrize("count", [2, 3, 10])
def test_few_classes_are_told_from_a_guess(count: int) -> None:
    classes = torch.arange(1200) % count
    evaluate({"float": Fixed(logits_for(classes, count))}, loader(classes, 100), "cpu")
    guessed = (torch.arange(1200) // count) % count  # right by chance
    with pytest.raises(DataError, match="another order"):
        evaluate({"float": Fixed(logits_for(classes, count))}, loader(guessed, 100), "cpu")


@pytest.mark.parametrize(
    "lost, won, count, max_drop, passed",
    [
        (0, 0, 100, 0.0, True),
        (9, 13, 5000, 0.1, True),
        (60, 10, 10_000, 0.1, False),  # 50 against 10 + 13.8
        (30, 10, 10_000, 0.1, True),  # 20 against 10 + 10.4
        (3, 0, 1000, 0.0, False),  # 3 against 2.86
        (2, 0, 1000, 0.0, True),
        (0, 500, 1000, 0.0, True),
    ],
)
def test_drop_test(lost: int, won: int, count: int, max_drop: float, passed: bool) -> None:
    verdict = drop_test(lost, won, count, max_drop)
    assert verdict.bound == max_drop / 100 * count + 1.65 * sqrt(lost + won)
    assert verdict.passed is passed
