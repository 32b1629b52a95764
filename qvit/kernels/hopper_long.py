"""Integer attention for Hopper (sm_90) where a row's scores do not fit in registers: they are made twice.

A program quantizes its head's K and V once, keeps both in shared memory, and takes its blocks of queries one by one: a
first pass over the keys finds each row's exact maximum, a second makes the weights and sums them against V. Queries are
loaded into the operand's registers, so that no warp waits for another once K and V are there. The arithmetic and the
orders of keys and channels are those of hopper.py.

The assembler runs one product after the other, three times as slowly, where a product's result crosses the end of a
loop before it is waited for, or where registers are short: hence the shape of the loops.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from qvit.kernels import hopper

TILE = gl.constexpr(128)  # keys of a tile in shared memory
CHANNELS = gl.constexpr(64)  # of a head, padded


# ---------------------------------------------------------------- layouts and turns


@gluon.constexpr_function
def _tail(tokens, width):
    """Start and width of each turn in the last, partial tile; only the very last is partly filled."""
    rest, turns, start = -(-(tokens % 128) // 32) * 32, (), 0
    while start < rest:
        size = min(width, rest - start)
        turns, start = (*turns, (start, size)), start + size
    return turns


@gluon.constexpr_function
def _query(rows):
    """Queries as they are loaded, in the threads that need them for the first product."""
    own = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lanes, hopper._bits(rows, 0)[4:], [], [rows, 64])


@gluon.constexpr_function
def _maxima(rows):
    """Of hopper._partial_max."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [8, 0]], lanes, hopper._bits(rows, 0)[4:], [], [rows, 8])


# ---------------------------------------------------------------- K and V


@gluon.jit
def _keep(
    k_ptr, v_ptr, stride_kn, stride_vn, c_ptr, ks, words, tiles, N: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr
):
    """K and V^T of a head, from memory to int8 in shared memory."""
    IN: gl.constexpr = k_ptr.dtype.element_ty
    ROWS: gl.constexpr = hopper._rows(CHANNELS, 16 if IN == gl.int8 else 8, gl.num_warps())
    QUADS: gl.constexpr = hopper._quads(TILE, CHANNELS, gl.num_warps())
    WORDS: gl.constexpr = hopper._quads(TILE, CHANNELS, gl.num_warps(), True)
    k_factors = hopper._factors(c_ptr, 1, 2, D, CHANNELS, IN, HALF, ROWS)
    v_factors = hopper._factors(c_ptr, 3, -1, D, CHANNELS, IN, HALF, WORDS)
    for i in range(tiles):
        k = hopper._load(k_ptr, stride_kn, i * TILE, N, TILE, D, CHANNELS, ROWS)
        v = hopper._load(v_ptr, stride_vn, i * TILE, N, TILE, D, CHANNELS, QUADS)
        ks.index(i).store(hopper._keys(k, k_factors))
        words.index(i).store(hopper._values(v, v_factors))


@gluon.jit
def _sum_values(vts, ones, tiles):
    """V's sum over the keys, int32 [64] in shared memory, in the order of V^T's rows."""
    GROUPS: gl.constexpr = gl.num_warps() // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, 8, 32])
    sums = warpgroup_mma_init(gl.zeros([CHANNELS, 8 * GROUPS], gl.int32, layout=layout))
    for i in range(tiles):
        sums = warpgroup_mma(vts.index(i), ones.permute((1, 0)), sums, is_async=True)
    sums = gl.max(warpgroup_mma_wait(0, deps=(sums,)), 1)  # the same in every column
    return gl.allocate_shared_memory(gl.int32, [CHANNELS], gl.SwizzledSharedLayout(1, 1, 1, [0]), sums)


# ---------------------------------------------------------------- attention


@gluon.jit
def _scores(q, ks, tile, start: gl.constexpr, WIDTH: gl.constexpr):
    """Starts the scores of WIDTH keys of a tile."""
    q = gl.convert_layout(q, hopper._operand(q.shape[0], WIDTH), assert_trivial=True)
    return hopper._start_scores(q, ks.index(tile).slice(start, WIDTH, 0))


