"""Tests that are asserts, in many forms: right and wrong programs, and the process that runs the tests."""

# ruff: noqa: E501 (programs, a line each)

import math
from typing import Any

import pytest

from rpg.rewards import Problem, Reward, open_scorer
from rpg.rewards.asserts import _EXAMINERS
from rpg.rewards.score import Scorer

pytestmark = pytest.mark.needs("bubblewrap")

PLUS = """
import numpy as np

def is_floats(x):
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
"""
"""What HumanEval+ and MBPP+ have before their tests."""

Form = tuple[str, str, list[str], list[tuple[str, float]]]
"""Setup, function, tests, and programs with the share of tests that they pass."""

ON_VALUES: dict[str, Form] = {
    "eq": (
        "",
        "",
        ["assert f(2) == 4"],
        [
            ("def f(n): return n*2", 1.0),
            ("def f(n): return n*3", 0.0),
            ("def f(n): return 4.0", 1.0),
            ("f = lambda n: n+n", 1.0),
            ("def f(n): return '4'", 0.0),
        ],
    ),
    "true": (
        "",
        "",
        ["assert f(2) == True", "assert f(3) is True"],
        [("def f(n): return True", 1.0), ("def f(n): return 1", 0.5), ("def f(n): return n > 1", 1.0)],
    ),
    "none": (
        "",
        "",
        ["assert f(2) is None", "assert f(3) == None"],
        [("def f(n): pass", 1.0), ("def f(n): return 0", 0.0)],
    ),
    "not": (
        "",
        "",
        ["assert not f(2)", "assert f(3)"],
        [
            ("def f(n): return n == 3", 1.0),
            ("def f(n): return []", 0.5),
            ("def f(n): return [n] if n==3 else []", 1.0),
            ("import re\ndef f(n): return re.match('3', str(n))", 1.0),
        ],
    ),
    "isclose": (
        "import math",
        "",
        ["assert math.isclose(f(2), 0.3333, rel_tol=1e-3)", "assert abs(f(3) - 1) < 1e-6 or f(3) == 1/3"],
        [("def f(n): return 1/3", 1.0), ("def f(n): return n", 0.0)],
    ),
    "in": (
        "",
        "",
        ["assert f(2) in (1, 2, 3)", "assert 3 in f(3)"],
        [("def f(n): return n if n == 2 else [n]", 1.0), ("def f(n): return 7", 0.0), ("def f(n): return [n]", 0.5)],
    ),
    "setsorted": (
        "",
        "",
        ["assert set(f(2)) == {1, 2}", "assert sorted(f(3)) == [1, 2, 3]", "assert len(f(4)) == 4"],
        [
            ("def f(n): return list(range(n, 0, -1))", 1.0),
            ("def f(n): return (k+1 for k in range(n))", 0.667),
            ("def f(n): return {k+1 for k in range(n)}", 1.0),
            ("def f(n): return {k+1: 0 for k in range(n)}", 1.0),
            ("def f(n): return map(int, ['1','2','3','4'][:n])", 0.667),
            ("def f(n): return {k+1:0 for k in range(n)}.keys()", 1.0),
        ],
    ),
    "order": (
        "",
        "",
        ["assert f(2) < 5 <= f(5)", "assert f(1) != 3"],
        [("def f(n): return n", 1.0), ("def f(n): return 3", 0.0)],
    ),
    "many": (
        "",
        "",
        ["assert f(1) == 1 and f(2) == 2 and not f(3) == 4 and (f(4) == 0 or f(5) == 5)"],
        [("def f(n): return n", 1.0), ("def f(n): return 0", 0.0), ("def f(n): return n if n < 4 else 0", 1.0)],
    ),
    "tuple": (
        "",
        "",
        ["assert f(1, 2) == (1, 2)", "assert f([1], {'a': (1,)}) == ([1], {'a': (1,)})"],
        [
            ("def f(a, b): return a, b", 1.0),
            ("def f(a, b): return [a, b]", 0.0),
            ("from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(a, b): return P(a, b)", 1.0),
        ],
    ),
    "kinds": (
        "",
        "",
        [
            "assert f({1, 2}) == {1, 2}",
            "assert f(frozenset({1})) == {1}",
            "assert f(b'ab') == b'ab'",
            "assert f(1j) == 1j",
            "assert f({1: {2: (3,)}}) == {1: {2: (3,)}}",
            "assert f('\\ud800x') == '\\ud800x'",
            "assert f(10**400) == 10**400",
            "assert f(float('inf')) == float('inf')",
            "assert f(float('nan')) != f(float('nan'))",
        ],
        [("def f(x): return x", 1.0), ("def f(x): return None", 0.0)],
    ),
    "bigint": (
        "",
        "",
        ["assert f(20000) == 2**20000"],
        [("def f(n): return 2**n", 1.0), ("def f(n): return 2**n+1", 0.0)],
    ),
    "decimal": (
        "from decimal import Decimal",
        "",
        ["assert f('1.10') == Decimal('1.1')", "assert f('2') == 2"],
        [
            ("from decimal import Decimal\ndef f(s): return Decimal(s)", 1.0),
            ("from fractions import Fraction\ndef f(s): return Fraction(s)", 1.0),
            ("def f(s): return float(s)", 0.5),
        ],
    ),
    "counter": (
        "from collections import Counter",
        "",
        ["assert f('aab') == {'a': 2, 'b': 1}", "assert f('a') == Counter('a')"],
        [
            ("from collections import Counter\ndef f(s): return Counter(s)", 1.0),
            (
                "from collections import defaultdict\ndef f(s):\n d = defaultdict(int)\n for c in s: d[c] += 1\n return d",
                1.0,
            ),
            ("from collections import OrderedDict\ndef f(s): return OrderedDict((c, s.count(c)) for c in s)", 1.0),
            ("def f(s): return {c: 1 for c in s}", 0.5),
        ],
    ),
    "numpy": (
        "import numpy as np",
        "",
        [
            "assert np.allclose(f(3), [0, 1, 2])",
            "assert np.array_equal(f(2), np.array([0, 1]))",
            "assert (f(2) == np.arange(2)).all()",
            "assert f(4).shape == (4,)",
        ],
        [
            ("import numpy as np\ndef f(n): return np.arange(n)", 1.0),
            ("import numpy as np\ndef f(n): return np.arange(n, dtype='float32')", 1.0),
            ("def f(n): return list(range(n))", 0.75),
            ("import numpy as np\ndef f(n): return np.zeros(n)", 0.25),
        ],
    ),
    "humaneval": (
        'from typing import List\n\n\ndef has_close(n: List[float], t: float) -> bool:\n    """ doc """\n',
        "has_close",
        [
            "\nMETADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate([1.0, 2.0], 0.5) == False, \"text\"\n    assert candidate([1.0, 1.1], 0.5) == True\n    for k in range(5):\n        assert candidate([k, k + 1], 2) is True\ncheck(has_close)"
        ],
        [
            (
                "def has_close(n, t):\n    return any(abs(a-b) < t for i, a in enumerate(n) for j, b in enumerate(n) if i != j)",
                1.0,
            ),
            ("    return any(abs(a-b) < t for i, a in enumerate(n) for j, b in enumerate(n) if i != j)", 0.0),
            ("    return True", 0.0),
        ],
    ),
    "plus": (
        "",
        "",
        [
            PLUS
            + "\ninputs = [[k] for k in range(60)] + [[float(k)] for k in range(60)]\nresults = [k / 2 for k in range(60)] * 2\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(half(*inp), exp, 0)\n"
        ],
        [
            ("def half(n): return n / 2", 1.0),
            ("def half(n): return n * 0.50000000001", 1.0),
            ("def half(n): return n // 2", 0.0),
            ("import numpy as np\ndef half(n): return np.float64(n) / 2", 1.0),
        ],
    ),
    "pluscheck": (
        "def f(n):\n    '''x'''\n",
        "f",
        [
            PLUS
            + "\ndef ref_func(n):\n    return [n, [n]]\ndef check(candidate):\n    inputs = [[k] for k in range(20)]\n    for i, inp in enumerate(inputs):\n        assertion(candidate(*inp), ref_func(*inp), 0)\ncheck(f)\n"
        ],
        [("def f(n): return [n, [n]]", 1.0), ("def f(n): return (n, [n])", 0.0)],
    ),
    "findzero": (
        "import math\n\ndef poly(xs, x):\n    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n\ndef find_zero(xs):\n    '''doc'''\n",
        "find_zero",
        [
            "\ndef check(candidate):\n    import math, random, copy\n    rng = random.Random(42)\n    for _ in range(30):\n        coeffs = []\n        for _ in range(2 * rng.randint(1, 4) // 2):\n            coeffs.append(rng.randint(-10, 10)); coeffs.append(rng.randint(1, 10))\n        solution = candidate(copy.deepcopy(coeffs))\n        assert math.fabs(poly(coeffs, solution)) < 1e-4\ncheck(find_zero)\n"
        ],
        [
            (
                "def find_zero(xs):\n    b, e = -1., 1.\n    while poly(xs, b) * poly(xs, e) > 0:\n        b *= 2.0; e *= 2.0\n    while e - b > 1e-10:\n        c = (b + e) / 2.0\n        if poly(xs, c) * poly(xs, b) > 0: b = c\n        else: e = c\n    return b",
                1.0,
            ),
            ("def find_zero(xs): return 0.0", 0.0),
        ],
    ),
    "raises": (
        "",
        "",
        ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass", "assert f(1) == 1"],
        [
            ("def f(n):\n if n < 0: raise ValueError('x')\n return n", 1.0),
            ("class E(ValueError): pass\ndef f(n):\n if n < 0: raise E\n return n", 1.0),
            ("def f(n): return n", 0.5),
            ("def f(n): raise TypeError", 0.0),
        ],
    ),
    "vars": (
        "",
        "",
        ["x = f(3)", "assert x == 9", "y, z = f(2), f(1)\nassert y + z == 5"],
        [("def f(n): return n*n", 1.0), ("def f(n): return n", 0.333)],
    ),
    "gen": (
        "",
        "",
        [
            "assert list(f(3)) == [0, 1, 2]",
            "assert next(f(3)) == 0",
            "assert sum(f(3)) == 3",
            "for k in f(2):\n    assert k < 2",
            "a, *b = f(3)\nassert b == [1, 2]",
        ],
        [
            ("def f(n): yield from range(n)", 1.0),
            ("def f(n): return iter(range(n))", 1.0),
            ("def f(n): return range(n)", 0.8),
            ("def f(n): return iter([1] * n)", 0.4),
        ],
    ),
    "infinite": (
        "",
        "",
        ["assert [x for _, x in zip(range(3), f())] == [0, 1, 2]"],
        [("import itertools\ndef f(): return itertools.count()", 1.0), ("def f(): return [0, 1, 2]", 1.0)],
    ),
    "kwargs": (
        "",
        "",
        ["assert f(1, b=2) == 3", "assert f(*[1, 2]) == 3", "assert f(**{'a': 1, 'b': 2}) == 3"],
        [("def f(a, b): return a + b", 1.0), ("def f(a, b=0): return a", 0.0)],
    ),
    "state": (
        "",
        "",
        ["assert f() == 1", "assert f() == 2 and f() == 3"],
        [("n = 0\ndef f():\n global n\n n += 1\n return n", 1.0), ("def f(): return 1", 0.5)],
    ),
    "strings": (
        "",
        "",
        ["assert f('a\\nb') == 'a\\nb\\u2028'", "assert f('é') == 'é\\u2028'"],
        [("def f(s): return s + '\\u2028'", 1.0), ("def f(s): return s", 0.0)],
    ),
    "intenum": (
        "",
        "",
        ["assert f(1) == 1"],
        [
            ("import enum\nclass E(enum.IntEnum):\n A = 1\ndef f(n): return E.A", 1.0),
            ("class I(int):\n def __repr__(self): return 'x'\ndef f(n): return I(n)", 1.0),
        ],
    ),
    "strsub": (
        "",
        "",
        ["assert f('a') == 'a'"],
        [("class S(str):\n def __str__(self): return 'no'\ndef f(n): return S(n)", 1.0)],
    ),
    "date": (
        "import datetime",
        "",
        ["assert f(1) == datetime.date(2020, 1, 1)", "assert f(2) == datetime.date(2020, 1, 2)"],
        [
            ("import datetime\ndef f(n): return datetime.date(2020, 1, n)", 1.0),
            ("import datetime\ndef f(n): return datetime.datetime(2020, 1, n)", 0.0),
        ],
    ),
    "isinstance": (
        "",
        "",
        ["assert isinstance(f(1), list)", "assert type(f(1)) == list", "assert f(1) == [1]"],
        [("def f(n): return [n]", 1.0), ("def f(n): return (n,)", 0.0)],
    ),
    "method": (
        "",
        "",
        ["assert f(1).strip() == 'a'", "assert f(2)[0] == ' '", "assert f(1).count('a') == 1"],
        [("def f(n): return ' a '", 1.0), ("def f(n): return 'b'", 0.0)],
    ),
    "random": (
        "",
        "",
        ["assert f(1) >= 0", "assert all(0 <= f(k) < 1 for k in range(10))"],
        [("import random\ndef f(n): return random.random()", 1.0), ("def f(n): return 2", 0.5)],
    ),
    "deep": (
        "",
        "",
        ["x = f(200)\nn = 0\nwhile x: x = x[0]; n += 1\nassert n == 200"],
        [("def f(n):\n l = []\n for _ in range(n): l = [l]\n return l", 1.0), ("def f(n): return []", 0.0)],
    ),
    "listcomp": (
        "",
        "",
        [
            "assert [f(k) for k in range(4)] == [0, 2, 4, 6]",
            "assert all(f(k) == 2 * k for k in range(5))",
            "assert {k: f(k) for k in (1, 2)} == {1: 2, 2: 4}",
            "assert max(f(1), f(2), key=abs) == 4",
            "assert list(map(f, [1, 2])) == [2, 4]",
            "assert round(f(1.234), 1) == 2.5",
            "assert str(f(2)) == '4'",
        ],
        [("def f(n): return 2*n", 1.0), ("def f(n): return n", 0.0)],
    ),
    "main": (
        "",
        "",
        ["assert f(1) == 1"],
        [
            ("def f(n): return n\nif __name__ == '__main__':\n    print(f(2))", 1.0),
            ("def f(n): return n\nif __name__ == '__main__':\n    n = int(input())\n    print(f(2))", 0.0),
        ],
    ),
    "loops": (
        "",
        "",
        [
            "n = 0\nwhile f(n) < 50:\n    n += 1\nassert n == 5",
            "for k in range(3000):\n    assert f(k) == k * k + 25",
            "while True:\n    if f(n) > 1000:\n        break\n    n += 1\nassert n == 32",
        ],
        [("def f(n): return n * n + 25", 1.0), ("def f(n): return 2000 if n else 0", 0.0)],
    ),
}

