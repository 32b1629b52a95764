"""Launch a kernel again without asking Triton again.

Triton binds, specialises and hashes every argument of every launch, some thirty of them, which takes the host longer
than many a kernel takes the GPU. All that comes of it follows from what is known of the operands without their data. So
a launch is kept by that, and repeated with new pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

LIMIT = 1024  # launches that are kept


class Launch(NamedTuple):
    """A launch as Triton made it: the kernel and what it was compiled to, its grid, its pointers and the rest.

    One that is kept has, for each pointer, the operand that it comes from and how many bytes lie between.
    """

    function: Any
    kernel: CompiledKernel
    grid: tuple[int, int, int]
    pointers: tuple
    rest: tuple


_kept: dict[tuple, Launch] = {}


def launch(function: Any, grid: tuple[int, int, int], pointers: tuple, scalars: tuple, **options: Any) -> Launch | None:
    """Launch a kernel the ordinary way, on the current stream.

    Args:
        function: The jitted function; takes pointers, then scalars, then constexprs.
        grid: Programs in each dimension.
        pointers: Tensors.
        scalars: Integers.
        options: constexprs and launch options by name.

    Returns:
        What :func:`call` keeps; None where nothing was compiled, as under Triton's interpreter.
    """
    kernel = function[grid](*pointers, *scalars, **options)
    if not isinstance(kernel, CompiledKernel):
        return None
    constexprs = function.arg_names[len(pointers) + len(scalars) :]
    return Launch(function, kernel, grid, pointers, (*scalars, *[options[name] for name in constexprs]))


def call(function: Callable, operands: tuple, layout: tuple, **settings: Any) -> None:
    """``function(*operands, **settings)`` on the operands' device; from the second time on, its launch alone.

    Args:
        function: Makes one launch, of the operands or views of them, and returns it; or makes several, and returns
            None, which is never kept.
        operands: Tensors, or None. The first says the device.
        layout: All that the function reads of their shapes and strides. Types, devices and the pointers' alignment need
            not be named: they are always told apart.
        settings: Everything else that the function takes.
    """
    device = operands[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            call(function, operands, layout, **settings)
        return
    if _watched():
        function(*operands, **settings)
        return
    key, pointers = _key(function, operands, layout, settings)
    kept = _kept.get(key)
    if kept is None or kept.function.pre_run_hooks:
        _keep(key, operands, function(*operands, **settings))
        return
    _, kernel, grid, places, rest = kept
    stream = driver.active.get_current_stream(device)
    # As CompiledKernel's own launcher, without its hooks and what they are told: nobody listens, and it takes longer
    # than all else here.
    kernel.run(
        *grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
        *[pointers[i] + offset for i, offset in places], *rest,
    )  # fmt: skip


def _key(function: Callable, operands: tuple, layout: tuple, settings: dict) -> tuple[tuple, list[int]]:
    """What a call's launch goes by, and the operands' pointers: a loop, for comprehensions take longer."""
    key = [function, layout, *settings.items()]
    pointers = []
    for x in operands:
        if x is None:
            pointers.append(0)
            key.append(None)
        else:
            pointer = x.data_ptr()
            pointers.append(pointer)
            # Triton compiles apart what 16 divides, and a view may lie anywhere from an operand's start.
            key += x.dtype, x.get_device(), pointer % 16
    return tuple(key), pointers


def _watched() -> bool:
    """Whether launches must take Triton's own way: somebody sees them or instruments kernels, as profilers do."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)  # up to Triton 3.4 one function or None, then a chain of functions
        or getattr(leave, "calls", leave)
        or runtime.debug
        or getattr(knobs.compilation, "instrumentation_mode", None)  # since Triton 3.6, as the next
        or getattr(runtime, "add_stages_inspection_hook", None)
    )


def _keep(key: tuple, operands: tuple, launched: Launch | None) -> None:
    """Keep a launch whose pointers all come from operands; of one device, for nobody looks at them again."""
    if launched is None:
        return
    places = [_place(x, operands) for x in launched.pointers]
    if None in places or len({x.get_device() for x in operands if x is not None}) > 1:
        return
    if len(_kept) >= LIMIT:  # so many sizes do not come again soon
        _kept.clear()
    _kept[key] = launched._replace(pointers=tuple(places))


def _place(pointer: torch.Tensor, operands: tuple) -> tuple[int, int] | None:
    """Which operand a launch's tensor is, or is a view of, and bytes from its start; None where that is not certain."""
    same = [i for i, x in enumerate(operands) if x is pointer]
    if not same:
        start = pointer.untyped_storage().data_ptr()
        same = [i for i, x in enumerate(operands) if x is not None and x.untyped_storage().data_ptr() == start]
    if len(same) != 1:
        return None
    return same[0], pointer.data_ptr() - operands[same[0]].data_ptr()
