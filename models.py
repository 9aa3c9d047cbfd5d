"""
One language model, thirteen mixers to choose from, most of them one equation each, and a control without a mixer.
A *mixer* is the part of a layer that carries information from token to token, as attention does in a Transformer.

    x = embed(tokens);  x = x + mixer(conv(norm(x))), x = x + mlp(norm(x)) in each block;  head(norm(x))

  linear_attention  S_t = S_{t-1} + k_t v_t^T
  deltanet          S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T         beta in [0, beta_max]
  gated_deltanet    S_t = (I - beta_t k_t k_t^T) g_t S_{t-1} + beta_t k_t v_t^T     g in (0, 1)
  kda               the same, but g in (0, 1)^K: each row of the state has its own gate
  deltaproduct      n_householder steps of deltanet per token
  hard_deltanet     deltanet, but training rounds k_t, beta_t and whether v_t is written
  ssm               S_t = (1 - beta_t) S_{t-1} + beta_t k_t v_t^T                   state-space model, as Mamba-2
  rotary_ssm        S_t = (1 - beta_t) R_t S_{t-1} + beta_t k_t v_t^T               R_t rotates pairs of rows
  block_diagonal    h_t = A_t h_{t-1}, blocks of h scaled to length 1               A_t of dense 8x8 blocks
  m2rnn             S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_t^T)       not linear in S
  lstm, gru         torch's own, not linear in the state either
  transformer       softmax(q k^T) v with rotary positions; its state is the KV cache, which grows
  no_mixer          a control: shows what the convolution and the MLP can do alone

Keys and queries have length 1, and g is the gate, of which kernels.py takes the logarithm. Mixers with a matrix S have
the output o_t = S_t^T q_t, and differ in a few lines. With beta_max = 2, the eigenvalue 1 - beta_t can be as low as -1.
Swapping two rows in one step needs that, because a swap is a reflection. With beta_max = 1, the eigenvalue stays in [0,
1]. The model "a+b" alternates the mixers a and b, block by block. The same short convolution precedes every mixer;
conv=0 leaves it out.

All mixers have forward(x, state) -> (y, state). In training, x is the whole sequence. In --play, x is one line at a
time, and in a long evaluation one segment at a time. The *state* is what a mixer carries from token to token; None
is the state at the start. Only the state heads deal with another one, the program's state: what its variables hold.

Symbols: B batch, T time, H heads, K = V = D / H head dim, D model width. P1 and P2 are the papers that data.py names;
it also defines a trace and a command. `by_hand` is a DeltaNet whose weights are written by hand. Not here: dropout,
weight tying, padding masks.

Read `DeltaNet` and `LM` first. Look at all mixers, and check yours:   python models.py
"""
import copy
import math
import traceback
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import pad_sequence

from kernels import decay_scan, delta_rule

PAD = 0                                            # the token after a trace's end, as in data.py


class RMSNorm(nn.RMSNorm):
    """Computes in the dtype of its weight, also under autocast."""

    def __init__(self, width):
        super().__init__(width, eps=1e-5)          # torch's own eps would depend on the dtype

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class Linear(nn.Linear):
    """terms: how many layers' outputs are added up, in the residual stream. `init_weights` draws the weights from
    N(0, 1 / (terms * inputs)), so this sum has the variance of one input. The bias starts at 0."""

    def __init__(self, inputs, outputs, bias=False, terms=1):
        super().__init__(inputs, outputs, bias)
        self.std = (terms * inputs) ** -0.5
        if bias:
            nn.init.zeros_(self.bias)


# ----------------------------------------------------------------------------------------------------------
# The short convolution in front of every mixer

class ShortConv(nn.Module):
    """Returns x plus its causal convolution over `width` tokens, channel by channel; with width 0, it returns x.
    This is the Canon layer of Allen-Zhu (2512.17351). State: the last width - 1 inputs."""

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, channels))

    def forward(self, x, state=None):
        if not len(self.weight):
            return x, ()
        B, T, channels = x.shape
        if state is None:
            state = x.new_zeros(B, len(self.weight) - 1, channels)
        seen = torch.cat([state, x], 1)                                 # (B, width - 1 + T, channels)
        weight = self.weight.T[:, None].to(x.dtype)                     # (channels, 1, width)
        y = F.conv1d(seen.mT, weight, groups=channels).mT               # (B, T, channels)
        return x + y, seen[:, T:]


# ----------------------------------------------------------------------------------------------------------
# The linear RNNs: each class changes a few lines of its base class

