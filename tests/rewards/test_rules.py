"""Several answers and tolerances: each rule of `Gold` on answers of our own, and the same through the grader."""

import pytest

from kv4rl.rewards import Gold, Grader
from kv4rl.rewards.answers import (
    assigned,
    bracketed,
    list_readings,
    plain_number,
    split_list,
    tidy,
    without_unit,
)
from kv4rl.rewards.boxes import closing_boxes
from kv4rl.rewards.cases import PATHOLOGICAL, PATHOLOGICAL_GOLD
from kv4rl.rewards.rules import how, matches


def near(*answers):
    return Gold(answers, absolute=1e-8)


def share(*answers):
    return Gold(answers, relative=1e-4)


NUMBERS = [
    (near("\\frac{7 \\sqrt{2}}{9}"), "1.0999438819", 1),  # 4e-11 away
    (near("\\frac{7 \\sqrt{2}}{9}"), "1.099944", 0),  # equal to Math-Verify, which rounds to six decimals
    (near("3.1"), "3.10000001", 1),
    (near("3.1"), "3.1000001", 0),
    (near("4e-9"), "3e-10", 1),
    (share("4e-9"), "3e-10", 0),
    (share("2.6e21"), "2.6 \\times 10^{21}", 1),
    (share("2.6e21"), "2.6002 \\cdot 10^{21}", 1),
    (share("2.6e21"), "2.601 \\cdot 10^{21}", 0),
    (share("2.6e21"), "2.6e21", 1),
    (share("2.6e21"), "E \\approx 2.6 \\times 10^{21} \\, \\mathrm{J\\,s^{-1}}", 1),
    (share("2.6e21"), "2.6 \\times 10^{21} \\text{ W} / \\text{m}^2", 1),
    (share("730"), "730 nm", 1),
    (share("730"), "730 x", 0),
    (share("-2./7"), "-\\frac{2}{7}", 1),
    (share("1e-6"), "10^{-6}", 1),
    (share("\\frac{3 \\pi}{4}"), "2.3562", 1),
    (share("np.arcsin(3/7)"), "\\arcsin(3/7)", 1),
    (share("2-3 i"), "2 - 3i", 1),
    (share("2-3 i"), "2 + 3i", 0),
    (share("1+i"), "\\sqrt{2} e^{i\\pi/4}", 1),
    (share("0"), "0", 1),
    (share("0"), "0.00001", 0),
    (near("31^{\\circ}"), "31", 1),
    (near("37.5%"), "37.5\\%", 1),
    (near("37.5%"), "\\frac{3}{8}", 1),
    (near("37.5%"), "37.5", 1),
    (near("37.5%"), "0.38", 0),
    (Gold(("6.3\\%",), absolute=0.1), "6.35", 1),
    (Gold(("6.3\\%",), absolute=0.1), "0.0631", 1),
    (Gold(("6.3\\%",), absolute=0.1), "0.1", 0),
    (near("3^{700}"), "9^{350}", 1),
    (near("3^{700}"), "3^{700} + 1", 0),
    (near("\\frac{60!}{2^{20}}"), "60! \\cdot 2^{-20}", 1),
    (near("54321"), "54,321", 1),
    (near("54321"), "54{,}321", 1),
    (near("58"), "57 \\text{ or } 58", 0),
    (near("58"), "I cannot say", 0),
    (Gold(("58",)), "58.000000001", 0),
]  # fmt: skip

LISTS = [
    (near("2", "5", "11"), "11, 2, 5", 1),
    (near("2", "5", "11"), "x = 2, 5, \\text{ and } 11", 1),
    (near("2", "5", "11"), "x_1 = 2, x_2 = 5, x_3 = 11", 1),
    (near("2", "5", "11"), "\\{2, 5, 11\\}", 1),
    (near("2", "5", "11"), "2, 5", 0),
    (near("2", "5", "11"), "2, 5, 11, 13", 0),
    (near("2", "2"), "2, 2", 1),
    (near("2", "2"), "2", 0),
    (near("36", "72", "108"), "36,72,108", 1),
    (near("7123", "20456"), "7,123 and 20,456", 1),
    (near("\\frac{5+\\sqrt{3}}{4}", "\\frac{5-\\sqrt{3}}{4}"), "\\frac{5 \\pm \\sqrt{3}}{4}", 1),
    (near("(4,1)", "(-4,1)", "(4,-1)", "(-4,-1)"), "(\\pm 4, \\pm 1)", 1),
    (near("(0,3)", "(0,-3)"), "(x,y) \\in \\{(0,3), (0,-3)\\}", 1),
    (near("10^{50}", "10^{1/50}"), "10^{0.02}, 10^{50}", 1),
    (near("f(x)=3-x", "f(x)=x"), "f(x) = x \\text{ or } f(x) = 3 - x", 1),
]  # fmt: skip