BESIDE: dict[str, Form] = {
    "inplace": (
        "",
        "",
        ["a = [3, 1]\nf(a)\nassert a == [1, 3]"],
        [("def f(a): a.sort()", 1.0), ("def f(a): sorted(a)", 0.0)],
    ),
    "class": (
        "",
        "",
        ["s = Stack()\ns.push(3)\nassert s.pop() == 3", "assert Stack().n == 0"],
        [
            (
                "class Stack:\n def __init__(self): self.l=[]; self.n=0\n def push(self, x): self.l.append(x)\n def pop(self): return self.l.pop()",
                1.0,
            ),
            ("class Stack:\n n = 0\n def push(self, x): pass\n def pop(self): return 0", 0.5),
        ],
    ),
    "node": (
        "",
        "",
        ["root = Node(4)\nroot.left = Node(2)\nassert depth(root) == 2"],
        [
            (
                "class Node:\n def __init__(self, v): self.v=v; self.left=self.right=None\ndef depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))",
                1.0,
            ),
            ("class Node:\n def __init__(self, v): self.v=v; self.left=self.right=None\ndef depth(n): return 1", 0.0),
        ],
    ),
    "nested": (
        "",
        "",
        ["assert g(f(2)) == 5", "assert f(f(2)) == 8"],
        [
            ("def f(n): return n*2\ndef g(n): return n+1", 1.0),
            ("class N(int): pass\ndef f(n): return N(n*2)\ndef g(n): return n+1", 1.0),
            ("def f(n): return n\ndef g(n): return n+1", 0.0),
        ],
    ),
    "eqclass": (
        "",
        "",
        ["assert f(1) == P(1)", "assert f(1) != P(2)"],
        [
            (
                "class P:\n def __init__(self, a): self.a=a\n def __eq__(self, o): return self.a == o.a\ndef f(n): return P(n)",
                1.0,
            ),
            (
                "class P:\n def __init__(self, a): self.a=a\n def __eq__(self, o): return self.a == o.a\ndef f(n): return P(2)",
                0.0,
            ),
        ],
    ),
    "setupclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int",
        "",
        ["assert f(1) == P(1)"],
        [("def f(n): return P(n)", 1.0), ("def f(n): return P(2)", 0.0)],
    ),
    "builtin name": (
        "",
        "",
        ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"],
        [
            (
                "def sum(a,b):\n    s = 0\n    for i in range (1, min(a, b)):\n        if (a % i == 0 and b % i == 0):\n            s += i\n    return s",
                1.0,
            ),
            ("def sum(a, b): return 6", 0.5),
        ],
    ),
    "lambda": (
        "",
        "",
        ["assert f(lambda x: x + 1, 2) == 3", "assert f(len, 'ab') == 2"],
        [("def f(g, x): return g(x)", 1.0), ("def f(g, x): return x", 0.0)],
    ),
    "curried": (
        "",
        "",
        ["assert f(1)(2) == 3"],
        [("def f(a): return lambda b: a + b", 1.0), ("def f(a): return lambda b: a", 0.0)],
    ),
    "identity": (
        "",
        "",
        ["a = [1]\nassert f(a) is not a"],
        [("def f(a): return a[:]", 1.0), ("def f(a): return a", 0.0)],
    ),
    "module level": (
        "",
        "",
        ["assert X == 3", "assert f.__name__ == 'f'"],
        [("X = 3\ndef f(): pass", 1.0), ("X = 4\ndef f(): pass", 0.5)],
    ),
}


