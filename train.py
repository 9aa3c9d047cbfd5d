"""
Train a model on a task, watch it learn, and test it far beyond what it saw. Nothing is hidden in a library.

    python train.py --model deltanet --task repl                   half a minute on two laptop cores
    python train.py --model deltanet,transformer --seed 0,1,2      a grid: six runs, finished ones are skipped
    python train.py --eval out/deltanet-repl --eval-at 512x16      a trained model, somewhere else
    python train.py --probe out/deltanet-repl                      are the states in there?
    python train.py --play out/deltanet-repl                       a trained model, and you type
    python train.py --help                                         every setting, with its reason

Loss: the mean over all next tokens, plus reveal_weight times the mean over revealed values, plus state_weight
times the mean over the state head's softmaxes at line ends (P2 section 4, "linear"). P1 has only the first.

Curriculum: stages LxS, L commands with a reveal after every S-th (P1 section 4). A stage is passed when
reveals of fresh training traces are right often enough (--advance), or after a fixed number of traces
(--stage-samples, as in P1). With --carry n, the last stage's traces are n times as long and read in n steps,
the state handed on, its gradient not (2507.02782): so a model meets the states that it will have far out.

Learning rate: up in a straight line, constant, then down half a cosine over the last `cooldown` traces.
Constant, because with --advance nobody knows beforehand when the last stage will be passed; the fall starts
at that moment, or in time to end at max_samples. With --stage-samples the end is known, and a cooldown as
long as the run is P1's cosine. So one rule is well defined in both cases.

A run leaves a folder with ckpt.pt (torch.load(weights_only=True) reads it), metrics.csv and result.json.
P1 is arXiv 2602.14814; P2 is "Grounding Code Understanding in Step-by-Step Execution".
"""
import csv
import inspect
import itertools
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
import zlib
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no such module; memory is then not reported
    resource = None

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import (PAD, SPLITS, TASKS, Interrupt, Parser, Stage, Tokenizer, UserError, one_of, parse_stages,
                  start)
from kernels import resolve_backend
from models import LM, MIXERS, STATE_HEADS


@dataclass
class Config:
    # what to learn
    model: str = "deltanet"        # one of models.py's MIXERS; "a+b" alternates them, block by block
    task: str = "repl"             # repl, pfsa, group, parity, listperm, arith or trace: see data.py
    n_vars: int = 5                # variables; repl, listperm: 2 to 9, with five they form S5; pfsa: 2 to 5
    moves: str = "swap"            # repl: a command is a swap of two variables, or a perm(utation) of all
    group: str = "S5"              # group: one of data.py's GROUPS
    digits: int = 2                # arith: of each number
    trace_file: str = ""           # trace: what data.py trace made; none: functions made at random
    sample_length: int = 0         # parity, listperm, arith: 1 for programs of 2 to L lines, P2's curriculum
    curriculum: str = "auto"       # stages "LxS LxS ..."; LxS:KIND is for data.py; auto: the task's own
    # the model: these make 77 thousand parameters
    d_model: int = 64              # width
    d_mlp: int = 128               # width inside the MLP
    params: int = 0                # not 0: choose d_mlp so that the model has about as many parameters
    n_layer: int = 1               # blocks; swaps need one, as the convolution already sees both names
    n_head: int = 1                # heads of width d_model / n_head; one learns in fewer steps than four
    beta_max: float = 2.0          # delta mixers and ssm: 2 gives eigenvalues in (-1, 1), 1 gives (0, 1)
    n_householder: int = 2         # deltaproduct: reflections a token
    # the loss
    reveal_weight: float = 1.0     # on revealed values, one token in 85 at 64x8; 0 is plain next-token loss
    state_weight: float = 1.0      # on the state head; 0 is no state supervision (pfsa: exact beliefs)
    state_layer: int = 0           # the state head reads after so many blocks; 0: after all of them
    state_head: str = "auto"       # linear, transformer or contrastive; auto: linear if states have slots
    # the optimiser, AdamW
    batch_size: int = 16           # traces a step; small, as the first stage takes many steps, not much data
    learning_rate: float = 6e-3    # its peak
    lr_final: float = 0.0          # its end, as a share of the peak
    warmup: int = 320              # traces until the peak
    cooldown: int = 1920           # traces of the final fall; it buys accuracy beyond the trained lengths
    weight_decay: float = 0.0      # none: data never repeat, so there is nothing to overfit
    grad_clip: float = 1.0         # norm at which gradients are clipped
    # when to move on, when to stop
    advance: float = 0.98          # pass a stage at this reveal accuracy, mean of the last 10 batches
    stage_samples: int = 0         # not 0: pass each stage after this many traces instead (pfsa: 3000)
    carry: int = 1                 # last stage: traces so many times as long, in steps; the state goes on
    max_samples: int = 100000      # stop after this many traces, wherever the curriculum is
    until: float = 0.0             # not 0: stop at this held-out accuracy, twice in a row, in the last stage
    # held-out traces
    eval_at: str = "auto"          # stages to evaluate after training; auto: the last, and 2x and 4x as far
    eval_samples: int = 64         # traces of each
    eval_every: int = 100          # steps between two evaluations during training, at the current stage
    segment: int = 2048            # tokens evaluated at once; the state is carried on to the next segment
    # the machine
    seed: int = 0                  # of weights and data; the same seed gives the same run
    device: str = "auto"           # auto, cuda, mps or cpu
    dtype: str = "fp32"            # fp32, or bf16 for all but the scan's state
    save_every: int = 100          # steps between two checkpoints
    out: str = "out"               # where the runs' folders go
    name: str = "auto"             # the run's folder; auto: model, task and settings not at their default


