"""
The tasks, as text that a person could write down, and the one tokenizer they share.

A task turns (stage, seed, split, t) into a `Batch`. Nothing is stored and nothing is iterated: batch t of a
run is a pure function of those four, so a resumed run sees what an uninterrupted one would have seen, and
training and test traces come from different random generators.

  repl    Python REPL traces (P1 section 4, Figure 2): assignments shuffle n variables, prints reveal them
  pfsa    the same with hidden branches, `a, b = (b, a) if random() < 0.5 else (a, b)` (P1 section 5)
  group   word problems (P1 Figure 2, centre; Merrill et al., arXiv 2404.08819): the running product of a word
  parity, listperm, arith   straight-line programs that end in `assert x == answer` (P2 section 4, appendix C)
  trace   functions, anyone's or made at random, unrolled into such programs (P2 sections 2 and 3)

Symbols: B batch, T tokens in a trace, n variables, L commands, S commands between two reveals (the spacing).
P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs". P2 is "Grounding Code
Understanding in Step-by-Step Execution".

Look at samples:   python data.py repl --n-vars 3 --commands 4
                   python data.py pfsa --n-vars 3 --commands 8 --spacing 2
                   python data.py group --group S3 --commands 6
                   python data.py arith --digits 2 --commands 4
Unroll functions:  python data.py trace --file calls.jsonl --out traces.jsonl --allow-exec

Not here: downloads, data loaders. All but `trace` are made much faster than a model can train on them.
"""
import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import combinations, count, islice
from pathlib import Path
from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows has no such module, and no os.fork
    resource = None

import numpy as np
import torch
from tqdm import tqdm

import pfsa

# ----------------------------------------------------------------------------------------------------------
# What the command lines of all files share: an error is one line that says what to do, and exit code 2

class UserError(ValueError):
    """Something that the user can put right."""


