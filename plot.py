"""
Figures from finished runs, one function each; and looks inside a trained model.

    python plot.py --all                                        every figure in assets/, in seconds
    python plot.py curve out/deltanet-repl*                     accuracy while training, of the default run
    python plot.py headline out/deltanet-repl* --at 128x16      left by_hand, right P1 Fig. 4, left
    python plot.py final out/deltanet-repl*                     at a trace's last answer (P1 Fig. 4, right)
    python plot.py spacing out/spacing/*                        read with sparser prints (P1 Fig. 3)
    python plot.py horizon assets/horizon.jsonl --by moves            read without prints
    python plot.py ladder assets/ladder.jsonl --by n_householder      a row per model, a column per group
    python plot.py samples assets/told.jsonl --by states        traces until 95 % are right (P2 Fig. 5)
    python plot.py nats out/*-pfsa*                             hidden branches: KL to the exact predictive
    python plot.py lengths traces.jsonl                         how long traces of functions are (P2 Fig. 1)
    python plot.py filters                                      where linear filters die (P1 Figs. 9 and 10)

    python plot.py heads out/deltanet-repl --at 512x4           which head tracks (P1 Figs. 5, 6, 11, 12)
    python plot.py automaton out/deltanet-repl --at 64x8        how often its steps are Python's

    cat out/ladder/*/result.json > assets/ladder.jsonl          a table of runs: each is one line of JSON

Runs that differ only in their seed are one curve: the median, in a band from the worst to the best. If they
differ in more, --by names the settings that tell them apart, as --by states,learning_rate. P1 is arXiv
2602.14814, P2 "Grounding Code Understanding in Step-by-Step Execution".
"""
import argparse
import json
import math
import random
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")                                       # write files, open no window
import matplotlib.pyplot as plt
import numpy as np
import torch

import pfsa
from data import GROUPS, Repl, parse_stages, run
from models import DeltaNet, by_hand
from train import ASIDE, Config, evaluate, load

plt.rcParams.update({"figure.figsize": (7, 4), "figure.constrained_layout.use": True, "savefig.dpi": 150,
                     "axes.grid": True, "grid.alpha": 0.3})
LOOKS = [                                                   # of five curves; they differ in grey, too
    {"color": "C0", "linestyle": "-", "marker": "o"},
    {"color": "C1", "linestyle": "--", "marker": "s"},
    {"color": "C2", "linestyle": "-.", "marker": "^"},
    {"color": "C3", "linestyle": ":", "marker": "v"},
    {"color": "black", "linestyle": "-", "marker": "D"},
]


# ----------------------------------------------------------------------------------------------------------
# Runs

def read_lines(path):
    """-> the JSON objects of a .jsonl file, or of a run's folder."""
    path = Path(path)
    try:
        rows = [json.loads(line) for line in open(path / "result.json" if path.is_dir() else path)]
    except (OSError, ValueError):
        rows = []
    if not rows:
        raise ValueError(f"{path}: give folders of finished runs, or .jsonl files")
    return rows


def load_runs(args):
    """-> [(label, result), ...] of the runs that the command line names."""
    runs = [result for path in args.paths for result in read_lines(path)]
    if args.models:
        runs = [result for result in runs if result["model"] in args.models.split(",")]
    if not runs:
        raise ValueError("no such runs in these files")
    for result in runs:       # tables leave out defaults: these are right as long as Config's do not change
        result["config"] = {**asdict(Config()), **result["config"]}
    return [(label(result, runs, ["beta_max", *args.by.split(",")]), result) for result in runs]


def label(result, runs, settings):
    """The model, and those of the settings in which its runs differ, or that are not at their default."""
    words = [result["model"]]
    kin = [other["config"] for other in runs if other["model"] == result["model"]]
    for name in settings:
        value = result["config"].get(name)                  # None: a setting of older runs
        if value is None or all(config.get(name) == value == getattr(Config, name, None) for config in kin):
            continue
        words.append(f"[{1 - value:g}, 1]" if name == "beta_max" else f"{name} {value}")
    return ", ".join(words)


