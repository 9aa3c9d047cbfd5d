"""
Train a model on a task, watch it learn, and test it far beyond what it saw. One flat loop in plain PyTorch.

    python train.py --model deltanet --task repl                   a minute on two CPU cores
    python train.py --model deltanet,transformer --seed 0,1,2      a comma list is a grid, here of six runs
    python train.py --eval out/deltanet-repl --eval-at 512x16      a trained model, on other stages
    python train.py --play out/deltanet-repl                       a trained model, and you type
    torchrun --nproc-per-node 2 train.py --seed 0,1,2,3            a grid, shared out among processes
    python train.py --help                                         every setting, explained

Loss: the mean cross-entropy of all next tokens, plus reveal_weight times the mean over the answers, plus the loss of
the state head (P2 section 4). P1 has only the first term. An *answer* is a printed value; P1 calls it a reveal. A
*state head* is an extra output that predicts what all variables hold at the end of a line. "State" has two meanings:
what the program's memory holds, and what a model carries from token to token.

Curriculum: a list of stages. A *trace* is a program together with what it prints. The traces of a stage LxS have L
commands, with a print after every S-th command (P1 section 4). A stage is passed when the mean accuracy on answers
over the last ten batches reaches --advance, or after a number of traces (--stage-samples).

Learning rate: a linear warmup, then a constant rate, then a decay to 0 along half a cosine, over the last
`cooldown` traces (at most a third of --max-samples). The decay starts when the last stage is passed, or `cooldown`
traces before --max-samples, whichever comes first. The run finishes when the decay does.

The settings of a run name its folder, which holds ckpt.pt and, once the run is finished, result.json. If a run is
stopped, the same command resumes it from ckpt.pt. A batch depends only on the seed, the stage and the batch's
number, so a resumed run has the same result as an uninterrupted one. P1 is arXiv 2602.14814; P2 is "Grounding Code
Understanding in Step-by-Step Execution".

Read `run` first, then `losses` and `evaluate`. From Python, start with `load`.
"""
import argparse
import ast
import contextlib
import copy
import ctypes
import difflib
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

# Two settings from before torch is loaded. With a spin count of 5000, a waiting thread of GNU OpenMP soon gives up its
# core. And glibc keeps freed memory: to return a 12 MB tensor to the system and ask for it again costs page faults.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
if platform.system() == "Linux":
    with contextlib.suppress(OSError, AttributeError):               # another C library has no mallopt
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-1, 2 ** 30)                                          # M_TRIM_THRESHOLD
        mallopt(-3, 2 ** 25)                                          # M_MMAP_THRESHOLD; older ones take no more
import torch
import torch.nn.functional as F
from tqdm import tqdm

import data
from data import PAD, BadInput, Batch, Tokenizer, parse_stages
from kernels import resolve_backend
from models import LM, MIXERS, count, in_pieces, make_optimizers
from pfsa import MaybeSwaps, against_exact

TASKS = {**data.TASKS, "pfsa": MaybeSwaps}