FORMULAS = [
    (near("(3,7)"), "(3, 7)", 1),
    (near("(3,7)"), "(7, 3)", 0),
    (near("(3,7)"), "[3, 7]", 0),
    (near("(3,7)"), "\\{3, 7\\}", 0),
    (near("(3,7)"), "x = 3, y = 7", 1),
    (near("(3,7)"), "(m, n) = (3, 7)", 1),
    (near("(\\frac{1}{3}, 7)"), "(0.3333333333, 7)", 1),
    (near("(-\\infty,-8)"), "x < -8", 1),
    (near("(-\\infty,-8)"), "(-\\infty, -8]", 0),
    (near("(-\\infty, 0) \\cup\\{5\\}."), "(-\\infty,0)\\cup\\{5\\}", 1),
    (near("(-\\infty, 0) \\cup\\{5\\}."), "(-\\infty,0)\\cup\\{6\\}", 0),
    (near("k \\geqslant 9"), "k \\ge 9", 1),
    (near("k \\geqslant 9"), "k > 9", 0),
    (near("f(x)=5 x"), "5x", 1),
    (near("f(x)=5 x"), "f(x) = 4x", 0),
    (near("f(x)=a x-b$, where $a$ and $b$ are whole"), "f(x) = ax - b", 1),
    (share("\\frac{3}{\\sqrt{5}} c"), "\\frac{3c}{\\sqrt{5}}", 1),
    (share("\\frac{3}{\\sqrt{5}} c"), "\\frac{3}{\\sqrt{5}}", 0),  # c is no unit here
    (share("\\frac{9}{4} m"), "\\frac{9m}{4}", 1),
    (share("z^{\\prime}+a z-b=0"), "z' + az = b", 1),
    (share("\\frac{d z}{d t}=a z+b"), "\\frac{dz}{dt} = b + az", 1),
    (share("\\frac{d z}{d t}=a z+b"), "\\frac{dz}{dt} = b - az", 0),
    (share("\\hbar \\omega+E_{1}"), "E_1 + \\hbar\\omega", 1),
    (share("L_{\\odot} / 5"), "\\frac{L_\\odot}{5}", 1),
    (share("AB=CDE"), "\\text{CDE} = \\text{AB}", 1),
    (share("AB=CDE"), "AB = CDF", 0),
    (share("\\frac{1}{3}(\\exp{b*t} - 1)"), "\\frac{e^{bt} - 1}{3}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "score"), NUMBERS + LISTS + FORMULAS)
def test_an_answer_scores_by_the_rules(gold, answer, score):
    assert matches(answer, gold) == bool(score)


def test_both_readings_of_the_grader_follow_the_rules():
    table = NUMBERS[::4] + LISTS[::4] + FORMULAS[::4]
    with Grader(workers=1) as grader:
        verdicts = grader.grade_many([(f"So the answer is $\\boxed{{{text}}}$.", gold) for gold, text, _ in table])
    assert [(v.verl, v.last_box, v.error) for v in verdicts] == [(score, score, None) for _, _, score in table]


def test_answers_may_have_a_box_each():
    gold = near("21", "34")
    responses = {
        "$\\boxed{21}$ and $\\boxed{34}$": (1, 1),
        "$x = \\boxed{21}$, $x = \\boxed{34}$.": (1, 1),
        "Not \\boxed{21}. I take it back, and say \\boxed{34}": (1, 0),  # verl's pattern merges bare boxes (cases.py)
        "$\\boxed{34}$": (0, 0),
    }
    with Grader(workers=1) as grader:
        verdicts = grader.grade_many([(text, gold) for text in responses])
    assert [(v.verl, v.last_box) for v in verdicts] == list(responses.values())


def test_pathological_answers_score_zero_against_a_gold_too():
    gold = near(PATHOLOGICAL_GOLD, "3")
    with Grader(workers=1, timeout_s=2.0) as grader:
        verdicts = grader.grade_many(
            [(text, gold) for name, text in PATHOLOGICAL if name in ("tower of exponents", "many digits")]
        )
    assert [(v.verl, v.last_box) for v in verdicts] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"answers": ()}, "answers"), ({"answers": ("1", " ")}, "answers"), ({"answers": (1,)}, "answers"),
     ({"answers": ("1",), "absolute": 1e-8, "relative": 1e-4}, "relative"),
     ({"answers": ("1",), "absolute": -1.0}, "absolute")],
)  # fmt: skip
def test_a_gold_that_makes_no_sense_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        Gold(**fields)


def test_a_gold_of_another_type_is_refused():
    with Grader(workers=1) as grader, pytest.raises(ValueError, match="gold=58"):
        grader.submit("key", "\\boxed{58}", 58)


def test_text_is_taken_apart():
    assert tidy("$\\left( 1,\\, 2 \\right)$.") == "( 1, 2 )"
    assert split_list("(1,2), [3,4) and \\{5,6\\}") == ["(1,2)", "[3,4)", "\\{5,6\\}"]
    assert list_readings("1,234") == [["1", "234"], ["1234"]]
    assert assigned("f(x) = 2x") == "2x" and assigned("x + y = 2") == "x + y = 2"
    assert bracketed("(1, (2, 3)]") == ("(", ["1", "(2, 3)"], "]") and bracketed("(1,2) \\cup (3,4)") is None
    assert without_unit("5 \\text{ m}") == "5" and without_unit("5\\mathrm{e}") == "5\\mathrm{e}"
    assert plain_number("-2.5 \\times 10^{3}") == -2500 and plain_number("2x") is None
    assert closing_boxes("\\boxed{0}. Now $\\boxed{1}$ and $\\boxed{2}$.") == ["1", "2"]


def test_how_an_answer_is_compared():
    answers = {"2.6e21": "number", "(1, \\sqrt{2})": "number", "2 n+1": "formula", "(a, 1)": "formula"}
    assert {text: how(text) for text in answers} == answers
    assert how("\\mho \\notin") == "spelling"