@pytest.fixture(scope="module")
def scorer() -> Any:
    options = {"type": "code", "extract": "whole", "credit": "share", "seconds_per_test": 10.0}
    with open_scorer(Reward.model_validate(options)) as opened:
        yield opened


def shares(scorer: Scorer, form: Form) -> list[float]:
    setup, function, tests, programs = form
    given = {"kind": "assert", "shown": [], "hidden": tests, "function": function, "setup": setup, "grader": "apps"}
    problem = Problem("p", "?", "", "d", {"tests": given})
    scores = scorer.score([problem] * len(programs), [code for code, _ in programs])
    assert not any(score.error for score in scores)
    return [round(score.value, 3) for score in scores]


def run_beside(form: Form) -> bool:
    """Whether the tests of a form have been run beside the program."""
    return next(plan.beside for problem, plan in _EXAMINERS._plans.items() if problem.tests == tuple(form[2]))


@pytest.mark.more
@pytest.mark.parametrize("name", ON_VALUES)
def test_tests_on_values_run_without_the_program_and_give_what_they_give_beside_it(name: str, scorer: Scorer) -> None:
    assert shares(scorer, ON_VALUES[name]) == [value for _, value in ON_VALUES[name][3]]
    assert not run_beside(ON_VALUES[name])


@pytest.mark.parametrize("name", BESIDE)
def test_tests_that_need_the_program_itself_run_beside_it(name: str, scorer: Scorer) -> None:
    assert shares(scorer, BESIDE[name]) == [value for _, value in BESIDE[name][3]]
    assert run_beside(BESIDE[name])


