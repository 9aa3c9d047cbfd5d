"""
The tasks. A task is a few lines of Python that write a program, which Python itself executes.

So what a `print` shows, and what memory holds after a line, comes from Python. One function, `run`, executes
the lines; one method, `to_batch`, makes arrays of them.

  repl       Python REPL traces (P1 section 4, Figure 2): assignments shuffle n variables, prints reveal them
  inverse    the same, but a print asks who held a value at the start (P1 Figure 7)
  parity     the parity of bits, xored one by one (P2 section 4, Figure 6)
  listperm   a list whose elements change places (P2 section 4, Figure 8)
  arith      sums and differences (P2 section 4, appendix C)
  trace      functions, unrolled into the straight-line programs that ran (P2 section 2)
  group      word problems over finite groups (Merrill et al. 2404.08819); tokens are elements, not text
  pfsa       REPL traces with hidden branches (P1 section 5): in pfsa.py

Words. A *program* is lines of source; a *command* is a line that changes variables. A *trace* is a program
and what it prints. *Answers* are the last words of printed lines, and what follows == in an assert. The
*state* is what memory holds after a line; a state of fixed size has *slots*, each with a few classes. A
*stage* LxS is one part of a curriculum: L commands or lines, and a print after every S-th command.
Symbols: B batch, T tokens, L length, S spacing, n variables.

Held out: a program whose text has a hash of 0 modulo 8 is a test program, never trained on; all others are
for training. A batch depends only on (seed, split, stage, its number t, size): nothing is stored.

Read `run` and the class `Repl` first. Stop at "trace": the second half of the file turns functions into traces.

  python data.py                                                                    a sample
  python data.py arith --digits 2 --stage 4
  python data.py trace --file calls.jsonl --out traces.jsonl --allow-exec           functions become traces

P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs". P2 is "Grounding Code
Understanding in Step-by-Step Execution". No downloads here, and no torch: arrays are numpy's.
"""
import argparse
import ast
import builtins
import contextlib
import datetime
import dis
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from functools import lru_cache
from itertools import accumulate, combinations, islice
from math import factorial
from typing import NamedTuple

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class BadInput(ValueError):
    """What somebody gave does not fit; its text says what to do. Other ValueErrors are faults in the code."""


# ----------------------------------------------------------------------------------------------------------
# Tokenizer: characters, and pieces of Python that would otherwise cost several tokens

PAD = 0                                             # the byte NUL, after the end of a trace
ASKED, STATE = 1, 2                                 # token marks: in an answer; in a state in the text
LEXEMES = (
    ">>> ", "print('", "', ", ")\n", " = ", ", ",                                           # repl
    "assert ", " == ", " ^= ", " + ", " - ", "a[", "], a[", "] = a[", "  # ",               # programs
    "from random import random\n", " = (", ") if random() < 0.5 else (",                    # hidden branches
    "forloop", " = iter((", " = next(forloop", "assert (", ") == ", " += ", " -= ", "range(", "len(", "str(",
    ".append(", ".replace(", ".upper()", ".pop()", "[::-1]", "[1:]",                        # functions of files
)
BYTES = [bytes([i]) for i in range(256)] + [lexeme.encode() for lexeme in LEXEMES]


def pieces_of(text):
    """-> the vocabulary for texts of these characters: NUL, the characters, the lexemes made of them."""
    characters = sorted({*text})
    return [b"\0"] + [piece.encode() for piece in (*characters, *LEXEMES) if {*piece} <= {*characters}]


class Tokenizer:
    """`pieces`, a list of bytes: piece i is token i, and `encode` takes the longest that matches. With BYTES (256
    bytes, then the lexemes), decode(encode(s)) == s for every string. With fewer, a model is smaller and faster."""

    def __init__(self, pieces=BYTES):
        self.pieces = list(pieces)
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        longest_first = sorted((piece for piece in self.pieces if len(piece) > 1), key=len, reverse=True)
        self.pattern = re.compile(b"|".join([*map(re.escape, longest_first), b"."]), re.DOTALL)

    def __len__(self):
        return len(self.pieces)

    @lru_cache(maxsize=100_000)                     # most tasks repeat the same lines
    def encode(self, text):
        """str -> tuple of int. Lone surrogates, which a Python string may hold, survive the round trip. Raises
        BadInput for a character that is not in the pieces."""
        raw = text.encode("utf-8", "surrogatepass")
        try:
            return tuple(self.ids[piece] for piece in self.pattern.findall(raw))
        except KeyError as missing:
            raise BadInput(f"{missing} in {text!r} is no token of this task: add it to its `characters`")

    def decode(self, ids):
        """Iterable of int -> str. Bytes that are not UTF-8, which a model may produce, become U+FFFD."""
        raw = b"".join(self.pieces[i] for i in ids)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------
# Executing lines

class Line(NamedTuple):
    """A line of a trace."""
    source: str                   # what was executed; "" for a line that was printed
    text: str                     # its line in the trace, with prompt and newline
    answer: str                   # the end of `text`, which a model must predict; "" if none
    state: object = None          # what `see` says after the line


@lru_cache(maxsize=100_000)
def compiled(source):
    """-> code of a line. Raises BadInput if it is no whole statement."""
    try:
        return compile(source, f"<the line {source}>", "exec")        # what a traceback calls it
    except SyntaxError as error:
        raise BadInput(f"the line {source!r} is no whole statement ({error.msg}): yield one at a time, all of it")


def run(program, memory, prompt="", see=None):
    """Execute a program's lines one by one in `memory`, a flat namespace. -> list of Lines, prints included.

    program: an iterable of source lines, each a whole statement; a generator may read `memory` before each.
    see(memory, source): the state to record after a line. An answer is a printed line's last word, or what
    stands after == in an assert. Raises BadInput for a line that is no whole statement."""
    lines, printed = [], []
    memory["__builtins__"] = {**vars(builtins), "print": lambda *x: printed.append(" ".join(map(str, x)))}
    for source in program:
        exec(compiled(source), memory)
        state = see(memory, source) if see else None
        answer = source.partition(" == ")[2] if source.startswith("assert ") else ""
        lines.append(Line(source, f"{prompt}{source}\n", answer, state))
        for text in printed:
            lines.append(Line("", f"{text}\n", text.rpartition(" ")[2], state))
        printed.clear()
    return lines


# ----------------------------------------------------------------------------------------------------------
# Stages and batches

class Stage(NamedTuple):
    """A part of a curriculum, written LxS, or L for Lx1, or with a KIND: LxS:M in repl, where a command moves at most M
    variables; L:M for M to L lines, in programs that ask once; in group and pfsa, as they say."""
    length: int                   # commands, lines or elements
    spacing: int = 1              # commands between two prints
    kind: str = ""

    def __str__(self):
        return f"{self.length}x{self.spacing}" + (f":{self.kind}" if self.kind else "")


def parse_stages(text):
    """'8x1 16x2' -> [Stage(8, 1), Stage(16, 2)]. Raises BadInput for a bad stage."""
    stages = []
    for word in text.split() or [text]:
        match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?(?::(\w+))?", word)
        if not match:
            raise BadInput(f"'{word}' is no stage: write LENGTHxSPACING, as in \"8x1 16x2 64x8\"")
        stages.append(Stage(int(match[1]), int(match[2] or 1), match[3] or ""))
        if not 1 <= stages[-1].spacing <= stages[-1].length:
            raise BadInput(f"stage {word}: give a length of at least 1, and a spacing of 1 to the length")
    return stages


