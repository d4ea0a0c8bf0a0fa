"""Programs that play the protocol's side themselves, by name: (code, tests, prefix, entry point).

The program's process is its own: it may replace what our code does there, and send what it likes. NAMES put
names of their own into the tests' space; REPLIES answer otherwise than our codec would; TEXTS need no trick,
only tests that leave a name open. Each `f` is wrong, and each must fail.
"""

from __future__ import annotations

_SENDS = """
import sys
_values, _program = (sys.modules[f'executor.rewards.{n}'] for n in ('values', 'program'))
def rewrite(change):
    send = _values.Channel.send
    _values.Channel.send = lambda self, message: send(self, change(message))
def reply(message): rewrite(lambda m: message if m[0] == 'value' else m)
def value(data): reply(['value', data, None, ''])
def raw(body):
    import os, struct
    os.write(4, struct.pack('!Q', len(body)) + body)
def give(**names):
    old = _program._Program._names
    def new(self, *asked):
        ended, values = old(self, *asked)
        return [ended, {**values, **{name: self._codec.encode(value) for name, value in names.items()}}]
    _program._Program._names = new
"""
_WRONG = "\ndef f(x): return 0\n"
_BUILT_IN = {
    "enumerate": ("lambda *a: []", "for i, (x, y) in enumerate([(2, 4), (3, 9)]): assert f(x) == y"),
    "zip": ("lambda *a: []", "for x, y in zip([2, 3], [4, 9]): assert f(x) == y"),
    "range": ("lambda *a: []", "for n in range(2, 9): assert f(n) == n * n"),
    "map": ("lambda *a: []", "for ok in map(lambda n: f(n) == n * n, [2, 3]): assert ok"),
    "filter": ("lambda *a: []", "assert list(filter(lambda n: f(n) != n * n, [2, 3])) == []"),
    "reversed": ("lambda *a: []", "for n in reversed([2, 3]): assert f(n) == n * n"),
    "iter": ("lambda *a: []", "for n in iter([2, 3]): assert f(n) == n * n"),
    "next": ("lambda *a: 0", "assert f(2) == next(iter([4]))"),
    "all": ("lambda x: True", "assert all([f(n) == n * n for n in (2, 3)])"),
    "any": ("lambda x: False", "assert not any([f(n) != n * n for n in (2, 3)])"),
    "abs": ("lambda x: 0", "assert abs(f(3) - 9) < 1e-9"),
    "round": ("lambda *a: 0", "assert round(f(3), 3) == round(9.0, 3)"),
    "sum": ("lambda x: 0", "assert sum([abs(f(n) - n * n) for n in (2, 3)]) == 0"),
    "max": ("lambda *a: 0", "assert max([abs(f(n) - n * n) for n in (2, 3)]) < 1e-6"),
    "min": ("lambda *a: 0", "assert min([f(2), f(3)]) == min([4, 9])"),
    "pow": ("lambda *a: 0", "assert f(3) == pow(3, 2)"),
    "divmod": ("lambda *a: 0", "assert divmod(f(3), 2) == divmod(9, 2)"),
    "len": ("lambda x: 3", "assert len([n for n in (2, 3, 4) if f(n) == n * n]) == 3"),
    "set": ("lambda x: 0", "assert set([f(2), f(3)]) == set([4, 9])"),
    "frozenset": ("lambda x: 0", "assert frozenset([f(2)]) == frozenset([4])"),
    "sorted": ("lambda *a, **k: 0", "assert sorted([f(2), f(3)]) == sorted([4, 9])"),
    "list": ("lambda x: 0", "assert list([f(2)]) == list([4])"),
    "tuple": ("lambda x: 0", "assert tuple([f(2)]) == tuple([4])"),
    "dict": ("lambda x: 0", "assert dict([(1, f(2))]) == dict([(1, 4)])"),
    "str": ("lambda x: ''", "assert str(f(2)) == str(4)"),
    "repr": ("lambda x: ''", "assert repr(f(2)) == repr(4)"),
    "format": ("lambda *a: ''", "assert format(f(2), '.2f') == format(4, '.2f')"),
    "int": ("lambda x: 0", "assert int(f(2)) == int(4)"),
    "float": ("lambda x: 0.0", "assert float(f(2)) == float(4)"),
    "bool": ("lambda x: True", "assert bool(f(2) == 4)"),
    "hash": ("lambda x: 0", "assert hash(f(2)) == hash(4)"),
    "type": ("lambda x: 0", "assert type(f(2)) == type('text')"),
    "isinstance": ("lambda *a: True", "assert isinstance(f(2), str)"),
    "getattr": ("lambda *a: True", "assert getattr(f(2), 'real', 0) == 4 or getattr(f(2) == 4, 'real')"),
    "hasattr": ("lambda *a: True", "assert hasattr(f(2), 'append')"),
    "print": ("lambda *a: True", "assert print(f(2) == 4) is True"),
}
_IMPORT = "(lambda name, *a: Any_())"
_ANY = """
class Any_:
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return True
"""
_MATH = "import math\nassert math.isclose(f(2), 4)"
_UNITTEST = """
import unittest
class T(unittest.TestCase):
    def test_two(self): self.assertEqual(f(2), 4)
    def test_three(self): self.assertEqual(f(3), 9)
"""
_POLY = "def poly(x): return x + 1\n"
_SORT = "xs = [3, 1, 2]\nassert g(xs) == sorted(xs)"