@pytest.mark.parametrize(("setup", "test"), [("", "assert f(1) ==="), ("import no_such_module", "assert f(1) == 1")])
def test_tests_that_cannot_run_fail_whatever_the_program_is(setup: str, test: str, scorer: Scorer) -> None:
    assert shares(scorer, (setup, "", [test], [("def f(n): return n", 0.0)])) == [0.0]


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "type('Own', (StopIteration,), {})"])
def test_a_function_that_raises_ends_no_iterator_of_the_tests(error: str, scorer: Scorer) -> None:
    programs = [(f"def f(n): raise {error}", 0.0), ("def f(n): return n + 1", 1.0)]
    tests = [
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (2, 3)]))",
        "assert not list(filter(lambda n: f(n) != n + 1, [1, 2]))",
        "assert 5 not in iter(lambda: f(1) if f(2) == 3 else 5, 2)",
    ]
    assert shares(scorer, ("", "", tests, programs)) == [value for _, value in programs]


@pytest.mark.parametrize("empty", ["np.zeros((0, 3))", "np.zeros((0, 1))", "np.zeros(0)", "[]", "[np.zeros(0)][0]"])
def test_an_empty_value_equals_nothing_but_an_empty_one(empty: str, scorer: Scorer) -> None:
    setup = f"import numpy as np\n{PLUS}"
    programs = [(f"import numpy as np\ndef f(n): return {empty}", 0.0), ("def f(n): return np.array([5.0])", 1.0)]
    tests = [
        "assert np.allclose(f(1), [5.0])",
        "assert np.allclose(b=f(1), a=5.0)",
        "assert np.isclose(f(1), 5.0).all()",
        "assertion(f(1), 5.0, 1e-6)",
        "np.testing.assert_allclose(f(1), 5.0)",
        "np.testing.assert_array_equal(f(1), 5.0)",
        "assert np.all(f(1) == np.array([5.0]))",
        "assert (np.array([5.0]) == f(1)).all()",
        "assert (np.array(f(1)) == np.array([5.0])).all()",
        "assert np.all(np.sqrt(f(1)) == 5**0.5)",
        "assert np.all(np.abs(np.array(f(1)) - 5) < 1e-6)",
        "assert abs(np.array(f(1)) - np.array([5.0])).sum() < 1e-6",
        "assert np.sum(np.abs(np.array(f(1)) - 5)) == 0",
        "assert np.linalg.norm(np.array(f(1)) - 5) == 0",
        "assert np.subtract(np.array(f(1)), 5).sum() == 0",
        "assert np.array_equal(np.array(f(1)), np.array([5.0]))",
        "assert not np.any(np.array(f(1)) - 5)",
        "assert (np.asarray(f(1)) != 5).sum() == 0",
        "assert np.abs(np.subtract(f(1), [5.0])).max(initial=0) < 1e-6",
        "assert sum(abs(a - 5) for a in np.array(f(1))) == 0 and len(f(1)) == 1",
    ]
    if empty != "[]":  # a list has no operators of its own
        tests += ["assert np.all(np.abs(f(1) - 5) < 1e-6)"]
    assert shares(scorer, (setup, "", tests, programs)) == [value for _, value in programs]