class LinearAttention(nn.Module):
    """Katharopoulos et al. 2006.16236 without a normaliser: S_t = S_{t-1} + k_t v_t^T.

    This is also the base class of the mixers with a matrix S. A projection and SiLU give q, k and v (a subclass may
    override `keys`), and q and k are scaled to length 1. Then a *scan* runs the recurrence over all tokens, and its
    output is normalised and projected. State: S after the last token, (B, H, K, V) in fp32."""
    steps = 1                                                           # keys and values per token

    def __init__(self, cfg):
        super().__init__()
        D = cfg.d_model
        self.n_head, self.head_dim = cfg.n_head, D // cfg.n_head
        self.to_q = Linear(D, D)
        self.to_k = Linear(D, self.steps * D)
        self.to_v = Linear(D, self.steps * D)
        self.norm = RMSNorm(self.head_dim)
        self.out = Linear(D, D, terms=2 * cfg.n_layer)

    def keys(self, x):
        """(B, T, D) -> (B, T, steps*D), not normalised."""
        return F.silu(self.to_k(x))

    def project(self, x):
        """(B, T, D) -> q (B, T, H, K), k and v (B, T*steps, H, K)."""
        q, k, v = F.silu(self.to_q(x)), self.keys(x), F.silu(self.to_v(x))
        q, k, v = (y.view(len(x), -1, self.n_head, self.head_dim) for y in (q, k, v))
        q = F.normalize(q, dim=-1).to(v.dtype)                          # autocast would leave q in fp32
        k = F.normalize(k, dim=-1).to(v.dtype)
        return q, k, v

    def scan(self, x, q, k, v, S):
        return decay_scan(q, k, v, state=S)

    def forward(self, x, state=None):
        q, k, v = self.project(x)
        o, state = self.scan(x, q, k, v, state)
        return self.out(self.norm(o).flatten(2)), state


class Bit(torch.autograd.Function):
    """A *bit* is a number from 0 to 1 that is exactly 0 or 1 where |z| >= 2. This function returns the bit minus 1/2,
    so that it is centred at 0: z/4, clipped to [-1/2, 1/2]. Its gradient is that of sigmoid(z) (a straight-through
    estimator, 1308.3432), so training can move a bit away from either end again."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return F.hardtanh_(z / 4, -0.5, 0.5)

    @staticmethod
    def backward(ctx, dy):
        soft = torch.sigmoid(ctx.saved_tensors[0])
        return torch.ops.aten.sigmoid_backward(dy, soft)                # dy * soft * (1 - soft) in one pass


class DeltaNet(LinearAttention):
    """Yang et al. 2406.06484: overwrite what S holds under the key. beta_max = 2 follows Grazzi et al. 2411.12537.

    With cfg.gates "exact", beta is beta_max times a bit, and keys are computed from a hidden layer of bits, so a key
    can depend on several names in x at once. After training, most bits are exactly 0 or 1. With "sigmoid", as in P1,
    beta is beta_max * sigmoid(z), and keys are computed like values."""

    def __init__(self, cfg):
        super().__init__(cfg)
        D, self.beta_max, self.exact = cfg.d_model, cfg.beta_max, cfg.gates == "exact"
        self.to_beta = Linear(D, self.steps * cfg.n_head, bias=True)
        if self.exact:
            self.to_bits = Linear(D, 8 * D)
            self.to_k = Linear(8 * D, self.steps * D)

    def beta(self, x):
        """(B, T, D) -> (B, T*steps, H) from 0 to beta_max; 1 - beta is the eigenvalue along k."""
        z = self.to_beta(x).float()
        beta = self.beta_max * (Bit.apply(z) + 0.5 if self.exact else torch.sigmoid(z))
        return beta.view(x.shape[0], -1, self.n_head)

    def keys(self, x):
        return self.to_k(Bit.apply(self.to_bits(x))) if self.exact else super().keys(x)

    def scan(self, x, q, k, v, S):
        return delta_rule(q, k, v, self.beta(x), state=S)


def snap(k):
    """(..., K) -> the nearest of the keys e_i and (e_i +- e_j)/sqrt(2), up to their sign, for k of length 1."""
    size, place = k.abs().topk(2, -1)
    entries = torch.where(size.sum(-1, keepdim=True) > 2 ** 0.5 * size[..., :1],          # near two unit vectors?
                          k.new_tensor([0.5, 0.5]).sqrt(), k.new_tensor([1.0, 0.0]))
    return torch.zeros_like(k).scatter(-1, place, entries * k.gather(-1, place).sign())


class HardDeltaNet(DeltaNet):
    """A DeltaNet that training can turn into a finite automaton, so that it does not forget. Its keys become those of
    `snap`, its betas 0, 1 or 2, and a bit for each token decides whether the token writes. With v = 0 and beta 2, a
    step then swaps two rows of S or changes the sign of one, up to rounding.

    The scan uses x + hardness (hard - x), where `hard` is x rounded, with the gradient of x alone (straight-through,
    1308.3432). train.py raises `hardness` from 0 to 1 as long as answers stay right. `pull` is a loss that draws x to
    where it is rounded, as in VQ-VAE (1711.00937), and makes writes rare."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_write = Linear(cfg.d_model, cfg.n_head, bias=True)
        self.register_buffer("hardness", torch.zeros(()))

    def scan(self, x, q, k, v, S):
        def harden(soft, hard):
            return soft + self.hardness * (hard - soft).detach()

        beta, write = self.beta(x), Bit.apply(self.to_write(x).float()) + 0.5             # (B, T, H)
        hard_k, hard_beta, hard_write = snap(k).detach(), beta.round().detach(), write.round().detach()
        far = (k - hard_k).square().sum(-1)
        self.pull = ((1.5 + 9 * self.hardness) * (harden(beta, hard_beta).detach() * far).mean()
                     + (beta - hard_beta).square().mean() + 4 * (write - hard_write).square().mean()
                     + 1.5 * (beta * write).mean())
        v = v * harden(write, hard_write)[..., None].to(v.dtype)
        return delta_rule(q, F.normalize(harden(k, hard_k), dim=-1), v, harden(beta, hard_beta), state=S)

    def anneal(self, accuracy):
        """Raise the hardness a little if this share of answers is right, and lower it if many are wrong. -> whether it
        has reached 1."""
        step = 0.01 if accuracy >= 0.92 else -0.01 if accuracy < 0.72 else 0
        self.hardness.add_(step).clamp_(0, 1)
        return self.hardness == 1


