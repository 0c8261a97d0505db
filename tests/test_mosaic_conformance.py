"""The conformance suite for the kernels, in the interpreter.

Each part runs in a process of its own, under a time limit and with further tries, for the reason
that `test_mosaic_interpret.py` gives.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S, TRIES = 240, 3
PARTS = {
    "bfloat16, small": "bfloat16 and (tiny or offset) and not compute_bfloat16",
    "bfloat16, wide": "bfloat16 and (wide or peaked) and not compute_bfloat16",
    "bfloat16, long": "bfloat16 and long",
    "bfloat16, ragged": "bfloat16 and ragged and (none or everything) and not compute_bfloat16",
    "float16": "float16 and not bfloat16",
    "float32 parameters": "compute_bfloat16 or float32_parameters",
}
CASES = [("hopper", part) for part in PARTS]
# The epilogues are Hopper's too; what is Blackwell's own shows in any part.
CASES += [("blackwell", "bfloat16, ragged")]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "part"), CASES)
def test_the_kernels_conform(chip, part):
    """Against the float64 truth, by the rule of every other backend."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        "tests/test_conformance.py", "-k", PARTS[part],
    ]  # fmt: skip
    chosen = {"PALLAS_LOSS_TEST_BACKENDS": "mosaic_gpu", "PALLAS_LOSS_TEST_CHIP": chip}
    environment = {**os.environ, **chosen}
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment | {"NPROC": "32"}, capture_output=True,
                text=True, timeout=TIME_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout
        return
    pytest.fail(f"{part!r} did not end within {TIME_LIMIT_S} s, {TRIES} times over")
