"""
The figures, one function each, from the files that runs leave behind.

    python plot.py curve out/deltanet-repl*                    reveal accuracy while training
    python plot.py positions out/deltanet-repl* --at 128x16    accuracy at each reveal of a trace (P1 Fig. 4)
    python plot.py final out/deltanet-repl*                    at the last, by length and spacing (the same)
    python plot.py scores out/deltanet-repl*                   a row a model, a column an evaluated stage
    python plot.py drift out/deltanet-repl --at 512x512        why a model loses track, suspect by suspect
    python plot.py nats out/deltanet-pfsa*                     hidden branches: KL to the exact odds
    python plot.py filters                                     where linear filters die (P1 Figs. 9 and 10)
    python plot.py samples out/transformer-parity*             traces until all is right (P2 Fig. 5)
    python plot.py budget out/transformer-arith*               accuracy after all traces (P2 Fig. 7)
    python plot.py lengths traces.jsonl                        how long traces of functions are (P2 Fig. 1)
    python plot.py table out/deltanet-repl*                    the numbers, as CSV

Runs that differ only in their seed become one line, the median, in a band from the worst to the best. With
--best learning_rate (any setting), only its best value is kept of runs that are otherwise alike. A figure of
another kind is ten more lines: read what you need into {label: [(x, y) of each seed, ...]}, call `lines`.

P1 is arXiv 2602.14814. Not here: training. All but `drift`, `filters` and `lengths` read metrics.csv and
result.json.
"""
import csv
import json
import re
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

import pfsa
from data import Arith, Parser, Stage, UserError, one_of, parse_stages, read_traces, start
from models import DeltaNet, GatedDeltaNet
from train import load_model, stage_of


def lines(curves, x_label, y_label, title, chance=None, axes=None):
    """-> a figure with one line and band per label. curves: {label: [(x, y), ...]}, a pair of 1-d arrays per
    seed. All seeds are drawn over the x of the longest, each keeping its last y after its end. Give axes to
    draw into a figure that is there."""
    many = len(curves) > 5
    if axes is None:
        _, axes = plt.subplots(figsize=(10 if many else 7, 4), layout="constrained")
    axes.set_prop_cycle(color=plt.get_cmap("tab20" if len(curves) > 10 else "tab10").colors)
    for label, seeds in curves.items():
        x = max((x for x, _ in seeds), key=lambda x: x[-1])
        y = np.array([np.interp(x, *seed) for seed in seeds])             # (seeds, points)
        [line] = axes.plot(x, np.median(y, 0), label=f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})")
        axes.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    if chance is not None:
        axes.axhline(chance, color="gray", linestyle=":", linewidth=1)
        axes.text(1, chance, "chance", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, **({"loc": "center left", "bbox_to_anchor": (1, 0.5)} if many else {}))
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
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def load(folders, best, over=()):
    """-> {label: [(result, folder), ...]}: finished runs, grouped by all settings but the seed and those in
    `over`, labelled by those that are not what most runs have. Of runs that otherwise differ in the setting
    `best` only, those are kept whose value gave the first seed the highest mean accuracy over all that was
    evaluated, or, of hidden branches, the lowest mean KL at prints of the kind that was trained."""
    runs = []
    for folder in map(Path, folders):
        try:
            runs.append((json.loads((folder / "result.json").read_text()), folder))
        except (OSError, ValueError):
            raise UserError(f"{folder} holds no result.json: give folders of runs that train.py has finished")
    aside = ("seed", "out", "name", "device", "save_every", best, *over)
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


def best_of(runs, best):
    """Of runs alike but for the seed and the setting `best`, those with its best value (of two, that with
    more runs)."""
    by_value = {}
    for run in runs:
        by_value.setdefault(run[0]["config"][best], []).append(run)

    def score(runs):
        first = min((result for result, _ in runs), key=lambda result: result["seed"])
        rows = [row for row in first["eval"] if row["kind"] == first["eval"][0]["kind"]]
        return np.mean([-row["kl"] if "kl" in row else row["reveal_acc"] for row in rows]), len(runs)
    return max(by_value.values(), key=score)