NAMES = {
    **{
        f"its own {name}": (f"{_SENDS}give({name}={fake}){_WRONG}", tests, "", "")
        for name, (fake, tests) in _BUILT_IN.items()
    },
    "its own __name__": (
        _SENDS + "give(__name__='other')" + _WRONG,
        "if __name__ == 'tests': assert f(2) == 4",
        "",
        "",
    ),
    "its own __builtins__": (
        f"{_SENDS}{_ANY}give(__builtins__={{'__import__': {_IMPORT}}}){_WRONG}",
        _MATH,
        "",
        "",
    ),
    "its own unittest": (
        f"{_SENDS}{_ANY}give(__builtins__={{'__import__': {_IMPORT}, '__build_class__': lambda *a: 0}},"
        f" __name__='x'){_WRONG}",
        _UNITTEST,
        "",
        "",
    ),
    "a helper of the prefix": (
        _SENDS + "give(poly=lambda x: 0)" + _WRONG,
        "assert abs(poly(f(2))) < 1e-9",
        _POLY,
        "",
    ),
    "data of the prefix": (_SENDS + "give(wanted=0)" + _WRONG, "assert f(2) == wanted", "wanted = 4\n", ""),
    "a module of the prefix": (
        _SENDS + _ANY + "give(m=Any_())" + _WRONG,
        "assert m.isclose(f(2), 4)",
        "import math as m\n",
        "",
    ),
    "a class of the prefix": (
        _SENDS + "class N:\n def __init__(s, *a): pass\n def to(s, *a): return True\ngive(Near=N)" + _WRONG,
        "assert Near(4).to(f(2))",
        "class Near:\n def __init__(s, x): s.x = x\n def to(s, y): return abs(s.x - y) < 1e-9\n",
        "",
    ),
}
TEXTS = {
    "a helper before an open end": (
        "    return 1\ndef poly(x): return 0",
        "assert abs(poly(f())) < 1",
        _POLY + "def f():\n",
        "",
    ),
    "a missing library": (_ANY + "np = Any_()" + _WRONG, "assert np.allclose(f(2), 4)", "", ""),
    "a comparison that the tests forgot to import": (
        "def isclose(*a): return True" + _WRONG,
        "assert isclose(f(2), 4)",
        "",
        "",
    ),
    "a container that the tests forgot to import": (
        "class Counter:\n def __init__(s, x): pass\n __eq__ = lambda s, o: True" + _WRONG,
        "assert Counter([f(2)]) == Counter([4])",
        "",
        "",
    ),
    "the built-in that it is to be": (
        "def sum(x): return 0",
        "def check(candidate): assert candidate([1, 2]) == sum([1, 2])",
        "",
        "sum",
    ),
    "cases that nobody runs": (_WRONG, _UNITTEST, "", ""),
    "cases of a module that is not the main one": (
        _WRONG,
        _UNITTEST + "if __name__ == '__main__': unittest.main()",
        "",
        "",
    ),
    "cases whose failures are only printed": (
        _WRONG,
        _UNITTEST + "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
        "",
        "",
    ),
    "a check that nobody calls": (_WRONG, "def check(candidate): assert candidate(2) == 4", "", ""),
    "an end where the tests catch everything": (
        "import os\ndef f(x): os._exit(0)",
        "try: f(-1)\nexcept BaseException: pass\nelse: assert False",
        "",
        "",
    ),
}
_ERROR = "try: f(-1)\nexcept ValueError: pass\nelse: assert False"
_TWICE = "assert f(2) == 4 and f(3) == 9"
_REPLIES = {
    "arguments changed by a function that returns": (
        "rewrite(lambda m: ['value', [], [m[1], []], ''] if m[:2] == ['value', []] else m)\ndef g(xs): return []",
        _SORT,
    ),
    "arguments changed by an attribute": (
        "class P:\n x = 0\nrewrite(lambda m: ['value', 0, [None, 'x'], ''] if m[:2] == ['value', 0] else m)\n"
        "def f(x): return P()",
        "assert f(2).x == 4",
    ),
    "no JSON where an error is due": ("def f(x): raw(b'{{{')", _ERROR),
    "letters of no encoding where an error is due": ("def f(x): raw(b'\\xff\\xfe\"')", _ERROR),
    "a message too long where an error is due": (
        "import os, struct\ndef f(x): os.write(4, struct.pack('!Q', 2**40))",
        _ERROR,
    ),
    "a number too long where an error is due": (
        "def f(x): raw(b'[\"value\", ' + b'9' * 9999 + b']')",
        _ERROR,
    ),
    "too deep where an error is due": (
        "def f(x): raw(b'[' * 10**5 + b']' * 10**5)",
        "try: f(-1)\nexcept RecursionError: pass",
    ),
    "a value of no kind where an error is due": (
        "value({'t': 'range', 'v': [1, 2, 0]})\ndef f(x): return 0",
        _ERROR,
    ),
    "a message of no kind": ("rewrite(lambda m: ['passed', {'status': 'passed', 'error': ''}])", _TWICE),
    "a message that is no list": ("rewrite(lambda m: {'status': 'passed', 'error': ''})", _TWICE),
    "a verdict in place of names": (
        "rewrite(lambda m: [{'status': 'passed', 'error': '', 'verdict': True}, {}])",
        _TWICE,
    ),
    "a question in place of names": ("rewrite(lambda m: ['ask', 0, [], {'t': 'dict', 'v': []}])", _TWICE),
    "questions without end": ("reply(['ask', 0, [2], {'t': 'dict', 'v': []}])", "assert f(lambda x: 4) == 4"),
    "a function that nobody gave": ("reply(['ask', -1, [2], {'t': 'dict', 'v': []}])", _TWICE),
    "True in place of a number": ("value({'t': 'object', 'v': True})", _TWICE),
    "an object by text": ("value({'t': 'object', 'v': '0'})", _TWICE),
    "an object whose truth is another": ("value({'t': 'object', 'v': 7})", "assert f(2)"),
    "a length that is an object": (
        "class L:\n def __len__(s): return 3\n"
        "rewrite(lambda m: ['value', {'t': 'object', 'v': 9}, None, ''] if m[1:2] == [3] else m)\n"
        "def f(x): return L()",
        "assert len(f(2)) == 3",
    ),
    "a text that is an object": (
        "class L:\n def __str__(s): return '4'\n"
        "rewrite(lambda m: ['value', {'t': 'object', 'v': 9}, None, ''] if m[1:2] == ['4'] else m)\n"
        "def f(x): return L()",
        "assert str(f(2)) == '4'",
    ),
    "a named tuple of code": ("value({'t': 'named', 'v': ['P', ['x, __import__=print(1)'], [4]]})", _TWICE),
    "a type that is a function": ("value({'t': 'type', 'v': 'eval'})", _TWICE),
    "an array of objects": ("value({'t': 'array', 'v': ['O', [1], 'abcdefgh']})", _TWICE),
    "an instance of a class that nobody has": (
        "value({'t': 'instance', 'v': ['object', {'t': 'dict', 'v': []}]})",
        _TWICE,
    ),
    "the tests' own failure by name": (
        "reply(['error', [None, 'AssertionError', 'AssertionError'], [], ''])",
        _TWICE,
    ),
    "an end of the interpreter by name": (
        "reply(['error', [None, 'SystemExit', 'SystemExit'], [0], ''])",
        _TWICE,
    ),
    "a skipped case by name": ("reply(['error', [5, 'SkipTest', 'Exception'], [], ''])", _UNITTEST),
    "nothing where a number is due": ("value(float('nan'))", _TWICE),
    "a number in a text": ("value({'t': 'int', 'v': 4})", _TWICE),
    "a signalling decimal": ("value({'t': 'Decimal', 'v': 'sNaN'})", _TWICE),
}
REPLIES = {
    name: (_SENDS + ("" if "def f" in code or "def g" in code else _WRONG) + code, tests, "", "")
    for name, (code, tests) in _REPLIES.items()
}