class Batch(NamedTuple):
    """B traces of T tokens, as arrays here and as tensors in train.py."""
    tokens: np.ndarray                    # (B, T) int64: what a model reads, PAD after a trace's end
    target: np.ndarray                    # (B, T) int64: what comes next, PAD if nothing does
    asked: np.ndarray                     # (B, T) bool: the target is part of an answer
    state_in_text: np.ndarray             # (B, T) bool: the target belongs to a state in the text
    line_end: np.ndarray                  # (B, T) bool: the last token of a line
    state: np.ndarray | None = None       # (B, T, slots) int64: the state at line ends, -1 if undefined
    state_tokens: np.ndarray | None = None  # (B, lines, W) int64: each state's text as tokens, or PAD
    belief: np.ndarray | None = None      # (B, T, m) float32: pfsa: P(state | the text so far)
    predictive: np.ndarray | None = None  # (B, T, n) float32: pfsa, exact probabilities of n answers


def pad(rows, value=PAD):
    """Lists of ints, of different lengths -> (rows, longest) int64."""
    out = np.full((len(rows), max(map(len, rows), default=0)), value)
    for i, row in enumerate(rows):
        out[i, :len(row)] = row
    return out


# ----------------------------------------------------------------------------------------------------------
# What tasks share

class Task:
    """A task of your own defines `program`, and has a name in TASKS. For the linear head, it also defines
    `slots`, n_slots and n_classes.

    A program yields whole statements (`for i in range(3): x += i` is one, `for i in range(3):` is not). All traces of
    a stage have equally many answers, of one token each; with `whole`, one answer of any number of tokens.

    states: how a model is told the states in training. "none": not at all. "linear": as classes, by a linear
    head. "transformer" or "contrastive": as text, by that state head. "text": in comments in the trace.
    "auto": linear if there are slots, else none. Raises BadInput for bad values."""
    prompt = ""
    curriculum = "8x1"
    whole = False                 # one answer per trace, of any number of tokens
    stage_samples = 0             # not 0: a stage ends after this many traces
    settings = ()                 # keywords of __init__ beside states: fields of train.py's Config
    characters = ""               # all that its texts may hold, so that the vocabulary is small; "": anything
    n_slots = n_classes = 0

    def __init__(self, states="auto", tokenizer=None):
        self.states = ("linear" if self.n_slots else "none") if states == "auto" else states
        self.tokenizer = tokenizer or Tokenizer(pieces_of(self.characters) if self.characters else BYTES)
        if self.states == "linear" and not self.n_slots:
            raise BadInput("--states linear: this task has no slots; give transformer or contrastive")

    def program(self, rng, stage, memory):
        """Yield source lines. rng: a random.Random; memory: what it holds now. You write this method."""

    def slots(self, memory):
        """The state as n_slots classes out of n_classes, -1 where a slot is not set yet. Yours, too."""

    def check_stage(self, stage):
        """Raise BadInput for a bad stage. Here: LxS; L or L:M if `whole`, for programs of M to L lines."""
        L, S, M = stage
        if M and not self.whole:
            raise BadInput(f"stage {stage}: this task has no kinds of stages, so write {L}x{S}")
        if self.whole and S != 1:
            raise BadInput(f"stage {stage}: a program asks once, at its end, so write {L}")
        if M and not (M.isdecimal() and 1 <= int(M) <= L):
            raise BadInput(f"stage {stage}: write {L}:M for programs of M to {L} lines")

    def beyond(self, last):
        """The stages to evaluate after training: LxS, and twice as long."""
        return [Stage(last.length, last.spacing), Stage(2 * last.length, last.spacing)]

    def chance(self, stage, programs=1000):
        """Accuracy of always guessing the most frequent answer, counted over training programs."""
        rng = random.Random(0)
        traces = [self.draw(rng, stage, "train") for _ in range(programs)]
        self.check_answers(traces)
        answers = Counter(line.answer for lines in traces for line in lines if line.answer)
        return answers.most_common(1)[0][1] / answers.total()

    def text(self, memory):
        """The state as text: a=3, b=[1, 2]."""
        return state_text(literals(memory))

    def see(self, memory, source):
        """The state after the line `source`: None, text, or classes. Raises BadInput for bad slots."""
        if self.states != "linear":
            return None if self.states == "none" else self.text(memory)
        try:
            found = self.slots(memory)
            if {*found} <= {*range(-1, self.n_classes)} and len(found) == self.n_slots:
                return found
        except (LookupError, TypeError, ValueError) as error:             # such as a KeyError
            found = repr(error)
        raise BadInput(f"{type(self).__name__}.slots: {found} after the line {source!r}: give n_slots = "
                         f"{self.n_slots} numbers below n_classes = {self.n_classes}, -1 where not set yet")

    def draw(self, rng, stage, split):
        """One trace of the split, "train" or "test". -> list of Lines. Raises BadInput if there is none."""
        for _ in range(1000):
            memory = {}
            lines = run(self.program(rng, stage, memory), memory, self.prompt, self.see)
            program = "\n".join(line.source for line in lines)
            if is_test(program) == (split == "test"):
                return lines
        raise BadInput(f"stage {stage} has too few programs: none of 1,000 is for {split}; make it longer")

    def batch(self, seed, split, stage, t, size):
        """Batch number t of a stage: `size` traces of a split. The same arguments give the same batch."""
        rng = random.Random(f"{seed} {split} {stage} {t}")
        return self.to_batch([self.draw(rng, stage, split) for _ in range(size)])

    def spans(self, line):
        """A Line -> its text in pieces, [(text, mark), ...]: ASKED marks an answer, STATE a state in the text, 0
        all else. With states in the text, `a, b = b, a` becomes `a, b = b, a  # a=1, b=3`."""
        if line.answer:
            end = f"{line.answer}\n" if self.whole else line.answer
            before, _, after = line.text.rpartition(end)
            return [(before, 0), (end, ASKED), (after, 0)]
        if self.states == "text" and line.state and line.source and not line.source.startswith("print"):
            return [(f"{line.text[:-1]}  # ", 0), (f"{line.state}\n", STATE)]
        return [(line.text, 0)]

    def encode(self, lines):
        """Lines -> a trace's tokens, their marks, and the indices of the last tokens of lines."""
        tokens, marks, ends = [], [], []
        for line in lines:
            for text, mark in self.spans(line):
                ids = self.tokenizer.encode(text)
                tokens += ids
                marks += [mark] * len(ids)
            ends.append(len(tokens) - 1)
        return tokens, marks, ends

    def check_answers(self, traces):
        """Raise BadInput unless these traces of a stage have equally many answers, at least one, of one token."""
        name = type(self).__name__
        counts = sorted({sum(line.answer != "" for line in lines) for lines in traces})
        if len(counts) > 1 or counts[0] == 0 or self.whole and counts[0] > 1:
            raise BadInput(f"{name}.program: traces of a stage have {counts} answers: print (or assert with ==) "
                           "equally often in each, at least once (`whole`: once)")
        for answer in {line.answer for lines in traces for line in lines} - {""}:
            if not self.whole and len(self.tokenizer.encode(answer)) > 1:
                raise BadInput(f"{name}.program: the answer {answer} has several tokens: set whole = True and ask "
                               "once, or give answers of one token")

    def to_batch(self, traces):
        """Lists of Lines -> Batch."""
        self.check_answers(traces)
        tokens, marks, ends = zip(*map(self.encode, traces))
        tokens, marks = pad(tokens), np.roll(pad(marks), -1, 1)         # a mark describes the target
        target = np.roll(tokens, -1, 1)
        target[:, -1] = PAD
        line_end = np.zeros(tokens.shape, bool)
        for row, places in zip(line_end, ends):
            row[places] = True
        batch = Batch(tokens, target, marks == ASKED, marks == STATE, line_end)
        if self.states == "linear":
            batch = batch._replace(state=np.full((*tokens.shape, self.n_slots), -1))
            batch.state[line_end] = [line.state for lines in traces for line in lines]
        if self.states in ("transformer", "contrastive"):
            return batch._replace(state_tokens=self.state_tokens(traces))
        return batch

    def state_tokens(self, traces):
        """-> (B, lines, W) int64: the state's text, and a newline, after each line of each trace."""
        longest = max(map(len, traces))
        rows = []
        for lines in traces:
            texts = [f"{line.state}\n" if line.state else "" for line in lines]
            texts += [""] * (longest - len(lines))
            rows += map(self.tokenizer.encode, texts)
        return pad(rows).reshape(len(traces), longest, -1)