@dataclass
class Config:
    """Each field is a flag, and the comment behind it is the flag's text in --help. A sample is a trace."""
    # what to learn
    model: str = "deltanet"        # name of a mixer, see models.py; "a+b" alternates a and b, block by block
    task: str = "repl"             # repl, inverse, parity, listperm, arith, trace, group or pfsa: see data.py
    n_vars: int = 5                # number of variables or list elements (tasks repl, inverse, listperm, pfsa)
    moves: str = "perm"            # perm: a command permutes all variables; swap: it swaps two (tasks repl, inverse)
    group: str = "S5"              # Z2, Z60, S3, S4, A5, S5, S5swaps, S4two or A5two (task group)
    digits: int = 2                # digits per number (task arith)
    trace_file: str = ""           # file written by `data.py trace`; without one, functions are random (task trace)
    curriculum: str = "auto"       # stages "LxS LxS ...", see data.py; auto: the task's own curriculum
    # the model
    d_model: int = 64              # width of the hidden vectors; the MLP's hidden layer is twice as wide
    params: int = 0                # if not 0, the MLP's width is chosen to give about this many parameters
    n_layer: int = 1               # number of blocks; thanks to conv, one suffices for repl with up to 5 variables
    n_head: int = 1                # number of heads; each has the width d_model / n_head
    conv: int = 12                 # tokens that the short convolution before each mixer sees; 0: no convolution
    beta_max: float = 2.0          # eigenvalues are in [-1, 1] with 2, in [0, 1] with 1 (delta-rule mixers, ssm)
    gates: str = "exact"           # exact: beta and keys from bits that reach 0 and 1; sigmoid: as in P1 (delta rule)
    n_householder: int = 2         # reflections per token (mixer deltaproduct)
    states: str = "auto"           # a head (linear, transformer, contrastive), text (in the trace), none; auto: by task
    # training
    reveal_weight: float = 1.0     # extra weight on the loss at answers; of repl's 64x8, one token in 182 is one
    batch_size: int = 4            # traces per step; with small batches, the same number of traces gives more steps
    micro_batches: int = 1         # parts of a batch (gradient accumulation saves memory); each has its own mean loss
    learning_rate: float = 1.8e-2  # peak learning rate
    warmup: int = 320              # traces until the learning rate reaches its peak
    cooldown: int = 1280           # traces of learning-rate decay; with more, repl models read further without prints
    advance: float = 0.9           # pass a stage at this mean accuracy over the last 10 batches; 0: never by accuracy
    stage_samples: int = 0         # most traces in a stage; 0: the task's limit (pfsa 3000, trace 4000, others none)
    max_samples: int = 100000      # most traces in all; a run also ends with the decay after its last stage
    # held-out traces
    eval_at: str = "auto"          # stages to evaluate after training; auto: the last stage, and harder ones
    eval_samples: int = 64         # held-out traces in each evaluation
    eval_every: int = 200          # steps between two evaluations during training; each also saves a checkpoint
    # the machine
    seed: int = 0                  # for weights and data; same seed, torch, threads and machine give the same run
    device: str = "cuda" if torch.cuda.is_available() else "cpu"      # cuda, mps or cpu
    dtype: str = "fp32"            # fp32, or bf16 by autocast; the state of a scan (recurrence over tokens) stays fp32
    out: str = "out"               # where the runs' folders go


# Maps each setting to its comment above, for --help.
HELP = dict(re.findall(r"^    (\w+): \w+ = .*?# (.*)$", inspect.getsource(Config), re.M))
# These settings do not define what is trained, so they are not in the folder's name. (A device may round differently.)
ASIDE = ["eval_at", "eval_samples", "eval_every", "device", "out"]
CHOICES = {"task": TASKS, "moves": ["swap", "perm"], "group": data.GROUPS, "dtype": ["fp32", "bf16"],
           "gates": ["exact", "sigmoid"],
           "states": ["auto", "none", "linear", "transformer", "contrastive", "text"],
           "device": ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()}
MAY_BE_ZERO = ["params", "conv", "reveal_weight", "warmup", "cooldown", "advance", "stage_samples", "seed"]
AT_MOST = {"advance": 1, "learning_rate": 1, "beta_max": 2}       # above 2, eigenvalues could leave [-1, 1]
SEGMENT = 2048                     # tokens that `evaluate` reads at once; the state is carried to the next segment


# ----------------------------------------------------------------------------------------------------------
# Task, model, loss, accuracy

def check(cfg):
    """Raise BadInput for a setting that is wrong whatever the task. Its message says what to do."""
    for name, value in vars(cfg).items():
        flag = f"--{name.replace('_', '-')} {value}"
        zero = name in MAY_BE_ZERO
        most = AT_MOST.get(name, 2 ** 63 - 1)
        if name in CHOICES and value not in CHOICES[name]:
            raise BadInput(f"{flag}: choose from {', '.join(CHOICES[name])}")
        if not isinstance(value, str) and not (0 < value <= most or value == 0 and zero):
            raise BadInput(f"{flag}: give a number {'from' if zero else 'above'} 0, at most {most}")
    mixers = cfg.model.split("+")
    if not set(mixers) <= set(MIXERS):
        raise BadInput(f"--model {cfg.model}: choose from {', '.join(MIXERS)}, or join several with +")
    if cfg.n_layer < len(mixers):
        raise BadInput(f"--model {cfg.model} alternates {len(mixers)} mixers: give at least --n-layer {len(mixers)}")
    if cfg.batch_size % cfg.micro_batches:
        raise BadInput(f"--micro-batches {cfg.micro_batches}: give a divisor of --batch-size, {cfg.batch_size}")
    if cfg.d_model % 4 or cfg.d_model % (2 * cfg.n_head):
        raise BadInput(f"--d-model {cfg.d_model}: give a multiple of 4 and of twice --n-head {cfg.n_head}")