HELP = dict(re.findall(r"^    (\w+): \w+ = .*?# (.*)$", inspect.getsource(Config), re.M))
POSITIVE = """d_model d_mlp n_layer n_head beta_max n_householder batch_size learning_rate grad_clip advance
carry max_samples eval_samples eval_every segment save_every""".split()
WITH_EVAL = "eval_at eval_samples trace_file segment seed device dtype".split()  # --eval may change them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BESIDE_THE_POINT = "device save_every out name".split()               # what does not change a run's outcome


# ----------------------------------------------------------------------------------------------------------
# The command line: Config's fields as flags, comma lists as grids

def flag(name):
    return "--" + name.replace("_", "-")


def parse(argv):
    """-> the Configs that the comma lists span, the given settings (first values), the other arguments."""
    parser = Parser(__doc__)
    for f in fields(Config):
        parser.add_argument(flag(f.name), metavar=f.type.__name__,
                            help=f"{HELP[f.name]} [{f.default}]".replace("%", "%%"))
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run, as a grid does")
    parser.add_argument("--overwrite", action="store_true", help="start over where a run's folder exists")
    parser.add_argument("--eval", metavar="CKPT", help="evaluate a checkpoint or run folder, train nothing")
    parser.add_argument("--probe", metavar="CKPT", help="read states off a frozen model's hidden vectors")
    parser.add_argument("--play", metavar="CKPT", help="type Python, and see what a repl model expects")
    args = parser.parse_args(argv)
    if args.resume and args.overwrite:
        raise UserError("--resume goes on, --overwrite starts over: give one of them")
    axes = {}
    for f in fields(Config):
        text = getattr(args, f.name)
        try:
            if text is not None:
                axes[f.name] = [f.type(word.strip()) for word in text.split(",")]
        except ValueError:
            raise UserError(f"{flag(f.name)} {text}: give {f.type.__name__}s, separated by commas")
    given, grid = {name: values[0] for name, values in axes.items()}, any(len(v) > 1 for v in axes.values())
    alone = [name for name in ("eval", "probe", "play", "resume", "overwrite") if getattr(args, name)]
    if (args.eval or args.probe or args.play) and (set(given) - set(WITH_EVAL) or grid or len(alone) > 1):
        raise UserError(f"--{alone[0]} has its settings from the checkpoint: give only " +
                        ", ".join(map(flag, WITH_EVAL)) + " beside it, one value each")
    return [Config(**dict(zip(axes, cell))) for cell in itertools.product(*axes.values())], given, args


def build_task(cfg, tokenizer=None):
    """-> task, and the stages of its curriculum."""
    one_of("--task", cfg.task, TASKS)
    kind = TASKS[cfg.task]
    task = kind(*(getattr(cfg, option) for option in kind.options), tokenizer)
    return task, parse_stages(task.curriculum if cfg.curriculum == "auto" else cfg.curriculum, task)


def eval_stages(cfg, task, stages):
    return task.beyond(stages[-1]) if cfg.eval_at == "auto" else parse_stages(cfg.eval_at, task)


def stage_samples(cfg):
    """Traces after which a stage is passed, 0 if that depends on what the model has learned."""
    return cfg.stage_samples or TASKS[cfg.task].stage_samples


def total_samples(cfg, stages):
    """Traces after which a run ends at the latest."""
    return stage_samples(cfg) * len(stages) or cfg.max_samples


