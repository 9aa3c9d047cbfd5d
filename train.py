"""
Train a model on a task, watch it learn, and test it far beyond what it saw. One flat loop in plain PyTorch.

    python train.py --model deltanet --task repl                   70 seconds on two CPU cores
    python train.py --model deltanet,transformer --seed 0,1,2      a grid: six runs; finished ones are skipped
    python train.py --eval out/deltanet-repl --eval-at 512x16      a trained model, on other stages
    python train.py --play out/deltanet-repl                       a trained model, and you type
    torchrun --nproc-per-node 2 train.py --seed 0,1,2,3            a grid, shared out among processes
    python train.py --help                                         every setting, explained

Loss: the mean over all next tokens, plus reveal_weight times the mean over answers (P1: reveals), plus
state_weight times the state head's (P2 section 4). P1 has only the first.
"State" has two meanings: what the program's memory holds, and what a model carries from token to token.

Curriculum: stages LxS, L commands with a print after every S-th (P1 section 4). A stage is passed when enough
answers of the last ten batches are right (--advance), or after a fixed number of traces (--stage-samples, as
in P1). With --carry n, the last stage's traces are n times as long and read in n pieces, one per update; the
model's state is carried on, without gradient. A piece counts as batch_size traces.

Learning rate: up in a straight line, constant, then down half a cosine over the last `cooldown` traces. The
fall starts when the last stage is passed (not with --until), or `cooldown` before the end.

A run leaves a folder with ckpt.pt, metrics.csv and result.json. Ctrl-C stops it; the same command then
continues it, bit for bit. P1 is arXiv 2602.14814; P2 is "Grounding Code Understanding in Step-by-Step
Execution".

On a first reading, begin with `train`, then `losses`, `Progress` and `stream`. All else is command line,
evaluation and files.
"""
import argparse
import csv
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import sys
import time
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import data
from data import ASKED, GROUPS, PAD, STATE, Batch, Stage, Tokenizer, parse_stages
from kernels import resolve_backend
from models import LM, MIXERS, tensors
from pfsa import MaybeSwaps, Trap, compare

TASKS = {**data.TASKS, "pfsa": MaybeSwaps, "trap": Trap}


@dataclass
class Config:
    # what to learn
    model: str = "deltanet"        # one of models.py's MIXERS; "a+b" alternates them, block by block
    task: str = "repl"             # one of the TASKS of data.py and pfsa.py
    n_vars: int = 5                # repl, listperm, pfsa: how many variables
    moves: str = "perm"            # repl: a command is a perm(utation) of all variables, or a swap of two
    group: str = "S5"              # group: one of data.py's GROUPS
    spell: int = 1                 # group: tokens per element
    digits: int = 2                # arith: digits per number
    trace_file: str = ""           # trace: a file from `data.py trace`; else random functions
    code: str = "all"              # trace: kinds of functions made at random, as ints+branches: see KINDS
    curriculum: str = "auto"       # stages "LxS LxS ...", see data.py; auto: the task's own
    # the model
    d_model: int = 64              # width; inside the MLP it is twice that
    params: int = 0                # not 0: set the MLP's width for about this many parameters
    n_layer: int = 1               # blocks; repl with up to 5 variables needs one, thanks to conv
    n_head: int = 1                # heads, of width d_model / n_head
    conv: int = 12                 # tokens that the short convolution in front of every mixer sees; 0: none
    beta_max: float = 2.0          # delta mixers and ssm: 2 gives eigenvalues in [-1, 1], 1 gives [0, 1]
    n_householder: int = 2         # deltaproduct: reflections per token
    # the loss
    reveal_weight: float = 1.0     # extra weight on answers, one token in 181 at 64x8
    states: str = "auto"           # a state head (linear, transformer, contrastive), text, none, or auto
    state_weight: float = 1.0      # on the state head's loss (pfsa, trap: on exact beliefs)
    state_layer: int = 0           # the state head reads after this many blocks; 0: after all
    # the optimiser
    optimizer: str = "muon"        # muon for the blocks' matrices and adamw for the rest, or adamw for all
    batch_size: int = 8            # traces per step; small, as the first stage takes many steps
    learning_rate: float = 6e-3    # the peak
    warmup: int = 320              # traces until the peak
    cooldown: int = 2560           # traces of the final decay; helps accuracy beyond the trained length
    # when to move on, when to stop
    advance: float = 0.9           # pass a stage at this accuracy, mean of the last 10 batches
    stage_samples: int = 0         # traces of each stage; 0: until --advance (pfsa, trap: 3000, trace: 4000)
    carry: int = 1                 # n: in the last stage, traces n times as long, read in n pieces
    max_samples: int = 100000      # stop after this many traces (batch_size per step), whatever the stage
    until: float = 0.0             # not 0: stop when 2 evals in a row (eval_at's first stage) reach this
    # held-out traces
    eval_at: str = "auto"          # stages to evaluate after training; auto: the last, and harder ones
    eval_samples: int = 64         # traces of each
    eval_every: int = 100          # steps between two evaluations, and two checkpoints, during training
    # the machine
    seed: int = 0                  # of weights and data; the same seed gives the same run
    device: str = "auto"           # auto, cuda, mps or cpu
    dtype: str = "fp32"            # fp32, or bf16 (autocast; a scan's state stays fp32)
    out: str = "out"               # where the runs' folders go


