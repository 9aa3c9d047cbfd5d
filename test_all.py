"""
The claims, as code. Each test is a sentence that this project says of itself, checked against something else:
a float64 loop, brute force, a real Python interpreter, finite differences, a killed process.

    python -m pytest -q test_all.py              under three minutes on two cores
    python -m pytest -q -m slow test_all.py      twelve minutes more
"""
import contextlib
import copy
import csv
import dataclasses
import functools
import glob
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # tensors are tiny here: a second thread costs more than it brings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():                # without a GPU, kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import data
import kernels
import models
import pfsa
import plot
import train
from data import GROUPS, Group, Repl, Stage, Tokenizer, UserError, parse_stages
from kernels import EXAMPLES, TENSORS, TOLERANCE, decay_scan, delta_rule, errors, example, with_gradients

HERE = Path(__file__).parent
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)  # no file to register `slow` in
slow, CPU = pytest.mark.slow, torch.device("cpu")


@pytest.fixture(autouse=True)
def the_same_random_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    plot.plt.close("all")


@pytest.fixture(autouse=True)
def slow_tests_only_on_demand(request):
    if request.node.get_closest_marker("slow") and not request.config.getoption("markexpr"):
        pytest.skip("slow: run with -m slow")


def command(*args, **kwargs):
    """Run a file of this project as a user would."""
    words = [sys.executable, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, **kwargs)


# ----------------------------------------------------------------------------------------------------------
# data.py: the tokenizer

