"""
Figures from finished runs, one function each; and looks inside a trained model.

    python plot.py --all                                        every figure in assets/, in half a minute

After the default run, try `curve`, `automaton` and `probe`:

    python plot.py curve out/deltanet-repl*                     accuracy while training
    python plot.py headline out/deltanet-repl* --at 128x16      left by_hand, right `positions`
    python plot.py positions out/deltanet-repl* --at 128x16     at each answer of a trace (P1 Fig. 4, left)
    python plot.py final out/deltanet-repl*                     at a trace's last answer (P1 Fig. 4, right)
    python plot.py ladder out/ladder/*                          a row per model, a column per group
    python plot.py spacing out/spacing/*                        read with sparser prints (P1 Fig. 3)
    python plot.py nats out/*-pfsa*                             hidden branches: KL to the exact predictive
    python plot.py samples out/*-parity*                        traces until 95 % are right (P2 Fig. 5)
    python plot.py lengths traces.jsonl                         how long traces of functions are (P2 Fig. 1)
    python plot.py filters                                      where linear filters die (P1 Figs. 9 and 10)
    python plot.py accuracy                                     rounding in the scan, over 65,536 steps

    python plot.py horizon out/deltanet-repl by_hand            how far they will read, from 64 commands
    python plot.py heads out/deltanet-repl --at 512x4           which head tracks (P1 Figs. 5, 6, 11, 12)
    python plot.py probe out/deltanet-repl --at 64x8            whether states can be read off it
    python plot.py automaton out/deltanet-repl --at 64x8        how often its steps are Python's
    python plot.py belief out/deltanet-pfsa --at 64x2:forced    what becomes of its belief

    cat out/ladder/*/result.json > assets/ladder.jsonl          a table of runs: each is one line of JSON
    python plot.py ladder assets/ladder.jsonl                   the same figure, from the table

Runs that differ only in their seed are one curve, the median, in a band from the worst to the best. A label
names the settings in which runs of its model differ; beta_max is written as the range of eigenvalues.
`horizon`, `heads` and `accuracy` also save their numbers to a .jsonl beside the picture, to redraw it. What
`probe`, `automaton` and `belief` print is added to out/COMMAND.jsonl, one line per call. P1 is arXiv
2602.14814, P2 "Grounding Code Understanding in Step-by-Step Execution". Not here: training.
"""
import argparse
import functools
import json
import math
import random
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")                                       # write files, open no window
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

import kernels
import pfsa
from data import Repl, Stage, parse_stages, run
from models import DeltaNet, by_hand, tensors
from train import TASKS, Config, build_model, evaluate, load_model, to_device

plt.rcParams["figure.figsize"] = 7, 4
plt.rcParams["figure.constrained_layout.use"] = True
plt.rcParams["savefig.dpi"] = 150
plt.rcParams["axes.grid"] = True
plt.rcParams["grid.alpha"] = 0.3
LOOKS = [                                                   # of five curves; they differ in grey, too
    {"color": "C0", "linestyle": "-", "marker": "o"},
    {"color": "C1", "linestyle": "--", "marker": "s"},
    {"color": "C2", "linestyle": "-.", "marker": "^"},
    {"color": "C3", "linestyle": ":", "marker": "v"},
    {"color": "black", "linestyle": "-", "marker": "D"},
]


# ----------------------------------------------------------------------------------------------------------
# Runs

ASIDE = ["seed", "device", "out", "eval_at", "eval_samples", "eval_every"]    # settings that are in no label


def load(args, aside=()):
    """The runs that the command line names -> {label: [result of each seed, ...]}."""
    runs = [result for path in args.paths for result in read_lines(path)]
    if args.models:
        runs = [result for result in runs if result["model"] in args.models.split(",")]
    if not runs:
        raise ValueError("no such runs in these files")
    for result in runs:                                     # older than a setting: it has the default
        result["config"] = {**asdict(Config()), **result["config"]}
    groups = defaultdict(list)
    for result in runs:
        name = label(result, runs, [*ASIDE, *aside, args.hide])
        if not aside and result["seed"] in [other["seed"] for other in groups[name]]:
            raise ValueError(f"{name}: seed {result['seed']} is there twice; one curve takes it once")
        groups[name].append(result)
    return groups


def read_lines(path):
    """-> the JSON objects of a .jsonl file, or of a run's folder."""
    path = Path(path)
    file = path / "result.json" if path.is_dir() else path
    try:
        return [{**json.loads(line), "folder": path} for line in open(file)]
    except (OSError, ValueError):
        raise ValueError(f"{path}: give folders of finished runs, or .jsonl files")


def label(result, runs, aside):
    """The model, and the settings in which runs of this model differ."""
    words = [result["model"]]
    kin = [other["config"] for other in runs if other["model"] == result["model"]]
    for name, value in result["config"].items():
        if name in aside or all(config.get(name) == value for config in kin):
            continue
        if name == "beta_max":
            words.append(f"[{1 - value:g}, 1]")             # the eigenvalues' range
        else:
            words.append(f"{name} {value}")
    return ", ".join(words)


def curriculum_of(result):
    """A run's curriculum as text; if auto, without the stages that Repl adds for n_vars."""
    curriculum = result["config"]["curriculum"]
    return TASKS[result["task"]].curriculum if curriculum == "auto" else curriculum


def trained(result):
    """The last stage of a run's curriculum."""
    return parse_stages(curriculum_of(result))[-1]


def got_there(runs):
    """Whether at least half of the seeds reached `trained`."""
    there = [result.get("stage_reached") == str(trained(result)) for result in runs]
    return np.mean(there) >= 0.5


def task_of(result):
    """The task of a run."""
    kind, config = TASKS[result["task"]], result["config"]
    return kind(states=config["states"], **{name: config[name] for name in kind.settings if name in config})


def chance_of(result):
    """Accuracy of always guessing the most frequent answer."""
    return task_of(result).chance(trained(result))


