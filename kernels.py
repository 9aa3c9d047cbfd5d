"""
The scans: how a linear RNN moves its state, first as a loop that cannot be misread, then in chunks.

The delta rule, per head, on a state S (K x V), with beta_t in [0, 2] and a gate g_t = exp(log g_t) in (0, 1]:

    S_t = g_t S_{t-1} + b_t k_t (v_t - g_t S_{t-1}^T k_t)^T        o_t = S_t^T q_t        b_t = beta_t / |k_t|^2

i.e. S_t = (I - beta_t k_t k_t^T / k_t^T k_t) g_t S_{t-1} + b_t k_t v_t^T. The bracket is a projector form: its eigenvalues
are 1 (K-1 times) and 1 - beta_t, whatever the length of k_t. At beta = 2 it is a Householder reflection: it swaps two
stored values and loses nothing. Without the division by |k_t|^2, a key that was rounded to bf16 has |k|^2 = 1.005, the
eigenvalue is not -1, and after thousands of steps the state has exploded or died.

Symbols: B batch, T time, H heads, K key dim, V value dim, C chunk length, N chunks. Layout (B, T, H, K) everywhere.

    delta_rule(..., backend="loop")    the truth: one step at a time, any dtype
    delta_rule(..., backend="torch")   chunks of C steps, hand-written backward, any device
    decay_scan(...)                    the diagonal cousin S_t = a_t S_{t-1} + k_t v_t^T, for linear attention and SSMs

Check and time them:   python kernels.py

Sources: the delta rule in chunks is Yang et al., arXiv 2406.06484; the gate is arXiv 2412.06464; eigenvalues down to -1
are Grazzi et al., arXiv 2411.12537.
"""
import argparse
import math
import time

import torch
import torch.nn.functional as F

LOG_MIN = -30.0  # log-gates are clamped here: e^-30 forgets everything, and cumulative sums stay accurate


# ----------------------------------------------------------------------------------------------------------------
# The truth

def delta_rule_loop(q, k, v, beta, g, S):
    """The recurrence above, one step at a time, in the dtype of its arguments; autograd does the backward.
    unbind, not x[:, t]: the backward of an index writes a whole (B, T, H, K) tensor per step."""
    norm2 = (k * k).sum(-1)
    b = torch.where(norm2 > 0, beta / norm2.where(norm2 > 0, 1), 0)  # a zero key writes nothing
    outputs = []
    gates = [None] * q.shape[1] if g is None else g.exp().unbind(1)
    for q_t, k_t, v_t, b_t, g_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), b.unbind(1), gates):
        if g_t is not None:
            S = g_t[..., None, None] * S                             # (B, H, K, V)
        d_t = b_t[..., None] * (v_t - (k_t[..., None, :] @ S)[..., 0, :])  # (B, H, V)  v minus what S says for k
        S = S + k_t[..., None] * d_t[..., None, :]
        outputs.append((q_t[..., None, :] @ S)[..., 0, :])
    return torch.stack(outputs, 1), S


# ----------------------------------------------------------------------------------------------------------------
# Chunks of C steps
#
# Within a chunk that starts at state S, step i writes b_i k_i d_i^T with d_i = b_i (v_i - S_{i-1}^T k_i), and S_{i-1}
# is S plus what steps j < i wrote. So the rows d_i solve a triangular system, and everything else is a product:
#
#     A = tril(diag(b) K K^T, -1)    M = (I + A)^-1    X = V - K S    D = M diag(b) X
#     O = Q S + P D                  P = tril(Q K^T)                  S' = S + K^T D
#
# With a gate, c = cumsum(log g) inside the chunk, gamma = exp(c) decays from the chunk's start, rho = exp(c_C - c) to its
# end, and R_ij = exp(c_i - c_j) between two steps: A and P are multiplied by R, K becomes gamma K where it meets S, and
# rho K where it makes S'. Names in the code: K_in = gamma K, Q_in = gamma Q, K_out = rho K.
#
# Only X, D and S' must wait for the chunk before; the rest is computed for all chunks at once.
# The backward runs the same chain from the last chunk to the first. With dO and dS' given:
#
#     dD = P^T dO + K_out dS'    dX = dV = diag(b) M^T dD    dS = gamma_C dS' + Q_in^T dO - K_in^T dX
#     dP = R * (dO D^T)          dA = -tril(dY D^T, -1), dY = M^T dD     (no M^T dM M^T is needed: D = M (b X))
#     dQ = gamma (dO S^T) + dP K
#     dK = dP^T Q + rho (D dS'^T) - gamma (dX S^T) + (G + G^T) K,  G_ij = b_i dA_ij R_ij
#     db = sum_V (dY * X) + sum_j (dA * R * K K^T)_ij

