"""
The claims, as code. The name of a test says what it tests, then what is claimed of it. The claim is checked against
something else: a float64 loop, brute force, a real Python interpreter, finite differences, a killed process.

    python -m pytest -q -n 2 test_all.py            70 to 90 seconds on two cores
    python -m pytest -q -n 2 -m slow test_all.py    130 more
"""
import __future__
import ast
import contextlib
import copy
import dataclasses
import doctest
import functools
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, fields
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # tensors are tiny here: a second thread costs more than it brings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils.data import DataLoader, Dataset

if not torch.cuda.is_available():                # without a GPU, kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import data
import kernels
import models
import pfsa
import plot
import train
from data import (GROUPS, PAD, Arith, Group, Inverse, ListPerm, Parity, Repl, Stage, Tokenizer,
                  parse_stages)
from kernels import LOG_MIN, compare, decay_scan, delta_rule, errors, row_swaps
from train import Config

HERE = Path(__file__).parent
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)  # no file to register `slow` in
slow, CPU = pytest.mark.slow, torch.device("cpu")


@pytest.fixture(autouse=True)
def seed_torch():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def start_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plot.plt.close("all")


@pytest.fixture(autouse=True)
def skip_slow_tests_without_m(request):
    if request.node.get_closest_marker("slow") and not request.config.getoption("markexpr"):
        pytest.skip("slow: run with -m slow")


def command(*args, **kwargs):
    """Run a file of this project as a user would."""
    words = [sys.executable, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, **kwargs)


MAINS = {f"{module.__name__}.py": module.main for module in (data, kernels, models, pfsa, plot, train)}


def refused(capsys, *args, main=train.main):
    """-> the one line with which `main` refuses these arguments, with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, args)))
    shown = capsys.readouterr()
    assert caught.value.code == 2 and shown.err.count("\n") == 1 and "error: " in shown.err, shown.err
    return shown.err


# ----------------------------------------------------------------------------------------------------------
# data.py: the tokenizer

def test_tokenizer_keeps_every_string():
    tokenizer, rng = Tokenizer(), random.Random(0)
    pieces = [*data.LEXEMES, *map(chr, range(256)), "→", "🙂", "\ud83d", "\ude00", "\udc80", ">>"]
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randrange(30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xFF, ord("a")]) == "\ufffda"                # no UTF-8, as a model may produce
    assert len(tokenizer.encode(">>> a, b, c, d, e = c, e, b, a, d\n")) == 21


@pytest.mark.parametrize("kind, n_vars, moves, states", [*itertools.product(
    [Repl, Inverse], range(2, 10), ["perm", "swap"], ["none", "text"])])
def test_tokenizer_of_a_task_splits_its_texts_as_the_full_one_does(kind, n_vars, moves, states):
    """A task's own vocabulary splits its texts as the 256 bytes and all lexemes do, and refuses other characters."""
    task, everything, rng = kind(n_vars, moves, states=states), Tokenizer(), random.Random(0)
    for split in ("train", "test"):
        text = "".join(line.text for line in task.draw(rng, Stage(64, 2), split))
        ids = task.tokenizer.encode(text)
        assert task.tokenizer.decode(ids) == text
        assert [task.tokenizer.pieces[i] for i in ids] == [everything.pieces[i] for i in everything.encode(text)]
    with pytest.raises(data.BadInput, match="`characters`"):
        task.tokenizer.encode("a @ b")


# ----------------------------------------------------------------------------------------------------------
# data.py: traces

class Clock(data.Task):
    """A task of your own is a dozen lines."""
    n_slots, n_classes = 1, 5

    def program(self, rng, stage, memory):
        yield "c = 0"
        for _ in range(stage.length):
            yield f"c = (c + {rng.randrange(1, 5)}) % 5"
        yield f"assert c == {memory['c']}"

    def slots(self, memory):
        return [memory["c"]]


KINDS = [(Repl, {"n_vars": 9, "moves": "swap"}, "9x4"), (Repl, {}, "8x2"), (Parity, {}, "9"),
         (ListPerm, {"n_vars": 4}, "6:2"), (Arith, {"digits": 3}, "40:3"), (Clock, {}, "6"),
         (data.Trace, {}, "8:4")]
SLOTS = {Repl: lambda task, memory: [memory.get(name, 0) - 1 for name in task.names],
         Parity: lambda task, memory: [memory["p"]], Clock: lambda task, memory: [memory["c"]],
         ListPerm: lambda task, memory: [x - 1 for x in memory["a"]]}     # the classes of a state, by hand


def make(task, stage, size, split="train", seed=0):
    """-> a batch, and its traces' texts."""
    [stage] = parse_stages(stage)
    batch = task.batch(seed, split, stage, 0, size)
    return batch, [task.tokenizer.decode(row).rstrip("\0") for row in batch.tokens]


@pytest.mark.parametrize("kind, settings, stage", KINDS)
def test_draw_makes_traces_that_say_what_a_python_interpreter_prints(kind, settings, stage):
    """At its prompt. If an assert does not hold, it says AssertionError."""
    task, typed, shown = kind(**settings), [], []
    for line in "".join(make(task, stage, 100)[1]).splitlines(keepends=True):
        source = line.removeprefix(task.prompt)
        (shown if task.prompt and source == line else typed).append(source)
    shell = subprocess.run([sys.executable, "-i", "-q"], input="".join(typed), capture_output=True, text=True)
    assert "Error" not in shell.stderr
    assert shell.stdout == "".join(shown) and (len(shown) >= 200) == (kind is Repl)


def execute(task, text):
    """Run a trace. Yield its lines, the source of each ("" if it was printed), and memory after it."""
    memory = {}
    for line in text.splitlines(keepends=True):
        source = line.removeprefix(task.prompt) if line.startswith(task.prompt) else ""
        if not source.startswith("print"):
            exec(source, memory)
        yield line, source, {name: x for name, x in memory.items() if isinstance(x, (int, list))}


@pytest.mark.parametrize("kind, settings, stage", KINDS)
def test_to_batch_shifts_targets_and_marks_answers_and_line_ends(kind, settings, stage):
    task = kind(states="none", **settings)
    batch, texts = make(task, stage, 30)
    assert batch.state is batch.state_tokens is None and not batch.state_in_text.any()
    assert (batch.target[:, :-1] == batch.tokens[:, 1:]).all() and not batch.target[:, -1].any()
    for tokens, target, asked, ends, text in zip(*batch[:3], batch.line_end, texts):
        said = re.findall(r"assert .* == (.*\n)" if task.one_answer else r"(?:^\w|==) (\d)$", text, re.M)
        said = said[1:] if kind is Repl else said                             # its first print is a look-up
        assert said and task.tokenizer.decode(target[asked]) == "".join(said)
        lines = text.splitlines(keepends=True)
        assert [task.tokenizer.decode(tokens[:end + 1]) for end in ends.nonzero()[0]] == [
            "".join(lines[:i + 1]) for i in range(len(lines))]


@pytest.mark.parametrize("kind, settings, stage", KINDS)
def test_to_batch_has_the_states_that_python_holds_after_each_line(kind, settings, stage):
    """As text for a state head, as a comment in the trace, as classes; of the same programs."""
    task = kind(**settings)
    assert task.states == ("linear" if kind in SLOTS else "none")         # auto
    spoken, texts = make(kind(states="transformer", **settings), stage, 30)
    in_text, commented = make(kind(states="text", **settings), stage, 30)
    linear = make(kind(states="linear", **settings), stage, 30)[0] if kind in SLOTS else None
    for b, text in enumerate(texts):
        said, read, ends = [], [], spoken.line_end[b].nonzero()[0]
        for i, (line, source, memory) in enumerate(execute(task, text)):
            state = ", ".join(f"{name}={x}" for name, x in memory.items())
            said.append(state + "\n")
            assigns = source and not source.startswith(("print", "assert"))
            read.append(f"{line[:-1]}  # {state}\n" if assigns else line)
            assert not linear or linear.state[b, ends[i]].tolist() == SLOTS[kind](task, memory)
        told = [task.tokenizer.decode(row).rstrip("\0") for row in spoken.state_tokens[b] if any(row)]
        assert told == said[:-1] if kind is data.Trace else told == said  # no state after its assert
        assert commented[b] == "".join(read)
        told = task.tokenizer.decode(in_text.target[b][in_text.state_in_text[b]])
        assert told == "".join(re.findall("  # (.*\n)", commented[b])) and told
    assert not linear or (linear.state[~linear.line_end] == -1).all()


@pytest.mark.parametrize("kind, line", [(Repl, r"print\('(\w)', \1\)\n\1 \d\n"),
                                        (Inverse, r"if \w != (\d): exit\(\)\n>>> print\(\1, .*\n\1 \w\n")])
def test_repl_and_inverse_print_once_before_the_first_command(kind, line):
    """As in P1's figure, and then after every S-th. That print asks for nothing."""
    task = kind(3)
    start = len([*task.start(random.Random(0), {})])
    batch, texts = make(task, "6x2", 50)
    for text, asked, tokens in zip(texts, batch.asked, batch.tokens):
        a_print, command = f">>> {line}", r">>> \w, \w, \w = \w, \w, \w\n"
        lines = text.splitlines(keepends=True)
        prints = re.findall(a_print, text)
        assert len(prints) == 4 and asked.sum() == 3
        assert re.match(a_print, "".join(lines[start:]))
        first = re.search(command, "".join(lines[1:])).start() + len(lines[0])
        before = len(task.tokenizer.encode(text[:first]))
        assert text[:first].count("print(") == 1 and not asked[:before].any()


@pytest.mark.parametrize("moves", ["swap", "perm"])
def test_inverse_answers_follow_from_the_lines_before_them(moves):
    """All starts that run through the lines so far agree on answer and state."""
    task = Inverse(n_vars=3, moves=moves)
    for i in range(30):
        worlds = [{"start": list(x), "exit": sys.exit} for x in itertools.permutations((1, 2, 3))]
        answers = []
        for line in task.draw(random.Random(i), Stage(9, 3), "train"):
            if not line.source:
                assert printed == {line.text}
                answers.append(line.answer)
                continue
            survivors, printed = [], set()
            for world in worlds:
                with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
                    exec(line.source, world)
                    survivors.append(world)
                    printed.add(out.getvalue())
                    assert line.state == [world["start"].index(world[name]) for name in "abc"]
            worlds = survivors
        assert answers[0] == "" and len(answers[1:]) == 3 and {*answers[1:]} <= {*"abc"}


@pytest.mark.parametrize("task, stage, programs", [
    (Parity(states="none"), "6", 64), (Parity(states="text"), "6", 64), (Repl(3, "swap"), "1x1", 162),
    (Repl(2), "2x2", 32), (ListPerm(3), "2", 54), (Group("S3"), "3", 216)])
def test_is_test_divides_all_programs_between_training_and_test(task, stage, programs):
    """Where there are so few programs that every one is drawn."""
    train = set(make(task, stage, 2000, "train")[1])
    test = set(make(task, stage, 600, "test")[1])
    assert not train & test
    assert len(train) > 2 * len(test) > 0 and len(train | test) == programs


def test_is_test_holds_out_an_eighth_of_all_programs_and_always_the_same():
    held_out = [i for i in range(20_000) if data.is_test(f"p = {i}")]
    assert len(held_out) / 20_000 == pytest.approx(1 / 8, abs=0.007)      # three standard deviations
    assert held_out[:5] == [6, 7, 11, 23, 24]                             # else published numbers are of other traces


def test_spans_takes_the_end_of_a_line_in_which_the_answer_stands_twice():
    line = data.Line("", "7 = 7\n", "7")
    assert Repl().spans(line) == [("7 = ", 0), ("7", data.ASKED), ("\n", 0)]
    assert Parity().spans(line) == [("7 = ", 0), ("7\n", data.ASKED), ("", 0)]


class Numbered(Dataset):
    def __init__(self, task, stage):
        self.task, [self.stage] = task, parse_stages(stage)

    def __getitem__(self, t):
        return self.task.batch(7, "train", self.stage, t, 4)


def test_is_test_holds_out_parities_whose_bits_satisfy_no_equation():
    """A CRC is linear, as parity is: if it chose test programs, a few bits would decide their answers."""
    _, texts = make(Parity(), "16", 200, "test")
    first, *others = [int("".join(re.findall(r"= (\d)", text)[:16]), 2) for text in texts]
    basis = []                                                            # of the differences, over GF(2)
    for x in others:
        x ^= first
        for y in basis:
            x = min(x, x ^ y)
        basis += [x] if x else []
    assert len(basis) == 16


def test_data_needs_no_torch():
    code = "import sys, data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE).returncode == 0


@pytest.mark.parametrize("task, stage", [(Repl(), "8x1"), (Arith(), "4:2"), (Group(), "8")])
def test_batch_is_a_pure_function_also_in_worker_processes(task, stage):
    numbers, data_set = [5, 0, 3], Numbered(task, stage)
    first = [data_set[t] for t in numbers]
    again = DataLoader(Numbered(type(task)(), stage), batch_size=None, sampler=numbers, num_workers=2)
    for here, there in zip(first, again, strict=True):
        for x, y in zip(here, there):
            assert x is y is None or np.array_equal(x, y.numpy())
    for seed, split, t in ((8, "train", 5), (7, "test", 5), (7, "train", 6)):
        other = task.batch(seed, split, data_set.stage, t, 4)
        assert not np.array_equal(other.tokens, first[0].tokens)


# ----------------------------------------------------------------------------------------------------------
# data.py: what is drawn, and how often

def assert_uniform(counts, classes):
    """Chi-square with n - 1 degrees of freedom: mean n - 1, standard deviation sqrt(2 (n - 1))."""
    expected = counts.total() / classes
    missing = (classes - len(counts)) * expected
    statistic = sum((count - expected) ** 2 for count in counts.values()) / expected + missing
    assert len(counts) <= classes and statistic < classes + 5 * math.sqrt(2 * classes), counts


@pytest.mark.parametrize("task, stage, pattern, classes", [
    (Repl(5, "swap"), "8x1", r">>> \w, \w = (.*)\n", 10), (Repl(5, "swap"), "8x1", r"print\('(.)'", 5),
    (Repl(5, "swap"), "8x1", r">>> a = (\d)", 5), (Repl(), "8x8", r">>> \w,.* = (.*)\n", 120),
    (ListPerm(4), "8", r"= (a.*)", 6), (ListPerm(4), "8", r"^a = (.*)", 24), (Parity(), "8", r"= (\d)", 2)])
def test_draw_chooses_moves_questions_and_starts_uniformly(task, stage, pattern, classes):
    text = "\n".join(make(task, stage, 1000)[1])
    assert_uniform(Counter(re.findall(pattern, text, re.M)), classes)


def test_arith_needs_every_line_for_its_answer():
    """Backwards from `a`, each line assigns to what a later line needs. P2 appendix C."""
    texts = make(Arith(3), "6", 300)[1]
    assert set(re.findall(" ([+-]) ", "".join(texts))) == {"+", "-"}
    for text in texts:
        first, *lines, _ = text.splitlines()
        needed = {"a"}
        for line in reversed(lines):
            target, *read = re.findall("[a-z]", line)
            needed.remove(target)                                         # a KeyError if nobody needs it
            needed.update(read)
        assert set(re.findall("[a-z]", first)) == needed


def test_stage_with_a_range_has_all_its_lengths_equally_often():
    lengths = Counter(text.count("\n") - 1 for text in make(Parity(), "9:3", 1400)[1])
    assert_uniform(lengths, 7)
    assert set(lengths) == set(range(3, 10))


# ----------------------------------------------------------------------------------------------------------
# data.py: what is refused

@pytest.mark.parametrize("task, stage", [
    *((Repl, stage) for stage in ("8x", "0", "4x8", "8x0", "", "8x1,16x2", "-8x1", "8x1:3")),
    *((Parity, stage) for stage in ("8x2", "8:0", "8:9", "8:x")),
    *((Group, stage) for stage in ("8x2", "8:1", "8:x")),
    (lambda: Repl(2, "swap"), "2x2"),                            # none of its few programs is for test
    (lambda: type("Own", (Clock,), {})(), "8x2:3"),              # a task without kinds of stages
    (lambda: Repl(1), "8"), (lambda: Repl(10), "8"), (lambda: ListPerm(10), "8"),
    (lambda: Arith(0), "4"), (lambda: Arith(states="linear"), "4"), (lambda: Group(states="text"), "4")])
def test_tasks_refuse_bad_stages_and_settings_in_one_line(task, stage):
    with pytest.raises(ValueError) as caught:
        task = task()
        for stage in parse_stages(stage):
            task.check_stage(stage)
            task.batch(0, "test", stage, 0, 1)
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 20


@pytest.mark.parametrize("changes, says", [
    ({"slots": lambda task, memory: [memory["d"]]}, r"Mine.slots: KeyError\('d'\) after the line 'c = 0'"),
    ({"slots": data.Task.slots}, "'NoneType' object is not iterable.* after the line 'c = 0'"),
    ({"slots": lambda task, memory: memory["c"]}, "'int' object is not iterable.* return n_slots = 1 numbers"),
    ({"slots": lambda task, memory: [memory["c"] - 2]}, r"Mine.slots: \[-2\]"),
    ({"slots": lambda task, memory: [memory["c"] and 5]}, r"Mine.slots: \[5\]"),
    ({"slots": lambda task, memory: [memory["c"] + 0.5]}, r"Mine.slots: \[0.5\]"),
    ({"n_slots": 2}, r"Mine.slots: \[0\] .* n_slots = 2 numbers below n_classes = 5, with -1 for slots not set yet"),
    ({"n_classes": 3}, r"Mine.slots: \[[34]\] after the line 'c = \(c . \d\) % 5': .* below n_classes = 3"),
    ({"program": lambda *_: ["c = 0"]}, "Mine.program: traces of one stage have 0 answers: print"),
    ({"program": lambda task, rng, *_: ["c = 0"] + ["print(c)"] * rng.randint(1, 2)}, "have 1 or 2 answ"),
    ({"program": lambda *_: ["c = 0", "print(c)", "print(c)"], "one_answer": True}, "have 2 answers: .* exactly once"),
    ({"program": lambda *_: ["for i in range(3):", "    c = i"]}, "the line 'for i in range.3.:' is not a complete"),
    ({"program": lambda task, rng, *_: ["c = 0", f"print({rng.choice([1, 10])})"]},
     "Mine.program: the answer 10 has several tokens: set one_answer = True")])
def test_task_of_ones_own_that_does_not_fit_is_named_in_one_line(changes, says, monkeypatch):
    monkeypatch.setattr(data, "is_test", lambda program: False)           # as there are few programs
    task = type("Mine", (Clock,), changes)()
    with pytest.raises(ValueError, match=says) as caught:
        task.batch(0, "train", Stage(6), 0, 20)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=says):
        task.chance(Stage(6))                                             # so training stops before its first step


# ----------------------------------------------------------------------------------------------------------
# data.py: groups

ORDERS = {"Z2": 2, "Z60": 60, "S3": 6, "S4": 24, "A5": 60, "S5": 120, "S5swaps": 120, "S4two": 24, "A5two": 60}


@pytest.mark.parametrize("name", GROUPS)
def test_group_has_its_order_and_its_targets_are_products(name):
    """Each element moves points; a product is where they are after all of them, one after the other."""
    task = Group(name)
    assert len(set(task.elements)) == len(task.elements) == ORDERS[name]
    assert (np.sort(task.mul) == np.arange(ORDERS[name])).all()                # in no row is anything twice
    batch, _ = make(task, "40", 30)
    assert batch.tokens.shape == (30, 41)
    assert (batch.tokens[:, 0] == 1).all() and not batch.asked[:, 0].any() and batch.asked[:, 1:].all()
    for word, products in zip(batch.tokens[:, 1:] - 2, batch.target[:, 1:] - 2):
        points = list(range(len(task.elements[0])))
        for element, product in zip(word, products):
            points = [task.elements[element][x] for x in points]
            assert task.elements[product] == tuple(points)
    letters = {task.elements[i] for i in np.unique(batch.tokens[:, 1:] - 2)}
    assert len(letters) == {"S5swaps": 10, "S4two": 2, "A5two": 2}.get(name, ORDERS[name])
    assert name != "S5swaps" or {sum(map(int.__ne__, x, range(5))) for x in letters} == {2}
    assert (batch.line_end == batch.asked).all() and (batch.target[:, 0] == PAD).all()
    assert (batch.state[:, 0] == -1).all() and (batch.state[:, 1:, 0] == batch.target[:, 1:] - 2).all()


def test_group_stage_says_how_many_points_an_element_may_move():
    batch, _ = make(Group("S5"), "16:3", 200)
    assert len(np.unique(batch.tokens[:, 1:])) == 1 + 10 + 20             # identity, transpositions, 3-cycles


# ----------------------------------------------------------------------------------------------------------
# data.py: functions unrolled into traces

def unroll(code, arguments):
    """-> the row, or why there is none."""
    try:
        return data.unroll({"id": 0, "code": code, "input": arguments})
    except data.Rejected as why:
        return str(why)


def settrace_states(row):
    """The locals that sys.settrace sees in the function of a row, without repetitions: {name: value}.

    With one statement a line, a line that follows itself is inside a comprehension: from Python 3.12 on, this
    runs in the function's own frame, with its variables among the function's."""
    called = ast.unparse(ast.parse(row["call"], mode="eval").body.func)    # f, or Solution().method
    source = ast.unparse(ast.parse(row["source"]))                        # one statement a line
    returns = {x.lineno for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Return)}
    scope, seen, lines = {"__name__": "__main__"}, [], [0]
    with contextlib.suppress(SystemExit):                                 # of `if __name__ == "__main__"`
        exec(compile(source, "<function>", "exec"), scope)
    code = inspect.unwrap(eval(called, scope)).__code__

    def see(frame, event, _):
        if frame.f_code is not code:
            return None
        lines.append(frame.f_lineno)
        if event == "line" and lines[-1] != lines[-2] or event == "return" and frame.f_lineno not in returns:
            values = {}
            for name_, value in frame.f_locals.items():
                with contextlib.suppress(ValueError, SyntaxError, TypeError):
                    copy = ast.literal_eval(repr(value))
                    if type(copy) is type(value) and copy == value:
                        values[name_] = copy
            seen.append(values)
        return see

    sys.settrace(see)
    try:
        result = eval(row["call"], scope)
    finally:
        sys.settrace(None)
    assert result == ast.literal_eval(row["output"])
    return [state for state, _ in groupby(filter(None, seen))]


def check(row):
    """A row's states are those of the function, its lines make them, and its assert holds."""
    told = [{name: ast.literal_eval(x) for name, x in state.items()} for state in row["states"]]
    around, lines, last = data.split_trace(row)
    at_events = [state for line, state in zip(lines, told) if not re.match(r"forloop\d+ = iter", line)]
    assert settrace_states(row) == [state for state, _ in groupby(filter(None, at_events))]
    assert "\n".join([*around, *lines, last]) == row["trace"] and len(lines) == len(told)
    assert row["steps"] == len(lines) - (not re.fullmatch(r"\w+\(\)", row["call"])) <= 50
    memory = {"__name__": "__main__"}
    future = __future__.annotations.compiler_flag if "__future__" in row["trace"] else 0
    exec("\n".join(around), memory)
    for line, state in zip(lines, told):
        exec(compile(line, "", "exec", future), memory)
        assert {name: memory[name] for name in state} == state
    exec(last, memory)


# ----------------------------------------------------------------------------------------------------------
# Nasty functions: parameters, arguments, body; then the trace's lines, RIGHT, or a part of why there is none.
# `check` says whether what is RIGHT is right.