class GatedDeltaNet(DeltaNet):
    """Yang et al. 2412.06464: a DeltaNet whose state is also multiplied by a gate, a sigmoid that starts near 0.98."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_gate = Linear(cfg.d_model, cfg.n_head, bias=True)

    def scan(self, x, q, k, v, S):
        g = F.logsigmoid(self.to_gate(x).float() + 4)
        g = g.unflatten(-1, (self.n_head, -1))                          # (B, T, H, 1), or (B, T, H, K) in KDA
        return delta_rule(q, k, v, self.beta(x), g, S)


class KDA(GatedDeltaNet):
    """Kimi Linear, 2510.26692: a GatedDeltaNet with a gate for each channel of the keys. (The paper computes the gates
    with a low-rank projection and an exponential, and it also gates the output.)"""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_gate = Linear(cfg.d_model, cfg.d_model, bias=True)


class DeltaProduct(DeltaNet):
    """Siems et al. 2502.10297: n_householder steps of DeltaNet per token. With beta = 2, each step is a reflection (a
    Householder matrix), so a token can apply a product of reflections."""

    def __init__(self, cfg):
        self.steps = cfg.n_householder                                  # first, because super().__init__ reads it
        super().__init__(cfg)

    def scan(self, x, q, k, v, S):
        q = q.repeat_interleave(self.steps, 1)
        o, S = delta_rule(q, k, v, self.beta(x), state=S)
        return o[:, self.steps - 1::self.steps], S                      # after each token's last step


class SSM(LinearAttention):
    """A state-space model of Mamba-2's shape (Dao and Gu 2405.21060): the whole state is multiplied by 1 - beta,
    whatever the key is. Unlike Mamba's exp(-dt), 1 - beta is negative where beta is above 1. As in Mamba, beta starts
    near 0, so an untrained model keeps its state."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.beta_max = cfg.beta_max
        self.to_beta = Linear(cfg.d_model, cfg.n_head, bias=True)

    def beta(self, x):
        """(B, T, D) -> (B, T, H) in (0, beta_max)"""
        return self.beta_max * torch.sigmoid(self.to_beta(x).float() - 6)

    def scan(self, x, q, k, v, S):
        beta = self.beta(x)
        return decay_scan(q, k, beta[..., None] * v, 1 - beta, S)


