"""The codec: what goes in comes out, what must not pass does not, and nothing that arrives can hurt."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pickle
import sys
import zoneinfo
from collections import OrderedDict
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlm.repl.worker import codec
from asyncrlm.repl.worker.records import Record

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(alphabet=st.characters(categories=["Cs", "Lu"]))
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(dt.UTC) | st.just(dt.timezone(dt.timedelta(hours=-3, seconds=7))))
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.uuids()
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9))
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "v", "a"]), inner, max_size=3)
    ),
    max_leaves=15,
)


def same(left: Any, right: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(map(same, left.items(), right.items()))
    return left == right


@settings(max_examples=150, deadline=None)
@given(values)
def test_values_come_back_through_the_hosts_parser_and_ours(value: Any) -> None:
    line = json.dumps(codec.encode(value), allow_nan=False)
    assert line.isascii()
    assert same(codec.decode(json.loads(line)), value)
    assert same(codec.decode(msgspec.json.decode(line)), value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_floats(value: float) -> None:
    back = codec.decode(json.loads(json.dumps(codec.encode([value]), allow_nan=False)))
    assert repr(back) == repr([value])


class Level(IntEnum):
    HIGH = 3


class Ratio(float):
    pass


class Word(str):
    __slots__ = ()


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (Level.HIGH, 3),
        (Ratio(0.5), 0.5),
        (Word("x"), "x"),
        (OrderedDict(a=1), {"a": 1}),
        ({Word("k"): 1}, {"k": 1}),
        (bytearray(b"x"), b"x"),
    ],
)
def test_subclasses_come_back_as_their_base(value: Any, base: Any) -> None:
    assert same(codec.decode(codec.encode(value)), base)


class Colour(enum.Enum):
    RED = "red"


class Person(msgspec.Struct):
    name: str
    age: int = 3


@dataclasses.dataclass
class Place:
    where: Any
    kind: Colour = Colour.RED


def test_objects_with_named_fields_come_back_as_records() -> None:
    for value in (Person("Ann"), Place([Person("Ben", 4)]), Place({"in": Pair(1, 2)})):
        back = codec.decode(json.loads(json.dumps(codec.encode(value))))
        assert type(back) is Record
        assert codec.decode(codec.encode(back)) == back == copy.deepcopy(back) == pickle.loads(pickle.dumps(back))
        assert repr(back) == repr(codec.decode(codec.encode(back)))
        assert list(back) == [field.name for field in dataclasses.fields(value)] if isinstance(value, Place) else True
    person = codec.decode(codec.encode(Person("Ann")))
    assert (person.name, person["age"], person) == ("Ann", 3, {"name": "Ann", "age": 3})
    assert repr(person) == "Person(name='Ann', age=3)"
    person.age = 5
    assert person["age"] == person.copy().age == 5
    with pytest.raises(AttributeError, match="Person has no 'size'; it has name, age"):
        _ = person.size
    del person.age
    with pytest.raises(AttributeError, match="age"):
        del person.age
    place = codec.decode(codec.encode(Place(Pair(1, 2))))
    assert (place.kind, place.where, place.where.b, place.where._fields) == ("red", (1, 2), 2, ("a", "b"))
    assert repr(pickle.loads(pickle.dumps(place.where))) == "Pair(a=1, b=2)"
    assert repr(codec.decode(codec.encode(place.where))) == "Pair(a=1, b=2)"
    with pytest.raises(AttributeError, match="c"):
        _ = place.where.c


def test_strict_encoding_refuses_what_would_change_its_type() -> None:
    for value in (Person("Ann"), Place(1), Colour.RED):
        with pytest.raises(TypeError, match="can't be sent"):
            codec.encode([value], strict=True)
    assert codec.encode(Pair(1, 2), strict=True) == {"$": "tuple", "v": [1, 2]}
    ring: Any = Place(None)
    ring.where = [ring]
    with pytest.raises(ValueError, match="contains itself"):
        codec.encode(ring)


def test_times_keep_their_zone_and_which_of_two_equal_hours_they_are() -> None:
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    for moment in (
        dt.datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=1),
        dt.datetime(2026, 10, 25, 2, 30, tzinfo=zone),
        dt.datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001 -- such are sent too
    ):
        back = codec.decode(json.loads(json.dumps(codec.encode(moment))))
        assert (back, back.fold, back.tzinfo, back.utcoffset()) == (
            moment,
            moment.fold,
            moment.tzinfo,
            moment.utcoffset(),
        )
    form = codec.encode(dt.datetime(2026, 7, 1, tzinfo=zone))
    form["v"][2] = "No/Where"
    assert codec.decode(form).utcoffset() == dt.timedelta(hours=2)


loop: list[Any] = []
loop.append({"in": loop})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ({"a": [1, object()]}, TypeError, r"args\['a'\]\[1\]: a value of type object can't be sent"),
        ([print], TypeError, r"args\[0\]: .*builtin_function_or_method"),
        ({(1, 2): decimal.Context()}, TypeError, r"args\[tuple\]: .*decimal.Context"),
        ({3: object()}, TypeError, r"args\[3\]"),
        (loop, ValueError, r"args\[0\]\['in'\]: contains itself"),
        (nested(codec.MAX_DEPTH), ValueError, "nested deeper than"),
    ],
)
def test_refusals_name_the_path(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        codec.encode(value, "args")


def test_the_same_object_twice_is_no_cycle() -> None:
    part = [1]
    assert codec.encode([part, part]) == [[1], [1]]
    assert codec.decode(codec.encode(nested(codec.MAX_DEPTH - 1))) == nested(codec.MAX_DEPTH - 1)


TAGS = [
    "str",
    "bytes",
    "int",
    "float",
    "complex",
    "decimal",
    "datetime",
    "date",
    "time",
    "timedelta",
    "tuple",
    "set",
    "record",
    "row",
    "uuid",
    "range",
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0x", "-0x1", "="]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.fixed_dictionaries({"$": st.sampled_from([*TAGS, "frozenset", "dict", "code"]) | inner, "v": inner})
    ),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None)
@given(json_values)
def test_hostile_input_is_a_value_or_a_value_error(value: Any) -> None:
    try:
        back = codec.decode(value)
    except ValueError:
        return
    codec.encode(back)  # whatever came out is plain data


@pytest.mark.parametrize(
    "value",
    [
        {"$": "set", "v": [[1]]},
        {"$": "dict", "v": [[{"a": 1}, 2]]},
        {"$": "dict", "v": [[1, 2, 3]]},
        {"$": "dict", "v": {"a": 1}},
        {"$": "decimal", "v": "x"},
        {"$": "int", "v": "12"},
        {"$": "int", "v": 12},
        {"$": "timedelta", "v": [10**12, 0, 0]},
        {"$": "timedelta", "v": [0.5, 0, 0]},
        {"$": "date", "v": "2024-13-01"},
        {"$": "str", "v": "*"},
        {"$": "str", "v": "/w=="},
        {"$": "float", "v": "1"},
        {"$": "float", "v": []},
        {"$": "tuple"},
        {"$": "record", "v": ["x", [[1, 2]]]},
        {"$": "record", "v": [1, []]},
        {"$": "row", "v": ["x", ["a"], []]},
        {"$": "row", "v": ["x", [1], [1]]},
        {"$": "range", "v": [1, 2, 0]},
        {"$": "range", "v": [1, 2, 0.5]},
        {"$": "uuid", "v": "x"},
        {"$": "datetime", "v": ["2026-01-01", 2, None, ""]},
        {"$": "datetime", "v": ["2026-01-01", 0, "../../etc/passwd", "x"]},
        {"$": "tuple", "v": [], "w": 1},
        {"$": [], "v": 1},
        {1: 2},
        object(),
        nested(5000),
    ],
)
def test_malformed_values(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.decode(value)


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_keys_that_hash_alike_are_refused_before_they_are_told_apart(kind: Any) -> None:
    alike = [number * sys.hash_info.modulus for number in range(1, codec.MOST_ALIKE + 2)]
    assert codec.decode(codec.encode(kind(alike[:-1]))) == kind(alike[:-1])
    assert codec.decode(codec.encode(kind(range(10_000)))) == kind(range(10_000))
    with pytest.raises(ValueError, match="hash alike"):
        codec.decode(codec.encode(kind(alike)))