def evaluations(args):
    """Yields label, result and row, for each row of each run's evaluation."""
    for name, runs in load(args).items():
        seeds = len({result["seed"] for result in runs})
        name += f", {seeds} seed{'s' if seeds > 1 else ''}"
        if not got_there(runs):
            name += f" (never got to {trained(runs[0])})"
        for result in runs:
            for row in result["eval"]:
                yield name, result, row


# ----------------------------------------------------------------------------------------------------------
# Drawing

def nested():
    """{label: {x: [y of each seed]}}, to be filled."""
    return defaultdict(lambda: defaultdict(list))


def lines(axes, curves):
    """For each label, a line at the median over seeds, in a band from minimum to maximum; x is log."""
    if not 0 < len(curves) <= len(LOOKS):
        raise ValueError(f"{len(curves)} curves: choose 1 to 5 by --models, and the stage by --at")
    for look, (name, points) in zip(LOOKS, curves.items()):
        if points:
            x = sorted(points)
            seeds = [np.percentile(points[at], [0, 50, 100]) for at in x]
            low, middle, high = np.transpose(seeds)
            axes.plot(x, middle, **look, label=name)
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15)
    doubling(axes, sorted({x for points in curves.values() for x in points}))


def finish(axes, x_label, y_label, title, chance=None, length=None):
    """Labels and legend; lines at chance and at the trained length. -> the figure."""
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    if chance:
        axes.axhline(chance, color="gray", linestyle=":", label="chance")
    if length:
        axes.axvline(length, color="gray", label="trained up to here")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return axes.figure