@gluon.jit
def _mask_tail(s, masked, start: gl.constexpr, N: gl.constexpr):
    """Masks what lies past the last key."""
    FIRST: gl.constexpr = N // TILE * TILE + start
    return hopper._mask(s, masked, N, FIRST) if FIRST + s.shape[1] > N else s


@gluon.jit
def _better(best, s):
    part = hopper._partial_max(s)
    return gl.maximum(best, gl.convert_layout(part, best.type.layout, assert_trivial=True))


@gluon.jit
def _top(q, ks, masked, full, N: gl.constexpr, WIDTH: gl.constexpr):
    """Each row's largest score, [rows]."""
    TAIL: gl.constexpr = _tail(N, WIDTH)
    TURNS: gl.constexpr = TILE // WIDTH
    best = gl.full([q.shape[0], 8], -(2**31), gl.int32, layout=_maxima(q.shape[0]))
    scores = ()
    for i in gl.static_range(len(TAIL)):
        scores = scores + (_scores(q, ks, N // TILE, TAIL[i][0], TAIL[i][1]),)
    for i in gl.static_range(len(TAIL)):
        s = warpgroup_mma_wait(len(TAIL) - 1 - i, deps=(scores[i],))
        best = _better(best, _mask_tail(s, masked, TAIL[i][0], N))
    for tile in range(full):
        turns = ()
        for i in gl.static_range(TURNS):
            turns = turns + (_scores(q, ks, tile, i * WIDTH, WIDTH),)
        for i in gl.static_range(TURNS):
            best = _better(best, warpgroup_mma_wait(TURNS - 1 - i, deps=(turns[i],)))
    return gl.max(best, 1)


@gluon.jit
def _weights(s, base, units, HIGH: gl.constexpr):
    """Weights of a turn's scores, as operands of the products with V."""
    mult, exp_bits, _ = units
    s = gl.convert_layout(hopper._operand_order(s), hopper._operand(s.shape[0], CHANNELS))
    return hopper._weights(s, base, 0 - mult, exp_bits, HIGH)


@gluon.jit
def _add(sums, p, p_low, vt, ones, HIGH: gl.constexpr):
    """Starts the products of a turn's weights with V, and their row sums: four products in high precision, else two."""
    acc, rows, low, low_rows = sums
    acc = warpgroup_mma(p, vt.permute((1, 0)), acc, is_async=True)
    rows = hopper._sum_rows(p, rows, ones)
    if HIGH:
        low = warpgroup_mma(p_low, vt.permute((1, 0)), low, is_async=True)
        low_rows = hopper._sum_rows(p_low, low_rows, ones)
    return acc, rows, low, low_rows


@gluon.jit
def _attend(q, ks, vts, ones, units, full, N: gl.constexpr, WIDTH: gl.constexpr, HIGH: gl.constexpr):
    """A block of queries, int8 [rows, 64] in registers -> products with V and sums of its weights' complements."""
    M: gl.constexpr = q.shape[0]
    TILES: gl.constexpr = (N + TILE - 1) // TILE
    TAIL: gl.constexpr = _tail(N, WIDTH)
    PENDING: gl.constexpr = 4 if HIGH else 2  # what _add starts
    masked = units[2]
    top = _top(q, ks, masked, full, N, WIDTH)
    top = gl.convert_layout(top, gl.SliceLayout(1, hopper._operand(M, CHANNELS)), assert_trivial=True)
    base = hopper._distance_base(top, units)
    acc = warpgroup_mma_init(gl.zeros([M, CHANNELS], gl.int32, layout=hopper._mma(M, CHANNELS)))
    rows = warpgroup_mma_init(gl.zeros([M, 8], gl.int32, layout=hopper._mma(M, 8)))
    sums = (acc, rows, acc, rows)
    s = warpgroup_mma_wait(0, deps=(_scores(q, ks, 0, 0, WIDTH),))
    for tile in range(full):
        for i in gl.static_range(TILE // WIDTH):
            p, p_low = _weights(s, base, units, HIGH)
            if (i + 1) * WIDTH < TILE:
                s = _scores(q, ks, tile, (i + 1) * WIDTH, WIDTH)
            else:  # the next tile's first turn, be the tile partial
                s = _scores(q, ks, gl.minimum(tile + 1, TILES - 1), 0, WIDTH)
            sums = _add(sums, p, p_low, vts.index(tile).slice(i * WIDTH, WIDTH, 1), ones, HIGH)
            s = warpgroup_mma_wait(PENDING, deps=(s,))
    for i in gl.static_range(len(TAIL)):
        if i > 0 or TAIL[0][1] < WIDTH:
            t = warpgroup_mma_wait(0, deps=(_scores(q, ks, N // TILE, TAIL[i][0], TAIL[i][1]),))
        else:
            t = s
        p, p_low = _weights(_mask_tail(t, masked, TAIL[i][0], N), base, units, HIGH)
        sums = _add(sums, p, p_low, vts.index(N // TILE).slice(TAIL[i][0], TAIL[i][1], 1), ones, HIGH)
    acc, rows, low, low_rows = sums
    return warpgroup_mma_wait(0, deps=(acc, rows, low, low_rows))


@gluon.jit
def hopper_long_kernel(
    q_ptr, k_ptr, v_ptr, constants_ptr, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    H, full, tiles,
    N: gl.constexpr, D: gl.constexpr, STEP: gl.constexpr, WIDTH: gl.constexpr, HIGH: gl.constexpr,
    OUT_UP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """q, k, v (B, H, N, D) float or int8, channels side by side -> out (B, N, H, D).

    Program (i, h, b) takes blocks of queries i, i + STEP, ..., WIDTH keys in a turn. full, tiles: N / 128 rounded down
    and up; known at compile time they would unroll the loops, for which registers are too few.
    """
    M: gl.constexpr = 16 * gl.num_warps()
    TILES: gl.constexpr = (N + TILE - 1) // TILE
    IN: gl.constexpr = q_ptr.dtype.element_ty
    QUERY: gl.constexpr = _query(M)
    part = gl.program_id(0)
    i_h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    h = i_h.to(gl.int64)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    out_ptr += b * (N * H * D) + i_h * D

    ks = gl.allocate_shared_memory(gl.int8, [TILES, TILE, CHANNELS], hopper._swizzled(CHANNELS))
    words = gl.allocate_shared_memory(gl.int32, [TILES, CHANNELS, TILE // 4], hopper._swizzled(TILE, 32))
    _keep(k_ptr, v_ptr, stride_kn, stride_vn, c_ptr, ks, words, tiles, N, D, HALF)
    vts = words._reinterpret(gl.int8, [TILES, CHANNELS, TILE], hopper._swizzled(TILE))
    ones = hopper._ones(M // 8)
    fence_async_shared()
    hopper._barrier()
    columns = _sum_values(vts, ones, tiles)
    ones = ones.slice(0, 8, 0)
    hopper._barrier()
    units = hopper._units(c_ptr, D)
    x = hopper._load(q_ptr, stride_qn, part * M, N, M, D, CHANNELS, QUERY)
    q = hopper._quantize(x, hopper._factors(c_ptr, 0, -1, D, CHANNELS, IN, HALF, QUERY))
    for start in range(part * M, N, STEP * M):
        operand = gl.convert_layout(q, hopper._operand(M, WIDTH), assert_trivial=True)
        acc, rows, low, low_rows = _attend(operand, ks, vts, ones, units, full, N, WIDTH, HIGH)
        # The next queries are asked for before this block is finished, and quantized after.
        x = hopper._load(q_ptr, stride_qn, start + STEP * M, N, M, D, CHANNELS, QUERY)
        factors = hopper._factors(c_ptr, 0, -1, D, CHANNELS, IN, HALF, QUERY)
        inverse = hopper._inverse(rows, low_rows, N, HIGH)
        column = columns.load(gl.SliceLayout(0, hopper._mma(M, CHANNELS)))[None, :] + gl.zeros_like(acc)
        out = hopper._normalise(acc, low, inverse, column, c_ptr, OUT_UP, D, HIGH, out_ptr.dtype.element_ty)
        pointers, mask = hopper._pointers(out_ptr, H * D, start, N, M, D, CHANNELS, hopper._out(M, CHANNELS))
        gl.store(pointers, out, mask=mask)
        q = hopper._quantize(x, factors)
