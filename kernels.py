"""
The scans: how a linear RNN moves its state. First a loop that cannot be misread, then chunks of many steps.

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
    decay_scan(...)                    the diagonal cousin S_t = a_t S_{t-1} + k_t v_t^T

Check and time them:   python kernels.py

Sources: chunks, Yang et al. 2406.06484; the gate, Yang et al. 2412.06464; eigenvalues down to -1, Grazzi et
al. 2411.12537. Not here: layers (models.py).
"""
import math
import sys
import time

import torch
import torch.nn.functional as F

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
        # |k|^2 is taken from the product that makes A, and A divides by it before anything else: for equal keys
        # it is beta to the last bit, and 65,536 reflections in fp32 cost 1e-5 of the state instead of 1e-2
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
# One door to all of them

BACKENDS = ("loop", "torch")


def resolve_backend(backend="auto"):
    """-> the backend that `backend` means here, and why."""
    return ("torch", "chunks, on any device") if backend == "auto" else (backend, "as asked")


def delta_rule(q, k, v, beta, g=None, state=None, chunk=None, backend="auto"):
    """The delta rule of this file's first lines.

    q, k (B, T, H, K), v (B, T, H, V), beta (B, T, H), in fp64, fp32, bf16 or fp16; any T >= 1. g: None, or
    log-gates (B, T, H) <= 0, clamped at -30. state: None for zeros, or (B, H, K, V). chunk: steps a chunk,
    None for a good number. backend: "auto", "loop" or "torch". Returns o (B, T, H, V) in v's dtype, and the
    last state (B, H, K, V). Sums and state are fp32 (fp64 if v is), also under autocast. Differentiable in
    every tensor. Raises ValueError for shapes that do not fit."""
    B, T, H, K = k.shape
    V = v.shape[-1]
    for name, x, shape in (("q", q, (B, T, H, K)), ("v", v, (B, T, H, V)), ("beta", beta, (B, T, H)),
                           ("g", g, (B, T, H)), ("state", state, (B, H, K, V))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} is {tuple(x.shape)}, but beside k {tuple(k.shape)} it must be {shape}")
    backend, _ = resolve_backend(backend)
    if backend not in BACKENDS:
        raise ValueError(f"backend '{backend}': choose auto, {' or '.join(BACKENDS)}")
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        q, k, x, beta = (x.to(dtype) for x in (q, k, v, beta))
        g = g if g is None else g.to(dtype).clamp(min=LOG_MIN)
        S = x.new_zeros(B, H, K, V) if state is None else state.to(dtype)
        if backend == "loop":
            o, S = delta_rule_loop(q, k, x, beta, g, S)
        else:
            o, S = DeltaRuleChunks.apply(q, k, x, beta, g, S, min(chunk or (16 if K <= 16 else 32), T))
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

def example(kind, B=2, T=100, H=2, K=16, V=16, dtype=torch.float64, seed=0):
    """Inputs q, k, v, beta that a scan must survive. kind: random, unnormalised, identical (keys, beta 2:
    parity), transpositions (keys e_i - e_j, beta 2: swaps of five values), zero (beta 0)."""
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
    f()                                                                  # the first call pays for memory
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - start)
    return 1e3 * sorted(seconds)[runs // 2]


def main():
    print("relative error of the torch backend in fp32 against the loop in float64, at T = 1000:")
    print(f"{'':16s}{'o':>9s}{'state':>9s}{'dq':>9s}{'dk':>9s}{'dv':>9s}{'dbeta':>9s}")
    for kind in ("random", "unnormalised", "identical", "transpositions", "zero"):
        inputs = [x.float() for x in example(kind, T=1000)]
        truth = with_gradients([x.double() for x in inputs], "loop")
        found = errors(with_gradients(inputs, "torch"), truth)
        print(f"{kind:16s}" + "".join(f"{error:9.0e}" for error in found))
        if max(found) > 1e-5:
            sys.exit(f"kernels.py: {kind} keys: the torch backend is off by more than 1e-5")

    print(f"\nms, forward | forward + backward, fp32, {torch.get_num_threads()} threads, median of 5:")
    print(f"{'B, T, H, K':>16s}{'loop':>16s}{'torch':>16s}{'loop / torch':>16s}")
    shapes = ((8, 512, 4, 32), (64, 256, 4, 32), (8, 2048, 4, 32), (16, 512, 4, 64), (16, 681, 1, 64))
    for B, T, H, K in shapes:
        inputs = [x.requires_grad_() for x in example("random", B, T, H, K, K, torch.float32)]

        def forward_backward(backend):
            outputs = delta_rule(*inputs, backend=backend)
            torch.autograd.grad(outputs, inputs, outputs)

        ms = {}
        for backend in BACKENDS:
            with torch.no_grad():
                forward = median_ms(lambda: delta_rule(*inputs, backend=backend), 5)
            ms[backend] = forward, median_ms(lambda: forward_backward(backend), 5)
        ratio = [a / b for a, b in zip(ms["loop"], ms["torch"])]
        print(f"{f'{B}, {T}, {H}, {K}':>16s}" +
              "".join(f"{a:8.0f} |{b:6.0f}" for a, b in (ms["loop"], ms["torch"])) +
              f"{ratio[0]:8.1f} |{ratio[1]:6.1f}")


if __name__ == "__main__":
    main()
