"""The ops and number formats once more: plain float64 loops in NumPy that share no code with them.

Slow and literal on purpose. Where the model's rule itself rounds (a cached value, a quantised
input, a rotation angle), the loop rounds too, by looking the value up in a table of the format.
"""

import math
from typing import Any

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([2.0**-9 * m for m in range(8)] + [0.0] * 119)
for _byte in range(8, 127):
    E4M3[_byte] = 2.0 ** ((_byte >> 3) - 7) * (1 + (_byte & 7) / 8)


def close(got: Any, want: Any, ulps: float, eps: float = 2.0**-23) -> None:
    """Each entry within `ulps` float32 units in the last place of its row's largest magnitude."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    bound = ulps * eps * np.abs(want).max(axis=-1, keepdims=True)
    worst = np.max(np.abs(got - want) - bound, initial=-1.0)
    assert np.isfinite(got).all()
    assert worst <= 0, f"off by {np.max(np.abs(got - want) / (bound / ulps + 1e-300)):.3g} ulp"


def nearest(x: float, table: np.ndarray) -> float:
    """The table value nearest to x; ties go to the even index, past the table it saturates."""
    a = abs(float(x))
    above = int(np.searchsorted(table, a))
    if above == len(table):
        chosen = len(table) - 1
    elif above == 0:
        chosen = 0
    else:
        low, high = a - table[above - 1], table[above] - a
        chosen = above if high < low or (high == low and above % 2 == 0) else above - 1
    return math.copysign(table[chosen], x)


def to_e4m3(x: float) -> float:
    return nearest(x, E4M3[:127])


def to_e2m1(x: float) -> float:
    return nearest(x, E2M1)


def bits_e4m3(byte: int) -> float:
    """The value of an E4M3 byte."""
    if byte & 127 == 127:
        return math.nan
    return float(-E4M3[byte & 127] if byte & 128 else E4M3[byte])


def e4m3_values(data: Any) -> np.ndarray:
    table = np.array([bits_e4m3(byte) for byte in range(256)])
    return table[np.asarray(data).view(np.uint8)]


def e2m1_values(packed: Any) -> np.ndarray:
    """Two codes a byte, the even column in the low nibble."""
    packed = np.asarray(packed)
    table = np.concatenate([E2M1, -E2M1])
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2))
    out[..., 0::2], out[..., 1::2] = table[packed & 15], table[packed >> 4]
    return out


def weight_values(weight: Any) -> np.ndarray:
    """Values of a stored weight, told apart by the parts that it has."""
    if weight.scale is None:
        return np.asarray(weight.data).astype(np.float64)
    if weight.scale_2 is None:
        power = np.asarray(weight.scale).astype(np.float64) - 127
        return e4m3_values(weight.data) * 2.0 ** np.repeat(power, 32, axis=-1)
    scale = np.repeat(e4m3_values(weight.scale), 16, axis=-1)
    return (
        e2m1_values(weight.data) * scale * np.asarray(weight.scale_2, np.float64)[..., None, None]
    )


def cached_values(stored: Any) -> np.ndarray:
    """Values of stored cache vectors."""
    if stored.scale is not None:
        return e2m1_values(stored.data) * np.repeat(e4m3_values(stored.scale), 16, axis=-1)
    data = np.asarray(stored.data)
    return e4m3_values(data) if data.dtype.itemsize == 1 else data.astype(np.float64)


def store(x: np.ndarray, fmt: str) -> np.ndarray:
    """Values of vectors after they were stored in a cache format."""
    if fmt == "f32":
        return x.astype(np.float32).astype(np.float64)
    out = np.empty(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        row = x[at].astype(np.float64)
        if fmt == "fp8":
            out[at] = [to_e4m3(v) for v in row]
        elif fmt == "bf16":
            out[at] = [to_bf16(v) for v in row]
        else:
            for g in range(0, len(row), 16):
                group = row[g : g + 16]
                scale = to_e4m3(min(max(np.abs(group).max() / 6, 2.0**-9), 448))
                out[at][g : g + 16] = [scale * to_e2m1(v / scale) for v in group]
    return out


def to_bf16(x: float) -> float:
    """Eight significant bits, ties to even."""
    if x == 0:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 256), exponent - 8)  # Python rounds ties to even


def mxfp8_rows(x: Any) -> np.ndarray:
    """Values after MXFP8 quantisation: per 32, scale a power of two, maximum in (224, 448]."""
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        for g in range(0, x.shape[-1], 32):
            group = x[at][g : g + 32]
            amax = np.abs(group).max()
            if amax == 0:
                continue
            mantissa, exponent = math.frexp(amax / 448)
            power = min(max(exponent - (mantissa == 0.5), -127), 127)
            out[at][g : g + 32] = [to_e4m3(v / 2.0**power) * 2.0**power for v in group]
    return out


def rms_norm(x: Any, weight: Any, eps: float, offset: float) -> np.ndarray:
    x, weight = np.asarray(x).astype(np.float64), np.asarray(weight, np.float64)
    out = np.empty(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        mean = sum(v * v for v in x[at]) / x.shape[-1]
        out[at] = x[at] / math.sqrt(mean + eps) * (offset + weight)
    return out


def linear(x: Any, weight: Any, quantize_input: bool) -> np.ndarray:
    """out[t, n] = x[t] . w[n]"""
    rows, w = _input(x, weight, quantize_input), weight_values(weight)
    return np.array([[np.dot(row, out) for out in w] for row in rows])


def row_linear(x: Any, weight: Any, slices: int, quantize_input: bool) -> np.ndarray:
    """out[t, s, n]: the products of input run s only."""
    rows, w = _input(x, weight, quantize_input), weight_values(weight)
    run = w.shape[1] // slices
    out = np.zeros((len(rows), slices, len(w)))
    for t, s, n in np.ndindex(out.shape):
        part = slice(s * run, (s + 1) * run)
        out[t, s, n] = np.dot(rows[t, part], w[n, part])
    return out


def activation(gate: float, up: float, alpha: float, limit: float, beta: float) -> float:
    """SwiGLU-OAI of one pair of pre-activations."""
    g = min(gate, limit)
    u = min(max(up, -limit), limit)
    return g / (1 + math.exp(-alpha * g)) * (u + beta)


def mlp(
    x: Any, gate: Any, up: Any, down: Any, swiglu: Any, slices: int, quantize_input: bool
) -> np.ndarray:
    rows = _input(x, gate, quantize_input)
    w_gate, w_up = weight_values(gate), weight_values(up)
    hidden = np.array(
        [
            [activation(row @ g, row @ u, *swiglu) for g, u in zip(w_gate, w_up, strict=True)]
            for row in rows
        ]
    )
    return row_linear(hidden, down, slices, quantize_input)


def moe_experts(
    x: Any,
    ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any,
    swiglu: Any,
    slices: int,
    quantize_input: bool,
) -> np.ndarray:
    """out[t, s] = sum over the row's experts, each on its own."""
    x, ids, weights = np.asarray(x, np.float64), np.asarray(ids), np.asarray(weights, np.float64)
    w_in, w_out = weight_values(gate_up), weight_values(down)
    is_vendor = quantize_input and gate_up.scale_2 is not None
    width, hidden_width = w_out.shape[1:]
    run = hidden_width // slices
    out = np.zeros((len(x), slices, width))
    for t in range(len(x)):
        row, factor = (
            vendor_fc1(x[t]) if is_vendor else (_input(x[t], gate_up, quantize_input), 1.0)
        )
        for expert, share in zip(ids[t], weights[t], strict=True):
            if expert < 0:
                continue
            gate, up = w_in[expert] @ row * factor
            hidden = np.array([activation(g, u, *swiglu) for g, u in zip(gate, up, strict=True)])
            hidden = vendor_fc2(hidden) if is_vendor else _input(hidden, down, quantize_input)
            for s in range(slices):
                part = slice(s * run, (s + 1) * run)
                out[t, s] += share * (w_out[expert][:, part] @ hidden[part])
    return out


