"""
Train a model on a task, watch it learn, and test it far beyond what it saw. One flat loop in plain PyTorch.

    python train.py --model deltanet --task repl                   a minute on two CPU cores
    python train.py --model deltanet,transformer --seed 0,1,2      a comma list is a grid, here of six runs
    python train.py --eval out/deltanet-repl --eval-at 512x16      a trained model, on other stages
    python train.py --play out/deltanet-repl                       a trained model, and you type
    python train.py --help                                         every setting, explained

Loss: the cross-entropy of the next token, as in P1, plus reveal_weight times its mean over the answers alone, plus the
loss of the state head (P2 section 4). An *answer* is a printed value, which P1 calls a reveal. The *state head* is an
extra output that predicts, at the end of each line, what all variables hold.

Curriculum: a list of stages. The traces of a stage LxS have L commands, with a print after every S-th (P1 section 4). A
stage is passed when the accuracy of the last ten batches reaches --advance, or after --stage-samples traces. When the
last one is passed, the learning rate decays over --cooldown traces, and the run finishes.

The settings of a run name its folder, which holds ckpt.pt and, in the end, result.json. To resume a run that was
stopped, repeat its command: a batch depends only on the seed, the stage and the batch's number, so the result is the
same. P1 is arXiv 2602.14814; P2 is "Grounding Code Understanding in Step-by-Step Execution".

Read `run` first, then `losses` and `evaluate`. From Python, start with `load`.
"""
import argparse
import contextlib
import ctypes
import hashlib
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
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# Two settings that must be made before torch is imported. With a spin count of 5000, a waiting thread of GNU OpenMP
# soon gives up its core. And glibc keeps freed memory: to return a tensor and ask for it again costs page faults.
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
from kernels import pick_backend
from models import LM, MIXERS, HardDeltaNet, count, fault, in_pieces, make_optimizers
from pfsa import MaybeSwaps, against_exact

TASKS = {**data.TASKS, "pfsa": MaybeSwaps}


