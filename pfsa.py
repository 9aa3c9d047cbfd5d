"""
Hidden branches: what can be known of a state that nobody shows, to the last bit.

Real code branches on what a trace does not print. A reader is left with a *belief*, a probability for every
state, which moves with each line and sharpens with each reveal. P1 (section 5) calls the automaton behind it
PFSA-SR, a probabilistic finite-state automaton with state reveals, and argues that linear RNNs must struggle
with it: a belief is renormalised at each reveal, and a linear recurrence cannot divide. Here is what it takes
to find out: the automata, the exact Bayes filter, and the filters that a linear RNN could hope for.

    b <- T_s Z_s b / |Z_s b|_1         Z_s b: condition on what symbol s reveals;   T_s: then move

T_s (m, m) is column-stochastic, T_s[i, j] = P(next is i | now j, s). Z_s (m,) is 0/1: where s can occur.

Who chooses the symbol? If the environment picks among those that the state allows, its choice tells
something, and the formula is wrong (`python pfsa.py` shows a counterexample). So the environment draws a
*query* without looking at the state: a set of symbols whose Z sum to one. The symbol is the one that fits.
`print(b)` is such a query and its possible outputs are the symbols; "maybe swap" is a query with one symbol.
Then |Z_s b|_1 is exactly P(s | query, past), and -log of it is the least loss that any model can have there.
P1 leaves this open.

Symbols: m states, n things to arrange (m = n!), B sequences, L symbols in each.
P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs", section 5 and appendix B.

Look at the worked examples:   python pfsa.py

Not here: the text of these traces (data.py), models that learn them (train.py).
"""
import time
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import torch


# ----------------------------------------------------------------------------------------------------------
# The automaton and its exact filter

