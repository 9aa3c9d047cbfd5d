"""
Figures of finished runs, one function for each, and looks inside a trained model.

    python plot.py curve out/deltanet-repl*                     accuracy during training, stage by stage
    python plot.py horizon out/* --by gates,cooldown            accuracy at a trace's only print
    python plot.py heads out/deltanet-repl --at 512x4           which head tracks the state (P1 Figs. 5, 6, 11, 12)
    python plot.py movie assets/*.pt                            what models expect to be printed, line by line

The figures of README.md and assets/RESULTS.md; without a path, they draw their entry of assets/results.jsonl:

    python plot.py --all                                        all of them, in a minute
    python plot.py headline                                     a memory that swaps; accuracy at a trace's only print
    python plot.py ladder                                       a row for each model, a column for each group
    python plot.py samples                                      programs until 95 % of the answers are right (P2 Fig. 5)
    python plot.py nats                                         hidden branches: KL from the exact probabilities
    python plot.py ladder out/*-group* --by n_householder       the same figure of your own runs

A file of JSON lines, one result on each, does for folders: `cat out/*-group*/result.json > ladder.jsonl`. With --entry
NAME, only its lines with "entry": "NAME" are read.

Runs that differ only in their seed form one curve: each seed is a thin line, and their median a thick one. If runs
differ in other settings, --by names the settings that tell them apart, as in --by states,learning_rate. If two runs
have the same settings and the same seed, labels also name their folders. P1 is arXiv 2602.14814, P2 "Grounding Code
Understanding in Step-by-Step Execution".

Read `evaluations` and `horizon` first.
"""
import argparse
import itertools
import json
import math
import random
import re
import sys
import textwrap
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import PillowWriter

from data import GROUPS, parse_stages, run
from kernels import delta_rule
from models import DeltaNet
from train import NOT_IN_FOLDER_NAME, TASKS, Config, beliefs, evaluate, load, read_checkpoint

STYLE = {"figure.figsize": (7, 4.5), "figure.constrained_layout.use": True, "savefig.dpi": 150, "axes.grid": True,
         "grid.alpha": 0.3, "text.usetex": False}
MAY_DIFFER = {"seed", *NOT_IN_FOLDER_NAME}                  # settings in which the runs of one curve may differ
COLOURS = {"deltanet": "C0", "transformer": "C1", "lstm": "C2", "m2rnn": "C3", "deltaproduct": "C4", "ssm": "C5",
           "gru": "C6", "linear_attention": "C7", "gated_deltanet": "C9", "by_hand": "k"}      # in all figures
WORDS = {"auto": "default supervision", "linear": "state head", "text": "states in the text", "none": "no states",
         "listperm": "swaps in a list"}
STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("v", ":"), ("D", "-")]      # five curves differ also in gray


# ----------------------------------------------------------------------------------------------------------
# Runs

def read_lines(path, entry=None):
    """-> the JSON objects in a file that has one on each line; if `entry` is given, only those with that "entry"."""
    try:
        rows = [json.loads(line) for line in open(path) if line.strip()]
    except ValueError:
        raise ValueError(f"{path} is not a file of JSON lines: give folders of finished runs, or such files")
    rows = [row for row in rows if isinstance(row, dict) and entry in (None, row.get("entry"))]
    if not rows:
        raise ValueError(f"{path} has no results" if entry is None else f"{path} has no lines of the entry {entry}")
    return rows