def pick_device(name):
    """-> torch.device, and why it was chosen."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    one_of("--device", name, ["auto", *have])
    if name == "auto":
        return torch.device(next(kind for kind in have if have[kind])), "the fastest here"
    if not have[name]:
        raise UserError(f"--device {name}: this machine, or this torch, has none; use --device auto")
    return torch.device(name), "as asked"


def check(cfg):
    """Raise UserError for settings that cannot be run, before anything is built."""
    for f in fields(Config):
        value = getattr(cfg, f.name)
        least = "above 0" if f.name in POSITIVE else "0 or more"
        if f.type is not str and not (0 < value < math.inf or value == 0 and least == "0 or more"):
            raise UserError(f"{flag(f.name)} {value}: give a number, {least}")
    mixers = cfg.model.split("+")
    for mixer in mixers:
        one_of("--model", mixer, MIXERS)
    task, stages = build_task(cfg)
    eval_stages(cfg, task, stages)
    pick_device(cfg.device)
    one_of("--dtype", cfg.dtype, DTYPES)
    total = total_samples(cfg, stages)
    if cfg.n_layer < len(mixers):
        raise UserError(f"--model {cfg.model} alternates mixers: give --n-layer {len(mixers)} or more")
    if cfg.d_model % (2 * cfg.n_head):
        raise UserError(f"--d-model {cfg.d_model}: must split into --n-head {cfg.n_head} heads of even width")
    if cfg.beta_max > 2:
        raise UserError(f"--beta-max {cfg.beta_max:g}: above 2, eigenvalues leave [-1, 1] and states explode")
    if max(cfg.advance, cfg.until) > 1:
        raise UserError("--advance and --until are accuracies: give at most 1")
    if not task.next_token and not (cfg.state_weight and state_head(cfg, task) == "linear"):
        raise UserError(f"--task {cfg.task}: learned from states alone, by --state-head linear, so give "
                        "--state-weight above 0")
    if total > cfg.max_samples:
        raise UserError(f"--stage-samples times {len(stages)} stages is {total}: raise --max-samples to that")
    if cfg.warmup + cfg.cooldown > total:
        raise UserError(f"--warmup plus --cooldown is more than the run's {total} traces: lower them")
    if cfg.carry > 1 and cfg.task not in ("repl", "group"):
        raise UserError(f"--carry cuts traces after each spacing, --task {cfg.task} has none: leave it at 1")
    if cfg.carry > 1 and stages[-1].commands % stages[-1].spacing:
        raise UserError(f"--carry: in the last stage, {stages[-1]}, the spacing must divide the commands")
    if cfg.state_layer > cfg.n_layer or cfg.state_layer and not task.next_token:
        raise UserError(f"--state-layer {cfg.state_layer}: give at most --n-layer {cfg.n_layer}; and 0 for "
                        "--task group, whose state head gives its answers")
    state_head(cfg, task)
    sized(cfg, len(task.tokenizer), task.n_slots, task.n_classes)


def run_folder(cfg):
    """out/model-task-setting=value-...: whatever is not at its default, unless --name says otherwise."""
    words = [cfg.model, cfg.task]
    for f in fields(Config):
        if f.name not in ["model", "task", *BESIDE_THE_POINT] and getattr(cfg, f.name) != f.default:
            words.append(f"{f.name}={getattr(cfg, f.name)}")
    name = re.sub(r"[^\w=.+-]+", "_", "-".join(words))
    if len(name) > 200:                                                  # file systems allow 255
        name = f"{name[:191]}-{zlib.crc32(name.encode()):08x}"
    return Path(cfg.out) / (name if cfg.name == "auto" else cfg.name)


# ----------------------------------------------------------------------------------------------------------
# Loss and score

def questions(task, batch):
    """-> asked (B, T) bool, where a token of an answer is read; these tokens (N,), trace by trace."""
    if not task.next_token:                                              # the label of a token is the state
        return batch.line_end, batch.state[batch.line_end][:, 0]
    return batch.answer.roll(-1, 1), batch.tokens[batch.answer]


def score(task, asked, right):
    """Which tokens of answers (N,) are right -> (B, R) bool, which of the R answers of a trace are."""
    if not task.whole:
        return right.view(len(asked), -1)
    wrong = torch.zeros(len(asked), device=right.device)
    return wrong.index_add(0, asked.nonzero()[:, 0], (~right).float())[:, None] == 0


def loss_terms(cfg, model, task, batch, hidden, told):
    """From a model's hidden vectors, the last ones and those of which states are asked, -> {"next", "reveal",
    "state"}: mean cross-entropies in nats; and the accuracy of answers."""
    terms, (asked, answers) = {}, questions(task, batch)
    if cfg.state_weight:
        terms["state"] = model.to_state.loss(model, told, batch)
    if task.next_token:
        logits, after = model.head(hidden).float(), batch.tokens.roll(-1, 1)         # (B, T, vocabulary)
        nats = F.cross_entropy(logits.flatten(0, 1), after.flatten(), reduction="none", ignore_index=PAD)
        nats = nats.view_as(after)
        terms["next"] = nats[:, :-1].sum() / (after[:, :-1] != PAD).sum()            # the last has no next
        terms["reveal"] = nats[asked].mean()
        guess = logits[asked]
    else:
        guess = model.to_state(hidden[asked])[:, 0]
    return terms, score(task, asked, guess.argmax(-1) == answers).float().mean()


@torch.no_grad()
def read(cfg, model, task, stage, split, device, places):
    """Read cfg.eval_samples traces of a stage -> batch by batch: it, and the hidden vectors (N, D) at
    places(batch), a (B, T) bool, trace by trace. It takes cfg.segment tokens at a time and carries the state,
    so memory does not grow with the length (but for a Transformer's cache)."""
    for t, first in enumerate(range(0, cfg.eval_samples, cfg.batch_size)):
        size = min(cfg.batch_size, cfg.eval_samples - first)
        batch = task.batch(stage, size, cfg.seed, split, t).to(device)
        if not len(batch.tokens):                                        # a file has no more
            return
        there, state, hidden = places(batch), None, []
        with autocast(cfg, device):
            for tokens, here in zip(batch.tokens.split(cfg.segment, 1), there.split(cfg.segment, 1)):
                y, state = model(tokens, state)
                hidden.append(y[here])
        segment = there.nonzero()[:, 1] // cfg.segment                   # they came segment by segment
        yield batch, torch.cat(hidden)[segment.argsort(stable=True).argsort()]


@torch.no_grad()
def evaluate(cfg, model, task, stage, device):
    """Accuracy on held-out traces of a stage, true commands in the context.

    -> {"commands", "spacing", "reveal_acc", "final_acc", "by_reveal": accuracy at each reveal of a trace}. Of
    hidden branches also, in nats an answer: "kl", the model's chances measured by the exact ones, "final_kl",
    the same at the last; "loss", at the answers that were sampled; "floor", what that is for the exact
    chances, the least anyone can have."""
    right, nats, places = [], {"kl": [], "loss": [], "floor": []}, lambda batch: questions(task, batch)[0]
    for batch, hidden in read(cfg, model, task, stage, "test", device, places):
        asked, answers = questions(task, batch)
        with autocast(cfg, device):
            guess = model.head(hidden) if task.next_token else model.to_state(hidden)[:, 0]
        right.append(score(task, asked, guess.argmax(-1) == answers).cpu())
        if batch.chances is not None:
            log_q, p = guess.double().log_softmax(-1).cpu(), batch.chances[batch.answer].double().cpu()
            at, digits = answers.cpu()[:, None], ord("1") + torch.arange(p.shape[-1])
            kl = (torch.special.xlogy(p, p) - p * log_q[:, digits]).sum(-1)
            loss, floor = -log_q.gather(-1, at), -p.gather(-1, at - ord("1")).log()
            for name, x in (("kl", kl), ("loss", loss), ("floor", floor)):
                nats[name].append(x.view(len(asked), -1))
    by_reveal = torch.cat(right).double().mean(0)                        # (R,)
    row = {**stage._asdict(), "reveal_acc": by_reveal.mean().item(), "final_acc": by_reveal[-1].item(),
           "by_reveal": by_reveal.tolist()}
    if nats["kl"]:
        row.update({name: torch.cat(x).mean().item() for name, x in nats.items()},
                   final_kl=torch.cat(nats["kl"])[:, -1].mean().item())
    return row


def stage_of(row):
    """Where a row of evaluate() was measured."""
    return Stage(row["commands"], row["spacing"], row["kind"])


def show_eval(row, task, stages):
    L, S, kind = stage = stage_of(row)
    inside = any(s.commands - s.spacing <= L - S and L <= s.commands for s in stages)  # lengths, see Trace
    trained = "trained here" if stage in stages or task.whole and inside else "never seen"
    if "kl" in row:
        return (f"eval    {L} lines, prints {kind or 'random'}, 1 in {S}: KL {row['kl']:.4f} nats an answer "
                f"(the last {row['final_kl']:.4f}); loss {row['loss']:.3f}, the floor {row['floor']:.3f}")
    if task.whole:
        lines = L if S == 1 else f"{L - S + 1} to {L}"
        return f"eval    {lines} lines: {row['reveal_acc']:.2%} right (chance {task.chance:.1%}; {trained})"
    return (f"eval    {L} commands, spacing {S}: {row['reveal_acc']:.2%} right, the last "
            f"{row['final_acc']:.2%} (chance {task.chance:.1%}; {trained})")


# ----------------------------------------------------------------------------------------------------------
# The files of a run

FORMAT = "state tracking 1"


def write_atomically(path, write):
    """write(file), then rename: whoever reads, whenever we die, finds the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(path, cfg, task, model, optimizer, progress):
    checkpoint = {"format": FORMAT, "config": asdict(cfg), "lexemes": list(task.tokenizer.lexemes),
                  "progress": progress, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write_atomically(path, lambda file: torch.save(checkpoint, file))


def load_checkpoint(path):
    """-> the saved dict, on the CPU. `path` is a ckpt.pt or the folder that holds it."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        ours = checkpoint["format"] == FORMAT and set(checkpoint["config"]) == set(HELP)
    except Exception:  # a foreign or broken file fails in as many ways as there are files
        ours = False
    if not ours:
        raise UserError(f"{path}: cut short, or no checkpoint of this version of train.py; give another")
    return checkpoint


def load_model(path, **changes):
    """-> cfg, task, stages and model of a checkpoint, some settings changed."""
    checkpoint = load_checkpoint(path)
    cfg = replace(Config(**checkpoint["config"]), **changes)
    check(cfg)
    task, stages = build_task(cfg, Tokenizer(checkpoint["lexemes"]))
    model = build_model(cfg, task, pick_device(cfg.device)[0])
    model.load_state_dict(checkpoint["model"])
    return cfg, task, stages, model


def look_at(cfg, resume, overwrite):
    """What to do about a run whose folder may exist. -> "new", "finished", or a checkpoint to go on from.
    Raises UserError where going on would lose something or mix two runs."""
    folder = run_folder(cfg)
    try:
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cfg.out).close()
    except OSError as error:
        raise UserError(f"--out {cfg.out}: cannot write there ({error.strerror}); choose another folder")
    if not folder.exists():
        return "new"
    if not (folder / "ckpt.pt").exists():
        raise UserError(f"{folder} exists but holds no run of ours: choose another --name")
    if overwrite:
        return "new"
    saved = load_checkpoint(folder)
    there, here = saved["config"], asdict(cfg)
    for name in here:
        if name not in BESIDE_THE_POINT and there[name] != here[name]:
            raise UserError(f"{folder} holds a run with {flag(name)} {there[name]}, not {here[name]}: choose "
                            "another --name, or --overwrite it")
    if (folder / "result.json").exists():
        return "finished"
    if not resume:
        raise UserError(f"{folder} holds an unfinished run: --resume goes on, --overwrite starts over")
    return saved


