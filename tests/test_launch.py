"""Which kernel runs, with which configuration; no GPU needed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from qvit.errors import BackendError
from qvit.kernels import launch

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "tune_attention.py"
spec = importlib.util.spec_from_file_location("tune_attention", SCRIPT)
tune = importlib.util.module_from_spec(spec)
sys.modules["tune_attention"] = tune  # where dataclasses look
spec.loader.exec_module(tune)


class OnGpu:
    """What the choice of a kernel looks at."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, tokens, head_dim, row=1, address=0):
        self.shape = torch.Size((2, 3, tokens, head_dim))
        self._strides = (tokens * head_dim * 3, head_dim, 3 * head_dim, row)
        self._address = address

    def stride(self, dim=None):
        return self._strides if dim is None else self._strides[dim]

    def transpose(self, a, b):
        other = OnGpu(*self.shape[2:], self._strides[3], self._address)
        order = [{a: b, b: a}.get(dim, dim) for dim in range(4)]
        other.shape, other._strides = torch.Size(self.shape[i] for i in order), tuple(self._strides[i] for i in order)
        return other

    def element_size(self):
        return 2

    def data_ptr(self):
        return self._address


@pytest.mark.parametrize(
    ("tokens", "head_dim", "bias", "hopper", "row", "expected"),
    [
        pytest.param(197, 64, None, True, 1, "hopper", id="ViT_on_Hopper"),
        pytest.param(197, 64, None, False, 1, "fused", id="ViT_elsewhere"),
        pytest.param(197, 64, "bias", True, 1, "fused", id="bias"),
        pytest.param(49, 32, None, True, 1, "warps", id="small_window"),
        pytest.param(64, 16, None, True, 1, "warps", id="largest_small_window"),
        pytest.param(49, 32, "bias", True, 1, "fused", id="small_window_with_bias"),
        pytest.param(49, 32, None, False, 1, "fused", id="small_window_elsewhere"),
        pytest.param(49, 24, None, True, 1, "fused", id="small_window_of_another_width"),
        pytest.param(197, 80, None, True, 1, "fused", id="wide_head"),
        pytest.param(197, 64, None, True, 2, "fused", id="channels_apart"),
        pytest.param(320, 64, None, True, 1, "hopper", id="longest_in_one_launch"),
        pytest.param(321, 64, None, True, 1, "hopper_stream", id="long_few_heads"),
        pytest.param(1793, 48, None, True, 1, "hopper_stream", id="longer"),
        pytest.param(4096, 64, None, False, 1, "packed", id="longer_elsewhere"),
        pytest.param(4096, 80, None, True, 1, "packed", id="longer_wide_head"),
        pytest.param(577, 64, None, False, 1, "packed", id="long_elsewhere"),
        pytest.param(577, 32, None, True, 1, "packed", id="long_narrow_head"),
        pytest.param(577, 64, "bias", True, 1, "packed", id="long_with_bias"),
        pytest.param(577, 64, None, True, 2, "packed", id="long_channels_apart"),
        pytest.param(300, 64, None, True, 2**26, "packed", id="wide_offsets"),
    ],
)
def test_the_kernel_fits_the_operands(tokens, head_dim, bias, hopper, row, expected, monkeypatch):
    monkeypatch.setattr(launch, "_is_hopper", lambda index: hopper)
    monkeypatch.setattr(launch, "_processors", lambda index: 132)
    launch._kind.cache_clear()
    x = OnGpu(tokens, head_dim, row)
    bias = bias and torch.empty(1, 3, tokens, tokens, device="meta")
    assert launch.kind_of_kernel(x, x, x, bias) == expected
    if expected == "warps":
        odd = OnGpu(tokens, head_dim, row, address=8)
        assert launch.kind_of_kernel(x, odd, x, bias) == "fused"
    launch._kind.cache_clear()


@pytest.mark.parametrize(
    ("capability", "tokens", "head_dim", "expected"),
    [
        ((8, 6), 320, 128, "packed"), ((8, 9), 257, 80, "packed"), ((12, 0), 257, 65, "packed"),
        ((8, 6), 256, 128, "fused"), ((8, 6), 320, 64, "fused"), ((8, 0), 320, 128, "fused"),
    ],
)  # fmt: skip
def test_one_launch_fits_the_shared_memory(capability, tokens, head_dim, expected, monkeypatch):
    monkeypatch.setattr(launch, "_capability", lambda index: capability)
    monkeypatch.setattr(launch, "_is_hopper", lambda index: False)
    launch._kind.cache_clear()
    x = OnGpu(tokens, head_dim, 1)
    assert launch.kind_of_kernel(x, x, x, None) == expected
    launch._kind.cache_clear()


@pytest.mark.parametrize(("length", "expected"), [(2**20, True), (2**21, False)])
def test_an_image_whose_result_needs_wide_offsets_is_not_for_warps(length, expected, monkeypatch):
    """Rows side by side in each head: the strides are small, the result's are not."""
    monkeypatch.setattr(launch, "_is_hopper", lambda index: True)
    x = OnGpu(0, 0)
    x.shape, x._strides = torch.Size((1, length, 32, 32)), (length * 32 * 32, 32, length * 32, 1)
    assert launch._fits_warps(x, x, x, None) == expected


