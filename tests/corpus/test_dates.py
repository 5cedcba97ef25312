import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realmops.corpus.dates import find_dates
from realmops.corpus.languages import load_languages


def dates(text: str) -> list[str]:
    return [text[start:end] for start, end in find_dates(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He was born on 12 May 1999 in Oslo.", ["12 May 1999"]),
        ("On May 12th, 1999, it rained.", ["May 12th, 1999"]),
        ("the 4th of July, 1776", ["4th of July, 1776"]),
        ("On July 4 they met; on 5 July they left.", ["July 4", "5 July"]),
        ("2004-05-12 and 12/05/1999, also 12.05.2010.", ["2004-05-12", "12/05/1999", "12.05.2010"]),
        ("May 12–14, 1999", ["May 12–14, 1999"]),
        ("In May 1990, SEPTEMBER 1991 and Sept. 1992", ["May 1990", "SEPTEMBER 1991", "Sept. 1992"]),
        ("from 1914 to 1918", ["1914", "1918"]),
        ("the war (1939–45) and 1914-1918", ["1939–45", "1914-1918"]),
        ("the 1990s, the mid-1980s, the 1870's", ["1990s", "1980s", "1870's"]),
        ("the '90s, the 90s, the late 60s", ["'90s", "90s", "60s"]),
        ("19th century, the 5th century BC", ["19th century", "5th century BC"]),
        ("the 18th and 19th centuries, twentieth-century art", ["18th and 19th centuries", "twentieth-century"]),
        ("Caesar died in 44 BC, Pompeii in AD 79.", ["44 BC", "AD 79"]),
        ("It opened in 1888.", ["1888"]),
        ("Census (2001)", ["2001"]),
        ("1000", ["1000"]),
        ("2100", ["2100"]),
        ("The 2008 earthquake and the 2001 census", ["2008", "2001"]),
        ("in 1999 thousands left", ["1999"]),
        ("32 May 1999", ["May 1999"]),
        ("A 1990 study of 12/13/2001", ["1990", "12/13/2001"]),
    ],
)
def test_dates_are_found(text: str, expected: list[str]) -> None:
    assert dates(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "version 2.0.1, v1.1999, version 12.05.2010, Python 3.11",
        "call 555-1999 or +44 1632 960961 or (020) 1946 0958",
        "$1999, £ 1500, 1,999 men, 1999.5, 1500 dollars, USD 1500",
        "ISO 9001, ISO 1999, RFC 2045, page 1203, No. 1984",
        "It has 1500 soldiers and 2000 m of pipe, about 1200 people.", "10.12.2001.5 and 192.168.1999.1",
        "may 5 people go, the march of 10", "1999-13-45 and 13/13/2001", "999 and 2101", "in her 90s",
        "model-A1999 x1999 1999x", "at 19:45 on channel 12/13",
    ],
)  # fmt: skip
def test_other_numbers_are_not(text: str) -> None:
    assert dates(text) == []


@given(st.text("19 2-.,/MayJn'sthe0 th century", max_size=60))
def test_dates_are_in_order_without_overlap(text: str) -> None:
    end = 0
    for start, stop in find_dates(text):
        assert end <= start < stop <= len(text)
        assert any(character.isdigit() for character in text[start:stop]) or "century" in text[start:stop]
        end = stop


