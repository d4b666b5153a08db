"""Columns of a table: each cell by itself as text, number or date, and the type that the cells of some rows show."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from decimal import Context
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from ...files import needs
from .files import file_of, refuse, shown

MISSING = frozenset(  # spellings of a missing number or date, in small letters
    (
        *("?", "??", "-", "--", "---", ".", "..", "\\n", "na", "n.a.", "n.a", "n/a", "#n/a", "#na", "<na>"),
        *("nan", "-nan", "nat", "nil", "null", "(null)", "<null>", "none", "(none)", "unknown", "missing", "undefined"),
    )
)
FORMS = (  # of dates, as pandas.to_datetime takes them
    *("ISO8601", "%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"),
    *(f"{day}/%Y{time}" for time in ("", " %H:%M", " %H:%M:%S") for day in ("%d/%m", "%m/%d")),
)
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_GROUPS = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")  # 1,234.5
_COMMA = re.compile(r"[-+]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+),[0-9]+([eE][-+]?[0-9]+)?")  # 1234,5 and 1.234,5
_EITHER = re.compile(r"[-+]?[1-9][0-9]{0,2},[0-9]{3}")  # 1,234
_POINT = re.compile(r"[-+]?[1-9][0-9]{0,2}\.[0-9]{3}")  # 1.234
_CODE = re.compile(r"[-+]?0[0-9]+")
_YEAR = "([0-9]{4}|[0-9]{2})"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = re.compile(
    r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?"
    rf"([0-9]{{1,2}}([-./ ])[0-9]{{1,2}}\2{_YEAR}|[0-9]{{4}}([-./ ])[0-9]{{1,2}}\4[0-9]{{1,2}}|"
    rf"{_MONTH}[ -][0-9]{{1,2}},?[ -]{_YEAR}|[0-9]{{1,2}}\.?[ -]?{_MONTH},?[ -]?{_YEAR})([ T,].*)?",
    re.IGNORECASE,
)
_EXACT = Context(prec=10_000)
_FORMULA = re.compile(r"=[^=]*[A-Za-z]+[$(0-9]|#(REF|DIV/0|VALUE|NAME|NUM|NULL)[!?]")
MOST = 100  # categories of a column that get a feature each
FEW = 20  # distinct numbers of a column that may be categories
ALMOST = 0.9  # share of numbers or dates in a column, above which another text is an error


def point(text: str, commas: bool = False) -> str:
    """Return a number with a decimal comma or groups of digits as one with a point, another text as it is.

    `1,234` may be either: it has a decimal comma if `commas`, which is so in files whose separator is no comma.

    >>> [point(text) for text in ("2,5", "1.234,56", "1,234.56", "1,234", "1,2,3")]
    ['2.5', '1234.56', '1234.56', '1,234', '1,2,3']
    """
    if "," not in text:
        return text
    if _GROUPS.fullmatch(text) and ("." in text or text.count(",") > 1):
        return text.replace(",", "")
    if _COMMA.fullmatch(text) and (commas or not _EITHER.fullmatch(text)):
        return text.replace(".", "").replace(",", ".")
    return text


def number(text: str) -> float:
    """Return the number that a text is, else NaN; whole numbers with leading zeros are codes.

    >>> number("+1.5e3"), number("007"), number("1_000"), number("inf")
    (1500.0, nan, nan, inf)
    """
    try:
        return float("nan" if "_" in text or _CODE.fullmatch(text) else text)
    except ValueError:
        return float("nan")


def key(text: str) -> str:
    """Return the text by which categories, classes and listed values are compared: the value of a number.

    >>> [key(text) for text in ("1.50", "+5", "1e3", "-0.0", "12345678901234567890.10", "007", "TRUE", "b")]
    ['1.5', '5', '1000', '0', '12345678901234567890.1', '007', 'True', 'b']
    """
    if text.isdecimal() and text.isascii() and (text[0] != "0" or text == "0"):
        return text
    if _NUMBER.fullmatch(text):
        value = _EXACT.create_decimal(text).normalize(_EXACT)
        return "0" if not value else format(value, "f") if abs(value.adjusted()) < 40 else str(value)
    return text.capitalize() if text.lower() in ("true", "false") else text


def is_code(text: str) -> bool:
    """Return True for a whole number with leading zeros, such as a postcode.

    >>> is_code("007"), is_code("70")
    (True, False)
    """
    return _CODE.fullmatch(text) is not None


class Column:
    """A column of a table: the distinct cells as text, and numbers or dates of all rows.

    Args:
        frame: a table of `gat_pyg.data.tables.files`.
        name: the column.

    Values in `frame.attrs["missing"]` are missing in all columns.

    Example:
        >>> import pandas as pd
        >>> column = Column(pd.DataFrame({"a": ["2,5", "?", None, "2.50"]}), "a")
        >>> column.numbers, column.texts, column.keys
        (array([2.5, nan, nan, 2.5]), ['2.5', '?', '2.50'], ['2.5', '?', '2.5'])
    """

    def __init__(self, frame: Any, name: str) -> None:
        self.frame, self.name, self._series = frame, name, frame[name]
        kind = self._series.dtype.kind
        self.kind = "number" if kind in "iuf" else "date" if kind == "M" else "text"
        self.is_category = name in frame.attrs.get("categories", ())
        self._missing = {key(str(value)) for value in frame.attrs.get("missing", ())}

    @cached_property
    def _distinct(self) -> tuple[Any, list[str]]:
        codes, values = needs("pandas", "tables").factorize(self._series)
        commas = self.frame.attrs.get("commas", False)
        place: dict[str, int] = {}
        places = [
            place.setdefault(text, len(place)) if text and not (self._missing and key(text) in self._missing) else -1
            for text in (_text(value, commas) for value in values.tolist())
        ]
        return np.array([*places, -1])[codes], [*place]

    @property
    def codes(self) -> Any:
        """The position among `texts` of each row's cell, -1 where it is missing."""
        return self._distinct[0]

    @property
    def texts(self) -> list[str]:
        """The distinct cells without spaces at the ends, numbers with a decimal point."""
        return self._distinct[1]

    @cached_property
    def keys(self) -> list[str]:
        """The values of `texts` as `key` compares them."""
        return [*map(key, self.texts)]

    def of_rows(self, values: Sequence[Any], missing: Any) -> Any:
        """Return an array with the one of `values`, which belong to `texts`, of each row."""
        return np.array([*values, missing])[self.codes]

    def places(self, values: Sequence[str]) -> tuple[Any, str]:
        """Return the position in `values`, compared by `key`, of each row's cell, and one of the other cells as shown.

        The position is -1 of a missing cell, unless "" is among the values, and -2 of other cells.
        """
        place = {key(value): number for number, value in enumerate(values)}
        codes = self.of_rows([place.get(value, -2) for value in self.keys], place.get("", -1))
        others = (text for text, value in zip(self.texts, self.keys, strict=True) if value not in place)
        return codes, shown(next(others, ""))

    def refuse(self, texts: Collection[str], message: str) -> None:
        """Raise a ValueError as `gat_pyg.data.tables.files.refuse` if some of `texts` occur."""
        refuse(self.frame, self.of_rows([text in texts for text in self.texts], False), message)

    def counts(self, rows: Any) -> dict[str, int]:
        """Return the number of each of `texts` in some rows, a mask, if it is not 0."""
        codes = self.codes[rows]
        counts = np.bincount(codes[codes >= 0], minlength=len(self.texts)).tolist()
        return {text: count for text, count in zip(self.texts, counts, strict=True) if count}

    @cached_property
    def known(self) -> Any:
        """True for each row with a value, unless it is a spelling of a missing number."""
        if self.kind == "number":
            return ~np.isnan(self.numbers)
        return self.of_rows([text.casefold() not in MISSING for text in self.texts], False)

    @cached_property
    def numbers(self) -> Any:
        """The numbers of the rows, NaN if missing or none, float64 `[n]`."""
        if self.kind != "number":
            return self.of_rows([*map(number, self.texts)], np.nan)
        values = self._series.to_numpy(float, copy=True)
        values[np.isin(values, [*map(number, self._missing)])] = np.nan
        return values

    def dates(self, form: str) -> Any:
        """Return the dates of the rows in one of `FORMS` as days since 1970, NaN if missing or none, float64 `[n]`."""
        pd = needs("pandas", "tables")
        dates = self._series if self.kind == "date" else parsed(self.texts, form)
        days = (dates.dt.as_unit("us") - pd.Timestamp(0).as_unit("us")) / pd.Timedelta(days=1)  # ns end in 2262
        days = days.to_numpy(float, na_value=np.nan)
        return days if self.kind == "date" else self.of_rows(days, np.nan)


