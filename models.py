"""
The models: one language model, ten ways to mix time, each an equation you know.

    x = embed(tokens);   x = x + mixer(norm(x)), x = x + mlp(norm(x)) in each block;   logits = head(norm(x))

  linear_attention  S_t = S_{t-1} + k_t v_t^T
  deltanet          S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T         beta in (0, beta_max)
  gated_deltanet    S_t = (I - beta_t k_t k_t^T) g_t S_{t-1} + beta_t k_t v_t^T     g in (0, 1)
  deltaproduct      n_householder delta steps a token
  renorm_deltanet   deltanet, its state scaled after every 16 tokens: linear, but for that
  ssm               S_t = (1 - beta_t) S_{t-1} + beta_t k_t v_t^T                   Mamba-2's shape
  transformer       softmax(q k^T) v with rotary positions; its "state" is the growing cache
  lstm, gru, rnn    torch's own, nonlinear in the state

The first six read o_t = S_t^T q_t and differ in few lines. beta_max = 2 lets the eigenvalue 1 - beta_t
reach -1 (to swap is to reflect), beta_max = 1 keeps it in [0, 1]. "a+b" alternates mixers, block by block.

All have one signature, forward(x, state) -> (y, state): the whole sequence in training, one token in
decoding, one segment after another in a long evaluation. state None is the start.

Symbols: B batch, T time, H heads, K = V = D / H head dim, D model width.

Look at them:   python models.py

At the end, a DeltaNet whose weights are written by hand. Not here: dropout, weight tying, padding masks.
"""
import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import PAD, UserError
from kernels import decay_scan, delta_rule, median_ms


# ----------------------------------------------------------------------------------------------------------
# The linear RNNs: each is the one above it, and a line

class ShortConv(nn.Module):
    """Causal convolution over `width` tokens, each channel by itself. State: the last width - 1 inputs."""

    def __init__(self, channels, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))

    def forward(self, x, state=None):
        width, T = self.weight.shape[0], x.shape[1]
        if state is None:
            state = x.new_zeros(x.shape[0], width - 1, x.shape[2])
        x = torch.cat([state.to(x.dtype), x], 1)                          # (B, width-1+T, channels)
        return sum(w * x[:, i:i + T] for i, w in enumerate(self.weight.to(x.dtype))), x[:, T:]