def to_chunks(x, C):
    """(B, T, H, ...) -> (N, B*H, C, ...), zero-padded: a step with b = 0, log g = 0 leaves the state alone."""
    B, T, H = x.shape[:3]
    N = -(-T // C)
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
    x = x.reshape(B, N, C, H, *x.shape[3:]).transpose(2, 3).transpose(0, 1)  # (N, B, H, C, ...)
    return x.reshape(N, B * H, C, *x.shape[4:])


def from_chunks(x, B, T):
    """(N, B*H, C, ...) -> (B, T, H, ...), the inverse of to_chunks."""
    N, BH, C = x.shape[:3]
    x = x.reshape(N, B, BH // B, C, *x.shape[3:]).transpose(0, 1).transpose(2, 3)
    return x.reshape(B, N * C, BH // B, *x.shape[4:])[:, :T]


def decays(c):
    """Cumulative log-gates c (N, BH, C) -> gamma, rho (N, BH, C, 1), gamma_C (N, BH, 1, 1), R (N, BH, C, C)."""
    later = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool, device=c.device).tril()
    R = (c[..., :, None] - c[..., None, :]).masked_fill(~later, -torch.inf).exp()  # mask first: exp could overflow
    last = c[..., -1:]
    return c.exp()[..., None], (last - c).exp()[..., None], last.exp()[..., None], R


class DeltaRuleChunks(torch.autograd.Function):
    """The block above, line by line. All arguments share one dtype; g is None or log-gates; C is the chunk length."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, C):
        B, T, H, K = k.shape
        Q, K_, V, beta_, c = (None if x is None else to_chunks(x, C) for x in (q, k, v, beta, g))
        S = state.reshape(B * H, K, -1)
        KK, QK = K_ @ K_.mT, Q @ K_.mT                                   # (N, BH, C, C)
        norm2 = KK.diagonal(dim1=-2, dim2=-1)  # from the product that makes A: both carry the same rounding, so
        alive = norm2 > 0                      # the state is off by 1e-5, not 1e-2, after 65,536 reflections
        b = torch.where(alive, beta_ / norm2.where(alive, 1), 0)
        K_in, Q_in, K_out, gamma, rho, gamma_C, R = K_, Q, K_, None, None, None, None
        A, P = (b[..., None] * KK).tril(-1), QK.tril()
        if g is not None:
            c = c.clamp(min=LOG_MIN).cumsum(-1)
            gamma, rho, gamma_C, R = decays(c)
            K_in, Q_in, K_out, A, P = gamma * K_, gamma * Q, rho * K_, R * A, R * P
        eye = torch.eye(C, dtype=A.dtype, device=A.device).expand_as(A)
        M = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        Mb = M * b[..., None, :]

        starts, X, D = [], torch.empty_like(V), torch.empty_like(V)
        for n in range(len(V)):
            starts.append(S)
            torch.baddbmm(V[n], K_in[n], S, alpha=-1, out=X[n])
            torch.bmm(Mb[n], X[n], out=D[n])
            S = torch.baddbmm(S if g is None else gamma_C[n] * S, K_out[n].mT, D[n])
        starts = torch.stack(starts)                                     # (N, BH, K, V)
        O = Q_in @ starts + P @ D
        ctx.save_for_backward(Q, K_, V, beta_, b, alive, norm2, KK, P, M, X, D, starts, gamma, rho, gamma_C, R)
        ctx.sizes = B, T, state.shape
        return from_chunks(O, B, T), S.reshape(state.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        Q, K, V, beta, b, alive, norm2, KK, P, M, X, D, S, gamma, rho, gamma_C, R = ctx.saved_tensors
        B, T, state_shape = ctx.sizes
        gated = gamma is not None
        K_in, Q_in, K_out = (gamma * K, gamma * Q, rho * K) if gated else (K, Q, K)
        dO, dS = to_chunks(do, K.shape[2]), dS.reshape(S.shape[1:])
        PdO, QdO = P.mT @ dO, Q_in.mT @ dO                               # (N, BH, C, V), (N, BH, K, V)

        ends, dY, dX = [], torch.empty_like(V), torch.empty_like(V)
        for n in reversed(range(len(V))):
            ends.append(dS)                                              # dS' of chunk n
            dD = torch.baddbmm(PdO[n], K_out[n], dS)
            torch.bmm(M[n].mT, dD, out=dY[n])
            torch.mul(b[n, ..., None], dY[n], out=dX[n])
            dS = torch.baddbmm(QdO[n] + (gamma_C[n] * dS if gated else dS), K_in[n].mT, dX[n], alpha=-1)
        ends = torch.stack(ends[::-1])

        dP, dA = (dO @ D.mT).tril(), -(dY @ D.mT).tril(-1)
        if gated:
            dP, dA = R * dP, R * dA
        dQ, dK, dKX = dO @ S.mT, D @ ends.mT, dX @ S.mT
        if gated:
            dQ, dK, dKX = gamma * dQ, rho * dK, gamma * dKX
        dQ += dP @ K
        G = b[..., None] * dA
        dK += dP.mT @ Q + (G + G.mT) @ K - dKX
        db = (dY * X).sum(-1) + (dA * KK).sum(-1)
        norm2 = norm2.where(alive, 1)
        dbeta = torch.where(alive, db / norm2, 0)                        # the chain through b = beta / |k|^2
        dK -= (2 * beta * dbeta / norm2)[..., None] * K
        dg = None
        if gated:  # every way a log-gate acts is also a way of scaling q, k or v: dc follows from their gradients
            dc = (Q * dQ - K * dK).sum(-1) - 2 * (V * dX).sum(-1)
            S_end = gamma_C * S + K_out.mT @ D
            dc[..., -1] += (S_end * ends).sum((-2, -1))
            dg = from_chunks(dc.flip(-1).cumsum(-1).flip(-1), B, T)
        dq, dk, dv, dbeta = (from_chunks(x, B, T) for x in (dQ, dK, dX, dbeta))
        return dq, dk, dv, dbeta, dg, dS.reshape(state_shape), None


# ----------------------------------------------------------------------------------------------------------------
# The diagonal cousin, in chunks; simple enough to leave the backward to autograd

def decay_scan(q, k, v, a=None, state=None, chunk=32):
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t. Linear attention (a = None, i.e. 1) and Mamba-2's recurrence.

    Shapes, dtypes and results as in `delta_rule`; a (B, T, H) in [-1, 1]: its size travels as a logarithm, its sign
    beside it. |a| below e^-30 counts as e^-30."""
    B, T, H, K = k.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        S = v.new_zeros(B * H, K, v.shape[-1], dtype=dtype) if state is None else state.to(dtype).flatten(0, 1)
        C = min(chunk, T)
        Q, K_, V = (to_chunks(x.to(dtype), C) for x in (q, k, v))
        P, K_out, Q_in, a_C = (Q @ K_.mT).tril(), K_, Q, [1] * len(V)
        if a is not None:
            a_ = to_chunks(a.to(dtype) - 1, C) + 1                       # padded with a = 1: leaves the state alone
            gamma, rho, gamma_C, R = decays(a_.abs().clamp(min=math.exp(LOG_MIN)).log().cumsum(-1))
            sign = torch.where(a_ < 0, -1.0, 1.0).to(dtype).cumprod(-1)[..., None]  # (N, BH, C, 1)
            last = sign[..., -1:, :]
            P, Q_in = P * R * sign * sign.mT, Q * gamma * sign
            K_out, a_C = K_ * rho * sign * last, gamma_C * last
        writes, starts = K_out.mT @ V, []
        for n in range(len(V)):
            starts.append(S)
            S = a_C[n] * S + writes[n]
        O = Q_in @ torch.stack(starts) + P @ V
    return from_chunks(O, B, T).to(v.dtype), S.unflatten(0, (B, H))


# ----------------------------------------------------------------------------------------------------------------
# The one door to all of them

BACKENDS = ("loop", "torch")


def resolve_backend(backend="auto"):
    """-> (backend, why), for the run's first lines."""
    return ("torch", "chunked PyTorch runs on every device") if backend == "auto" else (backend, "as asked")


def delta_rule(q, k, v, beta, g=None, state=None, chunk=None, backend="auto"):
    """The (gated) delta rule of this file's first lines, with eigenvalues 1 - beta.

    q, k (B, T, H, K), v (B, T, H, V), beta (B, T, H) in fp64, fp32, bf16 or fp16; any T >= 1; K and V may differ.
    g: None or log-gates (B, T, H) <= 0, clamped at -30. state: None (zeros) or (B, H, K, V). chunk: a chunk length, or
    None for a good one. backend: "auto", "loop" or "torch".
    Returns o (B, T, H, V) in v's dtype and the last state (B, H, K, V). Sums and state are kept in fp32 (in fp64 where
    v is fp64), also under autocast. Differentiable in every tensor. Raises ValueError on shapes that do not fit.
    """
    B, T, H, K = k.shape
    for name, x, shape in (("q", q, (B, T, H, K)), ("v", v, (B, T, H, v.shape[-1])), ("beta", beta, (B, T, H)),
                           ("g", g, (B, T, H)), ("state", state, (B, H, K, v.shape[-1]))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} is {tuple(x.shape)}, but k {tuple(k.shape)} asks for {shape}")
    backend, _ = resolve_backend(backend)
    if backend not in BACKENDS:
        raise ValueError(f"backend '{backend}': choose auto, {' or '.join(BACKENDS)}")
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        q_, k_, v_, beta_, g, S = (None if x is None else x.to(dtype) for x in (q, k, v, beta, g, state))
        if S is None:
            S = v_.new_zeros(B, H, K, v.shape[-1])
        if backend == "loop":
            o, S = delta_rule_loop(q_, k_, v_, beta_, g if g is None else g.clamp(min=LOG_MIN), S)
        else:
            C = chunk or min(16 if K <= 16 else 32, T)
            o, S = DeltaRuleChunks.apply(q_, k_, v_, beta_, g, S, C)
    return o.to(v.dtype), S