class PFSA:
    """T (symbols, m, m), Z (symbols, m), q0 a state or a distribution (m,), in floats or in Fractions.
    queries: lists of symbols, needed to sample. Raises ValueError for what is not an automaton."""

    def __init__(self, T, Z, q0, queries=None):
        T = np.asarray(T)
        exact = any(isinstance(x, Fraction) for x in T.flat)              # then all of it, also 0 and 1
        as_number = np.vectorize(Fraction, otypes=[object]) if exact else lambda x: np.array(x, float)
        self.T, self.Z = as_number(T), np.array(Z, int)
        if self.T.ndim != 3 or self.T.shape[1] != self.T.shape[2] or self.Z.shape != self.T.shape[:2]:
            raise ValueError(f"T {self.T.shape}, Z {self.Z.shape}: give (symbols, m, m) and (symbols, m)")
        self.n_symbols, self.m = self.Z.shape
        if np.ndim(q0) == 0:
            if not 0 <= q0 < self.m:
                raise ValueError(f"q0 {q0}: give one of the {self.m} states, or a distribution over them")
            q0 = [int(i == q0) for i in range(self.m)]
        self.q0 = as_number(q0)
        for name, x in (("T, each column", self.T.sum(1)), ("q0", self.q0.sum(keepdims=True))):
            if np.abs(np.asarray(x, float) - 1).max() > 1e-9:
                raise ValueError(f"{name}: must sum to 1")
        if self.q0.shape != (self.m,) or (self.q0 < 0).any() or (self.T < 0).any():
            raise ValueError(f"T and q0 are probabilities, 0 or more, and q0 has {self.m} of them")
        if not np.isin(self.Z, (0, 1)).all() or not self.Z.any(1).all():
            raise ValueError("Z: give 0 or 1, and for each symbol at least one state in which it can occur")
        self.queries = None if queries is None else [list(query) for query in queries]
        for i, query in enumerate(self.queries or []):
            if not query or not set(query) <= set(range(self.n_symbols)) or (self.Z[query].sum(0) != 1).any():
                raise ValueError(f"query {i}, {query}: in every state, exactly one of its symbols must fit")

    def check(self, symbols):
        symbols = np.asarray(symbols)
        if symbols.ndim != 2 or not np.issubdtype(symbols.dtype, np.integer):
            raise ValueError(f"symbols: give integers (B, L), not {symbols.dtype} {symbols.shape}")
        if symbols.size and not (0 <= symbols.min() and symbols.max() < self.n_symbols):
            raise ValueError(f"symbols: this automaton has {self.n_symbols}, numbered from 0")
        return symbols

    def filter(self, symbols):
        """Symbols (B, L) -> beliefs (B, L+1, m), before each symbol and after the last; log P(symbol | query,
        past) (B, L) float64. Raises ValueError, naming sequence and step, where a symbol is impossible.

        The belief is divided by its sum at each step, so that no length is too long. What falls below 1e-308
        of it counts as impossible; give Fractions where that matters."""
        symbols = self.check(symbols)
        B, L = symbols.shape
        beliefs, log_p = np.empty((B, L + 1, self.m), self.T.dtype), np.zeros((B, L))
        beliefs[:, 0] = self.q0
        for t in range(L):
            kept = self.Z[symbols[:, t]] * beliefs[:, t]                  # (B, m)
            mass = kept.sum(1, keepdims=True)
            if (mass == 0).any():
                b = int((mass[:, 0] == 0).argmax())
                raise ValueError(f"sequence {b}, step {t}: symbol {symbols[b, t]} cannot occur there")
            log_p[:, t] = np.log(mass[:, 0].astype(float))
            beliefs[:, t + 1] = (self.T[symbols[:, t]] @ (kept / mass)[..., None])[..., 0]
        return beliefs, log_p

    def sample(self, rng, B, L, queries=None):
        """-> symbols (B, L), states (B, L+1) int64. queries: indices (L,) or (B, L), None: drawn evenly."""
        if self.queries is None:
            raise ValueError("sample: this automaton was made without queries, so nobody asks for symbols")
        if queries is None:
            queries = rng.integers(len(self.queries), size=(B, L))
        queries = np.broadcast_to(queries, (B, L))
        fits = np.array([[next(s for s in query if self.Z[s, q]) for q in range(self.m)]
                         for query in self.queries])                      # (queries, m): the symbol that fits
        moves = self.T.astype(float).cumsum(1)                            # (symbols, m, m), columns to 1
        symbols, states = np.empty((B, L), np.int64), np.empty((B, L + 1), np.int64)
        draw = rng.random((B, L + 1, 1))
        states[:, 0] = np.minimum((draw[:, 0] > self.q0.astype(float).cumsum()).sum(1), self.m - 1)
        for t in range(L):
            symbols[:, t] = fits[queries[:, t], states[:, t]]
            column = moves[symbols[:, t], :, states[:, t]]                # (B, m)
            states[:, t + 1] = np.minimum((draw[:, t + 1] > column).sum(1), self.m - 1)
        return symbols, states


# ----------------------------------------------------------------------------------------------------------
# What a linear recurrence can do

def linear_filter(pfsa, symbols, dtype=torch.float64, resets=()):
    """Deferred normalisation: h <- T Z h, to be divided by its sum only where it is read. Symbols (B, L) -> h
    (B, L+1, m) in `dtype`, a torch one; every product and every sum is rounded to it.

    Each reveal multiplies the mass of h by its probability, and nothing restores it: see `dies_at`. But after
    a symbol in `resets`, all of whose columns of T are equal, nothing of the past is left, and a gate can say
    so: h <- 0 h + that column."""
    symbols = torch.tensor(pfsa.check(symbols))
    TZ = torch.tensor((pfsa.T * pfsa.Z[:, None, :]).astype(float)).to(dtype)
    h = [torch.tensor(pfsa.q0.astype(float)).to(dtype).expand(len(symbols), -1)]
    for s in symbols.unbind(1):
        moved = torch.zeros_like(h[0])
        for j in range(pfsa.m):
            moved = moved + TZ[s, :, j] * h[-1][:, j:j + 1]
        h.append(torch.where(torch.isin(s, torch.tensor(list(resets)))[:, None], TZ[s, :, 0], moved))
    return torch.stack(h, 1)


