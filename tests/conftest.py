"""Shared by all tests: Triton's interpreter and a skip where there is no GPU, and poisoned buffers."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel


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
