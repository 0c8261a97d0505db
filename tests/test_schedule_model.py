"""The model of the B200's schedule: what it counts, on examples small enough to count by hand."""

import json
from dataclasses import replace

import pytest

from benchmarks import machine_code
from benchmarks import schedule_model as model
from pallas_loss.tuning import BlackwellConfig

# Two slices of 32 columns; the first has a branch with two instructions more, and the loop a way
# past the second slice, which does not read the tile.
LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDTM.x32 R4, tmem[UR4] ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/                   FADD2 R4, R4.F32x2.HI_LO, R8.F32 ;
        /*0040*/                   MUFU.EX2 R4, R4 ;
        /*0050*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   MUFU.EX2 R4, R4 ;
.L_x_3:
        /*0070*/              @!P1 BRA `(.L_x_1) ;
        /*0080*/                   LDTM.x32 R4, tmem[UR4+0x20] ;
        /*0090*/                   BRA.U UP0, `(.L_x_1) ;
        /*00a0*/                   EXIT ;
"""


def test_the_path_reads_the_whole_tile():
    """The cheaper branch, and not the way round that leaves columns unread."""
    counts = machine_code.tile_path(LOOP, 64)
    assert counts == {"LDTM.x32": 2, "BRA": 2, "MUFU.EX2": 1, "BRA.U": 1}


def test_a_block_with_one_tile_has_no_loop():
    """The way to the end counts instead."""
    straight = LOOP.replace("`(.L_x_1)", "`(.L_x_4)") + ".L_x_4:\n /*00b0*/ EXIT ;\n"
    assert machine_code.tile_path(straight, 64)["LDTM.x32"] == 2


def test_what_is_not_there_is_an_error():
    """A kernel that reads other tiles than it was asked about has changed its config."""
    with pytest.raises(ValueError, match="nothing reads 128 columns"):
        machine_code.tile_path(LOOP, 128)


def test_counts_of_a_launch():
    """74 pairs take 75 tiles in two rounds; each brings (128 + 128) x 64 x 2 bytes a block."""
    launch = model.Launch("any", 75 * 256, 256, 64, 1, 0, BlackwellConfig())
    counts = model.schedule(launch, {"MUFU.EX2": 10, "FADD2": 100})
    assert (counts["tiles"], counts["rounds"]) == (75, 2)
    assert counts["tail_efficiency"] == 75 / 148
    assert counts["product_clocks_per_tile"] == 512
    # 10 x 8 clocks of the exponential's pipe and 100 x 2 of the other, for two warps a scheduler.
    assert counts["epilogue_pipe_clocks_per_tile"] == {"exp": 160, "fma": 400, "alu": 0}
    assert counts["l2_to_smem_bytes"] == 75 * 2 * 32768
    assert counts["limiter"] == "tensor cores"
    alone = replace(launch, config=BlackwellConfig(collective=False, stages=3))
    assert model.schedule(alone, {})["limiter"] == "L2"


def test_the_page_shows_what_was_counted():
    """The tables of BLACKWELL.md are those of the result file, and the status stands there."""
    data = json.loads(model.RESULTS.read_text())
    text = model.PAGE.read_text()
    assert model.render(text, data) == text
    assert data["status"] in text
    assert list(data["workloads"]) == [w.shape for w in model.LINEAR]


def test_the_default_config_follows():
    """The form of a tile that waits least for L2 is the default, and the model's."""
    data = json.loads(model.RESULTS.read_text())
    best = min(data["forms"], key=lambda name: data["forms"][name]["L2 / products"])
    assert best == "two blocks, 256 columns"
    assert BlackwellConfig().collective and BlackwellConfig().block_n == 256
    assert data["forms"] == model.forms()
