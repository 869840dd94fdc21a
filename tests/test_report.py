import subprocess
import sys

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func.__main__ import main
from mfsdp_func.plans.plan import gather_plan
from mfsdp_func.report import GROUPS, format_table, owner_table, padding_table
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.buffers import FULL, ROWS


def rows_of(table: str, first: str) -> list[list[str]]:
    """The figures of the lines that begin with `first`."""
    return [line[len(first) :].split() for line in table.splitlines() if line.startswith(first)]


def test_format_table() -> None:
    assert format_table(["a", "bc"], [["long", 1], ["", 234]]) == "a      bc\nlong    1\n      234"


class TestPadding:
    def test_all_groups_and_ranks(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["padding"]) == 0
        table = capsys.readouterr().out
        for name in GROUPS:
            assert [row[1] for row in rows_of(table, name)] == ["2", "8", "64", "512"]
        coprime = rows_of(table, "coprime rows")
        assert coprime[0] == ["30,632", "2", "104,525.91", "1.07", "1.07", "1.00", "1.07", "1.00"]
        experts = rows_of(table, "8 experts")
        assert experts[3] == ["352,321,536", "512", "42.67", "42.67", "42.67", "42.67", "1.00", "1.00"]
        for row in rows_of(table, "GPT-2 whole") + rows_of(table, "Llama-3 8B block"):
            assert float(row[4]) <= 1.01

    def test_figures_are_those_of_the_layouts(self) -> None:
        """Balanced and finer are never below their bounds, and a finer view is never worse."""
        for line in padding_table((8, 64)).splitlines()[2:]:
            _, _, balanced, bound, finer, finer_bound = (float(word.replace(",", "")) for word in line.split()[-6:])
            assert bound <= balanced
            assert finer_bound <= min(finer, bound)
            assert finer <= balanced

    def test_shapes_of_ones_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["padding", "--ranks", "3", "--shapes", "4x5", "7"]) == 0
        (row,) = rows_of(capsys.readouterr().out, "given")
        assert row[:2] == ["27", "3"]

    def test_gpt2_has_its_size(self) -> None:
        assert sum(torch.Size(shape).numel() for shape in GROUPS["GPT-2 whole"]) == 124_439_808
        assert sum(torch.Size(shape).numel() for shape in GROUPS["Llama-3 8B block"]) == 218_112_000
        assert sum(torch.Size(shape).numel() for shape in GROUPS["ResNet-50 stage 4"]) == 14_964_736


class TestPlan:
    def test_prints_layout_owners_and_pieces(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "8x4", "2x6", "3", "--ranks", "4", "--dtype", "bfloat16"]) == 0
        text = capsys.readouterr().out
        layout = mf.build_for_row_atomic([(8, 4), (2, 6), (3,)], 4)
        owners = GroupOwnerLayout.from_params(Mesh(4), layout)
        assert str(gather_plan(owners, "")) in text
        assert "buffer of 48 elements; 48 elements stored for 47 on 4 ranks" in text
        assert rows_of(text, "0       (8, 4)") == [["0", "32"]]
        assert rows_of(text, "3         36") == [["48", "12"]]
        assert rows_of(text, "all") == [["2", "2", "20", "40", "2", "20", "40"]]
        assert rows_of(text, "0        0") == [["3.34", "2", "20", "40", "0", "0", "0"]]

    def test_owners_by_hand(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "4x2", "4x2", "--ranks", "2", "--layout", "unpadded", "--owners", "1", "-1"]) == 0
        assert rows_of(capsys.readouterr().out, "all") == [["1", "1", "8", "32", "1", "8", "32"]]

    @pytest.mark.parametrize("layout", ["padded", "unpadded", "balanced"])
    def test_every_layout_and_no_warning(self, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "8x769", "8x1021", "--ranks", "2", "--layout", layout, "--block-size", "2"]) == 0
        assert "gather on Mesh" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["4x2", "--ranks", "2", "--owners", "5"], "given owner 5"),
            (["4x2", "--ranks", "2", "--owners", "0", "1"], "1 shapes but 2 owners"),
            (["3x2", "--ranks", "2", "--block-size", "2"], "3 rows, no multiple of block_size 2"),
            (["4x0", "--ranks", "2"], "only dim 0 may be zero"),
            (["4x2", "--ranks", "0"], "dp_size must be positive"),
        ],
    )
    def test_refused(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["axb", "--ranks", "2"], "'axb' is no shape; write dims joined by x"),
            (["4x2", "--ranks", "2", "--dtype", "float99"], "'float99' is no torch dtype"),
            (["4x2"], "--ranks"),
        ],
    )
    def test_misspelt(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["plan", *arguments])
        assert message in capsys.readouterr().err


def test_owner_table_counts_replica_groups() -> None:
    """Each replica group gathers within itself, so that owners stand for their shard coordinates."""
    mesh, layout = Mesh((2, 2), ranks=(3, 1, 0, 2)), mf.build_for_row_atomic([(4, 3)], 2)
    table = owner_table(GroupOwnerLayout(mesh, layout, {0: 1}, [FULL, ROWS]), torch.float64)
    for rank, owns in ((3, "-"), (1, "0"), (0, "-"), (2, "0")):
        (row,) = rows_of(table, f"{rank} ")
        received, sent = (["1", "6", "48"], ["0", "0", "0"]) if owns == "0" else (["0", "0", "0"], ["1", "6", "48"])
        assert row == [owns, "2.00" if owns == "0" else "0.00", *received, *sent]


def test_module_runs() -> None:
    command = [sys.executable, "-m", "mfsdp_func", "plan", "4x2", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "gather on Mesh" in done.stdout