def curve(groups, at, window=10):
    """Reveal accuracy of training batches, mean of `window`, over traces seen."""
    curves = {}
    for label, runs in groups.items():
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
            found = {str(stage_of(row)): row["by_reveal"] for row in result["eval"]}
            one_of(f"--at, in {folder}:", at, found)
            y = np.array(found[at])
            curves.setdefault(label, []).append((np.arange(1, len(y) + 1), y))
    curves = dict(sorted(curves.items(), key=lambda item: -np.mean([y for _, y in item[1]])))
    commands, spacing = at.partition(":")[0].split("x")
    return lines(curves, f"reveal (one after every {spacing} commands)", "accuracy on held-out traces",
                 f"Tracking through {commands} commands", chance_of(groups))


def scores(groups, at):
    """Reveal accuracy at every evaluated stage, a row per model: the comparison as one picture."""
    cells, columns = {}, []
    for label, runs in groups.items():
        for result, _ in runs:
            for row in result["eval"]:
                columns.append(str(stage_of(row)))
                cells.setdefault((label, columns[-1]), []).append(row["reveal_acc"])
    columns = list(dict.fromkeys(columns))
    rows = sorted(groups, key=lambda row: -sum(np.median(cells.get((row, c), 0)) for c in columns))
    size = 4 + 0.8 * len(columns), 1 + 0.45 * len(groups)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    tiles(axes, cells, rows, columns)
    axes.set(xlabel="commands x spacing", title="Reveal accuracy in %, median and range over seeds")
    return figure


def final(groups, at):
    """Accuracy at the last reveal over length and spacing, a panel per model (P1 Fig. 4, right)."""
    size = 1 + 3.2 * len(groups), 3.2
    figure, [panels] = plt.subplots(1, len(groups), figsize=size, layout="constrained", squeeze=False)
    for axes, (label, runs) in zip(panels, groups.items()):
        cells = {}
        for result, _ in runs:
            for row in result["eval"]:
                cells.setdefault((row["spacing"], row["commands"]), []).append(row["final_acc"])
        spacings, lengths = (sorted(set(sizes)) for sizes in zip(*cells))
        tiles(axes, cells, spacings, lengths)
        axes.set(xlabel="commands", ylabel="spacing", title=f"{label}, last reveal, %")
    return figure


def nats(groups, at):
    """Hidden branches: KL from the exact odds of an answer to the model's, over the length of traces, a panel
    per kind of prints."""
    kinds = {}                                                            # {kind: {label: [(x, y), ...]}}
    for label, runs in groups.items():
        for result, folder in runs:
            if "kl" not in result["eval"][0]:
                raise UserError(f"{folder} has no KL: give runs of --task pfsa")
            for kind in dict.fromkeys(row["kind"] for row in result["eval"]):
                found = sorted((row["commands"], row["kl"]) for row in result["eval"] if row["kind"] == kind)
                kinds.setdefault(kind, {}).setdefault(label, []).append(tuple(np.array(found).T))
    figure, [panels] = plt.subplots(1, len(kinds), figsize=(2 + 5 * len(kinds), 4), layout="constrained",
                                    sharey=True, squeeze=False)
    for axes, (kind, curves) in zip(panels, kinds.items()):
        lines(curves, "lines of code", "KL to the exact odds, nats an answer", f"prints: {kind or 'random'}",
              axes=axes)
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
        length = int(re.match(r"\d+", result["config"]["curriculum"].split()[-1])[0])
        found.setdefault(length, []).append(value(result))
    return zip(*sorted(found.items()))


def taught(config):
    """How a run learned, and a line style for it."""
    if config["state_weight"]:
        head = "" if config["state_head"] == "auto" else f"{config['state_head']}, "
        return f"states ({head}weight {config['state_weight']:g})", "-"
    return ("curriculum", "--") if config["sample_length"] else ("next token", ":")