def parsed(texts: Sequence[str], form: str) -> Any:
    """Return the dates of texts as a pandas Series, NaT for those that do not have the form."""
    pd = needs("pandas", "tables")
    dates = pd.to_datetime(pd.Series(texts, dtype="str"), format=form, errors="coerce", utc=True)
    return dates.dt.tz_localize(None)


def _text(value: Any, commas: bool) -> str:
    if isinstance(value, str):
        return point(value.strip().replace("\u2212", "-"), commas)  # the minus of Unicode
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    return str(value).removesuffix(" 00:00:00")


# Types -------------------------------------------------------------------------------------------------


def check_cells(column: Column) -> None:
    """Raise a ValueError if a cell is a formula, belongs to a second header, or has a point among decimal commas."""
    frame, name = column.frame, column.name
    if column.kind != "text":
        return
    if name in column.texts:
        again = column.of_rows([text == name for text in column.texts], False)
        again[again] = (frame[again].astype("str") == [*frame.columns]).sum(axis=1) >= min(2, len(frame.columns))
        refuse(frame, again, f"{name} is {{{name}}}, as in the header. Delete this row: the file is two in one.")
    formulas = {text for text in column.texts if text[:1] in ("=", "#") and _FORMULA.match(text)}
    column.refuse(formulas, f"{name} is {{{name}}}, a formula. Save the table with its values.")
    if (points := {*filter(_POINT.fullmatch, column.texts)}) and any(map(_COMMA.fullmatch, frame[name].dropna())):
        problem = "whose point may divide thousands, since other cells have decimal commas"
        column.refuse(points, f"{name} is {{{name}}}, {problem}. Remove the point or write a comma.")