COLUMNS = """step samples seconds stage commands spacing lr loss next reveal state grad_norm reveal_acc
held_out_acc""".split()


def open_metrics(path, step):
    """-> metrics.csv, open, and its csv writer. Rows later than `step`, the checkpoint's, are dropped."""
    kept = []
    if step:
        with open(path, newline="") as file:
            kept = list(csv.DictReader(file))[:step]                     # a row a step
    file = open(path, "w", newline="")
    rows = csv.DictWriter(file, COLUMNS)
    rows.writeheader()
    rows.writerows(kept)
    return file, rows


# ----------------------------------------------------------------------------------------------------------
# One run

def count(module):
    return sum(p.numel() for p in module.parameters())


def sized(cfg, *sizes):
    """-> cfg, its d_mlp such that the LM has cfg.params parameters, give or take a tenth."""
    if not cfg.params:
        return cfg
    cfg, head = replace(cfg, state_head="linear"), cfg.state_head         # others do not count
    with torch.device("meta"):                                           # shapes without numbers
        least, more = (count(LM(replace(cfg, d_mlp=8 * n), *sizes)) for n in (1, 2))
    n = max(0, round((cfg.params - least) / (more - least)))
    if abs(least + n * (more - least) - cfg.params) > 0.1 * cfg.params:
        raise UserError(f"--params {cfg.params}: {cfg.model} so wide and deep has {least} at the least; "
                        "change --d-model or --n-layer")
    return replace(cfg, d_mlp=8 * (n + 1), state_head=head)