def load_runs(args, key="eval", needs="result", fits=lambda row: True, task=None):
    """-> [(label, result), ...] of the finished runs that the command line names, if `task` is given of this task.
    result[key] keeps the rows for which fits(row) holds. Runs without such a row and paths that are not runs go to
    args.left_out, which `main` prints; `needs` describes the missing row."""
    runs, labelled = [], []
    for path in map(Path, args.paths):
        if path.suffix in (".json", ".jsonl") and not path.is_dir():
            runs += [{**row, "place": str(path)} for row in read_lines(path, args.entry) if "config" in row]
        elif (path / "result.json").exists():
            place = re.sub(r"-seed=\d+(?!.*/)", "", str(path))        # a label names all seeds
            runs += [{**row, "place": place} for row in read_lines(path / "result.json")]
        elif (path / "ckpt.pt").exists():
            runs.append({**so_far(read_checkpoint(path / "ckpt.pt")), "place": str(path)})
        elif path.suffix not in (".png", ".svg", ".pdf", ".gif"):           # `out/*` names pictures, too
            args.left_out.append(f"{path} is not a run")
    args.left_out += [f"a run of {run['model']} is of the task {run['task']}" for run in runs
                      if task not in (None, run["task"])]
    runs = [run for run in runs if task in (None, run["task"])]
    if args.models:
        runs = [result for result in runs if result["model"] in args.models.split(",")]
    for result in runs:       # lines of a table omit the settings that have their default value
        result["config"] = {**asdict(Config()), **result["config"]}
        # recipe: the settings that all runs of a curve share
        result["recipe"] = {name: x for name, x in result["config"].items() if name not in MAY_DIFFER}
    for name in args.by.split(",") if runs else []:
        if name and not any(name in result["config"] for result in runs):
            raise ValueError(f"--by {name}: give settings of train.py, such as learning_rate")
    for result in runs:
        name = label(result, runs, ["beta_max", *args.by.split(",")])
        rows = [row for row in result[key] if fits(row)]
        if rows:
            labelled.append((name, {**result, key: rows}))
        else:
            args.left_out.append(f"{name}, seed {result['seed']}, has no {needs}")
    if not labelled:
        why = args.left_out[0] if args.left_out else f"there are no runs of {args.models or 'any model'} here"
        raise ValueError(f"nothing to draw: {why}")
    return labelled


def so_far(saved):
    """-> the result of a run that has not finished, from its checkpoint."""
    cfg, progress = saved["config"], saved["progress"]
    stages = parse_stages(TASKS[cfg["task"]].curriculum if cfg["curriculum"] == "auto" else cfg["curriculum"])
    return {**cfg, **progress, "config": cfg, "trained": str(stages[-1]), "eval": [],
            "reached": str(stages[min(len(progress["passed"]), len(stages) - 1)])}


def label(result, runs, names):
    """-> the name of a run's curve: its model, and each setting in `names`, unless all runs of this model have its
    default value. If the same run occurs twice, also its folder."""
    words = [result["model"]]
    same = [other for other in runs if other["model"] == result["model"]]
    for name in names:
        value, default = result["config"].get(name), getattr(Config, name, None)
        if value is None or all(other["config"].get(name) == value == default for other in same):
            continue                                        # None: without --by, the name is empty
        words.append(f"[{1 - value:g}, 1]" if name == "beta_max" else WORDS.get(value, f"{name} {value}"))
    seeds = [other["seed"] for other in same if other["recipe"] == result["recipe"]]
    if len(set(seeds)) < len(seeds):
        words.append(result["place"])
    return ", ".join(words).replace("$", r"\$")             # else matplotlib reads it as mathematics


def seeds_of(labelled):
    """[(label, result), ...] -> {label: [result of each seed, ...]}. Raises ValueError if the runs of a label differ in
    anything but their seed."""
    groups = defaultdict(list)
    for name, result in labelled:
        for other in groups[name]:
            one, two = result["recipe"], other["recipe"]
            differ = ",".join(key for key in {**one, **two} if one.get(key) != two.get(key))
            if differ:
                raise ValueError(f"{result['model']}: these runs differ in {differ}: add one or more of these to --by")
            if result["seed"] == other["seed"]:
                raise ValueError(f"{result['model']}: two runs have the seed {result['seed']}: give only one of them")
        groups[name].append(result)
    return groups


def with_seeds(name, results):
    return f"{name}, {len(results)} seed{'s' if len(results) > 1 else ''}"


def evaluations(args, task, needs="evaluation", fits=lambda stage: True):
    """-> [(label, result, stage, row), ...]: the evaluations of each run at stages for which fits(stage) holds."""
    rows = []
    runs = load_runs(args, "eval", needs, lambda row: fits(parse_stages(row["stage"])[0]), task)
    for name, results in seeds_of(runs).items():
        name = with_seeds(name, results)
        for result in results:
            rows += [(name, result, parse_stages(row["stage"])[0], row) for row in result["eval"]]
    return rows