def turn(x, angle):
    """Rotates pairs of channels, i and K/2 + i, of x (..., K) by angle (..., K/2)."""
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class RotarySSM(SSM):
    """Mamba-3's idea (2603.15569): an SSM with complex eigenvalues. Each token rotates pairs of rows of the state by
    angles that the token chooses. The code does not rotate the state. It rotates k and q by the sum of angles so far,
    which gives the same outputs if R_t at the top of this file rotates by minus the token's angle. State: the scan's
    state, which is not rotated, and the sum of the angles, (B, 1, D/2)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.to_angle = Linear(cfg.d_model, cfg.d_model // 2)

    def scan(self, x, q, k, v, state):
        S, past = state or (None, 0)
        angle = past + self.to_angle(x).float().cumsum(1)               # (B, T, D/2)
        by_head = angle.unflatten(-1, (self.n_head, -1))
        o, S = super().scan(x, turn(q, by_head), turn(k, by_head), v, S)
        return o, (S, angle[:, -1:] % (2 * math.pi))


# ----------------------------------------------------------------------------------------------------------
# The other mixers. BlockDiagonal and M2RNN loop over time in Python, so they are slow.

class BlockDiagonal(nn.Module):
    """A bilinear RNN (2505.21749): h_t = A_t h_{t-1}, where A_t consists of dense 8x8 blocks that are linear in
    x_t. No input is added to h, so h_0 is learned. At every step, each block's part of h is scaled to length 1, because
    a product of many A_t overflows. State: h, (B, D/4, 8)."""
    size = 8

    def __init__(self, cfg):
        super().__init__()
        D = cfg.d_model
        self.to_blocks = Linear(D, 2 * D * self.size)
        self.start = nn.Parameter(torch.randn(2 * D // self.size, self.size) / self.size ** 0.5)
        self.norm = RMSNorm(2 * D)
        self.out = Linear(2 * D, D, terms=2 * cfg.n_layer)

    def forward(self, x, h=None):
        blocks = self.to_blocks(x).unflatten(-1, (-1, self.size, self.size))
        h = self.start.expand(len(x), -1, -1) if h is None else h
        read = []
        for A in blocks.unbind(1):                                      # (B, D/4, 8, 8)
            h = F.normalize((A @ h[..., None])[..., 0], dim=-1)
            read.append(h)
        return self.out(self.norm(torch.stack(read, 1).flatten(2))), h


class M2RNN(LinearAttention):
    """Mishra et al. 2603.14360: an RNN with tanh, whose state is as large as DeltaNet's. A gate of f = 1 keeps S."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.within = nn.Parameter(torch.eye(self.head_dim).repeat(self.n_head, 1, 1))
        self.to_forget = Linear(cfg.d_model, cfg.n_head, bias=True)

    def scan(self, x, q, k, v, S):
        f = torch.sigmoid(self.to_forget(x).float())[..., None, None]   # (B, T, H, 1, 1)
        S = x.new_zeros(len(x), *self.within.shape) if S is None else S
        read = []
        for t in range(x.shape[1]):
            write = k[:, t, :, :, None] * v[:, t, :, None]              # (B, H, K, V)
            S = f[:, t] * S + (1 - f[:, t]) * torch.tanh(S @ self.within + write)
            read.append((S * q[:, t, :, :, None]).sum(2))
        return torch.stack(read, 1), S


def rotate(x, start):
    """Rotary position embedding (2104.09864) of x (B, H, T, K), whose first token has position `start`."""
    T, K = x.shape[2:]
    position = torch.arange(start, start + T, device=x.device)
    frequency = 10000.0 ** torch.linspace(0, 2 / K - 1, K // 2, device=x.device)
    return turn(x, torch.outer(position, frequency))


class Attention(nn.Module):
    """Causal softmax attention with rotary positions. State: the keys and values so far, (B, H, T, K) each."""

    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.qkv = Linear(cfg.d_model, 3 * cfg.d_model)
        self.out = Linear(cfg.d_model, cfg.d_model, terms=2 * cfg.n_layer)

    def forward(self, x, state=None):
        qkv = self.qkv(x).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                            # (B, H, T, K) each
        past = state[0].shape[2] if state else 0
        q, k = rotate(q, past), rotate(k, past)
        if state:
            k = torch.cat([state[0], k], 2)
            v = torch.cat([state[1], v], 2)
        # With causal_lower_right, the last query sees all keys. The mask object is also a float tensor of the shape
        # (2, T, past + T), which is never read but costs memory, so it is made only after a state.
        mask = causal_lower_right(q.shape[2], k.shape[2]) if state else None
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not state)
        y = self.out(o.transpose(1, 2).flatten(2))
        return y, (k, v)


class Recurrent(nn.Module):
    """torch's LSTM or GRU of width D. State: what torch returns. With torch's initial bias, an LSTM halves its cell
    state at every token, so no gradient reaches back 30 tokens. Here, the gate that keeps the state therefore starts
    near 1 (a bias for forget gates: Jozefowicz et al., ICML 2015)."""

    def __init__(self, cfg, kind):
        super().__init__()
        D = cfg.d_model
        self.rnn = kind(D, D, batch_first=True)
        nn.init.constant_(self.rnn.bias_ih_l0[D:2 * D], 4)              # lstm: forget gate, gru: update gate

    def forward(self, x, state=None):
        return self.rnn(x, state)


