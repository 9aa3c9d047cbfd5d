"""
Train a model on a task, watch it learn, and test it far beyond what it saw. One flat loop in plain PyTorch.

    python train.py --model deltanet --task repl                   a minute on two CPU cores
    python train.py --model deltanet,transformer --seed 0,1,2      a comma list is a grid, here of six runs
    python train.py --eval out/deltanet-repl --eval-at 512x16      a trained model, on other stages
    python train.py --play out/deltanet-repl                       a trained model, and you type
    torchrun --nproc-per-node 2 train.py --seed 0,1,2,3            a grid, shared out among processes
    python train.py --help                                         every setting, explained

Loss: the mean over all next tokens, plus reveal_weight times the mean over answers (P1: reveals), plus the
state head's (P2 section 4). P1 has only the first. "State" has two meanings: what the program's memory holds,
and what a model carries from token to token.

Curriculum: stages LxS, L commands with a print after every S-th (P1 section 4). A stage is passed when enough
answers of the last ten batches are right (--advance), or after a number of traces (--stage-samples).

Learning rate: up in a straight line, constant, then down half a cosine over the last `cooldown` traces (at
most a third of --max-samples). The fall starts when the last stage is passed, or so many traces before
--max-samples.

A run leaves a folder with ckpt.pt and result.json. If it is stopped, the same command goes on from its last
checkpoint. If --max-samples ended it, it goes on with a larger one, from before the learning rate fell (fall.pt). A
batch depends only on the seed, the stage and its number, so either way the numbers are those of a run that was
never stopped. P1 is arXiv 2602.14814; P2 is "Grounding Code Understanding in Step-by-Step Execution".

Read `run` first, then `losses` and `evaluate`.
"""
import argparse
import contextlib
import difflib
import hashlib
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout                      # a dependency of torch
from tqdm import tqdm

import data
from data import PAD, BadInput, Batch, Stage, Tokenizer, parse_stages
from kernels import resolve_backend
from models import LM, MIXERS, count, make_optimizers
from pfsa import MaybeSwaps, compare

TASKS = {**data.TASKS, "pfsa": MaybeSwaps}


@dataclass
class Config:
    # what to learn
    model: str = "deltanet"        # one of models.py's MIXERS; "a+b" alternates them, block by block
    task: str = "repl"             # one of the TASKS of data.py and pfsa.py
    n_vars: int = 5                # repl, inverse, listperm, pfsa: how many variables
    moves: str = "perm"            # repl, inverse: a command is a perm(utation) of all variables, or a swap
    group: str = "S5"              # group: one of data.py's GROUPS
    digits: int = 2                # arith: digits per number
    trace_file: str = ""           # trace: a file from `data.py trace`; else random functions
    curriculum: str = "auto"       # stages "LxS LxS ...", see data.py; auto: the task's own
    # the model
    d_model: int = 64              # width; inside the MLP it is twice that
    params: int = 0                # not 0: set the MLP's width for about this many parameters
    n_layer: int = 1               # blocks; repl with up to 5 variables needs one, thanks to conv
    n_head: int = 1                # heads, of width d_model / n_head
    conv: int = 12                 # tokens that the short convolution in front of every mixer sees; 0: none
    beta_max: float = 2.0          # delta mixers and ssm: 2 gives eigenvalues in [-1, 1], 1 gives [0, 1]
    gates: str = "exact"           # delta mixers: exact, betas and keys that reach 0 and 1; sigmoid: as in P1
    n_householder: int = 2         # deltaproduct: reflections per token
    states: str = "auto"           # a state head (linear, transformer, contrastive), text, none; auto: the task's
    # training
    reveal_weight: float = 1.0     # extra weight on answers: at 64x8 one token in 181 is an answer
    batch_size: int = 4            # traces per step; small batches make more steps of the same traces
    learning_rate: float = 1.8e-2  # the peak
    warmup: int = 320              # traces until the peak
    cooldown: int = 1280           # traces of the final decay; longer: repl is read further without prints
    advance: float = 0.9           # pass a stage at this accuracy, mean of the last 10 batches
    stage_samples: int = 0         # or after this many traces; 0: never (pfsa: 3000, trace: 4000)
    max_samples: int = 100000      # stop after this many traces (batch_size per step), whatever the stage
    # held-out traces
    eval_at: str = "auto"          # stages to evaluate after training; auto: the last, and harder ones
    eval_samples: int = 64         # traces of each
    eval_every: int = 200          # steps between two evaluations, and two checkpoints, during training
    # the machine
    seed: int = 0                  # of weights and data; the same seed gives the same run
    device: str = "cuda" if torch.cuda.is_available() else "cpu"      # cuda, mps or cpu
    dtype: str = "fp32"            # fp32, or bf16 (autocast; a scan's state stays fp32)
    out: str = "out"               # where the runs' folders go