def common(key, rows):
    """result[key] if it is the same in all of these (label, result, ...), else None."""
    values = {result[key] for _, result, *_ in rows} - {None}           # None: by_hand was never trained
    return values.pop() if len(values) == 1 else None


# ----------------------------------------------------------------------------------------------------------
# Figures

def colour_of(name):
    """The colour of the model that a label names first."""
    return COLOURS.get(name.split(",")[0], "C8")


def with_looks(curves):
    """Yield (look, label, curve) for each curve of {label: curve}. A look is the colour, the marker and the line style,
    as arguments of `plot`."""
    if len(curves) > len(STYLES):
        raise ValueError(f"{len(curves)} curves are too many: choose 1 to 5 with --models")
    for (marker, linestyle), (name, curve) in zip(STYLES, curves.items()):
        yield {"color": colour_of(name), "marker": marker, "linestyle": linestyle}, name, curve


def lines(axes, curves):
    """For each label, a thin line for each seed and a thick one for their median; the x axis is logarithmic.
    curves: {label: {seed: [(x, y), ...]}}."""
    last = max(x for seeds in curves.values() for points in seeds.values() for x, _ in points)
    for look, name, seeds in with_looks(curves):
        at = defaultdict(list)
        for points in seeds.values():
            axes.plot(*zip(*sorted(points)), **{**look, "marker": ""}, linewidth=0.8, alpha=0.5)
            for x, y in points:
                at[x].append(y)
        name += f", run up to {max(at)}" if max(at) < last else ""
        axes.plot(sorted(at), [np.median(at[x]) for x in sorted(at)], **look, linewidth=2.5, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def finish(axes, x_label, y_label, title, chance=None, trained=None):
    """Set the labels, and draw lines at chance and at the length of the stage `trained`."""
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    if chance:
        axes.axhline(chance, color="gray", linestyle=":", label="chance")
    if trained:
        axes.axvline(parse_stages(trained)[0].length, color="gray", label="trained up to here")


def with_legend(figure):
    """Draw one legend for all panels, below them. -> the figure."""
    named = {}
    for axes in figure.axes:
        named |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels())}
    names = [textwrap.fill(name, 40) for name in named]
    figure.legend(named.values(), names, loc="outside lower center", ncols=2)
    return figure


def has_passed_all(result):
    """Whether a run has passed its last stage. A curriculum may name a stage twice."""
    names = [row["stage"] for row in result["passed"]]
    return result["reached"] in names and len(names) >= len(result["config"]["curriculum"].split())


def curve(args):
    """Held-out accuracy during training, a line for each run. Each stage has a horizontal band of its own, in which
    accuracy goes from 0 to 100 %."""
    figure, axes = plt.subplots()
    runs, bands = load_runs(args, "held_out", "evaluation during training (see --eval-every)"), {}
    for _, result in sorted(runs, key=lambda run: -len(run[1]["passed"])):     # most stages first, in their order
        stages = [row["stage"] for row in result["passed"]] + [result["reached"]] * (not has_passed_all(result))
        result["stages"] = [stage + ", again" * stages[:i].count(stage) for i, stage in enumerate(stages)]
        bands |= dict.fromkeys(result["stages"])
    curves = seeds_of(runs)
    for i, (look, name, results) in enumerate(with_looks(curves)):
        if len(curves) > len({run["model"] for _, run in runs}):             # a model has several curves
            look["color"] = f"C{i}"
        name = with_seeds(name, results)
        for result in results:
            samples, _, accuracy = zip(*result["held_out"])
            # how many stages were passed before each test
            passed = np.searchsorted([row["samples"] for row in result["passed"]], samples)
            below = [list(bands).index([*result["stages"], result["stages"][-1]][number]) for number in passed]
            axes.plot(samples, np.add(below, accuracy), **look, label=name)
            name = None                                     # one label for all seeds
    axes.set_yticks(range(len(bands) + 1), [""] * (len(bands) + 1))
    axes.set_yticks(np.arange(len(bands)) + 0.5, bands, minor=True)
    finish(axes, "traces seen", "stage (up: longer traces)", "In each band: held-out accuracy, 0 to 100 %")
    return with_legend(figure)