@pytest.mark.parametrize(
    ("unit", "language"),
    [
        *((unit, "en") for unit in ("1", "1999 ", "12 ", "May ", "1st ", "1-", "19th and ", "the ", "a", "12/", " ")),
        *((unit, "de") for unit in ("1", "1999 ", "12. ", "Mai ", "1-", "XIX ", "Jahrhundert ", "a", "12/", " ")),
        *((unit, "zh") for unit in ("1", "1999年", "12 ", "十", "世纪", " ")),
    ],
)
def test_time_is_linear(unit: str, language: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        start = time.process_time()
        find_dates(text, language)
        return time.process_time() - start

    assert seconds(200_000) < 40 * seconds(10_000) + 0.2  # 20 times the text; quadratic time would be 400 times


LOCAL = [
    ("de", "Am [12. Mai 1705] und am [1. Januar] im [Juli 1961]; seit [1871], um [1500], ([1922-26]); 1500 Menschen."),
    ("de", "Im [20. Jahrhundert], in den [1940er Jahren], [44 v. Chr.] und am [12.05.1999], Version 1.2.3, 1999 Euro."),
    (
        "es",
        "El [31 de agosto de 2009], en [mayo de 1968], en el [siglo XIX a. C.], el [5 de enero]; con 1500 soldados.",
    ),
    ("de", "Im Jahr 1999 12 Häuser, 12 1999 und 15; im Jahr [1999]."),
    ("fr", "Le [1er mai 1821], en [août 1914], au [XIXe siècle], en [52 av. J.-C.]; depuis [1945] il y a 1000 hommes."),
    ("it", "Il [2 giugno 1946], nel [marzo 1861], nel [XX secolo], nel [1492]; aveva 1200 navi."),
    ("pt", "Em [7 de setembro de 1822], em [abril de 1974], no [século XVI]; em [1500] havia 1200 navios."),
    ("nl", "Op [5 mei 1945], in [augustus 1914], in de [17e eeuw], in [1648]; met 1200 schepen."),
    (
        "ro",
        "La [1 decembrie 1918], în [mai 1877], în [secolul al XIX-lea], [28 mai 2012]; cele 5 mai mari; anul [1966].",
    ),
    ("ru", "[9 мая 1945] года, в августе [1914], в [XIX веке], в [1917] году; и 1200 кораблей."),
    ("zh", "[1949年10月1日]、[2006 年]、[公元前221年]、[20世纪70年代]、[十九世纪]、[3月5日]；1200人，2000年前。"),
    ("ja", "[1945年8月15日]、[20世紀]、[1990年代]に1200人。"),
    ("ko", "[1945년 8월 15일], [20세기], [1990년]에 1200명."),
    ("pl", "[11 listopada 1918], w maju [1945]; 3 lis, [3 lis 1999] i [3 lis.] roku."),
    ("it", "Vinse 3 set, poi 2 mar e 3 set. Il [3 set.] fu; [3 set 1990], [5 ott] e [set 1990], [3 set.], 3 set."),
    ("pt", "Ganhou 3 set, às 3 dez, 2 mar; em [3 set. de 1990], em [3 de set.] houve, em [5 fev] e [3 de set 1990]."),
    ("ca", "Eren 3 set i 3 des de; el [3 set. 1990], el [5 febr] i el [3 de gen.] va."),
    ("es", "Hay 3 mar y 3 mar. El [3 mar. 1990], el [5 abr], el [3 mar.] salió."),
    ("fr", "Les 3 sept nains, le [3 sept. 1990], le [3 sept.] il, le [3 juil]"),
    ("cs", "Dal 3 pro klub, 3 led a 3 pro. Dne [3. led.] byl."),
    ("fi", "Se oli 3. kesä. Nyt [3. kesä 1990] ja [3. kesäkuuta] oli."),
    ("tr", "Burada 3 kas ve 3 Ara var; [3 Ara 1990], [3 Ocak] günü."),
    ("uk", "Це 3 лист і 3 серп; [3 лист. 1990], [3 січня] був."),
    ("th", "วันที่ [5 ธันวาคม 1927]"),
]


@pytest.mark.parametrize(("language", "marked"), LOCAL, ids=[f"{code}{n}" for n, (code, _) in enumerate(LOCAL)])
def test_dates_of_a_language_are_found(language: str, marked: str) -> None:
    text = re.sub(r"[\[\]]", "", marked)
    assert [text[start:end] for start, end in find_dates(text, language)] == re.findall(r"\[(.*?)\]", marked)


def test_months_that_are_also_words_are_months() -> None:
    """A name that CLDR no longer has would do nothing: each makes a date with a year, and none without."""
    for code, known in load_languages().items():
        for word in known.also_words:
            assert find_dates(f"x 3 {word} 1999 y", code) == [(2, 9 + len(word))], (code, word)
            assert find_dates(f"x 3 {word} y", code) == [], (code, word)


def test_every_language_has_days_in_digits() -> None:
    for code in load_languages():
        assert find_dates("x 2004-05-12, 12.05.1999.", code)[:1] == [(2, 12)], code
