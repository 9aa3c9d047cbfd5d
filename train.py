"""
Train a model on a task, watch it, evaluate it beyond what it saw. Nothing is hidden in a library.

    python train.py --model deltanet --task repl                        about a minute on a laptop
    python train.py --model deltanet,transformer --seed 0,1,2           a grid: six runs, finished ones are skipped
    python train.py --eval out/deltanet-repl/ckpt.pt --eval-at 512x16   a trained model, somewhere else
    python train.py --help                                              every setting, with its reason

The loss is the mean over all next tokens, plus reveal_weight times the mean over revealed values, plus state_weight times
the state head's at line ends (P2 section 4, "linear"). P1's own way is both weights 0.

The curriculum is a list of stages LxS: L commands, S of them between two reveals (P1 section 4). A stage is passed either when
the reveals of fresh training traces are right often enough (--advance), or after a fixed number of traces (--stage-samples,
P1's way).

The learning rate warms up, stays constant, and falls to lr_final times its peak, by half a cosine, over the last `cooldown`
traces. Constant in between, because with --advance nobody knows beforehand when the last stage will be passed: the fall
starts at that moment, or early enough to end within max_samples. With --stage-samples the end is known, and a cooldown as
long as the run is P1's cosine. One rule, defined in both cases.

Each run leaves a folder: ckpt.pt (torch.load with weights_only=True reads it), metrics.csv, result.json.
P1 is arXiv 2602.14814; P2 is "Grounding Code Understanding in Step-by-Step Execution".
"""
import argparse
import csv
import difflib
import inspect
import itertools
import json
import math
import os
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import GROUPS, TASKS, Stage, Tokenizer, parse_stages
from kernels import resolve_backend
from models import LM, MIXERS


@dataclass
class Config:
    # what to learn, and from what
    model: str = "deltanet"        # mixer, one of models.py's MIXERS; "a+b" alternates them, layer by layer
    task: str = "repl"             # repl (Python traces) or group (word problems)
    n_vars: int = 5                # repl: number of variables, 2 to 9; five make S5, the smallest unsolvable group
    moves: str = "swap"            # repl: a command is a swap of two variables, or a perm(utation) of all
    group: str = "S5"              # group: one of data.py's GROUPS
    curriculum: str = "auto"       # stages "LxS LxS ..."; auto is the task's own; "8x1:3" moves 3 variables at most
    # the model; the defaults make 95k parameters
    d_model: int = 64              # width
    d_mlp: int = 128               # width inside the MLP; small, as there is little to look up
    n_layer: int = 1               # blocks: one to see "who swaps with whom", one to read the state
    n_head: int = 1                # heads of d_model / n_head; a state must hold n_vars keys
    beta_max: float = 2.0          # delta mixers and ssm: 2 gives eigenvalues in (-1, 1), 1 gives (0, 1)
    n_householder: int = 2         # deltaproduct: reflections a token
    # the loss
    reveal_weight: float = 1.0     # extra weight on revealed values, one token in 30; 0 is plain next-token loss, as in P1
    state_weight: float = 1.0      # weight of the state head's loss (P2); 0 switches it off
    # the optimiser
    batch_size: int = 16           # traces a step
    learning_rate: float = 6e-3    # peak of AdamW's
    lr_final: float = 0.0          # the learning rate's end, as a share of the peak
    warmup: int = 320              # traces until the peak
    cooldown: int = 960            # traces of the final fall
    weight_decay: float = 0.0      # AdamW's; the data never repeat, so there is nothing to overfit
    grad_clip: float = 1.0         # norm at which gradients are clipped
    # when to move on, when to stop
    advance: float = 0.98          # pass a stage at this reveal accuracy, mean of the last 10 batches
    stage_samples: int = 0         # if not 0: pass each stage after this many traces instead, as P1 does
    max_samples: int = 100000      # stop after this many traces, wherever the curriculum is
    until: float = 0.0             # if not 0: stop at this reveal accuracy on held-out traces of the last stage
    # held-out traces
    eval_at: str = "auto"          # stages to evaluate after training; auto: the last, 2x and 4x on both axes
    eval_samples: int = 64         # traces each
    eval_every: int = 100          # steps between two evaluations during training
    segment: int = 2048            # tokens evaluated at once; the state is carried to the next segment
    # the machine
    seed: int = 0                  # weights and data; the same seed gives the same run
    device: str = "auto"           # auto, cpu, cuda, mps
    dtype: str = "fp32"            # fp32, or bf16 for everything but the scan's state
    save_every: int = 100          # steps between two checkpoints
    out: str = "out"               # folder of the runs' folders
    name: str = "auto"             # the run's folder; auto: model, task and every setting that is not the default