def build(cfg, pieces=None):
    """-> the task, the stages to train on and those to test (lists of Stage), and the model with its initial weights.
    model.cfg is the Config with each "auto" resolved. pieces: a checkpoint's vocabulary. Raises BadInput for settings
    that do not fit together."""
    check(cfg)
    kind = TASKS[cfg.task]
    task = kind(states=cfg.states, **{name: getattr(cfg, name) for name in kind.settings})
    if pieces:
        task.tokenizer = Tokenizer(pieces)
    curriculum = task.curriculum if cfg.curriculum == "auto" else cfg.curriculum
    stages = parse_stages(curriculum)
    eval_at = " ".join(map(str, task.beyond(stages[-1]))) if cfg.eval_at == "auto" else cfg.eval_at
    tests = parse_stages(eval_at)
    cfg = replace(cfg, states=task.states, curriculum=curriculum, eval_at=eval_at,
                  stage_samples=cfg.stage_samples or task.stage_samples)
    if not cfg.advance and not cfg.stage_samples:
        raise BadInput("--advance 0: no stage would ever be passed, so give --stage-samples, too")
    for stage in stages + tests:
        task.check_stage(stage)
        first, again = (task.batch(cfg.seed, "test", stage, 0, 2).tokens.tolist() for _ in range(2))
        if first != again:
            raise BadInput(f"--task {cfg.task}: two batches with one seed differ: let its program draw from rng only")

    def make(d_mlp, states="none"):
        shape = SimpleNamespace(**{**vars(cfg), "d_mlp": d_mlp, "states": states})
        return LM(shape, len(task.tokenizer), task.n_slots, task.n_classes)

    width = 2 * cfg.d_model
    if cfg.params:                                        # a state head is not counted
        with torch.device("meta"):
            least, more = count(make(8)), count(make(16))
        width = 8 + 8 * round((cfg.params - least) / (more - least))
        if width < 8:
            raise BadInput(f"--params {cfg.params}: this model has at least {least} parameters: give a larger number")
    torch.manual_seed(cfg.seed)                           # for the initial weights; nothing else uses torch's generator
    model = make(width, cfg.states).to(cfg.device)
    # Does the model give the same result in pieces as in one pass? A layer that starts at 0 would hide an error.
    tokens = torch.arange(40)[None] % len(task.tokenizer)
    with torch.no_grad():
        probe = copy.deepcopy(model).cpu().double()       # in fp32, many layers would amplify rounding errors
        for p in probe.parameters():
            p += 0.1 * torch.arange(p.numel()).view_as(p).cos()
        if not (in_pieces(probe, tokens, 7) - in_pieces(probe, tokens, 40)).abs().max() < 0.1:
            raise BadInput(f"--model {cfg.model} computes other results in pieces than in one pass: a mixer sees the "
                           "future, loses its state, or is random: run python models.py to see which")
    model.cfg = cfg
    return task, stages, tests, model


def to_tensors(batch, device):
    return Batch(*(x if x is None else torch.as_tensor(x, device=device) for x in batch))


def answers(task, batch, right):
    """right (B, T) bool: which tokens are predicted correctly. -> which answers are right: (B, T), 1 or 0 at each
    answer, and NaN elsewhere. With task.whole, a trace has one answer of several tokens, and the result is (B, 1). With
    states in the text, an answer is right only if the model also predicts all states before it."""
    after_error = (batch.state_in_text & ~right).cumsum(1) > 0
    right = right & ~after_error
    if task.whole:
        return (right | ~batch.asked).all(1, keepdim=True).float()
    return right.float().where(batch.asked, math.nan)


def losses(task, model, batch):
    """-> {"next", "reveal", "state"}, and the result of `answers`. The dict holds the mean cross-entropies in nats
    (natural logarithms) of all next tokens, of the answers and, if there is a state head, of its predictions. Masks are
    multiplied here, because indexing by a mask would make the CPU wait for the GPU."""
    hidden, _ = model(batch.tokens)
    logits = model.head(hidden).float()                               # (B, T, vocabulary)
    nats = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="none", ignore_index=PAD)
    nats = nats.view_as(batch.target)
    terms = {"next": nats.sum() / (batch.target != PAD).sum(), "reveal": (nats * batch.asked).sum() / batch.asked.sum()}
    if task.states in ("linear", "transformer", "contrastive"):
        terms["state"] = model.to_state.loss(model, hidden, batch)
    return terms, answers(task, batch, logits.argmax(-1) == batch.target)