RIGHT = "right"
OTHER = "its trace raises AssertionError: other values than in the call"
NASTY = [
    # control flow
    ("", "", "for x in 1, 0, 4:\n    if x == 0: continue\n    break\nelse: x = 9\nreturn x",
     "forloop0 = iter((1, 0, 4))\nx = next(forloop0)\nassert (x) == 1"),
    ("xs", "[[1, 2]]", "for x in xs.pop(): xs.append(x)\nreturn xs", RIGHT),
    ("x", "[1, 2]", "match x:\n    case [a, b]: return a + b", "NameError: name 'a' is not defined"),
    ("x", "1", "import contextlib\nwith contextlib.nullcontext(x) as h: x = h + 1\nreturn x",
     "x = 1\nimport contextlib\nh = (contextlib.nullcontext(x)).__enter__()\nx = h + 1\nassert (x) == 2"),
    ("s", "'ab'",
     "import io\nwith io.StringIO() as h, io.StringIO():\n    h.write(s)\n    t = h.getvalue()\nreturn t", RIGHT),
    ("x", "[]", "class C:\n    def __enter__(self): x.append(1)\n    def __exit__(self, *_): x.append(2)\n"
     "with C() as c: y = 3\nreturn x", OTHER),
    # conditions that change something are lines
    ("xs, n", "[0, 5], 0", "while xs.pop(): n += 1\nreturn n",
     "xs, n = [0, 5], 0\nxs.pop()\nn += 1\nxs.pop()\nassert (n) == 1"),
    ("s", "'abc'", "while (n := len(s)) > 2: s = s[1:]\nif m := n: pass\nreturn m", RIGHT),
    ("xs", "[1, 2]", "it = iter(xs)\nif next(it) > 0: return next(it)",
     "xs = [1, 2]\nit = iter(xs)\nnext(it) > 0\nassert (next(it)) == 2"),
    ("x", "[2, 0]", "import collections\nq, n = collections.deque(x), 0\nwhile q.popleft(): n += 1\nreturn n, len(q)",
     OTHER),                                          # a deque has no literal, so nothing shows that it has changed
    ("x", "'ab'", "import re\nif m := re.search('b', x): return m.start()",
     "x = 'ab'\nimport re\n(m := re.search('b', x))\nassert (m.start()) == 1"),
    # also if some local has no literal; also of a generator
    *[("xs", "[1, 2, 3]", f"{line}\nit = iter(xs)\nif next(it) == 1: pass\nreturn list(it)",
       f"xs = [1, 2, 3]\n{line}\nit = iter(xs)\nnext(it) == 1\nassert (list(it)) == [2, 3]")
      for line in ("import math", "g = lambda x: x", "g = (x for x in xs)", "g = map(lambda x: x, xs)", "g = open('/dev/null')")],
    ("xs", "[1, 2]", "import itertools\nit = map(lambda x: x, itertools.chain(xs, xs))\nif next(it) == 1: return list(it)",
     "xs = [1, 2]\nimport itertools\nit = map(lambda x: x, itertools.chain(xs, xs))\nnext(it) == 1\n"
     "assert (list(it)) == [2, 1, 2]"),
    ("xs", "[1, 2, 3]", "g = (x * x for x in xs)\nif 4 in g: y = next(g)\nreturn y",
     "xs = [1, 2, 3]\ng = (x * x for x in xs)\n4 in g\ny = next(g)\nassert (y) == 9"),
    ("n", "3", "g = (x for x in [n])\nh = [lambda: 1]\nif n > 2 and h: n += 1\nreturn n",
     "n = 3\ng = (x for x in [n])\nh = [lambda: 1]\nn += 1\nassert (n) == 4"),
    # statements, as they were written
    ("x", "1", "a = x; b = 2; a, b = b, a\nif a: c = 1; d = 2\nreturn a; x = 3", RIGHT),
    ("x", "[3]", "if (x and  # each\n        x.pop()): return (x,\n        1)", RIGHT),
    ("", "", "t = '''x\n  y'''\ndef g():\n    u = '''a\nb'''\n    return u\nreturn t + g()", RIGHT),
    ("x", "[]", "x.append(1)", "x = []\nx.append(1)\nassert (None) == None"),
    ("x", "[2]", "'''A docstring.'''\nassert x, 'no'\nimport math\ndel math\nreturn *x, 1", RIGHT),
    ("x", "1", "z: List[int] = x, 2\nw: int\nw = 3\nreturn z", "x = 1\nz = x, 2\nw = 3\nassert (z) == (1, 2)"),
    # exceptions
    ("x", "'a'", "try: y = int(x)\nexcept ValueError as e: y = str(e)\nreturn y", "NameError: name 'e' is not defined"),
    ("", "", "e = 1\ntry: 1 / 0\nexcept ZeroDivisionError as e: pass\nz = 2\nreturn z", OTHER),
    ("x", "0", "return 1 / x", "calling the function raises ZeroDivisionError"),
    ("", "", "try: return 1\nfinally: return 2", "assert (2) == 2"),
    ("x", "0", "while True:\n    try: x += 1\n    except: break\nreturn x", "more than 50 steps"),
    # names and scopes
    ("n", "4", "k = 2\ndef g(x): return x * k\nk = 3\nreturn g(n)", RIGHT),
    ("", "", "def g():\n    global y\n    y = 2\ny = 1\ng()\nreturn y", OTHER),
    ("", "", "def g():\n    global y\n    y = 2\ny = 1\ng()\nz = 0\nreturn z", OTHER),
    ("", "", "def g():\n    global y\n    y = 2\ng()\nz = 0\ny = z\nreturn y", OTHER),
    ("x", "1", "try: return x + 1\nfinally: b = 3", "lines run after the return, in try/finally"),
    ("x", "1", "try: return x + 1\nfinally:\n    try: b = 3\n    except: pass", "lines run after the return"),
    ("", "", "n = 0\ndef g():\n    nonlocal n\n    n += 1\ng()\nreturn n",
     "SyntaxError: no binding for nonlocal 'n' found"),
    ("", "", "x = 3\nreturn sorted(locals())", OTHER),
    ("list", "[1, 2]", "for next in list: iter = next\nfor x in [3, 4]: iter += x\nreturn iter",
     "list = [1, 2]\nforloop0 = iter((list))\nnext = (forloop0).__next__()\niter = next\nnext = (forloop0).__next__()\n"
     "iter = next\nforloop1 = (([3, 4])).__iter__()\nx = (forloop1).__next__()\niter += x\n"
     "x = (forloop1).__next__()\niter += x\nassert (iter) == 9"),
    ("x", "3", "print(x, end='')\nreturn x", RIGHT),
    ("forloop0", "4", "for x in 'a': pass\nreturn forloop0", OTHER),
    ("x", "3", "@(lambda g: x)\ndef y(): pass\nreturn y", RIGHT),
    # values
    ("x", "1", "try: y = 10 ** 9999\nexcept ValueError: y = 0\nreturn y and x", RIGHT),
    ("a, b", "*[[1]] * 2", "a.append(2)\nreturn b", OTHER),
    ("g", "[[0] * 2] * 2", "g[0][0] = 1\nreturn g", "g = [[0] * 2] * 2\ng[0][0] = 1\nassert (g) == [[1, 0], [1, 0]]"),
    ("g", "{1: ([{2}],) * 2}", "g[1][0][0].add(3)\nreturn g", "g = {1: ([{2}],) * 2}\ng[1][0][0].add(3)\n"
     "assert (g) == {1: ([{2, 3}], [{2, 3}])}"),
    ("g", "[(), (), 'a', 'a', 5, 5]", "return len(g)", "g = [(), (), 'a', 'a', 5, 5]\nassert (len(g)) == 6"),
    ("", "", "return set('ba'), {'b': {2, 1}}, (1,), set(), b'x', 1j, -0.0", RIGHT),
    ("x", "[]", "x.append(x)\nreturn x", "the output has no literal"),
    ("", "", "import random\nreturn random.random()", OTHER),
    ("n", "1", "try: y = f(n - 1) if n else 0\nexcept: y = 1\nreturn y", "more than 1 call"),
    ("", "", "return __name__", "assert (__name__) == '__main__'"),
    ("n", "1", "t = True\nif t: n = 2.0\nreturn n", "n = 1\nt = True\nn = 2.0\nassert (n) == 2.0"),
    ("n", "49", "for i in range(n): pass\nreturn n", RIGHT),
    ("n", "50", "for i in range(n): pass\nreturn n", "more than 50 steps"),
    # limits
    ("n", "3", "return 1 if n < 1 else n * f(n - 1)", "more than 1 call"),
    ("x", "'y'", "for i in range(9): x = x * 4\nreturn 1", "more than 12000 characters of state"),
    ("", "", "x = '" + 999 * "y" + "'", "more than 1000 characters of trace"),
    ("n", "2", "yield n", "its output is a generator"),
    ("", "", "return float('nan')", "the output has no literal"),
    # a statement, or no statement, changes something on its way out; nothing of it is seen in the output
    ("xs", "[3]", "try: return xs.pop() / 0\nexcept ZeroDivisionError: return 1", OTHER),
    ("", "", "log = []\ndef g():\n    yield 1\n    log.append(9)\nfor x in g(): z = x\nreturn 1", OTHER),
]
AROUND = [                                            # the same, with all of the source
    ("import math\nK = 3\ndef g(x):\n    return x * K\ndef f(x):\n    return g(x) + math.floor(2.5)\n"
     "print(f(1))", "2",
     "import math\nK = 3\ndef g(x):\n    return x * K\nx = 2\nassert (g(x) + math.floor(2.5)) == 8"),
    ("K = [1]\ndef f(x):\n    global K, M\n    K = K + [x]\n    M = x\n    return K", "2", RIGHT),
    ("K = 1\ndef f(x, y=K, *, z=[]):\n    z.append(x + y)\n    return z\nK = 2\nf(0)\n", "3",
     "K = 1\nK = 2\nx, y, z = 3, 1, [1]\nz.append(x + y)\nassert (z) == [1, 4]"),
    ("K = 1\ndef f(x, y=K, *, z=[]):\n    z.append(x + y)\n    return z\nK = 2\n", "3",
     "K = 1\nK = 2\nx, y, z = 3, 1, []\nz.append(x + y)\nassert (z) == [4]"),
    ("import functools\n@functools.cache\ndef f():\n    x = 1\n    return x", "",
     "import functools\nx = 1\nassert (x) == 1"),
    # an argument line without literals
    ("def f(x, y=float('-inf'), *, none=object()):\n    return y < x is not none", "3",
     "x, y, none = 3, float('-inf'), object()\nassert (y < x is not none) == True"),
    ("def f(xs, key, kind=int, *rest):\n    return max(map(kind, xs), key=key) + len(rest)", "'21', abs, int, max",
     "xs, key, kind, rest = '21', abs, int, (max,)\nassert (max(map(kind, xs), key=key) + len(rest)) == 3"),
    ("def f(*xs, a=0, **k):\n    t = k['key'](xs[0])\n    return t", "-2, a=1, key=abs",
     "a, xs, k = 1, (-2,), {'key': abs}\nt = k['key'](xs[0])\nassert (t) == 2"),
    ("def f(**functions):\n    return len(functions)", "**{'a': len}",
     "functions = {**{'a': len}}\nassert (len(functions)) == 1"),
    ("def f(x):\n    return x()", "*[int]", "SyntaxError: can't use starred expression here"),
    # annotations, modules
    ("from __future__ import annotations\nclass P:\n    def me(self: P) -> P: return self\ndef f(x):\n"
     "    def g(y: Nothing): return y\n    p = P().me()\n    return g(x)", "3", RIGHT),
    ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n    next: 'P' = None\ndef f(x):\n"
     "    p = P(x, P(4))\n    return p.next.x", "3", RIGHT),
    # what stands around it
    ("def g(f):\n    return f + 1\ndef f(x):\n    return g(x)", "1",
     "def g(f):\n    return f + 1\nx = 1\nassert (g(x)) == 2"),
    ("def f(x):\n    return x\nONE = f(1)\nTWO = ONE + 1\ndef main():\n    print(f(2), TWO)\n"
     "if __name__ == '__main__':\n    main()\nK = 5", "3", "name 'ONE' is not defined"),
    ("def f(x):\n    return x\ndef main():\n    return f(3)\nK = 5\nif __name__ == '__main__':\n    exit(main())",
     "3", "def main():\n    return f(3)\nK = 5\nx = 3\nassert (x) == 3"),
    # the module's own calls are real
    ("base = 1\ndef f(x):\n    y = x + base\n    return y - base\nbase = f(4)", "2",
     "other values than in the call, as it leaves out: base = f(4)"),
    ("base = 1\ndef f(x):\n    return x + base\nbase = f(4)", "2", "as it leaves out: base = f(4)"),
    ("class Cache:\n    seen = []\ndef f(n):\n    Cache.seen.append(n)\n    k = len(Cache.seen)\n    return n\n"
     "for i in 1, 2:\n    f(i)", "2", "as it leaves out: for i in (1, 2):"),
    ("base = 1\ndef f(x):\n    return x + base\nif __name__ == '__main__':\n    base = f(4)", "2",
     "as it leaves out: if __name__ == '__main__':"),
    ("log = [0]\ndef f(x):\n    return x + 1\nf(1)\nf(2)\nwhile f(len(log)) < 5: log.append(0)", "2",
     "log = [0]\nx = 2\nassert (x + 1) == 3"),
    ("def g(x):\n    return f(x - 1)\ndef f(x):\n    return x and g(x)", "2", "more than 1 call"),
    ("def label(g):\n    return g.__name__ + '!'\ndef f(n):\n    s = label(f)\n    return s * n", "2",
     "its trace raises NameError: name 'f' is not defined"),
    ("def rows(n):\n    out = []\n    for f in range(n): out.append(f * f)\n    return out\ndef f(n):\n"
     "    xs = rows(n)\n    return xs[-1]", "4", RIGHT),
    ("n = 0\ndef tick():\n    global n\n    n += 1\n    return n\ndef f(k):\n    out = []\n"
     "    while tick() < k: out.append(1)\n    return out + [n]", "3", OTHER),
    ("def f(x):\n    g = [iter(x), (i for i in x)]\n    if next(g[1]) == 1: return list(g[1])", "[1, 2]", OTHER),
    ("def f(x):\n    try:\n        y = 1\n        return y\n    finally: y = 2", "0", "in try/finally"),
    # methods
    ("class Solution:\n    def twice(self, n: int) -> int:\n        m = n + n\n        return m", "Solution().twice(3)",
     "class Solution:\n\n    def twice(self, n: int) -> int:\n        m = n + n\n        return m\nself, n = Solution(), 3\n"
     "m = n + n\nassert (m) == 6"),
    ("class C:\n    def __init__(self, k=2): self.k = k\n    def f2(self):\n        if self.grow(): pass\n"
     "        return self.k\n    def grow(self):\n        self.k += 1\n        return self.k", "C(5).f2()", OTHER),
    ("class A:\n    def get(self):\n        return ()\nclass B:\n    def get(self):\n        return 7", "A().get()",
     "class A:\n\n    def get(self):\n        return ()\nclass B:\n\n    def get(self):\n        return 7\nself = A()\n"
     "assert (()) == ()"),
    ("class A:\n    def go(self, x): return x\nclass B(A):\n    def go(self, x): return super().go(x) + 1", "B().go(2)",
     "its trace raises RuntimeError"),
    ("class P:\n    def get(self): return 5\ndef f(x):\n    return x + 1", "P().get()", "class P:\n\n    def get(self):\n"
     "        return 5\nx = 5\nassert (x + 1) == 6"),
    ("class C:\n    k = 3\n    @classmethod\n    def make(cls, n): return cls.__name__ * n", "C().make(2)", RIGHT),
    ("class C:\n    @staticmethod\n    def go(g, n): return g(n)", "C().go(lambda x: x + 1, 2)", RIGHT),
    ("class C:\n    def make(self, n):\n        m = n\n        return m\nprint(C().make(2))", "C().make(3)", RIGHT),
    ("class C:\n    def make(self): pass", "1", "not at the top level of the code; call a method as C().method"),
    ("import functools\ndef twice(g):\n    def h(x): return 7\n    return h\n@twice\ndef f(x): return x", "1",
     "the function itself is not called"),
    # the call
    ("def f(x, y):\n    return x - y", "f(y=1, x=3)", "x, y = 3, 1\nassert (x - y) == 2"),
    ("def f(x):\n    return x", "1 +", "the input raises SyntaxError"),
    ("def f(x):\nreturn x", "1", "the code raises IndentationError"),
    ("def f(a, b=2, *c, d=4, **e):\n    return e", "1, z=6",
     "a, b, d, c, e = 1, 2, 4, (), {'z': 6}\nassert (e) == {'z': 6}"),
    ("def f(g, x):\n    return g(x)", "lambda y: y + 1, 2", "g, x = lambda y: y + 1, 2\nassert (g(x)) == 3"),
    ("def f(x):\r\n\tif x:\r\n\t\ty = '\t'\r\n\treturn y\r\n", "1", "x = 1\ny = '\t'\nassert (y) == '\\t'"),
    ("def g(x):\n    return 0\ndef h(x):\n    return x", "1",
     "def g(x):\n    return 0\nx = 1\nassert (x) == 1"),
    ("async def f():\n    return 1", "", "a function is not at the top level"),
    ("f = lambda x: x", "1", "a function is not at the top level"),
    ("if True:\n    def f(x): return x", "1", "a function is not at the top level"),
    ("\ufeffdef f(a):\n    return a", "1", "a = 1\nassert (a) == 1"),
    ("def f(a):\n    return a", "1 # one", "a = 1\nassert (a) == 1"),
    ("def f(a):\n    return a", "'#'", "a = '#'\nassert (a) == '#'"),
    ("def f(a):\n    return a", "''.join(['b'])", "a = 'b'\nassert (a) == 'b'"),
]
AROUND += [(f"def f({parameters}):\n    " + body.replace("\n", "\n    "), arguments, expected)
           for parameters, arguments, body, expected in NASTY]


@pytest.mark.parametrize("code, arguments, expected", AROUND)
def test_unroll_gives_a_right_trace_or_a_true_reason(code, arguments, expected):
    row = unroll(code, arguments)
    if isinstance(row, str):
        assert expected in row
    else:
        check(row)
        assert expected in (RIGHT, row["trace"])