STATES = ["auto", "none", "linear", "transformer", "contrastive", "text"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICES = ["cuda"] * torch.cuda.is_available() + ["cpu"] + ["mps"] * torch.backends.mps.is_available()


def number(default, low=0, high=None):
    """A field of Config from `low` to `high`. A number without a range must be at least 0, and an int at least 1 unless
    its default is 0."""
    return field(default=default, metadata={"range": (low, high)})


def one_of(values, default=None):
    """A field of Config that is one of these values, by default the first."""
    return field(default=default or next(iter(values)), metadata={"values": values})


@dataclass
class Config:
    """Each field is a flag, and the comment behind it is the flag's text in --help. A sample is a trace."""
    # what to learn
    model: str = "deltanet"                   # name of a mixer, see models.py; "a+b" alternates a and b, block by block
    task: str = one_of(TASKS)                 # repl, inverse, parity, listperm, arith, trace, group, pfsa: see data.py
    n_vars: int = 5                           # variables or list elements (tasks repl, inverse, listperm, pfsa)
    moves: str = one_of(["perm", "swap"])     # a command permutes all variables, or swaps two (tasks repl, inverse)
    group: str = one_of(data.GROUPS, "S5")    # Z2, Z60, S3, S4, A5, S5, S5swaps, S4two or A5two (task group)
    digits: int = 2                           # digits per number (task arith)
    trace_file: str = ""                      # of `data.py trace`; without it, functions are random (task trace)
    curriculum: str = "auto"                  # stages "LxS LxS ...", see data.py; auto: the task's own curriculum
    # the model
    d_model: int = 64                         # width of the hidden vectors; the MLP's hidden layer is twice as wide
    params: int = 0                           # if not 0, the MLP's width is chosen to give about this many parameters
    n_layer: int = 1                          # blocks; thanks to conv, one suffices for repl with up to 5 variables
    n_head: int = 1                           # heads; each has the width d_model / n_head
    conv: int = number(12)                    # tokens that the convolution before each mixer sees; 0: no convolution
    beta_max: float = number(2.0, 0, 2)       # 2: eigenvalues in [-1, 1]; 1: in [0, 1] (delta-rule mixers, ssm)
    gates: str = one_of(["exact", "sigmoid"]) # exact: beta and keys from bits that reach 0 and 1; sigmoid: as in P1
    n_householder: int = 2                    # reflections per token (mixer deltaproduct)
    states: str = one_of(STATES)              # a head (linear, transformer, contrastive), text (in the trace), none
    # training
    reveal_weight: float = 1.0                # extra weight on the loss at answers, one token in 182 of repl's 64x8
    batch_size: int = 4                       # traces per step; with small batches, as many traces give more steps
    learning_rate: float = 1.8e-2             # peak learning rate
    warmup: int = number(320)                 # traces until the learning rate reaches its peak
    cooldown: int = number(1280)              # traces of learning-rate decay; with more, models of repl read further
    advance: float = number(0.9, 0, 1)        # pass a stage at this mean accuracy over 10 batches; 0: never by accuracy
    stage_samples: int = 0                    # most traces in a stage; 0: the task's own limit (pfsa 3000, trace 4000)
    max_samples: int = 100000                 # most traces in all; a run also ends with the decay after its last stage
    # held-out traces
    eval_at: str = "auto"                     # stages to evaluate after training; auto: the last stage, and harder ones
    eval_samples: int = 64                    # held-out traces in each evaluation
    eval_every: int = 200                     # steps between two evaluations in training; each also saves a checkpoint
    # the machine
    seed: int = 0                             # of weights and data; same seed, torch, threads and machine: same run
    device: str = one_of(DEVICES)             # cuda, mps or cpu
    dtype: str = one_of(DTYPES)               # fp32, or bf16 by autocast; the state of a scan stays fp32
    out: str = "out"                          # where the runs' folders go


# Maps each setting to its comment above, for --help.
HELP = {name: why for name, why in re.findall(r"^    (\w+): \w+ = .*?# (.*)$", Path(__file__).read_text("utf-8"), re.M)
        if hasattr(Config, name)}
# These settings do not define what is trained. (A device may round differently.)
NOT_IN_FOLDER_NAME = ["eval_at", "eval_samples", "eval_every", "device", "out"]
SEGMENT = 2048                     # tokens that `evaluate` reads at once; the state is carried to the next segment


# ----------------------------------------------------------------------------------------------------------
# Task, model, loss, accuracy

def check(cfg):
    """Raise BadInput for a setting that is wrong whatever the task. Its message says what to do."""
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        flag = f"--{f.name.replace('_', '-')} {value}"
        if type(value) not in [f.type] + [int] * (f.type is float):      # such as a number of numpy
            raise BadInput(f"{flag}: give a plain {f.type.__name__}, not {type(value).__name__}")
        if value not in f.metadata.get("values", [value]):
            raise BadInput(f"{flag}: choose from {', '.join(f.metadata['values'])}")
        if f.type is not str:
            low, high = f.metadata.get("range", (1 if f.type is int and f.default else 0, None))
            if not low <= value <= (high or 2 ** 63 - 1):
                raise BadInput(f"{flag}: must be >= {low}" + (f" and <= {high}" if high else ""))
    mixers = cfg.model.split("+")
    if not set(mixers) <= set(MIXERS):
        raise BadInput(f"--model {cfg.model}: choose from {', '.join(MIXERS)}, or join several with +")
    if cfg.n_layer < len(mixers):
        raise BadInput(f"--model {cfg.model} alternates {len(mixers)} mixers: give at least --n-layer {len(mixers)}")
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
    stages = parse_stages(task.curriculum if cfg.curriculum == "auto" else cfg.curriculum)
    tests = task.harder_stages(stages[-1]) if cfg.eval_at == "auto" else parse_stages(cfg.eval_at)
    cfg = replace(cfg, states=task.states, stage_samples=cfg.stage_samples or task.stage_samples,
                  cooldown=min(cfg.cooldown, cfg.max_samples // 3))
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
    model = make(width, cfg.states)
    for name, block in zip(cfg.model.split("+"), model.blocks):
        if why := fault(block.mixer, cfg.d_model):
            raise BadInput(f"--model {cfg.model}: {name} {why}")
    model.cfg = cfg
    return task, stages, tests, model.to(cfg.device)


def to_tensors(batch, device):
    return Batch(*(x if x is None else torch.as_tensor(x, device=device) for x in batch))


def right_answers(task, batch, right):
    """right (B, T) bool: the tokens that are predicted correctly -> (B, T): 1 or 0 at each answer, NaN elsewhere; if
    task.one_answer, (B, 1). Once a state in the text is wrong, every later answer of its trace counts as wrong."""
    after_error = (batch.state_in_text & ~right).cumsum(1) > 0
    right = right & ~after_error
    if task.one_answer:
        return (right | ~batch.asked).all(1, keepdim=True).float()
    return right.float().where(batch.asked, math.nan)


def losses(task, model, batch):
    """-> {"next", "reveal", "state"}, the mean cross-entropies in nats of all next tokens, of the answers and of the
    state head, if any; and the result of `right_answers`."""
    hidden, _ = model(batch.tokens)
    logits = model.head(hidden).float()                               # (B, T, vocabulary)
    nats = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="none", ignore_index=PAD)
    nats = nats.view_as(batch.target)                                 # below, nats[batch.asked] would wait for the GPU
    terms = {"next": nats.sum() / (batch.target != PAD).sum(), "reveal": (nats * batch.asked).sum() / batch.asked.sum()}
    if task.states in ("linear", "transformer", "contrastive"):
        terms["state"] = model.to_state.loss(model, hidden, batch)
    return terms, right_answers(task, batch, logits.argmax(-1) == batch.target)


@torch.no_grad()
def evaluate(model, task, stage, cfg):
    """Test on cfg.eval_samples held-out traces. -> {"accuracy": of all answers, "final": of the last answer of a trace,
    "by_answer": a list}. The task pfsa adds means in nats per answer: "kl", KL(exact probabilities || model), given the
    text before an answer; "final_kl", at the last answer; "loss", the model's; "floor", the lowest possible loss."""
    rows, nats = [], []
    for t, first in enumerate(range(0, cfg.eval_samples, cfg.batch_size)):
        size = min(cfg.batch_size, cfg.eval_samples - first)
        batch = to_tensors(task.batch(cfg.seed, "test", stage, t, size), cfg.device)
        needed = batch.asked | batch.state_in_text
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
            logits = model.head(in_pieces(model, batch.tokens, SEGMENT)[needed])
        right = torch.zeros_like(needed)
        right[needed] = logits.argmax(-1) == batch.target[needed]
        right = right_answers(task, batch, right)
        rows.append(right[~right.isnan()].view(len(right), -1).cpu())     # (traces, answers)
        if batch.predictive is not None:
            asked = batch.asked
            at_answers = logits[asked[needed]], batch.target[asked], batch.predictive[asked]
            nats.append(against_exact(*at_answers, task.answer_tokens()).view(size, -1, 3))
    by_answer = torch.cat(rows).double().mean(0)
    row = {"accuracy": by_answer.mean(), "final": by_answer[-1]}
    if nats:
        kl, loss, floor = torch.cat(nats).unbind(-1)
        row |= {"kl": kl.mean(), "final_kl": kl[:, -1].mean(), "loss": loss.mean(), "floor": floor.mean()}
    return {name: x.item() for name, x in row.items()} | {"by_answer": by_answer.tolist()}


def report(model, task, tests, cfg, known={}):
    """Test in each of these stages, and print a line for each. -> what `evaluate` returns, with "stage" and "chance"
    added. known: {stage: what `evaluate` has returned for it just now}."""
    rows = []
    for stage in tests:
        row = known.get(stage) or evaluate(model, task, stage, cfg)
        rows.append({"stage": str(stage), **row, "chance": task.chance(stage)})
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
        if f.name not in ["model", "task", *NOT_IN_FOLDER_NAME] and getattr(cfg, f.name) != f.default:
            words.append(f"{f.name}={getattr(cfg, f.name)}")
    name = re.sub(r"[^\w=.+-]+", "_", "-".join(words).replace(":", "-"))
    if len(name) > 200:                                   # file systems allow 255 bytes
        name = f"{name[:180]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
    return Path(cfg.out) / name


# CODE is the source at import: `origin` hashes it and not the files, because an edit during a run does not change what
# runs. COMMIT is git's commit, with a + if files have changed since, or "" if git does not know this file.
HERE = Path(__file__).resolve().parent
CODE = b"".join((HERE / f"{name}.py").read_bytes() for name in ["data", "kernels", "models", "pfsa", "train"])
COMMIT = "".join(subprocess.run(
    "git ls-files --error-unmatch train.py && git describe --always --exclude='*' --dirty=+", shell=True, cwd=HERE,
    capture_output=True, text=True, env={name: x for name, x in os.environ.items() if not name.startswith("GIT_")},
).stdout.split()[1:])


def origin(cfg):
    """-> what a run's numbers come from: {"commit", "code": a hash of the code and of --trace-file, "argv", "torch":
    its version, "threads", "machine"}."""
    traces = Path(cfg.trace_file).read_bytes() if cfg.trace_file else b""
    chip = torch.cuda.get_device_name() if cfg.device == "cuda" else torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.machine()} {chip}"
    return {"commit": COMMIT, "code": hashlib.blake2b(CODE + traces, digest_size=8).hexdigest(), "argv": sys.argv,
            "torch": str(torch.__version__), "threads": torch.get_num_threads(), "machine": machine}


def save(path, write):
    """Call write(part), then rename part to path, so path never holds half a file. Raises BadInput if that fails."""
    for is_last in False, True:                           # a virus scanner may hold a file for a moment
        time.sleep(is_last)
        part = path.with_name(f"{os.urandom(4).hex()}.tmp")
        try:
            write(part)
            os.replace(part, path)
            return
        except (OSError, RuntimeError) as error:          # torch.save raises a RuntimeError if the disk is full
            if is_last:
                raise BadInput(f"{path} cannot be written ({str(error).splitlines()[0]}): choose another --out, or if "
                               "the disk is full, make room")
        finally:
            with contextlib.suppress(OSError):
                part.unlink()


def earlier(folder, cfg, source):
    """-> the result that the folder holds, and its checkpoint, each None if there is none. Raises BadInput if they have
    other settings or, if the run was stopped, other code."""
    saved = read_checkpoint(folder / "ckpt.pt") if (folder / "ckpt.pt").exists() else None
    try:
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None
    except ValueError:
        raise BadInput(f"{folder}/result.json is damaged: remove it, and the same command writes it again")
    before = (result or saved or {"config": {}})["config"]
    if any(before.get(name, x) != x for name, x in asdict(cfg).items() if name not in NOT_IN_FOLDER_NAME):
        raise BadInput(f"{folder} holds a run with other settings: choose another --out")
    if saved and not result and saved["code"] != source["code"]:
        raise BadInput(f"{folder} was started with other code or another trace file: undo the change, remove the "
                       "folder, or choose another --out")
    return result, saved


def announce(folder, task, stages, model, source, progress):
    """Print what is about to be trained, and on what."""
    cfg, head_dim = model.cfg, model.cfg.d_model // model.cfg.n_head
    print(f"run     {folder}, from step {progress.step}")
    print(f"task    {cfg.task}, stages {' '.join(map(str, stages))}; chance {task.chance(stages[-1]):.1%}")
    print(f"model   {cfg.model}, {count(model):,} parameters, {count(model.to_state):,} of them in the state head "
          f"({cfg.states})")
    print(f"rate    {cfg.learning_rate:g}, decays over the last {cfg.cooldown:,} traces (at most a third of "
          "--max-samples)")
    print(f"device  {cfg.device} ({source['machine']}), {cfg.dtype}, torch {source['torch']}, "
          f"{source['threads']} threads; scans use {pick_backend(cfg.device, DTYPES[cfg.dtype], head_dim, head_dim)}")


@dataclass
class Progress:
    """How far a run is. A checkpoint holds it, so a resumed run continues here."""
    end: int                                              # the run finishes after this many traces
    step: int = 0
    samples: int = 0                                      # traces so far
    seconds: float = 0.0
    recent: list = field(default_factory=list)            # accuracy of the last ten batches, of this stage only
    passed: list = field(default_factory=list)            # a dict for each stage that has been passed
    held_out: list = field(default_factory=list)          # [traces, stage, accuracy] of each test


def learning_rate(cfg, progress):
    """The rate of the next step: a linear warmup, then constant, then half a cosine down to 0."""
    up = min(1, (progress.samples + cfg.batch_size) / max(cfg.warmup, cfg.batch_size))
    down = max(0, progress.samples + cfg.cooldown - progress.end) / max(cfg.cooldown, 1)
    return cfg.learning_rate * up * (1 + math.cos(math.pi * down)) / 2


def is_passed(cfg, progress):
    """Whether the stage is passed: by the accuracy of its last ten batches, or by its number of traces."""
    began = progress.passed[-1]["samples"] if progress.passed else 0
    accurate = cfg.advance and len(progress.recent) == 10 and sum(progress.recent) / 10 >= cfg.advance
    return bool(accurate or cfg.stage_samples and progress.samples - began >= cfg.stage_samples)


def run(cfg):
    """Train and test one model, in the folder that its settings name. -> 0, or 1 if the loss is not finite any more.
    Raises BadInput if settings conflict, or if the folder holds another run."""
    folder, source, given = folder_of(cfg), origin(cfg), asdict(cfg)
    result, saved = earlier(folder, cfg, source)
    if result:
        if result.get("code") != source["code"]:
            print("note    the code or the trace file has changed since this run, so these are its old results; to "
                  "train the new code, choose another --out")
        print(f"{folder} finished after {result['samples']:,} traces. Remove it to train again, or use --eval")
        for row in result["eval"]:
            show(row)
        return 0
    task, stages, tests, model = build(cfg, saved["pieces"] if saved else None)
    cfg, optimizers = model.cfg, make_optimizers(model)
    hard = [block.mixer for block in model.blocks if isinstance(block.mixer, HardDeltaNet)]
    progress = Progress(end=cfg.max_samples)
    if saved:
        progress = Progress(**saved["progress"])
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob("*.tmp"):                     # of a process that was killed while it saved
        part.unlink(missing_ok=True)
    announce(folder, task, stages, model, source, progress)

    last_test, started = {}, time.perf_counter() - progress.seconds
    with tqdm(initial=progress.samples, unit=" traces", disable=sys.stderr is None or None) as bar:
        while progress.samples < progress.end:
            # batch, loss, gradient
            done = len(progress.passed)
            stage = stages[min(done, len(stages) - 1)]                    # the last one also in the decay
            batch = task.batch(cfg.seed, "train", stage, progress.step, cfg.batch_size)
            model.zero_grad()
            with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
                terms, right = losses(task, model, to_tensors(batch, cfg.device))
            terms["reveal"] = cfg.reveal_weight * terms["reveal"]
            if hard and done:
                terms["pull"] = sum(mixer.pull for mixer in hard)
            loss = sum(terms.values())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            # step
            slower = 1 - 0.7 * hard[0].hardness.item() if hard else 1     # small steps for rounded weights
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = slower * learning_rate(cfg, progress)
                optimizer.step()
            # .tolist() waits for the GPU. Not finite: the weights are ruined, so stop and keep the old checkpoint.
            finite, accuracy = torch.stack([(loss + norm).isfinite(), right.nanmean()]).tolist()
            if not finite:
                break
            progress.step += 1
            progress.samples += cfg.batch_size
            progress.seconds = time.perf_counter() - started
            progress.recent = [*progress.recent[-9:], accuracy]
            mean = sum(progress.recent) / len(progress.recent)

            # curriculum
            passed = done < len(stages) and is_passed(cfg, progress)
            if hard and done == 1:                        # the stage in which they harden
                passed = all([mixer.anneal(mean) for mixer in hard]) and passed
            if passed:
                progress.passed.append({"stage": str(stage), "samples": progress.samples, "steps": progress.step,
                                        "seconds": progress.seconds})
                progress.recent = []
                if done == len(stages) - 1:
                    progress.end = min(progress.end, progress.samples + cfg.cooldown)
            bar.total = progress.end if progress.samples + cfg.cooldown > progress.end else None      # in the decay
            bar.set_description_str(f"stage {stage}, {mean:.0%} right", refresh=False)
            bar.update(cfg.batch_size)

            # test, save, log
            if passed or progress.step % cfg.eval_every == 0 or progress.samples >= progress.end:
                tested = stage if done < len(stages) - 1 else tests[0]    # the report uses the last of these tests
                last_test = {tested: evaluate(model, task, tested, cfg)}
                held_out = last_test[tested]["accuracy"]
                progress.held_out.append([progress.samples, str(tested), held_out])
                checkpoint = {"config": given, **source, "progress": asdict(progress), "model": model.state_dict(),
                              "pieces": task.tokenizer.pieces, "optimizers": [x.state_dict() for x in optimizers]}
                save(folder / "ckpt.pt", partial(torch.save, checkpoint))
                summands = " + ".join(f"{name} {term:.3f}" for name, term in terms.items())
                tqdm.write(f"step {progress.step}: {progress.samples:,} traces, {progress.seconds:.0f} s, stage "
                           f"{stage}{' passed' * passed}, {mean:.1%} right, held out {held_out:.1%} at "
                           f"{tested}, loss {loss:.3f} = {summands}")

    if progress.samples < progress.end:                   # the loop has stopped early
        print(f"train.py: the loss or its gradient was not finite after step {progress.step}: try --learning-rate "
              f"{cfg.learning_rate / 3:.1g}", file=sys.stderr)
        return 1
    print(f"trained {progress.samples:,} traces, {progress.step:,} steps, {progress.seconds:.1f} s")
    reached = stages[min(len(progress.passed), len(stages) - 1)]
    if len(progress.passed) < len(stages):
        print(f"stopped by --max-samples, in stage {reached}")
    result = {"model": cfg.model, "task": cfg.task, "seed": cfg.seed, "params": count(model),
              "chance": task.chance(stages[-1]), "trained": str(stages[-1]), "reached": str(reached),
              "samples": progress.samples, "steps": progress.step, "seconds": progress.seconds,
              "passed": progress.passed, "held_out": progress.held_out,
              "eval": report(model, task, tests, cfg, last_test), **source, "config": given}
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
    needed = {"config", "code", "progress", "pieces", "model", "optimizers"}
    if (not isinstance(saved, dict) or not needed <= saved.keys()
            or not saved["config"].keys() <= {f.name for f in fields(Config)}):
        raise BadInput(f"{path} is not a checkpoint of this train.py: use the version that wrote it, or train again")
    return saved


def load(path, **changes):
    """A run's folder or checkpoint -> its Config, task, stages to test (a list of Stage), and model. changes: settings
    to override, such as device="cpu" or eval_at="64x64". Raises BadInput if there is no such model."""
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
    vocabulary). state: what the model carries after reading `traces` traces in parallel. README has an example."""
    printed = []
    for name in task.names:
        text = task.tokenizer.encode(f"{task.prompt}print('{name}', {name})\n{name} ")
        tokens = torch.tensor([text] * traces, device=model.head.weight.device)
        hidden, _ = model(tokens, state)
        printed.append(model.head(hidden[:, -1]).softmax(-1))
    return torch.stack(printed, 1)


def as_read(task, typed):
    """Rewrite a line that somebody typed as the line of repl that has the same effect. So `b, a = a, b` becomes
    `a, b = b, a` or, if commands permute three variables, `a, b, c = b, a, c`. Raises BadInput if there is none."""
    with contextlib.suppress(Exception):                  # whatever fails here, no line of repl has this effect
        if printed := re.fullmatch(r"print\((?:'(\w)', *)?(\w)\)", typed):
            if printed[1] in (None, printed[2]) and printed[2] in task.names:
                return f"print('{printed[2]}', {printed[2]})"
        if not re.fullmatch(r"[a-z, ()]+=[a-z, ()]+", typed):      # else it is one assignment, and cannot call anything
            raise SyntaxError
        memory = dict(zip(task.names, range(1, 10)))      # each variable holds another number
        exec(typed, {"__builtins__": {}}, memory)
        takes = {name: task.names[memory[name] - 1] for name in task.names}
        left = [name for name in task.names if task.moves == "perm" or takes[name] != name]
        if sorted(takes.values()) == sorted(memory) and (task.moves == "perm" or len(left) == 2):
            return f"{', '.join(left)} = {', '.join(takes[name] for name in left)}"
    known = "permutations" if task.moves == "perm" else "swaps of two"
    raise BadInput(f"this model knows {known} of {', '.join(task.names)}, and prints of one variable: type a "
                   f"line like {task.swaps[0]} or print('a', a)")


def typed_lines(task, seed):
    """Yield lists of lines of repl: first the assignments and a print, as in each trace, then each line that somebody
    types, until Ctrl-D or quit. Before the first command, a line like `a = 3` starts again with this value of a."""
    rng, at_start = random.Random(seed), True
    values = dict(line.split(" = ") for line in task.start(rng, {}))
    first = rng.choice(task.names)

    def start():
        lines = [*map(" = ".join, values.items()), *task.question(first, {})]
        print("".join(f"{task.prompt}{line}\n" for line in lines), end="")
        return lines

    yield start()
    while True:
        try:
            typed = input(task.prompt).strip().removeprefix(">>>").strip()
            if not sys.stdin.isatty():
                print(typed)                              # echo input that comes from a pipe
            if typed in ("quit", "exit", "quit()", "exit()"):
                return
            name, _, value = typed.replace(" ", "").partition("=")
            if at_start and name in values and value in values.values():
                other = next(x for x in values if values[x] == value)     # gets the old value, as values differ
                values[name], values[other] = value, values[name]
                yield start()
                continue
            line = typed and as_read(task, typed)
            if line != typed:
                print(f"read as {line}")
            if line:
                at_start = False
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
    print("Python runs each line; the model predicts each variable's value, with a probability. Lines like a = 3 choose "
          "the first values. Type quit to end")
    for lines in typed_lines(task, cfg.seed):
        if len(lines) > 1:                                # a start
            memory, state = {}, None
        executed = data.run(lines, memory, task.prompt)
        tokens, _, _ = task.encode(executed)
        _, state = model(torch.tensor([tokens], device=cfg.device), state)
        print("".join(line.text for line in executed if line.answer), end="")
        words = []
        for name, chances in zip(task.names, beliefs(task, model, state)[0]):
            predicted, truth = task.tokenizer.decode([chances.argmax().item()]), str(memory[name])
            wrong = "" if predicted == truth else f" WRONG, it is {truth}"
            words.append(f"{name} {predicted} ({chances.max():.0%}{wrong})")
        print("model:  " + "  ".join(words))


# ----------------------------------------------------------------------------------------------------------
# python train.py

NO_LIST = ["curriculum", "trace_file", *NOT_IN_FOLDER_NAME]            # a comma in one of these does not make a grid
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
    for f in fields(Config):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=partial(values, f), metavar=f.type.__name__.upper(),
                            help=f"{HELP.get(f.name, '')} [{f.default}]".replace("%", "%%"))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--eval", metavar="RUN", help="test a run's folder or checkpoint, train nothing; may go with "
                        "--eval-at, --eval-samples, --trace-file, --seed, --device and --dtype")
    either.add_argument("--play", metavar="RUN", help="type Python, and see what a repl model predicts")
    given = vars(parser.parse_args(argv))
    to_eval = given.pop("eval", None)
    to_play = given.pop("play", None)
    cells = [dict(zip(given, cell)) for cell in dict.fromkeys(itertools.product(*given.values()))]    # each once
    try:
        if to_eval is not None or to_play is not None:
            if not set(given) <= set(FOR_EVAL):
                raise BadInput("a trained model keeps its settings: with --eval or --play, set only "
                               + ", ".join(FOR_EVAL))
            for cell in cells:
                if to_play is not None:
                    play(to_play, **cell)
                else:
                    cfg, task, tests, model = load(to_eval, **cell)
                    report(model, task, tests, cfg)
            return 0
        grid = [Config(**cell) for cell in cells]
        for cfg in grid:
            build(cfg)                                    # a bad setting is refused before the first run
        failed = []
        for cfg in grid:                                  # if one fails, the others run
            try:
                why = run(cfg) and "see above"
            except (BadInput, OSError, torch.OutOfMemoryError) as error:
                if len(grid) == 1:
                    raise
                why = str(error)
            failed += [f"{folder_of(cfg)}: {why}"] if why else []
        if not failed:
            print(f"next    python plot.py curve {' '.join(str(folder_of(cfg)) for cfg in grid)}")
        elif len(grid) > 1:
            print(f"train.py: {len(failed)} of {len(grid)} runs failed:", *failed, sep="\n", file=sys.stderr)
        return int(bool(failed))
    except (BadInput, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("stopped" if to_eval or to_play else "stopped; the same command resumes from the last checkpoint")
        return 130


if __name__ == "__main__":
    sys.exit(main())
