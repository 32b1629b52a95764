"""Integer attention for Hopper (sm_90) where a head's int8 K and V do not fit in shared memory: they stream through it.

Two launches. The first quantizes K and V once and writes them as the second wants them in shared memory, tile by tile.
In the second a program takes blocks of queries, as in hopper_long.py: one pass over K finds each row's exact maximum, a
second over K and V makes the weights and sums them. Tiles are copied ahead of their use; a barrier for each keeps apart
who reads and who copies, to which the compiler adds two of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_init, warpgroup_mma_wait

from qvit.kernels import hopper
from qvit.kernels import hopper_long as long

TILE = gl.constexpr(128)  # keys of a tile
CHANNELS = gl.constexpr(64)  # of a head, padded
STAGES = gl.constexpr(4)  # tiles in shared memory: two that are used, one that products still read, one on its way
BYTES = gl.constexpr(TILE.value * CHANNELS.value)  # of a tile of K, and of one of V^T


# ---------------------------------------------------------------- the first launch


@gluon.jit
def hopper_pack_kernel(
    k_ptr, v_ptr, constants_ptr, tiles_ptr, sum_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, H, N, tiles,
    D: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """k, v (B, H, N, D) -> tiles (B, H, tiles, 2, 8192): K's rows and V^T in int8; sums (B, H, tiles, 64) of V."""
    IN: gl.constexpr = k_ptr.dtype.element_ty
    ROWS: gl.constexpr = hopper._rows(CHANNELS, 16 if IN == gl.int8 else 8, gl.num_warps())
    QUADS: gl.constexpr = hopper._quads(TILE, CHANNELS, gl.num_warps())
    WORDS: gl.constexpr = hopper._quads(TILE, CHANNELS, gl.num_warps(), True)
    i = gl.program_id(0)
    i_h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    h = i_h.to(gl.int64)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    k = hopper._load(k_ptr + b * stride_kb + h * stride_kh, stride_kn, i * TILE, N, TILE, D, CHANNELS, ROWS)
    v = hopper._load(v_ptr + b * stride_vb + h * stride_vh, stride_vn, i * TILE, N, TILE, D, CHANNELS, QUADS)
    k = hopper._keys(k, hopper._factors(c_ptr, 1, 2, D, CHANNELS, IN, HALF, ROWS))
    words = hopper._values(v, hopper._factors(c_ptr, 3, -1, D, CHANNELS, IN, HALF, WORDS))
    tile = (b * H + h) * tiles + i
    tiles_ptr += tile * (2 * BYTES)
    o_n = gl.arange(0, TILE, layout=gl.SliceLayout(1, k.type.layout))
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, k.type.layout))
    gl.store(tiles_ptr + o_n[:, None] * CHANNELS + o_d[None, :], k)
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, words.type.layout))
    o_w = gl.arange(0, TILE // 4, layout=gl.SliceLayout(0, words.type.layout))
    words_ptr = (tiles_ptr + BYTES).to(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(words_ptr + o_d[:, None] * (TILE // 4) + o_w[None, :], words)
    sums = gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, 0x01010101, 0;", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )
    sums = gl.sum(sums, 1)
    gl.store(sum_ptr + tile * CHANNELS + gl.arange(0, CHANNELS, layout=sums.type.layout), sums)


# ---------------------------------------------------------------- the second launch


@gluon.constexpr_function
def _copied(warps):
    """A tile's bytes as they are copied, 16 a thread."""
    return gl.BlockedLayout([1, 16], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def _copied_words(warps):
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def _copy_keys(ks, tiles_ptr, tile, tiles):
    """Starts to copy K's part of a tile; past the last one, that again: a branch would part the products' pipeline."""
    layout: gl.constexpr = _copied(gl.num_warps())
    o_n = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    x_ptr = tiles_ptr + gl.minimum(tile, tiles - 1) * (2 * BYTES) + o_n[:, None] * CHANNELS + o_d[None, :]
    async_copy.async_copy_global_to_shared(ks.index(tile % STAGES), x_ptr)


@gluon.jit
def _copy_values(words, tiles_ptr, tile, tiles):
    """Likewise V's part."""
    layout: gl.constexpr = _copied_words(gl.num_warps())
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, layout))
    o_w = gl.arange(0, TILE // 4, layout=gl.SliceLayout(0, layout))
    x_ptr = tiles_ptr + gl.minimum(tile, tiles - 1) * (2 * BYTES) + BYTES
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    x_ptr = gl.multiple_of(x_ptr + o_d[:, None] * (TILE // 4) + o_w[None, :], [1, 16])
    async_copy.async_copy_global_to_shared(words.index(tile % STAGES), x_ptr)


@gluon.jit
def _arrive(PENDING: gl.constexpr):
    """All but the last PENDING groups have arrived, for everyone."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    hopper._barrier()


@gluon.jit
def _top(q, ks, tiles_ptr, masked, full, tiles, N: gl.constexpr, WIDTH: gl.constexpr):
    """Each row's largest score, [rows]."""
    TAIL: gl.constexpr = long._tail(N, WIDTH)
    TURNS: gl.constexpr = TILE // WIDTH
    best = gl.full([q.shape[0], 8], -(2**31), gl.int32, layout=long._maxima(q.shape[0]))
    for tile in gl.static_range(STAGES - 1):
        _copy_keys(ks, tiles_ptr, tile, tiles)
        async_copy.commit_group()
    for tile in range(full):
        _arrive(STAGES - 2)
        _copy_keys(ks, tiles_ptr, tile + (STAGES - 1), tiles)
        async_copy.commit_group()
        turns = ()
        for i in gl.static_range(TURNS):
            turns = turns + (long._scores(q, ks, tile % STAGES, i * WIDTH, WIDTH),)
        for i in gl.static_range(TURNS):
            best = long._better(best, warpgroup_mma_wait(TURNS - 1 - i, deps=(turns[i],)))
    _arrive(0)
    scores = ()
    for i in gl.static_range(len(TAIL)):
        scores = scores + (long._scores(q, ks, N // TILE % STAGES, TAIL[i][0], TAIL[i][1]),)
    for i in gl.static_range(len(TAIL)):
        s = warpgroup_mma_wait(len(TAIL) - 1 - i, deps=(scores[i],))
        best = long._better(best, long._mask_tail(s, masked, TAIL[i][0], N))
    return gl.max(best, 1)


@gluon.jit
def _attend(
    q, ks, words, vts, tiles_ptr, ones, units, full, tiles, N: gl.constexpr, WIDTH: gl.constexpr, HIGH: gl.constexpr
):
    """A block of queries, int8 [rows, 64] in registers -> products with V and sums of its weights' complements."""
    M: gl.constexpr = q.shape[0]
    TILES: gl.constexpr = (N + TILE - 1) // TILE
    TAIL: gl.constexpr = long._tail(N, WIDTH)
    PENDING: gl.constexpr = 4 if HIGH else 2  # what long._add starts
    masked = units[2]
    top = _top(q, ks, tiles_ptr, masked, full, tiles, N, WIDTH)
    hopper._barrier()  # the tail of K has been read
    for tile in gl.static_range(STAGES - 2):
        _copy_keys(ks, tiles_ptr, tile, tiles)
        _copy_values(words, tiles_ptr, tile, tiles)
        async_copy.commit_group()
    top = gl.convert_layout(top, gl.SliceLayout(1, hopper._operand(M, CHANNELS)), assert_trivial=True)
    base = hopper._distance_base(top, units)
    acc = warpgroup_mma_init(gl.zeros([M, CHANNELS], gl.int32, layout=hopper._mma(M, CHANNELS)))
    rows = warpgroup_mma_init(gl.zeros([M, 8], gl.int32, layout=hopper._mma(M, 8)))
    sums = (acc, rows, acc, rows)
    _arrive(0)
    s = warpgroup_mma_wait(0, deps=(long._scores(q, ks, 0, 0, WIDTH),))
    for tile in range(full):
        # The tile before this one may still be read by its last products: the next goes where the one before that was.
        _arrive(0)
        _copy_keys(ks, tiles_ptr, tile + (STAGES - 2), tiles)
        _copy_values(words, tiles_ptr, tile + (STAGES - 2), tiles)
        async_copy.commit_group()
        slot = tile % STAGES
        for i in gl.static_range(TILE // WIDTH):
            p, p_low = long._weights(s, base, units, HIGH)
            if (i + 1) * WIDTH < TILE:
                s = long._scores(q, ks, slot, (i + 1) * WIDTH, WIDTH)
            else:  # the next tile's first turn, be the tile partial
                s = long._scores(q, ks, gl.minimum(tile + 1, TILES - 1) % STAGES, 0, WIDTH)
            sums = long._add(sums, p, p_low, vts.index(slot).slice(i * WIDTH, WIDTH, 1), ones, HIGH)
            s = warpgroup_mma_wait(PENDING, deps=(s,))
    for i in gl.static_range(len(TAIL)):
        if i > 0 or TAIL[0][1] < WIDTH:
            t = warpgroup_mma_wait(0, deps=(long._scores(q, ks, N // TILE % STAGES, TAIL[i][0], TAIL[i][1]),))
        else:
            t = s
        p, p_low = long._weights(long._mask_tail(t, masked, TAIL[i][0], N), base, units, HIGH)
        sums = long._add(sums, p, p_low, vts.index(N // TILE % STAGES).slice(TAIL[i][0], TAIL[i][1], 1), ones, HIGH)
    async_copy.wait_group(0)  # no program ends with a copy on its way
    acc, rows, low, low_rows = sums
    return warpgroup_mma_wait(0, deps=(acc, rows, low, low_rows))


@gluon.jit
def _columns(sum_ptr, tiles):
    """V's sum over the keys, int32 [64] in shared memory, in the order of V^T's rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    total = gl.zeros([32, CHANNELS], gl.int32, layout=layout)
    for start in range(0, tiles, 32):
        mask = (start + o_t < tiles)[:, None] & (o_d >= 0)[None, :]
        total += gl.load(sum_ptr + (start + o_t)[:, None] * CHANNELS + o_d[None, :], mask=mask, other=0)
    return gl.allocate_shared_memory(gl.int32, [CHANNELS], gl.SwizzledSharedLayout(1, 1, 1, [0]), gl.sum(total, 0))


@gluon.jit
def hopper_stream_kernel(
    q_ptr, tiles_ptr, sum_ptr, constants_ptr, out_ptr, stride_qb, stride_qh, stride_qn, H, full, tiles,
    N: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, HIGH: gl.constexpr, OUT_UP: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """q (B, H, N, D) float or int8, channels side by side; K and V as packed -> out (B, N, H, D).

    Program (i, h, b) takes block i of queries, WIDTH keys in a turn. full, tiles: N / 128 rounded down and up.
    """
    M: gl.constexpr = 16 * gl.num_warps()
    IN: gl.constexpr = q_ptr.dtype.element_ty
    QUERY: gl.constexpr = long._query(M)
    start = gl.program_id(0) * M
    i_h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    h = i_h.to(gl.int64)
    c_ptr = constants_ptr + i_h * (6 * D + 8)
    q_ptr += b * stride_qb + h * stride_qh
    tiles_ptr += (b * H + h) * tiles * (2 * BYTES)
    sum_ptr += (b * H + h) * tiles * CHANNELS
    out_ptr += b * (N * H * D) + i_h * D

    x = hopper._load(q_ptr, stride_qn, start, N, M, D, CHANNELS, QUERY)
    ks = gl.allocate_shared_memory(gl.int8, [STAGES, TILE, CHANNELS], hopper._swizzled(CHANNELS))
    words = gl.allocate_shared_memory(gl.int32, [STAGES, CHANNELS, TILE // 4], hopper._swizzled(TILE, 32))
    vts = words._reinterpret(gl.int8, [STAGES, CHANNELS, TILE], hopper._swizzled(TILE))
    ones = hopper._ones(8)
    columns = _columns(sum_ptr, tiles)
    units = hopper._units(c_ptr, D)
    q = hopper._quantize(x, hopper._factors(c_ptr, 0, -1, D, CHANNELS, IN, HALF, QUERY))
    q = gl.convert_layout(q, hopper._operand(M, WIDTH), assert_trivial=True)
    acc, rows, low, low_rows = _attend(q, ks, words, vts, tiles_ptr, ones, units, full, tiles, N, WIDTH, HIGH)
    inverse = hopper._inverse(rows, low_rows, N, HIGH)
    column = columns.load(gl.SliceLayout(0, hopper._mma(M, CHANNELS)))[None, :] + gl.zeros_like(acc)
    out = hopper._normalise(acc, low, inverse, column, c_ptr, OUT_UP, D, HIGH, out_ptr.dtype.element_ty)
    pointers, mask = hopper._pointers(out_ptr, H * D, start, N, M, D, CHANNELS, hopper._out(M, CHANNELS))
    gl.store(pointers, out, mask=mask)