def by_commands(axes, args, title):
    """Accuracy over the commands before a trace's only print: of the evaluated stages, those LxL."""
    curves = defaultdict(lambda: defaultdict(list))
    rows = evaluations(args, "repl", "evaluation at stage LxL",
                       lambda stage: stage.length == stage.spacing and not stage.kind)
    for name, result, stage, row in rows:
        curves[name][result["seed"]].append((stage.length, row["accuracy"]))
    lines(axes, curves)
    finish(axes, "commands before the only print", "accuracy (1 is perfect)", title, common("chance", rows))
    return with_legend(axes.figure)


def horizon(args):
    """Accuracy over the commands before a trace's only print."""
    return by_commands(plt.subplots(figsize=(7, 5.5))[1], args, args.title or "Accuracy at a trace's only print")


# The groups that one layer (of the Transformer: any number) can hold in theory. DeltaProduct is treated below.
HOLDS = {"ssm": ["Z2"], "rotary_ssm": ["Z2", "Z60"], "transformer": ["Z2", "Z60", "S3", "S4", "S4two"],
         **dict.fromkeys(["deltanet", "gated_deltanet", "kda"], ["Z2", "S5swaps"])}


def can_hold(result, group):
    """Whether a model of this shape can, in theory, track words of any length, as far as it is a model of the ladder.
    The sources are in assets/RESULTS.md, "The ladder"."""
    model, shape = result["model"], result["config"]
    if model != "transformer" and shape["n_layer"] > 1:
        return True                                         # the theory is about one layer
    if shape["beta_max"] < 2:
        return False                                        # no eigenvalue below 0
    if model == "deltaproduct" and shape["n_householder"] < 4:
        return group != "S5"
    return group in HOLDS.get(model, GROUPS)


def ladder(args):
    """Word problems: a row for each model, a column for each group. A cell shows the median accuracy at the first
    tested stage, normally the trained one."""
    cells = seeds_of(((name, result["config"]["group"]), result) for name, result in load_runs(args, task="group"))
    models = {name: runs[0] for (name, _), runs in cells.items()}
    chances = {group: runs[0]["chance"] for (_, group), runs in cells.items()}
    names, groups = list(models), [group for group in GROUPS if group in chances]
    figure, axes = plt.subplots(figsize=(7, 1.5 + len(names) / 2))
    shades = np.full((len(names), len(groups)), np.nan)
    for (i, name), (j, group) in itertools.product(enumerate(names), enumerate(groups)):
        words, color, runs = "not run", "gray", cells.get((name, group))
        if runs:
            shades[i, j] = np.median([result["eval"][0]["accuracy"] for result in runs])
            words, color = f"{shades[i, j]:.0%}" + (f"\n{len(runs)} seeds" if len(runs) > 1 else ""), "black"
        if not can_hold(models[name], group):
            axes.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="//", edgecolor="indianred", lw=0,
                                         zorder=2))
            words = words if runs else ""
        axes.text(j, i, words, ha="center", va="center", fontsize=9, color=color, zorder=3)
    axes.pcolormesh(np.arange(len(groups) + 1) - 0.5, np.arange(len(names) + 1) - 0.5, shades, vmin=0, vmax=1.6,
                    cmap="YlGn", edgecolors="white")
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xticks(range(len(groups)), [f"{group}\n({chances[group]:.0%})" for group in groups])
    axes.set_yticks(range(len(names)), names)
    length = max(parse_stages(result["trained"])[0].length for runs in cells.values() for result in runs)
    axes.set_xlabel("in brackets: chance; without a number of seeds: one seed\n"
                    "red stripes: in theory, this model cannot do it in long words", fontsize=9)
    figure.suptitle(f"{args.title or 'Which model learns which group?'}\nAccuracy in words of {length}")
    return figure


