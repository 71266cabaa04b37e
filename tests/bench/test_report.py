"""Tables and quantiles of benches."""

from ffn_faas.bench.report import quantiles, table


def test_quantiles_are_samples():
    assert quantiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert quantiles([float(i) for i in range(101)]) == (50.0, 99.0)


def test_a_table_aligns_columns_and_dashes_what_was_not_measured():
    lines = table([{"a": 1, "b": 12.345}, {"a": 100}], {"a": "tokens", "b": "us"}).splitlines()
    assert lines[0] == "tokens    us"
    assert lines[2:] == ["     1  12.3", "   100     -"]