# {setting: its comment above, a line each}, for --help.
HELP = dict(re.findall(r"^    (\w+): \w+ = .*?# (.*)$", inspect.getsource(Config), re.M))
UNNAMED = ["model", "task", "device", "out"]      # not written as name=value in a folder's name
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHOICES = {"task": TASKS, "moves": ["swap", "perm"], "group": GROUPS, "dtype": DTYPES,
           "optimizer": ["muon", "adamw"],
           "states": ["auto", "none", "linear", "transformer", "contrastive", "text"],
           "device": ["auto", "cuda", "mps", "cpu"]}
MAY_BE_ZERO = ["params", "conv", "reveal_weight", "state_weight", "state_layer", "warmup", "cooldown",
               "stage_samples", "until", "seed"]
FOR_EVAL = ["eval_at", "eval_samples", "trace_file", "seed", "device", "dtype"]   # --eval may change them
SEGMENT = 2048                        # tokens evaluated at once; the state is carried to the next segment
COLUMNS = "step samples seconds stage lr loss next reveal state accuracy held_out".split()


# ----------------------------------------------------------------------------------------------------------
# The command line: Config's fields as flags, comma lists as grids

def parse_args(argv):
    """-> argparse's parser and arguments; those of Config are lists of values, or None."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                            # an error is one line
    for f in fields(Config):
        def values(text, kind=f.type):
            return [kind(word.strip()) for word in text.split(",")]
        values.__name__ = f.type.__name__                             # for argparse's "invalid int value"
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=values, metavar=f.type.__name__.upper(),
                            help=f"{HELP[f.name]} [{f.default}]".replace("%", "%%"))
    parser.add_argument("--overwrite", action="store_true", help="start again where a run's folder exists")
    parser.add_argument("--eval", metavar="RUN", help="evaluate a run's folder or checkpoint, train nothing")
    parser.add_argument("--play", metavar="RUN", help="type Python, and see what a repl model expects")
    return parser, parser.parse_args(argv)


def grid(args):
    """-> the Configs that the comma lists span."""
    axes = {f.name: getattr(args, f.name) for f in fields(Config) if getattr(args, f.name) is not None}
    return [Config(**dict(zip(axes, cell))) for cell in itertools.product(*axes.values())]


def check(cfg):
    """Raise ValueError if a run cannot work: tries a trace per stage, and a model without numbers."""
    for name, value in asdict(cfg).items():
        flag, may_be_zero = f"--{name.replace('_', '-')} {value}", name in MAY_BE_ZERO
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"{flag}: choose one of {', '.join(CHOICES[name])}")
        if not isinstance(value, str) and not (0 < value < math.inf or may_be_zero and value == 0):
            raise ValueError(f"{flag}: give a number above 0{', or 0' if may_be_zero else ''}")
    mixers = cfg.model.split("+")
    if not set(mixers) <= set(MIXERS):
        raise ValueError(f"--model {cfg.model}: choose from {', '.join(MIXERS)}, or join some by +")
    if cfg.n_layer < len(mixers):
        raise ValueError(f"--model {cfg.model} alternates mixers: give --n-layer {len(mixers)} or more")
    if cfg.d_model % (2 * cfg.n_head):
        raise ValueError(f"--d-model {cfg.d_model}: give a multiple of twice --n-head {cfg.n_head}")
    if cfg.beta_max > 2:
        raise ValueError(f"--beta-max {cfg.beta_max:g}: above 2, eigenvalues leave [-1, 1]: states explode")
    if max(cfg.advance, cfg.until) > 1:
        raise ValueError("--advance and --until are accuracies: give at most 1")
    if cfg.state_layer > cfg.n_layer:
        raise ValueError(f"--state-layer {cfg.state_layer}: give at most --n-layer {cfg.n_layer}")
    pick_device(cfg)
    task, stages = build_task(cfg)
    total = total_samples(cfg, task, stages)
    if total > cfg.max_samples:
        raise ValueError(f"--stage-samples times {len(stages)} stages is {total}: raise --max-samples")
    if cfg.warmup + cfg.cooldown > total:
        raise ValueError(f"--warmup plus --cooldown is more than the run's {total} traces: lower them")
    if cfg.carry > 1 and (cfg.task not in ("repl", "group") or task.states not in ("linear", "none")):
        raise ValueError("--carry is for --task repl and group, and for --states linear or none")
    for stage in stages:
        task.batch(cfg.seed, "train", stage, 0, 1)
    for stage in stages + eval_stages(cfg, task, stages):
        task.batch(cfg.seed, "test", stage, 0, 1)
    build_model(cfg, task, "meta")


def build_task(cfg):
    """-> task, and the stages of its curriculum."""
    kind = TASKS[cfg.task]
    task = kind(states=cfg.states, **{name: getattr(cfg, name) for name in kind.settings})
    stages = parse_stages(task.curriculum if cfg.curriculum == "auto" else cfg.curriculum)
    for stage in stages:
        task.check(stage)
    return task, stages


def eval_stages(cfg, task, stages):
    found = task.beyond(stages[-1]) if cfg.eval_at == "auto" else parse_stages(cfg.eval_at)
    for stage in found:
        task.check(stage)
    return found


def total_samples(cfg, task, stages):
    """The most traces that a run reads."""
    of_each = cfg.stage_samples or task.stage_samples
    return of_each * len(stages) if of_each else cfg.max_samples


def pick_device(cfg):
    """-> torch.device. Under torchrun, processes take GPUs in turn."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(kind for kind in have if have[kind]) if cfg.device == "auto" else cfg.device
    if not have[name]:
        raise ValueError(f"--device {name}: this machine, or this torch, has none; use --device auto")
    if name == "cuda":
        return torch.device(name, int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device(name)


def run_folder(cfg):
    """out/model-task-setting=value-...: whatever is not at its default."""
    changed = [f"{f.name}={getattr(cfg, f.name)}" for f in fields(Config)
               if f.name not in UNNAMED and getattr(cfg, f.name) != f.default]
    name = re.sub(r"[^\w=.+-]+", "_", "-".join([cfg.model, cfg.task, *changed]))
    if len(name) > 200:                                               # file systems allow 255
        name = f"{name[:191]}-{zlib.crc32(name.encode()):08x}"
    return Path(cfg.out) / name


# ----------------------------------------------------------------------------------------------------------
# Model, loss, accuracy

def count(module):
    return sum(p.numel() for p in module.parameters())


def build_model(cfg, task, device):
    """A run's LM, with initial weights from its seed. On "meta" it has shapes and no numbers."""
    shape = SimpleNamespace(**{**asdict(cfg), "states": task.states, "d_mlp": 2 * cfg.d_model})
    sizes = len(task.tokenizer), task.n_slots, task.n_classes
    if cfg.params:
        shape.d_mlp = mlp_width(shape, sizes)
    torch.manual_seed(cfg.seed)                                       # torch draws nothing else at random
    with torch.device("meta" if device == "meta" else "cpu"):
        return LM(shape, *sizes).to(device)


def mlp_width(shape, sizes):
    """The MLP's width, a multiple of 8, for about shape.params parameters, state head not counted."""
    def size(width):
        with torch.device("meta"):
            return count(LM(SimpleNamespace(**{**vars(shape), "d_mlp": width, "states": "none"}), *sizes))
    least, slope = size(8), size(16) - size(8)
    width = 8 + 8 * max(0, round((shape.params - least) / slope))
    if abs(size(width) - shape.params) > 0.1 * shape.params:
        raise ValueError(f"--params {shape.params}: {shape.model} of this size has at least {least}; "
                         "change --d-model or --n-layer")
    return width


def autocast(cfg, device):
    return torch.autocast(device.type, torch.bfloat16) if cfg.dtype == "bf16" else nullcontext()


def to_write(batch):
    """(B, T) bool: the targets that are part of an answer or of a state in the text."""
    return batch.asked | batch.state_in_text


def right_tokens(batch, logits):
    """logits (N, vocabulary) at the N targets `to_write` -> (B, T) bool, which of them are right."""
    here, right = to_write(batch), torch.zeros_like(batch.asked)
    right[here] = logits.argmax(-1) == batch.target[here]
    return right


def answers(task, batch, right):
    """right tokens (B, T) bool -> right answers (B, R). With states in the text, all states before
    an answer must be right, too: else a model could copy the answer from a true state."""
    after_error = (batch.state_in_text & ~right).cumsum(1) > 0
    right = right & ~after_error
    if task.whole:                                                    # all tokens that are asked are right
        return (right | ~batch.asked).all(1, keepdim=True)
    return right[batch.asked].view(len(right), -1)


def losses(task, model, batch, state=None):
    """-> 1. {"next", "reveal", "state"}: mean cross-entropies in nats; 2. which answers are right (B, R), R
    per trace; 3. the model's new state."""
    hidden, h, state = model(batch.tokens, state)
    logits = model.head(hidden).float()                               # (B, T, vocabulary)
    nats = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="none", ignore_index=PAD)
    nats = nats.view_as(batch.target)
    terms = {"next": nats.sum() / (batch.target != PAD).sum()}
    if batch.asked.any():                                 # a piece of a long trace may ask nothing
        terms["reveal"] = nats[batch.asked].mean()
    if task.states in ("linear", "transformer", "contrastive"):
        terms["state"] = model.to_state.loss(model, h, batch)
    return terms, answers(task, batch, right_tokens(batch, logits[to_write(batch)])), state