@torch.no_grad()
def evaluate(model, task, stage, cfg):
    """Evaluate on cfg.eval_samples held-out traces. -> {"accuracy": of all answers, "final": of a trace's last answer,
    "by_answer": a list}. In the task pfsa, the dict also has means in nats per answer: "kl", KL(exact || model), where
    *exact* are the exact probabilities of the answer, given the text before it; "final_kl", the same at the last
    answer; "loss", the model's cross-entropy; "floor", that of the exact probabilities, the lowest possible one."""
    rows, nats = [], []
    for t, first in enumerate(range(0, cfg.eval_samples, cfg.batch_size)):
        size = min(cfg.batch_size, cfg.eval_samples - first)
        batch = to_tensors(task.batch(cfg.seed, "test", stage, t, size), cfg.device)
        needed = batch.asked | batch.state_in_text
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
            logits = model.head(in_pieces(model, batch.tokens, SEGMENT)[needed])
        right = torch.zeros_like(needed)
        right[needed] = logits.argmax(-1) == batch.target[needed]
        right = answers(task, batch, right)
        rows.append(right[~right.isnan()].view(len(right), -1).cpu())     # (traces, answers)
        if batch.predictive is not None:
            asked = batch.asked
            found = logits[asked[needed]], batch.target[asked], batch.predictive[asked]
            nats.append(against_exact(*found, task.answer_tokens()).view(size, -1, 3))
    by_answer = torch.cat(rows).double().mean(0)
    row = {"accuracy": by_answer.mean(), "final": by_answer[-1]}
    if nats:
        kl, loss, floor = torch.cat(nats).unbind(-1)
        row |= {"kl": kl.mean(), "final_kl": kl[:, -1].mean(), "loss": loss.mean(), "floor": floor.mean()}
    return {name: x.item() for name, x in row.items()} | {"by_answer": by_answer.tolist()}


def report(model, task, cfg, known={}):
    """Evaluate in each stage of cfg.eval_at, and print a line for each. -> the rows: the dicts that `evaluate` returns,
    with "stage" and "chance" added. known: {stage: the dict of `evaluate`}, of stages that have just been evaluated."""
    rows = []
    for word, stage in zip(cfg.eval_at.split(), parse_stages(cfg.eval_at)):
        row = known.get(word) or evaluate(model, task, stage, cfg)
        rows.append({"stage": word, **row, "chance": task.chance(stage)})
        show(rows[-1])
    return rows


def show(row):
    """Print a row of `report`."""
    if "kl" in row:
        line = f"KL {row['kl']:.4f} nats per answer (0 is perfect), the last {row['final_kl']:.4f}"
        if not row["stage"].endswith(":forced"):          # there, no coin is tossed, so losses mean nothing
            line += f"; loss {row['loss']:.3f}, of the exact probabilities {row['floor']:.3f}"
    else:
        last = f", the last answer {row['final']:.2%}" if len(row["by_answer"]) > 1 else ""
        line = f"{row['accuracy']:.2%} right{last} (chance {row['chance']:.1%})"
    print(f"eval    {row['stage']}: {line}")


# ----------------------------------------------------------------------------------------------------------
# One run

def folder_of(cfg):
    """-> out/model-task-setting=value-..., with every setting not at its default. A long name ends in its hash."""
    words = [cfg.model, cfg.task]
    for f in fields(Config):
        if f.name not in ["model", "task", *ASIDE] and getattr(cfg, f.name) != f.default:
            words.append(f"{f.name}={getattr(cfg, f.name)}")
    name = re.sub(r"[^\w=.+-]+", "_", "-".join(words).replace(":", "-"))
    if len(name) > 200:                                   # file systems allow 255 bytes
        name = f"{name[:180]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
    return Path(cfg.out) / name


# CODE is the source at import: `origin` hashes it and not the files, because an edit during a run does not change what
# runs. COMMIT is git's commit, with a + if files have changed since, or "" if there is none.
HERE = Path(__file__).resolve().parent
CODE = b"".join((HERE / f"{name}.py").read_bytes() for name in ["data", "kernels", "models", "pfsa", "train"])
COMMIT = subprocess.run("git describe --always --exclude='*' --dirty=+", shell=True, cwd=HERE, capture_output=True,
                        text=True).stdout.strip()


def origin(cfg):
    """-> what a run's numbers come from: {"commit", "code": a hash of the code and of --trace-file, "argv", "torch":
    its version, "threads", "machine"}."""
    traces = Path(cfg.trace_file).read_bytes() if cfg.trace_file else b""
    chip = torch.cuda.get_device_name() if cfg.device == "cuda" else torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.machine()} {chip}"
    return {"commit": COMMIT, "code": hashlib.blake2b(CODE + traces, digest_size=8).hexdigest(), "argv": sys.argv,
            "torch": str(torch.__version__), "threads": torch.get_num_threads(), "machine": machine}