def seeds_of(labelled):
    """[(label, result), ...] -> {label: [result of each seed, ...]}. ValueError if they differ in more."""
    groups = defaultdict(list)
    for name, result in labelled:
        for other in groups[name]:
            one, two = result["config"], other["config"]
            keys = [key for key in {**one, **two} if key not in ("seed", *ASIDE)]
            differ = ",".join(key for key in keys if one.get(key) != two.get(key))
            if differ:
                raise ValueError(f"{result['model']}: not one curve; use some of --by {differ}")
            if result["seed"] == other["seed"]:
                raise ValueError(f"{result['model']}: seed {result['seed']} is there twice; give it once")
        groups[name].append(result)
    return groups


def trained(result):
    """The last stage of a run's curriculum."""
    return parse_stages(result["trained"])[0]


def evaluations(args):
    """Yields label, result, stage and row, for each row of each run's evaluation."""
    for name, runs in seeds_of(load_runs(args)).items():
        name += f", {len(runs)} seed{'s' if len(runs) > 1 else ''}"
        if np.mean([result["reached"] == result["trained"] for result in runs]) < 0.5:
            name += f" (never got to {runs[0]['trained']})"
        for result in runs:
            for row in result["eval"]:
                yield name, result, parse_stages(row["stage"])[0], row


# ----------------------------------------------------------------------------------------------------------
# Drawing

def lines(axes, curves):
    """For each label, a line at the median over seeds, in a band from minimum to maximum; x is log.
    curves: {label: [(x, y of one seed), ...]}."""
    if not 0 < len(curves) <= len(LOOKS):
        raise ValueError(f"{len(curves)} curves: choose 1 to 5 by --models, and the stage by --at")
    for look, (name, points) in zip(LOOKS, curves.items()):
        x = sorted({x for x, _ in points})
        seeds = [np.percentile([y for other, y in points if other == at], [0, 50, 100]) for at in x]
        low, middle, high = np.transpose(seeds)
        axes.plot(x, middle, **look, label=name)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


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


def tiles(cells, x_label, title):
    """-> a coloured table. cells: {(row, column): (words, shade from 0 to 1)}; others are white."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells))
    figure, axes = plt.subplots(figsize=(9, 1 + len(rows) / 2))
    shades = np.full((len(rows), len(columns)), np.nan)
    for (row, column), (words, shade) in cells.items():
        i, j = rows.index(row), columns.index(column)
        shades[i, j] = shade
        axes.text(j, i, words, ha="center", va="center", fontsize=8)
    axes.imshow(shades, vmin=0, vmax=1.6, aspect="auto", cmap="YlGn")
    axes.grid(False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    return finish(axes, x_label, "", title)


# ----------------------------------------------------------------------------------------------------------
# Figures

def curve(args):
    """Held-out accuracy in the stage of that time, one line per seed; of the first five labels."""
    figure, axes = plt.subplots()
    for look, (name, runs) in zip(LOOKS, seeds_of(load_runs(args)).items()):
        for result in runs:
            samples, accuracy = ([row[i] for row in result["held_out"]] for i in (0, 2))
            axes.plot(samples, accuracy, **look, label=name)
            name = None                                     # one label for all seeds
    return finish(axes, "traces seen", "accuracy on held-out traces", "Learning to execute", result["chance"])


def spacing(args):
    """Accuracy at the trained length, over the commands from one print to the next (P1 Fig. 3)."""
    figure, axes = plt.subplots()
    curves = defaultdict(list)
    for name, result, stage, row in evaluations(args):
        last = trained(result)
        if (stage.length, stage.kind) == (last.length, last.kind):
            curves[name].append((stage.spacing, row["accuracy"]))
    lines(axes, curves)
    return finish(axes, f"commands from one print to the next, in test traces of {last.length}",
                  "accuracy on held-out traces", "How sparse may prints be?", result["chance"], last.spacing)


def horizon(args):
    """Accuracy over the commands before a trace's only print: of the evaluated stages, those LxL."""
    figure, axes = plt.subplots(figsize=(9, 4.5))
    curves = defaultdict(list)
    for name, result, stage, row in evaluations(args):
        if stage.length == stage.spacing:
            curves[name].append((stage.length, row["accuracy"]))
    lines(axes, curves)
    last = [trained(result).length for _, result in load_runs(args) if result["trained"]]   # not by_hand
    return finish(axes, "commands before the only print", "accuracy on held-out traces",
                  "Without a print, trained models forget", result["chance"], max(last, default=None))