def one_of(what, value, choices):
    """Raise UserError, with the nearest match, unless `value` is one of `choices`."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{what} {value}: {hint}Choose one of {', '.join(choices)}")


class Parser(argparse.ArgumentParser):
    """argparse, but no guessing from prefixes, and errors as above."""

    def __init__(self, doc):
        super().__init__(description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            message = f"unknown argument {unknown[1]}: {hint}"
        raise UserError(message)


def start(main):
    """Call main(arguments), which returns the exit code."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:                                               # the reader left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)                                                     # as a shell says of SIGPIPE
    except UserError as error:
        print(f"{sys.argv[0].split('/')[-1]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


class Interrupt:
    """Ctrl-C or kill lets a step finish: what is saved then is a state that the work was in."""

    def __enter__(self):
        self.asked, signals = False, (signal.SIGINT, signal.SIGTERM)
        self.before = {s: signal.signal(s, self.ask) for s in signals}
        return self

    def ask(self, *_):
        self.asked = True

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


# ----------------------------------------------------------------------------------------------------------
# Tokenizer: the 256 bytes, and a few pieces of Python that would otherwise cost several tokens

LEXEMES = (">>> ", "print('", "', ", ")\n", " = ", ", ")  # variable names and digits stay tokens of their own
PAD = 0                                                   # fills up traces of several lengths: the byte NUL


class Tokenizer:
    """Bytes (ids 0 to 255), then `lexemes`, longest first. decode(encode(s)) == s for every string."""

    def __init__(self, lexemes=LEXEMES):
        self.lexemes = tuple(lexemes)
        pieces = [s.encode() for s in self.lexemes]
        self.pieces = [bytes([i]) for i in range(256)] + pieces
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        longest_first = [re.escape(piece) for piece in sorted(pieces, key=len, reverse=True)]
        self.pattern = re.compile(b"|".join(longest_first + [b"."]), re.DOTALL)

    def __len__(self):
        return len(self.pieces)

    def encode(self, text):
        """str -> list of int. Lone surrogates, which a Python string may hold, survive the round trip."""
        raw = text.encode("utf-8", "surrogatepass")
        return [self.ids[piece] for piece in self.pattern.findall(raw)]

    def decode(self, ids):
        """Iterable of int -> str. Bytes that are not UTF-8, which a model may produce, become U+FFFD."""
        raw = b"".join(self.pieces[i] for i in ids)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------
# What a task hands to training

@dataclass
class Batch:
    """B traces of T tokens, PAD after their ends. A model predicts tokens[:, t] from tokens[:, :t]."""
    tokens: torch.Tensor                    # (B, T) int64
    answer: torch.Tensor                    # (B, T) bool: a revealed value; accuracy is about these
    line_end: torch.Tensor                  # (B, T) bool: last token of a line, where state supervision sits
    state: torch.Tensor                     # (B, T, slots) int64: true state after that line, -1 if undefined
    state_text: torch.Tensor | None = None  # (B, lines, width) int64: the state as text, PAD where no line is
    belief: torch.Tensor | None = None      # (B, T, m) float: exact belief after that line, if it is hidden
    chances: torch.Tensor | None = None     # (B, T, n) float: of an answer's n values, given all before it

    def to(self, device):
        return Batch(**{name: x if x is None else x.to(device) for name, x in vars(self).items()})

    def cut(self, n, opening):
        """-> n batches, of as many lines each, the first with `opening` more: the traces' parts in turn."""
        if n == 1:
            return [self]
        ends = self.line_end[0].nonzero()[:, 0] + 1                       # the same places in every trace
        lines = (len(ends) - opening) // n
        last = [ends[opening + lines * (i + 1) - 1].item() for i in range(n)]
        tensors = {name: x for name, x in vars(self).items() if x is not None}
        return [Batch(**{name: x[:, first:past] for name, x in tensors.items()})
                for first, past in zip([0, *last], last)]


class Stage(NamedTuple):
    """A step of a curriculum, written LxS, L for Lx1, or LxS:KIND where a task has kinds, see its `check`."""
    commands: int
    spacing: int
    kind: str = ""                          # the usual one

    def __str__(self):
        return f"{self.commands}x{self.spacing}" + f":{self.kind}" * bool(self.kind)


def parse_stages(text, task):
    """'8x1 16x2' -> [Stage(8, 1), Stage(16, 2)]. Raises UserError for what `task` does not have."""
    stages = []
    for word in text.split() or [text]:
        match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?(?::(\w+))?", word)
        if not match:
            raise UserError(f"'{word}' is no stage: write COMMANDSxSPACING, as in \"8x1 16x2 64x8\"")
        stage = Stage(int(match[1]), int(match[2] or 1), match[3] or "")
        if not 1 <= stage.spacing <= stage.commands:
            raise UserError(f"stage {word}: write at least 1 command, and a spacing of 1 to that many")
        task.check(stage)
        stages.append(stage)
    return stages


SPLITS = {"train": 0, "test": 1}


def generator(seed, split, stage, t):
    """The random generator of batch t: its own, whatever was drawn before it."""
    L, S, kind = stage
    return np.random.default_rng([seed, SPLITS[split], L, S, zlib.crc32(kind.encode()), t])  # of "" it is 0


# ----------------------------------------------------------------------------------------------------------
# repl: variables, shuffled by assignments, revealed by prints

def fill(template, values, tokenizer):
    """Put values (..., m), as tokens, into the m '?' of a template -> (..., tokens of the template) int64."""
    ids = np.array(tokenizer.encode(template))
    out = np.broadcast_to(ids, values.shape[:-1] + ids.shape).copy()
    out[..., ids == ord("?")] = values
    return out


def lay_out(kinds):
    """Kinds of lines, each tokens (B, lines, width) and their numbers in the trace -> tokens (B, T), and for
    each kind the places (lines, width) of its tokens in T. Line i is of one kind in all traces."""
    widths = np.zeros(sum(len(numbers) for _, numbers in kinds), int)
    for lines, numbers in kinds:
        widths[numbers] = lines.shape[-1]
    starts = widths.cumsum() - widths
    tokens, places = np.empty((len(kinds[0][0]), widths.sum()), int), []
    for lines, numbers in kinds:
        places.append(starts[numbers][:, None] + np.arange(lines.shape[-1]))
        tokens[:, places[-1]] = lines
    return tokens, places


def execute(first, source):
    """Values (B, n) at first, and what variable i takes at each command, source (B, L, n) -> (B, L+1, n)."""
    value = [first]
    for takes in source.swapaxes(0, 1):
        value.append(np.take_along_axis(value[-1], takes, 1))
    return np.stack(value, 1)


def shuffled(source):
    """Each command as if it had been about the next variables, cyclically: a language as hard as ours, in
    which the same text means something else. What a probe learns of it, the model did not know (train.py)."""
    return np.roll((source + 1) % source.shape[-1], 1, -1)


class Repl:
    """REPL traces: n assignments, then L commands; after every S-th, one uniformly drawn variable is printed.

    A command swaps two variables (moves="swap", uniform over pairs) or permutes all n (moves="perm", uniform
    over n!; in a stage LxS:M, at most M of them). P1's figure also prints once before the first command.
    n_vars is 2 to 9: values are single digits, so lines of a kind are equally long and nothing is padded.
    Raises UserError where a setting is out of range."""
    curriculum = "8x1 16x2 32x4 64x8"       # P1 section 4
    stage_samples = 0                       # a stage is passed when its reveals are right
    next_token = True                       # learned as text, from the next token
    whole = False                           # a trace has many answers, not one of many tokens
    shuffled = False                        # states as if commands meant something else, for train.py --probe
    options = ["n_vars", "moves"]           # settings of train.py that it is made from

    def __init__(self, n_vars=5, moves="swap", tokenizer=None):
        if not 2 <= n_vars <= 9:
            raise UserError(f"--n-vars {n_vars}: choose 2 to 9, as every value must be a single digit")
        one_of("--moves", moves, ("swap", "perm"))
        self.n_vars, self.moves, self.tokenizer = n_vars, moves, tokenizer or Tokenizer()
        self.n_slots = self.n_classes = self.opening = n_vars             # opening: lines before the commands
        self.chance = 1 / n_vars
        self.pairs = np.array(list(combinations(range(n_vars), 2)))       # (n(n-1)/2, 2)

    def check(self, stage):
        """Raise UserError if this task has no such stage."""
        if stage.kind and self.moves == "swap":
            raise UserError(f"stage {stage}: ':{stage.kind}' is for --moves perm; a swap always moves two")
        if stage.kind and stage.kind not in map(str, range(2, self.n_vars + 1)):
            raise UserError(f"stage {stage}: a permutation here moves 2 to {self.n_vars} variables")

    def beyond(self, last):
        """Where to evaluate after training up to `last`: there, farther on each axis, and on both."""
        L, S = last.commands, last.spacing
        return [Stage(*at) for at in ((L, S), (2 * L, S), (L, 2 * S), (2 * L, 2 * S), (4 * L, 4 * S))]

    def commands(self, rng, size, stage):
        """-> lines (B, L, width) as tokens, and source (B, L, n): variable i takes what source[i] held."""
        n, shape = self.n_vars, (size, stage.commands)
        if self.moves == "swap":
            moved = self.pairs[rng.integers(len(self.pairs), size=shape)]  # (B, L, 2)
            onto = moved[..., ::-1]
        else:                                                             # a random few, in random order
            onto = rng.random(shape + (n,)).argsort(-1)[..., :int(stage.kind or n)]
            moved = np.sort(onto, -1)
        everyone = np.broadcast_to(np.arange(n), shape + (n,))
        source = everyone.copy()
        np.put_along_axis(source, moved, onto, -1)
        left = moved if self.moves == "swap" else everyone
        right = np.take_along_axis(source, left, -1)
        blanks = ", ".join("?" * left.shape[-1])
        letters = ord("a") + np.concatenate([left, right], -1)
        return fill(f">>> {blanks} = {blanks}\n", letters, self.tokenizer), source

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` traces of a stage, of the "train" or the "test" stream of a seed."""
        rng, n, L, S = generator(seed, split, stage, t), self.n_vars, stage.commands, stage.spacing

        first = rng.permuted(np.tile(np.arange(n), (size, 1)), axis=1)
        command, source = self.commands(rng, size, stage)
        value = execute(first, source)                                    # counted from 0
        held = execute(first, shuffled(source)) if self.shuffled else value

        # Write: four kinds of lines, each (B, lines, width)
        when = np.arange(S, L + 1, S)                                     # reveal r follows command when[r]
        which = rng.integers(n, size=(size, len(when)))
        seen = value[np.arange(size)[:, None], when, which]
        everyone = np.broadcast_to(np.arange(n), (size, n))
        a, one = ord("a"), ord("1")
        assign = fill(">>> ? = ?\n", np.stack([a + everyone, one + value[:, 0]], -1), self.tokenizer)
        ask = fill(">>> print('?', ?)\n", np.stack([a + which, a + which], -1), self.tokenizer)
        tell = fill("? ?\n", np.stack([a + which, one + seen], -1), self.tokenizer)

        i, asked_at = np.arange(L), n + when + 2 * np.arange(len(when))   # a reveal is two lines
        tokens, places = lay_out(((assign, np.arange(n)), (command, n + i + i // S * 2),
                                  (ask, asked_at), (tell, asked_at + 1)))
        assigned = np.where(np.tri(n, dtype=bool), value[:, :1], -1)      # after line i, variables 0..i exist
        state = np.full((*tokens.shape, n), -1)
        answer, line_end = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
        for at, after in zip(places, (assigned, held[:, 1:], held[:, when], held[:, when])):
            line_end[:, at[:, -1]] = True
            state[:, at[:, -1]] = after
        answer[:, places[-1][:, -2]] = True                               # "a 3\n": just before the newline
        return Batch(*map(torch.from_numpy, (tokens, answer, line_end, state)))

    def execute(self, line, held):
        """Execute a typed line. held: {name: digit}, every variable's value.

        -> the line as traces have it, the values after it, and the name that it prints or None.
        Raises UserError for whatever traces of this task do not contain."""
        names = list(held)
        text = "".join(line.removeprefix(">>>").split())
        shown = re.fullmatch(r"""print\((['"])(\w)\1,\2\)""", text)
        if shown and shown[2] in held:
            return f">>> print('{shown[2]}', {shown[2]})\n", held, shown[2]
        left, _, right = (side.split(",") for side in text.partition("="))
        takes = dict(sorted(zip(left, right)))
        swaps = len(takes) == 2 and [*takes] == [*takes.values()][::-1]
        if len(left) == len(right) == len(takes) and set(takes) == set(takes.values()) <= set(names) \
                and (swaps if self.moves == "swap" else [*takes] == names):
            line = f">>> {', '.join(takes)} = {', '.join(takes.values())}\n"
            return line, {**held, **{name: held[source] for name, source in takes.items()}}, None
        first, *_, last = names
        example = f"{first}, {last} = {last}, {first}"
        if self.moves == "perm":
            example = f"{', '.join(names)} = {', '.join([*names[1:], first])}"
        raise UserError(f"this model knows lines like {example} and print('{last}', {last})")


class Hidden:
    """REPL traces whose branches nobody sees: n assignments, then L lines, maybe swaps and prints.

    One line in S is a print, at random places; a stage LxS:KIND has another `pfsa.schedule`. What can be
    known is the exact belief over the n! ways in which the variables may hold the values; `chances` are its
    odds for what a print will show. n_vars is 2 to 5. state: the number in pfsa.arrangements(n), one slot of
    n! classes. Raises UserError."""
    curriculum = "4x2 8x2 16x2 32x2"
    stage_samples = 3000                    # nobody can be 98 % right
    next_token, whole = True, False
    options = ["n_vars"]
    lexemes = (*LEXEMES, ">>> from random import random\n", " = (", ") if random() < 0.5 else (")

    def __init__(self, n_vars=3, tokenizer=None):
        if not 2 <= n_vars <= 5:
            raise UserError(f"--n-vars {n_vars}: choose 2 to 5, a belief has n! entries")
        self.n_vars, self.tokenizer = n_vars, tokenizer or Tokenizer(self.lexemes)
        self.automaton, self.arrangements = pfsa.maybe_swaps(n_vars), np.array(pfsa.arrangements(n_vars))
        self.n_slots, self.n_classes, self.opening = 1, len(self.arrangements), n_vars + 1
        self.chance = 1 / n_vars

    def check(self, stage):
        """Raise UserError if this task has no such stage."""
        one_of(f"stage {stage}: the kind", stage.kind or "random", [x for x in pfsa.SCHEDULES if x != "none"])
        if stage.kind in ("adversarial", "forced") and stage.spacing != 2:
            raise UserError(f"stage {stage}: every second line is a print there, so write "
                            f"{stage.commands}x2:{stage.kind}")

    def beyond(self, last):
        """Where to evaluate after training up to `last`: there, 4 and 16 times as far, and P1's Figure 10."""
        lengths = [last.commands * times for times in (1, 4, 16)]
        return [last._replace(commands=L) for L in lengths] + [Stage(L, 2, "forced") for L in lengths]

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` traces of a stage, of the "train" or the "test" stream of a seed."""
        rng, n, L = generator(seed, split, stage, t), self.n_vars, stage.commands
        queries = pfsa.schedule(rng, n, size, L, stage.kind or "random", stage.spacing)
        symbols, states = self.automaton.sample(rng, size, L, queries)
        if stage.kind == "forced":
            symbols, states = pfsa.nothing_swapped(n, queries), 0 * states
        first = rng.permuted(np.tile(np.arange(n), (size, 1)), axis=1)    # (B, n), the values at the start

        # The automaton starts in order: rename its things to the values that stand there
        renamed = first[np.arange(size)[:, None, None], self.arrangements]                # (B, n!, n)
        number = (renamed[:, :, None] == self.arrangements).all(-1).argmax(-1)            # (B, n!)
        belief = np.empty((size, L + 1, len(self.arrangements)))
        np.put_along_axis(belief, np.broadcast_to(number[:, None], belief.shape),
                          self.automaton.filter(symbols)[0], -1)
        state = np.take_along_axis(number, states, 1)                     # (B, L+1)

        # Write, and lay out: line 0 imports, lines 1 to n assign, a print is two lines
        pairs, swaps = np.array(list(combinations(range(n), 2))), n * (n - 1) // 2
        print_at, swap_at = np.flatnonzero(queries[0] >= swaps), np.flatnonzero(queries[0] < swaps)
        line = n + 1 + np.arange(L) + (queries[0] >= swaps).cumsum() - (queries[0] >= swaps)
        which = queries[:, print_at] - swaps                              # (B, prints), the variable
        seen = self.arrangements[state[:, print_at], which]
        left = pairs[queries[:, swap_at]]                                 # (B, swaps, 2)
        a, one, everyone = ord("a"), ord("1"), np.broadcast_to(np.arange(n), (size, n))
        text = lambda template, *values: fill(template, np.stack(values, -1), self.tokenizer)
        tokens, (_, assigns, moves, asks, tells) = lay_out((
            (fill(">>> from random import random\n", np.empty((size, 1, 0)), self.tokenizer), np.arange(1)),
            (text(">>> ? = ?\n", a + everyone, one + first), 1 + np.arange(n)),
            (fill(">>> ?, ? = (?, ?) if random() < 0.5 else (?, ?)\n",
                  a + np.concatenate([left, left[..., ::-1], left], -1), self.tokenizer), line[swap_at]),
            (text(">>> print('?', ?)\n", a + which, a + which), line[print_at]),
            (text("? ?\n", a + which, one + seen), line[print_at] + 1)))

        answer, line_end = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
        truth, chances = np.full((*tokens.shape, 1), -1), np.zeros((*tokens.shape, n), np.float32)
        known = np.zeros((*tokens.shape, belief.shape[-1]), np.float32)
        for places, after in ((assigns[-1:], [0]), (moves, swap_at + 1),
                              (asks, print_at), (tells, print_at + 1)):
            truth[:, places[:, -1], 0], known[:, places[:, -1]] = state[:, after], belief[:, after]
        line_end[:, [0, *assigns[:, -1], *moves[:, -1], *asks[:, -1], *tells[:, -1]]] = True
        answer[:, tells[:, -2]] = True
        odds = pfsa.marginals(belief[:, print_at], n)                     # (B, prints, n, n)
        chances[:, tells[:, -2]] = np.take_along_axis(odds, which[..., None, None], 2)[:, :, 0]
        return Batch(*map(torch.from_numpy, (tokens, answer, line_end, truth)),
                     belief=torch.from_numpy(known), chances=torch.from_numpy(chances))


# ----------------------------------------------------------------------------------------------------------
# group: one element a token, one label a token

def cycles(n, *cycles):
    """The permutation of 0 .. n-1 that sends each entry of a cycle to the next, as a tuple of images."""
    image = list(range(n))
    for cycle in cycles:
        for here, there in zip(cycle, cycle[1:] + cycle[:1]):
            image[here] = there
    return tuple(image)


GROUPS = {  # name: generators
    "Z2": [cycles(2, (0, 1))],
    "Z60": [cycles(12, (0, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10, 11))],      # order 3 * 4 * 5
    "S3": [cycles(3, (0, 1)), cycles(3, (0, 1, 2))],
    "S4": [cycles(4, (0, 1)), cycles(4, (0, 1, 2, 3))],
    "A4xZ5": [cycles(9, (0, 1, 2)), cycles(9, (1, 2, 3)), cycles(9, (4, 5, 6, 7, 8))],
    "A5": [cycles(5, (0, 1, 2)), cycles(5, (0, 1, 2, 3, 4))],             # the smallest unsolvable group
    "S5": [cycles(5, (0, 1)), cycles(5, (0, 1, 2, 3, 4))],
    "S5swaps": [cycles(5, pair) for pair in combinations(range(5), 2)],   # S5, but a word holds only swaps
}


def closure(generators):
    """All products of the generators, sorted (a list of tuples), and mul[i, j], the index of "i, then j"."""
    elements = frontier = {tuple(range(len(generators[0])))}
    while frontier:
        frontier = {tuple(g[x] for x in e) for e in frontier for g in generators} - elements
        elements = elements | frontier
    elements = sorted(elements)
    index, images = {e: i for i, e in enumerate(elements)}, np.array(elements)
    return elements, np.array([[index[tuple(then[first])] for then in images] for first in images])


class Group:
    """Words over a finite group. Token t is an element g_t; its label is the product g_1 g_2 ... g_t.

    Elements take the token ids 0, 1, 2, ... (no group here has more than 120). The label is the state, one
    slot with a class per element, and the state head reads it: the next token is random, so there is no
    next-token loss and no answer token. Raises UserError for an unknown group."""
    curriculum = "8x1 16x1 32x1 64x1"
    stage_samples = 0
    next_token = whole = False              # learned from the states alone
    opening = 0                             # lines (here, tokens) before the first command
    shuffled = False
    options = ["group"]

    def __init__(self, group="S5", tokenizer=None):
        one_of("--group", group, GROUPS)
        self.tokenizer = tokenizer or Tokenizer()
        self.elements, self.mul = closure(GROUPS[group])
        letters = GROUPS[group] if group == "S5swaps" else self.elements
        self.letters = np.array([self.elements.index(g) for g in letters])
        self.n_slots, self.n_classes, self.chance = 1, len(self.elements), 1 / len(self.elements)

    def check(self, stage):
        """Raise UserError if this task has no such stage."""
        if stage.spacing != 1 or stage.kind:
            raise UserError(f"stage {stage}: every token of a word has a label, so write {stage.commands}x1")

    def beyond(self, last):
        """Where to evaluate after training up to `last`: there, and at longer words."""
        return [Stage(last.commands * times, 1) for times in (1, 2, 4, 8)]

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` words of stage.commands elements."""
        rng = generator(seed, split, stage, t)
        tokens = self.letters[rng.integers(len(self.letters), size=(size, stage.commands))]
        product = (tokens + self.shuffled) % len(self.elements)           # shuffled: it means the next one
        for i in range(1, stage.commands):
            product[:, i] = self.mul[product[:, i - 1], product[:, i]]
        nowhere, everywhere = np.zeros(tokens.shape, bool), np.ones(tokens.shape, bool)
        return Batch(*map(torch.from_numpy, (tokens, nowhere, everywhere, product[..., None])))


# ----------------------------------------------------------------------------------------------------------
# parity, listperm, arith: straight-line programs that end in an assert (P2 section 4, appendix C)

def stack(*kinds):
    """Kinds of lines (B, lines, width), below each other, filled up with PAD to one width."""
    ends = np.cumsum([x.shape[1] for x in kinds])
    lines = np.full((len(kinds[0]), ends[-1], max(x.shape[-1] for x in kinds)), PAD)
    for x, end in zip(kinds, ends):                                       # np.pad would double a batch's time
        lines[:, end - x.shape[1]:end, :x.shape[-1]] = x
    return lines


class Program:
    """What the three share; `write`, which `batch` calls, is their own. An answer is right if all of it is.

    With sample_length, each training program has a length of its own, 2 to that of its stage: P2's
    curriculum. Held-out ones are as long as their stage says. Raises UserError."""
    curriculum = "16"
    stage_samples = 0
    next_token = whole = True
    shuffled = False
    n_slots = n_classes = opening = 0
    longest = 10 ** 6
    answers = b"0123456789"                                               # what they are made of

    def __init__(self, sample_length=0, tokenizer=None):
        if sample_length not in (0, 1):
            raise UserError(f"--sample-length {sample_length}: give 1 for programs of 2 to L lines, 0 for L")
        self.sample_length, self.tokenizer = sample_length, tokenizer or Tokenizer(self.lexemes)

    def check(self, stage):
        """Raise UserError if this task has no such stage."""
        if stage.spacing != 1 or stage.kind:
            raise UserError(f"stage {stage}: a program has one answer, at its end, so write {stage.commands}")
        if not 2 <= stage.commands <= self.longest:
            raise UserError(f"stage {stage}: a program here has 2 to {self.longest} lines")

    def beyond(self, last):
        """Where to evaluate after training up to `last`: there, and twice as far if there is such a stage."""
        return [Stage(L, 1) for L in (last.commands, 2 * last.commands) if L <= self.longest]

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` programs of a stage, of the "train" or the "test" stream of a seed."""
        rng, L = generator(seed, split, stage, t), stage.commands
        short = self.sample_length and split == "train"
        length = rng.integers(2, L + 1, size=size) if short else np.full(size, L)

        # Tokens of the lines (B, R, W) and of the last one (B, 1, W), PAD anywhere in them; then without gaps
        lines, last, state, text = self.write(rng, length, L)
        tokens, number = stack(lines, last), np.arange(lines.shape[1] + 1)[:, None]
        answer = stack(np.zeros_like(lines), np.isin(last, [*self.answers]))
        line_end = stack(lines == ord("\n"), np.zeros_like(last))
        text = np.take_along_axis(text, (text == PAD).argsort(-1, kind="stable"), -1)
        order, T = (tokens.reshape(size, -1) == PAD).argsort(1, kind="stable"), (tokens > 0).sum((1, 2)).max()
        tokens, answer, line_end, number = (
            np.take_along_axis(np.broadcast_to(x, tokens.shape).reshape(size, -1), order[:, :T], 1)
            for x in (tokens, answer > 0, line_end > 0, number))
        after = np.take_along_axis(stack(state, state[:, -1:]), number[..., None], 1)
        state = np.where(line_end[..., None], after, -1)
        return Batch(*map(torch.from_numpy, (tokens, answer, line_end, state, text)))


class Parity(Program):
    """P2 Figure 6: `p = 1`, then `p ^= 0` or `p ^= 1` for each further bit of a string. State: p."""
    options = ["sample_length"]
    lexemes = "p = ", "p ^= ", "assert p == "
    n_slots, n_classes, chance = 1, 2, 1 / 2

    def write(self, rng, length, L):
        there = np.arange(L) < length[:, None]                            # (B, L)
        bit = rng.integers(2, size=there.shape) * there
        p = np.bitwise_xor.accumulate(bit, 1)
        text = lambda template, x: fill(template, ord("0") + x[..., None], self.tokenizer)
        rest = np.where(there[:, 1:, None], text("p ^= ?\n", bit[:, 1:]), PAD)
        state = np.bitwise_xor.accumulate(bit ^ self.shuffled, 1)         # shuffled: 0 flips, 1 does not
        return (stack(text("p = ?\n", bit[:, :1]), rest), text("assert p == ?\n", p[:, -1:]),
                state[..., None], np.where(there, ord("0") + p, PAD)[..., None])


class ListPerm(Program):
    """P2 Figure 8: a list of 1 to n in any order, and L swaps of two of its places. State: the list."""
    options = ["n_vars", "sample_length"]
    lexemes = "a = [", "a[", "], a[", "] = a[", "assert a == [", ", "

    def __init__(self, n_vars=5, sample_length=0, tokenizer=None):
        if not 2 <= n_vars <= 9:
            raise UserError(f"--n-vars {n_vars}: choose 2 to 9 elements, each a digit")
        super().__init__(sample_length, tokenizer)
        self.n_slots = self.n_classes = self.n_vars = n_vars
        self.chance = 1 / math.factorial(n_vars)

    def write(self, rng, length, L):
        n, B, pairs = self.n_vars, len(length), np.array(list(combinations(range(self.n_vars), 2)))
        there = np.arange(L) < length[:, None]                            # (B, L)
        pair = pairs[rng.integers(len(pairs), size=(B, L))]               # (B, L, 2)
        source = np.broadcast_to(np.arange(n), (B, L, n)).copy()          # place i takes what source[i] held
        np.put_along_axis(source, pair, pair[..., ::-1], -1)
        value = execute(rng.permuted(np.tile(np.arange(n), (B, 1)), axis=1), source)
        held = execute(value[:, 0], shuffled(source)) if self.shuffled else value
        final = value[np.arange(B), length, None]                         # (B, 1, n)
        listed = "a = [" + ", ".join("?" * n) + "]\n"
        text = lambda template, x: fill(template, ord("0") + x, self.tokenizer)
        swaps = text("a[?], a[?] = a[?], a[?]\n", np.concatenate([pair, pair[..., ::-1]], -1))
        exists = np.arange(L + 1)[:, None] <= length[:, None, None]
        return (stack(text(listed, 1 + value[:, :1]), np.where(there[..., None], swaps, PAD)),
                text("assert " + listed.replace("=", "=="), 1 + final), held,
                np.where(exists, text(listed, 1 + value), PAD))


class Arith(Program):
    """P2 appendix C, sampled backwards from `assert a == ...`: L lines like `b = a - 12`; before them, one
    that gives the variables they need numbers of `digits` digits. State, as text: all variables so far.

    An operand is, each as likely, a number, a variable that a later line needs, or a new one. Ours: always
    assign to a variable that a later line needs, so that no line is in vain; draw again where none would be
    left to begin with."""
    options = ["digits", "sample_length"]
    lexemes = " = ", " + ", " - ", ", ", "assert a == "
    curriculum = "4"
    longest = 12                                                          # at most two new variables a line
    answers = b"-0123456789\n"                                            # a number must also end

    def __init__(self, digits=1, sample_length=0, tokenizer=None):
        if not 1 <= digits <= 6:
            raise UserError(f"--digits {digits}: choose 1 to 6")
        super().__init__(sample_length, tokenizer)
        self.digits, [self.equals, self.plus, self.minus, self.comma, _] = digits, range(256, 261)
        self.chance = self.commonest(4)

    def commonest(self, L, programs=4096):
        """How often who always gives the commonest answer to programs of L lines is right."""
        batch = self.batch(Stage(L, 1), programs, 0, "test", 0)
        answers = Counter(tuple(x[a].tolist()) for x, a in zip(batch.tokens, batch.answer))
        return answers.most_common(1)[0][1] / programs

    def sample(self, rng, length, L):
        """Backwards: after line k come k more. -> sign (B, L), variables of the operands (B, L, 2), -1 for
        numbers, target (B, L), and which variables must have a value at the start (B, V) bool."""
        B, V = len(length), 2 * L + 1
        free, named = np.arange(V) == np.zeros((B, 1)), np.ones(B, int)
        sign, operand, target = np.zeros((B, L), int), np.zeros((B, L, 2), int), np.zeros((B, L), int)
        for k in range(L):
            todo = k < length
            while todo.any():
                kind = rng.integers(3, size=(B, 2))                       # a number, needed later, new
                pick = (rng.random((B, 3, V)) * free[:, None]).argmax(-1)
                new = named[:, None] + np.stack([0 * named, kind[:, 0] == 2], 1)
                use = np.select([kind == 1, kind == 2], [pick[:, :2], new], -1)
                after = free & (np.arange(V) != pick[:, 2:]) | (use[..., None] == np.arange(V)).any(1)
                ok = todo & after.any(1)
                sign[ok, k], operand[ok, k], target[ok, k] = rng.choice((-1, 1), B)[ok], use[ok], pick[ok, 2]
                free, named = np.where(ok[:, None], after, free), named + ok * (kind == 2).sum(1)
                todo &= ~ok
        return sign, operand, target, free

    def number(self, x, width):
        """Integers (...) -> tokens (..., 1 + width): a sign, and digits, with PAD before them."""
        digit = np.abs(x)[..., None] // 10 ** np.arange(width)[::-1] % 10
        shown = (digit.cumsum(-1) > 0) | (np.arange(width) == width - 1)
        sign = np.where(x < 0, ord("-"), PAD)[..., None]
        return np.concatenate([sign, np.where(shown, ord("0") + digit, PAD)], -1)

    def write(self, rng, length, L):
        sign, operand, target, free = self.sample(rng, length, L)
        (B, V), known, low = free.shape, free, 10 ** (self.digits - 1) if self.digits > 1 else 0
        number, value = (rng.integers(low, 10 ** self.digits, size=size) for size in ((B, L, 2), (B, V)))

        def row(*parts):
            return np.concatenate([np.broadcast_to(x, (B, np.shape(x)[-1])) for x in parts], -1)[:, None]

        def listing(each, known):
            """Parts (B, V, w), those of known variables, commas between them -> (B, V * (1 + w))."""
            comma = np.where(known.cumsum(1) > 1, self.comma, PAD)[..., None]
            return np.where(known[..., None], np.concatenate([comma, each], -1), PAD).reshape(B, -1)

        def memory():
            each = [letter, np.full((B, V, 1), self.equals), self.number(value, self.digits + 4)]
            return row(listing(np.concatenate(each, -1), known), [ord("\n")])

        letter = np.broadcast_to(ord("a") + np.arange(V)[:, None], (B, V, 1))
        given = listing(self.number(value, self.digits), free)
        lines, texts = [row(listing(letter, free), [self.equals], given, [ord("\n")])], [memory()]
        for k in reversed(range(L)):
            active, named = k < length[:, None], operand[:, k] >= 0
            x = np.where(named, np.take_along_axis(value, operand[:, k].clip(0), 1), number[:, k])
            name = np.pad(ord("a") + operand[:, k, :, None], ((0, 0), (0, 0), (0, self.digits)))
            text = np.where(named[..., None], name, self.number(number[:, k], self.digits))
            here = active & (np.arange(V) == target[:, k, None])
            value = np.where(here, x[:, :1] + sign[:, k, None] * x[:, 1:], value)
            known = known | here
            line = row(ord("a") + target[:, k, None], [self.equals], text[:, 0],
                       np.where(sign[:, k, None] > 0, self.plus, self.minus), text[:, 1], [ord("\n")])
            lines.append(np.where(active[..., None], line, PAD))
            texts.append(np.where(active[..., None], memory(), PAD))
        last = row(fill("assert a == ", np.empty((B, 0)), self.tokenizer),
                   self.number(value[:, 0], self.digits + 4), [ord("\n")])
        return stack(*lines), last, np.zeros((B, L + 1, 0), int), stack(*texts)


# ----------------------------------------------------------------------------------------------------------
# trace: a function and its input, unrolled into the lines that run (P2 section 2, appendix A)

class Rejected(Exception):
    """Why a function has no trace."""


class Jump(Exception):
    """break, continue, or (return, value, its source), on its way to where it ends."""


def literal(x, inside=()):
    """Source of a value that is made of built-in types only, else None. Equal sets have equal source, in
    whatever order they hold their elements."""
    if type(x) in (bool, type(None), str, bytes) or type(x) is int and abs(x) < 10 ** 1000:
        return repr(x)
    if type(x) in (float, complex):
        return repr(x) if abs(x) < math.inf else None                     # of nan that is false, too
    if type(x) not in (list, tuple, set, dict) or id(x) in inside:
        return None
    items = [[literal(y, (*inside, id(x))) for y in item]
             for item in (x.items() if type(x) is dict else zip(x))]
    if any(None in item for item in items):
        return None
    items = [": ".join(item) for item in items]
    if type(x) is set:
        return "{" + ", ".join(sorted(items)) + "}" if items else "set()"
    left, right = {list: "[]", tuple: "()", dict: "{}"}[type(x)]
    return left + ", ".join(items) + "," * (type(x) is tuple and len(x) == 1) + right


def look(x, depth=4):
    """What can be seen of a value without moving it, so that it can be told whether it changes: as `literal`,
    but of iterators and objects, too. None where nothing is to be seen, as in a generator."""
    if literal(x) is not None or not depth:
        return literal(x)
    if isinstance(x, (list, tuple, set, frozenset, dict)):
        return str(type(x)), [look(y, depth - 1) for y in (x.items() if isinstance(x, dict) else x)]
    if isinstance(x, range):                                              # a range iterator makes it anew
        return repr(x)
    if hasattr(x, "__next__"):
        with contextlib.suppress(TypeError):
            return str(type(x)), [look(y, depth - 1) for y in x.__reduce__()[1:]]
        return None
    return id(x), [look(y, depth - 1) for y in getattr(x, "__dict__", {}).items()]


def names_in(*nodes):
    """The names that pieces of a syntax tree mention."""
    return {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)}


def own(function):
    """The nodes of a function's body, but for those of functions and classes inside it."""
    todo = [*function.body]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)


class Memory:
    """One flat namespace, which remembers what was in it before the trace."""

    def __init__(self, prelude):
        self.scope = {"__name__": "trace"}
        exec(prelude, self.scope)
        self.before = dict(self.scope)

    def seen(self, see):
        """{name: see(value)} of what the trace has put there."""
        return {name: see(x) for name, x in self.scope.items()
                if not name.startswith("__") and not (name in self.before and self.before[name] is x)}

    def state(self):
        """{name: literal}. What has no literal, as a function, an iterator, a module, is not in it: the
        address in its repr would differ from run to run."""
        return {name: x for name, x in self.seen(literal).items() if x is not None}


class Tracer(Memory):
    """Unrolls a call. It walks if, for, while, try and return itself; every other statement it executes in
    one flat namespace, and adds the same source to `lines`. So the trace is what ran.

    What stands around the function is `prelude`, opaque. states: {name: literal} after each line; last: the
    assert; result: its right side. Raises Rejected, or what the function raises."""
    limits = {"steps": 50, "characters of code": 1000, "characters of state": 12000,
              "conditions and rounds of loops": 1000}
    magic = {"locals", "globals", "vars", "dir", "exec", "eval", "compile", "__import__"}

    def __init__(self, code, arguments, name=None):
        for method in ("text", "part", "compiled"):                       # loops ask again and again
            setattr(self, method, functools.cache(getattr(self, method)))
        self.source = textwrap.dedent(code.replace("\r\n", "\n")).strip("\n") + "\n"
        try:
            tree, self.rows = ast.parse(self.source), self.source.encode().split(b"\n")
        except (SyntaxError, ValueError) as error:
            raise Rejected(f"no Python: {error}")
        functions = [x for x in tree.body if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))]
        functions = [x for x in functions if name in (None, x.name)]
        if not functions:
            raise Rejected(f"no function {name or ''}".rstrip())
        function, inner = functions[-1], [*own(functions[-1])]
        around = [x for x in tree.body if x is not function]
        self.name = function.name
        for why, so in (("async", isinstance(function, ast.AsyncFunctionDef)),
                        ("a decorator", function.decorator_list),
                        ("a generator", any(isinstance(x, (ast.Yield, ast.YieldFrom)) for x in inner)),
                        ("locals, exec, eval or their like", names_in(*function.body) & self.magic),
                        ("recursion", any(self.name in names_in(x) for x in around if hasattr(x, "body")))):
            if so:
                raise Rejected(why)
        self.prelude = "\n".join(self.text(x) for x in around if self.name not in names_in(x))
        super().__init__(self.prelude)
        self.lines, self.states, self.left = [], [], dict(self.limits)
        self.loops, self.guards, self.caught = {}, 0, []

        bound = {x.id for x in inner if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load)}
        bound |= {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}
        shadowed = bound & {"iter", "next"}
        self.iter = "({}).__iter__()" if shadowed else "iter(({}))"
        self.next = "{}.__next__()" if shadowed else "next({})"
        self.loop = next(x for x in ("forloop", "forloop_", "forloop__")
                         if not any(y.startswith(x) for y in bound))
        self.bind(arguments, function.args)
        value, source = None, "None"
        try:
            self.block(function.body)
        except Jump as jump:
            _, value, source = jump.args
        self.result = literal(value)
        if self.result is None:
            raise Rejected("an output that has no literal")
        self.last = f"assert ({source}) == {self.result}"
        self.spend("characters of code", len(self.last))

    def bind(self, arguments, parameters):
        """The first line, parameters = arguments: as they were written, if each is in its place."""
        call = ast.parse(f"f({arguments})", mode="eval").body
        names = [x.arg for x in parameters.posonlyargs + parameters.args]
        plain = not (call.keywords or parameters.vararg or parameters.kwarg or parameters.kwonlyargs
                     or any(isinstance(x, ast.Starred) for x in call.args))
        if not plain or len(call.args) != len(names):
            scope = {"__name__": "trace"}
            exec(self.source, scope)
            scope["bind"] = inspect.signature(scope[self.name]).bind
            bound = eval(f"bind({arguments})", scope)
            bound.apply_defaults()
            names, values = [*bound.arguments], [literal(x) for x in bound.arguments.values()]
            if None in values:
                raise Rejected("an argument that has no literal")
            arguments = ", ".join(values)
        if names:
            self.execute(f"{', '.join(names)} = {arguments.strip().rstrip(',')}")

    # The source of a piece of the tree, as it was written: ast.unparse would write it anew

    def segment(self, node):
        text = b"\n".join(self.rows[node.lineno - 1:node.end_lineno])     # offsets count bytes
        past = len(text) - len(self.rows[node.end_lineno - 1]) + node.end_col_offset
        return text[node.col_offset:past].decode()

    def text(self, node):
        """Of a statement, without its indentation."""
        first = min(x.lineno for x in [node, *getattr(node, "decorator_list", [])])
        whole, segment = b"\n".join(self.rows[first - 1:node.end_lineno]).decode(), self.segment(node)
        for text in (textwrap.dedent(" " * node.col_offset + segment), segment, textwrap.dedent(whole)):
            with contextlib.suppress(SyntaxError):
                if ast.dump(ast.parse(text)) == ast.dump(ast.Module([node], [])):
                    break
        else:
            raise Rejected("a statement that cannot stand alone")
        inner = any(isinstance(x, ast.Nonlocal) for x in ast.walk(node))
        return re.sub(r"\bnonlocal\b", "global", text) if inner else text

    def part(self, node):
        """Of an expression or a target, so that it can stand in a line."""
        text = self.segment(node)
        return f"({text})" if "\n" in text or isinstance(node, ast.NamedExpr) else text

    # One line

    def compiled(self, text, mode):
        tree = ast.parse(text, mode=mode)
        if self.name in names_in(tree) and self.name not in self.scope:
            raise Rejected("recursion")
        return compile(tree, "<trace>", mode)

    def run(self, do, text):
        """exec or eval. What raises where it is caught must change nothing: no line can do half a job."""
        code, before = self.compiled(text, do.__name__), self.seen(look) if self.guards else None
        try:
            return do(code, self.scope)
        except BaseException:
            if self.guards and self.seen(look) != before:
                raise Rejected("a caught exception after half a job")
            raise

    def execute(self, text):
        self.run(exec, text)
        self.add(text)

    def add(self, text):
        self.lines.append(text)
        self.states.append(self.state())
        self.spend("steps", len(self.lines) > 1)                          # the first gives the arguments
        self.spend("characters of code", len(text) + 1)
        self.spend("characters of state", sum(len(name + x) for name, x in self.states[-1].items()))

    def spend(self, what, n=1):
        self.left[what] -= n
        if self.left[what] < 0:
            raise Rejected(f"more than {self.limits[what]} {what}")

    # Statements, a method for each kind that is not simple

    def block(self, body):
        for node in body:
            getattr(self, type(node).__name__, self.simple)(node)

    def simple(self, node):
        self.execute(self.text(node))

    def nothing(self, node):
        pass

    def unknown(self, node):
        name = type(node).__name__
        raise Rejected("async" if name.startswith("Async") else f"a {name.lower()} statement")

    Pass = Global = Nonlocal = nothing
    With = AsyncWith = AsyncFor = Match = TryStar = unknown

    def Expr(self, node):
        if not isinstance(node.value, ast.Constant):                      # a docstring
            self.simple(node)

    def AnnAssign(self, node):                                            # functions evaluate no annotations
        if node.value:
            self.execute(f"{self.part(node.target)} = {self.part(node.value)}")

    def test(self, node):
        """Evaluate a condition. If that changes anything, or might, it is a line of its own."""
        self.spend("conditions and rounds of loops")
        text, before = self.part(node), self.seen(look)
        value = bool(self.run(eval, f"({text})"))
        if self.seen(look) != before or any(before.get(name, "") is None for name in names_in(node)):
            self.add(text)
        return value

    def If(self, node):
        self.block(node.body if self.test(node.test) else node.orelse)

    def While(self, node):
        while self.test(node.test):
            if self.broken(node.body):
                return
        self.block(node.orelse)

    def For(self, node):
        it = self.loops.setdefault(node, f"{self.loop}{len(self.loops)}")
        self.execute(f"{it} = " + self.iter.format(self.segment(node.iter)))
        text = f"{self.part(node.target)} = {self.next.format(it)}"
        while True:
            self.spend("conditions and rounds of loops")
            try:
                exec(self.compiled(text, "exec"), self.scope)
            except StopIteration:
                break
            self.add(text)
            if self.broken(node.body):
                return
        self.block(node.orelse)

    def broken(self, body):
        """One round of a loop. -> whether it ended in break."""
        try:
            self.block(body)
        except Jump as jump:
            if jump.args[0] == "return":
                raise
            return jump.args[0] == "break"

    def Break(self, node):
        raise Jump("break")

    def Continue(self, node):
        raise Jump("continue")

    def Return(self, node):
        text = self.segment(node.value) if node.value else "None"
        raise Jump("return", self.run(eval, f"({text})"), text)

    def Raise(self, node):
        if not node.exc:
            raise self.caught[-1]
        self.run(exec, self.text(node))

    def Try(self, node):
        leaving = self.leaving(node.body, bool(node.handlers))
        if leaving is None:
            leaving = self.leaving(node.orelse)
        elif not isinstance(leaving, (Jump, Rejected)):
            for handler in node.handlers:
                kind = self.run(eval, self.part(handler.type)) if handler.type else BaseException
                if isinstance(leaving, kind):
                    leaving = self.handle(handler, leaving)
                    break
        if not isinstance(leaving, Rejected):
            self.block(node.finalbody)
        if leaving:
            raise leaving

    def leaving(self, body, guarded=False):
        """-> the exception or Jump with which a block is left, or None."""
        self.guards += guarded
        try:
            self.block(body)
        except BaseException as error:
            return error
        finally:
            self.guards -= guarded

    def handle(self, handler, error):
        if handler.name in names_in(*handler.body):
            text = f"{type(error).__name__}({', '.join(literal(x) or '?' for x in error.args)})"
            try:
                same = eval(text, self.scope)
            except Exception:
                same = None
            if type(same) is not type(error) or same.args != error.args:
                raise Rejected("a caught exception that has no literal")
            self.execute(f"{handler.name} = {text}")
        self.caught.append(error)
        leaving = self.leaving(handler.body)
        self.caught.pop()
        return leaving


def unroll(call):
    """{"id", "code", "input"} and perhaps the function's "name" and its "output" -> a row of a trace file:
    {"id", "source", "call", "output", "trace", "states", "steps"}. The function itself must give what its
    trace does. Raises Rejected."""
    try:
        tracer, scope = Tracer(call["code"], call["input"], call.get("name")), {"__name__": "trace"}
        exec(tracer.source, scope)
        called = f"{tracer.name}({call['input']})"
        result = literal(eval(called, scope))
    except Rejected:
        raise
    except BaseException as error:
        raise Rejected(f"it raises {type(error).__name__}")
    if result != tracer.result:
        raise Rejected("it ends otherwise than the function")
    if call.get("output") is not None and literal(ast.literal_eval(call["output"])) != result:
        raise Rejected("its output is not what the row says")
    lines = [*[tracer.prelude] * bool(tracer.prelude), *tracer.lines, tracer.last]
    return {"id": call["id"], "source": tracer.source, "call": called, "output": result,
            "trace": "\n".join(lines), "states": tracer.states, "steps": max(0, len(tracer.states) - 1)}


def statements(row):
    """A row's trace as Python reads it -> its prelude's statements, its lines', the assert's last."""
    body = ast.parse(row["trace"]).body
    first = len(body) - len(row["states"]) - 1
    return body[:first], body[first:]


def replay(row):
    """Execute a trace in a clean namespace. Raises Rejected unless states and output are as the row says."""
    prelude, lines = statements(row)
    compiled = lambda *nodes: compile(ast.Module([*nodes], []), "<trace>", "exec")
    memory = Memory(compiled(*prelude))
    for line, state in zip(lines, row["states"]):
        exec(compiled(line), memory.scope)
        if memory.state() != state:
            raise Rejected("a replay has other states")
    try:
        exec(compiled(lines[-1]), memory.scope)
    except AssertionError:
        raise Rejected("a replay has another output")
    return {}


# ----------------------------------------------------------------------------------------------------------
# A data set's code runs in a process that knows nothing but the functions above, and each call in a process
# of its own below that, limited and watched. That keeps accidents in. It is no sandbox.

FORBIDDEN = re.compile(r"os\.(fork|posix_spawn|spawn|system|exec|kill)|subprocess|socket|ctypes")


def serve():
    """Jobs on stdin, answers on stdout, a line of JSON each: {"do", "with", "seconds"} -> do(with), or
    {"reason"}."""
    jobs, answers, nothing = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for line in jobs:
        job, (reading, writing) = json.loads(line), os.pipe()
        with tempfile.TemporaryDirectory() as folder:
            pid = os.fork()
            if not pid:
                os.setsid()
                os.chdir(folder)
                alone(job, writing)
            os.close(writing)
            said, late, end = b"", False, time.monotonic() + job["seconds"]
            while not late and len(said) < 2 ** 24:
                late = not select.select([reading], [], [], max(0, end - time.monotonic()))[0]
                piece = b"" if late else os.read(reading, 2 ** 16)
                if not piece:
                    break
                said += piece
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.close(reading)
            os.waitpid(pid, 0)
        try:
            answer = json.loads(said)
        except ValueError:
            answer = {"reason": f"more than {job['seconds']} s" if late else "it ends its process"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def alone(job, writing):
    """In a process of its own: limit it, do the job, write the answer, end."""
    for what, most in ((resource.RLIMIT_CPU, job["seconds"] + 1), (resource.RLIMIT_AS, 2 ** 29),
                       (resource.RLIMIT_FSIZE, 2 ** 20), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)                         # writing more is then an OSError

    def watch(event, args):
        if FORBIDDEN.match(event):
            raise PermissionError(event)
    sys.addaudithook(watch)
    try:
        answer = {"unroll": unroll, "replay": replay, "hold": hold}[job["do"]](job["with"])
    except Rejected as why:
        answer = {"reason": str(why)}
    except BaseException as error:
        answer = {"reason": f"it raises {type(error).__name__}"}
    with os.fdopen(writing, "w") as file:
        json.dump(answer, file)
    os._exit(0)


def hold(program):
    """Execute a program. -> {} if it raises nothing."""
    exec(program, {"__name__": "trace"})
    return {}


class Child:
    """The other end of `serve`. Strings hash as hash_seed says: what depends on the order of a set is the
    same in all our runs, and differs between two seeds."""
    imports = ("ast", "contextlib", "functools", "inspect", "json", "math", "os", "re", "resource", "select",
               "signal", "sys", "tempfile", "textwrap", "time")
    knows = (Rejected, Jump, literal, look, names_in, own, Memory, Tracer, unroll, statements, replay, hold,
             alone, serve)

    def __init__(self, hash_seed):
        if not resource:
            raise UserError("this system cannot limit a process: trace and score need a Unix")
        self.hash_seed, self.process = hash_seed, None

    def ask(self, do, with_, seconds=3):
        """-> do(with_), or {"reason"}: why there is no such thing."""
        if self.process is None:
            program = ["import " + ", ".join(self.imports), *map(inspect.getsource, self.knows),
                       f"FORBIDDEN = re.compile({FORBIDDEN.pattern!r})", "serve()"]
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-c", "\n\n".join(program)], text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONHASHSEED": str(self.hash_seed)})
        try:
            self.process.stdin.write(json.dumps({"do": do, "with": with_, "seconds": seconds}) + "\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], seconds + 10)[0]:
                return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            pass
        self.stop()                                                       # its watchman is gone, too
        return {"reason": "it ends its process"}

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


# ----------------------------------------------------------------------------------------------------------
# Files of traces

def calls_in(row):
    """A row of CRUXEval, of MBPP, or {"code", "input"} -> its calls, as `unroll` wants them; in place of one
    that is none of these, {"reason"}."""
    text = lambda *keys: all(isinstance(row.get(key), str) for key in keys)
    if isinstance(row, dict) and text("code", "input"):
        return [{name: row.get(name) for name in ("id", "code", "name", "input", "output")}]
    if not (isinstance(row, dict) and text("code") and isinstance(row.get("test_list"), list)):
        return [{"reason": "no keys code and input, or code and test_list"}]
    calls, setup = [], [row.get("test_setup_code") or "", *row.get("test_imports", []), row["code"]]
    for i, test in enumerate(row["test_list"]):
        try:                                                              # MBPP: assert name(input) == output
            [line], test = ast.parse(test.strip()).body, test.strip()
            call, [output], [equal] = line.test.left, line.test.comparators, line.test.ops
            name, given = ast.get_source_segment(test, call).split("(", 1)
            if not isinstance(equal, ast.Eq) or name != call.func.id or given[-1:] != ")":
                raise ValueError
            calls.append({"id": f"{row.get('task_id', '')}/{i}", "code": "\n".join(setup), "name": name,
                          "input": given[:-1], "output": ast.get_source_segment(test, output)})
        except (AttributeError, SyntaxError, ValueError):
            calls.append({"reason": "a test that is not assert name(input) == output"})
    return calls


def read_lines(path):
    """-> the lines of a file, as bytes. Raises UserError."""
    try:
        return Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file of JSON lines")


def new_files(overwrite, *paths):
    """-> files to be written. Raises UserError, and then there is none of them."""
    for path in map(Path, paths):
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists: choose another --out, or --overwrite it")
    try:
        return [open(path, "w") for path in paths]
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; choose another --out")


def trace_file(path, out, overwrite):
    """Unroll every call in a JSONL file -> rows in `out`, see `unroll`; calls without a trace, and why, in a
    second file beside it. Both are whole whenever this ends. -> exit code."""
    lines, rejected, why, kept = read_lines(path), Path(out).with_suffix(".rejected.jsonl"), Counter(), 0
    tracer, checker, (good, bad) = Child(0), Child(1), new_files(overwrite, out, rejected)
    with tracer, checker, good, bad, Interrupt() as interrupt:
        for number, line in enumerate(tqdm(lines, unit=" rows", disable=None), 1):
            if interrupt.asked:
                break
            try:
                calls = calls_in(json.loads(line.decode("utf-8-sig"))) if line.strip() else []
            except (ValueError, RecursionError) as error:
                calls = [{"reason": f"no JSON: {error}"}]
            for call in calls:
                call = {"id": f"line {number}", **{name: x for name, x in call.items() if x is not None}}
                row = call if "reason" in call else tracer.ask("unroll", call)
                row = row if "reason" in row else {**row, **checker.ask("replay", row)}
                if "reason" not in row:
                    good.write(json.dumps(row) + "\n")
                    kept += 1
                    continue
                why[row["reason"].split(":")[0]] += 1
                bad.write(json.dumps({"line": number, "id": call["id"], "reason": row["reason"],
                                      "row": line.decode(errors="replace")}) + "\n")
                if row["reason"].startswith("no "):
                    tqdm.write(f"{path}, line {number}: {row['reason']}", file=sys.stderr)
            good.flush()
            bad.flush()
    print(f"{kept} traces in {out}; {why.total()} calls without, in {rejected}")
    for reason, n in why.most_common():
        print(f"{n:6d}  {reason}")
    return 130 if interrupt.asked else 0


def read_traces(path):
    """-> the rows of a trace file. Raises UserError."""
    with contextlib.suppress(ValueError, TypeError):
        rows = [json.loads(line) for line in read_lines(path)]
        if rows and all({"id", "source", "trace", "states", "steps"} <= set(row) for row in rows):
            return rows
    raise UserError(f"{path}: no traces; make some with python data.py trace --file CALLS --out TRACES")


# ----------------------------------------------------------------------------------------------------------
# Prompts for any language model, and a judge that executes its answers (P2 appendix B)

EXAMPLES = ({"id": "", "code": "def f(x, y):\n    y = y + 3\n    return x * y", "input": "2, 1"},
            {"id": "", "code": "def f(s):\n    for c in 'no':\n        s += c\n    return s", "input": "'a'"})
KINDS = "output/program", "output/trace", "input/program", "input/trace"


def question(row, kind):
    """A program that ends in an assert -> what stands before its output or its input, this, what after it."""
    given, text, output = row["call"][:-1].split("(", 1)[1], row["trace"], row["output"]
    if kind.endswith("program"):
        text = f"{row['source']}assert {row['call']} == {output}"
    if kind.startswith("output"):
        return text[:-len(output)], output, ""
    if kind.endswith("program"):
        start = len(text) - len(f"{given}) == {output}")
        return text[:start], given, text[start + len(given):]
    first = statements(row)[1][0]
    start = len("\n".join(["", *text.split("\n")[:first.lineno - 1], ""])) - 1
    source = ast.get_source_segment(text, first)
    target, value = source.split(" = ", 1)
    return text[:start] + target + " = ", value, text[start + len(source):]


def block(row, kind):
    """A question, and its answer: a program's repeats its assert, a trace's does not."""
    before, answer, after = question(row, kind)
    if kind.endswith("program"):
        answer = before.rsplit("\n", 1)[-1] + answer + after
    return f"[PYTHON]\n{before}??{after}\n[/PYTHON]\n[ANSWER]\n", f"{answer}\n[/ANSWER]\n\n"


@functools.cache
def examples(kind):
    return "".join(sum((block(unroll(call), kind) for call in EXAMPLES), ()))


def write_prompts(path, out, overwrite):
    """For each row of a trace file and each kind of question, {"id", "prompt", "steps"}, a line of `out`."""
    rows = read_traces(path)
    with new_files(overwrite, out)[0] as file:
        for row in rows:
            for kind in KINDS if row["call"][-2:] != "()" else KINDS[:2]:
                file.write(json.dumps({"id": f"{row['id']}/{kind}", "steps": row["steps"],
                                       "prompt": examples(kind) + block(row, kind)[0]}) + "\n")
    return 0


def judge(child, row, kind, completion):
    """Whether a completion is right: a value, without names, with which the program runs to its end."""
    before, _, after = question(row, kind)
    answer, line = completion.split("[/ANSWER]")[0].strip(), before.rsplit("\n", 1)[-1]
    if answer.startswith(line) and answer.endswith(after) and kind.endswith("program"):
        answer = answer[len(line):len(answer) - len(after)]
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        call = ast.parse(f"set({answer}\n)", mode="eval").body
        if names_in(call) == {"set"} and isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            answer = f"{answer}\n" if kind == "input/program" else f"({answer}\n)"
            return not child.ask("hold", before + answer + after)
    return False


def judge_file(path, completions, most=(0, 5, 10, 20, 30, 50)):
    """Print how many of the {"id", "completion"} are right, ids as `write_prompts` gave them, by steps."""
    rows, right = {str(row["id"]): row for row in read_traces(path)}, {kind: {} for kind in KINDS}
    with Child(0) as child:
        for number, line in enumerate(tqdm(read_lines(completions), unit=" completions", disable=None), 1):
            try:
                said = json.loads(line)
                name, *kind = said["id"].rsplit("/", 2)
                row, by_steps = rows[name], right["/".join(kind)]
                verdict = judge(child, row, "/".join(kind), said["completion"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{completions}, line {number}: give the id of a prompt, and a completion")
            by_steps.setdefault(next(n for n in most if row["steps"] <= n), []).append(verdict)
    print("right, in %   " + "".join(f"{name:>10s}" for name in [f"<= {n} steps" for n in most] + ["all"]))
    for kind, by_steps in right.items():
        bins = [by_steps.get(n, []) for n in most] + [sum(by_steps.values(), [])]
        print(f"{kind:14s}" + "".join(f"{100 * sum(x) / len(x):10.1f}" if x else 10 * " " for x in bins))
    return 0


# ----------------------------------------------------------------------------------------------------------
# trace as a task: small functions made at random, or anyone's, from a file

LINES = """$i += $n | $i -= $i | $i = $i * $n + $i | $i = max($i, $i) | $i = len($l) | $i = $s.count($c) |
$i += $l[0] | $i = sum($l) % $n | $i = $n | $l.append($i) | $l.pop() | $l.sort() | $l.reverse() |
$l = $l[1:] | $l = $l + [$i, $n] | $l[0] = $i | $l = [$n + x for x in $l] | $l = [$i, $i] | $s += $c |
$s = $s[::-1] | $s = $s[1:] | $s = $s.upper() | $s = $s.replace($c, $c) | $s = $c + $s | $s += str($i)"""
LINES = LINES.replace("\n", " ").split(" | ")
TESTS = "$i > $n | $i % 2 == 0 | $i in $l | len($l) > $n | $c in $s | $i < $i".split(" | ")
LOOPS = "for $I in range($n): | for $I in $l: | for $S in $s: | while $i > $n:".split(" | ")


def random_function(rng):
    """A function of ints, lists of ints and strings, with loops and branches, and its arguments, both as
    source. Change the templates above and it is another language. What it does may be more than Python or a
    limit allows: then it has no trace. rng: a random.Random."""
    free, lines = rng.sample("abcdeghjkmnpqrtuvwyz", 20), []
    names = {kind: [free.pop() for _ in range(n)] for kind, n in (("i", 2), ("l", 1), ("s", 1))}

    def fill_in(template):
        """$i, $l, $s: an int, a list, a string that exists; $I, $S: a new one; $n: a digit; $c: a letter."""
        def word(match):
            kind = match[1]
            if kind.isupper():
                return free[-1]
            drawn = {"n": str(rng.randint(1, 5)), "c": repr(rng.choice("abc"))}
            return drawn.get(kind) or rng.choice(names[kind])
        line = re.sub(r"\$(\w)", word, template)
        for kind in re.findall(r"\$([A-Z])", template):
            names[kind.lower()].append(free.pop())
        return line

    def value(kind):
        numbers = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))]
        letters = "".join(rng.choices("abc", k=len(numbers)))
        return {"i": str(numbers[0]), "l": str(numbers), "s": repr(letters)}[kind]

    def block(indent, size, loop=False):
        for _ in range(size):
            kind, outside = rng.random(), {kind: [*names[kind]] for kind in names}
            if kind < 0.55 or len(indent) > 8:
                lines.append(indent + fill_in(rng.choice(LINES)))
            elif kind < 0.65 and loop:
                lines.append(indent + fill_in(f"if {rng.choice(TESTS)}: {rng.choice(['break', 'continue'])}"))
            else:
                branch = kind < 0.8
                lines.append(indent + fill_in(f"if {rng.choice(TESTS)}:" if branch else rng.choice(LOOPS)))
                block(indent + "    ", rng.randint(1, 3), loop or not branch)
                names.update({kind: [*outside[kind]] for kind in names})  # who knows if there was a round
                if branch and rng.random() < 0.5:
                    lines.append(indent + "else:")
                    block(indent + "    ", rng.randint(1, 2), loop)

    places = [(kind, name) for kind in names for name in names[kind]]
    given = rng.sample(places, rng.randint(1, 4))
    lines += [f"    {name} = {value(kind)}" for kind, name in places if (kind, name) not in given]
    first = len(lines)
    block("    ", rng.randint(1, 5))
    changed = sorted({line.strip()[0] for line in lines[first:]} & {x for _, x in places}) or [places[0][1]]
    lines.append("    return " + ", ".join(rng.sample(changed, min(len(changed), rng.randint(1, 2)))))
    return (f"def f({', '.join(name for _, name in given)}):\n" + "\n".join(lines),
            ", ".join(value(kind) for kind, _ in given))


def random_rows(rng):
    """Rows of functions made at random, as of a file, without end."""
    for number in count():
        code, arguments = random_function(rng)
        with contextlib.suppress(Rejected):
            yield unroll({"id": f"random {number}", "code": code, "input": arguments})


def encode_trace(row, tokenizer):
    """A row of a trace file -> its number of lines; tokens (T,), answer (T,) bool; tokens at which a line
    ends, and the state's text there, each a list; whether it is for testing."""
    text, (_, lines) = row["trace"] + "\n", statements(row)
    written, ends = text.split("\n"), [0, *(line.end_lineno for line in lines)]
    pieces = ["\n".join([*written[first:past], ""]) for first, past in zip(ends, ends[1:])]
    output = len(ast.get_source_segment(text, lines[-1].test.comparators[0])) + 1
    pieces[-1:] = pieces[-1][:-output], pieces[-1][-output:]
    pieces = [tokenizer.encode(piece) for piece in pieces]
    tokens, answer = np.array(sum(pieces, [])), np.zeros(sum(map(len, pieces)), bool)
    answer[-len(pieces[-1]):] = True
    states = [tokenizer.encode(", ".join(f"{name} = {x}" for name, x in state.items()) + "\n")
              for state in row["states"]]
    ends = np.cumsum([len(piece) for piece in pieces[:-2]], dtype=int) - 1
    told = [len(state) <= Trace.longest_state for state in states]
    return {"lines": len(states), "tokens": tokens, "answer": answer, "ends": ends[np.array(told, bool)],
            "states": [state for state, t in zip(states, told) if t],
            "test": zlib.crc32(row["source"].encode()) % 10 == 0}


@functools.cache
def encode_file(path, lexemes):
    """-> the traces of a file, encoded, once in a process."""
    return [encode_trace(row, Tokenizer(lexemes)) for row in read_traces(path)]


class Trace:
    """Execute the trace of a function: all its lines are there, and an assert, whose right side is the
    answer. State, as text: all variables that have literals.

    Functions are made at random, others each time; or, with trace_file, they come from a file, one in ten
    for testing. Stage LxS: traces of L lines, or up to S - 1 fewer, before the assert. LxS:all, from a file,
    tests on functions for training, too. Raises UserError."""
    options = ["trace_file"]
    lexemes = (" = ", ", ", " += ", " -= ", "assert (", ") == ", "forloop", " = iter((", " = next(forloop",
               ".append(", "range(", "len(", "sum(", "max(", ".count(", ".replace(", ".upper()", "[::-1]",
               "[1:]", ".sort()", ".reverse()", ".pop()", "str(")
    curriculum = "4x4 8x8 16x16 24x24"
    stage_samples = 4000
    next_token = whole = True
    n_slots = n_classes = opening = 0
    longest_state = 100                                                   # tokens; longer ones are not told

    def __init__(self, trace_file="", tokenizer=None):
        self.tokenizer, self.trace_file = tokenizer or Tokenizer(self.lexemes), trace_file
        self.rows = encode_file(trace_file, self.tokenizer.lexemes) if trace_file else []

    def check(self, stage):
        """Raise UserError if this task has no such stage."""
        if stage.kind not in ("", "all") or stage.kind and not self.rows:
            raise UserError(f"stage {stage}: write LxS, traces of L lines or up to S - 1 fewer; or, with a "
                            "--trace-file, LxS:all")
        if self.rows and not all(self.chosen(stage, split) for split in SPLITS):
            raise UserError(f"stage {stage}: {self.trace_file} has too few traces of that many lines")
        if stage.commands > Tracer.limits["steps"] + 1:
            raise UserError(f"stage {stage}: traces have up to {Tracer.limits['steps'] + 1} lines")

    def beyond(self, last):
        """Where to evaluate after training up to `last`: by length, and a little longer."""
        stages = [Stage(L, 8) for L in range(8, min(48, last.commands + 8) + 1, 8)]
        return [x for x in stages if not self.rows or all(self.chosen(x, split) for split in SPLITS)]

    @functools.cached_property
    def chance(self):
        """How often who always gives the commonest answer is right."""
        rows = self.rows or self.make(Stage(24, 24), random.Random(0), 256)
        return Counter(tuple(row["tokens"][row["answer"]]) for row in rows).most_common(1)[0][1] / len(rows)

    @functools.cache
    def chosen(self, stage, split):
        """The file's traces of a stage and a split."""
        return [row for row in self.rows if stage.commands - stage.spacing < row["lines"] <= stage.commands
                and (stage.kind == "all" or row["test"] == (split == "test"))]

    def make(self, stage, rng, size):
        """Traces of new functions."""
        fits = range(stage.commands - stage.spacing + 1, stage.commands + 1)
        rows = (row for row in random_rows(rng) if len(row["states"]) in fits)
        return [encode_trace(row, self.tokenizer) for row in islice(rows, size)]

    def batch(self, stage, size, seed, split, t):
        """Batch number t: `size` traces of a stage, of the "train" or the "test" stream of a seed. To test, a
        file's are taken in their order: its last batch is smaller, and those after it are empty."""
        rng = random.Random(int(generator(seed, split, stage, t).integers(2 ** 63)))
        if not self.rows:
            rows = self.make(stage, rng, size)
        elif split == "train":
            rows = rng.choices(self.chosen(stage, split), k=size)
        else:
            rows = self.chosen(stage, split)[t * size:(t + 1) * size]

        def padded(sequences):
            out = np.full((len(sequences), max(map(len, sequences), default=0)), PAD)
            for row, sequence in zip(out, sequences):
                row[:len(sequence)] = sequence
            return out

        tokens, answer = (padded([row[name] for row in rows]) for name in ("tokens", "answer"))
        line_end, most = np.zeros(tokens.shape, bool), max((len(row["states"]) for row in rows), default=0)
        for row, ends in zip(rows, line_end):
            ends[row["ends"]] = True
        text = padded([state for row in rows for state in row["states"] + [[]] * (most - len(row["states"]))])
        text = text.reshape(len(rows), most, -1) if text.size else np.zeros((len(rows), 0, 1), int)
        none = np.zeros((*tokens.shape, 0), int)
        return Batch(*map(torch.from_numpy, (tokens, answer > 0, line_end, none, text)))


TASKS = {"repl": Repl, "pfsa": Hidden, "group": Group,
         "parity": Parity, "listperm": ListPerm, "arith": Arith, "trace": Trace}


# ----------------------------------------------------------------------------------------------------------
# python data.py TASK: samples to check by eye

def show(task, batch, b):
    """Trace b of a batch as text: answers in [brackets], beside each line the true state after it."""
    lines, line, inside = [], "", False
    if batch.state_text is not None:
        texts = [task.tokenizer.decode(row).strip("\n\0") for row in batch.state_text[b].tolist() if any(row)]
    for t, token in enumerate(batch.tokens[b].tolist()):
        state = batch.state[b, t].tolist()
        if not task.next_token:
            product = task.elements[state[0]]
            lines.append(f"{token:4d} = {task.elements[token]}   product [{state[0]}] = {product}")
            continue
        piece = task.tokenizer.decode([token])
        before, inside = inside, bool(batch.answer[b, t]) and piece != "\n"
        line += "[" * (inside > before) + "]" * (inside < before) + piece
        if piece.endswith("\n"):
            if batch.belief is not None:
                state = task.arrangements[state[0]] if state[0] >= 0 else []
            holds = [f"{name}={x + 1}" for name, x in zip("abcdefghi", state) if x >= 0]
            if batch.belief is not None and holds:
                holds += ["  belief", *(f"{x:.2f}" for x in batch.belief[b, t].tolist())]
            if batch.state_text is not None:
                holds = [texts.pop(0)] if batch.line_end[b, t] else ["the answer"] * before
            lines.append(f"{line.rstrip():40s} # {' '.join(holds)}")
            line = ""
    return "\n".join(lines)


def write_functions(n, seed, out, overwrite):
    """Write traces of n functions made at random: those of `Trace` without a file, but made once."""
    with new_files(overwrite, out)[0] as file:
        rows = islice(random_rows(random.Random(seed)), n)
        for row in tqdm(rows, total=n, unit=" functions", disable=None):
            file.write(json.dumps(row) + "\n")
    return 0


def main_of_files(args):
    """trace, prompts and score."""
    if args.task == "trace" and args.functions:
        if not args.out:
            raise UserError("trace --functions: give --out too")
        return write_functions(args.functions, args.seed, args.out, args.overwrite)
    needs = {"trace": ["file", "out"], "prompts": ["file", "out"], "score": ["file", "completions"]}
    if args.task not in needs:
        raise UserError(f"--file: only {', '.join(needs)} read one, {args.task} does not")
    for name in needs[args.task]:
        if not getattr(args, name):
            raise UserError(f"{args.task}: give --{name} too")
    if args.task == "prompts":
        return write_prompts(args.file, args.out, args.overwrite)
    if not args.allow_exec:
        raise UserError(f"{args.task} executes code of {args.file}, in a child process with limits, which is "
                        "no sandbox: give --allow-exec if you trust it")
    if args.task == "score":
        return judge_file(args.file, args.completions)
    return trace_file(args.file, args.out, args.overwrite)


def main(argv):
    parser = Parser("""Print samples of a task, answers in [brackets], true states beside them; or

    trace --file CALLS --out TRACES --allow-exec       unroll functions (CRUXEval, MBPP, {"code", "input"})
    trace --functions 20000 --out TRACES               unroll functions made at random, to train on
    prompts --file TRACES --out PROMPTS                ask any language model what they do
    score --file TRACES --completions SAID --allow-exec      judge what it said, {"id", "completion"}
""")
    parser.add_argument("task", help=" or ".join([*TASKS, "prompts", "score"]))
    parser.add_argument("--n-vars", type=int, default=5, help="repl, pfsa, listperm: how many variables [5]")
    parser.add_argument("--moves", default="swap", help="repl: swap or perm [swap]")
    parser.add_argument("--group", default="S5", help=f"group: one of {', '.join(GROUPS)} [S5]")
    parser.add_argument("--digits", type=int, default=2, help="arith: of each number [2]")
    parser.add_argument("--sample-length", type=int, default=0, help="1: programs of 2 to L lines [0: of L]")
    parser.add_argument("--commands", type=int, default=8, help="commands of a trace, elements of a word [8]")
    parser.add_argument("--spacing", type=int, default=1, help="commands between two reveals [1]")
    parser.add_argument("--kind", default="", help="of a stage: repl, how many variables a permutation moves "
                        "at most; pfsa, random, periodic, adversarial or forced prints")
    parser.add_argument("--samples", type=int, default=2, help="how many [2]")
    parser.add_argument("--seed", type=int, default=0, help="of the random generator, 0 or more [0]")
    parser.add_argument("--trace-file", default="", help="trace: samples from what trace --out wrote")
    parser.add_argument("--functions", type=int, default=0, help="trace: make so many at random, for --out")
    parser.add_argument("--file", help="of JSON lines, to read")
    parser.add_argument("--completions", help="score: of JSON lines, what a model said")
    parser.add_argument("--out", help="of JSON lines, to write")
    parser.add_argument("--overwrite", action="store_true", help="write --out even if there is one")
    parser.add_argument("--allow-exec", action="store_true", help="execute the code in --file, in a child "
                        "process, limited and watched; this is no sandbox")
    args = parser.parse_args(argv)
    one_of("task", args.task, [*TASKS, "prompts", "score"])
    if args.file or args.functions or args.task in ("prompts", "score"):
        return main_of_files(args)
    if args.samples < 1 or args.seed < 0:
        raise UserError("--samples must be 1 or more, --seed 0 or more")
    task = TASKS[args.task](*(getattr(args, option) for option in TASKS[args.task].options))
    [stage] = parse_stages(str(Stage(args.commands, args.spacing, args.kind)), task)
    batch = task.batch(stage, args.samples, args.seed, "train", 0)
    for b in range(args.samples):
        print(f"sample {b}: {batch.tokens.shape[1]} tokens, chance {task.chance:.3g}")
        print(show(task, batch, b) + "\n")
    return 0


if __name__ == "__main__":
    start(main)