def is_test(program):
    """Whether a program is held out, by a hash of its text. (A CRC would not do: it is linear in the bits, so the
    bits of all held-out programs of parity would satisfy one set of linear equations.)"""
    text = program.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=1).digest()[0] % 8 == 0


# ----------------------------------------------------------------------------------------------------------
# The tasks

class Repl(Task):
    """REPL traces: n assignments, then L commands, and after every S-th a print of one random variable.

    A command permutes all variables (moves="perm", all n! equally likely; in a stage LxS:M, only M random ones, so
    it moves at most M), or swaps two ("swap", each pair equally likely). P1's curriculum is 8x1 16x2 32x4 64x8;
    ours starts easier. P1 also prints once before the first command; we do not. n_vars is 2 to 9, so that values
    are digits."""
    prompt = ">>> "
    curriculum = "2x1 4x2 16x2 32x4 64x8"
    settings = ("n_vars", "moves")
    characters = ">>> print('a', a)\n  # bcdefghi=123456789"

    def __init__(self, n_vars=5, moves="perm", **others):
        if not 2 <= n_vars <= 9:
            raise BadInput(f"--n-vars {n_vars}: choose 2 to 9, as every value must be a single digit")
        self.n_vars, self.moves, self.names = n_vars, moves, LETTERS[:n_vars]
        self.n_slots = self.n_classes = n_vars
        self.swaps = [f"{x}, {y} = {y}, {x}" for x, y in combinations(self.names, 2)]
        easier = [f"2x1:{moved}" for moved in (2, 3) if moved < n_vars and moves == "perm"]
        self.curriculum = " ".join([*easier, self.curriculum])
        if n_vars == 2:                                   # too few programs in short stages
            self.curriculum = "8x1 16x2 32x4 64x8"
        super().__init__(**others)

    def program(self, rng, stage, memory):
        yield from self.start(rng, memory)
        for step in range(1, stage.length + 1):
            yield self.command(rng, stage.kind)
            if step % stage.spacing == 0:
                yield from self.question(rng.choice(self.names), memory)

    def start(self, rng, memory):
        for name, value in zip(self.names, rng.sample(range(1, self.n_vars + 1), self.n_vars)):
            yield f"{name} = {value}"

    def question(self, name, memory):
        yield f"print('{name}', {name})"

    def command(self, rng, kind):
        if self.moves == "swap":
            return rng.choice(self.swaps)
        moved = rng.sample(self.names, int(kind or self.n_vars))
        takes = dict(zip(sorted(moved), moved))
        right = [takes.get(name, name) for name in self.names]
        return f"{', '.join(self.names)} = {', '.join(right)}"

    def slots(self, memory):
        return [memory.get(name, 0) - 1 for name in self.names]

    def chance(self, stage):
        return 1 / self.n_vars

    def check_stage(self, stage):
        kinds = [""] if self.moves == "swap" else ["", *map(str, range(1, self.n_vars + 1))]
        if stage.kind not in kinds:
            raise BadInput(f"stage {stage}: write LxS; with --moves perm, LxS:1 to LxS:{self.n_vars}, too")

    def beyond(self, last):
        """The last stage; then twice as long, twice as sparse, both, and four times both."""
        factors = (1, 1), (2, 1), (1, 2), (2, 2), (4, 4)
        stages = [Stage(last.length * longer, last.spacing * sparser, last.kind) for longer, sparser in factors]
        return [stage for stage in stages if stage.spacing <= stage.length]


class Inverse(Repl):
    """Which variable held a value at the start (P1 Figure 7)? The first values are hidden. A line like
    `if a != 3: exit()` shows that a holds 3; then a print asks who held 3 at first. So the state is, for each
    variable, who first held its value."""
    characters = Repl.characters + "if a != 1: exit() 'abcde'[start.index(1)]"

    def start(self, rng, memory):
        memory["start"] = rng.sample(range(1, self.n_vars + 1), self.n_vars)
        yield f"{', '.join(self.names)} = start"

    def question(self, name, memory):
        yield f"if {name} != {memory[name]}: exit()"
        yield f"print({memory[name]}, '{self.names}'[start.index({memory[name]})])"

    def slots(self, memory):
        return [memory["start"].index(memory[name]) for name in self.names]

    def text(self, memory):
        return super().text({name: self.names[i] for name, i in zip(self.names, self.slots(memory))})


class Parity(Task):
    """The parity of L bits, xored one by one (P2 Figure 6)."""
    curriculum = "16"
    whole = True
    n_slots, n_classes = 1, 2

    def program(self, rng, stage, memory):
        yield f"p = {rng.randrange(2)}"
        for _ in range(draw_length(rng, stage) - 1):
            yield f"p ^= {rng.randrange(2)}"
        yield f"assert p == {memory['p']}"

    def slots(self, memory):
        return [memory["p"]]

    def chance(self, stage):
        return 1 / 2


class ListPerm(Task):
    """A list of 1 to n in any order, and L swaps of two of its places (P2 Figure 8)."""
    curriculum = "16"
    whole = True
    settings = ("n_vars",)

    def __init__(self, n_vars=4, **others):
        if not 2 <= n_vars <= 9:
            raise BadInput(f"--n-vars {n_vars}: choose a list of 2 to 9 elements")
        self.n_slots = self.n_classes = self.n_vars = n_vars
        super().__init__(**others)

    def program(self, rng, stage, memory):
        yield f"a = {rng.sample(range(1, self.n_vars + 1), self.n_vars)}"
        for _ in range(draw_length(rng, stage)):
            i, j = sorted(rng.sample(range(self.n_vars), 2))
            yield f"a[{i}], a[{j}] = a[{j}], a[{i}]"
        yield f"assert a == {memory['a']}"

    def slots(self, memory):
        return [value - 1 for value in memory["a"]]

    def chance(self, stage):
        return 1 / factorial(self.n_vars)


class Arith(Task):
    """Sums and differences, sampled backwards from the answer (P2 appendix C).

    Each line assigns to a variable that a later line reads. An operand is a number, a variable needed
    already, or a new variable, equally likely. Unlike in P2, a line that leaves no variable needed is drawn
    again. The first line gives numbers to all variables that are still needed."""
    curriculum = "4"
    whole = True
    settings = ("digits",)

    def __init__(self, digits=2, **others):
        if not 1 <= digits <= 6:
            raise BadInput(f"--digits {digits}: choose 1 to 6")
        self.low, self.high = (10 ** (digits - 1) if digits > 1 else 0), 10 ** digits - 1
        super().__init__(**others)

    def program(self, rng, stage, memory):
        length = draw_length(rng, stage)
        needed = ["a"]                                     # variables that a later line reads
        new_names = sorted(LETTERS[1:], reverse=True)      # a new y is [-1], a new x is [-2]
        lines = []                                         # the last one first
        while len(lines) < length:
            target = rng.choice(needed)
            x = rng.choice([self.number(rng), rng.choice(needed), new_names[-2]])
            y = rng.choice([self.number(rng), rng.choice(needed), new_names[-1]])
            used = {operand for operand in (x, y) if operand in LETTERS}
            needed_before = sorted({*needed} - {target} | used)
            if needed_before:
                needed = needed_before
                new_names = [name for name in new_names if name not in used]
                lines.append(f"{target} = {x} {rng.choice('+-')} {y}")
        yield f"{', '.join(needed)} = {', '.join(self.number(rng) for _ in needed)}"
        yield from reversed(lines)
        yield f"assert a == {memory['a']}"

    def number(self, rng):
        return str(rng.randint(self.low, self.high))

    def check_stage(self, stage):
        super().check_stage(stage)
        if stage.length > 12:
            raise BadInput(f"stage {stage}: at most 12 lines, as there are 26 names and each may need two")

    def beyond(self, last):
        return [Stage(length) for length in (last.length, 2 * last.length) if length <= 12]