def save(path, write):
    """Call write(part), then rename part to path, so path never holds half a file. Raises BadInput if either fails."""
    part = path.with_name(f"{os.getpid()}.tmp")
    try:
        write(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:              # torch.save raises a RuntimeError if the disk is full
        why = str(error).splitlines()[0]
        raise BadInput(f"{path} cannot be written ({why}): make room on the disk, or choose another --out")
    finally:
        part.unlink(missing_ok=True)


def run(cfg):
    """Train and test one model, in the folder that its settings name. -> 0, or 1 if the loss or its gradient is not
    finite; then ckpt.pt, if there is one, is from an earlier step. Raises BadInput if settings conflict, or if the
    folder holds a run with other settings or other code."""
    folder = folder_of(cfg)
    source, as_given = origin(cfg), asdict(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    saved = read_checkpoint(folder / "ckpt.pt") if (folder / "ckpt.pt").exists() else None
    result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None
    before = (result or saved or {"config": {}})["config"]
    if any(before.get(name, x) != x for name, x in as_given.items() if name not in ASIDE):
        raise BadInput(f"{folder} holds a run with other settings: choose another --out")
    if result:
        print(f"{folder} finished after {result['samples']:,} traces. Remove it to train again, or use --eval")
        for row in result["eval"]:
            show(row)
        if result.get("code") != source["code"]:
            print("note    the code or the trace file has changed since this run: these are its old results")
        return 0
    if saved and saved["code"] != source["code"]:
        raise BadInput(f"{folder} was started with other code or another trace file: undo the change, remove the "
                       "folder, or choose another --out")
    task, stages, _, model = build(cfg, saved["pieces"] if saved else None)
    cfg, optimizers = model.cfg, make_optimizers(model)
    cooldown = min(cfg.cooldown, cfg.max_samples // 3)
    # The progress of the run. recent: accuracy of up to ten batches; end: the run finishes after this many traces.
    at = SimpleNamespace(step=0, samples=0, seconds=0.0, recent=[], passed=[], held_out=[], end=cfg.max_samples)
    if saved:
        vars(at).update(saved["at"])
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)

    @lru_cache(2)                                         # keeps this batch, and the next one, prepared below
    def batch_of(stage, number):
        return task.batch(cfg.seed, "train", stage, number, cfg.batch_size)

    chance = task.chance(stages[-1])
    head_dim = cfg.d_model // cfg.n_head
    dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    backend, why = resolve_backend("auto", cfg.device, dtype, head_dim, head_dim)
    words = cfg.curriculum.split()                        # the stages, as they were typed
    tested = [*words[:-1], cfg.eval_at.split()[0]]        # in each stage, that stage; in the last, eval_at's first
    print(f"run     {folder}, from step {at.step}")
    print(f"task    {cfg.task}, stages {cfg.curriculum}; chance {chance:.1%}")
    print(f"model   {cfg.model}, {count(model):,} parameters, {count(model.to_state):,} of them in the state head "
          f"({cfg.states})")
    print(f"rate    {cfg.learning_rate:g}, decays over the last {cooldown:,} traces (at most a third of --max-samples)")
    print(f"device  {cfg.device} ({source['machine']}), {cfg.dtype}, torch {source['torch']}, "
          f"{source['threads']} threads; a scan uses {backend} ({why})")

    last_test, started = {}, time.perf_counter() - at.seconds
    with tqdm(initial=at.samples, unit=" traces", disable=None) as bar:
        while at.samples < at.end:
            # learning rate: the share of the warmup that is done, and the share of the decay
            up = min(1, (at.samples + cfg.batch_size) / max(cfg.warmup, cfg.batch_size))
            down = max(0, at.samples + cooldown - at.end) / max(cooldown, 1)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = cfg.learning_rate * up * (1 + math.cos(math.pi * down)) / 2

            # batch, loss, step
            number = min(len(at.passed), len(stages) - 1)             # of the stage, from 0
            batch, right = to_tensors(batch_of(stages[number], at.step), cfg.device), []
            model.zero_grad()
            for first in range(cfg.micro_batches):
                part = Batch(*(x if x is None else x[first::cfg.micro_batches] for x in batch))
                with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
                    terms, these = losses(task, model, part)
                terms["reveal"] = cfg.reveal_weight * terms["reveal"]
                loss = sum(terms.values())                # the log shows the loss of the last part
                (loss / cfg.micro_batches).backward()
                right.append(these)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            if at.samples + cfg.batch_size < at.end:
                batch_of(stages[number], at.step + 1)     # prepares the next batch while a GPU computes
            # A step waits for the GPU only here and in a state head's loss. If the loss or the gradient is not
            # finite, this step has spoiled the weights.
            finite, accuracy = torch.stack([(loss + norm).isfinite(), torch.cat(right).nanmean()]).tolist()
            if not finite:
                break
            at.step += 1
            at.samples += cfg.batch_size
            at.seconds = time.perf_counter() - started
            at.recent = [*at.recent[-9:], accuracy]
            mean = sum(at.recent) / len(at.recent)        # of the last ten batches
            bar.total = at.end if down else None          # before the decay, the total is unknown
            bar.set_description_str(f"stage {words[number]}, {mean:.0%} right", refresh=False)
            bar.update(cfg.batch_size)

            # curriculum
            began = at.passed[-1]["samples"] if at.passed else 0
            enough = cfg.advance and len(at.recent) == 10 and mean >= cfg.advance
            enough = enough or cfg.stage_samples and at.samples - began >= cfg.stage_samples
            passed = enough and len(at.passed) < len(stages)          # if equal, this is the decay
            if passed:
                at.passed.append({"stage": words[number], "samples": at.samples, "steps": at.step,
                                  "seconds": at.seconds})
                if number == len(stages) - 1:
                    at.end = min(at.end, at.samples + cooldown)
                else:
                    at.recent = []

            # test, save
            if passed or at.step % cfg.eval_every == 0 or at.samples >= at.end:
                [test] = parse_stages(tested[number])
                row = evaluate(model, task, test, cfg)
                last_test = {tested[number]: row}
                at.held_out.append([at.samples, tested[number], row["accuracy"]])
                parts = " + ".join(f"{name} {term:.3f}" for name, term in terms.items())
                what = f"stage {words[number]} passed" if passed else f"stage {words[number]}"
                tqdm.write(f"step {at.step}: {at.samples:,} traces, {at.seconds:.0f} s, {what}, {mean:.1%} right, "
                           f"held out {row['accuracy']:.1%} at {tested[number]}, loss {loss:.3f} = {parts}")
                checkpoint = {"config": as_given, **source, "at": vars(at), "pieces": task.tokenizer.pieces,
                              "model": model.state_dict(), "optimizers": [x.state_dict() for x in optimizers]}
                save(folder / "ckpt.pt", partial(torch.save, checkpoint))

    if at.samples < at.end:                               # the loop has stopped early
        print(f"train.py: the loss or its gradient was not finite after step {at.step}: try --learning-rate "
              f"{cfg.learning_rate / 3:.1g}", file=sys.stderr)
        return 1
    print(f"trained {at.samples:,} traces, {at.step:,} steps, {at.seconds:.1f} s")
    reached = words[min(len(at.passed), len(stages) - 1)]
    if at.end == cfg.max_samples and len(at.passed) < len(stages):
        print(f"stopped by --max-samples, in stage {reached}")
    result = {"model": cfg.model, "task": cfg.task, "seed": cfg.seed, "params": count(model), "chance": chance,
              "trained": words[-1], "reached": reached, "samples": at.samples, "steps": at.step,
              "seconds": at.seconds, "passed": at.passed, "held_out": at.held_out,
              "eval": report(model, task, cfg, last_test), **source, "config": as_given}
    save(folder / "result.json", lambda part: part.write_text(json.dumps(result) + "\n"))
    return 0


# ----------------------------------------------------------------------------------------------------------
# A trained model

def read_checkpoint(path):
    """-> the checkpoint that `run` has saved, a dict. Raises BadInput for any other file."""
    if not Path(path).exists():
        raise BadInput(f"{path} does not exist: give the folder of a run, or its checkpoint")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:                                     # a broken file can raise anything
        raise BadInput(f"{path} is not a checkpoint, or is incomplete: remove it, or give another")
    if not isinstance(saved, dict) or not {"config", "code", "at", "pieces", "model", "optimizers"} <= saved.keys():
        raise BadInput(f"{path} is not a checkpoint of this train.py: use the version that wrote it, or train again")
    unknown = saved["config"].keys() - {f.name for f in fields(Config)}
    if unknown:
        raise BadInput(f"{path} was trained with settings that this train.py lacks ({', '.join(sorted(unknown))}): "
                       "use the version that trained it")
    return saved


def load(path, **changes):
    """A run's folder or checkpoint -> its Config, task, stages to test (a list of Stage), and model. changes: settings
    to override, such as device="cpu" or eval_at="64x64". Raises BadInput if there is no such model.

    >>> cfg, task, tests, model = load("assets/deltanet-repl.pt", device="cpu")
    >>> text = ">>> a = 3\\n>>> b = 1\\n>>> c = 2\\n>>> d = 5\\n>>> e = 4\\n>>> a, b, c, d, e = b, a, c, e, d\\n"
    >>> hidden, state = model(torch.tensor([task.tokenizer.encode(text)]))
    >>> model.to_state(hidden[0, -1]).argmax(-1) + 1                  # the values, according to the state head
    tensor([1, 3, 2, 4, 5])
    >>> task.tokenizer.decode(beliefs(task, model, state)[0].argmax(-1).tolist())          # and to its prints
    '13245'
    """
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    saved = read_checkpoint(path)
    cfg = Config(**{**saved["config"], "device": Config.device, "eval_at": "auto", **changes})
    try:
        task, _, tests, model = build(cfg, saved["pieces"])
    except BadInput as error:
        raise BadInput(f"{path}: {error}")
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError:
        raise BadInput(f"{path}: its weights do not fit this models.py: use the version that trained it")
    return model.cfg, task, tests, model


@torch.no_grad()
def beliefs(task, model, state, traces=1):
    """-> what the model would print for each variable of repl now: probabilities of the next token, (traces, n_vars,
    vocabulary). state: what the model carries after reading `traces` traces in parallel. `load` has an example."""
    found = []
    for name in task.names:
        text = task.tokenizer.encode(f"{task.prompt}print('{name}', {name})\n{name} ")
        tokens = torch.tensor([text] * traces, device=model.head.weight.device)
        hidden, _ = model(tokens, state)
        found.append(model.head(hidden[:, -1]).softmax(-1))
    return torch.stack(found, 1)


# The syntax that a typed line may use: no operators, attributes, subscripts or loops.
PLAIN = (ast.Assign, ast.Expr, ast.Call, ast.Tuple, ast.List, ast.Name, ast.Constant, ast.expr_context)


def as_read(task, typed):
    """Rewrite a line that somebody typed as the line of repl that has the same effect. So `b, a = a, b` becomes
    `a, b = b, a` or, if commands permute three variables, `a, b, c = b, a, c`. To find the effect, Python executes the
    typed line. Raises BadInput if no line of repl has the same effect."""
    names = {object(): name for name in task.names}       # each variable holds a different object
    memory, printed = {name: thing for thing, name in names.items()}, []
    with contextlib.suppress(Exception):                  # whatever fails here, no line of repl has this effect
        [statement] = ast.parse(typed).body
        assert all(isinstance(node, PLAIN) for node in ast.walk(statement))
        exec(typed, {"__builtins__": {"print": lambda *words: printed.append(words)}}, memory)
        takes = {name: names[memory[name]] for name in task.names}
        moved = [name for name in task.names if takes[name] != name]
        if isinstance(statement, ast.Expr):
            [[*word, thing]] = printed                    # print(a), or print('a', a)
            if not moved and word in ([], [names[thing]]):
                return f"print('{names[thing]}', {names[thing]})"
        elif not printed and sorted(takes.values()) == sorted(memory):
            left = task.names if task.moves == "perm" else moved
            if task.moves == "perm" or len(moved) == 2:
                return f"{', '.join(left)} = {', '.join(takes[name] for name in left)}"
    known = "permutations" if task.moves == "perm" else "swaps of two"
    raise BadInput(f"this model knows {known} of {', '.join(task.names)}, and prints of one variable: type a "
                   f"line like {task.swaps[0]} or print('a', a)")


def typed_lines(task, seed):
    """Yield lists of lines of repl: first the assignments and a print, as in each trace, then each line that somebody
    types, until Ctrl-D or quit."""
    rng = random.Random(seed)
    start = [*task.start(rng, {}), *task.question(rng.choice(task.names), {})]
    print("".join(f"{task.prompt}{line}\n" for line in start), end="")
    yield start
    while True:
        try:
            typed = input(task.prompt).strip().removeprefix(">>>").strip()
            if not sys.stdin.isatty():
                print(typed)                              # echo input that comes from a pipe
            if typed in ("quit", "exit", "quit()", "exit()"):
                return
            line = typed and as_read(task, typed)
            if line != typed:
                print(f"read as {line}")
            if line:
                yield [line]
        except (BadInput, UnicodeError) as error:
            print(error)
        except EOFError:
            print()
            return


@torch.no_grad()
def play(path, **changes):
    """Python executes the lines that somebody types, and the model reads them. After each line, the model's prediction
    for every variable is printed."""
    cfg, task, _, model = load(path, **changes)
    if cfg.task != "repl" or cfg.states == "text":
        raise BadInput(f"--play {path}: give a model trained on repl, without states in the text")
    with contextlib.suppress(ImportError):                # Windows has no readline
        import readline                                   # noqa: F401  line editing for input()
    print("Python runs each line; the model predicts each variable's value, with a probability. Type quit to end")
    memory, state = {}, None
    for lines in typed_lines(task, cfg.seed):
        parts = data.run(lines, memory, task.prompt)
        tokens, _, _ = task.encode(parts)
        _, state = model(torch.tensor([tokens], device=cfg.device), state)
        print("".join(part.text for part in parts if part.answer), end="")
        words = []
        for name, chances in zip(task.names, beliefs(task, model, state)[0]):
            predicted, truth = task.tokenizer.decode([chances.argmax().item()]), str(memory[name])
            wrong = "" if predicted == truth else f" WRONG, it is {truth}"
            words.append(f"{name} {predicted} ({chances.max():.0%}{wrong})")
        print("model:  " + "  ".join(words))


# ----------------------------------------------------------------------------------------------------------
# python train.py

NO_LIST = ["curriculum", "trace_file", *ASIDE]            # a comma in one of these does not make a grid
FOR_EVAL = ["eval_at", "eval_samples", "trace_file", "seed", "device", "dtype"]       # --eval and --play accept these


def values(f, text):
    """The text after a field's flag, a comma list -> the list of its values. Raises argparse's error for a bad one."""
    try:
        return [f.type(word.strip()) for word in ([text] if f.name in NO_LIST else text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give a number ({f.type.__name__})")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                            # so that an error is one line
    flags = {f"--{f.name.replace('_', '-')}": f for f in fields(Config)}
    for flag, f in flags.items():
        parser.add_argument(flag, type=partial(values, f), metavar=f.type.__name__.upper(),
                            help=f"{HELP.get(f.name, '')} [{f.default}]".replace("%", "%%"))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--eval", metavar="RUN", help="test a run's folder or checkpoint, train nothing; may go with "
                        "--eval-at, --eval-samples, --trace-file, --seed, --device and --dtype")
    either.add_argument("--play", metavar="RUN", help="type Python, and see what a repl model predicts")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        wrong = unknown[0].partition("=")[0]
        initials = [flag for flag in flags if re.sub(r"(\w)\w*-?", r"\1", flag) == wrong]               # --lr
        near = initials or difflib.get_close_matches(wrong, flags, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        parser.error(f"{wrong} is not a setting: {meant}--help lists all settings")
    given = vars(given)
    to_eval = given.pop("eval", None)
    to_play = given.pop("play", None)
    cells = [dict(zip(given, cell)) for cell in dict.fromkeys(itertools.product(*given.values()))]    # each once
    rank, processes = 0, 1
    if {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= os.environ.keys():       # a process of torchrun
        rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())      # one GPU for each process
    try:
        if to_eval is not None or to_play is not None:
            if not set(given) <= set(FOR_EVAL):
                raise BadInput("a trained model keeps its settings: with --eval or --play, give only "
                               + ", ".join(flag for flag, f in flags.items() if f.name in FOR_EVAL))
            for cell in cells:
                if to_play is not None:
                    play(to_play, **cell)
                else:
                    cfg, task, _, model = load(to_eval, **cell)
                    report(model, task, cfg)
            return 0
        grid = [Config(**cell) for cell in cells]
        for cfg in grid:
            build(cfg)                                    # a bad setting is refused before the first run
        mine = grid[rank::processes]
        if not mine:
            print(f"process {rank} of {processes} has no run, because the grid has only {len(grid)}")
        code = max(map(run, mine), default=0)
        if mine and not code:
            print(f"next    python plot.py curve {' '.join(str(folder_of(cfg)) for cfg in mine)}")
        return code
    except (BadInput, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped" if to_eval or to_play else "stopped; the same command resumes from the last checkpoint")
        return 130


if __name__ == "__main__":
    sys.exit(main())
