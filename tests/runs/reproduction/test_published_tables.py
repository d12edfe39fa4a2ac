"""The quick profile of every label table, with the numbers that must hold."""

from fnmatch import fnmatchcase

import pytest

from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.reproduce import reproduce
from dosimeter.runs.reproduction.tables import read_table, table_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PAPERS = {"ilrg", "thesis", "soft-labels", "hfginv"}
EXACT = "label_l1_below_0.001"
AT_LEAST = {  # table -> (rows, column, quantity, least)
    "ilrg/table1": [
        ("LeNet-5*", "ilrg", "leacc", 1.0),
        ("LeNet-5*", "ilrg", "lnacc", 0.99),
        ("*ImageNet", "ilrg", "lnacc", 0.99),
        ("FCN-3*", "ilrg", "leacc", 0.97),
        ("LeNet-5 with Swish*", "rlg", "leacc", 0.99),
    ],
    "ilrg/figure3": [("LeNet-5*24", "ilrg", "lnacc", 0.99), ("ResNet*", "ilrg", "leacc", 0.99)],
    "ilrg/table5": [("untrained, batch 24", "ilrg", "count_8", 22), ("untrained, batch 72", "ilrg", "count_8", 70)],
    "ilrg/figure5": [("untrained*none", "ilrg", "lnacc", 0.99)],
    "thesis/table3-2": [("MNIST*", "posterior", "insacc", 0.99), ("CIFAR-10,*", "posterior", "insacc", 0.99)],
    "thesis/table3-3": [("*", "posterior", "insacc", 1.0)],
    "thesis/table3-4": [("*", "posterior", "insacc", 0.99)],
    "thesis/table3-5": [("*", "posterior", "insacc", 0.94)],
    "thesis/table4-1": [
        ("*LeNet, sampler random", "gradient_bridge", "insacc", 0.81),
        ("*AlexNet, sampler random", "gradient_bridge", "insacc", 0.86),
        ("*VGG11, sampler random", "gradient_bridge", "insacc", 0.84),
        ("*ResNet18, sampler random", "gradient_bridge", "insacc", 0.90),
    ],
    "soft-labels/table2": [("*", "soft_scalar", EXACT, 0.97)],
    "hfginv/figure4a": [("* 20 labels", "exact", "insacc", 1.0)],
    "soft-labels/table5": [
        ("Gaussian, * 0.0*1", "swarm", "scalar_error_below_1", 0.9),
        ("Laplace, * 0.0*1", "swarm", "scalar_error_below_1", 0.9),
    ],
}
LAWS = {"thesis/figure4-3": 3, "thesis/figure4-6": 1, "thesis/figure4-7": 2}  # table -> how many laws must hold
AT_MOST = {"ilrg/table1": [("LeNet-5 with Swish*", "gradinversion", "leacc", 0.5)]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("key", sorted(key for key in table_files() if key.split("/")[0] in PAPERS))
def test_quick_profile(key, shared_data, cache):
    result = reproduce(read_table(key, quick=True), Library(data=shared_data, cache=cache))
    measured = {(cell.row, cell.column, cell.quantity): cell.measured for cell in result.cells if cell.measured is not None}
    assert not [cell for cell in result.cells if cell.verdict == "refused"]
    for bounds, sign in ((AT_LEAST.get(key, []), 1), (AT_MOST.get(key, []), -1)):
        for rows, column, quantity, bound in bounds:
            values = {row: v for (row, c, q), v in measured.items() if c == column and q == quantity and fnmatchcase(row, rows)}
            assert values, f"no row {rows!r} has {quantity} of {column}"
            assert all(sign * (value - bound) >= -1e-9 for value in values.values()), values
    assert sum(law.verdict == "reproduced" for law in result.laws) >= LAWS.get(key, 0)