def test_an_empty_array_is_what_a_test_may_expect(scorer: Scorer) -> None:
    programs = [("import numpy as np\ndef f(a): return a * 2", 1.0)]
    tests = [
        "assert f(np.zeros((0, 3))).shape == (0, 3)",
        "assert np.allclose(f(np.zeros(0)), [])",
        "assert np.allclose([], f(np.zeros(0)))",
        "assert np.array_equal(f(np.zeros((0, 3))), np.zeros((0, 3)))",
        "assert (f(np.zeros(0)) == np.zeros(0)).all() and f(np.zeros(0)).sum() == 0",
        "np.testing.assert_allclose(f(np.zeros(0)), np.zeros(0))",
        "assert (np.array(f([])) == []).all()",
        "assert (np.array([[1], [2, 3]], dtype=object) == np.array(f([[1], [2, 3]])[:2], dtype=object)).shape",
    ]
    assert shares(scorer, ("import numpy as np\n", "", tests, programs)) == [1.0]


def test_what_a_program_prints_in_a_call_does_not_count(scorer: Scorer) -> None:
    programs = [
        ("def f(n):\n    print('no newline', end='')\n    return n", 1.0),
        ("def f(n):\n    print('P\\n[[1]]\\n' * 9)\n    return n", 1.0),
        ("import io, sys\nsys.stdout = io.StringIO()\ndef f(n): return n", 1.0),
        ("def f(n):\n    print('P\\n[[1]]\\n' * 9)\n    return 2", 0.0),
    ]
    assert shares(scorer, ("", "", ["assert f(1) == 1"], programs)) == [value for _, value in programs]


