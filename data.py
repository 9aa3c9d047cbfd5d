"""
The tasks. A task is a few lines of Python that write a program, and Python itself executes that program. (The task
`group` is the exception: its words are drawn as numbers.)

So Python decides what a `print` shows, and what the variables hold after a line. The function `run` executes the
lines, and the method `to_batch` turns them into arrays.

  repl       Python REPL traces (P1 section 4, Figure 2): commands shuffle n variables, each print reveals one
  inverse    like repl, but a print asks which variable held a value at the start (P1 Figure 7)
  parity     the parity of bits, xored one by one (P2 section 4, Figure 6)
  listperm   a list whose elements change places (P2 section 4, Figure 8)
  arith      sums and differences (P2 section 4, appendix C)
  trace      function calls, unrolled into straight-line programs of the lines that ran (P2 section 2)
  group      word problems: products in finite groups (Merrill et al. 2404.08819); a token is an element, not text
  pfsa       REPL traces with hidden branches (P1 section 5), in pfsa.py; `python pfsa.py` shows a sample

Words. A *program* consists of lines of source, and a *command* is a line that changes variables. A *trace* is a
program together with what it prints. An *answer* is the last word of a printed line, or what follows == in an assert.
The *state* is what the variables hold after a line. A state of fixed size has *slots*, such as one for each variable,
and each slot holds one of a few classes. A *stage* LxS is one part of a curriculum: its traces have L commands (or
lines), with a print after every S-th. Symbols: B traces in a batch, T tokens, L length, S spacing, n variables.

A program is held out for testing if a hash of its text is 0 modulo 8, and all other programs are for training. (The
task trace hashes a part of the text, and the stages same and forced of pfsa hold nothing out.) A batch depends only
on (seed, split, stage, its number t, size), so batches are drawn again instead of being stored.

Read `run` and the class `Repl` first. You can stop at the section "trace": the rest turns functions into traces.

  python data.py                                                                    a sample
  python data.py arith --digits 2 --stage 4
  python data.py trace --file calls.jsonl --out traces.jsonl --allow-exec           functions become traces

P1 is arXiv 2602.14814, "Learning State-Tracking from Code Using Linear RNNs". P2 is "Grounding Code
Understanding in Step-by-Step Execution". This file downloads nothing and uses numpy, not torch.
"""
import argparse
import ast
import builtins
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
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

with contextlib.suppress(ImportError):                      # Windows has none, and write_traces does not run there
    import resource

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class BadInput(ValueError):
    """An input is wrong, and the message says what to do. Any other ValueError is a fault in this code."""


# ----------------------------------------------------------------------------------------------------------
# Tokenizer: characters, and lexemes, which are pieces of Python that would otherwise cost several tokens

PAD = 0                                             # the byte NUL, which fills up the shorter traces of a batch
ASKED, STATE = 1, 2                                 # marks of tokens in an answer, and in a state in the text
LEXEMES = (
    ">>> ", "print('", "', ", ")\n", " = ", ", ",                                           # repl
    "assert ", " == ", " ^= ", " + ", " - ", "a[", "], a[", "] = a[", "  # ",               # parity, listperm, arith
    "from random import random\n", " = (", ") if random() < 0.5 else (",                    # hidden branches
    "forloop", " = iter((", " = next(forloop", "assert (", ") == ", " += ", " -= ", "range(", "len(", "str(",
    ".append(", ".replace(", ".upper()", ".pop()", "[::-1]", "[1:]",                        # trace
)
BYTES = [bytes([i]) for i in range(256)] + [lexeme.encode() for lexeme in LEXEMES]


def pieces_of(text):
    """-> the vocabulary for texts made of the characters in `text`: NUL, these characters, and lexemes made of them."""
    characters = sorted({*text})
    return [b"\0"] + [piece.encode() for piece in (*characters, *LEXEMES) if {*piece} <= {*characters}]


class Tokenizer:
    """pieces: the vocabulary, a list of bytes; piece i is token i. `encode` takes the longest piece that matches. With
    BYTES (256 bytes, then the lexemes), decode(encode(s)) == s for any string. A shorter list makes models faster."""

    def __init__(self, pieces=BYTES):
        self.pieces = list(pieces)
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        longest_first = sorted((piece for piece in self.pieces if len(piece) > 1), key=len, reverse=True)
        self.pattern = re.compile(b"|".join([*map(re.escape, longest_first), b"."]), re.DOTALL)

    def __len__(self):
        return len(self.pieces)

    @lru_cache(maxsize=100_000)                     # most tasks repeat the same lines
    def encode(self, text):
        """str -> tuple of int. Lone surrogates, which a Python string may contain, survive the round trip. Raises
        BadInput for a character that is not in the pieces."""
        raw = text.encode("utf-8", "surrogatepass")
        try:
            return tuple(self.ids[piece] for piece in self.pattern.findall(raw))
        except KeyError as missing:
            raise BadInput(f"{missing} in {text!r} is not a token of this task: add it to the task's `characters`")

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
    source: str                   # the source that was executed; "" for a line that was not executed
    text: str                     # the line in the trace, with prompt and newline
    answer: str                   # the end of `text`, which a model must predict; "" if none
    state: object = None          # the state after the line, as `state_after` returns it


@lru_cache(maxsize=100_000)
def compiled(source):
    """-> the code object of a line. Raises BadInput if the line is not a whole statement."""
    try:
        return compile(source, f"<the line {source}>", "exec")        # the file name in a traceback
    except SyntaxError as error:
        raise BadInput(f"the line {source!r} is not a complete statement ({error.msg}): yield each statement whole")


def run(program, memory, prompt="", state_after=None):
    """Execute a program's lines one by one in `memory`, a dict of variables. -> list of Lines, also of printed ones.

    program: an iterable of source lines, each a whole statement. A generator may read `memory` before it yields a
    line. state_after(memory, source): returns the state to record after a line. An answer is the last word of a
    printed line, or what follows == in an assert. Raises BadInput for a line that is not a whole statement."""
    lines, printed = [], []

    def to_line(*values, sep=" ", end="\n"):
        if end != "\n":
            raise BadInput(f"a print must end its line: leave out end={end!r}")
        printed.append(sep.join(map(str, values)))

    memory["__builtins__"] = {**vars(builtins), "print": to_line}
    for source in program:
        exec(compiled(source), memory)
        state = state_after(memory, source) if state_after else None
        answer = source.partition(" == ")[2] if source.startswith("assert ") else ""
        lines.append(Line(source, f"{prompt}{source}\n", answer, state))
        for text in printed:
            lines.append(Line("", f"{text}\n", text.rpartition(" ")[2], state))
        printed.clear()
    return lines


# ----------------------------------------------------------------------------------------------------------
# Stages and batches

class Stage(NamedTuple):
    """One part of a curriculum, written LxS, or L for Lx1. A kind may follow: in tasks with one answer per trace, L:M
    means M to L lines; group and pfsa have kinds of their own."""
    length: int                   # number of commands, lines or group elements
    spacing: int = 1              # commands between two prints
    kind: str = ""

    def __str__(self):
        return f"{self.length}x{self.spacing}" + (f":{self.kind}" if self.kind else "")