def dies_at(dtype):
    """After how many reveals of probability 1/2 a mass of 1 is 0 in this dtype, by its format: the smallest
    number is tiny * eps, and half of that is rounded to the even one of its neighbours, 0."""
    info = torch.finfo(dtype)
    return round(-np.log2(info.tiny) - np.log2(info.eps)) + 1


def marginal_filter(n, symbols, p=0.5):
    """The n x n state of P1 section 5.2, for `maybe_swaps(n, p)`: H_ij stands for P(position i holds j).
    Symbols (B, L) -> H (B, L+1, n, n). Start: the unit matrix. Maybe swap: mix two rows. Reveal that i holds
    j: clear that row and that column and put a 1 where they cross. It is linear, and even in exact arithmetic
    it is not the marginal of the belief; `sinkhorn` makes of it what can be made."""
    symbols, pairs = np.asarray(symbols), list(combinations(range(n), 2))
    B, L = symbols.shape
    H = np.broadcast_to(np.eye(n), (B, L + 1, n, n)).copy()
    for t, s in ((t, s) for t in range(L) for s in np.unique(symbols[:, t])):
        these = symbols[:, t] == s
        now = H[these, t]                                                 # a copy
        if s < len(pairs):
            rows = list(pairs[s])
            now[:, rows] = (1 - p) * now[:, rows] + p * now[:, rows[::-1]]
        else:
            i, j = divmod(s - len(pairs), n)
            now[:, i], now[:, :, j] = 0, 0
            now[:, i, j] = 1
        H[these, t + 1] = now
    return H


def sinkhorn(H, rounds=1000, tolerance=1e-9):
    """Scale rows and columns of H (..., n, n) by turns until all sum to 1 (Sinkhorn and Knopp). -> the
    result, never NaN, and ok (...,): False where it has not got there, or where a row or column was zero, as
    after an underflow, which nothing can scale; 1/n is put there first."""
    H, n = np.array(H, float), np.shape(H)[-1]
    alive = (H.sum(-1) > 0).all(-1) & (H.sum(-2) > 0).all(-1)
    for _ in range(rounds):
        for axis in (-1, -2):
            total = H.sum(axis, keepdims=True)
            H = np.where(total > 0, H / np.where(total > 0, total, 1), 1 / n)
        there = (np.abs(H.sum(-1) - 1) < tolerance).all(-1)
        if there.all():
            break
    return H, alive & there


# ----------------------------------------------------------------------------------------------------------
# Automata

def maybe_swaps(n, p=0.5):
    """n things in n positions, in order at first. Symbols: for each pair of positions "they swap with
    probability p" (a query of its own), then for each position i and thing j "i holds j" (n to a query). Its
    states are `arrangements(n)`; `swap` and `holds` give the symbols' numbers."""
    states, pairs = arrangements(n), list(combinations(range(n), 2))
    place, eye = {state: i for i, state in enumerate(states)}, np.eye(len(states), dtype=int)
    T, Z = [], []
    for a, b in pairs:
        swapped = np.zeros_like(eye)
        for state, column in place.items():
            other = list(state)
            other[a], other[b] = state[b], state[a]
            swapped[place[tuple(other)], column] = 1
        T.append((1 - p) * eye + p * swapped)
        Z.append(np.ones(len(states), int))
    for i, j in np.ndindex(n, n):
        T.append(eye + 0 * p)
        Z.append([int(state[i] == j) for state in states])
    queries = [[s] for s in range(len(pairs))] + [[holds(n, i, j) for j in range(n)] for i in range(n)]
    return PFSA(np.array(T), Z, place[tuple(range(n))], queries)


def arrangements(n):
    """The n! states of `maybe_swaps`, as tuples: what position 0, 1, ... holds."""
    return list(permutations(range(n)))


def swap(n, a, b):
    return list(combinations(range(n), 2)).index((min(a, b), max(a, b)))


def holds(n, i, j):
    return n * (n - 1) // 2 + n * i + j


def marginals(beliefs, n):
    """Beliefs (..., n!) over `arrangements(n)` -> (..., n, n), P(position i holds j)."""
    one_hot = np.eye(n)[np.array(arrangements(n))]                        # (n!, n, n)
    return np.tensordot(np.asarray(beliefs, float), one_hot, 1)


