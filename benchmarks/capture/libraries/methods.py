"""Models in the manner of repositories of papers whose domains are in no other list here.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.utils import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .by_hand import ids, listed
from .catalogue import fixed_image, rows

__all__: list[str] = []


def lengths(b: int, n: int) -> Tensor:
    """Falling lengths, of which the first is whole."""
    return n - torch.arange(b) % (n // 2)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------------------------------------ sound


class GlobalLayerNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, channels, 1)), nn.Parameter(torch.zeros(1, channels, 1))

    def forward(self, y: Tensor) -> Tensor:
        mean = y.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        var = torch.pow(y - mean, 2).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return self.gamma * (y - mean) / torch.pow(var + 1e-8, 0.5) + self.beta


class TemporalBlock(nn.Module):
    def __init__(self, b: int, h: int, dilation: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(b, h, 1), nn.PReLU(), GlobalLayerNorm(h), nn.Conv1d(h, h, 3, padding=dilation, dilation=dilation, groups=h), nn.PReLU(), GlobalLayerNorm(h), nn.Conv1d(h, b, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x


@listed(lambda b, n: (torch.randn(b, 8 * n), 8 * lengths(b, n), torch.randn(b, 2, 8 * n)))
class ConvTasNet(nn.Module):
    """Speakers told apart, with the loss of the best of their orders."""

    def __init__(self) -> None:
        super().__init__()
        self.C, self.encoder, self.decoder = 2, nn.Conv1d(1, 16, 8, stride=4, bias=False), nn.Linear(16, 8, bias=False)
        self.separator = nn.Sequential(GlobalLayerNorm(16), nn.Conv1d(16, 8, 1), *[TemporalBlock(8, 16, 2**i) for i in range(3)], nn.Conv1d(8, 32, 1))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_normal_(p)

    def overlap_and_add(self, signal: Tensor, frame_step: int) -> Tensor:
        outer = signal.size()[:-2]
        frames, frame_length = signal.size()[-2:]
        subframe_length = math.gcd(frame_length, frame_step)
        subframe_step, per_frame = frame_step // subframe_length, frame_length // subframe_length
        output_size = frame_step * (frames - 1) + frame_length
        output_subframes = output_size // subframe_length
        frame = torch.arange(0, output_subframes).unfold(0, per_frame, subframe_step)
        frame = signal.new_tensor(frame).long().contiguous().view(-1)
        result = signal.new_zeros(*outer, output_subframes, subframe_length)
        result.index_add_(-2, frame, signal.contiguous().view(*outer, -1, subframe_length))
        return result.view(*outer, -1)

    def forward(self, mixture: Tensor, source_lengths: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        mixture_w = F.relu(self.encoder(mixture.unsqueeze(1)))
        M, N, K = mixture_w.size()
        mask = F.relu(self.separator(mixture_w).view(M, self.C, N, K))
        source_w = torch.transpose(mixture_w.unsqueeze(1) * mask, 2, 3)
        estimate = self.overlap_and_add(self.decoder(source_w), 4)
        estimate = F.pad(estimate, (0, mixture.size(-1) - estimate.size(-1)))
        return self.loss(source, estimate, source_lengths), estimate

    def loss(self, source: Tensor, estimate: Tensor, source_lengths: Tensor) -> Tensor:
        B, C, _ = source.size()
        mask = source.new_ones((B, 1, source.size(2)))
        for i in range(B):
            mask[i, :, source_lengths[i]:] = 0
        estimate = estimate * mask
        num_samples = source_lengths.view(-1, 1, 1).to(source.dtype)
        zero_mean_target = (source - torch.sum(source, dim=2, keepdim=True) / num_samples) * mask
        zero_mean_estimate = (estimate - torch.sum(estimate, dim=2, keepdim=True) / num_samples) * mask
        s_target, s_estimate = torch.unsqueeze(zero_mean_target, dim=1), torch.unsqueeze(zero_mean_estimate, dim=2)
        dot = torch.sum(s_estimate * s_target, dim=3, keepdim=True)
        projection = dot * s_target / (torch.sum(s_target**2, dim=3, keepdim=True) + 1e-8)
        e_noise = s_estimate - projection
        si_snr = 10 * torch.log10(torch.sum(projection**2, dim=3) / (torch.sum(e_noise**2, dim=3) + 1e-8) + 1e-8)
        perms = source.new_tensor(list(itertools.permutations(range(C))), dtype=torch.long)
        perms_one_hot = source.new_zeros((*perms.size(), C)).scatter_(2, torch.unsqueeze(perms, 2), 1)
        snr_set = torch.einsum("bij,pij->bp", [si_snr, perms_one_hot])
        max_snr, _ = torch.max(snr_set, dim=1, keepdim=True)
        return 0 - torch.mean(max_snr / C)


class MaskConv(nn.Module):
    def __init__(self, seq_module: nn.Sequential) -> None:
        super().__init__()
        self.seq_module = seq_module

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for module in self.seq_module:
            x = module(x)
            mask = torch.BoolTensor(x.size()).fill_(0)
            for i, length in enumerate(lengths):
                length = length.item()
                if (mask[i].size(2) - length) > 0:
                    mask[i].narrow(2, length, mask[i].size(2) - length).fill_(1)
            x = x.masked_fill(mask, 0)
        return x


class BatchRNN(nn.Module):
    def __init__(self, n_in: int, n_out: int, norm: bool) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(n_in) if norm else None
        self.rnn = nn.GRU(n_in, n_out, bidirectional=True)

    def flatten_parameters(self) -> None:
        self.rnn.flatten_parameters()

    def forward(self, x: Tensor, output_lengths: Tensor) -> Tensor:
        if self.batch_norm is not None:
            t, n = x.size(0), x.size(1)
            x = self.batch_norm(x.view(t * n, -1)).view(t, n, -1)
        x = pack_padded_sequence(x, output_lengths)
        x, _ = self.rnn(x)
        x, _ = pad_packed_sequence(x)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2).view(x.size(0), x.size(1), -1)


@listed(lambda b, n: (torch.randn(b, 1, 8, 2 * n), 2 * lengths(b, n), torch.randint(1, 12, (3 * b,)), torch.full((b,), 3)))
class DeepSpeech2(nn.Module):
    """Masked convolutions, packed recurrent layers, and targets of all rows in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = MaskConv(nn.Sequential(nn.Conv2d(1, 4, (5, 5), (2, 2), (2, 2)), nn.BatchNorm2d(4), nn.Hardtanh(0, 20, inplace=True)))
        self.rnns = nn.Sequential(*[BatchRNN(16, 16, norm=i > 0) for i in range(2)])
        self.fc, self.criterion = nn.Linear(16, 12, bias=False), nn.CTCLoss(reduction="sum", zero_infinity=True)

    def get_seq_lens(self, input_length: Tensor) -> Tensor:
        seq_len = input_length
        for m in self.conv.modules():
            if type(m) is nn.modules.conv.Conv2d:
                seq_len = (seq_len + 2 * m.padding[1] - m.dilation[1] * (m.kernel_size[1] - 1) - 1) // m.stride[1] + 1
        return seq_len.int()

    def forward(self, x: Tensor, lengths: Tensor, targets: Tensor, target_sizes: Tensor) -> Tensor:
        lengths = lengths.cpu().int()
        output_lengths = self.get_seq_lens(lengths)
        x = self.conv(x, output_lengths)
        sizes = x.size()
        x = x.view(sizes[0], sizes[1] * sizes[2], sizes[3]).transpose(1, 2).transpose(0, 1).contiguous()
        for rnn in self.rnns:
            x = rnn(x, output_lengths)
        out = self.fc(x).log_softmax(-1)
        return self.criterion(out, targets, output_lengths, target_sizes) / sizes[0]