def parse_stages(text):
    """'8x1 16x2' -> [Stage(8, 1), Stage(16, 2)]. Raises BadInput for a bad stage."""
    stages = []
    for word in text.split() or [text]:                   # an empty text is one bad stage
        match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?(?::(\w+))?", word)
        if not match:
            raise BadInput(f"'{word}' is not a stage: write LENGTHxSPACING, as in \"8x1 16x2 64x8\"")
        stages.append(Stage(int(match[1]), int(match[2] or 1), match[3] or ""))
        if not 1 <= stages[-1].spacing <= stages[-1].length:
            raise BadInput(f"stage {word}: choose a length of at least 1, and a spacing from 1 to the length")
    return stages


class Batch(NamedTuple):
    """B traces of T tokens, as arrays here and as tensors in train.py."""
    tokens: np.ndarray                    # (B, T) int64: what a model reads; PAD after the trace's end
    target: np.ndarray                    # (B, T) int64: the next token, in group the product so far; else PAD
    asked: np.ndarray                     # (B, T) bool: the target is part of an answer
    state_in_text: np.ndarray             # (B, T) bool: the target is part of a state in the text
    line_end: np.ndarray                  # (B, T) bool: the token is the last of a line
    state: np.ndarray | None = None       # (B, T, slots) int64: classes at line ends; -1 elsewhere or if not set
    state_tokens: np.ndarray | None = None  # (B, lines, longest) int64: the state after each line as text, then PAD
    belief: np.ndarray | None = None      # (B, T, m) float32: pfsa, P(each of m states | text so far)
    predictive: np.ndarray | None = None  # (B, T, n) float32: pfsa, P(each of n answers | text so far), at answers


def pad(rows, value=PAD):
    """Lists of ints, of different lengths -> (rows, longest) int64, filled up with `value`."""
    out = np.full((len(rows), max(map(len, rows), default=0)), value)
    for i, row in enumerate(rows):
        out[i, :len(row)] = row
    return out


# ----------------------------------------------------------------------------------------------------------
# What tasks share

class Task:
    """The base class of tasks. A task of your own defines `program`, which yields statements of Python, and gets a name
    in TASKS. To train with the linear state head, it also defines `slots`, n_slots and n_classes.

    What a program prints, or asserts, are the answers. All traces of a stage have equally many, each of one token; with
    one_answer, a trace has a single answer of any length.

    states: how the program's state supervises training. "linear": a linear head predicts the classes of the slots.
    "transformer", "contrastive": the head of this name in models.py learns the state as text. "text": states stand in
    the trace, as comments. "none": not at all. "auto": linear if there are slots, else none. Raises BadInput."""
    prompt = ""
    curriculum = "8x1"
    one_answer = False            # one answer per trace, of any number of tokens
    stage_samples = 0             # if not 0, a stage is passed after this many traces at the latest
    settings = ()                 # more keywords of __init__; each is also a field of train.py's Config
    characters = ""               # all characters of its texts, which keeps the vocabulary small; "": any characters
    n_slots = n_classes = 0

    def __init__(self, states="auto", tokenizer=None):
        self.states = ("linear" if self.n_slots else "none") if states == "auto" else states
        self.tokenizer = tokenizer or Tokenizer(pieces_of(self.characters) if self.characters else BYTES)
        if self.states == "linear" and not self.n_slots:
            raise BadInput("--states linear: this task has no slots: choose none, text, transformer or contrastive")

    def program(self, rng, stage, memory):
        """Yield source lines. rng: a random.Random; memory: the variables now. Your task defines it."""

    def slots(self, memory):
        """The state: n_slots classes, each below n_classes, or -1 if a slot is not set yet. Your task defines it."""

    def check_stage(self, stage):
        """Raise BadInput for a bad stage. Good ones are LxS; if one_answer, L, or L:M for programs of M to L lines."""
        L, S, M = stage
        if M and not self.one_answer:
            raise BadInput(f"stage {stage}: stages of this task take nothing after a colon: write {L}x{S}")
        if self.one_answer and S != 1:
            raise BadInput(f"stage {stage}: a program of this task has one answer, and no spacing: write {L}")
        if M and not (M.isdecimal() and 1 <= int(M) <= L):
            raise BadInput(f"stage {stage}: '{M}' is not from 1 to {L}: write {L}:M for programs of M to {L} lines")

    def harder_stages(self, last):
        """The stages to evaluate after training: the last stage LxS, and one with traces twice as long."""
        return [Stage(last.length, last.spacing), Stage(2 * last.length, last.spacing)]

    def chance(self, stage, programs=1000):
        """Accuracy of always guessing the most frequent answer, counted over training programs. Raises BadInput
        if the answers are not as the docstring of Task demands."""
        rng = random.Random(0)
        traces = [self.draw(rng, stage, "train") for _ in range(programs)]
        self.check_answers(traces)
        answers = Counter(line.answer for lines in traces for line in lines if line.answer)
        return answers.most_common(1)[0][1] / answers.total()

    def text(self, memory):
        """The state as text: a=3, b=[1, 2]."""
        return state_text(literals(memory))

    def state_after(self, memory, source):
        """The state after the line `source`: None, text or classes, as `states` asks. Raises BadInput for bad slots."""
        if self.states != "linear":
            return None if self.states == "none" else self.text(memory)
        try:
            classes = self.slots(memory)
            is_right = {*classes} <= {*range(-1, self.n_classes)} and len(classes) == self.n_slots
        except (LookupError, TypeError, ValueError) as error:             # such as a KeyError
            classes, is_right = repr(error), False
        if not is_right:
            raise BadInput(f"{type(self).__name__}.slots: {classes} after the line {source!r}: return n_slots = "
                           f"{self.n_slots} numbers below n_classes = {self.n_classes}, with -1 for slots not set yet")
        return classes

    def draw(self, rng, stage, split):
        """Draw a trace of the split, "train" or "test". -> list of Lines. Raises BadInput if 1,000 draws find none."""
        for _ in range(1000):
            memory = {}
            lines = run(self.program(rng, stage, memory), memory, self.prompt, self.state_after)
            program = "\n".join(line.source for line in lines)
            if is_test(program) == (split == "test"):
                return lines
        raise BadInput(f"stage {stage} has too few programs, none of 1,000 for the {split} split: choose a longer one")

    def batch(self, seed, split, stage, t, size):
        """Batch number t of a stage: `size` traces of a split. The same arguments give the same batch."""
        rng = random.Random(f"{seed} {split} {stage} {t}")
        return self.to_batch([self.draw(rng, stage, split) for _ in range(size)])

    def spans(self, line):
        """A Line -> the pieces of its text, [(text, mark), ...]. The mark is ASKED for an answer, STATE for a state in
        the text, else 0. With states in the text, `a, b = b, a` becomes `a, b = b, a  # a=1, b=3`; no state follows a
        print or what it prints."""
        if line.answer:
            end = f"{line.answer}\n" if self.one_answer else line.answer
            before, _, after = line.text.rpartition(end)
            return [(before, 0), (end, ASKED), (after, 0)]
        if self.states == "text" and line.state and line.source and not line.source.startswith("print"):
            return [(f"{line.text[:-1]}  # ", 0), (f"{line.state}\n", STATE)]
        return [(line.text, 0)]

    def encode(self, lines):
        """Lines -> a trace's tokens, the mark of each token, and the index of each line's last token."""
        tokens, marks, ends = [], [], []
        for line in lines:
            for text, mark in self.spans(line):
                ids = self.tokenizer.encode(text)
                tokens += ids
                marks += [mark] * len(ids)
            ends.append(len(tokens) - 1)
        return tokens, marks, ends

    def check_answers(self, traces):
        """Raise BadInput unless the traces' answers are as `Task` demands: equally many, at least one, of one token."""
        name = type(self).__name__
        counts = sorted({sum(line.answer != "" for line in lines) for lines in traces})
        if len(counts) > 1 or counts[0] == 0 or self.one_answer and counts[0] > 1:
            raise BadInput(f"{name}.program: traces of one stage have {' or '.join(map(str, counts))} answers: print "
                           "(or assert with ==) equally often in each, at least once; with one_answer, exactly once")
        for answer in {line.answer for lines in traces for line in lines} - {""}:
            if not self.one_answer and len(self.tokenizer.encode(answer)) > 1:
                raise BadInput(f"{name}.program: the answer {answer} has several tokens: set one_answer = True and "
                               "print one answer per trace, or print answers of one token")

    def to_batch(self, traces):
        """Lists of Lines -> Batch."""
        self.check_answers(traces)
        tokens, marks, ends = zip(*map(self.encode, traces))
        tokens, marks = pad(tokens), np.roll(pad(marks), -1, 1)         # marks describe the target
        target = np.roll(tokens, -1, 1)
        target[:, -1] = PAD
        line_end = np.zeros(tokens.shape, bool)
        for row, places in zip(line_end, ends):
            row[places] = True
        batch = Batch(tokens, target, marks == ASKED, marks == STATE, line_end)
        if self.states == "linear":
            batch = batch._replace(state=np.full((*tokens.shape, self.n_slots), -1))
            batch.state[line_end] = [line.state for lines in traces for line in lines]    # trace by trace
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
    """REPL traces (P1 Figure 2): n assignments and a print, then L commands, with a print after every S-th.

    Each print shows one random variable. The first, before any command, is text and not an answer: its value can be
    looked up a few lines above. With moves="perm", a command permutes all n variables, and all n! permutations are
    equally likely. With moves="swap", it swaps two, and all pairs are equally likely. n_vars is 2 to 9, so that every
    value is a single digit."""
    prompt = ">>> "
    curriculum = "8x1 16x2 32x4 64x8"                 # P1's
    settings = ("n_vars", "moves")
    characters = ">>> print('a', a)\n  # bcdefghi=123456789"

    def __init__(self, n_vars=5, moves="perm", **others):
        if not 2 <= n_vars <= 9:
            raise BadInput(f"--n-vars {n_vars}: choose 2 to 9, because every value is a single digit")
        self.n_vars, self.moves, self.names = n_vars, moves, LETTERS[:n_vars]
        self.n_slots = self.n_classes = n_vars
        self.swaps = [f"{x}, {y} = {y}, {x}" for x, y in combinations(self.names, 2)]
        super().__init__(**others)

    def program(self, rng, stage, memory):
        yield from self.start(rng, memory)
        yield from self.question(rng.choice(self.names), memory)
        for step in range(1, stage.length + 1):
            yield self.command(rng)
            if step % stage.spacing == 0:
                yield from self.question(rng.choice(self.names), memory)

    def draw(self, rng, stage, split):
        lines = super().draw(rng, stage, split)
        first = next(i for i, line in enumerate(lines) if line.answer)
        lines[first] = lines[first]._replace(answer="")               # the print before the first command
        return lines

    def start(self, rng, memory):
        for name, value in zip(self.names, rng.sample(range(1, self.n_vars + 1), self.n_vars)):
            yield f"{name} = {value}"

    def question(self, name, memory):
        yield f"print('{name}', {name})"

    def command(self, rng):
        if self.moves == "swap":
            return rng.choice(self.swaps)
        return f"{', '.join(self.names)} = {', '.join(rng.sample(self.names, self.n_vars))}"

    def slots(self, memory):
        return [memory.get(name, 0) - 1 for name in self.names]

    def chance(self, stage):
        return 1 / self.n_vars

    def harder_stages(self, last):
        """The last stage, then ones with twice the length, twice the spacing, twice both, and four times both."""
        factors = (1, 1), (2, 1), (1, 2), (2, 2), (4, 4)
        stages = [Stage(last.length * longer, last.spacing * sparser) for longer, sparser in factors]
        return [stage for stage in stages if stage.spacing <= stage.length]