SCHEDULES = "random", "periodic", "none", "adversarial", "forced"


def schedule(rng, n, B, L, kind="random", every=2):
    """-> queries (B, L) for `maybe_swaps(n)`. random: L // every of them are prints, at random places, the
    same in all B. periodic: each `every`-th is. none: swaps only. What is swapped and printed is drawn
    evenly. adversarial: swap the last two, print the first of these, and again. forced: for P1 Figure 10,
    which shows `nothing_swapped`; the same, and the last two lines print the one and the other."""
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind}: choose one of {', '.join(SCHEDULES)}")
    swaps, t = n * (n - 1) // 2, np.arange(L)
    swapped, printed = rng.integers(swaps, size=(B, L)), rng.integers(n, size=(B, L))
    if kind in ("adversarial", "forced"):
        swapped, printed = swap(n, n - 2, n - 1), np.full(L, n - 2)
    prints = {"random": rng.permutation(L) < L // every, "periodic": t % every == every - 1, "none": t < 0,
              "adversarial": t % 2 == 1, "forced": (t % 2 == 1) | (t >= L - 2)}[kind]
    if kind == "forced":
        printed[-1] = n - 1
    return np.broadcast_to(np.where(prints, swaps + printed, swapped), (B, L))


def nothing_swapped(n, queries):
    """What is seen where no maybe swap ever swaps: queries of `maybe_swaps(n)` -> symbols, i holds i."""
    i = queries - n * (n - 1) // 2
    return np.where(i < 0, queries, holds(n, i, i))


def figure_9():
    """P1 Figure 9, its states 1 to 3 numbered from 0: 0 is absorbing, 1 and 2 go there with probability 1/2.
    Symbols: step; "it is 1 or 2"; "it is 0". Starts in 1."""
    half = Fraction(1, 2)
    step = [[1, half, half], [0, half, 0], [0, 0, half]]
    return PFSA([step, np.eye(3, dtype=int), np.eye(3, dtype=int)], [[1, 1, 1], [0, 1, 1], [1, 0, 0]], 1,
                [[0], [1, 2]])


def appendix_b():
    """P1 appendix B: arrangements of three in the order 123, 213, 321, 132, 231, 312, from 123. Symbols: "try
    swap 1-2", half of the times it swaps 1-3 instead; "position 1 holds 1", "... 2", "... 3"."""
    order, half = ["123", "213", "321", "132", "231", "312"], Fraction(1, 2)
    T = np.full((6, 6), Fraction(0))
    for column, (a, b, c) in enumerate(order):
        T[order.index(b + a + c), column] += half
        T[order.index(c + b + a), column] += half
    holds_first = [[int(state[0] == digit) for state in order] for digit in "123"]
    return PFSA([T, *[np.eye(6, dtype=int)] * 3], [[1] * 6, *holds_first], 0, [[0], [1, 2, 3]])


def random_automaton(rng, m, n_moves, n_queries):
    """A random automaton of m states: one-symbol queries that move at random (a third of the moves cannot
    happen), then queries that reveal which part of a random partition the state is in, and move as well."""
    T, Z, queries = [], [], []
    for i in range(n_moves + n_queries):
        parts = np.zeros(m, int) if i < n_moves else rng.integers(rng.integers(2, m + 1), size=m)
        queries.append(range(len(Z), len(Z) + len(set(parts))))
        for part in sorted(set(parts)):
            weight = rng.random((m, m)) * (rng.random((m, m)) > 1 / 3) + 1e-3 * np.eye(m)
            T.append(weight / weight.sum(0))
            Z.append(parts == part)
    return PFSA(T, Z, rng.dirichlet(np.ones(m)), queries)


# ----------------------------------------------------------------------------------------------------------
# python pfsa.py: the worked examples, number by number