def vendor_fc1(row: np.ndarray) -> tuple[np.ndarray, float]:
    """S = 2688 / amax, xn = bf16(x S), scales e4m3(amax(xn) / 6); factor bf16(amax / 2688)."""
    amax = np.abs(row).max()
    if amax == 0:
        return np.zeros(row.shape), 0.0
    outer = np.float32(2688) / np.float32(amax)
    scaled = np.array([to_bf16(float(np.float32(v) * outer)) for v in row])
    return _grouped(scaled, 1), to_bf16(float(np.float32(amax) / np.float32(2688)))


def vendor_fc2(row: np.ndarray) -> np.ndarray:
    """sc = e4m3(amax(z) / 6 * 16), code = e2m1(z / (sc / 16)), the product times 1/16."""
    return _grouped(row, 16) / 16


def _grouped(row: np.ndarray, outer: float) -> np.ndarray:
    out = np.zeros(row.shape)
    for g in range(0, len(row), 16):
        group = row[g : g + 16]
        scale = to_e4m3(np.abs(group).max() / 6 * outer)
        if scale:
            out[g : g + 16] = [scale * to_e2m1(v / (scale / outer)) for v in group]
    return out


def _input(x: Any, weight: Any, quantize: bool) -> np.ndarray:
    x = np.asarray(x).astype(np.float64)
    return mxfp8_rows(x) if quantize and weight.scale is not None else x


