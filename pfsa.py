"""
Hidden branches: programs whose state cannot be read off the trace, and the exact belief about this state.

Real code branches on values that a trace (a program together with what it prints) does not show. A reader of the
trace cannot know the *state*, what the variables hold. What remains is a *belief*: a probability for every state. Each
line transforms the belief, and each print, a *reveal*, sharpens it. P1 (section 5) models this as a PFSA-SR, a
probabilistic finite-state automaton with state reveals. P1 argues that beliefs are hard for linear RNNs, because a
belief is renormalised at each reveal, and a linear recurrence cannot divide. This file has the automata, the exact
Bayes filter that computes beliefs, the filters that a linear RNN could compute instead, and the task pfsa.

    b <- T_s Z_s b / |Z_s b|_1         Z_s b: condition on what was shown, symbol s;   T_s: then move

A symbol is what a trace shows in one step: a line, or an output. T_s (m, m) is column-stochastic: T_s[i, j] is
P(next state i | state j, symbol s). Z_s (m,) is 1 for states in which the symbol s can occur, else 0.

Who chooses the symbol? If the environment that writes the trace picked one of the symbols that the state allows, its
choice would carry information, and the formula would be wrong (`python pfsa.py` shows a counterexample). P1 leaves
this open. Here the environment draws a *query*, a set of symbols, independently of the state. Each state allows
exactly one symbol of the set, and that symbol occurs. `print('b', b)` is a query, and its n possible outputs are the
symbols. A *maybe-swap*, a line that swaps two variables with probability 1/2, is a query with one symbol. Then
|Z_s b|_1 = P(s | query, past) is called the *predictive*. The mean of its negative logarithm is the Bayes floor, the
lowest expected loss that any model can have.

Notation: m states, n variables (m = n!), B sequences, L symbols in each; T is the number of tokens of a trace, or the
matrices above. P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs", section 5 and appendix B.

Read `PFSA.filter` and the class `MaybeSwaps` first.
Look at a trace and the worked examples:   python pfsa.py
Not here: models that learn such traces (train.py --task pfsa).
"""
import random
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import torch

from data import LETTERS, BadInput, Stage, Task, run


# ----------------------------------------------------------------------------------------------------------
# The automaton and its exact filter

class PFSA:
    """T (symbols, m, m) and Z (symbols, m) are as above; q0: the first state, or a distribution (m,); queries: lists
    of symbols. Computes in float64, or exactly if T holds Fractions. Raises BadInput where probabilities do not sum to
    1, or where a state does not allow exactly one symbol of a query."""

    def __init__(self, T, Z, q0, queries=()):
        exact = np.asarray(T).dtype == object
        convert = np.vectorize(Fraction, otypes=[object]) if exact else np.float64
        self.T, self.Z, self.m = convert(T), np.array(Z, int), np.shape(Z)[1]
        assert self.T.shape == (len(self.Z), self.m, self.m), "give T (symbols, m, m) and Z (symbols, m)"
        self.q0 = convert(np.eye(self.m, dtype=int)[q0] if np.ndim(q0) == 0 else q0)
        self.queries = [np.array(query) for query in queries]

        if abs(self.T.sum(1) - 1).max() > 1e-9:
            raise BadInput("a column of T does not sum to 1: give P(next state | state j) in T[s][:, j]")
        if abs(self.q0.sum() - 1) > 1e-9:
            raise BadInput(f"q0 sums to {self.q0.sum()}: give probabilities that sum to 1")
        for query in self.queries:
            if (self.Z[query].sum(0) != 1).any():
                raise BadInput(f"query {query}: each state must allow exactly one of its symbols")

    def filter(self, symbols, start=None):
        """Symbols (B, L) -> beliefs (B, L+1, m), before each symbol and after the last, and the predictive
        P(symbol | query, past) (B, L). start (B, m) or (m,): the first belief, by default q0.

        Beliefs are normalised at each step, so sequences may be of any length; floats below 1e-308 become 0.
        Raises BadInput, with sequence and step, where a symbol has probability 0."""
        symbols = np.asarray(symbols)
        B, L = symbols.shape
        beliefs = np.empty((B, L + 1, self.m), self.T.dtype)
        predictive = np.empty((B, L), self.T.dtype)
        beliefs[:, 0] = self.q0 if start is None else start
        for t, s in enumerate(symbols.T):
            kept = self.Z[s] * beliefs[:, t]                              # (B, m)
            mass = kept.sum(1, keepdims=True)
            if (mass == 0).any():
                b = np.flatnonzero(mass == 0)[0]
                raise BadInput(f"sequence {b}, step {t}: symbol {s[b]} has probability 0 there: give another")
            predictive[:, t] = mass[:, 0]
            moved = self.T[s] @ (kept / mass)[..., None]
            beliefs[:, t + 1] = moved[..., 0]
        return beliefs, predictive