def state_head(cfg, task):
    """The kind of state head that a run has. Raises UserError if there can be none such."""
    one_of("--state-head", cfg.state_head, ["auto", *STATE_HEADS])
    if cfg.state_head == "linear" and cfg.state_weight and not task.n_slots:
        raise UserError(f"--task {cfg.task}: its states are text of any length, so give --state-head "
                        "transformer or contrastive, or --state-weight 0")
    kind = ("linear" if task.n_slots else "transformer") if cfg.state_head == "auto" else cfg.state_head
    return kind if cfg.state_weight else "linear"


def build_model(cfg, task, device):
    sizes = len(task.tokenizer), task.n_slots, task.n_classes
    torch.manual_seed(cfg.seed)                                          # torch draws nothing else at random
    return LM(sized(replace(cfg, state_head=state_head(cfg, task)), *sizes), *sizes).to(device)


def autocast(cfg, device):
    return torch.autocast(device.type, torch.bfloat16) if cfg.dtype == "bf16" else nullcontext()


def learning_rate(cfg, samples, fall_from):
    """After `samples` traces, if the final fall starts at `fall_from` (see the top)."""
    up = min(1, (samples + cfg.batch_size) / max(cfg.warmup, cfg.batch_size))
    down = min(1, max(0, samples - fall_from) / max(cfg.cooldown, 1))
    return cfg.learning_rate * up * (cfg.lr_final + (1 - cfg.lr_final) * (1 + math.cos(math.pi * down)) / 2)


def detached(state, device):
    """A state whose gradient is not carried on. States are tensors, or tuples and lists of states."""
    if isinstance(state, torch.Tensor):
        return state.detach().to(device)
    return type(state)(detached(part, device) for part in state)