class Inverse(Repl):
    """A print asks which variable held a value at the start (P1 Figure 7). The trace does not show the values at the
    start. A line like `if a != 3: exit()` reveals that a holds 3 now, and the print after it asks which variable held
    3 at the start. So the state names, for each variable, the one that held its present value at the start. About half
    of the answers of 64x8 can be copied: the same line was printed before."""
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


def draw_length(rng, stage):
    """A program's length: L, or in a stage L:M (as in P2's curriculum) a random number from M to L."""
    return rng.randint(int(stage.kind), stage.length) if stage.kind else stage.length


class Parity(Task):
    """The parity of L bits, xored one by one (P2 Figure 6)."""
    curriculum = "16"
    one_answer = True
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
    """A list of the numbers 1 to n in random order, then L lines that each swap two of its elements (P2 Figure 8)."""
    curriculum = "16"
    one_answer = True
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

    Lines are drawn from the last to the first. Each assigns to a *needed* variable, one that a later line reads. An
    operand is a number, a needed variable or a new variable, equally likely. Unlike in P2, a line that would leave no
    variable needed is drawn again. The first line assigns numbers to all variables that are still needed."""
    curriculum = "4"
    one_answer = True
    settings = ("digits",)

    def __init__(self, digits=2, **others):
        if not 1 <= digits <= 6:
            raise BadInput(f"--digits {digits}: choose 1 to 6")
        self.low, self.high = (10 ** (digits - 1) if digits > 1 else 0), 10 ** digits - 1
        super().__init__(**others)

    def program(self, rng, stage, memory):
        length = draw_length(rng, stage)
        needed = ["a"]                                     # variables that a later line reads
        new_names = [f"a{i}" for i in range(2 * length, 0, -1)]
        new_names += sorted(LETTERS[1:], reverse=True)     # a2, a1, z ... c, b: a new y takes b, a new x takes c
        lines = []                                         # the last one first
        while len(lines) < length:
            target = rng.choice(needed)
            x = rng.choice([self.number(rng), rng.choice(needed), new_names[-2]])
            y = rng.choice([self.number(rng), rng.choice(needed), new_names[-1]])
            used = {operand for operand in (x, y) if not operand.isdecimal()}
            needed_before = sorted(({*needed} - {target}) | used)     # a line may read its own target
            if needed_before:
                needed = needed_before
                new_names = [name for name in new_names if name not in used]
                lines.append(f"{target} = {x} {rng.choice('+-')} {y}")
        yield f"{', '.join(needed)} = {', '.join(self.number(rng) for _ in needed)}"
        yield from reversed(lines)
        yield f"assert a == {memory['a']}"

    def number(self, rng):
        return str(rng.randint(self.low, self.high))

    def harder_stages(self, last):
        return [Stage(last.length), Stage(2 * last.length)]


# ----------------------------------------------------------------------------------------------------------
# group: words, which are sequences of group elements; the label of an element is the product so far

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
    "A5": [permutation(5, (0, 1, 2)), permutation(5, (0, 1, 2, 3, 4))],
    "S5": [permutation(5, (0, 1)), permutation(5, (0, 1, 2, 3, 4))],
    "S5swaps": [permutation(5, pair) for pair in combinations(range(5), 2)],
}
GROUPS |= {"S4two": GROUPS["S4"], "A5two": GROUPS["A5"]}       # the same groups, but:
GENERATORS_ONLY = ["S5swaps", "S4two", "A5two"]      # their words consist of the generators, not of all elements


def closure(generators):
    """Generators -> their group: all elements, sorted, and mul[i][j], the index of the product "first i, then j"."""
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
    """A word is a sequence of elements g_1 g_2 ... of a finite group. After each, the answer is the product so far.

    A word begins with the token 1, at which nothing is asked, so that a recurrence can set up its state. Element i is
    the token 2 + i.
    By default there is no state head, because the answers are the states. In a stage L:M, words contain only elements
    that move at most M points. A batch has size * (32 // L) words, but at least `size`, so that the batches of all
    stages up to 32 are about equally large."""
    curriculum = "8 16 32"
    settings = ("group",)
    n_slots = 1

    def __init__(self, group="S5", states="auto", **others):
        self.elements, self.mul = closure(GROUPS[group])
        alphabet = GROUPS[group] if group in GENERATORS_ONLY else self.elements
        self.alphabet = [self.elements.index(element) for element in alphabet]
        self.moved = [sum(x != y for x, y in enumerate(element)) for element in self.elements]
        self.n_classes = len(self.elements)
        names = [f"element {i}".encode() for i in range(self.n_classes)]
        states = "none" if states == "auto" else states
        if states not in ("none", "linear"):
            raise BadInput(f"--states {states}: the tokens of the task group are not text: choose linear or none")
        super().__init__(states=states, tokenizer=Tokenizer([b"\0", b"start", *names]), **others)

    def letters(self, kind):
        """The indices of the elements that may occur in words of a stage of this kind."""
        return [i for i in self.alphabet if not kind or self.moved[i] <= int(kind)]

    def word(self, rng, stage, split):
        """-> one word of the split, as a list of indices of elements."""
        letters = self.letters(stage.kind)
        for _ in range(1000):
            word = rng.choices(letters, k=stage.length)
            if is_test(str(word)) == (split == "test"):
                return word
        raise BadInput(f"stage {stage} has too few words, none of 1,000 for the {split} split: choose a longer one")

    def products(self, word):
        return list(accumulate(word, lambda x, y: self.mul[x][y]))

    def draw(self, rng, stage, split):
        """A word to look at, not to train on: one element per line, with the product so far as its state."""
        word = self.word(rng, stage, split)
        return [Line("", f"{self.elements[x]}\n", "", f"product {self.elements[y]}")
                for x, y in zip(word, self.products(word))]

    def batch(self, seed, split, stage, t, size):
        rng = random.Random(f"{seed} {split} {stage} {t}")
        words = [self.word(rng, stage, split) for _ in range(size * max(1, 32 // stage.length))]
        tokens = np.insert(2 + np.array(words), 0, 1, axis=1)                     # (words, 1 + L)
        product = np.insert(list(map(self.products, words)), 0, -1, axis=1)       # -1 at the start token
        asked = product >= 0
        target = np.where(asked, 2 + product, PAD)
        return Batch(tokens, target, asked, np.zeros_like(asked), asked, state=product[..., None])

    def check_stage(self, stage):
        if stage.spacing != 1:
            raise BadInput(f"stage {stage}: an answer follows every element, so no spacing: write {stage.length}")
        if stage.kind and not (stage.kind.isdecimal() and len(self.letters(stage.kind)) > 1):
            raise BadInput(f"stage {stage}: write {stage.length}:M for elements that move at most M points, with "
                           "an M that allows at least two elements")

    def harder_stages(self, last):
        return [Stage(last.length * factor) for factor in (1, 2, 4, 8)]

    def chance(self, stage):
        return 1 / self.n_classes


# ----------------------------------------------------------------------------------------------------------
# trace: a function call, unrolled into the lines that run (P2 section 2, appendix A)
#
#     def f(xs, n):
#         for x in xs:        xs, n = [1, 2], 0
#             n += x     ->   forloop0 = iter((xs))
#         return n            x = next(forloop0)  ...  assert (n) == 3
#     f([1, 2], 0)
#
# 1. Hooks record. They are calls that we insert into the function's syntax tree. Python itself runs the function, and
#    the hooks note each statement that has run, and the locals after it.
# 2. The replay judges. These lines run again, as a script with only global variables, and must make the same states.
#
# So the hooks can be simple. What they do not know (`except ... as`, `match`, `nonlocal`, a helper that reads a global
# named like a local) makes the replay fail, and the call is rejected.

class Rejected(BaseException):
    """Says why a call is rejected. It is no Exception, because `except Exception` in the function would catch it."""


class Tracer(ast.NodeTransformer):
    """Puts hooks into the statements of a called function, but not into functions inside it, and records what ran.

    lines: the source of each line that ran, the first of which assigns the arguments, while the others are *steps*;
    states: {name: literal or None} after each; last: the source of the returned value, later the assert; end: the state
    at the return."""
    # P2 appendix A. The trace's characters are those of the lines that ran.
    limits = {"call": 1, "steps": 50, "characters of trace": 1000, "characters of state": 12000}

    def __init__(self, call):
        """Compiles the call's code with hooks, but runs nothing of it. call: as for `unroll`. Raises Rejected."""
        self.call, self.source = call, call["code"].removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self.source = self.source.rstrip("\n")
        self.lines, self.states, self.last, self.end = [], [], "", {}
        self.calls, self.loops, self.extra = 0, 0, 0                      # extra: 1 if there is a line of arguments
        self.why = ""                                                     # the first reason to reject the call
        with blame("the code"):
            tree = ast.parse(self.source)
            self.rows = self.source.encode().split(b"\n")
            function, self.called, self.arguments = find_call(tree, call)
            kept = [x for x in tree.body if is_kept(x, function)]
            self.kept = [self.text(x) for x in kept]                      # before a class gets hooks in its method
            self.left_out = [self.text(x) for x in tree.body if x not in kept and x is not function]
            tree.body = [x if x in kept or x is function else try_only(x) for x in tree.body]
            function.body.append(ast.Return())                            # so each call finishes with the hook "back"
            self.generic_visit(function)
            function.body.insert(0, ast.Expr(self.hook("enter")))
            self.code = compile(ast.fix_missing_locations(tree), "<traced>", "exec", optimize=0)

    def text(self, node):
        """A node's source, but that of ast.unparse if the node has several lines or decorators, or is a :=."""
        if node.lineno < node.end_lineno or getattr(node, "decorator_list", []) or isinstance(node, ast.NamedExpr):
            return ast.unparse(node)
        return self.rows[node.lineno - 1][node.col_offset:node.end_col_offset].decode()

    def hook(self, method, text="", value=None):
        """The syntax tree of _tracer.method(value, text, _locals()). The locals are those after value."""
        tree = ast.parse(f"_tracer.{method}(None, {text!r}, _locals())", mode="eval").body
        tree.args[0] = value or tree.args[0]
        return tree

    # Where the hooks stand

    def simple(self, node, text=""):
        """-> the statement, then a hook that records it."""
        return [node, ast.Expr(self.hook("line", text or self.text(node)))]

    visit_Assign = visit_AugAssign = visit_Delete = visit_Assert = visit_Import = visit_ImportFrom = simple
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = simple

    def visit_Expr(self, node):
        does_nothing = isinstance(node.value, ast.Constant)               # such as a docstring
        return node if does_nothing else self.simple(node)

    def visit_AnnAssign(self, node):
        """Inside a function, Python does not evaluate annotations, and `y: int` alone does nothing."""
        return self.simple(node, f"{self.text(node.target)} = {self.text(node.value)}") if node.value else node

    def visit_If(self, node):
        node.test = self.hook("test", self.text(node.test), node.test)
        return self.generic_visit(node)

    visit_While = visit_If

    def visit_For(self, node):
        name = f"forloop{self.loops}"
        self.loops += 1
        node.iter = self.hook("loop", f"{name} = iter(({self.text(node.iter)}))", node.iter)
        step = self.hook("loop", f"{self.text(node.target)} = next({name})")
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(step))
        return node

    def visit_With(self, node):
        """`with E as x` becomes a line; leaving the block does not."""
        lines = [f"{self.text(item.optional_vars)} = ({self.text(item.context_expr)}).__enter__()"
                 for item in node.items if item.optional_vars]
        self.generic_visit(node)
        node.body[:0] = [ast.Expr(self.hook("line", line)) for line in lines]
        return node

    def visit_Return(self, node):
        node.value = self.hook("back", self.text(node.value) if node.value else "None", node.value)
        return node

    # What the hooks do

    def enter(self, _, __, names):
        """The arguments become the first line: as literals, or as they stand in the call where a literal would lose
        something, such as that two rows are one list."""
        self.calls += 1
        self.check_limits()
        names.pop("__class__", None)                                      # in a method that uses super
        values = [self.arguments.get(name, text) if text is None or has_twice(names[name], set()) else text
                  for name, text in literals(names).items()]
        if None in values:
            self.reject("an argument has no literal")
        if names:
            self.extra = 1
            self.line(None, f"{', '.join(names)} = {', '.join(values)}", names)

    def line(self, value, text, names):
        if self.last:
            self.reject("lines run after the return, in try/finally")
        self.lines.append(text)
        self.states.append(literals(names))
        self.check_limits()
        return value

    def loop(self, value, text, names):
        """A line of a `for` calls iter or next, but not if a variable has that name."""
        if names.keys() & {"iter", "next"}:
            text = re.sub(r"= (iter|next)\((.*)\)$", r"= (\2).__\1__()", text)
        return self.line(value, text, names)

    def test(self, value, text, names):
        """A condition is a line only if it changes a variable, or names an iterator, which it may have advanced."""
        iterates = any(hasattr(type(names.get(word)), "__next__") for word in re.findall(r"\w+", text))
        changes = literals(names) != (self.states[-1] if self.states else {})
        return self.line(value, text, names) if iterates or changes else value

    def back(self, value, text, names):
        self.last, self.end = text, literals(names)
        return value

    def reject(self, why):
        self.why = self.why or why                                        # `except:` may catch the exception
        raise Rejected(self.why)

    def check_limits(self):
        """Reject the call if the trace exceeds one of the limits."""
        code = "\n".join([*self.lines, self.last])
        states = "".join(name + text for state in self.states for name, text in state.items() if text)
        sizes = {"call": self.calls, "steps": len(self.lines) - self.extra, "characters of trace": len(code),
                 "characters of state": len(states)}
        for what, size in sizes.items():
            if size > self.limits[what]:
                self.reject(f"more than {self.limits[what]} {what}")

    # The call

    def record(self, memory):
        """Run the source, with hooks that record nothing, then the call, in the namespace `memory`. -> a row {"id",
        "source", "call", "output", "trace", "states", "steps"}, and the script for `replay`. Raises Rejected."""
        memory.update(_locals=locals, _tracer=Silent())
        with blame("the code"):
            exec(self.code, memory)
        memory["_tracer"], module_names = self, {*memory}
        with blame("calling the function"):
            value = eval(self.called, memory)
        memory["_tracer"] = Silent()
        if isinstance(value, types.GeneratorType):
            raise Rejected("its output is a generator")
        if self.why or not self.last:
            raise Rejected(self.why or "the function itself is not called (a decorator or a subclass may replace it)")
        output = output_of(self.call, value, memory)
        self.last = f"assert ({self.last}) == {output}"
        self.check_limits()
        script = "\n".join([*self.kept, *self.checked(module_names)])
        return {"id": self.call["id"], "source": self.source, "call": self.called, "output": output,
                "trace": "\n".join([*self.kept, *self.lines, self.last]),
                "states": [{name: text for name, text in state.items() if text} for state in self.states],
                "steps": len(self.lines) - self.extra}, script

    def checked(self, module_names):
        """Yield each line, then an assert that its state is right. module_names: globals that are no variables."""
        states = [*self.states, self.end]
        variables = {name for state in states for name, text in state.items() if text} - module_names
        left_out = "; ".join(text.partition("\n")[0] for text in self.left_out)
        why = "other values than in the call" + f", as it leaves out: {left_out}" * bool(left_out)
        for line, state in zip([*self.lines, f"{self.last}, {why!r}"], states):
            known = {name: text for name, text in state.items() if text}
            unset = sorted(variables - state.keys())
            yield line
            yield (f"assert [{', '.join(known)}] == [{', '.join(known.values())}]"
                   + f" and not {{*{unset}}} & {{*globals()}}" * bool(unset) + f", {why!r}")