class NoMixer(nn.Module):
    """A control: only the convolution in front of it lets a token see other tokens. State: none."""

    def __init__(self, cfg):
        super().__init__()
        self.out = Linear(cfg.d_model, cfg.d_model, terms=2 * cfg.n_layer)

    def forward(self, x, state=None):
        return self.out(x), ()


MIXERS = {  # --model NAME; add yours here: a class with forward(x, state) -> (y, state)
    "deltanet": DeltaNet,
    "hard_deltanet": HardDeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KDA,
    "deltaproduct": DeltaProduct,
    "linear_attention": LinearAttention,
    "ssm": SSM,
    "rotary_ssm": RotarySSM,
    "block_diagonal": BlockDiagonal,
    "m2rnn": M2RNN,
    "transformer": Attention,
    "lstm": lambda cfg: Recurrent(cfg, nn.LSTM),
    "gru": lambda cfg: Recurrent(cfg, nn.GRU),
    "no_mixer": NoMixer,
}


# ----------------------------------------------------------------------------------------------------------
# The language model

class MLP(nn.Module):
    """SwiGLU (2002.05202)."""

    def __init__(self, cfg):
        super().__init__()
        self.up = Linear(cfg.d_model, 2 * cfg.d_mlp)
        self.down = Linear(cfg.d_mlp, cfg.d_model, terms=2 * cfg.n_layer)

    def forward(self, x):
        gate, up = self.up.weight.chunk(2)                # two products: halves of one product would be copied
        return self.down(F.silu(F.linear(x, gate)) * F.linear(x, up))


class Block(nn.Module):
    """x = x + mixer(conv(norm(x))), x = x + mlp(norm(x)). State: (the convolution's state, the mixer's)."""

    def __init__(self, cfg, mixer):
        super().__init__()
        self.norm1 = RMSNorm(cfg.d_model)
        self.conv = ShortConv(cfg.d_model, cfg.conv)
        self.mixer = MIXERS[mixer](cfg)
        self.norm2 = RMSNorm(cfg.d_model)
        self.mlp = MLP(cfg)

    def forward(self, x, state=None):
        conv_state, mixer_state = state or (None, None)
        y, conv_state = self.conv(self.norm1(x), conv_state)
        y, mixer_state = self.mixer(y, mixer_state)
        x = x + y
        return x + self.mlp(self.norm2(x)), (conv_state, mixer_state)


class LM(nn.Module):
    """`forward` returns hidden vectors (Transformers' last_hidden_state), and `head` maps them to logits for the next
    token. `to_state` is a state head (see below), or nn.Identity if there is none. A LinearHead maps hidden vectors
    to logits (n_slots, n_classes) for the program's state. `load` in train.py has an example. cfg has model, d_model,
    d_mlp, n_layer, n_head, conv, beta_max, gates, n_householder and states."""

    def __init__(self, cfg, vocab_size, n_slots=0, n_classes=0):
        super().__init__()
        mixers = cfg.model.split("+") * cfg.n_layer                     # more than are needed
        self.embed = nn.Embedding(vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, name) for name in mixers[:cfg.n_layer])
        self.norm = RMSNorm(cfg.d_model)
        self.head = nn.Linear(cfg.d_model, vocab_size, bias=False)
        init_weights(self)
        # The state head is made last, so that it does not change the other initial weights.
        self.to_state = nn.Identity()
        if cfg.states == "linear":
            self.to_state = LinearHead(cfg, n_slots, n_classes)
        elif cfg.states == "transformer":
            self.to_state = TransformerHead(cfg, vocab_size)
        elif cfg.states == "contrastive":
            self.to_state = ContrastiveHead()

    def forward(self, tokens, state=None):
        """tokens (B, T) int64 and state (None, or what the previous call returned) -> hidden (B, T, D) and state, a
        list with an entry per block."""
        x, new = self.embed(tokens), []
        for block, before in zip(self.blocks, state or [None] * len(self.blocks)):
            x, after = block(x, before)
            new.append(after)
        return self.norm(x), new