def draw_length(rng, stage):
    """A program's length: L, or in a stage L:M (P2's curriculum) random, M to L."""
    return rng.randint(int(stage.kind), stage.length) if stage.kind else stage.length


# ----------------------------------------------------------------------------------------------------------
# group: words of elements, a label for each

def permutation(n, *cycles):
    """The permutation of 0 .. n-1 that sends each entry of a cycle to the next, as a tuple of images."""
    image = list(range(n))
    for cycle in cycles:
        for here, there in zip(cycle, cycle[1:] + cycle[:1]):
            image[here] = there
    return tuple(image)


GROUPS = {  # name: generators
    "Z2": [permutation(2, (0, 1))],
    "Z60": [permutation(12, (0, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10, 11))],      # order 3 * 4 * 5
    "S3": [permutation(3, (0, 1)), permutation(3, (0, 1, 2))],
    "S4": [permutation(4, (0, 1)), permutation(4, (0, 1, 2, 3))],
    "A5": [permutation(5, (0, 1, 2)), permutation(5, (0, 1, 2, 3, 4))],  # smallest non-solvable group
    "S5": [permutation(5, (0, 1)), permutation(5, (0, 1, 2, 3, 4))],
    "S5swaps": [permutation(5, pair) for pair in combinations(range(5), 2)],
}
GROUPS |= {"S4two": GROUPS["S4"], "A5two": GROUPS["A5"]}
FEW = ["S5swaps", "S4two", "A5two"]                  # here, words hold only the generators, not all elements


def closure(generators):
    """Generators -> all their products, sorted, and mul[i][j], the index of "i, then j"."""
    identity = tuple(range(len(generators[0])))
    elements = frontier = {identity}
    while frontier:
        frontier = {tuple(g[x] for x in e) for e in frontier for g in generators} - elements
        elements = elements | frontier
    elements = sorted(elements)
    number = {element: i for i, element in enumerate(elements)}
    mul = [[number[tuple(then[x] for x in first)] for then in elements] for first in elements]
    return elements, mul