def test_unroll_gives_random_functions_the_states_that_settrace_sees():
    rng, steps = random.Random(0), Counter()
    for _ in range(300):
        row = unroll(*data.random_function(rng, 8))
        if isinstance(row, str):
            assert "more than" in row
        else:
            check(row)
            steps[row["steps"] // 10] += 1
    assert steps.total() > 150 and min(steps[i] for i in range(4)) > 5


@pytest.mark.parametrize("old, new", [
    ("total = 0", "total = 1"), ("total += x", "total -= x"), ("(total) == 4", "(total) == 5"), ("y = x", "y = 2"),
    ("xs = [3, 1]", "xs = [3, 2]"), ("x = next(forloop0)", "x = 3"), ("total = 0", "total = 0; y = 1"),
    ("y = x", "raise SystemExit")])
def test_replay_rejects_a_trace_that_has_another_state(old, new):
    code = "def f(xs):\n    total = 0\n    for x in xs:\n        total += x\n    y = x\n    return total"
    _, script = data.Tracer({"id": 0, "code": code, "input": "[3, 1]"}).record({"__name__": "__main__"})
    data.replay(script)
    place = script.rindex(old) if old.startswith("x =") else script.index(old)
    with pytest.raises(data.Rejected, match="its trace raises (AssertionError: other values|SystemExit)"):
        data.replay(script[:place] + new + script[place + len(old):])


def as_script(row, folder):
    """Run a row's trace as a user would, with another hash seed, time zone, home and folder."""
    folder.mkdir(exist_ok=True)
    (folder / "trace.py").write_text(row["trace"])
    settings = {"PYTHONHASHSEED": "77", "TZ": "XYZ-11", "HOME": "/nowhere"}
    done = command("trace.py", cwd=folder, env=os.environ | settings)
    assert done.returncode == 0, (row["trace"], done.stderr)


@pytest.mark.skipif("CRUXEVAL" not in os.environ, reason="give the path of cruxeval.jsonl in CRUXEVAL")
def test_write_traces_finds_777_in_cruxeval_with_the_states_that_settrace_sees(tmp_path):
    data.write_traces(os.environ["CRUXEVAL"], tmp_path / "out.jsonl")
    rows = data.read_traces(tmp_path / "out.jsonl")
    assert len(rows) >= 777
    for row in rows.values():
        check(row)
        as_script(row, tmp_path / "run")


# ----------------------------------------------------------------------------------------------------------
# Files

HONEST = {"code": "def f(x):\n    return x + 1", "input": "1", "output": "2"}
FORGED = '{"id": "%s", "source": "", "call": "", "output": "7", "trace": "assert 1", "states": [], "steps": 0}'
SPOILT = "the code ends its process, or spoils its row"
HOSTILE = {                                           # and why it has no trace, if it has none
    "import os\ndef f():\n    os.popen('sleep 0.7; touch $TMPDIR/alive')\n    return 1": "",
    "def f():\n    return 10**10**10": "more than 1 s",
    "import os\ndef f():\n    while True:\n        os.fork()": "calling the function raises TypeError",
    "import os\ndef f():\n    os._exit(0)": SPOILT,
    "import os, time\ndef f():\n    os.closerange(3, 99)\n    time.sleep(99)": "more than 1 s",
    "def f():\n    exit()": "calling the function raises SystemExit",
    "import os\ndef f():\n    os.read(3, 10**6)": "calling the function raises OSError",
    "import resource\ndef f():\n    assert resource.getrlimit(resource.RLIMIT_CPU) == (1, 2)\n    return 1": "",
    "def f():\n    return len('x' * 2**30)": "calling the function raises MemoryError",
    "def f():\n    open('file', 'w').write('y' * 2**24)": "calling the function raises OSError",
    "def f():\n    open('file', 'w').write('y')\n    return 1": "",
    "def f():\n    return open('file').read()": "calling the function raises FileNotFoundError",
    "import os\ndef f():\n    os.mkdir('d')\n    return 1": "",
    "import shutil, os\ndef f():\n    shutil.rmtree(os.path.dirname(os.getcwd()))\n    return 1": "",
    "import json\ndef f():\n    json.dump = lambda row, file: file.write('5')\n    return 1":
        SPOILT,
    f"import os\ndef f():\n    for i in range(3, 19):\n        try: os.write(i, b'''{FORGED % 'line 2'}''')\n"
    "        except OSError: pass\n    os._exit(0)": SPOILT,
    "def f():\n    raise type('Odd\\n\\x1b[31m', (Exception,), {})()": "calling the function raises Odd  [31m",
    "import os\ndef f():\n    os.kill(os.getpid(), 15)": SPOILT,
    "import os\ndef f():\n    os.write(2, b'y' * 2**16)\n    return 1": "",
}


def written(path):
    return [json.loads(line) for line in open(path)]


def write(path, rows):
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_write_traces_loses_a_hostile_row_and_nothing_else(tmp_path):
    """Behind each is an honest one. In the end all folders are gone, and no process is left to write."""
    (tmp_path / "tmp").mkdir()
    rows = [row for code in HOSTILE for row in ({"code": code, "input": ""}, HONEST)]
    calls, out = write(tmp_path / "calls.jsonl", rows), tmp_path / "out.jsonl"
    program = f"import data; data.write_traces({str(calls)!r}, {str(out)!r}, seconds=1)"
    done = command("-c", program, cwd=HERE, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == 0 and "Error" not in done.stderr
    assert all(line.isprintable() for line in done.stdout.splitlines())
    why = {row["id"]: row["reason"] for row in written(tmp_path / "out.rejected.jsonl")}
    assert why == {f"line {2 * i + 1}": reason for i, reason in enumerate(HOSTILE.values()) if reason}
    names = [f"line {n + 1}" for n in range(len(rows))]
    assert [row["id"] for row in written(out)] == [name for name in names if name not in why]
    assert not any((tmp_path / "tmp").iterdir())


DIFFERS = "the output or a state may differ in another process"
ELSEWHERE = {                                         # where each is not as in `python trace.py`, and what says so
    DIFFERS: ["os.getpid()", "os.getcwd()", "len(os.getcwd())", "int(time.time())", "id(None)", "len(sys.argv)",
              "sys.argv[0]", "__file__", "''.join(set('hello'))", "hash('abc')", "[c for c in set('abcde')]",
              "os.environ['HOME']", "time.localtime(0).tm_hour", "datetime.date.today().day", "time.time_ns() // 10**9",
              "random.random() < 2", "random.choice([1, 2])"],
    OTHER: ["'numpy' in sys.modules", "'json' in sys.modules", "'resource' in sys.modules", "len(inspect.stack())",
            "os.listdir()", "'PYTHONHASHSEED' in os.environ", "len(os.environ)"],
    "its trace raises ValueError: call stack is not deep enough": ["sys._getframe(1) is None"],
    "its trace ends its process": ["'data' in sys.modules or os._exit(0)"],
    "calling the function raises TypeError": ["__builtins__['len']('')"],
    "": ["__name__", "random.Random(x).random()", "random.seed(x) or random.random()",
         "repr(datetime.datetime(2020, 1, x))", "sys.modules['__main__'].__name__",
         "pickle.loads(pickle.dumps(C)) is C", "sys._getframe(0) is not None"]}


def test_write_traces_rejects_what_does_not_hold_everywhere(tmp_path):
    """As an output, and as a state. What is kept runs elsewhere."""
    cases = [(value, out, why) for why, values in ELSEWHERE.items() for value in values for out in "yx"]
    codes = [f"import datetime, inspect, os, pickle, random, sys, time\nclass C: pass\n"
             f"def f(x):\n    y = {value}\n    return {out}" for value, out, _ in cases]
    calls = write(tmp_path / "calls.jsonl", [{"code": code, "input": "1"} for code in codes])
    data.write_traces(calls, tmp_path / "out.jsonl")
    kept = {row["id"]: row for row in written(tmp_path / "out.jsonl")}
    why = {row["id"]: row["reason"] for row in written(tmp_path / "out.rejected.jsonl")}
    found = [(value, out, why.get(f"line {n}", "")) for n, (value, out, _) in enumerate(cases, 1)]
    clock = [case for case in found if "time.time" in case[0]]            # workers may reach one second together:
    assert len(clock) == 4 and {reason for *_, reason in clock} <= {DIFFERS, OTHER}       # then the script differs
    assert [case for case in found if case not in clock] == [case for case in cases if "time.time" not in case[0]]
    for row in kept.values():
        as_script(row, tmp_path / "run")


def test_write_traces_reads_a_pipe_where_sitecustomize_prints_and_a_path_has_a_colon(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nprint('hi', end='')\nprint('hi', file=sys.stderr)")
    shutil.copytree(HERE, tmp_path / "a:b", ignore=lambda folder, names: {*names} - {"data.py"})
    os.mkfifo(tmp_path / "calls")
    rows = [HONEST, "", {"code": "def f():\n    return sorted(locals())", "input": ""}, HONEST]      # an assert fails
    writer = multiprocessing.get_context("fork").Process(target=write, args=(tmp_path / "calls", rows))
    writer.start()
    settings = {"PYTHONPATH": str(tmp_path / "site"), "PYTHONOPTIMIZE": "1"}
    done = command("data.py", "trace", "--file", tmp_path / "calls", "--out", tmp_path / "out.jsonl", "--allow-exec",
                   cwd=tmp_path / "a:b", env=os.environ | settings)
    writer.join()
    assert done.returncode == 0 and [row["id"] for row in written(tmp_path / "out.jsonl")] == ["line 1", "line 4"]


def test_write_traces_gives_the_same_bytes_twice_and_overwrites_nothing(tmp_path):
    code = "def f():\n    x = ''.join({'a', 'b', 'c', 'dd', 'e'})\n    return 1"
    calls, files = write(tmp_path / "calls.jsonl", [{"code": code, "input": ""}, HONEST]), []
    for seed in "12":
        words = ["data.py", "trace", "--file", calls, "--allow-exec", "--out", tmp_path / f"{seed}.jsonl"]
        assert command(*words, cwd=HERE, env={**os.environ, "PYTHONHASHSEED": seed}).returncode == 0
        files.append((tmp_path / f"{seed}.jsonl").read_bytes())
    assert files[0] == files[1] and len(written(tmp_path / "1.jsonl")) == 1
    (tmp_path / "new.rejected.jsonl").write_text("kept")
    for out in calls, tmp_path / "1.jsonl", tmp_path / "new.jsonl":
        before = out.read_bytes() if out.exists() else None
        refused = command(*words[:-1], out, cwd=HERE)
        assert refused.returncode == 2 and "exists" in refused.stderr and refused.stderr.count("\n") == 1
        assert (out.read_bytes() if out.exists() else None) == before
    assert (tmp_path / "new.rejected.jsonl").read_text() == "kept"


def test_write_traces_reads_rows_of_two_kinds(tmp_path):
    tests = ["assert add (1, 2) == 3", "assert add('a',\n  'b') == 'ab'", "assert add(1, 2) > 0",
             "assert add(1, 2) == 4", "assert set(add([1], [2])) == {1, 2}", "assert add(root, root) == 4.0"]
    mbpp = {"task_id": 7, "code": "class Two:\n    x = 2\ndef add(a, b):\r\n    return a + b",
            "test_setup_code": "root = Two().x", "test_imports": ["import math"], "test_list": tests}
    named = {"code": "def h(x):\n    return 0\ndef f(x):\n    return x", "input": "h(x=4)", "name": "h"}
    counts = {"code": "import collections\ndef f(x):\n    return collections.Counter(x)", "input": "'aa'",
              "output": "{'a': 2}"}
    rows = ["", mbpp, {"code": "def f(): pass"}, HONEST, named, named | {"name": "f", "id": 9}, counts,
            named | {"name": "g", "id": "g"}, HONEST | {"input": [1], "id": "l"}, HONEST | {"output": 2, "id": "n"},
            {"code": "def f(x):\n    return " + "-" * 20000 + "x", "input": "1", "name": "f", "id": "deep"},
            {"code": "def f(x): return x", "test_list": [], "id": "none"}]
    path = write(tmp_path / "calls.jsonl", rows)
    data.write_traces(path, tmp_path / "out.jsonl")
    kept = {row["id"]: row for row in written(tmp_path / "out.jsonl")}
    assert {name: row["output"] for name, row in kept.items()} == {
        "7/0": "3", "7/1": "'ab'", "7/5": "4", "line 4": "2", "line 5": "0", "9": "0", "line 7": "{'a': 2}", "n": "2"}
    assert kept["7/0"]["trace"] == ("import math\nclass Two:\n    x = 2\nroot = Two().x\na, b = 1, 2\n"
                                    "assert (a + b) == 3")
    for name, row in kept.items():
        if name != "line 7":                          # there, only Counter == dict holds
            check(row)
    test = "a test that is not assert name(input) == output"
    keys = "the row has neither code and input nor code and test_list"
    listed = "input is not a string: give the arguments as Python source"
    rejected = written(tmp_path / "out.rejected.jsonl")
    assert {row["id"]: row["reason"] for row in rejected} == {
        "7/2": test, "7/3": "its output is not what the row says", "7/4": test, "line 3": keys,
        "g": "g is not at the top level of the code; call a method as C().method(...)", "l": listed,
        "none": "test_list is empty", "deep": "the code raises MemoryError"}


def test_calls_of_refuses_a_file_in_one_line(tmp_path):
    path = tmp_path / "calls.jsonl"
    mbpp = {"task_id": 9, "code": "def f(): pass", "test_list": ["assert f() == None"]}
    for lines, says in ([[HONEST | {"id": "9/0"}, mbpp], "calls.jsonl: two calls have the id 9/0"],
                        [[HONEST | {"id": "9"}, HONEST | {"id": 9}], "two calls have the id 9"], [[""], "is empty"],
                        *([[HONEST, bad], "line 2 is not a JSON object"] for bad in ("{oops", "[1]", "x", "\x1f\x8b"))):
        before = write(path, lines).read_bytes()
        with pytest.raises(data.BadInput, match=says):
            data.write_traces(path, tmp_path / "new.jsonl")
        assert path.read_bytes() == before and not (tmp_path / "new.jsonl").exists()


GOOD = {**json.loads(FORGED % "a"), "script": ""}


@pytest.mark.parametrize("text, status, expected", [
    (json.dumps(GOOD), 0, GOOD), ('{"reason": "no"}', 0, {"reason": "no"}), ("", -signal.SIGXCPU, "more than 3 s"),
    *[(json.dumps(GOOD | change), 0, SPOILT)
      for change in ({"id": "b"}, {"steps": "0"}, {"more": 1}, {"states": [{"x": 1}]}, {"states": [1]})],
    *[(text, 0, SPOILT) for text in ("", "5", "[]", "null", "{", "[" * 10**5, json.dumps(GOOD) * 2, "\ufffd",
                                     '{"reason": 5}', '{"reason": "", "id": "a"}')]])
def test_recorded_believes_only_a_whole_row_of_its_call(text, status, expected, monkeypatch):
    monkeypatch.setattr(data, "guard", lambda *_: (status, text))
    row = data.recorded({"id": "a"}, 0, "", 3)
    assert row == ({"reason": expected} if isinstance(expected, str) else expected)


def processes_of(words):
    """-> the ids of processes whose command line holds these words."""
    lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    return [number for number, line in lines.items() if words.encode() in line.replace(b"\0", b" ")]


def test_write_traces_ends_with_its_processes_and_folders_after_sigterm(tmp_path):
    (tmp_path / "tmp").mkdir()
    nap = f"sleep 98.{os.getpid()}"
    calls = write(tmp_path / "calls.jsonl", [{"code": f"import os\ndef f():\n    os.system('{nap}')", "input": ""}])
    words = [sys.executable, "data.py", "trace", "--file", calls, "--out", tmp_path / "out.jsonl", "--allow-exec"]
    folder = {"TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(words, cwd=HERE, env=os.environ | folder, stdout=subprocess.PIPE)
    while not processes_of(nap):
        time.sleep(0.05)
    assert any((tmp_path / "tmp").iterdir()) and processes_of(str(tmp_path / "tmp"))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143 and not any((tmp_path / "tmp").iterdir())
    assert not processes_of(nap) and not processes_of(str(tmp_path / "tmp"))


def test_write_traces_leaves_whole_files_after_ctrl_c(tmp_path):
    calls, out = write(tmp_path / "calls.jsonl", [HONEST] * 5000), tmp_path / "out.jsonl"
    words = [sys.executable, "data.py", "trace", "--file", calls, "--out", out, "--allow-exec"]
    process = subprocess.Popen(words, cwd=HERE, text=True, stdout=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not out.exists() or out.stat().st_size < 1000:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    kept = [row["id"] for row in written(out)]
    assert process.returncode == 130 and said.startswith(f"{len(kept)} traces") and 0 < len(kept) < 5000
    assert kept == [f"line {n + 1}" for n in range(len(kept))]


def test_write_traces_says_that_the_machine_has_too_little_memory(tmp_path):
    path, out = write(tmp_path / "calls.jsonl", [HONEST]), tmp_path / "out.jsonl"
    words = shlex.join([sys.executable, "data.py", "trace", "--file", str(path), "--out", str(out), "--allow-exec"])
    for limit, says in (400000, "even f(x) = x fails here"), (60000, ""):
        done = subprocess.run(f"ulimit -v {limit}; {words}", shell=True, cwd=HERE, text=True, capture_output=True)
        assert done.returncode and says in done.stderr and not out.exists()
        assert not says or done.stderr.count("\n") == 1


def test_trace_draws_the_rows_of_a_file_and_trains_on_nothing_that_it_tests_on(tmp_path):
    """Without arguments and output, no program is in both splits."""
    made = itertools.islice(data.random_rows(random.Random(0), 6), 150)
    rows = [{**row, "id": i} for i, row in enumerate(made)]
    task = data.Trace(trace_file=write(tmp_path / "t.jsonl", rows))
    rows, programs = {row["trace"]: row for row in rows}, {"train": set(), "test": set()}
    for split, rng in itertools.product(programs, map(random.Random, range(100))):
        *lines, last = task.draw(rng, Stage(51, 1, "1"), split)
        text = "".join(line.text for line in lines)
        row = rows[text + last.text[:-1]]
        assert last.text.endswith(f"== {last.answer}\n") and last.answer == row["output"]
        assert [line.state for line in lines] == [
            ", ".join(f"{name}={x}" for name, x in state.items()) for state in row["states"]]
        programs[split].add((text + last.text).split("\n", 1)[1].rpartition(" == ")[0])
    assert not programs["train"] & programs["test"]
    assert len(programs["train"]) > 16 < 4 * len(programs["test"])
    with pytest.raises(data.BadInput, match=r"stage 99x1: no traces of this length are in the test .*: \[\d"):
        task.draw(rng, Stage(99), "test")


# ----------------------------------------------------------------------------------------------------------
# Examples

@pytest.mark.parametrize("module, functions", [(kernels, 2)])
def test_docstring_examples_are_true(module, functions, monkeypatch):
    monkeypatch.chdir(HERE)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert len(found) == functions
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0


# ----------------------------------------------------------------------------------------------------------
# kernels.py

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"                   # of the Triton kernels
VERSION = [int(x) for x in kernels.triton.__version__.split(".")[:2]] if kernels.triton else [0, 0]
triton_is_here = pytest.mark.skipif(VERSION < [3, 6], reason="needs triton, 3.6 or newer")
BACKENDS = "loop", "torch", pytest.param("triton", marks=triton_is_here)
KEYS = ("any", "transpositions", 0, 1e-6, 1e-3)  # a number: all are along one key, but for so much noise
GATES = (None, -1e-3, -0.3, LOG_MIN, -40)        # means of log-gates; the last one is clamped
TOLERANCE = {**kernels.TOLERANCE, torch.float64: 1e-12}


def example(keys, B=2, T=100, H=2, K=16, V=16, gate=None, dtype=torch.float64, device="cpu"):
    """Inputs as of kernels.row_swaps, which has transpositions. With other keys: nearly collinear or identical
    ones, beta is 2 (parity); or of any length from 0 to 5, beta is from 0 to 2."""
    q, k, v, beta, g, state = row_swaps(B, T, H, K, V, gate, torch.float64)
    if keys == "any":
        beta = 2 * torch.rand_like(beta)
        k = 5 * torch.rand_like(beta)[..., None] * F.normalize(torch.randn_like(k), dim=-1)
        k[:, 10::10] = 0
    elif keys != "transpositions":
        k = F.normalize(torch.randn_like(k[:, :1]) + keys * torch.randn_like(k), dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [x.to(device, dtype) for x in (q, k, v, beta)]
    return inputs + [x if x is None else x.to(device, wide) for x in (g, state)]


def right(backend, keys, T, gate=None, K=12, V=7, dtype=torch.float32):
    """Outputs and gradients are the float64 loop's on the same rounded inputs; the state is fp32 for inputs
    of any dtype. Errors grow with T, for (nearly) equal keys (beta is 2), and in dg if gates forget all."""
    inputs = example(keys, 1, T, 2, K, V, gate, dtype, DEVICE if backend == "triton" else "cpu")
    for name, error in compare(inputs, backend).items():
        limit = TOLERANCE[torch.float32 if name == "state" else dtype] * max(1, T / 100)
        if dtype != torch.float64 and (keys in KEYS[2:] or name == "dg" and gate <= LOG_MIN):
            limit = max(limit, 5e-4)
        assert error <= limit, (name, T, dtype)


@pytest.mark.parametrize("keys", KEYS)
def test_delta_rule_loop_is_the_equation(keys):
    """For one head, with K x K matrices, in numpy's float64. Log-gates below -7 are -7."""
    inputs = example(keys, B=1, T=30, H=1, K=6, V=4, gate=-5)
    o, last = delta_rule(*inputs, backend="loop")
    q, k, v, beta, g, S = (x.squeeze().numpy() for x in inputs)
    for t in range(30):
        norm2 = k[t] @ k[t]
        b = beta[t] / norm2 if norm2 else 0                               # a zero key writes nothing
        erase = np.eye(6) - b * np.outer(k[t], k[t])
        S = erase @ np.diag(np.exp(np.maximum(g[t], -7))) @ S + b * np.outer(k[t], v[t])
        assert np.allclose(o[0, t, 0], S.T @ q[t], atol=1e-13)
    assert np.allclose(last[0, 0], S, atol=1e-13)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("keys", KEYS)
def test_delta_rule_chunks_equal_the_loop_forward_and_backward(keys, gate):
    right("torch", keys, 1000, gate)
    right("torch", keys, 70, gate, K=40, dtype=torch.float64)             # chunks of 32
    for T, dtype in itertools.product((1, 48), TOLERANCE):
        right("torch", keys, T, gate, dtype=dtype)


@pytest.mark.parametrize("gates", [lambda g: None, lambda g: g[..., 0], lambda g: g])
def test_delta_rule_gradients_are_those_of_finite_differences(gates):
    q, k, v, beta, g, S = example("any", B=1, T=7, H=1, K=3, V=2, gate=-0.5)
    inputs = [x if x is None else x.requires_grad_() for x in (q, k, v, beta, gates(g), S)]
    assert torch.autograd.gradcheck(functools.partial(delta_rule, chunk=4, backend="torch"), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_rule_may_be_split_anywhere(backend):
    """Also tensors that are not contiguous: every second step of a longer sequence."""
    inputs = [x[:, ::2] for x in example("any", 1, 36, 1, 16, 24, -0.3, torch.float32, DEVICE)[:5]]
    truth = delta_rule(*(x.double() for x in inputs), backend="loop")
    for length in (1, 5, 17):
        S, pieces = None, []
        for piece in zip(*(x.split(length, 1) for x in inputs)):
            o, S = delta_rule(*piece, state=S, backend=backend)
            pieces.append(o)
        assert max(errors([torch.cat(pieces, 1), S], truth)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length, gate", [(1e-12, None), (1e-6, -40), (1e12, -40)])
def test_delta_rule_stays_finite_for_keys_of_any_length(backend, length, gate):
    inputs = example(0, 1, 20, 1, gate=gate, dtype=torch.float32, device=DEVICE)
    inputs[1] *= length
    assert all(x.isfinite().all() for x in kernels.with_gradients(inputs, backend))


def test_delta_rule_reflections_keep_the_state():
    """Parity, for 8 keys, which in bf16 are not of unit length. At each step along a head's key k, at beta 2,
    what the key reads changes sign: in closed form, S = k r^T, r = sum over t of (-1)^(T-1-t) 2 v_t / |k|^2.
    With a rounded 2 / |k|^2 in place of A's division, every seventh key is off by up to 5e-3."""
    inputs = example(0, B=1, T=65536, H=8, V=4, dtype=torch.bfloat16)[:4]
    _, S = delta_rule(*inputs, backend="torch")
    _, k, v, _ = (x[0].double() for x in inputs)
    sign = (-1) ** torch.arange(65535, -1, -1).double()
    r = 2 * torch.einsum("t,thv->hv", sign, v) / k[0].square().sum(-1, keepdim=True)
    assert max(errors(S[0], torch.einsum("hk,hv->hkv", k[0], r))) < 1e-4
    for keys, limit in (("transpositions", 1e-4), (1e-3, 1e-3)):          # read through bf16, S is 3 % off
        assert kernels.drift(example(keys, 1, 4096, 16, dtype=torch.bfloat16)[:4], "torch") < limit


def test_bf16_keys_would_explode_or_die_without_the_projector_form():
    """Why b = beta / |k|^2: for a "unit" key in bf16, 1 - 2 |k|^2 is not quite -1, and 4096 steps show it."""
    k = F.normalize(torch.randn(200, 16), dim=-1).bfloat16().double()
    growth = (1 - 2 * (k * k).sum(-1)).abs() ** 4096
    assert growth.max() > 1e3 and growth.min() < 1e-3


def test_delta_rule_and_decay_scan_name_shapes_that_do_not_fit():
    q, k, v, beta, g, _ = example("any", T=10, gate=-1)
    for says, bad in (("q has .* to fit k", (q[:, :9], k, v, beta)),
                      ("beta has .* to fit k|a has .* to fit k", (q, k, v, beta[..., None])),
                      ("g has .* to fit k|state has .* to fit k", (q, k, v, beta, g[..., 1:])),
                      ("nothing to scan", [x[:, :0] for x in (q, k, v, beta)]),
                      ("k has .* give it the shape .B, T, H, K", [x[0] for x in (q, k, v, beta)]),
                      ("v is on meta, but k is on cpu", (q, k, v.to("meta"), beta))):
        for scan in delta_rule, decay_scan:
            with pytest.raises(ValueError, match=says):
                scan(*bad)


def test_delta_rule_is_the_same_under_autocast_forward_and_backward():
    inputs = example("any", gate=-0.3, dtype=torch.float32)
    want = kernels.with_gradients(inputs, "torch")
    with torch.autocast("cpu", torch.bfloat16):
        found = kernels.with_gradients(inputs, "torch")
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@triton_is_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K, V, cases", [(5, 7, zip), (20, 24, zip), *(
    pytest.param(K, V, itertools.product, marks=slow) for K, V in ((2, 3), (16, 16), (64, 40), (128, 40)))])
def test_triton_kernels_equal_the_loop_forward_and_backward(K, V, dtype, cases):
    gates = GATES if dtype == torch.float32 else GATES[:-1]              # where all is forgotten, dg is noise
    lengths = itertools.cycle((17, 1, 33, 20, 16, 2, 100))                # 7 of them, beside 4 or 5 gates
    for (keys, gate), T in zip(cases(KEYS, gates), lengths):
        right("triton", keys, T, gate, K, V, dtype)


@triton_is_here
def test_triton_kernels_run_on_the_gpu_of_their_tensors(monkeypatch):
    seen = []
    watched = lambda x: contextlib.nullcontext(seen.append(x.data_ptr()))
    monkeypatch.setattr(torch.cuda, "device_of", watched)
    q, k, v, beta = example("any", 1, 2, 1, 3, 3, dtype=torch.float32, device=DEVICE)[:4]
    o, _ = delta_rule(q.requires_grad_(), k, v, beta, backend="triton")
    o.sum().backward()
    assert seen == [k.data_ptr()] * 2                                     # forward and backward


@triton_is_here
def test_bf16_parts_add_up_to_the_fp32_number():
    """To the last bit: of a sum, a product by a bf16 number is then the sum of three products."""
    @kernels.triton.jit
    def split(x, high, middle, low):
        i = kernels.tl.arange(0, 256)
        a, b, c = kernels.bf16_parts(kernels.tl.load(x + i))
        kernels.tl.store(high + i, a)
        kernels.tl.store(middle + i, b)
        kernels.tl.store(low + i, c)
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-30, 30).repeat(5)[:256]
    found = [torch.empty(256, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    split[(1,)](x.to(DEVICE), *found)
    assert torch.equal(sum(part.cpu().double() for part in found), x.double())
    assert (found[2] != 0).any() and (found[0].abs() >= found[1].abs()).all()


@triton_is_here
def test_triton_kernels_save_nothing_without_gradients(monkeypatch):
    """Under no_grad, also if the inputs require gradients."""
    inputs, saved = example("any", 1, 2, 1, 3, 3, -0.3, torch.float32, DEVICE), []
    inputs = [x.requires_grad_() for x in inputs]
    monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", lambda ctx, *x: saved.append(x))
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            delta_rule(*inputs, backend="triton")
    assert [any(x is None for x in some) for some in saved] == [False, True]


@pytest.mark.parametrize("device, capability, dtype, K, V, package, picked", [
    ("cuda", (8, 0), torch.float32, 64, 64, True, "triton"), ("cuda:1", (12, 0), torch.bfloat16, 2, 128, True, "triton"),
    ("cuda", (9, 0), torch.float32, 1, 8, True, "triton"), ("cuda", (9, 0), torch.bfloat16, 1, 8, True, "torch"),
    ("cuda", (7, 5), torch.float32, 64, 64, True, "torch"), ("cuda", (9, 0), torch.float64, 64, 64, True, "torch"),
    ("cuda", (9, 0), torch.float32, 129, 64, True, "torch"), ("cuda", (9, 0), torch.float32, 64, 129, True, "torch"),
    ("cuda", (9, 0), torch.float32, 64, 64, False, "torch"), ("cpu", None, torch.float32, 64, 64, True, "torch")])
def test_pick_backend_takes_kernels_where_they_can_run(device, capability, dtype, K, V, package, picked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "triton", object() if package else None)
    assert kernels.pick_backend(device, dtype, K, V) == kernels.pick_backend(torch.device(device), dtype, K, V) == picked


def test_delta_rule_refuses_a_backend_that_cannot_do_it(monkeypatch):
    inputs = example("any", 1, 2, 1, 3, 3, None, torch.float32)
    wide = example("any", 1, 2, 1, 200, 3, None, torch.float32)
    double = [x if x is None else x.double() for x in inputs]
    for backend, args in (("tritn", inputs), ("triton", wide), ("triton", double)):
        with pytest.raises(ValueError, match="choose auto, loop, torch or triton"):
            delta_rule(*args, backend=backend)
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ValueError, match="the package triton"):
        delta_rule(*inputs, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_rule_has_the_right_second_derivative_or_none(backend):
    """Of a loss in which o and the state stand linearly, so that their gradients are constants."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    inputs = [x if x is None else x.to(DEVICE).requires_grad_() for x in example("any", 1, 5, 1, 3, 3, None, dtype)]

    def first(k):
        o, S = delta_rule(inputs[0], k, *inputs[2:], backend=backend)
        return torch.autograd.grad((o.sum() + S.sum()), k, create_graph=True)[0].square().sum()
    if backend == "loop":
        assert torch.autograd.gradcheck(first, [inputs[1]])
    else:
        with pytest.raises(RuntimeError, match="no second derivative"):
            first(inputs[1])


@pytest.mark.parametrize("decays", [lambda a: 2 * a - 1, lambda a: a * (a > 0.5), lambda a: None])
def test_decay_scan_is_its_recurrence(decays):
    q, k, v = (torch.randn(2, 100, 3, n, dtype=torch.float64) for n in (5, 5, 4))
    a = decays(torch.rand(2, 100, 3, dtype=torch.float64))                # of both signs, often 0, or none
    S = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    inputs = [x if x is None else x.requires_grad_() for x in (q, k, v, a, S)]
    outputs, state = [], S
    for t in range(100):
        decay = 1 if a is None else a[:, t, :, None, None]
        state = decay * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    want, found = (torch.stack(outputs, 1), state), decay_scan(*inputs, chunk=16)
    assert max(errors(found, want)) < 1e-12
    leaves, weights = [x for x in inputs if x is not None], [torch.randn_like(x) for x in want]
    assert max(errors(*(torch.autograd.grad(x, leaves, weights) for x in (found, want)))) < 1e-12


# ----------------------------------------------------------------------------------------------------------
# pfsa.py

def chance(automaton, symbols, end):
    """P(these symbols, then state `end`), by brute force: every state before each symbol is tried."""
    if not symbols:
        return automaton.q0[end]
    *earlier, s = symbols
    return sum(chance(automaton, earlier, state) * int(automaton.Z[s, state]) * automaton.T[s, end, state]
               for state in range(automaton.m))


def random_automaton(rng, m):
    """In Fractions: a move, and a query of two symbols that move as well."""
    T = (rng.integers(0, 4, size=(3, m, m)) + np.eye(m, dtype=int)) * Fraction(1)
    q0, part = rng.integers(1, 5, size=m) * Fraction(1), rng.permutation(m) % 2
    return pfsa.PFSA(T / T.sum(1, keepdims=True), [[1] * m, part, 1 - part], q0 / q0.sum(), [[0], [1, 2]])


def walk(automaton, rng, queries):
    """-> the symbols (L,) with which the automaton answers queries (L,), by number, and its last state."""
    state, symbols = rng.choice(automaton.m, p=automaton.q0.astype(float)), []
    for query in queries:
        [s] = [s for s in automaton.queries[query] if automaton.Z[s, state]]
        state = rng.choice(automaton.m, p=automaton.T[s, :, state].astype(float))
        symbols.append(s)
    return symbols, state


def test_filter_is_bayes_by_brute_force_in_fractions():
    rng = np.random.default_rng(0)
    for _ in range(100):
        automaton = random_automaton(rng, int(rng.integers(2, 4)))
        symbols, _ = walk(automaton, rng, rng.integers(2, size=4))
        joint = np.array([[chance(automaton, symbols[:t], i) for i in range(automaton.m)] for t in range(5)])
        mass = joint.sum(1)
        [beliefs], [predictive] = automaton.filter([symbols])
        assert (beliefs == joint / mass[:, None]).all() and (predictive == mass[1:] / mass[:-1]).all()


def test_filter_gives_how_often_a_state_is_there():
    """Among sampled sequences with the same symbols, states occur as often as the filter says."""
    rng = np.random.default_rng(1)
    automaton, ends = random_automaton(rng, 4), {}
    for _ in range(20_000):
        symbols, state = walk(automaton, rng, [1, 0, 1])
        ends.setdefault(tuple(symbols), []).append(state)
    beliefs, _ = automaton.filter(list(ends))
    for states, p in zip(ends.values(), beliefs[:, -1].astype(float)):
        n = len(states)
        found = np.bincount(states, minlength=4) / n
        assert (abs(found - p) <= 4.5 * np.sqrt(p * (1 - p) / n) + 1e-12).all()


def test_filter_is_wrong_where_the_choice_of_a_symbol_depends_on_the_state():
    """Why there are queries: an environment that picks among the symbols that fit tells more than Z."""
    rng = np.random.default_rng(0)
    state, coin = rng.integers(3, size=60_000), rng.integers(2, size=60_000)
    says_a = (state == 0) | (state == 1) & (coin == 0)                    # A fits 0 and 1, B fits 1 and 2
    assert np.allclose(np.bincount(state[says_a]) / says_a.sum(), [2 / 3, 1 / 3], atol=0.01)
    automaton = [np.eye(3)] * 2, [[1, 1, 0], [0, 1, 1]], [1 / 3] * 3
    assert np.allclose(pfsa.PFSA(*automaton).filter([[0]])[0][0, 1], [1 / 2, 1 / 2, 0])
    with pytest.raises(ValueError, match="exactly one of its symbols"):
        pfsa.PFSA(*automaton, [[0, 1]])


FIGURE_10 = [pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)]                     # maybe swap, "2 holds 2"


def test_pfsa_gives_the_papers_numbers_exactly():
    half = Fraction(1, 2)
    beliefs, predictive = pfsa.appendix_b().filter([[0, 3]])
    assert beliefs[0].tolist() == [[1, 0, 0, 0, 0, 0], [0, half, half, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert predictive[0].tolist() == [1, half]
    assert pfsa.linear_filter(pfsa.appendix_b(), [[0, 3]])[0, 2].tolist() == [0, 0, 0.5, 0, 0, 0]
    mass = pfsa.linear_filter(pfsa.figure_9(), [[0, 1] * 4])[0, ::2].sum(1)
    assert mass.tolist() == [1, 0.5, 0.25, 0.125, 0.0625]
    H = pfsa.marginal_filter(3, [FIGURE_10 * 3])[0, ::2]
    assert H[:, 2, 2].tolist() == [1, 0.5, 0.25, 0.125] and H[:, 1, 1].tolist() == [1] * 4
    lines = pfsa.MaybeSwaps(3).draw(random.Random(0), Stage(100, 2, "forced"), "test")
    b, c = (line.source[-1] for line in lines[2:4])
    assert [line.answer for line in lines if line.answer] == [b] * 50 + [c]
    lines = pfsa.MaybeSwaps(3).draw(random.Random(0), Stage(100, 2, "same"), "train")
    assert {line.answer for line in lines[4:-1] if line.answer} == {b, c}          # here it may be swapped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_linear_filter_dies_where_its_format_ends(dtype):
    """The smallest subnormal is tiny * eps; half of it is a tie, and rounds to even: 0."""
    n = 1 - round(math.log2(torch.finfo(dtype).tiny * torch.finfo(dtype).eps))
    for automaton, pair in ((pfsa.figure_9(), [0, 1]), (pfsa.maybe_swaps(3), FIGURE_10)):
        mass = pfsa.linear_filter(automaton, [pair * n], dtype)[0, ::2].sum(1)
        assert mass[n - 1] > 0 and mass[n] == 0
        assert automaton.filter([pair * n])[0][0, -1].sum() == 1


def test_marginal_filter_is_exact_without_reveals_and_an_approximation_with_them():
    rng, automaton = np.random.default_rng(0), pfsa.maybe_swaps(3)
    held = np.eye(3)[pfsa.arrangements(3)]                                # (states, position, thing)
    for spacing, low, high in ((41, 0, 1e-12), (4, 0.05, 1)):
        symbols = [walk(automaton, rng, pfsa.schedule(rng, 3, 40, spacing))[0] for _ in range(30)]
        truth = np.tensordot(automaton.filter(symbols)[0], held, 1)
        found, ok = pfsa.sinkhorn(pfsa.marginal_filter(3, symbols))
        assert np.allclose(found[ok].sum(-1), 1) and np.allclose(found[ok].sum(-2), 1)
        assert low <= abs(found - truth)[ok].max() < high
    found, ok = pfsa.sinkhorn([pfsa.marginal_filter(3, [FIGURE_10 * 1100])[0, -1], np.zeros((3, 3))])
    assert not ok.any() and np.isfinite(found).all()                      # they have underflowed


def believed(text):
    """What a reader of a trace can know, by brute force. Python executes each line in every world, and
    branches both ways; a printed line ends the worlds that would not print it. -> after each line, the
    weights of the worlds that are left, by what a, b, c ... hold."""
    worlds, known = Counter({(): 1}), []
    for line in text.splitlines():
        before, worlds = worlds, Counter()
        for values, weight in before.items():
            memory = dict(zip("abcde", values), print=lambda *x: None)
            if not line.startswith(">>> "):
                name, value = line.split()
                worlds[values] += weight * (memory[name] == int(value))
                continue
            for draw in (0.0, 1.0) if "random()" in line else (1.0,):
                after = {**memory, "random": lambda: draw}
                exec(line[4:], after)
                worlds[tuple(after[name] for name in "abcde" if name in after)] += weight
        known.append(+worlds)
    return known


@pytest.mark.parametrize("n_vars, stage, answers", [
    (2, "8x2", 4), (3, "12x2", 6), (4, "12x3", 4), (5, "10x5", 2), (4, "16x2:forced", 9), (3, "16x2:same", 9)])
def test_maybe_swaps_has_the_beliefs_and_chances_of_all_branches_tried_in_python(n_vars, stage, answers):
    task, [stage] = pfsa.MaybeSwaps(n_vars), parse_stages(stage)
    traces = [task.draw(random.Random(i), stage, "test") for i in range(8)]
    batch = task.to_batch(traces)
    for b, lines in enumerate(traces):
        assert stage.kind or data.is_test("\n".join(line.source for line in lines))      # whatever it drew
        ends, asked = np.flatnonzero(batch.line_end[b]), list(np.flatnonzero(batch.asked[b]))
        assert len(asked) == batch.predictive[b].any(1).sum() == answers
        known = believed("".join(line.text for line in lines))            # never empty: Python can print this
        for line, end, before, worlds in zip(lines, ends, [None, *known], known):
            want = [worlds[values] / worlds.total() for values in task.state_of]
            assert np.allclose(batch.belief[b, end], want, atol=1e-6)     # zeros until all are assigned
            state = batch.state[b, end, 0]
            assert state == -1 if sum(want) == 0 else want[state] > 0     # the truth is thought possible
            if line.answer:
                at, odds = asked.pop(0), np.zeros(n_vars)
                for values, weight in before.items():
                    odds[values["abcde".index(line.text[0])] - 1] += weight / before.total()
                assert np.allclose(batch.predictive[b, at], odds, atol=1e-6)
                assert task.tokenizer.decode([batch.target[b, at]]) == line.answer


class SmallVocabulary(pfsa.MaybeSwaps):
    characters = "from random import random()\n>>> a = 1, b 2 c 3 ( if < 0.5 else print('"


@pytest.mark.parametrize("kind", [pfsa.MaybeSwaps, SmallVocabulary])
def test_against_exact_is_right_for_the_exact_predictive_and_for_a_uniform_guess(kind):
    """The exact predictive's loss on sampled answers is its entropy, as no branch depends on a query."""
    task = kind(3)
    batch = task.batch(0, "train", Stage(32, 2), 0, 200)
    target, p = torch.tensor(batch.target[batch.asked]), torch.tensor(batch.predictive[batch.asked]).double()
    digits = task.answer_tokens()
    assert task.tokenizer.decode(digits) == "123"
    exact, even = torch.full((2, len(p), len(task.tokenizer)), -1e4, dtype=torch.double)
    exact[:, digits], even[:, digits] = p.clamp(1e-99).log(), 0
    entropy = -torch.special.xlogy(p, p).sum(-1)
    kl, loss, floor = pfsa.against_exact(exact, target, p, task.answer_tokens()).unbind(-1)
    assert kl.abs().max() < 1e-6 and torch.allclose(loss, floor)
    assert abs((floor - entropy).mean()) < 4 * (floor - entropy).std() / math.sqrt(len(p))
    kl, loss, _ = pfsa.against_exact(even, target, p, task.answer_tokens()).unbind(-1)
    assert torch.allclose(loss, loss.new_tensor(math.log(3))) and torch.allclose(kl, math.log(3) - entropy)


@pytest.mark.parametrize("make, says", [
    (lambda: pfsa.maybe_swaps(3).filter([FIGURE_10, [0, pfsa.holds(3, 2, 1)]]), "sequence 1, step 1: symbol"),
    (lambda: pfsa.PFSA([[[1, 0], [1, 1]]], [[1, 1]], 0), "a column of T does not sum to 1"),
    (lambda: pfsa.MaybeSwaps(6), "--n-vars 6: choose 2 to 5"),
    (lambda: pfsa.MaybeSwaps(3, states="text"), "--states text: the state is hidden"),
    (lambda: pfsa.MaybeSwaps(3).check_stage(Stage(8, 4, "forced")), "the spacing 2: write 8x2:forced"),
    (lambda: pfsa.MaybeSwaps(3).batch(0, "train", Stage(8, 2, "forced"), 0, 1), "evaluation only: train on 8x2:same")])
def test_pfsa_refuses_bad_automata_symbols_and_settings_in_one_line(make, says):
    with pytest.raises(ValueError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------
# models.py

ALL = [*models.MIXERS, "deltanet+lstm"]
HEADS = ["linear", "transformer", "contrastive"]


def small(model, **changes):
    cfg = SimpleNamespace(model=model, d_model=32, d_mlp=32, n_layer=2, n_head=2, conv=4, beta_max=2.0,
                          gates="exact", n_householder=3, states="none")
    vars(cfg).update(changes)
    return cfg


def build(model, **changes):
    torch.manual_seed(0)
    return models.LM(small(model, **changes), len(data.Tokenizer()), 5, 5)


def batch_of(task, stage, size, split="train"):
    """As train.py makes it: tensors."""
    return train.to_tensors(task.batch(0, split, stage, 0, size), "cpu")


@pytest.mark.parametrize("model", ALL)
def test_lm_agrees_whole_token_by_token_and_segment_by_segment(model):
    lm, tokens = build(model), torch.randint(262, (2, 40))
    with torch.no_grad():
        whole, _ = lm(tokens)
        for length in (1, 3, 33):
            assert (models.in_pieces(lm, tokens, length) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("model", ALL)
def test_lm_sees_the_past_and_not_the_future(model):
    lm, tokens = build(model), torch.randint(262, (1, 40))
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % 262
    with torch.no_grad():
        before, after = lm(tokens)[0], lm(changed)[0]
    assert (before[:, :20] - after[:, :20]).abs().max() < 1e-5
    assert ((before[:, 20:24] - after[:, 20:24]).abs().amax(-1) > 1e-4).all()  # ssm starts forgetful


def test_short_conv_is_a_sum_over_the_last_tokens():
    conv, x = models.ShortConv(3, 4), torch.randn(2, 9, 3)
    torch.nn.init.normal_(conv.weight)
    y, state = conv(x)
    past = F.pad(x, (0, 0, 3, 0))                                         # (2, 12, 3)
    want = x + sum(conv.weight[i] * past[:, i:i + 9] for i in range(4))
    torch.testing.assert_close(y, want)
    assert torch.equal(state, x[:, -3:])


def transitions(model, beta_max):
    """The K x K matrices by which single tokens move the state, betas pushed to both ends of their range."""
    torch.manual_seed(0)
    mixer = models.MIXERS[model](small(model, beta_max=beta_max, n_head=1, n_householder=2))
    if hasattr(mixer, "to_beta"):
        torch.nn.init.normal_(mixer.to_beta.weight, std=5)
    if hasattr(mixer, "to_gate"):
        torch.nn.init.constant_(mixer.to_gate.bias, 10)
    x = torch.randn(300, 1, 32)                                           # 300 sequences of one token
    with torch.no_grad():
        q, k, v = mixer.project(x)
        _, S = mixer.scan(x, q, k, 0 * v, torch.eye(32).expand(300, 1, 32, 32))
    return S[:, 0].double()


@pytest.mark.parametrize("model", ["deltanet", "gated_deltanet", "kda", "deltaproduct", "ssm"])
def test_beta_max_bounds_the_eigenvalues(model):
    bounded = torch.linalg.eigvals(transitions(model, 1.0))
    assert bounded.imag.abs().max() < 1e-3 and bounded.real.min() > -1e-3 and bounded.abs().max() < 1 + 1e-5
    free = torch.linalg.eigvals(transitions(model, 2.0))
    assert free.real.min() < -0.9 and free.abs().max() < 1 + 1e-5


def test_bit_reaches_both_ends_and_its_gradient_is_the_sigmoids():
    z = torch.linspace(-4, 4, 33, requires_grad=True)
    y = models.Bit.apply(z) + 0.5
    assert torch.equal(y[z <= -2], torch.zeros(9)) and torch.equal(y[z >= 2], torch.ones(9))
    assert torch.allclose(y[8:25], torch.linspace(0, 1, 17), atol=1e-6)
    y.sum().backward()
    assert torch.allclose(z.grad, (1 / (2 + z.exp() + (-z).exp())).detach())


def test_snap_finds_the_nearest_key_with_one_or_two_entries():
    unit = torch.eye(6, dtype=torch.float64)
    keys = [sign * e for e in unit for sign in (1, -1)]
    keys += [(s * unit[i] + t * unit[j]) / 2 ** 0.5 for i in range(6) for j in range(i) for s in (1, -1) for t in (1, -1)]
    keys = torch.stack(keys)                                              # all 72
    k = F.normalize(torch.randn(2000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
    nearest = keys[(k @ keys.T).argmax(-1)]
    assert torch.allclose(models.snap(k), nearest) and len(nearest.unique(dim=0)) == 72


def hard(**changes):
    torch.manual_seed(0)
    mixer = models.HardDeltaNet(small("hard_deltanet", n_head=1, **changes)).double()
    for layer in mixer.to_beta, mixer.to_write:
        torch.nn.init.normal_(layer.weight)
    mixer.hardness.fill_(1)
    return mixer


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_hard_deltanet_moves_rows_and_mixes_none_at_beta_2(dtype, error):
    mixer = hard().to(dtype)
    torch.nn.init.zeros_(mixer.to_v.weight)                               # nothing is written
    torch.nn.init.constant_(mixer.to_beta.bias, 100)
    S = mixer(torch.randn(3, 500, 32, dtype=dtype))[1][:, 0]
    assert S.abs().max() == 0
    q, k, v = mixer.project(torch.randn(3, 500, 32, dtype=dtype))
    _, S = mixer.scan(torch.randn(3, 500, 32, dtype=dtype), q, k, v, torch.eye(32, dtype=dtype).expand(3, 1, 32, 32))
    S = S[:, 0]
    assert (S - S.round()).abs().max() < error and not torch.equal(S.round().abs(), torch.eye(32, dtype=dtype).expand(3, 32, 32))
    ones = torch.ones(3, 32, dtype=dtype)
    assert torch.equal(S.round().abs().sum(1), ones) and torch.equal(S.round().abs().sum(2), ones)


def test_hard_deltanet_scans_rounded_numbers_with_the_gradient_of_the_others():
    """The loop of the recurrence over hard keys, betas and writes; its gradient for them goes to the soft ones."""
    mixer, x = hard(), torch.randn(2, 9, 32, dtype=torch.float64)
    q, k, v = mixer.project(x)
    beta, write = mixer.beta(x), models.Bit.apply(mixer.to_write(x).float()) + 0.5
    assert set(beta.round().unique().tolist()) == {0, 1, 2} and set(write.round().unique().tolist()) == {0, 1}
    exact = [y.detach().requires_grad_() for y in (models.snap(k), beta.round(), write.round())]
    keys, S, outputs = F.normalize(exact[0], dim=-1), torch.zeros(2, 1, 32, 32, dtype=torch.float64), []
    for t in range(9):
        kt, step = keys[:, t, :, :, None], exact[1][:, t, :, None, None]
        new = (v[:, t] * exact[2][:, t, :, None])[:, :, None]
        S = S + step * kt * (new - kt.mT @ S)
        outputs.append((q[:, t, :, None] @ S)[:, :, 0])
    want = torch.stack(outputs, 1)
    got, _ = mixer.scan(x, q, k, v, None)
    assert (got - want).abs().max() < 1e-6                                # beta and write are fp32
    weight = torch.randn_like(want)
    through = torch.autograd.grad((want * weight).sum(), exact, retain_graph=True)
    params = [mixer.to_bits.weight, mixer.to_k.weight, mixer.to_beta.weight, mixer.to_write.weight]
    expected = torch.autograd.grad([k, beta, write], params, through, retain_graph=True)
    for one, other in zip(torch.autograd.grad((got * weight).sum(), params, retain_graph=True), expected):
        assert (one - other).abs().max() < 1e-5 * other.abs().max() and other.abs().max() > 0
    mixer.hardness.zero_()                                                # soft: a DeltaNet whose values are gated
    soft, _ = mixer.scan(x, q, k, v, None)
    want, _ = kernels.delta_rule(q, k, v * write[..., None], beta)
    assert (soft - want).abs().max() < 1e-6 < (soft - got).abs().max()


def test_hard_deltanet_anneals_by_accuracy():
    mixer = hard()
    mixer.hardness.fill_(0.984375)
    assert not mixer.anneal(0.91) and mixer.hardness == 0.984375
    assert not mixer.anneal(0.92) and mixer.anneal(0.99) and mixer.hardness == 1 and mixer.anneal(0.8)
    assert not mixer.anneal(0.71) and mixer.hardness < 1


def test_supplied_hard_model_executes_each_command_from_states_that_occur(states=32):
    """All 120 commands, from the states that 20 random commands have led to, in fp64. (assets/RESULTS.md has 256.)"""
    _, task, _, model = train.load(HERE / "assets" / "deltanet-repl-hard.pt", device="cpu")
    model, rng, orders = model.double(), random.Random(0), list(itertools.permutations(range(5)))
    digits = torch.tensor([task.tokenizer.encode(str(value)) for value in range(1, 6)])[:, 0]

    def read(texts, state):
        return model(torch.tensor([task.tokenizer.encode(text) for text in texts]), state)[1]

    def command(order):
        return f">>> a, b, c, d, e = {', '.join('abcde'[i] for i in order)}\n"

    def is_right(state):
        said = train.beliefs(task, model, state, len(values))[:, :, digits].argmax(-1) + 1
        return (said == torch.tensor(values)).all()

    with torch.no_grad():
        values = [rng.sample(range(1, 6), 5) for _ in range(states)]
        state = read(["".join(f">>> {name} = {value}\n" for name, value in zip("abcde", row)) + f">>> print('a', a)\na {row[0]}\n"
                      for row in values], None)
        for _ in range(20):
            chosen = [rng.choice(orders) for _ in values]
            values, state = [[row[i] for i in order] for row, order in zip(values, chosen)], read(map(command, chosen), state)
        assert is_right(state)
        before = values
        for order in orders:
            values = [[row[i] for i in order] for row in before]
            assert is_right(read([command(order)] * states, state)), order


@slow
def test_supplied_hard_model_is_a_finite_automaton(monkeypatch, run=HERE / "assets" / "deltanet-repl-hard.pt", count=5,
                                                   in_all=120):
    """Each of the 120 commands, after each of the 120, moves the same `count` rows of S by a signed permutation. No
    other row flows into them, and nothing is written there. All sequences of commands together make `in_all` such
    moves."""
    _, task, _, model = train.load(run, device="cpu")
    orders, scanned, every = itertools.permutations(range(5)), {}, torch.arange(120)
    lines = torch.tensor([task.tokenizer.encode(f">>> a, b, c, d, e = {', '.join('abcde'[i] for i in order)}\n")
                          for order in orders])

    def record(q, k, v, beta, state):
        scanned.update(k=k[:, 21:, 0], v=v[:, 21:, 0], beta=beta[:, 21:, 0, None, None])     # those of the second line
        return v, state

    monkeypatch.setattr(models, "delta_rule", record)
    product = torch.eye(64, dtype=torch.float64).repeat(120, 120, 1, 1)   # of a command's steps, after another one
    written = torch.zeros(120, 120, 64)                                   # the largest number that it writes into a row
    with torch.no_grad():
        for line, P, largest in zip(lines, product, written):
            model.double()(torch.cat([lines, line.expand(120, -1)], 1))
            k, v, beta = scanned.values()
            W = torch.zeros_like(P)
            for t in range(21):
                P -= beta[:, t] * k[:, t, :, None] * (k[:, t, None] @ P)
                W += beta[:, t] * k[:, t, :, None] * (v[:, t, None] - k[:, t, None] @ W)
            largest[:] = W.abs().amax(-1)
    moves = (product.abs() > 1e-12).sum(2) == 1                           # whether this row moves as a whole
    moves &= (product.abs().amax(2) - 1).abs() < 1e-12
    to, carried = product.abs().argmax(2), torch.ones(120, 64, dtype=torch.bool)
    while (ok := (moves & carried[every[:, None, None], to]).all(0)).logical_and(carried).ne(carried).any():
        carried &= ok                                                     # after a command: rows that all others move
    carried &= (to != torch.arange(64)).any(0).any(0)                     # without those that never move
    rows = [row.nonzero()[:, 0] for row in carried]
    assert {len(row) for row in rows} == {count}
    reached, new, small = set(), [(torch.eye(count, dtype=torch.float64), 0)], {}
    for after, before in itertools.product(range(120), repeat=2):
        into = product[after, before, rows[after]]                        # (count, 64)
        small[after, before] = into[:, rows[before]].round()
        assert into[:, ~carried[before]].abs().max() < 1e-12 and written[after, before, rows[after]].max() < 1e-12
    while new:
        memory, before = new.pop()
        for after in range(120):
            moved = small[after, before] @ memory
            if (key := (str(moved), str(rows[after]))) not in reached:
                reached.add(key)
                new.append((moved, after))
    assert {sum(place == other for _, other in reached) for _, place in reached} == {in_all}


def test_run_hardens_a_hard_deltanet_in_its_second_stage(tmp_path, monkeypatch, capsys):
    def anneal(mixer, accuracy):
        mixer.hardness.add_(1 / 16).clamp_(0, 1)
        return mixer.hardness == 1
    monkeypatch.setattr(models.HardDeltaNet, "anneal", anneal)
    assert go(tmp_path, "--model", "hard_deltanet", "--curriculum", "1x1 1x1 1x1", "--advance", 1e-9, "--stage-samples", 40,
              "--max-samples", 400, "--batch-size", 4, "--eval-every", 1) == 0
    log, saved = capsys.readouterr().out, train.read_checkpoint(only(tmp_path) / "ckpt.pt")
    assert [row["steps"] for row in saved["progress"]["passed"]] == [10, 26, 36] and saved["model"]["blocks.0.mixer.hardness"] == 1
    assert "pull" not in log.split("step 11:")[0] and "pull" in log.split("step 11:")[1]


def test_rotary_ssm_is_a_diagonal_recurrence_of_complex_numbers():
    """Row i of the state with row i + K/2 as its imaginary part, in complex128, one token after another."""
    mixer = models.MIXERS["rotary_ssm"](small("rotary_ssm", n_head=1)).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = mixer.project(x)
        o, _ = mixer.scan(x, q, k, v, None)
        angle, beta = mixer.to_angle(x), mixer.beta(x)
        q, k = (torch.complex(*t[:, :, 0].chunk(2, -1)) for t in (q, k))      # (2, 12, 16)
        S = torch.zeros(2, 16, 32, dtype=torch.complex128)
        for t in range(12):
            turned = torch.polar(1 - beta[:, t].double(), -angle[:, t])    # -: the state turns the other way
            S = turned[..., None] * S + beta[:, t, :, None] * k[:, t, :, None] * v[:, t]
            want = (q[:, t, :, None].conj() * S).real.sum(1)
            assert torch.allclose(o[:, t, 0].double(), want, atol=1e-5)


def test_block_diagonal_multiplies_a_learned_start_by_matrices():
    mixer = models.MIXERS["block_diagonal"](small("block_diagonal")).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        _, h = mixer(x)
        A = mixer.to_blocks(x).view(2, 5, 8, 8, 8)
        for b in range(2):
            for n in range(8):
                want = torch.linalg.multi_dot([*A[b, :, n].flip(0), mixer.start[n]])
                assert torch.allclose(h[b, n], want / want.norm())
        _, h = mixer.float()(100 * torch.randn(1, 500, 32))                   # products that would overflow
        assert torch.allclose(h.norm(dim=-1), torch.ones(1, 8))


def test_m2rnn_is_its_equation():
    mixer = models.MIXERS["m2rnn"](small("m2rnn", n_head=1)).double()
    torch.nn.init.normal_(mixer.within, std=0.2)
    x, S = torch.randn(1, 6, 32, dtype=torch.float64), torch.zeros(32, 32, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = mixer.project(x)
        o, _ = mixer.scan(x, q, k, v, None)
        f = torch.sigmoid(mixer.to_forget(x)[0, :, 0])
        for t in range(6):
            S = f[t] * S + (1 - f[t]) * (S @ mixer.within[0] + torch.outer(k[0, t, 0], v[0, t, 0])).tanh()
            assert torch.allclose(o[0, t, 0], S.T @ q[0, t, 0], atol=1e-6)


def test_mixers_equal_their_siblings_where_they_should():
    """One step of DeltaProduct is DeltaNet, and so are gates of 1; linear attention forgets nothing; KDA with
    equal gates in a head is GatedDeltaNet."""
    product, net = build("deltaproduct", n_householder=1), build("deltanet")
    net.load_state_dict(product.state_dict())
    tokens = torch.randint(262, (2, 30))
    assert torch.allclose(product(tokens)[0], net(tokens)[0], atol=1e-6)
    kda, gated = build("kda"), build("gated_deltanet")
    for lm in (kda, gated):
        lm.load_state_dict(product.state_dict(), strict=False)
        for block in lm.blocks:
            torch.nn.init.zeros_(block.mixer.to_gate.weight)
            torch.nn.init.constant_(block.mixer.to_gate.bias, 30)
        assert torch.allclose(lm(tokens)[0], net(tokens)[0], atol=1e-5)
    weights = gated.state_dict()
    for name in weights:
        if "to_gate" in name:
            weights[name] = torch.randn_like(weights[name])
    gated.load_state_dict(weights)
    for name in weights:
        if "to_gate" in name:                                             # each head has 16 channels
            weights[name] = weights[name].repeat_interleave(16, 0)
    kda.load_state_dict(weights)
    assert torch.allclose(kda(tokens)[0], gated(tokens)[0], atol=1e-5)
    S = transitions("linear_attention", 2.0)
    assert torch.allclose(S, torch.eye(32, dtype=torch.float64).expand_as(S))


def test_transformer_of_p2_has_as_many_parameters_as_published():
    with torch.device("meta"):
        lm = models.LM(small("transformer", d_model=512, d_mlp=768, n_layer=6, n_head=8, conv=0), 259)
    assert sum(p.numel() for p in lm.parameters()) == 13_641_216


def test_init_weights_starts_parameters_as_its_table_says():
    lm = models.LM(small("gated_deltanet", d_model=64, d_mlp=128, n_layer=3), 262, 5, 5)
    p = dict(lm.named_parameters())
    for name, std in (("embed.weight", 1), ("blocks.0.mixer.to_q.weight", 64 ** -0.5),
                      ("blocks.0.mixer.out.weight", (6 * 64) ** -0.5),
                      ("blocks.2.mlp.down.weight", (6 * 128) ** -0.5)):
        assert p[name].std().item() == pytest.approx(std, rel=0.05), name
    assert not p["head.weight"].any() and not p["blocks.0.mixer.to_beta.bias"].any()
    assert 0.45 < p["blocks.0.conv.weight"].abs().max() <= 0.5
    for model, start in ("deltanet", 0.5), ("ssm", 0.0025):               # of beta_max
        mixer = models.MIXERS[model](small(model))
        assert mixer.beta(torch.zeros(1, 1, 32)).mean().item() == pytest.approx(2 * start, rel=0.02)


@pytest.mark.parametrize("model", ALL)
def test_make_optimizers_gives_each_parameter_one_and_muon_the_blocks_matrices(model):
    lm = build(model, states="linear")
    names = {p: name for name, p in lm.named_parameters()}
    adamw, muon = ({p for group in optimizer.param_groups for p in group["params"]}
                   for optimizer in models.make_optimizers(lm))
    assert not adamw & muon and adamw | muon == set(names)
    assert muon == {p for p, name in names.items()
                    if name.startswith("blocks.") and len(p.shape) == 2 and p.shape[0] > 16 and p.shape[1] > 16}
    assert {block.mlp.up.weight for block in lm.blocks} <= muon


class Own(torch.nn.Module):
    """A mixer of one's own, with parameters of many kinds, and no state."""

    def __init__(self, cfg):
        super().__init__()
        self.vector = torch.nn.Parameter(torch.full((cfg.d_model,), 3.0))
        self.matrix = torch.nn.Parameter(torch.eye(cfg.d_model))
        self.stack = torch.nn.Parameter(torch.eye(4).repeat(cfg.d_model // 4, 1, 1))
        self.gate = torch.nn.Linear(cfg.d_model, 1)
        torch.nn.init.constant_(self.gate.bias, 7)
        self.register_buffer("fixed", torch.full((cfg.d_model,), 0.5))

    def forward(self, x, state=None):
        y = torch.sigmoid(self.vector) * (x @ self.matrix) + self.fixed
        y = torch.einsum("btni,nij->btnj", y.unflatten(-1, (-1, 4)), self.stack).flatten(2)
        return torch.sigmoid(self.gate(y)) * y, None


def test_mixer_of_ones_own_starts_as_it_says_and_trains(monkeypatch, tmp_path):
    monkeypatch.setitem(models.MIXERS, "own", Own)
    test_lm_agrees_whole_token_by_token_and_segment_by_segment("own")
    assert go(tmp_path, "--model", "own") == 0
    cfg, _, _, trained = train.load(only(tmp_path))
    start, end = train.build(cfg)[-1].blocks[0].mixer, trained.blocks[0].mixer
    assert (start.vector == 3).all() and start.gate.bias == 7 and (end.fixed == 0.5).all()
    for (name, before), after in zip(start.named_parameters(), end.parameters()):
        assert (before != after).any(), name
    assert models.numbers((None, [end.fixed])) == end.fixed.numel()


@pytest.mark.parametrize("model", ["lstm", "gru"])
def test_lstm_and_gru_keep_most_of_their_state_for_20_tokens_when_new(model):
    """The state after 20 tokens of zeros, from a state of ones and from one of zeros."""
    mixer = models.MIXERS[model](small(model))
    kept = []
    for start in (1, 0):
        state = torch.full((1, 1, 32), float(start))
        _, state = mixer(torch.zeros(1, 20, 32), (state, state) if model == "lstm" else state)
        kept.append(state[-1] if model == "lstm" else state)
    assert 0.5 < (kept[0] - kept[1]).mean() < 0.9


# State heads

def test_state_head_changes_no_weight_of_the_rest():
    """Bit for bit, so runs with and without state supervision start alike."""
    bare = build("deltanet").state_dict()
    for head in HEADS:
        lm = build("deltanet", states=head)
        assert all(torch.equal(x, lm.state_dict()[name]) for name, x in bare.items())
    assert not [*build("deltanet").to_state.parameters()]


@pytest.mark.parametrize("beliefs", [False, True])
def test_linear_head_loss_is_cross_entropy_slot_by_slot(beliefs):
    task = Repl(5)
    lm, batch = build("gru", states="linear"), batch_of(task, Stage(6), 3)
    lm.to_state.weight.data.normal_()
    known = F.one_hot(batch.state + 1, 6)[..., 1:]                        # (B, T, slots, classes)
    labels = 0.9 * known + 0.1 * known.sum(-1, keepdim=True) / 5          # smoothed
    if beliefs:                                                           # pfsa: one slot, soft labels
        lm = models.LM(small("gru", states="linear"), len(task.tokenizer), 1, 5)
        lm.to_state.weight.data.normal_()
        labels = known[:, :, 4:] * torch.rand(5)
        labels = labels / labels.sum(-1, keepdim=True).clamp(min=1e-9)
        batch = batch._replace(belief=labels[:, :, 0])
    told, _ = lm(batch.tokens)
    nats = []
    for b, t in batch.line_end.nonzero().tolist():
        for slot, label in enumerate(labels[b, t]):
            if label.sum() > 0:
                nats.append(-(label * lm.to_state(told[b, t])[slot].log_softmax(-1)).sum().item())
    assert lm.to_state.loss(lm, told, batch).item() == pytest.approx(np.mean(nats), rel=1e-5)


def lines_of(task, batch):
    """What stated_lines should find, by loops: each line's trace and end, and its state's tokens."""
    found = []
    for b, texts in enumerate(batch.state_tokens.tolist()):
        for i, end in enumerate(batch.line_end[b].nonzero()[:, 0].tolist()):
            row = [token for token in texts[i] if token != data.PAD]
            if row:
                found.append((b, end, row))
    return found


@pytest.mark.parametrize("kind, size, L", [(data.Arith, 2, 4), (Repl, 3, 6)])
def test_transformer_head_writes_a_state_knowing_only_its_lines_vector(kind, size, L):
    """Line by line, without padding, as a loop over tokens says it."""
    task, lm = kind(size, states="transformer"), build("gru", states="transformer")
    batch = batch_of(task, Stage(L), 2)
    head, nats = lm.to_state, []
    torch.nn.init.normal_(head.head.weight)
    with torch.no_grad():
        told, _ = lm(batch.tokens)
        for b, end, row in lines_of(task, batch):
            for i, token in enumerate(row):
                before = torch.tensor([row[:i]], dtype=torch.long)
                x = torch.cat([told[None, None, b, end], head.embed(before)], 1)
                for block in head.blocks:
                    x, _ = block(x)
                nats.append(-head.head(head.norm(x[0, -1])).log_softmax(-1)[token].item())
        assert head.loss(lm, told, batch).item() == pytest.approx(np.mean(nats), rel=1e-4)


@pytest.mark.parametrize("kind, L", [(data.Arith, 4), (data.Parity, 6)])
def test_contrastive_head_finds_states_and_lines(kind, L):
    """Both directions as loops over a trace's lines; each state read by itself, without padding."""
    task, lm = kind(states="contrastive"), build("gru", states="contrastive")
    batch, nats = batch_of(task, Stage(L), 3), []
    lines = lines_of(task, batch)
    with torch.no_grad():
        told, _ = lm(batch.tokens)

        def alike(line, row):
            b, end, _ = line
            read = lm(torch.tensor([row]))[0][0, -1]
            return (F.cosine_similarity(told[b, end], read, dim=0) / lm.to_state.temperature).exp()

        for line in lines:
            trace, _, row = line
            same = [other for other in lines if other[0] == trace]
            states = {tuple(other[2]) for other in same}                  # equal states are one candidate
            to_state = alike(line, row) / sum(alike(line, list(state)) for state in states)
            to_line = alike(line, row) / sum(alike(other, row) for other in same)
            nats.append(-(to_state.log() + to_line.log()).item() / 2)
        assert lm.to_state.loss(lm, told, batch).item() == pytest.approx(0.1 * np.mean(nats), rel=1e-4)


# The DeltaNet whose weights are written by hand, against the memory of the Python that executed the trace

def by_hand_against_python(n_vars, moves, stage):
    """-> which prints it gets right (bool); the rows of its state before the last print, and what they should
    be: those after the assignments, moved as Python's values moved. Both (4, n_vars, V): new_x twice, old_x twice."""
    task = Repl(n_vars, moves)
    lm, batch = models.by_hand(task), batch_of(task, stage, 1, "test")
    end = batch.line_end[0].nonzero()[:, 0]
    cuts = [end[n_vars - 1] + 1, end[-3] + 1]                             # a print is two lines
    state, right, rows = None, [], []
    for part in zip(*(x.tensor_split(cuts, 1) for x in (batch.tokens, batch.target, batch.asked))):
        for tokens, target, asked in zip(*(x.split(2048, 1) for x in part)):
            hidden, state = lm(tokens, state)
            right += (lm.head(hidden).argmax(-1) == target)[asked].tolist()
        rows.append(state[0][1][0, 0, :4 * n_vars].unflatten(0, (4, n_vars)))
    first, last = (batch.state[0, i - 1].tolist() for i in cuts)
    return right, rows[1], rows[0][:, [first.index(x) for x in last]]


@pytest.mark.parametrize("n_vars, moves, commands", [
    (2, "perm", 500), (3, "swap", 1000), (9, "perm", 500), (5, "perm", 10_000), (6, "perm", 500),
    pytest.param(5, "swap", 100_000, marks=slow)])
def test_by_hand_is_exact_to_the_last_bit(n_vars, moves, commands):
    right, now, should = by_hand_against_python(n_vars, moves, Stage(commands, commands))
    assert right == [True] and torch.equal(now, should)
    assert now[:2].abs().max() > 1 and not now[2:].any()                  # new_x holds a value, old_x is empty


@pytest.mark.parametrize("n_vars, moves", [(n, moves) for n in range(2, 10) for moves in ("perm", "swap")])
def test_by_hand_keeps_its_state_at_prints(n_vars, moves):
    right, now, should = by_hand_against_python(n_vars, moves, Stage(100, 2))
    assert len(right) == 50 and all(right) and torch.equal(now, should)


def test_by_hand_needs_repl():
    for task in (data.Inverse(), data.Parity()):
        with pytest.raises(ValueError, match="by_hand needs a data.Repl"):
            models.by_hand(task)


# ----------------------------------------------------------------------------------------------------------
# train.py: loss, score, schedule

@pytest.mark.parametrize("task, stage", [(Repl(3), "6x2"), (ListPerm(3), "6:2")])
def test_losses_are_what_a_loop_over_tokens_says(task, stage):
    """Of programs of several lengths, too, where what fills them up counts for nothing."""
    [stage] = parse_stages(stage)
    model = models.LM(small("gru", n_layer=1, states="linear"), len(task.tokenizer), task.n_slots, task.n_classes)
    model = model.double()
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.to_state.weight)
    batch = batch_of(task, stage, 4)
    assert (batch.tokens == PAD).any() == task.one_answer
    following, asked, states, right = [], [], [], []
    with torch.no_grad():
        terms, score = train.losses(task, model, batch)
        hidden, _ = model(batch.tokens)
        for b, t in itertools.product(*map(range, batch.tokens.shape)):
            text = task.tokenizer.decode(batch.tokens[b, :t + 1])
            if t and batch.tokens[b, t] != PAD:
                p = model.head(hidden[b, t - 1]).softmax(-1)
                following.append(-p[batch.tokens[b, t]].log().item())
                if re.search(r"(\n\w \d|== .+\n?)\Z", text) and text.count("print(") != 1:    # the first is a look-up
                    asked.append(following[-1])
                    right.append(p.argmax() == batch.tokens[b, t])
            if text.endswith("\n"):
                nats = -model.to_state(hidden[b, t]).log_softmax(-1)
                state = batch.state[b, t].tolist()
                states += [0.9 * nats[slot, value].item() + 0.1 * nats[slot].mean().item()        # smoothed
                           for slot, value in enumerate(state) if value >= 0]
    for name, values in (("next", following), ("reveal", asked), ("state", states)):
        assert terms[name].item() == pytest.approx(np.mean(values), rel=1e-5)
    answers = np.split(np.array(right), 4)
    assert [row[~row.isnan()].tolist() for row in score] == [[all(x)] if task.one_answer else x.tolist() for x in answers]
    if not task.one_answer:
        assert torch.equal(~score.isnan(), batch.asked)


def test_right_answers_count_only_if_all_states_in_the_text_before_them_are_right():
    task = Repl(3, states="text")
    batch = batch_of(task, Stage(6, 2), 4)
    right = torch.ones_like(batch.asked)
    assert train.right_answers(task, batch, right).nanmean() == 1
    second = batch.asked[1].nonzero()[1]
    between = (batch.state_in_text[1] & (torch.arange(right.shape[1]) > second)).nonzero()[0]
    right[1, between] = False                                             # a state after the second answer
    right[2, batch.asked[2].nonzero()[1]] = False                         # the second answer itself
    found = train.right_answers(task, batch, right)[batch.asked].view(4, 3)
    assert found.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]]


def test_evaluate_and_losses_do_not_count_the_print_before_the_first_command():
    """A model that is wrong there, and otherwise written by hand, has 100 %."""
    task, wrong = Repl(3, states="none"), []
    lm = models.by_hand(task)
    exact = lm.forward

    def forgetful(tokens, state=None):
        hidden, state = exact(tokens, state)
        for row, text in zip(hidden, map(task.tokenizer.decode, tokens.tolist())):
            first = re.search(r"\n(?=>>> a, b, c)", text).end()
            start = len(task.tokenizer.encode(text[:first]))
            wrong.append((lm.head(row[:start]) != 0).any().item())
            row[:start] = 0
        return hidden, state
    cfg = Config(n_vars=3, eval_samples=8, device="cpu")
    lm.forward = forgetful
    row = train.evaluate(lm, task, Stage(6, 2), cfg)
    assert row["accuracy"] == row["final"] == 1 and len(row["by_answer"]) == 3 and all(wrong)
    terms, right = train.losses(task, lm, batch_of(task, Stage(6, 2), 4))
    assert right.nanmean() == 1 and (~right.isnan()).sum() == 12 and terms["reveal"] < 0.1 < terms["next"]


class Executes(torch.nn.Module):
    """A "model" of parity with states in the text. It executes each line in the state that it reads behind
    the line before, with Python; in the lines whose numbers are in `slips` it writes the wrong bit."""

    def __init__(self, task, slips):
        super().__init__()
        self.task, self.slips, self.head = task, slips, torch.nn.Identity()

    def next(self, text):
        *before, line = text.split("\n")
        memory = dict(re.findall(r"# (p)=(.*)", text.rpartition("\n")[0])[-1:])
        memory = {name: int(value) for name, value in memory.items()}
        source, mark, said = line.partition("  # " if "#" in line else "assert p == ")
        if not mark:
            return PAD
        exec(source, memory)
        answer = memory["p"] ^ (len(before) + 1 in self.slips)
        return ord((f"p={answer}\n" if source else f"{answer}\n")[len(said)])

    def forward(self, tokens, state):
        texts, expected = state or [""] * len(tokens), []
        for b, row in enumerate(tokens.tolist()):
            expected.append([])
            for token in row:
                texts[b] += self.task.tokenizer.decode([token]) if token else ""
                expected[b].append(self.next(texts[b]) if token else PAD)
        return F.one_hot(torch.tensor(expected), 400).float(), texts

    def writes(self, true_text):
        """The trace that it makes of the true lines if it writes all states and the answer itself."""
        text = ""
        for line in true_text.splitlines():
            text += re.match(".*(# |== )", line)[0]
            while not text.endswith("\n"):
                text += chr(self.next(text))
        return text


@pytest.mark.parametrize("slips", [[], [3], [1, 4], [7]])
def test_evaluate_with_states_in_the_text_is_as_if_the_model_wrote_the_traces_itself(slips):
    """One wrong bit, a wrong one that a second one corrects, and a wrong answer all count as wrong."""
    task, stage = Parity(states="text"), Stage(6)
    model, cfg = Executes(task, slips), Config(eval_samples=12, batch_size=12)
    accuracy = train.evaluate(model, task, stage, cfg)["accuracy"]
    texts = [task.tokenizer.decode(row).rstrip("\0") for row in task.batch(0, "test", stage, 0, 12).tokens]
    assert accuracy == np.mean([model.writes(text) == text for text in texts]) == (not slips)


class Knows(torch.nn.Module):
    """A "model" that knows the answers of a batch whose numbers, within their trace, are in `known`."""

    def __init__(self, batch, known):
        super().__init__()
        self.head, said = torch.nn.Identity(), batch.target + 1
        number = batch.asked.cumsum(1) - 1
        for i in known:
            right = batch.asked & (number == i)
            said[right] = batch.target[right]
        self.said = F.one_hot(torch.tensor(said)).float()

    def forward(self, tokens, state):
        return self.said, None


def test_evaluate_final_is_the_accuracy_of_the_last_answer_in_the_test_split():
    task, stage, cfg = Repl(3), Stage(8, 2), Config(eval_samples=16, batch_size=16)
    batch = task.batch(cfg.seed, "test", stage, 0, 16)
    assert train.evaluate(Knows(batch, [3]), task, stage, cfg) == {
        "accuracy": 0.25, "final": 1, "by_answer": [0, 0, 0, 1]}
    task, stage = Group("Z2"), Stage(8)
    words = task.batch(cfg.seed, "test", stage, 0, 16)                    # 64: several for each sample
    assert train.evaluate(Knows(words, [7]), task, stage, cfg)["by_answer"] == [0] * 7 + [1]
    task, stage = ListPerm(3), Stage(4)
    batch = task.batch(cfg.seed, "test", stage, 0, 16)
    tokens = batch.asked[0].sum()                                         # of its one answer
    for known, accuracy in (range(tokens), 1), (range(tokens - 1), 0):
        assert train.evaluate(Knows(batch, known), task, stage, cfg)["by_answer"] == [accuracy]


@pytest.mark.parametrize("task, stage", [(Repl(), "24x1"), (Group("S3"), "24"), (Parity(states="text"), "24:5"),
                                         (pfsa.MaybeSwaps(), "24x2")])
def test_evaluate_gives_the_same_in_segments(task, stage, monkeypatch):
    [stage], found = parse_stages(stage), []
    cfg = Config(eval_samples=20, batch_size=8)
    lm = models.LM(small("deltanet+transformer"), len(task.tokenizer), task.n_slots, task.n_classes).double()
    lm.head.weight.data.normal_()                                         # fp32 may flip near-ties
    for segment in (10000, 7):
        monkeypatch.setattr(train, "SEGMENT", segment)
        found.append(train.evaluate(lm, task, stage, cfg))
    whole, pieces = found
    assert whole["by_answer"] == pieces["by_answer"]
    assert "kl" not in whole or whole["final_kl"] == pytest.approx(pieces["final_kl"], rel=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_evaluate_runs_in_the_dtype_of_training(dtype):
    task, found = Repl(3), set()
    lm = models.LM(small("gru"), len(task.tokenizer))
    lm.head.register_forward_hook(lambda module, given, logits: found.add(logits.dtype))
    train.evaluate(lm, task, Stage(4), Config(eval_samples=2, dtype=dtype, device="cpu"))
    assert found == {torch.bfloat16 if dtype == "bf16" else torch.float32}


def test_report_gives_only_the_kl_where_answers_are_not_drawn_from_the_predictive(capsys):
    task, cfg = pfsa.MaybeSwaps(3), Config(eval_samples=4, device="cpu")
    train.report(models.LM(small("gru"), len(task.tokenizer)), task, parse_stages("8x2 8x2:forced"), cfg)
    drawn, forced = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"eval    8x2: KL .* nats .*; loss .*, of the exact probabilities .*", drawn)
    assert re.fullmatch(r"eval    8x2:forced: KL \S+ nats per answer \(0 is perfect\), the last \S+", forced)


# ----------------------------------------------------------------------------------------------------------
# train.py: runs

TINY = ("--n-vars 3 --d-model 32 --batch-size 8 --warmup 16 --cooldown 32 --max-samples 96 --eval-samples 8 "
        "--eval-at 4x2 --device cpu --curriculum 4x1 --eval-every 5").split()                 # 12 steps


def go(tmp_path, *args):
    """main() of train.py with tiny settings; arguments given later win. -> exit code."""
    return train.main([*TINY, "--out", str(tmp_path), *map(str, args)])


def only(folder):
    [path] = folder.iterdir()
    return path


def result_of(folder):
    [line] = (folder / "result.json").read_text().splitlines()
    return json.loads(line)


def timeless(x):
    """Without what a clock and the command line say."""
    if isinstance(x, dict):
        return {key: timeless(value) for key, value in x.items() if key not in ("seconds", "config", "argv")}
    return [timeless(value) for value in x] if isinstance(x, list) else x


def at_call(monkeypatch, number, act):
    """Call act() within the call of `losses` of this number, counted over all runs from now on."""
    honest, numbers = train.losses, itertools.count(1)

    def watched(*args):
        if next(numbers) == number:
            act()
        return honest(*args)
    monkeypatch.setattr(train, "losses", watched)


def interrupt():
    raise KeyboardInterrupt


def run_again(tmp_path, capsys, *args):
    """A run that ends well -> what it prints."""
    capsys.readouterr()
    assert go(tmp_path, *args) == 0
    return capsys.readouterr().out


def test_train_py_learns_three_variables_with_a_tiny_model(tmp_path):
    """The whole chain, from a command to result.json: 95 % at twice the trained length; chance is 33 %."""
    done = command(HERE / "train.py", *TINY, "--curriculum", "2x1 4x1 8x2", "--eval-at", "8x2 16x4",
                   "--max-samples", 12000, "--cooldown", 960, "--eval-samples", 64, "--eval-every", 300,
                   "--out", tmp_path)
    noise = [line for line in done.stderr.splitlines() if "torch/utils" not in line]      # torch 2.9 may warn
    assert done.returncode == 0 and not noise, done.stderr
    result = result_of(only(tmp_path))
    assert list(result) == ("model task seed params chance trained reached samples steps seconds passed held_out eval "
                            "commit code argv torch threads machine config").split()
    accuracy = [row["accuracy"] for row in result["eval"]]
    assert accuracy[0] >= 0.99 and accuracy[1] >= 0.95, accuracy
    assert [passed["stage"] for passed in result["passed"]] == ["2x1", "4x1", "8x2"]
    assert result["reached"] == result["trained"] == "8x2" and result["samples"] == 8 * result["steps"]
    passes = [row["samples"] for row in result["passed"]]
    tested = {*range(2400, result["samples"], 2400), *passes, result["samples"]}
    assert [samples for samples, _, _ in result["held_out"]] == sorted(tested)


def test_run_is_what_a_plain_loop_makes_of_it(tmp_path):
    """Weights bit for bit, and held-out accuracies: 20 steps of each stage, and a third of 240 traces more."""
    go(tmp_path, "--seed", 3, "--curriculum", "3x1 4x1", "--stage-samples", 160, "--advance", 1, "--warmup", 40,
       "--cooldown", 9999, "--max-samples", 360, "--reveal-weight", 5, "--eval-at", "5x1 4x2", "--eval-every", 15)
    task, cfg = Repl(3), Config(seed=3, batch_size=8, eval_samples=8)
    torch.manual_seed(3)
    shape = small("deltanet", n_layer=1, n_head=1, conv=12, d_mlp=64, states="linear")
    lm = models.LM(shape, len(task.tokenizer), 3, 3)
    optimizers, held_out = train.make_optimizers(lm), []
    for step in range(45):
        rate = 1.8e-2 * min(1, (step + 1) / 5) * (1 + math.cos(math.pi * max(0, (step - 30) / 15))) / 2
        stage = Stage(3) if step < 20 else Stage(4)
        batch = train.to_tensors(task.batch(3, "train", stage, step, 8), "cpu")
        terms, _ = train.losses(task, lm, batch)
        lm.zero_grad()
        (terms["next"] + 5 * terms["reveal"] + terms["state"]).backward()
        norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm()
        assert norm > 1 or step                                           # so that clipping matters
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if step % 15 == 14 or step in (19, 39):                           # also where a stage is passed
            tested = Stage(5) if step >= 20 else stage
            held_out.append([8 * step + 8, str(tested), train.evaluate(lm, task, tested, cfg)["accuracy"]])
    saved, result = train.read_checkpoint(only(tmp_path) / "ckpt.pt"), result_of(only(tmp_path))
    assert all(torch.equal(saved["model"][name], p) for name, p in lm.state_dict().items())
    assert result["held_out"] == held_out and [row["steps"] for row in result["passed"]] == [20, 40]


@pytest.mark.parametrize("interrupted", [False, True])
def test_run_passes_a_stage_at_90_percent_of_its_own_last_ten_batches(tmp_path, monkeypatch, capsys, interrupted):
    """And the log says so. Also if it resumes from the checkpoint of the 20th. The traces end a batch after the last
    stage is passed."""
    rights, batches, stops, honest = [1] * 10 + [0] * 5 + [1] * 20, [], [22] * interrupted, train.losses

    def said(*args):
        if len(batches) in stops:
            stops.clear()
            del batches[20:]
            interrupt()
        batches.append(args)
        terms, right = honest(*args)
        return terms, torch.full_like(right, rights[len(batches) - 1])
    monkeypatch.setattr(train, "losses", said)
    flags = ["--curriculum", "3x1 4x1", "--max-samples", 200, "--reveal-weight", 3]
    if interrupted:
        assert go(tmp_path, *flags) == 130
    assert go(tmp_path, *flags) == 0
    result = result_of(only(tmp_path))
    assert [row["steps"] for row in result["passed"]] == [10, 24] and result["steps"] == 25
    assert result["reached"] == "4x1"
    log = re.findall(r"step (\d+): .* s, stage (.*), (.*)% right.* at (.*), loss (.*) = next (.*) \+ .* (.*) \+ .* (.*)",
                     capsys.readouterr().out)
    told = {(step, where, right, tested) for step, where, right, tested, *_ in log}
    assert told == {("5", "3x1", "100.0", "3x1"), ("10", "3x1 passed", "100.0", "3x1"), ("15", "4x1", "0.0", "4x2"),
                    ("20", "4x1", "50.0", "4x2"), ("24", "4x1 passed", "90.0", "4x2"), ("25", "4x1", "100.0", "4x2")}
    for *_, loss, one, two, three in log:
        assert float(loss) == pytest.approx(float(one) + float(two) + float(three), abs=2e-3)


@pytest.mark.parametrize("task, states", [("repl", "text"), ("group", "auto"), ("listperm", "contrastive"),
                                          ("arith", "transformer"), ("pfsa", "auto")])
def test_run_of_every_task_is_evaluated_again_from_its_folder(tmp_path, capsys, task, states):
    flags = ["--task", task, "--states", states, "--eval-at", "auto"]
    assert go(tmp_path, *flags, "--curriculum", "4x2" if task == "pfsa" else "4") == 0
    rows = re.findall("^eval .*", capsys.readouterr().out, re.M)
    assert len(rows) == len(result_of(only(tmp_path))["eval"]) > 1
    assert ("the last" in rows[0]) == (task not in ("listperm", "arith"))        # these ask once
    assert train.main(["--eval", str(only(tmp_path)), "--device", "cpu"]) == 0
    assert re.findall("^eval .*", capsys.readouterr().out, re.M) == rows


# Stopping: how a run is stopped, and the step from which it is resumed

def in_step(number):
    """In the call of `losses` of this number."""
    return lambda patch: at_call(patch, number, interrupt)


def in_save(number):
    """In the save of this number, with half of the file on the disk."""
    def stop(patch):
        honest, numbers = torch.save, itertools.count(1)

        def dies(x, path):
            honest(x, path)
            if next(numbers) == number:
                os.truncate(path, os.path.getsize(path) // 2)
                interrupt()
        patch.setattr(torch, "save", dies)
    return stop


def in_report(patch):
    patch.setattr(train, "report", lambda *_: interrupt())


LONG = ["--advance", 1, "--max-samples", 400, "--eval-every", 10]         # 50 steps
TWO = [*LONG, "--stage-samples", 200, "--curriculum", "4x1 8x2"]
FOUR = [*LONG, "--stage-samples", 80, "--curriculum", "3x1 4x1 8x2 8x4", "--cooldown", 120, "--dtype", "bf16"]
STOPS = [([], in_step(1), 0), ([], in_step(9), 5), ([], in_step(12), 10), ([], in_save(1), 0), ([], in_save(2), 5),
         ([], in_save(3), 10), ([], in_report, 12), (["--cooldown", 0], in_step(6), 5), (TWO, in_step(29), 25),
         (TWO, in_save(3), 20), (FOUR, in_step(34), 30)]


@pytest.mark.parametrize("flags, stop, step", STOPS)
def test_run_that_was_stopped_ends_bit_for_bit_like_one_that_was_not(tmp_path, monkeypatch, capsys, flags, stop, step):
    assert go(tmp_path / "whole", *flags) == 0
    with monkeypatch.context() as patch:
        stop(patch)
        assert go(tmp_path / "parts", *flags) == 130
    assert "stopped; the same command resumes" in capsys.readouterr().out
    assert f", from step {step}\n" in run_again(tmp_path / "parts", capsys, *flags)
    whole, parts = only(tmp_path / "whole"), only(tmp_path / "parts")
    assert timeless(result_of(whole)) == timeless(result_of(parts)) and result_of(whole)["held_out"]
    a, b = (train.read_checkpoint(folder / "ckpt.pt") for folder in (whole, parts))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    assert {path.name for path in parts.iterdir()} == {"ckpt.pt", "result.json"}          # no half of a file


# Resuming and refusing: what is in the folder, what has changed since, what is said then

def edited(folder, monkeypatch):
    monkeypatch.setattr(train, "CODE", train.CODE + b"# a comment")


def cut(folder, monkeypatch):
    os.truncate(folder / "ckpt.pt", 1000)


def grown(folder, monkeypatch):
    """A fork has one more setting."""
    kinds = [(f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata)) for f in fields(Config)]
    kinds += [("temperature", float, 1.0), ("burn_in", int, 0)]
    monkeypatch.setattr(train, "Config", dataclasses.make_dataclass("Config", kinds))


def other_default(folder, monkeypatch):
    """It holds a run from before a default was changed."""
    result = result_of(folder)
    (folder / "result.json").write_text(json.dumps({**result, "config": {**result["config"], "moves": "swap"}}))


LATER = [  # was it stopped?
    (False, None, [], "finished after 96 traces. Remove it to train again"),
    (False, None, ["--eval-at", "8x2", "--eval-samples", 4], "eval    4x2: "),              # tested as it was then
    (False, edited, [], "the code or the trace file has changed since this run, so these are its old"),
    (False, grown, [], "finished after 96 traces"),
    (False, other_default, [], "holds a run with other settings"),
    (True, edited, [], "was started with other code or another trace file"),
    (True, cut, [], "ckpt.pt is not a checkpoint, or is incomplete")]


@pytest.mark.parametrize("stopped, change, more, says", LATER)
def test_run_leaves_a_finished_or_refused_folder_as_it_is(tmp_path, monkeypatch, capsys, stopped, change, more, says):
    with monkeypatch.context() as patch:
        if stopped:
            at_call(patch, 9, interrupt)
        assert go(tmp_path) == 130 * stopped
    folder = only(tmp_path)
    if change:
        change(folder, monkeypatch)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    error = stopped or change is other_default
    said = refused(capsys, *TINY, "--out", tmp_path) if error else run_again(tmp_path, capsys, *more)
    assert says in said and {path: path.read_bytes() for path in folder.iterdir()} == before
    assert error or ("note" in said) == (change is edited)


def test_origin_depends_on_the_code_and_on_the_file_of_traces(tmp_path, monkeypatch):
    for name in ("data.py", "kernels.py", "models.py", "pfsa.py", "train.py"):
        assert (HERE / name).read_bytes() in train.CODE
    (tmp_path / "traces.jsonl").write_text("one")
    codes = [train.origin(Config())["code"], train.origin(Config(trace_file="traces.jsonl"))["code"]]
    (tmp_path / "traces.jsonl").write_text("two")
    codes += [train.origin(Config(trace_file="traces.jsonl"))["code"]]
    monkeypatch.setattr(train, "CODE", train.CODE + b" ")
    assert len({*codes, train.origin(Config())["code"]}) == 4


def test_origin_names_no_commit_of_a_repository_that_the_file_is_not_in(tmp_path):
    """Unpacked inside a folder of another repository, which GIT_DIR names, too."""
    shutil.copytree(HERE, tmp_path / "fork", ignore=lambda folder, names: {x for x in names if not x.endswith(".py")})
    here = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "b"}
    for words in ("init -q", "commit -q --allow-empty -m x"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, env=os.environ | here, check=True)
    say = ["-c", "import train; print([train.COMMIT])"]
    outside = os.environ | {"GIT_DIR": str(tmp_path / ".git")}
    assert command(*say, cwd=tmp_path / "fork").stdout == "['']\n"
    assert command(*say, cwd=HERE, env=outside).stdout == f"{[train.COMMIT]}\n"


def test_save_tries_twice_and_run_removes_what_a_killed_process_left(tmp_path, monkeypatch):
    """os.replace fails once, as if a virus scanner held the file."""
    honest, numbers = os.replace, itertools.count(1)

    def replace(*paths):
        if next(numbers) == 1:
            raise PermissionError
        honest(*paths)
    monkeypatch.setattr(os, "replace", replace)
    with monkeypatch.context() as patch:
        at_call(patch, 9, interrupt)
        assert go(tmp_path) == 130
    (only(tmp_path) / "12345678.tmp").write_text("half a checkpoint")
    assert go(tmp_path) == 0 and next(numbers) > 4
    assert {path.name for path in only(tmp_path).iterdir()} == {"ckpt.pt", "result.json"}


def test_run_refuses_a_damaged_result_and_numbers_that_a_checkpoint_cannot_hold(tmp_path, capsys):
    assert go(tmp_path) == 0
    (only(tmp_path) / "result.json").write_text("")
    assert "result.json is damaged: remove it" in refused(capsys, *TINY, "--out", tmp_path)
    (only(tmp_path) / "result.json").unlink()
    assert go(tmp_path) == 0 and result_of(only(tmp_path))["samples"] == 96
    for cfg in Config(learning_rate=np.float64(0.1)), Config(seed=np.int64(1)), Config(out=Path("x")):
        with pytest.raises(data.BadInput, match="give a plain (float|int|str), not (float64|int64|PosixPath)"):
            train.run(cfg)


def test_run_in_two_processes_and_one_folder_computes_the_same_bits(tmp_path):
    assert go(tmp_path / "whole", *TWO) == 0
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=lambda: sys.exit(go(tmp_path / "both", *TWO))) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    whole, shared = only(tmp_path / "whole"), only(tmp_path / "both")
    assert [process.exitcode for process in both] == [0, 0] and timeless(result_of(whole)) == timeless(result_of(shared))
    assert {path.name for path in shared.iterdir()} == {"ckpt.pt", "result.json"}


def test_train_py_ends_at_ctrl_c_with_130_and_says_that_it_can_be_resumed(tmp_path):
    run = subprocess.Popen([sys.executable, "-u", HERE / "train.py", *TINY, "--max-samples", "1000000", "--advance", "1",
                            "--out", tmp_path], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not run.stdout.readline().startswith("step 10"):                # after the checkpoint of step 5
        assert run.poll() is None, run.stderr.read()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err and "the same command resumes" in out
    assert train.read_checkpoint(only(tmp_path) / "ckpt.pt")["progress"]["step"] >= 5


def test_run_on_a_full_disk_ends_in_one_line_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    """The system refuses to write files of more than 10,000 bytes, as a full disk does, from the second save on."""
    with monkeypatch.context() as patch:
        at_call(patch, 9, interrupt)
        assert go(tmp_path) == 130
    before = {path: path.read_bytes() for path in only(tmp_path).iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        said = refused(capsys, *TINY, "--out", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ckpt.pt cannot be written" in said and "choose another --out" in said
    assert {path: path.read_bytes() for path in only(tmp_path).iterdir()} == before


class Bar(train.tqdm):
    """Shown, as on a terminal."""

    def __init__(self, *args, disable, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("factor", [1, math.nan])
def test_run_ends_its_bar_before_it_tells_of_ctrl_c_or_a_loss_that_is_not_finite(tmp_path, monkeypatch, capsys, factor):
    """A loss that is not finite ends with 1 and keeps what was good, and the rest of the grid is trained."""
    honest, numbers = train.losses, itertools.count(1)

    def poisoned(*args):
        terms, right = honest(*args)
        number = next(numbers)
        if number == 8 and factor == 1:
            interrupt()
        return {name: x * (factor if number == 8 else 1) for name, x in terms.items()}, right
    monkeypatch.setattr(train, "losses", poisoned)
    monkeypatch.setattr(train, "tqdm", Bar)
    assert go(tmp_path, "--seed", "0,1") == (130 if factor == 1 else 1)
    out, err = capsys.readouterr()
    assert "next    python" not in out
    first, *others = sorted(tmp_path.iterdir())
    saved = train.read_checkpoint(first / "ckpt.pt")
    assert saved["progress"]["step"] == 5 and all(x.isfinite().all() for x in saved["model"].values())
    assert not (first / "result.json").exists()
    if factor == 1:
        assert err.endswith("\n") and out.splitlines()[-1].startswith("stopped") and not others
    else:
        [line] = [line for line in err.splitlines() if "not finite" in line]
        assert line.startswith("train.py: the loss or its gradient was not finite after step 7: try --learning-rate")
        assert result_of(*others)["steps"] == 12


def test_folder_of_gives_each_run_a_folder_of_its_own():
    changed = {f.name: 7 * f.default + 1 for f in fields(Config) if f.type is not str}
    names = {train.folder_of(Config(**{**changed, "seed": seed})).name for seed in (1, 2, 3)}
    assert len(names) == 3 and max(map(len, names)) < 255
    assert train.folder_of(Config(seed=3)) == Path("out/deltanet-repl-seed=3")
    assert train.folder_of(Config(curriculum="9 8")) != train.folder_of(Config(curriculum="9:8"))
    long = [train.folder_of(Config(trace_file=300 * "x" + end)).name for end in "ab"]
    assert long[0] != long[1] and max(map(len, long)) < 200
    for f in fields(Config):                                              # a run is its settings
        other = "other" if f.type is str else 7 * f.default + 1
        same_name = train.folder_of(Config(**{f.name: other})).name == "deltanet-repl"
        assert same_name == (f.name in ("eval_at", "eval_samples", "eval_every", "device", "out")), f.name


def test_train_py_makes_a_grid_of_comma_lists_and_resumes_it_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    flags = ["--seed", "0,1,0", "--model", "deltanet,gru"]
    with monkeypatch.context() as patch:
        at_call(patch, 12 + 12 + 7, interrupt)                            # in the third of four runs
        assert go(tmp_path, *flags) == 130
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert len(finished) == 2
    assert go(tmp_path, *flags) == 0
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    done = [result_of(folder) for folder in tmp_path.iterdir()]
    assert {(row["model"], row["seed"]) for row in done} == {*itertools.product(("deltanet", "gru"), (0, 1))}
    *_, hint = capsys.readouterr().out.splitlines()
    command, *folders = hint.removeprefix("next    python plot.py ").split()
    assert command == "curve" and sorted(map(Path, folders)) == sorted(tmp_path.iterdir())


def test_train_py_trains_the_other_cells_of_a_grid_if_one_fails(tmp_path, capsys):
    assert go(tmp_path, "--seed", 1) == 0
    other_default(only(tmp_path), None)
    assert go(tmp_path, "--seed", "0,1,2") == 1
    assert len([*tmp_path.glob("*/result.json")]) == 3
    assert re.search(r"1 of 3 runs failed:\n.*seed=1: .* holds a run with other settings", capsys.readouterr().err)


def test_run_that_is_short_has_a_shorter_decay_and_says_so_without_a_warning(tmp_path, capsys):
    flags = ["--max-samples", 96, "--cooldown", 2560, "--eval-samples", 1]
    for more in (["--dtype", "bf16"], ["--task", "pfsa", "--curriculum", "auto"],
                 ["--task", "trace", "--curriculum", "4", "--eval-at", "4"]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.set_warn_always(True)
            out = run_again(tmp_path, capsys, *flags, *more)
            torch.set_warn_always(False)
        assert "decays over the last 32 traces (at most a third of --max-samples)" in out
        assert "stopped by --max-samples, in stage 4" in out
    all_passed = run_again(tmp_path, capsys, "--max-samples", 24, "--stage-samples", 16, "--cooldown", 8)
    assert "trained 24 traces" in all_passed and "stopped by" not in all_passed
    assert "the last 16 traces (" in run_again(tmp_path, capsys, "--cooldown", 16)


def test_run_shows_the_stage_in_its_bar_and_no_end_that_nobody_knows(tmp_path, monkeypatch):
    bars, losses = [], train.losses

    class Watched(train.tqdm):
        def update(self, n):
            bars.append((self.desc, self.total))
    monkeypatch.setattr(train, "tqdm", Watched)
    monkeypatch.setattr(train, "losses", lambda *args: (losses(*args)[0], torch.ones(1)))
    assert go(tmp_path, "--curriculum", "3x1 4x1", "--max-samples", 400) == 0
    two = "stage 4x1, 100% right"
    assert bars == [*[("stage 3x1, 100% right", None)] * 10, *[(two, None)] * 10, *[(two, 160 + 32)] * 4]


def test_advance_0_ends_a_stage_by_its_number_of_traces_alone(tmp_path, monkeypatch):
    losses = train.losses
    monkeypatch.setattr(train, "losses", lambda *args: (losses(*args)[0], torch.ones(1)))          # all right
    for advance, ends in ((0.9, [80, 160]), (0, [120, 240])):
        go(tmp_path / str(advance), "--curriculum", "3x1 4x1", "--max-samples", 400, "--stage-samples", 120,
           "--advance", advance)
        assert [row["samples"] for row in result_of(only(tmp_path / str(advance)))["passed"]] == ends


def test_losses_without_a_state_head_never_wait_for_the_device():
    """Fake tensors have no values: whatever needs one on the host, as an index by a mask does, raises."""
    task, [stage], _, lm = train.build(Config(states="none", curriculum="4x1", device="cpu"))
    batch = batch_of(task, stage, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = train.to_tensors(batch, "cpu")
        terms, right = train.losses(task, lm, tensors)
        sum(terms.values()).backward()
        assert right.nanmean().shape == ()
        with pytest.raises(DynamicOutputShapeException):
            right[tensors.asked]


@pytest.mark.parametrize("n_vars, moves", [(5, "perm"), (9, "swap"), (2, "perm")])
def test_repl_curriculum_is_p1s_and_has_test_programs(n_vars, moves):
    task, stages, tests, _ = train.build(Config(n_vars=n_vars, moves=moves))
    assert task.curriculum == "8x1 16x2 32x4 64x8"
    for stage in stages + tests:
        assert task.batch(0, "test", stage, 0, 1).asked.any()


# ----------------------------------------------------------------------------------------------------------
# train.py: lines that somebody types

def outcome(source, names):
    """What Python prints, and holds afterwards; None if it refuses the source."""
    memory = dict(zip(names, range(1, 10)))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(Exception):
        exec(source, {}, memory)
        return printed.getvalue(), memory


@pytest.mark.parametrize("moves, n_vars", [("swap", 4), ("perm", 3)])
def test_as_read_gives_what_python_would_run_or_refuses_the_line(moves, n_vars):
    """Of 4,000 lines of the task with up to two characters changed."""
    task, rng, accepted = Repl(n_vars, moves), random.Random(0), set()
    known = {line.source for _ in range(400) for line in task.draw(rng, Stage(4), "train")}
    lines = sorted(line for line in known if "," in line)
    for _ in range(4000):
        typed = list(rng.choice(lines))
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(typed))
            typed[place:place + rng.randrange(2)] = rng.choice([*"abcz ,='\"()#;1", "  ", ">>> "])
        typed = "".join(typed).strip()
        try:
            line = train.as_read(task, typed)
        except data.BadInput as error:
            assert typed not in lines and "\n" not in str(error)
            continue
        accepted.add(line)
        assert outcome(line, task.names) == outcome(typed, task.names) is not None, typed
    assert accepted == set(lines)
    assert train.as_read(task, "print(a)") == "print('a', a)"
    assert train.as_read(task, "c, a, b = c, b, a") == ("a, b = b, a" if moves == "swap" else "a, b, c = b, a, c")
    for typed in ("x = 1", "a = 1", "a, b = 2, 1", "a += 1", "a = b", "a, x = x, a", "a, b = b, c", "a, b = b", "print(x)",
                  "print(a, b)", "print('b', a)", "print('a', 'a')", "print(a); print(b)", "print(print(a))", "print()",
                  "print((a := b))", "print(a, end='')", "a, print = print, a", "import os", "a, b = b, a; c = 1", "a,, b",
                  "del a", "(a, b)", "(", "\0", "x = print(a)", "c = [a, b][0]", "a, b, c = {a, b, c}",
                  "a, b = (print('c', c), b, a)[1:]", "while True: pass",
                  *["a, b, c = b, c, a", "a, a = a, a"] * (moves == "swap")):
        with pytest.raises(data.BadInput, match="this model knows (swaps|perm).* of a, b, c") as caught:
            train.as_read(task, typed)
        said = re.search("type a line like (.*) or (.*)", str(caught.value)).groups()
        assert all(train.as_read(task, line) for line in said)


# ----------------------------------------------------------------------------------------------------------
# train.py --eval and --play

def test_eval_tests_a_model_on_other_stages_and_seeds(tmp_path, capsys):
    go(tmp_path, "--eval-at", "4x2 8x4")
    [_, row] = result_of(only(tmp_path))["eval"]
    flags = ["--eval", str(only(tmp_path) / "ckpt.pt"), "--eval-at", "8x4", "--device", "cpu"]
    capsys.readouterr()
    for more in ([], ["--seed", "1"], ["--eval-samples", "32"]):
        assert train.main([*flags, *more]) == 0
    rows = re.findall("^eval .*", capsys.readouterr().out, re.M)
    assert f"8x4: {row['accuracy']:.2%} right" in rows[0] and len(set(rows)) == 3


def played(folder, monkeypatch, capsys, typed):
    """-> what --play prints, in lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed) + "\n"))
    capsys.readouterr()
    assert train.main(["--play", str(folder), "--device", "cpu"]) == 0
    return capsys.readouterr().out.splitlines()


def test_play_shows_what_the_model_reads_what_python_prints_and_what_the_model_believes(tmp_path, monkeypatch, capsys):
    go(tmp_path)
    typed = ["a, b = b, a", "oops", "", ">>> print(a)", "c, a = a, c", "quit", "print('a', a)"]
    greeting, *out = played(only(tmp_path), monkeypatch, capsys, typed)
    (a, b, c), asked = (line[-1] for line in out[:3]), out[3][-2]
    commands = ["a, b, c = b, a, c", "print('a', a)", "a, b, c = c, b, a"]
    assert greeting.endswith("Type quit to end") and [line[:line.find(":") + 1] or line for line in out] == [
        f">>> a = {a}", f">>> b = {b}", f">>> c = {c}", f">>> print('{asked}', {asked})",
        f"{asked} {dict(a=a, b=b, c=c)[asked]}", "model:", ">>> a, b = b, a", f"read as {commands[0]}", "model:",
        ">>> oops", "this model knows permutations of a, b, c, and prints of one variable:", ">>> ",
        ">>> print(a)", f"read as {commands[1]}", f"a {b}", "model:", ">>> c, a = a, c", f"read as {commands[2]}", "model:",
        ">>> quit"]
    _, task, _, model = train.load(only(tmp_path), device="cpu")
    texts = ["\n".join(out[:5]) + "\n", *(f">>> {line}\n" for line in commands)]
    texts[2] += f"a {b}\n"
    text, told = "", [line for line in out if line.startswith("model:")]
    for line, more, memory in zip(told, texts, ["abc", "bac", "bac", "cab"], strict=True):
        text += more
        for name, held in zip("abc", memory):
            tokens = task.tokenizer.encode(f"{text}>>> print('{name}', {name})\n{name} ")
            with torch.no_grad():
                chances = model.head(model(torch.tensor([tokens]))[0][0, -1]).softmax(-1)
            said, truth = task.tokenizer.decode([chances.argmax().item()]), {"a": a, "b": b, "c": c}[held]
            wrong = f" WRONG, it is {truth}" * (said != truth)
            assert f"{name} {said} ({chances.max():.0%}{wrong})" in line
    assert "WRONG" in told[-1]                                            # it has been trained for 12 steps


SUPPLIED, FADES = HERE / "assets/deltanet-repl.pt", HERE / "assets/deltanet-repl-beta-1.pt"


def test_play_starts_again_with_the_values_that_somebody_types_before_the_first_command(monkeypatch, capsys):
    typed = ["a = 3", ">>> e=3", "a = 9", "x = 1", "b, a = a, b", "a = 1"]
    out = played(SUPPLIED, monkeypatch, capsys, typed)
    told = [dict(re.findall(r"(\w) (\d) \(", line)) for line in out if line.startswith("model:")]
    assert not any("WRONG" in line for line in out) and all(sorted(held.values()) == [*"12345"] for held in told)
    before, first, second, after = told
    assert first["a"] == second["e"] == "3" and after == second | {"a": second["b"], "b": second["a"]}
    assert len([name for name in before if before[name] != first[name]]) in (0, 2)
    assert sum("this model knows" in line for line in out) == 3           # not a = 9, x = 1 and the last a = 1


def test_assets_model_plays_64_commands_without_an_error_or_a_note(monkeypatch, capsys):
    task, stage = Repl(states="none"), Stage(64, 8)
    lines = task.draw(random.Random(0), stage, "test")
    typed = [line.source for line in lines if line.source][task.n_vars + 1:]
    out = played(SUPPLIED, monkeypatch, capsys, typed)
    assert sum(line.startswith("model:") for line in out) == 1 + 64 + 8 and not any("WRONG" in line for line in out)
    assert not any(re.match("note|read as", line) for line in out)


@pytest.mark.parametrize("path, changed", [(SUPPLIED, {"cooldown", "seed"}), (FADES, {"beta_max", "max_samples", "learning_rate"})])
def test_assets_models_are_those_of_the_default_run_and_name_their_code(path, changed):
    saved, (_, task, _, model) = train.read_checkpoint(path), train.load(path, device="cpu")
    of_default, _, _, default = train.build(Config(device="cpu"))
    assert train.count(model) == train.count(default) and path.stat().st_size < 600_000
    assert task.tokenizer.pieces == of_default.tokenizer.pieces
    assert {name for name, x in saved["config"].items() if x != getattr(Config, name)} - {"device"} == changed
    assert re.fullmatch("[0-9a-f]{7,}", saved["commit"]) and re.fullmatch("[0-9a-f]{16}", saved["code"])
    with pytest.raises(data.BadInput, match="not a token of this task"):
        task.tokenizer.encode(">>> x = 4")


def test_play_ends_with_ctrl_c_and_needs_a_repl_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda prompt: interrupt())
    assert train.main(["--play", str(SUPPLIED)]) == 130
    go(tmp_path, "--task", "group", "--eval-at", 4, "--curriculum", 4)
    assert "trained on repl" in refused(capsys, "--play", only(tmp_path))


# ----------------------------------------------------------------------------------------------------------
# train.py: what is refused

def test_load_refuses_broken_and_foreign_checkpoints_each_for_its_reason(tmp_path, monkeypatch, capsys):
    go(tmp_path / "runs")
    good = only(tmp_path / "runs") / "ckpt.pt"
    saved = train.read_checkpoint(good)
    cut = good.read_bytes()[:good.stat().st_size // 2]
    broken = {"cut": cut, "empty": b"", "text": b"hello\n", "list": [1, 2],
              "older": {name: x for name, x in saved.items() if name != "code"},
              "later": {**saved, "config": {**saved["config"], "colour": "red"}},
              "mixer": {**saved, "config": {**saved["config"], "model": "mine"}},
              "wide": {**saved, "config": {**saved["config"], "d_model": 64}}}
    reasons = {**dict.fromkeys(["cut", "empty", "text"], "is not a checkpoint, or is incomplete"),
               **dict.fromkeys(["list", "older", "later"], "is not a checkpoint of this train.py"),
               "mixer": "mixer.pt: --model mine: choose from", "wide": "its weights do not fit this models.py"}
    for name, content in broken.items():
        path = tmp_path / f"{name}.pt"
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        assert reasons[name] in refused(capsys, "--eval", path)
    pieces = train.load(good)[1].tokenizer.pieces
    monkeypatch.setattr(data.Repl, "characters", data.Repl.characters + "{}")            # other tokens since
    assert train.load(good)[1].tokenizer.pieces == pieces != data.Repl().tokenizer.pieces


class Prophet(models.LinearAttention):
    """It reads from the end."""

    def forward(self, x, state=None):
        y, state = super().forward(x.flip(1), state)
        return y.flip(1), state


class Amnesiac(models.LinearAttention):
    """It starts anew with each call."""

    def forward(self, x, state=None):
        return super().forward(x)


class Sly(models.LinearAttention):
    """It learns to look ahead: through a gate that starts at 0."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, state=None):
        y, state = super().forward(x, state)
        return y + self.gate * x.roll(-1, 1), state


def test_build_refuses_a_mixer_that_sees_the_future_or_loses_its_state(tmp_path, monkeypatch, capsys):
    some = {name: models.MIXERS[name] for name in ("deltanet", "lstm")}
    monkeypatch.setattr(models, "MIXERS", {**some, "prophet": Prophet, "amnesiac": Amnesiac})
    monkeypatch.setattr(train, "MIXERS", models.MIXERS)
    monkeypatch.setitem(models.MIXERS, "sly", Sly)                       # with its first weights, it is honest
    for name in ("prophet", "amnesiac", "sly"):
        assert f"{name} computes in pieces" in refused(capsys, *TINY, "--model", name, "--out", tmp_path)
    models.main()
    wrong = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert wrong == ["prophet", "amnesiac", "sly"]


class RWKV7(models.LinearAttention):
    """As in a fork: RWKV-7's step (2503.14456), S <- diag(w) S - (a kappa) (kappa^T S) + k v^T, as a loop. Its state is
    fp32, also where autocast makes the rest bf16."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_w, self.to_a, self.to_kappa = (torch.nn.Linear(cfg.d_model, cfg.d_model) for _ in range(3))

    def scan(self, x, q, k, v, S):
        B, T, H, K = k.shape
        w, a, kappa = (to(x).float().view(B, T, H, K) for to in (self.to_w, self.to_a, self.to_kappa))
        w, a, kappa = torch.exp(-0.6 * torch.sigmoid(w)), torch.sigmoid(a), F.normalize(kappa, dim=-1)
        S = torch.zeros(B, H, K, K, device=x.device) if S is None else S
        outputs = []
        for t in range(T):
            under_kappa = torch.einsum("bhk,bhkv->bhv", kappa[:, t], S.to(kappa.dtype)).float()
            S = w[:, t, :, :, None] * S - (a * kappa)[:, t, :, :, None] * under_kappa[:, :, None]
            S = S + k[:, t, :, :, None].float() * v[:, t, :, None].float()
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t].float(), S))
        return torch.stack(outputs, 1).to(v.dtype), S


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_build_takes_a_mixer_of_a_fork_whose_state_is_fp32(tmp_path, monkeypatch, dtype):
    monkeypatch.setitem(models.MIXERS, "rwkv7", RWKV7)
    assert go(tmp_path, "--model", "rwkv7", "--dtype", dtype, "--max-samples", 24) == 0
    cfg, task, tests, model = train.load(only(tmp_path))
    _, [state] = model(train.to_tensors(task.batch(0, "test", tests[0], 0, 2), "cpu").tokens)
    assert state[1].dtype == torch.float32


@pytest.mark.parametrize("model", ALL)
def test_build_takes_honest_mixers_however_many_layers_amplify_their_rounding(model):
    for seed in (0, 1):
        train.build(Config(model=model, seed=seed, n_layer=8, n_head=8, conv=0, curriculum="2x1", eval_at="2x1",
                           device="cpu"))


def test_build_refuses_a_task_that_draws_from_elsewhere(tmp_path, monkeypatch, capsys):
    class Loose(Repl):
        def program(self, rng, stage, memory):
            yield from super().program(random, stage, memory)
    monkeypatch.setitem(train.TASKS, "loose", Loose)
    assert "let its program draw from rng only" in refused(capsys, *TINY, "--task", "loose", "--out", tmp_path)


def test_build_names_the_place_of_a_mixers_fault_in_one_line_and_a_tasks_by_traceback(tmp_path, monkeypatch, capsys):
    class Forgetful(models.NoMixer):
        def forward(self, x, state=None):
            return x

    class Narrow(models.NoMixer):
        def forward(self, x, state=None):
            return x[..., :1], ()

    class Wide(models.LinearAttention):
        def scan(self, x, q, k, v, S):
            return decay_scan(q, k, v, torch.ones(1))

    class Single(models.DeltaNet):
        """Its state is fp32, as the docstring of LinearAttention says."""
        def scan(self, x, q, k, v, S):
            assert S is None or S.dtype == torch.float32
            return super().scan(x, q, k, v, S)

    class Chance(Repl):
        def program(self, rng, stage, memory):
            yield from rng.sample(["a = 1"], 2)
    for kind in (Forgetful, Narrow, Wide, Single):
        monkeypatch.setitem(models.MIXERS, kind.__name__, kind)
    monkeypatch.setitem(train.TASKS, "chance", Chance)
    for name, what in (("Forgetful", "raises ValueError: "), ("Wide", "raises ValueError: a has the shape (1,)"),
                       ("Narrow", "returns y of the shape (3, 40, 1)")):
        line = refused(capsys, *TINY, "--model", name, "--out", tmp_path)
        assert f"{name} {what}" in line and ("Narrow" in line or re.search(r"\.py, line \d+\)", line)), line
    assert go(tmp_path, "--model", "Single") == 0
    with pytest.raises(ValueError, match="larger than population"):
        go(tmp_path, "--task", "chance")


# ----------------------------------------------------------------------------------------------------------
# train.py: settings and the environment

def test_train_py_lets_waiting_threads_give_way_unless_somebody_says_otherwise():
    for given, expected in (({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)):
        environment = {name: x for name, x in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        code = "before, _, _ = open('train.py').read().partition('import torch\\n'); exec(before)"
        done = command("-c", f"{code}; print(os.environ.get('GOMP_SPINCOUNT'))", cwd=HERE, env=environment | given)
        assert done.stdout.strip() == str(expected), done.stderr


def test_train_py_help_has_a_reason_for_every_setting(capsys):
    assert list(train.HELP) == [f.name for f in fields(Config)]
    with pytest.raises(SystemExit):
        train.main(["--help"])
    shown = re.sub(r"\s", "", capsys.readouterr().out)
    for f in fields(Config):
        said = f"--{f.name.replace('_', '-')} {f.type.__name__.upper()} {train.HELP[f.name]} [{f.default}]"
        assert re.sub(r"\s", "", said) in shown


@pytest.mark.parametrize("model", ["deltanet", "transformer"])
def test_params_is_met_within_ten_percent(model):
    *_, lm = train.build(Config(model=model, n_layer=2, params=250_000))
    assert train.count(lm) - train.count(lm.to_state) == pytest.approx(250_000, rel=0.1)


# ----------------------------------------------------------------------------------------------------------
# train.py: what a reader is promised, a minute each

@slow
def test_default_run_reads_99_percent_at_twice_the_trained_length_and_spacing(tmp_path):
    assert train.main(["--seed", "1", "--out", str(tmp_path), "--eval-samples", "128"]) == 0
    [row] = [row for row in result_of(only(tmp_path))["eval"] if row["stage"] == "128x16"]
    assert row["accuracy"] >= 0.99, row


@slow
def test_deltanet_tracks_parity_and_eigenvalues_in_01_do_not(tmp_path):
    """Grazzi et al. 2411.12537: no parity without negative eigenvalues. Words of up to 64, read at 256."""
    accuracy = {}
    for beta_max in (2, 1):
        out = tmp_path / str(beta_max)
        flags = ["--task", "group", "--group", "Z2", "--beta-max", beta_max, "--stage-samples", 4000,
                 "--n-head", 4, "--eval-at", 256, "--max-samples", 12000, "--out", out]
        assert train.main(list(map(str, flags))) == 0
        accuracy[beta_max] = result_of(only(out))["eval"][0]["accuracy"]
    assert accuracy[2] > 0.95 and accuracy[1] < 0.8, accuracy


# ----------------------------------------------------------------------------------------------------------
# plot.py: figures of runs

def result(rows=(), trained="64x8", reached="64x8", passed=(), held_out=(), chance=0.25, **settings):
    """The result of a run that nobody trained, as in its result.json."""
    config = asdict(train.Config(**settings))
    return {"model": config["model"], "task": config["task"], "seed": config["seed"], "samples": 9000,
            "chance": chance, "trained": trained, "reached": reached, "passed": list(passed),
            "held_out": list(held_out), "eval": list(rows) or [row("64x8")], "config": config}


def row(stage, accuracy=1, **others):
    return {"stage": stage, "accuracy": accuracy, "final": accuracy, **others}


def of(*results, path="table.jsonl", at="64x8", models=None, by=""):
    """A command line about such results."""
    if results:
        Path(path).write_text("\n".join(map(json.dumps, results)))
    return SimpleNamespace(paths=[path], at=at, models=models, by=by, entry=None, save="out.png", left_out=[], title="")


CHANCE = [(0, 0.25), (1, 0.25)]


def on(group, at, far, model="lstm", **settings):
    """The result of a run on a group."""
    return result([row("32x1", at), row("128x1", far)], "32x1", model=model, task="group", group=group, **settings)


FIGURES = {   # command: runs, and what each panel shows of them
    "curve": ([result(held_out=[[8, "2x1", 0.5]], reached="2x1"),         # stages 2x1, 4x1, 8x1: 4x1 was short
               result(held_out=[[8, "2x1", 0.25], [16, "2x1", 0.75], [24, "8x1", 0.5], [32, "64x8", 0.75]], seed=1,
                      model="gru", passed=[{"stage": stage, "samples": samples} for stage, samples in
                                           (("2x1", 16), ("4x1", 20), ("8x1", 24))])],
              [{"deltanet, 1 seed": [(8, 0.5)], "gru, 1 seed": [(8, 0.25), (16, 0.75), (24, 2.5), (32, 3.75)]}]),
    "headline": ([result([row("8x8", 0.75), row("16x16", 0.5), row("8x8:2")], reached="8x1", seed=seed)
                  for seed in (0, 1)] + [result([row("8x8", 0.5), row("16x16", 0.25)], reached="12x1", model="gru")],
                 [{"deltanet, 2 seeds": [(8, 0.75), (16, 0.5)], "gru, 1 seed": [(8, 0.5), (16, 0.25)],
                   "seeds": [[(8, 0.75), (16, 0.5)]] * 2 + [[(8, 0.5), (16, 0.25)]], "chance": CHANCE}]),
    "horizon": ([result([row("64x64", 0.75), row("96x96", 0.5), row("128x64", 0.25)]),
                 result([row("64x64", 0.25)], seed=1), result([row("64x64", 1)], seed=2),
                 {**result([row("64x64")], None, None, seed=1), "model": "by_hand"}],
                [{"deltanet, 3 seeds": [(64, 0.75), (96, 0.5)], "by_hand, 1 seed, run up to 64": [(64, 1)],
                  "seeds": [[(64, 0.75), (96, 0.5)], [(64, 0.25)], [(64, 1)], [(64, 1)]], "chance": CHANCE}]),
    "nats": ([result([row(f"{L}x2{kind}", kl=kl * L, floor=0.5) for L in (64, 128)
                      for kind, kl in (("", 1), (":forced", 2))], chance=math.exp(-2), task="pfsa")],
             [{"deltanet, 1 seed": [(64, 64 * kl), (128, 128 * kl)], "seeds": [[(64, 64 * kl), (128, 128 * kl)]],
               "trained up to here": [(64, 0), (64, 1)], "a uniform guess": [(64, 1.5), (128, 1.5)]} for kl in (1, 2)]),
    "ladder": ([on("S3", 0.9, 0.2), on("S3", 1, 0.98, seed=1), on("S3", 0.95, 0.96, seed=2), on("Z2", 1, 0.5),
                on("Z2", 0.9, 0.5, "ssm"), on("S3", 0.8, 0.5, "gru")],
               [{("lstm", "S3\n(25%)"): ("95%\n3 seeds", 0.95), ("lstm", "Z2\n(25%)"): ("100%", 1),
                 ("ssm", "Z2\n(25%)"): ("90%", 0.9), ("ssm", "S3\n(25%)"): "hatched",
                 ("gru", "S3\n(25%)"): ("80%", 0.8), ("gru", "Z2\n(25%)"): ("not run", None)}]),
    "samples": ([result([row("32x1")], "32x1", task="parity",
                        held_out=[[100, "32x1", 0.9], [200, "32x1", 0.96], [300, "32x1", 1]]),
                 result([row("32x1", 0.5)], "32x1:2", task="parity", model="lstm",
                        held_out=[[100, "8x1", 1], [200, "32x1", 0.94]])],
                [{("deltanet", 200): "full", ("lstm", 9000): "none"}]),
}


def shown(axes):
    """The lines of a panel, its points, or the words and the shades of its cells."""
    columns = [label.get_text() for label in axes.get_xticklabels()]
    rows, found = [label.get_text() for label in axes.get_yticklabels()], {}
    for line in axes.lines:
        points = [(x, round(y, 9)) for x, y in line.get_xydata().tolist()]
        if line.get_label()[0] != "_":
            found[line.get_label()] = points
        elif line.get_linestyle() == "None":
            [(x, y)] = points
            found[rows[round(y)], x] = line.get_fillstyle()
        else:
            found.setdefault("seeds", []).append(points)
    for mesh in axes.collections:
        for (x, y), words in ((text.get_position(), text.get_text()) for text in axes.texts):
            shade = mesh.get_array().reshape(len(rows), -1)[y, x]         # masked where there is no run
            found[rows[y], columns[x]] = words, None if np.ma.is_masked(shade) else round(shade, 9)
    for cell in axes.patches:
        x, y = cell.get_center()
        found[rows[round(y)], columns[round(x)]] = "hatched"
    return found


@pytest.mark.parametrize("command", FIGURES)
def test_figures_show_the_numbers_of_their_runs(command):
    runs, expected = FIGURES[command]
    figure = getattr(plot, command)(of(*runs))
    panels = figure.axes[8:] if command == "headline" else figure.axes    # the first 8 are by hand
    assert list(map(shown, panels)) == expected


@pytest.mark.parametrize("steps", [5, 21, 63])
def test_plot_swap_with_projections_swaps_two_rows_and_shrinks_their_difference(steps):
    S = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    S[-1] = 0                                                             # the empty row
    mean, half = (S[1] + S[3]) / 2, (S[1] - S[3]) / 2
    for beta, kept in (2, 1), (1, math.cos(math.pi / steps) ** steps):
        want = S.clone()
        want[1], want[3] = mean - kept * half, mean + kept * half
        torch.testing.assert_close(plot.swap(S, 1, 3, beta, steps), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model, changes, groups", [
    ("deltanet", {}, "Z2 S5swaps"), ("deltanet", {"beta_max": 1.0}, ""),
    ("deltanet", {"n_layer": 2}, "Z2 S3 A5 S5 S5swaps"), ("deltaproduct", {"n_householder": 2}, "Z2 S3 A5 S5swaps"),
    ("deltaproduct", {"n_householder": 4}, "Z2 S3 A5 S5 S5swaps"), ("transformer", {"n_layer": 4}, "Z2 S3"),
    ("lstm", {}, "Z2 S3 A5 S5 S5swaps")])
def test_can_hold_knows_what_theory_excludes(model, changes, groups):
    config = {"n_layer": 1, "beta_max": 2.0, "n_householder": 2, **changes}
    for group in ("Z2", "S3", "A5", "S5", "S5swaps"):
        assert plot.can_hold({"model": model, "config": config}, group) == (group in groups.split())


def test_seeds_of_never_joins_runs_that_differ_in_more_than_their_seed():
    rates = [result([row("64x8"), row("64x64")], seed=seed, learning_rate=rate, held_out=[[8, "64x8", 1]])
             for seed, rate in ((0, 0.1), (1, 0.2), (2, 0.2))]
    for figure in plot.ladder, plot.curve, plot.headline, plot.samples:
        task = "group" if figure is plot.ladder else "repl"
        with pytest.raises(ValueError, match="differ in learning_rate: add one or more of these to --by"):
            figure(of(*({**run, "task": task} for run in rates)))
    assert {name for name, *_ in plot.evaluations(of(by="learning_rate"), "repl")} == {
        "deltanet, learning_rate 0.1, 1 seed", "deltanet, learning_rate 0.2, 2 seeds"}
    with pytest.raises(ValueError, match="two runs have the seed 1"):
        plot.evaluations(of(rates[1], rates[1]), "repl")
    assert {name for name, *_ in plot.evaluations(of(result(beta_max=1.0)), "repl")} == {"deltanet, [0, 1], 1 seed"}


def in_folders(**results):
    """Folders of runs, each with this result, or with None, as of a run that was stopped. -> a command line."""
    for folder, found in results.items():
        Path("out", folder).mkdir(parents=True)
        if found:
            Path("out", folder, "result.json").write_text(json.dumps(found))
        else:
            progress = {"samples": 40, "passed": [], "held_out": [[40, "8x1", 0.5]]}
            torch.save({"config": asdict(Config()), "progress": progress, "code": "", "pieces": [], "model": {},
                        "optimizers": []}, Path("out", folder, "ckpt.pt"))
    args = of()
    args.paths = [f"out/{name}" for name in results]
    return args


def test_curve_tells_a_stage_that_comes_twice(tmp_path):
    once = [{"stage": "64x8", "samples": 50}]
    twice = [*once, {"stage": "64x8", "samples": 90}]
    tests = [[40, "64x8", 0.5], [80, "64x8", 0.6], [120, "64x8", 0.7]]
    runs = [result(seed=seed, passed=passed, held_out=tests, curriculum="64x8 64x8")
            for seed, passed in enumerate((once, twice))]
    axes = plot.curve(of(*runs)).axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.5, 1.6, 1.7]] * 2
    assert [label.get_text() for label in axes.get_yticklabels(minor=True)] == ["64x8", "64x8, again"]


def test_plot_import_and_main_leave_matplotlib_as_it_was(tmp_path):
    before = dict(plot.plt.rcParams)
    plot.main(["ladder", of(on("S3", 1, 1)).paths[0], "--save", str(tmp_path / "x.png")])
    assert dict(plot.plt.rcParams) == before and not before["axes.grid"]


def test_label_tells_twins_apart_by_their_folder_and_joins_the_seeds_of_one_folder():
    seeds = [result([row("64x8", 0.5 + seed / 4)], seed=seed) for seed in (0, 1, 0)]
    args = in_folders(first=seeds[0], changed=seeds[2], gru=result(model="gru"))
    os.rename("out/first", "out/x-seed=0")
    args.paths[0] = "out/x-seed=0"
    Path("out/x-seed=1").mkdir()
    Path("out/x-seed=1/result.json").write_text(json.dumps(seeds[1]))
    args.paths += ["out/x-seed=1"]
    assert {name for name, *_ in plot.evaluations(args, "repl")} == {
        "deltanet, out/x, 2 seeds", "deltanet, out/changed, 1 seed", "gru, 1 seed"}
    args.paths += ["out/changed"]
    with pytest.raises(ValueError, match="two runs have the seed 0"):
        plot.evaluations(args, "repl")


def test_plot_py_names_what_it_leaves_out(capsys):
    runs = {"whole": result([row("64x64")], model="gru"), "stopped": None, "short": result([row("64x8")])}
    paths = in_folders(**runs).paths
    Path("out/of_folders/one").mkdir(parents=True)
    Path("out/picture.png").write_bytes(b"\x89PNG")
    plot.main(["horizon", *paths, "out/of_folders", "out/picture.png"])
    out, err = capsys.readouterr()
    assert out == "saved out/horizon.png\n" and err.splitlines() == [
        "plot.py: out/of_folders is not a run, so it is left out",
        "plot.py: deltanet, out/stopped, seed 0, has no evaluation at stage LxL, so it is left out",
        "plot.py: deltanet, out/short, seed 0, has no evaluation at stage LxL, so it is left out"]
    assert [*shown(plot.curve(in_folders(running=None)).axes[0]).values()] == [[(40, 0.5)]]
    with pytest.raises(ValueError, match="5 with --models"):
        plot.curve(of(*(result(model=model, held_out=[[8, "64x8", 1]]) for model in list(models.MIXERS)[:6])))


def test_entry_of_a_table_is_drawn_alone():
    rows = [{"entry": entry, **result([row("64x64", accuracy)])} for entry, accuracy in (("one", 0.5), ("two", 1))]
    args = of(*rows, {"entry": "no run", "right": 3}, [3])
    args.entry = "two"
    assert shown(plot.horizon(args).axes[0])["deltanet, 1 seed"] == [(64, 1)]


def test_load_runs_takes_a_folder_that_is_called_like_a_file_of_lines():
    args = in_folders(**{"run-trace_file=t.jsonl": result([row("64x64")])})
    assert "deltanet, 1 seed" in shown(plot.horizon(args).axes[0])


def test_label_with_a_dollar_is_no_mathematics():
    twins = result([row("64x64", 0.5)])
    args = in_folders(**{"$x_$1": twins, "other": twins})
    figure = plot.horizon(args)
    figure.savefig("out.png")
    assert r"deltanet, out/\$x_\$1, 1 seed" in shown(figure.axes[0])


def test_curve_has_a_point_where_each_stage_was_passed_and_where_the_run_ended(tmp_path):
    for name, flags in {"stages": ["--curriculum", "3x1 4x1", "--stage-samples", 40], "short": []}.items():
        assert go(tmp_path / name, *flags, "--advance", 1, "--eval-every", 99) == 0
    runs = {name: only(tmp_path / name) for name in ("stages", "short")}
    drawn = {}
    for name, folder in runs.items():
        args = of()
        args.paths = [str(folder)]
        [points] = shown(plot.curve(args).axes[0]).values()
        drawn[name] = [x for x, _ in points]
        for (x, y), (samples, _, accuracy) in zip(points, result_of(folder)["held_out"], strict=True):
            assert (x, y) == (samples, pytest.approx(accuracy + (samples > 40 and name == "stages")))
    assert drawn == {"stages": [40, 80, 96], "short": [96]}


def test_horizon_draws_chance_only_if_it_is_the_same_for_all_curves():
    runs = [result([row("64x64")], chance=0.25), result([row("64x64")], model="gru")]
    always = {"deltanet, 1 seed", "gru, 1 seed", "seeds"}
    assert shown(plot.horizon(of(*runs)).axes[0]).keys() == {*always, "chance"}
    runs[1]["chance"] = 0.5
    assert shown(plot.horizon(of(*runs)).axes[0]).keys() == always


def test_plot_py_all_draws_the_committed_pictures_from_the_committed_tables(monkeypatch):
    from PIL import Image
    letters = plot.matplotlib.ft2font.__freetype_build_type__
    shutil.copytree(HERE / "assets", "assets", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.delitem(plot.FIGURES, "movie")                            # below
    plot.main(["--all"])
    drawn = {path.name for path in Path("assets").glob("*.png")}
    assert drawn == {f"{name}.png" for name in plot.FIGURES} == {path.name for path in (HERE / "assets").glob("*.png")}
    for name in drawn:
        one, other = (Image.open(folder / name) for folder in (Path("assets"), HERE / "assets"))
        if (one.info["Software"], letters) != (other.info["Software"], "local"):
            pytest.skip("another version of matplotlib drew the committed pictures")
        assert one.tobytes() == other.tobytes(), f"{name}: python plot.py --all"


# ----------------------------------------------------------------------------------------------------------
# plot.py: inside one model

def use(monkeypatch, task, model):
    """Let train.load return this model."""
    cfg = train.Config(n_vars=3, states=task.states, device="cpu", curriculum="8x1")
    monkeypatch.setattr(plot, "load", lambda path, **_: (cfg, task, [], model))


def one_of_two_heads():
    """by_hand's model as the second of two heads; what the first does, at random, nobody reads."""
    task = Repl(3, "swap")
    lm = models.by_hand(task)                                             # it needs 12 of its 64 rows
    mixer = lm.blocks[0].mixer
    mixer.n_head, mixer.head_dim = 2, 32
    old, mixer.to_beta = mixer.to_beta, torch.nn.Linear(64, 2).requires_grad_(False)
    mixer.to_beta.weight[1], mixer.to_beta.bias[1] = old.weight, old.bias
    mixer.norm = torch.nn.RMSNorm(32).requires_grad_(False)
    for projection in (mixer.to_q, mixer.to_k, mixer.to_v):
        projection.weight[:] = projection.weight.roll(32, 0)
        projection.weight[:32].normal_()
    mixer.out.weight[:] = mixer.out.weight.roll(32, 1)
    return task, lm


def test_heads_finds_the_one_head_that_tracks_and_leaves_it_as_it_was(monkeypatch):
    task, lm = one_of_two_heads()
    before, x, mixer = copy.deepcopy(lm.state_dict()), torch.randn(1, 5, 64), lm.blocks[0].mixer
    beta = mixer.beta(x)
    use(monkeypatch, task, lm)
    figure = plot.heads(of(path="a run", at="32x4"))
    assert all(torch.equal(p, before[name]) for name, p in lm.state_dict().items())
    assert torch.equal(mixer.beta(x), beta)
    heads = json.loads(Path("out.png.jsonl").read_text())["heads"]       # out.jsonl may be somebody's
    idle, tracks = (heads[name]["accuracy"] for name in ("1.1", "1.2"))
    assert len(idle) == len(tracks) == 6
    assert set(idle) == {1} and tracks[0] == 1 > tracks[3] > tracks[5] + 0.05
    assert [list(line.get_ydata()) for line in figure.axes[2].lines[:2]] == [idle, tracks]
    assert [text.get_text() for text in figure.legends[0].texts] == ["layer 1, head 2", "chance"]
    tokens = torch.tensor(task.batch(0, "test", Stage(32, 4), 0, 32).tokens)
    block = lm.blocks[0]
    seen, _ = block.conv(block.norm1(lm.embed(tokens)))
    betas = 2 * np.clip(0.5 + mixer.to_beta(seen)[..., 0].numpy() / 4, 0, 1)
    assert np.allclose(heads["1.1"]["betas"], np.quantile(betas, np.linspace(0, 1, 21)), atol=1e-5)
    assert set(heads["1.2"]["betas"]) == {2}
    keys = block.mixer.project(seen)[1][:, :, 0].flatten(0, 1).double().numpy()
    energy = np.linalg.eigvalsh(np.cov(keys.T))[::-1]
    assert np.allclose(heads["1.1"]["keys"], energy.cumsum() / energy.sum(), atol=1e-4)


def test_movie_shows_what_the_model_believes_and_what_python_holds(monkeypatch):
    """by_hand's model, but it skips the third command: some of its rings are red from then on. Beside it, the model that
    skips nothing. Of the frames, two are drawn."""
    from PIL import Image
    task, frames = Repl(3, "swap", states="none"), []
    lm, commands = models.by_hand(task), itertools.count(1)
    exact = lm.forward

    def forgetful(tokens, state):
        hidden, after = exact(tokens, state)
        is_swap = re.fullmatch(r">>> ., . = ., .\n", task.tokenizer.decode(tokens[0].tolist()))
        return hidden, state if is_swap and next(commands) == 3 else after

    def look(writer):
        left, *panels = writer.fig.axes
        text, [image, _], [rings, of_exact] = left.texts[0], *([getattr(x, name)[0] for x in panels]
                                                               for name in ("images", "collections"))
        places = [(round(y), round(x) + 1) for x, y in rings.get_offsets().tolist()]
        colors = ["red" if color[0] else "black" for color in rings.get_edgecolors()]
        assert not of_exact.get_edgecolors()[:, 0].any()                  # the other model makes no error
        if len(frames) < 2:
            draw(writer)
        frames.append((text.get_text().splitlines(), image.get_array().tolist(), places, colors))
    monkeypatch.setattr(lm, "forward", forgetful)
    cfg = train.Config(n_vars=3, states="none", device="cpu", curriculum="8x1")
    found = {"exact": models.by_hand(task), "forgetful": lm}
    monkeypatch.setattr(plot, "load", lambda path, **_: (cfg, task, [], found[path]))
    draw = plot.PillowWriter.grab_frame
    monkeypatch.setattr(plot.PillowWriter, "grab_frame", look)
    plot.main("movie forgetful exact --at 8x4".split())
    assert Image.open("out/movie.gif").n_frames == 2
    assert (HERE / "assets/movie.gif").stat().st_size < 1_000_000
    assert len(frames) == 3 + (8 + 2 * 2) + 8 and frames[14:] == frames[14:15] * 9        # it holds the last one
    memory, believed, number = {}, {}, 0
    first, *others = frames[:15]
    for lines, shades, rings, colors in [first, *(([text[-1]], *more) for text, *more in others)]:
        for line in (line.removeprefix(">>> ") for line in lines if "print" not in line):
            if "=" not in line:                                           # what was printed
                continue
            number += ", " in line
            exec(line, memory)
            if ", " not in line or number != 3:
                exec(line, believed)
        assert rings == [(i, memory[name]) for i, name in enumerate("abc")]
        assert [1 + row.index(max(row)) for row in shades] == [believed[name] for name in "abc"]
        assert colors == ["black" if memory[name] == believed[name] else "red" for name in "abc"]
        assert all(max(row) > 0.99 and sum(row) < 1.001 for row in shades)
    assert number == 8 and any("red" in colors for *_, colors in frames)


def test_movie_refuses_models_of_different_tokens_and_heads_two_models(monkeypatch, capsys):
    tasks = {"three": Repl(3, states="none"), "four": Repl(4, states="none")}
    monkeypatch.setattr(plot, "load", lambda path, **_: (
        Config(n_vars=tasks[path].n_vars, device="cpu"), tasks[path], [], models.by_hand(tasks[path])))
    for words, reason in (("movie three four", "read different tokens"), ("heads three four", "give one run")):
        assert reason in refused(capsys, *words.split(), "--at", "8x4", main=plot.main)


def test_heads_and_movie_name_the_task_of_a_run_that_is_not_of_repl(tmp_path, capsys):
    go(tmp_path, "--task", "group", "--eval-at", 4, "--curriculum", 4)
    for command in ("heads", "movie"):
        said = refused(capsys, command, only(tmp_path), main=plot.main)
        assert "is a run of deltanet on group: give a run of repl" in said


# ----------------------------------------------------------------------------------------------------------
# plot.py: the command line

def test_plot_py_help_has_an_example_of_every_command(capsys):
    with pytest.raises(SystemExit):
        plot.main(["--help"])
    examples = re.findall(r"python plot.py (\w+)", capsys.readouterr().out)
    assert set(examples) == set(plot.COMMANDS)


# ----------------------------------------------------------------------------------------------------------
# Command lines that are refused: in one line, with exit code 2

REFUSALS = {
    "train.py --model deltnet": "choose from deltanet",
    "train.py --task rpl": "choose from repl",
    "train.py --modle deltanet": "unrecognized arguments: --modle",
    "train.py --eval= --seed 1": "ckpt.pt does not exist",
    "train.py --play=": "ckpt.pt does not exist",
    "train.py --task parity --curriculum 8:²": "write 8:M",
    "train.py --lr 0.1": "unrecognized arguments: --lr",
    "train.py --batch 4": "unrecognized arguments: --batch",
    "train.py --seed 0 1": "unrecognized arguments: 1",
    "train.py --advance 90": "must be >= 0 and <= 1",
    "train.py --advance 0": "so give --stage-samples, too",
    "train.py --curriculum 4,8": "write LENGTHxSPACING",  # no grid of two
    "train.py --eval-samples 8,16": "--eval-samples: 8,16: give a number (int)",
    "train.py --model block_diagonal --d-model 30": "a multiple of 4",
    "train.py --task trace --trace-file nowhere.jsonl": "No such file or directory: 'nowhere.jsonl'",
    "train.py --seed 99999999999999999999": "must be",
    "train.py --learning-rate nan": "must be >= 0",
    "train.py --reveal-weight inf": "must be",
    "train.py --eval a --play b": "not allowed with",
    "train.py --n-vars 30": "2 to 9",
    "train.py --task group --group S6": "choose from Z2",
    "train.py --curriculum 8x16": "a spacing from 1 to the length",
    "train.py --eval-at 8x": "LENGTHxSPACING",
    "train.py --learning-rate fast": "--learning-rate: fast: give a number (float)",
    "train.py --batch-size 0": "--batch-size 0: must be >= 1",
    "train.py --seed -1": "--seed -1: must be >= 0",
    "train.py --beta-max 2.5": "--beta-max 2.5: must be >= 0 and <= 2",
    "train.py --d-model 30 --n-head 4": "--n-head 4",
    "train.py --model deltanet+lstm": "--n-layer 2",
    "train.py --seed 0,1 --model deltanet,deltanet+lstm": "--n-layer 2",  # before the first run
    "train.py --device tpu": "choose from cpu",
    "train.py --params 3000": "at least",
    "train.py --task arith --states linear": "transformer or contrastive",
    "train.py --task group --states transformer": "linear or none",
    "train.py --task trace --trace-file /dev/null": "is empty: give a file with one JSON object on each line",
    "train.py --out train.py": "Not a directory",
    "train.py --eval nowhere.pt --model gru": "set only eval_at, eval_samples, trace_file, seed, device, dtype",
    "train.py --play nowhere.pt": "nowhere.pt does not exist",
    "plot.py curve": "give a command",
    "plot.py curv out": "invalid choice",
    "plot.py samples nowhere": "nothing to draw: nowhere is not a run",
    "plot.py samples nowhere.jsonl": "No such file",
    "plot.py samples picture.jsonl": "is not a file of JSON lines: give folders",
    "plot.py samples table.jsonl --entry told": "no lines of the entry told",
    "plot.py nats table.jsonl": "a run of deltanet is of the task repl",
    "plot.py ladder table.jsonl": "a run of deltanet is of the task repl",
    "plot.py samples table.jsonl --models rnn": "no runs of rnn",
    "plot.py samples table.jsonl --by learning_rat": "--by learning_rat: give settings of train.py",
    "plot.py headline table.jsonl": "seed 0, has no evaluation at stage LxL",
    "plot.py heads nowhere --at 8x1": "nowhere does not exist",
    "plot.py heads one two": "give one run",
    "plot.py samples table.jsonl --save x.doc": "not supported",
}


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("line", REFUSALS)
def test_main_refuses_a_bad_command_line_in_one_line_and_writes_nothing(line, tmp_path, capsys):
    Path("train.py").write_text("a file, in the way of a folder")
    Path("table.jsonl").write_text(json.dumps(result()))
    Path("picture.jsonl").write_bytes(b"\x89PNG")
    before, (file, *words) = contents(tmp_path), line.split()
    assert REFUSALS[line] in refused(capsys, *words, main=MAINS[file])
    assert contents(tmp_path) == before


# ----------------------------------------------------------------------------------------------------------
# README.md: what it says can be typed

README = (HERE / "README.md").read_text()
RESULTS = (HERE / "assets" / "RESULTS.md").read_text()


def readme_commands():
    """The words of each line in README's bash blocks that starts a file of this project."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S)).replace("\\\n", "").splitlines()
    calls = [shlex.split(call, comments=True) for line in lines for call in line.split("&&")]
    return [call[1:] for call in calls if call and call[0] == "python" and call[1] != "-m"]


def small_config():
    """train.Config with defaults that are trained in a moment."""
    small = dict(d_model=16, max_samples=32, warmup=16, cooldown=8, eval_samples=1, eval_every=4)
    kinds = [(f.name, f.type, dataclasses.field(default=small.get(f.name, f.default), metadata=f.metadata))
             for f in dataclasses.fields(train.Config)]
    return dataclasses.make_dataclass("Config", kinds)


def test_readme_commands_run(tmp_path, monkeypatch):
    """In README's order, in one folder, with small models, few traces, and files that a user would bring."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HERE / "assets", "assets")
    monkeypatch.setattr(train, "Config", small_config())
    monkeypatch.setattr(pfsa.MaybeSwaps, "stage_samples", 16)
    calls = [{"id": f"call_{i}", "code": f"def f(x):\n    return x + {i}", "input": "1"} for i in range(5)]
    Path("cruxeval.jsonl").write_text("\n".join(map(json.dumps, calls)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("print('a', a)\n"))
    honest = kernels.clock
    monkeypatch.setattr(kernels, "drift", lambda *args: 0.0)              # tested above
    monkeypatch.setattr(kernels, "clock", lambda shape, *others: honest((1, 20, 1, 16), *others))
    demonstrations = [["kernels.py"], ["models.py"], ["pfsa.py"]]
    commands = readme_commands() + demonstrations
    assert {words[0] for words in commands} == set(MAINS)
    for name, *args in commands:
        for flag, small in {"--max-samples": "32", "--stage-samples": "32", "--params": "20000", "--at": "16x4",
                            "--cooldown": "8", "--eval-samples": "1", "--d-model": "16", "--n-layer": "2",
                            "--batch-size": "4"}.items():
            if flag in args:
                args[args.index(flag) + 1] = small
        if name in ("kernels.py", "models.py", "pfsa.py"):
            MAINS[name]()
        else:
            assert not MAINS[name](args), (name, args)


def snippets(text=README):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_readme_python_of_a_trained_model_is_six_lines_and_prints_what_it_says(capsys, monkeypatch):
    monkeypatch.chdir(HERE)
    source = snippets()[2]
    exec(source, {})
    tokens, values = capsys.readouterr().out.splitlines()
    assert values in source and len([line for line in source.splitlines() if line and "import" not in line]) <= 6
    tokenizer = Repl().tokenizer
    assert tokenizer.decode(json.loads(tokens[len("tensor("):-1])) == "".join(re.findall(r"\d", values))


def test_results_deltanet_written_by_hand_is_right(capsys):
    [source] = [text for text in snippets(RESULTS) if "by_hand" in text]
    exec(source, {})
    assert capsys.readouterr().out == "tensor(1.)\n"


def test_readme_task_of_ones_own_is_at_most_12_lines_and_works():
    source, scope = snippets()[1], dict(vars(data))
    exec(source, scope)
    assert len([line for line in source.splitlines() if line.strip()]) <= 12
    task = scope["Modular"]()
    batch = task.batch(0, "train", Stage(8, 2), 0, 4)
    text = task.tokenizer.decode(batch.tokens[0][batch.tokens[0] != data.PAD])
    lines = text.splitlines()
    printed = subprocess.run([sys.executable, "-c", "\n".join(line for line in lines if not line.isdigit())],
                             capture_output=True, text=True).stdout
    assert printed.splitlines() == [line for line in lines if line.isdigit()]
    assert batch.asked.sum() == 4 * 4 and batch.state.max() < task.n_classes


def test_readme_task_of_ones_own_is_learned(tmp_path, monkeypatch):
    scope = dict(vars(data))
    exec(snippets()[1], scope)
    monkeypatch.setitem(train.TASKS, "modular", scope["Modular"])
    args = ["--task", "modular", "--curriculum", "2x1 4x1", "--eval-at", "4x1", "--cooldown", "640"]
    assert train.main([*args, "--max-samples", "6000", "--out", str(tmp_path)]) == 0
    assert result_of(only(tmp_path))["eval"][0]["accuracy"] > 0.95


def test_readme_mixer_of_ones_own_is_at_most_8_lines_and_its_parameter_learns(monkeypatch, tmp_path):
    source, scope = snippets()[0], dict(vars(models))
    exec(source, scope)
    assert len([line for line in source.splitlines() if line.strip()]) <= 8
    monkeypatch.setitem(models.MIXERS, "retention", scope["Retention"])
    test_lm_agrees_whole_token_by_token_and_segment_by_segment("retention")
    test_lm_agrees_whole_token_by_token_and_segment_by_segment("deltanet+retention")
    assert go(tmp_path, "--model", "retention", "--n-head", 2) == 0
    keep = train.load(only(tmp_path))[3].blocks[0].mixer.keep
    assert (keep != torch.tensor([3, 6])).all()


def test_readme_sample_is_what_its_command_prints(capsys):
    [command_line] = re.findall(r"^python (data.py repl .*)$", README, re.M)
    data.main(shlex.split(command_line)[1:])
    assert capsys.readouterr().out.strip() in README


def anchors(text):
    """What a link within a page may name, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_and_results_links_lead_somewhere():
    assert "@@" not in README + RESULTS
    for text, folder in ((README, HERE), (RESULTS, HERE / "assets")):
        for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            assert (folder / path).exists(), path
            assert not anchor or anchor in anchors(RESULTS if path.endswith("RESULTS.md") else text), anchor
