"""What the hardware counts beside time: energy, by NVML, and the tensor cores' work, by Nsight Compute in a process."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qvit.errors import BackendError

# Cycles that the tensor cores worked for a kind of operand, in % of all, whatever instruction asked for it: mma.sync or
# wgmma. Of several names the first counts that a GPU has: the second takes packed float16 arithmetic in as well.
_ACTIVE = "_cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR_METRICS = {
    "IMMA %": (f"sm__pipe_tensor_op_imma{_ACTIVE}",),
    "HMMA %": (f"sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma{_ACTIVE}", f"sm__pipe_tensor_op_hmma{_ACTIVE}"),
}
_DURATION, _KERNEL = "gpu__time_duration.sum", "Kernel Name"
_MARK = "spin_kernel"  # of torch.cuda._sleep


# ---------------------------------------------------------------- energy


class EnergyCounter:
    """The total energy that NVML counts for a GPU.

    Raises:
        BackendError: No NVML, or a GPU that counts no energy.
    """

    def __init__(self, device: str = "cuda") -> None:
        try:
            import pynvml
        except ImportError as error:
            raise BackendError("energy needs the package nvidia-ml-py: pip install 'qvit[bench]'") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self.read()
        except pynvml.NVMLError as error:
            raise BackendError(f"NVML counts no energy here: {error}") from error

    def read(self) -> float:
        """Joules since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000


@dataclass(frozen=True)
class Energy:
    """Microjoules a call, as counted, and less what the GPU takes in the same time when it does nothing."""

    total: float
    above_idle: float


def idle_watts(counter: EnergyCounter, seconds: float) -> float:
    """What the GPU takes when it does nothing."""
    torch.cuda.synchronize()
    time.sleep(0.2)
    return _watts(counter, lambda: time.sleep(seconds))[0]


def measure_energy(
    counter: EnergyCounter, action: Callable[[], object], calls: int, seconds: float, idle: float
) -> Energy:
    """Energy of an action's calls, over a loop that is long beside the counter's steps of some tens of milliseconds.

    Args:
        counter: The counter.
        action: Makes ``calls`` calls, without waiting for them.
        calls: See there.
        seconds: How long the loop runs, about.
        idle: Watts without work.
    """
    action()
    torch.cuda.synchronize()
    done = 0

    def loop() -> None:
        nonlocal done
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(20):
                action()
            torch.cuda.synchronize()
            done += 20 * calls

    watts, elapsed = _watts(counter, loop)
    return Energy(*(1e6 * power * elapsed / done for power in (watts, watts - idle)))


def _watts(counter: EnergyCounter, action: Callable[[], object]) -> tuple[float, float]:
    """Mean power during an action, and its seconds."""
    start, before = time.perf_counter(), counter.read()
    action()
    joules = counter.read() - before
    elapsed = time.perf_counter() - start
    return joules / elapsed, elapsed


# ---------------------------------------------------------------- tensor cores


def run_profiled(actions: Sequence[Callable[[], object] | None]) -> None:
    """What the command of :func:`profile` does: each action once, behind a mark. None stands for one that cannot run.

    Warm the actions up before, for all kernels that they launch here are counted.
    """
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for action in actions:
        torch.cuda._sleep(1)
        if action is not None:
            action()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile(command: Sequence[str], actions: int, timeout: float = 300) -> list[dict[str, float]]:
    """The tensor cores' use in each action that a command gives to :func:`run_profiled`.

    One process for all actions, for its start takes longer than what is counted.

    Args:
        command: Starts the process.
        actions: How many there are.
        timeout: Seconds.

    Returns:
        `TENSOR_METRICS` of each action, none of one that launched no kernel.

    Raises:
        BackendError: No ncu here, or it could not read the counters, or not of all actions.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise BackendError("no ncu")
    metrics = ",".join([*(name for names in TENSOR_METRICS.values() for name in names), _DURATION])
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--metrics", metrics]
    options += ["--profile-from-start", "off"]
    try:
        run = subprocess.run([ncu, *options, *command], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"ncu took more than {timeout:g} s") from error
    counted = read_profile(run.stdout)
    if run.returncode or len(counted) != actions:
        end = run.stderr.strip()[-200:]
        raise BackendError(f"ncu saw {len(counted)} of {actions} calls, exit status {run.returncode}: {end}")
    return counted


def read_profile(text: str) -> list[dict[str, float]]:
    """`TENSOR_METRICS` of each action on ncu's raw page, kernels by their durations: the peak's share of all the time.

    Raises:
        BackendError: There is no kernel in it, or a metric is missing.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    kernels = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row["ID"]]  # the first row has units
    if not kernels:
        raise BackendError(f"ncu: {errors[0].removeprefix('==ERROR==').strip() if errors else 'no kernel'}")
    parts: list[list[dict[str, str]]] = []
    for kernel in kernels:
        if _MARK in kernel[_KERNEL]:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    try:
        return [_weigh(part) for part in parts]
    except (KeyError, ValueError) as error:
        raise BackendError(f"ncu: {error!r}") from error


def _weigh(kernels: Sequence[dict[str, str]]) -> dict[str, float]:
    """`TENSOR_METRICS` of some kernels together; {} of none."""
    times = [_number(row[_DURATION]) for row in kernels]
    if not kernels:
        return {}
    return {
        name: sum(time * _known(row, metrics) for time, row in zip(times, kernels)) / sum(times)
        for name, metrics in TENSOR_METRICS.items()
    }


def _known(row: dict[str, str], metrics: Sequence[str]) -> float:
    """The first of several metrics that a row has as a number.

    Raises:
        KeyError: It has none; the message has those that there are.
    """
    for metric in metrics:
        if row.get(metric, "n/a") != "n/a":
            return _number(row[metric])
    raise KeyError(f"none of {metrics} among {[name for name in row if 'tensor' in name]}")


def _number(text: str) -> float:
    return float(text.replace(",", ""))
