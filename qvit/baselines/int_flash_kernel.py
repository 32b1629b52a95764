"""INT-FlashAttention in one launch. ``int_flash.quantized_attention`` defines it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qvit.baselines.base import KEY_TILE

QUERY_TILE = 64


@triton.jit
def int_flash_kernel(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, pv_scale_ptr, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, N, H,
    D: tl.constexpr, DP: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q, k int8, v int8 (FULL) or float16 (B, H, N, D); scales (B, H, N) float32 -> out (B, H, N, D) float16."""
    i_bh = tl.program_id(0)
    batch = (i_bh // H).to(tl.int64)
    head = (i_bh % H).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, DP)
    in_m = o_m < N
    in_d = (o_d < D)[None, :]
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    row = i_bh.to(tl.int64) * N
    q = tl.load(q_ptr + o_m[:, None] * stride_qn + o_d[None, :] * stride_qd, mask=in_m[:, None] & in_d, other=0)
    q_scale = tl.load(q_scale_ptr + row + o_m, mask=in_m, other=0.0)
    pv_scale = tl.load(pv_scale_ptr)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    for start in tl.range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        in_n = o_n < N
        mask = in_n[:, None] & in_d
        k = tl.load(k_ptr + o_n[:, None] * stride_kn + o_d[None, :] * stride_kd, mask=mask, other=0)
        k_scale = tl.load(k_scale_ptr + row + o_n, mask=in_n, other=0.0)
        score = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * q_scale[:, None] * k_scale[None, :]
        score = tl.where(in_n[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        release = tl.exp2(top - new_top)
        row_sum = row_sum * release + tl.sum(weight, 1)
        v = tl.load(v_ptr + o_n[:, None] * stride_vn + o_d[None, :] * stride_vd, mask=mask, other=0)
        if FULL:
            levels = (weight.to(tl.float16) * 127.0 + 0.5).to(tl.int8)
            part = tl.dot(levels, v, out_dtype=tl.int32).to(tl.float32) * pv_scale
        else:
            part = tl.dot(weight.to(tl.float16), v, out_dtype=tl.float32)
        acc = acc * release[:, None] + part
        top = new_top
    out = (acc / row_sum[:, None]).to(tl.float16)
    o_out = (row + o_m)[:, None] * D + o_d[None, :]
    tl.store(out_ptr + o_out, out, mask=in_m[:, None] & in_d)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    pv_scale: torch.Tensor,
) -> torch.Tensor:
    """Operands of :func:`qvit.baselines.int_flash.quantize` to float16 (B, H, N, D)."""
    batch, heads, tokens, head_dim = q.shape
    out = torch.empty(q.shape, dtype=torch.float16, device=q.device)
    int_flash_kernel[(batch * heads, triton.cdiv(tokens, QUERY_TILE))](
        q, k, v, q_scale, k_scale, pv_scale, out, *q.stride(), *k.stride(), *v.stride(), tokens, heads,
        D=head_dim, DP=max(32, triton.next_power_of_2(head_dim)), FULL=v.dtype == torch.int8,
        BLOCK_M=QUERY_TILE, BLOCK_N=KEY_TILE, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
