"""
The scans: how a linear RNN moves its state. First a loop that cannot be misread, then chunks of many steps,
then the same chunks as GPU kernels.

The delta rule, per head, on a state S (K x V), with beta_t in [0, 2] and a gate g_t = exp(log g_t) in (0, 1]:

    S <- g_t S      S <- S + k_t d_t^T,  d_t = b_t (v_t - S^T k_t),  b_t = beta_t / |k_t|^2      o_t = S^T q_t

In words: ask the state what it holds under the key k_t, and move that towards v_t. Written out,

    S_t = (I - beta_t k_t k_t^T / k_t^T k_t) g_t S_{t-1} + b_t k_t v_t^T,

and the bracket has the eigenvalues 1 (K-1 times) and 1 - beta_t. At beta = 2 it is a reflection: it swaps two
stored values and loses nothing.

The division by |k_t|^2 (the projector form) keeps that true for keys of any length. A unit key rounded to
bf16 has |k|^2 = 1.005 or 0.995: without the division the eigenvalue is not -1, and after a few thousand
reflections the state has exploded or died.

Symbols: B batch, T time, H heads, K key dim, V value dim, C chunk length, N chunks. Layout: (B, T, H, K).

    delta_rule(..., backend="loop")    the truth: one step at a time, any dtype
    delta_rule(..., backend="torch")   C steps at a time, hand-written backward, any device
    delta_rule(..., backend="triton")  the same on a GPU, in one kernel forward and two backward
    decay_scan(...)                    the diagonal cousin S_t = a_t S_{t-1} + k_t v_t^T

Check and time them:   python kernels.py

Sources: chunks, Yang et al. 2406.06484; the gate, Yang et al. 2412.06464; eigenvalues down to -1, Grazzi et
al. 2411.12537. Not here: layers (models.py).
"""
import functools
import itertools
import math
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit, kernel = triton.jit, triton.jit(do_not_specialize=["T", "N"])   # one build for all lengths
except ImportError:
    triton, tl, jit, kernel = None, SimpleNamespace(constexpr=lambda x: x), lambda f: f, lambda f: f

OLDEST_TRITON = [3, 6]  # the oldest that the kernels were compiled and checked with
LOG_MIN = -30.0  # log-gates are clamped here: e^-30 forgets all there was, and cumulative sums stay accurate


# ----------------------------------------------------------------------------------------------------------
# The truth