HELP = dict(re.findall(r"^    (\w+): \w+ = .*?# (.*)$", inspect.getsource(Config), re.M))
NOT_IDENTITY = {"device", "out", "name", "save_every"}  # the rest decides what a run computes


class UserError(Exception):
    """Something the user can put right: printed as one line, exit code 2."""


# ----------------------------------------------------------------------------------------------------------------
# The command line: Config's fields as flags, comma lists as grids

class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of the usage; a mistyped flag gets its nearest match."""
        for flag in re.findall(r"--[\w-]+", message) if "unrecognized" in message else ():
            near = difflib.get_close_matches(flag, self._option_string_actions, 1)
            message = f"unknown flag {flag}; " + (f"did you mean {near[0]}?" if near else "see --help")
        raise UserError(message)


def parse(argv):
    """-> the Configs that the comma lists span, the other arguments, and the settings given. Raises UserError."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Config):
        parser.add_argument("--" + f.name.replace("_", "-"), metavar=f.type.__name__,
                            help=f"{HELP[f.name]} [{f.default}]".replace("%", "%%"))
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run (grids always do)")
    parser.add_argument("--overwrite", action="store_true", help="start over where a run's folder already exists")
    parser.add_argument("--eval", metavar="CKPT", help="evaluate this checkpoint at --eval-at, train nothing")
    args = parser.parse_args(argv)
    if args.resume and args.overwrite:
        raise UserError("--resume goes on, --overwrite starts over: give one of them")

    axes = {}
    for f in (f for f in fields(Config) if getattr(args, f.name) is not None):
        try:
            axes[f.name] = [f.type(word.strip()) for word in getattr(args, f.name).split(",")]
        except ValueError:
            raise UserError(f"--{f.name.replace('_', '-')} {getattr(args, f.name)}: that is no {f.type.__name__}")
    if args.eval:
        extra = [name for name in axes if name not in ("eval_at", "eval_samples", "segment", "device", "dtype", "seed")]
        if extra or args.resume or args.overwrite or any(len(v) > 1 for v in axes.values()):
            raise UserError("--eval takes its settings from the checkpoint: give only --eval-at, --eval-samples, --segment, "
                            "--device, --dtype or --seed beside it, one value each")
    given = {name: values[0] for name, values in axes.items()}
    return [Config(**dict(zip(axes, cell))) for cell in itertools.product(*axes.values())], args, given


def one_of(name, value, choices):
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        raise UserError(f"--{name} {value}: " + (f"did you mean {near[0]}? " if near else "") +
                        f"Choose one of {', '.join(choices)}")


def build_task(cfg, tokenizer=None):
    """-> task and its curriculum. Raises UserError."""
    one_of("task", cfg.task, TASKS)
    try:
        task = TASKS["repl"](cfg.n_vars, cfg.moves, tokenizer) if cfg.task == "repl" else TASKS["group"](cfg.group, tokenizer)
        stages = parse_stages(task.curriculum if cfg.curriculum == "auto" else cfg.curriculum)
        for stage in stages:
            task.check(stage)
    except ValueError as error:
        raise UserError(f"{error}")
    return task, stages


def eval_stages(cfg, task, last):
    """The stages of --eval-at. Raises UserError."""
    try:
        stages = task.beyond(last) if cfg.eval_at == "auto" else parse_stages(cfg.eval_at)
        for stage in stages:
            task.check(stage)
    except ValueError as error:
        raise UserError(f"--eval-at: {error}")
    return stages


