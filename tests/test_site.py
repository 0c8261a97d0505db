"""The documentation site builds without a warning, and what its pages show is so."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
sys.path.insert(0, str(ROOT / "tools" / "site"))

import docstrings  # noqa: E402
import hooks  # noqa: E402

import pallas_loss  # noqa: E402
import pallas_loss.nnx  # noqa: E402
from benchmarks import scaling  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_it_has_every_page_and_every_public_name(site):
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES} <= built
    assert {Path("notebooks") / n.stem for n in (ROOT / "notebooks").glob("*.ipynb")} <= built
    reference = "".join(page.read_text() for page in site.glob("api/*.html"))
    names = [f"pallas_loss.{name}" for name in pallas_loss.__all__]
    for name in [*names, "pallas_loss.nnx.LMHead", "pallas_loss.nnx.next_token_labels"]:
        assert f'id="{name}"' in reference, f"{name} is not in the reference"


def test_nothing_is_left_unfilled(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(
            r"&lt;!-- (include|results|plans|scaling)|<!-- (include|results|plans|scaling)", text
        )


def test_every_argument_is_described_in_the_reference(site):
    """One row for each argument, also of those that a docstring describes together."""
    reference = (site / "api" / "linear.html").read_text()
    section = reference.split('id="pallas_loss.fused_linear_logprob"')[1]
    for name in ("x", "bias", "implementation", "temperature", "entropy"):
        assert re.search(rf"<code>{name}</code>\s*</td>", section), name


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_the_pages(page):
    """The examples print what they say."""
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert failed == 0


def test_some_pages_have_examples():
    parser = doctest.DocTestParser()
    have = [page.name for page in PAGES if parser.get_examples(page.read_text())]
    assert {"semantics.md", "optax.md", "verl.md", "extend.md"} <= set(have)


@pytest.mark.parametrize("module", [docstrings])
def test_the_tools_do_what_they_say(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0


def test_included_files_link_to_pages():
    text = hooks.included("README.md", "guide/page.md")
    assert "](../measured.md)" in text and "](../extend.md)" in text
    assert "](../plots/linear_ce_nvidia-h200_overview.png)" in text
    assert "](benchmarks/" not in text


def test_scaling_is_relative_to_one_device():
    files = sorted((ROOT / "benchmarks" / "results").glob("tensor_parallel*.json"))
    shares, *runs = sorted(scaling.read(files), key=lambda data: data["environment"]["gpus"])
    assert shares["environment"]["gpus"] == 1
    for workload in shares["workloads"].values():
        entry = workload["candidates"]["dp=1,tp=2 local"]["ce value_and_grad"]
        assert f"| 2 | {entry['ms']:.2f} | {entry['tflops_per_gpu']:.0f} |" in scaling.shards(
            shares
        )
    for data in runs:
        every = list(scaling.points(data))
        rows = scaling.markdown(data).splitlines()[2:]
        assert len([row for row in rows if row.startswith("|")]) == len(every) > 0
        for point, row in zip(every, rows, strict=False):
            assert f"| {point.ms:.2f} | {point.speed_up:.2f} |" in row


def test_the_plans_that_were_timed_are_in_the_table():
    table = hooks.plans_table()
    shown = {tuple(cell.strip() for cell in row.split("|")[1:4:2]) for row in table.splitlines()}
    assert {("linear_ce", "recompute"), ("linear_logprob", "stored")} <= shown
    with pytest.raises(FileNotFoundError, match="no results of nothing"):
        hooks.results_tables("nothing")