def init_weights(model):
    """parameter                     | start
    --------------------------------|-----------------------------------------
    embedding                       | normal, std 1
    Linear, also in your own mixer  | normal, std 1 / sqrt(inputs)
    Linear: mixer.out, mlp.down     | the same / sqrt(2 n_layer): together they add a variance of 1
    head, linear state head         | zero: the first prediction is uniform, so the first loss is log(vocabulary)
    conv                            | uniform in +-1 / sqrt(width), as in torch's Conv1d
    bias of a Linear                | 0: beta starts around beta_max / 2, in ssm around 0.0025 beta_max
    all else in a mixer             | what its __init__ sets
    """
    nn.init.normal_(model.embed.weight)
    nn.init.zeros_(model.head.weight)
    for module in model.blocks.modules():
        if isinstance(module, Linear):
            nn.init.normal_(module.weight, std=module.std)
        elif isinstance(module, ShortConv):
            bound = max(1, len(module.weight)) ** -0.5
            nn.init.uniform_(module.weight, -bound, bound)


def count(model):
    """The number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def make_optimizers(model):
    """-> [AdamW, Muon]. Muon trains the matrices of the blocks: it makes the singular values of an update about equal,
    and the update as large as AdamW's, so one learning rate serves both. AdamW trains the rest: vectors, weights
    outside the blocks, and matrices with a side of 16 or less, such as a projection to one number per head."""
    in_blocks, matrices, rest = set(model.blocks.parameters()), [], []
    for p in model.parameters():
        large = p in in_blocks and p.ndim == 2 and min(p.shape) > 16
        (matrices if large else rest).append(p)
    optimizers = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0)]
    if matrices:                                          # there are none with d_model = 16
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0, adjust_lr_fn="match_rms_adamw"))
    return optimizers


# ----------------------------------------------------------------------------------------------------------
# State heads (P2 section 4): with them, the program's state supervises the hidden vector at the end of each line.
# All have loss(lm, hidden, batch) -> a cross-entropy in nats (natural logarithm). hidden (B, T, D) comes from
# LM.forward, and batch is a data.Batch of tensors.

class LinearHead(nn.Linear):
    """n_slots softmaxes over n_classes. The labels are classes or, in the task pfsa, exact beliefs. A *belief* gives a
    probability to each state that the program may have.

    Labels that are classes are smoothed: of n classes, the right one has the target 1 - smooth + smooth / n, and any
    other has smooth / n. So the loss is smallest at finite logits, and predictions that are too certain cost."""
    smooth = 0.1

    def __init__(self, cfg, n_slots, n_classes):
        super().__init__(cfg.d_model, n_slots * n_classes, bias=False)
        self.n_slots = n_slots
        nn.init.zeros_(self.weight)

    def forward(self, hidden):
        """(..., D) -> logits (..., n_slots, n_classes)"""
        return super().forward(hidden).unflatten(-1, (self.n_slots, -1))

    def loss(self, lm, hidden, batch):
        """The mean over labelled slots, or over lines with a belief."""
        logits = self(hidden[batch.line_end]).float()                   # (N, n_slots, n_classes)
        if batch.belief is None:
            label = batch.state[batch.line_end]                         # (N, n_slots)
            return F.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=-1,
                                   label_smoothing=self.smooth)
        belief = batch.belief[batch.line_end]                           # (N, n_classes)
        known = belief.sum(-1) > 0
        return F.cross_entropy(logits[known, 0], belief[known])        # a task with beliefs has one slot


def stated_lines(batch):
    """-> for the N lines that have their program's state as text: the index of the trace (N,), the index of the line's
    last token (N,), and the tokens of the text (N, W)."""
    trace, line = (batch.state_tokens[..., 0] != PAD).nonzero(as_tuple=True)    # other lines begin with PAD
    ends = pad_sequence([row.nonzero()[:, 0] for row in batch.line_end], batch_first=True)    # (B, lines)
    return trace, ends[trace, line], batch.state_tokens[trace, line]


class TransformerHead(LM):
    """Two attention blocks that predict the text of the program's state, token by token. Of the trace, they see only
    the hidden vector at the line's end."""

    def __init__(self, cfg, vocab_size):
        changes = {"model": "transformer", "conv": 0, "n_layer": 2, "states": "none"}
        super().__init__(SimpleNamespace(**{**vars(cfg), **changes}), vocab_size)

    def loss(self, lm, hidden, batch):
        """The mean over the tokens of all state texts."""
        trace, place, text = stated_lines(batch)
        line = hidden[trace, place]                                     # (N, D)
        x = torch.cat([line[:, None], self.embed(text[:, :-1])], 1)
        for block in self.blocks:
            x, _ = block(x)
        logits = self.head(self.norm(x)).float()                        # (N, W, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), text.flatten(), ignore_index=PAD)