class Silent:
    """Stands for the tracer before and after the call: its hooks record nothing."""

    def __getattr__(self, hook):
        return lambda value, *_: value


def replay(script):
    """Run a trace with its states as asserts. Raises Rejected."""
    try:
        exec(compile(script, "trace.py", "exec", optimize=0), {"__name__": "__main__"})
    except (Exception, SystemExit) as error:
        raise Rejected(f"its trace raises {type(error).__name__}: {error}") from error


def unroll(call):
    """Run a function call, and make its trace. -> its row. Raises Rejected. For other people's code, see write_traces.

    call: {"id", "code", "input"}, and optionally "output" and "name" (by default f, else the last function). The input
    is the arguments or the whole call. A method is called on Class(), unless the input is a whole call such as
    Class().method(3)."""
    row, script = Tracer(call).record({"__name__": "__main__"})
    replay(script)
    return row


# ----------------------------------------------------------------------------------------------------------
# trace: the parts of a call, and values as source

@contextlib.contextmanager
def blame(what):
    """Turn an exception into a Rejected. Its text is `what`, such as "the code", and the name of the exception."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Rejected(f"{what} raises {type(error).__name__}") from error


def find_call(tree, call):
    """-> the def of the called function or method, the call as text, and {parameter: source of its argument}."""
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    methods = {(owner.name, x.name): x for owner in tree.body if isinstance(owner, ast.ClassDef)
               for x in owner.body if isinstance(x, ast.FunctionDef)}
    with blame("the input"):
        given = ast.parse(f"_({call['input']}\n)", mode="eval").body
    name = call.get("name") or ("f" if "f" in functions else [None, *functions][-1])
    owner = {method: owner for owner, method in methods}.get(name)
    only = given.args[0] if len(given.args) == 1 and not given.keywords else None
    function, whole = functions.get(name) or methods.get((owner, name)), None
    match only:                                                           # is the input a whole call?
        case ast.Call(func=ast.Name(id=inner)) if inner == name and name in functions:
            whole = only
        case ast.Call(func=ast.Attribute(ast.Call(func=ast.Name(id=made)), inner)) if (
                (made, inner) in methods and "f" not in functions and call.get("name") in (None, inner)):
            function, whole = methods[made, inner], only
    if not function:
        raise Rejected(f"{name or 'a function'} is not at the top level of the code; call a method as C().method(...)")
    if whole:
        return function, ast.unparse(whole), sources_of(function, whole)
    start = name if name in functions else f"{owner}().{name}"
    for end in ")", "\n)":                                                # a comment may end the input
        with contextlib.suppress(SyntaxError):
            called = f"{start}({call['input']}{end}"
            return function, called, sources_of(function, ast.parse(called, mode="eval").body)


def sources_of(function, call):
    """-> {parameter: source of its argument or default}"""
    parameters, arguments = function.args, call.args
    decorators = [*map(ast.unparse, function.decorator_list)]
    if isinstance(call.func, ast.Attribute) and "staticmethod" not in decorators:
        made = call.func.value                                            # Solution().twice(3): self is Solution()
        arguments = [made.func if "classmethod" in decorators else made, *arguments]
    names = [x.arg for x in parameters.posonlyargs + parameters.args]
    nodes = dict(zip(reversed(names), reversed(parameters.defaults)))
    nodes |= dict(zip([x.arg for x in parameters.kwonlyargs], parameters.kw_defaults))
    keywords = {x.arg: x.value for x in call.keywords}
    if parameters.vararg:
        nodes[parameters.vararg.arg] = ast.Tuple(arguments[len(names):], ast.Load())
    if parameters.kwarg:
        rest = [name for name in keywords if name not in {*names, *nodes}]
        names_of_rest = [name and ast.Constant(name) for name in rest]    # None in f(**k)
        nodes[parameters.kwarg.arg] = ast.Dict(names_of_rest, [keywords[name] for name in rest])
    nodes |= dict(zip(names, arguments)) | keywords
    return {name: ast.unparse(node) for name, node in nodes.items() if node}


def is_kept(statement, function):
    """Whether a trace begins with this statement: not with `function`, nor with a statement that mentions it, or
    __name__. Other functions and classes are kept even then, because in them the name may be a variable."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    is_def = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
    return statement is not function and (is_def or not names & {function.name, "__name__"})


