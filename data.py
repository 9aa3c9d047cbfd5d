"""
The tasks, as text that a person could write down, and the one tokenizer they share.

A task turns (stage, seed, split, t) into a `Batch`. Nothing is stored and nothing is iterated: batch t of a
run is a pure function of those four, so a resumed run sees what an uninterrupted one would have seen, and
training and test traces come from different random generators.

  repl    Python REPL traces (P1 section 4, Figure 2): assignments shuffle n variables, prints reveal them
  pfsa    the same with hidden branches, `a, b = (b, a) if random() < 0.5 else (a, b)` (P1 section 5)
  group   word problems (P1 Figure 2, centre; Merrill et al., arXiv 2404.08819): the running product of a word
  parity, listperm, arith   straight-line programs that end in `assert x == answer` (P2 section 4, appendix C)

Symbols: B batch, T tokens in a trace, n variables, L commands, S commands between two reveals (the spacing).
P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs". P2 is "Grounding Code
Understanding in Step-by-Step Execution".

Look at samples:   python data.py repl --n-vars 3 --commands 4
                   python data.py pfsa --n-vars 3 --commands 8 --spacing 2
                   python data.py group --group S3 --commands 6
                   python data.py arith --digits 2 --commands 4

Not here: files, downloads, data loaders. Every task is made faster than a model can train on it.
"""
import argparse
import difflib
import math
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

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
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"{sys.argv[0].split('/')[-1]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


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


TASKS = {"repl": Repl, "pfsa": Hidden, "group": Group,
         "parity": Parity, "listperm": ListPerm, "arith": Arith}


# ----------------------------------------------------------------------------------------------------------
# python data.py TASK: samples to check by eye

def show(task, batch, b):
    """Trace b of a batch as text: answers in [brackets], beside each line the true state after it."""
    lines, line = [], ""
    if batch.state_text is not None:
        texts = [task.tokenizer.decode(row).strip("\n\0") for row in batch.state_text[b].tolist() if any(row)]
    for t, token in enumerate(batch.tokens[b].tolist()):
        state = batch.state[b, t].tolist()
        if not task.next_token:
            product = task.elements[state[0]]
            lines.append(f"{token:4d} = {task.elements[token]}   product [{state[0]}] = {product}")
            continue
        piece = task.tokenizer.decode([token])
        line += f"[{piece}]" if batch.answer[b, t] else piece
        if piece.endswith("\n"):
            if batch.belief is not None:
                state = task.arrangements[state[0]] if state[0] >= 0 else []
            holds = [f"{name}={x + 1}" for name, x in zip("abcdefghi", state) if x >= 0]
            if batch.belief is not None and holds:
                holds += ["  belief", *(f"{x:.2f}" for x in batch.belief[b, t].tolist())]
            if batch.state_text is not None:
                holds = [texts.pop(0) if batch.line_end[b, t] else "the answer"]
            lines.append(f"{line.rstrip():40s} # {' '.join(holds)}")
            line = ""
    return "\n".join(lines)


def main(argv):
    parser = Parser("Print samples of a task, answers in [brackets], true states beside them.")
    parser.add_argument("task", help=" or ".join(TASKS))
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
    args = parser.parse_args(argv)
    one_of("task", args.task, TASKS)
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