class ContrastiveHead(nn.Module):
    """InfoNCE between the hidden vector at a line's end and the LM's hidden vector at the end of that
    line's state text (as in CLIP, 2103.00020; P2 appendix D). The candidates are the lines and the states of the same
    trace. P2 does not say how to treat lines with equal states (half of the lines in parity). Here, from line to state,
    such lines share one candidate state; from state to line, each is a candidate of its own, and the others count as
    wrong. The head has no parameters."""
    temperature = 0.07
    factor = 0.1                                                        # of this loss in the sum (P2 section 4.2)

    def loss(self, lm, hidden, batch):
        """The mean of both directions, line to state and state to line, times `factor`."""
        trace, place, text = stated_lines(batch)
        text, number = text.unique(dim=0, return_inverse=True)          # (U, W), (N,)
        read, _ = lm(text)
        ends = (text != PAD) & (F.pad(text, (0, 1))[:, 1:] == PAD)      # (U, W), the last token of a text
        states = F.normalize(read[ends], dim=-1)                        # (U, D)
        lines = F.normalize(hidden[trace, place], dim=-1)               # (N, D)
        logits = (lines @ states.T).float() / self.temperature          # (N, U)

        same = trace[:, None] == trace                                  # (N, N), lines of one trace
        occurs = same.float() @ F.one_hot(number).float() > 0           # (N, U), the states of a line's trace
        line_to_state = F.cross_entropy(logits.where(occurs, -math.inf), number)
        to_lines = logits.T[number].where(same, -math.inf)              # (N, N), from a line's state to lines
        state_to_line = (to_lines.logsumexp(1) - to_lines.diagonal()).mean()
        return self.factor * (line_to_state + state_to_line) / 2


# ----------------------------------------------------------------------------------------------------------
# Why it works: the same model, with weights that are written by hand

def by_hand(task):
    """A one-layer DeltaNet with exact gates that executes commands. Its weights are written down here; nothing is
    trained. Raises ValueError if `task` is not a data.Repl. The model predicts the printed values, and no other token.

    Each variable x has two rows of the state (each stored twice, see below): new_x holds its value, and old_x is empty
    between two commands. The columns are digits. Every beta is 2. Most keys are 0, and then nothing happens. A key that
    is the sum of two rows' unit vectors swaps these rows and changes the signs of both. In a command with m names on
    each side, these rows are

        at a name x left of =:              new_x, old_x    the value of x moves to old_x, with a minus
        at the token after x right of =:    old_x, new_y    the value moves from old_x to new_y, with a plus

    Here y is the name that takes the value of x: it stands 2m tokens before x, at the same place left of =.
    At the digit of "x = 5", the key is new_x, and the digit is written into this row, which is empty. The state has two
    copies of each row, so the key of a reflection has four entries of 1/2. Unlike 1/sqrt(2), fp32 represents 1/2
    exactly, so commands cause no rounding errors."""
    if type(task).__name__ != "Repl":
        raise ValueError(f"by_hand needs a data.Repl, not a task of the class {type(task).__name__}")
    n, D, huge = task.n_vars, 64, 2.0 ** 30               # huge: so that each bit and beta is at one of its ends
    m = 2 if task.moves == "swap" else n
    cfg = SimpleNamespace(model="deltanet", d_model=D, d_mlp=8, n_layer=1, n_head=1, conv=2 * m + 2, beta_max=2.0,
                          gates="exact", states="none")
    lm = LM(cfg, len(task.tokenizer)).requires_grad_(False)
    for parameter, p in lm.named_parameters():
        p.fill_(1.0 if "norm" in parameter else 0.0)
    mixer, conv = lm.blocks[0].mixer, lm.blocks[0].conv.weight          # conv[-1 - d]: for the token d before

    def ids(*words):
        return [task.tokenizer.encode(word)[0] for word in words]

    # The entries of an embedding: which name the token is (four copies), or which digit; `stop`, whether it can follow
    # a name right of =; `side`, 1 if it begins a command's left side, -1 if it begins the right side or a print.
    here, back1, back2, far, digit = torch.arange(5 * n).view(5, n)
    one, stop, side, rest = range(5 * n, 5 * n + 4)
    embed, digits = lm.embed.weight, ids(*"123456789"[:n])
    embed[:, one] = 1
    for entries in (here, back1, back2, far):
        embed[ids(*task.names), entries] = 1
    embed[digits, digit] = 1
    embed[ids(", ", "\n"), stop] = 1
    embed[ids(">>> ", " = ", "print('"), side] = torch.tensor([1.0, -1, -1])
    embed[:, rest] = (D - embed.square().sum(1)).sqrt()                 # so RMSNorm changes nothing (but for its eps)
    # The convolution copies the names 1, 2 and 2m + 1 tokens back. It also sums `side` over the tokens before, with a
    # weight that halves with each token, so the last token that begins a side decides the sign of the sum. The
    # weight -1 cancels the token's own entry, which ShortConv adds.
    for entries, back in (back1, 1), (back2, 2), (far, 2 * m + 1):
        conv[-1, entries], conv[-1 - back, entries] = -1, 1
    conv[:, side] = 2.0 ** torch.arange(-2 * m - 1, 1)
    conv[-1, side] = -1

    # The hidden layer of the keys has four bits for each variable: `left`, the token is its name, left of =; `right`,
    # the token follows its name, right of =; `takes`, the variable is y; `assigned`, the token is the digit in
    # "x = 5". A bit is 1 if its row of to_bits, applied to the output of the convolution, is positive, else 0. One
    # more bit is always 1, because to_k is applied to bits minus 1/2, and this bit adds the missing halves.
    q, v, bit, key = mixer.to_q.weight, mixer.to_v.weight, mixer.to_bits.weight, mixer.to_k.weight
    x = torch.arange(n)
    left, right, takes, assigned = torch.arange(4 * n).view(4, n)
    bit[left, here], bit[left, side], bit[left, one] = 2, 1, -2                            # 2 here + side > 2
    bit[right, back1], bit[right, stop], bit[right, side], bit[right, one] = 2, 2, -1, -4  # 2 back1 + 2 stop - side > 4
    bit[takes, far], bit[takes, stop], bit[takes, side], bit[takes, one] = 2, 2, -1, -6
    bit[takes[:, None], back1] = 2                         # 2 far + 2 stop - side + 2 (back1 of any variable) > 6
    bit[assigned, back2], bit[assigned, side], bit[assigned, one] = 1, -2, -2.5
    bit[assigned[:, None], digit] = 1                      # back2 - 2 side + (digit, whichever) > 2.5
    bit[4 * n, one] = 1
    bit *= huge
    for new, old in (x, x + 2 * n), (x + n, x + 3 * n):
        key[new, left] = key[old, left] = key[old, right] = key[new, takes] = key[new, assigned] = 1
        q[new, back1] = 1                                               # the name before a printed value
    key[:, 4 * n] = key.sum(1)
    v[x, digit] = 1
    mixer.to_beta.bias[:] = huge
    mixer.out.weight[digit, x] = 1
    lm.head.weight[digits, digit] = 8
    return lm