# {setting: its comment above}, for --help.
HELP = dict(re.findall(r"^    (\w+): \w+ = .*?# (.*)$", inspect.getsource(Config), re.M))
# Settings that make no other run: they are not in a folder's name.
ASIDE = ["max_samples", "eval_at", "eval_samples", "eval_every", "device", "out"]
SEGMENT = 2048                     # tokens evaluated at once; the state is carried to the next segment


# ----------------------------------------------------------------------------------------------------------
# Task, model, loss, accuracy

def build(cfg, pieces=None):
    """-> the task; its curriculum and the stages to test (lists of Stage); the model, its weights from the
    seed. pieces: a checkpoint's vocabulary. Raises ValueError for settings that do not fit together."""
    kind = TASKS[cfg.task]
    task = kind(states=cfg.states, **{name: getattr(cfg, name) for name in kind.settings})
    if pieces:
        task.tokenizer = Tokenizer(pieces)
    stages = parse_stages(task.curriculum if cfg.curriculum == "auto" else cfg.curriculum)
    tests = task.beyond(stages[-1]) if cfg.eval_at == "auto" else parse_stages(cfg.eval_at)
    for stage in stages + tests:
        task.check(stage)
        task.batch(cfg.seed, "test", stage, 0, 2)         # raises ValueError if there are no such traces
    if cfg.n_layer < len(cfg.model.split("+")):
        raise BadInput(f"--model {cfg.model} alternates mixers: give --n-layer {len(cfg.model.split('+'))}")
    if cfg.d_model % 4 or cfg.d_model % (2 * cfg.n_head):
        raise BadInput(f"--d-model {cfg.d_model}: give a multiple of 4 and of twice --n-head {cfg.n_head}")
    if cfg.advance > 1:
        raise BadInput(f"--advance {cfg.advance:g}: give a share of the answers, at most 1")
    if cfg.beta_max > 2:
        raise BadInput(f"--beta-max {cfg.beta_max:g}: above 2, eigenvalues leave [-1, 1]: states explode")

    def model(d_mlp, states="none"):
        shape = SimpleNamespace(**{**vars(cfg), "d_mlp": d_mlp, "states": states})
        return LM(shape, len(task.tokenizer), task.n_slots, task.n_classes)

    width = 2 * cfg.d_model
    if cfg.params:                                        # not counting a state head
        with torch.device("meta"):
            least, more = count(model(8)), count(model(16))
        width = 8 + 8 * round((cfg.params - least) / (more - least))
        if width < 8:
            raise BadInput(f"--params {cfg.params}: this model has at least {least}")
    torch.manual_seed(cfg.seed)                           # torch draws nothing else at random
    return task, stages, tests, model(width, task.states).to(cfg.device)


def to_tensors(batch, device):
    return Batch(*(None if x is None else torch.as_tensor(x).to(device) for x in batch))


def answers(task, batch, right):
    """Which tokens are right (B, T) bool -> which answers are right (B, R), R per trace. With states in the
    text, all states before an answer must be right, too: then the model would have written them itself."""
    after_error = (batch.state_in_text & ~right).cumsum(1) > 0
    right = right & ~after_error
    if task.whole:                                        # one answer, of several tokens
        return (right | ~batch.asked).all(1, keepdim=True)
    return right[batch.asked].view(len(right), -1)


def losses(task, model, batch):
    """-> {"next", "reveal", "state"}: mean cross-entropies in nats; which answers are right (B, R)."""
    hidden, _ = model(batch.tokens)
    logits = model.head(hidden).float()                               # (B, T, vocabulary)
    nats = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), reduction="none", ignore_index=PAD)
    nats = nats.view_as(batch.target)
    terms = {"next": nats.sum() / (batch.target != PAD).sum(), "reveal": nats[batch.asked].mean()}
    if task.states in ("linear", "transformer", "contrastive"):
        terms["state"] = model.to_state.loss(model, hidden, batch)
    return terms, answers(task, batch, logits.argmax(-1) == batch.target)