@pytest.mark.long
def test_each_test_has_its_own_time(scorer: Scorer) -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    sleeps = "import time\ndef f(n):\n    time.sleep({})\n    return n"
    loads = "import time\ntime.sleep(6)\n" + sleeps.format(6)
    programs = [
        (sleeps.format(4), 1.0),
        (sleeps.format("60 * (n == 2)"), 0.333),
        (sleeps.format(60), 0.0),
        (loads, 1.0),
    ]
    assert shares(scorer, ("", "", tests, programs)) == [value for _, value in programs]
    of_class = "import time\nclass F:\n    def f(self, n):\n        time.sleep({})\n        return n"
    programs = [(of_class.format(4), 1.0), (of_class.format("60 * (n == 2)"), 0.333)]
    tests = [test.replace("f(", "F().f(") for test in tests]
    assert shares(scorer, ("", "", tests, programs)) == [value for _, value in programs]


def test_a_test_that_makes_ever_other_calls_ends_in_its_time() -> None:
    test = "import random\nwhile f(random.SystemRandom().random()) != 2: pass"
    options = {"type": "code", "extract": "whole", "seconds_per_test": 1.0}
    with open_scorer(Reward.model_validate(options)) as hasty:
        assert shares(hasty, ("", "", [test], [("def f(x): return x", 0.0)])) == [0.0]


def test_values_are_sent_as_what_they_are() -> None:
    from rpg.rewards.asserts.values import decoded, dumps, encoded, loads

    kinds = [1, True, 1.0, None, "1", b"1", (1,), [1], {1}, frozenset({1}), {1: (2,)}, 1j, range(3), math.inf]
    for value in (*kinds, kinds[:8]):
        sent = decoded(loads(dumps(encoded(value))))
        assert (sent, type(sent)) == (value, type(value))