# ----------------------------------------------------------------------------------------------------------
# Long sequences in pieces, and a check that a mixer allows it

def in_pieces(model, tokens, length):
    """-> hidden (B, T, D), computed `length` tokens at a time; the same as all at once, unless a mixer is wrong."""
    state, pieces = None, []
    for piece in tokens.split(length, 1):
        hidden, state = model(piece, state)
        pieces.append(hidden)
    return torch.cat(pieces, 1)


@torch.no_grad()
def fault(mixer, width):
    """-> what is wrong with a mixer of this width, in one line, or "": it must return (y, state), with y like x, and
    compute from a sequence in pieces, carrying the state, what it computes in one pass."""
    mixer = copy.deepcopy(mixer).cpu()
    for p in mixer.parameters():                          # a weight that starts at 0 would hide an error
        p += 0.1 * torch.arange(p.numel()).view_as(p).cos()
    x = torch.arange(3 * 40 * width).view(3, 40, width).square().cos()      # random enough, and always the same
    try:
        once, _ = mixer(x, None)
        if once.shape != x.shape:
            return f"returns y of the shape {tuple(once.shape)} for x {tuple(x.shape)}: give them the same shape"
        apart = max((in_pieces(mixer, x, length) - once).abs().max().item() for length in (1, 7))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raises {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
    if not apart < 1e-3:
        return f"computes in pieces what differs by {apart:.0e}: it sees the future, loses its state, or is random"
    return ""


# ----------------------------------------------------------------------------------------------------------
# python models.py: all mixers, their sizes, and whether they are right

def numbers(state):
    """How many numbers a state holds, in tensors that may stand in lists and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    return sum(map(numbers, state)) if isinstance(state, (list, tuple)) else 0


def main():
    cfg = SimpleNamespace(d_model=64, d_mlp=128, n_layer=1, n_head=1, conv=12, beta_max=2.0, gates="exact",
                          n_householder=2, states="none")
    torch.manual_seed(0)
    print("mixer              parameters  state after 60 tokens, numbers")
    for name, kind in MIXERS.items():
        mixer = kind(cfg)
        wrong = fault(mixer, cfg.d_model)
        state = None if wrong else mixer(torch.randn(1, 60, cfg.d_model), None)[1]
        print(f"{name:18s}{count(mixer):12,}", f"WRONG: it {wrong}" if wrong else f"{numbers(state):12,}")
    print("notice: only the transformer's state grows with the number of tokens")


if __name__ == "__main__":
    main()