# ----------------------------------------------------------------------------------------------------------
# One run

class Progress:
    """Where a run is in its curriculum. A checkpoint holds all of it, except cfg, stages and fixed."""

    def __init__(self, cfg, task, stages):
        self.cfg, self.stages, self.fixed = cfg, stages, cfg.stage_samples or task.stage_samples
        self.step = self.samples = 0
        self.seconds = self.data_seconds = 0.0
        self.end = total_samples(cfg, task, stages)                   # traces after which the run ends
        self.number = 0                                               # of the stage
        self.began = 0                                                # the step at which it began
        self.recent = []                                              # accuracy of the last 10 batches
        self.passed = []                                              # stages, and when
        self.held_out = []                                            # [traces, stage, accuracy], ...
        self.until = None                                             # traces when --until was reached
        self.state = None                                             # with --carry: the model's

    def saved(self):
        return {name: x for name, x in vars(self).items() if name not in ("cfg", "stages", "fixed")}

    @property
    def stage(self):
        return self.stages[self.number]

    @property
    def last(self):
        return self.number == len(self.stages) - 1

    def learning_rate(self):
        """The schedule at the top of this file."""
        cfg, fall = self.cfg, self.end - self.cfg.cooldown
        up = min(1, (self.samples + cfg.batch_size) / max(cfg.warmup, cfg.batch_size))
        down = min(1, max(0, self.samples - fall) / max(cfg.cooldown, 1))
        return cfg.learning_rate * up * (1 + math.cos(math.pi * down)) / 2

    def move_on(self, accuracy):
        """Called after each step. -> whether the run passed a stage."""
        self.recent = [x for x in [*self.recent, accuracy] if not math.isnan(x)][-10:]
        mean = sum(self.recent) / max(1, len(self.recent))
        if self.fixed:
            enough = self.samples >= self.fixed * (self.number + 1)
        else:
            enough = len(self.recent) == 10 and mean >= self.cfg.advance
        noted = len(self.passed) > self.number                        # the last stage was passed before
        if not enough or noted:
            return False
        self.passed.append({"stage": str(self.stage), "accuracy": mean, "samples": self.samples,
                            "steps": self.step, "seconds": self.seconds})
        if not self.last:
            self.number, self.began, self.recent = self.number + 1, self.step, []
        elif not self.fixed and not self.cfg.until:
            self.end = min(self.end, self.samples + self.cfg.cooldown)
        return True

    def note_until(self):
        """If held-out accuracy reached --until twice in a row, note after how many traces: the run ends."""
        began = self.began * self.cfg.batch_size
        above = [samples for samples, stage, accuracy in self.held_out[-2:]
                 if self.last and samples > began and accuracy >= self.cfg.until]
        if self.cfg.until and len(above) == 2:
            self.until = above[0]


