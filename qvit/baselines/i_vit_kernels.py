"""I-ViT's attention in three launches: int8 product, Shiftmax, int8 product. ``i_vit.integer_attention`` defines it."""

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
    stride_ab, stride_ah, stride_am, stride_ak, stride_bb, stride_bh, stride_bk, stride_bn, stride_out,
    M, N, K, H,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (B, H, M, N, rows ``stride_out`` apart) = int8(a (B, H, M, K) @ b (B, H, K, N) * multiplier >> shift)."""
    i_bh = tl.program_id(0)
    i_m = tl.program_id(1)
    i_n = tl.program_id(2)
    batch = (i_bh // H).to(tl.int64)
    head = (i_bh % H).to(tl.int64)
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptr += batch * stride_ab + head * stride_ah
    b_ptr += batch * stride_bb + head * stride_bh
    acc = tl.zeros([BLOCK, BLOCK_N], tl.int32)
    for start in tl.range(0, K, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        a_mask = (o_m < M)[:, None] & (o_k < K)[None, :]
        b_mask = (o_k < K)[:, None] & (o_n < N)[None, :]
        a = tl.load(a_ptr + o_m[:, None] * stride_am + o_k[None, :] * stride_ak, mask=a_mask, other=0)
        b = tl.load(b_ptr + o_k[:, None] * stride_bk + o_n[None, :] * stride_bn, mask=b_mask, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    mult = tl.load(requant_ptr)
    shift = tl.load(requant_ptr + 1)
    out = (acc.to(tl.int64) * mult + (tl.full([], 1, tl.int64) << (shift - 1))) >> shift
    out = tl.minimum(tl.maximum(out, -127), 127).to(tl.int8)
    out_ptr += i_bh.to(tl.int64) * M * stride_out
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
    # Unsigned: Triton's // of signed integers goes through float.
    octaves = ((-x).to(tl.uint32) // steps.to(tl.uint32)).to(tl.int32)
    rest = x + octaves * steps
    weight = tl.where(mask, ((rest >> 1) + steps) << (SHIFT - octaves), 0)
    row_sum = tl.minimum(tl.sum(weight.to(tl.int64), 1), 2147483647).to(tl.uint32)
    factor = (tl.full([ROWS], 2147483647, tl.uint32) // tl.maximum(row_sum, 1)).to(tl.int32)
    tl.store(score_ptr + o_score, ((weight * factor[:, None]) >> DROP).to(tl.int8), mask=mask)


def _product(a: torch.Tensor, b: torch.Tensor, requant: torch.Tensor, pitch: int) -> torch.Tensor:
    """int8 (B, H, M, pitch) of which the first N columns are a @ b requantized."""
    batch, heads, rows, inner = a.shape
    columns = b.shape[-1]
    out = torch.empty(batch, heads, rows, pitch, dtype=torch.int8, device=a.device)
    block_n = min(TILE, max(32, triton.next_power_of_2(columns)))
    grid = (batch * heads, triton.cdiv(rows, TILE), triton.cdiv(columns, block_n))
    int8_product_kernel[grid](
        a, b, requant, out, *a.stride(), *b.stride(), pitch, rows, columns, inner, heads,
        BLOCK=TILE, BLOCK_N=block_n, BLOCK_K=min(TILE, max(32, triton.next_power_of_2(inner))),
    )  # fmt: skip
    return out


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, constants: i_vit.Constants) -> torch.Tensor:
    """int8 q, k, v (B, H, N, D) to int8 (B, H, N, D), in three launches."""
    tokens, head_dim = q.shape[2:]
    pitch = -(-tokens // 16) * 16  # rows of scores begin at 16 bytes
    scores = _product(q, k.mT, constants.score, pitch)
    rows = scores.numel() // pitch
    shiftmax_kernel[(triton.cdiv(rows, ROWS),)](
        scores, constants.steps, pitch, rows, tokens, ROWS=ROWS, BLOCK=triton.next_power_of_2(tokens),
        SHIFT=i_vit.SHIFT, DROP=31 - i_vit.WEIGHT_BITS,
    )  # fmt: skip
    return _product(scores[..., :tokens], v, constants.out, head_dim)