def samples(groups, at):
    """Traces until held-out programs were all right, twice (train.py --until), over their length (P2 Fig. 5).
    Median and range of the seeds; hollow, pointing up: most seeds saw so many traces and were not there."""
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    colors = {}
    for i, (label, runs) in enumerate(groups.items()):
        lengths, seen = by_length(runs, lambda r: (r["until"] or r["samples"], r["until"] is None))
        x = np.array(lengths) * 1.015 ** (i - len(groups) / 2)            # side by side
        y = [np.median([traces for traces, _ in seeds]) for seeds in seen]
        model = re.sub(r", (sample_length|state_weight|state_head) [^,]+", "", label)
        how, style = taught(runs[0][0]["config"])
        color = colors.setdefault(model, f"C{len(colors)}")
        [line] = axes.plot(x, y, style, color=color, linewidth=1)
        for x, y, seeds in zip(x, y, seen):
            never = np.mean([failed for _, failed in seeds]) > 0.5
            look = {"color": line.get_color(), "fillstyle": "none" if never else "full"}
            axes.plot(x, y, "^" if never else "o", **look)
            axes.vlines(x, *np.percentile([traces for traces, _ in seeds], [0, 100]), color=look["color"])
        axes.plot([], [], "o" + style, color=color, label=f"{model}: {how}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(yscale="log", xlabel="lines of a program", ylabel="training traces until all is right",
             title="Samples to perfect (hollow: not reached)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
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
    figure, [panels] = plt.subplots(1, len(curves), figsize=(2 + 4 * len(curves), 4), layout="constrained",
                                    sharey=True, squeeze=False)
    for axes, (digits, of_digits) in zip(panels, sorted(curves.items())):
        lines(of_digits, "lines of a program", "accuracy on held-out programs", f"{digits} digits", axes=axes)
        x = max((x for seeds in of_digits.values() for x, _ in seeds), key=len)
        axes.plot(x, [Arith(digits).commonest(L) for L in x.tolist()], "k:", label="always the commonest")
        axes.legend(frameon=False)
    return figure


def lengths(files, at):
    """How many traces have how many steps, for each file of traces (P2 Fig. 1)."""
    figure, [panels] = plt.subplots(1, len(files), figsize=(5 * len(files), 3.5), layout="constrained",
                                    squeeze=False)
    for axes, file in zip(panels, files):
        rows = read_traces(file)
        functions = len({row["source"] for row in rows})
        axes.hist([row["steps"] for row in rows], bins=range(52), color="tab:blue")
        axes.set(xlabel="steps of a trace", ylabel="traces",
                 title=f"{Path(file).stem}: {len(rows):,} traces of {functions:,} functions")
        axes.grid(alpha=0.3)
    return figure


def filters(groups, at):
    """Left, P1 Fig. 9: the mass of a linear filter over reveals of probability 1/2, in four dtypes. Right, P1
    Fig. 10: an entry of the marginal recurrence, what Sinkhorn makes of it, and the truth. Needs no runs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    reveals, forced = np.arange(1101), [pfsa.swap(3, 1, 2), pfsa.holds(3, 1, 1)] * 1100
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mass = pfsa.linear_filter(pfsa.figure_9(), [[0, 1] * 1100], dtype)[0, ::2].double().sum(1).numpy()
        alive = (mass > 0).sum()
        left.loglog(reveals[1:alive], mass[1:alive], color="gray", linewidth=1)
        left.plot(alive - 1, mass[alive - 1], "o", label=f"{str(dtype)[6:]}: 0 after {alive}")
    left.set(xlabel="reveals of probability 1/2", ylabel="mass of the linear filter (exact one: 1)",
             title="P1 Figure 9")
    H = pfsa.marginal_filter(3, [forced])[0, ::2]
    truth = pfsa.marginals(pfsa.maybe_swaps(3).filter([forced])[0][0, ::2], 3)
    scaled, ok = pfsa.sinkhorn(H)
    right.plot(reveals, truth[:, 2, 2], color="lightgray", linewidth=5, label="exact")
    right.plot(reveals, H[:, 2, 2], label="in the marginal recurrence")
    right.plot(reveals[ok], scaled[ok, 2, 2], label=f"after Sinkhorn, until it is lost, after {ok.sum()}")
    right.set(xlabel="times: maybe swap 2 and 3, reveal 2 at 2", ylabel="P(3 holds 3)", xscale="symlog",
              title="P1 Figure 10")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def chance_of(groups):
    """1 / n_vars where all runs are REPL traces with as many variables, else None."""
    configs = [result["config"] for runs in groups.values() for result, _ in runs]
    n_vars = {c["n_vars"] if c["task"] == "repl" else None for c in configs}
    return 1 / n_vars.pop() if len(n_vars) == 1 and None not in n_vars else None


def table(groups, path):
    """Write a CSV with a line per run and evaluated stage."""
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        evaluated = [row for runs in groups.values() for result, _ in runs for row in result["eval"]]
        more = ["kl", "final_kl", "loss", "floor"] if any("kl" in row for row in evaluated) else []
        columns = """run seed params samples seconds until best commands spacing kind reveal_acc final_acc
                     to_98"""
        rows.writerow(columns.split() + more)
        for label, runs in groups.items():
            for result, folder in runs:
                cost = [result["seed"], result["params"], result["samples"], round(result["seconds"], 1),
                        result["until"], best_held_out(folder)]
                first = samples_to(0.98, folder)
                for row in result["eval"]:
                    stage = stage_of(row)
                    score = [round(row[k], 4) for k in ("reveal_acc", "final_acc")]
                    nats = [round(row[k], 5) for k in more if k in row]
                    rows.writerow([label, *cost, *stage, *score, first.get(stage[:2], ""), *nats])


def best_held_out(folder):
    """The highest accuracy on held-out traces while training, at whatever stage, "" if none was read."""
    return max((float(row["held_out_acc"]) for row in metrics(folder) if row.get("held_out_acc")), default="")


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


@torch.no_grad()
def drift(groups, at, traces=96):
    """Why a model loses track of values seen 8, 16, 32, ... commands ago: accuracy as it is, and with one
    suspect after the other out of the way; the sizes of signal and noise; what each token does to the signal
    (after 64 commands or the last depth). The numbers are printed, too."""
    [(_, folder), *more] = [run for runs in groups.values() for run in runs]
    cfg, task, _, model = load_model(folder, device="cpu", eval_at=at)
    mixers = [block.mixer for block in model.blocks]
    if more or cfg.task != "repl" or not all(type(mixer) in (DeltaNet, GatedDeltaNet) for mixer in mixers):
        raise UserError("drift: give one run, of deltanet or gated_deltanet on repl")
    [stage], n = parse_stages(at, task), task.n_vars
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
    for mixer in mixers:                                                  # from here on, none is short of 2
        mixer.beta = lambda x, beta=mixer.beta: torch.where(beta(x) > 1.7, 2.0, beta(x))
    right["beta above 1.7 made 2"] = [score_all(model, task, *found) for found in states()]

    print("commands".ljust(36) + "".join(f"{depth:8d}" for depth in depths))
    for name, row in right.items():
        print(name.ljust(36) + "".join(f"{x:8.1%}" for x in row))
    for name, row in size.items():
        print(f"size of the {name}".ljust(36) + "".join(f"{x:8.1f}" for x in row))
    for word, x, b in zip(words, lost.tolist(), beta.tolist()):
        print(f"{word:8s} loses {x:7.3%} of the signal's energy; beta where they meet {b:.3f}")

    figure, panels = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for axes, rows in zip(panels, (right, size)):
        for name, row in rows.items():
            axes.semilogx(depths, row, ".-", label=name, base=2)
        axes.set_xlabel("commands")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="accuracy, asked for all variables", title=f"Suspects removed; reveals: {at}")
    panels[1].set(ylabel="Frobenius norm of the state's part", ylim=(0, None), title="What the state holds")
    panels[2].bar(range(len(words)), 100 * lost.numpy(), tick_label=words)
    panels[2].tick_params("x", rotation=60)
    panels[2].set(ylabel="% of the signal's energy", title="Lost at each token of a command")
    return figure


FIGURES = {f.__name__: f for f in  # f(groups, at)
           (curve, positions, scores, final, drift, nats, samples, budget, lengths, filters)}
OVER = {"samples": ["curriculum", "max_samples"], "budget": ["curriculum", "digits"]}  # not in the labels


def main(argv):
    parser = Parser(__doc__)
    parser.add_argument("figure", help=", ".join(FIGURES) + " or table")
    parser.add_argument("runs", nargs="*", help="folders of finished runs; lengths: files of traces")
    parser.add_argument("--at", default="128x16", help="positions, drift: commands x spacing [128x16]")
    parser.add_argument("--best", help="a setting of which only the best value is shown, as learning_rate")
    parser.add_argument("--save", help="file, .png or .svg, .csv for a table [out/FIGURE.png, out/table.csv]")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    args = parser.parse_args(argv)
    one_of("figure", args.figure, [*FIGURES, "table"])
    endings = (".csv",) if args.figure == "table" else (".png", ".svg")
    path = Path(args.save or f"out/{args.figure}{endings[0]}")
    one_of("--save: the ending", path.suffix, endings)
    if path.exists() and not args.overwrite:
        raise UserError(f"{path} exists: add --overwrite, or choose another --save")
    if not args.runs and args.figure != "filters":
        raise UserError(f"{args.figure}: give folders of finished runs, as out/*")
    groups = args.runs
    if args.runs and args.figure != "lengths":
        groups = load(args.runs, args.best, OVER.get(args.figure, ()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if args.figure == "table":
            table(groups, path)
        else:
            FIGURES[args.figure](groups, args.at).savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error.strerror}); choose another --save")
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    start(main)
