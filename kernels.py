"""
The scans: how a linear RNN updates its state over a sequence. First comes a plain loop as the reference, then the
same computation in chunks of many steps, then the chunks as GPU kernels.

The delta rule updates a state S (K x V) for each head. Each step t has a beta_t in [0, 2], and 0, 1 or K gates,
which make the rows of S decay. A gate is given by its logarithm, the log-gate g_t <= 0:

    S <- diag(exp g_t) S
    S <- S + k_t d_t^T,  d_t = b_t (v_t - S^T k_t),  b_t = beta_t / |k_t|^2
    o_t = S^T q_t

In words: read the value that S holds under the key k_t, and move this value towards v_t. As a matrix equation,

    S_t = (I - beta_t k_t k_t^T / k_t^T k_t) diag(exp g_t) S_{t-1} + b_t k_t v_t^T.

The matrix in parentheses has the eigenvalues 1 (K-1 times) and 1 - beta_t. At beta = 2 it is a reflection, which
loses nothing of S. With k = e_i - e_j, this reflection swaps the rows i and j of S.

Dividing by |k_t|^2 (the projector form) keeps these eigenvalues for any |k_t| > 0. If a unit key is rounded to bf16,
|k|^2 can be off by up to 0.8 %. Without the division, the eigenvalue at beta = 2 would therefore not be -1, and after
a few thousand reflections the state would have exploded or vanished.

Symbols: B batch, T time, H heads, K key dim, V value dim, C chunk length, N chunks. Layout: (B, T, H, K). In the
formulas for chunks, Q, K and V are the queries, keys and values of one chunk; all capitals except S have C rows.

    delta_rule(..., backend="loop")    the reference: one step at a time, any dtype
    delta_rule(..., backend="torch")   C steps at a time, hand-written backward, any device
    delta_rule(..., backend="triton")  the same on a GPU, in two kernels forward and two backward
    decay_scan(...)                    linear attention with decay, S_t = a_t S_{t-1} + k_t v_t^T

Read `delta_rule_loop` and `DeltaRuleChunks.forward` first; the GPU kernels can wait.
Look at their errors and times:   python kernels.py

Sources: chunks, Yang et al. 2406.06484; one gate, Yang et al. 2412.06464; a gate per channel of the key, Kimi
Linear 2510.26692; eigenvalues down to -1, Grazzi et al. 2411.12537. Not here: layers (models.py).
"""
import argparse
import functools
import itertools
import logging
import math
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit, kernel = triton.jit, triton.jit(do_not_specialize=["T", "H"])  # compiled once for all T and H
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=lambda x: x)
    jit = kernel = lambda f: f

BACKENDS = ["loop", "torch", "triton"]
LOG_MIN = -7.0  # smallest log-gate: with 16 steps, exp(7 * 16 / 2) times a key of 1e12 still fits into fp32


# ----------------------------------------------------------------------------------------------------------
# The reference