def final(args):
    """Accuracy at the last answer of a trace over length and spacing (P1 Fig. 4, right): the median over
    seeds, in %."""
    found, cells = defaultdict(list), {}
    for name, result, stage, row in evaluations(args):
        found[f"{name}, a print every {stage.spacing}", stage.length].append(row["final"])
    for place, seeds in found.items():
        median = np.median(seeds)
        cells[place] = f"{100 * median:.0f}", median
    return tiles(cells, f"commands (trained at {result['trained']})",
                 f"Accuracy at the last print in %, chance {result['chance']:.0%}")


def ladder(args):
    """Word problems, a column per group. In a cell: accuracy in words of the trained length and of the next
    length tested, and [the last stage passed] if it is not the last one of training."""
    found = seeds_of(((name, result["config"]["group"]), result) for name, result in load_runs(args))
    groups, cells = list(GROUPS), {}
    for (name, group), runs in sorted(found.items(), key=lambda cell: groups.index(cell[0][1])):
        result = runs[0]
        by_seed = [[row["accuracy"] for row in result["eval"]] for result in runs]
        at, far, *_ = np.median(by_seed, 0).round(2)        # the trained length, and the next
        words = f"{at:.0%}, {far:.0%}"
        best = max((result["passed"] for result in runs), key=len)
        if not best or best[-1]["stage"] != result["trained"]:
            words += f"\n[{best[-1]['stage'] if best else '-'}]"
        shade = 0.15 + 0.4 * (int(at >= 0.95) + int(far >= 0.95))
        cells[name, f"{group}\nchance {result['chance']:.0%}"] = words, shade
    short, long = (row["stage"].replace("x1", "") for row in result["eval"][:2])
    legend = (f"accuracy in words of {short} elements (trained up to here), and of {long}\n"
              "dark: 95 % in both; middle: in the shorter words; pale: in neither; white: not run\n"
              "[8x1]: training passed words of 8, not of 16")
    return tiles(cells, legend, "Which model learns which group?")


