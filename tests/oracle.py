"""The float64 truth for `fused_linear_ce`: value, metrics and analytic gradients in plain NumPy.

Written from the formulas and from nothing in the package. Every float input is widened exactly to
float64, so the truth belongs to the numbers that the caller passed (a bfloat16 array is taken at
its bfloat16 values).

    z    = softcap(scale * (x @ w + b)) / temperature
    nll  = lse - z_y
    loss = weight * detached(p_y, or 1) * ((1-e) cw_y nll + (e/V) sum_v cw_v (lse - z_v) + c lse^2)

A token is *counted* unless it is ignored, masked by `where`, or of weight 0; uncounted tokens are
replaced by zeros before the first product. A counted token whose label is outside [0, V) has a NaN
loss and NaN gradient.
"""

from dataclasses import dataclass

import numpy as np

F64 = np.float64


@dataclass(frozen=True)
class Truth:
    """What one call returns, in float64; `lse` and `predictions` have shape `[*B]`.

    `scale`: the magnitude of what is added up in the loss, by the same meaning as
    `Gradients.scale`. `condition`: the largest sum of absolute products in a logit; a float32 logit
    is in doubt by 2^-24 of it, and so, relatively, is a probability.
    """

    loss: np.ndarray
    nll: np.ndarray
    z_loss: np.ndarray
    num_tokens: int
    accuracy: float
    predictions: np.ndarray
    lse: np.ndarray
    scale: float
    condition: float


@dataclass(frozen=True)
class Gradients:
    """Gradients for one cotangent.

    `scale`: by name, the largest sum of absolute products in one entry of the gradient. A float32
    sum of products is in doubt by a few units of 2^-24 of that sum, whatever cancels in it; the
    tests state their epsilon against it.
    """

    x: np.ndarray
    w: np.ndarray
    bias: np.ndarray
    weights: np.ndarray
    temperature: np.ndarray
    logit_scale: np.ndarray
    scale: dict


@dataclass(frozen=True)
class _Sweep:
    """Everything about `[T]` flattened tokens that the value and the gradients share."""

    batch_shape: tuple
    x: np.ndarray  # [T, H], uncounted rows zero
    w: np.ndarray  # [H, V]
    labels: np.ndarray  # [T], 0 where uncounted or bad
    counted: np.ndarray  # [T] bool
    bad: np.ndarray  # [T] bool
    weights: np.ndarray  # [T], 0 where uncounted
    cw: np.ndarray  # [V]
    affine: np.ndarray  # [T, V] x @ w + b
    capped_slope: np.ndarray  # [T, V] d softcap
    z: np.ndarray  # [T, V]
    lse: np.ndarray  # [T]
    p: np.ndarray  # [T, V]
    nll: np.ndarray  # [T]
    bracket: np.ndarray  # [T] the loss before weight and token scaling
    scaling: np.ndarray  # [T] detached token scaling
    denominator: float  # of the mean


def _wide(a):
    return np.asarray(a).astype(F64)


def _product(a, b):
    """a * b, with 0 * anything = 0."""
    a, b = np.broadcast_arrays(a, b)
    return np.where(a == 0, 0.0, a * np.where(a == 0, 0.0, b))


def _sweep(
    x,
    w,
    labels,
    *,
    bias=None,
    where=None,
    weights=None,
    class_weights=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    logit_soft_cap=None,
    logit_scale=1.0,
    temperature=1.0,
    token_scaling=False,
    reduction="mean",
    normalizer=None,
    w_layout="hv",
    detached_scaling=None,
):
    labels = np.asarray(labels).astype(object)  # exact for every integer dtype
    batch_shape = labels.shape
    labels = labels.reshape(-1)
    w = _wide(w) if w_layout == "hv" else _wide(w).T
    hidden, vocab = w.shape
    x = _wide(x).reshape(-1, hidden)
    tokens = labels.shape[0]

    given = np.ones(tokens) if weights is None else _wide(weights).reshape(-1)
    counted = np.array([label != ignore_index for label in labels], bool) & (given != 0)
    if where is not None:
        counted &= np.asarray(where).reshape(-1).astype(bool)
    outside = np.array([not 0 <= label < vocab for label in labels], bool)
    bad = counted & outside
    safe = np.where(counted & ~bad, labels, 0).astype(np.int64)
    x = np.where(counted[:, None], x, 0.0)
    weights = np.where(counted, given, 0.0)
    cw = np.ones(vocab) if class_weights is None else _wide(class_weights)
    scale, temperature = float(logit_scale), float(temperature)

    affine = x @ w + (0.0 if bias is None else _wide(bias))
    scaled = scale * affine
    if logit_soft_cap is None:
        capped, slope = scaled, np.ones_like(scaled)
    else:
        tanh = np.tanh(scaled / logit_soft_cap)
        capped, slope = logit_soft_cap * tanh, 1.0 - tanh**2
    z = capped / temperature

    rows = np.arange(tokens)
    top = z.max(axis=1) if tokens else np.zeros(0)
    log_sum = np.log(np.exp(z - top[:, None]).sum(axis=1))
    lse = top + log_sum
    p = np.exp(z - top[:, None] - log_sum[:, None])
    nll = np.where(counted, (top - z[rows, safe]) + log_sum, 0.0)
    bracket = (1.0 - label_smoothing) * cw[safe] * nll
    if label_smoothing:
        gaps = (top[:, None] - z) + log_sum[:, None]
        bracket = bracket + label_smoothing / vocab * _product(cw[None], gaps).sum(axis=1)
    bracket = bracket + z_loss * lse**2

    if detached_scaling is not None:
        scaling = detached_scaling
    else:
        scaling = p[rows, safe] if token_scaling else np.ones(tokens)
    own = np.where(bad, np.nan, weights * cw[safe])
    denominator = own[counted].sum() if normalizer is None else float(normalizer)
    return _Sweep(
        batch_shape=batch_shape,
        x=x,
        w=w,
        labels=safe,
        counted=counted,
        bad=bad,
        weights=weights,
        cw=cw,
        affine=affine,
        capped_slope=slope,
        z=z,
        lse=lse,
        p=p,
        nll=nll,
        bracket=bracket,
        scaling=scaling,
        denominator=denominator,
    )