# ----------------------------------------------------------------------------------------------------------
# What a linear recurrence can compute

def linear_filter(pfsa, symbols, dtype=torch.float64):
    """The filter with deferred normalisation: h <- T_s Z_s h. Whoever reads h divides it by its sum. Symbols (B, L)
    -> h (B, L+1, m) in this torch dtype, to which each product and sum is rounded. Each reveal multiplies the *mass*,
    the sum of h, by a probability. Nothing undoes this, so the mass underflows to 0 in the end."""
    symbols = torch.as_tensor(symbols)
    TZ = torch.tensor((pfsa.T * pfsa.Z[:, None]).astype(float)).to(dtype)
    q0 = torch.tensor(pfsa.q0.astype(float)).to(dtype)
    h = [q0.expand(len(symbols), -1)]
    for s in symbols.unbind(1):
        moved = torch.zeros_like(h[0])
        for j in range(pfsa.m):                                           # a matmul would round only once
            moved = moved + TZ[s, :, j] * h[-1][:, j, None]
        h.append(moved)
    return torch.stack(h, 1)


def marginal_filter(n, symbols):
    """The n x n state of P1 section 5.2, for `maybe_swaps(n)`: H_ij stands for P(position i holds j).
    Symbols (B, L) -> H (B, L+1, n, n) float64. H starts at I, and each update is affine in H:

        maybe swap:     H <- 1/2 (I + swap) H
        i holds j:      H <- (I - e_i e_i') H (I - e_j e_j') + e_i e_j'       clear row i and column j, set H_ij to 1

    Without reveals, H holds the marginals of the belief, the probabilities of what each position holds. With reveals,
    H only approximates the marginals, even in exact arithmetic. `sinkhorn` projects H to a doubly stochastic matrix."""
    symbols = np.asarray(symbols)
    eye = np.eye(n)
    left = np.tile(eye, (n_swaps(n) + n * n, 1, 1))                       # (symbols, n, n)
    right, added = left.copy(), np.zeros_like(left)
    for s, (a, b) in enumerate(combinations(range(n), 2)):
        left[s, [a, b]] = (eye[a] + eye[b]) / 2
    for i, j in np.ndindex(n, n):
        s = holds(n, i, j)
        left[s, i, i] = right[s, j, j] = 0
        added[s, i, j] = 1
    H = [np.broadcast_to(eye, (len(symbols), n, n))]
    for s in symbols.T:
        H.append(left[s] @ H[-1] @ right[s] + added[s])
    return np.stack(H, 1)


def sinkhorn(H):
    """Sinkhorn and Knopp's algorithm: scale the rows and the columns of H (..., n, n) in turn until all sum to 1. ->
    the result, without NaN, and ok (...,) bool. ok is False where H has not converged, or where it had a row or column
    of zeros, as after an underflow. No factor can make zeros sum to 1, so they are replaced by 1/n."""
    H = np.array(H, float)
    n = H.shape[-1]
    scalable = (H.sum(-1) > 0).all(-1) & (H.sum(-2) > 0).all(-1)
    for _ in range(1000):
        for axis in (-1, -2):
            total = H.sum(axis, keepdims=True)
            H = np.divide(H, total, out=np.full_like(H, 1 / n), where=total > 0)
        converged = (abs(H.sum(-1) - 1) < 1e-9).all(-1)
        if converged.all():
            break
    return H, scalable & converged


