"""Public failures of divergences, soft targets and masking, on the losses from logits; the API."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_loss
from pallas_loss import fused_ce, fused_forward_kl, fused_reverse_kl, fused_soft_ce

IMPLEMENTATIONS = ("reference", "xla")
INF = jnp.inf


@pytest.fixture(params=IMPLEMENTATIONS)
def how(request):
    return {"implementation": request.param}


def close(got, want, atol=1e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("tau", "reverse", "forward"), [(1, 0.327813, 0.433781), (2, 0.110944, 0.120115)]
)
def test_direction_and_temperature(how, tau, reverse, forward):
    """huggingface/trl#4935, modelscope/twinkle#112: the two names swapped; a hidden T^2."""
    student, teacher = jnp.array([[2.0, 0.0]] * 3), jnp.zeros((3, 2))
    close(fused_reverse_kl(student, teacher, temperature=float(tau), **how), reverse)
    close(fused_forward_kl(student, teacher, temperature=float(tau), **how), forward)
    d = jax.grad(fused_reverse_kl)(student, teacher, temperature=float(tau), **how)
    want = {1: 0.209987, 2: 0.098306}[tau]
    close(3 * d, [[want, -want]] * 3)


def test_the_two_temperatures_are_separate(how):
    """A softened teacher beside a sharp student; the teacher's defaults to the student's."""
    z, t = jnp.array([[2.0, 0.0, 1.0]]), jnp.array([[0.0, 3.0, 1.0]])
    apart = fused_reverse_kl(z, t, temperature=2.0, target_temperature=0.5, **how)
    close(apart, fused_reverse_kl(z / 2, t * 2, **how))
    same = fused_reverse_kl(z, t, temperature=2.0, **how)
    close(same, fused_reverse_kl(z, t, temperature=2.0, target_temperature=2.0, **how))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_low_temperature_has_a_finite_gradient(how, dtype):
    """MakazhanAlpamys/Soup#719: probabilities underflow; a good-looking loss, a NaN gradient."""
    z, t = jnp.array([[10.0, 10.0, 0.0]], dtype), jnp.array([[10.0, 9.95, 9.0]], dtype)
    value, d = jax.value_and_grad(fused_reverse_kl)(z, t, temperature=0.05, **how)
    assert np.isfinite(value) and np.all(np.isfinite(np.asarray(d, np.float32)))
    if dtype == "float32":
        close(value, 0.120115)
        close(d, [[-5, 5, 0]], atol=5e-3)


@pytest.mark.parametrize(
    ("target", "value", "gradient"),
    [([0.3, 0.3], 0.487957, [0.138635, -0.138635]), ([0.0, 0.0], 0.0, [0.0, 0.0])],
)
def test_soft_targets_of_any_mass(how, target, value, gradient):
    """NVIDIA-NeMo/Automodel#2428, kvark/meganeura#102: the backward assumed a mass of 1."""
    z, q = jnp.array([[1.0, 0.0]]), jnp.array([target])
    got, d = jax.value_and_grad(fused_soft_ce)(z, q, **how)
    close(got, value)
    close(d, [gradient])


@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_the_target_is_a_constant(how, kind):
    """Documented: its gradient is 0, not a mixture."""
    z, t = jnp.array([[1.0, 0.0]]), jnp.array([[0.25, 0.75]])
    d = jax.grad(lambda t: fused_soft_ce(z, **{f"target_{kind}": t}, **how))(t)
    close(d, [[0, 0]], atol=0)


def test_zero_times_minus_infinity_is_zero(how):
    """google-deepmind/optax#896, OpenBMB/ModelCenter#14: a removed class made the loss NaN."""
    z = jnp.array([[-INF, 0.0]])
    runs = [
        jax.value_and_grad(fused_soft_ce)(z, jnp.array([[0.0, 1.0]]), **how),
        jax.value_and_grad(fused_reverse_kl)(z, z, **how),
        jax.value_and_grad(fused_forward_kl)(z, z, **how),
        jax.value_and_grad(functools.partial(fused_ce, labels=jnp.array([1]), **how))(z),
    ]
    for value, d in runs:
        close(value, 0, atol=0)
        close(d, [[0, 0]], atol=0)


def test_a_class_the_target_rules_out_is_infinitely_far(how):
    """Reverse KL where q is 0 and p is not; forward KL does not mind."""
    z, t = jnp.array([[0.0, 0.0]]), jnp.array([[-INF, 0.0]])
    assert float(fused_reverse_kl(z, t, **how)) == INF
    close(fused_forward_kl(z, t, **how), np.log(2))