def _reduce(s, per_token, reduction):
    per_token = np.where(s.bad, np.nan, np.where(s.counted, per_token, 0.0))
    if reduction == "none":
        return per_token.reshape(s.batch_shape)
    total = per_token.sum()
    if reduction == "sum" or not s.counted.any():
        return total
    return total / s.denominator


def evaluate(x, w, labels, **options):
    """The loss and its metrics as a `Truth`."""
    reduction = options.get("reduction", "mean")
    s = _sweep(x, w, labels, **options)
    predictions = np.where(s.counted, np.argmax(s.z, axis=1) if s.z.size else 0, -1)
    count = int(s.counted.sum())
    correct = int((s.counted & ~s.bad & (predictions == s.labels)).sum())
    outer = s.weights * s.scaling
    z_term = options.get("z_loss", 0.0) * s.lse**2
    parts = np.abs(outer) * (np.abs(s.lse) + np.abs(s.bracket))
    parts = _reduce(s, np.where(s.bad, 0.0, parts), reduction)
    logits = np.abs(s.x) @ np.abs(s.w) * abs(float(options.get("logit_scale", 1.0)))
    return Truth(
        loss=_reduce(s, outer * s.bracket, reduction),
        nll=_reduce(s, outer * (s.bracket - z_term), reduction),
        z_loss=_reduce(s, outer * z_term, reduction),
        num_tokens=count,
        accuracy=correct / count if count else 0.0,
        predictions=predictions.reshape(s.batch_shape),
        lse=np.where(s.counted, s.lse, 0.0).reshape(s.batch_shape),
        scale=float(np.max(np.abs(parts), initial=0.0)),
        condition=float(np.max(logits, initial=0.0)) / float(options.get("temperature", 1.0)),
    )


def gradients(x, w, labels, cotangent=1.0, lse_cotangent=0.0, **options):
    """Analytic gradients of `sum(cotangent * loss) + sum(lse_cotangent * lse)`, as a
    `Gradients`."""
    reduction = options.get("reduction", "mean")
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    layout = options.get("w_layout", "hv")
    temperature = float(options.get("temperature", 1.0))
    scale = float(options.get("logit_scale", 1.0))
    s = _sweep(x, w, labels, **options)
    tokens, vocab = s.z.shape

    # g_t: the cotangent of token t's own loss.
    cotangent = _wide(cotangent)
    if reduction == "none":
        g = cotangent.reshape(-1)
    else:
        g = np.full(tokens, float(cotangent))
        if reduction == "mean" and s.counted.any():
            g = g / s.denominator
    g = np.where(s.counted, g, 0.0)

    one_hot = np.zeros((tokens, vocab))
    one_hot[np.arange(tokens), s.labels] = 1.0
    own = ((1.0 - smoothing) * s.cw[s.labels])[:, None]
    d = own * (s.p - one_hot)
    d = d + smoothing / vocab * (s.cw.sum() * s.p - s.cw[None])
    d = d + 2.0 * z_loss * s.lse[:, None] * s.p
    dz = _product((g * s.weights * s.scaling)[:, None], d)
    dz = np.where((s.bad & (g != 0))[:, None], np.nan, dz)
    lse_cotangent = np.broadcast_to(_wide(lse_cotangent), s.batch_shape).reshape(-1)
    dz = dz + np.where(s.counted, lse_cotangent, 0.0)[:, None] * s.p

    dcapped = dz / temperature
    dscaled = _product(dcapped, s.capped_slope)
    daffine = scale * dscaled
    dx, dw = daffine @ s.w.T, s.x.T @ daffine
    dweights = g * s.scaling * s.bracket
    if reduction == "mean" and options.get("normalizer") is None and s.counted.any():
        total = (s.weights * s.scaling * s.bracket)[s.counted].sum()
        dweights = dweights - g * s.cw[s.labels] * total / s.denominator
    dweights = np.where(s.bad & (g != 0), np.nan, np.where(s.counted, dweights, 0.0))
    by_temperature, by_scale = _product(dz, s.z) / temperature, _product(dscaled, s.affine)
    doubt = np.abs(scale * dcapped) * (
        2.0 - s.capped_slope
    )  # the slope is itself a sum, 1 - tanh^2
    magnitude = {
        "x": doubt @ np.abs(s.w).T,
        "w": np.abs(s.x).T @ doubt,
        "bias": doubt.sum(axis=0),
        "weights": np.abs(g * s.scaling) * (np.abs(s.lse) + np.abs(s.bracket)),
        "temperature": np.abs(by_temperature).sum(),
        "logit_scale": _product(doubt / scale, np.abs(s.affine)).sum(),
    }
    return Gradients(
        x=dx.reshape(*s.batch_shape, s.w.shape[0]),
        w=dw if layout == "hv" else dw.T,
        bias=daffine.sum(axis=0),
        weights=dweights.reshape(s.batch_shape),
        temperature=-by_temperature.sum(),
        logit_scale=by_scale.sum(),
        scale={name: float(np.max(a, initial=0.0)) for name, a in magnitude.items()},
    )


def detached_scaling(x, w, labels, **options):
    """The token-scaling factors that a finite difference has to hold fixed."""
    return _sweep(x, w, labels, **options).scaling