class Group(Task):
    """Words over a finite group: elements g_1 g_2 ...; after each, the product so far is asked.

    A word begins with the token 1, at which a recurrence can set up its state. Element i is the token 2 + i.
    By default there is no state head, as the answers are the states. In a stage L:M, words have only
    elements that move at most M points: the alphabet grows. A batch has 32 // L words (at least one) for each
    trace, so that the batches of all stages up to 32 are about equally large."""
    curriculum = "8 16 32"
    settings = ("group",)
    n_slots = 1

    def __init__(self, group="S5", states="auto", **others):
        self.elements, self.mul = closure(GROUPS[group])
        alphabet = GROUPS[group] if group in FEW else self.elements
        self.alphabet = [self.elements.index(element) for element in alphabet]
        self.moved = [sum(x != y for x, y in enumerate(element)) for element in self.elements]
        self.n_classes = len(self.elements)
        names = [f"element {i}".encode() for i in range(self.n_classes)]
        states = "none" if states == "auto" else states
        super().__init__(states=states, tokenizer=Tokenizer([b"\0", b"start", *names]), **others)

    def letters(self, kind):
        """The numbers of the elements in words of a stage with this kind."""
        return [i for i in self.alphabet if not kind or self.moved[i] <= int(kind)]

    def word(self, rng, stage, split):
        """-> one word of the split, as a list of elements' numbers."""
        letters = self.letters(stage.kind)
        for _ in range(1000):
            word = rng.choices(letters, k=stage.length)
            if is_test(str(word)) == (split == "test"):
                return word
        raise BadInput(f"stage {stage} has too few words, none of 1,000 is for {split}: make it longer")

    def products(self, word):
        return list(accumulate(word, lambda x, y: self.mul[x][y]))

    def draw(self, rng, stage, split):
        """For people to look at: one element per line, with the product so far as its state."""
        word = self.word(rng, stage, split)
        return [Line("", f"{self.elements[x]}\n", "", f"product {self.elements[y]}")
                for x, y in zip(word, self.products(word))]

    def batch(self, seed, split, stage, t, size):
        rng = random.Random(f"{seed} {split} {stage} {t}")
        if self.states not in ("none", "linear"):
            raise BadInput(f"--states {self.states}: tokens of a group are no text; give linear or none")
        words = [self.word(rng, stage, split) for _ in range(size * max(1, 32 // stage.length))]
        tokens = np.insert(2 + np.array(words), 0, 1, axis=1)                     # (words, 1 + L)
        product = np.insert(list(map(self.products, words)), 0, -1, axis=1)       # -1 at the start token
        asked = product >= 0
        target = np.where(asked, 2 + product, PAD)
        return Batch(tokens, target, asked, np.zeros_like(asked), asked, state=product[..., None])

    def check_stage(self, stage):
        if stage.spacing != 1:
            raise BadInput(f"stage {stage}: every element of a word is asked, so write {stage.length}")
        if stage.kind and not (stage.kind.isdecimal() and len(self.letters(stage.kind)) > 1):
            raise BadInput(f"stage {stage}: write {stage.length}:M for elements that move up to M points, "
                             "of which there must be two or more")

    def beyond(self, last):
        return [Stage(last.length * factor) for factor in (1, 2, 4, 8)]

    def chance(self, stage):
        return 1 / self.n_classes


# ----------------------------------------------------------------------------------------------------------
# trace: a function and its input, unrolled into the lines that run (P2 section 2, appendix A)
#
#     for x in xs:        xs, n = [1, 2], 0
#         n += x     ->   forloop0 = iter((xs))
#     return n            x = next(forloop0)  ...  assert (n) == 3
#
# Python itself runs the function. Hooks in its syntax tree write down each statement that has run, and the
# locals after it, so Python does control flow and scopes. Then Python runs the trace, a script with one flat
# namespace, here and in other processes. If its states differ from the function's, the call is rejected, as when
# a helper reads a global that is also a local's name, or when the output depends on the clock.

class Rejected(BaseException):
    """Why a call is rejected. Not an Exception: the function could catch it."""


def literal(x, inside=()):
    """Source of a value of built-in types, else None. Equal sets have equal source."""
    kind = type(x)
    if kind in (bool, str, bytes, type(None)):
        return repr(x)
    if kind is int and x.bit_length() > 14_000:                           # Python does not print it
        return None
    if kind in (int, float, complex):
        return repr(x) if x - x == 0 else None                            # inf and nan have no literal
    if kind not in (list, tuple, set, dict) or id(x) in inside:
        return None
    rows = x.items() if kind is dict else [(item,) for item in x]
    rows = [[literal(item, (*inside, id(x))) for item in row] for row in rows]
    if any(None in row for row in rows):
        return None
    items = [": ".join(row) for row in rows]
    if kind is set:
        return "{" + ", ".join(sorted(items)) + "}" if items else "set()"
    if kind is tuple and len(items) == 1:
        return f"({items[0]},)"
    left, right = {list: "[]", tuple: "()", dict: "{}"}[kind]
    return left + ", ".join(items) + right


def literals(names):
    """{name: value} -> {name: literal}, without functions, modules, objects: they have no literal."""
    found = {name: literal(value) for name, value in names.items() if name != "__builtins__"}
    return {name: text for name, text in found.items() if text is not None}


def state_text(state):
    """{name: literal} -> a=3, b=[1, 2]"""
    return ", ".join(f"{name}={text}" for name, text in state.items())


def snapshot(x, used, depth=3):
    """It differs if the object has changed. used: the condition names it; an iterator that cannot be inspected then
    counts as changed."""
    with contextlib.suppress(Exception):                                  # a lambda cannot be pickled
        return pickle.dumps(x)
    if isinstance(x, (list, tuple)):
        inside = dict(enumerate(x))
    elif isinstance(x, dict):
        inside = x
    else:
        inside = getattr(getattr(x, "gi_frame", None), "f_locals", None) or getattr(x, "__dict__", None)
    if inside and depth:
        return {name: snapshot(y, used, depth - 1) for name, y in inside.items()}
    return object() if used and hasattr(x, "__next__") else repr(x)


class Tracer(ast.NodeTransformer):
    """Puts hooks into the statements of a function, but not into functions inside it.

    source: the program's; function, call: syntax trees. lines: the source of what ran; states: {name: literal}
    after each; last: the source of what was returned, then the assert; end: the state at the end."""
    limits = {"call": 1, "steps": 50, "characters of trace": 1000, "characters of state": 12000}       # P2 appendix A

    def __init__(self, source, function, call):
        self.source, self.function, self.call, self.loops = source, function, call, 0
        self.reset()

    def reset(self):
        self.lines, self.states, self.last, self.end = [], [], "", {}
        self.calls, self.extra = 0, 0                                     # extra: lines that are no steps
        self.late = False                                                 # whether lines ran after the return

    def put_hooks(self):
        self.function.body.append(ast.Return())                           # each call ends in the hook "back"
        self.generic_visit(self.function)
        self.function.body.insert(0, ast.Expr(self.hook("enter")))

    def text(self, node):
        """A node's source; by ast.unparse if it has several lines, decorators, or is a :=."""
        text = ast.get_source_segment(self.source, node)
        decorated = getattr(node, "decorator_list", [])
        bare = isinstance(node, ast.NamedExpr)
        return ast.unparse(node) if "\n" in text or decorated or bare else text

    def hook(self, method, text="", value=None):
        """The syntax tree of _tracer.method(value, text, _locals())."""
        tree = ast.parse(f"_tracer.{method}(None, {text!r}, _locals())", mode="eval").body
        if value:
            tree.args[0] = value
        return tree

    def simple(self, node, text=""):
        """A statement, and a hook that writes it down."""
        return [node, ast.Expr(self.hook("line", text or self.text(node)))]

    visit_Assign = visit_AugAssign = visit_Delete = visit_Assert = visit_Import = visit_ImportFrom = simple
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = simple

    def visit_Expr(self, node):
        docstring = isinstance(node.value, ast.Constant)
        return node if docstring else self.simple(node)

    def visit_AnnAssign(self, node):
        """Inside a function, Python does not evaluate annotations, and `y: int` alone does nothing."""
        return self.simple(node, f"{self.text(node.target)} = {self.text(node.value)}") if node.value else node

    def visit_If(self, node):
        text = self.text(node.test)
        before_and_value = ast.Tuple([self.hook("before", text), node.test], ast.Load())
        node.test = self.hook("test", text, before_and_value)
        return self.generic_visit(node)

    visit_While = visit_If

    def visit_For(self, node):
        name = f"forloop{self.loops}"
        self.loops += 1
        node.iter = self.hook("line", f"{name} = iter(({self.text(node.iter)}))", node.iter)
        step = self.hook("line", f"{self.text(node.target)} = next({name})")
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(step))
        return node

    def visit_Return(self, node):
        text = self.text(node.value) if node.value else "None"
        node.value = self.hook("back", text, node.value)
        return node

    # What the hooks do

    def enter(self, _, __, names):
        self.calls += 1
        self.check_limits()
        names.pop("__class__", None)                                      # of a method that uses super
        values = self.arguments() | literals(names)
        if names.keys() - values.keys():
            raise Rejected("an argument without a literal")
        if names:
            self.extra = 1
            self.line(None, f"{', '.join(names)} = {', '.join(values[name] for name in names)}", names)

    def arguments(self):
        """{parameter: source of its argument or default}, used if it has no literal."""
        given, arguments = self.function.args, self.call.args
        if isinstance(self.call.func, ast.Attribute):                     # Solution().twice(3): self is Solution()
            of_class = "classmethod" in map(ast.unparse, self.function.decorator_list)
            made = self.call.func.value
            arguments = [made.func if of_class else made, *arguments]
        names = [x.arg for x in given.posonlyargs + given.args]
        nodes = dict(zip(reversed(names), reversed(given.defaults)))
        nodes |= dict(zip([x.arg for x in given.kwonlyargs], given.kw_defaults))
        nodes |= dict(zip(names, arguments)) | {x.arg: x.value for x in self.call.keywords}
        if given.vararg:
            nodes[given.vararg.arg] = ast.Tuple(arguments[len(names):], ast.Load())
        return {name: ast.unparse(node) for name, node in nodes.items() if node}

    def line(self, value, text, names):
        self.late = bool(self.last)
        self.lines.append(text)
        self.states.append(literals(names))
        self.check_limits()
        return value

    def before(self, _, text, names):
        """{name: snapshot} of locals and globals, but for classes, functions and modules."""
        names = {name: x for name, x in vars(sys.modules["traced"]).items()
                 if not re.match("__|_tracer|_locals", name)} | names
        return {name: snapshot(x, re.search(rf"\b{name}\b", text)) for name, x in names.items()
                if not isinstance(x, (type, types.FunctionType, types.ModuleType))}

    def test(self, before_and_value, text, names):
        """A condition is a line only if it changes a variable, or an object in one."""
        before, value = before_and_value
        outcome = bool(value)
        return self.line(outcome, text, names) if self.before(None, text, names) != before else outcome

    def back(self, value, text, names):
        self.last, self.end = text, literals(names)
        return value

    def check_limits(self):
        """Raise Rejected if the trace is too long."""
        code = "\n".join([*self.lines, self.last])
        states = "".join(name + text for state in self.states for name, text in state.items())
        sizes = self.calls, len(self.lines) - self.extra, len(code), len(states)
        for (what, limit), size in zip(self.limits.items(), sizes):
            if size > limit:
                raise Rejected(f"more than {limit} {what}")


@contextlib.contextmanager
def blame(what):
    """Turn an error into the reason for a rejection, which says what has raised it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Rejected(f"{what} raises {type(error).__name__}") from error


def execute(program, **names):
    """Run a program, as the module `traced`: a dataclass looks its module up. -> its namespace."""
    module = sys.modules["traced"] = types.ModuleType("traced")
    vars(module).update(names)
    exec(compile(program, "<traced>", "exec", optimize=0), vars(module))
    return vars(module)


def names_in(statements):
    """-> the global names that statements read, also in functions that they define, and those that they assign."""
    codes, read, made = [compile(ast.Module(statements, []), "", "exec")], set(), set()
    for code in codes:
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(step.argval)
            elif step.opname == "STORE_GLOBAL" or step.opname == "STORE_NAME" and code is codes[0]:
                made.add(step.argval)
    return read, made


def around(tree, function, keep_defs):
    """The program's statements that need neither `function`, directly or indirectly, nor `__name__`. keep_defs: with
    all functions and classes, `function` included, as for a function that passes itself on."""
    gone, kept = {function.name} if function in tree.body else set(), []
    for statement in tree.body:
        read, made = names_in([statement])
        if (read | made) & gone or isinstance(statement, ast.If) and "__name__" in read:
            gone |= made
        else:
            kept.append(statement)
    return [x for x in tree.body if x in kept or keep_defs and isinstance(x, (ast.FunctionDef, ast.ClassDef))]


def find_call(tree, call):
    """-> the function or method that is called, the call as text, and as a syntax tree. Raises Rejected."""
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    methods = {(owner.name, x.name): x for owner in tree.body if isinstance(owner, ast.ClassDef)
               for x in owner.body if isinstance(x, ast.FunctionDef)}
    with blame("the input"):
        given = ast.parse(f"_({call['input']}\n)", mode="eval").body
    name = call.get("name") or ("f" if "f" in functions else [None, *functions][-1])
    owners = [owner for owner, method in methods if method == name and name not in functions]
    match given:                                                          # f(...), or Class().method(...)?
        case ast.Call(args=[ast.Call(func=ast.Name(id=inner)) as whole], keywords=[]) if (
                inner == name and name in functions):
            return functions[name], ast.unparse(whole), whole
        case ast.Call(args=[ast.Call(func=ast.Attribute(ast.Call(func=ast.Name(id=owner)), inner)) as whole]) if (
                (owner, inner) in methods and "f" not in functions and call.get("name") in (None, inner)):
            return methods[owner, inner], ast.unparse(whole), whole
    if not owners and name not in functions:
        if methods and not name:
            raise Rejected("no function at the top level of the code, but methods: give a name")
        raise Rejected(f"no such function at the top level of the code: {name or 'no def there'}")
    function = methods[owners[-1], name] if owners else functions[name]
    called = f"{owners[-1]}().{name}({call['input']})" if owners else f"{name}({call['input']})"
    with contextlib.suppress(SyntaxError):
        return function, called, ast.parse(called, mode="eval").body
    expression = ast.parse(f"{called[:-1]}\n)", mode="eval").body         # a comment ends the input
    return function, ast.unparse(expression), expression


def unroll(call, keep_defs=False):
    """Run a call and write it down (P2 section 2). Executes code: see `guarded`.

    There are three runs: with hooks; as it is, for the output; and of the trace, to compare the states.
    call: {"id", "code", "input"}, optional "output", "name" (by default f, else the last function), "imports" (see
    `with_imports`). The input is the arguments, or the whole call. A method is called on Class(), or as the input
    says: Class().method(3). keep_defs: see `around`.
    -> a row {"id", "source", "call", "output", "trace", "states", "end", "steps"}. Raises Rejected."""
    source = call["code"].removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
    with blame("the code"):
        if call.get("imports"):
            source = with_imports(source)
        tree = ast.parse(source)
    function, called, expression = find_call(tree, call)
    with blame("the code"):
        kept = around(tree, function, keep_defs)
    tree.body = [x for x in tree.body if x in kept or x is function]
    tracer = Tracer(source, function, expression)
    texts = [tracer.text(x) for x in kept]                                # before there are hooks in them
    tracer.put_hooks()
    hooked = failure = None
    try:                                                                  # first: hooks end endless loops
        memory = execute(ast.fix_missing_locations(tree), _tracer=tracer, _locals=locals)
        tracer.reset()                                                    # the code itself may have called it
        hooked = eval(called, memory)
        tracer.check_limits()                                             # `except:` may have caught a Rejected
    except (Exception, SystemExit) as error:
        failure = error.with_traceback(None)                              # raised below, if the plain run succeeds
    with blame("the code"):
        memory = execute(source)
    with blame("calling the function"):
        value = eval(called, memory)
    if isinstance(value, types.GeneratorType):
        raise Rejected("its output is a generator")
    with blame("the output"):
        expected = eval(call["output"], memory) if call.get("output") else value
        if expected is not value and value != expected:
            raise Rejected("its output is not what the row says")
    output = literal(value) or literal(expected)                          # a Counter has none, an equal dict has
    if output is None:
        raise Rejected("an output without a literal")
    with blame("its trace"):
        if not failure and literal(hooked) != literal(value):
            raise Rejected("another output in another run")
        if not failure and not tracer.calls:
            raise Rejected("the function itself is not called, as where a decorator or a subclass replaces it")
        tracer.last = f"assert ({tracer.last}) == {output}"
        tracer.check_limits()
        trace = "\n".join([*texts, *tracer.lines, tracer.last])
        try:
            if failure:
                raise failure
            replay(trace, tracer.states, tracer.end)
        except (Exception, Rejected) as error:
            if isinstance(error, NameError) and not keep_defs:            # perhaps of a def that was left out
                return unroll(call, keep_defs=True)
            raise reason_for(error, tracer)
    return {"id": call["id"], "source": source, "call": called, "output": output, "trace": trace,
            "states": tracer.states, "end": tracer.end, "steps": len(tracer.lines) - tracer.extra}


def reason_for(error, tracer):
    """Why a trace fails, if that can be said; else the error."""
    if isinstance(error, SyntaxError) and "nonlocal" in error.msg:
        return Rejected("its trace has no function around nonlocal")
    if tracer.late:
        return Rejected("lines run after the return, in try/finally")
    binds = [x for x in ast.walk(tracer.function) if getattr(x, "optional_vars", None) or getattr(x, "rest", None)
             or isinstance(x, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and x.name]
    if binds and isinstance(error, (NameError, Rejected)):
        return Rejected("with ... as, except ... as or match binds a name in no line of its trace")
    return error


def replay(trace, states, end):
    """Run a trace, as a script. Raises Rejected if its states are not those of the function, `end` being the last."""
    seen, tree, see = [], ast.parse(trace), ast.parse("_see(_locals())").body
    first = len(tree.body) - len(states) - 1
    tree.body[first:] = see + [statement for line in tree.body[first:] for statement in (line, *see)]
    execute(ast.fix_missing_locations(tree), __name__="__main__", _locals=locals,
            _see=lambda names: seen.append(literals(names)))
    others, states = seen.pop(0), [*states, end]                          # others: globals before the function's lines
    variables = {name for state in states for name in state} - others.keys()
    for state, found in zip(states, seen):
        if {name: found[name] for name in found if name in variables or name in state} != state:
            raise Rejected("its trace has other states")


def split_trace(row):
    """A row's trace -> the statements around the function, the lines that ran, and the assert, as text."""
    text, body = row["trace"].split("\n"), ast.parse(row["trace"]).body
    ends = [0, *(statement.end_lineno for statement in body)]
    pieces = ["\n".join(text[start:end]) for start, end in zip(ends, ends[1:])]
    first = len(pieces) - len(row["states"]) - 1
    return pieces[:first], pieces[first:-1], pieces[-1]


# ----------------------------------------------------------------------------------------------------------
# Code from files runs in a process of its own, with limits, in a temporary folder (on Linux only; files that
# it writes elsewhere stay). This helps against accidents. It is no protection against attacks.

def limited(folder, file, seconds, work, arguments):
    """In a process of its own: set limits, then write what work(*arguments) returns to an open file."""
    try:
        import resource                                     # not on Windows
        with open("/proc/self/statm") as pages:
            memory = int(pages.read().split()[0]) * resource.getpagesize() + 2 ** 29      # 512 MB more than now
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 20, 2 ** 20))
        os.setsid()                                         # a group, so that `guarded` can kill it whole
        os.chdir(folder)
        for descriptor in 0, 1, 2:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, file.fileno()}:
            with contextlib.suppress(OSError):              # listdir's own descriptor, closed already
                os.close(descriptor)
        os.fork = None                                      # no fork bomb by accident
        random.seed(0)
        found = work(*arguments)
    except Rejected as why:
        found = {"reason": str(why)}
    except BaseException as error:
        found = {"reason": f"it raises {type(error).__name__}: {error}"}
    json.dump(found, file)
    file.flush()