def nats(args):
    """Hidden branches: KL(exact || model) of the probabilities of an answer, over the length of traces."""
    figure, panels = plt.subplots(1, 2, figsize=(7, 5), sharey=True)
    figure.suptitle(f"{args.title or 'How far are models from the exact belief?'}\nThin: seeds; thick: their median",
                    fontsize=11)
    titles = {"": "Prints as in training", "forced": "A possible swap that never happens"}
    for axes, (kind, title) in zip(panels, titles.items()):
        rows = evaluations(args, "pfsa", f"evaluation at stage LxS:{kind}".strip(":"), lambda stage: stage.kind == kind)
        curves, uniform = defaultdict(lambda: defaultdict(list)), []
        for name, result, stage, row in rows:
            curves[name][result["seed"]].append((stage.length, row["kl"]))
            uniform.append((stage.length, -math.log(result["chance"]) - row["floor"]))
        lines(axes, curves)
        if common("chance", rows):
            x = sorted({x for x, _ in uniform})
            axes.plot(x, [np.median([y for other, y in uniform if other == at]) for at in x], "k:",
                      label="a uniform guess")
        axes.set_yscale("log")
        finish(axes, "lines of a trace", "", title, trained=common("trained", rows))
    panels[0].set_ylabel("KL from the exact probabilities,\nnats a print (0 is perfect)")
    return with_legend(figure)


def samples(args):
    """Programs until 95 % of the held-out answers are right: a panel for each task, a row for each label, and a marker
    for each run. A hollow marker shows where a run finished without reaching 95 %, and its accuracy there."""
    labelled = []
    for name, result in load_runs(args):
        [stage] = parse_stages(result["trained"])
        task = f"{WORDS.get(result['task'], result['task'])}, {stage.length} lines\n(chance {result['chance']:.0%})"
        labelled.append(((name, task), result))
    groups = seeds_of(labelled)
    names, tasks = (list(dict.fromkeys(words)) for words in zip(*groups))
    figure, [panels] = plt.subplots(1, len(tasks), figsize=(9, 1.5 + len(names) / 3), squeeze=False, sharey=True)
    for (name, task), runs in groups.items():
        axes, row, failed = panels[tasks.index(task)], names.index(name), []
        for result in runs:
            last = result["eval"][0]
            seen = [number for number, stage, right in result["held_out"]
                    if stage in (result["trained"], last["stage"]) and right >= 0.95]     # tests of the last stage
            if seen:
                axes.plot(seen[0], row, "o", color=colour_of(name))
            else:
                end = result["samples"]
                axes.plot(end, row, "o", color=colour_of(name), fillstyle="none")
                failed.append(f"{last['accuracy']:.0%}")
        if failed:
            axes.text(end, row, f"  {', '.join(failed)}", ha="left", va="center", fontsize=8)
        finish(axes, "fewer is better; hollow: not reached\n(and the accuracy at the end)", "", task)
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in panels:
        axes.set_xlim(right=6 * axes.get_xlim()[1])         # room for the text
    axes.set_yticks(range(len(names)), names)
    figure.suptitle(f"{args.title}\nPrograms until 95 % of the answers are right; each dot is a seed".strip())
    return figure


@torch.no_grad()
def swap(S, x, y, beta, steps=1):
    """S (6, n) after delta-rule steps with v = 0 that swap the rows x and y as well as this beta allows. At beta 2, one
    step is a reflection and swaps them. At beta 1, a step is a projection, which cannot change a sign. But a sequence
    of keys, each turned by pi / steps, carries the rows' difference through the empty last row to its negative, and
    keeps cos(pi / steps)^steps of it."""
    difference, empty = torch.zeros(2, 6)
    difference[x], difference[y], empty[-1] = 0.5 ** 0.5, -0.5 ** 0.5, 1
    angle = torch.arange(1, steps + 1)[:, None] * math.pi / steps if beta == 1 else torch.tensor([[math.pi / 2]])
    k = angle.cos() * empty - angle.sin() * difference                    # (steps, 6)
    k, v = k[None, :, None], torch.zeros(1, len(k), 1, S.shape[1])
    return delta_rule(k, k, v, torch.full(k.shape[:3], float(beta)), state=S[None, None])[1][0, 0]