@listed(lambda b, n: (torch.randn(b, n // 2, 8), torch.randint(1, 10, (b, 4)), n // 2 - torch.arange(b) % 3, 4 - torch.arange(b) % 3))
class Transducer(nn.Module):
    """A joiner of sound and text, and its loss by the forward algorithm, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embed, self.decoder = nn.LSTM(8, 16, batch_first=True), nn.Embedding(10, 16, padding_idx=0), nn.GRU(16, 16, batch_first=True)
        self.joint = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, xs: Tensor, ys: Tensor, xlen: Tensor, ylen: Tensor) -> Tensor:
        f, _ = self.encoder(xs)
        bos = ys.new_zeros((ys.shape[0], 1)).long()
        g, _ = self.decoder(self.embed(torch.cat((bos, ys.long()), dim=1)))
        f, g = f.unsqueeze(2), g.unsqueeze(1)
        sz = [max(i, j) for i, j in zip(f.size()[:-1], g.size()[:-1], strict=True)]
        f, g = f.expand(torch.Size([*sz, f.shape[-1]])), g.expand(torch.Size([*sz, g.shape[-1]]))
        log_probs = self.joint(torch.cat((f, g), dim=-1)).log_softmax(-1)
        B, T, U, _ = log_probs.shape
        blank = log_probs[..., 0]
        label = log_probs[:, :, :-1].gather(3, ys[:, None, :, None].expand(-1, T, -1, 1)).squeeze(-1)
        alpha = []
        for t in range(T):
            row = []
            for u in range(U):
                if t == 0 and u == 0:
                    row.append(torch.zeros(B, dtype=log_probs.dtype))
                    continue
                terms = []
                if t > 0:
                    terms.append(alpha[t - 1][:, u] + blank[:, t - 1, u])
                if u > 0:
                    terms.append(row[u - 1] + label[:, t, u - 1])
                row.append(torch.logsumexp(torch.stack(terms), 0))
            alpha.append(torch.stack(row, 1))
        stacked = torch.stack(alpha, 1)
        at = torch.arange(B)
        return -(stacked[at, xlen - 1, ylen] + blank[at, xlen - 1, ylen]).mean()


class SERes2Block(nn.Module):
    def __init__(self, channels: int, scale: int = 4) -> None:
        super().__init__()
        self.width = channels // scale
        self.convs = nn.ModuleList([nn.Conv1d(self.width, self.width, 3, padding=2, dilation=2) for _ in range(scale - 1)])
        self.bns = nn.ModuleList([nn.BatchNorm1d(self.width) for _ in range(scale - 1)])
        self.se = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Conv1d(channels, 4, 1), nn.ReLU(), nn.Conv1d(4, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        spx = torch.split(x, self.width, 1)
        out, sp = [], spx[0]
        for i, (conv, bn) in enumerate(zip(self.convs, self.bns, strict=True)):
            sp = sp + spx[i] if i >= 1 else sp
            sp = bn(F.relu(conv(sp)))
            out.append(sp)
        out = torch.cat([*out, spx[-1]], dim=1)
        return x + out * self.se(out)


@listed(lambda b, n: (torch.randn(b, 160 * n), torch.randint(6, (b,))))
class ECAPA(nn.Module):
    """Speakers told by their voice: spectra within the model, attentive statistics, a margin of angles."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hamming_window(128))
        self.register_buffer("fbank", torch.rand(16, 65))
        self.conv1, self.layers = nn.Conv1d(16, 16, 5, padding=2), nn.ModuleList([SERes2Block(16) for _ in range(2)])
        self.cat, self.attention = nn.Conv1d(32, 24, 1), nn.Sequential(nn.Conv1d(72, 8, 1), nn.ReLU(), nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, 24, 1), nn.Softmax(dim=2))
        self.bn, self.fc = nn.BatchNorm1d(48), nn.Linear(48, 16)
        self.weight = nn.Parameter(torch.randn(6, 16) * 0.1)
        self.m, self.s = 0.2, 30.0
        self.cos_m, self.sin_m, self.th, self.mm = math.cos(0.2), math.sin(0.2), math.cos(math.pi - 0.2), math.sin(math.pi - 0.2) * 0.2

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            x = torch.stft(x, 128, 64, window=self.window, return_complex=True).abs().square()
            x = (torch.matmul(self.fbank, x) + 1e-6).log()
            x = x - torch.mean(x, dim=-1, keepdim=True)
            if self.training:
                width = torch.randint(0, 4, (x.shape[0], 1)).unsqueeze(2)
                pos = torch.randint(0, 12, (x.shape[0], 1)).unsqueeze(2)
                arange = torch.arange(16).view(1, 1, -1)
                mask = ((pos <= arange) * (arange < (pos + width))).any(dim=1)
                x = x.masked_fill_(mask.unsqueeze(2), 0.0)
        x = F.relu(self.conv1(x))
        x1 = self.layers[0](x)
        x2 = self.layers[1](x + x1)
        x = F.relu(self.cat(torch.cat((x1, x2), dim=1)))
        t = x.size()[-1]
        global_x = torch.cat((x, torch.mean(x, dim=2, keepdim=True).repeat(1, 1, t), torch.sqrt(torch.var(x, dim=2, keepdim=True).clamp(min=1e-4)).repeat(1, 1, t)), dim=1)
        w = self.attention(global_x)
        mu = torch.sum(x * w, dim=2)
        sg = torch.sqrt((torch.sum((x**2) * w, dim=2) - mu**2).clamp(min=1e-4))
        x = self.fc(self.bn(torch.cat((mu, sg), 1)))
        if label is None:
            return x
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.mul(cosine, cosine)).clamp(0, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where((cosine - self.th) > 0, phi, cosine - self.mm)
        one_hot = torch.zeros_like(cosine)
        one_hot.scatter_(1, label.view(-1, 1), 1)
        return F.cross_entropy(((one_hot * phi) + ((1.0 - one_hot) * cosine)) * self.s, label)


# ------------------------------------------------------------------------------------------------ points, fields


def sample_and_group(xyz: Tensor, points: Tensor, n_points: int, k: int) -> tuple[Tensor, Tensor]:
    """Farthest points from the first, each with its neighbours."""
    B, N, _ = xyz.shape
    centroids = torch.zeros(B, n_points, dtype=torch.long)
    distance, farthest = torch.ones(B, N, dtype=xyz.dtype) * 1e10, torch.zeros(B, dtype=torch.long)
    batch = torch.arange(B, dtype=torch.long)
    for i in range(n_points):
        centroids[:, i] = farthest
        centroid = xyz[batch, farthest, :].view(B, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        distance = torch.min(distance, dist)
        farthest = torch.max(distance, -1)[1]
    new_xyz = xyz[batch[:, None], centroids]
    idx = torch.cdist(new_xyz, xyz).topk(k, largest=False)[1]
    grouped = points[batch[:, None, None], idx]
    center = points[batch[:, None], centroids][:, :, None].expand_as(grouped)
    return new_xyz, torch.cat([grouped - center, center], -1)


class OffsetAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.q_conv, self.k_conv = nn.Conv1d(channels, channels // 4, 1, bias=False), nn.Conv1d(channels, channels // 4, 1, bias=False)
        self.q_conv.weight = self.k_conv.weight
        self.v_conv, self.trans_conv, self.after_norm = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, channels, 1), nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        attention = torch.softmax(self.q_conv(x).permute(0, 2, 1) @ self.k_conv(x), -1)
        attention = attention / (1e-9 + attention.sum(dim=1, keepdim=True))
        return x + F.relu(self.after_norm(self.trans_conv(x - self.v_conv(x) @ attention)))


@listed(lambda b, n: (torch.randn(b, n, 3), torch.randint(4, (b,))))
class PCT(nn.Module):
    """Offset attention over farthest points, whose queries and keys have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.local = nn.Linear(3, 8), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.attn, self.head = nn.ModuleList([OffsetAttention(16) for _ in range(2)]), mlp(32, 16, 4)

    def forward(self, xyz: Tensor, label: Tensor | None = None) -> Tensor:
        _, feature = sample_and_group(xyz, self.embed(xyz), 8, 4)
        x = self.local(feature).max(2)[0].permute(0, 2, 1)
        found = []
        for layer in self.attn:
            x = layer(x)
            found.append(x)
        logits = self.head(F.adaptive_max_pool1d(torch.cat(found, 1), 1).view(x.shape[0], -1))
        return logits if label is None else F.cross_entropy(logits, label, label_smoothing=0.2)


class Sine(nn.Module):
    def __init__(self, n_in: int, n_out: int, is_first: bool = False, omega_0: float = 30.0) -> None:
        super().__init__()
        self.omega_0, self.linear = omega_0, nn.Linear(n_in, n_out)
        with torch.no_grad():
            bound = 1 / n_in if is_first else math.sqrt(6 / n_in) / omega_0
            self.linear.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega_0 * self.linear(x))


@listed(lambda b, n: ({"coords": torch.rand(b, n, 2) * 2 - 1}, {"gradients": torch.randn(b, n, 2)}))
class Siren(nn.Module):
    """A field fitted to its own gradients, which are taken by coordinates that the model makes leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Sine(2, 16, True), Sine(16, 16), Sine(16, 16), nn.Linear(16, 1))

    def forward(self, model_input: dict[str, Tensor], gt: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.enable_grad():
            coords = model_input["coords"].clone().detach().requires_grad_(True)
            output = self.net(coords)
            gradients = torch.autograd.grad(output, coords, grad_outputs=torch.ones_like(output), create_graph=True)[0]
        return {"loss": ((gradients - gt["gradients"]) ** 2).sum(-1).mean(), "model_out": output}


@listed(lambda b, n: (torch.randn(b, 5, 3), torch.randint(1, 6, (b, 5)) * (torch.arange(5) < 5 - torch.arange(b)[:, None] % 3), torch.randn(b), torch.randn(b, 5, 3)))
class SchNetForces(nn.Module):
    """Energies of atoms, and forces as their gradients by the places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 16, padding_idx=0)
        self.register_buffer("offset", torch.linspace(0, 5, 10))
        self.coeff = -0.5 / (self.offset[1] - self.offset[0]).item() ** 2
        self.filters = nn.ModuleList([nn.Sequential(nn.Linear(10, 16), nn.Softplus(), nn.Linear(16, 16)) for _ in range(2)])
        self.updates, self.out = nn.ModuleList([mlp(16, 16, 16) for _ in range(2)]), mlp(16, 8, 1)

    def energy(self, pos: Tensor, z: Tensor) -> Tensor:
        mask = (z > 0).to(pos.dtype)
        pair = mask[:, :, None] * mask[:, None] * (1 - torch.eye(z.shape[1], dtype=pos.dtype))
        d = ((pos[:, :, None] - pos[:, None]).pow(2).sum(-1) + 1e-8).sqrt()
        rbf = torch.exp(self.coeff * (d[..., None] - self.offset) ** 2)
        cutoff = 0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5) * pair
        h = self.embedding(z)
        for filt, update in zip(self.filters, self.updates, strict=True):
            h = h + update((filt(rbf) * cutoff[..., None] * h[:, None]).sum(2))
        return (self.out(h).squeeze(-1) * mask).sum(1)

    def forward(self, pos: Tensor, z: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        pos.requires_grad_(True)
        with torch.enable_grad():
            e = self.energy(pos, z)
            f = -torch.autograd.grad(e.sum(), pos, create_graph=self.training)[0]
        return F.mse_loss(e, energy) + 10 * F.l1_loss(f, forces)


# ------------------------------------------------------------------------------------------------ decisions


@listed(lambda b, n: (torch.randn(b, 6), torch.rand(b, 2) * 2 - 1, torch.randn(b, 6), torch.randn(b, 1), torch.ones(b, 1)))
class TD3(nn.Module):
    """Twin critics with targets that follow them, and an actor whose loss counts every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic1, self.critic2 = mlp(6, 32, 32, 2), mlp(8, 32, 32, 1), mlp(8, 32, 32, 1)
        self.actor_target, self.critic1_target, self.critic2_target = (copy.deepcopy(m).requires_grad_(False) for m in (self.actor, self.critic1, self.critic2))
        self.tau, self.policy_freq, self.total_it = 0.005, 2, 0

    @torch.no_grad()
    def update_targets(self) -> None:
        for net, target in ((self.actor, self.actor_target), (self.critic1, self.critic1_target), (self.critic2, self.critic2_target)):
            for param, target_param in zip(net.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(self.tau * param.data + (1 - self.tau) * target_param.data)

    def forward(self, state: Tensor, action: Tensor, next_state: Tensor, reward: Tensor, not_done: Tensor) -> Tensor:
        self.total_it += 1
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (self.actor_target(next_state).tanh() + noise).clamp(-1, 1)
            sa = torch.cat([next_state, next_action], 1)
            target_q = reward + not_done * 0.99 * torch.min(self.critic1_target(sa), self.critic2_target(sa))
        sa = torch.cat([state, action], 1)
        loss = F.mse_loss(self.critic1(sa), target_q) + F.mse_loss(self.critic2(sa), target_q)
        if self.total_it % self.policy_freq == 0:
            loss = loss - self.critic1(torch.cat([state, self.actor(state).tanh()], 1)).mean()
            self.update_targets()
        return loss


@listed(lambda b, n: (torch.randn(b, 8), torch.randn(b, 3), torch.randn(b), torch.randn(b, 8), torch.zeros(b)))
class IQN(nn.Module):
    """Quantiles of returns that are drawn, embedded by cosines, with a Huber loss of quantiles."""

    def __init__(self) -> None:
        super().__init__()
        self.n_cos, self.features, self.cos_embedding = 8, mlp(8, 16), nn.Linear(8, 16)
        self.advantage, self.value = mlp(16, 16, 3), mlp(16, 16, 1)
        self.register_buffer("pis", torch.tensor([math.pi * i for i in range(1, 9)]).view(1, 1, 8))

    def quantiles(self, x: Tensor, num_tau: int) -> tuple[Tensor, Tensor]:
        batch_size = x.shape[0]
        taus = torch.rand(batch_size, num_tau).to(x).unsqueeze(-1)
        cos = torch.cos(taus * self.pis).view(batch_size * num_tau, self.n_cos)
        cos_x = F.relu(self.cos_embedding(cos)).view(batch_size, num_tau, 16)
        x = (self.features(x).unsqueeze(1) * cos_x).view(batch_size * num_tau, 16)
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(dim=1, keepdim=True)
        return q.view(batch_size, num_tau, 3), taus

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, done: Tensor) -> Tensor:
        with torch.no_grad():
            z, _ = self.quantiles(following, 5)
            best = z.mean(1).argmax(1, keepdim=True)
            target = reward[:, None] + 0.99 * (1 - done[:, None]) * z.gather(2, best[:, None].expand(-1, 5, 1)).squeeze(-1)
        z, taus = self.quantiles(state, 4)
        chosen = z.gather(2, action.argmax(1)[:, None, None].expand(-1, 4, 1))
        error = target[:, None] - chosen
        huber = torch.where(error.abs() <= 1, 0.5 * error.pow(2), error.abs() - 0.5)
        return (torch.abs(taus - (error.detach() < 0).to(error.dtype)) * huber).sum(dim=1).mean(dim=1).mean()


@listed(lambda b, n: (torch.rand(b, 6, 2),))
class AttentionTSP(nn.Module):
    """A tour that is drawn city by city, its cost as reward against the mean of the batch as baseline."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)])
        self.project, self.context = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.placeholder = nn.Parameter(torch.rand(16))

    def forward(self, cities: Tensor) -> dict[str, Tensor]:
        h = self.embed(cities)
        for layer in self.layers:
            h = layer(h)
        k, logit_k = self.project(h).chunk(2, -1)
        b, n, _ = h.shape
        visited = torch.zeros(b, n, dtype=torch.bool)
        graph, last, log_p, tour = h.mean(1), self.placeholder.expand(b, -1), [], []
        for _ in range(n):
            q = self.context(torch.cat([graph, last], -1))
            glimpse = torch.softmax((k @ q[..., None]).squeeze(-1).masked_fill(visited, -math.inf), -1)
            q = (glimpse[..., None] * k).sum(1)
            logits = torch.tanh((logit_k @ q[..., None]).squeeze(-1) / 4) * 10
            logits[visited] = -math.inf
            probs = torch.softmax(logits, -1)
            selected = probs.multinomial(1).squeeze(1) if self.training else probs.max(1)[1]
            assert not visited.gather(1, selected.unsqueeze(-1)).data.any(), "infeasible action selected"
            log_p.append(probs.gather(1, selected[:, None]).log().squeeze(1))
            visited = visited.scatter(1, selected[:, None], True)
            last = h[torch.arange(b), selected]
            tour.append(selected)
        pi = torch.stack(tour, 1)
        d = cities.gather(1, pi.unsqueeze(-1).expand_as(cities))
        cost = (d[:, 1:] - d[:, :-1]).norm(p=2, dim=2).sum(1) + (d[:, 0] - d[:, -1]).norm(p=2, dim=1)
        return {"loss": ((cost - cost.mean()).detach() * torch.stack(log_p, 1).sum(1)).mean(), "cost": cost.mean()}


# ------------------------------------------------------------------------------------------------ densities


def rational_quadratic_spline(x: Tensor, w: Tensor, h: Tensor, d: Tensor, bound: float = 3.0) -> tuple[Tensor, Tensor]:
    """A monotone spline within the bounds, the identity beyond them."""
    inside = (x >= -bound) & (x <= bound)
    outputs, logabsdet = torch.zeros_like(x), torch.zeros_like(x)
    d = F.pad(d, pad=(1, 1))
    d[..., 0] = d[..., -1] = math.log(math.exp(1 - 1e-3) - 1)
    outputs[~inside] = x[~inside]
    if torch.any(inside):
        x, w, h, d = x[inside], w[inside, :], h[inside, :], d[inside, :]
        edges = []
        for raw in (w, h):
            widths = 1e-3 + (1 - 1e-3 * raw.shape[-1]) * F.softmax(raw, dim=-1)
            cum = F.pad(torch.cumsum(widths, dim=-1), pad=(1, 0), mode="constant", value=0.0)
            cum = 2 * bound * cum - bound
            cum[..., 0], cum[..., -1] = -bound, bound
            edges.append(cum)
        cw, ch = edges
        derivatives = 1e-3 + F.softplus(d)
        locations = cw.clone()
        locations[..., -1] += 1e-6
        at = (torch.sum(x[..., None] >= locations, dim=-1) - 1)[..., None]
        left, bottom = cw.gather(-1, at)[..., 0], ch.gather(-1, at)[..., 0]
        width, height = (cw[..., 1:] - cw[..., :-1]).gather(-1, at)[..., 0], (ch[..., 1:] - ch[..., :-1]).gather(-1, at)[..., 0]
        delta, d0, d1 = height / width, derivatives.gather(-1, at)[..., 0], derivatives[..., 1:].gather(-1, at)[..., 0]
        theta = (x - left) / width
        mixed = theta * (1 - theta)
        denominator = delta + (d0 + d1 - 2 * delta) * mixed
        outputs[inside] = bottom + height * (delta * theta.pow(2) + d0 * mixed) / denominator
        logabsdet[inside] = 2 * torch.log(delta) + torch.log(d1 * theta.pow(2) + 2 * delta * mixed + d0 * (1 - theta).pow(2)) - 2 * torch.log(denominator)
    return outputs, logabsdet


class SplineCoupling(nn.Module):
    def __init__(self, dim: int, bins: int, flip: bool) -> None:
        super().__init__()
        self.net, self.bins, self.flip = mlp(dim // 2, 16, dim // 2 * (3 * bins - 1)), bins, flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        raw = self.net(a).view(*b.shape, 3 * self.bins - 1)
        w, h, d = torch.split(raw, [self.bins, self.bins, self.bins - 1], -1)
        b, log_det = rational_quadratic_spline(b, w, h, d)
        return torch.cat([b, a] if self.flip else [a, b], -1), log_det.sum(-1)


@listed(lambda b, n: (torch.randn(b, 8) * 2,))
class NeuralSplineFlow(nn.Module):
    """Splines within bounds, whose places are picked and put back by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList([SplineCoupling(8, 4, bool(i % 2)) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        log_det = x.new_zeros(x.shape[0])
        for flow in self.flows:
            x, more = flow(x)
            log_det += more
        return -(Normal(0.0, 1.0).log_prob(x).sum(-1) + log_det).mean()


class MADE(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        degrees = torch.arange(dim), torch.arange(hidden) % (dim - 1), torch.arange(dim)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, 2 * dim)
        self.register_buffer("m1", (degrees[1][:, None] >= degrees[0]).float())
        self.register_buffer("m2", (degrees[2][:, None] > degrees[1]).float().repeat(2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, self.w1.weight * self.m1, self.w1.bias).relu()
        m, a = F.linear(h, self.w2.weight * self.m2, self.w2.bias).chunk(2, 1)
        return (x - m) * torch.exp(-a), -a.sum(1, keepdim=True)


class FlowBatchNorm(nn.Module):
    """Batch norm whose logarithm of the determinant is handed on."""

    def __init__(self, dim: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.log_gamma, self.beta, self.momentum = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim)), momentum
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.batch_mean, self.batch_var = x.mean(0), (x - x.mean(0)).pow(2).mean(0) + 1e-5
            self.running_mean.mul_(1 - self.momentum).add_(self.batch_mean.data * self.momentum)
            self.running_var.mul_(1 - self.momentum).add_(self.batch_var.data * self.momentum)
            mean, var = self.batch_mean, self.batch_var
        else:
            mean, var = self.running_mean, self.running_var
        y = torch.exp(self.log_gamma) * (x - mean) / var.sqrt() + self.beta
        return y, (self.log_gamma - 0.5 * torch.log(var)).sum(-1, keepdim=True)


@listed(rows(6))
class MAF(nn.Module):
    """Masked autoregressive layers with a batch norm of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([m for _ in range(3) for m in (MADE(6, 16), FlowBatchNorm(6))])

    def forward(self, x: Tensor) -> Tensor:
        logdets = torch.zeros(x.size(0), 1, dtype=x.dtype)
        for module in self.layers:
            x, logdet = module(x)
            logdets += logdet
        log_probs = (-0.5 * x.pow(2) - 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)
        return -(log_probs + logdets).mean()


class Dynamics(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net, self.e, self.num_evals = nn.Sequential(nn.Linear(dim + 1, 16), nn.Tanh(), nn.Linear(16, dim)), None, 0

    def before_odeint(self, e: Tensor | None = None) -> None:
        self.e, self.num_evals = e, 0

    def forward(self, t: float, y: Tensor) -> tuple[Tensor, Tensor]:
        self.num_evals += 1
        if self.e is None:
            self.e = torch.randn_like(y)
        with torch.set_grad_enabled(True):
            y = y if y.requires_grad else y.requires_grad_(True)
            dy = self.net(torch.cat([y, torch.full_like(y[:, :1], t)], 1))
            e_dzdx = torch.autograd.grad(dy, y, self.e, create_graph=True)[0]
        return dy, -(e_dzdx * self.e).view(y.shape[0], -1).sum(dim=1, keepdim=True)


@listed(rows(4))
class FFJORD(nn.Module):
    """A flow in time by fixed steps, its trace estimated by noise that the first evaluation draws."""

    def __init__(self) -> None:
        super().__init__()
        self.odefunc, self.n_steps = Dynamics(4), 3

    def forward(self, x: Tensor) -> Tensor:
        self.odefunc.before_odeint()
        y, logp = x, torch.zeros(x.shape[0], 1, dtype=x.dtype)
        for i in range(self.n_steps):
            dy, dlogp = self.odefunc(i / self.n_steps, y)
            y, logp = y + dy / self.n_steps, logp + dlogp / self.n_steps
        return -(Normal(0.0, 1.0).log_prob(y).sum(1, keepdim=True) - logp).mean()


@listed(lambda b, n: (torch.randn(b, 6, 4), torch.randn(b, 6, 2), torch.randn(b, 6, 4), torch.randn(b, 6)))
class MDNRNN(nn.Module):
    """A recurrent model of the world whose next state is a mixture, with state that is kept between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.gaussians, self.rnn = 4, 3, nn.LSTM(6, 16, batch_first=True)
        self.gmm_linear = nn.Linear(16, (2 * 4 + 1) * 3 + 1)

    def forward(self, latents: Tensor, actions: Tensor, following: Tensor, rewards: Tensor) -> dict[str, Tensor]:
        bs, length = actions.size(0), actions.size(1)
        outs, _ = self.rnn(torch.cat([latents, actions], dim=-1))
        gmm = self.gmm_linear(outs)
        stride = self.gaussians * self.latents
        mus = gmm[:, :, :stride].view(bs, length, self.gaussians, self.latents)
        sigmas = torch.exp(gmm[:, :, stride:2 * stride].view(bs, length, self.gaussians, self.latents))
        pi = gmm[:, :, 2 * stride:2 * stride + self.gaussians].view(bs, length, self.gaussians)
        nll = -MixtureSameFamily(Categorical(logits=pi), torch.distributions.Independent(Normal(mus, sigmas), 1)).log_prob(following).mean()
        mse = F.mse_loss(gmm[:, :, -1], rewards)
        return {"gmm": nll, "mse": mse, "loss": (nll + mse) / (self.latents + 1)}


# ------------------------------------------------------------------------------------------------ retrieval, users


@listed(lambda b, n: (ids(b, n // 2), torch.ones(b, n // 2).long(), ids(2 * b, n // 2), torch.ones(2 * b, n // 2).long()))
class DPR(nn.Module):
    """Questions and passages, of which those of other questions are negatives; two passages a question."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList([nn.Embedding(64, 16) for _ in range(2)])
        self.encoders = nn.ModuleList([nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False) for _ in range(2)])

    def encode(self, i: int, ids: Tensor, mask: Tensor) -> Tensor:
        return self.encoders[i](self.embed[i](ids), src_key_padding_mask=mask == 0)[:, 0]

    def forward(self, q_ids: Tensor, q_mask: Tensor, ctx_ids: Tensor, ctx_mask: Tensor) -> tuple[Tensor, Tensor]:
        q, ctx = self.encode(0, q_ids, q_mask), self.encode(1, ctx_ids, ctx_mask)
        scores = torch.matmul(q, torch.transpose(ctx, 0, 1))
        if len(q.size()) > 1:
            scores = scores.view(q.size(0), -1)
        softmax_scores = F.log_softmax(scores, dim=1)
        positive = torch.arange(0, ctx.size(0), 2)
        loss = F.nll_loss(softmax_scores, positive, reduction="mean")
        _, max_idxs = torch.max(softmax_scores, 1)
        return loss, (max_idxs == positive.to(max_idxs.device)).sum()


@listed(lambda b, n: (torch.randint(50, (5 * b,)), torch.arange(0, 5 * b, 5), torch.rand(5 * b), torch.randint(50, (b, 4)), torch.randint(4, (b,))))
class BagOfItems(nn.Module):
    """What a user has bought as weighed bags with offsets, against candidates for each."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.item, self.tower, self.bias = nn.EmbeddingBag(50, 16, mode="sum"), nn.Embedding(50, 16), mlp(16, 32, 16), nn.Embedding(50, 1)

    def forward(self, items: Tensor, offsets: Tensor, weights: Tensor, candidates: Tensor, label: Tensor) -> Tensor:
        user = self.tower(self.bag(items, offsets, per_sample_weights=weights))
        scores = (self.item(candidates) * user[:, None]).sum(-1) + self.bias(candidates).squeeze(-1)
        return F.cross_entropy(scores, label)


@listed(lambda b, n: (torch.randint(1, 40, (b, n // 2)) * (torch.arange(n // 2) < n // 2 - torch.arange(b)[:, None] % 4), torch.randint(1, 40, (b, n // 2)) * (torch.rand(b, n // 2) < 0.4)))
class BERT4Rec(nn.Module):
    """Masked items picked by a mask before the head, which shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(42, 16, padding_idx=0), nn.Embedding(64, 16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True) for _ in range(2)])
        self.out_bias = nn.Parameter(torch.zeros(42))

    def forward(self, seq: Tensor, labels: Tensor) -> Tensor:
        pad = seq == 0
        x = self.token(seq) + self.position.weight[: seq.size(1)].unsqueeze(0).repeat(seq.size(0), 1, 1)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=pad)
        labels = labels.masked_fill(pad, 0)
        scored = x[labels > 0]
        logits = F.linear(scored, self.token.weight, self.out_bias)
        return F.cross_entropy(logits, labels[labels > 0])


@listed(lambda b, n: (torch.randint(30, (b, 5, 4)), torch.randint(1, 30, (b, 4)), torch.randint(30, (b,))))
class MemN2N(nn.Module):
    """Hops over sentences, whose embeddings the next hop reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.hops = 3
        for hop in range(self.hops + 1):
            C = nn.Embedding(30, 16, padding_idx=0)
            C.weight.data.normal_(0, 0.1)
            self.add_module(f"C_{hop}", C)
        J, d = 4, 16
        self.encoding = torch.tensor([[(1 - j / J) - (k / d) * (1 - 2 * j / J) for k in range(d)] for j in range(J)])
        self.temporal = nn.Parameter(torch.randn(5, 16) * 0.1)

    def forward(self, story: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        encoding = self.encoding.unsqueeze(0).to(self.temporal)
        u = [torch.sum(self.C_0(query) * encoding, 1)]
        for hop in range(self.hops):
            a = getattr(self, f"C_{hop}")(story.view(story.size(0), -1)).view(*story.size(), -1)
            m = torch.sum(a * encoding.unsqueeze(1), 2) + self.temporal
            prob = torch.softmax(torch.sum(m * u[-1].unsqueeze(1), 2), 1)
            c = torch.sum(getattr(self, f"C_{hop + 1}")(story.view(story.size(0), -1)).view(*story.size(), -1) * encoding.unsqueeze(1), 2)
            u.append(u[-1] + torch.sum(c * prob.unsqueeze(-1), 1))
        return F.cross_entropy(u[-1] @ getattr(self, f"C_{self.hops}").weight.transpose(0, 1), answer)


# ------------------------------------------------------------------------------------------------ series


class AutoCorrelation(nn.Module):
    """Delays that agree best, of the batch's mean in training and of each row in evaluation, as Autoformer's."""

    def __init__(self, width: int, heads: int, factor: int = 1) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.factor = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, factor

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        q, k, v = (t.view(B, L, self.heads, -1).permute(0, 2, 3, 1).contiguous() for t in self.qkv(x).chunk(3, -1))
        corr = torch.fft.irfft(torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1)), n=L, dim=-1)
        top_k = int(self.factor * math.log(L))
        mean_value = torch.mean(torch.mean(corr, dim=1), dim=1)
        if self.training:
            index = torch.topk(torch.mean(mean_value, dim=0), top_k, dim=-1)[1]
            weights = torch.softmax(torch.stack([mean_value[:, index[i]] for i in range(top_k)], dim=-1), dim=-1)
            out = torch.zeros_like(v)
            for i in range(top_k):
                out = out + torch.roll(v, -int(index[i]), -1) * weights[:, i].view(B, 1, 1, 1)
        else:
            weights, delay = torch.topk(mean_value, top_k, dim=-1)
            weights, init_index, doubled = torch.softmax(weights, -1), torch.arange(L).view(1, 1, 1, L), v.repeat(1, 1, 1, 2)
            out = torch.zeros_like(v)
            for i in range(top_k):
                at = init_index + delay[:, i].view(B, 1, 1, 1)
                out = out + torch.gather(doubled, -1, at.expand_as(v)) * weights[:, i].view(B, 1, 1, 1)
        return self.out(out.permute(0, 3, 1, 2).reshape(B, L, D))


class Decomposition(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.kernel, self.avg = kernel, nn.AvgPool1d(kernel, stride=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        front, end = x[:, :1].repeat(1, (self.kernel - 1) // 2, 1), x[:, -1:].repeat(1, (self.kernel - 1) // 2, 1)
        mean = self.avg(torch.cat([front, x, end], 1).permute(0, 2, 1)).permute(0, 2, 1)
        return x - mean, mean


@listed(lambda b, n: (torch.randn(b, n, 4), torch.randn(b, 8, 4)))
class Autoformer(nn.Module):
    """Trends and seasons apart, with delays in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decomp = nn.Linear(4, 16), Decomposition(5)
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": AutoCorrelation(16, 2), "ff": mlp(16, 32, 16)}) for _ in range(2)])
        self.head, self.pred_len = nn.Linear(16, 4), 8

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        season, trend = self.decomp(x)
        h = self.embed(season)
        for layer in self.layers:
            h, _ = self.decomp(h + layer["attn"](h))
            h, _ = self.decomp(h + layer["ff"](h))
        pred = self.head(h)[:, -self.pred_len:] + trend.mean(1, keepdim=True)
        return F.mse_loss(pred, target)


@listed(lambda b, n: (torch.randn(b, n, 4), torch.randn(b, 8, 4)))
class TimesNet(nn.Module):
    """Periods of the strongest frequencies of the batch, by which series are folded into pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.k, self.convs = nn.Linear(4, 8), 2, nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        h = self.embed(x / stdev)
        for conv in self.convs:
            B, T, N = h.size()
            xf = torch.fft.rfft(h, dim=1)
            frequency_list = abs(xf).mean(0).mean(-1)
            frequency_list[0] = 0
            _, top_list = torch.topk(frequency_list, self.k)
            top_list = top_list.detach().cpu().numpy()
            period, weight = T // top_list, abs(xf).mean(-1)[:, top_list]
            res = []
            for i in range(self.k):
                length = T if T % period[i] == 0 else ((T // period[i]) + 1) * period[i]
                out = torch.cat([h, torch.zeros(B, length - T, N, dtype=h.dtype)], dim=1)
                out = out.reshape(B, length // period[i], period[i], N).permute(0, 3, 1, 2).contiguous()
                out = conv(out).permute(0, 2, 3, 1).reshape(B, -1, N)
                res.append(out[:, :T, :])
            weight = F.softmax(weight, dim=1).unsqueeze(1).unsqueeze(1).repeat(1, T, N, 1)
            h = self.norm(torch.sum(torch.stack(res, dim=-1) * weight, -1) + h)
        return F.mse_loss(self.head(h)[:, -8:] * stdev + means, target)


# ------------------------------------------------------------------------------------------------ sets, graphs


class MAB(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(dim, dim) for _ in range(4))
        self.ln0, self.ln1 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, Q: Tensor, K: Tensor) -> Tensor:
        Q, K, V = self.fc_q(Q), self.fc_k(K), self.fc_v(K)
        split = self.dim // self.heads
        Q_, K_, V_ = (torch.cat(t.split(split, 2), 0) for t in (Q, K, V))
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(self.dim), 2)
        O = self.ln0(torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2))  # noqa: E741
        return self.ln1(O + F.relu(self.fc_o(O)))


@listed(lambda b, n: (torch.randn(b, n, 2),))
class SetTransformer(nn.Module):
    """Clusters of points as a mixture, whose heads are put into the batch and taken out again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.I = nn.Linear(2, 16), nn.ParameterList([nn.Parameter(torch.randn(1, 4, 16)) for _ in range(2)])
        self.isab, self.S = nn.ModuleList([nn.ModuleList([MAB(16, 2), MAB(16, 2)]) for _ in range(2)]), nn.Parameter(torch.randn(1, 3, 16))
        self.pma, self.sab, self.head = MAB(16, 2), MAB(16, 2), nn.Linear(16, 5)

    def forward(self, X: Tensor) -> Tensor:
        h = self.first(X)
        for seeds, (a, b) in zip(self.I, self.isab, strict=True):
            h = b(h, a(seeds.repeat(h.size(0), 1, 1), h))
        h = self.pma(self.S.repeat(h.size(0), 1, 1), h)
        out = self.head(self.sab(h, h))
        pi, mu, sigma = torch.log_softmax(out[..., 0], -1), out[..., 1:3], F.softplus(out[..., 3:]).clamp(min=1e-2)
        ll = -0.5 * ((X[:, :, None] - mu[:, None]) / sigma[:, None]).pow(2) - sigma[:, None].log() - 0.5 * math.log(2 * math.pi)
        return -(torch.logsumexp(ll.sum(-1) + pi[:, None], -1).mean())


@listed(lambda b, n: (torch.randn(b, 8, 6), (torch.rand(b, 8, 8) > 0.5).float(), 8 - torch.arange(b) % 4, torch.randint(3, (b,))))
class DiffPool(nn.Module):
    """Soft clusters of nodes, with the losses of links and of entropy beside that of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pool, self.after = nn.Linear(6, 16), nn.Linear(6, 3), nn.Linear(16, 16)
        self.bn, self.head = nn.BatchNorm1d(8), nn.Linear(16, 3)

    def construct_mask(self, max_nodes: int, batch_num_nodes: list[int]) -> Tensor:
        packed = [torch.ones(int(num)) for num in batch_num_nodes]
        out = torch.zeros(len(batch_num_nodes), max_nodes)
        for i, mask in enumerate(packed):
            out[i, :batch_num_nodes[i]] = mask
        return out.unsqueeze(2)

    def forward(self, x: Tensor, adj: Tensor, batch_num_nodes: Tensor, label: Tensor) -> Tensor:
        mask = self.construct_mask(adj.size()[1], batch_num_nodes.tolist()).to(x)
        h = self.bn(F.normalize(F.relu(self.embed(adj @ x)), p=2, dim=2)) * mask
        s = torch.softmax(self.pool(adj @ x), -1) * mask
        coarse, coarse_adj = s.transpose(1, 2) @ h, s.transpose(1, 2) @ adj @ s
        out = self.head(F.relu(self.after(coarse_adj @ coarse)).max(dim=1)[0])
        pred_adj = torch.min(s @ s.permute(0, 2, 1), torch.ones(1, 1))
        link = -adj * torch.log(pred_adj + 1e-7) - (1 - adj) * torch.log(1 - pred_adj + 1e-7)
        num_entries = torch.sum(batch_num_nodes * batch_num_nodes)
        adj_mask = mask @ torch.transpose(mask, 1, 2)
        link[(1 - adj_mask).bool()] = 0.0
        return F.cross_entropy(out, label) + torch.sum(link) / num_entries.to(x)


@listed(lambda b, n: (torch.randn(8 * b, 6), torch.cat([torch.randint(8, (2, 12)) + 8 * i for i in range(b)], 1), torch.arange(b).repeat_interleave(8)))
class TopKPool(nn.Module):
    """Half of each graph's nodes kept by their score, and the edges between those that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.score, self.after, self.head = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 16), nn.Linear(32, 3)

    def conv(self, lin: nn.Linear, x: Tensor, edges: Tensor) -> Tensor:
        return F.relu(lin(x) + torch.zeros(x.size(0), lin.out_features, dtype=x.dtype).index_add_(0, edges[1], lin(x)[edges[0]]))

    def topk(self, x: Tensor, ratio: float, batch: Tensor) -> Tensor:
        num_nodes = torch.zeros(int(batch.max()) + 1, dtype=torch.long).scatter_add_(0, batch, torch.ones_like(batch))
        batch_size, max_nodes = num_nodes.size(0), int(num_nodes.max())
        cum = torch.cat([num_nodes.new_zeros(1), num_nodes.cumsum(dim=0)[:-1]], dim=0)
        index = torch.arange(batch.size(0)) - cum[batch] + batch * max_nodes
        dense = x.new_full((batch_size * max_nodes,), -60000.0)
        dense[index] = x
        _, perm = dense.view(batch_size, max_nodes).sort(dim=-1, descending=True)
        perm = (perm + cum.view(-1, 1)).view(-1)
        k = (ratio * num_nodes.to(torch.float)).ceil().to(torch.long)
        return perm[torch.cat([torch.arange(int(k[i])) + i * max_nodes for i in range(batch_size)], dim=0)]

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        h = self.conv(self.lin, x, edges)
        score = torch.tanh(self.score(h)).view(-1)
        perm = self.topk(score, 0.5, batch)
        n, h, batch = h.size(0), h[perm] * score[perm].view(-1, 1), batch[perm]
        at = perm.new_full((n,), -1)
        at[perm] = torch.arange(perm.size(0))
        row, col = at[edges[0]], at[edges[1]]
        kept = (row >= 0) & (col >= 0)
        h = self.conv(self.after, h, torch.stack([row[kept], col[kept]]))
        size = int(batch.max().item()) + 1
        count = torch.zeros(size, dtype=x.dtype).index_add_(0, batch, torch.ones_like(batch, dtype=x.dtype)).clamp(min=1)
        mean = torch.zeros(size, 16, dtype=x.dtype).index_add_(0, batch, h) / count[:, None]
        top = torch.zeros(size, 16, dtype=x.dtype).index_reduce_(0, batch, h, "amax")
        return self.head(torch.cat([mean, top], 1))


# ------------------------------------------------------------------------------------------------ pictures


class MinibatchStd(nn.Module):
    """Deviation over groups of the batch as a further channel."""

    def forward(self, x: Tensor) -> Tensor:
        group = min(x.shape[0], 4)
        y = x.view(group, -1, *x.shape[1:]) if x.shape[0] % group == 0 else x[None]
        std = (y - y.mean(0, keepdim=True)).square().mean(0).add(1e-8).sqrt().mean([1, 2, 3], keepdim=True)
        return torch.cat([x, std.repeat(x.shape[0] // std.shape[0], 1, *x.shape[2:])], 1)


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(4, (b,))))
class ProjectionGAN(nn.Module):
    """A discriminator with normed spectra, deviation over the batch, and the class's embedding projected."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(spectral_norm(nn.Conv2d(a, b, 3, 2, 1)), nn.LeakyReLU(0.2)) for a, b in ((3, 8), (8, 16))])
        self.std, self.last = MinibatchStd(), spectral_norm(nn.Conv2d(17, 16, 3, padding=1))
        self.linear, self.embed = spectral_norm(nn.Linear(16, 1)), spectral_norm(nn.Embedding(4, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.leaky_relu(self.last(self.std(self.blocks(x))), 0.2).sum(dim=(2, 3))
        return (self.linear(h) + torch.sum(self.embed(y) * h, dim=1, keepdim=True)).relu().mean()


@listed(lambda b, n: (torch.randn(b, 3, 8, 8), torch.randn(b, 3, 8, 8), torch.randint(20, (b,))))
class EMADiffusion(nn.Module):
    """Noise predicted by a network whose average, which every training call moves, serves in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))
        self.ema, self.decay = copy.deepcopy(self.net).requires_grad_(False), 0.99
        betas = torch.linspace(1e-4, 0.02, 20)
        self.register_buffer("alphas_bar", torch.cumprod(1 - betas, 0))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))

    def update(self) -> None:
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for average, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                average.sub_((1.0 - decay) * (average - p))

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.training:
            self.update()
        a = self.alphas_bar[t][:, None, None, None]
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        net = self.net if self.training else self.ema
        predicted = net(torch.cat([noisy, (t / 20).to(x)[:, None, None, None].expand(-1, 1, 8, 8)], 1))
        return F.smooth_l1_loss(predicted, noise)


class Quantize(nn.Module):
    def __init__(self, dim: int, n_embed: int, decay: float = 0.99) -> None:
        super().__init__()
        self.dim, self.n_embed, self.decay = dim, n_embed, decay
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flatten = input.reshape(-1, self.dim)
        dist = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, embed_ind = (-dist).max(1)
        embed_onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        embed_ind = embed_ind.view(*input.shape[:-1])
        quantize = F.embedding(embed_ind, self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(embed_onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(flatten.transpose(0, 1) @ embed_onehot, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + 1e-5) / (n + self.n_embed * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        diff = (quantize.detach() - input).pow(2).mean()
        return input + (quantize - input).detach(), diff, embed_ind


@listed(fixed_image(3, 16))
class VQVAE2(nn.Module):
    """Two levels of codes, whose books are averages that every training call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.enc_b, self.enc_t = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(16, 16, 4, 2, 1), nn.ReLU())
        self.quantize_conv_t, self.quantize_t, self.dec_t = nn.Conv2d(16, 8, 1), Quantize(8, 16), nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.quantize_conv_b, self.quantize_b, self.upsample_t = nn.Conv2d(24, 8, 1), Quantize(8, 16), nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.dec = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        enc_b = self.enc_b(input)
        quant_t, diff_t, _ = self.quantize_t(self.quantize_conv_t(self.enc_t(enc_b)).permute(0, 2, 3, 1))
        quant_t = quant_t.permute(0, 3, 1, 2)
        quant_b, diff_b, _ = self.quantize_b(self.quantize_conv_b(torch.cat([self.dec_t(quant_t), enc_b], 1)).permute(0, 2, 3, 1))
        dec = self.dec(torch.cat([self.upsample_t(quant_t), quant_b.permute(0, 3, 1, 2)], 1))
        return dec, diff_t.unsqueeze(0) + diff_b.unsqueeze(0)


@listed(lambda b, n: (torch.randn(b, 8), torch.randint(3, (b,))))
class BatchHard(nn.Module):
    """Triplets of the hardest rows of the batch by their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.margin = mlp(8, 32, 32, 16), 0.3

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        inputs = F.normalize(self.net(x))
        n = inputs.size(0)
        dist = torch.pow(inputs, 2).sum(dim=1, keepdim=True).expand(n, n)
        dist = dist + dist.t()
        dist = dist.addmm(inputs, inputs.t(), beta=1, alpha=-2).clamp(min=1e-12).sqrt()
        mask = targets.expand(n, n).eq(targets.expand(n, n).t())
        dist_ap = (dist * mask).max(1)[0]
        dist_an = (dist + mask * 1e6).min(1)[0]
        return F.relu(dist_ap - dist_an + self.margin).mean()


@listed(lambda b, n: (torch.randn(b, 8, 8), torch.randn(b, 8)))
class SlotAttention(nn.Module):
    """Slots drawn from a learned normal distribution, that compete for inputs by iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.slots_mu, self.slots_log_sigma = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.zeros(1, 1, 16))
        self.norm_input, self.norm_slots, self.norm_mlp = nn.LayerNorm(8), nn.LayerNorm(16), nn.LayerNorm(16)
        self.to_q, self.to_k, self.to_v = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(8, 16)
        self.gru, self.mlp, self.decoder = nn.GRUCell(16, 16), mlp(16, 32, 16), nn.Linear(16, 9)

    def forward(self, inputs: Tensor, target: Tensor, num_slots: int | None = None) -> dict[str, Tensor]:
        b = inputs.shape[0]
        n_s = num_slots if num_slots is not None else 3
        slots = self.slots_mu.expand(b, n_s, -1) + self.slots_log_sigma.exp().expand(b, n_s, -1) * torch.randn(b, n_s, 16, dtype=inputs.dtype)
        inputs = self.norm_input(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        for _ in range(3):
            prev = slots
            q = self.to_q(self.norm_slots(slots))
            attn = (torch.einsum("bid,bjd->bij", q, k) * 16**-0.5).softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            slots = self.gru(torch.einsum("bjd,bij->bid", v, attn).reshape(-1, 16), prev.reshape(-1, 16)).reshape(b, -1, 16)
            slots = slots + self.mlp(self.norm_mlp(slots))
        out, mask = self.decoder(slots).split([8, 1], -1)
        return {"loss": F.mse_loss((out * mask.softmax(1)).sum(1), target), "attn": attn}


@listed(lambda b, n: (torch.randn(b, 4, 2), torch.randn(b, 4, 1), torch.randn(b, 7, 2), torch.randn(b, 7, 1)))
class NeuralProcess(nn.Module):
    """A function told by its points, with a latent that training draws from the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.latent, self.mu_sigma, self.decoder = mlp(3, 16, 16), mlp(3, 16, 16), nn.Linear(16, 16), mlp(26, 32, 2)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)
        self.key, self.query = nn.Linear(2, 16), nn.Linear(2, 16)

    def q(self, x: Tensor, y: Tensor) -> Any:
        mu, log_sigma = self.mu_sigma(self.latent(torch.cat([x, y], -1)).mean(1)).chunk(2, -1)
        return Normal(mu, 0.1 + 0.9 * torch.sigmoid(log_sigma))

    def forward(self, cx: Tensor, cy: Tensor, tx: Tensor, ty: Tensor | None = None) -> Any:
        prior = self.q(cx, cy)
        posterior = self.q(tx, ty) if ty is not None else prior
        z = posterior.rsample() if self.training else posterior.mean
        r, _ = self.cross(self.query(tx), self.key(cx), self.encoder(torch.cat([cx, cy], -1)))
        mu, log_sigma = self.decoder(torch.cat([r, z[:, None].expand(-1, tx.shape[1], -1), tx], -1)).chunk(2, -1)
        out = Normal(mu, 0.1 + 0.9 * F.softplus(log_sigma))
        if ty is None:
            return out.mean, out.stddev
        kl = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        return -out.log_prob(ty).sum(-1).mean() + kl / tx.shape[1]


@listed(lambda b, n: (torch.rand(b, 3, 16, 16), torch.rand(b, 3, 16, 16)))
class DINO(nn.Module):
    """A teacher without gradients and its centre, an average over batches that each training call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 16))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 16))

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        self.center = self.center * 0.9 + batch_center * 0.1

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        student_out = (self.student(torch.cat([one, two])) / 0.1).chunk(2)
        with torch.no_grad():
            teacher_output = self.teacher(torch.cat([one, two]))
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                total_loss += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                n_loss_terms += 1
        if self.training:
            self.update_center(teacher_output)
        return total_loss / n_loss_terms


@listed(lambda b, n: (torch.randn(b, 16), torch.randn(b, 16)))
class OpenCLIP(nn.Module):
    """Two towers whose scale the model itself holds below a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.logit_scale = mlp(16, 32, 8), mlp(16, 32, 8), nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            self.logit_scale.clamp_(0, math.log(100))
        a, b = F.normalize(self.a(a), dim=-1), F.normalize(self.b(b), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class CondConv(nn.Module):
    def __init__(self, n_in: int, n_out: int, experts: int = 3) -> None:
        super().__init__()
        self.route, self.weight = nn.Linear(n_in, experts), nn.Parameter(torch.randn(experts, n_out, n_in, 3, 3) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        routing = torch.sigmoid(self.route(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        weight = (routing @ self.weight.flatten(1)).view(b * self.weight.size(1), c, 3, 3)
        out = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b)
        return out.view(b, -1, h, w)


@listed(lambda b, n: (torch.randn(b, 3, n // 2, n // 2), torch.randint(4, (b,)), torch.rand(b)))
class FixMatch(nn.Module):
    """Experts' kernels mixed for each picture as groups of one convolution; a loss of confident rows."""

    def __init__(self) -> None:
        super().__init__()
        self.convs, self.head = nn.Sequential(CondConv(3, 8), nn.ReLU(), CondConv(8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        logits = self.head(self.convs(x))
        with torch.no_grad():
            max_probs, pseudo = torch.softmax(logits, -1).max(-1)
            mask = max_probs.ge(0.3).to(x.dtype)
        strong = self.head(self.convs(x + noise[:, None, None, None] * 0.1))
        return F.cross_entropy(logits, y) + (F.cross_entropy(strong, pseudo, reduction="none") * mask).mean()


class DenseRotary(nn.Module):
    """A table of angles that grows where a longer sequence comes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))
        self._seq_len_cached, self._cos_cached, self._sin_cached = 0, None, None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seqlen = x.shape[1]
        if seqlen > self._seq_len_cached or self._cos_cached.dtype != x.dtype:
            self._seq_len_cached = seqlen
            freqs = torch.outer(torch.arange(seqlen, dtype=self.inv_freq.dtype), self.inv_freq)
            self._cos_cached, self._sin_cached = torch.cos(freqs).to(x.dtype), torch.sin(freqs).to(x.dtype)
        return self._cos_cached[:seqlen], self._sin_cached[:seqlen]


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class GrowingRotary(nn.Module):
    """Attention whose table of angles is kept between calls and grows, a causal mask that is kept too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary, self.mask = nn.Embedding(64, 16), DenseRotary(8), None
        self.layers, self.head = nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16), "ff": mlp(16, 32, 16)}) for _ in range(3)]), nn.Linear(16, 64)

    def causal(self, n: int) -> Tensor:
        if self.mask is None or self.mask.size(0) < n:
            self.mask = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
        return self.mask[:n, :n]

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        b, n = idx.shape
        h = self.embed(idx)
        cos, sin = (t[None, :, None] for t in self.rotary(h))
        mask = self.causal(n).to(h)
        for layer in self.layers:
            q, k, v = layer["qkv"](h).view(b, n, 3, 2, 8).unbind(2)
            q, k = (torch.cat([t[..., :4] * cos - t[..., 4:] * sin, t[..., :4] * sin + t[..., 4:] * cos], -1) for t in (q, k))
            a = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5 + mask, -1)
            h = h + layer["out"](torch.einsum("bhij,bjhd->bihd", a, v).reshape(b, n, 16))
            h = h + layer["ff"](h)
        logits = self.head(h)
        return logits, F.cross_entropy(logits.view(-1, 64), targets.view(-1))
