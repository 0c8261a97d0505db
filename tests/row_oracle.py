"""The float64 truth for the losses from logits: values and analytic gradients in plain NumPy.

Written from the formulas and from nothing in the package; ``tests/test_rows.py`` checks the
gradients here against finite differences of the values here.
"""

from dataclasses import dataclass

import numpy as np

F64 = np.float64


@dataclass(frozen=True)
class Truth:
    """A call's value and its gradients; `scale` is the magnitude of what is summed in each."""

    loss: np.ndarray
    logits: np.ndarray
    weights: np.ndarray
    temperature: np.ndarray
    scale: dict


def _wide(a):
    return np.asarray(a).astype(F64)


def _product(a, b):
    """`a * b` where 0 times anything is 0."""
    a, b = np.broadcast_arrays(a, b)
    with np.errstate(invalid="ignore"):
        return np.where((a == 0) | (b == 0), 0.0, a * b)


def log_softmax(z):
    top = z.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return z - top - np.log(np.exp(z - top).sum(axis=1, keepdims=True))


def _per_token(kind, z, target, labels, o):
    """`(loss [T], dloss/dz [T, V])`."""
    t, v = z.shape
    logp = log_softmax(z)
    p = np.exp(logp)
    if kind == "ce":
        smoothing, c = o.get("label_smoothing", 0.0), o.get("z_loss", 0.0)
        cw = np.ones(v) if o.get("class_weights") is None else _wide(o["class_weights"])
        lse = (z - logp)[np.arange(t), np.argmax(z, axis=1)]
        at = np.zeros((t, v))
        at[np.arange(t), labels] = (1 - smoothing) * cw[labels]
        at = at + smoothing / v * cw
        loss = -_product(at, logp).sum(axis=1) + c * lse**2
        return loss, at.sum(axis=1, keepdims=True) * p - at + 2 * c * lse[:, None] * p
    if kind == "soft_ce_probs":
        q = target
        return -_product(q, logp).sum(axis=1), q.sum(axis=1, keepdims=True) * p - q
    logq = log_softmax(target)
    q = np.exp(logq)
    if kind == "soft_ce":
        return -_product(q, logp).sum(axis=1), p - q
    with np.errstate(invalid="ignore"):
        ratio = logp - logq
    if kind == "forward_kl":
        return -_product(q, ratio).sum(axis=1), p - q
    loss = _product(p, ratio).sum(axis=1)
    return loss, _product(p, ratio - loss[:, None])


def evaluate(kind, logits, target=None, labels=None, *, cotangent=1.0, **o):
    """One call as a `Truth`; options as the public functions take them."""
    batch, v = np.shape(logits)[:-1], np.shape(logits)[-1]
    raw = _wide(logits).reshape(-1, v)
    t = raw.shape[0]
    temperature = float(o.get("temperature", 1.0))
    target_temperature = float(o.get("target_temperature", temperature))
    weights = np.ones(t) if o.get("weights") is None else _wide(o["weights"]).reshape(-1)
    counted = weights != 0
    if o.get("where") is not None:
        counted &= np.asarray(o["where"]).reshape(-1).astype(bool)
    if labels is not None:
        labels = np.asarray(labels).reshape(-1)
        counted &= labels != o.get("ignore_index", -100)
    raw = np.where(counted[:, None], raw, 0.0)
    cap = o.get("logit_soft_cap")
    tanh = np.tanh(raw / cap) if cap else None
    z = (cap * tanh if cap else raw) / temperature
    if target is not None:
        target = np.where(counted[:, None], _wide(target).reshape(-1, v), 0.0)
        if kind != "soft_ce_probs":
            target = target / target_temperature
    safe = np.where(counted, 0 if labels is None else labels, 0)
    loss, dz = _per_token(kind, z, target, safe, o)
    loss = np.where(counted, loss, 0.0)
    w = np.where(counted, weights, 0.0)

    cw_label = np.ones(t)
    if o.get("class_weights") is not None:
        cw_label = _wide(o["class_weights"])[safe]
    reduction, g = o.get("reduction", "mean"), _wide(cotangent)
    n = 1.0
    if reduction == "mean":
        n = o["normalizer"] if o.get("normalizer") is not None else (w * cw_label).sum()
        n = float(n) or 1.0
    value = (w * loss).reshape(batch) if reduction == "none" else (w * loss).sum() / n
    g = g.reshape(-1) if reduction == "none" else np.full(t, float(g)) / n
    dz = _product((g * w)[:, None], dz)
    draw = dz / temperature * (1 - tanh**2 if cap else 1.0)
    dweights = g * loss
    if reduction == "mean" and o.get("normalizer") is None:
        dweights = dweights - g * cw_label * (w * loss).sum() / n
    dweights = np.where(counted, dweights, 0.0)
    by_temperature = _product(dz, z) / temperature
    return Truth(
        loss=value,
        logits=draw.reshape(*batch, v),
        weights=dweights.reshape(batch),
        temperature=-by_temperature.sum(),
        scale={
            "loss": float(np.max(np.abs(w) * (1 + np.abs(loss)), initial=0.0)),
            "logits": float(np.max(np.abs(g * w), initial=0.0)) / temperature,
            "weights": float(np.max(np.abs(g) * (1 + np.abs(loss)), initial=0.0)),
            "temperature": float(np.abs(by_temperature).sum()),
        },
    )