def guarded(work, *arguments, seconds=3):
    """work(*arguments) in a forked process with limits: so many seconds of CPU, four times that of the clock. -> what
    it returns, which JSON must be able to hold, or {"reason"}. Raises OSError if there can be no such process."""
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
          tempfile.TemporaryFile("w+") as file):
        context = multiprocessing.get_context("fork")
        child = context.Process(target=limited, args=(folder, file, seconds, work, arguments))
        child.start()
        try:
            end = time.monotonic() + 4 * seconds            # join() hangs if the child closes its files
            while child.exitcode is None and time.monotonic() < end:
                time.sleep(0.0005)
            late = child.exitcode in (None, -signal.SIGXCPU)
        finally:
            with contextlib.suppress(OSError):              # there is nobody left
                os.killpg(child.pid, signal.SIGKILL)
            child.join()
        try:
            file.seek(0)
            return json.load(file)
        except ValueError:
            return {"reason": f"more than {seconds} s" if late else "it ends its process"}


def try_guard():
    """Raise OSError if code cannot run with limits here: the fault is ours, not that of a row of a file."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise OSError("this system cannot fork: trace needs Linux")
    found = guarded(unroll, {"id": "", "code": "def f(x):\n    return x", "input": "1"})
    if "reason" in found:
        raise OSError(f"not even f(x) = x has a trace here: {found['reason']}")


def agree(rows):
    """For each [trace, states, end], whether `replay` finds the same states, also in a folder that is not empty."""
    found = []
    open("another file", "w").close()
    for row in rows:
        try:
            found.append(replay(*row) is None)
        except (Exception, SystemExit, Rejected):
            found.append(False)
    return found


def witness():
    """Answer each line of standard input, a list in JSON, as `agree` does, with the clock set three years ahead. What
    fails beside others is tried alone."""
    now, today = time.time, datetime.datetime
    time.time, time.time_ns = (lambda: now() + 1e8), (lambda: int(1e9 * time.time()))
    later = {"now": classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz)),
             "utcnow": classmethod(lambda cls: cls.utcfromtimestamp(time.time()))}
    datetime.datetime = type("datetime.datetime", (today,), later)        # the name is for repr
    for name in "localtime", "gmtime", "ctime":
        setattr(time, name, lambda at=None, f=getattr(time, name): f(time.time() if at is None else at))
    for name in "strftime", "asctime":                      # the last argument, a time, may be left out
        setattr(time, name, lambda *given, f=getattr(time, name), most=1 + (name == "strftime"): f(
            *given, *[time.localtime()] * (len(given) < most)))
    os.environ.clear()
    for line in sys.stdin:
        rows = json.loads(line)
        found = guarded(agree, rows)
        found = found if isinstance(found, list) else [False] * len(rows)
        print(json.dumps([x or guarded(agree, [row]) == [True] for x, row in zip(found, rows)]), flush=True)


def start_witnesses():
    """-> three processes with other hash seeds, in another folder, with another command line."""
    command = [sys.executable, "-c", "import data; data.witness()", *"abcdefgh"]
    here = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    return [subprocess.Popen(command, env=here | {"PYTHONHASHSEED": seed}, cwd="/", text=True, start_new_session=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE) for seed in "123"]


def confirmed(rows, witnesses):
    """For each row, whether its trace has the same states in other processes. Removes "end" from the rows."""
    asked = json.dumps([[row["trace"], row["states"], row.pop("end")] for row in rows])
    with contextlib.suppress(BrokenPipeError):
        for process in witnesses:
            print(asked, file=process.stdin, flush=True)
    answers = [process.stdout.readline() for process in witnesses]
    if "" in answers:
        raise OSError("a process that confirms traces has ended: is there too little memory?")
    return map(all, zip(*map(json.loads, answers)))


def read_rows(path):
    """Yield (id, row) of a file of JSON lines. Raises BadInput, with the line's number, or OSError."""
    names = set()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                    name = str(row.get("id", row.get("task_id", f"line {number}")))
                except (AttributeError, ValueError, RecursionError):
                    raise BadInput(f"{path}, line {number}: give JSON lines, an object {{...}} in each")
                if name in names:
                    raise BadInput(f"{path}, line {number}: a second row with the id {name}")
                names.add(name)
                yield name, row
    if not names:
        raise BadInput(f"{path} is empty: give JSON lines")