def train(cfg, task, stages, model, folder, device, saved=None):
    """Train, from the start or from the checkpoint `saved`; write ckpt.pt and metrics.csv into `folder`.
    -> progress (a dict), and why it ended: "done", "interrupted" or "nan"."""
    fixed, total = stage_samples(cfg), total_samples(cfg, stages)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=cfg.weight_decay)
    p = {"step": 0, "samples": 0, "stage": 0, "stage_from": 0, "recent": [], "passed": [],
         "above": 0, "until": None, "fall_from": total - cfg.cooldown, "state": None,
         "seconds": 0.0, "data_seconds": 0.0}
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        p = saved["progress"]
        p["state"] = p["state"] and detached(p["state"], device)
    file, rows = open_metrics(folder / "metrics.csv", p["step"])
    weights = {"next": 1, "reveal": cfg.reveal_weight, "state": cfg.state_weight}
    bar = tqdm(total=total, initial=p["samples"], unit=" traces", disable=None, dynamic_ncols=True)
    pieces, started, why = [], time.perf_counter() - p["seconds"], "done"

    def save():
        file.flush()
        save_checkpoint(folder / "ckpt.pt", cfg, task, model, optimizer, p)

    save()
    with Interrupt() as interrupt:
        while p["samples"] < p["fall_from"] + cfg.cooldown:
            if interrupt.asked:
                why = "interrupted"
                break
            lr = learning_rate(cfg, p["samples"], p["fall_from"])
            for group in optimizer.param_groups:
                group["lr"] = lr

            stage, began = stages[p["stage"]], time.perf_counter()
            parts = cfg.carry if p["stage"] == len(stages) - 1 else 1
            turn = (p["samples"] - p["stage_from"]) // cfg.batch_size % parts
            if turn == 0 or not pieces:
                t, long = p["step"] - turn, stage._replace(commands=stage.commands * parts)
                pieces = task.batch(long, cfg.batch_size, cfg.seed, "train", t).cut(parts, task.opening)
            batch = pieces[turn].to(device)
            p["data_seconds"] += time.perf_counter() - began

            with autocast(cfg, device):
                hidden, told, state = model.with_told(batch.tokens, p["state"] if turn else None)
                terms, accuracy = loss_terms(cfg, model, task, batch, hidden, told)
            loss = sum(weights[name] * term for name, term in terms.items())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            if not math.isfinite(loss.item() + norm.item()):             # before the step: weights are good
                why = "nan"
                break
            optimizer.step()

            p["step"] += 1
            p["samples"] += cfg.batch_size
            p["state"] = detached(state, device) if parts > 1 else None
            p["recent"] = [*p["recent"][-9:], accuracy.item()]
            p["seconds"] = time.perf_counter() - started
            last, recent = p["stage"] == len(stages) - 1, sum(p["recent"]) / len(p["recent"])
            row = {"step": p["step"], "samples": p["samples"], "seconds": p["seconds"], "stage": p["stage"],
                   "commands": stage.commands, "spacing": stage.spacing, "lr": lr, "loss": loss.item(),
                   "grad_norm": norm.item(), "reveal_acc": accuracy.item(),
                   **{name: term.item() for name, term in terms.items()}}
            bar.update(cfg.batch_size)
            bar.set_postfix(stage=stage, loss=f"{row['loss']:.3f}", reveals=f"{recent:.1%}", refresh=False)

            if p["step"] % cfg.eval_every == 0:
                row["held_out_acc"] = evaluate(cfg, model, task, stage, device)["reveal_acc"]
                tqdm.write(f"step {p['step']}: {p['samples']:,} traces, {p['seconds']:.0f} s, stage {stage}, "
                           f"loss {row['loss']:.3f}, {recent:.1%} right, held out {row['held_out_acc']:.1%}")
            rows.writerow(row)
            if last and "held_out_acc" in row:
                p["above"] = p["above"] + 1 if 0 < cfg.until <= row["held_out_acc"] else 0
                if p["above"] == 2:
                    p["until"] = p["samples"] - cfg.eval_every * cfg.batch_size
                    tqdm.write(f"held out {cfg.until:.1%} right, twice: first after {p['until']:,} traces")
                    break

            if fixed:
                enough = p["samples"] - p["stage_from"] >= fixed
            else:
                enough = len(p["recent"]) == 10 and recent >= cfg.advance
            if enough and len(p["passed"]) == p["stage"]:
                tqdm.write(f"stage {stage} passed after {p['samples']:,} traces, {p['seconds']:.0f} s: "
                           f"{recent:.1%} of its latest reveals right")
                p["passed"].append({"stage": str(stage), "samples": p["samples"], "seconds": p["seconds"]})
                if not last:
                    p.update(stage=p["stage"] + 1, stage_from=p["samples"], recent=[])
                elif not fixed and not cfg.until:
                    p["fall_from"] = min(p["fall_from"], p["samples"])
                    bar.total = p["fall_from"] + cfg.cooldown
            if p["step"] % cfg.save_every == 0:
                save()

    bar.close()
    if why != "nan":
        save()
    file.close()
    return p, why