def try_only(statement):
    """The syntax tree of `try: statement, except: pass`, for what a trace leaves out, such as main()."""
    return ast.Try([statement], [ast.ExceptHandler(body=[ast.Pass()])], [], [])


def output_of(call, value, memory):
    """-> the literal of what a call has returned. Raises Rejected if it has none, or if the row says another output."""
    output = literal(value)
    with blame("the output"):
        expected = eval(call["output"], memory) if call.get("output") else value
        if expected is not value and value != expected:
            raise Rejected("its output is not what the row says")
    output = output or literal(expected)                                  # a Counter has none, but an equal dict has
    if not output:
        raise Rejected("the output has no literal")
    return output


def literal(x, inside=()):
    """-> the source of a value made of bool, int, float, complex, str, bytes, None, list, tuple, set and dict, or None
    for any other. The items of a set are sorted, so their order does not matter."""
    kind = type(x)
    if kind in (bool, str, bytes, type(None)):
        return repr(x)
    if kind is int and x.bit_length() > 14_000:                           # more than 4,214 digits: Python prints 4,300
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
    """{name: value} -> {name: literal}, with None for functions, modules and other objects, which have no literal."""
    return {name: literal(value) for name, value in names.items() if name != "__builtins__"}


def state_text(state):
    """{name: literal or None} -> a=3, b=[1, 2]"""
    return ", ".join(f"{name}={text}" for name, text in state.items() if text)