def calls_in(name, row):
    """A row of CRUXEval, of LiveCodeBench or of MBPP -> its calls, for `unroll`, or {"id", "reason"}."""
    try:
        if "test_list" in row:
            code = [*row.get("test_imports", []), row["code"], row.get("test_setup_code") or ""]
            call = {"code": "\n".join(code)}
            return [call | {"id": f"{name}/{i}"} | parts(test, call["code"])
                    for i, test in enumerate(row["test_list"])] or [{"id": name, "reason": "an empty test_list"}]
        code, given, output = row["code"] + "", row["input"], row.get("output")
        if not isinstance(given, str):
            return [{"id": name, "reason": "input must be text, the arguments as Python source"}]
        output = output if output is None or isinstance(output, str) else repr(output)
        return [{"id": name, "code": code, "input": given, "name": row.get("name", row.get("function_name")),
                 "output": output, "imports": "function_name" in row}]
    except (AttributeError, KeyError, TypeError):
        return [{"id": name, "reason": "neither code and input, nor code and test_list"}]


MODULES = ("typing statistics copy re random operator string bisect heapq math functools itertools collections "
           "datetime io json sys").split()


def with_imports(code):
    """A program with the imports that LiveCodeBench's grader puts before it, as far as it needs them."""
    homes = {name: f"from {module.__name__} import {name}\n" for module in map(importlib.import_module, MODULES)
             for name in getattr(module, "__all__", dir(module))} | {name: f"import {name}\n" for name in MODULES}
    read, made = names_in(ast.parse(code).body)
    lines = "".join(homes[name] for name in sorted(read - made - {*dir(builtins)}) if name in homes)
    future = re.match("(from __future__ .*\n)*", code)[0]                # stays first
    return future + lines + code.removeprefix(future)


def parts(test, code):
    """MBPP's `assert name(input) == output` -> name, input (the whole call), output, else {"reason"} (appendix A)."""
    with contextlib.suppress(AttributeError, MemoryError, RecursionError, SyntaxError, ValueError):
        [line] = ast.parse(test.strip()).body
        [output], [equal], name = line.test.comparators, line.test.ops, line.test.left.func.id
        if isinstance(equal, ast.Eq) and re.search(rf"def {name}\b", code):
            return {"name": name, "input": ast.unparse(line.test.left), "output": ast.unparse(output)}
    return {"reason": "a test that is not assert name(input) == output"}


def calls_of(path):
    """Yield the calls of a file."""
    for name, row in read_rows(path):
        yield from calls_in(name, row)


def write_traces(path, out, seconds=3):
    """Unroll every call in a file: rows to `out`; what has no trace, and why, to OUT.rejected.jsonl. After
    Ctrl-C, both files hold whole lines. Raises BadInput or OSError."""
    rejected, counts = os.path.splitext(out)[0] + ".rejected.jsonl", Counter()
    for name, times in Counter(call["id"] for call in calls_of(path)).items():
        if times > 1:                                       # refused before anything is written, as is a bad line
            raise BadInput(f"{path}: two calls with the id {name}")
    witnesses = start_witnesses()
    calls = calls_of(path)
    with open(rejected, "x", 1) as bad, open(out, "x", 1) as good:
        try:
            while batch := [*islice(calls, 50)]:
                rows = [call if "reason" in call else guarded(unroll, call, seconds=seconds) for call in batch]
                holds = confirmed([row for row in rows if "reason" not in row], witnesses)
                for call, row in zip(batch, rows):
                    if "reason" not in row and not next(holds):
                        row = {"reason": "another output or state in another process"}
                    if "reason" in row:
                        bad.write(json.dumps(call | row) + "\n")
                    else:
                        good.write(json.dumps(row) + "\n")
                    counts[row.get("reason", "kept").partition(":")[0]] += 1
        finally:
            print(f"{counts['kept']} traces in {out}; rejected calls, and why, in {rejected}")
            for reason, n in counts.most_common():
                print(f"{n:6d}  {reason}")
            for process in witnesses:
                process.communicate()