def nats(args):
    """Hidden branches: KL from the exact predictive of an answer to the model's, over traces' length."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    titles = {"": "random prints", "forced": "a swap that may happen, and never does (P1 Fig. 10)"}
    for axes, (kind, title) in zip(panels, titles.items()):
        curves, uniform = defaultdict(list), {}
        for name, result, stage, row in evaluations(args):
            if stage.kind == kind:
                curves[name].append((stage.length, row["kl"]))
                uniform[stage.length] = -math.log(result["chance"]) - row["floor"]
        lines(axes, curves)
        axes.plot(uniform.keys(), uniform.values(), ":", color="gray", label="chance: a uniform guess")
        axes.set_yscale("log")
        finish(axes, "lines of a trace", "KL from the exact belief, nats per print", title,
               length=trained(result).length)
        axes.get_legend().remove()
    figure.suptitle("How far is a model from the exact belief? 0 is perfect")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def samples(args):
    """Traces until 95 % of the held-out answers were right: a panel per task, a row per label, a marker per
    run. Hollow: not reached; drawn where the run ended, with its accuracy there."""
    found = seeds_of(((name, f"{result['task']}, {trained(result).length} lines"), result)
                     for name, result in load_runs(args))
    names, tasks = (list(dict.fromkeys(words)) for words in zip(*found))
    figure, [panels] = plt.subplots(1, len(tasks), figsize=(11, 4.5), squeeze=False, sharey=True)
    for (name, task), runs in found.items():
        axes, row, failed = panels[tasks.index(task)], names.index(name), []
        for result in runs:
            last = result["eval"][0]
            seen = [samples for samples, stage, right in result["held_out"]
                    if stage in (result["trained"], last["stage"]) and right >= 0.95]
            if seen:
                axes.plot(seen[0], row, "C0o")
            else:
                end = result["samples"]
                axes.plot(end, row, "C0o", fillstyle="none")
                failed.append(f"{last['accuracy']:.0%}")
        if failed:
            axes.text(end, row, f"   {', '.join(failed)}", va="center", fontsize=8)
        finish(axes, "traces", "", f"{task} (chance {result['chance']:.0%})")
        axes.set_xscale("log", base=2)
        axes.margins(x=0.25)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks(range(len(names)), names)
    figure.suptitle("Traces until 95 % of the answers are right. A marker is a run. "
                    "Hollow: not reached, and the accuracy at its end")
    return figure


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
    H = pfsa.marginal_filter(3, [[pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)] * 1100])[0, ::2]
    scaled, ok = pfsa.sinkhorn(H)
    right.set_xscale("symlog")
    right.plot(H[:, 2, 2], label="marginal recurrence")
    right.plot(scaled[ok, 2, 2], "--", label=f"after Sinkhorn, which fails after {ok.sum()}")
    return finish(right, "times: maybe swap 2 and 3, print that 2 holds 2", "P(3 holds 3), exact: 1",
                  "P1 Figure 10")


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
        _, state = lm(torch.tensor([tokens]), state)
        [(_, S)] = state
        found.append(-S[0, 0, :task.n_vars, :task.n_vars].numpy())    # stored under -e_a
    return found


def headline(args):
    """Left: what the state of models.by_hand holds while it reads swaps, with beta 2 and with beta 1. Right:
    accuracy over the commands of a long trace: at each power of 2, the mean of answers since the power
    before (P1 Fig. 4, left)."""
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
    axes, curves = right.subplots(), defaultdict(list)
    for name, result, stage, row in evaluations(args):
        if stage == parse_stages(args.at)[0]:
            by_power = defaultdict(list)
            for i, accuracy in enumerate(row["by_answer"], 1):
                by_power[2 ** math.ceil(math.log2(i * stage.spacing))].append(accuracy)
            curves[name] += [(commands, np.mean(part)) for commands, part in by_power.items()]
    lines(axes, curves)
    finish(axes, f"commands so far in traces of {args.at}", "accuracy on held-out traces",
           "Which models keep track?", result["chance"], trained(result).length)
    return figure


# ----------------------------------------------------------------------------------------------------------
# Inside one model

def one_model(args, traces, kind=torch.nn.Module):
    """-> cfg, task, stage --at and model of the one run: repl, with mixers all of class `kind`."""
    if len(args.paths) > 1 or len(args.at.split()) > 1:
        raise ValueError("give one run, and one stage --at")
    cfg, task, [stage], model = load(args.paths[0], device="cpu", eval_at=args.at, eval_samples=traces)
    mixers = [block.mixer for block in model.blocks]
    if cfg.task != "repl" or task.states == "text" or not all(isinstance(mixer, kind) for mixer in mixers):
        raise ValueError("give a run of repl, without states in the text; for heads, with betas")
    return cfg, task, stage, model


SCALES = [1, 0.9, 0.8, 0.7, 0.6, 0.5]                       # factors on one head's betas; 0.5: no reflections


@torch.no_grad()
def measure_heads(args, traces=32):
    """Of each delta head, "layer.head": its betas, the principal components of its keys, and accuracy while
    its betas are scaled down: from eigenvalues in [-1, 1], step by step, to [0, 1]."""
    cfg, task, stage, model = one_model(args, traces, DeltaNet)
    batch = task.batch(cfg.seed, "test", stage, 0, traces)
    x = model.embed(torch.tensor(batch.tokens))
    whole, found = evaluate(model, task, stage, cfg)["accuracy"], {}
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
            shares = betas[..., head].quantile(torch.linspace(0, 1, 21))
            keys_here = keys[:, :, head].flatten(0, 1)
            variance = torch.linalg.svdvals(keys_here - keys_here.mean(0)).square()
            variance = variance.cumsum(0) / variance.sum()
            found[f"{layer}.{head + 1}"] = {"accuracy": accuracy, "betas": shares.tolist(),
                                            "keys": variance.tolist()}
        mixer.beta = beta
        x, _ = block(x)
    *_, last = parse_stages(task.curriculum if cfg.curriculum == "auto" else cfg.curriculum)
    return {"of": f"{args.paths[0]} at {stage}", "stage": str(stage), "trained": str(last),
            "chance": task.chance(stage), "heads": found}


def heads(args):
    """Betas (P1 Figs. 5, 11), principal components of keys (5, 12), accuracy while one head's betas are
    scaled down (6). In colour: the most needed head. The numbers are saved to a .jsonl, to redraw it."""
    if args.paths[0].endswith(".jsonl"):
        measured = read_lines(args.paths[0])[-1]            # if it has several lines, the last
    else:
        measured = measure_heads(args)
        Path(args.save).with_suffix(".jsonl").write_text(json.dumps(measured) + "\n")
    found = measured["heads"]
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
    figure.suptitle(f"Which head of {len(found)} tracks, in traces of {measured['stage']} (trained up to "
                    f"{measured['trained']})? In colour: the one that the model needs most")
    finish(left, "share of tokens", "beta, at most", "Betas of each head")
    finish(middle, "principal components", "share of variance", "Keys of each head")
    return finish(right, "factor on the betas of one head", "accuracy on held-out traces",
                  "Accuracy if its betas are scaled", measured["chance"])


@torch.no_grad()
def would_say(task, model, state, traces):
    """-> the values that a model would say in each trace if all variables were printed now."""
    said = []
    for name in task.names:
        question = torch.tensor([task.tokenizer.encode(f"{task.prompt}print('{name}', {name})\n{name} ")])
        hidden, _ = model(question.expand(traces, -1), state)
        said.append(model.head(hidden[:, -1]).argmax(-1) - ord("0"))
    return torch.stack(said, 1).tolist()


def execute(sources, memories, names):
    """Execute one line in each memory. -> what these variables then hold in each."""
    for source, memory in zip(sources, memories):
        run([source], memory)
    return [[memory.get(name) for name in names] for memory in memories]


@torch.no_grad()
def automaton(args, traces=256):
    """The automaton that a model behaves as. Its state after a command: what it would say if all variables
    were printed then. A step is right if Python turns the values that the model would say before the command
    into those that it would say after; a step from a wrong state can be right."""
    _, task, stage, model = one_model(args, traces)
    rng = random.Random(0)
    drawn = [task.draw(rng, stage, "test") for _ in range(traces)]
    tokens, _, ends = zip(*map(task.encode, drawn))         # lines are equally long in all traces
    tokens, memories, state, start = torch.tensor(tokens), [{} for _ in drawn], None, 0
    before, right, steps = None, [], []
    for number, end in enumerate(ends[0]):
        _, state = model(tokens[:, start:end + 1], state)
        start = end + 1
        sources = [trace[number].source for trace in drawn]
        held = execute(sources, memories, task.names)
        if ", " in sources[0] and " = " in sources[0]:      # a command
            said = would_say(task, model, state, traces)
            right += map(list.__eq__, said, held)
            if before:
                steps += map(list.__eq__, said, execute(sources, before, task.names))
            before = [dict(zip(task.names, values)) for values in said]
    astray = [step for step, was_right in zip(steps, right) if not was_right]
    for what, found in [("commands end in the right state", right), ("steps are right", steps),
                        ("steps from a wrong state are right", astray)]:
        if found:
            print(f"{np.mean(found):.2%} of {len(found):,} {what}")


# ----------------------------------------------------------------------------------------------------------
# The command line

COMMANDS = {f.__name__: f for f in [curve, headline, final, spacing, horizon, ladder, samples, nats, lengths,
                                    filters, heads, automaton]}
ALL = {  # the figures of README.md and assets/RESULTS.md
    "headline": "assets/contrast.jsonl --at 512x8 --models deltanet,deltaproduct",
    "final": "assets/final.jsonl",
    "spacing": "assets/spacing.jsonl",
    "ladder": "assets/ladder.jsonl --by n_householder,n_layer",
    "nats": "assets/belief.jsonl --models deltanet,gru,m2rnn,transformer",
    "samples": "assets/told.jsonl --by states",
    "lengths": "assets/lengths.jsonl",
    "horizon": "assets/horizon.jsonl --by moves",
    "heads": "assets/heads.jsonl",
    "filters": "",
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                  # an error is one line
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command")
    parser.add_argument("paths", nargs="*", help="folders of finished runs, or .jsonl files")
    parser.add_argument("--at", default="128x16", help="the stage, if a command has one [128x16]")
    parser.add_argument("--models", help="only these, as deltanet,lstm")
    parser.add_argument("--by", default="", help="settings that labels name, as states,learning_rate")
    parser.add_argument("--save", help="the picture: .png, .svg, .pdf [out/COMMAND.png]")
    parser.add_argument("--all", action="store_true", help="draw every figure in assets/ from its table")
    args = parser.parse_args(argv)
    if args.all:
        for name, words in ALL.items():
            main([name, *words.split(), "--save", f"assets/{name}.png"])
        return
    if not args.command or not args.paths and args.command != "filters":
        parser.error("give a command, and folders of runs or .jsonl files")
    args.save = args.save or f"out/{args.command}.png"
    try:
        Path(args.save).parent.mkdir(parents=True, exist_ok=True)
        figure = COMMANDS[args.command](args)
        if figure:
            figure.savefig(args.save)
            print(f"saved {args.save}")
    except KeyError as error:
        parser.error(f"{args.command}: there is no {error} in these files")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