def check(cfg):
    """Raise UserError for settings that cannot be run, before anything is built."""
    for mixer in cfg.model.split("+"):
        one_of("model", mixer, MIXERS)
    task, stages = build_task(cfg)
    eval_stages(cfg, task, stages[-1])
    one_of("dtype", cfg.dtype, ("fp32", "bf16"))
    one_of("device", cfg.device, ("auto", "cpu", "cuda", "mps"))
    pick_device(cfg.device)
    positive = ("d_model", "d_mlp", "n_layer", "n_head", "n_householder", "batch_size", "learning_rate", "grad_clip",
                "max_samples", "eval_samples", "eval_every", "segment", "save_every", "beta_max")
    for name in positive + ("warmup", "cooldown", "stage_samples", "weight_decay", "reveal_weight", "state_weight", "lr_final",
                            "until", "seed"):
        value, flag = getattr(cfg, name), "--" + name.replace("_", "-")
        if not (value > 0 if name in positive else value >= 0):  # also catches nan
            raise UserError(f"{flag} {value}: must be {'above 0' if name in positive else '0 or more'}")
    if cfg.d_model % (2 * cfg.n_head):
        raise UserError(f"--d-model {cfg.d_model} does not split into --n-head {cfg.n_head} heads of even size")
    if cfg.beta_max > 2:
        raise UserError(f"--beta-max {cfg.beta_max:g}: above 2 an eigenvalue leaves [-1, 1] and the state explodes")
    if not 0 < cfg.advance <= 1 or cfg.until > 1:
        raise UserError("--advance and --until are accuracies: give at most 1")
    if not task.next_token and not cfg.state_weight:
        raise UserError(f"--task {cfg.task} is learned by the state head alone: give --state-weight above 0")
    if cfg.stage_samples * len(stages) > cfg.max_samples:
        raise UserError(f"--stage-samples {cfg.stage_samples} x {len(stages)} stages is more than --max-samples "
                        f"{cfg.max_samples}: raise it to {cfg.stage_samples * len(stages)}")
    if cfg.warmup + cfg.cooldown > total_samples(cfg, stages):
        raise UserError(f"--warmup {cfg.warmup} and --cooldown {cfg.cooldown} do not fit into "
                        f"{total_samples(cfg, stages)} traces: lower them")