@torch.no_grad()
def evaluate(model, task, stage, cfg):
    """-> {"stage", "accuracy", "final": of a trace's last answer, "by_answer"} on cfg.eval_samples held-out
    traces. For hidden branches also, in nats per answer: "kl", from the exact predictive to the model's,
    "final_kl", "loss", and "floor", the loss of the exact predictive, the least that any model can have."""
    rows, nats = [], []
    for t, first in enumerate(range(0, cfg.eval_samples, cfg.batch_size)):
        size = min(cfg.batch_size, cfg.eval_samples - first)
        batch = to_tensors(task.batch(cfg.seed, "test", stage, t, size), cfg.device)
        right, state = torch.zeros_like(batch.asked), None
        scores = torch.zeros(*right.shape, 3, dtype=torch.double)     # on the CPU, as mps has no doubles
        for start in range(0, right.shape[1], SEGMENT):
            here = slice(start, start + SEGMENT)
            target, asked = batch.target[:, here], batch.asked[:, here]
            needed = asked | batch.state_in_text[:, here]
            with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
                hidden, state = model(batch.tokens[:, here], state)
                logits = model.head(hidden[needed])
            right[:, here][needed] = logits.argmax(-1) == target[needed]
            if batch.predictive is not None:
                said = logits[asked[needed]], target[asked], batch.predictive[:, here][asked]
                scores[:, here][asked.cpu()] = compare(*(x.cpu() for x in said))
        rows.append(answers(task, batch, right).cpu())
        nats.append(scores[batch.asked.cpu()])
    by_answer = torch.cat(rows).double().mean(0)
    row = {"stage": str(stage), "accuracy": by_answer.mean().item(), "final": by_answer[-1].item(),
           "by_answer": by_answer.tolist()}
    if batch.predictive is not None:
        kl, loss, floor = torch.cat(nats).view(cfg.eval_samples, -1, 3).unbind(-1)      # (traces, answers)
        row |= {"kl": kl.mean().item(), "final_kl": kl[:, -1].mean().item(), "loss": loss.mean().item(),
                "floor": floor.mean().item()}
    return row


def report(model, task, stage, cfg):
    """Evaluate and print a line. -> the row of `evaluate`, with "chance"."""
    row = {**evaluate(model, task, stage, cfg), "chance": task.chance(stage)}
    show(row)
    return row


def show(row):
    """Print a row of `report` in one line."""
    if "kl" in row:
        print(f"eval    {row['stage']}: KL {row['kl']:.4f} nats per answer (0 is perfect), the last "
              f"{row['final_kl']:.4f}; loss {row['loss']:.3f}, of exact beliefs {row['floor']:.3f}")
    else:
        last = f", the last answer {row['final']:.2%}" if len(row["by_answer"]) > 1 else ""
        print(f"eval    {row['stage']}: {row['accuracy']:.2%} right{last} (chance {row['chance']:.1%})")


# ----------------------------------------------------------------------------------------------------------
# One run

def folder_of(cfg):
    """out/model-task-setting=value-...: whatever is not at its default."""
    words = [cfg.model, cfg.task]
    for f in fields(Config):
        if f.name not in ["model", "task", *ASIDE] and getattr(cfg, f.name) != f.default:
            words.append(f"{f.name}={getattr(cfg, f.name)}")
    return Path(cfg.out) / re.sub(r"[^\w=.+-]+", "_", "-".join(words).replace(":", "-"))


def digest(path):
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


# The code as it was imported (an edit during a run does not change what runs): {file: hash}, and the commit of
# git, with + if files have changed since; "" where there is none.
HERE = Path(__file__).resolve().parent
CODE = {name: digest(HERE / name) for name in ["data.py", "kernels.py", "models.py", "pfsa.py", "train.py"]}
COMMIT = subprocess.run("git describe --always --exclude='*' --dirty=+", shell=True, cwd=HERE, capture_output=True,
                        text=True).stdout.strip()