def test_every_string_survives_the_tokenizer():
    tokenizer, rng = Tokenizer(), np.random.default_rng(0)
    pieces = [*data.LEXEMES, *map(chr, range(256)), "→", "🙂", "\ud83d", "\ude00", "\udc80", ">>"]
    for _ in range(2000):
        text = "".join(rng.choice(pieces, size=rng.integers(0, 30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_swap_costs_9_tokens_and_a_permutation_of_five_21():
    tokenizer = Tokenizer()
    assert len(tokenizer.encode(">>> a, b = b, a\n")) == 9
    assert len(tokenizer.encode(">>> a, b, c, d, e = c, e, b, a, d\n")) == 21
    assert tokenizer.encode("a1") == [ord("a"), ord("1")]


def test_lexemes_are_matched_longest_first():
    assert Tokenizer(("ab", "abc")).encode("abcab") == [257, 256]


def test_bytes_that_are_no_text_still_decode():
    assert Tokenizer().decode([0xFF, ord("a")]) == "\ufffda"


# ----------------------------------------------------------------------------------------------------------
# data.py: repl

KINDS = [(5, "swap", "8x1"), (2, "swap", "7x3"), (9, "swap", "16x4"), (5, "perm", "8x2"),
         (5, "perm", "9x2:3"), (3, "perm", "12x12")]


def texts(task, batch):
    return [task.tokenizer.decode(row) for row in batch.tokens.tolist()]


@pytest.mark.parametrize("n_vars, moves, stage", KINDS)
def test_a_python_interpreter_prints_what_1000_traces_say(n_vars, moves, stage):
    task = Repl(n_vars, moves)
    [stage] = parse_stages(stage, task)
    traces = texts(task, task.batch(stage, 1000, 0, "train", 0))
    lines = "".join(traces).splitlines()
    typed = [line[4:] for line in lines if line.startswith(">>> ")]
    printed = [line for line in lines if not line.startswith(">>> ")]
    shell = command("-i", "-q", input="\n".join(typed) + "\n")
    assert "Error" not in shell.stderr
    assert shell.stdout.splitlines() == printed
    assert len(printed) == 1000 * (stage.commands // stage.spacing)


@pytest.mark.parametrize("n_vars, moves, stage", KINDS)
def test_states_and_answers_are_where_python_puts_them(n_vars, moves, stage):
    task = Repl(n_vars, moves)
    [stage] = parse_stages(stage, task)
    batch = task.batch(stage, 20, 1, "test", 3)
    for b, text in enumerate(texts(task, batch)):
        scope, ends, revealed = {}, batch.line_end[b].nonzero().flatten().tolist(), []
        lines = text.splitlines(keepends=True)
        assert len(ends) == len(lines) and ends[-1] == batch.tokens.shape[1] - 1
        for line, end in zip(lines, ends):
            if line.startswith(">>> ") and "print" not in line:
                exec(line[4:], scope)
            if not line.startswith(">>> "):
                revealed.append(line.split()[1])
            names = [chr(ord("a") + i) for i in range(n_vars)]
            assert batch.state[b, end].tolist() == [scope.get(name, 0) - 1 for name in names]
        assert task.tokenizer.decode(batch.tokens[b][batch.answer[b]].tolist()) == "".join(revealed)
        assert (batch.state[b][~batch.line_end[b]] == -1).all()


def test_batches_are_a_pure_function_of_seed_split_stage_and_number():
    task, stage = Repl(), Stage(8, 1)
    one = task.batch(stage, 4, 7, "train", 5)
    assert torch.equal(one.tokens, task.batch(stage, 4, 7, "train", 5).tokens)
    for other in ((stage, 4, 8, "train", 5), (stage, 4, 7, "test", 5), (stage, 4, 7, "train", 6)):
        assert not torch.equal(one.tokens, task.batch(*other).tokens)


@pytest.mark.parametrize("task, stage", [(Repl(3), Stage(24, 3)), (Group("S3"), Stage(24, 1))])
def test_pieces_of_a_batch_are_whole_lines_of_it(task, stage):
    batch = task.batch(stage, 4, 0, "train", 0)
    pieces = batch.cut(4, task.opening)
    for name in ("tokens", "answer", "line_end", "state"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces], 1), getattr(batch, name))
    assert len(pieces) == 4 and all(piece.line_end[:, -1].all() for piece in pieces)
    first, *others = [piece.line_end[0].sum().item() for piece in pieces]
    assert set(others) == {first - task.opening}
    if task.next_token:                                                   # two reveals each, with what asks
        assert all((piece.answer.sum(1) == 2).all() and not piece.answer[:, 0].any() for piece in pieces)


def test_training_and_held_out_traces_never_meet():
    task, stage = Repl(), Stage(8, 1)
    seen, held_out = (set(texts(task, task.batch(stage, 5000, 0, split, 0))) for split in ("train", "test"))
    assert len(seen) == len(held_out) == 5000 and not seen & held_out


def chi_square(counts, n_classes):
    expected = sum(counts.values()) / n_classes
    return sum((counts[x] - expected) ** 2 for x in counts) / expected + (n_classes - len(counts)) * expected


@pytest.mark.parametrize("moves, moved, n_classes", [("swap", 0, 10), ("perm", 0, 120), ("perm", 2, 11)])
def test_commands_are_uniform(moves, moved, n_classes):
    """chi-square with n_classes - 1 degrees of freedom: mean n - 1, standard deviation sqrt(2 (n - 1))."""
    task = Repl(5, moves)
    _, source = task.commands(np.random.default_rng(0), 3000, Stage(8, 1, str(moved or "")))
    counts = Counter(map(tuple, source.reshape(-1, 5).tolist()))
    identity = counts.pop((0, 1, 2, 3, 4), 0)
    if moved == 2:  # two variables, in either order: half of them stay
        assert identity / 24000 == pytest.approx(0.5, abs=0.02)
        assert all(sum(i != x for i, x in enumerate(p)) == 2 for p in counts)
        n_classes -= 1
    elif moves == "perm":
        counts[0, 1, 2, 3, 4] = identity
    assert len(counts) == n_classes
    assert chi_square(counts, n_classes) < n_classes + 5 * math.sqrt(2 * n_classes)


def test_reveals_are_uniform_over_variables():
    task = Repl()
    text = "".join(texts(task, task.batch(Stage(64, 1), 200, 0, "train", 0)))
    counts = Counter(re.findall(r"print\('(.)'", text))
    assert sum(counts.values()) == 12800 and chi_square(counts, 5) < 5 + 5 * math.sqrt(10)


@pytest.mark.parametrize("text", ["8x", "0x0", "4x8", "8x0", "8x1:3", "", "8x1,16x2", "x1", "-8x1"])
def test_bad_stages_are_refused(text):
    with pytest.raises(UserError):
        parse_stages(text, Repl())


def test_a_permutation_stage_is_within_the_variables():
    assert parse_stages("8x1:3 8x2", Repl(5, "perm")) == [Stage(8, 1, "3"), Stage(8, 2)]
    for text in ("8x1:1", "8x1:6", "8x1:forced"):
        with pytest.raises(UserError):
            parse_stages(text, Repl(5, "perm"))


# ----------------------------------------------------------------------------------------------------------
# data.py: parity, listperm, arith

PROGRAMS = [(data.Parity(), 9), (data.ListPerm(4), 16), (data.ListPerm(9), 3), (data.Arith(1), 4),
            (data.Arith(3), 6), (data.Arith(2), 12)]


def executed(text):
    """Run a program line by line -> what the lines before the assert leave in memory, one dict each."""
    *lines, last = text.splitlines()
    scope, after = {}, []
    for line in lines:
        exec(line, scope)
        after.append({name: copy.deepcopy(x) for name, x in scope.items() if name != "__builtins__"})
    assert last.startswith("assert ")
    exec(last, scope)
    return after


@pytest.mark.parametrize("sample_length", [0, 1])
@pytest.mark.parametrize("task, L", PROGRAMS)
def test_2000_programs_run_and_leave_the_states_that_are_recorded(task, L, sample_length):
    task = type(task)(*(getattr(task, option) for option in task.options[:-1]), sample_length)
    batch, lengths = task.batch(Stage(L, 1), 2000, 0, "train", 0), Counter()
    for b, text in enumerate(texts(task, batch)):
        text, memory = text.rstrip("\0"), executed(text.rstrip("\0"))
        said = [task.tokenizer.decode(row).rstrip("\0") for row in batch.state_text[b].tolist() if any(row)]
        state = batch.state[b][batch.line_end[b]].tolist()
        assert len(said) == len(memory) == len(state)
        for line, slots, scope in zip(said, state, memory):
            if isinstance(task, data.Parity):
                assert line == str(scope["p"]) and slots == [scope["p"]]
            elif isinstance(task, data.ListPerm):
                assert line == f"a = {scope['a']}\n" and slots == [x - 1 for x in scope["a"]]
            else:
                assert line == ", ".join(f"{name} = {scope[name]}" for name in sorted(scope)) + "\n"
        answer = task.tokenizer.decode(batch.tokens[b][batch.answer[b]].tolist())
        assert answer.strip() == re.sub(r"[\[\], ]", "", text.split("== ")[1].strip())
        lengths[len(memory) - (not isinstance(task, data.Parity))] += 1
    expected = range(2, L + 1) if sample_length else [L]
    assert set(lengths) == set(expected)
    assert chi_square(lengths, len(expected)) < len(expected) + 5 * math.sqrt(2 * len(expected))
    held_out = task.batch(Stage(L, 1), 20, 0, "test", 0)
    assert (held_out.line_end.sum(1) == held_out.line_end.sum(1).max()).all()


def test_the_lines_of_an_arithmetic_program_all_matter_and_have_the_digits_asked_for():
    """Backwards from `a`: every line assigns to what a later one needs. P2 appendix C."""
    task = data.Arith(3)
    kinds = Counter()
    for text in texts(task, task.batch(Stage(6, 1), 2000, 0, "train", 0)):
        first, *lines, last = text.rstrip("\0").splitlines()
        needed = {"a"}
        for line in reversed(lines):
            target, left, sign, right = re.fullmatch(r"(\w) = (\w+) ([+-]) (\w+)", line).groups()
            assert target in needed
            needed.remove(target)
            needed |= {x for x in (left, right) if x.isalpha()}
            kinds.update([sign, *("number" if x.isdigit() else "name" for x in (left, right))])
            assert all(x.isalpha() or 100 <= int(x) <= 999 for x in (left, right))
        names, numbers = first.split(" = ")
        assert set(names.split(", ")) == needed and all(100 <= int(x) <= 999 for x in numbers.split(", "))
    assert abs(kinds["+"] / 12000 - 1 / 2) < 0.02
    assert 0.25 < kinds["number"] / 24000 < 1 / 3                         # fewer, as some are drawn again


@pytest.mark.parametrize("task", [data.Parity(), data.ListPerm(4)])
def test_programs_are_drawn_evenly(task):
    batch = task.batch(Stage(8, 1), 5000, 0, "train", 0)
    assert chi_square(Counter(map(tuple, batch.tokens[:, 1:2].tolist())), 2 if task.n_slots == 1 else 4) < 25
    final = batch.state[batch.line_end].view(5000, -1, task.n_slots)[:, -1]
    assert chi_square(Counter(map(tuple, final.tolist())), round(1 / task.chance)) < 24 + 5 * math.sqrt(48)


@pytest.mark.parametrize("task, meaning", [
    (Repl(4), "swap"), (Repl(4, "perm"), "perm"), (data.ListPerm(4), "list"), (data.Parity(), "bit")])
def test_shuffled_states_are_those_of_another_language(task, meaning):
    """The same text; the states, if each command were about the next variables (of parity: 0 flipped)."""
    task, names_are = copy.copy(task), "0123" if meaning in ("list", "bit") else "abcd"
    honest = task.batch(Stage(12, 1), 50, 0, "train", 0)
    task.shuffled = True
    batch = task.batch(Stage(12, 1), 50, 0, "train", 0)
    assert torch.equal(batch.tokens, honest.tokens) and not torch.equal(batch.state, honest.state)
    for b, text in enumerate(texts(task, batch)):
        now, states = {}, batch.state[b][batch.line_end[b]].tolist()
        for line, state in zip(text.splitlines(), states):
            names = re.findall(r"a\[(\d)\]" if meaning == "list" else r"\b([a-d])\b", line)
            following = lambda name: names_are[(names_are.index(name) + 1) % 4]
            if meaning == "bit":
                now["0"] = int(line[-1]) ^ 1 ^ now.get("0", 0)
            elif meaning == "list" and "= [" in line:
                now = {str(i): int(x) - 1 for i, x in enumerate(re.findall(r"\d", line))}
            elif re.fullmatch(r">>> \w = \d", line):
                now[names[0]] = int(line[-1]) - 1
            elif "print" not in line and " = " in line:
                left, right = map(lambda half: [following(x) for x in half], (
                    names[:len(names) // 2], names[len(names) // 2:]))
                now = {**now, **{x: now[y] for x, y in zip(left, right)}}
            assert [now.get(x, -1) for x in names_are][:len(state)] == state


# ----------------------------------------------------------------------------------------------------------
# data.py: traces of functions. Each accepted case is executed below as Python would execute its text.

def traced(code, arguments):
    """-> a trace, executed as it stands, or the reason why there is none."""
    try:
        row = data.unroll({"id": "", "code": code, "input": arguments})
    except data.Rejected as why:
        return str(why).split(":")[0]
    exec(row["trace"], {})
    return row["trace"]


# Arguments, a function's body after |, and after > its trace, or why it has none
CASES = r"""
# P2 Table 1, its three rows, and Table 2's CRUXEval trace, but for spaces and a comma

| for v in range(2):
|     w = v + 1
| return w
> forloop0 = iter((range(2)))
> v = next(forloop0)
> w = v + 1
> v = next(forloop0)
> w = v + 1
> assert (w) == 2

c = False
| if c:
|     b = 1
| else:
|     b = 0
| return b
> c = False
> b = 0
> assert (b) == 0

c = True
| while c:
|     c = False
| return c
> c = True
> c = False
> assert (c) == False

text = '123'
| text_arr = []
| for j in range(len(text)):
|     text_arr.append(text[j:])
| return text_arr
> text = '123'
> text_arr = []
> forloop0 = iter((range(len(text))))
> j = next(forloop0)
> text_arr.append(text[j:])
> j = next(forloop0)
> text_arr.append(text[j:])
> j = next(forloop0)
> text_arr.append(text[j:])
> assert (text_arr) == ['123', '23', '3']

# loops

n, t = 3, []
| for i in range(n):
|     for j in range(i):
|         t.append(j)
| return t
> n, t = 3, []
> forloop0 = iter((range(n)))
> i = next(forloop0)
> forloop1 = iter((range(i)))
> i = next(forloop0)
> forloop1 = iter((range(i)))
> j = next(forloop1)
> t.append(j)
> i = next(forloop0)
> forloop1 = iter((range(i)))
> j = next(forloop1)
> t.append(j)
> j = next(forloop1)
> t.append(j)
> assert (t) == [0, 0, 1]

| for x in 1, 0, 4:
|     if x == 0: continue
|     if x > 3: break
|     t = x
| else:
|     t = 9
| return t
> forloop0 = iter((1, 0, 4))
> x = next(forloop0)
> t = x
> x = next(forloop0)
> x = next(forloop0)
> assert (t) == 1

xs = [1]
| for x in xs:
|     pass
| else:
|     x = 'end'
| while x:
|     x = x[1:]
| else:
|     x += '!'
| return x
> xs = [1]
> forloop0 = iter((xs))
> x = next(forloop0)
> x = 'end'
> x = x[1:]
> x = x[1:]
> x = x[1:]
> x += '!'
> assert (x) == '!'

xs = [2]
| for x in xs:
|     if x < 5: xs.append(x + 3)
| return xs
> xs = [2]
> forloop0 = iter((xs))
> x = next(forloop0)
> xs.append(x + 3)
> x = next(forloop0)
> assert (xs) == [2, 5]

ps = [(1, 2, 3)]
| for i, (a, *b) in enumerate(ps):
|     c, *d = a, b, i
| return d
> ps = [(1, 2, 3)]
> forloop0 = iter((enumerate(ps)))
> i, (a, *b) = next(forloop0)
> c, *d = a, b, i
> assert (d) == [[2, 3], 0]

# conditions that change something are lines, others are not

xs = [1, 2]
| it = iter(xs)
| if next(it) > 0:
|     return next(it)
> xs = [1, 2]
> it = iter(xs)
> next(it) > 0
> assert (next(it)) == 2

xs, n = [0, 5], 0
| while xs.pop():
|     n += 1
| return n
> xs, n = [0, 5], 0
> xs.pop()
> n += 1
> xs.pop()
> assert (n) == 1

s = 'abc'
| while (n := len(s)) > 2:
|     s = s[1:]
| if m := n: pass
| return m
> s = 'abc'
> (n := len(s)) > 2
> s = s[1:]
> (n := len(s)) > 2
> (m := n)
> assert (m) == 2

xs = [1, 2, 3]
| g = (x + 1 for x in xs)
| while next(g) < 3:
|     pass
| return list(g)
> xs = [1, 2, 3]
> g = (x + 1 for x in xs)
> next(g) < 3
> next(g) < 3
> assert (list(g)) == [4]

xs = []
| for i in range(3):
|     if i and len('ab') > i or i in (7, 8): xs = xs + [i]
| return xs
> xs = []
> forloop0 = iter((range(3)))
> i = next(forloop0)
> i = next(forloop0)
> xs = xs + [i]
> i = next(forloop0)
> assert (xs) == [1]

# statements stay as they were written

xs = [2]
| ys = [
|     y   # each
|     for y in xs
| ]
| if (ys and
|         xs):
|     return (ys,
|             1)
> xs = [2]
> ys = [
>     y   # each
>     for y in xs
> ]
> assert ((ys,
>                 1)) == ([2], 1)

x = 1
| a = x; b = 2; a, b = b, a
| if a: c = 1; d = 2
| return a; x = 3
> x = 1
> a = x
> b = 2
> a, b = b, a
> c = 1
> d = 2
> assert (a) == 2

s = '\x00\u1234'
| t = 'a\n\t\'"\\' + s
| u = '''x
|   y'''
| return t + u
> s = '\x00\u1234'
> t = 'a\n\t\'"\\' + s
> u = '''x
>       y'''
> assert (t + u) == 'a\n\t\'"\\\x00ሴx\n      y'

| '''A docstring.'''
| y: 'Dict' = {}
| z: Unknown
| return y
> y = {}
> assert (y) == {}

x = [2]
| return *x, 1
> x = [2]
> assert (*x, 1) == (2, 1)

# exceptions

x = 'a'
| try:
|     y = int(x)
| except (TypeError, ValueError) as e:
|     y = str(e)[:7]
| else:
|     y += 1
| finally:
|     z = 0
| return y
> x = 'a'
> e = ValueError("invalid literal for int() with base 10: 'a'")
> y = str(e)[:7]
> z = 0
> assert (y) == 'invalid'

x = '4'
| try:
|     y = int(x)
| except ValueError:
|     y = 0
| else:
|     y += 1
| finally:
|     z = 0
| return y
> x = '4'
> y = int(x)
> y += 1
> z = 0
> assert (y) == 5

x = []
| for i in range(3):
|     try:
|         if i == 1: return i
|     finally:
|         x.append(i)
> x = []
> forloop0 = iter((range(3)))
> i = next(forloop0)
> x.append(i)
> i = next(forloop0)
> x.append(i)
> assert (i) == 1

| try:
|     return 1
| finally:
|     return 2
> assert (2) == 2

x = [1]
| try:
|     try:
|         x[5]
|     except IndexError:
|         raise
| except LookupError:
|     x = 3
| return x
> x = [1]
> x = 3
> assert (x) == 3

x = []
| def g():
|     x.append(1)
|     raise ValueError
| try:
|     g()
| except ValueError:
|     return x
> a caught exception after half a job

# names and functions

n = 4
| k = 2
| def g(x):
|     return x * k
| k = 3
| return g(n)
> n = 4
> k = 2
> def g(x):
>     return x * k
> k = 3
> assert (g(n)) == 12

| c = 0
| def g():
|     nonlocal c
|     c += 1
| g()
| return c
> c = 0
> def g():
>     global c
>     c += 1
> g()
> assert (c) == 1

list = [1, 2]
| len = 0
| for next in list:
|     len += next
| iter = len
| return iter
> list = [1, 2]
> len = 0
> forloop0 = (list).__iter__()
> next = forloop0.__next__()
> len += next
> next = forloop0.__next__()
> len += next
> iter = len
> assert (iter) == 3

| for forloop0 in 'a':
|     pass
| return forloop0
> forloop_0 = iter(('a'))
> forloop0 = next(forloop_0)
> assert (forloop0) == 'a'

n = 3
| def g():
|     yield n
| return list(g())
> n = 3
> def g():
>     yield n
> assert (list(g())) == [3]

x = []
| x.append(1)
> x = []
> x.append(1)
> assert (None) == None

| return set('ba'), {'b': {2, 1}}, (1,), set()
> assert (set('ba'), {'b': {2, 1}}, (1,), set()) == ({'a', 'b'}, {'b': {1, 2}}, (1,), set())

# what has no trace

n = 3
| return 1 if n < 1 else n * f(n - 1)
> recursion

| yield 1
> a generator

| return locals()
> locals, exec, eval or their like

| exec('x = 1')
| return x
> locals, exec, eval or their like

| return eval('1')
> locals, exec, eval or their like

| return range(3)
> an output that has no literal

| return float('nan')
> an output that has no literal

| class A: pass
| return A()
> an output that has no literal

| x = []
| x.append(x)
| return x
> an output that has no literal

x = []
| return x[9]
> it raises IndexError

a = 0
| if a:
|     x = 1
| return x
> it raises NameError

| with open('x') as g: pass
| return 1
> a with statement

x = 1
| match x:
|     case 1: return 2
> a match statement

x = 0
| for i in range(99): x += i
| return x
> more than 50 steps

| while True: pass
> more than 1000 conditions and rounds of loops

x = 'y'
| for i in range(9): x = x * 4
| return 1
> more than 12000 characters of state

| try:
|     raise KeyError(len)
| except KeyError as e:
|     return str(e)[:0]
> a caught exception that has no literal
"""


def cases():
    """-> body, arguments and trace of each of the above."""
    for case in re.sub(r"^#.*\n\n", "", CASES.strip(), flags=re.M).split("\n\n"):
        lines = case.split("\n")
        starting = lambda mark: "\n".join(line[2:] for line in lines if line.startswith(mark))
        yield starting("| "), "".join(line for line in lines if line[:2] not in ("| ", "> ")), starting("> ")
    yield "x = '" + 999 * "y" + "'", "", "more than 1000 characters of code"


@pytest.mark.parametrize("body, arguments, lines", [*cases()])
def test_every_construct_is_unrolled_or_refused_as_said(body, arguments, lines):
    """A function's body, its parameters and their values in an assignment, and its trace."""
    names, _, values = arguments.partition(" = ")
    assert traced(f"def f({names}):\n" + textwrap.indent(body, "    "), values) == lines


@pytest.mark.parametrize("code, arguments, lines", [
    ("import math\nK = 3\ndef g(x):\n    return x * K\n"
     "def f(x):\n    return g(x) + math.floor(2.5)\nprint(f(1))", "2",
     "import math\nK = 3\ndef g(x):\n    return x * K\nx = 2\nassert (g(x) + math.floor(2.5)) == 8"),
    ("def f(a, b=2, *c, d=4, **e):\n    return e", "1, z=6",
     "a, b, c, d, e = 1, 2, (), 4, {'z': 6}\nassert (e) == {'z': 6}"),
    ("def f(a, b):\n    return a - b", "*[2], b=1", "a, b = 2, 1\nassert (a - b) == 1"),
    ("def f(a):\n    return a", "(1, 2),", "a = (1, 2)\nassert (a) == (1, 2)"),
    ("def f(x):\r\n\tif x:\r\n\t\ty = '\t'\r\n\treturn y\r\n", "1", "x = 1\ny = '\t'\nassert (y) == '\\t'"),
    ("  def f(x):\n     return x", "1", "x = 1\nassert (x) == 1"),
    ("async def f():\n    return 1", "", "async"),
    ("import functools\n@functools.cache\ndef f():\n    return 1", "", "a decorator"),
    ("def g(x):\n    return f(x - 1)\ndef f(x):\n    return g(x) if x else 0", "1", "recursion"),
    ("def f(x) return", "1", "no Python"),
    ("x = 1", "1", "no function"),
    ("def f(x):\n    return x", "1)", "it raises SyntaxError"),
    ("K = 1\ndef g():\n    return K\ndef f():\n    K = 2\n    return g()", "",
     "it ends otherwise than the function"),
])
def test_what_stands_around_a_function_is_kept_and_its_arguments_are_bound(code, arguments, lines):
    assert traced(code, arguments) == lines


def functions_at_random(n):
    """-> n rows of traces, each with the function and its arguments as they were made."""
    return [(row, row["source"].rstrip("\n"), row["call"][2:-1])
            for row in itertools.islice(data.random_rows(random.Random(0)), n)]


@pytest.mark.parametrize("n", [1000, pytest.param(5000, marks=slow)])
def test_random_functions_are_unrolled_into_what_python_does(n):
    """The same lines in the same order as sys.settrace sees in the function; the same values after each; the
    same result."""
    lengths, kinds = Counter(), Counter()
    for row, code, arguments in functions_at_random(n):
        scope, seen, source = {}, [], code.split("\n")
        exec(compile(code, "<function>", "exec"), scope)

        def tracer(frame, event, _):
            if event == "line":
                seen.append(source[frame.f_lineno - 1].strip())
            return tracer if frame.f_code.co_name == "f" else None
        before = sys.gettrace()
        sys.settrace(tracer)
        result = eval(f"f({arguments})", scope)
        sys.settrace(before)

        *lines, last = row["trace"].split("\n")
        control = re.compile(r"(if|else|for|while|return|break|continue)\b")
        loops = re.compile(r"forloop\d+ = iter|\w+ = next\(forloop")
        ran = [line for line in lines[bool(arguments):] if not loops.match(line)]
        assert ran == [line for line in seen if not control.match(line)]
        memory = {}
        for line, state in zip(lines, row["states"], strict=True):
            exec(line, memory)
            values = {name: x for name, x in memory.items() if type(x) in (int, str, list)}
            assert values == {name: eval(x) for name, x in state.items()}
        assert last.endswith(f"== {result!r}") and row["output"] == repr(result)
        exec(last, memory)
        lengths[min(len(lines) // 10, 3)] += 1
        kinds.update(word for word in ("if", "else", "for", "while", "break", "continue") if word in code)
    assert min(lengths[i] for i in range(4)) > n / 30 < min(kinds.values())


def test_a_set_has_one_spelling_and_its_order_is_no_state():
    assert data.literal({"b", "a", ("c", 1)}) == data.literal({("c", 1), "a", "b"}) == "{'a', 'b', ('c', 1)}"
    calls = [{"id": 0, "code": f"def f(xs):\n    {line}\n    return x", "input": "{'a', 'b', 'c', 'dd'}"}
             for line in ("x = xs | {'e'}", "x = ''.join(xs)")]
    with data.Child(0) as one, data.Child(1) as other:
        [row, ordered], [same, otherwise] = ([child.ask("unroll", call) for call in calls]
                                             for child in (one, other))
        assert row == same and ordered != otherwise
        assert other.ask("replay", row) == {}
        assert other.ask("replay", ordered) == {"reason": "a replay has other states"}
    forged = {**row, "trace": row["trace"].replace("'e'}", "'f'}", 1)}
    with pytest.raises(data.Rejected, match="other states"):
        data.replay(forged)
    with pytest.raises(data.Rejected, match="another output"):
        data.replay({**row, "trace": row["trace"].replace(row["output"], "{1}")})


def said(capsys, *words):
    """-> exit code, stdout and stderr of data.py, in this process."""
    try:
        code = data.main([*map(str, words)])
    except UserError as error:
        code = 2
        print(error, file=sys.stderr)
    return code, *capsys.readouterr()


HOSTILE = {
    "def f():\n    while True:\n        x = 1": "more than 50 steps",
    "def f():\n    return any(iter(int, 1))": "more than 3 s",
    "def f():\n    return 10**10**10": "more than 3 s",
    "import os\ndef f():\n    while True:\n        os.fork()": "it raises PermissionError",
    "import subprocess\ndef f():\n    return subprocess.run('true')": "it raises PermissionError",
    "import sys\ndef f():\n    sys.exit()": "it raises SystemExit",
    "import os\ndef f():\n    os._exit(0)": "it ends its process",
    "import os\ndef f():\n    os.kill(os.getppid(), 9)": "it raises PermissionError",
    "def f():\n    return len('x' * 2**30)": "it raises MemoryError",
    "def f():\n    print('{\"trace\": 1}' * 99999)\n    return 1": "",
    "def f():\n    return input()": "it raises EOFError",
    "def f():\n    open('file', 'w').write('y' * 2**24)": "it raises OSError",
    "def f():\n    open('file', 'w').write('y')\n    return 1": "",
    "def f():\n    return open('file').read()": "it raises FileNotFoundError",
}


def test_hostile_rows_cost_themselves_and_nothing_else(tmp_path):
    """Through the command line, an honest row between any two of them; all folders and processes are gone."""
    honest = {"code": "def f(x):\n    return x + 1", "input": "1", "output": "2"}
    rows = [row for code in HOSTILE for row in ({"code": code, "input": ""}, honest)]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tmp").mkdir()
    ran = command(HERE / "data.py", "trace", "--file", "calls.jsonl", "--out", "out.jsonl", "--allow-exec",
                  cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    kept = [json.loads(line)["id"] for line in open(tmp_path / "out.jsonl")]
    why = {row["line"]: row["reason"] for row in map(json.loads, open(tmp_path / "out.rejected.jsonl"))}
    expected = {2 * i + 1: reason for i, reason in enumerate(HOSTILE.values())}
    assert why == {line: reason for line, reason in expected.items() if reason}
    assert kept == [f"line {n + 1}" for n in range(len(rows)) if not expected.get(n + 1)]
    assert ran.returncode == 0 and ran.stdout.startswith(f"{len(kept)} traces in out.jsonl")
    assert {x.name for x in tmp_path.iterdir()} == {"calls.jsonl", "out.jsonl", "out.rejected.jsonl", "tmp"}
    assert not [*(tmp_path / "tmp").iterdir()]


def test_rows_of_three_kinds_are_recognised_and_bad_ones_named_by_their_line(tmp_path, monkeypatch, capsys):
    mbpp = {"task_id": 7, "code": "def add(a, b):\r\n    return a + b", "test_setup_code": "", "test_list": [
        f"assert add({test}" for test in ("1, 2) == 3", "'a', 'b') == 'ab'", "1, 2) > 0", "1, 2) == 4")]}
    rows = [{"id": "s", "code": "def f(x):\n    return x", "input": "5", "output": "5"}, "{oops", "", mbpp,
            {"code": "def f(): pass"}, [1], {"code": "def f(x) return", "input": ""},
            {"code": "def f():\n    return 1", "input": ""}]
    (tmp_path / "calls.jsonl").write_bytes("\r\n".join(
        row if isinstance(row, str) else json.dumps(row) for row in rows).encode())
    monkeypatch.chdir(tmp_path)
    words = ["trace", "--file", "calls.jsonl", "--out", "out.jsonl"]
    code, _, err = said(capsys, *words)
    assert code == 2 and "give --allow-exec" in err and len([*tmp_path.iterdir()]) == 1
    words.append("--allow-exec")
    _, _, err = said(capsys, *words)
    found = [json.loads(line) for line in open(tmp_path / "out.jsonl")]
    assert [row["id"] for row in found] == ["s", "7/0", "7/1", "line 8"]
    assert found[1] == {"id": "7/0", "source": "def add(a, b):\n    return a + b\n", "call": "add(1, 2)",
                        "output": "3", "trace": "a, b = 1, 2\nassert (a + b) == 3",
                        "states": [{"a": "1", "b": "2"}], "steps": 0}
    assert found[3]["states"] == [] and found[3]["trace"] == "assert (1) == 1"
    rejected = [json.loads(line) for line in open(tmp_path / "out.rejected.jsonl")]
    why = [(row["line"], row["reason"].split(":")[0]) for row in rejected]
    keys = "no keys code and input, or code and test_list"
    assert why == [(2, "no JSON"), (4, "a test that is not assert name(input) == output"),
                   (4, "its output is not what the row says"), (5, keys), (6, keys), (7, "no Python")]
    assert [n for n in range(1, 9) if f"calls.jsonl, line {n}: no" in err] == [2, 5, 6, 7]
    code, _, err = said(capsys, *words)
    assert code == 2 and "out.jsonl exists" in err and err.count("\n") == 1
    assert said(capsys, *words, "--overwrite")[0] == 0


def test_ctrl_c_leaves_whole_files(tmp_path):
    row = json.dumps({"code": "def f(x):\n    return x * 2", "input": "'abc'"})
    (tmp_path / "calls.jsonl").write_text("\n".join([row] * 5000))
    words = ["trace", "--file", "calls.jsonl", "--out", "out.jsonl", "--allow-exec"]
    process = subprocess.Popen([sys.executable, HERE / "data.py", *words], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (tmp_path / "out.jsonl").exists() or (tmp_path / "out.jsonl").stat().st_size < 1000:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    found = [json.loads(line)["id"] for line in open(tmp_path / "out.jsonl")]
    assert process.returncode == 130 and out.startswith(f"{len(found)} traces") and 0 < len(found) < 5000
    assert found == [f"line {n + 1}" for n in range(len(found))]


@pytest.mark.skipif("CRUXEVAL" not in os.environ, reason="give the path of cruxeval.jsonl in CRUXEVAL")
def test_at_least_772_of_cruxevals_800_functions_are_traced_alike_whatever_the_hash_seed(tmp_path):
    outs = []
    for seed in "1", "2":
        command(HERE / "data.py", "trace", "--file", os.environ["CRUXEVAL"], "--out", f"{seed}.jsonl",
                "--allow-exec", cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": seed})
        outs.append([(tmp_path / f"{seed}{end}.jsonl").read_text() for end in ("", ".rejected")])
    assert outs[0] == outs[1]
    rows = [json.loads(line) for line in outs[0][0].splitlines()]
    assert len(rows) >= 772 and max(row["steps"] for row in rows) <= 50
    for row in rows:                                                      # these are known to be harmless
        exec(row["trace"], {})


# ----------------------------------------------------------------------------------------------------------
# data.py: prompts, and what is said to them

def test_questions_are_the_programs_with_a_hole_where_the_answer_was():
    for row, code, arguments in functions_at_random(100):
        for kind in data.KINDS:
            before, answer, after = data.question(row, kind)
            program = f"{code}\nassert f({arguments}) == {row['output']}"
            assert before + answer + after == (row["trace"] if kind.endswith("trace") else program)
            assert answer == (row["output"] if kind.startswith("output") else arguments)


def test_a_prompt_has_two_answered_examples_and_a_question():
    row = data.unroll({"id": "s", "code": "def g(xs):\n    xs.pop()\n    return xs", "input": "[1, 2]"})
    for kind, shown, said in (
            ("output/program", "xs.pop()\n    return xs\nassert g([1, 2]) == ??", "assert f(2, 1) == 8"),
            ("output/trace", "xs = [1, 2]\nxs.pop()\nassert (xs) == ??", "8"),
            ("input/program", "    return xs\nassert g(??) == [1]", "assert f(2, 1) == 8"),
            ("input/trace", "xs = ??\nxs.pop()\nassert (xs) == [1]", "2, 1")):
        text = data.examples(kind) + data.block(row, kind)[0]
        assert text.count("[PYTHON]\n") == text.count("\n[/PYTHON]\n[ANSWER]\n") == 3 == text.count("??")
        assert text.endswith(shown + "\n[/PYTHON]\n[ANSWER]\n") and f"[ANSWER]\n{said}\n[/ANSWER]\n" in text


@pytest.mark.parametrize("kind, right, wrong", [
    ("output/program", ["[1]", "assert g([1, 2]) == [1]\n[/ANSWER]\n[PYTHON]", "[ 1, ]", "[1] # yes"],
     ["[2]", "g([1, 2])", "[2] or True", "", "[1", "xs", "[1]) or (True", "[1], 'no'", "[x for x in (1,)]"]),
    ("output/trace", ["[1]", " [0 + 1]\n"], ["xs", "[2]", "assert (xs) == [1]", "[1] or xs"]),
    ("input/program", ["[1, 2]", "[1, 'any']", "assert g([1, 3]) == [1]", "xs=[1, 5]"],
     ["[2, 1]", "[1]) == [1] or (1", "1, 2", "[1]) == 0 #", "g([1, 2, 3])"]),
    ("input/trace", ["[1, 2]", "[1, None]"], ["[2, 1]", "[1, 2]; xs = [1]", "[1, 2]\nimport os", "[]"]),
])
def test_answers_are_judged_by_execution(kind, right, wrong):
    row = data.unroll({"id": "s", "code": "def g(xs):\n    xs.pop()\n    return xs", "input": "[1, 2]"})
    with data.Child(0) as child:
        assert [data.judge(child, row, kind, said) for said in right] == [True] * len(right)
        assert [data.judge(child, row, kind, said) for said in wrong] == [False] * len(wrong)


def test_prompts_are_written_and_completions_scored_by_length(tmp_path, monkeypatch, capsys):
    rows = [row for row, *_ in functions_at_random(30)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "prompts", "--file", "t.jsonl", "--out", "p.jsonl")[0] == 0
    prompts = [json.loads(line) for line in open(tmp_path / "p.jsonl")]
    expected = sum(4 if row["call"][-2:] != "()" else 2 for row in rows)
    assert len({p["id"] for p in prompts}) == len(prompts) == expected
    by_id = {str(row["id"]): row for row in rows}
    answers = []
    for p in prompts:
        name, kind = p["id"].split("/", 1)
        answer = data.question(by_id[name], kind)[1]
        answers.append({"id": p["id"], "completion": answer if by_id[name]["steps"] <= 5 else "("})
    (tmp_path / "said.jsonl").write_text("\n".join(map(json.dumps, answers)))
    words = ["score", "--file", "t.jsonl", "--completions", "said.jsonl", "--allow-exec"]
    table = said(capsys, *words)[1].splitlines()
    assert len(table) == 5
    for line in table[1:]:
        assert set(re.findall(r" (\d+\.\d)", line)[:-1]) <= {"100.0", "0.0"}
        short = sum(row["steps"] <= 5 for row in rows if line.startswith("out") or row["call"][-2:] != "()")
        total = sum(line.startswith("out") or row["call"][-2:] != "()" for row in rows)
        assert line.endswith(f"{100 * short / total:.1f}")
    (tmp_path / "said.jsonl").write_text('{"id": "nobody/output/trace", "completion": "1"}')
    assert "said.jsonl, line 1: give the id of a prompt" in said(capsys, *words)[2]


def test_a_traces_tokens_answers_and_states_are_those_of_its_row(tmp_path):
    """Decoded, a batch is its rows' text; what it holds up to a line's end leaves the state told there."""
    rows = [row for row, *_ in functions_at_random(60)]
    code = "import math\ndef f(x):\n    y = [\n        x,\n    ]\n    return 'à', y"
    rows[0] = data.unroll({"id": 0, "code": code, "input": "7"})
    rows[1] = data.unroll({"id": 1, "code": "def f(x):\n    return len(x)", "input": repr("y" * 200)})
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = data.Trace(str(tmp_path / "t.jsonl"))
    batch, by_text = task.batch(Stage(51, 51, "all"), 60, 0, "test", 0), {row["trace"]: row for row in rows}
    assert len(batch.tokens) == sum(len(row["states"]) > 0 for row in rows)
    assert not len(task.batch(Stage(51, 51, "all"), 60, 0, "test", 1).tokens)
    for b, text in enumerate(texts(task, batch)):
        row = by_text[text.rstrip("\0\n")]
        answer = task.tokenizer.decode(batch.tokens[b][batch.answer[b]].tolist())
        assert answer == row["output"] + "\n" and row["trace"].endswith("== " + answer[:-1])
        ends, tokens = batch.line_end[b].nonzero()[:, 0].tolist(), batch.tokens[b].tolist()
        said = [task.tokenizer.decode(x).rstrip("\0") for x in batch.state_text[b].tolist() if any(x)]
        told = [", ".join(f"{name} = {x}" for name, x in state.items()) + "\n" for state in row["states"]]
        short = [len(task.tokenizer.encode(x)) <= task.longest_state for x in told]
        assert said == [x for x, so in zip(told, short) if so] and len(ends) == len(said)
        memory, done = {}, 0
        for end, state in zip(ends, said):
            exec(task.tokenizer.decode(tokens[done:end + 1]), memory)
            done, there = end + 1, eval(f"dict({state})")
            assert there == {name: memory[name] for name in there}
    assert sum(len(row["states"]) for row in rows) > batch.line_end.sum() > 300


def test_functions_for_training_are_not_tested_on_and_batches_are_reproducible(tmp_path):
    rows = [row for row, *_ in functions_at_random(300)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task, everywhere = data.Trace(str(tmp_path / "t.jsonl")), Stage(51, 51)
    held_out = set(texts(task, task.batch(everywhere, 300, 0, "test", 0)))
    batches = [task.batch(everywhere, 50, 0, "train", t) for t in range(20)]
    trained = {text.rstrip("\0") for batch in batches for text in texts(task, batch)}
    assert 15 < len(held_out) < 60 and len(trained) > 200 and not {x.rstrip("\0") for x in held_out} & trained
    for task, stage in (task, everywhere), (data.Trace(), Stage(16, 8)):
        one, same, other = (task.batch(stage, 8, 0, "train", t) for t in (3, 3, 4))
        assert torch.equal(one.tokens, same.tokens) and torch.equal(one.state_text, same.state_text)
        assert one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens)
    lines = [text.rstrip("\0").count("\n") - 1 for text in texts(task, one)]
    assert 9 <= min(lines) and max(lines) <= 16


def test_functions_are_written_once_to_train_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, seed in ("a", 0), ("b", 0), ("c", 1):
        assert said(capsys, "trace", "--functions", 40, "--seed", seed, "--out", name)[0] == 0
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c and len(data.read_traces("a")) == 40
    assert "give --out too" in said(capsys, "trace", "--functions", 40)[2]
    cfg = train.Config(task="trace", trace_file="a", curriculum="51x51")
    task, [stage] = train.build_task(cfg)
    assert task.rows is train.build_task(cfg)[0].rows and len(task.batch(stage, 4, 0, "train", 0).tokens) == 4


@pytest.mark.parametrize("stage, why", [("8x8:all", "with a --trace-file"), ("60x60", "up to 51 lines"),
                                         ("8x8:other", "write LxS")])
def test_a_trace_stage_that_is_none_is_refused(stage, why):
    with pytest.raises(UserError, match=why):
        parse_stages(stage, data.Trace())


# ----------------------------------------------------------------------------------------------------------
# data.py: group

ORDERS = {"Z2": 2, "Z60": 60, "S3": 6, "S4": 24, "A4xZ5": 60, "A5": 60, "S5": 120, "S5swaps": 120}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_have_their_order_and_labels_are_products(name):
    task = Group(name)
    assert len(task.elements) == ORDERS[name]
    batch = task.batch(Stage(20, 1), 30, 0, "train", 0)
    for word, labels in zip(batch.tokens.tolist(), batch.state[:, :, 0].tolist()):
        points = list(range(len(task.elements[0])))                       # where each point has been moved to
        for token, label in zip(word, labels):
            points = [task.elements[token][x] for x in points]
            assert task.elements[label] == tuple(points)
    assert len(set(task.mul[0].tolist())) == ORDERS[name]                 # no row of the table repeats itself


def test_groups_are_abelian_exactly_where_their_names_say():
    abelian = {name for name in GROUPS if (Group(name).mul == Group(name).mul.T).all()}
    assert abelian == {"Z2", "Z60"}


def test_words_of_s5swaps_hold_transpositions_only():
    task = Group("S5swaps")
    used = set(task.batch(Stage(50, 1), 100, 0, "train", 0).tokens.flatten().tolist())
    assert len(used) == 10
    assert all(sum(i != x for i, x in enumerate(task.elements[e])) == 2 for e in used)


# ----------------------------------------------------------------------------------------------------------
# kernels.py

LONG = 1e-4  # fp32 after 1000 steps: at eigenvalue -1 nothing is forgotten, rounding errors included
GATES = {"no gate": lambda beta: None, "g = 1": torch.zeros_like,
         "g in (0.4, 1)": lambda beta: -0.43 * beta - 0.02, "g -> 0": lambda beta: 0 * beta - 40}


def dense(q, k, v, beta, g, S):
    """The recurrence for one head with K x K matrices, in numpy's float64."""
    o = []
    for t in range(len(q)):
        norm2 = float(k[t] @ k[t])
        b = beta[t] / norm2 if norm2 else 0.0
        S = (np.eye(len(k[t])) - b * np.outer(k[t], k[t])) @ (math.exp(g[t]) * S) + b * np.outer(k[t], v[t])
        o.append(S.T @ q[t])
    return np.array(o), S


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_loop_is_the_equation(kind):
    q, k, v, beta = example(kind, B=1, T=30, H=1, K=6, V=4)
    k = torch.cat([k[:, :20], torch.zeros_like(k[:, 20:])], 1)            # zero keys write nothing
    g, S = -torch.rand_like(beta), torch.randn(1, 1, 6, 4, dtype=torch.float64)
    o, last = delta_rule(q, k, v, beta, g, S, backend="loop")
    flat = [x[0, :, 0].numpy() for x in (q, k, v, beta, g)]
    want, want_last = dense(*flat, S[0, 0].numpy())
    assert np.allclose(o[0, :, 0], want, atol=1e-13) and np.allclose(last[0, 0], want_last, atol=1e-13)


def compare(kind, gate, T, C=32, K=12, V=7, with_state=True, dtype=torch.float32, backend="torch"):
    """A backend in `dtype` against the float64 loop on the same rounded inputs: output, state, gradients."""
    q, k, v, beta = example(kind, B=1, T=T, H=2, K=K, V=V)
    rng = torch.Generator().manual_seed(2)
    S = torch.randn(1, 2, K, V, generator=rng, dtype=torch.float64) if with_state else None
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    inputs = [x if x is None else x.to(device, dtype) for x in (q, k, v, beta, GATES[gate](beta), S)]
    truth = with_gradients([x if x is None else x.double() for x in inputs], "loop")
    found = errors(with_gradients(inputs, backend, chunk=C), truth)
    names = [n for n, x in zip(TENSORS, [1, 1, *inputs]) if x is not None]
    return dict(zip(names, found))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_chunks_equal_the_loop_forward_and_backward(kind, gate):
    for T, with_state in itertools.product((1, 2, 31, 32, 33, 100), (True, False)):
        found = compare(kind, gate, T, with_state=with_state)
        assert max(found.values()) < TOLERANCE[torch.float32], (T, found)


@pytest.mark.parametrize("kind, gate", [("identical", "no gate"), ("transpositions", "g = 1"),
                                        ("random", "no gate"), ("unnormalised", "g in (0.4, 1)")])
def test_chunks_equal_the_loop_after_1000_steps(kind, gate):
    found = compare(kind, gate, 1000)
    assert max(found.values()) < LONG, found


@slow
@pytest.mark.parametrize("C", [1, 16, 20, 64])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_chunks_equal_the_loop_at_any_chunk_length(kind, gate, C):
    for T, K, V in ((1000, 16, 16), (257, 32, 64), (100, 5, 3)):
        found = compare(kind, gate, T, C, K, V)
        assert max(found.values()) < (LONG if T == 1000 else TOLERANCE[torch.float32]), (T, found)


def test_in_float64_chunks_are_exact():
    for kind, gate in itertools.product(EXAMPLES, GATES):
        found = compare(kind, gate, 70, 16, dtype=torch.float64)
        assert max(found.values()) < TOLERANCE[torch.float64], (kind, gate, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_keep_an_fp32_state(dtype):
    q, k, v, beta = example("transpositions", T=200, dtype=dtype)
    o, S = delta_rule(q, k, v, beta)
    truth_o, truth_S = delta_rule(*(x.double() for x in (q, k, v, beta)), backend="loop")
    assert o.dtype == dtype and S.dtype == torch.float32
    assert errors([o], [truth_o])[0] < TOLERANCE[dtype]
    assert errors([S], [truth_S])[0] < TOLERANCE[torch.float32]


def test_gradients_are_those_of_finite_differences():
    q, k, v, beta = (x.requires_grad_() for x in example("unnormalised", B=1, T=7, H=1, K=3, V=2))
    g = (-torch.rand(1, 7, 1, dtype=torch.float64)).requires_grad_()
    S = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    def chunks(*x): return delta_rule(*x, chunk=4, backend="torch")
    assert torch.autograd.gradcheck(chunks, (q, k, v, beta, g, S))
    assert torch.autograd.gradcheck(lambda *x: chunks(*x[:4], None, x[4]), (q, k, v, beta, S))


def test_a_scan_may_be_split_anywhere():
    q, k, v, beta = example("random", T=90)
    g = -torch.rand_like(beta)
    whole, last = delta_rule(q, k, v, beta, g, backend="torch")
    for cut in (1, 31, 32, 33, 89):
        first, S = delta_rule(*(x[:, :cut] for x in (q, k, v, beta, g)), backend="torch")
        second, S = delta_rule(*(x[:, cut:] for x in (q, k, v, beta, g)), state=S, backend="torch")
        assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-12)
        assert torch.allclose(S, last, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
def test_65536_reflections_keep_the_state(dtype):
    """Eigenvalue -1, one key, over and over: parity, for 32 keys. In bf16 they are not even of unit length.
    With a rounded 2 / |k|^2 in place of A's division, every seventh key is off by up to 5e-3."""
    q, k, v, beta = example("identical", B=1, T=65536, H=32, K=16, V=4, dtype=dtype)
    with torch.no_grad():
        _, truth = delta_rule(*(x.double() for x in (q, k, v, beta)), backend="loop")
        _, S = delta_rule(q, k, v, beta, backend="torch")
    assert max(errors(S[0], truth[0])) < 1e-4


# The Triton kernels: on a GPU they run there, without one in the interpreter, and both times against the loop

triton_is_here = pytest.mark.skipif(kernels.triton is None, reason="needs the package triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton_is_here
@pytest.mark.parametrize("gate", ["no gate", "g in (0.4, 1)"])
@pytest.mark.parametrize("kind", EXAMPLES)
def test_kernels_equal_the_loop_forward_and_backward(kind, gate):
    found = compare(kind, gate, 20, K=12, V=24, backend="triton")
    assert max(found.values()) < TOLERANCE[torch.float32], found


@triton_is_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_loop_with_numbers_split_into_bf16(dtype, monkeypatch):
    """As a GPU does it. The other tests skip this in the interpreter, where it takes three times as long."""
    if kernels.INTERPRETED:
        monkeypatch.setattr(kernels, "SPLIT", True)
    found = compare("transpositions", "g in (0.4, 1)", 20, K=16, V=16, dtype=dtype, backend="triton")
    assert max(found.values()) < TOLERANCE[dtype], found
    assert found["state"] < 2e-6, "the state is exact, whatever the inputs are rounded to"


@triton_is_here
@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K, V", [(16, 16), (24, 32), (64, 40), (128, 20)])
def test_kernels_equal_the_loop_for_every_width_and_length(K, V, dtype):
    for (kind, gate), T in zip(itertools.product(EXAMPLES, GATES), itertools.cycle((1, 100, 16, 17, 2))):
        with_state = T != 16
        found = compare(kind, gate, T, K=K, V=V, with_state=with_state, dtype=dtype, backend="triton")
        assert max(found.values()) < TOLERANCE[dtype], (kind, gate, T, found)


@triton_is_here
@slow
@pytest.mark.parametrize("kind, gate", [("random", "no gate"), ("identical", "no gate"),
                                        ("transpositions", "g = 1"), ("unnormalised", "g in (0.4, 1)")])
def test_kernels_equal_the_loop_after_1000_steps(kind, gate):
    found = compare(kind, gate, 1000, K=16, V=16, backend="triton")
    assert max(found.values()) < LONG, found


@triton_is_here
@slow
def test_kernels_keep_the_state_for_65536_reflections():
    inputs = [x.to(DEVICE) for x in example("identical", B=1, T=65536, H=1, K=16, V=4, dtype=torch.bfloat16)]
    with torch.no_grad():
        _, truth = delta_rule(*(x.double() for x in inputs), backend="loop")
        _, S = delta_rule(*inputs, backend="triton")
    assert max(errors(S[0], truth[0])) < 1e-4


@triton_is_here
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_carry_a_state_in_pieces_and_token_by_token(gated):
    """Also from tensors that are not contiguous: every second step of a longer sequence."""
    inputs = example("random", B=1, T=46, K=16, V=24, dtype=torch.float32)
    q, k, v, beta = (x.to(DEVICE)[:, ::2] for x in inputs)
    g = -torch.rand_like(beta) if gated else None
    truth, _ = delta_rule(q.double(), k.double(), v.double(), beta, g, backend="loop")
    with torch.no_grad():
        for length in (1, 5):
            S, pieces = None, []
            for t in range(0, 23, length):
                piece = [x if x is None else x[:, t:t + length] for x in (q, k, v, beta, g)]
                o, S = delta_rule(*piece, S, backend="triton")
                pieces.append(o)
            assert errors([torch.cat(pieces, 1)], [truth])[0] < TOLERANCE[torch.float32]


@triton_is_here
def test_one_token_goes_through_the_chunks_when_a_gradient_is_wanted():
    found = compare("unnormalised", "g in (0.4, 1)", 1, K=16, V=16, backend="triton")
    assert max(found.values()) < TOLERANCE[torch.float32], found


@triton_is_here
def test_the_rows_that_a_gpu_would_print_are_printed(capsys):
    kernels.check(DEVICE, "triton", torch.bfloat16, 16, 24, lengths=(2,))
    scans = {name: functools.partial(delta_rule, backend=name) for name in ("loop", "triton")}
    kernels.clock(DEVICE, (1, 20, 1, 16), scans, torch.bfloat16)
    row, times = capsys.readouterr().out.splitlines()
    assert row.startswith("triton bfloat16 16, 24") and len(row.split()) == 4 + len(TENSORS)
    assert times.count("|") == 3


@triton_is_here
def test_kernels_are_tried_out_before_auto_uses_them_and_only_then(monkeypatch):
    """Were "triton" to try them out as well, trying them out would never end."""
    assert kernels.tried_out(torch.device(DEVICE), torch.float32, 16, 16) < TOLERANCE[torch.float32]
    monkeypatch.setattr(kernels, "tried_out", lambda *args: pytest.fail("asked for, yet tried out"))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels.resolve_backend("triton", "cuda") == ("triton", "as asked")


def test_what_the_kernels_cannot_do_is_said(monkeypatch):
    q, k, v, beta = example("random", T=3, K=16, V=200, dtype=torch.float32)
    if kernels.triton:
        with pytest.raises(ValueError, match="200 wide.*take 128; use 'torch'"):
            delta_rule(q, k, v, beta, backend="triton")
        with pytest.raises(ValueError, match="fp32"):
            delta_rule(q.double(), k, v[..., :16].double(), beta, backend="triton")
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        with pytest.raises(ValueError, match="on the cpu.*CUDA GPU"):
            delta_rule(q, k, v[..., :16], beta, backend="triton")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(kernels, "tried_out", lambda *args: 1e-7)
        assert kernels.resolve_backend("auto", "cuda") == ("triton", "kernels for this GPU")
        assert kernels.resolve_backend("auto", "cuda", V=256) == ("torch", "not triton: heads are 256 wide, "
                                                                  "the kernels take 128")
        monkeypatch.setattr(kernels, "tried_out", lambda *args: 0.5)
        assert kernels.resolve_backend("auto", "cuda") == ("torch", "not triton: on this GPU they are off by "
                                                           "5e-01")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "older" in kernels.resolve_backend("auto", "cuda")[1]
    monkeypatch.setattr(kernels, "triton", None)
    assert kernels.resolve_backend("auto", "cuda") == ("torch", "not triton: the package triton is not "
                                                       "installed")
    assert kernels.resolve_backend() == ("torch", "chunks, on any device")


def compile_kernels(*cases):
    """Print what ptxas says of the kernels, compiled for GPUs that need not be here. A case: sm, K, dtype,
    gated. Runs in a process of its own, without the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Pretend(DriverBase):
        """Stands in for a GPU's driver: enough to compile, not to launch."""
        is_active = classmethod(lambda cls: True)
        get_current_target = lambda self: GPUTarget("cuda", self.sm, 32)
        get_current_device = get_current_stream = lambda self, device=0: 0
        get_active_torch_device = lambda self: CPU
        get_benchmarker = lambda self: None
        map_python_to_cpp_type = lambda self, name: name

        def __init__(self, sm):
            self.sm = sm

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    fp32 = torch.float32
    for sm, K, name, gated in cases:
        x, g, T, N, H = getattr(torch, name), fp32 if gated else None, 100, 7, 8
        options = kernels.settings(K, K, x, gated)
        triton.runtime.driver.set_active(Pretend(sm))
        step = {**{key: options[key] for key in ("BK", "GATED")}, "BV": 32, "num_warps": 4}
        for kernel, sizes, options, *args in (
                (kernels.forward_kernel, (T, N, H), options, x, x, x, fp32, g, fp32, x, fp32, x, fp32, x),
                (kernels.backward_state_kernel, (T, N, H), options, x, x, fp32, g, fp32, x, fp32, x, x, fp32),
                (kernels.backward_inputs_kernel, (T, N, H), options, x, x, x, fp32, g, *[x] * 8, fp32, g),
                (kernels.step_kernel, (), step, x, x, x, fp32, g, fp32, x, fp32)):
            kernel.device_caches.clear()
            built = kernel.warmup(*args, *sizes, K, K, grid=(1,), **options)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(built.asm["cubin"])
                usage = subprocess.run([cuobjdump, "--dump-resource-usage", file.name], capture_output=True,
                                       text=True, check=True).stdout
            print(json.dumps([kernel.fn.__name__, sm, K, name, gated, built.metadata.shared,
                              int(re.search(r"STACK:(\d+)", usage)[1]), "wgmma" in built.asm["ptx"]]))


def compiled(cases):
    """What `compile_kernels` prints, from two processes side by side."""
    def start(part):
        code = f"import test_all; test_all.compile_kernels(*{part!r})"
        env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
        return subprocess.Popen([sys.executable, "-c", code], env=env, cwd=HERE, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = []
    for process in [start(part) for part in (cases[::2], cases[1::2]) if part]:
        out, err = process.communicate()
        assert process.returncode == 0, err
        lines += [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 4 * len(cases)
    return lines


def fits(lines):
    """Within every GPU's shared memory since Ampere (99 KiB), hardly a register spilled, no wgmma."""
    for line in lines:
        *_, shared, stack, wgmma = line
        assert shared <= 99 * 1024 and stack <= 64 and not wgmma, line


@triton_is_here
def test_kernels_compile_for_ampere_and_hopper():
    fits(compiled([(90, 64, "bfloat16", True), (80, 64, "float32", False)]))


@triton_is_here
@slow
def test_every_kernel_compiles_for_ampere_and_hopper():
    cases = itertools.product((80, 90), kernels.WARPS, ("float32", "bfloat16"), (True, False))
    fits(compiled(list(cases)))


def test_without_the_projector_form_bf16_keys_would_explode_or_die():
    """Why b = beta / |k|^2: for a "unit" key in bf16, 1 - 2 |k|^2 is not quite -1, and 4096 steps show it."""
    k = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    k = F.normalize(k, dim=-1).bfloat16().double()
    growth = (1 - 2 * (k * k).sum(-1)).abs() ** 4096
    assert growth.max() > 1e3 and growth.min() < 1e-3


def test_shapes_that_do_not_fit_are_named():
    q, k, v, beta = example("random", T=10)
    for bad in ((q[:, :9], k, v, beta), (q, k, v[:1], beta), (q, k, v, beta[..., :1]),
                (q, k, v, beta, beta[:, 1:])):
        with pytest.raises(ValueError, match="beside k"):
            delta_rule(*bad)
    with pytest.raises(ValueError, match="choose auto, loop, torch or triton"):
        delta_rule(q, k, v, beta, backend="cuda")
    with pytest.raises(ValueError, match="v is on meta, but k on cpu"):
        delta_rule(q, k, v.to("meta"), beta)


@pytest.mark.parametrize("signs", ["positive", "both", "near zero", "none"])
def test_the_decay_scan_is_its_recurrence(signs):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 100, 3, n, generator=rng, dtype=torch.float64) for n in (5, 5, 4))
    a = torch.rand(2, 100, 3, generator=rng, dtype=torch.float64)
    a = {"positive": a, "both": 2 * a - 1, "near zero": 1e-20 * a, "none": None}[signs]
    S = torch.randn(2, 3, 5, 4, generator=rng, dtype=torch.float64)
    want, state = [], S
    for t in range(100):
        decay = 1 if a is None else a[:, t, :, None, None]
        state = decay * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        want.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    o, last = decay_scan(q, k, v, a, S, chunk=16)
    assert torch.allclose(o, torch.stack(want, 1), atol=1e-9) and torch.allclose(last, state, atol=1e-9)


# ----------------------------------------------------------------------------------------------------------
# pfsa.py

def enumerated(automaton, symbols):
    """By brute force: the joint probability of every path of states with these symbols -> the beliefs, and
    the probability of each symbol given those before."""
    weights, before = Counter(), Fraction(1)
    for state, p in enumerate(automaton.q0):
        weights[(state,)] = p
    beliefs, chances = [[weights[(i,)] for i in range(automaton.m)]], []
    for s in symbols:
        after = Counter()
        for path, p in weights.items():
            for state in range(automaton.m):
                after[(*path, state)] += p * int(automaton.Z[s, path[-1]]) * automaton.T[s, state, path[-1]]
        total, weights = sum(after.values()), after
        chances.append(total / before)
        beliefs.append([sum(p for path, p in after.items() if path[-1] == i) / total
                        for i in range(automaton.m)])
        before = total
    return beliefs, chances


def random_fractions(rng, m):
    """A random automaton in fractions: a move, and a query of two symbols that move, too."""
    T = [[[Fraction(int(x)) for x in row] for row in rng.integers(0, 4, size=(m, m)) + np.eye(m, dtype=int)]
         for _ in range(3)]
    T = np.array(T, object)
    q0 = np.array([Fraction(int(x)) for x in rng.integers(1, 5, size=m)])
    part = rng.integers(2, size=m)
    part[:2] = 0, 1
    return pfsa.PFSA(T / T.sum(1, keepdims=True), [[1] * m, part, 1 - part], q0 / q0.sum(), [[0], [1, 2]])


def test_the_filter_is_bayes_by_brute_force_in_fractions():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        automaton = random_fractions(rng, int(rng.integers(2, 4)))
        symbols, states = automaton.sample(rng, 1, 4)
        want, chances = enumerated(automaton, symbols[0])
        beliefs, log_p = automaton.filter(symbols)
        assert beliefs[0].tolist() == want
        assert np.allclose(log_p[0], np.log(np.array(chances, float)), atol=1e-14)
        floats = pfsa.PFSA(automaton.T.astype(float), automaton.Z, automaton.q0.astype(float))
        assert np.allclose(floats.filter(symbols)[0][0], np.array(want, float), atol=1e-14)


def test_the_belief_is_how_often_a_state_is_there():
    """Among sampled sequences with the same queries and symbols, states occur as often as the filter says."""
    rng = np.random.default_rng(1)
    automaton = pfsa.random_automaton(rng, 4, 1, 2)
    symbols, states = automaton.sample(rng, 200_000, 3, queries=[1, 0, 2])
    beliefs, log_p = automaton.filter(symbols)
    for seen in np.unique(symbols, axis=0):
        same = (symbols == seen).all(1)
        n, p = same.sum(), beliefs[same][0, -1]
        found = np.bincount(states[same, -1], minlength=4) / n
        assert (np.abs(found - p) <= 4.5 * np.sqrt(p * (1 - p) / n) + 1e-12).all(), seen
        assert abs(n / 200_000 - math.exp(log_p[same][0].sum())) < 0.006


def test_a_choice_that_sees_the_state_breaks_the_formula():
    """Why there are queries. An environment that picks evenly among symbols that fit tells more than Z."""
    rng = np.random.default_rng(0)
    state, coin = rng.integers(3, size=60_000), rng.integers(2, size=60_000)
    says_a = (state == 0) | (state == 1) & (coin == 0)                    # A fits 0 and 1, B fits 1 and 2
    truth = np.bincount(state[says_a], minlength=3) / says_a.sum()
    third, unit = [Fraction(1, 3)] * 3, np.eye(3, dtype=int) * Fraction(1)
    said = pfsa.PFSA([unit, unit], [[1, 1, 0], [0, 1, 1]], third).filter([[0]])[0][0, 1]
    assert said.tolist() == [Fraction(1, 2), Fraction(1, 2), 0]
    assert np.allclose(truth, [2 / 3, 1 / 3, 0], atol=0.01)
    with pytest.raises(ValueError, match="exactly one of its symbols must fit"):
        pfsa.PFSA([unit, unit], [[1, 1, 0], [0, 1, 1]], third, [[0, 1]])


def test_the_papers_numbers_come_out_exactly():
    half = Fraction(1, 2)
    beliefs, log_p = pfsa.appendix_b().filter([[0, 3]])
    assert beliefs[0].tolist() == [[1, 0, 0, 0, 0, 0], [0, half, half, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert math.exp(log_p[0, 1]) == 0.5
    h = pfsa.linear_filter(pfsa.appendix_b(), [[0, 3]])[0]
    assert h[2].tolist() == [0, 0, 0.5, 0, 0, 0]
    mass = pfsa.linear_filter(pfsa.figure_9(), [[0, 1] * 4])[0, ::2].sum(1)
    assert mass.tolist() == [1, 0.5, 0.25, 0.125, 0.0625]
    forced = [[pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)] * 3]
    H = pfsa.marginal_filter(3, forced)[0, ::2]
    assert H[:, 2, 2].tolist() == [1, 0.5, 0.25, 0.125]
    nine_in_ten = pfsa.PFSA([[[0.9, 0.9], [0.1, 0.1]]] * 2, np.eye(2, dtype=int), [0.9, 0.1], [[0, 1]])
    assert f"{pfsa.linear_filter(nine_in_ten, [[0] * 100])[0, -1].sum():.3g}" == "2.66e-05"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_linear_filter_dies_where_its_format_ends(dtype):
    n = pfsa.dies_at(dtype)
    forced = [pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)]
    for automaton, pair in ((pfsa.figure_9(), [0, 1]), (pfsa.maybe_swaps(3), forced)):
        mass = pfsa.linear_filter(automaton, [pair * n], dtype)[0, ::2].sum(1)
        assert mass[n - 1] > 0 and mass[n] == 0
        assert automaton.filter([pair * n])[0][0, -1].sum() == 1


def test_a_gated_reset_keeps_a_linear_filter_alive():
    """Appendix B: A = 0, B = prior. Figure 9 with a symbol that forgets all after every 20, in fp16."""
    nine, prior = pfsa.figure_9(), np.array([0.2, 0.5, 0.3])
    T = [*nine.T.astype(float), np.tile(prior[:, None], 3)]
    automaton = pfsa.PFSA(T, [*nine.Z, [1, 1, 1]], 1)
    symbols = [([0, 1] * 10 + [3]) * 20]
    exact = automaton.filter(symbols)[0]
    h = pfsa.linear_filter(automaton, symbols, torch.float16, resets=[3]).double().numpy()
    assert np.allclose(h / h.sum(-1, keepdims=True), exact, atol=2e-3)
    assert pfsa.linear_filter(automaton, symbols, torch.float16)[0, -1].sum() == 0


def test_marginals_are_exact_without_reveals_and_an_approximation_with_them():
    rng, automaton = np.random.default_rng(0), pfsa.maybe_swaps(3)
    for kind, largest in (("none", 1e-12), ("periodic", None)):
        symbols, _ = automaton.sample(rng, 100, 40, pfsa.schedule(rng, 3, 100, 40, kind, every=4))
        truth = pfsa.marginals(automaton.filter(symbols)[0], 3)
        found, ok = pfsa.sinkhorn(pfsa.marginal_filter(3, symbols))
        assert np.allclose(truth.sum(-1), 1) and np.allclose(truth.sum(-2), 1)
        error = np.abs(found - truth)[ok].max()
        assert error < largest if largest else error > 0.05


def test_sinkhorn_flags_what_has_underflowed():
    forced = [[pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)] * 1100]
    found, ok = pfsa.sinkhorn(pfsa.marginal_filter(3, forced)[0, [0, 2000, -1]])
    assert ok.tolist() == [True, True, False] and np.isfinite(found).all()
    assert np.allclose(found[1], np.eye(3))
    found, ok = pfsa.sinkhorn(np.zeros((3, 3)))
    assert not ok and np.isfinite(found).all()


def test_a_filter_of_100000_steps_has_no_nan():
    rng, automaton = np.random.default_rng(0), pfsa.maybe_swaps(3)
    symbols, _ = automaton.sample(rng, 2, 100_000)
    beliefs, log_p = automaton.filter(symbols)
    assert np.isfinite(beliefs).all() and np.isfinite(log_p).all() and np.allclose(beliefs.sum(-1), 1)


def test_bad_automata_and_impossible_symbols_are_named():
    swaps, unit = pfsa.maybe_swaps(3), np.eye(2)
    good = [[pfsa.holds(3, 0, 0), pfsa.holds(3, 1, 1)]]
    with pytest.raises(ValueError, match="sequence 1, step 1: symbol 6"):
        swaps.filter(good + [[pfsa.holds(3, 0, 0), pfsa.holds(3, 1, 0)]])
    for match, make in (("columns|column", lambda: pfsa.PFSA([[[1, 0], [1, 1]]], [[1, 1]], 0)),
                        ("q0: must sum", lambda: pfsa.PFSA([unit], [[1, 1]], [0.5, 0.6])),
                        ("q0 2: give one of the 2", lambda: pfsa.PFSA([unit], [[1, 1]], 2)),
                        ("0 or more", lambda: pfsa.PFSA([[[2, 0], [-1, 1]]], [[1, 1]], 0)),
                        ("at least one state", lambda: pfsa.PFSA([unit], [[0, 0]], 0)),
                        ("give 0 or 1", lambda: pfsa.PFSA([unit], [[1, 2]], 0)),
                        (r"give \(symbols, m, m\)", lambda: pfsa.PFSA(unit, [1, 1], 0)),
                        ("without queries", lambda: pfsa.PFSA([unit], [[1, 1]], 0).sample(None, 1, 1)),
                        ("numbered from 0", lambda: swaps.filter([[99]])),
                        ("integers", lambda: swaps.filter([[0.5]])),
                        ("schedule often: choose", lambda: pfsa.schedule(None, 3, 1, 1, "often"))):
        with pytest.raises(ValueError, match=match):
            make()


def test_ten_thousand_sequences_with_beliefs_are_made_in_five_seconds():
    rng, automaton, began = np.random.default_rng(0), pfsa.maybe_swaps(3), time.process_time()
    symbols, _ = automaton.sample(rng, 10_000, 128, pfsa.schedule(rng, 3, 10_000, 128))
    beliefs, _ = automaton.filter(symbols)
    assert beliefs.shape == (10_000, 129, 6) and time.process_time() - began < 5


def branches_of(text):
    """What a reader of a trace can know, by trying all branches. -> for each print the odds of what it shows
    (a Counter), given all before it; and what it showed."""
    worlds, odds, shown = [{}], [], []
    for line in text.splitlines():
        assign = re.fullmatch(r">>> (\w) = (\d)", line)
        branch = re.fullmatch(r">>> (\w), (\w) = \(\2, \1\) if random\(\) < 0\.5 else \(\1, \2\)", line)
        tell = re.fullmatch(r"(\w) (\d)", line)
        if assign:
            worlds = [{**world, assign[1]: int(assign[2])} for world in worlds]
        elif branch:
            a, b = branch.groups()
            worlds = worlds + [{**world, a: world[b], b: world[a]} for world in worlds]
        elif tell:
            odds.append(Counter(world[tell[1]] for world in worlds))
            shown.append(int(tell[2]))
            worlds = [world for world in worlds if world[tell[1]] == shown[-1]]
        else:
            assert line == ">>> from random import random" or re.fullmatch(r">>> print\('(\w)', \1\)", line)
    return odds, shown


@pytest.mark.parametrize("n_vars, stage, prints", [
    (3, "12x2", 6), (4, "12x3:periodic", 4), (5, "10x5", 2), (3, "16x2:adversarial", 8),
    (3, "16x2:forced", 9)])
def test_the_chances_of_an_answer_are_those_of_all_branches_tried(n_vars, stage, prints):
    task = data.Hidden(n_vars)
    batch = task.batch(*parse_stages(stage, task), 10, 0, "train", 0)
    for b, text in enumerate(texts(task, batch)):
        odds, shown = branches_of(text)
        assert task.tokenizer.decode(batch.tokens[b][batch.answer[b]].tolist()) == "".join(map(str, shown))
        for chances, counts in zip(batch.chances[b][batch.answer[b]], odds):
            want = [counts[value] / counts.total() for value in range(1, n_vars + 1)]
            assert np.allclose(chances, want, atol=1e-6)
        assert len(shown) == prints


@pytest.mark.parametrize("stage", ["40x2", "40x2:adversarial", "40x2:forced"])
def test_hidden_traces_are_python_that_prints_what_they_say(capsys, stage):
    """Run in a real interpreter, with random() returning the branches that were taken."""
    task = data.Hidden(4)
    batch = task.batch(*parse_stages(stage, task), 20, 0, "test", 0)
    for b, text in enumerate(texts(task, batch)):
        lines, scope, held = text.splitlines(), {}, None
        for line, end in zip(lines, batch.line_end[b].nonzero()[:, 0].tolist()):
            state, belief = batch.state[b, end, 0].item(), batch.belief[b, end]
            if state >= 0:
                now = (task.arrangements[state] + 1).tolist()
                draw, held = float(now == held), now                      # 0.0: the branch that swaps
                scope["random"] = lambda: draw
                assert belief[state] > 0 and abs(belief.sum() - 1) < 1e-6
            if line.startswith(">>> ") and "import" not in line:
                exec(line[4:], scope)
            assert state < 0 or [scope[name] for name in "abcd"] == now
        printed = [line for line in lines if not line.startswith(">>> ")]
        assert capsys.readouterr().out.splitlines() == printed


def test_figure_10_always_shows_the_same_and_ends_with_what_must_be_known():
    task = data.Hidden(3)
    for text, first in ((text, text.splitlines()[1:4]) for text in
                        texts(task, task.batch(Stage(100, 2, "forced"), 10, 0, "test", 0))):
        b, c = (line[-1] for line in first[1:])
        odds, shown = branches_of(text)
        assert shown == [int(b)] * 50 + [int(c)]
        assert odds[-1] == {int(c): odds[-1].total()} and set(odds[0].values()) == {1}
        assert "\n".join(text.splitlines()[4:7]) == \
            f">>> b, c = (c, b) if random() < 0.5 else (b, c)\n>>> print('b', b)\nb {b}"


def test_kl_is_zero_for_the_exact_chances_and_known_for_a_uniform_guess():
    cfg = train.Config(task="pfsa", n_vars=3, eval_samples=20, batch_size=10)
    task, [*_, stage] = train.build_task(cfg)

    class Knows(torch.nn.Module):
        """Stands in for a model; its hidden vectors are log-probabilities of the next token."""
        head = torch.nn.Identity()

        def forward(self, tokens, state):
            [batch] = [x for x in (task.batch(stage, 10, 0, "test", t) for t in (0, 1))
                       if torch.equal(x.tokens, tokens)]
            y = torch.full((*tokens.shape, 300), -1e4, dtype=torch.double)
            y[..., ord("1"):ord("4")] = self.guess(batch.chances.roll(-1, 1)).double().clamp(1e-99).log()
            return y, state

    model = Knows()
    model.guess = lambda chances: chances
    exact = train.evaluate(cfg, model, task, stage, CPU)
    assert abs(exact["kl"]) < 1e-8 and abs(exact["final_kl"]) < 1e-8      # chances are in fp32
    assert abs(exact["loss"] - exact["floor"]) < 1e-9 and exact["floor"] > 0.2
    model.guess = lambda chances: torch.full_like(chances, 1 / 3)
    even = train.evaluate(cfg, model, task, stage, CPU)
    assert abs(even["loss"] - math.log(3)) < 1e-6
    batches = [task.batch(stage, 10, 0, "test", t) for t in (0, 1)]
    p = torch.cat([batch.chances[batch.answer] for batch in batches]).double()
    assert abs(even["kl"] - (math.log(3) + torch.special.xlogy(p, p).sum(-1).mean().item())) < 1e-6


def test_a_model_learns_to_believe(tmp_path):
    """Two variables: all there is to know is whether a swap came since the last print."""
    assert go(tmp_path, "--task", "pfsa", "--n-vars", 2, "--curriculum", "8x2", "--stage-samples", 6400,
              "--eval-at", "8x2 8x2:forced", "--learning-rate", 3e-3) == 0
    row, _ = json.loads((only(tmp_path) / "result.json").read_text())["eval"]
    assert row["kl"] < 0.02 < 0.2 < row["floor"]
    run = str(only(tmp_path))
    assert train.main(["--eval", run, "--eval-at", "8x2:adversarial"]) == 0
    assert plot.main(["nats", run, "--save", str(tmp_path / "nats.png")]) == 0
    assert (tmp_path / "nats.png").read_bytes().startswith(b"\x89PNG")
    assert plot.main(["table", run, "--save", str(tmp_path / "t.csv")]) == 0
    line, forced = csv.DictReader(open(tmp_path / "t.csv"))
    assert forced["kind"] == "forced" and float(forced["final_kl"]) >= 0
    assert abs(float(line["kl"]) - row["kl"]) < 1e-4 and abs(float(line["floor"]) - row["floor"]) < 1e-4


@pytest.mark.parametrize("args, says", [
    (["--n-vars", "6"], "choose 2 to 5"),
    (["--n-vars", "3", "--curriculum", "8x2:often"], "Choose one of random"),
    (["--n-vars", "3", "--curriculum", "8x2:none"], "Choose one of random"),
    (["--n-vars", "3", "--eval-at", "8x4:forced"], "every second line is a print there, so write 8x2:forced"),
    (["--n-vars", "3", "--carry", "2"], "leave it at 1")])
def test_bad_settings_of_hidden_branches_are_one_line(args, says):
    with pytest.raises(UserError, match=says):
        train.main(["--task", "pfsa", *args])


# ----------------------------------------------------------------------------------------------------------
# models.py

ALL = [*models.MIXERS, "deltanet+lstm", "deltanet+transformer"]


def small(model, **changes):
    return SimpleNamespace(**{"model": model, "d_model": 32, "d_mlp": 32, "n_layer": 2, "n_head": 2,
                              "beta_max": 2.0, "n_householder": 3, "state_head": "linear", "state_layer": 0,
                              **changes})


def build(model, **changes):
    torch.manual_seed(0)
    return models.LM(small(model, **changes), 262, 5, 5)


def agrees_with_itself(lm):
    """Whole, token by token and in segments, `lm` says the same."""
    tokens = torch.randint(262, (3, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = lm(tokens)
        for length in (1, 3, 33):
            state, pieces = None, []
            for piece in tokens.split(length, 1):
                y, state = lm(piece, state)
                pieces.append(y)
            assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("model", ALL)
def test_whole_token_by_token_and_segment_by_segment_agree(model):
    agrees_with_itself(build(model))


def test_the_short_convolution_is_torchs_with_the_state_before_it():
    conv, x = models.ShortConv(3), torch.randn(2, 9, 3)
    torch.nn.init.normal_(conv.weight)
    y, state = conv(x)
    torch.testing.assert_close(y, F.conv1d(F.pad(x.mT, (3, 0)), conv.weight.T[:, None], groups=3).mT)
    assert torch.equal(state, x[:, -3:])


@pytest.mark.parametrize("model", ALL)
def test_nothing_sees_the_future_and_everything_sees_the_past(model):
    lm = build(model)
    tokens = torch.randint(262, (1, 40), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % 262
    with torch.no_grad():
        before, after = lm(tokens)[0], lm(changed)[0]
    assert (before[:, :20] - after[:, :20]).abs().max() < 1e-5
    assert ((before[:, 20:24] - after[:, 20:24]).abs().amax(-1) > 1e-4).all()  # rnn and ssm start forgetful


def transitions(model, beta_max):
    """The K x K matrices by which single tokens move the state, betas pushed to both ends of their range."""
    torch.manual_seed(0)
    mixer = models.MIXERS[model](small(model, beta_max=beta_max, n_head=1, n_householder=2))
    if hasattr(mixer, "to_beta"):
        torch.nn.init.normal_(mixer.to_beta.weight, std=5)
    if hasattr(mixer, "to_gate"):
        torch.nn.init.constant_(mixer.to_gate.bias, 10)
    torch.nn.init.normal_(mixer.conv.weight)
    x = torch.randn(300, 1, 32)                                           # 300 sequences of one token
    with torch.no_grad():
        q, k, v, _ = mixer.project(x)
        _, S = mixer.scan(x, q, k, 0 * v, torch.eye(32).expand(300, 1, 32, 32))
    return S[:, 0].double()


@pytest.mark.parametrize("model", ["deltanet", "gated_deltanet", "deltaproduct", "ssm"])
def test_beta_max_bounds_the_eigenvalues(model):
    bounded = torch.linalg.eigvals(transitions(model, 1.0))
    assert bounded.imag.abs().max() < 1e-3 and bounded.real.min() > -1e-3 and bounded.abs().max() < 1 + 1e-5
    free = torch.linalg.eigvals(transitions(model, 2.0))
    assert free.real.min() < -0.9 and free.abs().max() < 1 + 1e-5


def test_linear_attention_has_eigenvalue_one():
    S = transitions("linear_attention", 2.0)
    assert torch.allclose(S, torch.eye(32, dtype=torch.float64).expand_as(S))


def test_one_deltaproduct_step_is_deltanet():
    one, net = build("deltaproduct", n_householder=1), build("deltanet")
    net.load_state_dict(one.state_dict())
    tokens = torch.randint(262, (2, 30))
    assert torch.allclose(one(tokens)[0], net(tokens)[0], atol=1e-6)


def test_a_plus_alternates_mixers():
    kinds = [type(block.mixer).__name__ for block in build("deltanet+lstm", n_layer=4).blocks]
    assert kinds == ["DeltaNet", "Recurrent", "DeltaNet", "Recurrent"]


def test_the_default_model_has_the_parameters_the_readme_says():
    cfg = train.Config()
    task, _ = train.build_task(cfg)
    size = sum(p.numel() for p in train.build_model(cfg, task, "cpu").parameters())
    assert f"{size:,} parameters" in (HERE / "README.md").read_text()


HEADS = [*models.STATE_HEADS]


def test_p2s_transformer_has_as_many_parameters_as_published():
    cfg = small("transformer", d_model=512, d_mlp=768, n_layer=6, n_head=8)
    with torch.device("meta"):
        lm = models.LM(cfg, 259, 0, 0)
    assert train.count(lm) == 13_641_216


@pytest.mark.parametrize("model", ["deltanet", "transformer", "lstm"])
def test_a_state_head_changes_no_logit_and_no_token(model):
    """Bit for bit, with any head and with none: before training, and after it with a weight of 0."""
    def logits(*args):
        cfg, *_ = train.parse(["--task", "listperm", "--n-vars", "4", "--model", model, "--d-model", "32",
                               "--n-head", "2", "--curriculum", "4", *args])[0]
        task, [stage] = train.build_task(cfg)
        lm, batch = train.build_model(cfg, task, CPU), task.batch(stage, 4, 0, "train", 0)
        lm.head.weight.data = torch.randn(lm.head.weight.shape, generator=torch.Generator().manual_seed(0))
        hidden, _ = lm(batch.tokens)
        return batch.tokens, lm.head(hidden), train.loss_terms(cfg, lm, task, batch, hidden, hidden)[0]
    tokens, bare, terms = logits("--state-weight", "0")
    assert "state" not in terms
    for head in HEADS:
        same_tokens, same, more = logits("--state-head", head)
        assert torch.equal(tokens, same_tokens) and torch.equal(bare, same)
        assert torch.equal(terms["next"], more["next"]) and more["state"] > 0


@pytest.mark.parametrize("task, L", [(data.Arith(2), 4), (Repl(3), 6)])
def test_the_transformer_head_writes_a_state_knowing_only_its_lines_vector(task, L):
    """Line by line, without padding, as a loop over tokens says it."""
    lm = build("gru", state_head="transformer")
    head, batch = lm.to_state, task.batch(Stage(L, 1), 3, 0, "train", 0)
    torch.nn.init.normal_(head.head.weight)
    batch = task.batch(Stage(L, 1), 3, 0, "train", 0)
    where, text = models.state_texts(batch)
    if isinstance(task, Repl):  # a token a slot, and lines before the last assignment have spaces
        assert task.tokenizer.decode(text[0].tolist()).count(" ") == 2
    with torch.no_grad():
        hidden, _ = lm(batch.tokens)
        nats = []
        for vector, row in zip(hidden[where], text.tolist()):
            row = [token for token in row if token != data.PAD]
            for i, token in enumerate(row):
                x = torch.cat([vector[None, None], head.embed(torch.tensor([row[:i]], dtype=torch.long))], 1)
                for block in head.blocks:
                    x, _ = block(x)
                nats.append(-head.head(head.norm(x[0, -1])).log_softmax(-1)[token].item())
        assert head.loss(lm, hidden, batch).item() == pytest.approx(np.mean(nats), rel=1e-4)


@pytest.mark.parametrize("task, L", [(data.Arith(1), 4), (data.Parity(), 6)])
def test_the_contrastive_head_finds_states_and_lines(task, L):
    """Both directions as loops over a program's lines; each state read by itself, without padding."""
    lm, batch = build("gru", state_head="contrastive"), task.batch(Stage(L, 1), 5, 0, "train", 0)
    where, text = models.state_texts(batch)
    rows = [tuple(token for token in row if token != data.PAD) for row in text.tolist()]
    with torch.no_grad():
        hidden, _ = lm(batch.tokens)
        states = {row: F.normalize(lm(torch.tensor([row]))[0][0, -1], dim=0) for row in rows}
        lines = F.normalize(hidden[where], dim=-1)
        alike = {row: (lines @ vector / lm.to_state.temperature).exp() for row, vector in states.items()}
        nats, program = [], where.nonzero()[:, 0].tolist()
        for i, row in enumerate(rows):
            same = [j for j in range(len(rows)) if program[j] == program[i]]
            to_state = alike[row][i] / sum(alike[other][i] for other in {rows[j] for j in same})
            to_line = alike[row][i] / sum(alike[row][j] for j in same)
            nats.append(-(to_state.log() + to_line.log()).item() / 2)
        assert lm.to_state.loss(lm, hidden, batch).item() == pytest.approx(np.mean(nats), rel=1e-4)
    assert not [*lm.to_state.parameters()] and (len(states) < len(rows)) == isinstance(task, data.Parity)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_the_state_head_reads_the_block_it_is_told_to(layer):
    """The same as a model that ends there; its loss reaches no later block, and logits are what they were."""
    task = data.Parity()
    batch, lm, all_read = task.batch(Stage(6, 1), 4, 0, "train", 0), *(
        models.LM(small("gru", n_layer=3, state_layer=layer), 262, 1, 2) for layer in (layer, 0))
    all_read.load_state_dict(lm.state_dict())
    hidden, told, _ = lm.with_told(batch.tokens)
    assert torch.equal(hidden, all_read(batch.tokens)[0]) and torch.equal(hidden, lm(batch.tokens)[0])
    shorter = copy.deepcopy(lm)
    shorter.blocks = shorter.blocks[:layer]
    assert torch.equal(told, shorter(batch.tokens)[0])
    lm.to_state.weight.data.normal_()
    train.loss_terms(train.Config(), lm, task, batch, hidden, told)[0]["state"].backward()
    assert [block.mlp.down.weight.grad is None for block in lm.blocks] == [i >= layer for i in range(3)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("model", ["deltanet", "lstm", "transformer"])
def test_every_state_head_teaches_every_kind_of_model(model, head):
    """Forty steps on one batch: its own loss falls, and reaches into the model."""
    cfg = train.Config(model=model, task="listperm", n_vars=3, d_model=32, n_head=2, state_head=head)
    task, _ = train.build_task(cfg)
    lm, batch = train.build_model(cfg, task, CPU), task.batch(Stage(3, 1), 8, 0, "train", 0)
    optimizer, losses = torch.optim.AdamW(lm.parameters(), 1e-2), []
    for _ in range(40):
        loss = lm.to_state.loss(lm, lm(batch.tokens)[0], batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1 and lm.embed.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("model", ALL)
def test_params_are_met_within_ten_percent_whatever_the_model(model):
    cfg = train.Config(model=model, n_layer=2, n_head=2, params=150000)
    task, _ = train.build_task(cfg)
    assert abs(train.count(train.build_model(cfg, task, "cpu")) / 150000 - 1) <= 0.1


def by_hand_against_python(n_vars, places, stage):
    """Run by_hand in segments of 2,048 tokens, and its text by exec. -> which prints it gets right (bool),
    the rows of its state before the last print, and what they should be, by those after the assignments."""
    task = Repl(n_vars)
    lm, batch = models.by_hand(task, places), task.batch(stage, 1, 0, "test", 0)
    [text] = texts(task, batch)
    code = [line[4:] for line in text.splitlines() if line.startswith(">>> ")]
    scope, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(code[:n_vars]), scope)
        first = [scope[chr(ord("a") + i)] for i in range(n_vars)]
        exec("\n".join(code[n_vars:]), scope)
    last = [scope[chr(ord("a") + i)] for i in range(n_vars)]
    _, start = lm(batch.tokens[:, :5 * n_vars])                           # ">>> ", "a", " = ", "5", "\n"
    state, said = None, []
    for part in (batch.tokens[:, :-10], batch.tokens[:, -10:]):           # a print is 10 tokens
        end = state
        for tokens in part.split(2048, 1):
            hidden, state = lm(tokens, state)
            said.append(lm.head(hidden).argmax(-1))
    said = task.tokenizer.decode(torch.cat(said, 1)[batch.answer.roll(-1, 1)].tolist())
    now = end[0][1][0, 0, :n_vars * places].unflatten(0, (places, n_vars))
    then = start[0][1][0, 0, :n_vars * places].unflatten(0, (places, n_vars))
    right = [a == line[2] for a, line in zip(said, out.getvalue().splitlines(), strict=True)]
    return right, now, then[:, [first.index(x) for x in last]]


@pytest.mark.parametrize("n_vars", [2, 5, 9])
def test_a_deltanet_written_by_hand_swaps_bit_for_bit(n_vars):
    right, now, should = by_hand_against_python(n_vars, 2, Stage(1000, 1000))
    assert right == [True] and torch.equal(now, should) and now.abs().max() > 1


@pytest.mark.parametrize("commands", [1000, pytest.param(100_000, marks=slow)])
def test_with_one_row_a_variable_every_swap_rounds_and_it_adds_up(commands):
    right, now, should = by_hand_against_python(5, 1, Stage(commands, commands))
    grown = (now - should).abs().max() / should.abs().max()
    assert right == [True] and 1.6e-8 < grown / commands < 1.9e-8         # by 0.002 %, 0.17 %


def test_by_hand_every_print_is_right_and_writes_again():
    right, now, should = by_hand_against_python(5, 2, Stage(600, 2))
    assert len(right) == 300 and all(right) and torch.allclose(now, should, rtol=1e-4, atol=1e-4)


@slow
def test_by_hand_100_000_commands_without_an_error():
    right, now, should = by_hand_against_python(5, 2, Stage(100_000, 100_000))
    assert right == [True] and torch.equal(now, should)
    right, _, _ = by_hand_against_python(5, 2, Stage(100_000, 1000))
    assert len(right) == 100 and all(right)


def test_by_hand_needs_swaps():
    for task in (Repl(5, "perm"), Group("S5")):
        with pytest.raises(UserError, match="moves='swap'"):
            models.by_hand(task)


# ----------------------------------------------------------------------------------------------------------
# train.py: loss, score, schedule

@pytest.mark.parametrize("task, stage", [(Repl(3), Stage(6, 2)), (data.ListPerm(3, 1), Stage(6, 1))])
def test_the_loss_is_what_a_loop_over_tokens_says(task, stage):
    """Of programs of several lengths, too, where nothing that fills them up may count."""
    lm = build("gru")
    lm.to_state = models.LinearHead(small("gru"), 262, 3, 3)
    torch.nn.init.normal_(lm.head.weight)
    torch.nn.init.normal_(lm.to_state.weight)
    batch = task.batch(stage, 4, 0, "train", 0)
    assert (batch.tokens == data.PAD).any() == task.whole
    with torch.no_grad():
        hidden, _ = lm(batch.tokens)
        terms, accuracy = train.loss_terms(train.Config(), lm, task, batch, hidden, hidden)
        following, reveals, states, right = [], [], [], []
        for b, t in itertools.product(*map(range, batch.tokens.shape)):
            if t and batch.tokens[b, t] != data.PAD:
                p = lm.head(hidden[b, t - 1]).softmax(-1)
                following.append(-p[batch.tokens[b, t]].log().item())
                if batch.answer[b, t]:
                    reveals.append(following[-1])
                    right.append(p.argmax().item() == batch.tokens[b, t])
            if batch.line_end[b, t]:
                p = lm.to_state(hidden[b, t]).softmax(-1)
                states += [-p[i, x].log().item() for i, x in enumerate(batch.state[b, t].tolist()) if x >= 0]
    for name, values in (("next", following), ("reveal", reveals), ("state", states)):
        assert terms[name].item() == pytest.approx(np.mean(values), rel=1e-5)
    if task.whole:
        right = [all(right[3 * b:3 * b + 3]) for b in range(4)]
    assert accuracy.item() == pytest.approx(np.mean(right))


@pytest.mark.parametrize("task", [data.Parity(), data.ListPerm(4), data.Arith(2)])
def test_an_answer_is_right_if_all_of_it_is(task):
    batch = task.batch(Stage(6, 1), 50, 0, "test", 0)
    asked, answers = train.questions(task, batch)
    assert torch.equal(asked.sum(1), batch.answer.sum(1)) and len(answers) == asked.sum()
    right = torch.ones(len(answers), dtype=torch.bool)
    assert train.score(task, asked, right).shape == (50, 1) and train.score(task, asked, right).all()
    row = asked.nonzero()[:, 0]
    for b in (0, 20, 49):
        right[(row == b).nonzero()[-1]] = False
    assert (~train.score(task, asked, right))[:, 0].nonzero()[:, 0].tolist() == [0, 20, 49]
    for ahead, accuracy in ((1, 1.0), (0, 0.0)):
        row = train.evaluate(train.Config(eval_samples=20), Oracle(ahead), task, Stage(6, 1), CPU)
        assert row["reveal_acc"] == accuracy and row["by_reveal"] == [accuracy]


class Oracle:
    """A "model" that knows the next token (ahead=1) or repeats the present one (ahead=0)."""

    def __init__(self, ahead):
        self.ahead = ahead

    def __call__(self, tokens, state):
        return F.one_hot(tokens.roll(-self.ahead, 1), 262).float(), state

    def head(self, hidden):
        return hidden


def test_the_score_asks_for_the_token_before_an_answer():
    cfg, task = train.Config(eval_samples=20), Repl()
    for ahead, accuracy in ((1, 1.0), (0, 0.0)):
        row = train.evaluate(cfg, Oracle(ahead), task, Stage(8, 2), CPU)
        assert row["reveal_acc"] == row["final_acc"] == accuracy and row["by_reveal"] == [accuracy] * 4


@pytest.mark.parametrize("task", [Repl(), Group("S3"), data.Parity()])
def test_evaluating_in_segments_changes_nothing(task):
    torch.manual_seed(1)
    lm = models.LM(small("deltanet"), 262, task.n_slots, task.n_classes).double()  # fp32 may flip near-ties
    lm.head.weight.data[ord("0"):ord("6")].normal_()  # it guesses digits, some of them right
    lm.to_state.weight.data.normal_()
    rows = [train.evaluate(train.Config(eval_samples=20, segment=segment), lm, task, Stage(24, 1), CPU)
            for segment in (10000, 7)]
    assert rows[0] == rows[1] and 0 < rows[0]["reveal_acc"] < 1


def test_the_learning_rate_rises_stays_and_falls():
    cfg = train.Config(learning_rate=1.0, warmup=160, cooldown=1600, batch_size=16, lr_final=0.1)
    lr = [train.learning_rate(cfg, samples, 8000) for samples in range(0, 9600, 16)]
    assert lr[0] == 0.1 and lr[9] == 1 and set(lr[9:501]) == {1.0}
    assert all(a > b for a, b in zip(lr[500:], lr[501:])) and lr[-1] > 0.1
    assert train.learning_rate(cfg, 8800, 8000) == pytest.approx(0.55)
    assert train.learning_rate(cfg, 9600, 8000) == pytest.approx(0.1)
    assert train.learning_rate(cfg, 99999, 8000) == pytest.approx(0.1)


# ----------------------------------------------------------------------------------------------------------
# train.py: runs

TINY = ("--n-vars 2 --d-model 16 --d-mlp 16 --batch-size 8 --warmup 16 --cooldown 160 --eval-samples 8 "
        "--eval-at 4x2 --device cpu --curriculum 4x1").split()
ENDLESS = ["--stage-samples", "1000000", "--max-samples", "1000000"]


def go(tmp_path, *args):
    """main() of train.py with tiny settings; arguments given later win. -> exit code."""
    return train.main([*TINY, "--out", str(tmp_path), *map(str, args)])


def only(folder):
    [path] = folder.iterdir()
    return path


def metrics(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def test_a_tiny_model_learns_three_variables(tmp_path):
    """The whole chain, from a command to result.json: 99 % beyond the trained length; chance is 33 %."""
    done = command(HERE / "train.py", "--n-vars", 3, "--d-model", 32, "--d-mlp", 32, "--max-samples", 12000,
                   "--curriculum", "4x1 8x1 16x2", "--eval-at", "16x2 32x4", "--eval-samples", 128,
                   "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((only(tmp_path) / "result.json").read_text())
    assert [row["reveal_acc"] >= 0.99 for row in result["eval"]] == [True, True], result["eval"]
    assert result["stage_reached"] == "16x2"
    assert [p["stage"] for p in result["passed"]] == ["4x1", "8x1", "16x2"]
    said = command(HERE / "train.py", "--probe", only(tmp_path), "--eval-samples", 100).stdout
    true, shuffled = (float(share) for share in re.findall(r"([\d.]+)% of [\d,]+ values right", said))
    assert true > 97 and shuffled < 85
    keys = "model task params until samples seconds seed stage_reached passed eval config"
    assert set(result) == set(keys.split())


def interrupt_at(step, monkeypatch):
    """Make a run press Ctrl-C on itself while it prepares this step."""
    batch = Repl.batch

    def pressing(self, stage, size, seed, split, t):
        if split == "train" and t == step:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, stage, size, seed, split, t)
    monkeypatch.setattr(Repl, "batch", pressing)


@pytest.mark.parametrize("moving_on", [("--advance", 1), ("--advance", 1, "--carry", 7, "--model", "gru"),
                                       ("--stage-samples", 400, "--curriculum", "4x1 8x2")])
def test_50_steps_and_50_more_are_100_steps_bit_for_bit(tmp_path, monkeypatch, capsys, moving_on):
    flags = [*moving_on, "--max-samples", 800]
    assert go(tmp_path / "whole", *flags) == 0
    with monkeypatch.context() as patch:
        interrupt_at(49, patch)
        assert go(tmp_path / "halves", *flags) == 130
    assert "after step 50, 400 traces" in capsys.readouterr().out
    assert len(metrics(only(tmp_path / "halves"))) == 50
    assert go(tmp_path / "halves", *flags, "--resume") == 0
    whole, halves = (only(tmp_path / x) for x in ("whole", "halves"))
    assert metrics(whole) == metrics(halves) and len(metrics(whole)) == 100
    a, b = train.load_checkpoint(whole), train.load_checkpoint(halves)
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    for i, moments in a["optimizer"]["state"].items():
        assert all(torch.equal(x, b["optimizer"]["state"][i][key]) for key, x in moments.items())
    ours, theirs = (json.loads((x / "result.json").read_text())["eval"] for x in (whole, halves))
    assert ours == theirs


@pytest.mark.parametrize("model", ["deltanet+lstm", "transformer"])
def test_carry_reads_one_long_trace_in_pieces_and_hands_the_state_on(tmp_path, monkeypatch, model):
    calls, honest = [], models.LM.with_told

    def watching(self, tokens, state=None):
        *hidden, new = honest(self, tokens, state)
        if torch.is_grad_enabled():
            calls.append((tokens, state, new))
        return *hidden, new
    monkeypatch.setattr(models.LM, "with_told", watching)
    go(tmp_path, "--model", model, "--n-layer", 2, "--curriculum", "2x1 4x2", "--stage-samples", 80,
       "--warmup", 0, "--carry", 5)
    assert all(state is None for _, state, _ in calls[:10]) and len(calls) == 20
    for first in (10, 15):
        long = Repl(2).batch(Stage(20, 2), 8, 0, "train", first).tokens
        assert torch.equal(torch.cat([tokens for tokens, _, _ in calls[first:first + 5]], 1), long)
        assert calls[first][1] is None
        for (_, _, handed), (_, state, _) in zip(calls[first:first + 4], calls[first + 1:first + 5]):
            for x, y in zip(models.nested(handed), models.nested(state)):
                assert torch.equal(x, y) and not y.requires_grad


def test_rows_later_than_the_checkpoint_are_dropped_on_resume(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(20, patch)
        go(tmp_path, "--max-samples", 400)
    folder = only(tmp_path)
    with open(folder / "metrics.csv", "a") as file:                       # as kill -9 may leave it
        file.write("21,168,1,0,4,1,0.1,1,1,1,1,1,1,\n2")
    assert go(tmp_path, "--max-samples", 400, "--resume") == 0
    assert [int(row["step"]) for row in metrics(folder)] == list(range(1, 51))


def watch(*args):
    """Start a run and wait for its first report. -> the process."""
    run = subprocess.Popen([sys.executable, "-u", *map(str, args)], text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    while not run.stdout.readline().startswith("step"):
        assert run.poll() is None
    return run


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    args = [*TINY, *ENDLESS, "--out", str(tmp_path)]
    run = watch(HERE / "train.py", *args)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err
    [hint] = [line for line in out.splitlines() if line.startswith("next")]
    words = shlex.split(hint.removeprefix("next"))
    assert words[:2] == ["python", "train.py"] and words[-1] == "--resume" and words[2:-1] == args
    assert train.load_checkpoint(only(tmp_path))["progress"]["step"] >= 100


def test_a_process_killed_inside_a_save_leaves_the_last_checkpoint(tmp_path):
    go(tmp_path, "--max-samples", 200)
    folder = only(tmp_path)
    before = (folder / "ckpt.pt").read_bytes()
    dies = """if True:
        import io, os, pathlib, signal, sys, torch, train
        whole = torch.save
        def half(x, file):
            buffer = io.BytesIO()
            whole(x, buffer)
            file.write(buffer.getvalue()[:len(buffer.getvalue()) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save = half
        cfg, task, stages, model = train.load_model(sys.argv[1])
        optimizer = torch.optim.AdamW(model.parameters())
        train.save_checkpoint(pathlib.Path(sys.argv[1]) / "ckpt.pt", cfg, task, model, optimizer, {})
    """
    died = command("-c", dies, folder, cwd=HERE)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert (folder / "ckpt.pt.tmp").stat().st_size > 0 and (folder / "ckpt.pt").read_bytes() == before
    train.load_checkpoint(folder)


@slow
def test_a_process_killed_at_any_moment_leaves_a_checkpoint_to_resume(tmp_path):
    args = [*TINY, *ENDLESS, "--save-every", 1, "--out", tmp_path]
    steps = []
    for wait in (0.0, 0.05, 0.11, 0.23, 0.4):
        run = watch(HERE / "train.py", *args, *["--resume"] * bool(steps))
        time.sleep(wait)
        run.kill()
        run.wait()
        steps.append(train.load_checkpoint(only(tmp_path))["progress"]["step"])
    assert steps == sorted(set(steps)) and steps[0] >= 99                 # 100 may die before it is saved


def test_a_loss_that_is_not_finite_ends_with_1_and_keeps_what_was_good(tmp_path, monkeypatch, capsys):
    honest, calls = train.loss_terms, itertools.count()

    def poisoned(*args):
        terms, accuracy = honest(*args)
        return {name: x * (math.nan if next(calls) > 90 else 1) for name, x in terms.items()}, accuracy
    monkeypatch.setattr(train, "loss_terms", poisoned)
    assert go(tmp_path, "--max-samples", 800, "--save-every", 10) == 1
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and "--learning-rate" in error
    saved = train.load_checkpoint(only(tmp_path))
    assert saved["progress"]["step"] == 30 and all(x.isfinite().all() for x in saved["model"].values())
    assert not (only(tmp_path) / "result.json").exists()


def test_a_run_is_never_overwritten_unasked(tmp_path, monkeypatch, capsys):
    assert go(tmp_path, "--max-samples", 200) == 0
    result = only(tmp_path) / "result.json"
    before = result.stat().st_mtime_ns
    assert go(tmp_path, "--max-samples", 200) == 0                        # finished: shown, not run again
    assert "is finished" in capsys.readouterr().out and result.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="--seed 0, not 1"):               # another run under the same name
        go(tmp_path, "--max-samples", 200, "--name", only(tmp_path).name, "--seed", 1)
    assert go(tmp_path, "--max-samples", 200, "--overwrite") == 0 and result.stat().st_mtime_ns > before
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        go(tmp_path, "--max-samples", 200, "--seed", 3)
    with pytest.raises(UserError, match="--resume"):
        go(tmp_path, "--max-samples", 200, "--seed", 3)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, flags in itertools.product(("folder", "file"), ([], ["--overwrite"])):
        with pytest.raises(UserError, match="holds no run of ours"):
            go(tmp_path, "--name", name, *flags)


def test_a_comma_list_is_a_grid_that_skips_what_is_finished(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:                                  # stop it within its third run
        batch, runs = Repl.batch, []

        def pressing(self, stage, size, seed, split, t):
            runs.append((seed, t)) if split == "train" else None
            if len({seed for seed, _ in runs}) == 2 and t == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return batch(self, stage, size, seed, split, t)
        patch.setattr(Repl, "batch", pressing)
        assert go(tmp_path, "--max-samples", 200, "--seed", "0,1", "--model", "deltanet,gru") == 130
    [first] = [path for path in tmp_path.glob("deltanet*") if "seed" not in path.name]
    before = (first / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert go(tmp_path, "--max-samples", 200, "--seed", "0,1", "--model", "deltanet,gru") == 0
    out = capsys.readouterr().out
    assert (first / "result.json").stat().st_mtime_ns == before and "resumed after step 4" in out
    assert len(list(tmp_path.iterdir())) == 4
    rows = out.split("--- reveal accuracy")[1].splitlines()[1:]
    assert rows[0].split()[:2] == ["model", "seed"] or rows[0].split()[:2] == ["seed", "model"]
    assert len(rows) == 5


def test_bf16_learns_too(tmp_path):
    """All but the scan's state in bf16: two variables, where chance is 50 %."""
    assert go(tmp_path, "--dtype", "bf16", "--max-samples", 4000, "--eval-at", "8x1") == 0
    result = json.loads((only(tmp_path) / "result.json").read_text())
    assert result["passed"] and result["eval"][0]["reveal_acc"] > 0.9


def test_until_stops_at_an_accuracy_reached_twice_in_a_row(tmp_path, monkeypatch):
    """In the last stage only; what it took is the traces before the first of the two."""
    honest, said = train.evaluate, iter([0.5, 0.5, 0.2, 0.4, 0.2, 0.9, 0.9])
    monkeypatch.setattr(train, "evaluate", lambda *args: {**honest(*args), "reveal_acc": next(said, 0)})
    assert go(tmp_path, "--max-samples", 20000, "--curriculum", "2x1 3x1", "--advance", 0.01, "--until", 0.3,
              "--eval-every", 4, "--eval-at", "3x1") == 0
    result = json.loads((only(tmp_path) / "result.json").read_text())
    rows = [row for row in metrics(only(tmp_path)) if row["held_out_acc"]]
    stages, accuracies = zip(*((row["stage"], float(row["held_out_acc"])) for row in rows))
    first = stages.index("1")
    twice = next(i for i in range(first, 7) if min(accuracies[i:i + 2]) >= 0.3)
    assert len(rows) == twice + 2 and result["until"] == int(rows[twice]["samples"])
    assert result["samples"] == int(rows[-1]["samples"]) > result["until"]


@pytest.mark.parametrize("model", ["deltaproduct", "transformer", "deltanet+lstm"])
def test_groups_train_and_evaluate_from_a_checkpoint(tmp_path, capsys, model):
    flags = ["--task", "group", "--group", "Z2", "--model", model, "--n-layer", 2, "--curriculum", "4x1 8x1",
             "--eval-at", "8x1 300x1", "--max-samples", 400, "--segment", 64]
    assert go(tmp_path, *flags) == 0
    trained = json.loads((only(tmp_path) / "result.json").read_text())["eval"]
    capsys.readouterr()
    assert train.main(["--eval", str(only(tmp_path)), "--eval-at", "300x1", "--device", "cpu"]) == 0
    assert f"{trained[1]['reveal_acc']:.2%} right" in capsys.readouterr().out


@slow
@pytest.mark.parametrize("seed", range(3))
def test_the_default_run_reads_99_percent_at_twice_the_trained_length_and_spacing(tmp_path, seed):
    assert train.main(["--seed", str(seed), "--out", str(tmp_path), "--eval-samples", "128"]) == 0
    result = json.loads((only(tmp_path) / "result.json").read_text())
    [row] = [row for row in result["eval"] if (row["commands"], row["spacing"]) == (128, 16)]
    assert row["reveal_acc"] >= 0.99, row


@slow
def test_deltanet_tracks_parity_and_eigenvalues_in_01_do_not(tmp_path):
    """Grazzi et al. 2411.12537: no parity without negative eigenvalues. Words of up to 64, read at 256."""
    accuracy = {}
    for beta_max in (2, 1):
        flags = ["--task", "group", "--group", "Z2", "--beta-max", beta_max, "--stage-samples", 4000,
                 "--n-head", 4, "--eval-at", "256x1", "--out", tmp_path]
        assert train.main(list(map(str, flags))) == 0
        [path] = [p for p in tmp_path.glob("*/result.json") if ("beta_max" in str(p)) == (beta_max == 1)]
        accuracy[beta_max] = json.loads(path.read_text())["eval"][0]["reveal_acc"]
    assert accuracy[2] > 0.95 and accuracy[1] < 0.8, accuracy


# ----------------------------------------------------------------------------------------------------------
# train.py --play

@pytest.mark.parametrize("moves, n_vars", [("swap", 4), ("perm", 3)])
def test_typed_lines_do_what_python_does(moves, n_vars):
    task, rng = Repl(n_vars, moves), np.random.default_rng(0)
    names = [chr(ord("a") + i) for i in range(n_vars)]
    held, scope = ({name: str(i + 1) for i, name in enumerate(names)} for _ in range(2))
    for _ in range(300):
        left = rng.permutation(names)[:2 if moves == "swap" else n_vars].tolist()
        right = left[::-1] if moves == "swap" else rng.permutation(left).tolist()
        typed = rng.choice([",", ", ", " , "]).join(left) + rng.choice(["=", " = "]) + ", ".join(right)
        line, held, shown = task.execute(typed, held)
        exec(typed, scope)
        exec(line[4:], again := dict(zip(names, names)))
        assert shown is None and held == {name: scope[name] for name in names}
        assert line[4] == min(left) and sorted(again[name] for name in names) == names


def test_lines_that_are_no_part_of_the_task_are_refused():
    held = {"a": "1", "b": "2", "c": "3"}
    for line in ("x", "a = 1", "a, b = b", "a, a = a, a", "a, b = a, b", "a, b = b, c", "a, z = z, a",
                 "print(a)", "print('a', b)", "print('z', z)", "a, b, c = b, c, a", "import os",
                 "a, b = b, a = a", "=", ">>>", "\udc80"):
        with pytest.raises(UserError, match="knows lines like"):
            Repl(3).execute(line, held)
    assert Repl(3).execute('>>> print( "b",b )', held) == (">>> print('b', b)\n", held, "b")
    with pytest.raises(UserError, match="a, b, c = b, c, a"):
        Repl(3, "perm").execute("a, b = b, a", held)


def test_a_played_session_shows_the_truth_and_the_models_own_probabilities(tmp_path, monkeypatch, capsys):
    go(tmp_path, "--max-samples", 200)
    typed = ["a, b = b, a", "oops", "", "print('a', a)", "b, a = a, b", "print('b', b)", "print('a', a)"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed) + "\n"))
    capsys.readouterr()
    assert train.main(["--play", str(only(tmp_path)), "--device", "cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    start = dict(line[4:].split(" = ") for line in out[:2])
    assert out[2].startswith("this model knows")
    assert [line.split()[1:3] for line in out if line.startswith("python:")] == [
        ["a", start["b"]], ["b", start["b"]], ["a", start["a"]]]
    text = "".join([*(f"{line}\n" for line in out[:2]), ">>> a, b = b, a\n", ">>> print('a', a)\n", "a "])
    _, task, _, model = train.load_model(only(tmp_path), device="cpu")
    with torch.no_grad():
        hidden, _ = model(torch.tensor([task.tokenizer.encode(text)]))
    assert f"({model.head(hidden[0, -1]).softmax(-1).max():.1%})" in out[3]


def test_playing_ends_with_ctrl_c_and_needs_a_repl_model(tmp_path, monkeypatch):
    go(tmp_path / "repl", "--max-samples", 200)
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(KeyboardInterrupt))
    assert train.main(["--play", str(only(tmp_path / "repl"))]) == 0
    go(tmp_path / "group", "--max-samples", 200, "--task", "group", "--eval-at", "4x1")
    with pytest.raises(UserError, match="one trained on repl"):
        train.main(["--play", str(only(tmp_path / "group"))])


# ----------------------------------------------------------------------------------------------------------
# Bad input: one line that says what to do, before anything is built

BAD = {
    "--model deltnet": "did you mean deltanet",
    "--model deltanet+lstn --n-layer 2": "did you mean lstm",
    "--model deltanet+lstm": "--n-layer 2",
    "--task rpl": "did you mean repl",
    "--modle deltanet": "did you mean --model",
    "--n-var 3": "did you mean --n-vars",
    "--n-vars 30": "2 to 9",
    "--moves swpa": "did you mean swap",
    "--task group --group S6": "Choose one of",
    "--curriculum 8x16": "spacing of 1 to that",
    "--curriculum 8x": "COMMANDSxSPACING",
    "--eval-at 8x": "COMMANDSxSPACING",
    "--learning-rate fast": "give float",
    "--learning-rate nan": "above 0",
    "--batch-size 0": "above 0",
    "--seed -1": "0 or more",
    "--beta-max 2.5": "explode",
    "--d-model 30 --n-head 4": "--n-head",
    "--advance 98": "at most 1",
    "--device tpu": "Choose one of",
    "--dtype fp8": "Choose one of",
    "--stage-samples 50000": "200000: raise --max-samples",
    "--max-samples 100": "lower them",
    "--params 30000": "change --d-model or --n-layer",
    "--carry 0": "above 0",
    "--carry 4 --curriculum 8x3": "must divide",
    "--state-layer 2": "give at most --n-layer 1",
    "--task group --state-layer 1": "and 0 for --task group",
    "--task arith --state-head linear": "give --state-head transformer or contrastive, or --state-weight 0",
    "--task arith --curriculum 13": "has 2 to 12 lines",
    "--task arith --digits 0": "choose 1 to 6",
    "--task parity --curriculum 8x2": "one answer, at its end, so write 8",
    "--task parity --sample-length 2": "give 1 for programs of 2 to L lines",
    "--task listperm --n-vars 10": "each a digit",
    "--task group --state-head transformer": "by --state-head linear",
    "--state-head linera": "did you mean linear",
    "--task group --state-weight 0": "--state-weight above 0",
    "--resume --overwrite": "one of them",
    "--seed 0,0": "repeat no value",
    "--seed 0,1 --name x": "leave --name out",
    "--eval nowhere.pt": "no such checkpoint",
    "--eval nowhere.pt --model gru": "give only",
    "--eval nowhere.pt --seed 0,1": "one value each",
    "--play nowhere.pt": "no such checkpoint",
    "--play nowhere.pt --resume": "give only",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_answered_in_one_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "build_model", None)                       # nothing may be built
    with pytest.raises(UserError) as caught:
        train.main(line.split())
    assert BAD[line] in str(caught.value) and "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["train.py --modle deltanet", "data.py rpl", "data.py repl --n-vars 12",
                                  "plot.py curv out", "plot.py curve nowhere"])
def test_the_shell_sees_one_line_and_exit_code_2(line, tmp_path):
    name, *args = line.split()
    done = command(HERE / name, *args, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"{name}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("line, says", [
    ("", "one of curve"), ("ladder", "give folders"), ("ladder default.csv", "--task group"),
    ("automaton nowhere", "no such"),
    ("samples default.csv", "--curriculum says how long"), ("curve default.csv", "give folders"),
    ("scores nowhere.csv", "cannot be read"), ("drift default.csv", "no column panel"),
    ("nats default.csv", "give runs of --task pfsa"), ("positions contrast.csv", "each reveal")])
def test_figures_refuse_what_they_cannot_draw(line, says, tmp_path):
    words = [str(HERE / "assets" / word) if word.endswith(".csv") else word for word in line.split()]
    with pytest.raises(UserError) as caught:
        plot.main([*words, "--save", str(tmp_path / "x.png")])
    assert says in str(caught.value) and "\n" not in str(caught.value) and not any(tmp_path.iterdir())


def test_a_reader_may_leave_early():
    """As `python data.py repl --samples 500 | head -1` does."""
    words = [sys.executable, str(HERE / "data.py"), "repl", "--samples", "500"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"sample 0")
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_broken_and_foreign_checkpoints_are_refused(tmp_path):
    go(tmp_path / "runs", "--max-samples", 200)
    good = (only(tmp_path / "runs") / "ckpt.pt").read_bytes()
    torch.save({"model": torch.zeros(3)}, tmp_path / "foreign.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, content in (("cut.pt", good[:len(good) // 2]), ("empty.pt", b""), ("text.pt", b"hello\n")):
        (tmp_path / name).write_bytes(content)
    for path in tmp_path.glob("*.pt"):
        with pytest.raises(UserError, match="cut short"):
            train.main(["--eval", str(path)])


def test_runs_have_folders_of_their_own_however_much_is_set():
    """A name that is too long for a file system ends in a number that depends on all of it."""
    changed = {f.name: 7 * f.default + 1 for f in dataclasses.fields(train.Config) if f.type is not str}
    folders = [train.run_folder(train.Config(**{**changed, "seed": seed})).name for seed in (1, 2, 3)]
    assert len(set(folders)) == 3 and max(map(len, folders)) == 200
    assert train.run_folder(train.Config(seed=3)).name == "deltanet-repl-seed=3"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere"):
        with pytest.raises(UserError, match="choose another folder"):
            train.main([*TINY, "--out", str(out)])


def test_every_setting_has_its_reason():
    assert list(train.HELP) == [f.name for f in dataclasses.fields(train.Config)]
    assert all(len(reason) > 3 for reason in train.HELP.values())
    shown = command(HERE / "train.py", "--help").stdout
    assert all("--" + name.replace("_", "-") in shown for name in train.HELP)


# ----------------------------------------------------------------------------------------------------------
# plot.py and README.md

def test_a_figure_shows_median_and_range_over_seeds():
    x = np.arange(3)
    seeds = [(x, np.array(y)) for y in ([0, 1, 2], [0, 3, 2], [3, 4, 5])] + [(x[:2], np.array([1, 1]))]
    figure = plot.lines({"model": seeds}, "x", "y", "title", 0.5)
    [axes] = figure.axes
    assert axes.lines[0].get_ydata().tolist() == [0.5, 2, 2]              # of 0 0 3 1, of 1 3 4 1, of 2 2 5 1
    band = axes.collections[0].get_paths()[0].vertices
    assert {(x, y) for x, y in band} >= {(0, 0), (0, 3), (1, 1), (1, 4), (2, 1), (2, 5)}


def write_run(folder, accuracy, spacing=1, rows=(), until=None, **settings):
    """Leave a finished run, as train.py does, without training one."""
    folder.mkdir()
    row = {"commands": 8, "spacing": spacing, "kind": "", "reveal_acc": accuracy, "final_acc": accuracy}
    result = {"config": dataclasses.asdict(train.Config(**settings)), "seed": settings["seed"], "eval": [row],
              "until": until, "samples": 9000}
    (folder / "result.json").write_text(json.dumps(result))
    with open(folder / "metrics.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerows([["commands", "spacing", "samples", "reveal_acc"], *rows])


def test_the_best_value_of_a_setting_is_chosen_by_the_first_seed(tmp_path):
    for i, (seed, rate, accuracy) in enumerate([(0, 0.1, 0.5), (0, 0.2, 0.8), (1, 0.2, 0.3), (1, 0.1, 0.9)]):
        write_run(tmp_path / str(i), accuracy, seed=seed, learning_rate=rate)
    [runs] = plot.load(sorted(tmp_path.iterdir()), "learning_rate").values()
    assert [(run["seed"], run["config"]["learning_rate"]) for run, _ in runs] == [(0, 0.2), (1, 0.2)]
    assert len(plot.load(sorted(tmp_path.iterdir()), None)) == 2
    with pytest.raises(UserError, match="choose one of"):
        plot.load(tmp_path.iterdir(), "lr")


def test_samples_to_perfect_are_drawn_over_the_length_and_hollow_where_most_seeds_fail(tmp_path):
    for i, (length, weight, seed, until) in enumerate([
            (8, 1, 0, 100), (8, 1, 1, 300), (8, 1, 2, None), (16, 1, 0, 2000), (8, 0, 0, None)]):
        write_run(tmp_path / str(i), 0, until=until, task="parity", seed=seed, state_weight=weight,
                  curriculum=f"2 {length}")
    groups = plot.load(sorted(tmp_path.iterdir()), None, plot.OVER["samples"])
    assert list(groups) == ["deltanet", "deltanet, state_weight 0"]
    [axes] = plot.samples(groups, None).axes
    told, untold, hollow = axes.lines
    assert told.get_ydata().tolist() == [300, 2000] and untold.get_ydata().tolist() == [9000]
    assert hollow.get_ydata() == [9000] and hollow.get_markerfacecolor() == "white"


def test_a_table_draws_what_its_runs_drew(tmp_path):
    """Runs -> CSV -> runs: the same groups, the same numbers, and a command that means the same settings."""
    task = ["--task", "pfsa", "--n-vars", "2", "--curriculum", "2x2", "--stage-samples", "64"]
    small = ["--warmup", "0", "--cooldown", "0", "--d-model", "16", "--eval-samples", "4"]
    small += ["--out", str(tmp_path / "runs")]
    assert train.main([*task, *small, "--seed", "0,1", "--learning-rate", "1e-3,0.02"]) == 0
    assert train.main(["--curriculum", "8x1 4x2", "--stage-samples", "64", *small]) == 0
    folders, path = sorted((tmp_path / "runs").iterdir()), tmp_path / "runs.csv"
    assert plot.main(["table", *map(str, folders), "--save", str(path)]) == 0
    before, after = plot.load(folders, None), plot.load([path], None)
    assert list(before) == list(after) and sum(map(len, after.values())) == 5
    for runs, same in zip(before.values(), after.values()):
        for (a, _), (b, _) in zip(runs, same):
            for name in a["config"].keys() - train.BESIDE_THE_POINT:
                assert a["config"][name] == b["config"][name]
            assert [a[k] for k in ("seed", "params", "samples", "until", "best", "to_98")] == [
                b[k] for k in ("seed", "params", "samples", "until", "best", "to_98")]
            for x, y in zip(a["eval"], b["eval"]):
                assert x.keys() == y.keys() and train.stage_of(x) == train.stage_of(y)
                assert len(x["by_reveal"]) == (len(y["by_reveal"]) or 17)     # more than 16 are left out
                for k in x.keys() - {"kind"} - (set() if y["by_reveal"] else {"by_reveal"}):
                    assert np.allclose(x[k], y[k], rtol=1e-3, atol=1e-5)
    with pytest.raises(UserError, match="no column command"):
        plot.load([tmp_path / "runs" / folders[0].name / "metrics.csv"], None)


def drawn(figure):
    """All numbers that a figure shows, and its words."""
    numbers, words = [], []
    for axes in figure.axes:
        numbers += [x for line in axes.lines for x in np.ravel(line.get_ydata())]
        numbers += [bar.get_height() for bar in axes.patches]
        numbers += [x for image in axes.images for x in np.ravel(image.get_array())]
        words += [text.get_text() for text in axes.texts] + [axes.get_title()]
        words += [text.get_text() for text in (axes.get_legend().texts if axes.get_legend() else [])]
    return numbers, words


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Every README figure, remade from a copy of the committed CSVs: {name: Figure}, and the seconds."""
    here, there, found = os.getcwd(), tmp_path_factory.mktemp("all"), {}
    (there / "assets").mkdir()
    for path in (HERE / "assets").glob("*.csv"):
        (there / "assets" / path.name).write_bytes(path.read_bytes())
    save, plot.plt.Figure.savefig = plot.plt.Figure.savefig, lambda figure, path, **_: found.update(
        {Path(path).name: figure})
    started = time.perf_counter()
    try:
        os.chdir(there)
        assert plot.main(["--all"]) == 0
    finally:
        os.chdir(here)
        plot.plt.Figure.savefig = save
    return found, time.perf_counter() - started


def test_all_remakes_every_figure_of_the_readme_in_a_minute(figures):
    found, seconds = figures
    shown = re.findall(r"!\[.+?\]\(assets/(.+?)\)", (HERE / "README.md").read_text())
    assert sorted(found) == sorted(shown) == sorted(path.name for path in (HERE / "assets").glob("*.png"))
    assert seconds < 60


def test_every_figure_says_what_it_shows_and_reads_in_grey(figures):
    for name, figure in figures[0].items():
        for axes in figure.axes:
            table = bool(axes.images)
            assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title(), name
            legend = axes.get_legend() or figure.axes[-1].get_legend()    # the last panel's, for all
            assert table or legend or len(axes.lines) == 0, name
            named = [line for line in axes.lines if line.get_label()[0] != "_"]
            assert len({(line.get_linestyle(), line.get_marker()) for line in named}) == len(named), name
            for text in axes.texts if table else []:                      # dark on light, light on dark
                x, y = map(round, text.get_position())
                shade = axes.images[0].to_rgba(axes.images[0].get_array())[y, x, :3]
                light = shade @ [0.3, 0.59, 0.11]
                assert abs(light - (text.get_color() == "white")) > 0.4, (name, text.get_text())
        words = " ".join([*drawn(figure)[1], *(axes.get_xlabel() for axes in figure.axes)])
        words += " ".join(text.get_text() for text in figure.texts)
        assert re.search("chance|exact|median|floor|not reached", words), name


def test_figures_are_drawn_from_the_numbers_of_their_csv(tmp_path):
    """Each accuracy and each measured number made 0.1234: now that is what all figures show."""
    for line in plot.ALL:
        figure, *rest = line.split()
        paths = [word for word in rest if word.startswith("assets/") and word.endswith(".csv")]
        for path in paths:
            with open(HERE / path, newline="") as file:
                rows = list(csv.DictReader(file))
            fake = {"reveal_acc", "final_acc", "kl", "y", "until", "samples"} & set(rows[0])
            for row in rows:
                row.update({k: "1234" if k in ("until", "samples") else "0.1234" for k in fake if row[k]})
                if row.get("by_reveal"):
                    row["by_reveal"] = " ".join(["0.1234"] * len(row["by_reveal"].split()))
            with open(tmp_path / "fake.csv", "w", newline="") as file:
                table = csv.DictWriter(file, rows[0])
                table.writeheader()
                table.writerows(rows)
            options = dict(zip(rest[1::2], rest[2::2]))
            if figure in plot.MEASURED:
                numbers, _ = drawn(plot.MEASURED[figure][1](plot.read_csv(tmp_path / "fake.csv", "panel")))
            else:
                groups = plot.load([tmp_path / "fake.csv"], options.get("--best"), plot.OVER.get(figure, ()))
                numbers, _ = drawn(plot.FIGURES[figure](groups, options.get("--at")))
            same = np.isclose(numbers, 1234) | np.isclose(numbers, 0.1234)
            assert same.sum() >= 3 and (~same).sum() <= 4, (figure, numbers)  # of chance, median


def test_accuracy_at_a_budget_is_drawn_beside_the_commonest_answer(tmp_path):
    for i, (length, digits, seed, right) in enumerate([
            (4, 1, 0, 0.5), (6, 1, 0, 0.2), (4, 1, 1, 0.7), (6, 1, 1, 0.4), (4, 2, 0, 0.1), (6, 2, 0, 0.1)]):
        write_run(tmp_path / str(i), right, task="arith", seed=seed, digits=digits, curriculum=str(length))
    one, two = plot.budget(plot.load(sorted(tmp_path.iterdir()), None, plot.OVER["budget"]), None).axes
    for axes, middle in ((one, [0.6, 0.3]), (two, [0.1, 0.1])):
        model, commonest = axes.lines
        assert model.get_xdata().tolist() == [4, 6] and np.allclose(model.get_ydata(), middle)
        assert 0.01 < commonest.get_ydata().min() and commonest.get_ydata().max() < 0.2


def test_the_ladder_has_a_column_a_group_easiest_first(tmp_path):
    for i, (model, group, seed, right) in enumerate([
            ("lstm", "S3", 0, 0.9), ("lstm", "S3", 1, 1.0), ("ssm", "S3", 0, 0.2), ("lstm", "Z2", 0, 0.8),
            ("ssm", "Z2", 0, 1.0), ("ssm", "A5", 0, 0.02)]):
        write_run(tmp_path / str(i), right, task="group", model=model, group=group, seed=seed)
    [axes] = plot.ladder(plot.load(sorted(tmp_path.iterdir()), None, plot.OVER["ladder"]), None).axes
    columns, rows = ([tick.get_text() for tick in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis))
    assert columns == ["Z2\n(50.0%)", "S3\n(16.7%)", "A5\n(1.7%)"] and rows == ["lstm", "ssm"]
    assert np.allclose(axes.images[0].get_array().filled(-1), [[0.8, 0.95, -1], [1.0, 0.2, 0.02]])


def test_spacing_is_drawn_where_each_run_was_trained(tmp_path):
    for i, (S, seed, right) in enumerate([(1, 0, 0.9), (4, 0, 0.5), (4, 1, 0.3), (1, 1, 0.7)]):
        write_run(tmp_path / str(i), right, S, seed=seed, curriculum=f"8x{S}")
    [axes] = plot.spacing(plot.load(sorted(tmp_path.iterdir()), None, plot.OVER["spacing"]), None).axes
    model, chance = axes.lines
    assert model.get_xdata().tolist() == [1, 4] and np.allclose(model.get_ydata(), [0.8, 0.4])
    assert chance.get_ydata() == [0.2, 0.2]


def test_the_commonest_answer_is_counted_from_the_text():
    task = data.Arith(1)
    programs = texts(task, task.batch(Stage(4, 1), 1000, 0, "test", 0))
    said = Counter(text.split("== ")[1].rstrip("\n\0") for text in programs)
    assert task.commonest(4, 1000) == max(said.values()) / 1000 == said["0"] / 1000


def test_lengths_are_counted_in_each_file(tmp_path):
    rows = [row for row, *_ in functions_at_random(50)]
    for name, some in (("one", rows[:20]), ("two", rows[20:])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, some)))
    counted, figure = tmp_path / "lengths.csv", str(tmp_path / "lengths.png")
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert plot.main(["lengths", *files, "--save", str(counted)]) == 0
    assert plot.main(["lengths", str(counted), "--save", figure]) == 0
    drawn = plot.lengths(plot.read_csv(counted, "panel"))
    for axes, some in zip(drawn.axes, (rows[:20], rows[20:])):
        steps = Counter(row["steps"] for row in some)
        assert {bar.get_x() + 0.5: bar.get_height() for bar in axes.patches if bar.get_height()} == steps
    with pytest.raises(UserError, match="no traces; make some"):
        plot.main(["lengths", __file__, "--save", str(tmp_path / "x.png")])


def test_samples_to_an_accuracy_are_those_of_ten_batches_of_one_stage(tmp_path):
    """Here 8x1 reads 1 from the 5th of 20 batches on, 16x2 never does, 32x4 has 9 batches."""
    stages = [(8, 1)] * 20 + [(16, 2)] * 20 + [(32, 4)] * 9
    right = [i >= 4 for i in range(20)] + [i % 9 > 0 for i in range(20)] + [1] * 9
    rows = [(*stage, 16 * (i + 1), float(x)) for i, (stage, x) in enumerate(zip(stages, right))]
    write_run(tmp_path / "run", 1, rows=rows, seed=0)
    assert plot.samples_to(0.98, tmp_path / "run") == {(8, 1): 16 * 14}


def test_tiles_show_the_median_and_the_range():
    figure, axes = plot.plt.subplots()
    plot.tiles(axes, {("a", "x"): [0.5, 1.0, 0.25], ("b", "y"): [0.75]}, ["a", "b"], ["x", "y"])
    assert [text.get_text() for text in axes.texts] == ["50\n25 to 100", "75"]
    assert axes.images[0].get_array().tolist()[0][0] == 0.5


def linear_rnn():
    """A task, an untrained model of one layer whose head prefers digits, and relabelled traces in float64."""
    task, lm = Repl(4), build("deltanet", n_layer=1).double()
    torch.nn.init.normal_(lm.head.weight[ord("1"):ord("5")])
    return task, lm, *plot.relabelled(task.batch(Stage(8, 8), 3, 0, "test", 0), 4)


def test_asking_copies_of_a_state_is_asking_the_model():
    task, lm, tokens, state = linear_rnn()
    right = []
    with torch.no_grad():
        commands = tokens[:, :-14]                                        # all but the print and its answer
        _, held = lm(commands)
        for row, truth in zip(commands.tolist(), state[:, -1].tolist()):
            for i, name in enumerate("abcd"):
                question = task.tokenizer.encode(f">>> print('{name}', {name})\n{name} ")
                hidden, _ = lm(torch.tensor([row + question]))
                right.append(lm.head(hidden[0, -1]).argmax().item() - ord("1") == truth[i])
        score = plot.score_all(lm, task, held, state[:, -1])
    assert 0 < score < 1 and score == pytest.approx(np.mean(right))


def test_a_token_takes_from_the_signal_what_its_reflection_takes():
    """Of the energy e that meets its key, a delta step with beta loses (1 - (1 - beta)^2) e."""
    task, lm, tokens, _ = linear_rnn()
    block = lm.blocks[0]
    with torch.no_grad():
        _, [(conv, S)] = lm(tokens[:, :40])
        noise, signal = plot.split(S, 4)
        assert torch.allclose(noise + signal, S) and signal.view(4, -1).sum(0).abs().max() < 1e-9
        next_token = tokens[:, 40:41]
        lost, beta = plot.tokens_that_lose(lm, 4, next_token, [(conv, S)], 1)
        x = block.norm1(lm.embed(next_token))
        _, k, _, _ = block.mixer.project(x, conv)
        b = block.mixer.beta(x)[:, 0]                                     # (12, 2), the same in relabelings
        met = torch.einsum("bhk,bhkv->bhv", k[:, 0], signal).square().sum(-1)
        expected = ((1 - (1 - b) ** 2) * met).sum() / signal.square().sum()
        assert lost.item() == pytest.approx(expected.item(), rel=1e-5)
        assert beta.item() == pytest.approx(((b * met).sum() / met.sum()).item(), rel=1e-5)


def test_the_linear_readout_finds_what_is_there_and_nothing_else():
    truth = torch.stack([torch.randperm(4) for _ in range(200)]).repeat(4, 1)
    truth = (truth + torch.arange(4).repeat_interleave(200)[:, None]) % 4
    there = F.one_hot(truth, 4).float().flatten(1) @ torch.randn(16, 50)
    assert plot.linear_readout([there], truth, 4) > 0.99
    assert plot.linear_readout([torch.randn(800, 50)], truth, 4) < 0.4


def test_relabelled_traces_run_as_python_says():
    task = Repl(4)
    tokens, state = plot.relabelled(task.batch(Stage(12, 3), 5, 0, "test", 0), 4)
    assert tokens.shape[0] == 20 and len({tuple(row) for row in tokens.tolist()}) == 20
    for row, after in zip(tokens.tolist(), state[:, -1].tolist()):
        held, lines = {}, task.tokenizer.decode(row).splitlines()
        for i, line in enumerate(lines):
            if line.startswith(">>> print"):
                assert lines[i + 1] == f"{line[11]} {held[line[11]]}"
            elif line.startswith(">>> "):
                exec(line[4:], {}, held)
        assert [held[name] - 1 for name in "abcd"] == after


def small_config():
    """Config with defaults so small that a README command runs in a second."""
    changes = dict(warmup=4, cooldown=4, batch_size=4, max_samples=8, d_model=16)
    kinds = [(f.name, f.type, changes.get(f.name, f.default)) for f in dataclasses.fields(train.Config)]
    return dataclasses.make_dataclass("Config", kinds)


def one_of_two_heads():
    """by_hand's model as the second of two heads; what the first does, at random, nobody reads."""
    task = Repl(3)
    lm = models.by_hand(task)                                             # it needs 6 of its 32 rows
    mixer, beta = lm.blocks[0].mixer, torch.nn.Linear(32, 2).requires_grad_(False)
    beta.weight[:], beta.bias[:] = mixer.to_beta.weight * torch.tensor([[0], [1]]), 0
    mixer.n_head, mixer.norm, mixer.to_beta = 2, torch.nn.RMSNorm(16).requires_grad_(False), beta
    mixer.qkv.weight[:] = mixer.qkv.weight.unflatten(0, (3, 2, 16)).flip(1).flatten(0, 2)
    mixer.qkv.weight.unflatten(0, (3, 2, 16))[:, 0].normal_()
    mixer.out.weight[:] = mixer.out.weight.roll(16, 1)
    return task, lm


def test_looking_inside_finds_the_one_head_that_tracks_and_leaves_it_as_it_was(monkeypatch, capsys):
    task, lm = one_of_two_heads()
    cfg, before = train.Config(n_vars=3), copy.deepcopy(lm.state_dict())
    changed = lambda folder, **changes: (dataclasses.replace(cfg, **changes), task, None, lm)
    monkeypatch.setattr(plot, "load_model", changed)
    rows = plot.measure_heads(["a run"], "32x4", traces=8)
    assert "beta" not in vars(lm.blocks[0].mixer)
    assert all(torch.equal(p, before[name]) for name, p in lm.state_dict().items())
    said = {(row["panel"], row["line"], row["x"]): row["y"] for row in rows}
    assert len(said) == len(rows) == 2 + 2 * (20 + 1 + 16 + 1) and said["chance", "none", 0] == 1 / 3
    assert said["scaled", "none", 0] == said["scaled", "1.1", 0] == 1 > said["scaled", "1.2", 0] + 0.2
    text = task.batch(Stage(32, 4), 8, 0, "test", 0).tokens               # beta: names 2, digits 1
    names = ((text >= ord("a")) & (text < ord("d"))).double().mean().item()
    digits = ((text >= ord("1")) & (text < ord("4"))).double().mean().item()
    assert said["beta", "1.2", 1.95] == pytest.approx(names) and said["beta", "1.1", 1.05] == 1
    assert said["mean beta", "1.2", 0] == pytest.approx(2 * names + digits)
    none, *bars = [bar.get_height() for bar in plot.heads(rows).axes[2].patches]
    assert [none, *bars] == [1, 1, said["scaled", "1.2", 0]]
    assert f"the state-tracking head is 1.2; points lost: 1.1 0.0, 1.2 {100 * (1 - bars[1]):.1f}" in \
        capsys.readouterr().out


@pytest.mark.parametrize("costs, said", [
    ([1, 70, 10], "tracking is spread over 2 heads, most in 1.2; points lost: 1.1 1.0, 1.2 70.0, 1.3 10.0"),
    ([1, 70, 0], "the state-tracking head is 1.2; points lost: 1.1 1.0, 1.2 70.0, 1.3 0.0"),
    ([1, 0, 0], "no head's halving costs 2 points; points lost: 1.1 1.0, 1.2 0.0, 1.3 0.0")])
def test_a_head_stands_out_only_if_no_other_costs_two_points(costs, said):
    assert plot.verdict(dict(zip(("1.1", "1.2", "1.3"), costs))) == said


def test_the_share_of_variance_is_that_of_the_singular_values():
    keys = torch.randn(300, 7).double() @ torch.randn(7, 7).double() + 5
    energy = np.linalg.svd(keys.numpy() - keys.numpy().mean(0), compute_uv=False) ** 2
    assert np.allclose(plot.explained(keys), energy.cumsum() / energy.sum())


def machine(n, length, broken=(None, None, None)):
    """A walk by random swaps, executed by Python, but for the entry `broken` (values, swap, wrong values
    after it). -> the values of the variables after each swap, and the swaps."""
    names, rng = "abcdefghi"[:n], random.Random(0)
    held, walk, moves = {name: i for i, name in enumerate(names)}, [], []
    for _ in range(length):
        a, b = sorted(rng.sample(names, 2))
        if (tuple(held.values()), a + b) == broken[:2]:
            held = dict(zip(names, broken[2]))
        else:
            exec(f"{a}, {b} = {b}, {a}", {}, held)
        walk.append(tuple(held.values()))
        moves.append(a + b)
    return walk, moves


@pytest.mark.parametrize("n", [3, 4])
def test_the_automaton_is_found_in_clouds_and_followed_to_the_symmetric_group(n):
    walk, moves = machine(n, 3000)
    x = F.one_hot(torch.tensor(walk), n).float().flatten(1) + 0.1 * torch.randn(3000, n * n)
    states = torch.cdist(x, plot.clouds(torch.cat([x, torch.randn(20, n * n)]))).argmin(1).tolist()
    assert set(states) == set(range(math.factorial(n)))                   # and none for what is in no cloud
    assert len(set(zip(states, walk))) == math.factorial(n)
    table, where, wrong, share = plot.follow([states], [moves], "abcd"[:n])
    assert len(table) == math.factorial(n) * math.comb(n, 2) and not wrong and share == 1
    first = walk[states.index(0)]
    for state, held in zip(states, walk):
        assert all(held["abcd".index(name)] == value for name, value in zip(where[state], first))


def test_an_entry_that_no_swap_makes_is_named():
    """That it leads where two swaps would must not mislead what follows."""
    number = {held: i for i, held in enumerate(itertools.permutations(range(3)))}
    before, move, after = broken = (0, 1, 2), "ab", (1, 2, 0)
    walk, moves = machine(3, 3000, broken)
    _, _, wrong, share = plot.follow([[number[held] for held in walk]], [moves], "abc")
    times = list(zip(walk, moves[1:])).count((before, move))
    assert wrong == [(number[before], move, number[after])] and times > 50
    assert share == pytest.approx(1 - times / 2999)


def test_an_automaton_is_read_from_the_ends_of_commands_alone(monkeypatch, capsys):
    """Here a hidden vector is the state, as Python has it, and nothing at the ends of other lines."""
    task, cfg = Repl(3), train.Config(n_vars=3)

    def read(cfg, model, task, stage, split, device, places):
        for t in range(cfg.eval_samples // cfg.batch_size):
            batch = task.batch(stage, cfg.batch_size, cfg.seed, split, t)
            yield batch, F.one_hot(batch.state[places(batch)], 3).float().flatten(1)
    monkeypatch.setattr(plot, "load_model", lambda folder, **changes: (
        dataclasses.replace(cfg, **changes), task, None, None))
    monkeypatch.setattr(plot, "read", read)
    plot.automaton(["a run"], "16x2")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["states  6 of 3! = 6", "steps   100.00% of 3,840 right; of 18 kinds 0 wrong"]
    where = {line[0]: line[2:5] for line in said[2:]}
    for line in said[2:]:                                                 # "0 abc  ab -> 2  ac -> 1  bc -> 4"
        for (a, b), there in re.findall(r"(\w\w) -> (\d)", line):
            assert where[there] == where[line[0]].translate({ord(a): b, ord(b): a})
    with pytest.raises(UserError, match="give one run"):
        plot.automaton(["a run", "another"], "16x2")
    with pytest.raises(UserError, match="one stage"):
        plot.automaton(["a run"], "16x2 8x1")


def readme_commands():
    """The lines of README.md's console blocks that start a file of this project, one shell word list each."""
    calls, array = [], re.compile(r"^(\w+)=\((.*?)\)\n", re.S | re.M)     # of bash: same=(--seed 0,1 ...)
    arrays = {}
    for block in re.findall(r"```(?:bash|console)\n(.*?)```", (HERE / "README.md").read_text(), re.S):
        lines = array.sub("", block)
        arrays.update(array.findall(block))                               # known to later blocks, too
        for name, words in arrays.items():
            lines = lines.replace(f'"${{{name}[@]}}"', " ".join(words.split("\n")))
        calls += [call for line in lines.splitlines() for call in line.split("&&")]
    words = [shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", call), comments=True) for call in calls]
    return [call[1:] for call in words if call and call[0] == "python" and call[1] != "-m"]


@pytest.mark.parametrize("most", [3, pytest.param(None, marks=slow)])
def test_every_readme_command_runs(most, tmp_path, monkeypatch):
    """In the README's order, in one folder, each with all sizes shrunk; by default, the first three."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HERE / "assets", "assets")
    for module in (train, plot):
        monkeypatch.setattr(module, "Config", small_config())
    monkeypatch.setattr(Repl, "beyond", lambda self, last: [Stage(128, 16)])
    monkeypatch.setattr(data.Hidden, "beyond", lambda self, last: [Stage(32, 2), Stage(32, 2, "forced")])
    monkeypatch.setattr(data.Trace, "beyond", lambda self, last: [Stage(16, 8)])
    chosen = data.Trace.chosen
    monkeypatch.setattr(data.Trace, "chosen", lambda self, *which: chosen(self, *which) or self.rows[:2])
    rng = random.Random(0)                                                # what a user would bring
    calls = [dict(zip(("code", "input"), data.random_function(rng)), id=f"call_{i}") for i in range(60)]
    Path("cruxeval.jsonl").write_text("\n".join(map(json.dumps, calls)))
    Path("said.jsonl").write_text('{"id": "call_0/output/trace", "completion": "1"}')
    monkeypatch.setattr(sys, "stdin", io.StringIO("print('a', a)\n"))
    monkeypatch.setattr(train, "total_samples", lambda cfg, stages: 8)
    honest = train.evaluate
    few = lambda cfg, *rest: honest(dataclasses.replace(cfg, eval_samples=2), *rest)
    monkeypatch.setattr(train, "evaluate", few)

    def short(text, task):
        return [Stage(min(L, 128), min(S, 16), moved) for L, S, moved in parse_stages(text, task)]
    monkeypatch.setattr(train, "parse_stages", short)
    monkeypatch.setattr(plot, "parse_stages", short)
    for look in (plot.measure_drift, plot.measure_heads, plot.automaton):
        monkeypatch.setattr(look, "__defaults__", (8,))                   # traces
    monkeypatch.setattr(kernels, "median_ms", lambda f, runs: (f(), 1.0)[1])
    monkeypatch.setattr(kernels.check, "__defaults__", (16, 16, (17,)))   # K, V, lengths
    commands, modules = readme_commands(), (data, kernels, models, pfsa, plot, train)
    files = {f"{module.__name__}.py": module for module in modules}
    assert {words[0] for words in commands} == set(files)
    for name, *args in commands[:most]:
        args = [word for arg in args for word in (sorted(glob.glob(arg)) or [arg])]  # as a shell does
        if "--functions" in args:
            args[args.index("--functions") + 1] = "100"
        trained = 2 if "--seed" in args or "pfsa" not in args else 99     # pfsa: some are evaluated later
        for flag, first in (("--seed", 2), ("--learning-rate", 1), ("--model", trained), ("--curriculum", 2)):
            for i in (i for i, arg in enumerate(args) if arg == flag):
                args[i + 1] = ",".join(args[i + 1].split(",")[:first])
        for flag in ("--warmup", "--cooldown"):                           # too long for 8 traces
            if flag in args:
                del args[args.index(flag):args.index(flag) + 2]
        if args == ["--help"]:
            with pytest.raises(SystemExit):
                files[name].main(args)
        elif name in ("kernels.py", "models.py", "pfsa.py"):
            files[name].main()
        else:
            assert files[name].main(args) == 0, (name, args)


def sections():
    """README.md in pieces -> (heading, text) of each."""
    pieces = re.split(r"^#+ (.*)\n", (HERE / "README.md").read_text(), flags=re.M)
    return zip(pieces[1::2], pieces[2::2])


@functools.cache
def numbers_of(path):
    """-> {model: the numbers that a CSV says of it}: its cells, settings and numbers of seeds, and, of runs
    that differ in their seed only, medians, all as they are and as percentages; "": what was measured."""
    measured = {*plot.COST, *plot.SCORE, *plot.NATS, "to_98", "y"}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    found, alike = {}, {}
    for row in rows:
        words = shlex.split(row.get("command", "")) if "commands" in row else []
        settings = dict(zip(words[::2], words[1::2]))
        settings.pop("--seed", None)
        settings.setdefault("--learning-rate", str(train.Config.learning_rate))
        run, model = tuple(settings.items()), settings.get("--model", "deltanet") if "commands" in row else ""
        for name, text in row.items():
            for word in (" ".join(settings.values()) if name == "command" else text.replace(",", "")).split():
                with contextlib.suppress(ValueError):
                    x = float(word)
                    for pool in [model, ""] if name in measured else [model]:
                        found.setdefault(pool, set()).update((x, 100 * x))
                    where = [row.get(k) for k in ("commands", "spacing", "kind")]
                    alike.setdefault((model, run, *where, name), []).append(x)
    for (model, *_, name), values in alike.items():
        middle = float(np.median(values))
        found[model].update((middle, 100 * middle, len(values)))
        found[""].update((middle, 100 * middle) if name in measured else ())
    return found


def numbers_without_a_source():
    """Measured numbers of the README, those of tables and those with a unit, -> those that are, rounded as
    they are there, in no CSV that their section names, and in no row of said.csv of this section."""
    said = {}
    with open(HERE / "assets" / "said.csv", newline="") as file:
        for row in csv.DictReader(file):
            numbers = row["numbers"].replace(",", "").split()
            said.setdefault(row["section"], set()).update(map(float, numbers))
    for heading, text in sections():
        known = [numbers_of(HERE / "assets" / name) for name in re.findall(r"assets/(\w+\.csv)", text)]
        text = re.sub(r"```(.|\n)*?```|^\|.*\n\|-.*\n", "", text, flags=re.M)  # no code, no heads of tables
        for line in text.splitlines() if heading != "Reading order" else []:
            name = re.match(r"\| (?!P\d:)(\w+(?:\+\w+)?)", line)
            cells = line.split("|")[2:] if line[0:1] == "|" else []
            unit = r" ?(?:%|s\b|ms\b|nats|minutes|points|GiB)"              # settings have other ones
            found = re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", " ".join(cells)) if cells and name else []
            found = found or re.findall(rf"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?={unit})", line)
            for word in found:
                x, digits = float(word.rstrip(",").replace(",", "")), len(word.rstrip(",").partition(".")[2])
                near = 0.5 * 10 ** -digits + 1e-6
                pools = [pool.get(name[1] if cells and name else "", pool[""]) for pool in known]
                there = x in said.get(heading, ()) or any(abs(x - y) <= near for pool in pools for y in pool)
                if not there:
                    yield heading, word, line


def test_every_number_of_the_readme_is_in_a_committed_csv(monkeypatch):
    assert list(numbers_without_a_source()) == []
    text = "see assets/default.csv\n| model | right |\n|---|---|\n| deltanet | 99.4 % and 87.6 % |\nin 12.3 s"
    monkeypatch.setattr(sys.modules[__name__], "sections", lambda: [("Measured", text)])
    assert [number for _, number, _ in numbers_without_a_source()] == ["87.6", "12.3"]


def test_the_trace_in_the_readme_is_what_its_command_prints(capsys):
    [words] = [words for words in readme_commands() if words[:2] == ["data.py", "repl"]]
    data.main(words[1:])
    assert f"```\n{capsys.readouterr().out.strip()}\n```" in (HERE / "README.md").read_text()


def snippets():
    return re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)


def test_the_readmes_deltanet_by_hand_prints_what_it_says(capsys):
    [code] = [code for code in snippets() if "by_hand" in code]
    exec(code, {})
    assert capsys.readouterr().out.strip() == "tensor(1.)" and "# tensor(1.)" in code


def test_the_readmes_own_mixer_works(monkeypatch):
    [code] = [code for code in snippets() if "by_hand" not in code]
    assert len(code.splitlines()) <= 15
    scope = dict(vars(models))
    exec(code, scope)
    monkeypatch.setitem(models.MIXERS, "mean", scope["Mean"])
    for model in ("mean", "deltanet+mean"):
        agrees_with_itself(build(model))


def test_every_csv_and_every_link_of_the_readme_is_there():
    text = (HERE / "README.md").read_text()
    named = set(re.findall(r"assets/([\w.]+\.(?:csv|png))", text)) | {"filters.png"}
    assert named == {path.name for path in (HERE / "assets").iterdir()}
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading, _ in sections()}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= anchors
    assert all((HERE / path).exists() for path in re.findall(r"\]\(([\w/]+\.\w+)\)", text))


def test_the_first_command_is_within_120_words():
    text = (HERE / "README.md").read_text()
    assert len(text[:text.index("python train.py")].split()) <= 120