def headline(args):
    """Above: what a memory holds while `swap` executes commands with beta 2 and with beta 1. Below: accuracy over
    the commands before a trace's only print."""
    figure = plt.figure(figsize=(7, 9))
    above, below = figure.subfigures(2, 1)
    commands = {"at first": [], "= c, b, a, d, e": [(0, 2)], "= b, e, d, c, a": [(0, 1), (1, 4), (2, 3)],
                "= e, d, c, b, a": [(0, 4), (1, 3)]}     # as swaps of rows
    titles = {2: "Eigenvalues in [-1, 1], beta 2: a reflection swaps two rows, and nothing fades",
              1: "Eigenvalues in [0, 1], beta 1: 20 or 21 projections also swap, but values fade"}
    for panel, (beta, title) in zip(above.subfigures(2, 1), titles.items()):
        panel.suptitle(title, fontsize=11)
        S = torch.eye(6, 5)                               # rows are variables, columns values; the last row is empty
        for axes, (command, pairs) in zip(panel.subplots(1, 4, sharey=True), commands.items()):
            for x, y in pairs:
                S = swap(S, x, y, beta, 21 // len(pairs))
            axes.imshow(S[:5].numpy(), vmin=0, vmax=1.4, cmap="Blues")
            axes.grid(False)
            axes.set_xticks(range(5), range(1, 6))
            axes.set_yticks(range(5), "abcde")
            axes.set_title(command, fontsize=10)
    by_commands(below.subplots(), args, f"{args.title or 'Which models learn to track?'}\nThin: seeds; thick: median")
    return figure


# ----------------------------------------------------------------------------------------------------------
# Inside one model

def load_repl(path, at, traces, kind=torch.nn.Module):
    """-> cfg, task, the stage `at` and the model of a run on repl whose mixers are all of the class `kind`."""
    if len(at.split()) > 1:
        raise ValueError(f"--at {at}: give a single stage, such as 128x16")
    cfg, task, _, model = load(path, device="cpu", eval_samples=traces)
    mixers = [block.mixer for block in model.blocks]
    if cfg.task != "repl" or cfg.states == "text" or not all(isinstance(mixer, kind) for mixer in mixers):
        raise ValueError(f"{path} is a run of {cfg.model} on {cfg.task}: give a run of repl without states in the "
                         "text and, for heads, with mixers that are delta rules")
    [stage] = parse_stages(at)
    task.check_stage(stage)
    return cfg, task, stage, model


SCALES = [1, 0.9, 0.8, 0.7, 0.6, 0.5]                       # factors on one head's betas; 0.5: no reflections


@torch.no_grad()
def measure_heads(args, traces=32):
    """-> for each head of a delta rule, named "layer.head": its betas, the principal components of its keys, and
    the model's accuracy if the betas of this head are multiplied by each of SCALES, which takes its eigenvalues
    from [-1, 1] to [0, 1]."""
    if len(args.paths) > 1:
        raise ValueError(f"heads looks into one model, not {len(args.paths)}: give one run")
    cfg, task, stage, model = load_repl(args.paths[0], args.at, traces, DeltaNet)
    batch = task.batch(cfg.seed, "test", stage, 0, traces)
    x = model.embed(torch.tensor(batch.tokens))
    whole, by_head = evaluate(model, task, stage, cfg)["accuracy"], {}
    for layer, block in enumerate(model.blocks, 1):
        mixer, beta = block.mixer, block.mixer.beta
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
            quantiles = betas[..., head].quantile(torch.linspace(0, 1, 21))
            keys_here = keys[:, :, head].flatten(0, 1)      # (B T, K)
            variance = torch.linalg.eigvalsh(keys_here.T.cov()).flip(0)
            variance = variance.cumsum(0) / variance.sum()
            by_head[f"{layer}.{head + 1}"] = {"accuracy": accuracy, "betas": quantiles.tolist(),
                                            "keys": variance.tolist()}
        mixer.beta = beta
        x, _ = block(x)
    return {"of": f"{args.paths[0]} at {stage}", "stage": str(stage), "trained": cfg.curriculum.split()[-1],
            "chance": task.chance(stage), "heads": by_head}


def heads(args):
    """The betas of each head (P1 Figs. 5, 11), the principal components of its keys (5, 12), and the accuracy if
    its betas are scaled down (6). The head that the model needs most is drawn in colour. The numbers are saved in
    a .jsonl file, from which the figure can be drawn again."""
    if args.paths[0].endswith(".jsonl"):
        measured = read_lines(args.paths[0], args.entry)[-1]                # if it has several lines, the last
    else:
        measured = measure_heads(args)
        Path(args.save).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{args.save}.jsonl").write_text(json.dumps(measured) + "\n")
    by_head = measured["heads"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    most = min(by_head, key=lambda name: by_head[name]["accuracy"][-1])
    for name, head in by_head.items():
        look = {"color": "silver"}
        if name == most:
            layer, number = name.split(".")
            look = {"color": "C0", "linewidth": 3, "zorder": 3, "label": f"layer {layer}, head {number}"}
        left.plot(np.linspace(0, 1, 21), head["betas"], **look)
        middle.plot(range(1, len(head["keys"]) + 1), head["keys"], **look)
        right.plot(SCALES, head["accuracy"], marker="o", **look)
    right.invert_xaxis()
    figure.suptitle(f"{args.title or f'Which head of {len(by_head)} tracks?'} In colour: the head that the model needs "
                    f"most, in traces of {measured['stage']} (trained up to {measured['trained']})")
    finish(left, "share of tokens", "beta, at most", "Betas of each head")
    finish(middle, "principal components", "cumulative share of variance", "Keys of each head")
    finish(right, "factor on the betas of one head", "accuracy on held-out traces",
           "Accuracy if its betas are scaled", measured["chance"])
    return with_legend(figure)


@torch.no_grad()
def movie(args, lines=40):
    """One or several models read the first lines of a held-out trace, one line a frame. For each model, shades
    show how probable it finds each value of each variable, and a ring marks the value that the variable holds in
    Python. The ring is red if the model finds another value more probable."""
    cfgs, tasks, stages, models = zip(*(load_repl(path, args.at, 1) for path in args.paths))
    task, n = tasks[0], tasks[0].n_vars
    if any(other.tokenizer.pieces != task.tokenizer.pieces or other.n_vars != n for other in tasks):
        raise ValueError("these models read different tokens: give runs with the same variables")
    trace = task.draw(random.Random(0), stages[0], "test")[:lines]
    one = task.tokenizer.ids[b"1"]                          # the ids of other digits follow
    figure, (left, *panels) = plt.subplots(1, 1 + len(models), figsize=(3 + 2.2 * len(models), 2.8),
                                           width_ratios=[1.3, *[1] * len(models)])
    figure.suptitle("Dark cells: what a model would print. Rings: what Python holds; red if the model is wrong",
                    fontsize=9)
    left.axis("off")
    text = left.text(0, 0, "", va="bottom", family="monospace", fontsize=min(8, 45 / n), in_layout=False)
    images = [axes.imshow(np.zeros((n, n)), vmin=0, vmax=1.4, cmap="Blues") for axes in panels]
    rings = [axes.scatter(range(n), range(n), s=(80 / n) ** 2, facecolors="none", linewidths=2) for axes in panels]
    for axes, cfg in zip(panels, cfgs):
        axes.set_title(f"{cfg.model}, eigenvalues in [{1 - cfg.beta_max:g}, 1]", fontsize=8)
        axes.set_xticks(range(n), range(1, n + 1))
        axes.set_yticks(range(n), task.names)
        axes.set_xlabel("value")
        axes.grid(False)
    Path(args.save).parent.mkdir(parents=True, exist_ok=True)
    writer, memory, states, read = PillowWriter(fps=2.5), {}, [None] * len(models), []
    with writer.saving(figure, args.save, 130):
        for _ in range(2):                                  # the second pass knows the labels of square panels
            figure.draw_without_rendering()
        figure.set_layout_engine("none")                    # so that the panels stay where they are now
        for line in trace:
            tokens = torch.tensor([task.encode([line])[0]])
            states = [model(tokens, state)[1] for model, state in zip(models, states)]
            run([line.source], memory)
            held = [memory[name] for name in task.names if name in memory]
            read.append(line.text)
            if len(held) < n:                               # no trace asks before all variables are set
                continue
            text.set_text("".join(read[-14:]).strip())
            for model, state, image, ring in zip(models, states, images, rings):
                if not line.source.startswith("print"):     # after a print, what it prints comes next
                    [chances] = beliefs(task, model, state)[:, :, one:one + n].numpy()
                    image.set_data(chances)
                    ring.set_offsets([(value - 1, row) for row, value in enumerate(held)])
                    ring.set_edgecolors(np.where(chances.argmax(1) + 1 == held, "black", "red"))
            writer.grab_frame()
        for _ in range(8):                                  # hold the last one
            writer.grab_frame()
    print(f"saved {args.save}")


# ----------------------------------------------------------------------------------------------------------
# The command line

COMMANDS = {f.__name__: f for f in [curve, horizon, heads, movie, headline, ladder, samples, nats]}
FIGURES = {  # those of README.md and assets/RESULTS.md: what they are drawn from, and what they show
    "headline": {"entry": "figure_4", "title": "Of these models, only DeltaNet in [-1, 1] tracks 16 commands and more"},
    "ladder": {"entry": "ladder", "by": "n_householder,n_layer",
               "title": "Dense blocks and an LSTM (in A5 and S5 with more steps) learn every group;\n"
                        "others learn what theory allows, or less"},
    "nats": {"entry": "belief", "models": "gated_deltanet,gru,lstm,m2rnn,transformer",
             "title": "On an adversary's traces (right), only GRU and LSTM stay near the exact belief"},
    "samples": {"entry": "forms", "by": "states",
                "title": "With the states in the text, all models learn; without, DeltaNet in [-1, 1] is first"},
    "horizon": {"entry": "horizon", "by": "cooldown",
                "title": "After a longer decay, models read further; rounded keys do not forget"},
    "heads": {"entry": "heads", "title": "One head of four tracks, and its betas are near 2."},
    "movie": {"paths": ["assets/deltanet-repl.pt", "assets/deltanet-repl-beta-1.pt"]},
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                  # an error is one line
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command")
    parser.add_argument("paths", nargs="*", help="folders of runs, or .jsonl files; heads and movie: also checkpoints")
    parser.add_argument("--at", default="128x16", help="stage of the traces that heads and movie read [128x16]")
    parser.add_argument("--entry", help="read only the lines of this entry of .jsonl files, such as ladder")
    parser.add_argument("--models", help="draw only these models, such as deltanet,lstm")
    parser.add_argument("--by", default="", help="settings that labels name, such as states,learning_rate")
    parser.add_argument("--save", help="file of the picture: .png, .svg or .pdf; for movie, .gif [out/COMMAND.png]")
    parser.add_argument("--all", action="store_true", help="draw all figures in assets/")
    parser.set_defaults(title="")                           # only the figures of this project claim a result
    args = parser.parse_args(argv)
    if args.all:
        for name in FIGURES:
            main([name, "--save", f"assets/{name}.{'gif' if name == 'movie' else 'png'}"])
        return
    if not args.paths and args.command in FIGURES:
        drawn_from = {"paths": ["assets/results.jsonl"], **FIGURES[args.command]}
        vars(args).update({name: x for name, x in drawn_from.items() if not getattr(args, name)})
    if not args.paths:
        parser.error("give a command, and folders of runs or .jsonl files")
    args.save = args.save or f"out/{args.command}.{'gif' if args.command == 'movie' else 'png'}"
    args.left_out = []
    try:
        with plt.rc_context(STYLE):
            figure = COMMANDS[args.command](args)
            for what in dict.fromkeys(args.left_out):
                print(f"plot.py: {what}, so it is left out", file=sys.stderr)
            if figure:
                Path(args.save).parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(args.save)
                print(f"saved {args.save}")
    except KeyError as error:
        parser.error(f"{args.command}: these results have no {error}, which the figure needs")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    matplotlib.use("Agg")                                   # write files, open no window
    main()