def origin(cfg):
    """What a run's numbers come from: {"commit", "files": {file: hash} of code and traces, "argv", "torch": its
    version, "threads"}."""
    traces = {cfg.trace_file: digest(cfg.trace_file)} if cfg.trace_file else {}
    return {"commit": COMMIT, "files": CODE | traces, "argv": sys.argv, "torch": torch.__version__,
            "threads": torch.get_num_threads()}


def changed(then, now):
    """Two times "files" -> those that have changed, as "data.py, models.py"."""
    return ", ".join(name for name in now if name in then and then[name] != now[name])


def resume(cfg, folder, files):
    """-> the checkpoint that a run goes on from, or None; its result if it is finished, or None. Raises
    ValueError if going on would mix settings or code."""
    result = None
    if (folder / "result.json").exists():
        result = json.loads((folder / "result.json").read_text())
    elif not (folder / "ckpt.pt").exists():
        return None, None
    saved = read_checkpoint(folder / "ckpt.pt")
    before, edited = saved["config"]["max_samples"], changed(saved["files"], files)
    if cfg != Config(**{**saved["config"], **{name: getattr(cfg, name) for name in ASIDE}}):
        raise BadInput(f"{folder} holds a run with other settings: choose another --out")
    if result and (cfg.max_samples <= before or not result["cut_short"]):
        return saved, result                              # more traces would change nothing
    if edited:
        raise BadInput(f"changed since {folder} was begun: {edited}. Undo that, remove the folder, or choose "
                         "another --out")
    if cfg.max_samples < before:
        raise BadInput(f"{folder} was begun with --max-samples {before}: give that, or more")
    if result:                                            # keep what is finished
        shutil.copy(folder / "ckpt.pt", folder / f"{before}-ckpt.pt")
        os.replace(folder / "result.json", folder / f"{before}-result.json")
    if cfg.max_samples > before and saved["at"]["falling"]:
        os.replace(folder / "fall.pt", folder / "ckpt.pt")
        print(f"{folder} goes on where its learning rate began to fall; files of the shorter run: {before}-*")
        saved = read_checkpoint(folder / "ckpt.pt")
    return saved, None