def delta_rule_loop(q, k, v, beta, g, S):
    """The equations above, one step at a time, in the dtype of the arguments; autograd does the backward.

    It uses unbind, because the backward of each x[:, t] would write a (B, T, H, K) tensor."""
    length = k.norm(dim=-1)
    length = length.where(length > 0, math.inf)                          # a zero key writes nothing
    b = beta / length / length                        # not / length**2: its gradient divides by |k|^4
    gates = [None] * q.shape[1] if g is None else g.exp().unbind(1)
    outputs = []
    for q_t, k_t, v_t, b_t, gate_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), b.unbind(1), gates):
        if gate_t is not None:
            S = gate_t[..., None] * S                                     # (B, H, K, V)
        held = (k_t[..., None, :] @ S)[..., 0, :]                        # (B, H, V)
        d_t = b_t[..., None] * (v_t - held)
        S = S + k_t[..., None] * d_t[..., None, :]
        outputs.append((q_t[..., None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 1), S


# ----------------------------------------------------------------------------------------------------------
# Chunks of C steps
#
# A chunk is C consecutive steps, computed together. It starts at state S and leaves the state S'. Row i of D is
# d_i = b_i (v_i - S_{i-1}^T k_i), where S_{i-1} is S plus the writes of the steps before i. So the rows of D solve a
# triangular system, and everything else is a matrix product:
#
#     A = tril(diag(b) K K^T, -1)    M = (I + A)^-1     P = tril(Q K^T)
#     X = V - K S                    D = M diag(b) X    O = Q S + P D       S' = S + K^T D
#
# Only X, D and S' need a loop over chunks; the rest is computed for all chunks at once.
#
# With gates, let c = cumsum(g) within the chunk, and mid = c_C / 2. From step j to step i a row of S decays by
# exp(c_i - c_j) = exp(c_i - mid) exp(mid - c_j). With this mid, no exponent is larger than |c_C| / 2. So let
#
#     Q_read = exp(c - mid) Q      K_read = exp(c - mid) K      K_write = exp(mid - c) K
#
# Q_read and K_read replace Q and K where S is read, and K_write replaces K where S' is written. So P = tril(Q_read
# K_write^T), and A uses K_read K_write^T, whose diagonal is still |k|^2. The state is multiplied by half = exp(mid)
# before and after each chunk. In the formulas, S is the state after the first of these products, and S' the state
# before the second.
#
# The backward goes from the last chunk to the first, and starts from dO and dS'. Let Y = diag(b) X, so D = M Y. Here dX
# is the gradient of X, likewise for the other letters, and G is the gradient of K_read K_write^T in A if b is constant.
# * multiplies entry by entry, and sum_V sums over the V columns:
#
#     dD = P^T dO + K_write dS'           dY = M^T dD             dX = dV = diag(b) dY
#     dS = dS' + Q_read^T dO - K_read^T dX
#     dP = tril(dO D^T)                   dA = -tril(dY D^T, -1)  G = diag(b) dA
#     dQ_read = dO S^T + dP K_write       dK_read = G K_write - dX S^T
#     dK_write = D dS'^T + dP^T Q_read + G^T K_read
#     db_i = sum_V (dY * X)_i + sum_j (dA * K_read K_write^T)_ij
#     dbeta = db / |k|^2                  dk = exp(c - mid) * dK_read + exp(mid - c) * dK_write - 2 b dbeta k
#     dc = Q_read * dQ_read + K_read * dK_read - K_write * dK_write,  and add sum_V S' * dS' to row C
#
# and dg is the cumulative sum of dc from the end. Let the second product with half be one with exp(c_C - mid), which is
# the same. Then no result depends on mid, so mid gets no gradient. Where gates erase nearly all of S, dg is a small
# difference of large numbers, so its relative error is 5e-4 near the clamp, LOG_MIN.
#
# (I + A)^-1 is a triangular solve. The product (I - A)(I + A^2)(I + A^4)... is equal in exact arithmetic. But at
# beta = 2 with nearly equal keys, the powers of A become so large before they cancel that fp32 keeps few digits.

def to_chunks(x, C, fill=0):
    """(B, T, H, ...) -> (N*B*H, C, ...), first by chunk. Steps that fill up the last chunk leave the state unchanged.

    >>> to_chunks(torch.tensor([1, 2, 3, 4, 5]).view(1, 5, 1), C=2).tolist()
    [[1, 2], [3, 4], [5, 0]]
    """
    B, T, H = x.shape[:3]
    whole, rest = divmod(T, C)
    chunks = x.new_empty(math.ceil(T / C), B, H, C, *x.shape[3:])
    view = chunks.transpose(2, 3).transpose(0, 1)                        # (B, N, C, H, ...), the same memory
    view[:, :whole] = x[:, :whole * C].unflatten(1, (whole, C))
    if rest:
        view[:, whole, :rest] = x[:, whole * C:]
        view[:, whole, rest:] = fill
    return chunks.flatten(0, 2)


def from_chunks(x, B, T, H):
    """(N*B*H, C, ...) -> (B, T, H, ...): the inverse of `to_chunks`, without the padding."""
    x = x.reshape(-1, B, H, *x.shape[1:]).transpose(0, 1).transpose(2, 3)     # (B, N, C, H, ...)
    return x.flatten(1, 2)[:, :T]


def decays(g):
    """Log-gates g (.., C, K) -> exp(c - mid), exp(mid - c), and half, which is exp(mid) as a column (.., K, 1).

    >>> halve_twice = torch.tensor([[0.5], [0.5]]).log()                 # C = 2, K = 1
    >>> [x.round(decimals=4).flatten().tolist() for x in decays(halve_twice)]
    [[1.0, 0.5], [1.0, 2.0], [0.5]]
    """
    c = g.cumsum(-2)
    mid = c[..., -1:, :] / 2
    return (c - mid).exp(), (mid - c).exp(), mid.exp().mT


def no_second_derivative(backward):
    """Make a backward pass raise RuntimeError under create_graph=True, where autograd would take its result for a
    constant."""
    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError('this backend of delta_rule has no second derivative: use backend="loop"')
        return backward(ctx, *grads)
    return checked


class DeltaRuleChunks(torch.autograd.Function):
    """The equations above. All tensors share one dtype; g is None or log-gates (B, T, H, K or 1)."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, C):
        B, T, H, _ = k.shape
        Q, K, V, beta = (to_chunks(x, C) for x in (q, k, v, beta))       # (N*B*H, C, K), ..., (NBH, C)
        Q_read, K_read, K_write, to_read, to_write, half = Q, K, K, None, None, None
        if g is not None:
            to_read, to_write, half = decays(to_chunks(g, C))
            Q_read, K_read, K_write = to_read * Q, to_read * K, to_write * K

        # |k|^2 is the diagonal of KK. Because KK is divided by |k|^2 before beta multiplies it, A is exactly beta
        # for equal keys, and 65,536 reflections in fp32 cost 2e-5 of the state instead of 1e-2
        KK = K_read @ K_write.mT                                         # (N*B*H, C, C)
        norm2 = KK.diagonal(dim1=-2, dim2=-1)
        norm2 = norm2.where(norm2 > 0, math.inf)[..., None]              # a zero key writes nothing
        b = beta[..., None] / norm2                                      # (N*B*H, C, 1)
        U = (KK / norm2).tril_(-1)                                       # gates may overflow above the diagonal
        A = beta[..., None] * U
        eye = torch.eye(C, dtype=A.dtype, device=A.device).expand_as(A)
        M = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        Mb = M * b.mT
        P = (Q_read @ K_write.mT).tril_()

        BH, N = B * H, len(V) // (B * H)
        S = V.new_empty(N + 1, BH, *state.shape[2:])                     # the state each chunk starts from
        S[0] = state.flatten(0, 1)
        X, D = torch.empty_like(V), torch.empty_like(V)
        for n in range(N):
            now = slice(n * BH, (n + 1) * BH)
            if g is not None:
                S[n] *= half[now]
            torch.baddbmm(V[now], K_read[now], S[n], alpha=-1, out=X[now])
            torch.bmm(Mb[now], X[now], out=D[now])
            torch.baddbmm(S[n], K_write[now].mT, D[now], out=S[n + 1])
            if g is not None:
                S[n + 1] *= half[now]
        end, S = S[N].clone(), S[:N].flatten(0, 1)                       # (N*B*H, K, V)
        O = torch.bmm(Q_read, S).baddbmm_(P, D)
        ctx.save_for_backward(K, Q_read, K_read, K_write, b, norm2, U, M, P, X, D, S, to_read, to_write, half)
        ctx.shape = B, T, H
        return from_chunks(O, B, T, H), end.unflatten(0, (B, H))

    @staticmethod
    @no_second_derivative
    @torch.autocast("cpu", enabled=False)                                # backward() may run in autocast
    @torch.autocast("cuda", enabled=False)
    def backward(ctx, dO, dS):
        K, Q_read, K_read, K_write, b, norm2, U, M, P, X, D, S, to_read, to_write, half = ctx.saved_tensors
        gated, (B, T, H) = half is not None, ctx.shape
        BH, N = B * H, len(S) // (B * H)
        dO = to_chunks(dO, K.shape[1])
        dD = P.mT @ dO                                                   # (N*B*H, C, V)
        dY, dX = torch.empty_like(dD), dD                                # dX overwrites dD
        dS_after = dS.new_empty(N + 1, BH, *dS.shape[2:])                # dS_after[n + 1] is dS' of chunk n
        torch.bmm(Q_read.mT, dO, out=dS_after[:N].flatten(0, 1))         # (N*B*H, K, V)
        dS_after[N] = dS.flatten(0, 1)
        for n in reversed(range(N)):
            now = slice(n * BH, (n + 1) * BH)
            if gated:
                dS_after[n + 1] *= half[now]
            dD[now].baddbmm_(K_write[now], dS_after[n + 1])
            torch.bmm(M[now].mT, dD[now], out=dY[now])
            torch.mul(b[now], dY[now], out=dX[now])
            dS_after[n].baddbmm_(K_read[now].mT, dX[now], alpha=-1).add_(dS_after[n + 1])
            if gated:
                dS_after[n] *= half[now]
        dS, dS_after = dS_after[0].clone(), dS_after[1:].flatten(0, 1)

        dP, dA = torch.bmm(dO, D.mT).tril_(), torch.bmm(dY, D.mT).neg_().tril_(-1)
        dbeta = (dY * X).sum(-1, keepdim=True) / norm2 + (dA * U).sum(-1, keepdim=True)
        G = b * dA
        dQ_read = torch.bmm(dO, S.mT).baddbmm_(dP, K_write)
        dK_read = torch.bmm(G, K_write).baddbmm_(dX, S.mT, alpha=-1)
        dK_write = D @ dS_after.mT
        if gated:                                                        # sum_V S' * dS', with S' = S + K_write^T D
            at_end = (S * dS_after).sum(-1) + (K_write * dK_write).sum(-2)
        del dO, dY, dS_after                                             # else the copies below set the memory peak
        dK_write.baddbmm_(dP.mT, Q_read).baddbmm_(G.mT, K_read)
        dg = None
        if gated:
            dc = Q_read * dQ_read + K_read * dK_read - K_write * dK_write
            dc[..., -1, :] += at_end
            dc = dc.sum_to_size(to_read.shape)                           # one gate: sum over channels
            dg = dc.flip(-2).cumsum(-2).flip(-2)
            dQ_read *= to_read
            dK_read *= to_read
            dK_write *= to_write
        dK = dK_read.add_(dK_write).addcmul_(dbeta, b * K, value=-2)
        grads = (dQ_read, dK, dX, dbeta[..., 0], dg)
        grads = [x if x is None else from_chunks(x, B, T, H) for x in grads]
        return *grads, dS.unflatten(0, (B, H)), None


# ----------------------------------------------------------------------------------------------------------
# The same chunks on a GPU
#
# Only the state depends on the chunk before. So two kernels loop over the chunks, and two compute all chunks in
# parallel. A *program*, in Triton, is one of the instances of a kernel that run side by side.
#
# prepare_kernel: one program per head and chunk computes what does not depend on the state: M, P and b.
# forward_kernel: a program keeps BV columns of one head's state in registers, and loops over the chunks. For the
#   backward, it stores X, D and the state S that each chunk starts from.
# backward_state_kernel: loops from the last chunk to the first and carries dS'. It stores dY and each chunk's dS'.
# backward_inputs_kernel: one program per head and chunk computes all other gradients.
#
# M, P, b, betas, gates and the first and last state are fp32, as are their gradients. The rest has the dtype of q,
# k and v; in bf16, gradients are up to 3 % off. A capital letter is a tile, the part of a tensor that a program holds;
# the same small letter is a pointer to the tensor (but b_tile is the tile of b). K has n_k columns, padded to BK. The
# tile St is S transposed, BV x BK, so the left factor of each product has 16 or 32 rows. With so few rows, Triton does
# not use wgmma, Hopper's matrix instruction for 64 rows, with which similar scans gave wrong results
# (flash-linear-attention #640, #984).
#
# In the loops, S is fp32. If it were rounded to bf16 where it is read, it would be 3 % off after 4,096 swaps. Tensor
# cores multiply in bf16, so an fp32 tile is split into three bf16 tiles that add up to it. Then a bf16 tile times an
# fp32 tile takes three products. Two fp32 tiles would take nine, of which "bf16x6" computes the six largest.

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")     # on a CPU, for tests only


@jit
def bf16_parts(x):
    """fp32 -> three bf16 numbers whose sum is x, the largest first. -65536 is the mask 0xFFFF0000: it keeps the
    sign, the exponent and the first eight binary digits of a number, as bf16 does."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    middle = ((x - high).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (x - high - middle).to(tl.bfloat16)


@jit
def dot(a, b):
    """a b in fp32: one product of two bf16 tiles, three if one tile is fp32, six if both are."""
    if INTERPRETED or (a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16):   # the interpreter has no bf16
        return tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        high, middle, low = bf16_parts(b)
        return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    elif b.dtype == tl.bfloat16:
        high, middle, low = bf16_parts(a)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))
    else:
        return tl.dot(a, b, input_precision="bf16x6")


