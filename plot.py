"""
The figures, one function each, from the files that runs leave behind.

    python plot.py curve out/deltanet-repl*                     reveal accuracy while training
    python plot.py positions out/deltanet-repl* --at 128x16     accuracy at each reveal of a trace (P1 Fig. 4)
    python plot.py table out/deltanet-repl*                     the numbers, as CSV

Runs that differ only in their seed become one line, the median, in a band from the worst to the best. A
figure of another kind is ten more lines: read what you need into {label: [(x, y) of each seed, ...]}, call
`lines`.

P1 is arXiv 2602.14814. Not here: training, and numbers that are not in metrics.csv or result.json.
"""
import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt
import numpy as np

from data import Parser, UserError, one_of, start


def lines(curves, x_label, y_label, title, chance=None):
    """-> a figure with one line and band per label. curves: {label: [(x, y), ...]}, a pair of 1-d arrays per
    seed. All seeds are drawn over the x of the longest, each keeping its last y after its end."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, seeds in curves.items():
        x = max((x for x, _ in seeds), key=lambda x: x[-1])
        y = np.array([np.interp(x, *seed) for seed in seeds])             # (seeds, points)
        [line] = axes.plot(x, np.median(y, 0), label=f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})")
        axes.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
    if chance is not None:
        axes.axhline(chance, color="gray", linestyle=":", linewidth=1)
        axes.text(1, chance, "chance", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def load(folders):
    """-> {label: [(result, folder), ...]}: finished runs, grouped by all settings but the seed, labelled by
    those that differ between groups."""
    runs = []
    for folder in map(Path, folders):
        try:
            runs.append((json.loads((folder / "result.json").read_text()), folder))
        except (OSError, ValueError):
            raise UserError(f"{folder} holds no result.json: give folders of runs that train.py has finished")
    aside = ("seed", "out", "name", "device", "save_every")
    configs = [{k: v for k, v in result["config"].items() if k not in aside} for result, _ in runs]
    varied = [k for k in configs[0] if k != "model" and len({str(c.get(k)) for c in configs}) > 1]
    groups = {}
    for run, config in zip(runs, configs):
        label = ", ".join([config["model"], *(f"{k} {config[k]}" for k in varied)])
        groups.setdefault(label, []).append(run)
    return groups


def curve(groups, at, window=10):
    """Reveal accuracy of training batches, mean of `window`, over traces seen."""
    curves = {}
    for label, runs in groups.items():
        for _, folder in runs:
            with open(folder / "metrics.csv", newline="") as file:
                rows = list(csv.DictReader(file))
            x, y = (np.array([float(row[k]) for row in rows]) for k in ("samples", "reveal_acc"))
            n = min(window, len(rows))
            curves.setdefault(label, []).append((x[n - 1:], np.convolve(y, np.ones(n) / n, "valid")))
    return lines(curves, "traces seen", f"reveal accuracy, mean of {window} batches", "Learning to execute",
                 chance_of(groups))


def positions(groups, at):
    """Held-out accuracy at the first, second, ... reveal of a trace (P1 Fig. 4, left)."""
    curves = {}
    for label, runs in groups.items():
        for result, folder in runs:
            found = {f"{row['commands']}x{row['spacing']}": row["by_reveal"] for row in result["eval"]}
            one_of(f"--at, in {folder}:", at, found)
            y = np.array(found[at])
            curves.setdefault(label, []).append((np.arange(1, len(y) + 1), y))
    commands, spacing = at.split("x")
    return lines(curves, f"reveal (one after every {spacing} commands)", "accuracy on held-out traces",
                 f"Tracking through {commands} commands", chance_of(groups))


def chance_of(groups):
    """1 / n_vars where all runs are REPL traces with as many variables, else None."""
    configs = [result["config"] for runs in groups.values() for result, _ in runs]
    n_vars = {c["n_vars"] if c["task"] == "repl" else None for c in configs}
    return 1 / n_vars.pop() if len(n_vars) == 1 and None not in n_vars else None


def table(groups, path):
    """Write a CSV with a line per run and evaluated stage."""
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow("run seed params samples seconds commands spacing reveal_acc final_acc".split())
        for label, runs in groups.items():
            for result, _ in runs:
                cost = [result["seed"], result["params"], result["samples"], round(result["seconds"], 1)]
                for row in result["eval"]:
                    score = [round(row[k], 4) for k in ("reveal_acc", "final_acc")]
                    rows.writerow([label, *cost, row["commands"], row["spacing"], *score])


FIGURES = {"curve": curve, "positions": positions}  # each takes (groups, at) and returns a figure


def main(argv):
    parser = Parser(__doc__)
    parser.add_argument("figure", help=", ".join(FIGURES) + " or table")
    parser.add_argument("runs", nargs="+", help="folders of finished runs")
    parser.add_argument("--at", default="128x16", help="positions: which evaluation of the runs [128x16]")
    parser.add_argument("--save", help="file, .png or .svg, .csv for a table [out/FIGURE.png, out/table.csv]")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    args = parser.parse_args(argv)
    one_of("figure", args.figure, [*FIGURES, "table"])
    endings = (".csv",) if args.figure == "table" else (".png", ".svg")
    path = Path(args.save or f"out/{args.figure}{endings[0]}")
    one_of("--save: the ending", path.suffix, endings)
    if path.exists() and not args.overwrite:
        raise UserError(f"{path} exists: add --overwrite, or choose another --save")
    groups = load(args.runs)
    figure = FIGURES[args.figure](groups, args.at) if args.figure in FIGURES else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150) if figure else table(groups, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error.strerror}); choose another --save")
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    start(main)