def main():
    def show(b):
        return "[" + ", ".join(str(x) for x in b) + "]"

    print("P1 appendix B. S3, states 123 213 321 132 231 312; try swap 1-2, then position 1 holds 3:")
    b, log_p = appendix_b().filter([[0, 3]])
    for belief in b[0]:
        print("   ", show(belief))
    print(f"    P(position 1 holds 3) = {np.exp(log_p[0, 1]):.2g}; so h = T Z h keeps [0, 0, 1/2, 0, 0, 0]")
    print(f"    a hundred reveals of probability 0.9 leave a mass of 0.9^100 = {0.9 ** 100:.3g}\n")

    print("P1 Figure 9. Step, reveal {2, 3}, ...: what the exact filter believes, and the linear one's mass:")
    steps = [[0, 1] * 4]
    beliefs, mass = figure_9().filter(steps)[0][0], linear_filter(figure_9(), steps)[0].sum(1)
    print("   ", "  ".join(show(belief) for belief in beliefs[::2]))
    print("   ", "  ".join(str(Fraction(x)) for x in mass[::2].tolist()))

    print("\nP1 Figure 10, n = 3. Maybe swap 2 and 3, reveal that 2 holds 2, ...: H_33, what Sinkhorn makes")
    print("of it, and the exact P(3 holds 3):")
    steps = [[swap(3, 1, 2), holds(3, 1, 1)] * 4]
    H, exact = marginal_filter(3, steps)[0], marginals(maybe_swaps(3).filter(steps)[0][0], 3)
    for x in (H, sinkhorn(H)[0], exact):
        print("   ", " ".join(f"{y:6.4g}" for y in x[::2, 2, 2]))

    print("\nReveals of probability 1/2 until the linear filter's mass is 0: by format, Figure 9, Figure 10")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        dead = []
        for automaton, pair in ((figure_9(), [0, 1]), (maybe_swaps(3), steps[0][:2])):
            mass = linear_filter(automaton, [pair * 1100], dtype)[0, ::2].sum(1)
            dead.append(int((mass == 0).int().argmax()))
        print(f"    {str(dtype)[6:]:10s}{dies_at(dtype):6d}{dead[0]:6d}{dead[1]:6d}")

    print("\nWho chooses the symbol? Three states, evenly likely; A fits 1 and 2, B fits 2 and 3. After A:")
    prior, A, B = [Fraction(1, 3)] * 3, [1, 1, 0], [0, 1, 1]
    joint = [p * Fraction(a, a + b) for p, a, b in zip(prior, A, B)]
    print("    if the environment picks among those that fit:", show([x / sum(joint) for x in joint]))
    print("    Z b / |Z b|, what the filter says:            ",
          show(PFSA([np.eye(3, dtype=int) * Fraction(1)] * 2, [A, B], prior).filter([[0]])[0][0, 1]))

    print("\nThe marginal recurrence and Sinkhorn against the true marginals, 50 sequences of 64 symbols:")
    print("mean and largest error of a probability, and how many matrices did not scale:")
    for n, kind, every in ((3, "none", 1), (3, "random", 2), (3, "random", 4), (3, "random", 8),
                           (5, "random", 2), (5, "random", 4), (5, "random", 8)):
        rng, automaton = np.random.default_rng(0), maybe_swaps(n)
        symbols, _ = automaton.sample(rng, 50, 64, schedule(rng, n, 50, 64, kind, every))
        found, ok = sinkhorn(marginal_filter(n, symbols)[:, 1:])
        error = np.abs(found - marginals(automaton.filter(symbols)[0][:, 1:], n))
        what = f"n = {n}, " + (f"one symbol in {every} a print" if every > 1 else "no prints")
        print(f"    {what:30s}{error.mean():8.4f}{error.max():8.4f}{(~ok).mean():8.1%}")

    rng, automaton, began = np.random.default_rng(0), maybe_swaps(3), time.process_time()
    automaton.filter(automaton.sample(rng, 10_000, 128, schedule(rng, 3, 10_000, 128))[0])
    print(f"\n10,000 sequences of 128 symbols, n = 3, and their beliefs: {time.process_time() - began:.1f} s")


if __name__ == "__main__":
    main()