@jit
def load_rows(x, row, exists, column, width):
    """-> a tile of x (..., width): these rows and columns, and zeros where x has none."""
    exists = exists[:, None] & (column < width)[None, :]
    tile = tl.load(x + row[:, None] * width + column[None, :], exists, 0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@jit
def store_rows(x, row, exists, column, width, tile):
    exists = exists[:, None] & (column < width)[None, :]
    tl.store(x + row[:, None] * width + column[None, :], tile, exists)


@jit
def steps_of(n, bh, T, H, C: tl.constexpr):
    """Chunk n of head bh -> the row of each of its steps in a (B, T, H, ...) tensor, and whether it exists."""
    b, h, t = bh // H, bh % H, n * C + tl.arange(0, C)
    return (b * T + t) * H + h, t < T


@jit
def load_rescaled(q, k, g, row, exists, column, width):
    """-> K, Q_read, K_read, K_write, exp(c - mid), exp(mid - c), all (C, BK), and half (1, BK). Without gates, the
    last three are 1."""
    Q, K = load_rows(q, row, exists, column, width), load_rows(k, row, exists, column, width)
    if g is None:
        return K, Q, K, K, 1.0, 1.0, 1.0
    else:
        logs = load_rows(g, row, exists, column, width)
        c, mid = tl.cumsum(logs, 0), 0.5 * tl.sum(logs, 0)[None, :]
        to_read, to_write = tl.exp(c - mid), tl.exp(mid - c)
        return K, to_read * Q, to_read * K, to_write * K, to_read, to_write, tl.exp(mid)


@jit
def key_products(K_read, K_write, beta):
    """-> U = K_read K_write^T / |k|^2; |k|^2, the diagonal of that product; b = beta / |k|^2. For equal keys,
    U must be exactly 1. Triton's "/" is only approximate, so div_rn divides."""
    i = tl.arange(0, K_read.shape[0])
    KK = dot(K_read, tl.trans(K_write))
    norm2 = tl.sum(tl.where(i[:, None] == i, KK, 0.0), 1)
    norm2 = tl.where(norm2 > 0, norm2, float("inf"))                     # a zero key writes nothing
    return tl.div_rn(KK, norm2[:, None]), norm2, tl.div_rn(beta, norm2)


@jit
def inverse(A):
    """(I + A)^-1 of a strictly lower triangular A, 16 x 16. First inverts the 2 x 2 blocks on the
    diagonal, then joins two neighbours into one of twice the size, with -M A M below. Needs no powers of A."""
    tl.static_assert(A.shape[0] == 16)
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    M = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, A, 0.0)
    for bits in tl.static_range(1, 4):                                   # join blocks of 2, 4, 8
        between = (i >> bits != j >> bits) & (i >> (bits + 1) == j >> (bits + 1))
        M -= dot(dot(M, tl.where(between, A, 0.0)), M)
    return M