class LinearAttention(nn.Module):
    """Katharopoulos et al. 2006.16236 without a normaliser: S_t = S_{t-1} + k_t v_t^T.

    Also the frame of the next four: q, k, v from a projection, a short convolution and SiLU; q and k of unit
    length; a scan; a norm on its output. State: (the convolution's, the scan's (B, H, K, V) in fp32)."""
    steps = 1                                                             # keys and values a token

    def __init__(self, cfg):
        super().__init__()
        D, self.n_head, self.beta_max = cfg.d_model, cfg.n_head, cfg.beta_max
        self.qkv = nn.Linear(D, (1 + 2 * self.steps) * D, bias=False)
        self.conv = ShortConv((1 + 2 * self.steps) * D)
        self.norm = nn.RMSNorm(D // cfg.n_head, eps=1e-5)
        self.out = nn.Linear(D, D, bias=False)

    def project(self, x, conv_state=None):
        """(B, T, D) -> q (B, T, H, K), k and v (B, T*steps, H, K), and the convolution's state."""
        y, conv_state = self.conv(self.qkv(x), conv_state)
        y = F.silu(y).unflatten(-1, (1 + 2 * self.steps, self.n_head, -1))  # (B, T, 1 + 2*steps, H, K)
        q, k, v = y[:, :, 0], y[:, :, 1:1 + self.steps].flatten(1, 2), y[:, :, 1 + self.steps:].flatten(1, 2)
        q, k = (F.normalize(x, dim=-1).to(v.dtype) for x in (q, k))         # autocast would leave them fp32
        return q, k, v, conv_state

    def scan(self, x, q, k, v, S):
        return decay_scan(q, k, v, state=S)

    def forward(self, x, state=None):
        conv_state, S = state or (None, None)
        q, k, v, conv_state = self.project(x, conv_state)
        o, S = self.scan(x, q, k, v, S)
        return self.out(self.norm(o).flatten(-2)), (conv_state, S)


class DeltaNet(LinearAttention):
    """Yang et al. 2406.06484: overwrite what the key holds. beta_max 2 after Grazzi et al. 2411.12537."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_beta = nn.Linear(cfg.d_model, self.steps * cfg.n_head)

    def beta(self, x):
        """(B, T, D) -> (B, T*steps, H) in (0, beta_max); 1 - beta is the eigenvalue."""
        beta = self.beta_max * torch.sigmoid(self.to_beta(x).float())
        return beta.unflatten(-1, (self.steps, self.n_head)).flatten(1, 2)

    def scan(self, x, q, k, v, S):
        return delta_rule(q, k, v, self.beta(x), state=S)


class GatedDeltaNet(DeltaNet):
    """Yang et al. 2412.06464: DeltaNet whose state also decays, here by a sigmoid that starts near 1."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_gate = nn.Linear(cfg.d_model, cfg.n_head)

    def scan(self, x, q, k, v, S):
        return delta_rule(q, k, v, self.beta(x), F.logsigmoid(self.to_gate(x).float()), state=S)


class DeltaProduct(DeltaNet):
    """Siems et al. 2502.10297: n_householder delta steps a token, which can be a product of reflections."""

    def __init__(self, cfg):
        self.steps = cfg.n_householder
        super().__init__(cfg)

    def scan(self, x, q, k, v, S):
        q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, self.steps - 1, 0)).flatten(1, 2)  # it reads the last step
        o, S = delta_rule(q, k, v, self.beta(x), state=S)
        return o[:, self.steps - 1::self.steps], S


class RenormDeltaNet(DeltaNet):
    """Ours: what P1 (section 5) says that a linear RNN lacks, and no more. After every 16 tokens each column
    of S, what all keys hold of one value channel, is scaled to a learned length; between, all is linear.
    State: the convolution's, the scan's, and how many tokens it has read."""
    every = 16

    def __init__(self, cfg):
        super().__init__(cfg)
        self.norm_of_state = nn.Parameter(torch.ones(cfg.n_head, 1, 1))

    def forward(self, x, state=None):
        conv_state, S, read = state or (None, None, torch.zeros((), dtype=torch.long))
        q, k, v, conv_state = self.project(x, conv_state)
        T, late = x.shape[1], int(read) % self.every
        cuts, o = [0, *range(self.every - late, T, self.every), T], []
        for a, b in zip(cuts, cuts[1:]):
            piece, S = self.scan(x[:, a:b], q[:, a:b], k[:, a:b], v[:, a:b], S)
            o.append(piece)
            if (late + b) % self.every == 0:
                S = self.norm_of_state * S * torch.rsqrt(S.square().sum(-2, keepdim=True) + 1e-3)
        return self.out(self.norm(torch.cat(o, 1)).flatten(-2)), (conv_state, S, read + T)


class SSM(DeltaNet):
    """Dao and Gu 2405.21060, Mamba-2's shape: all that is held fades by 1 - beta, whatever its key. Unlike
    Mamba's exp(-dt), 1 - beta may be negative (beta_max 2): one flag sets everybody's eigenvalues."""

    def scan(self, x, q, k, v, S):
        beta = self.beta(x)
        return decay_scan(q, k, beta[..., None] * v, 1 - beta, S)


# ----------------------------------------------------------------------------------------------------------
# The others