# ----------------------------------------------------------------------------------------------------------
# Automata

def maybe_swaps(n):
    """The automaton in which n positions hold the things 0 to n-1, in order at the start. Symbols: for each pair of
    positions, "they swap with probability 1/2"; then for each position i and each thing j, "i holds j". Queries: each
    pair, then each position. The states are `arrangements(n)`; `swap` and `holds` give the numbers of the symbols."""
    states, T, Z = arrangements(n), [], []
    eye = np.eye(len(states))
    for a, b in combinations(range(n), 2):
        order = list(range(n))
        order[a], order[b] = b, a
        swapped = [states.index(tuple(state[i] for i in order)) for state in states]
        T.append((eye + eye[:, swapped]) / 2)
        Z.append(np.ones(len(states)))
    for i, j in np.ndindex(n, n):
        T.append(eye)
        Z.append([state[i] == j for state in states])
    swaps = [[s] for s in range(n_swaps(n))]
    prints = [[holds(n, i, j) for j in range(n)] for i in range(n)]
    return PFSA(T, Z, 0, swaps + prints)


def arrangements(n):
    """The n! states of `maybe_swaps`, as tuples of what positions 0, 1, ... hold. In state 0, i holds i."""
    return list(permutations(range(n)))


def n_swaps(n):
    return n * (n - 1) // 2


def swap(n, a, b):
    """The symbol "positions a and b, a < b, may swap"."""
    return list(combinations(range(n), 2)).index((a, b))


def holds(n, i, j):
    """The symbol "position i holds j"."""
    return n_swaps(n) + n * i + j