def kind_of(column: Column, rows: Any, is_category: bool = False) -> tuple[str, str]:
    """Return number, date or category, as the cells of some rows show, and the form of dates, "" if it is unknown.

    A column has numbers or dates if all cells are, except for spellings of missing ones such as `?` and `NA`.

    Raises:
        ValueError: if a few cells are other texts, or dates may begin with the day or the month.
    """
    if is_category or column.is_category:
        return "category", ""
    if column.kind != "text":
        return column.kind, FORMS[0] if column.kind == "date" else ""
    counts = {text: count for text, count in column.counts(rows).items() if text.casefold() not in MISSING}
    if not counts or any(map(is_code, counts)):
        return "category", ""
    total, texts = sum(counts.values()), [*counts]
    wrong = {text for text in texts if np.isnan(number(text))}
    is_mark = len(wrong) == 1 and len(texts) > FEW  # the only other text is likely a missing value
    if len(wrong) < len(texts) and sum(map(counts.__getitem__, wrong)) < (0.5 if is_mark else 1 - ALMOST) * total:
        _refuse_few(column, wrong, "number")
        return "number", ""
    if 2 * sum(map(counts.__getitem__, commas := {*filter(_EITHER.fullmatch, texts)})) > total:
        answers = "Write a decimal point or no comma, or name the column in categories"
        column.refuse(commas, f"{column.name} is {{{column.name}}}, whose comma may divide thousands. {answers}.")
    sample = texts[:: max(1, len(texts) // 100)]

    def are(like: Sequence[bool], share: float = ALMOST) -> bool:
        return bool(np.average(like, weights=[counts[text] for text in sample]) > share)

    have_digits = are([text[0].isdigit() for text in sample])
    likely = [form for form in FORMS if have_digits and are(parsed(sample, form).notna(), 0.5)]
    others = {form: {*compress(texts, parsed(texts, form).isna())} for form in likely}
    forms = [form for form in likely if not others[form]] or likely
    if len(forms) > 1:
        raise ValueError(
            f"{file_of(column.frame)}: {column.name} has dates such as {texts[0]}, which may begin with the day or the "
            f"month. Write the year first, as in 2025-12-31, or leave the column out: ignore=[{column.name}]."
        )
    if forms and (len(wrong := others[forms[0]]) <= 1 or sum(map(counts.__getitem__, wrong)) < (1 - ALMOST) * total):
        _refuse_few(column, wrong, "date")
        return "date", forms[0]
    return "date" if are([_DATE.fullmatch(text) is not None for text in sample]) else "category", ""


def _refuse_few(column: Column, wrong: Collection[str], kind: str) -> None:
    remedy = "Leave the field empty if it is unknown, list it in dataset.missing, or name the column in categories"
    column.refuse(wrong, f"{column.name} is {{{column.name}}}, expected a {kind}. {remedy}.")


def quantities(column: Column, kind: str, form: str, expected: str) -> Any:
    """Return the numbers of a column, or its dates as days since 1970, NaN where missing, float64 `[n]`.

    Raises:
        ValueError: if a value is another text or infinite.
    """
    values = column.dates(form) if kind == "date" else column.numbers
    is_other = column.kind not in ("text", kind)
    name, wrong = column.name, np.isnan(values) & column.known | is_other
    refuse(column.frame, wrong, f"{name} is {{{name}}}, expected a {kind}{expected}, or nothing.")
    finite = "expected a finite number. Leave the field empty if it is unknown"
    refuse(column.frame, np.isinf(values), f"{name} is {{{name}}}, {finite}.")
    return values