def read_traces(path):
    """-> {id: row} of a file of traces. Raises BadInput, or OSError."""
    rows = dict(read_rows(path))
    needed = {"id", "source", "call", "output", "trace", "states", "steps"}
    if not all(needed <= {*row} for row in rows.values()):
        raise BadInput(f"{path}: no traces; make some with python data.py trace --file CALLS --out TRACES")
    return rows


# ----------------------------------------------------------------------------------------------------------
# trace as a task: functions made at random, or those of a file

LINES = ["i += n", "i -= n", "i += i", "i -= i", "i = n", "i = max(i, i)"]     # i: a variable; n: a digit
HEADS = ["if i > n:", "if i % 2 == 0:", "for i in range(n):", "while i > n:"]


def random_function(rng, statements=3):
    """-> source of a function on ints, and arguments for it. statements: maximum at the body's top level."""
    words = {"i": "abc", "n": "12345"}

    def write(templates):
        return re.sub(r"\b[in]\b", lambda found: rng.choice(words[found.group()]), rng.choice(templates))

    def block(indent, most=3):
        for _ in range(rng.randint(1, most)):
            if rng.random() < 0.6 or len(indent) > 8:
                yield indent + write(LINES)
                continue
            yield indent + write(HEADS)
            yield f"{indent}    {write(LINES)}"                           # so the step limit ends any loop
            yield from block(f"{indent}    ")
            if rng.random() < 0.3:
                yield f"{indent}else:"
                yield f"{indent}    {write(LINES)}"

    body = "\n".join(block("    ", statements))
    names = sorted(set(re.findall(r"\b[abc]\b", body)))
    arguments = ", ".join(str(rng.randint(0, 9)) for _ in names)
    return f"def f({', '.join(names)}):\n{body}\n    return {rng.choice(names)}", arguments


def random_rows(rng, statements):
    """Rows of functions made at random, without end."""
    while True:
        source, arguments = random_function(rng, statements)
        with contextlib.suppress(Rejected):
            yield unroll({"id": "random", "code": source, "input": arguments})


class Trace(Task):
    """The trace of a function (P2 section 2): its assert asks for the output. State: its variables, as text.

    Functions are made at random, or come from trace_file; their code is not run again. Stage L: L lines
    before the assert; L:M: M to L. The split looks at the lines that ran, not at arguments and output; one
    function can have traces in both."""
    curriculum = "4:1 8:2 16:4 24:8"
    stage_samples = 4000
    whole = True
    settings = ("trace_file",)

    def __init__(self, trace_file="", **others):
        super().__init__(**others)
        self.trace_file = trace_file
        self.rows = [*read_traces(trace_file).values()] if trace_file else []

    def beyond(self, last):
        return [last]

    def chance(self, stage):
        return super().chance(stage, programs=100)

    def fits(self, row, stage, split):
        """Whether a row is of this stage and split."""
        if not int(stage.kind or stage.length) <= len(row["states"]) <= stage.length:
            return False
        _, lines, last = split_trace(row)
        argument_lines = len(lines) - row["steps"]                        # 0 or 1
        program = "\n".join(lines[argument_lines:]) or last.removesuffix(f" == {row['output']}")
        return is_test(program) == (split == "test")

    @lru_cache(maxsize=100)
    def fitting(self, stage, split):
        """The file's rows of a stage and a split."""
        return [row for row in self.rows if self.fits(row, stage, split)]

    def draw(self, rng, stage, split):
        if self.trace_file:
            rows = self.fitting(stage, split)
            row = rng.choice(rows) if rows else None
        else:
            tried = islice(random_rows(rng, stage.length), 10_000)
            row = next((row for row in tried if self.fits(row, stage, split)), None)
        if not row:
            raise BadInput(f"stage {stage}: no such traces in the {split} split. An eighth of all programs, chosen by "
                           "a hash, is for test, the others for training: give more traces, or another stage")
        around, lines, last = split_trace(row)
        drawn = [Line(text, f"{text}\n", "") for text in around]
        for line, state in zip(lines, row["states"]):
            text = state_text(state)
            told = len(self.tokenizer.encode(text)) <= 100                # longer ones are left out
            drawn.append(Line(line, f"{line}\n", "", text if told else None))
        drawn.append(Line(last, f"{last}\n", row["output"]))
        return drawn


TASKS = {"repl": Repl, "inverse": Inverse, "parity": Parity, "listperm": ListPerm, "arith": Arith,
         "group": Group, "trace": Trace}


# ----------------------------------------------------------------------------------------------------------
# python data.py TASK: samples to check by eye; and the commands about files

def show_samples(args):
    """Print samples of a task: traces with answers in [brackets], and the state beside each line."""
    kind, (stage, *others) = TASKS[args.task], parse_stages(args.stage)
    if others:
        raise BadInput(f"--stage {args.stage}: give one stage")
    given = {name: getattr(args, name) for name in kind.settings if getattr(args, name, None) is not None}
    task = kind(states="transformer", **given)
    task.check_stage(stage)
    rng, chance = random.Random(args.seed), task.chance(stage)
    for number in range(args.samples):
        print(f"sample {number}, chance {chance:.3g}")
        for line in task.draw(rng, stage, "train"):
            text = line.text.removesuffix("\n")
            if line.answer:
                text = f"{text.removesuffix(line.answer)}[{line.answer}]"
            print(f"{text:40s} # {line.state}" if line.state else text)
    print("notice: a model is asked for what stands in [ ]; the state, right of #, is not in the text")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                  # an error is one line
    add = parser.add_argument
    add("task", choices=TASKS, nargs="?", default="repl", metavar="task", help=f"{', '.join(TASKS)} [repl]")
    add("--stage", default="8x1", help="of the samples [8x1]")
    add("--samples", type=int, default=1, help="how many [1]")
    add("--seed", type=int, default=0, help="of the random generator [0]")
    add("--n-vars", type=int, help="repl, inverse, listperm: how many variables")
    add("--moves", choices=["swap", "perm"], help="repl, inverse: what a command is")
    add("--digits", type=int, help="arith: per number")
    add("--group", choices=GROUPS, help="group: which one")
    add("--trace-file", help="trace: samples from a file that `trace --out` has written")
    add("--file", help="trace: a file of JSON lines, the calls to unroll")
    add("--out", help="trace: a new file of JSON lines, the traces of --file")
    add("--allow-exec", action="store_true",
        help="execute the code in --file, in child processes with limits: no sandbox")
    args = parser.parse_args(argv)
    try:
        if args.samples < 1:
            raise BadInput("--samples: give a number above 0")
        for name in [args.out, f"{os.path.splitext(args.out)[0]}.rejected.jsonl"] if args.out else []:
            if os.path.exists(name):
                raise BadInput(f"{name} exists: choose another --out")
        if not (args.file or args.out):
            show_samples(args)
        elif args.task == "trace" and args.file and args.out and args.allow_exec:
            try_guard()
            write_traces(args.file, args.out)
        else:
            raise BadInput("to unroll calls, write trace --file CALLS --out TRACES --allow-exec")
    except BrokenPipeError:                                 # as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    # Sets have the same order in every run, and numpy starts no threads, so that we may fork.
    needed = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    if "--allow-exec" in sys.argv and not needed.items() <= os.environ.items():
        os.environ.update(needed)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main())
