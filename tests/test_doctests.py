"""The examples in the docstrings run, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import pallas_loss
import pallas_loss.nnx

OPTIONAL = ("pallas_loss.backends.triton", "pallas_loss.backends.mosaic")


def _modules():
    for found in pkgutil.walk_packages(pallas_loss.__path__, "pallas_loss."):
        if not found.name.startswith(OPTIONAL):
            yield found.name


def _examples(owner, name):
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(owner, name) if test.examples]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ["pallas_loss", *_modules()])
def test_docstring_examples(name):
    """Each example prints what it says."""
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def _public_functions():
    for module in (pallas_loss, pallas_loss.nnx):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            local = getattr(value, "__module__", "").startswith("pallas_loss")
            if local and not name.startswith("_") and inspect.isfunction(value):
                yield pytest.param(value, name, id=name)


@pytest.mark.parametrize(("function", "name"), list(_public_functions()))
def test_public_functions_have_an_example(function, name):
    """A formula and prose can be wrong in silence; an example cannot."""
    assert _examples(function, name), f"{name} has no runnable example"


def test_the_main_function_is_among_them():
    """The measure itself: the walk finds what it has to."""
    found = {p.id for p in _public_functions()}
    assert {"fused_linear_ce", "check_labels", "next_token_labels"} <= found
