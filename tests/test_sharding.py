"""Sharding on 8 fake devices, which a process must ask for before JAX starts: one for each file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAKE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
# Values do not need optimised programs; what is communicated is asserted of optimised ones.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
TIME_LIMIT_S = 600


@pytest.mark.slow
@pytest.mark.parametrize(
    "file,more",
    [
        ("check_contract.py", {}),
        ("check_communication.py", {}),
        ("check_in_forward.py", QUICK),
        ("check_refusals.py", QUICK),
        ("check_rows.py", QUICK),
        ("check_sharding.py", QUICK),
        ("check_active.py", QUICK),
    ],
)
def test_on_eight_devices(file, more):
    """The cases of one file of tests/multi, which say what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/multi/{file}"],
        cwd=ROOT,
        env=os.environ | FAKE | more,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