def introduce(cfg, task, stages, model, device, why, saved):
    """A run's first lines: what it is, on what, and where its parameters are."""
    width, default = cfg.d_model // cfg.n_head, asdict(Config())
    backend, because = resolve_backend("auto", device, DTYPES[cfg.dtype], width, width)
    changed = [f"{name}={value}" for name, value in asdict(cfg).items() if value != default[name]]
    length = f"{stage_samples(cfg):,} traces" if stage_samples(cfg) else f"until {cfg.advance:.0%} is right"
    print(f"run     {run_folder(cfg)}: " + (", ".join(changed) or "every setting at its default"))
    if saved:
        print(f"resumed after step {saved['progress']['step']}, {saved['progress']['samples']:,} traces")
    print(f"task    {cfg.task}, chance {task.chance:.1%}; stages {' '.join(map(str, stages))}, each {length}")
    print(f"device  {device} ({why}), {cfg.dtype}, {torch.get_num_threads()} threads")
    print(f"scan    {backend} ({because})")
    print(f"model   {count(model):,} parameters = embedding {count(model.embed):,} + blocks "
          f"{count(model.blocks):,} + norm {count(model.norm):,} + head {count(model.head):,} + state head "
          f"{count(model.to_state):,}")


def peak_memory(device):
    """The most memory that this process has held so far, as the end of a sentence."""
    if device.type == "cuda":
        return f"; memory peaked at {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    if not resource:
        return ""
    unit = 2**30 if sys.platform == "darwin" else 2**20                  # bytes there, KiB elsewhere
    return f"; memory peaked at {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB"


def run(cfg, saved):
    """One run of a grid. -> its result (None unless it is done), and why it ended."""
    folder, (device, why_device) = run_folder(cfg), pick_device(cfg.device)
    task, stages = build_task(cfg, Tokenizer(saved["lexemes"]) if saved else None)
    model = build_model(cfg, task, device)
    introduce(cfg, task, stages, model, device, why_device, saved)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    p, why = train(cfg, task, stages, model, folder, device, saved)
    if why == "interrupted":
        print(f"stopped after step {p['step']}, {p['samples']:,} traces")
        return None, why
    if why == "nan":
        print(f"train.py: loss or gradient not finite at step {p['step']}, the last good checkpoint is kept: "
              f"try --learning-rate {cfg.learning_rate / 3:.1g}", file=sys.stderr)
        return None, why
    share = p["data_seconds"] / max(p["seconds"], 1e-9)
    print(f"trained {p['samples']:,} traces in {p['seconds']:.1f} s; to make them took {share:.1%} of it"
          + peak_memory(device))
    result = {"model": cfg.model, "task": cfg.task, "params": count(model), "until": p["until"],
              "samples": p["samples"], "seconds": p["seconds"], "seed": cfg.seed, "passed": p["passed"],
              "stage_reached": str(stages[p["stage"]]), "eval": [], "config": asdict(cfg)}
    for stage in eval_stages(cfg, task, stages):
        result["eval"].append(evaluate(cfg, model, task, stage, device))
        print(show_eval(result["eval"][-1], task, stages))
    write_atomically(folder / "result.json", lambda file: file.write(json.dumps(result, indent=1).encode()))
    return result, why


# ----------------------------------------------------------------------------------------------------------
# All runs

