"""The dual-stream step in PyTorch, as well as one would write it there: fused norms, a mask of all
pairs made once, `scaled_dot_product_attention`.

It computes the same as `train.step`, from the same weights and the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from infer.bench.measure import num_cores
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import DualStreamBatch
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig, masked_weights
from wedlm_jax.model.rope import rope_tables

STACKED = "layers."
"""Prefix of the paths of stacked parameters."""


class TorchStep:
    """Computes the forward and backward pass in float32.

    Args:
      config: any model's, with a tied or untied head.
      parameters: arrays by the dotted paths of `wedlm_jax.checkpoint.names.arrays_from_model`,
        layers stacked.
      batch, denominators, loss: what `train.step` computes, ``[R, ...]``.
      compiled: whether `torch.compile` compiles the forward and backward pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, np.ndarray],
        batch: DualStreamBatch,
        denominators: Mapping[str, jax.Array],
        loss: LossConfig,
        *,
        flops: float,
        compiled: bool,
    ):
        import torch

        self.flops = flops
        torch.set_num_threads(num_cores())
        device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
        self._device = device

        def leaf(value: np.ndarray) -> Any:
            return torch.tensor(value, device=device).requires_grad_()

        self._layers: list[dict[str, Any]] = [{} for _ in range(config.num_hidden_layers)]
        self._others: dict[str, Any] = {}
        for name, value in parameters.items():
            if name.startswith(STACKED):
                for layer, part in zip(self._layers, value, strict=True):
                    layer[name.removeprefix(STACKED)] = leaf(part)
            else:
                self._others[name] = leaf(value)
        # Everything that depends on the batch alone is made beforehand, outside of the step.
        share = 1 / (1 + loss.ar_weight)
        mlm = masked_weights(batch.masked, batch.mask_ratio, loss.weighting)
        weights = [
            batch.next_valid * (loss.ar_weight * share / denominators["ar"]),
            mlm * (share / denominators["mlm"]),
        ]
        visible = np.array(batch.mask.dense())
        visible |= np.eye(visible.shape[-1], dtype=bool)  # padding sees itself: a row needs a key
        # SDPA would convert booleans to floats in every layer.
        added = np.where(visible, 0, -np.inf)[:, None].astype(np.float32)
        tables = rope_tables(config, batch.positions)
        cos, sin = (np.concatenate([table, table], axis=-1)[:, :, None] for table in tables)
        targets = np.concatenate([batch.next_targets, batch.targets], axis=1)
        self._arguments = (
            torch.tensor(np.asarray(batch.token_ids), device=device).long(),
            *(torch.tensor(x, device=device) for x in (cos, sin, added)),
            torch.tensor(targets, device=device).long().flatten(),
            torch.tensor(np.concatenate(weights, axis=1), device=device).float().flatten(),
        )
        self._loss: Callable[..., Any] = _loss_of(config)
        if compiled:
            self._loss = torch.compile(self._loss, dynamic=False)

    def run(self) -> float:
        import torch

        for weights in (self._others, *self._layers):
            for weight in weights.values():
                weight.grad = None
        try:
            loss = self._loss(self._others, self._layers, *self._arguments)
            loss.backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = next(iter(str(error.inner_exception).splitlines()), "")
            raise InputError(
                f"torch.compile does not work here ({reason}); use --rival torch"
            ) from None
        if self._device == "cuda":
            torch.cuda.synchronize()
        return float(loss.item())

    def gradients(self) -> dict[str, np.ndarray]:
        def gradient(weight: Any) -> np.ndarray:
            return np.asarray(weight.grad.cpu().numpy())

        others = {name: gradient(weight) for name, weight in self._others.items()}
        stacked = {
            STACKED + name: np.stack([gradient(layer[name]) for layer in self._layers])
            for name in self._layers[0]
        }
        return others | stacked


def _loss_of(config: ModelConfig) -> Callable[..., Any]:
    import torch.nn.functional as F

    width, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    epsilon = config.rms_norm_eps

    def norm(x: Any, scale: Any) -> Any:
        return F.rms_norm(x, scale.shape, scale, epsilon)

    def linear(w: dict[str, Any], name: str, x: Any) -> Any:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        import torch

        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def layer(w: dict[str, Any], x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        rows, length, _ = x.shape
        normed = norm(x, w["input_layernorm.scale"])

        def projected(name: str, count: int) -> Any:
            return linear(w, f"self_attn.{name}", normed).view(rows, length, count, width)

        q, k = projected("q_proj", heads), projected("k_proj", kv_heads)
        v = projected("v_proj", kv_heads)
        if config.qk_norm:
            q, k = norm(q, w["self_attn.q_norm.scale"]), norm(k, w["self_attn.k_norm.scale"])
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(rows, length, heads * width)
        x = x + linear(w, "self_attn.o_proj", attended)
        normed = norm(x, w["post_attention_layernorm.scale"])
        gate = F.silu(linear(w, "mlp.gate_proj", normed))
        return x + linear(w, "mlp.down_proj", gate * linear(w, "mlp.up_proj", normed))

    def loss(
        others: dict[str, Any],
        layers: list[dict[str, Any]],
        tokens: Any,
        cos: Any,
        sin: Any,
        mask: Any,
        targets: Any,
        share: Any,
    ) -> Any:
        x = F.embedding(tokens, others["embed_tokens"])
        for weights in layers:
            x = layer(weights, x, cos, sin, mask)
        head = others["embed_tokens" if config.tie_word_embeddings else "lm_head"]
        logits = F.linear(norm(x, others["norm.scale"]), head)
        nll = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        return (nll * share).sum()

    return loss
