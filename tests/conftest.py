"""Shared by all tests: Triton's interpreter and a skip where there is no GPU, and poisoned buffers."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel


@pytest.fixture
def poisoned(monkeypatch):
    """Fill every torch.empty and Tensor.new_empty with a sentinel, so that an element nobody wrote is seen."""

    def poisoning(empty):
        def poison(*args, **kwargs):
            x = empty(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else 77)

        return poison

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture(scope="session")
def load_script():
    """Imports a file of scripts/ by its name."""

    def load(name):
        path = Path(__file__).resolve().parent.parent / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def usage_error(capsys, monkeypatch):
    """What a script says of arguments that it refuses on a machine without a GPU."""

    def call(script, arguments):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as exit_:
            script.main(arguments)
        assert exit_.value.code == 2
        return capsys.readouterr().err

    return call


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