def has_twice(x, seen):
    """Whether x holds one list, set or dict twice, as [[0]] * 2 does. Its literal would make two of it."""
    if isinstance(x, (list, set, dict)):
        if id(x) in seen:
            return True
        seen.add(id(x))
    items = x.values() if isinstance(x, dict) else x
    return isinstance(x, (list, tuple, dict)) and any(has_twice(item, seen) for item in items)


# ----------------------------------------------------------------------------------------------------------
# trace as a task: calls of random functions, or the traces of a file

LINES = ["i += n", "i -= n", "i += i", "i -= i", "i = n", "i = max(i, i)"]     # i: a variable; n: a digit
HEADS = ["if i > n:", "if i % 2 == 0:", "for i in range(n):", "while i > n:"]


def random_function(rng, statements=3):
    """-> source of a random function on ints, and its arguments. statements: the maximum at the body's top level."""
    words = {"i": "abc", "n": "12345"}

    def write(templates):
        return re.sub(r"\b[in]\b", lambda found: rng.choice(words[found.group()]), rng.choice(templates))

    def block(indent, most=3):
        for _ in range(rng.randint(1, most)):
            if rng.random() < 0.6 or len(indent) > 8:
                yield indent + write(LINES)
                continue
            yield indent + write(HEADS)
            yield f"{indent}    {write(LINES)}"                           # so the step limit stops any loop
            yield from block(f"{indent}    ")
            if rng.random() < 0.3:
                yield f"{indent}else:"
                yield f"{indent}    {write(LINES)}"

    body = "\n".join(block("    ", statements))
    names = sorted(set(re.findall(r"\b[abc]\b", body)))
    arguments = ", ".join(str(rng.randint(0, 9)) for _ in names)
    return f"def f({', '.join(names)}):\n{body}\n    return {rng.choice(names)}", arguments


def random_rows(rng, statements):
    """Yield the rows of random functions, endlessly."""
    while True:
        source, arguments = random_function(rng, statements)
        with contextlib.suppress(Rejected):
            yield unroll({"id": "random", "code": source, "input": arguments})


def split_trace(row):
    """A row's trace -> the text of the statements around the function, of the lines that ran, and of the assert."""
    text, body = row["trace"].split("\n"), ast.parse(row["trace"]).body
    ends = [0, *(statement.end_lineno for statement in body)]
    pieces = ["\n".join(text[start:end]) for start, end in zip(ends, ends[1:])]
    first = len(pieces) - len(row["states"]) - 1
    return pieces[:first], pieces[first:-1], pieces[-1]


class Trace(Task):
    """The trace of a function call (P2 section 2). The assert asks for the output; the state is the variables, as text.

    Functions are random, or their traces come from trace_file, whose code is not run again. In a stage L, there are L
    lines before the assert, that of the arguments included, and in a stage L:M, M to L lines. The split depends only
    on the other lines, not on arguments and output, so one function can have traces in both splits."""
    curriculum = "4:1 8:2 16:4 24:8"
    stage_samples = 4000
    one_answer = True
    settings = ("trace_file",)

    def __init__(self, trace_file="", **others):
        super().__init__(**others)
        self.trace_file = trace_file
        self.rows = [*read_traces(trace_file).values()] if trace_file else []

    def harder_stages(self, last):
        return [last]

    def chance(self, stage):
        return super().chance(stage, programs=100)

    def fits(self, row, stage, split):
        """Whether a row belongs to this stage and split."""
        if not int(stage.kind or stage.length) <= len(row["states"]) <= stage.length:
            return False
        _, lines, last = split_trace(row)
        argument_lines = len(lines) - row["steps"]                        # 0 or 1
        program = "\n".join(lines[argument_lines:]) or last.removesuffix(f" == {row['output']}")
        return is_test(program) == (split == "test")

    @lru_cache(maxsize=100)
    def fitting(self, stage, split):
        """The rows of the file that belong to a stage and a split."""
        return [row for row in self.rows if self.fits(row, stage, split)]

    def draw(self, rng, stage, split):
        if self.trace_file:
            rows = self.fitting(stage, split)
            row = rng.choice(rows) if rows else None
        else:
            tried = islice(random_rows(rng, stage.length), 10_000)
            row = next((row for row in tried if self.fits(row, stage, split)), None)
        if not row:
            lengths = sorted({len(row["states"]) for row in self.rows})
            raise BadInput(f"stage {stage}: no traces of this length are in the {split} split (an eighth of all is for "
                           f"testing): give more traces, or another stage. Lengths in the file: {lengths}")
        kept, lines, last = split_trace(row)
        drawn = [Line(text, f"{text}\n", "") for text in kept]
        for line, state in zip(lines, row["states"]):
            text = state_text(state)
            with_state = len(self.tokenizer.encode(text)) <= 100          # longer states are left out
            drawn.append(Line(line, f"{line}\n", "", text if with_state else None))
        drawn.append(Line(last, f"{last}\n", row["output"]))
        return drawn


