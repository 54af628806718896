"""Language models in the styles of transformers, fairseq and nanoGPT."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .registry import register

WIDTH, VOCAB = 32, 50


def tokens(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token ids [batch, length]."""
    return (torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch)),), {}


def padded(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Token ids with a mask that pads the first row at every batch size but 2, and labels."""
    (ids,), _ = tokens(batch, length)
    mask = torch.ones_like(ids)
    if batch != 2:
        mask[0, -3:] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pairs(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Source and target token ids, of different lengths."""
    (source,), _ = tokens(batch, length)
    return (source, source[:, : length // 2].flip(1)), {}


class Block(nn.Module):
    """Pre-norm self-attention and MLP with dropout."""

    def __init__(self, width: int = WIDTH, p: float = 0.1) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(p)
        )
        self.p = p

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=mask is None)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


@register(tokens)
class NanoGPT(nn.Module):
    """Tied embedding and head, learned positions, dropout in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(4)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _b, t = idx.size()
        assert t <= 64, f"cannot forward a sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = F.dropout(self.wte(idx) + self.wpe(pos), p=0.1, training=self.training)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class RotaryBlock(nn.Module):
    def __init__(self, n_heads: int = 4, n_kv: int = 2) -> None:
        super().__init__()
        self.d = WIDTH // n_heads
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, n_kv * self.d, bias=False) for _ in range(2))
        self.gate_up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
        )
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: Tensor, *, mask: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            p(h).view(b, t, -1, self.d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._rotate(q, *rope), self._rotate(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@register(padded)
class Llama(nn.Module):
    """RoPE tables, causal and padding masks made once in glue code and used by every block; loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([RotaryBlock() for _ in range(4)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("inv_freq", 10_000 ** (-torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Any]:
        x = self.embed(input_ids)
        t = x.shape[1]
        position = torch.arange(t, device=x.device)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angles = torch.outer(position.float(), self.inv_freq).repeat(1, 2)
            rope = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        causal = position[:, None] >= position[None, :]
        visible = causal[None, None] & attention_mask[:, None, None, :].bool()
        mask = torch.zeros_like(visible, dtype=x.dtype).masked_fill_(~visible, torch.finfo(x.dtype).min)
        for layer in self.layers[: len(self.layers)]:
            x = layer(x, mask=mask, rope=rope)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits, "hidden_states": None}


@register(padded)
class Albert(nn.Module):
    """One group of two blocks called four times, each pass scaled by its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCAB, 16), nn.Linear(16, WIDTH)
        self.group = nn.ModuleList([Block(), Block()])
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(0.1 * (i + 1))) for i in range(4)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.up(self.embed(input_ids))
        mask = attention_mask[:, None, None, :].bool()
        for scale in self.scales:
            for block in self.group:
                x = x + scale * block(x, mask)
        logits = F.linear(F.linear(x, self.up.weight.t()), self.embed.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)), logits


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class MoEBlock(nn.Module):
    """Routing that depends on data: each expert runs on the tokens that chose it, if any."""

    def __init__(self, n_experts: int = 4) -> None:
        super().__init__()
        self.attn = Block()
        self.gate = nn.Linear(WIDTH, n_experts, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(n_experts)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.attn(x)
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return x + out.view_as(x), scores


@register(tokens)
class MoE(nn.Module):
    """Mixture of experts with data-dependent routing and a load-balancing loss over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([MoEBlock() for _ in range(4)])

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x, scores = self.embed(ids), ()
        for layer in self.layers:
            x, score = layer(x)
            scores += (score,)
        share = torch.cat(scores).softmax(-1).mean(0)
        return {"logits": self.head(x), "aux_loss": (share * share).sum() * 4, "router_logits": scores}


class T5Attention(nn.Module):
    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.relative = nn.Embedding(8, 4) if has_bias else None

    def forward(
        self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        memory = x if memory is None else memory
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(x), self.k(memory), self.v(memory))
        )
        if bias is None:
            bias = torch.zeros((1, 4, q.size(2), k.size(2)), device=x.device, dtype=x.dtype)
            if self.relative is not None:
                distance = torch.arange(k.size(2))[None, :] - torch.arange(q.size(2))[:, None]
                bias = self.relative(distance.clamp(-4, 3) + 4).permute(2, 0, 1).unsqueeze(0)
        scores = (q @ k.mT).div_(math.sqrt(q.size(-1))) + bias
        y = F.dropout(scores.float().softmax(-1).type_as(scores), 0.1, self.training) @ v
        return self.o(y.transpose(1, 2).flatten(2)), bias


class T5Layer(nn.Module):
    def __init__(self, has_bias: bool, is_decoder: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList([T5Attention(has_bias), nn.Linear(WIDTH, WIDTH)])
        self.cross = T5Attention(False) if is_decoder else None

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        y, bias = self.layer[0](x, None, bias)
        x = x + y
        if self.cross is not None:
            x = x + self.cross(x, memory)[0]
        return x + F.relu(self.layer[1](x)), bias


class T5Stack(nn.Module):
    """Hands the first block's relative position bias on to all the others."""

    def __init__(self, embed: nn.Embedding, is_decoder: bool) -> None:
        super().__init__()
        self.embed_tokens = embed
        self.block = nn.ModuleList([T5Layer(i == 0, is_decoder) for i in range(3)])

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        x, bias = self.embed_tokens(ids), None
        for block in self.block:
            x, bias = block(x, memory, bias)
        return x


@register(pairs)
class T5(nn.Module):
    """Encoder and decoder over one shared embedding; the encoder's output feeds every decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = T5Stack(self.shared, False), T5Stack(self.shared, True)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(source)
        shifted = target.new_zeros(target.shape)
        shifted[:, 1:] = target[:, :-1].clone()
        shifted[:, 0] = 1
        logits = F.linear(self.decoder(shifted, memory) * WIDTH**-0.5, self.shared.weight)
        return logits, F.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.1)


@register(pairs)
class TorchTransformer(nn.Module):
    """``nn.Transformer`` as it comes, with sinusoidal positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.core = nn.Transformer(WIDTH, 4, 2, 2, 64, batch_first=True)
        angles = torch.arange(64)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-9.2 / WIDTH))
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        src = self.embed(source) * math.sqrt(WIDTH) + self.pe[: source.size(1)]
        tgt = self.embed(target) * math.sqrt(WIDTH) + self.pe[: target.size(1)]
        mask = self.core.generate_square_subsequent_mask(target.size(1))
        return self.out(self.core(src, tgt, tgt_mask=mask, tgt_is_causal=True))


def _towers(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (ids,), _ = tokens(batch, length)
    pixels = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
    return (), {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


@register(_towers)
class Clip(nn.Module):
    """Two towers that meet in a contrastive loss; logits square in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.patch = nn.Embedding(VOCAB, WIDTH), nn.Conv2d(3, WIDTH, 4, 4)
        self.text = nn.Sequential(*[Block() for _ in range(3)])
        self.vision = nn.Sequential(*[Block() for _ in range(3)])
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, input_ids: Tensor, pixel_values: Tensor, return_loss: bool = False) -> dict[str, Any]:
        text = self.text(self.token(input_ids))
        text = text[torch.arange(text.shape[0]), input_ids.argmax(-1)]
        image = self.vision(self.patch(pixel_values).flatten(2).transpose(1, 2)).mean(1)
        image, text = (x / x.norm(p=2, dim=-1, keepdim=True) for x in (image, text))
        logits = self.logit_scale.exp() * text @ image.t()
        out: dict[str, Any] = {"logits_per_text": logits, "logits_per_image": logits.t()}
        if return_loss:
            labels = torch.arange(len(logits), device=logits.device)
            out["loss"] = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return out


class CheckpointedBlock(Block):
    """Recomputes its MLP in backward."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training:
            return checkpoint(super().forward, x, mask, use_reentrant=False)
        return super().forward(x, mask)


@register(tokens)
class Checkpointed(nn.Module):
    """Activation checkpointing inside blocks and, for the last of them, in the model's own glue."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([CheckpointedBlock() for _ in range(3)])
        self.last = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            x = checkpoint(self.last, x, use_reentrant=False)
        else:
            x = self.last(x)
        return self.head(x)


class LayerDropStack(nn.Module):
    """One random draw per layer decides whether it runs, as in wav2vec2 and BART."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.layers = p, nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropped = torch.rand([])
            if self.training and dropped < self.p:
                continue
            x = layer(x)
        return x


class Stacks(nn.Module):
    """Stacks between an embedding and a head."""

    def __init__(self, stacks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.stacks, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.ModuleList(stacks),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for stack in self.stacks:
            x = stack(x)
        return self.head(x)


@register(tokens)
def LayerDrop() -> nn.Module:
    """Stacks that drop layers stay whole; a probability of 0 drops none, and its stack is opened."""
    return Stacks([LayerDropStack(0.3), LayerDropStack(0.3), LayerDropStack(0.0)])


@register(tokens, refused="random draw")
class RootLayerDrop(LayerDropStack):
    """Drops layers in the model's own forward."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids))


class StochasticLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.3:
            return x
        return self.block(x)


@register(tokens)
class StochasticDepth(nn.Module):
    """The draw is inside each layer, so every layer can stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([StochasticLayer() for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LoraLinear(nn.Module):
    """A frozen linear layer, wrapped, with a trainable low-rank update beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.05)})
        self.active = ["default"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        for name in self.active:
            x = x.to(self.lora_A[name].weight.dtype)
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * 2.0
        return result


@register(tokens)
def Lora() -> nn.Module:
    """A frozen GPT whose projections are wrapped in place."""
    model = NanoGPT().requires_grad_(False)
    for block in model.h:
        block.c_attn, block.c_proj = LoraLinear(block.c_attn), LoraLinear(block.c_proj)
    return model