def doubling(axes, x):
    """A logarithmic x axis with a tick at each x."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, x)
    axes.minorticks_off()


def tiles(cells, x_label, title):
    """-> a coloured table. cells: {(row, column): [accuracy of each seed]}. A cell shows the median in %,
    then the range."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells))
    figure, axes = plt.subplots(figsize=(9, 1 + len(rows) / 2))
    middle = np.full((len(rows), len(columns)), np.nan)
    for (row, column), seeds in cells.items():
        i, j = rows.index(row), columns.index(column)
        low, median, high = 100 * np.percentile(seeds, [0, 50, 100])
        middle[i, j] = median
        words = f"{median:.0f}"
        if high - low >= 1:
            words += f"\n{low:.0f} to {high:.0f}"
        axes.text(j, i, words, ha="center", va="center", fontsize=8)
    axes.imshow(middle, vmin=0, vmax=160, aspect="auto", cmap="YlGn")
    axes.grid(False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    return finish(axes, x_label, "", title)


# ----------------------------------------------------------------------------------------------------------
# Figures

def curve(args):
    """Accuracy on training batches over traces seen, one line per seed; of the first five models."""
    figure, axes = plt.subplots()
    for look, (name, runs) in zip(LOOKS, load(args).items()):
        for result in runs:
            table = np.genfromtxt(result["folder"] / "metrics.csv", delimiter=",", names=True)
            smooth = np.convolve(table["accuracy"], np.ones(10) / 10, "valid")
            axes.plot(table["samples"][9:], smooth, **look, markevery=0.1, label=name)
            name = None                                     # one label for all seeds
    return finish(axes, "traces seen", "accuracy, mean of ten batches", "Learning to execute",
                  chance_of(result))


def positions(args):
    """Accuracy at the first, second, ... answer of a trace (P1 Fig. 4, left)."""
    figure, axes = plt.subplots()
    draw_positions(axes, args)
    return figure


def draw_positions(axes, args):
    """At each power of 2 (in commands), the mean accuracy of answers since the power before."""
    [stage] = parse_stages(args.at)
    curves = nested()
    for name, result, row in evaluations(args):
        if row["stage"] == str(stage):
            by_power = defaultdict(list)
            for i, right in enumerate(row["by_answer"], 1):
                by_power[2 ** math.ceil(math.log2(i * stage.spacing))].append(right)
            for commands, right in by_power.items():
                curves[name][commands].append(np.mean(right))
    lines(axes, curves)
    finish(axes, f"commands so far in traces of {stage}", "accuracy on held-out traces",
           "Which models keep track?", chance_of(result), trained(result).length)


def final(args):
    """Accuracy at the last answer of a trace over length and spacing (P1 Fig. 4, right)."""
    cells = defaultdict(list)
    for name, result, row in evaluations(args):
        [stage] = parse_stages(row["stage"])
        cells[f"{name}, a print every {stage.spacing}", stage.length].append(row["final"])
    return tiles(cells, f"commands (trained at {trained(result)})",
                 f"Accuracy at the last print in %, chance {chance_of(result):.0%}")


HOLDS = {   # the groups that one layer can hold in theory, with exact arithmetic and enough width
    "deltanet": "Z2 S5swaps",                               # one reflection per token (2411.12537)
    "deltaproduct 2": "Z2 Z60 S5swaps S3 S4 A5",            # two make a rotation (2502.10297)
    "deltaproduct 4": "Z2 Z60 S5swaps S3 S4 A5 S5",         # four make a cycle of five
    "ssm": "Z2",                                            # diagonal: signs (2603.01959)
    "rotary_ssm": "Z2 Z60",                                 # diagonal: angles
    **dict.fromkeys(["block_diagonal", "m2rnn", "lstm", "gru"], "Z2 Z60 S5swaps S3 S4 A5 S5"),
}


def ladder(args):
    """Word problems: how far a model came, a column per group. In a cell: accuracy in words of the trained
    length and of 4 times that, and [the last stage passed] if it is not the last one of training. Dark: 95 %
    at 4 times the trained length; middle: only at the trained length; pale: at neither; white: not run. A
    square: in HOLDS."""
    found = defaultdict(list)
    for name, runs in load(args, aside=["group", "curriculum", "max_samples"]).items():
        for result in runs:
            layers = result["config"]["n_layer"]
            row = f"{name}, {layers} layer{'s' if layers > 1 else ''}"
            found[row, result["config"]["group"]].append(result)
    groups = sorted({group for _, group in found}, key="Z2 Z60 S5swaps S3 S4 A4xZ5 A5 S5".split().index)
    names = list(dict.fromkeys(name for name, _ in found))
    figure, axes = plt.subplots(figsize=(9, 1 + len(names) / 2))
    shade, holds = np.full((len(names), len(groups)), np.nan), {}
    for (name, group), runs in found.items():
        i, j = names.index(name), groups.index(group)
        lengths = [row["stage"].split("x")[0] for row in runs[0]["eval"]]
        by_seed = [[row["accuracy"] for row in result["eval"]] for result in runs]
        at, far, *_ = np.median(by_seed, 0).round(2)                # the trained length, and 4 times that
        shade[i, j] = int(at >= 0.95) + int(far >= 0.95)
        words = f"{at:.0%}, {far:.0%}"
        best = max((result["passed"] for result in runs), key=len)
        if not best or best[-1]["stage"] != str(trained(runs[0])):
            words += f"\n[{best[-1]['stage'].replace('x1', '') if best else '-'}]"
        axes.text(j, i, words, ha="center", va="center", fontsize=8)
        config = runs[0]["config"]
        model = config["model"] + (f" {config['n_householder']}" if "product" in name else "")
        holds[i] = HOLDS.get(model, "").split() if config["beta_max"] == 2 else []
    for i, j in np.ndindex(shade.shape):
        if groups[j] in holds[i]:
            axes.plot(j - 0.42, i - 0.33, "ks", markersize=5)
    axes.imshow(shade, vmin=-0.3, vmax=3, aspect="auto", cmap="Greens")
    axes.grid(False)
    chance = {group: chance_of(runs[0]) for (_, group), runs in found.items()}
    axes.set_xticks(range(len(groups)), [f"{group}\nchance {chance[group]:.0%}" for group in groups])
    axes.set_yticks(range(len(names)), names)
    legend = (f"accuracy in words of {lengths[0]} elements (trained up to here), and of {lengths[1]}\n"
              "dark: 95 % in both; middle: in the shorter words; pale: in neither; white: not run\n"
              "square: in theory, one layer can hold it; [8]: training passed words of 8, not of 16")
    return finish(axes, legend, "", "Which model learns which group?")


def spacing(args):
    """Accuracy at the trained length, over the commands from one print to the next (P1 Fig. 3)."""
    figure, axes = plt.subplots()
    curves = nested()
    for name, result, row in evaluations(args):
        [stage] = parse_stages(row["stage"])
        if (stage.length, stage.kind) == (trained(result).length, trained(result).kind):
            curves[name][stage.spacing].append(row["accuracy"])
    lines(axes, curves)
    return finish(axes, f"commands from one print to the next, in test traces of {trained(result).length}",
                  "accuracy on held-out traces", "How sparse may prints be?",
                  chance_of(result), trained(result).spacing)


def nats(args):
    """Hidden branches: KL from the exact predictive of an answer to the model's, over traces' length."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    titles = {"": "random prints", "forced": "a swap that may happen, and never does (P1 Fig. 10)"}
    for axes, (kind, title) in zip(panels, titles.items()):
        curves, uniform = nested(), {}
        for name, result, row in evaluations(args):
            [stage] = parse_stages(row["stage"])
            if stage.kind == kind:
                curves[name][stage.length].append(row["kl"])
                uniform[stage.length] = math.log(task_of(result).n_answers) - row["floor"]
        lines(axes, curves)
        axes.plot(uniform.keys(), uniform.values(), ":", color="gray", label="chance: a uniform guess")
        axes.set_yscale("log")
        finish(axes, "lines of a trace", "KL from the exact belief, nats per print", title,
               length=trained(result).length)
        axes.get_legend().remove()
    figure.suptitle("How far is a model from the exact belief? 0 is perfect")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


WAYS = ["not told", "not told, a curriculum", "told by a head", "told in the text"]


def way(result):
    """How a run was taught: one of WAYS."""
    states = task_of(result).states
    if states == "text":
        return WAYS[3]
    if states != "none":
        return WAYS[2]
    stages = parse_stages(curriculum_of(result))
    return WAYS[1] if len(stages) > 1 or stages[0].kind else WAYS[0]


def seen_until_95(result):
    """Traces seen when the held-out accuracy in the last stage first was 95 %, or None."""
    last = result["eval"][0]["stage"]
    return next((samples for samples, stage, right in result["held_out"]
                 if stage == last and right >= 0.95), None)


def samples(args):
    """Traces until 95 % of the held-out answers were right: a panel per task, a column per model, a
    marker per way to teach it. Hollow: not reached; drawn where the run ended, with its accuracy there."""
    runs = [result for group in load(args, aside=["curriculum", "states", "state_layer"]).values()
            for result in group]
    tasks = list(dict.fromkeys((result["task"], trained(result).length) for result in runs))
    figure, [panels] = plt.subplots(1, len(tasks), figsize=(11, 4.5), squeeze=False, sharey=True)
    for axes, (task, length) in zip(panels, tasks):
        here = [result for result in runs if (result["task"], trained(result).length) == (task, length)]
        names = list(dict.fromkeys(column(result) for result in here))
        for number, (name, look) in enumerate(zip(WAYS, LOOKS)):
            if name not in map(way, runs):
                continue
            look = {**look, "linestyle": "", "markersize": 8}
            aside = (number - 1.5) / 6                      # side by side
            axes.plot([], **look, label=name)
            for result in here:
                if way(result) == name:
                    x, seen = names.index(column(result)) + aside, seen_until_95(result)
                    axes.plot(x, seen or result["samples"], **look, fillstyle="full" if seen else "none")
                    if not seen:
                        end = result["eval"][0]["accuracy"]
                        axes.annotate(f"{end:.0%}", (x, result["samples"]), (0, 7), fontsize=8, ha="center",
                                      rotation=90, textcoords="offset points")
        axes.set_yscale("log", base=2)
        axes.margins(y=0.15)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_xlim(-0.5, len(names) - 0.5)
        chance = chance_of(here[0])
        finish(axes, "model", "traces", f"{task}, {length} lines (chance {chance:.0%})")
        axes.get_legend().remove()
    figure.suptitle("Traces until 95 % of the answers are right. A marker is a run. "
                    "Hollow: not reached, and the accuracy at its end")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def column(result):
    """A model's name, for a DeltaNet with its range of eigenvalues."""
    name, beta_max = result["model"], result["config"]["beta_max"]
    return f"{name}\n[{1 - beta_max:g}, 1]" if name == "deltanet" else name


def lengths(args):
    """How many traces of functions have how many steps (P2 Fig. 1). A line of the files is a trace."""
    steps = [row["steps"] for path in args.paths for row in read_lines(path)]
    figure, axes = plt.subplots()
    axes.hist(steps, bins=range(max(steps) + 2), align="left")
    return finish(axes, "steps of a trace", "number of traces", f"{len(steps):,} traces of functions")


def filters(args):
    """Left, P1 Fig. 9: the mass of a linear filter over prints of probability 1/2, in four dtypes. Right, P1
    Fig. 10: P(3 holds 3) in the marginal recurrence, and what Sinkhorn makes of it; in truth it is 1."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for dtype, look in zip([torch.float16, torch.bfloat16, torch.float32, torch.float64], LOOKS):
        states = pfsa.linear_filter(pfsa.figure_9(), [[0, 1] * 1100], dtype)
        mass = states[0, ::2].double().sum(1)               # after each print
        mass = mass[mass > 0]
        left.loglog(mass, **look, markevery=[-1], label=f"{dtype}: 0 after {len(mass)}")
    left.set_yticks([1, 1e-100, 1e-200, 1e-300])
    finish(left, "prints of probability 1/2", "mass of the linear filter (exact: 1)", "P1 Figure 9")
    forced = [pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)] * 1100
    H = pfsa.marginal_filter(3, [forced])[0, ::2]
    scaled, ok = pfsa.sinkhorn(H)
    right.set_xscale("symlog")
    right.plot(H[:, 2, 2], label="marginal recurrence")
    right.plot(scaled[ok, 2, 2], "--", label=f"after Sinkhorn, which fails after {ok.sum()}")
    return finish(right, "times: maybe swap 2 and 3, print that 2 holds 2", "P(3 holds 3), exact: 1",
                  "P1 Figure 10")


# ----------------------------------------------------------------------------------------------------------
# The picture on top of the README

@torch.no_grad()
def states_by_hand(sources, beta):
    """The state of models.by_hand after each of these lines, (n, n) each: rows are variables, columns digits.
    beta: 2 or 1, at the key of a swap."""
    task = Repl(moves="swap")
    lm = by_hand(task)
    if beta == 1:
        lm.blocks[0].mixer.to_beta.weight.clamp_(max=0)     # at a name, 2 sigmoid(0) = 1
    state, found = None, []
    for source in sources:
        tokens = task.tokenizer.encode(f"{task.prompt}{source}\n")
        _, _, state = lm(torch.tensor([tokens]), state)
        [(_, S)] = state
        found.append(-S[0, 0, :task.n_vars, :task.n_vars].numpy())    # stored under -e_a
    return found


def headline(args):
    """Left: what the state of models.by_hand holds while it reads swaps, with beta 2 and with beta 1. Right:
    accuracy of trained models over the commands of a long trace."""
    figure = plt.figure(figsize=(12, 4.5))
    left, right = figure.subfigures(1, 2, width_ratios=[1.1, 1])
    swaps = ["a, c = c, a", "b, e = e, b", "c, d = d, c"]
    sources = [f"{name} = {value}" for value, name in enumerate("abcde", 1)] + swaps
    titles = {2: "beta 2 reflects: two rows of the memory change places",
              1: "beta 1: both rows become their mean"}
    for panel, (beta, title) in zip(left.subfigures(2, 1), titles.items()):
        panel.suptitle(title, fontsize=11)
        states = states_by_hand(sources, beta)[-4:]
        for axes, S, command in zip(panel.subplots(1, 4, sharey=True), states, ["at first", *swaps]):
            axes.imshow(S / states[0].max(), vmin=0, vmax=1.4, cmap="Blues")
            axes.grid(False)
            axes.set_xticks(range(5), range(1, 6))
            axes.set_yticks(range(5), "abcde")
            axes.set_title(command, fontsize=9)
            axes.set_xlabel("value", fontsize=8)
    draw_positions(right.subplots(), args)
    return figure


# ----------------------------------------------------------------------------------------------------------
# Inside one model

def one_run(args, traces):
    """-> cfg, task, model of the one run, and the one stage --at."""
    [stage], [path, *others] = parse_stages(args.at), args.paths
    if others:
        raise ValueError(f"{args.command}: give one run at a time")
    cfg, task, _, model = load_model(path, device="cpu", eval_at=args.at, eval_samples=traces)
    return cfg, task, model, stage


def one_model(args, traces, kind=torch.nn.Module):
    """`one_run`, but repl with mixers all of class `kind`."""
    cfg, task, model, stage = one_run(args, traces)
    mixers = [block.mixer for block in model.blocks]
    if cfg.task != "repl" or cfg.states == "text" or not all(isinstance(mixer, kind) for mixer in mixers):
        raise ValueError(f"{args.command}: give a run of repl, without states in the text; for heads, "
                         "of deltanet")
    return cfg, task, model, stage


def name_of(args):
    return f"{' '.join(args.paths)} at {args.at}"


def measured(args, measure):
    """Read a .jsonl; or call `measure`, and save what it returns beside the picture."""
    if args.paths and args.paths[0].endswith(".jsonl"):
        found, *others = read_lines(args.paths[0])
        if others:
            raise ValueError(f"{args.paths[0]}: give a file of one line")
    else:
        found = {"of": name_of(args), **measure(args)}
        Path(args.save).with_suffix(".jsonl").write_text(json.dumps(found) + "\n")
    return found


SCALES = [1, 0.9, 0.8, 0.7, 0.6, 0.5]                       # factors on one head's betas; 0.5: no reflections


@torch.no_grad()
def measure_heads(args, traces=32):
    """Of each delta head, "layer.head": its betas, the principal components of its keys, and accuracy while
    its betas are scaled down: from eigenvalues in [-1, 1], step by step, to [0, 1]."""
    cfg, task, model, stage = one_model(args, traces, DeltaNet)
    batch = task.batch(cfg.seed, "test", stage, 0, traces)
    x = model.embed(torch.tensor(batch.tokens))
    whole, found = evaluate(model, task, stage, cfg)["accuracy"], {}
    for layer, block in enumerate(model.blocks, 1):
        mixer = block.mixer
        beta = mixer.beta
        seen, _ = block.conv(block.norm1(x))
        betas = beta(seen)                                  # (B, T, H)
        _, keys, _ = mixer.project(seen)                    # (B, T, H, K)
        for head in range(mixer.n_head):
            accuracy = [whole]
            for scale in SCALES[1:]:
                scales = torch.ones(mixer.n_head)
                scales[head] = scale
                mixer.beta = lambda x: scales * beta(x)
                accuracy.append(evaluate(model, task, stage, cfg)["accuracy"])
            keys_here = keys[:, :, head].flatten(0, 1)
            variance = torch.linalg.svdvals(keys_here - keys_here.mean(0)).square()
            found[f"{layer}.{head + 1}"] = {
                "accuracy": accuracy,
                "betas": betas[..., head].quantile(torch.linspace(0, 1, 21)).tolist(),
                "keys": (variance.cumsum(0) / variance.sum()).tolist(),
            }
        mixer.beta = beta
        x, _ = block(x)
    last = trained({"task": cfg.task, "config": vars(cfg)})
    return {"stage": str(stage), "trained": str(last), "chance": task.chance(stage), "heads": found}


def heads(args):
    """Betas (P1 Figs. 5, 11), principal components of keys (5, 12), accuracy while one head's betas are
    scaled down (6). In colour: the most needed head."""
    measures = measured(args, measure_heads)
    found, chance = measures["heads"], measures["chance"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    most = min(found, key=lambda name: found[name]["accuracy"][-1])
    for name, head in found.items():
        look = {"color": "silver"}
        if name == most:
            layer, number = name.split(".")
            look = {"color": "C0", "linewidth": 3, "zorder": 3, "label": f"layer {layer}, head {number}"}
        left.plot(np.linspace(0, 1, 21), head["betas"], **look)
        middle.plot(range(1, len(head["keys"]) + 1), head["keys"], **look)
        right.plot(SCALES, head["accuracy"], marker="o", **look)
    right.invert_xaxis()
    figure.suptitle(f"Which head of {len(found)} tracks, in traces of {measures['stage']} (trained up to "
                    f"{measures['trained']})? In colour: the one that the model needs most")
    finish(left, "share of tokens", "beta, at most", "Betas of each head")
    finish(middle, "principal components", "share of variance", "Keys of each head")
    return finish(right, "factor on the betas of one head", "accuracy on held-out traces",
                  "Accuracy if its betas are scaled", chance)


def is_command(source):
    """Whether a line is a swap or a permutation."""
    return ", " in source and " = " in source


@torch.no_grad()
def after_commands(task, model, traces):
    """Read traces of one stage together, line by line; their lines are equally long. Yields, after each
    command, the number of its line, the hidden vectors there (B, D), and the recurrent state."""
    tokens, _, ends = zip(*map(task.encode, traces))
    tokens, state, start = torch.tensor(tokens), None, 0
    for number, end in enumerate(ends[0]):
        hidden, _, state = model(tokens[:, start:end + 1], state)
        start = end + 1
        if is_command(traces[0][number].source):
            yield number, hidden[:, -1], state


def states_after(task, lines, shift=0):
    """-> the classes of what the variables hold after each line. With shift=1 (the probe's control), commands
    act on the next variable: wrong states for the text."""
    others = str.maketrans(task.names, task.names[shift:] + task.names[:shift])
    sources = [line.source for line in lines if line.source]
    sources = [source.translate(others) if is_command(source) else source for source in sources]
    return [line.state for line in run(sources, {}, see=task.slots)]


def observed(task, model, stage, split, traces):
    """-> {"hidden vector": (N, D), "recurrent state": (N, M)} after N commands; the classes of what the
    variables hold there (N, n), and in the control (N, n)."""
    rng = random.Random(0)
    drawn = [task.draw(rng, stage, split) for _ in range(traces)]
    held = [states_after(task, lines) for lines in drawn]
    in_control = [states_after(task, lines, shift=1) for lines in drawn]
    hidden, states, true, other = [], [], [], []
    for number, x, state in after_commands(task, model, drawn):
        numbers = [part.squeeze(0).flatten(1) for _, mixer in state for part in tensors(mixer)]
        hidden.append(x)
        states.append(torch.cat(numbers, 1))
        true += [after[number] for after in held]
        other += [after[number] for after in in_control]
    seen = {"hidden vector": torch.cat(hidden)}
    if states[0].shape == states[-1].shape:                 # a Transformer's cache grows
        seen["recurrent state"] = torch.cat(states)
    return seen, torch.tensor(true), torch.tensor(other)


def fit(x, y):
    """Ridge regression of y's classes on x (N, M), y (N, n) -> a function that guesses y from x."""
    one_hot, mean = F.one_hot(y).double().flatten(1), x.double().mean(0)
    centred = x.double() - mean
    square = centred.T @ centred
    square += 0.1 * square.diagonal().mean() * torch.eye(len(square))
    weights = torch.linalg.solve(square, centred.T @ (one_hot - one_hot.mean(0)))

    def guess(x):
        scores = (x - mean) @ weights + one_hot.mean(0)
        return scores.view(len(x), *y.shape[1:], -1).argmax(-1)
    return guess


def probe(args, traces=128):
    """Can values be read off a frozen model, by a linear map that is fitted to training programs? From the
    hidden vector at a command's end, and from the recurrent state. Two controls tell how much the map
    computes itself: other states of the same text (2305.11169), and an untrained model."""
    cfg, task, model, stage = one_model(args, traces)
    untrained = build_model(cfg, task, torch.device("cpu"))
    found = {"of": name_of(args), "chance": task.chance(stage)}
    for name, net in [("trained", model), ("untrained", untrained)]:
        seen, *labels = observed(task, net, stage, "train", traces)
        seen_in_tests, *labels_in_tests = observed(task, net, stage, "test", traces // 2)
        for place, x in seen.items():
            right = [(fit(x, y)(seen_in_tests[place]) == truth).double().mean().item()
                     for y, truth in zip(labels, labels_in_tests)]
            found[f"{name}, {place}"] = right
            print(f"{name}, {place}: {right[0]:.1%} of values right, control {right[1]:.1%}")
    print(f"chance: {found['chance']:.1%}")
    return found


@torch.no_grad()
def would_say(task, model, state, traces):
    """-> (traces, n) the values that a model would say if all variables were printed now; 0: not 1 to n."""
    said = []
    for name in task.names:
        question = torch.tensor([task.tokenizer.encode(f"{task.prompt}print('{name}', {name})\n{name} ")])
        hidden, _, _ = model(question.expand(traces, -1), state)
        said.append(model.head(hidden[:, -1]).argmax(-1) - ord("0"))
    values = torch.stack(said, 1)
    return values.where((values > 0) & (values <= task.n_vars), 0)


def automaton(args, traces=256):
    """The automaton that a model behaves as. Its state after a command: what it would say if all variables
    were printed then. A step is right if Python turns the values that the model would say before the command
    into those that it would say after; a step from a wrong state can be right."""
    _, task, model, stage = one_model(args, traces)
    rng = random.Random(0)
    drawn = [task.draw(rng, stage, "test") for _ in range(traces)]
    held = [states_after(task, lines) for lines in drawn]
    before, states, right, steps, astray = [], set(), [], [], []
    for number, _, state in after_commands(task, model, drawn):
        now = would_say(task, model, state, traces).tolist()
        states.update(map(tuple, now))
        for lines, old, new, was_right in zip(drawn, before, now, right[-traces:]):    # not at the first
            memory = dict(zip(task.names, old))
            run([lines[number].source], memory)
            steps.append(new == [memory[name] for name in task.names])
            if not was_right:
                astray.append(steps[-1])
        right += [values == [slot + 1 for slot in after[number]] for values, after in zip(now, held)]
        before = now
    found = {"of": name_of(args), "states": len(states), "arrangements": math.factorial(task.n_vars),
             "right": float(np.mean(right)), "steps": float(np.mean(steps)),
             "steps_from_wrong": float(np.mean(astray)) if astray else None, "wrong": len(astray)}
    print(f"{found['states']} states for {found['arrangements']} arrangements")
    print(f"{found['right']:.2%} of commands end in the right state; {found['steps']:.2%} of steps are right")
    if astray:
        print(f"of {found['wrong']:,} steps from a wrong state {found['steps_from_wrong']:.2%} are right")
    return found


@torch.no_grad()
def belief(args, traces=64):
    """Why does a model lose its belief in a forced trace (P1 Figures 9, 10)? After 1, 2, 4, ... prints and
    after the last: the mass that a linear filter has left; the KL to the exact predictive; how sure the model
    is, its highest probability; the probability that it gives to values that are possible; and the norm of
    each layer's state."""
    cfg, task, model, stage = one_run(args, traces)
    if stage.kind != "forced":
        raise ValueError(f"--at {args.at}: write it as 64x2:forced")
    batch = to_device(task.batch(cfg.seed, "test", stage, 0, traces), "cpu")
    places, state, start, mass = batch.asked[0].nonzero()[:, 0].tolist(), None, 0, 1.0
    rows = []
    for number, place in enumerate(places, 1):              # traces differ in digits only
        hidden, _, state = model(batch.tokens[:, start:place + 1], state)
        start, logits, exact = place + 1, model.head(hidden[:, -1]), batch.predictive[:, place]
        mass *= exact.max().item()                          # P(printed value): 1/2 or 1, the largest
        if math.log2(number) % 1 and number < len(places):  # no power of 2, and not the last
            continue
        kl = pfsa.compare(logits, batch.target[:, place], exact)[:, 0].mean()
        said = logits.softmax(-1)
        sure, values = said.amax(1).mean(), said[:, ord("1"):ord("1") + exact.shape[1]]
        possible = (values * (exact > 0)).sum(1).mean()
        energy = [sum(x.square().sum().item() for x in tensors(mixer)) / traces for _, mixer in state]
        rows.append([number, mass, kl.item(), sure.item(), possible.item(), *map(math.sqrt, energy)])
    print("prints      mass        KL      sure  possible  norms of the states")
    for number, mass, kl, sure, possible, *norms in rows:
        norms = "  ".join(f"{norm:8.2f}" for norm in norms)
        print(f"{number:6d}  {mass:8.1e}  {kl:8.4f}  {sure:8.1%}  {possible:8.1%}  {norms}")
    columns = ["prints", "mass", "kl", "sure", "possible", "norms"]
    return {"of": name_of(args), "columns": columns, "rows": rows}


# ----------------------------------------------------------------------------------------------------------
# How far a model will read, predicted from 64 commands
#
# After Chung et al. 2605.07755: tracking ends when the spread within a class is too large for the separation
# of the classes. Here, we take what the mixer reads at a print; a class is a printed variable with its value.
# One-layer models of repl only.

DEPTHS = [8, 16, 24, 32, 48, 64]


def one_print(task, commands, traces):
    """Test traces with one print, after this many commands -> Batch; printed variable and value (traces,)."""
    rng, stage = random.Random(commands), Stage(commands, commands)
    drawn = [task.draw(rng, stage, "test") for _ in range(traces)]
    printed = [lines[-1].text.split() for lines in drawn]
    printed = torch.tensor([[task.names.index(name), int(value) - 1] for name, value in printed])
    return to_device(task.to_batch(drawn), "cpu"), *printed.T


def read_state(model, tokens, here):
    """-> o (N, H, V), what the mixer reads from its state at places `here`; x (N, D), what its block gets."""
    [block] = model.blocks
    x = model.embed(tokens)
    seen, _ = block.conv(block.norm1(x))
    o, _ = block.mixer.scan(seen, *block.mixer.project(seen), None)
    return o[here], x[here]


def say(model, o, x):
    """-> (N,) the tokens that the model says if it has read o."""
    [block] = model.blocks
    x = x + block.mixer.out(block.mixer.norm(o).flatten(1))
    x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x)).argmax(-1)


def spread_and_separation(model, task, commands, traces):
    """-> the spread of reads within a class, along the directions that separate values; the separation of
    classes; and a function: factor -> accuracy if the spread were larger by this factor."""
    batch, variable, value = one_print(task, commands, traces)
    pieces = zip(batch.tokens.split(64), batch.asked.split(64))
    o, x = map(torch.cat, zip(*(read_state(model, *piece) for piece in pieces)))
    n, shape, o = task.n_vars, o.shape[1:], o.flatten(1).double()
    alike = n * variable + value
    mean = torch.stack([o[alike == i].mean(0) for i in range(n * n)])     # (n * n, H * V)
    apart = mean.view(n, n, -1) - mean.view(n, n, -1).mean(1, keepdim=True)
    rest, total = o - mean[alike], 0
    for i in range(n):
        directions = torch.linalg.svd(apart[i], full_matrices=False).Vh[:n - 1]
        total += (rest[variable == i] @ directions.T).square().sum().item()
    spread = math.sqrt(total / (traces - n * n))
    separation = apart.norm(dim=-1).mean().item()

    def right(factor):
        said = say(model, (mean[alike] + factor * rest).float().unflatten(1, shape), x)
        return (said == batch.target[batch.asked]).double().mean().item()

    return spread, separation, right


@torch.no_grad()
def measure_horizon(model, task, cfg, reads=1024, most=4096, traces=128):
    """From prints after up to 64 commands, predict when accuracy falls below 90 %; and measure it. We assume
    that each command shrinks the separation by one factor, and adds one amount to the spread's square."""
    *spreads, right = zip(*(spread_and_separation(model, task, depth, reads) for depth in DEPTHS))
    spread, separation = np.array(spreads)
    factors = 2.0 ** np.arange(0, 40, 1 / 8)
    factor = next((factor for factor in factors if right[-1](factor) < 0.9), math.inf)
    ratio = factor * spread[-1] / separation[-1]            # above it, under 90 % are right
    shrinks, start = np.polyfit(DEPTHS, np.log(separation), 1)
    grows, first = np.polyfit(DEPTHS, spread ** 2, 1)
    if shrinks > 0:                                         # by chance
        shrinks, start = 0, np.log(separation).mean()
    if grows < 0:
        grows, first = 0, (spread ** 2).mean()
    depths = 2.0 ** np.arange(6, 30, 1 / 16)
    expected = np.sqrt(first + grows * depths) / np.exp(start + shrinks * depths)
    predicted = next((depth for depth, x in zip(depths, expected) if x > ratio), None)

    cfg, accuracy, depth = replace(cfg, eval_samples=traces), {}, 64
    while depth <= most and min(accuracy.values(), default=1) > 0.5:
        accuracy[depth] = evaluate(model, task, Stage(depth, depth), cfg)["accuracy"]
        depth *= 2
    last = max([depth for depth, right in accuracy.items() if right >= 0.9], default=64)
    between = [round(last * 2 ** (quarter / 4)) for quarter in (1, 2, 3) if 2 * last in accuracy]
    for depth in between:                                   # look closer where it falls
        accuracy[depth] = evaluate(model, task, Stage(depth, depth), cfg)["accuracy"]
    return {"commands": DEPTHS, "spread": list(spread), "separation": list(separation), "ratio": ratio,
            "predicted": predicted, "fell": falls(accuracy), "accuracy": sorted(accuracy.items())}


def falls(accuracy):
    """{commands: accuracy} -> the commands at which it first falls below 90 %, interpolated; None if it does
    not."""
    points = sorted(accuracy.items())
    for (before, high), (after, low) in zip(points, points[1:]):
        if high >= 0.9 > low:
            return before * (after / before) ** ((high - 0.9) / (high - low))


def one_layer(path):
    """-> cfg, task and model of a run, or models.by_hand with places=1, where swaps round."""
    if path == "by_hand":
        task = Repl(moves="swap")
        return Config(moves="swap"), task, by_hand(task, places=1)
    cfg, task, _, model = load_model(path, device="cpu")
    if cfg.task != "repl" or cfg.n_layer > 1 or not hasattr(model.blocks[0].mixer, "scan"):
        raise ValueError(f"horizon: {path} must be repl, one layer, a mixer with a scan")
    return cfg, task, model


def horizon(args):
    """Accuracy by commands without a print, and where it was predicted to fall below 90 %."""
    if args.paths[0].endswith(".jsonl"):
        rows = read_lines(args.paths[0])
    else:
        rows = []
        for path in args.paths:
            cfg, task, model = one_layer(path)
            last = trained({"task": cfg.task, "config": vars(cfg)}).length * cfg.carry
            rows.append({"of": path, "trained": None if path == "by_hand" else last,
                         **measure_horizon(model, task, cfg)})
        Path(args.save).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    axes = plt.subplots(figsize=(9, 4.5))[1]
    for row, look in zip(rows, LOOKS):                      # of the first five
        commands, accuracy = zip(*row["accuracy"])
        name = Path(row["of"]).name
        if row["trained"]:                                  # else: written by hand
            name += f", trained up to {row['trained']:,}"
        axes.plot(commands, accuracy, **look, label=name)
        if row["predicted"]:                                # else: not within 10^9 commands
            axes.scatter(row["predicted"], 0.9, s=300, color=look["color"], marker="*", zorder=3)
    doubling(axes, [64, 128, 256, 512, 1024, 2048, 4096])
    axes.axvline(DEPTHS[-1], color="gray", label="predicted from traces up to here")
    return finish(axes, "commands before the only print", "accuracy on held-out traces",
                  "Without a print, trained models forget. Stars: where 90 % was predicted", 0.2)


# ----------------------------------------------------------------------------------------------------------
# What rounding does to the scan at eigenvalue -1

SCHEMES = ["no division by |k|^2", "state read in bf16", "Neumann inverse", "beta / |k|^2 first"]


def scheme(q, k, v, beta, state, name):
    """The state after these steps, as kernels.py computes it, with the one change that `name` says. T is a
    multiple of 16, B is 1, q is not used. -> None, state, as `delta_rule` returns them."""
    heads, C = state.shape[1], 16
    k, v, beta = (kernels.to_chunks(x.float(), C) for x in (k, v, beta[..., None]))
    KK, eye = k @ k.mT, torch.eye(C)
    norm2 = KK.diagonal(dim1=-2, dim2=-1)[..., None]
    if name == "no division by |k|^2":
        norm2 = torch.ones_like(norm2)
    b = beta / norm2
    A = (b * KK if name == "beta / |k|^2 first" else beta * (KK / norm2)).tril(-1)
    M = torch.linalg.solve_triangular(A, eye.expand_as(A), upper=False, unitriangular=True)
    if name == "Neumann inverse":                           # (I + A)^-1, as A^16 = 0
        M = (eye - A) @ (eye + A @ A)
        M = M @ (eye + A.matrix_power(4)) @ (eye + A.matrix_power(8))
    S = state[0]
    for K, V, Mb in zip(k.split(heads), v.split(heads), (M * b.mT).split(heads)):
        seen = S.bfloat16().float() if name == "state read in bf16" else S
        S = S + K.mT @ (Mb @ (V - K @ seen))
    return None, S[None]


def measure_accuracy(args):
    scans = {name: functools.partial(scheme, name=name) for name in SCHEMES}
    scans["kernels.py"] = kernels.delta_rule
    steps = [2 ** n for n in range(4, 17)]
    errors = {kind: kernels.drift(kind, scans, marks=steps) for kind in kernels.DRIFT_KINDS}
    for curves in errors.values():
        for name, found in curves.items():
            curves[name] = [x for x in found if math.isfinite(x)]    # up to where the state overflows
    return {"of": "16 heads, K = V = 16, bf16 keys, beta 2", "steps": steps, "errors": errors}


def accuracy(args):
    """Error of the state over steps, against float64 on the same keys; worst of 16 heads. Curves may leave
    the picture at its top."""
    found = measured(args, measure_accuracy)
    figure, every = plt.subplots(1, len(found["errors"]), figsize=(13, 4), sharey=True)
    for axes, (kind, curves) in zip(every, found["errors"].items()):
        for look, (name, errors) in zip(LOOKS, curves.items()):
            axes.loglog(found["steps"][:len(errors)], errors, **look, label=name)
        axes.set_ylim(1e-7, 1e2)
        axes.set(xlabel="steps at eigenvalue -1", ylabel="relative error of the state", title=f"keys: {kind}")
    every[0].legend()
    figure.suptitle(f"What rounding does to the state: {found['of']}")
    return figure


# ----------------------------------------------------------------------------------------------------------
# The command line

# A command returns a figure, or a dict that is added to a table.
COMMANDS = [curve, headline, positions, final, ladder, spacing, nats, samples, lengths, filters,
            horizon, heads, probe, automaton, belief, accuracy]
ALL = {  # the figures of README.md and assets/RESULTS.md
    "headline": "headline assets/contrast.jsonl --at 512x8 --models deltanet,deltaproduct",
    "final": "final assets/final.jsonl",
    "spacing": "spacing assets/spacing.jsonl",
    "ladder": "ladder assets/ladder.jsonl",
    "nats": "nats assets/belief.jsonl --models deltanet,gru,m2rnn,transformer",
    "samples": "samples assets/told.jsonl",
    "lengths": "lengths assets/lengths.jsonl",
    "horizon": "horizon assets/horizon.jsonl",
    "heads": "heads assets/heads.jsonl",
    "filters": "filters",
    "accuracy": "accuracy assets/accuracy.jsonl",
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                  # an error is one line
    commands = {f.__name__: f for f in COMMANDS}
    parser.add_argument("command", nargs="?", choices=commands, metavar="command")
    parser.add_argument("paths", nargs="*", help="folders of finished runs, or .jsonl files")
    parser.add_argument("--at", default="128x16", help="the stage, if a command has one [128x16]")
    parser.add_argument("--models", help="only these, as deltanet,lstm")
    parser.add_argument("--hide", help="a setting that labels leave out, as learning_rate")
    parser.add_argument("--save", help="the picture: .png, .svg, .pdf [out/COMMAND.png]")
    parser.add_argument("--all", action="store_true", help="draw every figure in assets/ from its table")
    args = parser.parse_args(argv)
    if args.all:
        for name, words in ALL.items():
            main([*words.split(), "--save", f"assets/{name}.png"])
        return
    if not args.command or not args.paths and args.command not in ("filters", "accuracy"):
        parser.error("give a command, and folders of runs or .jsonl files")
    args.save = args.save or f"out/{args.command}.png"
    try:
        Path(args.save).parent.mkdir(parents=True, exist_ok=True)
        found = commands[args.command](args)
        if isinstance(found, dict):
            table = Path(args.save).with_suffix(".jsonl")
            with open(table, "a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"added to {table}")
        else:
            found.savefig(args.save)
            print(f"saved {args.save}")
    except KeyError as error:
        parser.error(f"{args.command}: there is no {error} in these files")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