@pytest.mark.parametrize(
    ("heads", "blocks", "places", "expected"),
    [(6, 4, 396, 4), (198, 4, 396, 2), (132, 4, 396, 2), (384, 4, 396, 1), (1000, 4, 396, 1), (130, 5, 396, 3)],
)
def test_programs_share_a_head_only_to_fill_the_gpu(heads, blocks, places, expected):
    assert launch.programs_per_head(heads, blocks, places) == expected


@pytest.mark.parametrize(
    ("heads", "tokens", "standard", "high"),
    [
        (6, 577, True, True),  # fewer blocks of queries than multiprocessors
        (48, 577, False, True),
        (384, 577, False, False),
        (48, 1025, True, True),  # one program holds K and V, and no other beside it
        (384, 1025, False, True),
        (384, 1664, False, True),
        (384, 1665, True, True),  # K and V do not fit
        (1, 4096, True, True),
    ],
)
def test_long_sequences_stream_where_that_was_faster(heads, tokens, standard, high):
    assert launch._streams(heads, tokens, False, 132) == standard
    assert launch._streams(heads, tokens, True, 132) == high


def test_streaming_programs_are_small_where_there_are_few_or_registers_are_short():
    found = [launch.stream_warps(heads, 4096, high, 132) for high in (False, True) for heads in (6, 48)]
    assert found == [4, 8, 4, 4]


@pytest.mark.parametrize(
    ("programs", "tokens", "step"), [(192, 49, 4), (192, 32, 2), (192, 9, 1), (768, 49, 2), (1536, 49, 1)]
)
def test_warps_share_a_window_only_to_fill_the_gpu(programs, tokens, step):
    assert launch.warp_step(programs, tokens, 132) == step


def test_the_table_is_well_formed_and_looked_up_by_range(monkeypatch):
    for row in json.loads(launch.TABLE.read_text())["rows"]:
        assert row["kind"] in launch.KERNELS and set(row) == {
            "kind", "capability", "head_dim", "tokens", "heads", "config",
        }  # fmt: skip
        assert row["tokens"][0] <= row["tokens"][1]
    common = {"kind": "hopper", "capability": [9, 0], "head_dim": 64, "tokens": [65, 224]}
    rows = [common | {"heads": 40, "config": {"step": 4}}, common | {"heads": 80, "config": {"step": 2}}]
    monkeypatch.setattr(launch, "_table", lambda: rows)
    look = launch.configuration.__wrapped__
    assert look("hopper", (9, 0), 64, 197, 40) == {"step": 4}
    assert look("hopper", (9, 0), 64, 197, 41) == {"step": 2}
    for other in (("hopper", (9, 0), 64, 197, 81), ("hopper", (9, 0), 64, 225, 8), ("hopper", (9, 0), 32, 197, 8)):
        assert look(*other) == {}
    assert look("packed", (9, 0), 64, 197, 8) == look("hopper", (10, 0), 64, 197, 8) == {}


def test_tuning_joins_neighbours_that_agree():
    shape = tune.SHAPES[0]
    found = {
        6: [({"step": 4}, 4.0), ({"step": 1}, 8.0)],
        24: [({"step": 4}, 5.0), ({"step": 1}, 8.0)],
        96: [({"step": 2}, 5.0), ({"step": 1}, 8.0)],
    }
    rows = tune.make_rows(shape, (9, 0), found)
    assert [(row["heads"], row["config"]["step"]) for row in rows] == [(48, 4), (2**31, 2)]
    assert rows[0]["kind"] == "hopper" and rows[0]["tokens"] == [65, 224]


def test_the_first_candidate_is_what_runs_without_a_table():
    for shape in tune.SHAPES:
        for heads in tune.HEADS:
            configs = list(tune.candidates(shape, heads, 132))
            assert len({json.dumps(c) for c in configs}) == len(configs)
            rule = launch.programs_per_head(heads, -(-shape.tokens // 64), 3 * 132)
            first = {"hopper": {"step": rule}, "packed": {"block_m": 64, "num_warps": 4, "num_stages": 3}}
            assert configs[0] == first[shape.kind]


def test_tuning_keeps_the_rows_of_other_kernels_and_gpus():
    row = lambda kind, major, heads: {"kind": kind, "capability": [major, 0], "head_dim": 64, "heads": heads}  # noqa: E731
    old = [row("hopper", 9, 1), row("packed", 9, 2), row("packed", 8, 3)]
    assert tune.merge_rows(old, [row("packed", 9, 4)]) == [old[0], old[2], row("packed", 9, 4)]


def test_a_bias_for_more_windows_than_a_grid_holds_is_refused():
    with pytest.raises(BackendError, match="most is 65535"):
        launch._chunk(70_000, torch.empty(70_000, 1, 1, 1, device="meta"))


def test_tuning_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
