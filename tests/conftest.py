"""Shared by all tests: poisoned buffers, and a skip where there is no GPU."""

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch):
    """Fill every torch.empty with a sentinel, so that an element nobody wrote is seen."""
    empty = torch.empty

    def poison(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poison)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