def moe_route(
    x: Any, router: Any, bias: Any, experts_per_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids ascending, weights that sum to 1)."""
    x, router = np.asarray(x).astype(np.float64), np.asarray(router, np.float64)
    all_ids, all_weights = [], []
    for row in x:
        score = [1 / (1 + math.exp(-np.dot(row, gate))) for gate in router]
        rank = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(score)]
        ids = sorted(sorted(range(len(rank)), key=lambda e: (-rank[e], e))[:experts_per_token])
        all_ids.append(ids)
        all_weights.append([score[e] / sum(score[i] for i in ids) for e in ids])
    return np.array(all_ids), np.array(all_weights)


def inv_freq(rotary_dim: int, theta: float) -> np.ndarray:
    """Rotation frequencies as the model's float32 buffer holds them."""
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.float32(1) / np.power(np.float32(theta), exponent)


def rotate(head: np.ndarray, position: int, rotary_dim: int, theta: float) -> np.ndarray:
    """Half-split rotation of the first channels; the angle is a float32 product."""
    out = head.copy()
    half = rotary_dim // 2
    for c, frequency in enumerate(inv_freq(rotary_dim, theta)):
        angle = float(np.float32(position) * frequency)
        first, second = head[c], head[c + half]
        out[c] = first * math.cos(angle) - second * math.sin(angle)
        out[c + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


def norm_rope(x: Any, weight: Any, position: Any, heads: Any) -> np.ndarray:
    """Norm, then rotation, of [T, heads, H]."""
    normed, position = rms_norm(x, weight, heads.eps, heads.offset), np.asarray(position)
    for t, h in np.ndindex(normed.shape[:2]):
        at = max(int(position[t]), 0)
        normed[t, h] = rotate(normed[t, h], at, heads.rotary_dim, heads.rope_theta)
    return normed


def _host(q: Any, *ids: Any) -> tuple[np.ndarray, ...]:
    """Queries in float64 and integer arrays, out of JAX: indexing a JAX array takes far longer."""
    return np.asarray(q).astype(np.float64), *(np.asarray(array) for array in ids)


def index_score(q: Any, keys: np.ndarray, page_table: Any, slot: Any, position: Any) -> np.ndarray:
    """keys [P, page, G] of one layer; -inf where a block holds no visible key."""
    q, table, slot, position = _host(q, page_table, slot, position)
    page = keys.shape[1]
    out = np.full((*q.shape[:2], table.shape[1]), -np.inf)
    for t, i in np.ndindex(q.shape[:2]):
        for n in range(int(position[t]) + 1):
            dot = float(q[t, i] @ keys[table[slot[t], n // page], n % page])
            out[t, i, n // page] = max(out[t, i, n // page], dot)
    return out


def index_topk(
    scores: Any, position: Any, page: int, topk: int, init_blocks: int, local_blocks: int
) -> np.ndarray:
    scores, position = np.asarray(scores).astype(np.float64), np.asarray(position)
    out = np.full((*scores.shape[:2], topk), -1)
    for t, i in np.ndindex(scores.shape[:2]):
        visible = min(int(position[t]) // page + 1, scores.shape[2])
        forced = {b for b in range(visible) if b >= visible - local_blocks or b < init_blocks}

        def rank(b: int, row=scores[t, i], forced=forced) -> tuple:
            value = -math.inf if math.isnan(row[b]) else float(row[b])
            return (b not in forced, -value, b)

        chosen = sorted(sorted(range(visible), key=rank)[:topk])
        out[t, i, : len(chosen)] = chosen
    return out


def attention(
    q: Any,
    keys: np.ndarray,
    values: np.ndarray,
    page_table: Any,
    slot: Any,
    position: Any,
    scale: float,
    block_table: Any = None,
) -> np.ndarray:
    """keys and values [P, K, page, H] of one layer; every block where no table is given."""
    q, table, slot, position = _host(q, page_table, slot, position)
    chosen = None if block_table is None else np.asarray(block_table)
    kv_heads, page = keys.shape[1:3]
    out = np.zeros(q.shape)
    for t, h in np.ndindex(q.shape[:2]):
        g = h * kv_heads // q.shape[1]
        tokens = [
            n for n in range(int(position[t]) + 1) if chosen is None or n // page in chosen[t, g]
        ]
        if not tokens:
            continue
        at = [(table[slot[t], n // page], g, n % page) for n in tokens]
        dots = np.array([q[t, h] @ keys[place] for place in at]) * scale
        weights = np.exp(dots - dots.max())
        rows = np.array([values[place] for place in at])
        out[t, h] = weights @ rows / weights.sum()
    return out
