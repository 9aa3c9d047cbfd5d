"""
The figures, one function each, from the files that runs leave behind.

    python plot.py curve out/deltanet-repl*                    reveal accuracy while training
    python plot.py positions out/deltanet-repl* --at 128x16    accuracy at each reveal of a trace (P1 Fig. 4)
    python plot.py final out/deltanet-repl*                    at the last, by length and spacing (the same)
    python plot.py scores out/deltanet-repl*                   a row a model, a column an evaluated stage
    python plot.py ladder out/ladder/*                         a row a model, a column a group
    python plot.py spacing out/spacing/*                       accuracy by how sparse reveals are (P1 Fig. 3)
    python plot.py drift out/deltanet-repl --at 512x512        why a model loses track, suspect by suspect
    python plot.py heads out/deltanet-repl --at 512x4          which head tracks (P1 Figs. 5, 6, 11, 12)
    python plot.py automaton out/deltanet-repl --at 64x8       is it the group? prints, draws nothing
    python plot.py nats out/deltanet-pfsa*                     hidden branches: KL to the exact odds
    python plot.py filters                                     where linear filters die (P1 Figs. 9 and 10)
    python plot.py samples out/transformer-parity*             traces until all is right (P2 Fig. 5)
    python plot.py budget out/transformer-arith*               accuracy after all traces (P2 Fig. 7)
    python plot.py lengths traces.jsonl                        how long traces of functions are (P2 Fig. 1)
    python plot.py table out/deltanet-repl*                    the numbers, as CSV

    python plot.py --all                                       the README's figures again, from assets/*.csv

Runs that differ only in their seed become one line, the median, in a band from the worst to the best. With
--best learning_rate (any setting), only its best value is kept of runs that are otherwise alike. Instead of
folders of runs, give a CSV that `table` has made of them; what `drift` and `lengths` measure is a CSV, too,
if --save says so. A figure of another kind is ten more lines: read what you need into {label: [(x, y) of each
seed, ...]}, call `lines`.

P1 is arXiv 2602.14814. Not here: training.
"""
import csv
import json
import math
import re
import shlex
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

import pfsa
from data import Arith, Group, Parser, Stage, UserError, one_of, parse_stages, read_traces, start
from models import DeltaNet, GatedDeltaNet
from train import BESIDE_THE_POINT, Config, evaluate, flag, load_model, parse, read, stage_of

plt.rcParams.update({
    "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False,
    "axes.prop_cycle": plt.cycler(                                        # lines differ in grey, too
        color=[*plt.get_cmap("tab10").colors, "black", "gray"], linestyle=["-", "--", "-.", ":"] * 3,
        marker=list("os^vDPX*<>hd"))})