def rotate(x, start):
    """Rotary position embedding (2104.09864) of x (B, H, T, K), whose first token has position `start`."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = (start + torch.arange(x.shape[2], device=x.device))[:, None] * frequency  # (T, K/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Causal softmax attention with rotary positions. State: keys and values so far, (B, H, T, K) each."""

    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=False)
        self.out = nn.Linear(cfg.d_model, cfg.d_model, bias=False)

    def forward(self, x, state=None):
        T, past = x.shape[1], 0 if state is None else state[0].shape[2]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, K)
        q, k = rotate(q, past), rotate(k, past)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        seen = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past) if past else None
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=not past)
        return self.out(o.transpose(1, 2).flatten(-2)), (k, v)


class Recurrent(nn.Module):
    """torch's LSTM, GRU or tanh RNN of width D. State: what torch returns."""

    def __init__(self, cfg, kind):
        super().__init__()
        self.rnn = kind(cfg.d_model, cfg.d_model, batch_first=True)

    def forward(self, x, state=None):
        return self.rnn(x, state)


MIXERS = {  # --model NAME; add yours here: a class with forward(x, state) -> (y, state)
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "deltaproduct": DeltaProduct,
    "renorm_deltanet": RenormDeltaNet,
    "linear_attention": LinearAttention,
    "ssm": SSM,
    "transformer": Attention,
    "lstm": lambda cfg: Recurrent(cfg, nn.LSTM),
    "gru": lambda cfg: Recurrent(cfg, nn.GRU),
    "rnn": lambda cfg: Recurrent(cfg, nn.RNN),
}


# ----------------------------------------------------------------------------------------------------------
# The language model

class MLP(nn.Module):
    """SwiGLU (2002.05202)."""

    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.d_model, 2 * cfg.d_mlp, bias=False)
        self.down = nn.Linear(cfg.d_mlp, cfg.d_model, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg, mixer):
        super().__init__()
        self.norm1, self.mixer = nn.RMSNorm(cfg.d_model, eps=1e-5), MIXERS[mixer](cfg)
        self.norm2, self.mlp = nn.RMSNorm(cfg.d_model, eps=1e-5), MLP(cfg)

    def forward(self, x, state=None):
        y, state = self.mixer(self.norm1(x), state)
        x = x + y
        return x + self.mlp(self.norm2(x)), state


class LM(nn.Module):
    """cfg has model, d_model, d_mlp, n_layer, n_head, beta_max, n_householder, state_head, as train.py's
    Config. `forward` returns hidden vectors, `head` turns them into logits for the next token. `to_state` is
    a state head, of no use but for its loss."""

    def __init__(self, cfg, vocab_size, n_slots, n_classes):
        super().__init__()
        mixers = cfg.model.split("+")
        self.embed = nn.Embedding(vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, mixers[i % len(mixers)]) for i in range(cfg.n_layer))
        self.state_layer = cfg.state_layer
        self.norm = nn.RMSNorm(cfg.d_model, eps=1e-5)
        self.head = nn.Linear(cfg.d_model, vocab_size, bias=False)
        self.to_state = LinearHead(cfg, vocab_size, n_slots, n_classes) if n_slots else nn.Identity()
        init_weights(self)
        if cfg.state_head != "linear":                                    # so late, so the rest starts alike
            self.to_state = STATE_HEADS[cfg.state_head](cfg, vocab_size, n_slots, n_classes)
            init_weights(self.to_state)

    def forward(self, tokens, state=None):
        """tokens (B, T) int64 -> hidden (B, T, D), state: a list with an entry per block, to be passed on."""
        hidden, _, state = self.with_told(tokens, state)
        return hidden, state

    def with_told(self, tokens, state=None):
        """The same, and between them the hidden vectors (B, T, D) that the state head reads."""
        x, told, new = self.embed(tokens), None, []
        for i, (block, s) in enumerate(zip(self.blocks, state or [None] * len(self.blocks)), 1):
            x, s = block(x, s)
            new.append(s)
            if i == self.state_layer:
                told = self.norm(x)
        hidden = self.norm(x)
        return hidden, hidden if told is None else told, new


# ----------------------------------------------------------------------------------------------------------
# State heads (P2 section 4): the machine's state after a line, asked of the hidden vector at its end