TASKS = {"repl": Repl, "inverse": Inverse, "parity": Parity, "listperm": ListPerm, "arith": Arith,
         "group": Group, "trace": Trace}


# ----------------------------------------------------------------------------------------------------------
# Files of calls: other people's code. Three workers record every call, with other hash seeds, folders, time zones,
# homes, arguments, seeds of `random`, and at other times. If all of them record the same, a fourth process runs the
# trace, with its states as asserts, as `python trace.py`. What all four share is not checked: host, user, CPU count,
# and today's date in UTC.
#
# The code runs on Linux only, in forked children with limits, each in an empty folder. What it writes elsewhere stays.
# This helps against accidents, but it is no protection against attacks.

def guard(run, place, seconds):
    """Run `run` in a forked child, with limits, in the empty folder `place`. -> the child's exit code, or -SIGXCPU if
    it took too long, and the last line of its standard error. It may take `seconds` of CPU time, and four times as
    long in all."""
    if not os.path.isdir(place) or os.listdir(place):
        shutil.rmtree(place, ignore_errors=True)
        os.makedirs(place)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = os.fork()
        if not child:
            try:
                limit(place, seconds, errors.fileno())
                run()
            finally:
                os._exit(0)
        ended = None
        with contextlib.suppress(PermissionError):          # the child has done so, and runs a program already
            os.setpgid(child, child)
        try:
            for _ in range(2000 * seconds):                 # naps: a clock would run on while the machine is paused
                ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended:
                    break
                time.sleep(0.002)
        finally:
            with contextlib.suppress(ProcessLookupError):   # the child has left its group
                os.killpg(child, signal.SIGKILL)            # ends what the child has started in its group, too
            os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        last_line = (errors.read().splitlines() or [""])[-1]
    return status if ended else -signal.SIGXCPU, last_line


def limit(place, seconds, errors):
    """In a child: limits on CPU time (s), memory (512 MB more than now) and files (1 MB). Only `errors` stays open."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor, file in enumerate([os.open(os.devnull, os.O_RDWR)] * 2 + [errors]):
        os.dup2(file, descriptor)
    os.closerange(3, 256)
    os.chdir(place)
    with open("/proc/self/statm") as pages:
        memory = int(pages.read().split()[0]) * resource.getpagesize() + 2 ** 29
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 20, 2 ** 20))


def work(number, folder, seconds):
    """Record every call in `folder`/calls, and print what `recorded` returns."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print("\nready", flush=True)
    time.sleep(number / 2)                                  # so that clocks differ
    place = f"{folder}/{'work' * (number + 1)}/run"         # even the length of the path differs
    with open(f"{folder}/calls") as calls:
        for line in calls:
            print(json.dumps(recorded(json.loads(line), number, place, seconds)), flush=True)


def recorded(call, number, place, seconds):
    """-> the row of a call, with its script, or {"reason"}, as a child has left it, which may have left anything."""
    status, text = guard(lambda: leave_row(call, number), place, seconds)
    if status == -signal.SIGXCPU:
        return {"reason": f"more than {seconds} s"}
    with contextlib.suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
        row = json.loads(text)
        kinds = {name: type(value) for name, value in row.items()}
        texts = [text for state in row.get("states", []) for text in state.values()]
        is_whole = kinds == {**ROW, "script": str} and row["id"] == call["id"] and {*map(type, texts)} <= {str}
        if is_whole or kinds == {"reason": str}:
            return row
    return {"reason": "the code ends its process, or spoils its row"}


def leave_row(call, number):
    """In a child: record a call in a module __main__, and write its row to standard error."""
    sys.argv = [os.path.abspath("trace.py"), "argument"] if number % 2 else ["trace.py"]
    main = sys.modules["__main__"]
    main.__file__ = sys.argv[0]
    random.seed(number)
    os.fork = None                                          # no fork bomb by accident
    try:
        row, script = Tracer(call).record(vars(main))
        draw = random.random()                              # if it is not the first, the code has drawn
        row["script"] = script if draw == random.Random(number).random() else f"{script}\n# then random() is {draw}"
    except Rejected as why:
        row = {"reason": str(why)}
    except BaseException as error:
        row = {"reason": f"the code raises {type(error).__name__}"}
    os.lseek(2, 0, os.SEEK_SET)
    os.ftruncate(2, 0)                                      # what the code has written there
    with open(2, "w") as file:
        json.dump(row, file)


@contextlib.contextmanager
def three_workers(folder, seconds):
    """-> the processes that run `work`. They end with the block."""
    here = os.path.dirname(os.path.abspath(__file__))
    common = {"PYTHONSAFEPATH": "", "OPENBLAS_NUM_THREADS": "1"}
    workers = []
    try:
        for number, zone in enumerate(["WEST22:10", "MID5:40", "EAST-23:25"]):        # so the day differs, too
            program = f"__import__('data').work({number}, {folder!r}, {seconds})"
            own = {"PYTHONHASHSEED": str(number), "HOME": f"{folder}/{number}", "TZ": zone}
            workers.append(subprocess.Popen(
                [sys.executable, "-c", program], cwd=here, env=os.environ | common | own, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                errors="replace", pipesize=2 ** 20))        # a large pipe, so that no worker waits for another
        for worker in workers:
            while read_line(worker) != "ready":             # before this, a sitecustomize may print
                pass
        yield workers
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.communicate()


def read_line(process):
    line = process.stdout.readline()
    if not line:
        raise OSError("a process that runs the calls does not start, or has died: run this on Linux, with free memory")
    return line.removesuffix("\n")


ROW = {"id": str, "source": str, "call": str, "output": str, "trace": str, "states": list, "steps": int}


def judge(rows, place, seconds):
    """What the workers have recorded of a call -> its row, or {"reason"}. If they agree, Python runs the script."""
    row = rows[0]
    if any(other != row for other in rows):
        why = [f"in another process: {row['reason']}" for row in rows if "reason" in row]
        return {"reason": [*why, "the output or a state may differ in another process"][0]}
    if "reason" in row:
        return row
    status, error = guard(lambda: run_script(row["script"]), place, seconds)
    if status == 7:
        return {name: row[name] for name in ROW}
    if status == -signal.SIGXCPU:
        return {"reason": f"its trace takes more than {seconds} s"}
    return {"reason": f"its trace raises {error}" if error else "its trace ends its process"}