def lines(curves, x_label, y_label, title, chance=None, axes=None):
    """-> a figure with one line and band per label. curves: {label: [(x, y), ...]}, a pair of 1-d arrays per
    seed. All seeds are drawn over the x of the longest, each keeping its last y after its end. Give axes to
    draw into a figure that is there."""
    many = len(curves) > 5
    if axes is None:
        _, axes = plt.subplots(figsize=(10 if many else 7, 4))
    for label, seeds in curves.items():
        x = max((x for x, _ in seeds), key=lambda x: x[-1])
        y = np.array([np.interp(x, *seed) for seed in seeds])             # (seeds, points)
        [line] = axes.plot(x, np.median(y, 0), markevery=0.1,
                           label=f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})")
        axes.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    if chance is not None:
        axes.axhline(chance, color="gray", linestyle=":", linewidth=1)
        axes.text(1, chance, "chance", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.legend(**({"loc": "center left", "bbox_to_anchor": (1, 0.5)} if many else {}))
    return axes.figure


def tiles(axes, cells, rows, columns):
    """Draw a table of accuracies, coloured. cells: {(row, column): [one per seed]} -> median, range below."""
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            seeds = 100 * np.array(cells.get((row, column), []))
            if len(seeds):
                words = f"{np.median(seeds):.0f}"
                if seeds.max() - seeds.min() >= 1:
                    words += f"\n{seeds.min():.0f} to {seeds.max():.0f}"
                color = "black" if np.median(seeds) > 60 else "white"
                axes.text(j, i, words, ha="center", va="center", fontsize=8, color=color)
    middle = [[np.median(cells.get((row, column), np.nan)) for column in columns] for row in rows]
    axes.imshow(middle, vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def load(paths, best, over=()):
    """-> {label: [(result, path), ...]}: the finished runs of folders and of CSVs made by `table`, grouped by
    all settings but the seed and those in `over`, labelled by those that are not what most runs have. Of runs
    that otherwise differ in the setting `best` only, those are kept whose value gave the first seed the
    highest mean accuracy over all that was evaluated, or, of hidden branches, the lowest mean KL at prints of
    the kind that was trained."""
    runs = []
    for path in map(Path, paths):
        runs += from_table(path) if path.suffix == ".csv" else [from_folder(path)]
    aside = ("seed", *BESIDE_THE_POINT, best, *over)
    configs = [{k: v for k, v in result["config"].items() if k not in aside} for result, _ in runs]
    if best and best not in runs[0][0]["config"]:
        raise UserError(f"--best {best}: no setting of these runs; choose one of " + ", ".join(configs[0]))
    groups = {}
    for run, config in zip(runs, configs):
        rare = [k for k in config if k != "model"
                and 2 * sum(c.get(k) == config[k] for c in configs) <= len(configs)]
        label = ", ".join([config["model"], *(f"{k} {config[k]}" for k in rare)])
        groups.setdefault(label, []).append(run)
    return {label: best_of(runs, best) if best else runs for label, runs in groups.items()}


def from_folder(folder):
    """-> (what train.py left of a run, its folder)."""
    try:
        result = json.loads((folder / "result.json").read_text())
        return {**result, "best": best_held_out(folder), "to_98": samples_to(0.98, folder)}, folder
    except (OSError, ValueError):
        raise UserError(f"{folder} holds no result.json: give folders of runs that train.py has finished")


def from_table(path):
    """-> [(result, path), ...], one of each run in a CSV of `table`."""
    runs = {}
    for row in read_csv(path, "command"):
        [config], _, _ = parse(shlex.split(row["command"]))
        stage = Stage(int(row["commands"]), int(row["spacing"]), row["kind"])
        cost = {k: float(row[k]) if row[k] else None for k in COST}
        result = runs.setdefault(row["command"], {"config": asdict(config), "seed": config.seed, **cost,
                                                  "eval": [], "to_98": {}})
        score = {k: float(row[k]) for k in SCORE + NATS if row.get(k)}
        by_reveal = [float(x) for x in row["by_reveal"].split()]
        result["eval"].append({**stage._asdict(), **score, "by_reveal": by_reveal})
        if row["to_98"]:
            result["to_98"][stage[:2]] = int(row["to_98"])
    return [(result, path) for result in runs.values()]


def read_csv(path, column):
    """-> the rows of a CSV that has such a column, as dicts of strings."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})")
    if not rows or column not in rows[0]:
        raise UserError(f"{path} has no column {column}: give a CSV that plot.py has made for this figure")
    return rows


def best_of(runs, best):
    """Of runs alike but for the seed and the setting `best`, those with its best value (of two as good, that
    with more runs)."""
    by_value = {}
    for run in runs:
        by_value.setdefault(run[0]["config"][best], []).append(run)

    def score(runs):
        first = min((result for result, _ in runs), key=lambda result: result["seed"])
        rows = [row for row in first["eval"] if row["kind"] == first["eval"][0]["kind"]]
        mean = np.mean([-row["kl"] if "kl" in row else row["reveal_acc"] for row in rows])
        return round(mean, 3), len(runs)
    return max(by_value.values(), key=score)


def curve(groups, at, window=10):
    """Reveal accuracy of training batches, mean of `window`, over traces seen."""
    curves = {}
    for label, runs in groups.items():
        if not all(folder.is_dir() for _, folder in runs):
            raise UserError("curve: give folders of runs; a CSV does not hold what happened while training")
        curves[label] = [smooth(metrics(folder), window) for _, folder in runs]
    return lines(curves, "traces seen", f"reveal accuracy, mean of {window} batches", "Learning to execute",
                 chance_of(groups))


def metrics(folder):
    """-> the rows of a run's metrics.csv, one a training step."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def smooth(rows, window=10):
    """Rows of metrics.csv -> traces seen, and reveal accuracy, the mean of `window` batches."""
    x, y = (np.array([float(row[k]) for row in rows]) for k in ("samples", "reveal_acc"))
    n = min(window, len(rows))
    return x[n - 1:], np.convolve(y, np.ones(n) / n, "valid")


def positions(groups, at):
    """Held-out accuracy at the first, second, ... reveal of a trace (P1 Fig. 4, left)."""
    curves = {}
    for label, runs in groups.items():
        for result, folder in runs:
            found = {str(stage_of(row)): row["by_reveal"] for row in result["eval"] if row["by_reveal"]}
            if not found:
                raise UserError(f"{folder} does not say what each reveal was: give the folders of its runs")
            one_of(f"--at, in {folder}:", at, found)
            y = np.array(found[at])
            curves.setdefault(label, []).append((np.arange(1, len(y) + 1), y))
    curves = dict(sorted(curves.items(), key=lambda item: -np.mean([y for _, y in item[1]])))
    commands, spacing = at.partition(":")[0].split("x")
    return lines(curves, f"reveal (one after every {spacing} commands)", "accuracy on held-out traces",
                 f"Tracking through {commands} commands", chance_of(groups))


def scores(groups, at):
    """Reveal accuracy at every evaluated stage, a row per model: the comparison as one picture."""
    cells = {}
    for label, runs in groups.items():
        for result, _ in runs:
            for row in result["eval"]:
                cells.setdefault((label, str(stage_of(row))), []).append(row["reveal_acc"])
    title = "Reveal accuracy in %, median and range over seeds" + chance_in_words(groups)
    return models_by(cells, list(dict.fromkeys(column for _, column in cells)), "commands x spacing", title)


def ladder(groups, at):
    """Word problems: accuracy at the longest words that were evaluated, a row per model, a column per group,
    easiest first."""
    cells, chance, lengths = {}, {}, set()
    for label, runs in groups.items():
        for result, _ in runs:
            if result["config"]["task"] != "group":
                raise UserError("ladder: give runs of --task group")
            group, last = result["config"]["group"], max(result["eval"], key=lambda row: row["commands"])
            lengths.add(last["commands"])
            chance[group] = Group(group).chance
            cells.setdefault((label, f"{group}\n({chance[group]:.1%})"), []).append(last["reveal_acc"])
    above = {}                                                            # shares of what chance leaves
    for (_, column), seeds in cells.items():
        floor = chance[column.partition("\n")[0]]
        above[column] = above.get(column, 0) + (np.median(seeds) - floor) / (1 - floor)
    return models_by(cells, sorted(above, key=above.get, reverse=True), "group (and chance)",
                     f"Words of {max(lengths)}: accuracy in %, median and range over seeds")


def models_by(cells, columns, x_label, title):
    """-> `tiles` as a figure, best rows first."""
    rows = sorted(dict.fromkeys(row for row, _ in cells),
                  key=lambda row: -sum(np.median(cells.get((row, c), 0)) for c in columns))
    size = 4 + 0.8 * len(columns), 1 + 0.45 * len(rows)
    figure, axes = plt.subplots(figsize=size)
    tiles(axes, cells, rows, columns)
    axes.set(xlabel=x_label, ylabel="model", title=title)
    return figure


def spacing(groups, at):
    """Accuracy where a model was trained, at the last stage of its curriculum, over the commands between two
    reveals there (P1 Fig. 3, from scratch)."""
    curves = {}
    for label, runs in groups.items():
        seeds = {}
        for result, path in runs:
            last = result["config"]["curriculum"].split()[-1]
            row = {str(stage_of(row)): row for row in result["eval"]}.get(last)
            if not row:
                raise UserError(f"spacing: {path} was not evaluated where it was trained, at {last}")
            seeds.setdefault(result["seed"], []).append((row["spacing"], row["reveal_acc"]))
        curves[label] = [tuple(np.array(sorted(found)).T) for found in seeds.values()]
    figure = lines(curves, "commands from one reveal to the next, in training and test",
                   "accuracy on held-out traces", "How sparse may reveals be?", chance_of(groups))
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].xaxis.set_major_formatter("{x:g}")
    return figure


def final(groups, at):
    """Accuracy at the last reveal over length and spacing, a panel per model (P1 Fig. 4, right)."""
    size = 1 + 3.2 * len(groups), 3.2
    figure, [panels] = plt.subplots(1, len(groups), figsize=size, squeeze=False)
    for axes, (label, runs) in zip(panels, groups.items()):
        cells = {}
        for result, _ in runs:
            for row in result["eval"]:
                cells.setdefault((row["spacing"], row["commands"]), []).append(row["final_acc"])
        spacings, lengths = (sorted(set(sizes)) for sizes in zip(*cells))
        tiles(axes, cells, spacings, lengths)
        axes.set(xlabel="commands", ylabel="spacing", title=label)
    figure.suptitle("Accuracy at the last reveal, %" + chance_in_words(groups))
    return figure


def nats(groups, at):
    """Hidden branches: KL from the exact odds of an answer to the model's, over the length of traces, a panel
    per kind of prints. Chance is who finds all values of an answer equally likely."""
    kinds, blind = {}, {}                                                 # {kind: {label: [(x, y), ...]}}
    for label, runs in groups.items():
        for result, folder in runs:
            if "kl" not in result["eval"][0]:
                raise UserError(f"{folder} has no KL: give runs of --task pfsa")
            for kind in dict.fromkeys(row["kind"] for row in result["eval"]):
                found = sorted((row["commands"], row["kl"]) for row in result["eval"] if row["kind"] == kind)
                kinds.setdefault(kind, {}).setdefault(label, []).append(tuple(np.array(found).T))
                floor = np.mean([row["floor"] for row in result["eval"] if row["kind"] == kind])
                blind[kind] = np.log(result["config"]["n_vars"]) - floor
    figure, [panels] = plt.subplots(1, len(kinds), figsize=(2 + 5 * len(kinds), 4),
                                    sharey=True, squeeze=False)
    for axes, (kind, curves) in zip(panels, kinds.items()):
        lines(curves, "lines of code", "KL to the exact odds, nats an answer", f"prints: {kind or 'random'}",
              blind[kind], axes)
        axes.set(xscale="log", yscale="log")
        lengths = sorted({x for seeds in curves.values() for xs, _ in seeds for x in xs.astype(int).tolist()})
        axes.set_xticks(lengths, lengths)
        axes.minorticks_off()
    for axes in panels[:-1]:
        axes.get_legend().remove()
    return figure


def by_length(runs, value):
    """Runs -> lengths of their last stages, ascending; for each of these value(result) of its runs."""
    found = {}
    for result, _ in runs:
        length = re.match(r"\d+", result["config"]["curriculum"].split()[-1])
        if not length:
            raise UserError("samples, budget: give runs of programs whose --curriculum says how long")
        found.setdefault(int(length[0]), []).append(value(result))
    return zip(*sorted(found.items()))


def taught(config):
    """How a run learned, and a line style for it."""
    if config["state_weight"]:
        head = "" if config["state_head"] == "auto" else f"{config['state_head']}, "
        return f"states ({head}weight {config['state_weight']:g})", "-"
    return ("curriculum", "--") if config["sample_length"] else ("next token", ":")


def samples(groups, at):
    """Traces until held-out programs were all right, twice (train.py --until), over their length (P2 Fig. 5).
    Median and range of the seeds; hollow: most seeds saw so many traces and were not there."""
    figure, axes = plt.subplots(figsize=(9, 4))
    looks, free = {}, iter(plt.rcParams["axes.prop_cycle"])
    for i, (label, runs) in enumerate(groups.items()):
        lengths, seen = by_length(runs, lambda r: (r["until"] or r["samples"], r["until"] is None))
        x = np.array(lengths) * 1.015 ** (i - len(groups) / 2)            # side by side
        y = [np.median([traces for traces, _ in seeds]) for seeds in seen]
        model = re.sub(r", (sample_length|state_weight|state_head) [^,]+", "", label)
        how, style = taught(runs[0][0]["config"])
        look = {**(looks.get(model) or looks.setdefault(model, next(free))), "linestyle": style}
        axes.plot(x, y, **look, linewidth=1, label=f"{model}: {how}")
        for x, y, seeds in zip(x, y, seen):
            if np.mean([failed for _, failed in seeds]) > 0.5:
                axes.plot(x, y, **look, markerfacecolor="white")
            axes.vlines(x, *np.percentile([traces for traces, _ in seeds], [0, 100]), color=look["color"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(yscale="log", xlabel="lines of a program", ylabel="training traces until all is right",
             title="Samples to perfect (hollow: not reached)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def budget(groups, at):
    """Held-out accuracy of arith after training, over the lines of a program, a panel per number of digits
    (P2 Fig. 7); beside it, what always giving the commonest answer is worth."""
    curves = {}
    for label, runs in groups.items():
        for digits in sorted({result["config"]["digits"] for result, _ in runs}):
            of_digits = [run for run in runs if run[0]["config"]["digits"] == digits]
            lengths, right = by_length(of_digits, lambda result: result["eval"][0]["reveal_acc"])
            seeds = zip(*right)
            curves.setdefault(digits, {})[label] = [(np.array(lengths), np.array(y)) for y in seeds]
    figure, [panels] = plt.subplots(1, len(curves), figsize=(2 + 4 * len(curves), 4),
                                    sharey=True, squeeze=False)
    for axes, (digits, of_digits) in zip(panels, sorted(curves.items())):
        lines(of_digits, "lines of a program", "accuracy on held-out programs", f"{digits} digits", axes=axes)
        x = max((x for seeds in of_digits.values() for x, _ in seeds), key=len)
        axes.plot(x, [Arith(digits).commonest(L) for L in x.tolist()], "k:", label="always the commonest")
        axes.legend()
    return figure


def by_panel(rows):
    """Rows {"panel", "line", "x", "y"}, as of a CSV -> {panel: {line: (x, y)}}, lists of numbers."""
    panels = {}
    for row in rows:
        x, y = panels.setdefault(row["panel"], {}).setdefault(row["line"], ([], []))
        x.append(float(row["x"]))
        y.append(float(row["y"]))
    return panels


def measure_lengths(files, at):
    """Files of traces -> rows {"panel": a file, "line", "x": steps, "y": how many traces have so many}."""
    rows = []
    for file in files:
        traces = read_traces(file)
        functions = len({row["source"] for row in traces})
        panel = f"{Path(file).stem}: {len(traces):,} traces of {functions:,} functions"
        steps = np.bincount([row["steps"] for row in traces])
        rows += [{"panel": panel, "line": "traces", "x": x, "y": y} for x, y in enumerate(steps.tolist())]
    return rows


def lengths(rows):
    """How many traces have how many steps, for each file of traces (P2 Fig. 1)."""
    files = by_panel(rows)
    figure, [panels] = plt.subplots(1, len(files), figsize=(5 * len(files), 3.5), squeeze=False)
    for axes, (name, curves) in zip(panels, files.items()):
        x, y = curves["traces"]
        axes.bar(x, y, width=1, label="traces")
        middle = x[np.searchsorted(np.cumsum(y), sum(y) / 2)]
        axes.axvline(middle, color="black", linestyle=":", label=f"median, {middle:.0f}")
        axes.set(xlabel="steps of a trace", ylabel="number of traces", title=name)
        axes.legend()
    return figure


def filters():
    """Left, P1 Fig. 9: the mass of a linear filter over reveals of probability 1/2, in four dtypes. Right, P1
    Fig. 10: an entry of the marginal recurrence, what Sinkhorn makes of it, and the truth. Needs no runs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    reveals, forced = np.arange(1101), [pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)] * 1100
    for dtype, mark in zip((torch.float16, torch.bfloat16, torch.float32, torch.float64), "os^D"):
        mass = pfsa.linear_filter(pfsa.figure_9(), [[0, 1] * 1100], dtype)[0, ::2].double().sum(1).numpy()
        alive = (mass > 0).sum()
        left.loglog(reveals[1:alive], mass[1:alive], "-", color="gray", linewidth=1, marker="")
        left.plot(alive - 1, mass[alive - 1], mark, label=f"{str(dtype)[6:]}: 0 after {alive}")
    left.set(xlabel="reveals of probability 1/2", ylabel="mass of the linear filter (exact one: 1)",
             title="P1 Figure 9")
    H = pfsa.marginal_filter(3, [forced])[0, ::2]
    truth = pfsa.marginals(pfsa.maybe_swaps(3).filter([forced])[0][0, ::2], 3)
    scaled, ok = pfsa.sinkhorn(H)
    right.plot(reveals, truth[:, 2, 2], color="lightgray", linewidth=5, marker="", label="exact")
    right.plot(reveals, H[:, 2, 2], markevery=0.1, label="in the marginal recurrence")
    right.plot(reveals[ok], scaled[ok, 2, 2], markevery=0.1,
               label=f"after Sinkhorn, until it is lost, after {ok.sum()}")
    right.set(xlabel="times: maybe swap 2 and 3, reveal 2 at 2", ylabel="P(3 holds 3)", xscale="symlog",
              title="P1 Figure 10")
    for axes in (left, right):
        axes.legend()
    return figure


def chance_of(groups):
    """1 / n_vars where all runs are REPL traces with as many variables, else None."""
    configs = [result["config"] for runs in groups.values() for result, _ in runs]
    n_vars = {c["n_vars"] if c["task"] == "repl" else None for c in configs}
    return 1 / n_vars.pop() if len(n_vars) == 1 and None not in n_vars else None


def chance_in_words(groups):
    return f"; chance {chance_of(groups):.0%}" if chance_of(groups) else ""


COST = ["params", "samples", "seconds", "until", "best"]
SCORE, NATS = ["reveal_acc", "final_acc"], ["kl", "final_kl", "loss", "floor"]


def table(groups, path):
    """Write a CSV with a line per run and evaluated stage: what `load` needs to draw the run again, and the
    settings that train.py needs to train it again. by_reveal is left out where there are more than 16."""
    runs = [result for runs in groups.values() for result, _ in runs]
    nats = NATS if any("kl" in row for result in runs for row in result["eval"]) else []
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*COST, *Stage._fields, *SCORE, *nats, "to_98", "by_reveal", "command"])
        for result in runs:
            words = [word for name, value in result["config"].items()
                     if name not in BESIDE_THE_POINT and value != getattr(Config, name)
                     for word in (flag(name), f"{value:g}" if type(value) is float else str(value))]
            cost = [x if x is None else f"{x:.7g}" for x in (result[k] for k in COST)]
            for row in result["eval"]:
                score = [round(row[k], 5) if k in row else None for k in SCORE + nats]
                reveals = row["by_reveal"] if len(row["by_reveal"]) <= 16 else []
                rows.writerow([*cost, *stage_of(row), *score, result["to_98"].get(stage_of(row)[:2]),
                               " ".join(f"{x:.4g}" for x in reveals), shlex.join(words)])


def best_held_out(folder):
    """The highest accuracy on held-out traces while training, at whatever stage, None if none was read."""
    found = [float(row["held_out_acc"]) for row in metrics(folder) if row.get("held_out_acc")]
    return max(found, default=None)


def samples_to(accuracy, folder):
    """-> {(commands, spacing): traces, of all kinds, until ten batches of this stage were as right}, for the
    stages where that happened."""
    reached = {}
    rows = metrics(folder)
    for stage, of_stage in groupby(rows, key=lambda row: (int(row["commands"]), int(row["spacing"]))):
        of_stage = list(of_stage)
        x, y = smooth(of_stage)
        if len(of_stage) >= 10 and y.max() >= accuracy:
            reached.setdefault(stage, int(x[y >= accuracy][0]))
    return reached


# ----------------------------------------------------------------------------------------------------------
# Why a linear RNN loses track
#
# Take a trace and relabel its digits cyclically: n traces with the same commands. What their states share is
# noise, whatever the commands wrote; what differs is signal, all that is known of the values. A delta rule's
# state is affine in what it was, so this split is exact in the first layer.

def relabelled(batch, n):
    """n relabelings of each of B traces -> tokens (n*B, T) and state (n*B, T, n), of a trace B rows apart."""
    digit, known = batch.tokens - ord("1"), batch.state >= 0
    is_digit = (digit >= 0) & (digit < n)
    tokens = [torch.where(is_digit, ord("1") + (digit + i) % n, batch.tokens) for i in range(n)]
    state = [torch.where(known, (batch.state + i) % n, batch.state) for i in range(n)]
    return torch.cat(tokens), torch.cat(state)


def split(S, n):
    """S (n*B, ...) of relabelled traces -> noise and signal, same shape; S is their sum."""
    noise = S.unflatten(0, (n, -1)).mean(0).repeat(n, *[1] * (S.dim() - 1))
    return noise, S - noise


def score_all(model, task, state, truth):
    """Accuracy of the answers to print('a', a), print('b', b), ..., each asked of a copy of the state."""
    names = "abcdefghi"[:task.n_vars]
    asked = torch.tensor([task.tokenizer.encode(f">>> print('{x}', {x})\n{x} ") for x in names])
    copies = [tuple(x.repeat_interleave(len(names), 0) for x in parts) for parts in state]
    hidden, _ = model(asked.repeat(len(truth), 1), copies)
    guess = model.head(hidden[:, -1]).argmax(-1) - ord("1")
    return (guess.view(truth.shape) == truth).double().mean().item()


def linear_readout(signals, truth, n):
    """Accuracy of the best linear guess of the values from the signal (ridge regression, on 3/4 of them).
    High where the model is wrong: the values are there, but not where it looks."""
    x = torch.cat([signal.flatten(1) for signal in signals], 1)
    fit = torch.arange(len(x)) % (len(x) // n) < len(x) // n * 3 // 4     # all of a trace, or none
    gram = x[fit] @ x[fit].T
    ridge = 0.1 * gram.diagonal().mean() * torch.eye(len(gram))
    targets = F.one_hot(truth[fit], n).flatten(1) - 1 / n
    guess = (x[~fit] @ x[fit].T @ torch.linalg.solve(gram + ridge, targets)).view(-1, n, n).argmax(-1)
    return (guess == truth[~fit]).double().mean().item()


def tokens_that_lose(model, n, commands, state, width):
    """Read commands (n*B, T), of `width` tokens each, one by one from `state`. -> (width,) each: the share of
    the signal's energy that a token loses, and its beta, weighted by the energy that its keys meet."""
    lost, met, beta_met = torch.zeros(3, width)
    for t in range(commands.shape[1]):
        x, i, before, after = model.embed(commands[:, t:t + 1]), t % width, 0, 0
        for layer, block in enumerate(model.blocks):
            (conv, S), normed = state[layer], block.norm1(x)
            signal, (_, k, _, _) = split(S, n)[1], block.mixer.project(normed, conv)
            energy = (k[:, 0, :, None] @ signal).square().sum((0, 2, 3))  # (H,)
            met[i] += energy.sum()
            beta_met[i] += (block.mixer.beta(normed)[:, 0].mean(0) * energy).sum()
            x, state[layer] = block(x, state[layer])
            before += signal.square().sum()
            after += split(state[layer][1], n)[1].square().sum()
        lost[i] += (1 - after / before) * width / commands.shape[1]
    return lost, beta_met / met


KNOWN = {"drift": "deltanet or gated_deltanet", "heads": "deltanet or its kin", "automaton": "--moves swap"}


def one_model(figure, folders, at, traces, known):
    """-> cfg, task, model and the one stage of `at`, of the one run for which known(cfg, model).
    Raises UserError for other runs."""
    cfg, task, _, model = load_model(folders[0], device="cpu", eval_at=at, eval_samples=traces)
    stages = parse_stages(at, task)
    if folders[1:] or stages[1:] or cfg.task != "repl" or not known(cfg, model):
        raise UserError(f"{figure}: give one run on repl, of {KNOWN[figure]}, and one stage as --at")
    return cfg, task, model, stages[0]


@torch.no_grad()
def measure_drift(folders, at, traces=96):
    """Why a model loses track of values seen 8, 16, 32, ... commands ago: accuracy as it is, and with one
    suspect after the other out of the way; the sizes of signal and noise; what each token does to the signal
    (after 64 commands or the last depth). -> rows {"panel", "line", "x", "y"}; prints them, too."""
    cfg, task, model, stage = one_model("drift", folders, at, traces, lambda cfg, model: all(
        type(block.mixer) in (DeltaNet, GatedDeltaNet) for block in model.blocks))
    n, mixers = task.n_vars, [block.mixer for block in model.blocks]
    if stage.commands < 8:
        raise UserError(f"--at {at}: drift needs 8 commands or more")
    tokens, truth = relabelled(task.batch(stage, traces, cfg.seed, "test", 0), n)
    ends = (truth[0, :, -1] >= 0).nonzero()[:, 0] + 1                     # of the lines, from "e = 5" on
    depths = [2 ** i for i in range(3, stage.commands.bit_length())]
    cuts = [ends[d + 2 * ((d - 1) // stage.spacing)].item() for d in depths]

    def states():
        """What the model holds at each depth: (the convolution's state, S) of each layer; and the truth."""
        state = None
        for piece, last in zip(tokens[:, :cuts[-1]].tensor_split(cuts[:-1], 1), cuts):
            for segment in piece.split(cfg.segment, 1):
                _, state = model(segment, state)
            yield list(state), truth[:, last - 1]

    right, size, start, after_64 = {}, {"signal": [], "noise": []}, None, None
    for depth, (state, values) in zip(depths, states()):
        noise, signal = zip(*(split(S, n) for _, S in state))
        for name, parts in (("noise", noise), ("signal", signal)):
            size[name].append(sum(part.square().sum() for part in parts).div(len(tokens)).sqrt().item())
        start = start or ([part.mean(0, keepdim=True).expand_as(part) for part in noise], size["signal"][0])
        louder = [start[1] / size["signal"][-1] * part for part in signal]
        for name, parts in {"as it is": (noise, signal), "noise as at the start": (start[0], signal),
                            "signal as strong as at the start": (noise, louder), "both": (start[0], louder)
                            }.items():
            altered = [(conv, a + b) for (conv, _), a, b in zip(state, *parts)]
            right.setdefault(name, []).append(score_all(model, task, altered, values))
        right.setdefault("the best linear readout", []).append(linear_readout(signal, values, n))
        after_64 = state if depth <= 64 else after_64

    commands, _ = relabelled(task.batch(Stage(8, 8), traces, cfg.seed, "test", 1), n)
    commands = commands[:, ends[0]:ends[8]]
    lost, beta = tokens_that_lose(model, n, commands, after_64, commands.shape[1] // 8)
    words = [repr(task.tokenizer.decode([token])) for token in commands[0, :len(lost)].tolist()]
    for mixer in mixers:                                                  # from here on, high ones are 2
        mixer.beta = lambda x, beta=mixer.beta: torch.where(beta(x) > 1.7, 2.0, beta(x))
    right["beta above 1.7 made 2"] = [score_all(model, task, *found) for found in states()]

    print("commands".ljust(36) + "".join(f"{depth:8d}" for depth in depths))
    for name, row in right.items():
        print(name.ljust(36) + "".join(f"{x:8.1%}" for x in row))
    for name, row in size.items():
        print(f"size of the {name}".ljust(36) + "".join(f"{x:8.1f}" for x in row))
    for word, x, b in zip(words, lost.tolist(), beta.tolist()):
        print(f"{word:8s} loses {x:7.3%} of the signal's energy; beta where they meet {b:.3f}")

    right["chance"] = [1 / n] * len(depths)
    rows = [{"panel": panel, "line": name, "x": x, "y": y}
            for panel, found in ((f"Suspects removed; reveals: {at}", right), ("What the state holds", size))
            for name, row in found.items() for x, y in zip(depths, row)]
    tokens = enumerate(zip(words, lost.tolist(), beta.tolist()), 1)
    return rows + [{"panel": "Lost at each token of a command", "line": f"{i}: {word}, beta {b:.3f}",
                    "x": i, "y": 100 * x} for i, (word, x, b) in tokens]


def drift(rows):
    """The figure of `measure_drift`."""
    (removed, right), (holds, sizes), (loses, tokens) = by_panel(rows).items()
    figure, panels = plt.subplots(1, 3, figsize=(14, 4))
    for axes, title, curves in zip(panels, (removed, holds), (right, sizes)):
        for name, (x, y) in curves.items():
            axes.plot(x, y, label=name, **({"color": "gray", "marker": ""} if name == "chance" else {}))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="commands", title=title)
        axes.legend(fontsize=8)
    panels[0].set(ylabel="accuracy, asked for all variables", ylim=(0, 1.02))
    panels[1].set(ylabel="Frobenius norm of the state's part", ylim=(0, None))
    for name, (x, y) in tokens.items():
        panels[2].bar(x, y, color="C0")
    panels[2].set_xticks(range(1, len(tokens) + 1), tokens, rotation=60, ha="right")
    panels[2].set(xlabel="token of a command, and its beta", ylabel="% of the signal's energy", title=loses)
    return figure


# ----------------------------------------------------------------------------------------------------------
# What a model's heads do, and the automaton it has learned

def explained(keys):
    """Keys (N, K) -> (K,), the share of their variance in the first 1, 2, ... K principal components."""
    variance = torch.linalg.eigvalsh(keys.T.cov()).flip(0).clamp(min=0)
    return variance.cumsum(0) / variance.sum()


@torch.no_grad()
def measure_heads(folders, at, traces=32):
    """A model's delta heads -> rows {"panel", "line", "x", "y"}. The line is a head, "layer.head", or "none".
    Panels: "beta" (middle of a bin, share of tokens with a beta in it), "mean beta", "variance" (number of
    components, share of the keys' variance in them), and "scaled", accuracy while its beta is half as large,
    so that eigenvalues are in [0, 1] and no more in [-1, 1]. Prints what they say."""
    cfg, task, model, stage = one_model("heads", folders, at, traces, lambda cfg, model: any(
        isinstance(block.mixer, DeltaNet) for block in model.blocks))
    deltas = [(i, block.mixer) for i, block in enumerate(model.blocks) if isinstance(block.mixer, DeltaNet)]
    rows = []

    def note(panel, line, x, y):
        rows.append({"panel": panel, "line": line, "x": x, "y": y})

    def accuracy():
        return evaluate(cfg, model, task, stage, torch.device("cpu"))["reveal_acc"]

    whole, costs = accuracy(), {}
    note("chance", "none", 0, task.chance)
    note("scaled", "none", 0, whole)
    x, inputs = model.embed(task.batch(stage, traces, cfg.seed, "test", 0).tokens[:, :cfg.segment]), []
    for block in model.blocks:
        inputs.append(block.norm1(x))
        x, _ = block(x)
    print(f"accuracy {whole:.1%} as it is, chance {task.chance:.1%}\n"
          "layer.head  beta > 0.95 beta_max  mean beta  components for 90 %  accuracy, beta halved")
    for i, mixer in deltas:
        keys, beta, every = mixer.project(inputs[i])[1], mixer.beta, mixer.beta(inputs[i])
        for head in range(mixer.n_head):
            name, one, width = f"{i + 1}.{head + 1}", every[..., head], mixer.beta_max / 20
            share, bins = explained(keys[..., head, :].flatten(0, 1)), one.histc(20, 0, mixer.beta_max)
            half = torch.where(torch.arange(mixer.n_head) == head, 0.5, 1.0)
            mixer.beta = lambda x, beta=beta, half=half: half * beta(x)
            scaled = accuracy()
            del mixer.beta                                                # the class's method again
            for j, count in enumerate(bins.tolist()):
                note("beta", name, round((j + 0.5) * width, 4), count / one.numel())
            for j, y in enumerate(share[:32].tolist(), 1):
                note("variance", name, j, y)
            note("mean beta", name, 0, one.mean().item())
            note("scaled", name, 0, scaled)
            costs[name] = 100 * (whole - scaled)
            print(f"{name:>10s}{bins[-1] / one.numel():>22.1%}{one.mean():>11.2f}"
                  f"{(share < 0.9).sum() + 1:>21}{scaled:>23.1%}")
    print(verdict(costs))
    return rows


def verdict(costs):
    """{head: points of accuracy that halving its beta costs} -> who tracks, in words: who costs 2 does."""
    most, spread = max(costs, key=costs.get), sum(cost >= 2 for cost in costs.values())
    who = {0: "no head's halving costs 2 points", 1: f"the state-tracking head is {most}"}
    return (who.get(spread, f"tracking is spread over {spread} heads, most in {most}") + "; points lost: "
            + ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items()))


def heads(rows):
    """The figure of `measure_heads`: betas (P1 Figs. 5 and 11), the principal components of keys (Figs. 5 and
    12), and what is left of accuracy without a head's reflections (Fig. 6)."""
    found = by_panel(rows)
    [chance] = found["chance"]["none"][1]
    figure, panels = plt.subplots(1, 3, figsize=(14, 4))
    widest = max(max(y) for _, y in found["beta"].values())
    for i, (name, (x, y)) in enumerate(found["beta"].items()):
        width = 0.45 * np.array(y) / widest
        panels[0].fill_betweenx(x, i - width, i + width, step="mid", label=name, color=f"C{i % 10}")
        panels[1].plot(*found["variance"][name], label=name, markevery=0.1)
    panels[0].set_xticks(range(len(found["beta"])), found["beta"])
    panels[0].set(xlabel="layer.head", ylabel="beta (width: share of tokens)", title="Betas")
    panels[1].set(xlabel="principal components", ylabel="share of variance", title="Keys", ylim=(0, 1.03))
    panels[1].legend(fontsize=8, title="layer.head")
    left = {name: y for name, (_, [y]) in found["scaled"].items()}
    panels[2].bar(list(left), list(left.values()), color="C0")
    panels[2].axhline(chance, color="black", linestyle=":", label="chance")
    panels[2].set(xlabel="head whose beta is halved", ylabel="reveal accuracy", title="Without reflections",
                  ylim=(0, 1.15))
    panels[2].legend()
    return figure


def clouds(x, radius=0.35):
    """Points x (N, D), in clouds of about as many each -> centres (M, D). Take the fullest ball, whose mean
    is a centre, and leave out its points, until the fullest left has a third of the first's or less. radius:
    of a ball, where 1 is the points' rms distance from their mean."""
    spread = (x - x.mean(0)).square().sum(1).mean().sqrt()
    near, left, sizes, centres = (torch.cdist(x, x) <= radius * spread).float(), torch.ones(len(x)), [], []
    while not sizes or 3 * sizes[-1] > sizes[0]:
        size, i = (near @ left).max(0)
        sizes.append(size)
        centres.append((near[i] * left) @ x / size)
        left = left * (1 - near[i])
    return torch.stack(centres[:-1])


def follow(states, moves, names):
    """Numbered states of traces, and moves, "ab" for a swap of a and b, each after the first leading to its
    state -> table {(state, move): usual next state}; {state: which variables hold there what "abc..." hold in
    state 0}; the table's entries that a swap contradicts; the share of transitions that none does."""
    seen = Counter(step for row, said in zip(states, moves) for step in zip(row, said[1:], row[1:]))
    table = {(here, move): there for (here, move, there), _ in reversed(seen.most_common())}
    where, todo = {0: names}, [0]
    after = lambda here, move: where.get(here, "").translate(str.maketrans(move, move[::-1]))
    for here in todo:
        for (state, move), there in table.items():
            if state == here and there not in where and table.get((there, move)) == here:  # a swap undone
                where[there] = after(here, move)
                todo.append(there)
    right = lambda here, move, there: there in where and where[there] == after(here, move)
    wrong = [(*entry, there) for entry, there in sorted(table.items()) if not right(*entry, there)]
    return table, where, wrong, sum(n for step, n in seen.items() if right(*step)) / seen.total()


@torch.no_grad()
def automaton(folders, at, traces=256):
    """Print the automaton in a model of swaps: its states are clouds of hidden vectors at ends of commands,
    found without labels. Is it all n! arrangements, moved by swaps?"""
    cfg, task, model, stage = one_model("automaton", folders, at, traces, lambda cfg, _: cfg.moves == "swap")
    names, x, moves = "abcdefghi"[:task.n_vars], [], []
    ends = lambda batch: (batch.tokens == ord("\n")) & (batch.tokens.roll(1, 1) >= ord("a"))  # "= b, a\n"
    for batch, hidden in read(cfg, model, task, stage, "test", torch.device("cpu"), ends):
        pairs = [batch.tokens.roll(back, 1)[ends(batch)].view(len(batch.tokens), -1) for back in (1, 3)]
        moves += [[chr(a) + chr(b) for a, b in row] for row in torch.stack(pairs, -1).tolist()]
        x.append(hidden)
    x = torch.cat(x)
    centres = clouds(x[:4096])                                            # it compares each with each
    states = torch.cdist(x, centres).argmin(1).view(len(moves), -1).tolist()
    table, where, wrong, share = follow(states, moves, names)
    print(f"states  {len(centres)} of {len(names)}! = {math.factorial(len(names))}")
    print(f"steps   {share:.2%} of {len(x) - len(moves):,} right; of {len(table)} kinds {len(wrong)} wrong")
    for state, held in sorted(where.items()) if len(names) <= 3 else ():
        print(state, held, *(f" {move} -> {table[i, move]}" for i, move in sorted(table) if i == state))
    for state, move, there in wrong[:1]:
        print(f"the first wrong entry: {move} takes state {state} to {there}")


FIGURES = {f.__name__: f for f in  # f(groups, at)
           (curve, positions, scores, final, ladder, spacing, nats, samples, budget)}
MEASURED = {"drift": (measure_drift, drift), "heads": (measure_heads, heads),  # rows = f(paths, at); g(rows)
            "lengths": (measure_lengths, lengths)}
OVER = {"samples": ["curriculum", "max_samples"], "budget": ["curriculum", "digits"],  # left out of labels
        "ladder": ["group"], "spacing": ["curriculum"]}
ALL = """
positions assets/positions.csv --at 128x16 --best learning_rate --save assets/contrast.png
scores assets/contrast.csv --best learning_rate --save assets/scores.png
final assets/final.csv --save assets/final.png
spacing assets/spacing.csv --best learning_rate --save assets/spacing.png
ladder assets/ladder.csv --best learning_rate --save assets/ladder.png
drift assets/drift.csv --save assets/drift.png
heads assets/heads.csv --save assets/heads.png
filters --save assets/filters.png
nats assets/belief.csv --best learning_rate --save assets/nats.png
samples assets/parity.csv --best learning_rate --save assets/samples.png
lengths assets/lengths.csv --save assets/lengths.png
""".strip().splitlines()


def draw(figure, paths, at, best, save):
    """Make one figure, or, if `save` ends in .csv, the rows that it is made of."""
    if figure in MEASURED:
        measure, figure_of = MEASURED[figure]
        ready = Path(paths[0]).suffix == ".csv"
        rows = [row for path in paths for row in read_csv(path, "panel")] if ready else measure(paths, at)
        if save.suffix != ".csv":
            return figure_of(rows).savefig(save, dpi=150)
        with open(save, "w", newline="") as file:
            lines_of = csv.DictWriter(file, ["panel", "line", "x", "y"], lineterminator="\n")
            lines_of.writeheader()
            return lines_of.writerows({**row, "y": f"{row['y']:.6g}"} for row in rows)
    if figure == "filters":
        return filters().savefig(save, dpi=150)
    groups = load(paths, best, OVER.get(figure, ()))
    return table(groups, save) if figure == "table" else FIGURES[figure](groups, at).savefig(save, dpi=150)


def main(argv):
    parser = Parser(__doc__)
    known = [*FIGURES, *MEASURED, "filters", "table", "automaton"]
    parser.add_argument("figure", nargs="?", help=", ".join(known))
    parser.add_argument("paths", nargs="*", help="folders of finished runs, CSVs; lengths: files of traces")
    parser.add_argument("--all", action="store_true", help="remake the README's figures from assets/*.csv")
    parser.add_argument("--at", default="128x16", help="positions, drift, heads, automaton: LxS [128x16]")
    parser.add_argument("--best", help="a setting of which only the best value is shown, as learning_rate")
    parser.add_argument("--save", help="file, .png or .svg; .csv for a table, or for what was measured "
                                       "[out/FIGURE.png, out/table.csv]")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    args = parser.parse_args(argv)
    if args.all:
        for line in ALL:
            main([*line.split(), "--overwrite"])
        return 0
    one_of("figure", args.figure, known)
    if not args.paths and args.figure != "filters":
        raise UserError(f"{args.figure}: give folders of finished runs, as out/deltanet-repl*")
    if args.figure == "automaton":
        automaton(args.paths, args.at)
        return 0
    endings = {"table": (".csv",)}.get(args.figure, (".png", ".svg") + (".csv",) * (args.figure in MEASURED))
    path = Path(args.save or f"out/{args.figure}{endings[0]}")
    one_of("--save: the ending", path.suffix, endings)
    if path.exists() and not args.overwrite:
        raise UserError(f"{path} exists: add --overwrite, or choose another --save")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(args.figure, args.paths, args.at, args.best, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error.strerror}); choose another --save")
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    start(main)