def test_vocabularies_of_different_size():
    """microsoft/LMOps#331, linkedin/Liger-Kernel#634: a padded teacher; arcee-ai/DistillKit#37."""
    for f in (fused_reverse_kl, fused_forward_kl):
        with pytest.raises(ValueError, match=r"target_logits must have shape \[2, 8\].*\[2, 9\]"):
            f(jnp.zeros((2, 8)), jnp.zeros((2, 9)))
    with pytest.raises(ValueError, match="target_probs must have shape"):
        fused_soft_ce(jnp.zeros((2, 8)), jnp.zeros((2, 9)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_masked_rows_may_hold_anything(how, reduction):
    """linkedin/Liger-Kernel#974: a divergence that accepted ignore_index and ignored it."""
    rng = np.random.default_rng(0)
    z, t = (jnp.asarray(rng.normal(size=(40, 9)), jnp.float32) for _ in range(2))
    labels = jnp.where(jnp.arange(40) % 3 == 0, -100, jnp.arange(40) % 9)
    live = np.flatnonzero(np.asarray(labels) != -100)
    bad = jnp.where((labels == -100)[:, None], jnp.nan, z)

    def total(f, z, *rest, **o):
        out = f(z, *rest, reduction=reduction, **o, **how)
        return jnp.sum(out) if reduction == "none" else out

    for f in (fused_reverse_kl, fused_forward_kl):
        value, d = jax.value_and_grad(lambda z, f=f: total(f, z, t, labels=labels))(bad)
        kept = total(f, z[live], t[live])
        close(value, kept)
        close(d[np.asarray(labels) == -100], 0, atol=0)
        assert np.all(np.isfinite(d))
    value, d = jax.value_and_grad(lambda z: total(fused_ce, z, labels))(bad)
    close(value, total(fused_ce, z[live], labels[live]))
    close(d[np.asarray(labels) == -100], 0, atol=0)


def test_nothing_counts(how):
    """A mean over no token is 0, and so is its gradient."""
    z, labels = jnp.ones((3, 4)), jnp.full((3,), -100)
    value, d = jax.value_and_grad(functools.partial(fused_ce, labels=labels, **how))(z)
    close(value, 0, atol=0)
    close(d, np.zeros((3, 4)), atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (5,), (1, 1), (2, 3, 1)])
def test_degenerate_shapes(how, shape):
    """No tokens, no batch axis, one column."""
    z, labels = jnp.zeros(shape), jnp.zeros(shape[:-1], jnp.int32)
    value, d = jax.value_and_grad(functools.partial(fused_ce, labels=labels, **how))(z)
    assert d.shape == shape and np.isfinite(value)
    assert fused_ce(z, labels, reduction="none", **how).shape == shape[:-1]
    assert fused_reverse_kl(z, z, reduction="none", **how).shape == shape[:-1]


def test_an_empty_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="logits must have shape"):
        fused_ce(jnp.zeros((2, 0)), jnp.zeros((2,), jnp.int32))


def test_a_label_out_of_range_poisons_its_token(how):
    """Its loss and gradient are NaN, the others' are not."""
    z, labels = jnp.zeros((3, 4)), jnp.array([0, 4, -1])
    f = functools.partial(fused_ce, labels=labels, reduction="none", **how)
    np.testing.assert_array_equal(np.isnan(f(z)), [False, True, True])
    d = jax.grad(lambda z: jnp.sum(f(z)))(z)
    np.testing.assert_array_equal(np.isnan(d).any(axis=1), [False, True, True])


def test_metrics(how):
    """As those of `fused_linear_ce` with a weight that makes the logits the hidden states."""
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)
    labels = jnp.array([0, 1, -100, 3, 4, 0])
    options = dict(return_metrics=True, z_loss=1e-2, label_smoothing=0.1, **how)
    got = fused_ce(z, labels, **options)
    want = pallas_loss.fused_linear_ce(z, jnp.eye(5), labels, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)
    grads = jax.grad(lambda z: jnp.sum(fused_ce(z, labels, **options)[1].lse))(z)
    close(grads, np.zeros((6, 5)), atol=0)


def test_second_derivatives_raise(how):
    """google-research/t5x#351: never zeros without a word."""
    z, t = jnp.ones((2, 3)), jnp.zeros((2, 3))
    with pytest.raises(TypeError, match="differentiable once"):
        jax.hessian(functools.partial(fused_reverse_kl, target_logits=t, **how))(z)