def pick_device(name):
    """-> torch.device, why. Raises UserError where it is not there."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in have if have[kind])
        return torch.device(name), "the fastest here"
    if not have[name]:
        raise UserError(f"--device {name}: this machine or this torch has none; use --device auto")
    return torch.device(name), "as asked"


def run_name(cfg):
    """Folder name: model, task, and every other setting that differs from its default."""
    if cfg.name != "auto":
        return cfg.name
    words = [cfg.model, cfg.task]
    for f in fields(Config):
        value = getattr(cfg, f.name)
        if f.name not in NOT_IDENTITY | {"model", "task"} and value != f.default:
            words.append(f"{f.name}={value}")
    return re.sub(r"[^\w=.+-]+", "_", "-".join(words))[:200]


# ----------------------------------------------------------------------------------------------------------------
# Loss and score

def questions(task, batch):
    """-> asked (B, T) bool, the R positions of each trace whose hidden vector is read, and the right classes (B, R)."""
    if not task.next_token:                                              # every token's label is the state after it
        return batch.line_end, batch.state[:, :, 0]
    asked = batch.answer.roll(-1, 1)                                     # the token before an answer predicts it
    return asked, batch.tokens[batch.answer].view(len(asked), -1)


def read(model, task, hidden):
    """Hidden vectors where accuracy counts (..., D) -> logits (..., classes)."""
    return model.head(hidden) if task.next_token else model.state_head(hidden)[..., 0, :]


def loss_terms(model, task, batch, hidden):
    """-> {"next", "reveal", "state"}: mean cross-entropies in nats, where the task has them; and the reveal accuracy."""
    terms, (asked, target) = {}, questions(task, batch)
    if task.next_token:
        every = model.head(hidden[:, :-1]).float()                       # (B, T-1, vocabulary)
        nats = F.cross_entropy(every.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        terms["next"], terms["reveal"] = nats.mean(), nats[asked[:, :-1].flatten()].mean()
        guess = every[asked[:, :-1]].argmax(-1)
    else:
        guess = read(model, task, hidden[asked]).argmax(-1)
    states = model.state_head(hidden[batch.line_end]).float()            # (lines of the batch, n_slots, n_classes)
    terms["state"] = F.cross_entropy(states.flatten(0, 1), batch.state[batch.line_end].flatten(), ignore_index=-1)
    return terms, (guess == target.flatten()).float().mean()


@torch.no_grad()
def evaluate(cfg, model, task, stage, device):
    """Accuracy on held-out traces of one stage, with the true commands in the context. cfg.segment tokens at a time,
    the state carried, so that memory does not grow with length (but for a Transformer's cache).

    -> {"commands", "spacing", "reveal_acc", "final_acc", "by_reveal": accuracy at each reveal of the trace}"""
    right = []
    for t, start in enumerate(range(0, cfg.eval_samples, cfg.batch_size)):
        batch = task.batch(stage, min(cfg.batch_size, cfg.eval_samples - start), cfg.seed, "test", t).to(device)
        asked, target = questions(task, batch)
        state, hidden = None, []
        with autocast(cfg, device):
            for tokens, here in zip(batch.tokens.split(cfg.segment, 1), asked.split(cfg.segment, 1)):
                y, state = model(tokens, state)
                hidden.append(y[here].view(len(y), -1, y.shape[-1]))
            guess = read(model, task, torch.cat(hidden, 1)).argmax(-1)
        right.append((guess == target).double())
    by_reveal = torch.cat(right).mean(0)                                 # (R,)
    return {"commands": stage.commands, "spacing": stage.spacing, "reveal_acc": by_reveal.mean().item(),
            "final_acc": by_reveal[-1].item(), "by_reveal": by_reveal.tolist()}


def show_eval(row, task, trained):
    """One line: where, how well, against what chance."""
    where = "trained here" if Stage(row["commands"], row["spacing"]) in trained else "never seen"
    return (f"eval {row['commands']:6d} commands, a reveal every {row['spacing']:3d}: reveals {row['reveal_acc']:7.2%} "
            f"right, the last one {row['final_acc']:7.2%}   (chance {task.chance:.0%}; {where})")


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints and the files of a run

FORMAT = "state-tracking checkpoint 1"


def write_atomically(path, write):
    """write(temporary file), then rename: whoever reads `path`, whenever we die, finds the old or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def save_checkpoint(path, cfg, task, model, optimizer, progress):
    checkpoint = {"format": FORMAT, "config": asdict(cfg), "lexemes": list(task.tokenizer.lexemes), "progress": progress,
                  "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write_atomically(path, lambda f: torch.save(checkpoint, f))


def load_checkpoint(path):
    """-> the saved dict, on the CPU. Raises UserError if there is none, or it is not ours, or it is broken."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = checkpoint["format"] == FORMAT and {*checkpoint["config"]} == {f.name for f in fields(Config)}
    except Exception:  # torch.load meets a foreign file with whatever its parts raise
        known = False
    if not known:
        raise UserError(f"{path}: not a checkpoint of this version of train.py, or cut short; nothing was changed")
    return checkpoint


def load_model(path, device):
    """-> cfg, task, stages, model (in eval mode) of a checkpoint. Raises UserError."""
    checkpoint = load_checkpoint(path)
    cfg = Config(**checkpoint["config"])
    task, stages = build_task(cfg, Tokenizer(checkpoint["lexemes"]))
    model = build_model(cfg, task, device)
    model.load_state_dict(checkpoint["model"])
    return cfg, task, stages, model.eval()


# ----------------------------------------------------------------------------------------------------------------
# One run

def build_model(cfg, task, device):
    torch.manual_seed(cfg.seed)                                          # the only random numbers torch draws
    return LM(cfg, len(task.tokenizer), task.n_slots, task.n_classes).to(device)


def autocast(cfg, device):
    return torch.autocast(device.type, torch.bfloat16) if cfg.dtype == "bf16" else nullcontext()


def total_samples(cfg, stages):
    """Traces after which a run ends at the latest."""
    return cfg.stage_samples * len(stages) or cfg.max_samples


def learning_rate(cfg, samples, fall_from):
    """Warm up linearly, stay, fall along half a cosine from the moment (in traces) `fall_from`; see the top."""
    up = min(1.0, (samples + cfg.batch_size) / max(cfg.warmup, cfg.batch_size))
    fallen = min(1.0, max(0.0, (samples - fall_from) / max(cfg.cooldown, 1)))
    return cfg.learning_rate * up * (cfg.lr_final + (1 - cfg.lr_final) * 0.5 * (1 + math.cos(math.pi * fallen)))


class Interrupt:
    """Ctrl-C (or a kill) lets the step finish, so that what is saved is a state the run really was in."""

    def __enter__(self):
        self.asked, self.before = False, {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, *_):
        self.asked = True

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


COLUMNS = ("step", "samples", "seconds", "stage", "commands", "spacing", "lr", "loss", "next", "reveal", "state", "grad_norm",
           "reveal_acc", "held_out_acc")


def open_metrics(path, step):
    """-> metrics.csv, open, and its csv writer. Rows after `step`, which a killed run had not yet saved, are dropped."""
    kept = []
    if path.exists():
        with open(path, newline="") as f:
            kept = [row for row in csv.DictReader(f) if int(row["step"] or 0) <= step]
    file = open(path, "w", newline="")
    rows = csv.DictWriter(file, COLUMNS)
    rows.writeheader()
    rows.writerows(kept)
    return file, rows


def train(cfg, task, stages, folder, device, saved=None):
    """Train until done, interrupted or not finite; go on from `saved`, a checkpoint, if given.
    Writes ckpt.pt and metrics.csv into `folder`. -> model, progress (a dict), and "done", "interrupted" or "nan"."""
    model = build_model(cfg, task, device)
    optimizer = torch.optim.AdamW(model.parameters(), cfg.learning_rate, (0.9, 0.95), weight_decay=cfg.weight_decay)
    total = total_samples(cfg, stages)
    p = {"step": 0, "samples": 0, "stage": 0, "stage_from": 0, "recent": [], "passed": [], "fall_from": total - cfg.cooldown,
         "seconds": 0.0, "data_seconds": 0.0}
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        p = saved["progress"]
    checkpoint = folder / "ckpt.pt"
    log, rows = open_metrics(folder / "metrics.csv", p["step"])
    if not saved:
        save_checkpoint(checkpoint, cfg, task, model, optimizer, p)
    bar = tqdm(total=total, initial=p["samples"], unit=" traces", disable=None, dynamic_ncols=True)
    started, why = time.perf_counter() - p["seconds"], "done"

    with Interrupt() as interrupt:
        while why == "done" and p["samples"] < p["fall_from"] + cfg.cooldown:
            if interrupt.asked:
                why = "interrupted"
                break
            lr = learning_rate(cfg, p["samples"], p["fall_from"])
            for group in optimizer.param_groups:
                group["lr"] = lr

            stage, at = stages[p["stage"]], time.perf_counter()
            batch = task.batch(stage, cfg.batch_size, cfg.seed, "train", p["step"])
            p["data_seconds"] += time.perf_counter() - at
            batch = batch.to(device)

            with autocast(cfg, device):
                hidden, _ = model(batch.tokens)
                terms, accuracy = loss_terms(model, task, batch, hidden)
            weights = {"next": 1, "reveal": cfg.reveal_weight, "state": cfg.state_weight}
            loss = sum(weights[name] * term for name, term in terms.items())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            if not math.isfinite(loss.item() + norm.item()):              # before the step: the weights are still good
                why = "nan"
                break
            optimizer.step()

            p["step"] += 1
            p["samples"] += cfg.batch_size
            p["recent"] = p["recent"][-9:] + [accuracy.item()]
            row = {"step": p["step"], "samples": p["samples"], "stage": p["stage"], "commands": stage.commands,
                   "spacing": stage.spacing, "lr": lr, "loss": loss.item(), "grad_norm": norm.item(),
                   "reveal_acc": accuracy.item(), **{name: term.item() for name, term in terms.items()}}

            last, recent = p["stage"] == len(stages) - 1, sum(p["recent"]) / len(p["recent"])
            if p["step"] % cfg.eval_every == 0:
                row["held_out_acc"] = evaluate(cfg, model, task, stage, device)["reveal_acc"]
                tqdm.write(f"step {p['step']:6d}  {p['samples']:8,} traces  {time.perf_counter() - started:5.0f} s  stage {stage}  "
                           f"loss {row['loss']:.3f}  reveals {recent:.1%}, held out {row['held_out_acc']:.1%}")
                if last and 0 < cfg.until <= row["held_out_acc"]:
                    why = "reached"
            p["seconds"] = row["seconds"] = time.perf_counter() - started
            rows.writerow(row)
            bar.update(cfg.batch_size)
            bar.set_postfix(stage=str(stage), loss=f"{row['loss']:.3f}", reveals=f"{recent:.1%}", refresh=False)

            enough = (p["samples"] - p["stage_from"] >= cfg.stage_samples if cfg.stage_samples else
                      len(p["recent"]) == 10 and recent >= cfg.advance)
            if enough and len(p["passed"]) < len(stages):
                tqdm.write(f"stage {stage} passed after {p['samples']:,} traces, {p['seconds']:.0f} s: "
                           f"{recent:.1%} of the last reveals right")
                p["passed"].append({"stage": str(stage), "samples": p["samples"], "seconds": p["seconds"]})
                if last and not cfg.stage_samples:
                    p["fall_from"] = min(p["fall_from"], p["samples"])
                    bar.total = p["fall_from"] + cfg.cooldown
                if not last:
                    p.update(stage=p["stage"] + 1, stage_from=p["samples"], recent=[])
            if p["step"] % cfg.save_every == 0:
                log.flush()
                save_checkpoint(checkpoint, cfg, task, model, optimizer, p)

    bar.close()
    log.close()
    if why != "nan":
        save_checkpoint(checkpoint, cfg, task, model, optimizer, p)
    return model, p, why


def settings(config):
    """What decides the outcome of a run, of a config given as a dict."""
    return {name: value for name, value in config.items() if name not in NOT_IDENTITY}


def look_at(cfg, resume, overwrite):
    """What to do about a run whose folder may exist. -> "new", "finished" or a checkpoint to go on from.
    Raises UserError where going on would lose something, or mix two runs."""
    out, folder = Path(cfg.out), Path(cfg.out) / run_name(cfg)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there ({error.strerror}); choose another folder")
    if overwrite or not folder.exists():
        return "new"
    if not (folder / "ckpt.pt").exists():
        raise UserError(f"{folder} holds files, but no run of ours: choose another --name")
    saved = load_checkpoint(folder / "ckpt.pt")
    before, now = settings(saved["config"]), settings(asdict(cfg))
    differ = [f"{name} {before[name]} there, {now[name]} here" for name in now if before[name] != now[name]]
    if differ:
        raise UserError(f"{folder} holds a run with other settings ({'; '.join(differ[:3])}): choose another --name, or "
                        "--overwrite it")
    if (folder / "result.json").exists():
        return "finished"
    if not resume:
        raise UserError(f"{folder} holds an interrupted run: add --resume to go on, or --overwrite to start over")
    return saved


def introduce(cfg, task, stages, folder, device, why, model):
    """The first lines of a run."""
    count = lambda module: sum(p.numel() for p in module.parameters())
    changed = [f"{f.name}={getattr(cfg, f.name)}" for f in fields(Config) if getattr(cfg, f.name) != f.default]
    backend, because = resolve_backend()
    print(f"run     {folder}: {' '.join(changed) or 'every setting at its default'} (all of them: result.json)")
    print(f"task    {cfg.task}, chance {task.chance:.0%}; stages {' '.join(map(str, stages))} (commands x spacing), "
          + (f"{cfg.stage_samples:,} traces each" if cfg.stage_samples else f"each until {cfg.advance:.0%} of reveals are right"))
    print(f"device  {device} ({why}), {cfg.dtype}, {torch.get_num_threads()} threads; scan: {backend} ({because})")
    print(f"model   {count(model):,} parameters = embedding {count(model.embed):,} + {cfg.n_layer} blocks x "
          f"{count(model.blocks[0]):,} + head {count(model.head):,} + state head {count(model.to_state):,} + norm "
          f"{count(model.norm):,}")


def run(cfg, saved, argv):
    """One run, from nothing or from a checkpoint. -> its result, or None, and why `train` ended."""
    folder, (device, why_device), (task, stages) = Path(cfg.out) / run_name(cfg), pick_device(cfg.device), build_task(cfg)
    introduce(cfg, task, stages, folder, device, why_device, build_model(cfg, task, "cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    model, p, why = train(cfg, task, stages, folder, device, saved)
    if why == "interrupted":
        print(f"stopped after step {p['step']}, {p['samples']:,} traces; saved {folder / 'ckpt.pt'}\n"
              f"next    python train.py {shlex.join(argv)}" + " --resume" * ("--resume" not in argv))
        return None, why
    if why == "nan":
        print(f"train.py: the loss is not finite at step {p['step'] + 1}; {folder / 'ckpt.pt'} is the last good one. "
              f"Try a --learning-rate below {cfg.learning_rate:g}", file=sys.stderr)
        return None, why

    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss \
        * (1 if sys.platform == "darwin" else 1024)
    print(f"trained {p['samples']:,} traces in {p['seconds']:.1f} s, {p['data_seconds'] / p['seconds']:.1%} of it making data; "
          f"peak memory {memory / 2**30:.1f} GiB")
    result = {"model": cfg.model, "task": cfg.task, "params": sum(x.numel() for x in model.parameters()),
              "samples": p["samples"], "seconds": p["seconds"], "seed": cfg.seed, "stage_reached": str(stages[p["stage"]]),
              "passed": p["passed"], "eval": [], "config": asdict(cfg)}
    for stage in eval_stages(cfg, task, stages[-1]):
        result["eval"].append(evaluate(cfg, model, task, stage, device))
        print(show_eval(result["eval"][-1], task, stages))
    write_atomically(folder / "result.json", lambda f: f.write(json.dumps(result, indent=1).encode()))
    return result, why


def table(results):
    """The grid's last word: a line a run, what varied, and the accuracies."""
    config = [r["config"] for r in results]
    varied = [name for name in config[0] if len({str(c[name]) for c in config}) > 1 and name not in NOT_IDENTITY]
    stages = [f"{e['commands']}x{e['spacing']}" for e in results[0]["eval"]]
    lines = [varied + ["params", "traces", "seconds", "stage"] + stages]
    for r in results:
        lines.append([str(r["config"][name]) for name in varied] + [f"{r['params']:,}", f"{r['samples']:,}", f"{r['seconds']:.0f}",
                     r["stage_reached"]] + [f"{e['reveal_acc']:.1%}" for e in r["eval"]])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(word.rjust(w) for word, w in zip(line, widths)) for line in lines)


def evaluate_checkpoint(path, given):
    """--eval: held-out accuracy of a checkpoint, at its own stages and beyond, or at --eval-at."""
    cfg, task, stages, _ = load_model(path, "cpu")
    cfg = replace(cfg, **given)
    check(cfg)
    device, why = pick_device(cfg.device)
    model = load_model(path, device)[3]
    print(f"{path}: {cfg.model} on {cfg.task}, {cfg.eval_samples} held-out traces a line, on {device} ({why})")
    for stage in eval_stages(cfg, task, stages[-1]):
        print(show_eval(evaluate(cfg, model, task, stage, device), task, stages))


def main(argv):
    configs, args, given = parse(argv)
    if args.eval:
        evaluate_checkpoint(args.eval, given)
        return 0
    for cfg in configs:
        check(cfg)
    names = [run_name(cfg) for cfg in configs]
    if len(set(names)) < len(names):
        raise UserError("two runs of this grid would share a folder: leave --name out, or take repeated values out")
    plans = [look_at(cfg, args.resume or len(configs) > 1, args.overwrite) for cfg in configs]
    results, diverged = [], 0
    for i, (cfg, plan) in enumerate(zip(configs, plans)):
        folder = Path(cfg.out) / run_name(cfg)
        if len(configs) > 1:
            print(f"--- run {i + 1} of {len(configs)}: {folder}")
        if plan == "finished":
            print(f"{folder} is finished (--overwrite trains it again)")
            results.append(json.loads((folder / "result.json").read_text()))
            continue
        result, why = run(cfg, None if plan == "new" else plan, argv)
        if why == "interrupted":
            return 130
        diverged += why == "nan"
        results += [result] if result else []
    if len(configs) > 1 and results:
        print("--- all runs: reveal accuracy at commands x spacing\n" + table(results))
    elif results:
        checkpoint = folder / "ckpt.pt"
        print(f"files   {checkpoint}, metrics.csv, result.json\n"
              f"next    python plot.py positions {folder}\n"
              f"        python train.py --eval {checkpoint} --eval-at 1024x16")
    return 1 if diverged else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