def run(cfg):
    """Train and test one model. It leaves ckpt.pt and result.json in its folder. -> 0, or 1 if the loss or its
    gradient is not finite; a checkpoint, if there is one, is good. Raises ValueError for bad settings."""
    folder, source = folder_of(cfg), origin(cfg)
    saved, result = resume(cfg, folder, source["files"])
    if result:
        print(f"{folder} is finished, with {result['samples']:,} traces; remove it to train again")
        for row in result["eval"]:
            show(row)
        edited = changed(saved["files"], source["files"])
        if edited:
            print(f"note    {edited} has changed since: these are the old numbers")
        if (cfg.eval_at, cfg.eval_samples) != (result["config"]["eval_at"], result["config"]["eval_samples"]):
            print(f"note    tested as it was then; for other stages: train.py --eval {folder} --eval-at ...")
        return 0
    task, stages, tests, model = build(cfg, saved["pieces"] if saved else None)
    optimizers = make_optimizers(model)
    cooldown = min(cfg.cooldown, cfg.max_samples // 3)
    of_each = cfg.stage_samples or task.stage_samples     # 0: a stage ends only by --advance
    # Where the run is. recent: accuracy in up to ten batches; falling: the learning rate falls.
    at = SimpleNamespace(step=0, samples=0, seconds=0.0, recent=[], passed=[], held_out=[], falling=False)
    if saved:
        vars(at).update(saved["at"])
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)

    def save(name):
        state = {"config": asdict(cfg), "files": source["files"], "at": vars(at),
                 "pieces": task.tokenizer.pieces, "model": model.state_dict(),
                 "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        torch.save(state, folder / "ckpt.tmp")
        os.replace(folder / "ckpt.tmp", folder / name)                # never half a file

    def end():
        """After how many traces the run ends."""
        passed_all = len(at.passed) == len(stages)
        return min(cfg.max_samples, at.passed[-1]["samples"] + cooldown) if passed_all else cfg.max_samples

    chance, head_dim = task.chance(stages[-1]), cfg.d_model // cfg.n_head
    dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    backend, why = resolve_backend("auto", cfg.device, dtype, head_dim, head_dim)
    head = f", by a head with {count(model.to_state):,} of these" if count(model.to_state) else ""
    a_third = ", a third of --max-samples" if cooldown < cfg.cooldown else ""
    print(f"run     {folder}, " + (f"continues at step {at.step}" if saved else "from the start"))
    print(f"task    {cfg.task}, stages {' '.join(map(str, stages))}; chance {chance:.1%}")
    print(f"model   {cfg.model}, {count(model):,} parameters; states told: {task.states}{head}")
    print(f"rate    {cfg.learning_rate:g}, falls over the last {cooldown:,} traces{a_third}")
    print(f"device  {cfg.device}, {cfg.dtype}, {torch.get_num_threads()} threads; a scan uses {backend} ({why})")

    bar = tqdm(initial=at.samples, unit=" traces", disable=None)
    needs = f"needs {cfg.advance:.0%}" + (f" or {of_each:,} traces" if of_each else "")
    started = time.perf_counter() - at.seconds
    while at.samples < end():
        # learning rate
        if at.samples >= end() - cooldown and not at.falling:
            save("fall.pt")
            at.falling = True
        up = min(1, (at.samples + cfg.batch_size) / max(cfg.warmup, cfg.batch_size))
        down = max(0, at.samples - (end() - cooldown)) / max(cooldown, 1)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = cfg.learning_rate * up * (1 + math.cos(math.pi * down)) / 2

        # batch, loss, step
        number = min(len(at.passed) + 1, len(stages))                 # of the stage, from 1
        stage, last = stages[number - 1], number == len(stages)
        batch = to_tensors(task.batch(cfg.seed, "train", stage, at.step, cfg.batch_size), cfg.device)
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
            terms, right = losses(task, model, batch)
        terms["reveal"] = cfg.reveal_weight * terms["reveal"]
        loss = sum(terms.values())
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(loss.item() + norm.item()):
            print(f"train.py: loss or gradient not finite in step {at.step}: try --learning-rate "
                  f"{cfg.learning_rate / 3:.1g}", file=sys.stderr)
            return 1
        for optimizer in optimizers:
            optimizer.step()
        at.step, at.samples = at.step + 1, at.samples + cfg.batch_size
        at.seconds = time.perf_counter() - started
        at.recent = [*at.recent[-9:], right.float().mean().item()]
        mean = sum(at.recent) / len(at.recent)            # of the last ten batches
        where = f"stage {stage} ({number} of {len(stages)})"
        bar.total = end() if at.falling else None         # before, nobody knows
        aim = "learning rate falls" if at.falling else needs
        bar.set_description_str(f"{where}: {mean:.0%} right, {aim}", refresh=False)
        bar.update(cfg.batch_size)

        # test
        if at.step % cfg.eval_every == 0:
            row = evaluate(model, task, tests[0] if last else stage, cfg)
            at.held_out.append([at.samples, row["stage"], row["accuracy"]])
            parts = " + ".join(f"{name} {term.item():.3f}" for name, term in terms.items())
            tqdm.write(f"step {at.step}: {at.samples:,} traces, {at.seconds:.0f} s, {where}, {mean:.1%} right, "
                       f"held out {row['accuracy']:.1%} at {row['stage']}, loss {loss.item():.3f} = {parts}")

        # curriculum
        began = at.passed[-1]["samples"] if at.passed else 0
        enough = len(at.recent) == 10 and mean >= cfg.advance
        enough = enough or of_each and at.samples - began >= of_each
        if enough and len(at.passed) < len(stages):                   # else the last stage was passed before
            at.passed.append({"stage": str(stage), "samples": at.samples, "steps": at.step,
                              "seconds": at.seconds})
            tqdm.write(f"stage {stage} passed after {at.samples:,} traces, {at.seconds:.0f} s: {mean:.1%} right")
            if not last:
                at.recent = []

        # save
        if at.step % cfg.eval_every == 0:
            save("ckpt.pt")
    bar.close()
    save("ckpt.pt")

    print(f"trained {at.samples:,} traces, {at.step:,} steps, {at.seconds:.1f} s")
    reached = stages[min(len(at.passed), len(stages) - 1)]
    cut_short = end() >= cfg.max_samples or cooldown < cfg.cooldown
    if cut_short:
        print(f"short   because of --max-samples, in stage {reached}; with a larger one, the same command "
              "goes on")
    rows = [report(model, task, stage, cfg) for stage in tests]
    result = {"model": cfg.model, "task": cfg.task, "seed": cfg.seed, "params": count(model), "chance": chance,
              "trained": str(stages[-1]), "reached": str(reached), "cut_short": cut_short,
              "samples": at.samples, "steps": at.step, "seconds": at.seconds, "passed": at.passed,
              "held_out": at.held_out, "eval": rows, **source, "config": asdict(cfg)}
    (folder / "result.tmp").write_text(json.dumps(result) + "\n")
    os.replace(folder / "result.tmp", folder / "result.json")
    return 0


# ----------------------------------------------------------------------------------------------------------
# A trained model

def read_checkpoint(path):
    """-> what `run` has saved. Raises ValueError for any other file."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        cfg = Config(**saved["config"])
        if "files" in saved and cfg.task in TASKS and set(cfg.model.split("+")) <= set(MIXERS):
            return saved
    except FileNotFoundError:
        raise BadInput(f"{path}: no such checkpoint")
    except Exception:                                     # a broken file can raise anything
        pass
    raise BadInput(f"{path}: cut short, or its task, mixer or settings are not in this code")


def load(path, **changes):
    """A run's folder or checkpoint, some settings changed -> its Config, task, stages to test, and model.
    Raises ValueError if there is none, or if its weights do not fit."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    saved = read_checkpoint(path)
    cfg = Config(**{**saved["config"], "device": Config.device, "eval_at": "auto", **changes})
    edited = changed(saved["files"], origin(cfg)["files"])
    if edited:
        print(f"note    {edited} has changed since this model was trained")
    task, _, tests, model = build(cfg, saved["pieces"])
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError:
        raise BadInput(f"{path}: its weights do not fit this models.py")
    return cfg, task, tests, model


@torch.no_grad()
def beliefs(task, model, state, traces=1):
    """If all variables of repl were printed now, in each of `traces` traces that were read to `state`: what the
    model expects of each print -> probabilities of all tokens (traces, n_vars, vocabulary)."""
    found = []
    for name in task.names:
        question = task.tokenizer.encode(f"{task.prompt}print('{name}', {name})\n{name} ")
        tokens = torch.tensor([question] * traces, device=model.head.weight.device)
        hidden, _ = model(tokens, state)
        found.append(model.head(hidden[:, -1]).softmax(-1))
    return torch.stack(found, 1)


@torch.no_grad()
def play(path, **changes):
    """Python executes the lines that you type, and the model reads them. After each, it says what it expects of
    every variable. Ctrl-D or quit ends it."""
    cfg, task, _, model = load(path, **changes)
    if cfg.task != "repl" or cfg.states == "text":
        raise BadInput(f"--play {path}: give a model trained on repl, without states in the text")
    prompt = task.prompt if sys.stdin.isatty() else ""
    if prompt:
        with contextlib.suppress(ImportError):            # not on Windows
            import readline                               # noqa: F401  line editing for input()
    memory, state = {}, None

    def lines():
        for line in itertools.islice(task.program(random.Random(cfg.seed), Stage(1), memory), task.n_vars):
            print(task.prompt + line)
            yield line
        while True:
            try:
                typed = input(prompt).strip()
                if typed in ("quit", "exit", "quit()", "exit()"):
                    return
                if typed:
                    yield task.line(typed)
            except EOFError:
                return
            except BadInput as error:
                print(error)

    print("Python runs each line, and the model says what every variable holds now, and how sure it is. End: quit")
    for line in lines():
        parts = data.run([line], memory, task.prompt)
        tokens, _, _ = task.encode(parts)
        _, state = model(torch.tensor([tokens], device=cfg.device), state)
        print("".join(part.text for part in parts if part.answer), end="")
        if memory.keys() >= set(task.names):              # all have a value
            words = []
            for name, chances in zip(task.names, beliefs(task, model, state)[0]):
                said, truth = task.tokenizer.decode([chances.argmax().item()]), str(memory[name])
                wrong = "" if said == truth else f" WRONG, it is {truth}"
                words.append(f"{name} {said} ({chances.max():.0%}{wrong})")
            print("model:  " + "  ".join(words))


# ----------------------------------------------------------------------------------------------------------
# python train.py

HAVE = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
CHOICES = {"task": TASKS, "moves": ["swap", "perm"], "group": data.GROUPS, "dtype": ["fp32", "bf16"],
           "gates": ["exact", "sigmoid"],
           "states": ["auto", "none", "linear", "transformer", "contrastive", "text"],
           "device": [name for name, there in HAVE.items() if there]}
MAY_BE_ZERO = ["params", "conv", "reveal_weight", "warmup", "cooldown", "stage_samples", "seed"]
NO_LIST = ["curriculum", "trace_file", *ASIDE]            # a comma makes no grid of these
FOR_EVAL = ["eval_at", "eval_samples", "trace_file", "seed", "device", "dtype"]       # --eval may change them


def values(f, text):
    """What stands after the flag of a field, a comma list -> its values. Raises argparse's error."""
    found = []
    for word in [text] if f.name in NO_LIST else text.split(","):
        try:
            value = f.type(word.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word}: give a number ({f.type.__name__})")
        if f.name in CHOICES and value not in CHOICES[f.name]:
            raise argparse.ArgumentTypeError(f"{value}: choose from {', '.join(CHOICES[f.name])}")
        if f.name == "model" and not set(value.split("+")) <= set(MIXERS):
            raise argparse.ArgumentTypeError(f"{value}: choose from {', '.join(MIXERS)}, or join some by +")
        if f.type is not str and not (0 < value < 2 ** 63 or value == 0 and f.name in MAY_BE_ZERO):
            least = "0 or more" if f.name in MAY_BE_ZERO else "more than 0"
            raise argparse.ArgumentTypeError(f"{value}: give a number, {least}")
        found.append(value)
    return found


def nearest(flag, flags):
    """The flag that a wrong one stands for: one with its initials (--lr), or the most similar, or ""."""
    short = [other for other in flags if re.sub(r"(\w)\w*-?", r"\1", other) == flag]
    similar = difflib.get_close_matches(flag, flags, 1)
    return "".join(short[:1] or similar)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.print_usage = lambda file: None                            # an error is one line
    flags = {f"--{f.name.replace('_', '-')}": f for f in fields(Config)}
    for flag, f in flags.items():
        parser.add_argument(flag, type=partial(values, f), metavar=f.type.__name__.upper(),
                            help=f"{HELP[f.name]} [{f.default}]".replace("%", "%%"))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--eval", metavar="RUN", help="evaluate a run's folder or checkpoint, train nothing")
    either.add_argument("--play", metavar="RUN", help="type Python, and see what a repl model expects")
    words = sys.argv[1:] if argv is None else argv
    words = [re.sub(r"^--[\w-]+", lambda flag: flag[0].replace("_", "-"), word) for word in words]     # --n_layer
    given, unknown = parser.parse_known_args(words)
    if unknown:
        meant = nearest(unknown[0], flags)
        meant = f"Is it {meant}? " if meant else ""
        parser.error(f"{unknown[0]}: no such setting. {meant}--help lists all")
    given = vars(given)
    to_eval, to_play = given.pop("eval", None), given.pop("play", None)
    grid = list(dict.fromkeys(itertools.product(*given.values())))          # each cell once
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))    # by torchrun
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    code, folders = 0, []
    try:
        if (to_eval or to_play) and not set(given) <= set(FOR_EVAL):
            names = ", --".join(FOR_EVAL).replace("_", "-")
            raise BadInput(f"a trained model keeps its settings: give only --{names}")
        for cell in [] if to_eval or to_play else grid:
            build(Config(**dict(zip(given, cell))))       # a bad setting is told before the first run
        for cell in grid[rank::processes]:
            settings = dict(zip(given, cell))
            if to_play:
                play(to_play, **settings)
            elif to_eval:
                cfg, task, tests, model = load(to_eval, **settings)
                for stage in tests:
                    report(model, task, stage, cfg)
            else:
                cfg = Config(**settings)
                folders.append(folder_of(cfg))
                folders[-1].mkdir(parents=True, exist_ok=True)
                with FileLock(folders[-1] / ".lock", timeout=0):
                    code = max(code, run(cfg))
        if folders:
            print(f"next    python plot.py curve {' '.join(map(str, folders))}")
    except Timeout:
        parser.error(f"{folders[-1]} is in use by another process: wait for it, or choose another --out")
    except (BadInput, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        if not (to_eval or to_play):
            print("stopped; the same command goes on from the last checkpoint, if there is one")
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
