"""I-ViT's attention in three launches: int8 product, Shiftmax, int8 product. ``i_vit.integer_attention`` defines it.

Shiftmax divides every score by one number and once a row. The first is a multiplication here; the second stays, in
unsigned integers, which a GPU without an integer divider carries out by way of a float reciprocal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qvit.baselines import i_vit

TILE = 64
ROWS = 4  # rows of scores that a program of the softmax takes


@triton.jit
def int8_product_kernel(
    a_ptr, b_ptr, requant_ptr, out_ptr,
    stride_ah, stride_am, stride_ak, stride_bh, stride_bk, stride_bn, stride_out, M, N, K,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (heads, M, N), rows ``stride_out`` apart, = int8(a (heads, M, K) @ b (heads, K, N) * multiplier >> shift)."""
    i_h = tl.program_id(0).to(tl.int64)
    i_m = tl.program_id(1)
    i_n = tl.program_id(2)
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptr += i_h * stride_ah
    b_ptr += i_h * stride_bh
    acc = tl.zeros([BLOCK, BLOCK_N], tl.int32)
    for start in tl.range(0, K, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        a_mask = (o_m < M)[:, None] & (o_k < K)[None, :]
        b_mask = (o_k < K)[:, None] & (o_n < N)[None, :]
        a = tl.load(a_ptr + o_m[:, None] * stride_am + o_k[None, :] * stride_ak, mask=a_mask, other=0)
        b = tl.load(b_ptr + o_k[:, None] * stride_bk + o_n[None, :] * stride_bn, mask=b_mask, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    mult = tl.load(requant_ptr).to(tl.int32).to(tl.int64)  # known to fit, the product is one wide multiplication
    shift = tl.load(requant_ptr + 1)
    out = (acc.to(tl.int64) * mult + (tl.full([], 1, tl.int64) << (shift - 1))) >> shift
    out = tl.minimum(tl.maximum(out, -127), 127).to(tl.int8)
    out_ptr += i_h * M * stride_out
    tl.store(out_ptr + o_m[:, None] * stride_out + o_n[None, :], out, mask=(o_m < M)[:, None] & (o_n < N)[None, :])


@triton.jit
def shiftmax_kernel(
    score_ptr, steps_ptr, stride_row, rows, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """int8 scores (rows, N) to int8 weights, in place."""
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_n = tl.arange(0, BLOCK)
    mask = (i_row < rows)[:, None] & (o_n < N)[None, :]
    steps = tl.load(steps_ptr).to(tl.int32)
    o_score = i_row.to(tl.int64)[:, None] * stride_row + o_n[None, :]
    x = tl.load(score_ptr + o_score, mask=mask, other=-128).to(tl.int32)
    x = tl.minimum(x - tl.max(x, 1)[:, None], 0)
    x = tl.maximum(x + (x >> 1) - (x >> 4), -SHIFT * steps)
    # -x / steps, exactly, for scores of int8 leave -x at 366 at most. Unsigned, for // of signed integers is not exact.
    reciprocal = ((steps + 4194303).to(tl.uint32) // steps.to(tl.uint32)).to(tl.int32)
    octaves = (-x * reciprocal) >> 22
    rest = x + octaves * steps
    weight = tl.where(mask, ((rest >> 1) + steps) << (SHIFT - octaves), 0)
    row_sum = tl.minimum(tl.sum(weight.to(tl.int64), 1), 2147483647).to(tl.uint32)
    factor = (tl.full([ROWS], 2147483647, tl.uint32) // tl.maximum(row_sum, 1)).to(tl.int32)
    tl.store(score_ptr + o_score, ((weight * factor[:, None]) >> DROP).to(tl.int8), mask=mask)


def _product(a: torch.Tensor, b: torch.Tensor, requant: torch.Tensor, pitch: int) -> torch.Tensor:
    """int8 (heads, M, pitch) of which the first N columns are a @ b requantized."""
    heads, rows, inner = a.shape
    columns = b.shape[-1]
    out = torch.empty(heads, rows, pitch, dtype=torch.int8, device=a.device)
    block_n = min(TILE, max(32, triton.next_power_of_2(columns)))
    grid = (heads, triton.cdiv(rows, TILE), triton.cdiv(columns, block_n))
    int8_product_kernel[grid](
        a, b, requant, out, *a.stride(), *b.stride(), pitch, rows, columns, inner,
        BLOCK=TILE, BLOCK_N=block_n, BLOCK_K=min(TILE, max(32, triton.next_power_of_2(inner))),
    )  # fmt: skip
    return out


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, constants: i_vit.Constants) -> torch.Tensor:
    """int8 q, k, v (B, H, N, D), contiguous, to int8 (B, H, N, D), in three launches."""
    shape, (tokens, head_dim) = q.shape, q.shape[2:]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    pitch = -(-tokens // 16) * 16  # rows of scores begin at 16 bytes
    scores = _product(q, k.mT, constants.score, pitch)
    rows = scores.numel() // pitch
    shiftmax_kernel[(triton.cdiv(rows, ROWS),)](
        scores, constants.steps, pitch, rows, tokens, ROWS=ROWS, BLOCK=triton.next_power_of_2(tokens),
        SHIFT=i_vit.SHIFT, DROP=31 - i_vit.WEIGHT_BITS,
    )  # fmt: skip
    return _product(scores[..., :tokens], v, constants.out, head_dim).view(shape)
