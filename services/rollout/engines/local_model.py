"""The local engine's forward passes: prefill of prompts, and one decode step for all running rows.

Letters in shapes: P prompts, S prompt positions (padded on the right), B running rows, T flat tokens,
L cached positions, H hidden, N query heads, K key-value heads, G query heads per key-value head
(N = K G), X = B K, D head dimension, V vocabulary, Y layers, C experts of a token. Routes
have Y = C = 0 if they are not recorded.

On a CPU a step of a small model costs what its operator calls cost, so the code counts them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from atoll.rollout.engines.local_weights import Layer, Weights
from atoll.runtime.model_spec import Experts, ModelSpec

SCORE_TOKENS = 512  # whose logits exist at a time
SPAN = 16  # cached positions are attended to in multiples of this: a ragged softmax is 6 times slower


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Keys and values of the first positions of one sequence, as the cache had them."""

    keys_YKDS: Tensor
    values_YKSD: Tensor
    routes_SYC: Tensor

    def layers(self, length: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys [1, K, S, D] and values [1, K, S, D] of each layer: the first `length` positions."""
        keys_YKSD = self.keys_YKDS[..., :length].transpose(2, 3).to(dtype)
        values_YKSD = self.values_YKSD[:, :, :length].to(dtype)
        return zip(keys_YKSD.unsqueeze(1).unbind(), values_YKSD.unsqueeze(1).unbind(), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The result of prefilling P prompts."""

    logits_PV: Tensor  # fp32, after each prompt's last token
    keys_YPKDS: Tensor
    values_YPKSD: Tensor
    routes_PSYC: Tensor  # of the last layer, only the last token's: nobody attends to what it says

    def select(self, prompt: int) -> "Prefix":
        """A copy of one prompt's part, so that the others' memory can go."""
        one = slice(prompt, prompt + 1)
        return Prefix(
            self.logits_PV[one].clone(),
            self.keys_YPKDS[:, one].clone(),
            self.values_YPKSD[:, one].clone(),
            self.routes_PSYC[one].clone(),
        )


class KVCache:
    """Keys, values and routes of up to `slots` rows. Keys and values are in fp32 for weights of either dtype:
    oneDNN multiplies batches of small bf16 matrices several times slower.

    Keys are stored transposed, which a batched product of one query with many keys likes best. It
    grows to the longest sequence that was admitted, so a large `max_length` costs nothing unless used.
    """

    def __init__(self, spec: ModelSpec, slots: int, no_routes: Tensor) -> None:
        """`no_routes` [Y, C]: those of a position that is not computed."""
        self._no_routes = no_routes
        self._shape = (spec.num_layers, slots, spec.num_kv_heads)
        self._head_dim = spec.head_dim
        self._allocate(SPAN)

    def _allocate(self, capacity: int) -> None:
        Y, B, K = self._shape
        D = self._head_dim
        # zeros, since a masked position still meets probability 0, and 0 * nan is nan
        self.keys_YBKDL = torch.zeros(Y, B, K, D, capacity)
        self.values_YBKLD = torch.zeros(Y, B, K, capacity, D)
        self.routes_BLYC = self._no_routes.repeat(B, capacity, 1, 1)
        # made once: views of each layer for `put_`, and of all rows' heads for batched products
        self.layers = list(zip(self.keys_YBKDL.unbind(), self.values_YBKLD.unbind(), strict=True))
        self._keys_YXDL, self._values_YXLD = self.keys_YBKDL.flatten(1, 2), self.values_YBKLD.flatten(1, 2)
        # where position 0 lies, in elements of one layer
        self._keys_BKD = torch.arange(B * K * D).view(B, K, D) * capacity
        self._values_BKD = torch.arange(B * K).view(B, K, 1) * capacity * D + torch.arange(D)

    def reserve(self, length: int) -> None:
        """Makes room for rows of `length` tokens."""
        keys_YBKDL, values_YBKLD, routes_BLYC = self.keys_YBKDL, self.values_YBKLD, self.routes_BLYC
        have = keys_YBKDL.shape[-1]
        if length > have:
            self._allocate(length + -length % SPAN)
            self.keys_YBKDL[..., :have] = keys_YBKDL
            self.values_YBKLD[..., :have, :] = values_YBKLD
            self.routes_BLYC[:, :have] = routes_BLYC

    def heads(self, num_rows: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys [X, D, L] and values [X, L, D] of each layer: the first rows, the first `length` positions."""
        X = num_rows * self._shape[2]
        keys_YXDL, values_YXLD = self._keys_YXDL[:, :X, :, :length], self._values_YXLD[:, :X, :length]
        return zip(keys_YXDL.unbind(), values_YXLD.unbind(), strict=True)

    def places(self, positions_B: Tensor) -> tuple[Tensor, Tensor]:
        """Where these positions' keys and values [B, K, D] go, in elements of one layer: for `put_`."""
        B = positions_B.shape[0]
        positions_B11 = positions_B.view(B, 1, 1)
        return self._keys_BKD[:B] + positions_B11, self._values_BKD[:B] + positions_B11 * self._head_dim

    def fill(self, first: int, prefix: Prefix, prompts_B: Tensor) -> None:
        """Rows from `first` on begin with the prefixes of these prompts."""
        rows, length = slice(first, first + len(prompts_B)), prefix.keys_YPKDS.shape[-1]
        self.keys_YBKDL[:, rows, :, :, :length] = prefix.keys_YPKDS[:, prompts_B]
        self.values_YBKLD[:, rows, :, :length] = prefix.values_YPKSD[:, prompts_B]
        self.routes_BLYC[rows, :length] = prefix.routes_PSYC[prompts_B]

    def past(self, row: int, length: int) -> Past:
        """A copy of a row's first `length` positions."""
        return Past(
            self.keys_YBKDL[:, row, :, :, :length].clone(),
            self.values_YBKLD[:, row, :, :length].clone(),
            self.routes_BLYC[row, :length].clone(),
        )

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of rows `sources` to rows `targets`."""
        self.keys_YBKDL[:, targets, :, :, :length] = self.keys_YBKDL[:, sources, :, :, :length]
        self.values_YBKLD[:, targets, :, :length] = self.values_YBKLD[:, sources, :, :length]
        self.routes_BLYC[targets, :length] = self.routes_BLYC[sources, :length]


class LocalModel:
    def __init__(
        self, spec: ModelSpec, weights: Weights, max_length: int, records_routes: bool = False
    ) -> None:
        """`records_routes`: of a model with experts, those that its routers choose are kept."""
        self.spec = spec
        self.records_routes = records_routes
        self.no_routes = _no_routes(spec) if records_routes else torch.empty(0, 0, dtype=torch.uint8)
        self.weights = weights  # may be replaced between two calls
        self._eps = {n: torch.tensor(n * spec.norm_eps).sqrt() for n in (spec.hidden_size, spec.head_dim)}
        self._positions_L = torch.arange(max_length + SPAN)
        frequencies = spec.rotary_frequencies(torch.arange(0, spec.head_dim, 2, dtype=torch.float32))
        angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        # the sign of rotate_half(x) = [-x2, x1] lies in the table
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        dtype = weights.embedding.dtype
        self._rotary_L2D = table.to(dtype)
        # where nothing is to be cast these take a quarter of the time of `to`
        self._cast = {torch.float32: Tensor.float, torch.bfloat16: Tensor.bfloat16}[dtype]
        self._no_bias = torch.zeros(1, 1, 1)

    def prefill(self, tokens_PS: Tensor, lengths_P: Tensor) -> Prefix:
        """Padding needs no mask: under causal attention no real token sees what comes after it."""
        P, S = tokens_PS.shape
        hidden_PH, *prefix = self._read(tokens_PS, torch.arange(P) * S + lengths_P - 1)
        return Prefix(self._logits(hidden_PH), *prefix)

    def extend(self, past: Past, length: int, tokens_S: Tensor) -> Prefix:
        """Prefills one sequence, whose first `length` positions are those of `past`: only `tokens_S`, which
        come after them, are computed."""
        hidden_1H, keys, values, routes_1SYC = self._read(
            tokens_S.unsqueeze(0),
            torch.tensor([len(tokens_S) - 1]),
            length,
            list(past.layers(length, self.weights.embedding.dtype)),
        )
        routes_1SYC = torch.cat([past.routes_SYC[None, :length], routes_1SYC], 1)
        return Prefix(self._logits(hidden_1H), keys, values, routes_1SYC)

    def score(self, tokens_T: Tensor) -> Tensor:
        """fp32 [T-1]: log-probability of each token but the first, given those before it."""
        hidden_TH, *_ = self._read(tokens_T.unsqueeze(0), torch.arange(len(tokens_T) - 1))
        scores_T = torch.empty(len(tokens_T) - 1)
        for first in range(0, len(scores_T), SCORE_TOKENS):
            part = slice(first, first + SCORE_TOKENS)
            logprobs_TV = self._logits(hidden_TH[part]).log_softmax(-1)
            scores_T[part] = logprobs_TV.gather(1, tokens_T[1:][part, None]).squeeze(1)
        return scores_T

    def _read(
        self,
        tokens_PS: Tensor,
        wanted: Tensor,
        start: int = 0,
        past: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the last layer says at the `wanted` ones of the P * S positions, the keys [Y, P, K, D, S] and
        values [Y, P, K, S, D] of all layers, and the routes [P, S, Y, C]. With `past`, keys and values
        [P, K, start, D] of each layer, the tokens come after those, and the keys and values that are returned
        begin with them."""
        P, S = tokens_PS.shape
        rotary = torch.split_with_sizes(self._rotary_L2D[start : start + S].repeat(P, 1, 1), [1, 1], 1)
        seen_SL = torch.ones(S, start + S, dtype=torch.bool).tril(start) if past else None
        hidden = torch.embedding(self.weights.embedding, tokens_PS.view(-1))
        keys, values = [], []
        routes: list[Tensor] = []
        for number, layer in enumerate(self.weights.layers):
            query_PNSD, key_PKSD, value_PKSD = (
                heads_TMD.view(P, S, -1, self.spec.head_dim).transpose(1, 2)
                for heads_TMD in self._project(layer, hidden, rotary)
            )
            if past:
                key_PKSD, value_PKSD = (
                    torch.cat(pair, 2) for pair in zip(past[number], (key_PKSD, value_PKSD), strict=True)
                )
            keys.append(key_PKSD.transpose(2, 3))
            values.append(value_PKSD)
            attended_PNSD = scaled_dot_product_attention(
                query_PNSD, key_PKSD, value_PKSD, seen_SL, is_causal=not past, enable_gqa=True
            )
            attended = attended_PNSD.transpose(1, 2).reshape(P * S, -1)
            if layer is self.weights.layers[-1]:  # nobody attends to what it says
                hidden, attended = hidden[wanted], attended[wanted]
            hidden = self._finish_layer(layer, hidden, attended, routes)
        routes_TYC = self.no_routes.repeat(P * S, 1, 1)
        if self.records_routes:
            for number, chosen_TC in enumerate(routes[:-1]):
                routes_TYC[:, number] = chosen_TC
            routes_TYC[wanted, -1] = routes[-1].to(routes_TYC.dtype)
        return hidden, torch.stack(keys), torch.stack(values), routes_TYC.view(P, S, *self.no_routes.shape)

    def decode(self, cache: KVCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """Logits fp32 [B, V] after one more token per row; its keys and values join the cache.

        `positions_B` is each token's position, `longest` the largest of them.
        """
        spec, B = self.spec, tokens_B.shape[0]
        K, G = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        rotary = torch.split_with_sizes(self._rotary_L2D.index_select(0, positions_B), [1, 1], 1)
        key_places_BKD, value_places_BKD = cache.places(positions_B)
        if B == 1:  # nothing to hide
            length, bias = longest + 1, self._no_bias
        else:
            length = longest + SPAN - longest % SPAN
            unseen_BL = self._positions_L[:length] > positions_B.unsqueeze(1)
            bias_BL = torch.where(unseen_BL, -torch.inf, 0.0)
            bias = bias_BL[:, None, None].expand(B, K, G, length).flatten(0, 1)
        hidden_BH = torch.embedding(self.weights.embedding, tokens_B)
        routes: list[Tensor] = []
        for layer, (keys_BKDL, values_BKLD), (keys_XDL, values_XLD) in zip(
            self.weights.layers, cache.layers, cache.heads(B, length), strict=True
        ):
            query_BND, key_BKD, value_BKD = self._project(layer, hidden_BH, rotary)
            keys_BKDL.put_(key_places_BKD, key_BKD.float())
            values_BKLD.put_(value_places_BKD, value_BKD.float())
            query_XGD = query_BND.float().reshape(B * K, G, spec.head_dim)
            scores_XGL = torch.baddbmm(bias, query_XGD, keys_XDL, alpha=spec.head_dim**-0.5)
            attended_XGD = torch.bmm(torch.softmax(scores_XGL, -1), values_XLD)
            hidden_BH = self._finish_layer(layer, hidden_BH, self._cast(attended_XGD.view(B, -1)), routes)
        if self.records_routes:
            routes_BYC = torch.stack(routes, 1).to(cache.routes_BLYC.dtype)
            cache.routes_BLYC[torch.arange(B), positions_B] = routes_BYC
        return self._logits(hidden_BH)

    def _project(self, layer: Layer, hidden_TH: Tensor, rotary: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Query [T, N, D], key and value [T, K, D]; query and key rotated."""
        spec = self.spec
        cos_T1D, sin_T1D = rotary
        N, K = spec.num_heads, spec.num_kv_heads
        normed_TH = self._norm(hidden_TH, layer.input_norm)
        if layer.qkv_bias is None:
            fused = torch.mm(normed_TH, layer.qkv)
        else:
            fused = torch.addmm(layer.qkv_bias, normed_TH, layer.qkv)
        fused = self._adapted(layer, "qkv", normed_TH, fused)
        rotated, value_TKD = torch.split_with_sizes(
            fused.view(fused.shape[0], -1, spec.head_dim), [N + K, K], 1
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = torch.split_with_sizes(rotated, [N, K], 1)
            rotated = torch.cat([self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)], 1)
        rotated = torch.addcmul(rotated * cos_T1D, rotated.roll(spec.head_dim // 2, -1), sin_T1D)
        query_TND, key_TKD = torch.split_with_sizes(rotated, [N, K], 1)
        return query_TND, key_TKD, value_TKD

    def _finish_layer(
        self, layer: Layer, hidden_TH: Tensor, attended: Tensor, routes: list[Tensor]
    ) -> Tensor:
        """Appends to `routes` the experts [T, C] that the layer's router chose, if it has one."""
        hidden_TH = self._adapted(layer, "out", attended, torch.addmm(hidden_TH, attended, layer.out))
        normed_TH = self._norm(hidden_TH, layer.mlp_norm)
        if self.spec.experts is not None and layer.router is not None:
            routes.append(_add_experts(self.spec.experts, layer, layer.router, hidden_TH, normed_TH))
            return hidden_TH
        fused = self._adapted(layer, "gate_up", normed_TH, torch.mm(normed_TH, layer.gate_up))
        gate, up = torch.split_with_sizes(fused, [self.spec.intermediate_size] * 2, 1)
        product = silu(gate).mul_(up)
        return self._adapted(layer, "down", product, torch.addmm(hidden_TH, product, layer.down))

    def _adapted(self, layer: Layer, field: str, x: Tensor, output: Tensor) -> Tensor:
        """With what the adapter of this matrix adds, if it has one."""
        adapter = layer.adapters.get(field)
        return output if adapter is None else torch.addmm(output, torch.mm(x, adapter.down), adapter.up)

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        return torch.mm(self._norm(hidden_TH, self.weights.norm), self.weights.head).float()

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        """RMSNorm over the last dimension n, in half the operator calls of F.rms_norm: x * scale /
        hypot(|x|, sqrt(n eps)), where `scale` is sqrt(n) * weight in fp32."""
        x = x.float()
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        return self._cast(x.div(norm.hypot_(self._eps[x.shape[-1]])).mul_(scale))


def _add_experts(
    experts: Experts, layer: Layer, router_HE: Tensor, hidden_TH: Tensor, normed_TH: Tensor
) -> Tensor:
    """Adds to each token, in place, what its experts say, weighted by the router's probabilities in fp32.
    Returns the numbers [T, C] of its experts.

    C experts of a token, N tokens of an expert, F an expert's size. Only experts that have tokens compute.
    """
    H, F = hidden_TH.shape[1], experts.intermediate_size
    probs_TE = torch.softmax(torch.mm(normed_TH, router_HE).float(), -1)
    probs_TC, chosen_TC = probs_TE.topk(experts.per_token)
    if experts.norm_topk_prob:
        probs_TC /= probs_TC.sum(-1, keepdim=True)
    for expert in sorted(set(chosen_TC.flatten().tolist())):
        tokens_N, places_N = torch.where(chosen_TC == expert)
        fused = torch.mm(normed_TH[tokens_N], layer.gate_up[:, 2 * F * expert : 2 * F * (expert + 1)])
        gate_NF, up_NF = fused.chunk(2, 1)
        output_NH = torch.mm(silu(gate_NF).mul_(up_NF), layer.down[:, H * expert : H * (expert + 1)])
        weighted_NH = output_NH * probs_TC[tokens_N, places_N, None]
        hidden_TH.index_add_(0, tokens_N, weighted_NH.to(hidden_TH.dtype))
    return chosen_TC


def _no_routes(spec: ModelSpec) -> Tensor:
    """[Y, C]"""
    assert spec.experts is not None
    dtype = getattr(torch, spec.experts.route_dtype)
    return torch.full(spec.route_shape, torch.iinfo(dtype).max, dtype=dtype)
