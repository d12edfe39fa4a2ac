import fnmatch

import pytest

from dosimeter.cli import main
from dosimeter.options import OptionError
from dosimeter.runs.reproduction import tables
from dosimeter.runs.reproduction.quantities import check_quantity
from dosimeter.runs.reproduction.tables import parse_table, read_table, table_files

PAPERS = {"ilrg", "thesis", "soft-labels", "hfginv"}


def test_a_row_is_defaults_then_its_own_keys_then_the_quick_ones(small):
    small["rows"][0] |= {"repeats": 7, "tolerance": 0.5, "quick": {"tolerance": 0.1, "departures": ["looser"]}, "departures": ["own"]}
    full, quick = parse_table(small, "a/b"), parse_table(small, "a/b", quick=True)
    assert (full.rows[0].repeats, full.rows[0].tolerance, full.rows[0].departures) == (7, 0.5, ("own",))
    assert (quick.rows[0].repeats, quick.rows[0].tolerance, quick.rows[0].departures) == (2, 0.1, ("own", "looser"))
    assert (full.departures, quick.departures) == (("a test",), ("a test", "2 batches"))
    assert full.rows[1].repeats == 3
    assert full.rows[0].data.name == "digits"


def test_a_varied_row_becomes_one_row_a_value_with_its_own_number(small):
    rows = parse_table(small, "a/b").rows[1:]
    assert [(row.name, row.data.batch_size, row.published["ilrg"]["leacc"]) for row in rows] == [
        ("other, batch size 2", 2, 1.0),
        ("other, batch size 8", 8, 0.5),
    ]
    small["rows"][1]["quick"] = {"keep": [8]}
    assert [row.name for row in parse_table(small, "a/b", quick=True).rows] == ["digits", "other, batch size 8"]


def test_varied_tables_are_named_by_their_name_and_options(small):
    defenses = [[], ["sign"], [{"name": "pruning", "ratio": 0.5}, "sign"]]
    small["rows"] = [{"name": "digits", "vary": {"setting.defenses": defenses}}]
    rows = parse_table(small, "a/b").rows
    assert [row.name for row in rows] == ["digits, defenses none", "digits, defenses sign", "digits, defenses pruning ratio 0.5 and sign"]
    assert [len(row.methods["ilrg"].defenses) for row in rows] == [0, 1, 2]


def test_columns_choose_among_the_methods(small):
    small["rows"][0]["columns"] = ["idlg"]
    row = parse_table(small, "a/b").rows[0]
    assert (list(row.methods), row.published) == (["idlg"], {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, r"titel: no such key in a/b"),
        ({"rows": []}, r"rows: expected \[\[rows\]\] tables in a/b, got none"),
        ({"rows": 3}, r"rows: expected \[\[rows\]\] tables in a/b, got int"),
        ({"rows": [{"name": "x", "columns": ["zlg"]}]}, r"rows\[0\].methods: no column 'zlg'; there are: ilrg, idlg"),
        ({"rows": [{"name": "x", "published": {"zlg": {"leacc": 1.0}}}]}, r"no column 'zlg'"),
        ({"rows": [{"name": "x", "repeats": 0}]}, r"rows\[0\].repeats: expected a positive int, got 0"),
        ({"rows": [{"name": "x", "data": {"batchsize": 2}}]}, r"rows\[0\].data.batchsize: no such key; did you mean 'batch_size'"),
        ({"rows": [{"name": "x", "data": {"auxiliary": {}}}]}, r"either per_class or total"),
        ({"rows": [{"name": "x", "vary": {"repeats": [1, 2]}, "published": {"ilrg": {"leacc": [1.0]}}}]}, r"expected 2 numbers, got 1"),
        ({"laws": [{"says": "x", "quantity": "leacc", "column": "ilrg"}]}, r"laws\[0\]: expected one of at_least"),
    ],
)
def test_mistakes_are_named(small, change, message):
    with pytest.raises(OptionError, match=message):
        parse_table(small | change, "a/b")


def test_an_unknown_table_lists_those_that_there_are():
    with pytest.raises(FileNotFoundError, match=r"no such table; .*ilrg/table1"):
        read_table("ilrg/table9")


def test_a_key_of_no_paper_names_the_papers():
    with pytest.raises(FileNotFoundError, match=r"tables of .*thesis, such as hfginv/") as caught:
        read_table("nobody/table1")
    assert len(str(caught.value)) < 300


def test_a_table_of_ones_own_is_read_from_its_path(tmp_path):
    (tmp_path / "mine.toml").write_text('[[rows]]\nname = "x"\nrepeats = "many"\n')
    with pytest.raises(OptionError, match=r"mine.toml: rows\[0\]"):
        read_table(str(tmp_path / "mine.toml"))


def test_every_paper_of_the_label_issue_is_there():
    keys = set(table_files())
    wanted = {"ilrg/table1", "ilrg/figure3", "ilrg/table5", "ilrg/figure5", "hfginv/figure4a"}
    wanted |= {f"thesis/{name}" for name in ("table3-2", "table3-3", "table3-4", "table3-5", "figure3-4", "table4-1", "table4-2")}
    wanted |= {f"thesis/figure4-{number}" for number in (3, 5, 6, 7)} | {f"soft-labels/table{number}" for number in (1, 2, 5)}
    assert wanted <= keys


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("key", sorted(key for key in table_files() if key.split("/")[0] in PAPERS))
def test_every_table_is_sound(key, quick):
    table = read_table(key, quick=quick)
    assert table.title != key
    assert table.source
    assert table.published
    assert table.departures
    names = [row.name for row in table.rows]
    assert len(set(names)) == len(names)
    assert table.laws or any(row.published for row in table.rows)
    for row in table.rows:
        for quantity in (*row.show, *(quantity for numbers in row.published.values() for quantity in numbers)):
            check_quantity(quantity, key)
    for law in table.laws:
        matched = [row for row in table.rows if fnmatch.fnmatchcase(row.name, law.rows) and law.column in row.columns]
        assert matched, law.says
        assert all(rival in row.columns for row in matched for rival in law.above), law.says
    if quick:
        assert len(table.departures) > len(read_table(key).departures), "what the quick profile leaves out must be said"


def test_an_installation_without_tables_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path / "papers",))
    assert main(["reproduce"]) == 2
    assert capsys.readouterr().err == f"dosimeter: no tables, <paper>/<table>.toml, in {tmp_path / 'papers'}\n"