def schedule(rng, n, L, every=2, same=False):
    """-> L queries of `maybe_swaps(n)`, independent of any state; the query of a maybe-swap has the number of its
    symbol. rng: a numpy Generator. Of these queries, L // every are prints of random positions, at random places; the
    others are maybe-swaps of random pairs.

    same, for P1 Figure 10: a maybe-swap of the last two positions, n-2 and n-1, alternates with a print of n-2. But
    the last two queries are prints, of n-2 and then of n-1; if L is even, a print of n-2 comes before them, too."""
    if same:
        may_swap, print_one, print_other = swap(n, n - 2, n - 1), n_swaps(n) + n - 2, n_swaps(n) + n - 1
        return ([may_swap, print_one] * L)[:L - 2] + [print_one, print_other]
    swapped, printed = rng.integers(n_swaps(n), size=L), n_swaps(n) + rng.integers(n, size=L)
    return np.where(rng.permutation(L) < L // every, printed, swapped)


def figure_9():
    """P1 Figure 9, with its states 1 to 3 numbered from 0. State 0 is absorbing; at a step, states 1 and 2 move to
    state 0 with probability 1/2. Symbols: step; "the state is 1 or 2"; "the state is 0". Starts in state 1."""
    half = Fraction(1, 2)
    stay = np.eye(3, dtype=int)
    step = [[1, half, half],
            [0, half, 0],
            [0, 0, half]]
    return PFSA([step, stay, stay], [[1, 1, 1], [0, 1, 1], [1, 0, 0]], 1, [[0], [1, 2]])


def appendix_b():
    """P1 appendix B. States: the arrangements of three things, in the order 123, 213, 321, 132, 231, 312. Starts in
    123. Symbols: "try swap 1-2", which swaps 1-3 instead with probability 1/2; "position 1 holds 1", "... 2", "... 3".
    """
    order, half = ["123", "213", "321", "132", "231", "312"], Fraction(1, 2)
    T = [[half * (new in (b + a + c, c + b + a)) for a, b, c in order] for new in order]
    stay = np.eye(6, dtype=int)
    holds_first = [[state[0] == digit for state in order] for digit in "123"]
    return PFSA([T, stay, stay, stay], [[1] * 6, *holds_first], 0, [[0], [1, 2, 3]])


# ----------------------------------------------------------------------------------------------------------
# The task: the queries of `maybe_swaps` as lines of Python

class MaybeSwaps(Task):
    """REPL traces with hidden branches. At the start, n variables hold 1 to n in some order. Then follow L lines: in a
    stage LxS, L // S of them print a variable, and the others are maybe-swaps of two variables. The state is one slot,
    the number of the arrangement. A Batch has the exact beliefs and predictives. n_vars is 2 to 5, because a belief
    has n! entries.

    In a stage Lx2:same, all maybe-swaps concern the same two variables. Each is followed by a print of one of
    them (the last by two prints, if L is even), and the last line prints the other. Lx2:forced is P1 Figure 10: the
    same lines, but no swap ever happens. There the loss means nothing, only the KL divergence to the predictive (see
    `against_exact`), so forced is for evaluation. There are few programs of these two kinds, so none is held out."""
    prompt = ">>> "
    curriculum = "4x2 8x2 16x2 32x2"
    stage_samples = 3000                                                  # no model can reach 90 %, which ends a stage
    settings = ("n_vars",)
    n_slots = 1

    def __init__(self, n_vars=3, **others):
        if not 2 <= n_vars <= 5:
            raise BadInput(f"--n-vars {n_vars}: choose 2 to 5, because a belief has n! entries")
        self.n_vars, self.names, self.automaton = n_vars, LETTERS[:n_vars], maybe_swaps(n_vars)
        self.n_classes = self.automaton.m
        orders = permutations(range(1, n_vars + 1))
        self.state_of = {values: i for i, values in enumerate(orders)}    # what the variables hold -> state
        maybe = [f"{x}, {y} = ({y}, {x}) if random() < 0.5 else ({x}, {y})"
                 for x, y in combinations(self.names, 2)]
        self.sources = maybe + [f"print('{x}', {x})" for x in self.names]       # the line of each query
        self.symbols = {f">>> {source}\n": s for s, source in enumerate(maybe)}     # text of a line -> symbol
        for i, j in np.ndindex(n_vars, n_vars):                           # an assignment reveals like a print
            printed, assigned = f"{self.names[i]} {j + 1}\n", f">>> {self.names[i]} = {j + 1}\n"
            self.symbols[printed] = self.symbols[assigned] = holds(n_vars, i, j)
        super().__init__(**others)
        if self.states not in ("none", "linear"):
            raise BadInput(f"--states {self.states}: the state is hidden, so it cannot be written as text: "
                           "choose linear (its labels are the exact beliefs) or none")

    def check_stage(self, stage):
        if stage.kind not in ("", "same", "forced"):
            raise BadInput(f"stage {stage}: write LxS or Lx2:same or, to evaluate on P1's Figure 10, Lx2:forced")
        if stage.kind and stage.spacing != 2:
            raise BadInput(f"stage {stage}: this kind has the spacing 2: write {stage.length}x2:{stage.kind}")

    def program(self, rng, stage, memory):
        yield "from random import random"
        memory["random"] = (lambda: 1.0) if stage.kind == "forced" else rng.random        # replaces the imported one
        for name, value in zip(self.names, rng.sample(range(1, self.n_vars + 1), self.n_vars)):
            yield f"{name} = {value}"
        numpy_rng = np.random.default_rng(rng.getrandbits(64))
        for query in schedule(numpy_rng, self.n_vars, stage.length, stage.spacing, bool(stage.kind)):
            yield self.sources[query]

    def draw(self, rng, stage, split):
        """As Task.draw. Only the program's text decides whether it is held out, not the branches taken. So the split
        tells nothing about the state, and beliefs are exact."""
        if not stage.kind:
            return super().draw(rng, stage, split)
        if stage.kind == "forced" and split == "train":
            raise BadInput(f"stage {stage} is for evaluation only: train on {stage.length}x2:same")
        memory = {}
        return run(self.program(rng, stage, memory), memory, self.prompt, self.state_after)

    def answer_tokens(self):
        """The tokens of the answers 1 to n_vars, a list of int."""
        return [self.tokenizer.encode(str(i))[0] for i in range(1, self.n_vars + 1)]

    def slots(self, memory):
        values = tuple(map(memory.get, self.names))
        return [self.state_of.get(values, -1)]

    def chance(self, stage):
        return 1 / self.n_vars

    def harder_stages(self, last):
        """The last stage, with traces 1, 4 and 16 times as long; then the stages Lx2:forced of these lengths."""
        lengths = [last.length * factor for factor in (1, 4, 16)]
        forced = [Stage(L, 2, "forced") for L in lengths if L > 1]
        return [Stage(L, last.spacing) for L in lengths] + forced

    def to_batch(self, traces):
        """Traces of one stage -> the Batch of Task.to_batch, with two more arrays, which are 0 elsewhere. belief
        (B, T, m) is given at the ends of lines, once all variables are assigned. predictive (B, T, n) is given where
        an answer is asked: the probabilities of the answers 1 to n."""
        batch, m, n = super().to_batch(traces), self.automaton.m, self.n_vars
        B, T = batch.tokens.shape
        read = [[self.symbols.get(line.text, -1) for line in lines] for lines in traces]
        asked = [[bool(line.answer) for line in lines] for lines in traces]
        read, asked = np.array(read), np.array(asked)                     # (B, lines); -1: no symbol
        symbols = read[read >= 0].reshape(B, -1)                          # (B, n + L)
        beliefs, _ = self.automaton.filter(symbols, start=np.full(m, 1 / m))      # the assignments reveal the state

        steps = (read >= 0).cumsum(1)[..., None]
        after = np.take_along_axis(beliefs, steps, 1)                     # (B, lines, m)
        belief = np.zeros((B, T, m), np.float32)
        belief[batch.line_end] = (after * (steps >= n)).reshape(-1, m)

        before = np.take_along_axis(beliefs, steps - 1, 1)[asked]         # (answers, m)
        printed = (read[asked] - n_swaps(n)) // n                         # which variable
        possible = self.automaton.Z[holds(n, printed[:, None], np.arange(n))]    # (answers, n, m)
        predictive = np.zeros((B, T, n), np.float32)
        predictive[batch.asked] = (possible @ before[..., None])[..., 0]
        return batch._replace(belief=belief, predictive=predictive)


def against_exact(logits, target, predictive, answer_tokens):
    """Compare a model with the exact predictive, in nats (with natural logarithms). Takes logits (N, vocabulary), the
    tokens of the sampled answers (N,), the exact probabilities of n answers (N, n), and the tokens of these n answers.
    -> (N, 3) float64: the divergence KL(exact || model) over the whole vocabulary; the model's loss at the sampled
    answer; and the loss of the exact predictive at this answer, whose mean is the Bayes floor."""
    log_q, p = logits.cpu().double().log_softmax(-1), predictive.cpu().double()       # mps has no float64
    answers, target = torch.tensor(answer_tokens), target.cpu()[:, None]
    kl = (torch.special.xlogy(p, p) - p * log_q[:, answers]).sum(-1)
    loss = -log_q.gather(-1, target)[:, 0]
    floor = -p[target == answers].log()
    return torch.stack([kl, loss, floor], -1)


# ----------------------------------------------------------------------------------------------------------
# python pfsa.py: a trace, and the worked examples, number by number

def show_trace():
    task, stage = MaybeSwaps(), Stage(6, 2)
    lines = task.draw(random.Random(1), stage, "train")
    batch = task.to_batch([lines])
    beliefs, predictive = batch.belief[batch.line_end], iter(batch.predictive[batch.asked])
    print(f"A trace of stage {stage}. After each line: the belief that a, b, c hold 123, 132, ...")
    print("After each answer: the predictive, how likely 1, 2 and 3 were before it was read.")
    print(" " * 49, *("".join(map(str, values)) for values in task.state_of), sep="  ")
    for line, belief in zip(lines, beliefs):
        before = next(predictive) if line.answer else ""
        print(f"{line.text[:-1]:49s} {belief} {before}".rstrip())


def show_exact():
    print("\nP1 appendix B. S3, states 123 213 321 132 231 312; try swap 1-2, then position 1 holds 3:")
    beliefs, predictive = appendix_b().filter([[0, 3]])
    for belief in beliefs[0]:
        print("   ", belief)
    print(f"    P(position 1 holds 3) = {predictive[0, 1]}; so h = T Z h keeps [0 0 1/2 0 0 0]")
    print(f"    a hundred reveals of probability 0.9 leave a mass of 0.9^100 = {0.9 ** 100:.3g}")

    print("\nP1 Figure 9. Step, reveal {2, 3}, ...: the exact belief, and the mass of the linear filter:")
    steps = [[0, 1] * 4]
    beliefs, _ = figure_9().filter(steps)
    mass = linear_filter(figure_9(), steps)[0].sum(1)
    print("  ", *beliefs[0, ::2], sep="  ")
    print("  ", *map(Fraction, mass[::2].tolist()), sep="  ")

    print("\nWho chooses the symbol? Three states, evenly likely; A fits 1 and 2, B fits 2 and 3. After A:")
    third, A, B = Fraction(1, 3), [1, 1, 0], [0, 1, 1]
    joint = np.array([third * Fraction(a, a + b) for a, b in zip(A, B)])
    stay = np.eye(3, dtype=int) * Fraction(1)
    beliefs, _ = PFSA([stay, stay], [A, B], [third] * 3).filter([[0]])
    print("    if the environment picks among those that fit:", joint / joint.sum())
    print("    Z b / |Z b|, what the filter computes:        ", beliefs[0, 1])


def show_linear():
    print("\nP1 Figure 10, n = 3. Maybe swap 2 and 3, reveal that 2 holds 2, ...: H_33, what Sinkhorn makes")
    print("of it, and the exact P(3 holds 3):")
    automaton, pair = maybe_swaps(3), [swap(3, 1, 2), holds(3, 1, 1)]
    H = marginal_filter(3, [pair * 4])[0, ::2]
    beliefs, _ = automaton.filter([pair * 4])
    for x in (H[:, 2, 2], sinkhorn(H)[0][:, 2, 2], beliefs[0, ::2] @ automaton.Z[holds(3, 2, 2)]):
        print("   ", x)

    H = marginal_filter(3, [pair * 1100])[0, ::2]
    print(f"In float64, H_33 is 0 after {H[:, 2, 2].tolist().index(0):,} reveals, and the sum of H falls from "
          f"{H[0].sum():g} to {H[-1].sum():g}")

    print("\nReveals of probability 1/2 until the linear filter's mass is 0: by format, Figure 9, Figure 10")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        steps = ""
        for shown, symbols in ((figure_9(), [0, 1]), (automaton, pair)):
            mass = linear_filter(shown, [symbols * 1100], dtype)[0, ::2].sum(1)
            steps += f"{mass.tolist().index(0):6d}"
        print(f"    {str(dtype)[6:]:10s}{steps}")


def main():
    short = {"float": lambda x: f"{x:4.3g}" if x else "   .", "object": str}
    with np.printoptions(formatter=short):
        show_trace()
        show_exact()
        show_linear()
    print("notice: an exact belief always sums to 1; the mass of a linear filter shrinks to 0")


if __name__ == "__main__":
    main()