def delta_rule_loop(q, k, v, beta, g, S):
    """The equations above, one step at a time, in the dtype of the arguments; autograd does the backward.

    unbind, not x[:, t]: the backward of an index writes a whole (B, T, H, K) tensor, T times."""
    norm2 = (k * k).sum(-1)
    b = torch.where(norm2 > 0, beta / norm2.where(norm2 > 0, 1), 0)      # a zero key writes nothing
    gates = [None] * q.shape[1] if g is None else g.exp().unbind(1)
    outputs = []
    for q_t, k_t, v_t, b_t, g_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), b.unbind(1), gates):
        if g_t is not None:
            S = g_t[..., None, None] * S                                 # (B, H, K, V)
        held = (k_t[..., None, :] @ S)[..., 0, :]                        # (B, H, V)
        d_t = b_t[..., None] * (v_t - held)
        S = S + k_t[..., None] * d_t[..., None, :]
        outputs.append((q_t[..., None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 1), S


# ----------------------------------------------------------------------------------------------------------
# Chunks of C steps
#
# In a chunk that starts at state S, row i of D is d_i = b_i (v_i - S_{i-1}^T k_i), and S_{i-1} is S plus what
# rows before i wrote. So the rows of D solve a triangular system, and everything else is a matrix product:
#
#     A = tril(diag(b) K K^T, -1)    M = (I + A)^-1     P = tril(Q K^T)
#     X = V - K S                    D = M diag(b) X    O = Q S + P D       S' = S + K^T D
#
# Only X, D and S' wait for the chunk before; the rest is done for all chunks at once. The backward walks from
# the last chunk to the first. Given dO and dS':
#
#     dD = P^T dO + K dS'            dY = M^T dD        dX = dV = diag(b) dY
#     dS = dS' + Q^T dO - K^T dX     dP = tril(dO D^T)  dA = -tril(dY D^T, -1), as D = M (b X)
#     dQ = dO S^T + dP K             dK = dP^T Q + D dS'^T - dX S^T + (G + G^T) K,  G = diag(b) dA
#     db_i = sum_V (dY X)_i + sum_j (dA K K^T)_ij       then the chain through b = beta / |k|^2
#
# With a gate, let c = cumsum(log g) within the chunk; gamma = exp(c) is the decay since its start,
# rho = exp(c_C - c) until its end, R_ij = exp(c_i - c_j) between two steps. A and P are multiplied by R entry
# by entry. K becomes gamma K where it reads S (K_in) and rho K where it makes S' (K_out), Q becomes gamma Q
# (Q_in), and S' starts from gamma_C S. Each of these carries dc_i, what a change of c_i changes:
#
#     dc = rows of (dP QK^T + G KK^T) less its columns + Q (dO S^T) - K_in (dX S^T) - K_out (D dS'^T)
#
# summed over K in the last three, and c_C also carries the last term's sum and <gamma_C S, dS'>.
#
# (I + A)^-1 is a triangular solve. Its popular rival (I - A)(I + A^2)(I + A^4)... is equal on paper and NaN
# at beta = 2 with repeated keys, where the powers of A grow before they vanish.

def to_chunks(x, C):
    """(B, T, H, ...) -> (N, B*H, C, ...), padded with zeros: b = 0 and log g = 0 leave the state alone."""
    B, T, H = x.shape[:3]
    N = -(-T // C)
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
    x = x.reshape(B, N, C, H, *x.shape[3:]).transpose(2, 3).transpose(0, 1)   # (N, B, H, C, ...)
    return x.reshape(N, B * H, C, *x.shape[4:])


def from_chunks(x, B, T):
    """(N, B*H, C, ...) -> (B, T, H, ...), the way back."""
    N, BH, C = x.shape[:3]
    x = x.reshape(N, B, BH // B, C, *x.shape[3:]).transpose(0, 1).transpose(2, 3)
    return x.reshape(B, N * C, BH // B, *x.shape[4:])[:, :T]


def decays(g):
    """Log-gates g (N, BH, C) -> gamma and rho (.., C, 1), gamma_C (.., 1, 1), R (.., C, C).

    c_i - c_j is summed anew for each j: a difference of two long sums would have the rounding of both."""
    past = torch.ones(g.shape[-1], g.shape[-1], dtype=g.dtype, device=g.device).tril()
    R = (past @ (g[..., None] * past.tril(-1))).exp().tril()
    gamma = g.cumsum(-1).exp()[..., None]
    return gamma, R[..., -1, :, None], gamma[..., -1:, :], R


class DeltaRuleChunks(torch.autograd.Function):
    """The lines above. All tensors share one dtype; g is None or log-gates; C is the chunk length."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, C):
        B, T, H, _ = k.shape
        Q, K, V, beta = (to_chunks(x, C) for x in (q, k, v, beta))       # (N, BH, C, K), ..., (N, BH, C)
        KK = K @ K.mT                                                    # (N, BH, C, C)
        # |k|^2 is taken from the product that makes A, and A divides by it before all else: for equal keys it
        # is beta to the last bit, and 65,536 reflections in fp32 cost 1e-5 of the state instead of 1e-2
        norm2 = KK.diagonal(dim1=-2, dim2=-1)
        alive = norm2 > 0
        norm2 = norm2.where(alive, 1)
        b = torch.where(alive, beta / norm2, 0)
        A, P = (beta[..., None] * (KK / norm2[..., None])).tril(-1), (Q @ K.mT).tril()
        Q_in, K_in, K_out, gamma, rho, gamma_C, R = Q, K, K, None, None, None, None
        if g is not None:
            gamma, rho, gamma_C, R = decays(to_chunks(g, C))
            Q_in, K_in, K_out, A, P = gamma * Q, gamma * K, rho * K, R * A, R * P
        eye = torch.eye(C, dtype=A.dtype, device=A.device).expand_as(A)
        M = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        Mb = M * b[..., None, :]

        S, starts, X, D = state.flatten(0, 1), [], torch.empty_like(V), torch.empty_like(V)
        for n in range(len(V)):
            starts.append(S)
            torch.baddbmm(V[n], K_in[n], S, alpha=-1, out=X[n])
            torch.bmm(Mb[n], X[n], out=D[n])
            S = torch.baddbmm(S if g is None else gamma_C[n] * S, K_out[n].mT, D[n])
        starts = torch.stack(starts)                                     # (N, BH, K, V)
        O = Q_in @ starts + P @ D
        ctx.save_for_backward(Q, K, V, beta, b, alive, KK, P, M, X, D, starts, gamma, rho, gamma_C, R)
        ctx.B, ctx.T = B, T
        return from_chunks(O, B, T), S.unflatten(0, (B, H))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dO, dS):
        Q, K, V, beta, b, alive, KK, P, M, X, D, S, gamma, rho, gamma_C, R = ctx.saved_tensors
        gated, heads = gamma is not None, dS.shape[:2]
        Q_in, K_in, K_out = (gamma * Q, gamma * K, rho * K) if gated else (Q, K, K)
        dO, dS = to_chunks(dO, Q.shape[2]), dS.flatten(0, 1)
        PdO, QdO = P.mT @ dO, Q_in.mT @ dO                               # (N, BH, C, V), (N, BH, K, V)

        ends, dY, dX = [], torch.empty_like(V), torch.empty_like(V)
        for n in reversed(range(len(V))):
            ends.append(dS)                                              # dS' of chunk n
            dD = torch.baddbmm(PdO[n], K_out[n], dS)
            torch.bmm(M[n].mT, dD, out=dY[n])
            torch.mul(b[n, :, :, None], dY[n], out=dX[n])
            dS = torch.baddbmm(QdO[n] + (gamma_C[n] * dS if gated else dS), K_in[n].mT, dX[n], alpha=-1)
        ends = torch.stack(ends[::-1])

        dP, dA = (dO @ D.mT).tril(), -(dY @ D.mT).tril(-1)
        dQ, dK_in, dK_out = dO @ S.mT, dX @ S.mT, D @ ends.mT
        if gated:
            dP, dA, dQ, dK_in, dK_out = R * dP, R * dA, gamma * dQ, gamma * dK_in, rho * dK_out
        G = b[..., None] * dA
        dq = dQ + dP @ K
        dK = dK_out - dK_in + dP.mT @ Q + (G + G.mT) @ K
        db = (dY * X).sum(-1) + (dA * KK).sum(-1)
        norm2 = KK.diagonal(dim1=-2, dim2=-1).where(alive, 1)
        dbeta = torch.where(alive, db / norm2, 0)
        dK = dK - (2 * beta * dbeta / norm2)[..., None] * K
        dg = None
        if gated:
            W, out = dP * (Q @ K.mT) + G * KK, (K * dK_out).sum(-1)
            dc = W.sum(-1) - W.sum(-2) + (Q * dQ).sum(-1) - (K * dK_in).sum(-1) - out
            dc[..., -1] += out.sum(-1) + (gamma_C * S * ends).sum((-2, -1))
            dg = from_chunks(dc.flip(-1).cumsum(-1).flip(-1), ctx.B, ctx.T)
        dq, dk, dv, dbeta = (from_chunks(x, ctx.B, ctx.T) for x in (dq, dK, dX, dbeta))
        return dq, dk, dv, dbeta, dg, dS.unflatten(0, heads), None


# ----------------------------------------------------------------------------------------------------------
# The same chunks on a GPU
#
# forward_kernel: a program takes one head and BV columns of its state, which it keeps in registers while it
# walks through the chunks. For the backward it saves M, D and the S that each chunk starts from.
# backward_state_kernel walks back in the same way with dS', and saves dY and each chunk's dS'. With these,
# each chunk can do the rest by itself: backward_inputs_kernel, a program a chunk. D, S, dY and dS' are saved
# in the inputs' dtype, as they only make gradients, which are in that dtype, too.
#
# Capitals are tiles, small letters where they lie in memory; K is n_k wide and padded to BK. A name with a t
# is a transpose: a program holds St, its columns of S as rows, so that all products have 16 rows. Less than
# 64 of them keeps Triton from Hopper's newest matrix instructions, on which scans like this one have come out
# wrong (flash-linear-attention's issues 640 and 984).
#
# Tensor cores multiply bf16, and a state that is read through bf16 loses a tenth of itself in 4,096
# reflections, says a simulation of the rounding. But an fp32 number is the sum of three in bf16. So S times a
# bf16 key is three products, to the last bit. What only leaves the state, for an output in bf16, is worth
# two. With fp32 keys it takes six.

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")     # on a CPU, for tests only
SPLIT = tl.constexpr(not INTERPRETED)  # an interpreted product is right as it is; it is also quicker


@jit
def parts(x):
    """x in fp32 -> three tiles in bf16, whose sum it is."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@jit
def multiply(a, b, c):
    """c + a b, a and b in bf16."""
    if INTERPRETED:                                                      # it cannot compute in bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c)


@jit
def dot(a, b, PARTS: tl.constexpr):
    """a b in fp32, as if fp32 numbers had PARTS times 8 bits; bf16 ones count as they are."""
    c = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    if not SPLIT:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    elif a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        c = multiply(a, b, c)
    elif b.dtype == tl.bfloat16:
        a1, a2, a3 = parts(a)
        c = multiply(a3, b, c) if PARTS == 3 else c
        c = multiply(a1, b, multiply(a2, b, c))                          # the small ones first
    elif a.dtype == tl.bfloat16:
        b1, b2, b3 = parts(b)
        c = multiply(a, b3, c) if PARTS == 3 else c
        c = multiply(a, b1, multiply(a, b2, c))
    else:
        a1, a2, a3 = parts(a)
        b1, b2, b3 = parts(b)
        c = multiply(a2, b2, multiply(a1, b3, multiply(a3, b1, c))) if PARTS == 3 else c
        c = multiply(a1, b1, multiply(a1, b2, multiply(a2, b1, c)))
    return c


@jit
def read(x, row, exists, column, width):
    """Rows of x (..., width), zeros where there is nothing to read."""
    exists = exists[:, None] & (column < width)[None, :]
    return tl.load(x + row[:, None] * width + column[None, :], exists, 0.0)


@jit
def write(x, row, exists, column, width, tile):
    exists = exists[:, None] & (column < width)[None, :]
    tl.store(x + row[:, None] * width + column[None, :], tile, exists)


@jit
def steps_of(n, bh, T, H, C: tl.constexpr):
    """Chunk n of head bh -> its steps' rows in a (B, T, H, ...) tensor, and which of them exist."""
    t = n * C + tl.arange(0, C)
    return (bh // H * T + t) * H + bh % H, t < T


@jit
def projector(K, beta):
    """-> K K^T, |k|^2 as its diagonal has it, b = beta / |k|^2."""
    i = tl.arange(0, K.shape[0])
    KK = dot(K, tl.trans(K), 3)
    norm2 = tl.sum(tl.where(i[:, None] == i[None, :], KK, 0.0), 1)
    norm2 = tl.where(norm2 > 0, norm2, float("inf"))                     # a zero key writes nothing
    return KK, norm2, tl.div_rn(beta, norm2)


@jit
def gates(g, row, exists, C: tl.constexpr, GATED: tl.constexpr):
    """-> gamma and rho (C), gamma_C, R (C, C), as in `decays`."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if GATED:
        G = tl.load(g + row, exists, 0.0)
        R = tl.where(i >= j, tl.exp(tl.cumsum(tl.where(i > j, G[:, None], 0.0), 0)), 0.0)
        return tl.exp(tl.cumsum(G, 0)), tl.sum(tl.where(i == C - 1, R, 0.0), 0), tl.exp(tl.sum(G, 0)), R
    else:
        one = tl.full((C,), 1.0, tl.float32)
        return one, one, 1.0, tl.where(i >= j, 1.0, 0.0)


@jit
def inverse(A, C: tl.constexpr):
    """(I + A)^-1 of a triangular A. Once the diagonal blocks of 1, 2, 4, ... are done, what lies between two
    of them is -M A M: products only, but no powers of A."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    M = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, A, 0.0)
    for level in tl.static_range(1, 4):                                  # blocks of 2, 4, 8
        between = (i // 2 ** level != j // 2 ** level) & (i // 2 ** (level + 1) == j // 2 ** (level + 1))
        M -= dot(dot(M, tl.where(between, A, 0.0), 3), M, 3)
    return M


@kernel
def forward_kernel(q, k, v, beta, g, start, o, end, d, m, starts, T, N, H, n_k, n_v, C: tl.constexpr,
                   BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, OUT: tl.constexpr):
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, ks, vs = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    St = tl.trans(read(start, bh * n_k + ks, ks < n_k, vs, n_v))
    for n in range(N):
        row, exists = steps_of(n, bh, T, H, C)
        K, Q = read(k, row, exists, ks, n_k), read(q, row, exists, ks, n_k)
        Beta = tl.load(beta + row, exists, 0.0)
        KK, norm2, b = projector(K, Beta)
        gamma, rho, gamma_C, R = gates(g, row, exists, C, GATED)
        Pt = tl.trans(R) * dot(K, tl.trans(Q), OUT)
        At = Beta[None, :] * tl.div_rn(KK, norm2[None, :]) * tl.trans(R)
        Mt = inverse(tl.where(i[:, None] < i[None, :], At, 0.0), C)
        write(starts, (bh * N + n) * n_v + vs, vs < n_v, ks, n_k, St)
        if tile == 0:
            write(m, (bh * N + n) * C + i, i < C, i, C, Mt)

        K = read(k, row, exists, ks, n_k)                                # again: to keep it costs registers
        Xt = tl.trans(read(v, row, exists, vs, n_v)).to(tl.float32) - gamma[None, :] * dot(St, tl.trans(K), 3)
        Dt = dot(b[None, :] * Xt, Mt, 3)
        Ot = gamma[None, :] * dot(St, tl.trans(Q), OUT) + dot(Dt, Pt, OUT)
        write(o, row, exists, vs, n_v, tl.trans(Ot))
        write(d, row, exists, vs, n_v, tl.trans(Dt))
        St = gamma_C * St + dot(rho[None, :] * Dt, read(k, row, exists, ks, n_k), 3)
    write(end, bh * n_k + ks, ks < n_k, vs, n_v, tl.trans(St))


@kernel
def backward_state_kernel(q, k, beta, g, m, do, dend, dy, ends, dstart, T, N, H, n_k, n_v, C: tl.constexpr,
                          BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, OUT: tl.constexpr):
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, ks, vs = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    dSt = tl.trans(read(dend, bh * n_k + ks, ks < n_k, vs, n_v))
    for back in range(N):
        n = N - 1 - back
        row, exists = steps_of(n, bh, T, H, C)
        write(ends, (bh * N + n) * n_v + vs, vs < n_v, ks, n_k, dSt)
        K, Q = read(k, row, exists, ks, n_k), read(q, row, exists, ks, n_k)
        _, _, b = projector(K, tl.load(beta + row, exists, 0.0))
        gamma, rho, gamma_C, R = gates(g, row, exists, C, GATED)
        P, Mt = R * dot(Q, tl.trans(K), OUT), read(m, (bh * N + n) * C + i, i < C, i, C)

        dOt = tl.trans(read(do, row, exists, vs, n_v))
        dDt = dot(dOt, P, OUT) + rho[None, :] * dot(dSt, tl.trans(K), 3)
        dYt = dot(dDt, tl.trans(Mt), 3)
        write(dy, row, exists, vs, n_v, tl.trans(dYt))
        dSt = gamma_C * dSt + dot(gamma[None, :] * dOt.to(tl.float32), Q, OUT)
        dSt -= dot((gamma * b)[None, :] * dYt, read(k, row, exists, ks, n_k), 3)
    write(dstart, bh * n_k + ks, ks < n_k, vs, n_v, tl.trans(dSt))


@kernel
def backward_inputs_kernel(q, k, v, beta, g, d, starts, do, dy, ends, dq, dk, dv, dbeta, dg, T, N, H, n_k,
                           n_v, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr,
                           OUT: tl.constexpr):
    bh, n = tl.program_id(0).to(tl.int64) // N, tl.program_id(0) % N
    i, j, ks = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, BK)
    row, exists = steps_of(n, bh, T, H, C)
    K, Q = read(k, row, exists, ks, n_k), read(q, row, exists, ks, n_k)
    Beta = tl.load(beta + row, exists, 0.0)
    KK, norm2, b = projector(K, Beta)
    if GATED:
        QK = dot(Q, tl.trans(K), OUT)

    small, wide = tl.zeros((C, C), tl.float32), tl.zeros((C, BK), tl.float32)
    dP, dPt, dA, dAt, dQ, dK_in, dK_out = small, small, small, small, wide, wide, wide
    db, kept = tl.zeros((C,), tl.float32), 0.0
    for first in range(0, n_v, BV):
        vs = first + tl.arange(0, BV)
        D, dY = read(d, row, exists, vs, n_v), read(dy, row, exists, vs, n_v)
        dO = read(do, row, exists, vs, n_v)
        write(dv, row, exists, vs, n_v, b[:, None] * dY.to(tl.float32))
        db += tl.sum(dY.to(tl.float32) * read(v, row, exists, vs, n_v).to(tl.float32), 1)
        dP += dot(dO, tl.trans(D), OUT)
        dPt += dot(D, tl.trans(dO), OUT)
        dA -= dot(dY, tl.trans(D), OUT)
        dAt -= dot(D, tl.trans(dY), OUT)
        St = read(starts, (bh * N + n) * n_v + vs, vs < n_v, ks, n_k)
        dSt = read(ends, (bh * N + n) * n_v + vs, vs < n_v, ks, n_k)
        dQ += dot(dO, St, OUT)
        dK_in += dot(dY, St, OUT)
        dK_out += dot(D, dSt, OUT)
        if GATED:
            kept += tl.sum(tl.sum(St.to(tl.float32) * dSt.to(tl.float32), 1), 0)

    gamma, rho, gamma_C, R = gates(g, row, exists, C, GATED)
    Rt = tl.trans(R)
    dQ, dK_in, dK_out = gamma[:, None] * dQ, gamma[:, None] * dK_in, rho[:, None] * dK_out
    dP, dPt, dA, dAt = R * dP, Rt * dPt, tl.where(i > j, R * dA, 0.0), tl.where(i < j, Rt * dAt, 0.0)
    G, Gt = b[:, None] * dA, b[None, :] * dAt
    K, Q = read(k, row, exists, ks, n_k), read(q, row, exists, ks, n_k)
    K32, Q32 = K.to(tl.float32), Q.to(tl.float32)
    db += tl.sum(dA * KK, 1) - tl.sum(K32 * dK_in, 1)                    # dY X = dY V - dY (K_in S)
    dBeta, dK_in = tl.div_rn(db, norm2), b[:, None] * dK_in
    dK = dK_out - dK_in + dot(dPt, Q, OUT) + dot(G + Gt, K, OUT)
    write(dq, row, exists, ks, n_k, dQ + dot(dP, K, OUT))
    write(dk, row, exists, ks, n_k, dK - (2 * tl.div_rn(Beta * dBeta, norm2))[:, None] * K32)
    tl.store(dbeta + row, dBeta, exists)
    if GATED:
        W, out = dP * QK + G * KK, tl.sum(K32 * dK_out, 1)
        dc = tl.sum(W, 1) - tl.sum(W, 0) + tl.sum(Q32 * dQ, 1) - tl.sum(K32 * dK_in, 1) - out
        dc += tl.where(tl.arange(0, C) == C - 1, tl.sum(out, 0) + gamma_C * kept, 0.0)
        tl.store(dg + row, tl.cumsum(dc, 0, reverse=True), exists)


@jit
def step_kernel(q, k, v, beta, g, start, o, end, n_k, n_v, BK: tl.constexpr, BV: tl.constexpr,
                GATED: tl.constexpr):
    """The loop's body once, T = 1: for decoding, where a chunk would be mostly padding."""
    bh = tl.program_id(0).to(tl.int64)
    ks, vs = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    K = tl.load(k + bh * n_k + ks, ks < n_k, 0.0).to(tl.float32)[:, None]
    Q = tl.load(q + bh * n_k + ks, ks < n_k, 0.0).to(tl.float32)[:, None]
    V = tl.load(v + bh * n_v + vs, vs < n_v, 0.0).to(tl.float32)
    S = read(start, bh * n_k + ks, ks < n_k, vs, n_v)
    if GATED:
        S *= tl.exp(tl.load(g + bh))
    norm2 = tl.sum(tl.sum(K * K, 1), 0)
    b = tl.div_rn(tl.load(beta + bh), tl.where(norm2 > 0, norm2, float("inf")))
    S += K * (b * (V - tl.sum(K * S, 0)))[None, :]
    tl.store(o + bh * n_v + vs, tl.sum(Q * S, 0), vs < n_v)
    write(end, bh * n_k + ks, ks < n_k, vs, n_v, S)


CHUNK, WIDEST = 16, 128                                  # with chunks of 32, the registers overflow
WARPS = {16: 1, 32: 2, 64: 4, 128: 8}                    # by K, rounded up


def settings(K, V, dtype, gated):
    """-> what the three kernels are compiled with: the sizes of tiles, whether there is a gate, how many
    parts a number has on its way out (wide fp32 keys have no registers for a third), warps."""
    BK = max(16, triton.next_power_of_2(K))
    OUT = 3 if dtype == torch.float32 and BK <= 64 else 2
    return dict(C=CHUNK, BK=BK, BV=16, GATED=gated, OUT=OUT, num_warps=WARPS[BK], num_stages=1)


class DeltaRuleTriton(torch.autograd.Function):
    """The three kernels: q, k, v all in fp32 or all in bf16, the rest in fp32; g may be None."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, state):
        q, k, v, beta, g, state = (x if x is None else x.contiguous() for x in (q, k, v, beta, g, state))
        (B, T, H, K), V, N = k.shape, v.shape[-1], -(-k.shape[1] // CHUNK)
        o, end, d = torch.empty_like(v), torch.empty_like(state), torch.empty_like(v)
        m, starts = state.new_empty(B * H, N, CHUNK, CHUNK), v.new_empty(B * H, N, V, K)
        ctx.grid, ctx.settings = (B * H, -(-V // 16)), settings(K, V, k.dtype, g is not None)
        forward_kernel[ctx.grid](q, k, v, beta, g, state, o, end, d, m, starts, T, N, H, K, V, **ctx.settings)
        ctx.save_for_backward(q, k, v, beta, g, d, m, starts)
        return o, end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dend):
        q, k, v, beta, g, d, m, starts = ctx.saved_tensors
        do, dend = do.contiguous(), dend.contiguous()
        (B, T, H, K), V, N = k.shape, v.shape[-1], starts.shape[1]
        dy, ends, dstart = torch.empty_like(v), torch.empty_like(starts), torch.empty_like(dend)
        dq, dk, dv, dbeta, dg = (x if x is None else torch.empty_like(x) for x in (q, k, v, beta, g))
        backward_state_kernel[ctx.grid](q, k, beta, g, m, do, dend, dy, ends, dstart,
                                        T, N, H, K, V, **ctx.settings)
        backward_inputs_kernel[(B * H * N,)](q, k, v, beta, g, d, starts, do, dy, ends, dq, dk, dv, dbeta, dg,
                                             T, N, H, K, V, **ctx.settings)
        return dq, dk, dv, dbeta, dg, dstart


def triton_step(q, k, v, beta, g, state):
    """One step without a backward. Arguments and results as above, T = 1."""
    q, k, v, beta, g, state = (x if x is None else x.contiguous() for x in (q, k, v, beta, g, state))
    (B, _, H, K), V, o, end = k.shape, v.shape[-1], torch.empty_like(v), torch.empty_like(state)
    sizes = dict(BK=triton.next_power_of_2(K), BV=32, GATED=g is not None, num_warps=4)
    step_kernel[B * H, -(-V // 32)](q, k, v, beta, g, state, o, end, K, V, **sizes)
    return o, end


# ----------------------------------------------------------------------------------------------------------
# One door to all of them

BACKENDS = ("loop", "torch", "triton")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5,          # of `errors`, up to 100 steps;
             torch.bfloat16: 2e-2, torch.float16: 1e-3}          # ten times that after 1,000


def why_not_triton(device, dtype, K, V):
    """-> what keeps the kernels from such tensors, or None."""
    if triton is None:
        return "the package triton is not installed"
    version = [int(x) for x in triton.__version__.split(".")[:2]]
    if version < OLDEST_TRITON:
        return "triton {}.{} is older than the {}.{} these kernels need".format(*version, *OLDEST_TRITON)
    if device.type != "cuda" and not INTERPRETED:
        return f"tensors are on the {device.type}, kernels run on a CUDA GPU"
    if dtype == torch.float64:
        return "the kernels compute in fp32"
    if max(K, V) > WIDEST:
        return f"heads are {max(K, V)} wide, the kernels take {WIDEST}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


@functools.cache
def tried_out(device, dtype, K, V):
    """-> the largest error of the kernels on a short sequence, with a gate and without. Kernels that compile
    and compute something else have been seen (flash-linear-attention's issue 984)."""
    worst = 0
    with torch.inference_mode(False), torch.enable_grad():
        for g in (None, torch.full((1, 40, 2), -0.3, device=device)):
            inputs = [*(x.to(device, dtype) for x in example("random", 1, 40, 2, K, V)), g]
            truth = with_gradients([x if x is None else x.double() for x in inputs], "loop")
            worst = max(worst, *errors(with_gradients(inputs, "triton"), truth))
    return worst


def resolve_backend(backend="auto", device="cpu", dtype=torch.float32, K=64, V=64):
    """-> the backend for tensors of this device, dtype and width of heads, and why this one. ValueError if it
    is asked for and cannot be had."""
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend '{backend}': choose auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    device = torch.device(device)
    if backend == "auto" and device.type != "cuda":
        return "torch", "chunks, on any device"
    if backend in ("loop", "torch"):
        return backend, "as asked"
    dtype = torch.float32 if dtype == torch.float16 else dtype
    obstacle = why_not_triton(device, dtype, K, V)
    if obstacle and backend == "triton":
        raise ValueError(f"backend 'triton': {obstacle}; use 'torch'")
    if backend == "triton":
        return backend, "as asked"
    if not obstacle and tried_out(device, dtype, K, V) > TOLERANCE[dtype]:
        obstacle = f"on this GPU they are off by {tried_out(device, dtype, K, V):.0e}"
    return ("torch", f"not triton: {obstacle}") if obstacle else ("triton", "kernels for this GPU")


def delta_rule(q, k, v, beta, g=None, state=None, chunk=None, backend="auto"):
    """The delta rule of this file's first lines.

    q, k (B, T, H, K), v (B, T, H, V), beta (B, T, H), in fp64, fp32, bf16 or fp16; any T >= 1, any strides.
    g: None, or log-gates (B, T, H) <= 0, clamped at -30. state: None for zeros, or (B, H, K, V). backend:
    "auto" (triton on a GPU, else torch), or one of BACKENDS. chunk: steps a chunk for torch, None for a good
    number; triton has its own. Returns o (B, T, H, V) in v's dtype, and the last state (B, H, K, V). Sums and
    state are fp32 (fp64 if v is), also under autocast. Differentiable in every tensor. beta is taken as is:
    outside [0, 2] an eigenvalue leaves [-1, 1], and over time the state explodes, in every backend alike.
    Raises ValueError for shapes that do not fit and for a backend that cannot be had, saying why."""
    B, T, H, K = k.shape
    V = v.shape[-1]
    for name, x, shape in (("q", q, (B, T, H, K)), ("v", v, (B, T, H, V)), ("beta", beta, (B, T, H)),
                           ("g", g, (B, T, H)), ("state", state, (B, H, K, V))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} is {tuple(x.shape)}, but beside k {tuple(k.shape)} it must be {shape}")
        if x is not None and x.device != k.device:
            raise ValueError(f"{name} is on {x.device}, but k on {k.device}: move one of them")
    dtype = torch.promote_types(v.dtype, torch.float32)
    inner = torch.bfloat16 if {q.dtype, k.dtype, v.dtype} == {torch.bfloat16} else dtype
    backend, _ = resolve_backend(backend, v.device, inner, K, V)
    with torch.autocast(v.device.type, enabled=False):
        q, k, x = (x.to(inner if backend == "triton" else dtype) for x in (q, k, v))
        beta, g = beta.to(dtype), g if g is None else g.to(dtype).clamp(min=LOG_MIN)
        S = x.new_zeros(B, H, K, V, dtype=dtype) if state is None else state.to(dtype)
        if backend == "loop":
            o, S = delta_rule_loop(q, k, x, beta, g, S)
        elif backend == "torch":
            o, S = DeltaRuleChunks.apply(q, k, x, beta, g, S, min(chunk or (16 if K <= 16 else 32), T))
        else:
            scan = triton_step if T == 1 and not torch.is_grad_enabled() else DeltaRuleTriton.apply
            o, S = scan(q, k, x, beta, g, S)
    return o.to(v.dtype), S


# ----------------------------------------------------------------------------------------------------------
# The diagonal cousin, in chunks; simple enough to leave its backward to autograd

def decay_scan(q, k, v, a=None, state=None, chunk=32):
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t: Mamba-2's recurrence, or linear attention (a None: 1).

    a (B, T, H) in [-1, 1]: its logarithm is cumulated, its sign travels beside it; |a| < e^-30 counts as
    e^-30. All else as in `delta_rule`."""
    B, T, H, K = k.shape
    dtype, C = torch.promote_types(v.dtype, torch.float32), min(chunk, T)
    with torch.autocast(v.device.type, enabled=False):
        Q, K_out, V = (to_chunks(x.to(dtype), C) for x in (q, k, v))
        S = V.new_zeros(B * H, K, v.shape[-1]) if state is None else state.to(dtype).flatten(0, 1)
        Q_in, P, a_C = Q, (Q @ K_out.mT).tril(), [1] * len(V)
        if a is not None:
            log_a = to_chunks(a.to(dtype).abs().clamp(min=math.exp(LOG_MIN)).log(), C)
            gamma, rho, gamma_C, R = decays(log_a)
            flips = to_chunks((a < 0).to(dtype), C).cumsum(-1)[..., None]
            sign = 1 - 2 * (flips % 2)                                   # (N, BH, C, 1)  of the product
            Q_in, P = gamma * sign * Q, R * sign * sign.mT * P
            K_out, a_C = rho * sign * sign[:, :, -1:] * K_out, gamma_C * sign[:, :, -1:]
        starts, writes = [], K_out.mT @ V
        for n in range(len(V)):
            starts.append(S)
            S = a_C[n] * S + writes[n]
        o = from_chunks(Q_in @ torch.stack(starts) + P @ V, B, T)
    return o.to(v.dtype), S.unflatten(0, (B, H))


# ----------------------------------------------------------------------------------------------------------
# python kernels.py: every backend against the loop in float64, then the clock

EXAMPLES = ("random", "unnormalised", "identical", "transpositions", "zero")


def example(kind, B=2, T=100, H=2, K=16, V=16, dtype=torch.float64, seed=0):
    """Inputs q, k, v, beta that a scan must survive. kind: random, unnormalised, identical (keys, beta 2:
    parity), transpositions (keys e_i - e_j, beta 2: swaps of five values), zero (beta 0)."""
    if kind not in EXAMPLES:
        raise ValueError(f"example {kind}: choose one of {', '.join(EXAMPLES)}")
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, n, generator=rng, dtype=torch.float64) for n in (K, K, V))
    beta = torch.full((B, T, H), 2.0, dtype=torch.float64)
    if kind in ("random", "unnormalised"):
        beta = 2 * torch.rand(B, T, H, generator=rng, dtype=torch.float64)
        length = 5 * torch.rand(B, T, H, 1, generator=rng, dtype=torch.float64)
    elif kind == "identical":
        k = k[:, :1].expand_as(k)
    elif kind == "transpositions":
        pairs = torch.rand(B, T, H, 5, generator=rng).argsort(-1)[..., :2]
        unit = torch.eye(K, dtype=torch.float64)
        k = unit[pairs[..., 0]] - unit[pairs[..., 1]]
    elif kind == "zero":
        beta = torch.zeros_like(beta)
    k = F.normalize(k, dim=-1) * (length if kind == "unnormalised" else 1)
    return tuple(x.to(dtype) for x in (F.normalize(q, dim=-1), k, v / math.sqrt(V), beta))


def errors(tensors, truth):
    """Relative error of each tensor, |a - b| / |b|, where |b| counts as at least 1e-6 of the largest."""
    largest = max(b.norm() for b in truth)
    return [((a.double() - b).norm() / max(b.norm(), 1e-6 * largest)).item() for a, b in zip(tensors, truth)]


def with_gradients(inputs, backend, **options):
    """All that a scan returns: o, the last state, and the gradients of a fixed random projection of both."""
    inputs = [x if x is None else x.detach().requires_grad_() for x in inputs]
    o, S = delta_rule(*inputs, backend=backend, **options)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x) for x in (o, S)]
    wanted = [x for x in inputs if x is not None]
    grads = torch.autograd.grad((o * weights[0]).sum() + (S * weights[1]).sum(), wanted)
    return [x.detach() for x in (o, S, *grads)]


def median_ms(f, runs):
    """Milliseconds a call of f, the median of `runs`, once what it needs is built."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    f()
    seconds = []
    for _ in range(runs):
        wait()
        start = time.perf_counter()
        f()
        wait()
        seconds.append(time.perf_counter() - start)
    return 1e3 * sorted(seconds)[runs // 2]


TENSORS = ("o", "state", "dq", "dk", "dv", "dbeta", "dg", "dstate")


def check(device, backend, dtype, K=16, V=16, lengths=(1, 2, 15, 16, 17, 100, 1000)):
    """Print a row: the largest error of each tensor, against the loop in float64 on the same numbers, over
    kinds of keys, lengths, and gates: none, weak, and one that forgets all. Exit if that breaks TOLERANCE."""
    worst = dict.fromkeys(TENSORS, 0)
    for kind, T, gate in itertools.product(EXAMPLES, lengths, (None, 0.1, 40.0)):
        inputs = [x.to(device, dtype) for x in example(kind, 1, T, 2, K, V)]
        rng = torch.Generator().manual_seed(2)
        g = gate if gate is None else torch.full((1, T, 2), -gate, device=device)
        inputs += [g, torch.randn(1, 2, K, V, generator=rng).to(device)]
        truth = with_gradients([x if x is None else x.double() for x in inputs], "loop")
        names = [name for name in TENSORS if name != "dg" or g is not None]
        for name, error in zip(names, errors(with_gradients(inputs, backend), truth)):
            worst[name] = max(worst[name], error)
            if error > TOLERANCE[dtype] * max(1, T / 100):
                sys.exit(f"kernels.py: {backend} {dtype}, {kind} keys, T {T}: {name} is off by {error:.0e}")
    print(f"{f'{backend} {dtype} {K}, {V}'.replace('torch.', ''):24s}" +
          "".join(f"{error:9.0e}" for error in worst.values()), flush=True)


def clock(device, shape, scans, dtype):
    """Print a row: ms forward | forward and backward of each scan, and its largest error against float64, on
    transpositions (beta 2); last, the time that the bytes alone would take, from a copy timed beside it."""
    B, T, H, K = shape
    inputs = [x.to(device, dtype).requires_grad_() for x in example("transpositions", B, T, H, K, K)]
    weight, runs = inputs[2].detach().roll(1, 1), 5 if device == "cpu" else 20

    def forward_backward(scan, inputs):
        o, S = scan(*inputs)
        return o, S, *torch.autograd.grad(o, inputs, weight.to(o.dtype))

    print(f"{f'{B}, {T}, {H}, {K}':>16s}", end="")
    wide = [x.detach().double().requires_grad_() for x in inputs]
    truth = forward_backward(lambda *x: delta_rule(*x, backend="torch"), wide)
    for name, scan in scans.items():
        n = 1 if name == "loop" else runs
        with torch.no_grad():
            forward = median_ms(lambda: scan(*inputs), n)
        both = median_ms(lambda: forward_backward(scan, inputs), n)
        error = max(errors(forward_backward(scan, inputs), truth))
        print(f"{forward:9.3g} |{both:8.3g} {error:6.0e}", end="", flush=True)
    x = torch.empty(2 ** 26, dtype=torch.uint8, device=device)
    seconds_a_byte = median_ms(lambda: x.clone(), runs) / 1e3 / (2 * x.nbytes)
    ms = 1e3 * seconds_a_byte * (sum(x.nbytes for x in inputs) + inputs[2].nbytes)   # read all, write o
    print(f"{ms:9.2g} |{3 * ms:8.2g}")                    # and all, do and the gradients on the way back


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend, why = resolve_backend(device=device)
    print(f"device {device}; backend {backend}: {why}\n\nlargest errors against the loop in float64")
    print(f"{'backend, dtype, K, V':24s}" + "".join(f"{name:>9s}" for name in TENSORS))
    check(device, "torch", torch.float32)
    if backend == "triton":
        for K, V, dtype in itertools.product((16, 32, 64, 128), (16, 128), (torch.float32, torch.bfloat16)):
            check(device, "triton", dtype, K, V)

    print("\nerror of the state after 65,536 reflections along one key, worst of 16 keys")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(device, dtype) for x in example("identical", 1, 65536, 16, 16, 4)]
        with torch.no_grad():
            truth = delta_rule(*(x.double() for x in inputs), backend="torch")[1][0]
            found = delta_rule(*inputs, backend=backend)[1][0]
        print(f"{backend} {str(dtype)[6:]:10s} {max(errors(found, truth)):.0e}")

    dtype, shapes = torch.float32, ((8, 512, 4, 32), (64, 256, 4, 32), (8, 2048, 4, 32), (16, 512, 4, 64),
                                    (16, 681, 1, 64))
    scans = {name: functools.partial(delta_rule, backend=name) for name in ("loop", "torch")}
    if backend == "triton":
        dtype, shapes = torch.bfloat16, ((8, 1024, 8, 64), (32, 256, 4, 32), (64, 512, 4, 32),
                                         (8, 2048, 8, 128), (1, 16384, 16, 64), (2, 8192, 16, 128))
        scans["triton"] = functools.partial(delta_rule, backend="triton")
    print(f"\n{dtype}, {torch.get_num_threads()} threads: ms forward | forward + backward, error")
    print(f"{'B, T, H, K':>16s}" + "".join(f"{name:>26s}" for name in scans) + f"{'bytes alone':>19s}")
    for shape in shapes:
        clock(device, shape, scans, dtype)


if __name__ == "__main__":
    main()
