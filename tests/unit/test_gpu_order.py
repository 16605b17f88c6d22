"""The order that GPU tests are run in."""

from types import SimpleNamespace

from tests.gpu.order import arranged, seconds_of


def item(name, **arguments):
    return SimpleNamespace(nodeid=name, callspec=SimpleNamespace(params=arguments))


OP = SimpleNamespace(name="conv")
ROUTES = [SimpleNamespace(name=name) for name in ("fast", "exact")]


def test_all_tests_are_there_and_each_process_begins_with_a_long_one():
    items = [item(f"short[{i}]") for i in range(20)] + [item(f"long[{i}]") for i in range(3)]
    order = [each.nodeid for each in arranged(items, 3, {"long": 30.0, "short": 1.0})]
    assert sorted(order) == sorted(each.nodeid for each in items)
    assert [order.index(f"long[{i}]") for i in range(3)] == [0, 7, 15]  # parts of 7, 8 and 8


def test_tests_of_a_route_are_together():
    items = [item(f"{test}[{route.name}]", op=OP, route=route) for test in "abc" for route in ROUTES]
    order = [each.nodeid for each in arranged(items, 2, {"b[exact]": 9.0})]
    assert order == ["a[exact]", "b[exact]", "c[exact]", "a[fast]", "b[fast]", "c[fast]"]


def test_a_group_that_fits_nowhere_is_divided():
    items = [item(f"a[{i}]", op=OP, route=ROUTES[0]) for i in range(5)]
    assert {each.nodeid for each in arranged(items, 4, {})} == {each.nodeid for each in items}


def test_seconds_of_a_run_are_averages_and_what_takes_long():
    rows = [
        {"test": "a[1]", "seconds": 2.0},
        {"test": "a[2]", "seconds": 20.0},
        {"test": "b", "seconds": 1.0},
    ]
    assert seconds_of(rows) == {"a": 11.0, "a[2]": 20.0}