def table(results):
    """A line a run: what varied, its cost, and reveal accuracy at each evaluated stage."""
    configs = [r["config"] for r in results]
    varied = [name for name in HELP if len({c[name] for c in configs}) > 1 and name not in BESIDE_THE_POINT]
    places = list(dict.fromkeys(str(stage_of(row)) for r in results for row in r["eval"]))
    lines = [[*varied, "parameters", "traces", "seconds", "reached", *places]]
    for r in results:
        accuracy = {str(stage_of(row)): f"{row['reveal_acc']:.1%}" for row in r["eval"]}
        lines.append([*(str(r["config"][name]) for name in varied), f"{r['params']:,}", f"{r['samples']:,}",
                      f"{r['seconds']:.0f}", r["stage_reached"], *(accuracy.get(at, "") for at in places)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(word.rjust(width) for word, width in zip(line, widths)) for line in lines)


def probe(path, **changes):
    """Is the state in there? Fit a linear softmax a slot to a frozen model's hidden vectors at line ends, and
    read states off other traces. The control, after 2305.11169: states that the same lines would leave in a
    language whose commands are about other variables. What a probe reads of those, it has worked out."""
    cfg, task, stages, model = load_model(path, **changes)
    if not task.n_slots or not hasattr(task, "shuffled"):
        raise UserError(f"--probe {path}: --task {cfg.task} has no slots of classes, or no other language")
    (device, _), [stage, *_] = pick_device(cfg.device), eval_stages(cfg, task, stages)
    print(f"probe   {path}: {cfg.model} on {cfg.task}, {stage}, fit to {cfg.eval_samples} traces")

    def lines(split):
        """-> x (N, D), y (N, n_slots) of lines after which there is a state."""
        there = lambda batch: (batch.state >= 0).any(-1)
        x, y = zip(*((hidden.double(), batch.state[there(batch)]) for batch, hidden in
                     read(cfg, model, task, stage, split, device, there)))
        return torch.cat(x), torch.cat(y)

    for name, task.shuffled in (("the state after a line", False), ("in a shuffled language", True)):
        (x, y), (x_new, y_new) = map(lines, SPLITS)
        linear = torch.nn.Linear(x.shape[1], task.n_slots * task.n_classes).double().to(device)
        optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def logits(x):
            return linear(x).unflatten(-1, (task.n_slots, task.n_classes))

        def loss():
            optimizer.zero_grad()
            nats = F.cross_entropy(logits(x).flatten(0, 1), y.flatten(), ignore_index=-1)
            nats = nats + 1e-4 * linear.weight.square().sum()
            nats.backward()
            return nats

        optimizer.step(loss)
        right, known = logits(x_new).argmax(-1) == y_new, y_new >= 0
        often = y.flatten()[y.flatten() >= 0].bincount().argmax()
        print(f"{name:24s}{right[known].double().mean():8.2%} of {known.sum():,} values right; "
              f"always the commonest: {(y_new == often)[known].double().mean():.1%}")


@torch.no_grad()
def play(path, **changes):
    """Read lines until there are no more, execute them, and say what the model expects each print to show."""
    cfg, task, _, model = load_model(path, **changes)
    if cfg.task != "repl":
        raise UserError(f"--play {path}: that model was trained on {cfg.task}; give one trained on repl")
    device, _ = pick_device(cfg.device)
    state = None

    def feed(text):
        """-> the model's distribution over the token after `text`."""
        nonlocal state
        with autocast(cfg, device):
            hidden, state = model(torch.tensor([task.tokenizer.encode(text)], device=device), state)
            return model.head(hidden[0, -1]).float().softmax(-1)

    digits = torch.randperm(task.n_vars, generator=torch.Generator().manual_seed(cfg.seed)) + 1
    held = {chr(ord("a") + i): str(digit) for i, digit in enumerate(digits.tolist())}
    for name, digit in held.items():
        print(f">>> {name} = {digit}")
        feed(f">>> {name} = {digit}\n")
    prompt = ">>> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(end="\n" if prompt else "")
            return
        if not line.strip():
            continue
        try:
            line, held, name = task.execute(line, held)
        except UserError as error:
            print(error)
            continue
        probability = feed(line)
        if name:
            probability = feed(f"{name} ")
            guess = probability.argmax().item()
            said = task.tokenizer.decode([guess])
            print(f"model:  {name} {said} ({probability[guess]:.1%})\npython: {name} {held[name]}"
                  + "  <-- the model is wrong" * (said != held[name]))
            feed(f"{held[name]}\n")


def main(argv):
    configs, given, args = parse(argv)
    if args.play or args.probe:
        (play if args.play else probe)(args.play or args.probe, **{"device": "auto", **given})
        return 0
    if args.eval:
        cfg, task, stages, model = load_model(args.eval, **{"device": "auto", "eval_at": "auto", **given})
        device, why = pick_device(cfg.device)
        print(f"model   {args.eval}: {cfg.model} on {cfg.task}, {cfg.eval_samples} traces a line")
        print(f"device  {device} ({why}), {cfg.dtype}")
        for stage in eval_stages(cfg, task, stages):
            print(show_eval(evaluate(cfg, model, task, stage, device), task, stages))
        print(f"read    in segments of {cfg.segment} tokens{peak_memory(device)}")
        return 0

    for cfg in configs:
        check(cfg)
    folders = [run_folder(cfg) for cfg in configs]
    if len(set(folders)) < len(folders):
        raise UserError("two runs of this grid would share a folder: leave --name out, and repeat no value")
    grid = len(configs) > 1
    plans = [look_at(cfg, args.resume or grid, args.overwrite) for cfg in configs]
    results, diverged = [], False
    for i, (cfg, folder, plan) in enumerate(zip(configs, folders, plans)):
        if grid:
            print(f"--- run {i + 1} of {len(configs)}")
        if plan == "finished":
            print(f"{folder} is finished; --overwrite would train it again")
            results.append(json.loads((folder / "result.json").read_text()))
            continue
        try:
            result, why = run(cfg, None if plan == "new" else plan)
        except KeyboardInterrupt:                                        # in the last evaluation
            why = "interrupted"
        if why == "interrupted":
            print(f"saved   {folder / 'ckpt.pt'}\n"
                  f"next    python train.py {shlex.join(argv)}" + " --resume" * ("--resume" not in argv))
            return 130
        diverged = diverged or why == "nan"
        results += [result] if result else []
    if results:
        print("--- reveal accuracy at commands x spacing\n" + table(results))
    if results and not grid:
        print(f"files   {folder}: ckpt.pt, metrics.csv, result.json\nnext    python plot.py curve {folder}")
        task, [*_, last] = build_task(cfg)
        with suppress(UserError):                                        # some tasks end somewhere
            [far] = parse_stages(f"{16 * last.commands}x{last.spacing}", task)
            print(f"        python train.py --eval {folder} --eval-at {far}")
    return 1 if diverged else 0


if __name__ == "__main__":
    start(main)