class Batches(Dataset):
    """Training batches by their number, so that DataLoader's workers can make them."""

    def __init__(self, cfg, task, stage):
        self.cfg, self.task, self.stage = cfg, task, stage

    def __getitem__(self, t):
        return self.task.batch(self.cfg.seed, "train", self.stage, t, self.cfg.batch_size)


def stream(cfg, task, at, device):
    """Yield (number, batch) forever: batches of the current stage, from at.step on. With --carry, a trace
    comes in pieces: number is the piece's place in its trace, from 0."""
    parts = cfg.carry if at.last else 1
    turn = (at.step - at.began) % parts
    stage = at.stage._replace(length=at.stage.length * parts)
    loader = DataLoader(Batches(cfg, task, stage), batch_size=None,
                        sampler=itertools.count(at.step - turn, parts),
                        num_workers=2 if device.type == "cuda" else 0)    # so that a GPU can be busy
    for batch in loader:
        for number, piece in list(enumerate(cut(batch, parts)))[turn:]:
            yield number, to_device(piece, device)
        turn = 0


def cut(batch, parts):
    """A batch -> its pieces in time, equally long, except that the first one takes the remainder."""
    if parts == 1:                                        # state_tokens has no time axis
        return [batch]
    T = batch.tokens.shape[1]
    sizes = [T - (parts - 1) * (T // parts)] + [T // parts] * (parts - 1)
    pieces = [[None] * parts if x is None else x.split(sizes, 1) for x in batch]
    return [Batch(*piece) for piece in zip(*pieces)]


def to_device(batch, device):
    return Batch(*(None if x is None else torch.as_tensor(x).to(device) for x in batch))


def detached(state, device):
    """A model's state, nested lists and tuples of tensors, without its gradient."""
    if isinstance(state, torch.Tensor):
        return state.detach().to(device)
    return type(state)(detached(part, device) for part in state)


@contextmanager
def ctrl_c():
    """Ctrl-C appends to a list instead of raising, so that a step can finish."""
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append("Ctrl-C"))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def make_optimizers(cfg, model):
    """-> [AdamW, Muon]. Muon (torch.optim.Muon) has the matrices in blocks: it makes a step's singular values
    about equal, and the step as large as AdamW's, so one learning rate serves both."""
    matrices, rest = [], []
    for name, p in model.named_parameters():
        small = re.search("conv|start|to_(beta|gate|forget|angle)", name)
        is_matrix = "blocks." in name and p.ndim == 2 and not small
        if is_matrix and cfg.optimizer == "muon":
            matrices.append(p)
        else:
            rest.append(p)
    optimizers = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def train(cfg, task, stages, model, folder, saved=None):
    """Train, from the start or from the checkpoint `saved`; write ckpt.pt and metrics.csv into `folder`.
    -> Progress, and why it ended: "done", "interrupted" or "nan"."""
    device, final_stage = next(model.parameters()).device, eval_stages(cfg, task, stages)[0]
    at = Progress(cfg, task, stages)                                  # where the run is
    optimizers = make_optimizers(cfg, model)
    if saved:
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        vars(at).update(saved["progress"])
    file, rows = open_metrics(folder / "metrics.csv", at.step)
    weights = {"next": 1, "reveal": cfg.reveal_weight, "state": cfg.state_weight}
    started, batches, why = time.perf_counter() - at.seconds, None, "done"

    def save():
        file.flush()
        save_checkpoint(folder / "ckpt.pt", cfg, task, model, optimizers, at)

    save()
    bar = tqdm(total=at.end, initial=at.samples, unit=" traces", disable=None)
    with file, bar, ctrl_c() as interrupts:
        while at.samples < at.end and at.until is None:
            if interrupts:
                why = "interrupted"
                break
            lr = at.learning_rate()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr

            began = time.perf_counter()
            batches = batches or stream(cfg, task, at, device)
            piece, batch = next(batches)
            at.data_seconds += time.perf_counter() - began

            state = detached(at.state, device) if piece > 0 else None     # the first starts from nothing
            with autocast(cfg, device):
                terms, right, state = losses(task, model, batch, state)
            loss = sum(weights[name] * term for name, term in terms.items())
            model.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(loss.item() + norm.item()):          # before the step: weights are good
                why = "nan"
                break
            for optimizer in optimizers:
                optimizer.step()

            stage, accuracy = at.stage, right.float().mean().item()      # nan: nothing was asked
            at.step += 1
            at.samples += cfg.batch_size
            at.seconds = time.perf_counter() - started
            at.state = detached(state, device) if cfg.carry > 1 and at.last else None
            row = {"step": at.step, "samples": at.samples, "seconds": at.seconds, "stage": stage, "lr": lr,
                   "loss": loss.item(), "accuracy": accuracy}
            row.update((name, term.item()) for name, term in terms.items())
            bar.update(cfg.batch_size)
            bar.set_postfix(stage=stage, loss=f"{loss.item():.3f}", right=f"{accuracy:.0%}", refresh=False)

            if at.step % cfg.eval_every == 0:
                held_out_at = final_stage if at.last else stage
                row["held_out"] = evaluate(model, task, held_out_at, cfg)["accuracy"]
                at.held_out.append([at.samples, str(held_out_at), row["held_out"]])
                tqdm.write(f"step {at.step}: {at.samples:,} traces, {at.seconds:.0f} s, stage {stage}, "
                           f"loss {row['loss']:.3f}, {accuracy:.1%} right, held out {row['held_out']:.1%}")
            rows.writerow(row)
            if at.move_on(accuracy):
                batches, bar.total = None, at.end                     # None: start the next stage's stream
                tqdm.write(f"stage {stage} passed after {at.samples:,} traces, {at.seconds:.0f} s: "
                           f"{at.passed[-1]['accuracy']:.1%} right")
            at.note_until()
            if at.step % cfg.eval_every == 0:
                save()
        if why == "done":
            optimizers.clear()                            # so that a finished run's checkpoint is small
        if why != "nan":
            save()
    return at, why


def introduce(cfg, task, stages, model):
    """Print the settings."""
    device, dtype, width = next(model.parameters()).device, DTYPES[cfg.dtype], cfg.d_model // cfg.n_head
    backend, why = resolve_backend("auto", device, dtype, width, width)
    print(f"run     {run_folder(cfg)}")
    print(f"task    {cfg.task}, stages {' '.join(map(str, stages))}; chance {task.chance(stages[-1]):.1%}")
    print(f"model   {cfg.model}, {count(model):,} parameters; states told: {task.states}")
    print(f"device  {device}, {cfg.dtype}, {torch.get_num_threads()} threads; scan: {backend} ({why})")


def run(cfg, saved):
    """One run of a grid. -> its result (None if not done), and why it ended."""
    folder = run_folder(cfg)
    task, stages = build_task(cfg)
    if saved:
        task.tokenizer = Tokenizer(saved["lexemes"])
    model = build_model(cfg, task, pick_device(cfg))
    folder.mkdir(parents=True, exist_ok=True)
    introduce(cfg, task, stages, model)
    (folder / "result.json").unlink(missing_ok=True)
    at, why = train(cfg, task, stages, model, folder, saved)
    share = at.data_seconds / max(at.seconds, 1e-9)
    print(f"trained {at.samples:,} traces, {at.step:,} steps, {at.seconds:.1f} s, {share:.1%} to make traces")
    if why != "done":
        return None, why
    result = {"model": cfg.model, "task": cfg.task, "seed": cfg.seed, "params": count(model),
              "state_size": state_size(model, task, stages[-1]),
              "samples": at.samples, "steps": at.step, "seconds": at.seconds, "data_seconds": at.data_seconds,
              "stage_reached": str(at.stage), "passed": at.passed, "held_out": at.held_out, "until": at.until,
              "eval": [], "torch": torch.__version__, "threads": torch.get_num_threads(),
              "config": asdict(cfg)}
    for stage in eval_stages(cfg, task, stages):
        result["eval"].append(evaluate(model, task, stage, cfg))
        print(show(result["eval"][-1], task))
    line = json.dumps(result) + "\n"
    write_atomically(folder / "result.json", lambda file: file.write(line.encode()))
    return result, why


# ----------------------------------------------------------------------------------------------------------
# Evaluation

@torch.no_grad()
def state_size(model, task, stage):
    """How many numbers a model's state has at a trace's end (an attention's cache grows)."""
    tokens = torch.as_tensor(task.batch(0, "test", stage, 0, 1).tokens)
    _, _, state = model(tokens.to(next(model.parameters()).device))
    return sum(x.numel() for x in tensors(state))


@lru_cache(maxsize=64)
def held_out_batch(task, seed, stage, t, size):
    """Cached: the same test traces are read many times, and random functions are slow to make."""
    return task.batch(seed, "test", stage, t, size)


def held_out_batches(task, stage, cfg, device):
    """cfg.eval_samples test traces of a stage, in batches on the device."""
    for t, first in enumerate(range(0, cfg.eval_samples, cfg.batch_size)):
        size = min(cfg.batch_size, cfg.eval_samples - first)
        yield to_device(held_out_batch(task, cfg.seed, stage, t, size), device)


@torch.no_grad()
def read(model, tokens, places, cfg):
    """Read tokens (B, T) -> hidden vectors (N, D) where places (B, T), sorted by trace. Memory does not
    grow with the length, except for an attention's cache."""
    state, found = None, [[] for _ in tokens]
    with autocast(cfg, tokens.device):
        for piece, here in zip(tokens.split(SEGMENT, 1), places.split(SEGMENT, 1)):
            hidden, _, state = model(piece, state)
            for b in range(len(tokens)):
                found[b].append(hidden[b][here[b]])
    return torch.cat([part for trace in found for part in trace])


def evaluate(model, task, stage, cfg):
    """Accuracy on held-out traces of a stage. The model reads the true lines. With states in the text, it
    writes the states itself, and reads on from what it wrote.

    -> {"stage", "accuracy", "final": of a trace's last answer, "by_answer"}. For hidden branches also, in
    nats per answer: "kl", from the exact predictive to the model's; "final_kl", of the last answer; "loss",
    of the sampled answers; "floor", the loss of the exact predictive, the least that any model can have.
    With states in the text also: after true text only, "next_state", accuracy of whole states,
    "given_states", of answers; and "traces": per trace [states, states before the first wrong one, accuracy
    with its own states]."""
    rows, nats, given, states, to_repeat = [], [], [], [], []
    for batch in held_out_batches(task, stage, cfg, next(model.parameters()).device):
        hidden = read(model, batch.tokens, to_write(batch), cfg)
        with torch.no_grad(), autocast(cfg, hidden.device):
            logits = model.head(hidden)
        right = right_tokens(batch, logits)
        rows.extend(answers(task, batch, right))
        if task.states == "text":
            given.extend(answers(task, batch, right | batch.state_in_text))
            states += map(state_by_state, batch.state_in_text.tolist(), right.tolist())
            fields_needed = batch.tokens, batch.target, batch.asked, batch.state_in_text
            to_repeat += zip(*(x.tolist() for x in fields_needed))
        if batch.predictive is not None:
            target = batch.target[batch.asked]
            nats.append(compare(logits, target, batch.predictive[batch.asked]).view(len(batch.asked), -1, 3))
    with_error = [i for i, trace in enumerate(states) if not all(trace)]
    for i, right in zip(with_error, on_its_own(model, task, [to_repeat[i] for i in with_error], cfg)):
        rows[i] = right
    rows = torch.stack(rows).double()                                 # (traces, answers)
    by_answer = rows.mean(0)
    row = {"stage": str(stage), "accuracy": by_answer.mean().item(), "final": by_answer[-1].item(),
           "by_answer": by_answer.tolist()}
    if given:
        first_right = [sum(itertools.takewhile(bool, trace)) for trace in states]    # before the first error
        row["next_state"] = sum(map(sum, states)) / sum(map(len, states))
        row["given_states"] = torch.stack(given).double().mean().item()
        row["traces"] = [[len(trace), *others]
                         for trace, *others in zip(states, first_right, rows.mean(1).tolist())]
    if nats:
        kl, loss, floor = torch.cat(nats).unbind(-1)                  # each (traces, answers)
        row.update(kl=kl.mean().item(), final_kl=kl[:, -1].mean().item(), loss=loss.mean().item(),
                   floor=floor.mean().item())
    return row


def state_by_state(is_state, right):
    """is_state, right: T bools each, of a trace's targets -> [whether each state in its text is right]."""
    found = []
    for t, here in enumerate(is_state):
        if here and not is_state[t - 1]:
            found.append(True)
        if here and not right[t]:
            found[-1] = False
    return found


@torch.no_grad()
def on_its_own(model, task, traces, cfg):
    """Read the true lines of traces, but write their states and answers: greedily, token by token, all
    traces at once. traces: [tokens, target, asked, state_in_text] each, as lists. -> [right (R,) bool]."""
    device = next(model.parameters()).device
    found, state = [[] for _ in traces], None
    writers = [write_along(task, *trace, right) for trace, right in zip(traces, found)]
    tokens = [next(writer) for writer in writers]
    while any(token is not None for token in tokens):
        with autocast(cfg, device):
            here = torch.tensor([[token or PAD] for token in tokens], device=device)
            hidden, _, state = model(here, state)
            guesses = model.head(hidden[:, -1]).argmax(-1).tolist()
        tokens = [writer.send(guess) for writer, guess in zip(writers, guesses)]
    return [torch.tensor(right, device=device) for right in found]


def write_along(task, tokens, target, asked, is_state, right):
    """A generator that walks through one trace. It yields the next token to read; send(guess) gives it the
    model's prediction of the token after that. For states, and answers that end in a newline, it yields
    guesses instead, up to a newline or twice the true length. It appends to `right` whether each answer was
    right. After the end it yields None."""
    newlines = task.tokenizer.newlines
    t = 0
    while t < len(tokens) and tokens[t] != PAD:
        guess = yield tokens[t]
        if not (asked[t] or is_state[t]):
            t += 1
            continue
        end = (asked if asked[t] else is_state).index(False, t)
        truth, said = target[t:end], [guess]
        limit = 2 * len(truth) if truth[-1] in newlines else 1
        while said[-1] not in newlines and len(said) < limit:
            guess = yield said[-1]
            said.append(guess)
        if asked[t]:
            right.append(said == truth)
        t = end                                           # read the true newline, or the true answer, next
    while True:
        yield None


def show(row, task):
    """One line about a row of `evaluate`."""
    [stage] = parse_stages(row["stage"])
    if "kl" in row:
        return (f"eval    {stage}: KL {row['kl']:.4f} nats per answer (0 is perfect), the last "
                f"{row['final_kl']:.4f}; loss {row['loss']:.3f}, of exact beliefs {row['floor']:.3f}")
    text = f"eval    {stage}: {row['accuracy']:.2%} right, the last answer {row['final']:.2%}"
    text += f" (chance {task.chance(stage):.1%})"
    if "next_state" in row:
        text += f"; given true states: {row['given_states']:.2%}, next state {row['next_state']:.2%}"
    return text


# ----------------------------------------------------------------------------------------------------------
# The files of a run

FORMAT = "state tracking 2"


def write_atomically(path, write):
    """Write to a temporary file, then rename it: after a crash, path is the whole old or new file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(path, cfg, task, model, optimizers, at):
    checkpoint = {"format": FORMAT, "config": asdict(cfg), "lexemes": list(task.tokenizer.lexemes),
                  "progress": at.saved(), "model": model.state_dict(),
                  "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    write_atomically(path, lambda file: torch.save(checkpoint, file))


def load_checkpoint(path):
    """-> the saved dict, on the CPU. `path` is a ckpt.pt or the folder that holds it."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        ours = checkpoint["format"] == FORMAT and set(checkpoint["config"]) <= set(HELP)
    except Exception:                                     # a broken file can raise anything
        ours = False
    if not ours:
        raise ValueError(f"{path}: cut short, or no checkpoint of this version of train.py; give another")
    return checkpoint


def load_model(path, device="auto", **changes):
    """-> cfg, task, stages and model of a run's folder or checkpoint, some settings changed."""
    checkpoint = load_checkpoint(path)
    cfg = replace(Config(**checkpoint["config"]), device=device, **changes)
    check(cfg)
    task, stages = build_task(cfg)
    task.tokenizer = Tokenizer(checkpoint["lexemes"])
    model = build_model(cfg, task, pick_device(cfg))
    model.load_state_dict(checkpoint["model"])
    return cfg, task, stages, model


def find(cfg, overwrite):
    """What is in a run's folder? -> "new", "finished", or the checkpoint to go on from."""
    folder = run_folder(cfg)
    if overwrite or not folder.exists():
        return "new"
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {"metrics.csv", "ckpt.pt.tmp"}:
        return "new"                                      # killed before its first checkpoint
    if not (folder / "ckpt.pt").exists():
        raise ValueError(f"{folder} exists and holds no run: choose another --out, or --overwrite")
    saved = load_checkpoint(folder)
    settings = asdict(Config(**saved["config"]))          # newer settings get defaults
    if any(settings[name] != value for name, value in asdict(cfg).items() if name not in UNNAMED):
        raise ValueError(f"{folder} holds a run with other settings: choose another --out, or --overwrite")
    return "finished" if (folder / "result.json").exists() else saved


def open_metrics(path, steps):
    """-> metrics.csv, open, and its csv writer. Rows later than the checkpoint's step are dropped."""
    header = ",".join(COLUMNS) + "\n"
    lines = path.read_text().splitlines(keepends=True) if steps else []
    kept = "".join([header, *lines[1:steps + 1]])
    write_atomically(path, lambda file: file.write(kept.encode()))
    file = open(path, "a", newline="")
    return file, csv.DictWriter(file, COLUMNS, lineterminator="\n")


# ----------------------------------------------------------------------------------------------------------
# All runs

def table(results):
    """Print a line per run: its cost, and the accuracy, or the KL, at each evaluated stage."""
    stages = list(dict.fromkeys(row["stage"] for result in results for row in result["eval"]))
    print("  traces   steps seconds reached" + "".join(f"{stage:>14s}" for stage in stages) + "  run")
    for result in results:
        scores = {row["stage"]: f"KL {row['kl']:.4f}" if "kl" in row else f"{row['accuracy']:.1%}"
                  for row in result["eval"]}
        cells = "".join(f"{scores.get(stage, ''):>14s}" for stage in stages)
        samples, steps, seconds = result["samples"], result["steps"], result["seconds"]
        print(f"{samples:8,}{steps:8,}{seconds:8.0f} {result['stage_reached']:>7s}{cells}  "
              f"{run_folder(Config(**result['config']))}")


class Player:
    """A repl model at a prompt: it reads lines, and says what comes next."""

    def __init__(self, path, device):
        self.cfg, self.task, _, self.model = load_model(path, device)
        if self.cfg.task != "repl":
            raise ValueError(f"--play {path}: a model of {self.cfg.task}; give one trained on repl")
        self.device, self.state = next(self.model.parameters()).device, None

    @torch.no_grad()
    def next(self, tokens):
        """Read tokens. -> the token that the model expects next, and its probability."""
        with autocast(self.cfg, self.device):
            hidden, _, self.state = self.model(torch.tensor([tokens], device=self.device), self.state)
            probabilities = self.model.head(hidden[0, -1]).float().softmax(-1)
        token = probabilities.argmax().item()
        return token, probabilities[token].item()

    def say(self, line):
        """Read a line. If it has an answer or a state, print the model's prediction of it, and the truth.
        It reads on after the true answer, or after the state that it predicted."""
        (tokens, marks, _), newlines = self.task.encode([line]), self.task.tokenizer.newlines
        if not any(marks):
            self.next(tokens)
            return
        start = marks.index(ASKED if ASKED in marks else STATE)
        token, probability = self.next(tokens[:start])
        said = [token]
        if ASKED in marks:
            self.next(tokens[start:])
        else:
            while said[-1] not in newlines and len(said) < 2 * marks.count(STATE):
                token, more = self.next([token])
                said.append(token)
                probability *= more
            self.next(tokens[-1:])
        decode, prompt = self.task.tokenizer.decode, self.task.prompt
        model, python = (decode(x).strip().removeprefix(prompt) for x in (tokens[:start] + said, tokens))
        mark = "" if model == python else "  <-- the model is wrong"
        print(f"model:  {model} ({probability:.1%})")
        print(f"python: {python}{mark}")


def play(path, device):
    """Execute the lines that you type, and say what the model expects each print to show.
    With states in the text the model also writes what memory holds, and reads on from what it wrote."""
    player, memory = Player(path, device), {}
    task, cfg = player.task, player.cfg
    for line in data.run(task.start(random.Random(cfg.seed), memory), memory, task.prompt, task.see):
        print(line.text, end="")
        player.say(line)
    prompt = task.prompt if sys.stdin.isatty() else ""
    while True:
        try:
            source = task.line(input(prompt))
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        except ValueError as error:
            print(error)
            continue
        for line in data.run([source], memory, task.prompt, task.see):
            player.say(line)


def evaluate_run(args, given):
    """--eval: evaluate a trained model on other stages."""
    cfg, task, stages, model = load_model(args.eval, **{"eval_at": "auto", **given})
    print(f"model   {args.eval}: {cfg.model} on {cfg.task}, {cfg.eval_samples} traces per line")
    for stage in eval_stages(cfg, task, stages):
        print(show(evaluate(model, task, stage, cfg), task))


def train_all(configs, overwrite, command):
    """Train what is not finished, print a table of all. -> exit code."""
    for cfg in configs:
        check(cfg)
    if len({run_folder(cfg) for cfg in configs}) < len(configs):
        raise ValueError("two runs of this grid are the same: repeat no value")
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))    # by torchrun
    ours = list(enumerate(configs, 1))[rank::processes]
    plans = [(number, cfg, find(cfg, overwrite)) for number, cfg in ours]
    results, code = [], 0
    for number, cfg, plan in plans:
        if len(configs) > 1:
            print(f"--- run {number} of {len(configs)}")
        if plan == "finished":
            print(f"{run_folder(cfg)} is finished; --overwrite would train it again")
            results.append(json.loads((run_folder(cfg) / "result.json").read_text()))
            continue
        result, why = run(cfg, None if plan == "new" else plan)
        if why == "interrupted":
            print(f"saved   {run_folder(cfg)}; to go on: python train.py {command}")
            return 130
        if why == "nan":
            print(f"train.py: loss or gradient not finite; the last good checkpoint is kept: try "
                  f"--learning-rate {cfg.learning_rate / 3:.1g}", file=sys.stderr)
            code = 1
            continue
        results.append(result)
    if results:
        table(results)
        print(f"next    python plot.py curve {run_folder(Config(**results[0]['config']))}")
    return code


def main(argv):
    parser, args = parse_args(argv)
    given = {f.name: getattr(args, f.name)[0] for f in fields(Config) if getattr(args, f.name)}
    try:
        allowed = ["device"] if args.play else FOR_EVAL
        if (args.play or args.eval) and (set(given) - set(allowed) or len(grid(args)) > 1):
            raise ValueError(f"the run's settings hold: give only {', '.join(allowed)}, one value each")
        if args.play:
            play(args.play, given.get("device", "auto"))
        elif args.eval:
            evaluate_run(args, given)
        else:
            command = shlex.join(word for word in argv if word != "--overwrite")
            return train_all(grid(args), args.overwrite, command)
    except BrokenPipeError:                                           # as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
