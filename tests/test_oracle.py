"""The oracle's analytic gradients against central differences of its own value."""

import numpy as np
import oracle
import pytest

STEP = 1e-5
SHAPE, HIDDEN, VOCAB = (2, 3), 4, 5


def _problem(layout):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(*SHAPE, HIDDEN))
    w = rng.normal(size=(HIDDEN, VOCAB))
    labels = np.array([[0, 4, -100], [2, 2, 1]])
    return {
        "x": x,
        "w": w if layout == "hv" else np.ascontiguousarray(w.T),
        "labels": labels,
        "bias": rng.normal(size=VOCAB),
        "weights": np.array([[1.0, 0.5, 2.0], [0.0, -0.75, 1.5]]),
        "temperature": 1.3,
        "logit_scale": 0.7,
    }


OPTIONS = {
    "nothing": {},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.05},
    "soft_cap": {"logit_soft_cap": 1.5},
    "class_weights": {"class_weights": np.array([0.5, 1.0, 2.0, 0.25, 3.0])},
    "token_scaling": {"token_scaling": True},
    "where": {"where": np.array([[True, False, True], [True, True, True]])},
    "everything": {
        "label_smoothing": 0.2,
        "z_loss": 0.05,
        "logit_soft_cap": 1.5,
        "class_weights": np.array([0.5, 1.0, 2.0, 0.25, 3.0]),
        "token_scaling": True,
        "where": np.array([[True, True, True], [True, True, False]]),
    },
}


@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "normalizer"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_central_differences(name, reduction, layout):
    """Every entry of every gradient, for a cotangent that is not one."""
    problem = _problem(layout)
    options = dict(OPTIONS[name], w_layout=layout)
    options["reduction"] = "mean" if reduction == "normalizer" else reduction
    if reduction == "normalizer":
        options["normalizer"] = 3.5
    cotangent = np.random.default_rng(1).normal(size=SHAPE) if reduction == "none" else -1.7
    frozen = oracle.detached_scaling(**problem, **options)

    def value(changed):
        loss = oracle.evaluate(**changed, **options, detached_scaling=frozen).loss
        return float(np.sum(cotangent * loss))

    got = oracle.gradients(**problem, cotangent=cotangent, **options)
    for argument in ("x", "w", "bias", "weights", "temperature", "logit_scale"):
        base = np.asarray(problem[argument], float)
        expected = np.zeros_like(base)
        for index in np.ndindex(base.shape):
            if argument == "weights" and base[index] == 0:
                continue  # uncounted: a jump, whose gradient is 0 by definition
            sides = []
            for step in (STEP, -STEP):
                moved = base.copy()
                moved[index] += step
                sides.append(value({**problem, argument: moved}))
            expected[index] = (sides[0] - sides[1]) / (2 * STEP)
        np.testing.assert_allclose(
            getattr(got, argument), expected, rtol=2e-7, atol=2e-9, err_msg=argument
        )


def test_known_values():
    """Hand-checked numbers, so that value and gradient cannot be wrong together."""
    row = np.array([[1.0, 2.0, 3.0, 4.0]])
    eye, label = np.eye(4), np.array([0])
    for options, expected in [
        ({}, 3.440190),
        ({"label_smoothing": 0.1}, 3.290190),
        ({"logit_soft_cap": 2.0}, 2.076244),
        ({"z_loss": 0.01}, 3.637343),
        ({"bias": np.array([2.0, 0, 0, 0])}, 1.626523),
        ({"logit_scale": 0.5}, 2.287339),
        ({"temperature": 2.0}, 2.287339),
        ({"class_weights": np.array([3.0, 1, 1, 1]), "reduction": "sum"}, 10.320569),
        ({"class_weights": np.array([3.0, 1, 1, 1])}, 3.440190),
    ]:
        assert oracle.evaluate(row, eye, label, **options).loss == pytest.approx(expected, abs=1e-6)


def test_uncounted_and_bad_tokens():
    """Ignored rows are exact zeros even with NaN in them; a bad label is NaN in its own row
    only."""
    x = np.array([[1.0, 0.0], [np.nan, np.inf], [0.5, 0.5]])
    eye, labels = np.eye(2), np.array([0, -100, 7])
    truth = oracle.evaluate(x, eye, labels, reduction="none")
    assert truth.loss[0] == pytest.approx(0.313262, abs=1e-6)
    assert truth.loss[1] == 0.0
    assert np.isnan(truth.loss[2])
    assert truth.predictions.tolist()[1] == -1
    assert truth.lse[1] == 0.0
    got = oracle.gradients(x, eye, labels, np.array([1.0, 1.0, 0.0]), reduction="none")
    assert np.all(got.x[1] == 0.0)
    assert np.all(np.isfinite(got.w))
    assert np.all(np.isnan(oracle.gradients(x, eye, labels, np.ones(3), reduction="none").x[2]))
