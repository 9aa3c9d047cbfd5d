"""
The tasks, as text a person could write down, and the one tokenizer they share.

A task turns (stage, seed, split, t) into a `Batch`; nothing is stored, nothing is iterated: batch t of a run is a
pure function of those four, so a resumed run sees what an uninterrupted one would have seen, and the train and
test streams come from different random generators.

  repl    Python REPL traces (P1 section 4, Figure 2): n variables are shuffled by assignments, prints reveal them.
  group   word problems (P1 Figure 2 centre; Merrill et al., arXiv 2404.08819): the running product of a word.

Symbols: B batch, T tokens in a trace, n variables, L commands, S commands between two reveals (the spacing).
P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs".

Look at samples:   python data.py repl --n-vars 3 --commands 4
                   python data.py group --group S3 --commands 6

Not here: downloads, files, data loaders. Every task is generated faster than a model can train on it.
"""
import argparse
import re
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

# ----------------------------------------------------------------------------------------------------------------
# Tokenizer: the 256 bytes, plus a few pieces of Python that would otherwise cost several tokens

LEXEMES = (">>> ", "print('", "', ", ")\n", " = ", ", ")  # variable names and digits stay tokens of their own


class Tokenizer:
    """Bytes first (ids 0..255), then `lexemes`, matched longest first. decode(encode(s)) == s for every string."""

    def __init__(self, lexemes=LEXEMES):
        self.lexemes = tuple(lexemes)
        longest_first = sorted((s.encode() for s in self.lexemes), key=len, reverse=True)
        self.pieces = [bytes([i]) for i in range(256)] + [s.encode() for s in self.lexemes]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.pattern = re.compile(b"|".join([re.escape(s) for s in longest_first] + [b"."]), re.DOTALL)

    def __len__(self):
        return len(self.pieces)

    def encode(self, text):
        """str -> list of int. Lone surrogates, which Python strings may hold, survive the round trip."""
        return [self.ids[piece] for piece in self.pattern.findall(text.encode("utf-8", "surrogatepass"))]

    def decode(self, ids):
        """Iterable of int -> str. Bytes that are no UTF-8 (a model may produce them) become U+FFFD."""
        raw = b"".join(self.pieces[i] for i in ids)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------------
# What a task hands to training

@dataclass
class Batch:
    """B traces of T tokens each. The model predicts tokens[:, t] from tokens[:, :t]."""
    tokens: torch.Tensor                     # (B, T) int64
    answer: torch.Tensor                     # (B, T) bool   this token is a revealed value: accuracy is about these
    line_end: torch.Tensor                   # (B, T) bool   last token of a line: state supervision sits here
    state: torch.Tensor                      # (B, T, n_slots) int64   true state after that line, -1 where undefined
    state_text: torch.Tensor | None = None   # (B, lines, width) int64  the state as padded text, where it has no slots
    belief: torch.Tensor | None = None       # (B, T, m) float  exact belief after that line, for hidden states

    def to(self, device):
        return Batch(**{k: v if v is None else v.to(device) for k, v in vars(self).items()})


class Stage(NamedTuple):
    """One step of a curriculum, written `LxS`, or `LxS:M` where a permutation may move M variables only."""
    commands: int
    spacing: int
    moved: int = 0                           # 0: all of them

    def __str__(self):
        return f"{self.commands}x{self.spacing}" + (f":{self.moved}" if self.moved else "")


def parse_stages(text):
    """'8x1 16x2' -> [Stage(8, 1), Stage(16, 2)]. Raises ValueError with one line that says what to write."""
    stages = []
    for word in text.split():
        match = re.fullmatch(r"(\d+)x(\d+)(?::(\d+))?", word)
        if not match:
            raise ValueError(f"'{word}' is no stage: write COMMANDSxSPACING, as in \"8x1 16x2 64x8\"")
        commands, spacing, moved = (int(x or 0) for x in match.groups())
        if not 1 <= spacing <= commands:
            raise ValueError(f"stage {word}: the spacing must be 1 to {commands}, or there is nothing to reveal")
        stages.append(Stage(commands, spacing, moved))
    if not stages:
        raise ValueError("no stage given: write COMMANDSxSPACING, as in \"8x1 16x2 64x8\"")
    return stages