def test_vmap_and_scan(how):
    """The rules batch."""
    rng = np.random.default_rng(0)
    z, t = (jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32) for _ in range(2))
    f = jax.value_and_grad(functools.partial(fused_reverse_kl, **how))
    want = [f(a, b) for a, b in zip(z, t, strict=True)]
    value, d = jax.vmap(f)(z, t)
    close(value, [float(v) for v, _ in want], atol=1e-6)
    close(d, np.stack([d for _, d in want]), atol=1e-6)
    _, (value, _) = jax.lax.scan(lambda c, zt: (c, f(*zt)), 0, (z, t))
    close(value, [float(v) for v, _ in want], atol=1e-6)


def test_equal_calls_share_a_trace(how):
    """A traced temperature compiles once; equal options do not compile anew."""
    traces = []

    @jax.jit
    def loss(z, t, tau):
        traces.append(1)
        return fused_forward_kl(z, t, temperature=tau, **how)

    for tau in (1.0, 2.0, 3.0):
        loss(jnp.ones((2, 3)), jnp.zeros((2, 3)), jnp.float32(tau))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda z, y: fused_soft_ce(z), ValueError, "exactly one .* neither"),
        (lambda z, y: fused_soft_ce(z, z, target_logits=z), ValueError, "exactly one .* both"),
        (lambda z, y: fused_soft_ce(z, z, target_temperature=2.0), ValueError, "target_temp"),
        (lambda z, y: fused_ce(z, y, temperature=0.0), ValueError, "temperature must be positive"),
        (lambda z, y: fused_ce(z, y, label_smoothing=2.0), ValueError, "label_smoothing"),
        (lambda z, y: fused_ce(z, y, reduction="avg"), ValueError, "reduction"),
        (lambda z, y: fused_ce(z, y, reduction="sum", normalizer=2.0), ValueError, "normalizer"),
        (lambda z, y: fused_ce(z, y[:1]), ValueError, "labels must have shape"),
        (lambda z, y: fused_ce(z, y.astype(z.dtype)), TypeError, "labels must be integers"),
        (lambda z, y: fused_ce(z.astype(jnp.int32), y), TypeError, "logits must have dtype"),
        (lambda z, y: fused_ce(z, y, weights=y), TypeError, "weights must have dtype"),
        (lambda z, y: fused_ce(z, y, inplace=1), TypeError, "inplace must be a bool"),
        (lambda z, y: fused_ce(z, y, implementation="no"), ValueError, "implementation"),
        (lambda z, y: fused_reverse_kl(z, z, labels=y[:1]), ValueError, "labels must have shape"),
        (lambda z, y: fused_reverse_kl(z, z, target_temperature=-1.0), ValueError, "target_temp"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, error, match):
    """Before any work, with the value."""
    with pytest.raises(error, match=match):
        call(jnp.zeros((2, 3)), jnp.array([0, 1]))


@pytest.mark.parametrize("name", ["mosaic_gpu", "triton"])
def test_a_named_backend_never_falls_back(name):
    with pytest.raises(pallas_loss.UnsupportedError, match=f"{name}: needs"):
        fused_ce(jnp.zeros((2, 3)), jnp.array([0, 1]), implementation=name)


def test_in_place_aliases_donated_logits():
    """The compiled program's gradient is the logits' own memory."""
    z, y = jax.ShapeDtypeStruct((512, 1000), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.int32)
    f = functools.partial(fused_ce, inplace=True, implementation="xla")
    with pallas_loss.tuning.override(pallas_loss.tuning.XlaConfig(16, 1000)):
        compiled = jax.jit(jax.value_and_grad(f), donate_argnums=0).lower(z, y).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 512 * 1000 * 4
    assert memory.temp_size_in_bytes < 512 * 1000


def test_no_temporaries_as_large_as_the_logits():
    """Nothing beyond the gradient and one tile of rows."""
    of = jax.ShapeDtypeStruct
    z = of((8192, 32000), jnp.bfloat16)
    for f, args in (
        (fused_ce, (z, of((8192,), jnp.int32))),
        (fused_reverse_kl, (z, z)),
    ):
        run = jax.jit(jax.value_and_grad(functools.partial(f, implementation="xla")))
        memory = run.lower(*args).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 8192 * 32000 * 2