@kernel
def prepare_kernel(q, k, beta, g, m, p, b, T, H, n_k, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)                                # offsets may exceed 2^31
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    row, exists = steps_of(chunk % tl.cdiv(T, C), chunk // tl.cdiv(T, C), T, H, C)
    _, Q_read, K_read, K_write, _, _, _ = load_rescaled(q, k, g, row, exists, tl.arange(0, BK), n_k)
    Beta = tl.load(beta + row, exists, 0.0)
    U, _, b_tile = key_products(K_read, K_write, Beta)
    tl.store(b + row, b_tile, exists)
    tl.store(m + (chunk * C + i) * C + j, inverse(tl.where(i > j, Beta[:, None] * U, 0.0)))
    tl.store(p + (chunk * C + i) * C + j, tl.where(i >= j, dot(Q_read, tl.trans(K_write)), 0.0))


@kernel
def forward_kernel(q, k, v, g, m, p, b, start, o, end, starts, x, d, T, H, n_k, n_v,
                   C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    bh = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ks, vs = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    St = tl.trans(load_rows(start, bh * n_k + ks, ks < n_k, vs, n_v))
    for n in range(tl.cdiv(T, C)):
        chunk = bh * tl.cdiv(T, C) + n
        row, exists = steps_of(n, bh, T, H, C)
        _, Q_read, K_read, K_write, _, _, half = load_rescaled(q, k, g, row, exists, ks, n_k)
        M, P = tl.load(m + (chunk * C + i) * C + j), tl.load(p + (chunk * C + i) * C + j)
        V, b_tile = load_rows(v, row, exists, vs, n_v), tl.load(b + row, exists, 0.0)
        St = half * St
        X = V - dot(K_read, tl.trans(St))
        D = dot(M, b_tile[:, None] * X)
        store_rows(o, row, exists, vs, n_v, dot(Q_read, tl.trans(St)) + dot(P, D))
        if starts is not None:                                           # there will be a backward
            store_rows(starts, chunk * n_v + vs, vs < n_v, ks, n_k, St)
            store_rows(x, row, exists, vs, n_v, X)
            store_rows(d, row, exists, vs, n_v, D)
        St = half * (St + dot(tl.trans(D), K_write))
    store_rows(end, bh * n_k + ks, ks < n_k, vs, n_v, tl.trans(St))


@kernel
def backward_state_kernel(q, k, g, m, p, b, do, dend, dy, ds_after, dstart, T, H, n_k, n_v,
                          C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    bh = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ks, vs = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    dSt = tl.trans(load_rows(dend, bh * n_k + ks, ks < n_k, vs, n_v))
    for n in range(tl.cdiv(T, C) - 1, -1, -1):
        chunk = bh * tl.cdiv(T, C) + n
        row, exists = steps_of(n, bh, T, H, C)
        _, Q_read, K_read, K_write, _, _, half = load_rescaled(q, k, g, row, exists, ks, n_k)
        M, P = tl.load(m + (chunk * C + i) * C + j), tl.load(p + (chunk * C + i) * C + j)
        dO, b_tile = load_rows(do, row, exists, vs, n_v), tl.load(b + row, exists, 0.0)
        dSt = half * dSt
        store_rows(ds_after, chunk * n_v + vs, vs < n_v, ks, n_k, dSt)
        dD = dot(tl.trans(P), dO) + dot(K_write, tl.trans(dSt))
        dY = dot(tl.trans(M), dD)
        store_rows(dy, row, exists, vs, n_v, dY)
        dSt = half * (dSt + dot(tl.trans(dO), Q_read) - dot(tl.trans(b_tile[:, None] * dY), K_read))
    store_rows(dstart, bh * n_k + ks, ks < n_k, vs, n_v, tl.trans(dSt))


@kernel
def backward_inputs_kernel(q, k, beta, g, x, d, starts, do, dy, ds_after, dq, dk, dv, dbeta, dg,
                           T, H, n_k, n_v, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    bh, n = chunk // tl.cdiv(T, C), chunk % tl.cdiv(T, C)
    i, j, ks = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, BK)
    row, exists = steps_of(n, bh, T, H, C)
    K, Q_read, K_read, K_write, to_read, to_write, half = load_rescaled(q, k, g, row, exists, ks, n_k)
    U, norm2, b_tile = key_products(K_read, K_write, tl.load(beta + row, exists, 0.0))

    dP, dA = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dQ_read, dYS = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    dK_write, kept = tl.zeros((C, BK), tl.float32), tl.zeros((BK,), tl.float32)
    dYX = tl.zeros((C,), tl.float32)
    for first in range(0, n_v, BV):
        vs = first + tl.arange(0, BV)
        X, D = load_rows(x, row, exists, vs, n_v), load_rows(d, row, exists, vs, n_v)
        dO, dY = load_rows(do, row, exists, vs, n_v), load_rows(dy, row, exists, vs, n_v)
        St = load_rows(starts, chunk * n_v + vs, vs < n_v, ks, n_k)
        dSt = load_rows(ds_after, chunk * n_v + vs, vs < n_v, ks, n_k)
        store_rows(dv, row, exists, vs, n_v, b_tile[:, None] * dY)
        dYX += tl.sum(dY.to(tl.float32) * X, 1)
        dP += dot(dO, tl.trans(D))
        dA -= dot(dY, tl.trans(D))
        dQ_read += dot(dO, St)
        dYS += dot(dY, St)
        dK_write += dot(D, dSt)
        kept += tl.sum(St.to(tl.float32) * dSt, 0)

    dP, dA = tl.where(i >= j, dP, 0.0), tl.where(i > j, dA, 0.0)
    G = b_tile[:, None] * dA
    at_end = kept + tl.sum(K_write * dK_write, 0)                        # sum_V S' * dS'
    dQ_read += dot(dP, K_write)
    dK_read = dot(G, K_write) - b_tile[:, None] * dYS
    dK_write += dot(tl.trans(dP), Q_read) + dot(tl.trans(G), K_read)
    dBeta = tl.div_rn(dYX, norm2) + tl.sum(tl.where(i > j, dA * U, 0.0), 1)
    dK = to_read * dK_read + to_write * dK_write - 2 * dBeta[:, None] * (b_tile[:, None] * K)
    store_rows(dq, row, exists, ks, n_k, to_read * dQ_read)
    store_rows(dk, row, exists, ks, n_k, dK)
    tl.store(dbeta + row, dBeta, exists)
    if g is not None:
        dc = Q_read * dQ_read + K_read * dK_read - K_write * dK_write
        dc += tl.where(i == C - 1, at_end[None, :], 0.0)
        store_rows(dg, row, exists, ks, n_k, tl.cumsum(dc, 0, reverse=True))


CHUNK, WIDEST = 16, 128                                  # C; largest K or V


@functools.cache
def launch_options(K):
    """-> the kernels' compile-time settings. With num_stages 2, a loop may load its next tiles while it computes."""
    BK = max(16, triton.next_power_of_2(K))
    return dict(C=CHUNK, BK=BK, BV=max(16, BK // 4), num_warps=min(4, BK // 16), num_stages=2)


class DeltaRuleTriton(torch.autograd.Function):
    """The four kernels: q, k, v all in fp32 or all in bf16, the rest in fp32; g (B, T, H, K) or None."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, grad):
        q, k, v, beta, g, state = (x if x is None else x.contiguous() for x in (q, k, v, beta, g, state))
        (B, T, H, K), V = k.shape, v.shape[-1]
        N, grid = -(-T // CHUNK), (B * H, -(-V // launch_options(K)["BV"]))    # rounded up
        o, end = torch.empty_like(v), torch.empty_like(state)
        m, p, b = *state.new_empty(2, B * H, N, CHUNK, CHUNK), torch.empty_like(beta)
        starts = x = d = None
        if grad and any(ctx.needs_input_grad):                           # needs_input_grad is set also under no_grad
            starts, x, d = v.new_empty(B * H, N, V, K), torch.empty_like(v), torch.empty_like(v)
        with torch.cuda.device_of(k):                                    # k may be on another GPU
            prepare_kernel[(B * H * N,)](q, k, beta, g, m, p, b, T, H, K, **launch_options(K))
            forward_kernel[grid](q, k, v, g, m, p, b, state, o, end, starts, x, d, T, H, K, V, **launch_options(K))
        ctx.save_for_backward(q, k, beta, g, m, p, b, starts, x, d)
        return o, end

    @staticmethod
    @no_second_derivative
    def backward(ctx, do, dend):
        q, k, beta, g, m, p, b, starts, x, d = ctx.saved_tensors
        do, dend = do.contiguous(), dend.contiguous()
        (B, T, H, K), V, N = k.shape, x.shape[-1], starts.shape[1]
        dy, ds_after, dstart = torch.empty_like(x), torch.empty_like(starts), torch.empty_like(dend)
        dq, dk, dv, dbeta, dg = (y if y is None else torch.empty_like(y) for y in (q, k, x, beta, g))
        grid = B * H, -(-V // launch_options(K)["BV"])
        with torch.cuda.device_of(k):
            backward_state_kernel[grid](q, k, g, m, p, b, do, dend, dy, ds_after, dstart,
                                        T, H, K, V, **launch_options(K))
            backward_inputs_kernel[(B * H * N,)](q, k, beta, g, x, d, starts, do, dy, ds_after,
                                                 dq, dk, dv, dbeta, dg, T, H, K, V, **launch_options(K))
        return dq, dk, dv, dbeta, dg, dstart, None


# ----------------------------------------------------------------------------------------------------------
# The public function

def kernels_fit(dtype, K, V):
    """Whether the kernels are right for this dtype of q, k and v, and these widths of a head."""
    return dtype != torch.float64 and max(K, V) <= WIDEST and (K > 1 or dtype == torch.float32)


def pick_backend(device, dtype, K, V):
    """-> "triton" where its kernels can run, else "torch". device: a torch.device, or its name."""
    device = torch.device(device)
    ready = triton and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "triton" if ready and kernels_fit(dtype, K, V) else "torch"


def check_shapes(q, k, v, state, g=None, **per_step):
    """-> B, T, H, K, V. Raises ValueError unless each tensor is None or fits k. per_step: more tensors, (B, T, H)."""
    if k.dim() != 4:
        raise ValueError(f"k has the shape {tuple(k.shape)}: give it the shape (B, T, H, K)")
    (B, T, H, K), V = k.shape, v.shape[-1]
    channels = 1 if g is not None and g.shape[-1] == 1 else K
    fitting = [("q", q, (B, T, H, K)), ("v", v, (B, T, H, V)), ("g", g, (B, T, H, channels)),
               ("state", state, (B, H, K, V))]
    fitting += [(name, x, (B, T, H)) for name, x in per_step.items()]
    for name, x, shape in fitting:
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(x.shape)}: to fit k {tuple(k.shape)}, give it {shape}")
        if x is not None and x.device != k.device:
            raise ValueError(f"{name} is on {x.device}, but k is on {k.device}: move one of them")
    if k.numel() == 0 or V == 0:
        raise ValueError(f"k {tuple(k.shape)} or v {tuple(v.shape)} is empty: there is nothing to scan")
    return B, T, H, K, V


def delta_rule(q, k, v, beta, g=None, state=None, chunk=None, backend="auto"):
    """The delta rule at the top of this file.

    q, k (B, T, H, K), v (B, T, H, V), beta (B, T, H): in fp64, fp32, bf16 or fp16, with any strides, not empty.
    g: None, or log-gates <= 0, one per channel of the keys (B, T, H, K), or one for all channels (B, T, H) or
    (B, T, H, 1). Log-gates below -7 are clamped to -7 and get no gradient. state: the first state (B, H, K, V), or
    None for zeros. backend: "loop", "torch" (chunks), "triton", or "auto", which is what `pick_backend` returns. chunk:
    the steps per chunk for torch, or None for a good number. With gates, a chunk has at most 16 steps.

    Returns o (B, T, H, V) in v's dtype, and the last state (B, H, K, V). Sums and state are fp32 (fp64 if v is
    fp64), also under autocast; but the loop is protected from autocast in its forward only. If you allow TF32, the
    backends loop and torch use it. All tensors are differentiable. Keys may be zero, or have any length from
    1e-12 (1e-6 with gates at the clamp) to 1e12. beta is not checked; outside [0, 2] the state explodes.

    Raises ValueError for bad shapes and unknown backends, and RuntimeError where second derivatives are asked for (the
    loop has them)."""
    if g is not None and g.dim() == 3:
        g = g[..., None]
    B, T, H, K, V = check_shapes(q, k, v, state, g, beta=beta)
    out_dtype, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    kernel_dtype = torch.bfloat16 if {q.dtype, k.dtype, v.dtype} == {torch.bfloat16} else dtype
    if backend == "auto":
        backend = pick_backend(v.device, kernel_dtype, K, V)
    elif backend not in BACKENDS or backend == "triton" and not (triton and kernels_fit(kernel_dtype, K, V)):
        raise ValueError(f"backend '{backend}': choose auto, loop, torch or triton (which needs the package triton, "
                         f"heads at most {WIDEST} wide, and no fp64)")
    with torch.autocast(v.device.type, enabled=False):
        q, k, v = (x.to(kernel_dtype if backend == "triton" else dtype) for x in (q, k, v))
        beta = beta.to(dtype)
        S = v.new_zeros(B, H, K, V, dtype=dtype) if state is None else state.to(dtype)
        if g is not None:
            g = g.to(dtype).clamp(min=LOG_MIN)
        if backend == "loop":
            o, S = delta_rule_loop(q, k, v, beta, g, S)
        elif backend == "torch":
            C = chunk or (16 if K <= 32 else 32)
            o, S = DeltaRuleChunks.apply(q, k, v, beta, g, S, min(C, T) if g is None else min(C, T, 16))
        else:
            g = g if g is None else g.expand_as(k)
            o, S = DeltaRuleTriton.apply(q, k, v, beta, g, S, torch.is_grad_enabled())
    return o.to(out_dtype), S


# ----------------------------------------------------------------------------------------------------------
# Linear attention with decay, in chunks; simple enough to leave its backward to autograd

def decay_scan(q, k, v, a=None, state=None, chunk=32):
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t: Mamba-2's recurrence, or linear attention if a is None.

    a: the decay (B, T, H), in [-1, 1]. All else is as in `delta_rule`, but chunk is a number, and
    backward() must be outside autocast."""
    B, T, H, K, _ = check_shapes(q, k, v, state, a=a)
    dtype, C = torch.promote_types(v.dtype, torch.float32), min(chunk, T)
    with torch.autocast(v.device.type, enabled=False):
        Q, K_out, V = (to_chunks(x.to(dtype), C) for x in (q, k, v))     # (N*B*H, C, K)
        P = (Q @ K_out.mT).tril()
        a_C = torch.ones(len(V), 1, 1, dtype=dtype, device=v.device)
        if a is not None:
            a = to_chunks(a.to(dtype), C, fill=1)                        # (N*B*H, C)
            below = torch.ones(C, C, dtype=torch.bool, device=a.device).tril(-1)
            R = torch.where(below, a[..., None], 1).cumprod(-2)          # R_ij = a_{j+1} ... a_i, from j to i
            gamma = a.cumprod(-1)[..., None]                             # a_1 ... a_i, from the start to i
            Q, P = gamma * Q, R * P
            K_out, a_C = R[:, -1, :, None] * K_out, gamma[:, -1:]        # decayed to the chunk's end
        S = V.new_zeros(B * H, K, v.shape[-1]) if state is None else state.to(dtype).flatten(0, 1)
        starts = []
        for decay, write in zip(a_C.split(B * H), (K_out.mT @ V).split(B * H)):
            starts.append(S)
            S = decay * S + write
        o = from_chunks(Q @ torch.cat(starts) + P @ V, B, T, H)
    return o.to(v.dtype), S.unflatten(0, (B, H))


# ----------------------------------------------------------------------------------------------------------
# Comparing a backend with the loop in float64

TENSORS = ("o", "state", "dq", "dk", "dv", "dbeta", "dg", "dstate")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # the largest accepted `errors`, for up to 100 steps


def row_swaps(B, T, H, K, V, gate=None, dtype=torch.float32, device="cpu"):
    """-> q, k, v, beta in dtype, and g, state in fp32. Beta is 2 and each key is along e_i - e_j, so each step swaps
    two of the first five rows of the state, and then adds 2 k v^T. gate: the mean log-gate, or None for no gates."""
    here = dict(generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    q = F.normalize(torch.randn(B, T, H, K, **here), dim=-1)
    v = torch.randn(B, T, H, V, **here) / math.sqrt(V)
    pairs = torch.rand(B, T, H, min(5, max(2, K)), **here).argsort(-1)
    unit = torch.eye(max(2, K), dtype=torch.float64, device="cpu")[:, :K]
    k = F.normalize(unit[pairs[..., 0]] - unit[pairs[..., 1]], dim=-1)
    beta = 2 * torch.ones_like(k[..., 0])
    state = torch.randn(B, H, K, V, **here).to(device, torch.float32)
    g = None if gate is None else (2 * gate * torch.rand(B, T, H, K, **here)).to(device, torch.float32)
    return [x.to(device, dtype) for x in (q, k, v, beta)] + [g, state]


def errors(tensors, truth):
    """Relative error of each tensor, |a - b| / |b|, with |b| at least 1e-6 of the largest |b|."""
    largest = max(b.norm() for b in truth)
    return [((a.double() - b).norm() / max(b.norm(), 1e-6 * largest)).item() for a, b in zip(tensors, truth)]


def with_gradients(inputs, backend, **options):
    """-> o and the last state, then the gradients of a random weighted sum of both."""
    inputs = [x if x is None else x.detach().requires_grad_() for x in inputs]
    outputs = delta_rule(*inputs, backend=backend, **options)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=rng, device="cpu").to(x) for x in outputs]
    grads = torch.autograd.grad(outputs, [x for x in inputs if x is not None], weights)
    return [x.detach() for x in (*outputs, *grads)]


def compare(inputs, backend, **options):
    """-> {name: error}: the error of all that a backend returns, against the loop in float64 on the same numbers."""
    truth = with_gradients([x if x is None else x.double() for x in inputs], "loop")
    outputs = with_gradients(inputs, backend, **options)
    names = [name for name in TENSORS if name != "dg" or inputs[4] is not None]
    return dict(zip(names, errors(outputs, truth)))


# ----------------------------------------------------------------------------------------------------------
# python kernels.py: errors against the loop in float64; after a long run, against chunks in float64; then times

@torch.no_grad()
def drift(inputs, backend):
    """-> the worst head's relative error of the last state, against chunks in float64. Each call takes 4,096 steps."""
    S = exact = None
    for part in zip(*(x.split(4096, 1) for x in inputs)):
        _, S = delta_rule(*part, state=S, backend=backend)
        _, exact = delta_rule(*(x.double() for x in part), state=exact, backend="torch")
    return ((S - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).max().item()


def clock(shape, dtype, device, backends):
    """Print a row: for each backend, the ms of the forward, then of the forward and the backward together."""
    logging.getLogger("torch.utils.cpp_extension").setLevel("ERROR")     # else it says "No CUDA runtime is found"
    from torch.utils.benchmark import Timer
    B, T, H, K = shape
    inputs = [x.requires_grad_() for x in row_swaps(B, T, H, K, K, None, dtype, device)[:4]]

    forward = "delta_rule(*inputs, backend=backend)[0]"
    both = f"torch.autograd.grad({forward}, inputs, inputs[2])"           # v has the shape and the dtype of o
    print(f"{str(shape):>20s}", end="")
    for backend, code in itertools.product(backends, (forward, both)):
        timer = Timer(code, globals={**globals(), **locals()}, num_threads=torch.get_num_threads())
        print(f"{1e3 * timer.timeit(1 if backend == 'loop' else 10).mean:10.3g}", end="", flush=True)
    print()


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = pick_backend(device, torch.float32, 64, 64)
    print(f"device {device}; backend {backend}\n\nerrors against the loop in float64, 200 swaps")
    print(" " * 24, *(f"{name:>8s}" for name in TENSORS))
    for dtype, gate in itertools.product((torch.float32, torch.bfloat16), (None, -0.3)):
        worst = compare(row_swaps(1, 200, 2, 32, 32, gate, dtype, device), backend)
        row = [f"{worst[name]:8.0e}" if name in worst else " " * 8 for name in TENSORS]
        print(f"{str(dtype)[6:] + ', gates ' + str(gate):24s}", *row)

    print("\nerror of the state after 65,536 swaps, worst of 16 heads")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = row_swaps(1, 65536, 16, 16, 16, None, dtype, device)[:4]
        print(f"{str(dtype)[6:]:24s}{drift(inputs, backend):9.0e}", flush=True)

    dtype, backends = torch.float32, ["loop", "torch"]
    shapes = [(8, 512, 4, 32), (8, 2048, 4, 32), (16, 681, 1, 64), (16, 681, 2, 32)]
    if backend == "triton":
        dtype, backends = torch.bfloat16, BACKENDS
        shapes = [(8, 1024, 8, 64), (64, 512, 4, 32), (8, 2048, 8, 128), (1, 16384, 16, 64)]
    print(f"\n{dtype}, {torch.get_num_threads()} threads: ms forward, ms forward and backward")
    print(f"{'B, T, H, K':>20s}" + "".join(f"{name:>20s}" for name in backends))
    for shape in shapes:
        clock(shape, dtype, device, backends)
    print("notice: the chunks are much faster than the loop, and stay accurate after 65,536 swaps")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
