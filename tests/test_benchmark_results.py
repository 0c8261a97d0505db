"""What runs of the benchmarks leave behind: their files, merged, as tables and as plots."""

import json
import os
from collections import namedtuple

import jax
import pytest

from benchmarks import render, render_rows, rows, run, scaling, timeline
from benchmarks.candidates import suite
from benchmarks.results import PRODUCTS, table
from benchmarks.workloads import TINY

MODES = tuple(suite("linear_ce").modes)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What a run writes, with a candidate that does not exist among its own."""
    out = tmp_path_factory.mktemp("bench") / "run.json"
    words = ["--stages=jax,peak", "--workloads=tiny", "--repeats=3", "--commit=abc", f"--out={out}"]
    patch = pytest.MonkeyPatch()
    patch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    run.main([*words, "--candidates=pallas_loss,xla_f32,missing"])
    patch.undo()
    return out


def test_a_run_writes_times_with_all_that_made_them(results):
    data = json.loads(results.read_text())
    assert data["schema"] == 1 and data["suite"] == "linear_ce"
    assert data["settings"] == {"dtype": "bfloat16", "layout": "vh", "seed": 0}
    made_by = data["environment"]
    assert made_by["commit"] == "abc" and made_by["versions"]["jax"] == jax.__version__
    assert {"device", "python"} <= set(made_by)
    tiny = data["workloads"]["tiny"]
    assert (tiny["T"], tiny["H"], tiny["V"]) == (32, 16, 64)
    timed = {"ms", "p20_ms", "p80_ms", "n", "clock", "host_ms", "tflops", "run"}
    for name in ("pallas_loss", "xla_f32"):
        for mode, ratios in zip(MODES, ({"3", "4"}, {"1"}), strict=True):
            entry = tiny["candidates"][name][mode]
            assert timed | {"temp_bytes", "output_bytes"} <= set(entry)
            assert entry["p20_ms"] <= entry["ms"] <= entry["p80_ms"] and entry["n"] == 3
            assert entry["clock"] == "host" and entry["compile_s"] >= entry["lower_s"] > 0
            assert set(entry["over_gemms"]) == ratios
        gradients = tiny["candidates"][name]["value_and_grad"]
        assert gradients["distance_from"] == "xla_f32" and max(gradients["distance"]) < 1e-2
        assert 0.5 < gradients["value"] < 10
    assert timed <= set(tiny["candidates"]["gemms"]["dw"])
    assert "no candidate 'missing'" in tiny["candidates"]["missing"]["forward"]["error"]
    assert any("pallas_loss" in line for line in table(data))


def test_results_of_another_commit_are_not_mixed_in(results):
    args = run.arguments([f"--out={results}", "--commit=def"])
    with pytest.raises(SystemExit, match="--fresh"):
        run.open_store(args, "later")
    same = run.open_store(run.arguments([f"--out={results}", "--commit=abc"]), "later")
    assert not same.needs(TINY, "xla_f32", "forward") and same.needs(TINY, "missing", "forward")


def test_render_fills_the_readme_and_draws(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:linear_ce -->\nold\n<!-- /bench -->\nafter\n")
    words = [str(results), "--readme", str(readme), "--plots", str(tmp_path)]
    render.main(words)
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench") and text.endswith("<!-- /bench -->\nafter\n")
    assert "old" not in text and "| 32 x 16 x 64 |" in text and "commit abc" in text
    plots = {path.name.rpartition("cores_")[2] for path in tmp_path.glob("*.png")}
    assert plots == {"overview.png", "time.png", "memory_T.png", "memory_V.png"}
    render.main(words)
    assert readme.read_text() == text, "rendering again changes nothing"
    readme.write_text("no place\n")
    render.main(words)
    assert readme.read_text() == "no place\n" and "| 32 x 16 x 64 |" in capsys.readouterr().out


def test_losses_from_logits_have_a_table_too(tmp_path):
    out, readme = tmp_path / "rows.json", tmp_path / "README.md"
    words = ["--workloads=8x64", "--losses=ce,reverse_kl", "--candidates=pallas_loss,xla,missing"]
    rows.main([*words, "--repeats=2", "--commit=abc", f"--out={out}"])
    readme.write_text("<!-- bench:rows -->\n<!-- /bench -->\n")
    render.main([str(out), "--readme", str(readme), "--plots", str(tmp_path)])
    text = readme.read_text()
    assert "| 8 x 64 | cross-entropy |" in text and "| 8 x 64 | reverse KL |" in text
    assert "| XLA | yardstick |" in text and "commit abc" in text
    data = json.loads(out.read_text())["workloads"]["8x64"]["losses"]["ce"]
    entry = data["pallas_loss"]["value_and_grad"]
    rate = 2 * 8 * 64 * 2 / entry["ms"] / 1e6
    assert abs(entry["gb_per_s"] - rate) < 0.1 and max(entry["distance"]) < 1e-2
    assert "no candidate 'missing'" in data["missing"]["forward"]["error"]
    whole = json.loads(out.read_text())
    assert "forward" in render_rows.heads_and_rows(whole)[0]
    for candidates in whole["workloads"]["8x64"]["losses"].values():
        del candidates["pallas_loss"]["forward"]
    heads, lines = render_rows.heads_and_rows(whole)
    assert "forward" not in heads and all(len(line) == len(heads) for line in lines)


def test_later_results_replace_earlier_ones():
    def made(started, commit, modes):
        workload = {"T": 1, "H": 1, "V": 1, "candidates": {"c": modes}}
        header = {"suite": "s", "started": started, "settings": {}}
        environment = {"device": "d", "commit": commit, "versions": {}}
        return {**header, "environment": environment, "workloads": {"w": workload}}

    early = made("1", "a", {"forward": {"ms": 1.0, "compile_s": 9}, "value_and_grad": {"ms": 5.0}})
    late = made("2", "b", {"forward": {"ms": 2.0}, "value_and_grad": {"error": "out of memory"}})
    (whole,) = render.merged([late, early])
    modes = whole["workloads"]["w"]["candidates"]["c"]
    assert modes == {"forward": {"ms": 2.0, "compile_s": 9}, "value_and_grad": {"ms": 5.0}}
    assert whole["commits"] == ["a", "b"]


def test_runs_over_several_devices_are_merged(tmp_path):
    """What one measured of a shape stays beside what another did, and the later figure counts."""

    def write(started, commit, candidates):
        data = {
            "suite": "tensor_parallel", "started": started, "settings": {},
            "environment": {"device": "d", "gpus": 2, "commit": commit},
            "workloads": {"w": {"T": 1, "H": 1, "V": 1, "candidates": candidates}},
        }  # fmt: skip
        path = tmp_path / f"{commit}.json"
        path.write_text(json.dumps(data))
        return path

    early = write("1", "a", {"x": {"ce": {"ms": 1.0}, "kl": {"ms": 3.0}}})
    late = write("2", "b", {"x": {"ce": {"ms": 2.0}}, "y": {"ce": {"ms": 4.0}}})
    (whole,) = scaling.read([late, early])
    candidates = whole["workloads"]["w"]["candidates"]
    assert candidates == {"x": {"ce": {"ms": 2.0}, "kl": {"ms": 3.0}}, "y": {"ce": {"ms": 4.0}}}
    assert whole["commits"] == ["a", "b"]


def test_a_speed_up_is_over_one_device_of_the_same_run():
    def entry(ms, **more):
        return {"ce value_and_grad": {"ms": ms, "temp_bytes": 0, **more}}

    def made(started, candidates):
        data = {"suite": "tensor_parallel", "started": started, "settings": {"dtype": "bfloat16"}}
        versions = {"jax": "0", "jax-cuda13-plugin": "0"}
        data["environment"] = {"device": "d", "driver": "0", "gpus": 2, "commit": started}
        data["environment"]["versions"] = versions
        return data | {"workloads": {"w": {"T": 1, "H": 1, "V": 1, "candidates": candidates}}}

    early = {"dp=1,tp=1 pallas_loss": entry(10.0, efficiency=1.0)}
    early["dp=1,tp=2 pallas_loss"] = entry(5.5, efficiency=10 / 11)
    late = {"dp=1,tp=1 pallas_loss": entry(8.0, efficiency=1.0)}  # a faster chip, another day
    (whole,) = scaling.merged([made("2", late), made("1", early)])
    one, two = scaling.points(whole)
    assert one.speed_up == 1 and two.speed_up == pytest.approx(10 / 5.5)
    assert "| 1 x 2 | 5.50 | 1.82 |" in scaling.markdown(whole)


def test_ratios_to_products_that_were_timed_one_by_one_have_a_star():
    def made(gemms):
        modes = {"value_and_grad": {"ms": 5.0, "over_gemms": {"1": 3.0, "3": 1.25}}}
        candidates = {"c": modes, "gemms": {name: {"ms": 1.0} for name in gemms}}
        header = {"suite": "linear_ce", "started": "1", "settings": {}}
        environment = {"device": "d", "commit": "a", "versions": {}}
        workload = {"T": 1, "H": 1, "V": 1, "candidates": candidates}
        (whole,) = render.merged(
            [{**header, "environment": environment, "workloads": {"w": workload}}]
        )
        return whole["workloads"]["w"]["candidates"]["c"]["value_and_grad"]

    for gemms, shown in ((("z", "dx", "dw"), "1.250*"), ((*PRODUCTS.values(),), "1.250")):
        entry = made(gemms)
        assert render.over_gemms(entry, "3") == shown
        assert render.over_gemms(entry, "1") == "3.000" and render.over_gemms(entry, "4") == ""


def test_a_training_step_has_a_table(tmp_path):
    sizes = {"batch": 8, "tokens_per_s": 12345, "gib": 1.5}
    data = {
        "suite": "train_step",
        "environment": {"device": "d", "commit": "abcdef"},
        "settings": {"layers": 4, "hidden": 64, "vocab": 512, "length": 16, "XLA_FLAGS": ""},
        "losses": {"auto": {"same_batch": sizes, "largest_batch": {"batch": 0}}},
    }
    path, readme = tmp_path / "step.json", tmp_path / "README.md"
    path.write_text(json.dumps(data))
    readme.write_text("<!-- bench:train_step -->\n<!-- /bench -->\n")
    render.main([str(path), "--readme", str(readme), "--plots", str(tmp_path)])
    assert "| auto | 8 | 12,345 | 1.5 | 0 | 0 | 0 |" in readme.read_text()
    del data["losses"]["auto"]["largest_batch"]  # a run that ended early
    assert "| auto | 8 | 12,345 | 1.5 |  |  |  |" in render.training_steps(data)


Line, Event = namedtuple("Line", "name events"), namedtuple("Event", "name start_ns duration_ns")


def test_what_of_the_communication_nothing_hides(tmp_path):
    product = Event("gemm", 1e6, 4e6)
    total = Event("ncclDevKernel_AllReduce", 3e6, 3e6)
    tail = Event("convert", 5.5e6, 2e6)
    lines = [
        Line("Stream #1", [product, tail]),
        Line("Stream #2", [total]),
        Line("XLA Ops", [Event("all of it", 0, 9e6)]),
    ]
    kernels = timeline.read(lines)
    assert [k.name for k in kernels] == ["gemm", "ncclDevKernel_AllReduce", "convert"]
    assert kernels[0].begin == 0 and kernels[1].communicates
    assert timeline.exposed(kernels) == pytest.approx(0.5)
    assert timeline.exposed([]) == 0
    data = {"suite": "timeline", "communication_ms": 3, "exposed_ms": 0.5, "kernels": kernels}
    data["settings"] = {"workload": "w", "loss": "ce", "mesh": "dp=1,tp=2"}
    recording, other = tmp_path / "timeline.json", tmp_path / "other.json"
    recording.write_text(json.dumps(data))
    other.write_text("{}")
    readme = tmp_path / "README.md"
    readme.write_text("")
    files = [str(recording), str(other)]
    render.main([*files, "--readme", str(readme), "--plots", str(tmp_path)])
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert not (tmp_path / "other.png").exists()