class LinearHead(nn.Linear):
    """n_slots softmaxes over n_classes. Where states are hidden, the labels are exact beliefs."""

    def __init__(self, cfg, vocab_size, n_slots, n_classes):
        super().__init__(cfg.d_model, n_slots * n_classes, bias=False)
        self.n_slots = n_slots

    def forward(self, hidden):
        """(..., D) -> logits (..., n_slots, n_classes)"""
        return super().forward(hidden).unflatten(-1, (self.n_slots, -1))

    def loss(self, lm, hidden, batch):
        """Hidden vectors (B, T, D) of a data.Batch -> nats a slot, the mean."""
        logits, truth = self(hidden[batch.line_end]).float(), batch.state[batch.line_end]
        if batch.belief is None:
            return F.cross_entropy(logits.flatten(0, 1), truth.flatten(), ignore_index=-1)
        known = truth[:, 0] >= 0
        return F.cross_entropy(logits[known, 0], batch.belief[batch.line_end][known])


def state_texts(batch):
    """-> where (B, T), the ends of the N lines after which there is a state; the states as tokens (N, W)."""
    if batch.state_text is not None:
        text = batch.state_text.flatten(0, 1)
        return batch.line_end, text[text[:, 0] != PAD]
    where = batch.line_end & (batch.state >= 0).any(-1)
    state = batch.state[where]
    return where, torch.where(state < 0, ord(" "), ord("0") + state)      # a token a slot


class TransformerHead(nn.Module):
    """Two attention blocks that write the state's text after the hidden vector. Knows only that vector."""

    def __init__(self, cfg, vocab_size, n_slots, n_classes):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, "transformer") for _ in range(2))
        self.norm = nn.RMSNorm(cfg.d_model, eps=1e-5)
        self.head = nn.Linear(cfg.d_model, vocab_size, bias=False)

    def loss(self, lm, hidden, batch):
        """Hidden vectors (B, T, D) of a data.Batch -> nats a token of the states' texts, the mean."""
        where, text = state_texts(batch)
        x = torch.cat([hidden[where][:, None], self.embed(text[:, :-1])], 1)
        for block in self.blocks:
            x, _ = block(x)
        logits = self.head(self.norm(x)).float()                          # (N, W, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), text.flatten(), ignore_index=PAD)


class ContrastiveHead(nn.Module):
    """The hidden vector must point where the same LM's points after it has read the state's text; lines and
    states of one program find each other (CLIP, 2103.00020; appendix D). No parameters. P2 leaves open what
    to do with lines that have the same state, as half of parity's: here it is one candidate for them all."""
    temperature = 0.07

    def __init__(self, cfg, vocab_size, n_slots, n_classes):
        super().__init__()

    def loss(self, lm, hidden, batch):
        """Hidden vectors (B, T, D) of a data.Batch -> nats, the mean of both directions."""
        where, text = state_texts(batch)
        text, number = text.unique(dim=0, return_inverse=True)            # (U, W), (N,)
        _, read, _ = lm.with_told(text)
        end = (text != PAD).sum(1) - 1
        state = read[torch.arange(len(text), device=end.device), end]
        cosine = (F.normalize(hidden[where], dim=-1) @ F.normalize(state, dim=-1).T).float()      # (N, U)
        alike, program = ((cosine - 1) / self.temperature).exp(), where.nonzero()[:, 0]
        lines = alike.new_zeros(len(where), len(text)).index_add(0, program, alike)   # sums over its lines
        has = torch.zeros_like(lines)
        has[program, number] = 1
        states = (alike * has[program]).sum(1)                            # and over its states
        its = alike.gather(1, number[:, None])[:, 0].log()
        return (states.log() + lines[program, number].log()).mean() / 2 - its.mean()


STATE_HEADS = {"linear": LinearHead, "transformer": TransformerHead, "contrastive": ContrastiveHead}