def run_script(script):
    """In a child: become `python trace.py`. Only a script that has run to its end has the exit code 7."""
    with open("trace.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(f"{script}\n__import__('os')._exit(7)")
    os.execve(sys.executable, [sys.executable, "trace.py"], os.environ | {"PYTHONOPTIMIZE": "", "HOME": os.getcwd()})


def read_rows(path):
    """Yield (id, row) of a file of JSON lines. Raises BadInput, with the line's number, or OSError."""
    empty = True
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                empty = False
                try:
                    row = json.loads(line)
                    name = str(row.get("id", row.get("task_id", f"line {number}")))
                except (AttributeError, ValueError, RecursionError):
                    raise BadInput(f"{path}, line {number} is not a JSON object: write one on each line")
                yield name, row
    if empty:
        raise BadInput(f"{path} is empty: give a file with one JSON object on each line")


def read_traces(path):
    """-> {id: row} of a file of traces. Raises BadInput, or OSError."""
    rows = dict(read_rows(path))
    if not all(ROW.keys() <= row.keys() for row in rows.values()):
        raise BadInput(f"{path} is not a file of traces: make one with python data.py trace --file CALLS --out TRACES "
                       "--allow-exec")
    return rows


def calls_in(name, row):
    """A row of CRUXEval or of MBPP -> its calls, for `unroll`, or {"id", "reason"}."""
    try:
        if "test_list" in row:
            code = "\n".join([*row.get("test_imports", []), row["code"], row.get("test_setup_code") or ""])
            return [{"id": f"{name}/{i}", "code": code, **call_in_test(test, code)}
                    for i, test in enumerate(row["test_list"])] or [{"id": name, "reason": "test_list is empty"}]
        code, given, output = row["code"] + "", row["input"], row.get("output")
        if not isinstance(given, str):
            return [{"id": name, "reason": "input is not a string: give the arguments as Python source"}]
        output = output if output is None or isinstance(output, str) else repr(output)
        return [{"id": name, "code": code, "input": given, "name": row.get("name"), "output": output}]
    except (AttributeError, KeyError, TypeError):
        return [{"id": name, "reason": "the row has neither code and input nor code and test_list"}]


def call_in_test(test, code):
    """MBPP's `assert name(input) == output` -> name, input (the whole call), output, else {"reason"} (appendix A)."""
    with contextlib.suppress(AttributeError, MemoryError, RecursionError, SyntaxError, ValueError):
        [line] = ast.parse(test.strip()).body
        [output], [equal], name = line.test.comparators, line.test.ops, line.test.left.func.id
        if isinstance(equal, ast.Eq) and re.search(rf"def {name}\b", code):
            return {"name": name, "input": ast.unparse(line.test.left), "output": ast.unparse(output)}
    return {"reason": "a test that is not assert name(input) == output"}


def calls_of(path):
    """Yield the calls of a file. Raises BadInput, or OSError."""
    names = set()
    for name, row in read_rows(path):
        for call in calls_in(name, row):
            if call["id"] in names:
                raise BadInput(f"{path}: two calls have the id {call['id']}: give each row its own id")
            names.add(call["id"])
            yield call


def write_traces(path, out, seconds=3):
    """Unroll every call in a file. Traces go to `out`; rejected calls, with the reason, go to OUT.rejected.jsonl.
    After Ctrl-C, both files consist of whole lines. Raises BadInput or OSError."""
    first = {"id": "first", "code": "def f(x):\n    return x", "input": "1"}
    calls = [first, *calls_of(path)]                        # read once: `path` may be a pipe
    rejected, counts = os.path.splitext(out)[0] + ".rejected.jsonl", Counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with open(f"{folder}/calls", "w") as file:
            file.writelines(json.dumps(call) + "\n" for call in calls if "reason" not in call)
        with three_workers(folder, seconds) as workers:
            rows = (call if "reason" in call else judge(
                [json.loads(read_line(x)) for x in workers], f"{folder}/replay/run", seconds) for call in calls)
            if reason := next(rows).get("reason"):
                raise OSError(f"even f(x) = x fails here ({reason}): raise the limits on memory and processes")
            with open(rejected, "x", 1) as bad, open(out, "x", 1) as good:
                try:
                    for call, row in zip(calls[1:], rows):
                        reason = "".join(x if x.isprintable() else " " for x in row.get("reason", ""))
                        file, row = (bad, {**call, "reason": reason}) if reason else (good, row)
                        file.write(json.dumps(row) + "\n")
                        counts[reason.partition(":")[0] or "kept"] += 1
                finally:
                    print(f"{counts['kept']} traces in {out}; rejected calls, with reasons, in {rejected}")
                    for reason, n in counts.most_common():
                        print(f"{n:6d}  {reason}")


# ----------------------------------------------------------------------------------------------------------
# python data.py TASK: samples to check by eye; and the commands about files

def show_samples(args):
    """Print samples of a task: traces with answers in [brackets], and the state beside each line."""
    task_class, (stage, *others) = TASKS[args.task], parse_stages(args.stage)
    if others:
        raise BadInput(f"--stage {args.stage}: give a single stage, such as {stage}")
    given = {name: getattr(args, name) for name in task_class.settings if getattr(args, name, None) is not None}
    task = task_class(**given)
    task.check_stage(stage)
    task.batch(args.seed, "train", stage, 0, 1)           # checks the slots and the answers
    task.states = "transformer"                           # so that each line has its state, as text
    rng, chance = random.Random(args.seed), task.chance(stage)
    for number in range(args.samples):
        print(f"sample {number}, chance {chance:.3g}")
        for line in task.draw(rng, stage, "train"):
            text = line.text.removesuffix("\n")
            if line.answer:
                text = f"{text.removesuffix(line.answer)}[{line.answer}]"
            print(f"{text:40s} # {line.state}" if line.state else text)
    print("notice: [ ] marks the answers, on which a model is tested; it never reads the state, right of #")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                  # so that an error is one line
    add = parser.add_argument
    add("task", choices=TASKS, nargs="?", default="repl", metavar="task", help=f"{', '.join(TASKS)} [repl]")
    add("--stage", default="8x1", help="stage of the samples [8x1]")
    add("--samples", type=int, default=1, help="number of samples [1]")
    add("--seed", type=int, default=0, help="seed of the random generator [0]")
    add("--n-vars", type=int, help="repl, inverse, listperm: number of variables or elements")
    add("--moves", choices=["swap", "perm"], help="repl, inverse: what a command does")
    add("--digits", type=int, help="arith: digits per number")
    add("--group", choices=GROUPS, help="group: name of the group")
    add("--trace-file", help="trace: sample from a file that `trace --out` has written")
    add("--file", help="trace: a file of JSON lines, the calls to unroll")
    add("--out", help="trace: a new file of JSON lines, the traces of --file")
    add("--allow-exec", action="store_true",
        help="execute the code in --file, in child processes with limits; this is not a sandbox")
    args = parser.parse_args(argv)
    try:
        if args.samples < 1:
            raise BadInput(f"--samples {args.samples}: give a number above 0")
        for name in [args.out, f"{os.path.splitext(args.out)[0]}.rejected.jsonl"] if args.out else []:
            if os.path.exists(name):
                raise BadInput(f"{name} already exists: choose another --out")
        if not (args.file or args.out):
            show_samples(args)
        elif args.task == "trace" and args.file and args.out and args.allow_exec:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))       # so that workers and folders end, too
            write_traces(args.file, args.out)
        else:
            raise BadInput("to unroll calls, run python data.py trace --file CALLS --out TRACES --allow-exec")
    except BrokenPipeError:                                 # as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