SPLITS = {"train": 0, "test": 1}


def generator(seed, split, stage, t):
    """The random generator of batch t: its own, whatever was drawn before."""
    return np.random.default_rng([seed, SPLITS[split], *stage, t])


# ----------------------------------------------------------------------------------------------------------------
# repl: five variables, shuffled by assignments, revealed by prints

def fill(template, values, tokenizer):
    """Put values (..., m) into the m '?' of a template: -> (..., tokens of the template), int64."""
    ids = np.array(tokenizer.encode(template))
    out = np.broadcast_to(ids, values.shape[:-1] + ids.shape).copy()
    out[..., ids == ord("?")] = values
    return out


class Repl:
    """REPL traces. n assignments, then L commands; after every S-th, one uniformly drawn variable is printed.

    A command is a swap of two variables (moves="swap") or a permutation of all n (moves="perm"). P1's figure also
    prints once before the first command; here the first print comes after S commands. n_vars: 2 to 9, as values
    are single digits (that keeps every line of a kind equally long, so a batch needs no padding).
    Raises ValueError where a setting is out of range.
    """
    next_token = True
    curriculum = "8x1 16x2 32x4 64x8"        # P1 section 4

    def __init__(self, n_vars=5, moves="swap", tokenizer=None):
        if not 2 <= n_vars <= 9:
            raise ValueError(f"n-vars {n_vars}: choose 2 to 9, as each value must be a single digit")
        if moves not in ("swap", "perm"):
            raise ValueError(f"moves '{moves}': choose swap or perm")
        self.n_vars, self.moves, self.tokenizer = n_vars, moves, tokenizer or Tokenizer()
        self.n_slots = self.n_classes = n_vars
        self.chance = 1 / n_vars
        self.pairs = np.array(list(combinations(range(n_vars), 2)))  # (n(n-1)/2, 2)

    def check(self, stage):
        """Raise ValueError if this task has no such stage."""
        if stage.moved and self.moves == "swap":
            raise ValueError(f"stage {stage}: ':{stage.moved}' is for --moves perm; a swap always moves two")
        if stage.moved == 1 or stage.moved > self.n_vars:
            raise ValueError(f"stage {stage}: a permutation of {self.n_vars} variables moves 2 to {self.n_vars}")

    def beyond(self, last):
        """Where to evaluate a model whose last stage was `last`: there, then farther on each axis, then on both."""
        L, S, _ = last
        return [Stage(*at) for at in ((L, S), (2 * L, S), (L, 2 * S), (2 * L, 2 * S), (4 * L, 4 * S))]

    def commands(self, rng, size, stage):
        """-> text of the commands (B, L, w) as tokens, and source (B, L, n): variable i takes what source[i] held."""
        n, shape = self.n_vars, (size, stage.commands)
        source = np.broadcast_to(np.arange(n), shape + (n,)).copy()
        if self.moves == "swap":
            pair = self.pairs[rng.integers(len(self.pairs), size=shape)]  # (B, L, 2)
            names, flipped = pair, pair[..., ::-1]
        else:
            moved = stage.moved or n
            pair = rng.random(shape + (n,)).argsort(-1)[..., :moved]      # (B, L, moved), all orders equally likely
            pair, flipped = np.sort(pair, -1), pair
            names = source.copy()
        np.put_along_axis(source, pair, flipped, axis=-1)
        if self.moves == "perm":
            flipped = source
        blanks = ", ".join("?" * names.shape[-1])
        letters = ord("a") + np.concatenate([names, flipped], -1)
        return fill(f">>> {blanks} = {blanks}\n", letters, self.tokenizer), source

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` traces of stage `stage`, from the "train" or the "test" stream of `seed`."""
        rng, n = generator(seed, split, stage, t), self.n_vars
        rows, n_reveals = np.arange(size)[:, None], stage.commands // stage.spacing

        value = np.empty((size, stage.commands + 1, n), int)              # after l commands, variable i holds value
        value[:, 0] = rng.permuted(np.tile(np.arange(n), (size, 1)), axis=1)
        command, source = self.commands(rng, size, stage)
        for l in range(stage.commands):
            value[:, l + 1] = np.take_along_axis(value[:, l], source[:, l], axis=1)

        name = np.broadcast_to(np.arange(n), (size, n))
        assign = fill(">>> ? = ?\n", np.stack([ord("a") + name, ord("1") + value[:, 0]], -1), self.tokenizer)
        assigned = np.where(np.tri(n, dtype=bool), value[:, :1], -1)      # (B, n, n): line i sets variable i

        when = stage.spacing * np.arange(1, n_reveals + 1)                # reveal r comes after command when[r]
        which = rng.integers(n, size=(size, n_reveals))
        seen = value[rows, when, which]
        ask = fill(">>> print('?', ?)\n", np.stack([ord("a") + which] * 2, -1), self.tokenizer)
        tell = fill("? ?\n", np.stack([ord("a") + which, ord("1") + seen], -1), self.tokenizer)

        # Each kind of line has one width, so where a line starts is arithmetic
        a, c, r = assign.shape[-1], command.shape[-1], ask.shape[-1] + tell.shape[-1]
        l = np.arange(stage.commands)
        at_command = n * a + l * c + l // stage.spacing * r
        at_ask = n * a + when * c + (when // stage.spacing - 1) * r
        T = n * a + stage.commands * c + n_reveals * r

        tokens, state = np.empty((size, T), int), np.full((size, T, n), -1)
        answer, line_end = np.zeros((size, T), bool), np.zeros((size, T), bool)
        for lines, starts, after in ((assign, a * np.arange(n), assigned), (command, at_command, value[:, 1:]),
                                     (ask, at_ask, value[:, when]), (tell, at_ask + ask.shape[-1], value[:, when])):
            columns = starts[:, None] + np.arange(lines.shape[-1])        # (lines, width)
            tokens[:, columns] = lines
            line_end[:, columns[:, -1]] = True
            state[:, columns[:, -1]] = after
        answer[:, at_ask + r - 2] = True                                  # "a 3\n": the token before the newline
        return Batch(*map(torch.from_numpy, (tokens, answer, line_end, state)))


# ----------------------------------------------------------------------------------------------------------------
# group: one element a token, one label a token

def cycles(n, *cycles):
    """The permutation of 0..n-1 that sends each entry of a cycle to the next one, as a tuple."""
    image = list(range(n))
    for cycle in cycles:
        for here, there in zip(cycle, cycle[1:] + cycle[:1]):
            image[here] = there
    return tuple(image)


GROUPS = {  # name: generators
    "Z2": [cycles(2, (0, 1))],
    "Z60": [cycles(12, (0, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10, 11))],       # order 3 * 4 * 5
    "S3": [cycles(3, (0, 1)), cycles(3, (0, 1, 2))],
    "S4": [cycles(4, (0, 1)), cycles(4, (0, 1, 2, 3))],
    "A4xZ5": [cycles(9, (0, 1, 2)), cycles(9, (1, 2, 3)), cycles(9, (4, 5, 6, 7, 8))],
    "A5": [cycles(5, (0, 1, 2)), cycles(5, (0, 1, 2, 3, 4))],
    "S5": [cycles(5, (0, 1)), cycles(5, (0, 1, 2, 3, 4))],
    "S5swaps": [cycles(5, pair) for pair in combinations(range(5), 2)],    # S5, but words hold transpositions only
}


def closure(generators):
    """All products of the generators (lists of tuples), sorted, and the table mul[i, j] = index of i then j."""
    elements = frontier = {tuple(range(len(generators[0])))}
    while frontier:
        frontier = {tuple(g[x] for x in e) for e in frontier for g in generators} - elements
        elements = elements | frontier
    elements = sorted(elements)
    index, E = {e: i for i, e in enumerate(elements)}, np.array(elements)
    mul = np.array([[index[tuple(after[first])] for after in E] for first in E])
    return elements, mul


class Group:
    """Words over a finite group. Token t is an element g_t; its label is the product g_1 g_2 ... g_t.

    Elements take the ids 0, 1, 2, ... (the tokenizer's bytes; no group here has more than 120). The label is the
    state, one slot with a class per element, read by the state head: the next token is random, so there is no
    next-token loss and no answer token. Raises ValueError for an unknown group.
    """
    next_token = False
    curriculum = "8x1 16x1 32x1 64x1"

    def __init__(self, group="S5", tokenizer=None):
        if group not in GROUPS:
            raise ValueError(f"group '{group}': choose one of {', '.join(GROUPS)}")
        self.tokenizer = tokenizer or Tokenizer()
        self.elements, self.mul = closure(GROUPS[group])
        only = [self.elements.index(g) for g in GROUPS[group]] if group == "S5swaps" else range(len(self.elements))
        self.letters = np.array(only)
        self.n_slots, self.n_classes, self.chance = 1, len(self.elements), 1 / len(self.elements)

    def check(self, stage):
        """Raise ValueError if this task has no such stage."""
        if stage.spacing != 1 or stage.moved:
            raise ValueError(f"stage {stage}: every token of a word has its label, so write {stage.commands}x1")

    def beyond(self, last):
        """Where to evaluate a model whose last stage was `last`: there and at longer words."""
        return [Stage(last.commands * times, 1) for times in (1, 2, 4, 8)]

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` words of stage.commands elements."""
        rng = generator(seed, split, stage, t)
        tokens = self.letters[rng.integers(len(self.letters), size=(size, stage.commands))]
        product = tokens.copy()
        for i in range(1, stage.commands):
            product[:, i] = self.mul[product[:, i - 1], tokens[:, i]]
        everywhere, nowhere = np.ones(tokens.shape, bool), np.zeros(tokens.shape, bool)
        return Batch(*map(torch.from_numpy, (tokens, nowhere, everywhere, product[..., None])))


TASKS = {"repl": Repl, "group": Group}


# ----------------------------------------------------------------------------------------------------------------
# python data.py TASK: samples to check by eye

def show(task, batch, b):
    """Trace b of a batch as text: answers in [brackets], the true state beside the line that leads to it."""
    lines, line = [], ""
    for t, token in enumerate(batch.tokens[b].tolist()):
        if not task.next_token:
            before, after = task.elements[token], task.elements[batch.state[b, t, 0]]
            lines.append(f"{token:4d} = {before}   product [{batch.state[b, t, 0]:3d}] = {after}")
            continue
        piece = task.tokenizer.decode([token])
        line += f"[{piece}]" if batch.answer[b, t] else piece
        if batch.line_end[b, t]:
            slots = zip("abcdefghi", batch.state[b, t].tolist())
            lines.append(f"{line.rstrip():40s} # " + " ".join(f"{name}={x + 1}" for name, x in slots if x >= 0))
            line = ""
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description="Print samples of a task.", allow_abbrev=False)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--n-vars", type=int, default=5, help="repl: number of variables")
    parser.add_argument("--moves", default="swap", help="repl: swap or perm")
    parser.add_argument("--group", default="S5", help=f"group: one of {', '.join(GROUPS)}")
    parser.add_argument("--commands", type=int, default=8, help="commands in a trace, elements in a word")
    parser.add_argument("--spacing", type=int, default=1, help="repl: commands between two reveals")
    parser.add_argument("--moved", type=int, default=0, help="repl: variables a permutation moves, 0 for all")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        task = Repl(args.n_vars, args.moves) if args.task == "repl" else Group(args.group)
        [stage] = parse_stages(str(Stage(args.commands, args.spacing, args.moved)))
        task.check(stage)
    except ValueError as error:
        parser.error(str(error))
    batch = task.batch(stage, args.samples, args.seed, "train", 0)
    for b in range(args.samples):
        print(f"sample {b}: {batch.tokens.shape[1]} tokens, {int(batch.answer[b].sum())} answers in [brackets], "
              f"chance {task.chance:.3g}\n{show(task, batch, b)}\n")


if __name__ == "__main__":
    main()