def init_weights(model):
    """parameter                     | start
    --------------------------------|-----------------------------------------
    embedding                       | normal, std 1
    every matrix                    | normal, std 1 / sqrt(inputs)
    mixer.out, mlp.down             | the same / sqrt(2 n_layer): together they add a variance of 1
    head, linear state head         | zero: the first guess is uniform, the first loss log(vocabulary)
    conv                            | uniform in +-1 / sqrt(width), as a torch Conv1d
    to_beta bias                    | 0: beta starts at beta_max / 2
    to_gate bias                    | 4: the gate starts at 0.98
    lstm, gru, rnn                  | torch's
    """
    for name, p in model.named_parameters():
        if ".rnn." in name or "norm" in name:
            continue
        if name.endswith(("head.weight", "to_beta.bias")) or name == "to_state.weight":
            nn.init.zeros_(p)
        elif name.endswith("to_gate.bias"):
            nn.init.constant_(p, 4)
        elif name.endswith("conv.weight"):
            nn.init.uniform_(p, -len(p) ** -0.5, len(p) ** -0.5)
        else:
            std = 1 if name.startswith("embed") else p.shape[1] ** -0.5
            if name.endswith(("mixer.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * len(model.blocks))
            nn.init.normal_(p, std=std)


# ----------------------------------------------------------------------------------------------------------
# Why it works: the same model, its weights written by hand

def by_hand(task, places=2):
    """-> an LM of one DeltaNet layer that executes swaps, its weights written down, nothing trained. Give a
    data.Repl of swaps, else UserError. It knows what a print shows; what else may follow a token it does not.

    Rows of the state are variables, columns digits. A key is what stands here minus what stood two tokens
    ago. So at the c of "a, c = c, a" it is e_c - e_a, and beta = 2 reflects: rows a and c change places. At
    the digit of "a = 5", or of a printed "a 5", it is -e_a, and beta = 1 writes. Elsewhere beta is 0, or the
    key: names cancel ("c = c", "c', c"), or a line's end two or three tokens ago, or " = " three ago, push it
    so far down that SiLU makes it 0. Each variable has two rows alike, for a swap's keys to be of +-1/2: fp32
    holds those, and not 1/sqrt(2). With one (places=1) a swap is right to a rounding; roundings add up."""
    if getattr(task, "moves", None) != "swap":
        raise UserError("by_hand: give a data.Repl with moves='swap'")
    n, D, near, far = task.n_vars, 32, 2.0 ** -30, 2.0 ** 10              # SiLU(x) is x / 2 for so small x
    cfg = SimpleNamespace(model="deltanet", d_model=D, d_mlp=8, n_layer=1, n_head=1, beta_max=2.0,
                          state_head="linear", state_layer=0)
    lm = LM(cfg, len(task.tokenizer), n_slots=0, n_classes=0).requires_grad_(False)
    for p in lm.parameters():
        p.fill_(p.dim() == 1 and len(p) == D)                             # norms are 1, all else is 0
    mixer, i = lm.blocks[0].mixer, torch.arange(n)
    names, digits, [line_end, equals] = ord("a") + i, ord("1") + i, task.tokenizer.encode("\n = ")
    other, name, digit = 0, 1 + i, 1 + n + i                              # what each entry of x stands for
    lm.embed.weight[:, other] = 1
    lm.embed.weight[names] = F.one_hot(name, D).float()
    lm.embed.weight[digits] = F.one_hot(digit, D).float()
    lm.embed.weight[[line_end, equals]] = F.one_hot(torch.tensor([D - 2, D - 1]), D).float()

    q, k, v = mixer.qkv.weight.split(D)                                   # (D, D) each: into, from
    for place in range(places):
        q[n * place + i, name] = k[n * place + i, name] = near
    k[:n * places, D - 2:] = far                                          # the line's end and ' = '
    v[i, digit] = 1
    q, k, v = mixer.conv.weight.split(D, 1)                               # (4, D): three tokens ago ... now
    q[2] = v[3] = k[3] = 1
    k[:2] = -1
    mixer.to_beta.weight[:] = -far                                        # sigmoid: 0, to the last bit
    mixer.to_beta.weight[0, name] = far                                   # 1: a beta of 2
    mixer.to_beta.weight[0, digit] = 0                                    # 1/2: a beta of 1
    mixer.out.weight[digit, i] = -1                                       # the key was -e_a
    lm.head.weight[digits, digit] = 8
    return lm


# ----------------------------------------------------------------------------------------------------------
# python models.py: every mixer, its size, and its three ways to run; where a training step's time goes

def main():
    cfg = SimpleNamespace(d_model=64, d_mlp=128, n_layer=2, n_head=2, beta_max=2.0, n_householder=2,
                          state_head="linear", state_layer=0)
    tokens = torch.randint(256, (2, 60), generator=torch.Generator().manual_seed(0))
    print("model              parameters  state, numbers  token by token  in segments")
    for name in [*MIXERS, "deltanet+lstm"]:
        cfg.model = name
        torch.manual_seed(0)
        model = LM(cfg, vocab_size=256, n_slots=5, n_classes=5).eval()
        with torch.no_grad():
            whole, state = model(tokens)
            off = []
            for length in (1, 23):
                pieces, s = [], None
                for piece in tokens.split(length, 1):
                    y, s = model(piece, s)
                    pieces.append(y)
                off.append((torch.cat(pieces, 1) - whole).abs().max().item())
        numbers = sum(x.numel() for block in state for x in nested(block)) // len(tokens)
        size = sum(p.numel() for p in model.parameters())
        print(f"{name:18s}{size:12,}{numbers:16,}{off[0]:16.0e}{off[1]:13.0e}")
    print("last columns: largest difference to the whole sequence at once; the state is after 60 tokens\n")
    time_a_step()


def time_a_step(B=16, T=681, vocabulary=262):
    """Print ms, forward and backward, of the parts of train.py's default model, each alone, on a batch of its
    last stage: 16 traces of 64x8. Data comes on top; train.py prints its share."""
    cfg = SimpleNamespace(model="deltanet", d_model=64, d_mlp=128, n_layer=1, n_head=1, beta_max=2.0,
                          state_head="linear", state_layer=0)
    model, tokens = LM(cfg, vocabulary, n_slots=5, n_classes=5), torch.randint(vocabulary, (B, T))
    [block], optimizer = model.blocks, torch.optim.AdamW(model.parameters())
    mixer, x, qkv, head = block.mixer, torch.randn(B, T, 64), torch.randn(B, T, 192), torch.randn(B, T, 1, 64)

    def ms(f, *inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        return median_ms(lambda: f(*inputs).sum().backward(), 5)

    def loss(hidden):
        return F.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten())

    whole = ms(lambda: loss(model(tokens)[0])) + median_ms(optimizer.step, 5)
    parts = {
        "scan": ms(lambda q, k, v: delta_rule(q, k, v, mixer.beta(x))[0], head, head, head),
        "projections": ms(mixer.qkv, x) + ms(mixer.out, x),
        "convolution, SiLU": ms(lambda y: F.silu(mixer.conv(y)[0]), qkv),
        "norms": 3 * ms(model.norm, x) + 2 * ms(lambda q: F.normalize(q, dim=-1), head),
        "MLP": ms(block.mlp, x),
        "head, loss": ms(loss, x),
        "optimiser": median_ms(optimizer.step, 5),
    }
    parts["the rest"] = whole - sum(parts.values())
    print(f"one step of the default model on {B} traces of {T} tokens: {whole:.0f} ms")
    for name, part in parts.items():
        print(f"{name:18s}{part:8.1f} ms{part / whole:7.0%}")


def nested(state):
    """The tensors in a mixer's state, which may be a tensor or a tuple of them."""
    return [state] if isinstance(state, torch.Tensor) else [x for part in state for x in nested(part)]


if __name__ == "__main__":
    main()
