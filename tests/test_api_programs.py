"""The contract of the public functions: how they transform and compile."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ce_problem import H, T, V, close, on, problem

# --- transformations ------------------------------------------------------------------------------


def test_jit_and_eager_agree(backend):
    """The same numbers, and the value is not changed by asking for gradients."""
    x, w, labels = problem()
    loss = on(backend, label_smoothing=0.1)
    expected = oracle.evaluate(x, w, labels, label_smoothing=0.1).loss
    for value in (
        loss(x, w, labels),
        jax.jit(loss)(x, w, labels),
        jax.value_and_grad(loss)(x, w, labels)[0],
        jax.jit(jax.value_and_grad(loss))(x, w, labels)[0],
    ):
        close(value, expected, atol=5e-7, rtol=5e-7)


def test_vjp_called_more_than_once(backend):
    """The saved values survive the first call; each call answers its own cotangent."""
    x, w, labels = problem()
    _, vjp = jax.vjp(lambda x, w: on(backend, reduction="none")(x, w, labels), x, w)
    cotangents = [np.eye(T, dtype=np.float32)[i] for i in (0, 3)] + [np.ones(T, np.float32)]
    for g in [*cotangents, cotangents[0]]:
        expected = oracle.gradients(x, w, labels, g, reduction="none")
        for got, right in zip(vjp(jnp.asarray(g)), (expected.x, expected.w), strict=True):
            close(got, right)
    batched = jax.vmap(vjp)(jnp.stack(cotangents))
    for i, g in enumerate(cotangents):
        expected = oracle.gradients(x, w, labels, g, reduction="none")
        close(batched[0][i], expected.x)
        close(batched[1][i], expected.w)


def test_vmap_over_tokens(backend):
    """One token at a time: unreduced losses and the gradient of the shared weight."""
    backend.require_transforms()
    x, w, labels = problem()

    def total(x, w):
        per_token = jax.vmap(on(backend), in_axes=(0, None, 0))(x, w, labels)
        return jnp.sum(per_token), per_token

    (_, per_token), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, w)
    close(per_token, oracle.evaluate(x, w, labels, reduction="none").loss)
    expected = oracle.gradients(x, w, labels, reduction="sum")
    close(grads[0], expected.x)
    close(grads[1], expected.w)


def test_vmap_over_stacked_weights_and_options(backend):
    """An ensemble of heads, biases and temperatures over one batch of tokens."""
    backend.require_transforms()
    x, w, labels = problem()
    ws = np.stack([w, -w, 2 * w])
    biases = np.linspace(-1, 1, 3 * V).reshape(3, V).astype(np.float32)
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)

    def loss(w, bias, temperature):
        return on(backend, z_loss=0.01)(x, w, labels, bias=bias, temperature=temperature)

    values, grads = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2))))(ws, biases, temperatures)
    for i in range(3):
        options = {"bias": biases[i], "temperature": temperatures[i], "z_loss": 0.01}
        close(values[i], oracle.evaluate(x, ws[i], labels, **options).loss)
        expected = oracle.gradients(x, ws[i], labels, **options)
        close(grads[0][i], expected.w)
        close(grads[1][i], expected.bias)
        close(grads[2][i], expected.temperature)


def test_vmap_over_masks_and_labels(backend):
    """Batched integer operands only: different tokens counted in each element."""
    backend.require_transforms()
    x, w, labels = problem()
    where = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], bool)
    stacked = np.stack([labels, (labels + 1) % V, (labels + 2) % V])

    def loss(w, y, m):
        return on(backend)(x, w, y, where=m)

    values, dw = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))(w, stacked, where)
    for i in range(3):
        close(values[i], oracle.evaluate(x, w, stacked[i], where=where[i]).loss)
        close(dw[i], oracle.gradients(x, w, stacked[i], where=where[i]).w)


def test_scan_with_a_gradient_through_the_carry(backend):
    """Losses of micro-batches summed in a scan, and SGD steps whose carry is the weight."""
    x, w, labels = problem(tokens=8)
    xs, ys = x.reshape(4, 2, H), labels.reshape(4, 2)
    loss = on(backend, reduction="sum")

    def accumulated(w):
        return jax.lax.scan(lambda c, xy: (c + loss(xy[0], w, xy[1]), None), 0.0, (xs, ys))[0]

    value, dw = jax.jit(jax.value_and_grad(accumulated))(w)
    close(value, oracle.evaluate(x, w, labels, reduction="sum").loss)
    close(dw, oracle.gradients(x, w, labels, reduction="sum").w)

    def step(w, xy):
        value, dw = jax.value_and_grad(loss, 1)(xy[0], w, xy[1])
        return w - 0.1 * dw, value

    got, values = jax.jit(lambda w: jax.lax.scan(step, w, (xs, ys)))(w)
    expected = w.astype(np.float64)
    for i in range(4):
        close(values[i], oracle.evaluate(xs[i], expected, ys[i], reduction="sum").loss, 3e-6)
        expected = expected - 0.1 * oracle.gradients(xs[i], expected, ys[i], reduction="sum").w
    close(got, expected, 3e-6)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_checkpoint_changes_no_bit(backend, policy):
    """Rematerialised or saved, alone or around the layer before."""
    backend.require_transforms()
    x, w, labels = problem()

    def loss(x, w):
        return on(backend)(jnp.tanh(x), w, labels)

    remat = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    plain = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    got = jax.jit(jax.value_and_grad(remat, (0, 1)))(x, w)
    jax.tree.map(np.testing.assert_array_equal, got, plain)
    inner = oracle.gradients(np.tanh(x.astype(np.float64)), w, labels)
    close(got[1][0], inner.x * (1 - np.tanh(x) ** 2))


def test_donation(backend):
    """Donated operands are reused, not read afterwards: an SGD step in place."""
    x, w, labels = problem()
    loss = on(backend)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(x, w, labels):
        value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w, labels)
        return value, x - dx, w - dw

    expected = oracle.gradients(x, w, labels)
    given_x, given_w = jnp.array(x), jnp.array(w)
    value, new_x, new_w = step(given_x, given_w, labels)
    assert given_x.is_deleted()
    assert given_w.is_deleted()
    close(value, oracle.evaluate(x, w, labels).loss)
    close(new_x, x - expected.x)
    close(new_w, w - expected.w)


def test_control_flow(backend):
    """Under `cond` and `switch` on a traced value, and forward only in a `while_loop`."""
    x, w, labels = problem()
    loss = on(backend)

    @jax.jit
    def chosen(w, use):
        return jax.lax.cond(use, lambda w: loss(x, w, labels), lambda w: jnp.sum(w) * 0, w)

    close(jax.grad(chosen)(w, True), oracle.gradients(x, w, labels).w)
    np.testing.assert_array_equal(jax.grad(chosen)(w, False), np.zeros((H, V)))
    looped = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + loss(x, w, labels)), (0, jnp.float32(0))
    )
    close(looped[1], 3 * oracle.evaluate(x, w, labels).loss)


def test_gradient_of_traced_scalars(backend):
    """Temperature and scale given as arrays: right gradient, through jit, with a soft cap."""
    x, w, labels = problem()
    options = {"logit_soft_cap": 2.0, "z_loss": 0.02, "label_smoothing": 0.1}

    def loss(temperature, scale):
        return on(backend, **options)(x, w, labels, temperature=temperature, logit_scale=scale)

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(jnp.float32(0.7), jnp.float32(1.4))
    options |= {"temperature": np.float32(0.7), "logit_scale": np.float32(1.4)}
    close(value, oracle.evaluate(x, w, labels, **options).loss)
    expected = oracle.gradients(x, w, labels, **options)
    close(grads[0], expected.temperature)
    close(grads[1], expected.logit_scale)


def _mixed(backend):
    x, w, labels = problem()
    tangent = np.ones((T, H), np.float32)

    def loss(x, weights, temperature):
        return on(backend, reduction="sum")(x, w, labels, weights=weights, temperature=temperature)

    return loss, x, jnp.ones(T), jnp.float32(1.5), tangent


def test_mixed_second_derivatives_are_right_or_raise(backend):
    """d/dweights of dloss/dx is the unweighted dloss/dx; a zero would be a silent lie."""
    loss, x, weights, temperature, tangent = _mixed(backend)
    _, w, labels = problem()
    per_token = oracle.gradients(x, w, labels, reduction="sum", temperature=1.5).x
    directions = np.sum(per_token * tangent, axis=1)

    def dx_along(weights):
        return jnp.sum(tangent * jax.grad(loss)(x, weights, temperature))

    def dweights_sum(x):
        return jnp.sum(jax.grad(loss, 1)(x, weights, temperature))

    for derivative, right in (
        (jax.grad(dx_along), directions),
        (jax.grad(dweights_sum), per_token),
    ):
        try:
            got = derivative(weights if derivative is not None and right.ndim == 1 else x)
        except TypeError as error:
            assert "fused_linear_ce" in str(error) or "second" in str(error)
        else:
            close(got, right)
    with pytest.raises(TypeError):
        jax.grad(lambda t: jnp.sum(tangent * jax.grad(loss)(x, weights, t)))(temperature)
    with pytest.raises(TypeError):
        jax.grad(lambda t: jax.grad(loss, 2)(x, weights, t))(temperature)


@pytest.mark.parametrize("argument", ["x", "w", "bias", "temperature", "logit_scale"])
def test_forward_mode_raises_for_every_argument(backend, argument):
    """Never zeros, whichever argument carries the tangent, under jit as well."""
    x, w, labels = problem()
    arguments = {
        "x": jnp.asarray(x),
        "w": jnp.asarray(w),
        "bias": jnp.zeros(V),
        "temperature": jnp.float32(1.2),
        "logit_scale": jnp.float32(0.8),
    }

    def loss(value):
        a = {**arguments, argument: value}
        return on(backend)(a.pop("x"), a.pop("w"), labels, **a)

    point = arguments[argument]
    for f in (loss, jax.jit(loss)):
        with pytest.raises(TypeError, match="(?i)fused_linear_ce|forward|reverse"):
            jax.jvp(f, (point,), (jnp.ones_like(point),))


# --- compilation ----------------------------------------------------------------------------------


def test_equal_options_trace_once(backend):
    """Fresh but equal options, arrays instead of arrays: one trace. New arrays are not new
    options."""
    x, w, labels = problem()
    traces = []

    @functools.partial(jax.jit, static_argnames=("options",))
    def step(x, w, labels, temperature, options):
        traces.append(options)
        loss = on(backend, **dict(options))
        return jax.value_and_grad(loss)(x, w, labels, temperature=temperature)

    for i in range(5):
        options = tuple({"label_smoothing": 0.1, "logit_soft_cap": float("30")}.items())
        step(x + i, w, labels, jnp.float32(1 + i), options)
    assert len(traces) == 1


@pytest.mark.parametrize("what", ["value", "gradients"])
def test_repeated_eager_calls_compile_nothing(backend, what):
    """A loop in Python over one shape compiles at its first turn only, options and all."""
    x, w, labels = (jnp.asarray(a) for a in problem())
    mask = jnp.ones(T, bool)
    loss = on(backend, z_loss=0.01, logit_soft_cap=5.0)
    call = loss if what == "value" else jax.grad(loss, (0, 1))
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    def turn():
        jax.block_until_ready(call(x, w, labels, where=mask, temperature=jnp.float32(2)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.clear_caches()
        turn()
        first = len(compiled)
        turn()
        turn()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert first > 0
    assert len(compiled) == first


def test_lengths_that_differ_compile_by_their_own_shape(backend):
    """No hidden bucketing: padding is the caller's, and an ignored tail changes no number."""
    x, w, labels = problem(tokens=8)
    traces = []

    @jax.jit
    def step(x, w, labels):
        traces.append(x.shape)
        return on(backend)(x, w, labels)

    padded = [np.where(np.arange(8) < n, labels, -100).astype(np.int32) for n in range(1, 9)]
    for n, y in enumerate(padded, start=1):
        close(step(x, w, y), oracle.evaluate(x[:n], w, labels[:n]).loss)
    assert len(traces) == 1
